"""What Slurm runs for a job: the parent of the job's main process, in the job's cgroup, as the job's user.

The batch script calls ``main``. It asks the keeper whether this is the one run of the job, gets the job's output from
it, starts the main process, ends with it whatever it left behind, and tells the keeper how it ended. The keeper may go
and come back meanwhile; what it missed is told when it is there again. See ``guests`` for what both say.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from typing import Any, Final, NoReturn

from cpumond.host.executor.keeper.child import give_up_privileges, run_child

WAIT_S: Final = 60.0
"""How long a step waits for a keeper that is away, before its job has begun and after it has ended."""
GAVE_UP: Final = 75
"""Its exit code when no keeper came: the job has not run."""

_RETRY_S: Final = 0.2
_REAP_S: Final = 0.005
_MAX_MESSAGE: Final = 65_536
_PR_SET_CHILD_SUBREAPER: Final = 36
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm sends to this process goes to all of the job."""


class Step:
    """One run of a job. ``report`` is what the keeper must know."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.report: dict[str, Any] = {
            "token": order["token"],
            "slurm_job": int(os.environ.get("SLURM_JOB_ID", "0")),
            "state": "starting",
        }
        self._keeper: socket.socket | None = None

    def connect(self) -> bool:
        """Find the keeper and tell it all; False when it is not there."""
        keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            keeper.connect("\0" + self.order["keeper"])
            _, uid, _ = struct.unpack(
                "3i", keeper.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if uid != self.order["keeper_uid"]:
                raise PermissionError("somebody else listens there")
            keeper.send(json.dumps(self.report).encode())
        except OSError:
            keeper.close()
            return False
        self._keeper = keeper
        return True

    def tell(self, **changes: Any) -> None:
        """Change the report and send it; a keeper that is away gets it when it comes back."""
        self.report.update(changes)
        if self._keeper is not None:
            try:
                self._keeper.send(json.dumps(self.report).encode())
            except OSError:
                self._disconnect()

    def ask(self) -> tuple[str, list[int]]:
        """Tell the keeper until it answers, for WAIT_S: its answer, "" when there is none, and descriptors with it."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            if self._keeper is None and not self.connect():
                time.sleep(_RETRY_S)
                continue
            message, fds = self.receive(deadline_s - time.monotonic())
            if message.get("answer") in ("go", "no", "noted"):
                return message["answer"], fds
        return "", []

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """What the keeper says; {} when it says nothing in time, or has gone."""
        assert self._keeper is not None
        poller = select.poll()
        poller.register(self._keeper, select.POLLIN)
        if not poller.poll(max(timeout_s, 0.0) * 1000):
            return {}, []
        try:
            data, fds, _, _ = socket.recv_fds(self._keeper, _MAX_MESSAGE, 2)
            if not data:
                raise ConnectionResetError
            message = json.loads(data)
        except (OSError, ValueError):
            self._disconnect()
            return {}, []
        return (message if isinstance(message, dict) else {}), fds

    def _disconnect(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None

    def run(self, output: list[int]) -> None:
        """Start the main process and stay until it has ended, and all that it left behind."""
        self.order.update(user="", procs=[])  # it is that user, and in the cgroup
        hard_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        signals, ready = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(ready, warn_on_full_buffer=False)
        for caught in (signal.SIGCHLD, *_PASSED_ON):
            signal.signal(caught, lambda *_: None)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        start_time = time.time()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number, fd in enumerate(output, 1):
                os.dup2(fd, number)
            run_child(self.order, write_end, hard_descriptors)
        os.close(write_end)
        for fd in output:
            os.close(fd)
        with os.fdopen(read_end, "rb") as status:
            problem = status.read()
        if problem:
            os.waitpid(pid, 0)
            self.tell(state="failed", **json.loads(problem))
            return
        self.tell(state="running", pid=pid, start_time=start_time)
        status_code = self._wait(pid, signals)
        self._end_all()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = os.waitstatus_to_exitcode(status_code)
        self.tell(
            state="ended",
            finish_time=time.time(),
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            cpu_seconds=used.ru_utime + used.ru_stime,
        )

    def _wait(self, pid: int, signals: int) -> int:
        """Until the main process has ended: its wait status. Does what the keeper says meanwhile."""
        retry_at_s = 0.0
        while True:
            if (status_code := _reap(pid)) is not None:
                return status_code
            if self._keeper is None and time.monotonic() >= retry_at_s:
                self.connect()
                retry_at_s = time.monotonic() + _RETRY_S
            poller = select.poll()
            poller.register(signals, select.POLLIN)
            if self._keeper is not None:
                poller.register(self._keeper, select.POLLIN)
            for fd, _ in poller.poll(None if self._keeper is not None else _RETRY_S * 1000):
                if fd == signals:
                    for caught in set(os.read(signals, _MAX_MESSAGE)).intersection(_PASSED_ON):
                        _signal_all(caught)
                else:
                    order = self.receive(0.0)[0].get("do")
                    if order == "kill":
                        _signal_all(signal.SIGKILL)
                    elif order == "interrupt":
                        _signal_all(signal.SIGTERM)

    def _end_all(self) -> None:
        """SIGKILL to what the main process left behind, until there is nothing."""
        while _signal_all(signal.SIGKILL):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(_REAP_S)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _reap(pid: int) -> int | None:
    """Take leave of all children that have ended; the wait status of ``pid`` if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            found, status_code = os.waitpid(-1, os.WNOHANG)
            if found == pid:
                return status_code
            if not found:
                break
    return None


def _signal_all(number: int) -> int:
    """Send a signal to all living descendants; to how many. All of a job's processes are: orphans come to this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(name))
    found, todo = 0, [os.getpid()]
    while todo:
        for pid in children.get(todo.pop(), ()):
            found += 1
            todo.append(pid)
            # It may have been reaped since: its number is not given to another process so soon.
            with contextlib.suppress(OSError):
                os.kill(pid, number)
    return found


def end_like(exit_code: int | None, number: int | None) -> NoReturn:
    """End as the main process did: that is what Slurm's accounting shows."""
    if number is not None:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), number)
        time.sleep(_RETRY_S)
    os._exit(exit_code if exit_code is not None else 1)


def main(text: str) -> int:
    """Be the step of the job whose order (JSON) is ``text``; the exit code."""
    give_up_privileges()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What ends the job is not meant for this one. SIGKILL is for both: then the keeper sees it go.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    step = Step(json.loads(text))
    answer, output = step.ask()
    if answer != "go":
        return 0 if answer else GAVE_UP
    step.run(output)
    step.ask()
    end_like(step.report.get("exit_code"), step.report.get("signal"))
