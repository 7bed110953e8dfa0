"""Correction of forecast intervals by the accuracy of earlier ones (conformal prediction). Pure, except that it
remembers earlier starts.

The position of an actual start in its simulated interval is a number: -1 at the beginning of the interval (10 %), 0 at
its middle, 1 at its end (90 %). A corrected interval begins at the position below which 10 % of the last starts were,
and ends at that above which 10 % were."""

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
"""Assumed starts before there are real ones: their number, and how many times wider than simulated they spread."""
LEAST_S: Final = 5.0
"""Shortest half of an interval, in seconds: jobs start only with heartbeats."""
ENOUGH: Final = 20
"""Minimum number of starts before the share of them that was inside their intervals is reported."""


class Interval(NamedTuple):
    """Interval of a predicted start and its middle, in seconds since 1970; None: the moment is beyond the horizon."""

    first: float | None
    middle: float | None
    last: float | None


class Calibration:
    """The last actual starts of operations that had a forecast. ``waiting``: maps an operation that has not started to
    its first forecast with a middle, before and after correction."""

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
        """Record the start of an operation in ``waiting``; ``began`` is None if the operation will never start."""
        told = self.waiting.pop(operation_id)
        if began is not None:
            self.take(*told, began)

    def correct_interval(self, raw: Interval, now: float) -> Interval:
        """Return the corrected form of a simulated interval; no moment in it is before ``now``."""
        if raw.first is None or raw.middle is None:
            return raw
        # A moment stays uncorrected if the interval has no known end on its side.
        moved = [at if (new := _at(raw, place)) is None else new for at, place in zip(raw, self._now_at, strict=True)]
        return Interval(*(None if at is None else max(at, now) for at in moved))

    def take(self, raw: Interval, told: Interval, began: float) -> None:
        """Record an operation's actual start, and its forecast before (``raw``) and after correction (``told``)."""
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
        """Share of the last starts that were inside their interval; the target is 0.8. None if too few are known."""
        return sum(self._inside) / self.starts if self.starts >= ENOUGH else None

    def describe(self) -> list[str]:
        """Return ``inside_ratio`` as a sentence; nothing if too few starts are known."""
        ratio = self.inside_ratio
        return [] if ratio is None else [f"{ratio:.0%} of the last {count(self.starts, 'start')} came when predicted"]

    def _quantiles(self) -> list[float]:
        ordered = sorted(self._places)
        return [found for part in PARTS if (found := quantile(ordered, part)) is not None]


def is_inside(told: Interval, began: float) -> bool:
    """Whether an interval contains the start. Without an end it is unbounded; without a beginning it is empty."""
    return told.first is not None and told.first <= began and (told.last is None or began <= told.last)


def place_of(raw: Interval, began: float) -> float | None:
    """The position of a start in its interval: -1 to 1 if inside, None if it has no end on the side of the start."""
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
    """Return the value below which a new value of the same distribution lies with probability ``part``. The two or more
    values divide the range into parts of equal probability; beyond them the slope continues. None: infinity."""
    place = part * (len(sorted_values) + 1) - 1.0
    low = min(max(int(place), 0), len(sorted_values) - 2)
    first, second = sorted_values[low], sorted_values[low + 1]
    if math.isinf(second):
        return None if place > low or math.isinf(first) else first
    return first + (second - first) * (place - low)
