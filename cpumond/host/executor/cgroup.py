"""The executor of kind "cgroup": jobs in cgroups that the agent makes, as children of a keeper that outlives it.

In ``runtime_dir``: the keeper's socket, lock and log, and ``cgroup-jobs/<job_id>.json`` for each job that is not over,
by which the next run of the agent finds it again. See ``executor.keeper`` for what is in a job's directory. Jobs on
reclaimed CPU are in the idle class (``host.cgroup.job_tree``), and the first that the kernel ends for want of memory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import structlog

from cpumond.core.errors import CpumondError
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.executor import keeper
from cpumond.host.executor.keeper_executor import CONNECT_S, SETTLE_S, HeldJob, KeeperExecutor, KeptRecord, make_ended
from cpumond.host.executor.keeper_link import KeptJob, read_result
from cpumond.host.executor.model import (
    KILLED_BEFORE,
    Ended,
    Event,
    Launch,
    NotStarted,
    Started,
)
from cpumond.host.executor.records import Records

log = structlog.get_logger("cpumond.host.executor")

INDEX_NAME: Final = "cgroup-jobs"
UNKNOWN: Final = (
    "it is not known what became of it: the host was started anew, or the files of the agent's runtime_dir were removed"
)
NEVER_STARTED: Final = "the process that starts jobs was killed before this one was seen to run"


class Record(KeptRecord):
    """``pid``: None until the keeper has reported it."""

    procs: list[str]
    pid: int | None = None
    start_time: float = 0.0


class _Job(HeldJob):
    record: Record

    def __init__(self, record: Record, silent: bool = False) -> None:
        super().__init__(record, silent)
        self.start: dict[str, Any] | None = None
        """The start order for the keeper, until the keeper shows that it has it."""


class CgroupExecutor(KeeperExecutor[_Job]):
    """At most one for each ``runtime_dir``, and for each root of ``cgroups``."""

    def __init__(self, cgroups: JobCgroupTree, runtime_dir: str) -> None:
        super().__init__(runtime_dir, Records(os.path.join(runtime_dir, INDEX_NAME), Record))
        self._cgroups = cgroups

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        wanted = self._wanted = set(job_ids)
        self._prepare()
        records = self._records.load()
        for job_id, record in records.items():
            self._jobs[job_id] = _Job(record, silent=job_id not in wanted)
        self._await_keeper()
        for job_id in wanted - set(self._jobs):
            self._jobs[job_id] = _Job(Record(job_id, "", 0, [], ended=Ended(job_id, time.time(), problem=UNKNOWN)))
            self._wake()
        for job_id in set(self._cgroups.list_job_ids()) - set(self._jobs):
            if not self._cgroups.remove(job_id):
                log.warning("a cgroup of a job that nobody knows has processes, it is left alone", job_id=job_id)
        known = [self._jobs[job_id] for job_id in wanted]
        self._exchange_until(lambda: all(job.started or job.is_over for job in known), SETTLE_S)
        found = {}
        for job_id, job in self._jobs.items():
            if job.silent and not job.is_over:
                log.warning("a job that the agent does not know is left alone", job_id=job_id)
            elif job_id in wanted and job.started and not job.is_over:
                found[job_id] = self._describe_start(job)
        self._drop_old_starts(found)
        return found

    def start(self, launch: Launch) -> None:
        """Raises ExecutorError for a job that is here already."""
        job_id = launch.job_id
        if not self._may_start(launch):
            return
        try:
            procs = self._cgroups.create(
                job_id, launch.cpu_limit, launch.memory_limit, launch.max_tasks, launch.has_ceiling, launch.reclaimed
            )
        except CpumondError as error:
            self._add_event(NotStarted(job_id, str(error), node_fault=True))
            return
        self._restore_index()
        directory = os.path.abspath(launch.directory)
        record = Record(job_id, directory, launch.max_log_bytes, procs)
        job = self._jobs[job_id] = _Job(record)
        if not self._store_new(record):
            return
        job.start = {**msgspec.to_builtins(launch), "id": job_id, "directory": directory, "procs": procs}
        if not self._keeper.send("start", job.start):
            self._wake()

    def interrupt(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        if job.started:
            self._interrupt(job)
        else:
            job.interrupted = True

    def kill(self, job_id: str) -> None:
        """``poll`` goes on with it until the job is over."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.killed = True
            self._kill(job)

    def poll(self) -> list[Event]:
        self._hear()
        for job in list(self._jobs.values()):
            if job.is_over:
                self._finish(job)
            elif job.killed:
                self._kill(job)
        return self._take_events()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._close_link()

    def _prepare(self) -> None:
        """See that jobs can be run here at all. Raises CpumondError."""
        self._records.make()
        probe = f"probe-{os.getpid()}-{id(self):x}"
        places = [os.path.dirname(path) for path in self._cgroups.create(probe, 1.0, 0)]
        if not any(os.path.exists(os.path.join(place, "pids.max")) for place in places):
            # RLIMIT_NPROC counts all processes of an account, whose jobs would take them from each other.
            log.warning("no pids controller for jobs here: nothing limits how many processes one starts (max_tasks)")
        self._cgroups.remove(probe)
        self._prepared = True

    def _describe_start(self, job: _Job) -> Started:
        return Started(job.record.job_id, self._cgroups.path(job.record.job_id), job.record.start_time)

    def _interrupt(self, job: _Job) -> None:
        self._cgroups.signal(job.record.job_id, signal.SIGTERM)

    def _kill(self, job: _Job) -> None:
        self._cgroups.kill(job.record.job_id)
        if not job.started:
            # It may not have entered its cgroup yet.
            self._keeper.send("kill", job.record.job_id)

    def _finish(self, job: _Job) -> None:
        """Remove what is left of a job that is over, and report it; again in the next ``poll`` while that fails."""
        record = job.record
        job_id = record.job_id
        if self._cgroups.list_processes(job_id):
            self._cgroups.kill(job_id)
            return
        if job.result is not None and record.outcome is None:
            if job.result.state == "failed":
                record.not_started = NotStarted(job_id, job.result.problem, job.result.node_fault)
            else:
                record.ended = self._describe_end(record, job.result)
            # Before the cgroup goes with its counters: should the agent be killed now, the next one reports the same.
            self._records.store_if_possible(job_id, record)
        if self._cgroups.remove(job_id):
            self._report(job)

    def _describe_end(self, record: Record, result: KeptJob) -> Ended:
        totals = self._cgroups.read_totals(record.job_id)
        return make_ended(record, result, totals.cpu_seconds, totals.max_memory, totals.oom_kills)

    def _exchange(self) -> None:
        super()._exchange()
        if self._keeper.alone_s >= CONNECT_S:
            self._give_up_without_keeper()

    def _give_up_without_keeper(self) -> None:
        """Without a keeper for long: report jobs that cannot start, and those that ended unseen."""
        for job in self._jobs.values():
            if job.is_over:
                continue
            if job.start is not None:
                problem = f"the keeper of jobs cannot be started: {self._keeper.explain()}"
                job.record.not_started = NotStarted(job.record.job_id, problem, node_fault=True)
                self._cgroups.kill(job.record.job_id)
                self._wake()
            elif not self._cgroups.list_processes(job.record.job_id):
                self._conclude(job)

    def _reconcile(self, kept: list[KeptJob]) -> None:
        for kept_job in kept:
            if kept_job.id not in self._jobs:
                record = Record(kept_job.id, kept_job.directory, 0, self._cgroups.join_files(kept_job.id))
                self._jobs[kept_job.id] = _Job(record, kept_job.id not in self._wanted)
            self._on_report(kept_job)
        known = {kept_job.id for kept_job in kept}
        for job_id, job in self._jobs.items():
            if job_id not in known and not job.is_over:
                self._hand_over(job)

    def _hand_over(self, job: _Job) -> None:
        """A job that the keeper does not have: the order never reached it, or the keeper before was killed."""
        record = job.record
        has_processes = bool(self._cgroups.list_processes(record.job_id))
        # A keeper's first step. A job that has got so far is not begun again: it may have run already.
        begun = any(os.path.exists(os.path.join(record.directory, f"{name}.fifo")) for name in keeper.STREAMS)
        if job.start is not None and not begun and not has_processes and read_result(record.directory) is None:
            if job.killed:
                record.not_started = NotStarted(record.job_id, KILLED_BEFORE)
                self._wake()
            else:
                self._keeper.send("start", job.start)
        elif has_processes and read_result(record.directory) is None:
            job.start = None
            adopted = {
                **msgspec.to_builtins(record),
                "id": record.job_id,
                "start_time": record.start_time or time.time(),
            }
            self._keeper.send("adopt", adopted)
        else:
            self._conclude(job)

    def _conclude(self, job: _Job) -> None:
        """The end of a job that no keeper has: from what the dead one wrote, if it could."""
        result = read_result(job.record.directory)
        if result is None:
            started = job.record.start_time > 0.0
            result = KeptJob(
                job.record.job_id,
                "ended" if started else "failed",
                finish_time=time.time(),
                problem=keeper.LOST if started else NEVER_STARTED,
                node_fault=True,
            )
        elif result.state == "ended" and not job.started:
            job.record.start_time = result.start_time
            self._mark_started(job)
        job.result = result
        self._wake()

    def _on_report(self, kept_job: KeptJob) -> None:
        job = self._jobs.get(kept_job.id)
        if job is None or job.is_over:
            if job is None and kept_job.is_over:
                self._keeper.send("forget", kept_job.id)
            return
        job.start = None
        if kept_job.state in ("running", "ended"):
            if (job.record.pid, job.record.start_time) != (kept_job.pid, kept_job.start_time):
                job.record.pid, job.record.start_time = kept_job.pid, kept_job.start_time
                if kept_job.state == "running":
                    self._records.store_if_possible(job.record.job_id, job.record)
            self._mark_started(job)
        if kept_job.is_over:
            job.result = kept_job
