"""Gangs: all jobs of a gang start in one round, on one or more nodes, or none does (semantics.md 7.3). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

from cpumond.fairshare.resources import ZERO, Vector, add, dominates, subtract, sum_vectors
from cpumond.scheduler.decide.placement import fits_orders, has_spare, may_start_within
from cpumond.scheduler.decide.preemption import explain_victims
from cpumond.scheduler.decide.snapshot import name_limit, room_left
from cpumond.scheduler.decide.starvation import TargetPriority
from cpumond.scheduler.decide.swap import Candidate, Losses, Swap, SwapStage
from cpumond.scheduler.decide.victims import ROUNDING, as_vector, room_below_limits, rooms_above
from cpumond.scheduler.elements import Job, Node, OperationElement
from cpumond.scheduler.elements.node_sizes import fits
from cpumond.scheduler.model import Task

MOST_STEPS: Final = 2000
"""Maximum number of placements that are tried for a gang of several tasks, after the simple ones."""
MOST_GANG_SEARCHES: Final = 512
"""Maximum number of searches for victims in one attempt for a gang; if a gang needs more, it preempts no job."""


class GangPlace(NamedTuple):
    """The node on which a job of a gang starts."""

    task: Task
    node: Node


@dataclass(frozen=True, slots=True)
class GangPlan:
    """The jobs of a gang to start, and the jobs on their nodes that must end for them, each with its reason."""

    element: OperationElement
    priority: TargetPriority
    places: tuple[GangPlace, ...]
    victims: tuple[tuple[Job, str], ...]


@dataclass(slots=True, eq=False)
class Reservation:
    """Resources that are reserved for one gang of a tree until it fits, or until ``until`` (scheduler time)."""

    element: OperationElement
    rooms: Mapping[Node, Vector]
    until: float
    since: float
    ready_at: float | None = None
    """When all reserved resources are expected to be free, computed at ``looked_at``; None: not computed yet."""
    looked_at: float = 0.0
    takers: Sequence[tuple[OperationElement, Task, float]] = ()
    """Operations, in order of service, whose jobs may use the resources until ``ready_at``; their longest runs in s."""


def may_take_back(element: OperationElement) -> bool:
    """Whether backfilled jobs stop for a gang: not if requests of other jobs block this gang, too (1.10)."""
    return element.tree.config.settings.enable_backfill and element.operation.record.allow_reclaimed


def list_backfilled(node: Node) -> list[Job]:
    """Return the jobs of a node that stop as soon as a gang needs the resources reserved for it there."""
    return [job for job in node.jobs.values() if job.backfill_until is not None]


def sum_backfilled(node: Node) -> Vector:
    return sum_vectors([ZERO, *(job.usage for job in list_backfilled(node))])


def list_needed(element: OperationElement) -> list[Task]:
    """Return the task of each job that the operation still needs, largest request first."""
    total = element.tree.total
    jobs = sorted(
        element.operation.next_jobs(),
        key=lambda job: -max((r / t for r, t in zip(job[0].resources, total, strict=True) if t), default=0.0),
    )
    return [task for task, number in jobs for _ in range(number)]


def sum_needed(element: OperationElement) -> Vector:
    orders = element.operation.needed_orders
    return sum_vectors([as_vector(number * amount for amount in order) for order, number in orders]) if orders else ZERO


def find_limit(element: OperationElement) -> str:
    """Return which limits forbid that all needed jobs run together; "" if none does."""
    left, tightest = room_left(element)
    return "" if fits(left, sum_needed(element)) else name_limit(tightest)


def within_orders(rooms: Mapping[Node, Vector]) -> dict[Node, Vector]:
    """Return the free resources of each node; of its CPU only what no ordinary or foreign job has requested (1.10)."""
    return {
        node: (slots, min(cpu, node.unordered_cores), gpu, memory, network)
        for node, (slots, cpu, gpu, memory, network) in rooms.items()
    }


def find_places(element: OperationElement, rooms: Mapping[Node, Vector], spare: Vector) -> list[GangPlace] | None:
    """Return a place in the free resources of the nodes for each job that the gang needs; None if one finds none. Tries
    the fullest node that can hold a job first, then the emptiest first, then further placements, at most MOST_STEPS."""
    free = [as_vector(max(amount, 0.0) for amount in room) for room in rooms.values()]
    if not free or not fits(sum_vectors(free), sum_needed(element)):
        return None
    needed = list_needed(element)
    by_room = sorted(rooms, key=lambda node: rooms[node][1])
    for nodes in (by_room, by_room[::-1]):
        places = _fill(needed, dict(rooms), nodes, spare)
        if places is not None:
            return places
    if len({task.resources for task in needed}) == 1:
        return None
    return _Packing(needed, by_room, dict(rooms), spare).search()


def _fill(
    needed: Sequence[Task], rooms: dict[Node, Vector], nodes: Sequence[Node], spare: Vector
) -> list[GangPlace] | None:
    places: list[GangPlace] = []
    first, before = 0, None
    for task in needed:
        # A node that could not hold the last job of a task cannot hold the task's next job either.
        first = first if task is before else 0
        before = task
        while first < len(nodes) and not _holds(nodes[first], rooms[nodes[first]], task, spare):
            first += 1
        if first == len(nodes):
            return None
        node = nodes[first]
        rooms[node] = subtract(rooms[node], task.resources)
        places.append(GangPlace(task, node))
    return places


def _holds(node: Node, free: Vector, task: Task, spare: Vector) -> bool:
    return has_spare(node, free, spare) and fits(free, task.resources)


class _Packing:
    """A search through all placements of jobs of several sizes, limited to MOST_STEPS."""

    def __init__(self, needed: Sequence[Task], nodes: Sequence[Node], rooms: dict[Node, Vector], spare: Vector) -> None:
        self.needed, self.nodes, self.rooms, self.spare = needed, nodes, rooms, spare
        self.steps = 0

    def search(self) -> list[GangPlace] | None:
        places: list[GangPlace] = []
        tried: list[set[tuple[Vector, Vector]]] = [set()]
        at = [0]
        while self.steps < MOST_STEPS:
            self.steps += 1
            depth = len(places)
            if depth == len(self.needed):
                return places
            task = self.needed[depth]
            node = self._next(task, at, tried[depth])
            if node is not None:
                self.rooms[node] = subtract(self.rooms[node], task.resources)
                places.append(GangPlace(task, node))
                at.append(0)
                tried.append(set())
                continue
            at.pop()
            tried.pop()
            if not places:
                return None
            undone = places.pop()
            self.rooms[undone.node] = add(self.rooms[undone.node], undone.task.resources)
        return None

    def _next(self, task: Task, at: list[int], tried: set[tuple[Vector, Vector]]) -> Node | None:
        """Return the next node to try at this depth; of several equal nodes only the first is tried."""
        while at[-1] < len(self.nodes):
            node = self.nodes[at[-1]]
            at[-1] += 1
            alike = (node.capacity, self.rooms[node])
            if alike not in tried and _holds(node, self.rooms[node], task, self.spare):
                tried.add(alike)
                return node
        return None


def find_reservation(element: OperationElement, nodes: Iterable[Node], now: float, until: float) -> Reservation | None:
    """Return the resources to reserve for a gang: for each job, on the node where least is missing for it. Returns None
    if even empty nodes are too small."""
    takes_back = may_take_back(element)
    free = {node: add(node.free, sum_backfilled(node)) if takes_back else node.free for node in nodes}
    empty = {node: subtract(node.capacity, node.foreign_usage) for node in free}
    if not free or not fits(sum_vectors(list(empty.values())), sum_needed(element)):
        return None
    rooms: dict[Node, Vector] = {}
    for order, number in element.operation.needed_orders:

        def entry(node: Node, order: Vector = order) -> tuple[float, float, str, Node]:
            return (_lack(free[node], order, node.capacity), -free[node][1], node.id, node)

        heap = [entry(node) for node in free if fits(empty[node], order)]
        heapify(heap)
        for _ in range(number):
            if not heap:
                return None
            node = heap[0][-1]
            free[node] = subtract(free[node], order)
            empty[node] = subtract(empty[node], order)
            rooms[node] = add(rooms.get(node, ZERO), order)
            if fits(empty[node], order):
                heapreplace(heap, entry(node))
            else:
                heappop(heap)
    return Reservation(element, rooms, until, now)


def _lack(free: Vector, order: Vector, capacity: Vector) -> float:
    return max((max(o - f, 0.0) / c for f, o, c in zip(free, order, capacity, strict=True) if c), default=0.0)


def plan_for_gang(
    target: OperationElement, priority: TargetPriority, rooms: Mapping[Node, Vector], now: float, spare: Vector
) -> GangPlan | None:
    """Plan the start of all jobs of a starving gang on several nodes, each with its victims. If not all jobs would fit,
    no job is preempted, and the result is None.

    ``rooms``: free resources of each node that takes jobs. The rules are those of ``plan_preemption``; each victim is
    checked as if all earlier victims, on any node, were gone. Jobs that fit without victims are placed first."""
    if target.operation.needed_job_count > MOST_GANG_SEARCHES:
        return None
    if not dominates(room_below_limits(target, sum_needed(target)), ZERO):
        return None
    needed = list_needed(target)
    search = _GangSearch(target, priority, rooms, now, spare)
    for task in needed:
        if not search.place(task):
            return None
    if not search.victims:
        return None
    return GangPlan(target, priority, tuple(search.places), explain_victims(target, priority, search.victims, now))


class _GangSearch:
    def __init__(
        self, target: OperationElement, priority: TargetPriority, rooms: Mapping[Node, Vector], now: float,
        spare: Vector,
    ) -> None:  # fmt: skip
        self.target, self.priority, self.now, self.spare = target, priority, now, spare
        self.rooms = dict(rooms)
        self.unordered = {node: node.unordered_cores for node in rooms}
        """Node -> its ``unordered_cores`` after the placements and victims so far."""
        self.losses = Losses()
        self.places: list[GangPlace] = []
        self.victims: list[Candidate] = []
        self.stages: dict[Node, SwapStage] = {}
        self.searches = 0
        self.full: set[tuple[Node, Vector]] = set()
        """Nodes and requests for which no set of victims is enough."""
        self.without_room: set[Vector] = set()
        """Requests that fit no node without victims."""
        self.gone: set[Job] = set()

    def place(self, task: Task) -> bool:
        """Place one more job, with victims if they are necessary."""
        order = task.resources
        if order not in self.without_room and self._is_within_limits(order):
            for node, free in self.rooms.items():
                if _holds(node, free, task, self.spare) and self._is_within_orders(node, task):
                    return self._take(task, node, [])
            self.without_room.add(order)
        found: tuple[float, Node, list[Candidate]] | None = None
        for node in self.rooms:
            if not node.jobs or (node, order) in self.full or self.searches >= MOST_GANG_SEARCHES:
                continue
            victims = self._find_victims(node, order)
            if victims is None:
                self.full.add((node, order))
                continue
            cost = sum(each.lost_core_seconds for each in victims)
            if found is None or cost < found[0]:
                found = cost, node, victims
            if not cost:
                break
        return found is not None and self._take(task, found[1], found[2])

    def _is_within_orders(self, node: Node, task: Task) -> bool:
        return may_start_within(self.target.operation.record, self.unordered[node], task.cpu_limit)

    def _is_within_limits(self, order: Vector) -> bool:
        rooms = rooms_above(self.target, add(order, self.losses.ordered), self.losses.lost)
        return all(dominates(room, ZERO) for _, room in rooms)

    def _find_victims(self, node: Node, order: Vector) -> list[Candidate] | None:
        self.searches += 1
        stage = self.stages.get(node)
        if stage is None:
            stage = self.stages[node] = SwapStage(node, self.target.tree, self.priority, self.now)
            if stage.settings.enable_backfill:  # a backfilled job's resources are free for this gang, or another gang's
                stage.candidates = [each for each in stage.candidates if each.jobs[0].backfill_until is None]
            stage.candidates = [each for each in stage.candidates if each.jobs[0] not in self.gone]
        stage.free = as_vector(f + c * ROUNDING for f, c in zip(self.rooms[node], node.capacity, strict=True))
        stage.unordered_cores = self.unordered[node]
        return Swap(stage, self.target, order, self.losses).find_victims()

    def _take(self, task: Task, node: Node, victims: list[Candidate]) -> bool:
        if victims:
            self.without_room.clear()
        for victim in victims:
            self.losses.lose(victim)
            self.victims.append(victim)
            self.gone.update(victim.jobs)
            for job in victim.jobs:
                if job.node in self.rooms:
                    self.rooms[job.node] = add(self.rooms[job.node], job.usage)
                    self.unordered[job.node] += job.ordinary_cores
                if job.node is not node:
                    self.full = {each for each in self.full if each[0] is not job.node}
            for stage in self.stages.values():
                stage.candidates = [each for each in stage.candidates if each.jobs[0] not in self.gone]
        self.rooms[node] = subtract(self.rooms[node], task.resources)
        if fits_orders(self.unordered[node], task.cpu_limit):
            self.unordered[node] -= task.cpu_limit
        self.losses.ordered = add(self.losses.ordered, task.resources)
        self.places.append(GangPlace(task, node))
        return True
