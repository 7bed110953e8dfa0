"""First aid after an agent has died: immediately raise the quotas that it had lowered.

``cpumond restore`` restores everything, but its imports take 70 ms, and ten times as long on a slow machine: too long
for a throttled job. This module imports only the standard library, and does less: it raises a lowered quota to the
original if one write is enough. Everything else, including all messages about failures, is left to ``restore``, which
runs right after this."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

STATE_FILE = "originals.state"
BAD = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""Exceptions that reading a file may raise, whatever the file contains."""
WRITTEN_FILE = "limits.log"
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"

Pair = tuple[int, int]
"""Quota (-1: none) and period, in microseconds."""


def raise_quotas(environment: Mapping[str, str], mountinfo: str = "/proc/self/mountinfo") -> int:
    """If systemd reports that the agent has died, and where its state is, raise the quotas that the agent lowered.
    Return the number of raised quotas."""
    if "SERVICE_RESULT" not in environment:
        return 0
    newest, cgroups = -1, []
    written = _read_written(os.path.join(environment.get("RUNTIME_DIRECTORY", "").partition(":")[0], WRITTEN_FILE))
    # A file in /run is always of this boot, so its boot id is not checked: in a sandbox the id may look different.
    for name, boot in (("RUNTIME_DIRECTORY", ""), ("STATE_DIRECTORY", BOOT_ID_PATH)):
        directory = environment.get(name, "").partition(":")[0]
        # A file that no agent of this version wrote is skipped: `restore` reports it.
        with contextlib.suppress(*BAD):
            if directory:
                number, found = _read_originals(os.path.join(directory, STATE_FILE), boot)
                if number > newest:
                    newest, cgroups = number, found
    raised = 0
    with contextlib.suppress(*BAD):
        root, version = _find_root(mountinfo) if cgroups else ("", 0)
        absent = []
        for path, original in cgroups:
            with contextlib.suppress(*BAD):
                place = os.path.join(root, path.lstrip("/"))
                if _is(place, original["inode"]):
                    raised += _raise(place, version, original, written)
                elif version == 1:
                    absent.append((place, original))
        # On v1, cgroups can be renamed. Those that are at their old place are raised before this search.
        siblings: dict[str, dict[int, str]] = {}
        for place, original in absent:
            with contextlib.suppress(*BAD):
                parent = os.path.dirname(place)
                if parent not in siblings:
                    siblings[parent] = _list(parent)
                if original["inode"] in siblings[parent]:
                    raised += _raise(siblings[parent][original["inode"]], version, original, written)
    return raised


def _read_originals(path: str, boot_id_path: str) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    """Return the number of a state file and its originals, parents first. If ``boot_id_path`` is given, originals of an
    earlier boot are left out. Raises one of BAD."""
    with open(path, "rb") as file:
        header, _, payload = file.read().partition(b"\n")
    if header != b"cpumond-state 1 sha256=" + hashlib.sha256(payload).hexdigest().encode():
        raise ValueError(path)
    content = json.loads(payload)
    if boot_id_path:
        with open(boot_id_path, encoding="ascii") as boot:
            if content["boot_id"] != boot.read().strip():
                return -1, []
    cgroups = sorted(content["cgroups"].items(), key=lambda item: str(item[0]).count("/"))
    return int(content.get("number", 0)), cgroups


def _find_root(mountinfo: str) -> tuple[str, int]:
    """Return the mount point of the cpu controller, and its version. Raises OSError, ValueError."""
    mounts = list(_list_mounts(mountinfo))
    for point, kind, options in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            return point, 1
    for point, kind, _ in mounts:
        if kind == "cgroup2":
            return point, 2
    raise ValueError(mountinfo)


def _list_mounts(mountinfo: str) -> Iterator[tuple[str, str, str]]:
    """Yield (mount point, file system, options). A mount point with blanks in its name is left to ``restore``."""
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            described = right.split()
            if len(described) >= 3 and "\\" not in left.split()[4]:
                yield left.split()[4], described[0], described[2]


def _read_written(path: str) -> dict[int, list[Pair]]:
    """Return the agent's latest write into each cgroup, by inode (see ``written``); an empty dict if it is unknown."""
    found = {}
    try:
        with open(path, "rb") as file:
            *lines, _ = file.read().split(b"\n")
        for line in lines:
            inode, quota_us, period_us, _, new_quota_us, new_period_us, _ = map(int, line.split(b" "))
            found[inode] = [(quota_us, period_us), (new_quota_us, new_period_us)]
    except (OSError, ValueError):
        return {}
    return found


def _list(parent: str) -> dict[int, str]:
    try:
        with os.scandir(parent) as entries:
            return {entry.inode(): entry.path for entry in entries}
    except OSError:
        return {}


def _is(directory: str, inode: int) -> bool:
    try:
        return os.stat(directory).st_ino == inode
    except OSError:
        return False


def _raise(directory: str, version: int, original: dict[str, Any], written: Mapping[int, list[Pair]]) -> bool:
    """Raise the quota of one cgroup if it is below the original; return whether it was raised. Raises KeyError,
    TypeError, ValueError for an invalid ``original``."""
    quota_us, period_us = original["settings"]["quota_us"], original["settings"]["period_us"]
    if "quota" not in original["actuators"] or ".." in directory.split("/"):
        return False
    inode = original["inode"]
    try:
        # The directory is held open from here on, because it may be renamed meanwhile.
        held = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    directory = f"/proc/self/fd/{held}"
    try:
        if os.fstat(held).st_ino != inode:
            return False
        now_us, now_period_us = _read(directory, version)
        last = written.get(inode)
        if last is not None and not original.get("unit"):
            ours = [*last, (-1 if quota_us is None else quota_us, period_us)]
            if now_us not in [each[0] for each in ours] or now_period_us not in [each[1] for each in ours]:
                # After the agent's last write, another program has set a lower limit.
                return False
        if now_us is None or now_period_us != period_us or (quota_us is not None and now_us >= quota_us):
            return False
        if version == 2:
            name, text = "cpu.max", f"{'max' if quota_us is None else quota_us} {period_us}"
        else:
            name, text = "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us)
        # Neither create the file nor follow a link: this may run with all rights (ExecStopPost=+), and the path comes
        # from a file of the agent's user.
        fd = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError:
        # The cgroup is gone, or its original is above a quota of a parent: `restore` examines the cgroup.
        return False
    finally:
        os.close(held)
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
