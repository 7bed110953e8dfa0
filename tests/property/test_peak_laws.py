"""Laws of rule ``peak`` over any course of checks and looks, and the rule written down again from its text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import CPU_LIMITS, RATIOS, thousandths

from cpumond.monitor import rules
from cpumond.monitor.model import CpuReading, Decision, JobState, MonitorSettings, start_state
from cpumond.monitor.policy import compute_floor

many = examples(80)


PLAIN = st.builds(
    MonitorSettings,
    limit_rule=st.just("peak"),
    throttle_budget=RATIOS | st.just(0.004),
    reserve_ratio=st.just(0.05) | thousandths(0, 2),
    peak_memory_s=st.just(5.0) | thousandths(0.1, 100),
    min_cpu_limit=thousandths(0, 5),
)
"""What limit_rules.md 2 speaks of, and nothing else."""


@st.composite
def peak_settings(draw: st.DrawFn) -> MonitorSettings:
    """Those of the rule; the defaults are common, and so is a floor below which courses have room to move."""
    return msgspec.structs.replace(
        draw(PLAIN),
        min_cpu_limit=draw(st.sampled_from([1.0, 0.0]) | thousandths(0, 20)),
        min_limit_ratio=draw(st.just(0.0) | RATIOS),
        direction=draw(st.sampled_from(["both", "both", "both", "up-only", "down-only"])),
        restore_hold_s=draw(st.just(0.0) | thousandths(0, 50)),
        startup_boost_s=draw(st.just(0.0) | thousandths(0, 50)),
    )


@dataclass(frozen=True)
class Event:
    """A reading at a check, or at a look between two."""

    is_check: bool
    reading: CpuReading


@dataclass(frozen=True)
class Course:
    """A job's CPU in cores and what was read of it."""

    hard_cores: float
    events: tuple[Event, ...]


@st.composite
def courses(draw: st.DrawFn) -> Course:
    """Stretches of use as a share of what was ordered, each of some checks with looks between; some are throttled."""
    hard = draw(CPU_LIMITS)
    now = CpuReading(0.0, 0.0)
    events = [Event(True, now)]
    stretch = st.tuples(
        st.sampled_from([10, 30, 60]) | st.integers(1, 30),
        st.sampled_from([0.0, 0.1, 0.5, 1.0]) | thousandths(0, 1.5),
        st.sampled_from([1.0, 1.0, 0.2]) | thousandths(0.001, 30),
        st.integers(0, 4),
        st.sampled_from([0, 0, 0, 1]) | st.integers(0, 12),
    )
    for checks, level, step_s, looks, throttled in draw(st.lists(stretch, min_size=1, max_size=6)):
        for number in range(checks * (looks + 1)):
            now = CpuReading(
                now.total_cpu_s + level * hard * step_s,
                now.at_s + step_s,
                0,
                now.nr_periods + 12,
                now.nr_throttled + (throttled if number % 5 == 4 else 0),
            )
            events.append(Event(number % (looks + 1) == looks, now))
    return Course(hard, tuple(events))


def walk(course: Course, s: MonitorSettings) -> Iterator[tuple[JobState, Event, Decision | None, JobState]]:
    """Each event: state before, event, decision (None for a look that says nothing), state after."""
    state = start_state(course.hard_cores, 0.0)
    for event in course.events:
        before, decision = state, None
        if event.is_check:
            state, decision = rules.check(state, event.reading, event.reading.at_s, s)
        elif (found := rules.look(state, event.reading, s)) is not None:
            state, decision = found
        yield before, event, decision, state


def follow_the_text(course: Course, s: MonitorSettings) -> list[float]:
    """limit_rules.md 2 as one straight loop: the limit after each event."""
    hard = course.hard_cores
    floor = min(hard, s.min_cpu_limit)
    limit = peak = hard
    caution = 2.0
    first, *others = course.events
    at_s, total_cpu_s, seen = first.reading.at_s, first.reading.total_cpu_s, first.reading.nr_throttled
    limits = [limit]
    for event in others:
        r = event.reading
        n, seen_now = r.nr_throttled - seen, r.nr_throttled
        hit_s = n * 0.1 if limit < hard else 0.0
        if event.is_check:
            dt = r.at_s - at_s
            used = (r.total_cpu_s - total_cpu_s) / dt
            at_s, total_cpu_s, seen = r.at_s, r.total_cpu_s, seen_now
            caution = min(max(caution + (hit_s - s.throttle_budget * dt) / 1.0, 0.0), 7.0)
            peak = min(max(used, peak * 2.0 ** (-dt / (s.peak_memory_s * 2.0**caution))), hard)
            if n > 0 and limit < hard:
                peak = max(peak, limit)
                limit = hard
            else:
                t = min(hard, max(floor, peak * (1.0 + s.reserve_ratio)))
                if t > limit or (t <= limit * (1.0 - 0.05) and r.at_s > 10.0):
                    limit = t
        elif n > 0 and limit < hard:
            seen = seen_now
            caution = min(max(caution + hit_s, 0.0), 7.0)
            peak = max(peak, limit)
            limit = hard
        limits.append(limit)
    return limits


@many
@given(courses(), PLAIN)
def test_the_rule_follows_its_text(course, s):
    assert [after.limit_cores for *_, after in walk(course, s)] == follow_the_text(course, s)


@many
@given(courses(), peak_settings())
def test_the_limit_stays_in_its_bounds_and_the_caution_between_0_and_7(course, s):
    floor = compute_floor(course.hard_cores, (), s)
    for _, _, _, after in walk(course, s):
        assert floor <= after.limit_cores <= course.hard_cores
        assert 0.0 <= after.caution <= 7.0


@many
@given(courses(), peak_settings())
def test_a_throttled_period_below_cpu_limit_gives_everything_back_at_once(course, s):
    for before, event, decision, after in walk(course, s):
        if before.seen is None or before.limit_cores >= course.hard_cores:
            assert decision is None or decision.kind != "restore"
        elif event.reading.nr_throttled > before.seen.nr_throttled:
            assert decision is not None
            assert (decision.kind, after.limit_cores) == ("restore", course.hard_cores)
            assert after.peak_cores is not None
            assert after.peak_cores >= before.limit_cores
        else:
            assert decision is None or decision.kind != "restore"


@many
@given(courses(), peak_settings())
def test_a_look_with_nothing_new_says_nothing(course, s):
    for _, event, _, after in walk(course, s):
        assert rules.look(after, event.reading, s) is None
        later = msgspec.structs.replace(event.reading, at_s=event.reading.at_s + 1.0, nr_periods=10**6)
        if after.seen is not None and after.seen.nr_throttled == later.nr_throttled:
            assert rules.look(after, later, s) is None


@many
@given(courses(), peak_settings())
def test_no_decision_is_a_write_of_the_same_value_or_a_small_cut(course, s):
    for before, event, decision, after in walk(course, s):
        if decision is None:
            assert after == before
            continue
        assert (decision.old_cores, decision.new_cores) == (before.limit_cores, after.limit_cores)
        assert decision.changes == (decision.kind in ("grow", "shrink", "restore"))
        if decision.kind == "shrink":
            assert event.is_check
            assert decision.new_cores <= decision.old_cores * 0.95
            assert s.direction != "up-only"


@many
@given(courses(), peak_settings())
def test_what_was_held_back_beyond_the_budget_is_in_the_caution(course, s):
    """It is a bounded sum: what the budget did not cover shows in it, except for what the bound of 7 cut off."""
    over_s, cut_s = 0.0, 0.0
    for before, _, decision, after in walk(course, s):
        held_s = after.held.held_s - before.held.held_s
        interval_s = decision.interval_s if decision is not None else 0.0
        over_s += held_s - s.throttle_budget * interval_s
        cut_s += max(before.caution + held_s - s.throttle_budget * interval_s - 7.0, 0.0)
        assert over_s <= after.caution - 2.0 + cut_s + 1e-6
        assert math.isclose(after.watched_s, before.watched_s + interval_s, rel_tol=1e-12)


def find_held_back_ratio_of_an_adversary(s: MonitorSettings, lost_periods: int, checks: int) -> float:
    """Share of the time in which a job is held back that wants nothing while it has everything, and nearly everything
    for a second as soon as it has less; ``lost_periods`` pass until that is seen, by a look if they are few."""
    hard, state, total, throttled = 16.0, start_state(16.0, 0.0), 0.0, 0
    for second in range(checks):
        if state.limit_cores < hard:
            throttled += lost_periods
            if lost_periods < 5:
                found = rules.look(state, CpuReading(total, second + 0.2, 0, 10 * second, throttled), s)
                assert found is not None
                state, _ = found
            total += hard * 0.8
        now = CpuReading(total, second + 1.0, 0, 10 * second, throttled)
        state, _ = rules.check(state, now, now.at_s, s)
    return throttled * 0.1 / checks


@pytest.mark.parametrize(
    ("budget", "lost_periods"), [(0.006, 2), (0.01, 2), (0.03, 2), (0.02, 5), (0.03, 5)], ids=lambda value: f"{value}"
)
def test_what_an_adversary_is_held_back_converges_to_the_budget(budget, lost_periods):
    s = MonitorSettings(limit_rule="peak", throttle_budget=budget)
    hours = 20
    ratio = find_held_back_ratio_of_an_adversary(s, lost_periods, hours * 3600)
    # From the caution of a new job to the greatest one takes 5 s of being held back, once.
    assert 0.8 * budget <= ratio <= budget + 5.0 / (hours * 3600)


def test_by_default_an_adversary_is_held_back_for_less_than_a_200th():
    # The greatest caution bounds what a smaller budget can do: a peak that fades by one step in 47 s.
    assert find_held_back_ratio_of_an_adversary(MonitorSettings(limit_rule="peak"), 2, 20 * 3600) <= 0.005
