"""Moves operations with ``gang_options`` from one incarnation to the next; pure (semantics.md 7.5)."""

from __future__ import annotations

from collections.abc import Set

import msgspec

from cpumond.scheduler.decide import preemption_record
from cpumond.scheduler.decide.placement import find_obstacle
from cpumond.scheduler.elements import Job, Operation
from cpumond.scheduler.settings import failures, incarnations
from cpumond.scheduler.state import State, lifecycle, retries


def switch(state: State, operation: Operation, now: float) -> None:
    """Start the new incarnation that the operation's record has: stop all jobs of the previous one, and restart those
    whose node may run them again. No new job is sent before all old ones have ended (``lifecycle.is_held``)."""
    record, gang = operation.record, operation.gang
    if gang is None:
        return
    new = record.incarnations[-1]
    state.gangs.lacking.pop(record.id, None)
    state.gangs.switches[new.reason] = state.gangs.switches.get(new.reason, 0) + 1
    for node in state.nodes.values():
        for job in node.stopping.values():
            if job.element.operation is operation:
                gang.ending[job.id] = node.id
                lifecycle.free_place(job, now)
        strangers = (each for each in node.strangers.values() if each.operation_id == record.id and each.from_scheduler)
        gang.ending.update((each.job_id, node.id) for each in strangers)
    jobs = [job for element in operation.elements.values() for job in element.jobs.values()]
    jobs.sort(key=lambda job: job.sequence)
    keeps = new.reason != "job_lack_after_revival" and not record.is_gang and not operation.waits_whole
    kept = [job for job in jobs if keeps and _is_kept(state, job)]
    why = f"{failures.INCARNATION_CHANGED}: {incarnations.describe_switch(new)}"
    for job in jobs:
        told = preemption_record.make_record(job, "aborted", why, now)
        told = msgspec.structs.replace(told, cause=failures.INCARNATION_CHANGED)
        lifecycle.stop(state, job, "aborted", why, now, told, alone=True)
    for numbers in operation.list_numbers():
        numbers.begin_anew()
    gang.ranks.clear()
    retries.renew_needed(operation)
    # A job with a rank keeps its rank; jobs without a rank take the free ones.
    for old in kept:
        gang.keep_rank(old.task, old.cookie, old.gang_rank)
    for old in sorted(kept, key=lambda job: job.gang_rank < 0):
        _start_again(state, old, now)


def _is_kept(state: State, job: Job) -> bool:
    """Return whether the job's node may start a job of the job's operation now."""
    node, element = job.node, job.element
    if not node.takes_jobs or node.sequence < 0:
        return False
    record = element.operation.record
    return state.nodes.get(node.id) is node and element.is_running and not record.suspended and element.may_use(node)


def _start_again(state: State, old: Job, now: float) -> None:
    """Start the successor of a stopped job on the same node with the same cookie, if it fits there."""
    element, node = old.element, old.node
    task = next((each for each in element.operation.next_tasks() if each.name == old.task.name), old.task)
    if not element.operation.needed.get(task.name) or find_obstacle(element, task, node.free, node.unordered_cores):
        return
    state.job_sequence += 1
    new_id = incarnations.derive_id(old.id, element.operation.record.incarnation)
    job = Job(new_id, element, task, node, now, state.job_sequence)
    job.cookie, job.in_gang = old.cookie, old.in_gang
    lifecycle.start_new(state, job)


def note_lacks(state: State) -> None:
    """After a restart of the scheduler, note operations that need a new incarnation since not all of their jobs run."""
    begun = {job.incarnation for job in state.jobs.values()}
    for operation in state.operations.values():
        if operation.gang is not None and (lack := _find_lack(state, operation, begun)) is not None:
            state.gangs.lacking[operation.id] = lack


def _find_lack(state: State, operation: Operation, begun: Set[str]) -> tuple[str, int, int] | None:
    """Find a task with ``gang_options`` whose number of running ranked jobs is not ``size``. Returns its name, ``size``
    and the number of these jobs; None if there is no such task, or if no job of this incarnation was started yet."""
    record = operation.record
    jobs = [job for element in operation.elements.values() for job in element.jobs.values()]
    present = [job for job in jobs if job.incarnation == record.incarnation]
    ended = state.finished_jobs.get(record.id, {}).values()
    if record.incarnation not in begun and not any(job.incarnation == record.incarnation for job in ended):
        return None
    for task in record.tasks:
        if task.gang_options is not None:
            actual = sum(job.task.name == task.name and job.gang_rank >= 0 for job in present)
            if actual != task.gang_size:
                return task.name, task.gang_size, actual
    return None
