"""Where the scheduler's state is stored: records of bytes under a kind and a key, changed in batches.

A store knows nothing of what the records mean. One process writes it; readers never ask it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from cpumond.core.errors import CpumondError


class StoreError(CpumondError):
    """The store cannot be opened, read or written; the message says what, where and what to do."""

    code = 105
    """A code that makes `yt` try again (yt_protocol.md 7)."""


class Change(NamedTuple):
    """A record that replaces the one under ``kind`` and ``key``; ``value`` None removes that."""

    kind: str
    key: str
    value: bytes | None


class Store(Protocol):
    """Records of one scheduler. Any backend keeps the contract of ``test_store_contract.py``.

    Kinds and keys are any text without lone surrogates, values any bytes. Used from one thread at a time, not always
    the one that opened it. ``lost_total``: how often another program removed the store, and it was written anew.
    """

    lost_total: int

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """All records as (kind, key, value), ordered by kind, then key (by code points). Nothing is written meanwhile.

        Raises StoreError, also after some records: those are not a whole state then.
        """
        ...

    def write(self, changes: Sequence[Change]) -> None:
        """Make all changes in their order, or none: a later change of the same record wins.

        They survive the end of the process and a loss of power once this returns. Raises StoreError: nothing is changed
        then and the next write may succeed. A process that is killed during a write leaves the whole batch or nothing
        of it. An empty batch only checks, and restores, the store's place, where the next process looks for it.
        """
        ...

    def close(self) -> None:
        """Release the store; a second call does nothing."""
        ...
