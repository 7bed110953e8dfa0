"""Commands with several schedulers of which one leads."""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from cpumond.cli.scheduler import http_client as client_module
from cpumond.cli.scheduler.http_client import SchedulerClient, SchedulerRefusedError, read_urls
from cpumond.core.errors import UnavailableError, UsageError
from cpumond.core.route import LOST_LEAD

A, B = "http://a:9757", "http://b:9757"
Scheduler = Callable[[httpx2.Request], httpx2.Response]


class Site:
    """Schedulers by host, and what they were sent; time passes only while the client waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.schedulers: dict[str, Scheduler] = {}
        self.requests: list[str] = []
        self.now = 0.0
        monkeypatch.setattr(httpx2, "HTTPTransport", lambda **_: httpx2.MockTransport(self.answer))
        monkeypatch.setattr(client_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(client_module.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(f"{request.method} {request.url.host}")
        if request.url.host not in self.schedulers:
            raise httpx2.ConnectError("[Errno 111] Connection refused")
        return self.schedulers[request.url.host](request)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


def lead(term: int | None = None) -> Scheduler:
    return lambda _: httpx2.Response(200, json={"led": True}, headers={"X-Cpumond-Term": str(term)} if term else {})


def refuse(status: int, error: str, leader: str = "") -> Scheduler:
    content: dict[str, Any] = {"error": error, "code": 105, "attributes": {}}
    return lambda _: httpx2.Response(status, json=content, headers={"X-Cpumond-Leader": leader} if leader else {})


def stand_by(leader: str = "") -> Scheduler:
    return refuse(503, f"standby: the scheduler at {leader or 'nowhere'} leads (term 1)", leader)


def hang(_: httpx2.Request) -> httpx2.Response:
    raise httpx2.ReadTimeout("")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_standby_and_a_dead_one_lead_to_the_leader(site: Site, method: str):
    site.schedulers |= {"b": stand_by("c:9757"), "c": lead(1)}
    client = SchedulerClient([A, B])
    assert json.loads(client.request(method, "/x", {})) == {"led": True}
    assert site.requests == [f"{method} a", f"{method} b", f"{method} c"]
    client.request(method, "/x", {})
    assert (site.requests[3:], site.now) == ([f"{method} c"], 0.0)


def test_a_command_waits_for_the_end_of_a_take_over(site: Site):
    def answer(request: httpx2.Request) -> httpx2.Response:
        return (stand_by("a:9757") if site.now < 9.0 else lead(2))(request)

    site.schedulers["b"] = answer
    SchedulerClient([A, B]).request("POST", "/x")
    assert 9.0 <= site.now < 13.0


def test_nobody_leads(site: Site):
    site.schedulers["b"] = stand_by()
    with pytest.raises(SchedulerRefusedError, match="standby: the scheduler at nowhere leads"):
        SchedulerClient([A, B], patience_s=5.0).request("GET", "/x")
    assert 3.0 <= site.now <= 5.0


def test_nobody_answers(site: Site):
    with pytest.raises(UnavailableError, match=r"answers on http://a:9757 \(Connection .*\) or http://b:9757 \(Conn"):
        SchedulerClient([A, B]).request("GET", "/x")
    assert (site.requests, site.now) == (["GET a", "GET b"], 0.0)


def test_a_question_is_asked_elsewhere_and_a_change_is_not(site: Site):
    site.schedulers |= {"a": hang, "b": lead()}
    SchedulerClient([A, B]).request("GET", "/x")
    with pytest.raises(UnavailableError, match="a:9757: the scheduler did not answer in 30 s"):
        SchedulerClient([A, B]).request("POST", "/x")
    site.schedulers["a"] = refuse(503, LOST_LEAD)  # who leads now it does not know yet
    SchedulerClient([A, B]).request("GET", "/x")
    with pytest.raises(SchedulerRefusedError, match="whether the request was carried out is not known"):
        SchedulerClient([A, B]).request("POST", "/x")
    assert site.requests.count("POST b") == 0


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500, 503])
def test_a_refusal_is_the_answer(site: Site, status: int):
    site.schedulers |= {"a": refuse(status, "no"), "b": lead()}
    with pytest.raises(SchedulerRefusedError, match="no"):
        SchedulerClient([A, B]).request("GET", "/x")


def test_an_answer_of_a_lower_term_is_not_shown(site: Site):
    site.schedulers |= {"a": lead(5), "b": lead(6)}
    client = SchedulerClient([A, B])
    client.request("GET", "/x")
    site.schedulers["a"] = hang
    client.request("GET", "/x")
    site.schedulers |= {"a": lead(5), "b": lead(5)}
    with pytest.raises(UnavailableError, match="answered in term 5, but term 6 has begun"):
        client.request("GET", "/x")
    with pytest.raises(UnavailableError, match="answered in term 5"):
        client.request("POST", "/x")


def test_addresses_are_separated_by_commas():
    assert read_urls("a:1, https://b/x/,http://c") == ["http://a:1", "https://b/x", "http://c"]
    with pytest.raises(UsageError):
        read_urls("a:1,")


def test_an_answer_in_lines_ends_them_at_newlines_alone(site: Site):
    """What titles may have is no end of a line: U+2028, U+0085."""
    lines = [{"title": "a\u2028b\x85c"}, {"done": 1}]
    content = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines)
    site.schedulers["a"] = lambda _: httpx2.Response(200, content=content.encode())
    assert [json.loads(line) for line in SchedulerClient([A]).stream("/simulate", {})] == lines


class Maker:
    """Makes a change, and loses the answer to it the first time; ``keys``: of all that it was sent."""

    def __init__(self, knows_keys: bool, status: int = 200) -> None:
        self.knows_keys, self.status = knows_keys, status
        self.keys: list[str] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/me"):
            return httpx2.Response(self.status, json={"takes_idempotency_keys": True} if self.knows_keys else {})
        self.keys.append(request.headers["idempotency-key"])
        if len(self.keys) == 1:
            raise httpx2.RemoteProtocolError("Server disconnected")
        return httpx2.Response(200, json={"id": "made"})


def test_a_change_whose_answer_got_lost_is_sent_again_with_its_key(site: Site):
    site.schedulers["a"] = maker = Maker(knows_keys=True)
    client = SchedulerClient(A)
    assert json.loads(client.request("POST", "/x")) == {"id": "made"}
    assert len(maker.keys) == 2
    assert len(set(maker.keys)) == 1
    client.request("POST", "/x")
    assert maker.keys[2] != maker.keys[0]


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_scheduler_of_before_is_not_sent_a_change_twice(site: Site, status: int):
    site.schedulers["a"] = maker = Maker(knows_keys=False, status=status)
    with pytest.raises(UnavailableError, match="the connection to the scheduler failed"):
        SchedulerClient(A).request("POST", "/x")
    assert len(maker.keys) == 1
