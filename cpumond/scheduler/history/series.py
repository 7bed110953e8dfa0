"""Points of the history: collected from ticks, merged for a graph, summed up, shown; pure.

A *tick* is one moment at which all series get a point. Its interval reaches back to the previous tick, or to the start
of the scheduler. Values are float32, NaN for "not known". A point of a rate is the mean over its interval, so the sum
of rate times interval is the total used, requested, ..., and merging points does not change it. Times are seconds since
1970 by the scheduler's clock, CPU values cores, shares fractions of a tree."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from operator import mul, sub
from typing import Final

from cpumond.scheduler.history.model import (
    COLUMNS,
    DAY_S,
    HAS_RATES,
    HOUR_S,
    KINDS,
    LIMIT_COLUMNS,
    NODE,
    NOT_KNOWN,
    OPERATION,
    POOL,
    RATES,
    WIDTHS,
    Amounts,
    HistoryView,
    Key,
    NodeMap,
    Points,
    Series,
    Tick,
)

_NO_POINT: Final = (0.0,) * WIDTHS[NODE]


def gather(values: Sequence[array[float]], kind: int, rows: Sequence[int]) -> list[array[float]]:
    """Return the columns of one series. ``values``: those of its kind in each tick. ``rows``: the index of the series
    in each tick; -1 if it is not there (then NaN)."""
    width = WIDTHS[kind]
    absent = array("f", [NOT_KNOWN]) * width
    block = array("f")
    for found, row in zip(values, rows, strict=True):
        block += absent if row < 0 else found[row * width : (row + 1) * width]
    return [block[number::width] for number in range(width)]


def places(
    ticks: Sequence[Tick], kind: int, tree: str = "", names: Container[str] | None = None
) -> dict[Series, list[int]]:
    """Return series -> its index in each tick, -1 if absent; only series of ``names`` and ``tree`` ("": any)."""
    found: dict[Series, list[int]] = {}
    for number, tick in enumerate(ticks):
        for row, series in enumerate(tick.names[kind]):
            if names is not None and (series[1] not in names or tree not in ("", series[0])):
                continue
            known = found.get(series)
            if known is None:
                known = found[series] = [-1] * len(ticks)
            known[number] = row
    return found


def merge_columns(
    intervals: Sequence[float], groups: Sequence[tuple[int, int]], columns: Sequence[array[float]], has_rates: bool
) -> list[array[float]]:
    """Return the columns with each group of points (from, to) merged into one point. A gauge becomes its mean over the
    time for which it is known. A rate becomes its mean over all of the group's time, where unknown values count as 0:
    the sum of rate times interval stays the same."""
    totals = [sum(intervals[a:b]) for a, b in groups]
    merged: list[array[float]] = []
    for number, column in enumerate(columns):
        first = column[0] if column else NOT_KNOWN
        if column.count(first) == len(column):
            merged.append(array("f", [first]) * len(groups))
            continue
        is_rate = has_rates and number >= len(columns) - RATES
        values = array("f")
        for (a, b), total_s in zip(groups, totals, strict=True):
            part = column[a:b]
            mean = sum(map(mul, part, intervals[a:b])) / total_s
            values.append(mean if mean == mean else _mean_of_known(part, intervals[a:b], is_rate))
        merged.append(values)
    return merged


def _mean_of_known(values: Sequence[float], intervals: Sequence[float], is_rate: bool) -> float:
    known = [(value, weight) for value, weight in zip(values, intervals, strict=True) if value == value]
    if not known:
        return NOT_KNOWN
    weight_s = sum(intervals) if is_rate else sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / weight_s


def split(ends: Iterable[float], bucket_of: Callable[[float], int]) -> list[tuple[int, int]]:
    """Return groups of adjacent points whose ends fall into the same bucket, as (from, to)."""
    lengths = (sum(1 for _ in group) for _, group in itertools.groupby(ends, bucket_of))
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def merge_points(points: Points, groups: Sequence[tuple[int, int]], has_rates: bool) -> Points:
    """Merge each group of neighbours into one point, which ends when the last of them ends."""
    return Points(
        array("d", (points.ends[b - 1] for _, b in groups)),
        array("d", (sum(points.intervals[a:b]) for a, b in groups)),
        merge_columns(points.intervals, groups, points.columns, has_rates),
    )


def select(points: Points, since: float, until: float) -> Points:
    """Return the points that end after ``since`` and not after ``until``, except those without any known value."""
    keep = [
        number
        for number, end in enumerate(points.ends)
        if since < end <= until and any(column[number] == column[number] for column in points.columns)
    ]
    return Points(
        array("d", (points.ends[number] for number in keep)),
        array("d", (points.intervals[number] for number in keep)),
        [array("f", (column[number] for number in keep)) for column in points.columns],
    )


def combine(parts: Iterable[Points], kind: int) -> Points:
    """Combine points and order them by time: those of several chunks, or of an operation in several trees. Cores, jobs
    and counts of one moment are added up; of shares, volumes and capacities the largest is kept."""
    at: dict[float, tuple[float, list[float]]] = {}
    names = COLUMNS[KINDS[kind]]
    largest = [name.endswith("_ratio") or name in ("volume", "capacity") for name in names]
    for points in parts:
        for number, end in enumerate(points.ends):
            values = [column[number] for column in points.columns]
            known = at.get(end)
            if known is not None:
                values = [
                    new if old != old else old if new != new else max(old, new) if is_largest else old + new
                    for old, new, is_largest in zip(known[1], values, largest, strict=True)
                ]
            at[end] = (points.intervals[number], values)
    ends = sorted(at)
    return Points(
        array("d", ends),
        array("d", (at[end][0] for end in ends)),
        [array("f", (at[end][1][number] for end in ends)) for number in range(len(names))],
    )


def make_view(key: Key, points: Points, since: float, until: float, max_points: int, period_s: float) -> HistoryView:
    """Return the view of a series with at most ``max_points``; if there are more, neighbours are merged."""
    if len(points) > max_points:
        # The time before the first point and after the last takes none of ``max_points``.
        since, until = max(since, points.ends[0] - points.intervals[0]), min(until, points.ends[-1])
        width_s = (until - since) / max_points
        groups = split(points.ends, lambda end: min(math.ceil((end - since) / width_s - 1e-6), max_points))
        points = merge_points(points, groups, HAS_RATES[key.kind])
    kind = KINDS[key.kind]
    return HistoryView(
        kind=kind,
        tree=key.tree,
        name=key.name,
        period_s=period_s,
        times=[round(end, 3) for end in points.ends],
        intervals=[round(interval, 3) for interval in points.intervals],
        columns={
            name: [round(value, 6) if value - value == 0.0 else None for value in column]
            for name, column in zip(COLUMNS[kind], points.columns, strict=True)
        },
    )


def sum_columns(kind: int, intervals: Sequence[float], columns: Sequence[array[float]]) -> Amounts:
    """Return the totals of the points of one pool or operation; unknown values count as 0."""
    limits = columns[LIMIT_COLUMNS[kind]]
    summed = [_sum_known(column, intervals) for column in (*columns[-RATES:], limits)]
    peak = max((value for value in limits if value == value), default=0.0)
    return Amounts(*summed)._replace(points=sum(value == value for value in columns[0]), peak=peak)


def _sum_known(values: Sequence[float], intervals: Sequence[float]) -> float:
    total = float(sum(map(mul, values, intervals)))
    if total == total:
        return total
    return sum(value * weight for value, weight in zip(values, intervals, strict=True) if value == value)


def top_operations(totals: Mapping[Key, Amounts], top: int) -> tuple[dict[Key, Amounts], dict[str, int]]:
    """Return the totals of all pools and, in each tree, of the ``top`` operations with the largest requests; and tree
    -> number of operations left out."""
    kept = {key: each for key, each in totals.items() if key.kind == POOL}
    by_tree: dict[str, list[tuple[Key, Amounts]]] = {}
    for key, each in totals.items():
        if key.kind == OPERATION:
            by_tree.setdefault(key.tree, []).append((key, each))
    left_out: dict[str, int] = {}
    for tree, operations in by_tree.items():
        operations.sort(key=lambda item: (-item[1].ordered, -item[1].used, item[0].name))
        kept.update(operations[:top])
        left_out[tree] = max(len(operations) - top, 0)
    return kept, left_out


def mean_of_parts(points: Points, column: int, since: float, until: float, count: int) -> list[float | None]:
    """Return the means of a gauge in ``count`` equal parts of a time; None for a part of which nothing is known."""
    width_s = (until - since) / count
    sums, lengths_s = [0.0] * count, [0.0] * count
    for end, interval_s, value in zip(points.ends, points.intervals, points.columns[column], strict=True):
        if value == value:
            part = min(max(math.ceil((end - since) / width_s - 1e-6) - 1, 0), count - 1)
            sums[part] += value * interval_s
            lengths_s[part] += interval_s
    return [round(total / length_s, 3) if length_s else None for total, length_s in zip(sums, lengths_s, strict=True)]


def make_node_map(
    nodes: Collection[str], measure: str, moments: Iterable[tuple[float, Mapping[str, Sequence[float]]]], step_s: float
) -> NodeMap:
    """Return the map of nodes at moments ``step_s`` apart. ``moments``: for each, node -> values of a point."""
    percents: list[list[int | None]] = []
    times: list[float] = []
    twice: list[float] = []
    total = 0.0
    for moment, found in moments:
        row: list[int | None] = []
        for name in nodes:
            capacity, ordered, limit, used, _ = found.get(name, _NO_POINT)
            cores = {"used": used, "ordered": ordered, "reclaimed": max(ordered - limit, 0.0)}[measure]
            row.append(round(100.0 * cores / capacity) if capacity > 0.0 else None)
            total += max(ordered - capacity, 0.0) * step_s / HOUR_S
        times.append(round(moment, 3))
        percents.append(row)
        twice.append(round(total, 3))
    return NodeMap(measure, list(nodes), times, percents, twice)


def make_days(key: Key, days: Mapping[int, tuple[Amounts, float]], until: float) -> Points:
    """Return points of a pool, one per UTC day. ``days``: for each day its totals and its known seconds."""
    columns = {name: array("f", [NOT_KNOWN]) * len(days) for name in COLUMNS[KINDS[key.kind]]}
    rates = COLUMNS[KINDS[key.kind]][-RATES:]
    for number, (amounts, known_s) in enumerate(days.values()):
        for name, amount in zip((*rates, "limit_cores"), amounts, strict=False):
            columns[name][number] = amount / known_s
    ends = array("d", (min((day + 1) * DAY_S, until) for day in days))
    begins = (day * DAY_S for day in days)
    return Points(ends, array("d", map(sub, ends, begins)), list(columns.values()))
