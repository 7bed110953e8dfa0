"""The scheduler's HTTP application: the JSON interface, the `yt` protocol, metrics and health, on one address."""

from __future__ import annotations

import re
from functools import partial
from typing import Final
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpumond.api.bodies import Bodies
from cpumond.api.identity import Gate, KnowAccounts
from cpumond.api.json.call import Shared
from cpumond.api.json.routes import answer_error, make_json_routes
from cpumond.api.metrics import Metrics, make_metrics_route
from cpumond.api.refusals import record_refused_request
from cpumond.api.turns import Turns
from cpumond.api.yt.commands import YtBackend
from cpumond.api.yt.replies import Rates, ReplyCache, YtLimits
from cpumond.api.yt.transport import make_yt_routes
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.program.config import Api
from cpumond.scheduler.program.identities import Identities
from cpumond.scheduler.program.peer import Accounts
from cpumond.scheduler.service import Scheduler
from cpumond.web import make_web_routes


def make_app(
    scheduler: Scheduler, settings: Api, identities: Identities, metrics: Metrics, cluster_name: str
) -> Starlette:
    """Make the application; ``identities``: users known by the configuration."""
    gate = Gate(settings, identities, scheduler)
    rate = settings.rate_limit or 1e9
    limits = YtLimits(settings.max_body, settings.max_depth, requests_per_s=rate, burst_requests=2 * rate)
    shared = Shared(
        scheduler, cluster_name, gate.needs_token, gate.is_open, lambda: identities.tokens or (), gate.find_known
    )
    bodies = Bodies()
    replies = ReplyCache(scheduler.clock.now)
    replies.restore(scheduler.remembered.values())
    app = Starlette(
        routes=[
            make_metrics_route(metrics),
            *make_json_routes(
                shared, partial(gate.find_user, takes_session=True), settings.max_body, settings.max_depth,
                Rates(limits).take, authenticate_node=gate.find_node, bodies=bodies, replies=replies,
            ),
            *make_yt_routes(
                YtBackend(scheduler, cluster_name, find_known=gate.find_known), gate.find_user, limits, replies, bodies,
                partial(record_refused_request, scheduler),
            ),
            # No check of token and host: these are the package's files, without any data.
            *make_web_routes("scheduler.html"),
        ],
        middleware=[
            Middleware(Turns),
            Middleware(DataHeaders),
            Middleware(SlashesInNames),
            Middleware(KnowAccounts, gate=gate, accounts=Accounts()),
        ],
        exception_handlers={HTTPException: answer_error, CommandError: answer_error},
    )  # fmt: skip
    app.router.redirect_slashes = False
    return app


DATA_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class DataHeaders:
    """Adds the DATA_HEADERS that a response lacks, so that no browser stores the response or guesses its type."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                known = {name for name, _ in headers}
                headers += [header for header in DATA_HEADERS if header[0] not in known]
            await send(message)

        await self.app(scope, receive, send_more)


class SlashesInNames:
    """Keeps slashes that are encoded, because they belong to names and do not separate parts of a path.

    The server decodes a path completely; here the original is decoded, with ``json.routes.SLASH`` for each ``%2F``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path") or b""
        if scope["type"] == "http" and b"%2f" in raw.lower() and b"%00" not in raw:
            path = unquote(re.sub(b"%2f", b"%00", raw.partition(b"?")[0], flags=re.IGNORECASE))
            scope = {**scope, "path": path}
        await self.app(scope, receive, send)
