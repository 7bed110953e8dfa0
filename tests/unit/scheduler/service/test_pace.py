"""How often nodes are told to send heartbeats."""

import pytest

from cpumond.scheduler.service.pace import MOST_S, first_period_s, look_s, next_period_s


def play(cost_s: float, nodes: int, rounds: int = 50, period_s: float = 1.0) -> list[float]:
    """The periods that a scheduler tells to so many nodes, whose heartbeats cost it ``cost_s`` each."""
    periods = [period_s]
    for _ in range(rounds):
        load = min(nodes * cost_s / periods[-1], 1.0)
        periods.append(next_period_s(periods[-1], load, 1.0, 60.0))
    return periods


def test_a_scheduler_that_is_not_busy_leaves_the_period_as_it_is():
    assert set(play(0.0003, 500)) == {1.0}


def test_the_period_grows_until_the_load_is_bearable_and_stays_there():
    periods = play(0.0003, 3000)
    assert 1.7 <= periods[-1] <= 3.0
    assert len(set(periods[-20:])) == 1
    assert 3000 * 0.0003 / periods[-1] <= 0.5 + 1e-9


def test_the_period_is_bounded_and_comes_back():
    high = play(0.01, 10_000)[-1]
    assert high == MOST_S
    assert play(0.0003, 500, period_s=high)[-1] == 1.0


@pytest.mark.parametrize(("timeout_s", "most_s"), [(60.0, 10.0), (20.0, 5.0), (2.0, 1.0)])
def test_the_period_leaves_time_before_a_node_counts_as_silent(timeout_s, most_s):
    period_s = 1.0
    for _ in range(20):
        period_s = next_period_s(period_s, 1.0, 1.0, timeout_s)
    assert period_s == most_s


def test_the_load_is_looked_at_after_all_nodes_have_heard():
    assert (look_s(1.0), look_s(10.0)) == (5.0, 25.0)


@pytest.mark.parametrize(
    ("nodes", "timeout_s", "period_s"),
    [(0, 60.0, 1.0), (1000, 60.0, 1.0), (3000, 60.0, 3.0), (50_000, 60.0, 10.0), (3000, 8.0, 2.0)],
)  # fmt: skip
def test_the_first_period_is_by_the_number_of_nodes(nodes: int, timeout_s: float, period_s: float):
    assert first_period_s(nodes, 1.0, timeout_s) == period_s


@pytest.mark.parametrize("cost_s", [0.0003, 0.0006, 0.001])
def test_a_take_over_makes_no_storm_of_heartbeats_that_had_become_rarer(cost_s: float):
    # What they send to the next leader, to what they sent to this one.
    assert play(cost_s, 3000)[-1] / first_period_s(3000, 1.0, 60.0) <= 2.0
