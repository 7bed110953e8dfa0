"""The JSON interface ``/api/v1``: serves the table of ``openapi``, nothing else. Changes go through the scheduler.

Every error is ``{"error": sentence, "code": n, "attributes": {...}}``; the sentence says what is wrong and where.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import itertools
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import inspect
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cpumond import __version__
from cpumond.api import node_views, openapi, orchid_attributes, overview, tables, views
from cpumond.api.bodies import Bodies, BodyError
from cpumond.api.formats import MAX_VALUES, YtError, has_too_many_values
from cpumond.api.openapi import ENDPOINTS, PREFIX, Endpoint
from cpumond.api.tree_view import TreeView
from cpumond.errors import CpumondError
from cpumond.fairshare.explain import Explanation, explain
from cpumond.fairshare.validate import nearest
from cpumond.scheduler import config_commands, operations, why
from cpumond.scheduler.attributes import Edit
from cpumond.scheduler.commands import Command
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.history import HistoryView, ReportView
from cpumond.scheduler.loop import Scheduler
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
    OperationRecord,
    TreeConfig,
)
from cpumond.scheduler.recorder import History
from cpumond.scheduler.snapshot import GUARANTEE_PREFIX, OPERATION_PREFIX
from cpumond.scheduler.store import StoreError
from cpumond.scheduler.tokens import User
from cpumond.web import accepts_gzip, matches_etag
from cpumond.wire import MAX_HEARTBEAT_BYTES, MAX_LOG_BYTES, MAX_REPLY_BYTES, Heartbeat, JobLog, JobReply, RequestKind

log = structlog.get_logger("cpumond.api")

READY_PERIODS: Final = 5
"""Updates that may be missing before the scheduler is called stuck."""

READY_S: Final = 2.0

MIN_BODY: Final = {
    JobLog: 4 * MAX_LOG_BYTES // 3 + 65_536,
    JobReply: MAX_REPLY_BYTES + 65_536,
    Heartbeat: MAX_HEARTBEAT_BYTES,
}
"""The longest log in base64, reply and heartbeat, whatever [api] max_body allows others."""

STATUS_OF_CODE: Final = {
    RESOLVE: 404,
    NO_SUCH_OPERATION: 404,
    NO_SUCH_JOB: 404,
    ALREADY_EXISTS: 409,
    TOO_MANY_OPERATIONS: 409,
    AUTHENTICATION: 401,
    ACCESS_DENIED: 403,
    TOO_MANY_REQUESTS: 429,
    NODE_OFFLINE: 503,
    TIMEOUT: 504,
}
"""Codes of refusals -> HTTP status; others are 422."""

Authenticate = Callable[[Request], str]
AuthenticateNode = Callable[[Request], User]
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)

SLASH: Final = "\0"
"""Stands in a path for an encoded slash; no name holds it."""

ALERT_S: Final = 600.0
"""How long after the last time something went wrong it is an alert."""

JSON: Final = "application/json"
GZIP_LEVEL: Final = 4
GZIP_BYTES: Final = 8192
"""Answers from this size on are compressed for whoever takes it."""

THREAD_BYTES: Final = 65_536
"""From this size on in a thread: it would hold up heartbeats."""

SUMMED_AT_ONCE: Final = 1000
"""Operations whose jobs are added up, or names made ready for a search, before something else has its turn."""

encode = msgspec.json.Encoder().encode


class HttpError(Exception):
    """A request that does not get as far as a command."""

    def __init__(
        self, status: int, message: str, code: int = GENERIC, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An answer with a status of its own."""

    value: Any
    status: int


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A good answer that was encoded before, and compressed; ``etag`` is weak and names both."""

    content: bytes
    compressed: bytes
    etag: str


@dataclasses.dataclass(slots=True)
class Call:
    """One request, read and checked."""

    path: Mapping[str, str]
    user: str
    body: Any
    query: Any
    node: User | None = None
    """Who speaks for a node, where the endpoint is for that."""


Handler = Callable[[Call], Awaitable[Any]]


def make_json_routes(
    scheduler: Scheduler,
    authenticate: Authenticate,
    max_body: int = 2**20,
    max_depth: int = 64,
    count: Callable[[str], None] = lambda _: None,
    *,
    authenticate_node: AuthenticateNode = lambda _: User("", node=True),
    bodies: Bodies | None = None,
    cluster_name: str = "",
    needs_token: bool = False,
    is_open: bool = False,
) -> list[Route]:
    """The routes of ``/api/v1``, ``/healthz`` and ``/readyz``.

    ``authenticate`` names the user of a request, ``authenticate_node`` who speaks for a node; both raise CommandError.
    ``max_body``: bytes of a request's body;
    ``max_depth``: how deep its values may be nested. ``count`` is told whose request it is, and raises CommandError
    when there are too many; nodes are not counted. ``cluster_name``, ``needs_token``, ``is_open``: what ``/me`` tells.
    """
    service = JsonApi(scheduler, cluster_name, needs_token, is_open)
    bodies = bodies or Bodies()
    by_path: dict[str, dict[str, _Served]] = {}
    for endpoint in ENDPOINTS:
        served = _Served(
            endpoint, getattr(service, endpoint.name), authenticate, authenticate_node, max_body, max_depth, count,
            bodies,
        )  # fmt: skip
        service.served[endpoint.name] = served
        by_path.setdefault(endpoint.path, {})[endpoint.method] = served
    # Paths are tried one after another: what nodes ask for all the time goes first, then the others as they stand.
    paths = sorted(by_path, key=lambda path: not any(each.endpoint.is_of_nodes for each in by_path[path].values()))
    routes = [Route(path, _Dispatcher(by_path[path])) for path in paths]
    return [*routes, Route(PREFIX + "/{rest:path}", _Dispatcher({}))]


# --- from a request to a function and back ---------------------------------------------------------------------------


class _Served:
    """One endpoint with its function; its decoders are made once."""

    def __init__(
        self,
        endpoint: Endpoint,
        handler: Handler,
        authenticate: Authenticate,
        authenticate_node: AuthenticateNode,
        max_body: int,
        max_depth: int,
        count: Callable[[str], None],
        bodies: Bodies,
    ) -> None:
        self.endpoint = endpoint
        self.bodies = bodies
        self.handler = handler
        self.authenticate = authenticate
        self.authenticate_node = authenticate_node
        self.max_depth = max_depth
        self.count_request = count
        self.max_body = max(max_body, MIN_BODY.get(endpoint.body, 0))
        self.decoder = None if endpoint.body is None else msgspec.json.Decoder(endpoint.body)
        self.count = 0
        self.total_s = self.longest_s = 0.0

    async def answer(self, request: Request) -> Response:
        """The answer, good or bad."""
        begun = time.perf_counter()
        try:
            return await self._answer(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            return describe(request, error)
        finally:
            spent_s = time.perf_counter() - begun
            self.count += 1
            self.total_s += spent_s
            self.longest_s = max(self.longest_s, spent_s)

    async def _answer(self, request: Request) -> Response:
        endpoint = self.endpoint
        user, node = "", None
        if not endpoint.is_public:
            if endpoint.is_change:
                _check_origin(request)
            if endpoint.is_of_nodes:
                node = self.authenticate_node(request)
            else:
                user = self.authenticate(request)
                self.count_request(user)
        query = _read_query(request, endpoint)
        if self.decoder is None:
            return await self._act(request, Call(_read_names(request), user, None, query, node))
        with self.bodies.hold(user, endpoint.is_of_nodes) as held:
            data = await held.read(request, self.max_body)
            await held.work_on(data)
            body = _decode(data, self.decoder, endpoint)
            if node is None:
                _check_depth(body, self.max_depth)
            elif not node.may_be(body.node_id):
                raise _not_its_node(node, body.node_id)
            return await self._act(request, Call(_read_names(request), user, body, query, node))

    async def _act(self, request: Request, call: Call) -> Response:
        endpoint = self.endpoint
        value = await self.handler(call)
        if isinstance(value, Response):
            return value
        if isinstance(value, Made):
            return _send_made(request, value)
        status = endpoint.status
        if isinstance(value, Answer):
            value, status = value.value, value.status
        content = encode(value)
        if endpoint.is_change or len(content) < GZIP_BYTES:
            return Response(content, status, media_type=JSON)
        headers = {"Vary": "Accept-Encoding"}
        if accepts_gzip(request.headers):
            content = await _compress(content)
            headers["Content-Encoding"] = "gzip"
        return Response(content, status, headers, JSON)


async def _compress(content: bytes) -> bytes:
    if len(content) < THREAD_BYTES:
        return gzip.compress(content, GZIP_LEVEL, mtime=0)
    return await asyncio.to_thread(gzip.compress, content, GZIP_LEVEL, mtime=0)


def _send_made(request: Request, made: Made) -> Response:
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
            text = f"{request.method} {request.url.path}: this method is not offered here; use {allowed}"
            response = describe(request, HttpError(405, text, headers={"Allow": allowed}))
        else:
            known = [endpoint.path for endpoint in ENDPOINTS if "{" not in endpoint.path]
            near = nearest(request.url.path, known, 0.85)
            hint = f"did you mean {near}?" if near else f"all paths are listed in {PREFIX}/openapi.json"
            text = f"{request.method} {request.url.path}: there is nothing here; {hint}"
            response = describe(request, HttpError(404, text, RESOLVE))
        await response(scope, receive, send)


def _check_origin(request: Request) -> None:
    """No page of another site may change something: a token is not always asked for."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HttpError(403, f"pages of {origin[:200]!r} may not do this", ACCESS_DENIED)


def _not_its_node(node: User, node_id: str) -> CommandError:
    return CommandError(
        f"the token of {node.name} is for nodes that match {node.pattern[:200]!r}, and this is {node_id[:200]!r}; "
        "correct the agent's node_id, or the pattern in the scheduler's [api] tokens_file",
        ACCESS_DENIED,
    )


def _read_names(request: Request) -> dict[str, str]:
    """The names in the path; SLASH stands for a slash inside of one."""
    return {key: str(name).replace(SLASH, "/") for key, name in request.path_params.items()}


def _decode(data: bytes, decoder: msgspec.json.Decoder[Any], endpoint: Endpoint) -> Any:
    if not data:
        if not endpoint.needs_body:
            return endpoint.body()
        raise HttpError(400, "the request has no body; it must be a JSON object")
    if not endpoint.is_of_nodes and has_too_many_values(data):
        raise HttpError(413, f"the body of the request holds more than {MAX_VALUES} values; send less at once")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise HttpError(422, _tell_validation(error, "body", endpoint.body)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"the body of the request is not JSON: {error}") from None
    except RecursionError:
        raise HttpError(400, "the body of the request is not JSON: it is nested too deep") from None


def _check_depth(body: Any, limit: int) -> None:
    """What is stored must be readable by everything that shows it."""
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
    for name, value in request.query_params.multi_items():
        if name in given:
            raise HttpError(422, f"query: {name[:100]}: given twice; give it once")
        given[name] = value
    kind = endpoint.query
    if kind is None:
        if given:
            raise HttpError(422, f"query: {next(iter(given))[:100]}: unknown; nothing may stand behind the ? here")
        return None
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise HttpError(422, _tell_validation(error, "query", kind)) from None


def _tell_validation(error: msgspec.ValidationError, where: str, kind: Any) -> str:
    """msgspec's message as a sentence: place, what is wrong, and the name that may be meant."""
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
    """The names of all fields in a type, and in what it holds."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield field.encode_name
            yield from _field_names(field.type)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from _field_names(kind.item_type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _field_names(member)


def _respond(value: Any, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, JSON)


async def describe_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of exceptions: any refusal in the form of this interface."""
    return describe(request, error)


def describe(request: Request, error: Exception) -> Response:
    """The answer that an exception becomes. What nobody should cause is logged, and no part of it is shown."""
    code, attributes = GENERIC, {}
    headers: Mapping[str, str] = {}
    text = str(error)
    if isinstance(error, BodyError):
        status, headers = error.status, {"Connection": "close"}
        code = TOO_MANY_REQUESTS if status == 429 else GENERIC
    elif isinstance(error, HttpError):
        status, code, headers = error.status, error.code, error.headers
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers or {}
        text = f"{request.method} {request.url.path}: {error.detail}"
    elif isinstance(error, CommandError | YtError):
        status, code = STATUS_OF_CODE.get(error.code, 422), error.code
        attributes = dict(error.attributes)
    elif isinstance(error, StoreError):
        status = 503
    elif isinstance(error, CpumondError):
        status = 422
    elif isinstance(error, RecursionError):
        # What could just be read may be too deep to be written.
        status, text = 422, "the request is nested too deep"
    else:
        log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
        status, text = 500, "the scheduler failed at this request; see its log"
    if status == 401:
        headers = {**headers, "WWW-Authenticate": "Bearer"}
    return _respond(views.Failure(text, code, attributes), status, headers)


# --- what each does ----------------------------------------------------------------------------------------------


class JsonApi:
    """The functions of the table, by their names."""

    def __init__(
        self, scheduler: Scheduler, cluster_name: str = "", needs_token: bool = False, is_open: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.cluster_name = cluster_name
        self.needs_token = needs_token
        self.is_open = is_open
        self.served: dict[str, _Served] = {}
        self._cores: dict[str, tuple[tuple[Tree, int], asyncio.Task[tables.CoreSums]]] = {}
        self._tables: dict[str, tuple[tuple[Tree, int, TreeConfig], asyncio.Task[Made]]] = {}
        self._table_numbers = itertools.count(1)
        self._texts = views.SearchTexts()
        self._document: Made | None = None
        self._thinking = asyncio.Lock()
        """Plans and explanations are made one at a time: the threads are there for updates and the store."""

    async def _execute(self, command: Command, call: Call) -> views.Done:
        reply = await self.scheduler.execute(command, call.user)
        return views.Done(reply.id, list(reply.warnings))

    def _now(self) -> float:
        return self.scheduler.clock.now()

    # --- trees and pools

    async def list_trees(self, _: Call) -> views.TreeList:
        return views.show_trees(self.scheduler.state)

    async def get_tree(self, call: Call) -> views.TreeView:
        state = self.scheduler.state
        return views.show_tree(state, state.find_tree(call.path["tree"]))

    async def create_tree(self, call: Call) -> views.Done:
        body: openapi.CreateTreeBody = call.body
        command = config_commands.CreateTree(body.name, body.attributes, body.ignore_existing)
        return await self._execute(command, call)

    async def change_tree(self, call: Call) -> views.Done:
        return await self._execute(config_commands.ChangeTree(call.path["tree"], _edits(call.body)), call)

    async def remove_tree(self, call: Call) -> views.Done:
        return await self._execute(config_commands.RemoveTree(call.path["tree"], call.query.recursive), call)

    async def set_default_tree(self, call: Call) -> views.Done:
        return await self._execute(config_commands.SetDefaultTree(call.body.tree), call)

    async def list_pools(self, call: Call) -> views.PoolList:
        return views.show_pools(self.scheduler.state.find_tree(call.path["tree"]), self._now())

    async def get_pool_table(self, call: Call) -> Made:
        tree = self.scheduler.state.find_tree(call.path["tree"])
        # A changed pool shows at once, not only with the next update.
        made_of = (tree, tree.update_count, tree.config)
        known = self._tables.get(tree.name)
        if known is None or known[0] != made_of or _has_failed(known[1]):
            self._tables = {name: each for name, each in self._tables.items() if name in self.scheduler.state.trees}
            known = self._tables[tree.name] = (made_of, asyncio.create_task(self._make_pool_table(tree)))
        return await asyncio.shield(known[1])

    async def _make_pool_table(self, tree: Tree) -> Made:
        content = encode(tables.make_pool_table(tree, await self._cores_of(tree), self._now()))
        etag = f'W/"{tree.update_count}.{next(self._table_numbers)}-{self.scheduler.started_at:.3f}"'
        return Made(content, await _compress(content), etag)

    async def _cores_of(self, tree: Tree) -> tables.CoreSums:
        """Summed up once for each update."""
        known = self._cores.get(tree.name)
        if known is None or known[0] != (tree, tree.update_count) or _has_failed(known[1]):
            self._cores = {name: each for name, each in self._cores.items() if name in self.scheduler.state.trees}
            known = self._cores[tree.name] = ((tree, tree.update_count), asyncio.create_task(_sum_cores(tree)))
        return await asyncio.shield(known[1])

    async def get_pool(self, call: Call) -> views.PoolView:
        tree = self.scheduler.state.find_tree(call.path["tree"])
        return views.show_pool(views.find_pool(tree, call.path["pool"]), self._now())

    async def get_pool_orchid(self, call: Call) -> dict[str, Any]:
        tree = self.scheduler.state.find_tree(call.path["tree"])
        pool = views.find_pool(tree, call.path["pool"])
        return orchid_attributes.pool_attributes(self._orchid_of(tree), pool).to_dict()

    def _orchid_of(self, tree: Tree) -> TreeView:
        kept = self.scheduler.updates.get(tree.name)
        return TreeView(tree, None if kept is None else kept.result)

    async def create_pool(self, call: Call) -> views.Done:
        body: openapi.CreatePoolBody = call.body
        command = config_commands.CreatePool(
            call.path["tree"], body.name, body.parent, body.attributes, body.ignore_existing
        )
        return await self._execute(command, call)

    async def change_pool(self, call: Call) -> views.Done:
        command = config_commands.ChangePool(call.path["tree"], call.path["pool"], _edits(call.body))
        return await self._execute(command, call)

    async def remove_pool(self, call: Call) -> views.Done:
        command = config_commands.RemovePool(call.path["tree"], call.path["pool"], call.query.recursive)
        return await self._execute(command, call)

    async def move_pool(self, call: Call) -> views.Done:
        body: openapi.MoveBody = call.body
        tree = config_commands.find_tree(self.scheduler.state.config, call.path["tree"])
        pool = config_commands.find_pool(tree, call.path["pool"])
        command = config_commands.MovePool(tree.name, pool.name, body.parent or pool.parent, body.name or pool.name)
        return await self._execute(command, call)

    async def transfer_resources(self, call: Call) -> views.Done:
        body: openapi.TransferBody = call.body
        command = config_commands.TransferPoolResources(
            call.path["tree"], call.path["pool"], body.destination, body.delta
        )
        return await self._execute(command, call)

    async def make_plan(self, call: Call) -> why.Plan:
        scheduler = self.scheduler
        async with self._thinking:
            now = self._now()
            change = why.try_command(scheduler.state, call.body, call.user, now)
            if isinstance(change, why.Plan):
                return change
            material = why.collect(scheduler.state)
            previous = {name: kept.previous_time for name, kept in scheduler.updates.items()}
            return await asyncio.to_thread(
                why.make_plan, material, change, now, previous, everything=call.query.everything
            )

    # --- operations

    def _find(self, call: Call) -> OperationRecord:
        return self.scheduler.state.find_record(call.path["operation"])

    async def list_operations(self, call: Call) -> views.OperationList:
        query: openapi.OperationsQuery = call.query
        if query.search:
            await self._read_texts()
        return views.show_operations(
            self.scheduler.state, self._now(), limit=query.limit, offset=query.offset, operation_state=query.state,
            user=query.user, tree=query.tree, pool=query.pool, search=query.search, sort=query.sort,
            descending=query.descending == "true", texts=self._texts,
        )  # fmt: skip

    async def _read_texts(self) -> None:
        """Make what is searched, in parts: heartbeats must not wait for all of it."""
        records = views.list_records(self.scheduler.state)
        for start in range(0, len(records), SUMMED_AT_ONCE):
            for record in records[start : start + SUMMED_AT_ONCE]:
                self._texts.of(record)
            await asyncio.sleep(0)
        self._texts.forget_gone(self.scheduler.state)

    async def start_operation(self, call: Call) -> views.Done:
        return await self._execute(operations.StartOperation(call.body.spec, call.body.type), call)

    async def get_operation(self, call: Call) -> views.OperationDetails:
        return views.show_operation_details(self.scheduler.state, self._find(call), self._now())

    async def get_specification(self, call: Call) -> views.Specification:
        return views.show_specification(self.scheduler.state, self._find(call))

    async def get_operation_orchid(self, call: Call) -> dict[str, dict[str, Any]]:
        live = self.scheduler.state.operations.get(self._find(call).id)
        return {
            name: orchid_attributes.operation_attributes(self._orchid_of(element.tree), element).to_dict()
            for name, element in (live.elements.items() if live is not None else ())
        }

    async def update_operation(self, call: Call) -> views.Done:
        command = operations.UpdateOperation(self._find(call).id, call.body.parameters)
        return await self._execute_on(command, call)

    async def abort_operation(self, call: Call) -> views.Done:
        return await self._execute_on(operations.AbortOperation(self._find(call).id, call.body.message), call)

    async def suspend_operation(self, call: Call) -> views.Done:
        command = operations.SuspendOperation(self._find(call).id, call.body.abort_running_jobs)
        return await self._execute_on(command, call)

    async def resume_operation(self, call: Call) -> views.Done:
        return await self._execute_on(operations.ResumeOperation(self._find(call).id), call)

    async def complete_operation(self, call: Call) -> views.Done:
        return await self._execute_on(operations.CompleteOperation(self._find(call).id), call)

    async def _execute_on(self, command: Any, call: Call) -> views.Done:
        done = await self._execute(command, call)
        return views.Done(command.operation_id, done.warnings)

    async def list_jobs(self, call: Call) -> views.JobList:
        query: openapi.JobsQuery = call.query
        return views.show_jobs(
            self.scheduler.state, self._find(call), limit=query.limit, offset=query.offset, job_state=query.state,
            node_id=query.node,
        )  # fmt: skip

    async def get_job(self, call: Call) -> views.JobView:
        return views.find_job(self.scheduler.state, self._find(call), call.path["job"])

    async def get_job_log(self, call: Call) -> Response:
        query: openapi.LogQuery = call.query
        found = await self.scheduler.read_log(call.path["operation"], call.path["job"], query.stream, query.tail)
        # Whatever a job wrote, no browser may take it for a page.
        headers = {openapi.TOTAL_BYTES: str(found.total_bytes), "X-Content-Type-Options": "nosniff"}
        return Response(found.content, headers={**headers, "content-type": openapi.TEXT})

    async def take_job_log(self, call: Call) -> views.Taken:
        return views.Taken(self.scheduler.logs.take(call.body))

    async def explain_job(self, call: Call) -> dict[str, Any]:
        return await self._ask_job(call, "explain")

    async def pin_job(self, call: Call) -> views.Done:
        body: openapi.PinBody = call.body
        job = await self._ask_job(call, "pin", body.cpu_limit, body.ttl_s)
        warnings = []
        if job.get("last_result") == "failed" and job.get("last_error"):
            warnings.append(f"the limit could not be written: {job.get('last_error')}")
        elif job.get("pinned_cpu_limit") is None:
            warnings.append("writes are paused on its node; the pin takes effect when the pause file is gone")
        return views.Done(call.path["job"], warnings)

    async def unpin_job(self, call: Call) -> views.Done:
        await self._ask_job(call, "unpin")
        return views.Done(call.path["job"], [])

    async def _ask_job(
        self, call: Call, kind: RequestKind, cpu_limit: float | None = None, ttl_s: float | None = None
    ) -> dict[str, Any]:
        operation, job = call.path["operation"], call.path["job"]
        return await self.scheduler.ask_job(operation, job, kind, cpu_limit, ttl_s, call.user)

    async def take_job_reply(self, call: Call) -> views.Taken:
        return views.Taken(self.scheduler.requests.take(call.body))

    async def explain_operation(self, call: Call) -> why.OperationAnswer:
        record = self._find(call)
        shares = {}
        async with self._thinking:
            for name in record.trees:
                told = await self._explain_share(name, GUARANTEE_PREFIX + record.id)
                told = told or await self._explain_share(name, OPERATION_PREFIX + record.id)
                if told is not None:
                    shares[name] = (told.rule, why.name_operations(self.scheduler.state, told.lines))
        record = self.scheduler.state.find_record(record.id)
        return why.explain_operation(self.scheduler.state, record, self._now(), shares)

    async def _explain_share(self, tree: str, element: str) -> Explanation | None:
        """What the last update of a tree says about an element; None where it does not know it."""
        kept = self.scheduler.updates.get(tree)
        snapshot, result = (kept.snapshot, kept.result) if kept is not None else (None, None)
        if snapshot is None or result is None:
            return None
        try:
            return await asyncio.to_thread(explain, snapshot, result, element)
        except KeyError:
            return None

    # --- nodes

    async def list_nodes(self, call: Call) -> node_views.NodeList:
        query: openapi.NodesQuery = call.query
        return node_views.show_nodes(
            self.scheduler.state, self._now(), limit=query.limit, offset=query.offset, tree=query.tree, tag=query.tag,
            online=query.online == "true" if query.online else None,
        )  # fmt: skip

    async def get_node(self, call: Call) -> node_views.NodeDetails:
        return node_views.show_node_details(node_views.find_node(self.scheduler.state, call.path["node"]), self._now())

    async def register_node(self, call: Call) -> Any:
        # Without tokens whoever gets here may do everything.
        may_replace = not self.needs_token or (call.node is not None and call.node.is_bound)
        return await self.scheduler.register(call.body, may_replace)

    async def heartbeat(self, call: Call) -> Any:
        answer = await self.scheduler.heartbeat(call.body)
        return Answer(answer, 409) if answer.register else answer

    # --- what is going on

    async def list_preemptions(self, call: Call) -> node_views.PreemptionList:
        query: openapi.PreemptionsQuery = call.query
        return node_views.show_preemptions(
            self.scheduler.state, limit=query.limit, operation=query.operation, pool=query.pool
        )

    async def get_me(self, call: Call) -> overview.Me:
        scheduler = self.scheduler
        return overview.Me(
            user=call.user,
            needs_token=self.needs_token,
            is_open=self.is_open,
            version=__version__,
            cluster_name=self.cluster_name,
            started_at=scheduler.started_at,
            now=self._now(),
            history_length_s=0.0 if scheduler.history is None else scheduler.history.length_s,
        )

    async def get_overview(self, call: Call) -> overview.Overview:
        state = self.scheduler.state
        default = state.config.default_tree
        return overview.Overview(
            status=await self.get_status(call),
            health=self._health(),
            alerts=(await self.list_alerts(call)).alerts,
            trees=[
                overview.show_totals(each, await self._cores_of(each), each.name == default)
                for each in list(state.trees.values())
            ],
            history=None if self.scheduler.history is None else self.scheduler.history.describe(),
        )

    async def read_history(self, call: Call) -> HistoryView:
        query: openapi.HistoryQuery = call.query
        history, now = self._history(), self._now()
        if query.kind == "pool" and not query.tree:
            default = self.scheduler.state.config.default_tree
            query = msgspec.structs.replace(query, tree=default)
        tree, name, refusal = query.tree, query.name, None
        try:
            tree, name = self._find_series(query)
        except CommandError as error:
            refusal = error
        found = await history.read(query.kind, tree, name, now - query.since_s, now, query.max_points)
        if refusal is not None and not found.times:
            raise refusal
        return found

    def _find_series(self, query: openapi.HistoryQuery) -> tuple[str, str]:
        """The tree and the name by which the history knows it. Raises CommandError for what there is not now."""
        state, tree, name = self.scheduler.state, query.tree, query.name
        if query.kind == "pool":
            return tree, views.find_pool(state.find_tree(tree), name).name
        if query.kind == "operation":
            record = state.find_record(name)
            if tree and tree not in record.trees:
                raise CommandError(f"Operation {record.id} does not run in tree {tree!r}", RESOLVE)
            return tree, record.id
        if query.kind == "node":
            return "", node_views.find_node(state, name).id
        if name not in state.jobs and not any(name in jobs for jobs in state.finished_jobs.values()):
            raise CommandError(f"No such job {name}", NO_SUCH_JOB)
        return "", name

    async def make_report(self, call: Call) -> ReportView:
        query: openapi.ReportQuery = call.query
        now = self._now()
        found = await self._history().report(now - query.since_s, now, query.tree or None, query.top)
        if query.tree and not found.trees:
            self.scheduler.state.find_tree(query.tree)
        return found

    def _history(self) -> History:
        history = self.scheduler.history
        if history is None:
            raise CommandError("history is turned off: [history] length = 0", RESOLVE)
        return history

    async def list_alerts(self, _: Call) -> overview.AlertList:
        return overview.find_alerts(self.scheduler.state, self._now(), list(self._own_alerts()))

    def _own_alerts(self) -> Iterator[overview.Alert]:
        timings = self.scheduler.timings
        since = self._now() - ALERT_S
        if (timings.store_error_at or 0.0) > since:
            message = f"the store refused {timings.store_errors} writes since the start; see the log and free its disk"
            yield overview.Alert("store_errors", "error", "", self.scheduler.store_problem or message)
        if (timings.store_lost_at or 0.0) > since:
            message = (
                "somebody removed the store while it was in use; it was written anew, and nothing is lost; see the log"
            )
            yield overview.Alert("store_lost", "error", "", message)
        if (timings.failed_at or 0.0) > since:
            message = f"{timings.failed_updates} fair-share updates failed since the start; see the log"
            yield overview.Alert("failed_updates", "error", "", message)
        if (timings.late_at or 0.0) > since:
            message = (
                f"{timings.late_updates} of {timings.updates} fair-share updates began late since the start; raise "
                "fair_share_update_period or give the scheduler more CPU"
            )
            yield overview.Alert("late_updates", "warning", "", message)
        health = self._health()
        if health.status == "stuck":
            message = f"the last fair-share update was {health.last_update_age_s or 0.0:.1f} s ago"
            yield overview.Alert("stuck", "error", "", message)

    async def get_status(self, _: Call) -> overview.Status:
        scheduler, now = self.scheduler, self._now()
        return overview.Status(
            version=__version__,
            uptime_s=now - scheduler.started_at,
            now=now,
            update_period_s=scheduler.update_period_s,
            last_update_age_s=self._update_age_s(),
            default_tree=scheduler.state.config.default_tree,
            timings={
                name: float(value)
                for name, value in dataclasses.asdict(scheduler.timings).items()
                if isinstance(value, int | float)
            },
            requests={
                name: overview.RequestTiming(served.count, served.total_s, served.longest_s)
                for name, served in self.served.items()
                if served.count
            },
            counts=overview.count_all(scheduler.state),
        )

    async def get_openapi(self, _: Call) -> Made:
        if self._document is None:
            content = encode(openapi.make_document(__version__))
            self._document = Made(content, await _compress(content), f'W/"{__version__}-{zlib.crc32(content):x}"')
        return self._document

    async def healthz(self, _: Call) -> overview.Health:
        return overview.Health("ok", self._update_age_s())

    async def readyz(self, _: Call) -> Any:
        health = self._health()
        return health if health.status == "ok" else Answer(health, 503)

    def _health(self) -> overview.Health:
        age_s = self._update_age_s()
        if not self.scheduler.ready.is_set():
            return overview.Health("starting", age_s)
        stuck = age_s is not None and age_s > max(READY_PERIODS * self.scheduler.update_period_s, READY_S)
        status: Literal["ok", "stuck", "refusing"] = "refusing" if self.scheduler.store_problem else "ok"
        return overview.Health("stuck" if stuck else status, age_s)

    def _update_age_s(self) -> float | None:
        """Since the update of the tree that was updated longest ago; None before there was one."""
        times = [kept.previous_time for kept in self.scheduler.updates.values() if kept.previous_time is not None]
        return max(self._now() - min(times), 0.0) if times else None


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _sum_cores(tree: Tree) -> tables.CoreSums:
    sums = tables.CoreSums()
    elements = list(tree.operations.values())
    for start in range(0, len(elements), SUMMED_AT_ONCE):
        sums.add(elements[start : start + SUMMED_AT_ONCE])
        await asyncio.sleep(0)
    return sums.finish(tree)


def _edits(body: openapi.EditsBody) -> tuple[Edit, ...]:
    return tuple(Edit(tuple(each.path), each.value, each.recursive) for each in body.edits)
