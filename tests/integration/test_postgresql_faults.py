"""The store on PostgreSQL when its sessions, server, network and scheduler fail."""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from postgresql import Wire, run_sql
from waiting import PATIENCE, wait_until

from cpumond.cluster.postgresql import PostgresServer
from cpumond.core.errors import CpumondError
from cpumond.scheduler.store import Change, Entry, FencedError, Store, StoreError
from cpumond.scheduler.store import postgresql as module
from cpumond.scheduler.store.copying import copy_store
from cpumond.scheduler.store.places import read_term
from cpumond.scheduler.store.postgresql import MIGRATIONS, AloneStore, PostgresArbiter
from cpumond.scheduler.store.postgresql_session import Connection
from cpumond.scheduler.store.sqlite import open_sqlite_store

LEASE_S = 2.0
LONG_LEASE_S = 60.0
"""One that does not end while somebody looks whether it holds."""
SHORT_S = 1.0 * PATIENCE
"""A time-out that is waited for, and that no statement reaches which nobody holds up."""


def content(store: Store) -> dict[str, bytes]:
    return {key: value for _, key, value in store.load()}


# ---- writes whose outcome is not known


@pytest.fixture
def wire(postgresql: PostgresServer) -> Iterator[Wire]:
    opened = Wire(postgresql.port)
    yield opened
    opened.close()


@pytest.fixture
def behind_wire(wire: Wire, database: str, postgresql: PostgresServer) -> str:
    return database.replace(f"port={postgresql.port}", f"port={wire.port}")


def test_a_write_whose_answer_is_lost_is_made_once_more(wire: Wire, behind_wire: str, database: str) -> None:
    with contextlib.closing(AloneStore(behind_wire)) as store:
        store.write([Change("k", "a", b"1"), Change("k", "b", b"1")], [Entry(1.0, ("a",), b"first")])
        before = wire.connections
        wire.is_deaf = True
        entries = [Entry(2.0, ("a",), b"second"), Entry(3.0, ("a", "b"), b"third")]
        done = threading.Thread(target=store.write, args=([Change("k", "a", b"2"), Change("k", "b", None)], entries))
        done.start()
        wait_until(
            lambda: run_sql(database, "SELECT 1 FROM cpumond_records WHERE value = '2'"),
            "the server has made the write",
        )
        wire.is_deaf = False
        wire.break_all()
        done.join(20 * PATIENCE)
        assert not done.is_alive()
        assert wire.connections > before
        assert content(store) == {"a": b"2"}
        store.write([], [Entry(4.0, ("a",), b"fourth")])
        expected = [b"fourth", b"third", b"second", b"first"]
        assert [entry.value for _, entry in store.read_log()] == expected
        assert [entry.value for _, entry in store.read_log(["a"])] == expected


def test_what_is_never_known_ends_the_term(
    wire: Wire, behind_wire: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OUTCOME_S", 0.5)
    with contextlib.closing(AloneStore(behind_wire)) as store:
        store.write([Change("k", "a", b"1")])
        wire.is_cut = True
        wire.break_all()
        with pytest.raises(FencedError, match="unknown whether the last changes were written"):
            store.write([Change("k", "a", b"2")])
        wire.is_cut = False
        with pytest.raises(FencedError, match="it is unknown"):
            store.write([Change("k", "a", b"3")])
        with pytest.raises(FencedError, match="it is unknown"):
            list(store.load())


def test_where_nothing_was_sent_nothing_is_unknown(wire: Wire, behind_wire: str) -> None:
    with contextlib.closing(AloneStore(behind_wire)) as store:
        wire.is_cut = True
        wire.break_all()
        for _ in range(2):
            with pytest.raises(StoreError) as told:
                list(store.load())
            assert not isinstance(told.value, FencedError)
        # The session is gone by now, so this one fails to connect.
        with pytest.raises(StoreError) as told:
            store.write([Change("k", "a", b"1")])
        assert not isinstance(told.value, FencedError)
        wire.is_cut = False
        store.write([Change("k", "a", b"2")])
        assert content(store) == {"a": b"2"}


def test_a_refusal_of_the_server_changes_nothing_and_later_writes_work(database: str) -> None:
    with contextlib.closing(AloneStore(database)) as store:
        store.write([Change("k", "a", b"1")])
        run_sql(database, "ALTER TABLE cpumond_records ADD CONSTRAINT small CHECK (length(value) < 10)")
        with pytest.raises(StoreError, match=r'cannot write: .* violates check constraint "small"') as told:
            store.write([Change("k", "a", b"2"), Change("k", "b", bytes(10))])
        assert not isinstance(told.value, FencedError)
        store.write([Change("k", "c", b"3")])
        assert content(store) == {"a": b"1", "c": b"3"}


def test_a_server_that_does_not_answer_is_given_up(wire: Wire, behind_wire: str) -> None:
    with contextlib.closing(PostgresArbiter(behind_wire, timeout_s=1.0)) as arbiter:
        assert arbiter.take("a:1", LEASE_S)
        wire.is_deaf = True
        begun = time.monotonic()
        with pytest.raises(StoreError, match="cannot renew the lease"):
            arbiter.renew(1, LEASE_S)
        assert time.monotonic() - begun < 1.0 * PATIENCE * 2
        wire.is_deaf = False
        assert wait_until(lambda: arbiter.renew(1, LEASE_S))


def test_a_host_that_takes_connections_and_does_not_answer_is_passed_over(
    postgresql: PostgresServer, database: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        ports = f"{hangs.getsockname()[1]},{postgresql.port}"
        conninfo = f"{database} host=127.0.0.1,127.0.0.1 port={ports} target_session_attrs=read-write"
        with contextlib.closing(PostgresArbiter(conninfo)) as arbiter:
            assert arbiter.look() is None


@contextlib.contextmanager
def held_write(database: str, store: Store, change: Change) -> Iterator[None]:
    """A write that has read the term and waits for its row as long as the block lasts, and is over after that."""
    thread = threading.Thread(target=store.write, args=([change],))
    with psycopg.connect(database) as other:
        other.execute("INSERT INTO cpumond_records VALUES (%b, %b, '')", (change.kind.encode(), change.key.encode()))
        thread.start()
        wait_until(lambda: run_sql(database, "SELECT 1 FROM pg_locks WHERE NOT granted"), "the write waits", 5.0)
        yield
        other.rollback()
    thread.join(30 * PATIENCE)
    assert not thread.is_alive()


def test_a_write_under_way_at_the_server_is_ended_before_it_is_repeated(
    wire: Wire, behind_wire: str, database: str
) -> None:
    with contextlib.closing(AloneStore(behind_wire)) as store:
        session = store._store._session
        assert session is not None
        is_there = f"SELECT 1 FROM pg_stat_activity WHERE pid = {session.pid}"  # noqa: S608
        with held_write(database, store, Change("k", "a", b"1")):
            wire.break_all()
            # Else it might be made later, over a newer one. Its own time-out comes after 7.5 s.
            wait_until(lambda: not run_sql(database, is_there), "its session is ended", 2.0)
        assert content(store) == {"a": b"1"}


def test_a_take_over_waits_for_a_write_under_way(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_SESSIONS", "SELECT %s")
    with (
        contextlib.closing(PostgresArbiter(database)) as one,
        contextlib.closing(PostgresArbiter(database, timeout_s=SHORT_S)) as other,
    ):
        assert one.take("a:1", LEASE_S)
        one.give_up(1)
        with (
            contextlib.closing(one.open_store(1)) as store,
            held_write(database, store, Change("k", "a", b"1")),
            pytest.raises(StoreError, match="cannot take the lead: canceling statement"),
        ):
            other.take("b:1", LEASE_S)
        lease = other.take("b:1", LEASE_S)
        assert lease is not None
        with contextlib.closing(other.open_store(lease.term)) as store:
            assert content(store) == {"a": b"1"}


def test_a_slow_write_of_the_leader_does_not_cost_the_lead(database: str) -> None:
    with (
        contextlib.closing(PostgresArbiter(database, timeout_s=SHORT_S)) as one,
        contextlib.closing(PostgresArbiter(database)) as other,
    ):
        assert one.take("a:1", 60.0)
        with contextlib.closing(one.open_store(1)) as store, held_write(database, store, Change("k", "a", b"1")):
            with pytest.raises(StoreError, match="cannot renew the lease: canceling statement"):
                one.renew(1, 60.0)
            assert other.take("b:1", 60.0) is None
        assert other.take("b:1", 60.0) is None
        assert one.renew(1, 60.0)
        # Whoever gives the lead up lets go of it, whatever the server says.
        with (
            contextlib.closing(one.open_store(1)) as store,
            held_write(database, store, Change("k", "b", b"1")),
            pytest.raises(StoreError, match="cannot give the lead up"),
        ):
            one.give_up(1)
        # The server ends the session a moment after its connection.
        wait_until(lambda: other.take("b:1", 60.0), "the lead is free", 10 * PATIENCE)


def test_of_two_that_find_the_lead_free_one_leads(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both have looked before either took it.
    monkeypatch.setattr(module, "IS_LED", "SELECT false")
    with contextlib.closing(PostgresArbiter(database)) as one, contextlib.closing(PostgresArbiter(database)) as other:
        assert one.take("a:1", 60.0)
        assert other.take("b:1", 60.0) is None
        assert one.renew(1, 60.0)


# ---- the log


def test_an_entry_is_not_changed(database: str) -> None:
    with contextlib.closing(AloneStore(database)) as store:
        store.write([], [Entry(1.0, ("a",), b"1")])
        for change in ("value = '2'", "at = 0", "number = 7", "subjects = ''"):
            with pytest.raises(psycopg.errors.RaiseException, match="entries of the log are not changed"):
                run_sql(database, f"UPDATE cpumond_log SET {change}")  # noqa: S608
        assert store.read_log(["a"]) == [(1, Entry(1.0, ("a",), b"1"))]


def test_who_does_not_lead_neither_adds_to_the_log_nor_cuts_it(database: str) -> None:
    with (
        contextlib.closing(PostgresArbiter(database)) as first,
        contextlib.closing(PostgresArbiter(database)) as second,
    ):
        assert first.take("a:1", LEASE_S)
        with contextlib.closing(first.open_store(1)) as old:
            old.write([], [Entry(1.0, (), b"1"), Entry(2.0, (), b"2")])
            first.give_up(1)
            assert second.take("b:1", LEASE_S)
            with contextlib.closing(second.open_store(2)) as new:
                new.write([], [Entry(3.0, (), b"3")])
                for step in (lambda: old.cut_log(9.0, 0), lambda: old.write([], [Entry(9.0, (), b"9")])):
                    # Ended with the take-over, then connected anew.
                    with pytest.raises(StoreError):
                        step()
                    with pytest.raises(FencedError, match="leads with term 2"):
                        step()
                assert [entry.value for _, entry in new.read_log()] == [b"3", b"2", b"1"]


# ---- versions


def add_colour(connection: Connection) -> None:
    connection.execute("ALTER TABLE cpumond_records ADD COLUMN colour text")


def take_long(connection: Connection) -> None:
    connection.execute("SELECT pg_sleep(1)")


def break_half_way(connection: Connection) -> None:
    connection.execute("DELETE FROM cpumond_records")
    connection.execute("INSERT INTO nowhere VALUES (1)")


NEWER = (*MIGRATIONS, add_colour)


def test_a_database_of_before_there_was_a_log_gets_one_and_keeps_all(database: str) -> None:
    with contextlib.closing(AloneStore(database, migrations=MIGRATIONS[:1])) as store:
        store.write([Change("k", "a", b"1")])
    for number in (1, 2):
        with contextlib.closing(AloneStore(database)) as store:
            assert content(store) == {"a": b"1"}
            store.write([], [Entry(1.0, ("a",), b"")])
            assert [each for each, _ in store.read_log(["a"])] == list(range(number, 0, -1))
    assert run_sql(database, "SELECT key, value FROM cpumond_records_v1") == [(b"a", b"1")]
    with pytest.raises(StoreError, match=r"newer cpumond \(schema 2, this one reads up to 1\).*cpumond_records_v1"):
        AloneStore(database, migrations=MIGRATIONS[:1])


def test_a_migration_may_take_longer_than_any_other_statement(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORE_TIMEOUT_S", 0.5)
    with contextlib.closing(AloneStore(database, migrations=(*MIGRATIONS, take_long))) as store:
        assert content(store) == {}
    assert run_sql(database, "SELECT version FROM cpumond_schema") == [(len(MIGRATIONS) + 1,)]


def test_a_migration_that_fails_changes_nothing(database: str) -> None:
    with contextlib.closing(AloneStore(database)) as store:
        store.write([Change("k", "a", b"1")])
    with pytest.raises(StoreError, match='"nowhere" does not exist'):
        AloneStore(database, migrations=(*NEWER, break_half_way))
    # The step before it is a whole one.
    assert run_sql(database, "SELECT version FROM cpumond_schema") == [(3,)]
    with contextlib.closing(AloneStore(database, migrations=NEWER)) as store:
        assert content(store) == {"a": b"1"}


def test_a_pair_is_upgraded_one_after_the_other(database: str) -> None:
    with (
        contextlib.closing(PostgresArbiter(database)) as old_leader,
        contextlib.closing(PostgresArbiter(database, migrations=NEWER)) as new_standby,
        contextlib.closing(PostgresArbiter(database)) as old_standby,
    ):
        assert old_leader.take("a:1", LONG_LEASE_S)
        store = old_leader.open_store(1)
        store.write([Change("k", "a", b"1")])
        # The standby was upgraded first: it waits, and changes nothing.
        assert new_standby.take("b:1", LONG_LEASE_S) is None
        store.write([Change("k", "b", b"2")])
        store.close()
        old_leader.give_up(1)
        lease = new_standby.take("b:1", LONG_LEASE_S)
        assert lease is not None
        with contextlib.closing(new_standby.open_store(lease.term)) as migrated:
            assert content(migrated) == {"a": b"1", "b": b"2"}
            # Where the other one still is an older one, it stays a standby that knows the leader.
            assert old_standby.take("a:1", LONG_LEASE_S) is None
            seen = old_standby.look()
            assert seen is not None
            assert seen.leader == "b:1"
        new_standby.give_up(lease.term)
        with pytest.raises(StoreError, match="newer cpumond"):
            old_standby.take("a:1", LONG_LEASE_S)


# ---- what an operator gets wrong


@pytest.mark.parametrize(
    "conninfo",
    [
        "host=127.0.0.1 port=1 dbname=x user=cpumond password=geheim",
        "postgresql://cpumond:geheim@127.0.0.1:1/x",
        "host=127.0.0.1 password=ge heim geheim",
        "postgresql://cpumond:geheim@127.0.0.1:1/x?nothing=1",
        "host=127.0.0.1 password='geheim",
    ],
)
def test_no_message_has_the_password(conninfo: str) -> None:
    with pytest.raises(CpumondError) as told, contextlib.closing(PostgresArbiter(conninfo)) as arbiter:
        arbiter.look()
    assert "heim" not in f"{told.value!r}"
    assert re.search("127.0.0.1|libpq cannot read it", str(told.value))


def test_a_database_that_is_missing_or_without_rights(postgresql: PostgresServer, database: str) -> None:
    with pytest.raises(StoreError, match='"nowhere" does not exist; fix dbname'):
        AloneStore(postgresql.conninfo("nowhere"))
    run_sql(database, "DROP ROLE IF EXISTS reader", "CREATE ROLE reader LOGIN")
    with pytest.raises(StoreError, match="permission denied for schema public; grant the scheduler's role"):
        AloneStore(postgresql.conninfo().replace("user=cpumond", "user=reader"))
    with pytest.raises(StoreError, match="no schema has been selected to create in; create the schema"):
        AloneStore(database.replace("user=cpumond", "user=reader"))


def test_a_database_with_settings_of_its_own(postgresql: PostgresServer) -> None:
    name = "own_settings"
    run_sql(
        postgresql.conninfo(),
        f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0",
        f"ALTER DATABASE {name} SET synchronous_commit = off",
        f"ALTER DATABASE {name} SET default_transaction_isolation = serializable",
        f"ALTER DATABASE {name} SET client_encoding = latin1",
        f"ALTER DATABASE {name} SET datestyle = German",
        f"ALTER DATABASE {name} SET idle_session_timeout = '1min'",
    )
    conninfo = postgresql.conninfo(name)
    with contextlib.closing(PostgresArbiter(conninfo)) as arbiter:
        lease = arbiter.take("höst:1", LEASE_S)
        assert lease is not None
        assert arbiter.look() == (1, "höst:1", pytest.approx(LEASE_S, abs=LEASE_S))
        with contextlib.closing(arbiter.open_store(1)) as store:
            store.write([Change("k", "ö", b"1")])
            assert content(store) == {"ö": b"1"}
            assert store._session is not None
            for setting, expected in (
                ("synchronous_commit", "on"),
                ("default_transaction_isolation", "read committed"),
                ("idle_session_timeout", "0"),
            ):
                assert store._session.get(f"SELECT current_setting('{setting}')") == (expected,)


# ---- copies


def test_a_state_goes_there_and_back_and_terms_only_rise(database: str, tmp_path: object) -> None:
    first, second = f"{tmp_path}/first.db", f"{tmp_path}/second.db"
    records = [Change("job", f"{number:05}", os.urandom(300)) for number in range(5000)]
    entries = [Entry(float(number), ("all", f"s{number % 5}"), b"%d" % number) for number in range(2100)]
    with contextlib.closing(open_sqlite_store(first)) as store:
        store.write(records, entries)
        store.cut_log(100.0, 2**40)
        log = store.read_log(limit=10_000)
    run_sql(database, "SELECT 1")
    there = copy_store(first, database)
    for _ in range(3):
        AloneStore(database).close()
    back = copy_store(database, second)
    assert back == there
    with contextlib.closing(open_sqlite_store(second)) as store:
        assert [Change(*record) for record in store.load() if record[0] == "job"] == records
        assert store.read_log(limit=10_000) == log
        assert len(log) == there.entries == 2000
        assert store.read_log(["s3"], limit=1) == [(2099, entries[2098])]
        term = read_term(store)
        assert term >= 5


def test_a_copy_waits_for_no_leader(database: str, tmp_path: object) -> None:
    with contextlib.closing(PostgresArbiter(database)) as arbiter:
        assert arbiter.take("a:1", LONG_LEASE_S)
        with pytest.raises(StoreError, match="in use by the scheduler at a:1; stop all schedulers on it"):
            copy_store(database, f"{tmp_path}/copy.db")
