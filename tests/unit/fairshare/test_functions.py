"""Share functions against their definitions (fair_share_update.md 8, 9): operations, paths and functions of pools.

The definitions are evaluated naively: ``B(s)`` is the value at the greatest fit factor whose value stays within what
the suggestion allows, found by halving. At the few suggestions where B jumps, and at 0, results are written out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from cpumond.fairshare.functions import (
    NOTHING,
    ShareFunction,
    between,
    gang_function,
    operation_function,
    rising_parts,
)
from cpumond.fairshare.paths import Path, fifo_path, settle, weighted_path
from cpumond.fairshare.pool_functions import pool_function, stop_within
from cpumond.fairshare.resources import ONE, ZERO, Vector, add, dominates, least, scale, subtract, sum_vectors

CLOSE = 1e-12


def vec(cpu: float = 0.0, memory: float = 0.0, slots: float = 0.0) -> Vector:
    return (slots, cpu, 0.0, memory, 0.0)


def op(demand: Vector, usage: Vector = ZERO, limits: Vector = ONE) -> ShareFunction:
    return operation_function(usage, demand, limits)


def gang(demand: Vector, limits: Vector = ONE) -> ShareFunction:
    return gang_function(demand, limits)


def weighted(functions: list[ShareFunction], weights: Sequence[float] | None = None, improved: bool = False) -> Path:
    """The complete path of a fair_share pool."""
    return weighted_path(functions, factors_of(weights or [1.0] * len(functions)), 1.0, improved)


def fifo(*functions: ShareFunction) -> Path:
    """The complete path of a FIFO pool."""
    return fifo_path(list(functions), True)


def pool(path: Path, guarantee: Vector = ZERO, limits: Vector = ONE) -> ShareFunction:
    """The function of a pool with a complete path."""
    function = pool_function(path, guarantee, limits)
    assert function is not None
    assert function.horizon == 1.0
    return function


def factors_of(weights: Sequence[float]) -> list[float]:
    smallest = min(w for w in weights if w > 1e-9)
    return [w / smallest for w in weights]


def near(v: Vector, tolerance: float = CLOSE) -> object:
    return pytest.approx(v, abs=tolerance, rel=0.0)


def greatest(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """The greatest number for which a monotone predicate holds, which it does at ``low``."""
    if holds(high):
        return high
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def behind(function: ShareFunction, s: float) -> Vector:
    """The right limit at a suggestion."""
    return function.value(min(math.nextafter(s, 2.0), function.horizon))


def suggestions(rng: random.Random, count: int = 24) -> list[float]:
    """Suggestions that are no breakpoint of anything, near to 0 and 1 too."""
    return sorted([rng.random() for _ in range(count)] + [rng.random() * 1e-3, 1.0 - rng.random() * 1e-3])


# ---- operations


def operation_at(fit: float, usage: Vector, demand: Vector) -> Vector:
    """A(f) of an operation that is no gang (9.1)."""
    if fit <= 1.0:
        most = max(usage)
        return least(scale((most, most, most, most, most), fit), usage)
    return add(usage, scale(subtract(demand, usage), fit - 1.0))


def naive_operation(s: float, usage: Vector, demand: Vector, limits: Vector) -> Vector:
    """B(s) of an operation by the definition: the greatest fit factor within the suggestion and the limits (9.4)."""
    bound = least((s, s, s, s, s), limits)
    return operation_at(greatest(0.0, 2.0, lambda f: dominates(bound, operation_at(f, usage, demand))), usage, demand)


def random_shares(rng: random.Random, top: float = 1.0) -> list[float]:
    """A share per resource: some zero, some in sixteenths, so that equal ones are frequent."""
    kinds = [0.0, rng.randrange(17) / 16 * top, rng.random() * top]
    return [rng.choice(kinds) if rng.random() < 0.5 else rng.choice([0.0, rng.random() * top]) for _ in range(5)]


def random_operation(rng: random.Random, top: float = 1.0) -> tuple[Vector, Vector, Vector]:
    """Usage, demand, limits of a random operation."""
    a, b, c, d, e = demand = random_shares(rng, top)
    if rng.random() < 0.1:
        return (a, b, c, d, e), (a, b, c, d, e), ONE
    used = [rng.choice([0.0, x, x * rng.random(), x * rng.random()]) for x in demand]
    limits = [rng.choice([1.0, 1.0, 1.0, rng.random(), x if x < 1.0 else 0.5]) for x in demand]
    if rng.random() < 0.05:
        limits[rng.randrange(5)] = 0.0
    f, g, h, i, j = used
    k, m, n, o, p = limits
    return (f, g, h, i, j), (a, b, c, d, e), (k, m, n, o, p)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("top", [1.0, 0.3, 3.0])
def test_an_operation_takes_what_the_greatest_fit_factor_gives(seed, top):
    """9.1, 9.4: closed form against the definition, demand within and beyond the cluster."""
    rng = random.Random(seed)
    for _ in range(25):
        usage, demand, limits = random_operation(rng, top)
        function = operation_function(usage, demand, limits)
        assert function.value(0.0) == ZERO
        for s in suggestions(rng, 8):
            assert function.value(s) == near(naive_operation(s, usage, demand, limits)), (usage, demand, limits, s)


@pytest.mark.parametrize("seed", range(8))
def test_functions_are_left_continuous(seed):
    """8: the value at a breakpoint is the limit from below."""
    rng = random.Random(seed)
    for _ in range(25):
        usage, demand, limits = random_operation(rng)
        function = operation_function(usage, demand, limits)
        for start in function.starts[1:]:
            assert function.value(start) == near(function.value(start * (1.0 - 1e-13)), 1e-9)


def test_resources_grow_together_up_to_the_usage_then_in_proportion_up_to_the_demand():
    """9.1: min(f * umax, u) on [0, 1], u + (f - 1)(d - u) on [1, 2]."""
    function = op(vec(cpu=0.5, memory=0.7), usage=vec(cpu=0.1, memory=0.3))
    assert function.value(0.05) == vec(cpu=0.05, memory=0.05)
    assert function.value(0.2) == vec(cpu=0.1, memory=0.2)
    assert function.value(0.3) == near(vec(cpu=0.1, memory=0.3))
    assert function.value(0.5) == near(vec(cpu=0.3, memory=0.5))
    assert function.value(0.7) == function.value(1.0) == vec(cpu=0.5, memory=0.7)


def test_who_demands_nothing_gets_nothing():
    """Section 9.1 with u = d = 0."""
    assert op(ZERO).value(1.0) == gang(ZERO).value(1.0) == ZERO
    assert op(vec(cpu=0.5), limits=ZERO).value(1.0) == ZERO


def test_a_limit_below_the_usage_stops_all_resources():
    """9.4: the greatest fit factor within the limits, one for all resources."""
    function = op(vec(cpu=0.8, memory=0.8), usage=vec(cpu=0.4, memory=0.6), limits=vec(cpu=0.2, memory=1.0, slots=1.0))
    assert function.value(1.0) == vec(cpu=0.2, memory=0.2)
    function = op(vec(cpu=0.8, memory=0.8), usage=vec(cpu=0.2, memory=0.6), limits=vec(cpu=0.5, memory=0.5, slots=1.0))
    assert function.value(1.0) == vec(cpu=0.2, memory=0.5)


def test_a_limit_between_usage_and_demand_stops_all_resources_there():
    """9.4: the fit factor is 1 + 1/4 where cpu meets its limit."""
    function = op(vec(cpu=0.6, memory=0.8), usage=vec(cpu=0.2, memory=0.4), limits=vec(cpu=0.3, memory=1.0))
    assert function.value(1.0) == near(vec(cpu=0.3, memory=0.5))


def test_what_needs_no_more_suggestion_comes_at_once():
    """9.4, 9.5: memory is below what cpu needed already, so B jumps; left-continuous, the lower end counts at 1/2."""
    function = op(vec(cpu=0.5, memory=0.3), usage=vec(cpu=0.5))
    assert function.value(0.5) == vec(cpu=0.5)
    assert behind(function, 0.5) == function.value(1.0) == vec(cpu=0.5, memory=0.3)


def test_a_part_of_the_growth_that_needs_no_more_suggestion_comes_at_once():
    """9.4: memory grows from 0 to 0.8 while cpu stays: up to 0.5 it is free, from there it costs."""
    function = op(vec(cpu=0.5, memory=0.8), usage=vec(cpu=0.5))
    assert function.value(0.5) == vec(cpu=0.5)
    assert behind(function, 0.5) == near(vec(cpu=0.5, memory=0.5))
    assert function.value(0.6) == near(vec(cpu=0.5, memory=0.6))


def test_what_begins_at_suggestion_one_never_comes():
    """9.4: trim; M(1) is the least fit factor that reaches 1, so growth for no more suggestion is lost."""
    assert op(vec(cpu=1.0, memory=0.5), usage=vec(cpu=1.0)).value(1.0) == vec(cpu=1.0)
    assert op(vec(cpu=0.99, memory=0.5), usage=vec(cpu=0.99)).value(1.0) == vec(cpu=0.99, memory=0.5)


def test_demand_beyond_the_cluster_is_cut_by_the_limits():
    """9.4, 21: memory demanded four times, so a quarter of all is taken."""
    assert op(vec(cpu=2.0, memory=4.0, slots=2.0)).value(1.0) == vec(cpu=0.5, memory=1.0, slots=0.5)
    assert op(vec(cpu=3000.0, memory=600.0)).value(1.0) == near(vec(cpu=1.0, memory=0.2))


def test_demands_far_beyond_the_cluster_that_meet_their_limits_together():
    """9.4: whichever resource rounding lets be first at its limit, all stop there, none beyond suggestion 1."""
    rng = random.Random(9)
    for _ in range(2000):
        # cpu from 0 and memory from u both reach 1 (or all of u) where 1/n of the way is done
        n, u = 10.0 ** rng.uniform(0.5, 5.0), rng.choice([rng.random(), 0.6])
        top = rng.choice([1.0, 1.0, u])
        demand = vec(cpu=top * n, memory=u + (1.0 - u) * n, slots=u)
        function = operation_function(vec(memory=u, slots=u), demand, vec(cpu=top, memory=1.0, slots=1.0))
        assert function.starts == sorted(function.starts)
        assert function.starts[-1] < 1.0
        if top == 1.0:
            assert function.value(1.0) == near(vec(cpu=1.0, memory=1.0, slots=u), 1e-9)
        else:
            assert function.value(1.0) == near(vec(cpu=u, memory=1.0, slots=u), 1e-9)


# ---- gangs


def test_a_gang_gets_nothing_until_all_of_it_fits():
    """9.1: a jump at 1; left-continuous, so the lower end counts at the suggestion it needs."""
    function = gang(vec(cpu=0.4, memory=0.6))
    assert function.value(0.6) == ZERO
    assert behind(function, 0.6) == function.value(1.0) == vec(cpu=0.4, memory=0.6)


@pytest.mark.parametrize(("limit", "gets"), [(0.5, True), (math.nextafter(0.5, 0.0), False)])
def test_a_gang_that_just_fits_its_limits_gets_all(limit, gets):
    """9.4: jumps are met exactly or not at all."""
    function = gang(vec(cpu=0.5, memory=0.1), limits=vec(cpu=limit, memory=1.0))
    assert function.value(1.0) == (vec(cpu=0.5, memory=0.1) if gets else ZERO)


def test_a_gang_that_demands_the_whole_cluster_gets_nothing():
    """21: its jump sits at suggestion 1 and is trimmed."""
    assert gang(vec(cpu=1.0, memory=0.2)).value(1.0) == ZERO
    assert gang(vec(cpu=math.nextafter(1.0, 0.0))).value(1.0) == vec(cpu=math.nextafter(1.0, 0.0))


# ---- lines


def test_a_line_is_reckoned_from_its_nearer_end():
    """8: inside a tilted segment v0 + (v1 - v0) t if t < 1/2, else v1 - (v1 - v0)(1 - t)."""
    x0, x1, v0, v1 = 0.1, 0.7, 1.0 / 3.0, 0.9
    assert between(x0, x0, x1, v0, v1) == v0
    assert between(x1, x0, x1, v0, v1) == v1
    below, above = (0.2 - x0) / (x1 - x0), (0.6 - x0) / (x1 - x0)
    assert between(0.2, x0, x1, v0, v1) == v0 + (v1 - v0) * below
    assert between(0.6, x0, x1, v0, v1) == v1 - (v1 - v0) * (1.0 - above)


def naive_parts(level: Vector, slope: Vector, length: float, s: float) -> float:
    """How far along a line a suggestion lasts."""
    return greatest(0.0, length, lambda x: max(v + m * x for v, m in zip(level, slope, strict=True)) <= s)


@pytest.mark.parametrize("seed", range(6))
def test_along_a_line_the_needed_suggestion_is_that_of_the_binding_resource(seed):
    """9.4: parts where it rises, in order, together from the suggestion at the start to that at the end."""
    rng = random.Random(seed)
    for _ in range(200):
        slope, level = vec(*(rng.random() for _ in range(3))), vec(*(rng.random() - 0.5 for _ in range(3)))
        length = rng.random()
        begin = max(0.0, *level)
        needed = max(v + m * length for v, m in zip(level, slope, strict=True))
        parts = rising_parts(level, slope, length, begin, needed)
        if needed <= begin:
            assert parts == []
            continue
        assert (parts[0][0], parts[-1][1]) == (begin, needed)
        for (_, high, _, x_end), (low, _, x, _) in pairwise(parts):
            assert (high, x_end) == (low, x)
        for low, high, x, x_end in parts:
            t = rng.random()
            expected = naive_parts(level, slope, length, low + (high - low) * t)
            assert x + (x_end - x) * t == pytest.approx(expected, abs=1e-9)


def test_resources_that_need_the_same_suggestion_at_one_point():
    """9.4: three lines through one point, which rounding spreads; whichever of them binds there."""
    rng = random.Random(940)
    cases = [(0.46, 0.1, (1.55, 0.35, 1.6))]
    cases += [(rng.randrange(10, 60) / 100, rng.randrange(1, 9) / 10, sloped(rng)) for _ in range(400)]
    for s, x, slope in cases:
        a, b, c = (max(s - m * x, 0.0) for m in slope)
        usage = (a, b, 0.0, c, s)
        demand = (a + slope[0], b + slope[1], 0.0, c + slope[2], s)
        function = operation_function(usage, demand, ONE)
        for at in (s / 2, s + 0.05, s + 0.2):
            assert function.value(at) == near(naive_operation(at, usage, demand, ONE))


def sloped(rng: random.Random) -> tuple[float, float, float]:
    a, b, c = (rng.randrange(1, 40) / 10 for _ in range(3))
    return a, b, c


# ---- pools: naive


def path_value(path: Path, x: float) -> Vector:
    """A(x) of a pool, summed child by child (9.2, 9.3)."""
    if path.factors is None:
        scaled = [min(max(x - k, 0.0), 1.0) for k in range(len(path.functions))]
    else:
        scaled = [min(1.0, x * factor) for factor in path.factors]
    return sum_vectors([f.value(s) for f, s in zip(path.functions, scaled, strict=True)])


def naive_pool(path: Path, s: float, guarantee: Vector, limits: Vector, improved: bool) -> Vector:
    """B(s) of a pool by the definition (9.2 to 9.4): the farthest point of A within the suggestion and the limits."""
    start = path_value(path, 0.0)
    bound = tuple(min(max(q, a) + s, max(limit, a)) for q, limit, a in zip(guarantee, limits, start, strict=True))
    end = 1.0 if path.factors is not None else float(len(path.functions))
    x = greatest(0.0, end, lambda x: dominates(bound, path_value(path, x)))
    value = path_value(path, x)
    if improved and path.factors is not None:  # of a joint jump the first children that fit
        for function, factor in zip(path.functions, path.factors, strict=True):
            at = min(1.0, x * factor)
            height = subtract(function.value(min(1.0, at + 1e-9)), function.value(max(at - 1e-9, 0.0)))
            if max(height) > 1e-6:
                if not dominates(bound, add(value, height)):
                    break
                value = add(value, height)
    return value


def random_child(rng: random.Random, depth: int = 0) -> ShareFunction:
    """A function of an operation, a gang or a pool of such."""
    kind = rng.random()
    if kind < 0.1:
        return NOTHING
    if depth < 2 and kind < 0.3:
        path = random_path(rng, depth + 1, rng.random() < 0.3)
        room = random_vector(rng, 0.3)
        return pool(path, room, tuple(rng.choice([1.0, rng.random()]) for _ in range(5)))
    usage, demand, limits = random_operation(rng, rng.choice([1.0, 0.4, 0.2]))
    if kind < 0.5:
        return gang(demand, limits)
    return op(demand, usage, limits)


def random_vector(rng: random.Random, top: float) -> Vector:
    a, b, c, d, e = (rng.choice([0.0, rng.random() * top]) for _ in range(5))
    return (a, b, c, d, e)


def random_path(rng: random.Random, depth: int, improved: bool) -> Path:
    """The path of a pool with one to seven children; some of them twice, so that they jump together."""
    children = [random_child(rng, depth) for _ in range(rng.randint(1, 5))]
    children += rng.choices(children, k=rng.randrange(3))
    if rng.random() < 0.25:
        leaves = [child if not child.positions else op(random_vector(rng, 0.5)) for child in children]
        return fifo(*leaves)
    weights = [rng.choice([1.0, 1.0, 2.0, 4.0, 0.5]) for _ in children]
    return weighted(children, weights, improved)


@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_pool_takes_what_the_farthest_point_of_its_path_gives(seed, improved):
    """9.2 to 9.5: random children, guarantees and limits, against the definition."""
    rng = random.Random(seed)
    for _ in range(6):
        path = random_path(rng, 0, improved)
        guarantee, limits = random_vector(rng, 0.4), tuple(rng.choice([1.0, 1.0, rng.random()]) for _ in range(5))
        function = pool(path, guarantee, limits)
        assert function.starts == sorted(set(function.starts))
        for s in suggestions(rng, 6):
            expected = naive_pool(path, s, guarantee, limits, improved)
            assert function.value(s) == near(expected, 1e-9), (seed, s)


@pytest.mark.parametrize("seed", range(20))
def test_a_path_runs_through_the_sums_of_its_children(seed):
    """9.2, 9.3: at every vertex, and within every linear step; jumps are the children's."""
    rng = random.Random(seed)
    path = random_path(rng, 0, improved=False)
    assert (path.xs[0], path.xs[-1]) == (0.0, 1.0 if path.factors else float(len(path.functions)))
    assert path.xs == sorted(path.xs)
    assert path.values[0] == path_value(path, 0.0)
    for n, slope in enumerate(path.slopes):
        x, x_end = path.xs[n], path.xs[n + 1]
        if slope is None:
            assert x == x_end
            assert dominates(path.values[n + 1], subtract(path.values[n], scale(ONE, 1e-15)))
        elif x_end - x > 1e-9:
            for t in (0.25, 0.5, 1.0 - 1e-7):
                at = x + (x_end - x) * t
                value = add(path.values[n], scale(slope, at - x))
                assert value == near(path_value(path, at), 1e-9)


# ---- pools: the shares of weights


def test_arguments_are_scaled_by_weight():
    """9.2: b_c(x) = B_c(min(1, x * w_c / wmin)); here wmin = 2, so the second child is three times as far."""
    path = weighted([op(vec(cpu=0.5)), op(vec(cpu=0.9))], [2.0, 6.0])
    function = pool(path)
    assert function.value(0.4) == near(vec(cpu=0.4))
    assert path.xs == near((0.0, 0.3, 0.5, 1.0))
    assert path.values[1] == near(vec(cpu=1.2))
    alone = pool(weighted([op(vec(cpu=0.5))], [17.0]))
    assert alone.value(0.3) == near(vec(cpu=0.3))


def test_a_child_that_weighs_next_to_nothing_does_not_set_the_pace():
    """9.2: wmin is the least weight above 1e-9, so a lighter child hardly moves and normal ones are at 1 in the end."""
    path = weighted([op(vec(cpu=0.3)), op(vec(cpu=0.4)), op(vec(cpu=0.3))], [1e-9, 1.0, 1e-12])
    assert path.values[-1] == near(vec(cpu=0.4 + 1e-9 + 1e-12), 1e-16)
    assert pool(path).value(1.0) == near(vec(cpu=0.4 + 1e-9 + 1e-12), 1e-16)


def test_the_function_of_a_light_child_ends_before_its_jump():
    """9.2: at fit factor 1 the light child's suggestion is 1e-9, which is below what its gang needs."""
    path = weighted([gang(vec(cpu=0.3)), op(vec(cpu=0.4))], [1e-9, 1.0])
    assert pool(path).value(1.0) == vec(cpu=0.4)
    path = weighted([gang(vec(cpu=5e-10)), op(vec(cpu=0.4))], [1e-9, 1.0])
    assert pool(path).value(1.0) == near(vec(cpu=0.4 + 5e-10), 1e-16)


def test_an_operation_that_takes_the_cluster_before_the_end_stays_there():
    """9.2: scaled beyond suggestion 1 a child's function is extended by its last value."""
    path = weighted([op(vec(cpu=1.0)), op(vec(memory=0.5))], [4.0, 1.0])
    assert path.xs == [0.0, 0.25, 0.5, 1.0]
    assert path.values[1:] == [vec(cpu=1.0, memory=0.25), vec(cpu=1.0, memory=0.5), vec(cpu=1.0, memory=0.5)]


def test_a_pool_whose_children_want_nothing():
    """9.2: A is 0 on [0, 1]."""
    path = weighted([NOTHING, NOTHING])
    assert (path.xs, path.values) == ([0.0, 1.0], [ZERO, ZERO])
    assert pool(path, guarantee=vec(cpu=0.5)).value(1.0) == ZERO


# ---- FIFO


def test_a_fifo_pool_is_served_one_after_the_other():
    """9.3: A(f) = sum of B_k(clip(f - k, 0, 1)); the second begins when the first has its limited demand."""
    function = pool(fifo(op(vec(cpu=0.3, memory=0.1)), op(vec(cpu=0.2, memory=0.4)), op(vec(cpu=0.9))))
    assert function.value(0.15) == near(vec(cpu=0.15, memory=0.05))
    assert function.value(0.4) == near(vec(cpu=0.4, memory=0.3))
    assert function.value(0.5) == near(vec(cpu=0.5, memory=0.5))
    assert function.value(0.9) == near(vec(cpu=0.9, memory=0.5))


def test_a_gang_at_the_head_of_a_fifo_pool_holds_up_the_rest():
    """9.3: its jump must be affordable before anything behind it is served."""
    function = pool(fifo(op(vec(cpu=0.2)), gang(vec(cpu=0.5)), op(vec(cpu=0.1))))
    assert function.value(0.7) == vec(cpu=0.2)
    assert behind(function, 0.7) == near(vec(cpu=0.7))
    assert function.value(0.75) == near(vec(cpu=0.75))
    assert function.value(1.0) == near(vec(cpu=0.8))


def test_a_gang_that_never_fits_is_passed_over():
    """9.3: its B is 0 all along, so the concatenation goes on behind it."""
    function = pool(fifo(gang(vec(cpu=0.5), limits=vec(cpu=0.4)), op(vec(cpu=0.1))))
    assert function.value(1.0) == vec(cpu=0.1)


# ---- guarantees, limits and jumps, met exactly


def test_within_the_guarantee_everything_is_free():
    """9.4: B(0) is the value at the greatest fit factor within the guarantee; the flat rest of other resources too."""
    path = weighted([op(vec(cpu=0.2, memory=0.4)), op(vec(cpu=0.3))])
    assert pool(path, guarantee=vec(cpu=1.0, memory=1.0)).value(0.0) == near(vec(cpu=0.5, memory=0.4))
    assert pool(path, guarantee=vec(cpu=0.5, memory=0.4)).value(0.0) == near(vec(cpu=0.5, memory=0.4))
    assert pool(path, guarantee=vec(cpu=1.0, memory=0.1)).value(0.0) == near(vec(cpu=0.15, memory=0.1))
    assert pool(path, guarantee=vec(cpu=1.0)).value(0.0) == ZERO


def test_a_gang_that_demands_exactly_the_guarantee_gets_it():
    """21 and 9.4: at suggestion 0 the greatest fit factor counts."""
    assert pool(weighted([gang(vec(cpu=0.3))]), guarantee=vec(cpu=0.3)).value(0.0) == vec(cpu=0.3)
    less = vec(cpu=math.nextafter(0.3, 0.0))
    function = pool(weighted([gang(vec(cpu=0.3))]), guarantee=less)
    assert function.value(0.0) == ZERO
    assert function.value(1e-15) == vec(cpu=0.3)


def test_a_gang_that_exactly_fills_the_limit_gets_it():
    """9.4: a jump whose upper end is the limit is within it."""
    path = weighted([op(vec(cpu=0.25)), gang(vec(cpu=0.5))])
    assert pool(path, limits=vec(cpu=0.75)).value(1.0) == vec(cpu=0.75)
    assert pool(path, limits=vec(cpu=0.7)).value(1.0) == vec(cpu=0.25)


def test_a_jump_at_suggestion_one_is_trimmed():
    """9.4, 21: what needs all of the cluster beyond the guarantee stays at the lower end."""
    whole = weighted([op(vec(cpu=0.25)), gang(vec(cpu=0.75))])
    assert pool(whole).value(1.0) == vec(cpu=0.25)
    assert pool(whole, guarantee=vec(cpu=0.25)).value(1.0) == vec(cpu=1.0)


def test_what_lies_flat_at_suggestion_one_is_trimmed_unless_something_is_guaranteed():
    """9.4: if l - g is exactly 1, M_r(1) is the least fit factor that reaches l; if it is less, the greatest."""
    path = weighted([op(vec(cpu=1.0)), op(vec(memory=0.5))], [4.0, 1.0])
    assert pool(path).value(1.0) == vec(cpu=1.0, memory=0.25)
    assert pool(path, guarantee=vec(cpu=0.125)).value(1.0) == vec(cpu=1.0, memory=0.5)
    assert pool(path, limits=vec(cpu=1.0, memory=0.375)).value(1.0) == vec(cpu=1.0, memory=0.25)


def test_a_fifo_pool_stops_where_the_cluster_is_full():
    """9.4: at suggestion 1 the least fit factor that reaches 1 counts, so what follows it for free is lost."""
    path = fifo(op(vec(cpu=0.5)), op(vec(cpu=0.5)), op(vec(memory=0.5)))
    assert pool(path).value(1.0) == vec(cpu=1.0)
    path = fifo(op(vec(cpu=0.5)), op(vec(cpu=0.499)), op(vec(memory=0.5)))
    assert pool(path).value(1.0) == near(vec(cpu=0.999, memory=0.5))


@pytest.mark.parametrize("cpu", [1.0 - 5e-13, math.nextafter(1.0, 0.0)])
def test_what_needs_next_to_all_of_the_cluster_is_not_yet_all(cpu):
    """9.4: below suggestion 1 there is no end, however near; growth and jumps that need no more are made."""
    for rest in (op(vec(memory=0.5)), gang(vec(memory=0.5)), op(vec(memory=0.25, cpu=1.0), usage=vec(memory=0.25))):
        assert pool(fifo(op(vec(cpu=cpu)), rest)).value(1.0)[3] > 0.2
        assert pool(fifo(op(vec(cpu=1.0)), rest)).value(1.0) == vec(cpu=1.0)
    assert pool(fifo(op(vec(cpu=cpu)))).value(1.0) == vec(cpu=cpu)
    assert pool(fifo(op(vec(cpu=1.0))), guarantee=vec(cpu=1.0 - cpu)).value(1.0) == vec(cpu=1.0)


@pytest.mark.parametrize(("cpu", "memory"), [(1.0, 0.0), (math.nextafter(1.0, 0.0), 0.5), (1.0 - 5e-13, 0.5)])
def test_a_gang_that_jumps_just_when_the_cluster_is_full_is_too_late(cpu, memory):
    """9.4: at suggestion 1 the least fit factor that reaches 1 counts, which is below the jump."""
    path = weighted([op(vec(cpu=cpu)), gang(vec(memory=cpu / 2.0))], [2.0, 1.0])
    assert pool(path).value(1.0) == near(vec(cpu=cpu, memory=memory))


def test_an_incomplete_path_that_just_reaches_all_of_the_cluster():
    """9.4: that there is nothing more for suggestion 1 is known only when the path goes on, here for memory."""
    functions = [op(vec(cpu=0.5)), op(vec(cpu=0.5)), op(vec(memory=0.25)), op(vec(memory=0.75))]
    assert pool(weighted(functions)).value(1.0) == vec(cpu=1.0, memory=0.75)
    part = pool_function(weighted_path(functions, [1.0] * 4, 0.5, False), ZERO, ONE)
    assert part is None or part.horizon < 1.0


def test_two_resources_that_fill_to_the_same_level():
    """9.4: the second needs no more suggestion than the first but for rounding, near to nothing beyond guarantees."""
    rng = random.Random(941)
    for _ in range(400):
        demands = [rng.randrange(1, 12) / 100 for _ in range(rng.randint(2, 5))]
        shuffled = rng.sample(demands, len(demands))
        path = fifo(*(op(vec(cpu=d)) for d in demands), *(op(vec(memory=d)) for d in shuffled))
        beyond = rng.choice([1e-2, 1e-3, 1e-6, 1e-9])
        guaranteed = sum(demands) - beyond
        function = pool(path, guarantee=vec(cpu=guaranteed, memory=guaranteed))
        assert function.value(0.0) == near(vec(cpu=guaranteed))
        assert function.value(beyond / 2) == near(vec(cpu=guaranteed + beyond / 2))
        assert function.value(beyond * 1.01) == near(vec(cpu=sum(demands), memory=sum(demands)))


@pytest.mark.parametrize("improved", [False, True])
def test_a_joint_jump_is_made_at_once_or_one_by_one(improved):
    """9.2: three gangs of 0.3 jump at one place; in normal mode all or none, in improved mode the first two of them."""
    path = weighted([gang(vec(cpu=0.3, memory=n / 8)) for n in range(3)], improved=improved)
    first_two = vec(cpu=0.6, memory=0.125)
    assert pool(path, limits=vec(cpu=0.7, memory=1.0)).value(1.0) == near(first_two if improved else ZERO)
    assert pool(path, guarantee=vec(cpu=0.7, memory=1.0)).value(0.0) == near(first_two if improved else ZERO)
    assert pool(path, guarantee=vec(cpu=0.95, memory=1.0)).value(0.0) == near(vec(cpu=0.9, memory=0.375))


def test_jumps_one_by_one_come_in_the_order_of_the_children():
    """9.2: pairs are sorted by x, then by the child's position; the first that does not fit holds up the next."""
    big, small = vec(cpu=0.5, memory=0.5), vec(cpu=0.5, memory=0.1)
    limits = vec(cpu=0.7, memory=0.3)
    small_first = pool(weighted([gang(small), gang(big)], improved=True), limits=limits)
    big_first = pool(weighted([gang(big), gang(small)], improved=True), limits=limits)
    assert small_first.value(1.0) == small
    assert big_first.value(1.0) == ZERO


def test_children_with_other_weights_jump_at_other_places():
    """9.2: the second jumps first, at a third of the fit factor."""
    function = pool(weighted([gang(vec(cpu=0.6)), gang(vec(cpu=0.6, memory=0.1))], [1.0, 3.0]))
    assert function.value(1.0) == vec(cpu=0.6, memory=0.1)


# ---- sums near a bound are decided exactly


def test_tenths_that_are_a_whole_exactly_in_the_order_of_the_children_fit():
    """8, 9.2: A is the sum of the children's values; if that meets the limit, so does the path."""
    for demands in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.7, 0.1, 0.1], [0.05] * 7):
        path = weighted([op(vec(cpu=d)) for d in demands])
        exact = vec(cpu=sum(demands))
        step, x, value = stop_within(path, exact)
        assert (step, x) == (len(path.slopes), 1.0)
        assert value == exact
        assert stop_within(path, vec(cpu=math.nextafter(exact[1], 0.0)))[1] < 1.0


def test_gangs_that_meet_the_limit_exactly_in_the_order_of_the_children_fit():
    """9.4: in whatever order they jump, their sum in the order of the children decides."""
    rng = random.Random(94)
    for _ in range(100):
        demands = [rng.randrange(1, 100) / 1000.0 for _ in range(rng.randint(2, 9))]
        path = weighted([gang(vec(cpu=d)) for d in demands])
        exact = sum(demands)
        assert pool(path, limits=vec(cpu=exact)).value(1.0) == near(vec(cpu=exact))
        slightly_less = pool(path, limits=vec(cpu=math.nextafter(exact, 0.0))).value(1.0)[1]
        assert slightly_less <= exact - min(demands) / 2.0


def test_behind_a_jump_that_ends_just_below_the_limit_the_rest_is_used():
    """9.4: half a tolerance below the limit is below it: what follows grows up to it, and memory with it."""
    room = 5e-13
    children = [gang(vec(cpu=0.25)), op(vec(cpu=0.5, memory=0.5))]
    limit = vec(cpu=0.5 + room, memory=1.0)
    step, x, value = stop_within(weighted(children), limit)
    assert path_value(weighted(children), x) == near(value)
    assert x == pytest.approx(0.25 + room, abs=1e-16)
    assert value == near(vec(cpu=0.5 + room, memory=0.25 + room), 1e-15)
    assert step == 2


def test_a_jump_that_ends_exactly_at_the_limit_counts_only_if_the_path_gets_beyond_it():
    """9.4, 12: at the place of a jump the function still has the lower end."""
    children = [gang(vec(cpu=0.25)), op(vec(cpu=0.5, memory=0.5))]
    step, x, value = stop_within(weighted(children), vec(cpu=0.5, memory=1.0))
    assert (step, x, value) == (1, 0.25, vec(cpu=0.25, memory=0.25))


def test_a_resource_that_stays_is_settled_to_the_sum_of_the_children():
    """8: the running sum's rounding is taken out where nobody takes more, without touching the rest of the path."""
    rng = random.Random(8)
    differed = False
    for _ in range(50):
        demands = [vec(cpu=rng.random() / 16) for _ in range(9)] + [vec(memory=k / 3) for k in range(3)]
        path = weighted([op(d) for d in demands])
        before = list(path.values)
        settle(path)
        for n, slope in enumerate(path.slopes):
            assert slope is not None
            if slope[1] == 0.0:
                assert path.values[n][1] == path.sum_along(n)[1] == sum(min(path.xs[n], d[1]) for d in demands)
        assert path.values == [near(v, 1e-14) for v in before]
        differed |= path.values != before
    assert differed


# ---- ramps


WIDTH = 1e-12
"""Width of a ramp: its slope times the rounding of a place on [0, 1] would be off by 1e-5."""


def steep(*behind_it: ShareFunction, guarantee: float = 0.75, complete: bool = True) -> ShareFunction:
    """A pool that is guaranteed memory: at suggestion 0.3 it takes half of all memory for next to no more cpu."""
    children = [op(vec(cpu=0.3)), op(vec(cpu=WIDTH, memory=0.5)), *behind_it]
    function = pool_function(fifo_path(children, complete), vec(memory=guarantee), ONE)
    assert function is not None
    return function


def test_a_steep_rise_is_summed_exactly():
    """9.2: values behind the ramp are those of the children, whatever its slope and wherever it lies on the path."""
    for weight in (1.0, 3.0, 7.0, 0.9):
        others = [op(vec(cpu=k / 64, memory=k / 1024)) for k in range(1, 20)]
        path = weighted([steep(op(vec(cpu=0.1))), *others], [weight, *[1.0] * len(others)])
        beyond = [n for n, x in enumerate(path.xs) if x * max(weight, 1.0) > 0.31]
        assert beyond
        for n in beyond:
            assert path.values[n] == near(path_value(path, path.xs[n]), 1e-15)


def test_on_a_steep_rise_other_children_go_on():
    """9.2: vertices of others within the ramp, here in its middle, have a part of its rise."""
    middle = 0.3 + WIDTH / 2
    path = weighted([steep(op(vec(cpu=0.1))), op(vec(cpu=middle))])
    n = path.xs.index(middle)
    assert path.values[n] == near(vec(cpu=0.3 + WIDTH / 2 + middle, memory=0.25), 1e-3)
    assert path.values[n + 1] == near(vec(cpu=0.3 + WIDTH + middle, memory=0.5), 1e-15)


def test_a_jump_within_a_steep_rise_and_one_at_its_end():
    """9.2: a gang's jump in the middle, and the pool's own one behind the ramp, for memory that is guaranteed."""
    middle = 0.3 + WIDTH / 2
    function = steep(op(vec(memory=0.25)))
    path = weighted([function, gang(vec(cpu=middle))])
    assert path.values[-1] == near(vec(cpu=0.3 + WIDTH + middle, memory=0.75), 1e-15)
    jumps = [n for n, slope in enumerate(path.slopes) if slope is None]
    heights = [subtract(path.values[n + 1], path.values[n]) for n in jumps]
    assert [height for height in heights if any(height)] == [near(vec(cpu=middle)), near(vec(memory=0.25))]


def test_two_steep_rises_at_one_place():
    """9.2: both are exact at their ends."""
    path = weighted([steep(guarantee=0.5), op(vec(cpu=0.4)), steep(guarantee=0.5)])
    assert path.values[-1] == near(vec(cpu=1.0 + 2 * WIDTH, memory=1.0), 1e-15)


def test_a_steep_rise_up_to_the_end_of_what_is_known():
    """9.2: the function of a pool that was not made further ends with its ramp."""
    known = steep(complete=False)
    assert known.horizon == 0.3 + WIDTH
    path = weighted_path([known, op(vec(cpu=0.9))], [1.0, 1.0], known.horizon, False)
    assert path.xs[-1] == known.horizon
    assert path.values[-1] == near(vec(cpu=0.6 + 2 * WIDTH, memory=0.5), 1e-15)


def test_a_steep_rise_up_to_suggestion_one():
    """9.2: the last op takes the last of the cpu, and half of the memory with it."""
    last = vec(cpu=1.0 - (1.0 - WIDTH), memory=0.5)
    function = pool(fifo(op(vec(cpu=1.0 - WIDTH)), op(last)), guarantee=vec(memory=0.5))
    path = weighted([function, op(vec(memory=0.25))])
    assert path.values[-1] == near(vec(cpu=1.0, memory=0.75), 1e-15)


def test_a_steep_operation_beyond_the_reach_of_a_path():
    """9.1, 9.2: from its usage to its demand an operation may rise steeply; a path to less does not see it."""
    rising = op(vec(cpu=0.5 + WIDTH, memory=0.4), usage=vec(cpu=0.5))
    functions = [rising, op(vec(cpu=0.25))]
    path = weighted_path(functions, [1.0, 1.0], 0.3, False)
    assert path.values[-1] == vec(cpu=0.5)
    whole = weighted(functions)
    assert whole.values[: len(path.values)] == path.values
    assert whole.values[-1] == near(vec(cpu=0.75 + WIDTH, memory=0.4), 1e-15)


# ---- prefixes


def test_a_rise_shorter_than_rounding_counts_as_a_jump():
    """Scaled by weight, both ends of a steep segment fall on one fit factor: its height is not lost (9.2)."""
    start = 0.3
    end = math.nextafter(start, 1.0)
    factor = next(f for f in (1.0 + n / 7.0 for n in range(1, 1000)) if start / f == end / f)
    flat, top = vec(cpu=start), vec(cpu=end, memory=0.5)
    slopes = [vec(cpu=1.0), vec(cpu=1.0, memory=0.5 / (end - start)), vec()]
    steep = ShareFunction([0.0, start, end], [vec(), flat, top], slopes, vec())
    cut = ShareFunction([0.0, start], [vec(), flat], slopes[:2], vec(), horizon=end)
    other = operation_function(vec(), vec(cpu=0.1), ONE)
    path = weighted_path([steep, other], [factor, 1.0], 1.0, improved=False)
    assert None in path.slopes
    assert path.values[-1] == pytest.approx(vec(cpu=0.4, memory=0.5))
    unfinished = weighted_path([cut, other], [factor, 1.0], start / factor, improved=False)
    assert None not in unfinished.slopes
    assert unfinished.values[-1] == path.values[: len(unfinished.values)][-1]


@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_path_made_to_a_smaller_reach_is_a_prefix_bit_for_bit(seed, improved):
    """9.2: and it goes to the last change of slope within its reach."""
    rng = random.Random(seed)
    functions = [random_child(rng) for _ in range(rng.randint(1, 8))] + [steep(op(vec(cpu=0.2)))]
    factors = factors_of([rng.choice([1.0, 2.0, 3.0, 0.7]) for _ in functions])
    whole = weighted_path(functions, factors, 1.0, improved)
    assert whole.complete
    for reach in sorted(rng.random() for _ in range(8)):
        path = weighted_path(functions, factors, reach, improved)
        n = len(path.xs)
        assert not path.complete
        assert path.xs[-1] <= reach
        assert (path.xs, path.values) == (whole.xs[:n], whole.values[:n])
        assert path.slopes == whole.slopes[: n - 1]
        assert path.jumps == {step: jump for step, jump in whole.jumps.items() if step < n - 1}
        assert whole.xs[n] > reach or whole.xs[n] == whole.xs[-1]


def ends_near(path: Path, bound: Vector) -> bool:
    """Whether the end of a path is too near a bound to tell on which side of it the path goes on."""
    return any(abs(v - limit) < CLOSE for v, limit in zip(path.values[-1], bound, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_a_function_of_an_incomplete_path_agrees_up_to_its_horizon(seed):
    """9.4, 9.5: bit for bit; None if the path does not even get through the guarantee."""
    rng = random.Random(seed)
    functions = [random_child(rng, 1) for _ in range(rng.randint(2, 8))]
    factors = factors_of([rng.choice([1.0, 2.0, 3.0, 0.7]) for _ in functions])
    guarantee, limits = random_vector(rng, 0.3), tuple(rng.choice([1.0, rng.random()]) for _ in range(5))
    complete = weighted_path(functions, factors, 1.0, False)
    whole = pool(complete, guarantee, limits)
    horizons = []
    for n in range(1, 40):
        path = weighted_path(functions, factors, n / 40, False)
        function = pool_function(path, guarantee, limits)
        if function is None:
            through = stop_within(complete, tuple(map(max, guarantee, complete.values[0])))[1]
            assert path.xs[-1] <= through or ends_near(path, guarantee) or ends_near(path, limits)
            continue
        horizons.append(function.horizon)
        assert function.value(0.0) == whole.value(0.0)
        assert function.value(function.horizon) == near(whole.value(function.horizon), 1e-9)
        for s in suggestions(rng, 6):
            if s < function.horizon:
                assert function.value(s) == whole.value(s)
    assert horizons == sorted(horizons)


def test_a_fifo_pool_made_of_its_first_operations_agrees_up_to_its_horizon():
    """9.3: as far as they go nothing behind them matters."""
    functions = [op(vec(cpu=k / 50, memory=(9 - k) / 60)) for k in range(1, 9)]
    whole = pool(fifo(*functions))
    part = pool_function(fifo_path(functions[:4], False), ZERO, ONE)
    assert part is not None
    assert part.horizon == pytest.approx(max(whole.value(part.horizon)))
    for n in range(100):
        assert part.value(part.horizon * n / 101) == whole.value(part.horizon * n / 101)


def test_an_incomplete_path_that_reaches_the_limits_tells_all():
    """9.4: beyond the limits the function does not change, so its horizon is 1."""
    functions = [op(vec(cpu=0.8)), op(vec(cpu=0.6))]
    path = weighted_path(functions, [1.0, 1.0], 0.7, False)
    function = pool_function(path, ZERO, vec(cpu=0.5))
    assert function is not None
    assert function.horizon == 1.0
    assert function.value(1.0) == near(vec(cpu=0.5))
