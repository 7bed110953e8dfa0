"""Consecutive job failures on one node, and their consequences for the node (semantics.md 2.14). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cpumond.core.measures import format_span
from cpumond.core.words import count
from cpumond.scheduler.model import JobRecord

MAX_OPERATIONS: Final = 100
"""Maximum number of operations that are distinguished in one streak."""


class Failed(NamedTuple):
    """One operation's part in a streak: number of its failed jobs, and of those that could not be started."""

    jobs: int = 0
    not_started: int = 0


@dataclass(frozen=True, slots=True)
class Streak:
    """Failures since the last job that completed. ``sequence``: that of the first failed job; if a job that started
    earlier completes, this does not end the streak. ``reason``: why the node itself reports a fault; "" if it does not.
    """

    by_operation: Mapping[str, Failed] = field(default_factory=dict)
    sequence: int = 0
    last_job: str = ""
    reason: str = ""

    def describe(self) -> str:
        """Return a clause: ``4 jobs of 2 operations failed in a row, 1 of them could not be started``."""
        jobs, not_started = (sum(each[number] for each in self.by_operation.values()) for number in (0, 1))
        text = f"{count(jobs, 'job')} of {count(len(self.by_operation), 'operation')} failed in a row"
        text += f", {not_started} of them could not be started" if not_started else ""
        return f"{text} ({self.reason})" if self.reason else text


NO_STREAK: Final = Streak()


def is_success(job: JobRecord) -> bool:
    """Whether a job completed by itself rather than because a user abandoned it."""
    return job.state == "completed" and job.exit_code is not None


def follow(streak: Streak, ended: Iterable[JobRecord]) -> Streak:
    """Return the streak after further ends of jobs: completions, and failures that may be the node's fault."""
    for job in ended:
        if is_success(job):
            streak = NO_STREAK if job.sequence >= streak.sequence else streak
            continue
        by_operation, before = streak.by_operation, streak.by_operation.get(job.operation_id, Failed())
        if before.jobs or len(by_operation) < MAX_OPERATIONS:
            failed = Failed(before.jobs + 1, before.not_started + job.not_started)
            by_operation = {**by_operation, job.operation_id: failed}
        reason = job.reason if job.state == "aborted" else streak.reason
        streak = Streak(by_operation, min(streak.sequence or job.sequence, job.sequence), job.id, reason)
    return streak


@dataclass(slots=True)
class Failing:
    """A node's streak, and how the node is held off for it. ``until``: the end of the present pause; None if there is
    none. ``is_spared``: whether the node would be held off if fewer other nodes were."""

    streak: Streak = NO_STREAK
    holds: int = 0
    until: float | None = None
    is_spared: bool = False

    @property
    def is_reported(self) -> bool:
        return self.holds > 0 or self.is_spared

    def describe(self, now: float) -> str:
        """Return the failures and their consequences for the node; "" if there are none."""
        follows = "it gets jobs again, and the next failure will hold it off for longer"
        if self.until is not None:
            follows = f"it gets no new jobs for {format_span(self.until - now)}"
        elif self.is_spared:
            follows = "it is not held off because too many nodes are: the operations themselves may be at fault"
        return f"{self.streak.describe()}; {follows}" if self.is_reported else ""
