"""The agent's end of the connection to the keeper; it starts a keeper if there is none."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any, Final, Literal

import msgspec
import structlog

from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import describe
from cpumond.host.executor import keeper
from cpumond.host.executor.keeper.lines import LineConnection

log = structlog.get_logger("cpumond.host.executor")

LOG_NAME: Final = "keeper.log"
_MAX_LOG_BYTES: Final = 65_536


class KeptJob(msgspec.Struct):
    """A job as a keeper reports it, and stores it in ``result.json``. The fields are ``keeper.JOB_FIELDS``."""

    id: str
    state: Literal["starting", "running", "ended", "failed"]
    directory: str = ""
    pid: int | None = None
    start_time: float = 0.0
    finish_time: float = 0.0
    exit_code: int | None = None
    signal: int | None = None
    problem: str = ""
    node_fault: bool = False
    slurm_job: int | None = None
    """Set by keepers of version 0.2 for jobs that Slurm ran; no executor supports such jobs any more."""

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "failed")


class _Hello(msgspec.Struct):
    version: int
    jobs: list[KeptJob]


class _Line(msgspec.Struct):
    hello: _Hello | None = None
    job: KeptJob | None = None


def read_result(directory: str) -> KeptJob | None:
    """Read the record of a finished job that a keeper wrote; return None if there is none."""
    try:
        with open(os.path.join(directory, keeper.RESULT_NAME), "rb") as file:
            result = decode_json(file.read(), KeptJob)
    except (OSError, ContentError):
        return None
    return result if result.is_over else None


class KeeperLink:
    """The connection to the keeper. No method waits; the descriptors are in ``epoll``.

    ``is_greeted``: the keeper has listed its jobs; nothing is sent before that."""

    def __init__(self, runtime_dir: str, epoll: select.epoll) -> None:
        self._runtime_dir = runtime_dir
        self._epoll = epoll
        self.is_greeted = False
        self._connection: LineConnection | None = None
        self._starting: subprocess.Popen[bytes] | None = None
        """Process that starts a keeper: it ends at once, and the keeper is its child."""
        self._ready: IO[bytes] | None = None
        """Output of the process in ``_starting``; it ends when the keeper listens or has ended."""
        self._problem = ""
        """Why the last attempt to start a keeper failed; "" if it did not fail."""
        self._alone_since_s = math.inf

    @property
    def alone_s(self) -> float:
        """Seconds for which there has been no keeper."""
        return max(time.monotonic() - self._alone_since_s, 0.0)

    def exchange(self) -> Iterator[list[KeptJob] | KeptJob]:
        """Yield all jobs of a newly connected keeper, as one list, and afterwards each job that changes."""
        self._check_start()
        if self._connection is None and not self._connect():
            self._alone_since_s = min(self._alone_since_s, time.monotonic())
            return
        self._alone_since_s = math.inf
        yield from self._receive()
        if self._connection is not None:
            self._connection.flush()

    def send(self, verb: str, body: Any) -> bool:
        """Send the keeper an order. Return False if there is none; once a keeper greets, all jobs are compared."""
        if self._connection is None or not self.is_greeted:
            return False
        # A lost connection is noticed by the next read.
        self._connection.send({verb: body})
        return True

    def explain(self) -> str:
        """Explain why there is no keeper, as far as known."""
        if self._problem:
            return self._problem
        try:
            with open(os.path.join(self._runtime_dir, LOG_NAME), encoding="utf-8", errors="replace") as file:
                lines = file.read().split("\n")
        except OSError:
            lines = []
        return next((line for line in reversed(lines) if line.strip()), "the reason is unknown")

    def close(self) -> None:
        self._disconnect()
        self._close_ready()
        if self._starting is not None:
            self._starting.wait()

    def _connect(self) -> bool:
        """Connect to the keeper. If there is none, start one; the pipe ``_ready`` then shows when to try again."""
        try:
            directory = os.open(self._runtime_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # Connect through a descriptor, because the path of a unix socket is at most 107 bytes.
            sock.connect(f"/proc/self/fd/{directory}/{keeper.SOCKET_NAME}")
        except OSError as error:
            sock.close()
            if error.errno != errno.EAGAIN:
                self._start_keeper()
            return False
        finally:
            os.close(directory)
        self._close_ready()
        self._connection = LineConnection(sock, self._epoll)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        return True

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._epoll.unregister(self._connection.sock.fileno())
            self._connection.sock.close()
        self._connection = None
        self.is_greeted = False

    def _receive(self) -> Iterator[list[KeptJob] | KeptJob]:
        while self._connection is not None:
            try:
                lines = self._connection.receive()
            except BlockingIOError:
                return
            if lines is None:
                self._disconnect()
                self._connect()
                return
            for text in lines:
                try:
                    line = decode_json(text, _Line)
                except ContentError as error:
                    log.error("the protocol of the keeper of jobs is unknown", problem=str(error))
                    self._disconnect()
                    return
                if line.hello is not None:
                    if line.hello.version != keeper.VERSION:
                        log.warning("the keeper of jobs has another version; it ends with its jobs and this agent")
                    self.is_greeted = True
                    yield line.hello.jobs
                elif line.job is not None:
                    yield line.job

    def _start_keeper(self) -> None:
        if self._starting is not None:
            return
        path = os.path.join(self._runtime_dir, LOG_NAME)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb") as errors:
                if os.fstat(errors.fileno()).st_size > _MAX_LOG_BYTES:
                    errors.truncate(0)
                self._starting = subprocess.Popen(  # noqa: S603 - our own program
                    # Without site: the keeper needs only the standard library, and stays small.
                    [sys.executable, "-I", "-S", keeper.PROGRAM, os.path.abspath(self._runtime_dir)],
                    env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
        except OSError as error:
            problem = f"{sys.executable}: {describe(error)}"
            if problem != self._problem:
                log.error("the keeper of jobs cannot be started", problem=problem)
            self._problem = problem
            return
        self._ready = self._starting.stdout
        assert self._ready is not None
        os.set_blocking(self._ready.fileno(), False)
        self._epoll.register(self._ready, select.EPOLLIN)
        self._problem = ""

    def _check_start(self) -> None:
        if self._ready is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ready.fileno(), 1)
                self._close_ready()
        if self._ready is None and self._starting is not None and self._starting.poll() is not None:
            self._starting = None

    def _close_ready(self) -> None:
        if self._ready is not None:
            self._epoll.unregister(self._ready)
            self._ready.close()
            self._ready = None
