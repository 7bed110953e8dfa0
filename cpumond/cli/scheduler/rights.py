"""The command ``can``: who may do what on a running scheduler, and which rule decides it."""

from __future__ import annotations

from typing import Any, Final

import click

from cpumond.api.permissions import Can
from cpumond.cli.options import given
from cpumond.cli.output import print_json
from cpumond.cli.scheduler.client import scheduler_options, tree_option
from cpumond.cli.scheduler.http_client import SchedulerClient

EXIT_NO: Final = 1


@click.command("can", epilog="Example: cpumond can alice start research --why")
@click.argument("user")
@click.argument("action")
@click.argument("object")
@tree_option
@click.option(
    "--group", "groups", metavar="GROUP", multiple=True, help="Assume that the user is in this group; may be repeated."
)
@click.option("--why", is_flag=True, help="Also print the deciding rule.")
@scheduler_options
def can_command(client: SchedulerClient, /, why: bool, groups: tuple[str, ...], **query: Any) -> None:
    """Check whether USER may do something; exit code 0: yes, 1: no.

    ACTION is a permission (use, modify_children, write, administer, read, manage, read_secrets) or a word of the
    command line (start, abort, log ...). OBJECT is a pool, tree:NAME, an operation by id or *alias, or a path //sys/...
    """
    content = client.request("GET", "/can", query=given({**query, "groups": ",".join(groups) or None}))
    answer = client.decode(content, Can)
    if client.as_json:
        print_json(content)
    else:
        click.echo(("yes" if answer.allowed else "no") + (f": {answer.because}" if why else ""))
    click.get_current_context().exit(0 if answer.allowed else EXIT_NO)
