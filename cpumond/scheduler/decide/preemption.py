"""Chooses the jobs to preempt, for whom and why; stops no job itself (semantics.md 1.9, 6.4 to 6.8).

Pure and deterministic: times are arguments, jobs are walked in a fixed order. It writes only what belongs to the last
fair-share update: ``preemptibility`` of jobs, ``lists_are_old``, and ``skipped_searches`` of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cpumond.fairshare.resources import UNLIMITED, ZERO, Vector, add, dominates
from cpumond.scheduler.decide.placement import has_spare
from cpumond.scheduler.decide.preemption_record import describe_shares, describe_starvation, explain_claim
from cpumond.scheduler.decide.starvation import TargetPriority
from cpumond.scheduler.decide.swap import Candidate, Swap, SwapStage
from cpumond.scheduler.decide.victims import local_satisfaction, room_below_limits
from cpumond.scheduler.elements import Element, Job, Node, OperationElement, PoolElement
from cpumond.scheduler.model import Task


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """One job to start, and the jobs on its node that must end for it, in the order of the walk, each with its reason.
    After the exchange, the node fits its capacity and no pool above the job exceeds its limits (within ``ROUNDING``).
    If any one of the victims stayed, this would not hold."""

    element: OperationElement
    task: Task
    priority: TargetPriority
    victims: tuple[tuple[Job, str], ...]


MOST_SEARCHES: Final = 64
"""Maximum number of searches for victims in one attempt; the next attempt on this node continues after these."""


class Targets:
    """The operations of a tree that may preempt, in the order of service. An index lets an attempt find the few that
    its node can serve. Made once per fair-share update.

    ``ranked``: the targets with their priorities; the children of each pool are adjacent. ``may_preempt`` is checked
    again for each search, since the answer may have changed after the update."""

    def __init__(
        self,
        ranked: Iterable[tuple[OperationElement, TargetPriority]],
        may_preempt: Callable[[OperationElement, TargetPriority], bool] = lambda _element, _priority: True,
    ) -> None:
        self.may_preempt = may_preempt
        self.below: dict[TargetPriority, dict[Element, _Below]] = {}
        self.gangs: list[tuple[OperationElement, TargetPriority]] = []
        """Starving gangs, aggressive ones first. They may need several nodes at once (``gangs.plan_for_gang``)."""
        for element, priority in ranked:
            if element.operation.record.is_gang:
                self.gangs.append((element, priority))
                continue
            table = self.below.setdefault(priority, {})
            own = table[element] = _Below()
            operation = element.operation
            grown = operation.next_tasks() if operation.retries is not None else ()
            own.orders = dict.fromkeys(task.resources for task in (*operation.record.tasks, *grown))
            side: Element = element
            for pool in element.ancestors():
                below = table.get(pool)
                if below is None:
                    below = table[pool] = _Below()
                below.children.setdefault(side, len(below.children))
                if own.orders.keys() <= below.orders.keys():
                    break  # the pools above already have these requests, and lead to this pool
                below.orders |= own.orders
                side = pool
        self.gangs.sort(key=lambda gang: _STAGES.index(gang[1]))


@dataclass(slots=True, eq=False)
class _Below:
    """Targets at or below one element: its children on the way to them, with their ranks, and the targets' requests."""

    children: dict[Element, int] = field(default_factory=dict)
    orders: dict[Vector, None] = field(default_factory=dict)


def plan_preemption(
    node: Node, targets: Targets, now: float, spare: Vector, reserved: Vector = ZERO
) -> PreemptionPlan | None:
    """The first job of a starving operation that can replace jobs on this node, with the jobs that must end for it.

    Targets are tried in the order of service: aggressive ones, then normal ones, last those that claim a strong
    guarantee (6.10). A stage is skipped if the node's free resources and all that victims could free do not reach
    ``spare`` (6.6). After ``MOST_SEARCHES`` the attempt ends; the next one continues at ``node.skipped_searches``.

    ``reserved``: free resources of the node that are kept for a gang (7.3). Jobs within their ``min_run_time`` are no
    candidates. A gang ends as a whole, with its jobs on other nodes, or not at all.

    The walk begins with the last started job. With ``preempt_cpu_gap_first`` preemptible jobs come first; then, in
    other lists, jobs with a lowered limit. Unnecessary victims are spared at the end, the last of the walk first. A
    victim is taken only if its list (6.4), the count rule and the elements above it (6.5) still allow it after the
    losses so far. With ``preempt_cheapest_first`` the victims that lose least work are chosen (``Swap``). With
    ``enable_conditional_preemption`` elements above both victim and target do not block: their total stays.

    Jobs do not change places back and forth. Consider both sides below the lowest common pool of victim and target. The
    victim's side must after its losses still be better satisfied (7.2) than the target's side is now. It must also keep
    its fair share, or be the better satisfied by ``LEAST_GAIN``: fair shares follow usage a little. Then a swap raises
    the lesser of the two satisfactions; the reverse swap would lower it again and is refused."""
    first, node.skipped_searches = node.skipped_searches, 0
    budget = _Budget(first)
    for priority in _STAGES:
        below = targets.below.get(priority)
        if below is None:
            continue
        tree = next(iter(below)).tree
        stage = SwapStage(node, tree, priority, now, reserved)
        if not has_spare(node, add(stage.free, stage.most), spare):
            continue
        plan = _Search(stage, below, targets.may_preempt, budget, now).visit(tree.root, add(stage.free, stage.discount))
        if plan is not None:
            return plan
        if budget.is_spent:
            node.skipped_searches = budget.made
            break
    return None


_STAGES: Final[tuple[TargetPriority, ...]] = ("aggressive", "normal", "guarantee")


class _Budget:
    """Searches in one attempt. Earlier attempts made the searches before ``first``, which are not repeated."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.made = 0

    @property
    def is_spent(self) -> bool:
        return self.made >= self.first + MOST_SEARCHES


class _Search:
    """The way through the pools, in the order of service, to the first target for which victims are found. If a request
    fails for one target, it fails for each target whose path joins the candidates' path at the same pool, from a side
    at least as satisfied. So the cost depends on the pools near the candidates, not on the number of targets."""

    def __init__(
        self, stage: SwapStage, below: Mapping[Element, _Below],
        may_preempt: Callable[[OperationElement, TargetPriority], bool], budget: _Budget, now: float,
    ) -> None:  # fmt: skip
        self.stage = stage
        self.below = below
        self.may_preempt = may_preempt
        self.budget = budget
        self.now = now
        self.failed: dict[tuple[Element, Vector], float] = {}
        self.own = {candidate.element for candidate in stage.candidates}

    def visit(self, pool: PoolElement, available: Vector) -> PreemptionPlan | None:
        """Search below a pool that is the root or has candidates. ``available``: free resources, and those released by
        pools above."""
        stage, below = self.stage, self.below.get(pool)
        if below is None or not pool.may_use(stage.node):
            return None
        available = add(available, stage.conditional.get(pool, ZERO))
        orders = [order for order in below.orders if dominates(available, order)]
        children: Iterable[Element] = below.children
        if not orders:
            # Enough can be freed only by jobs that a pool further down releases to targets inside itself.
            inside = stage.inside.get(pool, ()) if stage.conditional else ()
            children = sorted((child for child in inside if child in below.children), key=below.children.__getitem__)
        for child in children:
            if isinstance(child, PoolElement) and child in stage.pools:
                plan = self.visit(child, available)
            elif orders:
                # Each side claims a guarantee or not, so a failure counts for this side only.
                joint = child if self.stage.by_guarantee else pool
                plan = self._try(joint, child, orders, local_satisfaction(child))
                orders = [order for order in orders if not self._is_hopeless(pool, order, 0.0)]
            else:
                continue
            if plan is not None or self.budget.is_spent:
                return plan
        return None

    def _try(
        self, joint: Element, element: Element, orders: Iterable[Vector], satisfaction: float
    ) -> PreemptionPlan | None:
        """Search at or below an element without candidates. ``satisfaction``: that of the side below ``joint``."""
        if not element.may_use(self.stage.node):
            return None
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
        self, joint: Element, target: OperationElement, orders: list[Vector], satisfaction: float
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
            victims = Swap(stage, target, order).find_victims() if budget.made > budget.first else None
            if victims is not None:
                told = explain_victims(target, stage.priority, victims, self.now)
                return PreemptionPlan(target, task, stage.priority, told)
            # An operation that refuses reclaimed CPU needs more free resources than one that accepts it.
            if target not in self.own and target.operation.record.allow_reclaimed:
                self.failed[joint, order] = satisfaction
        return None

    def _is_hopeless(self, joint: Element, order: Vector, satisfaction: float) -> bool:
        least = self.failed.get((joint, order))
        return least is not None and satisfaction >= least


def explain_victims(
    target: OperationElement, priority: TargetPriority, victims: Iterable[Candidate], now: float
) -> tuple[tuple[Job, str], ...]:
    if priority == "guarantee":
        return tuple((job, explain_claim(target, each.element)) for each in victims for job in each.jobs)
    reason = describe_starvation(target, now)
    return tuple((job, f"{reason}; {describe_shares(job.element)}") for each in victims for job in each.jobs)
