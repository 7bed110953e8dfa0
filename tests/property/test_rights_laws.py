"""Laws of access lists, over made-up trees, lists and commands (semantics.md 12)."""

import contextlib
from collections.abc import Iterator
from random import Random
from typing import Any

from examples import examples
from hypothesis import event, given
from hypothesis import strategies as st
from scheduler_world import TREE, World

from cpumond.scheduler.access import Rights, read_access
from cpumond.scheduler.access.required import check, decide
from cpumond.scheduler.model import ROOT_POOL, CommandError, PoolConfig, TreeConfig
from cpumond.scheduler.rights.entries import PERMISSIONS, Permission
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.tree_file import ApplyTree, make_tables, make_target

many = examples(100)

PLACES = {"a": ROOT_POOL, "b": "a", "c": "b", "d": "a", "z": ROOT_POOL}
"""Pool -> its parent."""
POOLS = (ROOT_POOL, *PLACES)
USERS = (User("ann"), User("bob", groups=frozenset({"ml"})), User("cat", needs_entry=True))

NAMES = st.lists(st.sampled_from(["ann", "bob", "cat", "ml", "everyone", "owner"]), min_size=1, max_size=2)
WORDS: st.SearchStrategy[list[str]] = st.lists(st.sampled_from(list(PERMISSIONS)), min_size=1, max_size=3, unique=True)
MODES = st.sampled_from(["object_and_descendants"] * 3 + ["object_only", "descendants_only"])


def entries(action: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"action": action, "subjects": NAMES, "permissions": WORDS, "inheritance_mode": MODES})


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
    is_open = not has_list and not tree.settings.acl_required
    return is_open and permission != "administer" and not user.needs_entry


@examples(300)
@given(worlds())
def test_a_verdict_is_that_of_the_text(world):
    """All of 12.2 for pools: that a denial wins, what inherit_acl cuts and so on follow from the text."""
    found = table(world)
    for user in USERS:
        for pool in POOLS:
            for permission in PERMISSIONS:
                expected = by_the_text(world, user, pool, permission)
                assert found[user.name, pool, permission] == expected, (user.name, pool, permission)


# --- commands

FEW: st.SearchStrategy[list[str]] = st.lists(
    st.sampled_from(["modify_children", "write", "write", "administer"]), min_size=1, max_size=2, unique=True
)
"""What a list gives ann, who has no other rights."""


@st.composite
def teams(draw: st.DrawFn) -> World:
    """A closed tree in which ann may do something here and there."""
    world = World(acl_required=True)
    given = {name: draw(st.just([]) | st.just([]) | FEW) for name in POOLS}
    given["a"] = given["a"] or draw(FEW)
    for name, parent in PLACES.items():
        cpu = {"strong_guarantee_resources": {"cpu": {"a": 8, "b": 4, "c": 2, "d": 2, "z": 8}[name]}}
        world.create_pool(name, parent, **cpu)
    for name, permissions in given.items():
        acl = [{"action": "allow", "subjects": ["ann"], "permissions": permissions}]
        if permissions and name == ROOT_POOL:
            world.set_tree(acl=acl)
        elif permissions:
            world.set_pool(name, acl=acl)
    return world


VALUES: tuple[dict[str, Any], ...] = (
    {"acl": []},
    {"acl": None},
    {"inherit_acl": False},
    {"owner": "ann"},
    {"weight": 3},
    {"strong_guarantee_resources": {"cpu": 1}},
    {"strong_guarantee_resources": {"cpu": 3}},
    {"strong_guarantee_resources": {"cpu": 9}},
    {"mode": "fair_share"},
)


def put(values: dict[str, Any]) -> tuple[Edit, ...]:
    return tuple(Edit((name,), value) for name, value in values.items())


def every_command() -> list[commands.ConfigCommand]:
    made: list[commands.ConfigCommand] = [
        commands.ChangeTree(TREE, put(values)) for values in (*VALUES[:4], {"acl_required": False})
    ]
    for pool in PLACES:
        made += [commands.ChangePool(TREE, pool, put(values)) for values in VALUES]
        made += [commands.ChangePool(TREE, pool, put({"parent_name": parent})) for parent in POOLS]
        made += [commands.MovePool(TREE, pool, parent, name) for parent in POOLS for name in (pool, "n")]
        made += [commands.RemovePool(TREE, pool, is_recursive) for is_recursive in (False, True)]
        given = {"strong_guarantee_resources": {"cpu": 1}}
        made += [commands.TransferPoolResources(TREE, pool, other, given) for other in PLACES]
    for parent in POOLS:
        made += [commands.CreatePool(TREE, "n", parent, values) for values in ({}, *VALUES)]
    return made


COMMANDS = every_command()
FILES = 30


def allowed_changes(world: World, user: User) -> Iterator[tuple[commands.ConfigCommand, TreeConfig]]:
    """Each command that the user may carry out, and the tree after it; nothing is changed."""
    config = world.state.config
    for command in COMMANDS:
        try:
            check(world.state, command, user)
            outcome = commands.apply(config, command, new_id=lambda: "made", nodes={})
        except CommandError:
            continue
        event(type(command).__name__)
        yield command, outcome.config.trees[TREE]


def allowed_files(world: World, user: User, random: Random) -> Iterator[tuple[ApplyTree, TreeConfig]]:
    """Files that change several things at once, which the user may apply, and the tree after each."""
    for _ in range(FILES):
        config = world.state.config
        for command in random.sample(COMMANDS, random.choice([2, 2, 3])):
            with contextlib.suppress(CommandError):
                config = commands.apply(config, command, new_id=lambda: f"made-{random.random()}", nodes={}).config
        if TREE not in config.trees:
            continue
        file = ApplyTree(TREE, make_tables(config.trees[TREE]), prune=True)
        try:
            check(world.state, file, user)
            made = make_target(world.state.config, file, lambda: f"new-{random.random()}")
            outcome = commands.check(world.state.config, made, nodes={})
        except CommandError:
            continue
        if outcome.changed:
            event("a file")
            yield file, outcome.config.trees[TREE]


def known_above(old: TreeConfig, new: TreeConfig, name: str) -> str:
    """The pool that was there before, at ``name`` in the new tree or the nearest above it, by its name then."""
    names = {pool.id: pool.name for pool in old.pools.values()}
    while name != ROOT_POOL and new.pools[name].id not in names:
        name = new.pools[name].parent
    return name if name == ROOT_POOL else names[new.pools[name].id]


def lists_of(tree: TreeConfig) -> dict[str, tuple[str, list[Any]]]:
    """Id -> name, and what the object's own attributes say of rights."""
    named = ("acl", "inherit_acl", "owner", "acl_required")
    items: list[tuple[str, TreeConfig | PoolConfig]] = [(ROOT_POOL, tree), *tree.pools.items()]
    return {item.id: (name, [getattr(item.settings, each, None) for each in named]) for name, item in items}


class Held:
    """What ann may do in a tree before a command, and what is said of rights there."""

    def __init__(self, world: World) -> None:
        rights, self.tree = Rights(world.state, USERS[0]), world.state.config.trees[TREE]
        self.administered = {name for name in POOLS if rights.on_pool(TREE, name, "administer").allowed}
        self.may_write = {name for name in POOLS if rights.on_pool(TREE, name, "write").allowed}
        self.lists = lists_of(self.tree)
        self.pools = {pool.id: pool for pool in self.tree.pools.values()}
        self.counting = {pool.id: counting(self.tree, name) for name, pool in self.tree.pools.items()}


@many
@given(teams(), st.randoms(use_true_random=False))
def test_nobody_changes_lists_nor_gives_out_what_it_may_not(world, random):
    held = Held(world)
    for command, new in (*allowed_changes(world, USERS[0]), *allowed_files(world, USERS[0], random)):
        check_lists(held, new, command)
        check_guarantees(held, new, command)


def check_lists(held: Held, new: TreeConfig, command: commands.ConfigCommand | ApplyTree) -> None:
    """Whoever changed a list, or what counts for a pool, administers it."""
    before, after, administered = held.lists, lists_of(new), held.administered
    changed = {before[key][0] for key in before if key in after and before[key][1] != after[key][1]}
    assert changed <= administered, command
    gone = {name for key, (name, own) in before.items() if key not in after and own[0] is not None}
    assert gone <= administered, command
    made = [pool for key, (pool, own) in after.items() if key not in before and own[:3] != [None, True, ""]]
    assert all(known_above(held.tree, new, new.pools[name].parent) in administered for name in made), command
    # Nor what counts for it, unless it is inherited from one that the user does administer.
    for name, pool in new.pools.items():
        was = held.pools.get(pool.id)
        if was is not None and counting(new, name) != held.counting[pool.id]:
            assert administered & {was.name, *above(held.tree, was.name)}, command


def check_guarantees(held: Held, new: TreeConfig, command: commands.ConfigCommand | ApplyTree) -> None:
    """Whoever gave a pool more of what its parent has may write that parent."""
    for pool in new.pools.values():
        was = held.pools.get(pool.id)
        had = (0.0, 1.0) if was is None else given_to(was)
        if any(now > then for now, then in zip(given_to(pool), had, strict=True)):
            above_it = known_above(held.tree, new, pool.parent) if was is None else was.parent
            assert above_it in held.may_write, command
        elif was is not None and parent_id(new, pool) != parent_id(held.tree, was):
            # where its guarantee comes from now
            assert known_above(held.tree, new, pool.parent) in held.may_write, command


def above(tree: TreeConfig, name: str) -> list[str]:
    return [] if name == ROOT_POOL else [tree.pools[name].parent, *above(tree, tree.pools[name].parent)]


def counting(tree: TreeConfig, pool: str) -> Any:
    access = read_access(tree, pool)
    return [each.entry for each in access.entries], access.is_open, access.owner


def parent_id(tree: TreeConfig, pool: PoolConfig) -> str:
    return tree.id if pool.parent == ROOT_POOL else tree.pools[pool.parent].id


def given_to(pool: PoolConfig) -> tuple[float, float]:
    settings = pool.settings
    return settings.strong_guarantee_resources.get("cpu", 0.0), 1.0 if settings.weight is None else settings.weight


@many
@given(teams())
def test_a_file_with_one_change_needs_the_rights_of_that_change(world):
    for command in COMMANDS:
        if isinstance(command, commands.TransferPoolResources):
            continue  # as single changes these are others: they need no right to the pools themselves
        if isinstance(command, commands.CreatePool) and None in command.attributes.values():
            continue  # a file cannot say what is not there
        try:
            outcome = commands.apply(world.state.config, command, new_id=lambda: "made", nodes={})
        except CommandError:
            continue
        if outcome.changed:
            file = ApplyTree(TREE, make_tables(outcome.config.trees[TREE]), prune=True)
            verdicts = [all(each.allowed for each in decide(world.state, one, USERS[0])) for one in (command, file)]
            assert verdicts[0] == verdicts[1], command
