"""Transport of the ``yt`` protocol: everything between a socket and the commands (yt_protocol.md 3 to 8).

A request is checked, read and turned into a ``YtRequest``; a ``Backend`` answers with a plain value; the transport
writes it in the requested format. Only the backend interprets paths and operations.

The HTTP server's default limit of headers is too low: ``X-YT-Parameters`` carries whole specifications."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cpumond import __version__
from cpumond.api.bodies import Bodies, HttpError
from cpumond.api.yt.formats import (
    BINARY,
    MIME_FORMATS,
    PRETTY,
    Format,
    format_of,
    parse_format,
    read_value,
    to_json_tree,
    write_value,
)
from cpumond.api.yt.parameters import YtRequest, gather_parameters, read_map, read_query
from cpumond.api.yt.replies import Rates, ReplyCache, YtLimits
from cpumond.api.yt.values import (
    Attributed,
    FormatError,
    ParseError,
    YtError,
    error_value,
    quote_text,
    strip_attributes,
)
from cpumond.core.errors import CpumondError
from cpumond.core.words import nearest
from cpumond.scheduler.model import ACCESS_DENIED, AUTHENTICATION, TOO_MANY_REQUESTS
from cpumond.scheduler.rights.tokens import User
from cpumond.scheduler.state.spec_room import weigh as weigh_value

log = structlog.get_logger("cpumond.api")

PROXY_NAME = "cpumond"
UNAVAILABLE = 105
STATUS_OF_CODE = {AUTHENTICATION: 401, TOO_MANY_REQUESTS: 429, 108: 429}
METHODS = ["GET", "POST", "PUT", "HEAD", "DELETE", "PATCH", "OPTIONS"]
MAX_ERROR_HEADER_CHARS = 16 * 1024
MAX_MESSAGE_HEADER_CHARS = 2 * 1024
LARGE_ANSWERS = frozenset({"get", "list", "list_operations", "list_jobs", "execute_batch"})
LARGE_ANSWERS_AT_ONCE = 4
MAX_BATCH_BYTES = 32 * 2**20
"""Maximum memory of the answers to one execute_batch, in bytes."""
GIVE_WAY_S = 50e-6
"""Seconds for which the thread that writes a large answer sleeps after each piece, without the interpreter's lock. If
it did not, an update in the event loop's thread, and each heartbeat after it, would take twice as long."""
READ_AT_ONCE_BYTES = 4096
"""A request of more bytes is parsed in a thread; in the event loop this would delay heartbeats."""


Backend = Callable[[YtRequest], Awaitable[Any]]
"""Answers a command with its v4 value (section 6): ``{"value": v}`` for get, list and exists, bytes if it is binary.

The answer must not change after it is returned: large ones are written in another thread. It raises YtError or another
CpumondError for refusals, whose ``code``, ``attributes`` and ``inner`` are used if they exist."""


RecordRefusal = Callable[[Request, Exception], Awaitable[None]]


async def _record_nothing(_: Request, __: Exception) -> None:
    """Used if no audit log is kept."""


@dataclass(frozen=True)
class Command:
    """A command as it is described to clients (section 3)."""

    name: str
    volatile: bool = False
    has_input: bool = False
    is_binary: bool = False
    """Whether the answer is bytes in no format."""

    def view(self) -> dict[str, Any]:
        """Return the command's descriptor. It has exactly five keys, because the client fails if there is a sixth."""
        return {
            "name": self.name,
            "input_type": "structured" if self.has_input else "null",
            "output_type": "binary" if self.is_binary else "structured",
            "is_volatile": self.volatile,
            "is_heavy": False,
        }


_READING = (
    "get", "list", "exists", "list_operations", "get_operation", "list_jobs", "get_version", "get_supported_features",
    "check_permission", "check_operation_permission", "get_job", "list_operation_events",
)  # fmt: skip
_WRITING = (
    "create", "remove", "move", "start_operation", "abort_operation", "update_operation_parameters",
    "suspend_operation", "resume_operation", "complete_operation", "execute_batch", "transfer_pool_resources",
    "abort_job", "abandon_job", "patch_operation_spec",
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
    backend: Backend, authenticate: Callable[[Request], User], limits: YtLimits, replies: ReplyCache,
    bodies: Bodies | None = None, make_refusal_event: RecordRefusal = _record_nothing,
) -> list[Route]:  # fmt: skip
    """Return the protocol's routes. ``authenticate`` returns the user of a request or raises YtError 900.

    ``make_refusal_event`` is called with requests that are refused."""
    transport = _Transport(backend, authenticate, limits, replies, bodies or Bodies(), make_refusal_event)
    answer_plainly = transport.answer_plainly
    descriptions = [command.view() for command in COMMANDS.values()]
    version = f"{__version__}-{PROXY_NAME}"
    routes = {
        "/api": answer_plainly(lambda _: _json(["v4"]), "GET"),
        # The first request of every client, without a token.
        "/api/v4": answer_plainly(lambda _: _json(descriptions), "GET"),
        "/api/v4/{command}": transport.handle(transport.run),
        "/api/{rest:path}": transport.handle(transport.refuse_version),
        "/auth/whoami": answer_plainly(
            lambda request: _json({"login": authenticate(request).name, "realm": PROXY_NAME}), "GET", "POST"
        ),
        "/hosts": answer_plainly(lambda request: _json([request.headers.get("host") or request.url.netloc]), "GET"),
        "/version": answer_plainly(lambda _: Response(version, media_type="text/plain"), "GET"),
        "/ping": answer_plainly(lambda _: Response(), "GET"),
    }
    return [Route(path, answer, methods=METHODS) for path, answer in routes.items()]


_ID = re.compile(r"[!-~]{1,160}")


@dataclass(frozen=True)
class _Ids:
    request_id: str
    correlation_id: str


Handler = Callable[[Request, _Ids], Awaitable[Response]]


@dataclass(eq=False)
class _Transport:
    _backend: Backend
    _authenticate: Callable[[Request], User]
    _limits: YtLimits
    _replies: ReplyCache
    _bodies: Bodies
    _record_refusal: RecordRefusal

    def __post_init__(self) -> None:
        self._large_answers = asyncio.Semaphore(LARGE_ANSWERS_AT_ONCE)
        self._rates = Rates(self._limits)

    def handle(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: errors get the form of the protocol, and every response its headers."""

        async def answer(request: Request) -> Response:
            request_id = make_id()
            given = request.headers.get("x-yt-correlation-id", "")
            ids = _Ids(request_id, given if _ID.fullmatch(given) else request_id)
            try:
                response = await handler(request, ids)
            except HttpError as refused:
                await self._record_refusal(request, refused)
                code = UNAVAILABLE if refused.status == 503 else refused.code
                response = make_error_response(YtError(str(refused), code), refused.status)
                response.headers.update(refused.headers)
            except CpumondError as error:
                await self._record_refusal(request, error)
                response = make_error_response(error)
            except asyncio.CancelledError:
                # The server is stopping; the client will send the request again, with the same mutation id.
                response = make_error_response(YtError("the scheduler is stopping; send it again", UNAVAILABLE), 503)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception:
                log.exception(
                    "request_failed", path=request.url.path, correlation_id=ids.correlation_id, request_id=request_id
                )
                response = make_error_response(_internal_error(ids))
            response.headers["X-YT-Request-Id"] = request_id
            response.headers["X-YT-Proxy"] = PROXY_NAME
            response.headers["Cache-Control"] = "no-store"
            return response

        return answer

    def answer_plainly(
        self, answer: Callable[[Request], Response], *methods: str
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler for requests that are not commands."""

        async def give(request: Request, _: _Ids) -> Response:
            _require_method(request, *methods)
            return answer(request)

        return self.handle(give)

    async def refuse_version(self, request: Request, _: _Ids) -> Response:
        """Refuse a request below /api for which there is no route."""
        raise HttpError(404, f"there is no {request.url.path} here; the API is at /api/v4 (unset YT_VERSION)")

    async def run(self, request: Request, ids: _Ids) -> Response:
        """Run a command: GET, POST or PUT /api/v4/<command>."""
        name = str(request.path_params["command"])
        command = COMMANDS.get(name)
        if command is None:
            raise HttpError(404, _describe_unknown(name))
        request.state.user = user = self._authenticate(request)
        self._rates.take(user.name)
        _check_method(request, command)
        with self._bodies.hold(user.name) as held:
            body = await held.read(request, self._limits.max_body_bytes, _is_packed(request))
            text = gather_parameters(request)
            texts = (body, text, request.scope["query_string"])
            await held.work_on(*texts)
            if sum(map(len, texts)) > READ_AT_ONCE_BYTES:
                read = await self._bodies.run_in_thread(self._read_request, request, command, body, text)
            else:
                read = self._read_request(request, command, body, text)
            return await self._answer(request, command, user, ids, *read)

    async def _answer(
        self, request: Request, command: Command, user: User, ids: _Ids, parameters: dict[str, Any], value: Any
    ) -> Response:
        form = None if command.is_binary else _find_format(request, parameters, is_input=False)
        wanted = YtRequest(command.name, parameters, value, user, ids.correlation_id)
        log.debug(
            "yt_command", command=command.name, user=user.name, correlation_id=ids.correlation_id,
            request_id=ids.request_id,
        )  # fmt: skip
        if form is None:
            return Response(await self._execute(wanted), headers={"Content-Type": "application/octet-stream"})
        if command.name in LARGE_ANSWERS:
            async with self._large_answers:
                data = await self._bodies.run_in_thread(_write_and_free, [await self._execute(wanted)], form)
        else:
            data = write_value(await self._execute(wanted), form)
        return Response(data, headers={"Content-Type": form.content_type})

    def _read_request(self, request: Request, command: Command, body: bytes, text: bytes) -> tuple[dict[str, Any], Any]:
        """Return the value and the parameters: those of the body override the headers', and these the URL's."""
        depth = self._limits.max_depth
        parameters = read_query(request, depth)
        header_format = _named_format(request, "X-YT-Header-Format")
        if text.strip():
            parameters.update(read_map(text, header_format or BINARY, depth, "header X-YT-Parameters"))
        if not command.has_input:
            if body.strip():
                form = header_format or _mime_format(request, "content-type") or BINARY
                parameters.update(read_map(body, form, depth, "body"))
            return parameters, None
        form = _find_format(request, parameters, is_input=True)
        if not body.strip():
            raise YtError(f"{command.name}: the body of the request must be the value, and is empty")
        try:
            value = read_value(body, form, depth)
        except ParseError as error:
            raise error.located("value") from None
        return parameters, _check_value(command.name, value)

    async def _execute(self, request: YtRequest) -> Any:
        """Return the answer to a command: the backend's, or an earlier reply."""
        if request.command == "execute_batch":
            return await self._execute_batch(request)
        mutation_id = strip_attributes(request.parameters.get("mutation_id"))
        if not COMMANDS[request.command].volatile or mutation_id is None:
            return await self._call(request)
        if not isinstance(mutation_id, str) or not _ID.fullmatch(mutation_id):
            raise YtError(f"mutation_id: {quote_text(mutation_id)} is not an id; make a new one for every command")
        return await self._replies.run(request.user.name, mutation_id, request.command, lambda: self._call(request))

    async def _call(self, request: YtRequest) -> Any:
        result = _run_transaction_command(request.command)
        if result is None:
            result = await self._backend(request)
        if request.command in ("get", "list") and strip_attributes(request.parameters.get("return_only_value")) is True:
            return result["value"]
        return result

    async def _execute_batch(self, request: YtRequest) -> dict[str, Any]:
        """Run each request of a batch by itself, in order: ``{results=[{output=...} or {error=...}]}``."""
        requests = strip_attributes(request.parameters.get("requests"))
        if not isinstance(requests, list):
            raise YtError('execute_batch: "requests" must be a list of {command; parameters; input}')
        if len(requests) > self._limits.max_batch_requests:
            raise YtError(
                f"execute_batch: {len(requests)} requests are more than the limit of "
                f"{self._limits.max_batch_requests}; send them in several batches"
            )
        self._rates.charge(request.user.name, float(len(requests)))
        results: list[dict[str, Any]] = []
        total_bytes = 0
        for index, item in enumerate(requests):
            if total_bytes > MAX_BATCH_BYTES:
                error = YtError(
                    f"execute_batch: the answers before this one take more than {MAX_BATCH_BYTES} bytes; send it in "
                    "another batch",
                    TOO_MANY_REQUESTS,
                )
                results.append({"error": error_value(error)})
                continue
            results.append(await self._execute_item(request, item, index))
            total_bytes += await self._weigh(results[-1])
            # Other clients get their turn between two requests that did not wait for anything.
            await asyncio.sleep(0)
        return {"results": results}

    async def _weigh(self, result: dict[str, Any]) -> int:
        """Count the bytes of a result; if it may be large, in a thread, because each of its values is examined."""
        output = result.get("output")
        value = output.get("value") if isinstance(output, dict) and len(output) == 1 else output
        if value and isinstance(value, Attributed | list | tuple | dict):
            return await self._bodies.run_in_thread(weigh_value, result)
        return weigh_value(result)

    async def _execute_item(self, batch: YtRequest, item: Any, index: int) -> dict[str, Any]:
        try:
            return {"output": await self._execute(_read_item(batch, strip_attributes(item), index))}
        except CpumondError as error:
            return {"error": error_value(error)}
        except Exception:
            log.exception("batch_request_failed", index=index, correlation_id=batch.correlation_id)
            return {"error": error_value(_internal_error(_Ids("", batch.correlation_id)))}


def _read_item(batch: YtRequest, item: Any, index: int) -> YtRequest:
    """Read one request of a batch. A change gets its own mutation id, so that a repeated batch does not repeat it."""
    if not isinstance(item, dict):
        raise YtError(f"execute_batch: request {index} is not a map of command, parameters and input")
    name = strip_attributes(item.get("command"))
    parameters = strip_attributes(item.get("parameters", {}))
    if not isinstance(name, str) or name not in COMMANDS or name == "execute_batch":
        raise YtError(f"execute_batch: request {index}: {_describe_unknown(str(name))}")
    if not isinstance(parameters, dict):
        raise YtError(f'execute_batch: request {index}: "parameters" must be a map')
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
        raise YtError("multiset_attributes: the value must be a map of attributes")
    return value


def _run_transaction_command(name: str) -> dict[str, Any] | None:
    """Accept a command of transactions without effect, because all commands are independent (section 8)."""
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
        text = f"{request.method} {request.url.path}: use {' or '.join(allowed)}"
        raise HttpError(405, text, headers={"Allow": ", ".join(allowed)})


def _check_method(request: Request, command: Command) -> None:
    """Refuse a change by GET or by a page of another site, because a token is not always required."""
    if not command.volatile:
        _require_method(request, "GET", "POST", "PUT")
        return
    _require_method(request, *(("PUT", "POST") if command.has_input else ("POST", "PUT")))
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HttpError(403, f"{command.name}: pages of {quote_text(origin)} may not send this request", ACCESS_DENIED)


def _is_packed(request: Request) -> bool:
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "x-gzip", ""):
        raise HttpError(415, f"Content-Encoding {quote_text(coding)}: use gzip or identity")
    return coding.endswith("gzip")


def _mime_format(request: Request, header: Literal["accept", "content-type"]) -> Format | None:
    """Return the format of the header's first MIME type that the protocol knows."""
    for part in request.headers.get(header, "").lower().split(","):
        form = MIME_FORMATS.get(part.partition(";")[0].strip())
        if form is not None:
            return form
    return None


def _named_format(request: Request, header: str) -> Format | None:
    text = request.headers.get(header)
    return None if text is None else parse_format(text.encode("latin-1"), f"header {header}")


def _find_format(request: Request, parameters: Mapping[str, Any], is_input: bool) -> Format:
    """Return the format in the parameters, a header or the MIME type, in this order; else PRETTY (input: BINARY)."""
    name = "input_format" if is_input else "output_format"
    if parameters.get(name) is not None:
        return format_of(parameters[name], name)
    header = _named_format(request, "X-YT-Input-Format" if is_input else "X-YT-Output-Format")
    return header or _mime_format(request, "content-type" if is_input else "accept") or (BINARY if is_input else PRETTY)


def _write_and_free(holder: list[Any], form: Format) -> bytes:
    """Write the only value in ``holder`` and free it; called in a thread, because freeing, too, may take long."""
    value = holder.pop()
    return write_value(value, form, lambda: time.sleep(GIVE_WAY_S))


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")


def _internal_error(ids: _Ids) -> YtError:
    return YtError(
        f"the scheduler failed at this request; its log has the reason under {ids.correlation_id}",
        attributes={"correlation_id": ids.correlation_id},
    )


def make_error_response(error: CpumondError, status: int | None = None) -> Response:
    """Return an error as a JSON body and three headers (section 7); headers that would be too long are cut."""
    value = error_value(error)
    bare = {**value, "attributes": {}, "inner_errors": []}
    try:
        body = json.dumps(_plain_json(value))
    except (FormatError, RecursionError):
        body = json.dumps(_plain_json(bare))
    header, code = body, value["code"]
    message = _plain_text(value["message"])
    if len(header) > MAX_ERROR_HEADER_CHARS:
        header = json.dumps({**bare, "message": message[:MAX_MESSAGE_HEADER_CHARS]})
    headers = {"X-YT-Error": header, "X-YT-Response-Code": str(code)}
    headers["X-YT-Response-Message"] = json.dumps(message[:MAX_MESSAGE_HEADER_CHARS])
    status = STATUS_OF_CODE.get(code, 400) if status is None else status
    return Response(body, status, headers, "application/json")


def _plain_json(value: Any) -> Any:
    """Return an error as JSON. The client takes its strings literally: here, bytes are not written as code points."""
    if isinstance(value, Mapping) and not isinstance(value, Attributed):
        return {_plain_text(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, Attributed):
        return [_plain_json(item) for item in value]
    return to_json_tree(value)


def _plain_text(text: object) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode()
