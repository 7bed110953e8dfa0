"""CPU settings of a cgroup as a value, how a limit in cores becomes one, and in which order it is written; pure.

Rules of the kernel: 1000 us <= quota, 1000 us <= period <= 1 s, burst <= quota at every moment, and on v1 a cgroup's
quota/period is never above its parent's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from cpumond.units import MAX_PERIOD_US, MIN_QUOTA_US, cores_to_quota_us, quota_to_cores

EQUAL_CORES = 0.01
"""Two quotas closer than this are the same: systemd rounds CPUQuota to 10 ms per second."""

V1_SHARES = (2, 262_144)
V2_WEIGHT = (1, 10_000)


class CpuSettings(msgspec.Struct, frozen=True):
    """The CPU settings of one cgroup.

    ``quota_us`` None = no quota; ``period_us`` 1000..1000000; ``burst_us`` None where the kernel has no such file;
    ``weight`` cpu.shares (v1) or cpu.weight (v2), None where it is absent.
    """

    quota_us: int | None
    period_us: int
    burst_us: int | None = None
    weight: int | None = None

    @property
    def cores(self) -> float:
        """The quota in cores; infinity when there is none."""
        return quota_to_cores(self.quota_us, self.period_us)


class AncestorCap(msgspec.Struct, frozen=True):
    """The least quota above a cgroup: cores (infinity when there is none) and the path that sets it."""

    cores: float
    path: str = ""


class Target(msgspec.Struct, frozen=True):
    """Settings for a limit: ``cores`` what they really give, ``notes`` which bound of the kernel moved it."""

    settings: CpuSettings
    cores: float
    notes: tuple[str, ...] = ()


class Step(msgspec.Struct, frozen=True):
    """One write: which setting and its new value (None = no quota)."""

    name: Literal["quota", "period", "burst", "weight"]
    value: int | None


def compute_quota_target(
    cores: float, original: CpuSettings, ancestor: AncestorCap, burst_ratio: float | None = None
) -> Target:
    """The quota settings that give ``cores`` to a cgroup that was found as ``original``.

    Never above the quota found, nor above ``ancestor``; below 1000 us the period is lengthened up to 1 s before the
    limit is raised. The burst found is kept as far as it fits under the quota, unless ``burst_ratio`` asks for one.
    """
    notes = []
    if cores > original.cores:
        cores = original.cores
        notes.append(f"held to the quota that was found, {cores:g} cores")
    if cores > ancestor.cores:
        cores = ancestor.cores
        notes.append(f"held to {ancestor.cores:g} cores, the quota of {ancestor.path or '/'}")
    period_us = original.period_us
    quota_us = cores_to_quota_us(cores, period_us)
    if quota_us < MIN_QUOTA_US:
        period_us = min(max(math.ceil(MIN_QUOTA_US / cores) if cores > 0 else MAX_PERIOD_US, period_us), MAX_PERIOD_US)
        quota_us = max(cores_to_quota_us(cores, period_us), MIN_QUOTA_US)
        if quota_us / period_us > cores * 1.001:
            notes.append(f"raised to {quota_us / period_us:g} cores, the least quota the kernel takes")
        else:
            notes.append(f"period lengthened to {period_us} us, the kernel takes no quota below {MIN_QUOTA_US} us")
        cores = quota_us / period_us
    burst_us = original.burst_us
    if burst_us is not None:
        burst_us = min(burst_us if burst_ratio is None else int(burst_ratio * quota_us), quota_us)
    return Target(CpuSettings(quota_us, period_us, burst_us, original.weight), cores, tuple(notes))


def compute_weight_target(cores: float, hard_cores: float, original: CpuSettings, bounds: tuple[int, int]) -> Target:
    """The weight that stands for ``cores`` of ``hard_cores``: the weight found, scaled; a guarantee, never a cap."""
    if original.weight is None or hard_cores <= 0:
        return Target(original, cores, ("the cgroup has no weight",))
    weight = min(max(round(original.weight * cores / hard_cores), bounds[0]), bounds[1])
    return Target(msgspec.structs.replace(original, weight=weight), cores)


def plan_steps(before: CpuSettings, after: CpuSettings) -> tuple[Step, ...]:
    """The writes that lead from ``before`` to ``after``, each one legal where both ends are.

    Down: burst, then quota; up: quota, then burst. Of quota and period the one goes first that gives less CPU in
    between: that is never above the larger end, so a parent that allows both ends allows the middle.
    """
    steps: list[Step] = []
    if before.burst_us is not None and after.burst_us is not None and after.burst_us < before.burst_us:
        steps.append(Step("burst", after.burst_us))
    quota, period = Step("quota", after.quota_us), Step("period", after.period_us)
    if before.quota_us == after.quota_us and before.period_us == after.period_us:
        pass
    elif before.period_us == after.period_us:
        steps.append(quota)
    elif before.quota_us == after.quota_us:
        steps.append(period)
    elif quota_to_cores(after.quota_us, before.period_us) <= quota_to_cores(before.quota_us, after.period_us):
        steps += [quota, period]
    else:
        steps += [period, quota]
    if before.burst_us is not None and after.burst_us is not None and after.burst_us > before.burst_us:
        steps.append(Step("burst", after.burst_us))
    if after.weight is not None and after.weight != before.weight:
        steps.append(Step("weight", after.weight))
    return tuple(steps)


def same_quota(a: CpuSettings, b: CpuSettings) -> bool:
    """Whether two settings give the same CPU, up to systemd's rounding of 10 ms a second."""
    if a.quota_us is None or b.quota_us is None:
        return a.quota_us is b.quota_us
    return a == b or abs(a.cores - b.cores) < EQUAL_CORES


def least_cap(caps: Iterable[AncestorCap]) -> AncestorCap:
    """The least of several caps; infinity when there are none."""
    return min(caps, key=lambda cap: cap.cores, default=AncestorCap(math.inf))


def classify_change(believed: CpuSettings, found: CpuSettings, actuator: str) -> Literal["same", "raise", "lower"]:
    """What somebody else did to the setting that ``actuator`` moves, compared with what was believed in force."""
    if actuator == "weight":
        before, after = believed.weight or 0, found.weight or 0
        return "same" if before == after else "raise" if after > before else "lower"
    if same_quota(believed, found):
        return "same"
    return "raise" if found.cores > believed.cores else "lower"


def choose_restore(current: CpuSettings, original: CpuSettings, actuators: tuple[str, ...]) -> CpuSettings:
    """What a cgroup is left with when the agent goes: what it found, for the settings it moved.

    A quota that somebody raised above the one found stays: it is theirs.
    """
    restored = current
    if "quota" in actuators:
        if current.cores > original.cores and not same_quota(current, original):
            burst_us = original.burst_us
            if burst_us is not None and current.quota_us is not None:
                burst_us = min(burst_us, current.quota_us)
            restored = msgspec.structs.replace(restored, burst_us=burst_us)
        else:
            restored = msgspec.structs.replace(
                restored, quota_us=original.quota_us, period_us=original.period_us, burst_us=original.burst_us
            )
    if "weight" in actuators:
        restored = msgspec.structs.replace(restored, weight=original.weight)
    return restored
