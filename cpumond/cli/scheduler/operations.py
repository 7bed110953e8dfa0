"""The command ``operation``: start operations on a running scheduler, look at them, steer them, ask why."""

from __future__ import annotations

import re
import sys
import time
from typing import Any, Final

import click

from cpumond.api.json.openapi import DEFAULT_TAIL_BYTES, TOTAL_BYTES
from cpumond.api.views import Done, JobList, JobView, OperationDetails, OperationInTree, OperationList, OperationView
from cpumond.api.yt.formats import to_json_tree
from cpumond.api.yt.values import YtError
from cpumond.api.yt.yson import read_yson
from cpumond.cli.agent.explain import draw_explain
from cpumond.cli.options import CoresType, DurationType, given, quote_name, terminal_width, use_colour
from cpumond.cli.render.tables import Cell, show_title, warn
from cpumond.cli.scheduler.client import (
    SchedulerClient,
    SchedulerRefusedError,
    connection_options,
    print_fields,
    print_table,
    read_attributes,
    scheduler_options,
)
from cpumond.cli.scheduler.plans import show_limits, show_value
from cpumond.cli.scheduler.pools import show_amounts, show_cpu_time, show_state
from cpumond.core.answers import ExplainAnswer
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import UsageError
from cpumond.core.measures import format_span
from cpumond.core.wire import MAX_LOG_BYTES
from cpumond.core.words import count, show_cores, show_name, show_number, show_time
from cpumond.fairshare.explain import show_percent
from cpumond.scheduler.why.operation import OperationAnswer

STATES: Final = ("pending", "running", "completed", "failed", "aborted")
JOB_STATES: Final = ("starting", "running", "stopping", "completed", "failed", "aborted", "lost")
STYLES: Final = {"failed": "red", "aborted": "yellow", "lost": "red", "pending": "yellow", "completed": "dim"}
TASK: Final = "main"
_SIZE: Final = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGTP]?)i?B?", re.IGNORECASE)


class BytesType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A number of bytes, or one with K, M, G, T, P (powers of 1024)."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"expected bytes, such as 2G or 536870912, got {value!r}.", param, ctx)
        power = " KMGTP".index(match[2].upper() or " ")
        return int(float(match[1]) * 2.0 ** (10 * power))


@click.group("operation", epilog="Example: cpumond operation start --pool research --job-count 4 -- sleep 60")
def operation_command() -> None:
    """Start, show, stop and change operations; ask why one waits, starves or lost jobs."""


def operation_path(operation: str, action: str = "") -> str:
    path = f"/operations/{quote_name(operation)}"
    return f"{path}/{action}" if action else path


@operation_command.command(
    "start", epilog="Example: cpumond operation start --pool research --job-count 8 --cpu-limit 2 -- python train.py"
)
@click.option("--pool", metavar="POOL", help="Default: a pool of your user's name.")
@click.option("--tree", "trees", metavar="TREE", multiple=True, help="Default: the default tree; may be repeated.")
@click.option("--job-count", type=click.IntRange(1, 100_000), default=1, show_default=True)
@click.option("--cpu-limit", type=CoresType(), default=1.0, show_default=True)
@click.option("--memory", type=BytesType(), help="Such as 2G; default: none is ordered.")
@click.option("--weight", type=float, metavar="WEIGHT", help="Among the operations of the pool; default: 1.")
@click.option("--title", metavar="TEXT")
@click.option("--gang", "is_gang", is_flag=True, help="All of its jobs start together or none; so does its fair share.")
@click.option("--min-run-time", type=DurationType(0.0, 1e12), help="No job is preempted before it has run so long.")
@click.option("--checkpoints", is_flag=True, help="Jobs touch $CPUMOND_CHECKPOINT when they have saved their work.")
@click.option(
    "--job-cpu-monitor",
    "monitor",
    metavar="YSON|JSON",
    help="Such as '{min_cpu_limit=0.1;enable_cpu_reclaim=%true}' or '{\"mode\": \"shadow\"}'.",
)
@click.option("--env", "variables", metavar="NAME=VALUE", multiple=True, help="For the jobs; may be repeated.")
@click.option(
    "--working-directory", metavar="DIR", help="Absolute, on the nodes; default: a fresh one of each job's own."
)
@click.option("--interruptible", is_flag=True, help="A job that ends well when it is interrupted has done its work.")
@click.option("--time-limit", type=DurationType(0.001, 1e12), help="The operation fails after it.")
@click.option("--job-time-limit", type=DurationType(0.001, 1e12), help="A job that runs for longer has failed.")
@click.option("--set", "assignments", metavar="KEY=VALUE", multiple=True, help="Any other option of a specification.")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND [ARGS]...")
@scheduler_options
def operation_start_command(
    client: SchedulerClient,
    pool: str | None,
    trees: tuple[str, ...],
    job_count: int,
    cpu_limit: float,
    memory: int | None,
    weight: float | None,
    title: str | None,
    is_gang: bool,
    min_run_time: float | None,
    checkpoints: bool,
    monitor: str | None,
    variables: tuple[str, ...],
    working_directory: str | None,
    interruptible: bool,
    time_limit: float | None,
    job_time_limit: float | None,
    assignments: tuple[str, ...],
    command: tuple[str, ...],
) -> None:
    """Start an operation of equal jobs that run COMMAND, and print its id.

    Each job orders --cpu-limit cores and --memory bytes of one node.
    """
    task = {
        "job_count": job_count,
        "cpu_limit": cpu_limit,
        "memory_limit": memory,
        "command": list(command),
        "environment": _read_variables(variables) or None,
        "working_directory": working_directory,
        "interruptible": interruptible or None,
        "checkpoints": checkpoints or None,
        "job_time_limit": None if job_time_limit is None else job_time_limit * 1e3,
    }
    options = {
        "pool": pool,
        "pool_trees": list(trees) or None,
        "weight": weight,
        "title": title,
        "is_gang": is_gang or None,
        "min_run_time": None if min_run_time is None else min_run_time * 1e3,
        "time_limit": None if time_limit is None else time_limit * 1e3,
        "job_cpu_monitor": None if monitor is None else _read_monitor(monitor),
    }
    more = read_attributes(assignments)
    if "tasks" in more:
        raise UsageError("--set tasks: the one task here is made of the other options; send several with `yt vanilla`")
    spec = {**more, **given(options), "tasks": {TASK: given(task)}}
    content = client.request("POST", "/operations", {"spec": spec})
    client.tell_done(content, show_name(client.decode(content, Done).id))


def _read_variables(assignments: tuple[str, ...]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise UsageError(f"--env: expected NAME=VALUE, for example THREADS=4, got {assignment!r}")
        variables[name] = value
    return variables


def _read_monitor(text: str) -> dict[str, Any]:
    """The section ``job_cpu_monitor``: JSON, or YSON as the documents write it. Raises UsageError."""
    try:
        return decode_json(text, dict[str, Any])
    except ContentError:
        pass
    expected = (
        "--job-cpu-monitor: expected a map in YSON or JSON, for example "
        '{min_cpu_limit=0.1;enable_cpu_reclaim=%true} or {"mode": "shadow"}'
    )
    try:
        value = to_json_tree(read_yson(text.encode("utf-8", "surrogateescape")), encode_utf8=False)
    except YtError as error:
        raise UsageError(f"{expected}: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(expected)
    return value


@operation_command.command("list", epilog="Example: cpumond operation list --state running --pool research")
@click.option("--state", type=click.Choice(STATES))
@click.option("--pool", metavar="POOL")
@click.option("--tree", metavar="TREE")
@click.option("--user", metavar="USER")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@scheduler_options
def operation_list_command(
    client: SchedulerClient, state: str | None, pool: str | None, tree: str | None, user: str | None, limit: int
) -> None:
    """One line per operation and tree, the newest first. Numbers are cores."""
    query = given({"state": state, "pool": pool, "tree": tree, "user": user, "limit": limit})
    answer = client.show("/operations", OperationList, query)
    if not answer.operations:
        click.echo("no operation fits")
        return
    headings = (
        "operation", "state", "user", "pool", ">jobs", ">done", ">share", ">used", ">demand", ">age", "title", "",
    )  # fmt: skip
    rows = [row for each in answer.operations for row in _operation_rows(each, time.time())]
    print_table(headings, rows)
    if answer.total > len(answer.operations):
        warn(f"{answer.total - len(answer.operations)} older ones are not shown; raise --limit, or filter")


def _operation_rows(operation: OperationView, now: float) -> list[list[Cell]]:
    jobs = operation.jobs
    state = operation.state + (", suspended" if operation.suspended else "")
    rows: list[list[Cell]] = []
    for tree, pool in operation.pools.items():
        part = operation.trees.get(tree)
        where = pool if len(operation.pools) == 1 else f"{tree}: {pool}"
        age_s = (operation.finish_time or now) - operation.start_time
        rows.append(
            [
                show_name(operation.id),
                (state, STYLES.get(operation.state, "")),
                show_name(operation.user),
                show_name(where),
                str(jobs.active if part is None else part.job_count),
                f"{jobs.completed}/{jobs.total}",
                "-" if part is None else show_cores(part.fair_share["cpu"]),
                "-" if part is None else show_cores(part.usage["cpu"]),
                "-" if part is None else show_cores(part.demand["cpu"]),
                format_span(age_s),
                show_title(operation.title),
                _describe_part(part),
            ]
        )
    return rows


def _describe_part(part: OperationInTree | None) -> Cell:
    if part is None:
        return ""
    if part.queue_place is not None:
        return (f"number {part.queue_place} in the queue", "yellow")
    return show_state(part.starvation_status, part.starves_in_s)


@operation_command.command("show", epilog="Example: cpumond operation show 1a-2b-3c-4d")
@click.argument("operation")
@click.option("--all", "show_all", is_flag=True, help="All that the scheduler computes of it, by the documents' names.")
@scheduler_options
def operation_show_command(client: SchedulerClient, operation: str, show_all: bool) -> None:
    """One operation: OPERATION is an id, or *ALIAS."""
    if show_all:
        for name, attributes in client.show(operation_path(operation, "orchid"), dict[str, dict[str, Any]]).items():
            fields = [(show_name(key), show_name(show_value(value))) for key, value in attributes.items()]
            print_fields([("tree", show_name(name)), *fields])
        return
    answer = client.show(operation_path(operation), OperationDetails)
    jobs = answer.jobs
    ended = {"failed": jobs.failed, "aborted": jobs.aborted, "lost": jobs.lost}
    counts = [f"{jobs.completed} of {jobs.total} completed", f"{jobs.active} active", f"{jobs.pending} to be started"]
    counts += [f"{number} {word}" for word, number in ended.items() if number]
    fields = [
        ("operation", show_name(answer.id)),
        ("title", show_name(answer.title)),
        ("alias", show_name(answer.alias)),
        ("user", show_name(answer.user)),
        ("state", answer.state + (", suspended" if answer.suspended else "")),
        ("error", show_name(answer.error)),
        ("time limit", "" if answer.time_limit is None else format_span(answer.time_limit / 1e3)),
        ("started", show_time(answer.start_time)),
        ("ended", "" if answer.finish_time is None else show_time(answer.finish_time)),
        ("jobs", ", ".join(counts)),
        ("cpu time", show_cpu_time(answer.cpu_seconds, answer.reclaimed_cpu_seconds)),
        ("lost", f"{answer.lost_core_seconds / 3600:.3g} core-hours" if answer.lost_core_seconds else ""),
        ("gang", "yes" if answer.is_gang else ""),
    ]
    for task in answer.tasks:
        words = task.command if isinstance(task.command, str) else " ".join(task.command)
        orders = {"cpu": task.cpu_limit, "memory": float(task.memory_limit), "gpu": task.gpu_limit}
        where = f" in {task.working_directory}" if task.working_directory else ""
        text = f"{count(task.job_count, 'job')} of {show_amounts(orders)}{where}: {words}"
        fields.append((f"task {show_name(task.name)}", show_name(text)))
    for name, pool in answer.pools.items():
        fields.append((f"tree {show_name(name)}", f"pool {show_name(pool)}"))
        if name in answer.trees:
            fields += _part_fields(answer.trees[name])
    if answer.job_cpu_monitor:
        fields.append(("job_cpu_monitor", show_name(show_value(answer.job_cpu_monitor))))
    print_fields(fields)
    for alert in answer.alerts:
        warn(alert)


def _part_fields(part: OperationInTree) -> list[tuple[str, str]]:
    state = _describe_part(part)
    share = f"{show_percent(part.fair_share_ratio)} % of the cluster: {show_amounts(part.fair_share)}"
    fields = [
        ("fair share", share),
        ("used", show_amounts(part.usage)),
        ("demand", show_amounts(part.demand)),
        ("limits", show_limits(part.limits) if part.limits else ""),
        ("weight", f"{part.weight:g}"),
        ("status", state if isinstance(state, str) else state[0]),
    ]
    return [(f"  {name}", value) for name, value in fields if value]


@operation_command.command("jobs", epilog="Example: cpumond operation jobs 1a-2b-3c-4d --state failed")
@click.argument("operation")
@click.option("--state", type=click.Choice(JOB_STATES))
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@scheduler_options
def operation_jobs_command(client: SchedulerClient, operation: str, state: str | None, limit: int) -> None:
    """The jobs of an operation, the last started first: what each ordered, may use now, and uses, in cores."""
    query = given({"state": state, "limit": limit})
    answer = client.show(operation_path(operation, "jobs"), JobList, query)
    if not answer.jobs:
        click.echo("no job fits; see `cpumond operation why` for the reason that none is started")
        return
    headings = ("job", "task", "node", "state", ">ordered", ">limit", ">usage", ">time", ">exit code", "")
    print_table(headings, [_job_row(job, time.time()) for job in answer.jobs])
    if answer.total > len(answer.jobs):
        warn(f"{answer.total - len(answer.jobs)} jobs that started earlier are not shown; raise --limit")


def _job_row(job: JobView, now: float) -> list[Cell]:
    return [
        show_name(job.id),
        show_name(job.task),
        show_name(job.node_id),
        (job.state, STYLES.get(job.state, "")),
        show_cores(job.cpu_limit),
        show_cores(job.current_cpu_limit),
        show_number(job.smoothed_cpu_usage, ".2f"),
        format_span((job.finish_time or now) - job.start_time),
        "" if job.exit_code is None else str(job.exit_code),
        show_name(job.reason),
    ]


@operation_command.command("log", epilog="Example: cpumond operation log 1a-2b-3c-4d --stderr")
@click.argument("operation")
@click.argument("job", required=False)
@click.option("--stderr", is_flag=True, help="What it wrote to standard error; default: to standard output.")
@click.option(
    "--tail", "tail_bytes", type=BytesType(), default=DEFAULT_TAIL_BYTES, show_default=True,
    help=f"How much of the end, such as 1K; at most {MAX_LOG_BYTES}.",
)  # fmt: skip
@connection_options
def operation_log_command(
    client: SchedulerClient, operation: str, job: str | None, stderr: bool, tail_bytes: int
) -> None:
    """The end of what a job wrote, as it is.

    JOB is the id of a living or ended job; default: the one that started last. A node keeps logs for a day unless it
    is configured otherwise. On a terminal control characters are made visible.
    """
    if not 1 <= tail_bytes <= MAX_LOG_BYTES:
        raise UsageError(f"--tail: expected 1 to {MAX_LOG_BYTES} bytes, got {tail_bytes}")
    path = operation_path(operation, f"jobs/{quote_name(job or _find_last_job(client, operation))}/log")
    query = {"stream": "stderr" if stderr else "stdout", "tail": tail_bytes}
    content, headers = client.exchange("GET", path, query=query)
    if sys.stdout.isatty():
        click.echo(make_visible(content), nl=False)
    else:
        sys.stdout.buffer.write(content)
    total = headers.get(TOTAL_BYTES, "")
    if total.isdecimal() and int(total) > len(content):
        warn(f"{int(total) - len(content)} bytes before these are not shown; raise --tail")


def _find_last_job(client: SchedulerClient, operation: str) -> str:
    jobs = client.get(operation_path(operation, "jobs"), JobList, limit=1000).jobs
    started = [job.id for job in jobs if job.state != "starting"]
    if not started:
        raise SchedulerRefusedError(
            f"operation {operation} has no job that has started; see `cpumond operation why {operation}`", 404
        )
    return started[0]


def make_visible(content: bytes) -> str:
    """Bytes as text in which nothing moves a cursor: all but newlines, tabs and what can be printed is escaped."""
    text = content.decode("utf-8", "backslashreplace")
    return "".join(sign if sign in "\n\t" else show_name(sign) for sign in text)


@operation_command.command("explain", epilog="Example: cpumond operation explain 1a-2b-3c-4d 5e-6f-7a-8b --last 20")
@click.argument("operation")
@click.argument("job")
@click.option("--last", type=click.IntRange(0), default=10, show_default=True, metavar="N", help="Decisions to show.")
@click.option("--all", "show_all", is_flag=True, help="Show all decisions the agent remembers (up to 100).")
@scheduler_options
def operation_explain_command(client: SchedulerClient, operation: str, job: str, last: int, show_all: bool) -> None:
    """Why the limit of a living job is what it is, told by the agent of its node.

    It is what `cpumond explain JOB` prints on that node; the answer comes with the node's next heartbeat.
    """
    answer = client.show(operation_path(operation, f"jobs/{quote_name(job)}/explain"), ExplainAnswer)
    click.echo(draw_explain(answer, None if show_all else last, terminal_width(), use_colour()))


@operation_command.command(
    "pin", epilog="Example: cpumond operation pin 1a-2b-3c-4d 5e-6f-7a-8b --cpu-limit 4 --for 10m"
)
@click.argument("operation")
@click.argument("job")
@click.option("--cpu-limit", type=CoresType(), help="Default: all the job may have.")
@click.option(
    "--for", "ttl_s", type=DurationType(1.0),
    help='Such as "1h"; default: until `cpumond operation unpin`, or the job\'s end.',
)  # fmt: skip
@scheduler_options
def operation_pin_command(
    client: SchedulerClient, operation: str, job: str, cpu_limit: float | None, ttl_s: float | None
) -> None:
    """Hold the limit of a living job until it is unpinned, or for a time.

    When the command ends well the pin is on the disk of the job's node and outlives a restart of its agent.
    """
    body = given({"cpu_limit": cpu_limit, "ttl_s": ttl_s})
    held = "all the cores it may have" if cpu_limit is None else f"{show_cores(cpu_limit)} cores"
    until = "until `cpumond operation unpin`" if ttl_s is None else f"until {show_time(time.time() + ttl_s)}"
    done = f"job {show_name(job)} is pinned at {held} {until}"
    client.change(done, "POST", operation_path(operation, f"jobs/{quote_name(job)}/pin"), body)


@operation_command.command("unpin", epilog="Example: cpumond operation unpin 1a-2b-3c-4d 5e-6f-7a-8b")
@click.argument("operation")
@click.argument("job")
@scheduler_options
def operation_unpin_command(client: SchedulerClient, operation: str, job: str) -> None:
    """Give a job back to the monitor when it is pinned, overridden by somebody else's write, or contested."""
    path = operation_path(operation, f"jobs/{quote_name(job)}/unpin")
    client.change(f"job {show_name(job)} is the monitor's again", "POST", path)


@operation_command.command("why", epilog="Example: cpumond operation why 1a-2b-3c-4d")
@click.argument("operation")
@scheduler_options
def operation_why_command(client: SchedulerClient, operation: str) -> None:
    """Why an operation waits, has the share it has, starves, or has lost jobs.

    Pending: its place in the queue, and the pool that is full. Running: its fair share and what holds it, the limits
    above it, whether it starves, why no more jobs of it start. Finished: how and why.
    """
    answer = client.show(operation_path(operation, "why"), OperationAnswer)
    for line in answer.lines:
        click.echo(show_name(line))
    for part in answer.trees:
        click.echo(f"in pool {show_name(part.pool)} of tree {show_name(part.tree)}:")
        for line in part.lines:
            click.echo(f"  {show_name(line)}")


@operation_command.command("abort", epilog="Example: cpumond operation abort 1a-2b-3c-4d --message 'wrong input'")
@click.argument("operation")
@click.option("--message", metavar="TEXT", help="Kept as the operation's error.")
@scheduler_options
def operation_abort_command(client: SchedulerClient, operation: str, message: str | None) -> None:
    """Stop all jobs of an operation and end it."""
    body = given({"message": message})
    client.change(f"operation {show_name(operation)} is aborted", "POST", operation_path(operation, "abort"), body)


@operation_command.command("suspend", epilog="Example: cpumond operation suspend 1a-2b-3c-4d")
@click.argument("operation")
@click.option("--abort-running-jobs", is_flag=True, help="Also stop the jobs that run; they are started anew later.")
@scheduler_options
def operation_suspend_command(client: SchedulerClient, operation: str, abort_running_jobs: bool) -> None:
    """Start no more jobs of an operation until it is resumed."""
    body = {"abort_running_jobs": abort_running_jobs}
    client.change(f"operation {show_name(operation)} is suspended", "POST", operation_path(operation, "suspend"), body)


def _add_plain_action(name: str, done: str, text: str) -> None:
    """A command that only names an operation."""

    @operation_command.command(name, help=text, epilog=f"Example: cpumond operation {name} 1a-2b-3c-4d")
    @click.argument("operation")
    @scheduler_options
    def command(client: SchedulerClient, operation: str) -> None:
        client.change(f"operation {show_name(operation)} is {done}", "POST", operation_path(operation, name))


_add_plain_action("resume", "resumed", "Take back a suspension.")
_add_plain_action("complete", "completed", "End an operation as completed, whatever is left of it.")


@operation_command.command("set", epilog="Example: cpumond operation set 1a-2b-3c-4d weight=3 pool=research")
@click.argument("operation")
@click.argument("assignments", metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option("--tree", metavar="TREE", help="Only in this tree; default: in all of its trees.")
@scheduler_options
def operation_set_command(
    client: SchedulerClient, operation: str, assignments: tuple[str, ...], tree: str | None
) -> None:
    """Change pool, weight, resource_limits, max_share_ratio and other options of a live operation."""
    parameters = read_attributes(assignments)
    if tree is not None:
        parameters = {"scheduling_options_per_pool_tree": {tree: parameters}}
    done = f"operation {show_name(operation)} is changed"
    client.change(done, "PATCH", operation_path(operation), {"parameters": parameters})
