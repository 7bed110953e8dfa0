"""PostgreSQL for tests: a server for the whole run, and an empty database in it for each test."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest
from waiting import wait_until

from cpumond.cluster.postgresql import PostgresServer
from cpumond.core.errors import UnavailableError

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresServer]:
    """A server with the settings of Debian's, fsync included, for all tests of this process."""
    pytest.importorskip("psycopg", reason="needs the Python package psycopg: sh tests/venv.sh all")
    try:
        server = PostgresServer().__enter__()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    yield server
    server.close()


@pytest.fixture
def database(postgresql: PostgresServer) -> str:
    return make_schema(postgresql)


def make_schema(server: PostgresServer) -> str:
    """The conninfo of an empty schema of a database, which takes less time than a database."""
    name = f"test{next(_numbers)}"
    run_sql(server.conninfo(), f"CREATE SCHEMA {name}")
    return f"{server.conninfo()} options='-c search_path={name}'"


def run_sql(conninfo: str, *statements: str) -> list[tuple[object, ...]]:
    import psycopg

    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


class Standby(PostgresServer):
    """A copy of ``primary`` that follows it, and that each of its commits waits for from ``hold_commits`` on."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self.primary = primary

    def make(self) -> None:
        self.run(
            "pg_basebackup", "-h", "127.0.0.1", "-p", str(self.primary.port), "-U", "cpumond", "-D", self.data, "-R",
            "-c", "fast", "--no-sync",
        )  # fmt: skip
        self.configure(
            f"port = {self.port}",
            f"unix_socket_directories = '{self.directory}'",
            # A standby that lost its primary is promoted when this is over, 5 s by default.
            "wal_retrieve_retry_interval = '200ms'",
        )

    def hold_commits(self) -> None:
        """From now on a commit of the primary is confirmed when it is here, too."""
        self.primary.configure("synchronous_standby_names = '*'")
        self.primary.reload()
        state = "SELECT 1 FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"
        wait_until(lambda: run_sql(self.primary.conninfo(), state), "the standby follows")

    def promote(self) -> None:
        # What followed the primary is copied: this one waits for nobody.
        self.configure("synchronous_standby_names = ''")
        self.run("pg_ctl", "promote", "-D", self.data, "-w")

    def conninfo_of_both(self, database: str) -> str:
        return (
            f"host=127.0.0.1,127.0.0.1 port={self.primary.port},{self.port} dbname={database} user=cpumond "
            "target_session_attrs=read-write"
        )


@contextlib.contextmanager
def open_pair() -> Iterator[tuple[PostgresServer, Standby]]:
    try:
        primary = PostgresServer().__enter__()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    with contextlib.closing(primary), Standby(primary) as standby:
        standby.hold_commits()
        yield primary, standby


class Wire:
    """A port of 127.0.0.1 that passes connections on to a server's, until it is told to fail."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.is_deaf = False
        """Whether answers are thrown away; requests still arrive."""
        self.is_cut = False
        """Whether new connections are closed at once."""
        self.connections = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.is_cut:
                    near.close()
                    continue
                self.connections += 1
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (is_answer and self.is_deaf):
                    target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def break_all(self) -> None:
        """End the connections that are open; the server's side may go on with what it was told."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # A thread that waits for a connection holds the socket open, even closed.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_all()
        for each in self._open:
            each.close()
