"""About a pool: whether it starves, or has less than its guarantee without starving. Pure (semantics.md 6.2)."""

from __future__ import annotations

import itertools
from typing import Final

from cpumond.core.measures import count_cores, format_cores, format_span
from cpumond.core.words import count
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.answers.standing import find_standing
from cpumond.scheduler.decide.admission import find_full
from cpumond.scheduler.decide.protection import describe_protections
from cpumond.scheduler.decide.snapshot import element_name
from cpumond.scheduler.decide.starvation import list_priorities, list_wanting, starves_in_s
from cpumond.scheduler.elements import OperationElement, PoolElement

LEAST: Final = 0.005


def describe_pool(pool: PoolElement, now: float) -> str:
    """Return the sentence about a pool; "" for the root, which never starves."""
    if pool.parent is None:
        return ""
    if pool.starvation_status != "non_starving":
        return f"{pool.starvation_status.replace('_', ' ')}, {_since(pool, now)}{_why_starving(pool, now)}"
    left_s = starves_in_s(pool, now)
    if left_s is not None:
        return f"starves in {format_span(left_s)}, {_since(pool, now)}"
    guarantee = pool.strong_guarantee_share[CPU] * pool.tree.total[CPU]
    due = min(guarantee, pool.demand[CPU] + pool.waiting[CPU])
    allotted = pool.usage[CPU]
    if pool.waiting[CPU] <= LEAST:
        return f"not starving: it {find_standing(pool).text}"
    waiting = f"operations that do not run yet want {count_cores(pool.waiting[CPU])}{_why_pending(pool)}"
    if allotted >= due - LEAST:
        return f"not starving, but {waiting}"
    amounts = f"{format_cores(allotted)} of {format_cores(guarantee)} guaranteed cores"
    return f"not starving, but it is allocated {amounts}: {waiting}"


def _since(pool: PoolElement, now: float) -> str:
    what = "guarantee" if pool.scheduling_status == "below_min_share" else "fair share"
    return f"below its {what} for {format_span(now - (pool.below_since or now))}"


def _why_starving(pool: PoolElement, now: float) -> str:
    """Return which rule protects most of the jobs that the pool could replace."""
    for element in list_wanting(pool):
        for priority in list_priorities(element)[-1:]:
            return "".join(f": {text}" for text in itertools.islice(describe_protections(element, priority, now), 1))
    return ""


def _why_pending(pool: PoolElement) -> str:
    element = next((each for each in pool.tree.queue.values() if _is_below(each, pool)), None)
    full = None if element is None else find_full(element)
    if full is None:
        return ""
    running = count(full.running_operation_count, "operation")
    return f", because {element_name(full)} runs {running} of at most {full.max_running_operation_count}"


def _is_below(element: OperationElement, pool: PoolElement) -> bool:
    return bool(element.waiting[CPU]) and any(each is pool for each in element.ancestors())
