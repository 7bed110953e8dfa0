"""The tree during an update: pools with the results of all phases, operations with their constant values (1, 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from cpumond.fairshare.functions import NOTHING, ShareFunction, gang_function, operation_function
from cpumond.fairshare.paths import Path, fifo_path, settle, weighted_path
from cpumond.fairshare.resources import (
    EPS,
    UNLIMITED,
    ZERO,
    Vector,
    add,
    greatest,
    least,
    ratio,
    scale,
    share,
    subtract,
    sum_in_order,
    sum_vectors,
)
from cpumond.fairshare.result import NO_SHARE, FairShare
from cpumond.fairshare.tree import Operation, Options, Pool

MARGIN_OF_REACH: Final = 1.04
MARGIN_OF_GUESS: Final = 1.15
LEAST_GUESS: Final = 2.0**-20

SETTLED: Final = 128
"""Maximum number of vertices of a path to which ``settle`` is applied."""


_NOBODY: Final[frozenset[int]] = frozenset()

# Operations often have the same demand and usage, so they share one copy of the result.
_share: Final = lru_cache(maxsize=1024)(share)
_operation_function: Final = lru_cache(maxsize=1024)(operation_function)


class OperationNode:
    """One operation: its shares (fractions of the cluster) and its function; can be used for many updates."""

    __slots__ = ("operation", "gang", "demand_share", "usage_share", "limits_share", "_function")

    def __init__(self, operation: Operation, gang: bool, total: Vector, full: Vector) -> None:
        self.operation = operation
        self.gang = gang
        self.demand_share = _share(operation.demand, total)
        self.usage_share = _share(operation.usage, total)
        limits = full
        if operation.resource_limits != UNLIMITED:
            limits = share(least(operation.resource_limits, total), total)
        cap = operation.max_share_ratio
        self.limits_share = limits if cap >= 1.0 else least(limits, (cap, cap, cap, cap, cap))
        self._function: ShareFunction | None = None

    @property
    def function(self) -> ShareFunction:
        """``B`` of the operation, made when first needed (9.1)."""
        if self._function is None:
            if self.gang:
                self._function = gang_function(self.demand_share, self.limits_share)
            else:
                self._function = _operation_function(self.usage_share, self.demand_share, self.limits_share)
        return self._function


class PoolMemory:
    """Results that a pool keeps for the next update, each with the values from which it was made."""

    __slots__ = (
        "given", "gangs", "operations", "demand", "usage", "weights", "factors", "fifo_order", "fifo_index",
        "path_of", "path", "path_reach", "function_of", "function", "used_reach",
    )  # fmt: skip

    def __init__(
        self, given: list[Operation], gangs: bool, total: Vector, full: Vector, last: PoolMemory | None
    ) -> None:
        """``gangs``: whether gangs of this pool have step functions. ``full``: the whole cluster as a share. ``last``:
        the memory of the same pool when it had different operations."""
        self.given = given
        self.gangs = gangs
        records = {record.operation.name: record for record in last.operations} if last else {}
        self.operations: list[OperationNode] = []
        for operation in given:
            gang = operation.gang and gangs
            record = records.get(operation.name)
            if (
                record is None
                or (record.operation is not operation and record.operation != operation)
                or record.gang is not gang
            ):
                record = OperationNode(operation, gang, total, full)
            self.operations.append(record)
        operations = self.operations
        self.demand = sum_vectors([record.operation.demand for record in operations])
        self.usage = sum_vectors([record.operation.usage for record in operations])
        self.weights = [record.operation.weight for record in operations]
        self.factors = divide_by_least(self.weights)
        self.fifo_order: list[int] = []
        self.fifo_index: list[int] = []
        self.path_of: object = None
        self.path: Path | None = None
        self.path_reach = 0.0
        self.used_reach: float = last.used_reach if last else 0.0
        self.function_of: object = None
        self.function: ShareFunction | None = last.function if last else None


class PoolNode:
    """One pool (or the root) during one update; the phases fill it in the order of section 2.

    Shares are fractions of the cluster, guarantees and demand absolute, volumes resource*seconds. ``function`` must be
    known up to the suggestion ``need``. ``path`` ends at the fit factor ``reach``, which did not suffice ``tries``
    times. ``whole``: both are made in full. ``passed``: gangs that get nothing. ``end``: in pre-order, the ``index``
    after the last pool below this one. ``is_same``: all in and below the pool is as in the last update."""

    __slots__ = (
        "pool", "parent", "index", "end", "pools", "operations", "weights", "demand", "usage",
        "limits_share", "demand_share", "usage_share",
        "inferred_guarantee", "strong", "priority_tier", "regular_tier", "estimated", "proposed",
        "unguaranteed", "weight_sum",
        "burst_ratio", "flow_ratio", "total_burst_ratio", "total_flow_ratio",
        "volume", "last_share_ratio", "volume_overflow", "acceptable_volume", "accepted_free_volume",
        "children_volume_overflow", "memory", "effective_order", "effective_index",
        "is_same", "whole", "passed", "factors", "need", "reach", "tries", "path", "function",
        "fair_share", "promised", "operation_totals", "promised_totals",
    )  # fmt: skip

    def __init__(self, pool: Pool, parent: PoolNode | None) -> None:
        integral = pool.integral_guarantees
        self.pool = pool
        self.parent = parent
        self.index = self.end = 0
        self.pools: list[PoolNode] = []
        if parent is not None:
            parent.pools.append(self)
        self.operations: list[OperationNode] = []
        self.weights: list[float] = []
        self.demand = self.usage = ZERO
        self.limits_share = self.demand_share = self.usage_share = ZERO
        self.inferred_guarantee = self.strong = self.priority_tier = self.regular_tier = ZERO
        self.estimated = self.proposed = self.unguaranteed = ZERO
        self.weight_sum = 0.0
        self.burst_ratio = self.flow_ratio = self.total_burst_ratio = self.total_flow_ratio = 0.0
        self.volume = integral.accumulated_volume
        self.last_share_ratio = integral.last_share_ratio
        self.volume_overflow = self.acceptable_volume = self.accepted_free_volume = ZERO
        self.children_volume_overflow = ZERO
        self.memory: PoolMemory
        self.effective_order: list[int] = []
        self.effective_index: list[int] = []
        self.factors: list[float] = []
        self.is_same = self.whole = False
        self.passed = _NOBODY
        self.need = self.reach = 0.0
        self.tries = 0
        self.path: Path | None = None
        self.function: ShareFunction | None = None
        self.fair_share: FairShare = NO_SHARE
        self.promised: FairShare = NO_SHARE
        self.operation_totals: Sequence[Vector] = ()
        self.promised_totals: Sequence[Vector] = ()

    def renew(self, parent: PoolNode | None) -> PoolNode:
        """Return a pool that is unchanged, itself and all below it, for the next update; it keeps its memory."""
        new = PoolNode(self.pool, parent)
        new.is_same = True
        new.index = self.index
        new.weights, new.factors, new.weight_sum = self.weights, self.factors, self.weight_sum
        new.demand, new.usage = self.demand, self.usage
        new.limits_share, new.demand_share, new.usage_share = self.limits_share, self.demand_share, self.usage_share
        new.inferred_guarantee, new.strong = self.inferred_guarantee, self.strong
        new.priority_tier, new.regular_tier = self.priority_tier, self.regular_tier
        new.estimated, new.unguaranteed = self.estimated, self.unguaranteed
        new.path, new.function = self.path, self.function
        return new

    @property
    def guarantee_type(self) -> str:
        """The pool's type: none, burst or relaxed; for the root, none."""
        return "none" if self.parent is None else self.pool.integral_guarantees.guarantee_type

    @property
    def full_reach(self) -> float:
        """The fit factor at which the pool's path is complete (9.2, 9.3)."""
        return float(len(self.operations)) if self.pool.mode == "fifo" else 1.0

    @property
    def order(self) -> list[int]:
        """Indices of a FIFO pool's operations, in the order in which the pool serves them (7)."""
        return self.effective_order or self.memory.fifo_order

    def children_functions(self) -> list[ShareFunction]:
        """Return the functions of the pool's children, known as far as its reach, in the order of the path (9)."""
        if self.pool.mode == "fifo":
            reached, passed = self.order[: math.ceil(self.reach)], self.passed
            return [NOTHING if n in passed else self.operations[n].function for n in reached]
        functions = [record.function for record in self.operations]
        for n in self.passed:
            functions[n] = NOTHING
        if self.pools:
            return [child.function for child in self.pools if child.function is not None] + functions
        return functions

    def path_to_root(self) -> list[PoolNode]:
        """Return this pool and its ancestors, from the pool upwards, without the root."""
        nodes: list[PoolNode] = []
        node: PoolNode = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes


def make_path(node: PoolNode, functions: list[ShareFunction], options: Options) -> Path:
    """Return the path of a pool whose children's ``functions`` are known as far as the pool's reach (9.2, 9.3)."""
    if node.pool.mode == "fifo":
        return fifo_path(functions, len(functions) == len(node.operations))
    path = weighted_path(functions, node.factors, node.reach, options.improved_fair_share_by_fit_factor)
    if node.whole and len(path.xs) <= SETTLED:
        settle(path)
    return path


def first_reach(node: PoolNode) -> float:
    """Return the fit factor up to which a pool's path is first made (9): a little more than the last update needed.
    This guess does not affect the result. For the root, which needs B(1), its last position is the best guess."""
    last = node.memory.function
    reach = 0.0
    if node.parent is None:
        reach = node.memory.used_reach * MARGIN_OF_REACH
    elif last is not None and last.horizon >= node.need:
        reach = last.position_at(last.segment_at(node.need), node.need)[0] * MARGIN_OF_REACH
    if node.whole:
        reach = node.full_reach
    return min(reach, node.full_reach) or guess_reach(node)


def guess_reach(node: PoolNode) -> float:
    """Return a fit factor that probably suffices for the suggestion ``node.need``. The guess is that each child, beyond
    its guarantee, grows in a straight line to its demand. A factor that is too high costs time, a factor that is too
    low costs a second try; neither affects the result."""
    taken = [least(child.strong, child.demand_share) for child in node.pools]
    pairs = zip(node.pools, taken, strict=True)
    wanted = [subtract(least(child.demand_share, child.limits_share), guaranteed) for child, guaranteed in pairs]
    wanted += [record.demand_share for record in node.operations]
    value = sum_vectors(taken)
    guaranteed = greatest(add(node.strong, node.proposed), value)
    need = node.need
    bound = least(node.limits_share, add(guaranteed, (need, need, need, need, need)))
    left = subtract(bound, value)
    if node.pool.mode == "fifo":
        for n, place in enumerate(node.order):
            left = subtract(left, wanted[place])
            if min(left) < 0.0:
                return n + 1.0
        return node.full_reach
    a, b, c, d, e = left
    ends = [max(vector) / factor for vector, factor in zip(wanted, node.factors, strict=True)]
    rates = [scale(vector, 1.0 / end) if end > 0.0 else ZERO for vector, end in zip(wanted, ends, strict=True)]
    f, g, h, i, j = sum_vectors(rates)
    x = 0.0
    for n in sorted(range(len(ends)), key=ends.__getitem__):
        dx = ends[n] - x
        if f * dx > a or g * dx > b or h * dx > c or i * dx > d or j * dx > e:
            steps = zip((a, b, c, d, e), (f, g, h, i, j), strict=True)
            guess = (x + min(room / rate for room, rate in steps if rate > 0.0)) * MARGIN_OF_GUESS
            return max(LEAST_GUESS, min(guess, 1.0))
        a, b, c, d, e = a - f * dx, b - g * dx, c - h * dx, d - i * dx, e - j * dx
        k, m, o, p, q = rates[n]
        f, g, h, i, j = f - k, g - m, h - o, i - p, j - q
        x = ends[n]
    return 1.0


def fill_attributes(preorder: list[PoolNode], total: Vector, has_integral_guarantees: bool) -> None:
    """Set values that follow from the snapshot alone, for children before parents (3). Skips unchanged pools."""
    full = share(total, total)
    for node in reversed(preorder):
        if node.is_same:
            continue
        pool, memory = node.pool, node.memory
        node.path = node.function = None
        if node.parent is not None:
            node.parent.is_same = False
        if node.pools:
            node.weights = [child.pool.weight for child in node.pools] + memory.weights
            node.factors = divide_by_least(node.weights)
            node.demand = sum_vectors([*(child.demand for child in node.pools), memory.demand])
            node.usage = sum_vectors([*(child.usage for child in node.pools), memory.usage])
        else:
            node.weights, node.factors = memory.weights, memory.factors
            node.demand, node.usage = memory.demand, memory.usage
        node.weight_sum = sum_in_order(node.weights)
        node.demand_share = share(node.demand, total)
        node.usage_share = share(node.usage, total)
        limits = pool.resource_limits
        node.limits_share = full if limits == UNLIMITED else share(least(limits, total), total)
        if has_integral_guarantees:
            if node.guarantee_type != "none":
                node.burst_ratio = ratio(pool.integral_guarantees.burst_guarantee_resources, total)
                node.flow_ratio = ratio(pool.integral_guarantees.resource_flow, total)
            node.total_burst_ratio = node.burst_ratio + sum_in_order(child.total_burst_ratio for child in node.pools)
            node.total_flow_ratio = node.flow_ratio + sum_in_order(child.total_flow_ratio for child in node.pools)
        if pool.mode == "fifo" and not memory.fifo_order:
            keys = [(-record.operation.weight, record.operation.start_time) for record in node.operations]
            memory.fifo_order = sorted(range(len(keys)), key=keys.__getitem__)
            memory.fifo_index = invert(memory.fifo_order)


def divide_by_least(weights: list[float]) -> list[float]:
    """Return the weights divided by the smallest one above EPS: each child's suggestion per fit factor (9.2)."""
    least_weight = min((weight for weight in weights if weight > EPS), default=1.0)
    return [weight / least_weight for weight in weights]


def invert(order: list[int]) -> list[int]:
    places = [0] * len(order)
    for place, n in enumerate(order):
        places[n] = place
    return places
