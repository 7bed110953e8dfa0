"""What an element that does not starve has: its cause as a value, and in words. Pure (semantics.md 6.2)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from cpumond.core.measures import count_cores
from cpumond.fairshare.explain import Side, tell_step
from cpumond.fairshare.resources import CPU, Vector, share, show_dominant
from cpumond.scheduler.decide.snapshot import element_name, operation_weight
from cpumond.scheduler.decide.starvation import EPSILON, find_limit, list_wanting
from cpumond.scheduler.elements import Element, OperationElement, PoolElement, usage_share

StandingKind = Literal["idle", "covered", "share", "gang", "nothing", "limit", "tolerance", "below"]
"""It demands nothing; has all that it demands; has its fair share and demands more; is a gang whose share is nothing;
has no share otherwise; is at a limit; has less than its share, but not by more than its tolerance; by more."""


class ShareStanding(NamedTuple):
    """``text`` completes a sentence that begins with the element: "is allotted all that it demands"."""

    kind: StandingKind
    text: str


def find_standing(element: OperationElement | PoolElement) -> ShareStanding:
    """What the element has, of what it could have, as of the last update."""
    usage, fair, demand = max(usage_share(element)), max(element.fair_share), max(element.demand_share)
    limit = find_limit(element)
    demanded = _cores(element, element.demand_share)
    if demand <= EPSILON:
        return ShareStanding("idle", "wants nothing" + _tell_unused(element))
    if fair <= EPSILON and (step := _tell_step(element)):
        has = f"gets nothing of the {demanded} it demands"
        if usage > demand - EPSILON:
            has = f"is allotted all that it demands, {demanded}, and others may take it"
        return ShareStanding("gang", f"{has}: a gang starts whole or not at all, and {step}")
    if usage > demand - EPSILON:
        return ShareStanding("covered", f"is allotted all that it demands, {demanded}" + _tell_unused(element))
    if limit is not None:
        assert isinstance(limit, OperationElement | PoolElement)
        name = "its limit" if limit is element else f"the limit of {element_name(limit)}"
        return ShareStanding("limit", f"is at {name}: another job does not fit below it")
    if fair <= EPSILON:
        text = f"gets nothing of the {demanded} it demands"
        if all(each.operation.record.is_gang for each in list_wanting(element)):
            who = "it is a gang" if isinstance(element, OperationElement) else "only gangs want jobs"
            return ShareStanding(
                "gang", f"{text}: {who}, and what others leave is too little for all jobs of one at once"
            )
        return ShareStanding("nothing", f"{text}: others are entitled to all")
    guaranteed = "guarantee" if fair < max(element.strong_guarantee_share) + EPSILON else "fair share"
    if usage > fair - EPSILON:
        text = f"is allotted its fair share, {_cores(element, element.fair_share)}, and demands {demanded}"
        return ShareStanding("share", text + _tell_unused(element))
    text = f"is allotted {usage / fair:.0%} of its {guaranteed}"
    if element.scheduling_status == "normal" and element.rules is not None:
        tolerance = f"fair_share_starvation_tolerance, {element.rules.tolerance:g} for it"
        return ShareStanding("tolerance", f"{text}, and starving begins below {tolerance}")
    return ShareStanding("below", text)


def _tell_step(element: OperationElement | PoolElement) -> str:
    """What keeps the step of its first gang from a share, where only gangs run in it; else ""."""
    running = (each for each in element.tree.operations.values() if each.is_running)
    gangs = [each for each in running if element in (each, *each.ancestors())]
    if not gangs or not all(each.operation.record.is_gang for each in gangs):
        return ""
    step = gangs[0].demand_share
    r = step.index(max(step))
    at: OperationElement | PoolElement = gangs[0]
    for parent in gangs[0].ancestors():
        inside: list[OperationElement | PoolElement] = [*parent.children.values(), *parent.operations.values()]
        rivals = [each for each in inside if each is not at and each.demand_share[r] > each.fair_share[r] + EPSILON]
        limit = min(share(parent.bounds, element.tree.total)[r], 1.0)
        left = limit - parent.fair_share[r] if parent.is_root or limit < 1.0 else 0.0
        told = tell_step(step[r], element_name(at), _side(at, r), [_side(each, r) for each in rivals], left)
        if told and parent.mode != "fifo":
            return told
        at = parent
    return ""


def _side(element: PoolElement | OperationElement, r: int) -> Side:
    if isinstance(element, OperationElement):
        return Side(operation_weight(element), element.fair_share[r], None)
    weight = element.entry.weight if element.entry is not None else 1.0
    return Side(weight, element.fair_share[r], element.strong_guarantee_share[r])


def _tell_unused(element: Element) -> str:
    """Why its share is below its guarantee: what its jobs and those to be started demand is."""
    guarantee, demand = max(element.strong_guarantee_share), max(element.demand_share)
    if demand > guarantee - EPSILON:
        return ""
    return (
        f"; of its guarantee, {_cores(element, element.strong_guarantee_share)}, others have what it does not demand: "
        "running jobs demand what they may use now, those to be started what they order"
    )


def _cores(element: Element, shares: Vector) -> str:
    """A share of the dominant resource, in cores where it is CPU."""
    if shares[CPU] == max(shares):
        return count_cores(shares[CPU] * element.tree.total[CPU])
    return f"{show_dominant(shares)} of the tree"
