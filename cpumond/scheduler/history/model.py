"""What the history is made of: series, ticks, points, and what is shown of them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from cpumond.scheduler.model import CommandError

KINDS: Final = ("pool", "node", "operation", "job")
"""In the order in which they get series while there is room."""

POOL, NODE, OPERATION, JOB = range(4)

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "pool": (
        "usage_ratio", "demand_ratio", "fair_share_ratio", "strong_guarantee_ratio", "guarantee_ratio", "volume",
        "capacity", "total_cores", "demand_cores", "limit_cores", "running_operations", "waiting_cores",
        "idle_cores", "held_cores", "early_ratio", "early_s",
        "used_cores", "reclaimed_cores", "ordered_cores", "throttled_cores", "late_cores",
    ),
    "node": ("capacity_cores", "ordered_cores", "limit_cores", "used_cores", "jobs"),
    "operation": (
        "usage_ratio", "demand_ratio", "fair_share_ratio", "limit_cores", "jobs", "early_ratio", "early_s",
        "used_cores", "reclaimed_cores", "ordered_cores", "throttled_cores", "late_cores",
    ),
    "job": (
        "cpu_limit_cores", "current_cpu_limit_cores", "usage_cores", "smoothed_cores", "floor_cores", "votes_sum",
        "throttled_ratio",
    ),
}  # fmt: skip
"""Kind -> columns. The last five of pools and operations are rates, the differences of CPU_COUNTERS in their order;
``early_ratio`` is the part of them that was used before the point, at most ``early_s`` before."""

INNER_COLUMNS: Final = ("early_ratio", "early_s")
"""Columns that are not shown: by them ``spread`` makes the rates that are."""

WIDTHS: Final = tuple(len(COLUMNS[kind]) for kind in KINDS)

EARLIER_WIDTHS: Final = (
    (WIDTHS[POOL] - 2, WIDTHS[NODE], WIDTHS[OPERATION] - 2, WIDTHS[JOB]),
    (WIDTHS[POOL] - 5, WIDTHS[NODE], WIDTHS[OPERATION] - 2, WIDTHS[JOB]),
)
"""Of what earlier versions stored, the latest first: before there were INNER_COLUMNS, and before pools had
``waiting_cores``, ``idle_cores`` and ``held_cores``. New columns come right before the rates."""

RATES: Final = 5

HAS_RATES: Final = (True, False, True, False)

LIMIT_COLUMNS: Final = (COLUMNS["pool"].index("limit_cores"), 0, COLUMNS["operation"].index("limit_cores"), 0)

NOT_KNOWN: Final = float("nan")

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
    ``since`` or ``until`` falls into coarse points, ``limit`` and ``points`` are as exact as these. ``lost``: by
    preemptions of operations that are still known, in the pool where it was and those above (6.9).

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
    lost: float = 0.0
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
    """What a series belongs to. ``tree`` is "" for nodes and jobs; a root's ``name`` is ``<Root>``."""

    kind: int
    tree: str
    name: str


@dataclass(slots=True)
class Tick:
    """One moment. ``ids`` and ``values`` by kind: the values of the series ``ids[n]`` begin at ``n`` times its WIDTHS.

    ``new``: the series that the tick before did not have. ``left_out``: operations without a series for want of room.
    """

    at: float
    interval_s: float
    ids: tuple[array[int], ...]
    values: tuple[array[float], ...]
    new: dict[int, Key] = field(default_factory=dict)
    left_out: int = 0
    seq: int = 0
    """Given by the store."""
    packed: tuple[bytes, ...] = ()
    """The values, compressed, once ``chunks.pack_values`` was called; ``values`` is empty then."""


@dataclass(slots=True)
class Points:
    """Some points of one series, oldest first: one array for each column."""

    ends: array[float]
    intervals: array[float]
    columns: list[array[float]]

    def __len__(self) -> int:
        return len(self.ends)


class Sums(NamedTuple):
    """Totals of a series: core-seconds in the order of CPU_COUNTERS and of its limit; its highest limit, its points."""

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
        both = Sums._make(one + another for one, another in zip(self, other, strict=True))
        return both._replace(peak=max(self.peak, other.peak))


class Summary(NamedTuple):
    """What a report is made of. ``left_out``: tree -> operations that are not in ``sums``; ``covered_s``: seconds of
    which there are points; ``without_series``: the most operations at one moment that had no series."""

    sums: Mapping[Key, Sums]
    left_out: Mapping[str, int]
    covered_s: float
    without_series: int


def kind_number(kind: str) -> int:
    """The place of a kind in KINDS. Raises CommandError."""
    if kind not in KINDS:
        raise CommandError(f'kind "{kind}" is not known: it is one of {", ".join(KINDS)}')
    return KINDS.index(kind)
