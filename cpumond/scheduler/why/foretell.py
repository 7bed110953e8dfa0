"""How many cores start work after changes of the configuration: the real scheduler on a copy, for some seconds.

Pure. The copy has what is free on each node, not its jobs, and nobody starves in so short a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from cpumond.core.errors import CpumondError
from cpumond.fairshare.resources import CPU, subtract
from cpumond.fairshare.update import fair_share_update
from cpumond.scheduler.model import Config
from cpumond.scheduler.settings.commands import ConfigCommand, apply
from cpumond.scheduler.state import dispatch, updates
from cpumond.scheduler.why.idle_material import Material
from cpumond.scheduler.why.plan import Material as Known
from cpumond.scheduler.why.plan import rebuild

MAX_ROUNDS: Final = 8
"""Seconds, each with an update and a heartbeat of every node."""


def foretell(known: Known, material: Material, commands: Sequence[ConfigCommand]) -> float | None:
    """Cores that start in a tree after these commands; None where one of them is refused."""
    config = known.config
    try:
        for command in commands:
            config = apply(config, command, new_id=lambda: "planned", nodes={}).config
    except CpumondError:
        return None
    return _count_started(known, material, config)


def _count_started(known: Known, material: Material, config: Config) -> float | None:
    numbers = itertools.count(1)
    state = rebuild(known, config, material.at)
    tree = state.trees.get(material.tree)
    if tree is None:
        return None
    for operation in state.operations.values():
        # Its jobs are not there, but no others are needed in their place.
        for task in operation.record.tasks:
            ended = operation.record.counts.get(task.name)
            left = task.job_count - (0 if ended is None else ended.completed)
            operation.active[task.name] = max(left - operation.needed.get(task.name, 0), 0)
    nodes = []
    for room in (*material.nodes, *material.outside):
        node = state.nodes.get(room.id)
        if node is not None:
            node.is_online, node.sequence = True, 0
            node.foreign_usage = subtract(node.capacity, room.free)
            node.foreign_ordered_cores = node.capacity[CPU] - room.unordered_cores
            nodes.append(node)
    started = -1
    for now in itertools.islice(itertools.count(material.at, 1.0), MAX_ROUNDS):
        updates.accept_update(state, tree, fair_share_update(updates.make_snapshot(state, tree), now, None), now)
        for node in nodes:
            if node.tree == tree.name:
                dispatch.schedule(state, node.id, now, lambda: str(next(numbers)))
        if len(state.jobs) == started:
            break
        started = len(state.jobs)
    return sum(job.limits[CPU] for job in state.jobs.values() if job.is_active)
