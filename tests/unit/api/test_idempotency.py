"""A change with an Idempotency-Key is made once, however often it is sent, also to a scheduler that started anew."""

from typing import Any
from unittest.mock import AsyncMock

import pytest
from starlette.testclient import TestClient

from cpumond.api.server import make_app
from cpumond.scheduler.model import NODE_OFFLINE, TIMEOUT, CommandError, Rules
from cpumond.scheduler.program.config import Api
from cpumond.scheduler.program.identities import Identities
from cpumond.scheduler.rights.tokens import hash_token, parse_tokens
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.store import StoreError
from cpumond.scheduler.store.sqlite import SqliteStore

SPEC = {"spec": {"pool": "p", "tasks": {"t": {"command": "true", "job_count": 1}}}}


class Site:
    """A scheduler on a store, and two of its users."""

    def __init__(self, store: SqliteStore) -> None:
        tokens = f"ann:{hash_token('ann')}:admin\nbob:{hash_token('bob')}:admin\n"
        self.scheduler = Scheduler(Rules(), store, Clock())
        settings, known = Api(tokens_file="tokens"), Identities(parse_tokens(tokens, "tokens"), None)
        self.client = TestClient(make_app(self.scheduler, settings, known, lambda _: b"", "c"))

    def send(self, path: str, body: Any = None, key: str = "k-1", user: str = "ann", method: str = "POST") -> Any:
        headers = {"Authorization": f"Bearer {user}", "Idempotency-Key": key}
        return self.client.request(method, f"/api/v1{path}", json=body, headers=headers)


@pytest.fixture
def site(store: SqliteStore) -> Site:
    return Site(store)


def test_a_repeat_gets_the_first_answer_and_changes_nothing(site: Site, store: SqliteStore) -> None:
    first = site.send("/operations", SPEC)
    assert first.status_code == 201
    for again in (site, Site(store)):
        answer = again.send("/operations", SPEC)
        assert (answer.status_code, answer.json()) == (201, first.json())
        assert list(again.scheduler.state.operations) == [first.json()["id"]]
    assert site.send("/operations", SPEC, key="k-2").json() != first.json()
    assert site.send("/operations", SPEC, user="bob").json() != first.json()


def test_a_refusal_is_the_same_again(site: Site) -> None:
    site.send("/trees/default/pools", {"name": "a"}, key="of-a")
    refused = [site.send("/trees/default/pools", {"name": "a"}, key="x") for _ in range(2)]
    assert [(each.status_code, each.json()["error"]) for each in refused] == [(409, refused[0].json()["error"])] * 2


@pytest.mark.parametrize(
    ("path", "body"),
    [("/operations", {"spec": {**SPEC["spec"], "pool": "other"}}), ("/trees/default/pools", {"name": "a"})],
)
def test_a_key_is_that_of_one_request(site: Site, path: str, body: Any) -> None:
    site.send("/operations", SPEC)
    answer = site.send(path, body)
    assert answer.status_code == 422
    assert "k-1 was sent with another request; make a new key for each" in answer.json()["error"]


@pytest.mark.parametrize("key", ["", "a b", "x" * 201, "a/b"])
def test_a_key_is_a_plain_word(site: Site, key: str) -> None:
    answer = site.send("/operations", SPEC, key=key)
    assert answer.status_code == 422
    assert "Idempotency-Key: expected 1 to 200" in answer.json()["error"]
    assert not site.scheduler.state.operations


def test_a_token_that_is_made_once_is_told_again_but_not_stored(site: Site, store: SqliteStore) -> None:
    first = site.send("/tokens", {"note": "of a script"})
    assert site.send("/tokens", {"note": "of a script"}).json() == first.json()
    assert len(list(site.scheduler.state.tokens)) == 1
    assert first.json()["token"] not in repr(list(store.load()))


@pytest.mark.parametrize("code", [TIMEOUT, NODE_OFFLINE, StoreError.code])
def test_what_may_pass_is_tried_again_with_the_same_key(site: Site, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """What fails for a while is no answer for a quarter of an hour."""
    with monkeypatch.context() as patch:
        patch.setattr(site.scheduler, "execute", AsyncMock(side_effect=CommandError("not now", code)))
        assert site.send("/operations", SPEC).json()["error"] == "not now"
    assert site.send("/operations", SPEC).status_code == 201


def test_a_plan_is_made_anew_each_time(site: Site) -> None:
    """It changes nothing, and may hold thousands of pools."""
    plan = {"type": "CreatePool", "tree": "default", "name": "a"}
    before = site.send("/plan", plan)
    assert before.status_code == 200
    site.send("/trees/default/pools", {"name": "a"}, key="of-a")
    assert site.send("/plan", plan).json() != before.json()
