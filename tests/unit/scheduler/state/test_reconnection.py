"""What is said twice, late, out of order or not at all: scheduler and nodes agree again (semantics.md 1.8, 6.7)."""

import msgspec
import pytest
from scheduler_world import PlayedNode, World, assert_consistent, describe

from cpumond.scheduler.model import CommandError, JobCounts, JobRecord
from cpumond.scheduler.state.nodes import register_node

LOST_S = 301.0
"""Longer than node_reconnection_timeout."""
GIVEN_UP_S = 32.5
"""Longer than waiting_job_timeout, and two heartbeats for the node's own word."""


def ended(world: World, operation: str, job: str) -> JobRecord:
    return world.state.finished_jobs[operation][job]


def run(world: World, jobs: int = 1, **spec: object) -> str:
    """An operation whose jobs run and are known to run."""
    operation = world.run("p", jobs=jobs, **spec)
    assert len(world.jobs_of(operation)) == jobs
    return operation


def run_one(world: World, cpu: float = 10.0) -> tuple[PlayedNode, str, str]:
    node = world.node("n1", cpu=cpu)
    operation = run(world)
    (job,) = node.jobs
    return node, operation, job


def stop_slowly(world: World, cpu: float = 10.0) -> tuple[PlayedNode, str, str]:
    """A job was told to stop and goes on until ``let_go``; node, operation, the job."""
    node, operation, job = run_one(world, cpu)
    node.keeps_stopping = True
    world.suspend(operation, abort_running_jobs=True)
    node.beat()
    return node, operation, job


def order_without_room(world: World) -> tuple[PlayedNode, str, str]:
    """A job that its node has and that waits there for room; node, operation, job."""
    node = world.node("n1")
    node.has_no_room = True
    operation = world.run("p")
    (job,) = node.waiting
    return node, operation, job


def lose(world: World, *alive: PlayedNode) -> None:
    """All nodes but ``alive`` are silent until they are given up; then the others get their jobs."""
    world.now += LOST_S
    for node in alive:
        node.beat()
    world.expire()
    for _ in range(3 if alive else 0):
        world.step(1.0, *alive)


def test_a_job_that_its_node_never_got_is_not_told_to_stop_for_ever(world, node):
    node.deaf = True
    operation = world.start("p")
    world.step()
    world.abort(operation)
    node.deaf = False
    world.settle_down(3)
    assert len(world.state.nodes["n1"].stopping) == 1
    world.step(GIVEN_UP_S)
    assert world.state.jobs == {}


def test_a_given_up_waiting_job_that_starts_is_adopted_if_it_is_needed(world):
    node, operation, job = order_without_room(world)
    world.suspend(operation)
    world.resume(operation)
    world.after(GIVEN_UP_S).set_operation(operation, resource_limits={"cpu": 0})
    node.beat()
    assert world.job_counts(operation) == JobCounts(aborted=1)
    assert world.jobs_of(operation) == []
    node.begin(job)
    node.beat()
    assert [each.id for each in world.jobs_of(operation)] == [job]
    node.finish(job)
    node.beat()
    assert world.job_counts(operation) == JobCounts(completed=1, aborted=1)


def test_a_waiting_job_with_an_unstored_start_is_stopped_when_replaced(world):
    node, operation, job = order_without_room(world)
    del world.stored["start", job]
    world.restart(steps=3)
    (other,) = world.jobs_of(operation)
    assert other.id != job
    assert set(node.waiting) == {job, other.id}
    node.begin(other.id)
    node.begin(job)
    world.settle_down()
    assert set(node.jobs) == {other.id}
    assert ended(world, operation, job).reason == "it was replaced while its node was away"


def test_a_job_that_failed_cannot_complete_afterwards(world, node):
    operation = run(world, 2)
    job = next(iter(node.jobs))
    node.finish(job, "failed")
    node.deaf = True
    node.beat()
    node.deaf = False
    node.finished[job] = msgspec.structs.replace(node.finished[job], state="completed")
    node.beat()
    assert world.job_counts(operation) == JobCounts(failed=1)


@pytest.mark.parametrize(
    ("state", "expected"), [("completed", JobCounts(completed=1, aborted=1, lost=1)), ("failed", JobCounts(lost=1))]
)
def test_work_of_a_lost_job_counts_even_when_replaced_its_failure_does_not(world, state, expected):
    node, operation, job = run_one(world)
    node.finish(job, state)
    other = world.node("n2")
    lose(world, other)
    assert len(other.jobs) == 1
    node.register()
    world.settle_down()
    assert world.job_counts(operation) == expected
    assert (world.states([operation]), len(other.jobs)) == (("c", 0) if state == "completed" else ("r", 1))


@pytest.mark.parametrize(("state", "exit_code"), [("aborted", 0), ("aborted", 1), ("failed", 1), ("lost", None)])
def test_6_7_a_preempted_job_is_aborted_with_any_exit_code_and_restarted(state, exit_code):
    world = World(pools=["low"], fair_share_starvation_timeout=0, max_unpreemptible_running_job_count=0)
    world.create_pool("high", strong_guarantee_resources={"cpu": 10})
    node = world.node("n1", cpu=10)
    low = world.run("low", max_failed_job_count=1)
    (job,) = node.jobs
    node.keeps_stopping = True
    world.run("high", jobs=10)
    assert list(node.stopping) == [job]
    why = node.stopping[job].why
    node.let_go(job, state, exit_code=exit_code)
    node.beat()
    record = ended(world, low, job)
    assert (record.state, record.exit_code, record.reason) == ("aborted", exit_code, why)
    assert record.preemption.kind == "preempted"
    assert world.job_counts(low) == JobCounts(aborted=1)
    assert world.operation(low).needed == {"t": 1}
    world.node("n2", cpu=10)
    world.settle_down()
    assert len(world.jobs_of(low)) == 1
    assert_consistent(world.state)


def test_a_stop_that_no_node_has_heard_is_given_again_after_a_restart(world):
    node = world.node("n1", cpu=1)
    operation = run(world)
    world.suspend(operation, abort_running_jobs=True)
    world.store_starts()
    world.restart()
    assert world.jobs_of(operation) == []
    (order,) = node.beat().stop
    assert order.why == "aborted: the operation was suspended with abort_running_jobs"
    node.beat()
    assert not node.jobs


def test_a_run_of_an_agent_that_was_replaced_cannot_come_back(world, node):
    operation = run(world)
    late = node.registration()
    node.address = "b.example"
    node.restart_agent()
    world.settle_down()
    before = describe(world.state)
    with pytest.raises(CommandError) as caught:
        register_node(world.state, late)
    sentence = str(caught.value)
    assert "the run i1 of its agent (address n1) was replaced by the later run i2 (address b.example)" in sentence
    assert "give each its own node_id" in sentence
    assert describe(world.state) == before
    assert node.beat().accepted
    assert len(world.jobs_of(operation)) == 1


def test_a_registered_run_may_register_again_and_a_new_one_replaces_it(world, node):
    node.register()
    for _ in range(20):
        node.restart_agent()
    assert len(world.state.nodes["n1"].replaced) == 8
    assert node.beat().accepted
    node.incarnation = "i13"
    with pytest.raises(CommandError, match="was replaced"):
        node.register()


def restart_while_it_stops(world: World, job_preemption_timeout: int = 10_000) -> tuple[PlayedNode, str, str]:
    """The scheduler is started anew while a job ends that is needed again; node, operation, the job."""
    world.set_tree(job_preemption_timeout=job_preemption_timeout)
    node, operation, job = stop_slowly(world, cpu=1)
    world.resume(operation)
    assert list(node.stopping) == [job]
    world.restart()
    return node, operation, job


def test_a_job_being_stopped_is_not_adopted_and_keeps_its_room(world):
    node, operation, job = restart_while_it_stops(world)
    world.settle_down()
    known = world.state.nodes["n1"]
    assert (world.jobs_of(operation), list(node.jobs)) == ([], [job])
    assert (world.operation(operation).needed, world.cores("p")) == ({"t": 1}, 0.0)
    assert known.foreign_usage == (1.0, 1.0, 0.0, 0.0, 0.0)
    assert known.free[1] == 0.0
    other = world.node("n2", cpu=1)
    world.settle_down()
    assert [each.node.id for each in world.jobs_of(operation)] == ["n2"]
    assert len(other.jobs) == 0, "the job whose place it has may still work"
    more = world.run("p")
    assert world.jobs_of(more) == []
    node.let_go(job, steps=3)
    assert known.foreign_usage == (0.0, 0.0, 0.0, 0.0, 0.0)
    (new,) = world.jobs_of(more)
    assert list(node.jobs) == [new.id]
    assert len(other.jobs) == 1


@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [("aborted", 143, JobCounts(aborted=1)), ("completed", 0, JobCounts(completed=1))],
)
def test_the_end_of_a_job_that_was_being_stopped_is_recorded_once(world, state, exit_code, expected):
    node, operation, job = restart_while_it_stops(world)
    node.beat()
    node.let_go(job, state, exit_code=exit_code)
    node.deaf = True
    assert node.beat().acknowledged == [job]
    node.deaf = False
    assert node.beat().acknowledged == [job]
    record = ended(world, operation, job)
    assert (record.state, record.exit_code) == (state, exit_code)
    assert ("suspended with abort_running_jobs" in record.reason) == (state == "aborted")
    assert world.job_counts(operation) == expected
    assert world.states([operation]) == ("c" if state == "completed" else "r")


def test_a_lost_job_that_is_ending_when_its_node_returns_is_not_adopted(world):
    node, operation, job = stop_slowly(world)
    world.resume(operation)
    lose(world)
    node.register()
    world.set_operation(operation, resource_limits={"cpu": 0})
    world.settle_down()
    assert world.jobs_of(operation) == []
    assert node.heard.stop == []
    node.let_go(job, steps=3)
    assert world.job_counts(operation) == JobCounts(aborted=1)


def test_a_job_aborted_while_its_node_was_away_is_stopped_on_return(world):
    node = world.node("n1", cpu=1)
    operation = run(world)
    (job,) = node.jobs
    world.suspend(operation, abort_running_jobs=True)
    world.resume(operation)
    lose(world)
    node.register()
    node.beat()
    assert [(each.job_id, each.why) for each in node.heard.stop] == [(job, "it was aborted, but has not ended yet")]
    world.settle_down(6)
    assert [each.id != job for each in world.jobs_of(operation)] == [True], "another one does its work"


@pytest.mark.parametrize(
    ("tree", "tags", "timeout_s"),
    [({}, (), 10.0), ({"job_preemption_timeout": 2500}, (), 2.5), ({"job_preemption_timeout": 2500}, ("x",), 10.0)],
    ids=["default", "of its tree", "without a tree"],
)
def test_6_7_a_job_that_nobody_claims_is_interrupted_before_it_is_killed(world, tree, tags, timeout_s):
    world.set_tree(nodes_filter="!x", **tree)
    node, operation, job = run_one(world)
    node.deaf = True
    node.tags = tags
    node.register()
    assert (world.state.nodes["n1"].tree is None) == bool(tags)
    world.abort(operation)
    world.restart()
    (stop,) = node.beat().stop
    assert (stop.job_id, stop.timeout_s, stop.kind) == (job, timeout_s, "aborted")
    assert stop.why == "its operation is unknown or has ended"
    assert world.state.nodes["n1"].foreign_usage == (1.0, 1.0, 0.0, 0.0, 0.0)
