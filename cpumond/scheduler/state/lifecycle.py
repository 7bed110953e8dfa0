"""Starts and stops jobs and updates all counters; stops a gang as a whole; pure (semantics.md 6.7, 7.3)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import msgspec

from cpumond.core.wire import JobReport
from cpumond.scheduler.decide import preemption_record
from cpumond.scheduler.decide.placement import has_ceiling, is_on_reclaimed
from cpumond.scheduler.elements import Job, Node, Operation, Stop, count_loss, end_job, share_needed, start_job
from cpumond.scheduler.elements.job_numbers import UNKNOWN, EndingJob
from cpumond.scheduler.model import JobRecord, OperationRecord, PreemptionRecord, StartRecord, Task
from cpumond.scheduler.settings import failures, incarnations, operations
from cpumond.scheduler.settings.memory_reserve import set_reserves
from cpumond.scheduler.state import State, blame, retries
from cpumond.scheduler.state.reports import find_task


def start_new(state: State, job: Job) -> None:
    """Start a new job. Its class, ceiling and numbers are decided here and do not change later."""
    operation = job.element.operation
    if operation.retries is not None and job.cookie < 0:
        job.cookie = operation.retries.choose(operation.record, job.task)
    numbers = operation.numbers_of(job.task.name)
    job.index, job.task_index = operation.next_index, numbers.next_index
    operation.next_index += 1
    numbers.next_index += 1
    if operation.shuns:
        blame.note_start(job)
    job.reclaimed = is_on_reclaimed(job)
    job.has_ceiling = has_ceiling(job)
    start(state, job)
    if operation.gang is not None:
        rank = job.gang_rank if job.gang_rank >= 0 else operation.gang.take_rank(job.task, job.cookie)
        job.in_gang = operation.record.incarnation, rank


def recall_ceiling(job: Job, record: StartRecord | JobRecord | None) -> bool:
    """Return whether a job of an earlier run has a ceiling. If a version before 0.3 stored none, its task decides."""
    told = None if record is None else record.set_container_cpu_limit
    told = job.task.set_container_cpu_limit if told is None else told
    return not job.reclaimed if told is None else told


NEEDLESS: Final = "the job that it replaced completed after all"


def start(state: State, job: Job) -> None:
    start_job(job)
    operation, task = job.element.operation, job.task
    if operation.retries is not None:
        operation.retries.release((task.name, job.cookie))
    numbers, gang = operation.numbers_of(task.name), operation.gang
    job.cookie = numbers.take(job.id, task.job_count, job.cookie)
    job.after = numbers.find_ending(job.cookie)
    if gang is not None and gang.ending and job.after is None:
        job.after = EndingJob(*next(iter(gang.ending.items())))
    if job.after is not None and not is_held(state, job, job.start_time):
        job.first_sent_at = None  # its predecessors have ended and do not delay it
    state.jobs[job.id] = job
    if not job.is_stored:
        state.unstored[job.id] = job
    renew_needed(job)


def stop(
    state: State, job: Job, kind: Any, why: str, now: float, record: PreemptionRecord | None = None,
    fails: bool = False, alone: bool = False,
) -> None:  # fmt: skip
    """Stop a job: it leaves all counters at once, and is replaced if its operation continues (6.7).

    All other jobs of its gang are stopped with it unless ``alone``; the plan of a preemption includes them itself.
    ``fails``: the job counts as failed."""
    if not job.is_active:
        return  # it was stopped with its gang
    settings = job.element.tree.config.settings
    timeout_ms = settings.job_graceful_preemption_timeout if kind == "graceful" else settings.job_preemption_timeout
    if record is None:
        record = preemption_record.make_record(job, kind, why, now)
    if fails:
        record = msgspec.structs.replace(record, why=why)  # in place of the reason of an abort
    gang = job.element.operation.gang
    is_of_before = job.incarnation != job.element.operation.record.incarnation
    must_end = fails or job.must_end or retries.is_for_end(job, record)
    job.stop = Stop(record, timeout_ms / 1e3, now, fails, must_end and not is_of_before)
    end_job(job)
    if job.keeps_place:
        job.element.operation.numbers_of(job.task.name).active_count += 1
    else:
        give_back(job, now)
    if gang is not None and is_of_before:
        gang.ending[job.id] = job.node.id
    job.state = "stopping"
    job.node.stopping[job.id] = job
    if job.is_stored:
        state.unstored_stops[job.id] = job
    renew_needed(job)
    if kind != "aborted":
        state.preemptions.append(record)
        state.happened.append(record)
        key = (record.tree, record.pool, record.kind)
        state.preemption_counts[key] = state.preemption_counts.get(key, 0) + 1
        count_loss(job.element, record.lost_core_seconds)
    operation = job.element.operation
    if operation.record.is_gang and kind != "preempted" and not alone:
        _stop_rest(state, operation, kind, f"its gang stops with job {job.id}: {why}", now)


def note_broken(state: State, job: Job, how: str = "gone") -> None:
    """Note that a job ended before its work was done."""
    if job.element.operation.record.is_gang:
        state.gangs.broken[job.element.operation.id] = f"job {job.id} is {how}"


def stop_broken_gangs(state: State, now: float) -> None:
    """Stop all jobs of gangs of which a job ended before its work was done. Such a gang starts again as a whole."""
    while state.gangs.broken:
        operation_id, why = state.gangs.broken.popitem()
        operation = state.gangs.live.get(operation_id)
        if operation is not None and (operation.needed or operation.waits_whole):
            _stop_rest(state, operation, "aborted", f"its gang starts again as a whole: {why}", now)


def give_time(state: State, stop: Stop, timeout_s: float) -> None:
    """Set how long a stopped job has to end. Jobs of a gang that were stopped together with it get the same time."""
    stop.timeout_s = timeout_s
    operation = state.gangs.live.get(stop.record.operation_id)
    for node in state.nodes.values() if operation is not None else ():
        for job in node.stopping.values():
            if job.stop is not None and job.element.operation is operation and job.stop.since == stop.since:
                job.stop.timeout_s = timeout_s


def _stop_rest(state: State, operation: Operation, kind: Any, why: str, now: float) -> None:
    for element in operation.elements.values():
        for job in list(element.jobs.values()):
            stop(state, job, kind, why, now, alone=True)


def count_ended(state: State, ended: Collection[JobRecord], now: float) -> tuple[OperationRecord, ...]:
    """Return the new records of operations whose jobs ended; jobs that an operation's end stopped count, too."""
    changed: dict[str, OperationRecord] = {}
    ended_of: dict[str, list[JobRecord]] = {}
    blamed = blame.find_blamed(state, ended)
    for job in ended:
        operation = state.operations.get(job.operation_id)
        if operation is not None:
            ended_of.setdefault(operation.id, []).append(job)
            record, terms = changed.get(job.operation_id, operation.record), retries.find_terms(operation, job)
            changed[record.id] = operations.count_job(record, job, now, terms, blames_node=job.id in blamed)
    for record in [record for record in changed.values() if record.is_finished]:
        stopped = state.operations[record.id].active
        for job in ended_of[record.id]:
            live = state.jobs.get(job.id)
            if live is not None and (live.is_active or live.keeps_place):
                stopped[job.task] -= 1
        changed[record.id] = operations.finish(record, record.state, now, record.error, stopped)
    return tuple(changed.values())


def renew_reserves(operation: Operation) -> None:
    """Set the memory that the next jobs of an operation reserve, by earlier jobs, if all its trees allow it (8.1)."""
    elements = operation.elements.values()
    is_on = bool(elements) and all(each.tree.config.settings.enable_memory_reserve for each in elements)
    record = set_reserves(operation.record, is_on, lambda task, cookie: operation.numbers_of(task).is_taken(cookie))
    if record is not operation.record:
        operation.record = record
        operation.touch()


def blame_switches(state: State, ended: Iterable[JobRecord]) -> Iterator[JobRecord]:
    """Blame one job for the end of an incarnation: the other jobs of that incarnation count as aborted with it."""
    begun: set[str] = set()
    for job in ended:
        operation = state.operations.get(job.operation_id)
        if operation is None or operation.gang is None:
            yield job
            continue
        record, task = operation.record, find_task(operation.record, job.task)
        if record.id in begun or job.incarnation != record.incarnation:
            if job.state in ("completed", "failed"):
                why = f"{failures.INCARNATION_CHANGED}: all of its jobs start again"
                yield msgspec.structs.replace(job, state="aborted", reason=why, failure=None)
                continue
        elif incarnations.is_over(record, task, job, operations.starts_again(task, job)):
            begun.add(record.id)
        yield job


def renew_needed(job: Job) -> None:
    """Set how many jobs of this job's task are still to be started: ``job_count`` minus completed and active ones."""
    operation, task = job.element.operation, job.task
    is_plain = operation.retries is None  # the usual case
    taken = operation.numbers_of(task.name).active_count if is_plain else operation.taken.get(task.name, 0)
    left = operations.count_left(operation.record, task, taken)
    if left > 0 and not operation.record.is_finished and (is_plain or not operation.waits_whole):
        operation.needed = share_needed({**operation.needed, task.name: left})
    elif task.name in operation.needed:
        operation.needed = share_needed({name: n for name, n in operation.needed.items() if name != task.name})
    memory = operation.record.memory.get(task.name)
    if memory is not None and memory.overdrafts:
        renew_reserves(operation)  # whether a place waits for more memory may have changed
    operation.touch()


def free_place(job: Job, now: float) -> None:
    """Let a job be replaced: it kept its place while it was being stopped, and is now gone from ``State.jobs``."""
    if job.stop is not None and job.stop.keeps_place:
        job.stop.keeps_place = False
        job.element.operation.numbers_of(job.task.name).active_count -= 1
        give_back(job, now, is_ending=False)
        renew_needed(job)
    elif job.stop is not None:
        job.element.operation.numbers_of(job.task.name).note_ended(job.cookie, job.id)


def give_back(job: Job, now: float, is_ending: bool = True) -> None:
    """Free the place of a job that is no longer active. ``is_ending``: whether the job may still work."""
    numbers = job.element.operation.numbers_of(job.task.name)
    if is_ending and job.after is None:  # a job with a predecessor has not begun to work
        numbers.note_ending(job.cookie, EndingJob(job.id, job.node.id))
    numbers.give_back(job.cookie, job.id)
    retries.keep_place(job, now)


def is_held(state: State, job: Job, now: float) -> bool:
    """Return whether the job that had this job's place before may still work; if so, this job must not be sent yet."""
    if job.after is None:
        return False
    gang = job.element.operation.gang
    while gang is not None and gang.ending:
        before = EndingJob(*next(iter(gang.ending.items())))
        if _may_work(state, before):
            return True
        del gang.ending[before.job_id]
    if _may_work(state, job.after):
        return True
    job.after, job.first_sent_at = None, now  # its time-out for the start begins
    return False


def _may_work(state: State, job: EndingJob) -> bool:
    node = state.nodes.get(job.node_id)
    return node is not None and (job.job_id in node.stopping or job.job_id in node.strangers)


def list_ending(state: State, operation: Operation) -> list[EndingJob]:
    """Return jobs of earlier incarnations that may still work."""
    ending = {} if operation.gang is None else operation.gang.ending
    return [each for each in (EndingJob(*item) for item in ending.items()) if _may_work(state, each)]


def note_stranger(state: State, report: JobReport, node: Node) -> None:
    """Note a job of a node that is not adopted. If it is of a gang, no new incarnation starts before the job ends."""
    operation = state.operations.get(report.operation_id)
    if operation is not None and operation.gang is not None:
        operation.gang.ending[report.job_id] = node.id


def is_done(state: State, ended: JobRecord) -> bool:
    """Return whether a different job with the same cookie has completed."""
    operation = state.operations.get(ended.operation_id)
    if operation is None or ended.incarnation != operation.record.incarnation:
        return False
    return operation.numbers_of(ended.task).is_done(ended.cookie)


def finish_place(state: State, ended: JobRecord, now: float) -> None:
    """Mark the place of a completed job as done. Stop its replacement if that was started meanwhile."""
    operation = state.operations.get(ended.operation_id)
    task = None if operation is None else find_task(operation.record, ended.task)
    if operation is None or task is None or not _has_done_work(operation, task, ended):
        return
    other = state.jobs.get(operation.numbers_of(task.name).finish(ended.cookie, task.job_count))
    if other is not None and other.id != ended.id:
        stop(state, other, "aborted", NEEDLESS, now, alone=True)


def note_ended(state: State, ended: JobRecord) -> None:
    """Restore the numbers that an earlier run stored for an ended job."""
    operation = state.operations.get(ended.operation_id)
    task = None if operation is None else find_task(operation.record, ended.task)
    if operation is not None and task is not None:
        note_indices(operation, ended)
        if ended.cookie >= 0 and _has_done_work(operation, task, ended):
            operation.numbers_of(task.name).finish(ended.cookie, task.job_count)
            if operation.gang is not None:
                operation.gang.keep_rank(task, ended.cookie, ended.gang_rank)


def _has_done_work(operation: Operation, task: Task, ended: JobRecord) -> bool:
    is_done = ended.state == "completed" and ended.incarnation == operation.record.incarnation
    return is_done and not operations.starts_again(task, ended)


def note_indices(operation: Operation, stored: JobRecord | StartRecord) -> None:
    operation.next_index = max(operation.next_index + (stored.job_index < 0), stored.job_index + 1)
    numbers = operation.numbers_of(stored.task)
    numbers.next_index = max(numbers.next_index + (stored.task_job_index < 0), stored.task_job_index + 1)


def fill_places(state: State) -> None:
    """After a load, give a place to each job that completed under a version without cookies."""
    for operation in state.operations.values():
        for name, counts in operation.record.counts.items():
            task = find_task(operation.record, name)
            if task is not None and counts.completed:
                numbers = operation.numbers_of(name)
                for _ in range(counts.completed - numbers.done_count):
                    numbers.finish(UNKNOWN, task.job_count)
