"""Spans of an operation's trace: from its start to its end, divided into the phases that it went through. Pure.

Moments between start and end are sampled once per update. A phase that lies between two updates has no span.
After a restart, the scheduler does not know the moments before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from cpumond.core.words import count
from cpumond.scheduler.model import OperationRecord
from cpumond.scheduler.state import State

PHASES: Final = {"submitted": "pending", "admitted": "waiting", "placed": "starting", "first CPU": "running"}
"""Moment -> the phase that begins then. "admitted": the operation gets a running slot of its pool. "placed": the start
of its first job is sent to a node. "first CPU": a job has used CPU."""
THROTTLED: Final = "throttled"
"""One more moment: when a CPU quota first throttled a job."""

Moments = dict[str, float]
"""Moment -> when an operation first reached it, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of an operation; ``events``: the moments in it."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any]
    events: tuple[tuple[str, float], ...] = ()


class Watched:
    """Moments of live operations, by operation id."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._moments: dict[str, Moments] = {}
        self._known = set(state.finished)
        """Operations that had ended before the last call of ``look``."""

    def look(self, now: float) -> list[list[Span]]:
        """Return the spans of each operation that has ended since the last call, the operation's own span first."""
        state, before = self._state, self._moments
        self._moments = {each: before.get(each, {}) for each in state.operations}
        for operation_id, moments in self._moments.items():
            elements = state.operations[operation_id].elements.values()
            if any(element.is_running for element in elements):
                moments.setdefault("admitted", now)
            if len(moments) < len(PHASES):  # otherwise all moments are known, THROTTLED, too
                for element in elements:
                    for job in element.jobs.values():
                        _note(moments, job.start_time, job.report.cpu_seconds, job.report.throttled_cpu_seconds, now)
        ended = []
        for operation_id in state.finished.keys() - self._known:
            record, moments = state.finished[operation_id], before.get(operation_id, {})
            for each in state.finished_jobs.get(operation_id, {}).values():
                end = record.finish_time or now
                _note(moments, each.start_time, each.cpu_seconds, each.throttled_cpu_seconds, end)
            ended.append(make_spans(record, moments))
        self._known = set(state.finished)
        return ended


def _note(moments: Moments, start: float, used: float | None, throttled: float | None, now: float) -> None:
    moments["placed"] = min(moments.get("placed", start), start)
    if used:
        moments.setdefault("first CPU", now)
    if throttled:
        moments.setdefault(THROTTLED, now)


def make_spans(record: OperationRecord, moments: Moments) -> list[Span]:
    """Return the span of an operation that has ended, followed by those of its phases that are known."""
    begin, end = record.start_time, record.finish_time or record.start_time
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
    moments = {"submitted": begin, **moments, "ended": end}
    order = (*PHASES, THROTTLED, "ended")
    events = tuple((name, min(max(moments[name], begin), end)) for name in order if name in moments)
    known = [(PHASES[name], at) for name, at in events if name in PHASES]
    ends = [*(at for _, at in known[1:]), end]
    phases = [Span(name, at, max(at, then), {}) for (name, at), then in zip(known, ends, strict=True)]
    title = record.title or f"operation of {count(sum(task.job_count for task in record.tasks), 'job')}"
    return [Span(title, begin, end, attributes, events), *phases]
