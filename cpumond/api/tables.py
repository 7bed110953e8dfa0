"""All pools of a tree as one compact table. Pure.

Amounts are cores, shares fractions of the tree's dominant resource, volumes share-seconds; rounded to six
decimals, which is more than a page shows and a third of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from cpumond.api.figures import Amounts, View
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.elements import (
    OperationElement,
    PoolElement,
    Tree,
    flow_ratio,
    is_integral,
    volume_capacity,
    volume_ratio,
)
from cpumond.scheduler.model import to_amounts

DIGITS: Final = 6

COLUMNS: Final = (
    "name", "parent", "depth", "is_ephemeral", "mode", "weight", "fair_share_ratio", "usage_ratio", "demand_ratio",
    "strong_guarantee_ratio", "starvation", "operation_count", "max_operation_count", "running_operation_count",
    "max_running_operation_count", "integral_type", "flow_ratio", "volume", "capacity", "ordered_cores", "limit_cores",
    "used_cores", "child_count", "operations_here", "waiting_cores", "held_cores",
    "demand_cores", "guarantee_cores", "fair_share_cores",
)  # fmt: skip
"""Of a pool table, in the order of its rows' values."""


class PoolTable(View, frozen=True):
    """All pools of a tree as rows of ``columns``, depth first, siblings by name, the root first.

    ``parent`` of the root is null; ``weight`` null: not set; ``flow_ratio``, ``volume`` and ``capacity`` null: not an
    integral pool. ``held_cores``: idle CPU that operations of the pool's subtree would use. ``guarantee_cores``: the
    strong guarantee and the flow of an integral one. ``update`` counts the tree's updates, ``at`` is when the table was
    made; ``total`` is the tree's.
    """

    tree: str
    update: int
    at: float
    total: Amounts
    columns: list[str]
    rows: list[list[Any]]


class CoreSums:
    """Cores that the jobs of each pool's subtree ordered, and that they used in their last check.

    Added up in parts, ``add`` for some of a tree's operations at a time and ``finish`` at the end: there may be very
    many jobs, and heartbeats must not wait for all of them. What a node has not said of a job's usage counts as 0.
    """

    def __init__(self) -> None:
        self.ordered: dict[str, float] = {}
        self.used: dict[str, float] = {}

    def add(self, elements: Iterable[OperationElement]) -> None:
        """The jobs of some operations, to their pools alone."""
        for element in elements:
            # As ``elements.used_now``; written out, since this is done for every job.
            ordered = used = 0.0
            for job in element.jobs.values():
                ordered += job.limits[1]
                report = job.report
                usage = report.cpu_usage
                if usage is None:
                    usage = report.smoothed_cpu_usage
                if usage is not None:
                    used += usage
            pool = element.parent
            if ordered and pool is not None:
                self.ordered[pool.name] = self.ordered.get(pool.name, 0.0) + ordered
                self.used[pool.name] = self.used.get(pool.name, 0.0) + used

    def finish(self, tree: Tree) -> CoreSums:
        """Add the sums of each pool to its parent's; returns itself."""
        for sums in (self.ordered, self.used):
            for pool in reversed(tree.pools.values()):
                if pool.name in sums and pool.parent is not None:
                    sums[pool.parent.name] = sums.get(pool.parent.name, 0.0) + sums[pool.name]
        return self


def make_pool_table(tree: Tree, cores: CoreSums, at: float) -> PoolTable:
    """The table of a tree's pools as of its last update."""
    a, b, c, d, e = (1.0 / amount if amount else 0.0 for amount in tree.total)
    rows: list[list[Any]] = []
    stack: list[tuple[PoolElement, int]] = [(tree.root, 0)]
    while stack:
        pool, depth = stack.pop()
        below = sorted(pool.children)
        below.reverse()
        stack += [(pool.children[name], depth + 1) for name in below]
        slots, cpu, gpu, memory, network = pool.usage
        usage_ratio = max(slots * a, cpu * b, gpu * c, memory * d, network * e)
        rows.append(_row(pool, depth, usage_ratio, cores.ordered.get(pool.name, 0.0), cores.used.get(pool.name, 0.0)))
    return PoolTable(tree.name, tree.update_count, at, to_amounts(tree.total), list(COLUMNS), rows)


def _row(pool: PoolElement, depth: int, usage_ratio: float, ordered_cores: float, used_cores: float) -> list[Any]:
    """The values of COLUMNS."""
    integral_type = pool.settings.integral_guarantees.guarantee_type
    flow = volume = capacity = None
    if integral_type != "none":
        flow, volume, capacity = _short(flow_ratio(pool)), _short(volume_ratio(pool)), _short(volume_capacity(pool))
    return [
        pool.name,
        None if pool.parent is None else pool.parent.name,
        depth,
        pool.is_ephemeral,
        pool.settings.mode,
        pool.settings.weight,
        _short(max(pool.fair_share)),
        _short(usage_ratio),
        _short(max(pool.demand_share)),
        _short(max(pool.strong_guarantee_share)),
        "" if pool.starvation_status == "non_starving" else pool.starvation_status,
        pool.operation_count,
        pool.max_operation_count,
        pool.running_operation_count,
        pool.max_running_operation_count,
        integral_type,
        flow,
        volume,
        capacity,
        _short(ordered_cores),
        _short(pool.usage[1]),
        _short(used_cores),
        len(pool.children),
        len(pool.operations),
        _short(pool.waiting[1]),
        _short(pool.held_cores),
        _short(pool.demand[CPU]),
        _short(_guarantee_cores(pool)),
        _short(pool.fair_share[CPU] * pool.tree.total[CPU]),
    ]


def _guarantee_cores(pool: PoolElement) -> float:
    flow = pool.settings.integral_guarantees.resource_flow.get("cpu", 0.0) if is_integral(pool) else 0.0
    return pool.strong_guarantee_share[CPU] * pool.tree.total[CPU] + flow


def _short(value: float) -> float | int:
    """Rounded, and without the ".0" of a whole number."""
    whole = int(value)
    return whole if whole == value else round(value, DIGITS)
