"""What an agent does at most where the scheduler has a say: never more than it was told, never more than its own."""

import os

import msgspec
import pytest

from cpumond.agent.config import AgentConfig, SchedulerOptions, finish_config
from cpumond.agent.discovery import FoundJob
from cpumond.agent.publish import MAX_PROBLEM, MAX_PROBLEMS, cut_problems
from cpumond.agent.tracked import resolve_job
from cpumond.core.errors import ConfigError
from cpumond.core.levels import ACTUATORS, LEVELS, lowest, read_level
from cpumond.core.wire import AgentAbout
from cpumond.monitor.model import find_level

OWN = {
    "off": {"mode": "off"}, "shadow": {"mode": "shadow"}, "up-only": {"mode": "up-only"},
    "guarantee": {"mode": "reclaim", "actuator": "guarantee"}, "weight": {"mode": "reclaim", "actuator": "weight"},
    "quota": {"enable_cpu_reclaim": True},
}  # fmt: skip


@pytest.mark.parametrize("own", LEVELS)
@pytest.mark.parametrize("told", LEVELS)
def test_the_lower_one_of_the_own_level_and_the_one_that_was_told_counts(own, told):
    config = AgentConfig(monitor=OWN[own], ceiling=told)
    assert find_level(config.node_settings()) == lowest(own, told)
    assert config.find_highest_level() == lowest(own, told)


def test_with_may_set_mode_nothing_is_written_before_the_scheduler_allows():
    for own in LEVELS:
        assert finish_config({"monitor": OWN[own]}, "").find_highest_level() == own
    link = SchedulerOptions(url="http://127.0.0.1:1", may_set_mode=True)
    config = finish_config({"monitor": OWN["quota"], "scheduler": link}, "")
    assert (config.ceiling, config.find_highest_level()) == ("shadow", "shadow")
    with pytest.raises(ConfigError, match=r"scheduler\.may_set_mode: needs scheduler\.url"):
        finish_config({"scheduler": SchedulerOptions(may_set_mode=True)}, "")


def test_a_host_of_the_control_group_does_nothing_and_says_so():
    fields = {"monitor": OWN["quota"], "control_group_ratio": 0.5, "control_group": "host"}
    configs = [AgentConfig(node_id=name, **fields) for name in "abcdef"]
    assert {(one.is_control(""), one.find_highest_level()) for one in configs} == {(True, "shadow"), (False, "quota")}


def test_a_level_that_is_not_known_is_the_safe_one():
    assert [read_level(text) for text in ("quota", "", "everything")] == ["quota", "shadow", "shadow"]


@pytest.mark.parametrize("level", ["guarantee", "weight"])
def test_at_a_lower_level_unset_options_are_those_of_its_actuator(level):
    held = AgentConfig(monitor=OWN["quota"], ceiling=level).node_settings()
    assert held == AgentConfig(monitor={**OWN["quota"], "actuator": level}).node_settings()


@pytest.mark.parametrize("told", LEVELS)
def test_an_xattr_asks_for_no_more_than_was_told(tmp_path, told):
    try:
        os.setxattr(tmp_path, "user.cpumond.mode", b"reclaim")
    except OSError as error:
        pytest.skip(f"needs a file system with user xattrs: {error}")
    config = AgentConfig(monitor=OWN["shadow"], ceiling=told)
    settings, mode, _ = resolve_job(config, FoundJob("a", "", "a", None, None), str(tmp_path), {})
    by_root = "reclaim" if told in ACTUATORS else told
    by_user = "off" if told == "off" else "shadow"
    assert mode == (by_root if os.stat(tmp_path).st_uid == 0 else by_user)
    assert settings.actuator == (told if mode == "reclaim" else "quota")


def test_problems_are_told_as_text_that_a_heartbeat_can_hold():
    told = cut_problems([f"/etc/{os.fsdecode(bytes([0xFF]))}: gone", "x" * 1000, *["more"] * 20])
    assert told[0] == r"/etc/\udcff: gone"
    assert (len(told), len(told[1])) == (MAX_PROBLEMS, MAX_PROBLEM)
    about = AgentAbout("1", "shadow", "quota", problems=told)
    assert msgspec.json.decode(msgspec.json.encode(about), type=AgentAbout) == about
