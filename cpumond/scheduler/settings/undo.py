"""Undoes an earlier change of the configuration: all differences of the change are reversed (semantics.md 12.5).

Only values that have not changed since then can be undone: later changes are never overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from cpumond.core.words import quoted
from cpumond.scheduler.model import ROOT_POOL, CommandError, Config, PoolConfig, TreeConfig
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings.attributes import Edit, is_same, read_pool, read_tree
from cpumond.scheduler.settings.changes import ConfigChange, split_path, with_parent
from cpumond.scheduler.settings.commands import ConfigCommand, with_pools
from cpumond.scheduler.settings.values import format_setting


class UndoChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Undo the changes of trees and pools that the event with this number made."""

    number: int


@dataclass(frozen=True, slots=True)
class Undo:
    """``UndoChange`` with the changes to undo, as ``exact`` differences of ``compare_configs``."""

    number: int
    changes: tuple[ConfigChange, ...]


class ChangedSinceError(CommandError):
    """A change cannot be undone, since ``pool`` of ``tree`` has changed since then (``pool`` "": the tree itself)."""

    def __init__(self, tree: str, pool: str, what: str) -> None:
        where = f"pool {quoted(pool)} in tree {quoted(tree)}" if pool else f"pool tree {quoted(tree)}"
        super().__init__(f"{where if tree else 'the default tree'}: {what}")
        self.tree = tree
        self.pool = pool


def list_reverse_commands(changes: Iterable[ConfigChange]) -> list[ConfigCommand]:
    """Return commands that would undo ``changes`` one by one. They serve to check rights.

    If the parent of a pool that is restored or moved back does not exist now, the command names the nearest existing
    pool above it. Changes that come with a removed pool or tree, and renames of a parent, are omitted."""
    found: list[ConfigCommand] = []
    changes = list(changes)
    whole = {(each.tree, each.pool): each for each in changes if not each.attribute and each.tree}
    places: dict[tuple[str, str], dict[str, str]] = {}
    edits: dict[tuple[str, str], list[Edit]] = {}
    present = {(each.tree, each.old): each.pool for each in changes if each.attribute == "name"}
    for change in changes:
        key = change.tree, change.pool
        if not change.tree:
            found.append(commands.SetDefaultTree(change.old))
        elif not change.attribute:
            continue
        elif change.pool and change.attribute == "name":
            places.setdefault(key, {})["name"] = change.old
        elif change.pool and change.attribute == "parent_name":
            if present.get((change.tree, change.old)) != change.new:
                places.setdefault(key, {})["parent_name"] = _find_parent(change.tree, change.old, whole, present)
        else:
            edits.setdefault(key, []).append(Edit(split_path(change.attribute), change.old, recursive=True))
    for (tree, pool), change in whole.items():
        given = change.old if change.new is None else change.new
        if not pool:
            create = change.new is None
            found.append(commands.CreateTree(tree, given) if create else commands.RemoveTree(tree, recursive=True))
        elif (tree, "") in whole:
            continue
        elif change.new is None:
            parent, rest = given["parent_name"], {key: value for key, value in given.items() if key != "parent_name"}
            found.append(commands.CreatePool(tree, pool, _find_parent(tree, parent, whole, present), rest))
        elif (tree, given["parent_name"]) not in whole:
            found.append(commands.RemovePool(tree, pool, recursive=True))
    for (tree, pool), place in places.items():
        edits.setdefault((tree, pool), []).extend(Edit((name,), value) for name, value in place.items())
    for (tree, pool), made in edits.items():
        found.append(commands.ChangePool(tree, pool, tuple(made)) if pool else commands.ChangeTree(tree, tuple(made)))
    return found


def _find_parent(
    tree: str, parent: str, whole: Mapping[tuple[str, str], ConfigChange], present: Mapping[tuple[str, str], str]
) -> str:
    """Return the present name of ``parent`` or, if that is gone, of the nearest pool above. ``present``: old -> new."""
    while (above := whole.get((tree, parent))) is not None and above.new is None:
        parent = above.old["parent_name"]
    return present.get((tree, parent), parent)


def reverse(config: Config, changes: Iterable[ConfigChange], new_id: Callable[[], str]) -> Config:
    """Return the configuration with ``changes`` undone. The rules for it are not checked yet. Restored trees and pools
    get new ids. Raises ChangedSinceError, CommandError."""
    trees, default = dict(config.trees), config.default_tree
    by_tree: dict[str, list[ConfigChange]] = {}
    for change in changes:
        by_tree.setdefault(change.tree, []).append(change)
    for change in by_tree.pop("", ()):
        if (default or None) != change.new:
            what = f"is {format_setting(default or None)} now, not {format_setting(change.new)}"
            raise ChangedSinceError("", "", what)
        default = change.old or ""
    for name, own in by_tree.items():
        tree = _reverse_tree(config.trees.get(name), name, own, new_id)
        if tree is None:
            trees.pop(name, None)
        else:
            trees[name] = tree
    if default and default not in trees:
        raise ChangedSinceError(default, "", "is the default tree, and would be removed")
    return Config(MappingProxyType(dict(sorted(trees.items()))), default)


def _reverse_tree(
    present: TreeConfig | None, name: str, changes: list[ConfigChange], new_id: Callable[[], str]
) -> TreeConfig | None:
    """Return the tree of this name as it was before ``changes``; None if it did not exist."""
    whole = next((each for each in changes if not each.pool and not each.attribute), None)
    if whole is not None and whole.new is None:
        if present is not None:
            raise ChangedSinceError(name, "", "was made anew")
        tree = TreeConfig(new_id(), name, dict(whole.old), read_tree(whole.old))
    elif present is None:
        raise ChangedSinceError(name, "", "was removed")
    else:
        tree = present
        if whole is not None and not is_same(tree.attributes, whole.new):
            raise ChangedSinceError(name, "", "its options have changed since it was created")
    own = [each for each in changes if not each.pool and each.attribute]
    if own:
        attributes = _reverse_attributes(tree.attributes, own)
        kept = {key: each for key, each in tree.spelled.items() if _has(attributes, key.split("/"))}
        tree = replace(tree, attributes=attributes, settings=read_tree(attributes), spelled=kept)
    of_pools = [each for each in changes if each.pool]
    if of_pools or whole is not None:
        pools = _reverse_pools(tree, of_pools, new_id)
        if whole is not None and whole.old is None:
            if pools:
                raise ChangedSinceError(name, next(iter(pools)), "was created there since")
            return None
        tree = _arrange(tree, pools)
    return tree


def _reverse_attributes(attributes: Mapping[str, Any], changes: Iterable[ConfigChange]) -> dict[str, Any]:
    result = dict(attributes)
    for change in changes:
        path = split_path(change.attribute)
        target: dict[str, Any] = result
        for name in path[:-1]:
            inside = target.get(name)
            if not isinstance(inside, Mapping):
                raise _changed(change, None)
            target[name] = dict(inside)
            target = target[name]
        if not is_same(target.get(path[-1]), change.new):
            raise _changed(change, target.get(path[-1]))
        if change.old is None:
            target.pop(path[-1], None)
        else:
            target[path[-1]] = change.old
    return result


def _changed(change: ConfigChange, now: Any) -> ChangedSinceError:
    text = f"{change.attribute} is {format_setting(now)} now, not {format_setting(change.new)} as that change left it"
    return ChangedSinceError(change.tree, change.pool, text)


def _has(attributes: Mapping[str, Any], path: list[str]) -> bool:
    inside = attributes.get(path[0])
    return path[0] in attributes and (len(path) == 1 or (isinstance(inside, Mapping) and path[1] in inside))


def _reverse_pools(tree: TreeConfig, changes: list[ConfigChange], new_id: Callable[[], str]) -> dict[str, PoolConfig]:
    """Return the pools as they were before ``changes``, by their names at that time."""
    pools = dict(tree.pools)
    gone = [each for each in changes if not each.attribute and each.new is None]
    edited: dict[str, list[ConfigChange]] = {}
    for change in changes:
        if change.attribute:
            edited.setdefault(change.pool, []).append(change)
        elif change.old is None:
            present = pools.pop(change.pool, None)
            if present is None:
                raise ChangedSinceError(tree.name, change.pool, "no longer exists")
            if not is_same(with_parent(present), change.new):
                raise ChangedSinceError(tree.name, change.pool, "has changed since it was created")
    names: dict[str, str] = {}
    placed: set[str] = set()
    for name, own in edited.items():
        present = pools.get(name)
        if present is None:
            raise ChangedSinceError(tree.name, name, "no longer exists")
        pools[name] = before = _reverse_pool(present, own)
        names[name] = before.name
        if any(each.attribute == "parent_name" for each in own):
            placed.add(name)
    result: dict[str, PoolConfig] = {}
    for name, pool in pools.items():
        parent = pool.parent if name in placed else names.get(pool.parent, pool.parent)
        if pool.name in result:
            raise ChangedSinceError(tree.name, pool.name, "has the name of the pool to restore")
        result[pool.name] = pool if parent == pool.parent else replace(pool, parent=parent)
    for change in gone:
        if change.pool in result:
            raise ChangedSinceError(tree.name, change.pool, "was made anew")
        attributes, parent = dict(change.old), change.old["parent_name"]
        del attributes["parent_name"]
        result[change.pool] = PoolConfig(new_id(), change.pool, parent, attributes, read_pool(attributes))
    return result


def _reverse_pool(pool: PoolConfig, changes: list[ConfigChange]) -> PoolConfig:
    place = {"name": pool.name, "parent_name": pool.parent}
    for change in changes:
        if change.attribute in place:
            if place[change.attribute] != change.new:
                raise _changed(change, place[change.attribute])
            place[change.attribute] = change.old
    own = [each for each in changes if each.attribute not in place]
    pool = replace(pool, name=place["name"], parent=place["parent_name"])
    if not own:
        return pool
    attributes = _reverse_attributes(pool.attributes, own)
    spelled = {key: each for key, each in pool.spelled.items() if key in attributes}
    return replace(pool, attributes=attributes, settings=read_pool(attributes), spelled=spelled)


def _arrange(tree: TreeConfig, pools: Mapping[str, PoolConfig]) -> TreeConfig:
    """Return ``tree`` with these pools. Raises ChangedSinceError if a pool's parent is missing or below the pool."""
    for pool in pools.values():
        if pool.parent != ROOT_POOL and pool.parent not in pools:
            if pool.parent in tree.pools and pool.name in tree.pools:
                raise ChangedSinceError(tree.name, pool.name, f"is below {quoted(pool.parent)}, which would be removed")
            raise ChangedSinceError(tree.name, pool.parent, f"no longer exists; {quoted(pool.name)} was below it")
    changed = with_pools(tree, pools.values())
    lost = [name for name in pools if name not in changed.pools]
    if lost:
        raise ChangedSinceError(tree.name, lost[0], "would be one of its own sub-pools")
    return changed
