"""Intervals of what runs ahead told."""

import itertools
import math
import time

import pytest
from scheduler_world import TREE, World

from cpumond.scheduler.answers import ahead
from cpumond.scheduler.answers.calibration import quantile
from cpumond.scheduler.answers.plan import ChangePlan, make_plan
from cpumond.scheduler.settings.commands import ChangePool, Edit
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.state.commands import prepare
from cpumond.scheduler.state.node_commands import DrainNode
from cpumond.scheduler.trial.fork import ask_at_once
from cpumond.scheduler.trial.forward import Pace


def test_what_never_happens_in_some_runs_has_no_end() -> None:
    values = [1.0, 2.0, 3.0, *[math.inf] * 6]
    assert [quantile(values, at) for at in (0.1, 0.3, 0.5)] == [1.0, 3.0, None]
    assert quantile([math.inf] * 9, 0.1) is None


def test_a_run_waits_for_a_start_some_times_as_long_as_the_last_one_took() -> None:
    assert ahead.patience_s(0.2, 0.0, ahead.MOST_RUN_S) == ahead.FIRST_RUN_S
    assert ahead.patience_s(0.2, 2.0, ahead.MOST_RUN_S) == 6.0
    assert ahead.patience_s(8.0, 2.0, ahead.MOST_RUN_S) == 8.0
    assert ahead.patience_s(0.2, 19.0, ahead.MOST_RUN_S) == ahead.MOST_RUN_S
    assert ahead.patience_s(8.0, 2.0, ahead.FIRST_RUN_S) == ahead.FIRST_RUN_S


def test_two_runs_are_compared_as_far_as_the_shorter_one_looked() -> None:
    before = ahead.RunResult(
        {"a": (110.0, 140.0)}, core_seconds=[("t", "p", 80.0, 80.0)], began=100.0, until=180.0, is_cut=True
    )
    after = ahead.RunResult(
        {"a": (110.0, 150.0), "b": (190.0, None)}, core_seconds=[("t", "p", 100.0, 100.0)], began=100.0, until=200.0
    )
    seen = ahead.cut(after, before.until)
    assert seen.moments == {"a": (110.0, 150.0), "b": (None, None)}
    assert seen.core_seconds == [("t", "p", 80.0, 80.0)]
    told = ahead.make_simulation({}, before, seen, 100.0)
    assert (told.horizon, told.shares) == (180.0, [])
    assert "the simulation ends 1 min 20 s from now: more would take too long" in told.lines


def test_run_times_of_which_nothing_is_known_are_told_as_guesses(world: World) -> None:
    node = world.node("n", 4.0)
    spec = {"pool": "p", "tasks": {"main": {"job_count": 1, "command": "true"}}}

    def find_guesses() -> list[str]:
        pace = Pace(1.0, 1.0, world.now, {})
        asked = (StartOperation(spec),)
        lines = ahead.compare(world.state, world.now, pace, 3600.0, asked, "ann", lambda _: None).lines
        return [line for line in lines if "has completed yet" in line]

    [guess] = find_guesses()
    assert guess == (
        "of 1 operation no job like its own has completed yet: each job is assumed to run for 5 min more, or for as "
        "long again as it has"
    )
    world.run("p", jobs=4)
    for job in list(node.jobs):
        node.finish(job)
    world.settle_down()
    assert find_guesses() == []


def test_a_job_that_a_drain_stops_starts_no_sooner() -> None:
    world = World(pools=["p"], nodes={"n1": 2.0})
    world.run("p", jobs=1, cpu=2.0)
    world.node("n2", 2.0)
    pace = Pace(1.0, 1.0, world.now, {})
    found = ahead.compare(world.state, world.now, pace, 3600.0, (DrainNode("n1"),), "ann", lambda _: None)
    assert len(found.stops) == 1
    assert not any("start sooner" in line for line in found.lines)
    assert all(each.start_before is each.start_after is None for each in found.starts)


@pytest.mark.parametrize(
    ("cpu", "told"), [(1.0, "its first job starts after "), (9.0, "it does not start, even when all jobs have ended")]
)
def test_on_many_idle_nodes_what_is_asked_for_is_waited_for(world: World, cpu: float, told: str) -> None:
    """So many heartbeats come before the first update that nothing seems to be left to do."""
    world.add_nodes(100, 4.0)
    for number, node in enumerate(world.state.nodes.values()):
        node.last_seen = world.now - 2.9 * number / 100
    spec = {"pool": "p", "tasks": {"main": {"job_count": 1, "command": "true", "cpu_limit": cpu}}}
    pace, asked = Pace(3.0, 1.0, world.now + 1.0, {}), (StartOperation(spec),)
    assert ahead.compare(world.state, world.now, pace, 3600.0, asked, "ann", lambda _: None).lines[0].startswith(told)


def test_a_plan_and_a_simulation_tell_the_same_starts_and_they_come_true() -> None:
    world = World()
    world.create_pool("p", resource_limits={"cpu": 1.0})
    world.node("n1", 4.0)
    world.run("p", jobs=3, cpu=1.0)
    command = ChangePool(TREE, "p", (Edit(("resource_limits", "cpu"), 3.0),))
    change = prepare(world.state, command, "ann", world.now, lambda: "planned")
    notes = ask_at_once(lambda: make_plan(world.state, change, world.now, {}, False), ChangePlan).notes
    pace = Pace(1.0, 1.0, world.now, {})
    found = ahead.compare(world.state, world.now, pace, 60.0, (command,), "ann", lambda _: None)
    assert notes == ["at once 2 jobs more start, 2 cores"]
    assert notes[0] in found.lines
    world.do(command)
    world.settle_down()
    assert world.cores("p") == 3.0


def test_how_far_is_looked_ahead_does_not_depend_on_how_busy_the_host_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second between two looks at it, as on a host that leaves a copy little CPU time."""
    world = World(pools=["p"])
    world.add_nodes(20, 4.0)
    world.run("p", jobs=200, cpu=1.0)
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) * 0.4)
    found = ahead.compare(world.state, world.now, Pace(1.0, 1.0, world.now, {}), 120.0, (), "ann", lambda _: None)
    assert found.horizon == world.now + 120.0
