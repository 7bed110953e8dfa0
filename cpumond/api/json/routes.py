"""The JSON interface ``/api/v1``: serves the table of endpoints and nothing else. The scheduler makes all changes.

Every error is ``{"error": sentence, "code": n, "attributes": {...}}``; the sentence says what is wrong and where."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import inspect
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cpumond.api import views
from cpumond.api.bodies import Bodies, HttpError, count_values
from cpumond.api.endpoints import ENDPOINTS, PREFIX
from cpumond.api.json.call import Call, Shared
from cpumond.api.json.endpoint import Endpoint
from cpumond.api.json.prepared import Prepared, WithStatus, compress, encode
from cpumond.api.overview import RequestTiming
from cpumond.api.refusals import record_refused_request
from cpumond.api.yt.formats import has_too_many_values
from cpumond.api.yt.replies import ReplyCache
from cpumond.api.yt.values import MAX_VALUES
from cpumond.core.errors import CpumondError
from cpumond.core.wire import MAX_HEARTBEAT_BYTES, MAX_LOG_BYTES, MAX_REPLY_BYTES, JobLog, JobReply, NodeHeartbeat
from cpumond.core.words import nearest
from cpumond.scheduler.model import (
    ACCESS_DENIED,
    ALREADY_EXISTS,
    AUTHENTICATION,
    GENERIC,
    NO_SUCH_JOB,
    NO_SUCH_OPERATION,
    NODE_OFFLINE,
    RESOLVE,
    TIMEOUT,
    TOO_MANY_OPERATIONS,
    TOO_MANY_REQUESTS,
    CommandError,
)
from cpumond.scheduler.rights.tokens import NOBODY, User
from cpumond.scheduler.store import StoreError
from cpumond.web import accepts_gzip, matches_etag

log = structlog.get_logger("cpumond.api")

MIN_BODY: Final = {
    JobLog: 4 * MAX_LOG_BYTES // 3 + 65_536,
    JobReply: MAX_REPLY_BYTES + 65_536,
    NodeHeartbeat: MAX_HEARTBEAT_BYTES,
}
"""Type of a body -> the length in bytes that is accepted even if [api] max_body is lower; logs are in base64."""

STATUS_OF_CODE: Final = {
    RESOLVE: 404, NO_SUCH_OPERATION: 404, NO_SUCH_JOB: 404, ALREADY_EXISTS: 409, TOO_MANY_OPERATIONS: 409,
    AUTHENTICATION: 401, ACCESS_DENIED: 403, TOO_MANY_REQUESTS: 429, NODE_OFFLINE: 503, TIMEOUT: 504,
}  # fmt: skip
"""Code of a refusal -> HTTP status; for all other codes it is 422."""

Authenticate = Callable[[Request], User]
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_KEY: Final = re.compile(r"[-_.:A-Za-z0-9]{1,200}")
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)

SUBMIT: Final = PREFIX + "/operations"
SLASH: Final = "\0"
"""Stands for an encoded slash in a path; no name contains this character."""

JSON: Final = "application/json"
GZIP_BYTES: Final = 8192
"""Responses of this size or more are compressed for clients that accept gzip."""


def make_json_routes(
    shared: Shared, authenticate: Authenticate, max_body: int = 2**20, max_depth: int = 64,
    count: Callable[[str, float], None] = lambda _, __: None, *,
    authenticate_node: Authenticate = lambda _: User("", admin=True, node=True), bodies: Bodies | None = None,
    replies: ReplyCache | None = None,
) -> list[Route]:  # fmt: skip
    """The routes of ``/api/v1``, ``/healthz`` and ``/readyz``.

    ``authenticate`` returns the user of a request, ``authenticate_node`` the user of a node's request; both raise
    CommandError. ``max_body``: bytes of a request's body; ``max_depth``: how deep the body's values may be nested.
    ``count`` is called with the user and the cost of each request except those of nodes, and raises CommandError after
    too many. ``replies``: replies to changes with an Idempotency-Key."""
    replies = replies or ReplyCache(shared.scheduler.clock.now)
    site = _Site(shared, authenticate, authenticate_node, max_body, max_depth, count, bodies or Bodies(), replies)
    by_path: dict[str, dict[str, _Served]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = _Served(site, endpoint)
    # Paths are tried in this order: those of nodes' requests, the one for submissions, all others.
    of_nodes = {endpoint.path for endpoint in ENDPOINTS if endpoint.is_of_nodes}
    paths = sorted(by_path, key=lambda path: (path not in of_nodes, path != SUBMIT))
    routes = [Route(path, _Dispatcher(by_path[path])) for path in paths]
    return [*routes, Route(PREFIX + "/{rest:path}", _Dispatcher({}))]


@dataclass(frozen=True, slots=True)
class _Site:
    """Data shared by all endpoints."""

    shared: Shared
    authenticate: Authenticate
    authenticate_node: Authenticate
    max_body: int
    max_depth: int
    count_requests: Callable[[str, float], None]
    bodies: Bodies
    replies: ReplyCache


class _Served:
    """One endpoint; its decoder is made once."""

    def __init__(self, site: _Site, endpoint: Endpoint) -> None:
        self.site = site
        self.endpoint = endpoint
        self.max_body = max(site.max_body, MIN_BODY.get(endpoint.body, 0))
        self.decoder = None if endpoint.body is None else msgspec.json.Decoder(endpoint.body)
        site.shared.requests[endpoint.name] = RequestTiming(0, 0.0, 0.0)

    async def answer(self, request: Request) -> Response:
        begun = time.perf_counter()
        try:
            return await self._answer(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            await record_refused_request(self.site.shared.scheduler, request, error)
            return make_response(request, error)
        finally:
            spent_s, times, name = time.perf_counter() - begun, self.site.shared.requests, self.endpoint.name
            known = times[name]
            times[name] = RequestTiming(known.count + 1, known.total_s + spent_s, max(known.longest_s, spent_s))

    async def _answer(self, request: Request) -> Response:
        site, endpoint = self.site, self.endpoint
        if endpoint.is_change:
            _check_origin(request)
        call = Call(site.shared, NOBODY, request=request)
        if endpoint.is_of_nodes:
            request.state.user = call.node = site.authenticate_node(request)
        else:
            call.plan = request.headers.get("x-cpumond-plan", "")
            if not endpoint.is_public:
                request.state.user = call.user = site.authenticate(request)
                site.count_requests(call.user.name, 1.0)
        call.query = _read_query(request, endpoint)
        call.path = {key: str(name).replace(SLASH, "/") for key, name in request.path_params.items()}
        if self.decoder is None:
            return await self._act(call, b"")
        with site.bodies.hold(call.user.name, endpoint.is_of_nodes) as held:
            data = await held.read(request, self.max_body)
            await held.work_on(data)
            call.body, call.value_count = _decode(data, self.decoder, endpoint), count_values(data)
            if call.node is None:
                _check_depth(call.body, site.max_depth)
            elif not call.node.may_be(call.body.node_id):
                raise _not_its_node(call.node, call.body.node_id)
            return await self._act(call, data)

    async def _act(self, call: Call, data: bytes) -> Response:
        endpoint, request = self.endpoint, call.request
        if call.node is None and not endpoint.is_public:
            self.site.count_requests(call.user.name, endpoint.cost(call))
        key = request.headers.get(IDEMPOTENCY_KEY) if endpoint.takes_key else None
        value = await (self._handle(call) if key is None else self._handle_once(call, key, data))
        if isinstance(value, Response):
            return value
        if isinstance(value, Prepared):
            return _send_prepared(request, value)
        status = endpoint.status
        if isinstance(value, WithStatus):
            value, status = value.value, value.status
        content = encode(value)
        if endpoint.is_change or len(content) < GZIP_BYTES:
            return Response(content, status, media_type=JSON)
        headers = {"Vary": "Accept-Encoding"}
        if accepts_gzip(request.headers):
            content = await compress(content)
            headers["Content-Encoding"] = "gzip"
        return Response(content, status, headers, JSON)

    async def _handle(self, call: Call) -> Any:
        value = self.endpoint.handler(call)
        return await value if isawaitable(value) else value

    async def _handle_once(self, call: Call, key: str, data: bytes) -> Any:
        """Answer a change that has a key: if it is repeated, it gets the same answer and changes nothing."""
        if not _KEY.fullmatch(key):
            raise HttpError(422, f"{IDEMPOTENCY_KEY}: expected 1 to 200 letters, digits and characters of -_.:")
        digest = hashlib.sha256(f"{call.request.url.path}?{call.request.url.query}\n".encode() + data).hexdigest()
        call.idempotency = key, f"{self.endpoint.name} {digest[:16]}"
        if self.site.replies.is_of_another(call.user.name, *call.idempotency):
            raise HttpError(422, f"{IDEMPOTENCY_KEY}: {key} was sent with another request; make a new key for each")
        return await self.site.replies.run(call.user.name, *call.idempotency, lambda: self._handle(call))


def _send_prepared(request: Request, made: Prepared) -> Response:
    headers = {"ETag": made.etag, "Vary": "Accept-Encoding"}
    if matches_etag(request.headers, made.etag):
        return Response(status_code=304, headers=headers)
    if accepts_gzip(request.headers):
        return Response(made.compressed, 200, {**headers, "Content-Encoding": "gzip"}, JSON)
    return Response(made.content, 200, headers, JSON)


class _Dispatcher:
    """All methods of one path, as an ASGI application."""

    def __init__(self, methods: Mapping[str, _Served]) -> None:
        self.methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        served = self.methods.get("GET" if request.method == "HEAD" else request.method)
        if served is not None:
            response = await served.answer(request)
        elif self.methods:
            allowed = ", ".join(sorted([*self.methods, *(["HEAD"] if "GET" in self.methods else [])]))
            text = f"{request.method} {request.url.path}: this method is not supported here; use {allowed}"
            response = make_response(request, HttpError(405, text, headers={"Allow": allowed}))
        else:
            known = [endpoint.path for endpoint in ENDPOINTS if "{" not in endpoint.path]
            near = nearest(request.url.path, known, 0.85)
            hint = f"did you mean {near}?" if near else f"all paths are listed in {PREFIX}/openapi.json"
            text = f"{request.method} {request.url.path}: there is no such path; {hint}"
            response = make_response(request, HttpError(404, text, RESOLVE))
        await response(scope, receive, send)


def _check_origin(request: Request) -> None:
    """Refuse changes by pages of other sites, because a token is not always required."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HttpError(403, f"pages of {origin[:200]!r} may not send this request", ACCESS_DENIED)


def _not_its_node(node: User, node_id: str) -> CommandError:
    return CommandError(
        f"the token of {node.name} is for nodes that match {node.pattern[:200]!r}, and this is {node_id[:200]!r}; "
        "correct the agent's node_id, or the pattern in the scheduler's [api] tokens_file",
        ACCESS_DENIED,
    )


def _decode(data: bytes, decoder: msgspec.json.Decoder[Any], endpoint: Endpoint) -> Any:
    if not data:
        if not endpoint.needs_body:
            return endpoint.body()
        raise HttpError(400, "the request has no body; it must be a JSON object")
    if not endpoint.is_of_nodes and has_too_many_values(data):
        raise HttpError(413, f"the body of the request contains more than {MAX_VALUES} values; send less at once")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise HttpError(422, _describe_validation(error, "body", endpoint.body)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"the body of the request is not JSON: {error}") from None
    except RecursionError:
        raise HttpError(400, "the body of the request is not JSON: it is nested too deeply") from None


def _check_depth(body: Any, limit: int) -> None:
    """Limit the depth of a body, because every part that shows stored values must be able to read them."""
    values = [(body, 1)]
    while values:
        value, depth = values.pop()
        if depth > limit:
            raise HttpError(422, f"the body of the request is nested deeper than {limit}, the limit of [api] max_depth")
        if isinstance(value, msgspec.Struct):
            values += [(getattr(value, name), depth + 1) for name in value.__struct_fields__]
        elif isinstance(value, dict):
            values += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list | tuple):
            values += [(item, depth + 1) for item in value]


def _read_query(request: Request, endpoint: Endpoint) -> Any:
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items() if request.scope["query_string"] else ():
        if name in given:
            raise HttpError(422, f"query: {name[:100]}: given twice; give it once")
        given[name] = value
    kind = endpoint.query
    if kind is None:
        if given:
            raise HttpError(422, f"query: {next(iter(given))[:100]}: unknown; this request takes no query")
        return None
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise HttpError(422, _describe_validation(error, "query", kind)) from None


def _describe_validation(error: msgspec.ValidationError, where: str, kind: Any) -> str:
    """Turn msgspec's message into a sentence: the place, the mistake, and the name that was probably meant."""
    text, _, path = str(error).partition(" - at `")
    place = re.sub(r"^\$\.?", "", path.rstrip("`")).replace(".", "/")
    unknown = _UNKNOWN_FIELD.fullmatch(text)
    start = f"{where}: {place}: " if place else f"{where}: "
    if unknown is None:
        return start + text[0].lower() + text[1:]
    name = unknown[1]
    known = sorted(set(_field_names(inspect.type_info(kind))))
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return f"{start}{name[:100]!r} is unknown; {hint}"


def _field_names(kind: inspect.Type) -> Iterator[str]:
    """The names of all fields in a type, and in types inside it."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield field.encode_name
            yield from _field_names(field.type)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from _field_names(kind.item_type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _field_names(member)


async def answer_error(request: Request, error: Exception) -> Response:
    """Handle exceptions for Starlette: return any refusal in the form of this interface."""
    return make_response(request, error)


def make_response(request: Request, error: Exception) -> Response:
    """The response to an exception. An unexpected exception is logged, and no part of it is shown."""
    code, attributes = GENERIC, {}
    headers: Mapping[str, str] = {}
    text = str(error)
    if isinstance(error, HttpError):
        status, code, headers = error.status, error.code, error.headers
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers or {}
        text = f"{request.method} {request.url.path}: {error.detail}"
    elif isinstance(error, CommandError):
        status, code = STATUS_OF_CODE.get(error.code, 422), error.code
        attributes = dict(error.attributes)
    elif isinstance(error, StoreError):
        status = 503
    elif isinstance(error, CpumondError):
        status = 422
    elif isinstance(error, RecursionError):
        # A value that was barely shallow enough to be read may be nested too deeply to be written.
        status, text = 422, "the request is nested too deeply"
    else:
        log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
        status, text = 500, "the scheduler failed at this request; see its log"
    if status == 401:
        headers = {**headers, "WWW-Authenticate": "Bearer"}
    return Response(encode(views.Failure(text, code, attributes)), status, headers, JSON)
