"""One node of two fails every job: by HTTP and commands against a real scheduler, and by a real agent."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run_command
from scheduler_process import PlayedNode, SchedulerProcess
from waiting import wait_until

from cpumond.cluster import Cluster
from cpumond.host.cgroup.mounts import Hierarchies

CONFIG = (
    "min_spare_job_resources_on_node = {{user_slots = 0, cpu = 0.0, memory = 0}}\n"
    '[node_failures]\nenabled = {}\npause = "{}"\nmax_pause = "{}"\nmax_holds = 1\n'
)


class FailingNode(PlayedNode):
    """All of its jobs end at once, as ``state`` has it."""

    state = "completed"
    starts = 0

    def work(self) -> None:
        for job_id in list(self.jobs):
            self.end(job_id, self.state, start_time=1.0, finish_time=2.0)
        self.starts += len(self.beat()["start"])


def play(scheduler: SchedulerProcess, enabled: str = "true", pause: str = "1h") -> tuple[FailingNode, list[str]]:
    """Two operations of 40 jobs until both have ended, while one node fails all of them; that node, and their ids."""
    scheduler.write_config(CONFIG.format(enabled, pause, pause))
    scheduler.start()
    bad, good = FailingNode(scheduler, "bad", 4.0), FailingNode(scheduler, "good", 4.0)
    bad.state = "failed"
    for node in (bad, good):
        node.register()
    ids = [scheduler.start_operation("p", job_count=40) for _ in range(2)]
    while not all(scheduler.get(f"operations/{each}")["state"] in ("completed", "failed") for each in ids):
        good.work()
        bad.work()
    return bad, ids


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    for name in ("CPUMOND_TOKEN", "CPUMOND_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    made = SchedulerProcess(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_both_operations_were_lost_without_it(scheduler: SchedulerProcess) -> None:
    _, ids = play(scheduler, enabled="false")
    found = [scheduler.get(f"operations/{each}") for each in ids]
    assert [each["state"] for each in found] == ["failed", "failed"]
    assert all('all 10 failures were on node "bad"' in each["error"] for each in found)


def test_both_operations_complete_and_the_node_is_named_everywhere(scheduler: SchedulerProcess) -> None:
    bad, ids = play(scheduler)
    assert [scheduler.get(f"operations/{each}")["jobs"]["completed"] for each in ids] == [40, 40]
    assert bad.starts <= 12
    (event,) = scheduler.get("events?kind=node_failing")["events"]
    assert (event["node"], "at most 1 may be" in event["text"]) == ("bad", True)
    alerts = scheduler.get("alerts")["alerts"]
    assert ("node_failing", "bad") in [(each["code"], each["subject"]) for each in alerts]
    told = "failed in a row; it gets no new jobs for"
    assert told in scheduler.get("nodes/bad")["failing"]
    assert scheduler.get("trees/default")["held_off_node_count"] == 1
    assert 'cpumond_tree_held_off_nodes{tree="default"} 1.0' in scheduler.request("GET", "/metrics").text

    def cpumond(*words: str) -> str:
        return run_command([*words, "--scheduler", scheduler.url]).stdout

    assert "bad   default  held off for " in cpumond("node", "list")
    assert told in cpumond("node", "show", "bad")
    why = "".join(cpumond("operation", "why", each) for each in ids)
    assert 'failures were on node "bad" (' in why
    assert told in why
    cpumond("node", "uncordon", "bad", "--why", "mended")
    assert scheduler.get("nodes/bad")["held_until"] is None


def test_the_node_is_cordoned_in_the_end_and_a_restart_keeps_that(scheduler: SchedulerProcess) -> None:
    bad, _ = play(scheduler, pause="1s")
    for _ in range(2):
        scheduler.start_operation("p", job_count=40)

    def is_cordoned() -> bool:
        bad.work()
        return scheduler.get("nodes/bad")["cordon"] is not None

    wait_until(is_cordoned, "it is cordoned")
    (command,) = scheduler.get("audit?kind=command&node=bad")["events"]
    assert command["user"] == "cpumond:node-failures"
    scheduler.kill()
    scheduler.start()
    assert scheduler.get("nodes/bad")["cordon"]["why"].startswith("held off 1 time, and again")
    (alert,) = [each for each in scheduler.get("alerts")["alerts"] if each["code"] == "node_failing"]
    assert alert["severity"] == "error"


@pytest.mark.cgroup
def test_a_real_agent_that_cannot_start_jobs(hierarchies: Hierarchies, tmp_path: Path) -> None:
    """The account that its jobs are to have is missing on one node: none of them has a process there."""
    with Cluster(tmp_path, 2, cpu=0.4, check_period="100ms") as cluster:
        node = cluster.nodes[0]
        extra = Path(node.directory, "conf.d", "account.toml")
        extra.parent.mkdir(exist_ok=True)
        extra.write_text('[executor]\nuser = "no-such-account"\n')
        node.stop()
        before = len(node.log_events("node_registered"))
        node.start()
        node.wait_ready()
        cluster.wait(lambda: len(node.log_events("node_registered")) > before, "it takes jobs")
        operation = cluster.start_operation("p", ["true"], job_count=12, cpu_limit=0.2, max_failed_job_count=2)
        ends = ("completed", "failed")
        cluster.wait(lambda: cluster.get(f"/api/v1/operations/{operation}")["state"] in ends, "it ends")
        found = cluster.get(f"/api/v1/operations/{operation}")
        assert (found["state"], found["jobs"]["completed"]) == ("completed", 12), found["error"]
        ended = cluster.jobs(operation, "failed")
        assert {job["node_id"] for job in ended} == {node.node_id}
        assert all("'no-such-account' is unknown" in job["reason"] for job in ended)
