"""From a process to the cgroup of its job."""

import os

import pytest

from cpumond.host.engine.processes import find_engine_cgroup, parse_engine_cgroup

ID = "4f" * 32


@pytest.mark.parametrize(("text", "version", "path"), [
    (f"9:cpu,cpuacct:/docker/{ID}\n0::/docker/{ID}\n", 1, f"docker/{ID}"),
    (f"9:cpuacct:/other\n8:cpu:/docker/{ID}\n", 1, f"docker/{ID}"),
    (f"9:cpuset:/docker/{ID}\n0::/docker/{ID}\n", 1, None),
    (f"0::/system.slice/docker-{ID}.scope\n", 2, f"system.slice/docker-{ID}.scope"),
    # What the container makes below its own is its own.
    (f"0::/system.slice/docker-{ID}.scope/init.scope\n", 2, f"system.slice/docker-{ID}.scope"),
    (f"0::/machine.slice/libpod-{ID}.scope/container\n", 2, f"machine.slice/libpod-{ID}.scope/container"),
    (f"0::/machine.slice/libpod-{ID}.scope/container/sub\n", 2, f"machine.slice/libpod-{ID}.scope/container"),
    # One inside of another: the outer one has the id.
    (f"8:cpu:/docker/{ID}/docker/{'ab' * 32}\n", 1, f"docker/{ID}"),
    # Not the job's.
    (f"0::/system.slice/docker-{'ab' * 32}.scope\n", 2, None),
    ("0::/\n", 2, None),
    (f"0::/../docker/{ID}\n", 2, None),
    (f"0::/a\tb/{ID}\n", 2, None),
    ("", 2, None),
    ("nonsense\n", 1, None),
])  # fmt: skip
def test_the_whole_cgroup_of_a_job_by_its_first_process(text, version, path):
    assert parse_engine_cgroup(text, ID, version) == path


def test_a_process_that_is_gone_or_another_ones_has_none():
    assert find_engine_cgroup(2**22 + 1, ID, 1) is None
    assert find_engine_cgroup(os.getpid(), ID, 1) is None
