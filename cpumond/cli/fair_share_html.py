"""The page of ``cpumond fair-share simulate --html``: rows to the text of one file that needs nothing beside it.

Pure. Per pool with an integral guarantee the two graphs of the documents over one time axis: usage and demand against
the guarantee, accumulated volume against the capacity. Lines are thinned as the rows go by, so a day of seconds takes
no more memory than the page.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cpumond.cli.html import (
    BASE_STYLE,
    LEFT,
    PLOT_WIDTH,
    TOP,
    Graph,
    Level,
    Point,
    choose_prefix,
    format_amount,
    format_span,
    render_figure,
)
from cpumond.fairshare.simulate import SimulationRow
from cpumond.units import format_duration

BUCKETS: Final = 1000
"""Stretches of time that a line is thinned to; of each, the least and the greatest value stay."""

UNITS: Final = {"user_slots": "slot", "cpu": "core", "gpu": "GPU", "memory": "byte", "network": "network unit"}


class _Line:
    """A line of values over increasing times, thinned: per bucket its least and greatest value, in their order."""

    __slots__ = ("_bucket", "_high", "_low", "_points")

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._bucket = -1
        self._low = self._high = (0.0, 0.0)

    def add(self, bucket: int, time_s: float, value: float) -> None:
        """The next value; ``bucket`` never decreases."""
        if bucket != self._bucket:
            self._flush()
            self._bucket = bucket
            self._low = self._high = (time_s, value)
        elif value < self._low[1]:
            self._low = (time_s, value)
        elif value > self._high[1]:
            self._high = (time_s, value)

    def _flush(self) -> None:
        if self._bucket >= 0:
            self._points += sorted({self._low, self._high})

    def finish(self, until_s: float) -> list[Point]:
        """All points, to ``until_s``; of several equal values in a row only the first and the last."""
        self._flush()
        self._bucket = -1
        if self._points and self._points[-1][0] < until_s:
            self._points.append((until_s, self._points[-1][1]))
        points = self._points
        inner = zip(points, points[1:], points[2:], strict=False)
        kept = [b for a, b, c in inner if not a[1] == b[1] == c[1]]
        return [*points[:1], *kept, *points[1:][-1:]]


AREAS: Final[tuple[tuple[str, str, Callable[[SimulationRow], float]], ...]] = (
    ("weight", "weight-proportional share", lambda row: row.fair_share),
    ("integral", "integral guarantee", lambda row: row.fair_share_strong_guarantee + row.fair_share_integral_guarantee),
    ("strong", "strong guarantee", lambda row: row.fair_share_strong_guarantee),
)
"""The parts of the fair share, one on the other: class, name, upper edge. The first is painted first."""


@dataclass(slots=True)
class _Pool:
    """What is gathered of one pool while its rows go by."""

    first: SimulationRow
    last: SimulationRow
    full_burst_s: float = 0.0
    above_flow_s: float = 0.0
    unmet_s: float = 0.0
    used: float = 0.0
    greatest_demand: float = 0.0
    greatest_usage: float = 0.0
    least_volume: float = math.inf
    greatest_volume: float = 0.0
    bucket: int = -1
    demand: _Line = field(default_factory=_Line)
    usage: _Line = field(default_factory=_Line)
    areas: tuple[_Line, ...] = field(default_factory=lambda: tuple(_Line() for _ in AREAS))
    volume: _Line = field(default_factory=_Line)
    samples: list[SimulationRow] = field(default_factory=list)
    """A row per bucket, for what is shown under the pointer."""

    @property
    def is_integral(self) -> bool:
        """Whether the pool has graphs."""
        return self.first.guarantee_type != "none"

    def add(self, row: SimulationRow, until_s: float) -> None:
        """The next row of the pool. What a row says holds until the next one."""
        self._count(self.last, row.time_s - self.last.time_s)
        self.last = row
        self.greatest_demand = max(self.greatest_demand, row.demand)
        self.greatest_usage = max(self.greatest_usage, row.usage, row.fair_share)
        if not self.is_integral:
            return
        self.least_volume = min(self.least_volume, row.accumulated_volume)
        self.greatest_volume = max(self.greatest_volume, row.accumulated_volume)
        bucket = min(int(row.time_s / until_s * BUCKETS), BUCKETS - 1) if until_s > 0 else 0
        if bucket != self.bucket:
            self.bucket = bucket
            self.samples.append(row)
        self.demand.add(bucket, row.time_s, row.demand)
        self.usage.add(bucket, row.time_s, row.usage)
        self.volume.add(bucket, row.time_s, row.accumulated_volume)
        for line, (_, _, upper_edge) in zip(self.areas, AREAS, strict=True):
            line.add(bucket, row.time_s, upper_edge(row))

    def _count(self, row: SimulationRow, duration_s: float) -> None:
        # A millionth is below what anybody can see and above what rounding does.
        if row.burst_guarantee > 0 and row.fair_share_integral_guarantee >= row.burst_guarantee * (1 - 1e-6):
            self.full_burst_s += duration_s
        # What a pool gets when it ran dry comes near to the flow and never quite reaches it.
        if row.fair_share_integral_guarantee > row.resource_flow * 1.01:
            self.above_flow_s += duration_s
        if row.usage < row.demand * (1 - 1e-6):
            self.unmet_s += duration_s
        self.used += row.usage * duration_s


def render_html(rows: Iterable[SimulationRow], *, title: str, until_s: float, step_s: float, main_resource: str) -> str:
    """The page for the rows of a simulation up to ``until_s`` in steps of ``step_s`` (seconds).

    ``title`` is the heading, ``main_resource`` one of RESOURCES: what the amounts of the rows are in. Names are
    escaped.
    """
    pools: dict[str, _Pool] = {}
    for row in rows:
        pool = pools.get(row.pool)
        if pool is None:
            pool = pools[row.pool] = _Pool(row, row)
        pool.add(row, until_s)
    unit = UNITS[main_resource]
    drawn = [pool for pool in pools.values() if pool.is_integral]
    about = (
        f"{format_span(until_s)} with a fair-share update every {format_duration(step_s)}. "
        f"Amounts in {unit}s, volumes in {unit}·s. What is granted is used at once."
    )
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="muted">{about}</p>',
        _render_summary(list(pools.values())),
    ]
    if not drawn:
        parts.append("<p>No pool of this tree has an integral guarantee, so there is no volume to draw.</p>")
    for number, pool in enumerate(drawn):
        parts += _render_pool(pool, number, until_s, unit)
    data = [_list_samples(pool) for pool in drawn]
    # Inside of <script> only "</" and "<!" could end or change what follows.
    script = f"const DATA={json.dumps(data, separators=(',', ':'))},UNTIL={until_s!r};".replace("<", "\\u003c")
    return PAGE.format(
        title=html.escape(title), style=STYLE, body="\n".join(parts), script=script + SCRIPT if drawn else ""
    )


def _list_samples(pool: _Pool) -> dict[str, list[float]]:
    """What the pointer can be shown: columns with a value per bucket, to six digits."""

    def column(value_of: Callable[[SimulationRow], float]) -> list[float]:
        return [float(f"{value_of(row):.6g}") for row in pool.samples]

    return {
        "time": column(lambda row: row.time_s),
        "demand": column(lambda row: row.demand),
        "usage": column(lambda row: row.usage),
        "strong": column(lambda row: row.fair_share_strong_guarantee),
        "integral": column(lambda row: row.fair_share_integral_guarantee),
        "weight": column(lambda row: row.fair_share_weight_proportional),
        "volume": column(lambda row: row.accumulated_volume),
    }


# Summary


def _render_summary(pools: list[_Pool]) -> str:
    heads = (
        "Pool", "Integral guarantee", "At full burst", "Above the flow", "Least volume", "Greatest volume",
        "Volume at the end", "Mean usage", "Demand not met",
    )  # fmt: skip
    rows = "".join(
        f'<tr><th scope="row">{html.escape(pool.first.pool)}</th>'
        + "".join(f"<td>{html.escape(text)}</td>" for text in _summarise(pool))
        + "</tr>"
        for pool in pools
    )
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _summarise(pool: _Pool) -> Iterator[str]:
    duration_s = pool.last.time_s - pool.first.time_s
    yield pool.first.guarantee_type
    yield format_span(pool.full_burst_s) if pool.first.burst_guarantee > 0 else "-"
    if pool.is_integral:
        yield format_span(pool.above_flow_s)
        yield from map(format_amount, (pool.least_volume, pool.greatest_volume, pool.last.accumulated_volume))
    else:
        yield from ("-",) * 4
    yield format_amount(pool.used / duration_s if duration_s > 0 else pool.last.usage)
    yield format_span(pool.unmet_s)


# Graphs


def _render_pool(pool: _Pool, number: int, until_s: float, unit: str) -> Iterator[str]:
    row = pool.first
    name = html.escape(row.pool)
    yield f"<section><h2>{name}</h2><p>{_describe_guarantee(row, unit)}</p>"

    levels = _list_levels(row)
    fitting = max(pool.greatest_usage, *(level.value for level in levels), 0.0)
    # Demand without bounds would press everything else flat.
    is_cut = pool.greatest_demand > fitting * 2.5 > 0
    greatest = (fitting * 1.15 if is_cut else max(fitting, pool.greatest_demand)) or 1.0
    graph = Graph(until_s, greatest, 240.0)
    areas = [line.finish(until_s) for line in pool.areas]
    for (kind, _, _), points in zip(AREAS, areas, strict=True):
        graph.draw_area(kind, points)
    graph.draw_axes()
    graph.draw_levels(levels)
    graph.draw_steps("demand", pool.demand.finish(until_s))
    graph.draw_steps("usage", pool.usage.finish(until_s))
    cut = f" (up to {format_amount(pool.greatest_demand)}, beyond the graph)" if is_cut else ""
    keys = [("line demand", f"demand{cut}"), ("line usage", "usage")]
    keys += [(f"area {kind}", name) for kind, name, _ in reversed(AREAS) if kind != "strong" or row.strong_guarantee]
    _, prefix = choose_prefix(graph.top_value)
    yield render_figure(f"Usage and demand against the guarantee, {prefix}{unit}s", keys)
    yield _render_graph(graph, number, f"Usage and demand of {row.pool} over time") + "</figure>"

    capacity = row.integral_pool_capacity
    graph = Graph(until_s, max(pool.greatest_volume, capacity) or 1.0, 160.0)
    graph.draw_axes()
    graph.draw_levels([Level("capacity", "capacity", capacity)])
    graph.draw_slopes("volume", pool.volume.finish(until_s))
    _, prefix = choose_prefix(graph.top_value)
    yield render_figure(f"Accumulated volume against the capacity, {prefix}{unit}·s", [("line volume", "volume")])
    yield _render_graph(graph, number, f"Accumulated volume of {row.pool} over time") + "</figure></section>"


def _render_graph(graph: Graph, number: int, description: str) -> str:
    """The SVG element with the line at the pointer; ``number`` is the pool's place in the data of the script."""
    graph.parts.append(f'<path class="pointer" d="M0 {TOP:g}V{TOP + graph.height:g}" visibility="hidden"/>')
    return graph.render(
        f'aria-label="{html.escape(description)}" data-pool="{number}" data-left="{LEFT:g}" data-width="{PLOT_WIDTH:g}"'
    )


def _list_levels(row: SimulationRow) -> list[Level]:
    """What is guaranteed: alone, while the flow lasts, while the volume lasts. Each on top of the strong guarantee."""
    strong = row.strong_guarantee
    plus = "strong + " if strong > 0 else ""
    levels = [Level("flow", f"{plus}flow", strong + row.resource_flow)]
    if strong > 0:
        levels.append(Level("strong", "strong", strong))
    if row.burst_guarantee > 0:
        levels.append(Level("burst", f"{plus}burst" if plus else "burst guarantee", strong + row.burst_guarantee))
    return levels


def _describe_guarantee(row: SimulationRow, unit: str) -> str:
    flow, burst, capacity = row.resource_flow, row.burst_guarantee, row.integral_pool_capacity
    text = f"Integral guarantee: {row.guarantee_type}, flow {format_amount(flow)} {unit}s"
    if row.guarantee_type == "burst":
        text += f", burst guarantee {format_amount(burst)} {unit}s"
    if row.strong_guarantee > 0:
        text += f", on top of a strong guarantee of {format_amount(row.strong_guarantee)} {unit}s"
    text += f". The volume holds up to {format_amount(capacity)} {unit}·s"
    if burst > flow:
        text += f", which lasts {format_span(capacity / (burst - flow))} of full burst"
    return text + "."


# The page around it

PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<div id="tip" hidden></div>
<script>{script}</script>
</body>
</html>
"""

STYLE: Final = (
    BASE_STYLE
    + """
:root { --usage: #12395a; --demand: #f2a65a; --strong: #a9c1e6; --integral: #8ccfbd; --weight: #dfe4e9;
  --volume: #0b7a63; }
@media (prefers-color-scheme: dark) {
  :root { --usage: #cfe3f5; --demand: #b8691c; --strong: #34538a; --integral: #1f6b5b; --weight: #333b44;
    --volume: #4cc9ab; }
}
th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left; }
.area.strong { fill: var(--strong); }
.area.integral { fill: var(--integral); }
.area.weight { fill: var(--weight); }
.line.demand { stroke: var(--demand); stroke-width: 4; }
.line.usage { stroke: var(--usage); }
.line.volume { stroke: var(--volume); stroke-width: 2.2; }
.level.flow { stroke-dasharray: 2 3; }
.pointer { stroke: var(--text); stroke-width: 1; }
#tip { position: fixed; pointer-events: none; background: var(--back); color: var(--text); font-size: 13px;
  border: 1px solid var(--muted); border-radius: 6px; padding: 6px 10px; box-shadow: 0 2px 8px #0004; }
#tip td { border: 0; padding: 0 0 0 14px; }
#tip td:first-child { padding: 0; text-align: left; color: var(--muted); }
"""
)

SCRIPT: Final = """
const tip = document.getElementById("tip");
const NAMES = { demand: "demand", usage: "usage", strong: "of it strong guarantee",
  integral: "of it integral guarantee", weight: "of it by weight", volume: "volume" };
function amount(value) {
  for (const [size, name] of [[1e12, " T"], [1e9, " G"], [1e6, " M"]])
    if (Math.abs(value) >= size) return +(value / size).toPrecision(4) + name;
  return String(+value.toPrecision(6));
}
function clock(seconds) {
  const two = n => String(n).padStart(2, "0"), whole = Math.round(seconds);
  return Math.floor(whole / 3600) + ":" + two(Math.floor(whole / 60) % 60) + ":" + two(whole % 60);
}
function show(event) {
  const svg = event.currentTarget, data = DATA[svg.dataset.pool], box = svg.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  const part = (x - svg.dataset.left) / svg.dataset.width;
  if (part < 0 || part > 1) return hide();
  let at = data.time.findIndex(time => time > part * UNTIL) - 1;
  if (at < 0) at = at === -2 ? data.time.length - 1 : 0;
  const line = Number(svg.dataset.left) + (UNTIL ? data.time[at] / UNTIL : 0) * svg.dataset.width;
  for (const path of document.querySelectorAll(".pointer")) {
    const here = path.parentNode.dataset.pool === svg.dataset.pool;
    path.setAttribute("visibility", here ? "visible" : "hidden");
    path.setAttribute("transform", "translate(" + line + " 0)");
  }
  tip.innerHTML = "<b>" + clock(data.time[at]) + "</b><table>" + Object.entries(NAMES).filter(([key]) =>
    key !== "strong" || data.strong.some(value => value)).map(([key, name]) =>
    "<tr><td>" + name + "<td>" + amount(data[key][at])).join("") + "</table>";
  tip.hidden = false;
  const left = event.clientX + 16, width = tip.offsetWidth;
  tip.style.left = (left + width > innerWidth ? event.clientX - 16 - width : left) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
}
function hide() {
  tip.hidden = true;
  for (const path of document.querySelectorAll(".pointer")) path.setAttribute("visibility", "hidden");
}
for (const svg of document.querySelectorAll("figure > svg")) {
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerleave", hide);
}
"""
