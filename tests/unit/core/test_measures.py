"""Durations and cores as people and kernels write them."""

import math

import pytest

from cpumond.core.measures import cores_to_quota_us, format_duration, parse_duration_s, quota_to_cores


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(1000, 1.0), (250, 0.25), (0, 0.0), (0.5, 0.0005), ("1000", 1.0), (" 250 ", 0.25), ("1e3", 1.0)],
)
def test_a_bare_number_is_milliseconds(value, seconds):
    assert parse_duration_s(value) == seconds


@pytest.mark.parametrize(("text", "seconds"), [
    ("100us", 0.0001), ("250ms", 0.25), ("570ms", 0.57), ("1s", 1.0), (".5s", 0.5), ("1.s", 1.0), ("1.5 s", 1.5),
    ("2m", 120.0), ("2min", 120.0), ("1h", 3600.0), ("1d", 86400.0), ("1w", 604800.0), ("0s", 0.0),
    ("1h30m", 5400.0), (" 1h 30m 10s ", 5410.0),
])  # fmt: skip
def test_a_string_carries_its_unit_and_may_add_several(text, seconds):
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(("value", "message"), [
    (True, "expected a duration: milliseconds as a number, or a string with a unit"),
    (None, "expected a duration: milliseconds as a number, or a string with a unit"),
    ([], "expected a duration: milliseconds as a number, or a string with a unit"),
    (-1, "expected a duration that is finite and not negative, got -1"),
    ("-1", "expected a duration that is finite and not negative, got -1.0"),
    (math.nan, "expected a duration that is finite and not negative, got nan"),
    ("inf", "expected a duration that is finite and not negative, got inf"),
    (10**400, "expected a duration that is finite and not negative, got 1000"),
    ("9" * 400 + "s", "expected a duration that is finite, got '999"),
    ("", "got an empty string"),
    ("  ", "got '  '"),
    ("1x", "got '1x'"),
    ("-1s", "got '-1s'"),
    ("1s 5", "got '1s 5'"),
    ("s", "got 's'"),
    ("1S", "got '1S'"),
    ("\u0661s", "got '\u0661s'"),
])  # fmt: skip
def test_anything_else_is_refused_with_the_accepted_forms(value, message):
    with pytest.raises(ValueError, match=r"^expected a duration") as caught:
        parse_duration_s(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0, "0s"), (0.0001, "0.1ms"), (0.25, "250ms"), (0.57, "570ms"), (1.0, "1s"), (1.5, "1.5s"), (10.0, "10s"),
    (60.0, "1m"), (90.0, "90s"), (300.0, "5m"), (3600.0, "1h"), (5400.0, "90m"), (86400.0, "1d"), (604800.0, "7d"),
    (1234.567, "1234.567s"), (1234567.0, "1234567s"), (0.1 + 0.2, "300.00000000000004ms"), (-1.0, "-1s"),
    (4.2857142857142855e-06, "0.0000042857142857142855s"),  # of which milliseconds would lose digits
    (math.inf, "infs"),
])  # fmt: skip
def test_a_duration_is_written_as_people_write_it_and_loses_no_digit(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("cores", "period_us", "quota_us"),
    [(1.0, 100_000, 100_000), (0.5, 100_000, 50_000), (8.32972, 100_000, 832_972), (1e-6, 100_000, 0)],
)
def test_quota_is_cores_times_period_rounded_to_microseconds(cores, period_us, quota_us):
    assert cores_to_quota_us(cores, period_us) == quota_us


def test_no_quota_is_infinitely_many_cores():
    assert quota_to_cores(None, 100_000) == math.inf
    assert quota_to_cores(150_000, 100_000) == 1.5
