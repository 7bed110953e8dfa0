"""Distribution of the root's share down to every operation (fair_share_update.md 12, 13, 14)."""

from __future__ import annotations

from cpumond.fairshare.functions import NOTHING, Group
from cpumond.fairshare.nodes import PoolNode, make_path
from cpumond.fairshare.paths import Path
from cpumond.fairshare.pool_functions import stop_within
from cpumond.fairshare.resources import EPS, ZERO, Vector, add, greatest, least, subtract, sum_vectors
from cpumond.fairshare.result import FairShare
from cpumond.fairshare.tree import Options

MARGIN: Vector = (EPS, EPS, EPS, EPS, EPS)


def detail(total: Vector, strong: Vector, proposed: Vector) -> FairShare:
    """Split a pool's share into its parts: strong guarantee, then integral guarantee, and the rest by weight (12)."""
    if strong == ZERO == proposed:
        return FairShare(total, weight_proportional=total)
    by_strong = least(total, strong)
    rest = subtract(total, by_strong)
    by_integral = least(rest, proposed)
    return FairShare(total, by_strong, by_integral, subtract(rest, by_integral))


def assign(node: PoolNode, suggestion: float, options: Options, promised: bool = False) -> None:
    """Assign all shares from ``node`` down at ``suggestion`` (12.1, 12.2); promised shares use suggestion 0 (13)."""
    assert node.function is not None
    stack = [(node, node.function.segment_at(suggestion), suggestion)]
    while stack:
        stack += _assign_children(*stack.pop(), options, promised)


def _assign_children(
    node: PoolNode, segment: int, suggestion: float, options: Options, promised: bool
) -> list[tuple[PoolNode, int, float]]:
    """Set the shares of a pool and its operations. Return each child pool with its segment and suggestion."""
    function, path = node.function, node.path
    assert function is not None
    total = function.value_in(segment, suggestion)
    if promised:
        node.promised = detail(total, node.strong, node.proposed)
    else:
        node.fair_share = detail(total, node.strong, node.proposed)
    if path is None:  # a pool without children
        return []
    x, group, jumped = function.position_at(segment, suggestion)
    if any(child.function is not f for child, f in zip(node.pools, path.functions, strict=False)):
        path, x, group, jumped = _follow_changed_children(node, x, total, options)
    if not promised:
        node.memory.used_reach = x
    pools = len(node.pools)
    segments, suggestions = path.places_at(x, group, jumped)
    totals: list[Vector] = []
    before: object = None
    for here in zip(path.functions[pools:], segments[pools:], suggestions[pools:], strict=True):
        f, i, s = here
        if here == before:
            totals.append(totals[-1])
        elif i < 0:
            totals.append(f.at_zero)
        else:
            v0, v1, v2, v3, v4 = f.values[i]
            m0, m1, m2, m3, m4 = f.slopes[i]
            t = s - f.starts[i]
            totals.append((
                v0 + m0 * t if m0 else v0, v1 + m1 * t if m1 else v1, v2 + m2 * t if m2 else v2,
                v3 + m3 * t if m3 else v3, v4 + m4 * t if m4 else v4,
            ))  # fmt: skip
        before = here
    if path.factors is None:
        in_order = [ZERO] * len(node.operations)
        for n, total in zip(node.order, totals, strict=False):  # operations after the path's end get nothing
            in_order[n] = total
        totals = in_order
    if promised:
        node.promised_totals = totals
    else:
        node.operation_totals = totals
    return list(zip(node.pools, segments, suggestions, strict=False))


def _follow_changed_children(
    node: PoolNode, x: float, total: Vector, options: Options
) -> tuple[Path, float, Group, int]:
    """Return the position of a pool whose children's functions changed after its own was made (11.1): as far on the
    path of the present functions as ``total`` allows; in normal mode at most ``x``. Only if integral pools are nested.
    """
    path = make_path(node, node.children_functions(), options)
    start = path.values[0]
    if not options.improved_fair_share_by_fit_factor:
        _, farthest, _ = stop_within(path, greatest(add(total, MARGIN), start))
        return path, min(x, farthest), (), 0
    step, x, _ = stop_within(path, greatest(total, start))
    group, jumped = path.jumps.get(step, ((), 0))
    return path, x, group, jumped


def find_blocking_gangs(root: PoolNode) -> list[tuple[PoolNode, int]]:
    """Return the gangs (pool, index) at whose step the share of the root, or of a pool at its limits, ends (12.3)."""
    assert root.function is not None
    found: list[tuple[PoolNode, int]] = []
    stack = [(root, root.function.segment_at(1.0), 1.0, False)]
    while stack:
        node, segment, suggestion, is_step = stack.pop()
        function, path = node.function, node.path
        if path is None or function is None:
            continue
        x, group, jumped = function.position_at(segment, suggestion)
        ends = is_step or (function.horizon == 1.0 and segment == len(function.starts) - 1)
        steps = {child for child, _ in group[jumped:]} if ends else set()
        if is_step and not steps:  # the step of this pool needs no more suggestion than the part before it
            found += [(below, n) for below in _below(node) for n in list_gangs_without(below)]
            continue
        pools = len(node.pools)
        segments, suggestions = path.places_at(x, group, jumped)
        stack += [(node.pools[n], segments[n], suggestions[n], n in steps) for n in range(pools)]
        order = node.order if path.factors is None else range(len(node.operations))
        found += [(node, order[n - pools]) for n in steps if n >= pools]
    return [each for each in found if each[0].operations[each[1]].gang]


def list_gangs_without(node: PoolNode) -> list[int]:
    """Return the gangs of a pool that demand something, get nothing, and have not been passed over."""
    return [
        n
        for n, (record, total) in enumerate(zip(node.operations, node.operation_totals, strict=False))
        if record.gang and record.function is not NOTHING and total == ZERO and n not in node.passed
    ]


def _below(node: PoolNode) -> list[PoolNode]:
    found = [node]
    for each in found:
        found += each.pools
    return found


def total_of_root(root: PoolNode) -> None:
    """Set the root's share and strong part to the sums over its children (14)."""
    shares = [child.fair_share for child in root.pools]
    total = sum_vectors([share.total for share in shares] + list(root.operation_totals))
    root.fair_share = detail(total, sum_vectors([share.strong_guarantee for share in shares]), root.proposed)


def assign_promised_shares(root: PoolNode, options: Options) -> None:
    """Assign the share within guarantees to the topmost pools with ``compute_promised_guarantee_fair_share``, and to
    all elements below these pools (13)."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if node.pool.compute_promised_guarantee_fair_share:
            assign(node, 0.0, options, promised=True)
        else:
            nodes += node.pools
