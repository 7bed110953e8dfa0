"""Jobs in the answers of ``list_jobs`` and ``get_job`` (yt_protocol.md 11). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cpumond.api.yt.errors import make_failure
from cpumond.api.yt.lazy import iso_time
from cpumond.core.wire import JobReport
from cpumond.scheduler.elements import Job
from cpumond.scheduler.model import JobRecord, OperationRecord, PreemptionRecord
from cpumond.scheduler.settings import failures

JOB_TYPE: Final = "vanilla"
_STATES: Final = {"starting": "waiting", "stopping": "aborting"}
_FIGURES: Final = ("smoothed_cpu_usage", "cpu_seconds", "reclaimed_cpu_seconds")
_FIGURES_OF_ENDED: Final = ("exit_code", "cpu_seconds", "reclaimed_cpu_seconds", "max_memory", "stderr_size")
"""Figures that are shown for an ended job if they are known."""
NO_DATA: Final = {
    f"processed_{way}_{what}": 0
    for way in ("input", "output")
    for what in ("row_count", "compressed_data_size", "uncompressed_data_size")
}
"""Data statistics of a job of a vanilla operation, which reads and writes no tables."""

AnyJob = Job | JobRecord


def job_state(job: AnyJob) -> str:
    """Return the state of a job in the words of ``list_jobs``."""
    return _STATES.get(job.state, job.state)


def job_info(job: AnyJob, record: OperationRecord, address: str) -> dict[str, Any]:
    """A job, active or ended, of the operation ``record``; limits in cores. ``address``: of the job's node."""
    told: JobReport | JobRecord
    figures: tuple[str, ...]
    if isinstance(job, Job):
        told, preemption, figures = job.report, None if job.stop is None else job.stop.record, _FIGURES
        tree, numbers = job.element.tree.name, (job.cookie, job.index, job.task_index)
        cpu_limit, current_cpu_limit = job.limits[1], job.usage[1]
    else:
        told, preemption, figures = job, job.preemption, _FIGURES_OF_ENDED
        numbers = job.cookie, job.job_index, job.task_job_index
        tree, cpu_limit, current_cpu_limit = job.tree, job.cpu_limit, job.current_cpu_limit
    options = record.trees.get(tree)
    info: dict[str, Any] = {
        "id": job.id, "job_id": job.id, "allocation_id": job.id, "operation_id": record.id, "type": JOB_TYPE,
        "state": job_state(job), "address": address, "task_name": job.task_name, "start_time": iso_time(job.start_time),
        "pool_tree": tree, "pool": "" if options is None else options.pool, "cpu_limit": cpu_limit,
        "current_cpu_limit": current_cpu_limit, "class": job.job_class, "set_container_cpu_limit": job.has_ceiling,
        "progress": float(job.state == "completed"), "is_stale": False, "has_spec": False, "has_competitors": False,
        "core_infos": [], "exec_attributes": {}, "brief_statistics": NO_DATA,
    }  # fmt: skip
    if job.cookie >= 0:
        info["job_cookie"] = job.cookie
    if job.incarnation:
        info["operation_incarnation"] = job.incarnation
    if job.gang_rank >= 0:
        info["gang_rank"] = job.gang_rank
    if isinstance(job, Job):
        info["controller_state"], info["cpu_monitor_mode"] = info["state"], job.report.mode
    else:
        info["archive_state"], info["finish_time"] = info["state"], iso_time(job.finish_time)
        if job.state != "completed":
            info["error"] = make_failure(failures.of_job(job))
    info["events"] = [{"time": info["start_time"], "state": "waiting" if info["state"] == "waiting" else "running"}]
    if not isinstance(job, Job):
        info["events"].append({"time": info["finish_time"], "state": info["state"]})
    known = zip(("job_cookie", "job_index", "task_job_index"), numbers, strict=True)
    info |= {name: number for name, number in known if number >= 0}
    for name in figures:
        if (value := getattr(told, name)) is not None:
            info[name] = value
    if told.cgroup:
        info["cgroup"] = told.cgroup
    if preemption is not None:
        info["why_preempted"] = view_preemption(preemption)
        if job.interruption_timeout:
            info["interruption_info"] = _view_interruption(preemption, job.interruption_timeout)
    return info


def _view_interruption(told: PreemptionRecord, timeout_ms: float) -> dict[str, Any]:
    reason = told.cause if told.cause in ("user_request", failures.JOBS_DISABLED) else "unknown"
    info: dict[str, Any] = {"interruption_reason": reason, "interruption_timeout": round(timeout_ms)}
    if told.kind != "aborted":
        info |= {"interruption_reason": "preemption", "preemption_reason": told.why}
    if told.preemptor_job_id:
        job_id, operation_id = told.preemptor_job_id, told.preemptor_operation_id
        info["preempted_for"] = {"allocation_id": job_id, "operation_id": operation_id}
    return info


def _list_statistics(job: AnyJob, limits: Mapping[str, int]) -> dict[str, float]:
    """Return path -> figure of a job: memory in bytes; for an ended job also times in milliseconds, and memory over
    time (``cumulative_...``, bytes x s). User time includes system time. ``limits``: memory_limit by task."""
    limit = limits.get(job.task_name, 0)
    memory: dict[str, float] = {"memory_limit": limit, "memory_reserve": job.memory_reserve or limit}
    values: dict[str, float] = {}
    if isinstance(job, JobRecord):
        if job.max_memory is not None:
            memory["max_memory"] = job.max_memory
        took_s = max(job.finish_time - job.start_time, 0.0)
        values = {f"user_job/cumulative_{name}": value * took_s for name, value in memory.items()}
        values["time/total"] = took_s * 1e3
        if job.cpu_seconds is not None:
            values["user_job/cpu/user"] = job.cpu_seconds * 1e3
    return {**{f"user_job/{name}": value for name, value in memory.items()}, **values}


def _list_limits(record: OperationRecord) -> dict[str, int]:
    return {task.name: task.memory_limit for task in record.tasks}


def view_statistics(job: AnyJob, record: OperationRecord) -> dict[str, Any]:
    """Return ``statistics`` of ``get_job``: for each figure four aggregates, although they are of only one job."""
    shown: dict[str, Any] = {}
    for path, value in _list_statistics(job, _list_limits(record)).items():
        _put(shown, path, _summary(1, value, value, value))
    return shown


class JobStatistics:
    """Statistics of an operation's ended jobs, summed up for each way in which jobs end."""

    def __init__(self, record: OperationRecord) -> None:
        self._limits = _list_limits(record)
        self._figures: dict[str, dict[str, list[float]]] = {}
        """Path -> state -> count, sum, minimum and maximum."""

    def add(self, job: JobRecord) -> None:
        for path, value in _list_statistics(job, self._limits).items():
            known = self._figures.setdefault(path, {}).setdefault(job.state, [0, 0.0, value, value])
            known[0] += 1
            known[1] += value
            known[2:] = min(known[2], value), max(known[3], value)

    def view(self) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for path, by_state in self._figures.items():
            _put(shown, path, {"$": {state: {JOB_TYPE: _summary(*known)} for state, known in by_state.items()}})
        return shown


def _summary(count: float, total: float, least: float, most: float) -> dict[str, int]:
    return {"sum": round(total), "count": int(count), "min": round(least), "max": round(most)}


def _put(shown: dict[str, Any], path: str, value: Any) -> None:
    *above, name = path.split("/")
    for key in above:
        shown = shown.setdefault(key, {})
    shown[name] = value


def view_preemption(record: PreemptionRecord) -> dict[str, Any]:
    return {**msgspec.to_builtins(record), "at": iso_time(record.at)}
