"""Numbers as people read them."""

import pytest

from cpumond.core.measures import format_cores
from cpumond.core.words import LAST_DAY, format_left, format_measured, format_time


@pytest.mark.parametrize(("cores", "text"), [
    (None, "no limit"), (10.0, "10"), (3.2, "3.2"), (2.109923, "2.11"), (0.2054, "0.205"), (0.00412, "0.0041"),
    (4.7e-7, "<0.001"), (0.0, "0"),
])  # fmt: skip
def test_cores_are_short(cores, text):
    assert format_cores(cores) == text


@pytest.mark.parametrize(("cores", "text"), [(None, "-"), (0.0481, "0.048"), (0.0, "0.000"), (1.8, "1.80")])
def test_measured_cores_below_one_have_three_digits(cores, text):
    assert format_measured(cores) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1s"), (59.6, "1m"), (570, "9m30s"), (3600, "1h"), (90061, "25h1m1s")]
)
def test_a_remaining_time_has_no_fractions(seconds, text):
    assert format_left(seconds) == text


def test_a_time_that_no_calendar_has_is_its_last_one():
    assert format_time(1e300) == format_time(LAST_DAY)
    assert format_time(1e300).startswith("9999-12-")
