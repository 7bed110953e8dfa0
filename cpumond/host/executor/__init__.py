"""Running the jobs that a scheduler orders.

An executor starts processes, each job in a cgroup of its own, and says what became of them. It decides nothing: when a
job is interrupted and when it is killed is the agent's business. Nothing here waits for a job: what happens shows in
``poll``, and ``fileno`` is readable when it has news. What it runs outlives the agent; ``recover`` finds it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    # The keeper, a part of this package, runs with the standard library only.
    from cpumond.host.cgroup.idle import IdleClass
    from cpumond.host.cgroup.job_tree import JobCgroupTree
    from cpumond.host.executor.model import Executor


class Setting(NamedTuple):
    """What executors are made with; each takes what it needs."""

    runtime_dir: str
    cgroups: JobCgroupTree


def _make_cgroup(setting: Setting) -> Executor:
    from cpumond.host.executor.cgroup import CgroupExecutor

    return CgroupExecutor(setting.cgroups, setting.runtime_dir)


def _make_systemd(setting: Setting) -> Executor:
    # Only this kind needs the bus library.
    from cpumond.host.executor.systemd.executor import SystemdExecutor

    return SystemdExecutor(setting.cgroups)


EXECUTORS: Final[dict[str, Callable[[Setting], Executor]]] = {
    "cgroup": _make_cgroup,
    "systemd": _make_systemd,
}
"""``executor.kind`` -> how it is made; ``recover`` says what is not possible."""


def find_idle_class(kind: str, cgroups: JobCgroupTree) -> IdleClass:
    """The class in which an executor of this kind runs jobs on reclaimed CPU; nothing is made or asked but files."""
    from cpumond.core.job_cgroups import IDLE_SLICE
    from cpumond.host.cgroup.idle import IdleParent

    if kind == "cgroup":
        return cgroups.find_idle_class()
    return IdleParent(cgroups.hierarchies, IDLE_SLICE).describe()
