"""Run the jobs that a scheduler orders on this node.

An executor starts processes, each job in its own cgroup, and reports their ends. It decides nothing: the agent decides
when a job is interrupted and killed. No method waits for a job: ``poll`` returns events, and the descriptor ``fileno``
is readable while there are any. Jobs outlive the agent; ``recover`` finds them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Not at run time: the keeper is a part of this package and has only the standard library.
    from cpumond.host.cgroup.idle import IdleClass
    from cpumond.host.cgroup.job_tree import JobCgroupTree
    from cpumond.host.executor.model import Executor


def make_executor(kind: str, runtime_dir: str, cgroups: JobCgroupTree) -> Executor:
    """Make the executor of ``executor.kind``; if jobs cannot run here, its ``recover`` says why."""
    if kind == "cgroup":
        from cpumond.host.executor.cgroup import CgroupExecutor

        return CgroupExecutor(cgroups, runtime_dir)
    from cpumond.host.executor.systemd.executor import SystemdExecutor  # only this kind needs the library for the bus

    return SystemdExecutor(cgroups, runtime_dir)


def find_idle_class(kind: str, cgroups: JobCgroupTree) -> IdleClass:
    """The class of jobs on reclaimed CPU for an executor of this kind; only files are read, nothing is created."""
    from cpumond.core.job_cgroups import IDLE_SLICE
    from cpumond.host.cgroup.idle import IdleParent

    if kind == "cgroup":
        return cgroups.find_idle_class()
    return IdleParent(cgroups.hierarchies, IDLE_SLICE).find_class()
