"""Starts that a pool's ``max_operation_count`` refused recently. Not stored: a scheduler that takes over has none.
Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

REFUSED_S: Final = 3600.0
"""Seconds for which a refusal is reported."""
_STEP_S: Final = 60.0
"""Refusals within one such span are kept as one entry."""
_MAX_POOLS: Final = 1000
"""Beyond this the pools without refusals for longest are dropped: users choose the names of pools."""


@dataclass(slots=True)
class _Entry:
    at: float
    limit: int
    starts: int = 0
    cores: float = 0.0


class RefusedStarts:
    """Counts by tree and pool of the last REFUSED_S, accurate to a minute."""

    def __init__(self) -> None:
        self._by_pool: dict[tuple[str, str], deque[_Entry]] = {}

    def note(self, tree: str, pool: str, limit: int, cores: float, now: float) -> None:
        """Count one more at ``now`` (seconds since 1970), whose jobs request ``cores`` in all; ``limit``: the one
        reached."""
        entries = self._by_pool.pop((tree, pool), deque(maxlen=int(REFUSED_S / _STEP_S) + 1))
        self._by_pool[tree, pool] = entries
        while len(self._by_pool) > _MAX_POOLS:
            del self._by_pool[next(iter(self._by_pool))]
        if not entries or now - entries[-1].at >= _STEP_S or limit != entries[-1].limit:
            entries.append(_Entry(now, limit))
        entries[-1].starts += 1
        entries[-1].cores += cores

    def count(self, tree: str, pool: str, limit: int, now: float) -> tuple[int, float]:
        """Return how many starts the pool refused in the last REFUSED_S, and the cores that their jobs would have
        requested.

        Refusals by a limit below ``limit``, the present one, are not counted: it was raised since.
        """
        entries = self._by_pool.get((tree, pool), ())
        late = [each for each in entries if now - each.at < REFUSED_S and each.limit >= limit]
        return sum(each.starts for each in late), sum(each.cores for each in late)
