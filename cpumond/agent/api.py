"""HTTP server of the agent, in its own thread.

It serves metrics and health on TCP, the page on a loopback address, and everything else on the unix socket.

Handlers read the published snapshot. Requests for the live records run in the tick's thread (``Agent.call``)."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpumond.agent import control
from cpumond.agent.exporter import AgentMetrics
from cpumond.agent.service import Agent
from cpumond.core.answers import is_stuck
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import AccessError, ConfigError, CpumondError, RefusedError, UnavailableError, UsageError
from cpumond.core.settings import is_loopback
from cpumond.host.connections import BoundedH11, Door
from cpumond.host.service import close_sockets

log = structlog.get_logger("cpumond.agent")

MAX_BODY_BYTES = 64 * 1024
MAX_CONNECTIONS = 64
"""Maximum number of connections. When one more arrives, a connection of the address with the most connections is
closed, so a flood from one address does not affect Prometheus."""
ACCEPTED_AT_ONCE = 16
BACKLOG = 1024
MAX_HELD_BYTES = 32 * 2**20
"""Maximum number of bytes in unread responses, summed over all connections of one application."""
KEEP_ALIVE_S = 20
ASK_NAME_S = 60.0
EXCHANGE_S = 40.0
"""Maximum seconds until a response ends, from the connection or the previous response on. Longer than KEEP_ALIVE_S."""
RETRY_S = 5.0
STOP_S = 3.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PAGE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
)
"""Headers added to each response over TCP that does not set them itself."""


class BadRequestError(ConfigError):
    """The body of a request is not JSON."""


class TooLargeError(ConfigError):
    """The body of a request is larger than MAX_BODY_BYTES."""


STATUS_OF: dict[type[CpumondError], int] = {
    ConfigError: 422,
    UsageError: 422,
    BadRequestError: 400,
    TooLargeError: 413,
    RefusedError: 403,
    AccessError: 403,
    UnavailableError: 404,
}


def make_public_app(agent: Agent, metrics: AgentMetrics) -> ASGIApp:
    advice = "this host has no such name: use its address or host name, or add the name to [metrics] names"
    return _OwnNamesOnly(_make_app(_public_routes(agent, metrics)), OwnNames(agent), advice)


def make_private_app(agent: Agent, metrics: AgentMetrics) -> ASGIApp:
    return _make_app([*_public_routes(agent, metrics), *_private_routes(agent)])


def make_page_app(agent: Agent) -> ASGIApp:
    """Make the application on ``[web] listen``: the page and its data. They cannot change the agent."""
    from cpumond.web import make_web_routes

    routes = [
        *make_web_routes("agent.html"),
        Route("/api/v1/status", _read_status(agent)),
        Route("/api/v1/jobs/{name:path}/explain", _act(agent, lambda name, _: control.explain_job(agent, name))),
    ]
    advice = "this page is only for this host: open it as localhost or 127.0.0.1, not under another name"
    return _OwnNamesOnly(_make_app(routes), _is_loopback_name, advice)


class _OwnNamesOnly:
    """Refuses requests for host names that ``is_own`` does not know, and adds ``PAGE_HEADERS``.

    Otherwise an attacker's page could read this one, if the name of its site resolves to this host (DNS rebinding)."""

    def __init__(self, app: ASGIApp, is_own: Callable[[str], Awaitable[bool]], advice: str) -> None:
        self._app = app
        self._is_own = is_own
        self._advice = advice

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(each for each in PAGE_HEADERS if each[0] not in given)]
            await send(message)

        # A request of HTTP/1.0 may omit the host, but browsers always send it.
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"] or [""]
        without_port = hosts[0][1:].partition("]")[0] if hosts[0].startswith("[") else hosts[0].partition(":")[0]
        if len(hosts) == 1 and await self._is_own(without_port):
            await self._app(scope, receive, send_with_headers)
            return
        await _json({"error": self._advice, "exit_code": 77}, 403)(scope, receive, send_with_headers)


async def _is_loopback_name(host: str) -> bool:
    return is_loopback(host)


class OwnNames:
    """The host names that requests may use: IP addresses, which DNS rebinding cannot forge; "localhost"; the host name,
    short and with its domain; the node id; the names in ``[metrics] listen`` and ``[metrics] names``."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._full_name = ""
        self._asked_at_s = -math.inf

    async def __call__(self, host: str) -> bool:
        """Return whether ``host`` (without a port) is a name of this host."""
        name = host.lower().rstrip(".")
        if not name or is_loopback(name) or _is_address(name) or name in self._known():
            return True
        if name != self._full_name and time.monotonic() - self._asked_at_s >= ASK_NAME_S:
            # This may query a name server, which may not answer while the host starts.
            self._asked_at_s = time.monotonic()
            found = (await run_in_threadpool(socket.getfqdn)).lower().rstrip(".")
            self._full_name = found if "." in found else self._full_name
        return name == self._full_name

    def _known(self) -> set[str]:
        config, own = self._agent.config, socket.gethostname().lower()
        given = (config.node_id, config.metrics.listen.rpartition(":")[0], *config.metrics.names)
        return {own, own.partition(".")[0], *(each.lower().rstrip(".") for each in given if each)}


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _make_app(routes: list[Route]) -> Starlette:
    app = Starlette(routes=routes, exception_handlers={HTTPException: _make_refusal})
    app.router.redirect_slashes = False
    return app


async def _make_refusal(request: Request, error: Exception) -> Response:
    """Return a response for 404 and 405 in the same form as for all other errors."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _json({"error": text, "exit_code": 69}, error.status_code, error.headers)


def _public_routes(agent: Agent, metrics: AgentMetrics) -> list[Route]:
    async def read_metrics(_: Request) -> Response:
        try:
            text = await run_in_threadpool(metrics.encode)
        except (CpumondError, TimeoutError) as error:
            return _json({"error": str(error) or "the agent's tick is stuck; see its log", "exit_code": 69}, 503)
        return Response(text, headers={"content-type": METRICS_TYPE})

    async def healthz(_: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(_: Request) -> Response:
        last = agent.context.last
        if last is None:
            return _json({"status": "starting"}, 503)
        age_s = agent.clock.monotonic_s() - last.at_s
        ready = not is_stuck(age_s, last.check_period_s)
        return _json({"status": "ok" if ready else "stuck", "last_tick_age_s": round(age_s, 3)}, 200 if ready else 503)

    return [Route("/metrics", read_metrics), Route("/healthz", healthz), Route("/readyz", readyz)]


def _read_status(agent: Agent) -> Callable[[Request], Awaitable[Response]]:
    async def status(_: Request) -> Response:
        try:
            snapshot = await run_in_threadpool(agent.read_snapshot)
        except (CpumondError, TimeoutError) as error:
            return _json({"error": str(error) or "the agent's tick is stuck; see its log", "exit_code": 69}, 503)
        if snapshot is None:
            return _json({"error": "the agent is starting; try again in a moment", "exit_code": 69}, 503)
        age_s = agent.clock.monotonic_s() - snapshot.at_s
        now = agent.clock.wall_s()
        answer = control.view_agent(snapshot)
        return _json(msgspec.structs.replace(answer, last_tick_age_s=round(age_s, 3), now=round(now, 3)))

    return status


def _act(agent: Agent, work: Callable[[str, dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Make a handler that runs ``work`` in the tick's thread, and passes it the job's name and the request's JSON."""

    async def handle(request: Request) -> Response:
        try:
            body = await _read_body(request)
            name = request.path_params.get("name", "")
            result = await run_in_threadpool(agent.call, lambda: work(name, body))
        except CpumondError as error:
            return _json({"error": str(error), "exit_code": error.exit_code}, STATUS_OF.get(type(error), 500))
        except TimeoutError:
            return _json({"error": "the agent's tick did not respond within 10 s; see its log", "exit_code": 69}, 503)
        except asyncio.CancelledError:
            # The server is stopping and does not wait for responses; the tick carries out no more requests.
            return _json({"error": "the agent is stopping; try again when it is back", "exit_code": 69}, 503)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception:
            log.exception("request_failed", method=request.method, path=request.url.path)
            return _json({"error": "the agent failed to handle this request; see its log", "exit_code": 69}, 500)
        return _json(result)

    return handle


def _private_routes(agent: Agent) -> list[Route]:
    def route(path: str, work: Callable[[str, dict[str, Any]], Any], method: str = "GET") -> Route:
        return Route(path, _act(agent, work), methods=[method])

    return [
        Route("/v1/status", _read_status(agent)),
        route("/v1/registered", lambda _, __: control.list_registered(agent)),
        route("/v1/registered", lambda _, body: control.add_job(agent, body), "POST"),
        route("/v1/registered/{name:path}", lambda name, _: control.remove_job(agent, name), "DELETE"),
        route("/v1/jobs/{name:path}/explain", lambda name, _: control.explain_job(agent, name)),
        route("/v1/jobs/{name:path}/pin", lambda name, body: control.pin_job(agent, name, body), "PUT"),
        route("/v1/jobs/{name:path}/pin", lambda name, _: control.unpin_job(agent, name), "DELETE"),
    ]


async def _read_body(request: Request) -> dict[str, Any]:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise TooLargeError(f"the request is larger than {MAX_BODY_BYTES} bytes")
    if not data:
        return {}
    try:
        return decode_json(data, dict[str, Any])
    except ContentError as error:
        raise BadRequestError(f"the request is not a JSON object: {error}") from None


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


class _Server(uvicorn.Server):
    """A server that waits for ``stopping`` instead of polling ten times a second, which costs 0.2 % of a core."""

    def __init__(self, app: ASGIApp, stopping: asyncio.Event) -> None:
        door = Door(MAX_CONNECTIONS, MAX_HELD_BYTES, EXCHANGE_S, by_source=True)
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Connection", (BoundedH11,), {"door": door}),
                backlog=ACCEPTED_AT_ONCE,
                ws="none",
                lifespan="off",
                log_config=None,
                # Invalid requests of port scanners are not logged.
                log_level="error",
                access_log=False,
                server_header=False,
                # The library updates the date in its own loop, which ``main_loop`` replaces.
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            # The loop accepts as many connections per turn as the backlog it was given; now enlarge the backlog.
            sock.listen(BACKLOG)

    async def main_loop(self) -> None:
        await self._stopping.wait()


class AgentServer:
    """The thread that serves each application on its bound sockets; the agent ends it with ``stop``.

    Each application has its own limit of connections, so a flood on TCP does not affect the unix socket."""

    def __init__(self, served: list[tuple[ASGIApp, list[socket.socket]]]) -> None:
        self._served = [(app, sockets) for app, sockets in served if sockets]
        self._ending = threading.Event()
        self._wake: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                asyncio.run(self._serve())
            except (Exception, SystemExit):
                # The sockets stay bound, and the agent continues its main work.
                log.exception("api_failed", retry_s=RETRY_S)
                self._ending.wait(RETRY_S)

    async def _serve(self) -> None:
        stopping, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(stopping.set)
        if self._ending.is_set():
            return
        with contextlib.ExitStack() as stack:
            async with asyncio.TaskGroup() as tasks:
                for app, sockets in self._served:
                    # A server closes its sockets, but the next attempt needs them: give it duplicates.
                    own = [stack.enter_context(sock.dup()) for sock in sockets]
                    tasks.create_task(_Server(app, stopping).serve(own))

    def replace_control(self, control: socket.socket) -> None:
        """Serve ``control`` instead of the previous control socket, whose file is gone."""
        sockets = self._served[0][1]
        before, sockets[:] = list(sockets), [control]
        self._end_loop()
        close_sockets(before)

    def _end_loop(self) -> None:
        if self._wake is not None:
            # The loop may have ended already.
            with contextlib.suppress(RuntimeError):
                self._wake()

    def stop(self) -> None:
        """End the thread and close the sockets."""
        self._ending.set()
        self._end_loop()
        self._thread.join(STOP_S)
        for _, sockets in self._served:
            close_sockets(sockets)


def serve(agent: Agent, sockets: list[socket.socket], web: Sequence[socket.socket] = ()) -> AgentServer:
    """Start to serve bound sockets: everything on unix sockets, metrics and health on TCP, the page on ``web``."""
    metrics = AgentMetrics(
        agent.read_snapshot,
        lambda: agent.config.metrics,
        lambda: agent.context.reporter.stats(),  # noqa: PLW0108 - a reload replaces the reporter
        agent.context.hierarchies.unified_root,
    )
    unix = [sock for sock in sockets if sock.family == socket.AF_UNIX]
    tcp = [sock for sock in sockets if sock.family != socket.AF_UNIX]
    served = [(make_private_app(agent, metrics), unix), (make_public_app(agent, metrics), tcp)]
    if web:
        served.append((make_page_app(agent), list(web)))
    server = AgentServer(served)
    server.start()
    return server
