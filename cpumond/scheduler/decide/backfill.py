"""Backfill: which jobs use resources reserved for a gang, and which stop when it needs them (semantics.md 7.3).

Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cpumond.fairshare.resources import CPU, Vector, add
from cpumond.scheduler.decide.gangs import Reservation, list_backfilled, sum_backfilled
from cpumond.scheduler.decide.placement import find_obstacle, fits_orders, satisfaction, wants_jobs
from cpumond.scheduler.decide.run_times import ENOUGH, RunTimes, left_of
from cpumond.scheduler.elements import Job, Node, OperationElement
from cpumond.scheduler.elements.node_sizes import fits
from cpumond.scheduler.model import OperationRecord, Task

FORGIVEN: Final = 2
"""Number of an operation's jobs that may run longer than expected. In a large operation, this many times the number of
jobs that ``backfill_quantile`` leaves out may do so."""


def _list_limits(record: OperationRecord, task: Task, began: float) -> list[float]:
    """Return the times at which fixed limits of the run time stop a job that started at ``began``."""
    limits = [] if task.job_time_limit is None else [began + task.job_time_limit / 1e3]
    return limits if record.time_limit is None else [*limits, record.start_time + record.time_limit / 1e3]


def find_refusal(
    element: OperationElement, task: Task, times: RunTimes, ready_at: float, now: float
) -> tuple[float, str]:
    """Return the maximum seconds, as far as known, for which a job of the task would run if it started now, and why it
    may not use reserved resources until ``ready_at``; "" if it may."""
    operation, settings = element.operation, element.tree.config.settings
    if operation.record.is_gang:
        return 0.0, "it is a gang"
    if task.fail_on_job_restart:
        return 0.0, "they must not be stopped (fail_on_job_restart)"
    most = FORGIVEN * max(1.0, (1.0 - settings.backfill_quantile) * operation.backfilled_count)
    if operation.overstay_count > most:
        return 0.0, "too many of them ran there for longer than expected"
    ends, run_s = _list_limits(operation.record, task, now), times.find(operation.record, task).run_s
    if len(run_s) >= ENOUGH:
        last = min(int(settings.backfill_quantile * len(run_s)), len(run_s) - 1)
        ends.append(now + run_s[last] * settings.backfill_margin)
    if not ends:
        return 0.0, f"their run time has no limit, and is not known before {ENOUGH} jobs like them have completed"
    return max(min(ends) - now, 0.0), "" if min(ends) <= ready_at else "they run for too long"


def find_ready(kept: Reservation, times: RunTimes, now: float) -> float:
    """Return when all reserved resources are expected to be free: a job on them is expected to end when half of the
    jobs similar to it have ended. A job whose run time is unknown may end at any moment."""
    return max((_find_ready_on(node, room, times, now) for node, room in kept.rooms.items()), default=now)


def _find_ready_on(node: Node, room: Vector, times: RunTimes, now: float) -> float:
    free, at = add(node.free, sum_backfilled(node)), now
    others = [job for job in node.jobs.values() if job.backfill_until is None]
    for end, _, job in sorted((_find_end(job, times, now), job.sequence, job) for job in others):
        if fits(free, room):
            break
        free, at = add(free, job.usage), end
    return at


def _find_end(job: Job, times: RunTimes, now: float) -> float:
    record, began = job.element.operation.record, job.start_time if job.began_at is None else job.began_at
    run_s = times.find(record, job.task).run_s
    if len(run_s) < ENOUGH:
        return now
    return max(min([now + left_of(run_s, max(now - began, 0.0), 0.5), *_list_limits(record, job.task, began)]), now)


def list_takers(
    elements: Iterable[OperationElement], times: RunTimes, ready_at: float, now: float
) -> list[tuple[OperationElement, Task, float]]:
    """``Reservation.takers``: which of ``elements`` may use reserved resources until ``ready_at``."""
    asked = [(each, task) for each in elements if wants_jobs(each) for task in each.operation.next_tasks()]
    found = [(*each, *find_refusal(*each, times, ready_at, now)) for each in asked]
    return [(element, task, run_s) for element, task, run_s, refusal in found if not refusal]


def find_startable(element: OperationElement, name: str, node: Node) -> Task | None:
    """Return the task ``name``, with the request of its next job (including the memory of a retry), if this job may
    still start on a node."""
    task = next((each for each in element.operation.next_tasks() if each.name == name), None)
    if task is None or not wants_jobs(element) or not element.may_use(node):
        return None
    if element.operation.record.preemption_mode == "graceful" and satisfaction(element) >= 1.0:
        return None
    return None if find_obstacle(element, task, node.free, node.unordered_cores) else task


def list_returns(node: Node, order: Vector, now: float) -> list[Job]:
    """Return the backfilled jobs of a node that stop for a gang that needs ``order`` there: first the jobs that run
    longer than expected, then the last started."""
    free, unordered, returns = node.free, node.unordered_cores, list[Job]()
    for job in sorted(list_backfilled(node), key=lambda job: (now <= (job.backfill_until or 0.0), -job.sequence)):
        if fits(free, order) and fits_orders(unordered, order[CPU]):
            break
        returns.append(job)
        free, unordered = add(free, job.usage), unordered + job.ordinary_cores
    return returns
