"""Which jobs are taken away, for whom and why: decisions only, nothing is stopped here (semantics.md 1.9, 6.4 to 6.8).

Pure and deterministic: times are arguments, jobs are walked in the order of their start. Of the living tree only the
jobs' ``preemptibility`` and ``lists_are_old`` are written, a cache of what follows from the last fair-share update, and
a node's ``skipped_searches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from cpumond.fairshare.resources import RESOURCES, UNLIMITED, ZERO, Vector, add, dominates, greatest, share, subtract
from cpumond.fairshare.validate import named, printable, quoted
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    NON_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    Job,
    Node,
    OperationElement,
    PoolElement,
    Preemptibility,
    Tree,
    usage_share,
)
from cpumond.scheduler.model import PreemptionRecord, Task, to_amounts, to_vector
from cpumond.scheduler.placement import is_spare, satisfaction_of
from cpumond.scheduler.starvation import EPSILON, starving_element

TargetPriority = Literal["normal", "aggressive"]
Kind = Literal["preempted", "limit_violated", "overcommit", "graceful", "aborted"]

ROUNDING: Final = 1e-9
"""What sums of usage may be off by, as a part of the capacity, limit or total that they are compared with."""

LEAST_GAIN: Final = 0.1
"""How much better the lesser satisfaction must become, as a part of it, to be worth a job that had its share."""

GIB: Final = 2.0**30


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """One job to start, and the jobs on the same node that must end for it, the oldest last, each with its reason.

    After the victims' usage is gone and the job's is there, the node fits its capacity and no pool above the job
    exceeds its limits (within ``ROUNDING``). Sparing any one victim breaks that. ``freed`` is the victims' usage.
    """

    element: OperationElement
    task: Task
    priority: TargetPriority
    victims: tuple[tuple[Job, str], ...]
    freed: Vector


# --- 6.4: which jobs are protected -------------------------------------------------------------------------------


def sort_jobs(element: OperationElement) -> None:
    """Put the active jobs of an operation in the three lists (6.4), if they may have changed (``lists_are_old``).

    In the order of start; U is the usage of all jobs before. A job is non-preemptible while U is below the fair share
    times ``aggressive_preemption_satisfaction_threshold`` on every non-blocked resource, or below the
    ``non_preemptible_resource_usage_threshold`` on all resources that it names; then aggressively preemptible while U
    is below the fair share times ``preemption_satisfaction_threshold``; then preemptible, unless the fair share covers
    the whole demand. A resource is blocked when the fair share covers its demand; if all are, any one is enough.
    """
    if not element.lists_are_old:
        return
    element.lists_are_old = False
    settings = element.tree.config.settings
    covered = _covers_demand(element)
    names = _resources_that_count(element)
    total = element.tree.total
    inner, outer = (
        tuple((element.fair_share[k] * threshold - ROUNDING) * total[k] for k in names)
        for threshold in (
            settings.aggressive_preemption_satisfaction_threshold,
            settings.preemption_satisfaction_threshold,
        )
    )
    least_list = AGGRESSIVELY_PREEMPTIBLE if covered and any(element.demand_share) else PREEMPTIBLE
    meets = any if covered else all
    threshold = element.rules.non_preemptible_threshold if element.rules is not None else None
    status: Preemptibility = NON_PREEMPTIBLE
    before = ZERO
    for job in sorted(element.jobs.values(), key=_start):
        if status == NON_PREEMPTIBLE:
            safe = threshold is not None and all(u < t for u, t in zip(before, threshold, strict=True))
            if not safe and not meets(before[k] < bound for k, bound in zip(names, inner, strict=True)):
                status = AGGRESSIVELY_PREEMPTIBLE
        if (
            status == AGGRESSIVELY_PREEMPTIBLE
            and least_list == PREEMPTIBLE
            and not meets(before[k] < bound for k, bound in zip(names, outer, strict=True))
        ):
            status = PREEMPTIBLE
        job.preemptibility = status
        before = add(before, job.usage)


def _covers_demand(element: Element) -> bool:
    """Whether all resources are blocked: the fair share covers the demand on each (7.2)."""
    return all(d <= f + ROUNDING for f, d in zip(element.fair_share, element.demand_share, strict=True))


def _resources_that_count(element: Element) -> tuple[int, ...]:
    """The non-blocked resources, or all that the cluster has when all are blocked."""
    total, fair_share, demand_share = element.tree.total, element.fair_share, element.demand_share
    names = tuple(k for k in range(len(RESOURCES)) if total[k] and demand_share[k] > fair_share[k] + ROUNDING)
    return names or tuple(k for k in range(len(RESOURCES)) if total[k])


def is_protected_by_count(element: OperationElement, job_count: int) -> bool:
    """Whether an operation with ``job_count`` active jobs is too small to lose one (6.4, old count rule).

    ``max_unpreemptible_running_job_count`` of the tree, or the operation's if that is less; fewer jobs than the value
    are protected, and as many, too, without ``strict_unpreemptible_running_job_count``.
    """
    limit = unpreemptible_job_count(element)
    if limit is None:
        return False
    strict = element.tree.config.settings.strict_unpreemptible_running_job_count
    return job_count < limit or (job_count == limit and not strict)


def unpreemptible_job_count(element: OperationElement) -> int | None:
    """``max_unpreemptible_running_job_count`` that holds for an operation; None: the count rule is off (6.4)."""
    limit = element.tree.config.settings.max_unpreemptible_running_job_count
    own = element.options.max_unpreemptible_running_job_count
    return limit if limit is None or own is None else min(limit, own)


# --- 6.5, 7.2: satisfaction, and what blocks from above ----------------------------------------------------------


def local_satisfaction(element: Element, lost: Vector = ZERO) -> float:
    """Usage over fair share of the element itself, not the least of its children (7.2), without ``lost`` of its usage.

    1 is exactly the fair share, infinity no fair share at all.
    """
    usage = share(subtract(element.usage, lost), element.tree.total)
    return satisfaction_of(usage, element.fair_share, element.demand_share)


def blocks(element: Element, victim: OperationElement, aggressive: bool, lost: Vector = ZERO) -> bool:
    """Whether this element, the victim's operation or a pool above it, gives nothing away (6.5 a and b)."""
    settings = element.tree.config.settings
    if settings.preemption_check_starvation and element.starvation_status != "non_starving":
        return True
    if not settings.preemption_check_satisfaction:
        return False
    assert element.rules is not None
    assert victim.rules is not None
    threshold = settings.preemption_satisfaction_threshold
    if aggressive and element.rules.aggressive_preemption and victim.rules.aggressive_preemption:
        threshold = settings.aggressive_preemption_satisfaction_threshold
    return local_satisfaction(element, lost) < threshold + EPSILON


def path_of(element: OperationElement) -> Iterator[OperationElement | PoolElement]:
    """The element and the pools above it without the root."""
    yield element
    for pool in element.ancestors():
        if not pool.is_root:
            yield pool


def _is_permitted(job: Job, aggressive: bool) -> bool:
    """Whether the job's own list gives it away at this priority (6.4)."""
    if job.preemptibility == PREEMPTIBLE:
        return True
    rules = job.element.rules
    assert rules is not None
    return aggressive and job.preemptibility == AGGRESSIVELY_PREEMPTIBLE and rules.aggressive_preemption


# --- 6.6: one preemptive attempt ---------------------------------------------------------------------------------

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
                    break  # the pools above have them, too, and know this one
                below.orders |= own.orders
                side = pool


class _Below:
    """What is at or below one element: its children on the way to targets, with their rank, and the orders of these."""

    __slots__ = ("children", "orders")

    def __init__(self) -> None:
        self.children: dict[Element, int] = {}
        self.orders: dict[Vector, None] = {}


def plan_preemption(node: Node, targets: Targets, now: float, spare: Vector) -> PreemptionPlan | None:
    """The first job of a starving operation that room can be made for on this node, and the jobs that must go for it.

    Targets are tried in the usual order of service, aggressive ones before normal ones. A stage is left out when the
    node's free resources and all that could be freed do not reach ``spare`` (6.6). At most ``MOST_SEARCHES`` are made;
    ``node.skipped_searches`` is where the next attempt goes on.

    Victims are walked latest start first, or with ``preempt_cpu_gap_first`` the preemptible ones first and among the
    others those with a lowered limit; what is not needed in the end is spared, the last of the walk first. Each is
    taken only if its list (6.4), the count rule and the elements above it (6.5) still allow it after the loss of those
    before.
    Elements above both victim and target never block: the pool's total does not fall (conditional preemption).

    No job goes to and fro: below the lowest pool that victim and target have in common, the victim's side must after
    its losses still be better satisfied (7.2) than the target's side is now, and either keep its fair share or be
    better by ``LEAST_GAIN``. So a swap raises the lesser of the two satisfactions, and the reverse swap, which would
    lower it again, is refused. The gain is for fair shares themselves, which follow usage a little.
    """
    first, node.skipped_searches = node.skipped_searches, 0
    budget = _Budget(first)
    for priority in _STAGES:
        below = targets.below.get(priority)
        if below is None:
            continue
        tree = next(iter(below)).tree
        stage = _Stage(node, tree, priority, now)
        if not is_spare(node, add(stage.free, stage.most), spare):
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
    """The searches of one attempt: those before ``first`` had their turn at the last one."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.made = 0

    @property
    def is_spent(self) -> bool:
        return self.made >= self.first + MOST_SEARCHES


class _Stage:
    """The candidates on one node at one priority, latest start first, and what they could free (6.6 step 2)."""

    def __init__(self, node: Node, tree: Tree, priority: TargetPriority, now: float) -> None:
        self.priority = priority
        self.aggressive = aggressive = priority == "aggressive"
        self.free = _vector(f + c * ROUNDING for f, c in zip(node.free, node.capacity, strict=True))
        self.candidates: list[tuple[Job, PoolElement | None]] = []
        """With the nearest pool that blocks: only targets inside it may take the job."""
        self.discount = ZERO
        self.conditional: dict[PoolElement, Vector] = {}
        blockers: dict[OperationElement, Element | None] = {}
        for job in node.jobs.values():
            element = job.element
            # A node that changed its tree may still have jobs of the other one; a job of this very heartbeat has not
            # even been ordered yet.
            is_new = job.state == "starting" and job.ordered_at >= now
            if not job.is_active or is_new or element.tree is not tree or not _may_lose(element):
                continue
            sort_jobs(element)
            if not _is_permitted(job, aggressive):
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
        """Those with a candidate below them."""
        self.inside: dict[PoolElement, list[PoolElement]] = {}
        """The same, by parent."""
        for pool in self.pools:
            if pool.parent is not None:
                self.inside.setdefault(pool.parent, []).append(pool)
        self.most = self.discount
        for amount in self.conditional.values():
            self.most = greatest(self.most, add(self.discount, amount))


def _may_lose(element: OperationElement) -> bool:
    if element.operation.record.preemption_mode == "graceful":
        return False
    return not is_protected_by_count(element, len(element.jobs))


def _start(job: Job) -> tuple[float, int]:
    return (job.start_time, job.sequence)


def _victim_order(job: Job) -> tuple[int, int, float, int]:
    if not job.element.tree.config.settings.preempt_cpu_gap_first:
        return (0, 0, -job.start_time, -job.sequence)
    protected = job.preemptibility != PREEMPTIBLE
    return (int(protected), int(protected and not job.has_cpu_gap), -job.start_time, -job.sequence)


class _Search:
    """The way through the pools to the first target that victims are found for, in the order of service.

    What fails for a target fails for all whose path joins the candidates' at the same pool, from a side that is
    satisfied no less. So an attempt costs what is near its candidates, not what starves in the tree.
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
        """Below a pool that has candidates below it (or the root), with ``available`` as far as the pools above say."""
        stage, below = self.stage, self.below.get(pool)
        if below is None:
            return None
        available = add(available, stage.conditional.get(pool, ZERO))
        orders = [order for order in below.orders if dominates(available, order)]
        children: Iterable[Element] = below.children
        if not orders:
            # Only what a pool further down gives to its own can be enough.
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
        """At or below an element without candidates; ``satisfaction`` is that of the side below ``joint``."""
        below = self.below[element]
        orders = [
            order
            for order in orders
            if order in below.orders
            and not self._is_hopeless(joint, order, satisfaction)
            and (element.limits is UNLIMITED or dominates(_room_below_limits(element, order), ZERO))
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


class _Room:
    """What is still missing below one limit, the node's or a pool's, per resource; 0 or less is enough."""

    __slots__ = ("depth", "missing")

    def __init__(self, depth: int, missing: Vector) -> None:
        self.depth = depth
        """How many of the target's pools, nearest first, lie below the limited one; -1 for the node."""
        self.missing = missing

    @property
    def is_there(self) -> bool:
        return max(self.missing) <= 0.0

    def needs(self, job: Job) -> bool:
        return _uses(job, self.missing)


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
        """Victims in the order of the walk, none of them without need; None when the room cannot be made."""
        candidates = [
            job
            for job, blocker in self.stage.candidates
            if job.element is not self.target and (blocker is None or blocker in self.depths)
        ]
        victims = self._walk(candidates)
        if victims is None and self.was_refused_for_losses:
            # The first ones used up what a pool may lose; a single larger job may do.
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
                missing = subtract(ZERO, _room_below_limits(pool, self.order))
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
        """Whether this job, too, may be taken after the losses so far (see ``plan_preemption``)."""
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


def _room_below_limits(element: Element, order: Vector) -> Vector:
    """What is left of the element's limits after ``order``, the tolerance of pools and rounding included."""
    tolerance = ZERO
    if isinstance(element, PoolElement) and element.settings.resource_limits_overcommit_tolerance:
        tolerance = to_vector(element.settings.resource_limits_overcommit_tolerance, 0.0)
    return _vector(
        limit + extra + limit * ROUNDING - usage - more
        for limit, extra, usage, more in zip(element.limits, tolerance, element.usage, order, strict=True)
    )


def _vector(numbers: Iterable[float]) -> Vector:
    a, b, c, d, e = numbers
    return (a, b, c, d, e)


def _make_plan(
    target: OperationElement, task: Task, priority: TargetPriority, victims: list[Job], now: float
) -> PreemptionPlan:
    reason = _tell_starvation(target, now)
    freed = ZERO
    for job in victims:
        freed = add(freed, job.usage)
    told = tuple((job, f"{reason}; {_tell_shares(job.element)}") for job in victims)
    return PreemptionPlan(target, task, priority, told, freed)


# --- 6.6, 6.7, 1.9: jobs that go for no other job's sake ---------------------------------------------------------


def find_limit_violators(node: Node) -> list[tuple[Job, Element, str]]:
    """Jobs of this node that must end because their operation or a pool above it uses more than its limits (6.6).

    With the element whose limit it is (the nearest one) and the reason; latest start first, only until the limits
    hold, and only jobs that use what is above the limit. A pool's ``resource_limits_overcommit_tolerance`` is allowed.

    Candidates are the jobs that could be preempted at some priority: by their list (6.4), the count rule, and all
    elements above them (6.5) - never those that only targets inside a blocking pool may take. Lists and counts protect
    from other operations, not from a limit: when an element above its limit has no candidate left on any node that is
    online, its other jobs here go, too. So a lowered ``resource_limits`` takes jobs away whatever their number.
    """
    jobs = sorted((job for job in node.jobs.values() if job.is_active), key=_start, reverse=True)
    above_all = {above for element in _operations_of(jobs) for above in (element, *element.ancestors())}
    if not any(_is_above_limits(above, ZERO) for above in above_all if above.parent is not None):
        return []
    lost: dict[Element, Vector] = {}
    found: list[tuple[Job, Element]] = []
    taken: set[str] = set()

    def take(job: Job, violated: Element) -> None:
        found.append((job, violated))
        taken.add(job.id)
        _count_loss(job, lost)

    for job in jobs:
        if _is_candidate_for_limits(job) and job.preemptibility == PREEMPTIBLE:
            violated = _find_violated(job, lost)
            if violated is not None:
                take(job, violated)
    for least_list, is_allowed in (
        (PREEMPTIBLE, _is_candidate_for_limits),
        (AGGRESSIVELY_PREEMPTIBLE, lambda job: not any(blocks(a, job.element, True) for a in path_of(job.element))),
    ):
        for job in jobs:
            violated = None if job.id in taken else _find_violated(job, lost)
            if violated is None or not is_allowed(job):
                continue
            # Less protected jobs go first, on whichever node they are.
            if not _has_candidates(violated, _excess(violated, lost.get(violated, ZERO)), taken, least_list):
                take(job, violated)
    found.sort(key=lambda pair: _start(pair[0]))
    needed: list[tuple[Job, Element, str]] = []
    for job, violated in found:
        without = dict(lost)
        without.update((above, subtract(lost[above], job.usage)) for above in path_of(job.element))
        if _find_violated(job, without) is None:
            lost = without
        else:
            needed.append((job, violated, _tell_limits(violated)))
    needed.reverse()
    return needed


def _operations_of(jobs: list[Job]) -> list[OperationElement]:
    return list(dict.fromkeys(job.element for job in jobs))


def _excess(element: Element, lost: Vector) -> Vector:
    if element.limits == UNLIMITED:
        return ZERO
    return subtract(ZERO, add(_room_below_limits(element, ZERO), lost))


def _is_above_limits(element: Element, lost: Vector) -> bool:
    return max(_excess(element, lost)) > 0.0


def _find_violated(job: Job, lost: dict[Element, Vector]) -> Element | None:
    for above in path_of(job.element):
        if _uses(job, _excess(above, lost.get(above, ZERO))):
            return above
    return None


def _uses(job: Job, excess: Vector) -> bool:
    return any(x > 0.0 and u > 0.0 for x, u in zip(excess, job.usage, strict=True))


def _count_loss(job: Job, lost: dict[Element, Vector]) -> None:
    for above in path_of(job.element):
        lost[above] = add(lost.get(above, ZERO), job.usage)


def _is_candidate_for_limits(job: Job) -> bool:
    element = job.element
    if not _may_lose(element):
        return False
    sort_jobs(element)
    return _is_permitted(job, True) and not any(blocks(above, element, True) for above in path_of(element))


def _has_candidates(element: Element, excess: Vector, taken: set[str], least_list: int) -> bool:
    """Whether a job below the element, of list ``least_list`` or a less protected one, that uses what is above its
    limits could still go."""
    if isinstance(element, OperationElement):
        return any(
            job.id not in taken
            and job.node.is_online
            and _uses(job, excess)
            and _is_candidate_for_limits(job)
            and job.preemptibility >= least_list
            for job in element.jobs.values()
        )
    assert isinstance(element, PoolElement)
    children: tuple[Element, ...] = (*element.children.values(), *element.operations.values())
    return any(_has_candidates(child, excess, taken, least_list) for child in children)


def find_graceful(node: Node) -> list[tuple[Job, str]]:
    """Preemptible jobs of operations with ``preemption_mode`` graceful on this node, latest start first (6.7).

    They are asked to end whether or not anybody starves; the count rule protects them as it does others.
    """
    found: list[tuple[Job, str]] = []
    graceful = [job for job in node.jobs.values() if job.element.operation.record.preemption_mode == "graceful"]
    for job in sorted(graceful, key=_start, reverse=True):
        element = job.element
        if not job.is_active:
            continue
        sort_jobs(element)
        if job.preemptibility == PREEMPTIBLE and not is_protected_by_count(element, len(element.jobs)):
            found.append((job, f"its operation gives up what it has above its share: {_tell_shares(element)}"))
    return found


def find_overcommit_victims(node: Node, now: float, allowed_s: float) -> list[tuple[Job, str]]:
    """Jobs that must end because the node has been above its capacity for longer than ``allowed_s`` (1.9 point 2).

    The most protected jobs, and of those the ones started first, stay as long as they fit one after another; the
    others are returned, latest start first. With ``preempt_cpu_gap_first`` jobs with a lowered limit are less
    protected than others of the two protected lists (1.9 point 3). What foreign jobs use is not there to be shared.
    """
    since = node.overcommitted_since
    if since is None or now - since <= allowed_s:
        return []
    room = subtract(add(node.capacity, _vector(c * ROUNDING for c in node.capacity)), node.foreign_usage)
    if dominates(room, node.used):
        return []
    jobs = [job for job in node.jobs.values() if job.is_active]
    for element in _operations_of(jobs):
        sort_jobs(element)
    why = _tell_overcommit(node, now - since, allowed_s)
    found: list[tuple[Job, str]] = []
    for job in sorted(jobs, key=_protection_order):
        left = subtract(room, job.usage)
        # A resource that it does not use cannot be what it has to go for.
        if any(u > 0.0 and x < 0.0 for u, x in zip(job.usage, left, strict=True)):
            found.append((job, why))
        else:
            room = left
    found.sort(key=lambda pair: _start(pair[0]), reverse=True)
    return found


def _protection_order(job: Job) -> tuple[int, int, float, int]:
    gap_first = job.element.tree.config.settings.preempt_cpu_gap_first and job.preemptibility != PREEMPTIBLE
    return (job.preemptibility, int(gap_first and job.has_cpu_gap), job.start_time, job.sequence)


# --- 6.6, step 6: records and sentences --------------------------------------------------------------------------


def make_record(
    job: Job,
    kind: Kind,
    why: str,
    now: float,
    preemptor_job_id: str = "",
    preemptor: OperationElement | None = None,
    priority: Literal["", "normal", "aggressive"] = "",
) -> PreemptionRecord:
    """The record of a decision about ``job``; ``now`` is seconds since 1970, ``why`` a reason from this module.

    Call it while the job still has its usage. The record's ``why`` is the whole sentence.
    """
    element = job.element
    assert element.parent is not None
    head = _HEADS[kind]
    for_operation = for_pool = ""
    if preemptor is not None:
        assert preemptor.parent is not None
        for_operation, for_pool = preemptor.name, preemptor.parent.name
        if kind == "preempted":
            where = f"{named('operation', for_operation)} in {named('pool', for_pool)}"
            head = f"preempted to start job {printable(preemptor_job_id)} of {where}"
    return PreemptionRecord(
        job_id=job.id,
        operation_id=element.name,
        tree=element.tree.name,
        pool=element.parent.name,
        node_id=job.node.id,
        at=now,
        kind=kind,
        why=f"{head}: {why}" if why else head,
        freed=to_amounts(job.usage),
        preemptor_job_id=preemptor_job_id,
        preemptor_operation_id=for_operation,
        preemptor_pool=for_pool,
        priority=priority,
    )


_HEADS: Final[dict[Kind, str]] = {
    "preempted": "preempted",
    "limit_violated": "preempted because of violated resource limits",
    "overcommit": "preempted because the node is overcommitted",
    "graceful": "preempted gracefully",
    "aborted": "aborted",
}


def _tell_starvation(target: OperationElement, now: float) -> str:
    element: OperationElement | PoolElement = starving_element(target) or target
    usage, fair_share = max(usage_share(element)), max(element.fair_share)
    how = "aggressively starving" if element.starvation_status == "aggressively_starving" else "starving"
    below_s = max(0.0, now - element.below_since) if element.below_since is not None else 0.0
    return (
        f"{_tell_name(element)} is {how}, it has been below its share for {below_s:.0f} s: "
        f"it uses {usage:.1%}, its fair share is {fair_share:.1%} of the cluster"
    )


def _tell_shares(element: Element) -> str:
    usage, fair_share = max(usage_share(element)), max(element.fair_share)
    return f"{_tell_name(element)} uses {usage:.1%}, its fair share is {fair_share:.1%}"


def _tell_limits(element: Element) -> str:
    excess = _excess(element, ZERO)
    parts = [
        f"{_tell_amount(k, element.usage[k])} of {_tell_amount(k, element.limits[k])} {RESOURCES[k]}"
        for k in range(len(RESOURCES))
        if excess[k] > 0.0
    ]
    return f"{_tell_name(element)} uses more than its limits allow: {', '.join(parts)}"


def _tell_overcommit(node: Node, for_s: float, allowed_s: float) -> str:
    free = node.free
    parts = [
        f"{_tell_amount(k, node.capacity[k] - free[k])} of {_tell_amount(k, node.capacity[k])} {RESOURCES[k]}"
        for k in range(len(RESOURCES))
        if free[k] < -ROUNDING * node.capacity[k]
    ]
    return (
        f"node {quoted(node.address)} has been above its capacity for {for_s:.0f} s: {', '.join(parts)}; "
        f"allowed_node_resources_overcommit_duration is {allowed_s:g} s"
    )


def _tell_name(element: Element) -> str:
    return named("operation" if isinstance(element, OperationElement) else "pool", element.name)


def _tell_amount(resource: int, amount: float) -> str:
    return f"{amount / GIB:.4g} GiB" if RESOURCES[resource] == "memory" else f"{amount:.6g}"
