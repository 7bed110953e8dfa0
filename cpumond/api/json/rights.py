"""Requests about rights, and filtering of answers by rights (semantics.md 12)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import msgspec

from cpumond.api.json.parts import in_parts
from cpumond.api.json.requests import CanQuery
from cpumond.api.permissions import Can, PoolRights, check_question, find_target, judge_action, list_permissions
from cpumond.scheduler.access import Rights, explicit_pool
from cpumond.scheduler.answers.plan import ChangePlan
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.history.model import ReportTree, ReportView
from cpumond.scheduler.history.waste import WasteView
from cpumond.scheduler.model import ROOT_POOL
from cpumond.scheduler.rights.entries import Permission
from cpumond.scheduler.rights.users import User

LOOKED_UP_AT_ONCE: Final = 200
"""Number of pools whose access lists are looked up in one part."""


async def list_rights(rights: Rights, tree: Tree) -> PoolRights:
    """Return the user's rights on each pool of a tree."""
    state = rights.state
    found: dict[str, list[Permission]] = {}
    async for pools in in_parts([tree.root, *tree.pools.values()], LOOKED_UP_AT_ONCE):
        if state.trees.get(tree.name) is not tree:
            break
        rights = Rights(state, rights.user)
        known = (pool for pool in pools if pool.is_root or tree.pools.get(pool.name) is pool)
        found.update((pool.name, list_permissions(rights, pool)) for pool in known)
    return PoolRights(tree.name, found)


def judge_question(asker: Rights, query: CanQuery, find_known: Callable[[str], User]) -> Can:
    """Return whether a user may do something. ``find_known`` returns what is known of others. Raises CommandError."""
    state, groups = asker.state, frozenset(filter(None, query.groups.split(",")))
    target = find_target(state, query.object, query.tree)
    name = query.user or asker.user.name
    rights = asker
    if name != asker.user.name or groups:
        if not asker.user.admin:
            check_question(asker, target, name)
        known = find_known(name)
        rights = Rights(state, dataclasses.replace(known, groups=known.groups | groups))
    verdict = judge_action(state, rights, query.action, target)
    return Can(verdict.allowed, verdict.because)


def _is_hidden(rights: Rights, operation_id: str) -> bool:
    record = rights.state.record_of(operation_id)
    return record is not None and not rights.may_read(record)


def filter_plan(plan: ChangePlan, rights: Rights) -> ChangePlan:
    """Return a plan without the operations that the user may not read."""
    effects = [each for each in plan.effects if each.kind != "operation" or not _is_hidden(rights, each.name)]
    return msgspec.structs.replace(plan, effects=effects)


def filter_report(report: ReportView, rights: Rights) -> ReportView:
    """Return a report that counts unreadable operations as left out. Only administrators see other users in it."""
    return msgspec.structs.replace(report, trees=[_readable_part(tree, rights) for tree in report.trees])


def _readable_part(tree: ReportTree, rights: Rights) -> ReportTree:
    kept = [row for row in tree.operations if not _is_hidden(rights, row.name)]
    left_out = tree.left_out_operations + len(tree.operations) - len(kept)
    users = [row for row in tree.users if rights.user.admin or row.name == rights.user.name]
    return msgspec.structs.replace(tree, operations=kept, left_out_operations=left_out, users=users)


def filter_waste(waste: WasteView, rights: Rights) -> WasteView:
    """Return the waste of the user, and of pools whose operations the user may read. Administrators see all waste."""
    if rights.user.admin:
        return waste
    return msgspec.structs.replace(
        waste,
        users=[each for each in waste.users if each.name == rights.user.name],
        pools=[each for each in waste.pools if _may_read_pool(rights, each.tree, each.name)],
    )


def _may_read_pool(rights: Rights, tree: str, name: str) -> bool:
    """Whether the user may read an existing pool; data of pools that are gone are for administrators."""
    living = rights.state.trees.get(tree)
    pool = None if living is None else living.root if name == ROOT_POOL else living.pools.get(name)
    return pool is not None and rights.on_pool(tree, explicit_pool(pool), "read").allowed
