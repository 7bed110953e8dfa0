"""Where paths of the ``yt`` protocol lead to: trees, pools, hosts and the orchid (yt_protocol.md 6).

``//sys/pool_trees`` and ``//sys/pools`` show the configuration as it was set, explicit pools only;
``//sys/scheduler/orchid`` shows what lives.
"""

from __future__ import annotations

import asyncio
import copy
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from cpumond import __version__
from cpumond.api.permissions import show_acl
from cpumond.api.yt import orchid
from cpumond.api.yt.lazy import MISSING, Description, Lazy, fixed, iso_time, materialise
from cpumond.api.yt.values import Attributed, YtError, quote_text
from cpumond.api.yt.ypath import YPath, escape_literal
from cpumond.core.words import nearest
from cpumond.fairshare.result import UpdateResult
from cpumond.scheduler.access import Rights, read_access
from cpumond.scheduler.elements import Node
from cpumond.scheduler.model import RESOLVE, ROOT_POOL, CommandError, Config, PoolConfig, TreeConfig
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.attributes import CONFIG, Edit, canonical_name, is_option, read_attribute
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, ConfigCommand, SetDefaultTree
from cpumond.scheduler.settings.values import REMOVE
from cpumond.scheduler.state.node_commands import DrainNode, NodeCommand, UncordonNode

Edits = tuple[Edit, ...]

DISABLE: Final = "disable_scheduler_jobs"

MAX_TURN_S: Final = 0.003
"""How long a large answer may hold up other requests at a time."""


class Turn:
    """Lets other requests have their turn while a large answer is made."""

    def __init__(self, longest_s: float = MAX_TURN_S) -> None:
        self._longest_s = longest_s
        self._begun = time.perf_counter()

    async def give(self) -> None:
        """Let other requests go on if it is their turn; what is shown next is as of then."""
        if time.perf_counter() - self._begun > self._longest_s:
            await asyncio.sleep(0)
            self._begun = time.perf_counter()


Make = Callable[[str, str], "CypressNode"]
"""Makes a node of its path and name."""


class CypressNode:
    """What a path leads to. Made for one request."""

    type = "map_node"
    is_opaque = False
    """Whether a ``get`` of a node above shows this one as an entity."""

    def __init__(self, backend: Cypress, path: str, name: str) -> None:
        self.backend = backend
        self.path = path
        self.name = name

    @property
    def id(self) -> str:
        """An id of its own that never changes."""
        return f"{zlib.crc32(self.path.encode('utf-8', 'surrogateescape')):x}-0-0-1"

    def names(self) -> Iterable[str]:
        return ()

    def find(self, name: str) -> CypressNode | None:
        return None

    def explain(self, name: str) -> str:
        """A hint about a child that is not there; "" for none."""
        near = nearest(name, self.names())
        return f'did you mean "{near}"?' if near else ""

    def child_path(self, name: str) -> str:
        return ("/" if self.path == "/" else self.path) + "/" + escape_literal(name)

    async def show(self, attributes: Sequence[str], turn: Turn) -> Any:
        """What ``get`` answers: children as a map, with those of ``attributes`` that each has."""
        shown = {}
        for name in list(self.names()):
            child = self.find(name)
            if child is None:
                continue
            is_opaque = child.is_opaque
            shown[name] = child.with_attributes(None, attributes) if is_opaque else await child.show(attributes, turn)
            await turn.give()
        return self.with_attributes(shown, attributes)

    def with_attributes(self, value: Any, attributes: Sequence[str]) -> Any:
        """``value`` with those of the attributes that the node has."""
        found = {}
        for name in self.known(attributes):
            try:
                found[name] = self.attribute((name,))
            except CommandError as error:
                if error.code != RESOLVE:
                    raise
        return Attributed(value, found) if found else value

    def known(self, names: Iterable[str]) -> list[str]:
        """Those of the names that may be attributes: the error for each other one would cost more than those."""
        given = {*self.system(), *self.stored()}
        return [name for name in names if name in given or name.replace("-", "_") in given]

    def system(self) -> dict[str, Callable[[], Any]]:
        """Attributes that every node answers by itself."""
        started = self.backend.started
        return {
            "id": lambda: self.id,
            "type": lambda: self.type,
            "name": lambda: self.name,
            "key": lambda: self.name,
            "path": lambda: self.path,
            "parent_name": self.parent_name,
            "count": lambda: sum(1 for _ in self.names()),
            "account": lambda: "sys",
            "resource_usage": lambda: {"disk_space": 0, "node_count": 1},
            "ref_counter": lambda: 1,
            "builtin": lambda: False,
            "creation_time": lambda: started,
            "modification_time": lambda: started,
            "access_time": lambda: started,
        }

    def parent_name(self) -> str:
        return self.path.rpartition("/")[0].rpartition("/")[2]

    def stored(self) -> Mapping[str, Any]:
        """Attributes that were set."""
        return {}

    def read_stored(self, keys: Sequence[str]) -> Any:
        """A stored attribute, or what is inside of it. Raises CommandError with code RESOLVE."""
        return _descend(self.stored(), keys)

    def attribute(self, keys: Sequence[str]) -> Any:
        """What ``get @keys`` answers, () for all attributes. Raises CommandError with code RESOLVE."""
        system = self.system()
        if not keys:
            return {**{name: read() for name, read in system.items()}, **self.stored()}
        name = keys[0].replace("-", "_")
        if name in system and name not in self.stored():
            return _descend({keys[0]: system[name]()}, keys)
        return self.read_stored(keys)

    def change(self, edits: Edits) -> ConfigCommand | NodeCommand:
        """The command that changes attributes. Raises YtError where they cannot be changed."""
        raise YtError(f"Attributes of {self.path} cannot be changed")


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


class _Directory(CypressNode):
    """A node with fixed children and attributes."""

    def __init__(
        self,
        backend: Cypress,
        path: str,
        name: str,
        children: Mapping[str, Make],
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(backend, path, name)
        self._children = children
        self._attributes = attributes or {}

    def names(self) -> Iterable[str]:
        return self._children

    def find(self, name: str) -> CypressNode | None:
        make = self._children.get(name)
        return None if make is None else make(self.child_path(name), name)

    def stored(self) -> Mapping[str, Any]:
        return self._attributes


class _Host(_Directory):
    """A node of the cluster."""

    type = "cluster_node"

    def change(self, edits: Edits) -> NodeCommand:
        """``disable_scheduler_jobs`` drains it, as there: its jobs are interrupted, and none is started."""
        for edit in edits:
            if edit.path != (DISABLE,):
                raise YtError(f"{self.path} has one attribute that can be changed: {DISABLE}")
            if edit.value is not REMOVE and not isinstance(edit.value, bool):
                raise YtError(f"{DISABLE}: must be %true or %false, not {quote_text(edit.value)}")
        node_id = str(self.stored()["id"])
        return DrainNode(node_id) if edits[-1].value else UncordonNode(node_id)


class PoolTrees(CypressNode):
    """``//sys/pool_trees``."""

    type = "scheduler_pool_tree_map"

    def names(self) -> Iterable[str]:
        return self.backend.config.trees

    def find(self, name: str) -> CypressNode | None:
        tree = self.backend.config.trees.get(name)
        return None if tree is None else TreeNode(self.backend, self.child_path(name), tree)

    def stored(self) -> Mapping[str, Any]:
        default = self.backend.config.default_tree
        return {"default_tree": default} if default else {}

    def change(self, edits: Edits) -> ConfigCommand:
        for edit in edits:
            if edit.path != ("default_tree",):
                raise YtError(f"{self.path} has one attribute that can be changed: default_tree")
            if edit.value is not REMOVE and not isinstance(edit.value, str):
                raise YtError(f"default_tree: must be the name of a pool tree, not {quote_text(edit.value)}")
        return SetDefaultTree(edits[-1].value)


class PoolParent(CypressNode):
    """A tree or a pool: what pools are in."""

    tree: TreeConfig
    item: TreeConfig | PoolConfig
    pool_name: str

    @property
    def id(self) -> str:
        return self.item.id

    def stored(self) -> Mapping[str, Any]:
        return self.item.attributes

    def read_stored(self, keys: Sequence[str]) -> Any:
        return _read_option(self.item, keys)

    def known(self, names: Iterable[str]) -> list[str]:
        kind: Any = "pool" if isinstance(self.item, PoolConfig) else "tree"
        given = {*self.system(), *self.stored(), *self.stored().get(CONFIG, ())}
        return [name for name in names if name.replace("-", "_") in given or canonical_name(kind, name) in given]

    def system(self) -> dict[str, Callable[[], Any]]:
        settings = self.item.settings
        return {
            **super().system(),
            "acl": lambda: show_acl(settings.acl),
            "inherit_acl": lambda: settings.inherit_acl,
            "effective_acl": lambda: show_acl(each.entry for each in read_access(self.tree, self.pool_name).entries),
        }

    def names(self) -> Iterable[str]:
        return self.backend.children_of(self.tree).get(self.pool_name, ())

    def find(self, name: str) -> CypressNode | None:
        pool = self.tree.pools.get(name)
        if pool is None or pool.parent != self.pool_name:
            return None
        return PoolNode(self.backend, self.child_path(name), self.tree, pool)

    def explain(self, name: str) -> str:
        if name in self.tree.pools:
            return f'pool "{name}" is at {_pool_path(self.tree, name)}'
        if name in self.backend.scheduler.state.trees[self.tree.name].pools:
            return (
                f'pool "{name}" is ephemeral and has no attributes of its own; it is shown at '
                f"//sys/scheduler/orchid/scheduler/pool_trees/{escape_literal(self.tree.name)}/pools/"
                f"{escape_literal(name)}"
            )
        near = nearest(name, self.tree.pools)
        return f"did you mean {_pool_path(self.tree, near)}?" if near else ""


def _pool_path(tree: TreeConfig, name: str) -> str:
    """The path of an explicit pool."""
    steps: list[str] = []
    while name != ROOT_POOL:
        steps.append(name)
        name = tree.pools[name].parent
    return "/".join(["//sys/pool_trees", *map(escape_literal, (tree.name, *reversed(steps)))])


class TreeNode(PoolParent):
    """A pool tree."""

    type = "scheduler_pool_tree"

    def __init__(self, backend: Cypress, path: str, tree: TreeConfig) -> None:
        super().__init__(backend, path, tree.name)
        self.tree = self.item = tree
        self.pool_name = ROOT_POOL

    def change(self, edits: Edits) -> ConfigCommand:
        return ChangeTree(self.tree.name, edits)


class PoolNode(PoolParent):
    """An explicit pool."""

    type = "scheduler_pool"

    def __init__(self, backend: Cypress, path: str, tree: TreeConfig, pool: PoolConfig) -> None:
        super().__init__(backend, path, pool.name)
        self.tree = tree
        self.pool = self.item = pool
        self.pool_name = pool.name

    def parent_name(self) -> str:
        return self.pool.parent

    def system(self) -> dict[str, Callable[[], Any]]:
        parent = self.tree.pools.get(self.pool.parent)
        path = _pool_path(self.tree, self.pool.name)
        return {
            **super().system(),
            "path": lambda: path,
            "full_path": lambda: path.removeprefix(f"//sys/pool_trees/{escape_literal(self.tree.name)}"),
            "parent_id": lambda: self.tree.id if parent is None else parent.id,
            "pool_tree": lambda: self.tree.name,
        }

    def change(self, edits: Edits) -> ConfigCommand:
        return ChangePool(self.tree.name, self.pool.name, edits)


def _read_option(item: PoolConfig | TreeConfig, keys: Sequence[str]) -> Any:
    """A stored attribute; the error for an option that is not set tells the value in force."""
    kind: Any = "pool" if isinstance(item, PoolConfig) else "tree"
    try:
        return read_attribute(kind, item, keys)
    except CommandError:
        if len(keys) == 1 and is_option(kind, keys[0]):
            value = getattr(item.settings, canonical_name(kind, keys[0]))
            holds = "" if value is None or not isinstance(value, str | int | float) else f"; {_literal(value)} holds"
            raise CommandError(f"Attribute {quote_text(keys[0])} is not found: it is not set{holds}", RESOLVE) from None
        raise


def _literal(value: str | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote_text(value) if isinstance(value, str) else f"{value:g}"


class _Link(CypressNode):
    """``//sys/pools``: the default tree under another name."""

    type = "link"
    is_opaque = True

    def target(self) -> CypressNode:
        """Raises CommandError with code RESOLVE when there is no default tree."""
        tree = self.backend.config.trees.get(self.backend.config.default_tree)
        if tree is None:
            raise CommandError(
                f"{self.path} is a link to the default pool tree, there is none; set //sys/pool_trees/@default_tree",
                RESOLVE,
            )
        return TreeNode(self.backend, self.path, tree)

    def system(self) -> dict[str, Callable[[], Any]]:
        default = self.backend.config.default_tree
        return {
            **super().system(),
            "target_path": lambda: f"//sys/pool_trees/{escape_literal(default)}",
            "broken": lambda: not default,
        }

    async def show(self, attributes: Sequence[str], turn: Turn) -> Any:
        return self.with_attributes(None, attributes)


_KINDS: Final = {bool: "boolean", int: "int64", float: "double", str: "string", list: "list", type(None): "entity"}


class Document(CypressNode):
    """A place in the orchid; read-only."""

    is_opaque = True

    def __init__(self, backend: Cypress, path: str, name: str, value: Any) -> None:
        super().__init__(backend, path, name)
        self.value = value
        self.type = f"{_KINDS.get(type(value), 'map')}_node"

    def names(self) -> Iterable[str]:
        return self.value if isinstance(self.value, Mapping) else ()

    def find(self, name: str) -> CypressNode | None:
        if isinstance(self.value, Mapping):
            found = self.value.get(name, MISSING)
        else:
            is_item = isinstance(self.value, list) and _is_index(name, self.value)
            found = self.value[int(name)] if is_item else MISSING
        return None if found is MISSING else Document(self.backend, self.child_path(name), name, found)

    def explain(self, name: str) -> str:
        return self.value.explain(name) if isinstance(self.value, Lazy) else super().explain(name)


async def show_in_pieces(value: Any, pause_s: float = MAX_TURN_S) -> Any:
    """As ``materialise``; other requests get their turn in between, since a tree may have thousands of pools."""
    turn = Turn(pause_s)

    async def show(value: Any) -> Any:
        if not isinstance(value, Lazy) or isinstance(value, Description):
            return materialise(value)
        shown = {}
        for name, part in value.parts():
            shown[name] = await show(part)
            await turn.give()
        return shown

    return await show(value)


class Cypress:
    """All that paths lead to in one scheduler."""

    def __init__(self, scheduler: Scheduler, cluster_name: str, version: str = f"{__version__}-cpumond") -> None:
        self.scheduler = scheduler
        self.cluster_name = cluster_name
        self.version = version
        self.started = iso_time(scheduler.started_at)
        self.user: User | None = None
        """Who asks; None for one who may see everything."""
        self._children: list[tuple[TreeConfig, dict[str, list[str]]]] = []
        """At most one; what ``seen_by`` gives shares it."""

    def seen_by(self, user: User) -> Cypress:
        """The same, with what this user may see."""
        seen = copy.copy(self)
        seen.user = user
        return seen

    def rights(self) -> Rights | None:
        """Of who asks; None for one who may see everything."""
        return None if self.user is None else Rights(self.scheduler.state, self.user)

    @property
    def config(self) -> Config:
        return self.scheduler.state.config

    def results(self) -> dict[str, UpdateResult | None]:
        """Tree -> result of its last update."""
        return {name: updates.result for name, updates in self.scheduler.updates.items()}

    def children_of(self, tree: TreeConfig) -> Mapping[str, Sequence[str]]:
        """Pool -> names of its children; remembered for the tree that was last asked for."""
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
            "pool_trees": partial(PoolTrees, self),
            "pools": partial(_Link, self),
            "scheduler": self._directory({"instances": instances, "orchid": self._orchid}),
        }
        return _Directory(self, "/", "", {"sys": self._directory(children, named)}, named)

    def _directory(self, children: Mapping[str, Make], attributes: Mapping[str, Any] | None = None) -> Make:
        return lambda path, name: _Directory(self, path, name, children, attributes)

    def _orchid(self, path: str, name: str) -> CypressNode:
        service = {"name": "scheduler", "version": self.version, "start_time": self.started}
        parts: dict[str, Callable[[], Any]] = {
            "scheduler": lambda: orchid.scheduler_orchid(self.scheduler.state, self.results(), self.rights()),
            "service": lambda: service,
        }
        document = Document(self, path, name, fixed(parts))
        document.type = "orchid"
        return document

    def _cluster_nodes(self, path: str, name: str) -> CypressNode:
        def make_host(node: Node, path: str, name: str) -> CypressNode:
            info = orchid.node_info(node)
            info["resource_usage"] = {"disk_space": 0, **info["resource_usage"]}  # `yt list -l` reads it
            return _Host(self, path, name, {}, info)

        nodes = orchid.nodes_by_address(self.scheduler.state)
        return _Directory(self, path, name, {address: partial(make_host, node) for address, node in nodes.items()})

    def resolve(self, path: YPath, with_hints: bool = True) -> CypressNode:
        """The node that a path leads to, whatever its attribute. Raises YtError with code RESOLVE; hints cost time."""
        node = self._root() if path.root == "/" else self._find_object(path)
        for position, step in enumerate(path.steps):
            child = node.find(step)
            if child is None:
                hint = node.explain(step) if with_hints else ""
                inner = YtError(
                    f'Node {node.path} has no child with key "{step}"',
                    RESOLVE,
                    inner=[YtError(hint, RESOLVE)] if hint else [],
                )
                raise _unresolved(path, inner)
            is_itself = position == len(path.steps) - 1 and position in path.suppress_link
            if isinstance(child, _Link) and not is_itself:
                try:
                    child = child.target()
                except CommandError as error:
                    raise _unresolved(path, YtError(str(error), RESOLVE)) from None
            node = child
        return node

    def _find_object(self, path: YPath) -> CypressNode:
        object_id = path.root.removeprefix("#")
        for tree in self.config.trees.values():
            if tree.id == object_id:
                return TreeNode(self, f"//sys/pool_trees/{escape_literal(tree.name)}", tree)
            for pool in tree.pools.values():
                if pool.id == object_id:
                    return PoolNode(self, _pool_path(tree, pool.name), tree, pool)
        raise _unresolved(path, YtError(f"No such object {object_id}", RESOLVE))

    def read(self, path: YPath, with_hints: bool = True) -> Any:
        """The value of an attribute path. Raises YtError with code RESOLVE."""
        assert path.attribute is not None
        node = self.resolve(path, with_hints)
        try:
            return node.attribute(path.attribute)
        except CommandError as error:
            if error.code != RESOLVE:
                raise
            raise _unresolved(path, YtError(str(error), RESOLVE)) from None


def _unresolved(path: YPath, inner: YtError) -> YtError:
    return YtError(f"Error resolving path {path}", RESOLVE, {"path": str(path)}, [inner])
