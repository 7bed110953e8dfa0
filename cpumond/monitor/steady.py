"""Find the steady state of a limit: run a rule over the same usage again and again until the limit settles. Pure.

This is an estimate: only the mean usage between two checks is known, not the bursts, and the effect of a lowered limit
on the job itself is unknown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from cpumond.monitor.model import CpuReading, JobState, MonitorSettings, start_state
from cpumond.monitor.policy import rebase
from cpumond.monitor.rules import RULES

ROUND_S: Final = 300.0
"""Minimum seconds of a round. The mean limits of two rounds are compared; a shorter round may not show slow changes."""
ALIKE: Final = 0.01
"""Mean limits of two rounds count as equal if they differ by at most this fraction of the request."""
MAX_CHECKS: Final = 50_000
"""Maximum number of checks. All rules in ``rules.RULES`` settle earlier; for a rule that does not, the search ends."""


class Use(NamedTuple):
    """Usage between two checks: ``interval_s`` is the time in between (> 0), ``usage_cores`` the mean usage (>= 0)."""

    interval_s: float
    usage_cores: float


class SteadyState(msgspec.Struct, frozen=True):
    """The steady limit in cores: its mean, minimum and maximum. ``after_s``: seconds from the job's start until the
    limit is first reached. ``reclaimed_ratio``: the reclaimed fraction of the request, in [0, 1]."""

    limit_cores: float
    least_cores: float
    most_cores: float
    after_s: float
    reclaimed_ratio: float


def find_steady_state(uses: Sequence[Use], hard_cores: float, s: MonitorSettings) -> SteadyState | None:
    """Return the steady limit of a job that requests ``hard_cores`` (> 0) while ``uses`` repeat; None if ``uses`` is
    empty. If usage exceeds a lowered limit, periods count as throttled until the next look or check."""
    if not uses or hard_cores <= 0.0:
        return None
    state = rebase(start_state(hard_cores, -s.start_delay_s), CpuReading(0.0, 0.0))
    mean_cores, limits, lengths, throttled = math.inf, [hard_cores], [1.0], 0
    path: list[tuple[float, float]] = [(0.0, hard_cores)]
    while len(path) < MAX_CHECKS:
        began_s, before_cores = path[-1][0], mean_cores
        limits, lengths = [], []
        while path[-1][0] - began_s < ROUND_S and len(path) < MAX_CHECKS:
            for interval_s, usage_cores in uses:
                state, throttled = _check(state, throttled, interval_s, usage_cores, s)
                limits.append(state.limit_cores)
                lengths.append(interval_s)
                path.append((path[-1][0] + interval_s, state.limit_cores))
        mean_cores = math.fsum(map(math.prod, zip(limits, lengths, strict=True))) / math.fsum(lengths)
        if abs(mean_cores - before_cores) <= ALIKE * hard_cores:
            break
    near_cores = max(mean_cores, min(limits)) + ALIKE * hard_cores
    after_s = next((at_s for at_s, limit in path if limit <= near_cores), 0.0)
    return SteadyState(mean_cores, min(limits), max(limits), after_s + s.start_delay_s, 1.0 - mean_cores / hard_cores)


def _check(
    state: JobState, throttled: int, interval_s: float, usage_cores: float, s: MonitorSettings
) -> tuple[JobState, int]:
    assert state.base is not None
    ratio = 0.0
    if s.is_ceiling and usage_cores > state.limit_cores:
        ratio = 1.0
        held_s = min(s.poll_s or interval_s, interval_s)
        throttled += max(round(held_s / state.cfs_period_s), 1)
        if s.limit_rule == "document":
            usage_cores = state.limit_cores
    reading = CpuReading(0.0, state.base.at_s + interval_s, nr_throttled=throttled)
    state, _ = RULES[s.limit_rule].step(state, reading, usage_cores, interval_s, ratio, s)
    return state, throttled
