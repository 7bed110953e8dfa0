"""Nodes and heartbeats: trees, silence, jobs that come and go, restarts (semantics.md 1.8, 2.2 to 2.4, 6.4, 6.7)."""

from collections.abc import Callable

import msgspec
import pytest
from scheduler_world import EASY, PlayedNode, World, assert_consistent, describe, make_task

from cpumond.api import overview
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.model import UNSTORED_STARTS, CommandError, JobCounts, Rules
from cpumond.scheduler.model.failures import EndError
from cpumond.scheduler.settings.commands import RemoveTree
from cpumond.scheduler.state import dispatch, heartbeats, settling
from cpumond.scheduler.state.nodes import KEPT_REFUSED, REFUSED_S
from cpumond.scheduler.state.starts import waits_for_store

SILENCE_S = 60.0
"""Default node_heartbeat_timeout."""


def busy(world: World, jobs: int = 3, cpu: float = 2.0, **spec: object) -> str:
    """An operation in pool p whose jobs run and are known to run."""
    if "p" not in world.tree().pools:
        world.create_pool("p")
    return world.run("p", jobs=jobs, cpu=cpu, **spec)


def busy_node(world: World, jobs: int = 3, cpu: float = 2.0) -> tuple[PlayedNode, str]:
    """That operation and the only node."""
    return world.node("n1"), busy(world, jobs, cpu)


def alerts(world: World) -> list[tuple[str, str]]:
    return [(alert.code, alert.subject) for alert in overview.find_alerts(world.state, world.now).alerts]


# --- time limits


def with_limits(world: World, job_ms: float | None = None, jobs: int = 2, **spec: object) -> str:
    return world.start("p", jobs=jobs, task={"job_time_limit": job_ms}, **spec)


def overdue(world: World, jobs: int) -> tuple[PlayedNode, str]:
    """Jobs that were told to stop for their time limit and do not."""
    node = world.node("n1")
    operation = with_limits(world, 5000, jobs)
    world.settle_down()
    node.keeps_stopping = True
    world.step(10.0)
    assert len(node.stopping) == len(node.jobs) == jobs
    return node, operation


def test_an_operation_fails_when_its_time_limit_is_over(world, node):
    operation = with_limits(world, time_limit=60_000)
    started = world.now
    world.settle_down()
    world.now = started + 59.0
    world.step(0.5)
    assert (world.record(operation).state, len(node.jobs)) == ("running", 2)
    world.restart()
    world.step(1.0)
    record = world.record(operation)
    assert (record.state, record.finish_time) == ("failed", started + 60.5)
    assert record.error == "Operation is running for too long, aborted: its time_limit of 60000 ms is over"
    assert world.job_counts(operation).aborted == 2
    world.settle_down()
    assert node.jobs == {}


def test_time_limits_of_ended_operations_are_forgotten(world):
    kept = with_limits(world, time_limit=60_000)
    for _ in range(300):
        world.abort(world.start("p", time_limit=1e12))
    assert len(world.state.deadlines) < 150
    world.step(61.0)
    world.settle_down()
    assert world.record(kept).state == "failed"


def test_a_job_that_runs_for_longer_than_its_time_limit_has_failed(world, node):
    operation = with_limits(world, 10_000, jobs=1, max_failed_job_count=2)
    world.settle_down()
    job = next(iter(node.jobs))
    world.step(8.0)
    assert node.jobs
    node.keeps_stopping = True
    world.step(4.0)
    assert node.stopping[job].why == "Job time limit exceeded: it ran for longer than its job_time_limit of 10000 ms"
    world.settle_down(3)
    assert (list(node.jobs), world.operation(operation).needed) == ([job], {})  # nothing instead while it ends
    assert world.job_counts(operation) == JobCounts()
    node.keeps_stopping = False
    node.let_go(job, "failed", exit_code=143, steps=3)
    record = world.state.finished_jobs[operation][job]
    assert (record.state, record.exit_code, record.preemption) == ("failed", 143, None)
    assert record.reason.startswith("Job time limit exceeded")
    assert record.failure == EndError(record.reason, 1202, {"limit": 10_000.0})
    assert world.job_counts(operation) == JobCounts(failed=1)
    assert len(node.jobs) == 1  # started anew
    world.step(20.0)
    world.settle_down()
    assert world.record(operation).state == "failed"
    told = '2 jobs failed, max_failed_job_count is 2; all 2 failures were on node "n1"; last: Job time limit'
    assert told in world.record(operation).error
    assert (world.job_counts(operation), node.jobs) == (JobCounts(failed=2), {})


def test_nothing_replaces_a_job_beyond_its_time_limit_while_it_ends(world):
    node, operation = overdue(world, jobs=1)
    (job,) = node.stopping
    world.restart(steps=3)
    assert (list(node.jobs), world.operation(operation).needed) == ([job], {})
    node.keeps_stopping = False
    node.let_go(job, "failed", steps=3)
    assert world.state.finished_jobs[operation][job].reason.startswith("Job time limit exceeded")
    assert (world.job_counts(operation), len(node.jobs)) == (JobCounts(failed=1), 1)


# --- 2.2, trees of nodes


def fit_two_trees(node: PlayedNode, register: Callable[[], object]) -> None:
    """Its tags change so that the tree "other" takes it too; it says so with ``register``, which is refused."""
    node.tags = ("x",)
    with pytest.raises(CommandError, match="more than one pool tree"):
        register()


def test_2_2_a_node_that_fits_two_trees_is_refused_with_both_names(world):
    world.create_tree("other", nodes_filter="x")
    before = describe(world.state)
    with pytest.raises(CommandError) as caught:
        world.node("n1", tags=("x",))
    message = str(caught.value)
    assert message.startswith("Node belongs to more than one pool tree")
    assert "'default'" in message
    assert "'other'" in message
    assert caught.value.attributes["matched_pool_trees"] == ["default", "other"]
    assert describe(world.state) == before


def test_2_2_a_node_whose_tags_fit_two_trees_keeps_its_jobs_and_gets_none(world):
    world.create_tree("other", nodes_filter="x")
    node, operation = busy_node(world, cpu=1.0)
    fit_two_trees(node, node.register)

    world.start("p", jobs=2)  # there is room for them
    world.settle_down(5)
    assert (node.heard.accepted, node.heard.start, node.heard.stop) == (True, [], [])
    assert len(node.jobs) == len(world.jobs_of(operation)) == 3
    assert alerts(world) == [("node_in_several_trees", "n1")]
    assert world.state.nodes["n1"].tree == "default"
    node.finish(next(iter(node.jobs)), steps=3)
    assert (world.job_counts(operation).completed, len(node.jobs)) == (1, 2)
    world.restart(steps=5)
    assert (len(node.jobs), alerts(world)) == (2, [("node_in_several_trees", "n1")])
    node.tags = ()
    node.register()
    world.settle_down(5)
    assert (len(node.jobs), alerts(world)) == (4, [])


def test_2_2_a_node_of_two_trees_counts_its_jobs_and_is_given_up(world):
    world.create_tree("other", nodes_filter="x")
    node, operation = busy_node(world, cpu=1.0)
    world.node("n2", cpu=2.0)
    fit_two_trees(node, node.restart_agent)
    assert world.tree().total[CPU] == 3.0 + 2.0
    del world.nodes["n1"]
    for _ in range(30):
        world.step(SILENCE_S / 2)
        if "n1" in world.state.nodes:
            fit_two_trees(node, node.register)
    assert (list(world.state.nodes), world.tree().total[CPU]) == (["n2"], 2.0)
    assert world.job_counts(operation).lost == 3


def test_2_2_a_filter_that_mends_a_node_of_two_trees_is_accepted(world):
    world.create_tree("other", nodes_filter="x")
    world.create_tree("third", nodes_filter="y")
    node = world.node("n1")
    busy(world)
    fit_two_trees(node, node.register)
    world.set_tree("third", nodes_filter="z")
    assert alerts(world) == [("node_in_several_trees", "n1")]
    world.set_tree(nodes_filter="!x")
    assert world.state.nodes["n1"].tree == "other"
    world.settle_down()
    assert (node.jobs, alerts(world)) == ({}, [("no_nodes", "default")])


def test_2_2_an_unsent_job_does_not_start_on_a_node_of_two_trees(world):
    world.create_tree("other", nodes_filter="x")
    node = world.node("n1")
    operation = world.start("p", jobs=3, cpu=2.0)
    world.update()
    heartbeats.receive(world.state, node.heartbeat(), world.now)
    dispatch.schedule(world.state, "n1", world.now, world.new_id)  # the answer is lost with what it would have carried
    assert len(world.jobs_of(operation)) == 3
    fit_two_trees(node, node.register)
    world.settle_down()
    assert (node.jobs, world.operation(operation).needed) == ({}, {"t": 3})


def test_2_2_an_unknown_node_that_fits_two_trees_is_an_alert(world):
    world.create_tree("other", nodes_filter="x")
    with pytest.raises(CommandError, match="more than one pool tree"):
        world.node("n1", tags=("x",))
    assert alerts(world) == [("node_in_several_trees", "n1")]
    world.now += REFUSED_S + 1.0
    assert alerts(world) == []
    for number in range(KEPT_REFUSED + 5):
        with pytest.raises(CommandError, match="more than one pool tree"):
            world.node(f"n{number}", tags=("x",))
    assert len(alerts(world)) == KEPT_REFUSED
    world.set_tree("other", nodes_filter="y")
    world.node(f"n{KEPT_REFUSED}", tags=("x",))
    assert ("node_in_several_trees", f"n{KEPT_REFUSED}") not in alerts(world)


def test_2_2_its_own_address_is_one_of_the_tags():
    assert set(World(nodes={"n1": 1, "n2": 1}, nodes_filter="n1").tree().nodes) == {"n1"}


def test_2_3_operations_leave_a_removed_tree():
    world = World(nodes_filter="!x")
    world.create_tree("other", nodes_filter="x")
    here, there = world.node("n1"), world.node("n2", tags=("x",))
    operation = world.run("p", jobs=20, pool_trees=["default", "other"])
    assert len(here.jobs) == len(there.jobs) == 10
    world.do(RemoveTree("other", recursive=True))
    assert list(world.record(operation).trees) == ["default"]
    assert world.record(operation).state == "running"
    assert len(world.jobs_of(operation)) == 10
    world.settle_down()
    assert there.jobs == {}
    assert world.job_counts(operation).aborted == 10
    assert world.operation(operation).needed == {"t": 10}
    assert_consistent(world.state)


def test_2_3_an_operation_without_any_tree_left_is_aborted(world):
    world.node("n1")
    operation = busy(world)
    world.do(RemoveTree("default", recursive=True))
    assert world.record(operation).state == "aborted"
    assert world.record(operation).error == "No suitable fair-share trees to schedule operation"
    world.after(5).beat()
    world.beat()
    assert world.nodes["n1"].jobs == {}


def test_2_3_jobs_of_a_removed_tree_are_shown_as_of_the_removal():
    world = World(nodes_filter="!x")
    world.create_tree("other", nodes_filter="x")
    world.node("n1", tags=("x",))
    operation = world.run("p", pool_trees=["default", "other"])
    world.now = removed_at = 2000.0
    world.do(RemoveTree("other", recursive=True))
    world.settle_down(2)
    (job,) = world.state.finished_jobs[operation].values()
    assert job.preemption.at == removed_at
    assert "other" in job.preemption.why


def test_2_4_a_silent_node_counts_until_the_reconnection_timeout():
    world = World(node_reconnection_timeout=300_000)
    world.node("n1")
    operation = busy(world)
    world.after(300).expire()
    assert not world.state.nodes["n1"].is_online
    assert world.tree().total[1] == 10
    assert world.cores("p") == 6
    world.after(1).expire()
    assert "n1" not in world.state.nodes
    assert world.tree().total[1] == 0
    assert world.cores("p") == 0
    assert world.job_counts(operation).lost == 3
    assert world.operation(operation).needed == {"t": 3}
    assert ("node", "n1") not in world.stored
    assert_consistent(world.state)


def test_2_4_jobs_that_were_replaced_meanwhile_are_stopped(world):
    node, operation = busy_node(world)
    world.after(301).expire()
    other = world.node("n2")
    world.settle_down()
    assert len(other.jobs) == 3
    node.register()
    node.deaf = True
    for _ in range(3):
        answer = node.beat()
        assert {stop.job_id for stop in answer.stop} == set(node.jobs)
        assert all("replaced" in stop.why for stop in answer.stop)
    node.deaf = False
    world.settle_down()
    assert node.jobs == {}
    assert len(other.jobs) == 3
    assert world.job_counts(operation) == JobCounts(lost=3)
    assert world.cores("p") == 6
    assert node.heard.stop == []


@pytest.mark.parametrize("is_written", [False, True])
def test_2_4_a_node_that_comes_back_while_its_removal_is_written(world, is_written):
    node, operation = busy_node(world)
    before = set(node.jobs)
    world.now += 400
    change = settling.expire(world.state, world.now)
    if is_written:
        change = settling.recount(world.state, change, world.now)
    other = world.start("p", jobs=2)
    world.update()
    node.beat()
    world.carry_out(change if is_written else settling.recount(world.state, change, world.now))
    assert_consistent(world.state)
    world.settle_down(5)
    assert is_written or before <= set(node.jobs)
    assert len(world.jobs_of(operation)) == 3
    assert len(world.jobs_of(other)) == 2
    assert world.cores("p") == 8


@pytest.mark.parametrize(
    ("change", "words", "register"),
    [
        ({"node_id": "n9"}, "n9", True),
        ({"incarnation": "other"}, "", True),
        ({}, "not newer", False),
        ({"sequence": 1}, "not newer", False),
    ],
    ids=["unknown node", "unknown run", "repeated", "late"],
)
def test_such_a_heartbeat_is_dropped_and_changes_nothing(world, node, change, words, register):
    busy(world)
    heartbeat = node.heartbeat()
    world.hear(heartbeat)
    before = describe(world.state)
    answer = world.hear(msgspec.structs.replace(heartbeat, jobs=[], **change))
    assert (answer.accepted, answer.register) == (False, register)
    assert words in answer.reason
    assert describe(world.state) == before


# --- jobs on nodes


def test_a_vanished_job_that_appears_again_counts_again(world):
    node = world.node("n1", cpu=6)
    operation = busy(world)
    gone = next(iter(node.jobs))
    job = node.jobs.pop(gone)
    world.carry_out(heartbeats.receive(world.state, node.heartbeat(), world.now).transaction)
    node.jobs[gone] = job
    world.settle_down()
    assert gone in {each.id for each in world.jobs_of(operation)}
    assert len(world.jobs_of(operation)) == 3
    node.finish(gone, steps=3)
    assert world.job_counts(operation) == JobCounts(completed=1, lost=1)


def test_a_finished_job_counts_once_when_heartbeats_overtake_the_store(world):
    node, operation = busy_node(world, jobs=5)
    node.finish(next(iter(node.jobs)))
    receipts = [heartbeats.receive(world.state, node.heartbeat(), world.now) for _ in range(3)]
    assert world.job_counts(operation) == JobCounts()  # nothing lasting before it is stored
    for receipt in receipts:
        world.carry_out(settling.recount(world.state, receipt.transaction, world.now))
    assert world.job_counts(operation) == JobCounts(completed=1)


@pytest.mark.parametrize("state", ["completed", "failed", "aborted", "lost"])
def test_only_completed_jobs_are_not_wanted_again(world, state):
    node = world.node("n1", cpu=4)
    operation = busy(world, jobs=2)
    node.finish(next(iter(node.jobs)), state, steps=3)
    assert getattr(world.job_counts(operation), state) == 1
    assert len(node.jobs) == (1 if state == "completed" else 2)


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_jobs_that_are_stopped_with_the_end_of_their_operation_are_counted(world, state):
    node = world.node("n1", cpu=4)
    operation = world.run("p", tasks={"a": make_task(), "b": make_task(2)}, max_failed_job_count=1)
    assert len(node.jobs) == 3
    if state == "completed":
        world.complete(operation)
    else:
        node.finish(next(job_id for job_id, job in node.jobs.items() if job.order.task == "a"), "failed", steps=3)
    record = world.state.finished[operation]
    assert record.state == state
    assert {name: each.aborted for name, each in record.counts.items()} == {"a": int(state == "completed"), "b": 2}


# --- restarts


def test_a_stored_start_is_known_before_its_node_is_heard(world):
    one, two = world.node("n1", cpu=2), world.node("n2", cpu=8)
    operation = busy(world, jobs=3, cpu=1)
    kept = {**one.jobs, **two.jobs}
    world.restart()
    assert {job.id: job.node.id for job in world.jobs_of(operation)} == {
        job: node.id for node in (one, two) for job in node.jobs
    }
    assert world.cores("p") == 3.0
    assert_consistent(world.state)
    other = world.start("p", jobs=20, cpu=1)
    world.step(1.0, two)
    assert {job.node.id for job in world.jobs_of(other)} == {"n2"}
    assert len(world.jobs_of(other)) + len(kept.keys() & two.jobs.keys()) == 8
    world.settle_down()
    assert kept.keys() <= {**one.jobs, **two.jobs}.keys()
    assert len(one.jobs) + len(two.jobs) == 10
    assert world.job_counts(operation) == JobCounts()


def test_a_start_that_was_not_stored_was_in_no_answer_and_is_made_again(world, node):
    operation = world.start("p", jobs=1)
    world.update()
    receipt = heartbeats.receive(world.state, node.heartbeat(), world.now)
    dispatch.schedule(world.state, "n1", world.now, world.new_id)
    assert waits_for_store(world.state, "n1")
    assert dispatch.answer(world.state, "n1", receipt, world.now).start == []
    world.restart()
    assert world.jobs_of(operation) == []
    world.settle_down()
    assert len(node.jobs) == 1
    assert not waits_for_store(world.state, "n1")


def test_a_job_adopted_after_it_was_given_up_is_a_stored_start_again(world):
    node, operation = busy_node(world, jobs=1)
    (job,) = node.jobs
    world.nodes.clear()
    world.settle_down(10, SILENCE_S)
    assert world.stored.keys() & {("start", job), ("job", job)} == {("job", job)}
    world.nodes["n1"] = node
    node.register()
    heartbeats.receive(world.state, node.heartbeat(), world.now)
    world.store_starts()  # killed before the record of its first end is deleted
    for _ in range(2):
        world.restart()
        assert [each.id for each in world.jobs_of(operation)] == [job]
        world.settle_down()
        assert world.stored.keys() & {("start", job), ("job", job)} == {("start", job)}
    node.finish(job, steps=3)
    assert world.record(operation).state == "completed"
    assert not [place for place in world.stored if place[0] == "start"]


def test_stored_starts_that_lead_nowhere_are_deleted(world):
    node, operation = busy_node(world, jobs=2)
    first, second = node.jobs
    gone = msgspec.json.decode(world.stored["start", first])
    world.stored["start", "x"] = msgspec.json.encode({**gone, "id": "x", "node_id": "gone"})
    world.stored["start", "y"] = msgspec.json.encode({**gone, "id": "y", "operation_id": "gone"})
    world.stored["start", "z"] = msgspec.json.encode({**gone, "id": "z", "tree": "gone"})
    world.stored["start", "w"] = msgspec.json.encode({**gone, "id": "w", "task": "gone"})
    world.restart()
    assert {job.id for job in world.jobs_of(operation)} == {first, second}
    world.settle_down()
    assert {key for kind, key in world.stored if kind == "start"} == {first, second}


def test_the_first_start_on_a_store_without_starts_waits_for_all_nodes(world):
    one, _ = world.node("n1"), world.node("n2")
    operation = busy(world, jobs=3)
    world.forget_starts()
    world.restart()
    world.step(1.0, one)
    assert UNSTORED_STARTS in world.stored
    world.restart()  # what was told so far is stored; the other node is waited for
    more = world.start("p", jobs=20)
    world.step(1.0, one)
    assert world.jobs_of(more) == []
    world.settle_down(2)
    assert UNSTORED_STARTS not in world.stored
    assert len(world.jobs_of(more)) > 0
    assert {job.id for job in world.jobs_of(operation)} <= {key for kind, key in world.stored if kind == "start"}
    assert world.job_counts(operation) == JobCounts()


@pytest.mark.parametrize(("is_stored", "left"), [(True, [899.0, 900.0]), (False, [897.0, 898.0])])
def test_6_4_after_a_restart_jobs_are_in_the_order_of_stored_starts(world, node, is_stored, left):
    busy(world, jobs=4, cpu=1)
    for age, job in enumerate(node.jobs.values()):
        job.started_at = 900.0 - age
    if not is_stored:
        world.forget_starts()
    world.restart()
    node.beat()
    world.set_pool("p", resource_limits={"cpu": 2})
    world.settle_down()
    assert sorted(job.started_at for job in node.jobs.values()) == left


def test_history_is_kept_for_as_many_operations_as_configured():
    world = World(Rules(spare=EASY.spare, finished_operation_retention_count=2))
    node = world.node("n1")
    operations = []
    for _ in range(4):
        operations.append(busy(world, jobs=1))
        node.finish(next(iter(node.jobs)), steps=3)
    assert list(world.state.finished) == operations[2:]
    assert set(world.state.finished_jobs) == set(operations[2:])
    assert {key for kind, key in world.stored if kind == "operation"} == set(operations[2:])
    assert len([key for kind, key in world.stored if kind == "job"]) == 2


def test_jobs_that_end_after_their_operation_left_the_history_are_not_kept():
    world = World(Rules(spare=EASY.spare, finished_operation_retention_count=0))
    node = world.node("n1")
    world.abort(busy(world))
    world.settle_down()
    assert node.jobs == {}
    assert world.state.finished_jobs == {}
    assert [key for key in world.stored if key[0] in ("job", "operation")] == []
