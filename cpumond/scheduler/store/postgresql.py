"""The store in a PostgreSQL database, and the arbiter that decides which of several schedulers on it leads.

Tables, in the first schema of the search path:
- ``cpumond_schema``: the version;
- ``cpumond_lease``: one row: term, leader, end of the lease by the database's clock; the same in every version;
- ``cpumond_records``, and ``cpumond_records_v<N>``, a copy from before a migration of schema N;
- the log (``postgresql_log``).

The arbiter's session holds the advisory lock LEAD while it leads; the lock is released with the session. The leader's
stores share the lock WRITE, by which their sessions are found. A write is one statement that reads the term while it
locks the lease's row. A take-over waits for the writes in progress; writes that wait for a take-over write nothing.

A write that lost its connection may have been made or not. Its session is ended at the server and the write repeated,
which changes nothing if it was made. If the outcome is still unknown after OUTCOME_S, the lead is lost: FencedError."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NoReturn

import psycopg
from psycopg.rows import TupleRow

from cpumond.scheduler.store import Change, Entry, FencedError, Lease, StoreError
from cpumond.scheduler.store.entries import LogEnd, make_rows
from cpumond.scheduler.store.log_search import search
from cpumond.scheduler.store.postgresql_log import (
    ADD,
    CUT,
    PostgresLogReader,
    create_log,
    find_end,
    list_columns,
    list_cut,
)
from cpumond.scheduler.store.postgresql_session import Connection, Session, connect, explain, is_refusal, name_database

ARBITER_TIMEOUT_S: Final = 3.0
"""Time after which a call of the arbiter is aborted; connecting has a separate time limit."""
STORE_TIMEOUT_S: Final = 10.0
"""Time after which a single statement of the store is aborted."""
OUTCOME_S: Final = 5.0
"""Time for which a write is repeated if it lost its connection."""
PAUSE_S: Final = 0.1
ALONE_LEASE_S: Final = 3600.0
"""Longest time for which a copy that hangs keeps schedulers away; a copy that was killed does not keep them away."""
PAGE_RECORDS: Final = 2000
LEAD: Final = 0x43504D4C
WRITE: Final = 0x43504D57
"""First number of the advisory locks. The second one is the lease table's oid: each schema has its own locks."""

TABLE: Final = "'cpumond_lease'::regclass"
HOLDERS: Final = (
    "FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid() AND objsubid = 2 "  # noqa: S608
    f"AND objid = {TABLE}::oid AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
TRY_LEAD: Final = f"SELECT pg_try_advisory_lock({LEAD}, {TABLE}::oid::int)"
END_SESSIONS: Final = f"SELECT pg_terminate_backend(pid, 1000) {HOLDERS} AND classid::bigint = %s"
END_SESSION: Final = (
    "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity "
    "WHERE (pid, extract(epoch FROM backend_start)::text) = (%s, %s)"
)
LEASE: Final = (
    "SELECT term, leader, extract(epoch FROM expires_at - clock_timestamp())::float8 FROM cpumond_lease WHERE id = 1"
)
IS_LED: Final = (
    f"SELECT expires_at > clock_timestamp() AND EXISTS (SELECT {HOLDERS} AND classid::bigint = {LEAD}) "  # noqa: S608
    "FROM cpumond_lease WHERE id = 1"
)
RENEW: Final = (
    "UPDATE cpumond_lease SET expires_at = clock_timestamp() + make_interval(secs => %s) WHERE id = 1 AND term = %s"
)
FENCE: Final = "WITH fence AS MATERIALIZED (SELECT 1 AS held FROM cpumond_lease WHERE id = 1 AND term = %b FOR SHARE),"
CHANGE: Final = """
removed AS (
    DELETE FROM cpumond_records AS old USING fence, unnest(%b::bytea[], %b::bytea[]) AS gone (kind, key)
    WHERE old.kind = gone.kind AND old.key = gone.key
),
put AS (
    INSERT INTO cpumond_records (kind, key, value)
    SELECT new.kind, new.key, new.value
    FROM fence, unnest(%b::bytea[], %b::bytea[], %b::bytea[]) AS new (kind, key, value)
    ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value
)
"""
WRITE_CHANGES: Final = f"{FENCE} {CHANGE} SELECT held FROM fence"  # noqa: S608
WRITE_ALL: Final = f"{FENCE} {CHANGE}, {ADD} SELECT held FROM fence"  # noqa: S608
CUT_LOG: Final = f"{FENCE} {CUT}"
READ_FIRST: Final = "SELECT kind, key, value FROM cpumond_records ORDER BY kind, key LIMIT %(limit)b"
READ_NEXT: Final = (
    "SELECT kind, key, value FROM cpumond_records WHERE (kind, key) > (%(kind)b, %(key)b) "
    "ORDER BY kind, key LIMIT %(limit)b"
)

Migration = Callable[[Connection], None]
"""Changes a database from schema N to N + 1, inside its caller's transaction."""


def _create_records(connection: Connection) -> None:
    """Migrate from an empty database to schema 1. Names are bytes: text allows no NUL and is sorted by the locale."""
    connection.execute(
        "CREATE TABLE cpumond_records (kind bytea NOT NULL, key bytea NOT NULL, value bytea NOT NULL, "
        "PRIMARY KEY (kind, key))"
    )


MIGRATIONS: Final[tuple[Migration, ...]] = (_create_records, create_log)
"""Number N changes schema N to N + 1; schema 0 has no records. The newest schema is the number of migrations."""


class PostgresArbiter:
    """The ``Arbiter`` on PostgreSQL; connects at its first call. Raises StoreError for a wrong ``conninfo``."""

    def __init__(
        self,
        conninfo: str,
        timeout_s: float = ARBITER_TIMEOUT_S,
        migrations: Sequence[Migration] = MIGRATIONS,
        above: int = 0,
    ) -> None:
        self.where = name_database(conninfo)
        self._conninfo = conninfo
        self._timeout_s = timeout_s
        self._migrations = migrations
        self._session: Session | None = None
        self._seen = above
        """The highest term seen: if the database is restored to an earlier state, no term is given twice."""
        self._is_closed = False

    def look(self) -> Lease | None:
        with self._ask("read the lease") as session:
            return self._read(session)

    def _read(self, session: Session, lock: str = "") -> Lease | None:
        row = session.get(LEASE + lock)
        if row is None:
            raise StoreError(f"{self.where}: the lease is gone: table cpumond_lease was emptied; restore a backup")
        lease = Lease(*row)
        self._seen = max(self._seen, lease.term)
        return lease if lease.term else None

    def take(self, leader: str, lease_s: float) -> Lease | None:
        with self._ask("take the lead") as session:
            if session.get(IS_LED) == (True,):
                return None
            with session.connection.transaction():
                lease = self._read(session, " FOR UPDATE")
                self._check_version(session)
                if session.get(TRY_LEAD) != (True,):
                    if lease is not None and lease.left_s > 0:
                        return None
                    self._force(session)
                session.get(END_SESSIONS, (WRITE,))
                term = self._seen + 1
                session.connection.execute("UPDATE cpumond_lease SET term = %s, leader = %s", (term, leader))
                session.connection.execute(RENEW, (lease_s, term))
            session.leads = self._seen = term
            return Lease(term, leader, lease_s)

    def _check_version(self, session: Session) -> None:
        """Refuse to lead on a newer schema, which this scheduler could not read. Raises StoreError."""
        version = _read_version(session)
        newest = len(self._migrations)
        if version > newest:
            raise StoreError(
                f"{self.where}: was written by a newer cpumond (schema {version}, this one reads up to {newest}); it "
                f"was not changed: install that version, or restore cpumond_records_v{newest} if it exists"
            )

    def _force(self, session: Session) -> None:
        """Take the lock LEAD from a session that is no longer used. The caller holds a lock on the lease's row."""
        session.get(END_SESSIONS, (LEAD,))
        if session.get(TRY_LEAD) != (True,):
            raise StoreError(f"{self.where}: the session of the previous leader does not end; try again")

    def renew(self, term: int, lease_s: float) -> bool:
        with self._ask("renew the lease", keeps_lead=True) as session:
            if session.leads == term:
                return session.connection.execute(RENEW, (lease_s, term)).rowcount == 1
            # The session that led is lost. While the term is ours and the row is locked here, nothing but the lost
            # session can hold the lock LEAD, because the server has not noticed the loss yet.
            with session.connection.transaction():
                lease = self._read(session, " FOR UPDATE")
                if lease is None or lease.term != term:
                    return False
                if session.get(TRY_LEAD) != (True,):
                    self._force(session)
                session.connection.execute(RENEW, (lease_s, term))
            session.leads = term
            return True

    def give_up(self, term: int) -> None:
        with self._ask("give the lead up") as session:
            session.connection.execute(RENEW, (0.0, term))
            session.connection.execute("SELECT pg_advisory_unlock_all()")
            session.leads = 0

    def open_store(self, term: int) -> PostgresStore:
        """Open and migrate the store for the holder of ``term``. Raises StoreError; FencedError if another leads."""
        if self._is_closed:
            raise StoreError(f"{self.where}: the arbiter was closed")
        store = PostgresStore(self._conninfo, term)
        try:
            store.migrate(self._migrations)
        except BaseException:
            store.close()
            raise
        return store

    @contextlib.contextmanager
    def _ask(self, doing: str, keeps_lead: bool = False) -> Iterator[Session]:
        """Yield the session, reconnected if there is none. An error in the block ends the session, and with it the
        lead. ``keeps_lead``: not if the server only refuses a statement, for example because it waited for a long write
        of the leader: another scheduler would lead before the lease is over."""
        if self._is_closed:
            raise StoreError(f"{self.where}: cannot {doing}: the arbiter was closed")
        try:
            if self._session is None:
                self._session = connect(self._conninfo, self._timeout_s)
            with self._session.limited():
                yield self._session
        except BaseException as error:
            leads = self._session is not None and self._session.leads > 0
            if not (keeps_lead and leads and isinstance(error, psycopg.Error) and is_refusal(error)):
                self._drop()
            if isinstance(error, psycopg.Error):
                raise explain(self.where, doing, error) from error
            raise

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Release the lead and the session; a second call does nothing."""
        self._is_closed = True
        if self._session is not None:
            # The session at the server outlives its connection for a moment, so the lock is released explicitly.
            with contextlib.suppress(psycopg.Error), self._session.limited():
                self._session.connection.execute("SELECT pg_advisory_unlock_all()")
        self._drop()


def _read_version(session: Session) -> int:
    row = session.get("SELECT version FROM cpumond_schema")
    return int(row[0]) if row else 0


class PostgresStore:
    """The ``Store`` of the leader in ``term``. Made by ``PostgresArbiter.open_store``."""

    def __init__(self, conninfo: str, term: int) -> None:
        self.where = name_database(conninfo)
        self.lost_total = 0
        self.commit_s = 0.0
        self.term = term
        self._conninfo = conninfo
        self._session: Session | None = None
        self._unfinished: tuple[int, str] | None = None
        """Process id and start of the session whose last write may still be in progress."""
        self._over = ""
        """Why nothing more can be written in this term."""
        self._is_closed = False
        self._end: LogEnd | None = None
        """The end of the log; None until first needed. Only this store appends to the log in this term."""
        self._reader: Session | None = None
        self._reading = threading.Lock()

    def migrate(self, migrations: Sequence[Migration]) -> None:
        """Copy the records, then migrate the tables to the newest schema. Raises StoreError."""
        with self._use("migrate", is_limited=False) as session:
            version = _read_version(session)
            for number, migration in enumerate(migrations[version:], version + 1):
                if number == version + 1 > 1:
                    self._copy_records(session, version)
                with session.connection.transaction():
                    session.connection.execute("SET LOCAL statement_timeout = 0")
                    migration(session.connection)
                    session.connection.execute("UPDATE cpumond_schema SET version = %s", (number,))
                    # This comes last, since the leader cannot renew its lease while the row is locked.
                    self._check_term(session, " FOR SHARE")
            self._check_term(session)

    @staticmethod
    def _copy_records(session: Session, version: int) -> None:
        name = f"cpumond_records_v{version}"
        with session.connection.transaction():
            session.connection.execute("SET LOCAL statement_timeout = 0")
            session.connection.execute(f"DROP TABLE IF EXISTS {name}")
            session.connection.execute(f"CREATE TABLE {name} AS TABLE cpumond_records")

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield all records in order, page by page. Raises StoreError, or FencedError if another scheduler leads."""
        statement, place = READ_FIRST, {"limit": PAGE_RECORDS}
        is_last = False
        while not is_last:
            with self._use("read") as session:
                page = session.connection.execute(statement, place, binary=True).fetchall()
                is_last = len(page) < PAGE_RECORDS
                if is_last:
                    # If another scheduler has led since the start, some of the records may have been written by it.
                    self._check_term(session)
            for kind, key, value in page:
                yield kind.decode(), key.decode(), value
            if not is_last:
                kind, key, _ = page[-1]
                statement, place = READ_NEXT, {"kind": kind, "key": key, "limit": PAGE_RECORDS}

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        """Make all changes and append all entries, or do nothing; they are committed when this returns. Raises
        StoreError: nothing was changed; FencedError: this term is over, or the outcome is unknown."""
        self._check_open()
        end = self._find_end() if entries else LogEnd()
        last: dict[tuple[bytes, bytes], bytes | None] = {}
        try:
            for change in changes:
                last[change.kind.encode(), change.key.encode()] = change.value
            rows, end = make_rows(entries, end)
        except UnicodeEncodeError as error:
            raise StoreError(
                f"{self.where}: nothing was written: the name {error.object!r} holds a lone surrogate, "
                "which no database can store; choose another name"
            ) from None
        if not (changes or entries):
            with self._use("read the lease") as session:
                self._check_term(session)
            return
        removed = [place for place, value in last.items() if value is None]
        put = [(*place, value) for place, value in last.items() if value is not None]
        columns = [*_columns(removed, 2), *_columns(put, 3)]
        begun = time.perf_counter()
        if rows:
            row = self._write_for_sure(WRITE_ALL, [self.term, *columns, *list_columns(rows)])
        else:
            row = self._write_for_sure(WRITE_CHANGES, [self.term, *columns])
        if row is None:
            self._raise_fence_error()
        self.commit_s = time.perf_counter() - begun
        if rows:
            self._end = end

    def _raise_fence_error(self) -> NoReturn:
        """Raise the error for a statement that did not find its term valid: FencedError or StoreError."""
        with self._use("read the lease") as session:
            self._check_term(session)
        raise StoreError(f"{self.where}: nothing was written: the lease was lost for a moment; try again")

    def _find_end(self) -> LogEnd:
        if self._end is None:
            with self._use("read the log") as session:
                self._end = find_end(session)
        return self._end

    def cut_log(self, until: float, max_bytes: int) -> int:
        self._check_open()
        end = self._find_end()
        with self._use("cut the log") as session:
            chosen = list_cut(session, end, until, max_bytes)
            row = session.get(CUT_LOG, [self.term, *chosen]) if chosen[0] else (0,)
        if row is None:
            self._raise_fence_error()
        return int(row[0])

    def read_log(
        self, subjects: Sequence[str] = (), *, before: int | None = None, since: float = 0.0, limit: int = 50
    ) -> list[tuple[int, Entry]]:
        """The newest entries, through a separate session. Raises StoreError, or FencedError if this term is over."""
        with self._reading:
            self._check_open()
            try:
                if self._reader is None:
                    self._reader = connect(self._conninfo, STORE_TIMEOUT_S)
                with self._reader.limited():
                    return search(PostgresLogReader(self._reader), subjects, before, since, limit)
            except psycopg.Error as error:
                self._drop_reader()
                raise explain(self.where, "read the log", error) from error

    def _drop_reader(self) -> None:
        session, self._reader = self._reader, None
        if session is not None:
            session.close()

    def _write_for_sure(self, statement: str, parameters: list[object]) -> TupleRow | None:
        """Write. If the connection is lost, repeat the write until its outcome is known."""
        until: float | None = None
        while True:
            try:
                session = self._connect()
                self._unfinished = session.pid, session.started
                try:
                    with session.limited():
                        row = session.get(statement, parameters)
                except psycopg.Error as error:
                    if is_refusal(error):
                        self._unfinished = None
                    else:
                        until = until or time.monotonic() + OUTCOME_S
                    raise
                self._unfinished = None
            except (psycopg.Error, StoreError) as error:
                self._drop()
                explained = error if isinstance(error, StoreError) else explain(self.where, "write", error)
                if until is None:
                    raise explained from error
                if time.monotonic() > until:
                    self._over = (
                        f"{explained}; it is unknown whether the last changes were written: this scheduler gives up "
                        "the lead and loads the database again"
                    )
                    raise FencedError(self._over) from error
                time.sleep(PAUSE_S)
            else:
                return row

    def _check_term(self, session: Session, lock: str = "") -> None:
        row = session.get(LEASE + lock)
        if row is None or row[0] != self.term:
            other = f"{row[1] or 'another scheduler'} leads with term {row[0]}" if row else "the lease is gone"
            self._over = f"{self.where}: {other}: nothing of term {self.term} is written any more"
            raise FencedError(self._over)

    @contextlib.contextmanager
    def _use(self, doing: str, is_limited: bool = True) -> Iterator[Session]:
        """Yield a session for statements whose failure leaves no doubt about their outcome. If ``is_limited`` is false,
        they may take long."""
        self._check_open()
        try:
            session = self._connect()
            with session.limited() if is_limited else contextlib.nullcontext():
                yield session
        except psycopg.Error as error:
            self._drop()
            raise explain(self.where, doing, error) from error

    def _connect(self) -> Session:
        """Return the session; if there is none, end the previous one and reconnect. Raises psycopg.Error."""
        if self._session is None:
            session = connect(self._conninfo, STORE_TIMEOUT_S)
            try:
                with session.limited():
                    session.get(f"SELECT pg_advisory_lock_shared({WRITE}, {TABLE}::oid::int)")
                    self._end_unfinished(session)
            except BaseException:
                session.close()
                raise
            self._session = session
        return self._session

    def _end_unfinished(self, session: Session) -> None:
        if self._unfinished and session.get(END_SESSION, self._unfinished) == (False,):
            raise StoreError(f"{self.where}: the session of the last write does not end; try again")
        self._unfinished = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"{self.where}: the store was closed; open it again")
        if self._over:
            raise FencedError(self._over)

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        self._is_closed = True
        self._drop()
        with self._reading:
            self._drop_reader()


def _columns(rows: Sequence[tuple[object, ...]], number: int) -> list[list[object]]:
    return [[row[column] for row in rows] for column in range(number)]


class AloneStore:
    """The store for a program that is no scheduler, such as a copy. Until it is closed it leads without an address,
    with a term above ``above``. Raises StoreError if a scheduler uses it, it is unreachable or of a newer version."""

    lost_total = 0
    commit_s = 0.0

    def __init__(self, conninfo: str, above: int = 0, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        self._arbiter = PostgresArbiter(conninfo, migrations=migrations, above=above)
        try:
            self.term = self._check(self._arbiter.take("", ALONE_LEASE_S))
            self._store = store = self._arbiter.open_store(self.term)
            self.load, self.read_log, self.cut_log = store.load, store.read_log, store.cut_log
        except BaseException:
            self._arbiter.close()
            raise

    def _check(self, lease: Lease | None) -> int:
        if lease is not None:
            return lease.term
        holder = self._arbiter.look()
        by = f"the scheduler at {holder.leader}" if holder and holder.leader else "another program"
        raise StoreError(f"{self._arbiter.where}: in use by {by}; stop all schedulers on it")

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        self._store.write(changes, entries)
        self.commit_s = self._store.commit_s

    def close(self) -> None:
        self._store.close()
        with contextlib.suppress(StoreError):
            self._arbiter.give_up(self.term)
        self._arbiter.close()
