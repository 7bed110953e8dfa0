"""The registry of limit rules, and what a rule does to the options."""

from typing import Any, get_args

import msgspec
import pytest

from cpumond.core.errors import ConfigError
from cpumond.monitor import model, rules
from cpumond.monitor.policy import VOTE_MODES

OPTIONS = {field.encode_name for field in msgspec.structs.fields(model.MonitorSettings)}


def test_every_rule_has_a_name_defaults_and_a_step():
    assert set(rules.RULES) == set(model.RULE_DEFAULTS) == set(get_args(model.LimitRule))


def test_every_way_to_count_votes_has_a_name():
    assert set(VOTE_MODES) == set(get_args(model.VoteMode))


@pytest.mark.parametrize("rule", model.RULE_DEFAULTS)
def test_options_that_say_nothing_under_a_rule_exist(rule):
    assert set(model.RULE_DEFAULTS[rule].idle_options) <= OPTIONS


@pytest.mark.parametrize(("given", "poll_s", "burst_ratio"), [
    ({}, 0.0, None),
    ({"limit_rule": "peak"}, 0.2, 1.0),
    ({"limit_rule": "peak", "throttle_poll": 0.0, "burst_ratio": 0.0}, 0.0, 0.0),
    ({"throttle_poll": 0.1, "burst_ratio": 0.5}, 0.1, 0.5),
    ({"throttle_poll": 0.1, "throttle_restore_ratio": 0.0}, 0.0, None),
    ({"throttle_poll": 0.1, "actuator": "weight"}, 0.0, None),
    ({"limit_rule": "peak", "throttle_restore_ratio": 0.0, "actuator": "weight"}, 0.2, 1.0),
])  # fmt: skip
def test_looks_and_burst_that_are_not_given_depend_on_the_rule(given, poll_s, burst_ratio):
    settings = msgspec.convert(given, model.MonitorSettings)
    assert (settings.poll_s, settings.burst_ratio) == (poll_s, burst_ratio)


def test_another_rule_keeps_looks_and_burst_that_stand():
    peak = msgspec.structs.replace(model.MonitorSettings(limit_rule="peak"), limit_rule="document")
    assert (peak.throttle_poll_s, peak.burst_ratio) == (0.2, 1.0)


def test_looks_below_10_ms_are_refused():
    for poll_s in (0.0, 0.01, 5.0):
        model.check_together(model.MonitorSettings(throttle_poll_s=poll_s), "here")
    with pytest.raises(ConfigError) as caught:
        model.check_together(model.MonitorSettings(throttle_poll_s=0.005), "file: monitor")
    assert str(caught.value) == "file: monitor: throttle_poll = 0.005s is too short; allowed: 0 (no looks), or >= 10ms"


@pytest.mark.parametrize(("given", "sentences"), [
    ({"limit_rule": "peak", "vote_mode": "document"}, ['vote_mode has no effect under limit_rule = "peak"']),
    ({"limit_rule": "peak", "throttle_budget": 0.01, "min_cpu_limit": 2.0, "throttle_poll": 0.1}, []),
    ({"throttle_budget": 0.01, "peak_memory": 3.0},
     [f'{name} has no effect under limit_rule = "document"' for name in ("throttle_budget", "peak_memory")]),
    ({"throttle_poll": 0.1, "smoothing_factor": 0.5}, []),
    ({"throttle_poll": 0.0, "throttle_restore_ratio": 0.0}, []),
    ({"throttle_poll": 0.1, "throttle_restore_ratio": 0.0},
     ['throttle_poll has no effect under limit_rule = "document" with throttle_restore_ratio = 0']),
    ({"throttle_poll": 0.1, "actuator": "weight"},
     ['throttle_poll has no effect under limit_rule = "document" with actuator = "weight"']),
    ({"burst_ratio": 0.5, "min_cores_per_thread": 0.1, "actuator": "weight"},
     [f'{name} has no effect with actuator = "weight"' for name in ("burst_ratio", "min_cores_per_thread")]),
    ({"limit_rule": "peak", "smoothing_factor": 0.5, "smoothing_seed": "limit"}, []),
    ({"throttle_poll": 0.1, "throttle_restore_ratio": 1.0},
     ['throttle_poll has no effect under limit_rule = "document" with throttle_restore_ratio = 1']),
])  # fmt: skip
def test_options_without_effect_are_told(given: dict[str, Any], sentences: list[str]):
    assert model.list_idle_options(msgspec.convert(given, model.MonitorSettings), given) == sentences


def test_pressure_is_followed_by_default_only_under_a_weight():
    ratios = {
        (rule, actuator): model.MonitorSettings(limit_rule=rule, actuator=actuator).pressure_restore_ratio
        for rule in rules.RULES
        for actuator in ("quota", "weight")
    }
    assert {key for key, ratio in ratios.items() if ratio} == {("peak", "weight")}
    assert ratios["peak", "weight"] == 0.1
    off = model.MonitorSettings(limit_rule="peak", actuator="weight", pressure_restore_ratio=0.0)
    assert not off.follows_pressure


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_look_by_the_documents_rule_is_a_restore_or_nothing(ratio):
    s = model.MonitorSettings(throttle_poll_s=0.2, throttle_restore_ratio=ratio)
    assert s.poll_s == 0.0
    base = model.CpuReading(0.0, 0.0)
    state = msgspec.structs.replace(model.start_state(16.0, 0.0, 2.0), base=base, seen=base)
    assert rules.look(state, model.CpuReading(0.4, 0.2, nr_periods=2, nr_throttled=2), s) is None


def test_only_options_that_are_given_are_told():
    assert model.list_idle_options(model.MonitorSettings(limit_rule="peak"), ()) == []


@pytest.mark.parametrize("rule", rules.RULES)
def test_a_look_at_a_held_down_job_gives_everything_back(rule):
    settings = model.MonitorSettings(limit_rule=rule, throttle_poll_s=0.2)
    state = model.start_state(16.0, 0.0, limit_cores=4.0)
    state, _ = rules.check(state, model.CpuReading(0.0, 0.0), 0.0, settings)
    assert rules.look(state, model.CpuReading(0.8, 0.2), settings) is None
    found = rules.look(state, model.CpuReading(0.8, 0.2, nr_periods=2, nr_throttled=1, throttled_s=0.05), settings)
    assert found is not None
    after, decision = found
    assert (decision.kind, decision.old_cores, decision.new_cores) == ("restore", 4.0, 16.0)
    assert (after.limit_cores, after.late_cpu_s) == (16.0, 0.05)
    assert rules.look(after, model.CpuReading(0.8, 0.4, nr_periods=4, nr_throttled=3), settings) is None
