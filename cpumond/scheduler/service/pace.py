"""Adapts the period of heartbeats to the scheduler's load; pure."""

from __future__ import annotations

from typing import Final

BUSY: Final = 0.5
CALM: Final = 0.3
"""Fractions of time in which the event loop's thread works. Above BUSY the heartbeat period grows, below CALM it
shrinks. An update takes the interpreter for a part of the remaining time."""
MOST_S: Final = 10.0
TIMEOUT_SHARE: Final = 0.25
"""The maximum period in seconds, and the maximum period as a fraction of ``node_heartbeat_timeout``."""
SHRINK: Final = 0.8
LOOK_S: Final = 5.0
EASY_PER_S: Final = 1000.0
"""Number of heartbeats per second that keeps the load below BUSY on any host."""


def first_period_s(nodes: int, least_s: float, timeout_s: float) -> float:
    """Return the first period for ``nodes`` nodes. They may have used a longer period under the previous leader. If all
    of them used ``least_s``, the load could be a multiple of what it was."""
    return _bound(nodes / EASY_PER_S, least_s, timeout_s)


def next_period_s(period_s: float, load: float, least_s: float, timeout_s: float) -> float:
    """Return the next period. ``load``: fraction of time worked since the last call, at least ``look_s`` ago."""
    if load > BUSY:
        period_s *= min(load / BUSY, 2.0)
    elif load < CALM:
        period_s *= SHRINK
    return _bound(period_s, least_s, timeout_s)


def look_s(period_s: float) -> float:
    """Return the seconds until the load is checked again. By then all nodes have used ``period_s`` for a while."""
    return max(LOOK_S, 2.5 * period_s)


def _bound(period_s: float, least_s: float, timeout_s: float) -> float:
    return max(min(period_s, MOST_S, timeout_s * TIMEOUT_SHARE), least_s)
