"""Throttle and pressure restore: when usage cannot show hunger."""

from __future__ import annotations

import pytest

from cpumond.monitor.model import CpuReading, MonitorSettings, start_state
from cpumond.monitor.policy import check
from cpumond.monitor.protect import compute_pressure_ratio, compute_throttled_ratio, needs_restore


def reading(nr_periods: int, nr_throttled: int) -> CpuReading:
    return CpuReading(0.0, 0.0, nr_periods=nr_periods, nr_throttled=nr_throttled)


@pytest.mark.parametrize(
    ("before", "now", "ratio"),
    [
        ((0, 0), (10, 0), 0.0),
        ((0, 0), (10, 3), 0.3),
        ((100, 50), (110, 60), 1.0),
        ((100, 50), (100, 51), 0.0),
        ((100, 50), (90, 60), 0.0),
        ((0, 0), (10, 11), 1.0),
        ((0, 5), (10, 3), 0.0),
    ],
    ids=["none", "some", "all", "no period passed", "periods fell", "held to 1", "held to 0"],
)
def test_share_of_throttled_periods_between_two_readings_is_in_0_to_1(before, now, ratio):
    assert compute_throttled_ratio(reading(*before), reading(*now)) == ratio


def test_more_than_throttle_restore_ratio_of_the_periods_is_needed():
    state = start_state(10.0, 0.0, limit_cores=5.0)
    settings = MonitorSettings(throttle_restore_ratio=0.25)
    assert not needs_restore(state, 0.25, settings)
    assert needs_restore(state, 0.2500001, settings)


@pytest.mark.parametrize("periods", [9, 10, 11])
def test_by_default_one_throttled_period_in_a_check_of_1_s_is_enough(periods):
    state = start_state(10.0, 0.0, limit_cores=5.0)
    assert needs_restore(state, compute_throttled_ratio(reading(0, 0), reading(periods, 1)), MonitorSettings())


def test_a_job_that_is_throttled_in_one_of_ten_periods_is_not_held_back_for_ever():
    state = start_state(10.0, 0.0, limit_cores=5.0)
    for second in range(3):
        now = CpuReading(4.0 * second, float(second), nr_periods=10 * second, nr_throttled=second)
        state, _ = check(state, now, now.at_s, MonitorSettings())
    assert state.limit_cores == 10.0


def test_throttle_restore_ratio_0_turns_it_off():
    assert not needs_restore(start_state(10.0, 0.0, limit_cores=5.0), 1.0, MonitorSettings(throttle_restore_ratio=0.0))


@pytest.mark.parametrize(("actuator", "ratio", "restores"), [
    ("guarantee", None, False), ("guarantee", 1.0, True), ("guarantee", 1.3, False), ("weight", 1.0, True),
    ("quota", 1.0, False),
])  # fmt: skip
def test_use_above_a_limit_that_cuts_nothing_off_restores_where_asked_for(actuator, ratio, restores):
    state = start_state(10.0, 0.0, limit_cores=4.0)
    settings = MonitorSettings(actuator=actuator, use_restore_ratio=ratio)
    assert needs_restore(state, 0.0, settings, usage_cores=5.0) is restores
    assert not needs_restore(state, 0.0, settings, usage_cores=4.0)


def test_only_when_the_limit_stands_below_cpu_limit():
    assert not needs_restore(start_state(10.0, 0.0), 1.0, MonitorSettings())


def test_only_with_the_quota_actuator():
    state = start_state(10.0, 0.0, limit_cores=5.0)
    assert needs_restore(state, 1.0, MonitorSettings(actuator="quota"))
    assert not needs_restore(state, 1.0, MonitorSettings(actuator="weight"))


# pressure

PRESSED = MonitorSettings(pressure_restore_ratio=0.4)


@pytest.mark.parametrize(
    ("before", "now", "ratio"),
    [
        ((0.0, 1.0), (2.0, 1.5), 0.25),
        ((0.0, 1.0), (2.0, 1.0), 0.0),
        ((0.0, 1.0), (2.0, 9.0), 1.0),
        ((0.0, 1.0), (2.0, 0.5), 0.0),
        ((0.0, None), (2.0, 0.5), 0.0),
        ((0.0, 1.0), (2.0, None), 0.0),
        ((2.0, 1.0), (2.0, 1.5), 0.0),
    ],
    ids=["some", "none", "held to 1", "fell", "not read before", "not read now", "no time passed"],
)
def test_share_of_the_time_in_which_some_task_waited_is_in_0_to_1(before, now, ratio):
    first, second = (CpuReading(0.0, at_s, pressure_s=pressure_s) for at_s, pressure_s in (before, now))
    assert compute_pressure_ratio(first, second) == ratio


def test_more_than_pressure_restore_ratio_of_the_time_is_needed():
    state = start_state(10.0, 0.0, limit_cores=5.0)
    assert not needs_restore(state, 0.0, PRESSED, 0.4)
    assert needs_restore(state, 0.0, PRESSED, 0.4000001)
    assert not needs_restore(start_state(10.0, 0.0), 0.0, PRESSED, 1.0)
    assert not needs_restore(state, 0.0, MonitorSettings(), 1.0)


def test_a_lowered_weight_makes_wait_too():
    state = start_state(10.0, 0.0, limit_cores=5.0)
    assert needs_restore(state, 0.0, MonitorSettings(actuator="weight", pressure_restore_ratio=0.4), 0.5)


def test_each_sign_is_turned_off_by_itself():
    state = start_state(10.0, 0.0, limit_cores=5.0)
    only_pressure = MonitorSettings(throttle_restore_ratio=0.0, pressure_restore_ratio=0.4)
    assert not needs_restore(state, 1.0, only_pressure, 0.0)
    assert needs_restore(state, 0.0, only_pressure, 1.0)
    assert needs_restore(state, 1.0, PRESSED, 0.0)


def test_a_check_restores_from_two_readings():
    state = start_state(4.0, 0.0, limit_cores=2.0)
    state, _ = check(state, CpuReading(1.0, 10.0, pressure_s=3.0), 10.0, PRESSED)
    after, decision = check(state, CpuReading(1.5, 11.0, pressure_s=3.5), 11.0, PRESSED)
    assert (decision.kind, decision.pressure_ratio, after.limit_cores) == ("restore", 0.5, 4.0)
    _, decision = check(state, CpuReading(1.5, 11.0, pressure_s=3.5), 11.0, MonitorSettings())
    assert (decision.kind, decision.pressure_ratio) == ("hold", 0.0)
