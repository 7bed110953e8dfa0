"""What of a specification changes while its operation runs (yt_protocol.md 12)."""

from typing import Any

import pytest
from scheduler_world import World

from cpumond.scheduler.event_log.commands import list_fields
from cpumond.scheduler.model import CommandError, JobCounts
from cpumond.scheduler.settings.operations import PatchOperation
from cpumond.scheduler.settings.spec_patch import view_patch

COUNT = "/tasks/t/job_count"
FAILED = "/max_failed_job_count"


@pytest.fixture
def world() -> World:
    return World(nodes={"n1": 10})


def patch(world: World, operation: str, *pairs: tuple[str, Any]) -> None:
    world.do(PatchOperation(operation, [{"path": path, "value": value} for path, value in pairs]))
    world.settle_down()


def cookies(world: World, operation: str) -> list[int]:
    return sorted(job.cookie for job in world.jobs_of(operation))


def finish(world: World, operation: str, *of: int) -> None:
    """The jobs with these cookies complete, or all."""
    for job in world.jobs_of(operation):
        if not of or job.cookie in of:
            world.nodes["n1"].finish(job.id)
    world.settle_down()


def test_job_4_more_jobs_have_cookies_of_their_own(world):
    operation = world.run("p", jobs=2)
    finish(world, operation, 1)
    patch(world, operation, (COUNT, 4))
    assert cookies(world, operation) == [0, 2, 3]
    world.restart(steps=3)
    assert cookies(world, operation) == [0, 2, 3]
    finish(world, operation)
    assert (world.record(operation).state, world.job_counts(operation)) == ("completed", JobCounts(completed=4))


def test_completed_jobs_count_first_and_waiting_ones_vanish(world):
    operation = world.run("p", jobs=14)  # of which ten have room
    finish(world, operation, 3)
    patch(world, operation, (COUNT, 8))
    assert cookies(world, operation) == [0, 1, 2, 4, 5, 6, 7]
    assert world.operation(operation).needed == {}
    aborted = world.job_counts(operation).aborted
    assert world.record(operation).aborted_for == {"job_count_changed_by_user_request": aborted}
    patch(world, operation, (COUNT, 1))
    assert (world.record(operation).state, world.nodes["n1"].jobs) == ("completed", {})


def test_who_takes_over_finds_the_surplus_stopped(world):
    operation = world.run("p", jobs=3)
    world.do(PatchOperation(operation, [{"path": COUNT, "value": 1}]))
    world.restart(steps=3)
    assert cookies(world, operation) == [0]
    assert world.record(operation).aborted_for == {"job_count_changed_by_user_request": 2}


def test_as_many_as_failed_already_fail_the_operation(world):
    operation = world.run("p", jobs=2)
    [job, _] = world.jobs_of(operation)
    world.nodes["n1"].finish(job.id, "failed", steps=3)
    patch(world, operation, (FAILED, 2))
    assert (world.record(operation).state, world.record(operation).max_failed_job_count) == ("running", 2)
    patch(world, operation, (FAILED, 1))
    record = world.record(operation)
    assert (record.state, record.failure.code, record.failure.inner[0].code) == ("failed", 215, 1205)


def test_what_was_patched_is_shown_and_outlives_a_restart(world):
    operation = world.run("p", jobs=2)
    patch(world, operation, (FAILED, 3), (COUNT, 4), (COUNT, 3))
    for _ in range(2):
        assert view_patch(world.record(operation)) == {
            "max_failed_job_count": 3, "tasks": {"t": {"job_count": 3}},
        }  # fmt: skip
        world.restart()
    assert world.record(operation).tasks[0].job_count == 3
    assert world.record(operation).spec["tasks"]["t"]["job_count"] == 2


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (COUNT, 0, r"/tasks/t/job_count: expected a whole number in \[1, 100000\], got 0"),
        (COUNT, True, "expected a whole number"),
        (COUNT, "3", "expected a whole number"),
        (COUNT, 100_001, "expected a whole number"),
        (FAILED, -1, r"in \[0, 10000\], got -1"),
        ("/tasks/new/job_count", 1, "there is no task 'new'; tasks can be neither added nor removed"),
        ("/annotations", {"a": 1}, "/annotations: only /max_failed_job_count and /tasks/NAME/job_count may change"),
        ("/tasks/t/cpu_limit", 2, "/tasks/t/cpu_limit: only"),
        ("/secure_vault/key", "s3cret", "/secure_vault/key: only"),
    ],
)
def test_job_4_the_rest_is_refused_and_nothing_of_it_done(world, path, value, said):
    operation = world.run("p", jobs=2)
    before = world.record(operation)
    with pytest.raises(CommandError, match=said) as caught:
        patch(world, operation, (FAILED, 3), (path, value))
    assert world.record(operation) == before
    assert "s3cret" not in str(caught.value)


def test_what_changes_nothing_is_no_mistake(world):
    operation = world.run("p", jobs=2, title="x")
    patch(world, operation, ("/title", "x"), (COUNT, 2))
    assert cookies(world, operation) == [0, 1]


@pytest.mark.parametrize("spec", [{"is_gang": True}, {"fail_on_job_restart": True}])
def test_job_4_not_of_jobs_that_hang_together(world, spec):
    operation = world.run("p", jobs=2, **spec)
    with pytest.raises(CommandError, match="start another operation"):
        patch(world, operation, (COUNT, 3))
    patch(world, operation, (COUNT, 2), (FAILED, 7))
    assert world.record(operation).max_failed_job_count == 7


def test_the_log_has_no_value_of_what_is_no_patch():
    command = PatchOperation("1", [{"path": "/secure_vault/a", "value": "s3cret"}, {"path": COUNT, "value": 3}, 7])
    assert list_fields(command) == {"operation_id": "1", "patches": {COUNT: 3}}


def test_annotations_change_and_outlive_a_restart(world):
    operation = world.run("p", jobs=1, annotations={"a": 1})
    world.set_operation(operation, weight=2.0)
    assert world.record(operation).annotations is None
    world.set_operation(operation, annotations={"b": [2]}, controller_agent_tag="x")
    world.restart()
    assert world.record(operation).annotations == {"b": [2]}
    for wrong, said in ((7, "expected a map"), ({"a": "x" * 10_240}, "at most 10240 bytes as JSON")):
        with pytest.raises(CommandError, match=f"parameters/annotations: {said}"):
            world.set_operation(operation, annotations=wrong)


def test_parameters_that_mean_nothing_here_are_taken_and_shells_are_not(world):
    operation = world.run("p", jobs=1)
    world.set_operation(operation, scheduling_options_per_pool_tree={"default": {"enable_detailed_logs": True}})
    world.set_operation(operation, options_per_job_shell={})
    with pytest.raises(CommandError, match="parameters/options_per_job_shell: there are no shells in jobs"):
        world.set_operation(operation, options_per_job_shell={"default": {"owners": ["ann"]}})
