"""A browser's session: what its cookie is, what it counts for, and that it ends with its token."""

import pytest
from starlette.testclient import TestClient

from cpumond.api.server import make_app
from cpumond.scheduler.model import Rules
from cpumond.scheduler.program.config import Api
from cpumond.scheduler.program.identities import Identities
from cpumond.scheduler.rights.tokens import hash_token, parse_tokens
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.store.sqlite import SqliteStore

TOKENS = (
    f"alice:{hash_token('of-alice')}\nops:{hash_token('of-ops')}:admin\nn1:{hash_token('of-n1')}:node:n1\n"
    f"nginx:{hash_token('of-nginx')}:proxy\nlong:{hash_token('x' * 1025)}\n"
)
ALICE = "of-alice"
ME, SESSION, COOKIE = "/api/v1/me", "/api/v1/session", "cpumond-session-9757"
URL = "http://sched.example:9757"


def show(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def identities() -> Identities:
    return Identities(parse_tokens(TOKENS, "tokens"), None)


def make_client(store: SqliteStore, identities: Identities) -> TestClient:
    """A browser's, of a new scheduler on the store."""
    settings = Api(tokens_file="tokens", listen="0.0.0.0:9757")
    scheduler = Scheduler(Rules(), store, Clock())
    return TestClient(make_app(scheduler, settings, identities, lambda _: b"", "c"), base_url=URL)


@pytest.fixture
def client(store: SqliteStore, identities: Identities) -> TestClient:
    return make_client(store, identities)


def sign_in(client: TestClient, token: str = ALICE) -> dict[str, str]:
    """The header of the page that has signed in; the cookie is the client's."""
    answer = client.post(SESSION, headers=show(token))
    assert answer.status_code == 200, answer.text
    return {"X-Cpumond-Session": answer.json()["key"]}


@pytest.mark.parametrize(
    ("url", "origin", "is_secure"),
    [(URL, URL, False), ("https://sched.example:9757", None, True), (URL, "https://sched.example:9757", True)],
)
def test_the_cookie(client: TestClient, url: str, origin: str | None, is_secure: bool) -> None:
    headers = {**show("of-alice"), **({"Origin": origin} if origin else {})}
    answer = client.post(f"{url}{SESSION}", headers=headers)
    name, value, *attributes = answer.headers["set-cookie"].replace("; ", "=", 1).split("=", 2)
    rest = {each.strip().lower() for each in ";".join(attributes).split(";")}
    assert name == COOKIE
    assert rest == {"httponly", "path=/", "samesite=strict"} | ({"secure"} if is_secure else set())
    assert "of-alice" not in answer.text + bytes.fromhex(value).decode("latin-1")
    assert answer.json()["user"] == "alice"
    assert answer.headers["cache-control"] == "no-store"


def test_two_sessions_of_a_token_have_nothing_in_common(client: TestClient) -> None:
    first, second = sign_in(client), sign_in(client)
    assert first != second
    assert client.get(ME, headers=second).json()["user"] == "alice"
    refused = client.get(ME, headers=first)
    assert (refused.status_code, "the session is over; sign in again" in refused.text) == (401, True)


def test_both_halves_are_needed_and_neither_passes_for_a_token(client: TestClient) -> None:
    key = sign_in(client)
    cookie = client.cookies[COOKIE]
    assert client.get(ME, headers=key).json()["user"] == "alice"
    assert client.get(ME).status_code == 401
    assert client.post("/api/v1/tokens", json={}).status_code == 401
    for half in (cookie, key["X-Cpumond-Session"]):
        assert client.get(ME, headers=show(half)).status_code == 401
    for wrong in ("", "zz", "é".encode(), cookie, "00" * 8, "00"):
        assert client.get(ME, headers={"X-Cpumond-Session": wrong}).status_code == 401
    client.cookies.clear()
    assert client.get(ME, headers=key).status_code == 401


def test_it_counts_for_the_page_alone(client: TestClient) -> None:
    key = sign_in(client, "of-ops")
    assert client.get("/auth/whoami", headers=key).status_code == 401
    assert client.post("/api/v4/list", headers=key, json={"path": "/"}).status_code == 401
    node = {"node_id": "n1", "incarnation": "a", "resources": {"cpu": 1.0}}
    assert client.post("/api/v1/nodes", headers=key, json=node).status_code == 401


@pytest.mark.parametrize(
    "foreign",
    [{"Origin": "https://evil.example"}, {"Origin": "http://sched.example:8080"}, {"Sec-Fetch-Site": "same-site"},
     {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}],
)  # fmt: skip
def test_pages_of_other_sites_can_do_nothing_with_it(client: TestClient, foreign: dict[str, str]) -> None:
    key = sign_in(client)
    made = {"json": {"note": "mine"}}
    for headers in ({}, key, show("of-alice")):
        assert client.post("/api/v1/tokens", headers={**foreign, **headers}, **made).status_code in (401, 403)
        assert client.post(SESSION, headers={**foreign, **headers}).status_code in (401, 403)
    asked = client.options("/api/v1/tokens", headers={**foreign, "Access-Control-Request-Headers": "x-cpumond-session"})
    assert "access-control-allow-headers" not in asked.headers
    if "Origin" in foreign:
        assert client.delete(SESSION, headers=foreign).status_code == 403
    assert client.post("/api/v1/tokens", headers=key, **made).status_code == 201


def test_the_authorization_header_wins(client: TestClient) -> None:
    key = sign_in(client, "of-ops")
    assert client.get(ME, headers={**key, **show("of-alice")}).json()["user"] == "alice"
    for wrong in ("Bearer wrong", "Basic b3BzOng=", ""):
        assert client.get(ME, headers={**key, "Authorization": wrong}).status_code == 401


def test_rights_are_those_of_the_token(client: TestClient) -> None:
    key = sign_in(client)
    made = client.post("/api/v1/tokens", headers=key, json={}).json()
    assert client.post("/api/v1/tokens", headers=key, json={"role": "admin"}).status_code == 403
    assert client.get(ME, headers={**key, "X-YT-User-Name": "ops"}).status_code == 401
    tokens = client.get("/api/v1/tokens", headers=key).json()["tokens"]
    (record,) = [each for each in tokens if each["id"] == made["id"]]
    assert record["made_with"] == hash_token("of-alice")[:12]


@pytest.mark.parametrize("token", ["of-n1", "of-nginx", "x" * 1025, "wrong", ""])
def test_what_signs_nobody_in(client: TestClient, token: str) -> None:
    answer = client.post(SESSION, headers=show(token) if token else {})
    assert answer.status_code in (401, 403, 422), answer.text
    assert "set-cookie" not in answer.headers
    sign_in(client)
    assert client.post(SESSION, headers={"X-Cpumond-Session": "00"}).status_code == 401, "a session makes none"


def test_it_ends_with_its_token_and_never_as_somebody_else(client: TestClient, identities: Identities) -> None:
    made = client.post("/api/v1/tokens", headers=show("of-ops"), json={"user": "carl"}).json()
    key = sign_in(client, made["token"])
    assert client.get(ME, headers=key).json()["user"] == "carl"
    client.delete(f"/api/v1/tokens/{made['id']}", headers=show("of-ops"))
    refused = client.get(ME, headers=key)
    assert (refused.status_code, "was revoked" in refused.text) == (401, True)
    key = sign_in(client)
    identities.take_over(Identities(parse_tokens("", "tokens"), None))
    assert "the session is over" in client.get(ME, headers=key).text


def test_signing_out_needs_no_token(client: TestClient) -> None:
    key = sign_in(client)
    assert client.delete(SESSION).status_code == 200
    assert COOKIE not in client.cookies
    assert client.get(ME, headers=key).status_code == 401


def test_another_scheduler_on_the_store_knows_it(
    client: TestClient, store: SqliteStore, identities: Identities
) -> None:
    key = sign_in(client)
    other = make_client(store, identities)
    other.cookies = client.cookies
    assert other.get(ME, headers=key).json()["user"] == "alice"
