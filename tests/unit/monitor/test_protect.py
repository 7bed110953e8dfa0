"""Throttle and pressure restore: when usage cannot show hunger."""

import pytest

from cpumond.monitor.model import CpuReading, MonitorSettings, start_state
from cpumond.monitor.policy import check
from cpumond.monitor.protect import compute_pressure_ratio, compute_throttled_ratio, needs_restore


def reading(nr_periods: int, nr_throttled: int) -> CpuReading:
    return CpuReading(0.0, 0.0, nr_periods=nr_periods, nr_throttled=nr_throttled)


@pytest.mark.parametrize(("before", "now", "ratio"), [
    ((0, 0), (10, 0), 0.0),
    ((0, 0), (10, 3), 0.3),
    ((100, 50), (110, 60), 1.0),
    ((100, 50), (100, 51), 0.0),
    ((100, 50), (90, 60), 0.0),
    ((0, 0), (10, 11), 1.0),
    ((0, 5), (10, 3), 0.0),
], ids=["none", "some", "all", "no period passed", "periods fell", "held to 1", "held to 0"])  # fmt: skip
def test_share_of_throttled_periods_between_two_readings_is_in_0_to_1(before, now, ratio):
    assert compute_throttled_ratio(reading(*before), reading(*now)) == ratio


PRESSED = MonitorSettings(pressure_restore_ratio=0.4)


@pytest.mark.parametrize(("limit_cores", "given", "throttled_ratio", "pressure_ratio", "restores"), [
    (5.0, {"throttle_restore_ratio": 0.25}, 0.25, 0.0, False),
    (5.0, {"throttle_restore_ratio": 0.25}, 0.2500001, 0.0, True),
    (5.0, {"throttle_restore_ratio": 0.0}, 1.0, 0.0, False),
    (10.0, {}, 1.0, 0.0, False),
    (5.0, {"actuator": "quota"}, 1.0, 0.0, True),
    (5.0, {"actuator": "weight"}, 1.0, 0.0, False),
    (5.0, {"pressure_restore_ratio": 0.4}, 0.0, 0.4, False),
    (5.0, {"pressure_restore_ratio": 0.4}, 0.0, 0.4000001, True),
    (10.0, {"pressure_restore_ratio": 0.4}, 0.0, 1.0, False),
    (5.0, {}, 0.0, 1.0, False),
    (5.0, {"actuator": "weight", "pressure_restore_ratio": 0.4}, 0.0, 0.5, True),
    (5.0, {"throttle_restore_ratio": 0.0, "pressure_restore_ratio": 0.4}, 1.0, 0.0, False),
    (5.0, {"throttle_restore_ratio": 0.0, "pressure_restore_ratio": 0.4}, 0.0, 1.0, True),
    (5.0, {"pressure_restore_ratio": 0.4}, 1.0, 0.0, True),
], ids=[
    "as much", "more", "turned off", "has all", "quota", "weight", "as much pressure", "more pressure",
    "has all, pressure", "pressure turned off", "a lowered weight makes wait too", "only pressure, throttled",
    "only pressure, pressed", "both, throttled",
])  # fmt: skip
def test_more_than_the_ratio_of_a_sign_is_needed(limit_cores, given, throttled_ratio, pressure_ratio, restores):
    state = start_state(10.0, 0.0, limit_cores=limit_cores)
    assert needs_restore(state, throttled_ratio, MonitorSettings(**given), pressure_ratio) is restores


@pytest.mark.parametrize("periods", [9, 10, 11])
def test_by_default_one_throttled_period_in_a_check_of_1_s_is_enough(periods):
    state = start_state(10.0, 0.0, limit_cores=5.0)
    assert needs_restore(state, compute_throttled_ratio(reading(0, 0), reading(periods, 1)), MonitorSettings())


@pytest.mark.parametrize(("actuator", "ratio", "restores"), [
    ("guarantee", None, False), ("guarantee", 1.0, True), ("guarantee", 1.3, False), ("weight", 1.0, True),
    ("quota", 1.0, False),
])  # fmt: skip
def test_use_above_a_limit_that_cuts_nothing_off_restores_where_asked_for(actuator, ratio, restores):
    state = start_state(10.0, 0.0, limit_cores=4.0)
    settings = MonitorSettings(actuator=actuator, use_restore_ratio=ratio)
    assert needs_restore(state, 0.0, settings, usage_cores=5.0) is restores
    assert not needs_restore(state, 0.0, settings, usage_cores=4.0)


@pytest.mark.parametrize(("before", "now", "ratio"), [
    ((0.0, 1.0), (2.0, 1.5), 0.25),
    ((0.0, 1.0), (2.0, 1.0), 0.0),
    ((0.0, 1.0), (2.0, 9.0), 1.0),
    ((0.0, 1.0), (2.0, 0.5), 0.0),
    ((0.0, None), (2.0, 0.5), 0.0),
    ((0.0, 1.0), (2.0, None), 0.0),
    ((2.0, 1.0), (2.0, 1.5), 0.0),
], ids=["some", "none", "held to 1", "fell", "not read before", "not read now", "no time passed"])  # fmt: skip
def test_share_of_the_time_in_which_some_task_waited_is_in_0_to_1(before, now, ratio):
    first, second = (CpuReading(0.0, at_s, pressure_s=pressure_s) for at_s, pressure_s in (before, now))
    assert compute_pressure_ratio(first, second) == ratio


def test_a_check_restores_from_two_readings():
    state = start_state(4.0, 0.0, limit_cores=2.0)
    state, _ = check(state, CpuReading(1.0, 10.0, pressure_s=3.0), 10.0, PRESSED)
    after, decision = check(state, CpuReading(1.5, 11.0, pressure_s=3.5), 11.0, PRESSED)
    assert (decision.kind, decision.pressure_ratio, after.limit_cores) == ("restore", 0.5, 4.0)
    _, decision = check(state, CpuReading(1.5, 11.0, pressure_s=3.5), 11.0, MonitorSettings())
    assert (decision.kind, decision.pressure_ratio) == ("hold", 0.0)
