"""Find and signal the processes of cgroups; a signal never reaches a different process that got a reused PID.

This module needs only the standard library, because the keeper of jobs uses it and has nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable
from typing import Final

_KILL_ROUNDS: Final = 20
_PIDFDS_AT_ONCE: Final = 200


def read_processes(directory: str) -> set[int]:
    """Return the processes of one cgroup, but not of cgroups below; an empty set if the cgroup is unreadable."""
    # A threaded cgroup refuses to be read; the domain cgroup above it lists its processes.
    with contextlib.suppress(OSError), open(os.path.join(directory, "cgroup.procs"), "rb") as file:
        # 0 stands for a process that this PID namespace does not see.
        return {int(word) for word in file.read().split() if word.isdigit()} - {0}
    return set()


def list_processes(directories: Iterable[str]) -> set[int]:
    """Return the living processes of some cgroups and all cgroups below; an empty set if the cgroups are gone."""
    found = {pid for directory in directories for place, _, _ in os.walk(directory) for pid in read_processes(place)}
    return set(filter(_is_alive, found))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def send_signal(directories: Collection[str], number: int, pids: Iterable[int]) -> None:
    """Send a signal to those of ``pids`` that are in the cgroups; skip processes that it is not allowed to signal."""
    waiting = sorted(pids)
    while waiting:
        held: dict[int, int] = {}
        try:
            for pid in waiting[:_PIDFDS_AT_ONCE]:
                with contextlib.suppress(OSError):
                    held[pid] = os.pidfd_open(pid)
            # Read the list while pidfds are open: a PID that now is a different process's is no longer in the list.
            for pid in held.keys() & list_processes(directories):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(held[pid], number)
        finally:
            for pidfd in held.values():
                os.close(pidfd)
        del waiting[:_PIDFDS_AT_ONCE]


def kill_processes(directories: Collection[str]) -> bool:
    """Send SIGKILL to all processes in some cgroups and below, without waiting; return True if none is left."""
    for directory in directories:
        with contextlib.suppress(OSError):
            fd = os.open(os.path.join(directory, "cgroup.kill"), os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"1")
            finally:
                os.close(fd)
    done: set[int] = set()
    for _ in range(_KILL_ROUNDS):
        # If a process forks during a round, the next round finds its child.
        found = list_processes(directories) - done
        if not found:
            break
        send_signal(directories, signal.SIGKILL, found)
        done |= found
    return not done
