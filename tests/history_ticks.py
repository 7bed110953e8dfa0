"""Ticks of a history made by hand, and a scheduler's world that one is taken of."""

from array import array
from collections.abc import Iterable, Mapping

from cpumond.scheduler.history import model

START = 1_000_000.0
PERIOD_S = 10.0
RATES = {"used_cores": 0, "reclaimed_cores": 1, "ordered_cores": 2, "throttled_cores": 3, "late_cores": 4}


def row(kind: int, **columns: float) -> list[float]:
    """The values of a point; what is not named is 0."""
    return [columns.get(name, 0.0) for name in model.COLUMNS[model.KINDS[kind]]]


class Tape:
    def __init__(self, at: float = START) -> None:
        self.at = at

    def tick(
        self,
        points: Mapping[model.Key, Iterable[float]],
        interval_s: float = PERIOD_S,
        gap_s: float = 0.0,
        totals: Mapping[model.Key, model.Amounts] | None = None,
    ) -> model.Tick:
        """The next tick. What it adds to its day is what its pools have, and ``totals``, of a second each."""
        self.at += interval_s + gap_s
        names: list[list[model.Series]] = [[] for _ in model.KINDS]
        values = [array("f") for _ in model.KINDS]
        for key, point in points.items():
            names[key.kind].append((key.tree, key.name))
            values[key.kind].extend(point)
        assert all(len(v) == len(i) * width for v, i, width in zip(values, names, model.WIDTHS, strict=True))
        found = {key: amounts_of(point, interval_s) for key, point in points.items() if key.kind == model.POOL}
        for key, amounts in (totals or {}).items():
            scaled = model.Amounts._make(interval_s * each for each in amounts)
            found[key] = found[key].plus(scaled) if key in found else scaled
        found[model.COVERED_KEY] = model.Amounts(seconds=interval_s, points=1)
        return model.Tick(self.at, interval_s, tuple(names), tuple(values), totals=found)


def amounts_of(point: Iterable[float], interval_s: float) -> model.Amounts:
    """What a pool's point adds to its day."""
    named = dict(zip(model.COLUMNS["pool"], (0.0 if value != value else value for value in point), strict=True))
    rates = [named[name] * interval_s for name in (*RATES, "limit_cores")]
    return model.Amounts(*rates)._replace(seconds=interval_s, points=1, peak=named["limit_cores"])


def integral(view: model.HistoryView, column: str) -> float:
    """Rate times interval of all points."""
    return sum((value or 0.0) * dt for value, dt in zip(view.columns[column], view.intervals, strict=True))
