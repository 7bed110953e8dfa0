"""PostgreSQL for tests: a server for the whole run, and an empty database in it for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import psycopg
import pytest

from cpumond.core.errors import UnavailableError
from cpumond.testing.postgresql import PostgresServer

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresServer]:
    """A server with the settings of Debian's, fsync included, for all tests of this process."""
    try:
        server = PostgresServer().__enter__()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    yield server
    server.close()


@pytest.fixture
def database(postgresql: PostgresServer) -> str:
    """The conninfo of an empty database."""
    return make_database(postgresql)


def make_database(server: PostgresServer) -> str:
    """An empty database's conninfo."""
    name = f"test{next(_numbers)}"
    run_sql(server.conninfo(), f"CREATE DATABASE {name}")
    return server.conninfo(name)


def run_sql(conninfo: str, *statements: str) -> list[tuple[object, ...]]:
    """Run statements, each in its own transaction; the rows of the last one."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []
