"""Configuration of what happens to nodes on which jobs fail (semantics.md 2.14). Pure."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from cpumond.core.measures import DURATION

GUARD: Final = "cpumond:node-failures"
"""User that cordons such nodes in the audit log."""

_Pause = Annotated[float, msgspec.Meta(ge=1.0, le=604_800.0, extra=DURATION)]


class NodeFailures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[node_failures]``: when a node is held off. ``operations``: number of different operations whose jobs fail in a
    row. ``starts``: number of jobs in a row that it cannot start. ``pause``: duration of the first hold; each further
    hold is twice as long, up to ``max_pause``. ``max_holds``: number of holds after which the node is cordoned; 0 for
    never. ``max_held_ratio``: fraction of a tree's nodes that may be held off at once; one node always may be."""

    enabled: bool = True
    operations: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 2
    starts: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    pause_s: _Pause = msgspec.field(name="pause", default=60.0)
    max_pause_s: _Pause = msgspec.field(name="max_pause", default=3600.0)
    max_holds: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 5
    max_held_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.25


DEFAULT_NODE_FAILURES: Final = NodeFailures()
