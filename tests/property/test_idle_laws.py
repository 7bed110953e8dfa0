"""What always holds of the answer to why CPU stands idle, on random clusters with random limits."""

import random

import msgspec
import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from scheduler_world import GIB, World, describe

from cpumond.scheduler.answers.idle import IdleReport, idle_reasons
from cpumond.scheduler.answers.idle_trials import find_idle
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.settings.commands import ConfigCommand


def make_world(seed: int, gangs: bool = True) -> World:
    """Pools in pools with limits, nodes of several sizes, operations of several shapes; settled."""
    chance = random.Random(seed)
    world = World(max_running_operation_count_per_pool=chance.choice([2, 3, 8]), max_operation_count_per_pool=500)
    names = [f"p{n}" for n in range(chance.randint(1, 5))]
    for n, name in enumerate(names):
        parent = chance.choice([*names[:n], "<Root>"]) if n else "<Root>"
        options: dict[str, object] = {}
        if chance.random() < 0.4:
            options["max_running_operation_count"] = chance.randint(0, 6)
        if chance.random() < 0.25:
            options["resource_limits"] = {"cpu": float(chance.randint(2, 30))}
        if chance.random() < 0.2:
            options["max_share_ratio"] = chance.choice([0.2, 0.5])
        world.create_pool(name, parent, **options)
    for n in range(chance.randint(1, 6)):
        slots = chance.choice([3, 1000, 1000])
        world.node(f"n{n}", chance.choice([4.0, 8.0, 16.0, 33.0]), chance.choice([8, 64]) * GIB, user_slots=slots)
    size = chance.choice([1.0, 2.0, 3.0])
    for _ in range(chance.randint(0, 25)):
        cpu = chance.choice([size, size, size, 5.0, 0.5]) if chance.random() < 0.5 else size
        spec = {"memory": chance.choice([0, GIB, 6 * GIB]), "is_gang": chance.random() < 0.1 and gangs}
        operation = world.start(chance.choice(names), "u", chance.randint(1, 6), cpu, **spec)
        if chance.random() < 0.1:
            world.suspend(operation)
    world.settle_down(chance.randint(0, 4))
    return world


def look(world: World) -> IdleReport:
    return find_idle(world.state, world.tree(), world.now)


@given(st.integers(0, 10**6))
@examples(150)
def test_the_parts_add_up_to_the_capacity_and_no_cause_exceeds_the_idle(seed):
    world = make_world(seed)
    before = describe(world.state)
    report = look(world)
    assert describe(world.state) == before
    parts = report.parts
    whole = msgspec.structs.asdict(parts)
    capacity = whole.pop("capacity")
    assert capacity == pytest.approx(sum(node.capacity[1] for node in world.state.nodes.values()))
    assert sum(whole.values()) == pytest.approx(capacity)
    assert all(cores >= 0.0 for cores in whole.values())
    for cause in report.causes:
        assert 0.0 < cause.cores <= parts.held_back + parts.without_work + 1e-6
        assert 0.0 <= cause.idle_cores <= cause.cores
    assert sum(cause.idle_cores for cause in report.causes) <= parts.held_back + 1e-5
    assert [cause.cores for cause in report.causes] == sorted((each.cores for each in report.causes), reverse=True)
    idle = parts.starting + parts.without_work + parts.held_back
    assert sum(idle_reasons(report).values()) == pytest.approx(idle, abs=1e-4)
    assert report.held_by_pool.get("<Root>", 0.0) <= parts.held_back + 1e-5


@given(st.integers(0, 10**6))
@example(262145)  # counts of three pools in each other are raised
@examples(100)
def test_what_a_change_of_the_configuration_frees_was_foretold(seed):
    world = make_world(seed, gangs=False)  # a gang may wait for a minute for room that is kept for it
    world.settle_down(6)
    report = look(world)
    causes = [each for each in report.causes if each.change.commands and not each.lead and each.cores >= 0.5]
    if not causes:
        return
    before = world.tree().root.usage[1]
    try:
        for command in causes[0].change.commands:
            world.do(msgspec.convert(command, ConfigCommand))
    except CommandError as error:
        raise AssertionError(f"{report.sentence}: {error}") from None
    world.settle_down(6)
    freed = world.tree().root.usage[1] - before
    assert freed == pytest.approx(causes[0].cores, rel=0.1), (seed, report.sentence, freed)
