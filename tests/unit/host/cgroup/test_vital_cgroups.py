"""Cgroups that are never lowered, whatever a source names: PID 1's and the agent's own."""

import os
from pathlib import Path

import pytest

from cpumond.host.cgroup.files import find_vital
from cpumond.testing import make_tree

OWN = "this program itself runs in it"


class Host:
    """What ``/proc`` tells two processes of their cgroups, and a hierarchy."""

    def __init__(self, directory: Path) -> None:
        self.proc, self.root = directory / "proc", directory / "cpu"
        make_tree(self.root, {})

    def write(self, own: str, first: str) -> None:
        make_tree(self.proc, {"self": {"cgroup": own}, "1": {"cgroup": first}})

    def find(self) -> dict[str, str]:
        return find_vital(str(self.root), str(self.proc))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_on_v2_both_are_known(host: Host) -> None:
    host.write("0::/system.slice/cpumond.service\n", "0::/init.scope\n")
    assert host.find() == {"system.slice/cpumond.service": OWN, "init.scope": "PID 1 runs in it"}


def test_on_v1_the_hierarchy_of_the_cpu_controller_counts(host: Host) -> None:
    lines = ["12:pids:/other", "4:cpu,cpuacct:/system.slice/cpumond.service", "1:name=systemd:/a", "0::/b"]
    host.write("\n".join(lines), "4:cpuacct,cpu:/\n0::/init.scope\n")
    assert host.find() == {"system.slice/cpumond.service": OWN}


def test_processes_that_tell_nothing_have_none(host: Host) -> None:
    host.write("", "")
    assert host.find() == {}


@pytest.mark.parametrize("told", ["0::/\n", "0::/pod/agent\n", "0::/../other\n", ""])
def test_in_a_cgroup_namespace_its_own_a_process_is_found_by_its_pid(host: Host, told: str) -> None:
    """The path begins at the namespace's root, the mount at the host's. Processes of other PID namespaces are 0."""
    host.write(told, "0::/../..\n")
    pid = os.getpid()
    make_tree(host.root, {"cgroup.procs": "0\n1\n", "pod": {"cgroup.procs": "0\n", "agent": {"cgroup.procs": ""}}})
    make_tree(host.root / "kube/pod", {"cgroup.procs": f"{pid}0\n", "agent": {"cgroup.procs": f"0\n{pid}\n"}})
    assert host.find() == {"kube/pod/agent": OWN}


def test_where_no_process_can_be_seen_what_is_told_counts(host: Host) -> None:
    host.write("0::/a\n", "0::/../b\n")
    make_tree(host.root / "a", {"cgroup.procs": "0\n"})
    assert host.find() == {"a": OWN}
