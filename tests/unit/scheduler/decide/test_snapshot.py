"""When the fair-share update sees a change of the tree, and when the tree its result (semantics.md 2.5, 2.10, 5.2).

Which numbers it is given for which attributes is a law of tests/property/test_scheduler_snapshot_laws.py.
"""

import pytest
from scheduler_world import World, assert_consistent

from cpumond.fairshare.resources import CPU
from cpumond.fairshare.tree import Operation, Pool, Snapshot
from cpumond.scheduler.settings.commands import RemovePool
from cpumond.scheduler.state import updates


@pytest.fixture
def world():
    world = World(nodes={"n1": 10})
    yield world
    assert_consistent(world.state)


def snapshot(world: World) -> Snapshot:
    return updates.make_snapshot(world.state, world.tree())


def pool_of(world: World, name: str) -> Pool:
    return next(pool for pool in snapshot(world).pools if pool.name == name)


def operation_of(world: World, operation: str) -> Operation:
    return next(each for each in snapshot(world).operations if each.name == f"#{operation}")


def test_what_does_not_change_is_the_same_object_again(world):
    world.create_pools("p", "q")
    first, second = world.start("p", jobs=2), world.start("q", jobs=2)
    world.settle_down()
    before, again = snapshot(world), snapshot(world)
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


def test_what_is_wrong_with_guarantees_is_told(world):
    world.create_pool("p", strong_guarantee_resources={"cpu": 40})
    world.update()
    assert world.tree().errors
    world.set_pool("p", strong_guarantee_resources={"cpu": 4})
    world.update()
    assert world.tree().errors == ()
