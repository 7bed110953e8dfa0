"""HTTP of the agent, in a thread of its own: metrics and health on TCP, everything else on the unix socket.

Handlers read the published snapshot; what needs the live records is handed to the tick's thread with ``Agent.call``.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cpumond.agent import control
from cpumond.agent.exporter import AgentCollector, MetricsText
from cpumond.agent.loop import Agent
from cpumond.errors import ConfigError, CpumondError

MAX_BODY_BYTES = 64 * 1024
READY_PERIODS = 5
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATUS_OF = {"ConfigError": 422, "UsageError": 422, "RefusedError": 403, "AccessError": 403, "UnavailableError": 404}


def make_app(agent: Agent, metrics: MetricsText) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """One ASGI application: the unix socket gets every route, TCP only metrics and health."""
    public = Starlette(routes=_public_routes(agent, metrics))
    private = Starlette(routes=[*_public_routes(agent, metrics), *_private_routes(agent)])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        local = scope.get("server")
        is_unix = local is not None and local[1] is None
        await (private if is_unix else public)(scope, receive, send)

    return app


def _public_routes(agent: Agent, metrics: MetricsText) -> list[Route]:
    async def read_metrics(_: Request) -> Response:
        return Response(metrics.encode(), headers={"content-type": METRICS_TYPE})

    async def healthz(_: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(_: Request) -> Response:
        snapshot = agent.snapshot
        if snapshot is None:
            return _json({"status": "starting"}, 503)
        age_s = time.monotonic() - snapshot.at_s
        ready = age_s < max(READY_PERIODS * snapshot.check_period_s, 2.0)
        return _json({"status": "ok" if ready else "stuck", "last_tick_age_s": round(age_s, 3)}, 200 if ready else 503)

    return [Route("/metrics", read_metrics), Route("/healthz", healthz), Route("/readyz", readyz)]


def _private_routes(agent: Agent) -> list[Route]:
    async def status(_: Request) -> Response:
        snapshot = agent.snapshot
        return _json(control.describe_agent(snapshot)) if snapshot else _json({"error": "the agent is starting"}, 503)

    def action(work: Callable[[str, dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                body = await _read_body(request)
                name = request.path_params.get("name", "")
                result = await run_in_threadpool(agent.call, lambda: work(name, body))
            except CpumondError as error:
                return _json(
                    {"error": str(error), "exit_code": error.exit_code}, STATUS_OF.get(type(error).__name__, 500)
                )
            except TimeoutError:
                return _json({"error": "the agent's tick did not answer in 10 s; see its log", "exit_code": 69}, 503)
            return _json(result)

        return handle

    return [
        Route("/v1/status", status),
        Route("/v1/registered", action(lambda _, __: control.list_registered(agent))),
        Route("/v1/registered", action(lambda _, body: control.add_job(agent, body)), methods=["POST"]),
        Route(
            "/v1/registered/{name:path}", action(lambda name, _: control.remove_job(agent, name)), methods=["DELETE"]
        ),
        Route("/v1/jobs/{name:path}/explain", action(lambda name, _: control.explain_job(agent, name))),
        Route(
            "/v1/jobs/{name:path}/pin", action(lambda name, body: control.pin_job(agent, name, body)), methods=["PUT"]
        ),
        Route("/v1/jobs/{name:path}/pin", action(lambda name, _: control.unpin_job(agent, name)), methods=["DELETE"]),
    ]


async def _read_body(request: Request) -> dict[str, Any]:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise ConfigError(f"the request is larger than {MAX_BODY_BYTES} bytes")
    if not data:
        return {}
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"the request is not a JSON object: {error}") from None
    return body


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class ApiServer:
    """The thread that serves ``app`` on already bound sockets; the agent ends it with ``stop``."""

    def __init__(self, app: Any, sockets: list[socket.socket]) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=64,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._sockets = sockets
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def _run(self) -> None:
        # Not Server.run: its signal handlers belong to the tick's thread.
        asyncio.run(self._server._serve(self._sockets))

    def stop(self) -> None:
        """End the thread and close the sockets."""
        self._server.should_exit = True
        self._thread.join(3.0)
        for sock in self._sockets:
            sock.close()


def serve(agent: Agent, sockets: list[socket.socket]) -> ApiServer:
    """Start to answer on bound sockets; the running server."""
    collector = AgentCollector(lambda: agent.snapshot, lambda: agent.config.metrics, lambda: agent.reporter.stats())  # noqa: PLW0108 - a reload replaces it
    server = ApiServer(make_app(agent, MetricsText(collector, lambda: agent.snapshot)), sockets)
    server.start()
    return server
