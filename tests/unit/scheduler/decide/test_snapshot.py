"""When the fair-share update sees a change of the tree, and when the tree its result (semantics.md 2.5, 2.10, 5.2).

Which numbers it is given for which attributes is a law of tests/property/test_scheduler_snapshot_laws.py.
"""

from __future__ import annotations

import pytest
from scheduler_world import World, assert_consistent

from cpumond.fairshare import fair_share_update
from cpumond.fairshare.resources import CPU
from cpumond.fairshare.tree import Operation, Pool, Snapshot
from cpumond.scheduler.settings.commands import RemovePool
from cpumond.scheduler.state import heartbeats, updates


@pytest.fixture
def world():
    world = World()
    world.node("n1", cpu=10)
    yield world
    assert_consistent(world.state)


def snapshot(world: World) -> Snapshot:
    return updates.make_snapshot(world.state, world.tree())


def pool_of(world: World, name: str) -> Pool:
    return next(pool for pool in snapshot(world).pools if pool.name == name)


def operation_of(world: World, operation: str) -> Operation:
    return next(each for each in snapshot(world).operations if each.name == f"#{operation}")


# --- structure


def test_what_does_not_change_is_the_same_object_again(world):
    world.create_pool("p")
    world.create_pool("q")
    first, second = world.start("p", jobs=2), world.start("q", jobs=2)
    world.settle_down()
    before = snapshot(world)
    again = snapshot(world)
    assert all(a is b for a, b in zip(before.pools, again.pools, strict=True))
    assert all(a is b for a, b in zip(before.operations, again.operations, strict=True))
    world.nodes["n1"].limit(world.jobs_of(first)[0].id, 0.5)
    world.beat()
    after = {operation.name: operation for operation in snapshot(world).operations}
    old = {operation.name: operation for operation in before.operations}
    assert after[f"#{second}"] is old[f"#{second}"]
    assert after[f"#{first}"].usage[CPU] == 1.5


CHANGES = {
    "weight": lambda world, own: world.set_operation(own, weight=3.0),
    "limits": lambda world, own: world.set_operation(own, resource_limits={"cpu": 1}),
    "move": lambda world, own: world.set_operation(own, pool="q"),
    "suspend": lambda world, own: world.suspend(own),
    "abort": lambda world, own: world.abort(own),
    "limits of the pool": lambda world, _: world.set_pool("p", resource_limits={"cpu": 1}),
    "name of the pool": lambda world, _: world.set_pool("p", name="r"),
    "mode of the pool": lambda world, _: world.set_pool("p", mode="fifo"),
    "weight of the pool": lambda world, _: world.set_pool("p", weight=3),
    "parent of the pool": lambda world, _: world.set_pool("p", parent_name="q"),
    "removal of the pool": lambda world, _: world.do(RemovePool("default", "p")),
    "option of the tree": lambda world, _: world.set_tree(main_resource="memory"),
    "new node": lambda world, _: world.node("n2", cpu=5),
    "heartbeat": lambda world, _: world.beat(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_after_any_change_the_snapshot_is_as_one_made_from_scratch(world, change):
    world.create_pool("p", max_share_ratio=0.5)
    world.create_pool("q")
    operation = world.start("p", jobs=2, max_share_ratio=0.5)
    world.start("p", jobs=2)
    world.step()
    snapshot(world)
    change(world, operation)
    seen = snapshot(world)
    for pool in world.tree().pools.values():
        pool.entry = None
    for element in world.tree().operations.values():
        element.entry = None
    assert seen == snapshot(world)


# --- 5.2, demand


def test_5_2_demand_is_usage_and_what_is_still_needed(world):
    world.create_pool("p")
    operation = world.run("p", jobs=8, cpu=2.0)
    world.nodes["n1"].limit(world.jobs_of(operation)[0].id, 0.5)
    world.nodes["n1"].deaf = True
    receipt = heartbeats.receive(world.state, world.nodes["n1"].heartbeat(), world.now)
    assert receipt.accepted
    entry = operation_of(world, operation)
    assert entry.usage[CPU] == 8.5
    assert entry.demand[CPU] == 8.5 + 3 * 2.0
    assert entry.demand[0] == 8
    assert world.pool("p").demand[CPU] == 14.5


def test_5_2_pending_operations_need_nothing_yet(world):
    world.create_pool("p", max_running_operation_count=1)
    running, pending = world.start("p", jobs=3), world.start("p", jobs=100)
    world.update()
    assert [operation.name for operation in snapshot(world).operations] == [f"#{running}"]
    assert world.element(pending).demand == (0.0,) * 5
    assert world.pool("p").demand[CPU] == 3
    assert world.element(pending).fair_share == (0.0,) * 5
    world.abort(running)
    world.update()
    assert world.pool("p").demand[CPU] == 100


def test_5_2_suspended_operations_want_no_more_than_they_use(world):
    world.create_pool("p")
    operation = world.run("p", jobs=30)
    world.suspend(operation)
    assert operation_of(world, operation).demand == operation_of(world, operation).usage
    world.resume(operation)
    assert operation_of(world, operation).demand[CPU] == 30


def test_2_5_demand_of_a_limited_pool_is_not_cut(world):
    world.create_pool("p", resource_limits={"cpu": 2})
    world.start("p", jobs=9)
    world.update()
    assert world.pool("p").demand[CPU] == 9
    assert world.share("p") == pytest.approx(0.2)


def test_an_operation_in_two_trees_has_its_needs_in_both(world):
    world.create_tree("other", nodes_filter="x")
    operation = world.start("p", jobs=9, pool_trees=["default", "other"])
    world.update()
    for tree in ("default", "other"):
        assert world.element(operation, tree).demand[CPU] == 9


def test_2_10_a_ratio_follows_the_cluster(world):
    world.create_pool("p", max_share_ratio=0.5)
    operation = world.start("p", jobs=50, max_share_ratio=0.5)
    snapshot(world)
    world.node("n2", cpu=10)
    assert operation_of(world, operation).resource_limits[CPU] == 5
    assert world.pool("p").limits[CPU] == 10


def test_0_3_a_weight_of_zero_is_the_least_weight(world):
    world.create_pool("p", weight=0)
    assert pool_of(world, "p").weight == 2.0**-26


# --- taking over what an update found


def test_elements_that_came_during_an_update_have_no_share_yet(world):
    world.create_pool("p")
    world.start("p", jobs=9)
    seen = snapshot(world)
    world.create_pool("late")
    operation = world.start("late", jobs=9)
    updates.accept_update(world.state, world.tree(), fair_share_update(seen, world.now, None), world.now)
    assert world.share("p") == pytest.approx(0.9)
    assert world.share("late") == 0.0
    assert world.element(operation).fair_share == (0.0,) * 5


def test_elements_that_went_during_an_update_are_passed_over(world):
    world.create_pool("p")
    gone, kept = world.start("p", jobs=9), world.start("p", jobs=9)
    world.start("e", jobs=2)
    seen = snapshot(world)
    world.abort(gone)
    world.create_pool("q")
    world.set_operation(kept, pool="q")
    world.do(RemovePool("default", "p"))
    updates.accept_update(world.state, world.tree(), fair_share_update(seen, world.now, None), world.now)
    world.step()
    assert len(world.jobs_of(kept)) == 8


def test_what_is_wrong_with_guarantees_is_told(world):
    world.create_pool("p", strong_guarantee_resources={"cpu": 40})
    world.update()
    assert world.tree().errors
    world.set_pool("p", strong_guarantee_resources={"cpu": 4})
    world.update()
    assert world.tree().errors == ()
