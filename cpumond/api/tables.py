"""All pools of a tree as one compact table. Pure.

Amounts are cores, shares are fractions of the tree's dominant resource, volumes are share-seconds. All are rounded to
six decimals, which are more than a page shows. This saves two thirds of the bytes of the unrounded numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from cpumond.api.figures import Amounts, View
from cpumond.api.pool_views import walk_pools
from cpumond.fairshare.resources import CPU, find_dominant
from cpumond.scheduler.elements import OperationElement, PoolElement, Tree, figures
from cpumond.scheduler.model import to_amounts

DIGITS: Final = 6

COLUMNS: Final = (
    "name", "parent", "depth", "is_ephemeral", "mode", "weight", "fair_share_ratio", "usage_ratio", "demand_ratio",
    "strong_guarantee_ratio", "starvation", "operation_count", "max_operation_count", "running_operation_count",
    "max_running_operation_count", "integral_type", "flow_ratio", "volume", "capacity", "ordered_cores", "limit_cores",
    "used_cores", "child_count", "operations_here", "waiting_cores", "held_cores",
    "demand_cores", "guarantee_cores", "fair_share_cores", "fair_share_resource", "usage_resource", "demand_resource",
    "strong_guarantee_resource",
)  # fmt: skip
"""Columns of a pool table, in the order of its rows' values."""


class PoolRows(View, frozen=True):
    """All pools of a tree as rows of ``columns``, depth first, siblings by name, the root first.

    ``parent`` of the root is null; ``weight`` null: not set; ``flow_ratio``, ``volume`` and ``capacity`` null: the pool
    is not integral. ``held_cores``: idle CPU that operations of the pool's subtree would use. ``guarantee_cores``: the
    strong guarantee plus an integral pool's flow. ``..._resource``: the resource of the ratio of that name, null for
    CPU. ``update`` counts the tree's updates, ``at`` is when the table was made; ``total`` is the tree's."""

    tree: str
    update: int
    at: float
    total: Amounts
    columns: list[str]
    rows: list[list[Any]]


class CoreSums:
    """Cores that the jobs in each pool's subtree requested, and cores that they used as last reported.

    They are added up in parts: ``add`` is called for some of a tree's operations at a time, and ``finish`` at the end,
    so that heartbeats need not wait for very many jobs. A usage that no node has reported counts as 0."""

    def __init__(self) -> None:
        self.ordered: dict[str, float] = {}
        self.used: dict[str, float] = {}

    def add(self, elements: Iterable[OperationElement]) -> None:
        """Add the jobs of some operations to these operations' own pools, but not yet to the pools above."""
        for element in elements:
            # Like ``elements.used_now``; inlined, because it runs for every job.
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
        """Add the sums of each pool to the sums of its parent; return this object."""
        for sums in (self.ordered, self.used):
            for pool in reversed(tree.pools.values()):
                if pool.name in sums and pool.parent is not None:
                    sums[pool.parent.name] = sums.get(pool.parent.name, 0.0) + sums[pool.name]
        return self


def make_pool_table(tree: Tree, cores: CoreSums, at: float) -> PoolRows:
    """Return the table of a tree's pools as of the tree's last update."""
    pools = list(walk_pools(tree.root))
    depths = {"": -1}
    for pool in pools:
        depths[pool.name] = depths["" if pool.parent is None else pool.parent.name] + 1
    by_name: dict[str, dict[str, Any]] = {"depth": depths, "ordered_cores": cores.ordered, "used_cores": cores.used}
    # Make one column at a time, because there may be thousands of pools.
    given = {name: [values.get(pool.name, 0.0) for pool in pools] for name, values in by_name.items()}
    for name, read in figures.SHARES.items():
        shares = [read(pool) for pool in pools]
        given[f"{name}_ratio"] = ratios = list(map(max, shares))
        given[f"{name}_resource"] = [
            None if each[CPU] == ratio else find_dominant(each) for each, ratio in zip(shares, ratios, strict=True)
        ]
    columns: list[list[Any]] = []
    for name, is_rounded in zip(COLUMNS, _ROUNDED, strict=True):
        values = given[name] if name in given else [_READERS[name](pool) for pool in pools]
        columns.append(_round(values) if is_rounded else values)
    rows = [list(row) for row in zip(*columns, strict=True)]
    return PoolRows(tree.name, tree.update_count, at, to_amounts(tree.total), list(COLUMNS), rows)


def _starvation(pool: PoolElement) -> str:
    return "" if pool.starvation_status == "non_starving" else pool.starvation_status


_READERS: Final = {**figures.POOL, "starvation": _starvation}
_ROUNDED: Final = [name.endswith(("_ratio", "_cores")) or name in ("volume", "capacity") for name in COLUMNS]


def _round(values: Iterable[float | None]) -> list[float | None]:
    """Return rounded values; whole numbers become integers, which are written without ".0"."""
    return [value if value is None else int(value) if value.is_integer() else round(value, DIGITS) for value in values]
