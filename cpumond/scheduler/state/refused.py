"""Starts that a pool's ``max_operation_count`` refused recently; not stored, empty after a take-over. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

REFUSED_S: Final = 3600.0
"""Seconds for which a refusal is reported."""
_STEP_S: Final = 60.0
"""Seconds in which refusals are counted in one entry."""
_MAX_POOLS: Final = 1000
"""Maximum number of pools: users may name many. Those whose last refusal is oldest are dropped."""


@dataclass(slots=True)
class _Entry:
    at: float
    limit: int
    starts: int = 0
    cores: float = 0.0


class RefusedStarts:
    """Counts of refusals in the last REFUSED_S by tree and pool, accurate to a minute."""

    def __init__(self) -> None:
        self._by_pool: dict[tuple[str, str], deque[_Entry]] = {}

    def note(self, tree: str, pool: str, limit: int, cores: float, now: float) -> None:
        """Count one more refused start. ``limit``: the limit that it would exceed. ``cores``: the request of all its
        jobs. ``now``: seconds since 1970."""
        entries = self._by_pool.pop((tree, pool), deque(maxlen=int(REFUSED_S / _STEP_S) + 1))
        self._by_pool[tree, pool] = entries
        while len(self._by_pool) > _MAX_POOLS:
            del self._by_pool[next(iter(self._by_pool))]
        if not entries or now - entries[-1].at >= _STEP_S or limit != entries[-1].limit:
            entries.append(_Entry(now, limit))
        entries[-1].starts += 1
        entries[-1].cores += cores

    def count(self, tree: str, pool: str, limit: int, now: float) -> tuple[int, float]:
        """How many starts the pool refused in the last REFUSED_S, and the cores of their jobs.

        Refusals by a limit lower than ``limit``, the present limit, are not counted: the limit was raised since."""
        entries = self._by_pool.get((tree, pool), ())
        late = [each for each in entries if now - each.at < REFUSED_S and each.limit >= limit]
        return sum(each.starts for each in late), sum(each.cores for each in late)
