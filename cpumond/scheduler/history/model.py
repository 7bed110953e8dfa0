"""Series, ticks, points and totals of the history, and its answers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Final, NamedTuple

import msgspec

from cpumond.scheduler.elements.account import BudgetView
from cpumond.scheduler.model import CommandError

KINDS: Final = ("pool", "node", "operation", "job")
"""Kinds of series; up to the limit, series are kept in this order."""

POOL, NODE, OPERATION, JOB = range(4)

USER, ARM, COVERED = range(4, 7)
"""Kinds of daily totals besides pools: users, the control group, jobs compared with it, and time with known data."""

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "pool": (
        "usage_ratio", "demand_ratio", "fair_share_ratio", "strong_guarantee_ratio", "guarantee_ratio", "volume",
        "capacity", "total_cores", "demand_cores", "limit_cores", "running_operations", "waiting_cores",
        "idle_cores", "held_cores",
        "used_cores", "reclaimed_cores", "ordered_cores", "throttled_cores", "late_cores",
    ),
    "node": ("capacity_cores", "ordered_cores", "limit_cores", "used_cores", "jobs"),
    "operation": (
        "usage_ratio", "demand_ratio", "fair_share_ratio", "limit_cores", "jobs",
        "used_cores", "reclaimed_cores", "ordered_cores", "throttled_cores", "late_cores",
    ),
    "job": (
        "cpu_limit_cores", "current_cpu_limit_cores", "usage_cores", "smoothed_cores", "floor_cores", "votes_sum",
        "throttled_ratio",
    ),
}  # fmt: skip
"""Kind -> columns. The last five of pools and operations are rates: differences of CPU_COUNTERS, in that order."""

WIDTHS: Final = tuple(len(COLUMNS[kind]) for kind in KINDS)

RATES: Final = 5

HAS_RATES: Final = (True, False, True, False)

LIMIT_COLUMNS: Final = (COLUMNS["pool"].index("limit_cores"), 0, COLUMNS["operation"].index("limit_cores"), 0)

NOT_KNOWN: Final = float("nan")

HOUR_S: Final = 3600.0

DAY_S: Final = 86_400.0

POINTS_S: Final = DAY_S
"""Age up to which points are kept; data older than that is only in the totals of days."""


class HistoryView(msgspec.Struct, frozen=True):
    """The points of one series, oldest first. ``period_s``: seconds between two points.

    A pool's points that are older than a day are means of a UTC day, over its known part. They have rates and limits
    only, and their ``period_s`` is a day.

    ``times``: the end of each point's interval; ``intervals``: its length in seconds. If ``times[i] - intervals[i]`` is
    after ``times[i - 1]``, the time between is unknown. ``columns``: as in COLUMNS, null for "not known"."""

    kind: str
    tree: str
    name: str
    period_s: float
    times: list[float]
    intervals: list[float]
    columns: dict[str, list[float | None]]


class NodeMap(msgspec.Struct, frozen=True):
    """Nodes at moments of the past, oldest first.

    ``times``: the moments. ``percents``: for each of them a value per node, in the order of ``nodes``: the measure
    relative to the node's capacity at that time, null where unknown. ``twice_core_hours``: CPU used twice, summed up to
    each moment: the core-hours that jobs requested beyond their nodes' capacity."""

    measure: str
    nodes: list[str]
    times: list[float]
    percents: list[list[int | None]]
    twice_core_hours: list[float]


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
    """Core-hours of a pool, an operation or a user. ``late``: the part of ``throttled`` while the limit was lowered.
    ``points``: their number. ``lost``: by preemptions (6.9), counted in the pool where they happened and in those above
    it; within the last day, only losses of operations that are still known.

    ``parent``: of pools that exist. ``title``, ``user``, ``pool``, ``state``: of operations that are still known."""

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
    """One tree. ``total``: of its root. ``pools``: all others, a parent before its children. Within the last day:
    ``operations``, largest request first, and ``left_out_operations``, how many are not listed. In older reports:
    ``users``."""

    tree: str
    total: ReportRow
    pools: list[ReportRow]
    operations: list[ReportRow]
    left_out_operations: int
    users: list[ReportRow] = []
    budgets: list[BudgetView] = []
    """Present budgets, most spent first."""


class ReportView(msgspec.Struct, frozen=True):
    """Core-hours from ``since`` to ``until``. ``covered_s`` of that time are known; the rest is unknown because the
    scheduler was down or the history does not go back that far. If ``since`` is more than a day ago, the report covers
    whole UTC days.

    ``operations_without_series``: maximum, over all moments, of the number of operations beyond the limit ([history]
    max_series). Only their pools' rows contain their amounts."""

    since: float
    until: float
    covered_s: float
    period_s: float
    trees: list[ReportTree]
    operations_without_series: int = 0


class HistoryStatus(msgspec.Struct, frozen=True):
    """Size of the history: bytes of the file, series of the last tick, series beyond the limit, oldest moment."""

    bytes: int
    max_bytes: int
    series: int
    left_out: int
    since: float | None
    write_errors: int


class Key(NamedTuple):
    """What a series or a total belongs to. ``tree`` is "" for nodes and jobs; a root's ``name`` is ``<Root>``."""

    kind: int
    tree: str
    name: str


Series = tuple[str, str]
"""A series within its kind: tree and name."""

COVERED_KEY: Final = Key(COVERED, "", "")
"""Key of the total that has the known time of a day."""


class Amounts(NamedTuple):
    """Totals of a pool, user, operation or arm. The first nine are core-seconds: the CPU_COUNTERS in their order, the
    limits, the losses by preemption, and ``extras`` (used, then requested). They are followed by the number of extra
    jobs that began, known seconds, the number of points, and the highest limit in cores."""

    used: float = 0.0
    reclaimed: float = 0.0
    ordered: float = 0.0
    throttled: float = 0.0
    late: float = 0.0
    limit: float = 0.0
    lost: float = 0.0
    extra_used: float = 0.0
    extra_ordered: float = 0.0
    extra_jobs: float = 0.0
    seconds: float = 0.0
    points: float = 0.0
    peak: float = 0.0

    def plus(self, other: Amounts) -> Amounts:
        """Return the sum of two amounts, of different times or different elements."""
        return Amounts._make(map(add, self, other))._replace(peak=max(self.peak, other.peak))


def add_up(parts: Iterable[tuple[Key, Amounts]], totals: dict[Key, Amounts]) -> None:
    for key, amounts in parts:
        before = totals.get(key)
        totals[key] = amounts if before is None else before.plus(amounts)


@dataclass(slots=True)
class Tick:
    """One moment. ``names`` and ``values`` are indexed by kind: the values of series ``names[n]`` begin at ``n`` times
    the kind's WIDTHS. ``left_out``: number of operations beyond the limit of series. ``totals``: what the tick adds to
    its day, for all elements with or without a series."""

    at: float
    interval_s: float
    names: tuple[list[Series], ...]
    values: tuple[array[float], ...]
    left_out: int = 0
    totals: dict[Key, Amounts] = field(default_factory=dict)
    packed: tuple[bytes, ...] = ()
    """The values, compressed by ``chunks.pack_values``; ``values`` is then empty."""


@dataclass(slots=True)
class Points:
    """Points of one series, oldest first: one array for each column."""

    ends: array[float]
    intervals: array[float]
    columns: list[array[float]]

    def __len__(self) -> int:
        return len(self.ends)


class PeriodTotals(NamedTuple):
    """Totals of a time. ``covered_s``: known seconds of that time. ``without_series``: maximum number of operations
    without a series at one moment. ``left_out``: tree -> number of operations not in ``totals``."""

    totals: Mapping[Key, Amounts]
    covered_s: float
    without_series: int = 0
    left_out: Mapping[str, int] = {}


def day_of(at: float) -> int:
    """Number, since 1970, of the UTC day to which an interval that ends at ``at`` belongs; at 0:00 the previous day."""
    return math.ceil(at / DAY_S) - 1


def kind_number(kind: str) -> int:
    """Return the index of a kind in KINDS. Raises CommandError."""
    if kind not in KINDS:
        raise CommandError(f'kind "{kind}" is unknown: use one of {", ".join(KINDS)}')
    return KINDS.index(kind)
