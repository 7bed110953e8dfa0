"""The first thing after an agent has died: the CPU that its jobs lack, given back at once.

``cpumond restore`` puts everything back as it was found. What it needs takes 70 ms to import, and on a slow machine ten
times as long: too long for a job to be held down. This needs nothing but the interpreter's own modules. It does less:
a quota that is lower than the one found is raised to that, and only where that is one write. Everything else, and
every word about what went wrong, is for ``restore`` right after it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

STATE_FILE = "originals.state"
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


def raise_quotas(
    environment: Mapping[str, str], mountinfo: str = "/proc/self/mountinfo", boot_id_path: str = BOOT_ID_PATH
) -> int:
    """Give jobs their quotas back where systemd says that the agent has died, and where its state is; how many."""
    if "SERVICE_RESULT" not in environment:
        return 0
    # What lies in /run is of this boot; the identity of the boot looks different inside and outside a sandbox in a
    # container.
    for name, boot in (("RUNTIME_DIRECTORY", ""), ("STATE_DIRECTORY", boot_id_path)):
        directory = environment.get(name, "").partition(":")[0]
        try:
            if directory:
                cgroups = _read_originals(os.path.join(directory, STATE_FILE), boot)
                root, version = _find_root(mountinfo)
                return sum(
                    _raise(os.path.join(root, path.lstrip("/")), version, original) for path, original in cgroups
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Not what an agent of this version wrote: `restore` says so, and takes the copy.
            continue
    return 0


def _read_originals(path: str, boot_id_path: str) -> list[tuple[str, dict[str, Any]]]:
    """The originals, parents first; none of another boot, if ``boot_id_path`` is given. Raises OSError, ValueError,
    KeyError."""
    with open(path, "rb") as file:
        header, _, payload = file.read().partition(b"\n")
    if header != b"cpumond-state 1 sha256=" + hashlib.sha256(payload).hexdigest().encode():
        raise ValueError(path)
    content = json.loads(payload)
    if boot_id_path:
        with open(boot_id_path, encoding="ascii") as boot:
            if content["boot_id"] != boot.read().strip():
                return []
    return sorted(content["cgroups"].items(), key=lambda item: str(item[0]).count("/"))


def _find_root(mountinfo: str) -> tuple[str, int]:
    """Where the cpu controller is mounted, and its version. Raises OSError, ValueError."""
    mounts = list(_list_mounts(mountinfo))
    for point, kind, options in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            return point, 1
    for point, kind, _ in mounts:
        if kind == "cgroup2":
            return point, 2
    raise ValueError(mountinfo)


def _list_mounts(mountinfo: str) -> Iterator[tuple[str, str, str]]:
    """(Mount point, file system, options); a point with blanks in its name is left to ``restore``."""
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            described = right.split()
            if len(described) >= 3 and "\\" not in left.split()[4]:
                yield left.split()[4], described[0], described[2]


def _raise(directory: str, version: int, original: dict[str, Any]) -> bool:
    """Whether the quota of one cgroup was raised. Raises KeyError, TypeError, ValueError for a strange ``original``."""
    quota_us, period_us = original["settings"]["quota_us"], original["settings"]["period_us"]
    if "quota" not in original["actuators"] or ".." in directory.split("/"):
        return False
    try:
        if os.stat(directory).st_ino != original["inode"]:
            return False
        now_us, now_period_us = _read(directory, version)
        if now_us is None or now_period_us != period_us or (quota_us is not None and now_us >= quota_us):
            return False
        if version == 2:
            name, text = "cpu.max", f"{'max' if quota_us is None else quota_us} {period_us}"
        else:
            name, text = "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us)
        # Neither made nor followed elsewhere: it may run with all rights (ExecStopPost=+), the state is the agent's.
        fd = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError:
        # Gone, or more than a quota above it allows: `restore` looks closer.
        return False
    return True


def _read(directory: str, version: int) -> tuple[int | None, int]:
    if version == 2:
        with open(os.path.join(directory, "cpu.max"), encoding="ascii") as file:
            quota, period = file.read().split()
        return (None if quota == "max" else int(quota)), int(period)
    with open(os.path.join(directory, "cpu.cfs_quota_us"), encoding="ascii") as file:
        quota_us = int(file.read())
    with open(os.path.join(directory, "cpu.cfs_period_us"), encoding="ascii") as file:
        return (None if quota_us < 0 else quota_us), int(file.read())
