"""Control groups of version 1: controllers ``cpu`` and ``cpuacct``, mounted apart or together."""

from __future__ import annotations

import math
import os
from typing import ClassVar, Self

from cgroupspy.controllers import CpuController
from cgroupspy.interfaces import IntegerFile
from cgroupspy.nodes import Node

from cpumond.cgroup.files import ancestors, open_counter, open_pressure, read_pressure_total_s, read_text
from cpumond.cgroup.mounts import Hierarchies
from cpumond.cgroup.parse import parse_flat_keyed
from cpumond.cgroup.settings import V1_SHARES, AncestorCap, CpuSettings, Step, least_cap, plan_steps
from cpumond.errors import GONE_ERRNOS, CgroupReadError, CgroupWriteError
from cpumond.monitor.model import CpuReading
from cpumond.units import DEFAULT_PERIOD_US, MIN_QUOTA_US, quota_to_cores


class V1CpuController(CpuController):  # type: ignore[misc]
    """cgroupspy's typed cpu controller, with the burst file of newer kernels."""

    cfs_burst_us = IntegerFile("cpu.cfs_burst_us")


FIELDS = {"quota": "cfs_quota_us", "period": "cfs_period_us", "burst": "cfs_burst_us", "weight": "shares"}
"""Name of a step -> attribute of the controller, which is also its file's name after "cpu."."""


class V1Cgroup:
    """One cgroup in the v1 hierarchies; see ``cpumond.cgroup.Cgroup``."""

    WEIGHT_BOUNDS: ClassVar[tuple[int, int]] = V1_SHARES

    __slots__ = (
        "_cpu_root",
        "_nr_periods",
        "_nr_throttled",
        "_period_s",
        "_pressure_fd",
        "_raw_periods",
        "_seen_at_s",
        "_seen_usage_us",
        "_stat_fd",
        "_throttled_s",
        "_unified",
        "_unified_root",
        "_usage_fd",
        "directory",
        "inode",
        "path",
    )

    def __init__(self, hierarchies: Hierarchies, path: str, usage_fd: int, stat_fd: int) -> None:
        self.path = path
        self.directory = os.path.join(hierarchies.cpu_root, path)
        self.inode = os.stat(self.directory).st_ino
        self._cpu_root = hierarchies.cpu_root
        self._usage_fd, self._stat_fd = usage_fd, stat_fd
        self._pressure_fd: int | None = None
        self._unified_root = hierarchies.unified_root
        self._unified = hierarchies.cpuacct_root == hierarchies.unified_root
        self._seen_usage_us = -math.inf
        self._seen_at_s = -math.inf
        self._period_s = DEFAULT_PERIOD_US / 1e6
        self._nr_periods = self._raw_periods = self._nr_throttled = 0
        self._throttled_s = 0.0

    @classmethod
    def open(cls, hierarchies: Hierarchies, path: str) -> Self | None:
        """The cgroup at ``path``; None when it is not in both hierarchies. Raises CgroupReadError."""
        name = "cpuacct.usage" if hierarchies.cpuacct_root != hierarchies.unified_root else "cpu.stat"
        usage_fd = open_counter(os.path.join(hierarchies.cpuacct_root, path, name))
        if usage_fd is None:
            return None
        try:
            stat_fd = open_counter(os.path.join(hierarchies.cpu_root, path, "cpu.stat"))
            if stat_fd is None:
                os.close(usage_fd)
                return None
        except CgroupReadError:
            os.close(usage_fd)
            raise
        try:
            return cls(hierarchies, path, usage_fd, stat_fd)
        except OSError as error:
            os.close(usage_fd)
            os.close(stat_fd)
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(os.path.join(hierarchies.cpu_root, path), error) from error

    @property
    def _controller(self) -> V1CpuController:
        """cgroupspy's view of the directory, made when a setting is read or written: kept, it is 1 KiB a job."""
        return V1CpuController(Node(self.directory))

    def read(self, at_s: float) -> CpuReading | None:
        """See ``Cgroup.read``; at most two preads.

        A cgroup that used less CPU since the last full look than the least quota the kernel takes cannot have been
        throttled since: then cpu.stat is not read.
        """
        try:
            raw_usage = os.pread(self._usage_fd, 64, 0)
            # "cpuacct.usage" is one number in ns; the unified cpu.stat begins with "usage_usec N".
            usage_us = int(raw_usage.split(None, 2)[1]) if self._unified else int(raw_usage) * 1e-3
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
            usage_us * 1e-6,
            at_s,
            self.inode,
            self._nr_periods,
            self._nr_throttled,
            self._throttled_s,
            None if self._pressure_fd is None else read_pressure_total_s(self._pressure_fd),
        )

    def _read_stat(self, at_s: float) -> None:
        """Read cpu.stat. The periods of looks that were left out are not counted to this interval: it cannot hold
        more than its length allows."""
        stat = parse_flat_keyed(os.pread(self._stat_fd, 512, 0).decode("ascii"))
        periods = stat.get("nr_periods", 0)
        most = (at_s - self._seen_at_s) / self._period_s + 1.0
        self._nr_periods += int(max(min(periods - self._raw_periods, most), 0))
        self._raw_periods = periods
        self._nr_throttled = stat.get("nr_throttled", 0)
        self._throttled_s = stat.get("throttled_time", 0) * 1e-9

    def follow_pressure(self, wanted: bool) -> None:
        """See ``Cgroup.follow_pressure``."""
        if not wanted and self._pressure_fd is not None:
            os.close(self._pressure_fd)
            self._pressure_fd = None
        elif wanted and self._pressure_fd is None:
            self._pressure_fd = open_pressure(self._unified_root, self.path)

    def read_settings(self) -> CpuSettings | None:
        """See ``Cgroup.read_settings``."""
        try:
            controller = self._controller
            quota_us = controller.cfs_quota_us
            period_us = controller.cfs_period_us
            weight = controller.shares
            burst_us = controller.get_content("cfs_burst_us")  # None on kernels before 5.14
        except OSError as error:
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(self.directory, error) from error
        except ValueError as error:
            raise CgroupReadError(self.directory, f"settings are not numbers: {error}") from error
        self._period_s = period_us / 1e6
        return CpuSettings(quota_us, period_us, burst_us, weight)

    def write_settings(self, before: CpuSettings, after: CpuSettings) -> bool:
        """See ``Cgroup.write_settings``."""
        for step in plan_steps(before, after):
            try:
                setattr(self._controller, FIELDS[step.name], step.value)  # cgroupspy's None is -1, no quota
            except OSError as error:
                if error.errno in GONE_ERRNOS:
                    return False
                name = os.path.join(self.directory, f"cpu.{FIELDS[step.name]}")
                raise CgroupWriteError(
                    name, str(-1 if step.value is None else step.value), error, self._explain(step, after)
                ) from error
        return True

    def _explain(self, step: Step, after: CpuSettings) -> str:
        if step.name == "quota":
            cap = self.read_ancestor_cap()
            if cap.cores < after.cores:
                return f"the quota of {cap.path or '/'} above it is {cap.cores:g} cores, which a child may not exceed"
        if step.name == "burst":
            return "a burst may not exceed the quota"
        return ""

    def read_ancestor_cap(self) -> AncestorCap:
        """See ``Cgroup.read_ancestor_cap``."""
        caps = []
        for place in ancestors(self.path):
            directory = os.path.join(self._cpu_root, place)
            quota = read_text(os.path.join(directory, "cpu.cfs_quota_us"))
            period = read_text(os.path.join(directory, "cpu.cfs_period_us"))
            try:
                if quota is not None and period is not None and int(quota) >= 0:
                    caps.append(AncestorCap(quota_to_cores(int(quota), int(period) or DEFAULT_PERIOD_US), place))
            except ValueError as error:
                raise CgroupReadError(directory, f"its quota is not a number: {error}") from error
        return least_cap(caps)

    def watch_paths(self, actuator: str) -> list[str]:
        """See ``Cgroup.watch_paths``."""
        names = ["cpu.cfs_quota_us", "cpu.cfs_period_us", *(["cpu.shares"] if actuator == "weight" else [])]
        return [os.path.join(self.directory, name) for name in names]

    def close(self) -> None:
        """See ``Cgroup.close``."""
        self.follow_pressure(False)
        os.close(self._usage_fd)
        os.close(self._stat_fd)
