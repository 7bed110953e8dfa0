"""Immediate operations, ephemeral pools, who may start and who runs (semantics.md 2.3, 2.8, 2.9, 3)."""

from collections.abc import Callable
from typing import Any

import pytest
from scheduler_world import EASY, World, assert_consistent, describe, make_task

from cpumond.scheduler.answers.causes import Causes
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.model import RESOLVE, ROOT_POOL, TOO_MANY_OPERATIONS, CommandError, Rules
from cpumond.scheduler.settings.commands import RemovePool, RemoveTree
from cpumond.scheduler.settings.operations import StartOperation


def rules(**given: Any) -> Rules:
    return Rules(spare=EASY.spare, **given)


def refused(world: World, *args: Any, **spec: Any) -> CommandError:
    """The refusal of a start; nothing may have changed."""
    before = describe(world.state)
    with pytest.raises(CommandError) as caught:
        world.start(*args, **spec)
    assert describe(world.state) == before
    return caught.value


@pytest.fixture
def world():
    world = World()
    yield world
    assert_consistent(world.state)


# --- starts that are refused

NONE = {"max_operation_count": 0, "max_running_operation_count": 0}
OF_USERS = {"create_ephemeral_subpools": True}
NO_NAME = "not allowed for an ephemeral pool"
FORBIDDEN = {"forbid_immediate_operations": True}
REFUSED: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any], str]] = {
    "2.3 unknown tree": ({}, {"pool_trees": ["default", "nowhere"]}, 'Pool tree "nowhere" does not exist'),
    "2.3 no trees": ({}, {"pool_trees": []}, "no pool tree is specified"),
    "2.8 forbidden": ({"p": FORBIDDEN}, {}, 'Starting operations immediately in pool "p" is forbidden'),
    **{f"2.9 name {name:.9}": ({}, {"pool": name}, NO_NAME) for name in ("with blank", ".dot", "ä", "a/b", "x" * 101)},
    "2.9 two delimiters": ({"p": OF_USERS}, {"pool": "p$a$b"}, "delimiter '$' is found more than once"),
    **{
        f"2.9 child {name}": ({"p": OF_USERS, "plain": {}}, {"pool": name}, name)
        for name in ("invalid$name", "plain$name", "$name", "p$")
    },
    "2.9 name of a user": ({"p": OF_USERS}, {"user": "Jon Doe"}, "p$Jon Doe"),
    "2.9 config of a sub-pool": (
        {"p": {**OF_USERS, "ephemeral_subpool_config": NONE}}, {"user": "ann"}, '0 for pool "p$ann" in tree "default"',
    ),
    "3.1 limit of zero": ({"p": NONE}, {}, 'operations 0 for pool "p" in tree "default" has been reached'),
    "3.1 one full tree": ({"p": NONE}, {"pool_trees": ["other", "default"]}, 'for pool "p" in tree "default"'),
}  # fmt: skip


@pytest.mark.parametrize(("pools", "spec", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_start_is_refused_in_words(world, pools, spec, sentence):
    world.create_tree("other", nodes_filter="x")
    for name, options in pools.items():
        world.create_pool(name, **options)
    error = refused(world, **{"pool": "p", **spec})
    assert sentence in str(error)
    assert (error.code == RESOLVE) == ("does not exist" in sentence)
    assert (error.code == TOO_MANY_OPERATIONS) == ("for pool" in sentence)


def test_2_3_without_pool_trees_and_default_tree_it_is_refused():
    world = World()
    world.do(RemoveTree("default"))
    assert "Pool trees are unspecified" in str(refused(world, "p"))


def test_3_1_only_full_trees_are_erased():
    world = World(rules(erase_trees_with_pool_limit_violations=True))
    world.create_tree("other", nodes_filter="x")
    world.create_pool("p", **FORBIDDEN)
    assert "is forbidden" in str(refused(world, "p", pool_trees=["other", "default"]))


def test_2_8_by_default_no_operation_starts_in_the_root(world):
    assert 'Starting operations immediately in pool "<Root>" is forbidden' in str(refused(world, ROOT_POOL))
    assert "is forbidden" in move_refused(world, world.start("p"), ROOT_POOL)


def test_2_8_operations_run_in_the_root_if_allowed_and_over_a_restart():
    world = World(forbid_immediate_operations_in_root=False, max_running_operation_count=2)
    node = world.node("n1", cpu=10)
    world.create_pool("p")
    first, inside, third = world.start(ROOT_POOL, jobs=4), world.start("p", jobs=9), world.start(ROOT_POOL, jobs=9)
    assert world.states([first, inside, third]) == "rrp"
    world.settle_down()
    assert len(world.jobs_of(first)) == 4
    world.restart()
    world.beat(node)
    world.step()
    assert world.element(first).parent is world.pool(ROOT_POOL)
    assert len(world.jobs_of(first)) == 4
    assert set(world.tree().pools) == {"p"}
    world.set_operation(inside, pool=ROOT_POOL)
    world.abort(first)
    assert world.states([first, inside, third]) == "arr"
    assert world.pool("p").operation_count == 0
    world.set_tree(forbid_immediate_operations_in_root=True)
    assert "is forbidden" in str(refused(world, ROOT_POOL))
    world.set_operation(third, pool="p", weight=2.0)
    assert world.counts(ROOT_POOL) == (2, 2)
    assert_consistent(world.state)


@pytest.mark.parametrize("default", ["fifo", "nowhere", "ephemeral"])
def test_2_4_a_default_parent_pool_that_cannot_have_children_is_the_root(default):
    world = World(default_parent_pool=default)
    world.create_pool("fifo", mode="fifo")
    if default == "ephemeral":
        world.start("ephemeral", user="other")
    world.start("new")
    assert world.pool("new").parent is world.tree().root


# --- 2.9, ephemeral pools


def test_2_9_pools_may_have_to_exist():
    world = World(rules(require_specified_pools_existence=True), pools=["p"])
    world.start("p")
    error = refused(world, "x")
    assert 'Pool "x" not found' in str(error)
    assert error.code == RESOLVE


def test_2_9_subpools_have_default_settings_and_their_parents_config(world):
    config = {"mode": "fifo", "max_running_operation_count": 1, "max_operation_count": 2, "resource_limits": {"cpu": 3}}
    world.create_pool("p", create_ephemeral_subpools=True, ephemeral_subpool_config=config, weight=5)
    world.start("p", user="ann")
    pool = world.pool("p$ann")
    assert (pool.mode, pool.max_running_operation_count, pool.max_operation_count) == ("fifo", 1, 2)
    assert pool.settings.resource_limits == {"cpu": 3}
    assert pool.settings.weight is None


def test_2_9_a_later_change_of_the_config_is_applied_to_existing_subpools(world):
    world.create_pool("p", create_ephemeral_subpools=True)
    world.start("p", user="ann")
    assert world.pool("p$ann").max_operation_count == 50
    world.set_pool("p", ephemeral_subpool_config={"max_operation_count": 1, "max_running_operation_count": 1})
    assert world.pool("p$ann").max_operation_count == 1
    assert refused(world, "p", user="ann").code == TOO_MANY_OPERATIONS


def test_2_9_the_default_parents_config_applies_to_ephemeral_pools_only():
    world = World(default_parent_pool="top")
    world.create_pool("top", ephemeral_subpool_config={"max_running_operation_count": 1, "max_operation_count": 3})
    world.create_pool("explicit", "top")
    world.start("new")
    world.start("explicit")
    assert world.pool("new").max_operation_count == 3
    assert world.pool("explicit").max_operation_count == 50


def test_2_9_switched_off_subpools_give_their_operations_to_the_pool(world):
    world.create_pool("p", create_ephemeral_subpools=True)
    world.node("n")
    ann, bob = world.start("p", user="ann", cpu=2), world.start("p", user="bob")
    world.settle_down()
    world.set_pool("p", create_ephemeral_subpools=False)
    assert world.element(ann).parent is world.element(bob).parent is world.pool("p")
    assert list(world.tree().pools) == ["p"]
    assert world.cores("p") == 3
    assert world.record(ann).trees["default"].pool == "p"


def test_2_9_pools_of_a_user_are_limited_in_the_default_parent():
    world = World(max_ephemeral_pools_per_user=2)
    world.start("b", user="ann")
    world.start("a", user="ann")
    message = str(refused(world, "c", user="ann"))
    for part in ('"c"', "already has 2", '"ann"', '"default"', "a, b"):
        assert part in message
    world.start("c", user="bob")
    world.start("c", user="ann")  # it exists, so none is made


def of_users(world: World) -> None:
    world.create_pool("p", **OF_USERS)
    world.set_tree(default_parent_pool="p")
    for name in ("p", "p$x", "p$y"):
        world.start(name, user="ann")


COUNTED: dict[str, tuple[Callable[[World], object], bool]] = {
    # what is there besides a pool of ann's in another tree -> whether it is one of hers, of which she may have one
    "her own": (lambda world: world.start("a", user="ann"), True),
    "a sub-pool": (of_users, False),
    "one that is gone": (lambda world: world.abort(world.start("a", user="ann")), False),
    "one that was made explicit": (
        lambda world: (world.start("a", user="ann"), world.create_pool("a")), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("act", "counts"), COUNTED.values(), ids=COUNTED)
def test_2_9_which_pools_count_for_the_limit_per_user(world, act, counts):
    world.create_tree("other", nodes_filter="x")
    world.start("elsewhere", user="ann", pool_trees=["other"])
    act(world)
    if not counts:
        world.start("own", user="ann")
    refused(world, "more", user="ann")


def restart_and_compare(world):
    before = describe(world.state, with_jobs=False)
    world.restart()
    assert describe(world.state, with_jobs=False) == before


def test_2_9_an_erased_pool_stays_until_its_last_ephemeral_subpool_leaves(world):
    world.create_pool("above")
    world.create_pool("p", "above", create_ephemeral_subpools=True, weight=3)
    first, second = world.start("p", user="ann", cpu=2), world.start("p", user="bob")
    world.node("n")
    world.settle_down()
    world.do(RemovePool("default", "above", recursive=True))
    pool = world.pool("p")
    assert (pool.is_ephemeral, pool.parent, pool.settings.weight) == (True, world.tree().root, None)
    assert {child.name for child in pool.children.values()} == {"p$ann", "p$bob"}
    assert all(child.is_ephemeral for child in pool.children.values())
    assert (world.cores("p"), world.counts("p")) == (3, (2, 2))
    assert [*world.tree().pools] == ["p", "p$ann", "p$bob"]
    restart_and_compare(world)
    assert_consistent(world.state)
    world.abort(first)
    assert [*world.tree().pools] == ["p", "p$bob"]
    restart_and_compare(world)
    world.abort(second)
    assert world.tree().pools == {}


@pytest.mark.parametrize("mode", [None, "fifo"])
def test_2_9_an_erased_default_parent_stays_around_its_ephemeral_pools(mode):
    world = World(default_parent_pool="top")
    world.create_pool("top", ephemeral_subpool_config={"mode": mode} if mode else {})
    world.create_pool("next", ephemeral_subpool_config={"mode": mode} if mode else {})
    first = world.start(user="ann")
    waiting = world.start("direct", user="bob")
    world.do(RemovePool("default", "top"))
    second = world.start(user="ann")  # it goes where her pool is
    restart_and_compare(world)
    world.set_tree(default_parent_pool="next")  # what comes now goes there
    third = world.start(user="eve")
    assert world.pool("eve").parent is world.pool("next")
    for name in ("ann", "direct"):
        assert world.pool(name).parent is world.pool("top")
    assert (world.pool("top").is_ephemeral, world.pool("top").mode) == (True, "fair_share")
    assert world.pool("top").parent is world.pool("next")
    restart_and_compare(world)
    world.abort(first, waiting)
    assert "direct" not in world.tree().pools
    restart_and_compare(world)
    world.set_operation(second, pool="eve")
    assert [*world.tree().pools] == ["next", "eve"]
    assert world.record(second).parents == {}
    restart_and_compare(world)
    world.abort(third)
    assert_consistent(world.state)


def test_2_9_what_is_left_of_an_erased_pool_is_in_no_other_such(world):
    world.set_tree(default_parent_pool="top")
    world.create_pool("top")
    world.create_pool("p", create_ephemeral_subpools=True)
    started = [world.start("p", user="ann"), world.start("mine", user="bob")]
    world.do(RemovePool("default", "p"))
    assert world.pool("p").parent is world.pool("top")
    world.do(RemovePool("default", "top"))
    assert world.pool("p").parent is world.tree().root
    assert world.pool("mine").parent is world.pool("top")
    restart_and_compare(world)
    started.append(world.start("p", user="eve"))  # now it has an operation of its own, too
    restart_and_compare(world)
    world.create_pool("other")
    restart_and_compare(world)
    world.abort(*started)
    assert [*world.tree().pools] == ["other"]


def test_2_9_an_erased_pool_that_is_made_again_has_its_subpools_again(world):
    world.create_pool("p", create_ephemeral_subpools=True)
    operation = world.start("p", user="ann")
    world.do(RemovePool("default", "p"))
    world.create_pool("p", create_ephemeral_subpools=True, weight=2)
    assert world.element(operation).parent.parent is world.pool("p")
    assert (world.pool("p").is_ephemeral, world.pool("p").settings.weight) == (False, 2)
    restart_and_compare(world)


def test_2_9_a_changed_default_parent_takes_the_ephemeral_pools_along(world):
    world.create_pool("top")
    operation = world.start("new")
    world.set_tree(default_parent_pool="top")
    assert world.pool("new").parent is world.pool("top")
    assert world.counts("top") == (1, 1)
    assert world.element(operation).parent is world.pool("new")


def test_2_7_a_pool_with_ephemeral_subpools_cannot_become_fifo(world):
    world.create_pool("p", create_ephemeral_subpools=True)
    world.start("p", user="ann")
    before = describe(world.state)
    with pytest.raises(CommandError, match=r"ephemeral sub-pools exist: p\$ann"):
        world.set_pool("p", create_ephemeral_subpools=False, mode="fifo")
    assert describe(world.state) == before


def test_2_7_a_renamed_pool_keeps_its_operations_also_over_a_restart(world):
    world.create_pool("p")
    operation = world.start("p")
    world.set_pool("p", name="q")
    assert world.element(operation).parent is world.pool("q")
    assert world.record(operation).trees["default"].pool == "q"
    world.set_operation(operation, weight=2.0)
    assert list(world.tree().pools) == ["q"]
    before = describe(world.state)
    world.restart()
    assert describe(world.state) == before


def test_2_7_subpools_are_renamed_with_their_pool(world):
    world.create_pool("p", create_ephemeral_subpools=True)
    operation = world.start("p", user="ann")
    world.set_pool("p", name="q")
    assert world.record(operation).trees["default"].pool == "q$ann"
    assert set(world.tree().pools) == {"q", "q$ann"}
    world.restart()
    assert world.element(operation).parent.name == "q$ann"
    assert world.start("q", user="ann")
    assert set(world.tree().pools) == {"q", "q$ann"}


def test_3_1_the_first_full_element_from_the_pool_to_the_root_refuses():
    world = World(max_operation_count=3, max_running_operation_count=3)
    world.create_pool("a", max_operation_count=2, max_running_operation_count=1)
    world.create_pool("b", "a", max_operation_count=1, max_running_operation_count=1)
    world.create_pool("c")
    world.start("b")
    assert 'operations 1 for pool "b" in tree "default" has been reached' in str(refused(world, "b"))
    world.start("a")
    error = refused(world, "b")
    assert '"b"' in str(error)  # both are full, the nearest says so
    error = refused(world, "a")
    assert 'operations 2 for pool "a" in tree "default" has been reached' in str(error)
    world.start("c")
    error = refused(world, "c")
    assert error.code == TOO_MANY_OPERATIONS == 202
    assert f'Limit for the number of concurrent operations 3 for pool "{ROOT_POOL}"' in str(error)
    assert error.attributes == {"pool": ROOT_POOL, "limit": 3, "pool_tree": "default", "field": "pool"}


def test_3_1_an_erased_tree_is_a_warning():
    world = World(rules(erase_trees_with_pool_limit_violations=True))
    world.create_tree("other", nodes_filter="x")
    world.create_pool("p", max_operation_count=0, max_running_operation_count=0)
    spec = {"pool": "p", "pool_trees": ["other", "default"], "tasks": {"t": make_task()}}
    change = world.do(StartOperation(spec))
    assert list(world.record(change.id).trees) == ["other"]
    assert 'for pool "p" in tree "default" has been reached' in change.warnings[0]
    assert refused(world, "p").code == TOO_MANY_OPERATIONS  # no tree is left


def test_3_1_the_scheduler_as_a_whole_has_a_limit():
    world = World(rules(max_operation_count=2))
    world.create_tree("other", nodes_filter="x")
    first = world.start("a")
    world.start("b", user="v", pool_trees=["other"])
    error = refused(world, "c", user="w")
    assert error.code == TOO_MANY_OPERATIONS
    assert "2 of the scheduler" in str(error)
    world.abort(first)
    world.start("c", user="w")


def test_3_2_an_operation_in_several_trees_runs_as_soon_as_one_lets_it(world):
    world.create_tree("other", nodes_filter="x")
    world.create_pool("p", max_running_operation_count=0)
    world.create_pool("p", tree="other", max_running_operation_count=1)
    both = world.start("p", pool_trees=["default", "other"])
    assert (world.record(both).state, world.record(both).running_in) == ("running", ("other",))
    assert not world.element(both).is_running
    world.set_pool("p", max_running_operation_count=1)
    assert set(world.record(both).running_in) == {"default", "other"}


# --- 3.4, limits change


def test_3_4_lowering_a_limit_never_stops_running_operations(world):
    world.create_pool("p")
    operations = [world.start("p") for _ in range(4)]
    world.set_pool("p", max_running_operation_count=1, max_operation_count=1)
    assert world.states(operations) == "rrrr"
    refused(world, "p")
    world.set_pool("p", max_operation_count=9)
    operations.append(world.start("p"))
    for turn in range(3):
        world.abort(operations[turn])
        assert world.states(operations[4:]) == "p"
    world.abort(operations[3])
    assert world.states(operations[4:]) == "r"


RUN = "max_running_operation_count"
TOP_A_B: dict[str, dict[str, Any]] = {"top": {}, "a": {"parent": "top", RUN: 1}, "b": {"parent": "top", RUN: 1}}
LOW = {"top": {}, "p": {"parent": "top"}}
Act = Callable[[World, list[str]], object]
CHANGES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], str, str, Act, str]] = {
    "3.2 limit of zero": ({}, {"p": {RUN: 0}}, "p", "p", lambda world, _: world.set_pool("p", **{RUN: 1}), "r"),
    "3.3 the blocked do not hold back": (
        {}, {**TOP_A_B, "top": {RUN: 2}}, "aab", "rpr", lambda world, ids: world.abort(ids[1]), "rar",
    ),
    "3.3 counts grow with each that runs": (
        {}, {**TOP_A_B, "top": {RUN: 0}}, "aabb", "pppp", lambda world, _: world.set_pool("top", **{RUN: 5}), "rprp",
    ),
    "3.3 as many as the root holds": (
        {RUN: 1}, {}, "cdef", "rppp", lambda world, _: world.set_tree(**{RUN: 3}), "rrrp",
    ),
    "3.3 a pending one frees no slot": (
        {}, {"p": {RUN: 1}}, "ppp", "rpp", lambda world, ids: world.abort(ids[1]), "rap",
    ),
    "3.4 raised in the pool": (
        {}, {"top": {}, "p": {"parent": "top", RUN: 1}}, "ppp", "rpp",
        lambda world, _: world.set_pool("p", **{RUN: 2}), "rrp",
    ),
    "3.4 raised above": (
        {}, {**LOW, "top": {RUN: 1}}, "ppp", "rpp", lambda world, _: world.set_pool("top", **{RUN: 2}), "rrp",
    ),
    "3.4 raised in the root": ({RUN: 1}, LOW, "ppp", "rpp", lambda world, _: world.set_tree(**{RUN: 2}), "rrp"),
    "3.4 raised for each pool": (
        {f"{RUN}_per_pool": 1}, LOW, "ppp", "rpp", lambda world, _: world.set_tree(**{f"{RUN}_per_pool": 2}), "rrp",
    ),
    "3.4 own limit removed": (
        {}, {"p": {RUN: 1}}, "ppp", "rpp", lambda world, _: world.set_pool("p", **{RUN: None}), "rrr",
    ),
    "3.4 pool moved out": (
        {}, {**TOP_A_B, "top": {RUN: 1}}, "ab", "rp", lambda world, _: world.set_pool("b", parent_name=ROOT_POOL), "rr",
    ),
    "3.5 pending one moved": (
        {}, {"a": {RUN: 0}, "b": {}}, "a", "p", lambda world, ids: world.set_operation(ids[0], pool="b"), "r",
    ),
    "3.5 a move frees its slot": (
        {}, {"a": {RUN: 1}, "b": {}}, "aa", "rp", lambda world, ids: world.set_operation(ids[0], pool="b"), "rr",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tree", "pools", "starts", "before", "change", "after"), CHANGES.values(), ids=CHANGES)
def test_a_change_runs_those_that_it_makes_room_for(tree, pools, starts, before, change, after):
    """``starts``: the pools of the operations, in order of arrival; ``before``, ``after``: their states."""
    world = World(**tree)
    for name, options in pools.items():
        world.create_pool(name, **options)
    operations = [world.start(pool, user=f"u{number}") for number, pool in enumerate(starts)]
    assert world.states(operations) == before
    change(world, operations)
    assert world.states(operations) == after
    assert_consistent(world.state)


def move_refused(world: World, operation: str, pool: str) -> str:
    before = describe(world.state)
    with pytest.raises(CommandError) as caught:
        world.set_operation(operation, pool=pool)
    assert describe(world.state) == before
    return str(caught.value)


def test_3_5_a_full_pool_and_one_that_nobody_may_start_in_refuse_it(world):
    world.create_pool("a")
    world.create_pool("b", max_operation_count=0, max_running_operation_count=0)
    world.create_pool("c", max_running_operation_count=0)
    world.create_pool("d", **FORBIDDEN)
    operation = world.start("a")
    assert "is forbidden" in move_refused(world, operation, "d")
    assert move_refused(world, operation, "b") == 'Max operation count of pool "b" violated'
    assert move_refused(world, operation, "c") == 'Max running operation count of pool "c" violated'


def test_3_5_only_new_ancestors_are_tested(world):
    world.create_pool("top", max_operation_count=1, max_running_operation_count=1)
    world.create_pool("a", "top")
    world.create_pool("b", "top")
    world.set_operation(world.start("a"), pool="b")
    assert world.counts("top") == (1, 1)
    world.create_pool("c")
    assert 'pool "top"' in move_refused(world, world.start("c"), "a")


def test_3_5_a_pending_operation_may_go_where_nothing_may_run(world):
    world.create_pool("a", max_running_operation_count=0)
    world.create_pool("b", max_running_operation_count=0)
    operation = world.start("a")
    world.set_operation(operation, pool="b")
    assert world.states([operation]) == "p"
    assert world.counts("b") == (0, 1)


def test_3_5_a_move_may_make_an_ephemeral_pool_and_leave_one(world):
    world.create_pool("p", create_ephemeral_subpools=True)
    world.node("n")
    operation = world.run("p", user="ann", cpu=2)
    world.set_operation(operation, pool="own")
    assert set(world.tree().pools) == {"p", "own"}
    world.set_operation(operation, pool="p")
    assert set(world.tree().pools) == {"p", "p$ann"}
    assert world.cores("p$ann") == world.cores("p") == 2


def test_3_5_a_move_in_one_of_several_trees(world):
    world.create_tree("other", nodes_filter="x")
    for tree in ("default", "other"):
        world.create_pool("a", tree=tree)
        world.create_pool("b", tree=tree)
    operation = world.start("a", pool_trees=["default", "other"])
    world.set_operation(operation, scheduling_options_per_pool_tree={"other": {"pool": "b"}})
    assert world.element(operation).parent.name == "a"
    assert world.element(operation, "other").parent.name == "b"


def test_a_user_runs_so_many_operations_over_all_pools() -> None:
    world = World(pools=["a", "b"], max_running_operation_count_per_user=2)
    first, second, third, fourth = (world.start(pool, user="u") for pool in ("a", "b", "a", "b"))
    other = world.start("a", user="v")
    assert world.states((first, second, third, fourth, other)) == "rrppr"
    assert Causes(world.tree()).of(world.element(third)).cause.kind == "user_full"
    told = explain_operation(world.state, world.record(third), world.now, {}, world.rights)
    assert any("2 operations of its user run in the tree" in line for part in told.trees for line in part.lines)
    world.complete(first)
    assert world.states((second, third, fourth)) == "rrp"
    world.set_tree(max_running_operation_count_per_user=3)
    assert world.states((second, third, fourth)) == "rrr"
