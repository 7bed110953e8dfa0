"""Laws between two fair-share updates of like pool trees; section numbers are those of fair_share_update.md.

What one update gives is compared, number by number, with the literal update in ``test_fair_share_cases.py``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import astuple, replace

from examples import examples
from fair_share_cases import FAMILIES, ancestors, random_case
from hypothesis import assume, given
from hypothesis import strategies as st

from cpumond.cli.fairshare.input import InputReader
from cpumond.fairshare import ROOT, ElementShares, Operation, Pool, Snapshot, Vector, fair_share_update
from cpumond.fairshare.resources import ZERO
from cpumond.fairshare.tree import NO_INTEGRAL_GUARANTEES
from cpumond.fairshare.validate import order_pools

many = examples(100)
MARGIN = 1e-9
"""What counts as nothing: the specification's epsilon, which distributions may be beyond what they hand out (12.1)."""


@st.composite
def trees(draw: st.DrawFn, even: bool = False) -> Snapshot:
    """Trees in normal mode without integral guarantees. ``even``: operations use nothing yet and want some of every
    resource there is, so that no share function jumps."""
    case = random_case(random.Random(draw(st.integers(0, 2**32 - 1))), draw(st.sampled_from(list(FAMILIES))))
    tree = InputReader().read(json.dumps(case).encode()).snapshot
    normal = replace(tree.options, improved_fair_share_by_fit_factor=False, improved_distribution_gap=False)
    pools = tuple(replace(pool, integral_guarantees=NO_INTEGRAL_GUARANTEES) for pool in tree.pools)
    tree = replace(tree, options=normal, pools=pools)
    if not even:
        return tree
    wants = [[max(x, 1.0) if total else 0.0 for x, total in zip(o.demand, tree.total_resources, strict=True)]
             for o in tree.operations]  # fmt: skip
    return replace(
        tree,
        operations=tuple(
            replace(o, gang=False, usage=ZERO, demand=tuple(demand))
            for o, demand in zip(tree.operations, wants, strict=True)
        ),
    )


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, tuple):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, float):
        yield value


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


def totals(tree: Snapshot) -> dict[str, Vector]:
    return {name: shares.fair_share.total for name, shares in fair_share_update(tree, 0.0, None).elements.items()}


def with_changed(tree: Snapshot, element: Pool | Operation) -> Snapshot:
    """The tree with an element of that name replaced."""
    return replace(
        tree,
        pools=tuple(element if pool.name == element.name else pool for pool in tree.pools),
        operations=tuple(element if operation.name == element.name else operation for operation in tree.operations),
    )


@many
@given(st.randoms(use_true_random=False), trees())
def test_order_and_names_do_not_matter(chance, tree):
    """The order of pools, and of operations outside FIFO pools, changes nothing, nor do names (2, 9.2); but for
    estimated guarantees, which are handed out in order (6.3)."""
    fifo = {pool.name for pool in tree.pools if pool.mode == "fifo"}
    pools = order_pools(chance.sample(tree.pools, len(tree.pools)))
    operations = chance.sample(tree.operations, len(tree.operations))
    in_order = iter([operation for operation in tree.operations if operation.parent in fifo])
    operations = [next(in_order) if operation.parent in fifo else operation for operation in operations]
    names = {ROOT: ROOT} | {element.name: f"x{n}" for n, element in enumerate([*operations, *pools])}
    other = replace(
        tree,
        pools=tuple(replace(pool, name=names[pool.name], parent=names[pool.parent]) for pool in pools),
        operations=tuple(replace(o, name=names[o.name], parent=names[o.parent]) for o in operations),
    )
    before, after = fair_share_update(tree, 0.0, None), fair_share_update(other, 0.0, None)
    for name, element in before.elements.items():
        assert_same(element, after.elements[names[name]], name)


@many
@given(st.data(), trees(even=True))
def test_more_weight_never_gives_less(data, tree):
    """Where no function jumps, an operation or pool that gets more weight gets no less of any resource (9.2, 12)."""
    raised = data.draw(st.sampled_from([*tree.pools, *tree.operations]), label="raised")
    factor = data.draw(st.sampled_from([2.0, 1.1, 10.0, 1000.0]), label="factor")
    after = totals(with_changed(tree, replace(raised, weight=raised.weight * factor)))
    assert all(x <= y + MARGIN for x, y in zip(totals(tree)[raised.name], after[raised.name], strict=True))


@many
@given(st.data(), trees())
def test_a_pool_around_one_element_changes_nothing(data, tree):
    """A pool without settings between an element that has no guarantees and its parent, with the same weight, changes
    no share (9.2, 9.4, 12)."""
    parents = [{"name": pool.name, "parent": pool.parent} for pool in tree.pools]
    guaranteed = [pool.name for pool in tree.pools if any(pool.strong_guarantee_resources)]
    has_guarantees = {above for name in guaranteed for above in (name, *ancestors(parents, name))}
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
    before, after = fair_share_update(tree, 0.0, None), fair_share_update(other, 0.0, None)
    for name, element in before.elements.items():
        assert_same(element, after.elements[name], name)
    pair = zip(after.elements["outer"].fair_share.total, after.elements[inner.name].fair_share.total, strict=True)
    assert all(abs(x - y) <= MARGIN for x, y in pair)
