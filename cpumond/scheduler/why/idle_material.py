"""What an answer to "why does CPU stand idle" reads: a copy of one tree, taken in parts. Pure.

Amounts are absolute vectors in the order of RESOURCES, cores where a name says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cpumond.fairshare.resources import CPU, UNLIMITED, Vector, positive_part
from cpumond.scheduler.elements import Node, OperationElement, PoolElement, Tree, one_of
from cpumond.scheduler.model import SUBPOOL_DELIMITER, to_vector
from cpumond.scheduler.state import State
from cpumond.scheduler.state.refused import RefusedStarts

TAKEN_AT_ONCE: Final = 250
"""Nodes or operations that are copied before something else has its turn."""


@dataclass(slots=True, eq=False)
class PoolRoom:
    """A pool: what limits it. ``parent`` is its place in ``Material.pools``, -1 for the root."""

    name: str
    parent: int
    path: tuple[int, ...]
    """Places of the pool and those above it, the root last."""
    running: int
    max_running: int
    own_limits: Vector
    ratio: float | None
    usage: Vector
    fair_share: Vector
    is_ephemeral: bool
    has_own_count: bool
    operations: int
    max_operations: int
    has_own_most: bool
    refused: int
    """Starts that its ``max_operation_count`` refused of late."""
    refused_cores: float


@dataclass(slots=True, eq=False)
class WaitingOperation:
    """An operation with jobs to start, or one that holds a place in the queue. ``tasks``: order and number of jobs."""

    id: str
    pool: int
    is_running: bool
    is_graceful: bool
    is_gang: bool
    usage: Vector
    fair_share: Vector
    demand_share: Vector
    own_limits: Vector
    ratio: float | None
    order: float
    """Place in its FIFO pool or the queue; lower is earlier."""
    tasks: tuple[tuple[Vector, int], ...]
    active_jobs: int = 0
    refuses_reclaimed: bool = False
    """Whether its jobs start within the orders on a node only (1.10)."""

    @property
    def waiting_cores(self) -> float:
        """What its jobs that are to be started order."""
        return sum(order[CPU] * number for order, number in self.tasks)


@dataclass(slots=True, eq=False)
class NodeRoom:
    """A node: what it has and what is free. ``tree`` "": it is in none; ``why`` it takes no job, "" if it does."""

    id: str
    capacity: Vector
    free: Vector
    tags: frozenset[str] = frozenset()
    tree: str = ""
    is_empty: bool = False
    why: str = ""
    unordered_cores: float = math.inf
    """As of ``Node``; jobs that are placed here take it up."""


@dataclass(slots=True)
class Split:
    """The capacity of a tree's nodes in cores. The parts, with the idle ones that are found later, make up the whole.

    ``reused``: used by jobs beyond what the nodes' jobs could have had by their orders: reclaimed from others.
    ``unused``: allotted to jobs, or to what is no job of the scheduler, and not used. ``silent``: of nodes that are
    offline.
    """

    capacity: float = 0.0
    used: float = 0.0
    reused: float = 0.0
    unused: float = 0.0
    silent: float = 0.0
    idle: float = 0.0

    def take(self, node: Node) -> None:
        capacity = node.capacity[CPU]
        self.capacity += capacity
        if not node.is_online:
            self.silent += capacity
            return
        ordered = measured = limits = 0.0
        for job in node.jobs.values():
            report, limit = job.report, job.usage[CPU]
            said = report.cpu_usage if report.cpu_usage is not None else report.smoothed_cpu_usage
            ordered += job.limits[CPU]
            limits += limit
            measured += limit if said is None else min(said, limit)
        foreign = node.foreign_usage[CPU]
        measured = min(measured + foreign, capacity)
        reused = min(max(ordered + foreign - capacity, 0.0), measured)
        idle = max(capacity - limits - foreign, 0.0)
        self.reused += reused
        self.used += measured - reused
        self.unused += max(capacity - idle - measured, 0.0)
        self.idle += idle


@dataclass(slots=True, eq=False)
class Material:
    """One tree, shared with nobody but for immutable values."""

    tree: str
    nodes_filter: str
    total: Vector
    spare: Vector
    at: float = 0.0
    pools: list[PoolRoom] = field(default_factory=list)
    running: list[WaitingOperation] = field(default_factory=list)
    queue: list[WaitingOperation] = field(default_factory=list)
    """Pending operations in order of arrival, also those that want nothing."""
    nodes: list[NodeRoom] = field(default_factory=list)
    cordoned: list[NodeRoom] = field(default_factory=list)
    """Its nodes that take no new jobs."""
    outside: list[NodeRoom] = field(default_factory=list)
    """Nodes of no tree, of several, and those of trees where nothing waits."""
    split: Split = field(default_factory=Split)
    too_large: list[str] = field(default_factory=list)
    """Of each operation that no node can hold, what is too large."""

    @property
    def operations(self) -> Iterator[WaitingOperation]:
        yield from self.running
        yield from self.queue


def take_material(state: State, tree: Tree, now: float) -> Iterator[Material]:
    """Copy a tree in parts: yields the same value after each, complete after the last."""
    taken = Material(tree.name, tree.config.settings.nodes_filter, tree.total, state.rules.spare, now)
    places = _take_pools(taken, tree, state.refused_starts)
    yield taken
    queue = list(tree.queue.values())
    known = set(queue)
    wanting = [each for each in tree.operations.values() if each not in known and each.operation.needed]
    for target, elements in ((taken.running, wanting), (taken.queue, queue)):
        for start in range(0, len(elements), TAKEN_AT_ONCE):
            some = elements[start : start + TAKEN_AT_ONCE]
            target.extend(_take_operations(some, places, target is taken.queue))
            taken.too_large += filter(None, (each.tell_unplaceable() for each in some))
            yield taken
    nodes = list(state.nodes.values())
    quiet = {name for name, each in state.trees.items() if each is not tree and not _has_waiting(each)}
    for start in range(0, len(nodes), TAKEN_AT_ONCE):
        for node in nodes[start : start + TAKEN_AT_ONCE]:
            _take_node(taken, node, quiet)
        yield taken


def _has_waiting(tree: Tree) -> bool:
    return bool(tree.queue) or any(
        each.operation.needed and not each.operation.record.suspended for each in tree.operations.values()
    )


def _take_pools(taken: Material, tree: Tree, refused: RefusedStarts) -> dict[PoolElement, int]:
    places: dict[PoolElement, int] = {}
    for pool in (tree.root, *tree.pools.values()):
        _take_pool(taken, pool, places, refused)
    return places


def _take_pool(taken: Material, pool: PoolElement, places: dict[PoolElement, int], refused: RefusedStarts) -> int:
    """Ephemeral pools may come before the pool that they are in."""
    if pool in places:
        return places[pool]
    parent = -1 if pool.parent is None else _take_pool(taken, pool.parent, places, refused)
    place = places[pool] = len(taken.pools)
    settings = pool.settings
    taken.pools.append(
        PoolRoom(
            pool.name, parent, (place, *(taken.pools[parent].path if parent >= 0 else ())),
            pool.running_operation_count, pool.max_running_operation_count,
            to_vector(settings.resource_limits, float("inf")) if settings.resource_limits else UNLIMITED,
            settings.max_share_ratio, pool.usage, pool.fair_share, pool.is_ephemeral,
            settings.max_running_operation_count is not None,
            pool.operation_count, pool.max_operation_count, settings.max_operation_count is not None,
            *refused.count(taken.tree, pool.name, pool.max_operation_count, taken.at),
        )
    )  # fmt: skip
    return place


def _take_operations(
    elements: Sequence[OperationElement], places: dict[PoolElement, int], is_queue: bool
) -> Iterator[WaitingOperation]:
    for number, element in enumerate(elements):
        pool, operation = element.parent, element.operation
        record = operation.record
        if pool is None or pool not in places or element.is_running is is_queue:
            continue
        wanted: tuple[tuple[Vector, int], ...] = ()
        if not record.suspended:
            wanted = tuple((one_of(task.resources), operation.needed[task.name]) for task in operation.next_tasks())
        if not wanted and not is_queue:
            continue
        options = element.options
        limits = to_vector(options.resource_limits, float("inf")) if options.resource_limits else UNLIMITED
        is_fifo = pool.mode == "fifo" and element.fifo_index is not None
        yield WaitingOperation(
            record.id, places[pool], element.is_running, record.preemption_mode == "graceful", record.is_gang,
            element.usage, element.fair_share, element.demand_share, limits, options.max_share_ratio,
            float(element.fifo_index or 0) if is_fifo else float(number), wanted, len(element.jobs),
            not record.allow_reclaimed,
        )  # fmt: skip


def _take_node(taken: Material, node: Node, quiet: set[str]) -> None:
    if node.tree == taken.tree and not node.matched_trees:
        taken.split.take(node)
    if not node.is_online:
        return
    room = NodeRoom(node.id, node.capacity, positive_part(node.free), node.tags | {node.address}, node.tree or "")
    room.is_empty, room.unordered_cores = not node.jobs and not node.stopping, node.unordered_cores
    if node.matched_trees:
        if node.tree == taken.tree:
            taken.split.take(node)
        room.why = " and ".join(node.matched_trees)
        taken.outside.append(room)
    elif node.tree == taken.tree:
        (taken.cordoned if node.cordoned else taken.nodes).append(room)
    elif (node.tree is None or node.tree in quiet) and not node.cordoned:
        taken.outside.append(room)


def is_subpool(pool: PoolRoom) -> bool:
    """Whether an ephemeral pool's limits are its parent's ``ephemeral_subpool_config``."""
    return pool.is_ephemeral and pool.parent > 0 and SUBPOOL_DELIMITER in pool.name
