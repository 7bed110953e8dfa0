"""Which jobs an operation may lose, and what blocks from above (semantics.md 6.4, 6.5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from cpumond.fairshare.resources import RESOURCES, ZERO, Vector, add, share, subtract
from cpumond.scheduler.decide.placement import satisfaction_of
from cpumond.scheduler.decide.starvation import EPSILON
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    NON_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    Job,
    OperationElement,
    PoolElement,
    Preemptibility,
)
from cpumond.scheduler.model import to_vector

ROUNDING: Final = 1e-9
"""What sums of usage may be off by, as a part of the capacity, limit or total that they are compared with."""


def sort_jobs(element: OperationElement) -> None:
    """Put the active jobs of an operation in the three lists (6.4), if they may have changed (``lists_are_old``).

    In the order of start; U is the usage of all jobs before. A job is non-preemptible while U is below the fair share
    times ``aggressive_preemption_satisfaction_threshold`` on every non-blocked resource, or below the
    ``non_preemptible_resource_usage_threshold`` on all resources that it names; then aggressively preemptible while U
    is below the fair share times ``preemption_satisfaction_threshold``; then preemptible, unless the fair share covers
    the whole demand. A resource is blocked when the fair share covers its demand; if all are, any one is enough.
    """
    if not element.lists_are_old:
        return
    element.lists_are_old = False
    settings = element.tree.config.settings
    covered = _covers_demand(element)
    names = _resources_that_count(element)
    total = element.tree.total
    inner, outer = (
        tuple((element.fair_share[k] * threshold - ROUNDING) * total[k] for k in names)
        for threshold in (
            settings.aggressive_preemption_satisfaction_threshold,
            settings.preemption_satisfaction_threshold,
        )
    )
    least_list = AGGRESSIVELY_PREEMPTIBLE if covered and any(element.demand_share) else PREEMPTIBLE
    meets = any if covered else all
    threshold = element.rules.non_preemptible_threshold if element.rules is not None else None
    status: Preemptibility = NON_PREEMPTIBLE
    before = ZERO
    for job in sorted(element.jobs.values(), key=start_order):
        if status == NON_PREEMPTIBLE:
            safe = threshold is not None and all(u < t for u, t in zip(before, threshold, strict=True))
            if not safe and not meets(before[k] < bound for k, bound in zip(names, inner, strict=True)):
                status = AGGRESSIVELY_PREEMPTIBLE
        if (
            status == AGGRESSIVELY_PREEMPTIBLE
            and least_list == PREEMPTIBLE
            and not meets(before[k] < bound for k, bound in zip(names, outer, strict=True))
        ):
            status = PREEMPTIBLE
        job.preemptibility = status
        before = add(before, job.usage)


def _covers_demand(element: Element) -> bool:
    """Whether all resources are blocked: the fair share covers the demand on each (7.2)."""
    return all(d <= f + ROUNDING for f, d in zip(element.fair_share, element.demand_share, strict=True))


def _resources_that_count(element: Element) -> tuple[int, ...]:
    """The non-blocked resources, or all that the cluster has when all are blocked."""
    total, fair_share, demand_share = element.tree.total, element.fair_share, element.demand_share
    names = tuple(k for k in range(len(RESOURCES)) if total[k] and demand_share[k] > fair_share[k] + ROUNDING)
    return names or tuple(k for k in range(len(RESOURCES)) if total[k])


def is_protected_by_count(element: OperationElement, job_count: int) -> bool:
    """Whether an operation with ``job_count`` active jobs is too small to lose one (6.4, old count rule).

    ``max_unpreemptible_running_job_count`` of the tree, or the operation's if that is less; fewer jobs than the value
    are protected, and as many, too, without ``strict_unpreemptible_running_job_count``.
    """
    limit = unpreemptible_job_count(element)
    if limit is None:
        return False
    strict = element.tree.config.settings.strict_unpreemptible_running_job_count
    return job_count < limit or (job_count == limit and not strict)


def unpreemptible_job_count(element: OperationElement) -> int | None:
    """``max_unpreemptible_running_job_count`` that holds for an operation; None: the count rule is off (6.4)."""
    limit = element.tree.config.settings.max_unpreemptible_running_job_count
    own = element.options.max_unpreemptible_running_job_count
    return limit if limit is None or own is None else min(limit, own)


def local_satisfaction(element: Element, lost: Vector = ZERO) -> float:
    """Usage over fair share of the element itself, not the least of its children (7.2), without ``lost`` of its usage.

    1 is exactly the fair share, infinity no fair share at all.
    """
    usage = share(subtract(element.usage, lost), element.tree.total)
    return satisfaction_of(usage, element.fair_share, element.demand_share)


def blocks(element: Element, victim: OperationElement, aggressive: bool, lost: Vector = ZERO) -> bool:
    """Whether this element, the victim's operation or a pool above it, gives nothing away (6.5 a and b)."""
    settings = element.tree.config.settings
    if settings.preemption_check_starvation and element.starvation_status != "non_starving":
        return True
    if not settings.preemption_check_satisfaction:
        return False
    assert element.rules is not None
    assert victim.rules is not None
    threshold = settings.preemption_satisfaction_threshold
    if aggressive and element.rules.aggressive_preemption and victim.rules.aggressive_preemption:
        threshold = settings.aggressive_preemption_satisfaction_threshold
    return local_satisfaction(element, lost) < threshold + EPSILON


def path_of(element: OperationElement) -> Iterator[OperationElement | PoolElement]:
    """The element and the pools above it without the root."""
    yield element
    for pool in element.ancestors():
        if not pool.is_root:
            yield pool


def is_permitted(job: Job, aggressive: bool) -> bool:
    """Whether the job's own list gives it away at this priority (6.4)."""
    if job.preemptibility == PREEMPTIBLE:
        return True
    rules = job.element.rules
    assert rules is not None
    return aggressive and job.preemptibility == AGGRESSIVELY_PREEMPTIBLE and rules.aggressive_preemption


def may_lose(element: OperationElement) -> bool:
    if element.operation.record.preemption_mode == "graceful":
        return False
    return not is_protected_by_count(element, len(element.jobs))


def start_order(job: Job) -> tuple[float, int]:
    return (job.start_time, job.sequence)


def room_below_limits(element: Element, order: Vector) -> Vector:
    """What is left of the element's limits after ``order``, the tolerance of pools and rounding included."""
    tolerance = ZERO
    if isinstance(element, PoolElement) and element.settings.resource_limits_overcommit_tolerance:
        tolerance = to_vector(element.settings.resource_limits_overcommit_tolerance, 0.0)
    return as_vector(
        limit + extra + limit * ROUNDING - usage - more
        for limit, extra, usage, more in zip(element.limits, tolerance, element.usage, order, strict=True)
    )


def as_vector(numbers: Iterable[float]) -> Vector:
    a, b, c, d, e = numbers
    return (a, b, c, d, e)


def uses(job: Job, excess: Vector) -> bool:
    return any(x > 0.0 and u > 0.0 for x, u in zip(excess, job.usage, strict=True))
