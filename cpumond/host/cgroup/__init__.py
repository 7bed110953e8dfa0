"""Control groups: the only folder that knows v1 from v2.

``open_hierarchies`` finds the mounts, ``open_cgroup`` opens one cgroup of them; both versions answer to the same
Protocol, ``Cgroup``. A cgroup that is gone is None, not an error.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.cgroup.settings import AncestorCap, CpuSettings
from cpumond.host.cgroup.v1 import V1Cgroup
from cpumond.host.cgroup.v2 import V2Cgroup
from cpumond.monitor.model import CpuReading


class Cgroup(Protocol):
    """One open cgroup; holds descriptors of its directory and its counters until ``close``.

    ``path`` is relative to the hierarchy of the cpu controller, ``directory`` absolute there, both as it was opened;
    ``inode`` its identity in that hierarchy: a removed and made-again cgroup has another one (its ctime does not tell,
    setting an xattr changes that), a renamed one (v1) keeps it. All that is read and written here is of this identity.
    ``place`` is a path to it that stays right, for this process; ``stat_fd`` the descriptor of its cpu.stat, for a look
    at many. ``DESCRIPTORS``: so many, one more with pressure.
    """

    path: str
    directory: str
    inode: int
    stat_fd: int
    WEIGHT_BOUNDS: ClassVar[tuple[int, int]]
    DESCRIPTORS: ClassVar[int]

    @property
    def place(self) -> str:
        """See above."""

    def is_there(self) -> bool:
        """Whether it was not removed."""

    def read(self, at_s: float) -> CpuReading | None:
        """The counters; None when the cgroup is gone. Raises CgroupReadError."""

    def read_throttled(self) -> int | None:
        """``nr_throttled`` alone; the next ``read`` has it, too. None when the cgroup is gone.

        Raises CgroupReadError.
        """

    def follow_pressure(self, wanted: bool) -> None:
        """Whether ``read`` also tells ``pressure_s``; costs one more descriptor and one more pread.

        Raises CgroupReadError with the reason where the kernel does not tell it; ``read`` goes on without.
        """

    def read_settings(self) -> CpuSettings | None:
        """The CPU settings in force; None when the cgroup is gone. Raises CgroupReadError."""

    def write_settings(self, before: CpuSettings, after: CpuSettings) -> bool:
        """Bring ``before`` to ``after`` in an order that is legal at every step; False when the cgroup is gone.

        Raises CgroupWriteError with the rule of the kernel that is behind a refusal.
        """

    def read_ancestor_cap(self) -> AncestorCap:
        """The least quota above this cgroup, and where it is set. Raises CgroupReadError."""

    def watch_paths(self, actuator: str) -> list[str]:
        """The files in which a foreign change of the limit that ``actuator`` moves shows."""

    def close(self) -> None:
        """Give the descriptors back."""


def open_cgroup(hierarchies: Hierarchies, path: str) -> Cgroup | None:
    """The cgroup at ``path`` (relative), or None when there is none. Raises CgroupReadError."""
    return (V1Cgroup if hierarchies.cpu_version == 1 else V2Cgroup).open(hierarchies, path)
