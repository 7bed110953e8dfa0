"""Starts and stops of jobs that must be stored before a response contains them; their use after a restart; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cpumond.scheduler.decide import preemption_record
from cpumond.scheduler.elements import Job, Operation
from cpumond.scheduler.elements.retry_run import grow
from cpumond.scheduler.model import StartRecord
from cpumond.scheduler.model.budget import NOTHING_COUNTED, CorePair
from cpumond.scheduler.settings.failures import INCARNATION_CHANGED
from cpumond.scheduler.state import State, lifecycle
from cpumond.scheduler.state.reports import NO_CPU_TIMES, find_task
from cpumond.scheduler.state.transaction import Stops


def resume(state: State, record: StartRecord, now: float) -> None:
    """Count a job that an earlier run of the scheduler started as being on its node. The node may not know of it."""
    operation, node = state.operations.get(record.operation_id), state.nodes.get(record.node_id)
    element = None if operation is None else operation.elements.get(record.tree)
    task = None if operation is None else find_task(operation.record, record.task)
    if node is None or element is None or task is None or node.tree != record.tree:
        if record.counted == NOTHING_COUNTED or state.record_of(record.operation_id) is None:
            state.expired["start", record.id] = None  # if the node has the job, it must stop it
        known = state.starts_of.setdefault(record.node_id, {}) if node is None else node.former_starts
        known[record.id] = record
        if operation is not None:
            lifecycle.note_indices(operation, record)
        return
    if state.finished_jobs.get(record.operation_id, {}).pop(record.id, None) is not None:
        state.expired["job", record.id] = None  # it was declared lost, but adopted later
    state.job_sequence = max(state.job_sequence, record.sequence)
    task = grow(task, record.memory_limit)
    job = Job(record.id, element, task, node, record.start_time, record.sequence)
    job.is_stored = job.is_resumed = True
    job.counted, job.settled = NO_CPU_TIMES, record.counted
    job.reclaimed = record.reclaimed
    job.cookie, job.index, job.task_index = record.cookie, record.job_index, record.task_job_index
    job.recall_gang(record.incarnation, record.gang_rank)
    job.backfill_until = record.backfill_until
    lifecycle.note_indices(element.operation, record)
    is_needless = element.operation.numbers_of(task.name).is_done(record.cookie)
    job.has_ceiling = lifecycle.recall_ceiling(job, record)
    if record.memory_reserve:
        job.reserve_memory(record.memory_reserve)
    lifecycle.start(state, job)
    job.first_sent_at = None if lifecycle.is_held(state, job, now) else now
    if record.stopped:
        told = preemption_record.make_record(job, record.stopped, "", now)
        told = msgspec.structs.replace(told, why=record.why, cause=record.cause)
        lifecycle.stop(state, job, record.stopped, record.why, now, told, record.fails)
        del state.unstored_stops[job.id]
    elif job.incarnation != element.operation.record.incarnation:
        lifecycle.stop(state, job, "aborted", INCARNATION_CHANGED, now, alone=True)
    elif is_needless:  # the earlier run could not store its stop
        lifecycle.stop(state, job, "aborted", lifecycle.NEEDLESS, now, alone=True)
    if element.operation.gang is not None and job.incarnation == element.operation.record.incarnation:
        element.operation.gang.keep_rank(task, job.cookie, job.gang_rank)


def waits_for_store(state: State, node_id: str) -> bool:
    """Return whether the node has jobs whose start must be stored before a response may contain it."""
    return not all(job.is_stored for job in state.nodes[node_id].jobs.values())


def list_unstored(state: State) -> list[StartRecord]:
    """Return the jobs to store, then to pass to ``note_stored``: new jobs, and stopped jobs that these may replace."""
    state.unstored = {job.id: job for job in state.unstored.values() if job.is_active}
    # A job that an earlier run stopped is unknown on its node until its end.
    told = state.unstored_stops.values()
    stops = {job.id: job for job in told if state.jobs.get(job.id) is job or job.id in job.node.strangers}
    state.unstored_stops = stops
    return [make_start_record(job) for job in (*state.unstored.values(), *stops.values())]


def list_stopped(state: State, stops: Stops) -> list[Job]:
    """Return the active jobs that ``stops`` selects."""
    jobs = [job for element in state.operations[stops.operation_id].elements.values() for job in element.jobs.values()]
    if stops.most is not None:
        return _list_surplus(state.operations[stops.operation_id], jobs, stops.most)
    # A gang stops as a whole.
    is_whole = not stops.job_id or stops.operation_id in state.gangs.live
    return [job for job in jobs if is_whole or job.id == stops.job_id]


def _list_surplus(operation: Operation, jobs: list[Job], most: Mapping[str, int]) -> list[Job]:
    """Return the jobs of each task beyond the number in ``most``: those with the highest cookies."""
    surplus = []
    for name, job_count in most.items():
        own = sorted((job for job in jobs if job.task.name == name), key=lambda job: (job.cookie, job.sequence))
        counts = operation.record.counts.get(name)
        # Stopping jobs that keep their place count as active.
        kept = operation.active.get(name, 0) - len(own)
        left = job_count - kept - (0 if counts is None else counts.completed)
        surplus += own[max(left, 0) :]
    return surplus


def list_stops_of(state: State, stops: Stops) -> list[StartRecord]:
    """Return the records to store together with a command that stops jobs: records of the operation's stored jobs, as
    stopped, and of jobs stopped before whose stop may not be stored."""
    told = (job for job in state.unstored_stops.values() if job.element.operation.id == stops.operation_id)
    found = [make_start_record(job) for job in told if state.jobs.get(job.id) is job]
    for job in list_stopped(state, stops):
        if job.is_stored:
            why = preemption_record.make_record(job, "aborted", stops.why, 0.0).why
            cause = stops.cause if stops.job_id in ("", job.id) else ""
            found.append(msgspec.structs.replace(make_start_record(job), stopped="aborted", why=why, cause=cause))
    return found


def carry_out(state: State, stops: Stops, now: float) -> None:
    """Stop the jobs that ``stops`` selects."""
    for job in list_stopped(state, stops):
        if stops.job_id in ("", job.id):
            record = preemption_record.make_record(job, "aborted", stops.why, now)
            lifecycle.stop(state, job, "aborted", stops.why, now, msgspec.structs.replace(record, cause=stops.cause))
            if stops.timeout_s is not None and job.stop is not None:
                lifecycle.give_time(state, job.stop, stops.timeout_s)


def note_stored(state: State, starts: Iterable[StartRecord]) -> None:
    for record in starts:
        if record.stopped:
            state.unstored_stops.pop(record.id, None)
            continue
        job = state.unstored.pop(record.id, None)
        if job is not None:
            job.is_stored = True
            if job.is_resumed:
                state.expired["job", job.id] = None  # it was declared lost, but adopted later
            if not job.is_active and state.jobs.get(job.id) is job:
                state.unstored_stops[job.id] = job


def list_settled(state: State, settled: Mapping[str, CorePair], stops: Iterable[StartRecord]) -> list[StartRecord]:
    """Return ``stops`` and starts of live jobs, with the part of each that stored sums of budgets contain (2.15)."""
    records = {record.id: record for record in stops}
    for job_id in settled:
        if job_id not in records and job_id in state.jobs:
            records[job_id] = make_start_record(state.jobs[job_id])
    return [
        msgspec.structs.replace(record, counted=settled[record.id]) if record.id in settled else record
        for record in records.values()
    ]


def make_start_record(job: Job) -> StartRecord:
    incarnation, gang_rank = job.in_gang
    record = StartRecord(
        id=job.id, operation_id=job.element.operation.id, task=job.task.name, tree=job.element.tree.name,
        node_id=job.node.id, start_time=job.start_time, sequence=job.sequence, reclaimed=job.reclaimed,
        cookie=job.cookie, job_index=job.index, task_job_index=job.task_index,
        set_container_cpu_limit=job.set_container_cpu_limit, memory_reserve=job.memory_reserve,
        memory_limit=job.grown_memory, incarnation=incarnation, gang_rank=gang_rank, counted=job.settled,
        backfill_until=job.backfill_until,
    )  # fmt: skip
    if job.stop is None:
        return record
    told = job.stop.record
    return msgspec.structs.replace(record, stopped=told.kind, why=told.why, cause=told.cause, fails=job.stop.fails)
