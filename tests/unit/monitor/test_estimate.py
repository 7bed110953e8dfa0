"""What the rules would have done to a workload that was watched: sums, time held back, how sure."""

import math

import pytest

from cpumond.monitor.estimate import Estimate, Timeline, UseWatch, add_up, estimate, judge_confidence, merge
from cpumond.monitor.model import CpuReading, MonitorSettings
from cpumond.monitor.rules import RULES

SETTINGS = {rule: MonitorSettings(limit_rule=rule) for rule in RULES}


def readings(*uses: float, step_s: float = 1.0, throttled: int = 0) -> list[CpuReading]:
    total, rows = 5.0, [CpuReading(5.0, 100.0)]
    for number, use in enumerate(uses, 1):
        total += use * step_s
        rows.append(CpuReading(total, 100.0 + number * step_s, 0, number * 10, number * throttled))
    return rows


@pytest.mark.parametrize("seconds", [5, 60, 239, 240, 1000])
def test_of_a_steady_load_all_but_use_and_reserve_can_be_reclaimed(seconds: int) -> None:
    """However short it was watched: it is taken to go on."""
    found = estimate(readings(*[2.0] * seconds), 8.0, SETTINGS)
    peak, document = found.rules["peak"], found.rules["document"]
    assert peak.limit_cores == pytest.approx(2.0 * 1.05, rel=0.06)
    assert peak.reclaimable_cores == pytest.approx(8.0 - peak.limit_cores, rel=0.03)
    assert peak.reclaimable_ratio == pytest.approx(peak.reclaimable_cores / 8.0)
    assert peak.held_back_ratio == peak.held_back_most_ratio == 0.0
    assert 3.0 < document.reclaimable_cores < 6.0
    assert document.held_back_most_ratio == 0.0


def test_bursts_that_last_throw_work_of_jobs_on_the_reclaimed_cpu_away() -> None:
    guarantee = {"peak": MonitorSettings(limit_rule="peak", actuator="guarantee", min_cpu_limit=0.1)}
    steady = estimate(readings(*[2.0] * 600), 8.0, guarantee)
    assert steady.rules["peak"].lost_work_ratio == 0.0
    bursts = estimate(readings(*([0.5] * 300 + [8.0] * 40) * 4), 8.0, guarantee)
    lost = bursts.rules["peak"].lost_work_ratio
    assert 0.0 < lost < 1.0
    work = lost * bursts.rules["peak"].reclaimable_cores
    both = add_up((steady, bursts), 1200.0).rules["peak"]
    assert both.lost_work_ratio * both.reclaimable_cores == pytest.approx(work * bursts.watched_s / 1200.0)


def test_nothing_goes_below_the_floor() -> None:
    found = estimate(readings(*[0.1] * 400), 4.0, {"peak": MonitorSettings(limit_rule="peak", min_cpu_limit=1.5)})
    assert (found.rules["peak"].limit_cores, found.rules["peak"].reclaimable_cores) == (1.5, pytest.approx(2.5))
    found = estimate(readings(*[0.1] * 400), 1.0, SETTINGS)
    assert {each.reclaimable_cores for each in found.rules.values()} == {0.0}


def test_use_above_the_limit_counts_as_held_back_and_teaches_the_rule() -> None:
    """A burst each minute: at most a sample each, as long as a look needs; the peak is remembered longer."""
    minute = [4.0] + [0.2] * 59
    found = estimate(readings(*minute * 20), 8.0, SETTINGS)
    peak = found.rules["peak"]
    assert 0.0 < peak.held_back_ratio < peak.held_back_most_ratio <= 1 / 60
    assert peak.held_back_ratio == pytest.approx(peak.held_back_most_ratio * 0.3)
    shadow = UseWatch(8.0, SETTINGS)
    for reading in readings(*minute * 20):
        shadow.add(reading)
    assert shadow._followers["peak"].state.caution > 2.0
    assert found.rules["document"].held_back_ratio == found.rules["document"].held_back_most_ratio > 0.0


def test_periods_throttled_by_a_lowered_limit_are_held_back() -> None:
    found = estimate(readings(*[0.5] * 600, throttled=0), 8.0, SETTINGS)
    assert found.rules["peak"].held_back_most_ratio == 0.0
    found = estimate(readings(*[0.5] * 600, throttled=1), 8.0, SETTINGS)
    assert found.rules["peak"].held_back_most_ratio > 0.0
    assert found.rules["peak"].reclaimable_cores < 0.5


def test_gaps_and_counters_that_begin_anew_are_left_out() -> None:
    rows = readings(*[1.0] * 10)
    late = [CpuReading(rows[-1].total_cpu_s + 50.0, rows[-1].at_s + 100.0)]
    late += [CpuReading(late[0].total_cpu_s + 1.0, late[0].at_s + 1.0), CpuReading(0.5, late[0].at_s + 2.0)]
    late += [CpuReading(0.5, late[0].at_s + 2.0)]
    found = estimate([*rows, *late], 4.0, SETTINGS, longest_s=10.0)
    assert (found.watched_s, found.missing_s) == (pytest.approx(11.0), pytest.approx(101.0))
    assert (found.used_cpu_s, found.used_cores) == (pytest.approx(11.0), pytest.approx(1.0))


def test_one_reading_tells_nothing() -> None:
    found = estimate(readings(), 4.0, SETTINGS)
    assert (found.watched_s, found.missing_s, found.used_cores, found.ordered_cores) == (0.0, 0.0, 0.0, 4.0)
    assert estimate([], 4.0, SETTINGS).rules == {}


def test_a_new_order_counts_from_then_on() -> None:
    watch = UseWatch(4.0, SETTINGS)
    rows = readings(*[1.0] * 600)
    for reading in rows[:301]:
        watch.add(reading)
    watch.move_hard(2.0)
    for reading in rows[301:]:
        watch.add(reading)
    found = watch.conclude()
    assert found.ordered_cores == pytest.approx(3.0)
    assert all(each.limit_cores <= 2.0 for each in found.rules.values())


def test_several_together() -> None:
    one = estimate(readings(*[1.0] * 300), 4.0, SETTINGS)
    half = estimate(readings(*[2.0] * 150), 4.0, SETTINGS)
    both = add_up([one, half], 300.0)
    assert (both.used_cpu_s, both.used_cores) == (pytest.approx(600.0), pytest.approx(2.0))
    assert both.ordered_cores == pytest.approx(6.0)
    expected = one.rules["peak"].reclaimable_cores + half.rules["peak"].reclaimable_cores / 2.0
    assert both.rules["peak"].reclaimable_cores == pytest.approx(expected)
    assert both.rules["peak"].reclaimable_ratio == pytest.approx(expected / 6.0)
    nothing = add_up([], 10.0)
    assert isinstance(nothing, Estimate)
    assert (nothing.used_cores, nothing.rules["peak"].held_back_ratio) == (0.0, 0.0)


def test_one_without_an_order_only_adds_its_use() -> None:
    known, unknown = estimate(readings(*[1.0] * 300), 4.0, SETTINGS), estimate(readings(*[1.0] * 300), 0.0, {})
    both = add_up([known, unknown], 300.0)
    assert (both.ordered_cores, both.used_cores) == (pytest.approx(4.0), pytest.approx(2.0))
    assert both.rules["peak"].reclaimable_cores == pytest.approx(known.rules["peak"].reclaimable_cores)


def test_bins_of_a_timeline_hold_means() -> None:
    timeline = Timeline(100.0, 20.0, count=2)
    for watch in (UseWatch(4.0, SETTINGS, math.inf, timeline), UseWatch(2.0, SETTINGS, math.inf, timeline)):
        for reading in readings(*[1.0] * 10, *[0.5] * 10):
            watch.add(reading)
    (first_s, first), (second_s, second) = timeline.list_points()
    assert (first_s, second_s) == (0.0, 10.0)
    assert first[:2] == [pytest.approx(2.0), pytest.approx(6.0)]
    assert second[:2] == [pytest.approx(1.0), pytest.approx(6.0)]


@pytest.mark.parametrize(("watched_s", "missing_s", "resolution_s", "level", "reason"), [
    (300.0, 0.0, 1.0, "low", "only 5m watched"),
    (7200.0, 0.0, 1.0, "medium", "2h watched, less than a day"),
    (86_400.0, 0.0, 1.0, "high", "a whole day"),
    (86_400.0, 0.0, 30.0, "medium", "one sample every 30s: shorter bursts"),
    (86_400.0, 0.0, 60.0, "low", "one sample every 1m"),
    (70_000.0, 20_000.0, 1.0, "low", "22% of the time is missing"),
])  # fmt: skip
def test_how_sure_one_may_be(watched_s: float, missing_s: float, resolution_s: float, level: str, reason: str) -> None:
    found, reasons = judge_confidence(watched_s, missing_s, resolution_s)
    assert found == level
    assert reason in "; ".join(reasons)


def test_bursts_between_two_checks_are_seen_by_glances() -> None:
    """0.2 s of 2.8 cores in each 20 s: the mean of a second is below the floor of one core and does not show them."""
    uses = [2.8 if number % 100 == 50 else 0.5 for number in range(6000)]
    rows = readings(*uses, step_s=0.2)
    fine = estimate(rows, 8.0, SETTINGS, check_each=5)
    coarse = estimate(rows[::5], 8.0, SETTINGS)
    assert (fine.used_cpu_s, fine.watched_s) == pytest.approx((coarse.used_cpu_s, coarse.watched_s))
    for rule in ("document", "peak"):
        assert fine.rules[rule].held_back_most_ratio > 0.001
        assert coarse.rules[rule].held_back_most_ratio == 0.0
        assert fine.rules[rule].reclaimable_cores <= coarse.rules[rule].reclaimable_cores
    short = estimate(rows[:501], 8.0, SETTINGS, check_each=5)
    assert short.rules["document"].held_back_most_ratio > 0.001


def test_the_kernels_burst_lets_a_little_more_than_the_limit_through() -> None:
    """A tenth of a second of the limit under peak, whose burst is as large as its quota."""
    uses = [2.0 + (0.15 if number % 60 == 59 else 0.0) for number in range(1200)]
    assert estimate(readings(*uses), 8.0, SETTINGS).rules["peak"].held_back_most_ratio == 0.0
    plain = {"peak": MonitorSettings(limit_rule="peak", burst_ratio=0.0, reserve_ratio=0.0)}
    assert estimate(readings(*uses), 8.0, plain).rules["peak"].held_back_most_ratio > 0.0


@pytest.mark.parametrize(("before", "after", "seconds"), [(1.0, 16.0, 300), (16.0, 1.0, 300), (1.0, 16.0, 120)])
def test_no_more_than_what_was_ordered_can_be_reclaimed(before: float, after: float, seconds: int) -> None:
    """Whenever the order changes."""
    watch = UseWatch(before, SETTINGS)
    for number, reading in enumerate(readings(*[0.3] * seconds)):
        if number == min(130, seconds - 20):
            watch.move_hard(after)
        watch.add(reading)
    found = watch.conclude()
    for each in found.rules.values():
        assert 0.0 < each.reclaimable_ratio < 1.0
        assert each.reclaimable_cores == pytest.approx(each.reclaimable_ratio * found.ordered_cores)
    assert add_up([found], seconds).rules["peak"].reclaimable_ratio < 1.0


def test_an_interval_is_spread_over_its_bins_and_gaps_are_bins_too() -> None:
    timeline = Timeline(0.0, 600.0)
    timeline.add(5.0, 4.5, (2.0,))
    timeline.add(9.0, 1.0, (4.0,))
    assert [values[0] for _, values in timeline.list_points()] == [1.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 4.0]
    assert [at_s for at_s, _ in timeline.list_points()] == list(range(9))


def test_two_times_of_a_workload_are_one() -> None:
    both = merge(estimate(readings(*[1.0] * 300), 4.0, SETTINGS), estimate(readings(*[2.0] * 100), 8.0, SETTINGS))
    assert (both.watched_s, both.used_cpu_s) == (pytest.approx(400.0), pytest.approx(500.0))
    assert (both.ordered_cores, both.used_cores, both.used_most_cores) == pytest.approx((5.0, 1.25, 2.0))
