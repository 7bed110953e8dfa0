"""Throttle restore: the sign of hunger that usage alone cannot show (DESIGN.md 5)."""

from __future__ import annotations

from cpumond.monitor.model import CpuReading, JobState, MonitorSettings


def compute_throttled_ratio(before: CpuReading, now: CpuReading) -> float:
    """Share of throttled enforcement periods between two readings, in [0, 1]; 0 when no period passed."""
    periods = now.nr_periods - before.nr_periods
    if periods <= 0:
        return 0.0
    return min(max((now.nr_throttled - before.nr_throttled) / periods, 0.0), 1.0)


def needs_restore(state: JobState, throttled_ratio: float, settings: MonitorSettings) -> bool:
    """Whether the limit goes back to the job's CPU at once.

    Only with the quota actuator, only below the job's CPU, only when more than ``throttle_restore_ratio`` of the
    periods were throttled; 0 turns it off.
    """
    return (
        0.0 < settings.throttle_restore_ratio < throttled_ratio
        and settings.actuator == "quota"
        and state.limit_cores < state.hard_cores
    )
