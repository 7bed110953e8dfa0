"""Store of the scheduler's state: records of bytes under a kind and a key, changed in batches.

A store does not interpret the records. One process writes it; readers of the state never query it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from cpumond.core.errors import CpumondError

UNFINISHED: Final = "unfinished copy"
"""Kind of the record that exists while a copy into this store is incomplete: no scheduler starts with such a store."""
TERM: Final = "term"
"""Kind of the record in which SQLite keeps the term of the database that was copied there."""


class StoreError(CpumondError):
    """The store cannot be opened, read or written; the message says what, where and what to do."""

    code = 105
    """Error code on which `yt` tries again (yt_protocol.md 7)."""


class FencedError(StoreError):
    """The term of this store is over: another scheduler leads, or it is unknown whether the last changes were made.
    Nothing of this term is written from now on. The caller must give up the lead and its state in memory, and load the
    store again when it leads again."""


class Change(NamedTuple):
    """A record that replaces the one under ``kind`` and ``key``; ``value`` None removes it."""

    kind: str
    key: str
    value: bytes | None


class Entry(NamedTuple):
    """An entry of the store's append-only log. ``at``: seconds since 1970. ``subjects``: index keys of the entry, for
    example "user:alice". ``value``: bytes that the store does not interpret. ``number``: set by a copy, above all
    numbers that exist; 0: the next one."""

    at: float
    subjects: tuple[str, ...]
    value: bytes
    number: int = 0


class Store(Protocol):
    """Records and log of one scheduler. Every engine fulfils the contract of ``tests/store_contract.py``.

    Kinds, keys and subjects are any text without lone surrogates, values any bytes. Used by one thread at a time, not
    always the one that opened it; ``read_log`` by any. ``lost_total``: how often another program removed the store and
    it was rewritten. ``commit_s``: seconds that the last write took to become durable.
    """

    lost_total: int
    commit_s: float

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield all records as (kind, key, value), ordered by kind, then key (by code points). No write may run
        meanwhile. Raises StoreError, possibly after some records, which are then not a whole state."""
        ...

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        """Make all changes in their order and append ``entries`` to the log, or do nothing: of two changes of a record
        the later one wins.

        They survive the end of the process and a loss of power once this returns. Raises StoreError: nothing was
        changed and the next write may succeed. A process that is killed during a write leaves the whole batch or
        nothing of it. An empty batch only checks, and restores, the files where the next process looks for them.
        """
        ...

    def read_log(
        self, subjects: Sequence[str] = (), *, before: int | None = None, since: float = 0.0, limit: int = 50
    ) -> list[tuple[int, Entry]]:
        """Return the newest ``limit`` entries about all of ``subjects``, with numbers below ``before`` and not older
        than ``since``, the newest first, each with its number. Numbers rise, with gaps; none is given twice.

        May be called from any thread at any time, and waits for no write. Damaged entries are left out and reported in
        the program's log. Raises StoreError.
        """
        ...

    def cut_log(self, until: float, max_bytes: int) -> int:
        """Drop entries older than ``until``, and the oldest while the log takes more than ``max_bytes``. Return how
        many were dropped: a bounded number per call, 0 when nothing is left to drop. Raises StoreError."""
        ...

    def close(self) -> None: ...


class Lease(NamedTuple):
    """The lease of the leader. ``left_s``: seconds until it ends by the store's clock, at most 0 once it has ended."""

    term: int
    leader: str
    """The address, ``host:port``, at which the leader takes requests; "" if it gave none."""
    left_s: float


class Arbiter(Protocol):
    """Decides which of several schedulers on one store leads; each scheduler has its own arbiter. Used by one thread at
    a time, never one that writes the store. Every method except ``close`` raises StoreError if the store's engine does
    not respond within a few seconds, and may be called again after that."""

    def look(self) -> Lease | None:
        """Return the present lease; None before the first one."""
        ...

    def take(self, leader: str, lease_s: float) -> Lease | None:
        """Take the lead with the next term if no scheduler leads: the lease, or the session of its holder, has ended.
        Return None if another scheduler leads. The sessions of the previous leader are ended, so that none of its
        writes is under way once this returns."""
        ...

    def renew(self, term: int, lease_s: float) -> bool:
        """Extend the lease of this arbiter's own ``term`` to ``lease_s`` from now. False: another scheduler has taken
        it."""
        ...

    def give_up(self, term: int) -> None:
        """End the lease of this arbiter's own ``term`` now, for the next scheduler; does nothing if it was taken."""
        ...

    def open_store(self, term: int) -> Store:
        """Open the store for the holder of ``term``: every write checks in its own transaction that the lease has this
        term, and raises FencedError if not. An older schema is migrated, which may take long: renew meanwhile."""
        ...

    def close(self) -> None:
        """Release everything, the lead included; a second call does nothing."""
        ...
