"""Jobs that may be preempted, and jobs that must end though no job needs their place (semantics.md 1.9, 6.4 to 6.7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from cpumond.core.words import quoted
from cpumond.fairshare.resources import (
    CPU,
    RESOURCES,
    UNLIMITED,
    ZERO,
    Vector,
    add,
    dominates,
    share,
    subtract,
    sum_vectors,
)
from cpumond.scheduler.decide.cost import lost_core_seconds, spared_until
from cpumond.scheduler.decide.placement import satisfaction_of
from cpumond.scheduler.decide.preemption_record import describe_shares, format_name, format_use
from cpumond.scheduler.decide.snapshot import limits_beside, sum_kept
from cpumond.scheduler.decide.starvation import EPSILON
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    NON_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    Job,
    Node,
    OperationElement,
    PoolElement,
    Preemptibility,
)
from cpumond.scheduler.model import to_vector

ROUNDING: Final = 1e-9
"""Largest rounding error of a sum of usage, as a fraction of the capacity, limit or total compared with it."""


def sort_jobs(element: OperationElement) -> None:
    """Sort the active jobs of an operation into the three lists (6.4), if they may have changed (``lists_are_old``).

    U of a job is the usage of all jobs sorted before it. Jobs are sorted by start or, with ``preempt_cheapest_first``,
    by lost work, the most first: what the job would have lost if stopped at the last update, divided by its size.
    - Non-preemptible: while U is below the fair share times ``aggressive_preemption_satisfaction_threshold`` on every
      non-blocked resource, or below ``non_preemptible_resource_usage_threshold`` on all resources that it names.
    - Then aggressively preemptible: while U is below the fair share times ``preemption_satisfaction_threshold``.
    - The rest is preemptible; if the fair share covers the whole demand, it is aggressively preemptible, too.
    A resource is blocked if the fair share covers the demand for it; if all are blocked, U below the bound on any one
    resource is enough."""
    if not element.lists_are_old:
        return
    element.lists_are_old = False
    settings = element.tree.config.settings
    # If the fair share covers the demand for each resource, all of them are blocked (7.2).
    covered = all(d <= f + ROUNDING for f, d in zip(element.fair_share, element.demand_share, strict=True))
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
    jobs = sorted(element.jobs.values(), key=start_order)
    if settings.preempt_cheapest_first:
        jobs.sort(key=_loss_by_size, reverse=True)
    for job in jobs:
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


def _loss_by_size(job: Job) -> float:
    """Return the job's loss at the last update divided by the fraction of the tree's resources that the job takes."""
    size = max(share(job.usage, job.element.tree.total))
    lost = lost_core_seconds(job, job.element.tree.updated_at)
    return lost / size if size else lost


def _resources_that_count(element: Element) -> tuple[int, ...]:
    """Return the non-blocked resources, or all resources of the cluster if all are blocked."""
    total, fair_share, demand_share = element.tree.total, element.fair_share, element.demand_share
    names = tuple(k for k in range(len(RESOURCES)) if total[k] and demand_share[k] > fair_share[k] + ROUNDING)
    return names or tuple(k for k in range(len(RESOURCES)) if total[k])


def is_protected_by_count(element: OperationElement, job_count: int) -> bool:
    """Whether an operation with ``job_count`` active jobs is too small to lose one (6.4, old count rule). The limit is
    the tree's ``max_unpreemptible_running_job_count``, or the operation's if that is lower. Operations with fewer jobs
    are protected; without ``strict_unpreemptible_running_job_count`` also those with exactly this number."""
    limit = unpreemptible_job_count(element)
    if limit is None:
        return False
    strict = element.tree.config.settings.strict_unpreemptible_running_job_count
    return job_count < limit or (job_count == limit and not strict)


def unpreemptible_job_count(element: OperationElement) -> int | None:
    """Return the ``max_unpreemptible_running_job_count`` of an operation; None if the count rule is off (6.4)."""
    limit = element.tree.config.settings.max_unpreemptible_running_job_count
    own = element.options.max_unpreemptible_running_job_count
    return limit if limit is None or own is None else min(limit, own)


def local_satisfaction(element: Element, lost: Vector = ZERO) -> float:
    """Return the element's own usage, without ``lost``, divided by its own fair share; its children do not count (7.2).
    1: it has exactly its fair share; infinity: it has no fair share."""
    usage = share(subtract(element.usage, lost), element.tree.total)
    return satisfaction_of(usage, element.fair_share, element.demand_share)


def blocks(element: Element, victim: OperationElement, aggressive: bool, lost: Vector = ZERO) -> bool:
    """Whether this element, the victim's operation or a pool above it, may lose no job (6.5 a and b)."""
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
    """Yield the element and the pools above it, except the root."""
    yield element
    for pool in element.ancestors():
        if not pool.is_root:
            yield pool


def is_permitted(job: Job, aggressive: bool) -> bool:
    """Whether the job's list allows its preemption at this priority (6.4)."""
    if job.preemptibility == PREEMPTIBLE:
        return True
    rules = job.element.rules
    assert rules is not None
    return aggressive and job.preemptibility == AGGRESSIVELY_PREEMPTIBLE and rules.aggressive_preemption


def may_lose(element: OperationElement, by_guarantee: bool = False) -> bool:
    """Whether an operation's mode and number of jobs let it lose jobs. A claimed guarantee overrides the number
    (6.10)."""
    is_graceful = element.operation.record.preemption_mode == "graceful"
    return not is_graceful and (by_guarantee or not is_protected_by_count(element, len(element.jobs)))


def stop_order(job: Job) -> tuple[bool, float, int]:
    """Return the key that sorts equally protected jobs; the greatest ends first. Jobs whose end does not fail their
    operation come before all others, then the last started."""
    return (not job.task.fail_on_job_restart, job.start_time, job.sequence)


def start_order(job: Job) -> tuple[float, int]:
    return (job.start_time, job.sequence)


def room_below_limits(element: Element, order: Vector, kept: Vector = ZERO) -> Vector:
    """Return what is left of the element's limits after ``order`` and the resources ``kept`` for pools that do not lend
    them (2.17). The result allows for rounding and for a pool's tolerance."""
    tolerance = ZERO
    if isinstance(element, PoolElement) and element.settings.resource_limits_overcommit_tolerance:
        tolerance = to_vector(element.settings.resource_limits_overcommit_tolerance, 0.0)
    return as_vector(
        limit + extra + limit * ROUNDING - usage - more
        for limit, extra, usage, more in zip(limits_beside(element, kept), tolerance, element.usage, order, strict=True)
    )


def rooms_above(
    target: OperationElement, order: Vector, lost: Mapping[Element, Vector]
) -> Iterator[tuple[int, Vector]]:
    """Yield the index of each limited pool above ``target``, and what is left below its limits after ``lost`` has ended
    and ``order`` has started."""
    for depth, (pool, kept) in enumerate(sum_kept(target, lost)):
        if kept is not ZERO or not (pool.is_root or pool.limits is UNLIMITED):
            gone = lost.get(pool, ZERO)
            if pool.is_root:
                gone = sum_vectors([ZERO, *(lost[each] for each in lost if each.parent is pool)])
            yield depth, add(room_below_limits(pool, order, kept), gone)


def as_vector(numbers: Iterable[float]) -> Vector:
    a, b, c, d, e = numbers
    return (a, b, c, d, e)


def uses(usage: Vector, excess: Vector) -> bool:
    """Whether ``usage`` contains a resource that is in excess."""
    return any(x > 0.0 and u > 0.0 for x, u in zip(excess, usage, strict=True))


def find_limit_violators(node: Node) -> list[tuple[Job, Element, str]]:
    """Return jobs of this node that must end because their operation or a pool above it exceeds its limits (6.6).

    Each job comes with the nearest element that exceeds its limits, and the reason. The last started come first. Only
    jobs that use the excess resource end, and only until the limits hold. A gang is returned once: all of its jobs end,
    on any nodes. A pool's ``resource_limits_overcommit_tolerance`` is allowed.

    Candidates are the jobs that could be preempted at some priority, by their list (6.4), the count rule and all
    elements above them (6.5); jobs that only targets inside a blocking pool may preempt are no candidates. Lists and
    counts protect from other operations, not from a limit: if an element above its limit has no candidate left on any
    online node, its other jobs on this node end. So a lowered ``resource_limits`` ends jobs, whatever their number."""
    jobs = [job for job in node.jobs.values() if job.is_active]
    above_all = {above for element in _operations_of(jobs) for above in (element, *element.ancestors())}
    limited = [above for above in above_all if above.limits is not UNLIMITED and above.parent is not None]
    if not any(max(_excess(above, ZERO)) > 0.0 for above in limited):
        return []
    jobs.sort(key=stop_order, reverse=True)
    lost: dict[Element, Vector] = {}
    found: list[tuple[Job, Element]] = []
    taken: set[str] = set()

    def take(job: Job, violated: Element) -> None:
        found.append((job, violated))
        taken.update(job.element.jobs if job.element.operation.record.is_gang else (job.id,))
        for above in path_of(job.element):
            lost[above] = add(lost.get(above, ZERO), _freed_with(job))

    for job in jobs:
        if job.id not in taken and _is_candidate_for_limits(job) and job.preemptibility == PREEMPTIBLE:
            violated = _find_violated(job, lost)
            if violated is not None:
                take(job, violated)
    for least_list, is_allowed in (
        (PREEMPTIBLE, _is_candidate_for_limits),
        (AGGRESSIVELY_PREEMPTIBLE, lambda job: not any(blocks(a, job.element, True) for a in path_of(job.element))),
    ):
        for job in jobs:
            violated = None if job.id in taken else _find_violated(job, lost)
            if violated is None or not is_allowed(job):
                continue
            # The less protected jobs end first, on whichever node they run.
            if not _has_candidates(violated, _excess(violated, lost.get(violated, ZERO)), taken, least_list):
                take(job, violated)
    found.sort(key=lambda pair: stop_order(pair[0]))
    needed: list[tuple[Job, Element, str]] = []
    for job, violated in found:
        without = dict(lost)
        without.update((above, subtract(lost[above], _freed_with(job))) for above in path_of(job.element))
        if _find_violated(job, without) is None:
            lost = without
        else:
            needed.append((job, violated, _describe_limits(violated)))
    needed.reverse()
    return needed


def _freed_with(job: Job) -> Vector:
    """Return the resources freed when a job ends; a gang ends with all of its jobs."""
    return job.element.usage if job.element.operation.record.is_gang else job.usage


def _operations_of(jobs: list[Job]) -> list[OperationElement]:
    return list(dict.fromkeys(job.element for job in jobs))


def _excess(element: Element, lost: Vector) -> Vector:
    return ZERO if element.limits == UNLIMITED else subtract(ZERO, add(room_below_limits(element, ZERO), lost))


def _find_violated(job: Job, lost: dict[Element, Vector]) -> Element | None:
    for above in path_of(job.element):
        if uses(job.usage, _excess(above, lost.get(above, ZERO))):
            return above
    return None


def _is_candidate_for_limits(job: Job) -> bool:
    element = job.element
    if not may_lose(element):
        return False
    sort_jobs(element)
    return is_permitted(job, True) and not any(blocks(above, element, True) for above in path_of(element))


def _has_candidates(element: Element, excess: Vector, taken: set[str], least_list: int) -> bool:
    """Whether there is still a job below the element that uses the excess and could end: one of list ``least_list`` or
    of a less protected one."""
    if isinstance(element, OperationElement):
        return any(
            job.id not in taken
            and job.node.is_online
            and uses(job.usage, excess)
            and _is_candidate_for_limits(job)
            and job.preemptibility >= least_list
            for job in element.jobs.values()
        )
    assert isinstance(element, PoolElement)
    children: tuple[Element, ...] = (*element.children.values(), *element.operations.values())
    return any(_has_candidates(child, excess, taken, least_list) for child in children)


def find_graceful(node: Node, now: float) -> list[tuple[Job, str]]:
    """Return preemptible jobs of graceful operations (``preemption_mode``) on this node, the last started first (6.7).
    They are stopped even if no operation starves; the count rule and ``min_run_time`` protect them."""
    found: list[tuple[Job, str]] = []
    graceful = [job for job in node.jobs.values() if job.element.operation.record.preemption_mode == "graceful"]
    for job in sorted(graceful, key=start_order, reverse=True):
        element = job.element
        # A gang ends as a whole, so ``min_run_time`` of one job protects all of them.
        together = element.jobs.values() if element.operation.record.is_gang else (job,)
        if not job.is_active or any(spared_until(each) > now for each in together):
            continue
        sort_jobs(element)
        if job.preemptibility == PREEMPTIBLE and not is_protected_by_count(element, len(element.jobs)):
            found.append((job, f"its operation ends jobs above its fair share: {describe_shares(element)}"))
    return found


def find_overcommit_victims(
    node: Node, now: float, allowed_s: float, additional_s: float = 0.0, cpu_ratio: float = 0.0
) -> list[tuple[Job, str]]:
    """Return jobs that must end because the node has been above its capacity for longer than ``allowed_s``, to which
    ``additional_s`` is added if only jobs on reclaimed CPU wait for CPU (1.9 point 2). If the excess is less than
    ``cpu_ratio`` of its CPU, no job ends; otherwise the whole excess is removed.

    Jobs are tried from the most to the least protected, equally protected ones in ``stop_order``. A job stays if it
    fits into the node's capacity beside foreign jobs and the jobs that already stay. The others are returned, the last
    started first. If one of them belongs to a gang, all jobs of this gang on the node are returned. Least protected are
    jobs on reclaimed CPU, whose lists (6.4) do not count. Of both these and the ordinary jobs, those beyond the
    guarantee of their pools are less protected. With ``preempt_cpu_gap_first`` ordinary jobs with a lowered limit are
    less protected than others of the two protected lists (1.9 point 3)."""
    since = node.overcommitted_since
    if since is None or now - since <= allowed_s or not is_overcommitted(node, cpu_ratio):
        return []
    room = subtract(add(node.capacity, as_vector(c * ROUNDING for c in node.capacity)), node.foreign_usage)
    jobs = [job for job in node.jobs.values() if job.is_active]
    limit = f"allowed_node_resources_overcommit_duration is {allowed_s:g} s"
    if additional_s > 0.0 and _only_reclaimed_wait(node, jobs, room):
        if now - since <= allowed_s + additional_s:
            return []
        limit += f", {additional_s:g} s more while only jobs on reclaimed CPU wait"
    for element in _operations_of(jobs):
        sort_jobs(element)
    why = _describe_overcommit(node, now - since, limit)
    beyond = _find_beyond_guarantee(jobs)
    jobs.sort(key=lambda job: _protection_order(job, job in beyond))
    gone: set[OperationElement] = set()
    while (gang := _find_broken(jobs, room, gone)) is not None:
        gone.add(gang)
    found: list[tuple[Job, str]] = []
    for job in jobs:
        if job.element in gone or not _has_place(job, room):
            found.append((job, why + _describe_class(job, job in beyond)))
        else:
            room = subtract(room, job.usage)
    found.sort(key=lambda pair: start_order(pair[0]), reverse=True)
    return found


def is_overcommitted(node: Node, cpu_ratio: float) -> bool:
    """Whether the limits of the node's jobs exceed its capacity; for CPU, by more than ``cpu_ratio`` of it (1.9)."""
    return any(
        free < -(cpu_ratio * has if r == CPU else 0.0) - ROUNDING * max(has, 1.0)
        for r, (free, has) in enumerate(zip(node.free, node.capacity, strict=True))
    )


def _only_reclaimed_wait(node: Node, jobs: Iterable[Job], room: Vector) -> bool:
    """Whether only jobs in the idle class get less CPU than is counted for them, and no other resource is short."""
    if node.about is not None and not node.about.idle_class:
        return False
    needed = [0.0 if r == CPU else used for r, used in enumerate(node.used)]
    needed[CPU] = sum(job.usage[CPU] for job in jobs if not job.reclaimed)
    return dominates(room, as_vector(needed))


def _find_beyond_guarantee(jobs: Iterable[Job]) -> set[Job]:
    """Return the jobs beyond the guarantees of their operation and of all pools above: each of these elements still
    uses more than its guarantee after the less protected jobs have ended."""
    beyond: set[Job] = set()
    lost: dict[Element, Vector] = {}
    for job in sorted(jobs, key=lambda job: _protection_order(job, False), reverse=True):
        path = list(path_of(job.element))
        if all(is_beyond_guarantee(above, lost.get(above, ZERO)) for above in path):
            beyond.add(job)
            lost.update({above: add(lost.get(above, ZERO), job.usage) for above in path})
    return beyond


def is_beyond_guarantee(element: Element, lost: Vector = ZERO) -> bool:
    """Whether an element uses more, without ``lost``, than its strong guarantee plus, for a pool, the last integral
    share granted to it; the largest components are compared."""
    guarantee = max(element.strong_guarantee_share)
    if isinstance(element, PoolElement):
        guarantee += element.last_integral_ratio
    return max(share(subtract(element.usage, lost), element.tree.total)) > guarantee + EPSILON


def _find_broken(jobs: list[Job], room: Vector, gone: set[OperationElement]) -> OperationElement | None:
    """Return the first gang, except those ``gone``, with a job that does not fit: all of its jobs end, too."""
    for job in jobs:
        if job.element in gone:
            continue
        if _has_place(job, room):
            room = subtract(room, job.usage)
        elif job.element.operation.record.is_gang:
            return job.element
    return None


def _has_place(job: Job, room: Vector) -> bool:
    """Whether a job fits. A resource that the job does not use never makes it end."""
    return not any(u > 0.0 and x < 0.0 for u, x in zip(job.usage, subtract(room, job.usage), strict=True))


def _protection_order(job: Job, is_beyond: bool) -> tuple[bool, bool, int, int, tuple[bool, float, int]]:
    if job.reclaimed:
        return (True, is_beyond, 0, 0, stop_order(job))
    gap_first = job.element.tree.config.settings.preempt_cpu_gap_first and job.preemptibility != PREEMPTIBLE
    return (False, is_beyond, job.preemptibility, int(gap_first and job.has_cpu_gap), stop_order(job))


def _describe_class(job: Job, is_beyond: bool) -> str:
    if not job.reclaimed:
        return ""
    return "; it ran on reclaimed CPU" + (", beyond the guarantee of its pool" if is_beyond else "")


def _describe_limits(element: Element) -> str:
    excess = _excess(element, ZERO)
    parts = [format_use(k, element.usage[k], element.limits[k]) for k in range(len(RESOURCES)) if excess[k] > 0.0]
    return f"{format_name(element)} used more than its limits allow: {', '.join(parts)}"


def _describe_overcommit(node: Node, for_s: float, limit: str) -> str:
    free = node.free
    parts = [
        format_use(k, node.capacity[k] - free[k], node.capacity[k])
        for k in range(len(RESOURCES))
        if free[k] < -ROUNDING * node.capacity[k]
    ]
    return f"node {quoted(node.address)} was overcommitted for {for_s:.0f} s: {', '.join(parts)} ({limit})"
