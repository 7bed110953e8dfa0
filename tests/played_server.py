"""A server on the loopback that answers reporters as a test says, and waits that a test chooses."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec


class ChosenRandom(random.Random):
    """Draws ``ratio`` of the upper bound and remembers the bounds."""

    def __init__(self, ratio: float) -> None:
        super().__init__(0)
        self.ratio = ratio
        self.bounds: list[float] = []

    def uniform(self, a: float, b: float) -> float:
        self.bounds.append(b)
        return a + (b - a) * self.ratio


def soon() -> ChosenRandom:
    """Waits of some milliseconds."""
    return ChosenRandom(0.001)


def not_before_close() -> ChosenRandom:
    """Waits of decades, which only ``close`` ends."""
    return ChosenRandom(1e9)


class Request(msgspec.Struct):
    path: str
    message: dict[str, Any]
    headers: dict[str, str]
    connection: tuple[str, int]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PlayedServer
    disable_nagle_algorithm = True  # head and body are two pieces: the second would wait for the client's delayed ACK

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.removeprefix(self.server.prefix)
        self.server.requests.append(Request(self.path, json.loads(body), dict(self.headers), self.client_address))
        turns = self.server.turns.get(path)
        turn = turns.pop(0) if turns else self.server.usual(path)
        turn(self)

    def begin(self, status: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the base class
        pass


Turn = Callable[[Handler], None]


class PlayedServer(ThreadingHTTPServer):
    """Takes its turns in order, by path, then answers as ``usual`` for a path; keeps what it was sent."""

    daemon_threads = True
    prefix = ""

    def __init__(self, usual: Callable[[str], Turn]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.usual = usual
        self.turns: dict[str, list[Turn]] = {}
        self.requests: list[Request] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{self.prefix}"

    def sent(self, path: str = "/api/v1/heartbeats") -> list[dict[str, Any]]:
        return [request.message for request in self.requests if request.path == self.prefix + path]

    @property
    def sequences(self) -> list[int]:
        return [request.message["sequence"] for request in self.requests if "sequence" in request.message]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that closes early is part of these tests."""


def reply(message: Any, status: int = 200, *headers: tuple[str, str]) -> Turn:
    body = message if isinstance(message, bytes) else msgspec.json.encode(message)

    def turn(handler: Handler) -> None:
        handler.begin(status, ("Content-Length", str(len(body))), *headers)
        handler.wfile.write(body)

    return turn


@contextmanager
def serve(usual: Callable[[str], Turn]) -> Iterator[PlayedServer]:
    with PlayedServer(usual) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
