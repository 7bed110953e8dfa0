"""Laws of changes of trees and pools, over random sequences of commands (semantics.md 2)."""

import itertools
from types import MappingProxyType
from typing import Any

import msgspec
from examples import examples
from hypothesis import event, given
from hypothesis import strategies as st
from scheduler_builders import records_of

from cpumond.scheduler.model import ROOT_POOL, CommandError, Config, PoolConfig
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings.attributes import Edit, edit, normalise, read_attribute, read_pool, read_tree
from cpumond.scheduler.settings.changes import compare_configs
from cpumond.scheduler.settings.records import RecordKey, changed_records, load_config
from cpumond.scheduler.settings.validation import validate_tree

many = examples(150)

NODES = {"n1": ["x"], "n2": ["x", "y"], "n3": []}

TREES = st.sampled_from([*"ttttttttt", "u"])
NAMES = st.sampled_from(list("abcdef"))
PARENTS = st.sampled_from([ROOT_POOL, ROOT_POOL, *"abcdef"])
AMOUNTS = st.dictionaries(st.sampled_from(["cpu", "cpu", "memory"]), st.sampled_from([0, 0.1, 1, 2, 5.0]), max_size=2)
GUARANTEES = st.fixed_dictionaries(
    {},
    optional={
        "guarantee_type": st.sampled_from(["none", "none", "burst", "relaxed"]),
        "resource-flow": AMOUNTS,
        "burst_guarantee_resources": AMOUNTS,
    },
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab-é"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab-", min_size=1), inner, max_size=3),
    max_leaves=6,
)
POOL_ATTRIBUTES: dict[str, st.SearchStrategy[Any]] = {
    "weight": st.sampled_from([0, 1, 2.5, 3, 4, -1]),
    "mode": st.sampled_from(["fair-share", "fair_share", "fair-share", "fifo"]),
    "strong_guarantee_resources": AMOUNTS,
    "min_share_resources": AMOUNTS,
    "integral-guarantees": GUARANTEES,
    "max_operation_count": st.integers(0, 5),
    "max_running_operation_count": st.integers(0, 5),
    "fair_share_starvation_timeout": st.sampled_from([0, 10]),
    "fair-share_preemption_timeout": st.sampled_from([0, 10]),
    "create_ephemeral_subpools": st.booleans(),
    "allow_children_guarantees": st.sampled_from([True, True, False]),
    "my-label": PLAIN,
}
TREE_ATTRIBUTES: dict[str, st.SearchStrategy[Any]] = {
    "nodes_filter": st.sampled_from(["", "x", "y", "!x", "n1", "x &"]),
    "main_resource": st.sampled_from(["cpu", "memory"]),
    "job_interrupt_timeout": st.sampled_from([1, 2]),
    "default_parent_pool": NAMES,
    "max_operation_count": st.sampled_from([0, 1, 10]),
    "note": PLAIN,
}
NESTED = (
    (("strong_guarantee_resources", "cpu"), st.sampled_from([0, 1, 5])),
    (("min-share-resources", "memory"), st.sampled_from([0, 1])),
    (("integral_guarantees", "resource_flow"), AMOUNTS),
    (("integral_guarantees", "burst_guarantee_resources", "cpu"), st.sampled_from([0, 1, 5])),
    (("my-label", "a", "b"), PLAIN),
)


def attributes(options: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(st.sampled_from(sorted(options)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: options[name] for name in names})
    )


@st.composite
def pool_edits(draw: st.DrawFn, moves: bool = True) -> tuple[Edit, ...]:
    edits = [Edit((name,), value) for name, value in draw(attributes(POOL_ATTRIBUTES)).items()]
    for path, values in draw(st.lists(st.sampled_from(NESTED), max_size=2)):
        edits.append(Edit(path, draw(st.none() | values)))
    removed = draw(st.lists(st.sampled_from(sorted(POOL_ATTRIBUTES)), max_size=2))
    edits[draw(st.integers(0, 2)) : 0] = [Edit((name,)) for name in removed]
    for name, values in (("name", NAMES), ("parent_name", PARENTS)):
        if moves and draw(st.integers(0, 5)) == 5:
            edits.append(Edit((name,), draw(values)))
    return tuple(edits)


@st.composite
def tree_edits(draw: st.DrawFn) -> tuple[Edit, ...]:
    prefix: tuple[str, ...] = draw(st.sampled_from([(), ("config",)]))
    edits = [Edit((*prefix, name), value) for name, value in draw(attributes(TREE_ATTRIBUTES)).items()]
    return (*edits, *draw(st.lists(st.sampled_from([Edit(("config",)), Edit(("nodes_filter",))]), max_size=1)))


CREATIONS = st.builds(commands.CreatePool, TREES, NAMES, PARENTS, attributes(POOL_ATTRIBUTES), st.booleans())
MOVES = NAMES.flatmap(lambda name: st.builds(commands.MovePool, TREES, st.just(name), PARENTS, st.just(name) | NAMES))
GUARANTEED = {"strong_guarantee_resources": AMOUNTS}
SOME = {**GUARANTEED, "resource_flow": AMOUNTS, "max_operation_count": st.integers(-1, 2)}
DELTAS = st.fixed_dictionaries({}, optional=SOME) | st.fixed_dictionaries(GUARANTEED)
TRANSFERS = st.builds(commands.TransferPoolResources, TREES, NAMES, NAMES, DELTAS)
CHANGES = st.builds(commands.ChangePool, TREES, NAMES, pool_edits())
COMMANDS: st.SearchStrategy[commands.ConfigCommand] = st.one_of(
    *(CREATIONS, CHANGES, CHANGES, MOVES, MOVES, TRANSFERS, TRANSFERS),
    st.builds(commands.RemovePool, TREES, NAMES, st.booleans()),
    st.builds(commands.CreateTree, TREES, attributes(TREE_ATTRIBUTES), st.booleans()),
    st.builds(commands.ChangeTree, TREES, tree_edits()),
    st.builds(commands.RemoveTree, TREES, st.sampled_from([False, False, False, True])),
    st.builds(commands.SetDefaultTree, TREES),
)
START = (
    commands.CreateTree("t", {"nodes_filter": "x"}),
    commands.CreatePool("t", "a", ROOT_POOL, {"strong_guarantee_resources": {"cpu": 10, "memory": 10}}),
    commands.CreatePool("t", "b", "a", {"min_share_resources": {"cpu": 5}, "max_operation_count": 3}),
    commands.CreatePool("t", "c", "a", {"integral_guarantees": {}}),
    commands.CreatePool("t", "d", ROOT_POOL, {"strong_guarantee_resources": {"cpu": 4}}),
    commands.CreatePool("t", "f", "d", {"min_share_resources": {"cpu": 2}}),
)


def stored(config: Config) -> dict[RecordKey, Any]:
    """The records as they come back from a store."""
    written = {key: msgspec.json.encode(record) for key, record in records_of(config).items()}
    return {key: msgspec.json.decode(record) for key, record in written.items()}


def raw(config: Config) -> bytes:
    """The records as text, which tells 1 from 1.0 and from true."""
    records = {f"{kind} {key}": record for (kind, key), record in records_of(config).items()}
    return msgspec.json.encode(records, order="deterministic")


def pools_of(config: Config) -> dict[str, PoolConfig]:
    return {pool.id: pool for tree in config.trees.values() for pool in tree.pools.values()}


def promised(config: Config, tree: str) -> float:
    """The strong guarantees of cpu of the root's children."""
    pools = config.trees[tree].pools.values()
    return sum(pool.settings.strong_guarantee_resources.get("cpu", 0.0) for pool in pools if pool.parent == ROOT_POOL)


def is_above(config: Config, tree: str, one: str, other: str) -> bool:
    """Whether pool ``one`` is ``other`` or an ancestor of it."""
    while other in config.trees[tree].pools:
        if one == other:
            return True
        other = config.trees[tree].pools[other].parent
    return False


@examples(80)
@given(st.lists(COMMANDS, min_size=10, max_size=25), st.randoms(use_true_random=False))
def test_sequences_of_commands(sequence: list[commands.ConfigCommand], random: Any) -> None:
    ids = (f"{number:x}-0-0-1" for number in itertools.count(1))
    config = Config(MappingProxyType({}))
    records: dict[RecordKey, Any] = stored(config)
    for number, change in enumerate((*START, *sequence)):
        before, sentence = stored(config), ""
        try:
            outcome = commands.apply(config, change, new_id=lambda: next(ids), nodes=NODES)
        except CommandError as error:
            sentence = str(error)
        if sentence:
            assert number >= len(START)
            assert "\n" not in sentence
            assert stored(config) == before
            continue
        new = outcome.config
        event(f"accepted {type(change).__name__}")
        assert stored(config) == before
        assert outcome.changed == (new is not config) == (raw(new) != raw(config))
        assert outcome.changed or compare_configs(config, new) == []

        for tree in new.trees.values():
            validate_tree(tree)
            assert tree.settings == read_tree(tree.attributes)
            for pool in tree.pools.values():
                assert pool.settings == read_pool(pool.attributes)
        commands.check_nodes(new, NODES)
        assert new.default_tree in ("", *new.trees)

        for kind, key, record in changed_records(config, new):
            if record is None:
                del records[kind, key]
            else:
                records[kind, key] = msgspec.json.decode(msgspec.json.encode(record))
        assert records == stored(new)
        shuffled = list(records)
        random.shuffle(shuffled)
        loaded = load_config({key: records[key] for key in shuffled})
        assert loaded == new
        assert list(loaded.trees) == list(new.trees)
        assert all(list(loaded.trees[name].pools) == list(new.trees[name].pools) for name in new.trees)

        old_pools, new_pools = pools_of(config), pools_of(new)
        if not isinstance(change, (commands.CreatePool, commands.RemovePool, commands.CreateTree, commands.RemoveTree)):
            assert set(old_pools) == set(new_pools)
        if isinstance(change, (commands.RemovePool, commands.CreatePool, commands.ChangeTree, commands.SetDefaultTree)):
            assert all(old_pools[key] is new_pools[key] for key in old_pools.keys() & new_pools.keys())
        if isinstance(change, commands.TransferPoolResources):
            name, source, destination = change.tree, change.source, change.destination
            if not is_above(new, name, source, destination) and not is_above(new, name, destination, source):
                assert abs(promised(new, name) - promised(config, name)) < 1e-9
        config = new


@many
@given(attributes(POOL_ATTRIBUTES), pool_edits(moves=False))
def test_edits_of_attributes(start: dict[str, Any], edits: tuple[Edit, ...]) -> None:
    try:
        before, spelled, _ = normalise("pool", start)
        after, spelled_after, _ = edit("pool", before, spelled, edits)
    except CommandError:
        return
    # Canonical attributes are read as they are, and an edit of nothing changes nothing.
    assert normalise("pool", after)[0] == after
    assert edit("pool", after, spelled_after, ())[:2] == (after, spelled_after)
    assert msgspec.json.decode(msgspec.json.encode(after)) == after
    assert normalise("pool", start)[0] == before
    assert set(spelled_after) <= set(after)
    pool = PoolConfig("1", "p", ROOT_POOL, after, read_pool(after), spelled_after)
    for name, value in after.items():
        assert read_attribute("pool", pool, (name,)) == value
        assert read_attribute("pool", pool, (spelled_after.get(name, name),)) == value
    # Each edit by itself, one after the other, is the same; only two spellings at once may be told apart.
    one_by_one, spelled_now = before, spelled
    for change in edits:
        one_by_one, spelled_now, _ = edit("pool", one_by_one, spelled_now, [change])
    assert (one_by_one, spelled_now) == (after, spelled_after)
