"""Messages between the agent and its executor, and the methods that every executor has."""

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
    """All it takes to start one job.

    ``argv`` is run as ``user`` (a name of this host; "" = the agent's own) in ``working_directory`` (absolute), in a
    cgroup with a weight in proportion to ``cpu_limit`` (cores), with ``has_ceiling`` that as its quota, too,
    ``memory_limit`` bytes and ``max_tasks`` processes and threads (0 = no limit), and no program gives it rights that
    the user does not have. ``reclaimed``: the cgroup is in the idle class. ``directory`` exists, belongs to the agent's
    user, and is the executor's for whatever it keeps of the job; it removes nothing but its own files there.
    ``max_log_bytes``: of each of stdout and stderr, on disk, at any time; ``max_stderr_bytes``: of stderr, 0 for those.
    ``secrets``: more of the environment, which wins; no file, unit, log or command line shows them.
    """

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
    """The job's process runs in ``cgroup`` (relative to the cpu hierarchy) since ``start_time`` (s since 1970)."""

    job_id: str
    cgroup: str
    start_time: float


class NotStarted(msgspec.Struct, frozen=True):
    """The job could not be started, and nothing is left of it. ``problem`` is a sentence.

    ``node_fault``: another job would not fare better here (no cgroup can be made, no bus); else it is the job's own
    fault (no such program, user or directory).
    """

    job_id: str
    problem: str
    node_fault: bool = False


class Ended(msgspec.Struct, frozen=True):
    """The job is over: its main process has ended, all others of its cgroup are killed, the cgroup is removed.

    ``exit_code`` of the main process, None when ``signal`` ended it, or when ``problem`` says why neither is known.
    ``cpu_seconds`` and ``max_memory`` (bytes) of the whole cgroup, None where the kernel did not tell. ``oom_killed``:
    the kernel killed a process of it at its memory limit. ``last_words``: the end of its stderr, at most 4 KiB, of a
    job that failed, where that is known without waiting. ``stderr_size``: how many bytes it wrote there, None where
    that is not known.
    """

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
    """Events until the agent polls for them; ``fd`` is readable once there is one. Any thread may add some."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: collections.deque[Event] = collections.deque()

    def add(self, event: Event) -> None:
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Make ``fd`` readable, though there may be no event."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        """Make ``fd`` readable for events from now on only."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self.fd)

    def take(self) -> list[Event]:
        """All events so far, in order."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Executor(Protocol):
    """Runs jobs. All methods but ``read_log`` are called by one thread; none but ``recover`` and ``close`` blocks it
    for longer than 0.1 s."""

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        """Find the jobs of an earlier run of the agent again, at most 10 s; call it once, before anything else.

        Those of ``job_ids`` that live are returned; the others come as ``Ended`` or ``NotStarted`` from ``poll``.
        Jobs of this executor that are not in ``job_ids`` are left alone and logged; their empty cgroups are removed.
        Raises CpumondError when nothing can be started here: the sentence says what to do.
        """

    def start(self, launch: Launch) -> None:
        """Begin to start a job; ``poll`` gives ``Started`` or ``NotStarted`` soon."""

    def interrupt(self, job_id: str, number: int = signal.SIGTERM, first_only: bool = False) -> None:
        """A signal to every process of the job, or to its first one only, once. A job that is not known is ignored."""

    def kill(self, job_id: str) -> None:
        """SIGKILL to the whole cgroup, as often as it is called; also of a job that is just being started."""

    def poll(self) -> list[Event]:
        """Events since the last call, in order. At most one ``Ended`` or ``NotStarted`` for a job."""

    def fileno(self) -> int:
        """A descriptor that is readable when ``poll`` may have news; the same for the executor's whole life."""

    def read_log(self, job_id: str, directory: str, stream: LogStream, tail_bytes: int) -> tuple[bytes, int]:
        """The last ``tail_bytes`` bytes of what a job wrote, living or ended, and how much it wrote in all, in bytes.

        Called by any thread. Raises CpumondError when there is no log.
        """

    def close(self) -> None:
        """The agent ends; jobs go on. Never raises."""


class ExecutorError(CpumondError):
    """A sentence about something that the executor cannot do here."""
