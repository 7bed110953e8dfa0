"""Preemption rules of pools and operations after inheritance: tolerances, time-outs, limits (semantics.md 6.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, TypeVar

from cpumond.fairshare.resources import Vector, least
from cpumond.scheduler.model import OperationTreeOptions, PoolSettings, PreemptionSettings, TreeSettings, to_vector

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PreemptionRules:
    """Rules of an element after inheritance (6.2): times in seconds."""

    tolerance: float
    fair_share_timeout_s: float
    min_share_timeout_s: float
    aggressive_timeout_s: float
    tolerance_limit: float
    fair_share_timeout_limit_s: float
    min_share_timeout_limit_s: float
    aggressive_starvation: bool
    """Whether the element or any ancestor enables aggressive starvation (6.8)."""
    aggressive_preemption: bool
    non_preemptible_threshold: Vector | None
    """Threshold by resource, infinite for resources that the option omits. None: no jobs are protected (6.4)."""
    min_run_time_s: float
    max_min_run_time_s: float
    """The tree's upper bound of ``min_run_time_s``."""
    says_min_share: bool = True
    """Whether an element on the path sets ``min_share_preemption_timeout``. If not, the fair-share time-out applies."""


def root_rules(settings: TreeSettings) -> PreemptionRules:
    """Return the rules of the root: the tree's options (6.2).

    A limit that is not set defaults to the tree's own value of the option that is limited.
    ``min_share_preemption_timeout`` defaults to the fair-share time-out."""
    tolerance = settings.fair_share_starvation_tolerance
    fair_share_s = settings.fair_share_starvation_timeout / 1000.0
    min_share_s = _seconds(settings.min_share_preemption_timeout, fair_share_s)
    rules = PreemptionRules(
        tolerance=tolerance, fair_share_timeout_s=fair_share_s, min_share_timeout_s=min_share_s,
        aggressive_timeout_s=settings.fair_share_aggressive_starvation_timeout / 1000.0,
        tolerance_limit=_given(settings.fair_share_starvation_tolerance_limit, tolerance),
        fair_share_timeout_limit_s=_seconds(settings.fair_share_preemption_timeout_limit, fair_share_s),
        min_share_timeout_limit_s=_seconds(settings.min_share_preemption_timeout_limit, min_share_s),
        aggressive_starvation=settings.enable_aggressive_starvation,
        aggressive_preemption=settings.allow_aggressive_preemption,
        non_preemptible_threshold=_threshold(settings.non_preemptible_resource_usage_threshold),
        min_run_time_s=settings.min_run_time / 1000.0, max_min_run_time_s=settings.max_min_run_time / 1000.0,
        says_min_share=settings.min_share_preemption_timeout is not None,
    )  # fmt: skip
    return _within_limits(rules)


def pool_rules(parent: PreemptionRules, settings: PoolSettings) -> PreemptionRules:
    """Return the rules of a pool: its own values, else those of its parent, within the limits on the path (6.2).

    The tolerance is at most the smallest tolerance limit on the path. Each time-out is at least the largest limit for
    it on the path. A pool cannot switch off ``enable_aggressive_starvation`` of a pool above."""
    if _inherited(settings) == _NOTHING:
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
        aggressive_preemption=_given(settings.allow_aggressive_preemption, parent.aggressive_preemption),
        non_preemptible_threshold=parent.non_preemptible_threshold if threshold is None else _threshold(threshold),
        min_run_time_s=_seconds(settings.min_run_time, parent.min_run_time_s),
        max_min_run_time_s=parent.max_min_run_time_s,
    )
    rules.says_min_share = settings.min_share_preemption_timeout is not None or parent.says_min_share
    return _within_limits(rules)


_inherited: Final = attrgetter(*PreemptionSettings.__struct_fields__)
_NOTHING: Final = (None,) * len(PreemptionSettings.__struct_fields__)


def operation_rules(pool: PreemptionRules, options: OperationTreeOptions) -> PreemptionRules:
    """Return the rules of an operation: its pool's, or its own values where these make it less privileged (6.2).

    Less privileged means: a smaller tolerance, longer time-outs, a smaller non-preemptible threshold in each resource.
    A pool without a threshold protects no jobs, and an operation cannot change that. An operation's ``min_run_time``
    applies up to the tree's bound."""
    fair_share_s = max(pool.fair_share_timeout_s, _seconds(options.fair_share_starvation_timeout, 0.0))
    min_share_s = pool.min_share_timeout_s
    if options.min_share_preemption_timeout is not None:
        min_share_s = max(min_share_s, options.min_share_preemption_timeout / 1000.0)
    elif not pool.says_min_share:
        min_share_s = max(min_share_s, fair_share_s)
    threshold = pool.non_preemptible_threshold
    if threshold is not None and options.non_preemptible_resource_usage_threshold is not None:
        threshold = least(threshold, to_vector(options.non_preemptible_resource_usage_threshold, math.inf))
    tolerance = min(pool.tolerance, _given(options.fair_share_starvation_tolerance, pool.tolerance))
    run_s = min(_seconds(options.min_run_time, pool.min_run_time_s), pool.max_min_run_time_s)
    own = (tolerance, fair_share_s, min_share_s, threshold, run_s)
    if own == _operations(pool):
        return pool  # one object for all operations without values of their own
    return replace(
        pool, tolerance=tolerance, fair_share_timeout_s=fair_share_s, min_share_timeout_s=min_share_s,
        non_preemptible_threshold=threshold, min_run_time_s=run_s,
    )  # fmt: skip


_operations: Final = attrgetter(
    "tolerance", "fair_share_timeout_s", "min_share_timeout_s", "non_preemptible_threshold", "min_run_time_s"
)
"""Returns the values in which an operation's rules may differ from those of its pool."""


def list_own(options: PoolSettings | OperationTreeOptions, rules: PreemptionRules) -> list[tuple[str, float, float]]:
    """Return (name, own value, value in ``rules``) of the options of ``LIMIT_OF`` that a pool or operation sets."""
    holding = (
        rules.fair_share_timeout_s * 1e3, rules.min_share_timeout_s * 1e3, rules.tolerance, rules.min_run_time_s * 1e3,
    )  # fmt: skip
    named = [(name, getattr(options, name), value) for name, value in zip(LIMIT_OF, holding, strict=True)]
    return [each for each in named if each[1] is not None]


def find_cut_settings(where: str, settings: PoolSettings, rules: PreemptionRules) -> list[str]:
    """Describe a pool's own options that a limit on its path restricts. ``rules``: those of the pool (6.2)."""
    return [
        f"{where}: {name} {own:.10g} is limited to {effective:.10g} by a pool or the tree above it; "
        f"change {LIMIT_OF[name]} there"
        for name, own, effective in list_own(settings, rules)
        if not math.isclose(own, effective)
    ]


LIMIT_OF: Final = {
    "fair_share_starvation_timeout": "fair_share_preemption_timeout_limit",
    "min_share_preemption_timeout": "min_share_preemption_timeout_limit",
    "fair_share_starvation_tolerance": "fair_share_starvation_tolerance_limit",
    "min_run_time": "max_min_run_time",
}


def _within_limits(rules: PreemptionRules) -> PreemptionRules:
    rules.tolerance = min(rules.tolerance, rules.tolerance_limit)
    rules.fair_share_timeout_s = max(rules.fair_share_timeout_s, rules.fair_share_timeout_limit_s)
    if not rules.says_min_share:
        rules.min_share_timeout_s = rules.fair_share_timeout_s
    rules.min_share_timeout_s = max(rules.min_share_timeout_s, rules.min_share_timeout_limit_s)
    rules.min_run_time_s = min(rules.min_run_time_s, rules.max_min_run_time_s)
    return rules


def _given(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _seconds(milliseconds: float | None, otherwise: float) -> float:
    return otherwise if milliseconds is None else milliseconds / 1000.0


def _threshold(amounts: Mapping[str, float]) -> Vector | None:
    return to_vector(amounts, math.inf) if amounts else None
