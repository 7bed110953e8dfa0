"""Commands on stored tokens, and the rights to create and revoke tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec

from cpumond.scheduler.model import ACCESS_DENIED, RESOLVE, CommandError
from cpumond.scheduler.rights.entries import Verdict
from cpumond.scheduler.rights.token_records import TokenRecord, TokenTable
from cpumond.scheduler.rights.users import ID_DIGITS, MAX_NAME, Role, User, find_wrong_name
from cpumond.scheduler.state.transaction import Transaction

MAX_TOKENS: Final = 10_000
MAX_OWN: Final = 100
"""Maximum number of tokens of a user without administrator rights. Revoked and expired tokens count while kept."""

MAX_NOTE: Final = 200
MIN_LIFE_S: Final = 1.0
MAX_LIFE_S: Final = 20 * 365 * 86_400.0

Life = Annotated[float, msgspec.Meta(ge=MIN_LIFE_S, le=MAX_LIFE_S)]
"""Seconds until a token expires."""


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of the commands: the name of the type is the tag ``type`` in JSON."""


class CreateToken(_Command, frozen=True):
    """Create a token; the command has only its hash. ``expires_s``: seconds from now, None if it never expires."""

    hash: str
    user: str
    role: Role = "user"
    pattern: str = ""
    groups: tuple[str, ...] = ()
    expires_s: Life | None = None
    note: str = ""


class RevokeToken(_Command, frozen=True):
    """Revoke a token."""

    id: str


TokenCommand = CreateToken | RevokeToken


def decide_token(tokens: TokenTable, command: TokenCommand, user: User) -> Verdict:
    """Decide whether the user may create or revoke a token: an administrator any token, others their own tokens."""
    if user.admin:
        return Verdict(True, f"{user.name} is an administrator")
    if isinstance(command, RevokeToken):
        record = tokens.find_id(command.id)
        # The refusal does not reveal whether others have such a token.
        if record is None or record.user != user.name:
            no_token = f"{user.name} has no token {_quote(command.id)}"
            return Verdict(False, f"{no_token}, and only an administrator may revoke others'")
        return Verdict(True, f"it is {user.name}'s own token")
    maker = tokens.find_id(user.token_id)
    if command.user != user.name:
        why = f"{user.name} may create tokens only for {user.name}, not for {_quote(command.user)}"
    elif command.role != "user":
        why = f'only an administrator may create a token of role "{command.role}"'
    elif strange := sorted(set(command.groups) - user.groups):
        why = f"{user.name} is not in group {_quote(strange[0])}"
    elif maker is not None and maker.made_with:
        why = f"{user.name} made the token {maker.id} with another one, and cannot create more with it; use that one"
    else:
        return Verdict(True, f"{user.name} may create tokens for {user.name}, without more rights")
    return Verdict(False, f"{why}; ask an administrator")


def prepare_token(tokens: TokenTable, command: TokenCommand, user: User, now: float) -> Transaction:
    """Return the change that a command makes; the state stays as it is. Raises CommandError if it is refused."""
    verdict = decide_token(tokens, command, user)
    if not verdict.allowed:
        raise CommandError(verdict.because, ACCESS_DENIED)
    if isinstance(command, RevokeToken):
        return _prepare_revocation(tokens, command, user, now)
    _check(command)
    if tokens.find_id(command.hash[:ID_DIGITS]) is not None:
        raise CommandError("a token with this id exists; create another one")
    maker = None if user.admin else tokens.find_id(user.token_id)
    record = TokenRecord(
        hash=command.hash, user=command.user, role=command.role, pattern=command.pattern,
        groups=tuple(sorted(set(command.groups) - (frozenset() if user.admin else user.configured_groups))),
        needs_entry=user.needs_entry, note=command.note, created_at=now, created_by=user.acting or user.name,
        made_with="" if user.admin else user.token_id, expires_at=_find_end(command.expires_s, maker, now),
    )  # fmt: skip
    forgotten = tuple(_find_forgotten(tokens, record, user.admin, now))
    return Transaction(tokens=(record,), forgotten_tokens=forgotten, id=record.id)


def _prepare_revocation(tokens: TokenTable, command: RevokeToken, user: User, now: float) -> Transaction:
    record = tokens.find_id(command.id)
    if record is None:
        raise CommandError(f"there is no token {_quote(command.id)}; `cpumond token list` shows all", RESOLVE)
    if record.revoked_at is not None:
        return Transaction(id=record.id, warnings=(f"the token {record.id} {record.find_end(now)}",))
    revoked = msgspec.structs.replace(record, revoked_at=now, revoked_by=user.acting or user.name)
    return Transaction(tokens=(revoked,), id=record.id)


def _find_end(life_s: float | None, maker: TokenRecord | None, now: float) -> float | None:
    """Return when a new token expires: no later than ``maker`` does, the token used to create it."""
    asked = None if life_s is None else now + life_s
    bound = None if maker is None else maker.ends_at
    return asked if bound is None else bound if asked is None else min(asked, bound)


def _find_forgotten(tokens: TokenTable, new: TokenRecord, is_admin: bool, now: float) -> Iterator[str]:
    """Return the hashes of invalid tokens to drop, oldest first. Raises CommandError for too many valid ones."""
    own = [each for each in tokens if each.user == new.user]
    bounds: list[tuple[Iterable[TokenRecord], int, int, str]] = [(tokens, len(tokens), MAX_TOKENS, "the scheduler has")]
    if not is_admin:
        bounds.insert(0, (own, len(own), MAX_OWN, f"{new.user} has"))
    for records, number, most, who in bounds:
        if number < most:
            continue
        ended = next((each for each in records if each.find_end(now)), None)
        if ended is None:
            raise CommandError(f"{who} {most} tokens, which is the limit; revoke one that is not needed")
        yield ended.hash
        return


def _check(command: CreateToken) -> None:
    """Raise CommandError for an invalid name, group, pattern or note."""
    _check_name(command.user, "user")
    for group in command.groups:
        _check_name(group, "group")
    if command.groups and command.role not in ("user", "admin"):
        raise CommandError(f'groups: a token of role "{command.role}" has none; leave them out')
    if command.pattern and command.role != "node":
        raise CommandError('pattern: only a token of role "node" has a pattern of node_ids; leave it out')
    if not command.pattern.isprintable():
        raise CommandError("pattern: expected printable characters, such as rack1-*")
    if not command.note.isprintable():
        raise CommandError(f"note: expected at most {MAX_NOTE} printable characters on one line")


def _check_name(name: str, what: str) -> None:
    if problem := find_wrong_name(name):
        raise CommandError(f"{what}: {_quote(name)} cannot be used: {problem}; choose another name")


def _quote(text: str) -> str:
    return repr(text[:MAX_NAME])
