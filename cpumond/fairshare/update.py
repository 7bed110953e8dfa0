"""One fair-share update, phase by phase (fair_share_update.md 2), and the memory that makes the next update faster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Final

from cpumond.fairshare.distribution import (
    MARGIN,
    assign,
    assign_promised_shares,
    find_blocking_gangs,
    list_gangs_without,
    total_of_root,
)
from cpumond.fairshare.functions import NOTHING
from cpumond.fairshare.guarantees import adjust_guarantees, check_overcommit, estimate_guarantees, infer_guarantees
from cpumond.fairshare.integral import (
    collect_overflow,
    distribute_free_volume,
    propose_burst_shares,
    propose_relaxed_shares,
    refill,
    without_below_integral,
)
from cpumond.fairshare.nodes import PoolMemory, PoolNode, fill_attributes, first_reach, invert, make_path
from cpumond.fairshare.pool_functions import pool_function
from cpumond.fairshare.resources import (
    CPU,
    RESOURCES,
    ZERO,
    Vector,
    add,
    dominates,
    least,
    round_half_away,
    scale,
    share,
)
from cpumond.fairshare.result import (
    NESTED_PROMISED_GUARANTEES,
    PRIORITY_WITHOUT_DONOR,
    Elements,
    ElementShares,
    FairShare,
    PoolShares,
    UpdateError,
    UpdateResult,
)
from cpumond.fairshare.tree import ROOT, Operation, Options, Snapshot

MOST_ROUNDS: Final = 16
"""Maximum number of rounds that each pass over one more gang."""
NO_OPERATIONS: Final[list[Operation]] = []


def fair_share_update(snapshot: Snapshot, now: float, previous_update_time: float | None) -> UpdateResult:
    """Update a tree that ``validate`` accepts, once; times are in seconds (2). Errors in the tree's guarantees do not
    raise an exception: the result is computed in spite of them, and lists them (15). For a series of updates, a
    ``FairShareUpdater`` gives the same result faster."""
    return FairShareUpdater().update(snapshot, now, previous_update_time)


class FairShareUpdater:
    """A series of updates of a tree that changes little from one update to the next. Functions of unchanged elements
    are kept; the result is, to the last bit, the same as if all were made again. Elements are recognised by name and
    compared by value; an element that is the same object as before costs least. Not thread-safe."""

    def __init__(self) -> None:
        self._memory: dict[str, PoolMemory] = {}
        self._basis: object = None
        self._last: tuple[Snapshot, UpdateResult, list[PoolNode]] | None = None
        """The last update and its pools; None if another update of the same tree could have a different result."""

    def update(self, snapshot: Snapshot, now: float, previous_update_time: float | None) -> UpdateResult:
        total, options = snapshot.total_resources, snapshot.options
        if self._basis != (total, options):
            self._basis, self._memory, self._last = (total, options), {}, None
        if self._last is not None and self._last[0] == snapshot:
            return self._last[1]
        former, errors = self._find_former(snapshot)
        preorder = self._build(snapshot, former)
        root = preorder[0]
        burst_pools = [node for node in preorder if node.guarantee_type == "burst" and not former]
        relaxed_pools = [node for node in preorder if node.guarantee_type == "relaxed" and not former]
        if former:
            fill_attributes(preorder, total, False)
            if any(new.pools and new.weight_sum != old.weight_sum for new, old in zip(preorder, former, strict=True)):
                estimate_guarantees(preorder)
        else:
            elapsed_s = None if previous_update_time is None else _seconds_between(previous_update_time, now)
            errors = find_guarantees(preorder, burst_pools, relaxed_pools, snapshot, elapsed_s)
        if options.step_function_for_gang_operations and options.fifo_reordering:
            for node in preorder:
                reorder(node)

        nested = mark_whole(preorder, burst_pools, relaxed_pools)

        def prepare(node: PoolNode, suggestion: float) -> None:
            if nested:
                for below in reversed(preorder[node.index : node.end]):
                    if below.function is None:
                        self._make_function(below, options)
            else:
                self._prepare(node, suggestion, options)

        propose_burst_shares(burst_pools, total, options, prepare)
        propose_relaxed_shares(relaxed_pools, root, total, options, prepare)
        prepare(root, 1.0)
        assign(root, 1.0, options)
        if options.share_gang_remainders and not nested:
            self._share_remainders(preorder, options)
        assign_promised_shares(root, options)
        total_of_root(root)
        for node in preorder:
            # From here on only parents are read. Without the references to children there are no cycles, so a result
            # that is dropped is freed at once, without the garbage collector, which would stop the program.
            node.pools = []
        elements = Elements(
            partial(_places, preorder), _view_shares, partial(_shares, preorder), partial(_pool_shares, preorder)
        )
        result = UpdateResult(tuple(errors), elements)
        self._last = None if burst_pools or relaxed_pools else (snapshot, result, preorder)
        return result

    def _find_former(self, snapshot: Snapshot) -> tuple[list[PoolNode], list[UpdateError]]:
        """Return the last update's pools and errors if no pool has changed since then, otherwise two empty lists."""
        if self._last is None:
            return [], []
        last, result, nodes = self._last
        if snapshot.options.share_gang_remainders and any(node.passed for node in nodes):
            return [], []  # after gangs were passed over, the functions are not those of the whole pools
        return (nodes, list(result.errors)) if (last.pools, last.root) == (snapshot.pools, snapshot.root) else ([], [])

    def _build(self, snapshot: Snapshot, former: list[PoolNode]) -> list[PoolNode]:
        """Return the pools in pre-order, with the records of their operations; unchanged records are taken from memory
        (1). ``former``: the same pools in the last update; empty if any changed."""
        total, options = snapshot.total_resources, snapshot.options
        full = share(total, total)
        given: dict[str, list[Operation]] = defaultdict(list)
        for operation in snapshot.operations:
            given[operation.parent].append(operation)
        preorder: list[PoolNode] = []
        if former:
            for old in former:
                preorder.append(old.renew(preorder[old.parent.index] if old.parent else None))
        else:
            root = PoolNode(snapshot.root, None)
            nodes = {ROOT: root}
            for pool in snapshot.pools:
                nodes[pool.name] = PoolNode(pool, nodes[pool.parent])
            stack = [root]
            while stack:
                node = stack.pop()
                node.index = len(preorder)
                preorder.append(node)
                stack += reversed(node.pools)
        memory, self._memory = self._memory, {}
        for node in reversed(preorder):
            node.end = node.pools[-1].end if node.pools else node.index + 1
            name = node.pool.name
            operations = given.get(name if node.parent else ROOT, NO_OPERATIONS)
            gangs = options.step_function_for_gang_operations and node.pool.step_function_for_gang_operations
            kept = memory.get(name)
            if kept is None or kept.given != operations or kept.gangs is not gangs:
                kept = PoolMemory(operations, gangs, total, full, kept)
                node.is_same = False
            kept.given = operations  # so that only one of two equal lists stays in memory
            self._memory[name] = node.memory = kept
            node.operations = kept.operations
        return preorder

    def _prepare(self, top: PoolNode, suggestion: float, options: Options) -> None:
        """Give ``top`` its function up to ``suggestion``, and all pools below it theirs as far as needed (9).

        A pool's path is first made up to its ``reach``, a guess, which also determines how far its children must be
        known. If that is not enough, it is made again: first 2 times, then 8 times, then 32 times as far as the time
        before, and then in full."""
        top.need = suggestion
        stack = [top]
        while stack:
            node = stack[-1]
            if node.function is not None and node.function.horizon >= node.need:
                stack.pop()
                continue
            if node.reach == 0.0:
                node.reach = first_reach(node)
            lacking = []
            for child, factor in zip(node.pools, node.factors, strict=False):
                need = min(node.reach * factor, 1.0)
                if child.function is None or child.function.horizon < need:
                    child.need = need
                    lacking.append(child)
            if lacking:
                stack += lacking
                continue
            self._make_function(node, options)
            if node.function is None or node.function.horizon < node.need:
                node.tries += 1
                further = node.reach * 4.0**node.tries / 2.0
                node.reach = min(further, node.full_reach) if node.tries < 4 else node.full_reach

    def _share_remainders(self, preorder: list[PoolNode], options: Options) -> None:
        """Distribute the remainders that are left because steps of gangs do not fit: leave out one such gang, assign
        again, and so on (12.3). After ``MOST_ROUNDS`` rounds, leave out all gangs that get nothing at once."""
        root = preorder[0]
        if not any(record.gang for node in preorder for record in node.operations):
            return
        for left in reversed(range(MOST_ROUNDS + 1)):
            found = find_blocking_gangs(root)
            if not found:
                return
            node, last = max(
                found, key=lambda each: (not any(each[0].operations[each[1]].usage_share), each[0].index, each[1])
            )
            chosen = {node: [last]} if left else {each: list_gangs_without(each) for each in preorder}
            for pool, gangs in chosen.items():
                if gangs:
                    pool.passed |= frozenset(gangs)
                    for above in (*pool.path_to_root(), root):
                        above.function, above.reach, above.tries = None, above.full_reach if above.whole else 0.0, 0
            self._prepare(root, 1.0, options)
            assign(root, 1.0, options)

    def _make_function(self, node: PoolNode, options: Options) -> None:
        """Give a pool, whose children have their functions, its path and function. Kept ones are used again if nothing
        on which they depend has changed."""
        if not (node.pools or node.operations):
            node.function = NOTHING
            return
        memory = node.memory
        path_of: tuple[object, ...] = (node.whole, node.passed)  # ``memory`` already belongs to the pool's operations
        if node.pools or node.pool.mode == "fifo":
            path_of = (node.children_functions(), node.factors, node.pool.mode, node.whole, node.passed)
        if memory.path is None or memory.path_of != path_of or memory.path_reach < node.reach:
            path = make_path(node, node.children_functions(), options)
            memory.path_of, memory.path_reach, memory.path = path_of, node.reach, path
        guarantee = add(node.strong, node.proposed)
        function_of = (memory.path, guarantee, node.limits_share)
        if memory.function_of != function_of:
            memory.function_of = function_of
            # The root needs only B(1) and, for promised shares, B(0) (12, 13).
            asked_from = 0.0 if node.parent else 0.5
            memory.function = pool_function(memory.path, guarantee, node.limits_share, asked_from)
        node.path, node.function = memory.path, memory.function


def find_guarantees(
    preorder: list[PoolNode], burst_pools: list[PoolNode], relaxed_pools: list[PoolNode], snapshot: Snapshot,
    elapsed_s: float | None,
) -> list[UpdateError]:  # fmt: skip
    """Set attributes, volumes and guarantees of pools (3 to 6); return errors. ``elapsed_s``: since the last update."""
    total, options = snapshot.total_resources, snapshot.options
    errors, priority_pools = check_flags(preorder)
    infer_guarantees(preorder, total, options.main_resource)
    integral = burst_pools + relaxed_pools
    fill_attributes(preorder, total, bool(integral))
    if integral:
        if elapsed_s is not None and any(total):
            refill(integral, total, elapsed_s, options.integral_pool_capacity_saturation_period_s)
        nodes = without_below_integral(preorder)
        collect_overflow(nodes)
        distribute_free_volume(nodes)
    errors += check_overcommit(preorder[0], burst_pools, total)
    adjust_guarantees(preorder, priority_pools)
    estimate_guarantees(preorder)
    return errors


def mark_whole(preorder: list[PoolNode], burst_pools: list[PoolNode], relaxed_pools: list[PoolNode]) -> bool:
    """Mark the pools whose functions are made in full from the beginning; return whether integral pools are nested. If
    so, mark all pools, because functions are then kept although their inputs change (11.1). Otherwise mark relaxed
    pools and all below them, because their shares are compared with free resources to the last bit (11)."""
    nested = any(
        above.guarantee_type != "none" for node in burst_pools + relaxed_pools for above in node.path_to_root()[1:]
    )
    for node in preorder if nested else [below for top in relaxed_pools for below in preorder[top.index : top.end]]:
        node.whole = True
        node.reach = node.full_reach
    return nested


def check_flags(preorder: list[PoolNode]) -> tuple[list[UpdateError], set[PoolNode]]:
    """Return errors (nested promised-share pools, priority pools without a donor), and priority pools with one (15)."""
    errors = []
    promised = {node for node in preorder if node.pool.compute_promised_guarantee_fair_share}
    above: set[PoolNode] = set()
    for node in preorder:
        if node.parent is not None and (node.parent in promised or node.parent in above):
            above.add(node)
    if promised & above:
        text = "a pool with compute_promised_guarantee_fair_share is inside another"
        errors.append(UpdateError(NESTED_PROMISED_GUARANTEES, text))
    priority_pools: set[PoolNode] = set()
    with_donor: set[PoolNode] = set()
    alone: list[str] = []
    for node in preorder:
        pool = node.pool
        if pool.priority_strong_guarantee_adjustment:
            if node in with_donor:
                priority_pools.add(node)
            else:
                alone.append(pool.name)
        if pool.priority_strong_guarantee_adjustment_donorship or (
            node in with_donor and not pool.priority_strong_guarantee_adjustment
        ):
            with_donor.update(node.pools)
    if alone:
        text = f"pool {alone[0]!r} has priority_strong_guarantee_adjustment but no donor above it "
        text += "(priority_strong_guarantee_adjustment_donorship)"
        errors.append(UpdateError(PRIORITY_WITHOUT_DONOR, text))
    return errors, priority_pools


def reorder(node: PoolNode) -> None:
    """In a FIFO pool, serve operations that fit its guarantee before gangs that do not fit (7)."""
    pool = node.pool
    if pool.mode != "fifo" or not pool.step_function_for_gang_operations or not pool.fifo_reordering:
        return
    if dominates(MARGIN, node.strong):
        return
    accepted: list[int] = []
    deferred: list[int] = []
    bound = add(node.strong, MARGIN)
    taken = ZERO
    stopped = False
    for n in node.memory.fifo_order:
        record = node.operations[n]
        wants = least(record.demand_share, record.limits_share)
        if record.gang and not dominates(record.limits_share, record.demand_share):
            wants = ZERO
        fits = dominates(bound, add(taken, wants))
        if stopped or (record.gang and not fits and not any(record.operation.usage)):
            deferred.append(n)
        else:
            accepted.append(n)
            taken = add(taken, wants)
            stopped = not record.gang and not fits
    if deferred and accepted + deferred != node.memory.fifo_order:
        node.effective_order = accepted + deferred
        node.effective_index = invert(node.effective_order)


def _seconds_between(before: float, now: float) -> float:
    """Return the seconds from ``before`` to ``now``, at least 0, after rounding both to microseconds (17)."""
    return max(round_half_away(now * 1e6) - round_half_away(before * 1e6), 0.0) / 1e6


def _places(preorder: list[PoolNode]) -> dict[str, tuple[PoolNode, int]]:
    """Return name -> place of the element: its pool and its index there; a pool is at index -1 of itself."""
    places = {node.pool.name: (node, -1) for node in preorder}
    for node in preorder:
        for n, record in enumerate(node.operations):
            places[record.operation.name] = (node, n)
    return places


def _shares(preorder: list[PoolNode]) -> Iterator[tuple[str, Vector, Vector]]:
    """Yield name, fair share and demand share of each operation."""
    for node in preorder:
        for record, total in zip(node.operations, node.operation_totals, strict=True):
            yield record.operation.name, total, record.demand_share


def _pool_shares(preorder: list[PoolNode]) -> Iterator[PoolShares]:
    for node in preorder:
        yield (
            node.pool.name, node.fair_share.total, node.demand_share, node.strong, node.estimated, node.volume,
            node.last_share_ratio,
        )  # fmt: skip


def _view_shares(node: PoolNode, n: int) -> ElementShares:
    """Return the shares of operation ``n`` of a pool; for -1, those of the pool itself."""
    if n < 0:
        return ElementShares(
            kind="pool" if node.parent else "root", fair_share=node.fair_share,
            promised_guarantee_fair_share=node.promised, demand_share=node.demand_share, usage_share=node.usage_share,
            limits_share=node.limits_share, strong_guarantee_share=node.strong,
            strong_guarantee_share_priority_tier=node.priority_tier,
            strong_guarantee_share_regular_tier=node.regular_tier, proposed_integral_share=node.proposed,
            estimated_guarantee_share=node.estimated, inferred_strong_guarantee_resources=node.inferred_guarantee,
            dominant_resource=dominant_resource(node.usage_share if any(node.usage) else node.demand_share),
            burst_ratio=node.burst_ratio, total_burst_ratio=node.total_burst_ratio, resource_flow_ratio=node.flow_ratio,
            total_resource_flow_ratio=node.total_flow_ratio, last_share_ratio=node.last_share_ratio,
            accumulated_volume=node.volume, volume_overflow=node.volume_overflow,
            acceptable_volume=node.acceptable_volume, accepted_free_volume=node.accepted_free_volume,
            children_volume_overflow=node.children_volume_overflow,
        )  # fmt: skip
    record = node.operations[n]
    total = node.operation_totals[n]
    promised = node.promised_totals[n] if node.promised_totals else ZERO
    fifo = node.pool.mode == "fifo"
    return ElementShares(
        kind="operation", fair_share=FairShare(total=total, weight_proportional=total),
        promised_guarantee_fair_share=FairShare(total=promised, weight_proportional=promised),
        demand_share=record.demand_share, usage_share=record.usage_share, limits_share=record.limits_share,
        strong_guarantee_share=ZERO, strong_guarantee_share_priority_tier=ZERO,
        strong_guarantee_share_regular_tier=ZERO, proposed_integral_share=ZERO,
        estimated_guarantee_share=scale(node.unguaranteed, record.operation.weight / node.weight_sum),
        inferred_strong_guarantee_resources=ZERO,
        dominant_resource=dominant_resource(record.usage_share if any(record.operation.usage) else record.demand_share),
        fifo_index=node.memory.fifo_index[n] if fifo else None,
        effective_fifo_index=node.effective_index[n] if node.effective_index else None,
    )  # fmt: skip


def dominant_resource(shares: Vector) -> str:
    """Return the resource of which the largest part of the cluster is used or demanded; cpu if nothing is (3)."""
    most = max(shares)
    return RESOURCES[shares.index(most) if most > 0.0 else CPU]
