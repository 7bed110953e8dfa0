"""Whether this scheduler leads, as values: what it knows of the lease, what to do next, until when it may answer.

All times are seconds of this host's own clock that never steps and goes on while the host sleeps. A lease is counted
from the moment at which its renewal was sent, so that it is over here before it is over in the store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple

from cpumond.scheduler.store import Lease

MAX_LOOK_S = 1.0
"""How often a standby tries to lead, at most: a killed leader is replaced after this long."""
RENEWALS = 3
"""A lease is renewed so many times in its time."""
ATTEMPTS = 20
"""A renewal that failed is tried again so many times in a lease's time."""
GUARD = 20
"""Answers end a part of a lease, one in so many, before it does: the clocks of two hosts do not go alike."""


class LeadView(NamedTuple):
    """Who leads, for answers, metrics and the service manager."""

    role: Literal["leader", "standby"]
    term: int
    """0 where it is not known."""
    leader: str
    """``host:port``; "" where it is not known."""
    error: str
    """Why the store's engine does not answer; "" where it does."""


class LeadStep(Enum):
    """What has to be done now."""

    WAIT = "wait"
    TAKE = "take"
    """Look who leads, and lead where nobody does."""
    RENEW = "renew"
    END = "end"
    """The lease has ended here: drop the state, be a standby."""


@dataclass(frozen=True, slots=True)
class Lead:
    """What a scheduler knows of the lead. The first one knows nothing and looks at once."""

    lease_s: float
    term: int = 0
    """The present term as far as it is known, 0 where it is not."""
    leader: str = ""
    """Who leads in it, ``host:port``; "" where it is not known, or where it is this scheduler."""
    is_own: bool = False
    """Whether ``term`` is this scheduler's."""
    until_s: float = -math.inf
    """Until when it may answer in its own term."""
    next_s: float = -math.inf
    """When to look or to renew next."""
    heard_s: float = -math.inf
    """When the store's engine last answered."""
    error: str = ""
    """Why it did not answer the last time, "" where it did."""

    @property
    def look_s(self) -> float:
        """Seconds between two attempts of a standby to lead."""
        return min(MAX_LOOK_S, self.lease_s / RENEWALS)

    def may_answer(self, term: int, now_s: float) -> bool:
        """Whether an answer of ``term`` may go out at this moment."""
        return self.is_own and self.term == term and now_s < self.until_s

    def find_leader(self, now_s: float) -> str:
        """The address of another scheduler that leads as far as is known: what was heard a lease ago tells nothing."""
        return self.leader if not self.is_own and now_s - self.heard_s < self.lease_s else ""

    def find_step(self, now_s: float) -> LeadStep:
        if self.is_own and now_s >= self.until_s:
            return LeadStep.END
        if now_s < self.next_s:
            return LeadStep.WAIT
        return LeadStep.RENEW if self.is_own else LeadStep.TAKE

    def wait_s(self, now_s: float, is_asking: bool) -> float | None:
        """How long there is nothing to do if nothing happens; None: for ever. ``is_asking``: the arbiter is asked."""
        until_s = min(math.inf if is_asking else self.next_s, self.until_s if self.is_own else math.inf)
        return None if until_s == math.inf else max(until_s - now_s, 0.0)

    def taken(self, lease: Lease, sent_s: float, now_s: float) -> Lead:
        """This scheduler leads, with the lease that it asked for at ``sent_s``."""
        return replace(self, term=lease.term, leader="", is_own=True, error="", heard_s=now_s)._leased(sent_s)

    def seen(self, lease: Lease | None, now_s: float) -> Lead:
        term, leader = (self.term, "") if lease is None else (lease.term, lease.leader if lease.left_s > 0 else "")
        return replace(self, term=term, leader=leader, error="", heard_s=now_s, next_s=now_s + self.look_s)

    def renewed(self, sent_s: float, now_s: float) -> Lead:
        """The renewal that was sent at ``sent_s`` was accepted. A lease that has ended here meanwhile has ended."""
        heard = replace(self, error="", heard_s=now_s)
        return heard._leased(sent_s) if self.may_answer(self.term, now_s) else heard

    def _leased(self, sent_s: float) -> Lead:
        until_s = sent_s + self.lease_s * (1 - 1 / GUARD)
        return replace(self, until_s=until_s, next_s=sent_s + self.lease_s / RENEWALS)

    def failed(self, error: str, now_s: float) -> Lead:
        """The store's engine did not answer: the attempt is made again soon."""
        again_s = min(self.lease_s / ATTEMPTS, MAX_LOOK_S) if self.is_own else self.look_s
        return replace(self, error=error, next_s=now_s + again_s)

    def ended(self, now_s: float, rest_s: float = 0.0) -> Lead:
        """Its own term is over. It does not try to lead again for ``rest_s``, for another one to have the chance."""
        return replace(self, is_own=False, leader="", until_s=-math.inf, next_s=now_s + rest_s)
