"""The only place that changes cgroups: limits out, originals back, and what to do when somebody else writes too.

Before a cgroup's first change its original settings are on disk (``secure``); after that ``restore`` can always put
them back, here or in ``cpumond restore``.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from cpumond.agent.jobs import Tracked, find_refusal
from cpumond.agent.state_file import STATE_FILE, Original, Originals, load_first, read_boot_id, save
from cpumond.cgroup import Cgroup, open_cgroup
from cpumond.cgroup.files import count_threads
from cpumond.cgroup.mounts import Hierarchies
from cpumond.cgroup.settings import (
    CpuSettings,
    Target,
    choose_restore,
    compute_quota_target,
    compute_weight_target,
    plan_steps,
)
from cpumond.config import AgentConfig
from cpumond.errors import (
    AccessError,
    CgroupReadError,
    CgroupWriteError,
    CpumondError,
    CreateError,
    RefusedError,
)


class Applied(msgspec.Struct, frozen=True):
    """The outcome of one write: the cores now in force (None: the cgroup is gone) and which bound moved them."""

    cores: float | None
    notes: tuple[str, ...] = ()


class LimitWriter:
    """Writes limits of tracked jobs and keeps their originals on disk.

    ``damaged`` is the sentence about a state file that could not be read, "" normally; ``unknown`` that no copy of it
    could; ``writes_total`` counts writes.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.path = os.path.join(config.state_dir, STATE_FILE)
        self.boot_id = read_boot_id()
        self.originals: dict[str, Original] = {}
        self.copy_path = os.path.join(config.runtime_dir, STATE_FILE)
        self.damaged = ""
        self.unknown = False
        self.writes_total = 0
        self._stale = self._untidy = False

    def load(self) -> None:
        """Read the originals that a run before this one left; a damaged file is put aside and said in ``damaged``."""
        content, complaint = load_first([self.path, self.copy_path], Originals)
        self.unknown = bool(complaint) and content is None
        if self.unknown:
            self.damaged = f"{complaint}; jobs start from the cpu_limit they are given, the others keep what is there"
        elif complaint:
            self.damaged = f"{complaint}; its copy in runtime_dir is good, jobs start from their full limits"
        if content is not None and content.boot_id == self.boot_id:
            self.originals = dict(content.cgroups)

    def find_original(self, cgroup: Cgroup) -> Original | None:
        """The original of this very cgroup, when an agent changed it before."""
        original = self.originals.get(cgroup.path)
        return original if original is not None and original.inode == cgroup.inode else None

    def list_moved(self, cgroup: Cgroup) -> tuple[str, ...]:
        """The actuators whose original settings of this cgroup are on disk."""
        known = self.find_original(cgroup)
        return known.actuators if known is not None else ()

    def secure(self, jobs: list[Tracked]) -> None:
        """Have the originals of ``jobs`` on disk before they are changed. Raises CreateError or AccessError."""
        added: dict[str, Original] = {}
        for job in jobs:
            known = self.find_original(job.cgroup)
            actuators = known.actuators if known else ()
            if job.settings.actuator not in actuators:
                added[job.cgroup.path] = Original(job.cgroup.inode, job.original, (*actuators, job.settings.actuator))
        if added:
            self._save({**self.originals, **added})
        for job in jobs:
            job.touched = True

    def keep(self, job: Tracked) -> None:
        """Store a changed ``job.original`` with the next ``flush``."""
        known = self.find_original(job.cgroup)
        if known is not None and known.settings != job.original:
            self.originals[job.cgroup.path] = Original(known.inode, job.original, known.actuators)
            self._stale = True

    def forget(self, path: str, now: bool = True) -> None:
        """Drop an original that must not be put back any more; stored with the next ``flush``.

        ``now`` False for a cgroup that is gone: what is on disk about it does no harm until the next save.
        """
        if self.originals.pop(path, None) is not None:
            self._stale, self._untidy = self._stale or now, True

    def leave(self, job: Tracked) -> None:
        """Give a cgroup up to the one who writes its limit: theirs stays, what else was moved goes back to what was
        found, and nothing of it is put back later. Raises CgroupError."""
        known, current = self.find_original(job.cgroup), job.cgroup.read_settings()
        self.forget(job.cgroup.path)
        if known is None or current is None:
            return
        others = tuple(name for name in known.actuators if name != job.settings.actuator)
        target = choose_restore(current, known.settings, others)
        if "quota" in known.actuators and known.settings.burst_us is not None:
            most_us = known.settings.burst_us if target.quota_us is None else target.quota_us
            target = msgspec.structs.replace(target, burst_us=min(known.settings.burst_us, most_us))
        job.cgroup.write_settings(current, target)
        job.in_force = target

    def flush(self, tidy: bool = False) -> None:
        """Store what ``keep`` and ``forget`` changed; with ``tidy`` also what does no harm. Raises CreateError or
        AccessError."""
        if self._stale or (tidy and self._untidy):
            self._save(self.originals)

    def _save(self, originals: dict[str, Original]) -> None:
        content = Originals(self.boot_id, originals)
        save(self.path, content)
        with contextlib.suppress(CreateError, AccessError):
            # A second copy for the day when the first is lost; without it the first is still there.
            save(self.copy_path, content, sync=False)
        self.originals = originals
        self._stale = self._untidy = False

    def write(self, job: Tracked, cores: float) -> Applied:
        """Bring a secured job's limit to ``cores``. Raises CgroupWriteError, CgroupReadError, RefusedError."""
        if not job.touched:
            raise RefusedError(f"{job.cgroup.path}: its original settings are not on disk, so it is not changed")
        refusal = find_refusal(self.config, job.cgroup.path, job.cgroup.directory)
        if refusal:
            job.refused = refusal
            self.restore(job)
            raise RefusedError(f"{job.cgroup.path}: {refusal}, so it is not changed")
        target = self._compute_target(job, cores)
        try:
            written = self._write(job, target)
        except CgroupWriteError:
            # Somebody may have moved the cgroup or a quota above it since the last look: look, and try once more.
            current = job.cgroup.read_settings()
            job.ancestor = job.cgroup.read_ancestor_cap()
            if current is None:
                return Applied(None)
            believed, job.in_force = job.in_force, current
            again = self._compute_target(job, cores)
            if current == believed and again.settings == target.settings:
                raise
            target = again
            written = self._write(job, target)
        return Applied(target.cores if written else None, target.notes)

    def _compute_target(self, job: Tracked, cores: float) -> Target:
        """What to write: the setting that the actuator moves; the others stay as somebody else may have set them."""
        s, found = job.settings, job.in_force
        if s.actuator == "weight":
            target = compute_weight_target(cores, job.state.hard_cores, job.original, job.cgroup.WEIGHT_BOUNDS)
            settings = msgspec.structs.replace(found, weight=target.settings.weight)
            return msgspec.structs.replace(target, settings=settings)
        notes: tuple[str, ...] = ()
        if s.min_cores_per_thread and cores < found.cores:
            threads = count_threads(job.cgroup.directory)
            floor = min(threads * s.min_cores_per_thread, job.state.hard_cores, found.cores)
            if cores < floor:
                cores, notes = floor, (f"held to {floor:g} cores, min_cores_per_thread for each thread",)
        target = compute_quota_target(cores, job.original, job.ancestor, s.burst_ratio)
        settings = msgspec.structs.replace(target.settings, weight=found.weight)
        return msgspec.structs.replace(target, settings=settings, notes=notes + target.notes)

    def _write(self, job: Tracked, target: Target) -> bool:
        steps = plan_steps(job.in_force, target.settings)
        if steps:
            self.writes_total += len(steps)
            if not job.cgroup.write_settings(job.in_force, target.settings):
                return False
            job.in_force = target.settings
        return True

    def restore(self, job: Tracked) -> None:
        """Put a touched job's original settings back, unless the cgroup is gone.

        Raises CgroupWriteError or CgroupReadError; then the original stays on disk for ``cpumond restore``.
        """
        known = self.find_original(job.cgroup)
        if known is not None:
            current = restore_cgroup(job.cgroup, known)
            if current is not None:
                job.in_force = job.original = current
            self.forget(job.cgroup.path)
        job.touched = False


def restore_cgroup(cgroup: Cgroup, original: Original) -> CpuSettings | None:
    """Put the settings of one cgroup back; what is in force then, None when it is gone. Raises CgroupError.

    Where a quota above it was lowered meanwhile v1 refuses: then it gets as much as that one allows before the raise.
    """
    current = cgroup.read_settings()
    if current is None:
        return None
    target = choose_restore(current, original.settings, original.actuators)
    try:
        return target if cgroup.write_settings(current, target) else None
    except CgroupWriteError:
        _give_what_is_allowed(cgroup, target)
        raise


def _give_what_is_allowed(cgroup: Cgroup, target: CpuSettings) -> None:
    current, cap = cgroup.read_settings(), cgroup.read_ancestor_cap()
    if current is not None and current.cores < cap.cores < target.cores:
        allowed = compute_quota_target(cap.cores, target, cap).settings
        cgroup.write_settings(current, msgspec.structs.replace(allowed, weight=current.weight))


class RestoreReport(msgspec.Struct):
    """What ``restore_all`` did: paths put back, gone since, and errors in sentences."""

    restored: list[str] = []
    gone: list[str] = []
    errors: list[str] = []


def restore_all(hierarchies: Hierarchies, originals: dict[str, Original]) -> RestoreReport:
    """Put every cgroup of ``originals`` back that still is the same one; errors are collected, none stops the rest."""
    report = RestoreReport(restored=[], gone=[], errors=[])
    for path, original in sorted(originals.items(), key=lambda item: item[0].count("/")):
        cgroup = None
        try:
            cgroup = open_cgroup(hierarchies, path)
            if cgroup is None or cgroup.inode != original.inode or restore_cgroup(cgroup, original) is None:
                report.gone.append(path)
            else:
                report.restored.append(path)
        except CpumondError as error:
            report.errors.append(str(error))
        finally:
            if cgroup is not None:
                cgroup.close()
    return report


def read_limit_cores(job: Tracked, current: CpuSettings) -> float:
    """The limit in cores that ``current`` stands for under the job's actuator."""
    if job.settings.actuator == "weight":
        if not job.original.weight or current.weight is None:
            return job.state.hard_cores
        return min(job.state.hard_cores * current.weight / job.original.weight, job.state.hard_cores)
    return min(current.cores, job.state.hard_cores)


def read_settings_or_none(job: Tracked) -> CpuSettings | None:
    """The settings in force; None when the cgroup is gone or does not answer (said in ``job.last_error``)."""
    try:
        return job.cgroup.read_settings()
    except CgroupReadError as error:
        job.last_error = str(error)
        return None
