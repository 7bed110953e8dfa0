"""The scheduler's HTTP application: the JSON interface, the `yt` protocol, metrics and health, on one address."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpumond.api.bodies import Bodies
from cpumond.api.json.routes import describe_error, make_json_routes
from cpumond.api.refusals import tell_refused_request
from cpumond.api.turns import Turns
from cpumond.api.yt.commands import YtBackend
from cpumond.api.yt.replies import Rates, ReplyCache, YtLimits
from cpumond.api.yt.transport import make_yt_routes
from cpumond.core.settings import is_loopback
from cpumond.scheduler.config import Api
from cpumond.scheduler.model import ACCESS_DENIED, AUTHENTICATION, CommandError
from cpumond.scheduler.peer import LOCAL_USERS
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.tokens import Tokens, User
from cpumond.web import make_web_routes

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_ACCESS_USER: Final = User("root", admin=True)
"""The user of every request where no authentication is configured: any client may do everything."""

USER_NAME = re.compile(r"[-_a-zA-Z0-9.@]{1,100}")


def make_app(
    scheduler: Scheduler, settings: Api, tokens: Tokens | None, metrics: Callable[[], bytes], cluster_name: str
) -> Starlette:
    """The application. ``tokens`` None: none are asked for, which is for the loopback address only."""
    authenticate = partial(find_user, tokens=tokens, asks_kernel=settings.asks_kernel)

    async def read_metrics(_: Request) -> Response:
        return Response(metrics(), headers={"content-type": METRICS_TYPE})

    limits = YtLimits(
        max_body_bytes=settings.max_body,
        max_depth=settings.max_depth,
        requests_per_s=settings.rate_limit or 1e9,
        burst_requests=2 * (settings.rate_limit or 1e9),
    )
    bodies = Bodies()
    replies = ReplyCache(scheduler.clock.now)
    replies.restore(scheduler.remembered.values())
    app = Starlette(
        routes=[
            Route("/metrics", read_metrics),
            *make_json_routes(
                scheduler,
                authenticate,
                settings.max_body,
                settings.max_depth,
                Rates(limits).take,
                authenticate_node=partial(find_node, tokens=tokens, asks_kernel=settings.asks_kernel),
                cluster_name=cluster_name,
                needs_token=tokens is not None,
                is_open=tokens is None and not settings.asks_kernel,
                bodies=bodies,
            ),
            *make_yt_routes(
                YtBackend(scheduler, cluster_name),
                authenticate,
                limits,
                replies,
                bodies,
                partial(tell_refused_request, scheduler),
            ),
            # Without token and host check: these are the package's files, without data.
            *make_web_routes("scheduler.html"),
        ],
        middleware=[Middleware(Turns), Middleware(DataHeaders), Middleware(SlashesInNames)],
        exception_handlers={HTTPException: describe_error, CommandError: describe_error},
    )
    app.router.redirect_slashes = False
    return app


def find_user(request: Request, tokens: Tokens | None, asks_kernel: bool = False) -> User:
    """The user of a request: by its token, ``Authorization: OAuth TOKEN`` or ``Bearer TOKEN``.

    Without tokens by the uid of the connecting process (``asks_kernel``), else OPEN_ACCESS_USER. An administrator may
    act for another user (``X-YT-User-Name``). Raises CommandError.
    """
    other = request.headers.get("x-yt-user-name", "")
    if other and not USER_NAME.fullmatch(other):
        raise CommandError("X-YT-User-Name: expected a name of letters, digits and -_.@", AUTHENTICATION)
    user = _identify(request, tokens, asks_kernel)
    if user.node:
        raise CommandError(
            f"the token of {user.name} is a node's: it registers nodes and sends their heartbeats; use a user's token "
            "for everything else",
            ACCESS_DENIED,
        )
    if other and other != user.name and not user.admin:
        raise CommandError(f"Authentication failed: {user.name} may not act for {other}", AUTHENTICATION)
    if not other or other == user.name:
        return user
    # Where everybody may do everything, so may everybody in any name.
    return User(other, admin=user is OPEN_ACCESS_USER, origin=user.origin, acting=user.name)


def find_node(request: Request, tokens: Tokens | None, asks_kernel: bool = False) -> User:
    """The user of a node's request: by a node's token; without tokens any that may do all. Raises CommandError."""
    user = _identify(request, tokens, asks_kernel)
    if tokens is not None and not user.node:
        raise CommandError(
            f"the token of {user.name} is a user's, and nodes have tokens of their own: add a line "
            '"NAME:sha256-hex:node:NODE_ID" to the scheduler\'s [api] tokens_file, and give the agent that token '
            "([scheduler] token_file)",
            ACCESS_DENIED,
        )
    return user


def _identify(request: Request, tokens: Tokens | None, asks_kernel: bool) -> User:
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        # Browsers send this header with what a page of another site asks for.
        raise CommandError("pages of other sites may not ask for this", ACCESS_DENIED)
    if tokens is None:
        host = request.url.hostname or ""
        if "host" in request.headers and not is_loopback(host):
            # DNS rebinding: a page of another site whose name resolves to this machine must not pass for a local user.
            raise CommandError(f"without tokens requests are for 127.0.0.1 or localhost, not {host!r}", ACCESS_DENIED)
        if not asks_kernel:
            return OPEN_ACCESS_USER
        found: User | str = request.scope["find_local_user"]()
        if isinstance(found, User):
            return found
        raise CommandError(
            f"without [api] tokens_file only {LOCAL_USERS} may use this scheduler, and {found}; ask as one of them, or "
            "have its tokens_file name you",
            ACCESS_DENIED,
        )
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    user = tokens.user_of(token.strip()) if scheme.lower() in ("oauth", "bearer") else None
    if user is None:
        what = "the token is not known" if token else "a token is needed: Authorization: OAuth TOKEN"
        raise CommandError(f"Authentication failed: {what}", AUTHENTICATION)
    return user


DATA_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class DataHeaders:
    """Adds DATA_HEADERS that an answer does not set itself: no browser keeps the answer, nor guesses its type."""

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
    """A name may hold a slash: an encoded one does not separate parts of a path.

    The server gives the path decoded; here it is decoded anew, with ``json.routes.SLASH`` for each ``%2F``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path") or b""
        if scope["type"] == "http" and b"%2f" in raw.lower() and b"%00" not in raw:
            path = unquote(re.sub(b"%2f", b"%00", raw.partition(b"?")[0], flags=re.IGNORECASE))
            scope = {**scope, "path": path}
        await self.app(scope, receive, send)
