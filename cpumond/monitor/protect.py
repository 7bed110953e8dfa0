"""Throttle restore and pressure restore: signs of a demand that usage cannot show, because a quota limits usage."""

from __future__ import annotations

from cpumond.monitor.model import CpuReading, JobState, MonitorSettings


def compute_throttled_ratio(before: CpuReading, now: CpuReading) -> float:
    """Return the fraction of throttled enforcement periods between two readings, in [0, 1]; 0 if no period passed."""
    periods = now.nr_periods - before.nr_periods
    if periods <= 0:
        return 0.0
    return min(max((now.nr_throttled - before.nr_throttled) / periods, 0.0), 1.0)


def compute_pressure_ratio(before: CpuReading, now: CpuReading) -> float:
    """Return the fraction of time between two readings in which some task waited for CPU, in [0, 1]; 0 if unknown."""
    if before.pressure_s is None or now.pressure_s is None or now.at_s <= before.at_s:
        return 0.0
    return min(max((now.pressure_s - before.pressure_s) / (now.at_s - before.at_s), 0.0), 1.0)


def needs_restore(
    state: JobState, throttled_ratio: float, s: MonitorSettings, pressure_ratio: float = 0.0, usage_cores: float = 0.0
) -> bool:
    """Return whether a lowered limit must be restored at once, because of one of three signs.

    For a quota: more than ``throttle_restore_ratio`` of the periods were throttled. For other limits: ``usage_cores``
    exceed ``use_restore_ratio`` * limit. For all limits: some task waited for CPU for more than
    ``pressure_restore_ratio`` of the time, since a lowered weight makes tasks wait. A ratio of 0 turns a sign off."""
    if state.limit_cores >= state.hard_cores:
        return False
    if 0.0 < s.throttle_restore_ratio < throttled_ratio and s.is_ceiling:
        return True
    return is_pressed(pressure_ratio, s) or is_above_limit(usage_cores, state.limit_cores, s)


def is_above_limit(usage_cores: float, limit_cores: float, s: MonitorSettings) -> bool:
    """Return whether usage exceeds ``use_restore_ratio`` (0 = off) * the limit, if that limit does not throttle."""
    ratio = s.use_restore_ratio or 0.0
    return ratio > 0.0 and usage_cores > limit_cores * ratio and not s.is_ceiling


def is_pressed(pressure_ratio: float, s: MonitorSettings) -> bool:
    """Return whether some task waited for CPU for more than ``pressure_restore_ratio`` of the time; 0 turns it off."""
    return 0.0 < (s.pressure_restore_ratio or 0.0) < pressure_ratio


def advise_without_pressure(s: MonitorSettings) -> str:
    """Explain what it means that the kernel does not report a job's pressure, and what can be done."""
    if s.actuator == "weight":
        return 'nothing shows that it waits for others: use actuator = "quota", or PSI (kernel parameter psi=1)'
    return "pressure_restore_ratio has no effect there; throttle_restore_ratio does"


def account_throttling(state: JobState, reading: CpuReading, s: MonitorSettings) -> tuple[float, float]:
    """Return the new ``throttled_cpu_s`` and ``late_cpu_s`` of ``state``, in core-seconds, after ``reading``."""
    throttled_cpu_s, late_cpu_s, seen = state.throttled_cpu_s, state.late_cpu_s, state.seen
    # If the counter has fallen, or was not read before, the throttled time in this interval is unknown.
    if seen is not None and reading.throttled_s > seen.throttled_s:
        throttled_cpu_s += reading.throttled_s - seen.throttled_s
        if state.limit_cores < state.hard_cores and s.is_ceiling:
            late_cpu_s += reading.throttled_s - seen.throttled_s
    return throttled_cpu_s, late_cpu_s
