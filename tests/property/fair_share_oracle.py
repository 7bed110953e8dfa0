"""A slow and literal fair-share update by the sections of fair_share_update.md, for tests of the fast one. Functions
are lists of vertices, sums are taken over the union of all breakpoints, and searches bisect over doubles. Vectors are
tuples of shares in the order of ``RESOURCES``, absolute resources and volumes are lists in that order, whose cpu is
always a hundredth's multiple, kept as the double nearest to ``n / 100``."""

from __future__ import annotations

import itertools
import math
import operator
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

RESOURCES = ("user_slots", "cpu", "gpu", "memory", "network")
K = len(RESOURCES)
CPU = 1

EPS = 1e-9
COLLINEAR = 1e-15

Vector = tuple[float, ...]
Amounts = list[float]

ZERO: Vector = (0.0,) * K
ONE: Vector = (1.0,) * K
E: Vector = (EPS,) * K

MESSAGES = {
    "promised": (
        29001,
        "Found pools with enabled promised guarantee fair share computation which are nested inside other such pools",
    ),
    "donor": (29002, "Found pools with enabled priority strong guarantee adjustment which do not have a donor"),
    "flow": (29000, "Strong guarantees and resource flows exceed total cluster resources"),
    "burst": (29000, "Strong guarantees and burst guarantees exceed total cluster resources"),
}


# --- 0. Notation -----------------------------------------------------------------------------------------------------


def add(a: Vector, b: Vector) -> Vector:
    return tuple(map(operator.add, a, b))


def sub(a: Vector, b: Vector) -> Vector:
    return tuple(map(operator.sub, a, b))


def low(a: Vector, b: Vector) -> Vector:
    return tuple(map(min, a, b))


def high(a: Vector, b: Vector) -> Vector:
    return tuple(map(max, a, b))


def scale(a: Vector, factor: float) -> Vector:
    return tuple(x * factor for x in a)


def total_of(vectors: Iterable[Vector]) -> Vector:
    """Sum from left to right."""
    result = ZERO
    for v in vectors:
        result = add(result, v)
    return result


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(map(operator.ge, a, b))


def clip(x: float, a: float, b: float) -> float:
    return min(max(x, a), b)


def bisect_max(lo: float, hi: float, holds: Callable[[float], bool]) -> float:
    """Section 0: the largest double of ``[lo, hi]`` for which ``holds``; ``lo`` where it holds nowhere."""
    if holds(hi):
        return hi
    # Non-negative doubles are ordered as their bit patterns are.
    good, bad = _bits(lo), _bits(hi)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(_double(middle)) else (good, middle)
    return _double(good)


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x + 0.0))[0])


def _double(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


# --- 17. Quantisation ------------------------------------------------------------------------------------------------


def nearest(x: float) -> int:
    """Nearest integer, halves away from zero."""
    whole = math.floor(abs(x))
    if abs(x) - whole >= 0.5:
        whole += 1
    return whole if x >= 0 else -whole


def hundredths(x: float) -> float:
    """``x`` as an amount of cpu."""
    return nearest(x * 100) / 100


def times(x: float, factor: float) -> float:
    """An amount of cpu times a number, as an amount of cpu."""
    return nearest(nearest(x * 100) * factor) / 100


def scaled_resources(amounts: Amounts, ratio: float) -> Amounts:
    """Section 17: resources * real, rounded to the nearest amounts."""
    return [times(x, ratio) if r == CPU else nearest(x * ratio) for r, x in enumerate(amounts)]


def scaled_volume(volume: Amounts, factor: float) -> Amounts:
    """Section 17: a volume times a number; only cpu is rounded."""
    return [times(x, factor) if r == CPU else x * factor for r, x in enumerate(volume)]


def volume_of(components: Iterable[float]) -> Amounts:
    """The volume with these components after an addition or the like: brings cpu back to its exact hundredth."""
    return [hundredths(x) if r == CPU else float(x) for r, x in enumerate(components)]


def read_amounts(given: dict[str, Any] | None, unset: float | None) -> list[Any]:
    """Section 1: an object of absolute resources as a list; ``unset`` stands for what is absent."""
    amounts = [(given or {}).get(name) for name in RESOURCES]
    return [unset if x is None else hundredths(x) if r == CPU else int(x) for r, x in enumerate(amounts)]


def microseconds(seconds: float) -> int:
    return nearest(seconds * 1e6)


# --- 8. Piecewise-linear functions -----------------------------------------------------------------------------------


def between(x: float, x0: float, x1: float, v0: Vector, v1: Vector) -> Vector:
    """Section 8: the value at ``x`` on the tilted segment from ``(x0, v0)`` to ``(x1, v1)``."""
    t = (x - x0) / (x1 - x0)
    if t < 0.5:
        return tuple([a + (b - a) * t for a, b in zip(v0, v1, strict=True)])
    return tuple([b - (b - a) * (1 - t) for a, b in zip(v0, v1, strict=True)])


def abscissa(y: float, x0: float, x1: float, y0: float, y1: float) -> float:
    """Where the segment from ``(x0, y0)`` to ``(x1, y1)`` has height ``y``, for ``y0 < y < y1``."""
    return between(y, y0, y1, (x0,), (x1,))[0]


class Function:
    """Section 8: a left-continuous vector function on an interval, as its vertices from left to right. Two neighbours
    with equal x are a jump, which is dropped at the right end of the domain ("trim"). Scalars are vectors of one
    component."""

    def __init__(self, vertices: Iterable[tuple[float, Vector]]) -> None:
        xs: list[float] = []
        vs: list[Vector] = []
        for x, v in vertices:
            if xs and x <= xs[-1]:  # "<" by rounding only
                if v == vs[-1]:
                    continue
                if len(xs) > 1 and xs[-2] == xs[-1]:
                    vs[-1] = v
                    continue
                x = xs[-1]  # noqa: PLW2901
            xs.append(x)
            vs.append(v)
        if len(xs) > 1 and xs[-2] == xs[-1]:
            del xs[-1], vs[-1]
        self.xs = xs
        self.vs = vs

    @property
    def end(self) -> float:
        return self.xs[-1]

    def vertices(self) -> Iterator[tuple[float, Vector]]:
        return zip(self.xs, self.vs, strict=True)

    def breakpoints(self) -> list[float]:
        return sorted(set(self.xs))

    def value(self, x: float) -> Vector:
        """The value at ``x``, which is the left limit; at a jump its lower end."""
        i = bisect_left(self.xs, x)
        if self.xs[i] == x:
            return self.vs[i]
        if i == 0:
            raise ValueError(f"{x} is left of the domain")
        return between(x, self.xs[i - 1], self.xs[i], self.vs[i - 1], self.vs[i])

    def right_limit(self, x: float) -> Vector:
        """The top of the jump at ``x`` if there is one, else the value."""
        i = bisect_right(self.xs, x) - 1
        return self.vs[i] if self.xs[i] == x else self.value(x)

    def compressed(self) -> Function:
        """Section 9.5: merges neighbouring segments whose chord passes all their vertices within 1e-15."""
        points = list(self.vertices())
        kept = points[:1]
        passed: list[tuple[float, Vector]] = []
        for here, after in itertools.zip_longest(points[1:], points[2:]):
            if after is None or not _merges(kept[-1], [*passed, here], after):
                kept.append(here)
                passed = []
            else:
                passed.append(here)
        return Function(kept)


def _merges(start: tuple[float, Vector], passed: list[tuple[float, Vector]], end: tuple[float, Vector]) -> bool:
    """Whether the chord stays close to the vertices between; jumps are never merged."""
    (x0, v0), (x1, v1) = start, end
    abscissas = [x0, *(x for x, _ in passed), x1]
    if any(a == b for a, b in itertools.pairwise(abscissas)):
        return False
    chords = (zip(between(x, x0, x1, v0, v1), v, strict=True) for x, v in passed)
    return all(abs(a - b) <= COLLINEAR for chord in chords for a, b in chord)


def constant(v: Vector, end: float) -> Function:
    return Function([(0.0, v), (end, v)])


def sum_of(functions: Sequence[Function]) -> Function:
    """Section 8: the sum of functions that have one domain."""
    vertices = []
    for x in sorted({x for f in functions for x in f.xs}):
        vertices.append((x, total_of(f.value(x) for f in functions)))
        vertices.append((x, total_of(f.right_limit(x) for f in functions)))
    return Function(vertices)


def minimum(f: Function, g: Function) -> Function:
    """Section 8: the pointwise minimum of two scalar functions that have one domain."""
    breakpoints = sorted({*f.xs, *g.xs})
    vertices = []
    for x, following in itertools.zip_longest(breakpoints, breakpoints[1:]):
        vertices.append((x, low(f.value(x), g.value(x))))
        vertices.append((x, low(f.right_limit(x), g.right_limit(x))))
        if following is None:
            continue
        gap_left = f.right_limit(x)[0] - g.right_limit(x)[0]
        gap_right = f.value(following)[0] - g.value(following)[0]
        if gap_left * gap_right < 0:
            t = gap_left / (gap_left - gap_right)
            crossing = x + (following - x) * t
            if x < crossing < following:
                vertices.append((crossing, low(f.value(crossing), g.value(crossing))))
    return Function(vertices)


def composition(f: Function, g: Function) -> Function:
    """Section 8: ``f o g`` for a scalar nondecreasing ``g``."""
    inner = f.breakpoints()
    outer = g.breakpoints()
    vertices = []
    for x, following in itertools.zip_longest(outer, outer[1:]):
        y_minus, y_plus = g.value(x)[0], g.right_limit(x)[0]
        y_end = y_plus if following is None else g.value(following)[0]
        vertices.append((x, f.value(y_minus)))
        vertices.append((x, f.right_limit(y_plus) if y_end > y_plus else f.value(y_plus)))
        if following is None:
            continue
        for y in inner[bisect_right(inner, y_plus) : bisect_left(inner, y_end)]:
            crossing = abscissa(y, x, following, y_plus, y_end)
            vertices.append((crossing, f.value(y)))
            vertices.append((crossing, f.right_limit(y)))
    return Function(vertices)


# --- 1. Inputs, and what is known of an element ----------------------------------------------------------------------


@dataclass
class Parts:
    """Section 12: a share and its three parts."""

    total: Vector = ZERO
    strong_guarantee: Vector = ZERO
    integral_guarantee: Vector = ZERO
    weight_proportional: Vector = ZERO


@dataclass(eq=False)
class Element:
    """The root, a pool or an operation: what is given (section 1), and what the phases add to it."""

    name: str
    kind: str
    given: dict[str, Any]
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)

    weight: float = 1.0
    fifo: bool = False
    gang: bool = False
    limits: Amounts = field(default_factory=lambda: [math.inf] * K)
    demand: Amounts = field(default_factory=lambda: [0] * K)
    usage: Amounts = field(default_factory=lambda: [0] * K)
    configured_guarantee: list[float | None] = field(default_factory=lambda: [None] * K)
    integral: str = "none"

    # 3. Attributes
    limits_share: Vector = ZERO
    strong: Vector = ZERO
    usage_share: Vector = ZERO
    demand_share: Vector = ZERO
    dominant_resource: str = "cpu"
    burst_ratio: float = 0.0
    flow_ratio: float = 0.0
    total_burst_ratio: float = 0.0
    total_flow_ratio: float = 0.0
    fifo_index: int | None = None

    # 4. to 7.
    guarantee: Amounts = field(default_factory=lambda: [0] * K)
    volume: Amounts = field(default_factory=lambda: [0.0] * K)
    volume_overflow: Amounts = field(default_factory=lambda: [0.0] * K)
    acceptable_volume: Amounts = field(default_factory=lambda: [0.0] * K)
    accepted_free_volume: Amounts = field(default_factory=lambda: [0.0] * K)
    children_overflow: Amounts = field(default_factory=lambda: [0.0] * K)
    effective_priority: bool = False
    tiers: list[Vector] = field(default_factory=lambda: [ZERO, ZERO])
    estimated: Vector = ZERO
    effective_order: list[Element] | None = None
    effective_fifo_index: int | None = None

    # 9. to 13.
    proposed: Vector = ZERO
    last_share_ratio: float = 0.0
    by_fit_factor: Function | None = None
    fit_factor: Function | None = None
    by_suggestion: Function | None = None
    child_shares: list[Function] = field(default_factory=list)
    fair_share: Parts = field(default_factory=Parts)
    promised: Parts = field(default_factory=Parts)

    @property
    def composite(self) -> bool:
        return self.kind != "operation"

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.given.get(name, default))

    def integral_setting(self, name: str, default: Any) -> Any:
        value = (self.given.get("integral") or {}).get(name)
        return default if value is None else value

    @property
    def child_pools(self) -> list[Element]:
        return [c for c in self.children if c.composite]

    @property
    def ordered_children(self) -> list[Element]:
        """Children as sections 9.3 and 12 take them."""
        if self.effective_order is not None:
            return self.effective_order
        return fifo_order(self) if self.fifo else self.children

    def tree(self) -> Iterator[Element]:
        """The element and all below it in pre-order."""
        yield self
        for c in self.children:
            yield from c.tree()

    def path(self) -> list[Element]:
        """The element and its ancestors except the root."""
        return [] if self.parent is None else [self, *self.parent.path()]

    def ratio(self, child: Element) -> float:
        """Section 9.2: ``w_c / wmin``."""
        return child.weight / min(c.weight for c in self.children if c.weight > EPS)


def fifo_order(pool: Element) -> list[Element]:
    """Section 3: weight descending, start_time ascending, order in the list."""
    return sorted(pool.children, key=lambda c: (-c.weight, c.given.get("start_time") or 0))


def read_tree(case: dict[str, Any], total: Amounts) -> Element:
    """Section 1: the tree, with child pools before operations; demand and usage of pools are their children's sums."""
    root = Element("<root>", "root", case.get("root") or {})
    by_name = {root.name: root}
    described = [("pool", p) for p in case.get("pools", [])] + [("operation", o) for o in case.get("operations", [])]
    for kind, given in described:
        e = Element(given["name"], kind, given, by_name[given["parent"]])
        by_name[e.name] = e
        by_name[given["parent"]].children.append(e)
        e.weight = float(given.get("weight", 1.0))
        e.limits = read_amounts(given.get("resource_limits"), math.inf)
        if kind == "pool":
            read_pool(e, total)
        else:
            e.gang = e.flag("gang")
            e.demand = read_amounts(given.get("demand"), 0)
            e.usage = read_amounts(given.get("usage"), 0)
    for e in reversed(list(root.tree())):
        if e.composite:
            e.demand = sum_amounts(c.demand for c in e.children)
            e.usage = sum_amounts(c.usage for c in e.children)
    return root


def read_pool(pool: Element, total: Amounts) -> None:
    """Sections 1 and 18: settings of a pool, with its max_share_ratio folded into its limits."""
    ratio = pool.given.get("max_share_ratio")
    if ratio is not None:
        pool.limits = list(map(min, pool.limits, scaled_resources(total, ratio)))
    pool.fifo = pool.given.get("mode", "fair_share") == "fifo"
    pool.configured_guarantee = read_amounts(pool.given.get("strong_guarantee_resources"), None)
    pool.integral = pool.integral_setting("type", "none")
    pool.volume = volume_of((pool.integral_setting("accumulated_volume", {}).get(name) or 0) for name in RESOURCES)
    pool.last_share_ratio = float(pool.integral_setting("last_share_ratio", 0.0))


def sum_amounts(amounts: Iterable[Amounts]) -> Amounts:
    result: Amounts = [0] * K
    for x in amounts:
        result = list(map(operator.add, result, x))
    result[CPU] = hundredths(result[CPU])
    return result


# --- 2. The update ---------------------------------------------------------------------------------------------------


def compute(case: dict[str, Any]) -> dict[str, Any]:
    """Section 2: all phases of one update, in their order. ``elements`` of the result: by name, with every documented
    field; vectors are lists in the order of ``RESOURCES``, absent indices are None."""
    update = Update(case)
    update.check_config()
    update.infer_guarantees(update.root)
    update.compute_attributes()
    update.compute_volumes()
    update.validate_guarantees()
    update.compute_tiers(update.root)
    update.adjust_guarantees(update.root)
    update.estimate_guarantees()
    update.reorder_fifo()
    for pool in update.burst_pools:
        update.satisfy_burst(pool)
    update.satisfy_relaxed()
    update.prepare(update.root)
    update.distribute(update.root, 1.0, "fair_share")
    update.promise(update.root)
    update.total_root()
    return {
        "id": case.get("id"),
        "errors": [{"code": MESSAGES[e][0], "message": MESSAGES[e][1]} for e in update.errors],
        "elements": {e.name: describe(e) for e in update.root.tree()},
    }


class Update:
    """One update: the tree, the options and the phases."""

    def __init__(self, case: dict[str, Any]) -> None:
        options = case.get("options") or {}
        self.main_resource = RESOURCES.index(options.get("main_resource", "cpu"))
        self.capacity_saturation_s = float(options.get("integral_pool_capacity_saturation_period_s", 86400))
        self.smooth_period_s = float(options.get("integral_smooth_period_s", 60))
        self.step_function_for_gang = bool(options.get("step_function_for_gang_operations", False))
        self.fifo_reordering = bool(options.get("fifo_reordering", False))
        self.improved = bool(options.get("improved_fair_share_by_fit_factor", False))
        self.improved_distribution_gap = bool(options.get("improved_distribution_gap", False))

        previous = case.get("previous_update_time")
        self.elapsed_s = None if previous is None else max(microseconds(case["now"]) - microseconds(previous), 0) / 1e6
        self.total: Amounts = read_amounts(case.get("total_resources"), 0)
        self.errors: list[str] = []
        self.root = read_tree(case, self.total)
        pools = [e for e in self.root.tree() if e.kind == "pool"]
        self.burst_pools = [p for p in pools if p.integral == "burst"]
        self.relaxed_pools = [p for p in pools if p.integral == "relaxed"]

    def share(self, amounts: Sequence[float]) -> Vector:
        """Section 0: 0 where the cluster has nothing."""
        return tuple(x / t if t else 0.0 for x, t in zip(amounts, self.total, strict=True))

    def ratios(self, amounts: Sequence[float]) -> list[float]:
        """Fractions of the totals of resources that the cluster has."""
        return [x / t for x, t in zip(amounts, self.total, strict=True) if t > 0]

    # --- 15. Config checks

    def check_config(self) -> None:
        """Section 15; sets which pools are priority pools in effect."""

        def nested(e: Element, above: bool) -> bool:
            here = e.flag("compute_promised_guarantee_fair_share")
            return (here and above) or any(nested(c, above or here) for c in e.child_pools)

        def without_donor(e: Element, donor_above: bool) -> bool:
            priority = e.flag("priority_strong_guarantee_adjustment")
            e.effective_priority = priority and donor_above
            donor = e.flag("priority_strong_guarantee_adjustment_donorship")
            below = [without_donor(c, donor or (donor_above and not priority)) for c in e.child_pools]
            return (priority and not donor_above) or any(below)

        if nested(self.root, False):
            self.errors.append("promised")
        if without_donor(self.root, False):
            self.errors.append("donor")

    # --- 4. Inferred strong guarantees

    def infer_guarantees(self, e: Element) -> None:
        """Section 4, for the children of ``e``."""
        if e is self.root:
            e.guarantee = list(self.total)
        main = self.main_resource
        for c in e.children:
            c.guarantee = [0 if x is None else x for x in c.configured_guarantee]
        configured = sum_amounts(c.guarantee for c in e.children)
        for r in range(K):
            unset = [c for c in e.children if c.configured_guarantee[r] is None]
            if r == main or not unset:
                continue
            whole = e.guarantee[main]
            inferred = [c.guarantee[main] / whole * e.guarantee[r] if whole else 0.0 for c in unset]
            residual = max(e.guarantee[r] - configured[r], 0)
            if e is not self.root and sum(inferred) > residual:
                factor = residual / sum(inferred)
                inferred = [x * factor for x in inferred]
            for c, x in zip(unset, inferred, strict=True):
                c.guarantee[r] = hundredths(x) if r == CPU else math.trunc(x)
        for c in e.children:
            self.infer_guarantees(c)

    # --- 3. Attributes

    def compute_attributes(self) -> None:
        """Section 3, children before parents."""
        for e in reversed(list(self.root.tree())):
            e.limits_share = self.share(list(map(min, e.limits, self.total)))
            if e.kind == "operation" and e.given.get("max_share_ratio") is not None:
                e.limits_share = low(e.limits_share, scale(ONE, e.given["max_share_ratio"]))
            e.strong = self.share(e.guarantee)
            e.usage_share = self.share(e.usage)
            e.demand_share = self.share(e.demand)
            e.dominant_resource = self.dominant_resource(e)
            if e.kind == "pool" and e.integral != "none":
                burst = read_amounts(e.integral_setting("burst_guarantee_resources", {}), 0)
                flow = read_amounts(e.integral_setting("resource_flow", {}), 0)
                e.burst_ratio = max(self.ratios(burst), default=0.0)
                e.flow_ratio = max(self.ratios(flow), default=0.0)
            e.total_burst_ratio = e.burst_ratio + sum(c.total_burst_ratio for c in e.child_pools)
            e.total_flow_ratio = e.flow_ratio + sum(c.total_flow_ratio for c in e.child_pools)
            if e.fifo:
                for i, c in enumerate(fifo_order(e)):
                    c.fifo_index = i
        self.root.strong = self.share(sum_amounts(c.guarantee for c in self.root.children))

    def dominant_resource(self, e: Element) -> str:
        """Section 3: by usage if there is any, else by demand; the first of equals."""
        ratios = self.share(e.usage if any(e.usage) else e.demand)
        return RESOURCES[ratios.index(max(ratios)) if any(ratios) else CPU]

    # --- 5. Integral resource volumes

    def compute_volumes(self) -> None:
        """Section 5."""
        if self.elapsed_s is not None and any(self.total):
            for pool in [*self.burst_pools, *self.relaxed_pools]:
                self.refill(pool, self.elapsed_s)
        self.collect_overflow(self.root)
        self.distribute_free_volume(self.root)

    def refill(self, pool: Element, elapsed_s: float) -> None:
        """Section 5.1."""
        capacity = scaled_volume(scaled_resources(self.total, pool.flow_ratio), self.capacity_saturation_s)
        produced = scaled_volume(self.total, elapsed_s)
        grown = scaled_volume(produced, pool.flow_ratio)
        spent = scaled_volume(produced, pool.last_share_ratio)
        old = pool.volume
        volume = volume_of(max(v + g - s, 0) for v, g, s in zip(old, grown, spent, strict=True))
        upper = volume_of(map(max, old, capacity))
        pool.volume_overflow = volume_of(max(v - u, 0) for v, u in zip(volume, upper, strict=True))
        if pool.integral_setting("can_accept_free_volume", True):
            pool.acceptable_volume = volume_of(max(c - v, 0) for c, v in zip(capacity, volume, strict=True))
        pool.volume = volume_of(map(min, volume, upper))

    def collect_overflow(self, e: Element) -> None:
        """Section 5.2: children first; integral pools are leaves."""
        if e.integral != "none":
            return
        for c in e.child_pools:
            self.collect_overflow(c)
        e.children_overflow = sum_amounts(c.volume_overflow for c in e.child_pools)
        acceptable = sum_amounts(c.acceptable_volume for c in e.child_pools)
        surplus = volume_of(map(operator.sub, e.children_overflow, acceptable))
        e.volume_overflow = [max(d, 0.0) for d in surplus]
        if e.integral_setting("can_accept_free_volume", True):
            e.acceptable_volume = [max(-d, 0.0) for d in surplus]

    def distribute_free_volume(self, e: Element) -> None:
        """Section 5.3, from ``e`` down."""
        if e.integral != "none":
            e.volume = sum_amounts([e.volume, e.accepted_free_volume])
            return
        if e.integral_setting("should_distribute_free_volume_among_children", False):
            free = sum_amounts([e.accepted_free_volume, e.children_overflow])
            for r in range(K):
                if free[r]:
                    share_free_volume(e.child_pools, r, free[r])
        for c in e.child_pools:
            self.distribute_free_volume(c)

    def volume_ratio(self, pool: Element) -> float:
        """Section 5.4."""
        return min(self.ratios(pool.volume), default=0.0) / self.smooth_period_s

    # --- 6. Guarantee validation and adjustment

    def validate_guarantees(self) -> None:
        """Section 6: errors of overcommit; too much burst shrinks the root's guarantee and the burst ratios."""
        root = self.root
        guaranteed = sum_amounts(c.guarantee for c in root.children)
        flow = scaled_resources(self.total, root.total_flow_ratio)
        if not dominates(self.total, sum_amounts([guaranteed, flow])):
            self.errors.append("flow")
        burst = scaled_resources(self.total, root.total_burst_ratio)
        if not dominates(self.total, sum_amounts([guaranteed, burst])):
            self.errors.append("burst")
            bursts = sum(p.burst_ratio for p in self.burst_pools)
            phi = bisect_max(0.0, 1.0, lambda f: dominates(ONE, add(scale(root.strong, f), scale(ONE, f * bursts))))
            root.strong = scale(root.strong, phi)
            for pool in self.burst_pools:
                pool.burst_ratio *= phi

    def compute_tiers(self, e: Element) -> None:
        """Section 6.1: tiers are [priority, regular]."""
        if not e.composite:
            return
        for c in e.children:
            self.compute_tiers(c)
        priority = total_of(c.tiers[0] for c in e.children)
        if e.effective_priority:
            e.tiers = [e.strong, ZERO]
        elif e.flag("priority_strong_guarantee_adjustment_donorship"):
            e.tiers = [ZERO, e.strong]
        else:
            e.tiers = [priority, sub(e.strong, priority)]

    def adjust_guarantees(self, e: Element) -> None:
        """Section 6.2, from ``e`` down."""
        e.strong = low(e.strong, e.limits_share)
        fixed = ZERO
        for tier in range(2):
            total = total_of(c.tiers[tier] for c in e.children)
            available = high(sub(e.strong, fixed), ZERO)
            if dominates(available, total):
                fixed = add(fixed, total)
                continue
            phi = greatest_scale(total, available)
            for c in e.children:
                c.tiers[tier] = scale(c.tiers[tier], phi)
                c.tiers[tier + 1 :] = [ZERO] * (1 - tier)
            break
        for c in e.children:
            c.strong = add(*c.tiers) if c.composite else ZERO
            if c.composite:
                self.adjust_guarantees(c)

    def estimate_guarantees(self) -> None:
        """Section 6.3."""
        self.root.estimated = self.root.strong
        for e in self.root.tree():
            left = e.estimated
            for c in e.children:
                c.estimated = low(c.strong, left)
                left = sub(left, c.estimated)
            weights = sum(c.weight for c in e.children)
            for c in e.children:
                c.estimated = add(c.estimated, scale(left, c.weight / weights if weights else math.nan))

    # --- 7. FIFO reordering

    def reorder_fifo(self) -> None:
        """Section 7, for all FIFO pools."""
        if not (self.step_function_for_gang and self.fifo_reordering):
            return
        for e in self.root.tree():
            flags = e.flag("step_function_for_gang_operations", True) and e.flag("fifo_reordering")
            if e.fifo and flags and not dominates(E, e.strong):
                order = reordered(e)
                if order != fifo_order(e):
                    e.effective_order = order
                    for i, c in enumerate(order):
                        c.effective_fifo_index = i

    # --- 9. The three functions of an element

    def prepare(self, e: Element) -> None:
        """Section 9: builds what is missing of the functions of ``e`` and all below it (11.1: others stay)."""
        for c in e.children:
            self.prepare(c)
        if e.by_suggestion is not None:
            return
        if not e.composite:
            e.by_fit_factor = self.operation_function(e)
        elif not e.children:
            e.by_fit_factor = constant(ZERO, 1.0)
        elif e.fifo:
            e.by_fit_factor = fifo_function(e)
        elif self.improved:
            e.child_shares = improved_child_shares(e)
            e.by_fit_factor = sum_of(e.child_shares)
        else:
            e.by_fit_factor = sum_of([scaled_function(c, e.ratio(c)) for c in e.children])
        e.fit_factor = fit_factor_function(e.by_fit_factor, e.limits_share, add(e.strong, e.proposed))
        e.by_suggestion = composition(e.by_fit_factor, e.fit_factor).compressed()

    def operation_function(self, e: Element) -> Function:
        """Section 9.1."""
        u, d = e.usage_share, e.demand_share
        assert e.parent is not None
        if self.step_function_for_gang and e.parent.flag("step_function_for_gang_operations", True) and e.gang:
            return Function([(0.0, ZERO), (1.0, ZERO), (1.0, d), (2.0, d)])
        greatest = max(u)
        vertices: list[tuple[float, Vector]] = [(0.0, ZERO)]
        for edge in sorted({x for x in u if 0 < x < greatest}):
            f = edge / greatest
            vertices.append((f, tuple(min(edge, x) for x in u)))
        return Function([*vertices, (1.0, u), (2.0, d)])

    # --- 10. Burst pools

    def available(self, pool: Element) -> Vector:
        """Section 10.2."""
        result = ONE
        for c in pool.path():
            result = low(result, sub(c.limits_share, add(c.strong, c.proposed)))
        return result

    def raise_proposed(self, pool: Element, delta: Vector) -> None:
        """Section 10.6."""
        for c in pool.path():
            c.proposed = fit(c, add(c.proposed, delta))
        self.root.proposed = add(self.root.proposed, delta)

    def satisfy_burst(self, pool: Element) -> None:
        """Section 10."""
        ratio = min(pool.burst_ratio, self.volume_ratio(pool))
        pool.proposed = fit(pool, low(scale(ONE, ratio), self.available(pool)))
        self.prepare(pool)
        pool.proposed = ZERO
        delta = high(sub(suggested(pool, 0.0), pool.strong), ZERO)
        self.raise_proposed(pool, delta)
        discard(pool)
        pool.last_share_ratio = max(delta)

    # --- 11. Relaxed pools

    def satisfy_relaxed(self) -> None:
        """Section 11."""
        taken = total_of(low(add(c.strong, c.proposed), c.demand_share) for c in self.root.children)
        free = high(sub(ONE, taken), ZERO)
        pools: list[tuple[Element, float, Vector]] = []
        for pool in self.relaxed_pools:
            ratio = self.volume_ratio(pool)
            if ratio == 0:
                continue
            pools.append((pool, ratio, pool.limits_share))
            multiplier = float(pool.integral_setting("relaxed_share_multiplier_limit", 3.0))
            cap = min(ratio, multiplier * pool.flow_ratio)
            pool.limits_share = low(pool.limits_share, add(pool.strong, scale(ONE, cap)))
            self.prepare(pool)
        if not pools:
            return
        least = min(ratio for _, ratio, _ in pools)

        def delta_at(pool: Element, ratio: float, f: float) -> Vector:
            return high(sub(suggested(pool, min(1.0, f * (ratio / least))), pool.strong), ZERO)

        phi = bisect_max(0.0, 1.0, lambda f: dominates(free, total_of(delta_at(p, ratio, f) for p, ratio, _ in pools)))
        for pool, ratio, limits_share in pools:
            delta = delta_at(pool, ratio, phi)
            pool.limits_share = limits_share
            delta = low(delta, self.available(pool))
            self.raise_proposed(pool, delta)
            discard(pool)
            pool.last_share_ratio = max(delta)

    # --- 12. to 14. Distribution

    def distribute(self, e: Element, suggestion: float, into: str) -> None:
        """Section 12 from ``e`` down, into one of the fields ``fair_share`` and ``promised``."""
        if self.improved:
            assign_improved(e, suggested(e, suggestion), into, self.improved_distribution_gap)
        else:
            assign(e, suggestion, into)

    def promise(self, e: Element) -> None:
        """Section 13."""
        if e.flag("compute_promised_guarantee_fair_share"):
            self.distribute(e, 0.0, "promised")
            return
        for c in e.child_pools:
            self.promise(c)

    def total_root(self) -> None:
        """Section 14."""
        root = self.root
        total = total_of(c.fair_share.total for c in root.children)
        strong = low(total, total_of(c.fair_share.strong_guarantee for c in root.children))
        rest = sub(total, strong)
        integral = low(rest, root.proposed)
        root.fair_share = Parts(total, strong, integral, sub(rest, integral))


# --- Parts of the phases that need nothing but an element ------------------------------------------------------------


def share_free_volume(children: list[Element], r: int, free: float) -> None:
    """Section 5.3 for resource ``r``: hands ``free`` to the children by flow, up to what they accept."""

    def part(volume: float, factor: float) -> float:
        return times(volume, factor) if r == CPU else volume * factor

    def relative(volume: float) -> float:
        return hundredths(volume) if r == CPU else volume

    hungry = [c for c in children if c.acceptable_volume[r] > EPS and c.total_flow_ratio > EPS]
    hungry.sort(key=lambda c: relative(c.acceptable_volume[r] / c.total_flow_ratio))
    weights = sum(c.total_flow_ratio for c in hungry)
    passed = 0
    for c in hungry:
        if part(free, c.total_flow_ratio / weights) < c.acceptable_volume[r]:
            break
        c.accepted_free_volume[r] = c.acceptable_volume[r]
        free -= c.acceptable_volume[r]
        if r == CPU:
            free = hundredths(free)
        weights -= c.total_flow_ratio
        passed += 1
    for c in hungry[passed:]:
        c.accepted_free_volume[r] = part(free, c.total_flow_ratio / weights)


def greatest_scale(v: Vector, bound: Vector) -> float:
    """Section 6.2: the greatest factor of at most 1 with which ``v`` stays within ``bound``."""
    return bisect_max(0.0, 1.0, lambda f: dominates(bound, scale(v, f)))


def reordered(pool: Element) -> list[Element]:
    """Section 7: operations that are accepted within the guarantee, then those deferred."""
    accepted: list[Element] = []
    deferred: list[Element] = []
    acc = ZERO
    stopped = False
    for c in fifo_order(pool):
        d = low(c.demand_share, c.limits_share)
        if c.gang and not dominates(c.limits_share, c.demand_share):
            d = ZERO
        fits = dominates(add(pool.strong, E), add(acc, d))
        if stopped or (c.gang and not any(c.usage) and not fits):
            deferred.append(c)
            continue
        accepted.append(c)
        acc = add(acc, d)
        stopped = not c.gang and not fits
    return accepted + deferred


def scaled_function(child: Element, ratio: float) -> Function:
    """Section 9.2: ``x -> B_c(min(1, x * ratio))`` on [0, 1]."""
    b = child.by_suggestion
    assert b is not None
    if ratio < 1:  # only where the child's weight is negligible
        return Function([*[(x / ratio, v) for x, v in b.vertices() if x < ratio], (1.0, b.value(ratio))])
    return Function([*((x / ratio, v) for x, v in b.vertices()), (1.0, b.vs[-1])])


def improved_child_shares(pool: Element) -> list[Function]:
    """Section 9.2, improved mode: ``C_c`` for every child."""
    scaled = [scaled_function(c, pool.ratio(c)) for c in pool.children]
    pairs = sorted((x, j) for j, b in enumerate(scaled) for x in b.breakpoints())
    result = []
    for i, b in enumerate(scaled):
        vertices = []
        for k, (x, j) in enumerate(pairs):
            if i >= j:
                vertices.append((float(k), b.value(x)))
            if i <= j:
                vertices.append((float(k), b.right_limit(x)))
        result.append(Function(vertices))
    return result


def fifo_function(pool: Element) -> Function:
    """Section 9.3: the functions of the children one after another."""
    vertices = []
    before = ZERO
    for k, c in enumerate(pool.ordered_children):
        assert c.by_suggestion is not None
        vertices += [(k + x, add(before, v)) for x, v in c.by_suggestion.vertices()]
        before = add(before, c.by_suggestion.vs[-1])
    return Function(vertices)


def fit_factor_function(a: Function, limits_share: Vector, guaranteed: Vector) -> Function:
    """Section 9.4: the minimum of the fit factors that the resources allow."""
    result = None
    for r in range(K):
        graph = [(f, v[r]) for f, v in a.vertices()]
        l_r = clip(limits_share[r], graph[0][1], graph[-1][1])
        g_r = clip(guaranteed[r], graph[0][1], l_r)
        points = [(0.0, greatest_factor(graph, g_r))]
        if l_r > g_r:
            points += [(v - g_r, f) for f, v in graph if g_r < v < l_r]
            points.append((l_r - g_r, least_factor(graph, l_r)))
        if l_r - g_r < 1:
            top = greatest_factor(graph, l_r)
            points += [(l_r - g_r, top), (1.0, top)]
        m = Function((s, (f,)) for s, f in points)
        result = m if result is None else minimum(result, m)
    assert result is not None
    return result


def greatest_factor(graph: list[tuple[float, float]], y: float) -> float:
    """The greatest f whose (left-continuous) value is at most ``y``."""
    if graph[-1][1] <= y:
        return graph[-1][0]
    i = max(i for i, (_, v) in enumerate(graph) if v <= y)
    (f0, v0), (f1, v1) = graph[i], graph[i + 1]
    return f0 if v0 == y or f0 == f1 else abscissa(y, f0, f1, v0, v1)


def least_factor(graph: list[tuple[float, float]], y: float) -> float:
    """The least f at which the graph reaches ``y``."""
    i = min(i for i, (_, v) in enumerate(graph) if v >= y)
    if i == 0:
        return graph[0][0]
    (f0, v0), (f1, v1) = graph[i - 1], graph[i]
    return f1 if v1 == y or f0 == f1 else abscissa(y, f0, f1, v0, v1)


def suggested(e: Element, suggestion: float) -> Vector:
    """``B(s)``."""
    assert e.by_suggestion is not None
    return e.by_suggestion.value(suggestion)


def discard(e: Element) -> None:
    """Sections 10.7 and 11: forgets the functions of ``e``, not those below it."""
    e.by_fit_factor = e.fit_factor = e.by_suggestion = None
    e.child_shares = []


def fit(e: Element, y: Vector) -> Vector:
    """Section 10.3: ``y`` if the limits allow it beside the guarantee, else what they leave, in all components."""
    if dominates(e.limits_share, add(e.strong, y)):
        return y
    result = list(sub(e.limits_share, e.strong))
    for r in range(K):
        while e.strong[r] + result[r] > e.limits_share[r]:
            result[r] = math.nextafter(result[r], -math.inf)
    return tuple(result)


def detail(e: Element, total: Vector) -> Parts:
    """Section 12: the parts of a share."""
    if not e.composite:
        return Parts(total, ZERO, ZERO, total)
    strong = low(total, e.strong)
    rest = sub(total, strong)
    integral = low(rest, e.proposed)
    return Parts(total, strong, integral, sub(rest, integral))


def assign(e: Element, suggestion: float, into: str) -> None:
    """Section 12.1."""
    total = suggested(e, suggestion) if e.children or not e.composite else ZERO
    setattr(e, into, detail(e, total))
    if not e.children:
        return
    children = e.ordered_children
    ratios = [] if e.fifo else [e.ratio(c) for c in children]

    def suggestions(f: float) -> list[float]:
        if e.fifo:
            return [clip(f - k, 0.0, 1.0) for k in range(len(children))]
        return [min(1.0, f * ratio) for ratio in ratios]

    def fits(f: float) -> bool:
        taken = total_of(suggested(c, s) for c, s in zip(children, suggestions(f), strict=True))
        return dominates(add(total, E), taken)

    assert e.fit_factor is not None
    f = bisect_max(0.0, e.fit_factor.value(suggestion)[0], fits)
    for c, s in zip(children, suggestions(f), strict=True):
        assign(c, s, into)


def assign_improved(e: Element, offered: Vector, into: str, close_gap: bool) -> None:
    """Section 12.2."""
    total = offered if e.children or not e.composite else ZERO
    setattr(e, into, detail(e, total))
    if not e.children:
        return
    children = e.ordered_children
    assert e.by_fit_factor is not None
    end = e.by_fit_factor.end

    def shares(f: float) -> list[Vector]:
        if not e.fifo:
            return [c.value(f) for c in e.child_shares]
        return [suggested(c, min(1.0, f - k)) if f > k else ZERO for k, c in enumerate(children)]

    f = bisect_max(0.0, end, lambda f: dominates(total, total_of(shares(f))))
    if close_gap and not dominates(E, sub(total, total_of(shares(f)))):
        f = bisect_max(f, end, lambda f: dominates(add(total, E), total_of(shares(f))))
    if f < EPS:
        f = 0.0
    for c, share in zip(children, shares(f), strict=True):
        assign_improved(c, share, into, close_gap)


# --- Output ----------------------------------------------------------------------------------------------------------


def describe(e: Element) -> dict[str, Any]:
    """All documented fields of an element."""
    return {
        "kind": e.kind,
        "dominant_resource": e.dominant_resource,
        "fair_share": describe_parts(e.fair_share),
        "promised_guarantee_fair_share": describe_parts(e.promised),
        "usage_share": list(e.usage_share),
        "demand_share": list(e.demand_share),
        "limits_share": list(e.limits_share),
        "strong_guarantee_share": list(e.strong),
        "strong_guarantee_share_priority_tier": list(e.tiers[0]),
        "strong_guarantee_share_regular_tier": list(e.tiers[1]),
        "proposed_integral_share": list(e.proposed),
        "estimated_guarantee_share": list(e.estimated),
        "burst_ratio": e.burst_ratio,
        "total_burst_ratio": e.total_burst_ratio,
        "resource_flow_ratio": e.flow_ratio,
        "total_resource_flow_ratio": e.total_flow_ratio,
        "last_share_ratio": e.last_share_ratio,
        "accumulated_volume": list(e.volume),
        "volume_overflow": list(e.volume_overflow),
        "acceptable_volume": list(e.acceptable_volume),
        "accepted_free_volume": list(e.accepted_free_volume),
        "children_volume_overflow": list(e.children_overflow),
        "inferred_strong_guarantee_resources": list(e.guarantee),
        "fifo_index": e.fifo_index,
        "effective_fifo_index": e.effective_fifo_index,
    }


def describe_parts(parts: Parts) -> dict[str, list[float]]:
    return {name: list(share) for name, share in vars(parts).items()}
