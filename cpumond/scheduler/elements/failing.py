"""Jobs that failed on one node in a row, and what follows for the node (semantics.md 2.14). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from cpumond.core.measures import format_span
from cpumond.core.words import count
from cpumond.scheduler.model import JobRecord, OperationRecord
from cpumond.scheduler.model.node_failures import NodeFailures
from cpumond.scheduler.settings.failures import is_failure

MAX_OPERATIONS: Final = 100
"""Operations that are told apart in one streak."""


class Failed(NamedTuple):
    """Of one operation in a streak: its jobs that failed, and those of them that could not be started."""

    jobs: int = 0
    not_started: int = 0


@dataclass(frozen=True, slots=True)
class Streak:
    """Failures since the last job that completed. ``sequence``: of the first of these jobs; what started before it
    and completes says nothing of the node as it is now."""

    since: float = 0.0
    sequence: int = 0
    by_operation: Mapping[str, Failed] = field(default_factory=dict)
    last_job: str = ""
    reason: str = ""
    """Of the last job of which the node itself says that the fault is its own; others' reasons are their users'."""

    @property
    def job_count(self) -> int:
        return sum(each.jobs for each in self.by_operation.values())

    def tell(self) -> str:
        """``4 jobs of 2 operations failed in a row, 1 of them could not be started``."""
        jobs, operations = count(self.job_count, "job"), count(len(self.by_operation), "operation")
        text = f"{jobs} of {operations} failed in a row"
        not_started = sum(each.not_started for each in self.by_operation.values())
        text += f", {not_started} of them could not be started" if not_started else ""
        return f"{text} ({self.reason})" if self.reason else text


NO_STREAK: Final = Streak()


def is_evidence(job: JobRecord) -> bool:
    """Whether the end of a job may be its node's fault: it is no limit of its task, and nobody told it to stop."""
    return job.failure is None and is_failure(job)


def follow(streak: Streak, ended: Iterable[JobRecord]) -> Streak:
    """The streak after the ends of jobs: completed ones, and those that may be the node's fault."""
    for job in ended:
        if job.state == "completed":
            streak = NO_STREAK if job.sequence >= streak.sequence else streak
            continue
        before = streak.by_operation.get(job.operation_id, Failed())
        if before.jobs or len(streak.by_operation) < MAX_OPERATIONS:
            failed = Failed(before.jobs + 1, before.not_started + job.not_started)
            streak = replace(streak, by_operation={**streak.by_operation, job.operation_id: failed})
        streak = replace(
            streak,
            since=streak.since or job.finish_time,
            sequence=min(streak.sequence or job.sequence, job.sequence),
            last_job=job.id,
            reason=job.reason if job.state == "aborted" else streak.reason,
        )
    return streak


def is_own_fault(record: OperationRecord | None, nodes: Iterable[str] = ()) -> bool:
    """Whether failures of an operation speak against itself: it failed on several nodes, ``nodes`` included, and
    completed nothing."""
    if record is None or any(each.completed for each in record.counts.values()):
        return False
    return len({*record.failed_on, *nodes}) > 1


def is_suspect(streak: Streak, rules: NodeFailures, speaks: Callable[[str], bool]) -> bool:
    """Whether a streak speaks against its node; ``speaks``: of an operation, whether it is to be counted."""
    failed = [each for name, each in streak.by_operation.items() if speaks(name)]
    return len(failed) >= rules.operations or sum(each.not_started for each in failed) >= rules.starts


def count_holdable(nodes: int, ratio: float) -> int:
    """How many of a tree's nodes may be held off at once: one, or a part, but never all."""
    return min(max(1, int(nodes * ratio)), nodes - 1)


@dataclass(slots=True)
class Failing:
    """A node's streak, and how it was held off for it. ``until``: when the present pause ends; None for none."""

    streak: Streak = NO_STREAK
    holds: int = 0
    until: float | None = None
    is_spared: bool = False
    """Whether it was said that it would be held off, if not so many others were."""

    @property
    def is_told(self) -> bool:
        """Whether it is shown as failing."""
        return self.holds > 0 or self.is_spared

    def tell(self, now: float) -> str:
        """What failed, and what follows for the node."""
        follows = "it gets jobs again, and is held off for longer by the next failure"
        if self.until is not None:
            follows = f"it gets no new jobs for {format_span(self.until - now)}"
        elif self.is_spared:
            follows = "it is not held off, since too many nodes are"
        return f"{self.streak.tell()}; {follows}"
