"""The history's file: restarts, kills, damage, full disks, its size, days in points and totals, earlier versions."""

import os
import random
import sqlite3
import stat
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from history_ticks import PERIOD_S, START, Tape, row
from structlog.testing import capture_logs

from cpumond.scheduler.history import store as history_store
from cpumond.scheduler.history.model import (
    ARM,
    DAY_S,
    JOB,
    NODE,
    OPERATION,
    POOL,
    USER,
    Amounts,
    HistoryView,
    Key,
    day_of,
)
from cpumond.scheduler.history.store import CHUNK_TICKS, MEMORY_TICKS, HistoryStore
from cpumond.scheduler.model import ROOT_POOL

ROOT, P, OP, N, J = (
    Key(POOL, "t", ROOT_POOL), Key(POOL, "t", "p"), Key(OPERATION, "t", "o"), Key(NODE, "", "n"), Key(JOB, "", "j"),
)  # fmt: skip
ALL = (ROOT, P, OP, N, J)
ANN, CONTROL = Key(USER, "t", "ann"), Key(ARM, "t", "control")
LENGTH_S = 40 * DAY_S
MIB = 2**20
OPENED: list[HistoryStore] = []


def open_store(path: Path | str | None, now: float = START, **settings: float) -> HistoryStore:
    given = {"length_s": LENGTH_S, "period_s": PERIOD_S, "max_size": 64 * MIB, **settings}
    OPENED.append(HistoryStore(None if path is None else str(path), now=now, **given))  # type: ignore[arg-type]
    return OPENED[-1]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what a test has opened; twice does no harm."""
    yield
    while OPENED:
        OPENED.pop().close()


def points(number: float) -> dict[Key, list[float]]:
    return {
        ROOT: row(POOL, used_cores=2 * number, limit_cores=8.0),
        P: row(POOL, used_cores=number, limit_cores=4.0, usage_ratio=0.5),
        OP: row(OPERATION, used_cores=number, ordered_cores=2 * number, limit_cores=number, jobs=1.0),
        N: row(NODE, capacity_cores=8.0, jobs=number),
        J: row(JOB, cpu_limit_cores=2.0, votes_sum=-number),
    }


def fill(store: HistoryStore, tape: Tape, ticks: int, first: int = 0) -> None:
    for number in range(first, first + ticks):
        value = float(number % 17)
        store.add(tape.tick(points(value), totals={ANN: Amounts(used=value), P: Amounts(extra_jobs=0.1)}))


def fill_many(store: HistoryStore, tape: Tape, keys: list[Key], number: int) -> None:
    """One tick of values that do not pack well."""
    store.add(tape.tick({key: row(OPERATION, used_cores=(number * 7919 + n) % 1e4 / 7) for n, key in enumerate(keys)}))


def read_all(store: HistoryStore, until: float, max_points: int = 100_000) -> list[HistoryView]:
    return [store.read(key, START, until, max_points) for key in ALL]


def execute(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that points grow old within a test."""
    monkeypatch.setattr(history_store, "CHUNK_TICKS", 4)


@pytest.mark.parametrize("ticks", [1, CHUNK_TICKS - 1, CHUNK_TICKS, CHUNK_TICKS + 1, 3 * CHUNK_TICKS + 5])
@pytest.mark.parametrize("in_memory", [False, True])
def test_what_was_added_is_read_before_and_after_a_restart(path, ticks, in_memory):
    tape = Tape()
    store = open_store(None if in_memory else path)
    fill(store, tape, ticks)
    views = read_all(store, tape.at)
    assert [len(view.times) for view in views] == [ticks] * len(ALL)
    view = views[ALL.index(OP)]
    assert view.times == [START + PERIOD_S * (number + 1) for number in range(ticks)]
    assert view.intervals == [PERIOD_S] * ticks
    assert view.columns["used_cores"] == [float(number % 17) for number in range(ticks)]
    assert (view.kind, view.tree, view.name, view.period_s) == ("operation", "t", "o", PERIOD_S)
    assert store.since == START
    assert store.file.errors == 0
    sums = store.sum_points(0.0, tape.at, None, 10)
    store.close()
    store.close()
    if not in_memory:
        again = open_store(path, tape.at)
        assert read_all(again, tape.at) == views
        assert again.sum_points(0.0, tape.at, None, 10) == sums
        again.close()


def test_what_is_too_old_goes(path, small):
    store, tape = open_store(path, length_s=400.0), Tape()
    for number in range(200):
        operation = Key(OPERATION, "t", f"o{number}")
        store.add(tape.tick({ROOT: row(POOL, used_cores=1.0), operation: row(OPERATION, used_cores=1.0)}))
    assert 40 <= len(store.read(ROOT, START, tape.at, 1000).times) <= 48
    assert store.read(Key(OPERATION, "t", "o3"), 0.0, tape.at, 10).times == []
    assert len(store.read(Key(OPERATION, "t", "o199"), 0.0, tape.at, 10).times) == 1
    found = store.sum_points(0.0, tape.at, "t", 5)
    assert len(found.totals) == 1 + 5
    assert 35 <= found.left_out["t"] <= 43
    assert store.sum_days(0.0, tape.at).totals[ROOT].used == 200 * PERIOD_S, "the day goes on"


def test_a_gap_longer_than_the_history_leaves_nothing_behind(path, small):
    store, tape = open_store(path, length_s=400.0), Tape()
    fill(store, tape, 30)
    store.close()
    store = open_store(path, tape.at + 10_000.0, length_s=400.0)
    later = Tape(tape.at + 10_000.0)
    fill(store, later, 10)
    assert len(store.read(P, later.at - 400.0, later.at, 1000).times) == 10
    assert len(store._chunks) <= 4


def test_the_file_does_not_grow_above_its_size(path, small):
    store, tape = open_store(path, max_size=MIB), Tape()
    keys = [Key(OPERATION, "t", f"o{number}") for number in range(150)]
    for number in range(400):
        fill_many(store, tape, keys, number)
        assert os.path.getsize(path) <= MIB
        assert store.bytes <= MIB
    assert store.file.errors == 0
    view = store.read(keys[0], 0.0, tape.at, 10_000)
    assert 10 < len(view.times) < 400
    assert view.times[-1] == tape.at


def test_a_smaller_size_makes_the_file_smaller(path, small):
    store, tape = open_store(path, max_size=16 * MIB), Tape()
    keys = [Key(OPERATION, "t", f"o{number}") for number in range(400)]
    for number in range(220):
        fill_many(store, tape, keys, number)
    store.close()
    assert os.path.getsize(path) > MIB
    store = open_store(path, tape.at, max_size=MIB)
    assert os.path.getsize(path) <= MIB
    assert store.read(keys[0], 0.0, tape.at, 10_000).times[-1] == tape.at


def test_a_tick_that_is_larger_than_the_whole_file_stays_in_memory(path):
    store, tape = open_store(path, max_size=MIB), Tape()
    letters = random.Random(1)
    keys = [Key(OPERATION, "t", letters.randbytes(100).hex()) for _ in range(12_000)]
    with capture_logs() as logs:
        for number in range(3):
            store.add(tape.tick({key: row(OPERATION, used_cores=number + n / 7) for n, key in enumerate(keys)}))
    assert [entry["event"] for entry in logs] == ["history_failed"]
    assert store.file.errors == 3
    assert len(store.read(keys[5], 0.0, tape.at, 100).times) == 3
    assert os.path.getsize(path) <= MIB


def used_by_day(store: HistoryStore, until: float, *keys: Key) -> list[list[float]]:
    return [[day.get(key, Amounts()).used for key in keys] for day in store.read_days(keys, 0.0, until)]


def test_what_a_tick_adds_is_in_the_totals_of_the_day_in_which_it_ends(path):
    store, tape = open_store(path, period_s=3600.0), Tape(10 * DAY_S)
    for _ in range(60):
        store.add(tape.tick({P: row(POOL, used_cores=2.0, limit_cores=4.0)}, 3600.0, totals={ANN: Amounts(used=0.5)}))
    assert day_of(11 * DAY_S) == 10, "what ends at midnight is of the day before"
    assert used_by_day(store, tape.at, P, ANN) == [[172_800.0, 43_200.0], [172_800.0, 43_200.0], [86_400.0, 21_600.0]]
    found = store.sum_days(11 * DAY_S, tape.at, "t")
    assert (found.totals[P].used, found.totals[P].peak, found.totals[P].points) == (259_200.0, 4.0, 36)
    assert found.covered_s == 36 * 3600.0
    assert set(store.sum_days(0.0, tape.at, "other").totals) == set()
    view = store.read(P, 0.0, tape.at, 1000)
    assert (view.times, view.period_s) == ([11 * DAY_S, 12 * DAY_S, 12.5 * DAY_S], DAY_S)
    assert view.intervals == [DAY_S, DAY_S, 0.5 * DAY_S]
    assert (view.columns["used_cores"], view.columns["limit_cores"]) == ([2.0] * 3, [4.0] * 3)
    assert view.columns["usage_ratio"] == [None] * 3
    assert len(store.read(P, tape.at - DAY_S, tape.at, 1000).times) == 24, "the last day in detail"
    assert store.read(Key(POOL, "t", "unknown"), 0.0, tape.at, 1000).times == []


def test_the_mean_of_a_day_is_that_of_its_known_time(path):
    store, tape = open_store(path), Tape(10 * DAY_S)
    for gap_s in (0.0, 3 * DAY_S, 3600.0):
        store.add(tape.tick({P: row(POOL, used_cores=3.0)}, 100.0, gap_s))
    store.add(tape.tick({}, 200.0))
    view = store.read(P, 0.0, tape.at, 1000)
    assert [end // DAY_S for end in view.times] == [11.0, 13.0], "of the days between nothing is known"
    assert view.columns["used_cores"] == [3.0, 1.5]


def test_a_process_that_is_killed_after_any_tick_counts_each_once(path, tmp_path, small):
    store, tape, expected = open_store(path), Tape(11 * DAY_S - 5 * PERIOD_S), [0.0]
    for number in range(12):
        fill(store, tape, 1, number)
        expected.append(expected[-1] + PERIOD_S * (number % 17))
        copy = tmp_path / f"copy{number}.db"
        for suffix in ("", "-wal"):
            copy.with_name(copy.name + suffix).write_bytes(Path(f"{path}{suffix}").read_bytes())
        again = open_store(copy, tape.at)
        later = Tape(tape.at)
        fill(again, later, 5)
        days = used_by_day(again, later.at, P, ANN)
        assert [sum(each) for each in zip(*days, strict=True)] == [expected[-1] + 10 * PERIOD_S] * 2
        assert again.sum_points(0.0, later.at, None, 9).totals[P].used == expected[-1] + 10 * PERIOD_S
        assert again.sum_days(0.0, later.at).totals[P].extra_jobs == pytest.approx(0.1 * PERIOD_S * (number + 6))
        again.close()


def test_totals_that_could_not_be_written_are_written_later(path, monkeypatch):
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    store, tape = open_store(path), Tape()
    fill(store, tape, 5)
    monkeypatch.setattr(HistoryStore, "_add_to_days", fail)
    fill(store, tape, 5, first=5)
    assert used_by_day(store, tape.at, ANN) == [[PERIOD_S * 45]]
    monkeypatch.undo()
    fill(store, tape, 1, first=10)
    store.close()
    store = open_store(path, tape.at)
    assert used_by_day(store, tape.at, ANN) == [[PERIOD_S * 55]]


def test_days_go_with_the_length_of_the_history_and_when_there_is_no_room(path, small):
    store, tape = open_store(path, length_s=5 * DAY_S), Tape(20 * DAY_S)
    for _ in range(12):
        store.add(tape.tick(points(1.0), DAY_S))
    days = used_by_day(store, tape.at, P)
    assert 5 <= len(days) <= 7
    assert store.since == tape.at - len(days) * DAY_S
    store.close()
    store = open_store(path, tape.at, max_size=MIB)
    tape = Tape(tape.at)
    for _ in range(30):
        users = {Key(USER, "t", f"{number}" * 100): Amounts(used=1.0) for number in range(200)}
        store.add(tape.tick(points(1.0), DAY_S, totals=users))
        assert os.path.getsize(path) <= MIB
    assert store.file.errors == 0
    assert 3 <= len(used_by_day(store, tape.at, P)) < 25


def test_what_an_earlier_version_stored_is_summed_up_by_day(path):
    schema = """
        CREATE TABLE series (id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, tree TEXT NOT NULL, name TEXT NOT NULL);
        CREATE INDEX series_by_name ON series (name, kind, tree);
        CREATE TABLE chunks (id INTEGER PRIMARY KEY, tier INTEGER NOT NULL, is_moving INTEGER NOT NULL,
            first REAL NOT NULL, last REAL NOT NULL, left_out INTEGER NOT NULL, times BLOB NOT NULL);
        CREATE TABLE points (chunk INTEGER NOT NULL, series INTEGER NOT NULL, kind INTEGER NOT NULL,
            used REAL NOT NULL, reclaimed REAL NOT NULL, ordered REAL NOT NULL, throttled REAL NOT NULL,
            late REAL NOT NULL, limits REAL NOT NULL, peak REAL NOT NULL, count INTEGER NOT NULL, data BLOB NOT NULL,
            PRIMARY KEY (chunk, series)) WITHOUT ROWID;
        CREATE TABLE journal (seq INTEGER PRIMARY KEY, data BLOB NOT NULL);
        PRAGMA application_id = 0x43504D48; PRAGMA user_version = 2;"""
    names = {1: ROOT, 2: P, 3: Key(OPERATION, "t", "<extra p>"), 4: Key(OPERATION, "t", "<control>"), 5: OP, 6: N}
    names |= {7: Key(OPERATION, "t", "<others 3>"), 8: Key(OPERATION, "t", "<others 12>")}
    with sqlite3.connect(path) as connection:
        connection.executescript(schema)
        connection.executemany("INSERT INTO series VALUES (?, ?, ?, ?)", [(n, *key) for n, key in names.items()])
        for chunk, first in enumerate((10.1 * DAY_S, 10.5 * DAY_S, 11.2 * DAY_S), 1):
            times = array("d", [first + 10.0 * n for n in range(30)] + [10.0] * 30).tobytes()
            connection.execute("INSERT INTO chunks VALUES (?, 0, 0, ?, ?, 0, ?)", (chunk, first, first + 290.0, times))
            sums = [(chunk, n, key.kind, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, n, 30, b"") for n, key in names.items()]
            connection.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", sums)
    connection.close()
    with capture_logs() as logs:
        store = open_store(path, 12 * DAY_S)
    assert [(entry["event"], entry.get("days")) for entry in logs] == [("history_of_earlier_version", 2)]
    control, others = (Key(ARM, "t", name) for name in ("control", "others"))
    first, second = store.read_days([ROOT, P, control, others], 0.0, 12 * DAY_S)
    assert first[P] == Amounts(2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 10.0, 2.0, 6.0, 8.0, 0.0, 60, 2.0)
    assert first[ROOT] == Amounts(2.0, 4.0, 6.0, 8.0, 10.0, 12.0, points=60, peak=1.0)
    assert (first[control].ordered, first[others].ordered, second[others].ordered) == (6.0, 12.0, 6.0)
    assert store.sum_days(0.0, 12 * DAY_S).covered_s == pytest.approx(900.0)
    tape = Tape(12 * DAY_S)
    fill(store, tape, 40)
    assert store.file.errors == 0
    assert len(store.read(P, 12 * DAY_S, tape.at, 100).times) == 40


def test_the_file_is_the_users_own(path):
    open_store(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize("damage", ["text", "empty_database", "of_another_program", "newer", "header", "truncated"])
def test_a_file_that_is_no_history_is_set_aside(path, damage):
    if damage == "text":
        path.write_text("hello" * 1000)
    elif damage in ("empty_database", "of_another_program"):
        execute(path, "CREATE TABLE a (b)", f"PRAGMA user_version = {int(damage == 'of_another_program')}")
    else:
        store, tape = open_store(path), Tape()
        fill(store, tape, 40)
        store.close()
        data = path.read_bytes()
        if damage == "newer":
            execute(path, "PRAGMA user_version = 99")
        else:
            path.write_bytes(b"\xff" * 200 + data[200:] if damage == "header" else data[:16_384])
    before = path.read_bytes()
    with capture_logs() as logs:
        store = open_store(path, START + 1000.0)
        tape = Tape(START + 1000.0)
        fill(store, tape, 40)
    assert "history_set_aside" in {entry["event"] for entry in logs}
    aside = path.with_name("history.db.aside")
    assert damage == "truncated" or aside.read_bytes() == before
    assert len(store.read(P, START, tape.at, 100).times) == 40


@pytest.mark.parametrize("removed", [("", "-wal", "-shm"), ("",), ("-wal",)], ids=["all", "database", "log"])
def test_files_that_are_removed_while_they_are_in_use_are_written_anew(path, removed):
    store, tape = open_store(path), Tape()
    fill(store, tape, 70)
    views = read_all(store, tape.at)
    for suffix in removed:
        os.unlink(f"{path}{suffix}")
    with capture_logs() as logs:
        assert read_all(store, tape.at) == views
        fill(store, tape, 5, first=70)
    assert [entry["event"] for entry in logs] == ["history_lost"]
    assert store.file.errors == 0
    views = read_all(store, tape.at)
    assert len(views[0].times) == 75
    # A copy of what the files hold now, as a killed process leaves it.
    beside = path.with_name("copy.db")
    for suffix in ("", "-wal"):
        beside.with_name(beside.name + suffix).write_bytes(Path(f"{path}{suffix}").read_bytes())
    store.close()
    store = open_store(beside, tape.at)
    assert read_all(store, tape.at) == views


@pytest.mark.parametrize("asked", ["read", "sum_up"])
def test_only_the_chunk_goes_that_holds_a_damaged_row(path, asked):
    store, tape = open_store(path), Tape()
    fill(store, tape, 5 * CHUNK_TICKS)
    execute(path, "UPDATE points SET data = x'00' WHERE chunk = (SELECT id FROM chunks ORDER BY first LIMIT 2, 1)")
    since = START + PERIOD_S * 2.5 * CHUNK_TICKS
    with capture_logs() as logs:
        if asked == "read":
            assert len(store.read(P, since, tape.at, 1000).times) == 2 * CHUNK_TICKS
        else:
            assert store.sum_points(since, tape.at, None, 10).totals[P].points == 2 * CHUNK_TICKS
    assert [entry["event"] for entry in logs] == ["history_failed", "history_part_dropped"]
    assert len(store.read(P, START, tape.at, 1000).times) == 4 * CHUNK_TICKS
    assert os.listdir(path.parent).count("history.db.aside") == 0


def test_only_the_last_damaged_file_is_kept(path):
    for number in range(3):
        path.write_text(f"{number}" * 1000)
        path.with_name("history.db.aside-wal").write_text("of the one before")
        store, tape = open_store(path), Tape()
        fill(store, tape, 3)
        store.close()
    assert sorted(os.listdir(path.parent)) == ["history.db", "history.db.aside"]
    assert path.with_name("history.db.aside").read_text() == "2" * 1000


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE chunks SET times = x'0102030405060708090a'",
        "UPDATE chunks SET times = 'text'",
        "UPDATE chunks SET times = x'0102030405060708'",
        "UPDATE days SET name = CAST(x'ff' AS TEXT) WHERE name = 'p'",
        "DROP TABLE points",
        "DROP TABLE journal",
        "ALTER TABLE points RENAME COLUMN data TO other",
        "UPDATE journal SET data = 5",
    ],
)
def test_damage_of_any_kind_is_found_and_a_new_file_begun(path, change):
    store, tape = open_store(path), Tape()
    fill(store, tape, 2 * CHUNK_TICKS - 5)
    store.close()
    execute(path, change)
    with capture_logs() as logs:
        store = open_store(path, tape.at)
        again = Tape(tape.at)
        fill(store, again, 2 * CHUNK_TICKS)
        store.sum_points(0.0, again.at, None, 10)
        store.sum_days(0.0, again.at)
        store.read(P, START, again.at, 1000)
        fill(store, again, 2 * CHUNK_TICKS)
    assert [entry["event"] for entry in logs].count("history_set_aside") == 1
    errors = store.file.errors
    fill(store, again, CHUNK_TICKS)
    assert store.file.errors == errors
    store.close()
    store = open_store(path, again.at)
    assert len(store.read(P, tape.at, again.at, 1000).times) >= 3 * CHUNK_TICKS


def test_a_mistake_of_the_program_is_counted_and_memory_stays_bounded(path, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("x")

    store, tape = open_store(path), Tape()
    fill(store, tape, 5)
    monkeypatch.setattr(HistoryStore, "_flush", fail)
    with capture_logs() as logs:
        fill(store, tape, 2 * MEMORY_TICKS)
    assert next((entry["event"], entry.get("error")) for entry in logs) == ("history_failed", "KeyError: 'x'")
    assert store.file.errors > 0
    assert len(store._ticks) == MEMORY_TICKS
    monkeypatch.undo()
    fill(store, tape, 2 * CHUNK_TICKS)
    assert len(store.read(P, START, tape.at, 10_000).times) >= MEMORY_TICKS
    store.close()
    assert os.listdir(path.parent) == ["history.db"]


def test_the_most_operations_without_series_are_told_at_any_age(path, small):
    store, tape = open_store(path), Tape()
    for number in range(300):
        tick = tape.tick(points(1.0))
        tick.left_out = 7 if number == 10 else 3 if number == 298 else 0
        store.add(tick)

    def told(since: float, until: float) -> int:
        return store.sum_points(since, until, None, 10).without_series

    for _ in range(2):
        assert told(0.0, tape.at) == 7
        assert told(tape.at - 2.5 * PERIOD_S, tape.at) == 3
        assert told(START + 1700.0, tape.at - 20 * PERIOD_S) == 0
        assert told(START, START + 1000.0) == 7
        store.close()
        store = open_store(path, tape.at)


def test_a_directory_that_is_not_there_costs_only_the_file(tmp_path):
    path = tmp_path / "gone" / "history.db"
    with capture_logs() as logs:
        store, tape = open_store(path), Tape()
        fill(store, tape, 10)
    assert [(entry["event"], entry["doing"]) for entry in logs] == [("history_failed", "open")]
    assert len(store.read(P, START, tape.at, 100).times) == 10
    path.parent.mkdir()
    fill(store, tape, 2 * CHUNK_TICKS)
    assert path.exists()
    assert len(store.read(P, START, tape.at, 1000).times) == 10 + 2 * CHUNK_TICKS
    store.close()
    store = open_store(path, tape.at)
    assert len(store.read(P, START, tape.at, 1000).times) == 10 + 2 * CHUNK_TICKS


def test_a_full_disk_is_said_once_and_the_history_goes_on(path):
    """The disk of the child process ends after 256 KiB."""
    program = (
        "import resource, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_history_store import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store, tape = open_store(sys.argv[1]), Tape()\n"
        "fill(store, tape, 5)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(sys.argv[1] + '-wal'), resource.RLIM_INFINITY))\n"
        "with capture_logs() as logs: fill(store, tape, 400)\n"
        "assert [entry['event'] for entry in logs] == ['history_failed'], logs\n"
        "assert store.file.errors >= 400, store.file.errors\n"
        "assert len(store.read(P, START, tape.at, 10_000).times) == MEMORY_TICKS\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "with capture_logs() as logs: fill(store, tape, 60)\n"
        "assert [entry['event'] for entry in logs] == ['history_is_written_again'], logs\n"
        "assert len(store.read(P, START, tape.at, 10_000).times) > MEMORY_TICKS + 25\n"
        "store.close()\n"
        "store = open_store(sys.argv[1], tape.at)\n"
        "print(len(store.read(P, START, tape.at, 10_000).times))\n"
    )
    where = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    command = [sys.executable, "-W", "error", "-c", program, str(path), *where]
    ended = subprocess.run(command, check=False, timeout=250, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) > MEMORY_TICKS + 25


def test_points_of_the_future_are_dropped(path):
    store, tape = open_store(path), Tape()
    fill(store, tape, 100)
    store.close()
    with capture_logs() as logs:
        store = open_store(path, START + PERIOD_S * 65)
    assert [entry["event"] for entry in logs] == ["history_of_the_future_dropped"]
    assert len(store.read(P, START, tape.at, 1000).times) == 60
    later = Tape(START + PERIOD_S * 65)
    fill(store, later, 50)
    view = store.read(P, START, later.at, 1000)
    assert len(view.times) == 110
    assert view.times == sorted(view.times)


def test_names_may_be_any_text(path):
    names = ("<img src=x>", "'; DROP TABLE points; --", "ü" * 4000, "", "%", "a b")
    keys = [Key(OPERATION, "t", name) for name in names]
    store, tape = open_store(path), Tape()
    for _ in range(CHUNK_TICKS + 1):
        store.add(tape.tick({key: row(OPERATION, used_cores=1.0) for key in keys}))
    for key in keys:
        assert len(store.read(key, START, tape.at, 1000).times) == CHUNK_TICKS + 1
    assert store.read(Key(OPERATION, "t", "b"), 0.0, tape.at, 1000).times == []
    assert store.read(Key(OPERATION, "u", "%"), 0.0, tape.at, 1000).times == []


def test_any_tree_is_all_trees(path):
    store, tape = open_store(path), Tape()
    both = {Key(OPERATION, tree, "o"): row(OPERATION, used_cores=1.0) for tree in ("t", "u")}
    for _ in range(CHUNK_TICKS + 1):
        store.add(tape.tick(both))
    assert set(store.read(Key(OPERATION, "", "o"), 0.0, tape.at, 100).columns["used_cores"]) == {2.0}
    assert set(store.read(Key(OPERATION, "u", "o"), 0.0, tape.at, 100).columns["used_cores"]) == {1.0}
    assert list(store.sum_points(0.0, tape.at, "u", 10).totals) == [Key(OPERATION, "u", "o")]


def test_nodes_at_moments_are_read_from_the_file_and_from_memory(tmp_path):
    store, tape = open_store(tmp_path / "history"), Tape()
    for number in range(CHUNK_TICKS + 10):
        # Each second tick the jobs request more than the node has.
        busy = row(NODE, capacity_cores=8.0, ordered_cores=6.0 + 4.0 * (number % 2), limit_cores=5.0, used_cores=2.0)
        later = {Key(NODE, "", "late"): row(NODE, capacity_cores=4.0, used_cores=4.0)} if number > CHUNK_TICKS else {}
        store.add(tape.tick({Key(NODE, "", "n"): busy, **later}))
    length_s = (CHUNK_TICKS + 10) * PERIOD_S
    found = store.read_node_map(["n", "late"], "reclaimed", START - length_s, tape.at + PERIOD_S, CHUNK_TICKS + 10)
    assert found.times == [START + PERIOD_S * number for number in range(1, CHUNK_TICKS + 11)]
    assert [percents[0] for percents in found.percents] == [round(12.5), round(62.5)] * (CHUNK_TICKS // 2 + 5)
    used = store.read_node_map(["n", "late"], "used", tape.at - 12 * PERIOD_S, tape.at, 4)
    assert used.percents == [[25, None], [25, 100], [25, 100], [25, 100]]
    assert found.twice_core_hours[-1] == pytest.approx(2.0 * length_s / 2 / 3600, abs=1e-3)


def test_a_map_of_nodes_without_points_has_no_moments(tmp_path):
    assert open_store(tmp_path / "history").read_node_map(["n"], "used", START, START + 60.0, 10).times == []
