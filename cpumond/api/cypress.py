"""What the commands of the ``yt`` protocol mean here: paths to trees, pools and the orchid, and operations.

yt_protocol.md 6 and 10. ``YtBackend`` answers one command after the other from the living state; what changes something
is a command of the scheduler, and is the only thing that waits. ``//sys/pool_trees`` and ``//sys/pools`` show the
configuration as it was set, explicit pools only; ``//sys/scheduler/orchid`` shows what lives.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from cpumond import __version__
from cpumond.api import orchid
from cpumond.api.formats import Attributed, YtError, quote_text, strip_attributes
from cpumond.api.lazy import MISSING, Description, Lazy, fixed, iso_time, materialise
from cpumond.api.tree_view import look_once
from cpumond.api.views import list_jobs, order_of_start
from cpumond.api.ypath import YPath, escape_literal, parse_ypath
from cpumond.api.yt import YtRequest, export_reply
from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.validate import nearest
from cpumond.scheduler import operations
from cpumond.scheduler.attributes import REMOVE, Edit, canonical_name, is_option, read_attribute
from cpumond.scheduler.config_commands import (
    ChangePool,
    ChangeTree,
    ConfigCommand,
    CreatePool,
    CreateTree,
    MovePool,
    RemovePool,
    RemoveTree,
    SetDefaultTree,
    TransferPoolResources,
)
from cpumond.scheduler.elements import Job, Node
from cpumond.scheduler.loop import MUTATION, Reply, Scheduler
from cpumond.scheduler.model import (
    ALREADY_EXISTS,
    NO_SUCH_JOB,
    NODE_OFFLINE,
    RESOLVE,
    ROOT_POOL,
    TIMEOUT,
    CommandError,
    Config,
    JobRecord,
    OperationRecord,
    PoolConfig,
    TreeConfig,
)
from cpumond.scheduler.store import Change
from cpumond.wire import MAX_LOG_BYTES

Edits = tuple[Edit, ...]

MAX_EDITS: Final = 1000
MAX_LISTED_OPERATIONS: Final = 1000
MAX_LISTED_BYTES: Final = 16 * 2**20
"""Of specifications in one answer, in memory."""
SPECIFICATIONS: Final = frozenset({"spec", "provided_spec", "full_spec", "unrecognized_spec"})
MAX_LISTED_JOBS: Final = 10_000
DEFAULT_LISTED_OPERATIONS: Final = 100
DEFAULT_LISTED_JOBS: Final = 1000

MAX_TURN_S: Final = 0.003
"""How long a large answer may hold up everybody else at a time."""

LISTED_ATTRIBUTES: Final = (
    "id", "type", "state", "authenticated_user", "start_time", "finish_time", "suspended", "brief_spec",
    "brief_progress", "runtime_parameters",
)  # fmt: skip
"""What ``list_operations`` says of an operation when nobody names ``attributes``."""


class Turn:
    """The time that a large answer has until others get theirs."""

    def __init__(self, longest_s: float = MAX_TURN_S) -> None:
        self._longest_s = longest_s
        self._begun = time.perf_counter()

    async def give(self) -> None:
        """Let others go on if it is their turn; what is shown next is as of then."""
        if time.perf_counter() - self._begun > self._longest_s:
            await asyncio.sleep(0)
            self._begun = time.perf_counter()


# --- nodes -------------------------------------------------------------------------------------------------------


class _CypressNode:
    """Something that a path leads to. Made for one request."""

    type = "map_node"
    is_opaque = False
    """A ``get`` of what is above shows it as an entity."""

    def __init__(self, backend: YtBackend, path: str, name: str) -> None:
        self.backend = backend
        self.path = path
        self.name = name

    @property
    def id(self) -> str:
        """An id of its own that never changes."""
        return f"{zlib.crc32(self.path.encode('utf-8', 'surrogateescape')):x}-0-0-1"

    def names(self) -> Iterable[str]:
        """Names of the children."""
        return ()

    def find(self, name: str) -> _CypressNode | None:
        """A child."""
        return None

    def explain(self, name: str) -> str:
        """What may help who looked for a child that is not there; "" for nothing."""
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
        if not attributes:
            return value
        found = {}
        for name in attributes:
            known = self.find_attribute((name,))
            if known is not MISSING:
                found[name] = known
        return Attributed(value, found) if found else value

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
        """Attributes that somebody has set."""
        return {}

    def read_stored(self, keys: Sequence[str]) -> Any:
        """One of them, or what is inside of it. Raises CommandError with code RESOLVE."""
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

    def find_attribute(self, keys: Sequence[str]) -> Any:
        """As ``attribute``; MISSING for what is not there."""
        try:
            return self.attribute(keys)
        except CommandError as error:
            if error.code != RESOLVE:
                raise
            return MISSING

    def change(self, edits: Edits) -> ConfigCommand:
        """The command that changes attributes. Raises YtError where nobody can change them."""
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


class _Directory(_CypressNode):
    """A node with fixed children and attributes."""

    def __init__(
        self,
        backend: YtBackend,
        path: str,
        name: str,
        children: Mapping[str, Callable[[str, str], _CypressNode]],
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(backend, path, name)
        self._children = children
        self._attributes = attributes or {}

    def names(self) -> Iterable[str]:
        return self._children

    def find(self, name: str) -> _CypressNode | None:
        make = self._children.get(name)
        return None if make is None else make(self.child_path(name), name)

    def stored(self) -> Mapping[str, Any]:
        return self._attributes


class _PoolTrees(_CypressNode):
    """``//sys/pool_trees``."""

    type = "scheduler_pool_tree_map"

    def names(self) -> Iterable[str]:
        return self.backend.config.trees

    def find(self, name: str) -> _CypressNode | None:
        tree = self.backend.config.trees.get(name)
        return None if tree is None else _TreeNode(self.backend, self.child_path(name), tree)

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


class _PoolParent(_CypressNode):
    """A tree or a pool: what pools are in."""

    tree: TreeConfig
    pool_name: str

    def names(self) -> Iterable[str]:
        return self.backend.children_of(self.tree).get(self.pool_name, ())

    def find(self, name: str) -> _CypressNode | None:
        pool = self.tree.pools.get(name)
        if pool is None or pool.parent != self.pool_name:
            return None
        return _PoolNode(self.backend, self.child_path(name), self.tree, pool)

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
    """Where an explicit pool is."""
    steps: list[str] = []
    while name != ROOT_POOL:
        steps.append(name)
        name = tree.pools[name].parent
    return "/".join(["//sys/pool_trees", *map(escape_literal, (tree.name, *reversed(steps)))])


class _TreeNode(_PoolParent):
    """A pool tree."""

    type = "scheduler_pool_tree"
    pool_name = ROOT_POOL

    def __init__(self, backend: YtBackend, path: str, tree: TreeConfig) -> None:
        super().__init__(backend, path, tree.name)
        self.tree = tree

    @property
    def id(self) -> str:
        return self.tree.id

    def stored(self) -> Mapping[str, Any]:
        return self.tree.attributes

    def read_stored(self, keys: Sequence[str]) -> Any:
        return _read_option(self.tree, keys)

    def change(self, edits: Edits) -> ConfigCommand:
        return ChangeTree(self.tree.name, edits)


class _PoolNode(_PoolParent):
    """An explicit pool."""

    type = "scheduler_pool"

    def __init__(self, backend: YtBackend, path: str, tree: TreeConfig, pool: PoolConfig) -> None:
        super().__init__(backend, path, pool.name)
        self.tree = tree
        self.pool = pool
        self.pool_name = pool.name

    @property
    def id(self) -> str:
        return self.pool.id

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

    def stored(self) -> Mapping[str, Any]:
        return self.pool.attributes

    def read_stored(self, keys: Sequence[str]) -> Any:
        return _read_option(self.pool, keys)

    def change(self, edits: Edits) -> ConfigCommand:
        return ChangePool(self.tree.name, self.pool.name, edits)


def _read_option(item: PoolConfig | TreeConfig, keys: Sequence[str]) -> Any:
    """A stored attribute; of an option that is not set the error says what holds."""
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


class _Link(_CypressNode):
    """``//sys/pools``: the default tree under another name."""

    type = "link"
    is_opaque = True

    def target(self) -> _CypressNode:
        """Raises CommandError with code RESOLVE when there is no default tree."""
        tree = self.backend.config.trees.get(self.backend.config.default_tree)
        if tree is None:
            raise CommandError(
                f"{self.path} is a link to the default pool tree, there is none; set //sys/pool_trees/@default_tree",
                RESOLVE,
            )
        return _TreeNode(self.backend, self.path, tree)

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


class _Document(_CypressNode):
    """A place in the orchid; read-only."""

    is_opaque = True

    def __init__(self, backend: YtBackend, path: str, name: str, value: Any) -> None:
        super().__init__(backend, path, name)
        self.value = value
        self.type = f"{_KINDS.get(type(value), 'map')}_node"

    def names(self) -> Iterable[str]:
        return self.value if isinstance(self.value, Mapping) else ()

    def find(self, name: str) -> _CypressNode | None:
        if isinstance(self.value, Mapping):
            found = self.value.get(name, MISSING)
        else:
            is_item = isinstance(self.value, list) and _is_index(name, self.value)
            found = self.value[int(name)] if is_item else MISSING
        return None if found is MISSING else _Document(self.backend, self.child_path(name), name, found)

    def explain(self, name: str) -> str:
        return self.value.explain(name) if isinstance(self.value, Lazy) else super().explain(name)


async def show_in_pieces(value: Any, pause_s: float = MAX_TURN_S) -> Any:
    """As ``materialise``; others get their turn in between, since a tree may have thousands of pools."""
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


# --- commands ----------------------------------------------------------------------------------------------------

Handler = Callable[["YtBackend", YtRequest], Awaitable[Any]]
_HANDLERS: dict[str, Handler] = {}


def _command(name: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS[name] = handler
        return handler

    return register


class YtBackend:
    """Answers the commands for one scheduler; a ``Backend`` of ``cpumond.api.yt``.

    Raises YtError and CommandError for what is refused, StoreError when a change cannot be stored.
    """

    def __init__(self, scheduler: Scheduler, cluster_name: str, version: str = f"{__version__}-cpumond") -> None:
        self.scheduler = scheduler
        self.cluster_name = cluster_name
        self.version = version
        self.started = iso_time(scheduler.started_at)
        self._children: tuple[TreeConfig, dict[str, list[str]]] | None = None

    async def __call__(self, request: YtRequest) -> Any:
        handler = _HANDLERS.get(request.command)
        if handler is None:
            raise YtError(f"Command {quote_text(request.command)} is not offered")
        return await handler(self, request)

    @property
    def config(self) -> Config:
        return self.scheduler.state.config

    def results(self) -> dict[str, UpdateResult | None]:
        """Tree -> result of its last update."""
        return {name: updates.result for name, updates in self.scheduler.updates.items()}

    def children_of(self, tree: TreeConfig) -> Mapping[str, Sequence[str]]:
        """Pool -> names of its children; remembered for the tree that was last asked for."""
        if self._children is None or self._children[0] is not tree:
            children: dict[str, list[str]] = {}
            for pool in tree.pools.values():
                children.setdefault(pool.parent, []).append(pool.name)
            self._children = (tree, children)
        return self._children[1]

    # Paths.

    def _root(self) -> _CypressNode:
        return _Directory(self, "/", "", {"sys": self._sys}, {"cluster_name": self.cluster_name})

    def _sys(self, path: str, name: str) -> _CypressNode:
        children: dict[str, Callable[[str, str], _CypressNode]] = {
            "cluster_nodes": self._cluster_nodes,
            "pool_trees": lambda path, name: _PoolTrees(self, path, name),
            "pools": lambda path, name: _Link(self, path, name),
            "scheduler": self._scheduler,
        }
        return _Directory(self, path, name, children, {"cluster_name": self.cluster_name})

    def _scheduler(self, path: str, name: str) -> _CypressNode:
        instance = {"orchid": self._orchid}

        def make_instance(path: str, name: str) -> _CypressNode:
            return _Directory(self, path, name, instance)

        def make_instances(path: str, name: str) -> _CypressNode:
            return _Directory(self, path, name, {self.cluster_name: make_instance})

        return _Directory(self, path, name, {"instances": make_instances, "orchid": self._orchid})

    def _orchid(self, path: str, name: str) -> _CypressNode:
        service = {
            "name": "scheduler",
            "version": self.version,
            "start_time": self.started,
        }
        parts: dict[str, Callable[[], Any]] = {
            "scheduler": lambda: orchid.scheduler_orchid(self.scheduler.state, self.results()),
            "service": lambda: service,
        }
        document = _Document(self, path, name, fixed(parts))
        document.type = "orchid"
        return document

    def _cluster_nodes(self, path: str, name: str) -> _CypressNode:
        def make_host(node: Node) -> Callable[[str, str], _CypressNode]:
            def make(path: str, name: str) -> _CypressNode:
                info = orchid.node_info(node)
                info["resource_usage"] = {"disk_space": 0, **info["resource_usage"]}  # `list -l` wants that
                host = _Directory(self, path, name, {}, info)
                host.type = "cluster_node"
                return host

            return make

        nodes = orchid.nodes_by_address(self.scheduler.state)
        return _Directory(self, path, name, {address: make_host(node) for address, node in nodes.items()})

    def resolve(self, path: YPath, with_hints: bool = True) -> _CypressNode:
        """The node that a path leads to, whatever its attribute. Raises YtError with code 500; hints cost time."""
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

    def _find_object(self, path: YPath) -> _CypressNode:
        object_id = path.root.removeprefix("#")
        for tree in self.config.trees.values():
            if tree.id == object_id:
                return _TreeNode(self, f"//sys/pool_trees/{escape_literal(tree.name)}", tree)
            for pool in tree.pools.values():
                if pool.id == object_id:
                    return _PoolNode(self, _pool_path(tree, pool.name), tree, pool)
        raise _unresolved(path, YtError(f"No such object {object_id}", RESOLVE))

    def read(self, path: YPath, with_hints: bool = True) -> Any:
        """The value of an attribute path. Raises YtError with code 500."""
        assert path.attribute is not None
        node = self.resolve(path, with_hints)
        try:
            return node.attribute(path.attribute)
        except CommandError as error:
            if error.code != RESOLVE:
                raise
            raise _unresolved(path, YtError(str(error), RESOLVE)) from None

    async def execute(self, command: Any, request: YtRequest, answer: Callable[[str], Any] = lambda _: {}) -> str:
        """Carry out a command of the scheduler; the id that it gives back.

        ``answer`` makes the request's whole answer of that id. It is stored together with the command under the
        request's mutation id, so that a repeat after a crash is answered and not run.
        """
        mutation_id = strip_attributes(request.parameters.get("mutation_id"))
        if not isinstance(mutation_id, str):
            return (await self.scheduler.execute(command, request.user)).id

        def remember(reply: Reply) -> Change:
            at_s = self.scheduler.clock.now()
            entry = export_reply(request.user, mutation_id, request.command, at_s, answer(reply.id))
            return Change(MUTATION, f"{request.user} {mutation_id}", msgspec.json.encode(entry))

        return (await self.scheduler.execute(command, request.user, remember)).id


def _unresolved(path: YPath, inner: YtError) -> YtError:
    return YtError(f"Error resolving path {path}", RESOLVE, {"path": str(path)}, [inner])


# Parameters.


def plain(value: Any) -> Any:
    """A value of the protocol without attributes on any level."""
    value = strip_attributes(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _path(request: YtRequest, name: str = "path") -> YPath:
    if name not in request.parameters:
        raise YtError(f'{request.command}: parameter "{name}" is missing')
    return parse_ypath(request.parameters[name])


def _text(request: YtRequest, name: str, otherwise: str | None = None) -> str:
    value = strip_attributes(request.parameters.get(name))
    if value is None and otherwise is not None:
        return otherwise
    if not isinstance(value, str):
        what = "is missing" if value is None else f"must be text, not {quote_text(value)}"
        raise YtError(f'{request.command}: parameter "{name}" {what}')
    return value


def _flag(request: YtRequest, name: str) -> bool:
    return strip_attributes(request.parameters.get(name)) is True


def _table(request: YtRequest, name: str) -> dict[str, Any]:
    value = plain(request.parameters.get(name, {}))
    if not isinstance(value, dict):
        raise YtError(f'{request.command}: parameter "{name}" must be a map, not {quote_text(value)}')
    return value


def _names(request: YtRequest, name: str) -> list[str] | None:
    value = plain(request.parameters.get(name))
    if isinstance(value, dict) and isinstance(value.get("keys"), list):
        value = value["keys"]
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise YtError(f'{request.command}: parameter "{name}" must be a list of names')
    return value


def _number(request: YtRequest, name: str, otherwise: int, most: int) -> int:
    value = plain(request.parameters.get(name))
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise YtError(f'{request.command}: parameter "{name}" must be a whole number, not {quote_text(value)}')
    return min(value, most)


def _time(request: YtRequest, name: str) -> float | None:
    """Seconds since 1970 of an ISO time or of microseconds since 1970."""
    value = plain(request.parameters.get(name))
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value / 1e6
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise YtError(
            f'{request.command}: parameter "{name}" must be a time such as 2026-11-20T23:23:17Z, not '
            f"{quote_text(value)}"
        ) from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


# --- reading -----------------------------------------------------------------------------------------------------


@_command("get")
async def _get(backend: YtBackend, request: YtRequest) -> Any:
    path = _path(request)
    if path.attribute is not None:
        return {"value": backend.read(path)}
    node, attributes = backend.resolve(path), _names(request, "attributes") or ()
    if isinstance(node, _Document):
        return {"value": node.with_attributes(await show_in_pieces(node.value), attributes)}
    return {"value": await node.show(attributes, Turn())}


@_command("list")
async def _list(backend: YtBackend, request: YtRequest) -> Any:
    path = _path(request)
    if path.attribute is not None:
        value = backend.read(path)
        if not isinstance(value, Mapping):
            raise YtError(f"{path} is no map: it has no children to list")
        return {"value": list(value)}
    node = backend.resolve(path)
    if isinstance(node, _Document) and not isinstance(node.value, Mapping):
        raise YtError(f"{path} is no map: it has no children to list")
    names = list(node.names())
    limit = _number(request, "max_size", len(names), len(names))
    attributes = _names(request, "attributes") or ()
    shown: list[Any] = names[:limit]
    if attributes:
        shown, turn = [], Turn()
        for name in names[:limit]:
            child = node.find(name)
            if child is not None:
                shown.append(child.with_attributes(name, attributes))
            await turn.give()
    return {"value": Attributed(shown, {"incomplete": True}) if limit < len(names) else shown}


@_command("exists")
async def _exists(backend: YtBackend, request: YtRequest) -> Any:
    path = _path(request)
    try:
        if path.attribute is None:
            backend.resolve(path, with_hints=False)
        else:
            backend.read(path, with_hints=False)
    except YtError as error:
        if error.code != RESOLVE:
            raise
        return {"value": False}
    return {"value": True}


# --- changing attributes -----------------------------------------------------------------------------------------


def _settable(backend: YtBackend, path: YPath) -> _CypressNode:
    """The node whose attributes are changed: never a link itself."""
    return backend.resolve(YPath(path.root, path.steps, path.attribute))


@_command("set")
async def _set(backend: YtBackend, request: YtRequest) -> Any:
    path, value = _path(request), plain(request.value)
    if path.attribute is None:
        raise YtError(
            f"{path} cannot be set as a whole; set an attribute, {path}/@name, or create and remove pools below it"
        )
    node = _settable(backend, path)
    if path.attribute:
        edits: list[Edit] = [Edit(path.attribute, value, _flag(request, "recursive"))]
    elif isinstance(value, dict):
        stale = _stale(node, value)
        edits = [*(Edit((name,), REMOVE) for name in stale), *(Edit((name,), item) for name, item in value.items())]
    else:
        raise YtError(f"{path}: the attributes of a node are a map, not {quote_text(value)}")
    if edits:
        await backend.execute(node.change(_limit(edits)), request)
    return {}


def _limit(edits: Sequence[Edit]) -> Edits:
    if len(edits) > MAX_EDITS:
        raise YtError(f"{len(edits)} attributes are more than the limit of {MAX_EDITS} at once; change some at a time")
    return tuple(edits)


def _stale(node: _CypressNode, value: Mapping[str, Any]) -> list[str]:
    """Stored attributes that a new set of attributes does not name."""
    kind: Any = "tree" if isinstance(node, _TreeNode) else "pool"
    given = {canonical_name(kind, name) for name in value}
    return [name for name in node.stored() if name not in given]


@_command("multiset_attributes")
async def _multiset(backend: YtBackend, request: YtRequest) -> Any:
    path, value = _path(request), plain(request.value)
    if path.attribute is None:
        raise YtError(f'multiset_attributes: the path ends with "/@", not as in {path}')
    if not isinstance(value, dict):
        raise YtError("multiset_attributes: the value is a map of attributes")
    node = _settable(backend, path)
    is_recursive = _flag(request, "recursive")
    edits = [Edit((*path.attribute, name), item, is_recursive) for name, item in value.items()]
    if edits:
        await backend.execute(node.change(_limit(edits)), request)
    return {}


@_command("remove")
async def _remove(backend: YtBackend, request: YtRequest) -> Any:
    path = _path(request)
    is_forced = _flag(request, "force")
    try:
        if path.attribute is not None:
            node = _settable(backend, path)
            if path.attribute and not is_forced:
                backend.read(YPath(path.root, path.steps, path.attribute))
            removed = [path.attribute] if path.attribute else [(name,) for name in node.stored()]
            if removed:
                await backend.execute(node.change(tuple(Edit(keys) for keys in removed)), request)
            return {}
        node = backend.resolve(path)
    except YtError as error:
        if is_forced and error.code == RESOLVE:
            return {}
        raise
    command: Any
    if isinstance(node, _PoolNode):
        command = RemovePool(node.tree.name, node.pool.name, _flag(request, "recursive"))
    elif isinstance(node, _TreeNode) and path.steps != ("sys", "pools"):
        command = RemoveTree(node.tree.name, _flag(request, "recursive"))
    else:
        raise YtError(f"{path} cannot be removed; pools, pool trees and their attributes can")
    await backend.execute(command, request)
    return {}


# --- creating and moving -----------------------------------------------------------------------------------------


@_command("create")
async def _create(backend: YtBackend, request: YtRequest) -> Any:
    kind = _text(request, "type")
    attributes = _table(request, "attributes")
    may_exist = _flag(request, "ignore_existing")
    if kind not in ("scheduler_pool", "scheduler_pool_tree", "map_node"):
        raise YtError(f'create: type {quote_text(kind)} is not offered; use "scheduler_pool" or "scheduler_pool_tree"')
    if request.parameters.get("path") is not None:
        return _node(await _create_at(backend, request, kind, attributes, may_exist))
    if kind == "map_node":
        raise YtError('create: parameter "path" is missing')
    name = attributes.pop("name", None)
    if not isinstance(name, str):
        raise YtError(f'create: a {kind} needs the attribute "name"')
    if kind == "scheduler_pool_tree":
        return _object(await backend.execute(CreateTree(name, attributes, may_exist), request, _object))
    tree = attributes.pop("pool_tree", None) or backend.config.default_tree
    parent = attributes.pop("parent_name", None) or ROOT_POOL
    if not tree:
        raise YtError('create: a scheduler_pool needs the attribute "pool_tree": there is no default tree')
    for key, value in (("pool_tree", tree), ("parent_name", parent)):
        if not isinstance(value, str):
            raise YtError(f"create: attribute {key} must be text, not {quote_text(value)}")
    return _object(await backend.execute(CreatePool(tree, name, parent, attributes, may_exist), request, _object))


def _object(made: str) -> dict[str, Any]:
    return {"object_id": made}


def _node(made: str) -> dict[str, Any]:
    return {"node_id": made}


def _operation(made: str) -> dict[str, Any]:
    return {"operation_id": made}


async def _create_at(
    backend: YtBackend, request: YtRequest, kind: str, attributes: dict[str, Any], may_exist: bool
) -> str:
    """A pool or tree made by its path; with ``recursive`` the pools above it, too."""
    path = _path(request)
    if path.attribute is not None or not path.steps:
        raise YtError(f"create: {path} is no place for a node")
    name = path.steps[-1]
    for key in ("name", "pool_tree", "parent_name"):
        if key in attributes:
            raise YtError(f"create: the path says the place, leave the attribute {key} out")
    missing = [name]
    above = YPath(path.root, path.steps[:-1])
    while True:
        try:
            parent = backend.resolve(above)
            break
        except YtError as error:
            if error.code != RESOLVE or not _flag(request, "recursive") or not above.steps:
                raise
            missing.append(above.steps[-1])
            above = YPath(path.root, above.steps[:-1])
    if isinstance(parent, _PoolTrees) and len(missing) == 1 and kind != "scheduler_pool":
        return await backend.execute(CreateTree(name, attributes, may_exist), request, _node)
    if not isinstance(parent, _PoolParent) or kind == "scheduler_pool_tree":
        raise YtError(f"create: a {kind} cannot be made at {path}; pools are in //sys/pool_trees/<tree>")
    tree, parent_name, first = parent.tree.name, parent.pool_name, ""
    try:
        for step in reversed(missing[1:]):
            await backend.scheduler.execute(CreatePool(tree, step, parent_name), request.user)
            first, parent_name = first or step, step
        return await backend.execute(CreatePool(tree, name, parent_name, attributes, may_exist), request, _node)
    except CommandError:
        # Nothing is changed by what is refused: the pools above the one that cannot be made go again.
        if first:
            await backend.scheduler.execute(RemovePool(tree, first, recursive=True), request.user)
        raise


@_command("move")
async def _move(backend: YtBackend, request: YtRequest) -> Any:
    source, target = _path(request, "source_path"), _path(request, "destination_path")
    node = backend.resolve(source)
    if not isinstance(node, _PoolNode) or source.attribute is not None:
        raise YtError(f"{source} cannot be moved; pools can")
    if not target.steps or target.attribute is not None:
        raise YtError(f"{target} is no place for a pool")
    parent = backend.resolve(YPath(target.root, target.steps[:-1]))
    if not isinstance(parent, _PoolParent):
        raise YtError(f"{target} is no place for a pool; pools are in //sys/pool_trees/<tree>")
    if parent.tree.name != node.tree.name:
        raise YtError(f'pool "{node.name}" of tree "{node.tree.name}" cannot go to tree "{parent.tree.name}"')
    name = target.steps[-1]
    if name == node.name and parent.pool_name == node.pool.parent and not _flag(request, "force"):
        raise YtError(f"Node {target} already exists", ALREADY_EXISTS)
    command = MovePool(node.tree.name, node.name, parent.pool_name, name)
    await backend.execute(command, request, lambda _: _node(node.id))
    return _node(node.id)


@_command("transfer_pool_resources")
async def _transfer(backend: YtBackend, request: YtRequest) -> Any:
    command = TransferPoolResources(
        _text(request, "pool_tree", backend.config.default_tree),
        _text(request, "source_pool"),
        _text(request, "destination_pool"),
        _table(request, "resource_delta"),
    )
    await backend.execute(command, request)
    return {}


# --- operations --------------------------------------------------------------------------------------------------


def _operation_id(request: YtRequest) -> str:
    if request.parameters.get("operation_id") is None and request.parameters.get("operation_alias") is None:
        raise YtError(f'{request.command}: "operation_id" or "operation_alias" is missing')
    name = "operation_id" if request.parameters.get("operation_id") is not None else "operation_alias"
    return _text(request, name)


@_command("start_operation")
async def _start(backend: YtBackend, request: YtRequest) -> Any:
    name = "operation_type" if "operation_type" in request.parameters else "type"
    command = operations.StartOperation(_table(request, "spec"), _text(request, name))
    return _operation(await backend.execute(command, request, _operation))


@_command("abort_operation")
async def _abort(backend: YtBackend, request: YtRequest) -> Any:
    message = _text(request, "abort_message", "")
    await backend.execute(operations.AbortOperation(_operation_id(request), message), request)
    return {}


@_command("complete_operation")
async def _complete(backend: YtBackend, request: YtRequest) -> Any:
    await backend.execute(operations.CompleteOperation(_operation_id(request)), request)
    return {}


@_command("suspend_operation")
async def _suspend(backend: YtBackend, request: YtRequest) -> Any:
    is_hard = _flag(request, "abort_running_jobs")
    await backend.execute(operations.SuspendOperation(_operation_id(request), is_hard), request)
    return {}


@_command("resume_operation")
async def _resume(backend: YtBackend, request: YtRequest) -> Any:
    await backend.execute(operations.ResumeOperation(_operation_id(request)), request)
    return {}


@_command("update_operation_parameters")
async def _update(backend: YtBackend, request: YtRequest) -> Any:
    command = operations.UpdateOperation(_operation_id(request), _table(request, "parameters"))
    await backend.execute(command, request)
    return {}


@_command("get_operation")
async def _get_operation(backend: YtBackend, request: YtRequest) -> Any:
    record = backend.scheduler.state.find_record(_operation_id(request))
    info = orchid.operation_info(backend.scheduler.state, record, look_once(backend.results()))
    return await _pick(info, _names(request, "attributes"), Turn())


async def _pick(info: Lazy, names: Iterable[str] | None, turn: Turn) -> dict[str, Any]:
    """Those of the attributes that there are; names that mean nothing here are passed over."""
    found = {}
    for name, value in info.parts() if names is None else ((name, info.get(name, MISSING)) for name in names):
        if value is not MISSING:
            found[name] = materialise(value)
        await turn.give()
    return found


@_command("list_operations")
async def _list_operations(backend: YtBackend, request: YtRequest) -> Any:
    state = backend.scheduler.state
    tests = _operation_tests(request)
    chosen: list[OperationRecord] = []
    almost: dict[str, list[OperationRecord]] = {name: [] for name in tests}
    """Those that only the filter of this name leaves out."""
    live = [operation.record for operation in state.operations.values()]
    for record in (*live, *state.finished.values()):
        failing = [name for name, test in tests.items() if not test(record)]
        if not failing:
            chosen.append(record)
        elif len(failing) == 1:
            almost[failing[0]].append(record)
    chosen.sort(key=lambda record: (record.start_time, record.sequence), reverse=True)
    limit = _number(request, "limit", DEFAULT_LISTED_OPERATIONS, MAX_LISTED_OPERATIONS)
    if _text(request, "cursor_direction", "past") == "past":
        shown = chosen[:limit]
    else:
        shown = chosen[max(len(chosen) - limit, 0) :]
    attributes, view = _names(request, "attributes") or LISTED_ATTRIBUTES, look_once(backend.results())
    specs = len(SPECIFICATIONS.intersection(attributes))
    if specs * sum(map(state.spec_room.weight_of, shown)) > MAX_LISTED_BYTES:
        raise YtError(
            f"list_operations: the specifications of these {len(shown)} operations take more than {MAX_LISTED_BYTES} "
            "bytes; list fewer (limit), or leave them out of the attributes"
        )
    turn = Turn()
    described = [await _pick(orchid.operation_info(state, record, view), attributes, turn) for record in shown]
    answer: dict[str, Any] = {
        "operations": described,
        "incomplete": len(chosen) > limit,
    }
    if strip_attributes(request.parameters.get("include_counters", True)) is not False:
        answer.update(_count_operations(chosen, almost))
    return answer


Test = Callable[[OperationRecord], bool]


def _operation_tests(request: YtRequest) -> dict[str, Test]:
    """The filters of the request, by the dimension that each is about."""
    since, until, cursor = _time(request, "from_time"), _time(request, "to_time"), _time(request, "cursor_time")
    direction = _text(request, "cursor_direction", "past")
    if direction not in ("past", "future"):
        raise YtError(f'list_operations: cursor_direction is "past" or "future", not {quote_text(direction)}')
    state, user, kind = _text(request, "state", ""), _text(request, "user", ""), _text(request, "type", "")
    pool, tree = _text(request, "pool", ""), _text(request, "pool_tree", "")
    text = _text(request, "filter", "").lower()
    with_failed = plain(request.parameters.get("with_failed_jobs"))

    def is_in_time(record: OperationRecord) -> bool:
        at = record.start_time
        if cursor is not None and not (at < cursor if direction == "past" else at > cursor):
            return False
        return (since is None or at >= since) and (until is None or at <= until)

    def has_text(record: OperationRecord) -> bool:
        texts = (record.id, record.title, record.alias, record.user, record.type, record.state)
        return any(text in part.lower() for part in (*texts, *_pools(record)))

    return {
        "time": is_in_time,
        "filter": lambda record: not text or has_text(record),
        "tree": lambda record: not tree or tree in record.trees,
        "pool": lambda record: not pool or pool in _pools(record, tree),
        "user": lambda record: not user or record.user == user,
        "type": lambda record: not kind or record.type == kind,
        "state": lambda record: not state or record.state == state,
        "failed": lambda record: not isinstance(with_failed, bool) or _has_failed(record) is with_failed,
    }


def _pools(record: OperationRecord, tree: str = "") -> list[str]:
    return [options.pool for name, options in record.trees.items() if not tree or name == tree]


def _has_failed(record: OperationRecord) -> bool:
    return any(counts.failed for counts in record.counts.values())


def _count_operations(
    chosen: Sequence[OperationRecord], almost: Mapping[str, Sequence[OperationRecord]]
) -> dict[str, Any]:
    """How many operations there are of each kind, with all filters but the one that is about it."""
    return {
        "pool_counts": dict(Counter(pool for record in (*chosen, *almost["pool"]) for pool in set(_pools(record)))),
        "user_counts": dict(Counter(record.user for record in (*chosen, *almost["user"]))),
        "state_counts": dict(Counter(record.state for record in (*chosen, *almost["state"]))),
        "type_counts": dict(Counter(record.type for record in (*chosen, *almost["type"]))),
        "failed_jobs_count": sum(map(_has_failed, (*chosen, *almost["failed"]))),
    }


@_command("list_jobs")
async def _list_jobs(backend: YtBackend, request: YtRequest) -> Any:
    state = backend.scheduler.state
    record = state.find_record(_operation_id(request))
    wanted = _text(request, "job_state", "") or _text(request, "state", "")
    task, address = _text(request, "task_name", ""), _text(request, "address", "")

    jobs = [
        job
        for job in list_jobs(state, record)
        if (not task or task == job.task_name) and (not address or address == _address(backend, job))
    ]
    if any(_flag(request, name) for name in ("with_stderr", "with_fail_context", "with_competitors")):
        jobs = []
    counts = Counter(orchid.job_state(job) for job in jobs)
    if wanted:
        jobs = [job for job in jobs if orchid.job_state(job) == wanted]
    jobs.sort(key=order_of_start, reverse=_text(request, "sort_order", "") == "descending")
    offset = _number(request, "offset", 0, 2**31)
    limit = _number(request, "limit", DEFAULT_LISTED_JOBS, MAX_LISTED_JOBS)
    described, turn = [], Turn()
    for job in jobs[offset : offset + limit]:
        described.append(orchid.job_info(job, _address(backend, job)))
        await turn.give()
    return {
        "jobs": described,
        "errors": [],
        "state_counts": dict(counts),
        "type_counts": {"vanilla": sum(counts.values())} if counts else {},
    }


def _address(backend: YtBackend, job: Job | JobRecord) -> str:
    node = backend.scheduler.state.nodes.get(job.node_id)
    return job.node_id if node is None else node.address


@_command("get_job")
async def _get_job(backend: YtBackend, request: YtRequest) -> Any:
    state = backend.scheduler.state
    job_id = _text(request, "job_id")
    job: Job | JobRecord | None = state.jobs.get(job_id)
    if job is None and request.parameters.get("operation_id") is not None:
        job = state.finished_jobs.get(_operation_id(request), {}).get(job_id)
    if job is None:
        raise YtError(f"No such job {job_id}", NO_SUCH_JOB)
    info = orchid.job_info(job, _address(backend, job))
    names = _names(request, "attributes")
    return info if names is None else {name: info[name] for name in names if name in info}


@_command("get_job_stderr")
async def _get_job_stderr(backend: YtBackend, request: YtRequest) -> bytes:
    """The end of what a job wrote, fetched from its node.

    Who tracks an operation asks for the last words of its failed jobs, and goes on without them when it is told that
    there is no such job; any other error would hide why the operation failed.
    """
    job_id = _text(request, "job_id")
    kind = _text(request, "type", "user_job_stderr")
    if kind != "user_job_stderr":
        raise YtError(f"No such job {job_id} with a stderr of type {quote_text(kind)}", NO_SUCH_JOB)
    live = backend.scheduler.state.jobs.get(job_id)
    named = any(request.parameters.get(name) is not None for name in ("operation_id", "operation_alias"))
    operation = live.element.operation.id if live is not None and not named else _operation_id(request)
    try:
        return (await backend.scheduler.read_log(operation, job_id, "stderr", MAX_LOG_BYTES)).content
    except CommandError as error:
        if error.code not in (NODE_OFFLINE, TIMEOUT):
            raise
        raise YtError(f"No such job {job_id} at the moment: {error}", NO_SUCH_JOB) from None


# --- the rest ----------------------------------------------------------------------------------------------------


@_command("get_version")
async def _get_version(backend: YtBackend, _: YtRequest) -> Any:
    return {"version": backend.version}


@_command("get_supported_features")
async def _get_features(_: YtBackend, __: YtRequest) -> Any:
    return {"features": {"primitive_types": [], "compression_codecs": [], "erasure_codecs": []}}


@_command("check_permission")
async def _check_permission(backend: YtBackend, request: YtRequest) -> Any:
    """Who has a token may do everything."""
    backend.resolve(_path(request).node)
    return {"action": "allow"}
