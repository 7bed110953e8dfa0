"""Records requests that are refused for lack of rights in the audit log; the scheduler itself records commands."""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.requests import Request

from cpumond.api.identity import PROXY_TOKEN
from cpumond.api.session import SESSION_KEY
from cpumond.core.errors import CpumondError
from cpumond.scheduler.event_log import is_denied
from cpumond.scheduler.event_log.commands import Asked, make_request_event
from cpumond.scheduler.events import Subjects
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler


async def record_refusal(scheduler: Scheduler, user: User, what: str, error: Exception, **facts: Any) -> None:
    """Record in the audit log that a user lacked the right to ``what``, unless the refusal is recorded already.

    ``facts``: fields of Event that name the object of the request."""
    if not is_denied(error) or getattr(error, "is_recorded", False):
        return
    if isinstance(error, CpumondError):
        error.is_recorded = True
    asked, text = Asked(user, term=scheduler.term), f"{'was ' if user.name else ''}refused {what}: {error}"
    event = make_request_event(what, asked, text, scheduler.clock.now(), "refused", refused=str(error), **facts)
    trees = scheduler.state.trees
    places = [(event.tree, event.pool)] if event.tree in trees and event.pool in trees[event.tree].pools else []
    await scheduler.event_log.record_refusal(Subjects(event).add_pools(trees, places).index())


async def record_refused_request(scheduler: Scheduler, request: Request, error: Exception) -> None:
    """Record a refused request in the audit log, with its user as far as the request's state shows the user.

    A client that only reads and sent no token is asked for one; that is not recorded."""
    user = getattr(request.state, "user", None)
    if user is None:
        shows_token = any(name in request.headers for name in ("authorization", PROXY_TOKEN, SESSION_KEY))
        if request.method in ("GET", "HEAD") and not shows_token:
            return
        # A token that is no longer valid still names its user.
        name = str(error.attributes.get("user", "")) if isinstance(error, CommandError) else ""
        user = User(name, origin=request.client.host if request.client is not None else "")
    names = {key: str(request.path_params.get(key, ""))[:1000] for key in ("tree", "pool", "node", "operation", "job")}
    if names["operation"]:
        with contextlib.suppress(CommandError):
            names["operation"] = scheduler.state.find_record(names["operation"]).id
    await record_refusal(scheduler, user, f"{request.method} {request.url.path[:1000]}", error, **names)
