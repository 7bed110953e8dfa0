"""Share functions where rounding, prefixes or steep rises decide (fair_share_update.md 8, 9).

Everything else of them shows in the shares of an update, which the literal one decides (tests/property).
"""

import math
import random
from collections.abc import Sequence

import pytest

from cpumond.fairshare.functions import ShareFunction, gang_function, operation_function
from cpumond.fairshare.paths import Path, fifo_path, settle, weighted_path
from cpumond.fairshare.pool_functions import pool_function
from cpumond.fairshare.resources import ONE, ZERO, Vector, subtract, sum_in_order, sum_vectors

CLOSE = 1e-12


def vec(cpu: float = 0.0, memory: float = 0.0, slots: float = 0.0) -> Vector:
    return (slots, cpu, 0.0, memory, 0.0)


def op(demand: Vector, usage: Vector = ZERO, limits: Vector = ONE) -> ShareFunction:
    return operation_function(usage, demand, limits)


def gang(demand: Vector, limits: Vector = ONE) -> ShareFunction:
    return gang_function(demand, limits)


def weighted(functions: list[ShareFunction], weights: Sequence[float] | None = None) -> Path:
    """The complete path of a fair_share pool."""
    smallest = min(weights or [1.0])
    factors = [weight / smallest for weight in weights or [1.0] * len(functions)]
    return weighted_path(functions, factors, 1.0, False)


def near(v: Vector, tolerance: float = CLOSE) -> object:
    return pytest.approx(v, abs=tolerance, rel=0.0)


@pytest.mark.parametrize(("limit", "gets"), [(0.5, True), (math.nextafter(0.5, 0.0), False)])
def test_a_gang_that_just_fits_its_limits_gets_all(limit, gets):
    """9.4: jumps are met exactly or not at all."""
    function = gang(vec(cpu=0.5, memory=0.1), limits=vec(cpu=limit, memory=1.0))
    assert function.value(1.0) == (vec(cpu=0.5, memory=0.1) if gets else ZERO)


def test_a_gang_that_demands_the_whole_cluster_gets_nothing():
    """21: its jump sits at suggestion 1 and is trimmed."""
    assert gang(vec(cpu=1.0, memory=0.2)).value(1.0) == ZERO
    assert gang(vec(cpu=math.nextafter(1.0, 0.0))).value(1.0) == vec(cpu=math.nextafter(1.0, 0.0))


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
            suggestions = [min(1.0, path.xs[n] * factor) for factor in path.factors or ()]
            parts = [each.value(s) for each, s in zip(path.functions, suggestions, strict=True)]
            assert path.values[n] == near(sum_vectors(parts), 1e-15)


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


def test_a_steep_rise_up_to_the_end_of_what_is_known():
    """9.2: the function of a pool that was not made further ends with its ramp."""
    known = steep(complete=False)
    assert known.horizon == 0.3 + WIDTH
    path = weighted_path([known, op(vec(cpu=0.9))], [1.0, 1.0], known.horizon, False)
    assert (path.xs[-1], path.values[-1]) == (known.horizon, near(vec(cpu=0.6 + 2 * WIDTH, memory=0.5), 1e-15))


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
