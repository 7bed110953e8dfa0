"""The page of ``cpumond estimate --html``: one file that needs no network; names are escaped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from cpumond.cli.agent.estimate_findings import (
    EXPLANATION,
    Findings,
    WorkloadRow,
    describe,
    list_cells,
    list_headings,
    list_totals,
    sort_rows,
)
from cpumond.cli.render.html import Page, as_text, format_amount
from cpumond.monitor.rules import RULES

COLORS: Final = ("--c2", "--c5")
"""Colours of the limits, one for each rule."""

MAX_ROWS: Final = 2000


def render_page(findings: Findings) -> str:
    page = Page("What cpumond would reclaim")
    first, *said = describe(findings)
    page.add(
        f'<p class="muted">{as_text(first)}</p>',
        "<ul>",
        *(f"<li>{as_text(sentence)}</li>" for sentence in said),
        "</ul>",
    )
    page.add(*(f"<p>Note: {as_text(note)}</p>" for note in (*findings.notes, *findings.named_notes)))
    _add_graph(page, findings)
    _add_table(page, findings)
    meanings = (line.split("  ", 1) for line in EXPLANATION)
    page.add_meanings((name, meaning.strip()) for name, meaning in meanings)
    return page.render()


def _add_graph(page: Page, findings: Findings) -> None:
    """Add a graph over time: cores requested and used, and the sum of the limits that each rule would have set."""
    timeline = findings.timeline
    # The last bin is not full, so its mean would be too low.
    points = timeline.list_points()[:-1]
    if not points:
        return
    end_s = points[-1][0] + timeline.bin_s
    used, ordered, *limits = ([*column, column[-1]] for column in zip(*(values for _, values in points), strict=True))
    look: dict[str, Any] = {"step": "after"}
    page.add_chart(
        "All workloads over time, cores",
        f"At most {format_amount(max(ordered))} cores requested and {format_amount(max(used))} used.",
        [*(at_s for at_s, _ in points), end_s],
        [
            {"label": "used", "values": used, "color": "--c1", "fill": True, **look},
            {"label": "requested", "values": ordered, "color": "--c7", "dash": True, **look},
            *(
                {"label": f"limit by {rule}", "values": limit, "color": color, **look}
                for rule, limit, color in zip(RULES, limits, COLORS, strict=True)
            ),
        ],
        height=260, elapsed=True, until=end_s,
    )  # fmt: skip


def _add_table(page: Page, findings: Findings) -> None:
    heads = "".join(
        f'<th scope="col"{_class(number)}>{as_text(heading)}</th>' for number, heading in enumerate(list_headings())
    )
    rows = sort_rows(findings.rows)
    body = "".join(_render_row(findings, row) for row in rows[:MAX_ROWS])
    foot = "".join(_render_cells(name, cells) for name, cells in list_totals(findings))
    page.add_table("Workloads", "Workloads, cores", heads, body, foot)
    if len(rows) > MAX_ROWS:
        page.add(f"<p>The {len(rows) - MAX_ROWS} with the lowest figures are left out.</p>")


def _render_row(findings: Findings, row: WorkloadRow) -> str:
    return _render_cells(row.label + (" (ended)" if row.is_gone else ""), list_cells(findings, row))


def _render_cells(name: str, cells: Iterator[str]) -> str:
    texts = "".join(f"<td{_class(number)}>{as_text(cell)}</td>" for number, cell in enumerate(cells, 1))
    return f'<tr><th scope="row" class="name">{as_text(name)}</th>{texts}</tr>'


def _class(number: int) -> str:
    return f' class="{"name" if number < 2 else "right"}"'
