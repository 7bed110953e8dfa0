"""Rules of operations, pools and nodes on a running scheduler, as ``yt`` and its users meet them; also over kill -9.

semantics.md 2.2, 2.3, 2.9; time limits, jobs that no node can hold, rights, paths below what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from waiting import wait_until


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerProcess]:
    process = SchedulerProcess(tmp_path)
    process.write_config('node_heartbeat_timeout = "1h"\n')
    process.start()
    try:
        yield process
        assert "Traceback" not in process.log()
    finally:
        process.close()


@pytest.fixture
def node(scheduler: SchedulerProcess) -> PlayedNode:
    node = PlayedNode(scheduler, "n1", cpu=8.0)
    node.register()
    node.beat()
    return node


def restart(scheduler: SchedulerProcess) -> None:
    scheduler.kill()
    scheduler.start()


def vanilla(scheduler: SchedulerProcess, task: str, spec: str) -> str:
    """Start an operation with ``yt``; its id."""
    done = scheduler.yt("vanilla", "--async", "--tasks", f"{{t={{{task}}}}}", "--spec", f"{{{spec}}}", bindings=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def attribute(scheduler: SchedulerProcess, operation: str, name: str) -> Any:
    done = scheduler.yt("get-operation", operation, "--attribute", name, "--format", "json", bindings=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[name]


def alerts(scheduler: SchedulerProcess) -> list[tuple[str, str]]:
    """Codes and subjects, but for what a loaded machine may bring."""
    found = [(alert["code"], alert["subject"]) for alert in scheduler.get("alerts")["alerts"]]
    return [each for each in found if each[0] not in ("late_updates", "stuck")]


def parent_of(scheduler: SchedulerProcess, pool: str) -> str | None:
    """The parent of a living pool; None where there is no such pool."""
    found = {each["name"]: each["parent"] for each in scheduler.get("trees/default/pools")["pools"]}
    return found.get(pool)


# --- time limits


def test_a_time_limit_fails_the_operation_also_after_a_crash(scheduler, node):
    operation = vanilla(scheduler, 'job_count=2;command="sleep 600"', "time_limit=15000")
    node.beat_until(lambda: len(node.jobs_of(operation)) == 2, "its jobs")
    assert scheduler.state_of(operation) == "running"
    started = scheduler.get(f"operations/{operation}")["start_time"]
    restart(scheduler)
    node.beat_until(lambda: scheduler.state_of(operation) == "failed", "the end of the operation")
    found = scheduler.get(f"operations/{operation}")
    assert 15.0 <= found["finish_time"] - started < 60.0
    assert "running for too long" in found["error"]
    error = attribute(scheduler, operation, "result")["error"]
    assert (error["code"], "time_limit of 15000 ms" in error["message"]) == (1, True)
    node.beat_until(lambda: not node.jobs, "the end of its jobs")
    assert found["jobs"]["failed"] == 0


def test_a_job_time_limit_fails_the_job_and_counts_as_a_failure(scheduler, node):
    operation = vanilla(scheduler, 'job_count=1;command="sleep 600";job-time-limit=1000', "max_failed_job_count=2")
    node.beat_until(lambda: scheduler.state_of(operation) == "failed", "the end of the operation")
    found = scheduler.get(f"operations/{operation}")
    assert (found["jobs"]["failed"], found["jobs"]["aborted"], found["jobs"]["active"]) == (2, 0, 0)
    assert "job_time_limit of 1000 ms" in found["error"]
    jobs = scheduler.get(f"operations/{operation}/jobs")["jobs"]
    assert [job["state"] for job in jobs] == ["failed", "failed"]
    assert all("Job time limit exceeded" in job["reason"] for job in jobs)
    listed = scheduler.yt("list-jobs", operation, bindings=False)
    assert listed.stdout.count("Job time limit exceeded") == 2


def test_a_job_within_its_time_limit_is_left_alone(scheduler, node):
    task = {"job_count": 1, "command": "true", "job_time_limit": 3_600_000}
    operation = scheduler.post("operations", {"spec": {"tasks": {"t": task}}})["id"]
    node.beat_until(lambda: node.jobs_of(operation), "its job")
    for _ in range(5):
        node.beat()
    node.end(node.jobs_of(operation)[0])
    node.beat_until(lambda: scheduler.state_of(operation) == "completed", "the end")


# --- what a user is told


def test_what_is_odd_about_a_specification_is_told_at_the_start(scheduler, node):
    scheduler.create_pool("research")
    task = {"job_count": 1, "cpu_limit": 64, "command": "true", "job_timelimit": 5, "memory_limit": 1}
    answer = scheduler.post("operations", {"spec": {"pool": "resaerch", "wieght": 2, "tasks": {"t": task}}})
    assert answer["warnings"] == [
        'spec option "wieght" is not recognized; did you mean "weight"?',
        'spec option "tasks/t/job_timelimit" is not recognized; did you mean "job_time_limit"?',
        (
            'pool "resaerch" did not exist in pool tree "default": an ephemeral one was made under <Root>; did you '
            'mean "research"?'
        ),
        (
            'task "t": none of its jobs can start, no node can hold one: it orders 64 cpu (the most that a node has: '
            "8 cpu)"
        ),
    ]
    operation = answer["id"]
    assert attribute(scheduler, operation, "unrecognized_spec") == {"wieght": 2, "tasks": {"t": {"job_timelimit": 5}}}
    assert "64 cpu" in attribute(scheduler, operation, "alerts")["job_fits_no_node"]["message"]
    assert ("job_fits_no_node", operation) in alerts(scheduler)
    assert "64 cpu" in scheduler.get(f"operations/{operation}")["alerts"][0]
    larger = PlayedNode(scheduler, "n2", cpu=100.0)
    larger.register()
    assert alerts(scheduler) == []
    assert scheduler.get(f"operations/{operation}")["alerts"] == []


def test_what_the_client_adds_by_itself_is_known(scheduler, node):
    operation = vanilla(scheduler, "job_count=1;command=true;memory_limit=1000;cpu_limit=1", "pool=a;title=x")
    assert attribute(scheduler, operation, "unrecognized_spec") == {}


def test_rights_are_refused_and_not_kept(scheduler, node):
    scheduler.create_pool("p")
    acl = "[{action=deny;subjects=[everyone];permissions=[use]}]"
    runs: dict[str, tuple[str, ...]] = {
        "set": ("set", "//sys/pools/p/@acl", acl),
        "inherit": ("set", "//sys/pools/p/@inherit_acl", "%false"),
        "create": ("create", "scheduler_pool", "--attributes", f"{{name=q;acl={acl}}}"),
        "tree": ("set", "//sys/pool_trees/default/@acl", acl),
        "spec": ("vanilla", "--async", "--tasks", "{t={job_count=1;command=true}}", "--spec", f"{{acl={acl}}}"),
    }
    for name, done in scheduler.yt_all(runs, bindings=False).items():
        assert done.returncode == 1, name
        assert "not supported yet" in done.stderr, name
    assert scheduler.get("trees/default/pools/p")["attributes"] == {}
    assert parent_of(scheduler, "q") is None
    assert scheduler.get("operations")["total"] == 0
    operation = scheduler.start_operation("p")
    refused = scheduler.request("PATCH", f"operations/{operation}", {"parameters": {"acl": [{"action": "allow"}]}})
    assert (refused.status_code, "not supported yet" in refused.text) == (422, True)


def test_a_set_below_a_custom_attribute_that_is_missing_needs_recursive(scheduler):
    scheduler.create_pool("p")
    done = scheduler.yt("set", "//sys/pools/p/@lables/team", "ml", bindings=False)
    assert (done.returncode, 'Attribute "lables" is not found' in done.stderr) == (1, True)
    refused = scheduler.request("PUT", "/api/v4/set?path=//sys/pools/p/@lables/team&input_format=json", "ml")
    assert (refused.status_code, refused.json()["code"]) == (400, 500)
    assert scheduler.get("trees/default/pools/p")["attributes"] == {}
    done = scheduler.yt("set", "-r", "//sys/pools/p/@labels/team/name", "ml", bindings=False)
    assert done.returncode == 0, done.stderr
    assert scheduler.get("trees/default/pools/p")["attributes"] == {"labels": {"team": {"name": "ml"}}}
    done = scheduler.yt("set", "//sys/pools/p/@strong_guarantee_resources/cpu", "1", bindings=False)
    assert done.returncode == 0, done.stderr


# --- trees and pools


def test_without_a_default_tree_operations_are_refused_with_the_documents_code(scheduler, node):
    assert scheduler.yt("remove", "//sys/pool_trees/@default_tree", bindings=False).returncode == 0
    restart(scheduler)
    assert scheduler.yt("exists", "//sys/pool_trees/@default_tree", bindings=False).stdout == "false\n"
    body = {"spec": {"tasks": {"t": {"job_count": 1, "command": "true"}}}}
    refused: httpx2.Response = scheduler.request("POST", "operations", body)
    assert (refused.status_code, refused.json()["code"]) == (422, 214)
    done = scheduler.yt("vanilla", "--async", "--tasks", "{t={job_count=1;command=true}}", bindings=False)
    assert (done.returncode, "Pool trees are unspecified" in done.stderr) == (1, True)
    assert ("no_default_tree", "") in alerts(scheduler)
    assert vanilla(scheduler, "job_count=1;command=true", "pool_trees=[default]")
    for tree in ("default", None):
        assert scheduler.request("PUT", "default_tree", {"tree": tree}).status_code == 200
        assert scheduler.get("trees")["default_tree"] == (tree or "")


def test_a_removed_pool_stays_around_its_ephemeral_pools_over_crashes(scheduler):
    scheduler.create_pool("p", create_ephemeral_subpools=True)
    scheduler.create_pool("top")
    scheduler.patch("trees/default", {"edits": [{"path": ["default_parent_pool"], "value": "top"}]})
    first = scheduler.start_operation("p")
    second = scheduler.start_operation("mine")
    below = next(pool for pool in scheduler.get("trees/default/pools/p")["children"])
    assert parent_of(scheduler, "mine") == "top"
    for name in ("p", "top"):
        done = scheduler.yt("remove", f"//sys/pools/{name}", bindings=False)
        assert done.returncode == 0, done.stderr
    for _ in range(2):
        assert (parent_of(scheduler, below), parent_of(scheduler, "mine")) == ("p", "top")
        assert (parent_of(scheduler, "p"), parent_of(scheduler, "top")) == ("<Root>", "<Root>")
        assert scheduler.get("trees/default/pools/p")["is_ephemeral"]
        restart(scheduler)
    for operation in (first, second):
        scheduler.post(f"operations/{operation}/abort", {})
    assert [pool["name"] for pool in scheduler.get("trees/default/pools")["pools"]] == ["<Root>"]


# --- nodes


def test_a_node_of_several_trees_keeps_its_jobs_and_is_an_alert(scheduler, node):
    scheduler.post("trees", {"name": "gpu", "attributes": {"nodes_filter": "gpu"}})
    operation = scheduler.start_operation("p", job_count=2)
    node.beat_until(lambda: len(node.jobs) == 2, "its jobs")
    node.tags = ["gpu"]
    body = {"node_id": "n1", "incarnation": node.incarnation, "resources": node.resources, "tags": node.tags}
    refused = scheduler.request("POST", "nodes", body)
    assert refused.status_code == 422
    assert "more than one pool tree" in refused.json()["error"]
    more = scheduler.start_operation("p", job_count=2)
    for _ in range(2):
        scheduler.wait_updates()
        for _ in range(3):
            answer = node.beat()
            assert (answer["start"], answer["stop"]) == ([], [])
        assert len(node.jobs_of(operation)) == len(node.jobs) == 2
        assert alerts(scheduler) == [("node_in_several_trees", "n1")]
        metrics = scheduler.request("GET", "/metrics").text
        assert 'cpumond_scheduler_nodes_without_work{reason="several_trees"} 1.0' in metrics
        assert scheduler.get("nodes/n1")["matched_trees"] == ["default", "gpu"]
        restart(scheduler)
    node.tags = []
    node.register()
    node.beat_until(lambda: len(node.jobs_of(more)) == 2, "jobs again")
    assert alerts(scheduler) == []


def test_a_node_that_was_never_known_and_fits_several_trees_is_an_alert(scheduler):
    scheduler.post("trees", {"name": "gpu", "attributes": {"nodes_filter": "gpu"}})
    stranger = PlayedNode(scheduler, "n9", tags=["gpu"])
    body = {"node_id": "n9", "incarnation": "x", "resources": stranger.resources, "tags": ["gpu"]}
    assert scheduler.request("POST", "nodes", body).status_code == 422
    assert alerts(scheduler) == [("node_in_several_trees", "n9")]
    wait_until(lambda: '{reason="several_trees"} 1.0' in scheduler.request("GET", "/metrics").text, "the metric of it")
