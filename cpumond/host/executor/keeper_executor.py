"""What the executors whose jobs run under a keeper have in common: records, events, and the link to the keeper."""

from __future__ import annotations

import contextlib
import os
import select
import time
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec
import structlog

from cpumond.core.errors import describe
from cpumond.core.wire import LogStream
from cpumond.host.executor import keeper
from cpumond.host.executor.keeper.logs import read_end, read_log
from cpumond.host.executor.keeper_link import KeeperLink, KeptJob
from cpumond.host.executor.model import (
    LAST_WORDS_BYTES,
    NO_COMMAND,
    Ended,
    Event,
    Executor,
    ExecutorError,
    Launch,
    NotStarted,
    Started,
)
from cpumond.host.executor.records import Records, unlink

log = structlog.get_logger("cpumond.host.executor")

CONNECT_S: Final = 8.0
SETTLE_S: Final = 1.5
POLL_S: Final = 0.05


class _Outcome(msgspec.Struct, kw_only=True):
    ended: Ended | None = None
    not_started: NotStarted | None = None

    @property
    def outcome(self) -> Ended | NotStarted | None:
        """The event for the agent, once the job has left nothing behind."""
        return self.not_started or self.ended


class KeptRecord(_Outcome):
    """What is on disk of a job until the agent has stored its end."""

    job_id: str
    directory: str
    max_log_bytes: int


class HeldJob:
    """One job in memory. ``silent``: the agent did not ask for it, and gets no events about it."""

    def __init__(self, record: KeptRecord, silent: bool = False) -> None:
        self.record = record
        self.silent = silent
        self.started = False
        self.interrupted = False
        """To be interrupted as soon as it runs."""
        self.killed = False
        self.result: KeptJob | None = None
        """The keeper's last word."""

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.record.outcome is not None


JobKind = TypeVar("JobKind", bound=HeldJob)


class KeeperExecutor(Executor, Generic[JobKind]):
    """Jobs in memory, in ``records`` and with the keeper of ``runtime_dir``."""

    result_names: ClassVar[tuple[str, ...]] = (keeper.RESULT_NAME, f"{keeper.RESULT_NAME}.new")
    """Files in a job's directory that go when its end is stored."""

    def __init__(self, runtime_dir: str, records: Records[Any]) -> None:
        self._runtime_dir = runtime_dir
        self._records = records
        self._jobs: dict[str, JobKind] = {}
        self._prepared = False
        self._wanted: set[str] = set()
        """Jobs of earlier runs that the agent asked for."""
        self._events: list[Event] = []
        self._reported: list[KeptRecord] = []
        self._epoll = select.epoll()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._news, select.EPOLLIN)
        self._keeper = KeeperLink(runtime_dir, self._epoll)
        self._closed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    def read_log(self, job_id: str, directory: str, stream: LogStream, tail_bytes: int) -> tuple[bytes, int]:
        found = read_log(directory, stream, tail_bytes)
        if found is None:
            path = os.path.join(directory, stream)
            raise ExecutorError(f"there is no {stream} of this job: {path} was removed, or the job never ran")
        return found

    @abstractmethod
    def _reconcile(self, kept: list[KeptJob]) -> None:
        """Bring both sides together with a keeper that has listed all its jobs."""

    @abstractmethod
    def _on_report(self, kept_job: KeptJob) -> None:
        """Take over what the keeper reports of a job."""

    @abstractmethod
    def _describe_start(self, job: JobKind) -> Started: ...

    @abstractmethod
    def _interrupt(self, job: JobKind) -> None:
        """SIGTERM to all processes of a job that runs."""

    # ---- steps of ``recover``, ``start``, ``poll`` and ``close``

    def _await_keeper(self) -> None:
        if not self._exchange_until(lambda: self._keeper.is_greeted, CONNECT_S):
            raise ExecutorError(
                f"the keeper of jobs does not answer in {self._runtime_dir}: {self._keeper.explain()}; "
                "see whether the agent may start processes and make sockets there"
            )

    def _drop_old_starts(self, found: Collection[str]) -> None:
        """The starts of jobs that are returned, or over already, are no news."""
        self._events = [
            event
            for event in self._events
            if not isinstance(event, Started)
            or not (event.job_id in found or event.job_id not in self._jobs or self._jobs[event.job_id].is_over)
        ]

    def _may_start(self, launch: Launch) -> bool:
        """False for a job without a command, which is reported. Raises ExecutorError for a job that is here already."""
        job_id = launch.job_id
        if job_id in self._jobs:
            raise ExecutorError(f"the job {job_id} was started here already; give each job an id of its own")
        self._reported = [record for record in self._reported if record.job_id != job_id]
        if not launch.argv:
            self._add_event(NotStarted(job_id, NO_COMMAND))
        return bool(launch.argv)

    def _store_new(self, record: KeptRecord) -> bool:
        """False where it cannot be written, which is reported."""
        try:
            self._records.store(record.job_id, record)
        except OSError as error:
            problem = f"cannot write into {self._records.directory}: {describe(error)}; make room there"
            record.not_started = NotStarted(record.job_id, problem, node_fault=True)
            self._wake()
            return False
        return True

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        self._restore_index()
        self._remove_reported()
        self._exchange()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _close_link(self) -> None:
        self._keeper.close()
        self._epoll.close()
        os.close(self._news)

    # ---- what these are made of

    def _exchange(self) -> None:
        """Read all that the keeper has sent and send what waits for it; returns at once."""
        for news in self._keeper.exchange():
            if isinstance(news, KeptJob):
                self._on_report(news)
            else:
                self._reconcile(news)

    def _exchange_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Read from the keeper, started if need be, until ``condition`` holds; False when that takes too long."""
        deadline_s = time.monotonic() + timeout_s
        self._exchange()
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0:
                return False
            self._epoll.poll(min(left_s, POLL_S))
            self._exchange()
        return True

    def _restore_index(self) -> None:
        """Write the records anew where they or ``runtime_dir`` were removed: the next run of the agent needs them."""
        if not self._prepared or not self._records.is_removed():
            return
        for job_id, job in self._jobs.items():
            self._records.store_if_possible(job_id, job.record)
        self._keeper.send("listen", True)

    def _remove_reported(self) -> None:
        """Remove the files of jobs whose end was given to the agent by the ``poll`` before: it has stored it by now."""
        for record in self._reported:
            self._records.remove(record.job_id)
            if record.directory:
                for name in self.result_names:
                    unlink(os.path.join(record.directory, name))
        self._reported.clear()

    def _wake(self) -> None:
        """Make ``fileno`` readable."""
        os.eventfd_write(self._news, 1)

    def _add_event(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def _mark_started(self, job: JobKind) -> None:
        if job.started:
            return
        job.started = True
        if job.interrupted:
            self._interrupt(job)
        if not job.silent:
            self._add_event(self._describe_start(job))

    def _report(self, job: JobKind) -> None:
        """The last step of a job that is over: the keeper and this executor forget it, the agent hears of it."""
        record = job.record
        self._keeper.send("forget", record.job_id)
        if record.directory:
            for name in keeper.STREAMS:
                for suffix in (".fifo",) if record.not_started is None else (".fifo", "", ".1", ".total"):
                    unlink(os.path.join(record.directory, name + suffix))
        del self._jobs[record.job_id]
        self._reported.append(record)
        if not job.silent and record.outcome is not None:
            self._add_event(record.outcome)
        else:
            self._wake()


def make_ended(
    record: KeptRecord, result: KeptJob, cpu_seconds: float | None, max_memory: int | None, oom_kills: int
) -> Ended:
    """The event of a job that has ended, with the last words of one that failed."""
    path = os.path.join(record.directory, "stderr")
    return Ended(
        record.job_id, result.finish_time, result.exit_code, result.signal, cpu_seconds, max_memory, oom_kills > 0,
        result.problem, read_end(path, LAST_WORDS_BYTES)[0] if result.exit_code else b"",
    )  # fmt: skip
