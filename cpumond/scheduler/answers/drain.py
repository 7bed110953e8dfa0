"""Plan of a node's drain: jobs that it would end, work that is lost, and nodes on which a trial restarts the jobs."""

from __future__ import annotations

import msgspec

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.access import Rights
from cpumond.scheduler.decide.cost import lost_core_seconds
from cpumond.scheduler.decide.preemption_record import fails_operation
from cpumond.scheduler.decide.victims import start_order
from cpumond.scheduler.elements import Job, Node
from cpumond.scheduler.state import State, changes, dispatch
from cpumond.scheduler.state.commands import prepare
from cpumond.scheduler.state.node_commands import DrainNode
from cpumond.scheduler.trial.rounds import start_jobs


class DrainedJob(msgspec.Struct, frozen=True):
    """A job that the drain would end. ``lost_core_seconds``: work since the start or last checkpoint, which has to be
    repeated (6.9). ``to_node``: the node where the job would restart now; "" if it would wait. ``fails_operation``: the
    job must not run twice (3.6): if it does not complete before it is stopped, its operation fails."""

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
    fails_operation: bool = False


class DrainPlan(msgspec.Struct, frozen=True):
    """Effects of a drain; ``jobs`` are in the order in which they would be stopped. ``hidden_job_count``: jobs of
    operations that the caller may not read; the sums include them. ``waiting_job_count``: jobs that would wait.
    ``failing_job_count``: jobs that would fail their operations. ``gang_job_count``: jobs on other nodes that stop with
    their gang; ``lost_core_seconds`` includes their loss."""

    node: str
    jobs: list[DrainedJob]
    job_count: int
    hidden_job_count: int
    waiting_job_count: int
    gang_job_count: int
    lost_core_seconds: float
    failing_job_count: int = 0


Places = dict[str, list[str]]
"""Operation and task -> the nodes on which its jobs started."""


def find_places(state: State, node_id: str, now: float) -> Places:
    """Return where jobs start once the node is drained. Changes ``state``, so the caller gives a copy."""
    places: Places = {}
    tree = state.trees.get(state.nodes[node_id].tree or "")
    if tree is not None:
        start_jobs(state, tree, now)  # work that starts by itself comes first
        changes.apply(state, prepare(state, DrainNode(node_id), "", now, lambda: "planned"), now)
        for _ in ("interruptible jobs", "the others, when those have ended"):
            dispatch.schedule(state, node_id, now, lambda: "planned")
            state.nodes[node_id].stopping.clear()
        for job in start_jobs(state, tree, now):
            places.setdefault(_place_key(job), []).append(job.node.id)
    return places


def _place_key(job: Job) -> str:
    return f"{job.element.name}/{job.task.name}"


def plan_drain(node: Node, rights: Rights, now: float, places: Places) -> DrainPlan:
    """Return what a drain would do to the node's present jobs. Removes from ``places`` the nodes that it assigns."""
    jobs = sorted(node.jobs.values(), key=start_order, reverse=True)
    found = []
    for job in sorted(jobs, key=lambda job: not job.task.interruptible):
        nodes = places.get(_place_key(job), [])
        found.append((job, _view(job, nodes.pop(0) if nodes else "", now)))
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
        node=node.id, jobs=shown, job_count=len(found), hidden_job_count=len(found) - len(shown),
        waiting_job_count=sum(not each.to_node and not each.fails_operation for _, each in found),
        gang_job_count=len(mates), lost_core_seconds=sum(lost_core_seconds(job, now) for job in (*jobs, *mates)),
        failing_job_count=sum(each.fails_operation for _, each in found),
    )  # fmt: skip


def _view(job: Job, to_node: str, now: float) -> DrainedJob:
    record = job.element.operation.record
    return DrainedJob(
        job_id=job.id, operation_id=record.id, title=record.title, pool=job.element.options.pool, task=job.task.name,
        cores=job.limits[CPU], interruptible=job.task.interruptible,
        running_s=0.0 if job.began_at is None else max(now - job.began_at, 0.0),
        lost_core_seconds=lost_core_seconds(job, now), to_node=to_node, fails_operation=fails_operation(job),
    )  # fmt: skip
