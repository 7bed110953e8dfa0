"""Responses of a standby: its health, its metrics, the files of the page, and a 503 that names the leader."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cpumond.api import overview, views
from cpumond.api.endpoints import PREFIX
from cpumond.api.json.prepared import encode
from cpumond.api.json.routes import JSON
from cpumond.api.metrics import Metrics, make_metrics_route
from cpumond.api.server import DataHeaders
from cpumond.api.turns import BeginAtOnce
from cpumond.api.yt.transport import make_error_response
from cpumond.api.yt.values import YtError
from cpumond.scheduler.program.door import REFUSAL, describe_standby, standby_headers
from cpumond.scheduler.store import StoreError
from cpumond.scheduler.store.lead import LeadView
from cpumond.web import make_web_routes

METHODS = ["GET", "POST", "PUT", "HEAD", "DELETE", "PATCH", "OPTIONS"]


def make_standby_app(view: Callable[[], LeadView], address: str, metrics: Metrics) -> Starlette:
    """Make the application for a standby with the address ``address``, and for a leader before its first update."""

    async def healthz(_: Request) -> Response:
        return _send_health(view(), 200)

    async def readyz(_: Request) -> Response:
        return _send_health(view(), 503 if view().error else 200)

    async def refuse(request: Request) -> Response:
        seen, path = view(), request.url.path
        text = describe_standby(seen, address, str(request.scope.get(REFUSAL, "")))
        if path.startswith(PREFIX) or not path.startswith("/api"):
            response = Response(encode(views.Failure(text, StoreError.code, {})), 503, media_type=JSON)
        else:
            response = make_error_response(YtError(text, StoreError.code), 503)
        response.headers.update(standby_headers(seen, address))
        return response

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            make_metrics_route(metrics),
            *make_web_routes("scheduler.html"),
            Route("/{rest:path}", refuse, methods=METHODS),
        ],
        middleware=[Middleware(BeginAtOnce), Middleware(DataHeaders)],
    )


def _send_health(seen: LeadView, status: int) -> Response:
    health = overview.Health(
        "refusing" if seen.error else "ok", role=seen.role, leader=seen.leader, term=seen.term or None
    )
    return Response(encode(health), status, media_type=JSON)
