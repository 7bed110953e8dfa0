"""A tree with its pools as one value, as in a file. It is made of a configuration or applied to one (2.12).

A table replaces all options of its tree or pool: an option that the table omits is then not set. A table of a pool
is matched by ``id`` if a pool of the tree has that id, else by name."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec

from cpumond.core.words import count, escape, quoted
from cpumond.scheduler.model import (
    ALREADY_EXISTS,
    RESOLVE,
    ROOT_POOL,
    CommandError,
    Config,
    PoolConfig,
    PoolSettings,
    TreeConfig,
    TreeSettings,
    Why,
)
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings.attributes import CONFIG, Kind, is_option, is_same, normalise, read_pool, read_tree
from cpumond.scheduler.settings.changes import ConfigChange, compare_configs
from cpumond.scheduler.settings.commands import Outcome, with_pools
from cpumond.scheduler.settings.values import FIELD, quote_near, refuse

NO_TREE: Final = "none"
"""Revision that stands for a tree that does not exist."""
SHOWN_NAMES: Final = 10


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of a tree or pool: ``options`` by name, and other ``attributes``, which are no options."""

    options: dict[str, Any] = {}
    attributes: dict[str, Any] = {}


class PoolTable(Table, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Table of a pool. ``id``: "" if the pool is matched by its name."""

    name: str
    parent: str = ROOT_POOL
    id: str = ""


class TreeTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tree as in a file. ``own``: the tree's options. If ``own`` or ``pools`` is null, that part stays unchanged."""

    own: Table | None = None
    pools: tuple[PoolTable, ...] | None = None


class ApplyTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Make a tree match ``tables``; a missing tree is created.

    ``prune``: whether pools that the tables do not name are removed. ``base``: revision that the tree must still have;
    "" if it may have any."""

    tree: str
    tables: TreeTables
    prune: bool = False
    base: Annotated[str, msgspec.Meta(max_length=100)] = ""
    why: Why = ""


# --- from a configuration


def make_tables(tree: TreeConfig, *, with_ids: bool = True) -> TreeTables:
    """Return the tables of a tree, with its pools depth first."""
    pools = tuple(
        PoolTable(name=pool.name, parent=pool.parent, id=pool.id if with_ids else "", **_split("pool", pool.attributes))
        for pool in tree.pools.values()
    )
    return TreeTables(Table(**_split("tree", tree.attributes)), pools)


def _split(kind: Kind, attributes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"options": {}, "attributes": {}}
    for name in sorted(attributes):
        found["options" if _is_option(kind, name) else "attributes"][name] = attributes[name]
    return found


def _is_option(kind: Kind, name: str) -> bool:
    return is_option(kind, name) or (kind == "tree" and name == CONFIG)


def revision_of(tree: TreeConfig | None) -> str:
    """Return the revision of a tree. It differs between trees, and whenever options or pools of a tree change."""
    if tree is None:
        return NO_TREE
    pools = [[pool.id, pool.name, pool.parent, pool.attributes] for pool in tree.pools.values()]
    content = msgspec.json.encode([tree.id, tree.name, dict(tree.attributes), pools], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:16]


# --- to a configuration


def make_target(config: Config, command: ApplyTree, new_id: Callable[[], str]) -> Outcome:
    """Return the configuration that a command requests. The rules for it are not checked yet. Raises CommandError."""
    present = config.trees.get(command.tree)
    if command.base and command.base != revision_of(present):
        raise CommandError(
            f"pool tree {quoted(command.tree)}: was changed since the plan was made, nothing is applied; plan again"
        )
    warnings: list[str] = []
    tree = present
    if tree is None:
        tree = _new_tree(config, command, new_id)
    elif command.tables.own is not None:
        tree = _with_options(tree, command.tables.own, warnings)
    if command.tables.pools is not None:
        tree = _with_pool_tables(tree, command.tables.pools, command.prune, new_id, warnings)
    if tree is present:
        return Outcome(config, tree.id, tuple(warnings))
    trees = dict(sorted({**config.trees, tree.name: tree}.items()))
    return Outcome(replace(config, trees=MappingProxyType(trees)), tree.id, tuple(warnings), changed=True)


def list_changes(present: TreeTables | None, command: ApplyTree) -> tuple[list[ConfigChange], list[str]]:
    """Return the changes that a command makes in the tree ``present`` (None: no such tree), and warnings. Raises
    CommandError. Only rules that need nothing but these arguments are checked."""
    config = Config(MappingProxyType({}))
    if present is not None:
        own, pools = _join(present.own or Table()), {}
        for pool in present.pools or ():
            attributes = _join(pool)
            pools[pool.name] = PoolConfig(pool.id, pool.name, pool.parent, attributes, read_pool(attributes))
        tree = TreeConfig("", command.tree, own, read_tree(own), pools=MappingProxyType(pools))
        config = Config(MappingProxyType({tree.name: tree}))
    numbers = itertools.count(1)
    outcome = commands.check(config, make_target(config, command, lambda: f"planned-{next(numbers)}"), nodes={})
    return compare_configs(config, outcome.config), list(outcome.warnings)


def _join(table: Table) -> dict[str, Any]:
    return {**table.options, **table.attributes}


def _new_tree(config: Config, command: ApplyTree, new_id: Callable[[], str]) -> TreeConfig:
    own = command.tables.own
    if own is None:
        known = ", ".join(map(quoted, config.trees))
        text = f"Pool tree {quoted(command.tree)} does not exist; to make it, give its options. Known trees: {known}"
        raise CommandError(text, RESOLVE)
    tree = _with_options(TreeConfig(new_id(), command.tree), own, [])
    default = config.trees.get(config.default_tree)
    if default is not None and default.settings.acl_required and "acl_required" not in tree.attributes:
        raise refuse(
            "acl_required",
            f"pool tree {quoted(command.tree)} would be open to all users, unlike the default tree; set it "
            "to true or false in its options",
        )
    return tree


def _with_options(tree: TreeConfig, own: Table, warnings: list[str]) -> TreeConfig:
    where = f"pool tree {quoted(tree.name)}"
    attributes, spelled, told = read_table("tree", own, where)
    if _is_said("tree", tree.attributes, attributes):
        return tree
    warnings += told
    with commands.at(where):
        return replace(tree, attributes=attributes, settings=read_tree(attributes), spelled=spelled)


def _is_said(kind: Kind, present: Mapping[str, Any], attributes: Mapping[str, Any]) -> bool:
    """Return whether ``present`` equals the attributes of a table. An amount may be 2.0 in one and 2 in the other."""
    if is_same(present, attributes):
        return True
    try:
        return is_same(normalise(kind, present)[0], attributes)
    except CommandError:
        return False  # only an earlier version accepted these attributes


def read_table(kind: Kind, table: Table, where: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return three things: attributes with options, how options were spelled, and warnings. Raises CommandError."""
    with commands.at(where):
        check_names(kind, table)
        options, spelled, told = normalise(kind, table.options)
        others, _, _ = normalise(kind, table.attributes)
    return {**options, **others}, spelled, [f"{where}: {text}" for text in told]


def check_names(kind: Kind, table: Table) -> None:
    """Raise CommandError for unknown options, and for attributes that are options."""
    for name in table.options:
        if not _is_option(kind, name):
            struct = TreeSettings if kind == "tree" else PoolSettings
            near = quote_near(name.replace("-", "_"), struct.__struct_fields__)
            hint = f"did you mean {near}?" if near else "put attributes that are no options below `attributes`"
            raise refuse(name, f"is no option of a {kind}; {hint}")
    for name in table.attributes:
        if _is_option(kind, name):
            raise refuse(f"attributes/{name}", "is an option; put it beside `attributes`, not below")


def _with_pool_tables(
    tree: TreeConfig, tables: tuple[PoolTable, ...], prune: bool, new_id: Callable[[], str], warnings: list[str]
) -> TreeConfig:
    twice = next((name for name, number in Counter(table.name for table in tables).items() if number > 1), None)
    if twice is not None:
        text = f"pool {quoted(twice)}: appears twice; names of pools are unique in a tree"
        raise CommandError(text, attributes={FIELD: "name"})
    matched = _match(tree, tables, warnings)
    pools: dict[str, PoolConfig] = {}
    for table in tables:
        pools[table.name] = _make_pool(matched.get(table.name) or PoolConfig(new_id(), table.name, ""), table, warnings)
    for table in tables:
        if table.parent != ROOT_POOL and table.parent not in pools:
            raise CommandError(f"pool {quoted(table.name)}: its parent {quoted(table.parent)} is not in the file")
    gone = set(tree.pools) - {pool.name for pool in matched.values()}
    renamed = {pool.name: name for name, pool in matched.items()}
    kept = [] if prune else [pool for name, pool in tree.pools.items() if name in gone]
    for pool in kept:
        if pool.name in pools:
            raise CommandError(f"Pool {quoted(pool.name)} already exists in tree {quoted(tree.name)}", ALREADY_EXISTS)
        parent = renamed.get(pool.parent, pool.parent)
        pools[pool.name] = pool if parent == pool.parent else replace(pool, parent=parent)
    warnings += _describe_others(kept, len(gone) if prune else 0, len(tables) - len(matched))
    if len(pools) == len(tree.pools) and all(tree.pools.get(name) is pool for name, pool in pools.items()):
        return tree
    made = with_pools(tree, pools.values())
    lost = [name for name in pools if name not in made.pools]
    if lost:
        raise CommandError(f"pool {quoted(lost[0])}: would be one of its own sub-pools")
    return made


def _match(tree: TreeConfig, tables: Collection[PoolTable], warnings: list[str]) -> dict[str, PoolConfig]:
    """Return name of a table -> pool that the table matches. Raises CommandError."""
    by_id = {pool.id: pool for pool in tree.pools.values()}
    given = {table.id for table in tables}
    matched: dict[str, PoolConfig] = {}
    named: dict[str, str] = {}
    for table in tables:
        if table.id and table.id not in by_id:
            warnings.append(f"pool {quoted(table.name)}: no pool of the tree has its id; it is matched by its name")
        pool = by_id.get(table.id) or tree.pools.get(table.name)
        if pool is None:
            continue
        if table.id != pool.id and pool.id in given:
            continue  # a different table has the pool's id, and renames it
        if pool.id in named:
            text = f"pools {quoted(named[pool.id])} and {quoted(table.name)}: have one id; keep it where it belongs"
            raise CommandError(text, attributes={FIELD: "id"})
        named[pool.id] = table.name
        matched[table.name] = pool
    return matched


def _make_pool(present: PoolConfig, table: PoolTable, warnings: list[str]) -> PoolConfig:
    where = f"pool {quoted(table.name)}"
    attributes, spelled, told = read_table("pool", table, where)
    pool = present
    if not _is_said("pool", present.attributes, attributes):
        warnings += told
        with commands.at(where):
            pool = replace(pool, attributes=attributes, settings=read_pool(attributes), spelled=spelled)
    if (pool.name, pool.parent) != (table.name, table.parent):
        pool = replace(pool, name=table.name, parent=table.parent)
    return pool


def _describe_others(kept: list[PoolConfig], removed: int, made: int) -> Iterator[str]:
    if kept:
        names = ", ".join(quoted(pool.name) for pool in kept[:SHOWN_NAMES])
        more = " ..." if len(kept) > SHOWN_NAMES else ""
        is_, stay = ("is", "stays") if len(kept) == 1 else ("are", "stay")
        yield f"{count(len(kept), 'pool')} {is_} not in the file and {stay} (prune removes what is not): {names}{more}"
    if removed and made:
        yield (
            f"{count(removed, 'pool')} would be removed and {made} created: a pool that is only renamed keeps its "
            "operations and volume where the file has its id"
        )


def describe_applied(command: ApplyTree) -> str:
    """Return a command as text: ``applied a file to pool tree "default" (more for research)``."""
    why = f" ({escape(command.why)})" if command.why else ""
    return f"applied a file to pool tree {quoted(command.tree)}{why}"
