"""Control groups of version 1: controllers ``cpu`` and ``cpuacct``, mounted separately or together."""

from __future__ import annotations

import contextlib
import math
import os
from typing import ClassVar, Self

from cpumond.core.errors import GONE_ERRNOS, CgroupReadError
from cpumond.core.measures import DEFAULT_PERIOD_US, MIN_QUOTA_US, count_cores, quota_to_cores
from cpumond.host.cgroup.files import (
    Cgroup,
    find_missing_quota,
    list_below,
    open_counter,
    open_directory,
    open_pressure,
    read_pressure_total_s,
    read_text,
)
from cpumond.host.cgroup.mounts import Hierarchies, held_place
from cpumond.host.cgroup.parse import STAT_BYTES, USAGE_BYTES, parse_flat_keyed
from cpumond.host.cgroup.settings import V1_SHARES, CpuSettings, WriteStep
from cpumond.monitor.model import CpuReading

FILES = {
    "quota": "cpu.cfs_quota_us", "period": "cpu.cfs_period_us", "burst": "cpu.cfs_burst_us", "weight": "cpu.shares",
}  # fmt: skip
"""Name of a step -> file."""


class V1Cgroup(Cgroup):
    """One cgroup in the v1 hierarchies."""

    WEIGHT_BOUNDS: ClassVar = V1_SHARES
    DESCRIPTORS: ClassVar = 3

    __slots__ = (
        "_nr_periods", "_nr_throttled", "_period_s", "_raw_periods", "_seen_at_s", "_seen_usage_us", "_throttled_s",
        "_unified", "_unified_root", "_usage_fd",
    )  # fmt: skip

    def __init__(self, hierarchies: Hierarchies, path: str, fd: int, usage_fd: int, stat_fd: int) -> None:
        super().__init__(hierarchies, path, fd, stat_fd)
        self._usage_fd = usage_fd
        self._unified_root = hierarchies.unified_root
        self._unified = hierarchies.cpuacct_root == hierarchies.unified_root
        self._seen_usage_us = -math.inf
        self._seen_at_s = -math.inf
        self._period_s = DEFAULT_PERIOD_US / 1e6
        self._nr_periods = self._raw_periods = self._nr_throttled = 0
        self._throttled_s = 0.0

    @classmethod
    def open(cls, hierarchies: Hierarchies, path: str) -> Self | None:
        """Open the cgroup at ``path``; None if it is not in both hierarchies. Raises CgroupReadError."""
        name = "cpuacct.usage" if hierarchies.cpuacct_root != hierarchies.unified_root else "cpu.stat"
        with contextlib.ExitStack() as undone:
            fd = open_directory(os.path.join(hierarchies.cpu_root, path))
            if fd is None:
                return None
            undone.callback(os.close, fd)
            usage_fd = open_counter(os.path.join(hierarchies.cpuacct_root, path, name))
            if usage_fd is None:
                return None
            undone.callback(os.close, usage_fd)
            stat_fd = open_counter(os.path.join(held_place(fd), "cpu.stat"))
            if stat_fd is None and find_missing_quota(held_place(fd)):
                stat_fd = open_counter(os.devnull)  # a kernel without quotas counts no throttling
            if stat_fd is None:
                return None
            cgroup = cls(hierarchies, path, fd, usage_fd, stat_fd)
            undone.pop_all()
            return cgroup

    @property
    def usage_fd(self) -> int:
        return self._usage_fd

    def parse_usage_us(self, raw: bytes) -> float:
        # "cpuacct.usage" is one number in ns; the unified cpu.stat begins with "usage_usec N".
        return super().parse_usage_us(raw) if self._unified else int(raw) * 1e-3

    def is_there(self) -> bool:
        return super().is_there() or bool(find_missing_quota(self.place))

    def read(self, at_s: float) -> CpuReading | None:
        """Read the counters with at most two preads, and one more with pressure.

        cpu.stat is not read if the cgroup cannot have been throttled, as it used less CPU since the last full look than
        the least quota that the kernel accepts."""
        try:
            usage_us = self.parse_usage_us(os.pread(self._usage_fd, USAGE_BYTES, 0))
            if usage_us - self._seen_usage_us >= MIN_QUOTA_US:
                self._read_stat(at_s)
                self._seen_usage_us = usage_us
        except OSError as error:
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(self.directory, error) from error
        except (ValueError, IndexError) as error:
            raise CgroupReadError(self.directory, f"counters are not numbers: {error}") from error
        self._seen_at_s = at_s
        return CpuReading(
            usage_us * 1e-6, at_s, self.inode, self._nr_periods, self._nr_throttled, self._throttled_s,
            None if self._pressure_fd is None else read_pressure_total_s(self._pressure_fd),
        )  # fmt: skip

    def _read_stat(self, at_s: float) -> None:
        """Read cpu.stat. The interval since the last look gets at most the periods that fit into its length; further
        ones belong to looks that were skipped."""
        stat = parse_flat_keyed(os.pread(self.stat_fd, STAT_BYTES, 0).decode("ascii"))
        periods = stat.get("nr_periods", 0)
        most = (at_s - self._seen_at_s) / self._period_s + 1.0
        self._nr_periods += int(max(min(periods - self._raw_periods, most), 0))
        self._raw_periods = periods
        self._nr_throttled = stat.get("nr_throttled", 0)
        self._throttled_s = stat.get("throttled_time", 0) * 1e-9

    def read_throttled(self) -> int | None:
        throttled = super().read_throttled()
        if throttled != self._nr_throttled:
            # The kernel counts a period only when it ends: so the counters may change although no CPU was used since
            # the last full look.
            self._seen_usage_us = -math.inf
        return throttled

    def read_settings(self) -> CpuSettings | None:
        try:
            try:
                quota_us, period_us = int(self.read_file(FILES["quota"])), int(self.read_file(FILES["period"]))
            except FileNotFoundError:
                if not find_missing_quota(self.place):
                    raise
                quota_us, period_us = -1, DEFAULT_PERIOD_US
            weight = int(self.read_file(FILES["weight"]))
            burst_us = self.read_number(FILES["burst"])  # None on kernels before 5.14
        except OSError as error:
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(self.directory, error) from error
        except ValueError as error:
            raise CgroupReadError(self.directory, f"settings are not numbers: {error}") from error
        self._period_s = period_us / 1e6
        return CpuSettings(None if quota_us < 0 else quota_us, period_us, burst_us, weight)

    def _resolve_step(self, step: WriteStep, after: CpuSettings) -> tuple[str, str]:
        return FILES[step.name], str(-1 if step.value is None else step.value)

    def _explain(self, step: WriteStep, after: CpuSettings) -> str:
        cap = self.read_ancestor_cap() if step.name == "quota" else None
        if cap is None or cap.cores >= after.cores:
            return ""
        return f"the quota of {cap.path or '/'} above it is {count_cores(cap.cores)}, which a child may not exceed"

    @staticmethod
    def read_quota(directory: str) -> float | None:
        quota = read_text(os.path.join(directory, FILES["quota"]))
        period = read_text(os.path.join(directory, FILES["period"]))
        try:
            if quota is None or period is None or int(quota) < 0:
                return None
            return quota_to_cores(int(quota), int(period) or DEFAULT_PERIOD_US)
        except ValueError as error:
            raise CgroupReadError(directory, f"its quota is not a number: {error}") from error

    def read_quota_below(self) -> float:
        return max((self.read_quota(place) or 0.0 for place in list_below(self.place)), default=0.0)

    def watch_paths(self, actuator: str) -> list[str]:
        steps = ["quota", "period", *(["weight"] if actuator == "weight" else [])]
        return [os.path.join(self.place, FILES[step]) for step in steps]

    def _open_pressure(self) -> int:
        return open_pressure(self._unified_root, self.path)

    def close(self) -> None:
        os.close(self._usage_fd)
        super().close()
