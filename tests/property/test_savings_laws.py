"""Law of the comparison with the control group, over made-up days."""

from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from cpumond.scheduler.history.savings import DaySums, compare

ARMS = st.tuples(st.floats(0.0, 1.0), st.just(0.0) | st.floats(0.001, 1e6))
"""The part of what was ordered, and how much that was."""


@st.composite
def days(draw: st.DrawFn) -> list[DaySums]:
    made = [(control, others) for control, others in draw(st.lists(st.tuples(ARMS, ARMS), min_size=2, max_size=20))]
    return [DaySums(a * control, control, b * others, others) for (a, control), (b, others) in made]


@examples(200)
@given(days())
@example([DaySums(1.0, 10.0, 0.0, 1.0), DaySums(1.0, 10.0, 0.0, 1.0), DaySums(0.0, 0.0, 900.0, 1000.0)])
@example([DaySums(0.0, 1.0, 0.0, 9.0), DaySums(0.0, 1.0, 9.0, 9.0)])
def test_the_interval_has_the_difference_in_it_and_nothing_impossible(drawn: list[DaySums]) -> None:
    if not sum(day.control_ordered for day in drawn) or not sum(day.others_ordered for day in drawn):
        return  # there is nothing to compare
    found = compare(drawn)
    both = sum(day.control_ordered > 0.0 and day.others_ordered > 0.0 for day in drawn)
    assert (found.low is None, found.high is None) == (both < 2, both < 2)
    if found.low is None or found.high is None:
        return
    slack = 1e-9
    assert 0.0 <= found.control <= 1.0 + slack
    assert 0.0 <= found.others <= 1.0 + slack
    assert found.low - slack <= found.others - found.control <= found.high + slack
    assert found.low >= -1.0 - slack, "less than nothing of what was ordered, against all of it"
    assert found.high <= 1.0 + slack, "more than was ordered"
