"""What a job of Slurm finds on this host: the limits of its cgroup, a Python that its user may run, the keeper."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
import sys
from typing import Final

import structlog

from cpumond.core.errors import describe, from_os_error
from cpumond.host.cgroup.mounts import read_mounts
from cpumond.host.executor import keeper
from cpumond.host.executor.model import ExecutorError, Launch
from cpumond.host.executor.slurm.commands import NAME_PREFIX

log = structlog.get_logger("cpumond.host.executor")

_PERIOD_US: Final = 100_000


def list_limits(launch: Launch) -> list[list[str]]:
    """Controller ("" on v2), file and text of each limit, for the cgroup that Slurm makes of the job.

    Slurm's own are whole CPUs and MiB. No quota above is heeded: where one is lower the kernel holds the job to that.
    """
    period_us = _PERIOD_US
    quota_us = max(round(launch.cpu_limit * period_us), 1000)
    limits = [
        ["", "cpu.max", f"{quota_us} {period_us}"],
        ["cpu", "cpu.cfs_period_us", f"{period_us}"],
        ["cpu", "cpu.cfs_quota_us", f"{quota_us}"],
    ]
    if launch.memory_limit > 0:
        limits += [
            ["", "memory.max", f"{launch.memory_limit}"],
            ["", "memory.swap.max", "0"],
            ["memory", "memory.limit_in_bytes", f"{launch.memory_limit}"],
        ]
    if launch.max_tasks > 0:
        # The step of the job is one more.
        limits.append(["", "pids.max", f"{launch.max_tasks + 1}"])
    return limits


def find_mounts(mountinfo: str) -> dict[str, str]:
    """Controller -> mount point of its v1 hierarchy; "" -> that of cgroup2. Raises ExecutorError."""
    found: dict[str, str] = {}
    try:
        mounts = read_mounts(mountinfo)
    except OSError as error:
        raise ExecutorError(f"cannot read {mountinfo}: {describe(error)}") from error
    for mount in mounts:
        for controller in mount.controllers if mount.version == 1 else [""]:
            found.setdefault(controller, mount.mount_point)
    return found


def find_package() -> str:
    """The directory above this package."""
    return __file__[: __file__.rindex("/cpumond/")]


def find_interpreter() -> str:
    """A Python that every user may run: a job's step runs as the job's user. Raises ExecutorError."""
    if not _is_open_to_all(find_package()) or not _is_open_to_all(keeper.PROGRAM):
        raise ExecutorError(
            f"jobs of other users cannot read {find_package()}/cpumond, where their first process is; install "
            "cpumond where all users may read it"
        )
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        if _is_open_to_all(path) and not any(each.isspace() for each in path):
            return path
    raise ExecutorError(
        f"jobs of other users cannot run {sys.executable}, and there is no /usr/bin/python3: install python3"
    )


def _is_open_to_all(path: str) -> bool:
    """Whether every user may read a file, or look into a directory, and pass through all directories above it."""
    path = os.path.realpath(path)
    try:
        if not os.stat(path).st_mode & stat.S_IROTH:
            return False
        while path != "/":
            path = os.path.dirname(path)
            if not os.stat(path).st_mode & stat.S_IXOTH:
                return False
    except OSError:
        return False
    return True


def read_guests_name(path: str) -> str:
    """The name that jobs' first processes find the keeper by: the same for all of them, so it is kept in a file.

    Anybody on this host may see it, and take it while there is no keeper: then later jobs get another one. Raises
    CpumondError.
    """
    try:
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            name = file.read().strip()
            if name.startswith(NAME_PREFIX):
                if not _is_taken(name):
                    return name
                log.warning("another user has the keeper's name; jobs that are to be started get a new one", name=name)
        name = NAME_PREFIX + secrets.token_hex(16)
        with open(f"{path}.new", "w", encoding="ascii", opener=_open_private) as file:
            file.write(name)
        os.rename(f"{path}.new", path)
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else OSError(0, str(error))
        raise from_os_error(cause, f"use {path}", "fix runtime_dir or run as root") from error
    return name


def _is_taken(name: str) -> bool:
    """Whether a process of another user has an abstract name of a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, contextlib.suppress(OSError):
        probe.bind(f"\0{name}")
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(f"\0{name}")
        except BlockingIOError:
            return False  # it has many guests: nobody else has any
        except OSError:
            return True
        _, uid, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return bool(uid != os.geteuid())


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
