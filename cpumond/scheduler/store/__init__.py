"""Where the scheduler's state is stored: records of bytes under a kind and a key, changed in batches.

A store knows nothing of what the records mean. One process writes it; readers never ask it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from cpumond.core.errors import CpumondError

UNFINISHED: Final = "unfinished copy"
"""The kind of a record that is there as long as a copy into this store is not done: no scheduler begins with it."""
TERM: Final = "term"
"""The kind of a record that keeps, in SQLite, the term of the database that was copied there."""


class StoreError(CpumondError):
    """The store cannot be opened, read or written; the message says what, where and what to do."""

    code = 105
    """A code that makes `yt` try again (yt_protocol.md 7)."""


class FencedError(StoreError):
    """The term of this store is over: another scheduler leads, or it cannot be known whether the last changes were
    made. Nothing of this term is written from now on.

    Whoever gets this gives up the lead and what it has in memory, and reads the store again when it leads again.
    """


class Change(NamedTuple):
    """A record that replaces the one under ``kind`` and ``key``; ``value`` None removes that."""

    kind: str
    key: str
    value: bytes | None


class Entry(NamedTuple):
    """A line of the store's log, which is only added to. ``at``: seconds since 1970.

    ``subjects``: what it is about, by which it is found, for example "user:alice"; ``value`` the store does not read.
    ``number``: what a copy gives it, above all that are there; 0: the next one.
    """

    at: float
    subjects: tuple[str, ...]
    value: bytes
    number: int = 0


class Store(Protocol):
    """Records and the log of one scheduler. Any backend keeps the contract of ``tests/store_contract.py``.

    Kinds, keys and subjects are any text without lone surrogates, values any bytes. Used from one thread at a time, not
    always the one that opened it, but for ``read_log``. ``lost_total``: how often another program removed the store,
    and it was written anew. ``commit_s``: how long the last write took to be made lasting.
    """

    lost_total: int
    commit_s: float

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """All records as (kind, key, value), ordered by kind, then key (by code points). Nothing is written meanwhile.

        Raises StoreError, also after some records: those are not a whole state then.
        """
        ...

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        """Make all changes in their order and add ``entries`` to the log, or nothing of it: a later change of the same
        record wins.

        They survive the end of the process and a loss of power once this returns. Raises StoreError: nothing is changed
        then and the next write may succeed. A process that is killed during a write leaves the whole batch or nothing
        of it. An empty batch only checks, and restores, the store's place, where the next process looks for it.
        """
        ...

    def read_log(
        self, subjects: Sequence[str] = (), *, before: int | None = None, since: float = 0.0, limit: int = 50
    ) -> list[tuple[int, Entry]]:
        """The newest ``limit`` entries about all of ``subjects``, numbered lower than ``before`` and not older than
        ``since``, the newest first, each with its number. Numbers rise, with gaps; none is given twice.

        May be called from any thread at any time, and waits for no write. Entries that are damaged are left out, and
        told in the program's log. Raises StoreError.
        """
        ...

    def cut_log(self, until: float, max_bytes: int) -> int:
        """Drop entries of before ``until``, and the oldest as long as the log takes more than ``max_bytes``; how many
        went: a bounded number with each call, 0 when there is nothing left to drop. Raises StoreError."""
        ...

    def close(self) -> None: ...


class Lease(NamedTuple):
    """Who leads. ``left_s``: seconds until it ends by the store's clock, at most 0 once it has."""

    term: int
    leader: str
    """The address, ``host:port``, at which the leader takes requests; "" where it told none."""
    left_s: float


class Arbiter(Protocol):
    """Decides which of several schedulers on one store leads; each has an arbiter of its own.

    Used from one thread at a time, never one that writes the store. Every method but ``close`` raises StoreError when
    the store's engine does not answer within a few seconds, and may be called again after that.
    """

    def look(self) -> Lease | None:
        """The lease as it is; None before the first one."""
        ...

    def take(self, leader: str, lease_s: float) -> Lease | None:
        """Lead from now on, with the next term, where nobody does: the lease has ended, or its holder's session has.

        None: another one leads. The sessions of the one that led before are ended, so that none of its writes is
        under way once this returns.
        """
        ...

    def renew(self, term: int, lease_s: float) -> bool:
        """Let the lease of this arbiter's own ``term`` end ``lease_s`` from now. False: it has been taken."""
        ...

    def give_up(self, term: int) -> None:
        """End the lease of this arbiter's own ``term`` now, for the next scheduler; nothing where it is taken."""
        ...

    def open_store(self, term: int) -> Store:
        """The store, for the holder of ``term``: every write checks in its own transaction that the term is the
        lease's, and raises FencedError if not. An older schema is migrated, which may take long: renew meanwhile."""
        ...

    def close(self) -> None:
        """Let go of everything, the lead included; a second call does nothing."""
        ...
