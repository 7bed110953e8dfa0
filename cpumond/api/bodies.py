"""Bodies of requests, from their first byte to the answer: limits of size and time, and of the memory of all bodies.

When the limit of memory is reached, bodies that are still arriving are dropped first, beginning with the oldest,
because an honest client sends a whole body within a moment."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request

from cpumond.api.yt.values import MAX_VALUES
from cpumond.scheduler.model import GENERIC, TOO_MANY_REQUESTS

T = TypeVar("T")

MAX_BYTES: Final = 64 * 2**20
"""Maximum estimated memory, in bytes, of all bodies that arrive or are processed."""
MAX_USER_BYTES: Final = 16 * 2**20
"""Maximum estimated memory, in bytes, of all bodies of one user."""
READ_S: Final = 30.0
"""Maximum seconds from the first piece of a body to the last."""
LARGE_BYTES: Final = 256 * 1024
LARGE_AT_ONCE: Final = 4
"""Maximum number of bodies above LARGE_BYTES that are processed at a time. More of them wait, except those of nodes."""
DROPPED_BYTES: Final = 32 * 2**20
DROPPED_S: Final = 5.0
"""Maximum seconds for which the rest of a body is read after the body turned out to be too large."""
VALUE_BYTES: Final = 64
"""Bytes of memory that any value takes in addition to its text."""


class HttpError(Exception):
    """A request that is refused before it becomes a command. ``status``: HTTP's; ``code``: YTsaurus'."""

    def __init__(self, status: int, text: str, code: int = GENERIC, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.headers = headers or {}


class BodyError(HttpError):
    """A body that is refused."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message, TOO_MANY_REQUESTS if status == 429 else GENERIC, {"Connection": "close"})


class Bodies:
    """All bodies that arrive or are processed. Used by the event loop's thread."""

    def __init__(
        self, max_bytes: int = MAX_BYTES, max_user_bytes: int = MAX_USER_BYTES, read_s: float = READ_S
    ) -> None:
        self.max_bytes = max_bytes
        self.max_user_bytes = max_user_bytes
        self.read_s = read_s
        self.held_bytes = 0
        self.of_user: Counter[str] = Counter()
        self.large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._thread_lock = asyncio.Lock()
        self.arriving: dict[HeldBody, asyncio.Timeout] = {}
        """Bodies that arrive, the oldest first."""

    async def run_in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run long work in a thread, and other work only after it: many threads would slow down the event loop's."""
        async with self._thread_lock:
            return await asyncio.to_thread(work, *arguments)

    def hold(self, user: str, of_node: bool = False) -> HeldBody:
        """Register a body that will be read, until the end of ``with``. With ``of_node`` it counts for no user."""
        return HeldBody(self, user, of_node)


class HeldBody:
    """One body. Use: ``with bodies.hold(user) as body: await body.read(...)``, then ``work_on``, then the work."""

    def __init__(self, bodies: Bodies, user: str, of_node: bool) -> None:
        self._bodies = bodies
        self._user = user
        self._of_node = of_node
        self._bytes = 0
        self._is_large = False

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._count(-self._bytes)
        if self._is_large:
            self._bodies.large.release()

    async def read(self, request: Request, limit: int, unpack: bool = False) -> bytes:
        """Return the whole body of at most ``limit`` bytes, counted after unpacking (``Content-Encoding: gzip``).

        Raises BodyError, and ClientDisconnect if the client disconnects before the end of the body."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            await _drop_rest(request)
            raise _too_large(limit)
        chunk, is_more = await _receive(request)
        data = await self._read_on(request, limit, chunk) if is_more else chunk
        if len(data) > limit:
            raise _too_large(limit)
        return _unpack(data, limit) if unpack else data

    async def _read_on(self, request: Request, limit: int, chunk: bytes) -> bytes:
        data, is_more = bytearray(), True
        try:
            async with asyncio.timeout(self._bodies.read_s) as timeout:
                self._bodies.arriving[self] = timeout
                while True:
                    data += chunk
                    if len(data) > limit:
                        del data
                        if is_more:
                            await _drop_rest(request)
                        raise _too_large(limit)
                    self._take(len(chunk))
                    if not is_more:
                        return bytes(data)
                    chunk, is_more = await _receive(request)
        except TimeoutError:
            raise BodyError(
                408,
                f"the body of the request did not arrive within {self._bodies.read_s:g} s, or other requests needed "
                "its memory; send it again in one go",
            ) from None
        finally:
            self._bodies.arriving.pop(self, None)

    async def work_on(self, *texts: bytes) -> None:
        """Register that the body and other parts of the request will be parsed. Raises BodyError."""
        if self._of_node:
            self._take(sum(map(len, texts)) - self._bytes)
            return
        weight = sum(map(weigh, texts))
        self._take(weight - self._bytes)
        if weight > LARGE_BYTES:
            await self._bodies.large.acquire()
            self._is_large = True

    def _take(self, count: int) -> None:
        """Reserve ``count`` bytes of memory. Raises BodyError if too little is left and none can be freed."""
        self._count(count)
        bodies = self._bodies
        while not self._of_node and bodies.of_user[self._user] > bodies.max_user_bytes:
            self._end_oldest(self._user, 429, f"the requests of user {self._user[:100]!r} take {bodies.max_user_bytes}")
        while bodies.held_bytes > bodies.max_bytes:
            self._end_oldest(None, 503, f"the requests of all users take {bodies.max_bytes}")

    def _end_oldest(self, user: str | None, status: int, what: str) -> None:
        arriving = self._bodies.arriving
        oldest = next((each for each in arriving if each is not self and user in (None, each._user)), None)
        if oldest is None:
            raise BodyError(status, f"{what} bytes, which is the limit; wait for their responses and try again")
        arriving.pop(oldest).reschedule(0.0)
        oldest._count(-oldest._bytes)

    def _count(self, count: int) -> None:
        self._bytes += count
        self._bodies.held_bytes += count
        if not self._of_node:
            self._bodies.of_user[self._user] += count
            if not self._bodies.of_user[self._user]:
                del self._bodies.of_user[self._user]


def weigh(data: bytes) -> int:
    """Estimated memory of a parsed text of YSON or JSON, in bytes."""
    return len(data) + VALUE_BYTES * min(count_values(data), MAX_VALUES)


def count_values(data: bytes) -> int:
    """Estimated number of values in a text of YSON or JSON."""
    return sum(map(data.count, (b",", b";", b"[", b"{")))


async def _receive(request: Request) -> tuple[bytes, bool]:
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _drop_rest(request: Request) -> None:
    """Read and discard the rest of a body, because a client disconnected while it sends never reads the response."""
    left = DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROPPED_S):
            is_more = True
            while is_more and left > 0:
                chunk, is_more = await _receive(request)
                left -= len(chunk)


def _too_large(limit: int) -> BodyError:
    return BodyError(413, f"the body of the request is larger than the limit of {limit} bytes")


def _unpack(data: bytes, limit: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(data, limit + 1)
    except zlib.error:
        raise BodyError(400, "the body of the request is not gzip, though Content-Encoding says so") from None
    if len(unpacked) > limit:
        raise _too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise BodyError(400, "the body of the request is not one complete gzip stream")
    return unpacked
