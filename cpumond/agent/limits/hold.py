"""Who decides about a job's limit, and when it is written again: a frozen value that each event replaces (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cpumond.host.cgroup.settings import CpuSettings

CALM_S = 600.0
"""Losses that are at least this many seconds apart do not add up to a contest."""


@dataclass(frozen=True, slots=True)
class Free:
    """The monitor decides."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """An operator's pin decides."""

    cores: float


@dataclass(frozen=True, slots=True)
class Respected:
    """A limit that another program set stays in force until ``until_s``; ``by`` says how it was set, "" if unknown.

    ``pin``: cores of the pin that this limit overrides, None if there is none."""

    until_s: float
    by: str = ""
    pin: float | None = None


@dataclass(frozen=True, slots=True)
class Contested:
    """Another program changed the limit back too often: that program decides until ``release``. ``pin``: cores of the
    pin that its limit overrides, None if there is none."""

    pin: float | None = None


@dataclass(frozen=True, slots=True)
class AskingSystemd:
    """At ``since_s`` systemd was asked who changed a unit's limit; ``before`` was in force before that change."""

    before: CpuSettings
    since_s: float


FREE = Free()


@dataclass(frozen=True, slots=True)
class Hold:
    """Who decides about a job's limit, and when it is written again. Times are monotonic, in seconds.

    ``asking``: if set, the limit is not lowered until systemd has answered. ``write_at_s``: time to write the limit
    again, because a different one may be in force. ``write_after_s``: the limit is not lowered before this time,
    because a write failed. ``losses``: how many times in a row another program's limit was found in force, the last
    time at ``lost_at_s``."""

    decider: Free | Pinned | Respected | Contested = FREE
    asking: AskingSystemd | None = None
    write_at_s: float | None = None
    write_after_s: float = -math.inf
    losses: int = 0
    lost_at_s: float = -math.inf

    @property
    def is_free(self) -> bool:
        """Whether the monitor alone decides and systemd is not being asked."""
        return self.decider is FREE and self.asking is None

    @property
    def is_own(self) -> bool:
        """Whether the agent decides about the limit in force, by the monitor or by a pin."""
        return isinstance(self.decider, (Free, Pinned)) and self.asking is None

    @property
    def pinned_cores(self) -> float | None:
        """The cores of an operator's pin, even if the pin is overridden; None if there is no pin."""
        decider = self.decider
        if isinstance(decider, Pinned):
            return decider.cores
        return None if isinstance(decider, Free) else decider.pin

    @property
    def is_foreign(self) -> bool:
        """Whether another program's limit must stay in force."""
        return isinstance(self.decider, (Respected, Contested))

    @property
    def is_contested(self) -> bool:
        """Whether the agent has left the limit to another program until ``release``."""
        return isinstance(self.decider, Contested)

    def pin(self, cores: float) -> Hold:
        return replace(self, decider=Pinned(cores), losses=0, write_at_s=None)

    def unpin(self) -> Hold:
        """End a pin; a limit that overrides the pin stays in force."""
        decider = self.decider
        return replace(self, decider=FREE if isinstance(decider, (Free, Pinned)) else replace(decider, pin=None))

    def release(self, now_s: float) -> Hold:
        """Let the monitor decide again, as an operator asked. After a contest the agent's limit is written at once."""
        return replace(self, decider=FREE, losses=0, write_at_s=now_s if self.is_contested else None)

    def respect(self, now_s: float, ttl_s: float, by: str = "") -> Hold:
        """Respect another program's limit for ``ttl_s``; if that is 0, the decider stays the same. A contest
        continues: only an operator ends it."""
        is_for_a_time = ttl_s > 0 and not self.is_contested
        decider = Respected(now_s + ttl_s, by, self.pinned_cores) if is_for_a_time else self.decider
        return replace(self, decider=decider, write_at_s=None)

    def expire(self, now_s: float) -> Hold:
        """End a respected limit whose time is over: the monitor decides again, or the caller applies the pin again."""
        over = isinstance(self.decider, Respected) and now_s >= self.decider.until_s
        return replace(self, decider=FREE) if over else self

    def lose(self, now_s: float, backoff_s: float, most: int) -> Hold:
        """Record that another program's limit is in force and must not be respected. The agent's limit is written again
        after ``backoff_s``, doubled with each loss. After ``most`` losses in a row the limit is contested."""
        calm_s = max(CALM_S, 4 * backoff_s * 2**self.losses)
        losses = self.losses + 1 if now_s - self.lost_at_s < calm_s else 1
        lost = replace(self, losses=losses, lost_at_s=now_s, write_at_s=now_s + backoff_s * 2 ** (losses - 1))
        return lost if losses < most else replace(lost, decider=Contested(self.pinned_cores), write_at_s=None)

    def ask(self, before: CpuSettings, now_s: float) -> Hold:
        """Record that systemd is asked who made a change. Further changes before the answer are not recorded."""
        return self if self.asking is not None else replace(self, asking=AskingSystemd(before, now_s))

    def answered(self) -> Hold:
        """Record that systemd has answered, or that its answer no longer matters."""
        return self if self.asking is None else replace(self, asking=None)

    def write(self, at_s: float | None) -> Hold:
        """Schedule the limit to be written again at ``at_s``; None cancels that."""
        return self if self.write_at_s == at_s else replace(self, write_at_s=at_s)

    def fail(self, until_s: float) -> Hold:
        """Record a failed write: the limit is not lowered until ``until_s``."""
        return replace(self, write_after_s=until_s)


UNHELD = Hold()
"""The hold of every job that only the monitor decides about; thousands of jobs share this value."""
