"""The log of events in the JSON API: timeline, audit log, annotations for Grafana. Pure."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from cpumond.api.figures import View, make_view
from cpumond.core.words import iso_utc
from cpumond.scheduler.events import Event, EventChange, EventKind


class EventView(View, frozen=True):
    """An event. ``at``: seconds since 1970; ``time``: the same in UTC. ``number``: identifies the event in undo and in
    requests for older events. ``count``: similar events that it stands for. ``can_undo``: it changed trees or pools."""

    number: int
    at: float
    time: str
    kind: EventKind
    text: str
    user: str
    acting: str
    command: str
    tree: str
    pool: str
    node: str
    operation: str
    job: str
    changes: tuple[EventChange, ...]
    undoes: int
    count: int
    term: int
    can_undo: bool


class AuditView(EventView, frozen=True):
    """A command or a refused request: who sent it, from where, what allowed it, and which plan the user had seen."""

    origin: str
    request: dict[str, Any]
    plan: str
    allowed_by: str
    refused: str


V = TypeVar("V", EventView, AuditView)


class EventList(View, frozen=True):
    """Events, the newest first. ``next``: older events have numbers below this one; null: there are none.

    ``titles``: operation id -> title, for the operations in ``events`` that are known and have a title."""

    events: list[EventView]
    next: Annotated[int, msgspec.Meta(ge=0)] | None
    titles: dict[str, str] = msgspec.field(default_factory=dict)


class AuditList(View, frozen=True):
    """Entries of the audit log, in the form of ``EventList``."""

    events: list[AuditView]
    next: Annotated[int, msgspec.Meta(ge=0)] | None
    titles: dict[str, str] = msgspec.field(default_factory=dict)


class Annotation(View, frozen=True):
    """An event in the format of Grafana; ``time`` is in milliseconds since 1970."""

    time: int
    title: str
    text: str
    tags: list[str]


def view_event(kind: type[V], number: int, event: Event) -> V:
    """Return the view of an event that ``kind`` names: EventView or AuditView."""
    return make_view(kind, event, number=number, time=iso_utc(event.at), can_undo=bool(event.changes))


def view_annotation(event: Event) -> Annotation:
    about = (("tree", event.tree), ("pool", event.pool), ("node", event.node), ("user", event.user))
    tags = [event.kind, *(f"{name}:{value}" for name, value in about if value)]
    return Annotation(round(event.at * 1e3), event.kind.replace("_", " "), event.text, tags)
