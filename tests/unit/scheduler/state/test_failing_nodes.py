"""Nodes on which jobs fail, and whose fault a failure is (semantics.md 2.14)."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from scheduler_world import EASY, PlayedNode, World, assert_consistent

from cpumond.scheduler.model import Rules
from cpumond.scheduler.model.node_failures import GUARD, NodeFailures
from cpumond.scheduler.state import blame
from cpumond.scheduler.state.node_commands import CordonNode, SetNodeTags, UncordonNode

NOT_STARTED = {"exit_code": None, "reason": "there is no working directory /data that user u may enter"}


def make_world(cpu: float = 4.0, nodes: tuple[str, ...] = ("bad", "good"), **rules: Any) -> World:
    world = World(Rules(spare=EASY.spare, node_failures=NodeFailures(**rules)), nodes=dict.fromkeys(nodes, cpu))
    world.state.happened = deque(maxlen=100)
    return world


def fail(node: PlayedNode, state: str = "failed", **facts: Any) -> int:
    """Let all jobs of a node fail; how many."""
    jobs = list(node.jobs)
    for job in jobs:
        node.finish(job, state, **facts)  # type: ignore[arg-type]
    return len(jobs)


def play(world: World, steps: int, ends: Callable[[PlayedNode], int], bad: tuple[str, ...] = ("bad",)) -> int:
    """Periods in which jobs on bad nodes end as ``ends`` has it, and those on others complete; failures in all."""
    failed = 0
    for _ in range(steps):
        world.step()
        for node in world.nodes.values():
            if node.id in bad:
                failed += ends(node)
            else:
                fail(node, "completed")
        assert_consistent(world.state)
    return failed


@pytest.mark.parametrize(("enabled", "states"), [(False, "ff"), (True, "cc")])
def test_two_operations_outlive_a_node_that_fails_every_job(enabled, states):
    world = make_world(enabled=enabled)
    ids = [world.start(jobs=20), world.start(jobs=20)]
    failed = play(world, 20, fail)
    assert world.states(ids) == states
    if not enabled:
        told = 'max_failed_job_count is 10; all 10 failures were on node "bad"; last: failed'
        assert all(told in world.record(each).error for each in ids)
        return
    assert failed == 4, "nothing was started there while it was held off"
    assert [world.record(each).failed_on for each in ids] == [{"bad": 2}, {"bad": 2}]
    (event,) = [each for each in world.state.happened if each.kind == "node_failing"]
    assert event.text == (
        'node "bad": 4 jobs of 2 operations failed in a row; it gets no new jobs for 1 min (1 of 2 nodes is held off, '
        "at most 1 may be)"
    )


def test_one_operation_asks_a_second_node_before_it_fails():
    world = make_world(cpu=8.0)
    operation = world.start(jobs=20, max_failed_job_count=5)
    assert play(world, 12, fail) == 8
    assert world.record(operation).state == "completed"
    world = make_world(cpu=8.0)
    own = world.start(jobs=20, max_failed_job_count=5)
    play(world, 3, fail, ("bad", "good"))
    assert world.record(own).state == "failed"
    assert not world.state.held, "it failed on both nodes"


@pytest.mark.parametrize(("facts", "ending"), [({}, ("failed", 1)), (NOT_STARTED, ("completed", 1))])
def test_an_operation_that_may_fail_once_runs_no_command_twice(facts, ending):
    world = make_world(pause_s=1.0)
    others = [world.start(jobs=20), world.start(jobs=20)]
    play(world, 3, fail)
    world.abort(*others)
    world.do(CordonNode("good", "tests"))
    once = world.start(jobs=1, max_failed_job_count=1)
    world.step()
    assert [job.order.operation_id for job in world.nodes["bad"].jobs.values()] == [once]
    assert world.state.nodes["bad"].failing.holds, "there is evidence against it"
    world.do(UncordonNode("good"))
    fail(world.nodes["bad"], **facts)
    play(world, 3, lambda _: 0)
    assert (world.record(once).state, sum(world.record(once).failed_on.values())) == ending


def test_one_operation_does_not_fail_for_ever_on_a_node_where_others_work():
    world = make_world(cpu=2.0)
    world.nodes["good"].has(2.0)
    bad, failed = world.nodes["bad"], 0
    operation, _ = world.start(jobs=100, max_failed_job_count=3), world.start(jobs=100)
    for _ in range(60):
        world.step()
        for job in list(bad.jobs):
            is_own = bad.jobs[job].order.operation_id == operation
            failed += is_own
            bad.finish(job, "failed" if is_own else "completed")
    assert (failed, world.record(operation).state) == (9, "failed")


def test_failures_that_one_heartbeat_reports_count_as_if_one_after_another():
    world = make_world(cpu=14.0)
    bad = world.nodes["bad"]
    world.do(CordonNode("good", "tests"))
    failing, other = world.start(jobs=13, max_failed_job_count=5), world.start(jobs=1)
    world.step()
    world.step()
    jobs = {job.id for job in world.jobs_of(failing)}
    assert len(jobs) == 13
    assert jobs < bad.jobs.keys()
    world.do(UncordonNode("good"))
    for job in sorted(bad.jobs, key=lambda job: job not in jobs):
        bad.finish(job, "failed" if job in jobs else "completed")
    world.step()
    record = world.record(failing)
    assert (record.state, record.failed_on) == ("running", {"bad": 13})
    assert world.record(other).state == "completed", "so the node is not to blame"


@pytest.mark.parametrize("state", ["failed", "aborted"])
def test_failures_before_the_process_count_only_if_a_second_node_agrees(state):
    world = make_world()
    ids = [world.start(jobs=20, max_failed_job_count=2)]
    failed = play(world, 12, lambda node: fail(node, state, **NOT_STARTED))
    assert (world.states(ids), failed, world.record(ids[0]).blamed_failures) == ("c", 4, 4 if state == "failed" else 0)
    world = make_world()
    operation = world.start(jobs=20, max_failed_job_count=5)
    play(world, 6, lambda node: fail(node, **NOT_STARTED), ("bad", "good"))
    assert world.record(operation).state == "failed"
    assert not world.state.held, "its failures on both nodes are its own fault"


def test_a_pause_grows_and_the_node_is_cordoned_in_the_end():
    world = make_world(pause_s=10.0, max_pause_s=25.0, max_holds=3)
    world.start(jobs=1000, max_failed_job_count=1000), world.start(jobs=1000, max_failed_job_count=1000)
    pauses, command = [], None
    for _ in range(100):
        play(world, 1, fail)
        failing = world.state.nodes["bad"].failing
        if failing is not None and failing.until is not None and (not pauses or pauses[-1][0] != failing.holds):
            pauses.append((failing.holds, failing.until - world.now))
        for command in blame.list_cordons(world.state):
            world.do(command, GUARD)
    assert pauses == [(1, 10.0), (2, 20.0), (3, 25.0), (4, 25.0)], "the fourth is a cordon"
    world.restart()
    cordon = world.state.nodes["bad"].cordon
    assert command is not None
    assert (cordon.user, cordon.why[:41]) == (GUARD, "held off 3 times, and again 16 jobs of 2 ")
    world.do(UncordonNode("bad"))
    assert not world.state.nodes["bad"].cordoned


def test_one_operation_that_cannot_start_cordons_no_node_by_itself():
    for state, cordons in (("failed", 0), ("aborted", 1)):
        world = make_world(pause_s=1.0, max_pause_s=1.0, max_holds=1)
        world.start(jobs=1000, cpu=4.0)
        world.nodes["good"].has(4.0)
        play(world, 20, lambda node, state=state: fail(node, state, **NOT_STARTED))
        assert len(list(blame.list_cordons(world.state))) == cordons


def test_a_success_ends_the_streak_but_not_of_a_job_from_before():
    world = make_world()
    world.start(jobs=1)
    world.step()
    old = next(iter(world.nodes["bad"].jobs))
    ids = [world.start(jobs=2), world.start(jobs=2)]
    world.nodes["good"].has(4.0)
    world.step()
    for job in list(world.nodes["bad"].jobs):
        if job != old:
            world.nodes["bad"].finish(job, "failed")
    world.step()
    assert list(world.state.held) == ["bad"]
    world.nodes["bad"].finish(old)
    world.step()
    assert list(world.state.held) == ["bad"], "it was started before they failed"
    world.step(60.0)
    world.step()
    assert not world.state.held
    assert fail(world.nodes["bad"], "completed")
    world.step()
    assert world.state.nodes["bad"].failing is None
    kinds = [each.kind for each in world.state.happened]
    assert [kind for kind in kinds if kind.startswith("node_")] == ["node_failing", "node_works"]
    assert world.states(ids).count("f") == 0


def test_not_everything_is_held_off_where_the_operations_are_at_fault():
    names = tuple(f"n{number}" for number in range(8))
    world = make_world(nodes=names)
    ids = [world.start(jobs=40), world.start(jobs=40)]
    play(world, 10, fail, names)
    assert (world.states(ids), list(world.state.held)) == ("ff", [])
    good = world.start(jobs=8)
    play(world, 3, fail, ())
    assert world.states([good]) == "c"
    # Of operations that complete something elsewhere it is not known; a fourth of the nodes is held off at most.
    ids = [world.start(jobs=400, max_failed_job_count=1000) for _ in range(2)]
    play(world, 6, fail, names[:6])
    assert len(world.state.held) == 2
    told = "the operations themselves may be at fault (2 of 8 nodes are held off, at most 2 may be)"
    assert sum(each.text.endswith(told) for each in world.state.happened) == 4  # type: ignore[union-attr]
    assert world.states(ids) == "rr"


@pytest.mark.parametrize("fits", ["one node", "only there"])
def test_where_jobs_can_run_nowhere_else_failures_count(fits):
    world = make_world(nodes=("bad",)) if fits == "one node" else make_world(nodes=("good",))
    if fits == "only there":
        world.node("bad", cpu=8.0)
    ids = [world.start(jobs=20, cpu=1.0 if fits == "one node" else 6.0) for _ in range(2)]
    play(world, 60, fail)
    assert (world.states(ids), list(world.state.held)) == ("ff", [])


def test_the_replacement_of_a_failed_job_tries_another_node_for_a_while():
    world = make_world(cpu=1.0)
    operation = world.start(jobs=1, max_failed_job_count=100)
    world.step(1.0, world.nodes["bad"])
    assert fail(world.nodes["bad"]) == 1
    world.step(1.0, world.nodes["bad"])
    assert not world.nodes["bad"].jobs, "the other node has room"
    world.step(1.0, world.nodes["good"])
    assert len(world.nodes["good"].jobs) == 1
    assert fail(world.nodes["good"]) == 1
    world.step(1.0, world.nodes["good"])
    world.nodes["bad"].has(1.0)
    world.step(1.0, world.nodes["bad"])
    world.step(1.0, world.nodes["good"])
    assert len(world.nodes["good"].jobs) == 1, "no other node has room"
    fail(world.nodes["good"])
    world.nodes["bad"].foreign.clear()
    world.step(1.0, world.nodes["bad"])
    world.nodes["bad"].jobs.clear()
    world.step(1.0, world.nodes["good"])
    world.step(blame.OTHER_NODE_S, world.nodes["good"])
    world.step(1.0, world.nodes["good"])
    assert world.record(operation).state == "running"


def test_jobs_that_did_not_fail_are_started_where_others_failed():
    world = make_world(cpu=2.0)
    world.start(jobs=3, max_failed_job_count=100)
    world.step(1.0, world.nodes["bad"])
    world.nodes["bad"].finish(next(iter(world.nodes["bad"].jobs)), "failed")
    world.step(1.0, world.nodes["bad"])
    assert len(world.nodes["bad"].jobs) == 2, "the third job is not the replacement of the one that failed"


def test_an_operator_decides_about_a_node_that_is_held_off():
    world = make_world()
    ids = [world.start(jobs=20), world.start(jobs=20)]
    play(world, 3, fail)
    world.do(SetNodeTags("bad", ("new",)))
    assert list(world.state.held) == ["bad"]
    assert not world.do(UncordonNode("bad")).warnings
    assert not world.state.held
    play(world, 2, lambda _: 0)
    assert len(world.nodes["bad"].jobs) == 4
    world.do(CordonNode("bad", "repair"))
    world.do(UncordonNode("bad"))
    assert world.do(UncordonNode("bad")).warnings
    assert world.states(ids) == "rr"
    play(world, 3, fail)
    assert list(world.state.held) == ["bad"]
    world.step(1.0, world.nodes["good"])
    world.step(1000.0, world.nodes["good"])
    assert (world.state.held, "bad" in world.state.nodes) == ({}, False)
