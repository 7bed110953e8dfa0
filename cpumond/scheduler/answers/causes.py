"""What an operation waits for, in one word and a sentence: cheap enough to be asked of all operations. Pure.

``answers.operation`` tells more, of one operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from cpumond.fairshare.resources import CPU, UNLIMITED, Vector
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
    "cannot_start": "cannot start: no node of the tree is large enough, or a gang is too large for all of them",
    "working": "all jobs are started",
    "retry": "its jobs have failed and wait to be started again, as their retry rules say",
    "suspended": "suspended: no job is started until that is taken back",
    "secrets": NO_KEY,
    "pool_full": "pool {pool} is full: as many operations run in it as may (max_running_operation_count)",
    "user_full": "as many operations of its user run as may (max_running_operation_count_per_user of the tree)",
    "queue": "runs as soon as the scheduler has looked at it",
    "no_nodes": "no node of the tree is online and takes jobs",
    "gang": "a gang: waits for room for all of its jobs at once",
    "limit": "resource limits of {pool} leave no room for another job",
    "reclaimed": "refuses reclaimed CPU (allow_reclaimed = false): waits for CPU that no ordinary job has ordered",
    "filter": "waits for room on the nodes that scheduling_tag_filter, its own or that of a pool above, fits",
    "budget": "the core-hour budget of {pool} is spent: no new job starts before its next period, or a larger budget",
    "share": "is allotted its fair share: more jobs start where others leave room",
    "room": "is allotted less than its fair share and waits for room on a node",
}


class Cause(NamedTuple):
    """``pool``: the one that is full or limits it; "" for the operation's own limits, and where none is the cause."""

    kind: CauseKind
    pool: str = ""

    @property
    def key(self) -> str:
        """It as one text: ``limit:research``."""
        return f"{self.kind}:{self.pool}" if self.pool else self.kind

    @property
    def text(self) -> str:
        """It as a sentence."""
        whole = self.kind in ("pool_full", "budget")
        pool = self.pool if whole else f"pool {self.pool}" if self.pool else "the operation"
        return _TEXTS[self.kind].format(pool=pool)


class Waiting(NamedTuple):
    """What an operation waits for in a tree, and what its jobs order that are still to be started."""

    cause: Cause
    wanted_cores: float = 0.0
    detail: str = ""
    """What is too large, where it cannot start."""

    @property
    def text(self) -> str:
        """It as a sentence, of this operation."""
        return describe_cannot_start(self.detail) if self.detail else self.cause.text


def describe_cannot_start(excess: str) -> str:
    """The sentence, in all places the same, for what no node can hold."""
    return f"cannot start: {excess}"


_FIXED: Final = {kind: Waiting(Cause(kind)) for kind in _TEXTS}


ShownState = Literal[OperationState, "waiting", "cannot start"]


def find_excess(live: Operation | None) -> str:
    """What no tree of an operation without a job can hold, as ``describe_cannot_start`` takes it; "" where one can."""
    if live is None or not live.needed or live.active_job_count:
        return ""
    told = [each.explain_unplaceable() for each in live.elements.values()]
    return told[0] if told and all(told) else ""


def find_shown_state(record: OperationRecord, live: Operation | None) -> ShownState:
    """The state of an operation in words: as recorded, but where it holds a place to run and has no job."""
    if live is None or live.active_job_count:
        return record.state
    if find_excess(live):
        return "cannot start"
    return "waiting" if record.state == "running" else record.state


class Causes:
    """What the operations of one tree wait for, at one look at it: those that were added, others are found when asked.

    There may be very many operations: a look that is kept costs nothing more.
    """

    def __init__(self, tree: Tree) -> None:
        self._has_nodes = any(node.is_online and not node.cordoned for node in tree.nodes.values())
        self._limited: dict[PoolElement, list[PoolElement]] = {}
        self._known: dict[str, Waiting] = {}
        self._running = count_running(tree)

    def add(self, elements: Iterable[OperationElement]) -> None:
        """Find and keep what some operations wait for."""
        for element in elements:
            self._known[element.name] = self._find(element)

    def of(self, element: OperationElement) -> Waiting:
        """What an operation waits for in this tree, as of this look."""
        known = self._known.get(element.name)
        return self._find(element) if known is None else known

    def _find(self, element: OperationElement) -> Waiting:
        operation = element.operation
        needed = operation.needed
        if not needed and operation.later and not operation.active_job_count:
            return _FIXED["retry"]
        if not needed:
            return _FIXED["suspended" if operation.record.suspended else "working"]
        wanted, first = 0.0, None
        for order, count in operation.needed_orders:
            first = first or order
            wanted += order[CPU] * count
        if first is None:
            return _FIXED["working"]
        if excess := element.explain_unplaceable():
            return Waiting(_FIXED["cannot_start"].cause, wanted, excess)
        return Waiting(self._find_cause(element, first), wanted)

    def _find_cause(self, element: OperationElement, wanted: Vector) -> Cause:
        record = element.operation.record
        if record.suspended:
            return _FIXED["suspended"].cause
        if element.operation.lacks_secrets:
            return _FIXED["secrets"].cause
        if element.spent is not None:
            return Cause("budget", f"{element.spent.record.kind} {element.spent.name}")
        if not element.is_running:
            full = find_full(element)
            if full is not None:
                return Cause("pool_full", full.name)
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
        """Of a pool and those above it the ones that have limits."""
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
