"""The agent's end of the connection to the keeper, which is started where there is none."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
import structlog

from cpumond.decode import ContentError, decode_json
from cpumond.errors import describe
from cpumond.executor import keeper

log = structlog.get_logger("cpumond.executor")

LOG_NAME: Final = "keeper.log"
_RECEIVE_BYTES: Final = 1 << 18
_MAX_LOG_BYTES: Final = 65_536


class KeptJob(msgspec.Struct):
    """A job as a keeper tells of it, and as it is in its ``result.json``: ``keeper.TOLD``."""

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
    """What a keeper wrote of a job that is over; None where it did not come to that."""
    try:
        with open(os.path.join(directory, keeper.RESULT_NAME), "rb") as file:
            result = decode_json(file.read(), KeptJob)
    except (OSError, ContentError):
        return None
    return result if result.is_over else None


class KeeperLink:
    """Hears and says everything without waiting; its descriptors are in ``epoll``.

    ``is_greeted``: the keeper has told of all its jobs; before that nothing is sent.
    """

    def __init__(self, runtime_dir: str, epoll: select.epoll) -> None:
        self._runtime_dir = runtime_dir
        self._epoll = epoll
        self.is_greeted = False
        self._socket: socket.socket | None = None
        self._received = b""
        self._unsent = b""
        self._keeper_pid: int | None = None
        self._ready = -1
        """Readable when a keeper that is being started listens, or has ended."""
        self._problem = ""
        """Why the last keeper could not even be started."""
        self._alone_since_s = math.inf

    @property
    def alone_s(self) -> float:
        """For how long there has been no keeper."""
        return max(time.monotonic() - self._alone_since_s, 0.0)

    def exchange(self) -> Iterator[list[KeptJob] | KeptJob]:
        """All the jobs of a keeper that is new here, and one at each change of it."""
        self._reap_keeper()
        if self._socket is None and not self._connect():
            self._alone_since_s = min(self._alone_since_s, time.monotonic())
            return
        self._alone_since_s = math.inf
        yield from self._receive()
        self._flush()

    def send(self, verb: str, body: Any) -> None:
        """Have the keeper do something."""
        self._unsent += json.dumps({verb: body}).encode() + b"\n"
        self._flush()

    def explain(self) -> str:
        """Why there is no keeper, as far as it is known."""
        if self._problem:
            return self._problem
        try:
            with open(os.path.join(self._runtime_dir, LOG_NAME), encoding="utf-8", errors="replace") as file:
                lines = file.read().split("\n")
        except OSError:
            lines = []
        return next((line for line in reversed(lines) if line.strip()), "it did not say why")

    def close(self) -> None:
        """The keeper goes on."""
        self._disconnect()
        self._close_ready()
        if self._keeper_pid is not None:
            # The first process of a keeper ends at once.
            with contextlib.suppress(OSError):
                os.waitpid(self._keeper_pid, 0)

    # ---- the connection

    def _connect(self) -> bool:
        """Connect to the keeper, or start one: then the ready pipe tells when to try again."""
        try:
            directory = os.open(self._runtime_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # By way of a descriptor: the path of a unix socket is 107 bytes at most.
            sock.connect(f"/proc/self/fd/{directory}/{keeper.SOCKET_NAME}")
        except OSError as error:
            sock.close()
            if error.errno != errno.EAGAIN:
                self._start_keeper()
            return False
        finally:
            os.close(directory)
        self._close_ready()
        self._socket = sock
        self._received = self._unsent = b""
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._epoll.unregister(self._socket.fileno())
            self._socket.close()
        self._socket = None
        self.is_greeted = False

    def _flush(self) -> None:
        if self._socket is None:
            return
        blocked = False
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            blocked = True
        except OSError:
            # Its end is seen when it is read from.
            self._unsent = b""
        self._epoll.modify(self._socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if blocked else 0))

    def _receive(self) -> Iterator[list[KeptJob] | KeptJob]:
        while self._socket is not None:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._disconnect()
                self._connect()
                return
            *lines, self._received = (self._received + data).split(b"\n")
            for text in lines:
                try:
                    line = decode_json(text, _Line)
                except ContentError as error:
                    log.error("the keeper of jobs speaks no language known here", problem=str(error))
                    self._disconnect()
                    return
                if line.hello is not None:
                    if line.hello.version != keeper.VERSION:
                        log.warning("the keeper of jobs is of another version; it ends when its jobs and this agent do")
                    self.is_greeted = True
                    yield line.hello.jobs
                elif line.job is not None:
                    yield line.job

    # ---- its process

    def _start_keeper(self) -> None:
        if self._keeper_pid is not None or self._ready >= 0:
            return
        read_end = write_end = errors = -1
        try:
            read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            path = os.path.join(self._runtime_dir, LOG_NAME)
            errors = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if os.fstat(errors).st_size > _MAX_LOG_BYTES:
                os.ftruncate(errors, 0)
            self._keeper_pid = os.posix_spawn(
                sys.executable,
                # Without site: it needs nothing but the standard library, and stays small.
                [sys.executable, "-I", "-S", keeper.PROGRAM, os.path.abspath(self._runtime_dir)],
                {"PATH": os.defpath, "LANG": "C.UTF-8"},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
                    (os.POSIX_SPAWN_DUP2, write_end, 1),
                    (os.POSIX_SPAWN_DUP2, errors, 2),
                ],
            )
            self._ready, read_end = read_end, -1
            self._epoll.register(self._ready, select.EPOLLIN)
            self._problem = ""
        except OSError as error:
            problem = f"{sys.executable}: {describe(error)}"
            if problem != self._problem:
                log.error("the keeper of jobs cannot be started", problem=problem)
            self._problem = problem
        finally:
            for fd in (read_end, write_end, errors):
                if fd >= 0:
                    os.close(fd)

    def _reap_keeper(self) -> None:
        if self._keeper_pid is not None:
            try:
                pid, _ = os.waitpid(self._keeper_pid, os.WNOHANG)
            except ChildProcessError:
                pid = self._keeper_pid
            if pid:
                self._keeper_pid = None
        if self._ready >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ready, 1)
                self._close_ready()

    def _close_ready(self) -> None:
        if self._ready >= 0:
            self._epoll.unregister(self._ready)
            os.close(self._ready)
            self._ready = -1
