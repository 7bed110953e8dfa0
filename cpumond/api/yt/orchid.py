"""Content of ``//sys/scheduler/orchid``: the current trees, operations, jobs and nodes (semantics.md 5). Pure.

Converts the scheduler's state and the results of its last updates to plain values without infinity and NaN. Values are
computed on demand: a ``Lazy`` map makes one at a time. Each request gets its own map; if the state changes while a
large map is read, its values are of different moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from cpumond.api.permissions import encode_acl, hide_secrets, without_secrets
from cpumond.api.updated_tree import LookAt, Results, UpdatedTree, look_once
from cpumond.api.views import count_jobs, view_forecast
from cpumond.api.yt.errors import make_error, make_failure
from cpumond.api.yt.jobs import JobStatistics, view_preemption
from cpumond.api.yt.lazy import MISSING, Lazy, amounts, fixed, iso_time, table
from cpumond.api.yt.orchid_attributes import operation_attributes, pool_attributes
from cpumond.fairshare.folding import fold_weight
from cpumond.fairshare.resources import ZERO, add, greatest, positive_part, subtract
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers import resulting
from cpumond.scheduler.decide import admission, placement
from cpumond.scheduler.elements import Node, Operation, OperationElement, PoolElement, Tree
from cpumond.scheduler.model import ROOT_POOL, SUBPOOL_DELIMITER, Incarnation, OperationRecord, to_vector
from cpumond.scheduler.settings import operations
from cpumond.scheduler.settings.attributes import ALIASES
from cpumond.scheduler.settings.spec_patch import view_patch
from cpumond.scheduler.state import State

SHOWN_PREEMPTIONS: Final = 1000


def _by_pool(tree: Tree, view: Callable[[PoolElement], Any]) -> Lazy:
    """Return a map of all pools, the root first, with the results of ``view``."""

    def find(name: str) -> Any:
        pool = tree.root if name == ROOT_POOL else tree.pools.get(name)
        return MISSING if pool is None else view(pool)

    return Lazy(lambda: (ROOT_POOL, *tree.pools), find, lambda name: f'Pool tree "{tree.name}" has no pool "{name}"')


def tree_orchid(view: UpdatedTree, rights: Rights) -> Lazy:
    """``pool_trees/<tree>``: pools, operations, and values of the tree as a whole (5.1)."""
    tree = view.tree

    def readable(elements: Mapping[str, OperationElement]) -> Mapping[str, OperationElement]:
        if rights.user.admin:
            return elements
        return {name: each for name, each in elements.items() if rights.may_read(each.operation.record)}

    view_pool, view_operation = partial(pool_attributes, view), partial(operation_attributes, view)

    return fixed(
        {
            "pools": lambda: _by_pool(tree, view_pool),
            "child_pools_by_pool": lambda: _by_pool(tree, lambda pool: table(pool.children, view_pool)),
            "operations": lambda: table(readable(tree.operations), view_operation),
            "operations_by_pool": lambda: _by_pool(tree, lambda pool: table(readable(pool.operations), view_operation)),
            "config": lambda: tree_options(tree),
            "resource_usage": lambda: amounts(tree.root.usage),
            "resource_limits": lambda: amounts(tree.total),
            "node_count": lambda: len(tree.nodes),
            "node_addresses": lambda: sorted(node.address for node in tree.nodes.values()),
            "pool_count": lambda: len(tree.pools),
            "operation_count": lambda: tree.root.operation_count,
            "running_operation_count": lambda: tree.root.running_operation_count,
            "resource_distribution_info": lambda: resource_distribution_info(view),
            "user_to_ephemeral_pools": lambda: _ephemeral_pools(tree),
            "errors": lambda: list(tree.errors),
        },
        frozenset({"child_pools_by_pool", "operations", "operations_by_pool"}),
    )


def resource_distribution_info(view: UpdatedTree) -> dict[str, Any]:
    """Return the sums of the guarantees of the root's children, by kind, and what they leave of the cluster (5.3)."""
    strong, burst, flow, distributed = ZERO, ZERO, ZERO, ZERO
    for pool in view.tree.root.children.values():
        given = pool.settings.integral_guarantees
        own = to_vector(pool.settings.strong_guarantee_resources, 0.0)
        own_burst = to_vector(given.burst_guarantee_resources, 0.0)
        own_flow = to_vector(given.resource_flow, 0.0)
        strong, burst, flow = add(strong, own), add(burst, own_burst), add(flow, own_flow)
        distributed = add(add(distributed, own), greatest(own_burst, own_flow))
    return {
        "distributed_resources": amounts(distributed),
        "distributed_strong_guarantee_resources": amounts(strong),
        "distributed_burst_guarantee_resources": amounts(burst),
        "distributed_resource_flow": amounts(flow),
        "undistributed_resources": amounts(subtract(view.total, distributed)),
        "undistributed_resource_flow": amounts(positive_part(subtract(burst, flow))),
        "undistributed_burst_guarantee_resources": amounts(positive_part(subtract(flow, burst))),
    }


TIMES: Final = ("_timeout", "_timeout_limit", "_period", "_backoff", "_time")
"""Endings of the names of options whose values are in milliseconds."""


def tree_options(tree: Tree) -> dict[str, Any]:
    """Return all options of a tree with the values in force, under every accepted name (2.4)."""
    options = _plain(tree.config.settings)
    rules = tree.root.rules
    if rules is not None:
        options["min_share_preemption_timeout"] = rules.min_share_timeout_s * 1e3
        options["min_share_preemption_timeout_limit"] = rules.min_share_timeout_limit_s * 1e3
        options["fair_share_preemption_timeout_limit"] = rules.fair_share_timeout_limit_s * 1e3
        options["fair_share_starvation_tolerance_limit"] = rules.tolerance_limit
    for given in (options, options["integral_guarantees"]):
        for name, value in given.items():
            if name.endswith(TIMES) and float(value).is_integer():
                given[name] = int(value)
    known = {alias: options[name] for alias, name in ALIASES["tree"].items() if name in options}
    return {**known, **options}


def _plain(value: Any) -> Any:
    """Return settings as dictionaries, including defaults; options without a value are left out."""
    if isinstance(value, msgspec.Struct):
        parts = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: _plain(part) for name, part in parts.items() if part is not None}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _ephemeral_pools(tree: Tree) -> dict[str, list[str]]:
    """Return user -> names of the ephemeral pools created for the user, except pools ``parent$user`` (2.9)."""
    found: dict[str, list[str]] = {}
    for pool in tree.pools.values():
        if pool.is_ephemeral and SUBPOOL_DELIMITER not in pool.name:
            found.setdefault(pool.owner, []).append(pool.name)
    return found


def _options_per_tree(record: OperationRecord) -> dict[str, Any]:
    plain = {name: msgspec.to_builtins(options) for name, options in record.trees.items()}
    return {name: {"weight": fold_weight(name, record.trees[name].weight), **plain[name]} for name in plain}


def _filter_of_all_trees(record: OperationRecord) -> str:
    """Return the operation's filter if it is the same in all of its trees, else ""."""
    filters = {options.scheduling_tag_filter for options in record.trees.values()}
    return filters.pop() if len(filters) == 1 else ""


def job_counts(record: OperationRecord, live: Operation | None) -> dict[str, int]:
    """Return the numbers of an operation's jobs by state; ``total``: number of jobs in its specification."""
    counts = count_jobs(record, live)
    names = ("total", "pending", "active", "completed", "failed", "aborted", "lost")
    return {"running" if name == "active" else name: getattr(counts, name) for name in names}


def _aborted_counts(record: OperationRecord) -> dict[str, Any]:
    """Return the numbers of aborted jobs by reason, in YTsaurus' form."""
    reasons = dict(record.aborted_for)
    total = sum(counts.aborted for counts in record.counts.values())
    if total > sum(reasons.values()):
        reasons["other"] = reasons.get("other", 0) + total - sum(reasons.values())
    return {"total": total, "scheduled": reasons, "non_scheduled": {}}


def view_incarnation(begun: Incarnation) -> dict[str, Any]:
    """Return one incarnation of an operation with ``gang_options``, in the form of ``list_operation_events``."""
    event = {"timestamp": iso_time(begun.at), "event_type": "incarnation_started", "incarnation": begun.id}
    if not begun.reason:
        return event
    if begun.job_id:
        info: dict[str, Any] = {"trigger_job_id": begun.job_id}
        if begun.error is not None:
            info["trigger_job_error"] = make_failure(begun.error)
        if begun.abort_reason:
            info["abort_reason"] = begun.abort_reason
    else:
        info = {"expected_job_count": begun.expected, "actual_job_count": begun.actual, "task_name": begun.task}
    return {**event, "incarnation_switch_reason": begun.reason, "incarnation_switch_info": info}


def _tasks(record: OperationRecord, live: Operation | None) -> list[dict[str, Any]]:
    active: dict[str, int] = {}
    for element in live.elements.values() if live is not None else ():
        for job in element.jobs.values():
            active[job.task.name] = active.get(job.task.name, 0) + 1
    shown = []
    for task in record.tasks:
        counts = record.counts.get(task.name)
        counter = {
            "total": task.job_count,
            "pending": live.needed.get(task.name, 0) if live is not None else 0,
            "running": active.get(task.name, 0),
            **{name: getattr(counts, name, 0) for name in ("completed", "failed", "aborted", "lost")},
        }
        shown.append({"task_name": task.name, "job_counter": counter, "job_resources": amounts(task.resources)})
    return shown


def _result(record: OperationRecord) -> Any:
    if not record.is_finished:
        return MISSING
    if record.failure is not None:
        return {"error": make_failure(record.failure)}
    return {"error": make_error(record.error, int(record.state != "completed"))}


def _alerts(record: OperationRecord, live: Operation | None, told: list[str]) -> dict[str, Any]:
    """Return alerts: a waiting operation's pool is full (3.2); no job can start (3.7); ``told`` about options."""
    alerts: dict[str, Any] = {}
    for element in live.elements.values() if live is not None and not record.running_in else ():
        full = admission.find_full(element)
        if full is not None:
            details = {"pool": full.name, "limit": full.max_running_operation_count, "pool_tree": element.tree.name}
            alerts["operation_pending"] = make_error("Max running operation count violated", 1, details)
            break
    if record.suspended_for is not None:
        suspended = make_error("Operation is suspended since a job failed")
        alerts["operation_suspended"] = {**suspended, "inner_errors": [make_failure(record.suspended_for)]}
    stuck = [] if live is None else placement.list_alerts(live)
    if stuck:
        alerts[stuck[0][0]] = make_error("; ".join(sentence for _, sentence in stuck))
    if told:
        alerts["unrecognized_spec"] = make_error("; ".join(told))
    return alerts


def _brief_spec(record: OperationRecord) -> dict[str, Any]:
    pool = next((options.pool for options in record.trees.values()), "")
    brief = {"title": record.title, "alias": record.alias, "pool": pool}
    return {name: value for name, value in brief.items() if value}


def operation_info(
    rights: Rights, record: OperationRecord, look_at: LookAt, now: float | None = None,
    statistics: JobStatistics | None = None,
) -> Lazy:  # fmt: skip
    """Return an operation, live or finished: the answer of ``get_operation`` (yt_protocol.md 10) at ``now``.
    ``statistics``: those of its jobs.

    The answer contains no environment if ``rights`` do not allow reading it."""
    live, given = rights.state.operations.get(record.id), record.spec
    hide: Callable[[dict[str, Any]], dict[str, Any]] = dict
    if not rights.may_read_secrets(record):
        record, hide = hide_secrets(record), without_secrets

    def per_tree() -> Lazy:
        return table(live.elements if live is not None else {}, lambda e: operation_attributes(look_at(e.tree), e))

    def progress() -> Lazy:
        return fixed(
            {
                "jobs": lambda: {**job_counts(record, live), "aborted": _aborted_counts(record)},
                "tasks": lambda: _tasks(record, live),
                "job_statistics": lambda: MISSING if statistics is None else statistics.view(),
                "scheduling_info_per_pool_tree": per_tree,
            }
        )

    return fixed(
        {
            "id": lambda: record.id,
            "type": lambda: record.type,
            "operation_type": lambda: record.type,
            "state": lambda: record.state,
            "authenticated_user": lambda: record.user,
            "start_time": lambda: iso_time(record.start_time),
            "finish_time": lambda: MISSING if record.finish_time is None else iso_time(record.finish_time),
            "suspended": lambda: record.suspended,
            "alias": lambda: record.alias or MISSING,
            "brief_spec": lambda: _brief_spec(record),
            "spec": lambda: record.spec,
            "provided_spec": lambda: record.spec,
            "full_spec": lambda: resulting.full_spec(record, live),
            "cumulative_spec_patch": lambda: view_patch(record),
            "unrecognized_spec": lambda: hide(operations.find_unrecognized(given)),
            "runtime_parameters": lambda: {
                "scheduling_tag_filter": _filter_of_all_trees(record),
                "scheduling_options_per_pool_tree": _options_per_tree(record),
                "owners": [],
                "acl": encode_acl(record.acl),
                "annotations": record.spec.get("annotations", {}) if record.annotations is None else record.annotations,
                "erased_trees": operations.list_erased_trees(record),
            },
            "brief_progress": lambda: _brief_progress(rights.state, record, live, now),
            "progress": progress,
            "task_names": lambda: [task.name for task in record.tasks],
            "result": lambda: _result(record),
            "controller": lambda: {"operation_incarnation": record.incarnation} if record.incarnation else MISSING,
            "alerts": lambda: _alerts(record, live, operations.unrecognized_warnings(given)),
            "alert_events": list,
            "events": list,
        }
    )


def _brief_progress(state: State, record: OperationRecord, live: Operation | None, now: float | None) -> dict[str, Any]:
    """Return counts of jobs and, if there is a forecast, times of start and end, in the form of ``yt``.

    The client of ``yt`` shows them only if ``build_time`` is later than in the answer before."""
    outlook, jobs = view_forecast(state, record.id), job_counts(record, live)
    brief: dict[str, Any] = {"state": record.state, "jobs": jobs, "total_job_counter": jobs}
    if now is not None:
        brief["build_time"] = iso_time(now)
    if outlook is None:
        return brief
    times = {name: getattr(outlook, name) for name in outlook.__struct_fields__}
    return {**brief, "forecast": {name: iso_time(at) for name, at in times.items() if at is not None}}


USER_TAGS: Final = "user_tags"


def node_info(node: Node) -> dict[str, Any]:
    """Return a node as its registration and its last heartbeat described it."""
    return {
        "id": node.id, "address": node.address, "state": "online" if node.is_online else "offline",
        "tags": sorted(node.tags), USER_TAGS: list(node.user_tags), "pool_tree": node.tree or "",
        "resource_limits": amounts(node.capacity), "resource_usage": amounts(node.used),
        "foreign_resource_usage": amounts(node.foreign_usage), "last_seen_time": iso_time(node.last_seen),
        "running_job_count": len(node.jobs), "stopping_job_count": len(node.stopping),
        "overcommit_count": node.overcommit_count, "is_overcommitted": node.overcommitted_since is not None,
        "disable_scheduler_jobs": node.cordon is not None,
    }  # fmt: skip


def nodes_by_address(state: State) -> dict[str, Node]:
    """Return address -> node. If an earlier node has the same address, a node's id is used instead of the address."""
    found: dict[str, Node] = {}
    for node in state.nodes.values():
        found[node.address if node.address not in found else node.id] = node
    return found


def _operations(rights: Rights, look_at: LookAt) -> Lazy:
    def find(operation_id: str) -> Any:
        record = rights.state.record_of(operation_id)
        return MISSING if record is None or not rights.may_read(record) else operation_info(rights, record, look_at)

    def names() -> list[str]:
        return [name for name, each in rights.state.operations.items() if rights.may_read(each.record)]

    return Lazy(names, find, lambda name: f"No such operation {name}", has_all=True)


def scheduler_orchid(rights: Rights, results: Results) -> Lazy:
    """Return everything below ``//sys/scheduler/orchid/scheduler`` (5.1) that the user may read."""
    state, look_at = rights.state, look_once(results)

    def preemptions() -> list[dict[str, Any]]:
        recent = list(state.preemptions)[-SHOWN_PREEMPTIONS:]
        victims = ((record, state.record_of(record.operation_id)) for record in reversed(recent))
        return [view_preemption(record) for record, victim in victims if victim is None or rights.may_read(victim)]

    return fixed(
        {
            "pool_trees": lambda: table(state.trees, lambda tree: tree_orchid(look_at(tree), rights)),
            "scheduling_info_per_pool_tree": lambda: table(
                state.trees, lambda tree: fixed({"fair_share_info": lambda: tree_orchid(look_at(tree), rights)})
            ),
            "default_pool_tree": lambda: state.config.default_tree,
            "default_fair_share_tree": lambda: state.config.default_tree,
            "user_to_ephemeral_pools": lambda: {name: _ephemeral_pools(tree) for name, tree in state.trees.items()},
            "operations": lambda: _operations(rights, look_at),
            "nodes": lambda: table(nodes_by_address(state), node_info),
            "preemptions": preemptions,
        },
        frozenset({"pool_trees", "scheduling_info_per_pool_tree", "operations", "nodes", "preemptions"}),
    )
