"""Transport of the ``yt`` protocol: all that lies between a socket and the commands (yt_protocol.md 3 to 8).

A request is checked, read and turned into a ``YtRequest``; a ``Backend`` answers with a plain value; the transport
writes that in the format that was asked for. What the paths and operations mean is the backend's business.

The server needs a header limit above its default: ``X-YT-Parameters`` carries whole specifications.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cpumond import __version__
from cpumond.api.bodies import Bodies, BodyError
from cpumond.api.formats import (
    BINARY,
    GENERIC,
    MAX_DEPTH,
    MIME_FORMATS,
    PRETTY,
    Attributed,
    Format,
    FormatError,
    ParseError,
    Uint,
    YtError,
    format_of,
    from_json_tree,
    parse_format,
    quote_text,
    read_value,
    read_yson,
    strip_attributes,
    to_json_tree,
    write_value,
)
from cpumond.errors import CpumondError
from cpumond.fairshare.validate import nearest
from cpumond.scheduler.spec_room import weigh as weigh_value

__all__ = [
    "Attributed", "Backend", "ParseError", "ReplyCache", "Uint", "YtError", "YtLimits", "YtRequest", "make_yt_routes",
]  # fmt: skip

log = structlog.get_logger("cpumond.api")

PROXY_NAME = "cpumond"
AUTHENTICATION, ACCESS_DENIED, TOO_MANY_REQUESTS, UNAVAILABLE = 900, 901, 904, 105
STATUS_OF_CODE = {AUTHENTICATION: 401, TOO_MANY_REQUESTS: 429, 108: 429}
TRY_AGAIN_CODES = frozenset({100, 105, 108, 202, 904, 2100})
"""Errors that ask for another try with the same mutation id: they are no replies to keep."""

METHODS = ["GET", "POST", "PUT", "HEAD", "DELETE", "PATCH", "OPTIONS"]
MAX_ERROR_HEADER_CHARS = 16 * 1024
MAX_MESSAGE_HEADER_CHARS = 2 * 1024
MAX_QUERY_FIELDS = 100
LARGE_ANSWERS = frozenset({"get", "list", "list_operations", "list_jobs", "execute_batch"})
LARGE_ANSWERS_AT_ONCE = 4
MAX_BATCH_BYTES = 32 * 2**20
"""Of the answers to one execute_batch, in memory."""
GIVE_WAY_S = 50e-6
"""How long the thread that writes a large answer lets go of the interpreter, again and again: an update in the event
loop's thread, and with it each heartbeat, would take twice as long beside it."""
READ_AT_ONCE_BYTES = 4096
"""A longer request is read in a thread: it would hold up heartbeats."""


@dataclass(frozen=True)
class YtRequest:
    """One command. ``parameters`` are as they arrived: a path may be Attributed, unknown names are the backend's to
    ignore. ``value`` is the body of ``set`` and ``multiset_attributes``."""

    command: str
    parameters: dict[str, Any]
    value: Any
    user: str
    correlation_id: str


Backend = Callable[[YtRequest], Awaitable[Any]]
"""Answers a command with its v4 value (section 6), ``{"value": v}`` for get, list and exists, bytes for binary ones.

The answer must not change after it is given: large ones are written in another thread. It raises YtError or
CpumondError for what is refused; the latter's ``code``, ``attributes`` and ``inner`` are taken over when it has them.
"""


@dataclass(frozen=True)
class YtLimits:
    """What one request, and one user, may cost. ``now`` is a monotonic clock in seconds."""

    max_body_bytes: int = 1024 * 1024
    """Of a body, also after decompression."""
    max_depth: int = MAX_DEPTH
    """Of nested maps, lists and attributes in what arrives; 1 to 200, as deep as the readers' recursion can go."""
    max_batch_requests: int = 1000
    requests_per_s: float = 200.0
    """Of one user in the long run; requests in a batch count."""
    burst_requests: float = 400.0
    max_users: int = 10_000
    """Whose rate is remembered at the same time."""
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Command:
    """A command as the client learns of it (section 3)."""

    name: str
    volatile: bool = False
    has_input: bool = False
    is_binary: bool = False
    """The answer is bytes as they are, in no format."""

    def describe(self) -> dict[str, Any]:
        """The descriptor, of exactly five keys: the client fails at a sixth."""
        return {
            "name": self.name,
            "input_type": "structured" if self.has_input else "null",
            "output_type": "binary" if self.is_binary else "structured",
            "is_volatile": self.volatile,
            "is_heavy": False,
        }


_READING = (
    "get", "list", "exists", "list_operations", "get_operation", "list_jobs", "get_version", "get_supported_features",
    "check_permission", "get_job",
)  # fmt: skip
_WRITING = (
    "create", "remove", "move", "start_operation", "abort_operation", "update_operation_parameters",
    "suspend_operation", "resume_operation", "complete_operation", "execute_batch", "transfer_pool_resources",
    "start_transaction", "ping_transaction", "commit_transaction", "abort_transaction",
)  # fmt: skip
_TAKING_A_VALUE = ("set", "multiset_attributes")
COMMANDS = {
    **{name: Command(name) for name in _READING},
    **{name: Command(name, volatile=True) for name in _WRITING},
    **{name: Command(name, volatile=True, has_input=True) for name in _TAKING_A_VALUE},
    "get_job_stderr": Command("get_job_stderr", is_binary=True),
}


def make_yt_routes(
    backend: Backend,
    authenticate: Callable[[Request], str],
    limits: YtLimits,
    replies: ReplyCache,
    bodies: Bodies | None = None,
) -> list[Route]:
    """The routes of the protocol. ``authenticate`` names the user of a request or raises YtError 900."""
    transport = _Transport(backend, authenticate, limits, replies, bodies or Bodies())
    return [
        Route("/api", transport.handle(transport.list_versions), methods=METHODS),
        Route("/api/v4", transport.handle(transport.list_commands), methods=METHODS),
        Route("/api/v4/{command}", transport.handle(transport.run), methods=METHODS),
        Route("/api/{rest:path}", transport.handle(transport.refuse_version), methods=METHODS),
        Route("/auth/whoami", transport.handle(transport.whoami), methods=METHODS),
        Route("/hosts", transport.handle(transport.list_hosts), methods=METHODS),
        Route("/version", transport.handle(transport.version), methods=METHODS),
        Route("/ping", transport.handle(transport.ping), methods=METHODS),
    ]


# --- replies to repeated requests ------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Reply:
    command: str
    at_s: float
    value: Any = None
    error: dict[str, Any] | None = None
    running: asyncio.Task[Any] | None = None


class ReplyCache:
    """Replies to commands that change something, by user and mutation id: a repeat is answered, not run (section 8).

    ``now`` is wall-clock time in seconds, so that replies can outlive the process. ``on_reply`` is told of every new
    successful reply, in the form of ``export``.
    """

    def __init__(
        self,
        now: Callable[[], float],
        max_replies: int = 20_000,
        max_age_s: float = 900.0,
        on_reply: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._now = now
        self._max_replies = max_replies
        self._max_age_s = max_age_s
        self._on_reply = on_reply
        self._replies: OrderedDict[tuple[str, str], _Reply] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replies)

    async def run(self, user: str, mutation_id: str, command: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """The reply of ``work``, which is run once for the id; a repeat waits for it, and has the same reply or error.

        An error that asks for another try, or that is not the command's own, is not kept. The work goes on when the
        caller is cancelled. Raises YtError when the id belongs to another command.
        """
        key = (user, mutation_id)
        self._forget_old()
        reply = self._replies.get(key)
        if reply is None:
            self._forget_old(room_for=1)
            reply = self._replies[key] = _Reply(command, self._now())
            reply.running = asyncio.ensure_future(self._work(key, reply, work))
            # Nobody may be left to look at the outcome.
            reply.running.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif reply.command != command:
            raise YtError(
                f"mutation id {mutation_id} was used for {reply.command} before; make a new one for {command}"
            )
        if reply.running is not None:
            return await asyncio.shield(reply.running)
        if reply.error is not None:
            raise YtError.from_value(reply.error)
        return reply.value

    async def _work(self, key: tuple[str, str], reply: _Reply, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            reply.value = await work()
        except YtError as error:
            if _asks_for_another_try(error):
                self._replies.pop(key, None)
            reply.error = error.to_value()
            raise
        except BaseException:
            self._replies.pop(key, None)
            raise
        finally:
            reply.running = None
            reply.at_s = self._now()
            if key in self._replies:
                self._replies.move_to_end(key)
        if self._on_reply is not None:
            try:
                self._on_reply(_export_reply(key, reply))
            except Exception:
                # The command is done; that its reply may be lost in a restart does not change the answer.
                log.exception("reply_not_kept", command=reply.command, mutation_id=key[1])
        return reply.value

    def _forget_old(self, room_for: int = 0) -> None:
        """Drop what is too old or too much, the oldest first; what still runs stays."""
        oldest_s = self._now() - self._max_age_s
        excess = len(self._replies) + room_for - self._max_replies
        dropped: list[tuple[str, str]] = []
        for key, reply in self._replies.items():
            if reply.running is not None:
                continue
            if len(dropped) >= excess and reply.at_s >= oldest_s:
                break
            dropped.append(key)
        for key in dropped:
            del self._replies[key]

    def export(self) -> list[dict[str, Any]]:
        """The successful replies, oldest first, as values that JSON can hold."""
        return [
            _export_reply(key, reply)
            for key, reply in self._replies.items()
            if reply.running is None and reply.error is None
        ]

    def restore(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Take over what ``export`` gave in another life; entries of a wrong form raise KeyError or ParseError."""
        for entry in entries:
            key = (str(entry["user"]), str(entry["mutation_id"]))
            value = from_json_tree(entry["reply"])
            self._replies[key] = _Reply(str(entry["command"]), float(entry["at_s"]), value)
            self._replies.move_to_end(key)
        self._forget_old()


def _export_reply(key: tuple[str, str], reply: _Reply) -> dict[str, Any]:
    return export_reply(*key, reply.command, reply.at_s, reply.value)


def export_reply(user: str, mutation_id: str, command: str, at_s: float, reply: Any) -> dict[str, Any]:
    """A successful reply as ``ReplyCache.restore`` takes it over."""
    return {
        "user": user,
        "mutation_id": mutation_id,
        "command": command,
        "at_s": at_s,
        "reply": to_json_tree(reply),
    }


def _asks_for_another_try(error: YtError) -> bool:
    return error.code in TRY_AGAIN_CODES or any(_asks_for_another_try(inner) for inner in error.inner)


class Rates:
    """A token bucket for each user. One request may overdraw it; then the user waits until it is above zero."""

    def __init__(self, limits: YtLimits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, user: str, requests: float = 1.0) -> None:
        """Count requests of a user. Raises YtError 904 when there were too many."""
        left = self._left(user)
        if left <= 0.0:
            raise YtError(
                f"too many requests of user {quote_text(user)}: {self._limits.requests_per_s:g} in a second is the "
                "limit; wait, or send one execute_batch",
                TOO_MANY_REQUESTS,
            )
        self.charge(user, requests, left)

    def charge(self, user: str, requests: float, left: float | None = None) -> None:
        """Count requests that are not refused any more."""
        left = self._left(user) if left is None else left
        self._buckets[user] = (left - requests, self._limits.now())
        self._buckets.move_to_end(user)
        while len(self._buckets) > self._limits.max_users:
            self._buckets.popitem(last=False)

    def _left(self, user: str) -> float:
        burst = self._limits.burst_requests
        left, at_s = self._buckets.get(user, (burst, 0.0))
        return min(burst, left + max(0.0, self._limits.now() - at_s) * self._limits.requests_per_s)


# --- a request -------------------------------------------------------------------------------------------------------

_PIECE = re.compile(r"x-yt-parameters-?(\d{1,4})")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_ID = re.compile(r"[!-~]{1,160}")


class _StatusError(Exception):
    """A request that is refused before it is a command: an HTTP status of its own beside the error."""

    def __init__(self, status: int, error: YtError, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class _Ids:
    request_id: str
    correlation_id: str


Handler = Callable[[Request, _Ids], Awaitable[Response]]


class _Transport:
    def __init__(
        self,
        backend: Backend,
        authenticate: Callable[[Request], str],
        limits: YtLimits,
        replies: ReplyCache,
        bodies: Bodies,
    ) -> None:
        self._backend = backend
        self._bodies = bodies
        self._large_answers = asyncio.Semaphore(LARGE_ANSWERS_AT_ONCE)
        self._authenticate = authenticate
        self._limits = limits
        self._replies = replies
        self._rates = Rates(limits)

    def handle(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """The handler with its errors in the form of the protocol, and with the headers of every answer."""

        async def answer(request: Request) -> Response:
            request_id = make_id()
            given = request.headers.get("x-yt-correlation-id", "")
            ids = _Ids(request_id, given if _ID.fullmatch(given) else request_id)
            try:
                response = await handler(request, ids)
            except _StatusError as refused:
                response = _describe_error(refused.error, refused.status)
                response.headers.update(refused.headers)
            except BodyError as refused:
                code = {429: TOO_MANY_REQUESTS, 503: UNAVAILABLE}.get(refused.status, GENERIC)
                response = _describe_error(YtError(str(refused), code), refused.status)
                response.headers["Connection"] = "close"
            except YtError as error:
                response = _describe_error(error)
            except CpumondError as error:
                response = _describe_error(_to_yt_error(error))
            except asyncio.CancelledError:
                # The server ends; the client asks again, with the same mutation id.
                response = _describe_error(YtError("the scheduler is ending; ask again", UNAVAILABLE), 503)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception:
                log.exception(
                    "request_failed", path=request.url.path, correlation_id=ids.correlation_id, request_id=request_id
                )
                response = _describe_error(_internal_error(ids))
            response.headers["X-YT-Request-Id"] = request_id
            response.headers["X-YT-Proxy"] = PROXY_NAME
            response.headers["Cache-Control"] = "no-store"
            return response

        return answer

    # What is not a command.

    async def list_versions(self, request: Request, _: _Ids) -> Response:
        """GET /api."""
        _require_method(request, "GET")
        return _json(["v4"])

    async def list_commands(self, request: Request, _: _Ids) -> Response:
        """GET /api/v4: the first request of every client, without a token."""
        _require_method(request, "GET")
        return _json([command.describe() for command in COMMANDS.values()])

    async def refuse_version(self, request: Request, _: _Ids) -> Response:
        """Anything else below /api."""
        path = request.url.path
        raise _StatusError(404, YtError(f"there is no {path} here; the API is /api/v4 (unset YT_VERSION)"))

    async def whoami(self, request: Request, _: _Ids) -> Response:
        """POST /auth/whoami: who the token belongs to."""
        _require_method(request, "GET", "POST")
        return _json({"login": self._authenticate(request), "realm": PROXY_NAME})

    async def list_hosts(self, request: Request, _: _Ids) -> Response:
        """GET /hosts: the addresses for heavy commands; this one."""
        _require_method(request, "GET")
        return _json([request.headers.get("host") or request.url.netloc])

    async def version(self, request: Request, _: _Ids) -> Response:
        """GET /version."""
        _require_method(request, "GET")
        return Response(f"{__version__}-{PROXY_NAME}", media_type="text/plain")

    async def ping(self, request: Request, _: _Ids) -> Response:
        """GET /ping."""
        _require_method(request, "GET")
        return Response()

    # Commands.

    async def run(self, request: Request, ids: _Ids) -> Response:
        """A command: GET, POST or PUT /api/v4/<command>."""
        name = str(request.path_params["command"])
        command = COMMANDS.get(name)
        if command is None:
            raise _StatusError(404, YtError(_describe_unknown(name)))
        user = self._authenticate(request)
        self._rates.take(user)
        _check_method(request, command)
        with self._bodies.hold(user) as held:
            body = await held.read(request, self._limits.max_body_bytes, _is_packed(request))
            text = _gather_parameters(request)
            texts = (body, text, request.scope["query_string"])
            await held.work_on(*texts)
            if sum(map(len, texts)) > READ_AT_ONCE_BYTES:
                read = await self._bodies.think(self._read_request, request, command, body, text)
            else:
                read = self._read_request(request, command, body, text)
            return await self._answer(request, command, user, ids, *read)

    async def _answer(
        self, request: Request, command: Command, user: str, ids: _Ids, parameters: dict[str, Any], value: Any
    ) -> Response:
        form = None if command.is_binary else _find_output_format(request, parameters)
        wanted = YtRequest(command.name, parameters, value, user, ids.correlation_id)
        log.debug(
            "yt_command", command=command.name, user=user, correlation_id=ids.correlation_id, request_id=ids.request_id
        )
        if form is None:
            return Response(await self._execute(wanted), headers={"Content-Type": "application/octet-stream"})
        if command.name in LARGE_ANSWERS:
            async with self._large_answers:
                data = await self._bodies.think(_write_only, [await self._execute(wanted)], form)
        else:
            data = write_value(await self._execute(wanted), form)
        return Response(data, headers={"Content-Type": form.content_type})

    def _read_request(self, request: Request, command: Command, body: bytes, text: bytes) -> tuple[dict[str, Any], Any]:
        """Parameters of the URL < of the headers < of the body, and the value."""
        depth = self._limits.max_depth
        parameters = _read_query(request, depth)
        header_format = _named_format(request, "X-YT-Header-Format")
        if text.strip():
            parameters.update(_read_map(text, header_format or BINARY, depth, "header X-YT-Parameters"))
        if not command.has_input:
            if body.strip():
                form = header_format or _mime_format(request, "content-type") or BINARY
                parameters.update(_read_map(body, form, depth, "body"))
            return parameters, None
        form = _find_input_format(request, parameters)
        if not body.strip():
            raise YtError(f"{command.name}: the body of the request, which is the value, is empty")
        try:
            value = read_value(body, form, depth)
        except ParseError as error:
            raise error.located("value") from None
        return parameters, _check_value(command.name, value)

    async def _execute(self, request: YtRequest) -> Any:
        """The answer to a command, from the backend or from an earlier reply."""
        if request.command == "execute_batch":
            return await self._execute_batch(request)
        mutation_id = strip_attributes(request.parameters.get("mutation_id"))
        if not COMMANDS[request.command].volatile or mutation_id is None:
            return await self._call(request)
        if not isinstance(mutation_id, str) or not _ID.fullmatch(mutation_id):
            raise YtError(f"mutation_id: {quote_text(mutation_id)} is not an id; make a new one for every command")
        return await self._replies.run(request.user, mutation_id, request.command, lambda: self._call(request))

    async def _call(self, request: YtRequest) -> Any:
        """One command, run now; every refusal is a YtError."""
        try:
            result = _run_transaction_command(request.command)
            if result is None:
                result = await self._backend(request)
        except YtError:
            raise
        except CpumondError as error:
            raise _to_yt_error(error) from error
        if request.command in ("get", "list") and strip_attributes(request.parameters.get("return_only_value")) is True:
            return result["value"]
        return result

    async def _execute_batch(self, request: YtRequest) -> dict[str, Any]:
        """Each request of a batch by itself, in order: ``{results=[{output=...} or {error=...}]}``."""
        requests = strip_attributes(request.parameters.get("requests"))
        if not isinstance(requests, list):
            raise YtError('execute_batch: "requests" is a list of {command; parameters; input}')
        if len(requests) > self._limits.max_batch_requests:
            raise YtError(
                f"execute_batch: {len(requests)} requests are more than the limit of "
                f"{self._limits.max_batch_requests}; send them in several batches"
            )
        self._rates.charge(request.user, float(len(requests)))
        results: list[dict[str, Any]] = []
        total_bytes = 0
        for index, item in enumerate(requests):
            if total_bytes > MAX_BATCH_BYTES:
                error = YtError(
                    f"execute_batch: the answers before this one take more than {MAX_BATCH_BYTES} bytes; send it in "
                    "another batch",
                    TOO_MANY_REQUESTS,
                )
                results.append({"error": error.to_value()})
                continue
            results.append(await self._execute_item(request, item, index))
            total_bytes += weigh_value(results[-1])
            # Other clients get their turn between two requests that did not wait for anything.
            await asyncio.sleep(0)
        return {"results": results}

    async def _execute_item(self, batch: YtRequest, item: Any, index: int) -> dict[str, Any]:
        try:
            return {"output": await self._execute(_read_item(batch, strip_attributes(item), index))}
        except YtError as error:
            return {"error": error.to_value()}
        except Exception:
            log.exception("batch_request_failed", index=index, correlation_id=batch.correlation_id)
            return {"error": _internal_error(_Ids("", batch.correlation_id)).to_value()}


def _read_item(batch: YtRequest, item: Any, index: int) -> YtRequest:
    """One request of a batch. What changes something has a mutation id, so that a repeated batch repeats nothing."""
    if not isinstance(item, dict):
        raise YtError(f"execute_batch: request {index} is not a map of command, parameters and input")
    name = strip_attributes(item.get("command"))
    parameters = strip_attributes(item.get("parameters", {}))
    if not isinstance(name, str) or name not in COMMANDS or name == "execute_batch":
        raise YtError(f"execute_batch: request {index}: {_describe_unknown(str(name))}")
    if not isinstance(parameters, dict):
        raise YtError(f'execute_batch: request {index}: "parameters" is a map')
    if COMMANDS[name].is_binary:
        raise YtError(f"execute_batch: request {index}: {name} answers with bytes; send it by itself")
    command, mutation_id = COMMANDS[name], strip_attributes(batch.parameters.get("mutation_id"))
    if command.volatile and isinstance(mutation_id, str):
        parameters = {"mutation_id": f"{mutation_id}/{index}", **parameters}
    value = None
    if command.has_input:
        if "input" not in item:
            raise YtError(f'execute_batch: request {index}: {name} needs "input", the value')
        value = _check_value(name, item["input"])
    return replace(batch, command=name, parameters=parameters, value=value)


def _check_value(name: str, value: Any) -> Any:
    if name == "multiset_attributes" and not isinstance(strip_attributes(value), dict):
        raise YtError("multiset_attributes: the value is a map of attributes")
    return value


def _run_transaction_command(name: str) -> dict[str, Any] | None:
    """Transactions are accepted and mean nothing: every command is by itself (section 8)."""
    if name == "start_transaction":
        return {"transaction_id": make_id()}
    return {} if name in ("ping_transaction", "commit_transaction", "abort_transaction") else None


def make_id() -> str:
    """A new id in YTsaurus' form of four hexadecimal numbers."""
    return "-".join(f"{secrets.randbits(32):x}" for _ in range(4))


def _describe_unknown(name: str) -> str:
    close = nearest(name, COMMANDS)
    advice = f"did you mean {close}?" if close else "GET /api/v4 lists the commands"
    return f"unknown command {quote_text(name)}; {advice}"


def _require_method(request: Request, *allowed: str) -> None:
    if request.method not in allowed and not (request.method == "HEAD" and "GET" in allowed):
        raise _StatusError(
            405,
            YtError(f"{request.method} {request.url.path}: use {' or '.join(allowed)}"),
            {"Allow": ", ".join(allowed)},
        )


def _check_method(request: Request, command: Command) -> None:
    """What changes something is no GET, and no page of another site may send it (the token is not always asked for)."""
    if not command.volatile:
        _require_method(request, "GET", "POST", "PUT")
        return
    _require_method(request, *(("PUT", "POST") if command.has_input else ("POST", "PUT")))
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise _StatusError(
            403, YtError(f"{command.name}: pages of {quote_text(origin)} may not do this", ACCESS_DENIED)
        )


def _is_packed(request: Request) -> bool:
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "x-gzip", ""):
        raise _StatusError(415, YtError(f"Content-Encoding {quote_text(coding)}: use gzip or identity"))
    return coding.endswith("gzip")


def _read_map(text: bytes, form: Format, depth: int, where: str) -> dict[str, Any]:
    try:
        value = strip_attributes(read_value(text, form, depth))
    except ParseError as error:
        raise error.located(where) from None
    if not isinstance(value, dict):
        raise YtError(f"Error parsing request: {where}: the parameters are a map")
    return value


def _gather_parameters(request: Request) -> bytes:
    """The text of ``X-YT-Parameters``, or of its pieces ``X-YT-Parameters0``, ``X-YT-Parameters-1``... in base64."""
    whole = request.headers.get("x-yt-parameters")
    if whole is not None:
        return whole.encode("latin-1")
    pieces: dict[int, str] = {}
    for name, value in request.headers.items():
        found = _PIECE.fullmatch(name)
        if found is not None:
            pieces[int(found[1])] = value.strip()
    if not pieces:
        return b""
    if sorted(pieces) != list(range(min(pieces), max(pieces) + 1)) or min(pieces) > 1:
        raise YtError("Error parsing request: a piece of the header X-YT-Parameters is missing")
    texts = [pieces[number] for number in sorted(pieces)]
    # Encoded one by one, or cut after they were encoded.
    apart = all(len(text) % 4 == 0 for text in texts)
    try:
        return b"".join(base64.b64decode(text, validate=True) for text in (texts if apart else ["".join(texts)]))
    except (binascii.Error, ValueError):
        raise YtError("Error parsing request: the pieces of the header X-YT-Parameters are not base64") from None


def _read_query(request: Request, depth: int) -> dict[str, Any]:
    """The parameters in the URL: ``?path=//sys&recursive=true&attributes=["weight"]``.

    A text that begins like YSON's maps, lists, attributes, literals or quoted strings is YSON; ``true``, ``false`` and
    integers are values; everything else is a string as it stands.
    """
    parameters: dict[str, Any] = {}
    query = request.scope["query_string"].decode("latin-1")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape", max_num_fields=MAX_QUERY_FIELDS)
    except ValueError:
        raise YtError(f"Error parsing request: more than {MAX_QUERY_FIELDS} parameters in the URL") from None
    for name, text in pairs:
        if name in parameters:
            raise YtError(f"Error parsing request: {quote_text(name)} is given twice in the URL")
        if text.startswith(("{", "[", "<", "%", '"')):
            try:
                parameters[name] = read_yson(text.encode("utf-8", "surrogateescape"), depth)
            except ParseError as error:
                raise error.located(f"{quote_text(name)} in the URL") from None
        elif text in ("true", "false"):
            parameters[name] = text == "true"
        else:
            parameters[name] = int(text) if _INTEGER.fullmatch(text) else text
    return parameters


def _mime_format(request: Request, header: Literal["accept", "content-type"]) -> Format | None:
    """The format of the first MIME type that is one of the protocol's."""
    for part in request.headers.get(header, "").lower().split(","):
        form = MIME_FORMATS.get(part.partition(";")[0].strip())
        if form is not None:
            return form
    return None


def _named_format(request: Request, header: str) -> Format | None:
    text = request.headers.get(header)
    return None if text is None else parse_format(text.encode("latin-1"), f"header {header}")


def _find_output_format(request: Request, parameters: Mapping[str, Any]) -> Format:
    """MIME < header < parameters; pretty YSON when nothing is said."""
    if parameters.get("output_format") is not None:
        return format_of(parameters["output_format"], "output_format")
    return _named_format(request, "X-YT-Output-Format") or _mime_format(request, "accept") or PRETTY


def _find_input_format(request: Request, parameters: Mapping[str, Any]) -> Format:
    """The same for the value; YSON when nothing is said."""
    if parameters.get("input_format") is not None:
        return format_of(parameters["input_format"], "input_format")
    return _named_format(request, "X-YT-Input-Format") or _mime_format(request, "content-type") or BINARY


# --- answers ---------------------------------------------------------------------------------------------------------


def _write_only(holder: list[Any], form: Format) -> bytes:
    """The one value in the list as text, in a thread; it is let go of here: a large one takes as long to free as a turn
    lasts."""
    value = holder.pop()
    return write_value(value, form, lambda: time.sleep(GIVE_WAY_S))


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")


def _to_yt_error(error: CpumondError) -> YtError:
    code = getattr(error, "code", GENERIC)
    attributes, inner = getattr(error, "attributes", None), getattr(error, "inner", ())
    return YtError(
        str(error) or type(error).__name__,
        code if isinstance(code, int) and not isinstance(code, bool) else GENERIC,
        attributes if isinstance(attributes, Mapping) else None,
        [item if isinstance(item, YtError) else _to_yt_error(item) for item in inner],
    )


def _internal_error(ids: _Ids) -> YtError:
    return YtError(
        f"the scheduler failed at this request; its log has the reason under {ids.correlation_id}",
        attributes={"correlation_id": ids.correlation_id},
    )


def _describe_error(error: YtError, status: int | None = None) -> Response:
    """An error as a JSON body and three headers (section 7). The headers are cut where they would be too long."""
    value = error.to_value()
    try:
        body = json.dumps(_plain_json(value))
    except (FormatError, RecursionError):
        value = {"code": error.code, "message": str(error), "attributes": {}, "inner_errors": []}
        body = json.dumps(_plain_json(value))
    header = body
    message = _plain_text(error.message)
    if len(header) > MAX_ERROR_HEADER_CHARS:
        short = {"code": error.code, "message": message[:MAX_MESSAGE_HEADER_CHARS], "attributes": {}}
        header = json.dumps({**short, "inner_errors": []})
    return Response(
        body,
        STATUS_OF_CODE.get(error.code, 400) if status is None else status,
        {
            "X-YT-Error": header,
            "X-YT-Response-Code": str(error.code),
            "X-YT-Response-Message": json.dumps(message[:MAX_MESSAGE_HEADER_CHARS]),
        },
        "application/json",
    )


def _plain_json(value: Any) -> Any:
    """An error as JSON, whose strings the client takes as they stand: no bytes as code points here."""
    if isinstance(value, Mapping) and not isinstance(value, Attributed):
        return {_plain_text(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, Attributed):
        return [_plain_json(item) for item in value]
    return to_json_tree(value)


def _plain_text(text: object) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode()
