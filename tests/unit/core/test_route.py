"""Which of several schedulers is asked next, and which answers are refused because of their term."""

import random
from collections import Counter

import pytest
from played_server import ChosenRandom

from cpumond.core.route import Route, Terms, standby_period_s
from cpumond.core.term import MAX_TERM, parse_term

A, B, C = "http://a:9757", "http://b:9757", "http://c:9757"


def make_route(*addresses: str, ratio: float = 0.5) -> Route:
    return Route(addresses or (A, B), 30.0, ChosenRandom(ratio))


def test_terms_only_rise():
    terms = Terms()
    assert [terms.accept(term) for term in (None, 3, 3, 2, None, 5, 4)] == [True, True, True, False, True, True, False]
    assert (terms.highest, terms.refused_total) == (5, 2)


@pytest.mark.parametrize(("text", "term"), [
    ("7", 7), ("007", 7), (str(MAX_TERM), MAX_TERM), (str(MAX_TERM + 1), None), ("0", None), ("-1", None),
    ("1.0", None), ("٣", None), ("", None), (None, None), ("9" * 5000, None),
])  # fmt: skip
def test_terms_of_headers(text: str | None, term: int | None):
    assert parse_term(text) == term


def test_one_address_is_asked_again_after_ever_longer_waits():
    route = make_route(A, ratio=1.0)
    assert [route.unanswered(0.0, 5.0) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    route.taken()
    assert route.refused(9.0) == 1.0


def test_the_next_address_is_asked_at_once_and_kept_to():
    route = make_route()
    assert (route.unanswered(0.0, 0.0), route.current) == (0.0, B)
    route.taken()
    assert route.current == B
    assert (route.unanswered(9.0, 9.0), route.current) == (0.0, A)


def test_two_that_do_not_answer_are_asked_in_turn():
    route = make_route(ratio=1.0)
    waits = [(route.unanswered(now, now), route.current) for now in (0.0, 0.0, 1.0, 1.0)]
    assert waits == [(0.0, B), (1.0, A), (0.0, B), (2.0, A)]


def test_a_refusal_is_not_taken_elsewhere():
    route = make_route()
    assert (route.refused(0.0), route.current) == (0.5, A)


def test_a_standby_sends_to_the_leader():
    route = make_route(A, B, C)
    assert (route.standby("c:9757", 1.0, 0.0, 0.0), route.current) == (0.0, C)
    route.taken()
    assert route.current == C


@pytest.mark.parametrize(("asked", "leader", "address"), [
    ("http://a", "d:9757", "http://d:9757"),
    ("https://a:1/behind/a/proxy", "D:9757", "https://d:9757"),
    ("http://a", "[fe80::1]:9757", "http://[fe80::1]:9757"),
    ("http://127.0.0.1:9757", "127.0.0.1:9758", "http://127.0.0.1:9758"),
])  # fmt: skip
def test_a_leader_that_is_not_configured_is_followed(asked: str, leader: str, address: str):
    route = make_route(asked)
    assert (route.standby(leader, 1.0, 0.0, 0.0), route.current) == (0.0, address)
    route.taken()
    assert (route.unanswered(5.0, 5.0), route.current) == (0.0, asked)


def test_a_leader_is_found_among_the_configured_addresses():
    route = make_route("http://a", "https://b/scheduler")
    assert (route.standby("b:443", 1.0, 0.0, 0.0), route.current) == (0.0, "https://b/scheduler")


@pytest.mark.parametrize(
    "leader",
    [None, "", "b", "b:", "b:0", "b:65536", ":1", "http://b:1", "u@b:1", "b:1/x", "0.0.0.0:9757", "[::]:9757",
     "127.0.0.1:9757", "[::1]:9757", "localhost:9757", "b b:1", "b:1\n", "b" * 256 + ":1", "a:9757"],
)  # fmt: skip
def test_what_names_no_other_leader_is_not_followed(leader: str | None):
    route = make_route(A)
    assert (route.standby(leader, 1.0, 0.0, 0.0), route.current) == (1.0, A)


def test_only_one_named_leader_is_remembered():
    route = make_route(A)
    for number in range(100):
        route.standby(f"x{number}:1", 1.0, 0.0, float(number))
        if route.current != A:
            route.unanswered(float(number), float(number))
    assert len(route._states) <= 3


def test_two_standbys_that_name_each_other_are_asked_once_in_a_period():
    route, now, asked = Route((A, B), 30.0, random.Random(1)), 0.0, 0
    while now < 100.0:
        named = "b:9757" if route.current == A else "a:9757"
        now += max(route.standby(named, 1.0, now, now), 1e-9)
        asked += 1
    assert asked < 250


def test_two_standbys_are_asked_together_as_often_as_one():
    route, now, asked = Route((A, B), 30.0, random.Random(1)), 0.0, Counter[str]()
    while now < 100.0:
        asked[route.current] += 1
        now += route.standby(None, 1.0, now, now)
    assert 80 < asked[A] + asked[B] < 125
    assert min(asked[A], asked[B]) > 35


def test_a_dead_leader_that_the_standby_names_does_not_delay_the_standby():
    """The host of the leader is gone: each attempt there lasts 5 s. The standby leads after 10 s."""
    route, now, asked = Route((A, B), 30.0, random.Random(1)), 0.0, []
    while True:
        asked.append((route.current, now))
        if route.current == A:
            now += 5.0
            now += route.unanswered(now - 5.0, now)
        elif now < 10.0:
            now += route.standby("a:9757", 1.0, now, now)
        else:
            break
    assert now < 12.0
    assert [address for address, _ in asked].count(A) == 1


@pytest.mark.parametrize("dead", [True, False])
def test_a_thousand_nodes_do_not_come_at_one_moment(dead: bool):
    """Each beats once a second at a time of its own; nobody leads from 0 to 8 s, then B. ``dead``: A is refused."""
    arrivals, back = Counter[tuple[str, int]](), []
    for number in range(1000):
        rng = random.Random(number)
        route, now = Route((A, B), 30.0, rng), rng.random()
        while now < 8.0 or route.current != B:
            arrivals[route.current, int(now)] += 1
            if route.current == A and dead:
                now += route.unanswered(now, now)
            else:
                now += route.standby("a:9757" if now < 5.0 else None, 1.0, now, now)
        back.append(now)
        arrivals[B, int(now)] += 1
        beat = number / 1000
        while beat < 40.0:
            arrivals[B, int(beat)] += beat > now
            beat += 1.0
    assert max(back) < 11.0
    assert max(arrivals.values()) <= 2000


def test_a_standby_is_asked_as_often_as_the_leader():
    assert [standby_period_s(period_s) for period_s in (0.1, 1.0, 5.0, 8.0, 30.0)] == [0.1, 1.0, 5.0, 5.0, 15.0]
