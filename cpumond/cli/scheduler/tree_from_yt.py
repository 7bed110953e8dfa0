"""Convert the output of ``yt get`` for a pool tree of any cluster to the tables of a tree file. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from cpumond.api.yt.values import YtError
from cpumond.cli.scheduler.arguments import read_yson_text
from cpumond.core.errors import ConfigError
from cpumond.core.words import quoted
from cpumond.scheduler.model import ROOT_POOL, PoolSettings, TreeSettings
from cpumond.scheduler.settings.attributes import CONFIG, RESERVED, Kind, canonical_name, is_option
from cpumond.scheduler.settings.tree_file import PoolTable, Table, TreeTables

OF_EVERY_TREE: Final = MappingProxyType({"default_memory_limit": 536_870_912, "enable_memory_reserve": True})
"""Options that reproduce what holds for every tree of YTsaurus: the default ``memory_limit`` in bytes, and memory
reservations that follow the usage of earlier jobs."""


def read_yt_tree(text: str, name: str) -> TreeTables:
    """Convert a tree in YSON to tables; messages contain the ``name`` of its file. Raises ConfigError.

    Attributes that every pool has by itself, empty ones and defaults are left out; unknown attributes are kept. Options
    that YTsaurus has for all trees, but that a tree here may lack, are written."""
    try:
        attributes, pools = _split(read_yson_text(text))
    except YtError as error:
        wanted = "expected the output of `yt get //sys/pool_trees/TREE` without --format"
        raise ConfigError(f"{name}: {error}; {wanted}") from None
    own = _sort("tree", attributes)
    own.options.update({option: value for option, value in OF_EVERY_TREE.items() if option not in attributes})
    return TreeTables(own, tuple(_list_pools(pools, ROOT_POOL, name)))


def _list_pools(pools: Any, parent: str, file: str) -> Iterator[PoolTable]:
    if not isinstance(pools, Mapping):
        where = "the tree" if parent == ROOT_POOL else f"pool {quoted(parent)}"
        raise ConfigError(f"{file}: {where}: its pools are missing; get one tree alone, as in //sys/pool_trees/TREE")
    for name, node in pools.items():
        attributes, below = _split(node)
        own = _sort("pool", attributes)
        yield PoolTable(name=name, parent=parent, options=own.options, attributes=own.attributes)
        yield from _list_pools(below, name, file)


def _split(node: Any) -> tuple[Mapping[str, Any], Any]:
    """Attributes and value of a node."""
    if isinstance(node, Mapping) and "$value" in node:
        return node.get("$attributes", {}), node["$value"]
    return {}, node


def _sort(kind: Kind, attributes: Mapping[str, Any]) -> Table:
    found = Table(options={}, attributes={})
    defaults = {field.name: field.default for field in msgspec.structs.fields(_SETTINGS[kind])}
    # Of an option with two names, as guarantees have, the name used here wins.
    for name in sorted(attributes, key=lambda name: name == canonical_name(kind, name)):
        known, value = canonical_name(kind, name), attributes[name]
        if known in RESERVED or value in (None, "", {}, []) or value == defaults.get(known, msgspec.NODEFAULT):
            continue
        if is_option(kind, known) or (kind == "tree" and known == CONFIG):
            found.options[known] = value
        else:
            found.attributes[name] = value
    return found


_SETTINGS: Final[Mapping[Kind, type[msgspec.Struct]]] = {"tree": TreeSettings, "pool": PoolSettings}
