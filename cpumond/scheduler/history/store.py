"""The history in a SQLite file of its own: a bounded ring of points, coarser with age. Its loss harms nothing else.

The newest ticks are in memory, and each is a row of the journal. When there are CHUNK_TICKS of them they become a
*chunk*: one compressed row for each series, and the journal's rows go in the same transaction. A chunk's *tier* says
how fine its points are: as they were taken, by 6, by 30. When the oldest chunks of a tier are old enough they move down
together into one of the next tier, some series at a time; each point is in one place at any moment, so nothing is
counted twice. Over ``max_size`` the oldest chunks go.

Used by one thread at a time, never the event loop's. Failed writes are counted and logged once, the newest points stay
in memory. A chunk that cannot be read is dropped; a file that cannot be read is renamed to ``PATH.aside``, replacing an
earlier one, and a new file is begun. A file that is removed while it is in use is written anew.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from cpumond.scheduler.history.chunks import (
    Chunk,
    encode_tick,
    find_range,
    find_row,
    join_times,
    pack,
    pack_values,
    unpack,
    values_of,
)
from cpumond.scheduler.history.file import HistoryFile, log
from cpumond.scheduler.history.model import (
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
)
from cpumond.scheduler.history.series import (
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
from cpumond.scheduler.history.spread import MAX_SPREAD_S, spread_rates
from cpumond.scheduler.history.trends import Trend, Trends
from cpumond.scheduler.store.sqlite import transaction

CHUNK_TICKS: Final = 30
GROUPS: Final = (6, 5)
"""How many chunks of a tier move down together; as many of their points become one."""
FINE_TICKS: Final = 360
"""Points stay as fine as they were taken for so many periods at least, an hour by default; six times that in tier 1."""
MOVED_SERIES: Final = 250
"""Series that move down with one tick."""
PAUSE_SERIES: Final = 100
PAUSE_S: Final = 0.001
"""After each PAUSE_SERIES series of a new chunk the thread sleeps so long: the event loop's thread gets its turns."""
LOOKED_UP_AT_ONCE: Final = 500
"""Names of series that are asked for in one statement."""
ROW_BYTES: Final = 100
"""Roughly what a row takes besides its points."""
MEMORY_TICKS: Final = 360
MEMORY_BYTES: Final = 64 * 2**20
"""What is kept in memory at most while writes fail."""

_INSERT_POINTS: Final = "INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT_TO_MOVE: Final = (
    "SELECT series, kind, data, used, reclaimed, ordered, throttled, late, limits, peak, count FROM points "
    "WHERE chunk = ? AND series > ? LIMIT ?"
)
_SELECT_SUMS: Final = (
    "SELECT series, SUM(used), SUM(reclaimed), SUM(ordered), SUM(throttled), SUM(late), SUM(limits), MAX(peak), "
    "SUM(count) FROM points WHERE chunk IN (SELECT id FROM chunks WHERE first > ? AND last <= ?) AND kind IN (?, ?)"
)

_Parts = dict[int, tuple[int, Sums, bytes]]
"""Kind, sums and packed points: of a series by chunk, or of a chunk by series."""
_Row = tuple[int, int, int, float, float, float, float, float, float, float, int, bytes]


class HistoryStore(HistoryFile):
    """The history of one scheduler. ``path`` None keeps it in memory only.

    ``length_s``: how far it goes back; ``period_s``: the time between two ticks; ``max_size``: bytes of the file.
    Stored points after ``now`` are dropped: the clock was set back, and times must not go back within a series.
    """

    def __init__(self, path: str | None, length_s: float, period_s: float, max_size: int, now: float) -> None:
        super().__init__(path, length_s, period_s, max_size)
        self.keep_s = (
            min(max(length_s / 24, FINE_TICKS * period_s), length_s),
            min(max(length_s / 4, 6 * FINE_TICKS * period_s), length_s),
        )
        """How long points stay in the first two tiers."""
        self._now = now
        self._retry_at = 0
        """After a failure no chunk is made before the tick of this number."""
        self._open()
        if self._db is not None:
            self._guard("write", lambda: self._drop_future(now))
            self._guard("read", self._measure)
        last_ids = [series for tick in self._ticks[-1:] for ids in tick.ids for series in ids]
        self.known_ids = {self._names[series]: series for series in last_ids if series in self._names}
        """Series numbers in the last tick of an earlier run."""
        self.next_id = self._find_next_id()

    def _find_next_id(self) -> int:
        # A file that cannot be opened until later has lower numbers than the time.
        highest = int(self._now) << 24
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                highest = self._db.execute("SELECT MAX(id) FROM series").fetchone()[0] or 0
        return highest + 1

    def close(self) -> None:
        """Write what the journal does not have yet, and close the file. A second call does nothing."""
        if self._db is None:
            return
        if self._is_failing and self._ticks:
            self._guard("write", self._flush)
        self._disconnect()

    def add(self, tick: Tick) -> None:
        """Take in the next tick; failures of the disk or the file do not raise."""
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
        for each in self._ticks:
            pack_values(each)
        self._limit_memory()
        self._guard("read", self._measure)

    def _limit_memory(self) -> None:
        """Forget the oldest ticks in memory when the disk takes none for long."""
        if len(self._ticks) <= CHUNK_TICKS:
            return
        sizes = [8 * sum(map(len, tick.ids)) + sum(map(len, tick.packed)) for tick in self._ticks]
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
        data = encode_tick(tick)
        self._make_room(len(data) + ROW_BYTES * len(self._unsaved))
        with transaction(self._connection):
            self._save_names(self._unsaved)
            db.execute("INSERT INTO journal VALUES (?, ?)", (tick.seq, data))
        self._unsaved = {}

    def _flush(self) -> None:
        """Make a chunk of the oldest ticks in memory."""
        db = self._connection
        ticks = self._ticks[:CHUNK_TICKS]
        chunk = Chunk(
            max(self._chunks, default=0) + 1,
            0,
            False,
            array("d", (tick.at for tick in ticks)),
            array("d", (tick.interval_s for tick in ticks)),
            max(tick.left_out for tick in ticks),
        )
        rows = list(self._make_rows(chunk, ticks))
        self._make_room(sum(len(row[-1]) + ROW_BYTES for row in rows))
        with transaction(self._connection):
            self._save_names({row[1]: self._names[row[1]] for row in rows})
            self._insert_chunk(chunk)
            db.executemany(_INSERT_POINTS, rows)
            db.execute("DELETE FROM journal WHERE seq <= ?", (ticks[-1].seq,))
        self._chunks[chunk.id] = chunk
        # The names of the last tick stay: the next ticks have the same series.
        self._forget_names([ticks[-1], *self._ticks[CHUNK_TICKS:]])
        del self._ticks[: len(ticks)]

    def _make_rows(self, chunk: Chunk, ticks: list[Tick]) -> Iterator[_Row]:
        for kind in range(len(KINDS)):
            values = [values_of(tick, kind) for tick in ticks]
            for number, (series, rows) in enumerate(places(ticks, kind).items(), 1):
                if series not in self._names:
                    continue
                if number % PAUSE_SERIES == 0:
                    time.sleep(PAUSE_S)
                columns = gather(values, kind, rows)
                sums = sum_columns(kind, chunk.intervals, columns) if HAS_RATES[kind] else Sums()
                yield (chunk.id, series, kind, *sums, pack(columns))

    def _insert_chunk(self, chunk: Chunk) -> None:
        times = (chunk.ends + chunk.intervals).tobytes()
        row = (chunk.id, chunk.tier, int(chunk.is_moving), chunk.ends[0], chunk.end, chunk.left_out, times)
        self._connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def _move_down(self) -> None:
        """Take the next step of making old points coarser."""
        if not self._chunks:
            return
        chunk = next((each for each in self._chunks.values() if each.is_moving), None)
        if chunk is None:
            chunk = self._start_moving()
        if chunk is not None:
            self._move_some(chunk)

    def _start_moving(self) -> Chunk | None:
        for tier, size in enumerate(GROUPS):
            oldest = sorted((each for each in self._chunks.values() if each.tier == tier), key=lambda each: each.end)
            group = oldest[:size]
            if self.keep_s[tier] >= self.length_s or len(group) < size or group[-1].end > self._now - self.keep_s[tier]:
                continue
            ends, intervals = join_times(group)
            groups = self._split(tier + 1, ends)
            chunk = Chunk(
                max(self._chunks) + 1,
                tier + 1,
                True,
                array("d", (ends[b - 1] for _, b in groups)),
                array("d", (sum(intervals[a:b]) for a, b in groups)),
                max(each.left_out for each in group),
            )
            with transaction(self._connection):
                self._insert_chunk(chunk)
            self._chunks[chunk.id] = chunk
            return chunk
        return None

    def _split(self, tier: int, ends: array[float]) -> list[tuple[int, int]]:
        width_s = self.period_s * math.prod(GROUPS[:tier])
        return split(ends, lambda end: math.ceil(end / width_s - 1e-6))

    def _move_some(self, chunk: Chunk) -> None:
        db = self._connection
        sources = self._sources(chunk)
        last, until, found = self._find_moving(chunk, sources)
        merged = self._merge(chunk, sources, found)
        self._make_room(sum(len(row[-1]) + ROW_BYTES for row in merged))
        if chunk.id not in self._chunks:
            return  # dropped to make room
        is_done = until is None
        with transaction(self._connection):
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

    def _find_moving(self, chunk: Chunk, sources: list[Chunk]) -> tuple[int, int | None, dict[int, _Parts]]:
        """The next series that move: those after the first number and up to the second (None: these are the last)."""
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

    def _merge(self, chunk: Chunk, sources: list[Chunk], found: dict[int, _Parts]) -> list[_Row]:
        ends, intervals = join_times(sources)
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
                    unpacked = unpack(data, kind, source)
                    total = total.plus(sums)
                for column, part in zip(columns, unpacked, strict=True):
                    column.extend(part)
            packed = pack(merge_columns(intervals, groups, columns, HAS_RATES[kind]))
            merged.append((chunk.id, series, kind, *total, packed))
        return merged

    def _expire(self) -> None:
        for chunk in sorted(self._chunks.values(), key=lambda each: each.end):
            if chunk.end <= self._now - self.length_s and chunk.id in self._chunks:
                self._drop(chunk)

    def read(self, key: Key, since: float, until: float, max_points: int) -> HistoryView:
        """The points of a series that end in (since, until]; ``key.tree`` "" is any tree."""
        points = spread_rates(self._read_points(key, since - MAX_SPREAD_S, until + MAX_SPREAD_S), key.kind)
        return make_view(key, select(points, since, until), since, until, max_points, self.period_s)

    def _read_points(self, key: Key, since: float, until: float) -> Points:
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
            values = [values_of(tick, key.kind) for tick in ticks] if ids else []
            for series in ids:
                rows = [find_row(tick.ids[key.kind], series) for tick in ticks]
                if any(row >= 0 for row in rows):
                    parts.append(Points(ends, intervals, gather(values, key.kind, rows)))
        return combine((select(part, since, until) for part in parts), key.kind)

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
            # Some series have moved: merge the others likewise, so that the points of all have the same times.
            sources = [source for source in self._sources(moving) if source.id in stored]
            left: dict[int, _Parts] = {}
            for source in sources:
                for series, part in stored.pop(source.id).items():
                    left.setdefault(series, {})[source.id] = part
            merged = self._merge(moving, self._sources(moving), left)
            stored[moving.id] |= {row[1]: (row[2], Sums(), row[-1]) for row in merged}
        return [
            Points(chunk.ends, chunk.intervals, unpack(data, kind, chunk))
            for chunk, rows in ((self._chunks[chunk_id], rows) for chunk_id, rows in stored.items())
            for kind, _, data in rows.values()
        ]

    def read_trends(self, tree: str, pools: Iterable[str], column: int, times: Trends) -> dict[str, list[float | None]]:
        """A gauge of many pools of a tree, in the parts of ``times``; pools without a series are left out."""
        wanted = set(pools)
        known = self._names.items()
        keys = {series: key.name for series, key in known if key[:2] == (POOL, tree) and key.name in wanted}
        points = {name: times.begin() for name in keys.values()}
        self._read(lambda: self._read_stored_trends(tree, wanted, keys, column, times, points))
        places: dict[int, dict[int, int]] = {}
        for tick in self._ticks:
            if times.since < tick.at <= times.until:
                ids, values = tick.ids[POOL], values_of(tick, POOL)
                # Most ticks share their ids.
                rows = places.setdefault(id(ids), {})
                if not rows:
                    rows.update({series: row for row, series in enumerate(ids) if series in keys})
                for series, row in rows.items():
                    points[keys[series]].add(tick.at, tick.interval_s, values[row * WIDTHS[POOL] + column])
        return {name: each.values() for name, each in points.items()}

    def _read_stored_trends(
        self, tree: str, wanted: set[str], keys: dict[int, str], column: int, times: Trends, points: dict[str, Trend]
    ) -> None:
        found = self._connection.execute("SELECT id, name FROM series WHERE kind = ? AND tree = ?", (POOL, tree))
        keys.update((series, name) for series, name in found if name in wanted)
        # What was read before a damaged chunk counts once.
        points.update({name: times.begin() for name in keys.values()})
        for chunk in self._chunks.values():
            if chunk.end <= times.since or chunk.begin >= times.until:
                continue
            for series, name in keys.items():
                query = "SELECT data FROM points WHERE chunk = ? AND series = ?"
                for (data,) in self._connection.execute(query, (chunk.id, series)):
                    values = unpack(data, POOL, chunk)[column]
                    for at, interval_s, value in zip(chunk.ends, chunk.intervals, values, strict=True):
                        if times.since < at <= times.until:
                            points[name].add(at, interval_s, value)

    def sum_up(self, since: float, until: float, tree: str | None, top: int) -> Summary:
        """Totals of pools and of each tree's ``top`` operations, from the points that end in (since, until]."""
        ticks = [tick for tick in self._ticks if since < tick.at <= until]
        covered_s = math.fsum(tick.interval_s for tick in ticks)
        without_series = max((tick.left_out for tick in ticks), default=0)
        for chunk in self._chunks.values():
            if not chunk.is_moving:
                if chunk.end > since and chunk.begin < until:
                    without_series = max(without_series, chunk.left_out)
                times = zip(chunk.ends, chunk.intervals, strict=True)
                covered_s += math.fsum(interval for end, interval in times if since < end <= until)
        sums = {key: each for key, each in self._sum_by_key(since, until).items() if tree in (None, key.tree)}
        return Summary(*top_operations(sums, top), covered_s, without_series)

    def sum_up_each(self, keys: Collection[Key], times: Iterable[tuple[float, float]]) -> list[dict[Key, Sums]]:
        """Totals of some series in each of some times."""
        return [self._sum_by_key(since, until, keys) for since, until in times] if keys else []

    def _sum_by_key(self, since: float, until: float, only: Collection[Key] | None = None) -> dict[Key, Sums]:
        """Totals of pools and operations, or of ``only`` some of them."""
        names = {
            series: key
            for series, key in self._names.items()
            if key.kind in (POOL, OPERATION) and (only is None or key in only)
        }
        sums = self._read(lambda: self._sum_stored(since, until, names, only)) or {}
        ticks = [tick for tick in self._ticks if since < tick.at <= until]
        intervals = array("d", (tick.interval_s for tick in ticks))
        for kind in (POOL, OPERATION):
            values = [values_of(tick, kind) for tick in ticks]
            for series, rows in places(ticks, kind).items():
                if only is None or series in names:
                    part = sum_columns(kind, intervals, gather(values, kind, rows))
                    sums[series] = sums.get(series, Sums()).plus(part)
        by_key: dict[Key, Sums] = {}
        for series, each in sums.items():
            key = names.get(series)
            if key is not None and each.points:
                by_key[key] = by_key.get(key, Sums()).plus(each)
        return by_key

    def _sum_stored(
        self, since: float, until: float, names: dict[int, Key], only: Collection[Key] | None
    ) -> dict[int, Sums]:
        db = self._connection
        chosen = ""
        if only is not None:
            for key in only:
                found = db.execute("SELECT id FROM series WHERE kind = ? AND tree = ? AND name = ?", key)
                names.update((series, key) for (series,) in found)
            chosen = f" AND series IN ({','.join(map(str, names))})"
        sums: dict[int, Sums] = {}
        for series, *values in db.execute(f"{_SELECT_SUMS}{chosen} GROUP BY series", (since, until, POOL, OPERATION)):
            sums[series] = Sums(*values)
        for chunk in self._chunks.values():
            is_inside = since < chunk.ends[0] and chunk.end <= until
            if is_inside or chunk.end <= since or chunk.ends[0] > until:
                continue
            a, b = find_range(chunk.ends, since, until)
            query = f"SELECT series, kind, data FROM points WHERE chunk = ? AND kind IN (?, ?){chosen}"  # noqa: S608 - numbers
            merged = math.prod(GROUPS[: chunk.tier])
            for series, kind, data in db.execute(query, (chunk.id, POOL, OPERATION)):
                columns = [each[a:b] for each in unpack(data, kind, chunk)]
                part = sum_columns(kind, chunk.intervals[a:b], columns)
                sums[series] = sums.get(series, Sums()).plus(part._replace(points=part.points * merged))
        # Very many operations may have ended before that time: theirs are not gone through.
        unknown = [series for series in sums if series not in names]
        for first in range(0, len(unknown), LOOKED_UP_AT_ONCE):
            some = unknown[first : first + LOOKED_UP_AT_ONCE]
            query = f"SELECT id, kind, tree, name FROM series WHERE id IN ({','.join('?' * len(some))})"  # noqa: S608
            names.update((series, Key(kind, tree, name)) for series, kind, tree, name in db.execute(query, some))
        return sums
