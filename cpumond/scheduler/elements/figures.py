"""Figures of trees, pools and operations: name -> function that reads the figure of a live object. Pure.

JSON, the pool table, the ``yt`` protocol, metrics and the history all read figures here and differ in their form.
- ``_ratio``: the largest component as a fraction of the tree's resources; ``_cores``: the CPU.
- Volumes and their capacities are in share-seconds. ``_seconds``: counted from the start of this scheduler.
- ``usage`` and ``limit_cores`` are allocated resources.
- An operation counts as running if it holds a slot (semantics.md 3.2); ``shown_state`` has a different rule.
- A reader returns None if the element does not have the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, get_args

from cpumond.core.wire import CPU_COUNTERS
from cpumond.fairshare.resources import CPU, Vector, add, find_dominant, ratio
from cpumond.scheduler.elements import (
    Element,
    PoolElement,
    StarvationStatus,
    flow_ratio,
    is_integral,
    usage_share,
    volume_capacity,
    volume_ratio,
)
from cpumond.scheduler.model import to_vector

Read = Callable[[Any], Any]

STARVATION_LEVELS: Final = get_args(StarvationStatus)

TREE: Final[Mapping[str, Read]] = {
    "node_count": lambda t: len(t.nodes),
    "online_node_count": lambda t: sum([node.is_online for node in t.nodes.values()]),
    "cordoned_node_count": lambda t: sum([node.cordon is not None for node in t.nodes.values()]),
    "held_off_node_count": lambda t: sum([node.is_held_off for node in t.nodes.values()]),
    "overcommitted_nodes": lambda t: sum([node.overcommitted_since is not None for node in t.nodes.values()]),
    "pool_count": lambda t: len(t.pools),
    "pending_operation_count": lambda t: len(t.queue),
    "capacity_cores": lambda t: t.total[CPU],
    "allotted_cores": lambda t: sum([node.used[CPU] for node in t.nodes.values()]),
    "backfilled_cores": lambda t: (
        sum(job.usage[CPU] for node in t.nodes.values() for job in node.jobs.values() if job.backfill_until is not None)
        if t.config.settings.enable_backfill
        else 0.0
    ),
    "ordered_on_nodes_cores": lambda t: sum([node.ordered_cores for node in t.nodes.values()]),
}


def _by_name(*names: str) -> dict[str, Read]:
    """Return readers of those attributes of an element whose names are also the names of figures."""
    return {name: attrgetter(name) for name in names}


def _usage_ratio(element: Element) -> float:
    """Return the largest component of ``usage_share``. This is fast, since very many elements are read at a time."""
    a, b, c, d, e = element.usage
    f, g, h, i, j = element.tree.total
    return max(
        a / f if f else 0.0, b / g if g else 0.0, c / h if h else 0.0, d / i if i else 0.0, e / j if j else 0.0
    )  # fmt: skip


def _resource_of(share_of: Callable[[Any], Vector]) -> Read:
    return lambda element: find_dominant(share_of(element))


def _absolute(share_of: Read) -> Callable[[Element], Vector]:
    """Return a reader of absolute amounts, given the reader of a share."""

    def read(element: Element) -> Vector:
        a, b, c, d, e = share_of(element)
        f, g, h, i, j = element.tree.total
        return (a * f, b * g, c * h, d * i, e * j)

    return read


VECTORS: Final[Mapping[str, Callable[[Any], Vector]]] = {
    "fair_share": _absolute(attrgetter("fair_share")),
    "strong_guarantee": _absolute(attrgetter("strong_guarantee_share")),
    **_by_name("usage", "demand", "waiting", "limits", "volume"),
}
"""Readers of absolute amounts. Only pools have ``volume``."""

SHARES: Final[Mapping[str, Callable[[Any], Vector]]] = {
    "fair_share": attrgetter("fair_share"),
    "usage": usage_share,
    "demand": attrgetter("demand_share"),
    "strong_guarantee": attrgetter("strong_guarantee_share"),
}
"""Readers of fractions of the tree's resources. The figure ``NAME_ratio`` is the largest fraction of ``NAME``."""

SHARED: Final[Mapping[str, Read]] = {
    "fair_share_ratio": lambda e: max(e.fair_share),
    "usage_ratio": _usage_ratio,
    "demand_ratio": lambda e: max(e.demand_share),
    "strong_guarantee_ratio": lambda e: max(e.strong_guarantee_share),
    **{f"{name}_resource": _resource_of(read) for name, read in SHARES.items()},
    "fair_share_cores": lambda e: e.fair_share[CPU] * e.tree.total[CPU],
    "limit_cores": lambda e: e.usage[CPU],
    "demand_cores": lambda e: e.demand[CPU],
    "waiting_cores": lambda e: e.waiting[CPU],
    "total_cores": lambda e: e.tree.total[CPU],
    "starvation_level": lambda e: STARVATION_LEVELS.index(e.starvation_status),
    **_by_name("name", "scheduling_status", "starvation_status", *CPU_COUNTERS, "lost_core_seconds"),
}

OPERATION: Final[Mapping[str, Read]] = {**SHARED, "job_count": lambda e: len(e.jobs)}


def _if_integral(read: Callable[[PoolElement], float]) -> Read:
    return lambda pool: read(pool) if is_integral(pool) else None


def _burst_ratio(pool: PoolElement) -> float | None:
    given, total = pool.settings.integral_guarantees, pool.tree.total
    return ratio(to_vector(given.burst_guarantee_resources, 0.0), total) if given.guarantee_type == "burst" else None


def _guarantee_cores(pool: PoolElement) -> float:
    """Return the cores of the strong guarantee plus, for an integral pool, those of its flow."""
    flow = pool.settings.integral_guarantees.resource_flow.get("cpu", 0.0) if is_integral(pool) else 0.0
    return pool.strong_guarantee_share[CPU] * pool.tree.total[CPU] + flow


def _guarantee_ratio(pool: PoolElement) -> float:
    strong = max(pool.strong_guarantee_share)
    return strong + flow_ratio(pool) if is_integral(pool) else strong


POOL: Final[Mapping[str, Read]] = {
    **SHARED,
    "parent": lambda p: None if p.parent is None else p.parent.name,
    "weight": attrgetter("settings.weight"),
    "integral_type": attrgetter("settings.integral_guarantees.guarantee_type"),
    "child_count": lambda p: len(p.children),
    "operations_here": lambda p: len(p.operations),
    "pending_operation_count": lambda p: p.operation_count - p.running_operation_count,
    "waiting_ratio": lambda p: max(ratio(add(p.demand, p.waiting), p.tree.total) - max(p.demand_share), 0.0),
    "burst_ratio": _burst_ratio,
    "flow_ratio": _if_integral(flow_ratio),
    "volume": _if_integral(volume_ratio),
    "capacity": _if_integral(volume_capacity),
    "guarantee_cores": _guarantee_cores,
    "guarantee_ratio": _guarantee_ratio,
    "starvation_tolerance_ratio": lambda p: None if p.rules is None else p.rules.tolerance,
    **_by_name(
        "is_ephemeral", "mode", "operation_count", "running_operation_count", "max_operation_count",
        "max_running_operation_count", "idle_cores", "held_cores",
    ),
}  # fmt: skip
