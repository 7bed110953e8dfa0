"""One check of the monitor, rule by rule of semantics.md 1.2 to 1.7, with the numbers that stand there."""

import math
from collections.abc import Callable

import msgspec
import pytest

from cpumond.monitor import policy
from cpumond.monitor.model import CpuReading, Decision, JobState, MonitorSettings, start_state

DEFAULTS = MonitorSettings()
YTSAURUS = MonitorSettings(vote_mode="ytsaurus")

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
        state, decision = policy.step(state, CpuReading(0.0, at_s), usage_cores, 1.0, throttled_ratio, s)
        results.append((decision, state))
    return results


def changes(results: list[tuple[Decision, JobState]]) -> list[int]:
    """Numbers of the checks that changed the limit, 1-based, the base check being number 1."""
    return [number for number, (decision, _) in enumerate(results, 2) if decision.changes]


def job(limit: float, hard: float = 10.0, smoothed: float | None = None, window: tuple[float, ...] = ()) -> JobState:
    return msgspec.structs.replace(start_state(hard, 0.0, limit), smoothed_cores=smoothed, window=window)


# --- 1.3, one check, in order


def test_a_failed_sample_changes_nothing_and_the_next_check_is_longer():
    state, _ = policy.check(start_state(10.0, 0.0), CpuReading(0.0, 0.0), 0.0, DEFAULTS)
    failed, decision = policy.check(state, None, 1.0, DEFAULTS)
    assert failed is state
    assert decision == Decision("delay", 10.0, 10.0)
    _, decision = policy.check(failed, CpuReading(6.0, 2.0), 2.0, DEFAULTS)
    assert (decision.usage_cores, decision.interval_s) == (3.0, 2.0)


def test_two_readings_of_the_same_moment_are_no_check():
    state = policy.rebase(start_state(10.0, 0.0), CpuReading(1.0, 5.0))
    after, decision = policy.check(state, CpuReading(2.0, 5.0), 5.0, DEFAULTS)
    assert after is state
    assert decision.kind == "delay"


@pytest.mark.parametrize("reading", [CpuReading(99.0, 11.0, identity=7), CpuReading(200.0, 11.0, identity=8)])
def test_a_new_identity_or_a_falling_counter_is_a_new_baseline(reading):
    before = job(5.0, smoothed=3.0, window=(3.0, 3.0))
    base = CpuReading(100.0, 10.0, identity=7)
    state = msgspec.structs.replace(before, base=base, usages=(3.0,), max_cpu_s=9.0)
    after, decision = policy.check(state, reading, 11.0, DEFAULTS)
    assert decision == Decision("base", 5.0, 5.0)
    assert (after.base, after.smoothed_cores, after.window, after.usages) == (reading, None, (), ())
    assert (after.limit_cores, after.max_cpu_s) == (5.0, 9.0)
    again, _ = policy.step(after, reading, 0.0, 1.0, 0.0, DEFAULTS)
    assert again.smoothed_cores == 10.0


@pytest.mark.parametrize(
    ("relative", "vote"),
    [(0.0, -1), (math.nextafter(0.6, 0), -1), (0.6, 0), (0.75, 0), (0.9, 0), (math.nextafter(0.9, 1), 1), (2.0, 1)],
)
def test_vote_minus_1_below_lower_plus_1_above_upper_else_0(relative, vote):
    assert policy.compute_vote(relative, DEFAULTS) == vote
    window = (relative * 8.0,) * 4
    assert policy.count_document_votes(window, relative * 8.0, 8.0, DEFAULTS, 0.0)[1] == vote * 5


def test_votes_are_cleared_after_a_decision_else_the_oldest_is_dropped():
    decided = steps(job(5.0, smoothed=5.0, window=(1, 1, 1, 1)), 5.0, 1, YTSAURUS)[0]
    assert (decided[0].kind, decided[0].votes_sum, decided[1].window) == ("grow", 5, ())
    held = steps(job(5.0, smoothed=5.0, window=(-1, 0, 1, 1)), 5.0, 1, YTSAURUS)[0]
    assert (held[0].kind, held[0].votes_sum, held[1].window) == ("hold", 2, (0, 1, 1, 1))


def test_step_8_on_failure_soft_keeps_its_value_and_votes_stay_cleared():
    state = job(5.0, smoothed=5.0, window=(1, 1, 1, 1))
    decision, after = steps(state, 5.0, 1, YTSAURUS)[0]
    assert after.limit_cores == 7.25
    failed = policy.reject(after, decision)
    assert (failed.limit_cores, failed.window, failed.smoothed_cores) == (5.0, (), 5.0)
    assert changes(steps(failed, 5.0, 9, YTSAURUS)) == [6]


def test_a_limit_moved_by_the_kernel_is_settled_as_it_was_applied():
    decision, after = steps(job(8.0, smoothed=0.0, window=(0.0,) * 4), 0.0, 1, DEFAULTS)[0]
    settled = policy.settle(after, decision, 7.8)
    assert (settled.limit_cores, settled.preemptible_cpu_s) == (7.8, pytest.approx(2.2))
    assert policy.settle(after, decision, after.limit_cores) is after


@pytest.mark.parametrize(("count_votes", "before", "smoothed", "after"), [
    (policy.count_document_votes, (9.0,) * 5, 1.0, ((9.0, 9.0, 1.0), -1)),
    (policy.count_ytsaurus_votes, (-1, 0, 1, 1), 10.0, ((1, 1, 1), 3)),
])  # fmt: skip
def test_the_window_follows_a_smaller_vote_window_size(count_votes, before, smoothed, after):
    assert count_votes(before, smoothed, 10.0, MonitorSettings(vote_window_size=3), 0.0) == after


def test_check_takes_the_share_of_throttled_periods_from_the_counters():
    state = msgspec.structs.replace(job(2.0, smoothed=1.0), base=CpuReading(0.0, 0.0, nr_periods=10, nr_throttled=1))
    quiet, decision = policy.check(state, CpuReading(2.0, 1.0, nr_periods=20, nr_throttled=1), 1.0, DEFAULTS)
    assert (decision.kind, decision.throttled_ratio) == ("hold", 0.0)
    _, decision = policy.check(quiet, CpuReading(4.0, 2.0, nr_periods=30, nr_throttled=4), 2.0, DEFAULTS)
    assert (decision.kind, decision.throttled_ratio, decision.new_cores) == ("restore", 0.3, 10.0)


def test_restore_hold_keeps_the_limit_from_shrinking_until_it_ends():
    s = MonitorSettings(restore_hold_s=30.0, smoothing_factor=1.0)
    before = msgspec.structs.replace(job(2.0, smoothed=1.0), usages=(1.0,))
    (_, state), *_ = steps(before, 2.0, 1, s, throttled_ratio=1.0)
    assert (state.window, state.usages) == ((), ())
    results = steps(state, 0.0, 40, s)
    first = next(state for decision, state in results if decision.changes)
    assert first.base.at_s == 1.0 + 30.0


# the other options can only keep the limit where it is or raise the floor


@pytest.mark.parametrize(("votes_sum", "given", "limit"), [
    (5, {}, 7.25),
    (-5, {}, 4.85),
    (5, {"direction": "up-only"}, 7.25),
    (-5, {"direction": "up-only"}, 5.0),
    (5, {"direction": "down-only"}, 5.0),
    (-5, {"direction": "down-only"}, 4.85),
    (-5, {"startup_boost_s": 60.1}, 5.0),
    (-5, {"startup_boost_s": 60.0}, 4.85),
    (5, {"startup_boost_s": 60.1}, 7.25),
    (-5, {"min_cpu_limit": 6.0}, 5.0),
])  # fmt: skip
def test_what_an_option_lets_a_sum_of_votes_do_to_5_cores_after_a_minute(votes_sum, given, limit):
    assert policy.decide(votes_sum, job(5.0), (), 60.0, MonitorSettings(**given)) == limit


@pytest.mark.parametrize(
    ("ratio", "hard", "floor"), [(0.0, 10.0, 1.0), (0.3, 10.0, 3.0), (0.05, 10.0, 1.0), (1.0, 10.0, 10.0)]
)
def test_min_limit_ratio_raises_the_floor(ratio, hard, floor):
    assert policy.compute_floor(hard, (), MonitorSettings(min_limit_ratio=ratio)) == floor


def test_headroom_ratio_raises_the_floor_above_the_99th_percentile():
    s = MonitorSettings(headroom_ratio=0.5, vote_window_size=5)
    assert policy.compute_floor(10.0, (1.0, 4.0, 2.0), s) == 6.0
    assert policy.compute_floor(10.0, (9.0,), s) == 10.0
    assert policy.compute_floor(10.0, (), s) == 1.0
    assert policy.compute_floor(1000.0, (*[2.0] * 99, 100.0), s) == 3.0
    results = steps(start_state(10.0, 0.0), lambda st: 4.0 if st.max_cpu_s % 30.0 == 0.0 else 0.0, 300, s)
    assert results[-1][1].limit_cores == pytest.approx(6.0)
    assert all(len(state.usages) <= 5 for _, state in results)


def test_throttle_vote_counts_as_plus_1_against_any_limit():
    s = MonitorSettings(throttle_vote=True)
    assert policy.count_document_votes((0.0,) * 4, 0.0, 10.0, s, 0.1) == ((0.0, 0.0, 0.0, 0.0, math.inf), -3)
    assert policy.count_document_votes((0.0,) * 4, 0.0, 10.0, s, 0.0)[1] == -5
    assert policy.count_ytsaurus_votes((), 0.0, 10.0, s, 0.1) == ((1,), None)
    assert policy.count_ytsaurus_votes((), 0.0, 10.0, s, 0.0) == ((-1,), None)
    assert policy.count_ytsaurus_votes((), 0.0, 10.0, DEFAULTS, 0.1) == ((-1,), None)


@pytest.mark.parametrize(("state", "seed"), [
    (start_state(10.0, 0.0, limit_cores=3.0), 0.9 * 3.0),
    (start_state(10.0, 0.0, limit_cores=10.0), 10.0),
    (policy.move_hard(start_state(10.0, 0.0), 16.0), 16.0),
], ids=["an adopted limit", "all of it, as a fresh job", "a job's CPU that changed first"])  # fmt: skip
def test_what_the_first_smoothed_value_is(state, seed):
    assert policy.smooth(state, 0.0, DEFAULTS) == seed


@pytest.mark.parametrize(
    ("limit", "hard", "moved"), [(10.0, 16.0, 16.0), (10.0, 4.0, 4.0), (6.0, 16.0, 6.0), (6.0, 4.0, 4.0)]
)
def test_when_the_jobs_cpu_changes_the_limit_keeps_its_place_below_it(limit, hard, moved):
    state = job(limit, smoothed=5.0, window=(5.0,))
    after = policy.move_hard(state, hard)
    assert (after.hard_cores, after.limit_cores, after.seed_cores) == (hard, moved, moved)
    assert (after.smoothed_cores, after.window) == (5.0, (5.0,))
    assert policy.move_hard(state, 10.0) is state


@pytest.mark.parametrize(("limit", "restarted"), [(7.0, 7.0), (99.0, 10.0)])
def test_a_foreign_limit_starts_a_fresh_window_and_aggregates_go_on(limit, restarted):
    state = steps(job(4.0, smoothed=4.0), 4.0, 3, MonitorSettings(headroom_ratio=0.5))[-1][1]
    after = policy.restart_at(state, limit, 50.0)
    assert (after.limit_cores, after.seed_cores, after.smoothed_cores) == (restarted, restarted, None)
    assert (after.window, after.usages, after.base, after.hold_until_s) == ((), (), None, 50.0)
    assert (after.smoothed_cpu_s, after.max_cpu_s) == (state.smoothed_cpu_s, state.max_cpu_s) == (12.0, 30.0)
