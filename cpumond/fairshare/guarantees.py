"""Strong guarantees: inferred, adjusted to the existing resources, estimated (fair_share_update.md 4, 6)."""

from __future__ import annotations

import math

from cpumond.fairshare.nodes import PoolNode
from cpumond.fairshare.resources import (
    CPU,
    ONE,
    RESOURCES,
    ZERO,
    Vector,
    add,
    bisect_max,
    dominates,
    least,
    positive_part,
    quantise_cpu,
    scale,
    scale_resources,
    share,
    subtract,
    sum_in_order,
    sum_resources,
    sum_vectors,
)
from cpumond.fairshare.result import GUARANTEES_EXCEED_CLUSTER, UpdateError
from cpumond.fairshare.tree import UNSET


def infer_guarantees(preorder: list[PoolNode], total: Vector, main_resource: str) -> None:
    """Set ``inferred_guarantee`` of every pool and its share ``strong``, from the root down (4). If a pool does not set
    a resource, it gets the same fraction of the parent's guarantee as of the main resource. These fractions are scaled
    down to what the siblings that set the resource leave; at the first level they are not scaled."""
    main = RESOURCES.index(main_resource)
    preorder[0].inferred_guarantee = total
    for node in preorder:
        children = [child for child in node.pools if child.pool.strong_guarantee_resources != UNSET]
        if not children:
            continue
        has = node.inferred_guarantee
        configured = [[g or 0.0 for g in child.pool.strong_guarantee_resources] for child in children]
        part_of_main = [g[main] / has[main] if has[main] else 0.0 for g in configured]
        for r in range(5):
            if r == main:
                continue
            left = max(has[r] - sum_in_order(g[r] for g in configured), 0.0)
            left = quantise_cpu(left) if r == CPU else left
            inferred = [
                part * has[r] if child.pool.strong_guarantee_resources[r] is None else None
                for child, part in zip(children, part_of_main, strict=True)
            ]
            wanted = sum_in_order(x for x in inferred if x is not None)
            factor = left / wanted if node.parent is not None and wanted > left else None
            for g, x in zip(configured, inferred, strict=True):
                if x is not None:
                    scaled = x if factor is None else x * factor
                    g[r] = quantise_cpu(scaled) if r == CPU else float(math.trunc(scaled))
        for child, (a, b, c, d, e) in zip(children, configured, strict=True):
            child.inferred_guarantee = (a, b, c, d, e)
            child.strong = share(child.inferred_guarantee, total)
    at_first_level = sum_resources([child.inferred_guarantee for child in preorder[0].pools])
    preorder[0].strong = share(at_first_level, total)


def check_overcommit(root: PoolNode, burst_pools: list[PoolNode], total: Vector) -> list[UpdateError]:
    """Return errors for guarantees beyond the cluster; if bursts are, scale them and the root's strong share (6)."""
    errors = []
    strong = sum_resources([child.inferred_guarantee for child in root.pools])
    if not dominates(total, sum_resources([strong, scale_resources(total, root.total_flow_ratio)])):
        text = "strong guarantees and resource flows exceed the cluster's resources"
        errors.append(UpdateError(GUARANTEES_EXCEED_CLUSTER, text))
    if not dominates(total, sum_resources([strong, scale_resources(total, root.total_burst_ratio)])):
        text = "strong guarantees and burst guarantees exceed the cluster's resources"
        errors.append(UpdateError(GUARANTEES_EXCEED_CLUSTER, text))
        bursts = sum_in_order(node.burst_ratio for node in burst_pools)

        def fits(factor: float) -> bool:
            burst = factor * bursts
            return dominates(ONE, add(scale(root.strong, factor), (burst, burst, burst, burst, burst)))

        factor = bisect_max(0.0, 1.0, fits)
        root.strong = scale(root.strong, factor)
        for node in burst_pools:
            node.burst_ratio *= factor
    return errors


def fitting_factor(available: Vector, wanted: Vector) -> float:
    """Return the greatest factor in [0, 1] with which ``wanted`` fits into ``available`` in every resource (6.2)."""
    return bisect_max(0.0, 1.0, lambda factor: dominates(available, scale(wanted, factor)))


def adjust_guarantees(preorder: list[PoolNode], effective_priority: set[PoolNode]) -> None:
    """Shrink strong shares until they fit the parent's, tier by tier, by one factor for all resources (6.1, 6.2)."""
    for node in reversed(preorder):
        if node in effective_priority:
            node.priority_tier, node.regular_tier = node.strong, ZERO
        elif node.pool.priority_strong_guarantee_adjustment_donorship:
            node.priority_tier, node.regular_tier = ZERO, node.strong
        else:
            node.priority_tier = sum_vectors([child.priority_tier for child in node.pools])
            node.regular_tier = subtract(node.strong, node.priority_tier)
    for node in preorder:
        node.strong = least(node.strong, node.limits_share)
        children = node.pools
        wanted = sum_vectors([child.priority_tier for child in children])
        available = positive_part(node.strong)
        if not dominates(available, wanted):
            factor = fitting_factor(available, wanted)
            for child in children:
                child.priority_tier = scale(child.priority_tier, factor)
                child.regular_tier = ZERO
        else:
            available = positive_part(subtract(node.strong, wanted))
            wanted = sum_vectors([child.regular_tier for child in children])
            if not dominates(available, wanted):
                factor = fitting_factor(available, wanted)
                for child in children:
                    child.regular_tier = scale(child.regular_tier, factor)
        for child in children:
            child.strong = add(child.priority_tier, child.regular_tier)


def estimate_guarantees(preorder: list[PoolNode]) -> None:
    """Set ``estimated``: the strong share plus a part, by weight, of what the siblings' strong shares leave of the
    parent's. Limits and demand are ignored (6.3)."""
    root = preorder[0]
    root.estimated = root.strong
    for node in preorder:
        left = node.estimated
        for child in node.pools:
            child.estimated = least(child.strong, left)
            left = subtract(left, child.estimated)
        node.unguaranteed = left
        for child in node.pools:
            child.estimated = add(child.estimated, scale(left, child.pool.weight / node.weight_sum))
