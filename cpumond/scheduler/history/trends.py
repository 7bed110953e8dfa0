"""Many series at once and coarsely, as small graphs show them; pure. Times are seconds since 1970."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Trends:
    """The time after ``since`` and not after ``until`` in ``count`` parts of the same length."""

    since: float
    until: float
    count: int

    def begin(self) -> Trend:
        """One series without points."""
        return Trend(self)


@dataclass(slots=True)
class Trend:
    """The points of one series, as they are added: the mean of each part, over the time for which it is known."""

    times: Trends
    sums: list[float] = field(init=False)
    lengths_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.sums, self.lengths_s = [0.0] * self.times.count, [0.0] * self.times.count

    def add(self, end: float, interval_s: float, value: float) -> None:
        """A point whose interval ends at ``end`` within the time; NaN is "not known"."""
        if value == value:
            times = self.times
            width_s = (times.until - times.since) / times.count
            part = min(max(math.ceil((end - times.since) / width_s - 1e-6) - 1, 0), times.count - 1)
            self.sums[part] += value * interval_s
            self.lengths_s[part] += interval_s

    def values(self) -> list[float | None]:
        """One value for each part, None where nothing is known."""
        parts = zip(self.sums, self.lengths_s, strict=True)
        return [round(total / length_s, 3) if length_s else None for total, length_s in parts]
