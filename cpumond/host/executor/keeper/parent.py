"""The parent of all jobs: starts them, waits for them, handles their logs and ends, and reports to agents."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import resource
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from cpumond.host.cgroup_processes import kill_processes, list_processes
from cpumond.host.executor.keeper import IDLE_S, LOCK_NAME, LOST, SOCKET_NAME, VERSION
from cpumond.host.executor.keeper.child import give_up_privileges, run_child
from cpumond.host.executor.keeper.job import RETRY_S, KeeperJob
from cpumond.host.executor.keeper.lines import LineConnection
from cpumond.host.executor.keeper.logs import CHUNK_BYTES

_WATCH_S: Final = 0.5
_DRAIN_READS: Final = 1000
_MAX_UNSENT_BYTES: Final = 1 << 26
_MAX_FAILURES: Final = 1000


class Keeper:
    """All jobs and all agents in one loop."""

    def __init__(self, runtime_dir: str, directory: int, hard_descriptors: int) -> None:
        self._runtime_dir = runtime_dir
        self.directory = directory
        self._listener = listen(directory)
        self._hard_descriptors = hard_descriptors
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._jobs: dict[str, KeeperJob] = {}
        self._living: set[str] = set()
        self._due: dict[str, KeeperJob] = {}
        """Jobs whose cgroups must be checked, each at its ``look_at_s``."""
        self._clients: dict[int, LineConnection] = {}
        self._failures = 0
        self._watch(self._listener.fileno(), self._accept)

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run(self) -> None:
        idle_since_s: float | None = None
        while True:
            for fd, _ in self._epoll.poll(self._timeout_s()):
                handler = self._handlers.get(fd)
                if handler is not None:
                    self._run_guarded(handler)
            now_s = time.monotonic()
            for job in list(self._due.values()):
                if now_s >= job.look_at_s:
                    job.look_at_s = now_s + _WATCH_S  # the look may set another time
                    self._run_guarded(functools.partial(self._advance, job, now_s))
            if self._clients or self._living:
                idle_since_s = None
            elif idle_since_s is None:
                idle_since_s = now_s
            elif now_s - idle_since_s >= IDLE_S:
                return

    def _run_guarded(self, work: Callable[[], object]) -> None:
        """Run work whose failure must not end the parent of all jobs; the traceback goes to the keeper's log."""
        try:
            work()
        except Exception:
            traceback.print_exc()
            self._failures += 1
            if self._failures > _MAX_FAILURES:
                raise  # it would loop forever; the next keeper adopts the running jobs

    def _timeout_s(self) -> float:
        if self._due:
            return max(min(job.look_at_s for job in self._due.values()) - time.monotonic(), 0.0)
        return -1.0 if self._clients or self._living else IDLE_S

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
        # Carry out the orders of an earlier agent first: the list of jobs for this agent must include their effect.
        for other in list(self._clients.values()):
            for _ in range(_DRAIN_READS):
                if not self._serve(other):
                    break
        client = LineConnection(sock, self._epoll)
        self._clients[sock.fileno()] = client
        self._watch(sock.fileno(), lambda: self._serve(client))
        self._send(client, {"hello": {"version": VERSION, "jobs": [job.to_fields() for job in self._jobs.values()]}})

    def _drop(self, client: LineConnection) -> None:
        fd = client.sock.fileno()
        if self._clients.pop(fd, None) is not None:
            self._unwatch(fd)
            client.sock.close()

    def _send(self, client: LineConnection, message: dict[str, Any]) -> None:
        if not client.send(message) or len(client.unsent) > _MAX_UNSENT_BYTES:
            self._drop(client)

    def _serve(self, client: LineConnection) -> bool:
        """Read from a client once; return whether anything was read."""
        if client.sock.fileno() < 0:
            return False
        try:
            lines = client.receive() if client.flush() else None
        except BlockingIOError:
            return False
        if lines is None:
            self._drop(client)
            return False
        try:
            for line in lines:
                for verb, body in json.loads(line).items():
                    self._carry_out(verb, body)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # This is not the keeper's protocol. The jobs are not affected.
            self._drop(client)
            return False
        return True

    def _listen_anew(self) -> None:
        """Listen in the present ``runtime_dir``, where the next agent looks, after it was removed and recreated."""
        try:
            directory, lock = take_place(self._runtime_dir)
        except OSError:
            return  # missing, still this keeper's, or another keeper's
        try:
            listener = listen(directory)
        except OSError:
            os.close(directory)
            os.close(lock)
            return  # keep the present socket, although it has no path
        self._unwatch(self._listener.fileno())
        self._listener.close()
        self.directory, self._listener = directory, listener
        self._watch(self._listener.fileno(), self._accept)

    def _carry_out(self, verb: str, body: Any) -> None:
        if verb == "listen":
            self._listen_anew()
            return
        if verb in ("start", "adopt"):
            if body["id"] in self._jobs:
                return
            job = self._jobs[body["id"]] = KeeperJob(body)
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

    def _report(self, job: KeeperJob) -> None:
        for client in list(self._clients.values()):
            self._send(client, {"job": job.to_fields()})

    def _start(self, job: KeeperJob) -> None:
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
        for log in job.logs:
            self._watch(log.fifo, log.pump)

    def _adopt(self, job: KeeperJob) -> None:
        job.own = False
        job.state = "running"
        job.start_time = job.order["start_time"]
        job.pid = job.order["pid"]
        job.problem = LOST
        for log in job.logs:
            # If a log cannot be opened, it is not read, but the end of the job is still noticed.
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
        self._report(job)

    def _look_at_adopted(self, job: KeeperJob) -> None:
        """Check whether an adopted job has ended, whose main process is no child of this process. The event may have
        been for an earlier descriptor with the same number."""
        poller = select.poll()
        poller.register(job.pidfd, select.POLLIN)
        if poller.poll(0):
            self._end(job)

    def _read_status(self, job: KeeperJob) -> None:
        """Read the child's problem from the pipe; if the pipe ends without a problem, the job's program runs."""
        if job.status < 0:
            return
        try:
            data = os.read(job.status, CHUNK_BYTES)
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
                job.problem, job.node_fault = "cannot start: its first process ended without an error message", True
        else:
            job.state = "running"
            self._report(job)

    def _reap(self, job: KeeperJob) -> None:
        assert job.pid is not None
        pid, status = os.waitpid(job.pid, os.WNOHANG)
        if not pid:
            return
        self._read_status(job)
        if not job.problem:
            code = os.waitstatus_to_exitcode(status)
            job.exit_code, job.signal = (code, None) if code >= 0 else (None, -code)
        self._end(job)

    def _close_pidfd(self, job: KeeperJob) -> None:
        if job.pidfd >= 0:
            self._unwatch(job.pidfd)
            os.close(job.pidfd)
            job.pidfd = -1

    def _end(self, job: KeeperJob) -> None:
        """Handle the end of a main process: store its result at once; the rest of its cgroup is handled later."""
        self._close_pidfd(job)
        job.over = True
        job.finish_time = time.time()
        job.write_result()
        job.pause_s, job.look_at_s = RETRY_S, 0.0
        self._due[job.id] = job

    def _advance(self, job: KeeperJob, now_s: float) -> None:
        if not job.over and not list_processes(job.cgroups):
            self._end(job)
        if job.over and kill_processes(job.cgroups):
            self._finish(job)
            return
        job.pause_s = min(job.pause_s * 2.0, _WATCH_S) if job.over else _WATCH_S
        job.look_at_s = now_s + job.pause_s

    def _finish(self, job: KeeperJob) -> None:
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
        self._report(job)


def _is_member(pid: int, cgroups: list[str]) -> bool:
    """Return whether ``/proc`` shows a process in one of ``cgroups``, by their last names, as mounts may differ."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            names = {os.path.basename(line.rstrip(b"\n").split(b":", 2)[-1]) for line in file}
    except OSError:
        return False
    return any(os.fsencode(os.path.basename(cgroup)) in names for cgroup in cgroups)


def take_place(runtime_dir: str) -> tuple[int, int]:
    """Become the keeper of a directory; return descriptors of the directory and of its lock. Raises BlockingIOError if
    there is a keeper already, or another OSError."""
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
    """Open the keeper's socket, by a path through a descriptor, as a unix socket's path has at most 107 bytes."""
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


def main(runtime_dir: str) -> int:
    """Be the keeper of ``runtime_dir`` until it has neither jobs nor agents; return 0 at once if there is a keeper.

    The process that runs this function ends at once; the keeper is its child."""
    # Detach from the agent: get a new session, and become a child of init, which reaps it.
    with contextlib.suppress(OSError):
        os.setsid()
    if os.fork():
        os._exit(0)
    give_up_privileges()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:  # descriptors passed on by mistake
            with contextlib.suppress(OSError):
                os.close(int(name))
    try:
        directory, _ = take_place(runtime_dir)
    except BlockingIOError:
        return 0
    os.chdir("/")
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # If SIGCHLD were ignored, as it may be in the process that started this one, exit codes would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    keeper = Keeper(os.path.abspath(runtime_dir), directory, hard)
    # The agent waits for the end of this process's standard output, which now says that the keeper listens.
    os.dup2(0, 1)
    keeper.run()
    with contextlib.suppress(OSError):
        os.unlink(SOCKET_NAME, dir_fd=keeper.directory)
    return 0
