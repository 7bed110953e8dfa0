"""The link to several schedulers of which one leads: which one is asked, and what is not carried out."""

from collections.abc import Iterator
from typing import Any

import pytest
from played_link import ACCEPTED, HEARTBEATS, NODES, events, linked
from played_server import Handler, PlayedServer, Turn, reply, serve

from cpumond.core.wire import HeartbeatAnswer, RegistrationAnswer, StopOrder

pytestmark = pytest.mark.usefixtures("logs")
STOP = HeartbeatAnswer(True, stop=[StopOrder("job-1", 1.0, "abort", "old orders")])


def hang_up(handler: Handler) -> None:
    handler.close_connection = True


def answer_in(term: int | None, answer: HeartbeatAnswer = ACCEPTED, status: int = 200) -> Turn:
    return reply(answer, status, *([("X-Cpumond-Term", str(term))] if term else []))


def lead(term: int | None) -> Any:
    registered = reply(RegistrationAnswer("node-1", "default", 1.0), 200, ("X-Cpumond-Term", str(term or "")))
    return lambda path: registered if path == NODES else answer_in(term)


def stand_by(leader: str = "") -> Any:
    error = {"error": f"standby: the scheduler at {leader} leads (term 3)", "code": 105, "attributes": {}}
    return lambda _: reply(error, 503, *([("X-Cpumond-Leader", leader)] if leader else []))


def place(server: PlayedServer) -> str:
    return server.url.removeprefix("http://")


@pytest.fixture
def pair() -> Iterator[tuple[PlayedServer, PlayedServer]]:
    with serve(lead(3)) as first, serve(lead(3)) as second:
        yield first, second


Pair = tuple[PlayedServer, PlayedServer]


def test_the_leader_that_a_standby_names_is_followed_and_kept_to(pair: Pair, logs: list[Any]):
    first, second = pair
    first.usual = stand_by(place(second))
    with linked(first.url) as node:
        node.beat(1, 2, 3)
        assert node.link.scheduler == (second.url, 3, 0)
    assert ([request.path for request in first.requests], second.sequences) == ([NODES], [1, 2, 3])
    assert events(logs) == ["link_failed", "node_registered", "link_recovered"]
    assert f"standby: the scheduler at {place(second)} leads" in logs[0]["error"]


def test_the_next_address_is_asked_when_the_leader_is_gone(pair: Pair, logs: list[Any]):
    first, second = pair
    second.usual = lead(4)
    with linked(first.url, second.url) as node:
        node.beat(1)
        first.turns[HEARTBEATS] = [hang_up]
        node.beat(2)
        assert node.link.scheduler == (second.url, 4, 0)
    assert [request.path for request in second.requests] == [HEARTBEATS]
    [changed] = [line for line in logs if line["event"] == "scheduler_changed"]
    assert changed == {
        "event": "scheduler_changed", "log_level": "info", "url": second.url, "term": 4, "before": first.url,
        "term_before": 3,
    }  # fmt: skip


@pytest.mark.parametrize("status", [200, 409])
def test_what_a_lower_term_answers_is_not_carried_out(pair: Pair, logs: list[Any], status: int):
    first, second = pair
    second.usual = lead(4)
    with linked(first.url, second.url) as node:
        first.turns[HEARTBEATS] = [stand_by(place(second))(HEARTBEATS)]
        node.beat(1)
        second.turns[HEARTBEATS] = [stand_by(place(first))(HEARTBEATS)]
        old = STOP if status == 200 else HeartbeatAnswer(False, "not registered", register=True)
        first.turns[HEARTBEATS] = [answer_in(3, old, status)] * 2
        assert node.beat(2) == HeartbeatAnswer(True)
        assert node.link.scheduler[:2] == (second.url, 4)
        assert node.link.scheduler[2] >= 1
    assert node.answers.empty()
    assert [request.path for request in (*first.requests, *second.requests)].count(NODES) == 1
    told = [line for line in logs if line["event"] == "term_refused"]
    assert len(told) == 1
    assert told[0]["log_level"] == "warning"
    assert f"{first.url}/api/v1/heartbeats: answered in term 3, but term 4 has begun" in told[0]["error"]


def test_an_answer_without_a_term_is_taken_as_it_is(pair: Pair):
    first, _ = pair
    with linked(first.url) as node:
        node.beat(1)
        first.turns[HEARTBEATS] = [answer_in(None, STOP)]
        assert node.beat(2) == STOP
        assert node.link.scheduler == (first.url, None, 0)


@pytest.mark.parametrize("status", [400, 401, 413])
def test_a_refusal_is_tried_again_where_it_was_given(pair: Pair, status: int):
    first, second = pair
    first.turns[NODES] = [reply({"error": "not so", "code": 900, "attributes": {}}, status)] * 3
    with linked(first.url, second.url) as node:
        node.beat(1)
    assert second.requests == []
    assert node.link.stats().failed_total == 3


@pytest.mark.parametrize("status", [404, 500, 502])
def test_an_address_that_is_no_scheduler_or_fails_is_left(pair: Pair, status: int):
    first, second = pair
    first.usual = lambda _: reply(b"<html>", status)
    with linked(first.url, second.url) as node:
        node.beat(1)
        assert node.link.scheduler[0] == second.url


def test_a_scheduler_that_does_not_answer_in_time_is_left(pair: Pair):
    first, second = pair
    second.usual = lead(4)
    with linked(first.url, second.url, timeout_s=0.3) as node:
        node.beat(1)
        first.turns[HEARTBEATS] = [lambda handler: handler.rfile.read(1)] * 100
        node.beat(2)
        assert node.link.scheduler[0] == second.url
