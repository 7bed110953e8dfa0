"""Tags of nodes and ``scheduling_tag_filter`` by the unmodified ``yt``, on a real scheduler (semantics.md 2.13)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scheduler_process import PlayedNode, SchedulerProcess

ORCHID = "//sys/scheduler/orchid/scheduler/pool_trees/default"


def yt(scheduler: SchedulerProcess, *words: str) -> str:
    done = scheduler.yt(*words, bindings=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refused(scheduler: SchedulerProcess, *words: str) -> str:
    done = scheduler.yt(*words, bindings=False)
    assert done.returncode == 1, done.stdout
    return done.stderr


def start(scheduler: SchedulerProcess, jobs: int, spec: str = "", task: str = "") -> str:
    tasks = f"{{t={{job_count={jobs};command=true;cpu_limit=1.0;memory_limit=1;{task}}}}}"
    return yt(scheduler, "vanilla", "--tasks", tasks, "--spec", f"{{{spec}}}", "--async")


def settle(scheduler: SchedulerProcess, nodes: list[PlayedNode], operation: str) -> list[int]:
    """How many jobs of an operation each node has when all that start by themselves have."""
    for _ in range(3):
        scheduler.wait_updates()
        for node in nodes:
            node.beat()
    return [len(node.jobs_of(operation)) for node in nodes]


def end(scheduler: SchedulerProcess, nodes: list[PlayedNode], operation: str) -> None:
    scheduler.post(f"operations/{operation}/abort", {})
    for node in nodes:
        node.beat_until(lambda node=node: not node.jobs_of(operation), "the end of the jobs")


def get_operation(scheduler: SchedulerProcess, operation: str) -> Any:
    return json.loads(yt(scheduler, "get-operation", operation, "--format", "json"))


def test_jobs_follow_the_tags_of_nodes_and_the_filters_of_operations_and_pools(tmp_path: Path) -> None:
    """TAG-1 to TAG-5, HANG-1 to HANG-3."""
    scheduler = SchedulerProcess(tmp_path)
    scheduler.write_config(
        "min_spare_job_resources_on_node = {user_slots = 0, cpu = 0.0, memory = 0}\n"
        'unmatched_scheduling_tag_timeout = "1s"\noperation_hangup_safe_timeout = "1s"\n'
        'operation_hangup_due_to_limiting_ancestor_safe_timeout = "1s"\n'
    )
    try:
        scheduler.start()
        nodes = [PlayedNode(scheduler, "n1", 3.0), PlayedNode(scheduler, "n2", 7.0)]
        for node in nodes:
            node.register()
            node.beat()
        yt(scheduler, "set", "//sys/cluster_nodes/n1/@user_tags", "[ssd]")
        assert scheduler.get("nodes/n1")["tags"] == ["n1", "ssd"]
        _check_filters(scheduler, nodes)
        _check_a_live_change(scheduler, nodes)
        _check_what_never_starts(scheduler, nodes)
    finally:
        scheduler.close()


def _check_filters(scheduler: SchedulerProcess, nodes: list[PlayedNode]) -> None:
    attributes = '{name=fast;pool_tree=default;scheduling_tag_filter="ssd"}'
    yt(scheduler, "create", "scheduler_pool", "--attributes", attributes)
    operation = start(scheduler, 10, 'pool=fast;scheduling_tag="!ssd"')
    assert settle(scheduler, nodes, operation) == [0, 0]
    end(scheduler, nodes, operation)
    operation = start(scheduler, 10, "pool=fast")
    assert settle(scheduler, nodes, operation) == [3, 0]
    shares = json.loads(yt(scheduler, "get", f"{ORCHID}/operations/{operation}", "--format", "json"))
    found = [shares[name] for name in ("fair_share_ratio", "demand_ratio", "usage_ratio", "starvation_status")]
    assert found == [pytest.approx(0.3), 1.0, pytest.approx(0.3), "non_starving"]
    assert shares["estimated_guarantee_share"]["cpu"] == pytest.approx(0.3)
    end(scheduler, nodes, operation)
    for text, what in (("a&&b", "column 2"), ("a b", "column 3"), (" | ".join(["a"] * 51), "101 tokens")):
        path = "//sys/pool_trees/default/fast/@scheduling_tag_filter"
        assert what in refused(scheduler, "set", path, f'"{text}"')
    tasks, spec = "{t={job_count=1;command=true}}", '{scheduling_tag_filter="a&&b"}'
    assert "column 2" in refused(scheduler, "vanilla", "--tasks", tasks, "--spec", spec, "--async")


def _check_a_live_change(scheduler: SchedulerProcess, nodes: list[PlayedNode]) -> None:
    operation = start(scheduler, 20, 'scheduling_tag_filter="!ssd"', "scheduling_tag_filter=ssd")
    assert settle(scheduler, nodes, operation) == [0, 7]
    yt(scheduler, "update-op-parameters", operation, "{scheduling_tag_filter=ssd}")
    shown = get_operation(scheduler, operation)
    assert shown["runtime_parameters"]["scheduling_tag_filter"] == "ssd"
    assert shown["unrecognized_spec"] == {"tasks": {"t": {"scheduling_tag_filter": "ssd"}}}
    assert settle(scheduler, nodes, operation) == [3, 7]
    nodes[1].end(nodes[1].jobs_of(operation)[0])
    assert settle(scheduler, nodes, operation) == [3, 6]
    end(scheduler, nodes, operation)


def _check_what_never_starts(scheduler: SchedulerProcess, nodes: list[PlayedNode]) -> None:
    for pool, option in (("narrow", "resource_limits={cpu=0.5}"), ("one", "max_running_operation_count=1")):
        yt(scheduler, "create", "scheduler_pool", "--attributes", f"{{name={pool};pool_tree=default;{option}}}")
    start(scheduler, 1, "pool=one", "user_slots=1000")
    never = {
        "pending": start(scheduler, 1, "pool=one", "user_slots=1000"),
        "suspended": start(scheduler, 1, "", "user_slots=1000"),
        "unchecked": start(scheduler, 1, "pool=narrow;enable_limiting_ancestor_check=%false"),
    }
    yt(scheduler, "suspend-op", never["suspended"])
    operation = start(scheduler, 1, 'scheduling_tag_filter="ssd & gpu"')
    narrow = start(scheduler, 1, "pool=narrow")
    large = start(scheduler, 1, task="user_slots=1000")
    nodes[0].beat_until(lambda: scheduler.state_of(operation) == "failed", "the failure of the operation")
    message = f'No online node fits scheduling_tag_filter "ssd & gpu" of operation {operation}'
    assert get_operation(scheduler, operation)["result"]["error"]["message"] == message
    nodes[0].beat_until(
        lambda: scheduler.get(f"operations/{large}")["alerts"] == ["it is stuck: 1000 user slots, largest node 100"],
        "the alert",
    )
    alert = get_operation(scheduler, large)["alerts"]["operation_stuck"]
    assert alert["message"] == "it is stuck: 1000 user slots, largest node 100"
    (event,) = scheduler.get(f"events?operation={large}&kind=operation_stuck")["events"]
    assert event["text"].endswith("is stuck: 1000 user slots, largest node 100")
    assert scheduler.state_of(large) == "running"
    for each in never.values():
        assert "operation_stuck" not in get_operation(scheduler, each)["alerts"]
    alert = get_operation(scheduler, narrow)["alerts"]["operation_stuck"]["message"]
    assert alert == 'it is stuck: its smallest job orders 1 cpu, and resource_limits of pool "narrow" allow 0.5'
