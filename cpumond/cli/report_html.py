"""The page of ``cpumond report --html``: one file with tables and graphs that needs no network and no script.

Pure but for the local time zone. All names come from users and are shown as text.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from cpumond.cli.html import (
    BASE_STYLE,
    PAGE,
    TABLE_STYLE,
    TIME_STEPS_S,
    WIDTH,
    Graph,
    Point,
    choose_prefix,
    choose_step,
    format_amount,
    render_figure,
)
from cpumond.cli.report_rows import (
    MEASURES,
    RATIOS,
    Line,
    add_up,
    describe_left_out,
    describe_time,
    idle_of,
    list_operations,
    list_pools,
)
from cpumond.fairshare.explain import show_percent
from cpumond.scheduler.history import HistoryView, ReportRow, ReportTree, ReportView
from cpumond.scheduler.why import show_span
from cpumond.words import show_name, show_time

LINES: Final = (("ordered_cores", "ordered"), ("limit_cores", "limit"), ("used_cores", "used"))
"""Columns of a history that are drawn, and their names."""

PARTS: Final = (("used", "used"), ("reclaimed", "reclaimed"), ("idle", "neither used nor reclaimed"))
"""What a bar is made of, and how it is called."""

MAX_BARS: Final = 15
MAX_INDENT: Final = 12
BAR_LEFT: Final = 220.0
BAR_RIGHT: Final = 110.0
ROW_HEIGHT: Final = 24.0
NAME_WIDTH: Final = 24
GAP_S: Final = 0.1


def render_report(report: ReportView, histories: Mapping[str, HistoryView], since_s: float) -> str:
    """The page. ``histories`` are the points of the root of each tree, ``since_s`` is what was asked for."""
    title = f"CPU of pools and operations, {show_span(report.covered_s)} up to {show_time(report.until)}"
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f'<p class="muted">{html.escape(sentence)}</p>' for sentence in describe_time(report, since_s)]
    for number, tree in enumerate(report.trees):
        parts += _render_tree(tree, histories.get(tree.tree), report, number)
    meanings = "".join(f"<dt>{html.escape(each.heading)}</dt><dd>{html.escape(each.meaning)}</dd>" for each in MEASURES)
    parts.append(f"<section><h2>What the columns mean</h2><dl>{meanings}</dl></section>")
    return PAGE.format(title=html.escape(title), style=STYLE, body="\n".join(parts))


def _render_tree(tree: ReportTree, history: HistoryView | None, report: ReportView, number: int) -> Iterator[str]:
    yield f"<section><h2>Tree {_name(tree.tree)}</h2>"
    yield _render_sentence(tree.total)
    if history is not None and history.times:
        yield _render_times(history, report, f"t{number}")
    pools = list(list_pools(tree))
    if pools:
        yield _render_bars([line.row for line in pools], f"b{number}")
        yield _render_table("Pools", "pool", [*pools, Line("total", tree.tree, tree.total)])
    else:
        yield "<p>No pool of this tree has points in this time.</p>"
    operations = list(list_operations(tree))
    left_out = describe_left_out(tree)
    if operations:
        yield _render_table("Operations", "operation", [*operations, add_up(tree)])
    if left_out or not operations:
        yield f"<p>{html.escape(left_out or 'No operations in this time.')}</p>"
    yield "</section>"


def _render_sentence(total: ReportRow) -> str:
    if total.ordered <= 0:
        return "<p>Nothing was ordered in this time.</p>"
    text = (
        f"Of {format_amount(total.ordered)} core-hours ordered, {format_amount(total.used)} were used "
        f"({show_percent(total.used / total.ordered)} %) and {format_amount(total.reclaimed)} reclaimed for others "
        f"({show_percent(total.reclaimed / total.ordered)} %)."
    )
    return f"<p>{text}</p>"


def _name(text: str) -> str:
    """A name as text of the page; what cannot be seen, such as a change of the writing direction, is escaped."""
    return html.escape(show_name(text))


# Tables

HEADS: Final = {"pool": ("pool",), "operation": ("operation", "title", "user", "pool", "state")}


def _render_table(caption: str, kind: str, lines: Sequence[Line]) -> str:
    """``lines``: the last one is the total."""
    texts = HEADS[kind]
    heads = "".join(f'<th scope="col" class="name">{head}</th>' for head in texts)
    heads += "".join(f'<th scope="col">{html.escape(each.heading)}</th>' for each in MEASURES)
    rows = [_render_row(line, len(texts)) for line in lines]
    # What scrolls must be reachable with the keyboard.
    return (
        f'<div class="wide" role="region" aria-label="{caption}" tabindex="0"><table><caption>{caption}, core-hours'
        f"</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(rows[:-1])}</tbody><tfoot>{rows[-1]}</tfoot></table>"
        "</div>"
    )


def _render_row(line: Line, text_count: int) -> str:
    row = line.row
    is_total = line.kind in ("total", "sum")
    texts = ["total" if is_total else row.name, row.title, row.user, row.pool, row.state]
    first, *rest = map(_name, texts[:text_count])
    indent = f' style="padding-left:{min(line.depth, MAX_INDENT) * 1.2:g}em"' if line.depth else ""
    # A title of any length: a few lines of it, the whole where the pointer rests.
    cells = "".join(f'<td class="name" title="{text}"><div class="short">{text}</div></td>' for text in rest)
    cells += "".join(f"<td>{_show_value(line.value(each), each in RATIOS)}</td>" for each in MEASURES)
    return f'<tr><th scope="row" class="name"{indent}>{first}</th>{cells}</tr>'


def _show_value(value: float | None, is_percent: bool) -> str:
    if value is None:
        return "-"
    if is_percent:
        return show_percent(value / 100.0)
    return "&lt;0.001" if 0 < value < 0.001 else format_amount(value)


# Graphs


def _render_times(history: HistoryView, report: ReportView, ids: str) -> str:
    """What was ordered, allowed and used over time."""
    # An axis of a day for the points of an hour would show nothing.
    start = max(report.since, history.times[0] - history.intervals[0])
    until = max(report.until, history.times[-1])
    segments = {name: _list_segments(history, column, start) for column, name in LINES}
    values = [value for parts in segments.values() for points in parts for _, value in points]
    greatest = max(values, default=0.0)
    graph = Graph(until - start, greatest or 1.0, 220.0)
    for points in segments["used"]:
        graph.draw_area("used", points)
    graph.draw_value_axis()
    graph.draw_time_axis(*_list_ticks(start, until))
    for _, name in LINES:
        for points in segments[name]:
            graph.draw_steps(name, points)
    _, prefix = choose_prefix(graph.top_value)
    keys = [*((f"line {name}", name) for _, name in LINES)]
    ends = [f"{name} {format_amount(parts[-1][-1][1])}" for name, parts in segments.items() if parts]
    description = f"At most {format_amount(greatest)} cores. At the end, cores: {', '.join(ends) or 'unknown'}."
    head = _describe(ids, "Cores ordered, allowed by limits, and used over time", description)
    return (
        render_figure(f"Ordered, limit and used over time, {prefix}cores", keys)
        + graph.render(_refer(ids), head)
        + "</figure>"
    )


def _list_segments(history: HistoryView, column: str, start: float) -> list[list[Point]]:
    """The points of a line of steps, in seconds since ``start``, broken where nothing is known."""
    segments: list[list[Point]] = []
    end = -math.inf
    for at, interval_s, value in zip(history.times, history.intervals, history.columns.get(column, ()), strict=False):
        if value is None:
            continue
        begin = max(at - interval_s - start, 0.0)
        if begin - end < GAP_S:
            # The last point only held the end of the step before.
            segments[-1][-1] = (end, value)
        else:
            segments.append([(begin, value)])
        end = at - start
        segments[-1].append((end, value))
    return segments


def _list_ticks(start: float, until: float) -> tuple[str, list[tuple[float, str]]]:
    """The name of a time axis and its numbers, round ones of the local time zone, as seconds since ``start``."""
    local = datetime.fromtimestamp(start).astimezone()
    offset = local.utcoffset()
    offset_s = offset.total_seconds() if offset is not None else 0.0
    span = until - start
    step_s = next((step for step in TIME_STEPS_S if step * 12 >= span), 0.0)
    if step_s == 0:
        step_s = 86400 * choose_step(span / 86400, 12)
    first = math.ceil((start + offset_s) / step_s) * step_s - offset_s
    form = "%H:%M:%S" if step_s < 60 else "%H:%M"
    ticks = []
    for number in range(math.floor((until - first) / step_s + 1e-9) + 1):
        at = first + number * step_s
        is_midnight = (at + offset_s) % 86400 < 1
        moment = datetime.fromtimestamp(at, local.tzinfo)
        ticks.append((at - start, moment.strftime("%m-%d" if is_midnight and step_s >= 60 else form)))
    return f"time, UTC{local.strftime('%z')[:3]}:{local.strftime('%z')[3:5]}, from {local:%Y-%m-%d %H:%M}", ticks


def _describe(ids: str, title: str, description: str) -> str:
    return f'<title id="{ids}t">{html.escape(title)}</title><desc id="{ids}d">{html.escape(description)}</desc>'


def _refer(ids: str) -> str:
    return f'aria-labelledby="{ids}t" aria-describedby="{ids}d"'


def _render_bars(rows: Iterable[ReportRow], ids: str) -> str:
    """A bar per pool with the most ordered: what became of it."""
    top = sorted((row for row in rows if row.ordered > 0), key=lambda row: -row.ordered)[:MAX_BARS]
    if not top:
        return ""
    scale = (WIDTH - BAR_LEFT - BAR_RIGHT) / top[0].ordered
    parts = []
    for number, row in enumerate(top):
        y = number * ROW_HEIGHT
        label = html.escape(_shorten(show_name(row.name)))
        parts.append(f'<text class="label end" x="{BAR_LEFT - 8:g}" y="{y + 16:g}">{label}</text>')
        x = BAR_LEFT
        for (kind, _), value in zip(PARTS, (row.used, row.reclaimed, idle_of(row)), strict=True):
            # Rounding and a burst above the order may put the parts a little above the whole.
            width = min(max(value * scale, 0.0), BAR_LEFT + row.ordered * scale - x)
            if width > 0:
                parts.append(f'<path class="area {kind}" d="M{x:.1f} {y + 4:g}h{width:.1f}v16h{-width:.1f}Z"/>')
            x += max(width, 0.0)
        parts.append(f'<text class="tick" x="{x + 8:.1f}" y="{y + 16:g}">{format_amount(row.ordered)}</text>')
    told = "; ".join(f"{_shorten(show_name(row.name))}: {', '.join(_describe_bar(row))}" for row in top)
    title = "Core-hours ordered of each pool, and what became of them"
    height = len(top) * ROW_HEIGHT + 8
    return (
        render_figure(
            "Core-hours ordered, the pools with the most; a pool includes its sub-pools",
            [(f"area {kind}", name) for kind, name in PARTS],
        )
        + f'<svg viewBox="0 0 {WIDTH:g} {height:g}" class="bars" role="img" {_refer(ids)}>'
        + _describe(ids, title, f"{told}.")
        + "".join(parts)
        + "</svg></figure>"
    )


def _describe_bar(row: ReportRow) -> Iterator[str]:
    values = (row.used, row.reclaimed, idle_of(row))
    yield from (f"{name} {format_amount(value)}" for (_, name), value in zip(PARTS, values, strict=True))


def _shorten(name: str) -> str:
    """A name for the room beside a bar; some scripts take twice the width."""
    width = 0
    for place, char in enumerate(name):
        width += 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if width > NAME_WIDTH:
            return f"{name[:place]}…"
    return name


# The page around it

STYLE: Final = (
    BASE_STYLE
    + TABLE_STYLE
    + """
:root { --ordered: #5b6570; --limit: #c2660a; --used: #0b7a63; --used-area: #0b7a6340; --reclaimed: #f2a65a;
  --idle: #dfe4e9; }
@media (prefers-color-scheme: dark) {
  :root { --ordered: #aab3bc; --limit: #f0a04b; --used: #4cc9ab; --used-area: #4cc9ab40; --reclaimed: #b8691c;
    --idle: #333b44; }
}
.wide:focus-visible { outline: 2px solid var(--limit); outline-offset: 2px; }
tbody .name { white-space: normal; overflow-wrap: anywhere; min-width: 7em; max-width: 22em; }
.short { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3; overflow: hidden; }
.line.limit { stroke: var(--limit); }
.line.used { stroke: var(--used); }
.area.used { fill: var(--used); }
figure > svg .area.used { fill: var(--used-area); }
figure > svg.bars .area.used { fill: var(--used); }
.area.reclaimed { fill: var(--reclaimed); }
.area.idle { fill: var(--idle); }
"""
)
