"""Cgroups that are never lowered, whatever a source names: PID 1's and the agent's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpumond.host.cgroup.files import find_vital


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for process in ("self", "1"):
        (tmp_path / process).mkdir()
    find_vital.cache_clear()
    return tmp_path


def test_on_v2_both_are_known(proc: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/system.slice/cpumond.service\n")
    (proc / "1" / "cgroup").write_text("0::/init.scope\n")
    assert find_vital(str(proc)) == {
        "system.slice/cpumond.service": "this program itself runs in it", "init.scope": "PID 1 runs in it",
    }  # fmt: skip


def test_on_v1_the_hierarchy_of_the_cpu_controller_counts(proc: Path) -> None:
    lines = ["12:pids:/other", "4:cpu,cpuacct:/system.slice/cpumond.service", "1:name=systemd:/a", "0::/b"]
    (proc / "self" / "cgroup").write_text("\n".join(lines))
    (proc / "1" / "cgroup").write_text("4:cpuacct,cpu:/\n0::/init.scope\n")
    assert find_vital(str(proc)) == {"system.slice/cpumond.service": "this program itself runs in it"}


def test_processes_that_tell_nothing_have_none(proc: Path) -> None:
    (proc / "1" / "cgroup").write_text("")
    assert find_vital(str(proc)) == {}
