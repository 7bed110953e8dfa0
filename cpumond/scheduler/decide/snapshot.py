"""Conversion of the living tree to the frozen snapshot of a fair-share update, and of the result back.

See semantics.md 2.5, 2.10, 4 and 9; fair_share_update.md 1. Elements that did not change are the same object in the
next snapshot: then the next update costs nearly nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, cast

from cpumond.core.words import quoted
from cpumond.fairshare import tree as fairshare
from cpumond.fairshare.folding import MIN_WEIGHT, fold_weight, infer_weight, limits_of_parent
from cpumond.fairshare.resources import (
    RESOURCES,
    UNLIMITED,
    ZERO,
    Vector,
    add,
    dominates,
    greatest,
    least,
    of_share,
    scale,
    share,
    subtract,
    sum_vectors,
)
from cpumond.fairshare.result import Elements, UpdateResult
from cpumond.scheduler.elements import Element, OperationElement, PoolElement, Tree, flow_ratio, is_integral, one_of
from cpumond.scheduler.model import DEFAULT_FIFO_SORT, ROOT_POOL, TreeSettings, to_amounts, to_vector
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER

OPERATION_PREFIX = "#"
"""Prefix of an operation's id in a snapshot; no pool's name can begin with it."""

GUARANTEE_PREFIX = "##"
"""Prefix of the pool that surrounds an operation with ``min_share_resources`` and has the operation's guarantee."""

UNLENT_PREFIX = "###"
"""Prefix of an operation that represents what a pool with a ``lending_limit`` does not lend."""
LENDING: Final = "lending_limit of other pools"
NOTHING_LOST: Final[Mapping[Element, Vector]] = MappingProxyType({})
LAST_S: Final = 1e12
"""A start time that is later than all others."""

_WAITS = fairshare.Operation("", "")
"""Takes the place of the entry of an operation that does not run and whose ``waiting`` is known."""


@dataclass(frozen=True, slots=True)
class _Inside:
    """The operations of a pool in the last snapshot. ``found``: the entries of all. ``entries``: those of the running
    ones. ``asking``: those with a guarantee. ``sums``: of usage, demand and ``waiting``."""

    found: list[fairshare.Operation | None]
    entries: list[fairshare.Operation]
    asking: list[OperationElement]
    sums: tuple[Vector, Vector, Vector]


class SnapshotMaker:
    """Makes the snapshots of one tree and keeps the inputs of the last snapshot."""

    __slots__ = ("_basis", "_guaranteed", "_sent", "_with_guarantee", "_lenders", "_inside")

    def __init__(self) -> None:
        self._basis: object = None
        self._guaranteed: dict[str, tuple[Vector, float]] = {}
        self._sent: dict[str, tuple[PoolElement, bool]] = {}
        """Pool's name -> its element in the last snapshot, and whether it had an integral guarantee."""
        self._with_guarantee: list[OperationElement] = []
        """Operations that had a guarantee in the last snapshot."""
        self._inside: dict[PoolElement, _Inside] = {}
        self._lenders: dict[PoolElement, Vector] = {}
        """Pools with a ``lending_limit`` in the last snapshot -> what they do not lend; lower pools come first."""

    def make(self, tree: Tree) -> fairshare.Snapshot:
        """Return a snapshot; set ``limits`` and ``demand`` of the tree's elements and recompute the pools' usage."""
        flat = [name for name, pool in tree.pools.items() if pool.settings.flatten]
        basis = (tree.total, tree.config.settings, tree.sizes.counts, tree.fittings.version, flat)
        if basis != self._basis:
            self._basis = basis
            _forget(tree)
        settings = tree.config.settings
        tree.root.limits = UNLIMITED
        if settings.infer_weight_from_guarantees_share_multiplier is not None:
            self._guaranteed = guaranteed_shares(tree)
        pools = tuple([self._pool_entry(pool) for pool in tree.pools.values()])
        self._sent = {name: (pool, is_integral(pool) and not pool.yields) for name, pool in tree.pools.items()}
        if flat:
            pools = tuple([entry for entry in pools if not tree.pools[entry.name].settings.flatten])
            for name in flat:
                del self._sent[name]
        operations: list[fairshare.Operation] = []
        guarantees: list[fairshare.Pool] = []
        self._with_guarantee = []
        last, self._inside = self._inside, {}
        for pool in (*tree.pools.values(), tree.root):
            inside = last.get(pool)
            # A change of an operation removes its entry; entries of FIFO pools depend on each other.
            if inside is None or inside.found != _list_entries(pool) or pool.mode == "fifo":
                inside = _look_inside(pool)
            self._inside[pool] = inside
            operations += inside.entries
            having = [element for element in inside.asking if has_guarantee(element)]
            if having:
                guarantees += _guarantee_entries(pool, having)
                self._with_guarantee += having
        for pool in reversed((tree.root, *tree.pools.values())):
            if pool.children:
                pool.usage, pool.demand, pool.waiting = _sum_up([*pool.children.values(), *pool.operations.values()])
            else:
                pool.usage, pool.demand, pool.waiting = self._inside[pool].sums
        self._lenders = {pool: _unlent(pool) for pool in reversed(tree.pools.values()) if _keeps_some(pool)}
        operations += _unlent_entries(self._lenders)
        return fairshare.Snapshot(
            total_resources=tree.total, pools=(*pools, *guarantees), operations=tuple(operations),
            options=_options(settings), root=_root_entry(settings),
        )  # fmt: skip

    def accept(self, tree: Tree, result: UpdateResult) -> None:
        """Copy shares and volumes from an update of the last snapshot to the tree (9). Elements that were added later
        have no share yet; those that were removed are skipped. A pool that had no integral guarantee then, or has none
        now, keeps its volume."""
        elements = result.elements
        assert isinstance(elements, Elements)
        for element in tree.operations.values():
            element.strong_guarantee_share = ZERO
            if not element.is_running:
                element.fair_share = element.demand_share = ZERO
        for element in self._with_guarantee:
            element.strong_guarantee_share = elements[GUARANTEE_PREFIX + element.name].strong_guarantee_share
        for name, fair_share, demand_share in elements.operation_shares():
            found = tree.operations.get(name[1:])
            if found is not None:
                found.fair_share, found.demand_share = fair_share, demand_share
        sent = {fairshare.ROOT: (tree.root, False), **self._sent}
        for name, fair_share, demand_share, strong, estimated, volume, ratio in elements.pool_shares():
            pool, was_integral = sent.get(name, (None, False))
            if pool is None or (tree.pools.get(pool.name) is not pool and pool is not tree.root):
                continue
            pool.fair_share, pool.demand_share = fair_share, demand_share
            pool.strong_guarantee_share, pool.estimated_guarantee_share = strong, estimated
            if was_integral and is_integral(pool):
                pool.volume, pool.last_integral_ratio = volume, ratio
            else:
                pool.last_integral_ratio = 0.0
        tree.lenders = {}
        for lender, unlent in self._lenders.items():
            name = UNLENT_PREFIX + lender.name
            if tree.pools.get(lender.name) is lender and name in elements:
                # A lender keeps at most its scaled-down guarantee: otherwise each pool would wait for the others.
                tree.lenders[lender] = least(unlent, of_share(lender.strong_guarantee_share, tree.total))
                kept = elements[name]
                for above in (lender, *lender.ancestors()):
                    above.fair_share = greatest(subtract(above.fair_share, kept.fair_share.total), ZERO)
                    above.demand_share = greatest(subtract(above.demand_share, kept.demand_share), ZERO)
        for pool in reversed(tree.pools.values()):
            if pool.settings.flatten:
                _add_up(pool)
        tree.errors = tuple(error.message for error in result.errors)
        tree.update_count += 1

    def _pool_entry(self, pool: PoolElement) -> fairshare.Pool:
        tree, settings, parent = pool.tree, pool.settings, pool.parent
        assert parent is not None
        limits = pool_limits(pool)
        if limits != pool.limits:
            pool.limits = limits
            for element in pool.operations.values():
                element.entry = None
        strong = {} if pool.yields else settings.strong_guarantee_resources
        entry = fairshare.Pool(
            name=pool.name,
            parent=_name(parent),
            weight=MIN_WEIGHT
            if pool.yields == "weight"
            else fold_weight(pool.name, settings.weight, self._inferred_weight(pool)) * pool.weight_factor,
            mode=settings.mode,
            resource_limits=pool.bounds,
            strong_guarantee_resources=_optional(strong) if strong else fairshare.UNSET,
            integral_guarantees=_integral_entry(pool, tree.config.settings),
        )
        if pool.entry != entry:
            if pool.entry is None or (entry.name, entry.mode) != (pool.entry.name, pool.entry.mode):
                for element in pool.operations.values():
                    element.entry = None
            pool.entry = entry
        return pool.entry

    def _inferred_weight(self, pool: PoolElement) -> float:
        multiplier = pool.tree.config.settings.infer_weight_from_guarantees_share_multiplier
        if multiplier is None or pool.parent is None:
            return 1.0
        strong, flow = self._guaranteed[pool.name]
        return infer_weight(multiplier, strong, flow, *self._guaranteed[pool.parent.sharing.name])


def _integral_entry(pool: PoolElement, of_tree: TreeSettings) -> fairshare.IntegralGuarantees:
    given = pool.settings.integral_guarantees
    distributes = given.should_distribute_free_volume_among_children
    free_volume = (
        given.can_accept_free_volume is not False,
        of_tree.should_distribute_free_volume_among_children if distributes is None else distributes,
    )
    if given.guarantee_type == "none" or pool.yields:
        # Pools without such a guarantee also pass free volume on (fair_share_update.md 5.2, 5.3).
        return _FLOWS_THROUGH[free_volume]
    multiplier = given.relaxed_share_multiplier_limit
    return fairshare.IntegralGuarantees(
        guarantee_type=given.guarantee_type,
        resource_flow=to_vector(given.resource_flow, 0.0),
        burst_guarantee_resources=to_vector(given.burst_guarantee_resources, 0.0),
        relaxed_share_multiplier_limit=(
            of_tree.integral_guarantees.relaxed_share_multiplier_limit if multiplier is None else multiplier
        ),
        can_accept_free_volume=free_volume[0],
        should_distribute_free_volume_among_children=free_volume[1],
        accumulated_volume=pool.volume,
        last_share_ratio=pool.last_integral_ratio,
    )


_FLOWS_THROUGH = {
    (accepts, distributes): fairshare.IntegralGuarantees(
        can_accept_free_volume=accepts, should_distribute_free_volume_among_children=distributes
    )
    for accepts in (False, True)
    for distributes in (False, True)
}


def _root_entry(of_tree: TreeSettings) -> fairshare.Pool:
    flags = _FLOWS_THROUGH[True, of_tree.should_distribute_free_volume_among_children]
    return fairshare.Pool(name=fairshare.ROOT, parent="", integral_guarantees=flags)


def has_guarantee(element: OperationElement) -> bool:
    """Whether ``min_share_resources`` of an operation counts in an update; in FIFO pools it does not (2.6)."""
    parent = element.parent
    return (
        bool(element.options.min_share_resources) and element.is_running and not element.yields and parent is not None
        and not parent.yields and parent.mode != "fifo"
    )  # fmt: skip


def _guarantee_entries(pool: PoolElement, having: list[OperationElement]) -> Iterator[fairshare.Pool]:
    """Yield the pools around the operations ``having`` a guarantee. Together they get at most the pool's own guarantee
    minus those of its child pools. If they request more, each gets the same fraction of its request, with one factor
    for all resources as in fair_share_update.md 6.2."""
    own = pool.settings.strong_guarantee_resources if pool.parent else to_amounts(pool.tree.total)
    requests = (element.options.min_share_resources for element in having)
    asked = [{name: amount for name, amount in each.items() if name in own} for each in requests]
    factor = 1.0
    for name, amount in own.items():
        given = sum(child.settings.strong_guarantee_resources.get(name, 0.0) for child in pool.children.values())
        left = max(amount - given, 0.0)  # guarantees of child pools may exceed that of the pool
        wanted = sum(each.get(name, 0.0) for each in asked)
        if wanted > left:
            factor = min(factor, left / wanted)
    for element, amounts in zip(having, asked, strict=True):
        fitted = {name: amount * factor for name, amount in amounts.items()}
        yield fairshare.Pool(
            name=GUARANTEE_PREFIX + element.name, parent=_name(pool), weight=operation_weight(element),
            resource_limits=element.bounds, strong_guarantee_resources=_optional(fitted) if fitted else fairshare.UNSET,
        )  # fmt: skip


def pool_limits(pool: PoolElement) -> Vector:
    """Return a pool's effective limits, by its own settings and as a share of its parent's limits (2.10)."""
    assert pool.parent is not None
    own = to_vector(pool.settings.resource_limits, math.inf) if pool.settings.resource_limits else UNLIMITED
    return limits_of_parent(pool.tree.total, own, pool.parent.limits, pool.settings.max_share_ratio)


def operation_limits(element: OperationElement) -> Vector:
    """Return an operation's effective limits in its pool (2.10)."""
    assert element.parent is not None
    own = to_vector(element.options.resource_limits, math.inf) if element.options.resource_limits else UNLIMITED
    return limits_of_parent(element.tree.total, own, element.parent.limits, element.options.max_share_ratio)


def _forget(tree: Tree) -> None:
    for pool in tree.pools.values():
        pool.entry = None
        for element in pool.operations.values():
            element.entry = None


def _unlent(pool: PoolElement) -> Vector:
    """Return what a pool does not lend: its guarantee minus its ``lending_limit`` (2.17)."""
    limit = pool.settings.lending_limit
    guarantee = to_vector({name: pool.settings.strong_guarantee_resources.get(name, 0.0) for name in limit}, 0.0)
    return greatest(subtract(guarantee, to_vector(limit, 0.0)), ZERO)


def _keeps_some(pool: PoolElement) -> bool:
    """Whether a pool keeps what it does not lend. It does not while a budget takes its guarantee or stops starts."""
    if not pool.settings.lending_limit or pool.yields:
        return False
    return not any(each.account is not None and each.account.holds_back("stop") for each in (pool, *pool.ancestors()))


def _unlent_entries(lenders: Mapping[PoolElement, Vector]) -> Iterator[fairshare.Operation]:
    """Yield one operation per lender. It demands the part that the pool neither lends nor demands, so that no other
    pool gets this as a share; in a FIFO pool it comes last."""
    inside: dict[PoolElement, Vector] = {}
    for lender, unlent in lenders.items():
        demand = greatest(subtract(unlent, add(lender.demand, inside.get(lender, ZERO))), ZERO)
        yield fairshare.Operation(UNLENT_PREFIX + lender.name, _name(lender), demand=demand, start_time=LAST_S)
        for above in lender.ancestors():
            inside[above] = add(inside.get(above, ZERO), demand)


def kept_from(element: OperationElement, lost: Mapping[Element, Vector] = NOTHING_LOST) -> dict[PoolElement, Vector]:
    """Return, for pools above an operation, what is kept from it: the resources that other pools below them do not lend
    and, after these have lost ``lost``, do not use (2.17)."""
    path, kept, lenders = set(element.ancestors()), dict[PoolElement, Vector](), element.tree.lenders
    for lender, unlent in lenders.items():  # lower pools first: pools above include their part
        if lender not in path:
            own = subtract(unlent, subtract(lender.usage, lost.get(lender, ZERO)))
            joint = next(above for above in lender.ancestors() if above in path or above in lenders)
            kept[joint] = add(kept.get(joint, ZERO), greatest(own, kept.pop(lender, ZERO)))
    return kept


def sum_kept(
    element: OperationElement, lost: Mapping[Element, Vector] = NOTHING_LOST
) -> Iterator[tuple[PoolElement, Vector]]:
    """Yield each pool above an operation, and what this pool and those below it keep from the operation."""
    kept, held = kept_from(element, lost) if element.tree.lenders else {}, ZERO
    for pool in element.ancestors():
        held = add(held, kept[pool]) if pool in kept else held
        yield pool, held


def limits_beside(element: Element, kept: Vector) -> Vector:
    """Return an element's limits minus what is kept for others there; for the root, its remaining resources."""
    if kept is ZERO or element.parent is not None:
        return element.limits if kept is ZERO else subtract(element.limits, kept)
    a, b, c, d, e = (t - k if k > 0.0 else math.inf for t, k in zip(element.tree.total, kept, strict=True))
    return (a, b, c, d, e)


def _add_up(pool: PoolElement) -> None:
    """Set the shares of a pool that was not in the update to the sums over its children (2.16)."""
    inside: list[Element] = [*pool.children.values(), *pool.operations.values()]
    pool.fair_share = sum_vectors([each.fair_share for each in inside])
    pool.demand_share = sum_vectors([each.demand_share for each in inside])
    pool.strong_guarantee_share = sum_vectors([each.strong_guarantee_share for each in inside])
    pool.estimated_guarantee_share = sum_vectors([each.estimated_guarantee_share for each in pool.children.values()])
    pool.last_integral_ratio = 0.0


def _name(pool: PoolElement) -> str:
    """Return the name of the pool whose share is divided among an element and its siblings."""
    pool = pool.sharing
    return fairshare.ROOT if pool.parent is None else pool.name


def _optional(amounts: Mapping[str, float]) -> fairshare.OptionalVector:
    a, b, c, d, e = (amounts.get(name) for name in RESOURCES)
    return (a, b, c, d, e)


def _options(settings: TreeSettings) -> fairshare.Options:
    return replace(
        fairshare.SCHEDULER_OPTIONS,
        main_resource=settings.main_resource,
        integral_pool_capacity_saturation_period_s=settings.integral_guarantees.pool_capacity_saturation_period / 1e3,
        integral_smooth_period_s=settings.integral_guarantees.smooth_period / 1e3,
        share_gang_remainders=settings.share_gang_remainders,
    )


def guaranteed_shares(tree: Tree) -> dict[str, tuple[Vector, float]]:
    """Pool -> share of its strong guarantee, and the sum of the flow ratios in its subtree (2.5, weight inference)."""
    found: dict[str, tuple[Vector, float]] = {}
    for pool in reversed((tree.root, *tree.pools.values())):
        below = [found[name] for name in pool.children]
        flow = sum(each[1] for each in below) + (flow_ratio(pool) if is_integral(pool) else 0.0)
        strong = share(to_vector(pool.settings.strong_guarantee_resources, 0.0), tree.total)
        if pool.parent is None or pool.settings.flatten:
            strong = sum_vectors([each[0] for each in below])
        found[pool.name] = (strong, flow)
    return found


def fifo_order(pool: PoolElement) -> list[OperationElement]:
    """Return the running operations of a FIFO pool in the order of service; equal ones are sorted by id (4)."""
    keys = pool.settings.fifo_sort_parameters

    def key(element: OperationElement) -> tuple[float | str, ...]:
        values: list[float | str] = []
        for name in keys:
            if name == "weight":
                values.append(-operation_weight(element))
            elif name == "start_time":
                values.append(element.operation.record.start_time)
            else:
                values.append(float(element.operation.needed_job_count))
        return (float(element.yields), *values, element.name)

    return sorted((element for element in pool.operations.values() if element.is_running), key=key)


def operation_weight(element: OperationElement) -> float:
    return MIN_WEIGHT if element.yields else fold_weight(element.name, element.options.weight)


def operation_demand(element: OperationElement) -> Vector:
    """Return usage plus the requests of jobs that have yet to start; only usage for a held operation (5.2)."""
    return add(element.usage, _wanted(element)) if element.is_running else element.usage


def _wanted(element: OperationElement) -> Vector:
    """Return the requests of jobs that have yet to start. Nothing for a held operation and, unless the tree's option
    says otherwise, for jobs that no node could hold (5.2)."""
    wanted, operation, tree = ZERO, element.operation, element.tree
    if operation.is_held or element.spent is not None:
        return wanted
    orders = operation.needed_orders
    if not tree.config.settings.count_unplaceable_jobs_in_demand:
        orders = element.sizes.leave_out_unplaceable(orders, operation.record.is_gang)
    for order, number in orders:
        wanted = add(wanted, scale(order, float(number)))
    return wanted


def _note_waiting(element: OperationElement) -> None:
    """Set the demand of an operation that does not run to 0; ``waiting`` becomes what it would demand."""
    element.demand = element.usage
    if element.entry is None:
        element.waiting, element.entry = _wanted(element), _WAITS


def _list_entries(pool: PoolElement) -> list[fairshare.Operation | None]:
    return [element.entry for element in pool.operations.values()]


def _look_inside(pool: PoolElement) -> _Inside:
    entries = _operation_entries(pool)
    elements = list(pool.operations.values())
    asking = [element for element in elements if element.options.min_share_resources]
    return _Inside(_list_entries(pool), entries, asking, _sum_up(elements))


def _sum_up(inside: Sequence[Element]) -> tuple[Vector, Vector, Vector]:
    """Return the sums of usage, demand and waiting of elements."""
    return (
        sum_vectors([each.usage for each in inside]),
        sum_vectors([each.demand for each in inside]),
        sum_vectors([each.waiting for each in inside if each.waiting is not ZERO]),
    )


def _operation_entries(pool: PoolElement) -> list[fairshare.Operation]:
    """Return entries of a pool's running operations; pending ones need nothing yet and have no entry (5.2)."""
    settings = pool.settings
    if settings.mode == "fifo":
        order = fifo_order(pool)
        # The update itself sorts by weight and start time. Any other order, also among equals, is passed to it.
        keys = {(operation_weight(element), element.operation.record.start_time) for element in order}
        ranked = settings.fifo_sort_parameters != DEFAULT_FIFO_SORT or len(keys) < len(order)
        entries = []
        for rank, element in enumerate(order):
            element.fifo_index = rank
            entries.append(_operation_entry(pool, element, rank if ranked else None))
        for element in pool.operations.values():
            if not element.is_running:
                element.fifo_index = None
                _note_waiting(element)
        return entries
    entries = []
    for element in pool.operations.values():
        if element.is_running:
            entries.append(element.entry or _operation_entry(pool, element, None))
        else:
            _note_waiting(element)
    return entries


def _operation_entry(pool: PoolElement, element: OperationElement, rank: int | None) -> fairshare.Operation:
    """``rank``: the place in a FIFO pool if the update cannot find the pool's order itself (4)."""
    if element.entry is not None and rank is None:
        return element.entry
    record = element.operation.record
    element.usage = one_of(element.usage)
    element.demand, element.waiting = one_of(operation_demand(element)), ZERO
    element.limits = operation_limits(element)
    # The update requires that demand is at least usage; a sum of floats may be one bit less.
    entry = fairshare.Operation(
        name=OPERATION_PREFIX + element.name,
        parent=GUARANTEE_PREFIX + element.name if has_guarantee(element) else _name(pool),
        weight=operation_weight(element) if rank is None else 1.0,
        demand=element.demand if dominates(element.demand, element.usage) else greatest(element.demand, element.usage),
        usage=element.usage,
        gang=record.is_gang,
        start_time=record.start_time if rank is None else float(rank),
        resource_limits=element.bounds,
    )
    if element.entry != entry:
        element.entry = entry
    return element.entry or entry


def room_left(element: OperationElement) -> tuple[Vector, PoolElement | OperationElement | None]:
    """Return what the limits on an operation's path still allow, and the nearest element whose limits are reached in
    some resource, or None (7.1)."""
    left, tightest = UNLIMITED, cast("PoolElement | OperationElement | None", None)
    kept: dict[Element, Vector] = dict(sum_kept(element)) if element.tree.lenders else {}
    each: PoolElement | OperationElement | None = element
    while each is not None:
        limits = limits_beside(each, kept.get(each, ZERO)) if kept else each.limits
        if limits is not UNLIMITED:
            room = subtract(limits, each.usage)
            if tightest is None and min(room) <= 0.0:
                tightest = each
            left = least(left, room)
        each = each.parent
    return left, tightest


def name_limit(tightest: PoolElement | OperationElement | None) -> str:
    """Return the name of the limit that ``room_left`` found; the root itself has no limits."""
    if tightest is None:
        return "resource_limits"
    return LENDING if tightest.parent is None else f"resource_limits of {element_name(tightest)}"


def element_name(element: PoolElement | OperationElement) -> str:
    """Return ``pool "x"`` or ``operation x``, for sentences."""
    if isinstance(element, PoolElement):
        return "the root" if element.name == ROOT_POOL else f'pool "{element.name}"'
    return f"operation {element.name}"


def describe_filters(element: PoolElement | OperationElement) -> str:
    """``scheduling_tag_filter "ssd" of pool "p" and "!gpu" of operation 1-2``; "" if there is no filter (2.13)."""
    path: list[PoolElement | OperationElement] = [element, *element.ancestors()]
    filters = [
        (options.scheduling_tag_filter.strip(), element_name(each))
        for each in path
        if (options := each.options if isinstance(each, OperationElement) else each.settings).scheduling_tag_filter
    ]
    told = [f"{quoted(text)} of {name}" for text, name in filters if text]
    return f"{TAG_FILTER} {' and '.join(told)}" if told else ""
