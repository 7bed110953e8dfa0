"""Laws of the job CPU monitor over any trace and any settings."""

import math
from collections.abc import Iterator

import msgspec
import pytest
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import Trace, any_settings, document_settings, traces

from cpumond.core.measures import format_duration, parse_duration_s
from cpumond.monitor.model import CpuReading, Decision, JobState, MonitorSettings, start_state
from cpumond.monitor.policy import check, reject, step
from cpumond.monitor.replay import ReplayRow, TraceRow, parse_trace, replay_rows

many = examples(80)
some = examples(50)


def replay(trace: Trace, s: MonitorSettings) -> list[ReplayRow]:
    return list(replay_rows(trace.rows, trace.cpu_limit_cores, s))


def walk(trace: Trace, s: MonitorSettings) -> Iterator[tuple[JobState, Decision, JobState]]:
    """Each check of a trace: state before, decision, state after."""
    first, *others = trace.rows
    state = start_state(trace.cpu_limit_cores, first.time_s)
    before_s = first.time_s
    for row in others:
        base = CpuReading(0.0, row.time_s)
        interval_s = row.time_s - before_s
        after, decision = step(state, base, row.usage_cores, interval_s, row.throttled_ratio, s, row.pressure_ratio)
        yield state, decision, after
        state, before_s = after, row.time_s


def replay_by_the_text(rows: tuple[TraceRow, ...], cpu_limit: float, s: MonitorSettings) -> list[ReplayRow]:
    """semantics.md 1.3 and 1.4 written down as one straight loop, with the throttle restore."""
    hard = soft = cpu_limit
    floor = min(hard, s.min_cpu_limit)
    size, threshold = s.vote_window_size, s.vote_decision_threshold
    smoothed: float | None = None
    base: float | None = None
    values: list[float] = []  # document form: all smoothed values since the start or the last restore
    votes: list[int] = []  # code form: all votes since the last decision or restore
    results = []
    for row in rows:
        # 1. no sample before start time + start_delay
        if row.time_s < rows[0].time_s + s.start_delay_s:
            continue
        # 3. the first good sample is the base
        if base is None:
            base = row.time_s
            continue
        # 4. the usage is given
        usage = row.usage_cores
        if s.throttle_restore_ratio > 0 and soft < hard and row.throttled_ratio > s.throttle_restore_ratio:
            soft = smoothed = hard
            values, votes = [], []
            results.append(ReplayRow(row.time_s, usage, smoothed, None, "restore", soft))
            continue
        # 5. smoothing
        if smoothed is not None:
            smoothed = s.smoothing_factor * usage + (1 - s.smoothing_factor) * smoothed
        else:
            smoothed = hard if s.smoothing_seed == "limit" else usage
        # 6. votes and their sum
        votes_sum: int | None = None
        if s.vote_mode == "document":
            values.append(smoothed)
            if len(values) >= size:
                below = sum(value < s.relative_lower_bound * soft for value in values[-size:])
                above = sum(value > s.relative_upper_bound * soft for value in values[-size:])
                votes_sum = above - below
        else:
            r = smoothed / soft if soft > 0 else math.nan
            votes.append(-1 if r < s.relative_lower_bound else 1 if r > s.relative_upper_bound else 0)
            if len(votes) >= size:
                votes_sum = sum(votes[-size:])
        # 7. decision; a current limit of 0 is not decided about
        candidate = soft
        if votes_sum is not None and votes_sum > threshold:
            candidate = min(soft * s.increase_coefficient, hard) if soft > 0 else soft
            votes = []
        elif votes_sum is not None and votes_sum < -threshold:
            candidate = max(soft * s.decrease_coefficient, floor) if soft > 0 else soft
            votes = []
        kind = "grow" if candidate > soft else "shrink" if candidate < soft else "hold"
        soft = candidate
        results.append(ReplayRow(row.time_s, usage, smoothed, votes_sum, kind, soft))
    return results


@many
@given(traces(), document_settings())
def test_a_replay_follows_the_text_of_the_semantics(trace, s):
    assert replay(trace, s) == replay_by_the_text(trace.rows, trace.cpu_limit_cores, s)


@some
@given(traces(), document_settings())
def test_counters_and_a_replay_of_their_csv_decide_the_same(trace, s):
    total, readings = 0.0, []
    for row in trace.rows:
        total += row.usage_cores
        readings.append(CpuReading(total, row.time_s))
    state = start_state(trace.cpu_limit_cores, trace.rows[0].time_s)
    checked = []
    for reading in readings:
        state, decision = check(state, reading, reading.at_s, s)
        if decision.kind not in ("delay", "base"):
            checked.append((decision.usage_cores, state.smoothed_cores, decision.votes_sum, state.limit_cores))
    lines = ["time_s,total_cpu_s", *(f"{reading.at_s!r},{reading.total_cpu_s!r}" for reading in readings)]
    replayed = replay_rows(parse_trace(lines, "trace"), trace.cpu_limit_cores, s)
    assert checked == [(row.usage_cores, row.smoothed_cores, row.votes_sum, row.cpu_limit_cores) for row in replayed]


@many
@given(traces(), any_settings())
def test_the_limit_stays_between_its_floor_and_cpu_limit(trace, s):
    floor = min(trace.cpu_limit_cores, max(s.min_cpu_limit, s.min_limit_ratio * trace.cpu_limit_cores))
    for _, _, after in walk(trace, s):
        assert floor <= after.limit_cores <= trace.cpu_limit_cores


@many
@given(traces(), any_settings())
def test_only_a_full_window_beyond_the_threshold_or_a_restore_moves_limits(trace, s):
    checks_in_window = 0
    for before, decision, after in walk(trace, s):
        checks_in_window += 1
        if decision.kind == "restore":
            assert before.limit_cores < after.limit_cores == trace.cpu_limit_cores
            checks_in_window = 0
            continue
        assert (decision.votes_sum is None) == (checks_in_window < s.vote_window_size)
        if decision.changes:
            assert decision.votes_sum is not None
            assert (decision.kind, decision.votes_sum > 0) in (("grow", True), ("shrink", False))
            assert abs(decision.votes_sum) > s.vote_decision_threshold
            if decision.kind == "grow":
                assert after.limit_cores <= before.limit_cores * s.increase_coefficient
            else:
                assert after.limit_cores >= before.limit_cores * s.decrease_coefficient
        if s.vote_mode == "ytsaurus" and abs(decision.votes_sum or 0) > s.vote_decision_threshold:
            checks_in_window = 0


@some
@given(traces(), any_settings(), st.data())
def test_what_comes_later_does_not_change_what_was_decided(trace, s, data):
    length = data.draw(st.integers(1, len(trace.rows)))
    beginning = replay(Trace(trace.cpu_limit_cores, trace.rows[:length]), s)
    assert replay(trace, s)[: len(beginning)] == beginning


@pytest.mark.parametrize("option", ["throttle_restore_ratio", "pressure_restore_ratio"])
@many
@given(trace=traces(), s=any_settings(), thousandth=st.integers(1, 1000))
def test_throttling_or_pressure_below_cpu_limit_restores_it_at_once(option, trace, s, thousandth):
    beyond, of_throttling = min(getattr(s, option), 0.999), option == "throttle_restore_ratio"
    assume(beyond > 0)
    s = msgspec.structs.replace(s, **{option: beyond}, **({"actuator": "quota"} if of_throttling else {}))
    ratio = max(thousandth / 1000, math.nextafter(beyond, 1.0))
    ratios = (ratio, 0.0) if of_throttling else (0.0, ratio)
    for _, _, state in walk(trace, s):
        restored, decision = step(state, CpuReading(0.0, 1e6), 0.0, 1.0, ratios[0], s, ratios[1])
        assert decision.pressure_ratio == ratios[1]
        if state.limit_cores < trace.cpu_limit_cores:
            assert (decision.kind, restored.window) == ("restore", ())
            assert (restored.limit_cores, restored.smoothed_cores) == (trace.cpu_limit_cores, trace.cpu_limit_cores)
            assert restored.hold_until_s == 1e6 + s.restore_hold_s
        else:
            assert decision.kind != "restore"


@many
@given(traces(), any_settings())
def test_pressure_changes_nothing_while_pressure_restore_ratio_is_0(trace, s):
    off = msgspec.structs.replace(s, pressure_restore_ratio=0.0)
    calm = Trace(trace.cpu_limit_cores, tuple(msgspec.structs.replace(row, pressure_ratio=0.0) for row in trace.rows))
    assert replay(trace, off) == replay(calm, off) == replay(calm, s)


@some
@given(traces(), any_settings())
def test_without_a_throttled_check_there_is_no_restore(trace, s):
    quiet = Trace(trace.cpu_limit_cores, tuple(TraceRow(row.time_s, row.usage_cores) for row in trace.rows))
    assert all(row.decision != "restore" for row in replay(quiet, s))


@many
@given(traces(), any_settings())
def test_aggregates_are_sums_and_preemptible_lies_between_0_and_max(trace, s):
    smoothed = preemptible = maximum = 0.0
    for _, decision, after in walk(trace, s):
        smoothed += after.smoothed_cores * decision.interval_s
        preemptible += (trace.cpu_limit_cores - after.limit_cores) * decision.interval_s
        maximum += trace.cpu_limit_cores * decision.interval_s
        assert (after.smoothed_cpu_s, after.preemptible_cpu_s, after.max_cpu_s) == (smoothed, preemptible, maximum)
        assert 0.0 <= preemptible <= maximum


def walk_throttled(
    trace: Trace, s: MonitorSettings, throttled: list[int]
) -> Iterator[tuple[JobState, CpuReading, Decision, JobState]]:
    """Each check of a trace whose ``throttled_s`` stands at the given numbers in turn, which may fall: state before,
    reading, decision, state after."""
    state = start_state(trace.cpu_limit_cores, trace.rows[0].time_s)
    total = 0.0
    for number, row in enumerate(trace.rows):
        total += row.usage_cores
        reading = CpuReading(total, row.time_s, throttled_s=float(throttled[number % len(throttled)]))
        after, decision = check(state, reading, row.time_s, s)
        yield state, reading, decision, after
        state = after


THROTTLED = st.lists(st.integers(0, 1000), min_size=1, max_size=30).flatmap(
    lambda counts: st.sampled_from([counts, sorted(counts)])
)


@many
@given(traces(), any_settings(), THROTTLED)
def test_throttled_time_is_the_counters_growth_and_late_if_lowered(trace, s, throttled):
    throttled_s = late_s = 0.0
    for before, reading, decision, after in walk_throttled(trace, s, throttled):
        if decision.kind not in ("delay", "base"):
            grown = max(reading.throttled_s - before.base.throttled_s, 0.0)
            throttled_s += grown
            late_s += grown if before.limit_cores < trace.cpu_limit_cores and s.actuator == "quota" else 0.0
        assert (after.throttled_cpu_s, after.late_cpu_s) == (throttled_s, late_s)


@some
@given(traces(), any_settings(), THROTTLED)
def test_counted_throttled_time_decides_nothing(trace, s, throttled):
    counted, plain = walk_throttled(trace, s, throttled), walk_throttled(trace, s, [0])
    for (_, _, decision, after), (_, _, other, without) in zip(counted, plain, strict=True):
        assert decision == other
        alike = {"base": without.base, "seen": without.seen, "throttled_cpu_s": 0.0, "late_cpu_s": 0.0}
        assert msgspec.structs.replace(after, **alike) == without


@some
@given(traces(), any_settings())
def test_a_rejected_change_counts_as_if_the_limit_had_stayed(trace, s):
    for before, decision, after in walk(trace, s):
        kept = reject(after, decision)
        assert kept.limit_cores == before.limit_cores
        stayed = before.preemptible_cpu_s + (before.hard_cores - before.limit_cores) * decision.interval_s
        assert math.isclose(kept.preemptible_cpu_s, stayed, rel_tol=1e-9, abs_tol=1e-9 * after.max_cpu_s)


@many
@given(traces(), any_settings(), st.integers(-12, 12))
def test_scaling_all_cores_by_a_power_of_two_scales_all_results(trace, s, exponent):
    factor = 2.0**exponent
    scaled = Trace(
        trace.cpu_limit_cores * factor,
        tuple(msgspec.structs.replace(row, usage_cores=row.usage_cores * factor) for row in trace.rows),
    )
    scaled_settings = msgspec.structs.replace(s, min_cpu_limit=s.min_cpu_limit * factor)
    assert replay(scaled, scaled_settings) == [
        msgspec.structs.replace(
            row,
            usage_cores=row.usage_cores * factor,
            smoothed_cores=row.smoothed_cores * factor,
            cpu_limit_cores=row.cpu_limit_cores * factor,
        )
        for row in replay(trace, s)
    ]


@many
@given(st.floats(min_value=0.0, allow_infinity=False, allow_nan=False) | st.integers(0, 10**9).map(lambda n: n / 1e6))
def test_a_duration_reads_back_from_its_text(seconds):
    assert parse_duration_s(format_duration(seconds)) == seconds


@many
@given(st.text("0123456789. usmhdwin-"))
def test_any_text_is_a_finite_duration_or_refused(text):
    try:
        seconds = parse_duration_s(text)
    except ValueError:
        return
    assert 0.0 <= seconds < math.inf
