"""The cause for which an operation waits, as one word and one sentence. Pure.

It is cheap enough to compute for all operations of a list; ``answers.operation`` explains a single one in full."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from cpumond.fairshare.resources import UNLIMITED, Vector
from cpumond.scheduler.decide.admission import count_running, find_full, is_user_full
from cpumond.scheduler.decide.placement import NO_KEY, ONLY_RECLAIMED
from cpumond.scheduler.elements import Operation, OperationElement, PoolElement, Tree, usage_share
from cpumond.scheduler.model import OperationRecord, OperationState

CauseKind = Literal[
    "cannot_start", "working", "retry", "suspended", "secrets", "pool_full", "user_full", "queue", "no_nodes", "gang",
    "limit", "reclaimed", "filter", "budget", "share", "room",
]  # fmt: skip

SAME: Final = 1e-6

_TEXTS: Final[dict[CauseKind, str]] = {
    "cannot_start": "cannot start: no node of the tree can hold a job, or all nodes together cannot hold the gang",
    "working": "all jobs are started",
    "retry": "its jobs have failed and wait for the delay that their retry rules set",
    "suspended": "suspended: no job starts until it is resumed",
    "secrets": NO_KEY,
    "pool_full": "pool {pool} is full: it already runs its max_running_operation_count of operations",
    "user_full": "its user already runs the tree's max_running_operation_count_per_user of operations",
    "queue": "will run as soon as the scheduler has checked it",
    "no_nodes": "no online node of the tree takes jobs",
    "gang": "a gang: waits until all of its jobs fit at once",
    "limit": "resource limits of {pool} leave no room for another job",
    "reclaimed": "refuses reclaimed CPU (allow_reclaimed = false): waits for CPU that no ordinary job has requested",
    "filter": "waits for free resources on the nodes that match its scheduling_tag_filter and those of the pools above "
    "it",
    "budget": "the core-hour budget of {pool} is spent: no new job starts until its next period or until it is raised",
    "share": "is allocated its fair share: more jobs start only on resources that others leave",
    "room": "is allocated less than its fair share and waits for free resources on a node",
}


class Cause(NamedTuple):
    """Cause for which an operation waits. ``pool``: the pool that is full or has the limit; "" if the cause is a limit
    of the operation itself or concerns no pool."""

    kind: CauseKind
    pool: str = ""

    @property
    def key(self) -> str:
        """The cause as one text: ``limit:research``."""
        return f"{self.kind}:{self.pool}" if self.pool else self.kind

    @property
    def text(self) -> str:
        """The cause as a sentence."""
        whole = self.kind in ("pool_full", "budget")
        pool = self.pool if whole else f"pool {self.pool}" if self.pool else "the operation"
        return _TEXTS[self.kind].format(pool=pool)


class Waiting(NamedTuple):
    """Why an operation waits in a tree, and the cores requested by its jobs that have yet to start."""

    cause: Cause
    wanted_cores: float = 0.0
    detail: str = ""
    """The request that is too large, if the operation cannot start for that reason."""

    @property
    def text(self) -> str:
        """The cause as a sentence, with the details of this operation."""
        return describe_cannot_start(self.detail) if self.detail else self.cause.text


def describe_cannot_start(excess: str) -> str:
    return f"cannot start: {excess}"


_FIXED: Final = {kind: Waiting(Cause(kind)) for kind in _TEXTS}


ShownState = Literal[OperationState, "waiting", "cannot start"]


def find_excess(live: Operation | None) -> str:
    """Return the request of an operation that no tree can hold, in the form for ``describe_cannot_start``; "" if the
    operation has a job or one of its trees can hold a job."""
    if live is None or not live.needed or live.active_job_count:
        return ""
    first = ""
    for each in live.elements.values():
        told = each.explain_unplaceable()
        if not told:
            return ""
        first = first or told
    return first


def find_shown_state(record: OperationRecord, live: Operation | None, excess: str | None = None) -> ShownState:
    """Return the state shown for an operation: the recorded one, "waiting" if it runs without a job, "cannot start" if
    no tree can hold its jobs. ``excess``: result of ``find_excess``, if known."""
    if live is None or live.active_job_count:
        return record.state
    if find_excess(live) if excess is None else excess:
        return "cannot start"
    return "waiting" if record.state == "running" else record.state


class Causes:
    """Causes for which the operations of one tree wait, at one moment; each is computed once, when first requested."""

    def __init__(self, tree: Tree) -> None:
        self._has_nodes = any(node.is_online and not node.cordoned for node in tree.nodes.values())
        self._limited: dict[PoolElement, list[PoolElement]] = {}
        self._waits: dict[PoolElement, Cause | None] = {}
        """Pool -> cause for which operations in it do not run; None if no limit of the pool blocks them."""
        self._known: dict[str, Waiting] = {}
        self._running = count_running(tree)
        self.doubtful: list[Operation] = []
        """The operations found so far whose jobs perhaps fit no node of the tree."""

    def of(self, element: OperationElement) -> Waiting:
        """Return why an operation waits in this tree, at the moment of this object."""
        known = self._known.get(element.name)
        if known is None:
            known = self._known[element.name] = self._find(element)
        return known

    def _find(self, element: OperationElement) -> Waiting:
        operation = element.operation
        needed = operation.needed
        if not needed and operation.later and not operation.active_job_count:
            return _FIXED["retry"]
        if not needed:
            return _FIXED["suspended" if operation.record.suspended else "working"]
        wanted, first = 0.0, None
        for task, count in operation.next_jobs():
            first = first or task
            wanted += task.cpu_limit * count
        if first is None:
            return _FIXED["working"]
        if not element.has_room():
            self.doubtful.append(operation)
            if excess := element.explain_unplaceable():
                return Waiting(_FIXED["cannot_start"].cause, wanted, excess)
        return Waiting(self._find_cause(element, first.resources), wanted)

    def _find_cause(self, element: OperationElement, wanted: Vector) -> Cause:
        record = element.operation.record
        if record.suspended:
            return _FIXED["suspended"].cause
        if element.operation.lacks_secrets:
            return _FIXED["secrets"].cause
        if element.spent is not None:
            return Cause("budget", f"{element.spent.record.kind} {element.spent.name}")
        if not element.is_running:
            pool = element.parent
            assert pool is not None
            if pool not in self._waits:
                full = find_full(element)
                self._waits[pool] = None if full is None else Cause("pool_full", full.name)
            waits = self._waits[pool]
            if waits is not None:
                return waits
            return _FIXED["user_full" if is_user_full(element.tree, self._running[record.user]) else "queue"].cause
        if not self._has_nodes:
            return _FIXED["no_nodes"].cause
        if ONLY_RECLAIMED in element.deactivations:
            return _FIXED["reclaimed"].cause
        if record.is_gang:
            return _FIXED["gang"].cause
        if element.limits != UNLIMITED and _exceeds(element.usage, wanted, element.limits):
            return _FIXED["limit"].cause
        assert element.parent is not None
        for pool in self._limits_above(element.parent):
            if _exceeds(pool.usage, wanted, pool.limits):
                return Cause("limit", pool.name)
        if element.fitting is not None and len(element.fitting.nodes) < len(element.tree.nodes):
            return _FIXED["filter"].cause
        has_share = max(usage_share(element)) >= max(element.fair_share) - SAME
        return _FIXED["share" if has_share else "room"].cause

    def _limits_above(self, pool: PoolElement) -> list[PoolElement]:
        """Return the pools with limits among a pool and its ancestors."""
        found = self._limited.get(pool)
        if found is None:
            above = [] if pool.parent is None else self._limits_above(pool.parent)
            found = self._limited[pool] = above if pool.limits == UNLIMITED else [pool, *above]
        return found


def _exceeds(usage: Vector, wanted: Vector, limits: Vector) -> bool:
    for used, more, limit in zip(usage, wanted, limits, strict=True):  # noqa: SIM110 - a generator takes twice as long
        if more and used + more > limit + SAME:
            return True
    return False
