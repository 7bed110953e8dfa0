"""The steps of docs/upgrade.md with the programs of 0.1 and of this version themselves, and jobs that run all the time.

0.1 is taken from this repository's history; its libraries are this environment's.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agent_process import AgentProcess, free_port
from scheduler_process import SchedulerProcess
from waiting import is_over, wait_until

from cpumond.testing import CgroupTree

REPOSITORY = Path(__file__).resolve().parents[2]
COMMIT = "f3cfea2"
"""The 0.1 of docs/upgrade.md: its databases have schema 1, its scheduler knows no keys of nodes."""
CONFIG = """
[scheduler]
url = "{url}"
heartbeat_period = "100ms"
retry_max = "300ms"
[executor]
kind = "cgroup"
cgroup_root = "{root}"
user = "root"
allow_root = true
[resources]
cpu = 4
"""

pytestmark = [pytest.mark.cgroup, pytest.mark.timeout(600)]


class VersionedScheduler(SchedulerProcess):
    """The scheduler of whichever version the sources in ``sources`` are."""

    sources = REPOSITORY

    def arguments(self, *more: str) -> list[str]:
        return [*choose(self.sources), *super().arguments(*more)]


def choose(sources: Path) -> list[str]:
    """What starts Python's ``-m cpumond`` from there."""
    return ["env", "-C", "/", f"PYTHONPATH={sources}"]


@pytest.fixture(scope="module")
def version_0_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sources."""
    command = ["git", "-C", str(REPOSITORY), "archive", COMMIT, "cpumond"]
    if shutil.which("git") is None or (made := subprocess.run(command, capture_output=True, check=False)).returncode:
        pytest.skip(f"the sources of 0.1 are in the repository's history (commit {COMMIT}), which is not here")
    target = tmp_path_factory.mktemp("version_0_1")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(target, filter="data")
    return target


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[VersionedScheduler]:
    """Its files in ``tmp_path``, and one address for all its runs."""
    process = VersionedScheduler(tmp_path)
    process.write_config(listen=f"127.0.0.1:{free_port()}")
    yield process
    process.close()


def test_there_and_back_with_jobs_running(
    version_0_1: Path, scheduler: VersionedScheduler, agent: AgentProcess, cgroups: CgroupTree
) -> None:
    def run_scheduler(sources: Path) -> None:
        scheduler.sources = sources
        scheduler.start()
        assert scheduler.get("status")["version"] == version[sources]

    def run_agent(sources: Path) -> None:
        agent.prefix = choose(sources)
        agent.start(CONFIG.format(url=scheduler.url, root=cgroups.top))

    def running() -> list[str]:
        return sorted(job["id"] for job in scheduler.get(f"operations/{operation}/jobs")["jobs"])

    def check_jobs() -> None:
        """The same two processes, known to the scheduler as running, and their node is there."""
        wait_until(lambda: scheduler.get("nodes/test-node")["is_online"], "the agent has registered")
        wait_until(lambda: running() == jobs, "both jobs are known")
        assert [is_over(process) for process in processes] == [False, False]
        assert len(pids()) == 2, "none was started anew"

    def pids() -> list[int]:
        return [int(line) for line in started.read_text().split()] if started.exists() else []

    version = {version_0_1: "0.1.0", REPOSITORY: "0.2.0"}
    started = scheduler.directory / "started"
    database, copy, kept = (scheduler.state_dir / f"scheduler.db{end}" for end in ("", ".v1", ".0.2"))

    run_scheduler(version_0_1)
    scheduler.create_pool("before")
    task = {"job_count": 2, "cpu_limit": 0.5, "memory_limit": 2**26, "command": f"echo $$ >>{started}; exec sleep 900"}
    operation = scheduler.post("operations", {"spec": {"pool": "before", "tasks": {"t": task}}})["id"]
    run_agent(version_0_1)
    wait_until(lambda: len(pids()) == 2, "both jobs run", 60.0)
    jobs, processes = running(), [psutil.Process(pid) for pid in pids()]

    # The scheduler first, then the agent.
    assert scheduler.stop() == 0
    run_scheduler(REPOSITORY)
    assert copy.is_file()
    check_jobs()
    scheduler.create_pool("after")
    scheduler.post("rollout", {"nodes_filter": "%true", "level": "quota", "canary_ratio": 1.0})
    [shown] = scheduler.get("fleet")["agents"]
    assert (shown["id"], shown["about"]) == ("test-node", None), "an old agent tells nothing of itself"
    short = scheduler.start_operation("after", cpu=0.5)
    wait_until(lambda: scheduler.state_of(short) == "completed", "an old agent runs the jobs of a new scheduler")
    assert agent.stop() == 0
    run_agent(REPOSITORY)
    check_jobs()
    assert agent.events("jobs_adopted")[-1]["adopted"] == 2

    # Back: the agent first.
    assert agent.stop() == 0
    run_agent(version_0_1)
    check_jobs()
    assert scheduler.stop() == 0
    scheduler.sources = version_0_1
    code, said = scheduler.refuse()
    assert code == 69
    assert f"or put back the copy {copy}" in said
    database.rename(kept)
    copy.rename(database)
    run_scheduler(version_0_1)
    check_jobs()
    assert scheduler.request("GET", "trees/default/pools/after").status_code == 404

    # The wrong way round: refused, and the jobs run on.
    assert agent.stop() == 0
    run_agent(REPOSITORY)
    wait_until(lambda: "answered 422" in agent.log(), "the old scheduler refuses the new agent")
    assert [is_over(process) for process in processes] == [False, False]

    # Forward again, to what the new version had.
    assert scheduler.stop() == 0
    kept.rename(database)
    run_scheduler(REPOSITORY)
    check_jobs()
    assert scheduler.request("GET", "trees/default/pools/after").status_code == 200
    scheduler.post(f"operations/{operation}/abort", {})
    wait_until(lambda: all(is_over(process) for process in processes), "the jobs end")
    assert agent.stop() == 0
    assert os.path.isfile(scheduler.state_dir / "history.db.aside"), "0.1 began a history of its own"
