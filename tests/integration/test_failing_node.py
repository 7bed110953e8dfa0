"""One node of two fails every job: by HTTP and commands against a real scheduler, and by a real agent."""

from pathlib import Path

import pytest
from commands import run_command
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment

from cpumond.cluster import Cluster
from cpumond.host.cgroup.mounts import Hierarchies


def test_both_operations_complete_and_the_node_is_named_everywhere(scheduler: SchedulerProcess) -> None:
    """What becomes of the node in the end is in ``tests/unit/scheduler/state/test_failing_nodes.py``."""
    scheduler.write_config("min_spare_job_resources_on_node = {user_slots = 0, cpu = 0.0, memory = 0}\n")
    scheduler.start()
    bad, good = PlayedNode(scheduler, "bad", 4.0), PlayedNode(scheduler, "good", 4.0)
    for node in (bad, good):
        node.register()
    ids = [scheduler.start_operation("p", job_count=40) for _ in range(2)]
    starts = 0
    while not all(scheduler.state_of(each) in ("completed", "failed") for each in ids):
        for node, state in ((good, "completed"), (bad, "failed")):
            for job_id in list(node.jobs):
                node.end(job_id, state, start_time=1.0, finish_time=2.0)
            ordered = node.beat()["start"]
            starts += len(ordered) if node is bad else 0
    assert [scheduler.get(f"operations/{each}")["jobs"]["completed"] for each in ids] == [40, 40]
    assert starts <= 12
    (event,) = scheduler.get("events?kind=node_failing")["events"]
    assert (event["node"], "at most 1 may be" in event["text"]) == ("bad", True)
    alerts = scheduler.get("alerts")["alerts"]
    assert ("node_failing", "bad") in [(each["code"], each["subject"]) for each in alerts]
    told = "failed in a row; it gets no new jobs for"
    assert told in scheduler.get("nodes/bad")["failing"]
    assert scheduler.get("trees/default")["held_off_node_count"] == 1
    assert 'cpumond_tree_held_off_nodes{tree="default"} 1.0' in scheduler.request("GET", "/metrics").text

    def cpumond(*words: str) -> str:
        return run_command([*words, "--scheduler", scheduler.url], clean_environment()).stdout

    assert "bad   default  held off for " in cpumond("node", "list")
    assert told in cpumond("node", "show", "bad")
    why = "".join(cpumond("operation", "why", each) for each in ids)
    assert 'failures were on node "bad" (' in why
    assert told in why
    cpumond("node", "uncordon", "bad", "--why", "mended")
    assert scheduler.get("nodes/bad")["held_until"] is None


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
