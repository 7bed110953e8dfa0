"""The reason why an element does not starve, as a value and in words. Pure (semantics.md 6.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from cpumond.core.measures import count_cores
from cpumond.fairshare.resources import CPU, Vector, format_dominant, share
from cpumond.scheduler.decide import usage_history
from cpumond.scheduler.decide.snapshot import element_name, operation_weight
from cpumond.scheduler.decide.starvation import EPSILON, find_limit, list_wanting
from cpumond.scheduler.elements import Element, OperationElement, PoolElement, usage_share

StandingKind = Literal["idle", "covered", "share", "gang", "nothing", "limit", "tolerance", "below"]
"""``idle``: it demands nothing. ``covered``: it has all that it demands. ``share``: it has its fair share and demands
more. ``gang``: it is a gang without a share. ``nothing``: it has no share for another reason. ``limit``: it is at a
limit. ``tolerance``: it has less than its share, but within its tolerance. ``below``: it has still less."""


class ShareStanding(NamedTuple):
    """``text`` completes a sentence whose subject is the element: "is allocated all that it demands"."""

    kind: StandingKind
    text: str


def find_standing(element: OperationElement | PoolElement) -> ShareStanding:
    """Compare the element's usage with its fair share, demand and limits, as of the last update."""
    usage, fair, demand = max(usage_share(element)), max(element.fair_share), max(element.demand_share)
    limit = find_limit(element)
    demanded = _cores(element, element.demand_share)
    if demand <= EPSILON:
        return ShareStanding("idle", "wants nothing" + _describe_unused(element))
    if fair <= EPSILON and (step := _describe_step(element)):
        has = f"gets none of the {demanded} it demands"
        if usage > demand - EPSILON:
            has = f"is allocated all that it demands, {demanded}, and others may take it"
        return ShareStanding("gang", f"{has}: a gang starts whole or not at all, and {step}")
    if usage > demand - EPSILON:
        return ShareStanding("covered", f"is allocated all that it demands, {demanded}" + _describe_unused(element))
    if limit is not None:
        assert isinstance(limit, OperationElement | PoolElement)
        name = "its limit" if limit is element else f"the limit of {element_name(limit)}"
        return ShareStanding("limit", f"is at {name}: another job would exceed it")
    if fair <= EPSILON:
        text = f"gets none of the {demanded} it demands"
        if all(each.operation.record.is_gang for each in list_wanting(element)):
            who = "it is a gang" if isinstance(element, OperationElement) else "only gangs want jobs"
            return ShareStanding("gang", f"{text}: {who}, and others leave too little for all jobs of a gang at once")
        return ShareStanding("nothing", f"{text}: others are entitled to everything")
    guaranteed = "guarantee" if fair < max(element.strong_guarantee_share) + EPSILON else "fair share"
    if usage > fair - EPSILON:
        text = f"is allocated its fair share, {_cores(element, element.fair_share)}, and demands {demanded}"
        return ShareStanding("share", text + _describe_unused(element))
    text = f"is allocated {usage / fair:.0%} of its {guaranteed}"
    if element.scheduling_status == "normal" and element.rules is not None:
        tolerance = f"fair_share_starvation_tolerance, {element.rules.tolerance:g} for it"
        return ShareStanding("tolerance", f"{text}, and starving begins below {tolerance}")
    return ShareStanding("below", text)


def _describe_step(element: OperationElement | PoolElement) -> str:
    """If only gangs run: what keeps the first gang's step (the share of all its jobs) from being granted; else ""."""
    gangs = list(_list_running(element))
    if not gangs or not all(each.operation.record.is_gang for each in gangs):
        return ""
    step = gangs[0].demand_share
    r = step.index(max(step))
    at: OperationElement | PoolElement = gangs[0]
    for parent in gangs[0].ancestors():
        told = "" if parent.mode == "fifo" else _describe_weight(step[r], at, parent, r)
        if told:
            return told
        at = parent
    return ""


def _list_running(element: Element) -> Iterator[OperationElement]:
    """Yield the running operations: the element itself, or those below it if it is a pool."""
    if isinstance(element, PoolElement):
        for below in (*element.children.values(), *element.operations.values()):
            yield from _list_running(below)
    elif isinstance(element, OperationElement) and element.is_running:
        yield element


def _describe_weight(step: float, at: OperationElement | PoolElement, parent: PoolElement, r: int) -> str:
    """Return the sentence that a gang needs more (``step``, a fraction of the cluster) than the weight of ``at`` gives,
    and the changes that help; "" if weights are not the reason. ``at``: the element with the gang, compared with those
    of its siblings that want more."""
    inside: list[OperationElement | PoolElement] = [*parent.children.values(), *parent.operations.values()]
    wanting = [each for each in inside if each is at or each.demand_share[r] > each.fair_share[r] + EPSILON]
    limit = min(share(parent.bounds, at.tree.total)[r], 1.0)
    room = limit - parent.fair_share[r] if parent.is_root or limit < 1.0 else 0.0
    room += sum(max(each.fair_share[r] - each.strong_guarantee_share[r], 0.0) for each in wanting)
    own, weights = _weight_of(at), sum(map(_weight_of, wanting))
    total, strong = at.fair_share[r], at.strong_guarantee_share[r]
    room -= max(strong - total, 0.0)
    needed, part = total + step, strong + room * own / weights
    changes = []
    if room + strong > needed + EPSILON:
        changes.append(f"raise that weight above {(weights - own) * (needed - strong) / (room + strong - needed):.4g}")
    if isinstance(at, PoolElement) and needed < 1.0:
        changes.append(f"guarantee it {needed:.1%}")
    if isinstance(at, PoolElement) and len(wanting) > 1 and not usage_history.half_life_s(parent):
        # In the best case the element has used nothing recently, and its siblings have used everything.
        others = (weights - own) * usage_history.factor(weights / (weights - own))
        most = own * usage_history.factor(0.0)
        if strong + room * most / (most + others) > needed + EPSILON:
            where = "the tree" if parent.is_root else element_name(parent)
            changes.append(f"set usage_half_life of {where}, so that it takes turns")
    if len(wanting) == 1 or part > needed - EPSILON or not changes:
        return ""
    return (
        f"all of its jobs need {step:.1%}, more than the {max(part - total, 0.0):.1%} that {element_name(at)} gets by "
        f"its weight ({own:g} of {weights:g}, summed over siblings that want more): {', '.join(changes)}, or let "
        "fewer jobs start at once"
    )


def _weight_of(element: PoolElement | OperationElement) -> float:
    if isinstance(element, OperationElement):
        return operation_weight(element)
    return element.entry.weight if element.entry is not None else 1.0


def _describe_unused(element: Element) -> str:
    """Return why the element's share is below its guarantee: its running and waiting jobs demand less than that."""
    guarantee, demand = max(element.strong_guarantee_share), max(element.demand_share)
    if demand > guarantee - EPSILON:
        return ""
    return (
        f"; it demands less than its guarantee of {_cores(element, element.strong_guarantee_share)}, and others have "
        "the rest: a running job demands its present limit, a job to be started demands its request"
    )


def _cores(element: Element, shares: Vector) -> str:
    """Return a share of the dominant resource as text; in cores if that resource is CPU."""
    if shares[CPU] == max(shares):
        return count_cores(shares[CPU] * element.tree.total[CPU])
    return f"{format_dominant(shares)} of the tree"
