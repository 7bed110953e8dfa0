"""Sessions on a PostgreSQL database: time-outs on everything, the table of the lease, and errors as sentences."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow

from cpumond.scheduler.store import StoreError

OLDEST_CLIENT: Final = [3, 1, 13]
"""The first psycopg whose ``connect_timeout`` applies to each host: older ones never get past a host that hangs."""
if [int(number) for number in re.findall(r"\d+", psycopg.__version__)[:3]] < OLDEST_CLIENT:
    raise ImportError(f"found {psycopg.__version__}")
OLDEST_SERVER: Final = 140000
"""PostgreSQL 14, the first version in which pg_terminate_backend can wait."""

CONNECTION: Final = {
    "connect_timeout": "2", "tcp_user_timeout": "3000", "keepalives_idle": "2", "keepalives_interval": "1",
    "keepalives_count": "3", "application_name": "cpumond", "client_encoding": "UTF8",
}  # fmt: skip
"""Defaults of a conninfo. ``connect_timeout`` applies to each host in it."""

SETTINGS: Final = """
SELECT extract(epoch FROM backend_start)::text,
    set_config('statement_timeout', %(ms)s, false),
    set_config('lock_timeout', %(ms)s, false),
    set_config('idle_in_transaction_session_timeout', %(ms)s, false),
    set_config('idle_session_timeout', '0', false),
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), false)
FROM pg_stat_activity WHERE pid = pg_backend_pid()
"""
"""Sets the time-outs, and other settings that the store relies on and a database may have changed. Returns when the
session began: as a number, since the text of a date depends on the database's date style."""
CREATION: Final = 0x43504D43
"""The advisory lock that is held while the first tables are created."""

Connection = psycopg.Connection[TupleRow]


def name_database(conninfo: str) -> str:
    """Return hosts, ports and name of a database for messages, without its password. Raises StoreError."""
    parts = _parse(conninfo)
    host = parts.get("host") or parts.get("hostaddr") or parts.get("service") or "the default host"
    port = f" port {parts['port']}" if "port" in parts else ""
    return f"PostgreSQL at {host}{port}, database {parts.get('dbname', 'of the default name')}"


def _parse(conninfo: str) -> dict[str, Any]:
    try:
        return conninfo_to_dict(conninfo)
    except psycopg.Error:
        # libpq's own message quotes parts of the text, including the password.
        raise StoreError(
            "store.conninfo: libpq cannot read it: write it as "
            '"host=db1,db2 dbname=cpumond user=cpumond target_session_attrs=read-write", values with spaces in single '
            'quotes, or as "postgresql://user@db1,db2/cpumond"'
        ) from None


class Session:
    """A connection whose calls end after ``timeout_s``, even if the server, the network or this process hangs."""

    def __init__(self, conninfo: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.leads = 0
        """The term for which this session holds the lock LEAD; 0 if it does not."""
        self.connection: Connection = psycopg.connect(**{**CONNECTION, **_parse(conninfo)}, autocommit=True)
        # A separate descriptor: when time is up, that of the connection may already be closed, and its number may
        # denote a different file.
        self._socket = socket.socket(fileno=os.dup(self.connection.fileno()))
        try:
            _check_server(self.connection, conninfo)
            with self.limited():
                # The server's limit is shorter, so a slow statement is refused: then it certainly changed nothing.
                row = self.connection.execute(SETTINGS, {"ms": str(int(timeout_s * 750))}).fetchone()
                assert row is not None
                self.started = row[0]
        except BaseException:
            self.close()
            raise
        self.pid = self.connection.info.backend_pid

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Abort the connection if the block takes longer than ``timeout_s``."""
        timer = threading.Timer(self.timeout_s, self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def get(self, statement: str, parameters: Sequence[object] = (), binary: bool = False) -> TupleRow | None:
        return self.connection.execute(statement, parameters, binary=binary).fetchone()

    def close(self) -> None:
        self.connection.close()
        self._socket.close()


def connect(conninfo: str, timeout_s: float) -> Session:
    """Open a session on a database and create its first tables if needed. Raises psycopg.Error, or StoreError."""
    session = Session(conninfo, timeout_s)
    try:
        with session.limited():
            if session.get("SELECT to_regclass('cpumond_lease')") == (None,):
                _create(session.connection)
    except BaseException:
        session.close()
        raise
    return session


def _check_server(connection: Connection, conninfo: str) -> None:
    version = connection.info.server_version
    if version < OLDEST_SERVER:
        raise StoreError(
            f"{name_database(conninfo)}: is version {version // 10000}; "
            f"{OLDEST_SERVER // 10000} or a later one is needed"
        )


def _create(connection: Connection) -> None:
    """Create the tables that exist in all versions."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (CREATION,))
        connection.execute("CREATE TABLE IF NOT EXISTS cpumond_schema (version integer NOT NULL)")
        connection.execute("INSERT INTO cpumond_schema SELECT 0 WHERE NOT EXISTS (SELECT FROM cpumond_schema)")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cpumond_lease (id integer PRIMARY KEY CHECK (id = 1), term bigint NOT NULL, "
            "leader text NOT NULL, expires_at timestamptz NOT NULL)"
        )
        connection.execute("INSERT INTO cpumond_lease VALUES (1, 0, '', 'epoch') ON CONFLICT DO NOTHING")


def is_refusal(error: psycopg.Error) -> bool:
    """Whether the server reports that the statement failed as a whole; after any other error its outcome is unknown."""
    return error.sqlstate is not None and error.diag.severity_nonlocalized == "ERROR"


def explain(where: str, doing: str, error: psycopg.Error) -> StoreError:
    # The first line is the sentence; the lines after it quote the statement.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = {
        "42501": "grant the scheduler's role the rights to its schema, and use one role for all schedulers on it",
        "3F000": "create the schema of the search path, and grant USAGE on it to the scheduler's role",
        "25006": "add target_session_attrs=read-write to the conninfo, with all hosts",
        "53100": "free space on the server's file system",
    }.get(error.sqlstate or "", "check that the server runs and is reachable, and look into its log")
    if error.sqlstate is None and "FATAL" in str(error):
        # libpq gives no error code for a refused connection.
        advice = "fix dbname, user and password, or the server's pg_hba.conf"
    return StoreError(f"{where}: cannot {doing}: {lines[0] if lines else type(error).__name__}; {advice}")
