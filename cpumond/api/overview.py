"""Alerts, health, counts and totals of trees, for the first page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from cpumond.api.figures import View, choose_figures
from cpumond.api.tables import CoreSums
from cpumond.core.words import count
from cpumond.fairshare.resources import RESOURCES, ZERO, greatest, subtract
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.idle import IdleParts, IdleReport
from cpumond.scheduler.decide.placement import list_alerts
from cpumond.scheduler.elements import Operation, Tree, figures
from cpumond.scheduler.elements.account import view_budget
from cpumond.scheduler.history.model import HistoryStatus
from cpumond.scheduler.model import ROOT_POOL
from cpumond.scheduler.model.node_failures import GUARD
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.validation import find_overcommit, find_warnings
from cpumond.scheduler.state import State
from cpumond.scheduler.state.nodes import list_refused_nodes


class Alert(View, frozen=True):
    """An alert for an operator. ``subject``: the tree, node or operation with the problem, "" for the scheduler."""

    code: str
    severity: Literal["warning", "error"]
    subject: str
    message: str


MOST_OPERATION_ALERTS: Final = 20
"""Maximum number of alerts about single operations at a time."""


class AlertList(View, frozen=True):
    """All alerts, errors first."""

    alerts: list[Alert]


def find_alerts(
    state: State, now: float, service: Sequence[Alert] = (), operations: Sequence[Alert] | None = None,
    user: User | None = None,
) -> AlertList:  # fmt: skip
    """Find problems in the state. ``service``: alerts of the running service about itself. ``operations``: alerts about
    operations, if they are found already. ``user``: the user of the request, None for an administrator."""
    if operations is None:
        operations = list(find_operation_alerts(state.operations.values()))
    found = [*service, *_node_alerts(state, now), *operations[:MOST_OPERATION_ALERTS]]
    for tree in state.trees.values():
        found += _tree_alerts(tree)
    for account in state.budgets.values():
        is_own = account.record.kind == "pool" or user is None or user.admin or user.name == account.name
        if account.record.level and is_own:
            told = view_budget(account, now)
            message = f"budget of {told.kind} {told.name} in tree {told.tree}: {told.text}"
            found.append(Alert(f"budget_{told.level}", "warning", told.tree, message))
    if not state.config.default_tree:
        message = "there is no default pool tree; operations must name their pool_trees"
        found.append(Alert("no_default_tree", "warning", "", message))
    found.sort(key=lambda alert: alert.severity)
    return AlertList(found)


def _tree_alerts(tree: Tree) -> Iterator[Alert]:
    for sentence in find_warnings(tree.config):
        code = "invalid_default_parent_pool" if "InvalidDefaultParentPool" in sentence else "odd_configuration"
        yield Alert(code, "warning", tree.name, sentence)
    overcommit = find_overcommit(tree.config, tree.total)
    if overcommit is not None:
        yield Alert("guarantees_overcommitted", "warning", tree.name, overcommit)
    for sentence in tree.errors:
        yield Alert("fair_share_update", "warning", tree.name, sentence)
    online = [node for node in tree.nodes.values() if node.is_online]
    if tree.operations and all(node.cordoned for node in online):
        operations = count(len(tree.operations), "operation")
        what = "all nodes that are online are cordoned or held off" if online else "no node that is online"
        message = f'pool tree "{tree.name}": has {operations} and {what}'
        yield Alert("no_nodes", "error", tree.name, message)


def _node_alerts(state: State, now: float) -> Iterator[Alert]:
    known = {node.id: node.matched_trees for node in state.nodes.values() if node.matched_trees}
    for name, trees in sorted({**list_refused_nodes(state, now), **known}.items()):
        message = (
            f"node {name}: its tags match the nodes_filter of {' and '.join(trees)}; its jobs continue, none is "
            "started on it: change its tags or the filters"
        )
        yield Alert("node_in_several_trees", "error", name, message)
    for _, node in sorted(state.nodes.items()):
        if node.tree is None and not node.matched_trees:
            message = f"node {node.id}: its tags {sorted(node.tags)} match no tree's nodes_filter; it gets no jobs"
            yield Alert("node_without_tree", "warning", node.id, message)
        if not node.is_online:
            silent_s = now - node.last_seen
            message = f"node {node.id}: silent for {silent_s:.0f} s; its jobs will be declared lost if it stays silent"
            yield Alert("node_offline", "warning", node.id, message)
        if node.failing is not None and (told := node.failing.describe(now)):
            yield Alert("node_failing", "warning", node.id, f"node {node.id}: {told}")
        if node.cordon is not None and node.cordon.user == GUARD:
            message = (
                f"node {node.id}: cordoned, because jobs fail on it: {node.cordon.why}; repair it, then uncordon it"
            )
            yield Alert("node_failing", "error", node.id, message)
        if node.overcommitted_since is not None:
            over = greatest(subtract(ZERO, node.free), ZERO)
            amounts = ", ".join(f"{x:g} {name}" for name, x in zip(RESOURCES, over, strict=True) if x > 0.0)
            since_s = now - node.overcommitted_since
            message = f"node {node.id}: its jobs may use {amounts} more than it has, for {since_s:.0f} s"
            yield Alert("node_overcommitted", "warning", node.id, message)


def find_operation_alerts(operations: Iterable[Operation], rights: Rights | None = None) -> Iterator[Alert]:
    """Find alerts about those operations that ``rights`` allow to read; None allows all."""
    for each in operations:
        if (alerts := list_alerts(each)) and (rights is None or rights.may_read(each.record)):
            message = f"operation {each.id}: {'; '.join(sentence for _, sentence in alerts)}"
            yield Alert(alerts[0][0], "warning", each.id, message)


class Health(View, frozen=True):
    """``status``: ok, starting, stuck, or refusing (the store is gone); ``last_update_age_s`` null before the first
    update. ``role``, ``leader`` (host:port, "" if unknown) and ``term`` are null unless several schedulers share a
    store."""

    status: Literal["ok", "starting", "stuck", "refusing"]
    last_update_age_s: float | None = None
    role: Literal["leader", "standby"] | None = None
    leader: str | None = None
    term: int | None = None


class ClusterCounts(View, frozen=True):
    """Numbers of objects."""

    trees: int
    pools: int
    nodes: int
    online_nodes: int
    pending_operations: int
    running_operations: int
    """Admitted operations, whether or not they have jobs at the moment."""
    finished_operations: int
    active_jobs: int
    stopping_jobs: int
    preemptions: dict[str, int]
    shown_states: dict[str, int]
    """``shown_state`` -> number of live operations."""


class RequestTiming(View, frozen=True):
    """The number of answers to one kind of request, and the sum and maximum of the seconds that they took."""

    count: int
    total_s: float
    longest_s: float


class Status(View, frozen=True):
    """A summary of the scheduler. ``timings``: counts and sums of seconds since the start; ``requests``: by name."""

    version: str
    uptime_s: float
    now: float
    update_period_s: float
    last_update_age_s: float | None
    default_tree: str
    timings: dict[str, float]
    requests: dict[str, RequestTiming]
    counts: ClusterCounts


class TreeTotals(View, frozen=True):
    """Totals of a tree: its nodes' capacity, and its jobs' requests, limits and usage as last reported.

    ``limit_cores``: allocated to the jobs; ``used_cores``: measured usage. ``reclaimed_cores``: requested by jobs, and
    free for others now. ``waiting_cores``: demand of operations that are not admitted, in addition to ``demand_cores``.
    ``idle``: how the capacity is divided; ``why``: the reason why CPU is idle while work waits. Both are from the last
    report; before the first report, null and ""."""

    name: str
    is_default: bool
    node_count: int
    online_node_count: int
    pool_count: int
    running_operation_count: int
    pending_operation_count: int
    capacity_cores: float
    ordered_cores: float
    limit_cores: float
    used_cores: float
    reclaimed_cores: float
    demand_cores: float
    waiting_cores: float
    overcommitted_nodes: int
    idle: IdleParts | None
    why: str


class Overview(View, frozen=True):
    """The first page. ``why``: of the tree where most CPU is idle while work waits. ``history``: null if turned off."""

    why: str
    status: Status
    health: Health
    alerts: list[Alert]
    trees: list[TreeTotals]
    history: HistoryStatus | None


class Me(View, frozen=True):
    """The user and scheduler of the request. ``is_open``: every client that reaches the address may do everything."""

    user: str
    groups: list[str]
    is_admin: bool
    needs_token: bool
    is_open: bool
    version: str
    cluster_name: str
    started_at: float
    now: float
    history_length_s: float
    takes_idempotency_keys: bool = True
    """False if the scheduler is too old for keys; then a change must not be sent a second time."""


def choose_sentence(reports: Sequence[IdleReport]) -> str:
    """Return the sentence of the tree where most CPU is idle while work waits; without any, of the first tree."""
    chosen = max(reports, key=lambda each: (each.parts.held_back, bool(each.causes)), default=None)
    return "" if chosen is None else chosen.sentence


def count_all(state: State, shown_states: Mapping[str, int]) -> ClusterCounts:
    """Count all objects. ``shown_states``: ``shown_state`` -> number of live operations."""
    preemptions: dict[str, int] = {}
    for (_, _, kind), number in state.preemption_counts.items():
        preemptions[kind] = preemptions.get(kind, 0) + number
    # Lists, here and in ``figures.TREE``: for each operation and node, a generator would take twice as long.
    running = [operation.record.state for operation in state.operations.values()].count("running")
    return ClusterCounts(
        trees=len(state.trees),
        pools=sum(len(tree.pools) for tree in state.trees.values()),
        nodes=len(state.nodes),
        online_nodes=sum([node.is_online for node in state.nodes.values()]),
        pending_operations=len(state.operations) - running,
        running_operations=running,
        finished_operations=len(state.finished),
        active_jobs=sum([len(node.jobs) for node in state.nodes.values()]),
        stopping_jobs=sum([len(node.stopping) for node in state.nodes.values()]),
        preemptions=preemptions,
        shown_states=dict(shown_states),
    )


def view_totals(tree: Tree, cores: CoreSums, is_default: bool, report: IdleReport | None = None) -> TreeTotals:
    of_tree = {name: read(tree) for name, read in _OF_TREE.items()}
    of_root = {name: figures.POOL[name](tree.root) for name in _OF_ROOT}
    ordered = cores.ordered.get(ROOT_POOL, 0.0)
    return TreeTotals(
        name=tree.name, is_default=is_default, ordered_cores=ordered, used_cores=cores.used.get(ROOT_POOL, 0.0),
        reclaimed_cores=max(ordered - of_root["limit_cores"], 0.0), idle=None if report is None else report.parts,
        why="" if report is None else report.sentence, **of_tree, **of_root,
    )  # fmt: skip


_OF_TREE: Final = choose_figures(TreeTotals, figures.TREE)
_OF_ROOT: Final = ("running_operation_count", "limit_cores", "demand_cores", "waiting_cores")
