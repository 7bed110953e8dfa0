"""Dispatch of requests: the leader's application answers during the lease, the standby's before and after it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from cpumond.core.route import LOST_LEAD
from cpumond.core.term import LEADER_HEADER, TERM_HEADER
from cpumond.scheduler.program.leading import App, Leading, Receive, Scope, Send
from cpumond.scheduler.store.lead import LeadView

REFUSAL: Final = "cpumond.refusal"
"""Key in a request's scope: the reason why a standby answers if this scheduler still led when the request arrived."""


class LeaderDoor:
    """An ASGI application: the leader's application while this scheduler leads, ``standby`` otherwise.

    The lease is checked when a request arrives and again before the first byte of its answer, by a clock that also runs
    while the process is stopped. Therefore a process that was paused, or hung, sends no answer of a term that is over.
    Every answer of a leader has its term in TERM_HEADER."""

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
    """Return the sentence of a standby's 503. ``address``: its own. ``refusal``: an earlier reason, see REFUSAL."""
    if refusal:
        return refusal
    if view.leader and view.leader != address:
        return f"standby: the scheduler at {view.leader} leads (term {view.term})"
    if view.error:
        # Only the log contains the reason, since anyone may be the caller.
        return "standby: the leader is not known because the store does not respond; see this scheduler's log"
    # This is also the answer if another scheduler leads but gave no address.
    return "standby: no leader is known here; try again, or ask the other schedulers"


def standby_headers(view: LeadView, address: str) -> dict[str, str]:
    return {LEADER_HEADER: view.leader} if view.leader and view.leader != address else {}
