"""Which of several schedulers a client asks next, and when; and which answers it refuses because of their term.

One of them leads, the others stand by: they answer 503 and name the leader. Whoever asks keeps to the address that took
its last request. Each other address has a time from which it is asked again, drawn at random: a thousand clients that
lose their scheduler at one moment do not come to the next one at one moment. Pure: the time and the dice are given.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from cpumond.core.settings import is_loopback

FIRST_RETRY_S: Final = 1.0
"""Upper bound of the wait after the first failure in a row; it doubles with each further one."""

SPREAD: Final = 0.5
"""A standby is asked again after its period, give or take this part of it."""

PATIENCE: Final = 2.0
"""An address that kept a client waiting in vain is left alone for so many times as long, where there is another one."""

LONG_PERIOD_S: Final = 5.0
"""A node with a longer period asks a standby twice in it, so that it is not the last to find the new leader."""

LOST_LEAD: Final = (
    "this scheduler lost the lead while it answered: whether the request was carried out is not known; ask the leader"
)
"""The error of a 503 in place of an answer that was not ready in time."""

_LEADER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_PORTS: Final = {"http": 80, "https": 443}
_UNSPECIFIED: Final = ("0.0.0.0", "::")  # noqa: S104 - refused, not listened on


def backoff_s(failures: int, retry_max_s: float, rng: random.Random) -> float:
    """Seconds to wait after ``failures`` (>= 0) failures in a row, in [0, retry_max_s]; 0 after none."""
    if failures == 0:
        return 0.0
    return rng.uniform(0.0, min(retry_max_s, FIRST_RETRY_S * 2.0 ** min(failures - 1, 30)))


def standby_period_s(heartbeat_period_s: float) -> float:
    """How often a node whose heartbeats have this period asks a standby: as often, with long periods up to twice."""
    return min(heartbeat_period_s, max(LONG_PERIOD_S, heartbeat_period_s / 2))


def is_standby(status: int, leader: str | None, error: str) -> bool:
    """Whether an answer, by its HTTP status, ``LEADER_HEADER`` and error, is of a scheduler that does not lead."""
    return status == 503 and (leader is not None or was_not_done(error))


def was_not_done(error: str) -> bool:
    """Whether the scheduler stood by when the request came, so that it may be sent to another one. Not so where it lost
    the lead before it could answer."""
    return error.startswith("standby")


class Terms:
    """The highest term seen, None before the first: what is lower comes from a scheduler that lost the lead."""

    def __init__(self) -> None:
        self.highest: int | None = None
        self.refused_total = 0

    def accept(self, term: int | None) -> bool:
        """Whether an answer of ``term`` may be used; None: its scheduler is alone on its store and has no terms."""
        if term is None:
            return True
        if self.highest is not None and term < self.highest:
            self.refused_total += 1
            return False
        self.highest = term
        return True


class _Address(msgspec.Struct):
    failures: int = 0
    """In a row."""
    due_s: float = -math.inf
    """It is not asked before."""
    asked_at_s: float = -math.inf
    took_s: float = 0.0
    """How long it took to answer, or not to."""


class Route:
    """The next of ``addresses`` (one or more, ``http://host:port`` with or without a path) to ask.

    ``current`` is it. Each request is followed by one call of ``taken``, ``refused``, ``unanswered`` or ``standby``;
    all but the first return how many seconds (>= 0) to wait before ``current``, which they may have changed, is asked.
    ``now_s`` is of any clock that never steps; ``retry_max_s`` bounds the wait after failures; ``rng`` draws the waits.
    With one address and no standby the waits are ``backoff_s`` of the failures in a row.
    """

    def __init__(self, addresses: Sequence[str], retry_max_s: float, rng: random.Random) -> None:
        self._given = tuple(dict.fromkeys(addresses))
        self._retry_max_s = retry_max_s
        self._rng = rng
        self._states = {address: _Address() for address in self._given}
        self.current = self._given[0]

    def taken(self) -> None:
        """It took the request: it is kept to, and all that is known of others is out of date."""
        self._states = {address: _Address() for address in dict.fromkeys((*self._given, self.current))}

    def refused(self, now_s: float) -> float:
        """It understood the request and refused it, as another one would: it is asked again."""
        state = self._states[self.current]
        state.failures += 1
        pause_s = backoff_s(state.failures, self._retry_max_s, self._rng)
        state.due_s = now_s + pause_s
        return pause_s

    def unanswered(self, began_at_s: float, now_s: float) -> float:
        """It was asked at ``began_at_s`` and gave no answer, or none that can be used: the next one is asked."""
        state = self._states[self.current]
        state.failures += 1
        state.asked_at_s, state.took_s = now_s, max(now_s - began_at_s, 0.0)
        pause_s = backoff_s(state.failures, self._retry_max_s, self._rng)
        if len(self._states) > 1:
            pause_s = max(pause_s, PATIENCE * state.took_s)
        state.due_s = now_s + pause_s
        return self._move(now_s)

    def standby(self, leader: str | None, period_s: float, began_at_s: float, now_s: float) -> float:
        """It stands by. ``leader``: the address that it names; ``period_s``: how often it may be asked again."""
        state = self._states[self.current]
        state.failures = 0
        state.asked_at_s, state.took_s = now_s, max(now_s - began_at_s, 0.0)
        # Several standbys are asked in turn, together as often as one.
        standbys = sum(each.failures == 0 and each.asked_at_s > -math.inf for each in self._states.values())
        state.due_s = now_s + standbys * period_s * self._rng.uniform(1.0 - SPREAD, 1.0 + SPREAD)
        named = self._find(leader)
        if named is not None and named != self.current:
            if named not in self._states:
                # At most one address that is not of the configuration.
                kept = (*self._given, self.current)
                self._states = {each: at for each, at in self._states.items() if each in kept}
                self._states[named] = _Address()
            # At once, but where it was asked in vain just now: what the standby knows of the leader may be old.
            other = self._states[named]
            other.due_s = min(other.due_s, other.asked_at_s + PATIENCE * max(period_s, other.took_s))
        return self._move(now_s, named)

    def _move(self, now_s: float, named: str | None = None) -> float:
        """Go to the address that may be asked first; of those that may be asked now, to the ``named`` one."""
        self.current = min(
            self._states, key=lambda address: (max(self._states[address].due_s, now_s), address != named)
        )
        return max(self._states[self.current].due_s - now_s, 0.0)

    def _find(self, leader: str | None) -> str | None:
        """The address of the scheduler that a standby names: a configured one of that host and port, else a new one."""
        place = parse_leader(leader)
        if place is None:
            return None
        parts = urlsplit(self.current)
        host, port = place
        if is_loopback(host) and not is_loopback(parts.hostname or ""):
            return None  # that is the leader's own loopback, not ours
        for address in self._given:
            given = urlsplit(address)
            if (given.hostname, given.port or _PORTS.get(given.scheme)) == (host, port):
                return address
        if parts.scheme not in _PORTS:
            return None  # by a unix socket it is not told how the leader's address is asked
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def parse_leader(text: str | None) -> tuple[str, int] | None:
    """Host, in lower case and without brackets, and port of a leader's header; None where that is no such address."""
    match = _LEADER.fullmatch(text or "")
    if match is None or len(match[1]) > 255:
        return None
    host, port = match[1].strip("[]").lower(), int(match[2])
    return (host, port) if 1 <= port <= 65535 and host not in _UNSPECIFIED else None
