"""What a job's end without its work done makes of its operation (semantics.md 3.6)."""

import subprocess
from typing import Any

import pytest
from scheduler_world import PlayedNode, World, make_task

from cpumond.api.updated_tree import look_once
from cpumond.api.yt.lazy import materialise
from cpumond.api.yt.orchid import operation_info
from cpumond.core.wire import AgentAbout, StopOrder
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.model import JobCounts
from cpumond.scheduler.settings.operations import AbandonJob, AbortJob, StartOperation
from cpumond.scheduler.state import install


def job_of(world: World, operation: str, name: str = "t") -> str:
    return next(job.id for job in world.jobs_of(operation) if job.task.name == name)


def end(world: World, node: PlayedNode, job: str, state: Any = "failed", **facts: Any) -> None:
    node.finish(job, state, start_time=world.now - 1.0, steps=3, **facts)


def error_of(world: World, operation: str) -> dict[str, Any]:
    return materialise(operation_info(world.rights, world.record(operation), look_once({})))["result"]["error"]


def lines_of(world: World, operation: str) -> str:
    return "\n".join(explain_operation(world.state, world.record(operation), world.now, {}).lines)


def test_fojr_1_a_failed_job_fails_one_whose_jobs_must_not_run_twice(world, node):
    operation = world.run(tasks={"a": make_task(), "b": make_task()}, fail_on_job_restart=True, max_failed_job_count=9)
    job = job_of(world, operation, "a")
    assert len(node.jobs) == 2
    end(world, node, job, exit_code=1, reason="exit code 1")
    record = world.record(operation)
    assert (record.state, node.jobs) == ("failed", {})
    assert (record.counts["a"], record.counts["b"]) == (JobCounts(failed=1), JobCounts(aborted=1))
    error = error_of(world, operation)
    assert (error["code"], error["attributes"]) == (210, {"reason": "job_failed", "job_id": job})
    assert error["inner_errors"][0]["code"] == 1205
    assert record.error.endswith(f"job {job} failed: exit code 1")


@pytest.mark.parametrize(("name", "state"), [("a", "completed"), ("b", "failed")])
def test_fojr_2_only_tasks_that_say_so_must_not_run_twice(world, node, name, state):
    tasks = {"a": make_task(), "b": make_task(fail_on_job_restart=True)}
    operation = world.run("p", tasks=tasks, max_failed_job_count=2)
    end(world, node, job_of(world, operation, name))
    while node.jobs:
        end(world, node, next(iter(node.jobs)), "completed")
    assert world.record(operation).state == state


def preempt(world: World, node: PlayedNode) -> None:
    """A starving operation takes the room of another."""
    world.create_pool("q", strong_guarantee_resources={"cpu": node.cpu})
    world.start("q", jobs=int(node.cpu))
    world.settle_down(12, 6.0)


def test_fojr_3_a_preempted_job_fails_its_operation_and_is_not_restarted(world):
    node, operation, job = interrupt(world, fail_on_job_restart=True)
    node.keeps_stopping = True
    assert node.stopping[job].why.endswith(
        "; its operation fails unless the job completes in its time (fail_on_job_restart)"
    )
    world.node("n2")
    world.settle_down()
    assert (world.operation(operation).needed, world.jobs_of(operation)) == ({}, [])
    assert world.record(operation).state == "running"
    node.let_go(job, start_time=world.now - 20.0, steps=3)
    error = error_of(world, operation)
    assert error["code"] == 210
    assert error["attributes"] == {"reason": "job_aborted", "job_id": job, "job_abort_reason": "preemption"}


def test_fojr_3_one_preempted_before_it_began_does_not_fail_its_operation(world):
    node = world.node("n1", cpu=2.0)
    world.set_tree(max_unpreemptible_running_job_count=0, fair_share_starvation_timeout=1000)
    node.has_no_room = True
    operation = world.run("p", fail_on_job_restart=True)
    assert len(node.waiting) == 1
    world.create_pool("q", strong_guarantee_resources={"cpu": 2})
    world.start("q", jobs=2)
    world.settle_down(4, 6.0)
    assert world.record(operation).state == "running"
    assert world.job_counts(operation) == JobCounts(aborted=1)
    assert world.operation(operation).needed == {"t": 1}
    world.restart(steps=3)
    assert world.record(operation).state == "running"


def test_fojr_3_one_aborted_by_a_user_fails_its_operation_an_abandoned_not(world, node):
    aborted = world.run("p", jobs=2, fail_on_job_restart=True)
    job, other = (job.id for job in world.jobs_of(aborted))
    world.do(AbortJob(job), "ann")
    world.settle_down()
    error = error_of(world, aborted)
    assert error["attributes"] == {"reason": "job_aborted", "job_id": job, "job_abort_reason": "user_request"}
    assert error["inner_errors"][0]["message"] == f"aborted: user ann aborted job {job}"
    assert (world.job_counts(aborted), other in node.jobs) == (JobCounts(aborted=2), False)
    abandoned = world.run("p", jobs=2, fail_on_job_restart=True)
    job, other = (job.id for job in world.jobs_of(abandoned))
    world.do(AbandonJob(job))
    world.settle_down()
    assert (world.record(abandoned).state, list(node.jobs)) == ("running", [other])
    end(world, node, other, "completed")
    assert world.record(abandoned).state == "completed"


@pytest.mark.parametrize("reported", [True, False])
def test_a_lost_node_fails_an_operation_whose_job_it_was_told_of(world, node, reported):
    operation = world.start("p", fail_on_job_restart=True)
    world.step()
    if reported:
        world.settle_down()
    del world.nodes["n1"]
    world.settle_down(10, 60.0)
    attributes = error_of(world, operation)["attributes"]
    assert (attributes["reason"], attributes["job_abort_reason"]) == ("job_aborted", "node_offline")


def test_a_job_that_may_have_begun_fails_its_operation(world, node):
    operation = world.start("p", fail_on_job_restart=True)
    world.step()
    node.finish(next(iter(node.jobs)), "lost", steps=3)
    assert error_of(world, operation)["code"] == 210


def test_a_job_that_its_node_stops_is_not_started_again_by_the_next_run(world, node):
    operation = world.run("p", fail_on_job_restart=True)
    (job,) = node.jobs
    node.stopping[job] = StopOrder(job, 10.0, "resource_overdraft", "resource_overdraft: too much memory")
    world.restart(steps=3)
    assert [each.id for each in world.jobs_of(operation)] == list(node.jobs) == [job]
    node.let_go(job, start_time=world.now - 9.0, steps=3)
    assert error_of(world, operation)["attributes"]["job_abort_reason"] == "resource_overdraft"


def test_fojr_4_a_restart_fails_an_operation_that_is_half_begun(world):
    node = world.node("n1", cpu=5.0)
    operation = world.run("p", jobs=7, fail_on_job_restart=True)
    end(world, node, job_of(world, operation), "completed")
    assert len(node.jobs) == 5
    world.restart(steps=3)
    error = error_of(world, operation)
    assert (error["code"], error["attributes"]) == (210, {"reason": "job_count_mismatch_after_revival"})
    assert "1 job had not been started" in error["message"]
    assert (world.job_counts(operation), node.jobs) == (JobCounts(completed=1, aborted=5), {})


def test_its_jobs_are_preempted_after_others_that_are_protected_alike(world):
    world.node("n1", cpu=6.0)
    world.set_tree(max_unpreemptible_running_job_count=0)
    other = world.run("p", jobs=3)
    careful = world.run("p", jobs=3, fail_on_job_restart=True)  # the last to start would be the first to go
    world.create_pool("q", strong_guarantee_resources={"cpu": 2})
    starving = world.start("q", jobs=2)
    for _ in range(12):
        if not world.jobs_of(starving):
            world.step(6.0)
    assert [len(world.jobs_of(each)) for each in (other, careful, starving)] == [2, 3, 1]


def test_jobs_above_a_lowered_limit_go_before_those_that_fail_an_operation(world):
    world.node("n1", cpu=4.0)
    other = world.run("p")
    careful = world.run("p", fail_on_job_restart=True)
    world.set_pool("p", resource_limits={"cpu": 1})
    world.settle_down(3, 6.0)
    assert (len(world.jobs_of(other)), world.record(careful).state) == (0, "running")


def test_why_says_that_a_preemption_would_fail_it(world, node):
    every = world.run("p", tasks={"a": make_task(), "b": make_task()}, fail_on_job_restart=True)
    one = world.run("p", tasks={"a": make_task(), "b": make_task(fail_on_job_restart=True)})
    assert "it fails if one of its jobs is preempted, aborted or lost (fail_on_job_restart)" in lines_of(world, every)
    assert "it fails if a job of task 'b' is preempted, aborted or lost" in lines_of(world, one).replace('"', "'")
    assert "fail_on_job_restart" not in lines_of(world, world.run("p"))


def test_susp_1_an_operation_is_suspended_by_a_failed_job_until_resumed(world, node):
    operation = world.run("p", jobs=2, suspend_on_job_failure=True)
    end(world, node, job_of(world, operation), exit_code=1, reason="exit code 1; stderr: boom")
    record = world.record(operation)
    assert (record.state, record.suspended, world.job_counts(operation)) == ("running", True, JobCounts(failed=1))
    info = materialise(operation_info(world.rights, record, look_once({})))
    assert info["suspended"] is True
    assert info["alerts"]["operation_suspended"]["inner_errors"][0]["code"] == 1205
    assert "it is suspended because a job failed, exit code 1; stderr: boom:" in lines_of(world, operation)
    world.settle_down(10)
    assert len(node.jobs) == 1  # the other one goes on
    world.restart()
    world.resume(operation)
    world.settle_down()
    assert world.record(operation).suspended_for is None
    assert len(node.jobs) == 2
    end(world, node, next(iter(node.jobs)))
    assert (world.record(operation).suspended, world.job_counts(operation).failed) == (True, 2)


def test_the_last_allowed_failure_fails_an_operation_rather_than_suspend(world, node):
    operation = world.run("p", suspend_on_job_failure=True, max_failed_job_count=1)
    end(world, node, job_of(world, operation))
    assert (world.record(operation).state, error_of(world, operation)["code"]) == ("failed", 215)


def test_rcj_1_completed_jobs_start_again_until_the_operation_is_ended(world, node):
    operation = world.run("p", task={"restart_completed_jobs": True})
    for number in range(1, 4):
        end(world, node, job_of(world, operation), "completed")
        assert world.job_counts(operation) == JobCounts(lost=number)
    assert (world.record(operation).state, len(node.jobs)) == ("running", 1)
    world.restart(steps=3)
    assert {job.state for job in world.state.finished_jobs[operation].values()} == {"completed"}
    world.complete(operation)
    world.settle_down()
    assert (world.record(operation).state, node.jobs) == ("completed", {})


def test_jobs_that_start_for_ever_are_forgotten_in_the_end(world, monkeypatch):
    monkeypatch.setattr(install, "MAX_RESTARTED_JOBS", 3)
    node = world.node("n1")
    operation = world.run("p", task={"restart_completed_jobs": True})
    ended = []
    for number in range(8):
        ended.append(job_of(world, operation))
        end(world, node, ended[-1], "completed")
        if number == 4:
            world.restart(steps=3)
    assert list(world.state.finished_jobs[operation]) == ended[-3:]
    assert [key for kind, key in world.stored if kind == "job"] == ended[-3:]


SIGNAL = {"interruption_signal": "SIGINT", "restart_exit_code": 17}


def interrupt(world: World, **spec: Any) -> tuple[PlayedNode, str, str]:
    """Have the only job of an operation stop for one of another pool; it does not, yet. Node, operation, job."""
    node = world.node("n1", cpu=2.0)
    world.set_tree(max_unpreemptible_running_job_count=0)
    operation = world.run("p", **spec)
    job = job_of(world, operation)
    node.keeps_stopping = True
    preempt(world, node)
    assert list(node.stopping) == [job]
    node.keeps_stopping = False
    return node, operation, job


@pytest.mark.parametrize("told", ["failed", "aborted"])  # aborted: by an agent that does not know the signal
def test_int_1_one_that_ends_with_its_restart_exit_code_is_lost(world, told):
    node, operation, job = interrupt(world, task=SIGNAL, max_failed_job_count=1)
    node.let_go(job, told, exit_code=17, reason="exit code 17")
    world.node("n2")
    world.settle_down()
    assert (world.job_counts(operation), len(world.jobs_of(operation))) == (JobCounts(lost=1), 1)
    record = world.state.finished_jobs[operation][job]
    assert (record.state, record.exit_code, record.failure) == ("completed", 17, None)
    assert record.reason == "exit code 17 is its restart_exit_code: its work is started again"


def test_a_restart_exit_code_needs_no_interruption(world, node):
    operation = world.run("p", task={"restart_exit_code": 17}, max_failed_job_count=1, fail_on_job_restart=True)
    end(world, node, job_of(world, operation), exit_code=17)
    assert (world.record(operation).state, world.job_counts(operation)) == ("running", JobCounts(lost=1))
    end(world, node, job_of(world, operation), exit_code=16)
    assert world.record(operation).state == "failed"


def test_a_restart_exit_code_counts_of_a_job_that_ended_before_adoption(world, node):
    operation = world.run("p", task={"restart_exit_code": 17}, max_failed_job_count=1)
    job = job_of(world, operation)
    world.forget_starts()
    world.restart()
    node.finish(job, "failed", exit_code=17, start_time=world.now - 1.0, steps=3)
    assert (world.record(operation).state, world.job_counts(operation)) == ("running", JobCounts(lost=1))


@pytest.mark.parametrize(
    ("told", "code", "counts"),
    [
        ("completed", 0, JobCounts(completed=1)),
        ("failed", 3, JobCounts(failed=1)),
        ("aborted", 137, JobCounts(aborted=1)),
    ],
)
def test_int_2_a_job_that_is_interrupted_by_its_signal_ends_as_it_says(world, told, code, counts):
    node, operation, job = interrupt(world, task=SIGNAL)
    node.let_go(job, told, exit_code=code, steps=3)
    assert world.job_counts(operation) == counts
    assert world.record(operation).is_finished == (code == 0)


@pytest.mark.parametrize("more", [{}, {"interruptible": True}])
def test_a_job_without_a_signal_of_its_own_is_aborted_with_any_exit_code(world, more):
    node, operation, job = interrupt(world, task=more)
    node.let_go(job, "failed", exit_code=3, steps=3)
    assert world.job_counts(operation) == JobCounts(aborted=1)


def test_a_gang_restarts_as_a_whole_when_a_job_asks_to_be_restarted(world, node):
    operation = world.run("p", jobs=2, task={"restart_exit_code": 17}, is_gang=True)
    before = set(node.jobs)
    end(world, node, job_of(world, operation), exit_code=17)
    world.settle_down()
    assert not before & set(node.jobs)
    assert (world.job_counts(operation), len(node.jobs)) == (JobCounts(lost=1, aborted=1), 2)


def test_a_completed_job_of_a_gang_starts_again_alone(world, node):
    operation = world.run("p", jobs=2, task={"restart_completed_jobs": True}, is_gang=True)
    first, second = node.jobs
    end(world, node, first, "completed")
    assert (len(node.jobs), second in node.jobs) == (2, True)
    assert world.job_counts(operation) == JobCounts(lost=1)


def test_an_order_has_the_signal_of_its_job_and_the_bound_of_stderr(world, node):
    world.run("p", task={**SIGNAL, "signal_root_process_only": True, "max_stderr_size": 100})
    [job] = node.jobs.values()
    order = job.order
    assert (order.interruption_signal, order.signal_root_process_only, order.interruptible) == ("SIGINT", True, True)
    assert order.max_stderr_bytes == 100


@pytest.mark.parametrize("command", ["echo y; echo x >&2", ["sh", "-c", "echo $1; echo x >&2", "-", "y"]])
def test_what_a_job_writes_to_stdout_is_in_its_stderr(world, node, command):
    world.run("p", task={"redirect_stdout_to_stderr": True, "command": command})
    [job] = node.jobs.values()
    ordered = job.order.command if isinstance(command, list) else ["sh", "-c", job.order.command]
    done = subprocess.run(ordered, capture_output=True, check=True, text=True)
    assert (done.stdout, done.stderr) == ("", "y\nx\n")


def test_a_task_that_wants_more_of_stderr_than_nodes_keep_is_warned_of(world, node):
    world.state.nodes["n1"].about = AgentAbout("0.3", "quota", "quota", max_log_bytes=1000)
    for size, count in ((1000, 0), (1001, 1)):
        command = StartOperation({"pool": "p", "tasks": {"t": make_task(max_stderr_size=size)}})
        told = [each for each in world.do(command).warnings if "stderr" in each]
        assert len(told) == count
    assert "of 1001 bytes the last 1000 are kept on some nodes" in told[0]
