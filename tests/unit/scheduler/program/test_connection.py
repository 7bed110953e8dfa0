"""What the connections of the scheduler keep of requests that wait, are answered or will not be."""

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from cpumond.api.turns import Turns
from cpumond.host.connections import Door
from cpumond.scheduler.program.connection import Connection

BODY_BYTES = 20_000
REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES + b"b" * BODY_BYTES
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Server:
    def __init__(self, door: Door, sock: socket.socket) -> None:
        self.door = door
        self.connections: list[weakref.ref[Connection]] = []
        self._sock = sock

    async def connect(self) -> Client:
        before = len(self.connections)
        client = await asyncio.open_connection(*self._sock.getsockname())
        await self.until(lambda: len(self.connections) > before)
        return client

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(50.0):
            while not condition():
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serve(app: Callable[[Any, Any, Any], Awaitable[None]], door: Door) -> AsyncIterator[Server]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        found = Server(door, sock)

        class Kept(Connection):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                found.connections.append(weakref.ref(self))

        Kept.door = door
        server = uvicorn.Server(uvicorn.Config(app, http=Kept, ws="none", lifespan="off", log_config=None))
        running = asyncio.create_task(server.serve([sock]))
        try:
            yield found
        finally:
            server.should_exit = True
            server.force_exit = True
            await running


async def test_whole_requests_count_until_the_application_begins_with_them() -> None:
    may_begin = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await may_begin.wait()
        scope["take_turn"]()
        await answer(scope, receive, send)

    async with serve(app, Door(100, 3 * BODY_BYTES + 1000, 60.0)) as server:
        clients = []
        for number in range(5):
            clients.append(await server.connect())
            clients[-1][1].write(REQUEST)
            await server.until(lambda n=number: server.door.held_bytes >= min(n + 1, 3) * BODY_BYTES)
            assert server.door.held_bytes <= server.door.max_bytes
        for reader, _ in clients[:2]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b"", "the oldest are ended"
        may_begin.set()
        for reader, _ in clients[2:]:
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert server.door.held_bytes == 0
        for _, writer in clients:
            writer.close()


async def test_one_that_is_ended_while_it_waits_for_its_turn_never_begins() -> None:
    begun = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(len(scope["headers"]))
        await answer(scope, receive, send)

    turns = Turns(app)
    waiting: list[dict[str, Any]] = []

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        turn = asyncio.get_running_loop().create_future()
        scope["turn"] = turn
        waiting.append(scope)
        if await turn:
            await turns(scope, receive, send)

    async with serve(wait, Door(100, 10**6, 60.0)) as server:
        reader, writer = await server.connect()
        writer.write(REQUEST * 3)
        await server.until(lambda: bool(waiting) and server.door.held_bytes > 2 * BODY_BYTES)
        connection = server.connections[0]()
        assert connection is not None
        cycles = [connection._running, *(cycle for cycle, _ in connection.pipeline)]
        server.door.max_bytes = 1000
        server.door.hold(connection, connection.held)
        assert waiting[0]["turn"].result() is False
        assert [(len(each.body), each.scope["headers"]) for each in cycles if each is not None] == [(0, [])] * 3
        assert server.door.held_bytes == 0
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert begun == []


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_trailers_of_a_chunked_request_are_no_headers() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(list(scope["headers"]))
        await answer(scope, receive, send)

    async with serve(Turns(app), Door(100, 10**6, 60.0)) as server:
        reader, writer = await server.connect()
        for _ in range(2):
            writer.write(CHUNKED + b"2;x=1\r\nab\r\n0\r\nAuthorization: Bearer other\r\nX-Group: admins\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()
    assert seen == [[(b"host", b"localhost"), (b"transfer-encoding", b"chunked")]] * 2


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("piece", [b"a: b\r\n", b"a", b"a: b"], ids=["many", "a long name", "a long value"])
@pytest.mark.parametrize("end_of_body", [b"0\r\n", b"1;"], ids=["trailer", "extension"])
async def test_what_follows_the_head_and_is_no_body_is_bounded(is_answered, piece, end_of_body):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not is_answered and (await receive()).get("more_body"):
            pass
        await answer(scope, receive, send)

    async with serve(Turns(app), Door(100, 10**9, 60.0)) as server:
        reader, writer = await server.connect()
        writer.write(CHUNKED + end_of_body)
        if is_answered:
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and sent < 64 * 2**20:
                writer.write(piece * 10_000)
                sent += len(piece) * 10_000
                await writer.drain()
                await asyncio.sleep(0)
        assert sent < 64 * 2**20
        writer.close()


async def test_an_idle_connection_keeps_nothing_of_its_last_request() -> None:
    async with serve(Turns(answer), Door(100, 10**6, 60.0)) as server:
        reader, writer = await server.connect()
        for _ in range(2):
            writer.write(REQUEST)
            await reader.readuntil(b"ok")
        connection = server.connections[0]()
        assert connection is not None
        await server.until(lambda: connection.cycle.response_complete)
        assert (len(connection.cycle.body), connection.headers, connection.scope) == (0, [], {})
        assert server.door.held_bytes == 0
        writer.close()


async def test_what_is_over_goes_without_a_collection() -> None:
    """There may be thousands of connections each second, and a minute from one collection to the next."""
    gc.collect()
    gc.disable()
    try:
        async with serve(Turns(answer), Door(100, 10**6, 60.0)) as server:
            reader, writer = await server.connect()
            connection = server.connections[0]()
            assert connection is not None
            transport = weakref.ref(connection.transport)
            writer.write(REQUEST)
            await reader.readuntil(b"ok")
            del connection
            writer.close()
            await server.until(lambda: server.connections[0]() is None and transport() is None)
    finally:
        gc.enable()
