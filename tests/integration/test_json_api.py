"""The JSON interface on a real socket: a real scheduler with its store, and nodes that speak HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import uvicorn
from scheduler_process import PlayedNode
from starlette.applications import Starlette
from starlette.requests import Request
from structlog.testing import capture_logs
from waiting import wait_until

from cpumond.api.json.call import Shared
from cpumond.api.json.routes import make_json_routes
from cpumond.host.service import open_tcp_sockets
from cpumond.scheduler.answers.forecasts import Forecasts
from cpumond.scheduler.model import AUTHENTICATION, CommandError, Rules
from cpumond.scheduler.program.main import pace_of
from cpumond.scheduler.rights.tokens import User
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.store.sqlite import open_sqlite_store

PERIOD_S = 0.02
T = TypeVar("T")


class LiveScheduler:
    """A scheduler and its server in a thread; ``token`` is the one that requests must carry, "" for none."""

    def __init__(self, directory: Path, *, token: str = "", max_body: int = 64 * 1024, foretells: bool = False) -> None:
        self._store = open_sqlite_store(str(directory / "state.sqlite"))
        (self._socket,) = open_tcp_sockets("127.0.0.1:0", "listen", 100)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.token = token
        self._max_body = max_body
        self._foretells = foretells
        self._started = threading.Event()
        self._capture = capture_logs()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.client = httpx2.Client(base_url=self.url, headers=headers, timeout=250, trust_env=False, verify=False)

    def __enter__(self) -> LiveScheduler:
        # What it logs is not what the commands under test print.
        self._capture.__enter__()
        self._thread.start()
        assert self._started.wait(100.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(100.0)
        assert not self._thread.is_alive()
        self._store.close()
        self._capture.__exit__(None, None, None)

    async def _serve(self) -> None:
        self.loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        # Nodes are played: on a busy machine a test takes longer than the time after which a silent one is lost.
        rules = Rules(spare=(0.0, 0.01, 0.0, 0.0, 0.0), node_heartbeat_timeout_s=3600.0)
        self.scheduler = scheduler = Scheduler(rules, self._store, Clock(), update_period_s=PERIOD_S)
        if self._foretells:
            scheduler.forecasts = Forecasts(
                scheduler.state, scheduler.clock.now, lambda: pace_of(scheduler), 1.0, 1.0, 60.0
            )

        def authenticate(request: Request) -> User:
            if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                raise CommandError("a token is needed: Authorization: Bearer TOKEN", AUTHENTICATION)
            return User(request.headers.get("x-yt-user-name", "tester"), admin=True)

        app = Starlette(routes=make_json_routes(Shared(self.scheduler), authenticate, self._max_body))
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", access_log=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([self._socket]))
        running = asyncio.create_task(self.scheduler.run(self._stopping))
        await self.scheduler.ready.wait()
        self._started.set()
        await running
        server.should_exit = True
        await serving

    def call(self, work: Callable[[Scheduler], Any]) -> Any:
        async def run() -> Any:
            return work(self.scheduler)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(100.0)

    def get(self, path: str, status: int = 200, **query: Any) -> Any:
        return self.ask("GET", path, status=status, params=query)

    def post(self, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
        return self.ask("POST", path, body, status, params=query)

    def ask(self, method: str, path: str, body: Any = None, status: int = 200, **more: Any) -> Any:
        extra = {} if body is None else {"body": body}
        answer = self.request(method, path, **extra, **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    def request(self, method: str, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        return self.client.request(method, f"/api/v1/{path.removeprefix('/')}", json=body, **more)

    def start(self, pool: str, job_count: int = 1, cpu_limit: float = 1.0, **spec: Any) -> str:
        task = {"job_count": job_count, "cpu_limit": cpu_limit, "command": "true"}
        done = self.post("/operations", {"spec": {"pool": pool, "tasks": {"main": task}, **spec}}, 201)
        operation_id: str = done["id"]
        return operation_id

    def wait_for_update(self) -> None:
        """Until an update has begun and ended after this moment."""
        count = self.scheduler.timings.updates
        wait_until(lambda: self.scheduler.timings.updates > count + 1, "an update")


def make_node(server: LiveScheduler, name: str, cpu: float = 4.0, tags: Iterable[str] = ()) -> PlayedNode:
    return PlayedNode(server, name, cpu, tags, memory=2**34)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveScheduler]:
    """A server for tests that change nothing."""
    with LiveScheduler(tmp_path_factory.mktemp("shared")) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveScheduler]:
    with LiveScheduler(tmp_path) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "word"),
    [
        ("POST", "/trees", b"", 400, "no body"),
        ("POST", "/trees", b"[" * 100_000, 413, "larger"),
        ("POST", "/operations", b'{"spec": {"a": ' + b"[" * 10_000, 400, "nested too deep"),
        ("POST", "/trees", b'{"nam": "x"}', 422, "did you mean 'name'"),
        ("POST", "/trees", b'{"name": 3}', 422, "name: expected `str`"),
        ("POST", "/plan", b'{"type": "Nothing"}', 422, "type"),
        ("GET", "/operations?stat=running", b"", 422, "did you mean 'state'"),
        ("GET", "/operations?state=sleeping", b"", 422, "state"),
        ("GET", "/operations?limit=0", b"", 422, "limit"),
        ("GET", "/operations?limit=1&limit=2", b"", 422, "twice"),
        ("GET", "/trees?x=1", b"", 422, "unknown"),
        ("GET", "/operations/1-2-3-4", b"", 404, "No such operation"),
        ("GET", "/trees/none/pools", b"", 404, "does not exist"),
        ("GET", "/nodes/none", b"", 404, "not registered"),
        ("GET", "/oprations", b"", 404, "did you mean /api/v1/operations"),
        ("GET", "/some/where", b"", 404, "openapi.json"),
        ("DELETE", "/operations", b"", 405, "use GET, HEAD, POST"),
    ],
)
def test_a_wrong_request_gets_one_sentence(shared, method, path, content, status, word):
    answer = shared.client.request(method, f"/api/v1{path}", content=content)
    assert answer.status_code == status
    refusal = answer.json()
    assert set(refusal) == {"error", "code", "attributes"}
    assert word in refusal["error"]
    assert "\n" not in refusal["error"]


def test_a_body_that_grows_beyond_the_limit_is_refused_without_a_length(shared):
    def pieces() -> Iterator[bytes]:
        yield from [b" " * 10_000] * 10

    assert shared.client.post("/api/v1/trees", content=pieces()).status_code == 413


def run_one(server: LiveScheduler) -> tuple[PlayedNode, str, str]:
    """A node with one job that runs; operation and job."""
    node = make_node(server, "n1")
    node.register()
    operation = server.start("p")
    wait_until(lambda: node.beat() and node.jobs, "the job")
    node.beat()
    return node, operation, next(iter(node.jobs))


def test_the_end_of_a_log_is_given_byte_by_byte(server):
    node, operation, job = run_one(server)
    node.logs[job, "stdout"] = b"begin" + bytes(range(256)) + b"end"
    node.logs[job, "stderr"] = b"<script>"
    path = f"/api/v1/operations/{operation}/jobs/{job}/log"
    whole = node.beat_until_done(lambda: server.client.get(path))
    assert (whole.status_code, whole.content) == (200, node.logs[job, "stdout"])
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert whole.headers["x-cpumond-total-bytes"] == "264"
    end = node.beat_until_done(lambda: server.client.get(f"{path}?tail=3"))
    assert (end.content, end.headers["x-cpumond-total-bytes"]) == (b"end", "264")
    assert node.beat_until_done(lambda: server.client.get(f"{path}?stream=stderr")).content == b"<script>"
    node.logs[job, "stdout"] = b"x" * 2**21  # longer than other bodies may be
    assert len(node.beat_until_done(lambda: server.client.get(f"{path}?tail={2**20}")).content) == 2**20
    node.end(job)
    assert node.beat_until_done(lambda: server.client.get(f"{path}?stream=stderr")).content == b"<script>"


def test_a_log_that_cannot_be_given_is_an_error_in_json(server):
    node, operation, job = run_one(server)
    path = f"/operations/{operation}/jobs/{job}/log"
    refusal = node.beat_until_done(lambda: server.get(path, 404))
    assert (refusal["error"], refusal["code"]) == (f"job {job}: node n1 has no log of it", 203)
    assert server.get(f"/operations/{operation}/jobs/1-2-3-4/log", 404)["code"] == 203
    assert server.get("/operations/1-2-3-4/jobs/1-2-3-4/log", 404)["code"] == 1915
    assert "tail" in server.get(path, 422, tail=2**20 + 1)["error"]
    assert "stream" in server.get(path, 422, stream="both")["error"]
    server.call(lambda scheduler: setattr(scheduler.logs, "timeout_s", 0.05))
    assert "did not send the log within 0.05 s: is its agent running?" in server.get(path, 504)["error"]
    server.call(lambda scheduler: setattr(scheduler.state.nodes["n1"], "is_online", False))
    assert "sent its last heartbeat" in server.get(path, 503)["error"]


def test_a_job_is_explained_by_its_node(server):
    """Refusals are in ``tests/unit/scheduler/service/test_questions.py``, and above with the statuses of HTTP."""
    node, operation, job = run_one(server)
    node.replies["explain"] = {"value": {"job_id": job, "bounds": {"floor": 0.1}}}
    path = f"/operations/{operation}/jobs/{job}/explain"
    assert node.beat_until_done(lambda: server.get(path)) == {"job_id": job, "bounds": {"floor": 0.1}}
    node.replies["explain"] = {"value": {"text": "x" * (2**20 - 100)}}
    assert len(node.beat_until_done(lambda: server.get(path))["text"]) == 2**20 - 100
    node.replies["explain"] = {"error": "it is ending"}
    assert node.beat_until_done(lambda: server.get(path, 503))["error"] == "node n1: it is ending"


def test_a_pin_goes_to_the_node_and_its_refusal_comes_back(server):
    node, operation, job = run_one(server)
    path = f"/operations/{operation}/jobs/{job}"
    paused = "writes are paused on its node; the pin takes effect when the pause file is removed"
    for body, sent, told, warnings in (
        ({}, (None, None), {"pinned_cpu_limit": 1.0}, []),
        ({"cpu_limit": 0.5, "ttl_s": 60}, (0.5, 60.0), {"pinned_cpu_limit": 0.5, "last_result": "failed"}, []),
        ({"cpu_limit": 0.5}, (0.5, None), {"pinned_cpu_limit": None}, [paused]),
        (
            {"ttl_s": 1.5},
            (None, 1.5),
            {"last_result": "failed", "last_error": "EPERM"},
            ["the limit could not be written: EPERM"],
        ),
    ):
        node.replies["pin"] = {"value": told}
        done = node.beat_until_done(lambda body=body: server.post(f"{path}/pin", body))
        assert done == {"id": job, "warnings": warnings}
        request = node.requests[-1]
        assert (request["kind"], request["job_id"], request["cpu_limit"], request["ttl_s"]) == ("pin", job, *sent)
    node.replies = {"unpin": {"value": {}}, "pin": {"error": "a pinned limit must be less", "is_refused": True}}
    assert node.beat_until_done(lambda: server.post(f"{path}/unpin", None)) == {"id": job, "warnings": []}
    refusal = node.beat_until_done(lambda: server.post(f"{path}/pin", {"cpu_limit": 9}, 422))
    assert refusal["error"] == "node n1: a pinned limit must be less"
    for wrong in ({"cpu_limit": 0}, {"cpu_limit": 1e300}, {"ttl_s": 0}, {"ttl_s": 1e300}, {"ttl_s": "1h"}, {"for": 1}):
        assert server.post(f"{path}/pin", wrong, 422)["error"].startswith("body: ")
    assert len(node.requests) == 6
