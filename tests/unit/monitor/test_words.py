"""What rule peak says of a limit: limit_rules.md 3, and the same for a job of each state."""

import math

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from cpumond.monitor import rules
from cpumond.monitor.model import CpuReading, HeldBack, JobState, MonitorSettings, start_state
from cpumond.monitor.words import describe_limit, describe_next, find_not_lowered_until_s, held_ratio

PEAK = MonitorSettings(limit_rule="peak")
NOW_S = 1000.0
BASE = CpuReading(10.0, NOW_S)
HELD = HeldBack(9, 1.9, 900.0, 2.4, 0.2)
STATE = JobState(
    16.0, 3.2025, 16.0, 0.0, base=BASE, seen=BASE, peak_cores=3.05, peak_at_s=NOW_S - 14.0, caution=3.0,
    watched_s=1.9 / 0.0031, held=HELD,
)  # fmt: skip
STORY = (
    "a lowered limit held this job back 9 times, 1.9 s in all (0.31 % of its time, budget 0.40 %), last at 13:02:11 "
    "from 2.4 cores, restored after 0.2 s."
)


def limit(s: MonitorSettings = PEAK, **changes: object) -> str:
    return describe_limit(msgspec.structs.replace(STATE, **changes), s, NOW_S, "13:02:11")


def following(s: MonitorSettings = PEAK, hindrance: str = "", **changes: object) -> str:
    return describe_next(msgspec.structs.replace(STATE, **changes), s, NOW_S, hindrance)


def options(**given: object) -> MonitorSettings:
    return MonitorSettings(limit_rule="peak", **given)


def test_the_example_of_the_specification():
    assert limit() == (
        "3.2 = 3.05 (highest usage, 14 s ago, fading, half-life 40 s) + 5 %. The half-life is 40 s, not 5 s, because "
        + STORY
    )


SINCE = "(highest usage, 14 s ago, fading, half-life 40 s) + 5 %"
ENOUGH = f"3.2 = 3.05 {SINCE} would be enough, but"
LATER = "the next check decides that. "


@pytest.mark.parametrize(("changes", "start"), [
    ({"peak_cores": None}, "its usage has not been measured yet, so the limit is as it was found."),
    ({"base": None}, "its usage has not been measured yet, so the limit is as it was found."),
    ({"peak_at_s": NOW_S}, "3.2 = 3.05 (usage of the last check, half-life 40 s) + 5 %. "),
    ({"peak_at_s": -math.inf}, "3.2 = 3.05 (the initial value, fading, half-life 40 s) + 5 %. "),
    ({"peak_at_s": 900.0}, "3.2 = 3.05 (its usage was at least that 1 min 40 s ago, fading, half-life 40 s) + 5 %. "),
    ({"limit_cores": 3.3}, f"{ENOUGH} cuts of less than 5 % are not written. "),
    ({"limit_cores": 1.0, "peak_cores": 0.4},
     f"this is its floor (min_cpu_limit = 1); 0.42 = 0.4 {SINCE} would be less. "),
    ({"limit_cores": 1.2, "peak_cores": 0.4},
     f"1, its floor (min_cpu_limit = 1), would be enough for 0.42 = 0.4 {SINCE}, but {LATER}"),
    ({"limit_cores": 16.0, "peak_cores": 15.6}, f"16.38 = 15.6 {SINCE}, which is more than its maximum. "),
    ({"limit_cores": 16.0, "held": HeldBack(9, 1.9, NOW_S - 0.5, 2.4, 0.2)},
     f"the full request was restored at 13:02:11, because a limit of 2.4 held it back; {ENOUGH} {LATER}"),
    ({"limit_cores": 16.0, "started_at_s": NOW_S - 4.0},
     f"{ENOUGH} it is not lowered for another 6 s (nothing is lowered in the first 10 s). "),
    ({"limit_cores": 16.0, "hold_until_s": NOW_S + 30.0},
     f"{ENOUGH} it is not lowered for another 30 s (restore_hold). "),
    ({"limit_cores": 2.0}, f"3.2 = 3.05 {SINCE} would be more, but the next check decides that. "),
])  # fmt: skip
def test_where_a_limit_comes_from(changes, start):
    told = limit(**changes)
    assert told.startswith(start)
    assert told == start or told.removeprefix(start).startswith("The half-life is 40 s, not 5 s, because a lowered ")


@pytest.mark.parametrize(("given", "changes", "said"), [
    ({"startup_boost_s": 60.0}, {"started_at_s": 980.0, "limit_cores": 16.0}, "for another 40 s (startup_boost)."),
    ({"direction": "up-only"}, {"limit_cores": 16.0}, "but it is up-only."),
    ({"direction": "down-only"}, {"limit_cores": 2.0}, "would be more, but direction is down-only."),
    ({"min_limit_ratio": 0.5}, {"limit_cores": 8.0}, "this is its floor (min_limit_ratio = 0.5 of the cap); 3.2 = "),
    ({"reserve_ratio": 0.125}, {"limit_cores": 3.05 * 1.125}, " + 12.5 %. The"),
    ({"actuator": "weight"}, {}, "because its usage was above a lowered limit, or it waited for others, 9 times"),
    ({"throttle_budget": 0.0}, {}, "budget 0.00 %"),
])  # fmt: skip
def test_options_that_hold_it_are_named(given, changes, said):
    assert said in limit(options(**given), **changes)


@pytest.mark.parametrize(("changes", "end"), [
    ({"caution": 7.0}, "The half-life is 10 min 40 s, the longest, because " + STORY),
    ({"caution": 0.0}, "The half-life is 5 s, the shortest, although " + STORY),
    ({"held": HeldBack(), "watched_s": 120.0, "caution": 1.52},
     " began at 20 s and goes down to 5 s because no lowered limit has held this job back so far (2 min)."),
    ({"held": HeldBack(), "watched_s": 3600.0, "caution": 0.0},
     "The half-life is 5 s, the shortest: no lowered limit held this job back in 1 h."),
    ({"held": HeldBack(), "watched_s": 60.0, "caution": 4.0},
     "The half-life is 1 min 20 s, as learned earlier; no lowered limit held this job back in 1 min."),
    ({"held": HeldBack(1, 0.0, 900.0, 2.4, 0.0)},
     " (0.00 % of its time, budget 0.40 %), last at 13:02:11 from 2.4 cores, restored at once."),
    ({"held": HeldBack(2, 0.4, 900.0, 2.4, 0.2)}, "restored after 0.2 s."),
])  # fmt: skip
def test_why_the_half_life_is_what_it_is(changes, end):
    assert limit(**changes).endswith(end)


LOWERED = "; usage above {} raises it; one throttled period (checked every 200ms) restores all 16"


@pytest.mark.parametrize(("changes", "said"), [
    ({}, "hold: cuts of less than 5 % are not written, a cut is due in about 3 s" + LOWERED.format("3.05")),
    ({"limit_cores": 4.0}, "lower it to 3.15" + LOWERED.format("3.81")),
    ({"limit_cores": 2.0}, "raise it to 3.15" + LOWERED.format("1.9")),
    ({"limit_cores": 16.0}, "lower it to 3.15"),
    ({"limit_cores": 16.0, "peak_cores": 16.0},
     "hold: cuts of less than 5 % are not written, a cut is due in about 5.8 s"),
    ({"limit_cores": 1.0, "peak_cores": 0.4}, "hold: it is at its floor (min_cpu_limit = 1)" + LOWERED.format("0.952")),
    ({"limit_cores": 16.0, "started_at_s": NOW_S - 4.0},
     "hold: it is not lowered for another 6 s (nothing is lowered in the first 10 s)"),
    ({"base": None}, "the first one only takes the baseline"),
])  # fmt: skip
def test_the_next_check(changes, said):
    assert following(**changes) == said


def test_a_bound_that_holds_the_limit_is_told_instead_of_a_cut():
    note = "raised to 0.01 cores, the least quota that the kernel accepts"
    state = msgspec.structs.replace(STATE, limit_cores=4.0, no_cut_until_s=NOW_S + 30.0)
    said = f"hold: it is {note}; a cut is tried again in 30 s"
    assert describe_next(state, PEAK, NOW_S, notes=[note]).startswith(said)
    assert describe_next(state, PEAK, NOW_S).startswith("hold: it is held where it is by a bound; ")


def test_a_limit_that_is_not_written_is_told_as_what_would_have_been():
    assert "because a lowered limit, were it written, would have held this job back 9 times" in limit(is_written=False)
    assert "gives back" not in following(limit_cores=4.0, is_written=False)


def test_the_next_check_and_options():
    assert following(options(direction="up-only"), limit_cores=16.0) == "hold: it is up-only"
    told = following(options(direction="down-only"), limit_cores=2.0)
    assert told.startswith("would raise it, but direction is down-only; one throttled period")
    for pressure, why in (({}, " or a wait for more than 10 % of the time"), ({"pressure_restore_ratio": 0.0}, "")):
        told = following(options(actuator="weight", **pressure), limit_cores=4.0)
        assert told.endswith(f"; usage above the limit{why} (checked every 200ms) restores all 16")
    assert following(options(throttle_poll_s=0.0), limit_cores=4.0).endswith("; one throttled period restores all 16")
    assert following(hindrance="it is pinned", limit_cores=16.0) == "lower it to 3.15, not written: it is pinned"


def test_what_the_last_write_was_held_to_is_named():
    note = "held to 4 cores, min_cores_per_thread of each thread"
    told = describe_limit(msgspec.structs.replace(STATE, limit_cores=4.0), PEAK, NOW_S, "13:02:11", (note,))
    assert told.startswith(f"{ENOUGH} it is {note}. ")


def test_the_share_of_the_time_held_back():
    assert held_ratio(STATE) == pytest.approx(0.0031)
    assert held_ratio(start_state(4.0, 0.0)) == 0.0


CORES = st.floats(0.0, 64.0)
SETTINGS = st.builds(
    MonitorSettings,
    limit_rule=st.just("peak"),
    direction=st.sampled_from(["both", "up-only", "down-only"]),
    actuator=st.sampled_from(["quota", "weight", "guarantee"]),
    min_cpu_limit=st.sampled_from([0.0, 0.5, 1.0, 20.0]),
    min_limit_ratio=st.sampled_from([0.0, 0.25]),
    reserve_ratio=st.sampled_from([0.0, 0.05, 1.0]),
    restore_hold_s=st.sampled_from([0.0, 5.0]),
    startup_boost_s=st.sampled_from([0.0, 30.0]),
    throttle_budget=st.sampled_from([0.0, 0.004]),
)


@examples(150)
@given(SETTINGS, st.floats(0.01, 64.0), st.lists(st.tuples(CORES, st.integers(0, 10)), max_size=40))
def test_every_state_has_its_words_and_the_next_step_is_the_one_that_comes(s, hard_cores, uses):
    """The words about the next check against that check, with a use that is no higher than the peak."""
    state, total_cpu_s, throttled, at_s = start_state(hard_cores, 0.0), 0.0, 0, 0.0
    for usage_cores, periods in [*uses, (0.0, 0)]:
        told = describe_next(state, s, at_s)
        assert "nan" not in told + describe_limit(state, s, at_s, "12:00:00")
        at_s += 1.0
        throttled += periods
        total_cpu_s += usage_cores
        before, reading = state, CpuReading(total_cpu_s, at_s, nr_throttled=throttled)
        state, decision = rules.check(state, reading, at_s, s)
        if before.peak_cores is None or usage_cores > 0.5 * before.peak_cores or decision.kind == "restore":
            continue
        if told.startswith("lower"):
            assert decision.kind == "shrink"
        if told.startswith("raise"):
            assert decision.kind == "grow"
        if told.startswith("hold: cuts"):
            # Caution wears off in the check itself, which may carry a cut over the border.
            assert decision.new_cores > 0.94 * decision.old_cores
        if told.startswith(("hold: it is up-only", "would raise")):
            assert decision.kind == "hold"
        if told.startswith("hold: it is not lowered"):
            assert at_s <= find_not_lowered_until_s(before, s)
