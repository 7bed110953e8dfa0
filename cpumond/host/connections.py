"""Bounds for one HTTP server: number of connections, and their memory for unfinished requests and unread responses.

Any client, even without a token, can send half a request, send many requests at once, or read no response. Above a
bound, the connection whose last response is oldest is closed: honest clients get responses all the time, so their
connections stay. Above the bound of bytes, connections with at least the mean are closed first, because small waiting
requests do not fill the memory. A connection whose complete request is being processed is never closed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final, Protocol

import h11
import structlog
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

log = structlog.get_logger()

PIECE_BYTES: Final = 65_536
LOG_PERIOD_S: Final = 60.0


class Member(Protocol):
    """A connection, as its ``Door`` sees it. Only the door sets ``held``; ``source`` is the client's address."""

    held: int
    source: str

    @property
    def is_at_work(self) -> bool: ...

    def end(self) -> None: ...


class Door:
    """The connections of one server, in the order of their last responses.

    ``max_connections``: bounds their number. ``max_bytes``: bounds the sum of their unfinished requests and unread
    responses. ``exchange_s``: seconds from the connection, or the previous response, to the end of the next response.
    ``counted``: the log's word for them. ``by_source``: above the bound, close one of the address with the most."""

    def __init__(
        self, max_connections: int, max_bytes: int, exchange_s: float, counted: str = "connections",
        by_source: bool = False,
    ) -> None:  # fmt: skip
        self.counted = counted
        self._sources: Counter[str] | None = Counter() if by_source else None
        self.max_connections = max_connections
        self.max_bytes = max_bytes
        self.exchange_s = exchange_s
        self.held_bytes = 0
        self._connections: OrderedDict[Member, None] = OrderedDict()
        self._ended = 0
        self._logged_at_s = -LOG_PERIOD_S

    def enter(self, connection: Member) -> None:
        """Add a new connection; if there are too many, close an old one."""
        self._connections[connection] = None
        if self._sources is not None:
            self._sources[connection.source] += 1
        if len(self._connections) > self.max_connections:
            most = max(self._sources, key=self._sources.__getitem__) if self._sources else None
            if most is None or not self._end_oldest(self.counted, lambda each: each.source == most):
                self._end_oldest(self.counted, lambda _: True)

    def leave(self, connection: Member) -> None:
        if connection in self._connections:
            del self._connections[connection]
            if self._sources is not None:
                self._sources[connection.source] -= 1
                if not self._sources[connection.source]:
                    del self._sources[connection.source]
            self.held_bytes -= connection.held
            connection.held = 0

    def renew(self, connection: Member) -> bool:
        """Record that a connection got a response; return False if the connection is closed already."""
        if connection not in self._connections:
            return False
        self._connections.move_to_end(connection)
        return True

    def hold(self, connection: Member, held: int) -> None:
        """Record how many bytes a connection holds now; a closed connection is ignored."""
        if connection not in self._connections:
            return  # a request received before the close may still be answered
        self.held_bytes += held - connection.held
        connection.held = held
        while self.held_bytes > self.max_bytes:
            if not (self._end_holder(self.held_bytes / len(self._connections)) or self._end_holder(1)):
                return

    def _end_holder(self, least: float) -> bool:
        return self._end_oldest("bytes", lambda each: each.held >= least)

    def _end_oldest(self, bound: str, may_end: Callable[[Member], bool]) -> bool:
        oldest = next((each for each in self._connections if may_end(each) and not each.is_at_work), None)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.end()
        self._ended += 1
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= LOG_PERIOD_S:
            self._logged_at_s = now_s
            most = self.max_bytes if bound == "bytes" else self.max_connections
            log.warning(
                "connections_ended", ended=self._ended, bound=bound, limit=most,
                advice="clients keep connections open, send unfinished requests, or do not read responses",
            )  # fmt: skip
        return True


class Deadline:
    """Closes a connection if a request and its response take too long together, so that silent peers do not accumulate.

    Call ``restart`` when the connection starts and after each response, and ``cancel`` when it ends. ``exchange_s`` is
    longer than the idle time allowed between two requests."""

    def __init__(self, exchange_s: float) -> None:
        self._exchange_s = exchange_s
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at_s = 0.0

    def restart(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._ends_at_s = loop.time() + self._exchange_s
        if self._timer is None:
            self._timer = loop.call_at(self._ends_at_s, self._look, loop, transport)

    def _look(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        """Close the connection if its time is over, else set the timer again, as ``restart`` only moves the end."""
        self._timer = None
        if self._ends_at_s > loop.time():
            self._timer = loop.call_at(self._ends_at_s, self._look, loop, transport)
        else:
            transport.abort()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Bounded(asyncio.Protocol):
    """Mixin for the protocol classes of both libraries; it must be the first base. ``door``: the server's.

    While a request is processed, reading stops after the piece in which the next request begins. Data that is sent too
    early waits in the kernel, and so its sender waits, too."""

    door: Door
    held = 0
    source = ""
    unfinished = 0
    """Number of bytes of requests that are incomplete or wait for their turn."""

    # Attributes of the protocol classes.
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    flow: FlowControl
    cycle: Any
    scope: Any
    headers: list[tuple[bytes, bytes]]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport, self)
        # Read small pieces, as each is parsed in one go. An event loop that ignores this reads larger ones.
        transport.max_size = PIECE_BYTES  # type: ignore[attr-defined]
        # ``pause_writing`` is called as soon as a single written byte waits for the client.
        transport.set_write_buffer_limits(high=0)
        self._unsent = 0
        peer = transport.get_extra_info("peername")
        self.source = str(peer[0]) if isinstance(peer, tuple) else ""
        self._deadline = Deadline(self.door.exchange_s)
        self._deadline.restart(self.loop, transport)
        self.door.enter(self)

    @property
    def has_waiting(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    @property
    def is_at_work(self) -> bool:
        """Whether a complete request is being processed, and no written byte waits for the client."""
        return self.has_waiting and not self._unsent

    def end(self) -> None:
        """Close the connection at once, because a bound is reached."""
        self.transport.abort()

    def on_response_complete(self) -> None:
        if self.door.renew(self):
            self._deadline.restart(self.loop, self.transport)
        super().on_response_complete()  # type: ignore[misc]

    def pause_writing(self) -> None:
        """Note that the client reads responses more slowly than they are written."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self.account()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent = 0
        self.account()

    def account(self) -> None:
        self.door.hold(self, self.unfinished + self._unsent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self.door.leave(self)
        super().connection_lost(exc)
        # Connection, transport and parser refer to each other, and the transport to itself. Free them now, because the
        # next garbage collection may be a hundred thousand connections later.
        self.cycle = self.scope = None
        self.headers = []
        self._flow.forget()
        self.transport._read_ready_cb = None  # type: ignore[attr-defined]


class _Flow(FlowControl):
    """Flow control that resumes reading only while a request is incomplete, because the next request must wait."""

    def __init__(self, transport: asyncio.Transport, connection: Bounded) -> None:
        super().__init__(transport)
        self._connection: Bounded | None = connection

    def resume_reading(self) -> None:
        if self._connection is not None and not self._connection.has_waiting:
            super().resume_reading()

    def forget(self) -> None:
        self._connection = None


class BoundedH11(Bounded, H11Protocol):
    """Bounded protocol of h11, which takes requests one after another from what was read, at most PIECE_BYTES."""

    def send_400_response(self, msg: str) -> None:
        """Handle bytes that are not HTTP: close the connection, even while a response is being sent."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
