"""The option of a tree that counts what preemption costs keeps what it promises (tests/bench/preemption_cost.py)."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))  # last: modules of tests have names that are there, too

from preemption_cost import compare, find_faults


@pytest.mark.parametrize("savers", [1.0, 0.5])
def test_the_cheapest_first_loses_half_at_most_and_keeps_the_guarantee(savers):
    plain, cheapest = compare(3.0, 1, savers)
    for each in (plain, cheapest):
        # Each record says what the job then has to do again.
        assert each.lost_hours == pytest.approx(each.really_lost_hours, rel=0.01)
    assert plain.preemptions > 50
    assert find_faults(plain, cheapest) == [] or (savers < 1.0 and cheapest.lost_hours < plain.lost_hours)
