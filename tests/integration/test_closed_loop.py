"""The closed loop: CPU that a job ordered and does not use runs another job, and comes back when it is wanted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from closed_loop import WAIT_S, WORKER, CpuMeter, Loop
from waiting import SLOWNESS

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup

CHECK_S = 0.25 * SLOWNESS
FLOOR = 0.2
DECREASE = 0.8
MONITOR = f"{{enable_cpu_reclaim=%true;min_cpu_limit={FLOOR};decrease_coefficient={DECREASE};smoothing_factor=0.3}}"
BURST = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(1000)"
KEPT = "{enable_cpu_reclaim=%false}"
OVERCOMMIT_S = 2.0


@pytest.fixture
def loop(request: pytest.FixtureRequest, tmp_path: Path, hierarchies: Hierarchies) -> Iterator[Loop]:
    """A node of 1 core, or of as many as the test says; less than half a core that is free is offered no work."""
    config = (
        f'allowed_node_resources_overcommit_duration = "{OVERCOMMIT_S}s"\n'
        "[min_spare_job_resources_on_node]\ncpu = 0.5\nmemory = 268435456\n"
    )
    period, cores = f"{CHECK_S:g}s", getattr(request, "param", 1.0)
    with Loop(
        tmp_path, hierarchies, cpu=cores, memory=4 * 2**30, check_period=period, scheduler_config=config
    ) as cluster:
        yield cluster
    assert cluster.leftovers() == []


def count_checks_down_to(goal_cores: float, usage_cores: float, hard_cores: float) -> int:
    """The check after which the documents' rule has lowered the limit to ``goal_cores`` (semantics.md 1.3, 1.4)."""
    smoothed = limit = hard_cores
    window: list[float] = []
    for number in range(2, 1000):
        smoothed = smoothed if number == 2 else 0.3 * usage_cores + 0.7 * smoothed
        window = [*window, smoothed][-5:]
        votes = [-1 if value < 0.6 * limit else int(value > 0.9 * limit) for value in window]
        if len(votes) == 5 and sum(votes) < -3:
            limit = max(limit * DECREASE, FLOOR)
        if limit <= goal_cores:
            return number
    raise AssertionError


def read_pool_counters(loop: Loop) -> dict[str, float]:
    """The Prometheus counter of CPU time, by pool."""
    with httpx2.Client(trust_env=False, verify=False, timeout=60.0) as client:
        text = client.get(f"{loop.url}/metrics").text
    name = "cpumond_pool_cpu_usage_seconds_total{"
    found = {}
    for line in text.splitlines():
        if line.startswith(name):
            labels, _, value = line.removeprefix(name).rpartition("} ")
            if 'tree="default"' in labels:
                found[labels.partition('pool="')[2].partition('"')[0]] = float(value)
    return found


def explain(loop: Loop, job: dict[str, Any]) -> dict[str, Any]:
    """``cpumond explain JOB --json`` of the agent."""
    done = loop.run("explain", job["id"], "--config", loop.nodes[0].config_path, "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_freed_cpu_runs_another_job_and_comes_back_when_it_is_wanted(loop, tmp_path):
    wake = tmp_path / "wake"
    loop.create_pool("owners", strong_guarantee_resources={"cpu": 1.0})
    loop.create_pool("guests")
    with CpuMeter(loop) as meter:
        a = loop.start("owners", sys.executable, "-S", "-c", WORKER, str(wake), cpu=1.0, monitor=MONITOR)
        [a_job] = loop.await_running(a)
        quota_cores = loop.quota_cores(a_job["cgroup"])
        changes = [e for e in loop.nodes[0].log_events("limit_changed") if e["job_id"] == a_job["id"]]
        assert 1.0 in (quota_cores, *(change["old_cores"] for change in changes[:1]))
        b = loop.start("guests", sys.executable, "-S", "-c", BURST, cpu=0.5, monitor=KEPT)
        ordered_at = time.time()
        [b_job] = loop.await_running(b)
        # As soon as the rule of the monitor has given up half a core, and not before.
        freed_at, started_at = find_times(loop, a_job, b_job)
        lowered_s, expected_s = freed_at - a_job["start_time"], count_checks_down_to(0.5, 0.1, 1.0) * CHECK_S
        assert expected_s - 2 * CHECK_S < lowered_s < 3 * expected_s + 10.0, (
            f"{lowered_s:.1f}, expected {expected_s:.1f} s"
        )
        waited_s = started_at - max(freed_at, ordered_at)
        assert freed_at < started_at
        assert waited_s < 10.0 * SLOWNESS, f"B started {waited_s:.1f} s after there was room for it"
        loop.wait(lambda: loop.quota_cores(a_job["cgroup"]) == FLOOR, "A is down at its floor", WAIT_S)
        [started] = [each for each in loop.nodes[0].log_events("job_started") if each["job_id"] == b_job["id"]]
        [a_view] = loop.jobs(a, "running")
        assert (a_view["cpu_limit"], a_view["current_cpu_limit"]) == (1.0, pytest.approx(FLOOR, abs=0.25))

        checks, restore = count_checks_until_restored(loop, a_job, wake)
        assert checks <= 2, f"the limit was back after {checks} checks"
        assert (restore["result"], restore["applied_cores"]) == ("applied", 1.0)
        changes = [e for e in loop.nodes[0].log_events("limit_changed") if e["reason"] == "restore"]
        assert {(change["job_id"], change["new_cores"]) for change in changes} == {(a_job["id"], 1.0)}

        # 1.5 cores are more than there are: the guest goes after the time that is allowed, and waits until A sleeps.
        ended = loop.wait(lambda: loop.jobs(b, "aborted"), "B's job is repaired away", WAIT_S)[0]
        [shown] = [job for job in loop.ask("operation", "jobs", b)["jobs"] if job["state"] == "aborted"]
        assert (shown["id"], shown["preemption"]["kind"]) == (b_job["id"], "overcommit")
        assert "of 1 core (allowed_node_resources_overcommit_duration is 2 s" in shown["preemption"]["why"]
        assert shown["preemption"]["at"] - restore["at"] > OVERCOMMIT_S - CHECK_S
        assert ended["finish_time"] is not None
        loop.wait(lambda: not loop.pids(b_job["cgroup"]), "its processes are gone")
        assert (loop.operation(b)["state"], loop.operation(b)["jobs"]["active"]) == ("running", 0)
        assert [job["id"] for job in loop.jobs(a, "running")] == [a_job["id"]]
        wake.unlink()
        [b_again] = loop.await_running(b)
        assert b_again["id"] != b_job["id"]
        assert loop.jobs(a, "running")[0]["current_cpu_limit"] <= 0.5

        # What it used in its last moment may be seen by nobody, and its first milliseconds are its parent's.
        loop.wait(lambda: meter.seconds.get(b_again["cgroup"], 0.0) > 0.45, "B's work is done", WAIT_S)
        for operation in (a, b):
            assert loop.run("operation", "abort", operation).returncode == 0
        loop.await_no_jobs()
        counters = read_pool_counters(loop)
        deviations = {}
        for operation, pool in ((a, "owners"), (b, "guests")):
            jobs = loop.jobs(operation)
            used = meter.of(jobs)
            assert used > 0.45
            assert counters[pool] == pytest.approx(used, rel=0.05)
            assert loop.get(f"/api/v1/trees/default/pools/{pool}")["cpu_seconds"] == pytest.approx(used, rel=0.05)
            assert loop.operation(operation)["cpu_seconds"] == pytest.approx(used, rel=0.05)
            deviations[pool] = f"{counters[pool] / used - 1:.3%}"
    print(f"checks until the limit was back: {checks}; CPU totals off by {deviations}")
    print(f"A was down to half a core after {lowered_s:.2f} s, {expected_s:.2f} s were expected")
    print(f"B ran {waited_s:.3f} s after that, {started['since_heartbeat_s']:.3f} s after the heartbeat that told it")


def find_times(loop: Loop, a_job: dict[str, Any], b_job: dict[str, Any]) -> tuple[float, float]:
    """When A's limit fell to half a core, and when B's job was started, by the agent's log; seconds since 1970."""
    node = loop.nodes[0]
    lowered = [e for e in node.log_events("limit_changed") if e["job_id"] == a_job["id"] and e["new_cores"] <= 0.5]
    started = [e for e in node.log_events("job_started") if e["job_id"] == b_job["id"]]
    freed_at, started_at = (datetime.fromisoformat(found[0]["timestamp"]).timestamp() for found in (lowered, started))
    return freed_at, started_at


def count_checks_until_restored(loop: Loop, job: dict[str, Any], wake: Path) -> tuple[int, dict[str, Any]]:
    """Wake A up: how many checks the agent made from then to the one that gave its limit back, and its record."""
    # All that its lowered limit allows: only what is throttled can be seen to want more.
    loop.set_weight(100)
    wake.touch()
    loop.wait(lambda: loop.quota_cores(job["cgroup"]) == 1.0, "A has its full limit back", WAIT_S)
    loop.set_weight(8)
    seen_at = wake.with_name("wake.seen").stat().st_mtime
    # There may be more of them: where the cores are not enough for all, A's use falls below its limit again.
    told = explain(loop, job)
    restore = next(each for each in told["decisions"] if each["kind"] == "restore" and each["at"] > seen_at)
    # Each check ends with a sample: those that a busy machine left out are none.
    return sum(seen_at < at < restore["at"] for at in told["samples"]["at"]) + 1, restore


@pytest.mark.parametrize("loop", [2.0], indirect=True)
def test_the_unmodified_client_starts_jobs_that_share_what_they_do_not_use(loop, tmp_path):
    loop.create_pool("p")
    # Each orders the usual core.
    spec = f"{{pool=p;job_cpu_monitor={MONITOR}}}"
    tasks = '{t={job_count=2;command="echo $YT_JOB_ID; exec sleep 1000"}}'
    operation = loop.yt("vanilla", "--async", "--tasks", tasks, "--spec", spec)
    jobs = loop.await_running(operation, 2)
    assert [job["cpu_limit"] for job in jobs] == [1.0, 1.0]
    other = loop.start("p", "/bin/bash", "-c", "exit 0", count=3)
    # Both are below 0.5 cores then, and one core is free.
    loop.await_state(other, "completed")
    assert all(loop.quota_cores(job["cgroup"]) < 0.55 for job in jobs)
    assert {job["id"] for job in loop.jobs(operation, "running")} == {job["id"] for job in jobs}
    for job in jobs:
        with httpx2.Client(trust_env=False, verify=False, timeout=60.0) as client:
            answer = client.get(f"{loop.url}/api/v1/operations/{operation}/jobs/{job['id']}/log")
        assert (answer.status_code, answer.text) == (200, f"{job['id']}\n")
    loop.yt("abort-op", operation)
    loop.wait(lambda: not any(loop.pids(job["cgroup"]) for job in jobs), "their processes are gone", WAIT_S)
    loop.await_no_jobs()
    assert {job["state"] for job in loop.jobs(operation)} == {"aborted"}


@pytest.mark.parametrize("loop", [2.0], indirect=True)
def test_env_1_gang_2_gang_3_jobs_find_their_numbers_and_start_again_together(loop):
    """A gang by the unmodified client, on real processes: what each job has in its environment, before and after."""
    loop.create_pool("p")
    names = "$YT_JOB_COOKIE $YT_TASK_JOB_INDEX $YT_GANG_RANK $YT_GANG_SIZE $YT_POOL_TREE $YT_OPERATION_INCARNATION"
    tasks = f'{{t={{job_count=2;cpu_limit=0.5;gang_options={{}};command="echo {names}; exec sleep 1000"}}}}'
    operation = loop.yt("vanilla", "--async", "--tasks", tasks, "--spec", "{pool=p}")
    first = loop.await_running(operation, 2)
    told = sorted(read_log(loop, operation, job["id"]).split() for job in first)
    incarnation = told[0][-1]
    assert told == [[str(n), str(n), str(n), "2", "default", incarnation] for n in range(2)]
    loop.yt("abort-job", first[0]["id"])
    old = {job["id"] for job in first}
    loop.wait(
        lambda: len({job["id"] for job in loop.jobs(operation, "running")} - old) == 2, "both start again", WAIT_S
    )
    told = sorted(read_log(loop, operation, job["id"]).split() for job in loop.jobs(operation, "running"))
    assert [each[:4] for each in told] == [["0", told[0][1], "0", "2"], ["1", told[1][1], "1", "2"]]
    assert sorted(each[1] for each in told) == ["2", "3"]
    assert {each[-1] for each in told} != {incarnation}
    loop.yt("abort-op", operation)
    loop.await_no_jobs()


def read_log(loop, operation, job_id):
    """What the job has written, once it has."""

    def ask():
        with httpx2.Client(trust_env=False, verify=False, timeout=60.0) as client:
            return client.get(f"{loop.url}/api/v1/operations/{operation}/jobs/{job_id}/log").text

    loop.wait(lambda: ask().endswith("\n"), f"job {job_id} has written its line", WAIT_S)
    return ask()
