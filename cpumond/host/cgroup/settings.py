"""CPU settings of a cgroup as a value: compute them from a limit in cores, and plan in which order to write them; pure.

Rules of the kernel: 1000 us <= quota, 1000 us <= period <= 1 s, burst <= quota at every moment, and on v1 a cgroup's
quota/period is never above its parent's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from cpumond.core.measures import (
    DEFAULT_PERIOD_US,
    MAX_PERIOD_US,
    MIN_QUOTA_US,
    cores_to_quota_us,
    count_cores,
    quota_to_cores,
)

EQUAL_CORES = 0.01
"""Quotas that differ by less than this count as equal, because systemd rounds CPUQuota to 10 ms per second."""

ROUNDING_US = 1e-7
"""Tolerance in microseconds: above the errors of floats, below the least difference of two quotas."""

V1_SHARES = (2, 262_144)
V2_WEIGHT = (1, 10_000)
DEFAULT_SHARES = 1024
DEFAULT_WEIGHT = 100
"""The kernel's weights of a new cgroup on v1 and v2."""


class CpuSettings(msgspec.Struct, frozen=True):
    """The CPU settings of one cgroup.

    ``quota_us`` None: no quota; ``period_us`` is 1000..1000000; ``burst_us`` None: the kernel has no such file;
    ``weight`` is cpu.shares (v1) or cpu.weight (v2), None if it is missing."""

    quota_us: int | None
    period_us: int
    burst_us: int | None = None
    weight: int | None = None

    @property
    def cores(self) -> float:
        """The quota in cores; infinity if there is none."""
        return quota_to_cores(self.quota_us, self.period_us)


class AncestorCap(msgspec.Struct, frozen=True):
    """The least quota above a cgroup: cores (infinity if there is none), and the path of the cgroup that has it."""

    cores: float
    path: str = ""


class LimitTarget(msgspec.Struct, frozen=True):
    """Settings for a limit. ``cores``: the limit that the settings really give. ``notes``: sentences on the bounds
    because of which it is not the wanted one."""

    settings: CpuSettings
    cores: float
    notes: tuple[str, ...] = ()


class Written(NamedTuple):
    """The last change that the agent made or was about to make: quota, period and weight before and after it."""

    before: CpuSettings
    after: CpuSettings


class WriteStep(msgspec.Struct, frozen=True):
    """One write: the setting and its new value (None = no quota)."""

    name: Literal["quota", "period", "burst", "weight"]
    value: int | None


def compute_quota_target(
    cores: float, original: CpuSettings, ancestor: AncestorCap, burst_ratio: float | None = None
) -> LimitTarget:
    """Return the quota settings that give ``cores`` to a cgroup that was found as ``original``.

    They never exceed the quota found, nor ``ancestor``. If the quota would be below 1000 us, the period is lengthened,
    up to 1 s; only if that is not enough, the limit is raised. The original burst is kept as far as it fits under the
    quota, unless ``burst_ratio`` sets another burst."""
    notes = []
    if cores > original.cores:
        cores = original.cores
        notes.append(f"held to the original quota, {count_cores(cores)}")
    if cores > ancestor.cores:
        cores = ancestor.cores
        notes.append(f"held to {count_cores(ancestor.cores)}, the quota of {ancestor.path or '/'}")
    period_us = original.period_us
    quota_us = _quota_under(cores, period_us, ancestor)
    if quota_us < MIN_QUOTA_US:
        needed_us = math.ceil(MIN_QUOTA_US / max(cores, MIN_QUOTA_US / MAX_PERIOD_US))
        period_us = min(max(needed_us, period_us), MAX_PERIOD_US)
        quota_us = max(_quota_under(cores, period_us, ancestor), MIN_QUOTA_US)
        if quota_us / period_us > cores * 1.001:
            notes.append(f"raised to {count_cores(quota_us / period_us)}, the least quota that the kernel accepts")
        else:
            notes.append(f"period lengthened to {period_us} us: the kernel accepts no quota below {MIN_QUOTA_US} us")
        cores = quota_us / period_us
    burst_us = original.burst_us
    if burst_us is not None:
        burst_us = min(burst_us if burst_ratio is None else int(burst_ratio * quota_us), quota_us)
    return LimitTarget(CpuSettings(quota_us, period_us, burst_us, original.weight), cores, tuple(notes))


def _quota_under(cores: float, period_us: int, ancestor: AncestorCap) -> int:
    """Return ``cores`` as a quota to the nearest microsecond; rounded down if this would exceed ``ancestor``."""
    quota_us = cores_to_quota_us(cores, period_us)
    if quota_us > ancestor.cores * period_us + ROUNDING_US:
        quota_us -= 1
    return quota_us


def compute_weight_target(
    cores: float, hard_cores: float, original: CpuSettings, bounds: tuple[int, int]
) -> LimitTarget:
    """Return the original weight, scaled by ``cores`` / ``hard_cores``. A weight is a guarantee, not a cap."""
    if original.weight is None or hard_cores <= 0:
        return LimitTarget(original, cores, ("the cgroup has no weight",))
    weight = min(max(round(original.weight * cores / hard_cores), bounds[0]), bounds[1])
    return LimitTarget(msgspec.structs.replace(original, weight=weight), cores)


def compute_start_weight(cores: float, version: int) -> int:
    """Return ``cpu.shares`` (v1) or ``cpu.weight`` (v2) of a job with a guarantee of ``cores``: the kernel's default
    weight times the cores, within the kernel's bounds."""
    default, bounds = (DEFAULT_SHARES, V1_SHARES) if version == 1 else (DEFAULT_WEIGHT, V2_WEIGHT)
    target = compute_weight_target(cores, 1.0, CpuSettings(None, DEFAULT_PERIOD_US, weight=default), bounds)
    assert target.settings.weight is not None
    return target.settings.weight


def plan_steps(before: CpuSettings, after: CpuSettings) -> tuple[WriteStep, ...]:
    """Return the writes that lead from ``before`` to ``after``; each write is valid if ``before`` and ``after`` are. To
    lower: burst, then quota. To raise: quota, then burst. Of quota and period, write the one first after which the
    limit is lower. The limit in between is then never above the larger of ``before`` and ``after``, so a parent that
    allows both also allows it. "No quota" is valid with any period and under any parent: it is set first, or removed
    last."""
    steps: list[WriteStep] = []
    if before.burst_us is not None and after.burst_us is not None and after.burst_us < before.burst_us:
        steps.append(WriteStep("burst", after.burst_us))
    quota, period = WriteStep("quota", after.quota_us), WriteStep("period", after.period_us)
    pair = (quota, period) if _quota_goes_first(before, after) else (period, quota)
    steps += [step for step in pair if step.value != getattr(before, f"{step.name}_us")]
    if before.burst_us is not None and after.burst_us is not None and after.burst_us > before.burst_us:
        steps.append(WriteStep("burst", after.burst_us))
    if after.weight is not None and after.weight != before.weight:
        steps.append(WriteStep("weight", after.weight))
    return tuple(steps)


def _quota_goes_first(before: CpuSettings, after: CpuSettings) -> bool:
    if before.quota_us is None or after.quota_us is None:
        return after.quota_us is None
    return after.quota_us / before.period_us <= before.quota_us / after.period_us


def same_quota(a: CpuSettings, b: CpuSettings) -> bool:
    """Return whether two settings allow the same cores, up to systemd's rounding of 10 ms per second."""
    if a.quota_us is None or b.quota_us is None:
        return a.quota_us is b.quota_us
    return a == b or round(abs(a.cores - b.cores), 6) < EQUAL_CORES


def least_cap(caps: Iterable[AncestorCap]) -> AncestorCap:
    """Return the least of several caps; infinity if there are none."""
    return min(caps, key=lambda cap: cap.cores, default=AncestorCap(math.inf))


def classify_change(
    known: CpuSettings, found: CpuSettings, actuator: str, exact: bool = False
) -> Literal["same", "raise", "lower"]:
    """Classify another program's change of the setting that ``actuator`` moves, compared with the ``known`` one.

    ``exact``: quotas that differ only by systemd's rounding count as different."""
    if actuator == "weight":
        before, after = known.weight or 0, found.weight or 0
        return "same" if before == after else "raise" if after > before else "lower"
    if found.cores == known.cores if exact else same_quota(known, found):
        return "same"
    return "raise" if found.cores > known.cores else "lower"


def is_external(current: CpuSettings, original: CpuSettings, written: Written | None, actuator: str) -> bool:
    """Return whether another program changed the setting of ``actuator`` after the agent's last change. On v1, quota
    and period are two writes, so any mixture of the old, the new and the original values may be the agent's. The same
    cores with a different period are not such a change."""
    if written is None:
        return False
    ours = (original, *written)
    if actuator == "weight":
        return current.weight not in [each.weight for each in ours]
    if current.cores in [each.cores for each in ours]:
        return False
    return current.quota_us not in [each.quota_us for each in ours] or (
        current.period_us not in [each.period_us for each in ours]
    )


def is_raised_above(current: CpuSettings, original: CpuSettings, actuator: str) -> bool:
    """Return whether another program set a value above the original one, which the agent never does."""
    if actuator == "weight":
        return (current.weight or 0) > (original.weight or 0)
    return current.cores > original.cores and not same_quota(current, original)


def adopt_limit(original: CpuSettings, found: CpuSettings, actuator: str) -> CpuSettings:
    """Return what to restore in the end after another program changed ``original``: that program's limit."""
    if actuator == "weight":
        return msgspec.structs.replace(original, weight=found.weight)
    return msgspec.structs.replace(original, quota_us=found.quota_us, period_us=found.period_us)


def choose_restore(
    current: CpuSettings, original: CpuSettings, actuators: tuple[str, ...], written: Written | None = None
) -> CpuSettings:
    """Return the settings to leave in a cgroup when the agent leaves it: the original ones, if the agent moved them.

    A limit above the original, or one that the agent did not write (``written``; None if unknown), was set by another
    program and stays."""
    restored = current
    if "quota" in actuators:
        if not is_raised_above(current, original, "quota") and not is_external(current, original, written, "quota"):
            restored = msgspec.structs.replace(restored, quota_us=original.quota_us, period_us=original.period_us)
        burst_us = original.burst_us
        if burst_us is not None and restored.quota_us is not None:
            # The original burst may not fit under the present quota.
            burst_us = min(burst_us, restored.quota_us)
        restored = msgspec.structs.replace(restored, burst_us=burst_us)
    ordered = is_raised_above(current, original, "weight") or is_external(current, original, written, "weight")
    if "weight" in actuators and not ordered:
        restored = msgspec.structs.replace(restored, weight=original.weight)
    return restored
