"""Who wrote a unit's limit: what systemd was told of it against what is seen of it now (pure).

systemd keeps a value of its own beside the kernel's file: what it applied is either what the agent submitted, at once
or late, or a stored value that it re-applied (daemon-reload), or what an operator gave it (``systemctl set-property``).
All else was written to the file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cpumond.host.systemd.properties import UnitProperties, is_same_value

RELOAD_S = 10.0
"""For so long after systemd has read its units again, a value that it applies counts as one that it had stored."""


@dataclass(slots=True)
class UnitTarget:
    """What systemd was told of one unit: ``target`` is the newest, ``older`` may still be on their way, ``applied`` is
    what it has of each property, however long ago it took that."""

    target: UnitProperties = ()
    older: tuple[UnitProperties, ...] = ()
    applied: UnitProperties = ()
    is_settled: bool = True
    """systemd has answered to ``target``."""
    acknowledged: bool = False
    """systemd knows the unit, and took at least one value."""
    submitted: bool = False
    """It may have taken one: the bus was not known to be away."""

    def take(self, properties: UnitProperties | None) -> None:
        """Note what systemd has taken; None: there is no such unit."""
        self.acknowledged = properties is not None
        self.applied = () if properties is None else merge(self.applied, properties)

    def has(self, name: str, value: int) -> bool:
        """Whether a property's ``value`` is one that systemd may apply for the agent."""
        known = (each for told in (self.target, *self.older, self.applied) for each in told if each[0] == name)
        return any(is_same_value(name, other, value) for _, other in known)


@dataclass(frozen=True, slots=True)
class Observation:
    """What is seen of one property of a unit, in systemd's values.

    ``found``: in the kernel's file; ``original``: before the agent's first change; ``told``: systemd's own value, None
    where that is unknown; ``is_asked``: it has answered, or cannot be asked. ``is_conflict``: it was found right before
    the agent's value was to be set, which then was not. ``is_reloaded``: it has read its units again within RELOAD_S;
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


class WriteVerdict(Enum):
    """Who wrote it, and so what follows."""

    OWN = "systemd, as the agent told it: where it is less than the newest limit, that is written again"
    UNKNOWN = "systemd has to be asked"
    OUTRANKED = "systemd, from a drop-in that outranks the agent's at each reload: the agent's is set again"
    STORED = "systemd, what it was told before the agent told it anything: drift"
    OPERATOR = "an operator, through systemd: respected, and the new original"
    FILE = "another program, in the file alone: more is respected, less is drift"
    PROGRAM = "another program, in a cgroup that is no unit's: respected, and the new original"
    ENGINE = "the job's engine, which ordered it: the new original, which the monitor goes on from"


def judge(record: UnitTarget, seen: Observation) -> WriteVerdict:
    """Who wrote ``seen.found``, which is not what was in force."""
    is_own = (seen.name, seen.found) in record.target if seen.is_conflict else record.has(seen.name, seen.found)
    if is_own:
        return WriteVerdict.OWN
    if not seen.is_asked:
        return WriteVerdict.UNKNOWN
    is_known = seen.told is not None
    is_told = is_known and record.acknowledged
    is_systemds = seen.told is None or is_same_value(seen.name, seen.told, seen.found)
    is_same = is_same_value(seen.name, seen.original, seen.found)
    is_as_found = is_systemds and is_same
    if is_as_found and is_told and seen.is_reloaded:
        return WriteVerdict.OUTRANKED
    if is_as_found and not is_told:
        return WriteVerdict.STORED
    if not is_told and (seen.is_inherited or not is_known) and (is_same or seen.found < seen.original):
        # It may be a limit of the agent's that systemd was told by the run before: no reason to change the original.
        return WriteVerdict.FILE
    return WriteVerdict.OPERATOR if is_systemds else WriteVerdict.FILE


def merge(before: UnitProperties, newer: UnitProperties) -> UnitProperties:
    """The properties of both, those of ``newer`` where they are in both."""
    return tuple({**dict(before), **dict(newer)}.items())
