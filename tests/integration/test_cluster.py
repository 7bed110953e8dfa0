"""``cpumond.testing.Cluster`` and ``cpumond cluster``: real processes, everything reachable, and nothing left."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import psycopg
import pytest
import test_every_command as every
from commands import run_command
from postgresql import run_sql
from waiting import is_over, wait_until

from cpumond.cluster import CLUSTER_PREFIX, Cluster
from cpumond.cluster.postgresql import PostgresServer
from cpumond.core.errors import UnavailableError
from cpumond.host.cgroup.mounts import Hierarchies, read_mounts

pytestmark = pytest.mark.cgroup


@pytest.fixture(scope="module")
def cluster(hierarchies: Hierarchies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    whole = Cluster(
        tmp_path_factory.mktemp("cluster"), 2, cpu=0.5, memory=2**30, user_slots=7, check_period="100ms",
        monitor={"min_cpu_limit": 0.1}, scheduler_config='cluster_name = "trial"\n[api]\nmax_body = 65536\n',
        agent_config='[log]\nlevel = "debug"\n', tags={"node-2": ["fast"]}, web=True,
    )  # fmt: skip
    with whole:
        yield whole
    assert whole.leftovers() == []


def list_cgroups(pid: int | str) -> list[str]:
    """Cgroups of the cluster of a process, in all hierarchies, wherever its service has its own."""
    roots = {mount.mount_point for mount in read_mounts("/proc/self/mountinfo")}
    return [path for root in roots for path in glob.glob(f"{root}/**/{CLUSTER_PREFIX}{pid}", recursive=True)]


def two(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return jobs if len(jobs) == 2 else []


def test_nodes_are_what_was_asked_for(cluster: Cluster) -> None:
    nodes = {node["id"]: node for node in cluster.get("/api/v1/nodes")["nodes"]}
    assert {name: "fast" in node["tags"] for name, node in nodes.items()} == {"node-1": False, "node-2": True}
    for node in nodes.values():
        assert (node["capacity"]["cpu"], node["capacity"]["memory"], node["capacity"]["user_slots"]) == (0.5, 2**30, 7)
    with pytest.raises(TimeoutError, match=r"not within 0.1 s: the moon\n(?s:.*)scheduler: .*\n(?s:.*)node-2: "):
        cluster.wait(lambda: False, "the moon", 0.1)
    with pytest.raises(UnavailableError, match="node-1 is already running"):
        cluster.nodes[0].start()


def test_a_job_tells_of_its_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    command = f'until [ -e {gate} ]; do sleep 0.1; done; touch "$CPUMOND_CHECKPOINT"; exec sleep 3600'
    task = {"job_count": 1, "cpu_limit": 0.1, "memory_limit": 2**24, "checkpoints": True, "command": command}
    spec = {"pool": "saving", "tasks": {"main": task}}
    operation = cluster.post("/api/v1/operations", {"spec": spec})["id"]
    [job] = cluster.wait(lambda: cluster.jobs(operation, "running"), "it runs")
    assert job["checkpoint_at"] is None
    gate.touch()

    def find_checkpoint() -> float:
        found: list[float] = [job["checkpoint_at"] or 0.0 for job in cluster.jobs(operation)]
        return found[0]

    told = cluster.wait(find_checkpoint, "its checkpoint is told")
    assert job["start_time"] <= told <= gate.stat().st_mtime + 60.0
    cluster.post(f"/api/v1/operations/{operation}/abort", {})
    cluster.wait(lambda: not cluster.jobs(operation, "running"), "it ends")


def test_all_is_removed_after_an_exception(
    hierarchies: Hierarchies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the directory has files that are called as modules."""
    for name in ("uvicorn.py", "msgspec.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    whole = Cluster(tmp_path, 1, cpu=0.5, cgroup_prefix=f"cpumond-test-{os.getpid()}-cluster")
    parts: list[psutil.Process] = []

    def fail() -> None:
        with whole:
            command = "trap '' TERM INT; sh -c 'sleep 1000 & sleep 1000' & while :; do sleep 1; done"
            operation = whole.start_operation("p", command, 2, cpu_limit=0.1)
            whole.wait(lambda: two(whole.jobs(operation, "running")), "they run")
            # The first process of a new one ends at once.
            whole.wait(lambda: len(whole.nodes[0].find_keepers()) == 1, "there is one keeper")
            [keeper] = [psutil.Process(pid) for pid in whole.nodes[0].find_keepers()]
            whole.wait(lambda: len(keeper.children(recursive=True)) >= 6, "they have started what they start")
            own = [psutil.Process(each.pid) for each in (whole.scheduler, whole.nodes[0])]
            parts.extend([*own, keeper, *keeper.children(recursive=True)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(parts) >= 9
    assert all(is_over(process) for process in parts)
    assert whole.leftovers() == []


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(hierarchies: Hierarchies, tmp_path: Path) -> None:
    whole = Cluster(
        tmp_path, 1, scheduler_config="fair_share_update_period = 0\n",
        cgroup_prefix=f"cpumond-test-{os.getpid()}-cluster",
    )  # fmt: skip
    with pytest.raises(UnavailableError, match=r"scheduler ended during its start: .*fair_share_update_period"), whole:
        pass
    assert whole.leftovers() == []


class Command:
    def __init__(self, directory: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cpumond", "cluster", "--nodes", "2", "--cpu", "0.3", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"},
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, number: int = signal.SIGINT) -> str:
        assert self.process.stdout is not None
        self.process.send_signal(number)
        rest = self.process.stdout.read()
        assert self.process.wait(100) == 0
        return rest


def operate(url: str, token: str, *arguments: str) -> str:
    environment = {**os.environ, "CPUMOND_SCHEDULER": url, "CPUMOND_TOKEN": token}
    done = run_command(["operation", *arguments], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_says_how_and_removes_all_at_ctrl_c(hierarchies: Hierarchies, tmp_path: Path) -> None:
    with Command(tmp_path) as command:
        lines = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(command.read_line().strip())
        [url] = [line.rpartition("=")[2] for line in lines if line.startswith("export CPUMOND_SCHEDULER=")]
        assert f"export YT_PROXY={url.removeprefix('http://')}" in lines
        [token] = [line.rpartition("=")[2] for line in lines if line.startswith("export CPUMOND_TOKEN=")]
        assert sum("the agent of node-" in line for line in lines) == 2
        words = [line.split() for line in lines]
        assert ["web", "page", f"{url}/#token={token}"] in words
        pages = [line[-1] for line in words if line[:2] == ["page", "of"]]
        assert [httpx2.get(page, trust_env=False, verify=False, timeout=250).status_code for page in pages] == [
            200,
            200,
        ]
        operation = operate(url, token, "start", "--pool", "p", "--cpu-limit", "0.2", "--", "sleep", "1000")
        wait_until(lambda: "running" in operate(url, token, "jobs", operation), "the job runs")
        assert list_cgroups(command.process.pid)
        assert command.end() == "Everything is removed.\n"
    assert list_cgroups(command.process.pid) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_command_leaves_goes_with_the_next(hierarchies: Hierarchies, tmp_path: Path) -> None:
    with Command(tmp_path, "--json") as command:
        told = json.loads(command.read_line())
        every.validator("cluster").validate(told)
        operation = operate(
            told["scheduler"], told["token"], "start", "--pool", "p", "--cpu-limit", "0.2", "--", "sleep", "1000"
        )
        wait_until(lambda: "running" in operate(told["scheduler"], told["token"], "jobs", operation), "the job runs")
        parts = [psutil.Process(node["pid"]) for node in told["nodes"].values()]
        command.process.kill()
    wait_until(lambda: all(is_over(process) for process in parts), "the agents end")
    assert list_cgroups(command.process.pid)
    with Command(tmp_path, "--json", "--keep") as after:
        kept = Path(json.loads(after.read_line())["directory"])
        assert list_cgroups(command.process.pid) == []
        assert after.end(signal.SIGTERM) == ""
    assert list_cgroups(after.process.pid) == []
    assert list(tmp_path.iterdir()) == [kept]
    assert "node_registered" in (kept / "node-1/log.jsonl").read_text()


def test_two_schedulers_share_a_database_that_nobody_else_reaches(hierarchies: Hierarchies) -> None:
    try:
        PostgresServer().close()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    # PostgreSQL's own account has to get into its directory.
    with Command(Path(tempfile.gettempdir()), "--schedulers", "2", "--json") as command:
        told = json.loads(command.read_line())
        # Whoever reaches it is its superuser, and could start jobs: other users of the machine must not.
        config = tomllib.loads(Path(told["directory"], "scheduler/config.toml").read_text(encoding="utf-8"))
        conninfo = config["store"]["conninfo"]
        assert run_sql(conninfo, "SELECT term FROM cpumond_lease") == [(1,)]
        with pytest.raises(psycopg.OperationalError, match="refused"):
            run_sql(f"{conninfo} host=127.0.0.1", "SELECT 1")
        roles = {httpx2.get(f"{url}/readyz", trust_env=False).json()["role"] for url in told["schedulers"]}
        assert roles == {"leader", "standby"}
        command.end()
    assert not os.path.exists(told["directory"])
