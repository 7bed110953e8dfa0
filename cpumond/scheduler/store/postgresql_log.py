"""The store's log in a PostgreSQL database: its tables, and what is added, read and dropped.

``cpumond_log``: the entries; a trigger refuses to change one. ``cpumond_log_subjects``: their numbers by subject.
``cpumond_log_cut``: one row, the highest number that was dropped, so that none is given twice. Numbers are given by the
leader, not by the database: a write that is repeated adds nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cpumond.scheduler.store import Entry
from cpumond.scheduler.store.entries import CUT_ENTRIES, LogEnd, Place, Row, choose_cut, list_subjects, measure
from cpumond.scheduler.store.postgresql_session import Connection, Session

ADD: Final = """
added AS (
    INSERT INTO cpumond_log (number, position, at, subjects, value)
    SELECT new.number, new.position, new.at, new.subjects, new.value
    FROM fence, unnest(%b::bigint[], %b::bigint[], %b::float8[], %b::bytea[], %b::bytea[])
        AS new (number, position, at, subjects, value)
    ON CONFLICT DO NOTHING
),
named AS (
    INSERT INTO cpumond_log_subjects (subject, number)
    SELECT new.subject, new.number FROM fence, unnest(%b::bytea[], %b::bigint[]) AS new (subject, number)
    ON CONFLICT DO NOTHING
)
"""
CUT: Final = """
gone AS (
    DELETE FROM cpumond_log AS old USING fence WHERE old.number = ANY(%b::bigint[]) RETURNING old.number
),
unnamed AS (
    DELETE FROM cpumond_log_subjects AS old USING fence, unnest(%b::bytea[], %b::bigint[]) AS gone (subject, number)
    WHERE old.subject = gone.subject AND old.number = gone.number
),
noted AS (
    UPDATE cpumond_log_cut AS cut SET number = greatest(cut.number, (SELECT max(number) FROM gone)) FROM fence
)
SELECT (SELECT count(*) FROM gone) FROM fence
"""
PLACES: Final = "SELECT number, position, at, subjects FROM cpumond_log"
LAST: Final = "SELECT number, position, length(subjects), length(value) FROM cpumond_log ORDER BY number DESC LIMIT 1"
# OFFSET 0: not by way of the lowest numbers, of which the first that is new enough may be far away.
LOWEST: Final = "SELECT min(number) FROM (SELECT number FROM cpumond_log WHERE at >= %b OFFSET 0) AS recent"
READ: Final = (
    "SELECT number, at, subjects, value FROM cpumond_log "
    "WHERE number < %(before)b AND number >= %(lowest)b AND at >= %(since)b ORDER BY number DESC LIMIT %(limit)b"
)
# Each subject in turn goes down to the highest number that all others may have: as many steps as the rarest has,
# whatever the planner knows of them.
FIND: Final = """
WITH RECURSIVE step (highest, agreed, turn, hit) AS (
    SELECT %(before)b::bigint - 1, 0, 0, NULL::bigint
    UNION ALL
    SELECT
        CASE WHEN now.agreed = cardinality(%(names)b::bytea[]) THEN now.number - 1 ELSE now.number END,
        CASE WHEN now.agreed = cardinality(%(names)b::bytea[]) THEN 0 ELSE now.agreed END,
        (step.turn + 1) %% cardinality(%(names)b::bytea[]),
        CASE WHEN now.agreed = cardinality(%(names)b::bytea[]) THEN now.number END
    FROM step CROSS JOIN LATERAL (
        SELECT found.number, CASE WHEN found.number = step.highest THEN step.agreed + 1 ELSE 1 END AS agreed
        FROM (
            SELECT max(number) AS number FROM cpumond_log_subjects
            WHERE subject = (%(names)b::bytea[])[step.turn + 1] AND number <= step.highest
        ) AS found
    ) AS now
    WHERE now.number >= %(lowest)b
)
SELECT entry.number, entry.at, entry.subjects, entry.value
FROM step CROSS JOIN LATERAL (SELECT * FROM cpumond_log WHERE number = step.hit OFFSET 0) AS entry
WHERE entry.at >= %(since)b LIMIT %(limit)b
"""
NO_NUMBER: Final = 2**62
"""Above all numbers."""


def create_log(connection: Connection) -> None:
    """To schema 2, which has a log; where the records of schema 1 were put back, it has the tables already."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS cpumond_log (number bigint PRIMARY KEY, position bigint NOT NULL, "
        "at float8 NOT NULL, subjects bytea NOT NULL, value bytea NOT NULL)"
    )
    connection.execute("CREATE INDEX IF NOT EXISTS cpumond_log_at ON cpumond_log (at)")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS cpumond_log_subjects (subject bytea NOT NULL, number bigint NOT NULL, "
        "PRIMARY KEY (subject, number))"
    )
    connection.execute("CREATE TABLE IF NOT EXISTS cpumond_log_cut (number bigint NOT NULL)")
    connection.execute("INSERT INTO cpumond_log_cut SELECT 0 WHERE NOT EXISTS (SELECT FROM cpumond_log_cut)")
    connection.execute(
        "CREATE OR REPLACE FUNCTION cpumond_refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN RAISE EXCEPTION 'entries of the log are not changed'; END$$"
    )
    connection.execute(
        "CREATE OR REPLACE TRIGGER cpumond_log_is_only_added_to BEFORE UPDATE ON cpumond_log "
        "FOR EACH ROW EXECUTE FUNCTION cpumond_refuse_change()"
    )


def find_end(session: Session) -> LogEnd:
    """Where the next entry goes. Raises psycopg.Error."""
    row = session.get("SELECT max(number) FROM cpumond_log_cut")
    cut = row[0] or 0 if row else 0
    last = session.get(LAST)
    if last is None:
        return LogEnd(cut)
    number, position, subjects, value = last
    return LogEnd(max(number, cut), position + measure(subjects, value))


def list_columns(rows: Sequence[Row]) -> list[list[object]]:
    """The parameters of ADD."""
    names = [(name.encode(), row.number) for row in rows for name in row.subjects]
    columns: list[list[object]] = [[row[column] for row in rows] for column in range(5)]
    return [*columns, [name for name, _ in names], [number for _, number in names]]


def list_cut(session: Session, end: LogEnd, until: float, max_bytes: int) -> list[list[object]]:
    """The parameters of CUT. Raises psycopg.Error."""
    found: dict[int, tuple[Place, bytes]] = {}
    for query, parameters in (
        (f"{PLACES} WHERE at < %b ORDER BY at LIMIT %b", (until, CUT_ENTRIES)),
        (f"{PLACES} ORDER BY number LIMIT %b", (CUT_ENTRIES,)),
    ):
        for *place, listed in session.connection.execute(query, parameters, binary=True):
            found[place[0]] = Place(*place), listed
    numbers = choose_cut((place for place, _ in found.values()), end, until, max_bytes)
    names = [(name.encode(), number) for number in numbers for name in list_subjects(found[number][1])]
    return [list(numbers), [name for name, _ in names], [number for _, number in names]]


def read_entries(
    session: Session, subjects: Sequence[str], before: int | None, since: float, limit: int
) -> list[tuple[int, Entry]]:
    """See ``Store.read_log``. Raises psycopg.Error."""
    lowest = 0
    if since > 0.0:
        row = session.get(LOWEST, (since,))
        if row is None or row[0] is None:
            return []
        lowest = row[0]
    place = {
        "before": NO_NUMBER if before is None else min(before, NO_NUMBER),
        "lowest": lowest,
        "since": since,
        "limit": min(max(limit, 0), NO_NUMBER),
        "names": [subject.encode() for subject in dict.fromkeys(subjects)],
    }
    found = session.connection.execute(FIND if subjects else READ, place, binary=True)
    return [(number, Entry(at, list_subjects(listed), value)) for number, at, listed, value in found]
