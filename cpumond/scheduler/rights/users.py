"""Who sends a request, as a value. Pure."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Role = Literal["admin", "user", "node", "proxy"]
"""What a token is for, see ``User``."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)

MAX_NAME: Final = 256
"""Characters of a user's name, or a group's."""

ID_DIGITS: Final = 12
"""Of a token's hash, by which lists and logs name it."""


_WORDS: Final = ("everyone", "owner")
"""What access lists call all users, and the one whom a pool or an operation belongs to."""


def find_wrong_name(name: str) -> str:
    """Why no user and no group may have this name, as half a sentence; "" for a good one."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        return f"expected 1 to {MAX_NAME} printable characters"
    return "access lists have a meaning of their own for it" if name in _WORDS else ""


@dataclass(frozen=True, slots=True)
class User:
    """The sender of a request. What a user may do is decided by the access lists of pools; an ``admin`` may do all, and
    act in another user's name.

    ``node``: may register nodes and send for them, and nothing else; ``pattern``: which node_ids, "" = any. ``proxy``:
    may name the users for whom it sends, and nothing else.
    """

    name: str
    admin: bool = False
    node: bool = False
    pattern: str = ""
    proxy: bool = False
    groups: frozenset[str] = frozenset()
    configured_groups: frozenset[str] = field(default=frozenset(), compare=False)
    """Those of ``groups`` that the scheduler's [groups] put it in, whatever it is known by."""
    token_id: str = ""
    """The first digits of the hash of its token, by which lists and the audit log name the token; "" without one."""
    origin: str = ""
    """Where the request came from and how its user is known, for the audit log."""
    acting: str = ""
    """The administrator who acts in this user's name; "" for nobody."""
    needs_entry: bool = False
    """Whether a pool without any access list is closed to this user: one who could ask nothing before there were access
    lists gains nothing by their absence."""

    def may_be(self, node_id: str) -> bool:
        """Whether a node's token is valid for this node_id."""
        return not self.pattern or fnmatch.fnmatchcase(node_id, self.pattern)

    @property
    def is_bound(self) -> bool:
        """Whether a node's token is valid for one node_id alone."""
        return bool(self.pattern) and not any(sign in self.pattern for sign in "*?[")


NOBODY: Final = User("")
"""The sender of a request that is answered without asking who sent it."""
