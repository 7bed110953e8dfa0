"""Places gangs of the state whole, and reserves resources for one at a time; pure (semantics.md 7.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cpumond.fairshare.resources import ZERO, Vector, add, sum_vectors
from cpumond.scheduler.decide import backfill, gangs, preemption_record
from cpumond.scheduler.decide.placement import GANG_WAITS, ONLY_RECLAIMED, room_beside, satisfaction, wants_jobs
from cpumond.scheduler.decide.starvation import priority_of, still_starves
from cpumond.scheduler.elements import Job, Node, OperationElement, Tree
from cpumond.scheduler.state import State, lifecycle

MakeJob = Callable[[OperationElement, Any, Node], Job]
MOST_TRIES = 16
"""Maximum number of gangs of a tree that are tried in one heartbeat period, and in one attempt to free resources."""
GANG_STOPS = "gang_stops"
"""Why a gang does not start: not all of its earlier jobs have ended."""


def find_reservation(state: State, tree: Tree, now: float) -> gangs.Reservation | None:
    """Return the reservation for a gang of the tree, if any. A reservation that has become useless is dropped."""
    kept = state.gangs.reservations.get(tree.name)
    if kept is None:
        return None
    element = kept.element
    is_there = tree.operations.get(element.name) is element and wants_jobs(element)
    if now >= kept.until:
        state.gangs.rests[element] = now + tree.config.settings.gang_reservation_timeout / 1e3
    elif is_there and max(element.fair_share) > 0.0 and all(_takes_jobs(node, element) for node in kept.rooms):
        return kept
    del state.gangs.reservations[tree.name]
    return None


def reserved_on(state: State, node: Node, tree: Tree, now: float) -> Vector:
    """Return the resources of a node that are reserved for a gang, minus those that backfilled jobs use."""
    kept = find_reservation(state, tree, now)
    return ZERO if kept is None else _left_of(kept, node)


def _left_of(kept: gangs.Reservation, node: Node) -> Vector:
    room = kept.rooms.get(node, ZERO)
    if room is ZERO or not gangs.may_take_back(kept.element):
        return room
    return room_beside(room, gangs.sum_backfilled(node))


def _takes_back(state: State, element: OperationElement, now: float) -> bool:
    """Return whether backfilled jobs may be stopped for a gang; they may not if another gang has the reservation."""
    kept = find_reservation(state, element.tree, now)
    return gangs.may_take_back(element) and (kept is None or kept.element is element)


def place_kept(state: State, tree: Tree, now: float, make_job: MakeJob) -> None:
    """Start the gang that has the reservation, if the gang fits now.

    The regular stage cannot start it: it requires a node with free resources, which may all be reserved."""
    kept = find_reservation(state, tree, now)
    if kept is not None:
        place_gang(state, kept.element, now, make_job)


def place_gang(state: State, element: OperationElement, now: float, make_job: MakeJob) -> str:
    """Start all jobs that a gang needs, in one step. Returns why this is impossible; "" if it was done.

    A gang is tried at most once per heartbeat period, and less often if many gangs wait."""
    last, reason = state.gangs.looked.get(element, (-math.inf, GANG_WAITS))
    if now - last < state.rules.heartbeat_period_s * max(1.0, len(state.gangs.looked) / MOST_TRIES):
        return reason
    begun, tries = state.gangs.tries.get(element.tree.name, (-math.inf, 0))
    if now - begun >= state.rules.heartbeat_period_s:
        begun, tries = now, 0
    if tries >= MOST_TRIES:
        return reason
    state.gangs.tries[element.tree.name] = begun, tries + 1
    reason = _try_gang(state, element, now, make_job)
    if reason:
        state.gangs.looked[element] = now, reason
    return reason


def _try_gang(state: State, element: OperationElement, now: float, make_job: MakeJob) -> str:
    if _is_stopping(state, element):
        return GANG_STOPS
    if element.operation.record.preemption_mode == "graceful" and satisfaction(element) >= 1.0:
        return "graceful_over_fair_share"
    if not element.operation.needed:
        return "no_needed_jobs"
    reason = gangs.find_limit(element)
    if reason:
        return reason
    rooms, spare = _find_rooms(state, element, now), state.rules.spare
    is_free = element.operation.record.allow_reclaimed
    places = gangs.find_places(element, rooms if is_free else gangs.within_orders(rooms), spare)
    if places is None:
        if not is_free and gangs.find_places(element, rooms, spare) is not None:
            return ONLY_RECLAIMED  # others must not be kept out of these resources for a gang that refuses them
        _reserve(state, element, now)
        return GANG_WAITS
    _start_gang(state, [make_job(element, task, node) for task, node in places], now)
    return ""


def _start_gang(state: State, jobs: list[Job], now: float) -> None:
    if _takes_back(state, jobs[0].element, now):
        _take_back(state, jobs, now)
    state.gangs.forget(jobs[0].element)
    for job in jobs:
        lifecycle.start_new(state, job)


def _take_back(state: State, jobs: list[Job], now: float) -> None:
    """Stop the backfilled jobs whose resources the gang needs; nothing protects them from that."""
    on_nodes: dict[Node, list[Job]] = {}
    for job in jobs:
        on_nodes.setdefault(job.node, []).append(job)
    for node, starting in on_nodes.items():
        for victim in backfill.list_returns(node, sum_vectors([job.limits for job in starting]), now):
            late = " and ran for longer than expected" if now > (victim.backfill_until or now) else ""
            why = f"it used resources reserved for that gang until they are needed (enable_backfill){late}"
            first = starting[0]
            record = preemption_record.make_record(victim, "preempted", why, now, first.id, first.element)
            lifecycle.stop(state, victim, "preempted", why, now, record)


def _is_stopping(state: State, element: OperationElement) -> bool:
    """Return whether jobs of the gang's last run may still exist in any tree. The gang must not start while they do;
    perhaps a replacement of such a job is not counted as needed yet. If an earlier run of the scheduler stopped such a
    job, or the job came back with its node, it is in the node's ``strangers``."""
    operation = element.operation
    for node in state.nodes.values():
        if node.stopping and any(job.element.operation is operation for job in node.stopping.values()):
            return True
        strangers = node.strangers.values()
        if strangers and any(each.from_scheduler and each.operation_id == operation.id for each in strangers):
            return True
    return False


def _find_rooms(state: State, element: OperationElement, now: float) -> dict[Node, Vector]:
    """Return the resources that are free for a gang on each node that takes jobs."""
    tree = element.tree
    kept = find_reservation(state, tree, now)
    if _takes_back(state, element, now):
        takers = [node for node in tree.nodes.values() if _takes_jobs(node, element)]
        return {node: add(node.free, gangs.sum_backfilled(node)) for node in takers}
    return {
        node: room_beside(node.free, ZERO if kept is None or kept.element is element else _left_of(kept, node))
        for node in tree.nodes.values()
        if _takes_jobs(node, element)
    }


def _reserve(state: State, element: OperationElement, now: float) -> None:
    tree = element.tree
    timeout_s = tree.config.settings.gang_reservation_timeout / 1e3
    if not timeout_s or max(element.fair_share) <= 0.0 or find_reservation(state, tree, now) is not None:
        return
    if state.gangs.rests.get(element, now) > now:
        return
    nodes = [node for node in tree.nodes.values() if _takes_jobs(node, element)]
    found = gangs.find_reservation(element, nodes, now, now + timeout_s)
    if found is not None:
        state.gangs.reservations[tree.name] = found


def preempt_for_gang(
    state: State, targets: list[tuple[OperationElement, Any]], tree: Tree, now: float, budget: float, make_job: MakeJob
) -> bool:
    """Free resources on several nodes at once for the first starving gang that can then start; else stop no job."""
    last = state.gangs.preempted_at.get(tree.name)
    if last is not None and now - last < tree.config.settings.preemptive_scheduling_backoff / 1e3:
        return False
    state.gangs.preempted_at[tree.name] = now
    first = state.gangs.first.pop(tree.name, 0)
    if first + MOST_TRIES < len(targets):
        state.gangs.first[tree.name] = first + MOST_TRIES
    for element, priority in targets[first : first + MOST_TRIES]:
        if tree.operations.get(element.name) is not element or not wants_jobs(element):
            continue
        is_none = priority != "guarantee" and priority_of(element) == "none"
        if is_none or not still_starves(element, priority) or _is_stopping(state, element):
            continue
        plan = gangs.plan_for_gang(element, priority, _find_rooms(state, element, now), now, state.rules.spare)
        if plan is None or len(plan.victims) > budget:
            continue
        jobs = [make_job(element, task, node) for task, node in plan.places]
        on_node = {job.node: job for job in reversed(jobs)}
        records = [
            preemption_record.make_record(
                victim, "preempted", why, now, on_node.get(victim.node, jobs[0]).id, element, plan.priority
            )
            for victim, why in plan.victims
        ]
        for (victim, why), record in zip(plan.victims, records, strict=True):
            lifecycle.stop(state, victim, "preempted", why, now, record)
        _start_gang(state, jobs, now)
        state.gangs.first.pop(tree.name, None)
        return True
    return False


def _takes_jobs(node: Node, element: OperationElement) -> bool:
    """Return whether a node may get jobs of a gang before its next heartbeat: it is online, has sent a heartbeat to
    this run of the scheduler, and no filter excludes it."""
    is_heard = node.sequence >= 0 and element.tree.nodes.get(node.id) is node
    return is_heard and node.takes_jobs and element.may_use(node)
