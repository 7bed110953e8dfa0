"""Tokens of the store: who may make and revoke which, what they are good for, and that they are bounded in number."""

from dataclasses import replace

import pytest
from watched_store import Watched, make_scheduler

from cpumond.scheduler.model import ACCESS_DENIED, RESOLVE, CommandError
from cpumond.scheduler.rights.token_records import TokenRecord, TokenTable
from cpumond.scheduler.rights.tokens import hash_token
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.state.token_commands import (
    MAX_OWN,
    MAX_TOKENS,
    CreateToken,
    RevokeToken,
    TokenCommand,
    decide_token,
    prepare_token,
)

HASH = hash_token("t")
ADMIN = User("root", admin=True)
ALICE = User("alice", groups=frozenset({"ml", "ops"}))


def do(tokens: TokenTable, command: TokenCommand, user: User = ADMIN, now: float = 100.0) -> str:
    change = prepare_token(tokens, command, user, now)
    for digest in change.forgotten_tokens:
        tokens.drop(digest)
    for record in change.tokens:
        tokens.put(record)
    return change.id


def refuse(tokens: TokenTable, command: TokenCommand, user: User = ADMIN, code: int | None = None) -> str:
    with pytest.raises(CommandError) as caught:
        prepare_token(tokens, command, user, 100.0)
    assert code is None or caught.value.code == code
    return str(caught.value)


def known(tokens: TokenTable, token: str) -> User:
    found = tokens.find(hash_token(token))
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (CreateToken(HASH, "bob"), "alice may create tokens only for alice, not for 'bob'"),
        *(
            (CreateToken(HASH, "alice", role=role), f'only an administrator may create a token of role "{role}"')
            for role in ("admin", "node", "proxy")
        ),
        (CreateToken(HASH, "alice", groups=("ml", "web")), "alice is not in group 'web'"),
    ],
)
def test_a_user_makes_own_tokens_without_more_rights(command: CreateToken, why: str) -> None:
    assert why in refuse(TokenTable(), command, ALICE, ACCESS_DENIED)
    assert decide_token(TokenTable(), command, ADMIN).allowed


ML = frozenset({"ml"})
MADE: dict[str, tuple[User, CreateToken, User]] = {
    # who makes which token -> whom it stands for, but for its id
    "of some groups": (ALICE, CreateToken(HASH, "alice", groups=("ml", "ml")), User("alice", groups=ML)),
    "of one who needs an entry": (
        User("alice", needs_entry=True), CreateToken(HASH, "alice"), User("alice", needs_entry=True),
    ),
    "of an administrator": (ADMIN, CreateToken(HASH, "x", role="admin"), User("x", admin=True)),
    "of nodes": (ADMIN, CreateToken(HASH, "x", role="node", pattern="r1-*"), User("x", node=True, pattern="r1-*")),
    "of a proxy": (ADMIN, CreateToken(HASH, "x", role="proxy"), User("x", proxy=True)),
}  # fmt: skip


@pytest.mark.parametrize(("maker", "command", "user"), MADE.values(), ids=MADE)
def test_whom_a_token_stands_for(maker: User, command: CreateToken, user: User) -> None:
    tokens = TokenTable()
    assert do(tokens, command, maker) == HASH[:12]
    assert known(tokens, "t") == replace(user, token_id=HASH[:12])


def test_an_administrator_who_acts_for_another_one_is_named() -> None:
    tokens = TokenTable()
    do(tokens, CreateToken(HASH, "alice"), User("alice", acting="root"))
    [record] = tokens
    assert (record.created_by, record.made_with) == ("root", "")


def test_others_tokens_are_not_revoked_and_not_told_of() -> None:
    tokens = TokenTable()
    bobs = do(tokens, CreateToken(HASH, "bob"))
    for_bobs = refuse(tokens, RevokeToken(bobs), ALICE, ACCESS_DENIED)
    assert for_bobs.replace(bobs, "nothing") == refuse(tokens, RevokeToken("nothing"), ALICE, ACCESS_DENIED)
    assert "there is no token 'nothing'" in refuse(tokens, RevokeToken("nothing"), ADMIN, RESOLVE)
    do(tokens, RevokeToken(bobs), User("bob"), 200.0)
    [record] = tokens
    assert (record.revoked_at, record.revoked_by) == (200.0, "bob")
    assert record.find_end(201.0) == "was revoked on 1970-01-01 00:03:20 UTC"


def test_a_second_revocation_changes_nothing() -> None:
    tokens = TokenTable()
    token = do(tokens, CreateToken(HASH, "bob"))
    do(tokens, RevokeToken(token), now=200.0)
    change = prepare_token(tokens, RevokeToken(token), ADMIN, 300.0)
    assert change.is_empty
    assert "was revoked on 1970-01-01 00:03:20" in change.warnings[0]


def test_a_token_made_with_another_one_does_not_outlive_it() -> None:
    tokens = TokenTable()
    first = do(tokens, CreateToken(hash_token("1"), "alice", expires_s=50.0))
    alice = known(tokens, "1")
    do(tokens, CreateToken(hash_token("2"), "alice"), alice)
    do(tokens, CreateToken(hash_token("3"), "alice", expires_s=10.0), alice)
    do(tokens, CreateToken(hash_token("4"), "alice", expires_s=500.0), alice)
    assert [record.expires_at for record in tokens] == [150.0, 150.0, 110.0, 150.0]
    assert [record.made_with for record in tokens] == ["", first, first, first]
    assert "and cannot create more with it" in refuse(tokens, CreateToken(hash_token("5"), "alice"), known(tokens, "2"))


def test_an_administrators_token_leaves_no_mark() -> None:
    tokens = TokenTable()
    do(tokens, CreateToken(hash_token("1"), "ops", role="admin", expires_s=50.0))
    do(tokens, CreateToken(hash_token("2"), "alice"), known(tokens, "1"))
    assert [record.expires_at for record in tokens] == [150.0, None]
    assert [record.made_with for record in tokens] == ["", ""]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (CreateToken(HASH, ""), "user: '' cannot be used: expected 1 to 256 printable characters"),
        (CreateToken(HASH, " a"), "expected 1 to 256 printable characters"),
        (CreateToken(HASH, "a\nb"), "expected 1 to 256 printable characters"),
        (CreateToken(HASH, "everyone"), "access lists use it as a special word"),
        (CreateToken(HASH, "a", groups=("owner",)), "group: 'owner' cannot be used"),
        (CreateToken(HASH, "a", role="node", groups=("b",)), 'a token of role "node" has none'),
        (CreateToken(HASH, "a", pattern="n*"), 'only a token of role "node" has a pattern'),
        (CreateToken(HASH, "a", role="node", pattern="\0"), "pattern: expected printable characters"),
        (CreateToken(HASH, "a", note="a\nb"), "note: expected at most 200 printable characters on one line"),
    ],
)
def test_what_no_token_can_be(command: CreateToken, why: str) -> None:
    assert why in refuse(TokenTable(), command)


def test_a_user_has_a_bounded_number_of_tokens() -> None:
    tokens = TokenTable()
    for number in range(MAX_OWN):
        do(tokens, CreateToken(hash_token(str(number)), "alice", expires_s=10.0 if number == 7 else None), ALICE)
    do(tokens, CreateToken(hash_token("x"), "alice"), ALICE, 111.0)
    assert tokens.find(hash_token("7")) is None, "the one that has expired made room"
    assert f"alice has {MAX_OWN} tokens" in refuse(tokens, CreateToken(hash_token("y"), "alice"), ALICE)
    do(tokens, CreateToken(hash_token("y"), "bob"), User("bob"))
    do(tokens, CreateToken(hash_token("z"), "alice"), ADMIN)


def test_the_scheduler_has_a_bounded_number_of_tokens() -> None:
    tokens = TokenTable()
    for number in range(MAX_TOKENS):
        digest = hash_token(str(number))
        tokens.put(TokenRecord(hash=digest, user=f"u{number}", created_at=0.0, created_by="root"))
    assert f"the scheduler has {MAX_TOKENS} tokens" in refuse(tokens, CreateToken(hash_token("x"), "alice"), ALICE)
    do(tokens, RevokeToken(hash_token("3")[:12]))
    do(tokens, CreateToken(hash_token("x"), "alice"), ALICE)
    assert len(tokens) == MAX_TOKENS
    assert tokens.find(hash_token("3")) is None


async def test_tokens_outlive_a_restart_and_the_store_has_hashes_alone(scheduler: Scheduler, store: Watched) -> None:
    made = await scheduler.execute(CreateToken(hash_token("secret-1"), "alice", groups=("ml",), note="ci"), ADMIN)
    scheduler.clock.at += 1.0  # type: ignore[attr-defined]
    other = await scheduler.execute(CreateToken(hash_token("secret-2"), "bob"), ADMIN)
    await scheduler.execute(RevokeToken(other.id), ADMIN)
    again = make_scheduler(store)
    assert list(again.state.tokens) == list(scheduler.state.tokens)
    assert known(again.state.tokens, "secret-1") == User("alice", groups=frozenset({"ml"}), token_id=made.id)
    assert not any(b"secret" in value for _, _, value in store.load())
