"""One request of the JSON interface, read and checked, and data shared by all requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.requests import Request

from cpumond.api import pool_views, views
from cpumond.api.glance_views import OperationGroups
from cpumond.api.json.kept import Kept
from cpumond.api.json.looks import Looks
from cpumond.api.json.pool_tables import PoolTables
from cpumond.api.json.prepared import Prepared
from cpumond.api.overview import RequestTiming
from cpumond.api.yt.replies import export_reply
from cpumond.scheduler.access import Rights
from cpumond.scheduler.access.required import check_operation
from cpumond.scheduler.elements import PoolElement, Tree
from cpumond.scheduler.model import Config, OperationRecord
from cpumond.scheduler.rights.entries import Permission
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.service.stored import MUTATION
from cpumond.scheduler.state import State
from cpumond.scheduler.store import Change

MAX_KNOWN_USERS: Final = 64


@dataclass(eq=False, slots=True)
class Shared:
    """Data shared by all requests: the scheduler, facts of the configuration, and values kept between requests.

    ``is_open``: every client that reaches the address may do everything; ``find_known``: known facts of a user by name.
    """

    scheduler: Scheduler
    cluster_name: str = ""
    needs_token: bool = False
    is_open: bool = False
    file_tokens: Callable[[], Iterable[tuple[str, User]]] = tuple
    """Returns ids and users of the tokens in the configured file."""
    find_known: Callable[[str], User] = User
    requests: dict[str, RequestTiming] = field(default_factory=dict)
    """Name of an endpoint -> its response times."""
    pool_tables: PoolTables = field(init=False)
    texts: views.SearchTexts = field(default_factory=views.SearchTexts)
    looks: Looks = field(init=False)
    groups: Kept[tuple[User, Any], OperationGroups] = field(init=False)
    """Groups of operations by cause, cached by user and filters."""
    readable: dict[User, tuple[Config, dict[tuple[Any, ...], bool]]] = field(default_factory=dict)
    """Each recent user -> a configuration, and verdicts on the user's rights on operations under that configuration."""
    document: Prepared | None = None
    plan_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a plan or explanation is made, so that only one is: updates and the store need the other threads."""

    def __post_init__(self) -> None:
        self.pool_tables = PoolTables(self.scheduler)
        self.looks = Looks(self.scheduler)
        self.groups = Kept(self.scheduler.clock.now)


@dataclass(slots=True)
class Call:
    """Input of a handler."""

    shared: Shared
    user: User
    path: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    value_count: int = 0
    """Estimated number of values in the body."""
    query: Any = None
    node: User | None = None
    """The user of a node's request, if the endpoint is for nodes."""
    plan: str = ""
    """The plan that the user was shown before, from the client's header X-Cpumond-Plan."""
    idempotency: tuple[str, str] | None = None
    """The key of a change that may be repeated, and a digest of its request; None without a key."""
    request: Request = field(default_factory=lambda: Request({"type": "http"}))
    """The request itself, for data that no other field has, such as the cookie of a session."""

    @property
    def scheduler(self) -> Scheduler:
        return self.shared.scheduler

    @property
    def state(self) -> State:
        return self.shared.scheduler.state

    @property
    def now(self) -> float:
        """Seconds since 1970, by the scheduler's clock."""
        return self.scheduler.clock.now()

    @property
    def rights(self) -> Rights:
        """The user's rights at this moment; each access computes them again."""
        config, readable = self.state.config, self.shared.readable
        made_of, known = readable.pop(self.user, (None, {}))
        readable[self.user] = (config, known if made_of is config else {})
        if len(readable) > MAX_KNOWN_USERS:
            del readable[next(iter(readable))]
        return Rights(self.state, self.user, readable[self.user][1])

    def remember(self, answer: Any) -> Change:
        """Return the record with which a later run of the scheduler answers a repeat of this change (same key)."""
        assert self.idempotency is not None
        key, name = self.idempotency
        entry = export_reply(self.user.name, key, name, self.now, msgspec.to_builtins(answer))
        return Change(MUTATION, f"{self.user.name} {key}", msgspec.json.encode(entry))

    @property
    def given(self) -> dict[str, Any]:
        """The fields of the query and of the body."""
        parts = [part for part in (self.query, self.body) if part is not None]
        return {name: getattr(part, name) for part in parts for name in part.__struct_fields__}

    @property
    def tree(self) -> Tree:
        """The tree in the path. Raises CommandError."""
        return self.state.find_tree(self.path["tree"])

    @property
    def pool(self) -> PoolElement:
        """The pool in the path. Raises CommandError."""
        return pool_views.find_pool(self.tree, self.path["pool"])

    def find_operation(self, permission: Permission = "read") -> OperationRecord:
        """Return the operation in the path (an id or alias). Raises CommandError, also if the user lacks the right."""
        record = self.state.find_record(self.path["operation"])
        check_operation(self.rights, record, permission)
        return record
