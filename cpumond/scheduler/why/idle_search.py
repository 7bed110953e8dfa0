"""What holds back the waiting jobs that idle CPU would be enough for: hindrances, how much each holds back. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.why.idle_material import Material, WaitingOperation
from cpumond.scheduler.why.packing import (
    CORDON,
    FRAGMENTATION,
    FULL,
    GANG,
    TAGS,
    Hindrance,
    Packing,
    count_limit,
    pack,
)

LEAST_CORES: Final = 1e-6
"""Less than that is nothing."""
MAX_CANDIDATES: Final = 12
"""So many hindrances are tried, those in the way of most cores first."""
MAX_REFINED: Final = 3
"""Of so many the least value is looked for that is enough."""
MAX_CHAIN: Final = 6
ENOUGH: Final = 0.995
"""This part of what a limit holds back must start with the value that is advised."""
COUNTS: Final = ("count", "subpool_count")
CONFIGURED: Final = (*COUNTS, "limits")
SINGLE: Final = 0.1
"""A change that lets this part start is told rather than several that let more start."""


@dataclass(slots=True, eq=False)
class Found:
    """Hindrances that hold back ``cores`` together, the first is what one sees, and the values at which they would not.

    ``placed``: place of an operation -> cores that would start. ``idle``: the part of the idle CPU that is laid to
    these hindrances alone.
    """

    hindrances: tuple[Hindrance, ...]
    values: Mapping[Hindrance, float]
    cores: float
    packing: Packing
    placed: Mapping[int, float] = field(default_factory=dict)
    waits: frozenset[int] = frozenset()
    """Places of the operations in whose way the first one is."""
    idle: float = 0.0

    @property
    def is_mixed(self) -> bool:
        """Whether it takes more than changes of the configuration, or than one thing that nodes lack."""
        return len(self.hindrances) > 1 and any(each.kind not in CONFIGURED for each in self.hindrances)


@dataclass(slots=True, eq=False)
class Search:
    """``base``: what starts by itself; ``idle``: cores left then; ``held``: of them those that what waits could use."""

    material: Material
    base: Packing
    idle: float
    waiting: float
    held: float
    outside: float
    """Idle cores of nodes outside of the tree that no work waits for there."""
    found: list[Found] = field(default_factory=list)
    operations: list[WaitingOperation] = field(default_factory=list)


def search(material: Material) -> Search:
    """All that is in the way, what holds back most first."""
    base = pack(material)
    idle = max(material.split.idle - base.cores, 0.0)
    waiting = sum(base.left.values())
    outside = sum(node.free[CPU] for node in material.outside if not node.why)
    result = Search(material, base, idle, waiting, min(idle, waiting), outside)
    result.operations = list(material.operations)
    if waiting <= LEAST_CORES or idle + outside <= LEAST_CORES:
        return result
    known: dict[frozenset[Hindrance], Found] = {}
    for start in _candidates(result):
        found = _follow(result, start)
        if found is not None:
            known.setdefault(frozenset(found.hindrances), found)
    if not known and (too_large := _find_too_large(result)) is not None:
        known[frozenset(too_large.hindrances)] = too_large
    ranked = sorted(known.values(), key=lambda each: -each.cores)
    result.found = [_refine(result, each) for each in ranked[:MAX_REFINED]] + ranked[MAX_REFINED:]
    result.found = [each for each in result.found if each.cores > LEAST_CORES]
    result.found = _without_mixed(result.found)
    result.found.sort(key=lambda each: -each.cores)
    left = result.held
    for found in result.found:
        if TAGS not in found.hindrances:
            found.idle = min(found.cores, left)
            left -= found.idle
    return result


def _without_mixed(found: list[Found]) -> list[Found]:
    """Where one change alone lets enough start, those that need several of different kinds are left out."""
    most = max((each.cores for each in found if not each.is_mixed), default=0.0)
    return [each for each in found if not each.is_mixed or each.cores * SINGLE > most]


def _candidates(result: Search) -> list[Hindrance]:
    cores: dict[Hindrance, float] = {}
    for number, in_way in result.base.in_way.items():
        left = result.base.left.get(number, 0.0)
        firsts = in_way[:1] if in_way and in_way[0].kind in (*COUNTS, "limits") else in_way
        for hindrance in firsts:
            cores[hindrance] = cores.get(hindrance, 0.0) + left
        for hindrance, nodes in ((TAGS, result.material.outside), (CORDON, result.material.cordoned)):
            if nodes:
                cores[hindrance] = cores.get(hindrance, 0.0) + left
    cores.pop(FULL, None)
    return sorted(cores, key=lambda each: -cores[each])[:MAX_CANDIDATES]


def _follow(result: Search, start: Hindrance) -> Found | None:
    """Take away ``start``, then what it hid, until something starts; counts further up as long as more does."""
    material, base = result.material, result.base
    waits = frozenset(number for number, in_way in base.in_way.items() if start in in_way or start in (CORDON, TAGS))
    chain = [start]
    packing = pack(material, dict.fromkeys(chain, math.inf))
    while len(chain) < MAX_CHAIN:
        gain = packing.cores - base.cores
        hidden = _next_in_way(packing, waits, chain)
        is_count = hidden is not None and hidden.kind in COUNTS and start.kind in COUNTS
        if hidden is None or (gain > LEAST_CORES and not is_count):
            break
        further = pack(material, dict.fromkeys([*chain, hidden], math.inf))
        if gain > LEAST_CORES and further.cores <= packing.cores + LEAST_CORES:
            break
        chain.append(hidden)
        packing = further
    gain = packing.cores - base.cores
    if gain <= LEAST_CORES:
        return None
    values = {each: float(_reached(material, each, packing)) if each.kind in COUNTS else math.inf for each in chain}
    return _found(result, chain, values, packing, waits)


def _find_too_large(result: Search) -> Found | None:
    """Jobs that no node could hold, and that are larger than all free pieces together: smaller ones would start."""
    base = result.base
    waits = frozenset(number for number, in_way in base.in_way.items() if FRAGMENTATION in in_way)
    plain = frozenset(number for number in waits if GANG not in base.in_way[number])
    chain, waits = ((FRAGMENTATION,), plain) if plain else ((GANG, FRAGMENTATION), waits)
    cores = rest = min(result.held, sum(base.left.get(number, 0.0) for number in waits))
    placed = {}
    for number in sorted(waits):
        more = min(base.left.get(number, 0.0), rest)
        if more > LEAST_CORES:
            placed[number] = more
            rest -= more
    return Found(chain, dict.fromkeys(chain, math.inf), cores, base, placed, waits) if placed else None


def _found(
    result: Search, chain: list[Hindrance], values: Mapping[Hindrance, float], packing: Packing, waits: frozenset[int]
) -> Found:
    base = result.base.placed
    placed = {n: more for n, cores in packing.placed.items() if (more := cores - base.get(n, 0.0)) > LEAST_CORES}
    return Found(tuple(chain), values, packing.cores - result.base.cores, packing, placed, waits)


def _next_in_way(packing: Packing, waits: frozenset[int], chain: list[Hindrance]) -> Hindrance | None:
    cores: dict[Hindrance, float] = {}
    for number in waits:
        in_way = [each for each in packing.in_way.get(number, ()) if each not in chain and each != FULL]
        if in_way:
            cores[in_way[0]] = cores.get(in_way[0], 0.0) + packing.left.get(number, 0.0)
    return max(cores, key=lambda each: cores[each], default=None)


def _refine(result: Search, found: Found) -> Found:
    """The same with the least values that are enough."""
    counts = [each for each in found.hindrances if each.kind in COUNTS]
    if not counts:
        return found
    material, outermost = result.material, counts[-1]
    others = {each: math.inf for each in found.hindrances if each != outermost}
    enough = result.base.cores + ENOUGH * found.cores
    low, high = _limit_now(material, outermost), _reached(material, outermost, found.packing)
    best = pack(material, {**others, outermost: high})
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        tried = pack(material, {**others, outermost: middle})
        if tried.cores >= enough - LEAST_CORES:
            high, best = middle, tried
        else:
            low = middle
    values = {**dict.fromkeys(found.hindrances, math.inf), outermost: float(high)}
    for each in counts[:-1]:
        values[each] = float(_reached(material, each, best))
    best = pack(material, values)
    refined = _found(result, list(found.hindrances), values, best, found.waits)
    return refined if refined.cores > LEAST_CORES else found


def _pools_of(material: Material, hindrance: Hindrance) -> Iterator[int]:
    for place, pool in enumerate(material.pools):
        if count_limit(material.pools, pool) == hindrance:
            yield place


def _limit_now(material: Material, hindrance: Hindrance) -> int:
    return max((material.pools[place].max_running for place in _pools_of(material, hindrance)), default=0)


def _reached(material: Material, hindrance: Hindrance, packing: Packing) -> int:
    """How many operations would run in the pool of a limit, at least the limit as it is."""
    pools = [material.pools[place] for place in _pools_of(material, hindrance)]
    return max((max(each.running + packing.activated.get(each.name, 0), each.max_running) for each in pools), default=0)


def count_fitting(free: float, order: float, spare: float) -> int:
    """How many jobs a node with that much ``free`` starts while it has ``spare`` left before each."""
    least = max(order, spare)
    return int((free - least) / order + 1e-9) + 1 if free >= least - 1e-9 else 0


def split_pieces(result: Search, order: float) -> tuple[float, float]:
    """The largest order of CPU with which jobs would use about as much of the free pieces as can be, and the cores that
    would start; (0, 0) for none. ``order``: what a job orders now."""
    spare = result.material.spare
    free = [
        node.free
        for node in result.base.free
        if all(f >= s or not c for f, s, c in zip(node.free, spare, node.capacity, strict=True))
    ]
    sizes = sorted({math.floor(node[CPU] / k * 100.0 + 1e-6) / 100.0 for node in free for k in (1, 2, 3)}, reverse=True)
    best = (0.0, 0.0)
    for size in sizes:
        if not 0.01 <= size < order:
            continue
        cores = size * sum(count_fitting(node[CPU], size, spare[CPU]) for node in free)
        if cores > best[1] * 1.02:
            best = (size, cores)
    return best
