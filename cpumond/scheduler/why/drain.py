"""What a drain of a node would do now: which jobs end, what is lost, and which nodes have room for them. Pure."""

from __future__ import annotations

import msgspec

from cpumond.fairshare.resources import CPU, Vector, subtract
from cpumond.scheduler.access import Rights
from cpumond.scheduler.decide.cost import lost_core_seconds
from cpumond.scheduler.decide.placement import fits_orders, has_spare, may_start_within
from cpumond.scheduler.decide.victims import start_order
from cpumond.scheduler.elements import Job, Node
from cpumond.scheduler.elements.node_sizes import fits


class DrainedJob(msgspec.Struct, frozen=True):
    """A job that would end. ``lost_core_seconds``: work done again, since its start or last checkpoint (6.9).

    ``to_node``: one that has room for it now; "" where none has, and it would wait.
    """

    job_id: str
    operation_id: str
    title: str
    pool: str
    task: str
    cores: float
    interruptible: bool
    running_s: float
    lost_core_seconds: float
    to_node: str


class DrainPlan(msgspec.Struct, frozen=True):
    """In the order in which the jobs would be stopped. ``hidden_job_count``: those of operations that the asker may not
    read, which are counted in the sums. ``waiting_job_count``: those that no node has room for now.
    ``gang_job_count``: jobs on other nodes that stop with their gang; their loss is in the sum."""

    node: str
    jobs: list[DrainedJob]
    job_count: int
    hidden_job_count: int
    waiting_job_count: int
    gang_job_count: int
    lost_core_seconds: float


def plan_drain(node: Node, rights: Rights, now: float) -> DrainPlan:
    """What would become of the jobs that are on the node at this moment."""
    state = rights.state
    tree = state.trees.get(node.tree or "")
    others = [] if tree is None else [each for each in tree.nodes.values() if each is not node and may_start(each)]
    room = {each.id: each.free for each in sorted(others, key=lambda each: each.id)}
    unordered = {each.id: each.unordered_cores for each in others}
    jobs = sorted(node.jobs.values(), key=start_order, reverse=True)
    found = []
    for job in sorted(jobs, key=lambda job: not job.task.interruptible):
        wanted, record = job.task.resources, job.element.operation.record
        places = (
            each
            for each in others
            if _has_room(each, room[each.id], wanted, state.rules.spare)
            and may_start_within(record, unordered[each.id], wanted[CPU])
        )
        place = next(places, None)
        if place is not None:
            room[place.id] = subtract(room[place.id], wanted)
            if fits_orders(unordered[place.id], wanted[CPU]):
                unordered[place.id] -= wanted[CPU]
        found.append((job, _show(job, "" if place is None else place.id, now)))
    gangs = {job.element.operation for job in jobs if job.element.operation.record.is_gang}
    mates = [
        mate
        for operation in gangs
        for element in operation.elements.values()
        for mate in element.jobs.values()
        if mate.node is not node
    ]
    shown = [each for job, each in found if rights.may_read(job.element.operation.record)]
    return DrainPlan(
        node=node.id,
        jobs=shown,
        job_count=len(found),
        hidden_job_count=len(found) - len(shown),
        waiting_job_count=sum(not each.to_node for _, each in found),
        gang_job_count=len(mates),
        lost_core_seconds=sum(lost_core_seconds(job, now) for job in (*jobs, *mates)),
    )


def may_start(node: Node) -> bool:
    """Whether a node gets jobs, if it has room."""
    return node.is_online and not node.cordoned and not node.matched_trees


def _has_room(node: Node, free: Vector, wanted: Vector, spare: Vector) -> bool:
    return has_spare(node, free, spare) and fits(free, wanted)


def _show(job: Job, to_node: str, now: float) -> DrainedJob:
    record = job.element.operation.record
    running_s = 0.0 if job.began_at is None else max(now - job.began_at, 0.0)
    return DrainedJob(
        job_id=job.id,
        operation_id=record.id,
        title=record.title,
        pool=job.element.options.pool,
        task=job.task.name,
        cores=job.limits[CPU],
        interruptible=job.task.interruptible,
        running_s=running_s,
        lost_core_seconds=lost_core_seconds(job, now),
        to_node=to_node,
    )
