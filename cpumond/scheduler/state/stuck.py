"""Operations of which no job can start, whoever ends: pure (semantics.md 2.13)."""

from __future__ import annotations

from collections.abc import Iterator

from cpumond.scheduler.elements import Operation
from cpumond.scheduler.elements.fitting import Fitting
from cpumond.scheduler.state import State


def look(state: State, now: float) -> None:
    """Note since when no node that is online fits the filter of an operation that has no job."""
    online: dict[Fitting, bool] = {}
    found = (
        [each.id for each in state.operations.values() if _is_unmatched(each, online)] if _has_filters(state) else ()
    )
    state.unmatched = {name: state.unmatched.get(name, now) for name in found}


def find_unmatched(state: State, now: float) -> Iterator[Operation]:
    """Those that are to fail: found again until their end is applied."""
    timeout_s = state.rules.unmatched_scheduling_tag_timeout_s
    for name, since in state.unmatched.items() if timeout_s else ():
        operation = state.operations.get(name)
        # A node, and a job on it, may have come since.
        if now - since >= timeout_s and operation is not None and _is_unmatched(operation, {}):
            yield operation


def _has_filters(state: State) -> bool:
    return any(tree.fittings for tree in state.trees.values())


def _is_unmatched(operation: Operation, online: dict[Fitting, bool]) -> bool:
    """Whether the filter that it has itself leaves it no node that is online, in any of its trees.

    Not where none is online at all: then it is not for the filter that it waits. ``online``: whether a node of these
    is, as far as it is known.
    """
    if operation.record.suspended or not operation.needed or operation.active_job_count:
        return False
    elements = operation.elements.values()
    if not any(each.is_running for each in elements):
        return False
    for each in elements:
        fitting = each.fitting
        if fitting is None or not each.options.scheduling_tag_filter.strip():
            return False
        if fitting not in online:
            online[fitting] = any(node.is_online for node in fitting.nodes)
        if online[fitting]:
            return False
    return any(node.is_online for each in elements for node in each.tree.nodes.values())
