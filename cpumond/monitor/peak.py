"""Rule ``peak`` (limit_rules.md 2): the recent maximum of usage plus a reserve, remembered adaptively.

The limit is the recent maximum of usage plus ``reserve_ratio``; the remembered peak fades. If a lowered limit holds the
job back at all, the full request is restored at once, and from then on the peak is remembered longer. The length of
this memory is adjusted for each job, so that the job is held back for at most ``throttle_budget`` of its time."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cpumond.monitor.model import EARLY_LOOK_S, CpuReading, Decision, HeldBack, JobState, Kind, MonitorSettings
from cpumond.monitor.policy import Stepped, compute_floor, smooth
from cpumond.monitor.protect import (
    account_throttling,
    compute_pressure_ratio,
    compute_throttled_ratio,
    is_above_limit,
    is_pressed,
)

MAX_CAUTION: Final = 7.0
"""Maximum of the caution: the half-life is at most ``peak_memory`` * 2 ^ MAX_CAUTION."""
GAIN_S: Final = 1.0
"""If a job is held back for this many seconds, its half-life doubles."""
STEP: Final = 0.05
"""Minimum cut as a fraction of the limit: a smaller cut is not worth a write."""
FIRST_SECONDS: Final = 10.0
"""Seconds after a job's start without a cut of its limit. ``start_delay`` and ``startup_boost`` may be longer."""
EARLY_ABOVE: Final = 1.1
"""If usage between looks exceeds this multiple of the limit, the limit is too low. Smaller excesses may be rounding."""
EARLY_GIVES: Final = 1.2
"""With ``early_restore = "use"``, a job gets this multiple of its usage."""
EARLY_HOLD_S: Final = 1.0
"""Minimum seconds for which a limit raised by "use" stays; else checks would cut it, and looks would raise it again."""
RETRY_CUT_S: Final = 60.0
"""Seconds after which a cut without effect is tried again: the threads that prevented the cut may have ended."""


def step(
    state: JobState,
    base: CpuReading,
    usage_cores: float,
    interval_s: float,
    throttled_ratio: float,
    s: MonitorSettings,
    pressure_ratio: float = 0.0,
) -> Stepped:
    """Decide one check; ``usage_cores`` were measured over ``interval_s``. Parameters are as in ``policy.step``."""
    hard, limit = state.hard_cores, state.limit_cores
    pressed = pressure_ratio > 0.0 and is_pressed(pressure_ratio, s)
    held_s = 0.0 if limit >= hard else _held_s(state, base, usage_cores, interval_s, pressed, s)
    caution = _adjust_caution(state.caution, held_s, interval_s, s)
    known = state.peak_cores
    faded = (find_peak(state, s) if known is None else known) * 2.0 ** (-interval_s / (s.peak_memory_s * 2.0**caution))
    # With a burst, usage may exceed the request, but the limit must not.
    peak, peak_at_s = (usage_cores, base.at_s) if usage_cores >= faded else (faded, state.peak_at_s)
    if peak > hard:
        peak = hard
    held, hold_until_s, no_cut_until_s = state.held, state.hold_until_s, state.no_cut_until_s
    kind: Kind = "hold"
    new_limit = limit
    if limit < hard and (held_s > 0.0 or pressed):
        kind, new_limit = "restore", hard
        if limit > peak:  # the demand was at least the limit
            peak, peak_at_s = limit, base.at_s
        held = _add_held(held, held_s, base.at_s, limit)
        hold_until_s = base.at_s + s.restore_hold_s
    else:
        target = find_target(peak, hard, s)
        if target > limit:
            if s.direction != "down-only":
                kind, new_limit = "grow", target
        elif target <= limit * (1.0 - STEP) and s.direction != "up-only":
            first_s = max(FIRST_SECONDS, s.startup_boost_s)
            if base.at_s >= hold_until_s and base.at_s >= no_cut_until_s and base.at_s > state.started_at_s + first_s:
                kind, new_limit = "shrink", target
    if new_limit > limit:
        no_cut_until_s = -math.inf
    smoothed = smooth(state, usage_cores, s)
    throttled_cpu_s, late_cpu_s = account_throttling(state, base, s)
    after = JobState(
        hard,
        new_limit,
        state.seed_cores,
        state.started_at_s,
        smoothed,
        (),
        (),
        base,
        hold_until_s,
        state.smoothed_cpu_s + smoothed * interval_s,
        state.preemptible_cpu_s + (hard - new_limit) * interval_s,
        state.max_cpu_s + hard * interval_s,
        throttled_cpu_s,
        late_cpu_s,
        base,
        peak,
        peak_at_s,
        caution,
        state.watched_s + interval_s,
        held,
        state.cfs_period_s,
        no_cut_until_s,
        state.is_written,
    )
    return after, Decision(kind, limit, new_limit, usage_cores, None, interval_s, throttled_ratio, pressure_ratio)


def look(state: JobState, reading: CpuReading, s: MonitorSettings) -> Stepped | None:
    """Look between two checks: restore the full request if the job was held back since ``state.seen``.

    If it was not, return None under a quota. Under other actuators, return a "hold", with ``reading`` as ``seen``,
    because the next look measures from here. ``base`` is not changed: checks measure usage from check to check."""
    seen, limit, hard = state.seen, state.limit_cores, state.hard_cores
    if seen is None or state.base is None or limit >= hard or reading.identity != seen.identity:
        return None
    if not s.is_ceiling and reading.at_s <= seen.at_s:
        return None
    usage_cores = max(reading.total_cpu_s - seen.total_cpu_s, 0.0) / max(reading.at_s - seen.at_s, 1e-9)
    pressure_ratio = compute_pressure_ratio(seen, reading) if not s.is_ceiling and s.pressure_restore_ratio else 0.0
    held_s = _held_s(state, reading, usage_cores, 0.0, is_pressed(pressure_ratio, s), s)
    if held_s <= 0.0 and s.is_ceiling:
        return None
    throttled_cpu_s, late_cpu_s = account_throttling(state, reading, s)
    ratio = compute_throttled_ratio(seen, reading)
    if held_s <= 0.0:
        after = msgspec.structs.replace(state, seen=reading, throttled_cpu_s=throttled_cpu_s, late_cpu_s=late_cpu_s)
        return after, Decision("hold", limit, limit, usage_cores, None, 0.0, ratio, pressure_ratio, by_look=True)
    peak = find_peak(state, s)
    after = msgspec.structs.replace(
        state,
        limit_cores=hard,
        seen=reading,
        throttled_cpu_s=throttled_cpu_s,
        late_cpu_s=late_cpu_s,
        peak_cores=max(peak, limit),
        peak_at_s=reading.at_s if limit > peak else state.peak_at_s,
        caution=_adjust_caution(state.caution, held_s, 0.0, s),
        held=_add_held(state.held, held_s, reading.at_s, limit),
        hold_until_s=reading.at_s + s.restore_hold_s,
        no_cut_until_s=-math.inf,
    )
    return after, Decision("restore", limit, hard, usage_cores, None, 0.0, ratio, pressure_ratio, by_look=True)


def restore_early(state: JobState, reading: CpuReading, recent_cores: float, s: MonitorSettings) -> Stepped | None:
    """Raise the limit if the usage since the previous look, ``recent_cores``, exceeds it; else return None.

    Only a burst allows such usage. The limit is raised before the burst is spent, so the job is not held back. With
    "use" the limit may soon fall again, and peak and caution stay the same: 50 ms of usage are not yet a peak. With
    "ordered" the full request lasts for ``restore_hold``, and EARLY_LOOK_S count as time held back."""
    limit, hard = state.limit_cores, state.hard_cores
    if limit >= hard or state.base is None or not s.looks_early or recent_cores <= EARLY_ABOVE * limit:
        return None
    recent = min(recent_cores, hard)
    if s.early_restore == "use":
        new_limit = min(hard, max(EARLY_GIVES * recent, limit))
        until_s = max(state.hold_until_s, reading.at_s + EARLY_HOLD_S)
        after = msgspec.structs.replace(state, limit_cores=new_limit, hold_until_s=until_s, no_cut_until_s=-math.inf)
        return after, Decision("grow", limit, new_limit, recent_cores, None, 0.0, 0.0, 0.0, by_look=True)
    peak = find_peak(state, s)
    after = msgspec.structs.replace(
        state,
        limit_cores=hard,
        peak_cores=max(peak, recent),
        peak_at_s=reading.at_s if recent > peak else state.peak_at_s,
        hold_until_s=max(state.hold_until_s, reading.at_s + s.restore_hold_s),
        caution=_adjust_caution(state.caution, EARLY_LOOK_S, 0.0, s),
        no_cut_until_s=-math.inf,
    )
    return after, Decision("restore", limit, hard, recent_cores, None, 0.0, 0.0, 0.0, by_look=True)


def put_off_cut(state: JobState, now_s: float) -> JobState:
    """Return the state after a cut that had no effect, because of a bound on the limit."""
    return msgspec.structs.replace(state, no_cut_until_s=now_s + RETRY_CUT_S)


def forgive(state: JobState, before: JobState) -> JobState:
    """Return ``state`` with caution and ``held`` of ``before``: the limit that held the job back was not the rule's."""
    return msgspec.structs.replace(state, caution=before.caution, held=before.held)


def find_peak(state: JobState, s: MonitorSettings) -> float:
    """Return the remembered peak in cores; before the rule's first check, the peak that the present limit implies."""
    if state.peak_cores is not None:
        return state.peak_cores
    return state.limit_cores / (1.0 if state.limit_cores >= state.hard_cores else 1.0 + s.reserve_ratio)


def find_target(peak_cores: float, hard_cores: float, s: MonitorSettings) -> float:
    """Return the limit in cores for a peak: peak plus reserve, but at least the floor and at most the request."""
    return min(hard_cores, max(compute_floor(hard_cores, (), s), peak_cores * (1.0 + s.reserve_ratio)))


def find_half_life_s(state: JobState, s: MonitorSettings) -> float:
    """Return the present half-life of the remembered peak, in seconds."""
    return float(s.peak_memory_s * 2.0**state.caution)


def _held_s(
    state: JobState, reading: CpuReading, usage_cores: float, interval_s: float, pressed: bool, s: MonitorSettings
) -> float:
    """Return for how long a lowered limit held the job back since ``state.seen``, in seconds of enforcement periods.

    If the limit does not throttle, usage above it (``use_restore_ratio``) or a waiting job (``pressed``) counts as one
    period. Under a quota, a job that waits for other jobs is not held back. If the limit is not written and usage in
    ``interval_s`` exceeds it, the job counts as held back until a look would have restored the request."""
    seen = state.seen
    if state.limit_cores >= state.hard_cores or seen is None:
        return 0.0
    if not s.is_ceiling:
        is_above = is_above_limit(usage_cores, state.limit_cores, s)
        if not state.is_written:
            return min(state.cfs_period_s, interval_s) if is_above else 0.0
        return state.cfs_period_s if pressed or is_above else 0.0
    if not state.is_written:
        return min(s.poll_s or interval_s, interval_s) if usage_cores > state.limit_cores else 0.0
    periods = reading.nr_throttled - seen.nr_throttled
    return state.cfs_period_s * periods if periods > 0 else 0.0


def _adjust_caution(caution: float, held_s: float, interval_s: float, s: MonitorSettings) -> float:
    """Return the caution after ``interval_s``, during which the job was held back for ``held_s``."""
    return min(max(caution + (held_s - s.throttle_budget * interval_s) / GAIN_S, 0.0), MAX_CAUTION)


def _add_held(held: HeldBack, held_s: float, at_s: float, from_cores: float) -> HeldBack:
    return HeldBack(held.count + 1, held.held_s + held_s, at_s, from_cores, held_s)
