"""Converts a configuration to records of the store, and such records to a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import msgspec

from cpumond.core.errors import ConfigError, StateFileError
from cpumond.core.words import quoted
from cpumond.scheduler.model import CommandError, Config, PoolConfig, TreeConfig
from cpumond.scheduler.settings.attributes import Kind, canonical_name, read_pool, read_tree
from cpumond.scheduler.settings.commands import with_pools
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER, parse_tag_filter
from cpumond.scheduler.settings.retries import RETRY_POLICY, check_policy

RecordKind = Literal["tree", "pool", "system"]

RecordKey = tuple[RecordKind, str]

SYSTEM: Final[RecordKey] = ("system", "default_tree")


def encode_tree(tree: TreeConfig | PoolConfig) -> dict[str, Any]:
    """Return a dictionary for JSON: a tree without its pools; of a pool, only the fields that trees have, too."""
    return {"id": tree.id, "name": tree.name, "attributes": dict(tree.attributes), "spelled": dict(tree.spelled)}


def encode_pool(tree_name: str, pool: PoolConfig) -> dict[str, Any]:
    return {**encode_tree(pool), "tree": tree_name, "parent": pool.parent}


def changed_records(old: Config, new: Config) -> list[tuple[RecordKind, str, dict[str, Any] | None]]:
    """Return the records to write (None: to delete) that turn the records of ``old`` into those of ``new``.

    Objects are compared by identity; therefore each pool of a changed tree costs only one look-up."""
    changes: list[tuple[RecordKind, str, dict[str, Any] | None]] = []
    if old.default_tree != new.default_tree:
        changes.append((*SYSTEM, {"default_tree": new.default_tree}))
    old_trees = {tree.id: tree for tree in old.trees.values()}
    new_trees = {tree.id: tree for tree in new.trees.values()}
    for key, tree in old_trees.items():
        if key not in new_trees:
            changes.append(("tree", key, None))
            changes += [("pool", pool.id, None) for pool in tree.pools.values()]
    for key, tree in new_trees.items():
        was = old_trees.get(key)
        if was is tree:
            continue
        if was is None or was.attributes is not tree.attributes or was.spelled is not tree.spelled:
            changes.append(("tree", key, encode_tree(tree)))
        old_pools = {pool.id: pool for pool in was.pools.values()} if was is not None else {}
        new_pools = {pool.id: pool for pool in tree.pools.values()}
        changes += [("pool", pool_id, None) for pool_id in old_pools if pool_id not in new_pools]
        changes += [
            ("pool", pool_id, encode_pool(tree.name, pool))
            for pool_id, pool in new_pools.items()
            if old_pools.get(pool_id) is not pool
        ]
    return changes


class _TreeRecord(msgspec.Struct, frozen=True):
    id: str
    name: str
    attributes: dict[str, Any] = {}
    spelled: dict[str, str] = {}


class _PoolRecord(_TreeRecord, frozen=True, kw_only=True):
    tree: str
    parent: str


def _is_tag_filter(value: object) -> bool:
    try:
        return isinstance(value, str) and parse_tag_filter(value) is not None
    except ConfigError:
        return False


def _is_policy(value: object) -> bool:
    try:
        check_policy(msgspec.convert(value, list[str]))
    except ValueError:
        return False
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_MADE_OPTIONS: Final[Mapping[Kind, Mapping[str, Callable[[object], bool]]]] = {
    "pool": {"owner": _is_text, TAG_FILTER: _is_tag_filter, RETRY_POLICY: _is_policy},
    "tree": {"owner": _is_text, "acl_required": lambda value: isinstance(value, bool)},
}
"""Option that an earlier version kept as an attribute without meaning -> check whether its value is valid now."""
_Record = TypeVar("_Record", bound=_TreeRecord)


def _readable(kind: Kind, record: _Record) -> _Record:
    """Drop attributes that an earlier version kept without meaning and that are options now, if their value is invalid
    or the option is also set under its canonical name."""
    made, kept = _MADE_OPTIONS[kind], {}
    for name, value in record.attributes.items():
        canonical = canonical_name(kind, name)
        is_twice = name != canonical and canonical in record.attributes
        if canonical not in made or (made[canonical](value) and not is_twice):
            kept[name] = value
    return record if len(kept) == len(record.attributes) else msgspec.structs.replace(record, attributes=kept)


@contextlib.contextmanager
def _stored(where: str) -> Iterator[None]:
    """Turn errors that are raised inside the context into a StateFileError about the record ``where``."""
    try:
        yield
    except (CommandError, msgspec.ValidationError) as error:
        raise StateFileError(f"{where}: {error}") from None


def load_config(records: Mapping[RecordKey, Mapping[str, Any]]) -> Config:
    """Return the configuration from which stored records were made; the records may be in any order.

    Raises StateFileError. Rules between attributes are not checked: an accepted configuration stays in force."""
    default = str(records.get(SYSTEM, {}).get("default_tree", ""))
    trees: dict[str, TreeConfig] = {}
    pools: dict[str, dict[str, PoolConfig]] = {}
    for (kind, key), record in records.items():
        with _stored(f"stored {kind} {key}"):
            if kind == "tree":
                stored = _readable("tree", msgspec.convert(record, _TreeRecord))
                if stored.name in trees:
                    raise CommandError(f"there are two trees named {quoted(stored.name)}")
                settings = read_tree(stored.attributes)
                trees[stored.name] = TreeConfig(stored.id, stored.name, stored.attributes, settings, stored.spelled)
            elif kind == "pool":
                pool = _readable("pool", msgspec.convert(record, _PoolRecord))
                same = pools.setdefault(pool.tree, {})
                if pool.name in same:
                    raise CommandError(f"there are two pools named {quoted(pool.name)} in one tree")
                read = read_pool(pool.attributes)
                same[pool.name] = PoolConfig(pool.id, pool.name, pool.parent, pool.attributes, read, pool.spelled)
    for name, members in pools.items():
        if name not in trees:
            raise StateFileError(f"stored pool {quoted(next(iter(members)))}: its tree {quoted(name)} is missing")
        trees[name] = with_pools(trees[name], members.values())
        lost = [pool for pool in members if pool not in trees[name].pools]
        if lost:
            raise StateFileError(
                f"stored pool {quoted(lost[0])}: its parent {quoted(members[lost[0]].parent)} is missing, or its "
                "ancestors lead back to itself"
            )
    if default and default not in trees:
        raise StateFileError(f"stored default_tree {quoted(default)} is missing")
    return Config(MappingProxyType(dict(sorted(trees.items()))), default)
