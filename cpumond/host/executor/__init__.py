"""Running the jobs that a scheduler orders.

An executor starts processes, each job in a cgroup of its own, and says what became of them. It decides nothing: when a
job is interrupted and when it is killed is the agent's business. Nothing here waits for a job: what happens shows in
``poll``, and ``fileno`` is readable when it has news. What it runs outlives the agent; ``recover`` finds it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    # The keeper, a part of this package, runs with the standard library only.
    from cpumond.host.cgroup.job_tree import JobCgroupTree
    from cpumond.host.executor.model import Executor


def _make_cgroup(runtime_dir: str, cgroups: JobCgroupTree) -> Executor:
    from cpumond.host.executor.cgroup import CgroupExecutor

    return CgroupExecutor(cgroups, runtime_dir)


def _make_systemd(runtime_dir: str, cgroups: JobCgroupTree) -> Executor:  # noqa: ARG001 - all factories are called alike
    # Only this kind needs the bus library.
    from cpumond.host.executor.systemd.executor import SystemdExecutor

    return SystemdExecutor(cgroups)


EXECUTORS: Final[dict[str, Callable[[str, JobCgroupTree], Executor]]] = {
    "cgroup": _make_cgroup,
    "systemd": _make_systemd,
}
"""``executor.kind`` -> function (runtime_dir, cgroups of jobs) -> executor; ``recover`` says what is not possible."""
