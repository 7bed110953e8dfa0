"""Requests about trees and pools: why CPU is idle, plans of changes, rights."""

from __future__ import annotations

from cpumond.api import pool_views
from cpumond.api.json import requests, rights
from cpumond.api.json.call import Call
from cpumond.api.updated_tree import UpdatedTree
from cpumond.api.yt.orchid_attributes import pool_attributes
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.idle import IdleReport, in_pool, readable
from cpumond.scheduler.answers.plan import ChangePlan, make_plan, refused_plan, try_command
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.undo import ChangedSinceError, UndoChange
from cpumond.scheduler.state.transaction import Transaction
from cpumond.scheduler.trial.fork import ask


def read_edits(call: Call) -> tuple[Edit, ...]:
    body: requests.EditsBody = call.body
    return tuple(Edit(tuple(each.path), each.value, each.recursive) for each in body.edits)


def move_pool(call: Call) -> commands.MovePool:
    tree = commands.find_tree(call.state.config, call.path["tree"])
    pool = commands.find_pool(tree, call.path["pool"])
    return commands.MovePool(tree.name, pool.name, call.body.parent or pool.parent, call.body.name or pool.name)


def look_at(scheduler: Scheduler, tree: Tree) -> UpdatedTree:
    """A tree with the result of its last update."""
    kept = scheduler.updates.get(tree.name)
    return UpdatedTree(tree, None if kept is None else kept.result)


def view_pool_orchid(call: Call) -> dict[str, object]:
    return pool_attributes(look_at(call.scheduler, call.tree), call.pool).to_dict()


async def explain_idle(call: Call) -> IdleReport:
    query: requests.IdleQuery = call.query
    tree = call.tree
    pool = pool_views.find_pool(tree, query.pool) if query.pool else tree.root
    report = _filter_report(await call.scheduler.idle.read(tree), call.rights)
    if pool.is_root:
        return report
    above = frozenset(each.name for each in pool.ancestors())
    return in_pool(report, pool.name, above, frozenset(each.name for each in pool_views.walk_pools(pool)))


def last_idle_reports(call: Call) -> dict[str, IdleReport]:
    """Return tree -> what the user may see of the latest report on idle CPU; the default tree comes first."""
    default, rights = call.state.config.default_tree, call.rights
    known = sorted(call.scheduler.idle.reports.items(), key=lambda item: (item[0] != default, item[0]))
    return {name: _filter_report(report, rights) for name, report in known}


def _filter_report(report: IdleReport, rights: Rights) -> IdleReport:
    records = rights.state.record_of
    return readable(report, lambda name: (found := records(name)) is None or rights.may_read(found))


async def plan_change(call: Call) -> ChangePlan:
    scheduler, command, user, everything = call.scheduler, call.body, call.user, call.query.everything
    async with call.shared.plan_lock:
        state, now = call.state, call.now
        previous = {name: kept.previous_time for name, kept in scheduler.updates.items()}
        # A file may contain thousands of pools, so it is read in the forked process instead.
        change = None if isinstance(command, ApplyTree) else await _try_command(call, now)
        if isinstance(change, ChangePlan):
            return change

        def compute() -> ChangePlan:
            found = try_command(state, command, user, now) if change is None else change
            return found if isinstance(found, ChangePlan) else make_plan(state, found, now, previous, everything)

        plan, _ = await ask(compute, ChangePlan)
    return rights.filter_plan(plan, call.rights)


async def _try_command(call: Call, now: float) -> Transaction | ChangePlan:
    log, command = call.scheduler.event_log, call.body
    try:
        command = await log.resolve(command) if isinstance(command, UndoChange) else command
        return try_command(call.state, command, call.user, now)
    except ChangedSinceError as refusal:
        return refused_plan(await log.explain(command, refusal))
    except CommandError as refusal:
        return refused_plan(refusal)
