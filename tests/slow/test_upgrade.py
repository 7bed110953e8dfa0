"""The steps of docs/upgrade.md with the programs of 0.1 and 0.2 from this repository's history (their libraries are
this environment's), and jobs that run all the time."""

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
from real_cgroups import CgroupTree
from scheduler_process import SchedulerProcess
from waiting import is_over, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
COMMITS = {"0.1": "f3cfea2", "0.2": "3d5ecf5"}
"""Those of docs/upgrade.md: the databases of 0.1 have schema 1, its scheduler knows no keys of nodes."""
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


def take_sources(version: str, tmp_path: Path) -> Path:
    command = ["git", "-C", str(REPOSITORY), "archive", COMMITS[version], "cpumond"]
    if shutil.which("git") is None or (made := subprocess.run(command, capture_output=True, check=False)).returncode:
        pytest.skip(f"{version} is in the repository's history (commit {COMMITS[version]}), which is not here")
    target = tmp_path / "earlier"
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


class Host:
    """One node and its scheduler, each in the version that its sources are, and a job that tells when it starts."""

    def __init__(self, scheduler: VersionedScheduler, agent: AgentProcess, root: str) -> None:
        self.scheduler, self.agent, self._root = scheduler, agent, root
        self.database = scheduler.state_dir / "scheduler.db"
        self._started = scheduler.directory / "started"
        self.operation = ""
        self.jobs: list[str] = []
        self.processes: list[psutil.Process] = []

    def run_scheduler(self, sources: Path) -> None:
        self.scheduler.sources = sources
        self.scheduler.start()

    def run_agent(self, sources: Path) -> None:
        self.agent.prefix = choose(sources)
        self.agent.start(CONFIG.format(url=self.scheduler.url, root=self._root))

    def go_back(self, sources: Path) -> str:
        """The agent first, then the scheduler, which must refuse the newer store: the sentence it gives."""
        assert self.agent.stop() == 0
        self.run_agent(sources)
        self.check_jobs()
        assert self.scheduler.stop() == 0
        self.scheduler.sources = sources
        code, said = self.scheduler.refuse()
        assert code == 69
        return said

    def run_jobs(self, pool: str) -> None:
        """Start an operation of two jobs, and wait until both run."""
        task = {
            "job_count": 2, "cpu_limit": 0.5, "memory_limit": 2**26,
            "command": f"echo $$ >>{self._started}; exec sleep 900",
        }  # fmt: skip
        self.operation = self.scheduler.post("operations", {"spec": {"pool": pool, "tasks": {"t": task}}})["id"]
        wait_until(lambda: len(self._pids()) == 2, "both jobs run", 60.0)
        self.jobs, self.processes = self.running(), [psutil.Process(pid) for pid in self._pids()]

    def running(self) -> list[str]:
        return sorted(job["id"] for job in self.scheduler.get(f"operations/{self.operation}/jobs")["jobs"])

    def _pids(self) -> list[int]:
        return [int(line) for line in self._started.read_text().split()] if self._started.exists() else []

    def check_jobs(self) -> None:
        """The same two processes, known to the scheduler as running, and their node is there."""
        wait_until(lambda: self.scheduler.get("nodes/test-node")["is_online"], "the agent has registered")
        wait_until(lambda: self.running() == self.jobs, "both jobs are known")
        assert [is_over(process) for process in self.processes] == [False, False]
        assert len(self._pids()) == 2, "none was started anew"


@pytest.fixture
def host(scheduler: VersionedScheduler, agent: AgentProcess, cgroups: CgroupTree) -> Host:
    return Host(scheduler, agent, cgroups.top)


def test_from_the_first_version_and_back_with_jobs_running(host: Host, tmp_path: Path) -> None:
    version_0_1 = take_sources("0.1", tmp_path)
    scheduler, agent, database = host.scheduler, host.agent, host.database
    copy, kept = (database.with_name(f"scheduler.db{end}") for end in (".v1", ".0.2"))

    host.run_scheduler(version_0_1)
    assert scheduler.get("status")["version"] == "0.1.0"
    scheduler.create_pool("before")
    host.run_agent(version_0_1)
    host.run_jobs("before")

    # The scheduler first, then the agent.
    assert scheduler.stop() == 0
    host.run_scheduler(REPOSITORY)
    assert scheduler.get("status")["version"] != "0.1.0"
    assert copy.is_file()
    host.check_jobs()
    assert not os.path.exists(scheduler.state_dir / "history.db.aside"), "the history was summed up by day"
    scheduler.create_pool("after")
    scheduler.post("rollout", {"nodes_filter": "%true", "level": "quota", "canary_ratio": 1.0})
    [shown] = scheduler.get("fleet")["agents"]
    assert (shown["id"], shown["about"]) == ("test-node", None), "an old agent tells nothing of itself"
    short = scheduler.start_operation("after", cpu=0.5)
    wait_until(lambda: scheduler.state_of(short) == "completed", "an old agent runs the jobs of a new scheduler")
    assert agent.stop() == 0
    host.run_agent(REPOSITORY)
    host.check_jobs()
    assert agent.events("jobs_adopted")[-1]["adopted"] == 2

    assert f"or restore the copy {copy}" in host.go_back(version_0_1)
    database.rename(kept)
    copy.rename(database)
    host.run_scheduler(version_0_1)
    host.check_jobs()
    assert scheduler.request("GET", "trees/default/pools/after").status_code == 404

    # The wrong way round: refused, and the jobs run on.
    assert agent.stop() == 0
    host.run_agent(REPOSITORY)
    wait_until(lambda: "answered 422" in agent.log(), "the old scheduler refuses the new agent")
    assert [is_over(process) for process in host.processes] == [False, False]

    # Forward again, to what the new version had.
    assert scheduler.stop() == 0
    kept.rename(database)
    host.run_scheduler(REPOSITORY)
    host.check_jobs()
    assert scheduler.request("GET", "trees/default/pools/after").status_code == 200
    scheduler.post(f"operations/{host.operation}/abort", {})
    wait_until(lambda: all(is_over(process) for process in host.processes), "the jobs end")
    assert agent.stop() == 0
    assert os.path.isfile(scheduler.state_dir / "history.db.aside"), "0.1 began a history of its own"


def test_from_the_version_before_and_back_with_a_job_on_reclaimed_cpu(host: Host, tmp_path: Path) -> None:
    version_0_2 = take_sources("0.2", tmp_path)
    scheduler, agent, database = host.scheduler, host.agent, host.database
    copy = database.with_name("scheduler.db.0.2")

    host.run_scheduler(version_0_2)
    scheduler.create_pool("before")
    host.run_agent(version_0_2)
    host.run_jobs("before")

    assert scheduler.stop() == 0
    shutil.copyfile(database, copy)
    host.run_scheduler(REPOSITORY)
    host.check_jobs()
    assert not os.path.exists(scheduler.state_dir / "history.db.aside"), "the history was summed up by day"
    assert agent.stop() == 0
    host.run_agent(REPOSITORY)
    host.check_jobs()
    marked = scheduler.directory / "reclaimed"
    task = {"job_count": 1, "cpu_limit": 0.5, "memory_limit": 2**26, "command": f"echo $$ >{marked}; exec sleep 900"}
    spec = {"pool": "before", "require_reclaimed": True, "tasks": {"t": task}}
    reclaimed = scheduler.post("operations", {"spec": spec})["id"]
    wait_until(lambda: marked.exists() and marked.read_text().endswith("\n"), "a job on reclaimed CPU runs")
    process = psutil.Process(int(marked.read_text()))
    [job] = scheduler.get(f"operations/{reclaimed}/jobs")["jobs"]
    assert job["class"] == "reclaimed"

    # Back: no job on reclaimed CPU may run, since the old agent does not find its cgroup.
    scheduler.post(f"operations/{reclaimed}/abort", {})
    wait_until(lambda: is_over(process), "the job on reclaimed CPU ends")
    assert "this version cannot read: Object contains unknown field" in host.go_back(version_0_2)
    copy.rename(database)
    host.run_scheduler(version_0_2)
    host.check_jobs()
    assert scheduler.request("GET", f"operations/{reclaimed}").status_code == 404

    # Forward again.
    assert scheduler.stop() == 0
    assert agent.stop() == 0
    host.run_scheduler(REPOSITORY)
    host.run_agent(REPOSITORY)
    host.check_jobs()
    scheduler.post(f"operations/{host.operation}/abort", {})
    wait_until(lambda: all(is_over(process) for process in host.processes), "the jobs end")
    assert agent.stop() == 0
