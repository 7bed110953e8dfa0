"""Which jobs are aborted when all together may use too much for too long; pure (semantics.md 1.9 point 1)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

TOLERANCE = 1e-6
"""Sums of limits that exceed the capacity by less than this share of it count as equal to it."""


class Share(msgspec.Struct, frozen=True):
    """One job's use of a resource, in cores or bytes. The latest ``start_time`` is aborted first."""

    job_id: str
    start_time: float
    amount: float


class Timer:
    """Since when a resource is overdrawn, by more than ``allowed_ratio`` of it; None while it is not. Seconds of the
    monotonic clock."""

    __slots__ = ("allowed_ratio", "since_s", "timeout_s")

    def __init__(self, timeout_s: float, allowed_ratio: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self.allowed_ratio = allowed_ratio
        self.since_s: float | None = None

    def note(self, now_s: float, used: float, capacity: float) -> bool:
        """Take in the use of this moment; True when it has been above what is allowed for longer than the time-out.

        Then the timer starts anew. A moment within it resets it.
        """
        if used <= capacity * (1.0 + self.allowed_ratio + TOLERANCE):
            self.since_s = None
        elif self.since_s is None:
            self.since_s = now_s
        elif now_s - self.since_s > self.timeout_s:
            self.since_s = now_s
            return True
        return False


def find_victims(jobs: Sequence[Share], others: float, capacity: float) -> list[str]:
    """The jobs to abort, latest started first, until the rest and ``others`` (what cannot be aborted) fit.

    An empty list where the others alone are too much: nothing would be won.
    """
    if others > capacity * (1.0 + TOLERANCE):
        return []
    used = others + sum(job.amount for job in jobs)
    victims = []
    for job in sorted(jobs, key=lambda job: (job.start_time, job.job_id), reverse=True):
        if used <= capacity * (1.0 + TOLERANCE):
            break
        if job.amount > 0.0:
            victims.append(job.job_id)
            used -= job.amount
    return victims
