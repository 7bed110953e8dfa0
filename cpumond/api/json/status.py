"""Requests about the scheduler itself: health, status, alerts, the first page, the user of the request."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, Literal

import msgspec

from cpumond import __version__
from cpumond.api import overview
from cpumond.api.json.call import Call
from cpumond.api.json.prepared import WithStatus
from cpumond.api.json.trees import last_idle_reports
from cpumond.scheduler.service import Scheduler

READY_PERIODS: Final = 5
"""After so many update periods without an update, the scheduler counts as stuck."""

READY_S: Final = 2.0

ALERT_S: Final = 600.0
"""Seconds for which an alert reports a problem after it occurred."""

LATE_UPDATES: Final = 30
"""Maximum number of late updates, among the last ``RECENT_UPDATES``, that cause no alert."""


def view_me(call: Call) -> overview.Me:
    scheduler, shared = call.scheduler, call.shared
    return overview.Me(
        user=call.user.name, groups=sorted(call.user.groups), is_admin=call.user.admin, needs_token=shared.needs_token,
        is_open=shared.is_open, version=__version__, cluster_name=shared.cluster_name, started_at=scheduler.started_at,
        now=call.now, history_length_s=0.0 if scheduler.history is None else scheduler.history.length_s,
    )  # fmt: skip


async def view_overview(call: Call) -> overview.Overview:
    state, history = call.state, call.scheduler.history
    default, cores_of = state.config.default_tree, call.shared.pool_tables.cores_of
    reports = last_idle_reports(call)
    return overview.Overview(
        why=overview.choose_sentence(list(reports.values())),
        status=await view_status(call),
        health=find_health(call.scheduler),
        alerts=(await list_alerts(call)).alerts,
        trees=[
            overview.view_totals(each, await cores_of(each), each.name == default, reports.get(each.name))
            for each in list(state.trees.values())
        ],
        history=None if history is None else history.view(),
    )


async def list_alerts(call: Call) -> overview.AlertList:
    live, doubtful = call.state.operations, (await call.shared.looks.last()).doubtful
    alerts = overview.find_operation_alerts([each for each in doubtful if each.id in live], call.rights)
    found = list(islice(alerts, overview.MOST_OPERATION_ALERTS))
    return overview.find_alerts(call.state, call.now, list(_own_alerts(call.scheduler)), found, call.user)


def _own_alerts(scheduler: Scheduler) -> Iterator[overview.Alert]:
    timings = scheduler.timings
    refused = f"the store refused {timings.store_errors} writes since the start; see the log and free its disk"
    lost = "the store was removed while it was in use; it was written again, and nothing is lost; see the log"
    failed = f"{timings.failed_updates} fair-share updates failed since the start; see the log"
    recent, late_count = len(timings.recent_late), sum(timings.recent_late)
    late_at = timings.late_at if late_count > LATE_UPDATES else None
    late = (
        f"{late_count} of the last {recent} fair-share updates began late; raise fair_share_update_period or give the "
        "scheduler more CPU"
    )
    kinds: tuple[tuple[str, Literal["warning", "error"], float | None, str], ...] = (
        ("store_errors", "error", timings.store_error_at, scheduler.store_problem or refused),
        ("store_lost", "error", timings.store_lost_at, lost),
        ("failed_updates", "error", timings.failed_at, failed),
        ("late_updates", "warning", late_at, late),
    )
    for code, severity, last_at, message in kinds:
        if (last_at or 0.0) > scheduler.clock.now() - ALERT_S:
            yield overview.Alert(code, severity, "", message)
    health = find_health(scheduler)
    if health.status == "stuck":
        message = f"the last fair-share update was {health.last_update_age_s or 0.0:.1f} s ago"
        yield overview.Alert("stuck", "error", "", message)


async def view_status(call: Call) -> overview.Status:
    shown_states = (await call.shared.looks.last()).counts.states
    scheduler, now = call.scheduler, call.now
    return overview.Status(
        version=__version__, uptime_s=now - scheduler.started_at, now=now, update_period_s=scheduler.update_period_s,
        last_update_age_s=_update_age_s(scheduler), default_tree=scheduler.state.config.default_tree,
        timings=scheduler.timings.list_numbers(),
        requests={name: taken for name, taken in call.shared.requests.items() if taken.count},
        counts=overview.count_all(scheduler.state, shown_states),
    )  # fmt: skip


def view_readiness(call: Call) -> overview.Health | WithStatus:
    health = find_health(call.scheduler)
    return health if health.status == "ok" else WithStatus(health, 503)


def view_liveness(call: Call) -> overview.Health:
    return overview.Health("ok", _update_age_s(call.scheduler))


def find_health(scheduler: Scheduler) -> overview.Health:
    health = _own_health(scheduler)
    if scheduler.lead is None:
        return health
    seen = scheduler.lead()
    return msgspec.structs.replace(health, role=seen.role, leader=seen.leader, term=seen.term or None)


def _own_health(scheduler: Scheduler) -> overview.Health:
    age_s = _update_age_s(scheduler)
    if not scheduler.ready.is_set():
        return overview.Health("starting", age_s)
    stuck = age_s is not None and age_s > max(READY_PERIODS * scheduler.update_period_s, READY_S)
    status: Literal["ok", "stuck", "refusing"] = "refusing" if scheduler.store_problem else "ok"
    return overview.Health("stuck" if stuck else status, age_s)


def _update_age_s(scheduler: Scheduler) -> float | None:
    """Seconds since the last update of the tree whose last update is the oldest; None before the first update."""
    times = [kept.previous_time for kept in scheduler.updates.values() if kept.previous_time is not None]
    return max(scheduler.clock.now() - min(times), 0.0) if times else None
