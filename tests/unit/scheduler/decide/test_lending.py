"""Guarantees of which others may use a part alone: ``lending_limit`` (semantics.md 2.17)."""

from typing import Any

import pytest
from scheduler_world import World, assert_consistent

from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.model import CommandError


def make(**more: Any) -> World:
    world = World(per_pool_counts_for_leaves_only=True, max_running_operation_count_per_pool=50)
    world.create_pool("etl", strong_guarantee_resources={"cpu": 150}, lending_limit={"cpu": 50}, **more)
    world.create_pools("a", "b")
    world.node("n", cpu=200)
    return world


def test_others_get_no_more_than_what_is_lent_and_not_guaranteed() -> None:
    world = make()
    first = world.start("a", jobs=200)
    world.run("b", jobs=200, steps=6)
    assert world.cores("a") + world.cores("b") == 100
    assert max(world.pool("a").fair_share) == pytest.approx(0.25)
    assert world.pool("etl").starvation_status == "non_starving"
    assert max(world.pool("etl").fair_share) == pytest.approx(0.0, abs=1e-9)
    told = explain_operation(world.state, world.record(first), world.now, {}, world.rights)
    assert any("100 cores of guarantees that other pools do not use are kept for them" in line
               for part in told.trees for line in part.lines)  # fmt: skip
    world.run("etl", jobs=100, steps=6)
    assert world.cores("etl") == 100
    world.set_pool("etl", lending_limit={"cpu": 150})
    assert_consistent(world.state)


def test_those_of_the_same_pool_and_of_one_above_are_told_apart() -> None:
    world = World(per_pool_counts_for_leaves_only=True, max_running_operation_count_per_pool=50)
    world.create_pool("top", strong_guarantee_resources={"cpu": 90})
    world.create_pool("lends", "top", strong_guarantee_resources={"cpu": 40}, lending_limit={"cpu": 0})
    world.create_pool("sibling", "top")
    world.create_pool("inside", "lends")
    world.create_pool("stranger")
    world.node("n", cpu=100)
    for name in ("sibling", "stranger"):
        world.start(name, jobs=100)
    world.settle_down(6)
    assert world.cores("sibling") + world.cores("stranger") == 60
    world.run("inside", jobs=100, steps=6)
    assert world.cores("lends") == 40


def test_what_is_not_guaranteed_cannot_be_lent() -> None:
    world = World()
    with pytest.raises(CommandError, match="strong_guarantee_resources has no cpu"):
        world.create_pool("p", lending_limit={"cpu": 1})


def test_what_a_pool_inside_keeps_is_part_of_what_is_kept_above_it(world: World) -> None:
    world.create_pool("outer", strong_guarantee_resources={"cpu": 60}, lending_limit={"cpu": 0})
    world.create_pool("inner", "outer", strong_guarantee_resources={"cpu": 30}, lending_limit={"cpu": 0})
    world.create_pool("stranger")
    world.node("n", cpu=100)
    world.run("stranger", jobs=100, steps=6)
    assert world.cores("stranger") == 40
    assert max(world.pool("stranger").fair_share) == pytest.approx(0.4)


@pytest.mark.parametrize("when_spent", ["stop", "leftover"])
def test_a_pool_with_a_spent_budget_keeps_nothing(when_spent: str) -> None:
    world = make(budget={"core_hours": 0, "when_spent": when_spent})
    world.run("a", jobs=200, steps=6)
    assert world.cores("a") == 200


@pytest.mark.parametrize("is_gang", [False, True])
def test_who_preempts_leaves_what_is_lent_to_nobody(is_gang: bool) -> None:
    """Of 100 cores 40 are kept; one who starves would fill up freed room with them."""
    world = World(fair_share_starvation_timeout=1000, preemptive_scheduling_backoff=0)
    world.create_pool("keeps", strong_guarantee_resources={"cpu": 40}, lending_limit={"cpu": 0})
    world.create_pools("full", "starves")
    world.node("n", cpu=100)
    world.run("full", jobs=60, steps=6)
    assert world.cores("full") == 60
    world.run("starves", jobs=2 if is_gang else 1, cpu=14 if is_gang else 28, is_gang=is_gang, steps=20)
    assert (world.cores("full"), world.cores("starves")) == (32, 28)
    world.run("keeps", jobs=40, steps=6)
    assert (world.cores("keeps"), world.cores("full"), world.cores("starves")) == (40, 32, 28)
