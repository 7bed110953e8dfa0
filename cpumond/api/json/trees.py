"""Requests about trees and pools: why CPU stands idle, what a change would do, rights."""

from __future__ import annotations

import asyncio

from cpumond.api import pool_views
from cpumond.api.json import requests, rights
from cpumond.api.json.call import Call
from cpumond.api.updated_tree import UpdatedTree
from cpumond.api.yt.orchid_attributes import pool_attributes
from cpumond.scheduler.access import Rights
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.undo import ChangedSinceError, UndoChange
from cpumond.scheduler.state.transaction import Transaction
from cpumond.scheduler.why.idle import IdleReport, in_pool, readable
from cpumond.scheduler.why.plan import Material, Plan, collect, make_plan, rebuild, refused_plan, try_command


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


def show_pool_orchid(call: Call) -> dict[str, object]:
    return pool_attributes(look_at(call.scheduler, call.tree), call.pool).to_dict()


async def explain_idle(call: Call) -> IdleReport:
    query: requests.IdleQuery = call.query
    tree = call.tree
    pool = pool_views.find_pool(tree, query.pool) if query.pool else tree.root
    report = _show_readable(await call.scheduler.idle.read(tree), call.rights)
    if pool.is_root:
        return report
    above = frozenset(each.name for each in pool.ancestors())
    below = frozenset(each.name for each in pool_views.walk_pools(pool))
    return in_pool(report, pool.name, above, below)


def last_idle_reports(call: Call) -> dict[str, IdleReport]:
    """Those that there are, as the asker may see them, by tree, the default one first."""
    default, rights = call.state.config.default_tree, call.rights
    known = sorted(call.scheduler.idle.reports.items(), key=lambda item: (item[0] != default, item[0]))
    return {name: _show_readable(report, rights) for name, report in known}


def _show_readable(report: IdleReport, rights: Rights) -> IdleReport:
    records = rights.state.record_of
    return readable(report, lambda name: (found := records(name)) is None or rights.may_read(found))


async def plan_change(call: Call) -> Plan:
    scheduler, query = call.scheduler, call.query
    async with call.shared.plan_lock:
        now, command = call.now, call.body
        previous = {name: kept.previous_time for name, kept in scheduler.updates.items()}
        if isinstance(command, ApplyTree):
            # A file may hold thousands of pools: it is read in the thread, too, against a copy of the state.
            material = collect(scheduler.state)
            plan = await asyncio.to_thread(_plan_file, material, command, call.user, now, previous, query.everything)
        else:
            change = await _try_command(call, now)
            if isinstance(change, Plan):
                return change
            material = collect(scheduler.state)
            plan = await asyncio.to_thread(make_plan, material, change, now, previous, everything=query.everything)
    return rights.show_readable_plan(plan, call.rights)


def _plan_file(
    material: Material, command: ApplyTree, user: User, now: float, previous: dict[str, float | None], everything: bool
) -> Plan:
    change = try_command(rebuild(material, material.config, now), command, user, now)
    if isinstance(change, Plan):
        return change
    return make_plan(material, change, now, previous, everything=everything)


async def _try_command(call: Call, now: float) -> Transaction | Plan:
    log, command = call.scheduler.event_log, call.body
    try:
        command = await log.resolve(command) if isinstance(command, UndoChange) else command
        return try_command(call.state, command, call.user, now)
    except ChangedSinceError as refusal:
        return refused_plan(await log.explain(command, refusal))
    except CommandError as refusal:
        return refused_plan(refusal)
