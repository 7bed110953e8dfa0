"""Nodes, and preemptions of jobs on them, in the JSON API. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgspec

from cpumond.api.cursors import cut_page
from cpumond.api.figures import Amounts, View, make_view
from cpumond.api.views import JobView, view_job, view_live_job
from cpumond.fairshare.resources import CPU, ZERO
from cpumond.scheduler.access import Rights
from cpumond.scheduler.elements import Node, used_now
from cpumond.scheduler.model import RESOLVE, CommandError, JobRecord, LostNode, PreemptionRecord, to_amounts
from cpumond.scheduler.state import State

V = TypeVar("V", bound="NodeView")


class CordonView(View, frozen=True):
    """A cordon: the node gets no new jobs. ``user`` cordoned it ``at`` (seconds since 1970). ``drain``: jobs of the
    node are stopped, too; "graceful": with the longer time-out."""

    user: str
    at: float
    why: str
    drain: Literal["", "usual", "graceful"]


class NodeView(View, frozen=True):
    """A node. ``tree`` null: its tags match no tree's filter, or those of several, the ``matched_trees``; then the
    node's jobs continue, but no job starts there. ``usage``: allocated to the scheduler's jobs (for CPU their limits
    now). ``foreign_usage``: allocated to other jobs, including jobs that an earlier run of the scheduler stopped and
    that have not ended.

    ``free``: capacity minus all that is allocated, negative if the node is overcommitted. ``ordered_cores`` (requested)
    and ``used_cores`` (measured) cover the scheduler's own jobs, including stopping ones. ``on_reclaimed_cores``: what
    jobs on reclaimed CPU may use. ``idle_class``: the class in which these jobs run: "idle", "lowest weight", or "" if
    the agent reported none."""

    id: str
    address: str
    tags: list[str]
    user_tags: list[str]
    """Those of ``tags`` that a user added."""
    tree: str | None
    is_online: bool
    silent_s: float
    """Seconds since the node's last heartbeat or registration."""
    incarnation: str
    """The first 16 characters of the node's incarnation."""
    capacity: Amounts
    usage: Amounts
    foreign_usage: Amounts
    free: Amounts
    job_count: int
    stopping_job_count: int
    overcommitted_s: float | None
    overcommit_count: int
    ordered_cores: float
    used_cores: float
    on_reclaimed_cores: float
    idle_class: str
    matched_trees: list[str]
    lost_at: float | None
    """Seconds since 1970 at which the node was declared lost; null for a registered node. A lost node is shown for a
    day, with the jobs that it had."""
    cordon: CordonView | None
    """Set if the node is cordoned, and for a lost node that would still be cordoned if it came back."""
    failing: str
    """A sentence about jobs that failed on the node in a row, and what follows; "" if there are no such jobs."""
    held_until: float | None
    """Seconds since 1970 until which the node gets no jobs because jobs failed on it; null if it may get some."""


class NodeDetails(NodeView, frozen=True):
    """A node with its jobs, including stopping ones. ``titles``: operation id -> title, for operations with a title."""

    jobs: list[JobView]
    titles: dict[str, str] = msgspec.field(default_factory=dict)


class NodeList(View, frozen=True):
    """Nodes by id."""

    nodes: list[NodeView]
    total: int
    next: str | None = None
    """The cursor of the next page; None on the last page."""


def view_node_details(node: Node | LostNode, now: float, rights: Rights) -> NodeDetails:
    """Return a node with those of its jobs whose operations the user may read."""
    if isinstance(node, LostNode):
        jobs = [view_job(job) for job in _list_readable(node, rights)]
    else:
        jobs = [view_live_job(job) for job in node.all_jobs() if rights.may_read(job.element.operation.record)]
    titles = find_titles(rights, (job.operation_id for job in jobs))
    return _view(NodeDetails, node, now, jobs=jobs, titles=titles)


def _view(kind: type[V], node: Node | LostNode, now: float, **more: Any) -> V:
    more |= _view_lost(node) if isinstance(node, LostNode) else _view_living(node, now)
    cordon = None if node.cordon is None else make_view(CordonView, node.cordon)
    return make_view(
        kind, node, user_tags=list(node.user_tags), silent_s=max(now - node.last_seen, 0.0), job_count=len(node.jobs),
        cordon=cordon, **more,
    )  # fmt: skip


def _view_living(node: Node, now: float) -> dict[str, Any]:
    since, jobs = node.overcommitted_since, node.all_jobs()
    return {
        "tags": sorted(node.tags),
        "incarnation": node.run,
        "capacity": to_amounts(node.capacity),
        "usage": to_amounts(node.used),
        "foreign_usage": to_amounts(node.foreign_usage),
        "free": to_amounts(node.free),
        "stopping_job_count": len(node.stopping),
        "overcommitted_s": None if since is None else max(now - since, 0.0),
        "ordered_cores": sum(job.limits[CPU] for job in jobs),
        "used_cores": sum(used_now(job) for job in jobs),
        "on_reclaimed_cores": sum(job.usage[CPU] for job in jobs if job.reclaimed),
        "idle_class": "" if node.about is None else node.about.idle_class,
        "matched_trees": list(node.matched_trees),
        "lost_at": None,
        "failing": "" if node.failing is None else node.failing.describe(now),
        "held_until": None if node.failing is None else node.failing.until,
    }


def _list_readable(node: LostNode, rights: Rights) -> list[JobRecord]:
    records = {job.operation_id: rights.state.record_of(job.operation_id) for job in node.jobs}
    hidden = {name for name, record in records.items() if record is not None and not rights.may_read(record)}
    return [job for job in node.jobs if job.operation_id not in hidden]


def _view_lost(node: LostNode) -> dict[str, Any]:
    return {
        "tags": list(node.tags), "tree": node.tree or None, "is_online": False, "incarnation": "", "idle_class": "",
        **dict.fromkeys(("usage", "foreign_usage", "free"), to_amounts(ZERO)), "stopping_job_count": 0,
        "overcommit_count": 0, "overcommitted_s": None, "failing": "", "held_until": None, "matched_trees": [],
        **dict.fromkeys(("ordered_cores", "used_cores", "on_reclaimed_cores"), 0.0),
    }  # fmt: skip


def view_nodes(
    state: State, now: float, *, limit: int, offset: int = 0, cursor: str = "", tree: str = "", tag: str = "",
    online: bool | None = None,
) -> NodeList:  # fmt: skip
    """Nodes that match all filters, by id, including those lost within a day."""
    known: dict[str, Node | LostNode] = {**state.lost_nodes, **state.nodes}
    chosen = [
        node
        for _, node in sorted(known.items())
        if (not tree or node.tree == tree)
        and (not tag or tag in node.tags)
        and (online is None or (isinstance(node, Node) and node.is_online) == online)
    ]
    some, then = cut_page(chosen, limit, cursor, attrgetter("id"), operator.lt, offset=offset)
    return NodeList([_view(NodeView, node, now) for node in some], len(chosen), then)


def find_node(state: State, node_id: str) -> Node | LostNode:
    """Return a node by id, also if it was lost within a day. Raises CommandError with code RESOLVE."""
    node = state.nodes.get(node_id) or state.lost_nodes.get(node_id)
    if node is None:
        raise CommandError(f'Node "{node_id}" is not registered', RESOLVE)
    return node


def find_living_node(state: State, node_id: str) -> Node:
    """A registered node. Raises CommandError with code RESOLVE."""
    node = find_node(state, node_id)
    if isinstance(node, LostNode):
        raise CommandError(f'Node "{node_id}" was declared lost, silent for too long; its jobs are gone', RESOLVE)
    return node


class PreemptionList(View, frozen=True):
    """Preemptions, the newest first. ``counts``: all since the start, by kind, also those no longer kept.

    ``lost_core_seconds``: work lost by preemption since the start; if a pool was requested, in and below that pool.
    ``titles``: operation id -> title, for operations in ``preemptions`` that are known and have a title."""

    preemptions: list[PreemptionRecord]
    counts: dict[str, int]
    lost_core_seconds: float
    titles: dict[str, str]


def group_of(record: PreemptionRecord) -> str:
    """Return the key of a preemption's group: kind, priority, tree and pool."""
    return "/".join((record.kind, record.priority, record.tree, record.preemptor_pool))


def view_preemptions(
    rights: Rights, *, limit: int, operation: str = "", pool: str = "", group: str = ""
) -> PreemptionList:
    """Return preemptions in which an operation or pool lost or won; only those of operations that the user may read."""
    state = rights.state
    found = list_fitting(rights, operation, pool)
    some = islice((record for record in found if not group or group_of(record) == group), limit)
    chosen = [seen for record in some if (seen := rights.see_preemption(record)) is not None]
    counts: dict[str, int] = {}
    for (_, of_pool, kind), number in state.preemption_counts.items():
        if not pool or of_pool == pool:
            counts[kind] = counts.get(kind, 0) + number
    pools = [tree.pools.get(pool) if pool else tree.root for tree in state.trees.values()]
    lost = sum(each.lost_core_seconds for each in pools if each is not None)
    ids = (name for record in chosen for name in (record.operation_id, record.preemptor_operation_id))
    return PreemptionList(chosen, counts, lost, find_titles(rights, ids))


def list_fitting(rights: Rights, operation: str = "", pool: str = "") -> Iterator[PreemptionRecord]:
    """Yield the kept preemptions that match, the newest first, for sums; to show one, use ``Rights.see_preemption``."""
    for record in reversed(rights.state.preemptions):
        if pool and pool not in (record.pool, record.preemptor_pool):
            continue
        if rights.hides(record.operation_id):
            continue
        # A user who guesses a hidden operation's id finds no preemption for it.
        is_for_it = operation == record.preemptor_operation_id and not rights.hides(operation)
        if not operation or operation == record.operation_id or is_for_it:
            yield record


def find_titles(rights: Rights, ids: Iterable[str]) -> dict[str, str]:
    """Return the titles of those operations that are known, have a title and may be read."""
    known = [found for name in sorted(set(ids)) if (found := rights.state.record_of(name)) is not None]
    titles = {each.id: each.title or each.alias for each in known if rights.may_read(each)}
    return {name: title for name, title in titles.items() if title}
