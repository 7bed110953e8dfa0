"""Workloads of this host, watched by their cgroups; nothing is written."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final

from cpumond.cgroup import Cgroup, open_cgroup
from cpumond.cgroup.files import count_threads, find_vital, open_counter, read_cpus
from cpumond.cgroup.mounts import Hierarchies, open_hierarchies, relative_path
from cpumond.cli.ending import ended_by
from cpumond.cli.estimate_findings import Findings, Row
from cpumond.cli.html import format_span
from cpumond.cli.progress import Progress
from cpumond.cli.tables import count, show_cores, show_name
from cpumond.config import load_config
from cpumond.discovery.workloads import Workload, pick_workloads
from cpumond.errors import GONE_ERRNOS, CgroupReadError, CpumondError, UnavailableError
from cpumond.monitor.estimate import WARM_UP_S, Timeline, Watch
from cpumond.monitor.model import CpuReading, LimitRule, MonitorSettings
from cpumond.process import raise_descriptor_limit

RESCAN_S: Final = 5.0
"""Workloads that begin, and orders that change, are noticed after this time."""
MAX_DEPTH: Final = 32
GLANCE_S: Final = 0.2
"""Between checks counters are read so often, for bursts that are shorter than a check; not of too many workloads."""
MAX_GLANCED: Final = 500
LATE_PERIODS: Final = 10.0
"""An interval so many times as long as it should be is a gap: the machine slept, or this program was stopped."""


class AccountedCgroup:
    """A cgroup that is only in the hierarchy of cpuacct (v1), as Slurm's are where cpu is mounted apart: its CPU time
    is counted, but it has no limit and can have none."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._inode = os.fstat(fd).st_ino

    @classmethod
    def open(cls, hierarchies: Hierarchies, path: str) -> AccountedCgroup | None:
        """The cgroup at ``path``; None when there is none. Raises CgroupReadError."""
        fd = open_counter(os.path.join(hierarchies.cpuacct_root, path, "cpuacct.usage"))
        return None if fd is None else cls(path, fd)

    def read(self, at_s: float) -> CpuReading | None:
        """CPU time alone; None when the cgroup is gone. Raises CgroupReadError."""
        try:
            return CpuReading(int(os.pread(self._fd, 64, 0)) * 1e-9, at_s, self._inode)
        except OSError as error:
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(self.path, error) from error
        except ValueError as error:
            raise CgroupReadError(self.path, error) from error

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


Counted = Cgroup | AccountedCgroup


class _Followed:
    """One workload with its open cgroup, None as soon as it is gone."""

    def __init__(self, workload: Workload, cgroup: Counted, watch: Watch, is_limited: bool) -> None:
        self.workload = workload
        self.cgroup: Counted | None = cgroup
        self.watch = watch
        self.is_limited = is_limited

    def close(self) -> None:
        if self.cgroup is not None:
            self.cgroup.close()
            self.cgroup = None


class HostWatch:
    """All workloads below ``root`` ("" = everything), found, sampled, and looked up again."""

    def __init__(
        self,
        root: str,
        settings: Mapping[LimitRule, MonitorSettings],
        duration_s: float,
        mountinfo_path: str = "/proc/self/mountinfo",
    ) -> None:
        self.hierarchies = open_hierarchies(mountinfo_path)
        self.root = relative_path(self.hierarchies, root)
        # Slurm's jobs are in cpuacct alone where it is mounted apart.
        self.roots = list(dict.fromkeys((self.hierarchies.cpu_root, self.hierarchies.cpuacct_root)))
        if not any(os.path.isdir(os.path.join(each, self.root)) for each in self.roots):
            raise UnavailableError(
                f"there is no cgroup {root!r} below {self.hierarchies.cpu_root}; see `cpumond doctor`"
            )
        self.settings = settings
        self.period_s = next(iter(settings.values())).check_period_s
        self.duration_s = duration_s
        self.host_cores = float(read_cpus(self.hierarchies, ""))
        self.timeline = Timeline(time.monotonic(), duration_s)
        self.begin_s = self.end_s = math.nan
        self.problems: dict[str, str] = {}
        self._followed: dict[str, _Followed] = {}
        self._over: list[_Followed] = []
        self._refused: set[str] = set()
        raise_descriptor_limit()

    def rescan(self) -> None:
        """Take in what began, and read orders anew. Raises UnavailableError when there is nothing at all."""
        paths = [path for root in self.roots for path in list_cgroups(root, self.root)]
        found = pick_workloads(paths, self._is_populated, find_vital())
        places = {each.path for each in found}
        for path, followed in list(self._followed.items()):
            if path not in places:
                # It ended, or what was a leaf holds workloads of its own now.
                self._end(path)
            elif followed.cgroup is not None:
                followed.is_limited = self._read_order(followed.cgroup, followed.watch)
        if not found and math.isnan(self.begin_s):
            where = os.path.join(self.hierarchies.cpu_root, self.root)
            raise UnavailableError(
                f"no cgroup in {where} looks like a workload: there is no container, job, unit, or other cgroup with "
                "processes; start one, or say with --root where to look"
            )
        for workload in found:
            if workload.path not in self._followed and workload.path not in self._refused:
                self._begin(workload)

    def _is_populated(self, path: str) -> bool:
        return any(count_threads(os.path.join(root, path)) > 0 for root in self.roots)

    def _begin(self, workload: Workload) -> None:
        if workload.kind == "kubernetes" and is_pause(os.path.join(self.hierarchies.cpu_root, workload.path)):
            return
        try:
            cgroup: Counted | None = open_cgroup(self.hierarchies, workload.path)
            if cgroup is None and len(self.roots) > 1:
                cgroup = AccountedCgroup.open(self.hierarchies, workload.path)
        except CgroupReadError as error:
            self._refuse(workload.path, str(error))
            return
        if cgroup is None:
            # It ended meanwhile, or its CPU time is counted nowhere.
            return
        watch = Watch(self.host_cores, self.settings, LATE_PERIODS * self.period_s + RESCAN_S, self.timeline)
        followed = _Followed(workload, cgroup, watch, False)
        followed.is_limited = self._read_order(cgroup, watch)
        self._followed[workload.path] = followed

    def _refuse(self, path: str, why: str) -> None:
        self._refused.add(path)
        self.problems[path] = why

    def _end(self, path: str) -> None:
        followed = self._followed.pop(path)
        followed.close()
        if followed.watch.watched_s > 0.0:
            self._over.append(followed)

    def _read_order(self, cgroup: Counted, watch: Watch) -> bool:
        """Whether a quota, or fewer CPUs than the host has, bound the workload; ``watch`` learns what it ordered."""
        try:
            quota = math.inf if isinstance(cgroup, AccountedCgroup) else read_quota(self.hierarchies, cgroup)
            cpus = float(read_cpus(self.hierarchies, cgroup.path))
            watch.move_hard(quota if quota < math.inf else cpus)
        except CpumondError as error:
            self.problems.setdefault(cgroup.path, str(error))
            return False
        return quota < math.inf or cpus < self.host_cores

    @property
    def tick_s(self) -> float:
        """Seconds between two readings: of a check, or of a part of it."""
        parts = round(self.period_s / GLANCE_S)
        return self.period_s / parts if parts > 1 and len(self._followed) <= MAX_GLANCED else self.period_s

    def sample(self, is_check: bool = True) -> None:
        """One reading of each workload, for a check of each rule or between two."""
        for path, followed in list(self._followed.items()):
            assert followed.cgroup is not None
            now_s = time.monotonic()
            try:
                reading = followed.cgroup.read(now_s)
            except CgroupReadError as error:
                self._refuse(path, str(error))
                reading = None
            if reading is None:
                self._end(path)
            elif is_check:
                followed.watch.add(reading)
            else:
                followed.watch.glance(reading)
        now_s = time.monotonic()
        self.begin_s = now_s if math.isnan(self.begin_s) else self.begin_s
        self.end_s = now_s

    def describe_progress(self) -> str:
        """One line: how far it is, how many workloads, and what they use."""
        used = sum(each.watch.usage_cores for each in self._followed.values())
        return (
            f"{format_span(self.end_s - self.begin_s)} of {format_span(self.duration_s)}: "
            f"{count(len(self._followed), 'workload')}, {show_cores(used)} of {show_cores(self.host_cores)} cores "
            "used; Ctrl-C for what is known so far"
        )

    def conclude(self) -> Findings:
        """What is known. Raises UnavailableError before the second sample."""
        rows = [
            Row(each.workload, each.watch.conclude(), each.is_limited, is_gone=each.cgroup is None)
            for each in (*self._over, *self._followed.values())
            if each.watch.watched_s > 0.0
        ]
        if not rows:
            raise UnavailableError("stopped before the second sample, so nothing is known yet; let it run longer")
        place = f"this host{f' below {show_name(self.root)}' if self.root else ''}"
        length_s = self.end_s - self.begin_s
        accounted = sum(isinstance(each.cgroup, AccountedCgroup) for each in self._followed.values())
        notes = []
        if accounted:
            notes.append(
                f"{count(accounted, 'workload is', 'workloads are')} in the hierarchy of cpuacct alone: use is "
                "counted, but there is no limit to lower; mount cpu and cpuacct together, or use cgroup v2"
            )
        named_notes = [f"left out {show_name(path)}: {why}" for path, why in sorted(self.problems.items())]
        vital = [path for path in find_vital() if f"{path}/".startswith(f"{self.root}/" if self.root else "")]
        named_notes += [f"left out {show_name(path)}: {find_vital()[path]}" for path in sorted(vital)]
        return Findings(
            "cgroups", place, length_s, self.duration_s, self.tick_s, self.host_cores, rows, self.timeline,
            [*self._list_notes(length_s), *notes], named_notes,
        )  # fmt: skip

    def _list_notes(self, length_s: float) -> list[str]:
        notes = []
        if length_s < self.duration_s * 0.95:
            notes.append(f"stopped after {format_span(length_s)} of {format_span(self.duration_s)}")
        if length_s < 2.0 * WARM_UP_S:
            span = format_span(2.0 * WARM_UP_S)
            notes.append(f"less than {span}: what was seen is taken to go on the same until limits are down")
        if os.path.exists(load_config(None).control_socket):
            notes.append("an agent of cpumond runs on this host: a limit that it lowered looks like what was ordered")
        if any(each.cgroup is None for each in self._over):
            notes.append("some workloads ended; their last moments, up to a sample's length, are not counted")
        return notes

    def close(self) -> None:
        """Give all descriptors back."""
        for followed in self._followed.values():
            followed.close()


def watch_host(
    root: str, duration_s: float, settings: Mapping[LimitRule, MonitorSettings]
) -> tuple[Findings, Callable[[str], list[str]]]:
    """Watch for ``duration_s``, less when SIGINT or SIGTERM comes: the findings, and the leaves below a cgroup.

    Raises UnavailableError when there is no cgroup like a workload, or nothing is known when it ends.
    """
    watch = HostWatch(root, settings, duration_s)
    progress = Progress()
    with contextlib.ExitStack() as stack:
        stack.callback(watch.close)
        stack.callback(progress.end)
        ended = stack.enter_context(ended_by((signal.SIGINT, signal.SIGTERM)))
        watch.rescan()
        begin_s = next_s = rescan_s = time.monotonic()
        check_s, is_last = -math.inf, False
        while not is_last:
            now_s = time.monotonic()
            # A tick may be a little early or late.
            early_s = watch.tick_s / 2.0
            is_last = ended.is_set() or now_s >= begin_s + duration_s - early_s
            is_check = is_last or now_s >= check_s + watch.period_s - early_s
            if is_check and now_s >= rescan_s + RESCAN_S - early_s:
                watch.rescan()
                rescan_s = now_s
            watch.sample(is_check)
            if is_check:
                check_s = now_s
                progress.show(watch.describe_progress())
            next_s = max(next_s + watch.tick_s, now_s)
            if not is_last:
                ended.wait(next_s - time.monotonic())
        return watch.conclude(), lambda path: list_leaves(watch.hierarchies.cpu_root, path)


def list_cgroups(root: str, top: str, depth: int = MAX_DEPTH) -> list[str]:
    """``top`` and all cgroups so far below it, relative to ``root``; what may not be listed is left out."""
    found = [top] if top else []
    waiting = [(top, depth)]
    while waiting:
        place, below = waiting.pop()
        try:
            with os.scandir(os.path.join(root, place)) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            # Gone meanwhile, or not for this user.
            continue
        children = [f"{place}/{name}" if place else name for name in names]
        found += children
        waiting += [(child, below - 1) for child in children if below]
    return found


def list_leaves(root: str, path: str) -> list[str]:
    """The leaf cgroups below ``path``, itself where it has no children; none where there is no such cgroup."""
    if not os.path.isdir(os.path.join(root, path)):
        return []
    places = list_cgroups(root, path)
    inner = {place.rpartition("/")[0] for place in places[1:]}
    return sorted(place for place in places if place not in inner)


def read_quota(hierarchies: Hierarchies, cgroup: Cgroup) -> float:
    """The least quota that bounds a workload, in cores, infinity where there is none: its own, one above it, or that of
    an only child, where engines put a container's limit below its cgroup. Raises CgroupReadError."""
    own, least = _read_own(cgroup), cgroup.read_ancestor_cap().cores
    path = cgroup.path
    while own == math.inf:
        children = list_cgroups(hierarchies.cpu_root, path, 0)[1:]
        if len(children) != 1:
            break
        path = children[0]
        child = open_cgroup(hierarchies, path)
        if child is None:
            break
        try:
            own = _read_own(child)
        finally:
            child.close()
    return min(own, least)


def _read_own(cgroup: Cgroup) -> float:
    try:
        settings = cgroup.read_settings()
    except CgroupReadError:
        # No cpu.max here: the controller is not turned on for it, so it has no quota of its own.
        return math.inf
    return math.inf if settings is None else settings.cores


def is_pause(directory: str) -> bool:
    """Whether a pod's cgroup only holds the process that keeps its namespaces: it orders and uses nothing."""
    try:
        with open(os.path.join(directory, "cgroup.procs"), encoding="ascii") as file:
            processes = file.read().split()
        if len(processes) != 1:
            return False
        with open(f"/proc/{int(processes[0])}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip() == "pause"
    except (OSError, ValueError):
        return False
