"""Which jobs are aborted when all together may use too much for too long; pure (semantics.md 1.9 point 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

TOLERANCE = 1e-6
"""Sums of limits that exceed the capacity by less than this share of it count as equal to it."""
LEAST_BYTES, LEAST_RATIO = 64 * 2**20, 0.02
"""Memory of the host that stays available while jobs use more than they reserve: so much, or that share of what the
node offers where it is more."""


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


def _latest_first(jobs: Iterable[Share]) -> list[Share]:
    return sorted(jobs, key=lambda job: (job.start_time, job.job_id), reverse=True)


def find_missing(used: float, capacity: float, available: float | None) -> float:
    """Bytes that the jobs of a node, which use ``used``, must give back: what they use beyond its ``capacity``, or what
    the host lacks of the room that is to stay ``available``, as it is while the kernel ends nothing yet; negative
    where there is room left."""
    over = used - capacity
    return over if available is None else max(over, max(LEAST_BYTES, LEAST_RATIO * capacity) - available)


def find_over_reserve(jobs: Sequence[Share], missing: float) -> list[str]:
    """Of jobs that use more than they reserve those to abort, latest started first, until ``missing`` is given back."""
    victims = []
    for job in _latest_first(jobs):
        if missing <= 0.0:
            break
        victims.append(job.job_id)
        missing -= job.amount
    return victims


def find_victims(jobs: Sequence[Share], others: float, capacity: float) -> list[str]:
    """The jobs to abort, latest started first, until the rest and ``others`` (what cannot be aborted) fit.

    An empty list where the others alone are too much: nothing would be won.
    """
    if others > capacity * (1.0 + TOLERANCE):
        return []
    used = others + sum(job.amount for job in jobs)
    victims = []
    for job in _latest_first(jobs):
        if used <= capacity * (1.0 + TOLERANCE):
            break
        if job.amount > 0.0:
            victims.append(job.job_id)
            used -= job.amount
    return victims
