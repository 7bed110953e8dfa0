"""What happened, as values: commands with who asked for them (the audit log), and what else changed. Pure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

EventKind = Literal[
    "command",
    "refused",
    "node_registered",
    "node_lost",
    "node_returned",
    "preemption",
    "operation_failed",
    "limit_contested",
    "take_over",
    "started",
]
"""``command`` and ``refused`` are the audit log; ``started``: the scheduler's own start, with its configuration."""

AUDITED: frozenset[EventKind] = frozenset({"command", "refused"})


class EventChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attribute before and after, see ``settings.changes.ConfigChange``."""

    tree: str
    pool: str
    attribute: str
    old: Any = None
    new: Any = None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened, as it is stored. ``at``: seconds since 1970.

    ``text`` is a sentence. ``user`` asked, ``acting`` is the administrator who asked in that name, ``origin`` where it
    came from and how the user was known. ``request``: the command's fields without secrets. ``plan``: what the user was
    shown before. ``allowed_by``: the sentence of the verdict. ``undoes``: the number of the event that it takes back.
    """

    at: float
    kind: EventKind
    text: str
    user: str = ""
    acting: str = ""
    origin: str = ""
    command: str = ""
    tree: str = ""
    pool: str = ""
    node: str = ""
    operation: str = ""
    job: str = ""
    request: dict[str, Any] = {}
    changes: tuple[EventChange, ...] = ()
    plan: str = ""
    allowed_by: str = ""
    refused: str = ""
    count: int = 1
    """How many like it, which are told as one."""
    term: int = 0
    undoes: int = 0
