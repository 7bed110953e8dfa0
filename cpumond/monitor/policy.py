"""Rule ``document`` (semantics.md 1.3, 1.4): measure usage, smooth, vote, decide; and the parts that all rules share.

``check`` measures the usage and then calls the step function of a rule; ``step`` is that of rule ``document``.
``rules.py`` lists the rules by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from cpumond.monitor.model import CpuReading, Decision, JobState, Kind, MonitorSettings
from cpumond.monitor.protect import account_throttling, compute_pressure_ratio, compute_throttled_ratio, needs_restore

Stepped = tuple[JobState, Decision]


def check(
    state: JobState,
    reading: CpuReading | None,
    now_s: float,
    s: MonitorSettings,
    step_by_rule: Callable[..., Stepped] | None = None,
) -> Stepped:
    """Perform one check in the order of section 1.3; ``step_by_rule`` decides (None: ``step``).

    If ``reading`` is None (a failed sample), the state stays the same, with its baseline. If a counter has fallen or
    ``identity`` has changed, ``reading`` is a new baseline: the smoothed value restarts at the CPU that the job can
    have, and there is no vote, since the difference of the counters is not usage of the job."""
    if reading is None or now_s < state.started_at_s + s.start_delay_s:
        return state, Decision("delay", state.limit_cores, state.limit_cores)
    base = state.base
    if base is None:
        return rebase(state, reading), Decision("base", state.limit_cores, state.limit_cores)
    if reading.identity != base.identity or reading.total_cpu_s < base.total_cpu_s:
        anew = msgspec.structs.replace(
            state,
            base=reading,
            seen=reading,
            smoothed_cores=None,
            seed_cores=state.hard_cores,
            window=(),
            usages=(),
            peak_cores=None,
        )
        return anew, Decision("base", state.limit_cores, state.limit_cores)
    interval_s = reading.at_s - base.at_s
    if interval_s <= 0.0:
        return state, Decision("delay", state.limit_cores, state.limit_cores)
    usage_cores = (reading.total_cpu_s - base.total_cpu_s) / interval_s
    ratio = compute_throttled_ratio(base, reading) if reading.nr_throttled != base.nr_throttled else 0.0
    pressure_ratio = compute_pressure_ratio(base, reading) if s.pressure_restore_ratio else 0.0
    return (step_by_rule or step)(state, reading, usage_cores, interval_s, ratio, s, pressure_ratio)


def look(state: JobState, reading: CpuReading, s: MonitorSettings) -> Stepped | None:
    """Look at the job between two checks. If a period was throttled since ``state.seen``, restore the full request, and
    treat the time since the last check as if a check had ended it. Otherwise return None."""
    base, seen = state.base, state.seen
    if base is None or seen is None or state.limit_cores >= state.hard_cores:
        return None
    if reading.identity != base.identity or reading.nr_throttled <= seen.nr_throttled or reading.at_s <= base.at_s:
        return None
    interval_s = reading.at_s - base.at_s
    usage_cores = max(reading.total_cpu_s - base.total_cpu_s, 0.0) / interval_s
    after, decision = step(state, reading, usage_cores, interval_s, 1.0, s)
    if decision.kind != "restore":
        return None
    ratio = compute_throttled_ratio(seen, reading)
    return after, msgspec.structs.replace(decision, throttled_ratio=ratio, by_look=True)


def rebase(state: JobState, reading: CpuReading | None) -> JobState:
    """Start a new interval at ``reading`` (None: at the next good reading), after a late tick, a suspend, or a pause.

    Usage and throttled time since the last check are unreliable and not counted. The throttled periods since then are
    counted at the next look or check, because they show that a limit held the job back."""
    before, seen = state.seen, reading
    if before is None or reading is None:
        seen = before or reading
    elif before.identity == reading.identity and before.nr_throttled < reading.nr_throttled:
        seen = msgspec.structs.replace(reading, nr_periods=before.nr_periods, nr_throttled=before.nr_throttled)
    return msgspec.structs.replace(state, base=reading, seen=seen)


def step(
    state: JobState,
    base: CpuReading,
    usage_cores: float,
    interval_s: float,
    throttled_ratio: float,
    s: MonitorSettings,
    pressure_ratio: float = 0.0,
) -> tuple[JobState, Decision]:
    """Apply 1.3 points 5 to 9; ``usage_cores`` were measured over ``interval_s``. ``base`` begins the next interval."""
    hard, limit = state.hard_cores, state.limit_cores
    kind: Kind
    votes_sum: int | None
    new_limit, hold_until_s = limit, state.hold_until_s
    if needs_restore(state, throttled_ratio, s, pressure_ratio, usage_cores):
        kind, votes_sum, smoothed = "restore", None, hard
        window: tuple[float, ...] = ()
        usages: tuple[float, ...] = ()
        new_limit = hard
        hold_until_s = base.at_s + s.restore_hold_s
    else:
        smoothed = smooth(state, usage_cores, s)
        usages = _push(state.usages, usage_cores, s.vote_window_size) if s.headroom_ratio else ()
        window, votes_sum = VOTE_MODES[s.vote_mode](state.window, smoothed, limit, s, throttled_ratio)
        new_limit = decide(votes_sum, state, usages, base.at_s, s)
        kind = "grow" if new_limit > limit else "shrink" if new_limit < limit else "hold"
        if s.vote_mode == "ytsaurus" and votes_sum is not None:
            # A decision clears the votes, even if the limit is at its bound. Without one, the oldest vote is dropped.
            window = () if abs(votes_sum) > s.vote_decision_threshold else window[1:]
    throttled_cpu_s, late_cpu_s = account_throttling(state, base, s)
    after = JobState(
        hard,
        new_limit,
        state.seed_cores,
        state.started_at_s,
        smoothed,
        window,
        usages,
        base,
        hold_until_s,
        state.smoothed_cpu_s + smoothed * interval_s,
        state.preemptible_cpu_s + (hard - new_limit) * interval_s,
        state.max_cpu_s + hard * interval_s,
        throttled_cpu_s,
        late_cpu_s,
        base,
        state.peak_cores,
        state.peak_at_s,
        state.caution,
        state.watched_s,
        state.held,
        state.cfs_period_s,
        state.no_cut_until_s,
        state.is_written,
    )
    return after, Decision(kind, limit, new_limit, usage_cores, votes_sum, interval_s, throttled_ratio, pressure_ratio)


def smooth(state: JobState, usage_cores: float, s: MonitorSettings) -> float:
    """Smooth by 1.3 point 5: the first value is the CPU that the job can have (or the first usage), then
    a*u + (1-a)*smoothed.

    If the job was adopted with a lower limit, the first value is the highest one that does not vote to grow."""
    if state.smoothed_cores is None:
        if s.smoothing_seed == "first_value":
            return usage_cores
        adopted = state.seed_cores < state.hard_cores
        return s.relative_upper_bound * state.seed_cores if adopted else state.seed_cores
    return s.smoothing_factor * usage_cores + (1.0 - s.smoothing_factor) * state.smoothed_cores


def count_document_votes(
    window: tuple[float, ...], smoothed: float, limit: float, s: MonitorSettings, throttled_ratio: float
) -> tuple[tuple[float, ...], int | None]:
    """Count votes as in the YTsaurus documentation (1.4): compare the last W smoothed values with the current limit.

    With ``throttle_vote``, the value of a throttled check is stored as infinity, so it votes +1 against any limit."""
    window = _push(window, math.inf if s.throttle_vote and throttled_ratio > 0.0 else smoothed, s.vote_window_size)
    if len(window) < s.vote_window_size:
        return window, None
    lower, upper = s.relative_lower_bound * limit, s.relative_upper_bound * limit
    votes_sum = 0
    for value in window:
        if value < lower:
            votes_sum -= 1
        elif value > upper:
            votes_sum += 1
    return window, votes_sum


def count_ytsaurus_votes(
    window: tuple[float, ...], smoothed: float, limit: float, s: MonitorSettings, throttled_ratio: float
) -> tuple[tuple[float, ...], int | None]:
    """Count votes as in YTsaurus' code (1.3 points 6 and 7): each check adds a vote against the limit at that time."""
    if limit == 0.0:
        vote = 0
    elif s.throttle_vote and throttled_ratio > 0.0:
        vote = 1
    else:
        vote = compute_vote(smoothed / limit, s)
    window = _push(window, vote, s.vote_window_size)
    return window, int(sum(window)) if len(window) >= s.vote_window_size else None


def compute_vote(relative: float, s: MonitorSettings) -> int:
    """Vote by 1.3 point 6: -1 if strictly below ``relative_lower_bound``, +1 if strictly above
    ``relative_upper_bound``, else 0."""
    return -1 if relative < s.relative_lower_bound else 1 if relative > s.relative_upper_bound else 0


def decide(
    votes_sum: int | None, state: JobState, usages: tuple[float, ...], now_s: float, s: MonitorSettings
) -> float:
    """Return the new limit in cores by 1.3 point 7; the current limit if the votes are not enough.

    The votes must exceed the threshold. A limit of 0 never changes (1.4). ``direction``, ``startup_boost`` and
    ``restore_hold`` can keep the current limit; ``min_limit_ratio`` and ``headroom_ratio`` raise the floor."""
    limit = state.limit_cores
    if votes_sum is None or limit == 0.0:
        return limit
    if votes_sum > s.vote_decision_threshold:
        return limit if s.direction == "down-only" else min(limit * s.increase_coefficient, state.hard_cores)
    if votes_sum < -s.vote_decision_threshold:
        held = now_s < state.hold_until_s or now_s < state.started_at_s + s.startup_boost_s
        if held or s.direction == "up-only":
            return limit
        return min(max(limit * s.decrease_coefficient, compute_floor(state.hard_cores, usages, s)), limit)
    return limit


def compute_floor(hard_cores: float, usages: tuple[float, ...], s: MonitorSettings) -> float:
    """Return the floor of the limit in cores: the maximum of ``min_cpu_limit`` (1.2), ``min_limit_ratio`` of
    ``hard_cores``, and the 99th percentile of ``usages`` plus ``headroom_ratio``; but at most ``hard_cores``."""
    floor = max(s.min_cpu_limit, s.min_limit_ratio * hard_cores)
    if s.headroom_ratio and usages:
        rank = math.ceil(0.99 * len(usages)) - 1
        floor = max(floor, (1.0 + s.headroom_ratio) * sorted(usages)[rank])
    return min(hard_cores, floor)


def reject(state: JobState, decision: Decision) -> JobState:
    """Return the state after a change of the limit failed (1.3 point 8): the limit stays at its old value, and
    ``preemptible_cpu_s`` counts with the old limit."""
    return settle(state, decision, decision.old_cores)


def settle(state: JobState, decision: Decision, applied_cores: float) -> JobState:
    """Return the state after ``decision``. ``applied_cores``: the limit in force; the kernel's bounds may change it."""
    if applied_cores == state.limit_cores:
        return state
    return msgspec.structs.replace(
        state,
        limit_cores=applied_cores,
        preemptible_cpu_s=state.preemptible_cpu_s + (decision.new_cores - applied_cores) * decision.interval_s,
    )


def _push(window: tuple[float, ...], value: float, size: int) -> tuple[float, ...]:
    return (*window[len(window) - size + 1 :], value) if len(window) >= size else (*window, value)


VoteCounter = Callable[
    [tuple[float, ...], float, float, MonitorSettings, float], tuple[tuple[float, ...], "int | None"]
]
VOTE_MODES: Final[dict[str, VoteCounter]] = {"document": count_document_votes, "ytsaurus": count_ytsaurus_votes}
"""Value of ``vote_mode`` -> function that updates a window and sums its votes."""


def move_hard(state: JobState, hard_cores: float) -> JobState:
    """Return the state after a change of ``hard_cores``, for example because of a new request or a quota above.

    A limit equal to the old ``hard_cores`` becomes the new value; any other limit is capped at the new value. The same
    holds for the seed of a job without a smoothed value. The window is compared with the new limit."""
    if hard_cores == state.hard_cores:
        return state
    both = (state.limit_cores, state.seed_cores)
    limit, seed = (hard_cores if cores >= state.hard_cores else min(cores, hard_cores) for cores in both)
    return msgspec.structs.replace(state, hard_cores=hard_cores, limit_cores=limit, seed_cores=seed)


def restart_at(state: JobState, limit_cores: float, now_s: float) -> JobState:
    """Restart the window at a given limit, which another program, a new mode or a different rule has set.

    The sums continue, and so do caution and ``held`` of rule ``peak``. Throttling so far is not counted, because it
    happened under the previous limit."""
    return msgspec.structs.replace(
        state,
        limit_cores=min(limit_cores, state.hard_cores),
        seed_cores=min(limit_cores, state.hard_cores),
        smoothed_cores=None,
        window=(),
        usages=(),
        base=None,
        seen=None,
        peak_cores=None,
        hold_until_s=max(state.hold_until_s, now_s),
        no_cut_until_s=-math.inf,
    )
