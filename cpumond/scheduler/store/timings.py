"""Counters and durations of a running scheduler, for its status, alerts and metrics."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Final

from cpumond.scheduler.store import Change

BOUNDS_S: Final = (*(float(f"{step}e{power}") for power in range(-4, 1) for step in (1, 2, 5)), 10.0)
"""Upper bounds of the buckets, each about twice the one before: quantiles are off by less than this factor."""

OPEN_KINDS: Final = frozenset(("operation", "job", "start", "node"))


class Histogram:
    """Number of durations in each bucket, and what its newest was measured for; one bucket more than BOUNDS_S."""

    __slots__ = ("counts", "newest", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.newest: list[tuple[str, float, float] | None] = [None] * len(self.counts)
        """Per bucket: name, seconds, Unix time."""

    def observe(self, took_s: float, about: str) -> None:
        """Count a duration. ``about``: the node, tree or record concerned. Called for each heartbeat."""
        at = bisect_left(BOUNDS_S, took_s)
        self.counts[at] += 1
        self.sum_s += took_s
        self.newest[at] = about, took_s, time.time()

    @property
    def count(self) -> int:
        return sum(self.counts)

    def sum_up(self) -> list[int]:
        """Return, for each bucket, the number of durations up to its bound."""
        return list(accumulate(self.counts))


RECENT_UPDATES: Final = 600
"""Number of last updates from which the alert about late ones is computed. They cover one minute at the shortest
period, ten minutes at a period of 1 s."""


def name_write(changes: Sequence[Change]) -> str:
    """Return the name of a write for metrics: the kind and the id of its first record. Anyone may read metrics, so
    secret ids are left out (the key of a token is derived from the token)."""
    if not changes:
        return "log"
    kind, key = changes[0].kind, changes[0].key
    return f"{kind}/{key}" if kind in OPEN_KINDS else kind


@dataclass(slots=True)
class Timings:
    """Counters, and durations in real seconds; averages are computed from the counts and sums of these."""

    update_s: float = 0.0
    update: Histogram = field(default_factory=Histogram)
    good_updates: int = 0
    """Number of updates that succeeded for at least one tree; if only the store refused, the update still counts."""
    late_updates: int = 0
    late_at: float | None = None
    recent_late: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_UPDATES))
    """For each of the last updates, whether it began late."""
    failed_updates: int = 0
    failed_at: float | None = None
    heartbeat: Histogram = field(default_factory=Histogram)
    dropped_heartbeats: int = 0
    commands: int = 0
    refused_commands: int = 0
    store_write: Histogram = field(default_factory=Histogram)
    store_commit: Histogram = field(default_factory=Histogram)
    """The part of a write in which the store made it durable; with SQLite, that ends when it is synced to the disk."""
    store_errors: int = 0
    store_error_at: float | None = None
    store_losses: int = 0
    """Number of times that the store was removed and written again."""
    store_lost_at: float | None = None
    """``..._at`` here and above: scheduler time of the last such event."""

    @property
    def updates(self) -> int:
        return self.update.count

    def count_update(self, late_at: float | None) -> None:
        """Record whether an update began late, and when (scheduler time)."""
        self.recent_late.append(late_at is not None)
        if late_at is not None:
            self.late_updates += 1
            self.late_at = late_at

    def list_numbers(self) -> dict[str, float]:
        """Return all counters and sums by name, those of a histogram as ``NAMEs`` and ``NAMEs_s``; values that were
        never set are left out."""
        numbers: dict[str, float] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Histogram):
                numbers |= {f"{each.name}s": float(value.count), f"{each.name}s_s": value.sum_s}
            elif isinstance(value, int | float):
                numbers[each.name] = float(value)
        return numbers
