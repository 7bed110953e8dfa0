"""Stuck operations are told of by an alert and an event, once, and do not fail (semantics.md 3.7)."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from scheduler_world import EASY, World

from cpumond.api.overview import find_operation_alerts
from cpumond.api.views import view_operation_details
from cpumond.scheduler.decide.placement import list_alerts
from cpumond.scheduler.events import Event

RULES = replace(EASY, operation_hangup_safe_timeout_s=5.0, operation_hangup_due_to_limiting_ancestor_safe_timeout_s=5.0)


def make(*cores: float, **tree: Any) -> World:
    world = World(RULES, fair_share_starvation_timeout=1000, max_ephemeral_pools_per_user=9, **tree)
    world.state.happened = deque(maxlen=100)
    for number, cpu in enumerate(cores):
        world.node(f"n{number}", cpu=cpu)
    return world


def told(world: World) -> list[str]:
    """The sentences of the events about stuck operations, without what they begin with."""
    events = [each for each in world.state.happened if isinstance(each, Event) and each.kind == "operation_stuck"]
    return [each.text.partition(" is stuck: ")[2] for each in events]


def alerts(world: World, operation: str) -> list[tuple[str, str]]:
    return list_alerts(world.operation(operation))


def test_hang_1_one_that_no_node_could_hold_is_an_event_and_does_not_fail():
    world = make(2.0, 2.0, 2.0)
    operation = world.run(jobs=2, cpu=3.0, steps=4)
    early = 'no job of task "t" can start: 3 cores, largest node 2'
    assert (alerts(world, operation), told(world)) == ([("job_fits_no_node", early)], [])
    world.settle_down(200)
    assert (alerts(world, operation), told(world)) == (
        [("operation_stuck", "it is stuck: 3 cores, largest node 2")], ["3 cores, largest node 2"],
    )  # fmt: skip
    (alert,) = find_operation_alerts(world.state.operations.values())
    assert (alert.code, alert.subject) == ("operation_stuck", operation)
    shown = view_operation_details(world.rights, world.record(operation), world.now)
    assert shown.alerts == ["it is stuck: 3 cores, largest node 2"]
    assert world.record(operation).state == "running"
    world.node("large", cpu=4.0)
    world.settle_down(8)
    assert (len(world.jobs_of(operation)), alerts(world, operation)) == (1, [])


def test_hang_2_one_whose_smallest_job_exceeds_a_limit_names_the_pool():
    world = make(4.0)
    world.create_pool("top", resource_limits={"cpu": 1})
    world.create_pool("p", "top")
    operation = world.start("p", jobs=2, cpu=2.0)
    unchecked = world.start("p", jobs=2, cpu=2.0, enable_limiting_ancestor_check=False)
    gang = world.start("p", jobs=3, cpu=0.4, is_gang=True)
    own = world.run("r", cpu=2.0, resource_limits={"cpu": 1.5}, steps=20)
    assert told(world) == [
        'its smallest job orders 2 cpu, and resource_limits of pool "top" allow 1',
        'all of its jobs order 1.2 cpu, and resource_limits of pool "top" allow 1',
        f"its smallest job orders 2 cpu, and resource_limits of operation {own} allow 1.5",
    ]
    assert [alerts(world, each)[0][0] for each in (operation, gang, own)] == ["operation_stuck"] * 3
    assert (alerts(world, unchecked), world.record(unchecked).state) == ([], "running")
    world.set_pool("top", resource_limits={"cpu": 2})
    world.settle_down(8)
    assert alerts(world, operation) == alerts(world, gang) == []


@pytest.mark.parametrize("why", ["suspended", "pending", "has a job", "waits for others"])
def test_hang_3_what_is_never_stuck(why):
    world = make(2.0)
    world.create_pool("p", max_running_operation_count=1)
    first = world.start("p", jobs=9)
    operation = world.start(
        "p" if why == "pending" else "q", jobs=1, cpu=1.0 if why == "waits for others" else 3.0, weight=0.001
    )
    if why == "suspended":
        world.suspend(operation)
    if why == "has a job":
        world.complete(first)
        world.node("n1", cpu=3.0)
        world.settle_down()
        assert len(world.jobs_of(operation)) == 1
        world.nodes.pop("n1")  # silent
    world.settle_down(100)
    assert (told(world), world.operation(operation).stuck) == ([], None)


def test_jobs_that_fit_an_offline_node_and_those_stuck_in_one_tree_alone():
    world = make(2.0)
    world.set_tree(node_reconnection_timeout=1e9)
    world.node("large", cpu=4.0, tags=("ssd",))
    world.nodes.pop("large")
    world.start("a", cpu=3.0)
    two = world.start("b", scheduling_tag_filter="ssd")
    world.state.rules = replace(world.state.rules, unmatched_scheduling_tag_timeout_s=0.0)
    world.settle_down(60)
    assert told(world) == []
    world.settle_down(60)
    assert sorted(told(world)) == [
        "3 cores, largest node 2, of those that are online",
        f'no node that is online fits scheduling_tag_filter "ssd" of operation {two}',
    ]
    world.create_tree("other", nodes_filter="other")
    world.set_tree(nodes_filter="!other")
    both = world.run(cpu=3.0, pool_trees=["default", "other"], steps=30)
    assert (len(told(world)), world.operation(both).stuck) == (2, None)
