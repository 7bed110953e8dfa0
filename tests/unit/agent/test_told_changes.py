"""An agent that is told one level after another: what is in its jobs' limits, and what it tells of itself."""

import itertools

import pytest
from fake_node import QUICK, source

from cpumond.agent import control
from cpumond.core.levels import lowest
from cpumond.core.wire import HeartbeatAnswer
from cpumond.testing import v2_cgroup

FOUR = v2_cgroup(quota="400000 100000")
MAY = '[scheduler]\nurl = "http://127.0.0.1:1"\nmay_set_mode = true\n'
TOLD = ("shadow", "up-only", "weight", "quota")
ORDER = ("400000 100000", "100")
LOWERED = {"shadow": ORDER, "up-only": ORDER, "weight": ("400000 100000", "12"), "quota": ("50000 100000", "100")}
"""Quota and weight of a job that uses little, by what the agent was told."""


def tell(node, *levels, ticks=0):
    """Tell it these levels, and let it tick."""
    for level in levels:
        node.agent.take_answer(HeartbeatAnswer(True, level=level), 0.0)
    for _ in range(ticks):
        node.tick()


def lower(node):
    """Let it do the most, until idle jobs are lowered."""
    tell(node, "quota", ticks=10)


def limits(node):
    return node.read("a"), node.read("a", "cpu.weight")


def about(node):
    return node.agent.loop.publisher._view_about()


@pytest.fixture(params=["", 'actuator = "weight"\n'], ids=["quota", "weight"])
def told(request, make_node):
    """An agent whose own configuration is reclaim by quota or by weight, and that bound."""
    node = make_node({"a": FOUR}, config=QUICK + request.param + source() + MAY).start()
    return node, "weight" if request.param else "quota"


@pytest.mark.parametrize(("first", "then"), list(itertools.permutations(TOLD, 2)))
def test_each_level_after_each_other_one_leaves_its_own_limits_alone(told, first, then):
    node, bound = told
    for level in (first, then):
        tell(node, level, ticks=10)
        does = lowest(level, bound)
        assert limits(node) == LOWERED[does]
        assert (about(node).level, about(node).bound) == (does, bound)


@pytest.mark.parametrize("level", TOLD[:2])
def test_what_was_lowered_is_put_back_in_the_tick_that_obeys(told, level):
    node, bound = told
    lower(node)
    assert limits(node) == LOWERED[bound]
    tell(node, level, "quota", level, ticks=1)
    assert limits(node) == ORDER
    lower(node)
    assert limits(node) == LOWERED[bound]
    pause = node.directory / "run" / "pause"
    pause.touch()
    tell(node, level, ticks=3)
    pause.unlink()
    node.ticks(2)
    assert limits(node) == ORDER


@pytest.mark.parametrize("level", TOLD[:3])
def test_a_reload_does_not_raise_what_was_told(told, level):
    node, bound = told
    lower(node)
    tell(node, level)
    node.reload(node.config_text)
    node.ticks(10)
    assert limits(node) == LOWERED[lowest(level, bound)]
    assert about(node).level == lowest(level, bound)


def test_a_pin_ends_with_the_level_and_up_only_lowers_nothing_after_it(make_node):
    node = make_node({"a": FOUR}, config=QUICK + source() + MAY).start()
    lower(node)
    control.pin_job(node.agent, "a", {"cpu_limit": 1.0})
    node.tick()
    tell(node, "up-only", ticks=3)
    assert node.cores("a") == 1.0
    control.unpin_job(node.agent, "a")
    node.ticks(3)
    assert node.cores("a") >= 1.0
    tell(node, "shadow", ticks=2)
    assert limits(node) == ORDER


def test_a_contest_that_ends_in_up_only_leaves_what_the_job_ordered(make_node):
    node = make_node({"a": FOUR}, config=QUICK + source() + MAY).start()
    lower(node)
    job = node.agent.table.find("a")
    while not job.hold.is_contested:
        job.hold = job.hold.lose(node.agent.clock.monotonic_s(), 1.0, 2)
    node.write("a", "cpu.max", "300000 100000\n")
    tell(node, "up-only", ticks=2)
    control.unpin_job(node.agent, "a")
    node.ticks(3)
    assert node.cores("a") == 4.0


def test_what_a_job_asks_for_itself_is_told_too(make_node):
    """The level of an agent is the most that it does to any job, its bound the most that it would do."""
    config = QUICK.replace('mode = "reclaim"', 'mode = "shadow"') + source() + MAY
    node = make_node({"a": FOUR, "b": FOUR}, config=config).start()
    assert (about(node).level, about(node).bound) == ("shadow", "shadow")
    control.add_job(node.agent, {"cgroup": "jobs/b", "job_id": "b", "job_cpu_monitor": {"mode": "reclaim"}})
    node.ticks(2)
    assert (about(node).level, about(node).bound) == ("shadow", "quota")
    tell(node, "up-only", ticks=2)
    assert (about(node).level, about(node).bound) == ("up-only", "quota")
