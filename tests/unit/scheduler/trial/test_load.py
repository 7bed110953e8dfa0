"""What is expected of users and jobs, as drawn from the past."""

import itertools
import random
from dataclasses import replace

import pytest
from scheduler_world import EASY, World

from cpumond.scheduler.decide.run_times import MOST_DOUBT, Seen
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.state import changes
from cpumond.scheduler.state.commands import prepare
from cpumond.scheduler.trial.load import BLOCK_S, DAY_S, Drawn, Expected, Experience

HOUR_S = 3600.0


def make_world() -> World:
    world = World(EASY, now=50 * DAY_S, forbid_immediate_operations_in_root=False)
    world.create_pool("p", max_operation_count=1000)
    return world


def arrive(world: World, *moments: float) -> None:
    spec = {"pool": "p", "tasks": {"main": {"command": "true", "job_count": 1}}}
    ids = (f"started-{number}" for number in itertools.count())
    for at in moments:
        changes.apply(world.state, prepare(world.state, StartOperation(spec), "u", at, lambda: next(ids)), at)


def draw(world: World, now: float, seed: int, span_s: float) -> list[float]:
    load = Drawn(Experience(world.state, now), random.Random(seed))
    found, after = [], now
    while (arrival := load.next_arrival(after)) is not None and arrival[0] < now + span_s:
        after = arrival[0]
        found.append(after - now)
    return found


def test_arrivals_go_on_as_often_as_they_came() -> None:
    world, begin = make_world(), 50 * DAY_S
    arrive(world, *(begin + 60.0 * number for number in range(240)))
    counts = [len(draw(world, begin + 4 * HOUR_S, seed, 4 * HOUR_S)) for seed in range(20)]
    assert sum(counts) / len(counts) == pytest.approx(240, rel=0.02)


def test_what_came_in_bursts_goes_on_to_do_so() -> None:
    world, begin = make_world(), 50 * DAY_S
    arrive(world, *(begin + HOUR_S * hour for hour in range(6) for _ in range(10)))
    counts = []
    for seed in range(200):
        found = draw(world, begin + 6 * HOUR_S, seed, BLOCK_S)
        counts.append(len(found))
        assert found == sorted(found)
    assert set(counts) <= {0, 10}
    assert sum(counts) / len(counts) == pytest.approx(5, abs=1.5)


def test_with_some_days_known_each_hour_is_as_it_was_at_its_time() -> None:
    world, begin = make_world(), 50 * DAY_S
    arrive(world, *(begin + DAY_S * day + 9 * HOUR_S + 60.0 * minute for day in range(3) for minute in range(60)))
    found = draw(world, begin + 3 * DAY_S, 1, DAY_S)
    assert len(found) == 60
    assert min(found) >= 9 * HOUR_S
    assert max(found) < 10 * HOUR_S


def test_nobody_is_expected_where_little_is_known() -> None:
    world, begin = make_world(), 50 * DAY_S
    arrive(world, *(begin + number for number in range(100)))
    assert draw(world, begin + 100.0, 1, HOUR_S) == []


def test_the_usual_course_expects_nobody_and_half_of_a_run_time() -> None:
    world = make_world()
    arrive(world, world.now)
    (operation,) = world.state.operations.values()
    usual = Expected(Experience(world.state, world.now))
    assert usual.next_arrival(world.now) is None
    assert usual.left_s(operation.record, operation.record.tasks[0], 0.0) == 300.0
    assert usual.left_s(operation.record, operation.record.tasks[0], 1000.0) == 1000.0


def test_the_mean_of_a_few_different_jobs_is_doubtful() -> None:
    assert Seen([100.0]).doubt() == 0.0
    assert Seen([0.0, 0.0]).doubt() == 0.0
    assert Seen([90.0, 110.0] * 50).doubt() == pytest.approx(0.01, rel=0.01)
    assert Seen([1.0] * 9 + [1000.0]).doubt() == MOST_DOUBT


def test_a_scheduler_that_keeps_no_finished_operation_expects_nobody() -> None:
    world = World(replace(EASY, finished_operation_retention_count=0))
    assert draw(world, world.now, 1, HOUR_S) == []
