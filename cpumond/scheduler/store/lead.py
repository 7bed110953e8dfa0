"""Leadership as values: what this scheduler knows of the lease, what to do next, until when it may answer.

All times are seconds of this host's own clock, which never steps and continues while the host sleeps. A lease counts
from the moment at which its renewal was sent, so that it ends here before it ends in the store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple

from cpumond.scheduler.store import Lease

MAX_LOOK_S = 1.0
"""Longest interval between a standby's attempts to lead: a killed leader is replaced after this time."""
RENEWALS = 3
"""Number of renewals in the time of a lease."""
ATTEMPTS = 20
"""Number of attempts in the time of a lease to repeat a failed renewal."""
GUARD = 20
"""Answers stop this fraction (one in N) of a lease before its end: the clocks of two hosts run at different rates."""


class LeadView(NamedTuple):
    """The present leader, for answers, metrics and the service manager."""

    role: Literal["leader", "standby"]
    term: int
    """Number of the leader; 0 if unknown."""
    leader: str
    """``host:port``; "": unknown."""
    error: str
    """Why the store's engine does not respond; "" if it does."""


class LeadStep(Enum):
    """The next action."""

    WAIT = "wait"
    TAKE = "take"
    """Read the lease, and take the lead if no scheduler has it."""
    RENEW = "renew"
    END = "end"
    """The lease has ended here: drop the state, become a standby."""


@dataclass(frozen=True, slots=True)
class Lead:
    """This scheduler's knowledge of the lead. The first one knows nothing and reads the lease at once."""

    lease_s: float
    term: int = 0
    """The present term, 0 if unknown."""
    leader: str = ""
    """Address of the leader, ``host:port``; "": unknown, or this scheduler leads."""
    is_own: bool = False
    """Whether ``term`` is this scheduler's."""
    until_s: float = -math.inf
    """Until when it may answer in its own term."""
    next_s: float = -math.inf
    """When to read or renew the lease next."""
    heard_s: float = -math.inf
    """When the store's engine last responded."""
    error: str = ""
    """Why it did not respond the last time, "" if it did."""

    @property
    def look_s(self) -> float:
        """Seconds between two attempts of a standby to lead."""
        return min(MAX_LOOK_S, self.lease_s / RENEWALS)

    def may_answer(self, term: int, now_s: float) -> bool:
        """Whether an answer of ``term`` may be sent at this moment."""
        return self.is_own and self.term == term and now_s < self.until_s

    def find_leader(self, now_s: float) -> str:
        """Return the address of another scheduler that leads, as far as known: an address older than a lease says
        nothing."""
        return self.leader if not self.is_own and now_s - self.heard_s < self.lease_s else ""

    def find_step(self, now_s: float) -> LeadStep:
        if self.is_own and now_s >= self.until_s:
            return LeadStep.END
        if now_s < self.next_s:
            return LeadStep.WAIT
        return LeadStep.RENEW if self.is_own else LeadStep.TAKE

    def wait_s(self, now_s: float, is_asking: bool) -> float | None:
        """Return seconds until the next action if no event arrives; None: never. ``is_asking``: a call to the arbiter
        is running."""
        until_s = min(math.inf if is_asking else self.next_s, self.until_s if self.is_own else math.inf)
        return None if until_s == math.inf else max(until_s - now_s, 0.0)

    def taken(self, lease: Lease, sent_s: float, now_s: float) -> Lead:
        """Return the lead after this scheduler got the lease that it requested at ``sent_s``."""
        return replace(self, term=lease.term, leader="", is_own=True, error="", heard_s=now_s)._leased(sent_s)

    def seen(self, lease: Lease | None, now_s: float) -> Lead:
        term, leader = (self.term, "") if lease is None else (lease.term, lease.leader if lease.left_s > 0 else "")
        return replace(self, term=term, leader=leader, error="", heard_s=now_s, next_s=now_s + self.look_s)

    def renewed(self, sent_s: float, now_s: float) -> Lead:
        """Return the lead after the renewal sent at ``sent_s`` was accepted. A lease that has ended here meanwhile
        stays ended."""
        heard = replace(self, error="", heard_s=now_s)
        return heard._leased(sent_s) if self.may_answer(self.term, now_s) else heard

    def _leased(self, sent_s: float) -> Lead:
        until_s = sent_s + self.lease_s * (1 - 1 / GUARD)
        return replace(self, until_s=until_s, next_s=sent_s + self.lease_s / RENEWALS)

    def failed(self, error: str, now_s: float) -> Lead:
        """Return the lead after the store's engine did not respond: the attempt is soon repeated."""
        again_s = min(self.lease_s / ATTEMPTS, MAX_LOOK_S) if self.is_own else self.look_s
        return replace(self, error=error, next_s=now_s + again_s)

    def ended(self, now_s: float, rest_s: float = 0.0) -> Lead:
        """Return the lead after the end of its own term. It does not try to lead again for ``rest_s``, so that another
        scheduler can."""
        return replace(self, is_own=False, leader="", until_s=-math.inf, next_s=now_s + rest_s)
