"""The store's log when it is large: how long the newest entries take to find, and what an entry costs a write.

    python tests/bench/log.py [--entries 1000000] [--engine sqlite|postgresql|both] [--place DIRECTORY] [--check]

Fills a store with entries as the scheduler makes them, then asks for the newest 50 by filters of all kinds, also by
those that fit hardly anything, and writes a record with and without an entry, in turns. Prints medians, and ratios: of
a filtered read to one without a filter, of a write with an entry to one without. Also how large the store is for each
byte of the log as ``[audit] max_size`` counts it, how long opening takes and what dropping the oldest costs.
``--place``: where the SQLite file is made; a disk shows what a write costs, memory what the processor has to do.
``--check``: exit code 1 when a ratio is above its bound, which is for a machine that does nothing else and a disk.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from cpumond.cluster.postgresql import PostgresServer
from cpumond.scheduler.store import Change, Entry, Store
from cpumond.scheduler.store.entries import LogEnd, make_rows
from cpumond.scheduler.store.places import open_place

BATCH = 1000
READS = 30
WRITES = 300
SECOND_S = 1.0
RARE = 40
"""Entries of the rare subjects."""
READ_BOUND = 10.0
WRITE_BOUND = 2.5
START_AT = 1_700_000_000.0


def make_entries(number: int, rng: random.Random) -> Iterator[Entry]:
    """A command each second: seven subjects, of users, pools and nodes few are in many entries; a few rare ones."""
    rare = {index: f"user:rare{index % 2}" for index in rng.sample(range(number), 2 * RARE)}
    for index in range(number):
        user = rare.get(index) or f"user:u{int(rng.paretovariate(1.0)) % 50}"
        pool = f"default/p{int(rng.paretovariate(0.7)) % 300}"
        operation = f"{rng.getrandbits(32):x}-{index:x}-3fe012f-1"
        kind = "command" if index % 10 else "preemption"
        half = "first" if index < number // 2 else "second"
        subjects = (
            "audit", f"kind:{kind}", user, "tree:default", "pool:default/top", f"pool:{pool}", f"operation:{operation}",
            f"half:{half}", f"parity:{index % 2}",
        )  # fmt: skip
        value = {
            "at": START_AT + index, "kind": kind, "user": user, "origin": "10.0.0.7, token ab12cd34", "pool": pool,
            "text": f"{user} started an operation in pool {pool} with 12 jobs", "operation": operation, "term": 3,
            "command": "StartOperation", "allowed_by": f"the access list of pool {pool} allows use to {user}",
        }  # fmt: skip
        yield Entry(START_AT + index * SECOND_S, subjects, msgspec.json.encode(value))


def fill(store: Store, number: int) -> int:
    """The bytes of the log."""
    begun, end, batch = time.monotonic(), LogEnd(), []
    for index, entry in enumerate(make_entries(number, random.Random(1)), 1):
        batch.append(entry)
        if len(batch) == BATCH or index == number:
            _, end = make_rows(batch, end)
            store.write([], batch)
            batch = []
    print(f"filled with {number} entries of {end.position / number:.0f} bytes in {time.monotonic() - begun:.0f} s")
    return end.position


def measure_s(work: Callable[[], object], rounds: int) -> float:
    """The median."""
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def read_all(store: Store, number: int) -> float:
    """Ask all questions; the largest ratio that has a bound."""
    ((newest, last),) = store.read_log(limit=1)
    recent, middle, hour = last.at - 60.0, newest - number // 2, last.at - 3600.0
    questions: list[tuple[str, tuple[str, ...], dict[str, Any], bool]] = [
        ("no filter", (), {}, True),
        ("one by its number", (), {"before": middle + 1, "limit": 1}, True),
        ("a common subject", ("kind:command",), {}, True),
        ("a rare subject", ("user:rare0",), {}, True),
        ("an unknown subject", ("user:nobody",), {}, True),
        ("two common subjects", ("audit", "kind:preemption"), {}, True),
        ("a common and a rare one", ("audit", "user:rare1"), {}, True),
        ("three, one of them rare", ("audit", "pool:default/top", "user:rare1"), {}, True),
        ("two that never meet, one ends before the other begins", ("half:first", "half:second"), {}, True),
        ("two that never meet, in turns (reads both to their end)", ("parity:0", "parity:1"), {}, False),
        ("from the middle on, a common subject", ("kind:command",), {"before": middle}, True),
        ("the last minute", (), {"since": recent}, True),
        ("the last hour, a subject of the first half", ("half:first",), {"since": hour}, True),
        ("the second half, a rare subject", ("user:rare0",), {"since": last.at - number / 2}, False),
    ]
    plain_s = worst = 0.0
    for name, subjects, bounds, is_bounded in questions:
        found = len(store.read_log(subjects, **bounds))
        taken_s = measure_s(lambda: store.read_log(subjects, **bounds), READS if is_bounded else 3)  # noqa: B023
        plain_s = plain_s or taken_s
        worst = max(worst, taken_s / plain_s if is_bounded else 0.0)
        print(f"  {taken_s * 1e3:9.2f} ms  {taken_s / plain_s:8.2f}  {found:3}  {name}")
    return worst


def write_both(store: Store) -> float:
    """Write a record without and with an entry, in turns; the ratio."""
    entries = make_entries(WRITES, random.Random(2))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * WRITES):
        has_entry = number % 2 == 1
        change, entry = Change("operation", f"{number % 50}", os.urandom(800)), [next(entries)] if has_entry else []
        begun = time.perf_counter()
        store.write([change], entry)
        taken[has_entry].append(time.perf_counter() - begun)
    without_s, with_s = (statistics.median(taken[has_entry]) for has_entry in (False, True))
    print(f"a write: {without_s * 1e3:.2f} ms, with an entry {with_s * 1e3:.2f} ms, ratio {with_s / without_s:.2f}")
    return with_s / without_s


def measure_engine(place: str, number: int, read_size: Callable[[], int]) -> list[str]:
    """What is above its bound."""
    store, _ = open_place(place)
    log_bytes = fill(store, number)
    read_s = [read_all(store, number)]
    wrote = write_both(store)
    cut_s = measure_s(lambda: store.cut_log(START_AT + number, 2**50), 5)
    print(f"dropping the oldest 500: {cut_s * 1e3:.0f} ms")
    store.close()
    print(f"the store takes {read_size() / log_bytes:.2f} bytes for each that is counted")
    opened_s = measure_s(lambda: open_place(place)[0].close(), 3)  # noqa: PLW0108 - opens it each time
    print(f"opened in {opened_s:.2f} s")
    problems = [f"a filtered read takes {ratio:.1f} times one without" for ratio in read_s if ratio > READ_BOUND]
    if wrote > WRITE_BOUND:
        problems.append(f"a write with an entry takes {wrote:.1f} times one without")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--engine", choices=["sqlite", "postgresql", "both"], default="both")
    parser.add_argument("--place", default=None)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    problems: list[str] = []
    if options.engine != "postgresql":
        with tempfile.TemporaryDirectory(dir=options.place) as directory:
            path = os.path.join(directory, "scheduler.db")
            print("SQLite")
            problems += measure_engine(path, options.entries, lambda: os.path.getsize(path))
    if options.engine != "sqlite":
        with PostgresServer() as server:
            import psycopg

            def read_size() -> int:
                with psycopg.connect(server.conninfo()) as connection:
                    row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
                assert row is not None
                return int(row[0])

            print("PostgreSQL")
            problems += measure_engine(server.conninfo(), options.entries, read_size)
    for problem in problems:
        print(problem)
    return 1 if options.check and problems else 0


if __name__ == "__main__":
    sys.exit(main())
