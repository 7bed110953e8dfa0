"""The dynamic attributes of pools and operations: each name with its reader (semantics.md 5.2 to 5.4). Pure.

Shares and ratios are fractions of the tree's resources, volumes resource*seconds or share*seconds, periods are
milliseconds as in YTsaurus, times are ISO 8601."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from cpumond.api.updated_tree import UpdatedTree, own_options
from cpumond.api.yt.lazy import MISSING, Lazy, amounts, iso_time, whole
from cpumond.fairshare.resources import RESOURCES, ZERO, Vector, least, scale, share
from cpumond.fairshare.result import FairShare
from cpumond.scheduler.decide import placement, victims
from cpumond.scheduler.decide.snapshot import operation_weight
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    PREEMPTIBLE,
    Element,
    OperationElement,
    PoolElement,
    figures,
    is_integral,
    usage_share,
    volume_capacity,
)
from cpumond.scheduler.model import Resources, to_amounts
from cpumond.scheduler.settings.preemption_rules import PreemptionRules
from cpumond.scheduler.state.retries import find_policy

MAX_SATISFACTION: Final = 1e9
"""Shown as the satisfaction of an element without a fair share, for which it is infinite (7.2)."""

Reader = Callable[[UpdatedTree, Any], Any]


def _figure(name: str, otherwise: Any = MISSING) -> Reader:
    """Return the reader of a figure; for an element without this figure it returns ``otherwise``."""
    read = (figures.POOL if name in figures.POOL else figures.OPERATION)[name]

    def find(_: UpdatedTree, element: Element) -> Any:
        value = read(element)
        return otherwise if value is None else value

    return find


def _amounts(name: str) -> Reader:
    read = figures.VECTORS[name]
    return lambda _, element: amounts(read(element))


def _given(resources: Resources) -> dict[str, Any]:
    """Return configured resources, only those that are set."""
    return {name: amount if name == "cpu" else whole(amount) for name, amount in resources.items()}


def _detailed(convert: Callable[[Vector], Any]) -> Reader:
    """Return a reader of the parts of a fair share, each converted by ``convert``."""

    def read(view: UpdatedTree, element: Element) -> dict[str, Any]:
        shares = view.shares(element)
        parts = FairShare() if shares is None else shares.fair_share
        names = ("strong_guarantee", "integral_guarantee", "weight_proportional", "total")
        return {name: convert(getattr(parts, name)) for name in names}

    return read


def _demand(view: UpdatedTree, element: Element) -> Vector:
    return share(element.demand, view.total)


def _limited_demand(view: UpdatedTree, element: Element) -> Vector:
    return share(view.limited_demand(element), view.total)


def _dominant_resource(view: UpdatedTree, element: Element) -> str:
    used = usage_share(element)
    shares = used if any(used) else _demand(view, element)
    return RESOURCES[shares.index(max(shares))]


def _max_share_ratio(_: UpdatedTree, element: Element) -> float:
    own = own_options(element).max_share_ratio
    return 1.0 if own is None else own


def _strong(_: UpdatedTree, element: Element) -> dict[str, Any]:
    is_pool = isinstance(element, PoolElement)
    return _given(getattr(own_options(element), "strong_guarantee_resources" if is_pool else "min_share_resources"))


def _starving_ancestor(*statuses: str) -> Reader:
    def find(_: UpdatedTree, element: Element) -> str:
        above: Iterable[Element] = (element, *element.ancestors())
        return next((each.name for each in above if each.starvation_status in statuses), "")

    return find


def _rule(name: str) -> Reader:
    """Return a function that reads the rule that is in force for an element. It returns seconds as milliseconds."""

    def read(_: UpdatedTree, element: Element) -> Any:
        value = getattr(_rules(element), name)
        return whole(value * 1e3) if name.endswith("_s") else value

    return read


def _own_rule(option: str, effective: str) -> Reader:
    """Return a reader of an option about starvation: the element's own value or, if unset, the value in force."""
    read_effective = _rule(effective)

    def read(view: UpdatedTree, element: Element) -> Any:
        own = _own_rule_value(element, option)
        if own is None:
            return read_effective(view, element)
        return own if isinstance(own, bool) or not effective.endswith("_s") else whole(own)

    return read


def _own_rule_value(element: Element, option: str) -> Any:
    """Return the element's own option about starvation; None if unset, and for the root, which has no own options."""
    return None if element.parent is None else getattr(own_options(element), option, None)


def _rules(element: Element) -> PreemptionRules:
    assert element.rules is not None
    return element.rules


def _threshold(_: UpdatedTree, element: Element) -> dict[str, Any]:
    found = _rules(element).non_preemptible_threshold
    if found is None:
        return {}
    return _given({name: value for name, value in zip(RESOURCES, found, strict=True) if value != float("inf")})


def _own_threshold(view: UpdatedTree, element: Element) -> dict[str, Any]:
    own = _own_rule_value(element, "non_preemptible_resource_usage_threshold")
    return _threshold(view, element) if own is None else _given(own)


def _known(value: Any) -> Any:
    return MISSING if value is None else value


def _starving_since(_: UpdatedTree, element: Element) -> Any:
    if element.below_since is None or element.starvation_status == "non_starving":
        return MISSING
    return iso_time(element.below_since)


def _below_since(_: UpdatedTree, element: Element) -> Any:
    return MISSING if element.below_since is None else iso_time(element.below_since)


_COMMON: Final[Mapping[str, Reader]] = {
    # Shares.
    "fair_share_ratio": _figure("fair_share_ratio"),
    "dominant_fair_share": _figure("fair_share_ratio"),
    "fair_share": lambda _, e: to_amounts(e.fair_share),
    "detailed_fair_share": _detailed(to_amounts),
    "detailed_dominant_fair_share": _detailed(max),
    "fair_resources": _amounts("fair_share"),
    "usage_ratio": _figure("usage_ratio"),
    "dominant_usage_share": _figure("usage_ratio"),
    "usage_share": lambda _, e: to_amounts(usage_share(e)),
    "demand_ratio": lambda view, e: max(_demand(view, e)),
    "dominant_demand_share": lambda view, e: max(_demand(view, e)),
    "demand_share": lambda view, e: to_amounts(_demand(view, e)),
    "limited_demand_share": lambda view, e: to_amounts(_limited_demand(view, e)),
    "limits_share": lambda view, e: to_amounts(view.limits_share(e)),
    "max_share_ratio": _max_share_ratio,
    "max_possible_usage_ratio": lambda view, e: max(_limited_demand(view, e)),
    "best_allocation_share": lambda view, e: to_amounts(view.best_allocation(e)),
    "best_allocation_ratio": lambda view, e: _least_share(view, view.best_allocation(e)),
    "dominant_resource": _dominant_resource,
    # Guarantees.
    "min_share_ratio": _figure("strong_guarantee_ratio"),
    "adjusted_min_share_ratio": _figure("strong_guarantee_ratio"),
    "recursive_min_share_ratio": _figure("strong_guarantee_ratio"),
    "min_share": lambda _, e: to_amounts(e.strong_guarantee_share),
    "strong_guarantee_share": lambda _, e: to_amounts(e.strong_guarantee_share),
    "min_share_resources": _strong,
    "strong_guarantee_resources": _strong,
    "guaranteed_resources_ratio": lambda view, e: max(view.guaranteed(e)),
    "guaranteed_resources": lambda view, e: amounts(scale(view.total, max(view.guaranteed(e)))),
    "estimated_guarantee_share": lambda view, e: to_amounts(view.guaranteed(e)),
    "promised_fair_share": lambda view, e: to_amounts(view.guaranteed(e)),
    # Resources.
    "resource_usage": _amounts("usage"),
    "resource_demand": _amounts("demand"),
    "limited_resource_demand": lambda view, e: amounts(view.limited_demand(e)),
    "resource_limits": lambda view, e: amounts(least(view.limits(e), view.total)),
    "scheduling_tag_filter": lambda _, e: own_options(e).scheduling_tag_filter,
    "specified_resource_limits": lambda _, e: _given(own_options(e).resource_limits),
    "aggregated_preempted_cpu_x100": lambda _, e: int(100.0 * e.reclaimed_cpu_seconds),
    # Satisfaction and starvation.
    "satisfaction_ratio": lambda view, e: min(view.satisfaction(e), MAX_SATISFACTION),
    "local_satisfaction_ratio": lambda _, e: min(placement.satisfaction(e), MAX_SATISFACTION),
    "scheduling_status": _figure("scheduling_status"),
    "starving": lambda _, e: e.starvation_status != "non_starving",
    "starvation_status": _figure("starvation_status"),
    "starving_since": _starving_since,
    "below_fair_share_since": _below_since,
    "lowest_starving_ancestor": _starving_ancestor("starving", "aggressively_starving"),
    "lowest_aggressively_starving_ancestor": _starving_ancestor("aggressively_starving"),
    "fair_share_starvation_tolerance": _own_rule("fair_share_starvation_tolerance", "tolerance"),
    "fair_share_starvation_timeout": _own_rule("fair_share_starvation_timeout", "fair_share_timeout_s"),
    "fair_share_preemption_timeout": _own_rule("fair_share_starvation_timeout", "fair_share_timeout_s"),
    "min_share_preemption_timeout": _own_rule("min_share_preemption_timeout", "min_share_timeout_s"),
    "fair_share_aggressive_starvation_timeout": _own_rule(
        "fair_share_aggressive_starvation_timeout", "aggressive_timeout_s"
    ),
    "adjusted_fair_share_starvation_tolerance": _rule("tolerance"),
    "adjusted_fair_share_preemption_timeout": _rule("fair_share_timeout_s"),
    "adjusted_min_share_preemption_timeout": _rule("min_share_timeout_s"),
    "effective_fair_share_starvation_tolerance": _rule("tolerance"),
    "effective_fair_share_starvation_timeout": _rule("fair_share_timeout_s"),
    "effective_fair_share_preemption_timeout": _rule("fair_share_timeout_s"),
    "effective_min_share_preemption_timeout": _rule("min_share_timeout_s"),
    "effective_fair_share_aggressive_starvation_timeout": _rule("aggressive_timeout_s"),
    "aggressive_starvation_enabled": _own_rule("enable_aggressive_starvation", "aggressive_starvation"),
    "effective_aggressive_starvation_enabled": _rule("aggressive_starvation"),
    "aggressive_preemption_allowed": _own_rule("allow_aggressive_preemption", "aggressive_preemption"),
    "effective_aggressive_preemption_allowed": _rule("aggressive_preemption"),
    "non_preemptible_resource_usage_threshold": _own_threshold,
    "effective_non_preemptible_resource_usage_threshold": _threshold,
    "min_run_time": _own_rule("min_run_time", "min_run_time_s"),
    "effective_min_run_time": _rule("min_run_time_s"),
    "lost_core_seconds": _figure("lost_core_seconds"),
}


def _least_share(view: UpdatedTree, shares: Vector) -> float:
    return min((part for part, whole in zip(shares, view.total, strict=True) if whole > 0.0), default=0.0)


def _always(value: Any) -> Reader:
    return lambda _view, _element: value


def _below_root(read: Reader) -> Reader:
    """Return a reader that hides an attribute for the root, because only other pools have it (5.1)."""
    return lambda view, pool: MISSING if pool.is_root else read(view, pool)


def _if_integral(read: Reader) -> Reader:
    return lambda view, pool: read(view, pool) if is_integral(pool) else MISSING


def _full_path(_: UpdatedTree, pool: PoolElement) -> str:
    names = [pool.name, *(each.name for each in pool.ancestors())]
    return "/" + "/".join(reversed(names[:-1]))


def _if_flowing(read: Reader) -> Reader:
    """Return a reader of the capacity: also of the future one of a pool that has a flow but no type yet."""
    return lambda view, pool: (
        read(view, pool) if is_integral(pool) or pool.settings.integral_guarantees.resource_flow else MISSING
    )


def _burst_duration(_: UpdatedTree, pool: PoolElement) -> Any:
    burst, flow, volume = (figures.POOL[name](pool) for name in ("burst_ratio", "flow_ratio", "volume"))
    return MISSING if burst is None or burst <= flow else volume / (burst - flow)


def _effective_strong(view: UpdatedTree, pool: PoolElement) -> dict[str, Any]:
    found = view.shares(pool)
    return amounts(ZERO if found is None else found.inferred_strong_guarantee_resources)


def _integral_resources(name: str) -> Reader:
    return lambda _, pool: _given(getattr(pool.settings.integral_guarantees, name))


_POOL: Final[Mapping[str, Reader]] = {
    **_COMMON,
    "waiting_resource_demand": _amounts("waiting"),
    "parent": _figure("parent"),
    "full_path": _below_root(_full_path),
    "mode": _below_root(lambda _, pool: pool.mode),
    "is_ephemeral": _below_root(lambda _, pool: pool.is_ephemeral),
    "weight": lambda view, pool: view.weight(pool),
    "fifo_sort_parameters": lambda _, pool: (
        list(pool.settings.fifo_sort_parameters) if pool.mode == "fifo" and not pool.is_root else MISSING
    ),
    "forbid_immediate_operations": lambda view, pool: (
        view.tree.config.settings.forbid_immediate_operations_in_root
        if pool.is_root
        else pool.settings.forbid_immediate_operations
    ),
    "set_container_cpu_limit": lambda view, pool: _known(placement.find_ceiling_rule(pool, view.tree)),
    "retry_policy": lambda _, pool: list(find_policy(None, pool)) or MISSING,
    "max_retry_memory": _below_root(lambda _, pool: _known(pool.settings.max_retry_memory)),
    "create_ephemeral_subpools": lambda _, pool: pool.settings.create_ephemeral_subpools,
    "child_pool_count": _figure("child_count"),
    "enabled": _always(True),
    "schedulable": lambda _, pool: pool.running_operation_count > 0,
    # Counts.
    "operation_count": _figure("operation_count"),
    "running_operation_count": _figure("running_operation_count"),
    "pending_operation_count": _figure("pending_operation_count"),
    "pool_operation_count": _figure("operations_here"),
    "lightweight_running_operation_count": _always(0),
    "schedulable_operation_count": lambda _, pool: sum(map(_is_schedulable, pool.operations.values())),
    "max_operation_count": _figure("max_operation_count"),
    "max_running_operation_count": _figure("max_running_operation_count"),
    # Guarantees (5.3).
    "effective_strong_guarantee_resources": _effective_strong,
    "integral_guarantee_type": _figure("integral_type"),
    "accumulated_resource_ratio_volume": _figure("volume"),
    "accumulated_resource_volume": _if_integral(_amounts("volume")),
    "integral_pool_capacity": _if_flowing(lambda _, pool: volume_capacity(pool)),
    "integral_pool_capacity_resources": _if_flowing(
        lambda view, pool: amounts(scale(view.total, volume_capacity(pool)))
    ),
    "specified_burst_ratio": _figure("burst_ratio", 0.0),
    "specified_burst_guarantee_resources": _integral_resources("burst_guarantee_resources"),
    "specified_resource_flow_ratio": _figure("flow_ratio", 0.0),
    "specified_resource_flow": _integral_resources("resource_flow"),
    "total_burst_ratio": lambda view, pool: view.total_ratios(pool)[0],
    "total_resource_flow_ratio": lambda view, pool: view.total_ratios(pool)[1],
    "estimated_burst_usage_duration_seconds": _burst_duration,
}


def _is_schedulable(element: OperationElement) -> bool:
    return element.is_running and not element.operation.record.suspended


def _count_jobs(preemptibility: int) -> Reader:
    def count(_: UpdatedTree, element: OperationElement) -> int:
        # This costs nothing extra: the next preemption would sort the jobs anyway.
        victims.sort_jobs(element)
        return sum(job.preemptibility == preemptibility for job in element.jobs.values())

    return count


_OPERATION: Final[Mapping[str, Reader]] = {
    **_COMMON,
    "pool": lambda _, e: e.options.pool,
    "parent": lambda _, e: e.options.pool,
    "weight": lambda _, e: operation_weight(e),
    "start_time": lambda _, e: iso_time(e.operation.record.start_time),
    "user": lambda _, e: e.operation.record.user,
    "title": lambda _, e: e.operation.record.title,
    "type": lambda _, e: e.operation.record.type,
    "state": lambda _, e: "running" if e.is_running else "pending",
    "enabled": lambda _, e: e.is_running,
    "schedulable": lambda _, e: _is_schedulable(e),
    "suspended": lambda _, e: e.operation.record.suspended,
    "tentative": _always(False),
    "is_gang": lambda _, e: e.operation.record.is_gang,
    "fifo_index": lambda _, e: _known(e.fifo_index),
    "slot_index": lambda view, e: view.slot_index(e),
    "scheduling_index": lambda view, e: view.scheduling_index(e),
    "job_count": _figure("job_count"),
    "pending_job_count": lambda _, e: e.operation.needed_job_count,
    "preemptible_job_count": _count_jobs(PREEMPTIBLE),
    "aggressively_preemptible_job_count": _count_jobs(AGGRESSIVELY_PREEMPTIBLE),
    "deactivation_reasons": lambda _, e: dict(e.deactivations),
    "min_needed_resources_unsatisfied_count": lambda _, e: e.deactivations.get("node_resources", 0),
}

POOL_ATTRIBUTES: Final = frozenset(_POOL)


def _attributes(view: UpdatedTree, element: Element, readers: Mapping[str, Reader]) -> Lazy:
    def find(name: str) -> Any:
        read = readers.get(name)
        return MISSING if read is None else read(view, element)

    return Lazy(lambda: readers, find, is_whole=True)


def pool_attributes(view: UpdatedTree, pool: PoolElement) -> Lazy:
    """Return all dynamic attributes of a pool or the root (5.2, 5.3, 5.4)."""
    return _attributes(view, pool, _POOL)


def operation_attributes(view: UpdatedTree, element: OperationElement) -> Lazy:
    """Return all dynamic attributes of an operation in one tree (5.2, 5.4)."""
    return _attributes(view, element, _OPERATION)
