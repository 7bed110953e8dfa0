"""A gauge of many pools at once: from memory, from the file, from what is being made coarser."""

from __future__ import annotations

from pathlib import Path

import pytest
from history_ticks import PERIOD_S, START, Tape, row

from cpumond.scheduler.history.model import COLUMNS, NOT_KNOWN, POOL, Key
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.history.trends import Trends

LIMIT = COLUMNS["pool"].index("limit_cores")
POOLS = {name: Key(POOL, "t", name) for name in ("a", "b", "late")}


def test_a_part_is_the_mean_of_its_points_weighed_by_their_time():
    trend = Trends(0.0, 100.0, 4).begin()
    for end, interval_s, value in ((10.0, 10.0, 1.0), (25.0, 15.0, 2.0), (50.0, 25.0, NOT_KNOWN), (100.0, 5.0, 7.0)):
        trend.add(end, interval_s, value)
    assert trend.values() == [1.6, None, None, 7.0]


@pytest.mark.parametrize("ticks", [20, 100, 1000])
def test_pools_are_read_together_as_each_is_alone(tmp_path: Path, ticks: int):
    tape, store = Tape(), HistoryStore(str(tmp_path / "history.db"), 86_400.0, PERIOD_S, 2**26, START)
    for number in range(ticks):
        late = {POOLS["late"]: row(POOL, limit_cores=3.0)} if number > ticks / 2 else {}
        points = {POOLS[name]: row(POOL, limit_cores=part * (number % 5)) for name, part in (("a", 1.0), ("b", 2.0))}
        store.add(tape.tick(points | late))
    times = Trends(tape.at - ticks * PERIOD_S, tape.at, 10)
    found = store.read_trends("t", ["a", "late", "unknown"], LIMIT, times)
    assert set(found) == {"a", "late"}
    assert sum(found["a"]) == pytest.approx(20.0, abs=2.0)
    assert found["late"][0] is None
    assert found["late"][9] == 3.0
    for name, values in found.items():
        alone = store.read(POOLS[name], times.since, times.until, 100_000)
        trend = times.begin()
        for at, interval_s, value in zip(alone.times, alone.intervals, alone.columns["limit_cores"], strict=True):
            trend.add(at, interval_s, NOT_KNOWN if value is None else value)
        assert values == trend.values()
    assert store.read_trends("other", ["a"], LIMIT, times) == {}
    store.close()
