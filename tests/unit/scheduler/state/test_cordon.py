"""Nodes that get no new jobs, and drained ones (semantics.md 2.11)."""

import pytest
from scheduler_world import EAGER, TREE, World, refused_with

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.model import RESOLVE, Cordon
from cpumond.scheduler.state import dispatch, heartbeats
from cpumond.scheduler.state.node_commands import CordonNode, DrainNode, UncordonNode
from cpumond.scheduler.state.transaction import Transaction


def names(world: World, operation: str) -> list[str]:
    return sorted(job.node.id for job in world.jobs_of(operation))


@pytest.fixture
def world() -> World:
    return World(nodes={"n1": 4.0, "n2": 4.0})


def test_an_order_that_was_not_sent_yet_is_kept(world):
    operation = world.start(jobs=4)
    world.update()
    heartbeats.receive(world.state, world.nodes["n1"].heartbeat(), world.now)
    dispatch.schedule(world.state, "n1", world.now, world.new_id)
    world.do(CordonNode("n1"))
    world.store_starts()
    world.settle_down()
    assert len(world.nodes["n1"].jobs) == 4
    assert names(world, operation) == ["n1"] * 4


def test_nobody_is_preempted_on_a_cordoned_node_but_limits_hold_there(world):
    world.set_tree(**EAGER)
    world.create_pool("a")
    world.create_pool("b", strong_guarantee_resources={"cpu": 4})
    first = world.run("a", jobs=8)
    for name in ("n1", "n2"):
        world.do(CordonNode(name))
    second = world.run("b", jobs=4)
    assert (len(world.jobs_of(first)), len(world.jobs_of(second))) == (8, 0)
    world.set_pool("a", resource_limits={"cpu": 6})
    world.settle_down()
    assert len(world.jobs_of(first)) == 6


def test_a_cordoned_node_counts_with_what_its_jobs_ordered(world):
    world.start(jobs=2)
    world.step(1.0, world.nodes["n1"])
    node = world.nodes["n1"]
    node.limit(next(iter(node.jobs)), 0.5)
    world.do(CordonNode("n1"))
    world.step()
    assert world.tree().total[CPU] == 2.0 + 4.0, "what a job gave up is still its own"
    total = world.tree().total
    world.step()
    assert world.tree().total is total, "an update stays cheap while nothing ends"
    for job in list(node.jobs):
        node.finish(job)
    world.settle_down()
    assert world.tree().total[CPU] == 4.0
    world.do(UncordonNode("n1"))
    assert world.tree().total[CPU] == 8.0


@pytest.mark.parametrize("restarts", [False, True])
def test_a_drained_nodes_jobs_end_and_start_elsewhere_also_over_a_restart(world, restarts):
    operation = world.start(jobs=4)
    world.step(1.0, world.nodes["n1"])
    assert names(world, operation) == ["n1"] * 4
    world.do(DrainNode("n1", "new disks"), "alice")
    if restarts:
        world.restart()
    world.settle_down(4)
    assert names(world, operation) == ["n2"] * 4
    assert not world.nodes["n1"].jobs
    assert world.record(operation).counts["t"].aborted == 4
    reasons = {job.reason for job in world.state.finished_jobs[operation].values()}
    assert reasons == {'aborted: node "n1" drained by alice: new disks'}
    assert not world.state.preemptions, "nobody got their place"


def test_a_drain_takes_interruptible_jobs_first_and_then_the_others(world):
    hard = world.start(jobs=1)
    soft = world.start(tasks={"t": {"command": "true", "job_count": 2, "interruptible": True}})
    world.step(1.0, world.nodes["n1"])
    world.nodes["n1"].keeps_stopping = True
    world.do(DrainNode("n1"))
    world.step(1.0, world.nodes["n1"])
    assert (names(world, soft), names(world, hard)) == ([], ["n1"])
    world.step(1.0, world.nodes["n1"])
    assert names(world, hard) == ["n1"]
    for job in list(world.nodes["n1"].stopping):
        world.nodes["n1"].let_go(job)
    for _ in range(2):
        world.step(1.0, world.nodes["n1"])
    assert names(world, hard) == []


@pytest.mark.parametrize(("graceful", "timeout_s"), [(False, 2.0), (True, 9.0)])
def test_the_time_that_jobs_of_a_drained_node_get(world, graceful, timeout_s):
    world.set_tree(job_preemption_timeout=2000, job_graceful_preemption_timeout=9000)
    world.start(jobs=1)
    world.step(1.0, world.nodes["n1"])
    world.do(DrainNode("n1", graceful=graceful))
    world.nodes["n1"].keeps_stopping = True
    world.step(1.0, world.nodes["n1"])
    assert [stop.timeout_s for stop in world.nodes["n1"].heard.stop] == [timeout_s]


def test_a_cordon_outlives_restarts_and_registrations(world):
    world.do(CordonNode("n1", "bad fan"), "alice")
    cordon = Cordon("alice", world.now, "bad fan")
    world.nodes["n1"].restart_agent()
    assert world.state.nodes["n1"].cordon == cordon
    world.restart()
    assert world.state.nodes["n1"].cordon == cordon
    assert not world.state.nodes["n2"].cordoned
    world.update()
    world.nodes["n1"].restart_agent()
    assert names(world, world.run(jobs=8)) == ["n2"] * 4


def test_a_node_that_was_given_up_comes_back_cordoned_however_late(world):
    world.do(CordonNode("n1", "repair"), "alice")
    world.step(1.0, world.nodes["n2"])
    world.step(1000.0, world.nodes["n2"])
    assert "n1" not in world.state.nodes
    world.step(3 * 86_400.0, world.nodes["n2"])
    world.restart()
    assert world.state.lost_nodes["n1"].cordon is not None
    world.nodes["n1"].restart_agent()
    assert world.state.nodes["n1"].cordon == Cordon("alice", 1000.0, "repair")


def test_a_node_that_is_away_can_be_uncordoned_and_is_forgotten_then(world):
    world.do(CordonNode("n1"))
    world.step(1000.0, world.nodes["n2"])
    world.do(UncordonNode("n1"))
    world.step(86_401.0, world.nodes["n2"])
    assert "n1" not in world.state.lost_nodes
    world.nodes["n1"].restart_agent()
    assert not world.state.nodes["n1"].cordoned


def test_a_cordon_does_not_call_a_silent_node_back(world):
    world.step(61.0, world.nodes["n2"])
    seen = world.state.nodes["n1"].last_seen
    world.do(CordonNode("n1"))
    assert not world.state.nodes["n1"].is_online
    assert world.state.nodes["n1"].last_seen == seen


def test_drain_after_cordon_and_the_other_way_round(world):
    operation = world.start(jobs=4)
    world.step(1.0, world.nodes["n1"])
    world.do(CordonNode("n1"))
    world.do(DrainNode("n1"))
    world.do(CordonNode("n1"))
    world.step(1.0, world.nodes["n1"])
    assert names(world, operation) == ["n1"] * 4
    world.do(DrainNode("n1"))
    world.step(1.0, world.nodes["n1"])
    assert names(world, operation) == []
    world.do(UncordonNode("n1"))
    world.settle_down()
    assert names(world, operation) != []


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (CordonNode("n1", "a"), CordonNode("n1", "a"), "cordoned"),
        (DrainNode("n1"), DrainNode("n1"), "drained"),
        (UncordonNode("n1"), UncordonNode("n1"), "not cordoned"),
    ],
)
def test_what_is_so_already_is_said_and_stored_no_second_time(world, first, second, what):
    world.do(first, "alice")
    change = world.do(second, "bob")
    assert change == Transaction(id="n1", warnings=(f'node "n1" is already {what}; nothing changed',))
    assert change.is_empty
    assert world.do(CordonNode("n1", "another reason")).kept_nodes


def test_an_unknown_node_is_refused_with_the_name_that_may_be_meant(world):
    with refused_with(RESOLVE, 'Node "n11" is not registered; did you mean "n1"'):
        world.do(CordonNode("n11"))


def test_a_node_whose_tags_fit_several_trees_keeps_its_tree_if_cordoned(world):
    world.state.nodes["n1"].matched_trees = (TREE, "other")
    (record,) = world.do(CordonNode("n1")).kept_nodes
    assert (record.tree, record.tags, record.capacity["cpu"]) == (TREE, (), 4.0)
