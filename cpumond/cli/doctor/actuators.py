"""Checks of ``cpumond doctor``: actuators, floors, the idle class, and the kernel's scheduler and cgroup version."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from cpumond.cli.doctor.checks import Finding
from cpumond.core.measures import count_cores
from cpumond.core.words import count
from cpumond.monitor.policy import compute_floor

if TYPE_CHECKING:
    from cpumond.agent.discovery import FoundJob
    from cpumond.host.cgroup.idle import IdleClass
    from cpumond.host.cgroup.mounts import Hierarchies
    from cpumond.monitor.model import MonitorSettings

MOVES = {
    "guarantee": "nothing is written to their containers; guarantees move and are reported",
    "weight": "their weights move; no CPU that is free is taken from them",
    "quota": "their CPU quotas move: usage is capped there, which makes servers slower (docs/real-servers.md)",
}
SCHED_EXT = "/sys/kernel/sched_ext/state", "/sys/kernel/sched_ext/root/ops"
"""Files that ``check_cpu_scheduler`` reads."""


def check_actuators(settings: Iterable[MonitorSettings]) -> Finding:
    """Report which settings of containers follow the limits of these jobs."""
    numbers = collections.Counter(each.actuator for each in settings)
    text = "; ".join(f"{count(number, 'job')} by {name}: {MOVES[name]}" for name, number in sorted(numbers.items()))
    if "quota" not in numbers:
        return Finding("actuator", "ok", text or "no job is followed")
    return Finding("actuator", "ok", text, 'where no hard cap is wanted: [monitor] actuator = "guarantee"')


def check_floors(jobs: Sequence[tuple[FoundJob, MonitorSettings]], read_order: Callable[[str], float]) -> Finding:
    """Check whether the floor of jobs is as high as their request; nothing can be reclaimed from such jobs.
    ``read_order``: returns the cores that a cgroup may use."""
    stuck = []
    for job, settings in jobs:
        ordered = job.cpu_limit_cores if job.cpu_limit_cores is not None else read_order(job.path)
        if compute_floor(ordered, (), settings) >= ordered:
            stuck.append((job.job_id, ordered, settings))
    if not stuck:
        return Finding("floor", "ok", f"{count(len(jobs), 'job')}, each with a request above its floor")
    job_id, ordered, settings = stuck[0]
    text = (
        f"nothing can be reclaimed from {len(stuck)} of {count(len(jobs), 'job')}, for example {job_id!r}: it "
        f"requested {count_cores(ordered)}, and its floor is as high (min_cpu_limit = {settings.min_cpu_limit:g})"
    )
    return Finding("floor", "warn", text, "set min_cpu_limit = 0.1 where jobs request a core or less")


def read_order(hierarchies: Hierarchies, path: str) -> float:
    """Return the quota of a cgroup in cores; without a quota, the number of the host's CPUs."""
    from cpumond.host.cgroup import open_cgroup

    cgroup = open_cgroup(hierarchies, path)
    settings = None if cgroup is None else cgroup.read_settings()
    if cgroup is not None:
        cgroup.close()
    return float(os.cpu_count() or 1) if settings is None or settings.quota_us is None else settings.cores


def check_idle_class(found: IdleClass) -> Finding:
    """Report how jobs on reclaimed CPU rank behind all others on this host."""
    if found.name == "idle":
        return Finding("idle class", "ok", "jobs on reclaimed CPU run when nothing else wants the CPU (cpu.idle)")
    if found.name:
        return Finding("idle class", "warn", f"jobs on reclaimed CPU have the {found.name}: {found.note}",
                       "a kernel since 5.15 has cpu.idle")  # fmt: skip
    return Finding("idle class", "warn", found.note or "jobs on reclaimed CPU have none", "see docs/host-rights.md")


def check_cpu_scheduler(state: str, name: str) -> Finding:
    """Check whether a sched_ext scheduler is loaded. Arguments: the texts of ``SCHED_EXT``, "" without such a file."""
    if state != "enabled":
        return Finding("CPU scheduler", "ok", "the kernel's own: weights, cpu.idle and quotas work as documented")
    text = (
        f"the sched_ext scheduler {name or '(without a name)'} is loaded: it decides what weights, cpu.idle and quotas "
        "mean"
    )
    return Finding("CPU scheduler", "warn", text, "see its documentation; unload it where limits must hold")


def check_version(version: int) -> Finding:
    """Report how long this version of the cpu controller's hierarchy is supported."""
    if version == 2:
        return Finding("cgroup version", "ok", "2")
    text = "1: systemd since 258, kubelet since 1.35 and RHEL 10 no longer support it; cpumond supports it up to 1.0"
    return Finding("cgroup version", "ok", text, "plan to boot with systemd.unified_cgroup_hierarchy=1")
