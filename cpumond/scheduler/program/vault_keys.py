"""The keys that encrypt secrets of operations, in a separate file (semantics.md 12.6).

They are for AES-256-GCM of the library ``cryptography``. The operation's id is associated data, so no vault can be put
in place of another one. Each encryption uses a random nonce of 96 bits: one key suffices for 2**32 encryptions."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from cpumond.core.errors import AccessError, ConfigError, describe
from cpumond.core.settings import find_rights_of_others
from cpumond.scheduler.rights.vaults import SealedVault, VaultError, VaultKeys

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
MAX_FILE_BYTES: Final = 65_536
SHOWN_KEY: Final = 8
"""Number of hexadecimal digits that name a key; they are from a hash, from which the key cannot be derived."""
KEY_FILE: Final = "secrets_key_file"
MAKE: Final = "(umask 077; set -C; openssl rand -base64 32 >{path})"
"""The command that makes a file with one key; it does not change an existing file."""


class FileKeys(VaultKeys):
    """The keys of a file: the first one encrypts, all of them decrypt. Raises ImportError if the library is missing."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._broken = InvalidTag
        self._ciphers: dict[str, Any] = {name_key(key): AESGCM(key) for key in keys}
        self.first = name_key(keys[0])

    def seal(self, operation_id: str, variables: Mapping[str, str]) -> SealedVault:
        nonce = os.urandom(NONCE_BYTES)
        content = self._ciphers[self.first].encrypt(nonce, msgspec.json.encode(variables), operation_id.encode())
        return SealedVault(operation_id, self.first, nonce, content)

    def open(self, vault: SealedVault) -> dict[str, str]:
        """Return the variables in the vault. Raises VaultError."""
        cipher = self._ciphers.get(vault.key)
        if cipher is None:
            raise VaultError(f"there is no key {vault.key}")
        try:
            content = cipher.decrypt(vault.nonce, vault.content, vault.operation_id.encode())
            return msgspec.json.decode(content, type=dict[str, str])
        except (self._broken, ValueError, msgspec.MsgspecError):
            raise VaultError(f"key {vault.key} does not open it") from None


def name_key(key: bytes) -> str:
    return hashlib.sha256(b"cpumond key " + key).hexdigest()[:SHOWN_KEY]


def load_keys(path: str) -> FileKeys:
    """Load the keys of a file that only its owner can read; the owner must be root or the scheduler's own user. Raises
    AccessError or ConfigError, whose sentence contains nothing of the file."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            # The open file is checked: it cannot be exchanged between the check and the reading.
            _check_file(path, os.fstat(file.fileno()))
            content = file.read(MAX_FILE_BYTES + 1)
    except PermissionError as error:
        raise AccessError(f"{path}: cannot be read: {describe(error)}; give it to the scheduler's user") from error
    except OSError as error:
        make = MAKE.format(path=path)
        raise ConfigError(f"{path}: cannot be read: {describe(error)}; create `{KEY_FILE}` with `{make}`") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes, so it is no file of keys")
    keys = _read_lines(content, path)
    try:
        return FileKeys(keys)
    except ImportError:
        raise ConfigError(
            f"{path}: `{KEY_FILE}` needs the package cryptography, 41 or later: pip install cryptography"
        ) from None


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: is not a regular file; set `{KEY_FILE}` to a file of keys")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path}: belongs to another user (number {status.st_uid}), who could read and change it; give it to the "
            "scheduler's user"
        )
    if problem := find_rights_of_others(path, status):
        raise ConfigError(f"{path}: {problem}, and put a new key before the others if other users may have read them")


def _read_lines(content: bytes, path: str) -> list[bytes]:
    keys: list[bytes] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        entry = line.strip()
        if not entry or entry.startswith(b"#"):
            continue
        try:
            key = base64.b64decode(entry, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"{path}: line {number}: expected a key, {KEY_BYTES} random bytes in base64 on one line; "
                "`openssl rand -base64 32` prints one"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path}: holds no key; add one on a line of its own, printed by `openssl rand -base64 32`")
    if len(set(keys)) != len(keys):
        raise ConfigError(f"{path}: holds a key twice; remove one of the two lines")
    return keys
