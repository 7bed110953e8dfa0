"""Protection of jobs from a starving operation: the rules of preemption, in sentences.

Pure (semantics.md 6.3 to 6.6). Each sentence names the pool or operation, the option and its value, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

from cpumond.core.measures import format_span
from cpumond.fairshare.resources import RESOURCES, format_amount, format_dominant
from cpumond.scheduler.decide import victims
from cpumond.scheduler.decide.cost import spared_until
from cpumond.scheduler.decide.snapshot import element_name
from cpumond.scheduler.decide.starvation import EPSILON, TargetPriority, keeps_guarantee
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    NON_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    Job,
    OperationElement,
    PoolElement,
    Tree,
    usage_share,
)

Cause = Literal[
    "count", "graceful", "starving", "guaranteed", "share", "forbids", "threshold", "list", "aggressive", "time", "free"
]
"""What protects the jobs, in this order: the count rule; ``preemption_mode``; the element starves, too; with one job
less it is below its guarantee; it has no more than its share; it forbids aggressive preemption; the two parts of the
non-preemptible list; the list for aggressive preemption only; ``min_run_time``; nothing."""

SHOWN: Final = 3
"""Maximum number of pools or operations named for one cause; those with most jobs are named."""


class Protection(NamedTuple):
    """An operation may not preempt ``jobs`` jobs at or below ``element``, for this cause. ``first_until``, ``until``:
    when ``min_run_time`` ceases to protect the first and the last of these jobs."""

    cause: Cause
    element: OperationElement | PoolElement
    jobs: int
    first_until: float = math.inf
    until: float = -math.inf


def find_protections(target: OperationElement, priority: TargetPriority, now: float) -> list[Protection]:
    """Return why ``target`` may or may not preempt the active jobs of other operations of its tree on nodes that it may
    use (2.13); entries with most jobs first.

    There is one entry per element and cause. Cause "free" is for jobs that nothing protects. Each heartbeat decides
    whether a node has enough of them and whether the swap leaves their owners no worse off than the target is now."""
    own = set(target.ancestors())
    aggressive = priority == "aggressive"
    found: dict[tuple[Cause, OperationElement | PoolElement], int] = {}
    ends: dict[OperationElement | PoolElement, list[float]] = {}
    for element in target.tree.operations.values():
        jobs = [job for job in element.jobs.values() if target.may_use(job.node)]
        if element is target or not jobs:
            continue
        blocker = (_find_guaranteed if priority == "guarantee" else _find_blocker)(element, own, aggressive)
        if blocker is not None:
            found[blocker] = found.get(blocker, 0) + len(jobs)
            continue
        victims.sort_jobs(element)
        for cause, until in _causes_of_jobs(element, jobs, priority, now):
            if cause == "time":
                ends.setdefault(element, []).append(until)
            key = (cause, _forbidder(element) if cause == "forbids" else element)
            found[key] = found.get(key, 0) + 1
    protections = [
        Protection(cause, element, jobs, min(ends[element]), max(ends[element]))
        if cause == "time"
        else Protection(cause, element, jobs)
        for (cause, element), jobs in found.items()
    ]
    return sorted(protections, key=lambda each: -each.jobs)


def _causes_of_jobs(
    element: OperationElement, jobs: Iterable[Job], priority: TargetPriority, now: float
) -> list[tuple[Cause, float]]:
    """Return, for each of some active jobs, what protects it and until when ``min_run_time`` does. All jobs of a gang
    have the same result, since a gang ends as a whole."""
    causes: list[tuple[Cause, float]] = []
    for job in jobs:
        cause: Cause = "free"
        if priority != "guarantee":
            cause = _cause_of_list(element, job.preemptibility, priority == "aggressive")
        until = spared_until(job)
        causes.append(("time" if cause == "free" and until > now else cause, until))
    if element.operation.record.is_gang:
        # The cause that ends by itself sorts last.
        longest = max(causes, key=lambda each: (each[0] != "free", each[0] != "time", each[1]))
        return [longest] * len(causes)
    return causes


def _find_guaranteed(
    element: OperationElement, own: set[PoolElement], _aggressive: bool
) -> tuple[Cause, OperationElement | PoolElement] | None:
    """Return what protects all jobs of an operation from a target that is below a strong guarantee (6.10)."""
    if element.operation.record.preemption_mode == "graceful":
        return "graceful", element
    least = min(element.jobs.values(), key=lambda job: max(job.usage)).usage
    for above in victims.path_of(element):
        if above in own:
            break
        if not keeps_guarantee(above, least):
            return "guaranteed", above
    return None


def _find_blocker(
    element: OperationElement, own: set[PoolElement], aggressive: bool
) -> tuple[Cause, OperationElement | PoolElement] | None:
    """Return what protects all jobs of an operation: its own state, or the nearest element above that blocks them."""
    if element.operation.record.preemption_mode == "graceful":
        return "graceful", element
    if victims.is_protected_by_count(element, len(element.jobs)):
        return "count", element
    settings = element.tree.config.settings
    for above in victims.path_of(element):
        if settings.enable_conditional_preemption and above in own:
            break
        if not victims.blocks(above, element, aggressive):
            continue
        if settings.preemption_check_starvation and above.starvation_status != "non_starving":
            return "starving", above
        lowest = settings.aggressive_preemption_satisfaction_threshold + EPSILON
        if aggressive and victims.local_satisfaction(above) >= lowest:
            return "forbids", _forbidder(above if not _allows(above) else element)
        return "share", above
    return None


def _cause_of_list(element: OperationElement, preemptibility: int, aggressive: bool) -> Cause:
    if preemptibility == PREEMPTIBLE:
        return "free"
    if preemptibility == AGGRESSIVELY_PREEMPTIBLE:
        if not aggressive:
            return "aggressive"
        return "free" if _allows(element) else "forbids"
    assert preemptibility == NON_PREEMPTIBLE
    assert element.rules is not None
    return "list" if element.rules.non_preemptible_threshold is None else "threshold"


def _allows(element: Element) -> bool:
    return element.rules is None or element.rules.aggressive_preemption


def _forbidder(element: OperationElement | PoolElement) -> OperationElement | PoolElement:
    """Return the nearest pool, from here up, that sets ``allow_aggressive_preemption``; the root if none does."""
    pool = element if isinstance(element, PoolElement) else element.parent
    while pool is not None and pool.parent is not None and pool.settings.allow_aggressive_preemption is None:
        pool = pool.parent
    assert pool is not None
    return pool


def describe_cause(cause: Cause, tree: Tree) -> str:
    """Return what protects jobs of others, without names of operations; "" if this protection ends by itself."""
    settings = tree.config.settings
    limit, least = settings.max_unpreemptible_running_job_count, settings.aggressive_preemption_satisfaction_threshold
    by_share = (
        "others' jobs are within the fair shares of their operations, protected by preemption_satisfaction_threshold "
        f"{settings.preemption_satisfaction_threshold:g} and aggressive_preemption_satisfaction_threshold {least:g}"
    )
    texts: dict[Cause, str] = {
        "count": f"max_unpreemptible_running_job_count is {limit} and protects operations with few jobs",
        "starving": "the others starve, too, and preemption_check_starvation protects them",
        "free": "any swap would leave the operations that lose jobs worse satisfied than this one is now",
        "graceful": "",
        "time": "",
    }
    return texts.get(cause, by_share)


def describe_protections(target: OperationElement, priority: TargetPriority, now: float) -> Iterator[str]:
    """Yield sentences on the protection of other operations; the cause that concerns most jobs comes first."""
    by_cause: dict[Cause, list[Protection]] = {}
    for each in find_protections(target, priority, now):
        by_cause.setdefault(each.cause, []).append(each)
    if not by_cause:
        yield "no other operation has jobs in this tree that it could preempt"
    for cause, protections in sorted(by_cause.items(), key=lambda item: -sum(each.jobs for each in item[1])):
        if cause in ("count", "free"):
            yield (_describe_count if cause == "count" else _describe_free)(protections)
            continue
        for each in protections[:SHOWN]:
            if cause != "time":
                yield _describe(each, target)
                continue
            first, last = (format_span(until - now) for until in (each.first_until, each.until))
            how_long = first if first == last else f"{first} to {last}"
            yield f"{element_name(each.element)} keeps {_jobs([each])}: protected for {how_long} more by min_run_time"
        left = protections[SHOWN:]
        if left:
            yield f"the same protects {_jobs(left)} of {len(left)} more"


def _describe_count(protections: list[Protection]) -> str:
    element = protections[0].element
    assert isinstance(element, OperationElement)
    limit, where = victims.unpreemptible_job_count(element), _tree(element)
    if element.options.max_unpreemptible_running_job_count == limit:
        where = element_name(element)
    few = "fewer than" if element.tree.config.settings.strict_unpreemptible_running_job_count else "at most"
    return (
        f"{_jobs(protections)} of others are protected by their number ({_names(protections)}): an operation with "
        f"{few} {limit} jobs loses none (max_unpreemptible_running_job_count of {where}); lower it, 0 turns it off"
    )


def _describe_free(protections: list[Protection]) -> str:
    settings = protections[0].element.tree.config.settings
    return (
        f"{_jobs(protections)} of others may be preempted ({_names(protections)}) if those of one node free enough "
        "and their operations still have more of their shares than it has of its own; each node tries every "
        f"{settings.preemptive_scheduling_backoff / 1e3:g} s (preemptive_scheduling_backoff)"
    )


def _describe(each: Protection, target: OperationElement) -> str:
    element, settings = each.element, target.tree.config.settings
    tree, name, jobs = _tree(target), element_name(element), _jobs([each])
    if each.cause == "graceful":
        return f"{name} keeps its {jobs}: its preemption_mode is graceful, so it ends jobs above its share by itself"
    if each.cause == "starving":
        return f"{name} starves, too, and keeps its {jobs}: preemption_check_starvation of {tree} is true"
    if each.cause == "guaranteed":
        guarantee = format_dominant(element.strong_guarantee_share)
        return f"{name} has no job beyond its own strong guarantee, {guarantee} of the cluster, and keeps its {jobs}"
    if each.cause == "forbids":
        return f"{_describe_forbidding(element)}: it keeps {jobs} within its fair share; set it to true to preempt them"
    if each.cause == "share":
        return (
            f"{format_dominant(usage_share(element))} of the cluster is allocated to {name}, whose fair share is "
            f"{format_dominant(element.fair_share)}: it has no more than its share and keeps its {jobs} "
            f"(preemption_satisfaction_threshold of {tree} is {settings.preemption_satisfaction_threshold:g})"
            f"{_describe_aggression(target, element)}"
        )
    assert isinstance(element, OperationElement)
    if each.cause == "aggressive":
        return f"{name} keeps {jobs} within its fair share{_describe_aggression(target, element)}"
    text = (
        f"{name} keeps {jobs} of its non-preemptible list, within "
        f"{settings.aggressive_preemption_satisfaction_threshold:g} of its fair share "
        f"(aggressive_preemption_satisfaction_threshold of {tree})"
    )
    threshold = None if element.rules is None else element.rules.non_preemptible_threshold
    if each.cause == "list" or threshold is None:
        return text
    amounts = [f"{format_amount(r, x)} {RESOURCES[r]}" for r, x in enumerate(threshold) if math.isfinite(x)]
    place = _name_threshold_place(element)
    return f"{text}, or within non_preemptible_resource_usage_threshold of {place}, {', '.join(amounts)}; lower that"


def _describe_aggression(target: OperationElement, element: OperationElement | PoolElement) -> str:
    """Return the end of a sentence: what could preempt jobs within a fair share; "" if nothing could."""
    least, pool = target.tree.config.settings.aggressive_preemption_satisfaction_threshold, target.parent
    assert target.rules is not None
    assert pool is not None
    if victims.local_satisfaction(element) < least + EPSILON:
        return ""
    text = f"; aggressive starvation could reduce it to {least:g} of that share"
    if not target.rules.aggressive_starvation:
        text += f", but enable_aggressive_starvation of {_place(pool)} is false"
    if not _allows(element):
        text += f", but {_describe_forbidding(_forbidder(element))}"
    return text


def _describe_forbidding(element: OperationElement | PoolElement) -> str:
    return f"{_place(element)} forbids aggressive preemption (allow_aggressive_preemption = false)"


def _name_threshold_place(element: OperationElement) -> str:
    if element.options.non_preemptible_resource_usage_threshold is not None:
        return element_name(element)
    says = (pool for pool in element.ancestors() if pool.settings.non_preemptible_resource_usage_threshold is not None)
    return _place(next(says, element.tree.root))


def _place(element: OperationElement | PoolElement) -> str:
    """Return where an option of the element is set; for the root, that is the tree."""
    return _tree(element) if element.parent is None else element_name(element)


def _tree(element: Element) -> str:
    return f'tree "{element.tree.name}"'


def _names(protections: list[Protection]) -> str:
    names = [f"{element_name(each.element)}: {each.jobs}" for each in protections[:SHOWN]]
    left = len(protections) - SHOWN
    return ", ".join(names) + (f" and {left} more" if left > 0 else "")


def _jobs(protections: list[Protection]) -> str:
    number = sum(each.jobs for each in protections)
    return f"{number} job" + "s" * (number != 1)
