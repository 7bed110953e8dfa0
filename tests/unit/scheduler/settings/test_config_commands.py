"""Commands that change trees and pools, what they change, and how that is stored (semantics.md 2)."""

import itertools
from types import MappingProxyType
from typing import Any

import pytest
from scheduler_builders import records_of

from cpumond.core.errors import StateFileError
from cpumond.scheduler.model import (
    ALREADY_EXISTS,
    GENERIC,
    GUARANTEES_OVERCOMMIT,
    NAME_REGEX,
    RESOLVE,
    ROOT_POOL,
    CommandError,
    Config,
    PoolConfig,
)
from cpumond.scheduler.settings.attributes import Edit, read_pool, read_tree
from cpumond.scheduler.settings.changes import compare_configs
from cpumond.scheduler.settings.commands import (
    ChangePool,
    ChangeTree,
    ConfigCommand,
    CreatePool,
    CreateTree,
    MovePool,
    Outcome,
    RemovePool,
    RemoveTree,
    SetDefaultTree,
    TransferPoolResources,
    apply,
)
from cpumond.scheduler.settings.records import SYSTEM, RecordKey, changed_records, encode_pool, encode_tree, load_config

EMPTY = Config(MappingProxyType({}))
NODES = {"node-1": ["a", "x", "node-1"], "node-2": ["b", "node-2"]}


def put(path: str, value: Any = None) -> Edit:
    return Edit(tuple(path.split("/")), value)


class Tried:
    """A configuration and the commands that made it."""

    def __init__(self, *commands: ConfigCommand) -> None:
        self.config = EMPTY
        self.new_id = (f"{number:x}-0-0-1" for number in itertools.count(1)).__next__
        for command in commands:
            self.do(command)

    def do(
        self, command: ConfigCommand, nodes: dict[str, list[str]] = NODES, name_pattern: str = NAME_REGEX
    ) -> Outcome:
        outcome = apply(self.config, command, new_id=self.new_id, nodes=nodes, name_pattern=name_pattern)
        self.config = outcome.config
        return outcome

    def refuse(self, command: ConfigCommand, code: int = GENERIC) -> str:
        before = records_of(self.config)
        with pytest.raises(CommandError) as caught:
            self.do(command)
        assert records_of(self.config) == before
        assert caught.value.code == code
        return str(caught.value)

    def pool(self, name: str, tree: str = "t") -> PoolConfig:
        return self.config.trees[tree].pools[name]

    def names(self, tree: str = "t") -> list[str]:
        return list(self.config.trees[tree].pools)


def strong(**amounts: float) -> dict[str, Any]:
    return {"strong_guarantee_resources": amounts}


FAMILY = (
    CreateTree("t"), CreatePool("t", "b"), CreatePool("t", "b2", "b"), CreatePool("t", "b1", "b"),
    CreatePool("t", "a"), CreatePool("t", "b11", "b1"),
)  # fmt: skip
REFUSED: list[tuple[ConfigCommand, int, str]] = [
    (CreateTree("t"), ALREADY_EXISTS, 'Pool tree "t" already exists'),
    (CreateTree("u", {"max_operation_count": 0}), GENERIC, 'pool tree "u": max_operation_count: must'),
    (CreateTree("u", {"nodes_filter": "&"}), GENERIC, 'pool tree "u": nodes_filter: column 1'),
    (CreateTree("a b"), GENERIC, 'pool tree "a b": a name must match'),
    (ChangeTree("x", ()), RESOLVE, 'Pool tree "x" does not exist'),
    (ChangeTree("tt", ()), RESOLVE, 'Pool tree "tt" does not exist; did you mean "t"?'),
    (ChangeTree("t", (put("name", "u"),)), GENERIC, 'pool tree "t": name: this attribute of a tree'),
    (SetDefaultTree("tt"), RESOLVE, 'Default tree is missing: Pool tree "tt" does not exist; did you mean "t"?'),
    (RemoveTree("t"), GENERIC, "Cannot remove non-empty composite node: "),
    (CreatePool("t", "b1", "b"), ALREADY_EXISTS, 'Pool "b1" already exists in tree "t"'),
    (CreatePool("t", "b1", ignore_existing=True), ALREADY_EXISTS, 'Pool "b1" already exists in tree "t" under "b"'),
    (CreatePool("u", "x"), RESOLVE, 'Pool tree "u" does not exist'),
    (CreatePool("t", "x", "bb1"), RESOLVE, 'Pool "bb1" does not exist in tree "t"; did you mean "b1"?'),
    (CreatePool("t", "x", attributes={"mode": "lifo"}), GENERIC, 'pool "x": mode: must be one of'),
    (CreatePool("t", "x$y"), GENERIC, 'pool "x$y": a name must not contain'),
    (CreatePool("t", "x", attributes={"name": "y"}), GENERIC, 'pool "x": name: this attribute'),
    (ChangePool("t", "c", ()), RESOLVE, 'Pool "c" does not exist in tree "t"'),
    (ChangePool("t", "a", (put("weight", -1),)), GENERIC, 'pool "a": weight: must be a number'),
    (ChangePool("t", "b", (put("name"),)), GENERIC, 'pool "b": name: must be the name of a pool, got null'),
    (ChangePool("t", "b", (put("parent_name"),)), GENERIC, 'pool "b": parent_name: must be the name of a pool, got'),
    (ChangePool("t", "b", (put("name/x", "y"),)), GENERIC, 'pool "b": name'),
    (ChangePool("t", "b", (put("parent_name/x", "y"),)), GENERIC, 'pool "b": parent_name'),
    (RemovePool("t", "b"), GENERIC,
     'Cannot remove non-empty composite node: pool "b" has 3 pools below it; remove it recursively'),
    (RemovePool("t", "b1"), GENERIC, 'Cannot remove non-empty composite node: pool "b1" has 1 pool below it'),
    (RemovePool("t", "c"), RESOLVE, 'Pool "c" does not exist in tree "t"'),
    (MovePool("t", "b", "b11", "b"), GENERIC, 'pool "b": cannot be moved under "b11", which is one of its own'),
    (MovePool("t", "b", "b", "b"), GENERIC, 'pool "b": cannot be moved under "b", which is itself'),
    (MovePool("t", "b", "c", "b"), RESOLVE, 'Pool "c" does not exist in tree "t"'),
    (MovePool("t", "c", "b", "c"), RESOLVE, 'Pool "c" does not exist in tree "t"'),
    (MovePool("t", "b", ROOT_POOL, "a"), ALREADY_EXISTS, 'Pool "a" already exists in tree "t"'),
    (MovePool("t", "b", ROOT_POOL, "a b"), GENERIC, 'pool "a b": a name must match'),
]  # fmt: skip


@pytest.mark.parametrize(("command", "code", "sentence"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused_changes_nothing(command: ConfigCommand, code: int, sentence: str) -> None:
    assert Tried(*FAMILY).refuse(command, code).startswith(sentence)


# --- trees


def test_what_exists_may_be_created_where_that_is_ignored() -> None:
    tried = Tried(*FAMILY)
    for command, there in (
        (CreateTree("t", {"nodes_filter": "x"}, ignore_existing=True), tried.config.trees["t"]),
        (CreatePool("t", "b1", "b", {"weight": 5}, ignore_existing=True), tried.pool("b1")),
    ):
        outcome = tried.do(command)
        assert (outcome.id, outcome.changed, outcome.warnings) == (there.id, False, ())
    assert tried.do(CreateTree("a b", {"nodes_filter": "nobody"}), name_pattern="[a-z ]+").changed


def test_options_of_a_tree_change() -> None:
    tried = Tried(CreateTree("t", {"weird": 1}), CreatePool("t", "a"))
    pools = tried.config.trees["t"].pools
    edits = (put("config/max_operations_per_pool", 7), put("max_operation_count_per_pool", 3))
    outcome = tried.do(ChangeTree("t", edits))
    assert (outcome.id, outcome.changed) == ("1-0-0-1", True)
    (warning,) = outcome.warnings
    assert warning.startswith('pool tree "t": max_operation_count_per_pool: has no effect while')
    tree = tried.config.trees["t"]
    assert tree.settings.max_operation_count_per_pool == 7
    assert tree.pools is pools
    assert not tried.do(ChangeTree("t", (put("max_operation_count_per_pool", 3.0),))).changed


def test_2_2_no_node_belongs_to_two_trees() -> None:
    tried = Tried(CreateTree("one", {"nodes_filter": "a"}), CreateTree("two", {"nodes_filter": "b"}))
    with pytest.raises(CommandError) as caught:
        tried.do(CreateTree("three", {"nodes_filter": "x"}))
    assert str(caught.value) == (
        "Cannot update fair-share trees since there is node that belongs to multiple trees: node "
        '"node-1" matches the nodes_filter of "one" and "three"; make the filters exclude each other'
    )
    names = {"node_id": "node-1", "node_address": "node-1", "matched_trees": ["one", "three"]}
    assert caught.value.attributes == {**names, "field": "nodes_filter"}
    assert "node-2" in tried.refuse(ChangeTree("one", (put("nodes_filter", "a | b"),)))
    assert '"node-1"' in tried.refuse(ChangeTree("two", (put("config/nodes_filter", "node-1"),)))
    tried.do(ChangeTree("one", (put("nodes_filter", "a & !b"),)))
    # Filters that could overlap are fine while no node matches both.
    tried.do(CreateTree("three", {"nodes_filter": "a & c"}))
    # Other options do not ask about nodes.
    overlap = {"n": ["a", "b"]}
    assert tried.do(ChangeTree("one", (put("max_operation_count", 3),)), nodes=overlap).changed
    with pytest.raises(CommandError):
        tried.do(ChangeTree("one", (put("nodes_filter", "a"),)), nodes=overlap)


def test_2_3_the_default_tree() -> None:
    tried = Tried(CreateTree("a", {"nodes_filter": "a"}), CreateTree("b", {"nodes_filter": "b"}))
    assert tried.do(SetDefaultTree("a")).id == "1-0-0-1"
    assert not tried.do(SetDefaultTree("a")).changed
    assert tried.do(SetDefaultTree(None)).changed
    assert (tried.config.default_tree, tried.do(SetDefaultTree(None)).changed) == ("", False)
    tried.do(SetDefaultTree("a"))
    assert tried.refuse(RemoveTree("a")) == (
        'pool tree "a": is the default tree and cannot be removed while there are others; first make one of these the '
        'default: "b"'
    )
    tried.do(RemoveTree("b"))
    tried.do(RemoveTree("a"))
    assert tried.config == EMPTY


# --- pools


def test_attributes_of_a_pool_change() -> None:
    tried = Tried(*FAMILY)
    before = tried.config
    outcome = tried.do(ChangePool("t", "a", (put("integral-guarantees/resource_flow", {"cpu": 100}), put("weigth", 1))))
    assert outcome.changed
    assert outcome.id == tried.pool("a").id
    assert outcome.warnings == (
        'pool "a": "weigth" is no option of a pool: it is kept and has no effect; did you mean "weight"?',
    )
    assert tried.pool("a").settings.integral_guarantees.resource_flow == {"cpu": 100.0}
    outcome = tried.do(ChangePool("t", "a", (put("integral_guarantees"), put("weigth"), put("abc"))))
    assert outcome.config == before
    unchanged = tried.do(ChangePool("t", "a", (put("weight"), put("name", "a"), put("parent_name", ROOT_POOL))))
    assert (unchanged.changed, unchanged.config) == (False, tried.config)
    assert not tried.do(MovePool("t", "b", ROOT_POOL, "b")).changed


def test_warnings_are_about_what_is_new() -> None:
    tried = Tried(*FAMILY)
    edits = (put("integral_guarantees", {"guarantee_type": "burst", "resource_flow": {"cpu": 1}}),)
    assert len(tried.do(ChangePool("t", "a", edits)).warnings) == 1
    assert tried.do(ChangePool("t", "b", (put("weight", 3),))).warnings == ()
    (warning,) = tried.do(ChangeTree("t", (put("default_parent_pool", "x"),))).warnings
    assert "InvalidDefaultParentPool" in warning
    assert tried.do(CreatePool("t", "x")).warnings == ()
    assert "InvalidDefaultParentPool" in tried.do(RemovePool("t", "x")).warnings[0]


def test_what_is_removed_goes_with_what_is_below_it() -> None:
    tried = Tried(*FAMILY)
    assert tried.do(RemovePool("t", "b11")).changed
    tried.do(RemovePool("t", "b", recursive=True))
    assert tried.names() == ["a"]
    tried.do(RemoveTree("t", recursive=True))
    assert tried.config.trees == {}


# --- moves


@pytest.mark.parametrize("by_attributes", [False, True])
def test_a_pool_is_renamed_and_moved(by_attributes: bool) -> None:
    tried = Tried(*FAMILY)
    before = tried.config
    b1 = tried.pool("b1")
    command: ConfigCommand = MovePool("t", "b1", "a", "z")
    if by_attributes:
        command = ChangePool("t", "b1", (put("name", "z"), put("parent-name", "a"), put("weight", 3)))
    outcome = tried.do(command)
    assert (outcome.id, outcome.changed) == (b1.id, True)
    assert tried.names() == ["a", "z", "b11", "b", "b2"]
    parents = {pool.name: pool.parent for pool in tried.config.trees["t"].pools.values()}
    assert parents == {"a": ROOT_POOL, "z": "a", "b11": "z", "b": ROOT_POOL, "b2": "b"}
    assert tried.pool("b11").id == before.trees["t"].pools["b11"].id
    assert tried.pool("z").settings.weight == (3.0 if by_attributes else None)
    for name in ("a", "b", "b2"):
        assert tried.pool(name) is before.trees["t"].pools[name]
    tried.do(MovePool("t", "z", ROOT_POOL, "z"))
    assert tried.pool("z").parent == ROOT_POOL


# --- transfers


def pool_of(cpu: float, flow: float, burst: float, most: int, running: int) -> dict[str, Any]:
    return {
        "strong_guarantee_resources": {"cpu": cpu, "memory": 0},
        "integral_guarantees": {"resource_flow": {"cpu": flow}, "burst_guarantee_resources": {"cpu": burst}},
        "max_operation_count": most,
        "max_running_operation_count": running,
    }


def test_a_transfer_of_everything() -> None:
    pools = [CreatePool("t", name, attributes=pool_of(10, 20, 30, 50, 40)) for name in ("from", "to")]
    tried = Tried(CreateTree("t"), *pools)
    delta = {
        "strong_guarantee_resources": {"cpu": 4},
        "resource_flow": {"cpu": 8},
        "burst_guarantee_resources": {"cpu": 12},
        "max_running_operation_count": 16,
        "max_operation_count": 20,
    }
    outcome = tried.do(TransferPoolResources("t", "from", "to", delta))
    assert (outcome.id, outcome.warnings) == (tried.pool("from").id, ())
    assert tried.pool("from").settings == read_pool(pool_of(6, 12, 18, 30, 24))
    assert tried.pool("to").settings == read_pool(pool_of(14, 28, 42, 70, 56))


def guaranteed(tried: Tried) -> dict[str, float | None]:
    pools = tried.config.trees["t"].pools.values()
    return {pool.name: pool.settings.strong_guarantee_resources.get("cpu") for pool in pools}


FOREST = (
    CreateTree("t"),
    CreatePool("t", "top", attributes=strong(cpu=20)),
    CreatePool("t", "l", "top", attributes={"min_share_resources": {"cpu": 10}}),
    CreatePool("t", "l1", "l", attributes=strong(cpu=10)),
    CreatePool("t", "r", "top", attributes=strong(cpu=5)),
    CreatePool("t", "r1", "r", attributes=strong(cpu=5)),
    CreatePool("t", "other"),
    CreatePool("t", "o1", "other"),
)


@pytest.mark.parametrize(
    ("source", "destination", "changes"),
    [
        ("l1", "r1", {"l": 6, "l1": 6, "r": 9, "r1": 9}),
        ("l", "r", {"l": 6, "r": 9}),
        ("l1", "o1", {"top": 16, "l": 6, "l1": 6, "other": 4, "o1": 4}),
        ("l1", "l", {"l1": 6}),
        ("l1", "top", {"l": 6, "l1": 6}),
        ("top", "r1", {"r": 9, "r1": 9}),
        ("l", "l", {}),
    ],
)
def test_ancestors_take_part_in_a_transfer(source: str, destination: str, changes: dict[str, float]) -> None:
    tried = Tried(*FOREST)
    if source == "l":
        tried.do(ChangePool("t", "l1", (put("strong_guarantee_resources/cpu", 1),)))
    before = guaranteed(tried)
    old = tried.config.trees["t"].pools
    outcome = tried.do(TransferPoolResources("t", source, destination, {"min-share-resources": {"cpu": 4}}))
    assert outcome.changed == bool(changes)
    assert guaranteed(tried) == {**before, **changes}
    for name, pool in tried.config.trees["t"].pools.items():
        assert (pool is old[name]) == (name not in changes)
    assert tried.pool("l").spelled == {"strong_guarantee_resources": "min_share_resources"}


def test_all_can_be_transferred_and_a_zero_stays() -> None:
    tried = Tried(*FOREST)
    tried.do(TransferPoolResources("t", "l1", "r1", strong(cpu=10)))
    assert tried.pool("l1").attributes == strong(cpu=0.0)
    tried.do(TransferPoolResources("t", "r1", "l1", strong(cpu=0.1)))
    tried.do(TransferPoolResources("t", "l1", "r1", strong(cpu=0.1)))
    assert tried.pool("l1").attributes == strong(cpu=0.0)


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (strong(cpu=11), 'pool "l1": strong_guarantee_resources/cpu: has 10, 11 cannot be taken from it'),
        (strong(memory=1), 'pool "l1": strong_guarantee_resources/memory: has 0, 1 cannot be taken from it'),
        ({"resource_flow": {"cpu": 1}}, 'pool "l1": integral_guarantees/resource_flow/cpu: has 0, 1 cannot be taken'),
        ({"max_operation_count": 1}, 'pool "l1": max_operation_count: is not set, so there is nothing to transfer'),
        ({"max_operation_count": -1}, "resource_delta: max_operation_count: must be a whole number in [0, 2147483648]"),
        (strong(cpu=-1), "resource_delta: strong_guarantee_resources: "),
        (strong(cpus=1), 'resource_delta: strong_guarantee_resources/cpus: unknown key; did you mean "cpu"?'),
        ({"weight": 1}, "resource_delta: weight: cannot be transferred; known: strong_guarantee_resources, burst"),
        ({"resource_flaw": {}}, 'resource_delta: resource_flaw: cannot be transferred; did you mean "resource_flow"?'),
        ({"integral_guarantees": 3}, "resource_delta: integral_guarantees: must be a dictionary, got 3"),
        (
            {"integral-guarantees": {"resource-flow": {}}, "resource_flow": {}},
            "resource_delta: resource_flow: given twice",
        ),
        (123, "resource_delta: must be a dictionary, got 123"),
    ],
)
def test_transfers_that_are_none(delta: Any, message: str) -> None:
    shown = Tried(*FOREST).refuse(TransferPoolResources("t", "l1", "r1", delta))
    assert shown.startswith(message.removesuffix("strong_guarantee_resources: ")) or message in shown


def test_a_transfer_is_validated_as_a_whole() -> None:
    tried = Tried(*FOREST)
    tried.do(ChangePool("t", "other", (put("allow_children_guarantees", False),)))
    assert "does not allow children guarantees" in tried.refuse(TransferPoolResources("t", "l1", "o1", strong(cpu=1)))
    too_much = TransferPoolResources("t", "l", "r", strong(cpu=4))
    assert "together, more than its 6" in tried.refuse(too_much, GUARANTEES_OVERCOMMIT)


def test_counts_of_ancestors_change_where_they_are_set() -> None:
    tried = Tried(
        CreateTree("t"),
        CreatePool("t", "a", attributes={"max_operation_count": 9}),
        CreatePool("t", "a1", "a", attributes={"max_operation_count": 9}),
        CreatePool("t", "b"),
        CreatePool("t", "b1", "b", attributes={"max_operation_count": 1}),
    )
    tried.do(TransferPoolResources("t", "a1", "b1", {"max_operation_count": 3.0}))
    counts = {pool.name: pool.settings.max_operation_count for pool in tried.config.trees["t"].pools.values()}
    assert counts == {"a": 6, "a1": 6, "b": None, "b1": 4}


# --- what has changed


@pytest.mark.parametrize(("old", "new"), [(1, True), (1, 1.0), ({"a": [1]}, {"a": [True]}), (0, False), ("1", 1)])
def test_values_that_python_takes_for_equal_are_changes(old: Any, new: Any) -> None:
    tried = Tried(CreateTree("t", {"x": old}), CreatePool("t", "a", attributes={"x": old}))
    before = tried.config
    for command in (ChangePool("t", "a", (put("x", new),)), ChangeTree("t", (put("x", new),))):
        assert tried.do(command).changed
        assert not tried.do(command).changed
    assert len(compare_configs(before, tried.config)) == 2
    assert [kind for kind, _, _ in changed_records(before, tried.config)] == ["tree", "pool"]


# --- storage


def test_records() -> None:
    tried = Tried(CreateTree("t", {"job_interrupt_timeout": 1}), CreatePool("t", "a", attributes={"x": [1]}))
    tree = tried.config.trees["t"]
    assert encode_tree(tree) == {
        "id": "1-0-0-1", "name": "t", "attributes": {"job_preemption_timeout": 1.0},
        "spelled": {"job_preemption_timeout": "job_interrupt_timeout"},
    }  # fmt: skip
    pool = {"id": "2-0-0-1", "tree": "t", "name": "a", "parent": ROOT_POOL, "attributes": {"x": [1]}, "spelled": {}}
    assert encode_pool("t", tree.pools["a"]) == pool
    assert set(records_of(tried.config)) == {SYSTEM, ("tree", "1-0-0-1"), ("pool", "2-0-0-1")}


def test_only_what_has_changed_is_written() -> None:
    tried = Tried(*FAMILY, CreateTree("u", {"nodes_filter": "nobody"}))

    def written(*commands: ConfigCommand) -> list[Any]:
        before = tried.config
        for command in commands:
            tried.do(command)
        return changed_records(before, tried.config)

    assert written() == []
    changed = written(ChangePool("t", "a", (put("weight", 2),)))
    assert changed == [("pool", tried.pool("a").id, encode_pool("t", tried.pool("a")))]
    changed = written(ChangeTree("t", (put("max_operation_count", 2),)))
    assert changed == [("tree", tried.config.trees["t"].id, encode_tree(tried.config.trees["t"]))]
    assert written(SetDefaultTree("u")) == [(*SYSTEM, {"default_tree": "u"})]
    changed = written(RemoveTree("t", recursive=True))
    assert {kind for kind, _, _ in changed} == {"tree", "pool"}
    assert [record for _, _, record in changed] == [None] * 6


def test_stored_attributes_that_are_unknown_or_reserved_by_now_stay() -> None:
    record = {"id": "2", "tree": "t", "name": "a", "parent": ROOT_POOL, "attributes": {"count": 1, "later": {"x": 1}}}
    config = load_config({("tree", "1"): {"id": "1", "name": "t"}, ("pool", "2"): record})
    assert config.trees["t"].pools["a"].attributes == {"count": 1, "later": {"x": 1}}


TREE = {("tree", "1"): {"id": "1", "name": "t", "attributes": {}, "spelled": {}}}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({("tree", "1"): {"id": "1"}}, "stored tree 1: Object missing required field `name`"),
        (
            {("tree", "1"): {"id": "1", "name": "t", "attributes": {"nodes_filter": 3}}},
            "stored tree 1: nodes_filter: must",
        ),
        ({**TREE, ("tree", "2"): {"id": "2", "name": "t"}}, 'stored tree 2: there are two trees named "t"'),
        ({("pool", "2"): {"id": "2", "name": "a", "tree": "t", "parent": ROOT_POOL}}, 'its tree "t" is missing'),
        ({**TREE, ("pool", "2"): {"id": "2", "name": "a", "tree": "t", "parent": "b"}}, 'its parent "b" is missing'),
        ({**TREE, ("pool", "2"): {"id": "2", "name": "a", "tree": "t", "parent": "a"}}, "lead back to itself"),
        (
            {**TREE, ("pool", "2"): {"id": "2", "name": "a", "tree": "t"}},
            "stored pool 2: Object missing required field",
        ),
        (
            {**TREE, **{("pool", key): {"id": key, "name": "a", "tree": "t", "parent": ROOT_POOL} for key in "23"}},
            'stored pool 3: there are two pools named "a" in one tree',
        ),
        (
            {
                **TREE,
                ("pool", "2"): {"id": "2", "name": "a", "tree": "t", "parent": ROOT_POOL, "attributes": {"mode": 1}},
            },
            "stored pool 2: mode: must be one of",
        ),
        ({SYSTEM: {"default_tree": "t"}}, 'stored default_tree "t" is missing'),
    ],
)
def test_records_that_are_damaged(records: dict[RecordKey, dict[str, Any]], message: str) -> None:
    with pytest.raises(StateFileError) as caught:
        load_config(records)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("default", "given", "option", "expected"),
    [
        ({"acl_required": True}, {}, "acl_required", True),
        ({"config": {"acl-required": True}}, {"weight": 1}, "acl_required", True),
        ({"acl_required": True}, {"acl_required": False}, "acl_required", False),
        ({"acl_required": True}, {"config": {"acl_required": False}}, "acl_required", False),
        ({}, {}, "acl_required", False),
        ({}, {"acl_required": True}, "acl_required", True),
        ({}, {}, "default_memory_limit", 0),
        ({}, {"default_memory_limit": 5}, "default_memory_limit", 5),
        ({"default_memory_limit": 7}, {}, "default_memory_limit", 7),
        ({"default_memory_limit": 7}, {"default-memory-limit": 0}, "default_memory_limit", 0),
    ],
)
def test_2_4_12_4_a_further_tree_has_the_default_trees_lists(default, given, option, expected):
    tried = Tried(CreateTree("t", {"nodes_filter": "a", **default}), SetDefaultTree("t"))
    tried.do(CreateTree("u", {"nodes_filter": "b", **given}))
    made = tried.config.trees["u"]
    assert getattr(made.settings, option) == expected
    assert read_tree(made.attributes) == made.settings


def test_12_4_an_unknown_stored_option_does_not_stop_the_start():
    attributes = {"owner": {"team": "x"}, "weight": 2.0, "acl-required": "please", "note": 1}
    records: dict[RecordKey, Any] = {
        ("tree", "1"): {"id": "1", "name": "t", "attributes": {"owner": 7, "acl-required": "yes"}},
        ("pool", "2"): {"id": "2", "name": "p", "tree": "t", "parent": ROOT_POOL, "attributes": attributes},
    }
    tree = load_config(records).trees["t"]
    assert tree.attributes == {}
    assert tree.pools["p"].attributes == {"weight": 2.0, "acl-required": "please", "note": 1}
    assert tree.pools["p"].settings.owner == ""
    records["tree", "1"]["attributes"] = {"owner": "ann", "acl_required": True}
    settings = load_config(records).trees["t"].settings
    assert (settings.owner, settings.acl_required) == ("ann", True)
    records["tree", "1"]["attributes"] = {"acl": "everybody"}  # a list that is not understood must not open anything
    with pytest.raises(StateFileError, match="stored tree 1: acl: must be a list of entries"):
        load_config(records)
