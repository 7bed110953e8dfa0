"""Quotas that are raised before anything else after an agent's death."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpumond.agent import state_file
from cpumond.agent.limits import first_aid
from cpumond.agent.limits.first_aid import raise_quotas
from cpumond.agent.limits.written import LimitLog
from cpumond.agent.state_file import Original, Originals, read_boot_id, save
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.testing import make_tree, make_v2_host, v2_cgroup, write_mountinfo

FULL = CpuSettings(200_000, 100_000)


class Host:
    """A machine with jobs, and the state of an agent that died."""

    def __init__(self, directory: Path, **jobs: str) -> None:
        self.directory = directory
        self.root = directory / "cgroup"
        self.mountinfo = make_v2_host(directory, {name: v2_cgroup(quota=quota) for name, quota in jobs.items()})

    def remember(self, **originals: CpuSettings) -> None:
        cgroups = {name: Original(self.inode(name), settings) for name, settings in originals.items()}
        save(str(self.directory / "originals.state"), Originals(read_boot_id(), cgroups))

    def inode(self, name: str) -> int:
        return os.stat(self.root / name).st_ino

    def help(self, **environment: str) -> int:
        told = {"SERVICE_RESULT": "signal", "STATE_DIRECTORY": f"{self.directory}:/elsewhere", **environment}
        return raise_quotas(told, self.mountinfo)

    def quota(self, name: str) -> str:
        # A write to a cgroup's file is a whole value; in a plain file the end of a longer one before stays.
        return (self.root / name / "cpu.max").read_text().partition("\n")[0]


def test_a_quota_that_was_lowered_is_raised(tmp_path: Path) -> None:
    host = Host(tmp_path, a="50000 100000", b="500 100000")
    host.remember(a=FULL, b=CpuSettings(None, 100_000))
    assert host.help() == 2
    assert (host.quota("a"), host.quota("b")) == ("200000 100000", "max 100000")


def test_on_v1_as_well(tmp_path: Path) -> None:
    files = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}
    make_tree(tmp_path / "cpu", {"a": files, "b": {**files, "cpu.cfs_quota_us": "-1\n"}})
    mountinfo = write_mountinfo(tmp_path / "mountinfo", {f"{tmp_path}/cpu": "cpu,cpuacct", f"{tmp_path}": "cgroup2"})
    cgroups = {name: Original(os.stat(tmp_path / "cpu" / name).st_ino, FULL) for name in ("a", "b")}
    save(str(tmp_path / "originals.state"), Originals(read_boot_id(), cgroups))
    assert raise_quotas({"SERVICE_RESULT": "signal", "RUNTIME_DIRECTORY": str(tmp_path)}, mountinfo) == 1
    assert (tmp_path / "cpu" / "a" / "cpu.cfs_quota_us").read_text().strip() == "200000"
    assert (tmp_path / "cpu" / "b" / "cpu.cfs_quota_us").read_text() == "-1\n"


def test_renamed_cgroups_come_last_each_directory_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"j{number}" for number in range(6)]
    files = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}
    make_tree(tmp_path / "cpu" / "jobs", dict.fromkeys(names, files))
    mountinfo = write_mountinfo(tmp_path / "mountinfo", {str(tmp_path / "cpu"): "cpu"})
    jobs = tmp_path / "cpu" / "jobs"
    cgroups = {f"jobs/{name}": Original(os.stat(jobs / name).st_ino, FULL) for name in names}
    cgroups |= {f"jobs/gone{number}": Original(10**15 + number, FULL) for number in range(50)}
    save(str(tmp_path / "originals.state"), Originals(read_boot_id(), cgroups))
    (jobs / "j0").rename(jobs / "other")
    listed: list[str] = []
    scan = os.scandir

    def count(path: str) -> object:
        # Those that are where they were have their quota by now.
        assert (jobs / "j5" / "cpu.cfs_quota_us").read_text().strip() == "200000"
        listed.append(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", count)
    assert raise_quotas({"SERVICE_RESULT": "signal", "RUNTIME_DIRECTORY": str(tmp_path)}, mountinfo) == 6
    assert (jobs / "other" / "cpu.cfs_quota_us").read_text().strip() == "200000"
    assert listed == [str(jobs)]


@pytest.mark.parametrize("quota", ["200000 100000", "300000 100000", "max 100000", "1000 500000"])
def test_what_is_as_high_or_not_one_write_away_is_left_alone(tmp_path: Path, quota: str) -> None:
    host = Host(tmp_path, a=quota)
    host.remember(a=FULL)
    assert host.help() == 0
    assert host.quota("a") == quota


@pytest.mark.parametrize("why", ["not the end of the agent", "another boot", "another cgroup", "a weight"])
def test_what_is_not_its_business_is_left_alone(tmp_path: Path, why: str) -> None:
    host = Host(tmp_path, a="50000 100000")
    inode = host.inode("a") + (why == "another cgroup")
    original = Original(inode, FULL, ("weight",)) if why == "a weight" else Original(inode, FULL)
    boot_id = "another" if why == "another boot" else read_boot_id()
    save(str(tmp_path / "originals.state"), Originals(boot_id, {"a": original, "gone": Original(7, FULL)}))
    end = {} if why == "not the end of the agent" else {"SERVICE_RESULT": "signal"}
    assert raise_quotas({"STATE_DIRECTORY": str(tmp_path), **end}, host.mountinfo) == 0
    assert host.quota("a") == "50000 100000"


@pytest.mark.parametrize("damage", [b"", b"x", b"cpumond-state 1 sha256=0\n{}", None])
def test_a_damaged_file_gives_way_to_its_copy(tmp_path: Path, damage: bytes | None) -> None:
    host = Host(tmp_path, a="50000 100000")
    host.remember(a=FULL)
    (tmp_path / "run").mkdir()
    (tmp_path / "originals.state").rename(tmp_path / "run" / "originals.state")
    if damage is not None:
        (tmp_path / "originals.state").write_bytes(damage)
    assert host.help(RUNTIME_DIRECTORY=str(tmp_path / "run")) == 1


def test_no_file_at_all_is_no_matter(tmp_path: Path) -> None:
    assert Host(tmp_path, a="50000 100000").help() == 0
    assert raise_quotas({"SERVICE_RESULT": "success"}) == 0


def test_it_needs_nothing_but_the_interpreter() -> None:
    program = "import sys, cpumond.agent.limits.first_aid; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=250, check=True
    )
    assert "json" in done.stdout.split()
    assert "msgspec" not in done.stdout.split()
    loaded = {name for name in done.stdout.split() if name.startswith("cpumond.")}
    assert loaded == {"cpumond.agent", "cpumond.agent.limits", "cpumond.agent.limits.first_aid"}


def test_its_names_are_those_of_the_state_file() -> None:
    assert (first_aid.STATE_FILE, first_aid.BOOT_ID_PATH) == (state_file.STATE_FILE, state_file.BOOT_ID_PATH)


def test_less_that_somebody_has_ordered_since_is_left_alone(tmp_path: Path) -> None:
    host = Host(tmp_path, a="60000 100000", b="50000 100000")
    host.remember(a=FULL, b=FULL)
    log = LimitLog(str(tmp_path / first_aid.WRITTEN_FILE))
    for name in ("a", "b"):
        log.note(host.inode(name), FULL, CpuSettings(50_000, 100_000))
    log.close()
    assert host.help(RUNTIME_DIRECTORY=str(tmp_path)) == 1
    assert (host.quota("a"), host.quota("b")) == ("60000 100000", "200000 100000")
