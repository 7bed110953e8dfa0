"""Secrets of operations in the store, encrypted with a key that is not stored there (semantics.md 12.6). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec


class SealedVault(msgspec.Struct, frozen=True, gc=False):
    """Encrypted environment variables of an operation's jobs. ``key``: name of the key that encrypted them."""

    operation_id: str
    key: str
    nonce: bytes
    content: bytes

    @property
    def size(self) -> int:
        """Approximate size in memory and in the store, in bytes."""
        return len(self.content) + len(self.nonce)


class VaultError(Exception):
    """A vault cannot be decrypted with these keys, or was changed."""


class VaultKeys(Protocol):
    """Keys that encrypt and decrypt secrets."""

    def seal(self, operation_id: str, variables: Mapping[str, str]) -> SealedVault: ...

    def open(self, vault: SealedVault) -> dict[str, str]:
        """Decrypt the variables. Raises VaultError."""
