"""Store of the scheduler's state: records of bytes, each under a kind and a key, changed in batches.

A store does not interpret the records. One process writes them. Code that reads the state never queries the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from cpumond.core.errors import CpumondError

UNFINISHED: Final = "unfinished copy"
"""Kind of the record that exists while a copy into this store is incomplete; no scheduler starts on such a store."""
TERM: Final = "term"
"""Kind of the record in which SQLite keeps the term of a database that was copied into it."""


class StoreError(CpumondError):
    """The store cannot be opened, read or written; the message has the reason, the place and what to do."""

    code = 105
    """Error code after which `yt` tries again (yt_protocol.md 7)."""


class FencedError(StoreError):
    """The term of this store is over: another scheduler leads, or it is unknown whether the last changes were made. The
    store writes nothing more in this term. The caller must give up the lead and its state in memory, and load the store
    again when it leads again."""


class Change(NamedTuple):
    """A record to write in place of the one under ``kind`` and ``key``; ``value`` None removes that one."""

    kind: str
    key: str
    value: bytes | None


class Entry(NamedTuple):
    """An entry of the store's append-only log. ``at``: seconds since 1970. ``subjects``: index keys of the entry, for
    example "user:alice". ``value``: bytes that the store does not interpret. ``number``: 0 for the next number; a copy
    sets a number above all that exist."""

    at: float
    subjects: tuple[str, ...]
    value: bytes
    number: int = 0


class Store(Protocol):
    """Records and log of one scheduler. Every implementation fulfils the contract of ``tests/store_contract.py``.

    Kinds, keys and subjects are any text without lone surrogates; values are any bytes. A store is used by one thread
    at a time, not necessarily the one that opened it; any may call ``read_log``. ``lost_total``: how often another
    program removed it and it was rewritten. ``commit_s``: seconds in which the last write became durable."""

    lost_total: int
    commit_s: float

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield all records as (kind, key, value), ordered by kind, then key (by code points). Nothing may be written
        until the end. Raises StoreError, possibly after some records: these are only a part of the state."""

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        """Make all changes in their order and append ``entries`` to the log, or do nothing. If two changes concern one
        record, the later one counts.

        Once this returns, the changes survive the end of the process and a loss of power. Raises StoreError: nothing
        was changed, and the next write may succeed. A process killed during a write leaves the whole batch or nothing
        of it. An empty batch only restores files of the store that have been removed."""

    def read_log(
        self, subjects: Sequence[str] = (), *, before: int | None = None, since: float = 0.0, limit: int = 50
    ) -> list[tuple[int, Entry]]:
        """Return the ``limit`` newest entries about all of ``subjects`` with numbers below ``before`` and not older
        than ``since``; the newest first, each with its number. Numbers rise, with gaps; none is given twice.

        May be called from any thread at any time; does not wait for writes. Damaged entries are left out and reported
        in the program's log. Raises StoreError."""

    def cut_log(self, until: float, max_bytes: int) -> int:
        """Drop entries older than ``until``, and the oldest while the log takes more than ``max_bytes``. Return the
        number of dropped entries, which is limited per call; 0 if nothing is left to drop. Raises StoreError."""

    def close(self) -> None: ...


class Lease(NamedTuple):
    """The lease of the leader. ``left_s``: seconds until it ends by the store's clock; 0 or less if it has ended."""

    term: int
    leader: str
    """The address, ``host:port``, at which the leader takes requests; "" if it has published none."""
    left_s: float


class Arbiter(Protocol):
    """Decides which of several schedulers on one store leads; each scheduler has its own arbiter. Used by one thread at
    a time, never by one that writes the store. Every method except ``close`` raises StoreError if the store's engine
    does not respond within a few seconds; after that it may be called again."""

    def look(self) -> Lease | None:
        """Return the present lease; None if there was none yet."""

    def take(self, leader: str, lease_s: float) -> Lease | None:
        """Take the lead with the next term if no scheduler leads, that is, if the lease or its holder's session has
        ended. Return None if another scheduler leads. Ends the sessions of the previous leader: none of its writes is
        in progress once this returns."""

    def renew(self, term: int, lease_s: float) -> bool:
        """Extend the lease of this arbiter's ``term`` until ``lease_s`` from now. False if another took it."""

    def give_up(self, term: int) -> None:
        """End the lease of this arbiter's ``term`` so that another can lead; does nothing if one already leads."""

    def open_store(self, term: int) -> Store:
        """Open the store for the holder of ``term``. Every write checks in its transaction that the lease has this
        term, or raises FencedError. An older schema is migrated, which may take long: renew meanwhile."""

    def close(self) -> None:
        """Release everything, including the lead; a second call does nothing."""
