"""What the keeper holds of a job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any, Final

from cpumond.host.cgroup_processes import list_processes
from cpumond.host.executor.keeper import JOB_FIELDS, RESULT_NAME, STREAMS
from cpumond.host.executor.keeper.logs import Log

RETRY_S: Final = 0.01
_LEFT_S: Final = 1.0
"""A cgroup with no process of the job in it that Slurm has not removed for so long stays until its controller is back,
or somebody removes it."""


class Guest:
    """What the keeper holds of a job that Slurm starts. ``socket``: None while its step is not connected."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.token: str = order["token"]
        self.uid: int = order["uid"]
        self.mounts: dict[str, str] = order["mounts"]
        self.limits: list[list[str]] = order["limits"]
        self.socket: socket.socket | None = None
        self.pid = 0
        self.pidfd = -1
        self.is_claimed = False
        self.pending: str | None = None
        """What it is to be told when it is connected."""
        self.places: list[str] = []
        self._empty_since_s: float | None = None

    def is_gone(self, now_s: float) -> bool:
        """Whether Slurm has removed the cgroups of the job, and its step has ended."""
        if self.pidfd >= 0:
            return False
        places = [place for place in self.places if os.path.isdir(place)]
        if not places:
            return True
        if not all(map(is_slurmstepd, list_processes(places))):
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now_s
        return self._empty_since_s is not None and now_s - self._empty_since_s >= _LEFT_S


class Job:
    """A job and what is held for it. ``over``: its main process is gone; the rest of the cgroup may not be."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.id: str = order["id"]
        self.order = order
        self.directory: str = order["directory"]
        self.logs = [Log(self.directory, name, order["max_log_bytes"]) for name in STREAMS]
        self.cgroups = [os.path.dirname(path) for path in order["procs"]]
        self.state = "starting"
        self.pid: int | None = None
        self.pidfd = self.status = -1
        self.own = True
        self.over = False
        self.look_at_s = 0.0
        self.pause_s = RETRY_S
        self.start_time = 0.0
        self.finish_time = 0.0
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.problem = ""
        self.node_fault = False
        self.slurm_job: int | None = None
        self.places: dict[str, str] = {}
        self.cpu_seconds: float | None = None
        self.max_memory: int | None = None
        self.oom_kills = 0
        self.guest: Guest | None = None
        """What belongs to a job that Slurm starts."""

    def describe(self) -> dict[str, Any]:
        """The job as in a line to the agents."""
        return {name: getattr(self, name) for name in JOB_FIELDS}

    def write_result(self) -> None:
        """Write to disk how the job ended, for when this process is gone."""
        state = "failed" if self.problem and self.own else "ended"
        path = os.path.join(self.directory, RESULT_NAME)
        # Without room on disk agents still get the result, as long as this process lives.
        with contextlib.suppress(OSError):
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(json.dumps({**self.describe(), "state": state}).encode())
            os.rename(f"{path}.new", path)


def is_slurmstepd(pid: int) -> bool:
    """Whether a process is Slurm's own, which sees to the end of the job."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("slurmstepd")
    except OSError:
        return False
