"""The application in front of a leader's: that answers while the lease lasts, before and after it a standby does."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from cpumond.core.route import LOST_LEAD
from cpumond.core.term import LEADER_HEADER, TERM_HEADER
from cpumond.scheduler.program.leading import App, Leading, Receive, Scope, Send
from cpumond.scheduler.store.lead import LeadView

REFUSAL: Final = "cpumond.refusal"
"""In the scope of a request: why a standby answers that was a leader when the request came."""


class LeaderDoor:
    """An ASGI application: the reign's while it lasts, else ``standby``.

    The lease is looked at when a request comes in and again when the first byte of its answer goes out, by a clock that
    goes on while the process is stopped: a process that was paused, or hung, gives no answer of a term that is over.
    Every answer of a leader has its term in TERM_HEADER.
    """

    def __init__(self, leading: Leading, standby: App) -> None:
        self._leading = leading
        self._standby = standby

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reign = self._leading.find_reign()
        if reign is None or reign.app is None:
            await self._standby(scope, receive, send)
            return
        is_lost = False

        async def send_in_term(message: MutableMapping[str, Any]) -> None:
            nonlocal is_lost
            if is_lost:
                return
            if message["type"] == "http.response.start":
                if not self._leading.may_answer(reign):
                    is_lost = True
                    await self._standby({**scope, REFUSAL: LOST_LEAD}, receive, send)
                    return
                term = (TERM_HEADER.encode(), str(reign.term).encode())
                message = {**message, "headers": [*message.get("headers", ()), term]}
            await send(message)

        await reign.app(scope, receive, send_in_term)


def describe_standby(view: LeadView, address: str, refusal: str = "") -> str:
    """The sentence of a standby's 503. ``address``: its own; ``refusal``: what came before, of REFUSAL."""
    if refusal:
        return refusal
    if view.leader and view.leader != address:
        return f"standby: the scheduler at {view.leader} leads (term {view.term})"
    if view.error:
        # Why stands in the log: whoever asks may be anybody.
        return "standby: who leads is not known, the store does not answer; see this scheduler's log"
    # Where it leads from an address that it does not tell, too.
    return "standby: no leader is known here; ask again, or the other schedulers"


def standby_headers(view: LeadView, address: str) -> dict[str, str]:
    return {LEADER_HEADER: view.leader} if view.leader and view.leader != address else {}
