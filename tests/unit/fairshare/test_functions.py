"""Share functions where rounding, prefixes or steep rises decide (fair_share_update.md 8, 9).

Everything else of them shows in the shares of an update, which the reference decides (tests/property).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from cpumond.fairshare.functions import ShareFunction, gang_function, operation_function
from cpumond.fairshare.paths import Path, fifo_path, settle, weighted_path
from cpumond.fairshare.pool_functions import pool_function, stop_within
from cpumond.fairshare.resources import ONE, ZERO, Vector, add, least, scale, sum_in_order, sum_vectors

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


# ---- operations and gangs


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


def test_resources_that_need_the_same_suggestion_at_one_point():
    """9.4: three lines through one point, which rounding spreads; from there on the steepest binds."""
    rng = random.Random(940)
    for _ in range(400):
        s, x, slopes = rng.randrange(10, 60) / 100, rng.randrange(1, 9) / 10, rng.sample(range(1, 40), 3)
        growth = vec(*(slope / 10 for slope in slopes))
        usage = add(vec(*(max(s - m / 10 * x, 0.0) for m in slopes)), (0.0, 0.0, 0.0, 0.0, s))
        function = operation_function(usage, add(usage, growth), ONE)
        assert function.value(s / 2) == near(least(usage, (s / 2,) * 5))
        for at in (s + 0.05, s + 0.2):
            part = min(1.0, *((at - u) / m for u, m in zip(usage, growth, strict=True) if m))
            assert function.value(at) == near(add(usage, scale(growth, part)))


# ---- pools


def path_value(path: Path, x: float) -> Vector:
    """A(x) of a pool, summed child by child (9.2, 9.3)."""
    if path.factors is None:
        scaled = [min(max(x - k, 0.0), 1.0) for k in range(len(path.functions))]
    else:
        scaled = [min(1.0, x * factor) for factor in path.factors]
    return sum_vectors([f.value(s) for f, s in zip(path.functions, scaled, strict=True)])


# ---- guarantees, limits and jumps, met exactly


HALF_THEN_GANG = [op(vec(cpu=0.25)), gang(vec(cpu=0.5))]
QUARTER_THEN_GANG = [op(vec(cpu=0.25)), gang(vec(cpu=0.75))]
FLAT = weighted([op(vec(cpu=1.0)), op(vec(memory=0.5))], [4.0, 1.0])


@pytest.mark.parametrize(
    ("path", "bounds", "value"),
    [
        pytest.param(weighted(HALF_THEN_GANG), {"limits": vec(cpu=0.75)}, vec(cpu=0.75), id="a jump up to the limit"),
        pytest.param(weighted(HALF_THEN_GANG), {"limits": vec(cpu=0.7)}, vec(cpu=0.25), id="a jump beyond the limit"),
        pytest.param(weighted(QUARTER_THEN_GANG), {}, vec(cpu=0.25), id="a jump at 1 is trimmed"),
        pytest.param(weighted(QUARTER_THEN_GANG), {"guarantee": vec(cpu=0.25)}, vec(cpu=1.0), id="a guaranteed start"),
        pytest.param(FLAT, {}, vec(cpu=1.0, memory=0.25), id="what is flat at 1 is trimmed"),
        pytest.param(FLAT, {"guarantee": vec(cpu=0.125)}, vec(cpu=1.0, memory=0.5), id="flat below 1 is not"),
        pytest.param(FLAT, {"limits": vec(cpu=1.0, memory=0.375)}, vec(cpu=1.0, memory=0.25), id="flat, with a limit"),
        pytest.param(
            fifo(op(vec(cpu=0.5)), op(vec(cpu=0.5)), op(vec(memory=0.5))), {}, vec(cpu=1.0), id="a full FIFO pool"
        ),
        pytest.param(
            fifo(op(vec(cpu=0.5)), op(vec(cpu=0.499)), op(vec(memory=0.5))), {}, vec(cpu=0.999, memory=0.5),
            id="a FIFO pool that is not full",
        ),
    ],
)  # fmt: skip
def test_bounds_that_are_met_exactly(path, bounds, value):
    """9.4, 21: at suggestion 1 the least fit factor that reaches l counts if l - g is 1, else the greatest."""
    assert pool(path, **bounds).value(1.0) == near(value)


@pytest.mark.parametrize("cpu", [1.0 - 5e-13, math.nextafter(1.0, 0.0)])
def test_what_needs_next_to_all_of_the_cluster_is_not_yet_all(cpu):
    """9.4: below suggestion 1 there is no end, however near; growth and jumps that need no more are made."""
    for rest in (op(vec(memory=0.5)), gang(vec(memory=0.5)), op(vec(memory=0.25, cpu=1.0), usage=vec(memory=0.25))):
        assert pool(fifo(op(vec(cpu=cpu)), rest)).value(1.0)[3] > 0.2
        assert pool(fifo(op(vec(cpu=1.0)), rest)).value(1.0) == vec(cpu=1.0)
    assert pool(fifo(op(vec(cpu=cpu)))).value(1.0) == vec(cpu=cpu)
    assert pool(fifo(op(vec(cpu=1.0))), guarantee=vec(cpu=1.0 - cpu)).value(1.0) == vec(cpu=1.0)


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


# ---- sums near a bound are decided exactly


def test_gangs_that_meet_the_limit_exactly_in_the_order_of_the_children_fit():
    """9.4: in whatever order they jump, their sum in the order of the children decides."""
    rng = random.Random(94)
    for _ in range(100):
        demands = [rng.randrange(1, 100) / 1000.0 for _ in range(rng.randint(2, 9))]
        path = weighted([gang(vec(cpu=d)) for d in demands])
        exact = sum_in_order(demands)
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
                assert path.values[n][1] == path.sum_along(n)[1] == sum_in_order(min(path.xs[n], d[1]) for d in demands)
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
