"""The jobs that the agent follows. A job is opened when a source names it, and closed when its cgroup is gone."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import time
from collections.abc import Iterator

import msgspec
import structlog

from cpumond.agent.config import AgentConfig
from cpumond.agent.discovery import FoundJob
from cpumond.agent.limits.hold import FREE, Respected
from cpumond.agent.limits.writer import LimitWriter, read_limit_cores
from cpumond.agent.peaks import PeakFile
from cpumond.agent.state_file import Original
from cpumond.agent.tracked import (
    NO_LABELS,
    SettingsCache,
    Tracked,
    choose_actuator,
    compute_hard,
    find_bound,
    find_refusal,
    is_order,
    record,
    resolve_job,
)
from cpumond.agent.watch import Watcher
from cpumond.core.errors import CgroupReadError, CpumondError
from cpumond.core.measures import cores_to_quota_us
from cpumond.host.cgroup import Cgroup, open_cgroup
from cpumond.host.cgroup.files import is_populated, read_mode_xattr
from cpumond.host.cgroup.mounts import Hierarchies, read_identity
from cpumond.host.cgroup.settings import EQUAL_CORES, AncestorCap, CpuSettings, is_raised_above
from cpumond.host.service import find_room
from cpumond.monitor.model import Mode, MonitorSettings, start_state
from cpumond.monitor.protect import advise_without_pressure

MANY_JOBS = 20
"""If one rescan finds more new jobs than this, they are logged in one line."""

EMPTY_LOOKS, EMPTY_TICKS = 100, 60
"""Each tick examines EMPTY_LOOKS cgroups without a process, or more, so that EMPTY_TICKS are enough for all of them."""

HALF_LOOKS = 20
"""Number of rescans in a row that look for a cgroup in the second hierarchy (v1) if it was found only in one."""

log = structlog.get_logger("cpumond.agent")


class JobTable:
    """Tracked jobs by cgroup path.

    ``problems``: path -> sentence about a job that could not be opened. ``gone_total`` counts jobs whose cgroup has
    disappeared, ``closed_total`` all jobs that are no longer followed. ``empty``: path -> job id, for cgroups that
    match a source but are not jobs, because they contain no process."""

    def __init__(
        self, config: AgentConfig, hierarchies: Hierarchies, writer: LimitWriter, watcher: Watcher, peaks: PeakFile
    ) -> None:
        self.config = config
        self.hierarchies = hierarchies
        self.writer = writer
        self.watcher = watcher
        self.peaks = peaks
        self.jobs: dict[str, Tracked] = {}
        self.problems: dict[str, str] = {}
        self.gone_total = self.closed_total = 0
        self._settings: SettingsCache = {}
        self._many = False
        self._looked = False
        self._room = math.inf
        self._half_made: dict[str, int] = {}
        self._doubted: dict[str, int] = {}
        self.empty: dict[str, str] = {}
        self.by_unit: dict[str, Tracked] = {}
        self._said_no_pressure = False

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self.jobs.values())

    def __len__(self) -> int:
        return len(self.jobs)

    def find(self, name: str) -> Tracked | None:
        """Return the job whose id is ``name``, else the job whose cgroup path is ``name``."""
        return next((job for job in self if job.found.job_id == name), self.jobs.get(name.strip("/")))

    def find_empty(self, name: str) -> str | None:
        """Return the path of a cgroup without a process whose path or job id is ``name``."""
        return next((path for path, job_id in self.empty.items() if name.strip("/") in (path, job_id)), None)

    def refresh(self, found: list[FoundJob], now_s: float) -> bool:
        """Open new jobs, drop jobs no longer named, and update the others. Return whether any was opened or dropped."""
        self.problems = {}
        found = self._leave_out_empty(found)
        named = {job.path: job for job in found[: self.config.discovery.max_jobs]}
        if len(found) > len(named):
            self.problems[""] = f"more than discovery.max_jobs = {len(named)} jobs; the rest is ignored"
        changed = False
        # Drop all of these before any job is opened: then a renamed cgroup has its original limit when it is found.
        for job in [job for path, job in self.jobs.items() if path not in named or not self._is_same(job)]:
            self.drop(job)
            changed = True
        caps: dict[str, AncestorCap] = {}
        self._settings = {}
        self._half_made = {path: looks for path, looks in self._half_made.items() if path in named}
        self._doubted = {path: inode for path, inode in self._doubted.items() if path in named}
        self._many = len(named) - len(self.jobs) > MANY_JOBS
        before = len(self.jobs)
        self._room = self._find_room()
        for path, found_job in named.items():
            tracked = self.jobs.get(path)
            try:
                if tracked is None:
                    changed |= self._open(found_job, now_s, caps)
                else:
                    self._look_again(tracked, found_job, now_s, caps)
            except CpumondError as error:
                self.problems[path] = str(error)
        self._looked = True
        if self._many:
            log.info("jobs_found", count=len(self.jobs) - before)
        return changed

    def _leave_out_empty(self, found: list[FoundJob]) -> list[FoundJob]:
        """Return the jobs that have a process. Engines and batch systems leave thousands of cgroups without one."""
        filled, known, self.empty = [], self.empty if len(self.empty) > EMPTY_LOOKS else {}, {}
        for job in found:
            if job.is_assigned or (job.path not in known and self._find_process(job.path)):
                filled.append(job)
            else:
                self.empty[job.path] = job.job_id
        return filled

    def _find_process(self, path: str) -> bool:
        """Return whether a cgroup has a process; True if that is unknown because of an error."""
        tracked = self.jobs.get(path)
        try:
            if tracked is not None and self._is_same(tracked):
                return tracked.find_process(self.hierarchies)
            return is_populated(self.hierarchies, path)
        except CpumondError as error:
            self.problems[path] = str(error)
            return True

    def find_filled(self) -> bool:
        """Look at some of the cgroups without a process, in turns. Return whether one of them has a process now."""
        filled = False
        for path in list(itertools.islice(self.empty, max(EMPTY_LOOKS, len(self.empty) // EMPTY_TICKS))):
            job_id = self.empty.pop(path)
            if self._find_process(path):
                filled = True
            else:
                self.empty[path] = job_id
        return filled

    def add(self, found: FoundJob, now_s: float) -> None:
        """Follow a new job at once, without a look at the other jobs. A failure is retried at the next rescan."""
        if found.path in self.jobs:
            return
        self._room = self._find_room()
        try:
            self._open(found, now_s, {})
        except CpumondError as error:
            self.problems[found.path] = str(error)

    def waits_for_half(self) -> bool:
        """Return whether a cgroup must be looked at again soon: so far, a few looks have found it in only one of two
        hierarchies, or its unit's limit may not be set yet."""
        return bool(self._doubted) or any(looks < HALF_LOOKS for looks in self._half_made.values())

    def _is_same(self, job: Tracked) -> bool:
        """Return whether the cgroup at the job's path is still the one that is open: on v1 it may be renamed."""
        return read_identity(os.path.join(self.hierarchies.cpu_root, job.found.path))[1] == job.cgroup.inode

    def _find_room(self) -> float:
        """Return the number of descriptors that new jobs may use. Some must stay free to write and restore limits."""
        held = sum(job.cgroup.DESCRIPTORS + job.settings.follows_pressure for job in self)
        return find_room(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) - held

    def _open(self, found: FoundJob, now_s: float, caps: dict[str, AncestorCap]) -> bool:
        cgroup = open_cgroup(self.hierarchies, found.path)
        if cgroup is None:
            # On v1 a job has a cgroup in each of two hierarchies: the second one may be created without an event.
            self._half_made[found.path] = self._half_made.get(found.path, 0) + 1
            return False
        self._half_made.pop(found.path, None)
        with contextlib.ExitStack() as undone:
            undone.callback(cgroup.close)
            settings, mode, is_control = resolve_job(self.config, found, cgroup.place, self._settings)
            needed = cgroup.DESCRIPTORS + settings.follows_pressure
            if needed > self._room:
                raise CgroupReadError(
                    cgroup.directory, f"the other jobs hold all descriptors; raise LimitNOFILE ({needed} for each job)"
                )
            # Watch before the settings are read, because the creator of the cgroup may be about to set its limit.
            watches = self.watcher.watch_limits(found.path, cgroup.watch_paths(choose_actuator(settings, found)))
            undone.callback(self.watcher.unwatch, watches)
            in_force = cgroup.read_settings()
            if in_force is None:
                return False
            unit = self.writer.units.name_unit(found.path)
            known = self.writer.find_original(cgroup)
            if known is None and unit and self._is_doubtful(cgroup, unit, in_force):
                self._doubted[found.path] = cgroup.inode
                return False
            if known is None and unit:
                self._doubted.pop(found.path, None)
                known = self.writer.take_over(cgroup, in_force, assume_own=not self._looked)
            original = known.settings if known is not None else self._guess_original(found, in_force)
            ancestor = _cached_cap(cgroup, caps)
            hard = compute_hard(self.hierarchies, found, original, ancestor)
            job = Tracked(found, cgroup, settings, original, start_state(hard, now_s))
            job.config, job.asked_mode, job.watches = self.config, read_mode_xattr(cgroup.place), watches
            job.bound = find_bound(self.config, found, job.asked_mode)
            job.ancestor, job.in_force, job.unit = ancestor, in_force, unit
            job.refused = find_refusal(self.config, found, settings, cgroup.place)
            job.mode, job.is_control = mode, is_control
            if found.engine is not None:
                job.labels = found.engine.labels
            if known is not None:
                self._adopt(job, known, now_s)
            elif original != in_force and job.writes:
                job.hold = job.hold.write(now_s)
            job.follow_period()
            job.follow_writes()
            undone.pop_all()
        self.jobs[found.path] = job
        self._room -= needed
        is_known = self.peaks.recall(job, now_s)
        self._follow_pressure(job)
        if unit:
            self.by_unit[unit] = job
            self.ask_labels(job)
        say = log.debug if self._many else log.info
        say("job_found", job_id=found.job_id, cgroup=found.path, mode=job.mode, refused=job.refused or None,
            cpu_limit_cores=job.ordered_cores, peak_cores=job.state.peak_cores,
            caution=job.state.caution if is_known else None)  # fmt: skip
        return True

    def _is_doubtful(self, cgroup: Cgroup, unit: str, in_force: CpuSettings) -> bool:
        """Return whether, at the first look, the new cgroup of a lowered unit has a limit different from the agent's.

        systemd creates a cgroup and writes its limits a moment later, so it may still have the kernel's default. The
        next look decides."""
        is_first_look = self._doubted.get(cgroup.path) != cgroup.inode
        return is_first_look and not self.writer.is_expected_after_restart(
            cgroup.path, unit, in_force, assume_own=not self._looked
        )

    def _guess_original(self, found: FoundJob, in_force: CpuSettings) -> CpuSettings:
        """Return the original settings of a cgroup, which are those found. Only if the state file is damaged, a limit
        found below the job's request may be that of an earlier run, so the request counts instead.

        If the request is unknown, the limit found is kept. Jobs found later have no limit of an earlier run."""
        if self._looked or not self.writer.unknown or in_force.quota_us is None:
            return in_force
        log.warning("original_unknown", job_id=found.job_id, cgroup=found.path, quota_cores=in_force.cores,
                    cpu_limit_cores=found.cpu_limit_cores)  # fmt: skip
        if found.cpu_limit_cores is None or found.cpu_limit_cores <= in_force.cores:
            return in_force
        quota_us = cores_to_quota_us(found.cpu_limit_cores, in_force.period_us)
        return msgspec.structs.replace(in_force, quota_us=quota_us)

    def _adopt(self, job: Tracked, known: Original, now_s: float) -> None:
        """Continue with a cgroup that an earlier run lowered. Restore it and start its job anew if the job must not be
        lowered now, if a different setting was moved, or if another program set its limit while no agent ran."""
        job.touched = True
        actuator = job.actuator
        self.writer.claim_unit(job)
        engine = job.found.engine
        tells = engine is not None and engine.reports_request and engine.sets_quota
        cores = engine.ordered_cores if engine is not None and tells else None
        if cores is not None and cores < known.settings.cores - EQUAL_CORES:
            # The engine requested less while no agent ran; this may be exactly the limit in force.
            self._keep_order(job, cores)
        raised = is_raised_above(job.in_force, known.settings, actuator)
        ordered = self.writer.has_external_limit(job) and not raised
        if ordered and self.config.writes.override_ttl_s > 0:
            job.hold = job.hold.respect(now_s, self.config.writes.override_ttl_s)
            log.warning("foreign_write", job_id=job.found.job_id, kind="lower", old_cores=known.settings.cores,
                        new_cores=job.in_force.cores)  # fmt: skip
        if ordered or raised or not job.writes or not set(known.actuators) <= set(job.actuators):
            self.writer.restore(job)
            job.state = start_state(compute_hard(self.hierarchies, job.found, job.original, job.ancestor), now_s)
            return
        limit = read_limit_cores(job, job.in_force)
        if self.writer.damaged:
            # The state is from the second copy: good enough to restore CPU, but not to keep the limit lowered.
            job.hold = job.hold.write(now_s)
            return
        if job.unit:
            # The earlier run may have had no time, or no right, to send the limit to systemd.
            self.writer.units.want(job.unit, job.in_force, job.actuators)
        job.state = start_state(job.state.hard_cores, now_s, limit)
        record(job, time.time(), "adopt", job.state.hard_cores, limit, limit, "applied")
        log.info("limit_adopted", job_id=job.found.job_id, old_cores=job.state.hard_cores, new_cores=limit)
        if self.writer.has_other_burst(job, limit):
            job.hold = job.hold.write(now_s)  # the earlier run had a different burst_ratio

    def _look_again(self, job: Tracked, found: FoundJob, now_s: float, caps: dict[str, AncestorCap]) -> None:
        """Update settings, mode, refusal and the quotas above, which may have changed since the last look."""
        wrote = job.writes
        asked = read_mode_xattr(job.cgroup.place)
        if found != job.found or job.config is not self.config or asked != job.asked_mode:
            settings, mode, job.is_control = resolve_job(self.config, found, job.cgroup.place, self._settings)
            self._use_settings(job, settings, mode, now_s)
            shown = job.found.source.labels if job.found.source is not None else []
            before, job.found, job.config, job.asked_mode = job.found, found, self.config, asked
            job.bound = find_bound(self.config, found, asked)
            if found.engine is not None:
                job.labels = found.engine.labels
                self._follow_order(job, before)
            if found.source is not None and found.source.labels != shown:
                job.labels = NO_LABELS
                self.ask_labels(job)
        job.refused = find_refusal(self.config, found, job.settings, job.cgroup.place)
        self.writer.put_back(job, wrote, now_s)
        job.follow_writes()
        job.ancestor = _cached_cap(job.cgroup, caps)
        if isinstance(job.hold.decider, Respected) and is_order(job, job.in_force):
            job.hold = job.hold.expire(math.inf)  # the limit was written just before the engine reported it
            job.restart(read_limit_cores(job, job.in_force), now_s)
        job.update_hard_limit(self.hierarchies, now_s)
        is_above = job.actuator == "quota" and job.in_force.cores > job.state.limit_cores + EQUAL_CORES
        if found.engine is not None and job.touched and job.hold.is_own and is_above:
            job.hold = job.hold.write(now_s)

    def _follow_order(self, job: Tracked, before: FoundJob) -> None:
        """If the agent changed the job's cgroup, make the new request of the job's engine the original. The engine's
        write may have gone unnoticed, because it equalled the limit in force or was overwritten."""
        engine, former = job.found.engine, before.engine
        if engine is None or former is None or not engine.reports_request:
            return
        if engine.ordered_cores == former.ordered_cores:
            return
        log.info("limit_ordered", job_id=job.found.job_id, engine=engine.kind, old_cores=former.ordered_cores,
                 new_cores=engine.ordered_cores)  # fmt: skip
        if job.touched and engine.sets_quota:
            self._keep_order(job, engine.ordered_cores)

    def _keep_order(self, job: Tracked, cores: float | None) -> None:
        quota_us = None if cores is None else cores_to_quota_us(cores, job.original.period_us)
        job.original = msgspec.structs.replace(job.original, quota_us=quota_us)
        self.writer.keep(job)

    def _use_settings(self, job: Tracked, settings: MonitorSettings, mode: Mode, now_s: float) -> None:
        before = job.settings
        if settings.actuator != before.actuator:
            actuator = choose_actuator(settings, job.found)
            self.watcher.unwatch(job.watches)
            job.watches = self.watcher.watch_limits(job.found.path, job.cgroup.watch_paths(actuator))
        if settings.limit_rule != before.limit_rule or settings.actuator != before.actuator:
            # The limit stays until the new rule has measured: earlier measurements do not apply to this rule.
            job.restart(job.state.limit_cores, now_s)
        if settings.burst_ratio != before.burst_ratio and settings.actuator == "quota" and job.touched:
            job.hold = job.hold.write(now_s)  # writes only the difference: the burst, not the quota
        if settings.vote_mode != before.vote_mode:
            job.state = msgspec.structs.replace(job.state, window=())  # contains votes or smoothed values, by mode
        if mode != job.mode:
            log.info("mode_changed", job_id=job.found.job_id, old=job.mode, new=mode)
        is_lowered = job.touched and job.hold.decider is FREE
        if (job.mode, mode) == ("reclaim", "up-only") and (is_lowered or job.hold.is_contested):
            # Restore lowered limits at once, as in shadow: in up-only, a limit must not be below the request. After a
            # contest the limit is not written again.
            job.restart(job.state.hard_cores, now_s)
            job.hold = job.hold.write(now_s) if is_lowered else job.hold
        asked = before.follows_pressure != settings.follows_pressure
        job.settings, job.mode = settings, mode
        if asked:
            self._follow_pressure(job)

    def _follow_pressure(self, job: Tracked) -> None:
        """Read a job's pressure from now on if ``pressure_restore_ratio`` requires it. If the kernel has no PSI, this
        is logged once; it is no error."""
        try:
            job.cgroup.follow_pressure(job.settings.follows_pressure)
        except CgroupReadError as error:
            if not self._said_no_pressure:
                log.warning("pressure_unknown", job_id=job.found.job_id, error=str(error),
                            advice=advise_without_pressure(job.settings))  # fmt: skip
            self._said_no_pressure = True

    def release(self, job: Tracked) -> None:
        """Stop following a job that is no longer named. If its cgroup still exists, restore the original settings."""
        if job.touched and not job.hold.is_contested:
            try:
                self.writer.restore(job)
            except CpumondError as error:
                log.error("restore_failed", job_id=job.found.job_id, cgroup=job.found.path, error=str(error))
        self.peaks.keep(job)
        self._close(job)
        log.info("job_released", job_id=job.found.job_id, cgroup=job.found.path)

    def drop(self, job: Tracked) -> None:
        """Stop following a job whose cgroup is gone.

        If only its name is gone, or on v1 only its cgroup for the counters, the limit still exists and is restored."""
        if job.cgroup.is_there():
            self.release(job)
            return
        self.gone_total += 1
        self.writer.lose(job)
        self.peaks.remember(job)
        self._close(job)
        log.info("job_gone", job_id=job.found.job_id, cgroup=job.found.path)

    def _close(self, job: Tracked) -> None:
        self.watcher.unwatch(job.watches)
        job.cgroup.close()
        self.closed_total += 1
        del self.jobs[job.found.path]
        if self.by_unit.get(job.unit) is job:
            del self.by_unit[job.unit]

    def ask_labels(self, job: Tracked) -> None:
        """Ask systemd for those properties of the job's unit that the source displays; the answer comes as an event."""
        if job.unit and job.found.source is not None and job.found.source.labels:
            self.writer.units.ask(job.unit, job.found.source.labels)

    def watch_again(self, job: Tracked) -> None:
        """Watch the limit files again, because systemd creates a new one when a unit gets its first CPU setting."""
        # A watch of a file that disappeared is dead, and cgroupfs does not report that.
        self.watcher.unwatch(job.watches)
        job.watches = self.watcher.watch_limits(job.found.path, job.cgroup.watch_paths(job.actuator))

    def close(self) -> None:
        """Close all descriptors. Limits stay as they are."""
        for job in list(self.jobs.values()):
            self._close(job)


def _cached_cap(cgroup: Cgroup, caps: dict[str, AncestorCap]) -> AncestorCap:
    """Return the quotas above a cgroup. They are read once per rescan for all children of one cgroup."""
    parent = cgroup.path.rpartition("/")[0]
    if parent not in caps:
        caps[parent] = cgroup.read_ancestor_cap()
    return caps[parent]
