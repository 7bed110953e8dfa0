"""Cgroups for the executor's jobs: made with their limits, emptied, read and removed, in every hierarchy that matters.

Always: the hierarchies of cpu and CPU time. Where they are there and writable, too: the v1 ``memory`` hierarchy (limit,
peak, oom kills), the v1 ``pids`` hierarchy (limit), and the cgroup2 mount beside v1, whose ``cgroup.kill`` no fork
outruns.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator

import msgspec

from cpumond.core.errors import AccessError, CpumondError, CreateError, from_os_error
from cpumond.core.measures import DEFAULT_PERIOD_US
from cpumond.host.cgroup import open_cgroup
from cpumond.host.cgroup.mounts import Hierarchies, read_mounts, relative_path
from cpumond.host.cgroup.parse import parse_flat_keyed
from cpumond.host.cgroup.settings import AncestorCap, CpuSettings, compute_quota_target
from cpumond.host.cgroup_processes import kill_processes, list_processes, read_processes, send_signal

PREFIX = "cpumond-job-"
MAX_NAME_BYTES = 255
ADVICE = "run as root, or give the agent's user cgroups of its own with executor.cgroup_root"
BUSY = "there are processes in it; move them into a cgroup below it or set executor.cgroup_root to a cgroup without any"


class JobTotals(msgspec.Struct, frozen=True):
    """The counters of a job's cgroup: CPU time (s), peak memory (bytes), None where the kernel does not tell; processes
    that the kernel killed for want of memory."""

    cpu_seconds: float | None = None
    max_memory: int | None = None
    oom_kills: int = 0


class JobCgroupTree:
    """The cgroups ``<root>/cpumond-job-<job_id>``.

    ``root`` (relative, "" = the hierarchies' own root) is made where it is missing and never removed. On v2 it must
    have no processes. A tree of plain files is served as well, as far as it goes: what forks away is not seen there.
    """

    def __init__(self, hierarchies: Hierarchies, root: str, mountinfo_path: str = "/proc/self/mountinfo") -> None:
        self._hierarchies = hierarchies
        self._root = relative_path(hierarchies, root)
        self._memory_root, self._pids_root = (
            _find_root(hierarchies, mountinfo_path, controller) for controller in ("memory", "pids")
        )
        self._roots: list[str] | None = None

    def path(self, job_id: str) -> str:
        """The cgroup of a job, relative to the cpu hierarchy."""
        return os.path.join(self._root, PREFIX + job_id)

    def _list_roots(self) -> list[str]:
        """Mount points, that of cpu first; looked at once: rights and mounts do not change under a running agent."""
        if self._roots is None:
            places = self._hierarchies
            roots = [places.cpu_root, places.cpuacct_root]
            if places.cpu_version == 1:
                roots += [each for each in (self._memory_root, self._pids_root) if each and _may_make(each, self._root)]
                if (
                    places.unified_root
                    and _may_make(places.unified_root, self._root)
                    and _may_enter(places.unified_root, self._root)
                ):
                    roots.append(places.unified_root)
            self._roots = list(dict.fromkeys(roots))
        return self._roots

    def _list_directories(self, job_id: str) -> list[str]:
        return [os.path.join(root, self.path(job_id)) for root in self._list_roots()]

    def create(self, job_id: str, cpu_limit: float, memory_limit: int, max_tasks: int = 0) -> list[str]:
        """Make the cgroup with ``cpu_limit`` cores as its quota, ``memory_limit`` bytes, ``max_tasks`` processes and
        threads (0 = no limit; without the controller there is none).

        The quota is held to the bounds of the kernel and to the quotas above. Returns the ``cgroup.procs`` files that
        its first process must write its id into. Raises CreateError or AccessError; then nothing is left of it.
        """
        name = PREFIX + job_id
        if not job_id or "/" in job_id or "\0" in job_id or len(os.fsencode(name)) > MAX_NAME_BYTES:
            raise CreateError(
                f"cannot make a cgroup for the job {job_id!r}: its id must be 1 to {MAX_NAME_BYTES - len(PREFIX)} "
                "bytes without '/'; submit it under another id"
            )
        made: list[str] = []
        directory = ""
        try:
            for root in self._list_roots():
                directory = os.path.join(root, self._root)
                self._make_root(root)
                directory = os.path.join(directory, name)
                with contextlib.suppress(OSError):
                    os.rmdir(directory)  # an empty one of an earlier life has old counters
                os.mkdir(directory, 0o755)
                made.append(directory)
            self._write_limits(job_id, cpu_limit, memory_limit)
            if max_tasks > 0:
                is_v2 = self._hierarchies.cpu_version == 2
                pids_root = self._hierarchies.cpu_root if is_v2 else self._pids_root
                if pids_root in self._list_roots():
                    _write(os.path.join(pids_root, self.path(job_id)), "pids.max", f"{max_tasks}\n", optional=is_v2)
        except OSError as error:
            _remove_all(made)
            raise from_os_error(error, f"make the cgroup {directory}", ADVICE) from error
        except CpumondError as error:
            _remove_all(made)
            raise error if isinstance(error, (AccessError, CreateError)) else CreateError(str(error)) from error
        return [self._hierarchies.name(os.path.join(place, "cgroup.procs")) for place in made]

    def _make_root(self, mount: str) -> None:
        """The cgroup above the jobs, and on v2 the controllers handed down to them. Raises OSError, CreateError."""
        place = mount
        above = [mount]
        for part in self._root.split("/") if self._root else []:
            place = os.path.join(place, part)
            above.append(place)
        for place in above:
            if place != mount:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(place, 0o755)
            if self._hierarchies.cpu_version == 2:
                _hand_down(place)

    def _write_limits(self, job_id: str, cpu_limit: float, memory_limit: int) -> None:
        path = self.path(job_id)
        directory = os.path.join(self._hierarchies.cpu_root, path)
        version = self._hierarchies.cpu_version
        cap = AncestorCap(math.inf)
        cgroup = open_cgroup(self._hierarchies, path)
        if cgroup is not None:
            cap = cgroup.read_ancestor_cap() if version == 1 else cap
            cgroup.close()
        settings = compute_quota_target(cpu_limit, CpuSettings(None, DEFAULT_PERIOD_US), cap).settings
        if version == 2:
            _write(directory, "cpu.max", f"{settings.quota_us} {settings.period_us}\n")
        else:
            _write(directory, "cpu.cfs_period_us", f"{settings.period_us}\n")
            _write(directory, "cpu.cfs_quota_us", f"{settings.quota_us}\n")
        if memory_limit <= 0:
            return
        if version == 1:
            if self._memory_root in self._list_roots():
                memory = os.path.join(self._memory_root, path)
                _write(memory, "memory.limit_in_bytes", f"{memory_limit}\n")
                _write(memory, "memory.memsw.limit_in_bytes", f"{memory_limit}\n", optional=True)
        else:
            _write(directory, "memory.max", f"{memory_limit}\n", optional=True)
            _write(directory, "memory.swap.max", "0\n", optional=True)

    def join_files(self, job_id: str) -> list[str]:
        """The ``cgroup.procs`` files of a cgroup that exists; empty if it is gone."""
        found = [
            os.path.join(place, "cgroup.procs") for place in self._list_directories(job_id) if os.path.isdir(place)
        ]
        return [self._hierarchies.name(file) for file in found]

    def list_processes(self, job_id: str) -> list[int]:
        """The processes in it, in any of the hierarchies and below; empty when it is gone."""
        return sorted(list_processes(self._list_directories(job_id)))

    def signal(self, job_id: str, number: int) -> None:
        """Send a signal to every process in it, once. Those that this process may not signal are left out."""
        directories = self._list_directories(job_id)
        send_signal(directories, number, list_processes(directories))

    def kill(self, job_id: str) -> None:
        """SIGKILL to everything in it and below; does not wait for the end."""
        kill_processes(self._list_directories(job_id))

    def read_totals(self, job_id: str) -> JobTotals:
        """Its counters up to now; all None when it is gone."""
        path = self.path(job_id)
        places = self._hierarchies
        cpu_seconds: float | None = None
        cpuacct = os.path.join(places.cpuacct_root, path)
        if places.cpu_version == 1 and places.cpuacct_root != places.unified_root:
            usage_ns = _read_number(cpuacct, "cpuacct.usage")
            cpu_seconds = None if usage_ns is None else usage_ns * 1e-9
        else:
            usage_us = _read_key(cpuacct, "cpu.stat", "usage_usec")
            cpu_seconds = None if usage_us is None else usage_us * 1e-6
        return JobTotals(cpu_seconds, *self.read_memory_peak(path))

    def read_memory_peak(self, path: str) -> tuple[int | None, int]:
        """The most bytes that the cgroup at ``path`` (relative) ever used, and how many of its processes the kernel
        killed for want of memory; (None, 0) where it does not tell."""
        if self._hierarchies.cpu_version == 2:
            directory = os.path.join(self._hierarchies.cpu_root, path)
            return _read_number(directory, "memory.peak"), _read_key(directory, "memory.events", "oom_kill") or 0
        if not self._memory_root:
            return None, 0
        memory = os.path.join(self._memory_root, path)
        # On v1 each cgroup counts its own processes only.
        oom_kills = sum(_read_key(place, "memory.oom_control", "oom_kill") or 0 for place in _walk(memory))
        return _read_number(memory, "memory.max_usage_in_bytes"), oom_kills

    def read_memory(self, path: str) -> int | None:
        """Bytes that the cgroup at ``path`` (relative) uses now; None where the kernel does not tell.

        Without the cache of files that the kernel would give back at once.
        """
        if self._hierarchies.cpu_version == 2:
            directory, name, cache = os.path.join(self._hierarchies.cpu_root, path), "memory.current", "inactive_file"
        else:
            directory = os.path.join(self._memory_root, path) if self._memory_root else ""
            name, cache = "memory.usage_in_bytes", "total_inactive_file"
        used = _read_number(directory, name) if directory else None
        return None if used is None else max(used - (_read_key(directory, "memory.stat", cache) or 0), 0)

    def remove(self, job_id: str) -> bool:
        """Remove it everywhere, with all below it; False while there is still a process in it. Never raises."""
        return _remove_all(self._list_directories(job_id))

    def list_job_ids(self) -> list[str]:
        """Jobs whose cgroup exists in any of the hierarchies."""
        found = set()
        for root in self._list_roots():
            with contextlib.suppress(OSError), os.scandir(os.path.join(root, self._root)) as entries:
                for entry in entries:
                    if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                        found.add(entry.name.removeprefix(PREFIX))
        return sorted(found)


def _find_root(hierarchies: Hierarchies, mountinfo_path: str, controller: str) -> str:
    """The mount point of a v1 controller, "" where there is none."""
    if hierarchies.cpu_version == 2:
        return ""
    try:
        mounts = read_mounts(mountinfo_path)
    except OSError:
        # The hierarchies were found without it: only this limit is missing then.
        return ""
    return next((mount.mount_point for mount in mounts if mount.version == 1 and controller in mount.controllers), "")


def _may_make(mount: str, root: str) -> bool:
    """Whether cgroups can be made at ``root``, or at the nearest cgroup above it that exists."""
    place = os.path.join(mount, root)
    while not os.path.isdir(place) and len(place) > len(mount):
        place = os.path.dirname(place)
    return os.access(place, os.W_OK)


def _may_enter(mount: str, root: str) -> bool:
    """Whether the kernel lets this process move one of its own to ``root`` in the cgroup2 hierarchy.

    That takes the right to write ``cgroup.procs`` of the nearest cgroup above both ends.
    """
    if os.geteuid() == 0:
        return True
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            here = next((line[4:].strip() for line in file if line.startswith("0::/")), "")
    except OSError:
        return False
    common = os.path.commonpath([f"/{here}", f"/{root}"]).lstrip("/")
    return os.access(os.path.join(mount, common, "cgroup.procs"), os.W_OK)


def _hand_down(directory: str) -> None:
    """Give the children of a v2 cgroup the controllers cpu and, where it has them, memory and pids.

    Raises CreateError.
    """
    offered = (_read(directory, "cgroup.controllers") or "").split()
    given = (_read(directory, "cgroup.subtree_control") or "").split()
    if "cpu" not in given and "cpu" not in offered and os.path.exists(os.path.join(directory, "cgroup.controllers")):
        raise CreateError(
            f"the cgroup {directory} does not have the cpu controller: write +cpu into cgroup.subtree_control of the "
            "cgroup above it (for a unit of systemd: Delegate=yes), or set executor.cgroup_root to one that has it"
        )
    missing = [name for name in ("cpu", "memory", "pids") if name in offered and name not in given]
    # With processes in it the kernel would take +cpu, and let no process into its children any more.
    if "cpu" in missing and os.path.exists(os.path.join(directory, "cgroup.type")) and read_processes(directory):
        raise CreateError(f"cannot hand the cpu controller down in {directory}: {BUSY}")
    for controller in missing:
        try:
            _write(directory, "cgroup.subtree_control", f"+{controller}")
        except OSError as error:
            if controller != "cpu":
                continue
            advice = BUSY if error.errno == errno.EBUSY else ADVICE
            raise from_os_error(error, f"hand the cpu controller down in {directory}", advice) from error


def _write(directory: str, name: str, text: str, optional: bool = False) -> None:
    """Write a file, which a tree of plain files may not have yet (cgroup file systems refuse to make one).

    ``optional``: only if it is there. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | (0 if optional else os.O_CREAT)
    try:
        fd = os.open(os.path.join(directory, name), flags, 0o644)
    except FileNotFoundError:
        if optional:
            return
        raise
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def _read(directory: str, name: str) -> str | None:
    """The text of a file, None where it cannot be read: what it says is not needed to end a job."""
    try:
        with open(os.path.join(directory, name), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _read_number(directory: str, name: str) -> int | None:
    text = (_read(directory, name) or "").strip()
    return int(text) if text.isdecimal() else None


def _read_key(directory: str, name: str, key: str) -> int | None:
    try:
        return parse_flat_keyed(_read(directory, name) or "").get(key)
    except ValueError:
        return None


def _walk(directory: str) -> Iterator[str]:
    """A cgroup and all below it, the deepest first; nothing when it is gone."""
    for place, _, _ in os.walk(directory, topdown=False):
        yield place


def _remove_all(directories: list[str]) -> bool:
    """rmdir from the bottom; whether nothing is left."""
    gone = True
    for directory in directories:
        for place in _walk(directory):
            try:
                os.rmdir(place)
            except FileNotFoundError:
                continue
            except OSError as error:
                gone = error.errno == errno.ENOTEMPTY and _remove_plain(place) and gone
    return gone


def _remove_plain(directory: str) -> bool:
    """Remove a directory of plain files: a cgroup is never "not empty" to the kernel because of its files."""
    if list_processes([directory]):
        return False
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                os.unlink(entry.path)
        os.rmdir(directory)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True
