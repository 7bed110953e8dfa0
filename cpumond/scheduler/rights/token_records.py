"""Records of tokens that are created and revoked while the scheduler runs. Pure.

The store contains only hashes. A token that was created with another token of its user becomes invalid with that one at
the latest: revoking a stolen token also revokes the tokens created with it. A token loses groups that its user leaves:
groups from [groups] are not stored, and other groups count only while the creating token has them. If there is no
creating token, because an account or a proxy identified the user, the token ends after GROUPS_LIFE_S."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import msgspec

from cpumond.core.words import format_utc
from cpumond.scheduler.rights.users import ID_DIGITS, Role, User

GROUPS_LIFE_S: Final = 30 * 86_400.0
"""Maximum seconds for which a token is valid if it has groups of a user who was identified without a token."""


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored token, under its ``hash``. Times are seconds since 1970.

    ``needs_entry``: as in ``User``, for the user who created the token. ``made_with``: id of the token with which its
    user created it; "" if an administrator, or a user who was identified without a token, created it."""

    hash: str
    user: str
    role: Role = "user"
    pattern: str = ""
    groups: tuple[str, ...] = ()
    needs_entry: bool = False
    note: str = ""
    created_at: float
    created_by: str
    made_with: str = ""
    expires_at: float | None = None
    revoked_at: float | None = None
    revoked_by: str = ""

    @property
    def id(self) -> str:
        return self.hash[:ID_DIGITS]

    @property
    def ends_at(self) -> float | None:
        """Return when the token ends unless it is revoked before; None if it never ends."""
        if not self.groups or not self.needs_entry or self.made_with:
            return self.expires_at
        bound = self.created_at + GROUPS_LIFE_S
        return bound if self.expires_at is None else min(bound, self.expires_at)

    def find_end(self, now: float) -> str:
        """Return why the token is no longer valid, as the end of a sentence; "" if it is valid."""
        if self.revoked_at is not None:
            return f"was revoked on {format_utc(self.revoked_at)}"
        end = self.ends_at
        return f"expired on {format_utc(end)}" if end is not None and now >= end else ""

    def make_user(self) -> User:
        return User(
            self.user, admin=self.role == "admin", node=self.role == "node", proxy=self.role == "proxy",
            pattern=self.pattern, groups=frozenset(self.groups), token_id=self.id, needs_entry=self.needs_entry,
        )  # fmt: skip


class TokenTable:
    """All tokens of the store, by hash and by id."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[TokenRecord, User]] = {}
        self._hashes: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TokenRecord]:
        """Iterate in the order of creation."""
        return (record for record, _ in self._records.values())

    def put(self, record: TokenRecord) -> None:
        """Install a record. It replaces a record with the same hash."""
        self._records[record.hash] = record, record.make_user()
        self._hashes[record.id] = record.hash

    def drop(self, digest: str) -> None:
        found = self._records.pop(digest, None)
        if found is not None:
            del self._hashes[found[0].id]

    def find(self, digest: str) -> tuple[TokenRecord, User] | None:
        """Return the token with this hash, valid or not, and its user; see ``Tokens.find``."""
        found = self._records.get(digest)
        return (found[0], self.user_of(found[0])) if found is not None and found[0].made_with else found

    def user_of(self, record: TokenRecord) -> User:
        """Return the user of a token. If another token created it, groups that the other one lacks are removed."""
        user = record.make_user()
        maker = self.find_id(record.made_with) if record.made_with else None
        kept = user.groups & frozenset(() if maker is None else maker.groups)
        return replace(user, groups=kept) if record.made_with else user

    def find_id(self, token_id: str) -> TokenRecord | None:
        """Return the token with this id, valid or not."""
        found = self._records.get(self._hashes.get(token_id, ""))
        return None if found is None else found[0]
