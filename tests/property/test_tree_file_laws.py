"""Laws of trees as files: written, read and applied, over random trees (semantics.md 2.12)."""

import itertools
import re
from dataclasses import replace
from types import MappingProxyType

import msgspec
import pytest
from examples import examples
from hypothesis import assume, event, given
from hypothesis import strategies as st
from scheduler_world import World, describe
from test_scheduler_config_laws import COMMANDS, PLAIN, START
from test_undo_laws import kept, raw, take_back

from cpumond.cli.scheduler.tree_text import Form, read_tree_text, write_tree
from cpumond.scheduler.model import CommandError, Config, TreeConfig
from cpumond.scheduler.settings import commands, tree_file
from cpumond.scheduler.settings.changes import compare_configs
from cpumond.scheduler.settings.commands import ConfigCommand

many = examples(100)
IDS = (f"{number:x}-0-0-1" for number in itertools.count(1))
FORMS = st.sampled_from(["toml", "yaml", "json"])


def new_id() -> str:
    return next(IDS)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """What random commands make; tree "t" is there."""
    config = Config(MappingProxyType({}))
    for command in (*START, *draw(st.lists(COMMANDS, min_size=3, max_size=15))):
        try:
            config = commands.apply(config, command, new_id=new_id, nodes={}).config
        except CommandError:
            continue
    assume("t" in config.trees)
    return config


def do(config: Config, tables: tree_file.TreeTables, **more: object) -> Config:
    made = tree_file.make_target(config, tree_file.ApplyTree("t", tables, **more), new_id)  # type: ignore[arg-type]
    return commands.check(config, made, nodes={}).config


def content(tree: TreeConfig) -> bytes:
    """All that a tree says, but ids; an amount of 2.0 that was set by its path is 2."""
    tables = tree_file.make_tables(tree, with_ids=False)
    assert tables.own is not None
    pools = [[pool.name, pool.parent, tree_file.read_table("pool", pool, "")[0]] for pool in tables.pools or ()]
    return msgspec.json.encode([tree_file.read_table("tree", tables.own, "")[0], pools], order="deterministic")


@many
@given(configs(), configs())
def test_the_file_of_one_tree_makes_another_one_like_it(one: Config, other: Config) -> None:
    tables = tree_file.make_tables(one.trees["t"], with_ids=False)
    made = do(other, tables, prune=True)
    assert content(made.trees["t"]) == content(one.trees["t"])
    assert do(made, tables, prune=True) is made
    same = other.trees["t"].pools.keys() & made.trees["t"].pools.keys()
    ids = [{tree.pools[name].id for name in same} for tree in (other.trees["t"], made.trees["t"])]
    assert ids[0] == ids[1], "a pool that moves stays the pool that it was"
    event(f"{len(same)} pools stay")


@many
@given(configs(), configs())
def test_without_prune_no_pool_goes_and_those_of_the_file_are_as_it_says(one: Config, other: Config) -> None:
    tables = tree_file.make_tables(one.trees["t"], with_ids=False)
    try:
        made = do(other, tables).trees["t"]
    except CommandError as refusal:  # those that stay may not fit below what the file says
        event(str(refusal)[:30])
        return
    before = other.trees["t"].pools
    assert {pool.id for pool in before.values()} <= {pool.id for pool in made.pools.values()}
    assert set(made.pools) == set(before) | {table.name for table in tables.pools or ()}
    for table in tables.pools or ():
        assert msgspec.structs.asdict(table) == msgspec.structs.asdict(
            next(each for each in tree_file.make_tables(made, with_ids=False).pools or () if each.name == table.name)
        )


@many
@given(configs(), configs(), st.booleans())
def test_who_may_only_look_sees_the_same_changes(one: Config, other: Config, prune: bool) -> None:
    command = tree_file.ApplyTree("t", tree_file.make_tables(one.trees["t"], with_ids=False), prune)
    alone = replace(other, trees=MappingProxyType({"t": other.trees["t"]}), default_tree="")
    try:
        made = commands.check(alone, tree_file.make_target(alone, command, new_id), nodes={})
    except CommandError as refusal:
        with pytest.raises(CommandError, match=re.escape(str(refusal))):
            tree_file.list_changes(tree_file.make_tables(other.trees["t"]), command)
        return
    changes, warnings = tree_file.list_changes(tree_file.make_tables(other.trees["t"]), command)
    found, expected = (
        {msgspec.json.encode(each, order="deterministic") for each in told}
        for told in (changes, compare_configs(alone, made.config))
    )
    assert found == expected
    assert warnings == [*made.warnings]


@many
@given(configs(), FORMS, st.booleans(), st.booleans())
def test_a_file_says_what_the_tree_says(config: Config, form: Form, ids: bool, prune: bool) -> None:
    tree = config.trees["t"]
    text = write_tree("t", tree_file.make_tables(tree, with_ids=ids), form)
    assert text == write_tree(
        "t", tree_file.make_tables(commands.with_pools(tree, reversed(tree.pools.values())), with_ids=ids), form
    )
    told = read_tree_text(text, "a file", form)
    assert told.tree == "t"
    sent = msgspec.json.decode(msgspec.json.encode(told.tables), type=tree_file.TreeTables)
    assert do(config, sent, prune=prune) is config


@many
@given(
    st.dictionaries(st.text(min_size=1).filter(str.isprintable).map("x".__add__), PLAIN | st.text(), max_size=4), FORMS
)
def test_any_attribute_comes_back_from_a_file(values: dict[str, object], form: Form) -> None:
    config = Config(MappingProxyType({}))
    try:
        config = commands.apply(config, commands.CreateTree("t", values), new_id=new_id, nodes={}).config
        config = commands.apply(config, commands.CreatePool("t", "a", "<Root>", values), new_id=new_id, nodes={}).config
    except CommandError:
        assume(False)
    text = write_tree("t", tree_file.make_tables(config.trees["t"]), form)
    sent = msgspec.json.decode(msgspec.json.encode(read_tree_text(text, "f", form).tables), type=tree_file.TreeTables)
    assert do(config, sent, prune=True) is config


@many
@given(configs(), configs(), st.booleans())
def test_what_is_applied_is_taken_back_in_one_step(one: Config, other: Config, prune: bool) -> None:
    try:
        made = do(other, tree_file.make_tables(one.trees["t"], with_ids=False), prune=prune)
    except CommandError:
        return
    assert raw(take_back(made, kept(other, made), new_id, {}).config) == raw(other)


@many
@given(configs(), st.data())
def test_pools_are_renamed_and_moved_by_their_ids_and_that_is_taken_back(config: Config, data: st.DataObject) -> None:
    tree = config.trees["t"]
    pools = list(tree_file.make_tables(tree).pools or ())
    names = data.draw(st.permutations([pool.name for pool in pools]))
    rename = dict(zip((pool.name for pool in pools), names, strict=True)) | {"<Root>": "<Root>"}
    tables = tuple(msgspec.structs.replace(pool, name=rename[pool.name], parent=rename[pool.parent]) for pool in pools)
    try:
        made = do(config, tree_file.TreeTables(None, tables), prune=data.draw(st.booleans()))
    except CommandError:  # default_parent_pool may be another one now, and so on
        return
    assert {pool.id: pool.name for pool in made.trees["t"].pools.values()} == {
        pool.id: rename[pool.name] for pool in tree.pools.values()
    }
    assert raw(take_back(made, kept(config, made), new_id, {}).config) == raw(config)


@many
@given(configs(), configs())
def test_a_revision_differs_exactly_when_the_tree_does(one: Config, other: Config) -> None:
    first, second = one.trees["t"], other.trees["t"]
    assert tree_file.revision_of(first) != tree_file.revision_of(second), "they have other ids"
    made = do(one, tree_file.make_tables(second, with_ids=False), prune=True).trees["t"]
    assert (tree_file.revision_of(made) == tree_file.revision_of(first)) == (content(made) == content(first))


WRONG = st.sampled_from(
    [
        tree_file.PoolTable(name="a", options={"weihgt": 1}),
        tree_file.PoolTable(name="a", options={"weight": -1}),
        tree_file.PoolTable(name="new", attributes={"weight": 1}),
        tree_file.PoolTable(name="new", parent="nowhere"),
        tree_file.PoolTable(name="b", options={"strong_guarantee_resources": {"cpu": 1e9}}, parent="a"),
        tree_file.PoolTable(name="<Root>"),
    ]
)


@many
@given(st.lists(COMMANDS, min_size=3, max_size=10), WRONG, st.booleans(), st.integers(0, 5))
def test_a_file_with_one_mistake_changes_nothing(
    made: list[ConfigCommand], wrong: tree_file.PoolTable, prune: bool, place: int
) -> None:
    world = World()
    for command in (*START, *made):
        try:
            world.do(command)
        except CommandError:
            continue
    assume("t" in world.state.config.trees)
    pools = [tree_file.PoolTable(name=name, options={"weight": 7}) for name in "abcde" if name != wrong.name]
    pools.insert(place, wrong)
    before = describe(world.state)
    try:
        world.do(
            tree_file.ApplyTree(
                "t", tree_file.TreeTables(tree_file.Table(options={"nodes_filter": "z"}), tuple(pools)), prune=prune
            )
        )
    except CommandError:
        assert describe(world.state) == before
    else:
        raise AssertionError("it was not refused")
