"""The history in its own SQLite file: points of a day, totals of each UTC day. Its loss harms nothing else.

The newest ticks are in memory; each is also a row of the journal. CHUNK_TICKS of them become a *chunk*: one compressed
row for each series, which replaces the journal's rows in the same transaction. What a tick adds to its day is added to
the totals by the write that puts the tick into the journal: nothing is counted twice, and the next write adds what a
failed one did not. Points are dropped after POINTS_S, totals after ``length_s``. If the file is above ``max_size``,
first the oldest points are dropped, then the oldest days.

Used by one thread at a time, never by that of the event loop. While writes fail, the newest points and totals stay in
memory. A chunk that cannot be read is dropped."""

from __future__ import annotations

import math
import sqlite3
import time
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from cpumond.scheduler.history.chunks import (
    Chunk,
    DamageError,
    decode_tick,
    decode_times,
    encode_tick,
    find_range,
    pack,
    pack_values,
    unpack,
    values_of,
)
from cpumond.scheduler.history.file import HistoryFile, log
from cpumond.scheduler.history.model import (
    COLUMNS,
    COVERED_KEY,
    DAY_S,
    HAS_RATES,
    KINDS,
    NODE,
    OPERATION,
    POINTS_S,
    POOL,
    WIDTHS,
    Amounts,
    HistoryView,
    Key,
    NodeMap,
    PeriodTotals,
    Points,
    Tick,
    add_up,
    day_of,
)
from cpumond.scheduler.history.series import (
    combine,
    gather,
    make_days,
    make_node_map,
    make_view,
    mean_of_parts,
    places,
    select,
    sum_columns,
    top_operations,
)
from cpumond.scheduler.store.sqlite import transaction

CHUNK_TICKS: Final = 30
PAUSE_SERIES: Final = 100
PAUSE_S: Final = 0.001
"""Pause of the thread after each PAUSE_SERIES series: the event loop's thread needs its turns."""
ROW_BYTES: Final = 100
"""Approximate bytes of a row without its points."""
MEMORY_TICKS: Final = 120
MEMORY_DAYS: Final = 2
"""Limits of what is kept in memory while writes fail."""

_INSERT_POINTS: Final = "INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT_SUMS: Final = (
    "SELECT kind, tree, name, SUM(used), SUM(reclaimed), SUM(ordered), SUM(throttled), SUM(late), SUM(limits), "
    "SUM(count), MAX(peak) FROM points WHERE chunk IN (SELECT id FROM chunks WHERE first > ? AND last <= ?) "
    "AND kind IN (?, ?) GROUP BY kind, tree, name"
)
_AMOUNTS: Final = ", ".join(f'"{name}"' for name in Amounts._fields)
_ADD_TO_DAY: Final = (
    f"INSERT INTO days VALUES ({', '.join('?' * (4 + len(Amounts._fields)))}) "  # noqa: S608 - names of columns
    "ON CONFLICT (day, kind, tree, name) DO UPDATE SET "
    + ", ".join(f'"{name}" = "{name}" + excluded."{name}"' for name in Amounts._fields[:-1])
    + ", peak = MAX(peak, excluded.peak)"
)
_SELECT_DAY: Final = f"SELECT {_AMOUNTS} FROM days WHERE day = ? AND kind = ? AND tree = ? AND name = ?"  # noqa: S608
_SELECT_DAYS: Final = (
    "SELECT kind, tree, name, "  # noqa: S608 - names of columns
    + ", ".join(f'SUM("{name}")' for name in Amounts._fields[:-1])
    + ", MAX(peak) FROM days WHERE day BETWEEN ? AND ? GROUP BY kind, tree, name"
)

_Row = tuple[int, int, str, str, float, float, float, float, float, float, float, float, bytes]


class HistoryStore:
    """The history of one scheduler. ``path`` None keeps it in memory only.

    ``length_s``: the age up to which totals of days are kept; also that of points, which is at most POINTS_S.
    ``period_s``: the time between two ticks. ``max_size``: bytes of the file. Stored points after ``now`` are dropped:
    they mean that the clock was set back, and times must not go back within a series."""

    def __init__(self, path: str | None, length_s: float, period_s: float, max_size: int, now: float) -> None:
        self.length_s, self.period_s = length_s, period_s
        self.bytes = 0
        self.since: float | None = None
        """The beginning of the oldest stored interval or day."""
        self._now = now
        self._retry_at = 0.0
        """After a failure no chunk is made before this time."""
        self._ticks: list[Tick] = []
        self._days: dict[int, dict[Key, Amounts]] = {}
        """The part of the totals of days that is not yet in the file."""
        self._chunks: dict[int, Chunk] = {}
        self.file = HistoryFile(path, max_size, self)
        self.file.open()
        if self.file.is_open:
            self.file.guard("write", lambda: self._drop_future(now))
        self.file.guard("read", self._measure)

    def close(self) -> None:
        """Write data that is not in the journal yet, and close the file. A second call does nothing."""
        if self.file.is_open and self.file.is_failing and self._ticks:
            self.file.guard("write", self._write_all)
        self.file.close()

    # ---- callbacks of the file

    def load(self, db: sqlite3.Connection) -> None:
        """Load chunks and journal; newer ticks that are in memory are appended to those of the file."""
        chunks: dict[int, Chunk] = {}
        for chunk_id, left_out, times in db.execute("SELECT id, left_out, times FROM chunks"):
            chunks[chunk_id] = Chunk(chunk_id, *decode_times(times), left_out)
        ticks = [decode_tick(data) for (data,) in db.execute("SELECT data FROM journal ORDER BY at")]
        last = max((*(tick.at for tick in ticks), *(chunk.end for chunk in chunks.values())), default=0.0)
        ticks += [tick for tick in self._ticks if tick.at > last]
        self._chunks, self._ticks = chunks, ticks
        if self.file.bytes > self.file.max_size:
            self._make_room(0)
            self.file.give_back()
        self._measure()

    def drop_damaged(self, error: Exception) -> bool:
        chunk = error.chunk if isinstance(error, DamageError) else None
        if chunk is None or chunk.id not in self._chunks:
            return False
        self._drop(chunk)
        log.warning("history_part_dropped", path=self.file.path, since=chunk.begin, until=chunk.end)
        return True

    # ---- adding

    def add(self, tick: Tick) -> None:
        """Add the next tick; failures of the disk or the file raise nothing."""
        errors = self.file.errors
        self._now = tick.at
        self._ticks.append(tick)
        add_up(tick.totals.items(), self._days.setdefault(day_of(tick.at), {}))
        tick.totals = {}
        is_due = len(self._ticks) >= CHUNK_TICKS and tick.at >= self._retry_at
        retry_at = tick.at + CHUNK_TICKS * self.period_s
        if is_due and not self.file.is_open and self.file.path is not None:
            self._retry_at = retry_at
            self.file.open()
        if self.file.is_open:
            self.file.guard("write", self.file.stay_in_place)
        if self.file.is_open:
            self.file.guard("write", lambda: self._write_journal(tick))
            if is_due and not self.file.guard("write", self._flush):
                self._retry_at = retry_at
            self.file.guard("write", self._expire)
            if self.file.errors == errors:
                self.file.note_success()
        for each in self._ticks:
            pack_values(each)
        self._limit_memory()
        self.file.guard("read", self._measure)

    def _limit_memory(self) -> None:
        """Drop the oldest ticks in memory if the disk has accepted none for a long time."""
        for day in sorted(self._days)[:-MEMORY_DAYS]:
            del self._days[day]
        del self._ticks[:-MEMORY_TICKS]

    def _write_journal(self, tick: Tick) -> None:
        data = encode_tick(tick)
        self._make_room(len(data) + ROW_BYTES * sum(map(len, self._days.values())))
        with transaction(self.file.db):
            self.file.db.execute("INSERT INTO journal VALUES (?, ?)", (tick.at, data))
            self._add_to_days()
        self._days = {}

    def _write_all(self) -> None:
        with transaction(self.file.db):
            self._add_to_days()
        self._days = {}
        self._flush()

    def _add_to_days(self) -> None:
        rows = [(day, *key, *amounts) for day, totals in self._days.items() for key, amounts in totals.items()]
        self.file.db.executemany(_ADD_TO_DAY, rows)

    def _flush(self) -> None:
        """Make a chunk of the oldest ticks in memory."""
        db = self.file.db
        ticks = self._ticks[:CHUNK_TICKS]
        ends, intervals = _times_of(ticks)
        chunk = Chunk(max(self._chunks, default=0) + 1, ends, intervals, max(tick.left_out for tick in ticks))
        rows = sorted(self._make_rows(chunk, ticks))
        self._make_room(sum(len(row[-1]) + ROW_BYTES for row in rows))
        with transaction(db):
            row = (chunk.id, ends[0], ends[-1], chunk.left_out, (ends + intervals).tobytes())
            db.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?)", row)
            db.executemany(_INSERT_POINTS, rows)
            db.execute("DELETE FROM journal WHERE at <= ?", (chunk.end,))
        self._chunks[chunk.id] = chunk
        del self._ticks[: len(ticks)]

    def _make_rows(self, chunk: Chunk, ticks: list[Tick]) -> Iterator[_Row]:
        for kind in range(len(KINDS)):
            values = [values_of(tick, kind) for tick in ticks]
            for number, ((tree, name), rows) in enumerate(places(ticks, kind).items(), 1):
                if number % PAUSE_SERIES == 0:
                    time.sleep(PAUSE_S)
                columns = gather(values, kind, rows)
                sums = sum_columns(kind, chunk.intervals, columns) if HAS_RATES[kind] else Amounts()
                yield (chunk.id, kind, name, tree, *sums[:6], sums.peak, sums.points, pack(columns))

    # ---- dropping

    def _expire(self) -> None:
        old = [chunk for chunk in self._chunks.values() if chunk.end <= self._now - min(self.length_s, POINTS_S)]
        for chunk in old:
            self._drop(chunk)
        if self.since is not None and self.since < self._now - self.length_s - DAY_S:
            self.file.db.execute("DELETE FROM days WHERE day < ?", (day_of(self._now - self.length_s),))

    def _drop(self, chunk: Chunk) -> None:
        with transaction(self.file.db):
            self.file.db.execute("DELETE FROM points WHERE chunk = ?", (chunk.id,))
            self.file.db.execute("DELETE FROM chunks WHERE id = ?", (chunk.id,))
        del self._chunks[chunk.id]

    def _drop_oldest(self) -> bool:
        """Drop the oldest chunk; without chunks, the oldest day except today. Return False if nothing is left."""
        if self._chunks:
            self._drop(min(self._chunks.values(), key=lambda each: (each.end, each.id)))
            return True
        query = "DELETE FROM days WHERE day = (SELECT MIN(day) FROM days) AND day < ?"
        return self.file.db.execute(query, (day_of(self._now),)).rowcount > 0

    def _make_room(self, wanted_bytes: int) -> None:
        self.file.make_room(wanted_bytes, self._drop_oldest)

    def _drop_future(self, now: float) -> None:
        chunks = [chunk for chunk in self._chunks.values() if chunk.end > now]
        ticks = [tick for tick in self._ticks if tick.at > now]
        for chunk in chunks:
            self._drop(chunk)
        with transaction(self.file.db):
            self.file.db.execute("DELETE FROM journal WHERE at > ?", (now,))
            days = self.file.db.execute("DELETE FROM days WHERE day > ?", (day_of(now),)).rowcount
        self._ticks = [tick for tick in self._ticks if tick.at <= now]
        if chunks or ticks or days:
            log.warning("history_of_the_future_dropped", path=self.file.path, chunks=len(chunks), ticks=len(ticks))

    def _measure(self) -> None:
        if self.file.is_open:
            self.bytes = self.file.bytes
        self.since, first_day = self._first_point(), self._first_day()
        if first_day is not None and (self.since is None or (first_day + 1) * DAY_S < self.since):
            self.since = first_day * DAY_S

    def _first_point(self) -> float | None:
        begins = [chunk.begin for chunk in self._chunks.values()]
        return min((*begins, *(tick.at - tick.interval_s for tick in self._ticks[:1])), default=None)

    # ---- reading

    def read(self, key: Key, since: float, until: float, max_points: int) -> HistoryView:
        """Return the points of a series that end in (since, until]; ``key.tree`` "" is any tree. If ``since`` is before
        the oldest kept points, a pool has one point per UTC day."""
        if key.kind == POOL and since < self._now - POINTS_S:
            days = self._find_days([key, COVERED_KEY], since, until)
            known = {day: (its.get(key, Amounts()), its[COVERED_KEY].seconds) for day, its in days.items()}
            is_known = any(key in its for its in days.values())
            return make_view(key, make_days(key, known if is_known else {}, until), since, until, max_points, DAY_S)
        points = self._read_points(key.kind, key.tree, [key.name], since, until)[key.name]
        return make_view(key, points, since, until, max_points, self.period_s)

    def _read_points(
        self, kind: int, tree: str, names: Collection[str], since: float, until: float
    ) -> dict[str, Points]:
        """Return name -> points, for series with these names; ``tree`` "" is any tree."""
        parts = self.file.read(lambda: self._read_stored(kind, tree, names, since, until)) or []
        ticks = [tick for tick in self._ticks if since < tick.at <= until]
        found = places(ticks, kind, tree, names)
        times, values = _times_of(ticks), [values_of(tick, kind) for tick in ticks] if found else []
        parts += [(name, Points(*times, gather(values, kind, rows))) for (_, name), rows in found.items()]
        return {
            name: combine((select(part, since, until) for its, part in parts if its == name), kind) for name in names
        }

    def _read_stored(
        self, kind: int, tree: str, names: Iterable[str], since: float, until: float
    ) -> list[tuple[str, Points]]:
        parts: list[tuple[str, Points]] = []
        query = "SELECT data FROM points WHERE chunk = ? AND kind = ? AND name = ? AND ? IN ('', tree)"
        for chunk in self._chunks.values():
            if chunk.end > since and chunk.ends[0] <= until:
                for name in names:
                    for (data,) in self.file.db.execute(query, (chunk.id, kind, name, tree)):
                        parts.append((name, Points(chunk.ends, chunk.intervals, unpack(data, kind, chunk))))
        return parts

    def read_trends(
        self, tree: str, pools: Collection[str], since_s: float, until: float, count: int
    ) -> tuple[float, dict[str, list[float | None]]]:
        """Return the trend of the CPU limits of a tree's pools, in cores: the beginning of the time, and pool -> means
        of its ``count`` parts. The time begins ``since_s`` before ``until``, or with the first point if that is later.
        Pools without points are left out."""
        since = max(until - since_s, self._first_point() or until)
        points = self._read_points(POOL, tree, pools, since, until) if since < until else {}
        column = COLUMNS["pool"].index("limit_cores")
        return since, {
            name: mean_of_parts(each, column, since, until, count) for name, each in points.items() if len(each)
        }

    def read_node_map(self, nodes: Collection[str], measure: str, since: float, until: float, count: int) -> NodeMap:
        """Return a measure of nodes at the ends of ``count`` equal parts of the known part of (since, until]."""
        until = min(
            until,
            max((*(chunk.end for chunk in self._chunks.values()), *(tick.at for tick in self._ticks)), default=0.0),
        )
        since = max(since, self._first_point() or until)
        step_s = (until - since) / count
        moments = [until - step_s * number for number in reversed(range(count))] if step_s > 0.0 else []
        found = self.file.read(lambda: self._read_stored_moments(moments)) or {}
        for tick in self._ticks:
            if inside := [moment for moment in moments if tick.at - tick.interval_s < moment <= tick.at]:
                values, width = values_of(tick, NODE), WIDTHS[NODE]
                places = zip(tick.names[NODE], range(0, len(values), width), strict=True)
                rows = {name: values[at : at + width] for (_, name), at in places}
                found.update(dict.fromkeys(inside, rows))
        return make_node_map(nodes, measure, [(moment, found.get(moment, {})) for moment in moments], step_s)

    def _read_stored_moments(self, moments: Sequence[float]) -> dict[float, dict[str, array[float]]]:
        found: dict[float, dict[str, array[float]]] = {}
        for chunk in self._chunks.values():
            points = {moment: bisect_left(chunk.ends, moment) for moment in moments if moment <= chunk.end}
            inside = {at: its for at, its in points.items() if chunk.ends[its] - chunk.intervals[its] < at}
            if not inside:
                continue
            rows = self.file.db.execute("SELECT name, data FROM points WHERE chunk = ? AND kind = ?", (chunk.id, NODE))
            for number, (name, data) in enumerate(rows, 1):
                if number % PAUSE_SERIES == 0:
                    time.sleep(PAUSE_S)
                columns = unpack(data, NODE, chunk)
                for moment, point in inside.items():
                    found.setdefault(moment, {})[name] = array("f", [column[point] for column in columns])
        return found

    # ---- summing up

    def sum_points(self, since: float, until: float, tree: str | None, top: int) -> PeriodTotals:
        """Return totals of pools and of ``top`` operations of each tree, from the points that end in (since, until]."""
        ticks = [tick for tick in self._ticks if since < tick.at <= until]
        covered_s = math.fsum(tick.interval_s for tick in ticks)
        without_series = max((tick.left_out for tick in ticks), default=0)
        totals = self.file.read(lambda: self._sum_stored(since, until)) or {}
        for chunk in self._chunks.values():
            if chunk.end > since and chunk.begin < until:
                without_series = max(without_series, chunk.left_out)
            times = zip(chunk.ends, chunk.intervals, strict=True)
            covered_s += math.fsum(interval for end, interval in times if since < end <= until)
        _, intervals = _times_of(ticks)
        for kind in (POOL, OPERATION):
            values = [values_of(tick, kind) for tick in ticks]
            found = places(ticks, kind).items()
            sums = ((Key(kind, *its), sum_columns(kind, intervals, gather(values, kind, rows))) for its, rows in found)
            add_up(sums, totals)
        mine = {key: each for key, each in totals.items() if each.points and tree in (None, key.tree)}
        kept, left_out = top_operations(mine, top)
        return PeriodTotals(kept, covered_s, without_series, left_out)

    def _sum_stored(self, since: float, until: float) -> dict[Key, Amounts]:
        db = self.file.db
        totals: dict[Key, Amounts] = {}
        for kind, tree, name, *six, points, peak in db.execute(_SELECT_SUMS, (since, until, POOL, OPERATION)):
            totals[Key(kind, tree, name)] = Amounts(*six)._replace(points=points, peak=peak)
        for chunk in self._chunks.values():
            is_inside = since < chunk.ends[0] and chunk.end <= until
            if is_inside or chunk.end <= since or chunk.ends[0] > until:
                continue
            a, b = find_range(chunk.ends, since, until)
            query = "SELECT kind, tree, name, data FROM points WHERE chunk = ? AND kind IN (?, ?)"
            for kind, tree, name, data in db.execute(query, (chunk.id, POOL, OPERATION)):
                columns = [each[a:b] for each in unpack(data, kind, chunk)]
                add_up([(Key(kind, tree, name), sum_columns(kind, chunk.intervals[a:b], columns))], totals)
        return totals

    def sum_days(self, since: float, until: float, tree: str | None = None) -> PeriodTotals:
        """Return totals of pools, users and arms, over the UTC days that overlap a time."""
        first, last = int(since // DAY_S), day_of(until)

        def read() -> dict[Key, Amounts]:
            rows = self.file.db.execute(_SELECT_DAYS, (first, last))
            return {Key(*row[:3]): Amounts(*row[3:]) for row in rows}

        totals = self.file.read(read) or {}
        for day, unsaved in self._days.items():
            if first <= day <= last:
                add_up(unsaved.items(), totals)
        covered_s = totals.pop(COVERED_KEY, Amounts()).seconds
        return PeriodTotals({key: each for key, each in totals.items() if tree in (None, key.tree)}, covered_s)

    def read_days(self, keys: Collection[Key], since: float, until: float) -> list[dict[Key, Amounts]]:
        """Return totals of some keys for each known UTC day of a time; keys without amounts are left out."""
        return list(self._find_days([*keys, COVERED_KEY], since, until).values())

    def _find_days(self, keys: Sequence[Key], since: float, until: float) -> dict[int, dict[Key, Amounts]]:
        """Return day -> totals of some keys; COVERED_KEY is in each day."""
        first = self._first_day()
        if first is None:
            return {}
        days = range(max(int(since // DAY_S), first), day_of(until) + 1)
        found = self.file.read(lambda: {day: self._read_day(day, keys) for day in days}) or {}
        for day in days:
            unsaved = self._days.get(day, {})
            add_up(((key, unsaved[key]) for key in keys if key in unsaved), found.setdefault(day, {}))
        return {day: its for day, its in sorted(found.items()) if COVERED_KEY in its}

    def _read_day(self, day: int, keys: Iterable[Key]) -> dict[Key, Amounts]:
        rows = ((key, self.file.db.execute(_SELECT_DAY, (day, *key)).fetchone()) for key in keys)
        return {key: Amounts(*row) for key, row in rows if row is not None}

    def _first_day(self) -> int | None:
        stored = None
        if self.file.is_open:
            stored = self.file.read(lambda: self.file.db.execute("SELECT MIN(day) FROM days").fetchone()[0])
        return min((*self._days, *([] if stored is None else [stored])), default=None)


def _times_of(ticks: Sequence[Tick]) -> tuple[array[float], array[float]]:
    return array("d", (tick.at for tick in ticks)), array("d", (tick.interval_s for tick in ticks))
