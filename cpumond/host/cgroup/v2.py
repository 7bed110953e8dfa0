"""Control groups of version 2: one hierarchy, ``cpu.stat``, ``cpu.max``, ``cpu.max.burst``, ``cpu.weight``."""

from __future__ import annotations

import os
from typing import ClassVar, Self

from cpumond.core.errors import GONE_ERRNOS, CgroupReadError
from cpumond.core.measures import DEFAULT_PERIOD_US, quota_to_cores
from cpumond.host.cgroup.files import (
    Cgroup,
    find_missing_quota,
    open_counter,
    open_directory,
    open_pressure,
    read_pressure_total_s,
    read_text,
)
from cpumond.host.cgroup.mounts import Hierarchies, held_place
from cpumond.host.cgroup.parse import STAT_BYTES, parse_cpu_max, parse_flat_keyed
from cpumond.host.cgroup.settings import V2_WEIGHT, CpuSettings, WriteStep
from cpumond.host.cgroup.units import unit_of
from cpumond.monitor.model import CpuReading


class V2Cgroup(Cgroup):
    """One cgroup of the unified hierarchy."""

    WEIGHT_BOUNDS: ClassVar = V2_WEIGHT
    DESCRIPTORS: ClassVar = 2

    __slots__ = ("_raw_stat", "_reading")

    def __init__(self, hierarchies: Hierarchies, path: str, fd: int, stat_fd: int) -> None:
        super().__init__(hierarchies, path, fd, stat_fd)
        self._raw_stat = b""
        self._reading = CpuReading(0.0, 0.0, self.inode)

    @classmethod
    def open(cls, hierarchies: Hierarchies, path: str) -> Self | None:
        """Open the cgroup at ``path``; None if there is none. Raises CgroupReadError."""
        fd = open_directory(os.path.join(hierarchies.cpu_root, path))
        if fd is None:
            return None
        try:
            stat_fd = open_counter(os.path.join(held_place(fd), "cpu.stat"))
            if stat_fd is not None:
                return cls(hierarchies, path, fd, stat_fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def read(self, at_s: float) -> CpuReading | None:
        """Read the counters with one pread, and one more with pressure; parse them only if they changed."""
        try:
            raw_stat = os.pread(self.stat_fd, STAT_BYTES, 0)
        except OSError as error:
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(self.directory, error) from error
        last = self._reading
        pressure_s = None if self._pressure_fd is None else read_pressure_total_s(self._pressure_fd)
        if raw_stat == self._raw_stat:
            return CpuReading(
                last.total_cpu_s, at_s, self.inode, last.nr_periods, last.nr_throttled, last.throttled_s, pressure_s
            )
        try:
            stat = parse_flat_keyed(raw_stat.decode("ascii"))
        except ValueError as error:
            raise CgroupReadError(self.directory, f"counters are not numbers: {error}") from error
        self._raw_stat = raw_stat
        self._reading = CpuReading(
            stat.get("usage_usec", 0) * 1e-6, at_s, self.inode, stat.get("nr_periods", 0), stat.get("nr_throttled", 0),
            stat.get("throttled_usec", 0) * 1e-6, pressure_s,
        )  # fmt: skip
        return self._reading

    def read_settings(self) -> CpuSettings | None:
        try:
            lacks_quota = bool(find_missing_quota(self.place))
            quota_us, period_us = (None, DEFAULT_PERIOD_US) if lacks_quota else parse_cpu_max(self.read_file("cpu.max"))
            burst_us = self.read_number("cpu.max.burst")  # None on kernels before 5.14
            weight = self.read_number("cpu.weight")
        except OSError as error:
            if error.errno not in GONE_ERRNOS:
                raise CgroupReadError(self.directory, error) from error
            if not self.is_there():
                return None
            if unit_of(self.path):
                # systemd enables the limit files of a unit only with the unit's first CPU setting.
                return CpuSettings(None, DEFAULT_PERIOD_US)
            raise CgroupReadError(
                os.path.join(self.directory, "cpu.max"),
                "the file does not exist: the cpu controller is not in its parent's cgroup.subtree_control",
            ) from error
        except ValueError as error:
            raise CgroupReadError(self.directory, f"settings are not numbers: {error}") from error
        return CpuSettings(quota_us, period_us, burst_us, weight)

    def _resolve_step(self, step: WriteStep, after: CpuSettings) -> tuple[str, str]:
        if step.name in ("quota", "period"):  # one file on v2
            return "cpu.max", f"{'max' if after.quota_us is None else after.quota_us} {after.period_us}"
        return {"burst": "cpu.max.burst", "weight": "cpu.weight"}[step.name], str(step.value)

    @staticmethod
    def read_quota(directory: str) -> float | None:
        text = read_text(os.path.join(directory, "cpu.max"))
        try:
            quota_us, period_us = parse_cpu_max(text) if text else (None, 0)
        except ValueError as error:
            raise CgroupReadError(os.path.join(directory, "cpu.max"), error) from error
        return None if quota_us is None else quota_to_cores(quota_us, period_us)

    def watch_paths(self, actuator: str) -> list[str]:
        names = ["cpu.max", *(["cpu.weight"] if actuator == "weight" else [])]
        return [os.path.join(self.place, name) for name in names]

    def _open_pressure(self) -> int:
        return open_pressure(self.place, "")
