"""Options with which commands reach the scheduler and choose their output, and helpers for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, TypeVar

import click

from cpumond.cli.output import combine, output_options, repeat
from cpumond.cli.scheduler.finding import TREE, find_parameters
from cpumond.cli.scheduler.http_client import DEFAULT_SCHEDULER, DEFAULT_TOKEN_FILE, SchedulerClient, make_client
from cpumond.core.errors import UsageError

WATCH_S: Final = 2.0
P = ParamSpec("P")
Result = TypeVar("Result")


connection_flags = combine(
    click.option(
        "--scheduler",
        "url",
        metavar="URL",
        envvar="CPUMOND_SCHEDULER",
        default=DEFAULT_SCHEDULER,
        show_default=True,
        help="Address of the scheduler, http://, https:// or unix:/path; for several schedulers on one store all "
        "addresses, separated by commas: the leader is found.",
    ),
    click.option("--token", metavar="TOKEN", envvar="CPUMOND_TOKEN",
                 help="Other users can see it in the list of processes; use a file to avoid that."),
    click.option("--token-file", metavar="FILE", envvar="CPUMOND_TOKEN_FILE",
                 help=f"File with the token; default: {DEFAULT_TOKEN_FILE}, if that exists."),
    click.option(
        "--ca-file",
        metavar="FILE",
        default="",
        envvar="CPUMOND_CA_FILE",
        help="Certificate (PEM) of the authority that signed the scheduler's; default: those this system trusts.",
    ),
)  # fmt: skip


def connection_options(command: Callable[Concatenate[SchedulerClient, P], Result]) -> Callable[..., Result]:
    """Give a command ``--scheduler``, ``--token`` and ``--token-file``, and call it with a client made from them."""

    @connection_flags
    @functools.wraps(command)
    def with_client(
        url: str, token: str | None, token_file: str | None, ca_file: str, *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        client = make_client({"url": url, "token": token, "token_file": token_file, "ca_file": ca_file})
        find_parameters(client, click.get_current_context().command, kwargs)
        return command(client, *args, **kwargs)

    return with_client


def scheduler_options(command: Callable[Concatenate[SchedulerClient, P], Result]) -> Callable[..., Result]:
    """Give a command ``connection_options`` and ``output_options``; the latter set ``as_json`` of the client."""

    @connection_options
    @output_options("Print the scheduler's answer as JSON.")
    @functools.wraps(command)
    def with_json(client: SchedulerClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        client.as_json = bool(kwargs.pop("as_json"))
        return command(client, *args, **kwargs)

    return with_json


def watched(command: Callable[Concatenate[SchedulerClient, P], None]) -> Callable[..., None]:
    """Give ``--watch`` to a command that prints a list."""

    @click.option("--watch", "watches", is_flag=True, help=f"Show it again every {WATCH_S:g} s, until Ctrl-C.")
    @functools.wraps(command)
    def with_watch(client: SchedulerClient, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not kwargs.pop("watches"):
            command(client, *args, **kwargs)
        elif client.as_json:
            raise UsageError("--watch shows a table; leave --json and --output out")
        else:
            repeat(lambda: command(client, *args, **kwargs), WATCH_S)

    return with_watch


tree_option = click.option("--tree", metavar="TREE", type=TREE, help="Default: the scheduler's default tree.")
unset_option = click.option(
    "--unset", "unset", metavar="KEY", multiple=True, help="Remove an attribute, as KEY= does; may be repeated."
)


def _take_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.params["limit"] = None


def limit_options(default: int) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Give a command ``--limit`` and ``--all``; its parameter ``limit`` is None for all."""
    return combine(
        click.option("--limit", type=click.IntRange(1), default=default, show_default=True, is_eager=True),
        click.option(
            "--all", is_flag=True, expose_value=False, callback=_take_all, help="Show all of them, without a limit."
        ),
    )  # fmt: skip


why_option = click.option("--why", metavar="TEXT", default="", help="A reason for other users, and for the audit log.")
