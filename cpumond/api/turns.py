"""Requests begin a few at a time: if thousands arrive together, the nodes' heartbeats must not wait for them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from cpumond.api.endpoints import ENDPOINTS

BEGUN_AT_ONCE: Final = 8
"""Number of requests that begin in one turn of the event loop; those of nodes, health and metrics do not count."""

AT_ONCE: Final = frozenset(each.path for each in ENDPOINTS if each.is_of_nodes) | {"/healthz", "/readyz", "/metrics"}


class Turns:
    """Makes every request wait for its turn, except those of ``AT_ONCE``.

    ``take_turn`` in the scope of a request is called when the request begins. ``turn`` in the scope of a waiting
    request is a future: it becomes True when the request may begin, False when the request is over already."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"] not in AT_ONCE and not await self._take(scope):
                return
            if "take_turn" in scope:
                scope["take_turn"]()
        await self._app(scope, receive, send)

    async def _take(self, scope: Scope) -> bool:
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next_turn)
        self._begun += 1
        if self._begun <= BEGUN_AT_ONCE and not self._waiting:
            return True
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(turn)
        scope["turn"] = turn
        return await turn

    def _next_turn(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < BEGUN_AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_turn)


class BeginAtOnce:
    """Begins every request at once, for a server whose answers cost nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "take_turn" in scope:
            scope["take_turn"]()
        await self._app(scope, receive, send)
