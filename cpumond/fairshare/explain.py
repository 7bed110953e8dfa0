"""Explanation of an element's share in words: the rule that limits the share, and the shares of the pools above.

Reads a snapshot and the result of its update; computes no share itself. Sections are those of fair_share_update.md.
Shares are shown in percent of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from cpumond.core.words import format_percent, printable
from cpumond.fairshare.resources import ONE, RESOURCES, Vector, format_amount, least, ratio, share, sum_in_order
from cpumond.fairshare.result import ElementShares, UpdateResult
from cpumond.fairshare.tree import ROOT, Operation, Pool, Snapshot

Rule = Literal["demand", "limit", "gang", "fifo", "weight", "strong_guarantee", "burst", "relaxed", "cluster"]
"""The rule that ends an element's share.
- demand: the element gets its whole demand.
- limit: a limit, its own or that of a pool above, is reached.
- gang: its whole demand does not fit at once.
- fifo: operations that are served before it get the resources.
- weight: siblings also want more, and the element gets its part by weight.
- strong_guarantee, burst, relaxed: the element gets this guarantee, and nothing is distributed by weight.
- cluster: all of a resource is distributed, and no rule above applies."""

TOLERANCE: Final = 1e-8
"""Shares that differ by less than this are equal: it is above an update's rounding (1e-9), below real differences."""

NO_STEP: Final = (
    "no resource is fully distributed, but the next step (a gang, or several resources at once) does not fit"
)
"""Why a pool's share stops below any limit: where a gang begins, the share would have to jump (9.1, 12.1)."""

SHOWN_NAMES: Final = 3


@dataclass(frozen=True, slots=True)
class PathStep:
    """An element on the path from the root, with absolute amounts of the element's dominant resource. ``share`` is the
    sum of ``strong``, ``integral`` and ``by_weight``. ``cut``: the reason why the share ends below ``demand``, if it
    lies at this element; else ""."""

    name: str
    resource: str
    demand: float
    share: float
    strong: float
    integral: float
    by_weight: float
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The rule that limits ``element``, and lines for people: first the rule as a sentence, then the path from the
    root. ``path``: the same path as numbers, the root first."""

    element: str
    rule: Rule
    lines: tuple[str, ...]
    path: tuple[PathStep, ...]


def explain(snapshot: Snapshot, result: UpdateResult, name: str) -> Explanation:
    """Return the rule that determined the share of element ``name`` in ``result``, the update of ``snapshot``. Raises
    KeyError if the tree has no element of this name."""
    tree = _Tree(snapshot, result)
    binding = tree.find_binding(name)
    lines = [_describe_binding(tree, name, binding), "from the root down, in percent of the cluster:"]
    for element in tree.path(name):
        lines += _describe_element(tree, element)
    path = tuple(_make_step(tree, element, binding) for element in tree.path(name))
    return Explanation(name, binding.rule, tuple(lines), path)


@dataclass(frozen=True, slots=True)
class _Binding:
    """``rule`` applies at ``at``, the element or a pool above it. ``resource``: the resource at its limit, if any."""

    rule: Rule
    at: str
    resource: int | None = None


class _Tree:
    """A snapshot and its result together, with values derived from both."""

    def __init__(self, snapshot: Snapshot, result: UpdateResult) -> None:
        self.total = snapshot.total_resources
        self.options = snapshot.options
        self.pools = {ROOT: snapshot.root, **{pool.name: pool for pool in snapshot.pools}}
        self.operations = {operation.name: operation for operation in snapshot.operations}
        self.children: dict[str, list[str]] = {name: [] for name in self.pools}
        elements: tuple[Pool | Operation, ...] = (*snapshot.pools, *snapshot.operations)
        for element in elements:
            self.children[element.parent].append(element.name)
        self._result = result
        self._shares: dict[str, ElementShares] = {}
        self._wants_more: dict[str, bool] = {}

    def element(self, name: str) -> Pool | Operation:
        return self.operations[name] if name in self.operations else self.pools[name]

    def shares(self, name: str) -> ElementShares:
        if name not in self._shares:
            self._shares[name] = self._result.elements[name]
        return self._shares[name]

    def path(self, name: str) -> list[str]:
        path = [name]
        while path[-1] != ROOT:
            path.append(self.element(path[-1]).parent)
        return path[::-1]

    def siblings(self, name: str) -> list[str]:
        return [sibling for sibling in self.children[self.element(name).parent] if sibling != name]

    def is_gang(self, name: str) -> bool:
        """Whether an operation gets all or nothing, by its own settings and those of the tree and its pool (9.1)."""
        operation = self.operations.get(name)
        if operation is None or not operation.gang:
            return False
        pool = self.pools[operation.parent]
        return self.options.step_function_for_gang_operations and pool.step_function_for_gang_operations

    def never_fits(self, name: str) -> bool:
        """Whether a gang demands more than its own limits allow: then it never gets anything."""
        shares = self.shares(name)
        return self.is_gang(name) and not _covers(shares.limits_share, shares.demand_share)

    def is_satisfied(self, name: str) -> bool:
        shares = self.shares(name)
        return _covers(shares.fair_share.total, shares.demand_share)

    def limit_in_force(self, name: str) -> int | None:
        """Return a resource in which an element has reached its own limit and wants more; None if there is none. The
        cluster's total counts as the root's own limit (3), but not as that of an element below."""
        shares = self.shares(name)
        amounts = zip(shares.fair_share.total, shares.limits_share, shares.demand_share, strict=True)
        for r, (total, limit, demand) in enumerate(amounts):
            is_limit = name == ROOT or limit < 1.0
            if is_limit and demand > limit + TOLERANCE and total >= limit - TOLERANCE:
                return r
        return None

    def wants_more(self, name: str) -> bool:
        """Whether an element is, or contains, an operation that is below its demand and stopped by no limit."""
        if not self._wants_more:
            wants = self._wants_more
            for operation in self.operations:
                free = self.limit_in_force(operation) is None and not self.never_fits(operation)
                wants[operation] = free and not self.is_satisfied(operation)
            # Parents come before their children: in reverse order, a pool's children are known before the pool.
            for pool in reversed(self.pools):
                some = any(wants[child] for child in self.children[pool])
                wants[pool] = some and self.limit_in_force(pool) is None
        return self._wants_more[name]

    def fifo_index(self, name: str) -> int:
        """Return the place, counted from 0, of an operation in the order of service of its FIFO pool (3, 7)."""
        shares = self.shares(name)
        index = shares.fifo_index if shares.effective_fifo_index is None else shares.effective_fifo_index
        return index or 0

    def served_before(self, name: str) -> list[str]:
        """Return the operations of a FIFO pool that demand something and are served before this one, in that order."""
        own = self.fifo_index(name)
        before = [(self.fifo_index(other), other) for other in self.siblings(name)]
        return [other for index, other in sorted(before) if index < own and any(self.shares(other).demand_share)]

    def find_scarce(self, name: str) -> tuple[str, int] | None:
        """Return the nearest pool above that has reached a limit (the root: the cluster's total), and its resource."""
        for pool in self.path(name)[-2::-1]:
            resource = self.limit_in_force(pool)
            if resource is not None:
                return pool, resource
        return None

    def find_binding(self, name: str) -> _Binding:
        """Return the first level, going from the element upwards, at which something limits the element. For a pool
        limited only by what is inside it, return a level inside."""
        if self.is_satisfied(name):
            return _Binding("demand", name)
        if name in self.pools and self.limit_in_force(name) is None and not self.wants_more(name):
            return self._find_binding_inside(name)
        closed = None if name in self.pools else self._find_closed(name)
        if closed is not None:
            return closed
        at = name
        while True:
            resource = self.limit_in_force(at)
            if at == ROOT:
                is_own = resource is not None and self.pools[ROOT].resource_limits[resource] < self.total[resource]
                rule: Rule = "gang" if resource is None else "limit" if is_own else "cluster"
                return _Binding(rule, ROOT, resource)
            if resource is not None:
                return _Binding("limit", at, resource)
            if self.is_gang(at):
                return _Binding("gang", at)
            parent = self.element(at).parent
            if self.pools[parent].mode == "fifo":
                if self.served_before(at):
                    return _Binding("fifo", at)
            elif any(self.wants_more(sibling) for sibling in self.siblings(at)):
                return _Binding(self._rule_among_rivals(at), at)
            at = parent

    def _find_closed(self, name: str) -> _Binding | None:
        """Return the nearest pool above whose limit is 0 for some resource that the operation demands."""
        demand = self.shares(name).demand_share
        at = name
        while at != ROOT:
            at = self.element(at).parent
            limits = self.shares(at).limits_share
            for r in range(len(RESOURCES)):
                if demand[r] > TOLERANCE > limits[r]:
                    return _Binding("limit", at, r)
        return None

    def _find_binding_inside(self, name: str) -> _Binding:
        """Return the first limit on the way down from a pool to an unsatisfied element, or the rule "gang"."""
        at, resource = name, None
        while resource is None and at in self.pools:
            at = next(child for child in self.children[at] if not self.is_satisfied(child))
            resource = self.limit_in_force(at)
        return _Binding("gang" if resource is None else "limit", at, resource)

    def _rule_among_rivals(self, name: str) -> Rule:
        """Return the rule of an element whose siblings also want more: "weight", unless guarantees take everything."""
        parts = self.shares(name).fair_share
        level = [name, *self.siblings(name)]
        if any(_is_some(self.shares(other).fair_share.weight_proportional) for other in level):
            return "weight"
        if _is_some(parts.integral_guarantee):
            return "relaxed" if self.pools[name].integral_guarantees.guarantee_type == "relaxed" else "burst"
        return "strong_guarantee" if _is_some(parts.strong_guarantee) else "cluster"


def _covers(a: Vector, b: Vector) -> bool:
    return all(x >= y - TOLERANCE for x, y in zip(a, b, strict=True))


def _is_some(a: Vector) -> bool:
    return max(a) > TOLERANCE


def _describe_binding(tree: _Tree, name: str, binding: _Binding) -> str:
    shares = tree.shares(name)
    r = RESOURCES.index(shares.dominant_resource)
    gets, total = shares.fair_share.total[r], tree.total[r]
    amount = f"{format_amount(r, gets * total)} of {format_amount(r, total)} {RESOURCES[r]}"
    share_of = f"{format_percent(gets)} % of the cluster ({amount})" if _is_some(shares.fair_share.total) else "nothing"
    return f"{printable(name)} gets {share_of}: {DESCRIBE[binding.rule](tree, name, binding)}."


def _make_step(tree: _Tree, name: str, binding: _Binding) -> PathStep:
    shares = tree.shares(name)
    r = RESOURCES.index(shares.dominant_resource)
    parts, total = shares.fair_share, tree.total[r]
    own, cut = tree.limit_in_force(name), ""
    if name == binding.at and binding.rule != "demand":
        cut = DESCRIBE[binding.rule](tree, name, binding)
    elif own is not None:
        by_limit = _describe_limit(tree, name, _Binding("limit", name, own))
        cut = f"all {RESOURCES[own]} is distributed" if name == ROOT else by_limit
    amounts = (shares.demand_share, parts.total, parts.strong_guarantee, parts.integral_guarantee)
    demand, share_of, strong, integral = (each[r] * total for each in amounts)
    return PathStep(name, RESOURCES[r], demand, share_of, strong, integral, share_of - strong - integral, cut)


def _of(tree: _Tree, word: str, name: str, at: str) -> str:
    """Return ``its weight``; or ``the weight of NAME`` with the place, for a pool above or an element inside."""
    if at == name:
        return f"its {word}"
    return f"the {word} of {printable(at)} {'above' if at in tree.path(name) else 'inside'} it"


def _describe_demand(tree: _Tree, name: str, _binding: _Binding) -> str:
    if _is_some(tree.shares(name).demand_share):
        return "its whole demand"
    operation = tree.operations.get(name)
    none_here = "the cluster has none of the resources it demands"
    return none_here if operation and any(operation.demand) else "it demands nothing"


def _describe_limit(tree: _Tree, name: str, binding: _Binding) -> str:
    at, r = binding.at, binding.resource
    assert r is not None
    return f"limited by {_of(tree, _limit_word(tree, at, r), name, at)}, {_limit_text(tree, at, r)}"


def _limit_word(tree: _Tree, name: str, r: int) -> str:
    operation = tree.operations.get(name)
    if operation is not None and operation.max_share_ratio < operation.resource_limits[r] / tree.total[r]:
        return "max_share_ratio"
    return "resource_limits"


def _limit_text(tree: _Tree, name: str, r: int) -> str:
    limit = tree.shares(name).limits_share[r]
    return f"{format_percent(limit)} % of {RESOURCES[r]} ({format_amount(r, limit * tree.total[r])})"


def _describe_gang(tree: _Tree, name: str, binding: _Binding) -> str:
    if binding.at == ROOT:
        return NO_STEP
    if binding.at != name:
        return f"the gang {printable(binding.at)} inside it demands more than its own limits allow"
    shares, resource = tree.shares(name), tree.shares(name).dominant_resource
    demand = format_percent(shares.demand_share[RESOURCES.index(resource)])
    whole = f"it is a gang, which gets its whole demand at once or nothing, and {demand} % of {resource}"
    if tree.never_fits(name):
        return f"{whole} is more than its own limits allow"
    return f"{whole} does not fit{_describe_scarce(tree, name) if tree.find_scarce(name) else ''}"


def _describe_fifo(tree: _Tree, name: str, binding: _Binding) -> str:
    before = tree.served_before(binding.at)
    verb = "comes" if len(before) == 1 else "come"
    place = _of(tree, "place in fifo order", name, binding.at)
    return f"limited by {place}, {_list_names(before)} {verb} first{_describe_scarce(tree, binding.at)}"


def _describe_weight(tree: _Tree, name: str, binding: _Binding) -> str:
    part = _weight_among(tree, binding.at, tree.wants_more)
    weight = _of(tree, "weight", name, binding.at)
    return f"limited by {weight}, {part} among the siblings that still want more{_describe_scarce(tree, binding.at)}"


def _describe_guarantee(tree: _Tree, name: str, binding: _Binding) -> str:
    words = {"strong_guarantee": "strong guarantee", "burst": "burst guarantee", "relaxed": "relaxed guarantee"}
    guarantee = _of(tree, words[binding.rule], name, binding.at)
    return f"limited to {guarantee}, nothing is left to distribute by weight{_describe_scarce(tree, binding.at)}"


def _describe_cluster(tree: _Tree, name: str, binding: _Binding) -> str:
    if binding.resource is not None:
        return f"it has the rest of the cluster: all {RESOURCES[binding.resource]} is distributed"
    who = "it has" if binding.at == name else f"{printable(binding.at)} above it has"
    return f"{who} no guarantee, and the guarantees of others leave nothing{_describe_scarce(tree, binding.at)}"


DESCRIBE: Final[dict[Rule, Callable[[_Tree, str, _Binding], str]]] = {
    "demand": _describe_demand, "limit": _describe_limit, "gang": _describe_gang, "fifo": _describe_fifo,
    "weight": _describe_weight, "strong_guarantee": _describe_guarantee, "burst": _describe_guarantee,
    "relaxed": _describe_guarantee, "cluster": _describe_cluster,
}  # fmt: skip


def _describe_scarce(tree: _Tree, name: str) -> str:
    scarce = tree.find_scarce(name)
    if scarce is None:
        return f"; {NO_STEP}"
    pool, r = scarce
    if pool == ROOT:
        return f"; {RESOURCES[r]} is the scarce resource"
    return f"; {printable(pool)} above it is at its limit, {_limit_text(tree, pool, r)}"


def _weight_among(tree: _Tree, name: str, counts: Callable[[str], bool]) -> str:
    """Return, as ``1 of 4``, an element's weight and the total weight of the element and the siblings that count."""
    own = tree.element(name).weight
    others = sum_in_order(tree.element(sibling).weight for sibling in tree.siblings(name) if counts(sibling))
    return f"{own:g} of {own + others:g}"


def _list_names(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:SHOWN_NAMES])
    return f"{shown} and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else shown


def _describe_element(tree: _Tree, name: str) -> list[str]:
    """Return a line with the element's share and the parts of the share, then a line for each setting that matters."""
    shares = tree.shares(name)
    r = RESOURCES.index(shares.dominant_resource)
    parts = shares.fair_share
    operation = tree.operations.get(name)
    if operation is None:
        kind = f"{tree.pools[name].mode} pool"
        sums = (parts.strong_guarantee[r], parts.integral_guarantee[r], parts.weight_proportional[r])
        sources = " = {} strong + {} integral + {} by weight".format(*map(format_percent, sums))
    else:
        kind, sources = "gang operation" if tree.is_gang(name) else "operation", ""
    total, demand = format_percent(parts.total[r]), format_percent(shares.demand_share[r])
    lines = [f"  {printable(name)}, {kind}: {total} of {demand} {RESOURCES[r]} demanded{sources}"]
    details: list[str] = []
    if name != ROOT:
        details.append(_describe_place(tree, name))
    if operation is None:
        details += _describe_strong(tree, name)
        details += _describe_integral(tree, name)
    details += _describe_limits(tree, name)
    return lines + [f"    {detail}" for detail in details]


def _describe_place(tree: _Tree, name: str) -> str:
    parent = tree.element(name).parent
    if tree.pools[parent].mode == "fifo":
        before = tree.served_before(name)
        after = f"after {_list_names(before)}" if before else "nothing before it"
        moved = ""
        if tree.shares(name).effective_fifo_index is not None:
            moved = f" ({tree.shares(name).fifo_index} before gangs that do not fit were put back)"
        return f"place {tree.fifo_index(name)} of fifo pool {printable(parent)}, from 0{moved}: {after}"
    if not tree.siblings(name):
        return "no siblings to share with"
    among = _weight_among(tree, name, lambda _: True)
    wanting = f", {_weight_among(tree, name, tree.wants_more)} with those that want more" * tree.wants_more(name)
    return f"weight {among} among all siblings{wanting}"


def _describe_strong(tree: _Tree, name: str) -> list[str]:
    shares, pool = tree.shares(name), tree.pools[name]
    guaranteed = _guaranteed(tree, name)
    if name == ROOT or not _is_some(guaranteed):
        return []
    texts = [
        f"{format_percent(x)} {resource} ({'inferred' if configured is None else 'configured'})"
        for x, resource, configured in zip(guaranteed, RESOURCES, pool.strong_guarantee_resources, strict=True)
        if x > TOLERANCE
    ]
    lines = [f"strong guarantee: {', '.join(texts)}"]
    if _is_adjusted(tree, name):
        left = [
            f"{format_percent(after)} {resource}"
            for after, before, resource in zip(shares.strong_guarantee_share, guaranteed, RESOURCES, strict=True)
            if before > after + TOLERANCE
        ]
        lines.append(f"adjusted down to {', '.join(left)}: {_why_adjusted(tree, name)}")
    return lines


def _guaranteed(tree: _Tree, name: str) -> Vector:
    """Return the strong guarantee as it was configured or inferred, before it was adjusted (4)."""
    return share(tree.shares(name).inferred_strong_guarantee_resources, tree.total)


def _is_adjusted(tree: _Tree, name: str) -> bool:
    return not _covers(tree.shares(name).strong_guarantee_share, _guaranteed(tree, name))


def _why_adjusted(tree: _Tree, name: str) -> str:
    """Return at which element of the path the guarantee was first reduced, and what reduced it (6)."""
    cut = next(pool for pool in tree.path(name)[1:] if _is_adjusted(tree, pool))
    shares = tree.shares(cut)
    if not _covers(shares.limits_share, least(_guaranteed(tree, cut), ONE)):
        return f"more than {_of(tree, 'limits', name, cut)} allow"
    parent = tree.element(cut).parent
    if _is_some(shares.strong_guarantee_share_regular_tier) and any(
        _is_some(tree.shares(sibling).strong_guarantee_share_priority_tier) for sibling in tree.siblings(cut)
    ):
        return f"in {printable(parent)} pools with priority_strong_guarantee_adjustment come first"
    if parent == ROOT:
        return "the guarantees of the first level exceed the cluster"
    return f"the guarantees in {printable(parent)} exceed its own"


def _describe_integral(tree: _Tree, name: str) -> list[str]:
    shares, integral = tree.shares(name), tree.pools[name].integral_guarantees
    if name == ROOT or integral.guarantee_type == "none":
        return []
    volume = min((v / t for v, t in zip(shares.accumulated_volume, tree.total, strict=True) if t > 0), default=0.0)
    by_volume = volume / tree.options.integral_smooth_period_s
    flow = shares.resource_flow_ratio
    if integral.guarantee_type == "burst":
        most, held = shares.burst_ratio, "its burst guarantee"
        bound = f"burst guarantee {format_percent(most)}"
        configured = ratio(integral.burst_guarantee_resources, tree.total)
        if configured > most + TOLERANCE:
            bound += f" (scaled down from {format_percent(configured)} since guarantees exceed the cluster)"
    else:
        times = integral.relaxed_share_multiplier_limit
        most, held = times * flow, f"{times:g} x flow"
        bound = f"at most {held} = {format_percent(most)}"
    takes = max(shares.proposed_integral_share)
    if takes < min(by_volume, most) - TOLERANCE:
        why = "its demand and limits take no more"
    else:
        why = f"limited by {held if most <= by_volume else 'its accumulated volume'}"
    volume_text = f"accumulated volume for {format_percent(by_volume)} over one smooth period"
    takes_text = f"gets {format_percent(takes)}, {why}"
    return [f"{integral.guarantee_type}: flow {format_percent(flow)}, {bound}, {volume_text}; {takes_text}"]


def _describe_limits(tree: _Tree, name: str) -> list[str]:
    """Return the limits that are below the element's demand; others have no effect."""
    shares = tree.shares(name)
    in_force = tree.limit_in_force(name)
    if name == ROOT:
        return ["no resource is fully distributed" if in_force is None else f"all {RESOURCES[in_force]} is distributed"]
    texts = [
        f"{_limit_text(tree, name, r)} by {_limit_word(tree, name, r)}{', in force' if r == in_force else ''}"
        for r, limit in enumerate(shares.limits_share)
        if limit < min(shares.demand_share[r], 1.0)
    ]
    return [f"limits: {'; '.join(texts)}"] if texts else []
