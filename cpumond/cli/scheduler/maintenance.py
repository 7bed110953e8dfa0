"""The commands ``node cordon``, ``node uncordon`` and ``node drain``: nodes that get no new jobs."""

from __future__ import annotations

import time
from typing import Final

import click

from cpumond.api.node_views import NodeDetails
from cpumond.cli.options import DurationType, given, print_json, quote_name
from cpumond.cli.output import print_text, warn
from cpumond.cli.progress import Progress
from cpumond.cli.render.grid import column
from cpumond.cli.scheduler.client import SchedulerClient, print_table, scheduler_options
from cpumond.cli.scheduler.finding import node_argument
from cpumond.cli.scheduler.forecast import show_simulation
from cpumond.core.errors import EXIT_TRY_AGAIN, CpumondError, UsageError
from cpumond.core.measures import format_span
from cpumond.core.words import count, show_cores, show_name
from cpumond.scheduler.why.drain import DrainPlan

POLL_S: Final = 0.5

why_option = click.option("--why", metavar="TEXT", default="", help="A sentence for others, and for the audit log.")


class StillBusyError(CpumondError):
    """The node was not empty in time."""

    exit_code = EXIT_TRY_AGAIN


@click.command("cordon", epilog='Example: cpumond node cordon host-17 --why "new kernel tonight"')
@node_argument
@why_option
@scheduler_options
def cordon_command(client: SchedulerClient, node: str, why: str) -> None:
    """Start no more jobs on a node. Those that it has run on; `cpumond node uncordon` takes it back."""
    client.change(f"node {show_name(node)} gets no new jobs", "POST", f"{_path(node)}/cordon", {"why": why})


@click.command("uncordon", epilog="Example: cpumond node uncordon host-17")
@node_argument
@why_option
@scheduler_options
def uncordon_command(client: SchedulerClient, node: str, why: str) -> None:
    """Start jobs on a node again: takes back cordon and drain."""
    client.change(f"node {show_name(node)} gets jobs again", "POST", f"{_path(node)}/uncordon", {"why": why})


@click.command("drain", epilog='Example: cpumond node drain host-17 --why "new disks" --timeout 10m')
@node_argument
@why_option
@click.option("--graceful", is_flag=True, help="Give jobs job_graceful_preemption_timeout, not job_preemption_timeout.")
@click.option("--timeout", "timeout_s", type=DurationType(), help="Wait no longer; ends with 75 if jobs are left then.")
@click.option("--no-wait", "waits", is_flag=True, flag_value=False, default=True, help="Do not wait until it is empty.")
@click.option("--plan", "is_plan", is_flag=True, help="Only say which jobs would be stopped and where there is room.")
@scheduler_options
def drain_command(
    client: SchedulerClient, node: str, why: str, graceful: bool, timeout_s: float | None, waits: bool, is_plan: bool
) -> None:
    """Start no more jobs on a node, stop those that it has, and wait until it is empty.

    The jobs are interrupted, interruptible ones first, and start again where there is room. `cpumond node uncordon`
    takes it back.
    """
    if is_plan:
        if why or graceful or timeout_s is not None or not waits:
            raise UsageError("--plan: nothing is changed, so that no other option has an effect; leave them out")
        _show_plan(client, node)
        if not client.as_json:
            click.echo()
            show_simulation(client, {"node": node, "drain": True})
        return
    if timeout_s is not None and not waits:
        raise UsageError("--timeout has no effect with --no-wait, which does not wait; leave one of them out")
    content = client.request("POST", f"{_path(node)}/drain", given({"why": why, "graceful": graceful or None}))
    try:
        client.tell_done(content, f"node {show_name(node)} is drained: it gets no new jobs, its jobs are stopped")
        if waits:
            _wait(client, node, timeout_s)
    except KeyboardInterrupt:
        told = f"node {show_name(node)} stays drained; `cpumond node show` looks at it, `... uncordon` takes it back"
        click.echo(told, err=True)
        raise click.Abort from None


def _wait(client: SchedulerClient, node: str, timeout_s: float | None) -> None:
    """Until the node is empty. Raises StillBusyError."""
    progress, begun_s, is_warned = Progress(), time.monotonic(), False
    try:
        while True:
            view = client.get(_path(node), NodeDetails)
            if view.lost_at is not None or not view.job_count + view.stopping_job_count:
                break
            if view.cordon is None or not view.cordon.drain:
                raise StillBusyError(f"node {show_name(node)} is not drained any more: somebody took it back")
            if not view.is_online and not is_warned:
                warn(f"node {show_name(node)} is silent: its jobs stop when it is back, or are lost in a while")
                is_warned = True
            left = count(view.job_count + view.stopping_job_count, "job")
            spent_s = time.monotonic() - begun_s
            progress.show(f"{left} left, {view.stopping_job_count} ending, {format_span(spent_s)}")
            if timeout_s is not None and spent_s >= timeout_s:
                raise StillBusyError(
                    f"node {show_name(node)} has {left} left after {format_span(timeout_s)}; the drain goes on, "
                    "`cpumond node show` looks at it"
                )
            time.sleep(POLL_S if timeout_s is None else min(POLL_S, max(timeout_s - spent_s, 0.0)))
    finally:
        progress.end()
    if not client.as_json:
        print_text(f"node {show_name(node)} is empty")


def _show_plan(client: SchedulerClient, node: str) -> None:
    content = client.request("GET", f"{_path(node)}/drain")
    plan = client.decode(content, DrainPlan)
    if client.as_json:
        print_json(content, DrainPlan, "jobs")
        return
    if not plan.job_count:
        print_text(f"node {show_name(node)} has no job that would be stopped")
        return
    rows = [
        [
            show_name(job.job_id),
            show_name(job.operation_id),
            show_name(job.pool),
            show_cores(job.cores),
            format_span(job.running_s),
            "yes" if job.interruptible else "no",
            show_cores(job.lost_core_seconds / 3600.0),
            show_name(job.to_node) if job.to_node else ("waits for room", "yellow"),
        ]
        for job in plan.jobs
    ]
    if rows:
        headings = (
            column("job"), column("operation", 3), column("pool", 2), column(">cores", 1), column(">running", 5),
            column("interruptible", 6), column(">core-hours", 4), column("goes to"),
        )  # fmt: skip
        print_table(headings, rows)
    hours = show_cores(plan.lost_core_seconds / 3600.0)
    print_text(
        f"{count(plan.job_count, 'job')} would be stopped, of which {plan.waiting_job_count} would wait for room; "
        f"{hours} core-hours of work would be lost"
    )
    if plan.gang_job_count:
        print_text(f"{count(plan.gang_job_count, 'job')} on other nodes would stop with their gangs")
    if plan.hidden_job_count:
        warn(f"{count(plan.hidden_job_count, 'job')} of operations that you may not see are not shown")


def _path(node: str) -> str:
    return f"/nodes/{quote_name(node)}"


COMMANDS: Final[tuple[click.Command, ...]] = (cordon_command, uncordon_command, drain_command)
