"""Workloads of this host, observed through their cgroups; nothing is written."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from cpumond.agent.config import load_config
from cpumond.agent.discovery.glob import list_directories
from cpumond.agent.discovery.workloads import Workload, pick_workloads
from cpumond.cli.agent.estimate_findings import Findings, WorkloadRow
from cpumond.cli.agent.watch import read_own_quota
from cpumond.cli.ending import ended_by, list_ending_signals
from cpumond.cli.progress import ProgressLine
from cpumond.core.errors import GONE_ERRNOS, CgroupReadError, CpumondError, UnavailableError
from cpumond.core.job_cgroups import list_above
from cpumond.core.measures import count_cores, format_cores, format_span
from cpumond.core.words import count, escape
from cpumond.host.cgroup import Cgroup, open_cgroup
from cpumond.host.cgroup.files import count_threads, find_vital, open_counter, read_cpus
from cpumond.host.cgroup.mounts import Hierarchies, open_hierarchies, relative_path
from cpumond.host.cgroup.settings import AncestorCap
from cpumond.host.service import raise_descriptor_limit
from cpumond.monitor.estimate import MOST_CHECKS, WARM_UP_S, Timeline, UseWatch, merge
from cpumond.monitor.model import CpuReading, LimitRule, MonitorSettings

RESCAN_S: Final = 5.0
"""Seconds between two searches for new workloads and changed requests."""
MAX_DEPTH: Final = 32
GLANCE_S: Final = 0.2
"""Seconds between two readings of the counters between checks. These readings show shorter bursts; with more than
MAX_GLANCED workloads they are not made."""
MAX_GLANCED: Final = 500
MAX_ENDED: Final = 2000
"""Maximum number of rows for ended workloads; all others share two rows: one of those with a limit, one without."""
ENDED_CHECKS: Final = 200
"""The ``most_checks`` of ``UseWatch.conclude`` for an ended workload, whose row is computed between two samples."""
LATE_PERIODS: Final = 10.0
"""An interval longer than this many check periods plus RESCAN_S is a gap: the machine or this program was stopped."""


class AccountedCgroup:
    """A cgroup that exists only in the cpuacct hierarchy (v1), as Slurm's do where cpu is mounted separately: its CPU
    time is counted, but it cannot have a limit."""

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
        """Read the CPU time alone; None when the cgroup is gone. Raises CgroupReadError."""
        try:
            return CpuReading(int(os.pread(self._fd, 64, 0)) * 1e-9, at_s, self._inode)
        except OSError as error:
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(self.path, error) from error
        except ValueError as error:
            raise CgroupReadError(self.path, error) from error

    def close(self) -> None:
        os.close(self._fd)


Counted = Cgroup | AccountedCgroup


class Order(NamedTuple):
    """The ``cores`` that a workload may use, by its own limit (``is_limited``) or by a shared one."""

    cores: float
    is_limited: bool = False
    is_shared: bool = False


class _Followed:
    def __init__(self, workload: Workload, cgroup: Counted, watch: UseWatch, order: Order) -> None:
        self.workload = workload
        self.cgroup = cgroup
        self.watch = watch
        self.order = order

    def conclude(self, most_checks: int = MOST_CHECKS, is_gone: bool = False) -> WorkloadRow:
        found = self.watch.conclude(most_checks)
        return WorkloadRow(self.workload, found, self.order.is_limited, is_gone=is_gone, is_shared=self.order.is_shared)


class HostWatch:
    """Samples the workloads below ``root`` ("": everywhere), and looks for new ones."""

    def __init__(
        self,
        root: str,
        settings: Mapping[LimitRule, MonitorSettings],
        duration_s: float,
        mountinfo_path: str = "/proc/self/mountinfo",
    ) -> None:
        self.hierarchies = open_hierarchies(mountinfo_path)
        self.root = relative_path(self.hierarchies, root)
        # Where the cpuacct hierarchy is mounted separately, Slurm's jobs are only there.
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
        self._over: dict[str, WorkloadRow] = {}
        self._refused: set[str] = set()
        self._holders: Counter[str] = Counter()
        raise_descriptor_limit()

    def rescan(self) -> None:
        """Follow new workloads and read requests again. Raises UnavailableError if the first scan finds no workload."""
        workloads = find_workloads(self.roots, self.root)
        found = [each for each in workloads if each.path in self._followed or not self._is_pause(each)]
        places = {each.path for each in found}
        self._holders = Counter(above for path in places for above in list_above(path))
        for path, followed in list(self._followed.items()):
            if path in places:
                self._read_order(followed)
            else:
                self._end(path)  # it ended, or its cgroup now contains workloads of its own
        if not found and math.isnan(self.begin_s):
            where = os.path.join(self.hierarchies.cpu_root, self.root)
            raise UnavailableError(
                f"no cgroup in {where} looks like a workload: there is no container, job, unit, or other cgroup with "
                "processes; start one, or choose another place with --root"
            )
        for workload in found:
            if workload.path not in self._followed:
                self._begin(workload)

    def _is_pause(self, workload: Workload) -> bool:
        return workload.kind == "kubernetes" and is_pause(os.path.join(self.hierarchies.cpu_root, workload.path))

    def _begin(self, workload: Workload) -> None:
        try:
            cgroup: Counted | None = open_cgroup(self.hierarchies, workload.path)
            if cgroup is None and len(self.roots) > 1:
                cgroup = AccountedCgroup.open(self.hierarchies, workload.path)
        except CgroupReadError as error:
            self._refuse(workload.path, str(error))
            return
        if cgroup is None:
            return  # the workload has ended, or no controller counts its CPU time
        watch = UseWatch(self.host_cores, self.settings, LATE_PERIODS * self.period_s + RESCAN_S, self.timeline)
        followed = self._followed[workload.path] = _Followed(workload, cgroup, watch, Order(self.host_cores))
        self._read_order(followed)

    def _refuse(self, path: str, why: str) -> None:
        """Leave a workload out until the next rescan; if file descriptors ran out, some may be free by then."""
        self._refused.add(path)
        self.problems[path] = why

    def _end(self, path: str) -> None:
        """Stop following a workload and keep its row; after MAX_ENDED rows, merge it into a shared one."""
        followed = self._followed.pop(path)
        followed.cgroup.close()
        if followed.watch.watched_s > 0.0:
            row = followed.conclude(ENDED_CHECKS, is_gone=True)
            if path not in self._over and len(self._over) >= MAX_ENDED:
                path = f"others that ended, {'with' if row.is_limited else 'without'} a limit"
                row = dataclasses.replace(row, workload=Workload("", "cgroup", path))
            self._over[path] = merge_rows(self._over.get(path), row)

    def _read_order(self, followed: _Followed) -> None:
        """Read the request of a workload again; keep the old value if the workload ends during the read."""
        path = followed.cgroup.path
        try:
            order = self._find_order(followed.cgroup)
        except CpumondError as error:
            self.problems.setdefault(path, str(error))
            return
        # A cgroup that is gone reads as one without limits.
        if any(os.path.isdir(os.path.join(root, path)) for root in self.roots):
            followed.order = order
            followed.watch.move_hard(order.cores)

    def _find_order(self, cgroup: Counted) -> Order:
        """Determine the request of a workload. Raises CpumondError.

        The request is the workload's quota, or the quota of a cgroup above it that holds no other workload, or else a
        cpuset smaller than those above it. CPU that several workloads share cannot be reclaimed from each of them."""
        path = cgroup.path
        own, cap = math.inf, AncestorCap(math.inf)
        if not isinstance(cgroup, AccountedCgroup):
            own, cap = read_quota(self.hierarchies, cgroup), cgroup.read_ancestor_cap()
        if cap.cores < own and self._is_alone_in(cap.path):
            own = cap.cores
        if own <= cap.cores and own < math.inf:
            return Order(own, is_limited=True)
        cpus = float(read_cpus(self.hierarchies, path))
        around = next((above for above in list_above(path) if not self._is_alone_in(above)), "")
        if cpus <= cap.cores and cpus < read_cpus(self.hierarchies, around):
            return Order(cpus, is_limited=True)
        cores = min(cap.cores, cpus)
        return Order(cores, is_shared=cores < self.host_cores)

    def _is_alone_in(self, place: str) -> bool:
        """Whether the cgroup ``place`` holds only one workload; False above ``root``, where no search is made."""
        return self._holders[place] == 1 and self._is_below_root(place)

    def _is_below_root(self, place: str) -> bool:
        return f"{place}/".startswith(f"{self.root}/" if self.root else "")

    @property
    def tick_s(self) -> float:
        """Seconds between two readings: a check period, or a fraction of it."""
        parts = round(self.period_s / GLANCE_S)
        return self.period_s / parts if parts > 1 and len(self._followed) <= MAX_GLANCED else self.period_s

    def sample(self, is_check: bool = True) -> None:
        """Read each workload once, for a check of each rule or, unless ``is_check``, between two checks."""
        for path, followed in list(self._followed.items()):
            now_s = time.monotonic()
            try:
                reading = followed.cgroup.read(now_s)
            except CgroupReadError as error:
                self._refuse(path, str(error))
                reading = None
            if reading is None:
                self._end(path)
                continue
            if path in self._refused:
                self._refused.discard(path)
                self.problems.pop(path, None)
            if is_check:
                followed.watch.add(reading)
            else:
                followed.watch.glance(reading)
        self.end_s = time.monotonic()
        self.begin_s = self.end_s if math.isnan(self.begin_s) else self.begin_s

    def __len__(self) -> int:
        return len(self._followed)

    def describe_progress(self) -> str:
        used = sum(each.watch.usage_cores for each in self._followed.values())
        return (
            f"{format_span(self.end_s - self.begin_s)} of {format_span(self.duration_s)}: "
            f"{count(len(self._followed), 'workload')}, {format_cores(used)} of {count_cores(self.host_cores)} "
            "used; Ctrl-C ends early with the findings so far"
        )

    def conclude(self) -> Findings:
        """Compute the findings so far. Raises UnavailableError before the second sample."""
        rows = dict(self._over)
        for path, each in self._followed.items():
            if each.watch.watched_s > 0.0:
                rows[path] = merge_rows(rows.get(path), each.conclude())
        if not rows:
            raise UnavailableError("stopped before the second sample, so there are no findings yet; let it run longer")
        place = f"this host{f' below {escape(self.root)}' if self.root else ''}"
        length_s = self.end_s - self.begin_s
        named_notes = [f"left out {escape(path)}: {why}" for path, why in sorted(self.problems.items())]
        vital = find_vital(self.hierarchies.cpu_root)
        left_out = sorted(filter(self._is_below_root, vital))
        named_notes += [f"left out {escape(path)}: {vital[path]}" for path in left_out]
        return Findings(
            "cgroups", place, length_s, self.duration_s, self.tick_s, self.host_cores, list(rows.values()),
            self.timeline, self._list_notes(length_s), named_notes,
        )  # fmt: skip

    def _list_notes(self, length_s: float) -> list[str]:
        notes = []
        if length_s < self.duration_s * 0.95:
            notes.append(f"stopped after {format_span(length_s)} of {format_span(self.duration_s)}")
        if length_s < 2.0 * WARM_UP_S:
            span = format_span(2.0 * WARM_UP_S)
            notes.append(f"less than {span}: usage is assumed to stay the same until limits have gone down")
        if os.path.exists(load_config(None).control_socket):
            notes.append("an agent of cpumond runs on this host: a limit that it lowered looks like the request")
        if self._over:
            notes.append("some workloads ended; their usage after the last sample is not counted")
        accounted = sum(isinstance(each.cgroup, AccountedCgroup) for each in self._followed.values())
        if accounted:
            notes.append(
                f"{count(accounted, 'workload is', 'workloads are')} only in the cpuacct hierarchy: usage is counted, "
                "but there is no limit to lower; mount cpu and cpuacct together, or use cgroup v2"
            )
        return notes

    def close(self) -> None:
        for followed in self._followed.values():
            followed.cgroup.close()


def watch_host(
    root: str, duration_s: float, settings: Mapping[LimitRule, MonitorSettings]
) -> tuple[Findings, Callable[[str], list[str]]]:
    """Watch for ``duration_s`` or until SIGINT, SIGTERM or SIGHUP; return findings and a function that lists leaves.

    Raises UnavailableError when no cgroup looks like a workload, or none has two samples at the end."""
    watch = HostWatch(root, settings, duration_s)
    progress = ProgressLine()
    with contextlib.ExitStack() as stack:
        stack.callback(watch.close)
        stack.callback(progress.end)
        signals = stack.enter_context(contextlib.ExitStack())
        ended = signals.enter_context(ended_by((signal.SIGINT, *list_ending_signals())))
        watch.rescan()
        begin_s = next_s = rescan_s = time.monotonic()
        check_s, is_last = -math.inf, False
        while not is_last:
            now_s = time.monotonic()
            # A tick may come slightly early or late.
            early_s = watch.tick_s / 2.0
            is_last = ended.is_set() or now_s >= begin_s + duration_s - early_s
            is_check = is_last or now_s >= check_s + watch.period_s - early_s
            if is_check and now_s >= rescan_s + RESCAN_S - early_s:
                watch.rescan()
                rescan_s = now_s
            watch.sample(is_check)
            if is_check:
                check_s = now_s
                progress.draw(watch.describe_progress())
            next_s = max(next_s + watch.tick_s, now_s)
            if not is_last:
                ended.wait(next_s - time.monotonic())
        # Computing may take long with many workloads; another signal ends it like any other command.
        signals.close()
        progress.draw(f"computing {count(len(watch), 'workload')}; another Ctrl-C aborts")
        return watch.conclude(), lambda path: list_leaves(watch.hierarchies.cpu_root, path)


def find_workloads(roots: Sequence[str], top: str) -> list[Workload]:
    """The workloads below ``top`` in the hierarchies mounted at ``roots``, sorted by path."""
    paths = [path for root in roots for path in list_cgroups(root, top)]
    return pick_workloads(
        paths,
        lambda path: any(count_threads(os.path.join(root, path)) > 0 for root in roots),
        [path for root in roots[:1] for path in find_vital(root)],
    )


def list_cgroups(root: str, top: str, depth: int = MAX_DEPTH) -> list[str]:
    """``top`` and the cgroups up to ``depth`` + 1 levels below it, relative to ``root``, without unreadable ones."""
    found = [top] if top else []
    waiting = [(top, depth)]
    while waiting:
        place, below = waiting.pop()
        names = list_directories(os.path.join(root, place))
        children = [f"{place}/{name}" if place else name for name in names]
        found += children
        waiting += [(child, below - 1) for child in children if below]
    return found


def list_leaves(root: str, path: str) -> list[str]:
    """The leaf cgroups below ``path``; ``path`` itself if it has no children, none if it does not exist."""
    if not os.path.isdir(os.path.join(root, path)):
        return []
    places = list_cgroups(root, path)
    inner = {place.rpartition("/")[0] for place in places[1:]}
    return sorted(place for place in places if place not in inner)


def merge_rows(earlier: WorkloadRow | None, later: WorkloadRow) -> WorkloadRow:
    """Merge two rows: of a cgroup that was recreated, or of workloads that ended."""
    if earlier is None:
        return later
    return dataclasses.replace(later, estimate=merge(earlier.estimate, later.estimate))


def read_quota(hierarchies: Hierarchies, cgroup: Cgroup) -> float:
    """A workload's own quota in cores, infinity if there is none. Raises CgroupReadError.

    It is the quota of the workload's cgroup, or of the cgroup's only child, where container engines may set it."""
    own = read_own_quota(cgroup)
    path = cgroup.path
    while own == math.inf:
        children = list_cgroups(hierarchies.cpu_root, path, 0)[1:]
        if len(children) != 1:
            break
        path = children[0]
        child = open_cgroup(hierarchies, path)
        if child is None:
            break
        with contextlib.closing(child):
            own = read_own_quota(child)
    return own


def is_pause(directory: str) -> bool:
    """Whether a cgroup holds only the ``pause`` process that keeps a pod's namespaces; it requests and uses no CPU."""
    try:
        with open(os.path.join(directory, "cgroup.procs"), encoding="ascii") as file:
            processes = file.read().split()
        if len(processes) != 1:
            return False
        with open(f"/proc/{int(processes[0])}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip() == "pause"
    except (OSError, ValueError):
        return False
