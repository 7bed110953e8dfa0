"""The command ``operation``: start operations on a running scheduler, look at them, steer them, ask why."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from cpumond.api.views import Done, OperationDetails, OperationInTree, OperationList, OperationView
from cpumond.cli.options import given
from cpumond.cli.output import print_fields, print_items, print_text, warn
from cpumond.cli.render.grid import Cell, Column, column
from cpumond.cli.scheduler import jobs
from cpumond.cli.scheduler.arguments import read_attributes
from cpumond.cli.scheduler.client import SchedulerClient, scheduler_options
from cpumond.cli.scheduler.finding import POOL, TREE, operation_argument, operation_path
from cpumond.cli.scheduler.forecast import show_start, simulate_command, when_command
from cpumond.cli.scheduler.jobs import STYLES
from cpumond.cli.scheduler.plans import show_limits, show_value
from cpumond.cli.scheduler.pools import show_amounts, show_cpu_time, show_share, show_state
from cpumond.cli.scheduler.running import wait_command
from cpumond.cli.scheduler.spec import spec_options
from cpumond.core.measures import format_span
from cpumond.core.words import count, show_cores, show_name, show_time
from cpumond.scheduler.why.operation import OperationAnswer

STATES: Final = ("pending", "running", "completed", "failed", "aborted")


@click.group("operation", epilog="Example: cpumond operation start --pool research --job-count 4 -- sleep 60")
def operation_command() -> None:
    """Start, show, stop and change operations; ask why one waits, starves or lost jobs."""


@operation_command.command(
    "start", epilog="Example: cpumond operation start --pool research --job-count 8 --cpu-limit 2 -- python train.py"
)
@scheduler_options
@spec_options
def operation_start_command(client: SchedulerClient, spec: dict[str, Any]) -> None:
    """Start an operation of equal jobs that run COMMAND, or what a specification says, and print its id.

    Each job orders --cpu-limit cores and --memory bytes of one node.
    """
    content = client.request("POST", "/operations", {"spec": spec})
    client.tell_done(content, show_name(client.decode(content, Done).id))


Part = tuple[OperationView, str]
"""An operation, and the name of one of its trees."""


def _show_state(part: Part) -> Cell:
    state = part[0].shown_state
    return state + (", suspended" if part[0].suspended else ""), STYLES.get(state, "")


def _show_pool(part: Part) -> str:
    pools = part[0].pools
    return show_name(pools[part[1]] if len(pools) == 1 else f"{part[1]}: {pools[part[1]]}")


def _show_cores(part: Part, name: str) -> str:
    of_tree = part[0].trees.get(part[1])
    return "-" if of_tree is None else show_cores(getattr(of_tree, name)["cpu"])


def _show_jobs(part: Part) -> str:
    of_tree = part[0].trees.get(part[1])
    return str(part[0].jobs.active if of_tree is None else of_tree.job_count)


def _show_start(part: Part) -> str:
    told = part[0].forecast
    if part[0].shown_state == "cannot start":
        return "never"
    return "" if told is None else show_start(told.start_p10, told.start_p50, told.start_p90, time.time())


def _describe_part(part: OperationInTree | None) -> Cell:
    if part is None:
        return ""
    if part.cause == "cannot_start":
        return (show_name(part.why), "red")
    if part.queue_place is not None:
        return (f"number {part.queue_place} in the queue", "yellow")
    return show_state(part.starvation_status, part.starves_in_s)


OPERATIONS: Final[tuple[Column[Part], ...]] = (
    column("operation", 0, lambda part: show_name(part[0].id)),
    column("state", 0, _show_state),
    column("user", 7, lambda part: show_name(part[0].user)),
    column("pool", 1, _show_pool),
    column(">jobs", 4, _show_jobs),
    column(">done", 3, lambda part: f"{part[0].jobs.completed}/{part[0].jobs.total}"),
    column(">share", 8, lambda part: _show_cores(part, "fair_share")),
    column(">allotted", 5, lambda part: _show_cores(part, "usage")),
    column(">demand", 9, lambda part: _show_cores(part, "demand")),
    column(">age", 6, lambda part: format_span((part[0].finish_time or time.time()) - part[0].start_time)),
    column(">starts in", 4, _show_start),
    column("title", 2, lambda part: show_name(part[0].title)),
    column("", 3, lambda part: _describe_part(part[0].trees.get(part[1]))),
)


@operation_command.command("list", epilog="Example: cpumond operation list --state running --pool research")
@click.option("--state", type=click.Choice(STATES))
@click.option("--pool", metavar="POOL", type=POOL)
@click.option("--tree", metavar="TREE", type=TREE)
@click.option("--user", metavar="USER")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@scheduler_options
def operation_list_command(
    client: SchedulerClient, state: str | None, pool: str | None, tree: str | None, user: str | None, limit: int
) -> None:
    """One line per operation and tree, the newest first. Numbers are cores."""
    query = given({"state": state, "pool": pool, "tree": tree, "user": user, "limit": limit})
    answer = client.show("/operations", OperationList, query)
    parts = [(each, tree) for each in answer.operations for tree in each.pools]
    print_items(OPERATIONS, parts, "no operation fits")
    if answer.total > len(answer.operations):
        warn(f"{answer.total - len(answer.operations)} older ones are not shown; raise --limit, or filter")


operation_command.add_command(when_command)
operation_command.add_command(simulate_command)


@operation_command.command("show", epilog="Example: cpumond operation show 1a-2b-3c-4d")
@operation_argument
@click.option("--all", "show_all", is_flag=True, help="All that the scheduler computes of it, by YTsaurus' names.")
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
        ("state", answer.shown_state + (", suspended" if answer.suspended else "")),
        ("error", show_name(answer.error)),
        ("time limit", "" if answer.time_limit is None else format_span(answer.time_limit / 1e3)),
        ("started", show_time(answer.start_time)),
        ("ended", "" if answer.finish_time is None else show_time(answer.finish_time)),
        ("jobs", ", ".join(counts)),
        ("cpu time", show_cpu_time(answer.cpu_seconds, answer.reclaimed_cpu_seconds)),
        ("lost", f"{answer.lost_core_seconds / 3600:.3g} core-hours" if answer.lost_core_seconds else ""),
        ("gang", "yes" if answer.is_gang else ""),
        ("reclaimed cpu", "" if answer.allow_reclaimed else "refused"),
        ("reclaimed cpu", "required" if answer.require_reclaimed else ""),
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
    share = show_share(part.fair_share_ratio, part.fair_share_resource)
    fields = [
        ("fair share", f"{show_amounts(part.fair_share)}: {share} of the cluster"),
        ("allotted", show_amounts(part.usage)),
        ("demand", show_amounts(part.demand)),
        ("limits", show_limits(part.limits) if part.limits else ""),
        ("weight", f"{part.weight:g}"),
        ("status", state if isinstance(state, str) else state[0]),
    ]
    return [(f"  {name}", value) for name, value in fields if value]


@operation_command.command("why", epilog="Example: cpumond operation why 1a-2b-3c-4d")
@operation_argument
@scheduler_options
def operation_why_command(client: SchedulerClient, operation: str) -> None:
    """Why an operation waits, has the share it has, starves, or has lost jobs.

    Pending: its place in the queue, and the pool that is full. Running: its fair share and what holds it, the limits
    above it, whether it starves, why no more jobs of it start. Finished: how and why.
    """
    answer = client.show(operation_path(operation, "why"), OperationAnswer)
    for line in answer.lines:
        print_text(show_name(line), "  ")
    for part in answer.trees:
        print_text(f"in pool {show_name(part.pool)} of tree {show_name(part.tree)}:")
        for line in part.lines:
            print_text(f"  {show_name(line)}", "    ")


@operation_command.command("abort", epilog="Example: cpumond operation abort 1a-2b-3c-4d --message 'wrong input'")
@operation_argument
@click.option("--message", metavar="TEXT", help="Kept as the operation's error.")
@scheduler_options
def operation_abort_command(client: SchedulerClient, operation: str, message: str | None) -> None:
    """Stop all jobs of an operation and end it."""
    body = given({"message": message})
    client.change(f"operation {show_name(operation)} is aborted", "POST", operation_path(operation, "abort"), body)


@operation_command.command("suspend", epilog="Example: cpumond operation suspend 1a-2b-3c-4d")
@operation_argument
@click.option("--abort-running-jobs", is_flag=True, help="Also stop the jobs that run; they are started anew later.")
@scheduler_options
def operation_suspend_command(client: SchedulerClient, operation: str, abort_running_jobs: bool) -> None:
    """Start no more jobs of an operation until it is resumed."""
    body = {"abort_running_jobs": abort_running_jobs}
    client.change(f"operation {show_name(operation)} is suspended", "POST", operation_path(operation, "suspend"), body)


def _add_plain_action(name: str, done: str, text: str) -> None:
    """A command that only names an operation."""

    @operation_command.command(name, help=text, epilog=f"Example: cpumond operation {name} 1a-2b-3c-4d")
    @operation_argument
    @scheduler_options
    def command(client: SchedulerClient, operation: str) -> None:
        client.change(f"operation {show_name(operation)} is {done}", "POST", operation_path(operation, name))


_add_plain_action("resume", "resumed", "Take back a suspension.")
_add_plain_action("complete", "completed", "End an operation as completed, whatever is left of it.")


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
    done = f"operation {show_name(operation)} is changed"
    client.change(done, "PATCH", operation_path(operation), {"parameters": parameters})


for each in (
    wait_command, jobs.jobs_command, jobs.log_command, jobs.explain_command, jobs.pin_command, jobs.unpin_command,
):  # fmt: skip
    operation_command.add_command(each)
