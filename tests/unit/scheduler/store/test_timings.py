"""Durations in buckets."""

import itertools
import time

import pytest

from cpumond.scheduler.store import Change
from cpumond.scheduler.store.timings import BOUNDS_S, Histogram, Timings, name_write


def test_a_bound_belongs_to_its_own_bucket_and_the_longest_to_the_last() -> None:
    taken = Histogram()
    for took_s in (0.0, BOUNDS_S[0], BOUNDS_S[1], BOUNDS_S[1] + 1e-9, BOUNDS_S[-1], 1e6):
        taken.observe(took_s, "")
    assert taken.counts == [2, 1, 1, *[0] * (len(BOUNDS_S) - 4), 1, 1]
    assert taken.sum_up()[-2:] == [5, 6]
    assert taken.count == 6
    assert taken.sum_s == pytest.approx(1e6 + BOUNDS_S[-1] + BOUNDS_S[0] + 2 * BOUNDS_S[1])


def test_each_bucket_keeps_the_newest_that_fell_into_it() -> None:
    taken, begun = Histogram(), time.time()
    for took_s, node in ((0.003, "n1"), (0.004, "n2"), (3.0, "n3")):
        taken.observe(took_s, node)
    kept = [each for each in taken.newest if each is not None]
    assert [each[:2] for each in kept] == [("n2", 0.004), ("n3", 3.0)]
    assert all(begun <= each[2] <= time.time() for each in kept)


def test_bounds_rise_by_little_enough_to_read_quantiles() -> None:
    assert all(1.0 < upper / lower <= 2.5 for lower, upper in itertools.pairwise(BOUNDS_S))
    assert BOUNDS_S[0] <= 1e-4
    assert BOUNDS_S[-1] >= 10.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([Change("operation", "1-2", b"{}"), Change("job", "3-4", b"{}")], "operation/1-2"),
        ([Change("node", "n1", None)], "node/n1"),
        ([Change("token", "5e88", b"{}")], "token"),
        ([], "log"),
    ],
)
def test_a_write_is_called_by_its_first_record_and_tells_no_secret(changes: list[Change], name: str) -> None:
    assert name_write(changes) == name


def test_the_status_has_counts_and_sums_by_their_names() -> None:
    timings = Timings(late_updates=3)
    timings.heartbeat.observe(0.5, "n1")
    numbers = timings.list_numbers()
    names = "heartbeats", "heartbeats_s", "late_updates", "store_writes"
    assert [numbers[name] for name in names] == [1.0, 0.5, 3.0, 0.0]
    assert "late_at" not in numbers, "there was none"
    timings.late_at = 7.0
    assert timings.list_numbers()["late_at"] == 7.0
