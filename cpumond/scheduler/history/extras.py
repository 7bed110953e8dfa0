"""Extra jobs, those beyond the requests that fit on their node: the work that only reclaimed CPU makes possible; pure.

The jobs of a node are taken in the order of their starts. While the sum of their requests is within the node's capacity
minus the requests of foreign jobs, they would have run without reclaim, too. Later jobs would not. The job with which
the sum first exceeds this limit is extra in part."""

from __future__ import annotations

from typing import Final, NamedTuple

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.elements import Element, Job, Node, PoolElement
from cpumond.scheduler.state import State

EPSILON_CORES: Final = 1e-6


class Extra(NamedTuple):
    """Core-seconds that a pool's jobs used and requested since the last look, and the number of jobs that began."""

    used: float = 0.0
    ordered: float = 0.0
    started: float = 0.0


NO_EXTRA: Final = Extra()


def split_orders(orders: list[float], capacity: float) -> list[float]:
    """Return, in the order of the starts, which part, in [0, 1], of each request is beyond ``capacity``; all in cores.

    >>> split_orders([4.0, 4.0, 2.0], 6.0)
    [0.0, 0.5, 1.0]"""
    parts, total = [], 0.0
    for order in orders:
        total += order
        beyond = min(total - capacity, order)
        parts.append(beyond / order if beyond > EPSILON_CORES else 0.0)
    return parts


def find_extra_jobs(node: Node) -> list[tuple[Job, float]]:
    """Return the active jobs of a node that are extra, each with the part of it that is extra."""
    capacity = max(node.capacity[CPU] - node.foreign_ordered_cores, 0.0)
    if node.ordered_cores <= capacity + EPSILON_CORES:
        return []
    jobs = sorted(node.jobs.values(), key=lambda job: (job.start_time, job.sequence))
    parts = split_orders([job.limits[CPU] for job in jobs], capacity)
    return [(job, part) for job, part in zip(jobs, parts, strict=True) if part]


class Extras:
    """Follows the counters of extra jobs, which stay exact even if a job ends between two looks."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Job, float, float | None, float | None]] = {}
        """Id -> extra job, its extra part, and used and requested core-seconds at the last look; None: not known."""
        self._has_looked = False

    def look(self, state: State, since: float) -> dict[PoolElement, Extra]:
        """Return the amounts of pools since the last look, which was at ``since``; pools include those below them."""
        found: dict[PoolElement, Extra] = {}
        now = {job.id: (job, part) for node in state.nodes.values() for job, part in find_extra_jobs(node)}
        for job, before, used, ordered in self._watched.values():
            # The part may have changed, at an unknown moment since the last look: the mean of both parts is used.
            after = before if not job.is_active else now[job.id][1] if job.id in now else 0.0
            part = (before + after) / 2.0
            _add(found, job, Extra(part * _grown(used, _used(job)), part * _grown(ordered, _ordered(job))))
        for job_id, (job, part) in now.items():
            if job_id in self._watched:
                continue
            if job.start_time > since:
                _add(found, job, Extra(part * _grown(0.0, _used(job)), part * _grown(0.0, _ordered(job)), 1.0))
            elif self._has_looked:  # otherwise an earlier run of the scheduler has counted the job's start
                _add(found, job, Extra(started=1.0))
        self._watched = {job_id: (job, part, _used(job), _ordered(job)) for job_id, (job, part) in now.items()}
        self._has_looked = True
        return found


def _used(job: Job) -> float | None:
    return job.counted[0]


def _ordered(job: Job) -> float | None:
    return job.counted[2]


def _grown(before: float | None, now: float | None) -> float:
    """Return a counter's growth; 0 if a value is not known, or if a crash of the agent reset the counter."""
    return 0.0 if before is None or now is None else max(now - before, 0.0)


def _add(found: dict[PoolElement, Extra], job: Job, extra: Extra) -> None:
    above: Element | None = job.element.parent
    while isinstance(above, PoolElement):
        known = found.get(above, NO_EXTRA)
        found[above] = Extra._make(a + b for a, b in zip(known, extra, strict=True))
        above = above.parent
