"""Which waiting jobs would start on what is free now, with some of what is in their way taken away. Pure.

A model of admission (semantics.md 3.3) and of the regular stage of heartbeats (7.1), without fair shares of operations
that do not run yet: nobody's job is taken, and of the operations of one pool the one with the least use goes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter
from typing import Final, NamedTuple

from cpumond.fairshare.folding import limits_of_parent
from cpumond.fairshare.resources import (
    CPU,
    RESOURCES,
    UNLIMITED,
    ZERO,
    Vector,
    add,
    least,
    scale,
    share,
    subtract,
    sum_vectors,
)  # fmt: skip
from cpumond.scheduler.decide.placement import satisfaction_of
from cpumond.scheduler.elements.node_sizes import ROUNDING, fits
from cpumond.scheduler.why.idle_material import Material, NodeRoom, PoolRoom, WaitingOperation, is_subpool

SCARCE: Final = ("user_slots", "gpu", "memory", "network")
"""What a node may lack while CPU of it is free."""

EXACT_JOBS: Final = 2000
"""With more waiting jobs than that as many of one operation as a node has room for are placed at once."""

MANY_ORDERS: Final = 64
"""With more different orders than that operations are served one after another, each on the nodes with most CPU."""
MOST_TRIED: Final = 32
"""So many nodes are looked at for one operation then."""


class Hindrance(NamedTuple):
    """Something in the way of waiting jobs. ``name``: the pool or operation that it is of, "" where it is of none."""

    kind: str
    name: str = ""


SPARE: Final = Hindrance("spare")
FRAGMENTATION: Final = Hindrance("fragmentation")
GRACEFUL: Final = Hindrance("graceful")
GANG: Final = Hindrance("gang")
REFUSED: Final = Hindrance("allow_reclaimed")
CORDON: Final = Hindrance("cordon")
TAGS: Final = Hindrance("tags")
FULL: Final = Hindrance("full")

Lifted = Mapping[Hindrance, float]
"""What is not in the way, or only from this value on (math.inf: not at all)."""
NOTHING_LIFTED: Final[Lifted] = {}


def count_limit(pools: list[PoolRoom], pool: PoolRoom) -> Hindrance:
    """The limit of running operations that holds for a pool: one for all ephemeral sub-pools of a pool."""
    return Hindrance("subpool_count", pools[pool.parent].name) if is_subpool(pool) else Hindrance("count", pool.name)


def pool_limits(material: Material, lifted: Lifted) -> list[Vector]:
    """What limits each pool (2.10)."""
    limits: list[Vector] = []
    for pool in material.pools:
        if pool.parent < 0 or Hindrance("limits", pool.name) in lifted:
            limits.append(UNLIMITED)
        else:
            limits.append(limits_of_parent(material.total, pool.own_limits, limits[pool.parent], pool.ratio))
    return limits


@dataclass(slots=True)
class Packing:
    """What would start. ``placed``: place of an operation in ``Material.operations`` -> cores; ``grown``: pool or
    operation -> what its use would grow by; ``in_way``: of each operation with jobs left what is, the nearest first."""

    cores: float = 0.0
    jobs: int = 0
    placed: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    """Cores of jobs that would still wait."""
    activated: dict[str, int] = field(default_factory=dict)
    """Pool -> operations of its subtree that would begin to run."""
    grown: dict[str, Vector] = field(default_factory=dict)
    in_way: dict[int, tuple[Hindrance, ...]] = field(default_factory=dict)
    free: list[NodeRoom] = field(default_factory=list)
    """The nodes as they would be then."""


def pack(material: Material, lifted: Lifted = NOTHING_LIFTED) -> Packing:
    """Start what can start. Changes nothing of ``material``."""
    return _Packer(material, lifted).run()


@dataclass(slots=True, eq=False)
class _Item:
    """Equal jobs of one operation that wait."""

    number: int
    operation: WaitingOperation
    order: Vector
    left: int
    key: tuple[float, float, int] = (0.0, 0.0, 0)
    used: float = 0.0
    """Cores that its operation had been given when the key was made."""

    def __lt__(self, other: _Item) -> bool:
        return self.key < other.key


class _Packer:
    def __init__(self, material: Material, lifted: Lifted) -> None:
        self.material = material
        self.lifted = lifted
        self.packing = Packing()
        self.usage = [pool.usage for pool in material.pools]
        self.limits = pool_limits(material, lifted)
        self.limited = {
            place
            for place, pool in enumerate(material.pools)
            if any(self.limits[each] is not UNLIMITED for each in pool.path)
        }
        self.grown: dict[int, Vector] = {}
        """Place of an operation -> what it was given."""
        self.ignored = tuple(r for r, name in enumerate(RESOURCES) if Hindrance(name) in lifted)
        self.spare = ZERO if SPARE in lifted else material.spare
        self.items: dict[Vector, list[_Item]] = {}
        self.all_items: list[_Item] = []
        self.largest = max((node.capacity[CPU] for node in material.nodes), default=math.inf)
        """Cores of the largest node."""
        self.gangs: dict[int, list[tuple[Vector, _Item]]] = {}
        """Place of an operation whose jobs start together -> what of its jobs is needed on nodes, and they."""
        self.refusing: list[tuple[Vector, _Item]] = []
        """The same of operations that refuse reclaimed CPU."""

    def run(self) -> Packing:
        packing, material = self.packing, self.material
        self._activate()
        nodes = [*material.nodes, *(material.outside if TAGS in self.lifted else ())]
        nodes += material.cordoned if CORDON in self.lifted else ()
        rooms = [
            NodeRoom(
                each.id, each.capacity, each.free, each.tags, each.tree, each.is_empty, each.why, each.unordered_cores
            )
            for each in nodes
            if each.free[CPU] > ROUNDING
        ]  # fmt: skip
        self._place_gangs(rooms)
        self._place_refusing(rooms)
        if len(self.items) > MANY_ORDERS:
            self._fill_in_turn(rooms)
        else:
            batch = sum(item.left for item in self.all_items) > EXACT_JOBS
            for node in rooms:
                if not self.items:
                    break
                self._fill(node, batch)
        packing.free = rooms
        if FRAGMENTATION in self.lifted:
            self._fill_pieces(rooms)
        self._sum_up(rooms)
        return packing

    def _value(self, hindrance: Hindrance, value: float) -> float:
        return max(self.lifted.get(hindrance, value), value)

    def _activate(self) -> None:
        pools = self.material.pools
        running = [pool.running for pool in pools]
        most = [self._value(count_limit(pools, pool), pool.max_running) for pool in pools]
        for number, operation in enumerate(self.material.running):
            self._offer(number, operation)
        begin = len(self.material.running)
        for number, operation in enumerate(self.material.queue, begin):
            path = pools[operation.pool].path
            full = tuple(count_limit(pools, pools[place]) for place in path if running[place] >= most[place])
            if full:
                if operation.tasks:
                    self.packing.in_way[number] = full
                continue
            for place in path:
                running[place] += 1
            self._offer(number, operation)
        self.packing.activated = {
            pool.name: now - pool.running for pool, now in zip(pools, running, strict=True) if now > pool.running
        }
        for items in self.items.values():
            heapify(items)

    def _offer(self, number: int, operation: WaitingOperation) -> None:
        is_gang = operation.is_gang and GANG not in self.lifted
        for order, count in operation.tasks:
            item = _Item(number, operation, order, count)
            item.key = self._key(item)
            needed = order
            for r in self.ignored:
                needed = (*needed[:r], 0.0, *needed[r + 1 :])  # type: ignore[assignment]
            if is_gang:
                self.gangs.setdefault(number, []).append((needed, item))
            elif operation.refuses_reclaimed and REFUSED not in self.lifted:
                self.refusing.append((needed, item))
            else:
                self.items.setdefault(needed, []).append(item)
            self.all_items.append(item)

    def _key(self, item: _Item) -> tuple[float, float, int]:
        """Lower is served earlier: the operation with the least of its share, then the one that came first."""
        operation = item.operation
        used = operation.usage[CPU]
        if item.number in self.grown:
            used += self.grown[item.number][CPU]
        fair = operation.fair_share[CPU] * self.material.total[CPU]
        return (used / fair if fair > 1.0 else used, operation.order, item.number)

    def _place_gangs(self, rooms: list[NodeRoom]) -> None:
        """All jobs of a gang start, or none (7.3)."""
        by_room = sorted(rooms, key=lambda node: node.free[CPU])
        for parts in sorted(self.gangs.values(), key=lambda parts: parts[0][1].key):
            whole = sum_vectors([scale(item.order, item.left) for _, item in parts])
            if not self._may_grow(parts[0][1], whole):
                continue
            found = self._find_places(parts, by_room) or self._find_places(parts, by_room[::-1])
            if found is not None:
                for node, free in found.items():
                    self._take(node, subtract(self._free_of(node, parts[0][1]), free))
                for _, item in parts:
                    self._give(item, item.left)

    def _place_refusing(self, rooms: list[NodeRoom]) -> None:
        """Start what refuses reclaimed CPU, before others; what only these orders are in the way of is noted."""
        for needed, item in sorted(self.refusing, key=lambda part: part[1].key):
            for node in rooms:
                free = self._free_of(node, item)
                if item.left and self._holds(node, free, needed) and self._may_grow(item):
                    number = self._fitting(free, needed, item)
                    self._take(node, scale(needed, number))
                    self._give(item, number)
            if item.left and any(self._holds(node, self._free_of(node), needed) for node in rooms):
                self.packing.in_way.setdefault(item.number, (REFUSED,))

    def _take(self, node: NodeRoom, taken: Vector) -> None:
        self._keep(node, subtract(self._free_of(node), taken))
        node.unordered_cores -= min(taken[CPU], max(node.unordered_cores, 0.0))

    def _holds(self, node: NodeRoom, free: Vector, needed: Vector) -> bool:
        return fits(free, needed) and self._has_spare(self._free_of(node), node.capacity)

    def _find_places(self, parts: list[tuple[Vector, _Item]], nodes: list[NodeRoom]) -> dict[NodeRoom, Vector] | None:
        """What the nodes have free with all these jobs, None where they do not fit."""
        free_of: dict[NodeRoom, Vector] = {}
        for needed, item in sorted(parts, key=lambda part: -part[1].order[CPU]):
            left = item.left
            for node in nodes:
                free = free_of.get(node) or self._free_of(node, item)
                while left and fits(free, needed) and self._has_spare(free, node.capacity):
                    free = free_of[node] = subtract(free, needed)
                    left -= 1
                if not left:
                    break
            if left:
                return None
        return free_of

    def _free_of(self, node: NodeRoom, item: _Item | None = None) -> Vector:
        free = node.free
        if item is not None and item.operation.refuses_reclaimed and REFUSED not in self.lifted:
            free = (free[0], min(free[CPU], node.unordered_cores), *free[2:])
        for r in self.ignored:
            free = (*free[:r], math.inf, *free[r + 1 :])  # type: ignore[assignment]
        return free

    def _has_spare(self, free: Vector, capacity: Vector) -> bool:
        return all(f >= s - ROUNDING * max(s, 1.0) or not c for f, s, c in zip(free, self.spare, capacity, strict=True))

    def _fill_in_turn(self, rooms: list[NodeRoom]) -> None:
        """As ``_fill`` of all nodes: one operation after another, on the nodes with most CPU left."""
        free_of = [self._free_of(node) for node in rooms]
        heap = [
            (-free[CPU], place) for place, free in enumerate(free_of) if self._has_spare(free, rooms[place].capacity)
        ]
        heapify(heap)
        all_items = [(item.key, needed, item) for needed, items in self.items.items() for item in items]
        for _, needed, item in sorted(all_items, key=itemgetter(0)):
            passed: list[tuple[float, int]] = []
            while heap and item.left > 0 and len(passed) < MOST_TRIED and -heap[0][0] >= needed[CPU] - ROUNDING:
                entry = heappop(heap)
                place = entry[1]
                free = free_of[place]
                if not fits(free, needed):
                    passed.append(entry)
                    continue
                if not self._may_grow(item):
                    passed.append(entry)
                    break
                number = self._fitting(free, needed, item)
                self._give(item, number)
                free = free_of[place] = subtract(free, scale(needed, number))
                if self._has_spare(free, rooms[place].capacity):
                    heappush(heap, (-free[CPU], place))
            for entry in passed:
                heappush(heap, entry)
        for node, free in zip(rooms, free_of, strict=True):
            self._keep(node, free)

    def _keep(self, node: NodeRoom, free: Vector) -> None:
        for r in self.ignored:
            free = (*free[:r], node.free[r], *free[r + 1 :])  # type: ignore[assignment]
        node.free = free

    def _fill(self, node: NodeRoom, batch: bool) -> None:
        free = self._free_of(node)
        while self._has_spare(free, node.capacity):
            best: _Item | None = None
            needed = ZERO
            for order in [order for order in self.items if fits(free, order)]:
                item = self._head(order)
                if item is not None and (best is None or item.key < best.key):
                    best, needed = item, order
            if best is None:
                break
            number = self._fitting(free, needed, best) if batch else 1
            self._give(best, number)
            free = subtract(free, scale(needed, number))
        self._keep(node, free)

    def _head(self, order: Vector) -> _Item | None:
        """The next item of that order that may have another job; forgets those that may not."""
        items = self.items[order]
        while items:
            item = items[0]
            if item.left <= 0 or not self._may_grow(item):
                heappop(items)
                continue
            given = self.grown[item.number][CPU] if item.number in self.grown else 0.0
            if given == item.used:
                return item
            item.used, item.key = given, self._key(item)
            heapreplace(items, item)
        del self.items[order]
        return None

    def _fitting(self, free: Vector, order: Vector, item: _Item) -> int:
        most, room = float(item.left), self._room(item)
        for r, wanted in enumerate(order):
            if wanted > 0.0:
                most = min(most, free[r] / wanted)
            if item.order[r] > 0.0:
                most = min(most, room[r] / item.order[r])
        return max(int(most + ROUNDING), 1)

    def _room(self, item: _Item) -> Vector:
        room = subtract(self._limits_of(item.operation), add(item.operation.usage, self.grown.get(item.number, ZERO)))
        for place in self.material.pools[item.operation.pool].path:
            if self.limits[place] is not UNLIMITED:
                room = least(room, subtract(self.limits[place], self.usage[place]))
        return room

    def _limits_of(self, operation: WaitingOperation) -> Vector:
        if Hindrance("limits", operation.id) in self.lifted or (
            operation.own_limits is UNLIMITED and not operation.ratio
        ):
            return UNLIMITED
        return limits_of_parent(self.material.total, operation.own_limits, self.limits[operation.pool], operation.ratio)

    def _may_grow(self, item: _Item, order: Vector = ZERO) -> bool:
        """Whether limits allow another job of an item, or ``order`` if that is given; else notes what does not."""
        operation, order = item.operation, order if any(order) else item.order
        if operation.is_graceful and operation.is_running and GRACEFUL not in self.lifted:
            usage = share(add(operation.usage, self.grown.get(item.number, ZERO)), self.material.total)
            if satisfaction_of(usage, operation.fair_share, operation.demand_share) >= 1.0:
                self.packing.in_way[item.number] = (GRACEFUL,)
                return False
        if operation.pool not in self.limited and operation.own_limits is UNLIMITED and not operation.ratio:
            return True
        if fits(self._room(item), order):
            return True
        used = add(operation.usage, self.grown.get(item.number, ZERO))
        in_way = [] if fits(subtract(self._limits_of(operation), used), order) else [operation.id]
        path = self.material.pools[operation.pool].path
        full = (place for place in path if not fits(subtract(self.limits[place], self.usage[place]), order))
        in_way += [self.material.pools[place].name for place in full]
        self.packing.in_way[item.number] = tuple(Hindrance("limits", name) for name in in_way)
        return False

    def _give(self, item: _Item, number: int) -> None:
        item.left -= number
        order = scale(item.order, number)
        self.grown[item.number] = add(self.grown.get(item.number, ZERO), order)
        for place in self.material.pools[item.operation.pool].path:
            self.usage[place] = add(self.usage[place], order)
        self.packing.cores += order[CPU]
        self.packing.jobs += number

    def _fill_pieces(self, rooms: list[NodeRoom]) -> None:
        """Start jobs as if what the nodes have left were one node."""
        left = ZERO
        for node in rooms:
            left = add(left, node.free)
        for item in sorted(self.all_items):
            while item.left > 0 and fits(left, item.order) and self._may_grow(item):
                number = self._fitting(left, item.order, item)
                if item.number in self.gangs and number < item.left:
                    break
                self._give(item, number)
                left = subtract(left, scale(item.order, number))

    def _sum_up(self, rooms: list[NodeRoom]) -> None:
        packing, pools = self.packing, self.material.pools
        packing.placed = {number: grown[CPU] for number, grown in self.grown.items()}
        packing.grown = {
            pool.name: subtract(now, pool.usage)
            for pool, now in zip(pools, self.usage, strict=True)
            if now != pool.usage
        }
        operations = list(self.material.operations)
        packing.grown.update({operations[number].id: grown for number, grown in self.grown.items()})
        packing.left = {
            number: left
            for number, each in enumerate(operations)
            if (left := each.waiting_cores - packing.placed.get(number, 0.0)) > ROUNDING
        }
        known: dict[Vector, tuple[Hindrance, ...]] = {}
        for item in self.all_items:
            if item.left > 0 and item.number not in packing.in_way:
                if item.order not in known:
                    known[item.order] = tuple(self._find_in_way(item.order, rooms))
                in_way = known[item.order]
                if item.number in self.gangs and in_way != (FULL,):
                    in_way = (GANG, *(each for each in in_way if each != SPARE))
                packing.in_way[item.number] = in_way

    def _find_in_way(self, order: Vector, rooms: list[NodeRoom]) -> Iterator[Hindrance]:
        """Why no node takes a job of this order, what concerns most cores first."""
        cores: dict[Hindrance, float] = {}
        whole = 0.0
        for node in rooms:
            whole += node.free[CPU]
            if node.free[CPU] < order[CPU] - ROUNDING:
                continue
            lacking = [
                r for r, wanted in enumerate(order) if wanted > node.free[r] + ROUNDING and r not in self.ignored
            ]
            for hindrance in [Hindrance(RESOURCES[r]) for r in lacking] or [SPARE]:
                cores[hindrance] = cores.get(hindrance, 0.0) + node.free[CPU]
        if not cores:
            # What no node could hold if it was empty does not wait for others' ends.
            is_in_pieces = order[CPU] - ROUNDING <= whole or order[CPU] - ROUNDING > self.largest
            cores[FRAGMENTATION if is_in_pieces else FULL] = whole
        yield from sorted(cores, key=lambda each: -cores[each])
