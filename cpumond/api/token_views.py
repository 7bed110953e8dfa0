"""Views of tokens: never a token or a whole hash. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from cpumond.api.figures import View
from cpumond.scheduler.rights.token_records import TokenRecord, TokenTable
from cpumond.scheduler.rights.users import Role, User


class TokenView(View, frozen=True):
    """A token by its id. Times are seconds since 1970, null if there is none.

    ``state``: whether it is valid, and if not, why; "orphaned": it was created with another token (``made_with``) that
    is no longer valid. ``source``: the store or the scheduler's token file; only the store has all facts."""

    id: str
    user: str
    role: Role
    state: Literal["valid", "expired", "revoked", "orphaned"]
    source: Literal["store", "file"]
    pattern: str
    groups: list[str]
    note: str
    created_at: float | None
    created_by: str
    made_with: str
    expires_at: float | None
    revoked_at: float | None
    revoked_by: str


class TokenList(View, frozen=True):
    """The user's tokens (for an administrator, all): first those of the file, then those of the store, oldest first."""

    tokens: list[TokenView]


class NewToken(View, frozen=True):
    """A new token. ``token`` is shown only this once and is stored nowhere."""

    id: str
    token: str
    user: str
    role: Role
    expires_at: float | None
    warnings: list[str]


def view_tokens(table: TokenTable, of_file: Iterable[tuple[str, User]], user: User, now: float) -> TokenList:
    in_file = dict(of_file)
    shown = [
        TokenView(
            token_id, each.name, _role_of(each), "valid", "file", each.pattern, [], "", None, "", "", None, None, ""
        )
        for token_id, each in in_file.items()
        if user.admin or each.name == user.name
    ]
    shown += [_view(each, table, in_file, now) for each in table if user.admin or each.user == user.name]
    return TokenList(shown)


def _view(record: TokenRecord, table: TokenTable, in_file: dict[str, User], now: float) -> TokenView:
    state: Literal["valid", "expired", "revoked", "orphaned"] = "valid"
    if record.revoked_at is not None:
        state = "revoked"
    elif record.find_end(now):
        state = "expired"
    elif record.made_with and record.made_with not in in_file:
        maker = table.find_id(record.made_with)
        state = "orphaned" if maker is None or maker.find_end(now) else "valid"
    groups = sorted(table.user_of(record).groups)
    return TokenView(
        record.id, record.user, record.role, state, "store", record.pattern, groups, record.note,
        record.created_at, record.created_by, record.made_with, record.ends_at, record.revoked_at, record.revoked_by,
    )  # fmt: skip


def _role_of(user: User) -> Role:
    return "admin" if user.admin else "node" if user.node else "proxy" if user.proxy else "user"
