"""The common part of both versions: reading and writing a cgroup's files, ancestors, xattr, CPUs, threads, pressure."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from cpumond.core.errors import GONE_ERRNOS, CgroupReadError, CgroupWriteError, describe
from cpumond.host.cgroup.mounts import Hierarchies, held_place, read_identity
from cpumond.host.cgroup.parse import (
    STAT_BYTES,
    Pressure,
    parse_cpu_list,
    parse_pressure,
    parse_pressure_total,
    parse_throttled,
)
from cpumond.host.cgroup.settings import AncestorCap, CpuSettings, WriteStep, least_cap, plan_steps
from cpumond.monitor.model import CpuReading

MODE_XATTR = "user.cpumond.mode"
SETTING_BYTES = 128
PRESSURE_BYTES = 256
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode: PROC_PID_INIT_INO of the kernel."""
HOST_PRESSURE = "/proc/pressure/cpu"


def read_text(path: str) -> str | None:
    """The text of a file; None when it is gone. Raises CgroupReadError."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError as error:
        if error.errno in GONE_ERRNOS:
            return None
        raise CgroupReadError(path, error) from error


def open_counter(path: str, flags: int = os.O_RDONLY) -> int | None:
    """A held descriptor of a counter file; None when it is gone. Raises CgroupReadError."""
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in GONE_ERRNOS:
            return None
        if error.errno == errno.EMFILE:
            raise CgroupReadError(path, f"{error.strerror}; raise LimitNOFILE") from error
        raise CgroupReadError(path, error) from error


class Cgroup:
    """One open cgroup; holds descriptors of its directory and its counters until ``close``.

    ``path`` is relative to the hierarchy of the cpu controller, ``directory`` absolute there, both as it was opened;
    ``inode`` its identity in that hierarchy: a removed and made-again cgroup has another one (its ctime does not tell,
    setting an xattr changes that), a renamed one (v1) keeps it. All that is read and written here is of this identity,
    under whatever name and whatever is mounted over it meanwhile. ``stat_fd`` is the descriptor of its cpu.stat,
    ``usage_fd`` that of the file with its CPU time, for looks at many cgroups. ``DESCRIPTORS``: how many it holds, one
    more with pressure.
    """

    WEIGHT_BOUNDS: ClassVar[tuple[int, int]]
    DESCRIPTORS: ClassVar[int]

    __slots__ = ("_fd", "_pressure_fd", "directory", "inode", "path", "stat_fd")

    def __init__(self, hierarchies: Hierarchies, path: str, fd: int, stat_fd: int) -> None:
        self.path = path
        self.directory = hierarchies.name(os.path.join(hierarchies.cpu_root, path))
        self.inode = os.fstat(fd).st_ino
        self._fd = fd
        self.stat_fd = stat_fd
        self._pressure_fd: int | None = None

    @property
    def usage_fd(self) -> int:
        """``parse_usage_us`` reads what is in it."""
        return self.stat_fd

    def parse_usage_us(self, raw: bytes) -> float:
        """The CPU time used, in microseconds, of the beginning of a cpu.stat. Raises ValueError, IndexError."""
        return int(raw.split(None, 2)[1])

    @property
    def place(self) -> str:
        """A path to it that stays right, for this process."""
        return held_place(self._fd)

    def read_quota_below(self) -> float:
        """The least quota in cores that the kernel takes because of quotas below it; 0 where that is none."""
        return 0.0

    def is_there(self) -> bool:
        return os.path.exists(f"{self.place}/cpu.stat")

    def read_file(self, name: str) -> str:
        """The text of one of its small files. Raises OSError."""
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.read(fd, SETTING_BYTES).decode("ascii", "replace")
        finally:
            os.close(fd)

    def read_number(self, name: str) -> int | None:
        """The number in one of its files; None where this kernel has no such file. Raises OSError, ValueError."""
        try:
            return int(self.read_file(name))
        except FileNotFoundError:
            return None

    def write_file(self, name: str, text: str) -> None:
        """Write one of its files, which must be there. Raises OSError."""
        fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            os.write(fd, text.encode("ascii"))
        finally:
            os.close(fd)

    def list_above(self) -> Iterator[tuple[str, str]]:
        """(Name when it was opened, place) of each cgroup above it, the nearest first, the root ("") last: in a
        container the root has limits, too."""
        place = self.place
        for name in (*ancestors(self.path), ""):
            place += "/.."
            yield name, place

    def read(self, at_s: float) -> CpuReading | None:
        """The counters; None when the cgroup is gone. Raises CgroupReadError."""
        raise NotImplementedError

    def read_throttled(self) -> int | None:
        """``nr_throttled`` alone; the next ``read`` has it, too. None when the cgroup is gone.

        Raises CgroupReadError.
        """
        try:
            return parse_throttled(os.pread(self.stat_fd, STAT_BYTES, 0))
        except OSError as error:
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(self.directory, error) from error
        except ValueError as error:
            raise CgroupReadError(self.directory, f"counters are not numbers: {error}") from error

    def _open_pressure(self) -> int:
        """Raises CgroupReadError."""
        raise NotImplementedError

    def follow_pressure(self, wanted: bool) -> None:
        """Whether ``read`` also tells ``pressure_s``; costs one more descriptor and one more pread.

        Raises CgroupReadError with the reason where the kernel does not tell it; ``read`` goes on without.
        """
        if not wanted and self._pressure_fd is not None:
            os.close(self._pressure_fd)
            self._pressure_fd = None
        elif wanted and self._pressure_fd is None:
            self._pressure_fd = self._open_pressure()

    def read_settings(self) -> CpuSettings | None:
        """The CPU settings in force; None when the cgroup is gone. Raises CgroupReadError."""
        raise NotImplementedError

    def write_settings(self, before: CpuSettings, after: CpuSettings) -> bool:
        """Bring ``before`` to ``after`` in an order that is legal at every step; False when the cgroup is gone.

        Raises CgroupWriteError with the rule of the kernel that is behind a refusal.
        """
        written: set[str] = set()
        for step in plan_steps(before, after):
            name, text = self._describe_step(step, after)
            if name in written:
                continue
            written.add(name)
            try:
                self.write_file(name, text)
            except OSError as error:
                if error.errno in GONE_ERRNOS:
                    return False
                hint = "a burst may not exceed the quota" if step.name == "burst" else self._explain(step, after)
                raise CgroupWriteError(os.path.join(self.directory, name), text, error, hint) from error
        return True

    def _describe_step(self, step: WriteStep, after: CpuSettings) -> tuple[str, str]:
        """The file of a step, and what is written to it."""
        raise NotImplementedError

    def _explain(self, step: WriteStep, after: CpuSettings) -> str:
        """The rule of the kernel behind a refused ``step``; "" where it is not known."""
        return ""

    @staticmethod
    def read_quota(directory: str) -> float | None:
        """The quota of any cgroup in cores; None where there is none, or no cgroup. Raises CgroupReadError."""
        raise NotImplementedError

    def read_ancestor_cap(self) -> AncestorCap:
        """The least quota above this cgroup, and where it is set. Raises CgroupReadError."""
        found = ((name, self.read_quota(place)) for name, place in self.list_above())
        return least_cap(AncestorCap(cores, name) for name, cores in found if cores is not None)

    def watch_paths(self, actuator: str) -> list[str]:
        """The files in which a foreign change of the limit that ``actuator`` moves shows."""
        raise NotImplementedError

    def close(self) -> None:
        self.follow_pressure(False)
        os.close(self.stat_fd)
        os.close(self._fd)


def open_directory(path: str) -> int | None:
    """A descriptor that stands for a directory; None when it is gone. Raises CgroupReadError."""
    return open_counter(path, os.O_PATH | os.O_DIRECTORY)


_VITAL: dict[tuple[tuple[int, int], str], dict[str, str]] = {}


def find_vital(root: str, proc: str = "/proc") -> dict[str, str]:
    """Cgroups that must never be lowered, and why: those of PID 1 and of this process, relative in the hierarchy with
    the cpu controller, at ``root``; found once. The root is left out, and a process whose cgroup is not known.

    In a cgroup namespace of its own a process is told a path that is none of a hierarchy that the host has mounted:
    then it is looked for by its PID.
    """
    key = (read_identity(root), proc)
    if key not in _VITAL:
        found: dict[str, str] = {}
        _VITAL[key] = found
        for process, pid, why in (
            ("self", os.getpid(), "this program itself runs in it"),
            ("1", 1, "PID 1 runs in it"),
        ):
            path = _read_cgroup(os.path.join(proc, process, "cgroup"))
            if path is None or not _holds(os.path.join(root, path), pid):
                place = next((place for place, _, _ in os.walk(root) if _holds(place, pid)), None)
                path = path if place is None else place[len(root) :].strip("/")
            if path and ".." not in path.split("/"):
                found.setdefault(path, why)
    return _VITAL[key]


def _read_cgroup(file: str) -> str | None:
    """The cgroup with the cpu controller as a process sees it; None where it sees none."""
    by_controller = {}
    with contextlib.suppress(OSError):
        text = Path(file).read_text(encoding="utf-8", errors="surrogateescape")
        for line in text.splitlines():
            _, controllers, path = line.split(":", 2)
            by_controller.update(dict.fromkeys(controllers.split(","), path.strip("/")))
    return by_controller.get("cpu", by_controller.get(""))


def _holds(directory: str, pid: int) -> bool:
    """Whether a process is in a cgroup, by its PID in this PID namespace; those of others are 0 there."""
    try:
        with open(os.path.join(directory, "cgroup.procs"), "rb") as file:
            return any(int(line) == pid for line in file)
    except (OSError, ValueError):
        # Gone, threaded, or a tree of plain files.
        return False


def is_leaf(directory: str) -> bool:
    """Whether a cgroup has no child cgroups; a directory's link count is 2 + its children, where it is counted."""
    try:
        links = os.stat(directory).st_nlink
        if links >= 2:
            return links == 2
        with os.scandir(directory) as entries:
            return not any(entry.is_dir(follow_symlinks=False) for entry in entries)
    except OSError:
        # Gone: there is nothing below it.
        return True


NO_BANDWIDTH = (
    "this kernel has no CFS bandwidth control (CONFIG_CFS_BANDWIDTH), so no quota can be set; "
    'use actuator = "guarantee" or "weight", or mode = "shadow"'
)


def find_missing_quota(directory: str) -> str:
    """The file of the quota that a cgroup has not, though it has a weight: NO_BANDWIDTH. "" for all others."""
    for quota, weight in (("cpu.max", "cpu.weight"), ("cpu.cfs_quota_us", "cpu.shares")):
        if os.path.exists(f"{directory}/{quota}"):
            return ""
        if os.path.exists(f"{directory}/{weight}"):
            return quota
    return ""


def is_idle(directory: str) -> bool:
    """Whether a cgroup itself is in the idle class: the kernel refuses each weight that is written to it (EINVAL)."""
    try:
        with open(os.path.join(directory, "cpu.idle"), "rb") as file:
            return file.read(2).strip() == b"1"
    except OSError:
        # Gone, or a kernel without that class.
        return False


def ancestors(path: str) -> Iterator[str]:
    """The relative paths above ``path``, the nearest first, without the root."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def read_mode_xattr(directory: str) -> tuple[str, bool] | None:
    """The value of ``user.cpumond.mode`` and whether the cgroup belongs to root; None where it is not set."""
    try:
        value = os.getxattr(directory, MODE_XATTR).decode("ascii", "replace").strip()
        return value, os.stat(directory).st_uid == 0
    except OSError:
        # Not set, not supported by this file system, or gone: all mean that no mode is asked for here.
        return None


def read_cpus(hierarchies: Hierarchies, path: str) -> int:
    """The number of CPUs for the cgroup: its cpuset's, or the nearest ancestor's, or all that are online."""
    if hierarchies.cpuset_root:
        for place in [path, *ancestors(path), ""]:
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                text = read_text(os.path.join(hierarchies.cpuset_root, place, name))
                if text and text.strip():
                    try:
                        return parse_cpu_list(text)
                    except ValueError as error:
                        raise CgroupReadError(os.path.join(hierarchies.cpuset_root, place, name), error) from error
    return os.cpu_count() or 1


def is_populated(hierarchies: Hierarchies, path: str) -> bool:
    """Whether a process is in a cgroup or below it; also one that this pid namespace does not see. Where no file says
    so, there may be one. Raises CgroupReadError."""
    if hierarchies.cpu_version == 1 and not sees_all_processes():
        return True
    # On v1 a process may be in one hierarchy alone: systemd moves those of its units in that of cpu.
    roots = dict.fromkeys((hierarchies.cpu_root, hierarchies.cpuacct_root))
    return any(_is_populated(os.path.join(root, path)) for root in roots)


@functools.cache
def sees_all_processes() -> bool:
    """Whether this process is in the host's first PID namespace. In another one, as in a container, v1 leaves out of
    ``cgroup.procs`` the processes that are not in it."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == f"pid:[{INITIAL_PID_NAMESPACE}]"
    return False


def _is_populated(directory: str) -> bool:
    text = read_text(os.path.join(directory, "cgroup.events"))
    if text is not None:
        return "populated 0" not in text
    lists = [read_text(os.path.join(place, "cgroup.procs")) for place in (directory, *list_below(directory))]
    return None in lists or any(lists)


def list_below(directory: str) -> list[str]:
    """The cgroups below one, at any depth; empty for a leaf."""
    if is_leaf(directory):
        return []
    return [place for place, _, _ in os.walk(directory) if place != directory]


def count_threads(directory: str) -> int:
    """Threads in the cgroup and below it; 0 when it is gone or does not say."""
    return sum(_count_own_threads(place) for place in (directory, *list_below(directory)))


def _count_own_threads(directory: str) -> int:
    for name in ("cgroup.threads", "tasks", "cgroup.procs"):
        try:
            with open(os.path.join(directory, name), "rb") as file:
                return sum(1 for _ in file)
        except OSError:
            # Absent in this version, or a threaded cgroup that refuses cgroup.procs: the next name, else unknown.
            continue
    return 0


def open_pressure(unified_root: str | None, path: str) -> int:
    """A held descriptor of the cgroup's ``cpu.pressure``, read once to see that it works.

    Raises CgroupReadError with the reason where there is none (no PSI, turned off, no such cgroup in cgroup2).
    """
    if unified_root is None:
        raise CgroupReadError(path, "no pressure (PSI) of it is known: cgroup2 is not mounted")
    file = os.path.join(unified_root, path, "cpu.pressure")
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CgroupReadError(file, _explain_no_pressure(error, os.path.dirname(file))) from error
    try:
        parse_pressure_total(os.pread(fd, PRESSURE_BYTES, 0))
    except OSError as error:
        os.close(fd)
        raise CgroupReadError(file, _explain_no_pressure(error, os.path.dirname(file))) from error
    except ValueError as error:
        os.close(fd)
        raise CgroupReadError(file, f"is no pressure file: {error}") from error
    return fd


def _explain_no_pressure(error: OSError, directory: str) -> str:
    if error.errno == errno.EOPNOTSUPP:
        return "the kernel has PSI, but it is turned off; boot with psi=1"
    if error.errno not in GONE_ERRNOS:
        return describe(error)
    if not os.path.isdir(directory):
        return "there is no such cgroup in cgroup2"
    return "there is no such file: the kernel has no PSI (CONFIG_PSI), or cgroup.pressure is 0 there"


def read_pressure_total_s(fd: int) -> float | None:
    """Seconds in which some task of the cgroup waited for CPU, of a descriptor of ``open_pressure``.

    None where it cannot be read any more: the cgroup is gone, or it was turned off (``cgroup.pressure``).
    """
    try:
        return parse_pressure_total(os.pread(fd, PRESSURE_BYTES, 0))
    except (OSError, ValueError):
        return None


def read_pressure_s(path: str) -> float | None:
    """Seconds in which some task waited for CPU, of the pressure file at ``path``; None where there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            return parse_pressure_total(file.read(PRESSURE_BYTES))
    except (OSError, ValueError):
        return None


def read_pressure(hierarchies: Hierarchies, path: str) -> Pressure | None:
    """PSI of the cgroup's CPU where the kernel has it; None where it is absent or turned off, and for a file that no
    kernel writes."""
    if hierarchies.unified_root is None:
        return None
    try:
        text = read_text(os.path.join(hierarchies.unified_root, path, "cpu.pressure"))
        return parse_pressure(text) if text else None
    except (CgroupReadError, ValueError):
        # EOPNOTSUPP: PSI is compiled in but turned off.
        return None
