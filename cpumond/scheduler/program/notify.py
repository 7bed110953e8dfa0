"""Notifications to the service manager about the scheduler: READY, STATUS, WATCHDOG, STOPPING (sd_notify)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cpumond.core.words import count

if TYPE_CHECKING:
    from cpumond.host.service import ServiceManager
    from cpumond.scheduler.program.leading import Leading
    from cpumond.scheduler.service import Scheduler

STATUS_PERIOD_S = 10.0
TROUBLE_S = 60.0


class Vitals(NamedTuple):
    """Sources of notifications. ``describe``: returns one line. ``pulse``: returns a value that, as long as all is
    well, changes at least every ``period_s`` real seconds."""

    describe: Callable[[], str]
    pulse: Callable[[], object]
    period_s: float


def vitals_of(scheduler: Scheduler) -> Vitals:
    period_s = scheduler.clock.real_s(scheduler.update_period_s)
    return Vitals(partial(describe_status, scheduler), lambda: scheduler.timings.good_updates, period_s)


def vitals_of_one(leading: Leading, period_s: float) -> Vitals:
    """Return the vitals of one of several schedulers. ``period_s``: real seconds between its updates while it leads."""
    return Vitals(partial(describe_lead, leading), leading.pulse, max(period_s, leading.lead.look_s))


async def notify_manager(manager: ServiceManager, vitals: Vitals, stopping: asyncio.Event) -> None:
    """Send READY at once, WATCHDOG as long as updates succeed, STATUS every STATUS_PERIOD_S, and STOPPING at the end.
    If the event loop is blocked, an update does not end or all updates fail, WATCHDOG stops and the service is
    restarted. If the store refuses, WATCHDOG goes on: a new process would use the same disk; this one still answers."""
    if not manager.listens:
        return
    manager.notify("READY=1", status=vitals.describe())
    clock = asyncio.get_running_loop().time
    ping_s = min(manager.watchdog_s / 3, STATUS_PERIOD_S)
    seen, seen_s, sent_s = object(), -math.inf, clock()
    while not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), ping_s)
        now_s = clock()
        pulse = vitals.pulse()
        if pulse != seen:
            seen, seen_s = pulse, now_s
        # Updates may be further apart than the watchdog's time-out, so each one counts for a whole period.
        lines = ["WATCHDOG=1"] if now_s - seen_s <= vitals.period_s else []
        status = ""
        if now_s - sent_s >= STATUS_PERIOD_S:
            status, sent_s = vitals.describe(), now_s
        if lines or status:
            manager.notify(*lines, status=status)
    manager.notify("STOPPING=1", status="answering the last requests")


def describe_lead(leading: Leading) -> str:
    """Return one line for ``systemctl status``: the role and, of a leader, its operations, jobs and nodes."""
    view, reign = leading.view(), leading.reign
    trouble = f"; the store's engine does not respond: {view.error}" if view.error else ""
    if view.role == "leader" and reign is not None and reign.scheduler is not None:
        return f"leads (term {view.term}); {describe_status(reign.scheduler)}{trouble}"
    leader = f"{view.leader} leads (term {view.term})" if view.leader else "no leader is known"
    return f"standby: {leader}{trouble}"


def describe_status(scheduler: Scheduler) -> str:
    """Return one line for ``systemctl status``: operations, jobs, nodes, and problems with updates or the store."""
    state, timings, now = scheduler.state, scheduler.timings, scheduler.clock.now()
    pending = sum(operation.record.state == "pending" for operation in state.operations.values())
    online = sum(node.is_online for node in state.nodes.values())
    parts = [
        f"{count(len(state.operations), 'operation')} ({pending} pending)",
        count(len(state.jobs), "job"),
        f"{count(len(state.nodes), 'node')} ({online} online)",
    ]
    if timings.failed_at is not None and now - timings.failed_at <= TROUBLE_S:
        parts.append("an update of fair shares failed, see the journal")
    if timings.store_error_at is not None and now - timings.store_error_at <= TROUBLE_S:
        parts.append("the store refuses writes, so commands fail, see the journal")
    return "; ".join(parts)
