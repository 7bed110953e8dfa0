"""The jobs the agent follows: opened when a source names them, closed when their cgroup is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec
import structlog

from cpumond.agent.jobs import SettingsCache, Tracked, compute_hard, find_refusal, record, resolve_job
from cpumond.agent.watch import Watcher
from cpumond.agent.writer import LimitWriter, read_limit_cores
from cpumond.cgroup import Cgroup, open_cgroup
from cpumond.cgroup.files import read_mode_xattr
from cpumond.cgroup.mounts import Hierarchies
from cpumond.cgroup.settings import AncestorCap, CpuSettings
from cpumond.config import AgentConfig
from cpumond.discovery import FoundJob
from cpumond.errors import CpumondError
from cpumond.monitor.model import Mode, start_state
from cpumond.monitor.policy import move_hard, restart_at
from cpumond.units import cores_to_quota_us

MANY_JOBS = 20
"""More new jobs than this at one look are one line in the log."""

log = structlog.get_logger("cpumond.agent")


class JobTable:
    """Tracked jobs by cgroup path. ``problems`` are sentences about jobs that could not be opened or resolved."""

    def __init__(self, config: AgentConfig, hierarchies: Hierarchies, writer: LimitWriter, watcher: Watcher) -> None:
        self.config = config
        self.hierarchies = hierarchies
        self.writer = writer
        self.watcher = watcher
        self.jobs: dict[str, Tracked] = {}
        self.problems: dict[str, str] = {}
        self._settings: SettingsCache = {}
        self._many = False

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self.jobs.values())

    def __len__(self) -> int:
        return len(self.jobs)

    def find(self, name: str) -> Tracked | None:
        """The job with this id, else the one with this cgroup path."""
        for job in self.jobs.values():
            if job.found.job_id == name:
                return job
        return self.jobs.get(name.strip("/"))

    def refresh(self, found: list[FoundJob], now_s: float) -> bool:
        """Open what is new, drop what is no longer named, look again at the rest; True when a job came or went."""
        named = {job.path: job for job in found[: self.config.discovery.max_jobs]}
        self.problems = {}
        if len(found) > len(named):
            self._complain("", f"more than discovery.max_jobs = {len(named)} jobs; the rest is left out")
        changed = False
        for path in [path for path in self.jobs if path not in named]:
            self.release(self.jobs[path])
            changed = True
        caps: dict[str, AncestorCap] = {}
        self._settings = {}
        self._many = len(named) - len(self.jobs) > MANY_JOBS
        before = len(self.jobs)
        for path, job in named.items():
            tracked = self.jobs.get(path)
            if tracked is not None and not self._is_same(tracked):
                self.drop(tracked)
                tracked = None
                changed = True
            if tracked is None:
                changed |= self._open(job, now_s, caps)
            else:
                self._look_again(tracked, job, now_s, caps)
        if self._many:
            log.info("jobs_found", count=len(self.jobs) - before)
        return changed

    def _is_same(self, job: Tracked) -> bool:
        """Whether the cgroup at this path is still the one that is held open."""
        try:
            return os.stat(job.cgroup.directory).st_ino == job.cgroup.inode
        except OSError:
            # Gone; if another one is made meanwhile, the next rescan opens it.
            return False

    def _open(self, found: FoundJob, now_s: float, caps: dict[str, AncestorCap]) -> bool:
        try:
            cgroup = open_cgroup(self.hierarchies, found.path)
            if cgroup is None:
                return False
            try:
                in_force = cgroup.read_settings()
                if in_force is None:
                    cgroup.close()
                    return False
                settings, mode = resolve_job(self.config, found, cgroup.directory, self._settings)
                known = self.writer.find_original(cgroup)
                original = known.settings if known is not None else self._guess_original(found, in_force)
                ancestor = _cached_cap(cgroup, caps)
                hard = compute_hard(self.hierarchies, found, original, ancestor)
                job = Tracked(found, cgroup, settings, original, start_state(hard, now_s))
                job.config, job.asked_mode = self.config, read_mode_xattr(cgroup.directory)
                job.ancestor, job.in_force = ancestor, in_force
                job.refused = find_refusal(self.config, found.path, cgroup.directory)
                job.mode = mode
                if known is not None:
                    self._adopt(job, now_s)
                elif original != in_force and job.writes:
                    job.reapply_at_s = now_s
            except CpumondError:
                cgroup.close()
                raise
        except CpumondError as error:
            self._complain(found.path, str(error))
            return False
        job.watches = self.watcher.watch_limits(found.path, cgroup.watch_paths())
        self.jobs[found.path] = job
        say = log.debug if self._many else log.info
        say("job_found", job_id=found.job_id, cgroup=found.path, mode=job.mode, refused=job.refused or None,
            cpu_limit_cores=job.ordered_cores)  # fmt: skip
        return True

    def _guess_original(self, found: FoundJob, in_force: CpuSettings) -> CpuSettings:
        """What a cgroup was set to when the state file that would say it is damaged: what the job ordered.

        A job whose order is only in its cgroup keeps what is there, which may be a limit of an earlier run.
        """
        if not self.writer.damaged or in_force.quota_us is None:
            return in_force
        log.warning("original_unknown", job_id=found.job_id, cgroup=found.path, quota_cores=in_force.cores,
                    cpu_limit_cores=found.cpu_limit_cores)  # fmt: skip
        if found.cpu_limit_cores is None or found.cpu_limit_cores <= in_force.cores:
            return in_force
        quota_us = cores_to_quota_us(found.cpu_limit_cores, in_force.period_us)
        return msgspec.structs.replace(in_force, quota_us=quota_us)

    def _adopt(self, job: Tracked, now_s: float) -> None:
        """Go on with a cgroup that an earlier run lowered, or put it back when its job is not to be lowered now."""
        job.touched = True
        if not job.writes:
            self.writer.restore(job)
            return
        limit = read_limit_cores(job, job.in_force)
        job.state = start_state(job.state.hard_cores, now_s, limit)
        record(job, time.time(), "adopt", job.state.hard_cores, limit, limit, "applied")
        log.info("limit_adopted", job_id=job.found.job_id, old_cores=job.state.hard_cores, new_cores=limit)

    def _look_again(self, job: Tracked, found: FoundJob, now_s: float, caps: dict[str, AncestorCap]) -> None:
        """Settings, mode, refusal and the quotas above may have changed since the last look."""
        asked = read_mode_xattr(job.cgroup.directory)
        if found != job.found or job.config is not self.config or asked != job.asked_mode:
            try:
                settings, mode = resolve_job(self.config, found, job.cgroup.directory, self._settings)
            except CpumondError as error:
                self._complain(found.path, str(error))
                return
            job.found, job.settings, job.config, job.asked_mode = found, settings, self.config, asked
            self.set_mode(job, mode, now_s)
        job.refused = find_refusal(self.config, job.cgroup.path, job.cgroup.directory)
        if job.refused and job.touched:
            self.writer.restore(job)
        job.ancestor = _cached_cap(job.cgroup, caps)
        job.state = move_hard(job.state, compute_hard(self.hierarchies, job.found, job.original, job.ancestor))

    def set_mode(self, job: Tracked, mode: Mode, now_s: float) -> None:
        """Change a job's mode; one that is no longer written gets its original settings back at once."""
        if mode == job.mode:
            return
        before, wrote = job.mode, job.writes
        job.mode = mode
        if wrote and not job.writes:
            if job.touched:
                self.writer.restore(job)
            job.state = restart_at(job.state, job.state.hard_cores, now_s)
        elif job.writes and not wrote:
            job.state = restart_at(job.state, read_limit_cores(job, job.in_force), now_s)
        log.info("mode_changed", job_id=job.found.job_id, old=before, new=mode)

    def release(self, job: Tracked) -> None:
        """Stop following a job that is no longer named: its cgroup, if it lives, gets its original settings back."""
        if job.touched and not job.contested:
            try:
                self.writer.restore(job)
            except CpumondError as error:
                log.error("restore_failed", job_id=job.found.job_id, cgroup=job.found.path, error=str(error))
        self._close(job)
        log.info("job_released", job_id=job.found.job_id, cgroup=job.found.path)

    def drop(self, job: Tracked) -> None:
        """Stop following a job whose cgroup is gone."""
        self.writer.forget(job.found.path, now=False)
        self._close(job)
        log.info("job_gone", job_id=job.found.job_id, cgroup=job.found.path)

    def _close(self, job: Tracked) -> None:
        self.watcher.unwatch(job.watches)
        job.cgroup.close()
        del self.jobs[job.found.path]

    def _complain(self, path: str, problem: str) -> None:
        self.problems[path] = problem

    def close(self) -> None:
        """Give all descriptors back; limits are left as they are."""
        for job in list(self.jobs.values()):
            self._close(job)


def _cached_cap(cgroup: Cgroup, caps: dict[str, AncestorCap]) -> AncestorCap:
    """Siblings share what is above them: read it once a rescan."""
    parent = cgroup.path.rpartition("/")[0]
    if parent not in caps:
        caps[parent] = cgroup.read_ancestor_cap()
    return caps[parent]
