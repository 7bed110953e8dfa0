"""``min_share_resources`` of operations: share, starvation, what can have no effect (semantics.md 2.6, 6.2)."""

from typing import Any

import pytest
from scheduler_world import World, assert_consistent

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.model import ROOT_POOL, CommandError
from cpumond.scheduler.settings.operations import StartOperation, UpdateOperation


@pytest.fixture
def world():
    world = World(nodes={"n1": 100}, forbid_immediate_operations_in_root=False, min_share_preemption_timeout=5_000)
    world.create_pool("p", min_share_resources={"cpu": 50})
    world.create_pool("plain")
    world.create_pool("queue", mode="fifo", min_share_resources={"cpu": 10})
    yield world
    assert_consistent(world.state)


def guarantee(world: World, operation: str) -> float:
    return round(100 * world.element(operation).strong_guarantee_share[CPU], 6)


# --- its share; how large it is, tests/property/test_scheduler_snapshot_laws.py says


def test_excess_of_pools_does_not_matter_where_nobody_asks_for_it(world):
    """As when nodes are offline; sums of floats are off by a bit, too."""
    world.set_pool("p", min_share_resources={"cpu": 50, "network": 10})
    own = world.start(ROOT_POOL, jobs=500, min_share_resources={"cpu": 20})
    world.update()
    assert guarantee(world, own) == 20
    world.create_pool("tenths", min_share_resources={"cpu": 10, "memory": 3})
    for number, amount in enumerate((1, 1, 1)):
        world.create_pool(f"tenth{number}", "tenths", min_share_resources={"cpu": amount, "memory": 1})
    inside = world.start("tenths", jobs=500, min_share_resources={"cpu": 5})
    world.update()
    assert guarantee(world, inside) == 5


def test_a_guarantee_comes_goes_and_moves_with_the_options(world):
    own = world.start("p", jobs=500)
    world.start("p", jobs=500)
    world.update()
    world.set_operation(own, min_share_resources={"cpu": 40})
    world.update()
    assert guarantee(world, own) == 40
    world.set_operation(own, pool="plain")
    world.update()
    assert guarantee(world, own) == 0
    world.set_operation(own, pool="p", min_share_resources=None)
    world.update()
    assert guarantee(world, own) == 0


@pytest.mark.parametrize(
    ("options", "status", "at"),
    [
        ({"min_share_resources": {"cpu": 20}}, "below_min_share", 6),
        ({"min_share_resources": {"cpu": 20}, "min_share_preemption_timeout": 12_000}, "below_min_share", 13),
        ({}, "below_fair_share", 31),
    ],
    ids=["min share", "its own time-out", "without a guarantee"],
)
def test_6_2_an_operation_starves_for_its_min_or_fair_share_after_that(world, options, status, at):
    """Second by second; all jobs of its pool are another's."""
    world.set_tree(max_unpreemptible_running_job_count=0, preemptive_scheduling_backoff=1e9)
    world.run("p", jobs=100)
    own = world.element(world.start("p", jobs=50, **options))
    for second in range(at + 1):
        world.step()
        assert own.scheduling_status == status
        assert own.starvation_status == ("starving" if second == at else "non_starving")


def test_6_6_it_preempts_for_its_min_share_while_its_pool_has_its_share(world):
    world.set_tree(max_unpreemptible_running_job_count=0, preemptive_scheduling_backoff=0)
    greedy = world.run("p", jobs=100)
    own = world.run("p", jobs=50, weight=0.001, min_share_resources={"cpu": 20}, steps=40)
    assert len(world.jobs_of(own)) == 17  # the first number that is not clearly below, 0.8 of the share
    assert len(world.jobs_of(greedy)) == 83


def warnings(world: World, pool: str, **options: Any) -> list[str]:
    spec = {"pool": pool, "tasks": {"t": {"command": "true", "job_count": 1}}, **options}
    started = world.do(StartOperation(spec))
    moved = world.do(StartOperation({"pool": pool, "tasks": {"t": {"command": "true", "job_count": 1}}}))
    changed = world.do(UpdateOperation(moved.id, options))
    world.abort(started.id, moved.id)
    told = [sentence for sentence in started.warnings if "did not exist" not in sentence]  # of the pool itself
    assert told == list(changed.warnings)
    return told


IDLE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a shorter time-out": ("p", {"fair_share_starvation_timeout": 1000}, ["not be more privileged", "30000 holds"]),
    "a longer time-out": ("p", {"fair_share_starvation_timeout": 60_000}, ['while pool "p" starves', "30000"]),
    "a longer time-out, old name": ("p", {"fair_share_preemption_timeout": 60_000}, ['while pool "p" starves']),
    "a higher tolerance": ("p", {"fair_share_starvation_tolerance": 0.9}, ["not be more privileged", "0.8 holds"]),
    "a lower tolerance": ("p", {"fair_share_starvation_tolerance": 0.5}, ['while pool "p" starves', "0.8"]),
    "a guarantee where the pool has none": (
        "plain", {"min_share_resources": {"cpu": 1}}, ['pool "plain" has no min_share_resources'],
    ),
    "a guarantee in a new pool": ("new", {"min_share_resources": {"cpu": 1}}, ['pool "new" has no min_share']),
    "a guarantee in a FIFO pool": ("queue", {"min_share_resources": {"cpu": 1}}, ['pool "queue" is a FIFO pool']),
    "more than the pool has": ("p", {"min_share_resources": {"cpu": 51}}, ["51 is more than the 50"]),
    "another resource than the pool": (
        "p", {"min_share_resources": {"cpu": 5, "memory": 1}}, ["min_share_resources/memory has no effect"],
    ),
    "a time-out where the pool has no guarantee": (
        "plain", {"min_share_preemption_timeout": 5000}, ['pool "plain" has no min_share_resources'],
    ),
    "a time-out without a guarantee": (
        "p", {"min_share_preemption_timeout": 5000}, ["the operation has no min_share_resources"],
    ),
    "a threshold without the pool's": (
        "p", {"non_preemptible_resource_usage_threshold": {"cpu": 4}}, ['pool "p" has none'],
    ),
    "a higher count": ("p", {"max_unpreemptable_running_job_count": 11}, ["11 has no effect", "at most 10"]),
    "a weight nobody sorts by": ("sorted", {"weight": 3}, ["does not sort by it"]),
}  # fmt: skip


@pytest.mark.parametrize(("pool", "options", "words"), IDLE.values(), ids=IDLE)
def test_an_option_without_effect_is_said_at_the_start_and_at_the_change(world, pool, options, words):
    world.create_pool("sorted", mode="fifo", fifo_sort_parameters=["start_time"])
    told = warnings(world, pool, **options)
    assert len(told) == 1
    for word in words:
        assert word in told[0]


EFFECTIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "time-outs as the pool's": ("p", {"fair_share_starvation_timeout": 30_000, "fair_share_starvation_tolerance": 0.8}),
    "a guarantee within the pool's": (
        "p", {"min_share_resources": {"cpu": 50}, "min_share_preemption_timeout": 5000},
    ),
    "the other name": ("p", {"strong_guarantee_resources": {"cpu": 50}}),
    "a guarantee in the root": (ROOT_POOL, {"min_share_resources": {"cpu": 5, "memory": 1}}),
    "a later time-out in the root": (ROOT_POOL, {"fair_share_starvation_timeout": 60_000}),
    "a lesser count": ("p", {"max_unpreemptable_running_job_count": 9}),
    "a weight in a FIFO pool": ("queue", {"weight": 3}),
}  # fmt: skip


@pytest.mark.parametrize(("pool", "options"), EFFECTIVE.values(), ids=EFFECTIVE)
def test_an_option_that_has_an_effect_is_not_told_of(world, pool, options):
    assert warnings(world, pool, **options) == []


def test_a_longer_time_out_holds_where_pools_do_not_starve(world):
    later = {"fair_share_starvation_timeout": 60_000}
    world.set_tree(enable_pool_starvation=False)
    assert warnings(world, "p", **later) == []
    world.set_tree(enable_pool_starvation=True, scheduling_preemption_priority_scope="operation_only")
    assert warnings(world, "p", **later) == []


def test_a_threshold_above_the_pools_and_a_count_without_the_trees(world):
    world.set_pool("p", non_preemptible_resource_usage_threshold={"cpu": 4})
    assert warnings(world, "p", non_preemptible_resource_usage_threshold={"cpu": 3, "memory": 1}) == []
    told = warnings(world, "p", non_preemptible_resource_usage_threshold={"cpu": 5})
    assert len(told) == 1
    assert "4 holds" in told[0]


def test_2_6_a_guarantee_includes_the_main_resource(world):
    for options in ({"min_share_resources": {"memory": 5}}, {"min_share_resources": {"user_slots": 5, "memory": 1}}):
        with pytest.raises(CommandError, match='must include "cpu"') as caught:
            warnings(world, "p", **options)
        assert caught.value.attributes["field"] == "min_share_resources"


UNLESS = ", which holds unless [monitor] of a node sets another"
MONITOR: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the rule's own": ({"limit_rule": "peak", "reserve_ratio": 0.1, "throttle_poll": 500}, []),
    "another rule's": (
        {"limit_rule": "peak", "vote_window_size": 7, "peak_memory": 10_000},
        ['job_cpu_monitor/vote_window_size has no effect under limit_rule = "peak"'],
    ),
    "a rule that is the node's": (
        {"peak_memory": 100_000},
        [f'job_cpu_monitor/peak_memory has no effect under limit_rule = "document"{UNLESS}'],
    ),
    "by the actuator": (
        {"actuator": "weight", "burst_ratio": 0.5},
        ['job_cpu_monitor/burst_ratio has no effect with actuator = "weight"'],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "told"), MONITOR.values(), ids=MONITOR)
def test_an_option_of_the_monitor_without_effect_is_said_at_the_start(world, given, told):
    tasks = {"t": {"command": "true", "job_count": 1}}
    started = world.do(StartOperation({"pool": "p", "tasks": tasks, "job_cpu_monitor": given}))
    world.abort(started.id)
    assert list(started.warnings) == told
