"""The store on PostgreSQL and its arbiter, on a real server."""

import time
from collections.abc import Callable

import pytest
from arbiter_contract import ArbiterContract
from postgresql import make_schema, run_sql
from store_contract import Opener, StoreContract

from cpumond.cluster.postgresql import PostgresServer
from cpumond.scheduler.store import Arbiter

pytest.importorskip("psycopg", reason="needs the Python package psycopg: sh tests/venv.sh all")
from cpumond.scheduler.store.postgresql import AloneStore, PostgresArbiter


class TestStore(StoreContract):
    @pytest.fixture
    def make_opener(self, postgresql: PostgresServer) -> Callable[[], Opener]:
        def make() -> Opener:
            conninfo = make_schema(postgresql)
            return lambda: AloneStore(conninfo)

        return make


class PostgresRig:
    lease_s = 1.0

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo

    def make(self) -> PostgresArbiter:
        return PostgresArbiter(self.conninfo)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def end_sessions(self, arbiter: Arbiter) -> None:
        assert isinstance(arbiter, PostgresArbiter)
        assert arbiter._session is not None
        run_sql(self.conninfo, f"SELECT pg_terminate_backend({arbiter._session.pid}, 5000)")

    def end_store_sessions(self) -> None:
        run_sql(
            self.conninfo,
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'",
        )


class TestArbiter(ArbiterContract):
    @pytest.fixture
    def rig(self, database: str) -> PostgresRig:
        return PostgresRig(database)
