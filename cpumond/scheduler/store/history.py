"""The history in a SQLite file of its own: a bounded ring of points, coarser with age. It may be lost; nothing else is.

The newest ticks are in memory, and each is a row of the journal. When there are CHUNK_TICKS of them they become a
*chunk*: one compressed row for each series, and the journal's rows go in the same transaction. A chunk's *tier* says
how fine its points are: as they were taken, by 6, by 30. When the oldest chunks of a tier are old enough they move down
together into one of the next tier, some series at a time; each point is in one place at any moment, so nothing is
counted twice. Over ``max_size`` the oldest chunks go.

Used by one thread at a time, never the event loop's. What the disk refuses is counted and said once, the newest points
stay in memory. A chunk that cannot be read is dropped; a file that cannot be read is set aside as ``PATH.aside``, in
the place of the one before, and a new one begun. A file that is removed while it is in use is written anew.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import quote

import structlog

from cpumond.errors import describe
from cpumond.scheduler.history import (
    HAS_RATES,
    KINDS,
    NOT_KNOWN,
    OPERATION,
    POOL,
    WIDTHS,
    HistoryView,
    Key,
    Points,
    Summary,
    Sums,
    Tick,
    combine,
    gather,
    make_view,
    merge_columns,
    places,
    select,
    split,
    sum_columns,
    top_operations,
)
from cpumond.scheduler.store.sqlite import identify_files, put_back

T = TypeVar("T")
log = structlog.get_logger("cpumond.scheduler")

APPLICATION_ID: Final = 0x43504D48
"""Bytes 68 to 71 of the file: "CPMH"."""
SCHEMA: Final = 2
PAGE_BYTES: Final = 16_384
"""A row of points fits into a quarter of it, else SQLite would give it a page of its own."""
WAL_KEPT_BYTES: Final = 4 * 2**20
BUSY_TIMEOUT_S: Final = 1.0
SUFFIXES: Final = ("", "-wal", "-shm", "-journal")

VALUE_BYTES: Final = 4

CHUNK_TICKS: Final = 30
GROUPS: Final = (6, 5)
"""How many chunks of a tier move down together; as many of their points become one."""
FINE_TICKS: Final = 360
"""The least that stays as fine as it was taken: an hour at the default period. Six times that in the next tier."""
MOVED_SERIES: Final = 250
"""Series that move down with one tick."""
PAUSE_SERIES: Final = 100
PAUSE_S: Final = 0.001
"""Of a chunk that is being made, so that the event loop's thread has its turns."""
ROW_BYTES: Final = 100
"""About what a row takes besides its points."""
MEMORY_TICKS: Final = 360
MEMORY_BYTES: Final = 64 * 2**20
"""What is kept in memory at most while the disk refuses."""

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
_INSERT_POINTS: Final = "INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT_TO_MOVE: Final = (
    "SELECT series, kind, data, used, reclaimed, ordered, throttled, late, limits, peak, count FROM points "
    "WHERE chunk = ? AND series > ? LIMIT ?"
)
_SELECT_SUMS: Final = (
    "SELECT series, SUM(used), SUM(reclaimed), SUM(ordered), SUM(throttled), SUM(late), SUM(limits), MAX(peak), "
    "SUM(count) FROM points WHERE chunk IN (SELECT id FROM chunks WHERE first > ? AND last <= ?) AND kind IN (?, ?) "
    "GROUP BY series"
)
_SELECT_ONLY_IN: Final = """
    SELECT DISTINCT series FROM points AS mine WHERE chunk = ?1 AND NOT EXISTS (
        SELECT 1 FROM chunks CROSS JOIN points ON points.chunk = chunks.id AND points.series = mine.series
        WHERE chunks.id != ?1
    )"""
_HEAD: Final = struct.Struct("<ddI4I")

_Parts = dict[int, tuple[int, Sums, bytes]]
"""Kind, sums and packed points: of a series by chunk, or of a chunk by series."""
_Row = tuple[int, int, int, float, float, float, float, float, float, float, int, bytes]


class _DamageError(Exception):
    """The file holds what this module never wrote. ``chunk``: only this one is concerned."""

    def __init__(self, text: str, chunk: _Chunk | None = None) -> None:
        super().__init__(text)
        self.chunk = chunk


@dataclass(slots=True)
class _Chunk:
    """What is known of a chunk in memory."""

    id: int
    tier: int
    is_moving: bool
    """Its series still come from the chunks of the tier above that lie within its time."""
    ends: array[float]
    intervals: array[float]
    left_out: int
    """The most operations at one moment that found no room."""

    @property
    def begin(self) -> float:
        return self.ends[0] - self.intervals[0]

    @property
    def end(self) -> float:
        return self.ends[-1]


class HistoryStore:
    """The history of one scheduler. ``path`` None keeps it in memory only.

    ``length_s``: how far it goes back; ``period_s``: the time between two ticks; ``max_size``: bytes of the file. What
    is stored of after ``now`` is dropped: the clock was set back, and times must not go back within a series.
    """

    def __init__(self, path: str | None, length_s: float, period_s: float, max_size: int, now: float) -> None:
        self.path = path
        self.length_s, self.period_s, self.max_size = length_s, period_s, max_size
        self.keep_s = (
            min(max(length_s / 24, FINE_TICKS * period_s), length_s),
            min(max(length_s / 4, 6 * FINE_TICKS * period_s), length_s),
        )
        """How long points stay in the first two tiers."""
        self.write_errors = 0
        self.bytes = 0
        self.since: float | None = None
        """The beginning of the oldest interval."""
        self._db: sqlite3.Connection | None = None
        self._files: list[tuple[int, int] | None] = []
        self._is_failing = False
        self._now = now
        self._ticks: list[Tick] = []
        self._names: dict[int, Key] = {}
        """Of the series in memory and of the last tick."""
        self._unsaved: dict[int, Key] = {}
        self._chunks: dict[int, _Chunk] = {}
        self._next_seq = 1
        self._retry_at = 0
        """No chunk is tried before the tick of this number: the last try failed."""
        self._moved: tuple[int, int] = (0, -1)
        """The chunk that is being filled, and the last series that it has."""
        self._open()
        if self._db is not None:
            self._guard("write", lambda: self._drop_future(now))
            self._guard("read", self._measure)
        last_ids = [series for tick in self._ticks[-1:] for ids in tick.ids for series in ids]
        self.known_ids = {self._names[series]: series for series in last_ids if series in self._names}
        """What the last tick of an earlier run called its series."""
        self.next_id = self._find_next_id()

    # --- opening -------------------------------------------------------------------------------------------------

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
        self._db = db = sqlite3.connect(
            f"file:{quote(os.fsencode(self.path))}?mode=rw",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        version = self._read_number("user_version")
        if version == 0 and self._read_number("page_count") <= 1:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                for statement in _TABLES:
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA}")
        elif version != SCHEMA or self._read_number("application_id") != APPLICATION_ID:
            raise _DamageError(f"it is not a history of schema {SCHEMA}")
        db.execute("PRAGMA journal_mode = WAL")
        # What a crash of the machine takes of the newest points is no loss; the file stays sound.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA cell_size_check = ON")
        db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_KEPT_BYTES // PAGE_BYTES}")
        self._chunks = {}
        query = "SELECT id, tier, is_moving, left_out, times FROM chunks"
        for chunk_id, tier, is_moving, left_out, times in db.execute(query):
            ends, intervals = _decode_times(times)
            self._chunks[chunk_id] = _Chunk(chunk_id, tier, bool(is_moving), ends, intervals, left_out)
        ticks: list[Tick] = []
        names: dict[int, Key] = {}
        for seq, data in db.execute("SELECT seq, data FROM journal ORDER BY seq"):
            tick = _decode_tick(data)
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
        """What is written must be where the next process looks for it. Raises OSError or sqlite3.Error."""
        assert self.path is not None
        if identify_files(self.path) == self._files:
            return
        log.error("history_lost", path=self.path, advice="find out who removed it; what is open is written anew")
        if not os.path.lexists(self.path):
            put_back(self._connection, self.path)
        self._disconnect()
        self._open_again()

    def _begin_anew(self, error: Exception) -> None:
        """Set the file aside, keep what is in memory."""
        assert self.path is not None
        self._disconnect()
        # One is enough to look at; a disk that damages one file after the other must not be filled by them.
        aside = f"{self.path}.aside"
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside + suffix)
        for suffix in SUFFIXES:
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
        with self._transaction():
            self._connection.executemany("DELETE FROM journal WHERE seq = ?", [(tick.seq,) for tick in ticks])
        self._ticks = [tick for tick in self._ticks if tick.at <= now]

    def _find_next_id(self) -> int:
        # A file that is opened later has lower numbers.
        highest = int(self._now) << 24
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                highest = self._db.execute("SELECT MAX(id) FROM series").fetchone()[0] or 0
        return highest + 1

    def _disconnect(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def close(self) -> None:
        """Write what the journal does not have yet, and let go of the file. A second time does nothing."""
        if self._db is None:
            return
        if self._is_failing and self._ticks:
            self._guard("write", self._flush)
        self._disconnect()

    # --- adding --------------------------------------------------------------------------------------------------

    def add(self, tick: Tick) -> None:
        """Take in the next tick; never raises for what the disk or the file does."""
        errors = self.write_errors
        self._now = tick.at
        tick.seq = self._next_seq
        self._next_seq += 1
        self._ticks.append(tick)
        self._names.update(tick.new)
        self._unsaved.update(tick.new)
        is_due = len(self._ticks) >= CHUNK_TICKS and tick.seq >= self._retry_at
        if is_due and self._db is None and self.path is not None:
            self._retry_at = tick.seq + CHUNK_TICKS
            self._open_again()
        if self._db is not None:
            self._guard("write", self._stay_in_place)
        if self._db is not None:
            self._guard("write", lambda: self._write_journal(tick))
            if is_due and not self._guard("write", self._flush):
                self._retry_at = tick.seq + CHUNK_TICKS
            self._guard("write", self._expire)
            self._guard("write", self._move_down)
            if self._is_failing and self.write_errors == errors:
                self._is_failing = False
                log.info("history_is_written_again", path=self.path)
        self._limit_memory()
        self._guard("read", self._measure)

    def _open_again(self) -> None:
        """The file could not be opened before: what was taken since goes behind what it has."""
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
        """Do something with the file; whatever goes wrong is noted. False: it was not done."""
        try:
            work()
        except Exception as error:
            self._note_failure(doing, error)
            if _is_damage(error):
                self._mend(error)
            return False
        return True

    def _read(self, work: Callable[[], T]) -> T | None:
        """What can be read without what is damaged; None when nothing can be read now."""
        found: list[T] = []
        while self._db is not None:
            chunks = len(self._chunks)
            if self._guard("read", lambda: found.append(work())):
                return found[0]
            if len(self._chunks) >= chunks:
                break
        return None

    def _mend(self, error: Exception) -> None:
        """Let the part go that is damaged, or all of the file."""
        chunk = error.chunk if isinstance(error, _DamageError) else None
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

    def _limit_memory(self) -> None:
        """What the disk does not take cannot all be kept."""
        if len(self._ticks) <= CHUNK_TICKS:
            return
        sizes = [8 * sum(map(len, tick.ids)) + 4 * sum(map(len, tick.values)) for tick in self._ticks]
        kept, total = 0, 0
        for tick, size in zip(reversed(self._ticks), reversed(sizes), strict=True):
            total += size
            if kept and (kept == MEMORY_TICKS or total > MEMORY_BYTES or tick.at <= self._now - self.length_s):
                break
            kept += 1
        del self._ticks[:-kept]
        self._forget_names(self._ticks)

    def _forget_names(self, ticks: Iterable[Tick]) -> None:
        kept = {series for tick in ticks for ids in tick.ids for series in ids}
        self._names = {series: key for series, key in self._names.items() if series in kept}
        self._unsaved = {series: key for series, key in self._unsaved.items() if series in kept}

    def _write_journal(self, tick: Tick) -> None:
        db = self._connection
        data = _encode_tick(tick)
        self._make_room(len(data) + ROW_BYTES * len(self._unsaved))
        with self._transaction():
            self._save_names(self._unsaved)
            db.execute("INSERT INTO journal VALUES (?, ?)", (tick.seq, data))
        self._unsaved = {}

    def _save_names(self, names: dict[int, Key]) -> None:
        rows = [(series, *key) for series, key in names.items()]
        self._connection.executemany("INSERT OR IGNORE INTO series VALUES (?, ?, ?, ?)", rows)

    def _flush(self) -> None:
        """Make a chunk of the oldest ticks in memory."""
        db = self._connection
        ticks = self._ticks[:CHUNK_TICKS]
        chunk = _Chunk(
            max(self._chunks, default=0) + 1,
            0,
            False,
            array("d", (tick.at for tick in ticks)),
            array("d", (tick.interval_s for tick in ticks)),
            max(tick.left_out for tick in ticks),
        )
        rows = list(self._make_rows(chunk, ticks))
        self._make_room(sum(len(row[-1]) + ROW_BYTES for row in rows))
        with self._transaction():
            self._save_names({row[1]: self._names[row[1]] for row in rows})
            self._insert_chunk(chunk)
            db.executemany(_INSERT_POINTS, rows)
            db.execute("DELETE FROM journal WHERE seq <= ?", (ticks[-1].seq,))
        self._chunks[chunk.id] = chunk
        # The names of the last tick stay: the next ones call their series the same.
        self._forget_names([ticks[-1], *self._ticks[CHUNK_TICKS:]])
        del self._ticks[: len(ticks)]

    def _make_rows(self, chunk: _Chunk, ticks: list[Tick]) -> Iterator[_Row]:
        for kind in range(len(KINDS)):
            for number, (series, rows) in enumerate(places(ticks, kind).items(), 1):
                if series not in self._names:
                    continue
                if number % PAUSE_SERIES == 0:
                    time.sleep(PAUSE_S)
                columns = gather(ticks, kind, rows)
                sums = sum_columns(kind, chunk.intervals, columns) if HAS_RATES[kind] else Sums()
                yield (chunk.id, series, kind, *sums, _pack(columns))

    def _insert_chunk(self, chunk: _Chunk) -> None:
        times = (chunk.ends + chunk.intervals).tobytes()
        row = (chunk.id, chunk.tier, int(chunk.is_moving), chunk.ends[0], chunk.end, chunk.left_out, times)
        self._connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    # --- growing old ---------------------------------------------------------------------------------------------

    def _move_down(self) -> None:
        """Take the next step of making old points coarser."""
        if not self._chunks:
            return
        chunk = next((each for each in self._chunks.values() if each.is_moving), None)
        if chunk is None:
            chunk = self._start_moving()
        if chunk is not None:
            self._move_some(chunk)

    def _start_moving(self) -> _Chunk | None:
        for tier, size in enumerate(GROUPS):
            oldest = sorted((each for each in self._chunks.values() if each.tier == tier), key=lambda each: each.end)
            group = oldest[:size]
            if self.keep_s[tier] >= self.length_s or len(group) < size or group[-1].end > self._now - self.keep_s[tier]:
                continue
            ends, intervals = _join_times(group)
            groups = self._split(tier + 1, ends)
            chunk = _Chunk(
                max(self._chunks) + 1,
                tier + 1,
                True,
                array("d", (ends[b - 1] for _, b in groups)),
                array("d", (sum(intervals[a:b]) for a, b in groups)),
                max(each.left_out for each in group),
            )
            with self._transaction():
                self._insert_chunk(chunk)
            self._chunks[chunk.id] = chunk
            return chunk
        return None

    def _split(self, tier: int, ends: array[float]) -> list[tuple[int, int]]:
        width_s = self.period_s * math.prod(GROUPS[:tier])
        return split(ends, lambda end: math.ceil(end / width_s - 1e-6))

    def _sources(self, chunk: _Chunk) -> list[_Chunk]:
        """The chunks whose series move into this one, oldest first."""
        found = [each for each in self._chunks.values() if each.tier == chunk.tier - 1 and each.end <= chunk.end]
        return sorted(found, key=lambda each: each.end)

    def _move_some(self, chunk: _Chunk) -> None:
        db = self._connection
        sources = self._sources(chunk)
        last, until, found = self._find_moving(chunk, sources)
        merged = self._merge(chunk, sources, found)
        self._make_room(sum(len(row[-1]) + ROW_BYTES for row in merged))
        if chunk.id not in self._chunks:
            return  # it was so old that it had to make room
        is_done = until is None
        with self._transaction():
            db.executemany(_INSERT_POINTS, merged)
            for source in sources:
                if is_done:
                    db.execute("DELETE FROM points WHERE chunk = ?", (source.id,))
                    db.execute("DELETE FROM chunks WHERE id = ?", (source.id,))
                else:
                    where = (source.id, last, until)
                    db.execute("DELETE FROM points WHERE chunk = ? AND series > ? AND series <= ?", where)
            if is_done:
                db.execute("UPDATE chunks SET is_moving = 0 WHERE id = ?", (chunk.id,))
        self._moved = (chunk.id, -1 if until is None else until)
        if is_done:
            chunk.is_moving = False
            for source in sources:
                del self._chunks[source.id]

    def _find_moving(self, chunk: _Chunk, sources: list[_Chunk]) -> tuple[int, int | None, dict[int, _Parts]]:
        """The next series that move, all after the first number and up to the second (None: these are the last)."""
        last = self._moved[1] if self._moved[0] == chunk.id else -1
        found: dict[int, _Parts] = {}
        fulls: list[int] = []
        for source in sources:
            rows = self._connection.execute(_SELECT_TO_MOVE, (source.id, last, MOVED_SERIES)).fetchall()
            if len(rows) == MOVED_SERIES:
                fulls.append(rows[-1][0])
            for series, kind, data, *sums in rows:
                found.setdefault(series, {})[source.id] = (kind, Sums(*sums), data)
        until = min(fulls, default=None)
        if until is not None:
            found = {series: parts for series, parts in found.items() if series <= until}
        return last, until, found

    def _merge(self, chunk: _Chunk, sources: list[_Chunk], found: dict[int, _Parts]) -> list[_Row]:
        ends, intervals = _join_times(sources)
        groups = self._split(chunk.tier, ends)
        merged: list[_Row] = []
        for series, parts in sorted(found.items()):
            kind = next(iter(parts.values()))[0]
            columns = [array("f") for _ in range(WIDTHS[kind])]
            total = Sums()
            for source in sources:
                unpacked = [array("f", [NOT_KNOWN]) * len(source.ends)] * WIDTHS[kind]
                if source.id in parts:
                    _, sums, data = parts[source.id]
                    unpacked = _unpack(data, kind, source)
                    total = total.plus(sums)
                for column, part in zip(columns, unpacked, strict=True):
                    column.extend(part)
            packed = _pack(merge_columns(intervals, groups, columns, HAS_RATES[kind]))
            merged.append((chunk.id, series, kind, *total, packed))
        return merged

    def _expire(self) -> None:
        for chunk in sorted(self._chunks.values(), key=lambda each: each.end):
            if chunk.end <= self._now - self.length_s and chunk.id in self._chunks:
                self._drop(chunk)

    def _drop(self, chunk: _Chunk) -> None:
        """Forget a chunk; with one that is being moved, all that move with it."""
        moving = next((each for each in self._chunks.values() if each.is_moving), None)
        together = [] if moving is None else [moving, *self._sources(moving)]
        dropped = together if any(each is chunk for each in together) else [chunk]
        db = self._connection
        with self._transaction():
            for each in dropped:
                # Series of which nothing else is left go, too.
                rows = db.execute(_SELECT_ONLY_IN, (each.id,)).fetchall()
                gone = [row for row in rows if row[0] not in self._names]
                db.executemany("DELETE FROM series WHERE id = ?", gone)
                db.execute("DELETE FROM points WHERE chunk = ?", (each.id,))
                db.execute("DELETE FROM chunks WHERE id = ?", (each.id,))
        for each in dropped:
            del self._chunks[each.id]

    def _make_room(self, wanted_bytes: int) -> None:
        """Let the oldest chunks go until there is room for so much more."""
        allowed = self.max_size // PAGE_BYTES
        wanted = wanted_bytes * 5 // (4 * PAGE_BYTES) + 4
        while self._chunks and self._read_number("page_count") - self._read_number("freelist_count") + wanted > allowed:
            self._drop(min(self._chunks.values(), key=lambda each: (each.end, each.id)))
        # The last word is SQLite's: a write that would need more fails.
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

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, key: Key, since: float, until: float, max_points: int) -> HistoryView:
        """The points of a series that end in (since, until]; ``key.tree`` "" is any tree."""
        parts: list[Points] = []
        ids = {
            series
            for series, known in self._names.items()
            if known.kind == key.kind and known.name == key.name and key.tree in ("", known.tree)
        }
        parts += self._read(lambda: self._read_stored(key, ids, since, until)) or []
        ticks = [tick for tick in self._ticks if since < tick.at <= until]
        if ticks:
            ends, intervals = array("d", (t.at for t in ticks)), array("d", (t.interval_s for t in ticks))
            for series in ids:
                rows = [_find(tick.ids[key.kind], series) for tick in ticks]
                if any(row >= 0 for row in rows):
                    parts.append(Points(ends, intervals, gather(ticks, key.kind, rows)))
        points = combine((select(part, since, until) for part in parts), key.kind)
        return make_view(key, points, since, until, max_points, self.period_s)

    def _read_stored(self, key: Key, ids: set[int], since: float, until: float) -> list[Points]:
        where: tuple[str | int, ...] = (key.name, key.kind)
        query = "SELECT id FROM series WHERE name = ? AND kind = ?"
        if key.tree:
            query, where = f"{query} AND tree = ?", (*where, key.tree)
        found = self._connection.execute(query, where)
        ids.update(series for (series,) in found)
        stored: dict[int, _Parts] = {}
        for chunk in self._chunks.values():
            if chunk.end > since and chunk.ends[0] <= until:
                for series in ids:
                    row = self._connection.execute(
                        "SELECT kind, data FROM points WHERE chunk = ? AND series = ?", (chunk.id, series)
                    ).fetchone()
                    if row is not None:
                        stored.setdefault(chunk.id, {})[series] = (row[0], Sums(), row[1])
        moving = next((chunk for chunk in self._chunks.values() if chunk.is_moving and chunk.id in stored), None)
        if moving is not None:
            # Some of the series have moved: let the others look the same, so that their points are of the same times.
            sources = [source for source in self._sources(moving) if source.id in stored]
            left: dict[int, _Parts] = {}
            for source in sources:
                for series, part in stored.pop(source.id).items():
                    left.setdefault(series, {})[source.id] = part
            merged = self._merge(moving, self._sources(moving), left)
            stored[moving.id] |= {row[1]: (row[2], Sums(), row[-1]) for row in merged}
        return [
            Points(chunk.ends, chunk.intervals, _unpack(data, kind, chunk))
            for chunk, rows in ((self._chunks[chunk_id], rows) for chunk_id, rows in stored.items())
            for kind, _, data in rows.values()
        ]

    def sum_up(self, since: float, until: float, tree: str | None, top: int) -> Summary:
        """What the pools, and of each tree the ``top`` operations, came to by points that end in (since, until]."""
        names = {series: key for series, key in self._names.items() if key.kind in (POOL, OPERATION)}
        sums = self._read(lambda: self._sum_stored(since, until, names)) or {}
        ticks = [tick for tick in self._ticks if since < tick.at <= until]
        covered_s = math.fsum(tick.interval_s for tick in ticks)
        intervals = array("d", (tick.interval_s for tick in ticks))
        for kind in (POOL, OPERATION):
            for series, rows in places(ticks, kind).items():
                sums[series] = sums.get(series, Sums()).plus(sum_columns(kind, intervals, gather(ticks, kind, rows)))
        without_series = max((tick.left_out for tick in ticks), default=0)
        for chunk in self._chunks.values():
            if not chunk.is_moving:
                if chunk.end > since and chunk.begin < until:
                    without_series = max(without_series, chunk.left_out)
                times = zip(chunk.ends, chunk.intervals, strict=True)
                covered_s += math.fsum(interval for end, interval in times if since < end <= until)
        by_key: dict[Key, Sums] = {}
        for series, each in sums.items():
            key = names.get(series)
            if key is not None and each.points and tree in (None, key.tree):
                by_key[key] = by_key.get(key, Sums()).plus(each)
        return Summary(*top_operations(by_key, top), covered_s, without_series)

    def _sum_stored(self, since: float, until: float, names: dict[int, Key]) -> dict[int, Sums]:
        db = self._connection
        sums: dict[int, Sums] = {}
        for series, *values in db.execute(_SELECT_SUMS, (since, until, POOL, OPERATION)):
            sums[series] = Sums(*values)
        for chunk in self._chunks.values():
            is_inside = since < chunk.ends[0] and chunk.end <= until
            if is_inside or chunk.end <= since or chunk.ends[0] > until:
                continue
            a, b = _range(chunk.ends, since, until)
            query = "SELECT series, kind, data FROM points WHERE chunk = ? AND kind IN (?, ?)"
            merged = math.prod(GROUPS[: chunk.tier])
            for series, kind, data in db.execute(query, (chunk.id, POOL, OPERATION)):
                columns = [each[a:b] for each in _unpack(data, kind, chunk)]
                part = sum_columns(kind, chunk.intervals[a:b], columns)
                sums[series] = sums.get(series, Sums()).plus(part._replace(points=part.points * merged))
        query = "SELECT id, kind, tree, name FROM series WHERE kind IN (?, ?)"
        for series, kind, tree, name in db.execute(query, (POOL, OPERATION)):
            if series in sums:
                names[series] = Key(kind, tree, name)
        return sums

    # --- SQLite --------------------------------------------------------------------------------------------------

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.OperationalError("the file is not open")
        return self._db

    def _read_number(self, pragma: str) -> int:
        return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        db = self._connection
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise


def _range(ends: array[float], since: float, until: float) -> tuple[int, int]:
    inside = [number for number, end in enumerate(ends) if since < end <= until]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _find(ids: array[int], series: int) -> int:
    try:
        return ids.index(series)
    except ValueError:
        return -1


def _join_times(chunks: Collection[_Chunk]) -> tuple[array[float], array[float]]:
    ends, intervals = array("d"), array("d")
    for chunk in chunks:
        ends += chunk.ends
        intervals += chunk.intervals
    return ends, intervals


def _pack(columns: Iterable[array[float]]) -> bytes:
    """First bytes of all values first, then all second ones, ...: they are alike, which makes them small."""
    raw = b"".join([column.tobytes() for column in columns])
    return zlib.compress(b"".join([raw[number::VALUE_BYTES] for number in range(VALUE_BYTES)]), 1)


def _unpack(data: bytes, kind: int, chunk: _Chunk) -> list[array[float]]:
    """Raises _DamageError."""
    length = len(chunk.ends)
    try:
        sorted_bytes = zlib.decompress(data)
    except (zlib.error, TypeError) as error:
        raise _DamageError(f"points cannot be unpacked: {error}", chunk) from None
    if kind not in range(len(KINDS)) or len(sorted_bytes) != VALUE_BYTES * WIDTHS[kind] * length:
        raise _DamageError("a row of points has another length than its chunk", chunk)
    raw = bytearray(len(sorted_bytes))
    plane = WIDTHS[kind] * length
    for number in range(VALUE_BYTES):
        raw[number::VALUE_BYTES] = sorted_bytes[number * plane : (number + 1) * plane]
    values = array("f", bytes(raw))
    return [values[number * length : (number + 1) * length] for number in range(WIDTHS[kind])]


def _encode_tick(tick: Tick) -> bytes:
    parts = [_HEAD.pack(tick.at, tick.interval_s, tick.left_out, *map(len, tick.ids))]
    parts += [ids.tobytes() for ids in tick.ids]
    parts += [values.tobytes() for values in tick.values]
    return zlib.compress(b"".join(parts), 1)


def _decode_tick(data: bytes) -> Tick:
    """Raises _DamageError."""
    try:
        raw = zlib.decompress(data)
        at, interval_s, left_out, *counts = _HEAD.unpack_from(raw)
        view, offset = memoryview(raw), _HEAD.size
        ids: list[array[int]] = []
        values: list[array[float]] = []
        for count in counts:
            ids.append(array("q", bytes(view[offset : offset + 8 * count])))
            offset += 8 * count
        for count, width in zip(counts, WIDTHS, strict=True):
            values.append(array("f", bytes(view[offset : offset + 4 * count * width])))
            offset += 4 * count * width
    except (zlib.error, struct.error, ValueError, TypeError) as error:
        raise _DamageError(f"a tick of the journal cannot be read: {error}") from None
    if offset != len(raw):
        raise _DamageError("a tick of the journal has another length than it says")
    return Tick(at, interval_s, tuple(ids), tuple(values), left_out=left_out)


def _decode_times(times: bytes) -> tuple[array[float], array[float]]:
    """Ends and intervals. Raises _DamageError."""
    try:
        values = array("d", times)
    except (TypeError, ValueError) as error:
        raise _DamageError(f"the times of a chunk cannot be read: {error}") from None
    half = len(values) // 2
    if not half or len(values) % 2:
        raise _DamageError("a chunk has no times")
    return values[:half], values[half:]


def _is_damage(error: Exception) -> bool:
    if isinstance(error, _DamageError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT):
        return True
    # A table that is missing is SQLITE_ERROR, as many things are; a text that is no UTF-8 has no code.
    return isinstance(error, sqlite3.OperationalError) and str(error).startswith(("no such ", "Could not decode "))


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return describe(error)
    if isinstance(error, sqlite3.Error | _DamageError):
        return str(error)
    return f"{type(error).__name__}: {error}"
