"""``cpumond top``: live tables of the running agent, or of the scheduler."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Collection
from typing import cast

import click
import msgspec
from click.core import ParameterSource

from cpumond.cli.agent.client import AgentClient, find_socket, is_given, socket_option
from cpumond.cli.options import DurationType, config_option, json_option
from cpumond.cli.output import draw_frames, is_terminal, print_json, terminal_width, use_colour
from cpumond.cli.render.tables import SORTS, Sort, draw_top
from cpumond.cli.scheduler.client import connection_flags
from cpumond.cli.scheduler.cluster_top import SORTS as CLUSTER_SORT_KEYS
from cpumond.cli.scheduler.cluster_top import print_cluster
from cpumond.cli.scheduler.finding import TREE
from cpumond.cli.scheduler.http_client import make_client
from cpumond.core.answers import JobAnswer, StatusAnswer
from cpumond.core.decode import decode_json
from cpumond.core.errors import AccessError, CpumondError, UsageError
from cpumond.core.words import escape_json

CLUSTER_SORTS = tuple(CLUSTER_SORT_KEYS.values())
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 3600.0


@click.command("top", epilog="Example: cpumond top --sort usage --interval 2s")
@config_option
@socket_option
@connection_flags
@click.option(
    "--cluster", is_flag=True, help="Show the scheduler's pools, operations and nodes; --scheduler implies it."
)
@click.option("--tree", metavar="TREE", type=TREE, help="With --cluster; default: the scheduler's default tree.")
@click.option("--interval", "interval_s", type=DurationType(MIN_INTERVAL_S, MAX_INTERVAL_S),
              help='Time between two frames, for example "2s"; default: the agent\'s check period.')  # fmt: skip
@click.option(
    "--sort",
    type=click.Choice(list(dict.fromkeys([*SORTS, *CLUSTER_SORTS]))),
    help="Column to sort by, largest first; of jobs, or with --cluster (used: allocated).  [default: reclaimed, used]",
)
@click.option("--once", is_flag=True, help="Print one frame and end.")
@json_option
def top_command(
    config_path: str, socket_path: str | None, cluster: bool, tree: str | None, interval_s: float | None,
    sort: str | None, once: bool, as_json: bool, **connection: str | None,
) -> None:  # fmt: skip
    """Show a live table of the running agent, or with --cluster of the scheduler; Ctrl-C ends it.

    While the agent restarts, the table waits for it. In a pipe it prints frame after frame, with --json one line per
    frame.

    With --cluster: keys p, o, n show pools, operations, nodes; u, d, s, a sort by usage, demand, share, name; q quits.
    Without a terminal it prints one frame."""
    source = click.get_current_context().get_parameter_source("url")
    is_of_cluster = cluster or source is ParameterSource.COMMANDLINE
    sorts: Collection[str] = CLUSTER_SORTS if is_of_cluster else SORTS
    if sort is not None and sort not in sorts:
        raise UsageError(
            f"--sort {sort}: expected {', '.join(sorts)} {'with' if is_of_cluster else 'without'} --cluster"
        )
    with contextlib.suppress(KeyboardInterrupt):
        if is_of_cluster:
            print_cluster(make_client(connection, as_json=as_json), tree, interval_s, sort or "used", once)
            return
        client = AgentClient(find_socket(config_path, is_given("config_path"), socket_path), as_json)
        print_agent(client, interval_s, cast("Sort", sort or "reclaimed"), once)


def print_agent(client: AgentClient, interval_s: float | None, sort: Sort, once: bool) -> None:
    """Print one frame, or show frames until KeyboardInterrupt."""
    try:
        content = client.status()
        answer = client.decode(content, StatusAnswer)
        if once and client.as_json:
            print_json(msgspec.json.encode(sort_answer(content, sort)))
        elif once:
            click.echo(draw_top(answer, sort, terminal_width(), use_colour(), None))
        else:
            follow(client, sort, interval_s or max(answer.check_period_s, MIN_INTERVAL_S))
    except KeyboardInterrupt:
        return


def follow(client: AgentClient, sort: Sort, interval_s: float) -> None:
    """Show a frame every ``interval_s`` until KeyboardInterrupt; SIGTERM raises it, too, to restore the cursor."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if is_terminal() and not client.as_json:
        draw_frames(lambda: read_frame(client, sort, *shutil.get_terminal_size()), interval_s)
    while True:
        click.echo(read_line(client, sort) if client.as_json else read_frame(client, sort, None, None) + "\n")
        time.sleep(interval_s)


def read_frame(client: AgentClient, sort: Sort, width: int | None, height: int | None) -> str:
    """Return one frame, or a sentence if no agent answers. Raises AccessError."""
    try:
        answer = client.decode(client.status(), StatusAnswer)
    except AccessError:
        raise
    except CpumondError as error:
        return f"agent not running, retrying\n{error}"
    return draw_top(answer, sort, width, use_colour(), height)


def read_line(client: AgentClient, sort: Sort) -> str:
    """Return one frame as a line of JSON, or an object with ``error`` if no agent answers. Raises AccessError."""
    try:
        content = client.status()
        client.decode(content, StatusAnswer)
        return escape_json(msgspec.json.encode(sort_answer(content, sort)))
    except AccessError:
        raise
    except CpumondError as error:
        return msgspec.json.encode({"error": str(error), "exit_code": error.exit_code}).decode()


def sort_answer(content: bytes, sort: Sort) -> dict[str, object]:
    """Return the answer of ``/v1/status`` with its jobs sorted as in the table."""
    answer = decode_json(content, dict[str, object])
    jobs = msgspec.convert(answer["jobs"], list[dict[str, object]])
    answer["jobs"] = sorted(jobs, key=lambda job: SORTS[sort](msgspec.convert(job, JobAnswer)))
    return answer
