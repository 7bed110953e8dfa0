"""The live tree with its last update, from which attributes of its elements are computed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from cpumond.fairshare import tree as fairshare
from cpumond.fairshare.folding import fold_weight, infer_weight, limits_of_parent
from cpumond.fairshare.resources import UNLIMITED, ZERO, Vector, add, least, share, subtract, sum_vectors
from cpumond.fairshare.result import ElementShares, UpdateResult
from cpumond.scheduler.decide import placement
from cpumond.scheduler.decide.snapshot import (
    GUARANTEE_PREFIX,
    OPERATION_PREFIX,
    fifo_order,
    guaranteed_shares,
    has_guarantee,
    operation_weight,
)
from cpumond.scheduler.elements import Element, OperationElement, PoolElement, Tree, figures
from cpumond.scheduler.model import OperationTreeOptions, PoolSettings, to_vector

Results = Mapping[str, UpdateResult | None]
"""Tree -> result of its last update."""
LookAt = Callable[[Tree], "UpdatedTree"]
K = TypeVar("K")
V = TypeVar("V")


def _once(compute: Callable[[UpdatedTree, K], V]) -> Callable[[UpdatedTree, K], V]:
    """Decorate a method so that its value for each element is computed only once."""

    @wraps(compute)
    def find(view: UpdatedTree, element: K) -> V:
        known = view.known.setdefault(compute.__name__, {})
        if element not in known:
            known[element] = compute(view, element)
        found: V = known[element]
        return found

    return find


class UpdatedTree:
    """A tree and its last update, with values that several attributes need. Each request makes its own object."""

    def __init__(self, tree: Tree, result: UpdateResult | None) -> None:
        self.tree = tree
        self.total = tree.total
        self._elements = result.elements if result is not None else {}
        self.known: dict[str, dict[Any, Any]] = {}
        """Method -> element -> its value."""
        self._guaranteed_shares: dict[Element, Vector] = {}

    @_once
    def shares(self, element: Element) -> ElementShares | None:
        """Result of the last update for an element; None if the element was not part of it."""
        if not isinstance(element, OperationElement):
            return self._elements.get(fairshare.ROOT if element.parent is None else element.name)
        found = self._elements.get(GUARANTEE_PREFIX + element.name) if has_guarantee(element) else None
        return found or self._elements.get(OPERATION_PREFIX + element.name)

    @_once
    def limits(self, element: Element) -> Vector:
        """``set_limits``, but at most the capacity of the nodes that the element may use (2.13); infinite: no limit."""
        limits = self.set_limits(element)
        return limits if element.fitting is None else least(limits, element.fitting.total)

    @_once
    def set_limits(self, element: Element) -> Vector:
        """``resource_limits`` and ``max_share_ratio`` as set now (2.10)."""
        if element.parent is None:
            return UNLIMITED
        given = own_options(element)
        own = to_vector(given.resource_limits, float("inf"))
        return limits_of_parent(self.total, own, self.set_limits(element.parent), given.max_share_ratio)

    def limits_share(self, element: Element) -> Vector:
        """``limits`` as fractions of the tree's resources."""
        return share(least(self.limits(element), self.total), self.total)

    @_once
    def limited_demand(self, element: Element) -> Vector:
        """Absolute demand, capped by the limits; for a pool, the sum of its children's capped demands (2.5)."""
        demand = element.demand
        if isinstance(element, PoolElement):
            below: list[Element] = [*element.children.values(), *element.operations.values()]
            demand = sum_vectors([self.limited_demand(each) for each in below])
        return least(demand, least(self.limits(element), self.total))

    @_once
    def total_ratios(self, pool: PoolElement) -> tuple[float, float]:
        """``total_burst_ratio`` and ``total_resource_flow_ratio`` (5.3)."""
        burst, flow = figures.POOL["burst_ratio"](pool) or 0.0, figures.POOL["flow_ratio"](pool) or 0.0
        for child in pool.children.values():
            burst_below, flow_below = self.total_ratios(child)
            burst, flow = burst + burst_below, flow + flow_below
        return burst, flow

    def satisfaction(self, element: Element) -> float:
        """``satisfaction_ratio``; of a pool, the lowest of its running operations', or its own value if none runs."""
        found = self._least_below(element) if isinstance(element, PoolElement) else None
        return placement.satisfaction(element) if found is None else found

    @_once
    def _least_below(self, pool: PoolElement) -> float | None:
        found = [placement.satisfaction(each) for each in pool.operations.values() if each.is_running]
        below = [self._least_below(child) for child in pool.children.values()]
        return min(found + [each for each in below if each is not None], default=None)

    def weight(self, pool: PoolElement) -> float:
        """The weight in force: set, or inferred from the guarantees (2.5)."""
        multiplier = self.tree.config.settings.infer_weight_from_guarantees_share_multiplier
        if pool.settings.weight is not None or multiplier is None or pool.parent is None:
            return fold_weight(pool.name, pool.settings.weight)
        guaranteed = self._guarantees(self.tree)
        strong, flow = guaranteed.get(pool.name, (ZERO, 0.0))
        return infer_weight(multiplier, strong, flow, *guaranteed.get(pool.parent.name, (ZERO, 0.0)))

    @_once
    def _guarantees(self, tree: Tree) -> dict[str, tuple[Vector, float]]:
        return guaranteed_shares(tree)

    def guaranteed(self, element: Element) -> Vector:
        """The share that is left to the element if its siblings, and those of the pools above it, want everything.

        It is the strong guarantee, plus a part, by weight, of what the children's guarantees leave of the parent's
        share; pending operations do not count."""
        if element.parent is None:
            return share(self.total, self.total)
        if element not in self._guaranteed_shares:
            self._divide(element.parent)
        return self._guaranteed_shares.setdefault(element, ZERO)

    def _divide(self, parent: PoolElement) -> None:
        left = self.guaranteed(parent)
        if parent.mode == "fifo":
            for each in fifo_order(parent):
                self._guaranteed_shares[each] = least(left, self.limits_share(each))
                left = subtract(left, self._guaranteed_shares[each])
            return
        members: list[tuple[Element, float]] = [(child, self.weight(child)) for child in parent.children.values()]
        members += [(each, operation_weight(each)) for each in parent.operations.values() if each.is_running]
        own = []
        for element, _ in members:
            own.append(least(element.strong_guarantee_share, left))
            left = subtract(left, own[-1])
        rooms = [subtract(self.limits_share(each), strong) for (each, _), strong in zip(members, own, strict=True)]
        weights = [weight for _, weight in members]
        by_resource = [_divide_by_weight(amount, weights, [room[r] for room in rooms]) for r, amount in enumerate(left)]
        for (element, _), strong, (a, b, c, d, e) in zip(members, own, zip(*by_resource, strict=True), strict=True):
            self._guaranteed_shares[element] = add(strong, (a, b, c, d, e))

    def best_allocation(self, element: Element) -> Vector:
        """The largest share that the limits and the online nodes allow."""
        return share(least(self._online_capacity(self.tree), self.limits(element)), self.total)

    @_once
    def _online_capacity(self, tree: Tree) -> Vector:
        return sum_vectors([node.counted_capacity for node in tree.nodes.values() if node.is_online])

    def scheduling_index(self, element: OperationElement) -> int:
        """Return an operation's place in the order of service of all running operations of the tree; -1 if pending."""
        return self._order_of_service(self.tree).get(element, -1)

    @_once
    def _order_of_service(self, tree: Tree) -> dict[OperationElement, int]:
        running = sorted((each for each in tree.operations.values() if each.is_running), key=self._service_key)
        return {each: index for index, each in enumerate(running)}

    def slot_index(self, element: OperationElement) -> int:
        """Return the place of an operation among all operations of its pool, in the order of their arrival."""
        assert element.parent is not None
        return self._order_of_arrival(element.parent).get(element, -1)

    @_once
    def _order_of_arrival(self, pool: PoolElement) -> dict[OperationElement, int]:
        arrived = sorted(pool.operations.values(), key=lambda each: each.operation.record.sequence)
        return {each: index for index, each in enumerate(arrived)}

    def _service_key(self, element: OperationElement) -> tuple[tuple[float, str], ...]:
        path = [(self.satisfaction(pool), pool.name) for pool in element.ancestors()]
        return (*reversed(path[:-1]), (self.satisfaction(element), element.name))


def _divide_by_weight(amount: float, weights: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Divide ``amount`` by weight. No part exceeds its entry in ``rooms``; what it cannot take goes to other parts."""
    parts = [0.0] * len(weights)
    left = sum(weights)
    for n in sorted(range(len(weights)), key=lambda n: rooms[n] / weights[n]):
        part = weights[n] / max(left, weights[n])  # a small weight may vanish in the sum
        parts[n] = max(min(rooms[n], amount * part), 0.0)
        amount -= parts[n]
        left -= weights[n]
    return parts


def own_options(element: Element) -> PoolSettings | OperationTreeOptions:
    """The options of the element itself, as they were set."""
    assert isinstance(element, PoolElement | OperationElement)
    return element.settings if isinstance(element, PoolElement) else element.options


def look_once(results: Results) -> LookAt:
    """Return a function that makes only one UpdatedTree of each tree, so that its operations share computed values."""
    known: dict[str, UpdatedTree] = {}

    def look_at(tree: Tree) -> UpdatedTree:
        if tree.name not in known:
            known[tree.name] = UpdatedTree(tree, results.get(tree.name))
        return known[tree.name]

    return look_at
