"""The scheduler's HTTP server: on TCP addresses, with TLS where there is a certificate, and on a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from asyncio import sslproto
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from cpumond.scheduler.connection import KEEP_ALIVE_S, MAX_CONNECTIONS, Connection, make_door

BACKLOG: Final = 1024
ACCEPTED_AT_ONCE: Final = 64
HANDSHAKE_S: Final = 10.0
TLS_BUFFER_BYTES: Final = 32_768
"""What a TLS connection reads at a time; it takes this much memory as long as it lives. Python's own are 256 KiB."""


def make_config(app: Any) -> uvicorn.Config:
    """How the server serves ``app``."""
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
    """TLS of one connection. It counts what the client has not read yet beneath the encryption, too, and reads not much
    ahead of what the application takes: else the bounds of ``host.connections`` would not hold."""

    max_size = TLS_BUFFER_BYTES

    def connection_made(self, transport: Any) -> None:
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        own: Any = super()
        own._set_read_buffer_limits(high=TLS_BUFFER_BYTES)

    def connection_lost(self, exc: BaseException | None) -> None:
        beneath: Any = self._transport
        super().connection_lost(exc)
        if beneath is not None:
            beneath._read_ready_cb = None  # it refers to its transport, as in ``Bounded.connection_lost``

    def _set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        # Each byte counts; with a limit of 0 an empty buffer would be full.
        own: Any = super()
        own._set_write_buffer_limits(1, 0)

    def _get_write_buffer_size(self) -> int:
        own: Any = super()
        beneath: Any = self._transport
        return int(own._get_write_buffer_size()) + (0 if beneath is None else int(beneath.get_write_buffer_size()))


class TooManyHandshakesError(Exception):
    """A connection is not taken in: the event loop drops it."""


class Server(uvicorn.Server):
    """A server that leaves signals to us, and takes ACCEPTED_AT_ONCE new connections at a time.

    ``context``: TLS at the TCP sockets.
    """

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._context = context
        self._begun: dict[int, float] = {}
        """The TLS connections that are not made yet, and when they began: the door counts those that are."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        loop = asyncio.get_running_loop()
        for sock in sockets or ():
            if sock.family == socket.AF_UNIX:
                server = await loop.create_unix_server(self._make_connection, sock=sock, backlog=ACCEPTED_AT_ONCE)
            elif self._context is None:
                server = await loop.create_server(self._make_connection, sock=sock, backlog=ACCEPTED_AT_ONCE)
            else:
                sslproto.SSLProtocol = BoundedTls  # type: ignore[misc]  # what the event loop makes
                server = await loop.create_server(
                    self._make_tls_connection, sock=sock, backlog=ACCEPTED_AT_ONCE, ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_S,
                )  # fmt: skip
            self.servers.append(server)
            # The event loop has set this to ACCEPTED_AT_ONCE, what it accepts in one turn.
            sock.listen(BACKLOG)

    def _make_connection(self) -> Connection:
        kind: Any = self.config.http_protocol_class
        made: Connection = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    def _make_tls_connection(self) -> Connection:
        now_s, begun = time.monotonic(), self._begun
        while begun and now_s - next(iter(begun.values())) > HANDSHAKE_S:
            del begun[next(iter(begun))]
        if len(begun) >= MAX_CONNECTIONS:
            raise TooManyHandshakesError
        connection = self._make_connection()
        key = id(connection)
        begun.pop(key, None)
        begun[key] = now_s
        connection.made = lambda: begun.pop(key, None)
        return connection

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
