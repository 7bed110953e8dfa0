"""One connection of the scheduler; it limits the work that a client may leave unfinished."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cpumond.host.connections import PIECE_BYTES, Bounded, Door
from cpumond.scheduler.program.peer import find_peer_uid

MAX_CONNECTIONS: Final = 10_000
MAX_HELD_BYTES: Final = 64 * 2**20
"""Maximum bytes of unfinished requests and unread answers, summed over all connections."""

KEEP_ALIVE_S: Final = 75
EXCHANGE_S: Final = 150.0
"""Maximum time of an answer, counted from the connection's beginning or previous answer; longer than KEEP_ALIVE_S."""

MAX_HEAD_BYTES: Final = 1024 * 1024
"""Maximum bytes of the request line and the headers, in which `yt` sends its parameters."""
MAX_TARGET_BYTES: Final = 64 * 1024
"""Maximum bytes of the path and the query; also of the whole head of a request that is not by `yt`."""
MAX_TRAILER_BYTES: Final = 16 * 1024
"""Maximum bytes after a head, or after a part of a body, that are neither: chunk extensions, and (dropped) trailers."""
TRAILERS_TOO_LARGE: Final = f"more than {MAX_TRAILER_BYTES} bytes follow the head of the request that are not its body"
MAX_HEADERS: Final = 1000
TOO_MANY_HEADERS: Final = f"the request has more than {MAX_HEADERS} headers"
MAX_PIPELINED: Final = 16
"""Maximum number of requests of one connection that wait while an earlier one is answered."""
REQUEST_BYTES: Final = 4096
"""Bytes that a waiting request takes in addition to its content."""

_NO_SCOPE: Final = cast(Any, {})


def make_door() -> Door:
    return Door(MAX_CONNECTIONS, MAX_HELD_BYTES, EXCHANGE_S)


class Connection(Bounded, HttpToolsProtocol):
    """A connection whose parser processes all data of one read at once: many small requests, or a part of a large one.
    Data counts as unfinished until the application begins with the request, by calling ``take_turn`` of its scope.
    After that the application limits the data. Therefore the requests of thousands of connections may wait."""

    _in_head = False
    _head_bytes = 0
    _trailer_bytes = 0
    _is_silent = False
    """Whether the parser called no method for the data of the last read."""
    _running: RequestResponseCycle | None = None
    """The first request without a complete answer; ``cycle`` is the latest request."""
    _has_turn = False
    """Whether the application has begun with the request of ``_running``."""
    _refusal = ""
    made: Callable[[], object] = staticmethod(lambda: None)
    """Called when the connection is established; with TLS, that is after the handshake."""
    handshakes: Door | None = None
    """With TLS, those connections of the server that are not established yet."""
    tls_buffer = bytearray()
    """With TLS, the buffer for one read; all connections of the server share it."""
    _is_at_socket = False
    _peer_uid: int | None = None
    _has_peer_uid = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made()
        connection = transport.get_extra_info("socket")
        self._is_at_socket = connection is not None and connection.family == socket.AF_UNIX

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        waited = len(self.pipeline)
        self._is_silent = True
        super().data_received(data)
        if not self._in_head and self._is_silent:
            self._trailer_bytes += len(data)
            if self._trailer_bytes > MAX_TRAILER_BYTES + PIECE_BYTES:
                self.send_400_response(TRAILERS_TOO_LARGE)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")
            elif len(self.headers) > MAX_HEADERS:
                self.send_400_response(TOO_MANY_HEADERS)
        self.unfinished += len(data) + REQUEST_BYTES * (len(self.pipeline) - waited)
        self._settle()

    def _settle(self) -> None:
        """Report the held bytes to the limiter. Nothing is unfinished if no request waits or is being read."""
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        is_begun = self._in_head or (is_open and cycle.more_body)
        waits = bool(self.pipeline) or (is_open and not self._has_turn)
        if not waits and (not is_begun or self._refusal):
            self.unfinished = 0
        if self.unfinished or self.held:
            self.account()

    @property
    def has_waiting(self) -> bool:
        return bool(self.pipeline) or super().has_waiting

    @property
    def is_at_work(self) -> bool:
        """Whether the client sent exactly one whole request, which is being answered."""
        return self._has_turn and not self.pipeline and not self._in_head and super().is_at_work

    def take_turn(self) -> None:
        self._has_turn = True
        self._settle()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(f"more than {MAX_PIPELINED} requests were sent before the answer to the first one")
        self._in_head, self._head_bytes, self._trailer_bytes = True, 0, 0
        super().on_message_begin()
        self.scope["find_peer_uid"] = self._find_peer_uid
        self.scope["is_at_socket"] = self._is_at_socket
        self.scope["take_turn"] = self.take_turn

    def _find_peer_uid(self) -> int | None:
        """Return the uid of the peer, looked up once, when first needed; None if it is unknown."""
        if not self._has_peer_uid:
            connection = self.transport.get_extra_info("socket")
            self._peer_uid = None if connection is None else find_peer_uid(connection)
            self._has_peer_uid = True
        return self._peer_uid

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
            return
        # This is a trailer, which is dropped: a proxy that checks who sets the user's header does not check trailers.
        self._is_silent = False
        self._trailer_bytes += len(name) + len(value)
        if self._trailer_bytes > MAX_TRAILER_BYTES:
            self._refuse(TRAILERS_TOO_LARGE)

    def on_body(self, body: bytes) -> None:
        self._is_silent, self._trailer_bytes = False, 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            self._refuse(TOO_MANY_HEADERS)
        if self._head_bytes > MAX_TARGET_BYTES and not self.url.startswith(b"/api/v4/"):
            self._refuse(f"the head of the request is larger than {MAX_TARGET_BYTES} bytes")
        if len(self.url) > MAX_TARGET_BYTES:
            self._refuse(f"the path and the query of the request are longer than {MAX_TARGET_BYTES} bytes")
        self._in_head = False
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def _refuse(self, reason: str) -> None:
        """Stop the parser, which then calls ``send_400_response``. Raises ValueError."""
        self._refusal = reason
        raise ValueError(reason)

    def send_400_response(self, msg: str) -> None:
        """Refuse all that the client sends from here on, once earlier requests are answered."""
        self._refusal = self._refusal or msg
        if not self.has_waiting and not self.transport.is_closing():
            super().send_400_response(self._refusal)

    def on_response_complete(self) -> None:
        # Without this, the answered request would stay in memory until the next one arrives.
        answered = self._running
        if answered is not None:
            answered.body.clear()
            answered.scope = _NO_SCOPE
            if answered is self.cycle and not self._in_head:
                self._forget_head()
        self._has_turn, self._running = False, self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._settle()
        if self._refusal:
            self.send_400_response(self._refusal)

    def end(self) -> None:
        """Abort the connection and free its memory now: much more may be read before ``connection_lost`` is called."""
        super().end()
        self._let_go()

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()
        super().connection_lost(exc)

    def _let_go(self) -> None:
        """Free requests that the application has not begun: it could be long until their turn."""
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        if self._running is not None:
            # The library notifies only the latest request, so this one is notified here.
            self._running.disconnected = True
            self._running.message_event.set()
            waiting += [] if self._has_turn else [self._running]
        for cycle in waiting:
            scope: dict[str, Any] = cast(dict[str, Any], cycle.scope)
            cycle.body.clear()
            scope.update(headers=[], path="", raw_path=b"", query_string=b"")
            turn = scope.get("turn")
            if turn is not None and not turn.done():
                turn.set_result(False)
        if self._in_head:
            self._forget_head()

    def _forget_head(self) -> None:
        self.url, self.headers, self.scope = b"", [], _NO_SCOPE
