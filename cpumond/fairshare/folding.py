"""Settings unknown to the update itself: callers express them by the weights and limits of a snapshot.

fair_share_update.md 18, semantics.md 0.3, 2.5 and 2.10. Shares are fractions of the cluster, resources absolute."""

from __future__ import annotations

from typing import Final

from cpumond.core.errors import FairShareInputError
from cpumond.core.words import number
from cpumond.fairshare.resources import Vector, least, scale_resources

MIN_WEIGHT: Final = 2.0**-26
MAX_WEIGHT: Final = 2.0**26
DEFAULT_WEIGHT: Final = 1.0


def limits_of_total(total: Vector, ratio: float) -> Vector:
    """Return the limits that ``max_share_ratio``, a fraction of the cluster in [0, 1], sets (18). They are quantised
    like all resources (17). The caller sets ``resource_limits`` of the pool to the lesser of its own and these."""
    return scale_resources(total, ratio)


def limits_of_parent(total: Vector, resource_limits: Vector, parent_limits: Vector, ratio: float | None) -> Vector:
    """Limits of an element whose ``max_share_ratio``, in [0, 1], is a fraction of its parent's (semantics.md 2.10).

    ``parent_limits`` are this function's result for the parent (for an operation: its pool), so parents must come
    first; infinite means no limit. If ``ratio`` is None, the element's own ``resource_limits`` are returned."""
    if ratio is None:
        return resource_limits
    return least(resource_limits, limits_of_total(least(parent_limits, total), ratio))


def fold_weight(where: str, weight: float | None, inferred: float = DEFAULT_WEIGHT) -> float:
    """Return the weight of an update, in [2^-26, 2^26], for the configured ``weight`` (semantics.md 0.3 and 2.5). A
    weight below the lowest one, even 0, becomes the lowest. None (not set) becomes ``inferred``. ``where`` names the
    element. Raises FairShareInputError for a negative weight, a weight above 2^26 and NaN."""
    if weight is None:
        return inferred
    if not 0.0 <= weight <= MAX_WEIGHT:
        raise FairShareInputError(
            f"{where}: weight: expected a number in [0, {number(MAX_WEIGHT)}], got {number(weight)}"
        )
    return max(weight, MIN_WEIGHT)


def infer_weight(
    multiplier: float | None, strong_share: Vector, total_flow_ratio: float, parent_strong_share: Vector,
    parent_total_flow_ratio: float,
) -> float:  # fmt: skip
    """Return the weight, > 0, of a pool for which none is set (18, semantics.md 2.5).

    ``multiplier`` is the tree's ``infer_weight_from_guarantees_share_multiplier``, >= 1; None: not set. A pool's
    guarantee is the greatest component of its strong share plus its total flow ratio. The weight is the ratio of this
    guarantee to the parent's, times the multiplier, within [2^-26, 2^26]; if that is not > 0, it is the default, 1."""
    own = max(strong_share) + total_flow_ratio
    parent = max(parent_strong_share) + parent_total_flow_ratio
    if multiplier is None or not (own > 0.0 and parent > 0.0):
        return DEFAULT_WEIGHT
    return min(max(own / parent * multiplier, MIN_WEIGHT), MAX_WEIGHT)
