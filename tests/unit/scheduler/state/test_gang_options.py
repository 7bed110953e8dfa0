"""Operations with ``gang_options``: ranks, incarnations, all jobs start again together (7.5)."""

from typing import Any

import pytest
from scheduler_world import World, make_task

from cpumond.scheduler.model import CommandError
from cpumond.scheduler.settings.operations import AbortJob
from cpumond.scheduler.state.node_commands import CordonNode


def task(jobs: int, gang: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return make_task(jobs, **({} if gang is None else {"gang_options": gang}), **options)


def start(world: World, spec: dict[str, Any] | None = None, **tasks: dict[str, Any]) -> str:
    return world.start("p", tasks=tasks, **(spec or {}))


def run(world: World, jobs: int = 3, gang: dict[str, Any] | None = None, **spec: Any) -> str:
    """A gang of one task, one job on each of so many nodes, which all run."""
    world.add_nodes(jobs, cpu=1)
    operation = start(world, spec, t=task(jobs, {} if gang is None else gang))
    world.settle_down(4)
    assert len(world.jobs_of(operation)) == jobs
    return operation


def played(world: World, operation: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Job that runs -> its node and the variables of its environment."""
    return {
        job_id: (node.id, job.order.variables)
        for node in world.nodes.values()
        for job_id, job in node.jobs.items()
        if job.order.operation_id == operation
    }


def ranks(world: World, operation: str) -> dict[str, str]:
    """Node -> rank of the job that runs there, "" for none."""
    return {node: told.get("YT_GANG_RANK", "") for node, told in played(world, operation).values()}


def places(world: World, operation: str) -> dict[str, tuple[str, str]]:
    """Node -> cookie and rank of the job that runs there."""
    found = played(world, operation).values()
    return {node: (told["YT_JOB_COOKIE"], told.get("YT_GANG_RANK", "")) for node, told in found}


def abort(world: World, node: str, steps: int = 5) -> str:
    (job,) = world.state.nodes[node].jobs
    world.do(AbortJob(job))
    world.settle_down(steps)
    return job


def finish(world: World, node: str, state: Any = "completed", **facts: Any) -> None:
    (job,) = world.nodes[node].jobs
    world.nodes[node].finish(job, state, **facts)


def reasons(world: World, operation: str) -> list[str]:
    """Why each incarnation began, the first left out."""
    return [each.reason for each in world.record(operation).incarnations[1:]]


@pytest.mark.parametrize(
    ("root", "tasks", "named"),
    [
        ({}, {"t": task(2, {"size": 3})}, "spec/tasks/t/gang_options/size"),
        ({}, {"t": task(2, {"size": 0})}, "spec/tasks/t/gang_options/size"),
        ({}, {"t": task(2, {"sise": 1})}, "spec/tasks/t/gang_options/sise"),
        ({"fail_on_job_restart": True}, {"t": task(2, {})}, "spec/fail_on_job_restart"),
        ({}, {"a": task(1, fail_on_job_restart=True), "t": task(2, {})}, "spec/tasks/a/fail_on_job_restart"),
        ({}, {"t": task(2, {}, restart_completed_jobs=True)}, "spec/tasks/t/restart_completed_jobs"),
        ({}, {"a": task(1, collective_options={"size": 2}), "t": task(2, {})}, "spec/tasks/a/collective_options"),
        ({}, {"a": task(1, output_table_paths=["//t"]), "t": task(2, {})}, "spec/tasks/a/output_table_paths"),
    ],
)
def test_gang_1_what_contradicts_a_gang_is_refused(world, root, tasks, named):
    with pytest.raises(CommandError, match=named):
        start(world, root, **tasks)
    assert world.state.operations == {}


def test_gang_2_the_variables_of_two_tasks(world, node):
    operation = start(world, a=task(2, {"size": 1}), b=task(1, {}))
    world.settle_down()
    jobs = [told for _, told in played(world, operation).values()]
    assert [(told["YT_GANG_SIZE"], told["YT_JOB_COUNT"]) for told in jobs] == [("2", "3")] * 3
    assert [(told["YT_TASK_JOB_COUNT"], told["YT_TASK_GANG_SIZE"]) for told in jobs[:2]] == [("2", "1")] * 2
    assert {told.get("YT_TASK_GANG_RANK") for told in jobs[:2]} == {"0", None}
    assert jobs[2]["YT_GANG_RANK"] == "0"
    assert {told["YT_OPERATION_INCARNATION"] for told in jobs} == {world.record(operation).incarnation}


def test_an_operation_without_gang_options_has_no_variables_of_a_gang(world, node):
    ((_, told),) = played(world, world.run("p")).values()
    assert not [name for name in told if "GANG" in name or "INCARNATION" in name or name == "YT_JOB_COUNT"]


def test_gang_3_one_is_aborted_and_all_start_again_where_they_were(world):
    operation = run(world)
    before, first = places(world, operation), world.record(operation).incarnation
    old = set(played(world, operation))
    assert sorted(before.values()) == [("0", "0"), ("1", "1"), ("2", "2")]
    aborted = abort(world, "n1")
    after = places(world, operation)
    assert sorted(after.values()) == sorted(before.values())
    assert {node for node in before if after[node] == before[node]} >= {"n0", "n2"}
    assert not old & set(played(world, operation))
    assert world.record(operation).incarnation != first
    ended = world.state.finished_jobs[operation].values()
    assert sorted((job.id == aborted, job.state) for job in ended) == [(False, "aborted")] * 2 + [(True, "aborted")]
    assert world.job_counts(operation).aborted == 3
    assert world.record(operation).aborted_for == {"user_request": 1, "operation_incarnation_changed": 2}
    assert reasons(world, operation) == ["job_aborted"]
    assert world.record(operation).incarnations[-1].job_id == aborted


def test_gang_4_what_is_completed_starts_again_too(world):
    operation = run(world)
    finish(world, "n0")
    finish(world, "n2")
    world.settle_down()
    assert world.job_counts(operation).completed == 2
    abort(world, "n1")
    assert sorted(places(world, operation).values()) == [("0", "0"), ("1", "1"), ("2", "2")]
    counts = world.job_counts(operation)
    assert (counts.completed, counts.lost, counts.aborted) == (0, 2, 1)
    for node in ("n0", "n1", "n2"):
        finish(world, node)
    world.settle_down()
    assert world.states([operation]) == "c"


def test_gang_5_the_operation_completes_with_its_ranked_jobs(world):
    operation = run(world, gang={"size": 2})
    before = ranks(world, operation)
    assert sorted(before.values()) == ["", "0", "1"]
    for node, rank in before.items():
        if rank:
            finish(world, node)
    world.settle_down()
    assert world.states([operation]) == "c"
    assert world.job_counts(operation).aborted == 1
    assert played(world, operation) == {}


@pytest.mark.parametrize("how", ["failed", "aborted"])
def test_gang_5_a_job_without_rank_starts_again_alone(world, how):
    operation = run(world, gang={"size": 2})
    incarnation, before = world.record(operation).incarnation, played(world, operation)
    (spare,) = (node for node, rank in ranks(world, operation).items() if not rank)
    if how == "failed":
        finish(world, spare, "failed")
        world.settle_down(5)
    else:
        abort(world, spare)
    assert world.record(operation).incarnation == incarnation
    assert len(set(before) & set(played(world, operation))) == 2
    assert sorted(ranks(world, operation).values()) == ["", "0", "1"]
    assert getattr(world.job_counts(operation), how) == 1


def test_gang_6_the_node_of_the_job_without_rank_takes_the_free_rank(world):
    operation = run(world, gang={"size": 2})
    before = ranks(world, operation)
    (spare,) = (node for node, rank in before.items() if not rank)
    victim, other = (node for node, rank in before.items() if rank)
    new = world.node("n9", cpu=1)
    world.do(CordonNode(victim))
    abort(world, victim)
    assert ranks(world, operation) == {spare: before[victim], other: before[other], new.id: ""}


def test_gang_7_only_the_end_of_a_task_with_gang_options_restarts_all(world):
    world.node("n1", cpu=1), world.node("n2", cpu=1)
    operation = start(world, a=task(1), b=task(1, {}))
    world.settle_down(4)
    node_of = {job.task.name: job.node.id for job in world.jobs_of(operation)}
    first, before = world.record(operation).incarnation, set(played(world, operation))
    abort(world, node_of["a"])
    assert world.record(operation).incarnation == first
    assert len(before & set(played(world, operation))) == 1
    assert set(ranks(world, operation).values()) == {"0"}
    node_of = {job.task.name: job.node.id for job in world.jobs_of(operation)}
    before = set(played(world, operation))
    abort(world, node_of["b"])
    assert world.record(operation).incarnation != first
    assert len(played(world, operation)) == 2
    assert not before & set(played(world, operation))


def test_gang_8_one_failure_counts_once(world):
    operation = run(world, max_failed_job_count=2)
    finish(world, "n1", "failed", exit_code=1)
    world.settle_down(5)
    counts = world.job_counts(operation)
    assert (counts.failed, counts.aborted) == (1, 2)
    assert (len(played(world, operation)), reasons(world, operation)) == (3, ["job_failed"])
    finish(world, "n0", "failed", exit_code=1)
    world.settle_down()
    assert world.states([operation]) == "f"
    assert reasons(world, operation) == ["job_failed"]


def test_gang_9_a_restart_of_the_scheduler_while_all_run_changes_nothing(world):
    operation = run(world)
    before, first = played(world, operation), world.record(operation).incarnation
    world.restart(4, registers=True)
    assert played(world, operation) == before
    assert (world.record(operation).incarnation, reasons(world, operation)) == (first, [])
    assert sorted(job.gang_rank for job in world.jobs_of(operation)) == [0, 1, 2]


@pytest.mark.parametrize("missing", ["not started", "completed"])
def test_gang_9_a_restart_without_all_of_them_begins_anew(world, missing):
    if missing == "completed":
        operation = run(world)
        finish(world, "n1")
        world.settle_down()
    else:
        world.node("n0", cpu=1), world.node("n1", cpu=1)
        operation = start(world, t=task(3, {}))
        world.settle_down(4)
        world.node("n2", cpu=1)
    assert len(world.jobs_of(operation)) == 2
    before, first = set(played(world, operation)), world.record(operation).incarnation
    world.restart(6, registers=True)
    assert reasons(world, operation) == ["job_lack_after_revival"]
    told = world.record(operation).incarnations[-1]
    assert (told.task, told.expected, told.actual) == ("t", 3, 2)
    assert world.record(operation).incarnation != first
    assert not before & set(played(world, operation))
    assert sorted(ranks(world, operation).values()) == ["0", "1", "2"]


def test_gang_10_is_gang_starts_them_at_once_and_one_loss_is_one_switch(world):
    """Two jobs are aborted, not three as in YTsaurus: of a gang that is placed whole none is scheduled meanwhile."""
    world.set_tree(preemptive_scheduling_backoff=0, max_unpreemptible_running_job_count=0)
    world.create_pool("strong", strong_guarantee_resources={"cpu": 2})
    operation = run(world, jobs=2, is_gang=True)
    world.set_tree(fair_share_starvation_timeout=0)
    world.run("strong", jobs=2, steps=12)
    assert reasons(world, operation) == ["job_aborted"]
    assert world.job_counts(operation).aborted == 2
    assert world.jobs_of(operation) == []


def test_no_job_of_an_incarnation_is_ordered_before_the_last_has_ended(world):
    operation = run(world)
    world.nodes["n2"].keeps_stopping = True
    abort(world, "n1", steps=3)
    for _ in range(40):
        world.step(10.0)
        (late,) = played(world, operation).values()
        assert late[0] == "n2"
    assert len(world.jobs_of(operation)) == 3
    (job,) = world.nodes["n2"].jobs
    world.restart(4, registers=True)
    assert set(played(world, operation)) == {job}, "nor after a restart of the scheduler"
    world.nodes["n2"].keeps_stopping = False
    world.nodes["n2"].let_go(job, steps=4)
    assert sorted(ranks(world, operation).values()) == ["0", "1", "2"]


def test_a_room_that_cannot_be_kept_is_found_elsewhere(world):
    operation = run(world)
    world.do(CordonNode("n0"))
    world.node("n3", cpu=1)
    abort(world, "n1", steps=6)
    assert sorted(ranks(world, operation)) == ["n1", "n2", "n3"]
    assert sorted(ranks(world, operation).values()) == ["0", "1", "2"]


def test_only_so_many_incarnations_are_remembered(world):
    operation = run(world, jobs=1, max_failed_job_count=1000)
    first = world.record(operation).incarnations[0]
    for _ in range(60):
        finish(world, "n0", "failed")
        world.settle_down(2)
    told = world.record(operation).incarnations
    assert (len(told), told[0], told[-1].id) == (50, first, world.record(operation).incarnation)
