"""Backfill: jobs of the state use resources reserved for a gang until it needs them; pure (semantics.md 7.3)."""

from __future__ import annotations

from itertools import islice
from typing import Final

from cpumond.scheduler.decide import backfill
from cpumond.scheduler.decide.gangs import may_take_back
from cpumond.scheduler.decide.placement import ServiceOrder, has_spare
from cpumond.scheduler.decide.run_times import RunTimes
from cpumond.scheduler.elements import Job, Node, Tree
from cpumond.scheduler.model import JobRecord
from cpumond.scheduler.state import State, blame, gangs, lifecycle

MOST_KNOWN: Final = 5000
"""Number of kinds of jobs whose run times are remembered; also number of ended jobs that are read at first."""


def find_run_times(state: State) -> RunTimes:
    """Return the run times of ended jobs. The first call collects them; ``note_ended`` then updates them."""
    if state.gangs.run_times is None:
        times = state.gangs.run_times = RunTimes(MOST_KNOWN)
        records = [*state.finished.values(), *(each.record for each in state.operations.values())]
        ended = (
            (each, job) for each in records[::-1] for job in reversed(state.finished_jobs.get(each.id, {}).values())
        )
        for record, job in reversed(list(islice(ended, MOST_KNOWN))):
            times.see(record, job)
    return state.gangs.run_times


def note_ended(state: State, ended: JobRecord, job: Job | None) -> None:
    """Learn from the job ``ended``. ``job`` is its live object; None if the job was declared lost before."""
    record = state.record_of(ended.operation_id)
    if state.gangs.run_times is not None and record is not None:
        state.gangs.run_times.see(record, ended)
    if job is not None and job.backfill_until is not None:
        is_late = (ended.finish_time if job.stop is None else job.stop.since) > job.backfill_until
        if is_late or ended.state == "completed":
            job.element.operation.backfilled_count += 1
            job.element.operation.overstay_count += is_late


def use_kept_room(
    state: State, node: Node, tree: Tree, order: ServiceOrder, now: float, make_job: gangs.MakeJob
) -> None:
    """Start, on a node's reserved resources, jobs expected to end before the gang needs these resources."""
    kept, spare = state.gangs.reservations.get(tree.name), state.rules.spare
    if kept is None or node not in kept.rooms or not may_take_back(kept.element):
        return
    if not has_spare(node, node.free, spare) or gangs.find_reservation(state, tree, now) is not kept:
        return
    if kept.ready_at is None or now - kept.looked_at >= state.rules.heartbeat_period_s:
        times = find_run_times(state)
        kept.looked_at, kept.ready_at = now, backfill.find_ready(kept, times, now)
        elements = tree.operations.values() if kept.ready_at > now else ()
        found = backfill.list_takers(elements, times, kept.ready_at, now)
        ranks = {each: rank for rank, each in enumerate(order.rank(list({element: None for element, *_ in found})))}
        kept.takers = sorted(found, key=lambda taker: ranks[taker[0]])
    for element, known, run_s in kept.takers:
        while (
            has_spare(node, node.free, spare)
            and (task := backfill.find_startable(element, known.name, node)) is not None
            and not (element.operation.shuns and blame.shuns(state, element, task, node, now))
        ):
            job = make_job(element, task, node)
            job.backfill_until = now + run_s
            lifecycle.start_new(state, job)
