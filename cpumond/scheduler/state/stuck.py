"""Operations of which no job can start, whichever jobs end. Some of these operations fail, the others are reported;
pure (semantics.md 2.13, 3.7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cpumond.fairshare.resources import RESOURCES, UNLIMITED, format_amount
from cpumond.scheduler.decide.gangs import sum_needed
from cpumond.scheduler.decide.snapshot import describe_filters, element_name
from cpumond.scheduler.decide.starvation import priority_of
from cpumond.scheduler.elements import Operation, OperationElement, PoolElement, Stuck, Tree
from cpumond.scheduler.elements.fitting import Fitting
from cpumond.scheduler.elements.node_sizes import NodeSizes, fits
from cpumond.scheduler.events.noticed import make_stuck_event
from cpumond.scheduler.state import State

LOOK_S = 60.0
"""Seconds between checks for stuck operations; less if one of the time-outs is shorter."""


def look(state: State, now: float) -> None:
    """Note since when operations without jobs have a filter that fits no online node; note stuck operations."""
    online: dict[Fitting, bool] = {}
    filtered = state.operations.values() if any(tree.fittings for tree in state.trees.values()) else ()
    found = [each.id for each in filtered if _is_unmatched(each, online)]
    state.unmatched = {name: state.unmatched.get(name, now) for name in found}
    rules = state.rules
    limits_s = rules.operation_hangup_due_to_limiting_ancestor_safe_timeout_s
    nodes_s = rules.operation_hangup_safe_timeout_s
    if now - state.stuck_at >= min(LOOK_S, limits_s, nodes_s):
        state.stuck_at = now
        sizes = _OnlineSizes()
        for operation in state.operations.values():
            why, is_limited = _find_why(operation, sizes)
            _note(state, operation, why, limits_s if is_limited else nodes_s, now)


def find_unmatched(state: State, now: float) -> Iterator[Operation]:
    """Return the operations that must fail. Each call returns an operation again until its end has been applied."""
    timeout_s = state.rules.unmatched_scheduling_tag_timeout_s
    for name, since in state.unmatched.items() if timeout_s else ():
        operation = state.operations.get(name)
        # Meanwhile a node that fits may have come, and a job may have started there.
        if now - since >= timeout_s and operation is not None and _is_unmatched(operation, {}):
            yield operation


def _is_unmatched(operation: Operation, online: dict[Fitting, bool]) -> bool:
    """Return whether the operation's own filter fits no online node, in any of its trees.

    Returns False if no node is online at all: then the filter is not the cause. ``online``: results so far: ``Fitting``
    -> whether any node of it is online."""
    if operation.is_held or not operation.needed or operation.active_job_count:
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


def _note(state: State, operation: Operation, why: str, timeout_s: float, now: float) -> None:
    if not why:
        operation.stuck = None
        return
    if operation.stuck is None:
        operation.stuck = Stuck(why, now)
    stuck = operation.stuck
    stuck.why = why
    if not stuck.is_reported and now - stuck.since >= timeout_s:
        stuck.is_reported = True
        state.happened.append(make_stuck_event(operation, why, now))


class _OnlineSizes:
    """The largest requests of jobs that the online nodes can hold; computed on demand."""

    def __init__(self) -> None:
        self._made: dict[tuple[Tree | Fitting, bool], NodeSizes] = {}

    def of(self, element: OperationElement) -> NodeSizes:
        key = (element.fitting or element.tree, bool(element.operation.record.vault_bytes))
        if key not in self._made:
            nodes = (node for node in element.tree.nodes.values() if node.is_online and element.may_use(node))
            self._made[key] = NodeSizes(Counter(node.capacity for node in nodes))
        return self._made[key]


def _find_why(operation: Operation, sizes: _OnlineSizes) -> tuple[str, bool]:
    """Return why an operation is stuck in all of its trees (else ""), and whether limits are the cause in any tree."""
    if operation.is_held or not operation.needed or operation.active_job_count:
        return "", False
    elements = operation.elements.values()
    told: list[str] = []
    limited = False
    for element in elements:
        # An operation that waits for others to end, or for its turn, is not stuck.
        why = "" if not element.is_running else find_limiting(element)
        limited = limited or bool(why)
        if element.is_running and not why:
            why = _find_lack_of_nodes(element, sizes)
        if not why:
            return "", False
        told.append(f"{why} (tree {element.tree.name})" if len(elements) > 1 else why)
    return "; ".join(told), limited


def find_limiting(element: OperationElement) -> str:
    """Describe the limits of an element or of a pool above it that are smaller than its smallest job (for a gang: than
    all of its jobs). Returns "" if there are none."""
    record, orders = element.operation.record, [order for order, _ in element.operation.needed_orders]
    if not record.enable_limiting_ancestor_check or not orders:
        return ""
    wanted = [sum_needed(element)] if record.is_gang else orders
    path: list[PoolElement | OperationElement] = [element, *element.ancestors()]
    for each in path:
        if each.limits is not UNLIMITED and not any(fits(each.limits, order) for order in wanted):
            r = next(r for r, amount in enumerate(wanted[0]) if amount > each.limits[r])
            what = "all of its jobs order" if record.is_gang else "its smallest job orders"
            return (
                f"{what} {format_amount(r, wanted[0][r])} {RESOURCES[r]}, and resource_limits of {element_name(each)} "
                f"allow {format_amount(r, each.limits[r])}"
            )
    return ""


def _find_lack_of_nodes(element: OperationElement, sizes: _OnlineSizes) -> str:
    if told := element.explain_unplaceable():
        return told
    if priority_of(element) == "none":
        return ""
    online, operation = sizes.of(element), element.operation
    if not online.counts:
        return f"no node that is online fits {describe_filters(element)}" if element.fitting is not None else ""
    told = online.explain_unplaceable(operation.needed_orders, operation.record.is_gang)
    return f"{told}, of those that are online" if told else ""
