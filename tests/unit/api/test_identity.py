"""Who sends a request: by tokens of the file and of the store, by the kernel's word, by a trusted proxy."""

from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from cpumond.api.identity import Gate
from cpumond.scheduler.model import ACCESS_DENIED, AUTHENTICATION, CommandError, Rules
from cpumond.scheduler.program.config import Api
from cpumond.scheduler.program.identities import Identities
from cpumond.scheduler.rights.token_records import GROUPS_LIFE_S
from cpumond.scheduler.rights.tokens import hash_token, parse_tokens
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.state.token_commands import CreateToken, RevokeToken
from cpumond.scheduler.store.sqlite import SqliteStore

FILE = "".join(
    f"{line}\n"
    for line in (
        f"alice:{hash_token('alices')}", f"ops:{hash_token('ops')}:admin", f"n1:{hash_token('node')}:node:n1",
        f"nginx:{hash_token('nginx')}:proxy",
    )
)  # fmt: skip
PROXY = {"x_cpumond_proxy_token": "nginx", "x_remote_user": "dora"}
ADMIN = User("root", admin=True)
ALICE = User("alice", groups=frozenset({"staff"}), needs_entry=True, origin="uid 1000")


@pytest.fixture
def scheduler(store: SqliteStore) -> Scheduler:
    return Scheduler(Rules(), store, Clock())


def make_gate(scheduler: Scheduler, tokens: str | None = None, groups: Any = None, **api: Any) -> Gate:
    """``tokens``: the text of the file of tokens."""
    known = None if tokens is None else parse_tokens(tokens, "tokens")
    return Gate(Api(tokens_file="" if tokens is None else "tokens", **api), Identities(known, groups), scheduler)


def make_request(
    token: str = "", place: str = "10.0.0.7", account: User | str = "this is an unknown account", **headers: str
) -> Request:
    """A request from an address, "unix" for the socket; ``account``: the kernel's word."""
    named = {"host": "127.0.0.1:9757", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if token:
        named["authorization"] = f"Bearer {token}"
    scope = {
        "type": "http", "method": "GET", "path": "/", "query_string": b"", "scheme": "http",
        "client": None if place == "unix" else (place, 1234), "is_at_socket": place == "unix", "local_user": account,
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip
    return Request(scope)


def refuse(gate: Gate, request: Request, code: int = AUTHENTICATION) -> str:
    with pytest.raises(CommandError) as caught:
        gate.find_user(request)
    assert caught.value.code == code
    return str(caught.value)


def test_a_token_of_the_file(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE, {"ml": ("alice", "bob"), "web": ("bob",)})
    token_id = hash_token("alices")[:12]
    alice = User("alice", groups=frozenset({"ml"}), token_id=token_id, origin=f"10.0.0.7, token {token_id}")
    assert gate.find_user(make_request("alices")) == alice
    assert "the token is unknown" in refuse(gate, make_request("other"))
    assert "a token is needed" in refuse(gate, make_request())


async def test_a_token_of_the_store_until_it_is_revoked(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE, {"web": ("carol",)})

    made = await scheduler.execute(CreateToken(hash_token("carols"), "carol", groups=("ml",)), ADMIN)
    user = gate.find_user(make_request("carols"))
    assert (user.name, user.groups, user.token_id) == ("carol", {"ml", "web"}, made.id)
    await scheduler.execute(RevokeToken(made.id), ADMIN)
    assert f"the token {made.id} was revoked on 20" in refuse(gate, make_request("carols"))


async def test_a_token_of_the_store_until_it_expires(scheduler: Scheduler) -> None:
    await scheduler.execute(CreateToken(hash_token("carols"), "carol", expires_s=60.0), ADMIN)
    gate = make_gate(scheduler, FILE)
    assert gate.find_user(make_request("carols")).name == "carol"
    now = scheduler.clock.now()
    scheduler.clock = type("Later", (Clock,), {"now": lambda _: now + 61.0})()
    assert "expired on 20" in refuse(gate, make_request("carols"))


async def test_a_token_ends_with_the_one_it_was_made_with(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE)

    first = await scheduler.execute(CreateToken(hash_token("first"), "carol"), ADMIN)
    await scheduler.execute(CreateToken(hash_token("second"), "carol"), gate.find_user(make_request("first")))
    await scheduler.execute(CreateToken(hash_token("third"), "alice"), gate.find_user(make_request("alices")))
    assert gate.find_user(make_request("second")).name == "carol"
    assert gate.find_user(make_request("third")).name == "alice"
    await scheduler.execute(RevokeToken(first.id), ADMIN)
    assert f"was made with the token {first.id}, which is no longer valid" in refuse(gate, make_request("second"))
    gate.identities.take_over(Identities(parse_tokens("", "tokens")))
    assert "which is no longer valid" in refuse(gate, make_request("third")), "its line is gone from the file"


@pytest.mark.parametrize("maker", ["alices", "boss", "account"])
async def test_an_own_token_has_groups_while_its_user_has_them(scheduler: Scheduler, maker: str) -> None:
    """By [groups], by the token it was made with, which also an older store has in full, by an account's word."""
    gate = make_gate(scheduler, FILE, {"ml": ("alice",)}, socket="/s")
    await scheduler.execute(CreateToken(hash_token("boss"), "alice", groups=("web",)), ADMIN)
    by_account = make_request(place="unix", account=ALICE)
    user = gate.find_user(by_account if maker == "account" else make_request(maker))
    brought = {"alices": set(), "boss": {"web"}, "account": {"staff"}}[maker]
    assert user.groups == brought | {"ml"}

    made = await scheduler.execute(CreateToken(hash_token("own"), "alice", groups=tuple(user.groups)), user)
    record = scheduler.state.tokens.find_id(made.id)
    scheduler.state.tokens.put(
        msgspec.structs.replace(record, groups=("ml", *record.groups)) if maker == "boss" else record
    )
    assert gate.find_user(make_request("own")).groups == brought | {"ml"}
    gate.identities.take_over(Identities(gate.identities.tokens, {}))
    assert gate.find_user(make_request("own")).groups == brought
    assert gate.find_known("alice").groups == brought | {"web"}
    scheduler.clock.now = lambda: record.created_at + GROUPS_LIFE_S + 1  # type: ignore[method-assign]
    if maker == "account":
        assert "expired on 20" in refuse(gate, make_request("own")), "nobody tells what groups an account has later"
    else:
        assert gate.find_user(make_request("own")).groups == brought


def test_roles(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE)
    assert "is a node's" in refuse(gate, make_request("node"), ACCESS_DENIED)
    assert "is a proxy's" in refuse(gate, make_request("nginx"), ACCESS_DENIED)
    assert gate.find_node(make_request("node")).pattern == "n1"
    for token in ("alices", "ops"):
        with pytest.raises(CommandError, match="nodes have tokens of their own"):
            gate.find_node(make_request(token))


def test_an_administrator_acts_for_others_without_being_more_than_they(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE, {"ml": ("bob",), "web": ("ops",)})
    user = gate.find_user(make_request("ops", x_yt_user_name="bob"))
    assert (user.name, user.admin, user.acting, user.groups) == ("bob", False, "ops", {"ml"})
    assert "alice may not act for bob" in refuse(gate, make_request("alices", x_yt_user_name="bob"))
    assert gate.find_user(make_request("alices", x_yt_user_name="alice")).name == "alice"


def test_without_a_file_of_tokens_the_kernels_word_counts_on_this_machine(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler)
    root = User("root", admin=True, origin="uid 0")
    admin = User("root", admin=True, origin="127.0.0.1, uid 0")
    assert gate.find_user(make_request(place="127.0.0.1", account=root)) == admin
    assert "this is alice (uid 1000)" in refuse(gate, make_request(place="127.0.0.1", account=ALICE), ACCESS_DENIED)
    assert "a token is needed" in refuse(gate, make_request(place="10.0.0.7", account=root))
    other = make_request(place="127.0.0.1", account=root, host="evil.example")
    assert "not 'evil.example'" in refuse(gate, other, ACCESS_DENIED)
    assert gate.find_node(make_request(place="127.0.0.1", account=root)).admin


async def test_a_token_goes_before_the_kernels_word_also_an_unknown_one(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler)
    root = User("root", admin=True, origin="uid 0")
    token_id = (await scheduler.execute(CreateToken(hash_token("carols"), "carol"), ADMIN)).id
    assert gate.find_user(make_request("carols", "127.0.0.1", root)).name == "carol"
    assert gate.find_user(make_request("carols", "10.0.0.7")).origin == f"10.0.0.7, token {token_id}"
    assert gate.find_user(make_request("unknown", "127.0.0.1", root)).name == "root"


@pytest.mark.parametrize("tokens", [None, FILE])
def test_the_socket_is_for_every_account_where_it_is_configured(scheduler: Scheduler, tokens: str | None) -> None:
    gate = make_gate(scheduler, tokens, {"ml": ("alice",)}, socket="/run/s")
    user = gate.find_user(make_request(place="unix", account=ALICE))
    assert (user.name, user.groups, user.admin, user.needs_entry) == ("alice", {"staff", "ml"}, False, True)
    assert user.origin == "unix socket, uid 1000"
    with pytest.raises(CommandError, match="this is alice, and nodes have tokens of their own"):
        gate.find_node(make_request(place="unix", account=ALICE))
    over_tcp = make_request(place="127.0.0.1", account=ALICE)
    if tokens is None:
        assert gate.find_user(over_tcp).name == "alice"
    else:
        assert "a token is needed" in refuse(gate, over_tcp)
    assert "unknown account" in refuse(gate, make_request(place="unix"), ACCESS_DENIED)


def test_the_units_socket_is_for_root(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE)
    assert gate.find_user(make_request(place="unix", account=User("root", admin=True, origin="uid 0"))).admin
    refused = refuse(gate, make_request(place="unix", account=ALICE), ACCESS_DENIED)
    assert "may use this socket, and this is alice (uid 1000)" in refused
    assert gate.find_user(make_request("alices", "unix", ALICE)).name == "alice"


def test_an_address_that_is_open(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, listen="127.0.0.1:1")
    assert gate.is_open
    assert gate.find_user(make_request(place="127.0.0.1")) == User("root", admin=True, origin="127.0.0.1")
    other = gate.find_user(make_request(place="127.0.0.1", x_yt_user_name="bob"))
    assert (other.name, other.admin, other.acting) == ("bob", True, "root")
    for more in ({"socket": "/run/s"}, {"trusted_proxy": ("127.0.0.1",)}):
        closed = make_gate(scheduler, listen="127.0.0.1:1", **more)
        assert not closed.is_open
        assert "unknown account" in refuse(closed, make_request(place="127.0.0.1"), ACCESS_DENIED)


def test_who_claims_a_session_is_no_local_user(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, None, socket="/run/s")
    claim = make_request(place="unix", account=User("root", admin=True), x_cpumond_session="00")
    with pytest.raises(CommandError, match="the session is over; sign in again"):
        gate.find_user(claim, takes_session=True)


@pytest.mark.parametrize(
    ("place", "trusted"), [("127.0.0.1", "127.0.0.1"), ("10.1.2.3", "10.1.2.0/24"), ("::1", "::1"), ("unix", "unix")]
)
def test_a_proxy_names_its_users(scheduler: Scheduler, place: str, trusted: str) -> None:
    gate = make_gate(scheduler, FILE, {"ml": ("dora",)}, trusted_proxy=(trusted,))
    user = gate.find_user(make_request(place=place, x_remote_groups="web, data team,,owner", **PROXY))
    where = "unix socket" if place == "unix" else place
    assert user == User(
        "dora", groups=frozenset({"ml", "web", "data team"}), needs_entry=True, origin=f"proxy {where} (nginx)"
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"place": "10.0.0.8"}, "10.0.0.8 is not in [api] trusted_proxy"),
        ({"place": "unix"}, "unix socket is not in [api] trusted_proxy"),
        ({"x_cpumond_proxy_token": "other"}, "is no token of a proxy"),
        ({"x_cpumond_proxy_token": "ops"}, "is no token of a proxy"),
        ({"x_cpumond_proxy_token": ""}, "is no token of a proxy"),
        ({"x_remote_user": ""}, "the proxy names no user"),
        ({"x_remote_user": "(null)"}, "the proxy names no user"),
        ({"x_remote_user": "everyone"}, "the proxy names no user"),
        ({"x_yt_user_name": "root"}, "dora may not act for root"),
    ],
)
def test_who_is_not_believed(scheduler: Scheduler, more: dict[str, str], why: str) -> None:
    gate = make_gate(scheduler, FILE, trusted_proxy=("10.0.0.7",))
    assert why in refuse(gate, make_request(**{**PROXY, **more}))


def test_a_header_that_a_client_added_is_seen(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE, trusted_proxy=("10.0.0.7",))
    request = make_request(**PROXY)
    request.scope["headers"].append((b"x-remote-user", b"root"))
    assert "the proxy names no user" in refuse(gate, request)


def test_a_local_user_passes_for_no_proxy(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, None, trusted_proxy=("127.0.0.1",), socket="/run/s")
    for place in ("127.0.0.1", "unix"):
        forged = make_request(place=place, account=ALICE, x_remote_user="root")
        assert "X-Remote-User is only accepted from a proxy" in refuse(gate, forged)
    # A proxy that lost its token must not make everybody the account that it runs as.
    forwarded = make_request(place="127.0.0.1", account=User("root", admin=True), x_remote_user="dora")
    assert "X-Remote-User is only accepted from a proxy" in refuse(gate, forwarded)


def test_with_an_own_token_the_header_says_nothing(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE, trusted_proxy=("10.0.0.7",))
    assert gate.find_user(make_request("alices", x_remote_user="root")).name == "alice"
    assert "a token is needed" in refuse(gate, make_request(x_remote_user="root"))


def test_what_is_known_of_a_user_who_does_not_ask(scheduler: Scheduler) -> None:
    gate = make_gate(scheduler, FILE, {"ml": ("alice", "eve")})
    assert gate.find_known("alice") == User("alice", groups=frozenset({"ml"}))
    assert gate.find_known("eve") == User("eve", groups=frozenset({"ml"}))
    assert gate.find_known("ops") == User("ops", admin=True)
    assert gate.find_known("n1") == User("n1")
    assert make_gate(scheduler, listen="127.0.0.1:1").find_known("x").admin  # open to everybody


async def test_tokens_that_were_made_count_while_they_are_valid(scheduler: Scheduler) -> None:
    for number, (role, expires_s) in enumerate((("user", None), ("admin", 3600.0))):
        hashed = hash_token(f"made {number}")
        await scheduler.execute(CreateToken(hashed, "eve", role, "", ("red",), expires_s, ""), ADMIN)
    gate = make_gate(scheduler, FILE)
    assert gate.find_known("eve") == User("eve", admin=True, groups=frozenset({"red"}))
    scheduler.clock.now = lambda: 1e12  # type: ignore[method-assign]
    assert gate.find_known("eve") == User("eve", groups=frozenset({"red"}))
