"""Leadership as values: what this scheduler knows of the lease, what it does next, and until when it may answer.

All times are seconds of this host's own clock, which never steps and runs on while the host sleeps. A lease counts from
the moment at which its renewal was sent, so that it ends here before it ends in the store."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple

from cpumond.scheduler.store import Lease

MAX_LOOK_S = 1.0
"""Longest interval between attempts of a standby to lead; after a leader was killed, another leads within this time."""
RENEWALS = 3
"""Number of renewals during the time of a lease."""
ATTEMPTS = 20
"""Number of attempts, during the time of a lease, to repeat a failed renewal."""
GUARD = 20
"""Answers stop when 1/GUARD of a lease is left, since the clocks of two hosts run at different rates."""


class LeadView(NamedTuple):
    """The present leader, as shown in answers, in metrics and to the service manager."""

    role: Literal["leader", "standby"]
    term: int
    """Number of the leader's term; 0 if unknown."""
    leader: str
    """``host:port``; "" if unknown."""
    error: str
    """Why the store's engine does not respond; "" if it does."""


class LeadStep(Enum):
    """What to do next."""

    WAIT = "wait"
    TAKE = "take"
    """Read the lease; if no scheduler has it, take the lead."""
    RENEW = "renew"
    END = "end"
    """The lease has ended here: drop the state, become a standby."""


@dataclass(frozen=True, slots=True)
class Lead:
    """What this scheduler knows of the lead. At first it knows nothing and reads the lease at once."""

    lease_s: float
    term: int = 0
    """The present term, 0 if unknown."""
    leader: str = ""
    """Address of the leader, ``host:port``; "" if it is unknown or this scheduler leads."""
    is_own: bool = False
    """Whether ``term`` is a term of this scheduler."""
    until_s: float = -math.inf
    """Until when this scheduler may answer in its own term."""
    next_s: float = -math.inf
    """When to read or renew the lease next."""
    heard_s: float = -math.inf
    """When the store's engine last responded."""
    error: str = ""
    """Why the engine did not respond to the last call; "" if it did."""

    @property
    def look_s(self) -> float:
        """Seconds between two attempts of a standby to take the lead."""
        return min(MAX_LOOK_S, self.lease_s / RENEWALS)

    def may_answer(self, term: int, now_s: float) -> bool:
        """Whether an answer in ``term`` may be sent at this moment."""
        return self.is_own and self.term == term and now_s < self.until_s

    def find_leader(self, now_s: float) -> str:
        """The address of another scheduler that leads; "" if unknown, or last read longer ago than a lease."""
        return self.leader if not self.is_own and now_s - self.heard_s < self.lease_s else ""

    def find_step(self, now_s: float) -> LeadStep:
        if self.is_own and now_s >= self.until_s:
            return LeadStep.END
        if now_s < self.next_s:
            return LeadStep.WAIT
        return LeadStep.RENEW if self.is_own else LeadStep.TAKE

    def wait_s(self, now_s: float, is_asking: bool) -> float | None:
        """Return seconds until the next action if no event arrives; None if no action is due before one. ``is_asking``:
        whether a call to the arbiter is in progress."""
        until_s = min(math.inf if is_asking else self.next_s, self.until_s if self.is_own else math.inf)
        return None if until_s == math.inf else max(until_s - now_s, 0.0)

    def taken(self, lease: Lease, sent_s: float, now_s: float) -> Lead:
        """Return the lead after this scheduler got the lease for which it sent a request at ``sent_s``."""
        return replace(self, term=lease.term, leader="", is_own=True, error="", heard_s=now_s)._leased(sent_s)

    def seen(self, lease: Lease | None, now_s: float) -> Lead:
        term, leader = (self.term, "") if lease is None else (lease.term, lease.leader if lease.left_s > 0 else "")
        return replace(self, term=term, leader=leader, error="", heard_s=now_s, next_s=now_s + self.look_s)

    def renewed(self, sent_s: float, now_s: float) -> Lead:
        """The lead after the renewal sent at ``sent_s`` was accepted. A lease that has ended here remains ended."""
        heard = replace(self, error="", heard_s=now_s)
        return heard._leased(sent_s) if self.may_answer(self.term, now_s) else heard

    def _leased(self, sent_s: float) -> Lead:
        until_s = sent_s + self.lease_s * (1 - 1 / GUARD)
        return replace(self, until_s=until_s, next_s=sent_s + self.lease_s / RENEWALS)

    def failed(self, error: str, now_s: float) -> Lead:
        """Return the lead after the store's engine did not respond; the attempt is repeated soon."""
        again_s = min(self.lease_s / ATTEMPTS, MAX_LOOK_S) if self.is_own else self.look_s
        return replace(self, error=error, next_s=now_s + again_s)

    def ended(self, now_s: float, rest_s: float = 0.0) -> Lead:
        """The lead after this scheduler's term. For ``rest_s`` it does not try to lead again: another one can."""
        return replace(self, is_own=False, leader="", until_s=-math.inf, next_s=now_s + rest_s)
