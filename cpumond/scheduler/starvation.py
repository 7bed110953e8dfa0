"""Who gets less than its share, for how long, and who may therefore take jobs from others (semantics.md 6.2, 6.3, 6.8).

Pure: the time is an argument. Only ``scheduling_status``, ``starvation_status``, ``below_since``, ``rules`` and
``lists_are_old`` of elements are changed here. Times inside are seconds, options have the documents' milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Final, Literal

from cpumond.fairshare.resources import Vector, least
from cpumond.scheduler.elements import (
    Element,
    OperationElement,
    PoolElement,
    PreemptionRules,
    SchedulingStatus,
    Tree,
    usage_share,
)
from cpumond.scheduler.model import OperationTreeOptions, PoolSettings, PreemptionSettings, TreeSettings, to_vector

Priority = Literal["none", "normal", "aggressive"]

EPSILON: Final = 1e-6
"""Shares and satisfactions that differ by less are the same (6.2)."""


# --- inheritance -------------------------------------------------------------------------------------------------


def root_rules(settings: TreeSettings) -> PreemptionRules:
    """What holds for the root: the tree's options (6.2).

    A limit that is not set is the tree's own value of what it limits; ``min_share_preemption_timeout`` that is not set
    is the fair-share time-out.
    """
    tolerance = settings.fair_share_starvation_tolerance
    fair_share_s = settings.fair_share_starvation_timeout / 1000.0
    min_share_s = _seconds(settings.min_share_preemption_timeout, fair_share_s)
    rules = PreemptionRules(
        tolerance=tolerance,
        fair_share_timeout_s=fair_share_s,
        min_share_timeout_s=min_share_s,
        aggressive_timeout_s=settings.fair_share_aggressive_starvation_timeout / 1000.0,
        tolerance_limit=_given(settings.fair_share_starvation_tolerance_limit, tolerance),
        fair_share_timeout_limit_s=_seconds(settings.fair_share_preemption_timeout_limit, fair_share_s),
        min_share_timeout_limit_s=_seconds(settings.min_share_preemption_timeout_limit, min_share_s),
        aggressive_starvation=settings.enable_aggressive_starvation,
        aggressive_preemption=settings.allow_aggressive_preemption,
        non_preemptible_threshold=_threshold(settings.non_preemptible_resource_usage_threshold),
        says_min_share=settings.min_share_preemption_timeout is not None,
    )
    return _within_limits(rules)


def pool_rules(parent: PreemptionRules, settings: PoolSettings) -> PreemptionRules:
    """What holds for a pool: its own value, else its parent's, within the limits of the path (6.2).

    The tolerance is at most the smallest tolerance limit on the path, each time-out at least the largest limit of its
    kind. ``enable_aggressive_starvation`` of a pool above cannot be switched off.
    """
    if not says_something(settings):
        return parent
    threshold = settings.non_preemptible_resource_usage_threshold
    rules = PreemptionRules(
        tolerance=_given(settings.fair_share_starvation_tolerance, parent.tolerance),
        fair_share_timeout_s=_seconds(settings.fair_share_starvation_timeout, parent.fair_share_timeout_s),
        min_share_timeout_s=_seconds(settings.min_share_preemption_timeout, parent.min_share_timeout_s),
        aggressive_timeout_s=_seconds(settings.fair_share_aggressive_starvation_timeout, parent.aggressive_timeout_s),
        tolerance_limit=min(
            parent.tolerance_limit, _given(settings.fair_share_starvation_tolerance_limit, parent.tolerance_limit)
        ),
        fair_share_timeout_limit_s=max(
            parent.fair_share_timeout_limit_s, _seconds(settings.fair_share_preemption_timeout_limit, 0.0)
        ),
        min_share_timeout_limit_s=max(
            parent.min_share_timeout_limit_s, _seconds(settings.min_share_preemption_timeout_limit, 0.0)
        ),
        aggressive_starvation=parent.aggressive_starvation or bool(settings.enable_aggressive_starvation),
        aggressive_preemption=_flag(settings.allow_aggressive_preemption, parent.aggressive_preemption),
        non_preemptible_threshold=parent.non_preemptible_threshold if threshold is None else _threshold(threshold),
    )
    rules.says_min_share = settings.min_share_preemption_timeout is not None or parent.says_min_share
    return _within_limits(rules)


_inherited: Final = attrgetter(*PreemptionSettings.__struct_fields__)
_NOTHING: Final = (None,) * len(PreemptionSettings.__struct_fields__)


def says_something(settings: PoolSettings) -> bool:
    """Whether a pool sets any of the options that it would otherwise inherit as they are."""
    return _inherited(settings) != _NOTHING


def operation_rules(pool: PreemptionRules, options: OperationTreeOptions) -> PreemptionRules:
    """What holds for an operation: its pool's, or its own where that makes it less privileged (6.2).

    Less privileged is a lesser tolerance, longer time-outs, a lesser non-preemptible threshold in each resource. A
    pool without a threshold protects nothing, and an operation cannot change that.
    """
    fair_share_s = max(pool.fair_share_timeout_s, _seconds(options.fair_share_starvation_timeout, 0.0))
    min_share_s = pool.min_share_timeout_s
    if options.min_share_preemption_timeout is not None:
        min_share_s = max(min_share_s, options.min_share_preemption_timeout / 1000.0)
    elif not pool.says_min_share:
        min_share_s = max(min_share_s, fair_share_s)
    threshold = pool.non_preemptible_threshold
    if threshold is not None and options.non_preemptible_resource_usage_threshold is not None:
        threshold = least(threshold, to_vector(options.non_preemptible_resource_usage_threshold, math.inf))
    return PreemptionRules(
        tolerance=min(pool.tolerance, _given(options.fair_share_starvation_tolerance, pool.tolerance)),
        fair_share_timeout_s=fair_share_s,
        min_share_timeout_s=min_share_s,
        aggressive_timeout_s=pool.aggressive_timeout_s,
        tolerance_limit=pool.tolerance_limit,
        fair_share_timeout_limit_s=pool.fair_share_timeout_limit_s,
        min_share_timeout_limit_s=pool.min_share_timeout_limit_s,
        aggressive_starvation=pool.aggressive_starvation,
        aggressive_preemption=pool.aggressive_preemption,
        non_preemptible_threshold=threshold,
    )


def find_cut_settings(where: str, settings: PoolSettings, rules: PreemptionRules) -> list[str]:
    """Sentences about a pool's own options that a limit of its path cuts; ``rules`` are what holds for it (6.2)."""
    cuts = (
        ("fair_share_starvation_timeout", settings.fair_share_starvation_timeout, rules.fair_share_timeout_s * 1e3),
        ("min_share_preemption_timeout", settings.min_share_preemption_timeout, rules.min_share_timeout_s * 1e3),
        ("fair_share_starvation_tolerance", settings.fair_share_starvation_tolerance, rules.tolerance),
    )
    return [
        f"{where}: {name} {own:g} is cut to {effective:g} by a limit above it; change {LIMIT_OF[name]} of the tree or "
        "of the pool that sets it"
        for name, own, effective in cuts
        if own is not None and not math.isclose(own, effective)
    ]


LIMIT_OF: Final = {
    "fair_share_starvation_timeout": "fair_share_preemption_timeout_limit",
    "min_share_preemption_timeout": "min_share_preemption_timeout_limit",
    "fair_share_starvation_tolerance": "fair_share_starvation_tolerance_limit",
}


def _within_limits(rules: PreemptionRules) -> PreemptionRules:
    rules.tolerance = min(rules.tolerance, rules.tolerance_limit)
    rules.fair_share_timeout_s = max(rules.fair_share_timeout_s, rules.fair_share_timeout_limit_s)
    if not rules.says_min_share:
        rules.min_share_timeout_s = rules.fair_share_timeout_s
    rules.min_share_timeout_s = max(rules.min_share_timeout_s, rules.min_share_timeout_limit_s)
    return rules


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _flag(value: bool | None, otherwise: bool) -> bool:
    return otherwise if value is None else value


def _seconds(milliseconds: float | None, otherwise: float) -> float:
    return otherwise if milliseconds is None else milliseconds / 1000.0


def _threshold(amounts: Mapping[str, float]) -> Vector | None:
    return to_vector(amounts, math.inf) if amounts else None


# --- the state machine -------------------------------------------------------------------------------------------


def update_starvation(tree: Tree, now: float) -> None:
    """Bring the states of all elements up to date, after each fair-share update; ``now`` is scheduler time in seconds.

    The machine of section 6.2 over dominant shares: one timer from the first update that finds an element below; the
    time-out is that of the state it is in now; starving strictly after it; normal at once when it has its share.
    The job lists of section 6.4 follow the fair share, so they are old from now on.
    """
    tree.root.scheduling_status, tree.root.starvation_status, tree.root.below_since = "normal", "non_starving", None
    pools_starve = tree.config.settings.enable_pool_starvation
    for pool in tree.pools.values():
        _move(pool, _find_status(pool) if pools_starve else "normal", now)
    for operation in tree.operations.values():
        operation.lists_are_old = True
        _move(operation, _find_status(operation) if _wants_jobs(operation) else "normal", now)


def _wants_jobs(element: OperationElement) -> bool:
    operation = element.operation
    return element.is_running and not operation.record.suspended and operation.needed_job_count > 0


def _find_status(element: Element) -> SchedulingStatus:
    rules = element.rules
    assert rules is not None
    usage, fair_share = max(usage_share(element)), max(element.fair_share)
    # The whole demand would fit into the fair share: nothing less will do.
    tolerance = 1.0 if max(element.demand_share) < fair_share + EPSILON else rules.tolerance
    if usage > fair_share * tolerance - EPSILON:
        return "normal"
    return "below_min_share" if usage < max(element.strong_guarantee_share) else "below_fair_share"


def _move(element: Element, status: SchedulingStatus, now: float) -> None:
    element.scheduling_status = status
    element.starvation_status = "non_starving"
    if status == "normal":
        element.below_since = None
        return
    if element.below_since is None:
        element.below_since = now
    since, rules = element.below_since, element.rules
    assert rules is not None
    if since < now - _timeout_s(element):
        element.starvation_status = "starving"
        if rules.aggressive_starvation and since < now - rules.aggressive_timeout_s * _size_factor(element):
            element.starvation_status = "aggressively_starving"


def _timeout_s(element: Element) -> float:
    rules = element.rules
    assert rules is not None
    below_min_share = element.scheduling_status == "below_min_share"
    timeout_s = rules.min_share_timeout_s if below_min_share else rules.fair_share_timeout_s
    return timeout_s * _size_factor(element)


def _size_factor(element: Element) -> float:
    """Operations that need few jobs wait less (6.2)."""
    if not isinstance(element, OperationElement):
        return 1.0
    coefficient = element.tree.config.settings.job_count_preemption_timeout_coefficient
    return min(1.0, element.operation.needed_job_count / coefficient)


def starves_in_s(element: Element, now: float) -> float | None:
    """Seconds until the element starves if nothing changes, 0 when it does, None while it has its share (6.2)."""
    if element.below_since is None:
        return None
    if element.starvation_status != "non_starving":
        return 0.0
    return max(0.0, element.below_since + _timeout_s(element) - now)


# --- who may preempt ---------------------------------------------------------------------------------------------


def priority_of(element: OperationElement) -> Priority:
    """At which priority an operation takes jobs from others (6.3).

    Its own state counts, and that of the pools above with the tree's ``scheduling_preemption_priority_scope``
    "operation_and_ancestors".
    """
    starving = starving_element(element)
    if starving is None:
        return "none"
    return "aggressive" if starving.starvation_status == "aggressively_starving" else "normal"


def starving_element(element: OperationElement) -> OperationElement | PoolElement | None:
    """Whose state gives an operation its priority: the nearest of those that starve hardest, itself included (6.3)."""
    starving: OperationElement | PoolElement | None = None
    if element.starvation_status == "aggressively_starving":
        return element
    if element.starvation_status == "starving":
        starving = element
    if element.tree.config.settings.scheduling_preemption_priority_scope == "operation_and_ancestors":
        for pool in element.ancestors():
            if pool.starvation_status == "aggressively_starving":
                return pool
            if pool.starvation_status == "starving" and starving is None:
                starving = pool
    return starving


def still_starves(element: OperationElement, priority: Priority) -> bool:
    """Whether what gave an operation this priority at the last update is still below its share (6.2, 6.3)."""
    with_ancestors = element.tree.config.settings.scheduling_preemption_priority_scope == "operation_and_ancestors"
    above: Iterable[Element] = (element, *element.ancestors()) if with_ancestors else (element,)
    wanted = ("aggressively_starving",) if priority == "aggressive" else ("aggressively_starving", "starving")
    return any(each.starvation_status in wanted and _find_status(each) != "normal" for each in above)


def starving_operations(tree: Tree) -> list[OperationElement]:
    """Operations that may preempt: they run, need jobs, are not suspended, and have a priority (6.3).

    Graceful ones too: the mode is about how their own jobs are taken (6.7). In the order in which the tree holds them.
    """
    return [element for element in tree.operations.values() if _wants_jobs(element) and priority_of(element) != "none"]
