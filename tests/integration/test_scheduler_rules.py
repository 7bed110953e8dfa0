"""Rules of operations as ``yt`` meets them: time limits over kill -9, what it adds, trees (semantics.md 2.8)."""

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
    done = scheduler.yt("vanilla", "--async", "--tasks", f"{{t={{{task}}}}}", "--spec", f"{{{spec}}}", bindings=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def attribute(scheduler: SchedulerProcess, operation: str, name: str) -> Any:
    done = scheduler.yt("get-operation", operation, "--attribute", name, "--format", "json", bindings=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[name]


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


def test_what_the_client_adds_by_itself_is_known(scheduler, node):
    operation = vanilla(scheduler, "job_count=1;command=true;memory_limit=1000;cpu_limit=1", "pool=a;title=x")
    assert attribute(scheduler, operation, "unrecognized_spec") == {}


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
