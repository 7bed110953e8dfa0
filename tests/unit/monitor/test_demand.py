"""Demand of a simulated job: what is read, how it falls into periods, what is refused and in which words."""

from __future__ import annotations

from array import array

import pytest

from cpumond.core.errors import ConfigError
from cpumond.monitor.demand import Demand, read_demand, spread


def read(text: str, duration_s: float | None = None, order_cores: float = 4.0) -> Demand:
    return read_demand(text.splitlines(keepends=True), "t.csv", order_cores, 0.1, duration_s)


def cores(work: array[float]) -> list[float]:
    return [round(each * 10, 9) for each in work]


def refused(text: str, duration_s: float | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, duration_s)
    return str(caught.value)


@pytest.mark.parametrize(("text", "duration_s", "expected"), [
    ("seconds,cores\n0,1\n0.2,3\n0.5,2\n", None, [1, 1, 3, 3, 3, 2, 2, 2]),
    ("0,1\n0.2,3\n", None, [1, 1, 3, 3]),
    ("cores,seconds\n1,0\n3,0.2\n", None, [1, 1, 3, 3]),
    ("\ufeff# by hand\n\nSeconds , Cores\n 0 , 1\n# more\n0.2,3\n", None, [1, 1, 3, 3]),
    ("1700000000,1\n1700000000.2,3\n", None, [1, 1, 3, 3]),
    ("-0.2,1\n0,3\n", None, [1, 1, 3, 3]),
    ("0,1\n0.02,6\n0.05,0\n0.18,10\n0.2,0\n0.3,0\n", None, [2, 2, 0, 0]),
    ("0,1\n0.2,3\n0.5,2\n", 0.3, [1, 1, 3]),
    ("0,1\n0.2,3\n", 0.6, [1, 1, 3, 3, 3, 3]),
    ("0,1\n", 0.2, [1, 1]),
], ids=[
    "a row holds until the next one, the last as long as the one before", "no header", "columns in any order",
    "comments and blanks", "times of a clock", "times before 0", "rows within a period add up", "cut",
    "the last row lasts", "one row",
])  # fmt: skip
def test_what_rows_are_in_periods(text, duration_s, expected):
    demand = read(text, duration_s)
    assert (cores(demand.work_cpu_s), demand.notes, demand.at_order_cpu_s) == (expected, (), None)


def test_rows_of_a_tenth_of_a_second_are_one_period_each():
    rows = [(number * 0.1, number % 7) for number in range(20_000)]
    text = "".join(f"{seconds!r},{wanted}\n" for seconds, wanted in rows)
    assert cores(read(text).work_cpu_s) == [wanted for _, wanted in rows]


def test_a_last_period_that_is_not_full_has_less_work():
    assert cores(spread([(0.25, 2.0)], 0.1)) == [2, 2, 1]
    assert cores(spread([(0.001, 2.0)], 0.1)) == [0.02]


def test_a_recorded_row_is_about_the_time_before_it():
    demand = read("time_s,usage_cores\n5,9\n5.2,1\n5.3,3\n")
    assert cores(demand.work_cpu_s) == [1, 1, 3]
    assert demand.at_order_cpu_s is None
    assert demand.notes[0].startswith("A recorded trace is not demand: without a column throttled_ratio ")
    assert demand.notes[1] == "It does not show bursts shorter than a row (150ms on average)."


def test_rows_in_which_the_job_was_throttled_may_have_wanted_all():
    demand = read("time-s,total_cpu_s,throttled_ratio\n0,0,0\n0.2,0.2,0\n0.3,0.3,0.01\n0.4,1.2,1\n")
    assert cores(demand.work_cpu_s) == [1, 1, 1, 9]
    assert demand.at_order_cpu_s is not None
    assert cores(demand.at_order_cpu_s) == [1, 1, 4, 9]
    assert demand.notes[0] == (
        "A recorded trace is not demand: in 2 of 3 rows the job was throttled, and its demand then is unknown: "
        "between the recorded usage and the full request in these rows."
    )


def test_a_trace_without_a_throttled_row_is_as_good_as_its_rows_are_short():
    demand = read("time_s,usage_cores,throttled_ratio\n0,0,0\n1,1,0\n2,1,0\n")
    assert demand.at_order_cpu_s is None
    assert demand.notes == (
        "A recorded trace is not demand; no row was throttled, so the usage in each row is the demand.",
        "It does not show bursts shorter than a row (1s on average).",
    )


def test_a_recorded_trace_is_cut_but_never_made_longer():
    assert cores(read("time_s,usage_cores\n0,0\n1,2\n", 0.2).work_cpu_s) == [2, 2]
    told = refused("time_s,usage_cores\n0,0\n1,2\n", 2.0)
    assert told == "t.csv: 1s were recorded, less than the --duration of 2s; omit this option"


EXPECTED = (
    "expected seconds,cores (demand: each row holds until the next one), or a recorded trace with "
    "time_s,usage_cores or time_s,total_cpu_s"
)


@pytest.mark.parametrize(("text", "message"), [
    ("", f"t.csv: is empty; {EXPECTED}"),
    ("\n# nothing\n", f"t.csv: is empty; {EXPECTED}"),
    ("seconds,cores\n", f"t.csv: is empty; {EXPECTED}"),
    ("0,1\n", "t.csv: has only one row, so its length is unknown; give --duration, or add a row"),
    ("time_s,usage_cores\n0,0\n", "t.csv: has only one row, which is the baseline of the next one; record for longer"),
    ("\nwhen,what\n0,1\n", f"t.csv: line 2: unknown header 'when,what'; {EXPECTED}"),
    ("seconds\n0\n", f"t.csv: line 1: unknown header 'seconds'; {EXPECTED}"),
    ("seconds,cores,cores\n", f"t.csv: line 1: unknown header 'seconds,cores,cores'; {EXPECTED}"),
    ("0,1\n1\n", "t.csv: line 2: expected 2 columns (seconds,cores), got 1"),
    ("0,1\n1,2,3\n", "t.csv: line 2: expected 2 columns (seconds,cores), got 3"),
    ("0,1\n1,x\n", "t.csv: line 2: column cores: expected a number in [0, 1e+06], got 'x'"),
    ("0,1\n1,-0.1\n", "t.csv: line 2: column cores: expected a number in [0, 1e+06], got '-0.1'"),
    ("0,1\n1,nan\n", "t.csv: line 2: column cores: expected a number in [0, 1e+06], got 'nan'"),
    ("0,1\n1,1e7\n", "t.csv: line 2: column cores: expected a number in [0, 1e+06], got '1e7'"),
    ("0,1\ninf,1\n", "t.csv: line 2: column seconds: expected a number in [-1e+15, 1e+15], got 'inf'"),
    ("0,1\n0,1\n", "t.csv: line 2: column seconds: expected more than the row before (0.0), got 0.0"),
    ("0,1\n-1,1\n", "t.csv: line 2: column seconds: expected more than the row before (0.0), got -1.0"),
    ("0,1\n1e7,1\n", "t.csv: lasts 20000000s; at most 7d are simulated: shorten it with --duration"),
    ("x" * 70_000, "t.csv: line 1: is longer than 64 KiB; expected comma-separated numbers"),
    ("time_s,usage_cores\n0,0\n1,1e9\n", "t.csv: at 1 s: 1e+09 cores are more than 1e+06"),
])  # fmt: skip
def test_what_is_no_demand_is_refused_with_a_sentence(text, message):
    assert refused(text) == message
