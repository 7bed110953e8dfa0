"""Rounding of amounts, and the exact search (fair_share_update.md 0, 17)."""

import functools
import math
import operator
import random

import pytest

from cpumond.fairshare.resources import (
    ZERO,
    bisect_max,
    quantise_cpu,
    round_half_away,
    scale_cpu,
    sum_in_order,
    sum_resources,
    sum_vectors,
)


@pytest.mark.parametrize(("x", "rounded"), [
    (0.0, 0), (0.4, 0), (0.5, 1), (0.6, 1), (1.5, 2), (2.5, 3), (2.4999, 2), (7.0, 7),
    (-0.4, 0), (-0.5, -1), (-2.5, -3), (1e9 + 0.5, 1e9 + 1), (2.0**51 + 1, 2.0**51 + 1),
])  # fmt: skip
def test_halves_are_rounded_away_from_zero(x, rounded):
    """17: nearest integer, halves away from zero."""
    assert round_half_away(x) == rounded


@pytest.mark.parametrize(
    ("cores", "quantised"),
    [(0.0, 0.0), (0.004, 0.0), (0.005, 0.01), (0.125, 0.13), (2.345, 2.35), (33.333333, 33.33), (-0.005, -0.01)],
)
def test_cpu_is_a_multiple_of_a_hundredth(cores, quantised):
    """17: a real number becomes cpu by rounding to 0.01, halves away from zero."""
    assert quantise_cpu(cores) == quantised


def test_cpu_is_scaled_as_the_whole_number_of_hundredths_that_it_is():
    """17: 1.1 cores are 110 hundredths, although 1.1 * 100 is more than 110 in doubles."""
    assert 1.1 * 100.0 != 110.0
    half = 0.5 / 110.0
    assert scale_cpu(1.1, half) == 0.01
    assert scale_cpu(1.1, math.nextafter(half, 0.0)) == 0.0
    assert scale_cpu(0.29, 100.0) == 29.0
    assert scale_cpu(33.33, 0.5) == 16.67


def test_a_sum_of_hundredths_is_the_nearest_double_to_the_exact_sum():
    """17: cpu is counted in hundredths, so sums of it carry no rounding."""
    rng = random.Random(17)
    hundredths = [rng.randrange(10**7) for _ in range(1000)]
    vectors = [(0.1, n / 100.0, 0.0, 1.0, 0.0) for n in hundredths]
    total = sum_resources(vectors)
    # Not sum(), which since Python 3.12 makes up for what is rounded away.
    from_left = [functools.reduce(operator.add, column) for column in zip(*vectors, strict=True)]
    assert total[1] == sum(hundredths) / 100.0 != from_left[1]
    assert total[2:] == (0.0, 1000.0, 0.0)
    assert total[0] == pytest.approx(from_left[0], rel=1e-12)
    assert sum_resources([]) == ZERO


@pytest.mark.parametrize("threshold", [0.0, 5e-324, 1e-300, 0.1, 1.0 / 3.0, 0.5, 1.0 - 2.0**-53, 1.0])
def test_bisection_finds_the_greatest_double(threshold):
    """0: the largest double in [lo, hi] for which a monotone predicate holds."""
    assert bisect_max(0.0, 1.0, lambda x: x <= threshold) == threshold


def test_sums_run_from_left_to_right_on_every_python():
    values = [1e16, 1.0, 1.0, -1e16]
    assert sum_in_order(values) == 0.0, "2.0 where what was rounded off is made up for"
    assert sum_vectors([(x, 0.0, x, 0.1, -0.0) for x in values]) == (0.0, 0.0, 0.0, 0.1 + 0.1 + 0.1 + 0.1, 0.0)
    assert (sum_vectors([]), sum_in_order([])) == (ZERO, 0.0)
