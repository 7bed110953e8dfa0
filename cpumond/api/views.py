"""What the JSON API shows of the scheduler's state: values that msgspec writes, made of living elements. Pure.

Resources are dictionaries of a resource's name to an absolute amount (cores, bytes); a limit that is missing in
``limits`` is no limit. Shares are fractions of the tree's total. Times are seconds since 1970, ``_s`` seconds. The
times that an element starves in follow semantics.md 6.2, places in the queue section 3.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec

from cpumond.fairshare.resources import CPU, RESOURCES, ZERO, Vector, greatest, subtract
from cpumond.scheduler import resulting
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    NON_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    Job,
    Node,
    Operation,
    OperationElement,
    PoolElement,
    SchedulingStatus,
    StarvationStatus,
    Tree,
    usage_share,
)
from cpumond.scheduler.history import used_now
from cpumond.scheduler.model import (
    NO_SUCH_JOB,
    RESOLVE,
    ROOT_POOL,
    CommandError,
    JobCounts,
    JobRecord,
    JobState,
    Mode,
    OperationRecord,
    OperationState,
    PreemptionRecord,
    Task,
    to_amounts,
)
from cpumond.scheduler.placement import find_stuck_tasks, satisfaction
from cpumond.scheduler.preemption import sort_jobs
from cpumond.scheduler.snapshot import operation_weight
from cpumond.scheduler.starvation import starves_in_s
from cpumond.scheduler.state import State
from cpumond.scheduler.validation import find_overcommit, find_warnings

Amounts = dict[str, float]


class View(msgspec.Struct, frozen=True):
    """Base of all answers."""


# --- trees and pools ---------------------------------------------------------------------------------------------


class TreeView(View, frozen=True):
    """A pool tree. ``attributes`` as they were set; ``errors`` are what its last update worked around."""

    name: str
    id: str
    is_default: bool
    attributes: dict[str, Any]
    total_resources: Amounts
    resource_usage: Amounts
    resource_demand: Amounts
    pool_count: int
    operation_count: int
    running_operation_count: int
    max_operation_count: int
    max_running_operation_count: int
    pending_operation_count: int
    node_count: int
    online_node_count: int
    update_count: int
    errors: list[str]


class TreeList(View, frozen=True):
    """All trees by name; ``default_tree`` "" when there is none."""

    default_tree: str
    trees: list[TreeView]


class PoolView(View, frozen=True):
    """A pool, ephemeral ones and the root included, as of the last fair-share update.

    ``attributes`` as they were set. ``weight`` null: not set. ``fair_share_ratio`` and ``usage_ratio`` are of the
    dominant resource. ``strong_guarantee`` is after the scaling of an overcommitted cluster. ``volume`` is what an
    integral pool has accumulated, resource times seconds. ``starves_in_s`` null while it has its share, 0: it starves.
    ``cpu_seconds`` is what its jobs have used since the start of this scheduler, ``reclaimed_cpu_seconds`` what they
    ordered and could not use meanwhile, ``ordered_cpu_seconds`` what they could have used without their agents
    (semantics.md 1.7); ``throttled_cpu_seconds``: how long a quota held their threads back, ``late_cpu_seconds`` the
    part of it while an agent held the limit below the order.
    """

    name: str
    tree: str
    parent: str | None
    id: str
    is_ephemeral: bool
    mode: Mode
    weight: float | None
    attributes: dict[str, Any]
    children: list[str]
    operation_count: int
    max_operation_count: int
    running_operation_count: int
    max_running_operation_count: int
    fair_share: Amounts
    fair_share_ratio: float
    usage: Amounts
    usage_ratio: float
    demand: Amounts
    limits: Amounts
    strong_guarantee: Amounts
    volume: Amounts
    scheduling_status: SchedulingStatus
    starvation_status: StarvationStatus
    starves_in_s: float | None
    owner: str
    cpu_seconds: float
    reclaimed_cpu_seconds: float
    ordered_cpu_seconds: float
    throttled_cpu_seconds: float
    late_cpu_seconds: float


class PoolList(View, frozen=True):
    """The root, then the pools of a tree, each before its sub-pools."""

    tree: str
    pools: list[PoolView]


def show_tree(state: State, tree: Tree) -> TreeView:
    """A tree with its totals and counts."""
    root = tree.root
    return TreeView(
        name=tree.name,
        id=tree.config.id,
        is_default=tree.name == state.config.default_tree,
        attributes=dict(tree.config.attributes),
        total_resources=to_amounts(tree.total),
        resource_usage=to_amounts(root.usage),
        resource_demand=to_amounts(root.demand),
        pool_count=len(tree.pools),
        operation_count=root.operation_count,
        running_operation_count=root.running_operation_count,
        max_operation_count=root.max_operation_count,
        max_running_operation_count=root.max_running_operation_count,
        pending_operation_count=len(tree.queue),
        node_count=len(tree.nodes),
        online_node_count=sum(node.is_online for node in tree.nodes.values()),
        update_count=tree.update_count,
        errors=list(tree.errors),
    )


def show_trees(state: State) -> TreeList:
    """All trees."""
    return TreeList(state.config.default_tree, [show_tree(state, tree) for tree in state.trees.values()])


def find_pool(tree: Tree, name: str) -> PoolElement:
    """The pool of that name, ephemeral ones and ``<Root>`` included. Raises CommandError with code RESOLVE."""
    if name == ROOT_POOL:
        return tree.root
    pool = tree.pools.get(name)
    if pool is None:
        raise CommandError(f'Pool "{name}" does not exist in tree "{tree.name}"', RESOLVE)
    return pool


def show_pool(pool: PoolElement, now: float) -> PoolView:
    """A pool of the living tree."""
    tree = pool.tree
    return PoolView(
        name=pool.name,
        tree=tree.name,
        parent=None if pool.parent is None else pool.parent.name,
        id="" if pool.config is None else pool.config.id,
        is_ephemeral=pool.is_ephemeral,
        mode=pool.settings.mode,
        weight=pool.settings.weight,
        attributes={} if pool.config is None else dict(pool.config.attributes),
        children=sorted(pool.children),
        operation_count=pool.operation_count,
        max_operation_count=pool.max_operation_count,
        running_operation_count=pool.running_operation_count,
        max_running_operation_count=pool.max_running_operation_count,
        fair_share=show_share(pool.fair_share, tree.total),
        fair_share_ratio=max(pool.fair_share),
        usage=to_amounts(pool.usage),
        usage_ratio=usage_ratio(pool),
        demand=to_amounts(pool.demand),
        limits=show_limits(pool.limits),
        strong_guarantee=show_share(pool.strong_guarantee_share, tree.total),
        volume=to_amounts(pool.volume),
        scheduling_status=pool.scheduling_status,
        starvation_status=pool.starvation_status,
        starves_in_s=_starves_in_s(pool, now),
        owner=pool.owner,
        cpu_seconds=pool.cpu_seconds,
        reclaimed_cpu_seconds=pool.reclaimed_cpu_seconds,
        ordered_cpu_seconds=pool.ordered_cpu_seconds,
        throttled_cpu_seconds=pool.throttled_cpu_seconds,
        late_cpu_seconds=pool.late_cpu_seconds,
    )


def show_pools(tree: Tree, now: float) -> PoolList:
    """The root and all pools of a tree, depth first, siblings by name."""
    return PoolList(tree.name, [show_pool(pool, now) for pool in walk_pools(tree.root)])


def walk_pools(top: PoolElement) -> Iterator[PoolElement]:
    """``top`` and the pools below it, depth first, siblings by name."""
    stack = [top]
    while stack:
        pool = stack.pop()
        yield pool
        stack += sorted(pool.children.values(), key=lambda child: child.name, reverse=True)


def show_share(share: Vector, total: Vector) -> Amounts:
    """A share as absolute amounts."""
    a, b, c, d, e = (x * y for x, y in zip(share, total, strict=True))
    return to_amounts((a, b, c, d, e))


def show_limits(limits: Vector) -> Amounts:
    """The resources that are limited."""
    return {name: limit for name, limit in zip(RESOURCES, limits, strict=True) if math.isfinite(limit)}


def usage_ratio(element: Element) -> float:
    """Usage of the dominant resource, a fraction of what the tree has."""
    return max(usage_share(element))


def _starves_in_s(element: Element, now: float) -> float | None:
    return None if element.rules is None else starves_in_s(element, now)


# --- operations and jobs -----------------------------------------------------------------------------------------


class OperationInTree(View, frozen=True):
    """An operation in one of its trees. ``queue_place`` from 1 while it is pending there; the rest as of a pool."""

    pool: str
    is_running: bool
    queue_place: int | None
    weight: float
    job_count: int
    fair_share: Amounts
    fair_share_ratio: float
    usage: Amounts
    usage_ratio: float
    demand: Amounts
    limits: Amounts
    satisfaction_ratio: float | None
    scheduling_status: SchedulingStatus
    starvation_status: StarvationStatus
    starves_in_s: float | None
    deactivations: dict[str, int]
    """Reason -> how often it was passed over since the last update."""
    cpu_seconds: float
    reclaimed_cpu_seconds: float
    ordered_cpu_seconds: float
    throttled_cpu_seconds: float
    late_cpu_seconds: float


class JobTotals(View, frozen=True):
    """Jobs of an operation: what was ordered, what lives, what is still to be started, and how others ended."""

    total: int
    active: int
    pending: int
    completed: int
    failed: int
    aborted: int
    lost: int


class OperationView(View, frozen=True):
    """An operation. ``trees`` is empty for a finished one; ``pools`` names the pool of each tree in any state."""

    id: str
    type: str
    user: str
    title: str
    alias: str
    state: OperationState
    suspended: bool
    start_time: float
    finish_time: float | None
    error: str
    pools: dict[str, str]
    jobs: JobTotals
    trees: dict[str, OperationInTree]


class OperationDetails(OperationView, frozen=True):
    """An operation with what its user asked for. ``spec`` as given; ``alerts``: sentences about what cannot be.

    ``cpu_seconds`` and the counters below it are of all its jobs that are known, of earlier runs of the scheduler,
    too; those in ``trees`` count from the start of this one.
    """

    tasks: list[Task]
    counts: dict[str, JobCounts]
    preemption_mode: str
    is_gang: bool
    max_failed_job_count: int
    time_limit: float | None
    job_cpu_monitor: dict[str, Any]
    spec: dict[str, Any]
    alerts: list[str]
    cpu_seconds: float
    reclaimed_cpu_seconds: float
    ordered_cpu_seconds: float
    throttled_cpu_seconds: float
    late_cpu_seconds: float


class OperationList(View, frozen=True):
    """Operations, the newest first. ``total`` counts all that the filters let through."""

    operations: list[OperationView]
    total: int


class JobView(View, frozen=True):
    """A job, living or ended. ``preemptibility`` "" for one that is not active; ``preemption``: why it was stopped.

    ``node`` is ``node_id`` by its short name. ``cgroup`` is relative to the root of the node's cpu hierarchy, "" before
    the node has told it. CPU times are as of the node's last word, and so is what its monitor sees: ``cpu_usage`` of
    the last check, ``min_cpu_limit`` (the floor), ``votes_sum``, ``throttled_ratio``; null where no node has told.
    """

    id: str
    operation_id: str
    task: str
    tree: str
    node_id: str
    state: JobState
    cpu_limit: float
    current_cpu_limit: float
    start_time: float
    finish_time: float | None = None
    smoothed_cpu_usage: float | None = None
    cpu_monitor_mode: str = ""
    preemptibility: str = ""
    exit_code: int | None = None
    reason: str = ""
    cpu_seconds: float | None = None
    max_memory: int | None = None
    preemption: PreemptionRecord | None = None
    node: str = ""
    cgroup: str = ""
    reclaimed_cpu_seconds: float | None = None
    ordered_cpu_seconds: float | None = None
    throttled_cpu_seconds: float | None = None
    late_cpu_seconds: float | None = None
    cpu_usage: float | None = None
    min_cpu_limit: float | None = None
    votes_sum: int | None = None
    throttled_ratio: float | None = None


class JobList(View, frozen=True):
    """Jobs of an operation, the last started first. ``total`` counts all that the filters let through."""

    operation_id: str
    jobs: list[JobView]
    total: int


PREEMPTIBILITY: Final = {
    NON_PREEMPTIBLE: "non_preemptible",
    AGGRESSIVELY_PREEMPTIBLE: "aggressively_preemptible",
    PREEMPTIBLE: "preemptible",
}


def show_operation(state: State, record: OperationRecord, now: float) -> OperationView:
    """An operation in short."""
    return OperationView(**_operation_fields(state, record, now, _find_places(state, [record])))


def show_operation_details(state: State, record: OperationRecord, now: float) -> OperationDetails:
    """An operation with its tasks and specification."""
    jobs: list[Job | JobRecord] = [*living_jobs(state, record.id), *state.finished_jobs.get(record.id, {}).values()]
    return OperationDetails(
        **_operation_fields(state, record, now, _find_places(state, [record])),
        tasks=list(record.tasks),
        counts=record.counts,
        preemption_mode=record.preemption_mode,
        is_gang=record.is_gang,
        max_failed_job_count=record.max_failed_job_count,
        time_limit=record.time_limit,
        job_cpu_monitor=record.job_cpu_monitor,
        spec=record.spec,
        alerts=[] if record.id not in state.operations else find_stuck_tasks(state.operations[record.id]),
        cpu_seconds=_sum_counter(jobs, "cpu_seconds"),
        reclaimed_cpu_seconds=_sum_counter(jobs, "reclaimed_cpu_seconds"),
        ordered_cpu_seconds=_sum_counter(jobs, "ordered_cpu_seconds"),
        throttled_cpu_seconds=_sum_counter(jobs, "throttled_cpu_seconds"),
        late_cpu_seconds=_sum_counter(jobs, "late_cpu_seconds"),
    )


def _sum_counter(jobs: Iterable[Job | JobRecord], name: str) -> float:
    return sum((getattr(job, name) or 0.0 for job in jobs), 0.0)


def living_jobs(state: State, operation_id: str) -> list[Job]:
    """The active jobs of an operation, and those that were told to stop and may not have ended yet."""
    live = state.operations.get(operation_id)
    active = () if live is None else live.elements.values()
    jobs = [job for element in active for job in element.jobs.values()]
    # The others are in no operation's list any more.
    stopping = (job for node in state.nodes.values() for job in node.stopping.values())
    return jobs + [job for job in stopping if job.element.operation.id == operation_id]


def _operation_fields(state: State, record: OperationRecord, now: float, places: Places) -> dict[str, Any]:
    live = state.operations.get(record.id)
    return {
        "id": record.id,
        "type": record.type,
        "user": record.user,
        "title": record.title,
        "alias": record.alias,
        "state": record.state,
        "suspended": record.suspended,
        "start_time": record.start_time,
        "finish_time": record.finish_time,
        "error": record.error,
        "pools": {name: options.pool for name, options in record.trees.items()},
        "jobs": _count_jobs(record, live),
        "trees": {} if live is None else {name: _in_tree(each, now, places) for name, each in live.elements.items()},
    }


def _count_jobs(record: OperationRecord, live: Operation | None) -> JobTotals:
    counts = record.counts.values()
    return JobTotals(
        total=sum(task.job_count for task in record.tasks),
        active=0 if live is None else live.active_job_count,
        pending=0 if live is None else live.needed_job_count,
        completed=sum(each.completed for each in counts),
        failed=sum(each.failed for each in counts),
        aborted=sum(each.aborted for each in counts),
        lost=sum(each.lost for each in counts),
    )


def _in_tree(element: OperationElement, now: float, places: Places) -> OperationInTree:
    total = element.tree.total
    pool = element.parent
    assert pool is not None
    now_satisfied = satisfaction(element)
    return OperationInTree(
        pool=pool.name,
        is_running=element.is_running,
        queue_place=None if element.is_running else places.get(element.tree.name, {}).get(element.name),
        weight=operation_weight(element),
        job_count=len(element.jobs),
        fair_share=show_share(element.fair_share, total),
        fair_share_ratio=max(element.fair_share),
        usage=to_amounts(element.usage),
        usage_ratio=usage_ratio(element),
        demand=to_amounts(element.demand),
        limits=show_limits(element.limits),
        satisfaction_ratio=now_satisfied if math.isfinite(now_satisfied) else None,
        scheduling_status=element.scheduling_status,
        starvation_status=element.starvation_status,
        starves_in_s=_starves_in_s(element, now),
        deactivations=dict(element.deactivations),
        cpu_seconds=element.cpu_seconds,
        reclaimed_cpu_seconds=element.reclaimed_cpu_seconds,
        ordered_cpu_seconds=element.ordered_cpu_seconds,
        throttled_cpu_seconds=element.throttled_cpu_seconds,
        late_cpu_seconds=element.late_cpu_seconds,
    )


OperationOrder = Literal["start_time", "state", "user", "title", "jobs", "usage", "fair_share"]


def show_operations(
    state: State, now: float, *, limit: int, offset: int = 0, operation_state: str = "", user: str = "", tree: str = "",
    pool: str = "", search: str = "", sort: OperationOrder = "start_time", descending: bool = True,
    texts: SearchTexts | None = None,
) -> OperationList:  # fmt: skip
    """Live and finished operations that fit all filters ("" lets all through); equal ones: the last started first.

    ``search`` is looked for in id, title, alias, user and names of pools, whatever the case; ``texts`` may know them.
    """
    wanted = search.lower()
    texts = SearchTexts() if texts is None else texts
    chosen = [
        record
        for record in list_records(state)
        if (not operation_state or record.state == operation_state)
        and (not user or record.user == user)
        and (not tree or tree in record.trees)
        and (not pool or _is_in(record, tree, pool))
        and (not wanted or wanted in texts.of(record))
    ]
    chosen.sort(key=lambda record: record.sequence, reverse=True)
    if (sort, descending) != ("start_time", True):
        chosen.sort(key=_order_of(state, sort), reverse=descending)
    shown = chosen[offset : offset + limit]
    places = _find_places(state, shown)
    return OperationList([OperationView(**_operation_fields(state, each, now, places)) for each in shown], len(chosen))


def _is_in(record: OperationRecord, tree: str, pool: str) -> bool:
    for name, options in record.trees.items():  # noqa: SIM110 - a generator costs twice as much, for each operation
        if options.pool == pool and (not tree or name == tree):
            return True
    return False


def list_records(state: State) -> list[OperationRecord]:
    """Of all operations, those that live first."""
    return [*(operation.record for operation in state.operations.values()), *state.finished.values()]


class SearchTexts:
    """What operations are searched by: their names in lower case, each on a line of its own.

    Kept for each record, since there may be very many and an open page asks again every few seconds; a record that
    is replaced gets a new text.
    """

    def __init__(self) -> None:
        self._texts: dict[str, tuple[OperationRecord, str]] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def of(self, record: OperationRecord) -> str:
        """The text of one operation."""
        known = self._texts.get(record.id)
        if known is None or known[0] is not record:
            pools = "\n".join([options.pool for options in record.trees.values()])
            text = f"{record.id}\n{record.title}\n{record.alias}\n{record.user}\n{pools}".lower()
            known = self._texts[record.id] = (record, text)
        return known[1]

    def forget_gone(self, state: State) -> None:
        """Leave out operations that are no longer kept, when they are many."""
        if len(self) > 1.2 * (len(state.operations) + len(state.finished)) + 100:
            self._texts = {
                key: kept for key, kept in self._texts.items() if key in state.operations or key in state.finished
            }


def _order_of(state: State, sort: OperationOrder) -> Callable[[OperationRecord], Any]:
    """The key that operations are sorted by; those that are not live have no jobs and no share."""
    living = state.operations
    if sort == "jobs":
        return lambda record: living[record.id].active_job_count if record.id in living else 0
    if sort == "usage":
        return lambda record: max([max(usage_share(each)) for each in _elements(living.get(record.id))], default=0.0)
    if sort == "fair_share":
        return lambda record: max([max(each.fair_share) for each in _elements(living.get(record.id))], default=0.0)
    if sort == "title":
        return lambda record: record.title.lower()
    return attrgetter("sequence" if sort == "start_time" else sort)


def _elements(live: Operation | None) -> Iterable[OperationElement]:
    return () if live is None else live.elements.values()


Places = Mapping[str, Mapping[str, int]]


def _find_places(state: State, records: Iterable[OperationRecord]) -> Places:
    """Tree -> operation -> place in its queue from 1 (3.3), of the trees in which one of ``records`` is pending."""
    live = (state.operations.get(record.id) for record in records)
    trees = {each.tree.name: each.tree for operation in live for each in _elements(operation) if not each.is_running}
    return {name: {waiting: place for place, waiting in enumerate(tree.queue, 1)} for name, tree in trees.items()}


def show_jobs(
    state: State, record: OperationRecord, *, limit: int, offset: int = 0, job_state: str = "", node_id: str = ""
) -> JobList:
    """The jobs of an operation, living and ended, the last started first."""
    jobs: list[Job | JobRecord] = list(living_jobs(state, record.id))
    living = {job.id for job in jobs}
    jobs += [job for job in state.finished_jobs.get(record.id, {}).values() if job.id not in living]
    chosen = [
        job
        for job in jobs
        if (not job_state or job.state == job_state)
        and (not node_id or node_id == (job.node_id if isinstance(job, JobRecord) else job.node.id))
    ]
    chosen.sort(key=order_of_start, reverse=True)
    shown = chosen[offset : offset + limit]
    views = [show_ended_job(job) if isinstance(job, JobRecord) else show_job(job) for job in shown]
    return JobList(record.id, views, len(chosen))


def order_of_start(job: Job | JobRecord) -> tuple[float, int, str]:
    """What jobs are listed by: the ones of one heartbeat in the order in which they were chosen."""
    return job.start_time, job.sequence, job.id


def find_job(state: State, record: OperationRecord, job_id: str) -> JobView:
    """A job of an operation, living or ended. Raises CommandError."""
    job = state.jobs.get(job_id)
    if job is not None and job.element.operation.id == record.id:
        return show_job(job)
    ended = state.finished_jobs.get(record.id, {}).get(job_id)
    if ended is None:
        raise CommandError(f"No such job {job_id} in operation {record.id}", NO_SUCH_JOB)
    return show_ended_job(ended)


class Specification(View, frozen=True):
    """What an operation was given (``provided``) and all that holds (``resulting``), by the documents' names.

    ``resulting`` has ``job_cpu_monitor`` with all of its options, durations in milliseconds, and
    ``job_cpu_monitor_sources``: option -> "default" or "specification". ``note``: what it cannot know.
    """

    id: str
    provided: dict[str, Any]
    resulting: dict[str, Any]
    note: str


def show_specification(state: State, record: OperationRecord) -> Specification:
    """The tabs Specification and Resulting specification of an operation's page."""
    found = resulting.resulting_specification(record, state.operations.get(record.id))
    found["job_cpu_monitor_sources"] = resulting.monitor_sources(record.job_cpu_monitor)
    return Specification(record.id, record.spec, found, resulting.NOTE)


def show_job(job: Job) -> JobView:
    """A job that lives."""
    if job.is_active:
        sort_jobs(job.element)
    return JobView(
        id=job.id,
        operation_id=job.element.operation.id,
        task=job.task.name,
        tree=job.element.tree.name,
        node_id=job.node.id,
        state=job.state,
        cpu_limit=job.limits[1],
        current_cpu_limit=job.usage[1],
        start_time=job.start_time,
        smoothed_cpu_usage=job.smoothed_cpu_usage,
        cpu_monitor_mode=job.cpu_monitor_mode,
        preemptibility=PREEMPTIBILITY[job.preemptibility] if job.is_active else "",
        reason="" if job.stop is None else job.stop.record.why,
        preemption=None if job.stop is None else job.stop.record,
        node=job.node.id,
        cgroup=job.cgroup,
        cpu_seconds=job.cpu_seconds,
        reclaimed_cpu_seconds=job.reclaimed_cpu_seconds,
        ordered_cpu_seconds=job.ordered_cpu_seconds,
        throttled_cpu_seconds=job.throttled_cpu_seconds,
        late_cpu_seconds=job.late_cpu_seconds,
        cpu_usage=job.cpu_usage,
        min_cpu_limit=job.min_cpu_limit,
        votes_sum=job.votes_sum,
        throttled_ratio=job.throttled_ratio,
    )


def show_ended_job(record: JobRecord) -> JobView:
    """A job that has ended."""
    return JobView(
        id=record.id,
        operation_id=record.operation_id,
        task=record.task,
        tree=record.tree,
        node_id=record.node_id,
        state=record.state,
        cpu_limit=record.cpu_limit,
        current_cpu_limit=record.current_cpu_limit,
        start_time=record.start_time,
        finish_time=record.finish_time,
        exit_code=record.exit_code,
        reason=record.reason,
        cpu_seconds=record.cpu_seconds,
        max_memory=record.max_memory,
        preemption=record.preemption,
        node=record.node_id,
        cgroup=record.cgroup,
        reclaimed_cpu_seconds=record.reclaimed_cpu_seconds,
        ordered_cpu_seconds=record.ordered_cpu_seconds,
        throttled_cpu_seconds=record.throttled_cpu_seconds,
        late_cpu_seconds=record.late_cpu_seconds,
    )


# --- nodes -------------------------------------------------------------------------------------------------------


class NodeView(View, frozen=True):
    """A node. ``tree`` null: no tree's filter fits its tags; ``matched_trees``: those that fit, where they are several:
    its jobs run on, none is started. ``foreign_usage``: of jobs that are not this
    scheduler's, those included that an earlier run of it told to stop and that have not ended.

    ``free`` is capacity less all usage, negative where the node is overcommitted. ``ordered_cores`` and ``used_cores``
    are of the scheduler's own jobs, those told to stop included.
    """

    id: str
    address: str
    tags: list[str]
    tree: str | None
    is_online: bool
    silent_s: float
    """Since its last heartbeat or registration."""
    incarnation: str
    """The first 16 characters of it."""
    capacity: Amounts
    usage: Amounts
    foreign_usage: Amounts
    free: Amounts
    job_count: int
    stopping_job_count: int
    overcommitted_s: float | None
    overcommit_count: int
    ordered_cores: float
    used_cores: float
    matched_trees: list[str]


class NodeDetails(NodeView, frozen=True):
    """A node with its jobs, those told to stop included."""

    jobs: list[JobView]


class NodeList(View, frozen=True):
    """Nodes by id."""

    nodes: list[NodeView]
    total: int


def show_node(node: Node, now: float) -> NodeView:
    """A node in short."""
    return NodeView(**_node_fields(node, now))


def show_node_details(node: Node, now: float) -> NodeDetails:
    """A node with its jobs."""
    jobs = [show_job(job) for job in (*node.jobs.values(), *node.stopping.values())]
    return NodeDetails(**_node_fields(node, now), jobs=jobs)


def _node_fields(node: Node, now: float) -> dict[str, Any]:
    since = node.overcommitted_since
    jobs = [*node.jobs.values(), *node.stopping.values()]
    return {
        "id": node.id,
        "address": node.address,
        "tags": sorted(node.tags),
        "tree": node.tree,
        "is_online": node.is_online,
        "silent_s": max(now - node.last_seen, 0.0),
        "incarnation": node.run,
        "capacity": to_amounts(node.capacity),
        "usage": to_amounts(node.used),
        "foreign_usage": to_amounts(node.foreign_usage),
        "free": to_amounts(node.free),
        "job_count": len(node.jobs),
        "stopping_job_count": len(node.stopping),
        "overcommitted_s": None if since is None else max(now - since, 0.0),
        "overcommit_count": node.overcommit_count,
        "ordered_cores": sum(job.limits[CPU] for job in jobs),
        "used_cores": sum(used_now(job) for job in jobs),
        "matched_trees": list(node.matched_trees),
    }


def show_nodes(
    state: State, now: float, *, limit: int, offset: int = 0, tree: str = "", tag: str = "", online: bool | None = None
) -> NodeList:
    """Nodes that fit all filters, by id."""
    chosen = [
        node
        for _, node in sorted(state.nodes.items())
        if (not tree or node.tree == tree)
        and (not tag or tag in node.tags)
        and (online is None or node.is_online == online)
    ]
    return NodeList([show_node(node, now) for node in chosen[offset : offset + limit]], len(chosen))


def find_node(state: State, node_id: str) -> Node:
    """A node by id. Raises CommandError with code RESOLVE."""
    node = state.nodes.get(node_id)
    if node is None:
        raise CommandError(f'Node "{node_id}" is not registered', RESOLVE)
    return node


# --- preemptions -------------------------------------------------------------------------------------------------


class PreemptionList(View, frozen=True):
    """Preemptions, the newest first; ``counts`` are those since the start, kept or not."""

    preemptions: list[PreemptionRecord]
    counts: dict[str, int]


def show_preemptions(state: State, *, limit: int, operation: str = "", pool: str = "") -> PreemptionList:
    """Preemptions of or for an operation, in or for a pool."""
    chosen: list[PreemptionRecord] = []
    for record in reversed(state.preemptions):
        if len(chosen) >= limit:
            break
        if operation and operation not in (record.operation_id, record.preemptor_operation_id):
            continue
        if pool and pool not in (record.pool, record.preemptor_pool):
            continue
        chosen.append(record)
    counts: dict[str, int] = {}
    for (_, of_pool, kind), number in state.preemption_counts.items():
        if not pool or of_pool == pool:
            counts[kind] = counts.get(kind, 0) + number
    return PreemptionList(chosen, counts)


# --- alerts ------------------------------------------------------------------------------------------------------


class Alert(View, frozen=True):
    """Something an operator should look at. ``subject`` is the tree, node or operation that it is about, "" for the
    scheduler."""

    code: str
    severity: Literal["warning", "error"]
    subject: str
    message: str


MOST_OPERATION_ALERTS: Final = 20
"""Alerts about single operations at a time."""


class AlertList(View, frozen=True):
    """All alerts, errors first."""

    alerts: list[Alert]


def find_alerts(state: State, now: float, service: Sequence[Alert] = ()) -> AlertList:
    """What is odd in the state; ``service`` is what the running service adds of itself."""
    found = [*service, *_node_alerts(state, now), *_operation_alerts(state)]
    for tree in state.trees.values():
        found += _tree_alerts(tree)
    if not state.config.default_tree:
        message = "there is no default pool tree; operations must name their pool_trees"
        found.append(Alert("no_default_tree", "warning", "", message))
    found.sort(key=lambda alert: alert.severity)
    return AlertList(found)


def _tree_alerts(tree: Tree) -> Iterator[Alert]:
    for sentence in find_warnings(tree.config):
        code = "invalid_default_parent_pool" if "InvalidDefaultParentPool" in sentence else "odd_configuration"
        yield Alert(code, "warning", tree.name, sentence)
    overcommit = find_overcommit(tree.config, tree.total)
    if overcommit is not None:
        yield Alert("guarantees_overcommitted", "warning", tree.name, overcommit)
    for sentence in tree.errors:
        yield Alert("fair_share_update", "warning", tree.name, sentence)
    online = [node for node in tree.nodes.values() if node.is_online]
    if tree.operations and not online:
        count = len(tree.operations)
        message = f'pool tree "{tree.name}": has {_count(count, "operation")} and no node that is online'
        yield Alert("no_nodes", "error", tree.name, message)


def _node_alerts(state: State, now: float) -> Iterator[Alert]:
    known = {node.id: node.matched_trees for node in state.nodes.values() if node.matched_trees}
    for name, trees in sorted({**state.list_refused_nodes(now), **known}.items()):
        message = (
            f"node {name}: its tags fit the nodes_filter of {' and '.join(trees)}; jobs that it has run on, none is "
            "started on it: change its tags or the filters"
        )
        yield Alert("node_in_several_trees", "error", name, message)
    for _, node in sorted(state.nodes.items()):
        if node.tree is None and not node.matched_trees:
            message = f"node {node.id}: no tree's nodes_filter fits its tags {sorted(node.tags)}; it gets no work"
            yield Alert("node_without_tree", "warning", node.id, message)
        if not node.is_online:
            message = f"node {node.id}: silent for {now - node.last_seen:.0f} s; its jobs are held lost after a while"
            yield Alert("node_offline", "warning", node.id, message)
        if node.overcommitted_since is not None:
            over = greatest(subtract(ZERO, node.free), ZERO)
            amounts = ", ".join(f"{x:g} {name}" for name, x in zip(RESOURCES, over, strict=True) if x > 0.0)
            since_s = now - node.overcommitted_since
            message = f"node {node.id}: its jobs may use {amounts} more than it has, for {since_s:.0f} s"
            yield Alert("node_overcommitted", "warning", node.id, message)


def _operation_alerts(state: State) -> Iterator[Alert]:
    nodes: dict[tuple[str, ...], frozenset[Vector]] = {}
    live = state.operations.values()
    stuck = ((each.id, sentences) for each in live if (sentences := find_stuck_tasks(each, nodes)))
    for operation_id, sentences in itertools.islice(stuck, MOST_OPERATION_ALERTS):
        message = f"operation {operation_id}: {'; '.join(sentences)}"
        yield Alert("job_fits_no_node", "warning", operation_id, message)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


# --- small answers -----------------------------------------------------------------------------------------------


class Done(View, frozen=True):
    """A command that was carried out: ``id`` of what it made or changed."""

    id: str
    warnings: list[str]


class Taken(View, frozen=True):
    """What a node sent has arrived; ``is_wanted`` false: nobody waits for it any more."""

    is_wanted: bool


class Failure(View, frozen=True):
    """A request that was refused; nothing was changed. ``code`` as the documents number errors."""

    error: str
    code: int
    attributes: dict[str, Any]


class Health(View, frozen=True):
    """``status``: ok, starting, stuck, or refusing (the store is gone); ``last_update_age_s`` null before the first
    update."""

    status: Literal["ok", "starting", "stuck", "refusing"]
    last_update_age_s: float | None = None


class Counts(View, frozen=True):
    """How much there is."""

    trees: int
    pools: int
    nodes: int
    online_nodes: int
    pending_operations: int
    running_operations: int
    finished_operations: int
    active_jobs: int
    stopping_jobs: int
    preemptions: dict[str, int]


class RequestTiming(View, frozen=True):
    """How often a request was answered, and the seconds that took in all and at most."""

    count: int
    total_s: float
    longest_s: float


class Status(View, frozen=True):
    """The scheduler at a glance. ``timings``: counters and sums of seconds since the start; ``requests`` by name."""

    version: str
    uptime_s: float
    now: float
    update_period_s: float
    last_update_age_s: float | None
    default_tree: str
    timings: dict[str, float]
    requests: dict[str, RequestTiming]
    counts: Counts


def count_all(state: State) -> Counts:
    """What there is of everything."""
    preemptions: dict[str, int] = {}
    for (_, _, kind), number in state.preemption_counts.items():
        preemptions[kind] = preemptions.get(kind, 0) + number
    running = sum(operation.record.state == "running" for operation in state.operations.values())
    return Counts(
        trees=len(state.trees),
        pools=sum(len(tree.pools) for tree in state.trees.values()),
        nodes=len(state.nodes),
        online_nodes=sum(node.is_online for node in state.nodes.values()),
        pending_operations=len(state.operations) - running,
        running_operations=running,
        finished_operations=len(state.finished),
        active_jobs=_sum_jobs(state.nodes.values(), stopping=False),
        stopping_jobs=_sum_jobs(state.nodes.values(), stopping=True),
        preemptions=preemptions,
    )


def _sum_jobs(nodes: Iterable[Node], stopping: bool) -> int:
    return sum(len(node.stopping if stopping else node.jobs) for node in nodes)
