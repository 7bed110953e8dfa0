"""The command ``node``: the nodes of a running scheduler, and blocking them for new jobs."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from cpumond.api.node_views import NodeDetails, NodeList, NodeView
from cpumond.cli.options import DurationType, given, quote_name
from cpumond.cli.output import print_fields, print_items, print_json, print_text, terminal_width, warn
from cpumond.cli.progress import ProgressLine
from cpumond.cli.render.grid import Cell, Column, column, pick
from cpumond.cli.scheduler.client import limit_options, scheduler_options, watched, why_option
from cpumond.cli.scheduler.finding import TREE, node_argument, shorten_ids
from cpumond.cli.scheduler.forecast import print_simulation
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.operations import JOBS
from cpumond.cli.scheduler.pools import format_amounts
from cpumond.core.errors import EXIT_TRY_AGAIN, CpumondError, UsageError
from cpumond.core.measures import count_cores, format_cores, format_span
from cpumond.core.words import count, escape
from cpumond.scheduler.answers.drain import DrainedJob, DrainPlan

POLL_S: Final = 0.5


@click.group("node", epilog="Example: cpumond node list --tree default")
def node_command() -> None:
    """Show the nodes that run jobs (they register themselves); cordon and drain them for maintenance."""


def format_node_state(node: NodeView) -> tuple[str, str]:
    """The state of a node: online, cordoned, held off or overcommitted, with a style."""
    if node.lost_at is not None:
        return f"lost {format_span(time.time() - node.lost_at)} ago", "red"
    if not node.is_online:
        return f"silent for {format_span(node.silent_s)}", "red"
    if node.cordon is not None:
        return "draining" if node.cordon.drain and node.job_count + node.stopping_job_count else "cordoned", "cyan"
    if node.held_until is not None:
        return f"held off for {format_span(max(node.held_until - time.time(), 0.0))}", "yellow"
    if node.failing:
        return "jobs fail", "yellow"
    if node.overcommitted_s is not None:
        return f"overcommitted for {format_span(node.overcommitted_s)}", "yellow"
    return "online", ""


def _format_tree(node: NodeView) -> Cell:
    if node.matched_trees:
        return f"{len(node.matched_trees)} fit", "red"
    return ("none", "yellow") if node.tree is None else escape(node.tree)


def _format_jobs(node: NodeView) -> str:
    return str(node.job_count) + (f" + {node.stopping_job_count} ending" if node.stopping_job_count else "")


NODES: Final[tuple[Column[NodeView], ...]] = (
    column("node", 0, lambda node: escape(node.id)),
    column("tree", 5, _format_tree),
    column("state", 1, format_node_state),
    column(">cores", 3, lambda node: format_cores(node.capacity["cpu"])),
    column(">allocated", 2, lambda node: format_cores(node.usage["cpu"])),
    column(">others", 8, lambda node: format_cores(node.foreign_usage["cpu"])),
    column(">free", 4, lambda node: format_cores(node.free["cpu"])),
    column(">memory free", 7, lambda node: format_amounts({"memory": node.free["memory"]}).removesuffix(" memory")),
    column(">jobs", 6, _format_jobs),
    column("tags", 9, lambda node: escape(", ".join(tag for tag in node.tags if tag != node.address))),
)


@node_command.command("list", epilog="Example: cpumond node list --tag gpu --offline")
@click.option("--tree", metavar="TREE", type=TREE)
@click.option("--tag", metavar="TAG")
@click.option("--online/--offline", "online", default=None, help="Only nodes that are online, or offline.")
@limit_options(1000)
@scheduler_options
@watched
def node_list_command(client: SchedulerClient, /, **query: Any) -> None:
    """Print one line per node. Numbers are cores; "others" is CPU of jobs that belong to no operation."""
    answer = client.fetch_list("/nodes", NodeList, "nodes", query, "nodes")
    print_items(NODES, answer.nodes, "no node matches; nodes register themselves when their agent runs")


def _describe_cordon(node: NodeView) -> str:
    cordon = node.cordon
    if cordon is None:
        return ""
    how = "drained" if cordon.drain else "cordoned"
    ago = format_span(time.time() - cordon.at)
    return f"{how} by {escape(cordon.user)} {ago} ago" + (f": {escape(cordon.why)}" if cordon.why else "")


def _describe_reclaimed(node: NodeView) -> str:
    if not node.on_reclaimed_cores and not node.idle_class:
        return ""
    how = f"idle class: {node.idle_class}" if node.idle_class else "its agent has no idle class for them"
    return f"{count_cores(node.on_reclaimed_cores)} of jobs on reclaimed CPU ({how})"


@node_command.command("show", epilog="Example: cpumond node show host-17")
@node_argument
@scheduler_options
def node_show_command(client: SchedulerClient, node: str) -> None:
    """One node with its jobs."""
    answer = client.fetch(f"/nodes/{quote_name(node)}", NodeDetails)
    tree = "none: its tags match no tree's nodes_filter, so it gets no jobs" if answer.tree is None else answer.tree
    if answer.matched_trees:
        fitting = " and ".join(answer.matched_trees)
        tree = f"{answer.tree or 'none'}: its tags match {fitting}; its jobs continue, none is started"
    print_fields(
        [
            ("node", escape(answer.id)),
            ("address", escape(answer.address)),
            ("tags", escape(", ".join(answer.tags))),
            ("set by a user", escape(", ".join(answer.user_tags))),
            ("tree", escape(tree)),
            ("state", format_node_state(answer)[0]),
            ("cordon", _describe_cordon(answer)),
            ("failing", escape(answer.failing)),
            ("last heartbeat", f"{format_span(answer.silent_s)} ago"),
            ("capacity", format_amounts(answer.capacity)),
            ("allocated", format_amounts(answer.usage)),
            ("used", f"{format_cores(answer.used_cores)} cores of CPU"),
            ("reclaimed", _describe_reclaimed(answer)),
            ("allocated to others", format_amounts(answer.foreign_usage, "")),
            ("free", format_amounts(answer.free)),
            ("overcommitted", f"{answer.overcommit_count} times" if answer.overcommit_count else ""),
        ]
    )
    if answer.jobs:
        ranks = {
            "job": 0, "operation": 1, "state": 2, "class": 9, "requested": 6, "limit": 5, "used": 4, "time": 3,
            "preemptibility": 8, "": 7,
        }  # fmt: skip
        print_items(shorten_ids(pick(JOBS, ranks), answer.jobs, terminal_width()), answer.jobs)


class StillBusyError(CpumondError):
    """Jobs were still running on the node at the end of the time-out."""

    exit_code = EXIT_TRY_AGAIN


@node_command.command("cordon", epilog='Example: cpumond node cordon host-17 --why "new kernel tonight"')
@node_argument
@why_option
@scheduler_options
def cordon_command(client: SchedulerClient, node: str, why: str) -> None:
    """Start no more jobs on a node; its jobs continue. `cpumond node uncordon` reverts it."""
    client.change(f"node {escape(node)} gets no new jobs", "POST", f"{_path(node)}/cordon", {"why": why})


@node_command.command("uncordon", epilog="Example: cpumond node uncordon host-17")
@node_argument
@why_option
@scheduler_options
def uncordon_command(client: SchedulerClient, node: str, why: str) -> None:
    """Start jobs on a node again: reverts cordon and drain, and ends the time for which it is held off after failed
    jobs."""
    client.change(f"node {escape(node)} gets jobs again", "POST", f"{_path(node)}/uncordon", {"why": why})


@node_command.command("tag", epilog="Example: cpumond node tag host-17 ssd fast --remove old")
@node_argument
@click.argument("tags", metavar="[TAG]...", nargs=-1)
@click.option("--remove", metavar="TAG", multiple=True, help="Remove a tag; may be repeated.")
@why_option
@scheduler_options
def tag_command(client: SchedulerClient, node: str, tags: tuple[str, ...], remove: tuple[str, ...], why: str) -> None:
    """Give a node tags for nodes_filter and scheduling_tag_filter, in addition to those of its agent's configuration.

    They stay until they are removed. Jobs continue, except those of a tree that the node leaves."""
    if not tags and not remove:
        raise UsageError("nothing to change; give tags, or --remove TAG")
    body = {"add": tags, "remove": remove, "why": why}
    client.change(f"the tags of node {escape(node)} are changed", "POST", f"{_path(node)}/tags", body)


@node_command.command("drain", epilog='Example: cpumond node drain host-17 --why "new disks" --timeout 10m')
@node_argument
@why_option
@click.option(
    "--graceful", is_flag=True, help="Give jobs job_graceful_preemption_timeout instead of job_preemption_timeout."
)
@click.option(
    "--timeout", "timeout_s", type=DurationType(), help="Maximum time to wait; exit code 75 if jobs are left then."
)
@click.option(
    "--no-wait", "waits", is_flag=True, flag_value=False, default=True, help="Do not wait until the node is empty."
)
@click.option(
    "--plan", "is_plan", is_flag=True, help="Only list the jobs that would be stopped, and where they would fit."
)
@scheduler_options
def drain_command(
    client: SchedulerClient, node: str, why: str, graceful: bool, timeout_s: float | None, waits: bool, is_plan: bool
) -> None:
    """Start no more jobs on a node, stop its jobs, and wait until it is empty.

    The jobs are interrupted, interruptible ones first, and start again on other nodes with free resources. `cpumond
    node uncordon` reverts it."""
    if is_plan:
        if why or graceful or timeout_s is not None or not waits:
            raise UsageError("--plan changes nothing, so no other option has an effect; leave them out")
        _print_plan(client, node)
        if not client.as_json:
            click.echo()
            print_simulation(client, {"node": node, "drain": True})
        return
    if timeout_s is not None and not waits:
        raise UsageError("--timeout has no effect with --no-wait, which does not wait; leave one of them out")
    content = client.request("POST", f"{_path(node)}/drain", given({"why": why, "graceful": graceful or None}))
    try:
        client.print_done(content, f"node {escape(node)} is drained: it gets no new jobs, its jobs are stopped")
        if waits:
            _wait(client, node, timeout_s)
    except KeyboardInterrupt:
        told = "stays drained; `cpumond node show` shows its state, `... uncordon` reverts the drain"
        click.echo(f"node {escape(node)} {told}", err=True)
        raise click.Abort from None


def _wait(client: SchedulerClient, node: str, timeout_s: float | None) -> None:
    """Wait until the node is empty. Raises StillBusyError."""
    progress, begun_s, is_warned = ProgressLine(), time.monotonic(), False
    try:
        while True:
            view = client.get(_path(node), NodeDetails)
            if view.lost_at is not None or not view.job_count + view.stopping_job_count:
                break
            if view.cordon is None or not view.cordon.drain:
                raise StillBusyError(f"node {escape(node)} is no longer drained: another user reverted it")
            if not view.is_online and not is_warned:
                warn(f"node {escape(node)} is silent: its jobs stop when it is back, or are declared lost later")
                is_warned = True
            left = count(view.job_count + view.stopping_job_count, "job")
            spent_s = time.monotonic() - begun_s
            progress.draw(f"{left} left, {view.stopping_job_count} ending, {format_span(spent_s)}")
            if timeout_s is not None and spent_s >= timeout_s:
                raise StillBusyError(
                    f"node {escape(node)} has {left} left after {format_span(timeout_s)}; the drain continues; "
                    "`cpumond node show` shows its state"
                )
            time.sleep(POLL_S if timeout_s is None else min(POLL_S, max(timeout_s - spent_s, 0.0)))
    finally:
        progress.end()
    if not client.as_json:
        print_text(f"node {escape(node)} is empty")


def _format_place(job: DrainedJob) -> Cell:
    if job.fails_operation:
        return "fails its operation", "red"
    return escape(job.to_node) if job.to_node else ("waits for free resources", "yellow")


DRAINED: Final[tuple[Column[DrainedJob], ...]] = (
    column("job", 0, lambda job: escape(job.job_id)),
    column("operation", 3, lambda job: escape(job.operation_id)),
    column("pool", 2, lambda job: escape(job.pool)),
    column(">cores", 1, lambda job: format_cores(job.cores)),
    column(">running", 5, lambda job: format_span(job.running_s)),
    column("interruptible", 6, lambda job: "yes" if job.interruptible else "no"),
    column(">core-hours", 4, lambda job: format_cores(job.lost_core_seconds / 3600.0)),
    column("goes to", 0, _format_place),
)


def _print_plan(client: SchedulerClient, node: str) -> None:
    content = client.request("GET", f"{_path(node)}/drain")
    plan = client.decode(content, DrainPlan)
    if client.as_json:
        print_json(content, DrainPlan, "jobs")
        return
    if not plan.job_count:
        print_text(f"node {escape(node)} has no job that would be stopped")
        return
    if plan.jobs:
        print_items(DRAINED, plan.jobs)
    hours = format_cores(plan.lost_core_seconds / 3600.0)
    print_text(
        f"{count(plan.job_count, 'job')} would be stopped, of which {plan.waiting_job_count} would wait for free "
        f"resources; {hours} core-hours of work would be lost"
    )
    if plan.failing_job_count:
        warn(f"{count(plan.failing_job_count, 'job')} would fail their operations, which have fail_on_job_restart")
    if plan.gang_job_count:
        print_text(f"{count(plan.gang_job_count, 'job')} on other nodes would stop with their gangs")
    if plan.hidden_job_count:
        warn(f"{count(plan.hidden_job_count, 'job')} of operations that you may not see are not shown")


def _path(node: str) -> str:
    return f"/nodes/{quote_name(node)}"
