"""The keeper: the parent of the jobs of kind "cgroup"; a small process that outlives the agent.

It starts jobs, moves what they write from FIFOs into log files, waits for them, kills what a job leaves behind, and
keeps exit codes. It runs as a program of its own, with nothing but the standard library: ``keeper.py RUNTIME_DIR``.

Agents connect to ``keeper.sock`` in RUNTIME_DIR (only root and the keeper's own user) and exchange lines of JSON, each
an object with one key. The keeper's first line is ``hello``: version and all jobs it has; then a ``job`` line for each
change of one. From the agent: ``start`` a job, ``adopt`` one of a keeper that was killed, ``kill`` its main process,
``forget`` one that is over. A job line has ``id``, ``directory``, ``state`` (starting, running, ended, failed),
``pid``, ``start_time``, ``finish_time``, ``exit_code``, ``signal``, ``problem``, ``node_fault``; when a job is over the
same is in its directory's ``result.json``, before it is told.

In the directory of a job are, for each of stdout and stderr: the FIFO ``stdout.fifo``, the log ``stdout`` with the part
before it, ``stdout.1``, and ``stdout.total``, the number of bytes written before the first of ``stdout``.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pwd
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

VERSION: Final = 2
SOCKET_NAME: Final = "keeper.sock"
LOCK_NAME: Final = "keeper.lock"
RESULT_NAME: Final = "result.json"
STREAMS: Final = ("stdout", "stderr")
LOST: Final = "its exit code was lost: the process that waited for it was killed"

IDLE_S: Final = 3.0
_RETRY_S: Final = 0.01
_WATCH_S: Final = 0.5
_CHUNK_BYTES: Final = 65_536
_DRAIN_CHUNKS: Final = 32
_DRAIN_READS: Final = 1000
_MAX_WAITING_BYTES: Final = 1 << 26
_PIDFDS_AT_ONCE: Final = 200
_SOFT_DESCRIPTORS: Final = 1024
_MAX_DESCRIPTORS: Final = 1 << 22
_MAX_FAILURES: Final = 1000
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_MAX_PROBLEM: Final = 500
"""Characters; as JSON less than a page, which a pipe takes as a whole."""

Fields = dict[str, Any]
"""An object of JSON."""


class Log:
    """One stream of one job: moves bytes from its FIFO to its file, never more than ``max_bytes`` on disk."""

    def __init__(self, directory: str, name: str, max_bytes: int) -> None:
        self.path = os.path.join(directory, name)
        self.fifo_path = f"{self.path}.fifo"
        self.fifo = -1
        self._half_bytes = max(max_bytes // 2, 1)
        self._file = self._total = -1
        self._size = self._before = 0

    def open(self) -> None:
        """Make the FIFO and the files, or take up those that are there. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self.fifo_path, 0o600)
        # For reading and writing: neither end ever sees the other one leave.
        self.fifo = os.open(self.fifo_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._total = os.open(f"{self.path}.total", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        text = os.read(self._total, 64).strip()
        if text.isdigit():
            self._before = int(text)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._before = os.stat(f"{self.path}.1").st_size
        self._write_total()
        self._open_file()

    def _open_file(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size

    def _write_total(self) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._total, b"%020d\n" % self._before, 0)

    def pump(self) -> bool:
        """Move one chunk; False when there was none. A full disk costs the data, not the job."""
        try:
            data = memoryview(os.read(self.fifo, _CHUNK_BYTES))
        except OSError:
            return False
        while data:
            try:
                written = self._write(data)
            except OSError:
                self._before += len(data)
                self._write_total()
                break
            data = data[written:]
        return True

    def _write(self, data: memoryview) -> int:
        if self._file < 0:
            self._open_file()
        if self._size >= self._half_bytes:
            self._rotate()
        written = os.write(self._file, data[: self._half_bytes - self._size])
        self._size += written
        return written

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, f"{self.path}.1")
        self._before += self._size
        self._write_total()
        os.close(self._file)
        self._file = -1
        self._open_file()

    def close(self, drain: bool = True) -> None:
        """Take what is still in the FIFO and remove it."""
        if self.fifo >= 0:
            for _ in range(_DRAIN_CHUNKS if drain else 0):
                if not self.pump():
                    break
        for fd in (self.fifo, self._file, self._total):
            if fd >= 0:
                os.close(fd)
        self.fifo = self._file = self._total = -1
        with contextlib.suppress(OSError):
            os.unlink(self.fifo_path)

    def remove(self) -> None:
        """Remove the files too."""
        for suffix in ("", ".1", ".total"):
            with contextlib.suppress(OSError):
                os.unlink(self.path + suffix)


class Job:
    """A job and what is held for it. ``over``: its main process is gone; the rest of the cgroup may not be."""

    def __init__(self, order: Fields) -> None:
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
        self.pause_s = _RETRY_S
        self.start_time = 0.0
        self.finish_time = 0.0
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.problem = ""
        self.node_fault = False

    def describe(self) -> Fields:
        """The job as agents are told."""
        return {
            "id": self.id,
            "directory": self.directory,
            "state": self.state,
            "pid": self.pid,
            "start_time": self.start_time,
            "finish_time": self.finish_time,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "problem": self.problem,
            "node_fault": self.node_fault,
        }

    def write_result(self) -> None:
        """What it came to, where it outlives this process."""
        state = "failed" if self.problem and self.own else "ended"
        path = os.path.join(self.directory, RESULT_NAME)
        # Without a place on disk the result is told all the same, as long as this process lives.
        with contextlib.suppress(OSError):
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(json.dumps({**self.describe(), "state": state}).encode())
            os.rename(f"{path}.new", path)


# ---- cgroups, as little as it takes: the agent that knows them may be dead


def list_processes(cgroups: list[str]) -> set[int]:
    """The living processes of some cgroups and of those below them."""
    found: set[int] = set()
    for cgroup in cgroups:
        for place, _, _ in os.walk(cgroup):
            try:
                with open(os.path.join(place, "cgroup.procs"), "rb") as file:
                    found.update(int(word) for word in file.read().split())
            except (OSError, ValueError):
                # Gone, or threaded: then its processes are those of the domain above it.
                continue
    return {pid for pid in found if pid > 0 and _is_alive(pid)}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_member(pid: int, cgroups: list[str]) -> bool:
    """Whether a process says itself that it is in one of some cgroups, which may be under another mount now."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            names = {os.path.basename(line.rstrip(b"\n").split(b":", 2)[-1]) for line in file}
    except OSError:
        return False
    return any(os.fsencode(os.path.basename(cgroup)) in names for cgroup in cgroups)


def kill_processes(cgroups: list[str]) -> bool:
    """SIGKILL to everything in some cgroups; whether nothing was there any more."""
    found = list_processes(cgroups)
    if not found:
        return True
    for cgroup in cgroups:
        with contextlib.suppress(OSError):
            fd = os.open(os.path.join(cgroup, "cgroup.kill"), os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"1")
            finally:
                os.close(fd)
    waiting = sorted(found)
    while waiting:
        held = {}
        for pid in waiting[:_PIDFDS_AT_ONCE]:
            with contextlib.suppress(OSError):
                held[pid] = os.pidfd_open(pid)
        # A second look with the descriptors in hand: an id that was given away meanwhile is not there any more.
        there = list_processes(cgroups)
        for pid, pidfd in held.items():
            if pid in there:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        del waiting[:_PIDFDS_AT_ONCE]
    return False


# ---- the child, between fork and exec


class StepError(Exception):
    """A step that failed: a sentence, and whether the node is to blame."""

    def __init__(self, problem: str, node_fault: bool) -> None:
        super().__init__(problem)
        self.problem = problem
        self.node_fault = node_fault


@contextlib.contextmanager
def step(what: str, node_fault: bool = False) -> Iterator[None]:
    """Say ``what`` could not be done. Raises StepError."""
    try:
        yield
    except OSError as error:
        raise StepError(f"cannot {what}: {os.strerror(error.errno or 0)}", node_fault) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise StepError(f"cannot {what}: {error}", node_fault) from error


def run_child(order: Fields, status: int, hard_descriptors: int) -> NoReturn:
    """Become the job, or tell why not through ``status``."""
    try:
        # Those of all the other jobs, before the first file is opened: together they may be more than a job may have.
        os.closerange(3, status)
        os.closerange(status + 1, min(hard_descriptors, _MAX_DESCRIPTORS))
        become_job(order, hard_descriptors)
    except StepError as error:
        report: Fields = {"problem": error.problem, "node_fault": error.node_fault}
    except BaseException as error:
        report = {"problem": f"cannot start: {error!r}", "node_fault": True}
    report["problem"] = report["problem"][:_MAX_PROBLEM]
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(report).encode())
    os._exit(127)


def become_job(order: Fields, hard_descriptors: int) -> NoReturn:
    """All that lies between the fork and the job's program. Raises StepError."""
    with step("prepare the process", node_fault=True):
        os.setsid()
        os.umask(0o022)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"0")
    user = order["user"]
    account = None
    if user:
        try:
            account = pwd.getpwnam(user)
        except (KeyError, ValueError):
            raise StepError(f"there is no user {user!r} on this host", node_fault=False) from None
        if account.pw_uid == os.geteuid():
            account = None
    with step("open its output", node_fault=True):
        os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
        for number, name in enumerate(STREAMS, 1):
            fifo = os.open(os.path.join(order["directory"], f"{name}.fifo"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if account is not None and os.geteuid() == 0:
                os.fchown(fifo, account.pw_uid, account.pw_gid)
            os.dup2(fifo, number)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    pid = str(os.getpid()).encode()
    # As late as the rights allow, and the one with the quota last: the way here is not the job's to pay for.
    for path in reversed(order["procs"]):
        with step(f"enter the cgroup of {path}", node_fault=True):
            # Made where it is missing: in a tree of plain files; the kernel's refuses that.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(fd, pid)
            os.close(fd)
    if account is not None:
        with step(f"become the user {user!r}"):
            os.initgroups(account.pw_name, account.pw_gid)
            os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
            os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    with step(f"change to the directory {order['working_directory']!r}"):
        os.chdir(order["working_directory"])
    with step("set its limits", node_fault=True):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_SOFT_DESCRIPTORS, hard_descriptors), hard_descriptors))
    argv = order["argv"]
    with step(f"run {argv[0]!r}"):
        os.execvpe(argv[0], argv, order["environment"])  # noqa: S606 - what the job orders, as its user


# ---- the parent


class Client:
    """One connected agent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.waiting = b""


class Keeper:
    """All jobs, all agents, one loop."""

    def __init__(self, runtime_dir: str, directory: int, hard_descriptors: int) -> None:
        self._runtime_dir = runtime_dir
        self.directory = directory
        self._listener = listen(directory)
        self._hard_descriptors = hard_descriptors
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._jobs: dict[str, Job] = {}
        self._living: set[str] = set()
        self._due: dict[str, Job] = {}
        """Jobs whose cgroups must be looked at, at their ``look_at_s``."""
        self._clients: dict[int, Client] = {}
        self._failures = 0
        self._watch(self._listener.fileno(), self._accept)

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run(self) -> None:
        """Until there is nothing to do any more."""
        idle_since_s: float | None = None
        while True:
            for fd, _ in self._epoll.poll(self._timeout_s()):
                handler = self._handlers.get(fd)
                if handler is not None:
                    self._guard(handler)
            now_s = time.monotonic()
            for job in list(self._due.values()):
                if now_s >= job.look_at_s:
                    job.look_at_s = now_s + _WATCH_S  # unless it says otherwise
                    self._guard(functools.partial(self._advance, job, now_s))
            if self._clients or self._living:
                idle_since_s = None
            elif idle_since_s is None:
                idle_since_s = now_s
            elif now_s - idle_since_s >= IDLE_S:
                return

    def _guard(self, work: Callable[[], object]) -> None:
        """What goes wrong with one job must not end the parent of all; the traceback is in the keeper's log."""
        try:
            work()
        except Exception:
            traceback.print_exc()
            self._failures += 1
            if self._failures > _MAX_FAILURES:
                raise  # it would spin for ever; the next keeper takes over what runs

    def _timeout_s(self) -> float:
        if self._due:
            return max(min(job.look_at_s for job in self._due.values()) - time.monotonic(), 0.0)
        return -1.0 if self._clients or self._living else IDLE_S

    # -- agents

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid not in (0, os.geteuid()):
            sock.close()
            return
        sock.setblocking(False)
        # What an agent that ended has ordered comes first: the next one must hear of all of it.
        for other in list(self._clients.values()):
            for _ in range(_DRAIN_READS):
                if not self._serve(other):
                    break
        client = Client(sock)
        self._clients[sock.fileno()] = client
        self._watch(sock.fileno(), lambda: self._serve(client))
        self._send(client, {"hello": {"version": VERSION, "jobs": [job.describe() for job in self._jobs.values()]}})

    def _drop(self, client: Client) -> None:
        fd = client.sock.fileno()
        if self._clients.pop(fd, None) is not None:
            self._unwatch(fd)
            client.sock.close()

    def _send(self, client: Client, message: Fields) -> None:
        client.waiting += json.dumps(message).encode() + b"\n"
        self._flush(client)

    def _flush(self, client: Client) -> None:
        fd = client.sock.fileno()
        if fd not in self._clients:
            return
        try:
            while client.waiting:
                client.waiting = client.waiting[client.sock.send(client.waiting) :]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        if len(client.waiting) > _MAX_WAITING_BYTES:
            self._drop(client)
            return
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if client.waiting else 0))

    def _serve(self, client: Client) -> bool:
        """Read once; whether there was something."""
        self._flush(client)
        if client.sock.fileno() < 0:
            return False
        try:
            data = client.sock.recv(_CHUNK_BYTES * 4)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return False
        *lines, client.received = (client.received + data).split(b"\n")
        try:
            for line in lines:
                for verb, body in json.loads(line).items():
                    self._obey(verb, body)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # Not a language that is spoken here; jobs have nothing to do with it.
            self._drop(client)
            return False
        return True

    def _listen_anew(self) -> None:
        """Where the next agent looks for it: the directory was removed, and made again."""
        try:
            directory, lock = take_place(self._runtime_dir)
        except OSError:
            return  # there is none, it is this one's still, or another keeper has it
        try:
            listener = listen(directory)
        except OSError:
            os.close(directory)
            os.close(lock)
            return  # rather the place that nobody finds than none
        self._unwatch(self._listener.fileno())
        self._listener.close()
        self.directory, self._listener = directory, listener
        self._watch(self._listener.fileno(), self._accept)

    def _obey(self, verb: str, body: Any) -> None:
        if verb == "listen":
            self._listen_anew()
            return
        if verb in ("start", "adopt"):
            if body["id"] in self._jobs:
                return
            job = self._jobs[body["id"]] = Job(body)
            self._living.add(job.id)
            if verb == "start":
                self._start(job)
            else:
                self._adopt(job)
            return
        found = self._jobs.get(body)
        if found is None:
            return
        if verb == "kill" and found.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(found.pidfd, signal.SIGKILL)
        elif verb == "forget" and found.state in ("ended", "failed"):
            del self._jobs[found.id]

    def _tell(self, job: Job) -> None:
        for client in list(self._clients.values()):
            self._send(client, {"job": job.describe()})

    # -- jobs

    def _start(self, job: Job) -> None:
        read_end = write_end = -1
        try:
            for log in job.logs:
                log.open()
            read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            job.start_time = time.time()
            pid = os.fork()
            if pid == 0:
                run_child(job.order, write_end, self._hard_descriptors)
            job.pid = pid
            job.pidfd = os.pidfd_open(pid)
        except OSError as error:
            if job.pid is not None:
                os.kill(job.pid, signal.SIGKILL)
                os.waitpid(job.pid, 0)
                job.pid = None
            if read_end >= 0:
                os.close(read_end)
            job.problem = f"cannot start a process in {job.directory}: {os.strerror(error.errno or 0)}"
            job.node_fault = True
            job.over = True
            self._finish(job)
            return
        finally:
            if write_end >= 0:
                os.close(write_end)
        job.order = {}
        job.status = read_end
        self._watch(read_end, lambda: self._read_status(job))
        self._watch(job.pidfd, lambda: self._reap(job))
        self._pump_logs(job)

    def _pump_logs(self, job: Job) -> None:
        for log in job.logs:
            self._watch(log.fifo, log.pump)

    def _adopt(self, job: Job) -> None:
        job.own = False
        job.state = "running"
        job.start_time = job.order["start_time"]
        job.pid = job.order["pid"]
        job.problem = LOST
        for log in job.logs:
            # What cannot be opened is not read; the end of the job is seen all the same.
            with contextlib.suppress(OSError):
                log.open()
            if log.fifo >= 0:
                self._watch(log.fifo, log.pump)
        if job.pid is not None:
            with contextlib.suppress(OSError):
                job.pidfd = os.pidfd_open(job.pid)
            if job.pid not in list_processes(job.cgroups) and not _is_member(job.pid, job.cgroups):
                self._close_pidfd(job)
                self._end(job)
        if job.pidfd >= 0:
            self._watch(job.pidfd, lambda: self._look_at_adopted(job))
        elif not job.over:
            self._due[job.id] = job
        self._tell(job)

    def _look_at_adopted(self, job: Job) -> None:
        """Its main process is no child of ours. An event may be that of a descriptor that had this number before."""
        poller = select.poll()
        poller.register(job.pidfd, select.POLLIN)
        if poller.poll(0):
            self._end(job)

    def _read_status(self, job: Job) -> None:
        """The child's problem; the end of the pipe without one says that the job's program runs."""
        if job.status < 0:
            return
        try:
            data = os.read(job.status, _CHUNK_BYTES)
        except OSError:
            return
        self._unwatch(job.status)
        os.close(job.status)
        job.status = -1
        if data:
            try:
                report = json.loads(data)
                job.problem, job.node_fault = report["problem"], report["node_fault"]
            except (ValueError, LookupError, TypeError, RecursionError):
                job.problem, job.node_fault = "cannot start: the process before it ended without a word", True
        else:
            job.state = "running"
            self._tell(job)

    def _reap(self, job: Job) -> None:
        assert job.pid is not None
        pid, status = os.waitpid(job.pid, os.WNOHANG)
        if not pid:
            return
        self._read_status(job)
        if not job.problem:
            code = os.waitstatus_to_exitcode(status)
            job.exit_code, job.signal = (code, None) if code >= 0 else (None, -code)
        self._end(job)

    def _close_pidfd(self, job: Job) -> None:
        if job.pidfd >= 0:
            self._unwatch(job.pidfd)
            os.close(job.pidfd)
            job.pidfd = -1

    def _end(self, job: Job) -> None:
        """The main process is gone: keep its result at once, then see to the rest of its cgroup."""
        self._close_pidfd(job)
        job.over = True
        job.finish_time = time.time()
        job.write_result()
        job.pause_s, job.look_at_s = _RETRY_S, 0.0
        self._due[job.id] = job

    def _advance(self, job: Job, now_s: float) -> None:
        if not job.over and not list_processes(job.cgroups):
            self._end(job)
        if job.over and kill_processes(job.cgroups):
            self._finish(job)
            return
        job.pause_s = min(job.pause_s * 2.0, _WATCH_S) if job.over else _WATCH_S
        job.look_at_s = now_s + job.pause_s

    def _finish(self, job: Job) -> None:
        failed = bool(job.problem) and job.own
        job.state = "failed" if failed else "ended"
        self._living.discard(job.id)
        self._due.pop(job.id, None)
        job.finish_time = job.finish_time or time.time()
        for log in job.logs:
            self._unwatch(log.fifo)
            log.close(drain=not failed)
            if failed:
                log.remove()
        if failed:
            job.write_result()
        self._tell(job)


def take_place(runtime_dir: str) -> tuple[int, int]:
    """Be the keeper of a directory: its descriptor, and that of its lock. Raises BlockingIOError where there is one,
    OSError."""
    directory = os.open(runtime_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock = -1
    try:
        lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        for fd in (directory, lock):
            if fd >= 0:
                os.close(fd)
        raise
    return directory, lock


def listen(directory: int) -> socket.socket:
    """The keeper's socket; by way of a descriptor, because the path of a unix socket is 107 bytes at most."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=directory)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def give_up_privileges() -> None:
    """Jobs inherit both: no program gives them rights that their account does not have (sudo, file capabilities), and
    an agent that is not root hands none of its capabilities down to them. Raises OSError."""
    import ctypes  # the agent, which imports this file, too, does without

    libc = ctypes.CDLL(None, use_errno=True)
    for what, arguments in (
        ("forbid new privileges", (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        ("give up ambient capabilities", (_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), f"cannot {what}")


def main(runtime_dir: str) -> int:
    """Be the keeper of ``runtime_dir`` until there is nothing to keep; at once 0 where there is one already.

    The first process ends at once; the keeper is its child.
    """
    # Away from the agent: into a session of its own, and a child of init's, which nobody must wait for.
    with contextlib.suppress(OSError):
        os.setsid()
    if os.fork():
        os._exit(0)
    give_up_privileges()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:  # what the agent did not mean to hand down
            with contextlib.suppress(OSError):
                os.close(int(name))
    try:
        directory, _ = take_place(runtime_dir)
    except BlockingIOError:
        return 0
    os.chdir("/")
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # An agent that was started with it ignored would cost us the exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    keeper = Keeper(os.path.abspath(runtime_dir), directory, hard)
    # Who started this waits for the end of its standard output.
    os.dup2(0, 1)
    keeper.run()
    with contextlib.suppress(OSError):
        os.unlink(SOCKET_NAME, dir_fd=keeper.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
