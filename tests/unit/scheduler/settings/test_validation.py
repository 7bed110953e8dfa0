"""Rules for trees and their pools; the numbers are those of semantics.md 2.6, 2.7."""

from collections.abc import Mapping
from typing import Any

import pytest
from calls import count_calls

from cpumond.scheduler.model import ROOT_POOL, CommandError, PoolConfig, TreeConfig, to_vector
from cpumond.scheduler.settings.attributes import read_pool, read_tree
from cpumond.scheduler.settings.validation import MAX_DEPTH, MAX_SUBTREE, check_name, find_overcommit, validate_tree

BURST_POOL = {"guarantee_type": "burst", "resource_flow": {"cpu": 5}, "burst_guarantee_resources": {"cpu": 10}}


def tree(pools: Mapping[str, tuple[str, Mapping[str, Any]]], name: str = "t", /, **options: Any) -> TreeConfig:
    """A tree of pools: name -> (parent, attributes)."""
    made = {
        pool: PoolConfig(f"{number:x}-0-0-2", pool, parent, dict(attributes), read_pool(attributes))
        for number, (pool, (parent, attributes)) in enumerate(pools.items())
    }
    return TreeConfig("1-1-1-1", name, options, read_tree(options), {}, made)


def refused(config: TreeConfig) -> str:
    with pytest.raises(CommandError) as caught:
        validate_tree(config)
    field = caught.value.attributes.get("field", "name")
    sentence = str(caught.value).partition('": ')[2].replace(": ", "/")
    # Of the main resource it is one more name.
    assert field in ("name", "parent") or sentence.startswith((field, field.rpartition("/")[0] or field))
    return str(caught.value)


def strong(**amounts: float) -> dict[str, Any]:
    return {"strong_guarantee_resources": amounts}


def flow(guarantee_type: str = "none", **amounts: float) -> dict[str, Any]:
    return {"integral_guarantees": {"guarantee_type": guarantee_type, "resource_flow": amounts}}


def burst(guarantee_type: str = "none", **amounts: float) -> dict[str, Any]:
    return {"integral_guarantees": {"guarantee_type": guarantee_type, "burst_guarantee_resources": amounts}}


KINDS = pytest.mark.parametrize(
    ("kind", "path"),
    [
        (strong, "strong_guarantee_resources"),
        (flow, "integral_guarantees/resource_flow"),
        (burst, "integral_guarantees/burst_guarantee_resources"),
    ],
)


@KINDS
def test_2_6_1_a_guarantee_needs_the_same_kind_at_the_parent(kind: Any, path: str) -> None:
    assert refused(tree({"a": (ROOT_POOL, {}), "b": ("a", kind(cpu=1))})) == (
        f'pool "b": {path}/cpu: is configured (1), but not at its parent "a"; set it there first'
    )
    assert refused(tree({"a": (ROOT_POOL, kind(cpu=9)), "b": ("a", kind(cpu=1, memory=5))})) == (
        f'pool "b": {path}/memory: is configured (5), but not at its parent "a"; set it there first'
    )
    assert validate_tree(tree({"a": (ROOT_POOL, kind(cpu=9, memory=5)), "b": ("a", kind(cpu=1, memory=5))})) == []


@KINDS
def test_2_6_2_the_sum_of_the_children_is_at_most_the_parents(kind: Any, path: str) -> None:
    pools = {"a": (ROOT_POOL, kind(cpu=10)), "b": ("a", kind(cpu=6)), "c": ("a", kind(cpu=4))}
    assert validate_tree(tree(pools)) == []
    pools["c"] = ("a", kind(cpu=4.5))
    assert refused(tree(pools)) == (
        f'pool "c": {path}/cpu: with 4.5 here the children of "a" have 10.5 together, more than its 10; lower theirs, '
        "or raise that"
    )


def test_2_6_2_decimal_fractions_are_no_violation() -> None:
    assert 0.1 + 0.2 > 0.3
    pools = {"a": (ROOT_POOL, strong(cpu=0.3)), "b": ("a", strong(cpu=0.1)), "c": ("a", strong(cpu=0.2))}
    assert validate_tree(tree(pools)) == []
    pools["c"] = ("a", strong(cpu=0.2000001))
    assert "together, more than its 0.3" in refused(tree(pools))


@pytest.mark.parametrize("guarantee_type", ["burst", "relaxed"])
@pytest.mark.parametrize("kind", [flow, burst])
def test_2_6_4_an_integral_pool_has_no_integral_children(guarantee_type: str, kind: Any) -> None:
    pools = {"a": (ROOT_POOL, flow(guarantee_type, cpu=9)), "b": ("a", kind(cpu=1))}
    message = refused(tree(pools))
    assert f'its parent "a" has guarantee_type {guarantee_type} and cannot have children with integral' in message
    assert message.startswith('pool "b": integral_guarantees/')
    assert message.endswith("got cpu 1")


@pytest.mark.parametrize("kind", [strong, flow, burst])
def test_2_6_6_a_guarantee_includes_the_main_resource(kind: Any) -> None:
    message = refused(tree({"a": (ROOT_POOL, kind(memory=5, gpu=1))}))
    assert message.endswith("must include the tree's main resource cpu, got memory 5, gpu 1")
    assert validate_tree(tree({"a": (ROOT_POOL, kind(gpu=5))}, main_resource="gpu")) == []


@pytest.mark.parametrize("kind", [strong, flow, burst])
def test_2_6_7_a_pool_that_does_not_allow_children_guarantees(kind: Any) -> None:
    pools = {"a": (ROOT_POOL, {**kind(cpu=9), "allow_children_guarantees": False}), "b": ("a", kind(cpu=1))}
    assert 'its parent "a" does not allow children guarantees, got cpu 1' in refused(tree(pools))
    pools["b"] = ("a", {})
    assert validate_tree(tree(pools)) == []


def test_2_6_8_odd_burst_pools_are_warnings() -> None:
    pools = {"a": (ROOT_POOL, flow("burst", cpu=5)), "b": (ROOT_POOL, burst("burst", cpu=5))}
    no_burst, no_flow = validate_tree(tree(pools))
    told = 'pool "a": has guarantee_type burst, but no integral_guarantees/burst_guarantee_resources'
    assert no_burst.startswith(told)
    assert no_flow.startswith('pool "b": has guarantee_type burst, but no integral_guarantees/resource_flow')
    low = {"integral_guarantees": {**BURST_POOL, "resource_flow": {"cpu": 11}}}
    (warning,) = validate_tree(tree({"a": (ROOT_POOL, low)}))
    assert "burst_guarantee_resources/cpu: 10 is less than the resource_flow of 11" in warning
    assert validate_tree(tree({"a": (ROOT_POOL, {"integral_guarantees": BURST_POOL})})) == []


def test_2_6_8_guarantees_beyond_the_cluster() -> None:
    both = {**strong(cpu=10, memory=5), "integral_guarantees": BURST_POOL}
    config = tree({"a": (ROOT_POOL, both), "b": (ROOT_POOL, flow("relaxed", cpu=20)), "c": ("b", {})})
    assert find_overcommit(config, to_vector({"cpu": 40, "memory": 5}, 0.0)) is None
    assert find_overcommit(config, to_vector({"cpu": 40 * (1 - 1e-12), "memory": 5}, 0.0)) is None
    sentence = find_overcommit(config, to_vector({"cpu": 39, "memory": 4}, 0.0))
    assert sentence is not None
    assert "guaranteed more than the nodes have (40 cpu of 39, 5 memory of 4)" in sentence
    assert find_overcommit(tree({}), to_vector({}, 0.0)) is None


@pytest.mark.parametrize("name", ["a", "A", "9", "-_:", "x" * 100, "t", "ann.lee@example"])
def test_2_7_names(name: str) -> None:
    assert validate_tree(tree({name: (ROOT_POOL, {})})) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "a name must have 1 to 100 characters, this has 0"),
        ("x" * 101, "a name must have 1 to 100 characters, this has 101"),
        (".b", "a name must match [-_a-z0-9:A-Z][-_a-z0-9:A-Z.@]* as a whole"),
        ("@b", "a name must match"),
        ("a\n", "a name must match"),
        ("ü", "a name must match"),
        ("a/b", "a name must match"),
        (ROOT_POOL, "this name is the root's"),
        ("a$b", 'a name must not contain "$"'),
    ],
)
def test_2_7_names_that_are_none(name: str, words: str) -> None:
    if name != ROOT_POOL:
        message = refused(tree({name: (ROOT_POOL, {})}))
        assert words in message
        assert message.startswith('pool "')
    assert words in refused(tree({}, name))
    with pytest.raises(CommandError, match="pool"):
        check_name("pool", name)


def test_2_7_names_after_a_pattern_of_ones_own() -> None:
    assert validate_tree(tree({"a.b": (ROOT_POOL, {})}, "t.x"), name_pattern="[a-z.]+") == []
    for name in (ROOT_POOL, "a$b"):
        with pytest.raises(CommandError):
            validate_tree(tree({name: (ROOT_POOL, {})}), name_pattern=".+")


def test_2_7_unique_under_its_own_name() -> None:
    config = tree({"a": (ROOT_POOL, {})})
    other = TreeConfig(config.id, "t", {}, config.settings, {}, {"b": config.pools["a"]})
    assert "is kept under another name" in refused(other)


def test_2_7_depth() -> None:
    pools: dict[str, tuple[str, dict[str, Any]]] = {"p0": (ROOT_POOL, {})}
    for level in range(1, MAX_DEPTH):
        pools[f"p{level}"] = (f"p{level - 1}", {})
    assert validate_tree(tree(pools)) == []
    pools["p30"] = ("p29", {})
    assert refused(tree(pools)) == 'pool "p30": would be on level 31 below the root, at most 30 are allowed'


def test_2_7_size_of_a_subtree() -> None:
    pools: dict[str, tuple[str, dict[str, Any]]] = {"top": (ROOT_POOL, {}), "mid": ("top", {})}
    pools["other"] = (ROOT_POOL, {})
    for number in range(MAX_SUBTREE - 2):
        pools[f"p{number}"] = ("mid", {})
        pools[f"q{number}"] = ("other", {})
    assert validate_tree(tree(pools)) == []
    pools["more"] = ("top", {})
    assert 'pool "more": the subtree of "top" would have more than 1000 pools' in refused(tree(pools))


COUNTS = {"max_operation_count": 4, "max_running_operation_count": 5}
AGGRESSIVE = {"fair_share_aggressive_starvation_timeout": 5, "fair_share_starvation_timeout": 6}


@pytest.mark.parametrize(
    ("pools", "options"),
    [
        ({"a": (ROOT_POOL, strong(cpu=1e9)), "b": (ROOT_POOL, strong(cpu=1e9))}, {}),  # 2.6.3: nothing for the root's
        ({"a": (ROOT_POOL, {**strong(cpu=5), "integral_guarantees": BURST_POOL}), "b": ("a", strong(cpu=5)),
          "c": ("a", {})}, {}),  # 2.6.4
        ({"a": (ROOT_POOL, strong(gpu=5))}, {"main_resource": "gpu"}),
        ({"a": (ROOT_POOL, strong(cpu=0, user_slots=5))}, {}),  # 2.6.6: an explicit zero counts as configured
        ({"a": (ROOT_POOL, {**strong(cpu=1e6), "mode": "fifo"}), "b": (ROOT_POOL, flow("relaxed", cpu=1e6))}, {}),
        ({"a": (ROOT_POOL, {**COUNTS, "max_operation_count": 5})}, {}),
        ({"a": (ROOT_POOL, {"max_operation_count": 0})}, {}),
        ({}, {"aggressive_preemption_satisfaction_threshold": 1}),
        ({}, {"fair_share_aggressive_starvation_timeout": 30_000}),
        ({"a": (ROOT_POOL, {"fair_share_aggressive_starvation_timeout": 5})}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_allowed(pools: Any, options: Any) -> None:
    assert validate_tree(tree(pools, **options)) == []


@pytest.mark.parametrize(
    ("pools", "options", "sentence"),
    [
        ({"a": (ROOT_POOL, strong(cpu=9)), "b": ("a", flow(cpu=1))}, {},
         'pool "b": integral_guarantees/resource_flow/cpu: is configured'),  # 2.6.1: another kind does not count
        ({"a": (ROOT_POOL, burst("relaxed", cpu=7))}, {},
         ('pool "a": integral_guarantees/burst_guarantee_resources: must be empty in a pool with guarantee_type '
         "relaxed, which has resource_flow only; got cpu 7")),
        ({"a": (ROOT_POOL, strong(cpu=10)), "b": ("a", strong(cpu=10, user_slots=0))}, {},
         'pool "b": strong_guarantee_resources/user_slots: is configured (0), but not at its parent'),
        ({"a": (ROOT_POOL, strong(cpu=10))}, {"main_resource": "gpu"},
         'pool "a": strong_guarantee_resources: must include the tree\'s main resource gpu, got cpu 10'),
        ({}, {"main_resource": "cpus"},
         ('pool tree "t": main_resource: must be one of user_slots, cpu, gpu, memory, network, got "cpus"; did you '
         'mean "cpu"?')),
        ({"a": (ROOT_POOL, {"mode": "fifo"}), "b": ("a", {})}, {},
         'pool "a": has mode fifo and cannot have sub-pools, "b" would be one'),
        ({"a": ("b", {}), "b": (ROOT_POOL, {})}, {}, 'pool "a": its parent "b" comes after it'),
        ({"a": ("a", {})}, {}, 'pool "a": its parent "a" comes after it'),
        ({"abc": (ROOT_POOL, {}), "a": ("abd", {})}, {},
         'pool "a": its parent "abd" does not exist; did you mean "abc"?'),
        ({"a": (ROOT_POOL, COUNTS)}, {},
         'pool "a": max_operation_count: must be at least max_running_operation_count (5), got 4'),
        ({"a": (ROOT_POOL, {"ephemeral_subpool_config": COUNTS})}, {},
         'pool "a": ephemeral_subpool_config: max_operation_count: must be'),
        ({"a": (ROOT_POOL, {"create_ephemeral_subpools": True, "mode": "fifo"})}, {},
         'pool "a": create_ephemeral_subpools cannot be true'),
        ({}, {"aggressive_preemption_satisfaction_threshold": 1.5},
         ('pool tree "t": aggressive_preemption_satisfaction_threshold: must not be above '
         "preemption_satisfaction_threshold (1), got 1.5")),
        ({}, {"fair_share_aggressive_starvation_timeout": 20_000},
         ('pool tree "t": fair_share_aggressive_starvation_timeout: must be 0 or at least '
         'fair_share_starvation_timeout (30000 ms), got 20000')),
        ({"a": (ROOT_POOL, AGGRESSIVE)}, {}, 'pool "a": fair_share_aggressive_starvation_timeout: '),
        ({}, {"nodes_filter": "a && b"}, 'pool tree "t": nodes_filter: column 3: '),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(pools: Any, options: Any, sentence: str) -> None:
    assert refused(tree(pools, **options)).startswith(sentence)


@pytest.mark.parametrize(("name", "what"), [("nope", "does not exist"), ("f", "has mode fifo")])
def test_2_4_a_wrong_default_parent_is_a_warning(name: str, what: str) -> None:
    (warning,) = validate_tree(tree({"f": (ROOT_POOL, {"mode": "fifo"})}, default_parent_pool=name))
    assert warning.startswith(f'pool tree "t": InvalidDefaultParentPool: "{name}" {what}')


def test_the_cost_of_many_pools_grows_with_their_number() -> None:
    def count(pools_below: int) -> int:
        """Calls of functions that it takes to look at two pools with so many below each."""
        pools: dict[str, tuple[str, dict[str, Any]]] = {}
        for top in range(2):
            pools[f"top{top}"] = (ROOT_POOL, {**strong(cpu=1e4, memory=1e4), **flow(cpu=1e4)})
            for number in range(pools_below):
                pools[f"p{top}-{number}"] = (f"top{top}", {**strong(cpu=1, memory=2), **flow("burst", cpu=1)})
        config = tree(pools)
        with count_calls() as calls:
            warnings = validate_tree(config)
        assert len(warnings) == 2 * pools_below
        return calls.total()

    assert count(900) < 10 * count(100)
