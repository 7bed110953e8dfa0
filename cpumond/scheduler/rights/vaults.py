"""Secrets of operations as the store keeps them: sealed, with a key that is not there (semantics.md 12.6). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec


class SealedVault(msgspec.Struct, frozen=True, gc=False):
    """The variables of an operation's jobs, sealed. ``key``: the name of the key."""

    operation_id: str
    key: str
    nonce: bytes
    content: bytes

    @property
    def size(self) -> int:
        """In bytes, roughly what it takes in memory and in the store."""
        return len(self.content) + len(self.nonce)


class VaultError(Exception):
    """A vault that these keys do not open, or that was changed."""


class VaultKeys(Protocol):
    """What seals secrets and opens them."""

    def seal(self, operation_id: str, variables: Mapping[str, str]) -> SealedVault: ...

    def open(self, vault: SealedVault) -> dict[str, str]:
        """The variables. Raises VaultError."""
        ...
