"""What a job of Slurm finds on this host."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from cpumond.host.executor.model import ExecutorError, Launch
from cpumond.host.executor.slurm import place
from cpumond.host.executor.slurm.place import (
    find_interpreter,
    find_mounts,
    find_package,
    list_limits,
    read_guests_name,
)

MOUNTINFO = """\
30 1 0:26 / /c/unified rw - cgroup2 cgroup2 rw
31 1 0:27 / /c/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 1 0:28 / /c/memory rw - cgroup cgroup rw,memory
33 1 0:28 / /other/memory rw - cgroup cgroup rw,memory
"""

TAKES_A_NAME = """
import socket, sys
taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
taken.bind("\\0" + sys.argv[1])
if sys.argv[2] == "listens":
    taken.listen()
print(flush=True)
sys.stdin.read()
"""


def limits_of(**changes) -> dict[tuple[str, str], str]:
    launch = Launch(**{
        "job_id": "j", "argv": ["true"], "environment": {}, "user": "", "working_directory": "/", "cpu_limit": 1.5,
        "memory_limit": 0, "directory": "/d", "max_log_bytes": 1, **changes,
    })  # fmt: skip
    return {(controller, name): text for controller, name, text in list_limits(launch)}


def test_the_quota_is_that_of_the_order_on_both_versions():
    assert limits_of() == {
        ("", "cpu.max"): "150000 100000", ("cpu", "cpu.cfs_period_us"): "100000", ("cpu", "cpu.cfs_quota_us"): "150000",
    }  # fmt: skip
    assert limits_of(cpu_limit=0.001)["", "cpu.max"] == "1000 100000", "the kernel takes no less"


def test_memory_and_processes():
    limits = limits_of(memory_limit=5000, max_tasks=7)
    assert limits["", "memory.max"] == limits["memory", "memory.limit_in_bytes"] == "5000"
    assert limits["", "memory.swap.max"] == "0"
    assert limits["", "pids.max"] == "8", "the step is one more"


def test_mounts_by_controller(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTINFO)
    found = find_mounts(str(path))
    assert found[""] == "/c/unified"
    assert found["cpu"] == found["cpuacct"] == "/c/cpu,cpuacct"
    assert found["memory"] == "/c/memory"
    with pytest.raises(ExecutorError, match="cannot read"):
        find_mounts(str(tmp_path / "none"))


def test_the_python_is_one_that_everybody_may_run(monkeypatch, tmp_path):
    monkeypatch.setattr(place, "find_package", lambda: "/usr")
    monkeypatch.setattr(place.keeper, "PROGRAM", "/usr")
    private = tmp_path / "private" / "python"
    private.parent.mkdir(mode=0o700)
    private.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(private))
    monkeypatch.setattr(os.path, "realpath", lambda path: path)
    assert find_interpreter() == "/usr/bin/python3"


def test_a_package_that_others_cannot_read_is_refused(monkeypatch, tmp_path):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(place, "find_package", lambda: str(private))
    with pytest.raises(ExecutorError, match="jobs of other users cannot read"):
        find_interpreter()


def test_the_package_is_where_it_was_imported_from():
    assert os.path.samefile(os.path.join(find_package(), "cpumond/host/executor/slurm/place.py"), place.__file__)


def test_the_keepers_name_is_the_same_for_all_jobs(tmp_path):
    path = str(tmp_path / "slurm-guests")
    name = read_guests_name(path)
    assert (len(name), os.stat(path).st_mode & 0o777) == (40, 0o600)
    assert read_guests_name(path) == name
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as keeper:
        keeper.bind(f"\0{name}")
        keeper.listen()
        assert read_guests_name(path) == name, "a keeper has it"
    (tmp_path / "slurm-guests").write_text("nonsense")
    assert read_guests_name(path) not in (name, "nonsense")


@pytest.mark.parametrize("how", ["listens", "only has it"])
def test_a_name_that_another_user_has_taken_is_given_up(tmp_path, how):
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    path = str(tmp_path / "slurm-guests")
    name = read_guests_name(path)
    argv = ["/usr/bin/python3", "-c", TAKES_A_NAME, name, how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=65534) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        assert read_guests_name(path) != name
        other.stdin.close()
