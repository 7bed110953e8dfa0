"""The simulated kernel and the closed loop around it, where the answer is known beforehand."""

import itertools
from collections.abc import Sequence

import pytest
from examples import ALL

from cpumond.monitor.model import MonitorSettings
from cpumond.monitor.shapes import make_work
from cpumond.monitor.simulate import Arrivals, Period, Program, Ran, SimulationResult, simulate, walk_periods

TO_THE_FLOOR = {
    "smoothing_factor": 1.0, "decrease_coefficient": 0.0, "vote_window_size": 2, "vote_decision_threshold": 1,
    "throttle_restore_ratio": 0.0,
}  # fmt: skip
"""Down to min_cpu_limit as soon as two checks find the job idle, and not back because it is throttled."""


def constant(cores: float, seconds: float) -> list[float]:
    return [cores * 0.1] * round(seconds * 10)


def walk(work: Sequence[float], order_cores: float, **options: object) -> list[Period]:
    return list(walk_periods(Arrivals(work, order_cores * 0.1), MonitorSettings(**options)))


def list_changes(periods: list[Period]) -> list[tuple[int, float]]:
    """(first period with it, limit) of each new limit."""
    pairs = enumerate(itertools.pairwise(periods), 1)
    return [(number, b.limit_cores) for number, (a, b) in pairs if a.limit_cores != b.limit_cores]


def approx(*values: object) -> tuple[object, ...]:
    return tuple(pytest.approx(each) if isinstance(each, float) else each for each in values)


def test_work_from_outside_piles_up_and_is_late_once():
    job = Arrivals([0.3, 0.0, 0.0, 0.1], 0.4)
    assert job.run(0, 0.1) == approx(0.1, True, True)
    assert (job.backlog_cpu_s, job.late_cpu_s) == approx(0.2, 0.2)
    assert job.run(1, 0.1) == approx(0.1, True, True)
    assert job.run(2, 0.4) == approx(0.1, False, False)
    assert job.run(3, 0.4) == approx(0.1, False, False)
    assert job.late_cpu_s == pytest.approx(0.2)
    # 0.2 core-seconds waited for one period, 0.1 of them for another; 0.4 were wanted in all.
    assert job.measure_delay_s(0.1) == pytest.approx((0.2 + 0.1) * 0.1 / 0.4)


def test_work_that_waits_at_the_order_too_is_not_charged_to_the_limit():
    job = Arrivals([1.0, 0.0, 0.0], 0.4)
    assert Arrivals([1.0], 0.4).run(0, 0.8).used_cpu_s == pytest.approx(0.4), "however much was carried over"
    assert job.run(0, 0.4) == approx(0.4, True, False)
    assert job.run(1, 0.4) == approx(0.4, True, False)
    assert job.run(2, 0.4) == approx(0.2, False, False)
    assert (job.late_cpu_s, job.measure_delay_s(0.1)) == (0.0, 0.0)


def test_a_program_falls_behind():
    job = Program([0.2] * 10, 0.4)
    assert [job.run(period, 0.1) for period in range(10)] == [approx(0.1, True, True)] * 10
    assert (job.measure_delay_s(0.1), job.late_cpu_s) == pytest.approx((0.5, 1.0))


def test_a_program_takes_its_time_and_no_more_at_once_than_its_request():
    assert Program([1.0], 0.4).run(0, 0.8) == Ran(0.4, False, False)
    job = Program([0.2, 0.0, 0.3], 0.4)
    assert [job.run(period, 0.8).used_cpu_s for period in range(4)] == list(approx(0.2, 0.0, 0.3, 0.0))
    assert job.measure_delay_s(0.1) == 0.0


def test_a_program_goes_on_with_what_comes_next_within_a_period():
    job = Program([0.2, 0.1, 0.1], 0.4)
    assert job.run(0, 0.1) == approx(0.1, True, True)
    # Half a period for the rest, and the other half for the first half of what is next.
    assert job.run(1, 0.4) == approx(0.1 + 0.05, False, False)


def test_the_documents_rule_on_a_constant_demand_in_closed_form():
    """The limit falls by decrease_coefficient until the use is not below relative_lower_bound of it."""
    order, demand = 16.0, 3.0
    result = simulate(constant(demand, 600), order, MonitorSettings(smoothing_factor=1.0, smoothing_seed="first_value"))
    periods = walk(constant(demand, 600), order, smoothing_factor=1.0, smoothing_seed="first_value")
    steps = next(n for n in itertools.count() if 0.6 * order * 0.97**n <= demand)
    # The first check takes the first sample, the sixth fills the window of 5; each one from then on is a step.
    limits = [order * 0.97**n for n in range(steps + 1)]
    assert list_changes(periods) == [(60 + 10 * n, pytest.approx(limit)) for n, limit in enumerate(limits[1:])]
    reclaimed = sum(order - limit for limit in limits[1:-1]) + (order - limits[-1]) * (600 - 6 - (steps - 1))
    # A job of one core each is started at the end of the second after which so much is free, and runs to the end.
    kept = sum(int(order - period.limit_cores + 1e-9) for period in periods[9:-1:10])
    assert result == SimulationResult(
        "document", pytest.approx(reclaimed / (600 * (order - demand))), 0.0, 0.0, 0.0, 0.0, 0.0, steps * 6.0,
        pytest.approx(kept / (600 * (order - demand))), 0.0,
    )  # fmt: skip


def test_with_nothing_to_free_and_nothing_wanted_no_ratio_divides_by_zero():
    assert simulate(constant(20.0, 10), 16.0, MonitorSettings()).reclaimed_ratio == 0.0
    idle = simulate(constant(0.0, 60), 16.0, MonitorSettings())
    assert (idle.late_ratio, idle.delay_s) == (0.0, 0.0)
    assert idle.reclaimed_ratio > 0.4


def test_a_limit_that_only_goes_up_stays_at_the_order():
    result = simulate(make_work("web", 16.0, 1, 120.0), 16.0, MonitorSettings(direction="up-only"))
    assert result == SimulationResult("document", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_all_that_a_job_is_held_back_by_a_limit_of_one_core():
    work = [*constant(0.0, 20), 0.15, *constant(0.0, 1.9), *constant(2.0, 1.0), *constant(0.0, 8.0)]
    result = simulate(work, 4.0, MonitorSettings(**TO_THE_FLOOR))
    # The first spike takes two periods, the second of which would be none at the order; the second takes twenty.
    assert result.held_back_ratio == pytest.approx((1 + 19) / 310)
    assert result.held_back_seconds_ratio == pytest.approx((1 + 2) / 31)
    assert (result.late_ratio, result.p99_stretch_s) == (pytest.approx((0.05 + 1.0) / 2.15), pytest.approx(1.9))
    lasting = simulate([*constant(0.0, 20), *constant(2.0, 2.0)], 4.0, MonitorSettings(**TO_THE_FLOOR))
    assert lasting.p99_stretch_s == pytest.approx(2.0), "a stretch that lasts to the end counts"


def test_periods_without_use_are_no_periods_of_the_kernel():
    """One busy period, throttled, in an idle second: all of the periods that the kernel counts."""
    work = [*constant(0.0, 20), 0.1 + 2e-6, *constant(0.0, 2)]
    periods = walk(work, 4.0, **TO_THE_FLOOR | {"throttle_restore_ratio": 0.4})
    # Two periods have use, the second only the rest of the first.
    assert (periods[209].limit_cores, periods[210].limit_cores) == (1.0, 4.0)


def test_quota_that_was_not_used_lets_a_spike_pass():
    work = [*constant(0.0, 20), 0.15, *constant(0.0, 1), 0.25, *constant(0.0, 1)]
    held = [number for number, period in enumerate(walk(work, 4.0, burst_ratio=1.0, **TO_THE_FLOOR)) if period[2]]
    assert held == [211]
    # What was carried over is used up, and the second period's quota is what the first left.
    periods = walk([*constant(0.0, 20), 0.18, 0.18, 0.0], 4.0, burst_ratio=1.0, **TO_THE_FLOOR)
    assert [period.used_cpu_s for period in periods[200:]] == list(approx(0.18, 0.12, 0.06))


@pytest.mark.parametrize(("poll_s", "begin", "gone"), [
    (0.0, 601, 609),  # the check at the end of the second
    (0.1, 601, 602),  # counted when period 601 ends, noticed within 602
    (0.2, 601, 603),  # looks come within 601, which is not counted yet, and 603
    (0.2, 602, 603),
    (0.3, 601, 602),  # within 602
    (0.05, 601, 602),  # not more than one look in a period
])  # fmt: skip
def test_a_job_that_wakes_up_gets_all_back_at_the_next_look_or_check(poll_s, begin, gone):
    work = [0.0] * begin + [1.0] * 100
    periods = walk(work, 16.0, limit_rule="peak", throttle_poll_s=poll_s, burst_ratio=0.0)
    held = [number for number, period in enumerate(periods) if period.held_back]
    assert [number for number in held if number < 610] == [*range(begin, gone + 1)]
    assert periods[gone].limit_cores < 16.0
    assert periods[gone + 1].limit_cores == 16.0


@pytest.mark.parametrize(
    ("check_period_s", "changes"),
    [(1.0, [30, 40, 50]), (0.25, [8, 10, 13]), (0.1, [3, 4, 5]), (0.01, [3, 4, 5]), (2.5, [75, 100, 125])],
)
def test_checks_come_at_the_end_of_the_period_they_fall_into(check_period_s, changes):
    options = {**TO_THE_FLOOR, "decrease_coefficient": 0.5, "smoothing_seed": "first_value", "min_cpu_limit": 0.1}
    periods = walk(constant(0.0, 20), 16.0, check_period_s=check_period_s, **options)
    assert [number for number, _ in list_changes(periods)][:3] == changes


def test_a_weight_cuts_nothing_off_and_counts_use_above_it():
    work = constant(0.5, 30) + constant(6.0, 2.0)
    periods = walk(work, 16.0, actuator="weight", **TO_THE_FLOOR)
    assert [period.used_cpu_s for period in periods] == list(approx(*work))
    assert [number for number, period in enumerate(periods) if period.held_back] == [*range(300, 320)]


def test_another_enforcement_period_changes_what_a_spike_costs():
    """The same spike of 0.05 core-seconds in quotas of 0.1 and 0.01 core-seconds."""
    settings = MonitorSettings(**TO_THE_FLOOR)
    long = simulate([0.0] * 200 + [0.05] + [0.0] * 9, 4.0, settings, period_s=0.1)
    short = simulate([0.0] * 2000 + [0.05] + [0.0] * 99, 4.0, settings, period_s=0.01)
    assert long.held_back_ratio == 0.0
    # 0.04 at the order in the first, the last 0.01 in the second.
    assert (short.held_back_ratio, short.held_back_seconds_ratio) == pytest.approx((4 / 2100, 1 / 21))


# figures of another simulation, written by others


REFERENCE = [
    ("batch", True, "peak", 0.6732, 0.004125),
    ("cron", False, "document", 0.4558, 0.015417),
    # and these where all examples are asked for
    ("web", False, "document", 0.3801, 0.015069),
    ("web", False, "peak", 0.7349, 0.004431),
    ("timer", False, "document", 0.5173, 0.062),
    ("timer", False, "peak", 0.8169, 0.004542),
    ("batch", True, "document", 0.4083, 0.010306),
    ("cron", False, "peak", 0.9105, 0.003306),
]


@pytest.mark.parametrize(
    ("shape", "is_program", "rule", "reclaimed_ratio", "held_back_ratio"), REFERENCE if ALL else REFERENCE[:2]
)
def test_agrees_with_the_reference(shape, is_program, rule, reclaimed_ratio, held_back_ratio):
    settings = MonitorSettings(limit_rule=rule, throttle_restore_ratio=0.25, early_restore="off")
    result = simulate(make_work(shape, 16.0, 1, 7200.0), 16.0, settings, is_program=is_program)
    assert result.reclaimed_ratio == pytest.approx(reclaimed_ratio, abs=0.001)
    assert result.held_back_ratio == pytest.approx(held_back_ratio, abs=0.0001)
