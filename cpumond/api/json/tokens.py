"""Requests about tokens."""

from __future__ import annotations

from cpumond.api.json.call import Call
from cpumond.api.json.requests import TokenBody
from cpumond.api.token_views import NewToken, TokenList, view_tokens
from cpumond.api.views import Done
from cpumond.scheduler.model import ACCESS_DENIED, CommandError
from cpumond.scheduler.rights.token_records import GROUPS_LIFE_S
from cpumond.scheduler.rights.tokens import hash_token, make_token
from cpumond.scheduler.state.token_commands import CreateToken, RevokeToken


def list_tokens(call: Call) -> TokenList:
    return view_tokens(call.state.tokens, call.shared.file_tokens(), call.user, call.now)


async def create_token(call: Call) -> NewToken:
    """Create a token. The command, the store and all logs contain only the token's hash. Raises CommandError."""
    body: TokenBody = call.body
    if call.shared.is_open:
        # The token would still be valid once the address is protected.
        raise CommandError(
            "tokens can only be created by identified users, and here every user of this machine may do everything: "
            "set [api] tokens_file or socket, or remove [api] listen",
            ACCESS_DENIED,
        )
    token = make_token()
    name = body.user or call.user.name
    command = CreateToken(
        hash_token(token), name, body.role, body.pattern, tuple(body.groups), body.expires_s, body.note
    )
    reply = await call.scheduler.execute(command, call.user)
    record = call.state.tokens.find_id(reply.id)
    assert record is not None
    warnings = list(reply.warnings)
    end, asked = record.ends_at, None if body.expires_s is None else record.created_at + body.expires_s
    if end is not None and end != asked:
        warnings.append(
            f"it expires with the token {record.made_with}, with which it was created" if record.made_with
            else f"it expires after {GROUPS_LIFE_S / 86_400:g} days, because you may have left its groups by then"
        )  # fmt: skip
    if strange := ", ".join(sorted(set(body.groups) - set(record.groups))):
        warnings.append(f"in groups of the scheduler's [groups] it is only while these contain {name}: {strange}")
    return NewToken(record.id, token, record.user, record.role, end, warnings)


async def revoke_token(call: Call) -> Done:
    """Revoke a token from now on. Raises CommandError, also for a token of the configured file."""
    token_id = call.path["token"]
    if call.user.admin and token_id in dict(call.shared.file_tokens()):
        raise CommandError(
            f"the token {token_id} is in the scheduler's [api] tokens_file: remove its line there, and "
            "`systemctl reload cpumond-scheduler`"
        )
    reply = await call.scheduler.execute(RevokeToken(token_id), call.user)
    return Done(reply.id, list(reply.warnings))
