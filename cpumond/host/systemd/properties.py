"""A limit in systemd's terms: the properties of a unit.

systemd stores CPUQuota= twice: in memory, to the microsecond per second, and in the drop-in that survives
``daemon-reload``, in whole percents of a core, rounded down. Limits of units are therefore set in whole percents: then
memory, drop-in and the kernel's file agree before and after a reload. ``host.systemd.bus`` talks to systemd."""

from __future__ import annotations

import math
import os
from typing import Final

import msgspec

from cpumond.core.measures import DEFAULT_PERIOD_US, MIN_QUOTA_US
from cpumond.host.cgroup.settings import DEFAULT_SHARES, DEFAULT_WEIGHT, V2_WEIGHT, CpuSettings

NO_LIMIT: Final = 2**64 - 1
"""systemd's value for "no quota" and "no weight"."""

STEP_CORES: Final = 0.01
"""Resolution of a drop-in: whole percents of a core."""
STEP_US: Final = 10_000
"""``STEP_CORES`` in microseconds per second."""

QUOTA, WEIGHT = "CPUQuotaPerSecUSec", "CPUWeight"
"""The properties that the agent moves. With the quota, its period is set, too."""

MARKS: Final = ("/run/systemd/system", "/run/systemd/notify")
"""At least one of these paths exists if systemd is PID 1; a sandboxed service may see only the second."""

UnitProperties = tuple[tuple[str, int], ...]
"""Names and values, all of D-Bus type "t"."""


def is_booted(marks: tuple[str, ...] = MARKS) -> bool:
    """Return whether PID 1 of this host is systemd (sd_booted(3))."""
    return any(os.path.exists(mark) for mark in marks)


def object_path(unit: str) -> str:
    """Return a unit's bus path, with characters other than letters and digits, and a leading digit, in hexadecimal."""
    name = "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 and (index or not chr(byte).isdigit()) else f"_{byte:02x}"
        for index, byte in enumerate(unit.encode())
    )
    return f"/org/freedesktop/systemd1/unit/{name or '_'}"


def round_up(cores: float) -> float:
    """Round ``cores`` up to whole percents: a job gets no less than its limit."""
    if not math.isfinite(cores):
        return cores
    # 0.29 * 100 is 28.999999999999996, and 0.57 * 100 is 56.99999999999999.
    return math.ceil(round(cores / STEP_CORES, 6)) * STEP_CORES


def align_weight(shares: int) -> int:
    """Return the ``cpu.shares`` of v1 that systemd would write for the nearest CPUWeight=."""
    return shares_of(weight_of(shares))


def weight_of(shares: int) -> int:
    """Return the CPUWeight= nearest to ``cpu.shares``."""
    return min(max(round(shares * DEFAULT_WEIGHT / DEFAULT_SHARES), V2_WEIGHT[0]), V2_WEIGHT[1])


def shares_of(weight: int) -> int:
    """Return the ``cpu.shares`` that systemd writes for CPUWeight=."""
    return max(weight * DEFAULT_SHARES // DEFAULT_WEIGHT, 2)


def list_properties(settings: CpuSettings, actuators: tuple[str, ...], cpu_version: int) -> UnitProperties:
    """Return the properties by which systemd sets those of ``settings`` that ``actuators`` move.

    A quota is rounded up to whole percents. If systemd rounded it down, the limit of a job that requests 33.5 % would
    be below this request after the next ``daemon-reload``."""
    properties: list[tuple[str, int]] = []
    if "quota" in actuators:
        quota_us = settings.quota_us
        per_s_us = NO_LIMIT if quota_us is None else round(round_up(quota_us / settings.period_us) * 1e6)
        properties.append((QUOTA, per_s_us))
        # The least quota's period may be longer than the unit's own period, which is unknown here.
        if quota_us is not None and (settings.period_us != DEFAULT_PERIOD_US or quota_us <= MIN_QUOTA_US):
            properties.append(("CPUQuotaPeriodUSec", settings.period_us))
    if "weight" in actuators and settings.weight is not None:
        properties.append((WEIGHT, settings.weight if cpu_version == 2 else weight_of(settings.weight)))
    return tuple(properties)


def read_property(settings: CpuSettings, name: str, cpu_version: int) -> int:
    """Return ``settings`` as the value of a property; -1 for a missing weight."""
    if name == QUOTA:
        return NO_LIMIT if settings.quota_us is None else round(settings.cores * 1e6)
    weight = settings.weight
    return -1 if weight is None else weight if cpu_version == 2 else weight_of(weight)


def is_same_value(name: str, a: int, b: int) -> bool:
    """Return whether two values of a property are equal, up to systemd's rounding of quotas."""
    return a == b or (name == QUOTA and NO_LIMIT not in (a, b) and abs(a - b) < STEP_US)


class UnitEvent(msgspec.Struct, frozen=True):
    """An event from systemd.

    ``done``: a unit has ``properties`` now; ``replaced``: some were not set, because another program had set
    ``values``; ``no-unit``: the unit does not exist (any more); ``refused``: systemd refuses the properties (``text``);
    ``denied``: systemd lets this user set none; ``away``: systemd is unreachable; ``connected``; ``reloaded``: its
    units are reloaded; ``removed``: a unit was unloaded; ``answer``: ``values``, None for missing ones."""

    kind: str
    unit: str = ""
    properties: UnitProperties = ()
    values: dict[str, object] = {}
    text: str = ""
