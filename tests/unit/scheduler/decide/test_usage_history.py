"""Weights that fall with usage: ``usage_half_life`` (semantics.md 5.5)."""

import msgspec
import pytest
from scheduler_world import World

from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.decide.usage_history import LEAST
from cpumond.scheduler.state.updates import progress_of, restore_progress

HOUR_S = 3600.0


def make(**pools: float) -> World:
    world = World(usage_half_life=HOUR_S * 1e3, max_running_operation_count_per_pool=50)
    for name, weight in pools.items():
        world.create_pool(name, weight=weight)
    world.node("n", cpu=8)
    return world


def run(world: World, seconds: float) -> None:
    """Let time pass in steps that count wholly."""
    for _ in range(int(seconds / 60.0)):
        world.after(60.0).update()


def shares(world: World, *names: str) -> list[float]:
    return [max(world.pool(name).fair_share) for name in names]


def test_who_used_all_has_less_and_has_its_due_again_later() -> None:
    world = make(a=1.0, b=1.0)
    first = world.run("a", jobs=8)
    run(world, HOUR_S)
    world.run("b", jobs=8)
    # a had all that both used: 2^(1 - 1 / 0.5) against 2^1.
    assert shares(world, "a", "b") == pytest.approx([0.2, 0.8], abs=0.01)
    told = explain_operation(world.state, world.record(first), world.now, {}, world.rights)
    words = "its weight is multiplied by 0.50 because it had 100%"
    assert any(words in line for part in told.trees for line in part.lines)
    world.complete(first)
    world.settle_down()
    run(world, 2 * HOUR_S)
    assert world.pool("a").weight_factor > 1.0 > world.pool("b").weight_factor
    world.start("a", jobs=8)
    world.set_tree(usage_half_life=None)
    world.settle_down()
    assert shares(world, "a", "b") == pytest.approx([0.5, 0.5])


def test_the_mean_halves_in_its_time_whatever_the_clock_does() -> None:
    world = make(a=1.0, b=1.0)
    operation = world.run("a", jobs=8)
    run(world, HOUR_S)
    (mean,) = [each for each in (world.tree().root.history or {}).values() if each > LEAST]
    assert mean == pytest.approx(0.5, abs=0.02)
    world.abort(operation)
    world.settle_down()
    world.after(1e6).update()
    world.now -= 5e5
    world.update()
    run(world, HOUR_S)
    assert sum((world.tree().root.history or {}).values()) == pytest.approx(mean / 2.0, abs=0.02)


def test_means_survive_a_restart_also_of_a_pool_that_is_gone() -> None:
    world = make(a=1.0)
    operation = world.run("", user="ann", jobs=8)
    run(world, HOUR_S)
    world.complete(operation)
    world.settle_down()
    assert "ann" not in world.tree().pools
    told = msgspec.json.decode(msgspec.json.encode(progress_of(world.tree())))
    world.tree().root.history = None
    restore_progress(world.tree(), told)
    world.start("", user="ann", jobs=8)
    world.run("a", jobs=8)
    a, ann = shares(world, "a", "ann")
    assert a == pytest.approx(0.8, abs=0.02)
    assert ann == pytest.approx(0.2, abs=0.02)


def test_without_the_option_nothing_is_kept() -> None:
    world = World(nodes={"n": 8})
    world.run("a", jobs=8)
    assert world.tree().root.history is None
    assert "histories" not in progress_of(world.tree())
