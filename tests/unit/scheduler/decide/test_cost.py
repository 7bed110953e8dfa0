"""What a preemption costs, who goes because of it, and who is spared for a while (semantics.md 6.4, 6.6, 6.9)."""

from typing import Any

import pytest
from scheduler_builders import World as Built
from scheduler_world import EAGER, PlayedNode, World, make_task

from cpumond.core.wire import JobReport
from cpumond.scheduler.decide.cost import lost_core_seconds, spared_until
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.settings.commands import ChangePool, Edit
from cpumond.scheduler.settings.operations import StartOperation


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ({}, 200.0),  # 2 cores for 100 s
        ({"cpu_seconds": 50.0}, 50.0),
        ({"checkpoint_at": 175.0}, 50.0),
        ({"checkpoint_at": 175.0, "cpu_seconds": 40.0}, 10.0),
        ({"checkpoint_at": 200.0}, 0.0),
        ({"checkpoint_at": 210.0}, 0.0),  # its node's clock may be ahead
        ({"checkpoint_at": 99.0}, 200.0),
        ({"checkpoint_at": 2000.0}, 200.0),
    ],
)
def test_6_9_what_was_used_since_the_start_or_the_last_checkpoint_is_lost(told, lost):
    world = Built()
    job = world.job(world.operation("o"), world.node(), 2.0)
    job.began_at, job.report = 100.0, JobReport("j", "o", 2.0, 2.0, **told)
    assert lost_core_seconds(job, 200.0) == pytest.approx(lost)


def test_6_9_a_job_that_has_not_begun_loses_nothing():
    world = Built()
    job = world.job(world.operation("o"), world.node(), 2.0)
    job.began_at = None
    assert lost_core_seconds(job, 200.0) == 0.0


def make_full(**tree: Any) -> tuple[World, PlayedNode]:
    """A node of 4 cores, full of jobs of pool "rich" that began 100 s after another; "poor" may have half."""
    world = World(pools=["rich", "poor"], **EAGER, **tree)
    node = world.node("n1", cpu=4)
    world.start("rich", jobs=50)
    for cores in range(1, 5):
        world.set_pool("rich", resource_limits={"cpu": cores})
        world.step(10.0)
        world.step(90.0)
    return world, node


@pytest.mark.parametrize("cheapest", [False, True])
def test_6_6_the_cheapest_goes_first_where_the_tree_says_so(cheapest):
    world, node = make_full(preempt_cheapest_first=cheapest)
    _, _, third, last = node.jobs
    node.jobs[third].checkpoint_at = world.now - 1.0
    node.jobs[last].cpu_seconds = 500.0
    world.step()
    world.run("poor", jobs=2, steps=4)
    taken = world.state.preemptions[0]
    assert (taken.kind, taken.job_id) == ("preempted", third if cheapest else last)
    assert (taken.lost_core_seconds < 10.0) == cheapest
    rich = world.pool("rich")
    assert rich.lost_core_seconds == world.pool("<Root>").lost_core_seconds
    assert rich.lost_core_seconds == pytest.approx(sum(each.lost_core_seconds for each in world.state.preemptions))
    assert world.pool("poor").lost_core_seconds == 0.0


def test_6_4_min_run_time_protects_for_so_long_and_no_longer():
    world = World(nodes={"n1": 4}, **{**EAGER, "preemptive_scheduling_backoff": 5000})
    spared = world.start("rich", user="a", jobs=4, min_run_time=100_000)
    world.step()
    began = world.now
    poor = world.start("poor", user="b", jobs=2)
    while world.now - began < 99.0:
        world.step()
        assert len(world.jobs_of(spared)) == 4
    world.settle_down(4)
    # The attempt was made when the protection ended, not a back-off later.
    [first, *_] = world.state.preemptions
    assert first.at - began == pytest.approx(101.0, abs=1.1)
    world.settle_down(12)
    assert len(world.jobs_of(poor)) == 2


def test_6_4_min_run_time_protects_from_no_limit():
    world = World(pools=["p"], nodes={"n1": 4}, max_unpreemptible_running_job_count=0)
    operation = world.run("p", jobs=4, min_run_time=500_000)
    world.set_pool("p", resource_limits={"cpu": 1})
    world.settle_down(8)
    assert len(world.jobs_of(operation)) == 1
    assert {record.kind for record in world.state.preemptions} == {"limit_violated"}
    world.suspend(operation, abort_running_jobs=True)
    assert not world.jobs_of(operation)


def test_6_4_min_run_time_of_a_pool_and_of_the_tree_bound_operations():
    world = World(max_min_run_time=60_000)
    world.create_pool("top", min_run_time=20_000)
    world.create_pool("p", "top")
    plain, own = world.start("p"), world.start("p", min_run_time=5000)
    done = world.do(StartOperation({"tasks": {"t": make_task()}, "pool": "p", "min_run_time": 3_600_000}))
    assert [world.element(each).rules.min_run_time_s for each in (plain, own, done.id)] == [20.0, 5.0, 60.0]  # type: ignore[union-attr]
    assert done.warnings == ("min_run_time 3600000 is limited to 60000 by max_min_run_time of the tree",)
    changed = world.do(ChangePool("default", "top", (Edit(("min_run_time",), 70_000),)))
    assert any("min_run_time 70000 is limited to 60000" in text for text in changed.warnings)
    with pytest.raises(CommandError, match="min_run_time"):
        world.start("p", min_run_time=-1)


def test_6_4_a_tasks_own_min_run_time_wins_within_the_trees_bound():
    world = World(nodes={"n1": 4}, max_min_run_time=60_000)
    tasks = {"a": make_task(min_run_time=90_000), "b": make_task(min_run_time=0), "c": make_task()}
    operation = world.do(StartOperation({"tasks": tasks, "min_run_time": 20_000})).id
    world.settle_down()
    spared = {job.task.name: spared_until(job) - (job.began_at or 0.0) for job in world.jobs_of(operation)}
    assert spared == {"a": 60.0, "b": float("-inf"), "c": 20.0}
