"""One check of the monitor, rule by rule of semantics.md 1.2 to 1.7, with the numbers that stand there."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from cpumond.monitor.model import CpuReading, Decision, JobState, MonitorSettings, start_state
from cpumond.monitor.policy import (
    VOTE_MODES,
    check,
    compute_floor,
    compute_vote,
    count_document_votes,
    count_ytsaurus_votes,
    decide,
    move_hard,
    rebase,
    reject,
    restart_at,
    settle,
    smooth,
    step,
)

DEFAULTS = MonitorSettings()
YTSAURUS = MonitorSettings(vote_mode="ytsaurus")
BOTH_MODES = pytest.mark.parametrize("vote_mode", sorted(VOTE_MODES))

Usage = float | Callable[[JobState], float]


def steps(
    state: JobState, usage: Usage, checks: int, s: MonitorSettings, throttled_ratio: float = 0.0
) -> list[tuple[Decision, JobState]]:
    """``checks`` checks one second apart after the base check, with a fixed or a computed usage."""
    results = []
    at_s = state.base.at_s if state.base is not None else 0.0
    for _ in range(checks):
        at_s += 1.0
        usage_cores = usage(state) if callable(usage) else usage
        state, decision = step(state, CpuReading(0.0, at_s), usage_cores, 1.0, throttled_ratio, s)
        results.append((decision, state))
    return results


def changes(results: list[tuple[Decision, JobState]]) -> list[int]:
    """Numbers of the checks that changed the limit, 1-based, the base check being number 1."""
    return [number for number, (decision, _) in enumerate(results, 2) if decision.changes]


def job(limit: float, hard: float = 10.0, smoothed: float | None = None, window: tuple[float, ...] = ()) -> JobState:
    return msgspec.structs.replace(start_state(hard, 0.0, limit), smoothed_cores=smoothed, window=window)


# --- 1.3, one check, in order


def test_failed_sample_changes_nothing_and_the_next_good_check_covers_the_longer_real_interval():
    state, _ = check(start_state(10.0, 0.0), CpuReading(0.0, 0.0), 0.0, DEFAULTS)
    failed, decision = check(state, None, 1.0, DEFAULTS)
    assert failed is state
    assert decision == Decision("delay", 10.0, 10.0)
    _, decision = check(failed, CpuReading(6.0, 2.0), 2.0, DEFAULTS)
    assert (decision.usage_cores, decision.interval_s) == (3.0, 2.0)


def test_two_readings_of_the_same_moment_are_no_check():
    state = rebase(start_state(10.0, 0.0), CpuReading(1.0, 5.0))
    after, decision = check(state, CpuReading(2.0, 5.0), 5.0, DEFAULTS)
    assert after is state
    assert decision.kind == "delay"


@pytest.mark.parametrize("reading", [CpuReading(99.0, 11.0, identity=7), CpuReading(200.0, 11.0, identity=8)])
def test_new_identity_or_a_counter_going_backwards_is_a_new_baseline_without_a_vote(reading):
    state = msgspec.structs.replace(
        job(5.0, smoothed=3.0, window=(3.0, 3.0)),
        base=CpuReading(100.0, 10.0, identity=7),
        usages=(3.0,),
        max_cpu_s=9.0,
    )
    after, decision = check(state, reading, 11.0, DEFAULTS)
    assert decision == Decision("base", 5.0, 5.0)
    assert (after.base, after.smoothed_cores, after.window, after.usages) == (reading, None, (), ())
    assert (after.limit_cores, after.max_cpu_s) == (5.0, 9.0)
    again, _ = step(after, reading, 0.0, 1.0, 0.0, DEFAULTS)
    assert again.smoothed_cores == 10.0


@pytest.mark.parametrize(
    ("relative", "vote"),
    [(0.0, -1), (math.nextafter(0.6, 0), -1), (0.6, 0), (0.75, 0), (0.9, 0), (math.nextafter(0.9, 1), 1), (2.0, 1)],
)
def test_vote_minus_1_below_lower_else_plus_1_above_upper_else_0_both_strict(relative, vote):
    assert compute_vote(relative, DEFAULTS) == vote
    window = (relative * 8.0,) * 4
    assert count_document_votes(window, relative * 8.0, 8.0, DEFAULTS, 0.0)[1] == vote * 5


def test_shrink_never_raises_a_limit_below_the_floor():
    assert decide(-5, job(0.5), (), 0.0, DEFAULTS) == 0.5


def test_votes_are_cleared_after_a_decision_and_otherwise_the_oldest_is_dropped():
    decided = steps(job(5.0, smoothed=5.0, window=(1, 1, 1, 1)), 5.0, 1, YTSAURUS)[0]
    assert (decided[0].kind, decided[0].votes_sum, decided[1].window) == ("grow", 5, ())
    held = steps(job(5.0, smoothed=5.0, window=(-1, 0, 1, 1)), 5.0, 1, YTSAURUS)[0]
    assert (held[0].kind, held[0].votes_sum, held[1].window) == ("hold", 2, (0, 1, 1, 1))


def test_step_8_on_failure_soft_keeps_its_old_value_and_the_votes_stay_cleared():
    state = job(5.0, smoothed=5.0, window=(1, 1, 1, 1))
    decision, after = steps(state, 5.0, 1, YTSAURUS)[0]
    assert after.limit_cores == 7.25
    failed = reject(after, decision)
    assert (failed.limit_cores, failed.window, failed.smoothed_cores) == (5.0, (), 5.0)
    assert changes(steps(failed, 5.0, 9, YTSAURUS)) == [6]


def test_a_limit_moved_by_the_kernel_is_settled_as_it_was_applied():
    decision, after = steps(job(8.0, smoothed=0.0, window=(0.0,) * 4), 0.0, 1, DEFAULTS)[0]
    settled = settle(after, decision, 7.8)
    assert settled.limit_cores == 7.8
    assert settled.preemptible_cpu_s == pytest.approx(2.2)
    assert settle(after, decision, after.limit_cores) is after


# --- 1.1 and 1.4, the facts


@pytest.mark.parametrize(("s", "checks"), [(DEFAULTS, 1), (YTSAURUS, 5)], ids=["document", "ytsaurus"])
def test_idle_job_10_to_1_takes_76_changes_of_so_many_checks_each_from_check_number_10(s, checks):
    results = steps(start_state(10.0, 0.0), 0.0, 500, s)
    assert changes(results) == list(range(10, 10 + 76 * checks, checks))
    assert results[-1][1].limit_cores == 1.0


@BOTH_MODES
def test_steady_usage_5_on_limit_10_takes_6_changes_and_ends_at_8_32972(vote_mode):
    results = steps(start_state(10.0, 0.0), 5.0, 500, MonitorSettings(vote_mode=vote_mode))
    assert len(changes(results)) == 6
    limit = results[-1][1].limit_cores
    assert limit == pytest.approx(10 * 0.97**6) == pytest.approx(8.32972, abs=5e-6)
    assert 5 / limit == pytest.approx(0.60026, abs=5e-6)


def test_growing_from_1_when_the_job_always_uses_its_limit_is_the_same_sequence_in_both_forms():
    sequences = [
        [(number, state.limit_cores) for number, (_, state) in enumerate(results) if results[number][0].changes]
        for results in (steps(job(1.0, smoothed=0.0), lambda st: st.limit_cores, 300, s) for s in (DEFAULTS, YTSAURUS))
    ]
    assert sequences[0] == sequences[1]
    assert [limit for _, limit in sequences[0]] == pytest.approx([1.45**n for n in range(1, 7)] + [10.0])
    numbers = [number for number, _ in sequences[0]]
    assert {later - earlier for earlier, later in pairwise(numbers)} == {16}


@pytest.mark.parametrize(
    ("count_votes", "before", "smoothed", "after"),
    [
        (count_document_votes, (9.0,) * 5, 1.0, ((9.0, 9.0, 1.0), -1)),
        (count_ytsaurus_votes, (-1, 0, 1, 1), 10.0, ((1, 1, 1), 3)),
    ],
)
def test_the_window_follows_a_smaller_vote_window_size(count_votes, before, smoothed, after):
    assert count_votes(before, smoothed, 10.0, MonitorSettings(vote_window_size=3), 0.0) == after


# --- throttle restore


@BOTH_MODES
def test_throttled_below_cpu_limit_the_limit_goes_back_at_once_smoothed_is_reseeded_and_the_window_cleared(vote_mode):
    s = MonitorSettings(vote_mode=vote_mode, headroom_ratio=0.1, restore_hold_s=30.0)
    before = msgspec.structs.replace(job(2.0, smoothed=1.0, window=(1.0, 1.0)), usages=(1.0,))
    decision, state = steps(before, 2.0, 1, s, throttled_ratio=0.26)[0]
    assert (decision.kind, decision.old_cores, decision.new_cores, decision.votes_sum) == ("restore", 2.0, 10.0, None)
    assert (state.limit_cores, state.smoothed_cores, state.window, state.usages) == (10.0, 10.0, (), ())
    assert state.hold_until_s == 31.0
    assert (state.smoothed_cpu_s, state.preemptible_cpu_s, state.max_cpu_s) == (10.0, 0.0, 10.0)


def test_check_takes_the_share_of_throttled_periods_from_the_counters():
    state = msgspec.structs.replace(job(2.0, smoothed=1.0), base=CpuReading(0.0, 0.0, nr_periods=10, nr_throttled=1))
    quiet, decision = check(state, CpuReading(2.0, 1.0, nr_periods=20, nr_throttled=1), 1.0, DEFAULTS)
    assert (decision.kind, decision.throttled_ratio) == ("hold", 0.0)
    _, decision = check(quiet, CpuReading(4.0, 2.0, nr_periods=30, nr_throttled=4), 2.0, DEFAULTS)
    assert (decision.kind, decision.throttled_ratio, decision.new_cores) == ("restore", 0.3, 10.0)


def test_restore_hold_keeps_the_limit_from_shrinking_until_it_ends():
    s = MonitorSettings(restore_hold_s=30.0, smoothing_factor=1.0)
    (_, state), *_ = steps(job(2.0, smoothed=1.0), 2.0, 1, s, throttled_ratio=1.0)
    results = steps(state, 0.0, 40, s)
    first = next(state for decision, state in results if decision.changes)
    assert first.base.at_s == 1.0 + 30.0


# the other options can only keep the limit where it is or raise the floor


@pytest.mark.parametrize(
    ("direction", "grown", "shrunk"), [("both", 7.25, 4.85), ("up-only", 7.25, 5.0), ("down-only", 5.0, 4.85)]
)
def test_direction_keeps_the_limit_in_the_other_direction(direction, grown, shrunk):
    s = MonitorSettings(direction=direction)
    assert decide(5, job(5.0), (), 0.0, s) == grown
    assert decide(-5, job(5.0), (), 0.0, s) == shrunk


def test_startup_boost_holds_only_shrinking():
    s = MonitorSettings(startup_boost_s=60.0)
    assert decide(-5, job(5.0), (), 59.9, s) == 5.0
    assert decide(-5, job(5.0), (), 60.0, s) == 4.85
    assert decide(5, job(5.0), (), 0.0, s) == 7.25


@pytest.mark.parametrize(
    ("ratio", "hard", "floor"), [(0.0, 10.0, 1.0), (0.3, 10.0, 3.0), (0.05, 10.0, 1.0), (1.0, 10.0, 10.0)]
)
def test_min_limit_ratio_raises_the_floor(ratio, hard, floor):
    assert compute_floor(hard, (), MonitorSettings(min_limit_ratio=ratio)) == floor


def test_headroom_ratio_raises_the_floor_above_the_99th_percentile_of_the_window_and_never_above_hard():
    s = MonitorSettings(headroom_ratio=0.5, vote_window_size=5)
    assert compute_floor(10.0, (1.0, 4.0, 2.0), s) == 6.0
    assert compute_floor(10.0, (9.0,), s) == 10.0
    assert compute_floor(10.0, (), s) == 1.0
    assert compute_floor(1000.0, (*[2.0] * 99, 100.0), s) == 3.0
    results = steps(start_state(10.0, 0.0), lambda st: 4.0 if st.max_cpu_s % 30.0 == 0.0 else 0.0, 300, s)
    assert results[-1][1].limit_cores == pytest.approx(6.0)
    assert all(len(state.usages) <= 5 for _, state in results)


def test_throttle_vote_counts_as_plus_1_against_any_limit():
    s = MonitorSettings(throttle_vote=True)
    assert count_document_votes((0.0,) * 4, 0.0, 10.0, s, 0.1) == ((0.0, 0.0, 0.0, 0.0, math.inf), -3)
    assert count_document_votes((0.0,) * 4, 0.0, 10.0, s, 0.0)[1] == -5
    assert count_ytsaurus_votes((), 0.0, 10.0, s, 0.1) == ((1,), None)
    assert count_ytsaurus_votes((), 0.0, 10.0, s, 0.0) == ((-1,), None)
    assert count_ytsaurus_votes((), 0.0, 10.0, DEFAULTS, 0.1) == ((-1,), None)


@BOTH_MODES
def test_a_restart_of_the_agent_is_no_reason_to_change_an_adopted_limit_that_fits(vote_mode):
    s = MonitorSettings(vote_mode=vote_mode)
    adopted = start_state(10.0, 0.0, limit_cores=3.0)
    assert steps(adopted, 2.5, 1, s)[0][1].smoothed_cores == 0.9 * 3.0
    assert changes(steps(adopted, 2.5, 200, s)) == []
    grown = next(state for decision, state in steps(adopted, 3.0, 20, s) if decision.changes)
    assert grown.limit_cores == pytest.approx(4.35)


def test_an_adopted_limit_at_the_jobs_cpu_is_seeded_like_a_fresh_job():
    assert smooth(start_state(10.0, 0.0, limit_cores=10.0), 0.0, DEFAULTS) == 10.0


# changes from outside


@pytest.mark.parametrize(
    ("limit", "hard", "moved"), [(10.0, 16.0, 16.0), (10.0, 4.0, 4.0), (6.0, 16.0, 6.0), (6.0, 4.0, 4.0)]
)
def test_when_the_jobs_cpu_changes_the_limit_follows_where_it_stood_and_never_stays_above(limit, hard, moved):
    state = job(limit, smoothed=5.0, window=(5.0,))
    after = move_hard(state, hard)
    assert (after.hard_cores, after.limit_cores, after.seed_cores) == (hard, moved, moved)
    assert (after.smoothed_cores, after.window) == (5.0, (5.0,))
    assert move_hard(state, 10.0) is state


def test_when_the_jobs_cpu_changes_before_the_first_smoothed_value_a_fresh_job_still_starts_at_hard():
    assert smooth(move_hard(start_state(10.0, 0.0), 16.0), 0.0, DEFAULTS) == 16.0


@pytest.mark.parametrize(("limit", "restarted"), [(7.0, 7.0), (99.0, 10.0)])
def test_a_limit_moved_by_somebody_else_starts_a_fresh_window_and_the_aggregates_go_on(limit, restarted):
    state = steps(job(4.0, smoothed=4.0), 4.0, 3, MonitorSettings(headroom_ratio=0.5))[-1][1]
    after = restart_at(state, limit, 50.0)
    assert (after.limit_cores, after.seed_cores, after.smoothed_cores) == (restarted, restarted, None)
    assert (after.window, after.usages, after.base, after.hold_until_s) == ((), (), None, 50.0)
    assert (after.smoothed_cpu_s, after.max_cpu_s) == (state.smoothed_cpu_s, state.max_cpu_s) == (12.0, 30.0)


# throttled and late CPU


def throttled_at(*throttled_s: float, at_s: float = 0.0, identity: int = 0) -> list[CpuReading]:
    """Readings one second apart of a cgroup that uses half a core."""
    return [
        CpuReading((at_s + number) / 2, at_s + number, identity, throttled_s=value)
        for number, value in enumerate(throttled_s)
    ]


def count_throttled(state: JobState, readings: list[CpuReading], s: MonitorSettings = DEFAULTS) -> tuple[float, float]:
    for reading in readings:
        state, _ = check(state, reading, reading.at_s, s)
    return state.throttled_cpu_s, state.late_cpu_s


def test_the_check_that_restores_still_counts_the_interval_before_it_as_late():
    base, now = throttled_at(0.0, 3.0)
    now = msgspec.structs.replace(now, nr_periods=10, nr_throttled=10)
    state, _ = check(start_state(2.0, 0.0, 1.0), base, 0.0, DEFAULTS)
    state, decision = check(state, now, 1.0, DEFAULTS)
    assert (decision.kind, state.limit_cores, state.late_cpu_s) == ("restore", 2.0, 3.0)
    later = CpuReading(1.0, 2.0, nr_periods=20, nr_throttled=20, throttled_s=4.0)
    assert count_throttled(state, [later]) == (4.0, 3.0)


def test_another_cgroup_under_the_path_keeps_the_sums_and_is_a_new_base():
    readings = [*throttled_at(0.0, 1.0), *throttled_at(50.0, 50.25, at_s=2.0, identity=7)]
    assert count_throttled(start_state(2.0, 0.0, 1.0), readings) == (1.25, 1.25)


def test_an_interval_that_cannot_be_trusted_is_not_counted():
    state, _ = check(start_state(2.0, 0.0, 1.0), throttled_at(0.0)[0], 0.0, DEFAULTS)
    assert count_throttled(rebase(state, None), throttled_at(9.0, 10.0, at_s=1.0)) == (1.0, 1.0)
