"""Explain in sentences why rule ``peak`` has set a limit (limit_rules.md 3). Pure: makes text from a job's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cpumond.core.measures import count_cores, format_cores, format_duration, format_span
from cpumond.monitor.model import FIRST_CAUTION, JobState, MonitorSettings
from cpumond.monitor.peak import (
    EARLY_HOLD_S,
    FIRST_SECONDS,
    MAX_CAUTION,
    STEP,
    find_half_life_s,
    find_peak,
    find_target,
)
from cpumond.monitor.policy import compute_floor

ALIKE: Final = 1e-3
"""Limits count as equal if they differ by at most this fraction, because the kernel takes whole microseconds."""


def find_not_lowered_until_s(state: JobState, s: MonitorSettings) -> float:
    """Return the monotonic time before which rule ``peak`` does not cut the limit."""
    return max(state.hold_until_s, state.started_at_s + max(FIRST_SECONDS, s.startup_boost_s))


def describe_limit(state: JobState, s: MonitorSettings, now_s: float, held_at: str, notes: Sequence[str] = ()) -> str:
    """Explain where a job's limit comes from and why it is not lower. The text begins with a figure or a small letter.

    ``now_s`` is a monotonic time. ``held_at`` is the time of ``state.held`` as a text. ``notes`` explain why the last
    write set a limit different from the decision."""
    if state.peak_cores is None or state.base is None:
        return "its usage has not been measured yet, so the limit is as it was found."
    return f"{_describe_position(state, s, now_s, held_at, notes)} {_describe_half_life(state, s, held_at)}"


def _describe_position(state: JobState, s: MonitorSettings, now_s: float, held_at: str, notes: Sequence[str]) -> str:
    limit, hard, peak = state.limit_cores, state.hard_cores, find_peak(state, s)
    target, floor, asked = find_target(peak, hard, s), compute_floor(hard, (), s), peak * (1.0 + s.reserve_ratio)
    reserve = f"{_share(s.reserve_ratio)} %"
    total = f"{format_cores(asked)} = {format_cores(peak)} ({_describe_peak(state, s, now_s)}) + {reserve}"
    if _alike(limit, target):
        if asked > hard and not _alike(asked, hard):
            return f"{total}, which is more than its maximum."
        if asked < floor and not _alike(asked, floor):
            return f"this is its floor ({_describe_floor(s, hard)}); {total} would be less."
        return f"{total}."
    if target > limit:
        return f"{total} would be more, but {_why_not_raised(s)}."
    if asked < floor:
        total = f"{format_cores(floor)}, its floor ({_describe_floor(s, hard)}), would be enough for {total}"
    else:
        total = f"{total} would be enough"
    text = f"{total}, but {_why_not_lowered(state, s, now_s, notes)}."
    if not _was_just_given_back(state, s, now_s):
        return text
    low = format_cores(state.held.from_cores)
    return f"the full request was restored at {held_at}, because a limit of {low} held it back; {text}"


def _describe_peak(state: JobState, s: MonitorSettings, now_s: float) -> str:
    half_life = f"half-life {_span(find_half_life_s(state, s))}"
    if state.peak_at_s == -math.inf:
        return f"the initial value, fading, {half_life}"
    seconds = now_s - state.peak_at_s
    ago = "just now" if seconds < 1.0 else f"{format_span(seconds)} ago"
    if state.peak_at_s == state.held.at_s:
        return f"its usage was at least that {ago}, fading, {half_life}"
    if state.base is not None and state.peak_at_s >= state.base.at_s:
        return f"usage of the last check, {half_life}"
    return f"highest usage, {ago}, fading, {half_life}"


def _describe_half_life(state: JobState, s: MonitorSettings, held_at: str) -> str:
    now, shortest, held = _span(find_half_life_s(state, s)), _span(s.peak_memory_s), state.held
    watched = format_span(state.watched_s)
    if not held.count:
        worn_off = max(FIRST_CAUTION - s.throttle_budget * state.watched_s, 0.0)
        if abs(state.caution - worn_off) > 0.05:
            return f"The half-life is {now}, as learned earlier; no lowered limit held this job back in {watched}."
        if now == shortest:
            return f"The half-life is {now}, the shortest: no lowered limit held this job back in {watched}."
        return (
            f"The half-life began at {_span(s.peak_memory_s * 2.0**FIRST_CAUTION)} and goes down to {shortest} because "
            f"no lowered limit has held this job back so far ({watched})."
        )
    if not state.is_written:
        what = "a lowered limit, were it written, would have held this job back"
    elif not s.is_ceiling:
        what = "its usage was above a lowered limit"
        what += ", or it waited for others," if s.pressure_restore_ratio else ""
    else:
        what = "a lowered limit held this job back"
    back = "at once" if held.after_s <= 0.0 else f"after {format_span(held.after_s)}"
    share, budget = _share(held_ratio(state), 2), _share(s.throttle_budget, 2)
    story = (
        f"{what} {_times(held.count)}, {format_span(held.held_s)} in all ({share} % of its time, budget {budget} %), "
        f"last at {held_at} from {count_cores(held.from_cores)}, restored {back}."
    )
    if now == shortest:
        return f"The half-life is {now}, the shortest, although {story}"
    longest = ", the longest," if state.caution >= MAX_CAUTION else f", not {shortest},"
    return f"The half-life is {now}{longest} because {story}"


def held_ratio(state: JobState) -> float:
    """Return the fraction of the observed time in which a lowered limit held the job back, in [0, 1]."""
    return min(state.held.held_s / state.watched_s, 1.0) if state.watched_s > 0.0 else 0.0


def describe_next(
    state: JobState, s: MonitorSettings, now_s: float, hindrance: str = "", notes: Sequence[str] = ()
) -> str:
    """Describe what the next check does if usage stays as in the last check, and what else would move the limit.

    ``hindrance`` says why no step is written, for example "it is pinned". ``notes`` are as in ``describe_limit``."""
    if state.base is None:
        return "the first one only takes the baseline"
    unwritten = f", not written: {hindrance}" if hindrance else ""
    limit, hard, half_life_s = state.limit_cores, state.hard_cores, find_half_life_s(state, s)
    floor = compute_floor(hard, (), s)
    peak = find_peak(state, s) * 2.0 ** (-s.check_period_s / half_life_s)
    target = find_target(peak, hard, s)
    if target > limit and not _alike(limit, target):
        text = f"raise it to {format_cores(target)}{unwritten}"
        if s.direction == "down-only":
            text = f"would raise it, but {_why_not_raised(s)}"
    elif limit <= floor or _alike(limit, floor):
        text = f"hold: it is at its floor ({_describe_floor(s, hard)})"
    elif target > limit * (1.0 - STEP):
        text = "hold: cuts of less than 5 % are not written"
        if s.direction != "up-only" and floor <= limit * (1.0 - STEP) and peak > 0.0:
            wait_s = half_life_s * math.log2(peak * (1.0 + s.reserve_ratio) / (limit * (1.0 - STEP)))
            text += f", a cut is due in about {format_span(max(wait_s, 0.0) + s.check_period_s)}"
    elif s.direction == "up-only" or now_s + s.check_period_s <= find_not_lowered_until_s(state, s):
        text = f"hold: {_why_not_lowered(state, s, now_s)}"
    elif (left_s := state.no_cut_until_s - now_s) > s.check_period_s:
        bound = _find_bound(notes) or "held where it is by a bound"
        text = f"hold: it is {bound}; a cut is tried again in {format_span(left_s)}"
    else:
        text = f"lower it to {format_cores(target)}{unwritten}"
    if limit >= hard:
        return text
    if s.direction != "down-only":
        text += f"; usage above {format_cores(limit / (1.0 + s.reserve_ratio))} raises it"
    if not state.is_written:
        return text
    sign = "one throttled period"
    if not s.is_ceiling:
        waits = f" or a wait for more than {_share(s.pressure_restore_ratio or 0.0)} % of the time"
        sign = f"usage above the limit{waits if s.pressure_restore_ratio else ''}"
    looks = f" (checked every {format_duration(s.poll_s)})" if s.poll_s else ""
    return f"{text}; {sign}{looks} restores all {format_cores(hard)}"


def _why_not_lowered(state: JobState, s: MonitorSettings, now_s: float, notes: Sequence[str] = ()) -> str:
    target = find_target(find_peak(state, s), state.hard_cores, s)
    if s.direction == "up-only":
        return "it is up-only"
    if target > state.limit_cores * (1.0 - STEP):
        return "cuts of less than 5 % are not written"
    left_s = find_not_lowered_until_s(state, s) - now_s
    if left_s > 0.0:
        if now_s < state.hold_until_s and state.hold_until_s >= now_s + left_s:
            is_early = s.early_restore == "use" and left_s <= EARLY_HOLD_S
            why = "early_restore" if is_early else "restore_hold"
        else:
            boosted = s.startup_boost_s > FIRST_SECONDS
            why = "startup_boost" if boosted else f"nothing is lowered in the first {FIRST_SECONDS:g} s"
        return f"it is not lowered for another {format_span(left_s)} ({why})"
    bound = _find_bound(notes)
    return f"it is {bound}" if bound else "the next check decides that"


def _find_bound(notes: Sequence[str]) -> str:
    """Return the note on why the last write did not set a lower limit; "" if there is none."""
    return next((note for note in notes if note.startswith(("held to", "raised to"))), "")


def _why_not_raised(s: MonitorSettings) -> str:
    return "direction is down-only" if s.direction == "down-only" else "the next check decides that"


def _was_just_given_back(state: JobState, s: MonitorSettings, now_s: float) -> bool:
    recent_s = 2.0 * s.check_period_s + s.restore_hold_s
    return state.limit_cores >= state.hard_cores and state.held.count > 0 and now_s - state.held.at_s <= recent_s


def _describe_floor(s: MonitorSettings, hard_cores: float) -> str:
    if s.min_limit_ratio * hard_cores > s.min_cpu_limit:
        return f"min_limit_ratio = {s.min_limit_ratio:g} of the cap"
    return f"min_cpu_limit = {s.min_cpu_limit:g}"


def _alike(a: float, b: float) -> bool:
    return abs(a - b) <= ALIKE * max(a, b)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _span(seconds: float) -> str:
    """Format a half-life; one of 1.5 s or more in whole seconds."""
    return format_span(round(seconds) if seconds >= 1.5 else seconds)


def _share(ratio: float, digits: int | None = None) -> str:
    """Format a ratio in percent, with ``digits`` decimals; None: with as many decimals as necessary."""
    return f"{100.0 * ratio:.6g}" if digits is None else f"{100.0 * ratio:.{digits}f}"
