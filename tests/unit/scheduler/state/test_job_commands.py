"""Commands on single jobs, and what a restart makes of them (yt_protocol.md 11)."""

import pytest
from scheduler_world import World, entry, refused_with

from cpumond.scheduler.access.required import check
from cpumond.scheduler.model import ACCESS_DENIED, NO_SUCH_JOB, CommandError, JobCounts
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.operations import AbandonJob, AbortJob


@pytest.fixture
def world() -> World:
    return World(nodes={"n1": 10})


def begin(world: World, jobs: int = 2, **task: object) -> tuple[str, list[str]]:
    """An operation whose jobs run; its id and theirs."""
    operation = world.run("p", jobs=jobs, task=task)
    return operation, [job.id for job in world.jobs_of(operation)]


def test_an_aborted_job_counts_by_who_asked_and_is_started_again(world):
    """JOB-1: the second time it has ended."""
    operation, [first, other] = begin(world)
    world.do(AbortJob(first), "ann")
    for _ in range(2):
        with refused_with(NO_SUCH_JOB, "No such job"):
            world.do(AbortJob(first))
        world.settle_down()
    assert world.job_counts(operation) == JobCounts(aborted=1)
    assert world.record(operation).aborted_for == {"user_request": 1}
    [kept, new] = [job.id for job in world.jobs_of(operation)]
    assert kept == other
    assert new != first
    ended = world.state.finished_jobs[operation][first]
    assert (ended.state, ended.reason) == ("aborted", f"aborted: user ann aborted job {first}")
    for job in (other, new):
        world.nodes["n1"].finish(job)
    world.settle_down()
    assert world.record(operation).state == "completed"


def test_int_4_only_an_interruptible_job_can_be_given_time(world):
    operation, [job] = begin(world, 1)
    with pytest.raises(CommandError, match=r"cannot be interrupted: its task has neither interruptible nor"):
        world.do(AbortJob(job, interrupt_timeout=1000.0))
    assert world.job_counts(operation) == JobCounts()
    _, [job] = begin(world, 1, interruptible=True)
    world.do(AbortJob(job, interrupt_timeout=1500.0))
    assert world.state.jobs[job].stop.timeout_s == 1.5
    _, [job] = begin(world, 1, interruptible=True)
    world.do(AbortJob(job))
    assert world.state.jobs[job].stop.timeout_s == 0.0


def test_job_2_an_abandoned_job_has_done_its_work(world):
    operation, [first, other] = begin(world)
    world.do(AbandonJob(first, operation))
    assert world.job_counts(operation) == JobCounts(completed=1)
    assert first in world.nodes["n1"].jobs
    world.settle_down()
    assert set(world.nodes["n1"].jobs) == {other}, "its node was told to stop it"
    assert world.job_counts(operation) == JobCounts(completed=1)
    with pytest.raises(CommandError, match="No such job"):
        world.do(AbandonJob(first))
    world.restart(steps=3)
    world.do(AbandonJob(other))
    world.settle_down()
    assert world.record(operation).state == "completed"
    assert world.nodes["n1"].jobs == {}


def test_a_job_is_looked_for_in_the_operation_that_is_named(world):
    operation, [job] = begin(world, 1)
    other, _ = begin(world, 1)
    for kind in (AbortJob, AbandonJob):
        with pytest.raises(CommandError, match=f"No such job {job} in operation {other}"):
            world.do(kind(job, other))
    assert world.job_counts(operation) == JobCounts()


def test_job_1_who_may_not_manage_the_operation_may_not_end_its_jobs(world):
    world.create_pool("closed", acl=[entry("ann", "use")])
    [job] = world.jobs_of(world.run("closed", user="ann"))
    for command in (AbortJob(job.id), AbandonJob(job.id)):
        with refused_with(ACCESS_DENIED, r"bob may not change operation .* \(permission manage\)"):
            check(world.state, command, User("bob"))
        check(world.state, command, User("ann"))
