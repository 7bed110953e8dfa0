"""Requests about events: the timeline, the audit log, annotations, undo."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeVar

import msgspec

from cpumond.api import event_views
from cpumond.api.json import requests
from cpumond.api.json.call import Call
from cpumond.api.node_views import find_titles
from cpumond.scheduler.access import Rights, explicit_pool
from cpumond.scheduler.events import AUDIT, TIMELINE, Event
from cpumond.scheduler.model import ACCESS_DENIED, ROOT_POOL, SUBPOOL_DELIMITER, CommandError
from cpumond.scheduler.settings.undo import UndoChange
from cpumond.scheduler.state import State

V = TypeVar("V")
MAX_PAGES: Final = 20
"""Maximum number of pages of the log that are read for one answer. One page is not enough if most of its events are too
new, are no changes, or may not be read by the user."""


async def list_events(call: Call) -> event_views.EventList:
    found, following = await _find(TIMELINE, call, partial(event_views.view_event, event_views.EventView))
    return event_views.EventList(found, following, _find_titles(call, found))


async def list_audit(call: Call) -> event_views.AuditList:
    """List the audit log. Raises CommandError for other users' entries if the user does not administer the pool."""
    query: requests.EventsQuery = call.query
    if not call.user.admin and not _administers(call, query):
        if query.user and query.user != call.user.name:
            raise CommandError(
                f"{call.user.name} may read the audit log of {call.user.name}, or of a pool with permission "
                "administer; ask an administrator, or name such a pool",
                ACCESS_DENIED,
            )
        call.query = msgspec.structs.replace(query, user=call.user.name)
    found, following = await _find(AUDIT, call, partial(event_views.view_event, event_views.AuditView))
    return event_views.AuditList(found, following, _find_titles(call, found))


async def list_annotations(call: Call) -> list[event_views.Annotation]:
    found, _ = await _find(TIMELINE, call, lambda _, event: event_views.view_annotation(event))
    return found


async def _find(what: str, call: Call, view: Callable[[int, Event], V]) -> tuple[list[V], int | None]:
    query: requests.EventsQuery = call.query
    subjects = [what, *_read_subjects(call.state, query)]
    since = max(call.now - query.since_s if query.since_s else 0.0, query.since)
    until, is_change = query.until or math.inf, bool(query.changes)
    before: int | None = query.before or None
    found: list[V] = []
    rights = call.rights
    for _ in range(MAX_PAGES):
        left = query.limit - len(found)
        page = await call.scheduler.event_log.read(subjects, before=before, since=since, limit=left)
        found += [
            view(number, msgspec.structs.replace(event, text=rights.hide_operations(event.text)))
            for number, event in page
            if event.at <= until and (event.changes or not is_change) and may_see(rights, event)
        ]
        before = page[-1][0] if len(page) == left else None
        if before is None or len(found) == query.limit:
            break
    return found, before


def _find_titles(call: Call, events: Iterable[event_views.EventView]) -> dict[str, str]:
    return find_titles(call.rights, (event.operation for event in events))


def may_see(rights: Rights, event: Event) -> bool:
    """Whether the user may know of an event's operation; if it is gone, the rights on its pool decide."""
    if not event.operation or rights.user.admin or event.user == rights.user.name:
        return True
    record = rights.state.record_of(event.operation)
    if record is not None:
        return rights.may_read(record)
    tree = rights.state.config.trees.get(event.tree)
    if tree is None:
        return True
    pool = event.pool if event.pool in tree.pools else event.pool.partition(SUBPOOL_DELIMITER)[0]
    return rights.on_pool(tree.name, pool if pool in tree.pools else ROOT_POOL, "read").allowed


def _read_subjects(state: State, query: requests.EventsQuery) -> list[str]:
    """Return the subjects of a query. Raises CommandError if the alias of an operation is unknown."""
    tree = query.tree or (state.config.default_tree if query.pool else "")
    operation = query.operation
    if operation.startswith("*"):
        operation = state.find_record(operation).id
    of_pool = f"pool:{tree}/{query.pool}" if query.pool and query.pool != ROOT_POOL else ""
    named = {"kind": query.kind, "user": query.user, "node": query.node, "operation": operation}
    if not of_pool:
        named["tree"] = tree
    return [*(f"{name}:{value}" for name, value in named.items() if value), *([of_pool] if of_pool else [])]


def _administers(call: Call, query: requests.EventsQuery) -> bool:
    """Whether a query is about a pool or tree whose access list the user may change."""
    state = call.state
    tree = state.trees.get(query.tree or state.config.default_tree)
    if tree is None or not (query.pool or query.tree):
        return False
    pool = tree.root if query.pool in ("", ROOT_POOL) else tree.pools.get(query.pool)
    name = ROOT_POOL if pool is None else explicit_pool(pool)
    return call.rights.on_pool(tree.name, name, "administer").allowed


def undo_change(call: Call) -> UndoChange:
    text = call.path["number"]
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise CommandError(f"{text[:100]!r} is not the number of an event; `cpumond events` lists them")
    return UndoChange(int(text))
