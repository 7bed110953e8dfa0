"""Forecast intervals widened or narrowed by the accuracy of earlier ones (conformal prediction). Pure, but for its
memory.

The position of an actual start in its simulated interval is a number: -1 at its beginning (10 %), 0 at its middle, 1 at
its end (90 %). New intervals reach from the position below which 10 % of the last starts were to the one below which 90
% were.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final, NamedTuple

import msgspec

from cpumond.core.words import count
from cpumond.scheduler.model.forecast import Forecast

PARTS: Final = (0.1, 0.5, 0.9)
KEPT: Final = 500
"""Number of starts that are remembered."""
SUPPOSED: Final = 20
SUPPOSED_SPREAD: Final = 1.25
"""Number of assumed starts before the first real one, and the factor by which they spread wider than simulated."""
LEAST_S: Final = 5.0
"""Shortest half of an interval, in seconds: jobs start with heartbeats."""
ENOUGH: Final = 20
"""Number of starts from which the share inside their intervals is reported."""


class Interval(NamedTuple):
    """Interval of a predicted start and its middle, in seconds since 1970; None: beyond the horizon."""

    first: float | None
    middle: float | None
    last: float | None


class Calibration:
    """The last actual starts of operations that had a forecast. ``waiting``: operation that has not started -> its
    first forecast with a middle, before and after correction."""

    def __init__(self) -> None:
        scale = SUPPOSED_SPREAD / NormalDist().inv_cdf(PARTS[-1])
        supposed = (scale * NormalDist().inv_cdf((each + 0.5) / SUPPOSED) for each in range(SUPPOSED))
        self._places = deque(supposed, KEPT)
        self._inside: deque[bool] = deque(maxlen=KEPT)
        self.waiting: dict[str, tuple[Interval, Interval]] = {}
        self._now_at = self._quantiles()

    def correct(self, forecast: Forecast) -> Forecast:
        """Return the forecast with the interval of its start corrected, unless the operation has started."""
        if forecast.started_at is not None:
            return forecast
        raw = Interval(forecast.start_p10, forecast.start_p50, forecast.start_p90)
        told = self.correct_interval(raw, forecast.as_of)
        if raw.middle is not None:
            self.waiting.setdefault(forecast.operation_id, (raw, told))
        return msgspec.structs.replace(forecast, start_p10=told.first, start_p50=told.middle, start_p90=told.last)

    def settle(self, operation_id: str, began: float | None) -> None:
        """Take the start of an operation in ``waiting``; None: it will never start."""
        told = self.waiting.pop(operation_id)
        if began is not None:
            self.take(*told, began)

    def correct_interval(self, raw: Interval, now: float) -> Interval:
        """Correct a simulated interval; none of its moments is before ``now``."""
        if raw.first is None or raw.middle is None:
            return raw
        # If the interval has no known end on that side, the moment stays uncorrected.
        moved = [at if (new := _at(raw, place)) is None else new for at, place in zip(raw, self._now_at, strict=True)]
        return Interval(*(None if at is None else max(at, now) for at in moved))

    def take(self, raw: Interval, told: Interval, began: float) -> None:
        """Take an operation's actual start and its forecast before (``raw``) and after correction (``told``)."""
        place = place_of(raw, began)
        if place is not None:
            self._places.append(place)
            self._now_at = self._quantiles()
        self._inside.append(is_inside(told, began))

    @property
    def starts(self) -> int:
        """Number of starts on which ``inside_ratio`` is based."""
        return len(self._inside)

    @property
    def inside_ratio(self) -> float | None:
        """Share of the last starts inside their interval; the target is 0.8. None: too few are known."""
        return sum(self._inside) / self.starts if self.starts >= ENOUGH else None

    def describe(self) -> list[str]:
        """Return ``inside_ratio`` as a sentence, where enough starts are known."""
        ratio = self.inside_ratio
        return [] if ratio is None else [f"{ratio:.0%} of the last {count(self.starts, 'start')} came when predicted"]

    def _quantiles(self) -> list[float]:
        ordered = sorted(self._places)
        return [found for part in PARTS if (found := quantile(ordered, part)) is not None]


def is_inside(told: Interval, began: float) -> bool:
    """Whether an interval contains the moment; without an end it is unbounded, without a beginning it is empty."""
    return told.first is not None and told.first <= began and (told.last is None or began <= told.last)


def place_of(raw: Interval, began: float) -> float | None:
    """Return the position of a start in its interval, -1 to 1 if inside; None where the interval has no end on that
    side."""
    if raw.middle is None:
        return None
    half_s = _half_s(raw, began < raw.middle)
    return None if half_s is None else (began - raw.middle) / half_s


def _at(raw: Interval, place: float) -> float | None:
    half_s = _half_s(raw, place < 0.0)
    return None if raw.middle is None or half_s is None else raw.middle + place * half_s


def _half_s(raw: Interval, is_first: bool) -> float | None:
    end = raw.first if is_first else raw.last
    return None if end is None or raw.middle is None else max(abs(end - raw.middle), LEAST_S)


def quantile(sorted_values: Sequence[float], part: float) -> float | None:
    """Return the value below which another one of the same distribution lies with probability ``part``. The two or more
    values divide the range into parts of equal probability; beyond them the slope continues. None where the result is
    infinite."""
    place = part * (len(sorted_values) + 1) - 1.0
    low = min(max(int(place), 0), len(sorted_values) - 2)
    first, second = sorted_values[low], sorted_values[low + 1]
    if math.isinf(second):
        return None if place > low or math.isinf(first) else first
    return first + (second - first) * (place - low)
