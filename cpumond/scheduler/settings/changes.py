"""Differences between two configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cpumond.scheduler.model import SUBPOOL_DELIMITER, Config, PoolConfig, TreeConfig
from cpumond.scheduler.settings.attributes import is_same


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One difference between two configurations.

    ``pool`` is "" for a tree; ``tree`` and ``pool`` are "" for ``default_tree``. ``pool`` is the pool's present name.
    ``attribute`` is a path with slashes; "" if a tree or pool was created or removed: then ``new`` or ``old`` is all
    attributes, for a pool including ``parent_name``. A value None means "not set". In ``exact`` differences a backslash
    precedes each slash or backslash inside of a name (``join_path``)."""

    tree: str
    pool: str
    attribute: str
    old: Any
    new: Any


def join_path(path: Iterable[str]) -> str:
    return "/".join(name.replace("\\", "\\\\").replace("/", "\\/") for name in path)


def split_path(attribute: str) -> tuple[str, ...]:
    return tuple(re.sub(r"\\(.)", r"\1", name) for name in re.findall(r"(?:[^/\\]|\\.)+", attribute, re.DOTALL))


def compare_configs(old: Config, new: Config, *, exact: bool = False) -> list[ConfigChange]:
    """Return all differences, sorted by tree; the options of a tree come before its pools.

    ``exact``: a dictionary that comes or goes is one difference, instead of one for each of its keys. Therefore
    everything can be undone, even an empty dictionary."""
    compare = _exact_changes if exact else _attribute_changes
    changes: list[ConfigChange] = []
    for name in sorted({*old.trees, *new.trees}):
        before, after = old.trees.get(name), new.trees.get(name)
        if before is None and after is not None:
            changes.append(ConfigChange(name, "", "", None, dict(after.attributes)))
        elif after is None and before is not None:
            changes.append(ConfigChange(name, "", "", dict(before.attributes), None))
        elif before is not None and after is not None and before is not after:
            changes += compare(name, "", before.attributes, after.attributes)
        changes += _pool_changes(name, before, after, compare)
    if old.default_tree != new.default_tree:
        changes.append(ConfigChange("", "", "default_tree", old.default_tree or None, new.default_tree or None))
    return changes


def unfold(change: ConfigChange) -> Iterator[ConfigChange]:
    """Yield the differences inside of a dictionary that comes, goes or changes as a whole; else ``change`` itself."""
    old, new = change.old, change.new
    if change.attribute and _is_dictionary(old) and _is_dictionary(new) and (old or new):
        yield from _attribute_changes(change.tree, change.pool, old or {}, new or {}, f"{change.attribute}/")
    else:
        yield change


_Compare = Callable[[str, str, Mapping[str, Any], Mapping[str, Any]], Iterator[ConfigChange]]


def _pool_changes(
    name: str, before: TreeConfig | None, after: TreeConfig | None, compare: _Compare
) -> Iterator[ConfigChange]:
    old = {pool.id: pool for pool in before.pools.values()} if before is not None else {}
    new = {pool.id: pool for pool in after.pools.values()} if after is not None else {}
    for key, pool in old.items():
        if key not in new:
            yield ConfigChange(name, pool.name, "", with_parent(pool), None)
    for key, pool in new.items():
        was = old.get(key)
        if was is None:
            yield ConfigChange(name, pool.name, "", None, with_parent(pool))
        elif was is not pool:
            place = {"name": was.name, "parent_name": was.parent}, {"name": pool.name, "parent_name": pool.parent}
            yield from _attribute_changes(name, pool.name, *place)
            yield from compare(name, pool.name, was.attributes, pool.attributes)


def with_parent(pool: PoolConfig) -> dict[str, Any]:
    return {"parent_name": pool.parent, **pool.attributes}


def _attribute_changes(
    tree: str, pool: str, old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterator[ConfigChange]:
    for key in (*old, *(key for key in new if key not in old)):
        before, after = old.get(key), new.get(key)
        if is_same(before, after):
            continue
        if _is_dictionary(before) and _is_dictionary(after) and (before or after):
            yield from _attribute_changes(tree, pool, before or {}, after or {}, f"{prefix}{key}/")
        else:
            yield ConfigChange(tree, pool, prefix + key, before, after)


def _exact_changes(
    tree: str, pool: str, old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[ConfigChange]:
    for key in (*old, *(key for key in new if key not in old)):
        before, after, where = old.get(key), new.get(key), (*path, key)
        if is_same(before, after):
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping) and _has_values(before) and _has_values(after):
            yield from _exact_changes(tree, pool, before, after, where)
        else:
            yield ConfigChange(tree, pool, join_path(where), before, after)


def _has_values(value: Mapping[str, Any]) -> bool:
    """Return whether no value of the dictionary is None: then None can mean a missing value."""
    return all(each is not None for each in value.values())


def _is_dictionary(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def find_renamed(old: TreeConfig, new: TreeConfig) -> dict[str, str]:
    """Return old name -> new name of each renamed pool."""
    names = {pool.id: pool.name for pool in new.pools.values()}
    return {pool.name: names[pool.id] for pool in old.pools.values() if names.get(pool.id, pool.name) != pool.name}


def rename_pool(name: str, renamed: Mapping[str, str]) -> str:
    """Return the name of a pool, or of an ephemeral sub-pool, after the changes ``renamed``."""
    parent, delimiter, child = name.partition(SUBPOOL_DELIMITER)
    return renamed.get(parent, parent) + delimiter + child
