"""Events as values: commands with their users, which form the audit log, and other changes. Pure.

``commands`` makes events of commands and refusals; ``happenings`` makes events of other changes. Entries of the store's
log are found by their subjects, which ``Subjects`` collects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from cpumond.scheduler.elements import Tree
from cpumond.scheduler.model import ROOT_POOL

EventKind = Literal[
    "command", "refused", "node_registered", "node_silent", "node_lost", "node_returned", "preemption",
    "operation_failed", "operation_stuck", "limit_contested", "node_failing", "node_works", "budget", "take_over",
    "started", "reload",
]  # fmt: skip
"""``command`` and ``refused`` form the audit log. ``started``: the scheduler started. ``take_over``: it became the
leader. ``reload``: it read its tokens or certificates again. ``node_silent``: no heartbeats arrive, its jobs wait.
``node_lost``: the node was declared lost with its jobs. ``operation_stuck``: none of its jobs can start (3.7).
``node_failing``: jobs fail on the node in a row, and it is held off if allowed. ``node_works``: this has ended (2.14).
``budget``: a core-hour budget is low or spent, or its period began again (2.15)."""

KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)
AUDITED: Final[frozenset[EventKind]] = frozenset({"command", "refused"})

AUDIT: Final = "audit"
TIMELINE: Final = "timeline"
"""Two subjects: AUDIT of the whole audit log, TIMELINE of the events that every user may see (all but refusals)."""

MAX_POOLS: Final = 1000
"""Maximum number of pools by which an entry can be found. A command may change more pools."""


class EventChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attribute before and after a change; see ``settings.changes.ConfigChange``."""

    tree: str
    pool: str
    attribute: str
    old: Any = None
    new: Any = None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored event. ``at``: seconds since 1970.

    ``text``: a sentence. ``user``: sender of the request. ``acting``: administrator who sent it in that name.
    ``origin``: source of the request, and how the user was identified. ``command``: type of the command, or kind of
    preemption. ``request``: fields of the command without secrets. ``plan``: plan that the user saw before.
    ``allowed_by``: the decision as a sentence. ``undoes``: number of the event that this one undoes."""

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
    """Number of equal events that this event represents."""
    term: int = 0
    undoes: int = 0


class Subjects:
    """Subjects by which an event is found: "user:alice", "pool:default/research" and each pool above, "node:n1"."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._found = dict.fromkeys([f"kind:{event.kind}"])
        if event.kind in AUDITED:
            self._found[AUDIT] = None
        if event.kind != "refused":
            self._found[TIMELINE] = None
        for user in filter(None, (event.user, event.acting)):
            self._found[f"user:{user}"] = None
        self.add("tree", [event.tree] if event.tree else ())
        self.add("node", [event.node] if event.node else ())
        self.add("operation", [event.operation] if event.operation else ())

    def add(self, kind: Literal["tree", "node", "operation"], names: Iterable[str]) -> Subjects:
        self._found.update(dict.fromkeys(f"{kind}:{name}" for name in names))
        return self

    def add_pools(self, trees: Mapping[str, Tree], places: Iterable[tuple[str, str]]) -> Subjects:
        """Add these pools, given as (tree, pool), and the pools above them."""
        added = 0
        for tree_name, pool_name in places:
            if added >= MAX_POOLS:
                break
            tree = trees.get(tree_name)
            pool = None if tree is None else tree.pools.get(pool_name)
            for name in [pool_name] if pool is None else [pool_name, *(each.name for each in pool.ancestors())]:
                subject = f"pool:{tree_name}/{name}"
                if name != ROOT_POOL and subject not in self._found:
                    self._found[subject] = None
                    added += 1
            if tree_name:
                self._found[f"tree:{tree_name}"] = None
        return self

    def index(self) -> IndexedEvent:
        return IndexedEvent(self._event, tuple(self._found))


class IndexedEvent(NamedTuple):
    """An event, ready to be stored, and the subjects under which it is indexed."""

    event: Event
    subjects: tuple[str, ...]
