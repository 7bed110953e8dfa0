"""Choose which scheduler a client asks next, and when, and reject answers of outdated terms.

One scheduler leads; the others are standbys, which answer 503 and name the leader. A client stays with the address that
accepted its last request. For each other address, the time of the next request is drawn at random: a thousand clients
that lose their scheduler at the same moment must not reach the next one at the same moment. Pure: time and random
numbers are arguments."""

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
"""Upper bound of the wait after the first failure; it doubles with each further failure in a row."""

SPREAD: Final = 0.5
"""The time until a standby is asked again is, at random, shorter or longer by at most this fraction."""

PATIENCE: Final = 2.0
"""How long an address that did not answer is avoided if others exist, as a multiple of the wait for its answer."""

LONG_PERIOD_S: Final = 5.0
"""A node with a longer heartbeat period asks a standby up to twice per period, to find a new leader earlier."""

LOST_LEAD: Final = (
    "this scheduler lost the lead while it answered: whether the request was carried out is not known; ask the leader"
)
"""The error of the 503 that a scheduler sends if it lost the lead before its answer was ready."""

_LEADER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_PORTS: Final = {"http": 80, "https": 443}
_UNSPECIFIED: Final = ("0.0.0.0", "::")  # noqa: S104 - refused, not listened on


def backoff_s(failures: int, retry_max_s: float, rng: random.Random) -> float:
    """Return the seconds to wait after ``failures`` (>= 0) failures in a row, in [0, retry_max_s]; 0 after none."""
    return rng.uniform(0.0, min(retry_max_s, FIRST_RETRY_S * 2.0 ** min(failures - 1, 30))) if failures else 0.0


def standby_period_s(heartbeat_period_s: float) -> float:
    """Return the period at which a node asks a standby: its heartbeat period, or half of that if it is long."""
    return min(heartbeat_period_s, max(LONG_PERIOD_S, heartbeat_period_s / 2))


def is_standby(status: int, leader: str | None, error: str) -> bool:
    """Return whether an answer (HTTP status, ``LEADER_HEADER``, error) is from a scheduler that does not lead."""
    return status == 503 and (leader is not None or was_not_done(error))


def was_not_done(error: str) -> bool:
    """Return whether the scheduler was a standby when the request came; if so, a different one may be asked safely.
    False if it lost the lead before it could answer."""
    return error.startswith("standby")


class Terms:
    """The highest term seen, None before the first. A lower term is from a scheduler that lost the lead."""

    def __init__(self) -> None:
        self.highest: int | None = None
        self.refused_total = 0

    def accept(self, term: int | None) -> bool:
        """Whether an answer with ``term`` may be used. ``term`` None: a scheduler alone on its store has none."""
        if term is None:
            return True
        if self.highest is not None and term < self.highest:
            self.refused_total += 1
            return False
        self.highest = term
        return True


class _Address(msgspec.Struct):
    failures: int = 0
    """Number of failures in a row."""
    due_s: float = -math.inf
    """Earliest time of the next request."""
    asked_at_s: float = -math.inf
    took_s: float = 0.0
    """Seconds until the last request was answered or given up."""


class Route:
    """Chooses the address to ask next among ``addresses`` (one or more ``http://host:port``, with or without a path).

    ``current`` is the address to ask next. After each request, one of ``taken``, ``refused``, ``unanswered`` and
    ``standby`` must be called. All but ``taken`` may change ``current``, and return the seconds (>= 0) to wait before
    ``current`` is asked. ``now_s`` is of any clock that never steps; ``retry_max_s`` bounds the wait after failures;
    ``rng`` draws the waits. With one address and no standby, the wait is ``backoff_s`` of the failures in a row."""

    def __init__(self, addresses: Sequence[str], retry_max_s: float, rng: random.Random) -> None:
        self._given = tuple(dict.fromkeys(addresses))
        self._retry_max_s = retry_max_s
        self._rng = rng
        self._states = {address: _Address() for address in self._given}
        self.current = self._given[0]

    def taken(self) -> None:
        """Record success: the client stays with this address and forgets past results of the others."""
        self._states = {address: _Address() for address in dict.fromkeys((*self._given, self.current))}

    def refused(self, now_s: float) -> float:
        """Record that the request was refused, as any scheduler would refuse it: ask the same address again."""
        state = self._states[self.current]
        state.failures += 1
        pause_s = backoff_s(state.failures, self._retry_max_s, self._rng)
        state.due_s = now_s + pause_s
        return pause_s

    def unanswered(self, began_at_s: float, now_s: float) -> float:
        """Record that the request of ``began_at_s`` got no usable answer: ask the next address."""
        state = self._states[self.current]
        state.failures += 1
        state.asked_at_s, state.took_s = now_s, max(now_s - began_at_s, 0.0)
        pause_s = backoff_s(state.failures, self._retry_max_s, self._rng)
        if len(self._states) > 1:
            pause_s = max(pause_s, PATIENCE * state.took_s)
        state.due_s = now_s + pause_s
        return self._move(now_s)

    def standby(self, leader: str | None, period_s: float, began_at_s: float, now_s: float) -> float:
        """Record a standby's answer. ``leader``: the address that the standby names. ``period_s``: the period after
        which the standby is asked again."""
        state = self._states[self.current]
        state.failures = 0
        state.asked_at_s, state.took_s = now_s, max(now_s - began_at_s, 0.0)
        # Several standbys are asked in turn, so that they get as many requests in total as a single one would.
        standbys = sum(each.failures == 0 and each.asked_at_s > -math.inf for each in self._states.values())
        state.due_s = now_s + standbys * period_s * self._rng.uniform(1.0 - SPREAD, 1.0 + SPREAD)
        named = self._find(leader)
        if named is not None and named != self.current:
            if named not in self._states:
                # Keep at most one address that is not from the configuration.
                kept = (*self._given, self.current)
                self._states = {each: at for each, at in self._states.items() if each in kept}
                self._states[named] = _Address()
            # Ask the leader at once, unless it failed to answer just now: the standby may name an outdated leader.
            other = self._states[named]
            other.due_s = min(other.due_s, other.asked_at_s + PATIENCE * max(period_s, other.took_s))
        return self._move(now_s, named)

    def _move(self, now_s: float, named: str | None = None) -> float:
        """Move to the address that may be asked first; if several may be asked now, prefer ``named``."""
        self.current = min(self._states, key=lambda each: (max(self._states[each].due_s, now_s), each != named))
        return max(self._states[self.current].due_s - now_s, 0.0)

    def _find(self, leader: str | None) -> str | None:
        """Return the leader's address: the configured one with the host and port in ``leader``, else a new one."""
        place = parse_leader(leader)
        if place is None:
            return None
        parts = urlsplit(self.current)
        host, port = place
        if is_loopback(host) and not is_loopback(parts.hostname or ""):
            return None  # it is the loopback of the leader's host, not of this one
        for address in self._given:
            given = urlsplit(address)
            if (given.hostname, given.port or _PORTS.get(given.scheme)) == (host, port):
                return address
        if parts.scheme not in _PORTS:
            return None  # a unix socket does not show which scheme the leader's address needs
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def parse_leader(text: str | None) -> tuple[str, int] | None:
    """Parse a leader header to host (lower case, no brackets) and port; None if it is no address."""
    match = _LEADER.fullmatch(text or "")
    if match is None or len(match[1]) > 255:
        return None
    host, port = match[1].strip("[]").lower(), int(match[2])
    return (host, port) if 1 <= port <= 65535 and host not in _UNSPECIFIED else None
