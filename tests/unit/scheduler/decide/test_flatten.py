"""Pools whose children share as if they were its parent's own: ``flatten`` (semantics.md 2.16)."""

from typing import Any

import pytest
from scheduler_world import World, assert_consistent

from cpumond.scheduler.model import CommandError


def make() -> World:
    world = World(pools=["physics"])
    world.create_pool("projects", flatten=True)
    world.create_pool("climate", "projects", weight=5)
    world.create_pool("genome", "projects", weight=3)
    world.node("n", cpu=90)
    return world


def test_children_share_beside_their_parents_siblings() -> None:
    world = make()
    for name in ("physics", "climate", "genome"):
        world.start(name, jobs=90)
    world.settle_down()
    cores = [world.share(name) * 90 for name in ("physics", "climate", "genome", "projects")]
    assert cores == pytest.approx([10.0, 50.0, 30.0, 80.0])
    assert world.cores("physics") + world.cores("projects") == 90
    assert_consistent(world.state)


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


def test_guarantees_of_children_are_its_parents(world: World) -> None:
    world.create_pool("top", strong_guarantee_resources={"cpu": 60})
    world.create_pool("flat", "top", flatten=True)
    world.create_pool("a", "flat", strong_guarantee_resources={"cpu": 40})
    world.create_pool("b", "top", strong_guarantee_resources={"cpu": 20})
    with pytest.raises(CommandError, match='children of "top" have 61 together'):
        world.set_pool("a", strong_guarantee_resources={"cpu": 41})
    world.node("n", cpu=100)
    for name in ("a", "b"):
        world.start(name, jobs=100)
    world.set_pool("b", weight=1e-6)
    world.settle_down()
    assert world.cores("b") == 20


def test_usage_of_before_is_counted_beside_its_siblings() -> None:
    """physics and climate used the same, genome nothing: due are 1, 5 and 3 of 9."""
    world = make()
    world.set_tree(usage_half_life=3_600_000)
    for name in ("physics", "climate"):
        world.start(name, jobs=45)
    world.settle_down()
    for _ in range(120):
        world.after(60.0).update()
    factors = {name: world.pool(name).weight_factor for name in ("physics", "climate", "genome", "projects")}
    assert (factors["genome"], factors["projects"]) == (2.0, 1.0)
    assert factors["physics"] < 0.5 < factors["climate"] < 1.1
    world.set_pool("projects", flatten=False)
    world.set_tree(usage_half_life=None)
    world.update()
    assert {world.pool(name).weight_factor for name in factors} == {1.0}
