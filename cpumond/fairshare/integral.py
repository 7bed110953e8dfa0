"""Integral guarantees: volumes that fill and drain, burst pools, relaxed pools (fair_share_update.md 5, 10, 11)."""

from __future__ import annotations

import math
from collections.abc import Callable

from cpumond.fairshare.nodes import PoolNode
from cpumond.fairshare.resources import (
    CPU,
    EPS,
    ONE,
    ZERO,
    Vector,
    add,
    bisect_max,
    dominates,
    exact_cpu,
    greatest,
    least,
    positive_part,
    quantise_cpu,
    scale_cpu,
    scale_resources,
    scale_volume,
    subtract,
    sum_in_order,
    sum_resources,
    sum_vectors,
)
from cpumond.fairshare.tree import Options

Prepare = Callable[[PoolNode, float], None]
"""Gives each pool of a subtree its function, as far as it is needed to evaluate a suggestion at the top pool (9)."""


def refill(nodes: list[PoolNode], total: Vector, elapsed_s: float, saturation_period_s: float) -> None:
    """Grow volumes by their flow and shrink them by the last update's shares; they stop at the capacity (5.1)."""
    for node in nodes:
        integral = node.pool.integral_guarantees
        old = node.volume
        span = scale_volume(total, elapsed_s)
        capacity = scale_volume(scale_resources(total, node.flow_ratio), saturation_period_s)
        grown = add(old, scale_volume(span, node.flow_ratio))
        volume = exact_cpu(positive_part(subtract(grown, scale_volume(span, node.last_share_ratio))))
        upper = greatest(old, capacity)
        node.volume_overflow = exact_cpu(positive_part(subtract(volume, upper)))
        if integral.can_accept_free_volume:
            node.acceptable_volume = exact_cpu(positive_part(subtract(capacity, volume)))
        node.volume = least(volume, upper)


def without_below_integral(preorder: list[PoolNode]) -> list[PoolNode]:
    """Return, in pre-order, the pools through which volumes flow: all that are not below an integral pool (5.2)."""
    nodes = []
    end = 0
    for node in preorder:
        if node.index >= end:
            nodes.append(node)
            if node.guarantee_type != "none":
                end = node.end
    return nodes


def collect_overflow(nodes: list[PoolNode]) -> None:
    """Sum, up to the root, volumes that pools cannot keep and no sibling accepts (5.2). ``nodes``: in pre-order."""
    for node in reversed(nodes):
        if node.guarantee_type != "none":
            continue
        node.children_volume_overflow = sum_resources([child.volume_overflow for child in node.pools])
        acceptable = sum_resources([child.acceptable_volume for child in node.pools])
        surplus = exact_cpu(subtract(node.children_volume_overflow, acceptable))
        node.volume_overflow = positive_part(surplus)
        if node.pool.integral_guarantees.can_accept_free_volume:
            node.acceptable_volume = positive_part(subtract(ZERO, surplus))


def distribute_free_volume(nodes: list[PoolNode]) -> None:
    """Give volume that would be lost to pools that accept more, if a pool above giver and taker allows it (5.3)."""
    for node in nodes:
        if node.guarantee_type != "none":
            node.volume = sum_resources([node.volume, node.accepted_free_volume])
            continue
        free = sum_resources([node.accepted_free_volume, node.children_volume_overflow])
        if node.pool.integral_guarantees.should_distribute_free_volume_among_children and any(free):
            accepted = [_accept(node.pools, r, free[r]) for r in range(5)]
            for child, volume in zip(node.pools, zip(*accepted, strict=True), strict=True):
                child.accepted_free_volume = volume


def _accept(children: list[PoolNode], r: int, free: float) -> list[float]:
    """Divide ``free`` volume of resource ``r`` among the children, by their flow, as far as they accept it (5.3)."""
    accepted = [0.0] * len(children)
    accepting = [
        (_counted(child.acceptable_volume[r] / child.total_flow_ratio, r), n)
        for n, child in enumerate(children)
        if child.acceptable_volume[r] > EPS and child.total_flow_ratio > EPS
    ]
    if free == 0.0:
        return accepted
    weight = sum_in_order(children[n].total_flow_ratio for _, n in accepting)
    accepting.sort()
    filled = 0
    for _, n in accepting:
        child = children[n]
        if _part(free, child.total_flow_ratio / weight, r) < child.acceptable_volume[r]:
            break
        accepted[n] = child.acceptable_volume[r]
        free = _counted(free - accepted[n], r)
        weight -= child.total_flow_ratio
        filled += 1
    for _, n in accepting[filled:]:
        accepted[n] = _part(free, children[n].total_flow_ratio / weight, r)
    return accepted


def _counted(volume: float, r: int) -> float:
    """Return a volume of resource ``r``, rounded to the resource's quantum (17)."""
    return quantise_cpu(volume) if r == CPU else volume


def _part(volume: float, part: float, r: int) -> float:
    """Return a fraction of a volume of resource ``r``, rounded to the resource's quantum."""
    return scale_cpu(volume, part) if r == CPU else volume * part


def volume_ratio(node: PoolNode, total: Vector, smooth_period_s: float) -> float:
    """Return the share that would use up the pool's volume in ``smooth_period_s`` (5.4)."""
    return min((v / t for v, t in zip(node.volume, total, strict=True) if t > 0.0), default=0.0) / smooth_period_s


def propose_burst_shares(pools: list[PoolNode], total: Vector, options: Options, prepare: Prepare) -> None:
    """Give the burst pools, one after another, their shares within burst guarantee, volume and limits (10)."""
    for node in pools:
        bound = min(node.burst_ratio, volume_ratio(node, total, options.integral_smooth_period_s))
        node.proposed = _fit(node, least((bound, bound, bound, bound, bound), _available(node)))
        prepare(node, 0.0)
        node.proposed = ZERO
        assert node.function is not None
        _grant(node, positive_part(subtract(node.function.at_zero, node.strong)))


def propose_relaxed_shares(
    pools: list[PoolNode], root: PoolNode, total: Vector, options: Options, prepare: Prepare
) -> None:
    """Share what strong and burst guarantees leave among the relaxed pools, in proportion to their volumes (11)."""
    if not pools:
        return
    taken = sum_vectors([least(add(node.strong, node.proposed), node.demand_share) for node in root.pools])
    free = positive_part(subtract(ONE, taken))
    ratios = {node: volume_ratio(node, total, options.integral_smooth_period_s) for node in pools}
    pools = [node for node in pools if ratios[node] != 0.0]
    limits = {node: node.limits_share for node in pools}
    for node in pools:
        integral = node.pool.integral_guarantees
        bound = min(ratios[node], integral.relaxed_share_multiplier_limit * node.flow_ratio)
        node.limits_share = least(node.limits_share, add(node.strong, (bound, bound, bound, bound, bound)))
        prepare(node, 1.0)
    if not pools:
        return
    smallest = min(ratios[node] for node in pools)
    weights = {node: ratios[node] / smallest for node in pools}

    def takes(node: PoolNode, factor: float) -> Vector:
        assert node.function is not None
        return positive_part(subtract(node.function.value(min(1.0, factor * weights[node])), node.strong))

    factor = bisect_max(0.0, 1.0, lambda f: dominates(free, sum_vectors([takes(node, f) for node in pools])))
    for node in pools:
        granted = takes(node, factor)
        node.limits_share = limits[node]
        _grant(node, least(granted, _available(node)))


def _available(node: PoolNode) -> Vector:
    """Return what guarantees leave within the limits of a pool and of all pools above it except the root (10.2)."""
    available = ONE
    for above in node.path_to_root():
        available = least(available, subtract(above.limits_share, add(above.strong, above.proposed)))
    return positive_part(available)


def _fit(node: PoolNode, proposed: Vector) -> Vector:
    """Return ``proposed`` if it and the strong share are within the limits, else the part that fits (10.3)."""
    limits, strong = node.limits_share, node.strong
    if dominates(limits, add(strong, proposed)):
        return proposed
    fitting = list(subtract(limits, strong))
    for r in range(5):
        while strong[r] + fitting[r] > limits[r]:
            fitting[r] = math.nextafter(fitting[r], -math.inf)
    a, b, c, d, e = fitting
    return (a, b, c, d, e)


def _grant(node: PoolNode, granted: Vector) -> None:
    """Add an integral share to a pool and all above it; drop their functions, made for the old shares (10.6, 10.7)."""
    for above in node.path_to_root():
        above.proposed = _fit(above, add(above.proposed, granted))
        top = above.parent
    assert top is not None
    top.proposed = add(top.proposed, granted)
    node.function = None
    node.last_share_ratio = max(granted)
