"""One job in the keeper."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Final

from cpumond.host.executor.keeper import JOB_FIELDS, RESULT_NAME, STREAMS
from cpumond.host.executor.keeper.logs import StreamLog

RETRY_S: Final = 0.01


class KeeperJob:
    """A job and its resources. ``over``: the main process has ended; other processes in the cgroup may still run."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.id: str = order["id"]
        self.order = order
        self.directory: str = order["directory"]
        most = dict.fromkeys(STREAMS, order["max_log_bytes"])
        if order.get("max_stderr_bytes"):
            most["stderr"] = order["max_stderr_bytes"]
        self.logs = [StreamLog(self.directory, name, most[name]) for name in STREAMS]
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

    def to_fields(self) -> dict[str, Any]:
        """Return the job's fields as in a line to the agents."""
        return {name: getattr(self, name) for name in JOB_FIELDS}

    def write_result(self) -> None:
        """Write the job's end to disk, so that it outlives this process."""
        state = "failed" if self.problem and self.own else "ended"
        path = os.path.join(self.directory, RESULT_NAME)
        # If the disk is full, agents can get the result only as long as this process lives.
        with contextlib.suppress(OSError):
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(json.dumps({**self.to_fields(), "state": state}).encode())
            os.rename(f"{path}.new", path)
