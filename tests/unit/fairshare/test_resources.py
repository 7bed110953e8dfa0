"""The resource vector: comparisons, shares, quantisation and the exact search (fair_share_update.md 0, 3, 17)."""

from __future__ import annotations

import math
import random

import pytest

from cpumond.fairshare.resources import (
    RESOURCES,
    ZERO,
    Vector,
    add,
    bisect_max,
    dominates,
    exact_cpu,
    greatest,
    least,
    positive_part,
    quantise_cpu,
    ratio,
    round_half_away,
    scale,
    scale_cpu,
    scale_resources,
    scale_volume,
    share,
    subtract,
    sum_resources,
    sum_vectors,
)

A: Vector = (1.0, 2.0, 3.0, 4.0, 5.0)
B: Vector = (5.0, 3.5, 3.0, 2.0, -1.0)


def test_the_order_of_resources_is_that_of_the_specification():
    """0: layout of vectors and order of ties."""
    assert RESOURCES == ("user_slots", "cpu", "gpu", "memory", "network")


def test_arithmetic_is_component_by_component():
    """0: +, -, min, max and scaling."""
    assert add(A, B) == (6.0, 5.5, 6.0, 6.0, 4.0)
    assert subtract(A, B) == (-4.0, -1.5, 0.0, 2.0, 6.0)
    assert scale(A, 0.5) == (0.5, 1.0, 1.5, 2.0, 2.5)
    assert least(A, B) == least(B, A) == (1.0, 2.0, 3.0, 2.0, -1.0)
    assert greatest(A, B) == greatest(B, A) == (5.0, 3.5, 3.0, 4.0, 5.0)
    assert positive_part((-1.0, 2.0, -0.5, 0.0, 3.0)) == (0.0, 2.0, 0.0, 0.0, 3.0)


@pytest.mark.parametrize("r", range(5))
def test_a_vector_dominates_only_if_no_component_is_less(r):
    """0: exact, no tolerance."""
    slightly_more = tuple(math.nextafter(x, math.inf) if n == r else x for n, x in enumerate(A))
    assert dominates(A, A)
    assert dominates(slightly_more, A)
    assert not dominates(A, slightly_more)


def test_vectors_are_summed_in_their_order():
    """0: sums run from left to right, which decides the last bit."""
    assert sum_vectors([]) == ZERO
    assert sum_vectors([A]) == A
    tenths = [(0.1, 1e16, 0.0, 1.0, 2.0), (0.2, 1.0, 0.0, 2.0, 2.0), (0.3, -1e16, 0.0, 3.0, 2.0)]
    assert sum_vectors(tenths) == (0.1 + 0.2 + 0.3, 0.0, 0.0, 6.0, 6.0)
    assert sum_vectors(tenths[::-1])[:2] == (0.3 + 0.2 + 0.1, 0.0) != (0.1 + 0.2 + 0.3, 0.0)


def test_a_share_of_what_the_cluster_has_none_of_is_zero():
    """0: share(x)_r = x_r / T_r if T_r != 0, otherwise 0, even when x_r != 0."""
    assert share((1.0, 25.0, 7.0, 0.0, 3.0), (10.0, 100.0, 0.0, 50.0, 2.0)) == (0.1, 0.25, 0.0, 0.0, 1.5)
    assert share(A, ZERO) == ZERO
    for r in range(5):
        only = tuple(4.0 if n == r else 0.0 for n in range(5))
        assert share((1.0, 1.0, 1.0, 1.0, 1.0), only) == tuple(0.25 if n == r else 0.0 for n in range(5))


def test_a_ratio_is_the_greatest_share_of_what_the_cluster_has():
    """3: max over {r : T_r > 0}; 0 if there is no such resource."""
    assert ratio((1.0, 30.0, 900.0, 10.0, 0.0), (10.0, 100.0, 0.0, 50.0, 2.0)) == 0.3
    assert ratio(A, ZERO) == 0.0


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (0.0, 0), (0.4, 0), (0.5, 1), (0.6, 1), (1.5, 2), (2.5, 3), (2.4999, 2), (7.0, 7),
        (-0.4, 0), (-0.5, -1), (-2.5, -3), (1e9 + 0.5, 1e9 + 1), (2.0**51 + 1, 2.0**51 + 1),
    ],
)  # fmt: skip
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


def test_resources_times_a_number_are_resources():
    """17: nearest integer or hundredth of a core, halves away from zero."""
    assert scale_resources((5.0, 0.05, 3.0, 1001.0, 7.0), 0.5) == (3.0, 0.03, 2.0, 501.0, 4.0)
    assert scale_resources((10.0, 10.0, 10.0, 10.0, 10.0), 0.333) == (3.0, 3.33, 3.0, 3.0, 3.0)


def test_of_volumes_only_cpu_is_rounded():
    """17: cpu is rounded after each multiplication, the others are doubles."""
    assert scale_volume((5.0, 0.05, 3.0, 1001.0, 7.0), 0.5) == (2.5, 0.03, 1.5, 500.5, 3.5)
    assert scale_volume((1.0, 1.0, 1.0, 1.0, 1.0), 1 / 3) == (1 / 3, 0.33, 1 / 3, 1 / 3, 1 / 3)
    assert exact_cpu((0.123, 0.123, 0.123, 0.123, 0.123)) == (0.123, 0.12, 0.123, 0.123, 0.123)


def test_a_sum_of_hundredths_is_the_nearest_double_to_the_exact_sum():
    """17: cpu is counted in hundredths, so sums of it carry no rounding."""
    rng = random.Random(17)
    hundredths = [rng.randrange(10**7) for _ in range(1000)]
    vectors = [(0.1, n / 100.0, 0.0, 1.0, 0.0) for n in hundredths]
    total = sum_resources(vectors)
    assert total[1] == sum(hundredths) / 100.0 != sum(v[1] for v in vectors)
    assert total == (sum(v[0] for v in vectors), total[1], 0.0, 1000.0, 0.0)
    assert sum_resources([]) == ZERO


@pytest.mark.parametrize("threshold", [0.0, 5e-324, 1e-300, 0.1, 1.0 / 3.0, 0.5, 1.0 - 2.0**-53, 1.0])
def test_bisection_finds_the_greatest_double(threshold):
    """0: the largest double in [lo, hi] for which a monotone predicate holds."""
    assert bisect_max(0.0, 1.0, lambda x: x <= threshold) == threshold


def test_bisection_of_a_predicate_that_rounds_returns_where_it_holds():
    """0: return a point where P is true; the next double must not hold."""
    root = bisect_max(1.0, 2.0, lambda x: x * x <= 2.0)
    assert root * root <= 2.0 < math.nextafter(root, 2.0) ** 2


def test_bisection_looks_at_the_upper_end_first():
    """0: hi at once if P(hi)."""
    asked = []

    def holds(x: float) -> bool:
        asked.append(x)
        return True

    assert bisect_max(0.25, 0.75, holds) == 0.75
    assert asked == [0.75]


def test_bisection_takes_at_most_one_question_a_bit():
    """0: bisection over the bit patterns of doubles."""
    asked = []

    def holds(x: float) -> bool:
        asked.append(x)
        return x <= 1e-200

    assert bisect_max(0.0, 1.0, holds) == 1e-200
    assert len(asked) <= 65
