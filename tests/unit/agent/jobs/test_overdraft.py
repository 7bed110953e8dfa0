"""Who has to go when the jobs of a node may use more than it has (semantics.md 1.9 point 1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpumond.agent.jobs.overdraft import Share, Timer, find_victims


@pytest.mark.parametrize(("timer", "looks", "struck"), [
    (Timer(10.0), [(0.0, 3.0), (5.0, 3.0), (10.0, 3.0), (10.5, 3.0)], [False, False, False, True]),
    (Timer(10.0), [(0.0, 3.0), (9.0, 3.0), (10.0, 2.0), (11.0, 3.0), (20.0, 3.0), (21.5, 3.0)],
     [False, False, False, False, False, True]),
    (Timer(10.0), [(0.0, 3.0), (11.0, 3.0), (20.0, 3.0), (21.5, 3.0)], [False, True, False, True]),
    (Timer(10.0, 0.05), [(0.0, 2.1), (11.0, 2.1), (20.0, 2.2), (31.0, 2.2)], [False, False, False, True]),
    (Timer(0.0), [(0.0, 2.0 + 1e-9), (1.0, 2.0 + 1e-9)], [False, False]),
], ids=[
    "longer than the timeout", "a moment within the capacity resets it", "it starts anew after it has struck",
    "what is allowed", "sums of floats that are the capacity",
])  # fmt: skip
def test_an_overdraft_counts_if_it_lasts(timer: Timer, looks: list[tuple[float, float]], struck: list[bool]) -> None:
    assert [timer.note(now, used, 2.0) for now, used in looks] == struck


def test_the_latest_started_go_first_until_the_rest_fits() -> None:
    jobs = [Share("old", 1.0, 2.0), Share("new", 3.0, 0.5), Share("middle", 2.0, 1.0)]
    assert find_victims(jobs, 0.0, 3.5) == []
    assert find_victims(jobs, 0.0, 3.0) == ["new"]
    assert find_victims(jobs, 0.0, 2.9) == ["new", "middle"]
    assert find_victims(jobs, 1.0, 3.0) == ["new", "middle"]


def test_a_job_that_takes_nothing_of_the_resource_is_left_alone() -> None:
    assert find_victims([Share("a", 1.0, 2.0), Share("idle", 2.0, 0.0)], 0.0, 1.0) == ["a"]


SHARES = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 8)), max_size=12)


@given(SHARES, st.floats(0, 4), st.floats(0.1, 32))
def test_what_is_left_fits_or_nothing_is_left_and_no_victim_is_needless(
    shares: list[tuple[float, float]], others: float, capacity: float
) -> None:
    jobs = [Share(str(number), start, amount) for number, (start, amount) in enumerate(shares)]
    victims = find_victims(jobs, others, capacity)
    left = others + sum(job.amount for job in jobs if job.job_id not in victims)
    if others > capacity * 1.00001:
        assert victims == [], "nothing would be won"
    else:
        assert left <= capacity * 1.00001
    if victims:
        last = next(job for job in jobs if job.job_id == victims[-1])
        assert left + last.amount > capacity
