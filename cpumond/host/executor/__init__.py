"""Running the jobs that a scheduler orders.

An executor starts processes, each job in a cgroup of its own, and says what became of them. It decides nothing: when a
job is interrupted and when it is killed is the agent's business. Nothing here waits for a job: what happens shows in
``poll``, and ``fileno`` is readable when it has news. What it runs outlives the agent; ``recover`` finds it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The keeper, a part of this package, runs with the standard library only.
    from cpumond.host.cgroup.idle import IdleClass
    from cpumond.host.cgroup.job_tree import JobCgroupTree
    from cpumond.host.executor.model import Executor


def make_executor(kind: str, runtime_dir: str, cgroups: JobCgroupTree) -> Executor:
    """The executor of ``executor.kind``; its ``recover`` says what is not possible."""
    if kind == "cgroup":
        from cpumond.host.executor.cgroup import CgroupExecutor

        return CgroupExecutor(cgroups, runtime_dir)
    from cpumond.host.executor.systemd.executor import SystemdExecutor  # only this kind needs the bus library

    return SystemdExecutor(cgroups, runtime_dir)


def find_idle_class(kind: str, cgroups: JobCgroupTree) -> IdleClass:
    """The class in which an executor of this kind runs jobs on reclaimed CPU; nothing is made or asked but files."""
    from cpumond.core.job_cgroups import IDLE_SLICE
    from cpumond.host.cgroup.idle import IdleParent

    if kind == "cgroup":
        return cgroups.find_idle_class()
    return IdleParent(cgroups.hierarchies, IDLE_SLICE).describe()
