"""Messages between the agent and its executor, and the interface of every executor."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from cpumond.core.errors import CpumondError
from cpumond.core.wire import LogStream

LAST_WORDS_BYTES: Final = 4096
NO_COMMAND: Final = "its command is empty"
KILLED_BEFORE: Final = "it was killed before it was started"


class Launch(msgspec.Struct, frozen=True):
    """All data that is needed to start one job.

    - ``argv`` runs as ``user`` (a name of this host; "" = the agent's own) in ``working_directory`` (absolute). The job
      cannot gain rights that the user does not have, not even by a setuid program.
    - The job's cgroup has a weight in proportion to ``cpu_limit`` (cores), and limits of ``memory_limit`` bytes and
      ``max_tasks`` processes and threads (0 = no limit). ``has_ceiling``: ``cpu_limit`` is also the quota.
      ``reclaimed``: the cgroup is in the idle class.
    - ``directory`` exists, belongs to the agent's user, and is for the executor's files about the job; the executor
      removes only its own files there.
    - ``max_log_bytes`` bounds the size of stdout on disk at any time, and that of stderr. ``max_stderr_bytes``, unless
      0, bounds stderr instead.
    - ``secrets``: more environment variables, which override others; no file, unit, log or command line shows them."""

    job_id: str
    argv: list[str]
    environment: dict[str, str]
    user: str
    working_directory: str
    cpu_limit: float
    memory_limit: int
    directory: str
    max_log_bytes: int
    max_tasks: int = 0
    has_ceiling: bool = True
    reclaimed: bool = False
    max_stderr_bytes: int = 0
    secrets: dict[str, str] = {}


class Started(msgspec.Struct, frozen=True):
    """The job's process has run in ``cgroup`` (relative to the cpu hierarchy) since ``start_time`` (s since 1970)."""

    job_id: str
    cgroup: str
    start_time: float


class NotStarted(msgspec.Struct, frozen=True):
    """The job could not be started, and nothing remains of it. ``problem`` is a sentence.

    ``node_fault``: any other job would also fail here (for example because no cgroup can be created). Otherwise it is
    the job's own fault (for example, there is no such program, user or directory)."""

    job_id: str
    problem: str
    node_fault: bool = False


class Ended(msgspec.Struct, frozen=True):
    """The job is over: its main process has ended, the rest of its cgroup was killed, and the cgroup is removed.

    ``exit_code`` is the main process's; None if ``signal`` ended it, or if ``problem`` says why neither is known.
    ``cpu_seconds`` and ``max_memory`` (bytes) are of the whole cgroup, None if the kernel did not report them.
    ``oom_killed``: the kernel killed one of the job's processes at its memory limit. ``last_words`` is the end of a
    failed job's stderr, at most 4 KiB, if it is known without waiting. ``stderr_size`` is the number of bytes written
    to stderr, None if unknown."""

    job_id: str
    finish_time: float
    exit_code: int | None = None
    signal: int | None = None
    cpu_seconds: float | None = None
    max_memory: int | None = None
    oom_killed: bool = False
    problem: str = ""
    last_words: bytes = b""
    stderr_size: int | None = None


Event = Started | NotStarted | Ended


class EventQueue:
    """Events that wait for the agent's ``poll``; ``fd`` is readable while there are any. Any thread may add events."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: collections.deque[Event] = collections.deque()

    def add(self, event: Event) -> None:
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Make ``fd`` readable, although there may be no event."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        """Clear ``fd``: only events from now on make it readable."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self.fd)

    def take(self) -> list[Event]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Executor(Protocol):
    """Runs jobs. One thread calls all methods except ``read_log``; only ``recover`` and ``close`` may block this thread
    for longer than 0.1 s."""

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        """Find the jobs of an earlier run of the agent again, within 10 s; call this once, before any other method.

        Returns the living jobs among ``job_ids``; for the others, ``poll`` will return ``Ended`` or ``NotStarted``.
        Jobs of this executor that are not in ``job_ids`` are left alone and logged; their empty cgroups are removed.
        Raises CpumondError, with the remedy, if no job can be started here."""

    def start(self, launch: Launch) -> None:
        """Begin to start a job; ``poll`` soon returns ``Started`` or ``NotStarted``."""

    def interrupt(self, job_id: str, number: int = signal.SIGTERM, first_only: bool = False) -> None:
        """Send a signal once to every process of the job, or only to its first process. Unknown jobs are ignored."""

    def kill(self, job_id: str) -> None:
        """Send SIGKILL to the whole cgroup at each call, even while the job is still being started."""

    def poll(self) -> list[Event]:
        """Return events since the last call, in order; at most one ``Ended`` or ``NotStarted`` per job."""

    def fileno(self) -> int:
        """Return a descriptor that is readable if ``poll`` may have events. It never changes."""

    def read_log(self, job_id: str, directory: str, stream: LogStream, tail_bytes: int) -> tuple[bytes, int]:
        """Return the last ``tail_bytes`` bytes of the output of a living or ended job, and how many bytes it wrote. Any
        thread may call this. Raises CpumondError if there is no log."""

    def close(self) -> None:
        """Close the executor; jobs continue. Never raises."""


class ExecutorError(CpumondError):
    """A sentence about something that the executor cannot do here."""
