"""Errors of operations and jobs with their sentences (semantics.md 3.6). Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from cpumond.core.wire import OUT_OF_MEMORY
from cpumond.core.words import count, quoted
from cpumond.scheduler.model import POOL_TREES_UNSPECIFIED, JobRecord, OperationRecord, RetryNote, Task
from cpumond.scheduler.model.failures import (
    FAILED_JOBS_LIMIT_EXCEEDED,
    FAILED_ON_JOB_RESTART,
    JOB_TIME_LIMIT_EXCEEDED,
    MEMORY_LIMIT_EXCEEDED,
    NON_ZERO_EXIT_CODE,
    USER_JOB_FAILED,
    EndError,
)

_LIMIT_EXCEEDED: Final = "Failed jobs limit exceeded"
"""Programs that start operations search error messages for these words."""
INCARNATION_CHANGED: Final = "operation_incarnation_changed"
"""Beginning of the reason of jobs that are aborted because the incarnation of their gang ends (7.5)."""
JOBS_DISABLED: Final = "jobs_disabled_on_node"
"""Reason of jobs that are aborted because their node is drained."""
_MUST_NOT_RESTART: Final = "Operation has fail_on_job_restart, and a job would have to be started again"
ABORT_REASONS: Final = {
    "preempted": "preemption",
    "graceful": "preemption",
    "limit_violated": "preemption",
    "overcommit": "node_resource_overcommit",
}
"""Kind of a ``PreemptionRecord`` -> reason of the abort as ``yt`` names it."""
MAX_FAILED_ON: Final = 8
"""Maximum number of nodes for which an operation's failures are counted separately."""
_TOO_LONG: Final = "Operation is running for too long, aborted"


def of_job(job: JobRecord) -> EndError:
    if job.state != "failed":
        return EndError(job.reason)
    if job.failure is not None:
        return job.failure
    if job.exit_code is None:
        return EndError(job.reason, USER_JOB_FAILED)
    inner = EndError(job.reason, NON_ZERO_EXIT_CODE, {"exit_code": job.exit_code})
    return EndError("User job failed", USER_JOB_FAILED, inner=(inner,))


def innermost(failure: EndError) -> EndError:
    """Return the innermost cause of an error; the error itself if it has no cause."""
    while failure.inner:
        failure = failure.inner[0]
    return failure


def at_limit(task: Task, reason: str) -> EndError | None:
    """Return the error of a job that failed for ``reason``; None if the reason is no limit of its task."""
    if task.job_time_limit is not None and reason == describe_too_long(task):
        return EndError(reason, JOB_TIME_LIMIT_EXCEEDED, {"limit": task.job_time_limit})
    if reason.startswith(OUT_OF_MEMORY):
        return EndError(reason, MEMORY_LIMIT_EXCEEDED, {"limit": task.memory_limit})
    return None


def describe_too_long(task: Task) -> str:
    return f"Job time limit exceeded: it ran for longer than its job_time_limit of {task.job_time_limit:.15g} ms"


def is_failure(job: JobRecord) -> bool:
    """Return whether a job failed or could not be started, without being asked to stop."""
    return job.preemption is None and (job.state == "failed" or job.not_started)


def note_failure(record: OperationRecord, job: JobRecord, blames_node: bool) -> OperationRecord:
    """Return the record with the counts after ``job`` has failed. While all failures are on one node that is blamed,
    they do not count towards ``max_failed_job_count``. Once a job fails on a second node, all failures count."""
    failed_on, blamed = record.failed_on, record.blamed_failures
    if job.node_id in failed_on or len(failed_on) < MAX_FAILED_ON:
        failed_on = {**failed_on, job.node_id: failed_on.get(job.node_id, 0) + 1}
    if len(failed_on) > 1:
        blamed = 0
    elif blames_node:
        blamed = _count_failed(record) - record.uncounted_failures
    return msgspec.structs.replace(record, failed_on=failed_on, blamed_failures=blamed)


def count_failures(record: OperationRecord) -> int:
    """Return the number of failed jobs that count towards ``max_failed_job_count``."""
    return _count_failed(record) - record.uncounted_failures - record.blamed_failures


def _count_failed(record: OperationRecord) -> int:
    return sum(each.failed for each in record.counts.values())


def describe_where(record: OperationRecord) -> str:
    """Return ``all 10 failures were on node "n1"``; "" for one failure, several nodes, or if the nodes are unknown."""
    (node, number), *others = record.failed_on.items() or (("", 0),)
    if others or number < max(_count_failed(record), 2):
        return ""
    return f"all {number} failures were on node {quoted(node)}"


def too_many_failed(record: OperationRecord, last: JobRecord) -> tuple[EndError, str]:
    """Return the error of an operation with too many failed jobs, and the error's sentence."""
    failed, limit, where = count_failures(record), record.max_failed_job_count, describe_where(record)
    failure = EndError(_LIMIT_EXCEEDED, FAILED_JOBS_LIMIT_EXCEEDED, {"max_failed_job_count": limit}, (of_job(last),))
    parts = [f"{count(failed, 'job')} failed, max_failed_job_count is {limit}", where, f"last: {last.reason}"]
    return failure, f"{_LIMIT_EXCEEDED}: {'; '.join(filter(None, parts))}"


def by_rule(note: RetryNote, job: JobRecord) -> tuple[EndError, str]:
    """Return the error, and its sentence, of an operation whose retry policy makes it fail at once for this failure."""
    text = f"Job {job.id} ended ({note.kind}), and retry rule {note.rule} fails the operation at once"
    return EndError(text, FAILED_JOBS_LIMIT_EXCEEDED, inner=(of_job(job),)), f"{text}: {job.reason}"


def would_restart(job: JobRecord) -> tuple[EndError, str]:
    """Error, and its sentence, of an operation with ``fail_on_job_restart`` whose job ended with work left."""
    reason = f"job_{'failed' if job.state == 'failed' else 'aborted'}"
    told: dict[str, str | int | float] = {"reason": reason, "job_id": job.id}
    if job.state != "failed":
        told["job_abort_reason"] = find_abort_reason(job)
    text = f"{_MUST_NOT_RESTART}: job {job.id} {'failed' if job.state == 'failed' else 'was aborted'}"
    return EndError(_MUST_NOT_RESTART, FAILED_ON_JOB_RESTART, told, (of_job(job),)), f"{text}: {job.reason}"


def lost_by_restart(missing: int) -> tuple[EndError, str]:
    """Return the error, and its sentence, of an operation that lacked jobs after a restart of the scheduler:
    ``missing`` were neither running nor completed."""
    text = f"{count(missing, 'job')} had not been started when the scheduler was restarted"
    told: dict[str, str | int | float] = {"reason": "job_count_mismatch_after_revival"}
    return EndError(f"{_MUST_NOT_RESTART}: {text}", FAILED_ON_JOB_RESTART, told), f"{_MUST_NOT_RESTART}: {text}"


def find_abort_reason(job: JobRecord) -> str:
    """Return the name that ``yt`` has for the reason why a job was aborted or lost."""
    if job.state == "lost":
        return "node_offline"
    kind, cause = ("", "") if job.preemption is None else (job.preemption.kind, job.preemption.cause)
    if cause:
        return cause
    if job.reason.startswith(INCARNATION_CHANGED):
        return INCARNATION_CHANGED
    if job.reason.startswith("resource_overdraft"):
        return "resource_overdraft"
    return ABORT_REASONS.get(kind, "other")


def running_too_long(time_limit: float) -> tuple[EndError, str]:
    """Return the error, and its sentence, of an operation that exceeded its ``time_limit``, in milliseconds."""
    text = f"{_TOO_LONG}: its time_limit of {time_limit:.15g} ms is over"
    return EndError(_TOO_LONG, attributes={"time_limit": time_limit}), text


NO_TREES_LEFT: Final = EndError("No suitable fair-share trees to schedule operation", POOL_TREES_UNSPECIFIED)
