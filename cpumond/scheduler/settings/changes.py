"""What differs between two configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cpumond.scheduler.model import SUBPOOL_DELIMITER, Config, PoolConfig, TreeConfig
from cpumond.scheduler.settings.attributes import is_same


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One difference between two configurations.

    ``pool`` is "" for a tree, both names are "" for ``default_tree``. ``attribute`` is a path with slashes, "" when a
    tree or pool was created (``old`` None, ``new`` its attributes, a pool's with ``parent_name``) or removed (the
    reverse). A pool is named as it is now; None stands for "not set".
    """

    tree: str
    pool: str
    attribute: str
    old: Any
    new: Any


def describe_change(old: Config, new: Config) -> list[ConfigChange]:
    """Everything that differs, trees by name, each one's options before its pools."""
    changes: list[ConfigChange] = []
    for name in sorted({*old.trees, *new.trees}):
        before, after = old.trees.get(name), new.trees.get(name)
        if before is None and after is not None:
            changes.append(ConfigChange(name, "", "", None, dict(after.attributes)))
        elif after is None and before is not None:
            changes.append(ConfigChange(name, "", "", dict(before.attributes), None))
        elif before is not None and after is not None and before is not after:
            changes += _attribute_changes(name, "", before.attributes, after.attributes)
        changes += _pool_changes(name, before, after)
    if old.default_tree != new.default_tree:
        changes.append(ConfigChange("", "", "default_tree", old.default_tree or None, new.default_tree or None))
    return changes


def _pool_changes(name: str, before: TreeConfig | None, after: TreeConfig | None) -> Iterator[ConfigChange]:
    old = {pool.id: pool for pool in before.pools.values()} if before is not None else {}
    new = {pool.id: pool for pool in after.pools.values()} if after is not None else {}
    for key, pool in old.items():
        if key not in new:
            yield ConfigChange(name, pool.name, "", _with_parent(pool), None)
    for key, pool in new.items():
        was = old.get(key)
        if was is None:
            yield ConfigChange(name, pool.name, "", None, _with_parent(pool))
        elif was is not pool:
            place = {"name": was.name, "parent_name": was.parent}, {"name": pool.name, "parent_name": pool.parent}
            yield from _attribute_changes(name, pool.name, *place)
            yield from _attribute_changes(name, pool.name, was.attributes, pool.attributes)


def _with_parent(pool: PoolConfig) -> dict[str, Any]:
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


def _is_dictionary(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def find_renamed(old: TreeConfig, new: TreeConfig) -> dict[str, str]:
    """Old name of a pool -> its new one, where they differ."""
    names = {pool.id: pool.name for pool in new.pools.values()}
    return {pool.name: names[pool.id] for pool in old.pools.values() if names.get(pool.id, pool.name) != pool.name}


def rename_pool(name: str, renamed: Mapping[str, str]) -> str:
    """What a pool, or an ephemeral sub-pool of one, is called after ``renamed``."""
    parent, delimiter, child = name.partition(SUBPOOL_DELIMITER)
    return renamed.get(parent, parent) + delimiter + child
