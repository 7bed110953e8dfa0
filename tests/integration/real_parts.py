"""Fixtures of real parts: cgroups of our own, load in them, agent, scheduler and engines as processes of their own."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from real_cgroups import CgroupTree
from scheduler_process import SchedulerProcess

from cpumond.core.errors import CpumondError
from cpumond.host.cgroup.mounts import Hierarchies, open_hierarchies

_numbers = itertools.count()


@pytest.fixture(scope="session")
def hierarchies() -> Hierarchies:
    """The machine's cgroup hierarchies, where we may make cgroups."""
    try:
        found = open_hierarchies()
    except CpumondError as error:
        pytest.skip(f"needs a cgroup hierarchy with the cpu controller: {error}")
    if not os.access(found.cpu_root, os.W_OK):
        pytest.skip(f"needs the right to make cgroups in {found.cpu_root} (run as root)")
    return found


@pytest.fixture
def cgroups(hierarchies: Hierarchies) -> Iterator[CgroupTree]:
    with CgroupTree(hierarchies, f"cpumond-test-{os.getpid()}-{next(_numbers)}") as tree:
        yield tree


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent as a process of its own, with its directories under ``tmp_path``; started by the test."""
    process = AgentProcess(tmp_path)
    yield process
    process.close()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerProcess]:
    """A scheduler as a process of its own, with its files in ``tmp_path``; started by the test."""
    process = SchedulerProcess(tmp_path)
    yield process
    process.close()
