"""The token of a Kubernetes service account."""

from __future__ import annotations

import re
from typing import Final

from cpumond.core.errors import AccessError, describe

MAX_TOKEN_BYTES: Final = 64 << 10


def read_token(path: str) -> str:
    """Read the token in a file. Call this for each request, because the file is replaced before the token expires.

    Raises AccessError, also for a text that cannot be sent: the HTTP client's own error would reveal the text."""
    try:
        with open(path, encoding="ascii") as file:
            token = file.read(MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"{path}: {describe(error) if isinstance(error, OSError) else 'it is not text'}") from error
    if not re.fullmatch(r"[!-~]+", token):
        raise AccessError(f"{path}: it does not contain a token on one line")
    return token
