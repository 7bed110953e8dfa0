"""The token for a receiver or the scheduler. It is read from a file that only the file's owner may read."""

from __future__ import annotations

import os

from cpumond.core.errors import AccessError, ConfigError, describe
from cpumond.core.settings import find_rights_of_others

MAX_TOKEN_BYTES = 4096


def read_token(path: str) -> str:
    """Read the bearer token in a file: one line of visible ASCII, at most 4096 bytes; whitespace around it is ignored.

    Raises AccessError if the file may not be read, and ConfigError for every other fault, also if users other than
    the owner can read the file. Neither message shows the content."""
    try:
        with open(path, "rb") as file:
            problem = find_rights_of_others(path, os.fstat(file.fileno()))
            raw = file.read(MAX_TOKEN_BYTES + 1)
    except PermissionError as error:
        raise AccessError(f"token file {path}: {describe(error)}; make it readable for this user") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"token file {path}: {describe(error)}") from None
    if problem:
        raise ConfigError(f"token file {path}: {problem}")
    return check_token(raw, f"token file {path}")


def check_token(raw: bytes, where: str) -> str:
    """Return the token in ``raw``. Raises ConfigError; its message contains ``where``, but not the token."""
    token = raw.strip()
    if not token:
        raise ConfigError(f"{where}: is empty; it must hold the token on one line")
    if len(raw) > MAX_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(
            f"{where}: must hold one line of visible ASCII characters without spaces, at most {MAX_TOKEN_BYTES} bytes"
        )
    return token.decode("ascii")
