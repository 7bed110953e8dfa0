"""A roll-out on a real scheduler and real agents: what is told, what is obeyed, and a canary that throttles."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from closed_loop import WAIT_S, Loop
from prometheus_server import Prometheus, find_program
from waiting import wait_until

MAY = "[scheduler]\nmay_set_mode = true\n"
NODES = 4


@pytest.fixture(scope="module")
def cluster(hierarchies: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    place: Path = tmp_path_factory.mktemp("rollout")
    with Loop(place, hierarchies, NODES, cpu=0.25, agent_config=MAY, tags=["rack-a"], web=True) as loop:
        yield loop


def levels(cluster: Loop) -> dict[str, str]:
    return {each["id"]: (each["about"] or {}).get("level") for each in cluster.get("/api/v1/fleet")["agents"]}


@pytest.fixture(autouse=True)
def no_stage(cluster: Loop) -> None:
    """Each test begins with hosts that are told nothing."""
    for each in cluster.get("/api/v1/rollout")["stages"]:
        assert cluster.run("rollout", "remove", each["stage"]["nodes_filter"]).returncode == 0
    await_levels(cluster, {node.node_id: "shadow" for node in cluster.nodes})


def count_writes(cluster: Loop) -> dict[str, int]:
    return {node.node_id: node.get("/v1/status")["counters"]["writes"] for node in cluster.nodes}


def list_told(cluster: Loop) -> dict[str, list[str]]:
    return {node.node_id: [each["told"] for each in node.log_events("level_told")] for node in cluster.nodes}


def stage(cluster: Loop) -> Any:
    [found] = cluster.get("/api/v1/rollout")["stages"]
    return found["stage"]


def await_levels(cluster: Loop, wanted: dict[str, str]) -> None:
    cluster.wait(lambda: levels(cluster) == wanted, f"agents do {wanted}, not {levels(cluster)}", WAIT_S)


def test_a_canary_that_throttles_is_reverted_and_the_rest_is_not_touched(cluster):
    shadow = {node.node_id: "shadow" for node in cluster.nodes}
    told, writes = list_told(cluster), count_writes(cluster)
    burner = cluster.start("default", "/bin/sh", "-c", "while :; do :; done", count=NODES, cpu=0.2)
    jobs = cluster.await_running(burner, NODES)
    assert len({job["node_id"] for job in jobs}) == NODES
    arguments = ("rack-a", "quota", "--canary", "0.25", "--check-period", "1s", "--max-late-cores", "0.01")
    planned = cluster.run("rollout", "set", *arguments, "--plan")
    assert planned.stdout.splitlines() == [
        "1 host would go as canary from shadow to reclaim by quota",
        "3 hosts would stay until the canary is advanced",
    ]
    assert cluster.get("/api/v1/rollout")["stages"] == []
    done = cluster.run("rollout", "set", *arguments, "--why", "second week")
    assert done.returncode == 0, done.stderr
    [canary] = stage(cluster)["canaries"]
    await_levels(cluster, {**shadow, canary: "quota"})
    job = next(job for job in jobs if job["node_id"] == canary)
    pinned = cluster.run("operation", "pin", burner, job["id"], "--cpu-limit", "0.05")
    assert pinned.returncode == 0, pinned.stderr
    stopped = cluster.wait(lambda: found if (found := stage(cluster))["state"] == "stopped" else None,
                           "the canary is taken back", WAIT_S)  # fmt: skip
    assert "2 checks in a row" in stopped["stopped"]
    await_levels(cluster, shadow)
    assert list_told(cluster) == {**told, canary: [*told[canary], "quota", "shadow"]}
    changed = {node_id for node_id, count in count_writes(cluster).items() if count != writes[node_id]}
    assert changed == {canary}
    [event] = [each for each in cluster.get("/api/v1/audit")["events"] if each["command"] == "StopStage"]
    assert event["user"] == "cpumond:rollout"
    assert "in a row" in event["text"]


def test_prometheus_finds_the_agents_by_the_scheduler(cluster, tmp_path):
    find_program("prometheus")
    config = (
        "scrape_configs:\n- job_name: cpumond\n  scrape_interval: 1s\n  http_sd_configs:\n"
        f"  - url: {cluster.url}/api/v1/prometheus/targets?loopback=true\n    refresh_interval: 1s\n"
    )
    assert cluster.get("/api/v1/prometheus/targets") == [], "agents that listen on the loopback are for one machine"
    [group, *_] = cluster.ask("fleet", "--prometheus-sd", "--loopback")
    assert group["labels"]["node"] == "node-1"
    server = Prometheus(tmp_path, config)
    try:
        rows = wait_until(lambda: len(found := server.query("up == 1")) == NODES and found, "all agents are scraped")
        assert {row[0]["node"] for row in rows} == {node.node_id for node in cluster.nodes}
    finally:
        server.stop()
