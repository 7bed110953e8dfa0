"""Rows of a report: their order, and figures computed from the scheduler's answer.

Pure but for the local time zone. Amounts are core-hours, limits cores, times seconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from cpumond.core.errors import NoSuchError
from cpumond.core.measures import format_span
from cpumond.core.words import count, did_you_mean, escape, format_time, quoted
from cpumond.scheduler.elements.account import BudgetView
from cpumond.scheduler.history.model import ReportRow, ReportTree, ReportView

Kind = Literal["total", "pool", "operation", "user", "sum"]

DAY_S: Final = 86_400.0
NO_USERS: Final = (
    "Operations are known for the last 24 h. For longer times users of whole trees are listed (without --pool); "
    "administrators see all of them."
)


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a row: its attribute, its heading, its name for programs, and its meaning."""

    name: str
    heading: str
    machine_name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Line:
    """A row, indented by ``depth``. Its kind ``total`` is for a whole tree, ``sum`` for the operations listed."""

    kind: Kind
    tree: str
    row: ReportRow
    depth: int = 0

    def value(self, measure: Measure) -> float | None:
        """A number of the row; None for a ratio to 0, and for the peak of a sum, since rows peak at different times."""
        value: float = getattr(self.row, measure.name)
        if measure in RATIOS:
            base: float = getattr(self.row, BASE_OF_RATIO[measure.name])
            return value / base * 100.0 if base > 0 else None
        return None if measure is PEAK and self.kind == "sum" else value


class PoolTree(ReportTree, frozen=True):
    """The part of a tree that belongs to one pool; ``left_out_operations`` are of this pool.

    ``uncertain_operations``: others left out of the tree; the answer does not say whether they are of this pool."""

    uncertain_operations: int = 0


AMOUNTS: Final = (
    Measure("ordered", "requested", "ordered_core_hours", "core-hours that jobs could have used by their requests"),
    Measure("used", "used", "used_core_hours", "core-hours of CPU time that they used"),
    Measure("reclaimed", "reclaimed", "reclaimed_core_hours",
            "core-hours that their limits were lowered by, free for others"),
    Measure("throttled", "throttled", "throttled_core_hours",
            "core-hours for which their threads were throttled by a limit"),
    Measure("late", "late", "late_core_hours",
            "the part of throttled under a lowered limit, which was raised too late"),
    Measure("lost", "lost", "lost_core_hours", "core-hours of work that preemptions lost, for operations still known"),
)  # fmt: skip
RATIOS: Final = (
    Measure("used", "used %", "used_of_ordered_percent", "used in percent of requested"),
    Measure("reclaimed", "reclaimed %", "reclaimed_of_ordered_percent", "reclaimed in percent of requested"),
    Measure("late", "late %", "late_of_throttled_percent", "late in percent of throttled"),
)
BASE_OF_RATIO: Final = {"used": "ordered", "reclaimed": "ordered", "late": "throttled"}
PEAK: Final = Measure("peak_limit_cores", "peak limit", "peak_limit_cores", "cores, the most that limits allowed")
LIMIT: Final = Measure("limit", "limit", "limit_core_hours", "core-hours that limits allowed")
"""This measure is only in CSV: tables for people have ``reclaimed``."""

MEASURES: Final = (
    AMOUNTS[0], AMOUNTS[1], RATIOS[0], AMOUNTS[2], RATIOS[1], AMOUNTS[3], AMOUNTS[4], RATIOS[2], AMOUNTS[5], PEAK,
)  # fmt: skip
"""All numbers of a row, in the order of the columns."""


def add_up(tree: ReportTree) -> Line:
    sums = {measure.name: sum(getattr(row, measure.name) for row in tree.operations) for measure in (*AMOUNTS, LIMIT)}
    return Line("sum", tree.tree, ReportRow(name="total", points=sum(row.points for row in tree.operations), **sums))


def list_pools(tree: ReportTree) -> Iterator[Line]:
    """The pools of a tree without its root, each before its sub-pools, siblings by name."""
    rows = sorted(tree.pools, key=lambda row: row.name)
    known = {row.name for row in rows}
    children: dict[str | None, list[ReportRow]] = {}
    for row in rows:
        children.setdefault(row.parent if row.parent in known else None, []).append(row)
    seen: set[str] = set()
    # All rows follow the roots, so that none is left out even if two pools of an answer are each other's parent.
    for top in (*children.get(None, ()), *rows):
        stack = [(top, 0)]
        while stack:
            row, depth = stack.pop()
            if row.name not in seen:
                seen.add(row.name)
                yield Line("pool", tree.tree, row, depth)
                stack += [(child, depth + 1) for child in reversed(children.get(row.name, ()))]


def list_operations(tree: ReportTree) -> Iterator[Line]:
    return (Line("operation", tree.tree, row) for row in tree.operations)


def list_users(tree: ReportTree) -> Iterator[Line]:
    return (Line("user", tree.tree, row) for row in tree.users)


def is_by_day(report: ReportView) -> bool:
    """Whether the report consists of whole days, with users instead of operations."""
    return report.until - report.since > DAY_S


def keep_pool(report: ReportView, pool: str, top: int) -> ReportView:
    """The report reduced to a pool with its sub-pools and ``top`` of their operations. Raises NoSuchError."""
    trees = [_keep_pool(tree, pool, top) for tree in report.trees if any(row.name == pool for row in tree.pools)]
    if not trees:
        names = sorted({row.name for tree in report.trees for row in tree.pools})
        hint = did_you_mean(pool, names) or "; `cpumond report` without --pool lists the pools"
        raise NoSuchError(f"--pool: the history has no pool {quoted(pool)} in this time{hint}")
    return msgspec.structs.replace(report, trees=trees)


def _keep_pool(tree: ReportTree, pool: str, top: int) -> PoolTree:
    kept = {pool}
    stack = [pool]
    while stack:
        parent = stack.pop()
        below = {row.name for row in tree.pools if row.parent == parent} - kept
        kept |= below
        stack += below
    operations = [row for row in tree.operations if row.pool in kept]
    return PoolTree(
        tree=tree.tree,
        total=next(row for row in tree.pools if row.name == pool),
        pools=[row for row in tree.pools if row.name in kept],
        operations=operations[:top],
        left_out_operations=len(operations[top:]),
        budgets=[each for each in tree.budgets if each.kind == "pool" and each.name in kept],
        uncertain_operations=tree.left_out_operations + sum(not row.pool for row in tree.operations),
    )


def describe_budgets(budgets: Iterable[BudgetView]) -> Iterator[str]:
    """The spent part of core-hour budgets, and the day on which they will be spent at the present rate."""
    return (f"budget of {each.kind} {escape(each.name)}: {each.text}" for each in budgets)


def describe_time(report: ReportView, since_s: float) -> Iterator[str]:
    """The time that the report covers, and why it is less than the ``since_s`` requested."""
    detail = "in whole days, UTC" if is_by_day(report) else f"a point every {format_span(report.period_s)}"
    covered = f"{format_span(report.covered_s)} of it are recorded, {detail}"
    yield f"{format_time(report.since)} to {format_time(report.until)}: {covered}"
    # A difference of a point or two needs no sentence.
    if report.covered_s < since_s - max(2 * report.period_s, 0.01 * since_s):
        yield (
            f"This is less than the {format_span(since_s)} requested: the history began later, [history] length or "
            "max_size of the scheduler's configuration ended it, or the scheduler was down."
        )
    if report.operations_without_series:
        yield (
            f"Up to {count(report.operations_without_series, 'operation')} at a time had no series of their own, more "
            "than [history] max_series allows: they are not listed, their core-hours are in those of their pools."
        )


def describe_left_out(tree: ReportTree) -> str:
    """The number of operations that are not shown, "" for none."""
    sentences = []
    if tree.left_out_operations:
        more = count(tree.left_out_operations, "more operation")
        sentences.append(f"{more} with smaller requests: --top shows more of them")
    if isinstance(tree, PoolTree) and tree.uncertain_operations:
        sentences.append(
            f"at most {count(tree.uncertain_operations, 'more operation')}, of all pools, may belong to this one: "
            "their requests are too small for the answer to list them, or the scheduler has forgotten them"
        )
    return "; ".join(sentences)
