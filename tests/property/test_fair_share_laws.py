"""Laws of the fair-share update over random pool trees; section numbers are those of fair_share_update.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, replace

from examples import examples
from fair_share_strategies import (
    ALIKE,
    ELAPSED,
    NOW,
    ONLY_CPU,
    Features,
    ancestors,
    is_integral,
    previous,
    snapshots,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from cpumond.fairshare import (
    ROOT,
    ElementShares,
    Operation,
    Pool,
    Snapshot,
    UpdateResult,
    Vector,
    fair_share_update,
)
from cpumond.fairshare.resources import CPU, ZERO, add, least, sum_vectors
from cpumond.fairshare.validate import order_pools

many = examples(100)

MARGIN = 1e-9
"""What counts as nothing: the specification's epsilon, which distributions may be beyond what they hand out (12.1)."""
ROUNDING = 1e-12


def update(tree: Snapshot, elapsed: float | None = None) -> UpdateResult:
    return fair_share_update(tree, NOW, previous(elapsed))


def totals(result: UpdateResult) -> dict[str, Vector]:
    return {name: element.fair_share.total for name, element in result.elements.items()}


def children(tree: Snapshot) -> dict[str, list[str]]:
    """The names of the children of the root and of each pool."""
    names: dict[str, list[str]] = {ROOT: [], **{pool.name: [] for pool in tree.pools}}
    for element in (*tree.pools, *tree.operations):
        names[element.parent].append(element.name)
    return names


def is_within(a: Vector, b: Vector, margin: float = MARGIN) -> bool:
    return all(x <= y + margin for x, y in zip(a, b, strict=True))


def are_close(a: Vector, b: Vector, margin: float = MARGIN) -> bool:
    return all(abs(x - y) <= margin for x, y in zip(a, b, strict=True))


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, tuple):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, float):
        yield value


@many
@given(snapshots(Features()), ELAPSED)
def test_shares_are_within_demand_and_limits_and_the_sum_of_their_parts(tree, elapsed):
    """No element gets more than it demands and than its limits; nothing is negative or NaN; a share is its strong, its
    integral and its proportional part, the first two within what is guaranteed (3, 9.4, 12)."""
    for name, element in update(tree, elapsed).elements.items():
        assert all(math.isfinite(x) and x >= 0.0 for x in numbers(astuple(element))), name
        for shares in (element.fair_share, element.promised_guarantee_fair_share):
            assert is_within(shares.total, least(element.demand_share, element.limits_share)), name
            by_guarantees = add(shares.strong_guarantee, shares.integral_guarantee)
            assert are_close(add(by_guarantees, shares.weight_proportional), shares.total, ROUNDING), name
            assert is_within(shares.integral_guarantee, element.proposed_integral_share, ROUNDING), name
            if element.kind == "pool":
                assert is_within(shares.strong_guarantee, element.strong_guarantee_share, 0.0), name


@many
@given(snapshots(Features()), ELAPSED)
def test_a_pool_gets_at_least_what_its_children_get_and_the_cluster_is_enough_for_all(tree, elapsed):
    """A pool's share covers the sum of its children's, but for the epsilon; the root's is that sum, at most the whole
    cluster; promised shares likewise (12.1, 12.2, 13, 14)."""
    elements = update(tree, elapsed).elements
    for name, names in children(tree).items():
        got = sum_vectors([elements[child].fair_share.total for child in names])
        assert is_within(got, elements[name].fair_share.total, MARGIN + ROUNDING), name
        promised = sum_vectors([elements[child].promised_guarantee_fair_share.total for child in names])
        if elements[name].promised_guarantee_fair_share.total != ZERO:
            assert is_within(promised, elements[name].promised_guarantee_fair_share.total, MARGIN + ROUNDING), name
        if name == ROOT:
            assert are_close(got, elements[name].fair_share.total, ROUNDING)
            assert is_within(got, (1.0,) * 5)


@many
@given(snapshots(Features()), ELAPSED)
def test_a_pool_keeps_something_back_only_at_a_jump_and_only_in_normal_mode(tree, elapsed):
    """A pool's share is the sum of its children's unless it was stopped at a jump of one below it: there is none where
    operations use nothing yet and want some of everything, or nothing; and none in improved mode (12.1, 12.2)."""
    elements = update(tree, elapsed).elements
    below = children(tree)
    steady = {operation.name for operation in tree.operations if never_jumps(tree, operation)}
    for pool in reversed((tree.root, *tree.pools)):
        if steady.issuperset(below[pool.name]):
            steady.add(pool.name)
        if below[pool.name] and (pool.name in steady or tree.options.improved_fair_share_by_fit_factor):
            got = sum_vectors([elements[child].fair_share.total for child in below[pool.name]])
            assert are_close(got, elements[pool.name].fair_share.total, MARGIN + ROUNDING), pool.name


def never_jumps(tree: Snapshot, operation: Operation) -> bool:
    """Whether all that an operation wants grows together from nothing (9.1, 9.5)."""
    wants = [x > 0.0 for x, total in zip(operation.demand, tree.total_resources, strict=True) if total]
    return not operation.gang and not any(operation.usage) and (all(wants) or not any(wants))


@many
@given(snapshots(Features(totals=(ONLY_CPU,), gangs=False)), ELAPSED)
def test_what_is_guaranteed_and_demanded_is_met(tree, elapsed):
    """With one resource and without gangs each pool gets the lesser of its guarantee, strong share and proposed
    integral share, and its demand as limited on the way up (9.4, 9.5, 12)."""
    elements = update(tree, elapsed).elements
    below = children(tree)
    wants: dict[str, float] = {}
    for element in reversed((*tree.pools, *tree.operations)):
        shares = elements[element.name]
        own = shares.demand_share[CPU]
        if shares.kind == "pool":
            own = sum(wants[child] for child in below[element.name])
            guarantee = shares.strong_guarantee_share[CPU] + shares.proposed_integral_share[CPU]
            wanted = min(own, shares.limits_share[CPU])
            assert shares.fair_share.total[CPU] >= min(guarantee, wanted) - MARGIN, element.name
        wants[element.name] = min(own, shares.limits_share[CPU])


@many
@given(snapshots(Features()), ELAPSED)
def test_what_is_promised_is_what_a_pool_gets_at_least(tree, elapsed):
    """Every element below a pool with promised shares gets at least what it is promised, which the pool's guarantee
    covers; all of that in some resource, or all that is to be had (9.4, 12, 13)."""
    for name, element in update(tree, elapsed).elements.items():
        promised = element.promised_guarantee_fair_share.total
        assert is_within(promised, element.fair_share.total, MARGIN), name
        pool = next((pool for pool in tree.pools if pool.name == name), None)
        if pool is not None and pool.compute_promised_guarantee_fair_share:
            above = [tree.root, *ancestors(tree, pool)]
            if not any(pool.compute_promised_guarantee_fair_share for pool in above):
                guarantee = add(element.strong_guarantee_share, element.proposed_integral_share)
                assert is_within(promised, guarantee), name


@many
@given(st.data(), snapshots(Features(integral=0, improved=False)))
def test_order_and_names_do_not_matter(data, tree):
    """In normal mode the order of pools, and of operations outside FIFO pools, changes nothing, nor do names (2, 9.2);
    but for estimated guarantees, which are handed out in order (6.3)."""
    fifo = {pool.name for pool in tree.pools if pool.mode == "fifo"}
    pools = order_pools(data.draw(st.permutations(tree.pools), label="pools"))
    operations = data.draw(st.permutations(tree.operations), label="operations")
    in_order = iter([operation for operation in tree.operations if operation.parent in fifo])
    operations = [next(in_order) if operation.parent in fifo else operation for operation in operations]
    names = {ROOT: ROOT} | {element.name: f"x{n}" for n, element in enumerate([*operations, *pools])}
    other = replace(
        tree,
        pools=tuple(replace(pool, name=names[pool.name], parent=names[pool.parent]) for pool in pools),
        operations=tuple(replace(o, name=names[o.name], parent=names[o.parent]) for o in operations),
    )
    before, after = update(tree), update(other)
    for name, element in before.elements.items():
        assert_same(element, after.elements[names[name]], name)


def assert_same(a: ElementShares, b: ElementShares, name: str) -> None:
    """Everything that two updates say of an element is the same but for rounding and estimated guarantees."""
    pairs = zip(
        numbers(astuple(replace(a, estimated_guarantee_share=ZERO))),
        numbers(astuple(replace(b, estimated_guarantee_share=ZERO))),
        strict=True,
    )
    assert all(abs(x - y) <= MARGIN * max(1.0, abs(x)) for x, y in pairs), f"{name}: {a} and {b}"
    assert (a.dominant_resource, a.fifo_index, a.effective_fifo_index) == (
        b.dominant_resource,
        b.fifo_index,
        b.effective_fifo_index,
    ), name


@many
@given(st.data(), snapshots(Features(gangs=False, integral=0, even=True)))
def test_more_weight_never_gives_less(data, tree):
    """Where no function jumps, an operation or pool that gets more weight gets no less of any resource (9.2, 12)."""
    elements = [*tree.pools, *tree.operations]
    assume(elements)
    raised = data.draw(st.sampled_from(elements), label="raised")
    factor = data.draw(st.sampled_from([2.0, 1.1, 10.0, 1000.0]), label="factor")
    after = update(with_changed(tree, replace(raised, weight=raised.weight * factor)))
    before = update(tree).elements[raised.name].fair_share.total
    assert is_within(before, after.elements[raised.name].fair_share.total)


def with_changed(tree: Snapshot, element: Pool | Operation) -> Snapshot:
    """The tree with an element of that name replaced."""
    return replace(
        tree,
        pools=tuple(element if pool.name == element.name else pool for pool in tree.pools),
        operations=tuple(element if operation.name == element.name else operation for operation in tree.operations),
    )


@many
@given(snapshots(Features(totals=(ALIKE,), round_numbers=True, free_volume=False)), ELAPSED)
def test_twice_of_everything_changes_no_share(tree, elapsed):
    """Shares are fractions of the cluster: with twice its resources, and twice of everything in amounts or in volumes,
    they are the same to the last bit where no amount is rounded (0, 3, 5, 17)."""
    twice = replace(
        tree,
        total_resources=doubled(tree.total_resources),
        pools=tuple(
            replace(
                pool,
                resource_limits=doubled(pool.resource_limits),
                strong_guarantee_resources=tuple(None if x is None else 2 * x for x in pool.strong_guarantee_resources),
                integral_guarantees=replace(
                    pool.integral_guarantees,
                    resource_flow=doubled(pool.integral_guarantees.resource_flow),
                    burst_guarantee_resources=doubled(pool.integral_guarantees.burst_guarantee_resources),
                    accumulated_volume=doubled(pool.integral_guarantees.accumulated_volume),
                ),
            )
            for pool in tree.pools
        ),
        operations=tuple(
            replace(o, demand=doubled(o.demand), usage=doubled(o.usage), resource_limits=doubled(o.resource_limits))
            for o in tree.operations
        ),
    )
    before, after = update(tree, elapsed), update(twice, elapsed)
    assert before.errors == after.errors
    amounts = (
        "inferred_strong_guarantee_resources",
        "accumulated_volume",
        "volume_overflow",
        "acceptable_volume",
        "children_volume_overflow",
    )
    for name, element in before.elements.items():
        scaled = {field: doubled(getattr(element, field)) for field in amounts}
        assert replace(element, **scaled) == after.elements[name]


def doubled(x: Vector) -> Vector:
    return add(x, x)


@many
@given(st.data(), snapshots(Features(improved=False)), ELAPSED)
def test_a_pool_around_one_element_changes_nothing(data, tree, elapsed):
    """A pool without settings between an element that has no guarantees and its parent, with the same weight, changes
    no share (9.2, 9.4, 12)."""
    has_guarantees = {
        above.name
        for pool in tree.pools
        if is_integral(pool) or any(pool.strong_guarantee_resources)
        for above in (pool, *ancestors(tree, pool))
    }
    mode = {ROOT: tree.root, **{pool.name: pool for pool in tree.pools}}
    wrapped = [
        element
        for element in (*tree.pools, *tree.operations)
        if element.name not in has_guarantees and mode[element.parent].mode == "fair_share"
    ]
    assume(wrapped)
    inner = data.draw(st.sampled_from(wrapped), label="inner")
    flag = mode[inner.parent].step_function_for_gang_operations
    outer = Pool("outer", inner.parent, inner.weight, step_function_for_gang_operations=flag)
    other = with_changed(tree, replace(inner, parent="outer", weight=1.0))
    at = next((n for n, pool in enumerate(tree.pools) if pool is inner), len(tree.pools))
    other = replace(other, pools=(*other.pools[:at], outer, *other.pools[at:]))
    before, after = update(tree, elapsed), update(other, elapsed)
    for name, element in before.elements.items():
        assert_same(element, after.elements[name], name)
    assert are_close(after.elements["outer"].fair_share.total, after.elements[inner.name].fair_share.total)


@many
@given(snapshots(Features(integral=1, free_volume=False)), st.sampled_from([1.0, 60.0, 3600.0]))
def test_a_volume_is_what_flows_in_less_what_was_granted_and_never_grows_beyond_its_capacity(tree, elapsed):
    """Old volume + flow - what was granted since is the new volume and what it overflows by; at least 0, and at most
    the capacity or what it was before (5.1). cpu is counted in hundredths after each product (17)."""
    total, period_s = tree.total_resources, tree.options.integral_pool_capacity_saturation_period_s
    elements = update(tree, elapsed).elements
    for pool in tree.pools:
        element, old = elements[pool.name], pool.integral_guarantees.accumulated_volume
        if not is_integral(pool):
            assert element.accumulated_volume == old
            continue
        for r, volume in enumerate(element.accumulated_volume):
            flow = total[r] * element.resource_flow_ratio
            capacity = (round(flow, 2) if r == CPU else math.floor(flow + 0.5)) * period_s
            granted = total[r] * pool.integral_guarantees.last_share_ratio
            balance = max(old[r] + (flow - granted) * elapsed, 0.0)
            rounding = 0.02 if r == CPU else 1e-9 * max(old[r], flow * elapsed)
            assert 0.0 <= volume <= max(old[r], capacity) + 1e-9 * capacity
            assert abs(volume + element.volume_overflow[r] - balance) <= rounding
            assert element.volume_overflow[r] == 0.0 or volume == max(old[r], volume)


@many
@given(snapshots(Features(integral=1)), st.sampled_from([1.0, 60.0, 3600.0]))
def test_free_volume_is_shared_out_but_not_made(tree, elapsed):
    """What pools accept comes from what others overflow by or their parent accepts, and none takes more than it can
    (5.2, 5.3)."""
    elements = update(tree, elapsed).elements
    for name, names in children(tree).items():
        element = elements[name]
        below = [elements[child] for child in names]
        accepted = sum_vectors([child.accepted_free_volume for child in below])
        free = add(element.accepted_free_volume, element.children_volume_overflow)
        assert all(x <= y + 0.05 + MARGIN * y for x, y in zip(accepted, free, strict=True)), name
