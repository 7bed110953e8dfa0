"""What a drain would do, and what is told of cordoned nodes (semantics.md 2.11)."""

import pytest
from scheduler_world import World, entry

from cpumond.api.node_views import CordonView, view_node_details, view_nodes
from cpumond.api.overview import find_alerts
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.drain import DrainPlan, Places, find_places, plan_drain
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.event_log.commands import Asked, make_command_event
from cpumond.scheduler.model import Rules
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.state.commands import prepare
from cpumond.scheduler.state.node_commands import CordonNode, DrainNode, UncordonNode
from cpumond.scheduler.trial.fork import ask_at_once

ROOT = User("root", admin=True)


@pytest.fixture
def world() -> World:
    """Node n1 with four cores, full; n2 with three, empty."""
    world = World(nodes={"n1": 4.0})
    world.start(jobs=2, cpu=1.5, title="hard")
    world.run(tasks={"t": {"command": "true", "job_count": 1, "cpu_limit": 1.0, "interruptible": True}})
    world.node("n2", cpu=3.0)
    return world


def plan(world: World, user: User = ROOT, node: str = "n1") -> DrainPlan:
    places = ask_at_once(lambda: find_places(world.state, node, world.now), Places)
    return plan_drain(world.state.nodes[node], Rights(world.state, user), world.now, places)


def test_interruptible_jobs_go_first_and_each_place_is_given_once(world: World) -> None:
    found = plan(world)
    places = [(job.interruptible, job.cores, job.to_node) for job in found.jobs]
    assert places == [(True, 1.0, "n2"), (False, 1.5, "n2"), (False, 1.5, "")]
    assert (found.job_count, found.waiting_job_count, found.hidden_job_count) == (3, 1, 0)
    assert found.jobs[1].title == "hard"
    world.do(DrainNode("n1"))
    world.settle_down(4)
    assert sorted(job.limits[1] for job in world.state.jobs.values()) == [1.0, 1.5], "as it was planned"


def test_jobs_that_must_not_run_twice_fail_their_operation(world: World) -> None:
    world.node("n3", cpu=4.0)
    world.do(CordonNode("n2"))
    world.do(CordonNode("n1"))
    operation = world.run(jobs=1, cpu=1.0, fail_on_job_restart=True)
    for name in ("n1", "n2"):
        world.do(UncordonNode(name))
    found = plan(world, node="n3")
    assert [(job.fails_operation, job.to_node) for job in found.jobs] == [(True, "")]
    assert (found.failing_job_count, found.waiting_job_count) == (1, 0)
    world.do(DrainNode("n3"))
    world.settle_down()
    assert world.record(operation).state == "failed", "as it was planned"


def test_who_waits_already_gets_the_room_first(world: World) -> None:
    world.start(jobs=2, cpu=1.5, title="waited")
    world.update()
    assert plan(world).waiting_job_count == 3


def test_what_is_lost_is_the_work_since_the_job_began(world: World) -> None:
    for number, job in enumerate(world.nodes["n1"].jobs.values()):
        job.cpu_seconds = 10.0 + number
    world.step(100.0)
    found = plan(world)
    assert found.lost_core_seconds == pytest.approx(sum(10.0 + number for number in range(3)))
    assert {job.lost_core_seconds for job in found.jobs} == {10.0, 11.0, 12.0}
    assert all(job.running_s > 99.0 for job in found.jobs)


def test_jobs_of_a_gang_on_other_nodes_stop_with_it() -> None:
    world = World()
    for name in ("n1", "n2"):
        world.node(name, cpu=2.0)
    gang = world.run(jobs=4, is_gang=True, steps=4)
    assert len(world.jobs_of(gang)) == 4
    found = plan(world)
    assert (found.job_count, found.gang_job_count) == (2, 2)
    world.do(DrainNode("n1"))
    world.settle_down(4)
    assert world.jobs_of(gang) == [], "half of it has no place"
    assert world.record(gang).counts["t"].aborted == 4


def test_nodes_that_start_nothing_have_no_room(world: World) -> None:
    world.do(CordonNode("n2"))
    assert plan(world).waiting_job_count == 3
    world.do(UncordonNode("n2"))
    world.state.nodes["n2"].is_online = False
    assert plan(world).waiting_job_count == 3
    world.state.nodes["n2"].is_online = True
    world.state.rules = Rules(spare=(0.0, 3.5, 0.0, 0.0, 0.0))
    assert plan(world).waiting_job_count == 3


def test_jobs_that_the_asker_may_not_see_are_only_counted(world: World) -> None:
    world.set_tree(acl=[entry("ann", "read", action="deny")])
    found = plan(world, User("ann"))
    assert (found.jobs, found.job_count, found.hidden_job_count, found.waiting_job_count) == ([], 3, 3, 1)


def test_a_node_is_shown_with_its_cordon_also_when_it_is_lost(world: World) -> None:
    assert view_node_details(world.state.nodes["n1"], world.now, world.rights).cordon is None
    world.do(DrainNode("n1", "new disks"), "alice")
    shown = CordonView("alice", world.now, "new disks", "usual")
    assert view_node_details(world.state.nodes["n1"], world.now, world.rights).cordon == shown
    world.step(1000.0, world.nodes["n2"])
    (lost, _) = view_nodes(world.state, world.now, limit=10).nodes
    assert lost.lost_at is not None
    assert lost.cordon == shown


def test_an_event_names_node_tree_reason_and_the_stopped_operations(world: World) -> None:
    command = DrainNode("n1", "new disks")
    change = prepare(world.state, command, "alice", world.now, world.new_id)
    told = make_command_event(world.state, command, Asked(User("alice")), change, world.now)
    assert told.event.text == 'alice drained node "n1": new disks'
    assert (told.event.node, told.event.tree, told.event.request["why"]) == ("n1", "default", "new disks")
    operations = {f"operation:{name}" for name in world.state.operations}
    assert {"node:n1", "tree:default", "user:alice", "audit", *operations} <= set(told.subjects)
    cordon = make_command_event(world.state, CordonNode("n1"), Asked(User("alice")), change, world.now)
    assert not operations & set(cordon.subjects), "nothing of them is stopped"


def test_an_alert_says_so_when_no_node_takes_jobs(world: World) -> None:
    for name in ("n1", "n2"):
        world.do(CordonNode(name))
    messages = [alert.message for alert in find_alerts(world.state, world.now).alerts if alert.code == "no_nodes"]
    assert messages == ['pool tree "default": has 2 operations and all nodes that are online are cordoned or held off']


def test_an_operation_that_waits_says_that_nodes_are_cordoned(world: World) -> None:
    waiting = world.start(cpu=1.0)
    for name in ("n1", "n2"):
        world.do(CordonNode(name))
    world.update()
    answer = explain_operation(world.state, world.record(waiting), world.now, {})
    assert "tree 'default' has no node that is online and not cordoned (2 are)" in str(answer)
