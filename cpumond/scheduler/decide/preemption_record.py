"""The record of a preemption and the sentences that explain it (semantics.md 6.6 step 6)."""

from __future__ import annotations

from typing import Final, Literal

from cpumond.core.measures import count_cores, format_cores
from cpumond.core.words import named, printable
from cpumond.fairshare.resources import CPU, RESOURCES, format_amount, format_dominant
from cpumond.scheduler.decide.cost import lost_core_seconds
from cpumond.scheduler.decide.starvation import claims_guarantee, starving_element
from cpumond.scheduler.elements import Element, Job, OperationElement, PoolElement, usage_share
from cpumond.scheduler.model import PreemptionRecord, to_amounts

Kind = Literal["preempted", "limit_violated", "overcommit", "graceful", "aborted"]


def make_record(
    job: Job, kind: Kind, why: str, now: float, preemptor_job_id: str = "", preemptor: OperationElement | None = None,
    priority: Literal["", "normal", "aggressive", "guarantee"] = "",
) -> PreemptionRecord:  # fmt: skip
    """Return the record of a decision about ``job``. ``now`` is seconds since 1970, ``why`` the reason without the
    kind; the record's ``why`` is the whole sentence. Call this while the job still has its usage."""
    element = job.element
    assert element.parent is not None
    head, tail = _HEADS[kind], _FAILS if kind != "aborted" and fails_operation(job) else ""
    for_operation = for_pool = ""
    if preemptor is not None:
        assert preemptor.parent is not None
        for_operation, for_pool = preemptor.name, preemptor.parent.name
        if kind == "preempted":
            where = f"{named('operation', for_operation)} in {named('pool', for_pool)}"
            head = f"preempted to start job {printable(preemptor_job_id)} of {where}"
    return PreemptionRecord(
        job_id=job.id, operation_id=element.name, tree=element.tree.name, pool=element.parent.name, node_id=job.node.id,
        at=now, kind=kind, why=(f"{head}: {why}" if why else head) + tail, freed=to_amounts(job.usage),
        preemptor_job_id=preemptor_job_id, preemptor_operation_id=for_operation, preemptor_pool=for_pool,
        priority=priority, lost_core_seconds=lost_core_seconds(job, now),
    )  # fmt: skip


def fails_operation(job: Job) -> bool:
    """Whether the job's end fails its operation unless the job completes: it has begun and must not run twice (3.6)."""
    return job.task.fail_on_job_restart and job.began_at is not None


_FAILS: Final = "; its operation fails unless the job completes in its time (fail_on_job_restart)"
_HEADS: Final[dict[Kind, str]] = {
    "preempted": "preempted",
    "limit_violated": "preempted",
    "overcommit": "preempted",
    "graceful": "preempted gracefully",
    "aborted": "aborted",
}


def describe_starvation(target: OperationElement, now: float) -> str:
    element: OperationElement | PoolElement = starving_element(target) or target
    how = "aggressively starving" if element.starvation_status == "aggressively_starving" else "starving"
    below_s = max(0.0, now - element.below_since) if element.below_since is not None else 0.0
    return (
        f"{format_name(element)} is {how}: it has been below its share for {below_s:.0f} s, with "
        f"{format_dominant(usage_share(element))} of the cluster allocated to it and a fair share of "
        f"{format_dominant(element.fair_share)}"
    )


def explain_claim(target: OperationElement, victim: OperationElement) -> str:
    """Return why a job of ``victim`` is preempted for a pool that is below its strong guarantee (6.10)."""
    claiming = next((each for each in (target, *target.ancestors()) if claims_guarantee(each)), target)
    losing = next((each for each in victim.ancestors() if max(each.strong_guarantee_share) > 0.0), victim)
    has = f"{format_dominant(usage_share(claiming))} of the cluster is allocated to {format_name(claiming)}"
    return (
        f"{has}, whose strong guarantee is {format_dominant(claiming.strong_guarantee_share)}; "
        f"{format_dominant(usage_share(losing))} is allocated to {format_name(losing)}, whose strong guarantee is "
        f"{format_dominant(losing.strong_guarantee_share)}"
    )


def describe_shares(element: Element) -> str:
    usage, fair_share = format_dominant(usage_share(element)), format_dominant(element.fair_share)
    return f"{usage} is allocated to {format_name(element)}, whose fair share is {fair_share}"


def format_name(element: Element) -> str:
    return named("operation" if isinstance(element, OperationElement) else "pool", element.name)


def format_use(resource: int, used: float, most: float) -> str:
    """Return usage and its bound: ``6 of 4 cores``."""
    if resource == CPU:
        return f"{format_cores(used)} of {count_cores(most)}"
    return f"{format_amount(resource, used)} of {format_amount(resource, most)} {RESOURCES[resource]}"
