"""Who a request comes from: a file of tokens, of which only the hashes are kept (yt_protocol.md 9).

A line is ``user:sha256-hex`` or ``user:sha256-hex:admin``; a user may have several tokens. Blank lines and lines that
begin with ``#`` are left out. Tokens are long and random (``make_token``), so that one round of SHA-256 is enough.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass
from typing import Final

from cpumond.errors import AccessError, ConfigError, describe

MAX_FILE_BYTES: Final = 16 * 2**20
MAX_USER: Final = 256
"""Characters of a user's name."""

TOKEN_BYTES: Final = 32
ADMIN: Final = "admin"
_HASH = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class User:
    """Who showed a token. Everybody who has one may do everything; ``admin`` may also act in another user's name."""

    name: str
    admin: bool = False


class Tokens:
    """The users of a file by the hashes of their tokens; a value that does not change."""

    __slots__ = ("_users",)

    def __init__(self, users: tuple[tuple[str, User], ...] = ()) -> None:
        self._users = tuple((digest.encode("ascii"), user) for digest, user in users)

    def __len__(self) -> int:
        return len(self._users)

    def user_of(self, token: str) -> User | None:
        """The user of ``token``, None for one that is not in the file.

        All hashes are compared, each in constant time: how long it takes tells nothing about any of them.
        """
        shown = hash_token(token).encode("ascii")
        found: User | None = None
        for digest, user in self._users:
            if hmac.compare_digest(digest, shown):
                found = user
        return found


def hash_token(token: str) -> str:
    """The SHA-256 of a token in lower-case hex, as the file holds it; any text has one."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def make_token() -> str:
    """A new token of 256 random bits, safe in headers, URLs and shells."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def load_tokens(path: str) -> Tokens:
    """The tokens of a file that only its owner can read.

    Raises AccessError without rights; ConfigError for a file that others can read or that is missing, and for a line
    that is wrong, with its number. Messages show no hash and nothing of a line that may be a token in the clear.
    """
    try:
        # Without waiting for a writer, if it is a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            # Of what was opened, so that nothing can be exchanged between the look and the reading.
            status = os.fstat(file.fileno())
            _check_file(path, status)
            content = file.read(MAX_FILE_BYTES + 1)
    except PermissionError as error:
        raise AccessError(f"{path}: cannot be read: {describe(error)}; give it to the scheduler's user") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {describe(error)}; set `api.tokens_file` to a file of tokens"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes, which no file of tokens is")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: is not UTF-8 text; write it again") from None
    return parse_tokens(text, path)


def parse_tokens(text: str, where: str) -> Tokens:
    """The tokens of a file's text; messages call it ``where``. Raises ConfigError with the number of the line."""
    users: list[tuple[str, User]] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        digest, user = _parse_line(entry, f"{where}: line {number}")
        if digest in lines:
            raise ConfigError(
                f"{where}: line {number}: the hash is that of line {lines[digest]} again; "
                "a token belongs to one line: make another one"
            )
        lines[digest] = number
        users.append((digest, user))
    return Tokens(tuple(users))


def _parse_line(entry: str, where: str) -> tuple[str, User]:
    parts = [part.strip() for part in entry.split(":")]
    if len(parts) not in (2, 3):
        raise ConfigError(
            f'{where}: expected "user:sha256-hex" or "user:sha256-hex:admin", '
            f"got {len(parts)} part{'s' if len(parts) > 1 else ''} between colons"
        )
    name, digest, *marks = parts
    if not name or len(name) > MAX_USER or not name.isprintable():
        raise ConfigError(f"{where}: expected a user of 1 to {MAX_USER} printable characters before the first colon")
    if not _HASH.fullmatch(digest):
        raise ConfigError(
            f"{where}: expected 64 hexadecimal digits, the SHA-256 of the token, after the user, "
            f"got {len(digest)} characters"
        )
    if marks and marks[0] != ADMIN:
        # What stands here may be anything, a token too; only what is nearly the one word is shown.
        near = difflib.get_close_matches(marks[0].lower(), [ADMIN], cutoff=0.6)
        got = f"got {marks[0]!r}" if near and marks[0].isprintable() else "got something else"
        raise ConfigError(f"{where}: expected nothing or {ADMIN!r} after the hash, {got}")
    return digest.lower(), User(name, admin=bool(marks))


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: is not a regular file; set `api.tokens_file` to a file of tokens")
    mode = stat.S_IMODE(status.st_mode)
    # The copy that systemd makes for this service belongs to root; the bit of the group stands for an access list that
    # names the service's user.
    allowed = 0o040 if os.path.dirname(os.path.abspath(path)) == os.environ.get("CREDENTIALS_DIRECTORY") else 0
    if mode & 0o077 & ~allowed:
        raise ConfigError(
            f"{path}: others than its owner have rights to it (mode {mode:04o}); run `chmod 600 {path}`, "
            "and make new tokens if somebody may have changed it"
        )
