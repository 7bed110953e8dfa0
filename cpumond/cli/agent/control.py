"""Commands that talk to the running agent: ``status``, ``top``, ``explain``, ``job``, ``pin``, ``unpin``.

Their output is made in ``tables`` and ``explain``.
"""

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

from cpumond.agent.config import parse_layer, read_assignments
from cpumond.cli.agent.client import AgentClient, agent_options, find_socket, is_given, socket_option
from cpumond.cli.agent.explain import draw_explain
from cpumond.cli.options import CoresType, DurationType, config_option, given, json_option, quote_name, set_option
from cpumond.cli.output import is_terminal, print_json, print_text, show_frames, terminal_width, use_colour, warn
from cpumond.cli.render.tables import SORTS, Sort, describe_pin, draw_registered, draw_status, draw_top, is_only_watched
from cpumond.cli.scheduler.client import connection_flags
from cpumond.cli.scheduler.cluster_top import SORTS as CLUSTER_SORT_KEYS
from cpumond.cli.scheduler.cluster_top import print_cluster
from cpumond.cli.scheduler.finding import TREE
from cpumond.cli.scheduler.http_client import make_client
from cpumond.core.answers import AddedJob, ExplainAnswer, JobAnswer, RegisteredList, StatusAnswer
from cpumond.core.decode import decode_json
from cpumond.core.errors import AccessError, CpumondError, UsageError
from cpumond.core.measures import count_cores, format_cores
from cpumond.core.words import escape, escape_json
from cpumond.monitor.model import MODES

CLUSTER_SORTS = tuple(CLUSTER_SORT_KEYS.values())
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 3600.0


@click.command("status", epilog="Example: cpumond status --json | jq .totals")
@agent_options
@json_option
def status_command(client: AgentClient) -> None:
    """Print one line for each job of the running agent, sums, and anything that needs an operator.

    Numbers are cores: the job's request, its limit now, its usage in the last check, and its smoothed usage.
    """
    answer = client.fetch(client.status(), StatusAnswer, "jobs")
    click.echo(draw_status(answer, terminal_width(), use_colour()))


@click.command("top", epilog="Example: cpumond top --sort usage --interval 2s")
@config_option
@socket_option
@connection_flags
@click.option(
    "--cluster", is_flag=True, help="Show the scheduler's pools, operations and nodes; --scheduler implies it."
)
@click.option("--tree", metavar="TREE", type=TREE, help="With --cluster; default: the scheduler's default tree.")
@click.option(
    "--interval",
    "interval_s",
    type=DurationType(MIN_INTERVAL_S, MAX_INTERVAL_S),
    help='Time between two frames, for example "2s"; default: the agent\'s check period.',
)
@click.option(
    "--sort",
    type=click.Choice(list(dict.fromkeys([*SORTS, *CLUSTER_SORTS]))),
    help="Column to sort by, largest first; of jobs, or with --cluster (used: allotted).  [default: reclaimed, used]",
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
    Without a terminal it prints one frame.
    """
    source = click.get_current_context().get_parameter_source("url")
    is_of_cluster = cluster or source is ParameterSource.COMMANDLINE
    sorts: Collection[str] = CLUSTER_SORTS if is_of_cluster else SORTS
    if sort is not None and sort not in sorts:
        raise UsageError(
            f"--sort {sort}: expected {', '.join(sorts)} {'with' if is_of_cluster else 'without'} --cluster"
        )
    with contextlib.suppress(KeyboardInterrupt):
        if is_of_cluster:
            scheduler = make_client(connection, as_json=as_json)
            print_cluster(scheduler, tree, interval_s, sort or "used", once)
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


@click.command("explain", epilog="Example: cpumond explain steady-low --last 20")
@click.argument("job")
@agent_options
@click.option(
    "--last", type=click.IntRange(0), default=10, show_default=True, metavar="N", help="Number of decisions to show."
)
@click.option("--all", "show_all", is_flag=True, help="Show all decisions that the agent remembers (up to 100).")
@json_option
def explain_command(client: AgentClient, job: str, last: int, show_all: bool) -> None:
    """Explain in words and numbers why the limit of JOB has its value.

    JOB is a job's id or its cgroup. The first sentences are the answer. Below them are the reasons: the votes of the
    last window, the result of the next check, the options in force and the last decisions.
    """
    answer = client.fetch(client.request("GET", f"/v1/jobs/{quote_name(job)}/explain"), ExplainAnswer)
    click.echo(draw_explain(answer, None if show_all else last, terminal_width(), use_colour()))


@click.group("job", epilog="Example: cpumond job add --cgroup jobs/job-1 --cpu-limit 4 --mode reclaim")
def job_command() -> None:
    """Add, remove and list jobs of the running agent. These jobs survive its restart."""


@job_command.command(
    "add", epilog="Example: cpumond job add --cgroup jobs/job-1 --cpu-limit 4 --set check_period=500ms"
)
@agent_options
@click.option(
    "--cgroup", required=True, metavar="PATH", help="Path relative to the hierarchy of the cpu controller, or absolute."
)
@click.option(
    "--cpu-limit",
    type=CoresType(),
    help="The job's CPU request; default: the quota found on the cgroup, else the CPUs it may use.",
)
@click.option("--id", "job_id", metavar="ID", help="Default: the last component of the path.")
@click.option("--operation", metavar="OP", help="The operation the job belongs to.")
@click.option("--mode", type=click.Choice(MODES), help="Default: the mode in the configuration.")
@set_option
@json_option
def job_add_command(
    client: AgentClient,
    cgroup: str,
    cpu_limit: float | None,
    job_id: str | None,
    operation: str | None,
    mode: str | None,
    assignments: tuple[str, ...],
) -> None:
    """Manage a cgroup as a job from now on.

    The job stays over restarts of the agent. An id that is given again replaces the earlier settings.
    """
    layer = read_layer(assignments, mode)
    body = given({"cgroup": cgroup, "cpu_limit": cpu_limit, "job_id": job_id, "operation_id": operation})
    content = client.request("POST", "/v1/registered", {**body, "job_cpu_monitor": layer})
    job = client.fetch(content, AddedJob)
    hint = "; its limit is not changed; --mode reclaim changes that" if is_only_watched(job) else ""
    print_text(
        f"job {escape(job.job_id)} ({job.cgroup}): mode {job.mode}, {count_cores(job.cpu_limit)} ordered, "
        f"limit {format_cores(job.current_cpu_limit)}{hint}"
    )
    for warning in job.warnings:
        warn(warning)


@job_command.command("remove", epilog="Example: cpumond job remove job-1")
@click.argument("job")
@agent_options
@json_option
def job_remove_command(client: AgentClient, job: str) -> None:
    """Stop managing JOB and restore the cgroup's original limit.

    JOB must be an id that was added with `cpumond job add`; jobs of the configuration's sources stay.
    """
    content = client.request("DELETE", f"/v1/registered/{quote_name(job)}")
    client.fetch(content, dict[str, object])
    print_text(
        f"job {escape(job)} is removed; its cgroup has its original limit again, unless a source of the "
        "configuration also finds it"
    )


@job_command.command("list", epilog="Example: cpumond job list --json")
@agent_options
@json_option
def job_list_command(client: AgentClient) -> None:
    """List the jobs that were added with `cpumond job add`.

    `cpumond status` shows these and the jobs of the configuration's sources.
    """
    jobs = client.fetch(client.request("GET", "/v1/registered"), RegisteredList).jobs
    if jobs:
        click.echo(draw_registered(jobs, terminal_width(), use_colour()))
    else:
        print_text("no job was added over the socket; `cpumond status` shows those of the configuration")


@click.command("pin", epilog="Example: cpumond pin steady-low --cpu-limit 4 --for 1h")
@click.argument("job")
@agent_options
@click.option("--cpu-limit", type=CoresType(), help="Default: the job's whole request.")
@click.option("--for", "ttl_s", type=DurationType(1.0), help='For example "1h"; default: until `cpumond unpin`.')
@json_option
def pin_command(client: AgentClient, job: str, cpu_limit: float | None, ttl_s: float | None) -> None:
    """Hold the limit of JOB, an id or a cgroup, until `cpumond unpin` or for a given time."""
    body = given({"cpu_limit": cpu_limit, "ttl_s": ttl_s})
    content = client.request("PUT", f"/v1/jobs/{quote_name(job)}/pin", body)
    print_text(describe_pin(client.fetch(content, JobAnswer), ttl_s))


@click.command("unpin", epilog="Example: cpumond unpin steady-low")
@click.argument("job")
@agent_options
@json_option
def unpin_command(client: AgentClient, job: str) -> None:
    """Return JOB to the monitor when it is pinned, contested, or overridden by another program's write."""
    content = client.request("DELETE", f"/v1/jobs/{quote_name(job)}/pin")
    answer = client.fetch(content, JobAnswer)
    print_text(
        f"job {escape(answer.job_id)} is managed by the monitor again (mode {answer.mode}); "
        f"its limit is {count_cores(answer.current_cpu_limit)}"
    )


def read_layer(assignments: tuple[str, ...], mode: str | None) -> dict[str, object]:
    """Return the ``job-cpu-monitor`` section to send, checked here but in the user's own notation.

    Parsed durations are in seconds, which the agent would read as milliseconds. Raises ConfigError, UsageError.
    """
    layer = read_assignments(assignments)
    checked = parse_layer(layer, "--set", "")
    if mode is not None:
        if "mode" in checked:
            raise UsageError("--mode and --set mode=... both set the mode; use one of them")
        layer["mode"] = mode
    return layer


def follow(client: AgentClient, sort: Sort, interval_s: float) -> None:
    """Show a frame every ``interval_s`` until KeyboardInterrupt, which SIGTERM raises, too: the terminal gets its
    cursor back.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if is_terminal() and not client.as_json:
        show_frames(lambda: read_frame(client, sort, *shutil.get_terminal_size()), interval_s)
    while True:
        click.echo(read_line(client, sort) if client.as_json else read_frame(client, sort, None, None) + "\n")
        time.sleep(interval_s)


def read_frame(client: AgentClient, sort: Sort, width: int | None, height: int | None) -> str:
    """Return one frame, or a sentence where no agent answers. Raises AccessError."""
    try:
        answer = client.decode(client.status(), StatusAnswer)
    except AccessError:
        raise
    except CpumondError as error:
        return f"agent not running, retrying\n{error}"
    return draw_top(answer, sort, width, use_colour(), height)


def read_line(client: AgentClient, sort: Sort) -> str:
    """Return one frame as a line of JSON, or an object with ``error`` where no agent answers. Raises AccessError."""
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
