"""Nodes at paths of the ``yt`` protocol: trees, pools, hosts and the orchid (yt_protocol.md 6).

``//sys/pool_trees`` and ``//sys/pools`` show the configuration as it was set, explicit pools only;
``//sys/scheduler/orchid`` shows the live state."""

from __future__ import annotations

import asyncio
import copy
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from cpumond import __version__
from cpumond.api.permissions import encode_acl
from cpumond.api.yt import orchid
from cpumond.api.yt.lazy import MISSING, Lazy, fixed, iso_time, materialise
from cpumond.api.yt.values import Attributed, YtError, quote_text
from cpumond.api.yt.ypath import YPath, escape_literal
from cpumond.core.words import nearest
from cpumond.fairshare.result import UpdateResult
from cpumond.scheduler.access import Rights, read_access
from cpumond.scheduler.elements import Node
from cpumond.scheduler.model import (
    RESOLVE,
    ROOT_POOL,
    CommandError,
    Config,
    PoolConfig,
    PoolSettings,
    TreeConfig,
    TreeSettings,
)
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.attributes import CONFIG, Edit, canonical_name, is_option, read_attribute
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, ConfigCommand, SetDefaultTree
from cpumond.scheduler.settings.values import REMOVE
from cpumond.scheduler.state.node_commands import DrainNode, NodeCommand, SetNodeTags, UncordonNode

Edits = tuple[Edit, ...]

DISABLE: Final = "disable_scheduler_jobs"
TAGS: Final = "a list of tags, for example [ssd;rack1]"
DEFAULT_TREE: Final = "default_tree"
POOL_TREES: Final = "scheduler_pool_tree_map"

MAX_TURN_S: Final = 0.003
"""Maximum seconds for which a large answer may block other requests at a time."""


class Turn:
    """Lets other requests run while a large answer is made, part by part."""

    def __init__(self, longest_s: float = MAX_TURN_S) -> None:
        self._longest_s = longest_s
        self._begun = time.perf_counter()

    async def give(self) -> None:
        """Let other requests run if it is their turn; parts of the answer made afterwards show a later state."""
        if time.perf_counter() - self._begun > self._longest_s:
            await asyncio.sleep(0)
            self._begun = time.perf_counter()


Make = Callable[[str, str], "CypressNode | None"]
"""Makes a node from its path and name; returns None if there is no object of that name."""
Read = Callable[["CypressNode"], Any]


@dataclass(slots=True, eq=False, kw_only=True)
class CypressNode:
    """A node at a path, made for one request."""

    backend: Cypress
    path: str
    name: str
    type: str = "map_node"
    id: str = ""
    """An id that never changes; "" for a node that is made from the path."""
    is_opaque: bool = False
    """Whether ``get`` of this node, or of a node above it, shows just an entity (``#``) for this node."""
    names: Callable[[], Iterable[str]] = tuple
    make_child: Make = lambda _path, _name: None
    explain_child: Callable[[str], str] | None = None
    """Returns a hint about a missing child, "" for no hint. If no function is given, the hint is the nearest name."""
    system: Mapping[str, Read] = field(default_factory=lambda: _SYSTEM)
    """Attributes that the node computes itself."""
    stored: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that were set."""
    change_by: Callable[[Edits], ConfigCommand | NodeCommand] | None = None
    tree: TreeConfig | None = None
    pool: PoolConfig | None = None
    """The pool at this path; None for the tree itself."""
    value: Any = MISSING
    """The value, for a place in the orchid."""

    def __post_init__(self) -> None:
        self.id = self.id or f"{zlib.crc32(self.path.encode('utf-8', 'surrogateescape')):x}-0-0-1"

    def find(self, name: str) -> CypressNode | None:
        return self.make_child(self.child_path(name), name)

    def explain(self, name: str) -> str:
        """Return a hint about a missing child; "" for no hint."""
        if self.explain_child is not None:
            return self.explain_child(name)
        near = nearest(name, self.names())
        return f'did you mean "{near}"?' if near else ""

    def child_path(self, name: str) -> str:
        return ("/" if self.path == "/" else self.path) + "/" + escape_literal(name)

    async def get(self, attributes: Sequence[str], turn: Turn) -> Any:
        """Return the answer to ``get``: a map of the children, each with those of ``attributes`` that the child has."""
        if self.is_opaque:
            return self.with_attributes(None, attributes)
        shown = {}
        for name in list(self.names()):
            child = self.find(name)
            if child is not None:
                shown[name] = await child.get(attributes, turn)
                await turn.give()
        return self.with_attributes(shown, attributes)

    def with_attributes(self, value: Any, attributes: Sequence[str]) -> Any:
        """Return ``value`` with those of ``attributes`` that the node has."""
        found = {}
        for name in self._known(attributes):
            try:
                found[name] = self.attribute((name,))
            except CommandError as error:
                if error.code != RESOLVE:
                    raise
        return Attributed(value, found) if found else value

    def _known(self, names: Iterable[str]) -> list[str]:
        """Return the names that may be attributes. An error for each other name would cost more than this check."""
        given, has_options = {*self.system, *self.stored}, self.tree is not None
        if has_options:
            given.update(self.stored.get(CONFIG, ()))
        return [
            name
            for name in names
            if not given.isdisjoint((name, name.replace("-", "_")))
            or (has_options and (canonical_name(self.kind, name) in given or self._has_default(name)))
        ]

    @property
    def is_value(self) -> bool:
        return self.value is not MISSING

    @property
    def pool_name(self) -> str:
        """Name of the pool; for a tree the name of its root pool."""
        return ROOT_POOL if self.pool is None else self.pool.name

    @property
    def kind(self) -> Literal["pool", "tree"]:
        return "tree" if self.tree is not None and self.pool is None else "pool"

    def _has_default(self, name: str) -> bool:
        """Whether an option that is not set is shown with its default: true for a tree's options, not for a pool's."""
        return self.kind == "tree" and is_option("tree", name)

    def attribute(self, keys: Sequence[str], with_defaults: bool = True) -> Any:
        """Return the answer to ``get @keys``; without keys, all set attributes. Raises CommandError (RESOLVE)."""
        if not keys:
            return {**{name: read(self) for name, read in self.system.items()}, **self.stored}
        name = keys[0].replace("-", "_")
        if name in self.system and name not in self.stored:
            return _descend({keys[0]: self.system[name](self)}, keys)
        if self.tree is None:
            return _descend(self.stored, keys)
        try:
            return _read_option(self, keys)
        except CommandError:
            if not (with_defaults and self._has_default(keys[0])):
                raise
            known = orchid.tree_options(self.backend.scheduler.state.trees[self.tree.name])
            if name not in known:
                raise
            return _descend({keys[0]: known[name]}, keys)

    def change(self, edits: Edits) -> ConfigCommand | NodeCommand:
        """Return the command that changes attributes. Raises YtError if this node's cannot be changed."""
        if self.change_by is None:
            raise YtError(f"Attributes of {self.path} cannot be changed")
        return self.change_by(edits)


_SYSTEM: Final[Mapping[str, Read]] = {
    "id": lambda node: node.id,
    "type": lambda node: node.type,
    "name": lambda node: node.name,
    "key": lambda node: node.name,
    "path": lambda node: node.path,
    "parent_name": lambda node: node.path.rpartition("/")[0].rpartition("/")[2],
    "count": lambda node: sum(1 for _ in node.names()),
    "account": lambda _: "sys",
    "resource_usage": lambda _: {"disk_space": 0, "node_count": 1},
    "ref_counter": lambda _: 1,
    "builtin": lambda _: False,
    "creation_time": lambda node: node.backend.started,
    "modification_time": lambda node: node.backend.started,
    "access_time": lambda node: node.backend.started,
}
"""Attributes of every node."""


def _settings(node: CypressNode) -> TreeSettings | PoolSettings:
    assert node.tree is not None
    return node.tree.settings if node.pool is None else node.pool.settings


def _effective_acl(node: CypressNode) -> Any:
    assert node.tree is not None
    return encode_acl(each.entry for each in read_access(node.tree, node.pool_name).entries)


_OF_TREE: Final[Mapping[str, Read]] = {
    **_SYSTEM,
    "acl": lambda node: encode_acl(_settings(node).acl),
    "inherit_acl": lambda node: _settings(node).inherit_acl,
    "effective_acl": _effective_acl,
}


_OF_TREE_ITSELF: Final[Mapping[str, Read]] = {**_OF_TREE, "config": lambda _: {}}
"""``config`` exists even if nothing is set in it, as in YTsaurus."""


def _of_pool(read: Callable[[TreeConfig, PoolConfig], Any]) -> Read:
    return lambda node: read(node.tree, node.pool)  # type: ignore[arg-type]


_OF_POOL: Final[Mapping[str, Read]] = {
    **_OF_TREE,
    "parent_name": _of_pool(lambda _, pool: pool.parent),
    "path": _of_pool(lambda tree, pool: _pool_path(tree, pool.name)),
    "full_path": _of_pool(
        lambda tree, pool: _pool_path(tree, pool.name).removeprefix(f"//sys/pool_trees/{escape_literal(tree.name)}")
    ),
    "parent_id": _of_pool(lambda tree, pool: tree.id if pool.parent == ROOT_POOL else tree.pools[pool.parent].id),
    "pool_tree": _of_pool(lambda tree, _: tree.name),
}

_OF_LINK: Final[Mapping[str, Read]] = {
    **_SYSTEM,
    "target_path": lambda node: f"//sys/pool_trees/{escape_literal(node.backend.config.default_tree)}",
    "broken": lambda node: not node.backend.config.default_tree,
}


def _descend(value: Any, keys: Sequence[str]) -> Any:
    for depth, key in enumerate(keys):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and _is_index(key, value):
            value = value[int(key)]
        else:
            near = nearest(key, value) if isinstance(value, Mapping) else ""
            hint = f'; did you mean "{near}"?' if near else ""
            raise CommandError(f"Attribute {quote_text('/'.join(keys[: depth + 1]))} is not found{hint}", RESOLVE)
    return value


def _is_index(text: str, values: Sequence[Any]) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 10 and -len(values) <= int(text) < len(values)


def _last_value(path: str, edits: Edits, name: str, kind: type, wanted: str, known: Sequence[str] | None = None) -> Any:
    """Return the last value in edits of one attribute. ``known``: all that can be changed. Raises YtError."""
    for edit in edits:
        if edit.path != (name,):
            what = f"attributes that can be changed, one at a time: {', '.join(known)}" if known else ""
            raise YtError(f"{path} has {what or f'one attribute that can be changed: {name}'}")
        if edit.value is not REMOVE and not isinstance(edit.value, kind):
            raise YtError(f"{name}: must be {wanted}, not {quote_text(edit.value)}")
    return edits[-1].value


def _pool_path(tree: TreeConfig, name: str) -> str:
    steps: list[str] = []
    while name != ROOT_POOL:
        steps.append(name)
        name = tree.pools[name].parent
    return "/".join(["//sys/pool_trees", *map(escape_literal, (tree.name, *reversed(steps)))])


def _read_option(node: CypressNode, keys: Sequence[str]) -> Any:
    """Return a stored attribute. If it is an option that is not set, the error names the value in force."""
    kind, item = node.kind, node.pool or node.tree
    assert item is not None
    try:
        return read_attribute(kind, item, keys)
    except CommandError:
        if len(keys) == 1 and is_option(kind, keys[0]):
            value = getattr(item.settings, canonical_name(kind, keys[0]))
            holds = "" if value is None or not isinstance(value, str | int | float) else f"; {_literal(value)} applies"
            raise CommandError(f"Attribute {quote_text(keys[0])} is not found: it is not set{holds}", RESOLVE) from None
        raise


def _literal(value: str | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote_text(value) if isinstance(value, str) else f"{value:g}"


_KINDS: Final = {bool: "boolean", int: "int64", float: "double", str: "string", list: "list", type(None): "entity"}


async def materialise_in_parts(value: Any, pause_s: float = MAX_TURN_S) -> Any:
    """Like ``materialise``, but other requests get turns, because a tree may have thousands of pools."""
    turn = Turn(pause_s)

    async def convert(value: Any) -> Any:
        if not isinstance(value, Lazy) or value.is_whole:
            return materialise(value)
        shown = {}
        for name, part in value.parts():
            shown[name] = await convert(part)
            await turn.give()
        return shown

    return await convert(value)


class Cypress:
    """All objects of one scheduler to which paths lead."""

    def __init__(self, scheduler: Scheduler, cluster_name: str, version: str = f"{__version__}-cpumond") -> None:
        self.scheduler = scheduler
        self.cluster_name = cluster_name
        self.version = version
        self.started: str = iso_time(scheduler.started_at)
        self.user = User("")
        """The user of the request; set by ``seen_by``."""
        self._children: list[tuple[TreeConfig, dict[str, list[str]]]] = []
        """Pools' children in the last tree (at most one entry); copies made by ``seen_by`` share this list."""

    def seen_by(self, user: User) -> Cypress:
        """Return a copy that shows only objects that the user may see."""
        seen = copy.copy(self)
        seen.user = user
        return seen

    def rights(self) -> Rights:
        return Rights(self.scheduler.state, self.user)

    @property
    def config(self) -> Config:
        return self.scheduler.state.config

    def results(self) -> dict[str, UpdateResult | None]:
        """Tree -> result of its last update."""
        return {name: updates.result for name, updates in self.scheduler.updates.items()}

    def children_of(self, tree: TreeConfig) -> Mapping[str, Sequence[str]]:
        """Pool -> names of its children; cached for the tree that was requested last."""
        if not self._children or self._children[0][0] is not tree:
            children: dict[str, list[str]] = {}
            for pool in tree.pools.values():
                children.setdefault(pool.parent, []).append(pool.name)
            self._children[:] = [(tree, children)]
        return self._children[0][1]

    def _root(self) -> CypressNode:
        named = {"cluster_name": self.cluster_name}
        instances = self._directory({self.cluster_name: self._directory({"orchid": self._orchid})})
        children: dict[str, Make] = {
            "cluster_nodes": self._cluster_nodes,
            "pool_trees": self._pool_trees,
            "pools": partial(self._node, type="link", is_opaque=True, system=_OF_LINK),
            "scheduler": self._directory({"instances": instances, "orchid": self._orchid}),
        }
        return self._directory({"sys": self._directory(children, named)}, named)("/", "")

    def _node(self, path: str, name: str, **more: Any) -> CypressNode:
        return CypressNode(backend=self, path=path, name=name, **more)

    def _directory(
        self, children: Mapping[str, Make], attributes: Mapping[str, Any] | None = None
    ) -> Callable[..., CypressNode]:
        """Return a function that makes a node with the given children and attributes."""

        def make_child(path: str, name: str) -> CypressNode | None:
            return children[name](path, name) if name in children else None

        return partial(self._node, names=lambda: children, make_child=make_child, stored=attributes or {})

    def _orchid(self, path: str, name: str) -> CypressNode:
        service = {"name": "scheduler", "version": self.version, "start_time": self.started}
        parts: dict[str, Callable[[], Any]] = {
            "scheduler": lambda: orchid.scheduler_orchid(self.rights(), self.results()),
            "service": lambda: service,
        }
        return self._document(fixed(parts), path, name, "orchid")

    def _document(self, value: Any, path: str, name: str, kind: str = "") -> CypressNode:
        """Return a node for a place in the orchid, which is read-only."""

        def make_child(path: str, name: str) -> CypressNode | None:
            if isinstance(value, Mapping):
                found = value.get(name, MISSING)
            else:
                found = value[int(name)] if isinstance(value, list) and _is_index(name, value) else MISSING
            return None if found is MISSING else self._document(found, path, name)

        return self._node(
            path, name, type=kind or f"{_KINDS.get(type(value), 'map')}_node", is_opaque=True,
            names=lambda: value if isinstance(value, Mapping) else (), make_child=make_child,
            explain_child=value.explain if isinstance(value, Lazy) else None, value=value,
        )  # fmt: skip

    def _cluster_nodes(self, path: str, name: str) -> CypressNode:
        nodes = orchid.nodes_by_address(self.scheduler.state)
        return self._directory({address: partial(self._host, node) for address, node in nodes.items()})(path, name)

    def _host(self, node: Node, path: str, name: str) -> CypressNode:
        info = orchid.node_info(node)
        info["resource_usage"] = {"disk_space": 0, **info["resource_usage"]}  # `yt list -l` reads this key

        def change(edits: Edits) -> NodeCommand:
            """``disable_scheduler_jobs`` drains the node, as in YTsaurus: its jobs are interrupted, and none starts."""
            known = (DISABLE, orchid.USER_TAGS)
            if edits[-1].path != (orchid.USER_TAGS,):
                is_on = _last_value(path, edits, DISABLE, bool, "%true or %false", known)
                return DrainNode(node.id) if is_on else UncordonNode(node.id)
            tags = _last_value(path, edits, orchid.USER_TAGS, list, TAGS, known) or []
            if not all(isinstance(tag, str) for tag in tags):
                raise YtError(f"{orchid.USER_TAGS}: must be {TAGS}, not {quote_text(tags)}")
            return SetNodeTags(node.id, tags=tuple(tags))

        return self._node(path, name, type="cluster_node", stored=info, change_by=change)

    def _pool_trees(self, path: str, name: str) -> CypressNode:
        def make_child(path: str, name: str) -> CypressNode | None:
            tree = self.config.trees.get(name)
            return None if tree is None else self._tree(tree, path)

        def change(edits: Edits) -> ConfigCommand:
            return SetDefaultTree(_last_value(path, edits, DEFAULT_TREE, str, "the name of a pool tree"))

        default = self.config.default_tree
        return self._node(
            path, name, type=POOL_TREES, names=lambda: self.config.trees, make_child=make_child,
            stored={DEFAULT_TREE: default} if default else {}, change_by=change,
        )  # fmt: skip

    def _tree(self, tree: TreeConfig, path: str) -> CypressNode:
        return self._pools_of(tree, None, path, lambda edits: ChangeTree(tree.name, edits))

    def _pool(self, tree: TreeConfig, pool: PoolConfig, path: str) -> CypressNode:
        return self._pools_of(tree, pool, path, lambda edits: ChangePool(tree.name, pool.name, edits))

    def _pools_of(
        self, tree: TreeConfig, pool: PoolConfig | None, path: str, change: Callable[[Edits], ConfigCommand]
    ) -> CypressNode:
        """Return the node of a tree or of an explicit pool; both can contain pools."""
        inside, item = ROOT_POOL if pool is None else pool.name, pool or tree

        def make_child(path: str, name: str) -> CypressNode | None:
            found = tree.pools.get(name)
            return None if found is None or found.parent != inside else self._pool(tree, found, path)

        return self._node(
            path, item.name, type="scheduler_pool_tree" if pool is None else "scheduler_pool", id=item.id,
            names=lambda: self.children_of(tree).get(inside, ()), make_child=make_child,
            explain_child=lambda name: self._explain_pool(tree, name),
            system=_OF_TREE_ITSELF if pool is None else _OF_POOL, stored=item.attributes, change_by=change, tree=tree,
            pool=pool,
        )  # fmt: skip

    def _explain_pool(self, tree: TreeConfig, name: str) -> str:
        """Return a hint with the path of a pool that the request looked for at a wrong path."""
        if name in tree.pools:
            return f'pool "{name}" is at {_pool_path(tree, name)}'
        if name in self.scheduler.state.trees[tree.name].pools:
            return (
                f'pool "{name}" is ephemeral and has no attributes of its own; it is shown at '
                f"//sys/scheduler/orchid/scheduler/pool_trees/{escape_literal(tree.name)}/pools/{escape_literal(name)}"
            )
        near = nearest(name, tree.pools)
        return f"did you mean {_pool_path(tree, near)}?" if near else ""

    def _default_tree(self, path: str) -> CypressNode:
        """Return the target of the link ``//sys/pools``. Raises CommandError with code RESOLVE."""
        tree = self.config.trees.get(self.config.default_tree)
        if tree is None:
            raise CommandError(
                f"{path} is a link to the default pool tree, which does not exist; set //sys/pool_trees/@default_tree",
                RESOLVE,
            )
        return self._tree(tree, path)

    def resolve(self, path: YPath, with_hints: bool = True) -> CypressNode:
        """Return the node of a path, ignoring its attribute. Raises YtError with code RESOLVE; hints cost time."""
        node = self._root() if path.root == "/" else self._find_object(path)
        for position, step in enumerate(path.steps):
            child = node.find(step)
            if child is None:
                hint = node.explain(step) if with_hints else ""
                text = f'Node {node.path} has no child with key "{step}"'
                raise _unresolved(path, YtError(text, RESOLVE, inner=[YtError(hint, RESOLVE)] if hint else []))
            is_itself = position == len(path.steps) - 1 and position in path.suppress_link
            if child.type == "link" and not is_itself:
                try:
                    child = self._default_tree(child.path)
                except CommandError as error:
                    raise _unresolved(path, YtError(str(error), RESOLVE)) from None
            node = child
        return node

    def _find_object(self, path: YPath) -> CypressNode:
        object_id = path.root.removeprefix("#")
        for tree in self.config.trees.values():
            if tree.id == object_id:
                return self._tree(tree, f"//sys/pool_trees/{escape_literal(tree.name)}")
            for pool in tree.pools.values():
                if pool.id == object_id:
                    return self._pool(tree, pool, _pool_path(tree, pool.name))
        raise _unresolved(path, YtError(f"No such object {object_id}", RESOLVE))

    def read(self, path: YPath, with_hints: bool = True, with_defaults: bool = True) -> Any:
        """Return an attribute's value. ``with_defaults``: also of a tree's unset options. Raises YtError (RESOLVE)."""
        assert path.attribute is not None
        node = self.resolve(path, with_hints)
        try:
            return node.attribute(path.attribute, with_defaults)
        except CommandError as error:
            if error.code != RESOLVE:
                raise
            raise _unresolved(path, YtError(str(error), RESOLVE)) from None


def _unresolved(path: YPath, inner: YtError) -> YtError:
    return YtError(f"Error resolving path {path}", RESOLVE, {"path": str(path)}, [inner])
