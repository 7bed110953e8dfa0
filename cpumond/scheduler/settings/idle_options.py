"""Describes options of an operation that have no effect in its pool (semantics.md 2.6, 6.2, 6.4). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from cpumond.monitor.model import MonitorSettings, list_idle_options
from cpumond.scheduler.model import ROOT_POOL, OperationTreeOptions, PoolSettings, TreeSettings, to_amounts
from cpumond.scheduler.settings.preemption_rules import PreemptionRules, list_own, operation_rules

DECIDING: Final = ("limit_rule", "actuator", "throttle_restore_ratio", "throttle_poll")
"""Options of ``job_cpu_monitor`` that decide whether others have an effect: a time by being 0 or not."""


def find_idle_options(
    name: str, pool: PoolSettings, rules: PreemptionRules, tree: TreeSettings, options: OperationTreeOptions
) -> list[str]:
    """Describe options of an operation that have no effect in the pool ``name``. ``rules``: those of the pool."""
    told = [
        *_find_privileges(rules, options),
        *_find_overtaken(name, rules, tree, options),
        *_find_min_share(name, pool, options),
        *_find_protection(name, rules, tree, options),
    ]
    if options.weight is not None and pool.mode == "fifo" and "weight" not in pool.fifo_sort_parameters:
        told.append(f'weight has no effect: the FIFO pool "{name}" does not sort by it (fifo_sort_parameters)')
    return told


def find_idle_monitor_options(given: Mapping[str, Any]) -> list[str]:
    """Describe options of an operation's ``job_cpu_monitor`` that have no effect (1.1). If it sets no ``limit_rule``,
    each node's own rule applies, which need not be the default."""
    settings = msgspec.convert({name: given[name] for name in DECIDING if name in given}, MonitorSettings)
    unsure = "" if "limit_rule" in given else ", which holds unless [monitor] of a node sets another"
    return [
        f"job_cpu_monitor/{text}{unsure if 'limit_rule' in text else ''}" for text in list_idle_options(settings, given)
    ]


def _find_privileges(rules: PreemptionRules, options: OperationTreeOptions) -> Iterator[str]:
    """Find options that would make an operation more privileged than its pool (6.2)."""
    for option, own, effective in list_own(options, operation_rules(rules, options)):
        if option == "min_run_time" and own > effective:
            yield f"min_run_time {own:.10g} is limited to {effective:.10g} by max_min_run_time of the tree"
        elif not math.isclose(own, effective):
            yield (
                f"{option} {own:g} has no effect: an operation may not be more privileged than its pool, "
                f"{effective:g} holds"
            )


def _find_overtaken(
    name: str, rules: PreemptionRules, tree: TreeSettings, options: OperationTreeOptions
) -> Iterator[str]:
    """Find options that would let an operation starve later than its pool. By then the pool preempts for it (6.3)."""
    if name == ROOT_POOL or not tree.enable_pool_starvation:
        return
    if tree.scheduling_preemption_priority_scope != "operation_and_ancestors":
        return
    for option, own, of_pool in list_own(options, rules):
        if option == "min_run_time":
            continue
        if own < of_pool if option == "fair_share_starvation_tolerance" else own > of_pool:
            yield (
                f'{option} {own:g} has no effect while pool "{name}" starves, for which {of_pool:g} holds: a starving '
                "pool preempts for all of its operations"
            )


def _find_min_share(name: str, pool: PoolSettings, options: OperationTreeOptions) -> Iterator[str]:
    """Find options of an operation's guarantee that exceed the guarantee of the pool (2.6)."""
    asked = options.min_share_resources
    has_timeout = options.min_share_preemption_timeout is not None
    given = ["min_share_resources"] * bool(asked) + ["min_share_preemption_timeout"] * has_timeout
    of_pool = pool.strong_guarantee_resources
    why = ""
    if pool.mode == "fifo":
        why = f'pool "{name}" is a FIFO pool, which serves its operations in their order'
    elif name != ROOT_POOL and not any(of_pool.values()):
        why = f'pool "{name}" has no min_share_resources'
    for option in given if why else ():
        yield f"{option} has no effect: {why}"
    if why:
        return
    if has_timeout and not any(asked.values()):
        yield "min_share_preemption_timeout has no effect: the operation has no min_share_resources"
    for resource, amount in asked.items() if name != ROOT_POOL else ():
        if resource not in of_pool:
            yield f'min_share_resources/{resource} has no effect: pool "{name}" has no min_share_resources for it'
        elif amount > of_pool[resource]:
            yield (
                f'min_share_resources/{resource} {amount:g} is more than the {of_pool[resource]:g} of pool "{name}", '
                "which hold"
            )


def _find_protection(
    name: str, rules: PreemptionRules, tree: TreeSettings, options: OperationTreeOptions
) -> Iterator[str]:
    """Find options that would protect more jobs than the options of the pool and the tree do (6.2, 6.4)."""
    threshold = options.non_preemptible_resource_usage_threshold
    if threshold:
        option = "non_preemptible_resource_usage_threshold"
        if rules.non_preemptible_threshold is None:
            yield f'{option} has no effect: pool "{name}" has none, and an operation can only lower it'
        else:
            of_pool = to_amounts(rules.non_preemptible_threshold)
            for resource, amount in threshold.items():
                if amount > of_pool[resource]:
                    yield (
                        f"{option}/{resource} {amount:g} has no effect: an operation may not be more "
                        f"privileged than its pool, {of_pool[resource]:g} holds"
                    )
    own, of_tree = options.max_unpreemptible_running_job_count, tree.max_unpreemptible_running_job_count
    if own is not None and of_tree is None:
        yield "max_unpreemptable_running_job_count has no effect: the tree protects no jobs by their number"
    elif own is not None and of_tree is not None and own > of_tree:
        yield f"max_unpreemptable_running_job_count {own} has no effect: the tree allows at most {of_tree}"
