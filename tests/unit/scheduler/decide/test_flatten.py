"""Pools whose children share as if they were its parent's own: ``flatten`` (semantics.md 2.16)."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_world import World, assert_consistent

from cpumond.scheduler.model import CommandError


def make() -> World:
    """Of 90 cores: physics (weight 1) beside projects, in which climate (5) and genome (3) are."""
    world = World()
    world.create_pool("physics")
    world.create_pool("projects", flatten=True)
    world.create_pool("climate", "projects", weight=5)
    world.create_pool("genome", "projects", weight=3)
    world.node("n", cpu=90)
    return world


def fair_cores(world: World, *names: str) -> list[float]:
    return [round(world.pool(name).fair_share[1] * 90, 6) for name in names]


def test_children_share_beside_their_parents_siblings() -> None:
    world = make()
    for name in ("physics", "climate", "genome"):
        world.start(name, jobs=90)
    world.settle_down()
    assert fair_cores(world, "physics", "climate", "genome", "projects") == [10.0, 50.0, 30.0, 80.0]
    assert world.cores("physics") + world.cores("projects") == 90
    assert_consistent(world.state)


def test_one_that_rests_leaves_its_part_to_all() -> None:
    world = make()
    for name in ("physics", "climate"):
        world.start(name, jobs=90)
    world.settle_down()
    assert fair_cores(world, "physics", "climate", "projects") == [15.0, 75.0, 75.0]
    world.set_pool("projects", flatten=False)
    world.settle_down()
    assert fair_cores(world, "physics", "climate", "projects") == [45.0, 45.0, 45.0]


def test_operations_in_it_share_with_its_siblings_too() -> None:
    world = make()
    world.start("physics", jobs=90)
    world.start("projects", jobs=90, weight=2)
    world.settle_down()
    assert fair_cores(world, "physics", "projects") == [30.0, 60.0]
    world.restart()
    world.settle_down()
    assert fair_cores(world, "physics", "projects") == [30.0, 60.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight": 2}, "leave weight out"),
        ({"strong_guarantee_resources": {"cpu": 1}}, "leave strong_guarantee_resources out"),
        ({"resource_limits": {"cpu": 1}}, "leave resource_limits out"),
        ({"budget": {"core_hours": 9, "when_spent": "leftover"}}, 'must be "warn" or "stop"'),
    ],
)
def test_it_has_no_share_of_its_own(options: dict[str, Any], words: str) -> None:
    world = make()
    with pytest.raises(CommandError, match=words):
        world.set_pool("projects", **options)
