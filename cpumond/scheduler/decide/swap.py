"""Candidates for preemption on one node, and victims among them for one job of a target (semantics.md 6.6). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from cpumond.fairshare.resources import CPU, ZERO, Vector, add, dominates, greatest, share, subtract, sum_vectors
from cpumond.scheduler.decide.cost import lost_core_seconds, spared_until
from cpumond.scheduler.decide.placement import may_start_within, room_beside
from cpumond.scheduler.decide.starvation import EPSILON, TargetPriority, claims_guarantee, keeps_guarantee
from cpumond.scheduler.decide.victims import (
    ROUNDING,
    as_vector,
    blocks,
    is_permitted,
    is_protected_by_count,
    local_satisfaction,
    may_lose,
    path_of,
    rooms_above,
    sort_jobs,
    uses,
)
from cpumond.scheduler.elements import PREEMPTIBLE, Element, Job, Node, OperationElement, PoolElement, Tree

LEAST_GAIN: Final = 0.1
"""Fraction by which the lower satisfaction must rise if the swap leaves the victim's side below its share."""

NODE: Final = -1
ORDERS: Final = -2
"""Bounds of a node: NODE for its jobs' limits; ORDERS for their requests, if a target refuses reclaimed CPU (1.10)."""

MOST_SETS: Final = 200
"""Maximum number of sets of victims compared to find the least loss; the first sufficient set is the upper bound."""


class Candidate:
    """Jobs of a node that can be preempted together: one job, or all jobs of a gang, on any node."""

    __slots__ = ("blocker", "element", "jobs", "lost_core_seconds", "ordinary_cores", "rank", "usage", "whole")

    def __init__(self, job: Job, blocker: PoolElement | None) -> None:
        self.element = job.element
        self.jobs: tuple[Job, ...] = (job,)
        """The job on this node that started last comes first."""
        self.usage = job.usage
        """Resources on the node that become free when this candidate ends."""
        self.whole = job.usage
        """Resources on all nodes that become free when this candidate ends."""
        self.ordinary_cores = job.ordinary_cores
        """CPU of the node that ordinary jobs may request after this candidate has ended."""
        self.blocker = blocker
        """The nearest pool that blocks: only targets inside this pool may preempt the candidate."""
        self.rank = int(job.task.fail_on_job_restart)
        """Lower ranks end first: less protected lists; in one list, jobs that do not fail their operation by ending."""
        self.lost_core_seconds = 0.0


class SwapStage:
    """The candidates on one node at one priority, in the order of the walk, and what they could free (6.6 step 2)."""

    def __init__(self, node: Node, tree: Tree, priority: TargetPriority, now: float, reserved: Vector = ZERO) -> None:
        self.node = node
        self.priority = priority
        self.aggressive = priority == "aggressive"
        self.by_guarantee = priority == "guarantee"
        self.now = now
        self.settings = tree.config.settings
        self.keeps_room = self.settings.enable_backfill and reserved is not ZERO
        """Whether resources that backfilled jobs use are reserved for a gang (7.3)."""
        free = room_beside(node.free, reserved)
        self.free = as_vector(f + c * ROUNDING for f, c in zip(free, node.capacity, strict=True))
        self.unordered_cores = node.unordered_cores
        self.candidates: list[Candidate] = []
        self.discount = ZERO
        self.conditional: dict[PoolElement, Vector] = {}
        conditional = self.settings.enable_conditional_preemption
        blockers: dict[OperationElement, OperationElement | PoolElement | None] = {}
        left_out: set[OperationElement] = set()
        for job in node.jobs.values():
            element = job.element
            if element in left_out:
                continue
            if element not in blockers:
                # A node that moved to this tree may still have jobs of its old tree.
                if element.tree is not tree or not may_lose(element, self.by_guarantee):
                    left_out.add(element)
                    continue
                sort_jobs(element)
            if not self._may_go(job):
                continue
            is_gang = element.operation.record.is_gang
            if is_gang:
                left_out.add(element)  # one candidate for all jobs of a gang
            if element not in blockers:
                blockers[element] = next((e for e in path_of(element) if self.blocks(e, element)), None)
            blocker = blockers[element]
            if isinstance(blocker, OperationElement) or (blocker is not None and not conditional):
                continue
            candidate = _make_gang(node, element, blocker) if is_gang else Candidate(job, blocker)
            if is_gang and not all(self._may_go(other) for other in candidate.jobs):
                continue
            self.candidates.append(candidate)
            if candidate.blocker is None:
                self.discount = add(self.discount, candidate.usage)
            else:
                self.conditional[candidate.blocker] = add(
                    self.conditional.get(candidate.blocker, ZERO), candidate.usage
                )
        self._sort()
        elements = dict.fromkeys(candidate.element for candidate in self.candidates)
        self.pools = {pool: None for element in elements for pool in element.ancestors()}
        """Pools that have candidates below them."""
        self.inside: dict[PoolElement, list[PoolElement]] = {}
        """The keys of ``pools``, grouped by parent."""
        for pool in self.pools:
            if pool.parent is not None:
                self.inside.setdefault(pool.parent, []).append(pool)
        self.most = self.discount
        for amount in self.conditional.values():
            self.most = greatest(self.most, add(self.discount, amount))

    def blocks(self, above: Element, victim: OperationElement, lost: Vector = ZERO) -> bool:
        """Whether an element may not lose more to targets outside of it (6.5; for a guarantee 6.10)."""
        return not keeps_guarantee(above, lost) if self.by_guarantee else blocks(above, victim, self.aggressive, lost)

    def _may_go(self, job: Job) -> bool:
        if job.backfill_until is not None and self.keeps_room:
            return False
        # A job that this heartbeat starts has not been sent yet, so it is no victim.
        is_new = job.state == "starting" and job.start_time >= self.now
        is_allowed = self.by_guarantee or is_permitted(job, self.aggressive)
        return not is_new and job.is_active and is_allowed and spared_until(job) <= self.now

    def _sort(self) -> None:
        settings = self.settings
        if self.by_guarantee or settings.preempt_cpu_gap_first or settings.preempt_cheapest_first:
            for each in self.candidates:
                if any(job.preemptibility != PREEMPTIBLE for job in each.jobs):
                    each.rank += 2 if settings.preempt_cpu_gap_first and each.jobs[0].has_cpu_gap else 4
        if settings.preempt_cheapest_first:
            for each in self.candidates:
                each.lost_core_seconds = sum(lost_core_seconds(job, self.now) for job in each.jobs)
        self.candidates.sort(key=_victim_order)


def _make_gang(node: Node, element: OperationElement, blocker: PoolElement | None) -> Candidate:
    jobs = sorted(element.jobs.values(), key=lambda job: (job.node is not node, -job.start_time, -job.sequence))
    gang = Candidate(jobs[0], blocker)
    gang.jobs, gang.whole = tuple(jobs), element.usage
    gang.rank = int(any(job.task.fail_on_job_restart for job in jobs))
    here = [job for job in jobs if job.node is node]
    gang.usage, gang.ordinary_cores = sum_vectors([job.usage for job in here]), sum(job.ordinary_cores for job in here)
    return gang


def _victim_order(candidate: Candidate) -> tuple[int, float, float, int]:
    last = candidate.jobs[0]
    return (candidate.rank, candidate.lost_core_seconds, -last.start_time, -last.sequence)


@dataclass(slots=True, eq=False)
class _Room:
    """Resources still missing below one limit, of the node or a pool; 0 or less means that enough are free."""

    depth: int
    """How many of the target's pools, from the nearest up, are below the limited one; NODE or ORDERS for the node."""
    missing: Vector

    @property
    def is_there(self) -> bool:
        return max(self.missing) <= 0.0

    def freed_by(self, victim: Candidate, depth: int) -> Vector | None:
        """Return what a victim frees below this limit; None for nothing. ``depth``: index, among the target's pools, of
        the pool below which the victim's side is."""
        if self.depth == ORDERS:
            return (0.0, victim.ordinary_cores, 0.0, 0.0, 0.0)
        if self.depth == NODE:
            return victim.usage
        return victim.whole if self.depth >= depth else None


@dataclass(slots=True, eq=False)
class Losses:
    """Losses by preemptions already planned for the same target, on any node."""

    lost: dict[Element, Vector] = field(default_factory=dict)
    counts: dict[OperationElement, int] = field(default_factory=dict)
    """Operation -> number of its jobs that remain."""
    ordered: Vector = ZERO
    """Resources taken by the target."""

    def lose(self, victim: Candidate) -> None:
        element = victim.element
        self.counts[element] = self.counts.get(element, len(element.jobs)) - len(victim.jobs)
        for above in path_of(element):
            self.lost[above] = add(self.lost.get(above, ZERO), victim.whole)

    def copy(self) -> Losses:
        return Losses(dict(self.lost), dict(self.counts), self.ordered)


class Swap:
    """The search for victims for one request of a target. ``before``: preemptions planned for its other jobs."""

    def __init__(self, stage: SwapStage, target: OperationElement, order: Vector, before: Losses | None = None) -> None:
        self.stage = stage
        self.target = target
        self.order = order
        self.before = before or Losses()
        self.pools = list(target.ancestors())
        self.depths = {pool: depth for depth, pool in enumerate(self.pools)}
        self.branches: list[Element] = [target, *self.pools]
        """``branches[i]``: the target's side below ``pools[i]``."""
        self.satisfactions: dict[int, float] = {}
        self.losses = Losses()
        self.was_refused_for_losses = False
        self.sets = 0

    def find_victims(self) -> list[Candidate] | None:
        """Return victims in the order of the walk, each of them necessary; None if no set of victims is enough."""
        candidates = [
            each
            for each in self.stage.candidates
            if each.element is not self.target and (each.blocker is None or each.blocker in self.depths)
        ]
        find = self._find_cheapest if self.stage.settings.preempt_cheapest_first else self._find_first
        victims = find(candidates)
        if victims is None or not self.target.tree.lenders:
            return victims
        # A pool may keep, instead of lending them, resources that its own jobs free: check after all losses (2.17).
        losses = self.before.copy()
        for each in victims:
            losses.lose(each)
        rooms = rooms_above(self.target, add(self.order, self.before.ordered), losses.lost)
        return victims if all(dominates(room, ZERO) for _, room in rooms) else None

    def _find_first(self, candidates: list[Candidate]) -> list[Candidate] | None:
        victims = self._walk(candidates)
        if victims is None and self.was_refused_for_losses:
            # The first victims may have used up what a pool may lose; one larger job in their place may be enough.
            victims = next((one for one in map(self._walk, ([each] for each in candidates)) if one is not None), None)
        return victims

    def _walk(self, candidates: list[Candidate]) -> list[Candidate] | None:
        self.losses = self.before.copy()
        rooms = self._find_rooms()
        victims: list[Candidate] = []
        for each in candidates:
            if all(room.is_there for room in rooms):
                break
            after = self._take(each, rooms)
            if after is not None:
                victims.append(each)
                rooms = after
        return self._spare(victims, rooms) if all(room.is_there for room in rooms) else None

    def _take(self, each: Candidate, rooms: list[_Room]) -> list[_Room] | None:
        """Note this victim's end and return the resources still missing; None if it is protected or not necessary."""
        side, depth = self._find_side(each.element)
        gifts = [room.freed_by(each, depth) for room in rooms]
        needed = any(gift is not None and uses(gift, room.missing) for gift, room in zip(gifts, rooms, strict=True))
        if not needed or not self._may_go(each, side, depth):
            return None
        self.losses.lose(each)
        return [
            room if gift is None else _Room(room.depth, subtract(room.missing, gift))
            for gift, room in zip(gifts, rooms, strict=True)
        ]

    def _spare(self, victims: list[Candidate], rooms: list[_Room]) -> list[Candidate]:
        for each in reversed(victims):
            _, depth = self._find_side(each.element)
            gifts = [(room, gift) for room in rooms if (gift := room.freed_by(each, depth)) is not None]
            without = [add(room.missing, gift) for room, gift in gifts]
            if all(max(missing) <= 0.0 for missing in without):
                victims = [other for other in victims if other is not each]
                for (room, _), missing in zip(gifts, without, strict=True):
                    room.missing = missing
        return victims

    def _find_cheapest(self, candidates: list[Candidate]) -> list[Candidate] | None:
        """Return the victims that lose least work, from no more protected ranks than are needed. The result is exact if
        it takes at most MOST_SETS sets; the first walk gives the upper bound of the lost work."""
        for rank in sorted({each.rank for each in candidates}):
            some = [each for each in candidates if each.rank <= rank]
            some.sort(key=attrgetter("lost_core_seconds", "rank"))
            best = self._find_first(some)
            self.sets = 0
            self.losses = self.before.copy()
            found = self._improve(some, self._find_rooms(), [], best)
            if found is not None:
                return self._walk(found) or found
        return None

    def _improve(
        self, candidates: list[Candidate], rooms: list[_Room], chosen: list[Candidate], best: list[Candidate] | None
    ) -> list[Candidate] | None:
        """Return the cheapest set that consists of ``chosen`` and some candidates, if it is cheaper than ``best``."""
        if all(room.is_there for room in rooms):
            return list(chosen)
        cost = _cost(chosen)
        for number, each in enumerate(candidates):
            if self.sets >= MOST_SETS or (best is not None and cost + each.lost_core_seconds >= _cost(best)):
                break
            self.sets += 1
            before = self.losses.copy()
            after = self._take(each, rooms)
            if after is not None:
                best = self._improve(candidates[number + 1 :], after, [*chosen, each], best)
            self.losses = before
        return best

    def _find_rooms(self) -> list[_Room]:
        order, before = add(self.order, self.before.ordered), self.before.lost
        rooms = [_Room(NODE, subtract(self.order, self.stage.free))]
        unordered, cores = self.stage.unordered_cores, self.order[CPU]
        if not may_start_within(self.target.operation.record, unordered, cores):
            rooms.append(_Room(ORDERS, (0.0, cores - unordered - ROUNDING * max(cores, 1.0), 0.0, 0.0, 0.0)))
        missing = ((depth, subtract(ZERO, room)) for depth, room in rooms_above(self.target, order, before))
        return [*rooms, *(_Room(depth, most) for depth, most in missing if max(most) > 0.0)]

    def _find_side(self, victim: OperationElement) -> tuple[Element, int]:
        """Return the victim's side below the lowest common pool, and that pool's index among the target's pools."""
        side: Element = victim
        for pool in victim.ancestors():
            depth = self.depths.get(pool)
            if depth is not None:
                return side, depth
            side = pool
        raise AssertionError("victim and target must be of one tree")

    def _may_go(self, each: Candidate, side: Element, depth: int) -> bool:
        """Whether this victim may end as well, after the victims so far (see ``plan_preemption``)."""
        element, losses = each.element, self.losses
        by_guarantee = self.stage.by_guarantee
        if not by_guarantee and is_protected_by_count(element, losses.counts.get(element, len(element.jobs))):
            return self._refuse(element)
        conditional = self.stage.settings.enable_conditional_preemption
        for above in path_of(element):
            lost = losses.lost.get(above)
            if lost is not None and self.stage.blocks(above, element, lost):
                return self._refuse(above)
            if above is side and conditional:
                break
        if self.stage.settings.guarantee_tolerance is not None:
            for above in path_of(element):
                if not keeps_guarantee(above, add(losses.lost.get(above, ZERO), each.whole)):
                    return self._refuse(above)
                if above is side:
                    break
            if by_guarantee:
                return self._claims(self.branches[depth])
        after = local_satisfaction(side, add(losses.lost.get(side, ZERO), each.whole))
        if depth not in self.satisfactions:
            self.satisfactions[depth] = local_satisfaction(self.branches[depth])
        now = self.satisfactions[depth]
        gains = after > now + EPSILON and (after > 1.0 - EPSILON or after > now * (1.0 + LEAST_GAIN))
        return gains or self._refuse(side)

    def _claims(self, branch: Element) -> bool:
        """Whether the target's side is below its guarantee, and still within its fair share with the request (6.10)."""
        order = add(self.order, self.before.ordered)
        after = max(share(add(branch.usage, order), branch.tree.total))
        return claims_guarantee(branch) and after < max(branch.fair_share) + EPSILON

    def _refuse(self, element: Element) -> bool:
        self.was_refused_for_losses |= element in self.losses.lost
        return False


def _cost(victims: list[Candidate]) -> float:
    return sum(each.lost_core_seconds for each in victims)
