"""The tree while it is updated: pools with everything the phases fill in, operations with what never changes (1, 3)."""

from __future__ import annotations

from collections.abc import Sequence

from cpumond.fairshare.functions import Path, ShareFunction, fifo_path, gang_function, operation_function, weighted_path
from cpumond.fairshare.resources import UNLIMITED, ZERO, Vector, add, least, ratio, share, sum_vectors
from cpumond.fairshare.result import NO_SHARE, FairShare
from cpumond.fairshare.tree import Operation, Options, Pool


class OperationRecord:
    """One operation: its shares (fractions of the cluster) and its function. Never changed, so it serves many updates."""

    __slots__ = ("operation", "gang", "demand_share", "usage_share", "limits_share", "function")

    def __init__(self, operation: Operation, gang: bool, total: Vector, full: Vector) -> None:
        self.operation = operation
        self.gang = gang
        self.demand_share = share(operation.demand, total)
        self.usage_share = share(operation.usage, total)
        limits = full
        if operation.resource_limits != UNLIMITED:
            limits = share(least(operation.resource_limits, total), total)
        cap = operation.max_share_ratio
        self.limits_share = limits if cap >= 1.0 else least(limits, (cap, cap, cap, cap, cap))
        if gang:
            self.function = gang_function(self.demand_share, self.limits_share)
        else:
            self.function = operation_function(self.usage_share, self.demand_share, self.limits_share)


class PoolMemory:
    """What a pool keeps from one update to the next: results, each beside the values it was made of."""

    __slots__ = ("operations", "demand", "usage", "weights", "fifo_order", "path_of", "path", "function_of", "function")

    def __init__(self, operations: list[OperationRecord]) -> None:
        self.operations = operations
        self.demand = sum_vectors([record.operation.demand for record in operations])
        self.usage = sum_vectors([record.operation.usage for record in operations])
        self.weights = [record.operation.weight for record in operations]
        self.fifo_order: list[int] = []
        self.path_of: object = None
        self.path: Path | None = None
        self.function_of: object = None
        self.function: ShareFunction | None = None


class PoolNode:
    """One pool (or the root) during one update; the phases fill it in the order of section 2.

    Shares are fractions of the cluster, guarantees and demand absolute, volumes resource*seconds.
    """

    __slots__ = (
        "pool", "parent", "index", "end", "pools", "operations", "weights", "demand", "usage",
        "limits_share", "demand_share", "usage_share",
        "inferred_guarantee", "strong", "priority_tier", "regular_tier", "estimated", "proposed",
        "unguaranteed", "weight_sum",
        "burst_ratio", "flow_ratio", "total_burst_ratio", "total_flow_ratio",
        "volume", "last_share_ratio", "volume_overflow", "acceptable_volume", "accepted_free_volume",
        "children_volume_overflow",
        "memory", "effective_order", "path", "function", "fair_share", "promised", "operation_totals",
        "promised_totals",
    )  # fmt: skip

    def __init__(self, pool: Pool, parent: PoolNode | None) -> None:
        integral = pool.integral_guarantees
        self.pool = pool
        self.parent = parent
        self.index = 0
        self.end = 0
        self.pools: list[PoolNode] = []
        self.operations: list[OperationRecord] = []
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
        self.path: Path | None = None
        self.function: ShareFunction | None = None
        self.fair_share: FairShare = NO_SHARE
        self.promised: FairShare = NO_SHARE
        self.operation_totals: Sequence[Vector] = ()
        self.promised_totals: Sequence[Vector] = ()

    @property
    def guarantee_type(self) -> str:
        """none, burst or relaxed; none for the root."""
        return "none" if self.parent is None else self.pool.integral_guarantees.guarantee_type

    @property
    def order(self) -> list[int]:
        """Indices of a FIFO pool's operations in the order they are served (7)."""
        return self.effective_order or self.memory.fifo_order

    def children_functions(self) -> list[ShareFunction]:
        """The functions of its children, which have theirs, in the order of the path (9)."""
        if self.pool.mode == "fifo":
            return [self.operations[n].function for n in self.order]
        functions = [record.function for record in self.operations]
        if self.pools:
            return [child.function for child in self.pools if child.function is not None] + functions
        return functions

    def path_to_root(self) -> list[PoolNode]:
        """This pool and its ancestors without the root, from below."""
        nodes: list[PoolNode] = []
        node: PoolNode = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes


def make_path(node: PoolNode, functions: list[ShareFunction], options: Options, settled: bool = False) -> Path:
    """The path of a pool with children, which have ``functions`` (9.2, 9.3)."""
    if node.pool.mode == "fifo":
        return fifo_path(functions)
    return weighted_path(functions, node.weights, options.improved_fair_share_by_fit_factor, settled)


def fill_attributes(preorder: list[PoolNode], total: Vector, has_integral_guarantees: bool) -> None:
    """Fill what follows from the snapshot alone, children before parents (3)."""
    full = share(total, total)
    for node in reversed(preorder):
        pool, memory = node.pool, node.memory
        node.weights = [child.pool.weight for child in node.pools] + memory.weights
        node.demand = add(sum_vectors([child.demand for child in node.pools]), memory.demand)
        node.usage = add(sum_vectors([child.usage for child in node.pools]), memory.usage)
        node.demand_share = share(node.demand, total)
        node.usage_share = share(node.usage, total)
        limits = pool.resource_limits
        node.limits_share = full if limits == UNLIMITED else share(least(limits, total), total)
        if has_integral_guarantees:
            if node.guarantee_type != "none":
                node.burst_ratio = ratio(pool.integral_guarantees.burst_guarantee_resources, total)
                node.flow_ratio = ratio(pool.integral_guarantees.resource_flow, total)
            node.total_burst_ratio = node.burst_ratio + sum(child.total_burst_ratio for child in node.pools)
            node.total_flow_ratio = node.flow_ratio + sum(child.total_flow_ratio for child in node.pools)
        if pool.mode == "fifo" and not memory.fifo_order:
            keys = [(-record.operation.weight, record.operation.start_time) for record in node.operations]
            memory.fifo_order = sorted(range(len(keys)), key=keys.__getitem__)
