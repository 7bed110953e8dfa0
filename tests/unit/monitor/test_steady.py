"""Where a limit stays when a job goes on as it was seen, by both rules."""

import math

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from cpumond.monitor.model import CpuReading, MonitorSettings, start_state
from cpumond.monitor.rules import RULES, check
from cpumond.monitor.steady import Use, find_steady_state

DOCUMENT = MonitorSettings()
PEAK = MonitorSettings(limit_rule="peak")
BOTH = pytest.mark.parametrize("s", [DOCUMENT, PEAK], ids=["document", "peak"])
IDLE = [Use(1.0, 0.3)]


@BOTH
def test_it_is_what_the_check_would_do_second_by_second(s):
    """The same job, checked from its counters until the time that is said."""
    steady = find_steady_state(IDLE, 4.0, s)
    assert steady is not None
    state, at_s = start_state(4.0, 0.0), 0.0
    state, _ = check(state, CpuReading(0.0, 0.0), 0.0, s)
    while at_s < steady.after_s - 1.0:
        at_s += 1.0
        state, _ = check(state, CpuReading(0.3 * at_s, at_s), at_s, s)
    assert state.limit_cores > steady.limit_cores * 1.005
    at_s += 1.0
    state, _ = check(state, CpuReading(0.3 * at_s, at_s), at_s, s)
    assert state.limit_cores == pytest.approx(steady.limit_cores, abs=0.05)


@BOTH
def test_a_job_that_needs_all_of_it_keeps_it(s):
    steady = find_steady_state([Use(1.0, 3.9)] * 30, 4.0, s)
    assert (steady.limit_cores, steady.after_s, steady.reclaimed_ratio) == (4.0, 0.0, 0.0)


@BOTH
def test_bursts_move_the_limit_between_two_values(s):
    steady = find_steady_state([*[Use(1.0, 0.3)] * 50, *[Use(1.0, 3.0)] * 10], 4.0, s)
    assert steady.least_cores < 1.5 < steady.limit_cores < 3.0
    assert steady.most_cores == 4.0  # what holds it back gives all back


def test_a_start_delay_is_counted():
    late, at_once = (find_steady_state(IDLE, 4.0, MonitorSettings(start_delay_s=delay_s)) for delay_s in (100.0, 0.0))
    assert late is not None
    assert late.after_s == at_once.after_s + 100.0


def test_without_a_restore_the_use_is_cut_off_at_the_limit():
    s = MonitorSettings(throttle_restore_ratio=0.0, relative_upper_bound=1.0)
    steady = find_steady_state([*[Use(1.0, 0.1)] * 60, *[Use(1.0, 4.0)] * 20], 4.0, s)
    assert steady.most_cores < 1.5


def test_nothing_seen_is_nothing_said():
    assert find_steady_state([], 4.0, DOCUMENT) is None


@examples(60)
@given(
    st.sampled_from(sorted(RULES)),
    st.lists(st.builds(Use, st.floats(0.5, 5.0), st.floats(0.0, 10.0)), min_size=1, max_size=20),
    st.floats(0.1, 8.0),
    st.sampled_from(["quota", "weight"]),
)
def test_it_ends_and_stays_between_nothing_and_what_was_ordered(rule, uses, hard_cores, actuator):
    steady = find_steady_state(uses, hard_cores, MonitorSettings(limit_rule=rule, actuator=actuator))
    assert 0.0 <= steady.least_cores <= steady.limit_cores * (1 + 1e-9)
    assert steady.limit_cores <= steady.most_cores * (1 + 1e-9) <= hard_cores * (1 + 2e-9)
    assert math.isfinite(steady.after_s)
    assert -1e-9 <= steady.reclaimed_ratio <= 1.0
