"""Requests about the past: preemptions, the history of figures, reports, savings."""

from __future__ import annotations

import math

import msgspec

from cpumond.api import node_views, pool_views
from cpumond.api.glance_views import PoolTrends, PreemptionGroups, group_preemptions
from cpumond.api.json import requests, rights
from cpumond.api.json.call import Call
from cpumond.scheduler.access import Rights
from cpumond.scheduler.access.required import check_operation
from cpumond.scheduler.history.model import HistoryView, NodeMap, ReportView
from cpumond.scheduler.history.recorder import HistoryRecorder
from cpumond.scheduler.history.savings import SavingsView
from cpumond.scheduler.history.waste import WasteView
from cpumond.scheduler.model import ACCESS_DENIED, NO_SUCH_JOB, RESOLVE, CommandError, OperationRecord
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.state import State


def _history_of(scheduler: Scheduler) -> HistoryRecorder:
    if scheduler.history is None:
        raise CommandError("history is turned off: [history] length = 0", RESOLVE)
    return scheduler.history


async def list_trends(call: Call) -> PoolTrends:
    query: requests.TrendsQuery = call.query
    tree = call.tree
    names = list(dict.fromkeys(filter(None, query.pools.split("\n"))))
    if len(names) > requests.MAX_TRENDS:
        raise CommandError(f"pools: {len(names)} names; request at most {requests.MAX_TRENDS} at once")
    until = call.now
    since, found = await _history_of(call.scheduler).trends(tree.name, names, query.since_s, until, query.count)
    return PoolTrends(tree.name, since, (until - since) / query.count, found)


async def read_node_map(call: Call) -> NodeMap:
    query: requests.NodeMapQuery = call.query
    history, now = _history_of(call.scheduler), call.now
    nodes = sorted(node.id for node in call.state.nodes.values() if query.tree in ("", node.tree))
    return await history.node_map(nodes, query.measure, now - query.since_s, now, query.count)


def list_preemption_groups(call: Call) -> PreemptionGroups:
    query: requests.PreemptionGroupsQuery = call.query
    return group_preemptions(node_views.list_fitting(call.rights, query.operation, query.pool), call.rights)


async def read_history(call: Call) -> HistoryView:
    query: requests.HistoryQuery = call.query
    history, until = _history_of(call.scheduler), min(call.now, query.until or math.inf)
    since = query.since or until - query.since_s
    if since >= until:
        raise CommandError(f"since is {since:.0f}, which is not before {until:.0f}, the end: give an earlier since")
    if query.kind == "pool" and not query.tree:
        query = msgspec.structs.replace(query, tree=call.state.config.default_tree)
    tree, name, refusal = query.tree, query.name, None
    try:
        tree, name = _find_series(query, call.rights)
    except CommandError as error:
        if error.code == ACCESS_DENIED:
            raise
        refusal = error
    found = await history.read(query.kind, tree, name, since, until, query.max_points)
    if refusal is not None and not found.times:
        raise refusal
    return found


def _find_series(query: requests.HistoryQuery, asker: Rights) -> tuple[str, str]:
    """Return the tree and the name of a series in the history. Raises CommandError if its object no longer exists."""
    state, tree, name = asker.state, query.tree, query.name
    if query.kind == "pool":
        return tree, pool_views.find_pool(state.find_tree(tree), name).name
    if query.kind == "operation":
        record = state.find_record(name)
        check_operation(asker, record, "read")
        if tree and tree not in record.trees:
            raise CommandError(f"Operation {record.id} does not run in tree {tree!r}", RESOLVE)
        return tree, record.id
    if query.kind == "node":
        return "", node_views.find_node(state, name).id
    check_operation(asker, _find_operation_of(state, name), "read")
    return "", name


def _find_operation_of(state: State, job_id: str) -> OperationRecord:
    living = state.jobs.get(job_id)
    if living is not None:
        return living.element.operation.record
    for operation_id, jobs in state.finished_jobs.items():
        if job_id in jobs:
            return state.find_record(operation_id)
    raise CommandError(f"No such job {job_id}", NO_SUCH_JOB)


async def make_report(call: Call) -> ReportView:
    query: requests.ReportQuery = call.query
    now = call.now
    found = await _history_of(call.scheduler).report(now - query.since_s, now, query.tree or None, query.top)
    if query.tree and not found.trees:
        call.state.find_tree(query.tree)
    budgets = {tree.tree: pool_views.list_budgets(call.rights, tree.tree, now) for tree in found.trees}
    trees = [msgspec.structs.replace(tree, budgets=budgets[tree.tree]) for tree in found.trees]
    return rights.filter_report(msgspec.structs.replace(found, trees=trees), call.rights)


async def make_savings(call: Call) -> SavingsView:
    query: requests.SavingsQuery = call.query
    return await _history_of(call.scheduler).savings(call.now - query.since_s, call.now, query.tree or None)


async def make_waste(call: Call) -> WasteView:
    asker = "" if call.user.admin else call.user.name
    found = await _history_of(call.scheduler).waste(call.now, **call.given, readable=call.rights.readable, asker=asker)
    if call.query.tree and not (found.users or found.pools):
        call.state.find_tree(call.query.tree)
    return rights.filter_waste(found, call.rights)
