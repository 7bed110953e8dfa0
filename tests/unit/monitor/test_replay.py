"""Traces: what is read, what is refused and in which words, and what a replay gives for them."""

from collections.abc import Iterator
from itertools import count, islice

import pytest

from cpumond.core.errors import ConfigError
from cpumond.monitor.model import MonitorSettings
from cpumond.monitor.replay import (
    PeakReplayRow,
    ReplayRow,
    TraceRow,
    count_throttled,
    find_columns,
    parse_trace,
    replay_rows,
)

HEADER_HINT = (
    "expected time_s,usage_cores or time_s,total_cpu_s, optionally with throttled_ratio, pressure_ratio, "
    "throttled_periods"
)


def parse(text: str) -> list[TraceRow]:
    return list(parse_trace(text.splitlines(keepends=True), "t.csv"))


def replay(text: str, cpu_limit_cores: float, **options: object) -> list[ReplayRow]:
    return list(replay_rows(parse(text), cpu_limit_cores, MonitorSettings(**options)))


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


def usage_trace(usages: list[float], header: str = "time_s,usage_cores") -> str:
    return "\n".join([header, "0,0", *(f"{number},{usage}" for number, usage in enumerate(usages, 1))])


@pytest.mark.parametrize(("text", "rows"), [
    # The difference over the real time, which is clamped to 0.
    ("time_s,total_cpu_s\n10,100\n12,105\n13,4\n17,6\n",
     [TraceRow(10.0, 0.0), TraceRow(12.0, 2.5), TraceRow(13.0, 0.0), TraceRow(17.0, 0.5)]),
    ("throttled_ratio,usage_cores,time_s\n0,0,0\n0.5,2,1\n", [TraceRow(0.0, 0.0), TraceRow(1.0, 2.0, 0.5)]),
    ("time_s,usage_cores,pressure_ratio,throttled_periods\n0,9,,\n1,2.5,0.75,3\n",
     [TraceRow(0.0, 9.0, throttled_periods=0.0), TraceRow(1.0, 2.5, pressure_ratio=0.75, throttled_periods=3.0)]),
    (
        '\ufeff# by hand\r\n\r\n "time-s" , usage_cores\r\n# 0,5\r\n  \r\n 0 ,\t0\r\n  # end\r\n"1",2\r\n',
        [TraceRow(0.0, 0.0), TraceRow(1.0, 2.0)],
    ),
    # The first row is only the base.
    ("time_s,usage_cores,throttled_ratio\n0,,\n1,2.5,0.1", [TraceRow(0.0, 0.0), TraceRow(1.0, 2.5, 0.1)]),
])  # fmt: skip
def test_what_is_read(text, rows):
    assert parse(text) == rows


@pytest.mark.parametrize(("text", "message"), [
    ("", f"t.csv: is empty; {HEADER_HINT}"),
    ("\n# only a comment\n", f"t.csv: is empty; {HEADER_HINT}"),
    ("\n0,1\n", f"t.csv: line 2: unknown column '0'; {HEADER_HINT}"),
    ("time_s,usage\n", f"t.csv: line 1: unknown column 'usage'; {HEADER_HINT}"),
    ("usage_cores\n", f"t.csv: line 1: column time_s is missing; {HEADER_HINT}"),
    ("time_s,usage_cores,time_s\n", f"t.csv: line 1: column time_s is given twice; {HEADER_HINT}"),
    ("time_s,usage_cores,total_cpu_s\n",
     f"t.csv: line 1: one of the columns usage_cores and total_cpu_s is needed; {HEADER_HINT}"),
])  # fmt: skip
def test_a_bad_header_is_refused_with_what_is_expected(text, message):
    assert refused(text) == message


@pytest.mark.parametrize(("text", "message"), [
    ("time_s,usage_cores\n0,0\n\n1\n", "t.csv: line 4: expected 2 columns (time_s,usage_cores), got 1"),
    ("time_s,total_cpu_s\n0,-inf\n",
     "t.csv: line 2: column total_cpu_s: expected a finite number of CPU seconds, got '-inf'"),
    ("time_s,total_cpu_s\n0,-1e308\n1,1e308\n",
     "t.csv: line 3: column total_cpu_s: expected a finite usage since the row before, got inf"),
    ("time_s,usage_cores\ninf,0\n", "t.csv: line 2: column time_s: expected a finite number of seconds, got 'inf'"),
    ("time_s,usage_cores\n0," + "1" * 200_000,
     "t.csv: line 2: is longer than 64 KiB; expected comma-separated numbers"),
])  # fmt: skip
def test_a_bad_row_is_refused_naming_file_line_column_and_what_is_expected(text, message):
    assert refused(text) == message


USAGE, RATIO, LATER = "a finite number of cores >= 0", "a number in [0, 1]", "more than the row before (0.0)"


@pytest.mark.parametrize(("column", "value", "expected"), [
    *(("usage_cores", value, f"{USAGE}, got '{value}'") for value in ("x", "", "-0.5", "nan", "1e999")),
    *(("throttled_ratio", value, f"{RATIO}, got '{value}'") for value in ("1.01", "-0.1")),
    *(("pressure_ratio", value, f"{RATIO}, got '{value}'") for value in ("2", "-0.1")),
    ("throttled_periods", "-1", "a number of periods >= 0, got '-1'"),
    ("time_s", "0", f"{LATER}, got 0.0"),
    ("time_s", "-1", f"{LATER}, got -1.0"),
])  # fmt: skip
def test_a_bad_value_is_refused_with_what_its_column_takes(column, value, expected):
    row = {"time_s": "1", "usage_cores": "0", "throttled_ratio": "0", "pressure_ratio": "0", "throttled_periods": "0"}
    text = "\n".join([",".join(row), "0,0,0,0,0", ",".join((row | {column: value}).values())])
    assert refused(text) == f"t.csv: line 3: column {column}: expected {expected}"


def test_what_csv_itself_refuses_is_one_sentence():
    rows = parse_trace(["time_s,usage_cores\n", "0,1\r2,3\n"], "t.csv")
    with pytest.raises(ConfigError, match="line 2: expected comma-separated numbers: "):
        next(rows)


def test_a_row_under_pressure_restores_the_limit():
    rows = [TraceRow(float(number), 0.0) for number in range(30)]
    rows.append(TraceRow(30.0, 1.0, pressure_ratio=0.5))
    results = list(replay_rows(rows, 10.0, MonitorSettings(pressure_restore_ratio=0.4)))
    assert results[-2].cpu_limit_cores < 10.0
    assert results[-1] == ReplayRow(30.0, 1.0, 10.0, None, "restore", 10.0)
    off = list(replay_rows(rows, 10.0, MonitorSettings()))
    assert off[-1].cpu_limit_cores < off[-2].cpu_limit_cores


@pytest.mark.parametrize("options", [{"mode": "off"}, {"enable_cpu_reclaim": False}, {"check_period_s": 60.0}])
def test_mode_enable_cpu_reclaim_and_check_period_do_not_matter(options):
    text = usage_trace([0.0] * 50)
    assert replay(text, 10.0, **options) == replay(text, 10.0)


def test_one_row_at_a_time_is_held_so_an_endless_trace_can_be_replayed():
    def endless() -> Iterator[str]:
        yield "time_s,total_cpu_s\n"
        for number in count():
            yield f"{number},{number * 2}\n"

    results = replay_rows(parse_trace(endless(), "t.csv"), 10.0, MonitorSettings())
    assert [row.time_s for row in islice(results, 3)] == [1.0, 2.0, 3.0]


PEAK = MonitorSettings(limit_rule="peak")


def replay_idle(*last: TraceRow, settings: MonitorSettings = PEAK) -> list[ReplayRow]:
    """Half a minute with hardly any use, and then ``last``; of a job of 10 cores."""
    return list(replay_rows([*(TraceRow(float(number), 0.1) for number in range(30)), *last], 10.0, settings))


def test_rule_peak_is_obeyed_and_shows_what_it_remembers():
    rows = replay_idle()
    assert all(isinstance(row, PeakReplayRow) for row in rows)
    assert [row.cpu_limit_cores for row in rows[:10]] == [10.0] * 10
    assert rows[-1].cpu_limit_cores < 6.0
    assert rows[-1].peak_cores == pytest.approx(10.0 / 1.0 * 2 ** -(29 / 19.5), rel=0.02)
    assert rows[-1].caution == pytest.approx(2.0 - 29 * 0.004)
    assert all(row.votes_sum is None for row in rows)


@pytest.mark.parametrize(("row", "held_s"), [
    (TraceRow(30.0, 1.0, throttled_ratio=0.5), 0.5),
    (TraceRow(30.0, 1.0, throttled_ratio=0.001), 0.1),
    (TraceRow(30.0, 1.0, throttled_ratio=0.5, throttled_periods=3.0), 0.3),
    (TraceRow(30.0, 1.0, throttled_periods=2.0), 0.2),
])  # fmt: skip
def test_a_throttled_row_gives_all_back_and_costs_caution(row, held_s):
    *_, before, after = replay_idle(row)
    assert (after.decision, after.cpu_limit_cores) == ("restore", 10.0)
    assert after.caution == pytest.approx(before.caution - 0.004 + held_s)


def test_a_row_that_was_not_throttled_gives_nothing_back():
    assert replay_idle(TraceRow(30.0, 1.0, throttled_ratio=0.5, throttled_periods=0.0))[-1].decision != "restore"
    assert replay_idle(TraceRow(30.0, 1.0))[-1].decision != "restore"


def test_a_time_without_end_is_one_number_of_periods():
    assert count_throttled(TraceRow(1e308, 0.0, throttled_ratio=1.0), 1e308, 0.1) == 2**53


def test_the_columns_of_the_documents_rule_are_as_they_were():
    columns = "time_s,usage_cores,smoothed_cores,votes_sum,decision,cpu_limit_cores"
    assert ",".join(find_columns(MonitorSettings())) == columns
    assert find_columns(PEAK) == (*find_columns(MonitorSettings()), "peak_cores", "caution")
