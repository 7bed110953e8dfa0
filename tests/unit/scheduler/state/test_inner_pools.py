"""Counts of operations in pools that are there for their sub-pools (semantics.md 2.4, 3)."""

import pytest
from scheduler_world import TREE, World

from cpumond.scheduler.settings.commands import RemovePool


def limits(world: World, pool: str) -> tuple[int, int]:
    found = world.pool(pool)
    return found.max_running_operation_count, found.max_operation_count


def make(**options: object) -> World:
    world = World(**{"per_pool_counts_for_leaves_only": True, "max_running_operation_count": 100, **options})
    world.create_pool("lab")
    return world


def test_a_pool_becomes_inner_with_its_first_subpool_until_its_last():
    world = make()
    assert limits(world, "lab") == (8, 50)
    world.create_pool("team", "lab")
    assert limits(world, "lab") == (100, 50_000)
    assert limits(world, "team") == (8, 50)
    world.do(RemovePool(TREE, "team"))
    assert limits(world, "lab") == (8, 50)


def test_what_an_inner_pool_says_itself_holds():
    world = make()
    world.create_pool("team", "lab")
    world.set_pool("lab", max_running_operation_count=5)
    assert limits(world, "lab") == (5, 50_000)
    world.set_pool("lab", max_operation_count=7)
    assert limits(world, "lab") == (5, 7)


@pytest.mark.parametrize("is_parent_of_all", [False, True])
def test_pools_in_which_ephemeral_ones_are_made_are_inner(is_parent_of_all):
    world = make()
    if is_parent_of_all:
        world.set_tree(default_parent_pool="lab")
    else:
        world.set_pool("lab", create_ephemeral_subpools=True)
    assert limits(world, "lab") == (100, 50_000)
