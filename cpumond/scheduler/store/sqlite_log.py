"""The store's log in a SQLite database: its tables, appends, reads and truncation.

``log``: the entries, each with a checksum; a trigger refuses to change one. ``log_subjects``: numbers of entries by
subject. ``log_cut``: one row with the highest dropped number, so that no number is given twice. Everything uses the
store's connection, inside its caller's transactions."""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import structlog

from cpumond.scheduler.store import Entry
from cpumond.scheduler.store.entries import CUT_ENTRIES, LogEnd, Place, Row, choose_cut, list_subjects, measure
from cpumond.scheduler.store.log_search import search

log = structlog.get_logger("cpumond.scheduler")

HEAD: Final = struct.Struct(">qqd")
PLACES: Final = "SELECT number, CAST(position AS INTEGER), CAST(at AS REAL) FROM log"


def create_log(connection: sqlite3.Connection) -> None:
    """Migrate to schema 3, which has a log."""
    connection.execute(
        "CREATE TABLE log (number INTEGER PRIMARY KEY, position INTEGER NOT NULL, at REAL NOT NULL, "
        "subjects BLOB NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL)"
    )
    connection.execute("CREATE INDEX log_at ON log (at)")
    connection.execute(
        "CREATE TABLE log_subjects (subject TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (subject, number)) "
        "WITHOUT ROWID"
    )
    connection.execute("CREATE TABLE log_cut (number INTEGER NOT NULL)")
    connection.execute("INSERT INTO log_cut VALUES (0)")
    connection.execute(
        "CREATE TRIGGER log_is_only_added_to BEFORE UPDATE ON log "
        "BEGIN SELECT RAISE(ABORT, 'entries of the log are not changed'); END"
    )


def find_end(connection: sqlite3.Connection) -> LogEnd:
    """Return the place of the next entry. Raises sqlite3.Error."""
    (cut,) = connection.execute("SELECT ifnull(max(number), 0) FROM log_cut").fetchone()
    row = connection.execute(
        "SELECT number, CAST(position AS INTEGER), length(subjects), length(value) FROM log "
        "ORDER BY number DESC LIMIT 1"
    ).fetchone()
    if row is None:
        return LogEnd(cut)
    number, position, subjects, value = row
    return LogEnd(max(number, cut), position + measure(subjects, value))


def add_rows(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Append rows. Raises sqlite3.Error."""
    for number, position, at, listed, value, subjects in rows:
        crc = _checksum(number, position, at, listed, value)
        connection.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?)", (number, position, at, listed, value, crc))
        names = [(name, number) for name in subjects]
        connection.executemany("INSERT OR REPLACE INTO log_subjects VALUES (?, ?)", names)


class SqliteLogReader:
    """Reads through ``connection``, which nothing else may use meanwhile. ``path``: of the database, for messages."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self.connection = connection
        self._path = path
        self._logged: set[int] = set()

    def read(self, subjects: Sequence[str], before: int | None, since: float, limit: int) -> list[tuple[int, Entry]]:
        """See ``Store.read_log``; a damaged entry is reported once and left out. Raises sqlite3.Error."""
        # Entries that are dropped during the search stay visible until its end.
        self.connection.execute("BEGIN")
        try:
            return search(self, subjects, before, since, limit)
        finally:
            self.connection.rollback()

    def find_lowest(self, since: float) -> int | None:
        # The plus prevents a scan from the lowest numbers: the first recent entry may be far from them.
        return self._get("SELECT min(+number) FROM log WHERE at >= ?", since)

    def find_first(self, subject: str) -> int | None:
        return self._get("SELECT min(number) FROM log_subjects WHERE subject = ?", subject)

    def _get(self, query: str, value: object) -> int | None:
        number: int | None = self.connection.execute(query, (value,)).fetchone()[0]
        return number

    def list_numbers(self, subject: str | None, below: int, lowest: int, limit: int) -> list[int]:
        table, names = ("log WHERE", ()) if subject is None else ("log_subjects WHERE subject = ? AND", (subject,))
        query = f"SELECT number FROM {table} number < ? AND number >= ? ORDER BY number DESC LIMIT ?"  # noqa: S608
        return [number for (number,) in self.connection.execute(query, (*names, below, lowest, limit))]

    def choose_about(self, subject: str, numbers: Sequence[int]) -> list[int]:
        query = "SELECT number FROM log_subjects WHERE subject = ? AND number IN (SELECT value FROM json_each(?))"
        listed = msgspec.json.encode(numbers).decode()
        return [number for (number,) in self.connection.execute(query, (subject, listed))]

    def read_entries(self, numbers: Sequence[int]) -> list[tuple[int, Entry]]:
        return [(number, entry) for number in numbers if (entry := self._read(number)) is not None]

    def _read(self, number: int) -> Entry | None:
        query = "SELECT position, at, subjects, value, crc FROM log WHERE number = ?"
        row = self.connection.execute(query, (number,)).fetchone()
        if row is not None:
            position, at, subjects, value, crc = row
            is_sound = tuple(map(type, row[:-1])) == (int, float, bytes, bytes)
            if is_sound and crc == _checksum(number, position, at, subjects, value):
                return Entry(at, list_subjects(subjects), value)
        if number not in self._logged:
            self._logged.add(number)
            what = "is missing" if row is None else "does not match its checksum"
            error = f"entry {number} of the log {what}"
            advice = "check the disk, and which programs write this file; the state is not affected"
            log.error("store_entry_damaged", path=self._path, number=number, error=error, advice=advice)
        return None


def cut_rows(connection: sqlite3.Connection, end: LogEnd, until: float, max_bytes: int) -> int:
    """Drop entries as described in ``Store.cut_log``. Raises sqlite3.Error."""
    places = [
        Place(*row)
        for query, order in (
            (f"{PLACES} WHERE at < ? ORDER BY at LIMIT ?", (until, CUT_ENTRIES)),
            (f"{PLACES} ORDER BY number LIMIT ?", (CUT_ENTRIES,)),
        )
        for row in connection.execute(query, order)
    ]
    numbers = choose_cut(places, end, until, max_bytes)
    for number in numbers:
        (subjects,) = connection.execute("SELECT subjects FROM log WHERE number = ?", (number,)).fetchone()
        names = [(name, number) for name in list_subjects(subjects)]
        connection.executemany("DELETE FROM log_subjects WHERE subject = ? AND number = ?", names)
        connection.execute("DELETE FROM log WHERE number = ?", (number,))
    if numbers:
        connection.execute("UPDATE log_cut SET number = max(number, ?)", (max(numbers),))
    return len(numbers)


def _checksum(number: int, position: int, at: float, subjects: bytes, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(subjects, zlib.crc32(HEAD.pack(number, position, at))))
