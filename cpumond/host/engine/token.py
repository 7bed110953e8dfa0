"""The token of a service account of Kubernetes."""

from __future__ import annotations

import re
from typing import Final

from cpumond.core.errors import AccessError, describe

MAX_TOKEN_BYTES: Final = 64 << 10


def read_token(path: str) -> str:
    """The token in a file, read anew for each request: the file is replaced before it runs out.

    Raises AccessError, also for a text that no request can hold: a client's own error would tell it.
    """
    try:
        with open(path, encoding="ascii") as file:
            token = file.read(MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"{path}: {describe(error) if isinstance(error, OSError) else 'it is no text'}") from error
    if not re.fullmatch(r"[!-~]+", token):
        raise AccessError(f"{path}: it does not hold a token on one line")
    return token
