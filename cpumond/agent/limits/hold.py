"""Who decides about a job's limit, and when it is written again: a frozen value that each event replaces (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cpumond.host.cgroup.settings import CpuSettings

CALM_S = 600.0
"""Losses at least this many seconds apart do not add up to a contest."""


@dataclass(frozen=True, slots=True)
class Free:
    """The monitor decides."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """An operator's pin decides."""

    cores: float


@dataclass(frozen=True, slots=True)
class Respected:
    """A limit that another program set stays until ``until_s``; ``by`` says how it was set, "" if unknown.

    ``pin``: cores of the overridden pin."""

    until_s: float
    by: str = ""
    pin: float | None = None


@dataclass(frozen=True, slots=True)
class Contested:
    """Another program changed the limit back too often: it decides until ``release``. ``pin``: cores of the
    overridden pin."""

    pin: float | None = None


@dataclass(frozen=True, slots=True)
class AskingSystemd:
    """systemd was asked at ``since_s`` whether it changed a unit's limit itself; ``before`` was in force until then."""

    before: CpuSettings
    since_s: float


FREE = Free()


@dataclass(frozen=True, slots=True)
class Hold:
    """Who decides about a limit, and what is due. Times are of the monotonic clock in seconds.

    ``asking``: nothing is lowered until systemd has answered. ``write_at_s``: when to write the limit again, because
    another one may be in force. ``write_after_s``: nothing is lowered before this time, because a write failed.
    ``losses``: how often in a row another limit was found in force, the last time at ``lost_at_s``.
    """

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
        """Whether the agent's limit, the monitor's or a pin, should be in force."""
        return isinstance(self.decider, (Free, Pinned)) and self.asking is None

    @property
    def pinned_cores(self) -> float | None:
        """An operator's pin in cores, even if overridden; None without one."""
        decider = self.decider
        if isinstance(decider, Pinned):
            return decider.cores
        return None if isinstance(decider, Free) else decider.pin

    @property
    def is_foreign(self) -> bool:
        """Whether another program's limit must stay."""
        return isinstance(self.decider, (Respected, Contested))

    @property
    def is_contested(self) -> bool:
        """Whether the limit was left to another program."""
        return isinstance(self.decider, Contested)

    def pin(self, cores: float) -> Hold:
        return replace(self, decider=Pinned(cores), losses=0, write_at_s=None)

    def unpin(self) -> Hold:
        """End a pin; its override stays."""
        decider = self.decider
        return replace(self, decider=FREE if isinstance(decider, (Free, Pinned)) else replace(decider, pin=None))

    def release(self, now_s: float) -> Hold:
        """Return the job to the monitor by an operator's order. After a contest its limit is written at once."""
        again = now_s if self.is_contested else None
        return replace(self, decider=FREE, losses=0, write_at_s=again)

    def respect(self, now_s: float, ttl_s: float, by: str = "") -> Hold:
        """Respect another program's limit for ``ttl_s``; for 0 the monitor continues from it. Only an operator ends
        a contest."""
        is_for_a_time = ttl_s > 0 and not self.is_contested
        decider = Respected(now_s + ttl_s, by, self.pinned_cores) if is_for_a_time else self.decider
        return replace(self, decider=decider, write_at_s=None)

    def expire(self, now_s: float) -> Hold:
        """End a respected limit whose time is over; an overridden pin must be applied again."""
        over = isinstance(self.decider, Respected) and now_s >= self.decider.until_s
        return replace(self, decider=FREE) if over else self

    def lose(self, now_s: float, backoff_s: float, most: int) -> Hold:
        """Record that another limit, not to be respected, is in force. The agent's limit is written again after
        ``backoff_s``, which doubles each time; loss number ``most`` in a row makes it contested."""
        calm_s = max(CALM_S, 4 * backoff_s * 2**self.losses)
        losses = self.losses + 1 if now_s - self.lost_at_s < calm_s else 1
        lost = replace(self, losses=losses, lost_at_s=now_s, write_at_s=now_s + backoff_s * 2 ** (losses - 1))
        return lost if losses < most else replace(lost, decider=Contested(self.pinned_cores), write_at_s=None)

    def ask(self, before: CpuSettings, now_s: float) -> Hold:
        """Record that systemd is asked who made a change; of several changes before its answer, the first counts."""
        return self if self.asking is not None else replace(self, asking=AskingSystemd(before, now_s))

    def answered(self) -> Hold:
        """Record that systemd has answered, or that its answer no longer matters."""
        return self if self.asking is None else replace(self, asking=None)

    def write(self, at_s: float | None) -> Hold:
        """Schedule the limit to be written again at ``at_s``; None: there is no need."""
        return self if self.write_at_s == at_s else replace(self, write_at_s=at_s)

    def fail(self, until_s: float) -> Hold:
        """Record a failed write: the limit is not lowered until ``until_s``."""
        return replace(self, write_after_s=until_s)


UNHELD = Hold()
"""The hold of all jobs that only the monitor decides about: thousands share it."""
