"""Judge who wrote a unit's limit, by comparing the values sent to systemd with those found (pure).

systemd keeps its own value of each limit beside the kernel's file. It applies three kinds of values: those that the
agent submitted, at once or late; its own stored values, once more at each daemon-reload; and those that an operator
sets (``systemctl set-property``). Any other value was written only to the file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cpumond.host.systemd.properties import UnitProperties, is_same_value

RELOAD_S = 10.0
"""For this many seconds after systemd has reloaded its units, a value that it applies counts as a stored one."""


@dataclass(slots=True)
class UnitTarget:
    """Values sent to systemd for one unit. ``target``: the newest values. ``older``: earlier values that may still be
    in transit. ``applied``: the last accepted value of each property, however old."""

    target: UnitProperties = ()
    older: tuple[UnitProperties, ...] = ()
    applied: UnitProperties = ()
    is_settled: bool = True
    """systemd has answered to ``target``."""
    acknowledged: bool = False
    """systemd knows the unit and accepted at least one value."""
    submitted: bool = False
    """systemd may have accepted a value: when one was sent, the bus was not known to be down."""

    def take(self, properties: UnitProperties | None) -> None:
        """Record ``properties`` that systemd accepted; None if systemd does not know the unit."""
        self.acknowledged = properties is not None
        self.applied = () if properties is None else merge(self.applied, properties)

    def has(self, name: str, value: int) -> bool:
        """Return whether the agent sent systemd this ``value`` of a property, which systemd may therefore apply."""
        known = (each for told in (self.target, *self.older, self.applied) for each in told if each[0] == name)
        return any(is_same_value(name, other, value) for _, other in known)


@dataclass(frozen=True, slots=True)
class Observation:
    """Observed state of one property of a unit, in systemd's values.

    ``found`` is in the kernel's file; ``original`` was there before the agent's first change; ``told`` is systemd's own
    value, None if unknown. ``is_asked``: systemd has answered, or cannot be asked. ``is_conflict``: ``found`` was seen
    just before the agent's value was to be set, which was then not set. ``is_reloaded``: systemd reloaded its units
    less than RELOAD_S ago. ``is_inherited``: an earlier run of the agent may have sent systemd a limit of the unit."""

    name: str
    found: int
    original: int
    told: int | None = None
    is_asked: bool = True
    is_conflict: bool = False
    is_reloaded: bool = False
    is_inherited: bool = False


class WriteVerdict(Enum):
    """Author of a write, and what follows from it."""

    OWN = "systemd, for the agent: if it is below the newest limit, that is written again"
    UNKNOWN = "unknown until systemd is asked"
    OUTRANKED = "systemd, from a drop-in that overrides the agent's at each reload: the agent's is set again"
    STORED = "systemd, a value stored before the agent's first one: drift"
    OPERATOR = "an operator, through systemd: respected, and the new original"
    FILE = "another program, only in the file: a raise is respected, less is drift"
    PROGRAM = "another program, in a cgroup without a unit: respected, and the new original"
    ENGINE = "the job's engine, as its new request: the new original, from which the monitor continues"


def judge(record: UnitTarget, seen: Observation) -> WriteVerdict:
    """Return who wrote ``seen.found``, which differs from the limit in force before."""
    is_own = (seen.name, seen.found) in record.target if seen.is_conflict else record.has(seen.name, seen.found)
    if is_own:
        return WriteVerdict.OWN
    if not seen.is_asked:
        return WriteVerdict.UNKNOWN
    is_known = seen.told is not None
    is_sent = is_known and record.acknowledged
    is_systemds = seen.told is None or is_same_value(seen.name, seen.told, seen.found)
    is_same = is_same_value(seen.name, seen.original, seen.found)
    is_as_found = is_systemds and is_same
    if is_as_found and is_sent and seen.is_reloaded:
        return WriteVerdict.OUTRANKED
    if is_as_found and not is_sent:
        return WriteVerdict.STORED
    if not is_sent and (seen.is_inherited or not is_known) and (is_same or seen.found < seen.original):
        # This may be the agent's limit from an earlier run. Therefore the original must not change.
        return WriteVerdict.FILE
    return WriteVerdict.OPERATOR if is_systemds else WriteVerdict.FILE


def merge(before: UnitProperties, newer: UnitProperties) -> UnitProperties:
    """Merge ``before`` and ``newer``; if both have a property, the value in ``newer`` counts."""
    return tuple({**dict(before), **dict(newer)}.items())
