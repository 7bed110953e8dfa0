"""Migration of files of 0.1 and 0.2, in which points became coarser with age, in chunks with the sums of each series.

Their content is summed up by day, so that reports and savings continue; a chunk, at most five hours long, counts for
the UTC day in which it ends. The points are dropped, and so are the newest five minutes, which only the journal has."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from typing import Final

from cpumond.scheduler.elements import CONTROL, OTHERS
from cpumond.scheduler.history.chunks import DamageError, decode_times
from cpumond.scheduler.history.model import ARM, COVERED, DAY_S, OPERATION, POOL

EARLIER_SCHEMA: Final = 2

_TABLES: Final = ("series", "chunks", "points", "journal")

_SUMS: Final = """CREATE TEMP TABLE sums AS
    SELECT CAST(chunks.last / :day_s AS INTEGER) AS day, series.kind, series.tree, series.name, SUM(used) AS used,
        SUM(reclaimed) AS reclaimed, SUM(ordered) AS ordered, SUM(throttled) AS throttled, SUM(late) AS late,
        SUM(limits) AS limits, SUM(count) AS count, MAX(peak) AS peak
    FROM old_points AS points JOIN old_chunks AS chunks ON chunks.id = points.chunk
    JOIN old_series AS series ON series.id = points.series
    WHERE series.kind = :pool OR (series.kind = :operation AND series.name LIKE '<%') GROUP BY 1, 2, 3, 4"""

_POOLS: Final = """INSERT INTO days (day, kind, tree, name, used, reclaimed, ordered, throttled, late, "limit", lost,
        extra_used, extra_ordered, extra_jobs, seconds, points, peak)
    SELECT its.day, its.kind, its.tree, its.name, its.used, its.reclaimed, its.ordered, its.throttled, its.late,
        its.limits, IFNULL(extra.late, 0), IFNULL(extra.used, 0), IFNULL(extra.ordered, 0), IFNULL(extra.throttled, 0),
        0, its.count, its.peak
    FROM sums AS its LEFT JOIN sums AS extra ON extra.day = its.day AND extra.kind = :operation
        AND extra.tree = its.tree AND extra.name = '<extra ' || its.name || '>' WHERE its.kind = :pool"""
"""These files have a separate series for a pool's extra jobs (see ``extras``). Its column ``throttled`` is the number
of jobs that began, ``late`` the core-seconds that the pool lost by preemption."""

_ARM: Final = """INSERT INTO days
    SELECT day, :arm, tree, :name, SUM(used), SUM(reclaimed), SUM(ordered), SUM(throttled), SUM(late), 0, 0, 0, 0, 0, 0,
        SUM(count), 0
    FROM sums WHERE kind = :operation AND (name = '<' || :name || '>' OR name LIKE '<' || :name || ' %')
    GROUP BY day, tree"""

_COVERED: Final = """INSERT INTO days
    SELECT CAST(last / :day_s AS INTEGER), :covered, '', '', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, SUM(length_s(times)), 0, 0
    FROM old_chunks WHERE NOT is_moving GROUP BY 1"""


def sum_up_earlier(db: sqlite3.Connection, create_tables: Callable[[], None]) -> int:
    """Within a transaction, replace the tables of an earlier version with totals of days. Return the number of days."""
    for name in _TABLES:
        db.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
    create_tables()
    numbers = {"pool": POOL, "operation": OPERATION, "arm": ARM, "covered": COVERED, "day_s": DAY_S}
    db.execute(_SUMS, numbers)
    db.execute(_POOLS, numbers)
    for arm in (CONTROL, OTHERS):
        db.execute(_ARM, {**numbers, "name": arm})
    db.create_function("length_s", 1, _length_s, deterministic=True)
    db.execute(_COVERED, numbers)
    for table in ("sums", *(f"old_{name}" for name in _TABLES)):
        db.execute(f"DROP TABLE {table}")
    return int(db.execute("SELECT COUNT(DISTINCT day) FROM days").fetchone()[0])


def _length_s(times: bytes) -> float:
    """Return the length, in seconds, of the time that a chunk's points cover; 0 if the chunk is damaged."""
    try:
        return math.fsum(decode_times(times)[1])
    except DamageError:
        return 0.0
