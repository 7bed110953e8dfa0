"""Control groups of version 2: one hierarchy, ``cpu.stat``, ``cpu.max``, ``cpu.max.burst``, ``cpu.weight``."""

from __future__ import annotations

import errno
import os
from typing import ClassVar, Self

from cgroupspy.controllers import Controller
from cgroupspy.interfaces import BaseFileInterface, IntegerFile
from cgroupspy.nodes import Node

from cpumond.cgroup.files import ancestors, open_counter, open_pressure, read_pressure_total_s, read_text
from cpumond.cgroup.mounts import Hierarchies
from cpumond.cgroup.parse import parse_cpu_max, parse_flat_keyed
from cpumond.cgroup.settings import V2_WEIGHT, AncestorCap, CpuSettings, least_cap, plan_steps
from cpumond.cgroup.systemd import unit_of
from cpumond.errors import GONE_ERRNOS, CgroupReadError, CgroupWriteError
from cpumond.monitor.model import CpuReading
from cpumond.units import DEFAULT_PERIOD_US, quota_to_cores


class V2CpuController(Controller):  # type: ignore[misc]
    """cgroupspy's controller for the files of version 2, which it does not know itself."""

    max = BaseFileInterface("cpu.max")
    max_burst = IntegerFile("cpu.max.burst")
    weight = IntegerFile("cpu.weight")


class V2Cgroup:
    """One cgroup of the unified hierarchy; see ``cpumond.cgroup.Cgroup``."""

    WEIGHT_BOUNDS: ClassVar[tuple[int, int]] = V2_WEIGHT

    __slots__ = ("_cpu_root", "_pressure_fd", "_raw_stat", "_reading", "_stat_fd", "directory", "inode", "path")

    def __init__(self, hierarchies: Hierarchies, path: str, stat_fd: int) -> None:
        self.path = path
        self.directory = os.path.join(hierarchies.cpu_root, path)
        self.inode = os.stat(self.directory).st_ino
        self._cpu_root = hierarchies.cpu_root
        self._stat_fd = stat_fd
        self._pressure_fd: int | None = None
        self._raw_stat = b""
        self._reading = CpuReading(0.0, 0.0, self.inode)

    @classmethod
    def open(cls, hierarchies: Hierarchies, path: str) -> Self | None:
        """The cgroup at ``path``; None when there is none. Raises CgroupReadError."""
        directory = os.path.join(hierarchies.cpu_root, path)
        stat_fd = open_counter(os.path.join(directory, "cpu.stat"))
        if stat_fd is None:
            return None
        try:
            return cls(hierarchies, path, stat_fd)
        except OSError as error:
            os.close(stat_fd)
            if error.errno in GONE_ERRNOS:
                return None
            raise CgroupReadError(directory, error) from error

    @property
    def _controller(self) -> V2CpuController:
        """cgroupspy's view of the directory, made when a setting is read or written: kept, it is 1 KiB a job."""
        return V2CpuController(Node(self.directory))

    def read(self, at_s: float) -> CpuReading | None:
        """See ``Cgroup.read``; one pread, parsed only when it changed."""
        try:
            raw_stat = os.pread(self._stat_fd, 1024, 0)
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
            stat.get("usage_usec", 0) * 1e-6,
            at_s,
            self.inode,
            stat.get("nr_periods", 0),
            stat.get("nr_throttled", 0),
            stat.get("throttled_usec", 0) * 1e-6,
            pressure_s,
        )
        return self._reading

    def follow_pressure(self, wanted: bool) -> None:
        """See ``Cgroup.follow_pressure``."""
        if not wanted and self._pressure_fd is not None:
            os.close(self._pressure_fd)
            self._pressure_fd = None
        elif wanted and self._pressure_fd is None:
            self._pressure_fd = open_pressure(self._cpu_root, self.path)

    def read_settings(self) -> CpuSettings | None:
        """See ``Cgroup.read_settings``."""
        try:
            controller = self._controller
            quota_us, period_us = parse_cpu_max(controller.max)
            burst_us = controller.get_content("max_burst")  # None on kernels before 5.14
            weight = controller.get_content("weight")
        except OSError as error:
            if error.errno not in GONE_ERRNOS:
                raise CgroupReadError(self.directory, error) from error
            if not os.path.isdir(self.directory):
                return None
            if unit_of(self.path):
                # systemd gives a unit its limit files with its first CPU setting.
                return CpuSettings(None, DEFAULT_PERIOD_US)
            raise CgroupReadError(
                os.path.join(self.directory, "cpu.max"),
                "there is no such file: the cpu controller is not in its parent's cgroup.subtree_control",
            ) from error
        except ValueError as error:
            raise CgroupReadError(self.directory, f"settings are not numbers: {error}") from error
        return CpuSettings(quota_us, period_us, burst_us, weight)

    def write_settings(self, before: CpuSettings, after: CpuSettings) -> bool:
        """See ``Cgroup.write_settings``; quota and period are one write here."""
        quota_text = f"{'max' if after.quota_us is None else after.quota_us} {after.period_us}"
        written: set[str] = set()
        for step in plan_steps(before, after):
            name, value = {
                "quota": ("max", quota_text),
                "period": ("max", quota_text),
                "burst": ("max_burst", step.value),
                "weight": ("weight", step.value),
            }[step.name]
            if name in written:
                continue
            written.add(name)
            try:
                setattr(self._controller, name, value)
            except OSError as error:
                path = os.path.join(self.directory, f"cpu.{name.replace('_', '.')}")
                # cgroupspy opens with O_CREAT, which cgroupfs refuses for a file that is not there.
                if error.errno in GONE_ERRNOS or (error.errno == errno.EACCES and not os.path.exists(path)):
                    return False
                hint = "a burst may not exceed the quota" if name == "max_burst" else ""
                raise CgroupWriteError(path, str(value), error, hint) from error
        return True

    def read_ancestor_cap(self) -> AncestorCap:
        """See ``Cgroup.read_ancestor_cap``."""
        caps = []
        for place in ancestors(self.path):
            text = read_text(os.path.join(self._cpu_root, place, "cpu.max"))
            try:
                quota_us, period_us = parse_cpu_max(text) if text else (None, 0)
            except ValueError as error:
                raise CgroupReadError(os.path.join(self._cpu_root, place, "cpu.max"), error) from error
            if quota_us is not None:
                caps.append(AncestorCap(quota_to_cores(quota_us, period_us), place))
        return least_cap(caps)

    def watch_paths(self, actuator: str) -> list[str]:
        """See ``Cgroup.watch_paths``."""
        names = ["cpu.max", *(["cpu.weight"] if actuator == "weight" else [])]
        return [os.path.join(self.directory, name) for name in names]

    def close(self) -> None:
        """See ``Cgroup.close``."""
        self.follow_pressure(False)
        os.close(self._stat_fd)
