"""Laws of access lists, over made-up trees, lists and commands (semantics.md 12)."""

from __future__ import annotations

from typing import Any

from examples import examples
from hypothesis import assume, event, given
from hypothesis import strategies as st
from scheduler_world import TREE, World

from cpumond.scheduler.access import Rights, read_access
from cpumond.scheduler.model import ROOT_POOL, CommandError, Config, PoolConfig
from cpumond.scheduler.required import check
from cpumond.scheduler.rights import PERMISSIONS, Permission
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.commands import (
    ChangePool,
    ChangeTree,
    ConfigCommand,
    CreatePool,
    MovePool,
    RemovePool,
    TransferPoolResources,
)
from cpumond.scheduler.users import User

many = examples(150)

PLACES = {"a": ROOT_POOL, "b": "a", "c": "b", "d": "a", "z": ROOT_POOL}
"""Pool -> its parent."""
POOLS = (ROOT_POOL, *PLACES)
USERS = (User("ann"), User("bob", groups=frozenset({"ml"})), User("cat", needs_entry=True))

SUBJECTS = st.lists(st.sampled_from(["ann", "bob", "cat", "ml", "everyone", "owner"]), min_size=1, max_size=2)
WORDS: st.SearchStrategy[list[str]] = st.lists(st.sampled_from(list(PERMISSIONS)), min_size=1, max_size=3, unique=True)
MODES = st.sampled_from(["object_and_descendants"] * 3 + ["object_only", "descendants_only"])


def entries(action: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"action": action, "subjects": SUBJECTS, "permissions": WORDS, "inheritance_mode": MODES}
    )


ENTRIES = entries(st.sampled_from(["allow", "allow", "deny"]))
ACCESS = st.fixed_dictionaries(
    {},
    optional={
        "acl": st.lists(ENTRIES, max_size=3),
        "inherit_acl": st.sampled_from([True, True, False]),
        "owner": st.sampled_from(["ann", "bob"]),
    },
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A tree with lists here and there."""
    world = World(acl_required=draw(st.booleans()), **draw(ACCESS))
    for name, parent in PLACES.items():
        cpu = {"strong_guarantee_resources": {"cpu": {"a": 8, "b": 4, "c": 2, "d": 2, "z": 8}[name]}}
        world.create_pool(name, parent, **cpu, **draw(st.just({}) | ACCESS))
    return world


def table(world: World) -> dict[tuple[str, str, Permission], bool]:
    """User, pool and permission -> whether it is allowed."""
    rights = {user.name: Rights(world.state, user) for user in USERS}
    return {
        (name, pool, permission): rights[name].on_pool(TREE, pool, permission).allowed
        for name in rights
        for pool in POOLS
        for permission in PERMISSIONS
    }


def way_up(pool: str) -> list[str]:
    return [pool] if pool == ROOT_POOL else [pool, *way_up(PLACES[pool])]


def by_the_text(world: World, user: User, pool: str, permission: Permission) -> bool:
    """12.2, step by step."""
    tree = world.state.config.trees[TREE]
    above = [tree.settings if name == ROOT_POOL else tree.pools[name].settings for name in way_up(pool)]
    owner = next((settings.owner for settings in above if settings.owner), "")
    names = {user.name, *user.groups, "everyone", *(["owner"] if owner == user.name else [])}
    given, has_list = {"allow": set[str](), "deny": set[str]()}, False
    for depth, settings in enumerate(above):
        has_list = has_list or settings.acl is not None or not settings.inherit_acl
        for entry in settings.acl or ():
            if entry.inheritance_mode != ("object_only" if depth else "descendants_only") and names & {*entry.subjects}:
                given[entry.action] |= {*entry.permissions}
        if not settings.inherit_acl:
            break
    if permission in given["deny"] or ("read" in given["deny"] and permission in ("manage", "read_secrets")):
        return False
    if {permission, "administer"} & given["allow"] or permission == "read":
        return True
    return not has_list and not tree.settings.acl_required and not user.needs_entry


@many
@given(worlds())
def test_a_verdict_is_that_of_the_text(world):
    found = table(world)
    for user in USERS:
        for pool in POOLS:
            for permission in PERMISSIONS:
                expected = by_the_text(world, user, pool, permission)
                assert found[user.name, pool, permission] == expected, (user.name, pool, permission)


@many
@given(worlds(), st.sampled_from(POOLS), entries(st.just("deny")))
def test_a_denial_wins_and_gives_nothing(world, pool, denial):
    before = table(world)
    acl = list(access_list(world, pool))
    assume(world.state.config.trees[TREE].settings.acl_required)
    set_list(world, pool, [*acl, denial])
    after = table(world)
    assert not any(after[key] and not before[key] for key in after)
    if denial["inheritance_mode"] != "descendants_only":
        for user in USERS:
            if {user.name, *user.groups, "everyone"} & {*denial["subjects"]}:
                assert not any(after[user.name, pool, permission] for permission in denial["permissions"])


def access_list(world: World, pool: str) -> Any:
    tree = world.state.config.trees[TREE]
    return (tree if pool == ROOT_POOL else tree.pools[pool]).attributes.get("acl", ())


def set_list(world: World, pool: str, acl: list[dict[str, Any]]) -> None:
    if pool == ROOT_POOL:
        world.set_tree(acl=acl)
    else:
        world.set_pool(pool, acl=acl)


@many
@given(worlds(), st.sampled_from(POOLS), entries(st.just("allow")))
def test_an_entry_that_allows_takes_nothing_away_where_there_is_a_list(world, pool, entry):
    assume(world.state.config.trees[TREE].settings.acl_required or access_list(world, pool))
    before = table(world)
    set_list(world, pool, [*access_list(world, pool), entry])
    after = table(world)
    assert not any(before[key] and not after[key] for key in after)


@many
@given(worlds())
def test_administer_implies_all_that_no_entry_denies(world):
    found = table(world)
    for user in USERS:
        for pool in POOLS:
            access = read_access(world.state.config.trees[TREE], pool)
            if found[user.name, pool, "administer"] and not any(e.entry.action == "deny" for e in access.entries):
                assert all(found[user.name, pool, permission] for permission in PERMISSIONS)


@many
@given(worlds())
def test_who_needs_an_entry_has_what_entries_allow_and_can_read(world):
    cat = USERS[2]
    for pool in POOLS:
        for permission in PERMISSIONS:
            verdict = Rights(world.state, cat).on_pool(TREE, pool, permission)
            if verdict.allowed and permission != "read":
                assert verdict.because.startswith("the access list of ")


@many
@given(worlds(), st.sampled_from("bc"), st.lists(ENTRIES, max_size=2))
def test_inherit_acl_false_cuts(world, pool, acl):
    """Whatever the list above becomes."""
    world.set_pool(pool, inherit_acl=False, owner="ann")
    before = {key: value for key, value in table(world).items() if key[1] == pool}
    set_list(world, PLACES[pool], acl)
    set_list(world, ROOT_POOL, acl)
    assert {key: value for key, value in table(world).items() if key[1] == pool} == before


# --- commands


def edits(names: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[tuple[Edit, ...]]:
    return names.map(lambda given: tuple(Edit((name,), value) for name, value in given.items()))


ANY = st.sampled_from([*"abcdz"])
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "acl": st.none() | st.lists(ENTRIES, max_size=2),
        "inherit_acl": st.none() | st.booleans(),
        "owner": st.sampled_from(["ann", "bob", "cat"]),
        "weight": st.sampled_from([None, 1, 3]),
        "strong_guarantee_resources": st.sampled_from([None, {"cpu": 1}, {"cpu": 3}, {"cpu": 9}]),
        "max_operation_count": st.sampled_from([None, 3, 20]),
        "mode": st.just("fair_share"),
    },
)
COMMANDS: st.SearchStrategy[ConfigCommand] = st.one_of(
    st.builds(ChangePool, st.just(TREE), ANY, edits(VALUES)),
    st.builds(ChangePool, st.just(TREE), ANY, edits(st.fixed_dictionaries({"parent_name": st.sampled_from(POOLS)}))),
    st.builds(ChangeTree, st.just(TREE), edits(ACCESS)),
    st.builds(CreatePool, st.just(TREE), st.sampled_from("nm"), st.sampled_from(POOLS), VALUES),
    st.builds(MovePool, st.just(TREE), ANY, st.sampled_from(POOLS), st.sampled_from("abn")),
    st.builds(RemovePool, st.just(TREE), ANY, st.booleans()),
    st.builds(TransferPoolResources, st.just(TREE), ANY, ANY, st.just({"strong_guarantee_resources": {"cpu": 1}})),
)


def carry_out(world: World, command: ConfigCommand, user: User) -> bool:
    """Whether the user may, and it is no mistake."""
    try:
        check(world.state, command, user)
        world.do(command, user.name)
    except CommandError:
        return False
    return True


def lists_of(config: Config) -> dict[str, Any]:
    """Id -> name, and what the object's own attributes say of rights."""
    tree = config.trees[TREE]
    named = ("acl", "inherit_acl", "owner", "acl_required")
    return {
        item.id: (name, [getattr(item.settings, each, None) for each in named])
        for name, item in ((ROOT_POOL, tree), *tree.pools.items())
    }


@many
@given(worlds(), st.lists(st.tuples(COMMANDS, st.sampled_from(USERS)), min_size=1, max_size=4))
def test_nobody_changes_a_list_that_it_does_not_administer(world, steps):
    for command, user in steps:
        may = Rights(world.state, user)
        before, old = lists_of(world.state.config), world.state.config.trees[TREE]
        counted = {pool.id: counting(old, name) for name, pool in old.pools.items()}
        administered = {name for name in (ROOT_POOL, *old.pools) if may.on_pool(TREE, name, "administer").allowed}
        if not carry_out(world, command, user):
            continue
        event(type(command).__name__)
        after, new = lists_of(world.state.config), world.state.config.trees[TREE]
        changed = {before[key][0] for key in before if key in after and before[key][1] != after[key][1]}
        assert changed <= administered
        gone = {name for key, (name, rights) in before.items() if key not in after and rights[0] is not None}
        assert gone <= administered
        made = [pool for key, (pool, rights) in after.items() if key not in before and rights[:3] != [None, True, ""]]
        assert all(new.pools[name].parent in administered for name in made)
        # Nor what counts for it, unless it is inherited from one that the user does administer.
        for name, pool in new.pools.items():
            if pool.id in counted and counting(new, name) != counted[pool.id]:
                was = next(each for each in old.pools.values() if each.id == pool.id)
                assert administered & {was.name, *above(old, was.name)}


def above(tree: Any, name: str) -> list[str]:
    return [] if name == ROOT_POOL else [tree.pools[name].parent, *above(tree, tree.pools[name].parent)]


def counting(tree: Any, pool: str) -> Any:
    access = read_access(tree, pool)
    return [each.entry for each in access.entries], access.is_open, access.owner


@many
@given(worlds(), st.lists(st.tuples(COMMANDS, st.sampled_from(USERS)), min_size=1, max_size=4))
def test_nobody_gives_a_pool_more_of_what_its_own_parent_has(world, steps):
    for command, user in steps:
        may, old = Rights(world.state, user), world.state.config.trees[TREE]
        may_write = {name for name in (ROOT_POOL, *old.pools) if may.on_pool(TREE, name, "write").allowed}
        before = {pool.id: pool for pool in old.pools.values()}
        if not carry_out(world, command, user):
            continue
        for pool in world.state.config.trees[TREE].pools.values():
            was = before.get(pool.id)
            cores, weight = given_to(pool)
            had = (0.0, 1.0) if was is None else given_to(was)
            if cores > had[0] or weight > had[1]:
                event("given more")
                parent = pool.parent if was is None else was.parent
                assert parent in may_write


def given_to(pool: PoolConfig) -> tuple[float, float]:
    """Its guarantee and its weight."""
    settings = pool.settings
    return settings.strong_guarantee_resources.get("cpu", 0.0), 1.0 if settings.weight is None else settings.weight


@many
@given(st.integers(0, 12), st.booleans())
def test_the_own_guarantee_may_be_lowered_and_not_raised(cores, on_parent):
    world = World(acl_required=True)
    world.create_pool("a", strong_guarantee_resources={"cpu": 20})
    world.create_pool("b", "a", strong_guarantee_resources={"cpu": 6})
    world.set_pool("a" if on_parent else "b", acl=[{"action": "allow", "subjects": ["ann"], "permissions": ["write"]}])
    command = ChangePool(TREE, "b", (Edit(("strong_guarantee_resources", "cpu"), cores),))
    assert carry_out(world, command, USERS[0]) == (on_parent or cores <= 6)
