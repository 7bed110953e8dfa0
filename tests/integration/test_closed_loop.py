"""The closed loop: CPU that a job ordered and does not use runs another job, and comes back when it is wanted."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from closed_loop import WAIT_S, WORKER, CpuMeter, Loop
from prometheus_client.parser import text_string_to_metric_families
from waiting import SLOWNESS

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup

CHECK_S = 0.25 * SLOWNESS
FLOOR = 0.2
MONITOR = f"{{enable_cpu_reclaim=%true;min_cpu_limit={FLOOR};decrease_coefficient=0.8;smoothing_factor=0.3}}"
BURST = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(1000)"
KEPT = "{enable_cpu_reclaim=%false}"
OVERCOMMIT_S = 2.0


@pytest.fixture
def loop(tmp_path: Path, hierarchies: Hierarchies) -> Iterator[Loop]:
    """A node of 1 core; less than half a core that is free is offered no work."""
    config = (
        f'allowed_node_resources_overcommit_duration = "{OVERCOMMIT_S}s"\n'
        "[min_spare_job_resources_on_node]\ncpu = 0.5\nmemory = 268435456\n"
    )
    with Loop(
        tmp_path, hierarchies, cpu=1.0, memory=4 * 2**30, check_period=f"{CHECK_S:g}s", scheduler_config=config
    ) as cluster:
        yield cluster
    assert cluster.leftovers() == []


def read_pool_counters(loop: Loop) -> dict[str, float]:
    with httpx2.Client(trust_env=False, verify=False, timeout=250) as client:
        text = client.get(f"{loop.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["cpumond_pool_cpu_usage_seconds"].samples
    return {each.labels["pool"]: each.value for each in samples if each.labels["tree"] == "default"}


def explain(loop: Loop, job: dict[str, Any]) -> dict[str, Any]:
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
        [b_job] = loop.await_running(b)
        # When the monitor has given up half a core, and not before.
        node = loop.nodes[0]
        lowered = [each for each in node.log_events("limit_changed") if each["job_id"] == a_job["id"]]
        freed_at = next(each["timestamp"] for each in lowered if each["new_cores"] <= 0.5)
        [started] = [each for each in node.log_events("job_started") if each["job_id"] == b_job["id"]]
        assert freed_at < started["timestamp"]
        loop.wait(lambda: loop.quota_cores(a_job["cgroup"]) == FLOOR, "A is down at its floor", WAIT_S)
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
        for operation, pool in ((a, "owners"), (b, "guests")):
            jobs = loop.jobs(operation)
            used = meter.of(jobs)
            assert used > 0.45
            assert counters[pool] == pytest.approx(used, rel=0.05)
            assert loop.get(f"/api/v1/trees/default/pools/{pool}")["cpu_seconds"] == pytest.approx(used, rel=0.05)
            assert loop.operation(operation)["cpu_seconds"] == pytest.approx(used, rel=0.05)


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
