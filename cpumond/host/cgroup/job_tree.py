"""Cgroups of the executor's jobs in every relevant hierarchy: create them empty, with limits; read and remove them.

The hierarchies of cpu and CPU time are always relevant. Relevant, too, if they exist and are writable, are the v1
``memory`` hierarchy (limit, peak, oom kills), the v1 ``pids`` hierarchy (limit), and the cgroup2 mount beside v1,
because no fork escapes its ``cgroup.kill``.

Ordinary jobs are in ``root``, jobs on reclaimed CPU in the idle class (``idle``), a child of the hierarchies' root. An
agent confined to a delegated ``root`` cannot create that child, so its class is below ``root``. Then these jobs yield
only to the agent's other jobs, because ``root`` itself keeps the weight that its owner set. Such a class is not an idle
class of the host, so the agent reports that there is none."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os

import msgspec

from cpumond.core.errors import AccessError, CpumondError, CreateError, from_os_error
from cpumond.core.job_cgroups import IDLE_NAME, name_idle_parent
from cpumond.core.measures import DEFAULT_PERIOD_US
from cpumond.host.cgroup import open_cgroup
from cpumond.host.cgroup.idle import IdleClass, IdleParent
from cpumond.host.cgroup.mounts import Hierarchies, read_mounts, relative_path
from cpumond.host.cgroup.parse import parse_flat_keyed
from cpumond.host.cgroup.settings import AncestorCap, CpuSettings, compute_quota_target, compute_start_weight
from cpumond.host.cgroup_processes import kill_processes, list_processes, read_processes, send_signal

PREFIX = "cpumond-job-"
MAX_NAME_BYTES = 255
V1_NO_MEMORY_LIMIT = 2**60
"""The kernel represents "no limit" by more memory than any machine has."""
MEMORY_STEP = 0.01
"""A relative change of memory.high that is smaller than this is not written."""
ADVICE = "run as root, or give the agent's user its own cgroups with executor.cgroup_root"
BUSY = "it contains processes; move them to a cgroup below it, or set executor.cgroup_root to a cgroup without any"


class CgroupTotals(msgspec.Struct, frozen=True):
    """Counters of a job's cgroup: CPU time (s) and peak memory (bytes), None if the kernel does not report them, and
    the number of processes that the kernel killed for lack of memory."""

    cpu_seconds: float | None = None
    max_memory: int | None = None
    oom_kills: int = 0


class JobCgroupTree:
    """The cgroups ``<root>/cpumond-job-<job_id>``. Jobs on reclaimed CPU are in the idle class instead of ``root``.

    ``root`` (relative, "" = the hierarchies' own root) and the idle class are created if missing and never removed. On
    v2 these two must have no processes. A tree of plain files is supported except that forked processes are not seen
    there. A job's place is looked up each time, so another object with the same ``root`` also finds the job."""

    def __init__(self, hierarchies: Hierarchies, root: str, mountinfo_path: str = "/proc/self/mountinfo") -> None:
        self.hierarchies = hierarchies
        self._root = relative_path(hierarchies, root)
        self._outer_idle = name_idle_parent(self._root)
        self._inner_idle = os.path.join(self._root, IDLE_NAME)
        self._memory_root = _find_root(hierarchies, mountinfo_path, "memory")
        self._pids_root = _find_root(hierarchies, mountinfo_path, "pids")
        self._mounts: list[str] | None = None

    @property
    def idle_parent(self) -> str:
        return self._outer_idle if self._may_leave_root() else self._inner_idle

    def find_idle_class(self) -> IdleClass:
        """Return the class of jobs on reclaimed CPU on this host, as seen by this process; nothing is created."""
        if self._may_leave_root():
            return IdleParent(self.hierarchies, self._outer_idle).find_class()
        return IdleClass(
            note=f"this user cannot create a cgroup at the root of {self.hierarchies.name(self.hierarchies.cpu_root)}: "
            f"jobs on reclaimed CPU yield only to other jobs in {self._root}; run the agent as root"
        )

    def _may_leave_root(self) -> bool:
        """Return whether the idle class can be a child of the hierarchies' root."""
        unified = self.hierarchies.unified_root
        return all(
            _may_make(mount, self._outer_idle) and (mount != unified or _may_enter(mount, self._outer_idle))
            for mount in self._list_mounts()
        )

    def path(self, job_id: str) -> str:
        """Return the path of a job's cgroup, relative to the cpu hierarchy."""
        return os.path.join(self._find_parent(job_id), PREFIX + job_id)

    def _find_parent(self, job_id: str) -> str:
        """Return the path of the parent of a job's cgroup; ``root`` if the job has no cgroup."""
        for mount in self._list_mounts():
            for parent in self._list_parents():
                if os.path.isdir(os.path.join(mount, parent, PREFIX + job_id)):
                    return parent
        return self._root

    def _list_parents(self) -> list[str]:
        return list(dict.fromkeys((self._root, self._outer_idle, self._inner_idle)))

    def _list_mounts(self) -> list[str]:
        """Return the mount points, that of cpu first. They are looked up once, as neither rights nor mounts change."""
        if self._mounts is None:
            places = self.hierarchies
            mounts = [places.cpu_root, places.cpuacct_root]
            if places.cpu_version == 1:
                others = (self._memory_root, self._pids_root)
                mounts += [each for each in others if each and _may_make(each, self._root)]
                unified = places.unified_root
                if unified and _may_make(unified, self._root) and _may_enter(unified, self._root):
                    mounts.append(unified)
            self._mounts = list(dict.fromkeys(mounts))
        return self._mounts

    def _list_directories(self, job_id: str) -> list[str]:
        path = self.path(job_id)
        return [os.path.join(mount, path) for mount in self._list_mounts()]

    def create(
        self, job_id: str, cpu_limit: float, memory_limit: int, max_tasks: int = 0, has_ceiling: bool = True,
        reclaimed: bool = False,
    ) -> list[str]:  # fmt: skip
        """Create the cgroup of a job with its limits, and return the ``cgroup.procs`` files for its first process.

        The process must write its id into each of these files. The weight is in proportion to ``cpu_limit`` cores; with
        ``has_ceiling``, ``cpu_limit`` is also the quota. ``memory_limit`` is in bytes, ``max_tasks`` counts processes
        and threads. 0 means no limit; a limit without its controller has no effect. ``reclaimed``: the cgroup is in the
        idle class, which is set up before its first job. Weight and quota are kept within the kernel's bounds, and the
        quota within quotas above. Raises CreateError or AccessError; then nothing of the cgroup remains."""
        name = PREFIX + job_id
        if not job_id or "/" in job_id or "\0" in job_id or len(os.fsencode(name)) > MAX_NAME_BYTES:
            raise CreateError(
                f"cannot create a cgroup for the job {job_id!r}: its id must be 1 to {MAX_NAME_BYTES - len(PREFIX)} "
                "bytes without '/'; submit it under another id"
            )
        parent = self.idle_parent if reclaimed else self._root
        path = os.path.join(parent, name)
        made: list[str] = []
        directory = ""
        try:
            for mount in self._list_mounts():
                directory = os.path.join(mount, parent)
                self._make_parent(mount, parent)
                if reclaimed and mount == self.hierarchies.cpu_root:
                    IdleParent(self.hierarchies, parent).set(ADVICE)
                for each in self._list_parents():
                    directory = os.path.join(mount, each, name)
                    # Remove an empty cgroup of an earlier job, because its counters are old.
                    if not _remove_empty(directory) and each != parent:
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                directory = os.path.join(mount, path)
                os.mkdir(directory, 0o755)
                made.append(directory)
            self._write_limits(path, cpu_limit, memory_limit, has_ceiling)
            if max_tasks > 0:
                is_v2 = self.hierarchies.cpu_version == 2
                pids_root = self.hierarchies.cpu_root if is_v2 else self._pids_root
                if pids_root in self._list_mounts():
                    _write(os.path.join(pids_root, path), "pids.max", f"{max_tasks}\n", optional=is_v2)
        except OSError as error:
            _remove_all(made)
            raise from_os_error(error, f"create the cgroup {directory}", ADVICE) from error
        except CpumondError as error:
            _remove_all(made)
            raise error if isinstance(error, (AccessError, CreateError)) else CreateError(str(error)) from error
        return [self.hierarchies.name(os.path.join(place, "cgroup.procs")) for place in made]

    def _make_parent(self, mount: str, parent: str) -> None:
        """Create the parent cgroup of jobs; on v2 delegate the controllers to them. Raises OSError, CreateError."""
        for place in itertools.accumulate([mount, *parent.split("/")] if parent else [mount], os.path.join):
            if place != mount:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(place, 0o755)
            if self.hierarchies.cpu_version == 2:
                _hand_down(place)

    def _write_limits(self, path: str, cpu_limit: float, memory_limit: int, has_ceiling: bool) -> None:
        directory = os.path.join(self.hierarchies.cpu_root, path)
        version = self.hierarchies.cpu_version
        weight_file = "cpu.shares" if version == 1 else "cpu.weight"
        _write(directory, weight_file, f"{compute_start_weight(cpu_limit, version)}\n")
        if has_ceiling:
            self._write_quota(path, cpu_limit)
        if memory_limit <= 0:
            return
        if version == 1:
            if self._memory_root in self._list_mounts():
                memory = os.path.join(self._memory_root, path)
                _write(memory, "memory.limit_in_bytes", f"{memory_limit}\n")
                _write(memory, "memory.memsw.limit_in_bytes", f"{memory_limit}\n", optional=True)
        else:
            _write(directory, "memory.max", f"{memory_limit}\n", optional=True)
            _write(directory, "memory.swap.max", "0\n", optional=True)

    def _write_quota(self, path: str, cores: float) -> None:
        directory = os.path.join(self.hierarchies.cpu_root, path)
        cap = AncestorCap(math.inf)
        cgroup = open_cgroup(self.hierarchies, path)
        if cgroup is not None:
            cap = cgroup.read_ancestor_cap() if self.hierarchies.cpu_version == 1 else cap
            cgroup.close()
        settings = compute_quota_target(cores, CpuSettings(None, DEFAULT_PERIOD_US), cap).settings
        if self.hierarchies.cpu_version == 2:
            _write(directory, "cpu.max", f"{settings.quota_us} {settings.period_us}\n")
        else:
            _write(directory, "cpu.cfs_period_us", f"{settings.period_us}\n")
            _write(directory, "cpu.cfs_quota_us", f"{settings.quota_us}\n")

    def join_files(self, job_id: str) -> list[str]:
        """Return the ``cgroup.procs`` files of a job's cgroup; none if the cgroup is gone."""
        places = filter(os.path.isdir, self._list_directories(job_id))
        return [self.hierarchies.name(os.path.join(place, "cgroup.procs")) for place in places]

    def list_processes(self, job_id: str) -> list[int]:
        """Return the processes in a job's cgroup and below, in any of the hierarchies; empty if the cgroup is gone."""
        return sorted(list_processes(self._list_directories(job_id)))

    def signal(self, job_id: str, number: int, pid: int | None = None) -> None:
        """Send a signal once to every process in a job's cgroup that the agent may signal, or only to ``pid``."""
        directories = self._list_directories(job_id)
        send_signal(directories, number, list_processes(directories) if pid is None else [pid])

    def kill(self, job_id: str) -> None:
        """Send SIGKILL to all processes in a job's cgroup and below, without waiting for their end."""
        kill_processes(self._list_directories(job_id))

    def read_totals(self, job_id: str) -> CgroupTotals:
        """Return the counters of a job's cgroup so far; all None if the cgroup is gone."""
        path = self.path(job_id)
        places = self.hierarchies
        cpuacct = os.path.join(places.cpuacct_root, path)
        if places.cpu_version == 1 and places.cpuacct_root != places.unified_root:
            usage_ns = _read_number(cpuacct, "cpuacct.usage")
            cpu_seconds = None if usage_ns is None else usage_ns * 1e-9
        else:
            usage_us = _read_key(cpuacct, "cpu.stat", "usage_usec")
            cpu_seconds = None if usage_us is None else usage_us * 1e-6
        return CgroupTotals(cpu_seconds, *self.read_memory_peak(path))

    def read_memory_peak(self, path: str) -> tuple[int | None, int]:
        """Return the peak memory in bytes of the cgroup at ``path`` (relative), and the number of its processes that
        the kernel killed for lack of memory; (None, 0) if unknown."""
        if self.hierarchies.cpu_version == 2:
            directory = os.path.join(self.hierarchies.cpu_root, path)
            return _read_number(directory, "memory.peak"), _read_key(directory, "memory.events", "oom_kill") or 0
        if not self._memory_root:
            return None, 0
        memory = os.path.join(self._memory_root, path)
        # On v1 each cgroup only counts its own processes.
        below = os.walk(memory)
        oom_kills = sum(_read_key(place, "memory.oom_control", "oom_kill") or 0 for place, _, _ in below)
        return _read_number(memory, "memory.max_usage_in_bytes"), oom_kills

    def read_memory(self, path: str) -> int | None:
        """Return the bytes that the cgroup at ``path`` (relative) uses now; None if the kernel does not report it.

        File cache that the kernel would free at once is not counted."""
        if self.hierarchies.cpu_version == 2:
            directory, name, cache = os.path.join(self.hierarchies.cpu_root, path), "memory.current", "inactive_file"
        else:
            directory = os.path.join(self._memory_root, path) if self._memory_root else ""
            name, cache = "memory.usage_in_bytes", "total_inactive_file"
        used = _read_number(directory, name) if directory else None
        return None if used is None else max(used - (_read_key(directory, "memory.stat", cache) or 0), 0)

    def read_memory_limit(self, path: str) -> int | None:
        """Return the memory limit of the cgroup at ``path`` (relative) in bytes; None if there is none or unknown."""
        if self.hierarchies.cpu_version == 2:
            return _read_number(os.path.join(self.hierarchies.cpu_root, path), "memory.max")
        root = self._memory_root
        limit = _read_number(os.path.join(root, path), "memory.limit_in_bytes") if root else None
        return None if limit is None or limit >= V1_NO_MEMORY_LIMIT else limit

    def hold_memory(self, path: str, high_bytes: int) -> None:
        """Make the kernel slow down the cgroup at ``path`` (relative) above ``high_bytes`` of memory (memory.high, v2).

        Raises OSError."""
        directory = os.path.join(self.hierarchies.cpu_root, path)
        if self.hierarchies.cpu_version == 1:
            return
        high = _read_number(directory, "memory.high")
        if high is None or abs(high - high_bytes) > high_bytes * MEMORY_STEP:
            _write(directory, "memory.high", f"{high_bytes}\n", optional=True)

    def remove(self, job_id: str) -> bool:
        """Remove a job's cgroup everywhere, with all cgroups below; False while it contains a process. Never raises."""
        return _remove_all(self._list_directories(job_id))

    def list_job_ids(self) -> list[str]:
        found = set()
        for place in (os.path.join(mount, parent) for mount in self._list_mounts() for parent in self._list_parents()):
            with contextlib.suppress(OSError), os.scandir(place) as entries:
                for entry in entries:
                    if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                        found.add(entry.name.removeprefix(PREFIX))
        return sorted(found)


def _find_root(hierarchies: Hierarchies, mountinfo_path: str, controller: str) -> str:
    """Return the mount point of a v1 controller; "" if there is none."""
    if hierarchies.cpu_version == 2:
        return ""
    try:
        mounts = read_mounts(mountinfo_path)
    except OSError:
        # This file was not needed to find the hierarchies; only the limit of this controller is missing.
        return ""
    return next((mount.mount_point for mount in mounts if mount.version == 1 and controller in mount.controllers), "")


def _may_make(mount: str, root: str) -> bool:
    """Return whether cgroups can be created at ``root``, or at the nearest existing cgroup above it."""
    place = os.path.join(mount, root)
    while not os.path.isdir(place) and len(place) > len(mount):
        place = os.path.dirname(place)
    return os.access(place, os.W_OK)


def _may_enter(mount: str, root: str) -> bool:
    """Return whether the kernel lets this process move one of its processes to ``root`` in the cgroup2 hierarchy.

    This needs write access to ``cgroup.procs`` of the nearest common ancestor of ``root`` and the process's cgroup."""
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
    """Delegate cpu and, if available, memory and pids to the children of a v2 cgroup.

    Raises CreateError."""
    offered = (_read(directory, "cgroup.controllers") or "").split()
    given = (_read(directory, "cgroup.subtree_control") or "").split()
    if "cpu" not in given and "cpu" not in offered and os.path.exists(os.path.join(directory, "cgroup.controllers")):
        raise CreateError(
            f"the cgroup {directory} lacks the cpu controller: write +cpu into cgroup.subtree_control of the "
            "cgroup above it (for a systemd unit: Delegate=yes), or set executor.cgroup_root to one that has it"
        )
    missing = [name for name in ("cpu", "memory", "pids") if name in offered and name not in given]
    # If the cgroup has processes, the kernel accepts +cpu, but afterwards lets no process into its children.
    if "cpu" in missing and os.path.exists(os.path.join(directory, "cgroup.type")) and read_processes(directory):
        raise CreateError(f"cannot delegate the cpu controller in {directory}: {BUSY}")
    for controller in missing:
        try:
            _write(directory, "cgroup.subtree_control", f"+{controller}")
        except OSError as error:
            if controller != "cpu":
                continue
            advice = BUSY if error.errno == errno.EBUSY else ADVICE
            raise from_os_error(error, f"delegate the cpu controller in {directory}", advice) from error


def _write(directory: str, name: str, text: str, optional: bool = False) -> None:
    """Write a file. In a tree of plain files, create it if it is missing; cgroup file systems refuse that.

    ``optional``: write the file only if it exists. Raises OSError."""
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
    """Return the text of a file; None if it is unreadable, which is no error, as no job's end depends on the text."""
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


def _remove_empty(directory: str) -> bool:
    """Call rmdir; return whether the directory is gone."""
    try:
        os.rmdir(directory)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


def _remove_all(directories: list[str]) -> bool:
    """Call rmdir for a cgroup and all below it, the deepest first; return whether nothing remains."""
    gone = True
    for directory in directories:
        for place, _, _ in os.walk(directory, topdown=False):
            try:
                os.rmdir(place)
            except FileNotFoundError:
                continue
            except OSError as error:
                gone = error.errno == errno.ENOTEMPTY and _remove_plain(place) and gone
    return gone


def _remove_plain(directory: str) -> bool:
    """Remove a directory of plain files with its content; a real cgroup's files do not prevent its removal."""
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
