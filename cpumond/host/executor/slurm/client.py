"""Slurm's commands, run in threads: a controller that does not answer holds up nobody."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from cpumond.core.errors import describe
from cpumond.host.executor.slurm.commands import summarise

TIMEOUT_S: Final = 20.0
"""More than Slurm's own time-out of 10 s: an answer that comes late is better than none."""


class Answer(msgspec.Struct, frozen=True):
    """What a command said. ``code`` None: it did not end in time, or could not be run."""

    code: int | None
    out: str
    err: str

    @property
    def problem(self) -> str:
        return summarise(self.err) or f"exit code {self.code}"


class Account(NamedTuple):
    """Whom a command is run as; ``name`` "": without the groups beside ``gid``."""

    uid: int
    gid: int
    name: str = ""


Then = Callable[[Answer], None]
_Task = tuple[list[str], bytes, Account | None, Then]


class SlurmClient:
    """Runs ``workers`` commands at a time; ``wake`` is called by their threads when there is an answer to ``take``."""

    def __init__(self, wake: Callable[[], None], workers: int) -> None:
        self._wake = wake
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Then, Answer]] = queue.SimpleQueue()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._once: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name="slurm", daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def run(self, argv: list[str], then: Then, data: bytes = b"", account: Account | None = None) -> None:
        """Run a command soon, as ``account`` (None: this process's), with ``data`` as its input; then ``take`` calls
        ``then``."""
        self._tasks.put((argv, data, account, then))

    def run_once(self, argv: list[str], account: Account) -> None:
        """The same with a command whose answer does not matter, unless it is still to be run: while the controller is
        away each takes long."""
        key = tuple(argv)
        if key not in self._once:
            self._once.add(key)
            self.run(argv, lambda _: self._once.discard(key), account=account)

    def take(self) -> None:
        """Have the answers that came since taken in."""
        with contextlib.suppress(queue.Empty):
            while True:
                then, answer = self._done.get_nowait()
                then(answer)

    def ask(self, argv: list[str], timeout_s: float) -> Answer:
        """Run a command and wait for it."""
        return self._run(argv, b"", None, timeout_s)

    def close(self) -> None:
        """Commands that run are killed: whether Slurm had taken them is found out by the next run of the agent."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(1.0)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            argv, data, account, then = task
            answer = self._run(argv, data, account, TIMEOUT_S)
            if self._closed:
                return
            self._done.put((then, answer))
            self._wake()

    def _run(self, argv: list[str], data: bytes, account: Account | None, timeout_s: float) -> Answer:
        try:
            with self._lock:
                if self._closed:
                    return Answer(None, "", "the agent ends")
                process = _begin(argv, account)
                self._running.add(process)
        except OSError as error:
            return Answer(127, "", f"cannot run {argv[0]}: {describe(error)}")
        try:
            with process:  # at its end the process is waited for
                try:
                    out, err = process.communicate(data, timeout_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return Answer(None, "", "")
            return Answer(process.returncode, _decode(out), _decode(err))
        finally:
            with self._lock:
                self._running.discard(process)


def _begin(argv: list[str], account: Account | None) -> subprocess.Popen[bytes]:
    """Raises OSError. The environment is as small as can be: Slurm would hand it to the job."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
    if "SLURM_CONF" in os.environ:
        environment["SLURM_CONF"] = os.environ["SLURM_CONF"]
    if account is None or account.uid == os.geteuid():
        return subprocess.Popen(  # noqa: S603 - a command of Slurm
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
        )
    return subprocess.Popen(  # noqa: S603 - the same, as the user whose job it is
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd="/",
        user=account.uid,
        group=account.gid,
        extra_groups=os.getgrouplist(account.name, account.gid) if account.name else [],
    )


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")
