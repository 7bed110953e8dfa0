"""Who wrote a unit's limit: what systemd was told of it against what is seen of it now (pure).

systemd keeps a value of its own beside the kernel's file: what it applied is either what the agent submitted, at once
or late, or a stored value that it re-applied (daemon-reload), or what an operator gave it (``systemctl set-property``).
All else was written to the file alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from cpumond.cgroup.systemd import UnitProperties, is_same_value

LATE_S = 2.0
"""systemd answers before it writes the cgroup's file; longer than this after its answer it is not our value."""
RELOAD_S = 10.0
"""So long after systemd has read its units again, what it gives back is a value that it had stored."""


@dataclass(slots=True)
class UnitTarget:
    """What systemd was told of one unit: ``target`` is the newest, ``older`` may still be on their way, ``applied`` is
    the one that it took last, however long ago."""

    target: UnitProperties = ()
    older: tuple[UnitProperties, ...] = ()
    applied: UnitProperties = ()
    settled_at_s: float | None = -math.inf
    """When systemd answered to ``target``; None: not yet."""
    acknowledged: bool = False
    """systemd took at least one of them."""
    submitted: bool = False
    """It may have: the bus was not known to be away."""
    superseded: bool = False
    """``target`` was not set, since another program was faster."""

    @property
    def is_settled(self) -> bool:
        """Whether systemd wants what it was last told."""
        return self.settled_at_s is not None

    def has_late(self, name: str, value: int) -> bool:
        """Whether a property's ``value`` is one of ours that was followed by another: systemd came late with it."""
        applied = (self.applied,) if self.applied != self.target else ()
        return is_among(name, value, (*self.older, *applied))

    def has_any(self, name: str, value: int) -> bool:
        """Whether it is any of ours that systemd may still apply."""
        return is_among(name, value, (self.target, *self.older, self.applied))


@dataclass(frozen=True, slots=True)
class Observation:
    """What is seen of one property of a unit, in systemd's values.

    ``found``: in the kernel's file; ``original``: before the agent's first change; ``told``: systemd's own value, None
    where that is unknown; ``is_asked``: it has answered, or cannot be asked. ``is_conflict``: it was looked up right
    before ours was to be set, which then was not. ``is_reloaded``: it has read its units again within RELOAD_S;
    ``is_inherited``: a run before this one may have told it a limit.
    """

    name: str
    found: int
    original: int
    told: int | None = None
    is_asked: bool = True
    is_conflict: bool = False
    is_reloaded: bool = False
    is_inherited: bool = False


class Verdict(Enum):
    """Who wrote it, and so what follows."""

    OWN = "the agent: nothing follows"
    LATE = "systemd, late with a limit of the agent's that is not the newest: the newest is written again"
    UNKNOWN = "systemd has to be asked"
    OUTRANKED = "systemd, from a drop-in that outranks the agent's at each reload: the agent's is set again"
    STORED = "systemd, what it was told before the agent told it anything: drift"
    OPERATOR = "an operator, through systemd: respected, and the new original"
    FILE = "whoever wrote to the file alone: more is respected, less is drift"


def judge(record: UnitTarget, seen: Observation) -> Verdict:
    """Who wrote ``seen.found``, which is not what was in force."""
    if not seen.is_asked:
        return Verdict.LATE if record.has_late(seen.name, seen.found) else Verdict.UNKNOWN
    if seen.is_conflict and (
        seen.told is None or not record.acknowledged or dict(record.target).get(seen.name) == seen.told
    ):
        return Verdict.OWN
    is_known = seen.told is not None
    is_told = is_known and record.acknowledged
    is_systemds = seen.told is None or is_same_value(seen.name, seen.told, seen.found)
    is_as_found = is_systemds and is_same_value(seen.name, seen.original, seen.found)
    if is_as_found and is_told and seen.is_reloaded:
        return Verdict.OUTRANKED
    if is_as_found and not is_told:
        return Verdict.STORED
    if not is_told and (seen.is_inherited or not is_known) and not is_raised(seen):
        # It may be a limit of ours that systemd was told by the run before: the original is not changed for that.
        return Verdict.FILE
    if is_systemds and (seen.is_conflict or not is_among(seen.name, seen.found, (record.target,))):
        return Verdict.OPERATOR
    return Verdict.FILE


def is_raised(seen: Observation) -> bool:
    """Whether more was written than there was before the agent's first change."""
    return seen.found > seen.original and not is_same_value(seen.name, seen.found, seen.original)


def is_among(name: str, value: int, told: Iterable[UnitProperties]) -> bool:
    """Whether any of ``told`` gives the property this value."""
    return any(each == name and is_same_value(name, other, value) for properties in told for each, other in properties)
