"""Settings that callers fold into weights and limits before an update."""

import math

import pytest

from cpumond.core.errors import FairShareInputError
from cpumond.fairshare.folding import fold_weight, infer_weight, limits_of_parent, limits_of_total
from cpumond.fairshare.resources import UNLIMITED

TOTAL = (10.0, 100.0, 3.0, 1001.0, 0.0)


def test_a_ratio_of_the_cluster_is_rounded_to_resources_that_exist():
    assert limits_of_total(TOTAL, 0.5) == (5.0, 50.0, 2.0, 501.0, 0.0)
    assert limits_of_total((1.0, 0.33, 1.0, 1.0, 1.0), 0.1) == (0.0, 0.03, 0.0, 0.0, 0.0)
    assert limits_of_total(TOTAL, 1.0) == TOTAL
    assert limits_of_total(TOTAL, 0.0) == (0.0,) * 5


def test_a_ratio_of_the_parent_goes_down_the_tree():
    top = limits_of_parent(TOTAL, UNLIMITED, UNLIMITED, 0.5)
    assert top == limits_of_total(TOTAL, 0.5)
    below = limits_of_parent(TOTAL, UNLIMITED, top, 0.5)
    assert below == (3.0, 25.0, 1.0, 251.0, 0.0)
    own = (math.inf, 20.0, math.inf, math.inf, math.inf)
    assert limits_of_parent(TOTAL, own, top, 0.5) == (3.0, 20.0, 1.0, 251.0, 0.0)


def test_without_a_ratio_the_own_limits_stay():
    own = (math.inf, 20.0, math.inf, math.inf, math.inf)
    assert limits_of_parent(TOTAL, own, (1.0, 1.0, 1.0, 1.0, 1.0), None) == own


def test_a_limit_of_the_parent_above_the_cluster_is_the_cluster():
    assert limits_of_parent(TOTAL, UNLIMITED, (1e6,) * 5, 0.5) == limits_of_total(TOTAL, 0.5)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(None, 1.0), (3.0, 3.0), (0.0, 2.0**-26), (1e-12, 2.0**-26), (2.0**-26, 2.0**-26), (2.0**26, 2.0**26)],
)
def test_weights(weight, expected):
    assert fold_weight('pool "q"', weight) == expected


def test_a_weight_that_is_not_set_is_the_inferred_one():
    assert fold_weight('pool "q"', None, 7.5) == 7.5
    assert fold_weight('pool "q"', 2.0, 7.5) == 2.0


@pytest.mark.parametrize(
    ("weight", "shown"), [(-1.0, "-1"), (2.0**26 + 1, "67108865"), (math.nan, "nan"), (math.inf, "inf")]
)
def test_a_weight_out_of_range_is_refused(weight, shown):
    with pytest.raises(FairShareInputError) as error:
        fold_weight('pool "q"', weight)
    assert str(error.value) == f'pool "q": weight: expected a number in [0, 67108864], got {shown}'


def test_a_weight_is_inferred_from_the_part_of_the_parents_guarantee():
    strong, parent = (0.0, 0.1, 0.2, 0.0, 0.0), (0.5, 0.4, 0.0, 0.0, 0.0)
    assert infer_weight(10.0, strong, 0.05, parent, 0.5) == pytest.approx(10.0 * 0.25 / 1.0)


@pytest.mark.parametrize(
    ("multiplier", "own", "parent"), [(None, 0.2, 0.4), (2.0, 0.0, 0.4), (2.0, 0.2, 0.0), (2.0, math.nan, 0.4)]
)
def test_without_anything_to_infer_from_a_weight_is_1(multiplier, own, parent):
    assert infer_weight(multiplier, (own,) * 5, 0.0, (parent,) * 5, 0.0) == 1.0


def test_an_inferred_weight_stays_in_range():
    assert infer_weight(1.0, (1e-30,) * 5, 0.0, (1.0,) * 5, 0.0) == 2.0**-26
    assert infer_weight(1e30, (1.0,) * 5, 0.0, (1e-300,) * 5, 0.0) == 2.0**26
