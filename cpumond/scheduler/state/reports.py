"""Checks and applies nodes' reports of jobs, and makes records of ended jobs; pure."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from cpumond.core.wire import CPU_COUNTERS, NO_ROOM, OUT_OF_MEMORY, CpuTimes, CpuUse, FinishedJob, JobReport, cpu_times
from cpumond.fairshare.resources import CPU, Vector
from cpumond.scheduler.elements import Job, Node, change_usage, count_cpu_time, reported_core_seconds
from cpumond.scheduler.model import JobRecord, JobState, OperationRecord, Task
from cpumond.scheduler.settings import failures

Reported = TypeVar("Reported", JobReport, FinishedJob)
MAX_NODE_FAILURE_REASON = 1000
MOST_CORES, MOST_OF_CAPACITY, LATE_S = 1024.0, 16.0, 60.0
"""Bounds of plausible reports. The usage or throttled CPU of a job is at most MOST_CORES cores or, if that is more,
MOST_OF_CAPACITY times the cores of its node. A report is at most LATE_S late."""
STEP_S = 86_400.0
"""Maximum seconds by which the clocks of two runs of the scheduler may differ."""
NO_CPU_TIMES = cpu_times(CpuUse())
USUAL_MODE = "reclaim"
GIVEN_UP: frozenset[JobState] = frozenset({"aborted", "lost"})
"""Ends after which a node may still have the job: later reports of the job are applied."""


def is_over(task: Task | None, start_time: float | None, now: float) -> bool:
    """Return whether a job of the task that began at ``start_time`` has exceeded its ``job_time_limit``."""
    if task is None or task.job_time_limit is None or start_time is None:
        return False
    return now - start_time > task.job_time_limit / 1e3


def find_task(record: OperationRecord, name: str) -> Task | None:
    return next((task for task in record.tasks if task.name == name), None)


def has_run(finished: FinishedJob) -> bool:
    """Return whether a job may have had a process; True for a lost job, of which this is unknown."""
    return finished.start_time is not None or finished.state == "lost"


def _is_not_started(finished: FinishedJob | None) -> bool:
    """Return whether a node reports that it tried to start a job and failed."""
    if finished is None or finished.start_time is not None or finished.exit_code is not None:
        return False
    return finished.state in ("failed", "aborted") and not finished.reason.startswith(NO_ROOM)


def is_wanted_again(task: Task, end: JobState, exit_code: int | None, reason: str) -> bool:
    """Return whether a job that its node reports as ended must be restarted because of its exit code."""
    is_asked_for = exit_code is not None and exit_code == task.restart_exit_code
    return is_asked_for and end in ("failed", "aborted") and not reason.startswith(OUT_OF_MEMORY)


def explain_restart(exit_code: int | None) -> str:
    return f"exit code {exit_code} is its restart_exit_code: its work is started again"


def overrules(state: JobState, counted: JobRecord) -> bool:
    """Return whether an end that a node reports replaces the end counted so far: the work is done, not lost."""
    return state == "completed" and counted.state in GIVEN_UP


def drop_implausible(told: Reported, node: Node, start_time: float, now: float, is_resumed: bool = False) -> Reported:
    """Drop impossible times and usage from a node's report of a job: one wrong number would distort all graphs and sums
    of the job's pools for as long as they are kept. ``is_resumed``: a different clock gave ``start_time``."""
    # This runs for each job of each heartbeat; therefore it calls nothing and has one plain loop.
    cores, ran_s = MOST_OF_CAPACITY * node.capacity[CPU], now - start_time
    cores = cores if cores > MOST_CORES else MOST_CORES
    most = cores * ((ran_s if ran_s > 0.0 else 0.0) + (STEP_S if is_resumed else LATE_S))
    wrong = []
    for number, value in enumerate(cpu_times(told)):
        if value and value > most:
            wrong.append(CPU_COUNTERS[number])
    if isinstance(told, JobReport):
        if told.cpu_usage is not None and told.cpu_usage > cores:
            wrong.append("cpu_usage")
        if told.smoothed_cpu_usage is not None and told.smoothed_cpu_usage > cores:
            wrong.append("smoothed_cpu_usage")
    return msgspec.structs.replace(told, **dict.fromkeys(wrong)) if wrong else told


def _keep_known(before: CpuUse, told: Reported, times: CpuTimes) -> Reported:
    """Return ``told`` with missing counters filled in from ``before``; ``times`` are the counters of ``told``."""
    if None not in times or (earlier := cpu_times(before)) == NO_CPU_TIMES:
        return told
    missing = {name: then for name, value, then in zip(CPU_COUNTERS, times, earlier, strict=True) if value is None}
    return msgspec.structs.replace(told, **missing)


def known_size(finished: FinishedJob) -> int | None:
    """Return the size of the job's stderr; None if the node did not report it."""
    return None if finished.stderr_size is msgspec.UNSET else finished.stderr_size


def list_counters(told: CpuUse) -> dict[str, Any]:
    return dict(zip(CPU_COUNTERS, cpu_times(told), strict=True))


def take_report(job: Job, report: JobReport, now: float) -> bool:
    """Apply a heartbeat's report of a live job: CPU time and, if the job is active, usage (1.7, 1.8).

    Returns whether the report has a different ``mode`` from the last one: the agent manages the job differently now."""
    if report == job.report:
        return False
    report = drop_implausible(report, job.node, job.start_time, now, job.is_resumed)
    times = cpu_times(report)
    if job.began_at is None:
        # The node's clock may differ from this one; the start time of an adopted job comes from its node.
        job.began_at = now if report.start_time is None else min(max(report.start_time, job.start_time), now)
    before, job.report = job.report, _keep_known(job.report, report, times)
    count_cpu_time(job, times)
    if job.element.accounts:
        counted, told = reported_core_seconds(job, before), reported_core_seconds(job, job.report)
        for account in job.element.accounts:
            account.count(told[0] - counted[0], told[1] - counted[1])
    if job.is_active:
        job.state = "running"
        change_usage(job, reported_usage(job.limits, report))
    _share_values(job, before.cgroup)
    return report.mode != before.mode


def _share_values(job: Job, cgroup: str) -> None:
    """Share the repeated values of a job's reports. Decoded anew each time, they would use most of the job's memory."""
    # This runs for each changed job of each heartbeat; therefore it has no loop.
    report, operation_id, task = job.report, job.element.operation.id, job.task.name
    if report.job_id == job.id:
        _replace(report, "job_id", job.id)
    if report.operation_id == operation_id:
        _replace(report, "operation_id", operation_id)
    if report.task == task:
        _replace(report, "task", task)
    if report.mode == USUAL_MODE:
        _replace(report, "mode", USUAL_MODE)
    if report.cgroup == cgroup:
        _replace(report, "cgroup", cgroup)
    if report.cpu_limit == job.limits[CPU]:
        _replace(report, "cpu_limit", job.limits[CPU])
    if report.current_cpu_limit == job.usage[CPU]:
        _replace(report, "current_cpu_limit", job.usage[CPU])


_replace = msgspec.structs.force_setattr


def reported_usage(limits: Vector, report: JobReport) -> Vector:
    slots, _, gpu, memory, network = limits
    return (slots, report.current_cpu_limit, gpu, memory if report.memory is None else float(report.memory), network)


def count_held(cores: float, counted: float | None, finished: FinishedJob | None, own_s: float) -> float:
    """Return the core-seconds that a job held: its request times its run time (2.15).

    The agent has ``counted`` them with a monotonic clock, except for the first and last moments. For these, the times
    in ``finished`` count, limited to the ``own_s`` seconds that this scheduler knows the job: clocks may be set.
    """
    counted = counted or 0.0
    if finished is None or finished.start_time is None or finished.finish_time is None:
        return counted
    held = cores * max(min(finished.finish_time - finished.start_time, own_s), 0.0)
    return max(counted, min(held, counted + cores * LATE_S) if counted else held)


def job_record(
    job: Job, state: JobState, now: float, finished: FinishedJob | None = None, reason: str = "",
    may_have_run: bool = False,
) -> JobRecord:  # fmt: skip
    """Return the record of a live job that has ended.

    A stopped job is aborted (``Stop.fails``: failed) whatever its exit code, unless it completed before its time to end
    was over (6.7). If the node stopped the job by itself, the reason is that of the node (1.9)."""
    stop = job.stop
    is_of_before = job.incarnation != job.element.operation.record.incarnation  # its gang does this work again
    if finished is not None:
        reason = finished.reason
    exit_code = None if finished is None else finished.exit_code
    if not is_of_before and (stop is None or not stop.fails) and is_wanted_again(job.task, state, exit_code, reason):
        state, reason = "completed", explain_restart(exit_code)
    # It was interrupted by its ``interruption_signal``, which it can handle: it failed by itself.
    has_failed = not is_of_before and state == "failed" and bool(job.task.interruption_signal)
    if stop is not None and (state != "completed" or is_of_before) and (stop.fails or not has_failed):
        if state == "failed" or stop.fails or finished is None or not reason:
            reason = stop.record.why
        state = "failed" if stop.fails and not is_of_before else "aborted"
    counters = list_counters(job.report if finished is None else _keep_known(job.report, finished, cpu_times(finished)))
    held = None
    if job.element.accounts:
        counted = reported_core_seconds(job, job.report)
        if counters["cpu_seconds"] is None:
            counters["cpu_seconds"] = counted[1]
        known = counters["ordered_cpu_seconds"]
        held = count_held(job.limits[CPU], counted[0] if known is None else known, finished, now - job.start_time)
    return JobRecord(
        id=job.id,
        operation_id=job.element.operation.id,
        task=job.task.name,
        tree=job.element.tree.name,
        node_id=job.node.id,
        state=state,
        # If the node reports start and end, both are taken from its clock.
        start_time=job.start_time if finished is None or finished.start_time is None else finished.start_time,
        finish_time=now if finished is None or finished.finish_time is None else finished.finish_time,
        cpu_limit=job.task.cpu_limit,
        current_cpu_limit=job.usage[1],
        exit_code=exit_code,
        reason=reason[:MAX_NODE_FAILURE_REASON],
        max_memory=None if finished is None else finished.max_memory,
        memory_reserve=job.memory_reserve,
        memory_limit=job.grown_memory,
        stderr_size=None if finished is None else known_size(finished),
        preemption=None if stop is None or stop.fails else stop.record,
        cgroup=job.report.cgroup if finished is None or not finished.cgroup else finished.cgroup,
        sequence=job.sequence,
        reclaimed=job.reclaimed,
        failure=failures.at_limit(job.task, reason) if state == "failed" else None,
        has_run=may_have_run or job.was_reported or (finished is not None and has_run(finished)),
        not_started=stop is None and job.report.start_time is None and _is_not_started(finished),
        cookie=job.cookie,
        job_index=job.index,
        task_job_index=job.task_index,
        set_container_cpu_limit=job.set_container_cpu_limit,
        incarnation=job.incarnation,
        gang_rank=job.gang_rank,
        interruption_timeout=job.interruption_timeout,
        backfill_until=job.backfill_until,
        held_core_seconds=held,
        **counters,
    )
