"""Jobs take room for the memory that jobs of their task used before, in trees that say so (semantics.md 8.1)."""

from typing import Any

import msgspec
import pytest
from scheduler_world import GIB, PlayedNode, World

from cpumond.api.views import view_operation_details
from cpumond.core.wire import MEMORY_OVERDRAFT, JobReport
from cpumond.fairshare.resources import MEMORY
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.elements import Job
from cpumond.scheduler.model import CommandError, Task
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.operations import StartOperation, read_spec

MIB = 2**20
LIMIT = 512 * MIB


def make(memory: int = GIB, **tree: Any) -> tuple[World, PlayedNode]:
    world = World(**{"enable_memory_reserve": True, **tree})
    return world, world.node("n1", cpu=100.0, memory=memory)


def start(world: World, jobs: int = 10, spec: dict[str, Any] | None = None, **task: Any) -> str:
    return world.run(jobs=jobs, task={"memory_limit": LIMIT, **task}, **(spec or {}))


def reserves(world: World, operation_id: str) -> list[float]:
    """What its jobs reserve, in MiB, as its usage, its node and the orders of its jobs have it."""
    jobs = sorted(world.jobs_of(operation_id), key=lambda job: job.sequence)
    amounts = [job.limits[MEMORY] for job in jobs]
    played = {job_id: job for node in world.nodes.values() for job_id, job in node.jobs.items()}
    orders = [played[job.id].order for job in jobs if job.id in played]
    assert all(order.memory_limit == LIMIT for order in orders)
    assert [float(order.reserved_memory) for order in orders] == amounts[: len(orders)]
    (element,) = world.operation(operation_id).elements.values()
    assert element.usage[MEMORY] == sum(amounts)
    return [round(amount / MIB, 1) for amount in amounts]


def first(world: World, operation_id: str) -> Job:
    return min(world.jobs_of(operation_id), key=lambda job: job.sequence)


def overdraw(world: World, node: PlayedNode, job: Job, used: int = 300 * MIB) -> None:
    """The node is short of memory, and the job one that it aborts."""
    node.finish(job.id, "aborted", reason=f"{MEMORY_OVERDRAFT}it is", max_memory=used)


def next_reserve(world: World, operation_id: str) -> float:
    (task,) = world.record(operation_id).tasks
    return round(task.memory_reserve / task.memory_limit, 6)


@pytest.mark.parametrize(
    ("tree", "task", "running"),
    [
        ({}, {}, [256.0] * 4),
        ({}, {"memory_reserve_factor": 1.0}, [512.0] * 2),
        ({"enable_memory_reserve": False}, {}, [512.0] * 2),
        ({}, {"user_job_memory_digest_default_value": 0.25}, [128.0] * 8),
        ({}, {"user_job_memory_digest_default_value": 0.25, "user_job_memory_digest_lower_bound": 0.6}, [307.2] * 3),
        ({}, {"memory_reserve_factor": 0.25, "ignore_memory_reserve_factor_less_than_one": True}, [256.0] * 4),
    ],
)
def test_mem_8_as_many_jobs_start_as_reserves_fit(tree, task, running):
    world, _ = make(**tree)
    assert reserves(world, start(world, **task)) == running


def test_what_jobs_used_is_what_the_next_ones_reserve():
    """MEM-2, MEM-3 and MEM-4 on jobs: completed ones are samples, failed and otherwise aborted ones are none."""
    world, node = make()
    operation_id = start(world, jobs=40)
    assert next_reserve(world, operation_id) == 0.5
    node.finish(first(world, operation_id).id, "failed", max_memory=LIMIT)
    node.finish(world.jobs_of(operation_id)[1].id, "aborted", max_memory=LIMIT)
    world.step()
    assert next_reserve(world, operation_id) == 0.5
    node.finish(first(world, operation_id).id, max_memory=int(0.3 * LIMIT))
    world.step()
    assert next_reserve(world, operation_id) == pytest.approx(0.302788, abs=1e-6)
    needed = world.operation(operation_id).needed["t"]
    world.update()
    (element,) = world.operation(operation_id).elements.values()
    share = world.record(operation_id).tasks[0].memory_reserve
    assert element.demand[MEMORY] == element.usage[MEMORY] + needed * share
    world.settle_down()
    assert reserves(world, operation_id) == [256.0] * 3 + [155.0]
    for job in list(node.jobs):
        node.finish(job)  # of which nothing is known
    world.step()
    assert world.record(operation_id).memory["t"].samples == {180: 1}


def test_mem_9_the_successor_of_a_job_aborted_for_memory_reserves_all():
    world, node = make()
    operation_id = start(world, jobs=8)
    job = first(world, operation_id)
    overdraw(world, node, job)
    world.settle_down()
    assert world.job_counts(operation_id).aborted == 1
    assert world.record(operation_id).state == "running"
    assert reserves(world, operation_id) == [256.0] * 3, "there is no room for 512 MiB"
    told = explain_operation(world.state, world.record(operation_id), world.now, {}).trees[0].lines
    reserve = "it waits for memory: 512 MiB of memory_limit 512 MiB are reserved for a job"
    assert f"{reserve}, by the usage of earlier jobs of the task" in told
    node.finish(first(world, operation_id).id, max_memory=int(0.3 * LIMIT), steps=3)
    assert reserves(world, operation_id) == [256.0] * 2 + [512.0]
    successor = max(world.jobs_of(operation_id), key=lambda job: job.sequence)
    assert (successor.cookie, successor.memory_reserve) == (job.cookie, LIMIT)
    # The others reserve what was seen by then: 0.3 and 300 MiB of 512.
    assert next_reserve(world, operation_id) == pytest.approx(0.586 * 1.01, abs=0.01)
    assert world.record(operation_id).memory["t"].overdrafts == {job.cookie: 1.0}
    node.finish(successor.id, max_memory=LIMIT - 1)
    world.step()
    assert world.record(operation_id).memory["t"].overdrafts == {}


def test_a_multiplier_raises_the_reserve_step_by_step():
    world, node = make(memory=20 * GIB)
    operation_id = start(world, jobs=1, user_job_resource_overdraft_memory_multiplier=1.5)
    seen = []
    for _ in range(3):
        (job,) = world.jobs_of(operation_id)
        seen.append(job.limits[MEMORY] / LIMIT)
        overdraw(world, node, job)
        world.settle_down()
    assert seen == [0.5, 0.75, 1.0]
    (job,) = world.jobs_of(operation_id)
    node.finish(job.id, "aborted", reason="the host was started anew", steps=3)
    (job,) = world.jobs_of(operation_id)
    assert job.limits[MEMORY] == LIMIT, "it would be aborted again"


@pytest.mark.parametrize(("used", "bucket"), [(LIMIT // 2, 231), (LIMIT + 5 * MIB, 301), (2 * LIMIT, 301)])
def test_what_a_job_aborted_for_its_memory_used_is_a_sample(used, bucket):
    world, node = make()
    operation_id = start(world)
    overdraw(world, node, first(world, operation_id), used)
    world.step()
    assert world.record(operation_id).memory["t"].samples == {bucket: 1}


def test_reserves_outlive_a_restart_of_the_scheduler():
    world, node = make()
    operation_id = start(world)
    node.finish(first(world, operation_id).id, max_memory=int(0.3 * LIMIT), steps=3)
    overdraw(world, node, first(world, operation_id))
    world.step()
    before = reserves(world, operation_id), world.record(operation_id), next_reserve(world, operation_id)
    assert before[2] == 1.0
    node.deaf = True
    world.restart()
    world.update()
    assert (reserves(world, operation_id), world.record(operation_id), next_reserve(world, operation_id)) == before
    node.jobs.clear()
    node.deaf = False
    world.beat()
    assert {round(job.order.memory_reserve / MIB, 1) for job in node.jobs.values()} == {256.0, 155.0}


def test_the_option_of_the_tree_holds_for_the_next_jobs():
    world, node = make(enable_memory_reserve=False)
    operation_id = start(world)
    assert reserves(world, operation_id) == [512.0] * 2
    assert {job.order.memory_reserve for job in node.jobs.values()} == {0}
    world.set_tree(enable_memory_reserve=True)
    node.finish(first(world, operation_id).id, max_memory=MIB, steps=3)
    assert reserves(world, operation_id) == [512.0, 256.0, 256.0]
    assert world.record(operation_id).memory == {}, "a job that reserved all of it is no sample"
    world.set_tree(enable_memory_reserve=False)
    node.finish(first(world, operation_id).id, steps=3)
    assert reserves(world, operation_id) == [256.0, 256.0, 512.0]


def test_an_operation_in_several_trees_reserves_less_if_all_of_them_say_so():
    world, _ = make(nodes_filter="!b")
    world.create_tree("b", nodes_filter="b", enable_memory_reserve=False)
    operation_id = start(world, spec={"pool_trees": ["default", "b"]})
    assert next_reserve(world, operation_id) == 0.0
    world.set_tree("b", enable_memory_reserve=True)
    assert next_reserve(world, operation_id) == 0.5


def test_a_task_without_memory_limit_reserves_none():
    world, _ = make()
    operation_id = start(world, memory_limit=0)
    assert world.record(operation_id).tasks[0].memory_reserve == 0
    assert len(world.jobs_of(operation_id)) == 10


def test_jobs_above_their_reserve_are_counted_and_told_of():
    world, node = make()
    operation_id = start(world)
    report = node.heartbeat().jobs[0]
    assert isinstance(report, JobReport)
    heartbeat = node.heartbeat()
    jobs = [msgspec.structs.replace(each, over_reserve=each.job_id == report.job_id) for each in heartbeat.jobs]
    world.hear(msgspec.structs.replace(heartbeat, jobs=jobs))
    details = view_operation_details(Rights(world.state, User("u")), world.record(operation_id), world.now)
    assert details.over_reserve_count == 1
    told = explain_operation(world.state, world.record(operation_id), world.now, {}).trees[0].lines
    assert any(line.startswith("1 job uses more memory than reserved") for line in told)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("user_job_memory_digest_default_value", 0),
        ("user_job_memory_digest_default_value", 1.5),
        ("user_job_memory_digest_lower_bound", 0),
        ("memory_reserve_factor", 2),
        ("user_job_resource_overdraft_memory_multiplier", 0.5),
        ("user_job_resource_overdraft_memory_multiplier", 11),
        ("ignore_memory_reserve_factor_less_than_one", 1),
    ],
)
def test_options_of_the_digest_have_bounds(option, value):
    with pytest.raises(CommandError, match=f"spec/tasks/t/{option}: expected"):
        read_spec({"tasks": {"t": {"command": "true", "job_count": 1, option: value}}}, dict)


def test_a_job_that_fits_by_its_reserve_is_not_told_to_be_too_large():
    world, _ = make(memory=300 * MIB)
    done = world.do(StartOperation({"tasks": {"t": {"command": "true", "job_count": 1, "memory_limit": LIMIT}}}), "u")
    assert done.warnings == ()
    world.settle_down()
    assert reserves(world, done.id) == [256.0]
    assert Task("t", 1, memory_limit=5, memory_reserve=2).resources[MEMORY] == 2.0
