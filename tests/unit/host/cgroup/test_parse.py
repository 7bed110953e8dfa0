"""Texts of cgroup files to values."""

import pytest

from cpumond.host.cgroup.parse import (
    Pressure,
    parse_cpu_list,
    parse_cpu_max,
    parse_flat_keyed,
    parse_pressure,
    parse_pressure_total,
)

V1_STAT = """\
nr_periods 7
nr_throttled 3
throttled_time 123456789
nr_bursts 0
burst_time 0
"""
V2_STAT = """\
usage_usec 1234567
user_usec 1000000
system_usec 234567
nice_usec 0
core_sched.force_idle_usec 0
nr_periods 7
nr_throttled 3
throttled_usec 12345
nr_bursts 0
burst_usec 0
"""


def test_a_flat_keyed_file_of_either_version():
    assert parse_flat_keyed(V1_STAT)["throttled_time"] == 123456789
    assert parse_flat_keyed(V2_STAT)["core_sched.force_idle_usec"] == 0
    assert parse_flat_keyed(V2_STAT)["usage_usec"] == 1234567


@pytest.mark.parametrize("text", ["", "\n", "alone\n", "a b c\n"])
def test_lines_that_are_no_pair_are_left_out(text):
    assert parse_flat_keyed(text) == {}


@pytest.mark.parametrize(("parse", "texts"), [
    (parse_flat_keyed, ["usage_usec many\n"]),
    (parse_cpu_max, ["", "max", "1 2 3", "all 100000", "max soon"]),
    (parse_cpu_list, ["a", "0-b", "1-2-3"]),
])  # fmt: skip
def test_what_is_no_value_is_an_error(parse, texts):
    for text in texts:
        with pytest.raises(ValueError):  # noqa: PT011 - the words are Python's
            parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", (None, 100000)), ("50000 100000\n", (50000, 100000)), ("1000 1000000", (1000, 1000000))],
)
def test_cpu_max(text, expected):
    assert parse_cpu_max(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 1), ("0-3", 4), ("0-3,8", 5), ("0,2,4-5\n", 4), ("", 0), ("\n", 0), ("0-127", 128), ("7,", 1)],
)
def test_cpu_lists(text, expected):
    assert parse_cpu_list(text) == expected


def test_pressure():
    text = "some avg10=12.50 avg60=3.00 avg300=0.10 total=4500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    assert parse_pressure(text) == Pressure(0.125, 0.03, 4.5)


@pytest.mark.parametrize("text", ["", "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"])
def test_no_pressure(text):
    assert parse_pressure(text) is None


@pytest.mark.parametrize("line", [
    "some ",
    "some avg10",
    "some avg10=1.00",
    "some avg10=x avg60=3.00 avg300=0.10 total=1",
    "some avg10=1.00 avg60=3.00 avg300=0.10 total=x",
    "some avg10=1.00 avg60=3.00 avg300=0.10 total=" + "9" * 5000,
    "some avg10=nan avg60=inf avg300=0.10 total=1",
    "some avg10=1.00 avg60=3.00 avg300=0.10 total=\u00b2",
    "some avg60=3.00 total=1",
])  # fmt: skip
def test_a_damaged_pressure_is_one_exception(line):
    with pytest.raises(ValueError, match="not a pressure line"):
        parse_pressure(f"{line}\n")
    with pytest.raises(ValueError):  # noqa: PT011 - the words are Python's
        parse_pressure_total(line.encode())
