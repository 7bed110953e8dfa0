"""The store's log in a PostgreSQL database: its tables, appends, reads and truncation.

``cpumond_log``: the entries; a trigger refuses to change one. ``cpumond_log_subjects``: numbers of entries by subject.
``cpumond_log_cut``: one row with the highest dropped number, so that no number is given twice. The leader, not the
database, gives the numbers, so that a repeated write adds nothing twice."""

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
# OFFSET 0 prevents a scan from the lowest numbers: the first recent entry may be far from them.
LOWEST: Final = "SELECT min(number) FROM (SELECT number FROM cpumond_log WHERE at >= %b OFFSET 0) AS recent"
FIRST: Final = "SELECT min(number) FROM cpumond_log_subjects WHERE subject = %b"
LIST_ALL: Final = "SELECT number FROM cpumond_log WHERE number < %b AND number >= %b ORDER BY number DESC LIMIT %b"
LIST_ABOUT: Final = (
    "SELECT number FROM cpumond_log_subjects WHERE subject = %b AND number < %b AND number >= %b "
    "ORDER BY number DESC LIMIT %b"
)
CHOOSE: Final = "SELECT number FROM cpumond_log_subjects WHERE subject = %b AND number = ANY(%b::bigint[])"
READ: Final = (
    "SELECT number, at, subjects, value FROM cpumond_log WHERE number = ANY(%b::bigint[]) ORDER BY number DESC"
)


def create_log(connection: Connection) -> None:
    """Migrate to schema 2, which has a log. If the records of schema 1 were put back, the tables exist already."""
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
    """Return the place of the next entry. Raises psycopg.Error."""
    row = session.get("SELECT max(number) FROM cpumond_log_cut")
    cut = row[0] or 0 if row else 0
    last = session.get(LAST)
    if last is None:
        return LogEnd(cut)
    number, position, subjects, value = last
    return LogEnd(max(number, cut), position + measure(subjects, value))


def list_columns(rows: Sequence[Row]) -> list[list[object]]:
    """Return the parameters for ADD."""
    names = [(name.encode(), row.number) for row in rows for name in row.subjects]
    columns: list[list[object]] = [[row[column] for row in rows] for column in range(5)]
    return [*columns, [name for name, _ in names], [number for _, number in names]]


def list_cut(session: Session, end: LogEnd, until: float, max_bytes: int) -> list[list[object]]:
    """Return the parameters for CUT. Raises psycopg.Error."""
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


class PostgresLogReader:
    """Queries for ``search``, sent through ``session``. Raises psycopg.Error."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def find_lowest(self, since: float) -> int | None:
        return self._get(LOWEST, since)

    def find_first(self, subject: str) -> int | None:
        return self._get(FIRST, subject.encode())

    def _get(self, query: str, value: object) -> int | None:
        row = self._session.get(query, (value,))
        return row[0] if row else None

    def list_numbers(self, subject: str | None, below: int, lowest: int, limit: int) -> list[int]:
        if subject is None:
            return self._list(LIST_ALL, below, lowest, limit)
        return self._list(LIST_ABOUT, subject.encode(), below, lowest, limit)

    def choose_about(self, subject: str, numbers: Sequence[int]) -> list[int]:
        return self._list(CHOOSE, subject.encode(), list(numbers))

    def _list(self, query: str, *values: object) -> list[int]:
        return [number for (number,) in self._session.connection.execute(query, values, binary=True)]

    def read_entries(self, numbers: Sequence[int]) -> list[tuple[int, Entry]]:
        rows = self._session.connection.execute(READ, (list(numbers),), binary=True)
        return [(number, Entry(at, list_subjects(listed), value)) for number, at, listed, value in rows]
