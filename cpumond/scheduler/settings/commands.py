"""Changes of the configuration as values, and the new ``Config`` that each makes (semantics.md 2).

A command is applied or refused as a whole. Configurations share unchanged parts: a pool that a command does not change
is the identical object afterwards. Trees are sorted by name, pools depth first with siblings by name. Therefore equal
configurations always look the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import msgspec

from cpumond.core.words import did_you_mean, nearest, number, quoted
from cpumond.scheduler.model import (
    ALREADY_EXISTS,
    NAME_REGEX,
    RESOLVE,
    ROOT_POOL,
    CommandError,
    Config,
    PoolConfig,
    TreeConfig,
)
from cpumond.scheduler.settings import validation
from cpumond.scheduler.settings.attributes import Edit, canonical_path, edit, is_same, normalise, read_pool, read_tree
from cpumond.scheduler.settings.nodes_filter import read_filter
from cpumond.scheduler.settings.values import FIELD, format_value, name_field

OF_FURTHER_TREES: Final = frozenset(
    {"acl_required", "default_memory_limit", "enable_memory_reserve", "guarantee_tolerance", "share_gang_remainders"}
)
"""Options that a further tree takes from the default tree unless it sets them. Both trees are then closed or open
(12.4), limit their jobs' memory or not (2.4), and give guarantees and gangs the same meaning (6.10, 4)."""
NOT_EMPTY: Final = "Cannot remove non-empty composite node"
"""Start of the sentence that refuses to remove a pool or tree that contains pools."""


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all commands: the name of the type is the tag ``type`` in JSON."""


class CreateTree(_Command, frozen=True):
    """Create a pool tree without pools. ``ignore_existing``: an existing tree of that name is left unchanged."""

    name: str
    attributes: dict[str, Any] = {}
    ignore_existing: bool = False


class ChangeTree(_Command, frozen=True):
    """Set and remove options of a tree."""

    tree: str
    edits: tuple[Edit, ...]


class RemoveTree(_Command, frozen=True):
    """Remove a tree. A tree with pools requires ``recursive``. The default tree can only be removed as the last one."""

    tree: str
    recursive: bool = False


class SetDefaultTree(_Command, frozen=True):
    """Set the tree of operations that name no tree; it must exist (2.3). None: such operations are refused."""

    tree: str | None


class CreatePool(_Command, frozen=True):
    """Create a pool. ``ignore_existing``: an existing pool of that name under the same parent is left unchanged."""

    tree: str
    name: str
    parent: str = ROOT_POOL
    attributes: dict[str, Any] = {}
    ignore_existing: bool = False


class ChangePool(_Command, frozen=True):
    """Set and remove attributes of a pool. The attributes ``name`` and ``parent_name`` rename and move it."""

    tree: str
    pool: str
    edits: tuple[Edit, ...]


class RemovePool(_Command, frozen=True):
    """Remove a pool. A pool with sub-pools requires ``recursive``, and is removed together with them."""

    tree: str
    pool: str
    recursive: bool = False


class MovePool(_Command, frozen=True):
    """Change the parent or the name of a pool, or both. Everything below the pool moves with it."""

    tree: str
    pool: str
    new_parent: str
    new_name: str


class TransferPoolResources(_Command, frozen=True):
    """Transfer guarantees and operation counts from one pool to another.

    The ancestors of both pools, up to but not including their common ancestor, change too: those of the source lose
    the same amounts, those of the destination gain them. ``delta`` may have ``strong_guarantee_resources``,
    ``resource_flow`` and ``burst_guarantee_resources`` (dictionaries of resources), ``max_operation_count`` and
    ``max_running_operation_count``. Flow and burst guarantee may also be in ``integral_guarantees``."""

    tree: str
    source: str
    destination: str
    delta: dict[str, Any]


ConfigCommand = (
    CreateTree | ChangeTree | RemoveTree | SetDefaultTree | CreatePool | ChangePool | RemovePool | MovePool
    | TransferPoolResources
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a command.

    ``id`` is the id of the first tree or pool that the command names. ``changed`` is False if the configuration is the
    same object as before. ``warnings`` concern the command and its effects, not problems that existed before."""

    config: Config
    id: str
    warnings: tuple[str, ...] = ()
    changed: bool = False


def apply(
    config: Config, command: ConfigCommand, *, new_id: Callable[[], str], nodes: Mapping[str, Collection[str]],
    name_pattern: str = NAME_REGEX,
) -> Outcome:  # fmt: skip
    """Return the configuration after ``command``; ``config`` itself never changes.

    ``nodes``: id of each registered node -> its tags. ``new_id`` is called once for a new tree or pool. Raises
    CommandError; its code is RESOLVE for a missing tree or pool, ALREADY_EXISTS for an existing one."""
    made = _HANDLERS[type(command)](_Context(config, new_id), command)
    edited = command.pool if isinstance(command, ChangePool) else ""
    return check(config, made, nodes=nodes, name_pattern=name_pattern, edited=edited)


def check(
    config: Config, made: Outcome, *, nodes: Mapping[str, Collection[str]], name_pattern: str = NAME_REGEX,
    edited: str = "",
) -> Outcome:  # fmt: skip
    """Return ``made`` with all warnings if the rules allow its configuration as the next one after ``config``.
    ``edited``: name of the pool whose attributes were changed. Raises CommandError."""
    if made.config is config:
        return made
    warnings = list(made.warnings)
    filters_changed = False
    for name, tree in made.config.trees.items():
        old = config.trees.get(name)
        if old is tree:
            continue
        try:
            found = validation.validate_tree(tree, name_pattern=name_pattern)
        except CommandError as error:
            raise _about_edited(error, edited) from None
        if found:
            known = set(validation.find_warnings(old)) if old is not None else set()
            warnings += [sentence for sentence in found if sentence not in known]
        filters_changed = filters_changed or old is None or old.settings.nodes_filter != tree.settings.nodes_filter
    if filters_changed:
        check_nodes(made.config, nodes)
        warnings += [text for text in _overlaps(made.config) if text not in _overlaps(config)]
    return replace(made, warnings=tuple(warnings), changed=True)


def _about_edited(error: CommandError, edited: str) -> CommandError:
    """Return a tree's refusal. If options of two pools break a rule together, it names the ``edited`` pool's."""
    attributes = dict(error.attributes)
    parent, option = attributes.pop(validation.AT_PARENT, ("", ""))
    if edited and edited == parent:
        attributes[FIELD] = option
    return CommandError(str(error), error.code, attributes, error.inner)


def _overlaps(config: Config) -> list[str]:
    """Describe trees whose filters certainly overlap, since they are equal or one of them is empty (2.2)."""
    filters = [(tree.name, tree.settings.nodes_filter.strip()) for tree in config.trees.values()]
    return [
        f"pool trees {quoted(one)} and {quoted(other)}: a node that fits the nodes_filter of both is refused at its "
        "registration; make the filters exclude each other"
        for n, (one, text) in enumerate(filters)
        for other, same in filters[n + 1 :]
        if text == same or not text or not same
    ]


def check_nodes(config: Config, nodes: Mapping[str, Collection[str]]) -> None:
    """Check that no node belongs to two trees (2.2); its tags include its address (2.1). Raises CommandError."""
    if len(config.trees) < 2:
        return
    for node, tags in nodes.items():
        matched = [name for name, tree in config.trees.items() if read_filter(tree.settings.nodes_filter).matches(tags)]
        if len(matched) > 1:
            raise CommandError(
                "Cannot update fair-share trees since there is node that belongs to multiple trees: node "
                f"{quoted(node)} matches the nodes_filter of {' and '.join(map(quoted, matched))}; make the filters "
                "exclude each other",
                attributes={"node_id": node, "node_address": node, "matched_trees": matched, FIELD: "nodes_filter"},
            )


@dataclass(frozen=True, slots=True)
class _Context:
    config: Config
    new_id: Callable[[], str]


def _create_tree(context: _Context, command: CreateTree) -> Outcome:
    config = context.config
    existing = config.trees.get(command.name)
    if existing is not None:
        if command.ignore_existing:
            return Outcome(config, existing.id)
        raise CommandError(f"Pool tree {quoted(command.name)} already exists", ALREADY_EXISTS, {FIELD: "name"})
    with at(f"pool tree {quoted(command.name)}"):
        attributes, spelled, warnings = normalise("tree", command.attributes)
        settings = read_tree(attributes)
        default = config.trees.get(config.default_tree)
        said = {*attributes, *attributes.get("config", {})}
        like = {} if default is None else {name: getattr(default.settings, name) for name in OF_FURTHER_TREES - said}
        if any(like.values()):
            attributes = {**attributes, **{name: value for name, value in sorted(like.items()) if value}}
            settings = read_tree(attributes)
    tree = TreeConfig(context.new_id(), command.name, attributes, settings, spelled)
    return Outcome(_with_tree(config, tree), tree.id, _about(tree.name, "", warnings))


def _change_tree(context: _Context, command: ChangeTree) -> Outcome:
    tree = find_tree(context.config, command.tree)
    with at(f"pool tree {quoted(tree.name)}"):
        attributes, spelled, warnings = edit("tree", tree.attributes, tree.spelled, command.edits)
        changed = tree
        if not _is_same(tree, attributes, spelled):
            changed = replace(tree, attributes=attributes, settings=read_tree(attributes), spelled=spelled)
    return Outcome(_with_tree(context.config, changed), tree.id, _about(tree.name, "", warnings))


def _remove_tree(context: _Context, command: RemoveTree) -> Outcome:
    config = context.config
    tree = find_tree(config, command.tree)
    if tree.pools and not command.recursive:
        raise _not_empty(f"pool tree {quoted(tree.name)}", len(tree.pools))
    trees = {name: other for name, other in config.trees.items() if other is not tree}
    if config.default_tree == tree.name and trees:
        raise CommandError(
            f"pool tree {quoted(tree.name)}: is the default tree and cannot be removed while there are others; first "
            f"make one of these the default: {', '.join(map(quoted, trees))}"
        )
    default = "" if config.default_tree == tree.name else config.default_tree
    return Outcome(Config(MappingProxyType(trees), default), tree.id)


def _set_default_tree(context: _Context, command: SetDefaultTree) -> Outcome:
    config = context.config
    if command.tree is None:
        return Outcome(replace(config, default_tree="") if config.default_tree else config, "")
    if command.tree not in config.trees:
        missing = _missing("Pool tree", command.tree, config.trees)
        raise CommandError(f"Default tree is missing: {missing}", RESOLVE)
    same = config.default_tree == command.tree
    return Outcome(config if same else replace(config, default_tree=command.tree), config.trees[command.tree].id)


def _create_pool(context: _Context, command: CreatePool) -> Outcome:
    config, name = context.config, command.name
    tree = find_tree(config, command.tree)
    existing = tree.pools.get(name)
    if existing is not None:
        if command.ignore_existing and existing.parent == command.parent:
            return Outcome(config, existing.id)
        place = f" under {quoted(existing.parent)}" if existing.parent != command.parent else ""
        text = f"Pool {quoted(name)} already exists in tree {quoted(tree.name)}{place}"
        raise CommandError(text, ALREADY_EXISTS, {FIELD: "name"})
    _check_parent(tree, command.parent)
    with at(f"pool {quoted(name)}"):
        attributes, spelled, warnings = normalise("pool", command.attributes)
        settings = read_pool(attributes)
    pool = PoolConfig(context.new_id(), name, command.parent, attributes, settings, spelled)
    changed = with_pools(tree, [*tree.pools.values(), pool])
    return Outcome(_with_tree(config, changed), pool.id, _about(tree.name, name, warnings))


def _change_pool(context: _Context, command: ChangePool) -> Outcome:
    tree = find_tree(context.config, command.tree)
    pool = find_pool(tree, command.pool)
    place = {"name": pool.name, "parent_name": pool.parent}
    edits = []
    with at(f"pool {quoted(pool.name)}"):
        for change in command.edits:
            first = canonical_path("pool", change.path[:1])
            if not first or first[0] not in place:
                edits.append(change)
                continue
            if len(change.path) > 1 or not isinstance(change.value, str):
                text = f"{'/'.join(change.path)}: must be the name of a pool, got {format_value(change.value)}"
                raise CommandError(text, attributes={FIELD: "name" if first[0] == "name" else "parent"})
            place[first[0]] = change.value
        attributes, spelled, warnings = edit("pool", pool.attributes, pool.spelled, edits)
        changed = pool
        if not _is_same(pool, attributes, spelled):
            changed = replace(pool, attributes=attributes, settings=read_pool(attributes), spelled=spelled)
    moved = _moved(tree, pool, changed, place["parent_name"], place["name"])
    return Outcome(_with_tree(context.config, moved), pool.id, _about(tree.name, pool.name, warnings))


def _move_pool(context: _Context, command: MovePool) -> Outcome:
    tree = find_tree(context.config, command.tree)
    pool = find_pool(tree, command.pool)
    return Outcome(_with_tree(context.config, _moved(tree, pool, pool, command.new_parent, command.new_name)), pool.id)


def _moved(tree: TreeConfig, pool: PoolConfig, changed: PoolConfig, parent: str, name: str) -> TreeConfig:
    """Return ``tree`` with ``changed`` for ``pool``, under this parent and name; ``tree`` itself if nothing changes."""
    if parent == pool.parent and name == pool.name:
        if changed is pool:
            return tree
        return replace(tree, pools=MappingProxyType({**tree.pools, pool.name: changed}))
    if name != pool.name and name in tree.pools:
        text = f"Pool {quoted(name)} already exists in tree {quoted(tree.name)}"
        raise CommandError(text, ALREADY_EXISTS, {FIELD: "name"})
    if parent != pool.parent:
        _check_parent(tree, parent)
        if pool.name in list_path(tree, parent):
            raise CommandError(
                f"pool {quoted(pool.name)}: cannot be moved under {quoted(parent)}, which is "
                f"{'itself' if parent == pool.name else 'one of its own sub-pools'}",
                attributes={FIELD: "parent"},
            )
    result = []
    for other in tree.pools.values():
        if other is pool:
            result.append(replace(changed, name=name, parent=parent))
        elif other.parent == pool.name and name != pool.name:
            result.append(replace(other, parent=name))
        else:
            result.append(other)
    return with_pools(tree, result)


def _remove_pool(context: _Context, command: RemovePool) -> Outcome:
    tree = find_tree(context.config, command.tree)
    pool = find_pool(tree, command.pool)
    removed = {pool.name}
    for other in tree.pools.values():
        if other.parent in removed:
            removed.add(other.name)
    if len(removed) > 1 and not command.recursive:
        raise _not_empty(f"pool {quoted(pool.name)}", len(removed) - 1)
    pools = {name: other for name, other in tree.pools.items() if name not in removed}
    return Outcome(_with_tree(context.config, replace(tree, pools=MappingProxyType(pools))), pool.id)


_AMOUNT_PATHS: Final = {
    "strong_guarantee_resources": tuple(validation.STRONG.split("/")),
    "burst_guarantee_resources": tuple(validation.BURST.split("/")),
    "resource_flow": tuple(validation.FLOW.split("/")),
}
_COUNTS: Final = ("max_operation_count", "max_running_operation_count")


def _transfer(context: _Context, command: TransferPoolResources) -> Outcome:
    tree = find_tree(context.config, command.tree)
    source, destination = find_pool(tree, command.source), find_pool(tree, command.destination)
    amounts = _read_delta(command.delta)
    losing, gaining = (tuple(list_path(tree, name)) for name in (source.name, destination.name))
    shared = set(losing) & set(gaining)
    pools = dict(tree.pools)
    for names, sign, end in ((losing, -1.0, source.name), (gaining, 1.0, destination.name)):
        for name in names:
            if name not in shared:
                pools[name] = _transferred(pools[name], amounts, sign, is_end=name == end)
    if any(pools[name] is not tree.pools[name] for name in pools):
        tree = replace(tree, pools=MappingProxyType(pools))
    return Outcome(_with_tree(context.config, tree), source.id)


def _read_delta(delta: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    """Return path of an attribute -> amount to transfer. Raises CommandError."""
    if not isinstance(delta, Mapping):
        raise CommandError(f"resource_delta: must be a dictionary, got {format_value(delta)}")
    flat: dict[str, Any] = {}
    for raw, value in delta.items():
        inner = value if raw.replace("-", "_") == "integral_guarantees" else {raw: value}
        if not isinstance(inner, Mapping):
            raise CommandError(f"resource_delta: {raw}: must be a dictionary, got {format_value(value)}")
        for key, amounts in inner.items():
            name = canonical_path("pool", (str(key),))[0].replace("-", "_")
            if name not in _AMOUNT_PATHS and name not in _COUNTS:
                near = nearest(name, (*_AMOUNT_PATHS, *_COUNTS))
                hint = f"did you mean {quoted(near)}?" if near else f"known: {', '.join((*_AMOUNT_PATHS, *_COUNTS))}"
                raise CommandError(f"resource_delta: {key}: cannot be transferred; {hint}", attributes={FIELD: name})
            if name in flat:
                raise CommandError(f"resource_delta: {key}: given twice; keep one of them", attributes={FIELD: name})
            flat[name] = amounts
    result: dict[tuple[str, ...], float] = {}
    with at("resource_delta"):
        for name, path in _AMOUNT_PATHS.items():
            checked, _, _ = edit("pool", {}, {}, [Edit(path, flat.get(name))])
            for key in path:
                checked = checked.get(key, {})
            result.update({(*path, resource): amount for resource, amount in checked.items() if amount})
        for name in _COUNTS:
            checked, _, _ = edit("pool", {}, {}, [Edit((name,), flat.get(name))])
            if checked.get(name):
                result[(name,)] = checked[name]
    return result


def _transferred(pool: PoolConfig, amounts: Mapping[tuple[str, ...], float], sign: float, is_end: bool) -> PoolConfig:
    """Return ``pool`` with ``amounts`` times ``sign`` added. ``is_end``: the pool is the source or the destination
    itself, not a pool above one of them."""
    edits = []
    for path, amount in amounts.items():
        present: Any = pool.attributes
        for key in path:
            present = present.get(key) if isinstance(present, Mapping) else None
        field = "/".join(path)
        where = f"pool {quoted(pool.name)}: {field}"
        is_count = len(path) == 1
        if present is None and is_count:
            if not is_end:
                continue
            text = f"{where}: is not set, so there is nothing to transfer from or to; set it before"
            raise CommandError(text, attributes={FIELD: field})
        left = (present or 0) + sign * amount
        if left < -validation.TOLERANCE * amount:
            text = f"{where}: has {number(present or 0.0)}, {number(amount)} cannot be taken from it"
            raise CommandError(text, attributes={FIELD: field})
        edits.append(Edit(path, int(left) if is_count else max(left, 0.0)))
    if not edits:
        return pool
    with at(f"pool {quoted(pool.name)}"):
        attributes, _, _ = edit("pool", pool.attributes, {}, edits)
        return replace(pool, attributes=attributes, settings=read_pool(attributes))


def find_tree(config: Config, name: str) -> TreeConfig:
    """Return the tree of this name. Raises CommandError with code RESOLVE."""
    tree = config.trees.get(name)
    if tree is None:
        raise CommandError(_missing("Pool tree", name, config.trees), RESOLVE)
    return tree


def find_pool(tree: TreeConfig, name: str) -> PoolConfig:
    """Return the explicit pool of this name. Raises CommandError with code RESOLVE."""
    pool = tree.pools.get(name)
    if name == ROOT_POOL:
        raise CommandError(f"{ROOT_POOL} has no attributes of its own; set them as options of tree {quoted(tree.name)}")
    if pool is None:
        raise CommandError(_missing("Pool", name, tree.pools, f" in tree {quoted(tree.name)}"), RESOLVE)
    return pool


def _check_parent(tree: TreeConfig, name: str) -> None:
    if name == ROOT_POOL:
        return
    try:
        find_pool(tree, name)
    except CommandError as error:
        raise name_field(error, "parent") from None


def _missing(kind: str, name: str, known: Iterable[str], place: str = "") -> str:
    return f"{kind} {quoted(name)} does not exist{place}{did_you_mean(name, known)}"


def _not_empty(where: str, count: int) -> CommandError:
    return CommandError(f"{NOT_EMPTY}: {where} has {count} pool{'s' * (count > 1)} below it; remove it recursively")


def list_path(tree: TreeConfig, name: str) -> Iterator[str]:
    """Yield the names of a pool and of the pools above it, the nearest first, without the root."""
    while name in tree.pools:
        yield name
        name = tree.pools[name].parent


def _is_same(item: PoolConfig | TreeConfig, attributes: Mapping[str, Any], spelled: Mapping[str, str]) -> bool:
    return is_same(item.attributes, attributes) and item.spelled == spelled


def _with_tree(config: Config, tree: TreeConfig) -> Config:
    if config.trees.get(tree.name) is tree:
        return config
    trees = {**config.trees, tree.name: tree}
    if tree.name not in config.trees:
        trees = dict(sorted(trees.items()))
    return replace(config, trees=MappingProxyType(trees))


def with_pools(tree: TreeConfig, pools: Iterable[PoolConfig]) -> TreeConfig:
    return replace(tree, pools=MappingProxyType({pool.name: pool for pool in _ordered(pools)}))


def _ordered(pools: Iterable[PoolConfig]) -> list[PoolConfig]:
    """Return pools depth first, siblings by name. Pools that are not below the root are left out."""
    children: dict[str, list[PoolConfig]] = {}
    for pool in pools:
        children.setdefault(pool.parent, []).append(pool)
    result: list[PoolConfig] = []
    stack = sorted(children.get(ROOT_POOL, ()), key=attrgetter("name"), reverse=True)
    while stack:
        pool = stack.pop()
        result.append(pool)
        if pool.name in children and pool.name != ROOT_POOL:  # validate_tree later refuses a pool of that name
            stack += sorted(children[pool.name], key=attrgetter("name"), reverse=True)
    return result


def _about(tree: str, pool: str, warnings: Iterable[str]) -> tuple[str, ...]:
    where = f"pool {quoted(pool)}" if pool else f"pool tree {quoted(tree)}"
    return tuple(f"{where}: {warning}" for warning in warnings)


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """Put ``where`` before the text of a CommandError that is raised inside the context."""
    try:
        yield
    except CommandError as error:
        raise CommandError(f"{where}: {error}", error.code, error.attributes, error.inner) from None


_HANDLERS: Final[Mapping[type[msgspec.Struct], Callable[[_Context, Any], Outcome]]] = {
    CreateTree: _create_tree,
    ChangeTree: _change_tree,
    RemoveTree: _remove_tree,
    SetDefaultTree: _set_default_tree,
    CreatePool: _create_pool,
    ChangePool: _change_pool,
    RemovePool: _remove_pool,
    MovePool: _move_pool,
    TransferPoolResources: _transfer,
}
