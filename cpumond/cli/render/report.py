"""The page of ``cpumond report --html``: one file with tables and graphs that needs no network.

Pure but for the local time zone. Names come from users and are escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from cpumond.cli.render.html import Page, as_text, format_amount
from cpumond.cli.scheduler.report_rows import (
    MEASURES,
    RATIOS,
    Line,
    add_up,
    describe_left_out,
    describe_time,
    list_operations,
    list_pools,
)
from cpumond.core.measures import format_span
from cpumond.core.words import show_time
from cpumond.fairshare.explain import show_percent
from cpumond.scheduler.history.model import HistoryView, ReportRow, ReportTree, ReportView

LINES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("ordered_cores", "ordered", {"color": "--c7", "dash": True}),
    ("limit_cores", "limit", {"color": "--c2"}),
    ("used_cores", "used", {"color": "--c1", "fill": True}),
)
"""Columns of a history that are drawn, their names, and how they look."""

PARTS: Final = (("used", "used"), ("reclaimed", "reclaimed"), ("idle", "neither used nor reclaimed"))
"""CSS class of a part of a bar, and its name."""

MAX_BARS: Final = 15
MAX_INDENT: Final = 12


def render_report(report: ReportView, histories: Mapping[str, HistoryView], since_s: float) -> str:
    """The page. ``histories`` are the points of the root of each tree, ``since_s`` is what was asked for."""
    title = f"CPU of pools and operations, {format_span(report.covered_s)} up to {show_time(report.until)}"
    page = Page(title)
    page.add(*(f'<p class="muted">{html.escape(sentence)}</p>' for sentence in describe_time(report, since_s)))
    for tree in report.trees:
        _add_tree(page, tree, histories.get(tree.tree), report)
    page.add_meanings((each.heading, each.meaning) for each in MEASURES)
    return page.render()


def _add_tree(page: Page, tree: ReportTree, history: HistoryView | None, report: ReportView) -> None:
    page.add(f"<h2>Tree {as_text(tree.tree)}</h2>", _render_sentence(tree.total))
    if history is not None and history.times:
        _add_times(page, history, report)
    pools = list(list_pools(tree))
    if pools:
        page.add(_render_bars([line.row for line in pools]))
        _add_table(page, "Pools", "pool", [*pools, Line("total", tree.tree, tree.total)])
    else:
        page.add("<p>No pool of this tree has points in this time.</p>")
    operations = list(list_operations(tree))
    left_out = describe_left_out(tree)
    if operations:
        _add_table(page, "Operations", "operation", [*operations, add_up(tree)])
    if left_out or not operations:
        page.add(f"<p>{html.escape(left_out or 'No operations in this time.')}</p>")


def _render_sentence(total: ReportRow) -> str:
    if total.ordered <= 0:
        return "<p>Nothing was ordered in this time.</p>"
    text = (
        f"Of {format_amount(total.ordered)} core-hours ordered, {format_amount(total.used)} were used "
        f"({show_percent(total.used / total.ordered)} %) and {format_amount(total.reclaimed)} reclaimed for others "
        f"({show_percent(total.reclaimed / total.ordered)} %)."
    )
    return f"<p>{text}</p>"


HEADS: Final = {"pool": ("pool",), "operation": ("operation", "title", "user", "pool", "state")}


def _add_table(page: Page, caption: str, kind: str, lines: Sequence[Line]) -> None:
    """Add a table of ``lines``, of which the last one is the total."""
    texts = HEADS[kind]
    heads = "".join(f'<th scope="col">{head}</th>' for head in texts)
    heads += "".join(f'<th scope="col" class="right">{html.escape(each.heading)}</th>' for each in MEASURES)
    rows = [_render_row(line, len(texts)) for line in lines]
    page.add_table(caption, f"{caption}, core-hours", heads, "".join(rows[:-1]), rows[-1])


def _render_row(line: Line, text_count: int) -> str:
    row = line.row
    is_total = line.kind in ("total", "sum")
    texts = ["total" if is_total else row.name, row.title, row.user, row.pool, row.state]
    first, *rest = map(as_text, texts[:text_count])
    indent = f' style="padding-left:calc(10px + {min(line.depth, MAX_INDENT) * 1.2:g}em)"' if line.depth else ""
    # Of a long title a few lines are shown, and all of it under the pointer.
    cells = "".join(f'<td class="name" title="{text}"><div class="short">{text}</div></td>' for text in rest)
    cells += "".join(f'<td class="right">{_show_value(line.value(each), each in RATIOS)}</td>' for each in MEASURES)
    return f'<tr><th scope="row" class="name"{indent}>{first}</th>{cells}</tr>'


def _show_value(value: float | None, is_percent: bool) -> str:
    if value is None:
        return "-"
    if is_percent:
        return show_percent(value / 100.0)
    return "&lt;0.001" if 0 < value < 0.001 else format_amount(value)


def _add_times(page: Page, history: HistoryView, report: ReportView) -> None:
    # The axis begins at the first point: an axis of a day would press the points of an hour together.
    start = max(report.since, history.times[0] - history.intervals[0])
    series: list[dict[str, Any]] = []
    for column, label, look in LINES:
        values = history.columns.get(column) or [None] * len(history.times)
        series.append({"label": label, "values": [values[0], *values], "step": True, **look})
    offset = datetime.fromtimestamp(start).astimezone().utcoffset() or timedelta()
    known = {each["label"]: [value for value in each["values"] if value is not None] for each in series}
    ends = [f"{label} {format_amount(values[-1])}" for label, values in known.items() if values]
    page.add_chart(
        "Ordered, limit and used over time, cores",
        f"At most {format_amount(max((max(values) for values in known.values() if values), default=0.0))} cores. "
        f"At the end, cores: {', '.join(ends) or 'unknown'}.",
        [start, *history.times],
        series,
        intervals=[0.0, *history.intervals],
        until=max(report.until, history.times[-1]),
        axis=f"time, {timezone(offset)}",
        utcOffset=offset.total_seconds(),
        height=260,
        **{"from": start},
    )


def _render_bars(rows: Iterable[ReportRow]) -> str:
    """A bar for each of the pools that ordered the most, divided into PARTS."""
    top = sorted((row for row in rows if row.ordered > 0), key=lambda row: -row.ordered)[:MAX_BARS]
    if not top:
        return ""
    keys = "".join(f'<span><span class="square {kind}"></span>{name}</span>' for kind, name in PARTS)
    bars = "".join(_render_bar(row, row.ordered / top[0].ordered) for row in top)
    return (
        '<figure class="card bars"><figcaption class="chart-title">Core-hours ordered, the pools with the most; a pool '
        f'includes its sub-pools</figcaption><div class="keys">{keys}</div><table>{bars}</table></figure>'
    )


def _render_bar(row: ReportRow, part: float) -> str:
    """A bar of ``part`` (0 to 1) of the width of the longest one."""
    values = (row.used, row.reclaimed, max(row.ordered - row.used - row.reclaimed, 0.0))
    said = ", ".join(f"{name} {format_amount(value)}" for (_, name), value in zip(PARTS, values, strict=True))
    # What does not fit is cut off: rounding and a burst above the order may put the parts a little above the whole.
    stack = "".join(
        f'<span class="{kind}" style="flex:none;width:{max(value, 0.0) / row.ordered:.2%}"></span>'
        for (kind, _), value in zip(PARTS, values, strict=True)
    )
    return (
        f'<tr title="{said}"><th scope="row"><span class="long">{as_text(row.name)}</span></th><td><div class="stack" '
        f'style="width:{part:.2%}">{stack}</div><span class="hidden-text">{said}</span></td>'
        f"<td>{format_amount(row.ordered)}</td></tr>"
    )
