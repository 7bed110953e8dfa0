"""Elements with less than their share, for how long, and what they may preempt (semantics.md 6.2, 6.3, 6.8).

Pure: the time is an argument. Changes only ``scheduling_status``, ``starvation_status``, ``below_since`` and
``lists_are_old`` of elements. Times in the code are seconds, options are milliseconds as in YTsaurus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

from cpumond.fairshare.resources import UNLIMITED, ZERO, Vector, share, subtract, sum_vectors
from cpumond.scheduler.decide.placement import wants_jobs
from cpumond.scheduler.elements import Element, OperationElement, PoolElement, SchedulingStatus, Tree, usage_share
from cpumond.scheduler.elements.node_sizes import fits

TargetPriority = Literal["normal", "aggressive", "guarantee"]
"""Priorities of preemptions. "guarantee": for a strong guarantee, in spite of all protection (6.10)."""
Priority = Literal["none", "normal", "aggressive"]

EPSILON: Final = 1e-6
"""Shares and satisfactions less than this apart count as equal (6.2)."""


def update_starvation(tree: Tree, now: float) -> None:
    """Update the states of all elements after a fair-share update; ``now`` is scheduler time in seconds.

    The state machine of section 6.2, on dominant shares. One timer runs from the first update that finds an element
    below its share; the time-out is that of its present state. An element starves when its time-out is over, and is
    normal once it has its share. The job lists of section 6.4 follow the fair share, so they are marked old."""
    tree.root.scheduling_status, tree.root.starvation_status, tree.root.below_since = "normal", "non_starving", None
    tree.updated_at = now
    pools_starve = tree.config.settings.enable_pool_starvation
    for pool in tree.pools.values():
        _move(pool, _find_status_now(pool) if pools_starve else "normal", now)
    for operation in tree.operations.values():
        operation.lists_are_old = True
        status = _find_status_now(operation) if wants_jobs(operation) else "normal"
        if status != "normal" or operation.below_since is not None:
            _move(operation, status, now)


def find_limit(element: Element) -> Element | None:
    """Return the element or the nearest pool above it whose limits or usable nodes allow the element no further job,
    even if the jobs of all other elements ended; None if a job is allowed or the element wants none (6.2)."""
    path: list[Element] = [element, *element.ancestors()]
    # This is called for each operation and pool of an update: most have neither limits nor a filter.
    limited = [
        (above, bounds)
        for above in path
        if (above.limits is not UNLIMITED or above.fitting is not None)
        and (bounds := _bounds_of(above)) is not UNLIMITED
    ]
    found: Element | None = None
    for order in _orders_below(element) if limited else ():
        found = next((each for each, bounds in limited if not fits(subtract(bounds, element.usage), order)), None)
        if found is None:
            return None
    return found


def _bounds_of(element: Element) -> Vector:
    if isinstance(element, PoolElement) and element.settings.resource_limits_overcommit_tolerance:
        return UNLIMITED if element.fitting is None else element.fitting.total
    return element.bounds


def list_wanting(element: Element) -> Iterator[OperationElement]:
    """Yield the operations that want jobs: the element itself, or those below it if it is a pool."""
    if isinstance(element, PoolElement):
        for below in (*element.children.values(), *element.operations.values()):
            yield from list_wanting(below)
    elif isinstance(element, OperationElement) and wants_jobs(element):
        yield element


def _orders_below(element: Element) -> Iterator[Vector]:
    """Yield the requests of jobs that could start next: one of each task; for a gang, all of its jobs together."""
    for each in list_wanting(element):
        orders = each.operation.needed_orders
        if each.operation.record.is_gang:
            yield sum_vectors([order for order, number in orders for _ in range(number)])
        else:
            yield from (order for order, _ in orders)


def _find_status_now(element: Element) -> SchedulingStatus:
    """Return the status, considering limits: the element is not below its share if no preemption could help it."""
    status = _find_status(element)
    return "normal" if status != "normal" and find_limit(element) is not None else status


def _find_status(element: Element) -> SchedulingStatus:
    rules = element.rules
    assert rules is not None
    usage, fair_share = max(usage_share(element)), max(element.fair_share)
    # If the fair share covers the whole demand, the element must get its full share.
    tolerance = 1.0 if max(element.demand_share) < fair_share + EPSILON else rules.tolerance
    guarantee = element.strong_guarantee_share
    if usage > fair_share * tolerance - EPSILON and (guarantee is ZERO or not is_below_guarantee(element)):
        return "normal"
    return "below_min_share" if usage < max(guarantee) else "below_fair_share"


def is_below_guarantee(element: Element) -> bool:
    """Whether an element has less than its strong guarantee times the tree's ``guarantee_tolerance``, and its fair
    share shows that it wants more. Always false in trees without the option (6.10)."""
    tolerance = element.tree.config.settings.guarantee_tolerance
    if tolerance is None or not any(element.strong_guarantee_share):
        return False
    guarantee = min(max(element.strong_guarantee_share), max(element.fair_share))
    return max(usage_share(element)) < guarantee * tolerance - EPSILON


def keeps_guarantee(element: Element, lost: Vector = ZERO) -> bool:
    """Whether an element still has its strong guarantee after losing ``lost`` of its usage (6.10)."""
    if not any(element.strong_guarantee_share):
        return True
    return max(share(subtract(element.usage, lost), element.tree.total)) > max(element.strong_guarantee_share) - EPSILON


def claims_guarantee(element: Element) -> bool:
    """Whether a pool, or an operation with its own guarantee, may preempt protected jobs to reach it (6.10).

    It may do so after it starved for a ``preemptive_scheduling_backoff``, in which each node could give it jobs."""
    if element.starvation_status == "non_starving" or not is_below_guarantee(element):
        return False
    tree, since = element.tree, element.below_since
    wait_s = _timeout_s(element) + tree.config.settings.preemptive_scheduling_backoff / 1e3
    return since is not None and since < tree.updated_at - wait_s


def may_claim(element: OperationElement) -> bool:
    """Whether an operation may preempt protected jobs of others for itself or for a pool above it (6.10)."""
    is_on = element.tree.config.settings.guarantee_tolerance is not None
    return is_on and any(map(claims_guarantee, (element, *element.ancestors())))


def _move(element: Element, status: SchedulingStatus, now: float) -> None:
    element.scheduling_status = status
    element.starvation_status = "non_starving"
    if status == "normal":
        element.below_since = None
        return
    if element.below_since is None:
        element.below_since = now
    since, rules = element.below_since, element.rules
    assert rules is not None
    if since < now - _timeout_s(element):
        element.starvation_status = "starving"
        if rules.aggressive_starvation and since < now - rules.aggressive_timeout_s * _size_factor(element):
            element.starvation_status = "aggressively_starving"


def _timeout_s(element: Element) -> float:
    rules = element.rules
    assert rules is not None
    below_min_share = element.scheduling_status == "below_min_share"
    timeout_s = rules.min_share_timeout_s if below_min_share else rules.fair_share_timeout_s
    return timeout_s * _size_factor(element)


def _size_factor(element: Element) -> float:
    """Return the factor by which the time-out of an operation with few jobs is shorter (6.2)."""
    if not isinstance(element, OperationElement):
        return 1.0
    coefficient = element.tree.config.settings.job_count_preemption_timeout_coefficient
    return min(1.0, element.operation.needed_job_count / coefficient)


def starves_in_s(element: Element, now: float) -> float | None:
    """Return the seconds until the element starves if nothing changes: 0 if it starves already; None if it has its
    share (6.2) or there was no update since a restart."""
    if element.below_since is None or element.rules is None:
        return None
    if element.starvation_status != "non_starving":
        return 0.0
    return max(0.0, element.below_since + _timeout_s(element) - now)


def priority_of(element: OperationElement) -> Priority:
    """Return the priority at which an operation preempts jobs of others (6.3). Its own state counts and, if the tree's
    ``scheduling_preemption_priority_scope`` is "operation_and_ancestors", the states of the pools above."""
    starving = starving_element(element)
    if starving is None:
        return "none"
    return "aggressive" if starving.starvation_status == "aggressively_starving" else "normal"


def starving_element(element: OperationElement) -> OperationElement | PoolElement | None:
    """Return the element whose state gives an operation its priority (6.3): the operation or a pool above it, whichever
    starves most severely; of equal ones the nearest."""
    starving: OperationElement | PoolElement | None = None
    if element.starvation_status == "aggressively_starving":
        return element
    if element.starvation_status == "starving":
        starving = element
    if element.tree.config.settings.scheduling_preemption_priority_scope == "operation_and_ancestors":
        for pool in element.ancestors():
            if pool.starvation_status == "aggressively_starving":
                return pool
            if pool.starvation_status == "starving" and starving is None:
                starving = pool
    return starving


def list_priorities(element: OperationElement) -> list[TargetPriority]:
    """Return the priorities at which an operation preempts jobs, the weakest first."""
    usual = priority_of(element)
    claimed: list[TargetPriority] = ["guarantee"] if may_claim(element) else []
    return claimed if usual == "none" else [usual, *claimed]


def still_starves(element: OperationElement, priority: TargetPriority) -> bool:
    """Whether the element that gave this priority at the last update is still below its share (6.2, 6.3)."""
    if priority == "guarantee":
        return may_claim(element)
    with_ancestors = element.tree.config.settings.scheduling_preemption_priority_scope == "operation_and_ancestors"
    above: Iterable[Element] = (element, *element.ancestors()) if with_ancestors else (element,)
    wanted = ("aggressively_starving",) if priority == "aggressive" else ("aggressively_starving", "starving")
    return any(each.starvation_status in wanted and _find_status(each) != "normal" for each in above)


def starving_operations(tree: Tree) -> list[OperationElement]:
    """Return operations that may preempt: they run, need jobs, are not suspended, and have a priority (6.3). Graceful
    ones are included: that mode concerns how their own jobs are preempted (6.7). Sorted as in the tree."""
    return [element for element in tree.operations.values() if wants_jobs(element) and list_priorities(element)]
