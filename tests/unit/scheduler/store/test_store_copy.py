"""``cpumond store copy`` between SQLite databases; tests/integration has PostgreSQL."""

import contextlib
import os
import sqlite3
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import cpumond.scheduler.store
from cpumond.cli import cli
from cpumond.core.errors import ConfigError, RefusedError, UnavailableError, UsageError
from cpumond.scheduler.model import Rules
from cpumond.scheduler.service.stored import load_state
from cpumond.scheduler.store import UNFINISHED, Change, Entry, StoreError, copying
from cpumond.scheduler.store.copying import copy_store
from cpumond.scheduler.store.places import is_conninfo, make_term, open_place, read_term
from cpumond.scheduler.store.sqlite import open_sqlite_store

RECORDS = [Change("job", f"{number:04}", bytes(range(256))) for number in range(2500)] + [Change("pool", "é\0", b"")]
ENTRIES = [Entry(number / 3, ("all", f"user:ü{number % 7}"), b"%d" % number) for number in range(2600)]
"""The first hundred are dropped again."""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = str(tmp_path / "source.db")
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(RECORDS, ENTRIES)
        assert store.cut_log(ENTRIES[100].at, 2**40) == 100
    return path


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "there" / "target.db")


def read_all(path: str) -> list[Change]:
    with contextlib.closing(open_sqlite_store(path)) as store:
        return [Change(*record) for record in store.load()]


def read_log(path: str, *subjects: str) -> list[tuple[int, Entry]]:
    with contextlib.closing(open_sqlite_store(path)) as store:
        return store.read_log(subjects, limit=10_000)


def test_all_records_and_the_numbered_log_are_there_and_nothing_else(source: str, target: str) -> None:
    shown: list[str] = []
    done = copy_store(source, target, shown.append)
    assert (done.records, done.entries) == (len(RECORDS), 2500)
    assert read_all(target) == RECORDS == read_all(source)
    assert (shown[0], shown[-1]) == ("1000 records copied", "2500 of 2500 entries of the log compared")
    assert {"2000 of 2501 records compared", "2500 entries of the log copied"} <= {*shown}
    copied = read_log(target)
    assert copied == read_log(source)
    assert copied[-1] == (101, ENTRIES[100])
    assert read_log(target, "all", "user:ü3") == read_log(source, "user:ü3", "all")
    with contextlib.closing(open_sqlite_store(target)) as store:
        store.write([], [ENTRIES[0]])
        assert store.read_log(limit=1) == [(2601, ENTRIES[0])]
        assert store.cut_log(0.0, 0) == 500


def test_a_damaged_entry_is_left_out(source: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(sqlite3.connect(source, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER log_is_only_added_to")
        connection.execute("UPDATE log SET value = x'00' WHERE number = 777")
    assert copy_store(source, target).entries == 2499
    assert read_log(target) == [each for each in read_log(source) if each[0] != 777]
    assert "entry 777 of the log does not match its checksum" in capsys.readouterr().out


def test_the_command_says_what_it_did(source: str, target: str) -> None:
    done = CliRunner().invoke(cli, ["store", "copy", "--from", source, "--to", target], catch_exceptions=False)
    assert done.output.startswith("2501 records and 2500 log entries copied and compared, sha256 ")


def test_the_term_goes_along(source: str, target: str) -> None:
    with contextlib.closing(open_sqlite_store(source)) as store:
        store.write([make_term(7)])
    assert copy_store(source, target).records == len(RECORDS)
    with contextlib.closing(open_sqlite_store(target)) as store:
        assert read_term(store) == 7


def test_a_source_that_is_missing_is_not_made(target: str) -> None:
    with pytest.raises(UnavailableError, match="there is no database"):
        copy_store(f"{target}x", target)
    assert not os.path.exists(f"{target}x")
    assert not os.path.exists(target)


def test_a_source_in_use(source: str, target: str) -> None:
    with contextlib.closing(open_sqlite_store(source)), pytest.raises(StoreError, match="in use by process"):
        copy_store(source, target)


@pytest.mark.parametrize(
    ("changes", "entries", "sentence"),
    [
        ([Change("k", "a", b"1")], [], "holds 1 record; the destination must be empty"),
        ([], ENTRIES[:1], "must be empty"),
    ],
    ids=["a record", "a log alone"],
)
def test_a_destination_that_holds(
    source: str, target: str, changes: list[Change], entries: list[Entry], sentence: str
) -> None:
    with contextlib.closing(open_sqlite_store(target)) as store:
        store.write(changes, entries)
    with pytest.raises(RefusedError, match=sentence):
        copy_store(source, target)
    assert (read_all(target), len(read_log(target))) == (changes, len(entries))


def test_a_store_onto_itself(source: str) -> None:
    with pytest.raises(UsageError, match="same store"):
        copy_store(source, os.path.relpath(source))


@pytest.mark.parametrize(
    ("last", "records", "entries"), [("1000 records copied", 1000, 0), ("500 entries of the log copied", 2501, 500)]
)
def test_a_copy_that_was_broken_off_is_no_source_and_is_begun_anew(
    source: str, target: str, tmp_path: Path, last: str, records: int, entries: int
) -> None:
    def stop(text: str) -> None:
        if text == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_store(source, target, stop)
    held = read_all(target)
    assert len(held) == records + 1
    assert len(read_log(target)) == entries
    assert held[-1].kind == UNFINISHED
    with pytest.raises(RefusedError, match="holds an incomplete copy"):
        copy_store(target, str(tmp_path / "third.db"))
    copy_store(source, target)
    assert read_all(target) == RECORDS
    assert read_log(target) == read_log(source)


def test_what_is_read_back_differs(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = copying._records
    monkeypatch.setattr(
        copying, "_records", lambda store: (r for r in whole(store) if not (store.path == target and r[1] == "0003"))
    )
    with pytest.raises(StoreError, match=r"differs from the data written \(2500 of 2501 records, 2500 "):
        copy_store(source, target)
    assert UNFINISHED in {kind for kind, _, _ in read_all(target)}


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("host=a dbname=b", True), ("postgresql://a/b", True), ("service=x", True),
        ("/var/a=b.db", False), ("./a=b", False), ("state/scheduler.db", False),
    ],
)  # fmt: skip
def test_which_place_is_a_conninfo(place: str, expected: bool) -> None:
    assert is_conninfo(place) is expected


def test_without_psycopg_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test may have imported it.
    monkeypatch.setitem(sys.modules, "cpumond.scheduler.store.postgresql", None)
    monkeypatch.delattr(cpumond.scheduler.store, "postgresql", raising=False)
    with pytest.raises(ConfigError, match=r"needs psycopg 3.1.13 or later .*pip install 'psycopg\[binary\]'"):
        open_place("dbname=x")


def test_a_psycopg_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    psycopg = pytest.importorskip("psycopg")
    monkeypatch.setattr(psycopg, "__version__", "3.1.12")
    for name in ("postgresql", "postgresql_session"):
        monkeypatch.delitem(sys.modules, f"cpumond.scheduler.store.{name}", raising=False)
        monkeypatch.delattr(cpumond.scheduler.store, name, raising=False)
    with pytest.raises(ConfigError, match=r"needs psycopg 3.1.13 or later \(found 3.1.12\)"):
        open_place("dbname=x")


def test_a_scheduler_does_not_begin_with_half_a_copy(target: str) -> None:
    with contextlib.closing(open_sqlite_store(target)) as store:
        store.write([Change(UNFINISHED, UNFINISHED, b"{}")])
        with pytest.raises(StoreError, match="an incomplete copy: run `cpumond store copy` into it again"):
            load_state(store, Rules(), 0.0, lambda: "id")


def test_a_store_with_a_term_alone_is_an_empty_one(target: str) -> None:
    with contextlib.closing(open_sqlite_store(target)) as store:
        store.write([make_term(3)])
        state, _ = load_state(store, Rules(), 0.0, lambda: "id")
        assert list(state.trees) == ["default"]
        assert read_term(store) == 3
