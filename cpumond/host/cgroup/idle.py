"""The idle class: one cgroup with all jobs on reclaimed CPU, which get only the CPU time that other cgroups do not use.

``cpu.idle`` only counts among siblings, so this cgroup is a child of the hierarchy's root; the jobs below it share by
their weights as usual. Without ``cpu.idle`` (kernels before 5.15) this cgroup has the lowest weight instead. The kernel
refuses a weight for an idle cgroup (EINVAL), so no weight set by systemd or an operator ends the class."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from cpumond.core.errors import from_os_error
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.cgroup.settings import V1_SHARES, V2_WEIGHT

FIRST_RELEASE: Final = (5, 15)
"""The first Linux release with ``cpu.idle``."""
_IDLE_FILE: Final = "cpu.idle"
_LOWEST_WEIGHTS: Final = {1: ("cpu.shares", V1_SHARES[0]), 2: ("cpu.weight", V2_WEIGHT[0])}


class IdleClass(msgspec.Struct, frozen=True):
    """How a host makes jobs on reclaimed CPU yield to all other jobs; ``name`` is "" if it does not.

    ``note`` says why the class is not "idle"; it is "" for "idle"."""

    name: Literal["idle", "lowest weight", ""] = ""
    note: str = ""


class IdleParent:
    """The cgroup of the idle class at ``path`` (relative); the caller creates it."""

    def __init__(self, hierarchies: Hierarchies, path: str) -> None:
        self.path = path
        self._root = hierarchies.cpu_root
        self._directory = os.path.join(hierarchies.cpu_root, path)
        self._weight_file, self._lowest = _LOWEST_WEIGHTS[hierarchies.cpu_version]

    def has_idle_file(self) -> bool:
        """Return whether this kernel has ``cpu.idle``: any cgroup with a weight has the file; v2's root has none."""
        for place in self._list_cgroups():
            if os.path.exists(os.path.join(place, self._weight_file)):
                return os.path.exists(os.path.join(place, _IDLE_FILE))
        found = re.match(r"(\d+)\.(\d+)", os.uname().release)
        return found is not None and (int(found[1]), int(found[2])) >= FIRST_RELEASE

    def _list_cgroups(self) -> Iterator[str]:
        yield self._directory
        yield self._root
        with contextlib.suppress(OSError), os.scandir(self._root) as entries:
            yield from (entry.path for entry in entries if entry.is_dir(follow_symlinks=False))

    def is_set(self) -> bool:
        idle = self._read(_IDLE_FILE)
        return idle == "1" if idle is not None else self._read(self._weight_file) == str(self._lowest)

    def set(self, advice: str) -> None:
        """Put the cgroup into its class, unless it is there. Raises FileNotFoundError if the cgroup does not exist or
        (v2) lacks the cpu controller, CreateError or AccessError (with ``advice``) if the kernel refuses."""
        if self.is_set():
            return
        name, value = (_IDLE_FILE, 1) if self.has_idle_file() else (self._weight_file, self._lowest)
        # Create the file only in a tree of plain files: a real cgroup has it as soon as it has the cpu controller.
        create = 0 if os.path.exists(os.path.join(self._directory, "cgroup.procs")) else os.O_CREAT
        try:
            fd = os.open(os.path.join(self._directory, name), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | create, 0o644)
            try:
                os.write(fd, b"%d\n" % value)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            doing = f"write {value} to {name} of {self._directory}, the cgroup of jobs on reclaimed CPU"
            raise from_os_error(error, doing, advice) from error

    def find_class(self) -> IdleClass:
        """Describe this host's class of jobs on reclaimed CPU, which need not have existed yet."""
        if self.has_idle_file():
            return IdleClass("idle")
        note = "this kernel has no cpu.idle (added in Linux 5.15): jobs on reclaimed CPU get the lowest weight instead"
        return IdleClass("lowest weight", note)

    def _read(self, name: str) -> str | None:
        try:
            with open(os.path.join(self._directory, name), encoding="ascii", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return None
