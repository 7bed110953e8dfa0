"""Adapts the period of heartbeats to the scheduler's load; pure."""

from __future__ import annotations

from typing import Final

BUSY: Final = 0.5
CALM: Final = 0.3
"""Fraction of its time that the loop's thread works: above BUSY periods grow, below CALM they shrink. An update takes
the interpreter for part of the rest."""
MOST_S: Final = 10.0
TIMEOUT_SHARE: Final = 0.25
"""The longest period, also as a fraction of ``node_heartbeat_timeout``."""
SHRINK: Final = 0.8
LOOK_S: Final = 5.0
EASY_PER_S: Final = 1000.0
"""Heartbeats per second that stay below BUSY on any host."""


def first_period_s(nodes: int, least_s: float, timeout_s: float) -> float:
    """Return the first period. The ``nodes`` may have used a longer one under the previous scheduler; all of them at
    ``least_s`` could be a multiple of that load."""
    return _bound(nodes / EASY_PER_S, least_s, timeout_s)


def next_period_s(period_s: float, load: float, least_s: float, timeout_s: float) -> float:
    """Return the next period for nodes; ``load`` is the fraction since the last call, at least ``look_s`` ago."""
    if load > BUSY:
        period_s *= min(load / BUSY, 2.0)
    elif load < CALM:
        period_s *= SHRINK
    return _bound(period_s, least_s, timeout_s)


def look_s(period_s: float) -> float:
    """Return the seconds until the load is checked again: by then all nodes have received ``period_s`` and used it for
    a while."""
    return max(LOOK_S, 2.5 * period_s)


def _bound(period_s: float, least_s: float, timeout_s: float) -> float:
    return max(min(period_s, MOST_S, timeout_s * TIMEOUT_SHARE), least_s)
