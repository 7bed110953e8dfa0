"""The store on PostgreSQL under SIGKILL of the server and of its sessions at any moment."""

import contextlib
import os
import random
import signal
import threading
import time

import psycopg
import pytest
from postgresql import run_sql

from cpumond.cluster.postgresql import PostgresServer
from cpumond.core.errors import UnavailableError
from cpumond.scheduler.store import Change, FencedError, StoreError
from cpumond.scheduler.store.postgresql import PostgresArbiter, PostgresStore

ROUNDS = 40
SLOTS = 10
LEADING_S, LEASE_S = 30.0, 0.3
ONE_SESSION = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid() "
    "ORDER BY random() LIMIT 1"
)
END_ALL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'cpumond'"


def write_until(store: PostgresStore, number: int, over: threading.Event) -> tuple[int, bool]:
    """Equal slots in batches until one is refused or the time is over: the last acknowledged, and if one is unknown."""
    while not over.is_set():
        value = b"%d " % (number + 1) + bytes(random.randrange(20) ** 3)
        try:
            store.write([Change("slot", str(slot), value) for slot in range(SLOTS)])
        except FencedError:
            return number, True
        except StoreError:
            return number, False
        number += 1
    return number, False


AUDIT = (
    "CREATE TABLE audit (id bigserial, term int)",
    """CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO audit (term) VALUES (convert_from(NEW.value, 'UTF8')::int); RETURN NEW; END $$""",
    "CREATE TRIGGER noted BEFORE INSERT ON cpumond_records FOR EACH ROW EXECUTE FUNCTION note()",
)


def test_schedulers_that_stall_write_in_the_order_of_their_terms(database: str) -> None:
    with contextlib.closing(PostgresArbiter(database)) as arbiter:
        lease = arbiter.take("first:1", 1.0)
        assert lease is not None
        arbiter.open_store(lease.term).close()
    run_sql(database, *AUDIT)
    until = time.monotonic() + LEADING_S
    reigns: list[tuple[int, int]] = []

    def live(number: int) -> None:
        """Lead, write in the own term until another one leads, and again; stall now and then, beyond the lease."""
        rng = random.Random(number)
        with contextlib.closing(PostgresArbiter(database)) as arbiter:
            while time.monotonic() < until:
                with contextlib.suppress(StoreError):
                    lease = arbiter.take(f"{number}:1", LEASE_S)
                    if lease is None:
                        time.sleep(0.02)
                        continue
                    with contextlib.closing(arbiter.open_store(lease.term)) as store:
                        reigns.append((lease.term, number))
                        value = b"%d" % lease.term
                        while time.monotonic() < until:
                            with contextlib.suppress(StoreError):
                                if rng.random() < 0.2 and not arbiter.renew(lease.term, LEASE_S):
                                    # It does not stop here: the store has to refuse it.
                                    store.write([Change("k", str(number), value)])
                                    pytest.fail("a write after the lease was taken")
                            store.write([Change("k", f"{number}-{rng.randrange(5)}", value)])
                            if rng.random() < 0.01:
                                time.sleep(rng.random() * 3 * LEASE_S)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        time.sleep(0.3)
        with contextlib.suppress(psycopg.Error):
            run_sql(database, ONE_SESSION)
    for thread in threads:
        thread.join()
    terms = [int(str(term)) for (term,) in run_sql(database, "SELECT term FROM audit ORDER BY id")]
    print(f"{len(reigns)} reigns, {len(terms)} writes")
    assert terms == sorted(terms), "a write of a lower term after one of a higher term"
    assert len({term for term, _ in reigns}) == len(reigns) > 20, "a term was given twice"
    assert len({number for _, number in reigns}) == 4


def test_a_killed_server_loses_nothing_that_was_acknowledged() -> None:
    try:
        server = PostgresServer("restart_after_crash = off").__enter__()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    rng = random.Random()
    acknowledged = unknown = fenced = 0
    with contextlib.closing(server):
        for _ in range(ROUNDS):
            with contextlib.closing(PostgresArbiter(server.conninfo())) as arbiter:
                lease = arbiter.take("a:1", 60.0)
                assert lease is not None
                with contextlib.closing(arbiter.open_store(lease.term)) as store:
                    slots = {value.split(b" ")[0] for _, _, value in store.load()}
                    assert len(slots) <= 1, "a part of a batch"
                    last = int(slots.pop()) if slots else 0
                    assert acknowledged <= last <= acknowledged + unknown
                    over = threading.Event()
                    result: list[tuple[int, bool]] = []
                    writer = threading.Thread(target=lambda: result.append(write_until(store, last, over)))  # noqa: B023
                    writer.start()
                    time.sleep(rng.random() * 0.3)
                    session = store._session
                    if rng.random() < 0.5 and session is not None:
                        # The server ends itself when one of its processes was killed.
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(session.pid, signal.SIGKILL)
                    else:
                        run_sql(server.conninfo(), END_ALL)
                        time.sleep(rng.random() * 0.1)
                        server.kill()
                    server.kill()
                    if rng.random() < 0.5:
                        server.start()
                    over.set()
                    writer.join()
                    acknowledged, is_unknown = result[0]
                    unknown = int(is_unknown)
                    fenced += unknown
            if not server.pid:
                server.start()
    print(f"{ROUNDS} kills, {acknowledged} batches, {fenced} of unknown outcome")
