"""The executor of kind "cgroup": jobs in cgroups that the agent creates, as children of a keeper that outlives it.

``runtime_dir`` contains the keeper's socket, lock and log, and for each unfinished job ``cgroup-jobs/<job_id>.json``,
by which the agent's next run finds it again. ``executor.keeper`` describes a job's directory. Jobs on reclaimed CPU are
in the idle class (``host.cgroup.job_tree``); if memory is short, the kernel kills them first."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import msgspec
import structlog

from cpumond.core.errors import CpumondError, describe
from cpumond.core.wire import LogStream
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.executor import keeper
from cpumond.host.executor.keeper.logs import read_log
from cpumond.host.executor.keeper_link import KeeperLink, KeptJob, read_result
from cpumond.host.executor.model import (
    KILLED_BEFORE,
    LAST_WORDS_BYTES,
    NO_COMMAND,
    Ended,
    Event,
    EventQueue,
    Executor,
    ExecutorError,
    Launch,
    NotStarted,
    Started,
)
from cpumond.host.executor.records import Record, Records, unlink

log = structlog.get_logger("cpumond.host.executor")

CONNECT_S: Final = 8.0
INDEX_NAME: Final = "cgroup-jobs"
UNKNOWN: Final = "its end is unknown: the host was rebooted, or the files of the agent's runtime_dir were removed"
NEVER_STARTED: Final = "the process that starts jobs was killed before this one was seen to run"
_SETTLE_S: Final = 1.5
_POLL_S: Final = 0.05


class _Job:
    """One job in memory. ``silent``: the agent did not ask for the job, and gets no events about it."""

    def __init__(self, record: Record, silent: bool = False) -> None:
        self.record = record
        self.silent = silent
        self.start: dict[str, Any] | None = None
        """The order to start the job, which is kept until the keeper confirms it."""
        self.started = False
        self.interruption: tuple[int, bool] | None = None
        """The signal to send as soon as the job runs, and whether to send it to the first process only."""
        self.killed = False
        self.result: KeptJob | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.record.outcome is not None


class CgroupExecutor(Executor):
    """Runs jobs in cgroups. Each ``runtime_dir``, and each root of ``cgroups``, may have only one such executor."""

    def __init__(self, cgroups: JobCgroupTree, runtime_dir: str) -> None:
        self._cgroups = cgroups
        self._runtime_dir = runtime_dir
        self._records = Records(os.path.join(runtime_dir, INDEX_NAME))
        self._jobs: dict[str, _Job] = {}
        self._prepared = False
        self._wanted: set[str] = set()
        """Those jobs of the agent's earlier runs that the agent asked for."""
        self._events = EventQueue()
        self._reported: list[Record] = []
        self._epoll = select.epoll()
        self._epoll.register(self._events.fd, select.EPOLLIN)
        self._keeper = KeeperLink(runtime_dir, self._epoll)
        self._closed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    def read_log(self, job_id: str, directory: str, stream: LogStream, tail_bytes: int) -> tuple[bytes, int]:
        found = read_log(directory, stream, tail_bytes)
        if found is None:
            path = os.path.join(directory, stream)
            raise ExecutorError(f"this job has no {stream}: {path} was removed, or the job never ran")
        return found

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        wanted = self._wanted = set(job_ids)
        self._prepare()
        records = self._records.load()
        for job_id, record in records.items():
            self._jobs[job_id] = _Job(record, silent=job_id not in wanted)
        self._await_keeper()
        for job_id in wanted - set(self._jobs):
            self._jobs[job_id] = _Job(Record(job_id, "", 0, [], ended=Ended(job_id, time.time(), problem=UNKNOWN)))
            self._events.wake()
        for job_id in set(self._cgroups.list_job_ids()) - set(self._jobs):
            if not self._cgroups.remove(job_id):
                log.warning("the cgroup of an unknown job has processes and is left alone", job_id=job_id)
        known = [self._jobs[job_id] for job_id in wanted]
        self._exchange_until(lambda: all(job.started or job.is_over for job in known), _SETTLE_S)
        found = {}
        for job_id, job in self._jobs.items():
            if job.silent and not job.is_over:
                log.warning("a job that the agent does not know is left alone", job_id=job_id)
            elif job_id in wanted and job.started and not job.is_over:
                found[job_id] = self._make_start(job)
        self._drop_old_starts(found)
        return found

    def start(self, launch: Launch) -> None:
        """Start a job. Raises ExecutorError if there is a job with this id already."""
        job_id = launch.job_id
        if job_id in self._jobs:
            raise ExecutorError(f"the job {job_id} was started here already; give each job a different id")
        self._reported = [record for record in self._reported if record.job_id != job_id]
        if not launch.argv:
            self._events.add(NotStarted(job_id, NO_COMMAND))
            return
        try:
            procs = self._cgroups.create(
                job_id, launch.cpu_limit, launch.memory_limit, launch.max_tasks, launch.has_ceiling, launch.reclaimed
            )
        except CpumondError as error:
            self._events.add(NotStarted(job_id, str(error), node_fault=True))
            return
        self._restore_index()
        directory = os.path.abspath(launch.directory)
        record = Record(job_id, directory, launch.max_log_bytes, procs, max_stderr_bytes=launch.max_stderr_bytes)
        job = self._jobs[job_id] = _Job(record)
        try:
            self._records.store(job_id, record)
        except OSError as error:
            problem = f"cannot write into {self._records.directory}: {describe(error)}; free space there"
            record.not_started = NotStarted(job_id, problem, node_fault=True)
            self._events.wake()
            return
        order = {**msgspec.to_builtins(launch), "environment": {**launch.environment, **launch.secrets}, "secrets": {}}
        job.start = {**order, "id": job_id, "directory": directory, "procs": procs}
        if not self._keeper.send("start", job.start):
            self._events.wake()

    def interrupt(self, job_id: str, number: int = signal.SIGTERM, first_only: bool = False) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.interruption = number, first_only
        if job.started:
            self._interrupt(job)

    def kill(self, job_id: str) -> None:
        """Kill a job; ``poll`` sends SIGKILL again until the job is over."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.killed = True
            self._kill(job)

    def poll(self) -> list[Event]:
        self._events.drain()
        self._restore_index()
        self._remove_reported()
        self._exchange()
        for job in list(self._jobs.values()):
            if job.is_over:
                self._finish(job)
            elif job.killed:
                self._kill(job)
        return self._events.take()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._keeper.close()
        self._epoll.close()
        self._events.close()

    def _prepare(self) -> None:
        """Check that jobs can run here at all. Raises CpumondError."""
        self._records.make()
        probe = f"probe-{os.getpid()}-{id(self):x}"
        places = [os.path.dirname(path) for path in self._cgroups.create(probe, 1.0, 0)]
        if not any(os.path.exists(os.path.join(place, "pids.max")) for place in places):
            # RLIMIT_NPROC counts all processes of an account, so all jobs of an account would share one limit.
            log.warning("no pids controller for jobs here: nothing limits how many processes one starts (max_tasks)")
        self._cgroups.remove(probe)
        self._prepared = True

    def _await_keeper(self) -> None:
        if not self._exchange_until(lambda: self._keeper.is_greeted, CONNECT_S):
            raise ExecutorError(
                f"the keeper of jobs does not answer in {self._runtime_dir}: {self._keeper.explain()}; "
                "see whether the agent may start processes and make sockets there"
            )

    def _drop_old_starts(self, found: Collection[str]) -> None:
        """Drop the events ``Started`` of jobs in ``found``, and of jobs that are over already."""
        for event in self._events.take():
            is_old = event.job_id in found or event.job_id not in self._jobs or self._jobs[event.job_id].is_over
            if not (isinstance(event, Started) and is_old):
                self._events.add(event)

    def _exchange(self) -> None:
        """Read everything that the keeper has sent, and send queued orders; returns at once."""
        for news in self._keeper.exchange():
            if isinstance(news, KeptJob):
                self._on_report(news)
            else:
                self._reconcile(news)
        if self._keeper.alone_s >= CONNECT_S:
            self._give_up_without_keeper()

    def _exchange_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Read from the keeper, which is started if necessary, until ``condition`` is true; return False on timeout."""
        deadline_s = time.monotonic() + timeout_s
        self._exchange()
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0:
                return False
            self._epoll.poll(min(left_s, _POLL_S))
            self._exchange()
        return True

    def _restore_index(self) -> None:
        """Write the records again if somebody removed them or ``runtime_dir``: the agent's next run needs them."""
        if not self._prepared or not self._records.make_again():
            return
        for job_id, job in self._jobs.items():
            self._records.store_if_possible(job_id, job.record)
        self._keeper.send("listen", True)

    def _remove_reported(self) -> None:
        """Remove the files of jobs whose end the previous ``poll`` returned, because the agent has stored it by now."""
        for record in self._reported:
            self._records.remove(record.job_id)
            if record.directory:
                for suffix in ("", ".new"):
                    unlink(os.path.join(record.directory, keeper.RESULT_NAME + suffix))
        self._reported.clear()

    def _mark_started(self, job: _Job) -> None:
        if job.started:
            return
        job.started = True
        self._interrupt(job)
        if not job.silent:
            self._events.add(self._make_start(job))

    def _make_start(self, job: _Job) -> Started:
        return Started(job.record.job_id, self._cgroups.path(job.record.job_id), job.record.start_time)

    def _interrupt(self, job: _Job) -> None:
        if job.interruption is not None:
            number, first_only = job.interruption
            self._cgroups.signal(job.record.job_id, number, job.record.pid if first_only else None)

    def _kill(self, job: _Job) -> None:
        self._cgroups.kill(job.record.job_id)
        if not job.started:
            # The job's process may not have entered the cgroup yet.
            self._keeper.send("kill", job.record.job_id)

    def _finish(self, job: _Job) -> None:
        """Remove what remains of a finished job and report its end; if this fails, the next ``poll`` tries again."""
        record = job.record
        job_id = record.job_id
        if self._cgroups.list_processes(job_id):
            self._cgroups.kill(job_id)
            return
        if job.result is not None and record.outcome is None:
            if job.result.state == "failed":
                record.not_started = NotStarted(job_id, job.result.problem, job.result.node_fault)
            else:
                record.ended = self._make_end(record, job.result)
            # Stored before cgroup and counters are removed: if the agent is killed now, its next run reports the same.
            self._records.store_if_possible(job_id, record)
        if self._cgroups.remove(job_id):
            self._report(job)

    def _report(self, job: _Job) -> None:
        """Finish a job: the keeper and this executor forget it, and the agent gets the event of its end."""
        record = job.record
        self._keeper.send("forget", record.job_id)
        if record.directory:
            for name in keeper.STREAMS:
                for suffix in (".fifo",) if record.not_started is None else (".fifo", "", ".1", ".total"):
                    unlink(os.path.join(record.directory, name + suffix))
        del self._jobs[record.job_id]
        self._reported.append(record)
        if not job.silent and record.outcome is not None:
            self._events.add(record.outcome)
        else:
            self._events.wake()

    def _make_end(self, record: Record, result: KeptJob) -> Ended:
        """Return the event of a job's end; for a failed job it has the last output."""
        totals = self._cgroups.read_totals(record.job_id)
        stderr = read_log(record.directory, "stderr", LAST_WORDS_BYTES if result.exit_code else 0)
        last_words, stderr_size = (b"", None) if stderr is None else stderr
        return Ended(
            record.job_id, result.finish_time, result.exit_code, result.signal, totals.cpu_seconds, totals.max_memory,
            totals.oom_kills > 0, result.problem, last_words, stderr_size,
        )  # fmt: skip

    def _give_up_without_keeper(self) -> None:
        """Without a keeper for long: report jobs that cannot be started, and jobs that ended without being noticed."""
        for job in self._jobs.values():
            if job.is_over:
                continue
            if job.start is not None:
                problem = f"the keeper of jobs cannot be started: {self._keeper.explain()}"
                job.record.not_started = NotStarted(job.record.job_id, problem, node_fault=True)
                self._cgroups.kill(job.record.job_id)
                self._events.wake()
            elif not self._cgroups.list_processes(job.record.job_id):
                self._conclude(job)

    def _reconcile(self, kept: list[KeptJob]) -> None:
        """Compare this executor's jobs with all jobs that a keeper listed, and act on the differences."""
        kept = [kept_job for kept_job in kept if kept_job.slurm_job is None]
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
        """Handle a job that the keeper does not know: the order never arrived, or an earlier keeper was killed."""
        record = job.record
        has_processes = bool(self._cgroups.list_processes(record.job_id))
        # Creating a FIFO is a keeper's first step. A job with a FIFO may have run already, so it is not started again.
        begun = any(os.path.exists(os.path.join(record.directory, f"{name}.fifo")) for name in keeper.STREAMS)
        if job.start is not None and not begun and not has_processes and read_result(record.directory) is None:
            if job.killed:
                record.not_started = NotStarted(record.job_id, KILLED_BEFORE)
                self._events.wake()
            else:
                self._keeper.send("start", job.start)
        elif has_processes and read_result(record.directory) is None:
            job.start = None
            begun_at = record.start_time or time.time()
            self._keeper.send("adopt", {**msgspec.to_builtins(record), "id": record.job_id, "start_time": begun_at})
        else:
            self._conclude(job)

    def _conclude(self, job: _Job) -> None:
        """Determine the end of a job that no keeper knows, by the record that its keeper wrote, if there is one."""
        result = read_result(job.record.directory)
        if result is None:
            started = job.record.start_time > 0.0
            result = KeptJob(
                job.record.job_id, "ended" if started else "failed", finish_time=time.time(),
                problem=keeper.LOST if started else NEVER_STARTED, node_fault=True,
            )  # fmt: skip
        elif result.state == "ended" and not job.started:
            job.record.start_time = result.start_time
            self._mark_started(job)
        job.result = result
        self._events.wake()

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
