"""Trees as files: what a file does to a configuration (semantics.md 2.12)."""

from typing import Any

import msgspec
import pytest
from scheduler_world import TREE, World

from cpumond.scheduler.model import CommandError, PoolConfig
from cpumond.scheduler.settings.tree_file import (
    NO_TREE,
    ApplyTree,
    PoolTable,
    Table,
    TreeTables,
    make_tables,
    revision_of,
)
from cpumond.scheduler.state.transaction import Transaction


@pytest.fixture
def world() -> World:
    """Pools ``a`` with ``b``, and ``c``."""
    world = World()
    world.create_pool("a", weight=2, label="x")
    world.create_pool("b", "a")
    world.create_pool("c")
    return world


def do(world: World, *pools: PoolTable, tree: str = TREE, own: Table | None = None, **more: Any) -> Transaction:
    return world.do(ApplyTree(tree, TreeTables(own, pools), **more))


def pools_of(world: World) -> dict[str, PoolConfig]:
    return dict(world.state.config.trees[TREE].pools)


def tables(world: World) -> list[PoolTable]:
    return list(make_tables(world.state.config.trees[TREE]).pools or ())


def test_pools_that_are_not_named_stay_and_are_told(world: World) -> None:
    change = do(world, PoolTable(name="a", options={"weight": 3}))
    assert set(pools_of(world)) == {"a", "b", "c"}
    assert change.warnings == ('2 pools are not in the file and stay (prune removes what is not): "b", "c"',)


def test_prune_removes_them_and_their_operations_go_on(world: World) -> None:
    operation = world.start("c")
    change = do(world, PoolTable(name="a"), PoolTable(name="d"), prune=True)
    assert set(pools_of(world)) == {"a", "d"}
    assert world.pool("c").is_ephemeral
    assert world.record(operation).state == "running"
    assert any("pools would be removed and 1 created: a pool that is only renamed" in text for text in change.warnings)


def test_nothing_is_pruned_by_a_file_that_does_not_speak_of_pools(world: World) -> None:
    world.do(ApplyTree(TREE, TreeTables(Table(options={"max_operation_count": 7})), prune=True))
    assert set(pools_of(world)) == {"a", "b", "c"}
    assert world.state.config.trees[TREE].settings.max_operation_count == 7
    do(world, PoolTable(name="a"))
    assert world.state.config.trees[TREE].settings.max_operation_count == 7, "and the other way round"


def test_a_pool_is_renamed_by_its_id_with_what_is_in_it(world: World) -> None:
    operation = world.start("b")
    (a, b, c) = tables(world)
    renamed = msgspec.structs.replace(a, name="z")
    do(world, renamed, msgspec.structs.replace(b, parent="z"), c)
    assert (pools_of(world)["z"].id, pools_of(world)["b"].parent) == (a.id, "z")
    assert world.record(operation).trees[TREE].pool == "b"
    change = do(world, msgspec.structs.replace(renamed, name="y"))
    assert pools_of(world)["b"].parent == "y", "a pool that stays goes along"
    assert change.warnings[0].startswith("2 pools are not in the file")


def test_the_name_of_a_renamed_pool_may_be_that_of_a_new_one(world: World) -> None:
    (a, b, c) = tables(world)
    do(world, PoolTable(name="a"), msgspec.structs.replace(a, name="z"), msgspec.structs.replace(b, parent="z"), c)
    assert pools_of(world)["z"].id == a.id
    assert pools_of(world)["a"].id not in {a.id, b.id, c.id}


def test_an_id_of_another_tree_is_told_and_the_name_counts(world: World) -> None:
    change = do(world, PoolTable(name="a", id="1-2-3-4", options={"weight": 5}))
    assert change.warnings[0] == 'pool "a": no pool of the tree has its id; it is matched by its name'
    assert pools_of(world)["a"].settings.weight == 5


def test_an_amount_that_was_set_by_its_path_is_the_same_amount(world: World) -> None:
    world.set_pool("c", resource_limits__memory=5.0)
    assert do(world, PoolTable(name="c", options={"resource_limits": {"memory": 5}})).is_empty


def test_an_option_by_another_name_is_the_same_option(world: World) -> None:
    world.set_pool("c", strong_guarantee_resources={"cpu": 2})
    assert do(world, PoolTable(name="c", options={"min_share_resources": {"cpu": 2}})).is_empty
    do(world, PoolTable(name="c", options={"min_share_resources": {"cpu": 3}}))
    world.set_pool("c", strong_guarantee_resources={"cpu": 4})


def test_a_tree_that_there_is_not_is_made(world: World) -> None:
    do(world, PoolTable(name="a"), tree="gpu", own=Table(options={"nodes_filter": "gpu"}), base=NO_TREE)
    assert set(world.state.config.trees["gpu"].pools) == {"a"}
    with pytest.raises(CommandError, match='Pool tree "cpu" does not exist; to make it, give its options'):
        do(world, PoolTable(name="a"), tree="cpu")


def test_a_new_tree_is_not_open_where_the_default_one_is_closed() -> None:
    world = World(acl_required=True)
    with pytest.raises(CommandError, match=r"gpu.*would be open to all users, unlike the default tree; set"):
        do(world, tree="gpu", own=Table(options={"nodes_filter": "gpu"}))
    do(world, tree="gpu", own=Table(options={"nodes_filter": "gpu", "acl_required": True}))
    assert do(world, tree="gpu", own=Table(options={"nodes_filter": "gpu", "acl_required": True})).is_empty


def test_a_tree_that_changed_since_the_plan_is_left_alone(world: World) -> None:
    base = revision_of(world.state.config.trees[TREE])
    world.set_pool("c", weight=9)
    with pytest.raises(CommandError, match="was changed since the plan was made, nothing is applied; plan again"):
        do(world, PoolTable(name="a"), base=base)
    do(world, PoolTable(name="a"), base=revision_of(world.state.config.trees[TREE]))
    assert revision_of(None) == NO_TREE


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ([PoolTable(name="a", options={"weihgt": 1})], 'pool "a": weihgt: is no option of a pool; did you'),
        ([PoolTable(name="a", options={"acl_required": True})], "acl_required: is no option of a pool"),
        ([PoolTable(name="a", attributes={"weight": 1})], "attributes/weight: is an option"),
        ([PoolTable(name="a"), PoolTable(name="a")], 'pool "a": appears twice'),
        ([PoolTable(name="x", parent="c")], 'its parent "c" is not in the file'),
        ([PoolTable(name="x", parent="y"), PoolTable(name="y", parent="x")], "would be one of its own sub-pools"),
        ([PoolTable(name="a/b")], "a name must match"),
        ([PoolTable(name="a", options={"strong_guarantee_resources": {"cpu": 1}}),
          PoolTable(name="b", parent="a", options={"strong_guarantee_resources": {"cpu": 2}})], "have 2 together"),
        ([PoolTable(name="a", options={"mode": "fifo"}), PoolTable(name="b", parent="a")], "fifo"),
    ],
)  # fmt: skip
def test_a_mistake_refuses_the_whole_file(world: World, pools: list[PoolTable], told: str) -> None:
    before = world.state.config
    with pytest.raises(CommandError, match=told):
        do(world, PoolTable(name="new"), *pools)
    assert world.state.config is before


def test_one_id_is_of_one_pool(world: World) -> None:
    (a, *_) = tables(world)
    with pytest.raises(CommandError, match='pools "x" and "y": have one id'):
        do(world, msgspec.structs.replace(a, name="x"), msgspec.structs.replace(a, name="y"))
