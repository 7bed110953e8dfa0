"""Intervals made wider or narrower by how the last ones fared (conformal prediction). Pure, but for its memory.

Where a start came, as against the interval that the runs ahead gave, is a number: -1 at its beginning (10 %), 0 at its
middle, 1 at its end (90 %). The next intervals reach from where 10 % of the last starts had come to where 90 % had.
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
"""Starts that are remembered."""
SUPPOSED: Final = 20
SUPPOSED_SPREAD: Final = 1.25
"""So many starts are supposed before the first real one, by so much further apart than the runs ahead foretell them."""
LEAST_S: Final = 5.0
"""Half an interval is this long at least: jobs start with heartbeats."""
ENOUGH: Final = 20
"""So many starts make a share that is worth telling."""


class Interval(NamedTuple):
    """From when to when, and the middle, seconds since 1970; None: beyond what was looked at."""

    first: float | None
    middle: float | None
    last: float | None


class Calibration:
    """The last starts of operations that had been foretold.

    ``waiting``: operation that has not started -> what its first forecast with a middle said, before and after its
    correction.
    """

    def __init__(self) -> None:
        scale = SUPPOSED_SPREAD / NormalDist().inv_cdf(PARTS[-1])
        supposed = (scale * NormalDist().inv_cdf((each + 0.5) / SUPPOSED) for each in range(SUPPOSED))
        self._places = deque(supposed, KEPT)
        self._inside: deque[bool] = deque(maxlen=KEPT)
        self.waiting: dict[str, tuple[Interval, Interval]] = {}
        self._now_at = self._quantiles()

    def correct(self, forecast: Forecast) -> Forecast:
        """The same with the interval of its start corrected, where it has not started."""
        if forecast.started_at is not None:
            return forecast
        raw = Interval(forecast.start_p10, forecast.start_p50, forecast.start_p90)
        told = self.correct_interval(raw, forecast.as_of)
        if raw.middle is not None:
            self.waiting.setdefault(forecast.operation_id, (raw, told))
        return msgspec.structs.replace(forecast, start_p10=told.first, start_p50=told.middle, start_p90=told.last)

    def settle(self, operation_id: str, began: float | None) -> None:
        """One of ``waiting`` has started, or never will (None)."""
        told = self.waiting.pop(operation_id)
        if began is not None:
            self.take(*told, began)

    def correct_interval(self, raw: Interval, now: float) -> Interval:
        """The interval of what the runs ahead gave, not before ``now``."""
        if raw.first is None or raw.middle is None:
            return raw
        # What cannot be measured by an end that is not known stays as it is.
        moved = [at if (new := _at(raw, place)) is None else new for at, place in zip(raw, self._now_at, strict=True)]
        return Interval(*(None if at is None else max(at, now) for at in moved))

    def take(self, raw: Interval, told: Interval, began: float) -> None:
        """An operation began of which this was foretold, before and after its correction."""
        place = place_of(raw, began)
        if place is not None:
            self._places.append(place)
            self._now_at = self._quantiles()
        self._inside.append(is_inside(told, began))

    @property
    def starts(self) -> int:
        """How many starts ``inside_ratio`` is of."""
        return len(self._inside)

    @property
    def inside_ratio(self) -> float | None:
        """The part of the last starts that came within their interval; 0.8 is aimed at. None: too few are known."""
        return sum(self._inside) / self.starts if self.starts >= ENOUGH else None

    def describe(self) -> list[str]:
        """The same as a sentence, where enough is known."""
        ratio = self.inside_ratio
        return [] if ratio is None else [f"of the last {count(self.starts, 'start')} {ratio:.0%} came when foretold"]

    def _quantiles(self) -> list[float]:
        ordered = sorted(self._places)
        return [found for part in PARTS if (found := quantile(ordered, part)) is not None]


def is_inside(told: Interval, began: float) -> bool:
    """Whether an interval has the moment; one without an end goes on for ever, one without a beginning never begins."""
    return told.first is not None and told.first <= began and (told.last is None or began <= told.last)


def place_of(raw: Interval, began: float) -> float | None:
    """Where in its interval an operation began, -1 to 1 for inside; None where it has no end to measure by."""
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
    """The value below which another of their kind lies with the probability ``part``. The values, at least two, cut
    what is possible into parts of equal probability; beyond them it goes on as steeply. None where it is infinite."""
    place = part * (len(sorted_values) + 1) - 1.0
    low = min(max(int(place), 0), len(sorted_values) - 2)
    first, second = sorted_values[low], sorted_values[low + 1]
    if math.isinf(second):
        return None if place > low or math.isinf(first) else first
    return first + (second - first) * (place - low)
