"""Common parts of both versions: a cgroup's files, ancestors, xattr, CPUs, threads and pressure."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from cpumond.core.errors import GONE_ERRNOS, CgroupReadError, CgroupWriteError, describe
from cpumond.core.job_cgroups import list_above
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
"""Inode of the host's first PID namespace: the kernel's PROC_PID_INIT_INO."""
HOST_PRESSURE = "/proc/pressure/cpu"


def read_text(path: str) -> str | None:
    """Return the text of a file; None if it is gone. Raises CgroupReadError."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError as error:
        if error.errno in GONE_ERRNOS:
            return None
        raise CgroupReadError(path, error) from error


def open_counter(path: str, flags: int = os.O_RDONLY) -> int | None:
    """Open a counter file and return its descriptor; None if it is gone. Raises CgroupReadError."""
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

    ``path`` (relative to the hierarchy of the cpu controller) and ``directory`` (absolute there) are those at the time
    of opening. ``inode`` is its identity in that hierarchy: a removed and recreated cgroup has a different inode, a
    renamed one (v1) keeps it. (The ctime is no identity, because setting an xattr changes it.) All methods read and
    write the cgroup with this inode, whatever its name is now and whatever is mounted over it. ``stat_fd`` is the
    descriptor of its cpu.stat, ``usage_fd`` that of the file with its CPU time, for callers that look at many cgroups.
    ``DESCRIPTORS`` is the number of descriptors that it holds, not counting the one for pressure."""

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
        """Descriptor of the file that ``parse_usage_us`` parses."""
        return self.stat_fd

    def parse_usage_us(self, raw: bytes) -> float:
        """Parse the CPU time used, in microseconds, from the beginning of a cpu.stat. Raises ValueError, IndexError."""
        return int(raw.split(None, 2)[1])

    @property
    def place(self) -> str:
        """A path to the cgroup's directory that stays valid within this process."""
        return held_place(self._fd)

    def read_quota_below(self) -> float:
        """Return the least quota, in cores, that the kernel accepts here because of quotas below; 0 without any."""
        return 0.0

    def is_there(self) -> bool:
        return os.path.exists(f"{self.place}/cpu.stat")

    def read_file(self, name: str) -> str:
        """Return the text of a small file of the cgroup. Raises OSError."""
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.read(fd, SETTING_BYTES).decode("ascii", "replace")
        finally:
            os.close(fd)

    def read_number(self, name: str) -> int | None:
        """Return the number in a file of the cgroup; None if the kernel lacks the file. Raises OSError, ValueError."""
        try:
            return int(self.read_file(name))
        except FileNotFoundError:
            return None

    def write_file(self, name: str, text: str) -> None:
        """Write a file of the cgroup; the file must exist. Raises OSError."""
        fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            os.write(fd, text.encode("ascii"))
        finally:
            os.close(fd)

    def list_above(self) -> Iterator[tuple[str, str]]:
        """Yield (name at the time of opening, place) of each cgroup above, the nearest first. The root ("") comes last,
        because in a container it also has limits."""
        place = self.place
        for name in (*list_above(self.path), ""):
            place += "/.."
            yield name, place

    def read(self, at_s: float) -> CpuReading | None:
        """Read the counters; None if the cgroup is gone. Raises CgroupReadError."""
        raise NotImplementedError

    def read_throttled(self) -> int | None:
        """Read only ``nr_throttled``; the next ``read`` will return this number, too. None if the cgroup is gone.

        Raises CgroupReadError."""
        try:
            return parse_throttled(os.pread(self.stat_fd, STAT_BYTES, 0))
        except OSError as error:
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(self.directory, error) from error
        except ValueError as error:
            raise CgroupReadError(self.directory, f"counters are not numbers: {error}") from error

    def _open_pressure(self) -> int:
        """Open the cgroup's pressure file. Raises CgroupReadError."""
        raise NotImplementedError

    def follow_pressure(self, wanted: bool) -> None:
        """Choose whether ``read`` also returns ``pressure_s``; this costs one more descriptor and one more pread.

        Raises CgroupReadError with the reason if the kernel does not report pressure; ``read`` continues without it."""
        if not wanted and self._pressure_fd is not None:
            os.close(self._pressure_fd)
            self._pressure_fd = None
        elif wanted and self._pressure_fd is None:
            self._pressure_fd = self._open_pressure()

    def read_settings(self) -> CpuSettings | None:
        """Read the CPU settings in force; None if the cgroup is gone. Raises CgroupReadError."""
        raise NotImplementedError

    def write_settings(self, before: CpuSettings, after: CpuSettings) -> bool:
        """Change ``before`` to ``after`` by writes in a valid order; return False if the cgroup is gone.

        Raises CgroupWriteError, with the kernel's rule if the kernel refuses a write."""
        written: set[str] = set()
        for step in plan_steps(before, after):
            name, text = self._resolve_step(step, after)
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

    def _resolve_step(self, step: WriteStep, after: CpuSettings) -> tuple[str, str]:
        """Return the file of a step and the text to write."""
        raise NotImplementedError

    def _explain(self, step: WriteStep, after: CpuSettings) -> str:
        """Return the kernel's rule because of which it refused ``step``; "" if unknown."""
        return ""

    @staticmethod
    def read_quota(directory: str) -> float | None:
        """Return the quota, in cores, of any cgroup; None if it has none or is gone. Raises CgroupReadError."""
        raise NotImplementedError

    def read_ancestor_cap(self) -> AncestorCap:
        """Return the least quota above this cgroup, and which cgroup has it. Raises CgroupReadError."""
        found = ((name, self.read_quota(place)) for name, place in self.list_above())
        return least_cap(AncestorCap(cores, name) for name, cores in found if cores is not None)

    def watch_paths(self, actuator: str) -> list[str]:
        """Return the files that change if another program changes the limit that ``actuator`` moves."""
        raise NotImplementedError

    def close(self) -> None:
        self.follow_pressure(False)
        os.close(self.stat_fd)
        os.close(self._fd)


def open_directory(path: str) -> int | None:
    """Open a descriptor of a directory; None if it is gone. Raises CgroupReadError."""
    return open_counter(path, os.O_PATH | os.O_DIRECTORY)


_VITAL: dict[tuple[tuple[int, int], str], dict[str, str]] = {}


def find_vital(root: str, proc: str = "/proc") -> dict[str, str]:
    """Return the cgroups whose limits must never be lowered, with reasons: those of PID 1 and of this process.

    Paths are relative to the hierarchy of the cpu controller at ``root``. They are looked up once; the root and unknown
    cgroups are left out. If a process has its own cgroup namespace, its path does not exist in a hierarchy mounted by
    the host: then its cgroup is searched by its PID."""
    key = (read_identity(root), proc)
    if key not in _VITAL:
        found: dict[str, str] = {}
        _VITAL[key] = found
        for name, pid, why in (("self", os.getpid(), "this program itself runs in it"), ("1", 1, "PID 1 runs in it")):
            path = _read_cgroup(os.path.join(proc, name, "cgroup"))
            if path is None or not _holds(os.path.join(root, path), pid):
                place = next((place for place, _, _ in os.walk(root) if _holds(place, pid)), None)
                path = path if place is None else place[len(root) :].strip("/")
            if path and ".." not in path.split("/"):
                found.setdefault(path, why)
    return _VITAL[key]


def _read_cgroup(file: str) -> str | None:
    """Return a process's cgroup in the hierarchy of cpu, as the process sees it; None if it sees none."""
    by_controller = {}
    with contextlib.suppress(OSError):
        text = Path(file).read_text(encoding="utf-8", errors="surrogateescape")
        for line in text.splitlines():
            _, controllers, path = line.split(":", 2)
            by_controller.update(dict.fromkeys(controllers.split(","), path.strip("/")))
    return by_controller.get("cpu", by_controller.get(""))


def _holds(directory: str, pid: int) -> bool:
    """Whether a process is in a cgroup, by its PID in this PID namespace; processes outside of it have PID 0 there."""
    try:
        with open(os.path.join(directory, "cgroup.procs"), "rb") as file:
            return any(int(line) == pid for line in file)
    except (OSError, ValueError):
        # The cgroup is gone or threaded, or this is a tree of plain files.
        return False


def is_leaf(directory: str) -> bool:
    """Return whether a cgroup has no child cgroups. The link count of a directory, if reported, is 2 + its children."""
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
    """Return the name of the quota file if a cgroup lacks it but has a weight file (NO_BANDWIDTH); else ""."""
    for quota, weight in (("cpu.max", "cpu.weight"), ("cpu.cfs_quota_us", "cpu.shares")):
        if os.path.exists(f"{directory}/{quota}"):
            return ""
        if os.path.exists(f"{directory}/{weight}"):
            return quota
    return ""


def is_idle(directory: str) -> bool:
    """Return whether a cgroup itself is in the idle class, so that the kernel refuses every weight for it (EINVAL)."""
    try:
        with open(os.path.join(directory, "cpu.idle"), "rb") as file:
            return file.read(2).strip() == b"1"
    except OSError:
        # The cgroup is gone, or the kernel has no idle class.
        return False


def read_mode_xattr(directory: str) -> tuple[str, bool] | None:
    """Return the value of ``user.cpumond.mode`` and whether the cgroup belongs to root; None if it is not set."""
    try:
        value = os.getxattr(directory, MODE_XATTR).decode("ascii", "replace").strip()
        return value, os.stat(directory).st_uid == 0
    except OSError:
        # Not set, not supported by this file system, or gone: in all cases no mode is requested.
        return None


def read_cpus(hierarchies: Hierarchies, path: str) -> int:
    """Return the number of CPUs in the cpuset of the cgroup, else of the nearest ancestor with one, else online."""
    if hierarchies.cpuset_root:
        for place in [path, *list_above(path), ""]:
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                text = read_text(os.path.join(hierarchies.cpuset_root, place, name))
                if text and text.strip():
                    try:
                        return parse_cpu_list(text)
                    except ValueError as error:
                        raise CgroupReadError(os.path.join(hierarchies.cpuset_root, place, name), error) from error
    return os.cpu_count() or 1


def is_populated(hierarchies: Hierarchies, path: str) -> bool:
    """Return whether a process is in a cgroup or below it, even a process that is invisible in this PID namespace. Also
    True if no file shows whether there is one. Raises CgroupReadError."""
    if hierarchies.cpu_version == 1 and not sees_all_processes():
        return True
    # On v1 a process may be here in one hierarchy only: systemd moves units' processes in the hierarchy of cpu.
    roots = dict.fromkeys((hierarchies.cpu_root, hierarchies.cpuacct_root))
    return any(_is_populated(os.path.join(root, path)) for root in roots)


@functools.cache
def sees_all_processes() -> bool:
    """Return whether this process is in the host's first PID namespace. In a different one, as in a container,
    ``cgroup.procs`` of v1 omits processes outside of that namespace."""
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
    """Return all cgroups below a cgroup, at any depth; empty for a leaf."""
    if is_leaf(directory):
        return []
    return [place for place, _, _ in os.walk(directory) if place != directory]


def count_threads(directory: str) -> int:
    """Count the threads in the cgroup and below it; 0 if it is gone or the number is unknown."""
    return sum(_count_own_threads(place) for place in (directory, *list_below(directory)))


def _count_own_threads(directory: str) -> int:
    for name in ("cgroup.threads", "tasks", "cgroup.procs"):
        try:
            with open(os.path.join(directory, name), "rb") as file:
                return sum(1 for _ in file)
        except OSError:
            # The file is missing in this version, or cgroup.procs is refused in a threaded cgroup: try the next name.
            continue
    return 0


def open_pressure(unified_root: str | None, path: str) -> int:
    """Open the cgroup's ``cpu.pressure`` and read it once as a test; return the descriptor.

    Raises CgroupReadError with the reason if that is impossible (no PSI, turned off, no such cgroup in cgroup2)."""
    if unified_root is None:
        raise CgroupReadError(path, "its pressure (PSI) is unknown: cgroup2 is not mounted")
    file = os.path.join(unified_root, path, "cpu.pressure")
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parse_pressure_total(os.pread(fd, PRESSURE_BYTES, 0))
        except (OSError, ValueError):
            os.close(fd)
            raise
    except OSError as error:
        raise CgroupReadError(file, _explain_no_pressure(error, os.path.dirname(file))) from error
    except ValueError as error:
        raise CgroupReadError(file, f"is not a pressure file: {error}") from error
    return fd


def _explain_no_pressure(error: OSError, directory: str) -> str:
    if error.errno == errno.EOPNOTSUPP:
        return "the kernel has PSI, but it is turned off; boot with psi=1"
    if error.errno not in GONE_ERRNOS:
        return describe(error)
    if not os.path.isdir(directory):
        return "the cgroup does not exist in cgroup2"
    return "the file does not exist: the kernel has no PSI (CONFIG_PSI), or cgroup.pressure is 0 there"


def read_pressure_total_s(fd: int) -> float | None:
    """Read the seconds in which some task of the cgroup waited for CPU, from a descriptor of ``open_pressure``.

    None if it is no longer readable: the cgroup is gone, or pressure was turned off (``cgroup.pressure``)."""
    try:
        return parse_pressure_total(os.pread(fd, PRESSURE_BYTES, 0))
    except (OSError, ValueError):
        return None


def read_pressure_s(path: str) -> float | None:
    """Read, from the pressure file at ``path``, the seconds in which some task waited for CPU; None if unreadable."""
    try:
        with open(path, "rb", buffering=0) as file:
            return parse_pressure_total(file.read(PRESSURE_BYTES))
    except (OSError, ValueError):
        return None


def read_pressure(hierarchies: Hierarchies, path: str) -> Pressure | None:
    """Read the PSI of the cgroup's CPU; None if the kernel lacks it or has it turned off, or if the file is invalid."""
    if hierarchies.unified_root is None:
        return None
    try:
        text = read_text(os.path.join(hierarchies.unified_root, path, "cpu.pressure"))
        return parse_pressure(text) if text else None
    except (CgroupReadError, ValueError):
        # EOPNOTSUPP: PSI is compiled in but turned off.
        return None
