"""The scheduler's HTTP server: on TCP addresses, with TLS if there is a certificate, and on a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio import sslproto
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from cpumond.host.connections import Door
from cpumond.scheduler.program.connection import KEEP_ALIVE_S, Connection, make_door

BACKLOG: Final = 1024
ACCEPTED_AT_ONCE: Final = 64
HANDSHAKE_S: Final = 10.0
MAX_HANDSHAKES: Final = 4096
"""Maximum number of TLS connections that are not established yet. Each takes 19 KiB, or 50 KiB once its client has
begun the handshake; an established connection takes 27 KiB."""
MAX_HANDSHAKE_BYTES: Final = 16_384
"""Maximum bytes of a client's TLS handshake; 1 to 4 KiB are usual. OpenSSL would keep up to 128 KiB."""
TLS_BUFFER_BYTES: Final = 32_768
"""Bytes of one read of a TLS connection; all connections share one buffer for it. Python would keep a buffer of 256 KiB
for each connection, all the time."""


def make_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=type("DooredConnection", (Connection,), {"door": make_door()}),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=3,
    )


class BoundedTls(sslproto.SSLProtocol):
    """TLS of one connection. It counts data that the client has not read yet, encrypted data included, and reads little
    ahead of the application: otherwise the limits of ``host.connections`` would not hold."""

    max_size = 0  # of the library's own read buffer
    held = 0
    source = ""
    is_at_work = False
    _handshakes: Door | None = None
    _has_begun = False
    _handshake_bytes = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        own: Any = self
        own.max_size = TLS_BUFFER_BYTES

    def connection_made(self, transport: Any) -> None:
        transport.set_write_buffer_limits(high=0)
        protocol: Any = self._app_protocol
        if isinstance(protocol, Connection):
            protocol.made = self._leave_handshakes
            self._handshakes, self._ssl_buffer = protocol.handshakes, protocol.tls_buffer
            self._ssl_buffer_view = memoryview(self._ssl_buffer)
        super().connection_made(transport)
        own: Any = super()
        own._set_read_buffer_limits(high=TLS_BUFFER_BYTES)
        if self._handshakes is not None:
            self._handshakes.enter(self)

    def _do_handshake(self) -> None:
        # OpenSSL needs memory once its handshake begins, so it does not begin before the client does.
        if self._handshakes is None or self._has_begun:
            own: Any = super()
            own._do_handshake()

    def buffer_updated(self, nbytes: int) -> None:
        self._has_begun = True
        super().buffer_updated(nbytes)
        if self._handshakes is not None:
            self._handshake_bytes += nbytes
            if self._handshake_bytes > MAX_HANDSHAKE_BYTES:
                self.end()

    def _leave_handshakes(self) -> None:
        if self._handshakes is not None:
            self._handshakes.leave(self)
            self._handshakes = None

    def end(self) -> None:
        """Close the connection at once: its client did not shake hands while others waited, or has sent too much."""
        transport: Any = self._transport
        if transport is not None:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._handshakes is not None:
            self._leave_handshakes()
            # If a connection was never established, the library does not notify its protocol. The protocol would stay
            # in memory, since it and its parser refer to each other.
            vars(self._app_protocol).clear()
        beneath: Any = self._transport
        super().connection_lost(exc)
        if beneath is not None:
            beneath._read_ready_cb = None  # refers to the transport, as in ``Bounded.connection_lost``

    def _set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        # Each byte counts, so the limit is 1: with a limit of 0 an empty buffer would count as full.
        own: Any = super()
        own._set_write_buffer_limits(1, 0)

    def _get_write_buffer_size(self) -> int:
        own: Any = super()
        beneath: Any = self._transport
        return int(own._get_write_buffer_size()) + (0 if beneath is None else int(beneath.get_write_buffer_size()))


class Server(uvicorn.Server):
    """A server that leaves signals to us and accepts ACCEPTED_AT_ONCE new connections at a time. ``context``: for TLS
    on the TCP sockets."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._context = context
        self._handshakes = Door(MAX_HANDSHAKES, 0, HANDSHAKE_S, "handshakes")
        self._tls_buffer = bytearray(TLS_BUFFER_BYTES)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        loop = asyncio.get_running_loop()
        for sock in sockets or ():
            if sock.family == socket.AF_UNIX:
                server = await loop.create_unix_server(self._make_connection, sock=sock, backlog=ACCEPTED_AT_ONCE)
            elif self._context is None:
                server = await loop.create_server(self._make_connection, sock=sock, backlog=ACCEPTED_AT_ONCE)
            else:
                sslproto.SSLProtocol = BoundedTls  # type: ignore[misc]  # used by the event loop
                server = await loop.create_server(
                    self._make_tls_connection, sock=sock, backlog=ACCEPTED_AT_ONCE, ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_S,
                )  # fmt: skip
            self.servers.append(server)
            # The event loop has set the length of the queue to ACCEPTED_AT_ONCE, the number it accepts in one turn.
            sock.listen(BACKLOG)

    def _make_connection(self) -> Connection:
        kind: Any = self.config.http_protocol_class
        made: Connection = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    def _make_tls_connection(self) -> Connection:
        connection = self._make_connection()
        connection.handshakes, connection.tls_buffer = self._handshakes, self._tls_buffer
        return connection

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
