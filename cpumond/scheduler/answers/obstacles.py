"""Obstacles of waiting jobs, found by the checks of the pass that starts jobs; the split of a tree's capacity. Pure.

Amounts are absolute vectors in the order of RESOURCES, or cores if a name says so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from cpumond.fairshare.resources import CPU, RESOURCES, UNLIMITED, Vector, positive_part, subtract
from cpumond.scheduler.decide import gangs
from cpumond.scheduler.decide.placement import has_spare, may_start_within, satisfaction
from cpumond.scheduler.elements import Node, OperationElement, PoolElement, Tree
from cpumond.scheduler.elements.figures import TREE
from cpumond.scheduler.elements.fitting import Fitting
from cpumond.scheduler.elements.node_sizes import ROUNDING, fits
from cpumond.scheduler.model import SUBPOOL_DELIMITER
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER
from cpumond.scheduler.state import State
from cpumond.scheduler.trial.rounds import list_takers

SCARCE: Final = ("user_slots", "gpu", "memory", "network")
"""Resources that a node may lack although some of its CPU is free."""


class Obstacle(NamedTuple):
    """A reason that keeps waiting jobs from starting. ``name``: the pool or operation with the limit, "" if none."""

    kind: str
    name: str = ""


SPARE: Final = Obstacle("spare")
FRAGMENTATION: Final = Obstacle("fragmentation")
GRACEFUL: Final = Obstacle("graceful")
GANG: Final = Obstacle("gang")
REFUSED: Final = Obstacle("allow_reclaimed")
FILTER: Final = Obstacle(TAG_FILTER)
CORDON: Final = Obstacle("cordon")
TAGS: Final = Obstacle("tags")
FULL: Final = Obstacle("full")

COUNTS: Final = ("count", "subpool_count")
CONFIGURED: Final = (*COUNTS, "limits")


def count_limit(pool: PoolElement) -> Obstacle:
    """Return the limit of a pool's running operations; all ephemeral sub-pools of one pool have the same obstacle."""
    parent = pool.parent
    if pool.is_ephemeral and parent is not None and not parent.is_root and SUBPOOL_DELIMITER in pool.name:
        return Obstacle("subpool_count", parent.name)
    return Obstacle("count", pool.name)


def is_full(pool: PoolElement) -> bool:
    """Whether the pool runs the maximum number of operations that it may."""
    return pool.running_operation_count >= pool.max_running_operation_count


def waiting_cores(element: OperationElement) -> float:
    """Return the cores requested by an operation's jobs that have yet to start; 0 while the operation is held."""
    if element.operation.is_held or element.spent is not None:
        return 0.0
    return sum(order[CPU] * number for order, number in element.operation.needed_orders)


@dataclass(slots=True)
class Waiting:
    """An operation with jobs to start: the cores that these request, and their obstacles, the nearest first."""

    element: OperationElement
    cores: float
    in_way: tuple[Obstacle, ...]


def find_waiting(state: State, tree: Tree) -> dict[str, Waiting]:
    """Return the operations of a tree in which jobs wait, by id."""
    look = _Look(state, tree)
    return {
        element.name: Waiting(element, cores, look.find_in_way(element))
        for element in tree.operations.values()
        if (cores := waiting_cores(element)) > ROUNDING
    }


Rooms = list[tuple[Node, Vector]]
"""Nodes, each with its free resources."""


class _Look:
    """A tree's nodes at one moment. Obstacles are cached by request, since equal requests have the same obstacles."""

    def __init__(self, state: State, tree: Tree) -> None:
        self.spare = state.rules.spare
        self.nodes: Rooms = [(node, positive_part(node.free)) for node in list_takers(tree)]
        self._known: dict[tuple[Fitting | None, bool, Vector], tuple[Obstacle, ...]] = {}

    def find_in_way(self, element: OperationElement) -> tuple[Obstacle, ...]:
        """Return the obstacles of an operation's next job; for a gang, of all its jobs."""
        if not element.is_running:
            return tuple(dict.fromkeys(count_limit(pool) for pool in element.ancestors() if is_full(pool)))
        record = element.operation.record
        if record.preemption_mode == "graceful" and satisfaction(element) >= 1.0:
            return (GRACEFUL,)
        orders = [task.resources for task in element.operation.next_tasks()]
        if limited := _find_limits(element, [gangs.sum_needed(element)] if record.is_gang else orders):
            return limited
        if not record.allow_reclaimed and any(self._waits_for_orders(element, order) for order in orders):
            return (REFUSED,)
        found = tuple(dict.fromkeys(each for order in orders for each in self._of_order(element, order)))
        if record.is_gang and found != (FULL,):
            return (GANG, *(each for each in found if each not in (SPARE, FULL)))
        return found

    def _waits_for_orders(self, element: OperationElement, order: Vector) -> bool:
        """Whether the job fits into the free resources of a node, but other jobs have requested that CPU."""
        record = element.operation.record
        return any(
            self._has_room(free, node, order)
            and element.may_use(node)
            and not may_start_within(record, node.unordered_cores, order[CPU])
            for node, free in self.nodes
        )

    def _has_room(self, free: Vector, node: Node, order: Vector) -> bool:
        return fits(free, order) and has_spare(node, free, self.spare)

    def _of_order(self, element: OperationElement, order: Vector) -> tuple[Obstacle, ...]:
        key = (element.fitting, bool(element.operation.record.vault_bytes), order)
        if key not in self._known:
            rooms = [(node, free) for node, free in self.nodes if element.may_use(node)]
            is_elsewhere = element.fitting is not None and any(
                self._has_room(free, node, order) for node, free in self.nodes if not element.may_use(node)
            )
            self._known[key] = (*([FILTER] if is_elsewhere else ()), *_find_of_order(rooms, order))
        return self._known[key]


def _find_of_order(rooms: Rooms, order: Vector) -> Iterator[Obstacle]:
    """Yield the reasons why no node takes a job with this request; the one that concerns most cores comes first."""
    cores: dict[Obstacle, float] = {}
    for _, free in rooms:
        if free[CPU] < order[CPU] - ROUNDING or free[CPU] <= ROUNDING:
            continue
        for kind in [RESOURCES[r] for r, wanted in enumerate(order) if wanted > free[r] + ROUNDING] or ["spare"]:
            cores[Obstacle(kind)] = cores.get(Obstacle(kind), 0.0) + free[CPU]
    if not cores:
        largest = max((node.capacity[CPU] for node, _ in rooms), default=math.inf)
        whole = sum(free[CPU] for _, free in rooms)
        # A job that is larger than every empty node does not wait for other jobs to end.
        is_in_pieces = order[CPU] - ROUNDING <= whole or order[CPU] - ROUNDING > largest
        cores[FRAGMENTATION if is_in_pieces else FULL] = whole
    yield from sorted(cores, key=lambda each: -cores[each])


def _find_limits(element: OperationElement, orders: list[Vector]) -> tuple[Obstacle, ...]:
    """The elements on an operation's path that limit its first request; none if limits allow one of its requests."""
    path: list[OperationElement | PoolElement] = [element, *element.ancestors()]
    limited = [each for each in path if each.limits is not UNLIMITED]
    in_way = [
        tuple(each.name for each in limited if not fits(subtract(each.limits, each.usage), order)) for order in orders
    ]
    return tuple(Obstacle("limits", name) for name in in_way[0]) if in_way and all(in_way) else ()


def list_outside(state: State, tree: Tree) -> list[Node]:
    """Return nodes that the tree could have: those of no tree, of several trees, or of trees where nothing waits."""
    quiet = {name for name, each in state.trees.items() if each is not tree and not _has_waiting(each)}
    return [
        node
        for node in state.nodes.values()
        if node.is_online
        and (
            node.matched_trees
            or (node.tree != tree.name and (node.tree is None or node.tree in quiet) and not node.cordoned)
        )
    ]


def _has_waiting(tree: Tree) -> bool:
    return bool(tree.queue) or any(
        each.operation.needed and not each.operation.is_held for each in tree.operations.values()
    )


@dataclass(slots=True)
class CapacitySplit:
    """The capacity of a tree's nodes in cores. These parts and the idle ones, found later, add up to the whole.

    ``reused``: used by jobs beyond the CPU that requests would have left to them, so reclaimed from others. ``unused``:
    allocated to jobs, or to processes that are not jobs of the scheduler, but not used. ``silent``: of offline nodes.
    """

    capacity: float = 0.0
    used: float = 0.0
    reused: float = 0.0
    unused: float = 0.0
    silent: float = 0.0
    idle: float = 0.0
    backfilled: float = 0.0
    """The part of the above cores that is allocated to jobs on resources reserved for a gang (7.3)."""

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


def split_capacity(tree: Tree) -> CapacitySplit:
    split = CapacitySplit(backfilled=TREE["backfilled_cores"](tree))
    for node in tree.nodes.values():
        split.take(node)
    return split
