"""The report: totals of pools and operations."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from cpumond.scheduler.elements import Tree
from cpumond.scheduler.history.model import (
    HOUR_S,
    OPERATION,
    POOL,
    USER,
    Amounts,
    Key,
    PeriodTotals,
    ReportRow,
    ReportTree,
    ReportView,
)
from cpumond.scheduler.model import ROOT_POOL
from cpumond.scheduler.state import State

CORE_HOURS = ("ordered", "limit", "used", "reclaimed", "throttled", "late")


def make_report(
    state: State, period: PeriodTotals, since: float, until: float, period_s: float, tree: str | None
) -> ReportView:
    """Return the report. Users, titles and parents are those that ``state`` has at present."""
    totals = period.totals
    # Only the totals of days contain losses; points do not.
    lost = {key: each.lost / HOUR_S for key, each in totals.items() if each.lost} or _find_losses(state, since, until)
    names = [*state.trees, *sorted({key.tree for key in totals} - state.trees.keys())] if tree is None else [tree]
    trees: list[ReportTree] = []
    for name in names:
        mine = {key: each for key, each in totals.items() if key.tree == name}
        if not mine and name not in state.trees:
            continue
        root = Key(POOL, name, ROOT_POOL)
        total = mine.pop(root, Amounts())
        pools = {key.name: each for key, each in mine.items() if key.kind == POOL}
        known = list(list_pools(state.trees[name])) if name in state.trees else []
        users = [_row(key.name, each) for key, each in mine.items() if key.kind == USER]
        trees.append(
            ReportTree(
                tree=name,
                total=_row(ROOT_POOL, total, lost=lost.get(root, 0.0)),
                pools=[
                    _row(pool, pools[pool], parent=parent, lost=lost.get(Key(POOL, name, pool), 0.0))
                    for pool, parent in order_pools(known, pools)
                ],
                operations=[
                    _operation_row(state, key, each, lost.get(key, 0.0))
                    for key, each in mine.items()
                    if key.kind == OPERATION
                ],
                left_out_operations=period.left_out.get(name, 0),
                users=sorted(users, key=lambda row: (-row.ordered, -row.used, row.name)),
            )
        )
    return ReportView(since, until, period.covered_s, period_s, trees, period.without_series)


def list_pools(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield the pools of a tree without the root, depth first, each with its parent."""
    waiting = [tree.root]
    while waiting:
        pool = waiting.pop()
        waiting += sorted(pool.children.values(), key=lambda child: child.name, reverse=True)
        if pool.parent is not None:
            yield pool.name, pool.parent.name


def order_pools(known: Collection[tuple[str, str]], wanted: Mapping[str, Amounts]) -> Iterator[tuple[str, str]]:
    """Yield the wanted pools: first the existing ones in the order of ``list_pools``, then the others by name."""
    yield from (each for each in known if each[0] in wanted)
    names = {name for name, _ in known}
    yield from ((name, "") for name in sorted(wanted) if name not in names)


def _find_losses(state: State, since: float, until: float) -> dict[Key, float]:
    """Return the core-hours lost by preemptions between two moments, by pool and operation."""
    ended = (job.preemption for jobs in state.finished_jobs.values() for job in jobs.values())
    stopping = (job.stop.record for job in state.jobs.values() if job.stop is not None)
    lost: dict[Key, float] = {}
    for record in itertools.chain(ended, stopping):
        if record is None or record.kind == "aborted" or not since <= record.at <= until:
            continue
        tree = state.trees.get(record.tree)
        pool = None if tree is None else tree.pools.get(record.pool)
        names = [record.pool] if pool is None else [pool.name, *(above.name for above in pool.ancestors())]
        keys = [Key(OPERATION, record.tree, record.operation_id), *(Key(POOL, record.tree, name) for name in names)]
        if pool is None and record.pool != ROOT_POOL:
            keys.append(Key(POOL, record.tree, ROOT_POOL))
        for key in keys:
            lost[key] = lost.get(key, 0.0) + record.lost_core_seconds / HOUR_S
    return lost


def _operation_row(state: State, key: Key, amounts: Amounts, lost: float) -> ReportRow:
    record = state.record_of(key.name)
    if record is None:
        return _row(key.name, amounts, lost=lost)
    pool = record.trees[key.tree].pool if key.tree in record.trees else ""
    return _row(key.name, amounts, title=record.title, user=record.user, pool=pool, state=record.state, lost=lost)


def _row(name: str, amounts: Amounts, **facts: Any) -> ReportRow:
    core_hours: dict[str, Any] = {field: getattr(amounts, field) / HOUR_S for field in CORE_HOURS}
    return ReportRow(name=name, **facts, **core_hours, peak_limit_cores=amounts.peak, points=int(amounts.points))
