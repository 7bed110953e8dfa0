"""Input of a fair-share update: the frozen tree of pools and operations (fair_share_update.md 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from cpumond.fairshare.resources import UNLIMITED, ZERO, Vector

ROOT: Final = "<root>"
"""Name of the root pool, the parent of the first level."""

Mode = Literal["fair_share", "fifo"]
GuaranteeType = Literal["none", "burst", "relaxed"]

OptionalVector = tuple[float | None, float | None, float | None, float | None, float | None]
"""A Vector in which None means "not set", which is not the same as 0."""

UNSET: Final[OptionalVector] = (None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a pool tree (1). Times are seconds, > 0."""

    main_resource: str = "cpu"
    integral_pool_capacity_saturation_period_s: float = 86400.0
    integral_smooth_period_s: float = 60.0
    step_function_for_gang_operations: bool = False
    fifo_reordering: bool = False
    improved_fair_share_by_fit_factor: bool = False
    improved_distribution_gap: bool = False
    """Accepted, but without effect: shares are assigned by position, so there is no gap to close (12.2)."""
    share_gang_remainders: bool = False
    """Whether others get the remainder that is left if the step of a gang does not fit (12.3)."""
    fast_fifo: bool = False
    """Accepted, but without effect: FIFO pools are always computed the fast way, which gives the same result (9.3)."""


SCHEDULER_OPTIONS: Final = Options(step_function_for_gang_operations=True)
"""The options that the scheduler uses for a tree unless others are set."""


@dataclass(frozen=True, slots=True)
class IntegralGuarantees:
    """Integral guarantee of a pool and its state between updates (1, 5). ``resource_flow`` and
    ``burst_guarantee_resources`` are absolute, ``accumulated_volume`` is in resource*seconds, ``last_share_ratio`` is a
    fraction of the cluster. An update returns new values of the last two, which are input of the next update."""

    guarantee_type: GuaranteeType = "none"
    resource_flow: Vector = ZERO
    burst_guarantee_resources: Vector = ZERO
    relaxed_share_multiplier_limit: float = 3.0
    can_accept_free_volume: bool = True
    should_distribute_free_volume_among_children: bool = False
    accumulated_volume: Vector = ZERO
    last_share_ratio: float = 0.0


NO_INTEGRAL_GUARANTEES: Final = IntegralGuarantees()


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool. ``weight`` is > 0; resources are absolute; an infinite limit means no limit (1)."""

    name: str
    parent: str = ROOT
    weight: float = 1.0
    mode: Mode = "fair_share"
    resource_limits: Vector = UNLIMITED
    strong_guarantee_resources: OptionalVector = UNSET
    step_function_for_gang_operations: bool = True
    fifo_reordering: bool = False
    compute_promised_guarantee_fair_share: bool = False
    priority_strong_guarantee_adjustment: bool = False
    priority_strong_guarantee_adjustment_donorship: bool = False
    integral_guarantees: IntegralGuarantees = NO_INTEGRAL_GUARANTEES


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, a leaf. ``demand`` and ``usage`` are absolute, ``demand`` dominates ``usage``; ``max_share_ratio``
    is in [0, 1] (1). ``start_time``, in seconds of any clock, sorts operations of equal weight in a FIFO pool."""

    name: str
    parent: str
    weight: float = 1.0
    demand: Vector = ZERO
    usage: Vector = ZERO
    gang: bool = False
    start_time: float = 0.0
    resource_limits: Vector = UNLIMITED
    max_share_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One frozen pool tree: cluster totals (absolute), pools with parents before children, operations. Children of a
    pool are ordered: first pools, in the order of ``pools``; then operations, in the order of ``operations``. ``root``
    has the flags of the root; its guarantees, weight and guarantee type are ignored."""

    total_resources: Vector
    pools: tuple[Pool, ...] = ()
    operations: tuple[Operation, ...] = ()
    options: Options = Options()
    root: Pool = field(default_factory=lambda: Pool(name=ROOT, parent=""))
