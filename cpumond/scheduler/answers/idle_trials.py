"""Search for changes that let waiting work start on idle CPU, by trials of the scheduler on copies of its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

import msgspec

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.answers.idle import Found, Idle, IdleReport, make_report
from cpumond.scheduler.answers.obstacles import (
    CONFIGURED,
    CORDON,
    COUNTS,
    FRAGMENTATION,
    FULL,
    GANG,
    TAGS,
    CapacitySplit,
    Obstacle,
    Waiting,
    count_limit,
    find_waiting,
    is_full,
    list_outside,
    split_capacity,
    waiting_cores,
)
from cpumond.scheduler.answers.remedies import (
    Look,
    Started,
    find_refusals,
    lift,
    list_counts_above,
    list_limited,
    make_remedy,
    name_obstacle,
)
from cpumond.scheduler.answers.unmet import find_unmet
from cpumond.scheduler.elements import OperationElement, Tree
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.state import State
from cpumond.scheduler.trial.fork import ask_at_once
from cpumond.scheduler.trial.remedy import Remedy, join
from cpumond.scheduler.trial.rounds import start_jobs

LEAST_CORES: Final = 1e-6
"""Smaller amounts count as nothing."""
MAX_CANDIDATES: Final = 12
"""Maximum number of obstacles that are tried; those that block most cores come first."""
MAX_TRIALS: Final = 40
LARGE: Final = 1000
MAX_TRIALS_OF_LARGE: Final = 8
"""Maximum numbers of trials of a tree's candidates: in general, and with more than LARGE operations and nodes."""
MAX_CHAIN: Final = 6
ENOUGH: Final = 0.995
"""Fraction of the work blocked by limits that must start with the advised values."""
SINGLE: Final = 0.1
"""A single change that lets this fraction start is preferred to several that let more start."""
MAX_VALUES: Final = 4
"""Maximum number of values that are tried for a limit, from the lowest sufficient one up; in a large tree only one."""
LATER_S: Final = 120.0
"""Time from the moment of the report to the moment of a trial: by then nothing is reserved for a gang."""


def find_idle(state: State, tree: Tree, now: float) -> IdleReport:
    """Return the report on a tree as it is. Changes nothing. Raises CommandError."""
    return ask_at_once(lambda: look_into_idle(state, tree, now), IdleReport)


def look_into_idle(state: State, tree: Tree, now: float) -> IdleReport:
    """Return the report. Changes ``state``, so the caller gives a copy."""
    split = split_capacity(tree)
    too_large = [told for each in tree.operations.values() if (told := each.explain_unplaceable())]
    unmet, refusals = find_unmet(state, tree, split.idle, now), list(find_refusals(state, tree, now))
    search = _Search(state, tree, now, split)
    search.run()
    return make_report(search.idle, now, unmet, refusals, too_large)


class _Search:
    """Search for all obstacles and their remedies; those that block most cores come first."""

    def __init__(self, state: State, tree: Tree, now: float, split: CapacitySplit) -> None:
        self.state, self.tree, self.now = state, tree, now
        starting = 0.0
        if any(waiting_cores(each) for each in tree.operations.values()):
            starting = sum(job.limits[CPU] for job in start_jobs(state, tree, now))
        self.waiting = find_waiting(state, tree)
        self.look = Look(state, tree, self.waiting, list_outside(state, tree))
        outside = sum(max(node.free[CPU], 0.0) for node in self.look.outside if not node.matched_trees)
        self.idle = Idle(tree, split, starting, self.waiting, outside)
        self._is_large = len(tree.operations) + len(tree.nodes) > LARGE
        self._trials_left = MAX_TRIALS_OF_LARGE if self._is_large else MAX_TRIALS

    def run(self) -> None:
        idle = self.idle
        if idle.held <= LEAST_CORES and min(idle.waiting_cores, idle.outside) <= LEAST_CORES:
            return
        known: dict[frozenset[Obstacle], Found] = {}
        for start in self._list_candidates():
            if self._trials_left <= 0:
                break
            found = self._follow(start)
            if found is not None and found.cores > LEAST_CORES:
                known.setdefault(frozenset(found.obstacles), found)
        # Findings that need several kinds of changes are dropped if a single change lets enough work start.
        most = max((each.cores for each in known.values() if not each.is_mixed), default=0.0)
        single = [each for each in known.values() if not each.is_mixed or each.cores * SINGLE > most]
        idle.found = sorted(single, key=lambda each: (-each.cores, FRAGMENTATION in each.obstacles))
        left = idle.held
        for found in idle.found:
            if TAGS not in found.obstacles:
                found.idle = min(found.cores, left)
                left -= found.idle

    def _list_candidates(self) -> list[Obstacle]:
        cores: dict[Obstacle, float] = {}
        cordoned = any(node.cordoned and node.is_online for node in self.tree.nodes.values())
        for each in self.waiting.values():
            firsts = each.in_way[:1] if each.in_way and each.in_way[0].kind in CONFIGURED else each.in_way
            firsts = (*firsts, *([TAGS] if self.look.outside else ()), *([CORDON] if cordoned else ()))
            for obstacle in firsts:
                cores[obstacle] = cores.get(obstacle, 0.0) + each.cores
        cores.pop(FULL, None)
        return sorted(cores, key=lambda each: -cores[each])[:MAX_CANDIDATES]

    def _follow(self, start: Obstacle) -> Found | None:
        """Lift ``start``, then each obstacle that becomes visible, until something starts."""
        waits = frozenset(name for name, each in self.waiting.items() if _is_in_way(start, each))
        chain = [start]
        while True:
            started = self._try(join([lift(each, self.look, waits) for each in chain]), waits, chain)
            if started is None:
                return None
            if started.all_cores > LEAST_CORES:
                break
            if started.hidden is None or len(chain) >= MAX_CHAIN or self._trials_left <= 0:
                return None
            chain.append(started.hidden)
        for each in [each for each in chain if each.kind in COUNTS]:
            place = chain.index(each) + 1
            chain[place:place] = [above for above in list_counts_above(self.look, each, waits) if above not in chain]
        if all(each.kind not in CONFIGURED for each in chain):
            return self._make(chain, started, started, waits)
        return self._find_values(chain, started, waits)

    def _make(self, chain: Sequence[Obstacle], values: Started, started: Started, waits: frozenset[str]) -> Found:
        remedy = join(self._list_remedies(chain, values, waits))
        kind, pool = name_obstacle(self.look, chain[0])
        is_mixed = len(chain) > 1 and any(each.kind not in CONFIGURED for each in chain)
        commands = () if is_mixed else remedy.commands
        remedy = replace(remedy, kind=kind, pool=pool, cores=started.all_cores, commands=commands)
        return Found(tuple(chain), remedy, started.cores, waits)

    def _list_remedies(self, chain: Sequence[Obstacle], values: Started, waits: frozenset[str]) -> list[Remedy]:
        """Return the remedies of a chain; a gang and fragmentation share one remedy. Counts of inner pools are raised
        before those above them: else operations of other pools would take the first places."""

        def depth(limit: Obstacle) -> int:
            return max(len(list(pool.ancestors())) for pool in list_limited(self.tree, limit))

        inner_first = iter(sorted((each for each in chain if each.kind in COUNTS), key=depth, reverse=True))
        told = [each for each in chain if each != FRAGMENTATION or GANG not in chain]
        ordered = [next(inner_first) if each.kind in COUNTS else each for each in told]
        return [make_remedy(self.look, each, values, waits) for each in ordered]

    def _find_values(self, chain: list[Obstacle], lifted: Started, waits: frozenset[str]) -> Found | None:
        """Return the remedy with the lowest sufficient values, as far as a few trials can find them."""
        counts = {each for each in chain if each.kind in COUNTS}
        if not counts:
            return self._try_values(chain, lifted, waits)
        queue = [
            each
            for each in self.tree.queue.values()
            if all(count_limit(pool) in counts or not is_full(pool) for pool in each.ancestors())
        ]
        order = [element.name for element in queue]
        high = max((order.index(name) + 1 for name in lifted.cores if name in order), default=len(order))
        sums = list(accumulate(waiting_cores(each) for each in queue[:high]))
        low = next((n for n, cores in enumerate(sums) if cores >= ENOUGH * lifted.all_cores), high - 1)
        best: Found | None = None
        number = high if self._is_large else low + 1
        for _ in range(MAX_VALUES):
            found = self._try_values(chain, _run_first(queue[:number], lifted), waits)
            if found is not None and found.cores >= ENOUGH * lifted.all_cores:
                best, high = found, number
            else:
                best, low = best or found, number
            if high - low <= 1 or self._is_large or self._trials_left <= 0:
                break
            number = high if best is None or best.cores < ENOUGH * lifted.all_cores else (low + high) // 2
        return best

    def _try_values(self, chain: list[Obstacle], values: Started, waits: frozenset[str]) -> Found | None:
        """Return the remedy with these values and the work that it starts; limits that stay sufficient are left out."""
        needed = [each for each in chain if each.kind not in COUNTS or self._reaches(each, values)]
        started = self._try(join(self._list_remedies(needed, values, waits)), waits, needed)
        return None if started is None else self._make(needed, values, started, waits)

    def _reaches(self, obstacle: Obstacle, values: Started) -> bool:
        pools = list_limited(self.tree, obstacle)
        return any(values.running.get(pool.name, 0) > pool.max_running_operation_count for pool in pools)

    def _try(self, remedy: Remedy, waits: Collection[str], chain: Sequence[Obstacle]) -> Started | None:
        """Return the work that starts after a change; None if one of its commands is refused."""
        self._trials_left -= 1
        state, tree, now = self.state, self.tree, self.now + LATER_S
        return ask_at_once(lambda: _try_out(state, tree, now, remedy, waits, chain), Started | None)


def _try_out(
    state: State, tree: Tree, now: float, remedy: Remedy, waits: Collection[str], chain: Collection[Obstacle]
) -> Started | None:
    try:
        remedy.apply(state, now)
    except CommandError:
        return None
    jobs = start_jobs(state, tree, now)
    cores: dict[str, float] = {}
    on_node, of_operation = Counter[str](), Counter[str]()
    for job in jobs:
        cores[job.element.name] = cores.get(job.element.name, 0.0) + job.limits[CPU]
        on_node[job.node.id] += 1
        of_operation[job.element.name] += 1
    pools = [tree.root, *tree.pools.values()]
    usage = {each.name: each.usage for each in (*pools, *(tree.operations[name] for name in cores))}
    running = {pool.name: pool.running_operation_count for pool in pools}
    hidden: dict[Obstacle, float] = {}
    for name, each in find_waiting(state, tree).items() if not jobs else ():
        in_way = [found for found in each.in_way if found not in chain and found != FULL]
        if name in waits and in_way:
            hidden[in_way[0]] = hidden.get(in_way[0], 0.0) + each.cores
    most = max(hidden, key=lambda each: hidden[each], default=None)
    return Started(cores, dict(on_node), dict(of_operation), usage, running, most)


def _is_in_way(obstacle: Obstacle, waiting: Waiting) -> bool:
    """Whether an obstacle blocks an operation; of limits in the configuration only the nearest counts."""
    in_way = waiting.in_way[:1] if obstacle.kind in CONFIGURED else waiting.in_way
    return obstacle in (CORDON, TAGS, *in_way)


def _run_first(queue: Sequence[OperationElement], lifted: Started) -> Started:
    """Return what ``lifted`` would be if only these operations of the queue ran."""
    more = Counter(pool for element in queue for pool in element.ancestors())
    running = {pool.name: pool.running_operation_count + number for pool, number in more.items()}
    return msgspec.structs.replace(lifted, running=running)
