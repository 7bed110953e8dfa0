"""The slice of jobs on reclaimed CPU, which is kept in the idle class.

On v2, systemd from 252 on writes ``cpu.idle`` itself because of ``CPUWeight=idle``. On v1, and before 252, only this
module writes it. There systemd writes a weight, also at ``daemon-reload``, which the kernel refuses for an idle cgroup.
So the class persists, but systemd logs "Failed to set 'cpu.shares' attribute"."""

from __future__ import annotations

import asyncio
from typing import Final

from cpumond.core.errors import CreateError
from cpumond.core.job_cgroups import IDLE_SLICE, INSTALLED_DROP_INS
from cpumond.host.cgroup.idle import IdleParent
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.executor.systemd.bus import SystemdBus
from cpumond.host.systemd.connection import Refused

IDLE_VERSION: Final = 252
"""The first version of systemd that has ``CPUWeight=idle``, which is the number 0 on the bus."""
MAKE_S: Final = 5.0
"""Seconds within which systemd must create the slice's cgroup."""
LOOK_S: Final = 0.01
SEE: Final = f"see {INSTALLED_DROP_INS}/executor.conf (in a checkout: systemd/executor.conf)"
ADVICE: Final = f"run the agent as root, with the hierarchy of cpu writable: {SEE}"


class IdleSlice:
    """The slice and its cgroup, created when first needed, for example after a boot."""

    def __init__(self, bus: SystemdBus, hierarchies: Hierarchies) -> None:
        self._bus = bus
        self._hierarchies = hierarchies
        self._lock = asyncio.Lock()

    async def hold(self) -> None:
        """Ensure that the slice is in the idle class; if it is already, this only reads a file. Raises BusAway,
        CreateError or AccessError; then no job on reclaimed CPU may be started."""
        parent = IdleParent(self._hierarchies, f"{self._bus.root_cgroup}/{IDLE_SLICE}".lstrip("/"))
        # Callers take turns, so that all but the first find the work done.
        async with self._lock:
            if parent.is_set():
                return
            # On v1, "idle" sets the lowest weight; on v2 without cpu.idle, it would make systemd write nothing.
            may_say_idle = self._hierarchies.cpu_version == 1 or parent.has_idle_file()
            weight = 0 if self._bus.version >= IDLE_VERSION and may_say_idle else 1
            try:
                await self._bus.call("StartUnit", "ss", IDLE_SLICE, "replace")
                await self._bus.connection.set_properties(IDLE_SLICE, [("CPUWeight", "t", weight)])
            except Refused as refused:
                raise CreateError(
                    f"systemd does not create {IDLE_SLICE} for jobs on reclaimed CPU: {refused.text}; "
                    f"see `systemctl status {IDLE_SLICE}`"
                ) from refused
            await _set(parent)


async def _set(parent: IdleParent) -> None:
    """Set the class as soon as systemd has created the cgroup. Raises CreateError or AccessError."""
    deadline_s = asyncio.get_running_loop().time() + MAKE_S
    while True:
        try:
            parent.set(ADVICE)
        except FileNotFoundError as error:
            if asyncio.get_running_loop().time() > deadline_s:
                raise CreateError(
                    f"systemd has created no cgroup {parent.path} in the hierarchy of cpu within {MAKE_S:g} s; "
                    f"see `systemctl status {IDLE_SLICE}`"
                ) from error
            await asyncio.sleep(LOOK_S)
        else:
            return
