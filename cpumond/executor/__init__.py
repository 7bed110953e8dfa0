"""Running the jobs that a scheduler orders: the values, and what every executor can do.

An executor starts processes, each job in a cgroup of its own, and says what became of them. It decides nothing: when a
job is interrupted and when it is killed is the agent's business. Nothing here waits for a job: what happens shows in
``poll``, and ``fileno`` is readable when it has news. What it runs outlives the agent; ``recover`` finds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from cpumond.errors import CpumondError
from cpumond.wire import LogStream


class Launch(msgspec.Struct, frozen=True):
    """All it takes to start one job.

    ``argv`` is run as ``user`` (a name of this host; "" = the agent's own) in ``working_directory`` (absolute), in a
    cgroup with ``cpu_limit`` cores as its quota, ``memory_limit`` bytes and ``max_tasks`` processes and threads (0 = no
    limit), and no program gives it rights that the user does not have. ``directory`` exists, is root's, and is the
    executor's for whatever it keeps of the job; it removes nothing but its own files there. ``max_log_bytes``: of each
    of stdout and stderr, on disk, at any time.
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
    job that failed, where that is known without waiting.
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


Event = Started | NotStarted | Ended


class Executor(Protocol):
    """Runs jobs. All methods but ``read_log`` are called by one thread; none blocks for longer than 0.1 s but
    ``recover``."""

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        """Find the jobs of an earlier run of the agent again, at most 10 s; call it once, before anything else.

        Those of ``job_ids`` that live are returned; the others come as ``Ended`` or ``NotStarted`` from ``poll``.
        Jobs of this executor that are not in ``job_ids`` are left alone and logged; their empty cgroups are removed.
        Raises CpumondError when nothing can be started here: the sentence says what to do.
        """

    def start(self, launch: Launch) -> None:
        """Begin to start a job; ``poll`` gives ``Started`` or ``NotStarted`` soon."""

    def interrupt(self, job_id: str) -> None:
        """SIGTERM to every process of the job, once. A job that is not there is none of its business."""

    def kill(self, job_id: str) -> None:
        """SIGKILL to the whole cgroup, as often as it is called; also of a job that is just being started."""

    def poll(self) -> list[Event]:
        """What has happened since the last call, in order. At most one ``Ended`` or ``NotStarted`` for a job."""

    def fileno(self) -> int:
        """A descriptor that is readable when ``poll`` may have news; the same for the executor's whole life."""

    def read_log(self, job_id: str, directory: str, stream: LogStream, tail_bytes: int) -> tuple[bytes, int]:
        """The last ``tail_bytes`` bytes of what a job wrote, living or ended, and how much it wrote in all, in bytes.

        Called by any thread. Raises CpumondError when there is no log.
        """

    def close(self) -> None:
        """The agent ends; jobs go on. Never raises."""


class ExecutorError(CpumondError):
    """What an executor cannot do here, in a sentence."""


class CgroupTotals(Protocol):
    """The counters of a job's cgroup; None where the kernel does not tell."""

    @property
    def cpu_seconds(self) -> float | None:
        """CPU time of everything that ever ran in it."""

    @property
    def max_memory(self) -> int | None:
        """The most memory it ever had at once, bytes."""

    @property
    def oom_kills(self) -> int:
        """How many of its processes the kernel killed at the memory limit."""


class JobCgroups(Protocol):
    """Cgroups of jobs below one root, in every hierarchy that matters; what ``CgroupExecutor`` needs of cgroups."""

    def path(self, job_id: str) -> str:
        """The cgroup of a job, relative to the cpu hierarchy."""

    def create(self, job_id: str, cpu_limit: float, memory_limit: int, max_tasks: int = 0) -> list[str]:
        """Make the cgroup with its limits; the ``cgroup.procs`` files that its first process must write its id into.

        Raises CreateError or AccessError; then nothing is left of it.
        """

    def join_files(self, job_id: str) -> list[str]:
        """The ``cgroup.procs`` files of a cgroup that exists, as ``create`` returned them; empty if it is gone."""

    def list_processes(self, job_id: str) -> list[int]:
        """Who lives in it, in any of the hierarchies and below; empty when it is gone."""

    def signal(self, job_id: str, number: int) -> None:
        """Send a signal to every process in it. A process that ended meanwhile is never mistaken for another."""

    def kill(self, job_id: str) -> None:
        """SIGKILL to everything in it and below."""

    def read_totals(self, job_id: str) -> CgroupTotals:
        """Its counters up to now."""

    def remove(self, job_id: str) -> bool:
        """Remove it everywhere, with all below it; False while there is still a process in it. Never raises."""

    def list_job_ids(self) -> list[str]:
        """Jobs whose cgroup exists in any of the hierarchies."""


def _make_cgroup(runtime_dir: str, cgroups: JobCgroups) -> Executor:
    from cpumond.executor.cgroup import CgroupExecutor

    return CgroupExecutor(cgroups, runtime_dir)


def _make_systemd(runtime_dir: str, cgroups: JobCgroups) -> Executor:  # noqa: ARG001 - all factories are called alike
    # The bus library is imported by those who need it only.
    from cpumond.executor.systemd import SystemdExecutor

    return SystemdExecutor(cgroups)


EXECUTORS: Final[dict[str, Callable[[str, JobCgroups], Executor]]] = {
    "cgroup": _make_cgroup,
    "systemd": _make_systemd,
}
"""``executor.kind`` -> function (runtime_dir, cgroups of jobs) -> executor; ``recover`` says what is not possible."""
