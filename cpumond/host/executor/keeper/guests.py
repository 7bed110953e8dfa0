"""Jobs that Slurm starts: their steps are guests, which come to the keeper by a socket.

A guest has its order from Slurm and runs as the job's user (``step``). Here it learns whether it is the one run of its
job: Slurm may have been asked twice, or may run a job again, but a job is begun once, by the first that asks; which one
is in the file ``claim`` of the job's directory before it is answered. The keeper gives the limits of the job to the
cgroup that Slurm made, and reads its counters while the guest waits for the word that its end was noted.

From a guest: token, slurm_job, state and what ``Job`` has of these. To it: {"answer": "go" (with the job's stdout and
stderr), "no" or "noted"}, {"do": "kill" or "interrupt"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from cpumond.host.executor.keeper import CLAIM_NAME, KILLED_BEFORE, LOST
from cpumond.host.executor.keeper.job import Guest, Job

_MAX_MESSAGE: Final = 65_536
_MAX_STRANGERS: Final = 200
_MAX_PROBLEM: Final = 500
"""Characters."""
_FINAL: Final = ("ended", "failed")
_SAID: Final[dict[str, tuple[str, ...]]] = {
    "starting": (),
    "running": ("pid", "start_time"),
    "ended": ("pid", "start_time", "exit_code", "signal", "cpu_seconds"),
    "failed": (),
}
"""State -> the numbers that come with it."""
_RANGES: Final[dict[str, tuple[int, int]]] = {
    "slurm_job": (0, 2**32), "pid": (1, 2**22), "start_time": (0, 2**40), "exit_code": (0, 255), "signal": (1, 64),
    "cpu_seconds": (0, 2**40),
}  # fmt: skip


class Guests:
    """All guests; part of the keeper's loop."""

    def __init__(
        self,
        jobs: dict[str, Job],
        watch: Callable[[int, Callable[[], object]], None],
        unwatch: Callable[[int], None],
        report: Callable[[Job], None],
        end: Callable[[Job], None],
    ) -> None:
        self._jobs = jobs
        self._watch = watch
        self._unwatch = unwatch
        self._report = report
        self._end = end
        self._name = ""
        self._listener: socket.socket | None = None
        self._strangers: list[socket.socket] = []
        """Connections that have not said yet whose they are; anybody on this host can make some."""

    def listen(self, name: str) -> None:
        """Be found by guests. Raises OSError where somebody else has the name."""
        if self._listener is not None and name == self._name:
            return
        # No path: a job's user need not have a way to any directory of the agent, nor see the same ones.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind("\0" + name)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        if self._listener is not None:
            self._unwatch(self._listener.fileno())
            self._listener.close()
        self._name, self._listener = name, listener
        self._watch(listener.fileno(), self._accept)

    def expect(self, job: Job) -> None:
        """Know a job whose step will come, or comes again. Raises OSError."""
        guest = job.guest = Guest(job.order)
        with contextlib.suppress(FileNotFoundError), open(os.path.join(job.directory, CLAIM_NAME), "rb") as file:
            slurm_job, pid, start = file.read().split()
            guest.is_claimed = True
            job.own = False
            job.slurm_job = int(slurm_job)
            job.start_time = job.order.get("start_time", 0.0)
            job.state = "running" if job.start_time else "starting"
            self._hold(job, int(pid))
            if guest.pidfd < 0 or _read_start(int(pid)) != start:
                self._lose(job)
            else:
                self._find_places(job)

    def pass_on(self, job: Job, verb: str) -> None:
        """Have a job killed or interrupted by its own step; one that has not begun never will."""
        guest = job.guest
        assert guest is not None
        if job.over:
            return
        if not guest.is_claimed:
            if verb == "kill":
                job.problem = KILLED_BEFORE
                self._end(job)
        elif guest.socket is None:
            guest.pending = verb
        else:
            _send(guest.socket, {"do": verb})

    def forget(self, job: Job) -> None:
        """Close what is held for a job."""
        if job.guest is not None:
            self._disconnect(job.guest)
            self._close_pidfd(job.guest)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        if len(self._strangers) >= _MAX_STRANGERS:
            # A guest that is turned away so comes again.
            self._turn_away(self._strangers[0])
        self._strangers.append(connection)
        self._watch(connection.fileno(), lambda: self._hear(connection))

    def _hear(self, connection: socket.socket) -> bool:
        """Read one message; whether there was one, or an end. The first that a guest sends says who it is."""
        if connection.fileno() < 0:
            return False
        try:
            data = connection.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        job = next((job for job in self._jobs.values() if job.guest and job.guest.socket is connection), None)
        try:
            report = read_report(data)
            if job is None:
                job = self._let_in(connection, report)
            if job is not None:
                self._take(job, report)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # It has gone, or is no guest.
            if job is not None and job.guest is not None:
                self._disconnect(job.guest)
            else:
                self._turn_away(connection)
        return True

    def _turn_away(self, connection: socket.socket) -> None:
        if connection in self._strangers:
            self._strangers.remove(connection)
        self._unwatch(connection.fileno())
        connection.close()

    def _let_in(self, connection: socket.socket, report: dict[str, Any]) -> Job | None:
        """The job whose guest this is; None, told "no", where there is none, or another run has it."""
        pid, uid, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        found = [job for job in self._jobs.values() if job.guest and job.guest.token == report["token"]]
        job = next((job for job in found if job.guest and uid == job.guest.uid), None)
        guest = None if job is None else job.guest
        if job is None or guest is None or (guest.pid != pid if guest.is_claimed else job.over):
            _send(connection, {"answer": "no"})
            return None
        if not guest.is_claimed:
            claim = f"{report['slurm_job']} {pid} ".encode() + _read_start(pid)
            path = os.path.join(job.directory, CLAIM_NAME)
            try:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(claim)
            except OSError as error:
                job.problem = f"cannot write {path}: {os.strerror(error.errno or 0)}"
                job.node_fault = True
                _send(connection, {"answer": "no"})
                self._end(job)
                return None
            guest.is_claimed = True
            job.slurm_job = report["slurm_job"]
            self._hold(job, pid)
            if guest.pidfd < 0:
                self._lose(job)
            self._find_places(job)
        if guest.socket is not None:
            self._disconnect(guest)
        self._strangers.remove(connection)
        guest.socket = connection
        if guest.pending:
            _send(connection, {"do": guest.pending})
            guest.pending = None
        return job

    def _take(self, job: Job, report: dict[str, Any]) -> None:
        """What a guest says of its job."""
        guest = job.guest
        assert guest is not None
        assert guest.socket is not None
        state = report["state"]
        if state in _FINAL and job.over:
            _send(guest.socket, {"answer": "noted"})
        if job.over:
            return
        if state == "starting":
            if job.state != state:
                raise ValueError("it has begun: the agent may have lowered its limit since")
            problem = self._set_limits(job)
            if problem:
                job.problem, job.node_fault = problem, True
                _send(guest.socket, {"answer": "no"})
                self._end(job)
                return
            _send_output(guest.socket, [log.fifo_path for log in job.logs])
            self._report(job)
            return
        if state == "failed":
            job.problem, job.node_fault = report["problem"], bool(report["node_fault"])
        else:
            job.own = False
            job.state = "running"
            job.pid, job.start_time = report["pid"], float(report["start_time"])
        if state == "ended":
            for name in ("exit_code", "signal", "cpu_seconds"):
                setattr(job, name, report[name])
        if state in _FINAL:
            self._read_totals(job)
            self._end(job)
            _send(guest.socket, {"answer": "noted"})
        else:
            self._report(job)

    def _hold(self, job: Job, pid: int) -> None:
        guest = job.guest
        assert guest is not None
        guest.pid = pid
        with contextlib.suppress(OSError):
            guest.pidfd = os.pidfd_open(pid)
            self._watch(guest.pidfd, lambda: self._see_gone(job))

    def _see_gone(self, job: Job) -> None:
        """The step of a job has ended, perhaps before it could say anything."""
        guest = job.guest
        if guest is None or guest.pidfd < 0:
            return
        poller = select.poll()
        poller.register(guest.pidfd, select.POLLIN)
        if not poller.poll(0):
            return
        # A child may hold the other end open: then there is no end to be read.
        while guest.socket is not None and not job.over and self._hear(guest.socket):
            pass
        self._disconnect(guest)
        self._close_pidfd(guest)
        if not job.over:
            self._lose(job)
        job.look_at_s = 0.0

    def _lose(self, job: Job) -> None:
        """A step that ended without a word: Slurm, or the agent that had it killed, knows how."""
        self._read_totals(job)
        job.own = False
        job.problem = LOST
        self._end(job)

    def _disconnect(self, guest: Guest) -> None:
        if guest.socket is not None:
            self._unwatch(guest.socket.fileno())
            guest.socket.close()
        guest.socket = None

    def _close_pidfd(self, guest: Guest) -> None:
        if guest.pidfd >= 0:
            self._unwatch(guest.pidfd)
            os.close(guest.pidfd)
        guest.pidfd = -1

    def _find_places(self, job: Job) -> None:
        """The cgroups of the whole job, in each hierarchy where Slurm made one."""
        guest = job.guest
        assert guest is not None
        with contextlib.suppress(OSError), open(f"/proc/{guest.pid}/cgroup", encoding="utf-8") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                found = re.match(rf"/(.*/)?job_{job.slurm_job}(?=/|$)", path)
                for controller in controllers.split(","):
                    if found and controller in guest.mounts:
                        job.places[controller] = guest.mounts[controller] + found.group()
        guest.places = list(dict.fromkeys(job.places.values()))

    def _set_limits(self, job: Job) -> str:
        """Before it begins; the problem, or "". Where Slurm made no cgroup for a controller there is nothing to set."""
        guest = job.guest
        assert guest is not None
        for controller, name, text in guest.limits:
            place = job.places.get(controller)
            if place is None:
                continue
            if name == "pids.max":
                _hand_down_pids(os.path.dirname(place))
            try:
                fd = os.open(os.path.join(place, name), os.O_WRONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as error:
                return f"cannot open {place}/{name}: {os.strerror(error.errno or 0)}"
            try:
                os.write(fd, text.encode())
            except OSError as error:
                return f"cannot write {text!r} to {place}/{name}: {os.strerror(error.errno or 0)}"
            finally:
                os.close(fd)
        return ""

    def _read_totals(self, job: Job) -> None:
        """The counters of the whole job, as far as Slurm keeps cgroups for them."""
        places = job.places
        usage_us = _read_key(places.get(""), "cpu.stat", "usage_usec")
        usage_ns = _read_number(places.get("cpuacct"), "cpuacct.usage")
        if usage_us is not None:
            job.cpu_seconds = usage_us * 1e-6
        elif usage_ns is not None:
            job.cpu_seconds = usage_ns * 1e-9
        job.max_memory = _read_number(places.get("memory"), "memory.max_usage_in_bytes")
        if job.max_memory is None:
            job.max_memory = _read_number(places.get(""), "memory.peak")
        job.oom_kills = _read_key(places.get(""), "memory.events", "oom_kill") or 0
        # On v1 each cgroup counts its own processes only.
        for place, _, _ in os.walk(places.get("memory", "")):
            job.oom_kills += _read_key(place, "memory.oom_control", "oom_kill") or 0


def read_report(data: bytes) -> dict[str, Any]:
    """What a guest says. The job's user may make it say anything, and agents must be able to read it: one that they
    cannot would keep them from all other jobs.

    Raises ValueError, TypeError, KeyError or RecursionError for what is no report.
    """
    report: dict[str, Any] = json.loads(data)
    for name in ("slurm_job", *_SAID[report["state"]]):
        value = report[name]
        is_number = type(value) is int or (type(value) is float and name in ("start_time", "cpu_seconds"))
        if value is None and name in ("exit_code", "signal"):
            continue
        least, most = _RANGES[name]
        if not is_number or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}")
    if report["state"] == "failed":
        report["problem"] = str(report["problem"])[:_MAX_PROBLEM].encode("utf-8", "replace").decode()
    return report


def _hand_down_pids(place: str) -> None:
    """Let the jobs of a slurmd be held to so many processes (v2): nobody but them is below ``place``."""
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(place, "cgroup.subtree_control"), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"+pids")
        finally:
            os.close(fd)


def _read_start(pid: int) -> bytes:
    """When a process started, in ticks since the host did: with its id, which process it is. Empty when it is gone."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[19]
    return b"-"


def _read(place: str | None, name: str) -> str:
    if place is None:
        return ""
    try:
        with open(os.path.join(place, name), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _read_number(place: str | None, name: str) -> int | None:
    text = _read(place, name).strip()
    return int(text) if text.isdecimal() else None


def _read_key(place: str | None, name: str, key: str) -> int | None:
    for line in _read(place, name).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == key and words[1].isdecimal():
            return int(words[1])
    return None


def _send_output(connection: socket.socket, paths: list[str]) -> None:
    """The word to begin, with ends of the FIFOs that are the job's own: those of the keeper do not wait for room."""
    # It may have gone; or the directory has, and with it what would be written: then its step gives up.
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(path, "r+b", buffering=0, opener=_open_fifo)) for path in paths]
        socket.send_fds(connection, [b'{"answer": "go"}'], [file.fileno() for file in files])


def _open_fifo(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)


def _send(connection: socket.socket, message: dict[str, str]) -> None:
    """A guest that has gone, or does not read, is none of the keeper's troubles."""
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode())
