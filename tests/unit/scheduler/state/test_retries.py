"""Retries by kind of failure in the state: who waits, who starts with how much memory, what survives (3.9)."""

from typing import Any

import pytest
from scheduler_world import GIB, World, assert_consistent

from cpumond.api.views import view_operation_details
from cpumond.core.measures import format_span
from cpumond.core.words import format_utc
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.operations import AbortJob

OOM = {"reason": "out of memory: it requested memory_limit = 1 bytes", "exit_code": 137, "start_time": 1.0}


@pytest.fixture
def world() -> World:
    world = World(pools=["p"])
    world.node("n1", cpu=2, memory=8 * GIB)
    return world


def start(world: World, *rules: str, jobs: int = 2, memory: int = GIB, task: Any = None, **spec: Any) -> str:
    """An operation of jobs of one core that all run, as many as there is room for."""
    policy = {"retry_policy": list(rules)} if rules else {}
    return world.run("p", jobs=jobs, memory=memory, task=task or {}, steps=4, **policy, **spec)


def running(world: World) -> dict[str, tuple[str, int]]:
    """Job on a node -> its cookie and the memory of its order."""
    return {
        job_id: (job.order.variables["YT_JOB_COOKIE"], job.order.memory_limit)
        for node in world.nodes.values()
        for job_id, job in node.jobs.items()
    }


def places(world: World) -> list[tuple[str, int]]:
    return sorted(running(world).values())


def fail(world: World, cookie: int, **facts: Any) -> None:
    """The job with a cookie fails, and what follows from it within some heartbeats of the same moment."""
    for node in world.nodes.values():
        for job_id in [name for name, job in node.jobs.items() if job.order.variables["YT_JOB_COOKIE"] == str(cookie)]:
            node.finish(job_id, "failed", **{"reason": "exit code 1", "exit_code": 1, "start_time": 1.0, **facts})
    world.settle_down(4)
    assert_consistent(world.state)


def after(world: World, seconds: float) -> list[tuple[str, int]]:
    world.after(seconds).settle_down(2)
    assert_consistent(world.state)
    return places(world)


def test_a_replacement_waits_keeps_its_cookie_and_no_other_job_takes_it(world):
    start(world, "exit:2,delay=100s", jobs=3)
    assert places(world) == [("0", GIB), ("1", GIB)]
    fail(world, 0)
    assert places(world) == [("1", GIB), ("2", GIB)], "who has not started yet has a cookie of its own"
    fail(world, 2)
    assert after(world, 40.0) == [("1", GIB)]
    assert after(world, 61.0) == [("0", GIB), ("1", GIB)]


def test_a_retry_that_a_rule_allows_does_not_count_and_its_wait_is_bounded(world):
    operation = start(world, "exit=3:4,delay=10s,delay_growth=3,max_delay=50s", jobs=1, max_failed_job_count=1)
    waits = []
    for _ in range(4):
        fail(world, 0, exit_code=3)
        (note,) = world.record(operation).retried.notes[-1:]
        waits.append(round(note.due - note.at))
        assert after(world, note.due - world.now + 0.5) == [("0", GIB)]
    record = world.record(operation)
    assert (waits, record.counts["t"].failed, record.uncounted_failures, note.left) == ([10, 30, 50, 50], 4, 4, 0)
    fail(world, 0, exit_code=3)
    record = world.record(operation)
    assert record.state == "failed"
    assert record.error.endswith(
        "; retry rule exit=3:4,delay=10s,delay_growth=3,max_delay=50s allows no more retries: "
        "the job was started again 4 of 4 times"
    )


@pytest.mark.parametrize(
    ("bound", "grown", "why"),
    [
        (None, [2, 4, 8], "the memory of the largest node that can hold it, 8 GiB"),
        (3 * GIB, [2, 3], 'max_retry_memory of pool "p"'),
    ],
)
def test_memory_grows_up_to_the_bound_and_never_beyond(world, bound, grown, why):
    world.set_pool("p", max_retry_memory=bound)
    operation = start(world, "oom:9,memory_growth=2", jobs=1, max_failed_job_count=1)
    seen = []
    while not world.record(operation).is_finished:
        fail(world, 0, **OOM)
        seen += [memory // GIB for _, memory in places(world)]
    assert seen == grown
    assert world.record(operation).error.endswith(f"a job cannot get more memory than {grown[-1] * GIB} bytes: {why}")


def test_only_the_job_that_ran_out_gets_more_and_others_do_not_wait(world):
    """The room of the whole node is free once both others have ended: the job that has to have it goes first."""
    start(world, "oom:2,memory_growth=7", jobs=4, memory=GIB + GIB // 4)
    fail(world, 0, **OOM)
    assert places(world) == [("1", GIB + GIB // 4), ("2", GIB + GIB // 4)]
    for kept in ([("0", 8 * GIB)], [("3", GIB + GIB // 4)]):
        for job_id in [*world.nodes["n1"].jobs]:
            world.nodes["n1"].finish(job_id)
        world.settle_down(4)
        assert places(world) == kept


@pytest.mark.parametrize("is_late", [False, True])
def test_a_wait_and_its_memory_survive_a_restart(world, is_late):
    operation = start(world, "oom:2,delay=100s,memory_growth=2", jobs=2)
    fail(world, 1, **OOM)
    world.after(120.0 if is_late else 0.0).restart()
    world.settle_down(4)
    assert_consistent(world.state)
    both = [("0", GIB), ("1", 2 * GIB)]
    assert places(world) == (both if is_late else both[:1])
    assert after(world, 120.0) == both
    world.restart(steps=2)
    assert places(world) == both
    fail(world, 1, **OOM)
    world.after(120.0).settle_down(2)
    assert places(world) == [both[0], ("1", 4 * GIB)], "it grows from what it had before the restart"
    assert world.record(operation).retried.places["t"][1].used == {"oom:2,delay=100s,memory_growth=2": 2}


def test_each_wait_is_listed_once_however_often_others_fail(world):
    operation = start(world, "exit=2:1,delay=7d", "exit:100", jobs=2)
    fail(world, 0, exit_code=2)
    for _ in range(5):
        fail(world, 1)
    assert world.state.retries == [(world.record(operation).retried.places["t"][0].due, operation)]


def test_a_rule_may_fail_the_operation_at_once(world):
    operation = start(world, "exit=2:fail", "exit:5")
    fail(world, 0, exit_code=2)
    record = world.record(operation)
    assert (record.state, record.failure and record.failure.code) == ("failed", 215)
    assert "ended (exit code 2), and retry rule exit=2:fail fails the operation at once" in record.error


def test_a_lost_job_waits_for_its_node_and_goes_on_when_it_comes_back(world):
    world.node("n2", cpu=1, memory=8 * GIB)
    start(world, "node_lost:2,delay=1h", jobs=3)
    (away,) = world.nodes["n2"].jobs
    kept = world.nodes.pop("n2")
    world.after(400.0).settle_down(3)
    assert len(running(world)) == 2, "its replacement waits"
    world.nodes["n2"] = kept
    kept.register()
    world.settle_down(3)
    assert away in running(world)
    assert_consistent(world.state)


def test_a_preempted_job_is_started_again_after_its_end_and_its_wait(world):
    world.set_tree(preemptive_scheduling_backoff=0, max_unpreemptible_running_job_count=0)
    operation = start(world, "preempted:1,delay=50s", jobs=2)
    world.create_pool("rich", strong_guarantee_resources={"cpu": 2})
    world.set_tree(fair_share_starvation_timeout=0)
    world.nodes["n1"].keeps_stopping = True
    other = world.run("rich", jobs=1, steps=4)
    (victim,) = world.nodes["n1"].stopping
    assert world.state.operations[operation].needed == {}, "it may still work"
    world.settle_down(2)
    world.nodes["n1"].let_go(victim, steps=2)
    assert [note.kind for note in world.record(operation).retried.notes] == ["preempted"]
    assert len(world.jobs_of(other)) == 1
    assert world.state.operations[operation].needed == {}
    world.after(51.0).settle_down(1)
    assert world.state.operations[operation].needed == {"t": 1}
    assert_consistent(world.state)


@pytest.mark.parametrize("spec", [{"is_gang": True}, {"task": {"gang_options": {}}}])
def test_a_gang_waits_as_a_whole_and_its_jobs_count_together(world, spec):
    operation = start(world, "oom:2,delay=30s,memory_growth=2", **spec)
    fail(world, 0, **OOM)
    assert places(world) == []
    assert after(world, 31.0) == [("0", 2 * GIB), ("1", 2 * GIB)]
    fail(world, 1, **OOM)
    assert after(world, 31.0) == [("0", 4 * GIB), ("1", 4 * GIB)]
    assert world.record(operation).retried.counts == {"oom:2,delay=30s,memory_growth=2": 2}
    assert world.record(operation).retried.notes[-1].left == 0


def test_a_task_wins_over_its_pool_and_without_a_policy_all_is_as_before(world):
    world.set_pool("p", retry_policy=["exit:1"])
    inherits = start(world, jobs=1, max_failed_job_count=1)
    fail(world, 0)
    assert world.record(inherits).uncounted_failures == 1
    fail(world, 0)
    own = start(world, jobs=1, task={"retry_policy": []}, max_failed_job_count=1)
    fail(world, 0)
    assert [world.record(each).state for each in (inherits, own)] == ["failed", "failed"]
    assert world.record(own).retried.notes == ()


def test_a_job_aborted_by_a_user_starts_again_at_once_with_its_memory(world):
    start(world, "oom:1,memory_growth=2", jobs=1)
    fail(world, 0, **OOM)
    (job,) = running(world)
    world.do(AbortJob(job))
    world.settle_down(4)
    assert places(world) == [("0", 2 * GIB)]
    assert job not in running(world)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"retry_policy": ["oom:3"], "fail_on_job_restart": True}, "fail_on_job_restart no job of the task is ever"),
        ({"retry_policy": ["preempted:3"], "is_gang": True}, "leave the kind preempted out"),
        ({"retry_policy": "oom:3"}, "expected a list, got text"),
    ],
)
def test_a_policy_that_could_not_be_honoured_is_refused(world, spec, sentence):
    with pytest.raises(CommandError, match=f"^spec/retry_policy: .*{sentence}"):
        start(world, **spec)
    with pytest.raises(CommandError, match=r"^pool \"p\": retry_policy: rule 'oom': expected a number of restarts"):
        world.set_pool("p", retry_policy=["oom"])


def test_it_is_said_what_waits_how_long_and_because_of_which_rule(world):
    operation = start(world, "exit:2,delay=100s", jobs=2)
    fail(world, 0)
    fail(world, 1)
    live = world.state.operations[operation]
    first, now = min(note.due for note in live.record.retried.notes), world.now
    answer = explain_operation(world.state, live.record, now, {})
    assert (
        f"2 jobs wait until {format_utc(first)} (for {format_span(first - now)} more) or later because of retry "
        "rule exit:2,delay=100s"
    ) in answer.lines
    assert answer.lines[0].endswith(
        "; why it waits: its jobs have failed and wait for the delay that their retry rules set"
    )
    assert "all of its jobs are started" not in answer.trees[0].lines
    shown = view_operation_details(Rights(world.state, User("root", admin=True)), live.record, now)
    assert (shown.next_retry, shown.jobs.pending, len(shown.retried)) == (first, 2, 2)
    assert shown.retried[0].endswith(
        '(task "t", cookie 0): exit code 1; rule exit:2,delay=100s started it again '
        f"at {format_utc(first)}, 1 retry left"
    )
