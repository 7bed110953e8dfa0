"""Settings with the documents' defaults, the rules between them, and the mode in force."""

import math

import pytest

from cpumond.core.errors import ConfigError
from cpumond.monitor.model import MODES, MonitorSettings, check_together, compute_mode, least_active, start_state


@pytest.mark.parametrize("most", [{"relative_lower_bound": 0.9}, {"vote_decision_threshold": 4}])
def test_bounds_that_meet_and_a_threshold_just_below_the_window_are_valid(most):
    check_together(MonitorSettings(**most), "here")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_under_the_option_name(value):
    with pytest.raises(ConfigError, match=r"^here: restore_hold must be a finite number, got (nan|inf)$"):
        check_together(MonitorSettings(restore_hold_s=value), "here")


@pytest.mark.parametrize(("mode", "not_given", "enabled", "disabled"), [
    (None, "shadow", "reclaim", "shadow"),
    ("off", "off", "off", "off"),
    ("shadow", "shadow", "shadow", "shadow"),
    ("up-only", "up-only", "up-only", "shadow"),
    ("reclaim", "reclaim", "reclaim", "shadow"),
])  # fmt: skip
def test_enable_cpu_reclaim_false_holds_the_mode_to_at_most_shadow(mode, not_given, enabled, disabled):
    modes = [compute_mode(MonitorSettings(mode=mode, enable_cpu_reclaim=given)) for given in (None, True, False)]
    assert modes == [not_given, enabled, disabled]


def test_modes_are_ordered_from_least_to_most_active():
    for position, mode in enumerate(MODES):
        for other in MODES[position:]:
            assert least_active(mode, other) == least_active(other, mode) == mode


def test_an_adopted_limit_is_held_to_the_jobs_cpu():
    assert start_state(4.0, 0.0, limit_cores=9.0).limit_cores == 4.0
    assert start_state(4.0, 0.0, limit_cores=3.0).limit_cores == 3.0
