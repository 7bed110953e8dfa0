"""Ordinary jobs and jobs on reclaimed CPU, from their starts to their ends (semantics.md 1.10)."""

from typing import Any

import msgspec
import pytest
from scheduler_world import PlayedNode, World, assert_consistent

from cpumond.api.node_views import view_node_details
from cpumond.api.views import view_job
from cpumond.core.wire import AgentAbout, JobReport, NodeHeartbeat
from cpumond.scheduler.answers.causes import Causes
from cpumond.scheduler.decide.placement import ONLY_RECLAIMED
from cpumond.scheduler.elements import Job
from cpumond.scheduler.model import CommandError, StartRecord
from cpumond.scheduler.state.gangs import find_reservation


def make_world(**tree: Any) -> tuple[World, PlayedNode]:
    """A node of 4 cores that four jobs of one core each have ordered, of which they may use 0.25 each."""
    world = World(max_unpreemptible_running_job_count=0, max_ephemeral_pools_per_user=9, **tree)
    node = world.node("n", cpu=4.0)
    world.run("owners", jobs=4)
    for job in node.jobs:
        node.limit(job, 0.25)
    world.step()
    return world, node


def classes(world: World, operation: str) -> list[str]:
    return [job.job_class for job in world.jobs_of(operation)]


def one(world: World, operation: str) -> Job:
    (job,) = world.jobs_of(operation)
    return job


def test_jobs_within_the_capacity_are_ordinary_and_others_on_reclaimed_cpu():
    world, node = make_world()
    (owners,) = world.state.operations
    assert classes(world, owners) == ["ordinary"] * 4
    assert classes(world, world.run("batch", jobs=3)) == ["reclaimed"] * 3
    orders = [job.order for job in node.jobs.values()]
    assert [order.reclaimed for order in orders] == [False] * 4 + [True] * 3
    assert [order.has_ceiling for order in orders] == [True] * 4 + [False] * 3


def test_orders_that_meet_the_capacity_exactly_are_ordinary():
    world = World(nodes={"n": 0.3})
    assert classes(world, world.run(jobs=3, cpu=0.1)) == ["ordinary"] * 3


def test_what_jobs_of_others_ordered_counts_not_what_they_may_use(world):
    node = world.node("n", cpu=4.0)
    node.foreign.append(JobReport("postgresql", "", cpu_limit=3.0, current_cpu_limit=0.5))
    world.beat()
    operation = world.run(jobs=3)
    assert classes(world, operation) == ["ordinary", "reclaimed", "reclaimed"]
    node.foreign.clear()
    world.settle_down()
    assert classes(world, operation) == ["ordinary", "reclaimed", "reclaimed"]


def test_the_class_outlives_a_restart_and_the_job():
    world, node = make_world()
    batch = world.run("batch")
    job = one(world, batch)
    world.restart()
    assert one(world, batch).reclaimed
    world.settle_down()
    assert one(world, batch).reclaimed
    node.finish(job.id)
    world.start("batch", jobs=9)  # its operation's record stays
    world.settle_down()
    record = world.state.finished_jobs[batch][job.id]
    assert (record.reclaimed, view_job(record).job_class) == (True, "reclaimed")
    world.restart()
    assert world.state.finished_jobs[batch][job.id].reclaimed


def test_records_of_a_version_without_classes_are_ordinary():
    old = {
        "id": "j", "operation_id": "o", "task": "t", "tree": "default", "node_id": "n", "start_time": 1.0,
        "sequence": 1,
    }  # fmt: skip
    record = msgspec.convert(old, StartRecord)
    assert not record.reclaimed
    assert msgspec.to_builtins(record) == old


def test_a_lost_job_that_comes_back_has_its_class_or_is_ordinary():
    world, node = make_world()
    batch = world.run("batch", jobs=2)
    jobs = {job.id for job in world.jobs_of(batch)}
    world.after(1000.0).expire()
    assert world.jobs_of(batch) == []
    node.register()
    world.settle_down()
    assert {job.id: job.reclaimed for job in world.jobs_of(batch)} == dict.fromkeys(jobs, True)
    for place in [place for place in world.stored if place[0] == "start"]:
        del world.stored[place]
    world.restart(steps=3)
    assert {job.id: job.reclaimed for job in world.jobs_of(batch)} == dict.fromkeys(jobs, False)


def test_an_agent_that_can_give_no_idle_class_is_not_asked_to():
    world, node = make_world()
    for idle_class, asked in (("", False), ("idle", True), ("lowest weight", True)):
        about = AgentAbout("0.3.0", "quota", "quota", idle_class=idle_class)
        beat = node.heartbeat()
        told = {name: getattr(beat, name) for name in beat.__struct_fields__}
        world.hear(NodeHeartbeat(**told, about=about))
        job = one(world, world.run("batch", cpu=0.5))
        assert job.reclaimed
        assert node.jobs[job.id].order.reclaimed is asked
        view = view_node_details(world.state.nodes["n"], world.now, world.rights)
        assert (view.idle_class, view.on_reclaimed_cores) == (idle_class, 0.5)
        assert [each.job_class for each in view.jobs] == ["ordinary"] * 4 + ["reclaimed"]
        node.finish(job.id, steps=3)


def test_an_operation_that_refuses_reclaimed_cpu_waits_for_unrequested_cpu():
    world, node = make_world()
    refusing = world.run("batch", jobs=2, allow_reclaimed=False)
    assert world.jobs_of(refusing) == []
    element = world.element(refusing)
    assert element.deactivations == {ONLY_RECLAIMED: 1}
    assert Causes(world.tree()).of(element).cause.kind == "reclaimed"
    node.finish(next(iter(node.jobs)), steps=3)
    assert classes(world, refusing) == ["ordinary"]
    assert_consistent(world.state)


def test_an_operation_that_requires_reclaimed_cpu_has_it_on_an_empty_node(world):
    node = world.node("n", cpu=4.0)
    assert classes(world, world.run(jobs=2, require_reclaimed=True)) == ["reclaimed"] * 2
    assert all(job.order.reclaimed for job in node.jobs.values())


def test_both_options_at_once_are_refused_in_words():
    with pytest.raises(CommandError, match="could never start; set one of the two") as refused:
        World().start(allow_reclaimed=False, require_reclaimed=True)
    assert refused.value.attributes["field"] == "require_reclaimed"
    with pytest.raises(CommandError, match="spec/allow_reclaimed: expected true or false, got text"):
        World().start(allow_reclaimed="no")


@pytest.mark.parametrize(("given", "known"), [({}, False), ({"set-container-cpu-limit": True}, True)])
def test_a_task_says_whether_its_limit_is_a_ceiling(given: dict[str, Any], known: bool):
    world, node = make_world()
    operation = world.run("batch", tasks={"t": {"command": "true", "job_count": 1, **given}})
    assert node.jobs[one(world, operation).id].order.has_ceiling is known
    with pytest.raises(CommandError, match="set_container_cpu_limit: expected true or false, got a number"):
        world.start(tasks={"t": {"command": "true", "job_count": 1, "set_container_cpu_limit": 1}})


def make_pools(**tree: Any) -> tuple[World, PlayedNode]:
    """A node of 4 cores; pool "false" inside pool "true", which says the contrary, and "unset" inside "false"."""
    world = World(**tree)
    world.create_pool("true", set_container_cpu_limit=True)
    world.create_pool("false", "true", set_container_cpu_limit=False)
    world.create_pool("unset", "false")
    return world, world.node("n", cpu=4.0)


@pytest.mark.parametrize("whole", [None, True, False])
@pytest.mark.parametrize("above", ["<Root>", "true", "false", "unset"])
@pytest.mark.parametrize("of_task", [None, True, False])
@pytest.mark.parametrize("kind", ["ordinary", "reclaimed"])
def test_cpu_5_the_nearest_of_task_pools_and_tree_decides_on_a_ceiling(whole, above, of_task, kind):
    tree = {} if whole is None else {"set_container_cpu_limit": whole}
    world, node = make_pools(forbid_immediate_operations_in_root=False, **tree)
    task = {"command": "true", "job_count": 1} | ({} if of_task is None else {"set_container_cpu_limit": of_task})
    operation = world.run(above, tasks={"t": task}, require_reclaimed=kind == "reclaimed")
    job = one(world, operation)
    of_pool = {"<Root>": whole, "true": True}.get(above, False)
    says = of_pool if of_task is None else of_task
    holds = kind == "ordinary" if says is None else says
    assert (job.job_class, job.has_ceiling, node.jobs[job.id].order.has_ceiling) == (kind, holds, holds)


def test_a_job_keeps_the_ceiling_of_its_start():
    world, node = make_pools(set_container_cpu_limit=False)
    world.create_pool("p")
    operation = world.run("p", jobs=2)
    one_job, other = (job.id for job in world.jobs_of(operation))
    assert view_job(world.state.jobs[other]).has_ceiling is False
    world.set_tree(set_container_cpu_limit=True, cpu_monitor_moves="weight")
    world.settle_down()
    for _ in range(2):
        assert not any(job.has_ceiling for job in world.jobs_of(operation))
        world.restart()
    node.finish(one_job, steps=3)
    order = node.jobs[one(world, world.run("p")).id].order
    assert (order.has_ceiling, order.cpu_monitor_moves, order.moves_ceiling) == (True, "weight", False)
    assert node.jobs[other].order.cpu_monitor_moves == "quota"
    for _ in range(2):
        assert view_job(world.state.finished_jobs[operation][one_job]).has_ceiling is False
        world.restart()
    del world.stored["start", other]
    world.after(1000.0).expire()
    node.register()
    world.settle_down()
    assert one(world, operation).has_ceiling is False, "it was lost and came back"


def test_without_an_idle_class_jobs_on_reclaimed_cpu_have_a_ceiling():
    world, node = make_world()
    beat = node.heartbeat()
    told = {name: getattr(beat, name) for name in beat.__struct_fields__}
    world.hear(NodeHeartbeat(**told, about=AgentAbout("0.3.0", "quota", "quota", idle_class="")))
    batch = world.run("batch")
    for _ in range(2):
        job = one(world, batch)
        assert (job.job_class, job.has_ceiling) == ("reclaimed", True)
        world.restart()


def test_a_gang_that_refuses_reclaimed_cpu_starts_within_the_requests():
    world, _ = make_world()
    gang = world.run("gang", jobs=3, cpu=1.5, is_gang=True, allow_reclaimed=False)
    world.node("second", cpu=4.0)
    world.settle_down()
    assert world.jobs_of(gang) == []
    assert set(world.element(gang).deactivations) == {ONLY_RECLAIMED}
    assert find_reservation(world.state, world.tree(), world.now) is None
    third = world.node("third", cpu=2.0)
    world.settle_down()
    assert classes(world, gang) == ["ordinary"] * 3
    assert len(third.jobs) == 1
