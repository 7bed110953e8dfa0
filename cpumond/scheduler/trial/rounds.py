"""Starts on resources that are free now: updates and heartbeats of the state until nothing more starts. Pure.

The state is changed, so the caller gives a copy (``fork``). No job ends or is preempted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Final

from cpumond.fairshare.resources import Vector, dominates
from cpumond.fairshare.update import fair_share_update
from cpumond.scheduler.decide import gangs
from cpumond.scheduler.decide.placement import has_spare, wants_jobs
from cpumond.scheduler.decide.snapshot import room_left
from cpumond.scheduler.elements import Job, Node, OperationElement, Tree
from cpumond.scheduler.elements.fitting import Fitting
from cpumond.scheduler.elements.node_sizes import fits
from cpumond.scheduler.state import State, changes, dispatch, settling, updates

MAX_ROUNDS: Final = 8
"""Maximum number of rounds; each has an update and a heartbeat of every node with free resources for waiting work."""
LOOKED_EACH: Final = 16
"""After this number of heartbeats, operations that cannot start another job are determined again."""

_numbers: Final = itertools.count(1)


def start_jobs(state: State, tree: Tree, now: float) -> list[Job]:
    """Start and return the jobs of a tree that would start by themselves within ``MAX_ROUNDS`` heartbeat periods."""
    known = set(state.jobs)
    for node in tree.nodes.values():
        node.last_preemptive_attempt = math.inf  # so that no job is preempted
    for number in range(1, MAX_ROUNDS + 1):
        before, at = len(state.jobs), now + number * state.rules.heartbeat_period_s
        settle(state, at)
        updates.accept_update(state, tree, fair_share_update(updates.make_snapshot(state, tree), at, None), at)
        _hear_nodes(state, tree, at)
        if len(state.jobs) == before:
            break
    return [job for job_id, job in state.jobs.items() if job_id not in known and job.is_active]


def settle(state: State, now: float) -> None:
    """Apply the consequences of a change until no more follow."""
    while not (change := settling.settle(state, now)).is_empty:
        changes.apply(state, change, now)


def list_takers(tree: Tree) -> list[Node]:
    """Return the nodes of a tree that get jobs if they have free resources."""
    return [node for node in tree.nodes.values() if node.takes_jobs]


def _hear_nodes(state: State, tree: Tree, now: float) -> None:
    """Process one heartbeat of each node that may start a job. Meanwhile, operations that can start none are not in the
    order of service: otherwise each heartbeat would check them again."""
    nodes = list_takers(tree)
    wanting = [each for each in tree.operations.values() if wants_jobs(each)]
    aside: dict[OperationElement, Mapping[str, int]] = {}
    orders: set[Vector] = set()
    heard = due = 0
    for node in nodes:
        if heard == due:
            due += LOOKED_EACH
            wanting = [each for each in wanting if each.operation.needed]
            largest: Rooms = {}
            for each in [each for each in wanting if not _may_start(each, nodes, largest)]:
                aside[each], each.operation.needed = each.operation.needed, {}
                tree.changed[each] = None
            wanting = [each for each in wanting if each not in aside]
            orders = {task.resources for each in wanting for task in each.operation.next_tasks()}
        free = node.free
        if has_spare(node, free, state.rules.spare) and any(fits(free, order) for order in orders):
            dispatch.schedule(state, node.id, now, lambda: f"trial-{next(_numbers)}")
            heard += 1
    for each, needed in aside.items():
        each.operation.needed = needed
        tree.changed[each] = None


Rooms = dict[tuple[Fitting | None, bool], list[Vector]]
"""Keys: the filters of an operation, and whether the operation has secrets."""


def _may_start(element: OperationElement, nodes: Iterable[Node], largest: Rooms) -> bool:
    """Whether limits allow another job (for a gang: all of its jobs), and a usable node has free resources for a job.
    ``largest``: the largest free resources of ``nodes`` that are known, for the keys of ``Rooms``."""
    if element.operation.record.is_gang and gangs.find_limit(element):
        return False
    kind = (element.fitting, bool(element.operation.record.vault_bytes))
    if kind not in largest:
        largest[kind] = list_largest(node.free for node in nodes if element.may_use(node))
    left, _ = room_left(element)
    orders = [task.resources for task in element.operation.next_tasks()]
    return any(fits(left, order) and any(fits(room, order) for room in largest[kind]) for order in orders)


def list_largest(rooms: Iterable[Vector]) -> list[Vector]:
    """Return the vectors that no other vector exceeds in every resource."""
    found: list[Vector] = []
    for room in sorted(set(rooms), reverse=True):
        if not any(dominates(other, room) for other in found):
            found.append(room)
    return found
