"""The network between processes: requests and answers that are late, lost, repeated or out of order."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from simulation.events import Events, VirtualLoop


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


Handler = Callable[[str, Mapping[str, str], bytes], Awaitable[Reply]]
"""Serves one request: path, headers, body."""


class Network:
    """``serve`` puts a handler at an address; ``ask`` sends a request there from a process. ``lost``: which share of
    messages never arrives; ``repeated``: which of requests arrives twice; ``mean_s``: the mean time of a message, of
    which one in fifty takes ``slow_s`` at most. A pair of host names in ``cut`` cannot talk."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.lost = self.repeated = 0.0
        self.mean_s, self.slow_s = 0.001, 0.3
        self.cut: set[tuple[str, str]] = set()
        """One way each: from, to."""
        self._served: dict[str, tuple[VirtualLoop, Handler]] = {}
        self._hosts: dict[str, str] = {}

    def place(self, address: str, host: str) -> None:
        self._hosts[address] = host

    def serve(self, address: str, loop: VirtualLoop, handler: Handler) -> None:
        self._served[address] = loop, handler

    def can_pass(self, source: str, target: str) -> bool:
        return (source, target) not in self.cut

    def heal(self) -> None:
        self.cut.clear()
        self.lost = self.repeated = 0.0

    async def ask(
        self, loop: VirtualLoop, address: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Reply:
        """One request and its answer. Raises TimeoutError or ConnectionError."""
        future: asyncio.Future[Reply] = loop.create_future()
        timer = loop.call_later(timeout_s, _fail, future, TimeoutError)
        source, target = loop.host.name, self._hosts[address]
        events = self.events
        if self._arrives(source, target):
            self._send(loop, source, target, address, path, headers, body, future)
            if self.repeated and events.rng.random() < self.repeated:
                lost = loop.create_future()
                lost.add_done_callback(lambda done: done.exception())
                self._send(loop, source, target, address, path, headers, body, lost)
        try:
            return await future
        finally:
            timer.cancel()

    def _send(
        self, loop: VirtualLoop, source: str, target: str, address: str, path: str, headers: Mapping[str, str],
        body: bytes, future: asyncio.Future[Reply],
    ) -> None:  # fmt: skip
        def arrive() -> None:
            served = self._served.get(address)
            if served is None or served[0].is_dead:
                self._deliver(loop, target, source, lambda: _fail(future, ConnectionRefusedError))
                return
            server, handler = served
            server.call_soon(begin, server, handler)

        def begin(server: VirtualLoop, handler: Handler) -> None:
            server.create_task(work(server, handler))

        async def work(server: VirtualLoop, handler: Handler) -> None:
            reply = await handler(path, headers, body)
            self._deliver(loop, target, source, lambda: None if future.done() else future.set_result(reply))

        # The target's host takes it in, whatever state its process is in: the event is the world's, not the process's.
        self.events.world_loop.call_later(self._delay(), arrive)

    def _deliver(self, loop: VirtualLoop, source: str, target: str, then: Callable[[], None]) -> None:
        if self._arrives(source, target):
            loop.call_later(self._delay(), then)

    def _arrives(self, source: str, target: str) -> bool:
        return self.can_pass(source, target) and not (self.lost and self.events.rng.random() < self.lost)

    def _delay(self) -> float:
        rng = self.events.rng
        return rng.uniform(0.0, self.slow_s) if rng.random() < 0.02 else rng.uniform(0.1, 1.9) * self.mean_s


def _fail(future: asyncio.Future[Reply], error: type[Exception]) -> None:
    if not future.done():
        future.set_exception(error())
