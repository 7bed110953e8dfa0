"""``cpumond report --savings``: value and cost of reclaimed CPU, for people and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Final

from cpumond.cli.output import draw_table, format_csv, guard_cell
from cpumond.cli.render import grid
from cpumond.cli.scheduler.pools import find_depths
from cpumond.core.measures import format_cores, format_span
from cpumond.core.words import escape, format_time, format_utc, iso_utc
from cpumond.scheduler.history.savings import SavingsRow, SavingsView
from cpumond.scheduler.model import ROOT_POOL

COLUMNS: Final = (
    ("extra jobs", "extra_jobs", "jobs that began although no request fitted any more: on CPU that others did not use"),
    ("extra", "extra_used", "core-hours that these jobs, or parts of them, used"),
    ("reclaimed", "reclaimed", "core-hours that limits were lowered by"),
    ("held back", "held_back", "core-hours for which jobs were throttled by a lowered limit"),
    ("lost", "lost", "core-hours of work that preemptions lost"),
    ("gain", "gain", "extra less held back and lost"),
)
RANKS: Final = {"reclaimed": 3, "lost": 2, "held back": 1}
CSV_COLUMNS: Final = (
    "tree", "week_since", "week_until", "covered_s", "pool", "parent", "extra_jobs", "extra_used_core_hours",
    "extra_ordered_core_hours", "reclaimed_core_hours", "held_back_core_hours", "lost_core_hours", "gain_core_hours",
    "money", "currency",
)  # fmt: skip


def render_savings(view: SavingsView, since_s: float, width: int | None, colour: bool) -> str:
    """Return for each tree a table of its pools, a table of its weeks, and the control group."""
    times = f"{format_time(view.since)} to {format_time(view.until)}"
    lines = [grid.fold(f"{times}: {format_span(view.covered_s)} of it are recorded", width)]
    if view.covered_s < 0.99 * since_s:
        lines.append(grid.fold("[history] length of the scheduler's configuration says how far it goes back.", width))
    for tree in view.trees:
        lines += ["", grid.paint(f"tree {escape(tree.tree)}", "bold", colour)]
        depths = find_depths(tree.total)
        pools = [("  " * depths[row.name] + _format_pool(row), row) for row in tree.total]
        lines.append(_draw("pool", pools, view, width, colour))
        if len(tree.weeks) > 1:
            weeks = [(format_utc(week.since)[:10], week.pools[0]) for week in tree.weeks]
            lines += ["", _draw("week from", weeks, view, width, colour)]
        if tree.comparison is not None:
            lines += ["", grid.fold(f"Control group: {tree.comparison.sentence}.", width)]
    widest = max(len(heading) for heading, _, _ in COLUMNS)
    lines += ["", *(grid.fold(f"{heading:<{widest}}  {meaning}", width, "  ") for heading, _, meaning in COLUMNS)]
    if not any(tree.comparison for tree in view.trees):
        lines.append(grid.fold("No control group: control_group_ratio of the agents makes one.", width))
    return "\n".join(lines)


def _format_pool(row: SavingsRow) -> str:
    return "all pools" if row.name == ROOT_POOL else escape(row.name)


def _draw(
    heading: str, rows: Sequence[tuple[str, SavingsRow]], view: SavingsView, width: int | None, colour: bool
) -> str:
    columns: list[grid.Column[tuple[str, SavingsRow]]] = [grid.column(heading, 0, itemgetter(0))]
    for name, field, _ in COLUMNS:
        columns.append(grid.column(f">{name}", RANKS.get(name, 0), partial(_format_amount, field)))
    if view.core_hour_price:
        columns.append(grid.column(f">{view.currency or 'money'}", 0, lambda each: f"{each[1].money or 0.0:.2f}"))
    return draw_table(columns, grid.make_rows(columns, rows), width, colour)


def _format_amount(field: str, row: tuple[str, SavingsRow]) -> str:
    return format_cores(getattr(row[1], field))


def render_savings_csv(view: SavingsView) -> str:
    cells = [list(map(_cell, row)) for row in _list_cells(view)]
    return format_csv([CSV_COLUMNS, *cells])


def _cell(value: str | float) -> str | float:
    return guard_cell(value) if isinstance(value, str) else round(value, 6)


def _list_cells(view: SavingsView) -> Iterator[list[str | float]]:
    for tree in view.trees:
        for week in tree.weeks:
            for row in week.pools:
                amounts = (
                    row.extra_jobs, row.extra_used, row.extra_ordered, row.reclaimed, row.held_back, row.lost, row.gain
                )  # fmt: skip
                money = "" if row.money is None else row.money
                times = iso_utc(week.since), iso_utc(week.until), week.covered_s
                yield [tree.tree, *times, row.name, row.parent, *amounts, money, view.currency]
