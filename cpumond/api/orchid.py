"""The dynamic attributes of trees, pools and operations, as ``//sys/scheduler/orchid`` shows them (semantics.md 5).

Pure: from the scheduler's state and the results of its last updates to plain values without infinity and NaN. Nothing
is computed before it is asked for: a ``Lazy`` map makes one value at a time. One is made for every request; where the
state changes while a large one is being read, what it gives is of different moments.

Shares and ratios are fractions of the tree's resources, volumes resource*seconds or share*seconds, periods have the
documents' milliseconds, times are ISO 8601.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

from cpumond.fairshare import tree as fairshare
from cpumond.fairshare.folding import fold_weight, infer_weight, limits_of_parent
from cpumond.fairshare.resources import (
    RESOURCES,
    UNLIMITED,
    ZERO,
    Vector,
    add,
    greatest,
    least,
    positive_part,
    ratio,
    scale,
    share,
    subtract,
    sum_vectors,
)
from cpumond.fairshare.result import ElementShares, FairShare, UpdateResult
from cpumond.fairshare.validate import nearest
from cpumond.scheduler import admission, operations, placement, preemption, resulting
from cpumond.scheduler.attributes import ALIASES
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    Job,
    Node,
    Operation,
    OperationElement,
    PoolElement,
    PreemptionRules,
    Tree,
    usage_share,
)
from cpumond.scheduler.model import (
    ROOT_POOL,
    SUBPOOL_DELIMITER,
    JobRecord,
    OperationRecord,
    OperationTreeOptions,
    PoolSettings,
    Resources,
    to_vector,
)
from cpumond.scheduler.snapshot import (
    GUARANTEE_PREFIX,
    OPERATION_PREFIX,
    fifo_order,
    guaranteed_shares,
    has_guarantee,
    operation_weight,
)
from cpumond.scheduler.state import State

MAX_SATISFACTION: Final = 1e9
"""Shown for an element without a fair share, whose satisfaction is infinite (7.2)."""
SHOWN_PREEMPTIONS: Final = 1000

MISSING: Final[Any] = object()
"""What a map has not."""

Results = Mapping[str, UpdateResult | None]
"""Tree -> result of its last update."""
E = TypeVar("E", bound=Element)


class Lazy(Mapping[str, Any]):
    """A map whose values are made when they are asked for; they may be ``Lazy`` again."""

    __slots__ = ("_names", "_find", "_explain", "hidden")

    def __init__(
        self,
        names: Callable[[], Iterable[str]],
        find: Callable[[str], Any],
        explain: Callable[[str], str] | None = None,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        """``find`` gives MISSING for what is not there, ``names`` may hold more; ``explain`` says so in a sentence.

        ``hidden`` are too large to be shown with the rest: None stands for them.
        """
        self._names = names
        self._find = find
        self._explain = explain
        self.hidden = hidden

    def __getitem__(self, name: str) -> Any:
        value = self._find(name)
        if value is MISSING:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names() if self._find(name) is not MISSING)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def parts(self) -> Iterator[tuple[str, Any]]:
        """What is shown of it, one by one: names as they are at the start, values as they are when it is their turn."""
        for name in list(self._names()):
            value = None if name in self.hidden else self._find(name)
            if value is not MISSING:
                yield name, value

    def to_dict(self) -> dict[str, Any]:
        """Everything that is shown of it, as plain values."""
        return {name: materialise(value) for name, value in self.parts()}

    def explain(self, name: str) -> str:
        """Why there is no ``name``, with the nearest one that there is."""
        near = nearest(name, self)
        hint = f'; did you mean "{near}"?' if near else ""
        return (self._explain(name) if self._explain is not None else f'there is no "{name}"') + hint


def materialise(value: Any) -> Any:
    """A value with everything that is lazy in it made."""
    return value.to_dict() if isinstance(value, Lazy) else value


class Table(Lazy):
    """A map whose names are all there: they are told without making a value."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names()))


class Description(Lazy):
    """Attributes of one thing, which are shown as of one moment."""

    __slots__ = ()


def fixed(parts: Mapping[str, Callable[[], Any]], hidden: frozenset[str] = frozenset()) -> Lazy:
    """A map of these parts, each made when it is asked for."""
    return Lazy(lambda: parts, lambda name: parts[name]() if name in parts else MISSING, hidden=hidden)


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ``2026-11-20T23:23:17.000000Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- values ------------------------------------------------------------------------------------------------------


def amounts(vector: Vector) -> dict[str, Any]:
    """Resources as a map; cpu is a double, the others are integers where they are whole."""
    slots, cpu, gpu, memory, network = vector
    return {
        "user_slots": _whole(slots),
        "cpu": cpu,
        "gpu": _whole(gpu),
        "memory": _whole(memory),
        "network": _whole(network),
    }


def _whole(number: float) -> float:
    """A number that is whole but for the rounding of sums as an integer."""
    integer = round(number)
    return integer if abs(integer - number) <= 1e-9 * max(abs(number), 1.0) else number


def _shares(vector: Vector) -> dict[str, float]:
    return dict(zip(RESOURCES, vector, strict=True))


def _given(resources: Resources) -> dict[str, Any]:
    """Resources of the configuration: only those that it names."""
    return {name: amount if name == "cpu" else _whole(amount) for name, amount in resources.items()}


def _milliseconds(seconds: float) -> float:
    return _whole(seconds * 1e3)


# --- one tree ----------------------------------------------------------------------------------------------------


class TreeView:
    """A tree and its last update, with what several attributes need; for one request."""

    def __init__(self, tree: Tree, result: UpdateResult | None) -> None:
        self.tree = tree
        self.total = tree.total
        self._elements = result.elements if result is not None else {}
        self._found: dict[Element, ElementShares | None] = {}
        self._limits: dict[Element, Vector] = {}
        self._limited_demands: dict[Element, Vector] = {}
        self._ratios: dict[PoolElement, tuple[float, float]] = {}
        self._satisfactions: dict[PoolElement, float | None] = {}
        self._guaranteed: dict[str, tuple[Vector, float]] | None = None
        self._guaranteed_shares: dict[Element, Vector] = {}
        self._online_capacity: Vector | None = None
        self._indexes: dict[Element, int] | None = None
        self._slots: dict[PoolElement, dict[Element, int]] = {}

    def shares(self, element: Element) -> ElementShares | None:
        """What the last update says of an element; None of one that has not seen an update."""
        if element not in self._found:
            if isinstance(element, OperationElement):
                found = self._elements.get(GUARANTEE_PREFIX + element.name) if has_guarantee(element) else None
                self._found[element] = found or self._elements.get(OPERATION_PREFIX + element.name)
            else:
                self._found[element] = self._elements.get(fairshare.ROOT if element.parent is None else element.name)
        return self._found[element]

    def limits(self, element: Element) -> Vector:
        """``resource_limits`` and ``max_share_ratio`` as they are set now (2.10); infinite where there is no limit."""
        found = self._limits.get(element)
        if found is None:
            if element.parent is None:
                found = UNLIMITED
            else:
                given = element.settings if isinstance(element, PoolElement) else _options(element)
                own = to_vector(given.resource_limits, float("inf"))
                found = limits_of_parent(self.total, own, self.limits(element.parent), given.max_share_ratio)
            self._limits[element] = found
        return found

    def limited_demand(self, element: Element) -> Vector:
        """Demand cut by the limits: children's are cut before they are summed (2.5). Absolute."""
        found = self._limited_demands.get(element)
        if found is None:
            demand = element.demand
            if isinstance(element, PoolElement):
                below: list[Element] = [*element.children.values(), *element.operations.values()]
                demand = sum_vectors([self.limited_demand(each) for each in below])
            found = self._limited_demands[element] = least(demand, least(self.limits(element), self.total))
        return found

    def total_ratios(self, pool: PoolElement) -> tuple[float, float]:
        """``total_burst_ratio`` and ``total_resource_flow_ratio`` (5.3)."""
        found = self._ratios.get(pool)
        if found is None:
            burst, flow = self.burst_ratio(pool), self.flow_ratio(pool)
            for child in pool.children.values():
                burst_below, flow_below = self.total_ratios(child)
                burst, flow = burst + burst_below, flow + flow_below
            found = self._ratios[pool] = (burst, flow)
        return found

    def burst_ratio(self, pool: PoolElement) -> float:
        """``specified_burst_ratio``: of burst pools only."""
        given = pool.settings.integral_guarantees
        if given.guarantee_type != "burst":
            return 0.0
        return ratio(to_vector(given.burst_guarantee_resources, 0.0), self.total)

    def flow_ratio(self, pool: PoolElement) -> float:
        """``specified_resource_flow_ratio``: of burst and relaxed pools."""
        given = pool.settings.integral_guarantees
        return 0.0 if given.guarantee_type == "none" else ratio(to_vector(given.resource_flow, 0.0), self.total)

    def satisfaction(self, element: Element) -> float:
        """``satisfaction_ratio``: of a pool the least of its running operations', its own where none runs."""
        if isinstance(element, PoolElement):
            found = self._least_below(element)
            return placement.satisfaction(element) if found is None else found
        return placement.satisfaction(element)

    def _least_below(self, pool: PoolElement) -> float | None:
        if pool not in self._satisfactions:
            found = [placement.satisfaction(each) for each in pool.operations.values() if each.is_running]
            below = [self._least_below(child) for child in pool.children.values()]
            self._satisfactions[pool] = min(found + [each for each in below if each is not None], default=None)
        return self._satisfactions[pool]

    def weight(self, pool: PoolElement) -> float:
        """The weight that holds: set, or inferred from the guarantees (2.5)."""
        multiplier = self.tree.config.settings.infer_weight_from_guarantees_share_multiplier
        if pool.settings.weight is not None or multiplier is None or pool.parent is None:
            return fold_weight(pool.name, pool.settings.weight)
        if self._guaranteed is None:
            self._guaranteed = guaranteed_shares(self.tree)
        strong, flow = self._guaranteed.get(pool.name, (ZERO, 0.0))
        return infer_weight(multiplier, strong, flow, *self._guaranteed.get(pool.parent.name, (ZERO, 0.0)))

    def guaranteed(self, element: Element) -> Vector:
        """The share that is left to the element when its siblings, and those of the pools above it, want everything.

        The strong guarantee, and by weight a part of what those of all siblings leave of the parent's; pending
        operations take no part.
        """
        found = self._guaranteed_shares.get(element)
        if found is None:
            parent = element.parent
            if parent is None:
                return share(self.total, self.total)
            self._divide(parent)
            found = self._guaranteed_shares.setdefault(element, ZERO)
        return found

    def _divide(self, parent: PoolElement) -> None:
        left = self.guaranteed(parent)
        if parent.mode == "fifo":
            for each in fifo_order(parent):
                self._guaranteed_shares[each] = least(left, self._limits_share(each))
                left = subtract(left, self._guaranteed_shares[each])
            return
        members: list[tuple[Element, float]] = [(child, self.weight(child)) for child in parent.children.values()]
        members += [(each, operation_weight(each)) for each in parent.operations.values() if each.is_running]
        own = []
        for element, _ in members:
            own.append(least(element.strong_guarantee_share, left))
            left = subtract(left, own[-1])
        rooms = [
            subtract(self._limits_share(element), strong) for (element, _), strong in zip(members, own, strict=True)
        ]
        weights = [weight for _, weight in members]
        by_resource = [_divide_by_weight(amount, weights, [room[r] for room in rooms]) for r, amount in enumerate(left)]
        for (element, _), strong, (a, b, c, d, e) in zip(members, own, zip(*by_resource, strict=True), strict=True):
            self._guaranteed_shares[element] = add(strong, (a, b, c, d, e))

    def _limits_share(self, element: Element) -> Vector:
        return share(least(self.limits(element), self.total), self.total)

    def best_allocation(self, element: Element) -> Vector:
        """The greatest share that the limits and the nodes that are online allow."""
        if self._online_capacity is None:
            online = [node.capacity for node in self.tree.nodes.values() if node.is_online]
            self._online_capacity = sum_vectors(online)
        return share(least(self._online_capacity, self.limits(element)), self.total)

    def scheduling_index(self, element: OperationElement) -> int:
        """Place in the order of service among the tree's running operations; -1 of one that does not run."""
        if self._indexes is None:
            running = [each for each in self.tree.operations.values() if each.is_running]
            running.sort(key=self._service_key)
            self._indexes = {each: index for index, each in enumerate(running)}
        return self._indexes.get(element, -1)

    def slot_index(self, element: OperationElement) -> int:
        """Place among the operations of its pool, by their arrival."""
        pool = element.parent
        assert pool is not None
        if pool not in self._slots:
            arrived = sorted(pool.operations.values(), key=lambda each: each.operation.record.sequence)
            self._slots[pool] = {each: index for index, each in enumerate(arrived)}
        return self._slots[pool].get(element, -1)

    def _service_key(self, element: OperationElement) -> tuple[tuple[float, str], ...]:
        path = [(self.satisfaction(pool), pool.name) for pool in element.ancestors()]
        return (*reversed(path[:-1]), (self.satisfaction(element), element.name))


def _divide_by_weight(amount: float, weights: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """``amount`` in parts by weight, none larger than its room; what one cannot take goes to the others."""
    parts = [0.0] * len(weights)
    left = sum(weights)
    for n in sorted(range(len(weights)), key=lambda n: rooms[n] / weights[n]):
        part = weights[n] / max(left, weights[n])  # the sum loses small weights beside large ones
        parts[n] = max(min(rooms[n], amount * part), 0.0)
        amount -= parts[n]
        left -= weights[n]
    return parts


def _options(element: Element) -> OperationTreeOptions:
    assert isinstance(element, OperationElement)
    return element.options


def _own_rules(element: Element) -> PoolSettings | OperationTreeOptions | None:
    """What the element itself says about starvation; the root says nothing that its rules do not say."""
    if isinstance(element, PoolElement):
        return element.settings if element.parent is not None else None
    return _options(element)


# --- attributes of pools and operations --------------------------------------------------------------------------

Reader = Callable[[TreeView, Any], Any]
View = Callable[[Tree], TreeView]


_PARTS: Final = ("strong_guarantee", "integral_guarantee", "weight_proportional", "total")


def _detailed(shares: ElementShares | None) -> FairShare:
    return FairShare() if shares is None else shares.fair_share


def _detailed_fair_share(view: TreeView, element: Element) -> dict[str, Any]:
    parts = _detailed(view.shares(element))
    return {name: _shares(getattr(parts, name)) for name in _PARTS}


def _detailed_dominant_fair_share(view: TreeView, element: Element) -> dict[str, float]:
    parts = _detailed(view.shares(element))
    return {name: max(getattr(parts, name)) for name in _PARTS}


def _demand(view: TreeView, element: Element) -> Vector:
    return share(element.demand, view.total)


def _limited_demand(view: TreeView, element: Element) -> Vector:
    return share(view.limited_demand(element), view.total)


def _limits_share(view: TreeView, element: Element) -> Vector:
    return share(least(view.limits(element), view.total), view.total)


def _dominant_resource(view: TreeView, element: Element) -> str:
    used = usage_share(element)
    shares = used if any(used) else _demand(view, element)
    return RESOURCES[shares.index(max(shares))]


def _specified_limits(_: TreeView, element: Element) -> dict[str, Any]:
    if isinstance(element, PoolElement):
        return _given(element.settings.resource_limits)
    return _given(_options(element).resource_limits)


def _max_share_ratio(_: TreeView, element: Element) -> float:
    own = element.settings if isinstance(element, PoolElement) else _options(element)
    return 1.0 if own.max_share_ratio is None else own.max_share_ratio


def _strong(_: TreeView, element: Element) -> dict[str, Any]:
    if isinstance(element, PoolElement):
        return _given(element.settings.strong_guarantee_resources)
    return _given(_options(element).min_share_resources)


def _starving_ancestor(*statuses: str) -> Reader:
    def find(_: TreeView, element: Element) -> str:
        above: Iterable[Element] = (element, *element.ancestors())
        return next((each.name for each in above if each.starvation_status in statuses), "")

    return find


def _rule(name: str) -> Reader:
    """Reader of a rule that holds for the element; seconds are shown as milliseconds."""

    def read(_: TreeView, element: Element) -> Any:
        value = getattr(_rules(element), name)
        return _milliseconds(value) if name.endswith("_s") else value

    return read


def _own_rule(option: str, effective: str) -> Reader:
    """Reader of an option about starvation: the element's own value, where it has none the one that holds."""
    read_effective = _rule(effective)

    def read(view: TreeView, element: Element) -> Any:
        own = getattr(_own_rules(element), option, None)
        if own is None:
            return read_effective(view, element)
        return own if isinstance(own, bool) or not effective.endswith("_s") else _whole(own)

    return read


def _rules(element: Element) -> PreemptionRules:
    assert element.rules is not None
    return element.rules


def _threshold(_: TreeView, element: Element) -> dict[str, Any]:
    found = _rules(element).non_preemptible_threshold
    if found is None:
        return {}
    return _given({name: value for name, value in zip(RESOURCES, found, strict=True) if value != float("inf")})


def _own_threshold(view: TreeView, element: Element) -> dict[str, Any]:
    own = getattr(_own_rules(element), "non_preemptible_resource_usage_threshold", None)
    return _threshold(view, element) if own is None else _given(own)


def _finite(number: float) -> float:
    return min(number, MAX_SATISFACTION)


def _starving_since(_: TreeView, element: Element) -> Any:
    if element.below_since is None or element.starvation_status == "non_starving":
        return MISSING
    return iso_time(element.below_since)


def _below_since(_: TreeView, element: Element) -> Any:
    return MISSING if element.below_since is None else iso_time(element.below_since)


_COMMON: Final[Mapping[str, Reader]] = {
    # Shares.
    "fair_share_ratio": lambda _, e: max(e.fair_share),
    "dominant_fair_share": lambda _, e: max(e.fair_share),
    "fair_share": lambda _, e: _shares(e.fair_share),
    "detailed_fair_share": _detailed_fair_share,
    "detailed_dominant_fair_share": _detailed_dominant_fair_share,
    "fair_resources": lambda view, e: amounts(_absolute(view, e.fair_share)),
    "usage_ratio": lambda _, e: max(usage_share(e)),
    "dominant_usage_share": lambda _, e: max(usage_share(e)),
    "usage_share": lambda _, e: _shares(usage_share(e)),
    "demand_ratio": lambda view, e: max(_demand(view, e)),
    "dominant_demand_share": lambda view, e: max(_demand(view, e)),
    "demand_share": lambda view, e: _shares(_demand(view, e)),
    "limited_demand_share": lambda view, e: _shares(_limited_demand(view, e)),
    "limits_share": lambda view, e: _shares(_limits_share(view, e)),
    "max_share_ratio": _max_share_ratio,
    "max_possible_usage_ratio": lambda view, e: max(_limited_demand(view, e)),
    "best_allocation_share": lambda view, e: _shares(view.best_allocation(e)),
    "best_allocation_ratio": lambda view, e: _least_share(view, view.best_allocation(e)),
    "dominant_resource": _dominant_resource,
    # Guarantees.
    "min_share_ratio": lambda _, e: max(e.strong_guarantee_share),
    "adjusted_min_share_ratio": lambda _, e: max(e.strong_guarantee_share),
    "recursive_min_share_ratio": lambda _, e: max(e.strong_guarantee_share),
    "min_share": lambda _, e: _shares(e.strong_guarantee_share),
    "strong_guarantee_share": lambda _, e: _shares(e.strong_guarantee_share),
    "min_share_resources": _strong,
    "strong_guarantee_resources": _strong,
    "guaranteed_resources_ratio": lambda view, e: max(view.guaranteed(e)),
    "guaranteed_resources": lambda view, e: amounts(scale(view.total, max(view.guaranteed(e)))),
    "estimated_guarantee_share": lambda view, e: _shares(view.guaranteed(e)),
    "promised_fair_share": lambda view, e: _shares(view.guaranteed(e)),
    # Resources.
    "resource_usage": lambda _, e: amounts(e.usage),
    "resource_demand": lambda _, e: amounts(e.demand),
    "limited_resource_demand": lambda view, e: amounts(view.limited_demand(e)),
    "resource_limits": lambda view, e: amounts(least(view.limits(e), view.total)),
    "specified_resource_limits": _specified_limits,
    "aggregated_preempted_cpu_x100": lambda _, e: int(100.0 * e.reclaimed_cpu_seconds),
    # Satisfaction and starvation.
    "satisfaction_ratio": lambda view, e: _finite(view.satisfaction(e)),
    "local_satisfaction_ratio": lambda _, e: _finite(placement.satisfaction(e)),
    "scheduling_status": lambda _, e: e.scheduling_status,
    "starving": lambda _, e: e.starvation_status != "non_starving",
    "starvation_status": lambda _, e: e.starvation_status,
    "starving_since": _starving_since,
    "below_fair_share_since": _below_since,
    "lowest_starving_ancestor": _starving_ancestor("starving", "aggressively_starving"),
    "lowest_aggressively_starving_ancestor": _starving_ancestor("aggressively_starving"),
    "fair_share_starvation_tolerance": _own_rule("fair_share_starvation_tolerance", "tolerance"),
    "fair_share_starvation_timeout": _own_rule("fair_share_starvation_timeout", "fair_share_timeout_s"),
    "fair_share_preemption_timeout": _own_rule("fair_share_starvation_timeout", "fair_share_timeout_s"),
    "min_share_preemption_timeout": _own_rule("min_share_preemption_timeout", "min_share_timeout_s"),
    "fair_share_aggressive_starvation_timeout": _own_rule(
        "fair_share_aggressive_starvation_timeout", "aggressive_timeout_s"
    ),
    "adjusted_fair_share_starvation_tolerance": _rule("tolerance"),
    "adjusted_fair_share_preemption_timeout": _rule("fair_share_timeout_s"),
    "adjusted_min_share_preemption_timeout": _rule("min_share_timeout_s"),
    "effective_fair_share_starvation_tolerance": _rule("tolerance"),
    "effective_fair_share_starvation_timeout": _rule("fair_share_timeout_s"),
    "effective_fair_share_preemption_timeout": _rule("fair_share_timeout_s"),
    "effective_min_share_preemption_timeout": _rule("min_share_timeout_s"),
    "effective_fair_share_aggressive_starvation_timeout": _rule("aggressive_timeout_s"),
    "aggressive_starvation_enabled": _own_rule("enable_aggressive_starvation", "aggressive_starvation"),
    "effective_aggressive_starvation_enabled": _rule("aggressive_starvation"),
    "aggressive_preemption_allowed": _own_rule("allow_aggressive_preemption", "aggressive_preemption"),
    "effective_aggressive_preemption_allowed": _rule("aggressive_preemption"),
    "non_preemptible_resource_usage_threshold": _own_threshold,
    "effective_non_preemptible_resource_usage_threshold": _threshold,
}


def _least_share(view: TreeView, shares: Vector) -> float:
    return min((part for part, whole in zip(shares, view.total, strict=True) if whole > 0.0), default=0.0)


def _always(value: Any) -> Reader:
    return lambda _view, _element: value


def _absolute(view: TreeView, shares: Vector) -> Vector:
    a, b, c, d, e = (part * whole for part, whole in zip(shares, view.total, strict=True))
    return (a, b, c, d, e)


def _if_explicit_or_ephemeral(read: Reader) -> Reader:
    """The root has no such attribute (5.1)."""
    return lambda view, pool: MISSING if pool.is_root else read(view, pool)


def _if_integral(read: Reader) -> Reader:
    def find(view: TreeView, pool: PoolElement) -> Any:
        return MISSING if pool.settings.integral_guarantees.guarantee_type == "none" else read(view, pool)

    return find


def _full_path(_: TreeView, pool: PoolElement) -> str:
    names = [pool.name, *(each.name for each in pool.ancestors())]
    return "/" + "/".join(reversed(names[:-1]))


def _volume_ratio(view: TreeView, pool: PoolElement) -> float:
    return min((v / t for v, t in zip(pool.volume, view.total, strict=True) if t > 0.0), default=0.0)


def _capacity(view: TreeView, pool: PoolElement) -> float:
    period_s = view.tree.config.settings.integral_guarantees.pool_capacity_saturation_period / 1e3
    flow = to_vector(pool.settings.integral_guarantees.resource_flow, 0.0)
    return period_s * ratio(flow, view.total)


def _if_flowing(read: Reader) -> Reader:
    """Also of a pool that has a flow and no type yet: what its capacity will be."""

    def find(view: TreeView, pool: PoolElement) -> Any:
        given = pool.settings.integral_guarantees
        return read(view, pool) if given.guarantee_type != "none" or given.resource_flow else MISSING

    return find


def _burst_duration(view: TreeView, pool: PoolElement) -> Any:
    if pool.settings.integral_guarantees.guarantee_type != "burst":
        return MISSING
    consumed = view.burst_ratio(pool) - view.flow_ratio(pool)
    return _volume_ratio(view, pool) / consumed if consumed > 0.0 else MISSING


def _effective_strong(view: TreeView, pool: PoolElement) -> dict[str, Any]:
    found = view.shares(pool)
    return amounts(ZERO if found is None else found.inferred_strong_guarantee_resources)


def _integral_resources(name: str) -> Reader:
    def read(_: TreeView, pool: PoolElement) -> dict[str, Any]:
        return _given(getattr(pool.settings.integral_guarantees, name))

    return read


_POOL: Final[Mapping[str, Reader]] = {
    **_COMMON,
    "parent": _if_explicit_or_ephemeral(lambda _, pool: pool.parent.name),
    "full_path": _if_explicit_or_ephemeral(_full_path),
    "mode": _if_explicit_or_ephemeral(lambda _, pool: pool.mode),
    "is_ephemeral": _if_explicit_or_ephemeral(lambda _, pool: pool.is_ephemeral),
    "weight": lambda view, pool: view.weight(pool),
    "fifo_sort_parameters": lambda _, pool: (
        list(pool.settings.fifo_sort_parameters) if pool.mode == "fifo" and not pool.is_root else MISSING
    ),
    "forbid_immediate_operations": lambda view, pool: (
        view.tree.config.settings.forbid_immediate_operations_in_root
        if pool.is_root
        else pool.settings.forbid_immediate_operations
    ),
    "create_ephemeral_subpools": lambda _, pool: pool.settings.create_ephemeral_subpools,
    "child_pool_count": lambda _, pool: len(pool.children),
    "enabled": _always(True),
    "schedulable": lambda _, pool: pool.running_operation_count > 0,
    # Counts.
    "operation_count": lambda _, pool: pool.operation_count,
    "running_operation_count": lambda _, pool: pool.running_operation_count,
    "pending_operation_count": lambda _, pool: pool.operation_count - pool.running_operation_count,
    "pool_operation_count": lambda _, pool: len(pool.operations),
    "lightweight_running_operation_count": _always(0),
    "schedulable_operation_count": lambda _, pool: sum(map(_is_schedulable, pool.operations.values())),
    "max_operation_count": lambda _, pool: pool.max_operation_count,
    "max_running_operation_count": lambda _, pool: pool.max_running_operation_count,
    # Guarantees (5.3).
    "effective_strong_guarantee_resources": _effective_strong,
    "integral_guarantee_type": lambda _, pool: pool.settings.integral_guarantees.guarantee_type,
    "accumulated_resource_ratio_volume": _if_integral(_volume_ratio),
    "accumulated_resource_volume": _if_integral(lambda _, pool: amounts(pool.volume)),
    "integral_pool_capacity": _if_flowing(_capacity),
    "integral_pool_capacity_resources": _if_flowing(
        lambda view, pool: amounts(scale(view.total, _capacity(view, pool)))
    ),
    "specified_burst_ratio": lambda view, pool: view.burst_ratio(pool),
    "specified_burst_guarantee_resources": _integral_resources("burst_guarantee_resources"),
    "specified_resource_flow_ratio": lambda view, pool: view.flow_ratio(pool),
    "specified_resource_flow": _integral_resources("resource_flow"),
    "total_burst_ratio": lambda view, pool: view.total_ratios(pool)[0],
    "total_resource_flow_ratio": lambda view, pool: view.total_ratios(pool)[1],
    "estimated_burst_usage_duration_seconds": _burst_duration,
}


def _is_schedulable(element: OperationElement) -> bool:
    return element.is_running and not element.operation.record.suspended


def _count_jobs(preemptibility: int) -> Reader:
    def count(_: TreeView, element: OperationElement) -> int:
        # Only what the next preemption would compute anyhow.
        preemption.sort_jobs(element)
        return sum(job.preemptibility == preemptibility for job in element.jobs.values())

    return count


_OPERATION: Final[Mapping[str, Reader]] = {
    **_COMMON,
    "pool": lambda _, e: e.options.pool,
    "parent": lambda _, e: e.options.pool,
    "weight": lambda _, e: operation_weight(e),
    "start_time": lambda _, e: iso_time(e.operation.record.start_time),
    "user": lambda _, e: e.operation.record.user,
    "title": lambda _, e: e.operation.record.title,
    "type": lambda _, e: e.operation.record.type,
    "state": lambda _, e: "running" if e.is_running else "pending",
    "enabled": lambda _, e: e.is_running,
    "schedulable": lambda _, e: _is_schedulable(e),
    "suspended": lambda _, e: e.operation.record.suspended,
    "tentative": _always(False),
    "is_gang": lambda _, e: e.operation.record.is_gang,
    "fifo_index": lambda _, e: MISSING if e.fifo_index is None else e.fifo_index,
    "slot_index": lambda view, e: view.slot_index(e),
    "scheduling_index": lambda view, e: view.scheduling_index(e),
    "job_count": lambda _, e: len(e.jobs),
    "pending_job_count": lambda _, e: e.operation.needed_job_count,
    "preemptible_job_count": _count_jobs(PREEMPTIBLE),
    "aggressively_preemptible_job_count": _count_jobs(AGGRESSIVELY_PREEMPTIBLE),
    "deactivation_reasons": lambda _, e: dict(e.deactivations),
    "min_needed_resources_unsatisfied_count": lambda _, e: e.deactivations.get("node_resources", 0),
}

POOL_ATTRIBUTES: Final = frozenset(_POOL)
OPERATION_ATTRIBUTES: Final = frozenset(_OPERATION)


def _attributes(view: TreeView, element: Element, readers: Mapping[str, Reader]) -> Lazy:
    def find(name: str) -> Any:
        read = readers.get(name)
        return MISSING if read is None else read(view, element)

    return Description(lambda: readers, find)


def pool_attributes(view: TreeView, pool: PoolElement) -> Lazy:
    """Everything about a pool or the root (5.2, 5.3, 5.4)."""
    return _attributes(view, pool, _POOL)


def operation_attributes(view: TreeView, element: OperationElement) -> Lazy:
    """Everything about an operation in one tree (5.2, 5.4)."""
    return _attributes(view, element, _OPERATION)


# --- trees -------------------------------------------------------------------------------------------------------


def _pools(view: TreeView) -> Lazy:
    tree = view.tree

    def find(name: str) -> Any:
        pool = tree.root if name == ROOT_POOL else tree.pools.get(name)
        return MISSING if pool is None else pool_attributes(view, pool)

    return Lazy(lambda: (ROOT_POOL, *tree.pools), find, lambda name: f'Pool tree "{tree.name}" has no pool "{name}"')


def _by_pool(view: TreeView, members: Callable[[PoolElement], Mapping[str, E]], show: Callable[[E], Any]) -> Lazy:
    """Pool -> its members by name."""
    tree = view.tree

    def find(name: str) -> Any:
        pool = tree.root if name == ROOT_POOL else tree.pools.get(name)
        return MISSING if pool is None else _table(members(pool), show)

    return Lazy(lambda: (ROOT_POOL, *tree.pools), find, lambda name: f'Pool tree "{tree.name}" has no pool "{name}"')


def _table(items: Mapping[str, Any], show: Callable[[Any], Any]) -> Lazy:
    return Table(lambda: items, lambda name: show(items[name]) if name in items else MISSING)


def tree_orchid(view: TreeView) -> Lazy:
    """``pool_trees/<tree>``: pools, operations, and what the tree as a whole has (5.1)."""
    tree = view.tree

    def show_pool(pool: PoolElement) -> Lazy:
        return pool_attributes(view, pool)

    def show_operation(element: OperationElement) -> Lazy:
        return operation_attributes(view, element)

    return fixed(
        {
            "pools": lambda: _pools(view),
            "child_pools_by_pool": lambda: _by_pool(view, lambda pool: pool.children, show_pool),
            "operations": lambda: _table(tree.operations, show_operation),
            "operations_by_pool": lambda: _by_pool(view, lambda pool: pool.operations, show_operation),
            "config": lambda: _tree_options(tree),
            "resource_usage": lambda: amounts(tree.root.usage),
            "resource_limits": lambda: amounts(tree.total),
            "node_count": lambda: len(tree.nodes),
            "node_addresses": lambda: sorted(node.address for node in tree.nodes.values()),
            "pool_count": lambda: len(tree.pools),
            "operation_count": lambda: tree.root.operation_count,
            "running_operation_count": lambda: tree.root.running_operation_count,
            "resource_distribution_info": lambda: resource_distribution_info(view),
            "user_to_ephemeral_pools": lambda: _ephemeral_pools(tree),
            "errors": lambda: list(tree.errors),
        },
        frozenset({"child_pools_by_pool", "operations", "operations_by_pool"}),
    )


def resource_distribution_info(view: TreeView) -> dict[str, Any]:
    """What the root's children have of the cluster: guarantees of each kind, and what is left (5.3)."""
    strong, burst, flow, distributed = ZERO, ZERO, ZERO, ZERO
    for pool in view.tree.root.children.values():
        given = pool.settings.integral_guarantees
        own = to_vector(pool.settings.strong_guarantee_resources, 0.0)
        own_burst = to_vector(given.burst_guarantee_resources, 0.0)
        own_flow = to_vector(given.resource_flow, 0.0)
        strong, burst, flow = (
            sum_vectors([strong, own]),
            sum_vectors([burst, own_burst]),
            sum_vectors([flow, own_flow]),
        )
        distributed = sum_vectors([distributed, own, greatest(own_burst, own_flow)])
    return {
        "distributed_resources": amounts(distributed),
        "distributed_strong_guarantee_resources": amounts(strong),
        "distributed_burst_guarantee_resources": amounts(burst),
        "distributed_resource_flow": amounts(flow),
        "undistributed_resources": amounts(subtract(view.total, distributed)),
        "undistributed_resource_flow": amounts(positive_part(subtract(burst, flow))),
        "undistributed_burst_guarantee_resources": amounts(positive_part(subtract(flow, burst))),
    }


def _tree_options(tree: Tree) -> dict[str, Any]:
    """All options of a tree as they hold, under every name that is accepted for them (2.4)."""
    options = _plain(tree.config.settings)
    rules = tree.root.rules
    if rules is not None:
        options["min_share_preemption_timeout"] = rules.min_share_timeout_s * 1e3
        options["min_share_preemption_timeout_limit"] = rules.min_share_timeout_limit_s * 1e3
        options["fair_share_preemption_timeout_limit"] = rules.fair_share_timeout_limit_s * 1e3
        options["fair_share_starvation_tolerance_limit"] = rules.tolerance_limit
    for table in (options, options["integral_guarantees"]):
        for name, value in table.items():
            if name.endswith(("_timeout", "_timeout_limit", "_period", "_backoff")) and float(value).is_integer():
                table[name] = int(value)
    known = {alias: options[name] for alias, name in ALIASES["tree"].items() if name in options}
    return {**known, **options}


def _plain(value: Any) -> Any:
    """Settings as dictionaries with all their defaults; what is not set is left out."""
    if isinstance(value, msgspec.Struct):
        parts = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: _plain(part) for name, part in parts.items() if part is not None}
    return list(value) if isinstance(value, tuple) else value


def _ephemeral_pools(tree: Tree) -> dict[str, list[str]]:
    """User -> names of the ephemeral pools that were made for it, those under ``parent$user`` left aside (2.9)."""
    found: dict[str, list[str]] = {}
    for pool in tree.pools.values():
        if pool.is_ephemeral and SUBPOOL_DELIMITER not in pool.name:
            found.setdefault(pool.owner, []).append(pool.name)
    return found


# --- operations --------------------------------------------------------------------------------------------------


def _options_per_tree(record: OperationRecord) -> dict[str, Any]:
    plain = {name: msgspec.to_builtins(options) for name, options in record.trees.items()}
    return {name: {"weight": fold_weight(name, record.trees[name].weight), **plain[name]} for name in plain}


def job_counts(record: OperationRecord, live: Operation | None) -> dict[str, int]:
    """Jobs of an operation by what became of them; ``total`` are those that it shall have."""
    counts = record.counts.values()
    return {
        "total": sum(task.job_count for task in record.tasks),
        "pending": live.needed_job_count if live is not None else 0,
        "running": live.active_job_count if live is not None else 0,
        "completed": sum(each.completed for each in counts),
        "failed": sum(each.failed for each in counts),
        "aborted": sum(each.aborted for each in counts),
        "lost": sum(each.lost for each in counts),
    }


def _tasks(record: OperationRecord, live: Operation | None) -> list[dict[str, Any]]:
    active: dict[str, int] = {}
    for element in live.elements.values() if live is not None else ():
        for job in element.jobs.values():
            active[job.task.name] = active.get(job.task.name, 0) + 1
    shown = []
    for task in record.tasks:
        counts = record.counts.get(task.name)
        counter = {
            "total": task.job_count,
            "pending": live.needed.get(task.name, 0) if live is not None else 0,
            "running": active.get(task.name, 0),
            **({name: getattr(counts, name, 0) for name in ("completed", "failed", "aborted", "lost")}),
        }
        shown.append({"task_name": task.name, "job_counter": counter, "job_resources": amounts(task.resources)})
    return shown


def _result(record: OperationRecord) -> Any:
    if not record.is_finished:
        return MISSING
    code = 0 if record.state == "completed" else 1
    return {"error": {"code": code, "message": record.error, "attributes": {}, "inner_errors": []}}


def _alerts(record: OperationRecord, live: Operation | None) -> dict[str, Any]:
    """3.2: which pool is full, of an operation that waits; and jobs that no node can ever hold."""
    alerts: dict[str, Any] = {}
    for element in live.elements.values() if live is not None and not record.running_in else ():
        full = admission.find_full(element)
        if full is not None:
            details = {"pool": full.name, "limit": full.max_running_operation_count, "pool_tree": element.tree.name}
            message = "Max running operation count violated"
            alerts["operation_pending"] = {"code": 1, "message": message, "attributes": details, "inner_errors": []}
            break
    too_large = [] if live is None else placement.find_stuck_tasks(live)
    if too_large:
        message = "; ".join(too_large)
        alerts["job_fits_no_node"] = {"code": 1, "message": message, "attributes": {}, "inner_errors": []}
    return alerts


def _brief_spec(record: OperationRecord) -> dict[str, Any]:
    pool = next((options.pool for options in record.trees.values()), "")
    brief = {"title": record.title, "alias": record.alias, "pool": pool}
    return {name: value for name, value in brief.items() if value}


def look_once(results: Results) -> View:
    """Trees with their last updates, each looked at once in a request: what operations have in common is made once."""
    views: dict[str, TreeView] = {}

    def view(tree: Tree) -> TreeView:
        if tree.name not in views:
            views[tree.name] = TreeView(tree, results.get(tree.name))
        return views[tree.name]

    return view


def operation_info(state: State, record: OperationRecord, view: View) -> Lazy:
    """An operation, live or finished: what ``get_operation`` answers (yt_protocol.md 10)."""
    live = state.operations.get(record.id)

    def per_tree() -> Lazy:
        elements = live.elements if live is not None else {}
        return _table(elements, lambda e: operation_attributes(view(e.tree), e))

    def progress() -> Lazy:
        return fixed(
            {
                "jobs": lambda: job_counts(record, live),
                "tasks": lambda: _tasks(record, live),
                "scheduling_info_per_pool_tree": per_tree,
            }
        )

    return fixed(
        {
            "id": lambda: record.id,
            "type": lambda: record.type,
            "operation_type": lambda: record.type,
            "state": lambda: record.state,
            "authenticated_user": lambda: record.user,
            "start_time": lambda: iso_time(record.start_time),
            "finish_time": lambda: MISSING if record.finish_time is None else iso_time(record.finish_time),
            "suspended": lambda: record.suspended,
            "alias": lambda: record.alias or MISSING,
            "brief_spec": lambda: _brief_spec(record),
            "spec": lambda: record.spec,
            "provided_spec": lambda: record.spec,
            "full_spec": lambda: resulting.full_spec(record, live),
            "unrecognized_spec": lambda: operations.find_unrecognized(record.spec),
            "runtime_parameters": lambda: {
                "scheduling_options_per_pool_tree": _options_per_tree(record),
                "owners": [],
            },
            "brief_progress": lambda: {"jobs": job_counts(record, live)},
            "progress": progress,
            "task_names": lambda: [task.name for task in record.tasks],
            "result": lambda: _result(record),
            "alerts": lambda: _alerts(record, live),
            "alert_events": list,
            "events": list,
        }
    )


_JOB_STATES: Final = {"starting": "waiting", "stopping": "aborting"}


def job_state(job: Job | JobRecord) -> str:
    """The state of a job in the words of ``list_jobs``."""
    return _JOB_STATES.get(job.state, job.state)


def job_info(job: Job) -> dict[str, Any]:
    """A job that lives, as ``list_jobs`` answers; limits in cores."""
    element = job.element
    info = {
        "id": job.id,
        "operation_id": element.operation.id,
        "type": "vanilla",
        "state": job_state(job),
        "address": job.node.address,
        "task_name": job.task.name,
        "start_time": iso_time(job.start_time),
        "pool": element.options.pool,
        "pool_tree": element.tree.name,
        "cpu_limit": job.limits[1],
        "current_cpu_limit": job.usage[1],
        "cpu_monitor_mode": job.cpu_monitor_mode,
        "is_stale": False,
    }
    for name in ("smoothed_cpu_usage", "cpu_seconds", "reclaimed_cpu_seconds"):
        value = getattr(job, name)
        if value is not None:
            info[name] = value
    if job.cgroup:
        info["cgroup"] = job.cgroup
    if job.stop is not None:
        info["why_preempted"] = _preemption(job.stop.record)
    return info


def finished_job_info(record: JobRecord, address: str) -> dict[str, Any]:
    """A finished job, as ``list_jobs`` answers."""
    info: dict[str, Any] = {
        "id": record.id,
        "operation_id": record.operation_id,
        "type": "vanilla",
        "state": job_state(record),
        "address": address,
        "task_name": record.task,
        "start_time": iso_time(record.start_time),
        "finish_time": iso_time(record.finish_time),
        "pool_tree": record.tree,
        "cpu_limit": record.cpu_limit,
        "current_cpu_limit": record.current_cpu_limit,
        "is_stale": False,
    }
    for name in ("exit_code", "cpu_seconds", "reclaimed_cpu_seconds", "max_memory"):
        value = getattr(record, name)
        if value is not None:
            info[name] = value
    if record.cgroup:
        info["cgroup"] = record.cgroup
    if record.state != "completed":
        info["error"] = {"code": 1, "message": record.reason, "attributes": {}, "inner_errors": []}
    if record.preemption is not None:
        info["why_preempted"] = _preemption(record.preemption)
    return info


def _preemption(record: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(record)
    plain["at"] = iso_time(record.at)
    return plain


# --- everything --------------------------------------------------------------------------------------------------


def node_info(node: Node) -> dict[str, Any]:
    """A node as its registration and its last heartbeat say."""
    return {
        "id": node.id,
        "address": node.address,
        "state": "online" if node.is_online else "offline",
        "tags": sorted(node.tags),
        "pool_tree": node.tree or "",
        "resource_limits": amounts(node.capacity),
        "resource_usage": amounts(node.used),
        "foreign_resource_usage": amounts(node.foreign_usage),
        "last_seen_time": iso_time(node.last_seen),
        "running_job_count": len(node.jobs),
        "stopping_job_count": len(node.stopping),
        "overcommit_count": node.overcommit_count,
        "is_overcommitted": node.overcommitted_since is not None,
    }


def nodes_by_address(state: State) -> dict[str, Node]:
    """The nodes under their addresses; one that shares its address with an earlier one is under its id."""
    found: dict[str, Node] = {}
    for node in state.nodes.values():
        found[node.address if node.address not in found else node.id] = node
    return found


def _operations(state: State, view: View) -> Lazy:
    def find(operation_id: str) -> Any:
        live = state.operations.get(operation_id)
        record = live.record if live is not None else state.finished.get(operation_id)
        return MISSING if record is None else operation_info(state, record, view)

    return Table(lambda: list(state.operations), find, lambda name: f"No such operation {name}")


def scheduler_orchid(state: State, results: Results) -> Lazy:
    """Everything below ``//sys/scheduler/orchid/scheduler`` (5.1)."""

    def trees(show: Callable[[Tree], Any]) -> Lazy:
        return _table(state.trees, show)

    view = look_once(results)

    def old_tree(tree: Tree) -> Lazy:
        return fixed({"fair_share_info": lambda: tree_orchid(view(tree))})

    def preemptions() -> list[dict[str, Any]]:
        recent = list(state.preemptions)[-SHOWN_PREEMPTIONS:]
        return [_preemption(record) for record in reversed(recent)]

    return fixed(
        {
            "pool_trees": lambda: trees(lambda tree: tree_orchid(view(tree))),
            "scheduling_info_per_pool_tree": lambda: trees(old_tree),
            "default_pool_tree": lambda: state.config.default_tree,
            "default_fair_share_tree": lambda: state.config.default_tree,
            "user_to_ephemeral_pools": lambda: {name: _ephemeral_pools(tree) for name, tree in state.trees.items()},
            "operations": lambda: _operations(state, view),
            "nodes": lambda: _table(nodes_by_address(state), node_info),
            "preemptions": preemptions,
        },
        frozenset({"pool_trees", "scheduling_info_per_pool_tree", "operations", "nodes", "preemptions"}),
    )
