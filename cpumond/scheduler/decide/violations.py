"""Jobs that must end for no other job's sake: decisions only (semantics.md 1.9, 6.6, 6.7)."""

from __future__ import annotations

from cpumond.fairshare.resources import RESOURCES, UNLIMITED, ZERO, Vector, add, dominates, subtract
from cpumond.fairshare.validate import quoted
from cpumond.scheduler.decide.candidates import (
    ROUNDING,
    as_vector,
    blocks,
    is_permitted,
    is_protected_by_count,
    may_lose,
    path_of,
    room_below_limits,
    sort_jobs,
    start_order,
    uses,
)
from cpumond.scheduler.decide.preemption_record import tell_amount, tell_name, tell_shares
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    Job,
    Node,
    OperationElement,
    PoolElement,
)


def find_limit_violators(node: Node) -> list[tuple[Job, Element, str]]:
    """Jobs of this node that must end because their operation or a pool above it uses more than its limits (6.6).

    With the element whose limit it is (the nearest one) and the reason; latest start first, only until the limits
    hold, and only jobs that use what is above the limit. A pool's ``resource_limits_overcommit_tolerance`` is allowed.

    Candidates are the jobs that could be preempted at some priority: by their list (6.4), the count rule, and all
    elements above them (6.5) - never those that only targets inside a blocking pool may take. Lists and counts protect
    from other operations, not from a limit: when an element above its limit has no candidate left on any node that is
    online, its other jobs here go, too. So a lowered ``resource_limits`` takes jobs away whatever their number.
    """
    jobs = sorted((job for job in node.jobs.values() if job.is_active), key=start_order, reverse=True)
    above_all = {above for element in _operations_of(jobs) for above in (element, *element.ancestors())}
    if not any(_is_above_limits(above, ZERO) for above in above_all if above.parent is not None):
        return []
    lost: dict[Element, Vector] = {}
    found: list[tuple[Job, Element]] = []
    taken: set[str] = set()

    def take(job: Job, violated: Element) -> None:
        found.append((job, violated))
        taken.add(job.id)
        _count_loss(job, lost)

    for job in jobs:
        if _is_candidate_for_limits(job) and job.preemptibility == PREEMPTIBLE:
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
            # Less protected jobs go first, on whichever node they are.
            if not _has_candidates(violated, _excess(violated, lost.get(violated, ZERO)), taken, least_list):
                take(job, violated)
    found.sort(key=lambda pair: start_order(pair[0]))
    needed: list[tuple[Job, Element, str]] = []
    for job, violated in found:
        without = dict(lost)
        without.update((above, subtract(lost[above], job.usage)) for above in path_of(job.element))
        if _find_violated(job, without) is None:
            lost = without
        else:
            needed.append((job, violated, _tell_limits(violated)))
    needed.reverse()
    return needed


def _operations_of(jobs: list[Job]) -> list[OperationElement]:
    return list(dict.fromkeys(job.element for job in jobs))


def _excess(element: Element, lost: Vector) -> Vector:
    if element.limits == UNLIMITED:
        return ZERO
    return subtract(ZERO, add(room_below_limits(element, ZERO), lost))


def _is_above_limits(element: Element, lost: Vector) -> bool:
    return max(_excess(element, lost)) > 0.0


def _find_violated(job: Job, lost: dict[Element, Vector]) -> Element | None:
    for above in path_of(job.element):
        if uses(job, _excess(above, lost.get(above, ZERO))):
            return above
    return None


def _count_loss(job: Job, lost: dict[Element, Vector]) -> None:
    for above in path_of(job.element):
        lost[above] = add(lost.get(above, ZERO), job.usage)


def _is_candidate_for_limits(job: Job) -> bool:
    element = job.element
    if not may_lose(element):
        return False
    sort_jobs(element)
    return is_permitted(job, True) and not any(blocks(above, element, True) for above in path_of(element))


def _has_candidates(element: Element, excess: Vector, taken: set[str], least_list: int) -> bool:
    """Whether a job below the element, of list ``least_list`` or a less protected one, that uses what is above its
    limits could still go."""
    if isinstance(element, OperationElement):
        return any(
            job.id not in taken
            and job.node.is_online
            and uses(job, excess)
            and _is_candidate_for_limits(job)
            and job.preemptibility >= least_list
            for job in element.jobs.values()
        )
    assert isinstance(element, PoolElement)
    children: tuple[Element, ...] = (*element.children.values(), *element.operations.values())
    return any(_has_candidates(child, excess, taken, least_list) for child in children)


def find_graceful(node: Node) -> list[tuple[Job, str]]:
    """Preemptible jobs of operations with ``preemption_mode`` graceful on this node, latest start first (6.7).

    They are asked to end whether or not anybody starves; the count rule protects them as it does others.
    """
    found: list[tuple[Job, str]] = []
    graceful = [job for job in node.jobs.values() if job.element.operation.record.preemption_mode == "graceful"]
    for job in sorted(graceful, key=start_order, reverse=True):
        element = job.element
        if not job.is_active:
            continue
        sort_jobs(element)
        if job.preemptibility == PREEMPTIBLE and not is_protected_by_count(element, len(element.jobs)):
            found.append((job, f"its operation gives up what it has above its share: {tell_shares(element)}"))
    return found


def find_overcommit_victims(node: Node, now: float, allowed_s: float) -> list[tuple[Job, str]]:
    """Jobs that must end because the node has been above its capacity for longer than ``allowed_s`` (1.9 point 2).

    The most protected jobs, and of those the ones started first, stay as long as they fit one after another; the
    others are returned, latest start first. With ``preempt_cpu_gap_first`` jobs with a lowered limit are less
    protected than others of the two protected lists (1.9 point 3). What foreign jobs use is not there to be shared.
    """
    since = node.overcommitted_since
    if since is None or now - since <= allowed_s:
        return []
    room = subtract(add(node.capacity, as_vector(c * ROUNDING for c in node.capacity)), node.foreign_usage)
    if dominates(room, node.used):
        return []
    jobs = [job for job in node.jobs.values() if job.is_active]
    for element in _operations_of(jobs):
        sort_jobs(element)
    why = _tell_overcommit(node, now - since, allowed_s)
    found: list[tuple[Job, str]] = []
    for job in sorted(jobs, key=_protection_order):
        left = subtract(room, job.usage)
        # A resource that it does not use cannot be what it has to go for.
        if any(u > 0.0 and x < 0.0 for u, x in zip(job.usage, left, strict=True)):
            found.append((job, why))
        else:
            room = left
    found.sort(key=lambda pair: start_order(pair[0]), reverse=True)
    return found


def _protection_order(job: Job) -> tuple[int, int, float, int]:
    gap_first = job.element.tree.config.settings.preempt_cpu_gap_first and job.preemptibility != PREEMPTIBLE
    return (job.preemptibility, int(gap_first and job.has_cpu_gap), job.start_time, job.sequence)


def _tell_limits(element: Element) -> str:
    excess = _excess(element, ZERO)
    parts = [
        f"{tell_amount(k, element.usage[k])} of {tell_amount(k, element.limits[k])} {RESOURCES[k]}"
        for k in range(len(RESOURCES))
        if excess[k] > 0.0
    ]
    return f"{tell_name(element)} uses more than its limits allow: {', '.join(parts)}"


def _tell_overcommit(node: Node, for_s: float, allowed_s: float) -> str:
    free = node.free
    parts = [
        f"{tell_amount(k, node.capacity[k] - free[k])} of {tell_amount(k, node.capacity[k])} {RESOURCES[k]}"
        for k in range(len(RESOURCES))
        if free[k] < -ROUNDING * node.capacity[k]
    ]
    return (
        f"node {quoted(node.address)} has been above its capacity for {for_s:.0f} s: {', '.join(parts)}; "
        f"allowed_node_resources_overcommit_duration is {allowed_s:g} s"
    )
