"""Throttle restore: when usage cannot show hunger (DESIGN.md 5)."""

from __future__ import annotations

import pytest

from cpumond.monitor.model import CpuReading, MonitorSettings, start_state
from cpumond.monitor.protect import compute_throttled_ratio, needs_restore


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
    assert not needs_restore(state, 0.25, MonitorSettings())
    assert needs_restore(state, 0.2500001, MonitorSettings())


def test_throttle_restore_ratio_0_turns_it_off():
    assert not needs_restore(start_state(10.0, 0.0, limit_cores=5.0), 1.0, MonitorSettings(throttle_restore_ratio=0.0))


def test_only_when_the_limit_stands_below_cpu_limit():
    assert not needs_restore(start_state(10.0, 0.0), 1.0, MonitorSettings())


def test_only_with_the_quota_actuator():
    state = start_state(10.0, 0.0, limit_cores=5.0)
    assert needs_restore(state, 1.0, MonitorSettings(actuator="quota"))
    assert not needs_restore(state, 1.0, MonitorSettings(actuator="weight"))
