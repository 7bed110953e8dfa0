"""What ``record`` keeps is enough to replay both rules, and what ``dry-run`` says of where a limit would stay."""

import io

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from cpumond.cli.agent.watch import _write_trace, describe_steady
from cpumond.monitor.model import CpuReading, MonitorSettings, start_state
from cpumond.monitor.replay import parse_trace, replay_rows
from cpumond.monitor.rules import RULES, check
from cpumond.monitor.steady import SteadyState

QUARTERS = st.integers(0, 32).map(lambda number: number / 4)
"""Exact as floats, and so are their sums."""


@examples(80)
@given(
    st.sampled_from(sorted(RULES)),
    st.lists(st.tuples(QUARTERS, st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=60),
)
def test_a_recorded_trace_replays_to_what_the_checks_decide(rule, seconds):
    """A job's counters checked as they are, and the trace of them replayed: the same limits, peaks and cautions."""
    s = MonitorSettings(limit_rule=rule, actuator="quota", throttle_restore_ratio=0.1)
    readings = [CpuReading(100.0, 50.0, nr_periods=7, nr_throttled=3)]
    for usage_cores, periods, throttled in seconds:
        last = readings[-1]
        counted = {"nr_periods": last.nr_periods + periods, "nr_throttled": last.nr_throttled + min(throttled, periods)}
        readings.append(CpuReading(last.total_cpu_s + usage_cores, last.at_s + 1.0, **counted))
    file = io.StringIO()
    assert _write_trace(file, iter(readings), False) == len(readings)
    rows = list(replay_rows(parse_trace(file.getvalue().splitlines(), "t.csv"), 8.0, s))
    state = start_state(8.0, 50.0)
    told = []
    for reading in readings:
        state, decision = check(state, reading, reading.at_s, s)
        if decision.usage_cores is not None:
            told.append((state, decision))
    assert [row.cpu_limit_cores for row in rows] == [state.limit_cores for state, _ in told]
    assert [row.decision for row in rows] == [decision.kind for _, decision in told]
    if rule == "peak":
        assert [(row.peak_cores, row.caution) for row in rows] == [(x.peak_cores, x.caution) for x, _ in told]


@pytest.mark.parametrize(("steady", "rule", "text"), [
    ((1.0, 1.0, 1.0, 57.0, 0.75), "document", "limit 1.0 of 4 cores, 75% reclaimed, after about 60 s."),
    ((1.0, 1.0, 1.0, 34.0, 0.75), "peak", "limit 1.0 of 4 cores, 75% reclaimed, after about 30 s."),
    ((1.9, 1.2, 4.0, 12.4, 0.525), "document",
     "limit 1.9 of 4 cores, 52% reclaimed on average, between 1.2 and 4, after about 12 s."),
    ((1.9, 1.9, 1.9, 400.0, 0.525), "document", "limit 1.9 of 4 cores, 52% reclaimed, after about 7 min."),
    ((4.0, 4.0, 4.0, 0.0, 0.0), "peak", "the limit would stay at 4 cores, nothing would be reclaimed."),
])  # fmt: skip
def test_where_a_limit_would_stay_is_one_sentence(steady, rule, text):
    told = describe_steady(SteadyState(*steady), 4.0, MonitorSettings(limit_rule=rule))
    assert told == f"At this usage{' by rule peak' if rule == 'peak' else ''}: {text}"
