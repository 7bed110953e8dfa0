"""The command ``operation``: start operations on a running scheduler, inspect and control them and their jobs."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from cpumond.api.finding import NEWEST
from cpumond.api.json.requests import DEFAULT_TAIL_BYTES, TOTAL_BYTES
from cpumond.api.views import Done, JobList, JobView, OperationDetails, OperationInTree, OperationList, OperationView
from cpumond.api.yt.ypath import escape_literal
from cpumond.cli.agent.explain import draw_explain
from cpumond.cli.options import CoresType, DurationType, given, quote_name
from cpumond.cli.output import print_fields, print_items, print_text, terminal_width, use_colour, warn
from cpumond.cli.render.grid import Cell, Column, column
from cpumond.cli.scheduler.arguments import read_attributes, read_edits
from cpumond.cli.scheduler.client import connection_options, limit_options, scheduler_options, watched
from cpumond.cli.scheduler.finding import (
    JOB,
    POOL,
    TREE,
    find_name,
    job_argument,
    operation_argument,
    operation_path,
    shorten_ids,
)
from cpumond.cli.scheduler.follow import follow_log, write_output
from cpumond.cli.scheduler.forecast import format_start, simulate_command, when_command
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.plans import format_limits, format_value
from cpumond.cli.scheduler.pools import format_amounts, format_cpu_time, format_share, format_state
from cpumond.cli.scheduler.running import wait_command
from cpumond.cli.scheduler.spec import BytesType, spec_options
from cpumond.core.answers import ExplainAnswer
from cpumond.core.errors import UsageError
from cpumond.core.measures import count_cores, format_cores, format_span
from cpumond.core.wire import MAX_LOG_BYTES, LogStream
from cpumond.core.words import count, escape, format_number, format_time
from cpumond.scheduler.answers.operation import OperationAnswer
from cpumond.scheduler.model import Incarnation
from cpumond.scheduler.settings.incarnations import describe_switch

STATES: Final = ("pending", "running", "completed", "failed", "aborted")
JOB_STATES: Final = ("starting", "running", "stopping", "completed", "failed", "aborted", "lost")
STYLES: Final = {
    "failed": "red", "aborted": "dim", "lost": "red", "pending": "yellow", "completed": "dim", "waiting": "yellow",
    "cannot start": "red",
}  # fmt: skip
JOBS: Final[tuple[Column[JobView], ...]] = (
    column("job", 0, lambda job: escape(job.id)),
    column("operation", 1, lambda job: escape(job.operation_id)),
    column("task", 6, lambda job: escape(job.task)),
    column("node", 1, lambda job: escape(job.node_id)),
    column("state", 0, lambda job: (job.state, STYLES.get(job.state, ""))),
    column("class", 9, lambda job: job.job_class + ("" if job.backfill_until is None else ", backfilled")),
    column(">requested", 7, lambda job: format_cores(job.cpu_limit)),
    column(">limit", 5, lambda job: format_cores(job.current_cpu_limit)),
    column(">used", 4, lambda job: format_number(job.smoothed_cpu_usage, ".2f")),
    column(">time", 2, lambda job: format_span((job.finish_time or time.time()) - job.start_time)),
    column("preemptibility", 8, lambda job: job.preemptibility.replace("_", " ")),
    column(">exit code", 8, lambda job: "" if job.exit_code is None else str(job.exit_code)),
    column("", 3, lambda job: escape(job.reason)),
)
"""Columns of lists of jobs."""


@click.group("operation", epilog="Example: cpumond operation start --pool research --job-count 4 -- sleep 60")
def operation_command() -> None:
    """Start, show, stop and change operations; explain why one waits, starves or lost jobs."""


@operation_command.command(
    "start", epilog="Example: cpumond operation start --pool research --job-count 8 --cpu-limit 2 -- python train.py"
)
@scheduler_options
@spec_options
def operation_start_command(client: SchedulerClient, spec: dict[str, Any]) -> None:
    """Start an operation of equal jobs that run COMMAND, or one described in a specification, and print its id.

    Each job requests --cpu-limit cores and --memory bytes of one node. With --job-count 100 the jobs find the numbers 0
    to 99 in YT_JOB_COOKIE, and a restarted job keeps its number: `cpumond operation start --job-count 100 -- sh -c
    'process part-$YT_JOB_COOKIE'`."""
    content = client.request("POST", "/operations", {"spec": spec})
    client.print_done(content, escape(client.decode(content, Done).id))


Part = tuple[OperationView, str]
"""An operation, and the name of one of its trees."""


def _format_state(part: Part) -> Cell:
    state = part[0].shown_state
    return state + (", suspended" if part[0].suspended else ""), STYLES.get(state, "")


def _format_pool(part: Part) -> str:
    pools = part[0].pools
    return escape(pools[part[1]] if len(pools) == 1 else f"{part[1]}: {pools[part[1]]}")


def _format_cores(part: Part, name: str) -> str:
    of_tree = part[0].trees.get(part[1])
    return "-" if of_tree is None else format_cores(getattr(of_tree, name)["cpu"])


def _format_jobs(part: Part) -> str:
    of_tree = part[0].trees.get(part[1])
    return str(part[0].jobs.active if of_tree is None else of_tree.job_count)


def _format_start(part: Part) -> str:
    told = part[0].forecast
    if part[0].shown_state == "cannot start":
        return "never"
    return "" if told is None else format_start(told.start_p10, told.start_p50, told.start_p90, time.time())


CAUSES: Final = {
    "working": "", "suspended": "", "retry": "retry delay", "secrets": "no key for secrets",
    "user_full": "user's limit", "queue": "next check", "no_nodes": "no node", "gang": "gang does not fit",
    "limit": "resource limit", "reclaimed": "only reclaimed CPU", "filter": "no matching node",
    "budget": "budget spent", "share": "has its share", "room": "no free resources",
}  # fmt: skip
"""Kind of a cause for which an operation waits -> its short form; ``operation why`` has the sentence."""


def _format_part(part: OperationInTree | None) -> Cell:
    if part is None:
        return ""
    if part.cause == "cannot_start":
        return (escape(part.why), "red")
    if part.queue_place is not None:
        return (f"number {part.queue_place} in the queue", "yellow")
    state = format_state(part.starvation_status, part.starves_in_s)
    kind, _, pool = part.cause.partition(":")
    cause = CAUSES.get(kind, kind.replace("_", " "))
    return state if any(state) else escape(f"{cause}: {pool}" if pool else cause)


OPERATIONS: Final[tuple[Column[Part], ...]] = (
    column("operation", 0, lambda part: escape(part[0].id)),
    column("state", 0, _format_state),
    column("user", 7, lambda part: escape(part[0].user)),
    column("pool", 1, _format_pool),
    column(">jobs", 5, _format_jobs),
    column(">done", 4, lambda part: f"{part[0].jobs.completed}/{part[0].jobs.total}"),
    column(">share", 8, lambda part: _format_cores(part, "fair_share")),
    column(">allocated", 6, lambda part: _format_cores(part, "usage")),
    column(">demand", 9, lambda part: _format_cores(part, "demand")),
    column(">age", 2, lambda part: format_span((part[0].finish_time or time.time()) - part[0].start_time)),
    column(">starts in", 5, _format_start),
    column("title", 3, lambda part: escape(part[0].title)),
    column("cause", 2, lambda part: _format_part(part[0].trees.get(part[1]))),
)


full_ids_option = click.option(
    "--full-ids", is_flag=True, help="Whole ids, not unique beginnings; pipes, CSV and JSON have whole ids anyway."
)


@operation_command.command("list", epilog="Example: cpumond operation list --state running --pool research")
@click.option("--state", type=click.Choice(STATES))
@click.option("--pool", metavar="POOL", type=POOL)
@click.option("--tree", metavar="TREE", type=TREE)
@click.option("--user", metavar="USER")
@limit_options(100)
@full_ids_option
@scheduler_options
@watched
def operation_list_command(client: SchedulerClient, /, full_ids: bool, **query: Any) -> None:
    """Print one line per operation and tree, the newest first. Numbers are cores."""
    answer = client.fetch_list("/operations", OperationList, "operations", query, "older operations")
    parts = [(each, tree) for each in answer.operations for tree in each.pools]
    print_items(shorten_ids(OPERATIONS, parts, terminal_width(), full_ids), parts, "no operation matches")


operation_command.add_command(when_command)
operation_command.add_command(simulate_command)


@operation_command.command("show", epilog="Example: cpumond operation show 1a-2b-3c-4d")
@operation_argument
@click.option(
    "--all", "show_all", is_flag=True, help="All values that the scheduler computes for it, by YTsaurus' names."
)
@scheduler_options
def operation_show_command(client: SchedulerClient, operation: str, show_all: bool) -> None:
    """Show one operation: OPERATION is an id, or *ALIAS."""
    if show_all:
        for name, attributes in client.fetch(operation_path(operation, "orchid"), dict[str, dict[str, Any]]).items():
            fields = [(escape(key), escape(format_value(value))) for key, value in attributes.items()]
            print_fields([("tree", escape(name)), *fields])
        return
    answer = client.fetch(operation_path(operation), OperationDetails)
    jobs = answer.jobs
    ended = {"failed": jobs.failed, "aborted": jobs.aborted, "lost": jobs.lost}
    counts = [f"{jobs.completed} of {jobs.total} completed", f"{jobs.active} active", f"{jobs.pending} to be started"]
    counts += [f"{number} {word}" for word, number in ended.items() if number]
    fields = [
        ("operation", escape(answer.id)),
        ("title", escape(answer.title)),
        ("alias", escape(answer.alias)),
        ("user", escape(answer.user)),
        ("state", answer.shown_state + (", suspended" if answer.suspended else "")),
        ("error", escape(answer.error)),
        ("time limit", "" if answer.time_limit is None else format_span(answer.time_limit / 1e3)),
        ("started", format_time(answer.start_time)),
        ("ended", "" if answer.finish_time is None else format_time(answer.finish_time)),
        ("jobs", ", ".join(counts)),
        ("cpu time", format_cpu_time(answer.cpu_seconds, answer.reclaimed_cpu_seconds)),
        ("lost", f"{answer.lost_core_seconds / 3600:.3g} core-hours" if answer.lost_core_seconds else ""),
        ("above reserve", _count_above(answer.over_reserve_count)),
        ("gang", "yes" if answer.is_gang else ""),
        ("incarnation", _format_incarnation(answer.incarnations)),
        ("reclaimed cpu", "" if answer.allow_reclaimed else "refused"),
        ("reclaimed cpu", "required" if answer.require_reclaimed else ""),
    ]
    for task in answer.tasks:
        words = task.command if isinstance(task.command, str) else " ".join(task.command)
        orders = {"cpu": task.cpu_limit, "memory": float(task.memory_limit), "gpu": task.gpu_limit}
        where = f" in {task.working_directory}" if task.working_directory else ""
        kept = f" ({format_amounts({'memory': float(task.memory_reserve)})} reserved)" if task.memory_reserve else ""
        text = f"{count(task.job_count, 'job')} of {format_amounts(orders)}{kept}{where}: {words}"
        fields.append((f"task {escape(task.name)}", escape(text)))
    for name, pool in answer.pools.items():
        fields.append((f"tree {escape(name)}", f"pool {escape(pool)}"))
        if name in answer.trees:
            fields += _part_fields(answer.trees[name])
    fields += [("retry rule applied", escape(note)) for note in answer.retried]
    if answer.next_retry is not None:
        fields.append(("next retry", format_time(answer.next_retry)))
    if answer.job_cpu_monitor:
        fields.append(("job_cpu_monitor", escape(format_value(answer.job_cpu_monitor))))
    print_fields(fields)
    for alert in answer.alerts:
        warn(alert)


def _count_above(number: int) -> str:
    return f"{count(number, 'job')} {'uses' if number == 1 else 'use'} more memory than reserved" if number else ""


def _format_incarnation(told: list[Incarnation]) -> str:
    if not told:
        return ""
    since = f"{escape(told[-1].id)}, since {format_time(told[-1].at)}"
    return since if len(told) == 1 else f"{since}: {escape(describe_switch(told[-1]))}"


def _part_fields(part: OperationInTree) -> list[tuple[str, str]]:
    state = _format_part(part)
    share = format_share(part.fair_share_ratio, part.fair_share_resource)
    fields = [
        ("fair share", f"{format_amounts(part.fair_share)}: {share} of the cluster"),
        ("allocated", format_amounts(part.usage)),
        ("demand", format_amounts(part.demand)),
        ("limits", format_limits(part.limits) if part.limits else ""),
        ("weight", f"{part.weight:g}"),
        ("nodes with", escape(part.scheduling_tag_filter)),
        ("status", state if isinstance(state, str) else state[0]),
    ]
    return [(f"  {name}", value) for name, value in fields if value]


@operation_command.command("why", epilog="Example: cpumond operation why 1a-2b-3c-4d")
@operation_argument
@scheduler_options
def operation_why_command(client: SchedulerClient, operation: str) -> None:
    """Explain why an operation waits, has its share, starves, or has lost jobs.

    Pending: its place in the queue, and the pool that is full. Running: its fair share and what bounds it, the limits
    above it, whether it starves, why no more of its jobs start. Finished: how and why."""
    answer = client.fetch(operation_path(operation, "why"), OperationAnswer)
    for line in answer.lines:
        print_text(escape(line), "  ")
    for part in answer.trees:
        print_text(f"in pool {escape(part.pool)} of tree {escape(part.tree)}:")
        for line in part.lines:
            print_text(f"  {escape(line)}", "    ")


@operation_command.command("abort", epilog="Example: cpumond operation abort 1a-2b-3c-4d --message 'wrong input'")
@operation_argument
@click.option("--message", metavar="TEXT", help="Stored as the operation's error.")
@scheduler_options
def operation_abort_command(client: SchedulerClient, operation: str, message: str | None) -> None:
    """Stop all jobs of an operation and end it."""
    body = given({"message": message})
    client.change(f"operation {escape(operation)} is aborted", "POST", operation_path(operation, "abort"), body)


@operation_command.command("suspend", epilog="Example: cpumond operation suspend 1a-2b-3c-4d")
@operation_argument
@click.option("--abort-running-jobs", is_flag=True, help="Also stop running jobs; they are started again later.")
@scheduler_options
def operation_suspend_command(client: SchedulerClient, operation: str, abort_running_jobs: bool) -> None:
    """Start no more jobs of an operation until it is resumed."""
    body = {"abort_running_jobs": abort_running_jobs}
    client.change(f"operation {escape(operation)} is suspended", "POST", operation_path(operation, "suspend"), body)


def _add_plain_action(name: str, done: str, text: str) -> None:
    """Add a command whose only argument is an operation."""

    @operation_command.command(name, help=text, epilog=f"Example: cpumond operation {name} 1a-2b-3c-4d")
    @operation_argument
    @scheduler_options
    def command(client: SchedulerClient, operation: str) -> None:
        client.change(f"operation {escape(operation)} is {done}", "POST", operation_path(operation, name))


_add_plain_action("resume", "resumed", "Resume a suspended operation.")
_add_plain_action("complete", "completed", "End an operation as completed, even if jobs are left.")


@operation_command.command("set", epilog="Example: cpumond operation set 1a-2b-3c-4d weight=3 pool=research")
@operation_argument
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
    done = f"operation {escape(operation)} is changed"
    client.change(done, "PATCH", operation_path(operation), {"parameters": parameters})


@operation_command.command("patch", epilog="Example: cpumond operation patch 1a-2b-3c-4d tasks/train/job_count=8")
@operation_argument
@click.argument("assignments", metavar="KEY=VALUE...", nargs=-1, required=True)
@scheduler_options
def operation_patch_command(client: SchedulerClient, operation: str, assignments: tuple[str, ...]) -> None:
    """Change max_failed_job_count and tasks/NAME/job_count of a live operation: either all given values or none.

    If job_count is lowered, completed jobs count towards it first, and excess running jobs are aborted."""
    edits = read_edits([each.removeprefix("/") for each in assignments])
    paths = ("".join(f"/{escape_literal(key)}" for key in edit["path"]) for edit in edits)
    patches = [{"path": path, "value": edit["value"]} for path, edit in zip(paths, edits, strict=True)]
    done = f"operation {escape(operation)} is changed"
    client.change(done, "POST", operation_path(operation, "patch"), {"patches": patches})


operation_command.add_command(wait_command)


@operation_command.command("jobs", epilog="Example: cpumond operation jobs 1a-2b-3c-4d --state failed")
@operation_argument
@click.option("--state", type=click.Choice(JOB_STATES))
@limit_options(100)
@full_ids_option
@scheduler_options
@watched
def jobs_command(client: SchedulerClient, /, operation: str, full_ids: bool, **query: Any) -> None:
    """List the jobs of an operation, the last started first: request, limit now, and usage, in cores."""
    path = operation_path(operation, "jobs")
    answer = client.fetch_list(path, JobList, "jobs", query, "jobs that started earlier")
    nothing = "no job matches; see `cpumond operation why` for the reason that none is started"
    columns = [each for each in JOBS if each.name not in ("operation", "preemptibility")]
    print_items(shorten_ids(columns, answer.jobs, terminal_width(), full_ids), answer.jobs, nothing)


@operation_command.command("log", epilog="Example: cpumond operation log 1a-2b-3c-4d --stderr")
@operation_argument
@click.argument("job", type=JOB, required=False)
@click.option("--stderr", is_flag=True, help="Show standard error; default: standard output.")
@click.option(
    "--tail", "tail_bytes", type=BytesType(), default=DEFAULT_TAIL_BYTES, show_default=True,
    help=f"Bytes from the end, for example 1K; at most {MAX_LOG_BYTES}.",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Continue with new output until the job ends.")
@connection_options
def log_command(
    client: SchedulerClient, operation: str, job: str | None, stderr: bool, tail_bytes: int, follow: bool
) -> None:
    """Print the end of a job's output unchanged.

    JOB is the id of a running or ended job; default: the one that started last, with --follow all jobs, including those
    started later. A node keeps logs for a day unless configured otherwise. On a terminal control characters are made
    visible."""
    if not 1 <= tail_bytes <= MAX_LOG_BYTES:
        raise UsageError(f"--tail: expected 1 to {MAX_LOG_BYTES} bytes, got {tail_bytes}")
    stream: LogStream = "stderr" if stderr else "stdout"
    if follow:
        follow_log(client, operation, job, stream, tail_bytes)
        return
    path = operation_path(operation, f"jobs/{quote_name(job or find_name(client, 'job', NEWEST, operation))}/log")
    content, headers = client.exchange("GET", path, query={"stream": stream, "tail": tail_bytes})
    write_output(content)
    total = headers.get(TOTAL_BYTES, "")
    if total.isdecimal() and int(total) > len(content):
        warn(f"{int(total) - len(content)} bytes before these are not shown; raise --tail")


@operation_command.command("explain", epilog="Example: cpumond operation explain 1a-2b-3c-4d 5e-6f-7a-8b --last 20")
@operation_argument
@job_argument
@click.option(
    "--last", type=click.IntRange(0), default=10, show_default=True, metavar="N", help="Number of decisions to show."
)
@click.option("--all", "show_all", is_flag=True, help="Show all decisions that the agent remembers (up to 100).")
@scheduler_options
def explain_command(client: SchedulerClient, operation: str, job: str, last: int, show_all: bool) -> None:
    """Explain why the limit of a running job has its value; the agent of its node answers.

    The answer is the output of `cpumond explain JOB` on that node, and comes with the node's next heartbeat."""
    answer = client.fetch(operation_path(operation, f"jobs/{quote_name(job)}/explain"), ExplainAnswer)
    click.echo(draw_explain(answer, None if show_all else last, terminal_width(), use_colour()))


@operation_command.command("abort-job", epilog="Example: cpumond operation abort-job 1a-2b-3c-4d 5e-6f-7a-8b")
@operation_argument
@job_argument
@click.option(
    "--interrupt-timeout", "timeout_s", type=DurationType(),
    help='Interrupt it and give it this time to end, for example "30s"; default: it is killed at once.',
)  # fmt: skip
@scheduler_options
def abort_job_command(client: SchedulerClient, operation: str, job: str, timeout_s: float | None) -> None:
    """Stop a job. It is started again, unless its operation has fail_on_job_restart: then the operation fails."""
    body = given({"interrupt_timeout": None if timeout_s is None else timeout_s * 1e3})
    done = f"job {escape(job)} is aborted"
    client.change(done, "POST", operation_path(operation, f"jobs/{quote_name(job)}/abort"), body)


def _add_job_action(name: str, step: str, done: str, text: str) -> None:
    """Add a command whose arguments are an operation and a job."""

    @operation_command.command(name, help=text, epilog=f"Example: cpumond operation {name} 1a-2b-3c-4d 5e-6f-7a-8b")
    @operation_argument
    @job_argument
    @scheduler_options
    def command(client: SchedulerClient, operation: str, job: str) -> None:
        client.change(f"job {escape(job)} {done}", "POST", operation_path(operation, f"jobs/{quote_name(job)}/{step}"))


_add_job_action(
    "abandon-job", "abandon", "counts as completed", "Stop a job and count it as completed: it is not started again."
)
_add_job_action(
    "unpin", "unpin", "is managed by the monitor again",
    "Return a job to the monitor when it is pinned, contested, or overridden by another program's write.",
)  # fmt: skip


@operation_command.command(
    "pin", epilog="Example: cpumond operation pin 1a-2b-3c-4d 5e-6f-7a-8b --cpu-limit 4 --for 10m"
)
@operation_argument
@job_argument
@click.option("--cpu-limit", type=CoresType(), help="Default: the job's whole request.")
@click.option(
    "--for", "ttl_s", type=DurationType(1.0),
    help='For example "1h"; default: until `cpumond operation unpin`, or the job\'s end.',
)  # fmt: skip
@scheduler_options
def pin_command(
    client: SchedulerClient, operation: str, job: str, cpu_limit: float | None, ttl_s: float | None
) -> None:
    """Hold the limit of a running job until it is unpinned, or for a time.

    When the command succeeds the pin is stored on the disk of the job's node and survives a restart of its agent."""
    body = given({"cpu_limit": cpu_limit, "ttl_s": ttl_s})
    held = "all the cores it may have" if cpu_limit is None else count_cores(cpu_limit)
    until = "until `cpumond operation unpin`" if ttl_s is None else f"until {format_time(time.time() + ttl_s)}"
    done = f"job {escape(job)} is pinned at {held} {until}"
    client.change(done, "POST", operation_path(operation, f"jobs/{quote_name(job)}/pin"), body)
