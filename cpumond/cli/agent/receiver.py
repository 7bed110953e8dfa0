"""``cpumond stub-scheduler``: a small receiver of heartbeats that checks them.

The receiver keeps the newest heartbeat of each node in memory. A heartbeat is a node's full state, so a job that is
missing from the newest one has ended."""

from __future__ import annotations

import errno
import hmac
import itertools
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import ConfigError, CreateError, UsageError, from_os_error
from cpumond.core.settings import is_loopback, parse_listen
from cpumond.core.wire import SCHEMAS, Heartbeat

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HEARTBEAT_PATHS = ("/v1/heartbeat", "/v1/heartbeats", "/")
JOB_KEYS = ("job_id", "operation_id", "cpu_limit", "current_cpu_limit", "smoothed_cpu_usage", "mode")
"""Keys of a job in ``GET /v1/limits``, in addition to those of its node's heartbeat."""
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_SUPERSEDED = 64
"""Maximum number of earlier incarnations that are remembered for each node."""

MAX_SENTENCE_CHARS = 300


class Received:
    def __init__(self) -> None:
        self._newest: dict[str, tuple[Heartbeat, float]] = {}
        self._superseded: dict[str, deque[str]] = {}

    def accept(self, heartbeat: Heartbeat, received_at: float) -> str:
        """Store ``heartbeat`` (``received_at`` seconds since 1970) if it is new; return "" or why it is not."""
        node_id = heartbeat.node_id
        superseded = self._superseded.setdefault(node_id, deque(maxlen=MAX_SUPERSEDED))
        if heartbeat.incarnation in superseded:
            return f"incarnation {heartbeat.incarnation!r} of node {node_id!r} was superseded by another one"
        known = self._newest[node_id][0] if node_id in self._newest else None
        if known is not None and known.incarnation != heartbeat.incarnation:
            superseded.append(known.incarnation)
        elif known is not None and heartbeat.sequence <= known.sequence:
            return f"sequence {heartbeat.sequence} of node {node_id!r} is not newer than {known.sequence}"
        self._newest[node_id] = (heartbeat, received_at)
        return ""

    def limits(self) -> dict[str, object]:
        """The answer to ``GET /v1/limits``: number of nodes; jobs, sorted by (node_id, job_id); sums in cores."""
        jobs = [
            {
                "node_id": heartbeat.node_id,
                **{key: getattr(job, key) for key in JOB_KEYS},
                "incarnation": heartbeat.incarnation,
                "sequence": heartbeat.sequence,
                "received_at": received_at,
            }
            for heartbeat, received_at in self._newest.values()
            for job in heartbeat.jobs
        ]
        totals = {
            "cpu_limit": _sum_cores(job["cpu_limit"] for job in jobs),
            "current_cpu_limit": _sum_cores(job["current_cpu_limit"] for job in jobs),
            "reclaimed": _sum_cores(max(0.0, job["cpu_limit"] - job["current_cpu_limit"]) for job in jobs),
        }
        jobs.sort(key=lambda job: (job["node_id"], job["job_id"]))
        return {"nodes": len(self._newest), "jobs": jobs, "totals": totals}


def _sum_cores(cores: Iterable[float]) -> float:
    return round(math.fsum(cores), 6)


def make_heartbeat_parser() -> Callable[[bytes], Heartbeat]:
    """A function that parses a body into a heartbeat, or raises ValueError with one sentence that names the place."""
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
            # Not strict, because 1.0 is an integer to JSON Schema. Strings in place of numbers were refused above.
            return msgspec.convert(message, Heartbeat, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(_shorten(str(error))) from None

    return parse


def _shorten(sentence: str) -> str:
    """``sentence`` without its middle if it quotes a whole message."""
    half = MAX_SENTENCE_CHARS // 2
    return sentence if len(sentence) <= MAX_SENTENCE_CHARS else f"{sentence[:half]} ... {sentence[-half:]}"


def make_stub_app(token: str | None, say: Callable[[str], None] | None = None) -> Starlette:
    """Make the receiver as an application with empty state.

    With a ``token`` heartbeats and limits need ``Authorization: Bearer <token>``. ``say`` gets one line for each
    accepted heartbeat."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response
    from starlette.routing import Route

    received, parse = Received(), make_heartbeat_parser()

    def answer(content: object, status: int = 200) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        return Response(msgspec.json.encode(content), status, headers, "application/json")

    def refuse(request: Request) -> Response | None:
        given = request.headers.get("authorization", "")
        if token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return None
        return answer({"error": "the bearer token is missing or wrong"}, 401)

    async def post_heartbeat(request: Request) -> Response:
        if refusal := refuse(request):
            return refusal
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    return answer({"error": f"the body is larger than {MAX_BODY_BYTES} bytes"}, 413)
            # Checking thousands of jobs takes most of a second; meanwhile the event loop serves other nodes.
            heartbeat = await run_in_threadpool(parse, bytes(body))
        except ClientDisconnect:
            return answer({"error": "the connection was closed before the end of the body"}, 400)
        except ValueError as error:
            return answer({"error": str(error)}, 422)
        if reason := received.accept(heartbeat, time.time()):
            return answer({"accepted": False, "reason": reason})
        if say is not None:
            say(describe_heartbeat(heartbeat))
        return answer({"accepted": True, "sequence": heartbeat.sequence})

    async def get_limits(request: Request) -> Response:
        return refuse(request) or answer(received.limits())

    async def get_healthz(_: Request) -> Response:
        return answer({"status": "ok"})

    routes = [Route(path, post_heartbeat, methods=["POST"]) for path in HEARTBEAT_PATHS]
    return Starlette(routes=[*routes, Route("/v1/limits", get_limits), Route("/healthz", get_healthz)])


def describe_heartbeat(heartbeat: Heartbeat) -> str:
    ordered = _sum_cores(job.cpu_limit for job in heartbeat.jobs)
    limit = _sum_cores(job.current_cpu_limit for job in heartbeat.jobs)
    # repr: a name that arrived over the network must not control the terminal.
    return (
        f"node {heartbeat.node_id!r} sequence {heartbeat.sequence}: {len(heartbeat.jobs)} jobs, "
        f"{limit:g} of {ordered:g} requested cores"
    )


@click.command("stub-scheduler", epilog="Example: cpumond stub-scheduler --listen 127.0.0.1:9758")
@click.option("--listen", default="127.0.0.1:9758", show_default=True, metavar="HOST:PORT",
              help="Address to listen on; port 0 picks a free one.")  # fmt: skip
@click.option("--token-file", metavar="FILE", help="Require the bearer token in FILE; mandatory beyond loopback.")
@click.option("--quiet", is_flag=True, help="Print no line for each heartbeat.")
def stub_scheduler_command(listen: str, token_file: str | None, quiet: bool) -> None:
    """Run a small receiver of heartbeats, to test reports.

    It checks each heartbeat against the schema, keeps the newest of each node and serves the limits at /v1/limits. It
    stores nothing on disk and schedules nothing. SIGTERM or Ctrl-C ends it."""
    from cpumond.agent.report.token import read_token

    with listen_on(listen, token_file is not None) as listener:
        token = read_token(token_file) if token_file is not None else None
        serve(make_stub_app(token, None if quiet else _print_line), listener)


def listen_on(listen: str, has_token: bool) -> socket.socket:
    """Return a socket that listens on ``listen``.

    Raises UsageError if that is not host:port, ConfigError for an unknown host and, without a token, for an address
    beyond loopback, CreateError and AccessError if listening fails."""
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
            f"--listen: {_format_address(host, port)} can be reached from other machines; "
            "give --token-file, or listen on 127.0.0.1"
        )
    try:
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        shown = _format_address(*address[:2])
        if error.errno == errno.EADDRINUSE:
            raise CreateError(
                f"{shown} is already in use; stop the program that listens there, or give another --listen"
            ) from None
        # The system's words alone: ``create_server`` adds its own.
        plain = OSError(error.errno, os.strerror(error.errno or 0))
        raise from_os_error(plain, f"listen on {shown}", "give another --listen") from error


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve ``app`` on ``listener`` until SIGTERM or SIGINT, and print the address first. Call in the main thread."""
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none",
            timeout_keep_alive=60, timeout_graceful_shutdown=2,
        )
    )  # fmt: skip

    def stop(*_: Any) -> None:
        server.should_exit = True

    # When uvicorn ends, it raises a caught signal again for the earlier handlers, which are set here.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _print_line(f"listening on http://{_format_address(*listener.getsockname()[:2])}")
    server.run(sockets=[listener])


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _print_line(line: str) -> None:
    # The receiver continues when its output is closed.
    with suppress(OSError):
        click.echo(line)
