"""What is told of an operation with ``gang_options``: to users, to ``yt``, to Prometheus (7.5)."""

from typing import Any

from scheduler_world import World

from cpumond.api.views import view_operation_details
from cpumond.api.yt.jobs import job_info
from cpumond.api.yt.orchid import view_incarnation
from cpumond.cli.scheduler.operations import _format_incarnation
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.settings.operations import StartOperation


def run(world: World, jobs: int = 2, **gang: Any) -> str:
    """A gang with one job on each of so many nodes."""
    world.add_nodes(jobs, cpu=1)
    task = {"command": "true", "job_count": jobs, "memory_limit": 0, "gang_options": gang}
    operation = world.do(StartOperation({"tasks": {"t": task}})).id
    world.settle_down(4)
    return operation


def fail(world: World, node: str) -> str:
    (job,) = world.nodes[node].jobs
    world.nodes[node].finish(job, "failed", exit_code=3, reason="exit code 3")
    return job


def test_gang_3_jobs_and_events_have_what_yt_shows(world: World) -> None:
    operation = run(world, size=1)
    first = world.record(operation).incarnation
    infos = [job_info(job, world.record(operation), "n") for job in world.jobs_of(operation)]
    told = [(each["job_cookie"], each.get("gang_rank"), each["operation_incarnation"]) for each in infos]
    assert told == [(0, 0, first), (1, None, first)]
    (ranked,) = (job.node.id for job in world.jobs_of(operation) if job.gang_rank == 0)
    job = fail(world, ranked)
    world.settle_down(4)
    begun, switched = map(view_incarnation, world.record(operation).incarnations)
    assert (begun["event_type"], begun["incarnation"]) == ("incarnation_started", first)
    assert "incarnation_switch_reason" not in begun
    assert switched["incarnation"] == world.record(operation).incarnation != first
    assert switched["incarnation_switch_reason"] == "job_failed"
    info = switched["incarnation_switch_info"]
    assert (info["trigger_job_id"], info["trigger_job_error"]["code"]) == (job, 1205)
    ended = world.state.finished_jobs[operation][job]
    assert job_info(ended, world.record(operation), "n")["operation_incarnation"] == first
    assert (world.state.gangs.started_count, world.state.gangs.switches) == (1, {"job_failed": 1})


def test_gang_9_a_switch_after_a_restart_says_what_was_missing(world: World) -> None:
    operation = run(world)
    (job,) = world.nodes["n0"].jobs
    world.nodes["n0"].finish(job, steps=3)
    world.restart(4, registers=True)
    event = view_incarnation(world.record(operation).incarnations[-1])
    assert event["incarnation_switch_reason"] == "job_lack_after_revival"
    assert event["incarnation_switch_info"] == {"expected_job_count": 2, "actual_job_count": 1, "task_name": "t"}


def test_why_and_show_tell_of_an_operation_between_incarnations(world: World) -> None:
    operation = run(world, jobs=3)
    world.nodes["n2"].keeps_stopping = True
    job = fail(world, "n0")
    world.settle_down()
    answer = explain_operation(world.state, world.record(operation), world.now, {})
    told = "\n".join(answer.lines)
    assert f"all of its jobs were restarted 2 s ago: job {job} failed" in told
    assert 'none of them starts before 1 job of the previous incarnation on "n2" has ended' in told
    details = view_operation_details(world.rights, world.record(operation), world.now)
    assert f"job {job} failed: User job failed" in _format_incarnation(details.incarnations)
    world.nodes["n2"].let_go(next(iter(world.nodes["n2"].jobs)), steps=3)
    answer = explain_operation(world.state, world.record(operation), world.now, {})
    assert "none of them starts" not in "\n".join(answer.lines)
