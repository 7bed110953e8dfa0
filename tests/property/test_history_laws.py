"""Laws of the history: whatever is added and restarted, each moment is there once and sums stay."""

import math
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from examples import examples
from history_ticks import PERIOD_S, RATES, START, Tape, integral, row
from hypothesis import given
from hypothesis import strategies as st

from cpumond.scheduler.history import store
from cpumond.scheduler.history.model import OPERATION, POOL, Amounts, Key
from cpumond.scheduler.history.series import merge_columns, split
from cpumond.scheduler.history.store import HistoryStore

KEYS = (Key(POOL, "t", "<Root>"), Key(POOL, "t", "p"), Key(OPERATION, "t", "o"), Key(OPERATION, "u", "o"))
numbers = st.floats(0.0, 1000.0, width=32)
points = st.fixed_dictionaries(
    {},
    optional={
        key: st.builds(
            lambda kind, rates, limit: row(kind, limit_cores=limit, **dict(zip(RATES, rates, strict=True))),
            st.just(key.kind),
            st.tuples(*[st.one_of(numbers, st.just(0.0))] * 5),
            st.one_of(numbers, st.just(math.nan)),
        )
        for key in KEYS
    },
)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("tick"), points, st.sampled_from([PERIOD_S, 7.5, 12.0, 60.0]), st.sampled_from([0.0, 0.0, 500.0])
        ),
        st.tuples(st.just("ticks"), points, st.integers(1, 40)),
        st.tuples(st.just("restart"), st.booleans()),
    ),
    min_size=1,
    max_size=25,
)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with mock.patch.multiple(store, CHUNK_TICKS=4):
        yield


@examples(30)
@given(steps, st.integers(1, 50), st.floats(0.0, 1.0))
def test_each_moment_is_there_once(work, max_points, cut):
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), work, max_points, cut)


def check(folder: Path, work: list[tuple], max_points: int, cut: float) -> None:
    def open_store(path: Path, now: float) -> HistoryStore:
        return HistoryStore(str(path), 1e6, PERIOD_S, 2**24, now)

    path = folder / "history.db"
    store, tape = open_store(path, START), Tape()
    expected = dict.fromkeys(KEYS, 0.0)
    covered_s = 0.0

    def add(point: dict[Key, list[float]], interval_s: float, gap_s: float) -> float:
        for key, values in point.items():
            expected[key] += values[-5] * interval_s
        store.add(tape.tick(point, interval_s, gap_s))
        return interval_s

    for number, step in enumerate(work):
        if step[0] == "tick":
            covered_s += add(*step[1:])
        elif step[0] == "ticks":
            covered_s += sum(add(step[1], PERIOD_S, 0.0) for _ in range(step[2]))
        else:
            answers = [store.read(key, START, tape.at, 10_000) for key in KEYS]
            if step[1]:  # as a killed process leaves it
                path = folder / f"history{number}.db"
                for suffix in ("", "-wal"):
                    shutil.copyfile(f"{store.file.path}{suffix}", f"{path}{suffix}")
            store.close()
            store = open_store(path, tape.at)
            assert [store.read(key, START, tape.at, 10_000) for key in KEYS] == answers
            tape = Tape(tape.at)
    assert store.file.errors == 0
    check_views(store, tape.at, expected, max_points)
    middle = START + cut * (tape.at - START)
    of_all, first, second, days = (
        store.sum_points(0.0, tape.at, None, 100),
        store.sum_points(0.0, middle, None, 9),
        store.sum_points(middle, tape.at, None, 9),
        store.sum_days(0.0, tape.at),
    )
    assert of_all.covered_s == pytest.approx(covered_s)
    assert days.covered_s == pytest.approx(covered_s)
    assert first.covered_s + second.covered_s == pytest.approx(covered_s)
    for key in KEYS:
        told = [each.totals.get(key, Amounts()).used for each in (of_all, first, second, days)]
        assert told[0] == pytest.approx(expected[key], rel=1e-4, abs=1e-3)
        assert told[1] + told[2] == pytest.approx(expected[key], rel=1e-4, abs=1e-3)
        if key.kind == POOL:
            assert told[3] == pytest.approx(expected[key], rel=1e-4, abs=1e-3)
    store.close()


def check_views(store: HistoryStore, until: float, expected: dict[Key, float], max_points: int) -> None:
    for key in KEYS:
        for most in (10_000, max_points):
            view = store.read(key, START, until, most)
            assert len(view.times) <= most
            assert integral(view, "used_cores") == pytest.approx(expected[key], rel=1e-4, abs=0.1)
            if most == 10_000:
                begins = [end - interval for end, interval in zip(view.times, view.intervals, strict=True)]
                assert all(begin >= end - 0.01 for begin, end in zip(begins[1:], view.times, strict=False))


@given(
    st.lists(st.tuples(st.floats(0.1, 100.0), st.one_of(numbers, st.just(math.nan))), min_size=1, max_size=50),
    st.floats(1.0, 500.0),
)
def test_merging_keeps_rate_times_interval(rows, width_s):
    intervals = array("d", (interval for interval, _ in rows))
    ends = [sum(intervals[: number + 1]) for number in range(len(rows))]
    columns = [array("f", (value for _, value in rows))] * 5
    groups = split(ends, lambda end: int(end / width_s))
    assert [a for a, _ in groups][1:] == [b for _, b in groups][:-1]
    merged = merge_columns(intervals, groups, columns, has_rates=True)[-1]
    before = sum(value * interval for interval, value in rows if value == value)
    after = sum(value * sum(intervals[a:b]) for (a, b), value in zip(groups, merged, strict=True) if value == value)
    assert after == pytest.approx(before, rel=1e-4, abs=1e-3)
