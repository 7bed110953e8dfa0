"""What a trace of an operation tells: from its start to its end, in the phases that it went through. Pure.

Moments between are seen once an update: what begins and ends between two of them has none, and a scheduler that starts
anew does not know those of before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cpumond.core.words import count
from cpumond.scheduler.elements import Job
from cpumond.scheduler.model import JobRecord, OperationRecord
from cpumond.scheduler.state import State


@dataclass(slots=True)
class Moments:
    """When something first happened to an operation, in seconds since 1970; None for never."""

    admitted: float | None = None
    """It holds a running slot of its pool."""
    placed: float | None = None
    """The start of its first job is ordered."""
    first_cpu: float | None = None
    """A job has used CPU."""
    throttled: float | None = None
    """A quota has held a job back."""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase; ``events``: moments in it."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any]
    events: tuple[tuple[str, float], ...] = ()


class Watched:
    """The moments of live operations, by id."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._moments: dict[str, Moments] = {}
        self._known = set(state.finished)
        """Those that had ended before the last look."""

    def look(self, now: float) -> list[list[Span]]:
        """The spans of each operation that has ended since the last look, its own first."""
        for operation in self._state.operations.values():
            moments = self._moments.setdefault(operation.id, Moments())
            jobs = [job for element in operation.elements.values() for job in element.jobs.values()]
            if moments.admitted is None and any(element.is_running for element in operation.elements.values()):
                moments.admitted = now
            _note(moments, jobs, now)
        ended = []
        for operation_id in self._state.finished.keys() - self._known:
            record, moments = self._state.finished[operation_id], self._moments.pop(operation_id, Moments())
            _note(moments, self._state.finished_jobs.get(operation_id, {}).values(), record.finish_time or now)
            ended.append(make_spans(record, moments))
        self._known = set(self._state.finished)
        return ended


def _note(moments: Moments, jobs: Iterable[Job | JobRecord], now: float) -> None:
    for job in jobs:
        used = job.report if isinstance(job, Job) else job
        moments.placed = min(moments.placed or job.start_time, job.start_time)
        if moments.first_cpu is None and used.cpu_seconds:
            moments.first_cpu = now
        if moments.throttled is None and used.throttled_cpu_seconds:
            moments.throttled = now


def make_spans(record: OperationRecord, moments: Moments) -> list[Span]:
    """The span of an operation that has ended, and those of its phases, as far as they are known."""
    end = record.finish_time or record.start_time
    counts = record.counts.values()
    attributes: dict[str, Any] = {
        "cpumond.operation.id": record.id,
        "cpumond.operation.title": record.title,
        "cpumond.operation.state": record.state,
        "cpumond.user": record.user,
        "cpumond.trees": sorted(record.trees),
        "cpumond.pools": [record.trees[name].pool for name in sorted(record.trees)],
        "cpumond.jobs.completed": sum(each.completed for each in counts),
        "cpumond.jobs.failed": sum(each.failed for each in counts),
        "cpumond.jobs.aborted": sum(each.aborted for each in counts),
    }
    points = [
        ("pending", record.start_time, ""),
        ("waiting", moments.admitted, "admitted"),
        ("starting", moments.placed, "placed"),
        ("running", moments.first_cpu, "first CPU"),
    ]
    known = [(name, min(max(at, record.start_time), end), event) for name, at, event in points if at is not None]
    events = [("submitted", record.start_time), *((event, at) for _, at, event in known if event)]
    if moments.throttled is not None:
        events.append(("throttled", min(moments.throttled, end)))
    events.append(("ended", end))
    phases = [
        Span(name, at, max(at, then), {})
        for (name, at, _), then in zip(known, [*(at for _, at, _ in known[1:]), end], strict=True)
    ]
    title = record.title or f"operation of {count(sum(task.job_count for task in record.tasks), 'job')}"
    return [Span(title, record.start_time, end, attributes, tuple(events)), *phases]
