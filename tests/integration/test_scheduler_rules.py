"""Rules of operations on a running scheduler, as ``yt`` and its users meet them: time limits over kill -9, jobs that no
node can hold, rights, operations in the root (semantics.md 2.8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerProcess]:
    with SchedulerProcess(tmp_path) as process:
        process.write_config('node_heartbeat_timeout = "1h"\n')
        process.start()
        yield process
        assert "Traceback" not in process.log()


@pytest.fixture
def node(scheduler: SchedulerProcess) -> PlayedNode:
    node = PlayedNode(scheduler, "n1", cpu=8.0)
    node.register()
    node.beat()
    return node


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


# --- time limits


def test_a_time_limit_fails_the_operation_also_after_a_crash(scheduler, node):
    operation = vanilla(scheduler, 'job_count=2;command="sleep 600"', "time_limit=4000")
    node.beat_until(lambda: len(node.jobs_of(operation)) == 2, "its jobs")
    started = scheduler.get(f"operations/{operation}")["start_time"]
    scheduler.kill()
    scheduler.start()
    node.beat_until(lambda: scheduler.state_of(operation) == "failed", "the end of the operation")
    found = scheduler.get(f"operations/{operation}")
    assert 4.0 <= found["finish_time"] - started < 60.0
    assert "running for too long" in found["error"]
    error = attribute(scheduler, operation, "result")["error"]
    assert (error["code"], error["attributes"]["time_limit"]) == (1, 4000)
    node.beat_until(lambda: not node.jobs, "the end of its jobs")
    assert found["jobs"]["failed"] == 0


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
        'no job of task "t" can start: 64 cores, largest node 8',
    ]
    operation = answer["id"]
    assert attribute(scheduler, operation, "unrecognized_spec") == {"wieght": 2, "tasks": {"t": {"job_timelimit": 5}}}
    assert "64 cores" in attribute(scheduler, operation, "alerts")["job_fits_no_node"]["message"]
    assert ("job_fits_no_node", operation) in alerts(scheduler)
    assert "64 cores" in scheduler.get(f"operations/{operation}")["alerts"][0]
    larger = PlayedNode(scheduler, "n2", cpu=100.0)
    larger.register()
    assert alerts(scheduler) == []
    assert scheduler.get(f"operations/{operation}")["alerts"] == answer["warnings"][:2]


def test_what_the_client_adds_by_itself_is_known(scheduler, node):
    operation = vanilla(scheduler, "job_count=1;command=true;memory_limit=1000;cpu_limit=1", "pool=a;title=x")
    assert attribute(scheduler, operation, "unrecognized_spec") == {}


def test_operations_in_the_root_are_named_by_the_command_line_and_by_yt(scheduler, node):
    body = {"spec": {"pool": "<Root>", "tasks": {"t": {"job_count": 1, "command": "true"}}}}
    refused = scheduler.request("POST", "operations", body)
    assert (refused.status_code, "Starting operations immediately in pool" in refused.text) == (422, True)
    scheduler.patch("trees/default", {"edits": [{"path": ["forbid_immediate_operations_in_root"], "value": False}]})
    command = ["operation", "start", "--pool", "<Root>", "--scheduler", scheduler.url, "--", "true"]
    assert run_command(command, clean_environment()).returncode == 0
    operation = vanilla(scheduler, "job_count=1;command=true", 'pool="<Root>"')
    node.beat_until(lambda: len(node.jobs) == 2, "both jobs")
    told = scheduler.get(f"operations/{operation}")
    assert (told["pools"], told["trees"]["default"]["pool"]) == ({"default": "<Root>"}, "<Root>")
    assert scheduler.get("trees/default/pools/%3CRoot%3E")["operation_count"] == 2


def test_a_tree_as_yt_prints_it_becomes_its_file(scheduler, tmp_path):
    scheduler.create_pool("research", min_share_resources={"cpu": 4}, abc={"id": 1})
    scheduler.create_pool("nightly", parent="research", weight=2)
    wanted = [word for name in ("abc", "weight", "strong_guarantee_resources") for word in ("--attribute", name)]
    printed = scheduler.yt("get", "//sys/pool_trees/default", *wanted, bindings=False)
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "old.yson").write_text(printed.stdout, encoding="utf-8")
    environment = {**clean_environment(), "CPUMOND_SCHEDULER": scheduler.url}
    made = run_command(["tree", "export", "new", "--from-yt", str(tmp_path / "old.yson")], environment)
    own = '[options]\nnodes_filter = "new"\nacl_required = true'
    (tmp_path / "new.toml").write_text(made.stdout.replace("[options]", own), encoding="utf-8")
    applied = run_command(["tree", "apply", str(tmp_path / "new.toml"), "--yes"], environment)
    assert applied.returncode == 0, applied.stderr
    copy = scheduler.yt("get", "//sys/pool_trees/new", *wanted, bindings=False)
    assert copy.stdout == printed.stdout
