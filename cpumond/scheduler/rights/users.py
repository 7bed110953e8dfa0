"""Users who send requests, as values. Pure."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Role = Literal["admin", "user", "node", "proxy"]
"""Purpose of a token; see ``User``."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)

MAX_NAME: Final = 256
"""Maximum number of characters in the name of a user or group."""

ID_DIGITS: Final = 12
"""Number of digits of a token's hash by which lists and logs name the token."""


_WORDS: Final = ("everyone", "owner")
"""Words that stand in access lists for all users, and for the owner of a pool or an operation."""


def find_wrong_name(name: str) -> str:
    """Return why no user or group may have this name, as the end of a sentence; "" for a valid name."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        return f"expected 1 to {MAX_NAME} printable characters"
    return "access lists use it as a special word" if name in _WORDS else ""


@dataclass(frozen=True, slots=True)
class User:
    """Sender of a request. The access lists of pools decide what a user may do. An ``admin`` may do everything, and act
    in the name of other users.

    ``node``: may only register nodes and send their heartbeats. ``pattern``: matches the node_ids that it may use; ""
    for any. ``proxy``: may only send requests for users whom it names."""

    name: str
    admin: bool = False
    node: bool = False
    pattern: str = ""
    proxy: bool = False
    groups: frozenset[str] = frozenset()
    configured_groups: frozenset[str] = field(default=frozenset(), compare=False)
    """The part of ``groups`` that the configuration's [groups] assigns, regardless of how the user is identified."""
    token_id: str = ""
    """First digits of the hash of the user's token, by which lists and the audit log name it; "" without a token."""
    origin: str = ""
    """Origin of the request and how its user is identified, for the audit log."""
    acting: str = ""
    """Administrator who acts in this user's name; "" if there is none."""
    needs_entry: bool = False
    """Whether a pool without any access list is closed to this user. True for users who could not send requests at all
    before access lists existed: missing lists give them no rights."""

    def may_be(self, node_id: str) -> bool:
        """Return whether a node's token is valid for this node_id."""
        return not self.pattern or fnmatch.fnmatchcase(node_id, self.pattern)

    @property
    def is_bound(self) -> bool:
        """Return whether a node's token is valid for only one node_id."""
        return bool(self.pattern) and not any(sign in self.pattern for sign in "*?[")


NOBODY: Final = User("")
"""Sender of a request that is answered without identifying the sender."""
