"""``cpumond report --waste``: requests that a week left unused, and requests that would have been enough."""

from __future__ import annotations

from typing import Any

from cpumond.cli.output import format_csv, guard_cell
from cpumond.cli.render import grid
from cpumond.core.words import iso_utc
from cpumond.scheduler.history.waste import WasteClass, WasteSummary, WasteView, describe_waste


def render_waste(view: WasteView, width: int | None, _: bool) -> str:
    return "\n".join(grid.fold(line, width, "  ") for line in describe_waste(view))


def render_waste_csv(view: WasteView) -> str:
    """Return a row for each user and pool, and a row for each of their classes; amounts in core-hours."""
    fields = [name for name in WasteClass.__struct_fields__ if name != "sentence"]
    rows: list[list[Any]] = [["kind", "tree", "name", "since", "until", "covered_s", *fields]]
    for kind, summaries in (("user", view.users), ("pool", view.pools)):
        for summary in summaries:
            about = [kind, summary.tree, summary.name, iso_utc(view.since), iso_utc(view.until), view.covered_s]
            lines: list[WasteSummary | WasteClass] = [summary, *summary.classes]
            rows += [[*about, *(_cell(getattr(each, name, "")) for name in fields)] for each in lines]
    return format_csv([[guard_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows])


def _cell(value: Any) -> Any:
    return "" if value is None else round(value, 6) if isinstance(value, float) else value
