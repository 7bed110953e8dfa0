"""Tokens of a file, which identify users; only their hashes are kept (yt_protocol.md 9).

A line is ``user:sha256-hex[:admin|user|proxy|node[:PATTERN]]``; a user may have several tokens. The token of a node
may register the node_ids that PATTERN matches as a whole (``*``, ``?`` and ``[...]`` as in file names, case-sensitive);
without a pattern, any node_id. Blank lines and lines that begin with ``#`` are skipped. Tokens are long and random
(``make_token``); therefore one round of SHA-256 is enough."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from cpumond.core.errors import AccessError, ConfigError, describe
from cpumond.core.settings import find_rights_of_others
from cpumond.core.words import nearest
from cpumond.scheduler.rights.users import ID_DIGITS, MAX_NAME, ROLES
from cpumond.scheduler.rights.users import NOBODY as NOBODY
from cpumond.scheduler.rights.users import User as User

MAX_FILE_BYTES: Final = 16 * 2**20
TOKEN_BYTES: Final = 32
ADMIN: Final = "admin"
NODE: Final = "node"
PROXY: Final = "proxy"
MAX_PATTERN: Final = 4096
_OR_ROLES: Final = " or ".join(map(repr, ROLES))
_HASH = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)


class Tokens:
    """Users of a file, by the hashes of their tokens. Immutable."""

    __slots__ = ("_ids", "_users")

    def __init__(self, users: Mapping[str, User] | None = None) -> None:
        # Set ids here: each heartbeat looks up one of these users, and copying the user then would be most of the cost.
        self._users = {digest: replace(user, token_id=digest[:ID_DIGITS]) for digest, user in (users or {}).items()}
        self._ids = {user.token_id: user for user in self._users.values()}

    def __len__(self) -> int:
        return len(self._users)

    def __iter__(self) -> Iterator[tuple[str, User]]:
        return iter(self._ids.items())

    def __contains__(self, token_id: str) -> bool:
        return token_id in self._ids

    def find(self, digest: str) -> User | None:
        """Return the user of the token with this hash; None if the file does not have it.

        The time of the look-up reveals at most a part of a stored hash. This does not help an attacker: a text with a
        given hash, or with a hash of the same first digits, can only be found by trial."""
        return self._users.get(digest)

    def user_of(self, token: str) -> User | None:
        """Return the user of ``token``; None if the file does not have it."""
        return self.find(hash_token(token))


def hash_token(token: str) -> str:
    """Return the SHA-256 of a token in lower-case hexadecimal, as in the file; accepts any text."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def make_token() -> str:
    """Create a token of 256 random bits, safe in headers, URLs and shells."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def load_tokens(path: str) -> Tokens:
    """Load the tokens of a file that only its owner can read.

    Raises AccessError without rights to read the file. Raises ConfigError if it is missing or others can read it, and
    for an invalid line, with its number. Messages contain no hash, and no part of a line that may be a plain token."""
    try:
        # With O_NONBLOCK, opening a pipe does not wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            # The open file is checked: it cannot be exchanged between the check and the reading.
            _check_file(path, os.fstat(file.fileno()))
            content = file.read(MAX_FILE_BYTES + 1)
    except PermissionError as error:
        raise AccessError(f"{path}: cannot be read: {describe(error)}; give it to the scheduler's user") from error
    except OSError as error:
        advice = "set `api.tokens_file` to a file of tokens"
        raise ConfigError(f"{path}: cannot be read: {describe(error)}; {advice}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes, the limit of a file of tokens")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: is not UTF-8 text; write it again") from None
    return parse_tokens(text, path)


def parse_tokens(text: str, where: str) -> Tokens:
    """Parse the text of a file of tokens. ``where``: its name in messages. Raises ConfigError with the line number."""
    users: dict[str, User] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        digest, user = _parse_line(entry, f"{where}: line {number}")
        if digest in lines:
            raise ConfigError(
                f"{where}: line {number}: the hash is the same as in line {lines[digest]}; "
                "each token may have only one line: create another token"
            )
        lines[digest] = number
        users[digest] = user
    return Tokens(users)


def _parse_line(entry: str, where: str) -> tuple[str, User]:
    parts = [part.strip() for part in entry.split(":", 3)]
    if len(parts) < 2:
        raise ConfigError(
            f'{where}: expected "user:sha256-hex" or "user:sha256-hex:admin|user|proxy|node", got no colon'
        )
    name, digest, *marks = parts
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ConfigError(f"{where}: expected a user of 1 to {MAX_NAME} printable characters before the first colon")
    if not _HASH.fullmatch(digest):
        raise ConfigError(
            f"{where}: expected 64 hexadecimal digits, the SHA-256 of the token, after the user, "
            f"got {len(digest)} characters"
        )
    role = marks[0] if marks else "user"
    if role not in ROLES:
        # This text may be anything, even a token. It is shown only if it resembles a role.
        near = nearest(role.lower(), ROLES)
        got = f"got {role!r}" if near and role.isprintable() else "got something else"
        raise ConfigError(f"{where}: expected nothing or {_OR_ROLES} after the hash, {got}")
    if len(marks) > 1 and role != NODE:
        raise ConfigError(f"{where}: only {NODE!r} may be followed by a colon and a pattern of node_ids")
    pattern = marks[1] if len(marks) > 1 else ""
    if len(marks) > 1 and (not pattern or len(pattern) > MAX_PATTERN or not pattern.isprintable()):
        raise ConfigError(
            f"{where}: expected a pattern of node_ids, 1 to {MAX_PATTERN} printable characters, after {NODE + ':'!r}; "
            "leave the colon out for any node_id"
        )
    return digest.lower(), User(name, admin=role == ADMIN, node=role == NODE, proxy=role == PROXY, pattern=pattern)


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: is not a regular file; set `api.tokens_file` to a file of tokens")
    if problem := find_rights_of_others(path, status):
        raise ConfigError(f"{path}: {problem}, and create new tokens if others may have changed it")
