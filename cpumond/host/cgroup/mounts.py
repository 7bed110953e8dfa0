"""Find the controllers' mounts by mountinfo and cgroup.controllers, never by whether a directory exists."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

import msgspec

from cpumond.core.errors import UnavailableError, describe


class Mount(msgspec.Struct, frozen=True):
    """One cgroup mount: ``version`` 1 or 2, its mount point, its controllers (v1: mount options), its ``st_dev``."""

    version: int
    mount_point: str
    controllers: frozenset[str]
    dev: int = 0

    @property
    def is_seen(self) -> bool:
        """Whether the mount point shows this mount, and not a later mount over it."""
        try:
            return os.stat(self.mount_point).st_dev == self.dev
        except OSError:
            return False


class Hierarchies(msgspec.Struct, frozen=True):
    """The directories of the controllers that this agent uses.

    ``cpu_version`` is 1 or 2. ``cpu_root`` holds quotas, ``cpuacct_root`` CPU time (the same directory on v2, and on v1
    if both are mounted together). ``cpuset_root`` and ``unified_root`` are None if missing. Held roots (``hold``) are
    paths through a descriptor; ``names`` maps them to their mount points. ``is_seen``: the kernel says that
    ``cpu_root`` shows the hierarchy now; also False for a directory of plain files."""

    cpu_version: int
    cpu_root: str
    cpuacct_root: str
    cpuset_root: str | None = None
    unified_root: str | None = None
    names: Mapping[str, str] = {}
    is_seen: bool = False

    def name(self, path: str) -> str:
        """Return, for people, a path below a root with the root's mount point in place of the descriptor."""
        held = next((root for root in self.names if path == root or path.startswith(f"{root}/")), None)
        return path if held is None else self.names[held] + path[len(held) :]

    def read_root_id(self) -> tuple[int, int]:
        """Return (st_dev, inode) of the root of the cpu hierarchy; (0, 0) if it does not exist."""
        return read_identity(self.cpu_root)

    def proves_gone(self, root_id: tuple[int, int]) -> bool:
        """Return whether a cgroup that is not found is surely gone. ``root_id``: the root's when the cgroup was
        changed. False if a different file system covers the hierarchy or the hierarchy is not mounted here: then
        nothing is known."""
        return self.is_seen or root_id in ((0, 0), self.read_root_id())

    def list_covered(self) -> list[str]:
        """Return mount points that no longer show their held roots: they are unmounted, or covered by another mount."""
        return [name for held, name in self.names.items() if read_identity(held) != read_identity(name)]

    @property
    def layout(self) -> str:
        """The layout of the hierarchies in one word: v1, v2, or hybrid (v1 controllers and a cgroup2 mount)."""
        if self.cpu_version == 2:
            return "v2"
        return "v1" if self.unified_root is None else "hybrid"

    def without_counters(self) -> Hierarchies:
        """Return hierarchies for callers that only restore limits. They need no CPU time, so a cgroup may be missing in
        the hierarchy of CPU time (v1)."""
        return msgspec.structs.replace(self, cpuacct_root=self.cpu_root, unified_root=self.cpu_root)


def parse_mountinfo(text: str, read_controllers: dict[str, str] | None = None) -> list[Mount]:
    """Parse the cgroup mounts in a text of mountinfo (proc(5)); their order is kept.

    ``read_controllers`` maps a cgroup2 mount point to the content of its ``cgroup.controllers``."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        described = fields[fields.index("-", 5) + 1 :] if "-" in fields[5:] else []
        if len(described) < 3:
            continue
        kind, _, options = described[:3]
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        major, _, minor = fields[2].partition(":")
        dev = os.makedev(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else 0
        if kind == "cgroup":
            mounts.append(Mount(1, point, frozenset(options.split(",")), dev))
        elif kind == "cgroup2":
            mounts.append(Mount(2, point, frozenset((read_controllers or {}).get(point, "").split()), dev))
    return mounts


def find_hierarchies(mounts: list[Mount], source: str) -> Hierarchies:
    """Return the mounts that serve the cpu controller and the CPU time. Raises UnavailableError naming ``source``."""

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
    """Return the cgroup mounts that a process with this mountinfo sees, with their controllers. Raises OSError.

    Mounts hidden under a later mount are left out. If the text contains no real mount (in tests), all are used."""
    with open(mountinfo_path, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    controllers = {}
    for mount in parse_mountinfo(text):
        if mount.version == 2:
            try:
                with open(os.path.join(mount.mount_point, "cgroup.controllers"), encoding="ascii") as file:
                    controllers[mount.mount_point] = file.read()
            except OSError:
                # A cgroup2 mount that is hidden from this process offers nothing.
                controllers[mount.mount_point] = ""
    mounts = parse_mountinfo(text, controllers)
    return [mount for mount in mounts if mount.is_seen] or mounts


def open_hierarchies(mountinfo_path: str = "/proc/self/mountinfo") -> Hierarchies:
    """Return the hierarchies of this machine. Raises UnavailableError."""
    try:
        mounts = read_mounts(mountinfo_path)
    except OSError as error:
        raise UnavailableError(f"{mountinfo_path}: cannot be read: {error.strerror}; set `mountinfo`") from error
    found = find_hierarchies(mounts, mountinfo_path)
    seen = any(mount.is_seen for mount in mounts if mount.mount_point == found.cpu_root)
    return msgspec.structs.replace(found, is_seen=seen)


@contextlib.contextmanager
def hold(hierarchies: Hierarchies) -> Iterator[Hierarchies]:
    """Hold the hierarchies through descriptors, which stay valid if a mount disappears or is covered. So a cgroup that
    is not found in them is gone. Raises UnavailableError."""
    names: dict[str, str] = {}
    held: dict[str, str | None] = {}
    with contextlib.ExitStack() as stack:
        for key in ("cpu_root", "cpuacct_root", "cpuset_root", "unified_root"):
            name = getattr(hierarchies, key)
            if name is not None and name not in names.values():
                try:
                    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                except OSError as error:
                    raise UnavailableError(
                        f"{name}: the cgroup hierarchy cannot be opened ({describe(error)}); mount it again"
                    ) from error
                stack.callback(os.close, fd)
                names[held_place(fd)] = name
            held[key] = next((place for place, known in names.items() if known == name), None)
        yield msgspec.structs.replace(hierarchies, names=names, **held)


def held_place(fd: int) -> str:
    """Return a path to the file that a descriptor of this process is open on."""
    return f"/proc/self/fd/{fd}"


def read_identity(path: str) -> tuple[int, int]:
    """Return (st_dev, inode) of the file at ``path``; (0, 0) if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def relative_path(hierarchies: Hierarchies, path: str) -> str:
    """Return a cgroup path from a user (absolute below a mount, relative, or with a leading slash) as relative."""
    for root in (*hierarchies.names.values(), hierarchies.cpu_root, hierarchies.cpuacct_root, hierarchies.unified_root):
        if root and (path == root or path.startswith(root.rstrip("/") + "/")):
            path = path[len(root) :]
            break
    return "/".join(part for part in path.split("/") if part not in ("", "."))
