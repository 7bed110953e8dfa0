"""Where the controllers are: found from mountinfo and cgroup.controllers, never from a directory's presence."""

from __future__ import annotations

import os
import re

import msgspec

from cpumond.errors import UnavailableError


class Mount(msgspec.Struct, frozen=True):
    """One cgroup mount: ``version`` 1 or 2, its mount point, its controllers (v1: mount options)."""

    version: int
    mount_point: str
    controllers: frozenset[str]


class Hierarchies(msgspec.Struct, frozen=True):
    """The directories of the controllers this agent uses.

    ``cpu_version`` 1 or 2; ``cpu_root`` holds quotas; ``cpuacct_root`` CPU time (the same directory on v2 and where
    v1 mounts both together); ``cpuset_root`` and ``unified_root`` None where there is none.
    """

    cpu_version: int
    cpu_root: str
    cpuacct_root: str
    cpuset_root: str | None = None
    unified_root: str | None = None

    @property
    def layout(self) -> str:
        """The layout in one word: v1, v2 or hybrid (v1 controllers beside a cgroup2 mount)."""
        if self.cpu_version == 2:
            return "v2"
        return "v1" if self.unified_root is None else "hybrid"

    def without_counters(self) -> Hierarchies:
        """The same for who only puts limits back: CPU time is not looked for, so its cgroup need not be there (v1)."""
        return msgspec.structs.replace(self, cpuacct_root=self.cpu_root, unified_root=self.cpu_root)


def parse_mountinfo(text: str, read_controllers: dict[str, str] | None = None) -> list[Mount]:
    """The cgroup mounts of a mountinfo text (proc(5)), in its order.

    ``read_controllers`` maps a cgroup2 mount point to the content of its ``cgroup.controllers``.
    """
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        described = fields[fields.index("-", 5) + 1 :] if "-" in fields[5:] else []
        if len(described) < 3:
            continue
        kind, _, options = described[:3]
        point = _unescape(fields[4])
        if kind == "cgroup":
            mounts.append(Mount(1, point, frozenset(options.split(","))))
        elif kind == "cgroup2":
            mounts.append(Mount(2, point, frozenset((read_controllers or {}).get(point, "").split())))
    return mounts


def find_hierarchies(mounts: list[Mount], source: str) -> Hierarchies:
    """Which mounts serve the cpu controller and the CPU time. Raises UnavailableError naming ``source``."""

    def first(version: int, controller: str | None) -> str | None:
        for mount in mounts:
            if mount.version == version and (controller is None or controller in mount.controllers):
                return mount.mount_point
        return None

    unified = first(2, None)
    v1_cpu = first(1, "cpu")
    if v1_cpu is not None:
        cpuacct = first(1, "cpuacct") or unified
        if cpuacct is None:
            raise UnavailableError(f"{source}: no cpuacct controller and no cgroup2 is mounted; mount one of them")
        return Hierarchies(1, v1_cpu, cpuacct, first(1, "cpuset"), unified)
    v2_cpu = first(2, "cpu")
    if v2_cpu is not None:
        return Hierarchies(2, v2_cpu, v2_cpu, v2_cpu if first(2, "cpuset") else first(1, "cpuset"), v2_cpu)
    raise UnavailableError(
        f"{source}: no mounted cgroup hierarchy has the cpu controller; "
        "mount cgroup2 with it, or give the agent the host's mounts with `mountinfo`"
    )


def read_mounts(mountinfo_path: str) -> list[Mount]:
    """The cgroup mounts that a process with this mountinfo sees, with their controllers. Raises OSError."""
    with open(mountinfo_path, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    controllers = {}
    for mount in parse_mountinfo(text):
        if mount.version == 2:
            try:
                with open(os.path.join(mount.mount_point, "cgroup.controllers"), encoding="ascii") as file:
                    controllers[mount.mount_point] = file.read()
            except OSError:
                # A cgroup2 mount that is hidden from us offers nothing.
                controllers[mount.mount_point] = ""
    return parse_mountinfo(text, controllers)


def open_hierarchies(mountinfo_path: str = "/proc/self/mountinfo") -> Hierarchies:
    """The hierarchies of this machine. Raises UnavailableError."""
    try:
        mounts = read_mounts(mountinfo_path)
    except OSError as error:
        raise UnavailableError(f"{mountinfo_path}: cannot be read: {error.strerror}; set `mountinfo`") from error
    return find_hierarchies(mounts, mountinfo_path)


def relative_path(hierarchies: Hierarchies, path: str) -> str:
    """A cgroup path as given by people (absolute below a mount, or relative, or with a leading slash), relative."""
    for root in (hierarchies.cpu_root, hierarchies.cpuacct_root, hierarchies.unified_root):
        if root and (path == root or path.startswith(root.rstrip("/") + "/")):
            path = path[len(root) :]
            break
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
