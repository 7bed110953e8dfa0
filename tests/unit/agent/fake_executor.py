"""An executor that does what the test says."""

import os
import pwd
import signal
from collections.abc import Iterable

from cpumond.core.errors import UnavailableError
from cpumond.host.executor.model import Event, ExecutorError, Launch, Started

ME = pwd.getpwuid(os.geteuid()).pw_name


class PlayedExecutor:
    """Starts nothing: it notes what it is told, and says what the test puts into ``events``."""

    def __init__(self) -> None:
        self.launches: dict[str, Launch] = {}
        self.calls: list[tuple[str, str]] = []
        self.signals: dict[str, tuple[int, bool]] = {}
        """How each job was interrupted: by which signal, and whether its first process only."""
        self.events: list[Event] = []
        self.living: dict[str, Started] = {}
        self.broken = ""
        self.closed = False
        self.log = (b"", 0)

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        if self.broken:
            raise ExecutorError(self.broken)
        return {job_id: self.living[job_id] for job_id in job_ids if job_id in self.living}

    def start(self, launch: Launch) -> None:
        self.launches[launch.job_id] = launch
        self.calls.append(("start", launch.job_id))

    def interrupt(self, job_id: str, number: int = signal.SIGTERM, first_only: bool = False) -> None:
        self.calls.append(("interrupt", job_id))
        self.signals[job_id] = number, first_only

    def kill(self, job_id: str) -> None:
        self.calls.append(("kill", job_id))

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def fileno(self) -> int:
        return 0

    def read_log(self, job_id: str, directory: str, stream: str, tail_bytes: int) -> tuple[bytes, int]:
        if not self.log[1]:
            raise UnavailableError(f"job {job_id} has no log")
        return self.log[0][-tail_bytes:], self.log[1]

    def close(self) -> None:
        self.closed = True
