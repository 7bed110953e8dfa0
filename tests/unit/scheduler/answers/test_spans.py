"""The phases of an operation, as a trace shows them."""

import itertools

from scheduler_world import World

from cpumond.scheduler.answers.spans import Watched
from cpumond.scheduler.settings.operations import AbortOperation


def test_an_operation_that_never_started_has_no_later_phase(world: World) -> None:
    watched = Watched(world.state)
    operation = world.start(jobs=1, cpu=1)
    assert watched.look(world.now) == []
    world.do(AbortOperation(operation))
    (spans,) = watched.look(world.now)
    assert [each.name for each in spans[1:]] == ["pending", "waiting"]
    assert [name for name, _ in spans[0].events] == ["submitted", "admitted", "ended"]
    assert spans[0].attributes["cpumond.operation.state"] == "aborted"
    assert watched.look(world.now) == []


def test_one_that_begins_and_ends_between_two_looks_is_reported(world: World) -> None:
    world.do(AbortOperation(world.start(jobs=1, cpu=1)))
    watched = Watched(world.state)
    node = world.node("n1", cpu=2)
    operation = world.run(jobs=1, cpu=1, steps=4)
    (job,) = node.jobs
    node.finish(job, "completed", steps=4)
    (spans,) = watched.look(world.now)
    assert spans[0].attributes["cpumond.operation.id"] == operation
    assert spans[0].attributes["cpumond.jobs.completed"] == 1
    assert [each.name for each in spans[1:]] == ["pending", "starting"]
    assert all(one.end == then.start for one, then in itertools.pairwise(spans[1:]))
