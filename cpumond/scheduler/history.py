"""What was when: the points of the history, how they are taken from the state, made coarser and summed up; pure.

A *tick* is one moment at which all series get a point; its interval reaches back to the tick before, or to the start
of the scheduler. Values are float32, NaN for "not known". A point of a rate is the mean over its interval, so the sum
of rate times interval is what was used, ordered, ... in all; no merging changes that sum. Times are seconds since 1970
by the scheduler's clock, CPU values cores, shares fractions of a tree.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, mul
from typing import Final, NamedTuple, TypeVar

import msgspec

from cpumond.fairshare.resources import share
from cpumond.scheduler.elements import (
    Element,
    Job,
    Node,
    PoolElement,
    flow_ratio,
    is_integral,
    volume_capacity,
    volume_ratio,
)
from cpumond.scheduler.model import ROOT_POOL, CommandError
from cpumond.scheduler.state import State
from cpumond.wire import CPU_COUNTERS

KINDS: Final = ("pool", "node", "operation", "job")
"""In the order of their right to a series."""
POOL, NODE, OPERATION, JOB = range(4)
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "pool": (
        "usage_ratio", "demand_ratio", "fair_share_ratio", "strong_guarantee_ratio", "guarantee_ratio", "volume",
        "capacity", "total_cores", "demand_cores", "limit_cores", "running_operations", "used_cores", "reclaimed_cores",
        "ordered_cores", "throttled_cores", "late_cores",
    ),
    "node": ("capacity_cores", "ordered_cores", "limit_cores", "used_cores", "jobs"),
    "operation": (
        "usage_ratio", "demand_ratio", "fair_share_ratio", "limit_cores", "jobs", "used_cores", "reclaimed_cores",
        "ordered_cores", "throttled_cores", "late_cores",
    ),
    "job": (
        "cpu_limit_cores", "current_cpu_limit_cores", "usage_cores", "smoothed_cores", "floor_cores", "votes_sum",
        "throttled_ratio",
    ),
}  # fmt: skip
"""Kind -> columns. The last five of pools and operations are rates, the differences of CPU_COUNTERS in their order."""
WIDTHS: Final = tuple(len(COLUMNS[kind]) for kind in KINDS)
RATES: Final = 5
RATE_NAMES: Final = COLUMNS["pool"][-RATES:]
HAS_RATES: Final = (True, False, True, False)
LIMIT_COLUMNS: Final = (COLUMNS["pool"].index("limit_cores"), 0, COLUMNS["operation"].index("limit_cores"), 0)
NOT_KNOWN: Final = float("nan")
WATCHED_TICKS: Final = 6
"""For how many ticks the counters of an operation that has ended are looked at: its last jobs may still end."""
HOUR_S: Final = 3600.0


class HistoryView(msgspec.Struct, frozen=True):
    """The points of one series, oldest first. ``period_s``: between two points while they are new.

    ``times``: the end of each point's interval, ``intervals`` its length in seconds. Where ``times[i] - intervals[i]``
    is after ``times[i - 1]`` there is nothing known in between. ``columns``: as in COLUMNS, null for "not known".
    """

    kind: str
    tree: str
    name: str
    period_s: float
    times: list[float]
    intervals: list[float]
    columns: dict[str, list[float | None]]


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool or an operation came to, in core-hours. ``late``: the part of ``throttled`` while it had been
    lowered. ``peak_limit_cores`` is as fine as the points are by now; ``points``: about how many were taken. Where
    ``since`` or ``until`` falls into coarse points, ``limit`` and ``points`` are as exact as these.

    ``parent``: of pools that exist. ``title``, ``user``, ``pool``, ``state``: of operations that are still known.
    """

    name: str
    parent: str = ""
    title: str = ""
    user: str = ""
    pool: str = ""
    state: str = ""
    ordered: float = 0.0
    limit: float = 0.0
    used: float = 0.0
    reclaimed: float = 0.0
    throttled: float = 0.0
    late: float = 0.0
    peak_limit_cores: float = 0.0
    points: int = 0


class ReportTree(msgspec.Struct, frozen=True):
    """One tree: its root in ``total``; the other pools, a parent before its children; operations, most ordered first.

    ``left_out_operations``: how many more there are.
    """

    tree: str
    total: ReportRow
    pools: list[ReportRow]
    operations: list[ReportRow]
    left_out_operations: int


class ReportView(msgspec.Struct, frozen=True):
    """What was used from ``since`` to ``until``; ``covered_s`` of it are known, less than all of it where the scheduler
    was down or the history does not go back that far.

    ``operations_without_series``: the most operations at one moment for which there was no room ([history]
    max_series); what they came to is in their pools only.
    """

    since: float
    until: float
    covered_s: float
    period_s: float
    trees: list[ReportTree]
    operations_without_series: int = 0


class HistoryStatus(msgspec.Struct, frozen=True):
    """How much there is: bytes of the file, series of the last tick, those that found no room, the oldest moment."""

    bytes: int
    max_bytes: int
    series: int
    left_out: int
    since: float | None
    write_errors: int


class Key(NamedTuple):
    """What a series is of. ``tree`` is "" for nodes and jobs; a root's ``name`` is ``<Root>``."""

    kind: int
    tree: str
    name: str


@dataclass(slots=True)
class Tick:
    """One moment. ``ids`` and ``values`` by kind: the values of the series ``ids[n]`` begin at ``n`` times WIDTHS.

    ``new``: the series that the tick before did not have. ``left_out``: operations that found no room.
    """

    at: float
    interval_s: float
    ids: tuple[array[int], ...]
    values: tuple[array[float], ...]
    new: dict[int, Key] = field(default_factory=dict)
    left_out: int = 0
    seq: int = 0
    """Given by the store."""


@dataclass(slots=True)
class Points:
    """Some points of one series, oldest first: one array for each column."""

    ends: array[float]
    intervals: array[float]
    columns: list[array[float]]

    def __len__(self) -> int:
        return len(self.ends)


# --- taking points ------------------------------------------------------------------------------------------------


class _Seen:
    """What the last tick found of a pool or an operation."""

    __slots__ = ("id", "key", "counters", "found_at", "taken_at")

    def __init__(self) -> None:
        self.id = -1
        self.key: Key | None = None
        self.counters: _Five = _NOTHING
        self.found_at = self.taken_at = -1
        """Numbers of the ticks that found it, and in which it had a point."""

    def grow(self, element: Element) -> _Five:
        """How much the counters grew since the last time; one that began anew has grown from 0."""
        now, before = _counters_of(element), self.counters
        if now == before:
            return _NOTHING
        self.counters = now
        a, b, c, d, e = now
        f, g, h, i, j = before
        return (
            a - f if a >= f else a,
            b - g if b >= g else b,
            c - h if c >= h else c,
            d - i if d >= i else d,
            e - j if e >= j else e,
        )


_Named = TypeVar("_Named", Node, Job)
_Five = tuple[float, float, float, float, float]
_NOTHING: Final = (0.0, 0.0, 0.0, 0.0, 0.0)
_counters_of: Callable[[Element], _Five] = attrgetter(*CPU_COUNTERS)


class Collector:
    """Takes a tick of the state. ``ids``: series that an earlier run had, ``next_id`` is none of them.

    All counters begin at 0 with the state, at ``started_at``; so do those of every later element.
    """

    def __init__(self, started_at: float, max_series: int, ids: Mapping[Key, int] | None = None, next_id: int = 1):
        self.previous_at = started_at
        self.max_series = max_series
        self.left_out = 0
        """Series of the last tick that found no room."""
        self.series = 0
        self._earlier = dict(ids or {})
        self._next_id = next_id
        self._tick = 0
        self._seen: dict[Element, _Seen] = {}
        self._gone: dict[Element, _Seen] = {}
        self._named: tuple[dict[str, int], ...] = ({}, {}, {}, {})
        self._new: dict[int, Key] = {}

    def collect(self, state: State, now: float) -> Tick | None:
        """The tick of ``now``; None when no time has passed since the last."""
        interval_s = now - self.previous_at
        if interval_s <= 0.0:
            return None
        try:
            return self._collect(state, now, interval_s)
        except BaseException:
            # Nobody will hear of the names that this tick had: the next one tells them all again.
            self._tick += 1
            for named in self._named:
                named.clear()
            raise

    def _collect(self, state: State, now: float, interval_s: float) -> Tick:
        self._tick += 1
        self._new = {}
        room = _Room(self.max_series)
        all_rows = pools, nodes, operations, jobs = tuple(_Rows(kind) for kind in range(len(KINDS)))
        self._take_pools(state, interval_s, room, pools)
        self._take_named(nodes, room, state.nodes.values(), _node_values)
        before = room.left_out
        self._take_operations(state, interval_s, room, operations)
        self._take_gone(state, interval_s, room, pools, operations)
        left_out_operations = room.left_out - before
        self._take_named(jobs, room, (job for job in state.jobs.values() if job.is_active), _job_values)
        self.previous_at = now
        self.left_out = room.left_out
        self.series = room.size - room.left
        return Tick(
            now,
            interval_s,
            tuple(array("q", rows.ids) for rows in all_rows),
            tuple(array("f", rows.values) for rows in all_rows),
            self._new,
            left_out_operations,
        )

    def _make_id(self, key: Key) -> int:
        known = self._earlier.pop(key, None)
        if known is None:
            known = self._next_id
            self._next_id += 1
        self._new[known] = key
        return known

    def _look(self, element: Element) -> _Seen:
        seen = self._seen.get(element)
        if seen is None:
            gone = self._gone.pop(element, None)
            seen = self._seen[element] = _Seen() if gone is None else gone
        seen.found_at = self._tick
        return seen

    def _take_pools(self, state: State, interval_s: float, room: _Room, rows: _Rows) -> None:
        for tree in state.trees.values():
            total_cores = tree.total[1]
            for pool in (tree.root, *tree.pools.values()):
                seen = self._look(pool)
                grown = seen.grow(pool)
                if not room.take():
                    continue
                strong = max(pool.strong_guarantee_share)
                guarantee, volume, capacity = strong, NOT_KNOWN, NOT_KNOWN
                if is_integral(pool):
                    guarantee += flow_ratio(pool)
                    volume, capacity = volume_ratio(pool), volume_capacity(pool)
                rows.values += (
                    max(share(pool.usage, tree.total)), max(pool.demand_share), max(pool.fair_share), strong, guarantee,
                    volume, capacity, total_cores, pool.demand[1], pool.usage[1], pool.running_operation_count,
                )  # fmt: skip
                self._put(rows, pool, seen, interval_s, grown)

    def _take_operations(self, state: State, interval_s: float, room: _Room, rows: _Rows) -> None:
        all_seen = self._seen
        for tree in state.trees.values():
            f, g, h, i, j = (1.0 / total if total else 0.0 for total in tree.total)
            for element in tree.operations.values():
                is_active = element.is_running or element.jobs or element.demand[1] > 0.0
                seen = all_seen.get(element)
                if seen is None:
                    if not is_active:
                        continue
                    seen = self._look(element)
                else:
                    seen.found_at = self._tick
                grown = seen.grow(element)
                if (is_active or grown is not _NOTHING) and room.take():
                    a, b, c, d, e = element.usage
                    rows.values += (
                        max(a * f, b * g, c * h, d * i, e * j), max(element.demand_share), max(element.fair_share),
                        b, len(element.jobs),
                    )  # fmt: skip
                    self._put(rows, element, seen, interval_s, grown)

    def _take_named(
        self, rows: _Rows, room: _Room, found: Iterable[_Named], values_of: Callable[[_Named], tuple[float, ...]]
    ) -> None:
        """Nodes or jobs. One that is left out for a tick has another number later; reading puts them together."""
        before = self._named[rows.kind]
        now: dict[str, int] = {}
        for each in found:
            if room.take():
                series = before.pop(each.id, None)
                now[each.id] = self._make_id(Key(rows.kind, "", each.id)) if series is None else series
                rows.values += values_of(each)
        rows.ids += now.values()
        before.clear()
        before.update(now)

    def _take_gone(self, state: State, interval_s: float, room: _Room, pools: _Rows, operations: _Rows) -> None:
        """A last point of each element that is no more, with what its counters grew by since it was seen."""
        for element in [element for element, seen in self._seen.items() if seen.found_at != self._tick]:
            self._gone[element] = self._seen.pop(element)
        while state.ended_elements:
            ended = state.ended_elements.popleft()
            if ended not in self._seen and ended not in self._gone:
                seen = self._gone[ended] = _Seen()
                seen.found_at = self._tick - 1
        for element, seen in list(self._gone.items()):
            grown = seen.grow(element)
            was_there = seen.found_at == self._tick - 1 and seen.taken_at >= 0
            if self._tick - seen.found_at >= WATCHED_TICKS:
                del self._gone[element]
            if (was_there or grown is not _NOTHING) and room.take():
                rows = pools if isinstance(element, PoolElement) else operations
                rows.values += (0.0,) * (WIDTHS[rows.kind] - RATES)
                self._put(rows, element, seen, interval_s, grown)

    def _put(self, rows: _Rows, element: Element, seen: _Seen, interval_s: float, grown: _Five) -> None:
        """Complete the row of an element, whose gauges are there already."""
        if grown is _NOTHING:
            rows.values += grown
        else:
            a, b, c, d, e = grown
            rows.values += (a / interval_s, b / interval_s, c / interval_s, d / interval_s, e / interval_s)
        key = seen.key
        if key is None or key.name != element.name:
            key = seen.key = Key(rows.kind, element.tree.name, element.name)
            seen.id = self._make_id(key)
        elif seen.taken_at != self._tick - 1:
            self._new[seen.id] = key
        seen.taken_at = self._tick
        rows.ids.append(seen.id)


class _Rows:
    """The rows of one kind, as they are gathered."""

    __slots__ = ("kind", "ids", "values")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.ids: list[int] = []
        self.values: list[float] = []


class _Room:
    """How many series still fit."""

    __slots__ = ("size", "left", "left_out")

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self.left_out = 0

    def take(self) -> bool:
        if self.left:
            self.left -= 1
            return True
        self.left_out += 1
        return False


def _node_values(node: Node) -> tuple[float, ...]:
    ordered = used = 0.0
    for job in node.jobs.values():
        ordered += job.limits[1]
        used += used_now(job)
    return (node.capacity[1], ordered, node.used[1], used, float(len(node.jobs)))


def _job_values(job: Job) -> tuple[float, ...]:
    said = job.report
    figures = (said.cpu_usage, said.smoothed_cpu_usage, said.min_cpu_limit, said.votes_sum, said.throttled_ratio)
    return (job.limits[1], job.usage[1], *[NOT_KNOWN if value is None else float(value) for value in figures])


def used_now(job: Job) -> float:
    """Cores that its node last saw it use: in the last check, else smoothed, else 0."""
    report = job.report
    return report.smoothed_cpu_usage or 0.0 if report.cpu_usage is None else report.cpu_usage


# --- points of one series -----------------------------------------------------------------------------------------


def gather(ticks: Sequence[Tick], kind: int, rows: Sequence[int]) -> list[array[float]]:
    """The columns of one series; ``rows``: its place in each tick, -1 where it has none (NaN then)."""
    width = WIDTHS[kind]
    absent = array("f", [NOT_KNOWN]) * width
    block = array("f")
    for tick, row in zip(ticks, rows, strict=True):
        block += absent if row < 0 else tick.values[kind][row * width : (row + 1) * width]
    return [block[number::width] for number in range(width)]


def places(ticks: Sequence[Tick], kind: int) -> dict[int, list[int]]:
    """Series -> its place in each tick, -1 where it has none."""
    found: dict[int, list[int]] = {}
    for number, tick in enumerate(ticks):
        for row, series in enumerate(tick.ids[kind]):
            known = found.get(series)
            if known is None:
                known = found[series] = [-1] * len(ticks)
            known[number] = row
    return found


def merge_columns(
    intervals: Sequence[float], groups: Sequence[tuple[int, int]], columns: Sequence[array[float]], has_rates: bool
) -> list[array[float]]:
    """Each group of points (from, to) as one point.

    A gauge becomes its mean over the time for which it is known. A rate becomes the mean over all of the group's time,
    what is not known counts as 0: so rate times interval stays what it was in sum.
    """
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
    """Neighbours whose ends fall into the same bucket, as (from, to)."""
    groups: list[tuple[int, int]] = []
    start, current, number = 0, None, -1
    for number, end in enumerate(ends):
        bucket = bucket_of(end)
        if bucket != current:
            if current is not None:
                groups.append((start, number))
            start, current = number, bucket
    if current is not None:
        groups.append((start, number + 1))
    return groups


def merge_points(points: Points, groups: Sequence[tuple[int, int]], has_rates: bool) -> Points:
    """Each group of neighbours as one point, at the end of the last of them."""
    return Points(
        array("d", (points.ends[b - 1] for _, b in groups)),
        array("d", (sum(points.intervals[a:b]) for a, b in groups)),
        merge_columns(points.intervals, groups, points.columns, has_rates),
    )


def select(points: Points, since: float, until: float) -> Points:
    """The points that end after ``since`` and not after ``until``, without those of which nothing is known."""
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
    """The points of several series as those of one, ordered by time: an operation in its trees, or of several numbers.

    At the same moment cores, jobs and counts are added; of shares, volumes and capacities the largest stays.
    """
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
    """The view of a series: at most ``max_points``, neighbours merged where there are more."""
    if len(points) > max_points:
        # The time without points takes no part of them.
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


# --- sums ---------------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """What a series came to: core-seconds in the order of CPU_COUNTERS, of its limit, its highest limit, its points."""

    used: float = 0.0
    reclaimed: float = 0.0
    ordered: float = 0.0
    throttled: float = 0.0
    late: float = 0.0
    limit: float = 0.0
    peak: float = 0.0
    points: int = 0

    def plus(self, other: Sums) -> Sums:
        """Both, in time or side by side."""
        return Sums(
            self.used + other.used,
            self.reclaimed + other.reclaimed,
            self.ordered + other.ordered,
            self.throttled + other.throttled,
            self.late + other.late,
            self.limit + other.limit,
            max(self.peak, other.peak),
            self.points + other.points,
        )


def sum_columns(kind: int, intervals: Sequence[float], columns: Sequence[array[float]]) -> Sums:
    """The sums of the points of one pool or operation; what is not known counts as 0."""
    limits = columns[LIMIT_COLUMNS[kind]]
    summed = [_sum_known(column, intervals) for column in (*columns[-RATES:], limits)]
    used, reclaimed, ordered, throttled, late, limit = summed
    peak = max((value for value in limits if value == value), default=0.0)
    points = sum(value == value for value in columns[0])
    return Sums(used, reclaimed, ordered, throttled, late, limit, peak, points)


def _sum_known(values: Sequence[float], intervals: Sequence[float]) -> float:
    total = float(sum(map(mul, values, intervals)))
    if total == total:
        return total
    return sum(value * weight for value, weight in zip(values, intervals, strict=True) if value == value)


def top_operations(sums: Mapping[Key, Sums], top: int) -> tuple[dict[Key, Sums], dict[str, int]]:
    """All pools and, of each tree, the ``top`` operations that ordered most; and tree -> operations left out."""
    kept = {key: each for key, each in sums.items() if key.kind == POOL}
    by_tree: dict[str, list[tuple[Key, Sums]]] = {}
    for key, each in sums.items():
        if key.kind == OPERATION:
            by_tree.setdefault(key.tree, []).append((key, each))
    left_out: dict[str, int] = {}
    for tree, operations in by_tree.items():
        operations.sort(key=lambda item: (-item[1].ordered, -item[1].used, item[0].name))
        kept.update(operations[:top])
        left_out[tree] = max(len(operations) - top, 0)
    return kept, left_out


class Summary(NamedTuple):
    """What a report is made of. ``left_out``: tree -> operations that are not in ``sums``; ``covered_s``: seconds of
    which there are points; ``without_series``: the most operations at one moment that had none."""

    sums: Mapping[Key, Sums]
    left_out: Mapping[str, int]
    covered_s: float
    without_series: int


def make_report(
    state: State, summary: Summary, since: float, until: float, period_s: float, tree: str | None
) -> ReportView:
    """The report; names of people and pools are those of ``state``."""
    sums = summary.sums
    names = list(state.trees) if tree is None else [tree]
    names += sorted({key.tree for key in sums} - set(names)) if tree is None else []
    trees: list[ReportTree] = []
    for name in names:
        mine = {key: each for key, each in sums.items() if key.tree == name}
        if not mine and name not in state.trees:
            continue
        total = mine.pop(Key(POOL, name, ROOT_POOL), Sums())
        pools = {key.name: each for key, each in mine.items() if key.kind == POOL}
        operations = [(key.name, each) for key, each in mine.items() if key.kind == OPERATION]
        trees.append(
            ReportTree(
                tree=name,
                total=_row(ROOT_POOL, total),
                pools=[_row(pool, pools[pool], parent=parent) for pool, parent in _order_pools(state, name, pools)],
                operations=[_operation_row(state, name, operation, each) for operation, each in operations],
                left_out_operations=summary.left_out.get(name, 0),
            )
        )
    return ReportView(since, until, summary.covered_s, period_s, trees, summary.without_series)


def _order_pools(state: State, tree_name: str, wanted: Mapping[str, Sums]) -> Iterator[tuple[str, str]]:
    """The pools that exist, depth first, with their parents; then the others by name."""
    tree = state.trees.get(tree_name)
    if tree is not None:
        waiting = [tree.root]
        while waiting:
            pool = waiting.pop()
            waiting += sorted(pool.children.values(), key=lambda child: child.name, reverse=True)
            if pool.parent is not None and pool.name in wanted:
                yield pool.name, pool.parent.name
    known = tree.pools if tree is not None else {}
    yield from ((name, "") for name in sorted(wanted) if name not in known)


def _operation_row(state: State, tree: str, operation_id: str, sums: Sums) -> ReportRow:
    live = state.operations.get(operation_id)
    record = state.finished.get(operation_id) if live is None else live.record
    if record is None:
        return _row(operation_id, sums)
    options = record.trees.get(tree)
    return _row(
        operation_id,
        sums,
        title=record.title,
        user=record.user,
        pool="" if options is None else options.pool,
        state=record.state,
    )


def _row(name: str, sums: Sums, **facts: str) -> ReportRow:
    return ReportRow(
        name=name,
        **facts,
        ordered=sums.ordered / HOUR_S,
        limit=sums.limit / HOUR_S,
        used=sums.used / HOUR_S,
        reclaimed=sums.reclaimed / HOUR_S,
        throttled=sums.throttled / HOUR_S,
        late=sums.late / HOUR_S,
        peak_limit_cores=sums.peak,
        points=sums.points,
    )


def kind_number(kind: str) -> int:
    """The place of a kind in KINDS. Raises CommandError."""
    if kind not in KINDS:
        raise CommandError(f'kind "{kind}" is not known: it is one of {", ".join(KINDS)}')
    return KINDS.index(kind)
