"""Copying of a scheduler's state from one store to another, with a check that reads it back."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from cpumond.core.errors import RefusedError, UsageError
from cpumond.core.words import count
from cpumond.scheduler.store import TERM, UNFINISHED, Change, Entry, Store, StoreError
from cpumond.scheduler.store.places import describe_place, is_conninfo, make_term, open_place

BATCH_RECORDS = 1000
BATCH_BYTES = 4 * 2**20

Record = tuple[str, str, bytes]


class Copied(NamedTuple):
    """``entries``: their number in the log. ``checksum``: SHA-256, in hex, of all that was read back from the copy."""

    records: int
    entries: int
    checksum: str


def copy_store(source: str, destination: str, show: Callable[[str], None] = lambda _: None) -> Copied:
    """Copy the records and log of a store that no scheduler uses to an empty store. ``show``: reports the progress.

    An incomplete copy in the destination is removed first. The term is copied, too: in PostgreSQL the next leader's
    term is higher than it; SQLite keeps it for copying back. Raises UsageError; RefusedError if the destination is not
    empty; StoreError, ConfigError, UnavailableError."""
    if describe_place(source) == describe_place(destination):
        raise UsageError("--from and --to: are the same store")
    with contextlib.ExitStack() as stack:
        store, term = open_place(source, is_new=False)
        stack.callback(store.close)
        if any(kind == UNFINISHED for kind, _, _ in store.load()):
            raise RefusedError(f"{describe_place(source)}: holds an incomplete copy; copy into it again first")
        target, _ = open_place(destination, above=term)
        stack.callback(target.close)
        _make_empty(target, describe_place(destination))
        target.write([Change(UNFINISHED, UNFINISHED, b"{}")])
        expected = _Sum()
        for batch in _batches(expected.pass_on(_records(store))):
            target.write(batch)
            show(f"{expected.records} records copied")
        for count_copied in _copy_log(store, target, expected):
            show(f"{count_copied} entries of the log copied")
        found = _Sum()
        for _ in found.pass_on(_records(target)):
            if found.records % BATCH_RECORDS == 0:
                show(f"{found.records} of {expected.records} records compared")
        for page in _list_pages(target):
            found.add_entries(page)
            show(f"{found.entries} of {expected.entries} entries of the log compared")
        if found.result != expected.result:
            raise StoreError(
                f"{describe_place(destination)}: the data read back differs from the data written ({found.records} of "
                f"{expected.records} records, {found.entries} of {expected.entries} log entries); look for disk "
                "errors in the system's log, then copy again"
            )
        last = [Change(UNFINISHED, UNFINISHED, None)]
        if not is_conninfo(destination) and term:
            last.append(make_term(term))
        target.write(last)
    return expected.result


def _make_empty(store: Store, where: str) -> None:
    """Remove what is left of an incomplete copy. Raises RefusedError if the store contains anything else."""
    places = [(kind, key) for kind, key, _ in store.load()]
    if (places or store.read_log(limit=1)) and not any(kind == UNFINISHED for kind, _ in places):
        raise RefusedError(
            f"{where}: holds {count(len(places), 'record')}; the destination must be empty: give another one, or "
            "recreate it (SQLite: move the file away; PostgreSQL: DROP and CREATE the database)"
        )
    # The mark is removed last: an interrupted removal is then recognised the next time.
    rest = [Change(kind, key, None) for kind, key in places if kind != UNFINISHED]
    for begin in range(0, len(rest), BATCH_RECORDS):
        store.write(rest[begin : begin + BATCH_RECORDS])
    while store.cut_log(math.inf, 0):
        pass


def _copy_log(source: Store, target: Store, expected: _Sum) -> Iterator[int]:
    """Copy the log, its oldest page first, since numbers must rise. Yield how many entries have been copied so far."""
    newest: list[int] = []
    for page in _list_pages(source):
        expected.add_entries(page)
        newest.append(page[0][0])
    copied = 0
    for number in reversed(newest):
        page = source.read_log(before=number + 1, limit=BATCH_RECORDS)
        target.write([], [entry._replace(number=number) for number, entry in reversed(page)])
        copied += len(page)
        yield copied


def _list_pages(store: Store) -> Iterator[list[tuple[int, Entry]]]:
    before: int | None = None
    while page := store.read_log(before=before, limit=BATCH_RECORDS):
        yield page
        before = page[-1][0]


def _records(store: Store) -> Iterator[Record]:
    return (record for record in store.load() if record[0] not in (TERM, UNFINISHED))


class _Sum:
    """Number and checksum of records, in their order, and of entries of the log, the newest first."""

    def __init__(self) -> None:
        self.records = 0
        self.entries = 0
        self._hash = hashlib.sha256()

    def pass_on(self, records: Iterable[Record]) -> Iterator[Record]:
        for kind, key, value in records:
            self.records += 1
            self._add(kind.encode(), key.encode(), value)
            yield kind, key, value

    def add_entries(self, page: Iterable[tuple[int, Entry]]) -> None:
        for number, entry in page:
            self.entries += 1
            self._add(b"%d %a" % (number, entry.at), *map(str.encode, entry.subjects), entry.value)

    def _add(self, *parts: bytes) -> None:
        self._hash.update(b"%b\n" % b" ".join(b"%d" % len(part) for part in parts))
        for part in parts:
            self._hash.update(part)

    @property
    def result(self) -> Copied:
        return Copied(self.records, self.entries, self._hash.hexdigest())


def _batches(records: Iterable[Record]) -> Iterator[list[Change]]:
    batch: list[Change] = []
    size = 0
    for record in records:
        batch.append(Change(*record))
        size += len(record[2])
        if len(batch) == BATCH_RECORDS or size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
