"""Runs inside the guest: what every executor does (``executor_contract.py``), for the kind "systemd"."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, "/in/site")

import msgspec
import pytest
from executor_contract import HOG, ExecutorContract, Rig, read_settings
from waiting import wait_until

from cpumond.core.job_cgroups import IDLE_SLICE, JOBS_SLICE_CGROUP
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.host.cgroup.settings import compute_start_weight
from cpumond.host.executor.model import Ended, Launch, Started
from cpumond.host.executor.systemd.executor import SystemdExecutor
from cpumond.host.executor.systemd.unit import UNIT_PREFIX, unit_name
from cpumond.host.systemd.properties import shares_of

IS_V2 = Path("/sys/fs/cgroup/cgroup.procs").exists()
ROOT = Path("/sys/fs/cgroup", "" if IS_V2 else "unified")


class UnitCgroups:
    """The cgroups that systemd makes for jobs, as the rig asks for them."""

    idle_parent = IDLE_SLICE

    def path(self, job_id: str) -> str:
        above = IDLE_SLICE if (ROOT / IDLE_SLICE / unit_name(job_id)).is_dir() else JOBS_SLICE_CGROUP
        return f"{above}/{unit_name(job_id)}"

    def list_processes(self, job_id: str) -> list[int]:
        try:
            return [int(pid) for pid in (ROOT / self.path(job_id) / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def kill(self, job_id: str) -> None:
        for pid in self.list_processes(job_id):
            os.kill(pid, signal.SIGKILL)

    def list_job_ids(self) -> list[str]:
        places = [ROOT / above for above in (JOBS_SLICE_CGROUP, IDLE_SLICE)]
        found = [path for place in places for path in place.glob(f"{UNIT_PREFIX}*.service")]
        return [path.stem.removeprefix(UNIT_PREFIX) for path in found]


class UnitRig(Rig):
    """No job id is used twice: the journal keeps what a job wrote for longer than a test."""

    numbers = itertools.count()

    def describe(self, argv: list[str], **changes: Any) -> Launch:
        changes.setdefault("job_id", f"job-{next(self.numbers)}")
        return super().describe(argv, **changes)


def list_units() -> str:
    command = ["systemctl", "list-units", "--all", "--plain", "--no-legend", f"{UNIT_PREFIX}*"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    cgroups: Any = UnitCgroups()
    hierarchies = open_hierarchies()
    if hierarchies.cpuacct_root != hierarchies.cpu_root:
        # Where cpu and cpuacct are mounted apart, systemd uses the first only.
        hierarchies = msgspec.structs.replace(hierarchies, cpuacct_root=hierarchies.unified_root)
    tree, runtime_dir = JobCgroupTree(hierarchies, ""), str(tmp_path / "run")
    opened = UnitRig(lambda: SystemdExecutor(tree, runtime_dir), cgroups, hierarchies, tmp_path / "jobs")
    yield opened
    for job_id in cgroups.list_job_ids():
        opened.executor.kill(job_id)
    # Units of jobs that it was not told of are removed now and then.
    wait_until(lambda: not (UnitCgroups().list_job_ids() or list_units()), "no unit of a job is left", 60.0)
    opened.close()


class TestSystemdExecutor(ExecutorContract):
    # The journal has limits of its own, on the size of all logs and on the rate of each.
    test_a_flood_stays_below_the_cap = None  # type: ignore[assignment]

    def test_its_secrets_are_in_no_property(self, rig: Rig) -> None:
        """Every user of the host can read a unit's environment."""
        job_id = rig.shell("exec sleep 1000", secrets={"KEY": "hunter2"}, environment={"SHOWN": "shown"})
        rig.wait(Started, job_id)
        command = ["systemctl", "show", "--all", unit_name(job_id)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert ("SHOWN=shown" in told, "hunter2" in told) == (True, False)

    def test_counters_of_the_whole_job(self, rig: Rig) -> None:
        """With cpu and cpuacct mounted apart systemd does not count CPU time."""
        job_id = rig.shell("sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done' & wait")
        ended = rig.wait(Ended, job_id)
        assert (ended.cpu_seconds is None and not IS_V2) or 0.01 < ended.cpu_seconds < 20.0
        assert ended.max_memory is None or 0 < ended.max_memory < 1 << 30

    @staticmethod
    def compute_weight(cores: float, version: int) -> int:
        """On v1 systemd makes shares of its CPUWeight=."""
        weight = compute_start_weight(cores, 2)
        return weight if version == 2 else shares_of(weight)

    def test_the_class_and_weights_hold_when_systemd_reads_its_units_again(self, rig: Rig) -> None:
        job_id = rig.start("sleep", "1000", cpu_limit=0.5, has_ceiling=False, reclaimed=True)
        place = rig.wait(Started, job_id).cgroup
        before = read_settings(rig.hierarchies, place)
        for verb in ("daemon-reload", "daemon-reexec"):
            subprocess.run(["systemctl", verb], timeout=60, check=True)
            # What it writes to a cgroup follows; another unit that runs says that it was done.
            assert rig.wait(Ended, rig.start("true")).exit_code == 0
            assert (rig.is_idle(), read_settings(rig.hierarchies, place)) == (True, before)

    def test_a_slice_that_was_stopped_is_made_again(self, rig: Rig) -> None:
        """As after a boot."""
        job_id = rig.start("sleep", "1000", reclaimed=True)
        rig.wait(Started, job_id)
        subprocess.run(["systemctl", "stop", IDLE_SLICE], timeout=60, check=True)
        rig.wait(Ended, job_id)
        assert not rig.is_idle()
        again = rig.start("sleep", "1000", reclaimed=True)
        rig.wait(Started, again)
        assert rig.is_idle()

    def test_too_much_memory_is_told(self, rig: Rig) -> None:
        """On v1 systemd does not learn why the kernel killed."""
        if IS_V2:
            super().test_too_much_memory_is_told(rig)
            return
        job_id = rig.start(sys.executable, "-S", "-c", HOG, memory_limit=64 << 20)
        assert rig.wait(Ended, job_id).signal == 9
        rig.assert_nothing_left(job_id)


class Recorder:
    """A plugin of pytest that keeps how each test went."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        before = self.facts.get(name, {"outcome": "passed"})
        if (report.when == "call" or report.outcome != "passed") and before["outcome"] == "passed":
            self.facts[name] = {"outcome": report.outcome, "took_s": report.duration, "text": report.longreprtext}
            Path("/out/facts.json").write_text(json.dumps(self.facts, indent=1))  # as far as it is


def main() -> None:
    for controller in () if IS_V2 else ("memory", "pids"):
        subprocess.run(["mount", "-o", "remount,bind,rw", f"/sys/fs/cgroup/{controller}"], timeout=60, check=True)
    subprocess.run(["systemctl", "daemon-reexec"], timeout=60, check=True)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-p", "no:cacheprovider", "-q", "-W", "error", "-o", "markers=alone", "/in/systemd_contract.py"]
    pytest.main(options, [Recorder()])
    journal = subprocess.run(["journalctl", "--no-pager"], capture_output=True, text=True, timeout=60, check=True)
    Path("/out/journal.txt").write_text(journal.stdout)


if __name__ == "__main__":
    main()
