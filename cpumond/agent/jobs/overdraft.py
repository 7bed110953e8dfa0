"""Choose the jobs to abort if a node's jobs exceed its capacity for too long; pure (semantics.md 1.9 point 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

TOLERANCE = 1e-6
"""A sum that exceeds the capacity by at most this fraction of the capacity counts as equal to the capacity."""
LEAST_BYTES, LEAST_RATIO = 64 * 2**20, 0.02
"""Host memory that must stay available while jobs use more than they reserve: this many bytes, or this fraction of the
node's memory if that is more."""


class Share(msgspec.Struct, frozen=True):
    """One job's usage of a resource, in cores or bytes. The job with the latest ``start_time`` is aborted first."""

    job_id: str
    start_time: float
    amount: float


class Timer:
    """Tracks since when the usage of a resource exceeds the capacity by more than ``allowed_ratio`` of the capacity.
    ``since_s`` is None while the usage is within that bound. Times are monotonic, in seconds."""

    __slots__ = ("allowed_ratio", "since_s", "timeout_s")

    def __init__(self, timeout_s: float, allowed_ratio: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self.allowed_ratio = allowed_ratio
        self.since_s: float | None = None

    def note(self, now_s: float, used: float, capacity: float) -> bool:
        """Record the present usage; return True if it has exceeded the allowed amount for longer than ``timeout_s``.

        After True the timer restarts. If ``used`` is within the allowed amount, the timer is reset."""
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
    """Return the bytes that a node's jobs, which use ``used``, must free; negative if there is memory left. The result
    is the larger of two numbers: usage above ``capacity``, and what ``available`` lacks to the host's minimum."""
    over = used - capacity
    return over if available is None else max(over, max(LEAST_BYTES, LEAST_RATIO * capacity) - available)


def find_over_reserve(jobs: Sequence[Share], missing: float) -> list[str]:
    """Return those of ``jobs`` (all above their reserve) to abort, latest started first, to free ``missing`` bytes."""
    victims = []
    for job in _latest_first(jobs):
        if missing <= 0.0:
            break
        victims.append(job.job_id)
        missing -= job.amount
    return victims


def find_victims(jobs: Sequence[Share], others: float, capacity: float) -> list[str]:
    """Return the jobs to abort, the latest started first, so that the remaining ones and ``others`` fit.

    ``others`` are used by jobs that cannot be aborted; if these alone exceed the capacity, the list is empty."""
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
