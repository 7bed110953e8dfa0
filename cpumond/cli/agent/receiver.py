"""``cpumond stub-scheduler``: a small receiver of heartbeats that checks them.

The receiver keeps the newest heartbeat of each node in memory. A heartbeat is a node's full state, so a job that is
not in the newest one is gone.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import math
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpumond.core.answers import Sums
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import ConfigError, CreateError, UsageError, from_os_error
from cpumond.core.settings import is_loopback, parse_listen
from cpumond.core.wire import SCHEMAS, Heartbeat

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HEARTBEAT_PATHS = ("/v1/heartbeat", "/v1/heartbeats", "/")
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_SUPERSEDED = 64
"""Earlier incarnations remembered of each node."""

MAX_SENTENCE_CHARS = 300


class LimitRow(msgspec.Struct, frozen=True):
    """One job as ``GET /v1/limits`` shows it: CPU in cores, ``received_at`` seconds since 1970."""

    node_id: str
    job_id: str
    operation_id: str
    cpu_limit: float
    current_cpu_limit: float
    smoothed_cpu_usage: float | None
    mode: str
    incarnation: str
    sequence: int
    received_at: float


class Limits(msgspec.Struct, frozen=True):
    """The answer to ``GET /v1/limits``: number of nodes, jobs by (node_id, job_id), sums."""

    nodes: int
    jobs: list[LimitRow]
    totals: Sums


class Received:
    """The newest heartbeat of each node."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[Heartbeat, float]] = {}
        self._superseded: dict[str, deque[str]] = {}

    def accept(self, heartbeat: Heartbeat, received_at: float) -> str:
        """Keep ``heartbeat`` (``received_at`` seconds since 1970) if it is new; "" or the reason why it is not."""
        node_id = heartbeat.node_id
        superseded = self._superseded.setdefault(node_id, deque(maxlen=MAX_SUPERSEDED))
        if heartbeat.incarnation in superseded:
            return f"incarnation {heartbeat.incarnation!r} of node {node_id!r} was followed by another one"
        known = self._newest[node_id][0] if node_id in self._newest else None
        if known is not None and known.incarnation != heartbeat.incarnation:
            superseded.append(known.incarnation)
        elif known is not None and heartbeat.sequence <= known.sequence:
            return f"sequence {heartbeat.sequence} of node {node_id!r} is not newer than {known.sequence}"
        self._newest[node_id] = (heartbeat, received_at)
        return ""

    def limits(self) -> Limits:
        """All jobs of all nodes as of their newest heartbeats."""
        rows = [
            LimitRow(
                node_id=heartbeat.node_id,
                job_id=job.job_id,
                operation_id=job.operation_id,
                cpu_limit=job.cpu_limit,
                current_cpu_limit=job.current_cpu_limit,
                smoothed_cpu_usage=job.smoothed_cpu_usage,
                mode=job.mode,
                incarnation=heartbeat.incarnation,
                sequence=heartbeat.sequence,
                received_at=received_at,
            )
            for heartbeat, received_at in self._newest.values()
            for job in heartbeat.jobs
        ]
        rows.sort(key=lambda row: (row.node_id, row.job_id))
        totals = Sums(
            cpu_limit=_sum_cores(row.cpu_limit for row in rows),
            current_cpu_limit=_sum_cores(row.current_cpu_limit for row in rows),
            reclaimed=_sum_cores(max(0.0, row.cpu_limit - row.current_cpu_limit) for row in rows),
        )
        return Limits(nodes=len(self._newest), jobs=rows, totals=totals)


def _sum_cores(cores: Iterable[float]) -> float:
    return round(math.fsum(cores), 6)


def make_heartbeat_parser() -> Callable[[bytes], Heartbeat]:
    """A function from a body to a heartbeat; it raises ValueError with one sentence that names the place."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    validator = Draft202012Validator(SCHEMAS["heartbeat"]())

    def parse(body: bytes) -> Heartbeat:
        try:
            # decode_json refuses NaN, Infinity and numbers beyond the range of a double, which json.loads accepts.
            message = decode_json(body, object)
        except ContentError as error:
            raise ValueError(f"the body is not valid JSON: {error}") from None
        wrong = best_match(itertools.islice(validator.iter_errors(message), 1))
        if wrong is not None:
            raise ValueError(_shorten(f"{wrong.json_path}: {wrong.message}"))
        try:
            # Not strict: to JSON Schema 1.0 is an integer. Strings in place of numbers were refused above.
            return msgspec.convert(message, Heartbeat, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(_shorten(str(error))) from None

    return parse


def _shorten(sentence: str) -> str:
    """``sentence`` without its middle where a whole message is quoted in it."""
    half = MAX_SENTENCE_CHARS // 2
    return sentence if len(sentence) <= MAX_SENTENCE_CHARS else f"{sentence[:half]} ... {sentence[-half:]}"


def make_stub_app(token: str | None, say: Callable[[str], None] | None = None) -> Starlette:
    """The receiver as an application; its state begins empty.

    With a ``token`` heartbeats and limits need ``Authorization: Bearer <token>``. ``say`` gets one line for each
    heartbeat that was accepted.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect
    from starlette.routing import Route

    received, parse = Received(), make_heartbeat_parser()

    async def post_heartbeat(request: Request) -> Response:
        if not _authorized(request, token):
            return _refuse_token()
        try:
            body = await _read_body(request)
        except ClientDisconnect:
            return _answer({"error": "the connection was closed before the end of the body"}, 400)
        if body is None:
            return _answer({"error": f"the body is larger than {MAX_BODY_BYTES} bytes"}, 413)
        try:
            # Checking thousands of jobs takes most of a second; the event loop serves other nodes meanwhile.
            heartbeat = await run_in_threadpool(parse, body)
        except ValueError as error:
            return _answer({"error": str(error)}, 422)
        reason = received.accept(heartbeat, time.time())
        if reason:
            return _answer({"accepted": False, "reason": reason})
        if say is not None:
            say(describe_heartbeat(heartbeat))
        return _answer({"accepted": True, "sequence": heartbeat.sequence})

    async def get_limits(request: Request) -> Response:
        return _answer(received.limits()) if _authorized(request, token) else _refuse_token()

    async def get_healthz(request: Request) -> Response:  # noqa: ARG001 - the signature of an endpoint
        return _answer({"status": "ok"})

    routes = [Route(path, post_heartbeat, methods=["POST"]) for path in HEARTBEAT_PATHS]
    return Starlette(routes=[*routes, Route("/v1/limits", get_limits), Route("/healthz", get_healthz)])


def describe_heartbeat(heartbeat: Heartbeat) -> str:
    ordered = _sum_cores(job.cpu_limit for job in heartbeat.jobs)
    limit = _sum_cores(job.current_cpu_limit for job in heartbeat.jobs)
    # repr: a name that arrived over the network must not move the cursor of the terminal.
    return (
        f"node {heartbeat.node_id!r} sequence {heartbeat.sequence}: {len(heartbeat.jobs)} jobs, "
        f"{limit:g} of {ordered:g} ordered cores"
    )


def _authorized(request: Request, token: str | None) -> bool:
    given = request.headers.get("authorization", "")
    return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def _refuse_token() -> Response:
    answer = _answer({"error": "the bearer token is missing or wrong"}, 401)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _answer(content: object, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _read_body(request: Request) -> bytes | None:
    """The body, or None when it is larger than MAX_BODY_BYTES; no more of it is read."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


@click.command("stub-scheduler", epilog="Example: cpumond stub-scheduler --listen 127.0.0.1:9758")
@click.option(
    "--listen", default="127.0.0.1:9758", show_default=True, metavar="HOST:PORT", help="Port 0: any free one."
)
@click.option("--token-file", metavar="FILE", help="Ask for the bearer token in FILE; needed beyond loopback.")
@click.option("--quiet", is_flag=True, help="No line for each heartbeat.")
def stub_scheduler_command(listen: str, token_file: str | None, quiet: bool) -> None:
    """A small receiver of heartbeats, to try reports out.

    Checks each heartbeat against the schema, keeps the newest of each node and shows the limits at /v1/limits. It
    keeps nothing on disk and schedules nothing. SIGTERM or Ctrl-C ends it.
    """
    from cpumond.agent.report.token import read_token

    family, address = resolve_listen(listen, token_file is not None)
    token = read_token(token_file) if token_file is not None else None
    with _listen(family, address) as listener:
        host, port = listener.getsockname()[:2]
        serve(make_stub_app(token, None if quiet else _say), listener, f"http://{_show_address(host, port)}")


def resolve_listen(listen: str, has_token: bool) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The socket address of ``listen``.

    Raises UsageError where it is not host:port, ConfigError for an unknown host and, without a token, for an address
    beyond loopback.
    """
    try:
        host, port = parse_listen(listen, "--listen")
    except ConfigError as error:
        raise UsageError(str(error)) from None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"--listen: {host!r} cannot be resolved to an address: {reason}") from None
    if not has_token and not is_loopback(str(address[0])):
        raise ConfigError(
            f"--listen: {_show_address(host, port)} can be reached from other machines; "
            "give --token-file, or listen on 127.0.0.1"
        )
    return family, address


def _listen(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        shown = _show_address(address[0], address[1])
        if error.errno == errno.EADDRINUSE:
            raise CreateError(f"{shown} is in use already; end what listens there or give another --listen") from None
        raise from_os_error(error, f"listen on {shown}", "give another --listen") from error
    return listener


def serve(app: Starlette, listener: socket.socket, url: str) -> None:
    """Serve ``app`` on ``listener`` until SIGTERM or SIGINT, after printing where. Call it in the main thread."""
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=2,
        )
    )

    def stop(number: int, frame: object) -> None:  # noqa: ARG001 - the signature of a signal handler
        server.should_exit = True

    # At its end uvicorn raises a caught signal again for the handlers that were set before it ran: these.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _say(f"listening on {url}")
    server.run(sockets=[listener])


def _show_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(line: str) -> None:
    # The receiver goes on when its output is closed.
    with suppress(OSError):
        click.echo(line)
