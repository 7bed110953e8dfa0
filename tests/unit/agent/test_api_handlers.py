"""What the agent answers, without a process: the applications of both sockets, and the thread that serves them."""

import asyncio
import contextlib
import http.client
import re
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_node import QUICK, FakeNode, source

from cpumond.agent import api
from cpumond.agent.api import make_page_app, make_private_app, make_public_app, serve
from cpumond.agent.exporter import AgentMetrics
from cpumond.agent.service import Agent
from cpumond.core.errors import UnavailableError

PRIVATE_PATHS = ["/v1/status", "/v1/registered", "/v1/jobs/a/explain", "/v1/jobs/a/pin", "/v1/registered/a"]


class Caller:
    """Asks one of the agent's applications; each request carries out what it queued, as the tick would."""

    def __init__(self, agent: Agent, make_app: Callable[[Agent, AgentMetrics], Any]) -> None:
        self._agent = agent
        metrics = AgentMetrics(agent.read_snapshot, lambda: agent.config.metrics, agent.context.reporter.stats)
        self._app = make_app(agent, metrics)

    def __call__(
        self, method: str, path: str, content: bytes | None = None, host: str = "localhost"
    ) -> httpx2.Response:
        self._agent.read_snapshot()  # made here, where no tick's thread would answer the application's
        return asyncio.run(self._ask(method, path, content, host))

    async def _ask(self, method: str, path: str, content: bytes | None, host: str) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=self._app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, content=content, headers={"host": host})


@pytest.fixture
def node(make_node: Callable[..., FakeNode]) -> FakeNode:
    node = make_node({"a": {}}, config=QUICK + source())
    node.make("a", quota="400000 100000")
    return node


@pytest.fixture
def ticking(node: FakeNode) -> Iterator[FakeNode]:
    """The node after its first tick, with a thread that carries out requests."""
    node.start()
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            node.agent._wait(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    yield node
    done.set()
    node.agent.wake()
    thread.join(60.0)


@pytest.fixture
def public(node: FakeNode) -> Caller:
    return Caller(node.agent, make_public_app)


@pytest.fixture
def private(node: FakeNode) -> Caller:
    return Caller(node.agent, make_private_app)


def test_before_the_first_tick_it_is_alive_and_not_ready(public: Caller, private: Caller):
    assert public("GET", "/healthz").json() == {"status": "ok"}
    answer = public("GET", "/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "starting"})
    assert "cpumond_build_info" in public("GET", "/metrics").text
    status = private("GET", "/v1/status")
    assert (status.status_code, status.json()["exit_code"]) == (503, 69)


def test_ready_while_ticks_come_and_not_when_they_stop(node: FakeNode, public: Caller, private: Caller):
    """Five periods without a tick; alive it is all the while, and ready again after the next tick."""
    node.start()
    for passed_s, age_s, code, status in ((1.5, 1.5, 200, "ok"), (3.5, 5.0, 503, "stuck")):
        node.clock.advance(passed_s)
        answer = public("GET", "/readyz")
        assert (answer.status_code, answer.json()) == (code, {"status": status, "last_tick_age_s": age_s})
    assert public("GET", "/healthz").status_code == 200
    assert private("GET", "/v1/status").json()["last_tick_age_s"] == 5.0
    node.tick()
    assert public("GET", "/readyz").status_code == 200
    node.reload(QUICK.replace("[monitor]", "[monitor]\ncheck_period = 50") + source())
    node.tick(seconds=0.05)
    for code in (200, 503):  # a short period gets two seconds
        node.clock.advance(1.9 if code == 200 else 0.1)
        assert public("GET", "/readyz").status_code == code


def test_the_public_application_has_metrics_and_health_only(node: FakeNode, public: Caller):
    node.start()
    before = (node.files("a"), node.agent.context.registered.content)
    for path in [*PRIVATE_PATHS, "/", "/v1", "/metrics/", "/metrics/x", "/docs", "/openapi.json", "//v1/status"]:
        for method in ("GET", "POST", "PUT", "DELETE"):
            answer = public(method, path, b'{"cgroup": "jobs/a"}')
            assert answer.status_code == 404, (method, path)
            assert list(answer.json()) == ["error", "exit_code"]
    assert (node.files("a"), node.agent.context.registered.content) == before


METRICS = "text/plain; version=0.0.4; charset=utf-8"
TYPES = {"/metrics": METRICS, "/healthz": "application/json", "/readyz": "application/json"}


@pytest.mark.parametrize("path", TYPES)
def test_the_public_application_is_read_only(path: str, node: FakeNode, public: Caller):
    node.start()
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        answer = public(method, path)
        assert answer.status_code == 405
        assert answer.json() == {"error": f"{method} {path}: Method Not Allowed", "exit_code": 69}
    answer = public("GET", path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, TYPES[path])
    assert public("HEAD", path).content == b""


def test_the_private_application_has_everything(ticking: FakeNode, private: Caller):
    for path in ("/metrics", "/healthz", "/readyz", "/v1/status", "/v1/registered", "/v1/jobs/a/explain"):
        assert private("GET", path).status_code == 200, path
    assert private("PUT", "/v1/jobs/a/pin", b'{"cpu_limit": 2}').json()["pinned_cpu_limit"] == 2.0
    assert ticking.cores("a") == 2.0
    assert private("DELETE", "/v1/jobs/a/pin").json()["pinned_cpu_limit"] is None


NO_OBJECTS = [
    b"garbage", b"\xff\xfe\x00", b"[1, 2]", b'{"a": 1} x', b"null", b'{"cgroup": "\xff"}', b'{"a": ' + b"[" * 30_000,
    b" " * api.MAX_BODY_BYTES,
]  # fmt: skip
WRONG = [
    *(("POST", "/v1/registered", body, 400, 78, "the request is not a JSON object: ") for body in NO_OBJECTS),
    ("POST", "/v1/registered", b"{}", 422, 78, ""),
    ("POST", "/v1/registered", b'{"cgroup": "../../etc"}', 422, 78, ""),
    ("POST", "/v1/registered", b'{"cgroup": "jobs/a", "job_cpu_monitor": 7}', 422, 78, ""),
    ("POST", "/v1/registered", b" " * (api.MAX_BODY_BYTES + 1), 413, 78, "the request is larger than 65536 bytes"),
    ("GET", "/v1/jobs/absent/explain", None, 404, 69, "no job "),
    ("PUT", "/v1/jobs/absent/pin", b'{"cpu_limit": 1}', 404, 69, "no job "),
    ("DELETE", "/v1/jobs/absent/pin", None, 404, 69, "no job "),
    ("DELETE", "/v1/registered/absent%20%22a%2Fb%22", None, 404, 69, "no job "),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "beginning"),
    WRONG,
    ids=[f"{method} {path} {(body or b'')[:20]!r}" for method, path, body, *_ in WRONG],
)
@pytest.mark.usefixtures("ticking")
def test_what_is_wrong_is_one_sentence_and_changes_nothing(
    private: Caller, method: str, path: str, body: bytes | None, status: int, code: int, beginning: str
):
    answer = private(method, path, body)
    sentence = answer.json()["error"]
    assert (answer.status_code, answer.json()["exit_code"]) == (status, code)
    assert sentence.startswith(beginning)
    assert re.fullmatch(".+", sentence)
    assert private("GET", "/v1/registered").json() == {"jobs": []}


@pytest.mark.parametrize(("error", "status", "sentence"), [
    (TimeoutError(), 503, "the agent's tick did not respond within 10 s; see its log"),
    (ZeroDivisionError("x"), 500, "the agent failed to handle this request; see its log"),
    (UnavailableError("it is not there"), 404, "it is not there"),
])  # fmt: skip
def test_a_failure_behind_a_request(
    node: FakeNode, private: Caller, monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, Any]],
    error: Exception, status: int, sentence: str,
):  # fmt: skip
    """The caller gets a sentence, the log the traceback of an unexpected error."""
    node.start()

    def call(_: object) -> None:
        raise error

    monkeypatch.setattr(node.agent, "call", call)
    answer = private("GET", "/v1/registered")
    assert (answer.status_code, answer.json()) == (status, {"error": sentence, "exit_code": 69})
    failures = [record for record in logs if record["event"] == "request_failed"]
    assert [record["path"] for record in failures] == (["/v1/registered"] if status == 500 else [])


PAGE_PATHS = ["/", "/web/agent.js", "/api/v1/status", "/api/v1/jobs/a/explain"]


@pytest.fixture
def page(node: FakeNode) -> Caller:
    return Caller(node.agent, lambda agent, _: make_page_app(agent))


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_the_page_and_what_it_shows_are_read_only(path: str, ticking: FakeNode, page: Caller):
    shown = page("GET", path, host="localhost")
    assert shown.status_code == 200
    head = page("HEAD", path, host="localhost")
    assert (head.status_code, head.content) == (200, b"")
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = page(method, path, b"{}", host="localhost")
        assert (answer.status_code, sorted(answer.headers["allow"].split(", "))) == (405, ["GET", "HEAD"])
    for answer in (shown, page("POST", path, host="localhost"), page("GET", "/nothing", host="localhost")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "access-control-allow-origin" not in answer.headers


OWN_HOSTS = ["localhost:9759", "LocalHost:1", "127.0.0.1", "127.1.2.3", "[::1]", "[::1]:9759"]
OTHER_HOSTS = [
    "evil.example", "evil.example:9759", "localhost.evil.example", "127.0.0.1.evil.example", "node-7", "10.0.0.1",
    "0.0.0.0", "[::]", "", "[", "::1", "127.0.0.1@evil.example",  # noqa: S104 - names in a header
]  # fmt: skip


def test_the_page_is_read_by_loopback_names_alone(node: FakeNode, page: Caller):
    """DNS rebinding: a strange page whose name leads to the loopback address reads nothing."""
    node.start()
    assert {page("GET", "/api/v1/status", host=host).status_code for host in OWN_HOSTS} == {200}
    sentence = "this page is only for this host: open it as localhost or 127.0.0.1, not under another name"
    for host, path in [*product(OTHER_HOSTS, ["/api/v1/status"]), *product(["evil.example"], PAGE_PATHS)]:
        answer = page("GET", path, host=host)
        assert (answer.status_code, answer.json()) == (403, {"error": sentence, "exit_code": 77})
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_metrics_port_knows_the_hosts_full_name_once_dns_does(node: FakeNode, monkeypatch: pytest.MonkeyPatch):
    node.start()
    known = "host7"
    monkeypatch.setattr(socket, "gethostname", lambda: "host7")
    monkeypatch.setattr(socket, "getfqdn", lambda: known)
    ask = Caller(node.agent, make_public_app)

    def is_answered(host: str) -> bool:
        return ask("GET", "/healthz", host=host).status_code != 403

    # HTTP/1.0 needs no name, and the checks of load balancers send none.
    assert [is_answered(host) for host in ("host7:9756", "10.0.0.1", "", "evil.example")] == [True, True, True, False]
    assert not is_answered("host7.example.org")
    known = "host7.example.org"
    assert not is_answered("host7.example.org")
    monkeypatch.setattr(api, "ASK_NAME_S", 0.0)
    assert is_answered("host7.example.org")
    known = "host7"
    assert [is_answered(host) for host in ("evil.example", "host7.example.org")] == [False, True]


def test_the_page_shows_what_the_control_socket_does(ticking: FakeNode, page: Caller, private: Caller):
    shown, status = page("GET", "/api/v1/status", host="localhost").json(), private("GET", "/v1/status").json()
    assert shown == status
    assert shown["now"] == pytest.approx(ticking.clock.wall_s())
    assert shown["last_tick_age_s"] == 0.0
    explained = page("GET", "/api/v1/jobs/a/explain", host="localhost").json()
    assert explained == private("GET", "/v1/jobs/a/explain").json()
    assert explained["samples"]["at"] == []


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def read_status(address: tuple[str, int], path: str = "/healthz") -> int:
    connection = http.client.HTTPConnection(*address, timeout=250)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def test_a_request_that_waits_at_the_end_is_answered(node: FakeNode, tmp_path: Path):
    """The tick ends before the server, so the request is not carried out any more."""
    node.start()
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "control.sock"))
    unix.listen(5)
    queued, over = threading.Event(), threading.Event()
    node.agent.call = lambda *_: queued.set() or over.wait(60.0)  # type: ignore[method-assign]
    server = serve(node.agent, [unix])
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60.0)
        client.connect(str(tmp_path / "control.sock"))
        client.sendall(b"GET /v1/registered HTTP/1.1\r\nHost: agent\r\n\r\n")
        assert queued.wait(60.0)
        server.stop()
        answer = client.recv(65536)
    over.set()
    assert not server._thread.is_alive()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"the agent is stopping" in answer


class BrokenOnce:
    family = socket.AF_INET

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.tries = 0

    def dup(self) -> socket.socket:
        self.tries += 1
        if self.tries == 1:
            raise OSError(24, "Too many open files")
        return self._listener.dup()

    def close(self) -> None:
        self._listener.close()


def test_a_server_that_fails_says_so_and_tries_again(
    node: FakeNode, listener: socket.socket, logs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """The agent never runs silently without its API: an error for each failure, and the next try."""
    monkeypatch.setattr(api, "RETRY_S", 0.01)
    node.start()
    broken = BrokenOnce(listener)
    server = serve(node.agent, [broken])  # type: ignore[list-item]
    try:
        assert read_status(listener.getsockname()) == 200
    finally:
        server.stop()
    failures = [record for record in logs if record["event"] == "api_failed"]
    assert [record["log_level"] for record in failures] == ["error"]
    assert broken.tries == 2


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_silent_connections_end(sent: bytes, node: FakeNode, listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    """Nothing sent, half a request, or nothing after the first answer: the connection does not stay for ever."""
    monkeypatch.setattr(api, "EXCHANGE_S", 0.2)
    server = serve(node.agent, [listener])
    try:
        with socket.create_connection(listener.getsockname(), timeout=250) as client:
            client.sendall(sent)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(4096):
                    received += data
        assert received.startswith(b"HTTP/1.1 200 OK") == sent.endswith(b"\r\n\r\n")
    finally:
        server.stop()


@pytest.mark.parametrize("case", ["one", "none", "a try that fails"])
def test_a_server_that_is_stopped_at_once_ends(
    case: str, node: FakeNode, listener: socket.socket, logs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """With sockets, without any (no [metrics] listen), and while it waits for its next try."""
    monkeypatch.setattr(api, "RETRY_S", 3600.0)
    sockets: dict[str, list[Any]] = {"one": [listener], "none": [], "a try that fails": [BrokenOnce(listener)]}
    server = serve(node.agent, sockets[case])
    server.stop()
    assert not server._thread.is_alive()
