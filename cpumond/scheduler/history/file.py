"""The history's SQLite file: opened, kept in its place and within its size, repaired where it is damaged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from typing import Final, TypeVar

import structlog

from cpumond.core.errors import describe
from cpumond.scheduler.history.chunks import Chunk, DamageError, decode_tick, decode_times
from cpumond.scheduler.history.model import Key, Tick
from cpumond.scheduler.store.sqlite import (
    COMPANIONS,
    DAMAGE,
    connect,
    identify_files,
    put_back,
    read_number,
    transaction,
    unlink_all,
)

T = TypeVar("T")

log = structlog.get_logger("cpumond.scheduler")

APPLICATION_ID: Final = 0x43504D48
"""Bytes 68 to 71 of the file: "CPMH"."""

SCHEMA: Final = 2

PAGE_BYTES: Final = 16_384
"""A row of points fits into a quarter of a page, else SQLite would give the row a page of its own."""

WAL_KEPT_BYTES: Final = 4 * 2**20

_TABLES: Final = (
    "CREATE TABLE series (id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, tree TEXT NOT NULL, name TEXT NOT NULL)",
    "CREATE INDEX series_by_name ON series (name, kind, tree)",
    """CREATE TABLE chunks (
        id INTEGER PRIMARY KEY, tier INTEGER NOT NULL, is_moving INTEGER NOT NULL, first REAL NOT NULL,
        last REAL NOT NULL, left_out INTEGER NOT NULL, times BLOB NOT NULL
    )""",
    """CREATE TABLE points (
        chunk INTEGER NOT NULL, series INTEGER NOT NULL, kind INTEGER NOT NULL,
        used REAL NOT NULL, reclaimed REAL NOT NULL, ordered REAL NOT NULL, throttled REAL NOT NULL, late REAL NOT NULL,
        limits REAL NOT NULL, peak REAL NOT NULL, count INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (chunk, series)
    ) WITHOUT ROWID""",
    "CREATE TABLE journal (seq INTEGER PRIMARY KEY, data BLOB NOT NULL)",
)

_SELECT_ONLY_IN: Final = """
    SELECT DISTINCT series FROM points AS mine WHERE chunk = ?1 AND NOT EXISTS (
        SELECT 1 FROM chunks CROSS JOIN points ON points.chunk = chunks.id AND points.series = mine.series
        WHERE chunks.id != ?1
    )"""


class HistoryFile:
    """The file, its index and newest points in memory, and what is done where it fails. ``path`` None: no file."""

    def __init__(self, path: str | None, length_s: float, period_s: float, max_size: int) -> None:
        self.path = path
        self.length_s, self.period_s, self.max_size = length_s, period_s, max_size
        self.write_errors = 0
        self.bytes = 0
        self.since: float | None = None
        """The beginning of the oldest interval."""
        self._db: sqlite3.Connection | None = None
        self._files: list[tuple[int, int] | None] = []
        self._is_failing = False
        self._ticks: list[Tick] = []
        self._names: dict[int, Key] = {}
        """Keys of the series in memory and of the last tick."""
        self._unsaved: dict[int, Key] = {}
        self._chunks: dict[int, Chunk] = {}
        self._next_seq = 1
        self._moved: tuple[int, int] = (0, -1)
        """The chunk that series are being moved to, and the last series that it has."""

    def _open(self) -> None:
        if self.path is None:
            return
        try:
            try:
                self._load()
            except Exception as error:
                if isinstance(error, sqlite3.Error | OSError | MemoryError) and not _is_damage(error):
                    raise
                self._begin_anew(error)
        except Exception as error:
            self._note_failure("open", error)
            self._disconnect()

    def _load(self) -> None:
        assert self.path is not None
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = db = connect(self.path)
        version = self._read_number("user_version")
        if version == 0 and self._read_number("page_count") <= 1:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(self._connection):
                for statement in _TABLES:
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA}")
        elif version != SCHEMA or self._read_number("application_id") != APPLICATION_ID:
            raise DamageError(f"it is not a history of schema {SCHEMA}")
        db.execute("PRAGMA journal_mode = WAL")
        # A crash of the machine may take the newest points, which is no loss; the file stays consistent.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA cell_size_check = ON")
        db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_KEPT_BYTES // PAGE_BYTES}")
        self._chunks = {}
        query = "SELECT id, tier, is_moving, left_out, times FROM chunks"
        for chunk_id, tier, is_moving, left_out, times in db.execute(query):
            ends, intervals = decode_times(times)
            self._chunks[chunk_id] = Chunk(chunk_id, tier, bool(is_moving), ends, intervals, left_out)
        ticks: list[Tick] = []
        names: dict[int, Key] = {}
        for seq, data in db.execute("SELECT seq, data FROM journal ORDER BY seq"):
            tick = decode_tick(data)
            tick.seq = seq
            ticks.append(tick)
        for series in {series for tick in ticks for ids in tick.ids for series in ids}:
            row = db.execute("SELECT kind, tree, name FROM series WHERE id = ?", (series,)).fetchone()
            if row is not None:
                names[series] = Key(*row)
        self._ticks, self._names = ticks, names
        self._next_seq = ticks[-1].seq + 1 if ticks else 1
        self._unsaved = {}
        self._moved = (0, -1)
        self._shrink()
        self._measure()
        self._files = identify_files(self.path)

    def _stay_in_place(self) -> None:
        """Put a file that was removed back, and open what is in its place. Raises OSError or sqlite3.Error."""
        assert self.path is not None
        if identify_files(self.path) == self._files:
            return
        log.error("history_lost", path=self.path, advice="find out who removed it; what is open is written anew")
        if not os.path.lexists(self.path):
            put_back(self._connection, self.path)
        self._disconnect()
        self._open_again()

    def _begin_anew(self, error: Exception) -> None:
        """Set the file aside and begin an empty one; the points in memory stay."""
        assert self.path is not None
        self._disconnect()
        # Only one is kept: a disk that damages one file after the other must not be filled by them.
        aside = f"{self.path}.aside"
        unlink_all(aside)
        for suffix in ("", *COMPANIONS):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path + suffix, aside + suffix)
        log.warning("history_set_aside", path=self.path, aside=aside, error=_words(error))
        ticks, names, seq = self._ticks, self._names, self._next_seq
        self._load()
        self._ticks, self._names, self._next_seq = ticks, names, seq
        self._unsaved = dict(names)

    def _drop_future(self, now: float) -> None:
        chunks = [chunk for chunk in self._chunks.values() if chunk.end > now]
        ticks = [tick for tick in self._ticks if tick.at > now]
        if not chunks and not ticks:
            return
        log.warning("history_of_the_future_dropped", path=self.path, chunks=len(chunks), ticks=len(ticks))
        for chunk in chunks:
            if chunk.id in self._chunks:
                self._drop(chunk)
        with transaction(self._connection):
            self._connection.executemany("DELETE FROM journal WHERE seq = ?", [(tick.seq,) for tick in ticks])
        self._ticks = [tick for tick in self._ticks if tick.at <= now]

    def _disconnect(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _open_again(self) -> None:
        """Open the file once more; newer ticks in memory are put behind what it has."""
        ticks, names = self._ticks, self._names
        self._open()
        if self._db is None:
            return
        last = max((*(tick.at for tick in self._ticks), *(chunk.end for chunk in self._chunks.values())), default=0.0)
        self._names |= names
        self._unsaved = dict(names)
        for tick in ticks:
            if tick.at > last:
                tick.seq = self._next_seq
                self._next_seq += 1
                self._ticks.append(tick)

    def _guard(self, doing: str, work: Callable[[], None]) -> bool:
        """Run ``work`` on the file; a failure is counted and logged, damage repaired. False: ``work`` failed."""
        try:
            work()
        except Exception as error:
            self._note_failure(doing, error)
            if _is_damage(error):
                self._mend(error)
            return False
        return True

    def _read(self, work: Callable[[], T]) -> T | None:
        """What ``work`` reads, tried again without each damaged chunk; None when nothing can be read now."""
        found: list[T] = []
        while self._db is not None:
            chunks = len(self._chunks)
            if self._guard("read", lambda: found.append(work())):
                return found[0]
            if len(self._chunks) >= chunks:
                break
        return None

    def _mend(self, error: Exception) -> None:
        """Drop the chunk that is damaged, or set the whole file aside."""
        chunk = error.chunk if isinstance(error, DamageError) else None
        if chunk is not None and chunk.id in self._chunks:
            with contextlib.suppress(Exception):
                self._drop(chunk)
                log.warning("history_part_dropped", path=self.path, since=chunk.begin, until=chunk.end)
                return
        try:
            self._begin_anew(error)
        except Exception as next_error:
            self._note_failure("begin anew", next_error)
            self._disconnect()

    def _note_failure(self, doing: str, error: Exception) -> None:
        self.write_errors += 1
        if not self._is_failing:
            self._is_failing = True
            log.warning(
                "history_failed", path=self.path, doing=doing, error=_words(error), effect="the newest points are kept "
                "in memory only; the scheduler goes on",
            )  # fmt: skip

    def _save_names(self, names: dict[int, Key]) -> None:
        rows = [(series, *key) for series, key in names.items()]
        self._connection.executemany("INSERT OR IGNORE INTO series VALUES (?, ?, ?, ?)", rows)

    def _sources(self, chunk: Chunk) -> list[Chunk]:
        """The finer chunks whose series move into this one, oldest first."""
        found = [each for each in self._chunks.values() if each.tier == chunk.tier - 1 and each.end <= chunk.end]
        return sorted(found, key=lambda each: each.end)

    def _drop(self, chunk: Chunk) -> None:
        """Delete a chunk; if it takes part in a move, all chunks of that move."""
        moving = next((each for each in self._chunks.values() if each.is_moving), None)
        together = [] if moving is None else [moving, *self._sources(moving)]
        dropped = together if any(each is chunk for each in together) else [chunk]
        db = self._connection
        with transaction(self._connection):
            for each in dropped:
                # Series without points in other chunks go, too.
                rows = db.execute(_SELECT_ONLY_IN, (each.id,)).fetchall()
                gone = [row for row in rows if row[0] not in self._names]
                db.executemany("DELETE FROM series WHERE id = ?", gone)
                db.execute("DELETE FROM points WHERE chunk = ?", (each.id,))
                db.execute("DELETE FROM chunks WHERE id = ?", (each.id,))
        for each in dropped:
            del self._chunks[each.id]

    def _make_room(self, wanted_bytes: int) -> None:
        """Drop the oldest chunks until ``wanted_bytes`` more fit into ``max_size``."""
        allowed = self.max_size // PAGE_BYTES
        wanted = wanted_bytes * 5 // (4 * PAGE_BYTES) + 4
        while self._chunks and self._read_number("page_count") - self._read_number("freelist_count") + wanted > allowed:
            self._drop(min(self._chunks.values(), key=lambda each: (each.end, each.id)))
        # SQLite holds the bound: a write that would need more fails.
        self._connection.execute(f"PRAGMA max_page_count = {max(allowed, 1)}")

    def _shrink(self) -> None:
        """Give back what a smaller ``max_size`` does not allow any more."""
        if self._read_number("page_count") * self._read_number("page_size") <= self.max_size:
            return
        self._make_room(0)
        self._connection.executescript("PRAGMA incremental_vacuum")  # execute would free one page
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _measure(self) -> None:
        if self._db is not None:
            self.bytes = self._read_number("page_count") * self._read_number("page_size")
        begins = [chunk.begin for chunk in self._chunks.values()]
        begins += [tick.at - tick.interval_s for tick in self._ticks[:1]]
        self.since = min(begins, default=None)

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.OperationalError("the file is not open")
        return self._db

    def _read_number(self, pragma: str) -> int:
        return read_number(self._connection, pragma)


def _is_damage(error: Exception) -> bool:
    if isinstance(error, DamageError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in DAMAGE:
        return True
    # A missing table is the unspecific SQLITE_ERROR; the error of a text that is not UTF-8 has no code.
    return isinstance(error, sqlite3.OperationalError) and str(error).startswith(("no such ", "Could not decode "))


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return describe(error)
    if isinstance(error, sqlite3.Error | DamageError):
        return str(error)
    return f"{type(error).__name__}: {error}"
