"""Which jobs are taken away, for whom and why: decisions only, nothing is stopped here (semantics.md 1.9, 6.4 to 6.8).

Pure and deterministic: times are arguments, jobs are walked in a fixed order. Of the living tree only the
jobs' ``preemptibility`` and ``lists_are_old`` are written, a cache of what follows from the last fair-share update, and
a node's ``skipped_searches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from cpumond.fairshare.resources import UNLIMITED, ZERO, Vector, add, dominates, greatest, subtract
from cpumond.scheduler.decide.placement import has_spare
from cpumond.scheduler.decide.preemption_record import tell_shares, tell_starvation
from cpumond.scheduler.decide.starvation import EPSILON
from cpumond.scheduler.decide.victims import (
    ROUNDING,
    as_vector,
    blocks,
    is_permitted,
    is_protected_by_count,
    local_satisfaction,
    may_lose,
    path_of,
    room_below_limits,
    sort_jobs,
    uses,
)
from cpumond.scheduler.elements import PREEMPTIBLE, Element, Job, Node, OperationElement, PoolElement, Tree
from cpumond.scheduler.model import Task

TargetPriority = Literal["normal", "aggressive"]

LEAST_GAIN: Final = 0.1
"""By which part of itself the lesser satisfaction must rise where the swap leaves the victim's side below its share."""


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """One job to start, and the jobs on its node that must end for it, in the order of the walk, each with its reason.

    After the victims' usage is gone and the job's is there, the node fits its capacity and no pool above the job
    exceeds its limits (within ``ROUNDING``). Sparing any one victim breaks that.
    """

    element: OperationElement
    task: Task
    priority: TargetPriority
    victims: tuple[tuple[Job, str], ...]


MOST_SEARCHES: Final = 64
"""How many searches for victims one attempt makes at most; the node's next attempt goes on behind them."""


class Targets:
    """The operations of a tree that may preempt, in the order of service, laid out so that an attempt looks up the few
    that its node can serve. Made once per fair-share update.

    ``ranked``: with their priorities, the children of each pool one after another. ``may_preempt`` is asked about those
    that a search is made for: what was true at the update may have changed since.
    """

    def __init__(
        self,
        ranked: Iterable[tuple[OperationElement, TargetPriority]],
        may_preempt: Callable[[OperationElement, TargetPriority], bool] = lambda _element, _priority: True,
    ) -> None:
        self.may_preempt = may_preempt
        self.below: dict[TargetPriority, dict[Element, _Below]] = {}
        for element, priority in ranked:
            table = self.below.setdefault(priority, {})
            own = table[element] = _Below()
            own.orders = dict.fromkeys(task.resources for task in element.operation.record.tasks)
            side: Element = element
            for pool in element.ancestors():
                below = table.get(pool)
                if below is None:
                    below = table[pool] = _Below()
                below.children.setdefault(side, len(below.children))
                if own.orders.keys() <= below.orders.keys():
                    break  # the pools above have these orders, and lead here
                below.orders |= own.orders
                side = pool


@dataclass(slots=True, eq=False)
class _Below:
    """What is at or below one element: its children on the way to targets, with their rank, and the targets' orders."""

    children: dict[Element, int] = field(default_factory=dict)
    orders: dict[Vector, None] = field(default_factory=dict)


def plan_preemption(node: Node, targets: Targets, now: float, spare: Vector) -> PreemptionPlan | None:
    """The first job of a starving operation that room can be made for on this node, and the jobs that must go for it.

    Targets are tried in the usual order of service, aggressive ones before normal ones. A stage is left out when the
    node's free resources and all that could be freed do not reach ``spare`` (6.6). At most ``MOST_SEARCHES`` are made;
    ``node.skipped_searches`` is where the next attempt goes on.

    Victims are walked latest start first, or with ``preempt_cpu_gap_first`` the preemptible ones first and among the
    others those with a lowered limit; what is not needed in the end is spared, the last of the walk first. Each is
    taken only if its list (6.4), the count rule and the elements above it (6.5) still allow it after the loss of those
    before.
    With ``enable_conditional_preemption`` elements above both victim and target do not block: their total stays.

    No job goes to and fro: below the lowest pool that victim and target have in common, the victim's side must after
    its losses still be better satisfied (7.2) than the target's side is now, and either keep its fair share or be
    better by ``LEAST_GAIN``. So a swap raises the lesser of the two satisfactions, and the reverse swap, which would
    lower it again, is refused. The gain is required since fair shares themselves follow usage a little.
    """
    first, node.skipped_searches = node.skipped_searches, 0
    budget = _Budget(first)
    for priority in _STAGES:
        below = targets.below.get(priority)
        if below is None:
            continue
        tree = next(iter(below)).tree
        stage = _Stage(node, tree, priority, now)
        if not has_spare(node, add(stage.free, stage.most), spare):
            continue
        plan = _Search(stage, below, targets.may_preempt, budget, now).visit(tree.root, add(stage.free, stage.discount))
        if plan is not None:
            return plan
        if budget.is_spent:
            node.skipped_searches = budget.made
            break
    return None


_STAGES: Final[tuple[TargetPriority, ...]] = ("aggressive", "normal")


class _Budget:
    """The searches of one attempt; earlier attempts made those before ``first``, which are not made again."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.made = 0

    @property
    def is_spent(self) -> bool:
        return self.made >= self.first + MOST_SEARCHES


class _Stage:
    """The candidates on one node at one priority, in the order of the walk, and what they could free (6.6 step 2)."""

    def __init__(self, node: Node, tree: Tree, priority: TargetPriority, now: float) -> None:
        self.priority = priority
        self.aggressive = aggressive = priority == "aggressive"
        self.free = as_vector(f + c * ROUNDING for f, c in zip(node.free, node.capacity, strict=True))
        self.candidates: list[tuple[Job, PoolElement | None]] = []
        """Jobs, each with the nearest pool that blocks: only targets inside that pool may take the job."""
        self.discount = ZERO
        self.conditional: dict[PoolElement, Vector] = {}
        blockers: dict[OperationElement, Element | None] = {}
        for job in node.jobs.values():
            element = job.element
            # A node that changed its tree may still have jobs of the other tree; a job that this heartbeat starts has
            # not even been sent yet.
            is_new = job.state == "starting" and job.ordered_at >= now
            if not job.is_active or is_new or element.tree is not tree or not may_lose(element):
                continue
            sort_jobs(element)
            if not is_permitted(job, aggressive):
                continue
            if element not in blockers:
                blockers[element] = next((e for e in path_of(element) if blocks(e, element, aggressive)), None)
            blocker = blockers[element]
            if blocker is None:
                self.discount = add(self.discount, job.usage)
                self.candidates.append((job, None))
            elif isinstance(blocker, PoolElement) and element.tree.config.settings.enable_conditional_preemption:
                self.conditional[blocker] = add(self.conditional.get(blocker, ZERO), job.usage)
                self.candidates.append((job, blocker))
        self.candidates.sort(key=lambda candidate: _victim_order(candidate[0]))
        self.pools = {pool: None for job, _ in self.candidates for pool in job.element.ancestors()}
        """Pools with a candidate below them."""
        self.inside: dict[PoolElement, list[PoolElement]] = {}
        """``pools`` by parent."""
        for pool in self.pools:
            if pool.parent is not None:
                self.inside.setdefault(pool.parent, []).append(pool)
        self.most = self.discount
        for amount in self.conditional.values():
            self.most = greatest(self.most, add(self.discount, amount))


def _victim_order(job: Job) -> tuple[int, int, float, int]:
    if not job.element.tree.config.settings.preempt_cpu_gap_first:
        return (0, 0, -job.start_time, -job.sequence)
    protected = job.preemptibility != PREEMPTIBLE
    return (int(protected), int(protected and not job.has_cpu_gap), -job.start_time, -job.sequence)


class _Search:
    """The way through the pools to the first target that victims are found for, in the order of service.

    An order that fails for one target fails for all whose path joins that of the candidates at the same pool, from a
    side that is satisfied no less. So the cost follows the pools near the candidates, not all that starve.
    """

    def __init__(
        self,
        stage: _Stage,
        below: Mapping[Element, _Below],
        may_preempt: Callable[[OperationElement, TargetPriority], bool],
        budget: _Budget,
        now: float,
    ) -> None:
        self.stage = stage
        self.below = below
        self.may_preempt = may_preempt
        self.budget = budget
        self.now = now
        self.failed: dict[tuple[PoolElement, Vector], float] = {}
        self.own = {job.element for job, _ in stage.candidates}

    def visit(self, pool: PoolElement, available: Vector) -> PreemptionPlan | None:
        """Search below a pool with candidates or the root. ``available``: free room and what the pools above let go."""
        stage, below = self.stage, self.below.get(pool)
        if below is None:
            return None
        available = add(available, stage.conditional.get(pool, ZERO))
        orders = [order for order in below.orders if dominates(available, order)]
        children: Iterable[Element] = below.children
        if not orders:
            # Only jobs that a pool further down gives to targets inside it can be enough.
            inside = stage.inside.get(pool, ()) if stage.conditional else ()
            children = sorted((child for child in inside if child in below.children), key=below.children.__getitem__)
        for child in children:
            if isinstance(child, PoolElement) and child in stage.pools:
                plan = self.visit(child, available)
            elif orders:
                plan = self._try(pool, child, orders, local_satisfaction(child))
                orders = [order for order in orders if not self._is_hopeless(pool, order, 0.0)]
            else:
                continue
            if plan is not None or self.budget.is_spent:
                return plan
        return None

    def _try(
        self, joint: PoolElement, element: Element, orders: Iterable[Vector], satisfaction: float
    ) -> PreemptionPlan | None:
        """Search at or below an element without candidates; ``satisfaction`` is that of the side below ``joint``."""
        below = self.below[element]
        orders = [
            order
            for order in orders
            if order in below.orders
            and not self._is_hopeless(joint, order, satisfaction)
            and (element.limits is UNLIMITED or dominates(room_below_limits(element, order), ZERO))
        ]
        if not orders:
            return None
        if isinstance(element, OperationElement):
            return self._try_operation(joint, element, orders, satisfaction)
        for child in below.children:
            plan = self._try(joint, child, orders, satisfaction)
            if plan is not None or self.budget.is_spent:
                return plan
            if all(self._is_hopeless(joint, order, satisfaction) for order in orders):
                break
        return None

    def _try_operation(
        self, joint: PoolElement, target: OperationElement, orders: list[Vector], satisfaction: float
    ) -> PreemptionPlan | None:
        stage, budget = self.stage, self.budget
        if not self.may_preempt(target, stage.priority):
            return None
        for task in target.operation.next_tasks():
            order = task.resources
            if order not in orders or self._is_hopeless(joint, order, satisfaction):
                continue
            if budget.is_spent:
                return None
            budget.made += 1
            victims = _Swap(stage, target, order).find_victims() if budget.made > budget.first else None
            if victims is not None:
                return _make_plan(target, task, stage.priority, victims, self.now)
            if target not in self.own:
                self.failed[joint, order] = satisfaction
        return None

    def _is_hopeless(self, joint: PoolElement, order: Vector, satisfaction: float) -> bool:
        least = self.failed.get((joint, order))
        return least is not None and satisfaction >= least


@dataclass(slots=True, eq=False)
class _Room:
    """What is still missing below one limit, the node's or a pool's, per resource; 0 or less is enough."""

    depth: int
    """How many of the target's pools, nearest first, lie below the limited one; -1 for the node."""
    missing: Vector

    @property
    def is_there(self) -> bool:
        return max(self.missing) <= 0.0

    def needs(self, job: Job) -> bool:
        return uses(job, self.missing)


class _Swap:
    """The search for victims for one order of one target."""

    def __init__(self, stage: _Stage, target: OperationElement, order: Vector) -> None:
        self.stage = stage
        self.target = target
        self.order = order
        self.pools = list(target.ancestors())
        self.depths = {pool: depth for depth, pool in enumerate(self.pools)}
        self.branches: list[Element] = [target, *self.pools]
        """Below ``pools[i]``, the target's side is ``branches[i]``."""
        self.satisfactions: dict[int, float] = {}
        self.lost: dict[Element, Vector] = {}
        self.counts: dict[OperationElement, int] = {}
        self.was_refused_for_losses = False

    def find_victims(self) -> list[Job] | None:
        """Victims in the order of the walk, all of them needed; None when the room cannot be made."""
        candidates = [
            job
            for job, blocker in self.stage.candidates
            if job.element is not self.target and (blocker is None or blocker in self.depths)
        ]
        victims = self._walk(candidates)
        if victims is None and self.was_refused_for_losses:
            # The first victims used up what a pool may lose; a single larger job may be enough.
            victims = next((one for one in map(self._walk, ([job] for job in candidates)) if one is not None), None)
        return victims

    def _walk(self, candidates: list[Job]) -> list[Job] | None:
        self.lost.clear()
        self.counts.clear()
        rooms = self._find_rooms()
        victims: list[Job] = []
        for job in candidates:
            if all(room.is_there for room in rooms):
                break
            side, depth = self._find_side(job.element)
            needed = any(room.depth < 0 or room.depth >= depth for room in rooms if room.needs(job))
            if not needed or not self._may_go(job, side, depth):
                continue
            victims.append(job)
            self._lose(job)
            for room in rooms:
                if room.depth < 0 or room.depth >= depth:
                    room.missing = subtract(room.missing, job.usage)
        if not all(room.is_there for room in rooms):
            return None
        return self._spare(victims, rooms)

    def _spare(self, victims: list[Job], rooms: list[_Room]) -> list[Job]:
        for job in reversed(victims):
            _, depth = self._find_side(job.element)
            concerned = [room for room in rooms if room.depth < 0 or room.depth >= depth]
            without = [add(room.missing, job.usage) for room in concerned]
            if all(max(missing) <= 0.0 for missing in without):
                victims = [other for other in victims if other is not job]
                for room, missing in zip(concerned, without, strict=True):
                    room.missing = missing
        return victims

    def _find_rooms(self) -> list[_Room]:
        rooms = [_Room(-1, subtract(self.order, self.stage.free))]
        for depth, pool in enumerate(self.pools):
            if not pool.is_root and pool.limits != UNLIMITED:
                missing = subtract(ZERO, room_below_limits(pool, self.order))
                if max(missing) > 0.0:
                    rooms.append(_Room(depth, missing))
        return rooms

    def _find_side(self, victim: OperationElement) -> tuple[Element, int]:
        """The victim's side below the lowest common pool, and that pool's place among the target's pools."""
        side: Element = victim
        for pool in victim.ancestors():
            depth = self.depths.get(pool)
            if depth is not None:
                return side, depth
            side = pool
        raise AssertionError("victim and target are of one tree")

    def _may_go(self, job: Job, side: Element, depth: int) -> bool:
        """Whether this job, too, may be taken after the victims so far (see ``plan_preemption``)."""
        element = job.element
        aggressive = self.stage.aggressive
        if is_protected_by_count(element, self.counts.get(element, len(element.jobs))):
            return self._refuse(element)
        conditional = element.tree.config.settings.enable_conditional_preemption
        for above in path_of(element):
            lost = self.lost.get(above)
            if lost is not None and blocks(above, element, aggressive, lost):
                return self._refuse(above)
            if above is side and conditional:
                break
        after = local_satisfaction(side, add(self.lost.get(side, ZERO), job.usage))
        if depth not in self.satisfactions:
            self.satisfactions[depth] = local_satisfaction(self.branches[depth])
        now = self.satisfactions[depth]
        if after > now + EPSILON and (after > 1.0 - EPSILON or after > now * (1.0 + LEAST_GAIN)):
            return True
        return self._refuse(side)

    def _refuse(self, element: Element) -> bool:
        self.was_refused_for_losses |= element in self.lost
        return False

    def _lose(self, job: Job) -> None:
        element = job.element
        self.counts[element] = self.counts.get(element, len(element.jobs)) - 1
        for above in path_of(element):
            self.lost[above] = add(self.lost.get(above, ZERO), job.usage)


def _make_plan(
    target: OperationElement, task: Task, priority: TargetPriority, victims: list[Job], now: float
) -> PreemptionPlan:
    reason = tell_starvation(target, now)
    told = tuple((job, f"{reason}; {tell_shares(job.element)}") for job in victims)
    return PreemptionPlan(target, task, priority, told)
