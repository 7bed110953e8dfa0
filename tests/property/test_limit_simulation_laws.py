"""Laws of a simulated job under a limit, over any work and any settings."""

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_settings, thousandths

from cpumond.monitor.demand import spread
from cpumond.monitor.model import MonitorSettings
from cpumond.monitor.simulate import Arrivals, Program, simulate, walk_periods

many = examples(60)
ROUNDING = 1e-9


@st.composite
def works(draw: st.DrawFn, most_cores: float = 20.0) -> list[float]:
    """Core-seconds of some hundreds of periods: stretches of the same, of single periods, of nothing."""
    stretches = draw(
        st.lists(st.tuples(st.just(0.0) | thousandths(0, most_cores), st.integers(1, 60)), min_size=1, max_size=12)
    )
    return [cores * 0.1 for cores, periods in stretches for _ in range(periods)]


@st.composite
def simulated_settings(draw: st.DrawFn) -> MonitorSettings:
    """Any settings under any rule, with checks that come often enough for short work."""
    some = draw(any_settings())
    return msgspec.structs.replace(
        some,
        limit_rule=draw(st.sampled_from(["document", "peak"])),
        check_period_s=draw(st.sampled_from([0.1, 0.3, 1.0])),
        throttle_poll_s=draw(st.sampled_from([None, 0.0, 0.1, 0.25])),
        burst_ratio=draw(st.sampled_from([None, 0.0, 0.5, 1.0])),
        throttle_budget=draw(st.sampled_from([0.004, 0.0, 1.0])),
        peak_memory_s=draw(st.sampled_from([5.0, 0.1])),
        start_delay_s=draw(st.sampled_from([0.0, 2.0])),
        startup_boost_s=0.0,
    )


ORDERS = st.sampled_from([16.0, 4.0, 1.0, 0.3])


@many
@given(works(), ORDERS, simulated_settings(), st.booleans())
def test_no_limit_is_above_the_order_and_no_use_above_what_the_limit_gives(work, order, s, is_program):
    job = Program(work, order * 0.1) if is_program else Arrivals(work, order * 0.1)
    burst = s.burst_ratio or 0.0
    used_cpu_s = given_cpu_s = 0.0
    for period in walk_periods(job, s):
        assert 0.0 <= period.limit_cores <= order
        assert not (period.held_back and period.limit_cores == order)
        assert period.used_cpu_s <= order * 0.1 + ROUNDING
        if s.actuator == "quota":
            assert period.used_cpu_s <= period.limit_cores * 0.1 * (1.0 + burst) + ROUNDING
            used_cpu_s += period.used_cpu_s
            given_cpu_s += period.limit_cores * 0.1
            # A burst is saved before it is used.
            assert used_cpu_s <= given_cpu_s + ROUNDING


@many
@given(works(), ORDERS, simulated_settings())
def test_work_that_arrives_is_done_or_waits(work, order, s):
    job = Arrivals(work, order * 0.1)
    done_cpu_s = sum(period.used_cpu_s for period in walk_periods(job, s))
    assert done_cpu_s + job.backlog_cpu_s == pytest.approx(sum(work), abs=1e-6)


@many
@given(works(), ORDERS, simulated_settings())
def test_a_program_does_its_own_work_and_no_more(work, order, s):
    job = Program(work, order * 0.1)
    done_cpu_s = sum(period.used_cpu_s for period in walk_periods(job, s))
    behind = round(job.measure_delay_s(0.1) * 10)
    own = [min(each, order * 0.1) for each in work]
    # The piece that it is at may be done in part.
    assert sum(own[: len(own) - behind]) - 1e-6 <= done_cpu_s <= sum(own[: len(own) - behind + 1]) + 1e-6


@many
@given(works(most_cores=1.0), simulated_settings(), st.booleans())
def test_a_job_that_stays_below_the_floor_is_never_held_back(work, s, is_program):
    s = msgspec.structs.replace(s, min_cpu_limit=1.0, actuator="quota")
    result = simulate(work, 16.0, s, is_program=is_program)
    assert (result.held_back_ratio, result.held_back_seconds_ratio, result.p99_stretch_s) == (0.0, 0.0, 0.0)
    assert result.late_ratio == pytest.approx(0.0, abs=ROUNDING)
    assert result.delay_s == pytest.approx(0.0, abs=ROUNDING)


@many
@given(works(), ORDERS, simulated_settings(), st.booleans())
def test_all_results_are_in_their_ranges(work, order, s, is_program):
    result = simulate(work, order, s, is_program=is_program)
    assert result.reclaimed_ratio >= 0.0
    assert 0.0 <= result.held_back_ratio <= 1.0
    # Ten periods are a second; the last one may be shorter.
    assert result.held_back_ratio <= result.held_back_seconds_ratio * (1.0 + 9.0 / len(work)) + ROUNDING
    assert result.held_back_seconds_ratio <= 1.0
    assert result.late_ratio >= 0.0
    assert result.delay_s >= 0.0
    assert (result.p99_stretch_s > 0.0) == (result.held_back_ratio > 0.0)
    assert simulate(work, order, s, is_program=is_program) == result


@many
@given(st.lists(st.tuples(thousandths(0.001, 3), thousandths(0, 20)), min_size=1, max_size=30))
def test_steps_of_any_length_become_periods_with_the_same_work(lengths):
    ends, end_s = [], 0.0
    for length_s, cores in lengths:
        end_s += length_s
        ends.append((end_s, cores))
    work = spread(ends, 0.1)
    assert sum(work) == pytest.approx(sum(length_s * cores for length_s, cores in lengths), abs=1e-4)
    assert abs(len(work) - end_s / 0.1) < 1 + 1e-4
    assert max(work) <= max(cores for _, cores in lengths) * 0.1 + ROUNDING
