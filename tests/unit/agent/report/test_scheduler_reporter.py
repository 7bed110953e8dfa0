"""The link to the scheduler against a server on the loopback that answers as a test says."""

import base64
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from played_link import ACCEPTED, HEARTBEATS, LONG_S, NODES, Node, events, linked, make_heartbeat, make_registration
from played_server import Handler, PlayedServer, Turn, not_before_close, reply, serve, soon

from cpumond.agent.config import SchedulerOptions as LinkOptions
from cpumond.agent.report import scheduler as link_module
from cpumond.agent.report.scheduler import MAX_ANSWER_BYTES, MAX_ASKED_PERIOD_S
from cpumond.core import wire
from cpumond.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("logs")
LOGS, REPLIES = "/api/v1/logs", "/api/v1/replies"
REGISTERED = wire.RegistrationAnswer("node-1", "default", 1.0)
TOKEN = "s3cret"  # noqa: S105 - of a server of our own
UNKNOWN = wire.HeartbeatAnswer(False, "node node-1 is not registered", register=True)
STALE = wire.HeartbeatAnswer(False, "sequence 1 is not newer than 1")
GOOD = {NODES: REGISTERED, HEARTBEATS: ACCEPTED, LOGS: {}, REPLIES: {}}


def refuse(status: int, sentence: str) -> Turn:
    return reply({"error": sentence, "code": 1, "attributes": {}}, status)


def demand(reason: str = UNKNOWN.reason) -> Turn:
    return reply(wire.HeartbeatAnswer(False, reason, register=True), 409)


def cut(message: Any, kept: int) -> Turn:
    """The connection ends after so many bytes of the answer."""
    body = msgspec.json.encode(message)

    def turn(handler: Handler) -> None:
        handler.begin(200, ("Content-Length", str(len(body))))
        handler.wfile.write(body[:kept])
        handler.close_connection = True

    return turn


def hold(release: threading.Event, then: Turn) -> Turn:
    """The answer comes after ``release``, to a client that is still there."""

    def turn(handler: Handler) -> None:
        release.wait(LONG_S)
        then(handler)

    return turn


@pytest.fixture
def server() -> Iterator[PlayedServer]:
    with serve(lambda path: reply(GOOD[path])) as server:
        yield server


def ask(*ids: str) -> wire.HeartbeatAnswer:
    return wire.HeartbeatAnswer(True, logs=[wire.LogRequest(each, f"job-of-{each}", "stdout", 3) for each in ids])


def request(*ids: str, logs: tuple[str, ...] = ()) -> wire.HeartbeatAnswer:
    requests = [wire.JobRequest(each, "explain", f"job-of-{each}") for each in ids]
    return msgspec.structs.replace(ask(*logs), requests=requests)


def failures_in(logs: list[Any]) -> list[str]:
    return [line["error"] for line in logs if line["event"] == "link_failed"]


# --- the way it goes


def test_the_node_registers_before_its_first_heartbeat_and_gets_its_orders(server: PlayedServer, logs: list[Any]):
    order = wire.JobOrder("job-2", "op-1", "t", "p", 1.0, 2**30, 1, "true", {}, "u", {"mode": "reclaim"}, 60.0)
    server.turns[HEARTBEATS] = [reply(wire.HeartbeatAnswer(True, start=[order], acknowledged=["job-0"]))]
    with linked(server.url, token=TOKEN) as node:
        assert node.link.registered is None
        before_s = time.monotonic()
        node.link.submit(make_heartbeat(1))
        answer, sent_at_s = node.answers.get(timeout=LONG_S)
        assert (answer.start, answer.acknowledged) == ([order], ["job-0"])
        assert before_s <= sent_at_s <= time.monotonic()
        assert node.link.registered == REGISTERED
        node.beat(2, 3)
    assert [request.path for request in server.requests] == [NODES, *[HEARTBEATS] * 3]
    assert server.sent(NODES) == [msgspec.to_builtins(make_registration())]
    assert server.sent()[0] == msgspec.to_builtins(make_heartbeat(1))
    assert {request.headers["Authorization"] for request in server.requests} == {"OAuth s3cret"}
    assert len({request.connection for request in server.requests}) == 1
    stats = node.link.stats()
    assert (stats.sent_total, stats.failed_total, stats.dropped_total, stats.last_error) == (3, 0, 0, "")
    assert stats.last_success_at_s is not None
    assert logs == [{"event": "node_registered", "log_level": "info", "tree": "default", "warning": "", "reason": ""}]
    assert node.answers.empty()


DIFFERENCES = reply(wire.HeartbeatAnswer(True, differences=True))
FULL = reply(wire.HeartbeatAnswer(False, "not the last one", full=True))


@pytest.mark.parametrize(("turns", "sent"), [
    ([DIFFERENCES, DIFFERENCES, FULL, reply(ACCEPTED)],
     [(1, None, 1), (2, 1, 0), (3, 2, 0), (3, None, 1), (4, None, 1)]),
    ([DIFFERENCES, refuse(500, "no"), DIFFERENCES, DIFFERENCES],
     [(1, None, 1), (2, 1, 0), (2, None, 1), (3, 2, 0), (4, 3, 0)]),
], ids=["it asks for all of it", "an answer was lost"])  # fmt: skip
def test_what_changed_is_sent_to_a_scheduler_that_takes_it_or_all(
    server: PlayedServer, turns: list[Turn], sent: list[tuple[int, int | None, int]]
):
    """Sequence, the one before to which it is a difference, and how many jobs are in it."""
    server.turns[HEARTBEATS] = [*turns]
    with linked(server.url) as node:
        node.beat(1, 2, 3, 4)
    assert [(told["sequence"], told.get("base"), len(told["jobs"])) for told in server.sent()] == sent
    assert server.sent()[1]["job_count"] == 1


def test_a_scheduler_that_always_asks_for_full_state_is_no_endless_loop(server: PlayedServer, logs: list[Any]):
    server.turns[HEARTBEATS] = [FULL, reply(ACCEPTED)]
    with linked(server.url) as node:
        node.link.submit(make_heartbeat(1))
        while "heartbeat_dropped" not in events(logs):
            time.sleep(0.005)
        node.beat(2)
    assert len(server.sent()) == 2


ASKS, KNOWS = (reply(wire.HeartbeatAnswer(True, knows_about=knows)) for knows in (False, True))


@pytest.mark.parametrize(("turns", "changed_at", "levels"), [
    # One of before, as the first and the sixth, is told nothing: it would refuse the heartbeat.
    ([reply(ACCEPTED), ASKS, KNOWS, KNOWS, KNOWS, reply(ACCEPTED), ASKS], 5,
     [None, None, "shadow", None, "weight", None, None, "weight"]),
    # The heartbeat that follows at once does not tell it, and the scheduler knows only what the agent was before.
    ([ASKS, KNOWS, refuse(500, "no"), KNOWS, KNOWS, KNOWS], 3, [None, "shadow", "weight", None, "weight", None]),
    ([ASKS, KNOWS, FULL, KNOWS, KNOWS, KNOWS], 3, [None, "shadow", "weight", None, "weight", None]),
], ids=["one of before in between", "not taken", "all of it is asked for"])  # fmt: skip
def test_what_the_agent_is_is_told_where_it_is_asked_for_and_news(
    server: PlayedServer, turns: list[Turn], changed_at: int, levels: list[str | None]
):
    server.turns[HEARTBEATS] = [*turns]
    with linked(server.url) as node:
        sequence = 0
        while len(server.sent()) < len(levels):
            sequence += 1
            node.link.about = wire.AgentAbout("1", "shadow" if sequence < changed_at else "weight", "quota")
            node.beat(sequence)
    assert [sent.get("about", {}).get("level") for sent in server.sent()] == levels


def test_stderr_size_is_reported_only_if_the_last_answer_asked_for_it(server: PlayedServer):
    """A scheduler of before would drop the whole heartbeat."""
    knows = reply(wire.HeartbeatAnswer(True, knows_stderr_size=True))
    server.turns[HEARTBEATS] = [knows, reply(ACCEPTED), knows, refuse(500, "no"), knows]
    ended = wire.FinishedJob("j1", "1-2-3-4", "completed", stderr_size=2)
    with linked(server.url) as node:
        node.beat(1, 2, 3, 4, finished=[ended])
    told = [sent["finished_jobs"][0].get("stderr_size") for sent in server.sent()]
    assert told == [None, 2, None, 2, None]


def test_a_busy_scheduler_tells_how_often_it_wants_heartbeats(server: PlayedServer):
    server.turns[HEARTBEATS] = [reply(wire.HeartbeatAnswer(True, period_s=period)) for period in (3.0, 1000.0, None)]
    with linked(server.url) as node:
        seen = [node.link.period_s]
        for sequence in range(1, 4):
            node.beat(sequence)
            seen.append(node.link.period_s)
    assert seen == [0.0, 3.0, MAX_ASKED_PERIOD_S, 0.0]


def test_a_node_that_fits_no_tree_is_told_so_in_the_log(server: PlayedServer, logs: list[Any]):
    answer = wire.RegistrationAnswer("node-1", None, 1.0, "no tree's nodes_filter fits")
    server.turns[NODES] = [reply(answer)]
    with linked(server.url) as node:
        node.beat(1)
        assert node.link.registered == answer
    assert (logs[0]["log_level"], logs[0]["tree"], logs[0]["warning"]) == ("warning", None, answer.warning)


@pytest.mark.parametrize(("prefix", "end"), [("", "/"), ("/behind/a%2Fproxy", ""), ("/behind", "/"), ("/behind", "//")])
def test_the_address_may_have_a_path_and_a_slash_at_its_end(server: PlayedServer, prefix: str, end: str):
    server.prefix = prefix
    with linked(server.url + end) as node:
        node.beat(1)
    assert [request.path for request in server.requests] == [prefix + NODES, prefix + HEARTBEATS]
    assert "Authorization" not in server.requests[0].headers


@pytest.mark.parametrize("url", ["", "127.0.0.1:9757", "ftp://127.0.0.1", "http://a:0"])
def test_an_address_that_is_none_is_a_config_error(url: str):
    with pytest.raises(ConfigError, match=r"^scheduler\.url: .*expected an address such as http://127\.0\.0\.1:9757"):
        Node(LinkOptions(url=url), soon())


@pytest.mark.parametrize("token", ["two words", "two\nlines", "schl\u00fcssel", "\udcff", " "])
def test_a_token_that_is_no_header_value_is_a_config_error(token: str):
    options = LinkOptions(url="http://127.0.0.1:1", token=token)
    with pytest.raises(ConfigError, match=r"^scheduler\.token: ") as caught:
        Node(options, soon())
    assert "two" not in str(caught.value)


# --- registration


@pytest.mark.parametrize("status", [409, 200])
def test_on_demand_it_registers_and_repeats_the_heartbeat_at_once(server: PlayedServer, logs: list[Any], status: int):
    server.turns[HEARTBEATS] = [reply(ACCEPTED), reply(UNKNOWN, status)]
    rng = not_before_close()
    with linked(server.url, rng=rng) as node:
        node.beat(1, 2)
    assert [request.path for request in server.requests] == [NODES, *[HEARTBEATS] * 2, NODES, HEARTBEATS]
    assert server.sequences == [1, 2, 2]
    assert rng.bounds == []
    assert node.answers.empty()
    stats = node.link.stats()
    assert (stats.sent_total, stats.failed_total, stats.dropped_total) == (2, 0, 0)
    told = [(line["event"], line["reason"]) for line in logs]
    assert told == [("node_registered", ""), ("node_registered", "node node-1 is not registered")]


def test_after_a_demand_the_newest_heartbeat_goes(server: PlayedServer):
    def demand_late(handler: Handler) -> None:
        node.link.submit(make_heartbeat(2))
        assert node.link.registered is not None
        demand()(handler)

    server.turns[HEARTBEATS] = [demand_late]
    with linked(server.url) as node:
        node.beat(1)
    assert server.sequences == [1, 2]
    assert node.link.stats().dropped_total == 1


def test_demands_that_registering_does_not_end_are_a_failure(server: PlayedServer, logs: list[Any]):
    reason = "node node-1 registered as incarnation run-2, not run-1"
    server.turns[HEARTBEATS] = [demand(reason) for _ in range(5)]
    rng = soon()
    with linked(server.url, rng=rng, retry_max_s=3.0) as node:
        node.beat(1)
    assert rng.bounds == [1.0, 2.0, 3.0, 3.0]
    assert len(server.sent(NODES)) == 6
    stats = node.link.stats()
    assert (stats.sent_total, stats.failed_total) == (1, 4)
    advice = "it was registered just now; check that no other agent runs with this node_id"
    assert failures_in(logs) == [f"{server.url}{HEARTBEATS}: {reason}; {advice}"]


@pytest.mark.parametrize(("turn", "sentence"), [
    (refuse(422, "more than one pool tree"), "answered 422: more than one pool tree"),
    (refuse(400, "no\nJSON"), "answered 400: no JSON"),
    (refuse(409, "another agent"), "answered 409: another agent"),
    (refuse(401, "unknown"), "answered 401: unknown; check scheduler.token and scheduler.token_file"),
    (reply(b"<html>", 403), "answered 403; check scheduler.token and scheduler.token_file"),
    (reply(b"<html>", 404), "answered 404; check that scheduler.url is the address of a cpumond scheduler"),
    (reply(b"", 307, ("Location", "/elsewhere")),
     "answered 307; redirects are not followed, set scheduler.url to the final address"),
])  # fmt: skip
def test_a_refused_registration_is_retried_and_told_once(
    server: PlayedServer, logs: list[Any], turn: Turn, sentence: str
):
    server.turns[NODES] = [turn] * 3
    # Where only this registration is refused, the scheduler may know the node from before: it is asked by a heartbeat.
    asked = 3 if "422" in sentence else 0
    server.turns[HEARTBEATS] = [demand()] * asked
    shown: list[str] = []

    def look(handler: Handler) -> None:
        shown.append(node.link.stats().last_error)
        assert node.link.registered is None
        reply(REGISTERED)(handler)

    server.turns[NODES].append(look)
    with linked(server.url) as node:
        node.beat(1)
    assert shown == [f"{server.url}{NODES}: {sentence}"]
    assert events(logs) == ["link_failed", "node_registered", "link_recovered"]
    assert logs[0]["error"] == shown[0]
    stats = node.link.stats()
    assert (stats.sent_total, stats.failed_total, stats.last_error) == (1, 3, "")
    assert server.sequences == [1] * (asked + 1)


def test_what_the_node_offers_is_registered_before_the_next_heartbeat(server: PlayedServer):
    with linked(server.url) as node:
        node.beat(1)
        node.link.register(make_registration())
        node.beat(2)
        node.link.register(make_registration(cpu=4.0))
        assert node.link.registered == REGISTERED
        node.beat(3, 4)
    paths = [request.path for request in server.requests]
    assert paths == [NODES, HEARTBEATS, HEARTBEATS, NODES, HEARTBEATS, HEARTBEATS]
    assert server.sent(NODES)[1]["resources"]["cpu"] == 4.0


def test_a_refused_change_does_not_stop_the_heartbeats(server: PlayedServer, logs: list[Any]):
    """The scheduler still has the node as it was: without heartbeats its jobs would be lost."""
    server.turns[NODES] = [reply(REGISTERED), refuse(422, "more than one pool tree"), refuse(503, "the disk is full")]
    sentence = f"{server.url}{NODES}: answered 422: more than one pool tree"
    rng = soon()
    with linked(server.url, rng=rng) as node:
        node.beat(1)
        node.link.register(make_registration(cpu=4.0))
        rng.ratio = 1e9
        node.beat(2, 3, 4)
        assert len(server.sent(NODES)) == 2
        assert node.link.registered == REGISTERED
        assert node.link.stats().last_error == sentence
        rng.ratio = 0.0
        node.link.register(make_registration(cpu=3.0))
        node.beat(5)
        assert len(server.sent(NODES)) == 3
        node.beat(6)
        assert len(server.sent(NODES)) == 4
        assert node.link.stats().last_error == ""
    assert server.sequences == [1, 2, 3, 4, 5, 6]
    assert events(logs) == ["node_registered", *["registration_refused"] * 2, "node_registered"]


# --- answers


def test_a_heartbeat_that_is_too_old_is_dropped_and_told_once(server: PlayedServer, logs: list[Any]):
    arrived = threading.Event()

    def stale(handler: Handler) -> None:
        reply(STALE)(handler)
        arrived.set()

    server.turns[HEARTBEATS] = [stale, stale]
    rng = not_before_close()
    with linked(server.url, rng=rng) as node:
        for sequence in (1, 2):
            node.link.submit(make_heartbeat(sequence))
            assert arrived.wait(LONG_S)
            arrived.clear()
        node.beat(3)
    assert server.sequences == [1, 2, 3]
    assert len(server.sent(NODES)) == 1
    assert node.answers.empty()
    assert rng.bounds == []
    stats = node.link.stats()
    assert (stats.sent_total, stats.dropped_total, stats.last_error) == (1, 2, "")
    assert events(logs) == ["node_registered", "heartbeat_dropped"]
    assert logs[1]["error"].endswith("the heartbeat was dropped: sequence 1 is not newer than 1")


def test_fields_of_a_later_version_are_passed_over(server: PlayedServer):
    server.turns[HEARTBEATS] = [reply({"accepted": True, "later": 1})]
    with linked(server.url) as node:
        assert node.beat(1) == ACCEPTED


GARBAGE = [
    b"", b"[]", b"{}", b"\xff", b'{"accepted":true,"start":[{"job_id":"a"}]}',
    b'{"accepted":true,"stop":' + b"[" * 100_000,
]  # fmt: skip
UNCLEAR = "the response cannot be understood: "
CONFLICTS = [reply(b"{", 409), reply(ACCEPTED, 409), reply(STALE, 409), refuse(409, "no")]
BAD = [
    *((path, reply(body), f"{path}: {UNCLEAR}") for path in (NODES, HEARTBEATS) for body in GARBAGE),
    *((HEARTBEATS, turn, f"{HEARTBEATS}: answered 409") for turn in CONFLICTS),
    (HEARTBEATS, reply(b" " * (MAX_ANSWER_BYTES + 1)), "/: the response is larger than 16777216 bytes"),
]


@pytest.mark.parametrize(("path", "turn", "words"), BAD, ids=range(len(BAD)))
def test_an_answer_that_is_none_is_a_failure(server: PlayedServer, logs: list[Any], path: str, turn: Turn, words: str):
    server.turns[path] = [turn] * 2
    with linked(server.url) as node:
        node.beat(1)
    assert events(logs)[-1] == "link_recovered"
    [told] = failures_in(logs)
    assert told.startswith(server.url + words)
    assert node.link.stats().failed_total == 2
    assert len(server.sent(NODES)) == (3 if path == NODES else 1)
    assert node.answers.empty()


@pytest.mark.parametrize("kept", [0, 5])
def test_an_answer_that_is_cut_off_is_not_obeyed(server: PlayedServer, logs: list[Any], kept: int):
    server.turns[HEARTBEATS] = [cut(ask("a"), kept), reply(STALE)]
    with linked(server.url) as node:
        node.link.submit(make_heartbeat(1))
        node.link.close(LONG_S)
        assert node.answers.empty()
    assert server.sequences[0] == 1
    assert events(logs)[:2] == ["node_registered", "link_failed"]


def test_a_late_answer_is_a_timeout_and_never_heard(server: PlayedServer, logs: list[Any]):
    release = threading.Event()
    server.turns[HEARTBEATS] = [hold(release, reply(ask("late")))]
    with linked(server.url, timeout_s=0.2) as node:
        assert node.beat(1) == ACCEPTED
        release.set()
        assert node.beat(2) == ACCEPTED
    assert server.sequences[:2] == [1, 1]
    assert server.sequences == sorted(server.sequences)
    assert node.answers.empty()
    assert node.read == []
    assert failures_in(logs)[0] == f"{server.url}/: no response within 0.2 s"


def test_an_answer_that_drips_is_a_timeout(server: PlayedServer, logs: list[Any]):
    ended = threading.Event()

    def drip(handler: Handler) -> None:
        handler.begin(200, ("Content-Length", "1000000"))
        try:
            while not ended.wait(0.02):
                handler.wfile.write(b" ")
                handler.wfile.flush()
        except OSError:
            handler.close_connection = True

    server.turns[HEARTBEATS] = [drip]
    with linked(server.url, timeout_s=0.2) as node:
        assert node.beat(1) == ACCEPTED
        ended.set()
    assert failures_in(logs) == [f"{server.url}/: no response within 0.2 s"]


def test_the_thread_survives_those_that_it_calls(server: PlayedServer, logs: list[Any]):
    called = queue.Queue[int]()

    def raise_on(answer: wire.HeartbeatAnswer, sent_at_s: float) -> None:
        called.put(1)
        raise KeyError("job")

    with linked(server.url, calls={"on_answer": raise_on}) as node:
        for sequence in (1, 2):
            node.link.submit(make_heartbeat(sequence))
            called.get(timeout=LONG_S)
    assert node.link.stats().sent_total == 2
    assert events(logs) == ["node_registered", "answer_not_obeyed"]


def test_a_heartbeat_that_cannot_be_encoded_does_not_end_the_thread(server: PlayedServer):
    with linked(server.url) as node:
        node.link.submit(make_heartbeat(1, job_id="\udcff"))
        node.beat(2)
        assert server.sequences == [2]


# --- the token


def test_the_token_file_is_read_anew_and_the_token_never_shown(server: PlayedServer, logs: list[Any], tmp_path):
    file = tmp_path / "token"

    def echo(token: str, then: str) -> Turn:
        def turn(handler: Handler) -> None:
            file.write_text(then)
            refuse(401, f"who is {token}?")(handler)

        return turn

    server.turns[NODES] = [echo("s3cret-1", "s3cret-2\n"), refuse(400, "not s3cret-2")]
    failed = threading.Event()
    rng = soon()
    draw = rng.uniform

    def uniform(a: float, b: float) -> float:
        failed.set()
        return draw(a, b)

    rng.uniform = uniform  # type: ignore[method-assign]
    with linked(server.url, rng=rng, token_file=str(file)) as node:
        node.link.submit(make_heartbeat(1))
        assert failed.wait(LONG_S)
        assert node.link.stats().last_error == f"token file {file}: No such file or directory"
        ready = tmp_path / "ready"
        ready.touch(mode=0o600)
        ready.write_text("s3cret-1\n")
        ready.rename(file)
        assert node.answers.get(timeout=LONG_S)[0] == ACCEPTED
    shown = [request.headers["Authorization"] for request in server.requests]
    assert shown == ["OAuth s3cret-1", *["OAuth s3cret-2"] * 3]
    assert events(logs) == [*["link_failed"] * 3, "node_registered", "link_recovered"]
    assert logs[1]["error"].endswith("who is ...?; check scheduler.token and scheduler.token_file")
    assert "s3cret" not in repr(logs)


# --- logs


def test_logs_go_a_few_at_a_time_after_the_answer_was_obeyed_and_once(server: PlayedServer):
    ids = [f"log-{number}" for number in range(10)]
    obeyed: list[int] = []
    arrived = queue.Queue[str]()

    def note(handler: Handler) -> None:
        obeyed.append(node.answers.qsize())
        arrived.put(server.sent(LOGS)[-1]["request_id"])
        reply({}, 201)(handler)

    server.turns[HEARTBEATS] = [reply(ask(*ids))] * 5
    server.turns[LOGS] = [note] * 20
    with linked(server.url) as node:
        sent = []
        for sequence, count in ((1, 4), (2, 4), (3, 2)):
            node.link.submit(make_heartbeat(sequence))
            sent += [arrived.get(timeout=LONG_S) for _ in range(count)]
            assert node.answers.qsize() == sequence
        node.link.submit(make_heartbeat(4))
    assert sent == node.read == ids
    assert obeyed == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert arrived.empty()
    assert server.sent(LOGS)[0] == {
        "node_id": "node-1", "request_id": "log-0", "content": base64.b64encode(b"\xff\xff\xff").decode(),
        "total_bytes": 1000, "error": "",
    }  # fmt: skip


def test_a_newer_heartbeat_goes_before_the_rest_of_the_logs(server: PlayedServer):
    def submit(handler: Handler) -> None:
        node.link.submit(make_heartbeat(2))
        reply({})(handler)

    server.turns[HEARTBEATS] = [reply(ask("a", "b"))]
    server.turns[LOGS] = [submit]
    with linked(server.url) as node:
        node.beat(1)
        node.answers.get(timeout=LONG_S)
    assert node.read == ["a"]


def test_nobody_waits_for_a_log_any_more(server: PlayedServer, logs: list[Any]):
    server.turns[HEARTBEATS] = [reply(ask("a"))] * 3
    server.turns[LOGS] = [refuse(404, "nobody waits for it")]
    with linked(server.url) as node:
        node.beat(1, 2, 3)
    assert node.read == ["a"]
    assert events(logs) == ["node_registered"]


def test_a_receiver_of_logs_that_hangs_delays_heartbeats_by_a_bound(server: PlayedServer, monkeypatch):
    monkeypatch.setattr(link_module, "REQUESTS_S", 0.1)
    release = threading.Event()
    answered: list[str] = []

    def hang(handler: Handler) -> None:
        release.wait(LONG_S)
        answered.append(handler.path)

    server.turns[HEARTBEATS] = [reply(ask("a", "b", "c"))]
    server.turns[LOGS] = [hang] * 3
    with linked(server.url) as node:
        node.beat(1, 2)
        assert answered == [], "the second one did not wait for the log"
        release.set()


def test_what_is_remembered_of_logs_is_bounded(server: PlayedServer, monkeypatch):
    monkeypatch.setattr(link_module, "REMEMBERED_REQUESTS", 3)
    server.turns[HEARTBEATS] = [reply(ask(str(number))) for number in range(20)]
    with linked(server.url) as node:
        node.beat(*range(1, 21))
        node.link.close(LONG_S)
        assert len(node.link._attempts) == 3


# --- requests


def announce(server: PlayedServer) -> queue.Queue[str]:
    """The ids of logs and replies as they arrive: a heartbeat before that would take their turn."""
    arrived = queue.Queue[str]()

    def note(handler: Handler) -> None:
        arrived.put(server.requests[-1].message["request_id"])
        reply({}, 201)(handler)

    server.turns[LOGS] = server.turns[REPLIES] = [note] * 20
    return arrived


def test_requests_go_before_logs_within_the_same_bounds(server: PlayedServer):
    arrived = announce(server)
    server.turns[HEARTBEATS] = [reply(request("a", "b", "c", logs=("d", "e")))] * 2
    with linked(server.url) as node:
        node.beat(1)
        assert [arrived.get(timeout=LONG_S) for _ in range(4)] == ["a", "b", "c", "d"]
        node.beat(2)
        assert arrived.get(timeout=LONG_S) == "e"
        node.beat(3)
    assert [each for each, _ in node.carried_out] == ["a", "b", "c"]
    assert node.read == ["d", "e"]
    assert [message["request_id"] for message in server.sent(REPLIES)] == ["a", "b", "c"]
    paths = [each.path for each in server.requests if each.path in (LOGS, REPLIES)]
    assert paths == [REPLIES, REPLIES, REPLIES, LOGS, LOGS]
    assert server.sent(REPLIES)[0] == {
        "node_id": "node-1", "request_id": "a", "value": {"kind": "explain"}, "error": "", "is_refused": False,
    }  # fmt: skip
    assert all(0 < timeout_s <= link_module.REQUESTS_S for _, timeout_s in node.carried_out)


def test_a_request_without_time_comes_again_and_none_overtakes_it(server: PlayedServer, logs: list[Any]):
    arrived = announce(server)
    server.turns[HEARTBEATS] = [reply(request("a", "b"))] * 20
    with linked(server.url) as node:
        node.busy = 10
        node.beat(*range(1, 12))
        assert [arrived.get(timeout=LONG_S) for _ in range(2)] == ["a", "b"]
        node.beat(12)
    assert [each for each, _ in node.carried_out] == ["a"] * 11 + ["b"]
    assert arrived.empty()
    assert events(logs) == ["node_registered"]


@pytest.mark.parametrize(
    ("answer", "path", "event"), [(ask("a"), LOGS, "job_log_not_sent"), (request("a"), REPLIES, "job_reply_not_sent")]
)
def test_an_answer_to_a_user_that_cannot_be_sent_is_tried_some_times(
    server: PlayedServer, logs: list[Any], answer: wire.HeartbeatAnswer, path: str, event: str
):
    server.turns[HEARTBEATS] = [reply(answer)] * 8
    server.turns[path] = [refuse(503, "busy")] * 8
    with linked(server.url) as node:
        node.beat(*range(1, 10))
    assert len(node.read) + len(node.carried_out) == link_module.REQUEST_ATTEMPTS
    assert node.link.stats().failed_total == 0
    assert events(logs) == ["node_registered", event]
    assert (logs[1]["job_id"], logs[1]["error"]) == ("job-of-a", f"{server.url}{path}: answered 503: busy")


def test_who_asks_for_what_fails_is_told_why(server: PlayedServer):
    def raise_on(request: wire.JobRequest, timeout_s: float) -> wire.JobReply:
        if request.request_id == "a":
            raise RuntimeError("a\nmistake")
        return wire.JobReply("node-1", request.request_id, {"name": "\ud800"})

    def read_log(request: wire.LogRequest) -> wire.JobLog:
        raise OSError("bad\ndisk")

    arrived = announce(server)
    server.turns[HEARTBEATS] = [reply(request("a", "b", logs=("c",)))]
    with linked(server.url, calls={"carry_out": raise_on, "read_log": read_log}) as node:
        node.beat(1)
        assert [arrived.get(timeout=LONG_S) for _ in range(3)] == ["a", "b", "c"]
    assert [message["error"] for message in server.sent(LOGS)] == ["the log cannot be read: OSError: bad disk"]
    first, second = server.sent(REPLIES)
    assert (first["error"], first["value"]) == ("explain failed: RuntimeError: a mistake", None)
    assert second["error"].startswith("explain failed: UnicodeEncodeError: ")
