"""Incarnations of operations with ``gang_options``: how they end and begin; pure (semantics.md 7.5)."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from cpumond.core.words import count
from cpumond.scheduler.model import Incarnation, JobCounts, JobRecord, OperationRecord, SwitchReason, Task
from cpumond.scheduler.settings import failures

MAX_KEPT: Final = 50
"""Maximum number of incarnations kept of an operation: the first one and the latest ones."""
REASONS: Final[dict[SwitchReason, str]] = {
    "job_failed": "job {job} failed",
    "job_aborted": "job {job} was aborted",
    "job_interrupted": "job {job} ended to be started again",
    "job_lack_after_revival": "the scheduler was restarted while some of its jobs were not running",
}


def derive_id(*parts: object) -> str:
    """Derive an id of four hexadecimal numbers from the parts. The same parts always yield the same id."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    return "-".join(f"{int(digest[at : at + 8], 16) or 1:x}" for at in (0, 8, 16, 24))


def is_gang(tasks: tuple[Task, ...]) -> bool:
    """Return whether the jobs of an operation with these tasks have ranks and incarnations."""
    return any(task.gang_options is not None for task in tasks)


def begin_first(record: OperationRecord) -> OperationRecord:
    """Return the record of a new operation; with ``gang_options`` it has the first incarnation."""
    if not is_gang(record.tasks):
        return record
    return msgspec.structs.replace(record, incarnations=(Incarnation(derive_id(record.id, 0), record.start_time),))


def is_over(record: OperationRecord, task: Task | None, job: JobRecord, is_again: bool) -> bool:
    """Return whether a job's end ends the present incarnation. ``is_again``: the job completed and is restarted."""
    if task is None or task.gang_options is None or job.gang_rank < 0 or record.is_finished:
        return False
    return job.incarnation == record.incarnation and (job.state != "completed" or is_again)


def follow_job(record: OperationRecord, job: JobRecord, now: float) -> OperationRecord:
    """Return the record after a job has ended the present incarnation."""
    reason: SwitchReason = "job_aborted"
    if job.state in ("completed", "failed"):
        reason = "job_failed" if job.state == "failed" else "job_interrupted"
    return _follow(
        record,
        Incarnation(
            derive_id(record.id, job.id, job.incarnation), now, reason, job_id=job.id, error=failures.of_job(job),
            abort_reason=failures.find_abort_reason(job) if reason == "job_aborted" else "",
        ),
    )  # fmt: skip


def follow_revival(record: OperationRecord, task: str, expected: int, actual: int, now: float) -> OperationRecord:
    """Return the record after a restart of the scheduler: ``actual`` instead of ``expected`` ranked jobs were found."""
    told = derive_id(record.id, record.incarnation, "revival")
    return _follow(
        record, Incarnation(told, now, "job_lack_after_revival", task=task, expected=expected, actual=actual)
    )


def _follow(record: OperationRecord, new: Incarnation) -> OperationRecord:
    first, *later = record.incarnations
    counts = {
        name: msgspec.structs.replace(each, completed=0, lost=each.lost + each.completed)
        for name, each in record.counts.items()
    }
    return msgspec.structs.replace(
        record, incarnations=(first, *later[-(MAX_KEPT - 2) :], new), counts=counts, reserved_done={}
    )


def describe_switch(new: Incarnation) -> str:
    """Describe why an incarnation has begun."""
    why = REASONS[new.reason or "job_aborted"].format(job=new.job_id)
    if new.reason == "job_lack_after_revival":
        why += f": {new.actual} of {count(new.expected, 'job')} of task {new.task}"
    elif new.error is not None and new.error.message:
        why += f": {new.error.message}"
    return why


def is_complete(record: OperationRecord, task: Task) -> bool:
    """Return whether the task is complete: with ``gang_options``, ``size`` jobs with a rank have completed."""
    completed = record.counts.get(task.name, JobCounts()).completed
    return completed - record.reserved_done.get(task.name, 0) >= task.gang_size


def list_variables(record: OperationRecord, task: Task, incarnation: str, rank: int) -> dict[str, str]:
    """Return the environment variables that describe a job's gang."""
    variables = {
        "YT_OPERATION_INCARNATION": incarnation,
        "YT_JOB_COUNT": str(sum(each.job_count for each in record.tasks)),
        "YT_GANG_SIZE": str(sum(each.gang_size for each in record.tasks)),
        "YT_TASK_JOB_COUNT": str(task.job_count),
        "YT_TASK_GANG_SIZE": str(task.gang_size),
    }
    if rank >= 0:
        variables |= {"YT_GANG_RANK": str(rank), "YT_TASK_GANG_RANK": str(rank)}
    return variables
