"""The page of ``cpumond estimate --html``: one file without network and script; names are shown as text."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Final

from cpumond.cli.estimate_findings import (
    EXPLANATION,
    Findings,
    Row,
    describe,
    list_cells,
    list_headings,
    list_totals,
    sort_rows,
)
from cpumond.cli.html import BASE_STYLE, PAGE, TABLE_STYLE, Graph, choose_prefix, choose_time_step, render_figure
from cpumond.monitor.rules import RULES
from cpumond.words import show_name

KEYS: Final = (("ordered", "ordered"), *((f"limit{number}", f"limit by {rule}") for number, rule in enumerate(RULES)))
MAX_ROWS: Final = 2000


def render_page(findings: Findings) -> str:
    """The page."""
    title = "What cpumond would reclaim"
    said = describe(findings)
    parts = [f"<h1>{title}</h1>", f'<p class="muted">{_text(said[0])}</p>', "<ul>"]
    parts += [f"<li>{_text(sentence)}</li>" for sentence in said[1:]]
    parts.append("</ul>")
    parts += [f"<p>Note: {_text(note)}</p>" for note in (*findings.notes, *findings.named_notes)]
    parts.append(_render_graph(findings))
    parts.append(_render_table(findings))
    meanings = (line.split("  ", 1) for line in EXPLANATION)
    parts.append(
        "<section><h2>What the columns mean</h2><dl>"
        + "".join(f"<dt>{_text(name)}</dt><dd>{_text(meaning.strip())}</dd>" for name, meaning in meanings)
        + "</dl></section>"
    )
    return PAGE.format(title=title, style=STYLE, body="\n".join(parts))


def _text(text: str) -> str:
    """Text of the page; what cannot be seen, such as a change of the writing direction, is escaped."""
    return html.escape(show_name(text))


def _render_graph(findings: Findings) -> str:
    """Cores ordered and used, and the sum of the limits that each rule would have set, over time."""
    timeline = findings.timeline
    points = timeline.list_points()
    if len(points) < 2:
        return ""
    # The last bin is not full: its mean would fall off.
    points = points[:-1]
    end_s = points[-1][0] + timeline.bin_s
    graph = Graph(end_s, max(max(values) for _, values in points) or 1.0, 240.0)
    used, *lines = ([(at_s, values[index]) for at_s, values in points] for index in range(2 + len(RULES)))
    graph.draw_area("used", [*used, (end_s, used[-1][1])])
    graph.draw_value_axis()
    step_s, name, label = choose_time_step(end_s)
    graph.draw_time_axis(name, [(number * step_s, label(number)) for number in range(int(end_s / step_s) + 1)])
    for (kind, _), line in zip(KEYS, lines, strict=True):
        graph.draw_steps(kind, [*line, (end_s, line[-1][1])])
    _, prefix = choose_prefix(graph.top_value)
    caption = f"All workloads over time, {prefix}cores"
    keys = [("area used", "used"), *((f"line {kind}", text) for kind, text in KEYS)]
    return render_figure(caption, keys) + graph.render(f'aria-label="{caption}"') + "</figure>"


def _render_table(findings: Findings) -> str:
    heads = "".join(
        f'<th scope="col"{_class(number)}>{_text(heading)}</th>' for number, heading in enumerate(list_headings())
    )
    rows = sort_rows(findings.rows)
    body = "".join(_render_row(findings, row) for row in rows[:MAX_ROWS])
    foot = "".join(_render_cells(name, cells) for name, cells in list_totals(findings))
    left_out = f"<p>The {len(rows) - MAX_ROWS} with the least are left out.</p>" if len(rows) > MAX_ROWS else ""
    return (
        '<div class="wide" role="region" aria-label="Workloads" tabindex="0"><table><caption>Workloads, cores</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table></div>{left_out}"
    )


def _render_row(findings: Findings, row: Row) -> str:
    return _render_cells(row.label + (" (ended)" if row.is_gone else ""), list_cells(findings, row))


def _render_cells(name: str, cells: Iterator[str]) -> str:
    texts = "".join(f"<td{_class(number)}>{_text(cell)}</td>" for number, cell in enumerate(cells, 1))
    return f'<tr><th scope="row" class="name">{_text(name)}</th>{texts}</tr>'


def _class(number: int) -> str:
    return ' class="name"' if number < 2 else ""


STYLE: Final = (
    BASE_STYLE
    + TABLE_STYLE
    + """
:root { --ordered: #5b6570; --first: #c2660a; --second: #1f6fb2; --used: #0b7a63; --used-area: #0b7a6340; }
@media (prefers-color-scheme: dark) {
  :root { --ordered: #aab3bc; --first: #f0a04b; --second: #6db3f2; --used: #4cc9ab; --used-area: #4cc9ab40; }
}
.wide:focus-visible { outline: 2px solid var(--first); outline-offset: 2px; }
tbody .name { white-space: normal; overflow-wrap: anywhere; min-width: 6em; max-width: 30em; }
.line.limit0 { stroke: var(--first); }
.line.limit1 { stroke: var(--second); }
.area.used { fill: var(--used-area); }
"""
)
