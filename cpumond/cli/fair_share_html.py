"""The page of ``cpumond fair-share simulate --html``: rows to the text of one file that needs nothing beside it.

Pure. Per pool with an integral guarantee the two graphs of the documents over one time axis: usage and demand against
the guarantee, accumulated volume against the capacity. Lines are thinned as the rows go by, so a day of seconds takes
no more memory than the page.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cpumond.fairshare.simulate import SimulationRow
from cpumond.units import format_duration

BUCKETS: Final = 1000
"""Stretches of time that a line is thinned to; of each, the least and the greatest value stay."""

WIDTH: Final = 960.0
LEFT: Final = 56.0
RIGHT: Final = 150.0
TOP: Final = 10.0
BOTTOM: Final = 40.0
PLOT_WIDTH: Final = WIDTH - LEFT - RIGHT
"""Pixels of a graph before the browser scales it; on the right is room for the names of level lines."""

LABEL_GAP: Final = 15.0
"""Pixels between the names of two level lines."""

UNITS: Final = {"user_slots": "slot", "cpu": "core", "gpu": "GPU", "memory": "byte", "network": "network unit"}

Point = tuple[float, float]


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


def format_span(seconds: float) -> str:
    """A duration in its two greatest units, hours up to two days: "3d 4h", "24h", "6h 12m", "41m 5s", "12.5s"."""
    for least, size, name, below, below_name in SPANS:
        # Rounded to the smaller of the two units first, so that it never says 1h 60m.
        rounded = round(seconds / below) * below
        if rounded >= least:
            rest = rounded % size // below
            return f"{rounded // size}{name}" + (f" {rest}{below_name}" if rest else "")
    return f"{seconds:.3g}s"


SPANS: Final = ((172800, 86400, "d", 3600, "h"), (3600, 3600, "h", 60, "m"), (60, 60, "m", 1, "s"))
"""From how many seconds on, the greater unit and its name, the smaller unit and its name."""


def format_amount(value: float) -> str:
    """An amount in four digits, large ones with a letter: 62.5, 2000, 12.5 k, 8.64 M."""
    size, letter = 1.0, ""
    for greater, name in ((1e3, " k"), (1e6, " M"), (1e9, " G"), (1e12, " T"), (1e15, " P")):
        # 2000 reads better than 2 k.
        if abs(value) >= max(greater, 9999.5):
            size, letter = greater, name
    digits = f"{value / size:.4g}"
    return f"{0 if digits == '-0' else digits}{letter}"


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


@dataclass(frozen=True, slots=True)
class _Level:
    """A horizontal line with its name."""

    kind: str
    name: str
    value: float


class _Graph:
    """One coordinate system: the elements of its SVG are collected in the order in which they are painted."""

    def __init__(self, until_s: float, greatest: float, height: float) -> None:
        self.step = choose_step(greatest, 5)
        self.top_value = math.ceil(greatest / self.step - 1e-9) * self.step
        self.until_s = until_s
        self.height = height
        self.parts: list[str] = []

    def x(self, time_s: float) -> float:
        """Pixels from the left of a time."""
        return LEFT + (time_s / self.until_s if self.until_s > 0 else 0.0) * PLOT_WIDTH

    def y(self, value: float) -> float:
        """Pixels from the top of a value; what lies above the axis is put just above its end."""
        return TOP + self.height * (1.0 - min(value / self.top_value, 1.0 + 6.0 / self.height))

    def draw_axes(self) -> None:
        """Grid lines with their numbers, and the axis of time."""
        size, _ = choose_prefix(self.top_value)
        for number in range(round(self.top_value / self.step) + 1):
            y = self.y(number * self.step)
            self.parts.append(f'<path class="grid" d="M{LEFT:g} {y:.1f}H{LEFT + PLOT_WIDTH:g}"/>')
            text = f"{number * self.step / size:.6g}"
            self.parts.append(f'<text class="tick end" x="{LEFT - 8:g}" y="{y + 4:.1f}">{text}</text>')
        bottom = TOP + self.height
        step_s, title, label = choose_time_step(self.until_s)
        for number in range(math.floor(self.until_s / step_s + 1e-9) + 1 if self.until_s > 0 else 1):
            x = self.x(number * step_s)
            self.parts.append(f'<path class="grid" d="M{x:.1f} {TOP:g}V{bottom + 5:g}"/>')
            self.parts.append(f'<text class="tick middle" x="{x:.1f}" y="{bottom + 18:g}">{label(number)}</text>')
        middle = LEFT + PLOT_WIDTH / 2
        self.parts.append(f'<text class="tick middle" x="{middle:g}" y="{bottom + 35:g}">{title}</text>')

    def draw_area(self, kind: str, points: list[Point]) -> None:
        """What lies under a line of steps."""
        bottom = TOP + self.height
        path = f"M{self.x(points[0][0]):.1f} {bottom:g}V{self._steps(points)}V{bottom:g}Z"
        self.parts.append(f'<path class="area {kind}" d="{path}"/>')

    def draw_steps(self, kind: str, points: list[Point]) -> None:
        """A line that keeps each value until the next."""
        path = f"M{self.x(points[0][0]):.1f} {self._steps(points)}"
        self.parts.append(f'<path class="line {kind}" d="{path}"/>')

    def draw_slopes(self, kind: str, points: list[Point]) -> None:
        """A line that goes straight from each value to the next."""
        path = "M" + "L".join(f"{self.x(time_s):.1f} {self.y(value):.1f}" for time_s, value in points)
        self.parts.append(f'<path class="line {kind}" d="{path}"/>')

    def _steps(self, points: list[Point]) -> str:
        """The path of a line of steps, from the height of its first point on."""
        return f"{self.y(points[0][1]):.1f}" + "".join(
            f"H{self.x(time_s):.1f}" + (f"V{self.y(value):.1f}" if value != before else "")
            for (_, before), (time_s, value) in itertools.pairwise(points)
        )

    def draw_levels(self, levels: list[_Level]) -> None:
        """Level lines, and their names to the right, moved apart where they would overlap."""
        below = TOP + self.height + LABEL_GAP
        for level in sorted(levels, key=lambda level: level.value):
            y = self.y(level.value)
            below = min(y, below - LABEL_GAP)
            end = LEFT + PLOT_WIDTH
            self.parts.append(
                f'<path class="level {level.kind}" d="M{LEFT:g} {y:.1f}H{end:g}L{end + 8:g} {below:.1f}"/>'
            )
            name = f"{html.escape(level.name)} {format_amount(level.value)}"
            self.parts.append(f'<text class="label" x="{end + 12:g}" y="{below + 4:.1f}">{name}</text>')

    def render(self, number: int, description: str) -> str:
        """The SVG element; ``number`` is the pool's place in the data of the script."""
        bottom = TOP + self.height
        pointer = f'<path class="pointer" d="M0 {TOP:g}V{bottom:g}" visibility="hidden"/>'
        return (
            f'<svg viewBox="0 0 {WIDTH:g} {bottom + BOTTOM:g}" role="img" aria-label="{html.escape(description)}" '
            f'data-pool="{number}" data-left="{LEFT:g}" data-width="{PLOT_WIDTH:g}">'
            + "".join(self.parts)
            + pointer
            + "</svg>"
        )


def choose_step(greatest: float, most: int) -> float:
    """1, 2, 2.5 or 5 times a power of ten: the least step that reaches ``greatest`` in at most ``most``; 1 for 0."""
    if greatest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(greatest / most))
    return next(
        factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0) if factor * power * most >= greatest * (1 - 1e-9)
    )


def choose_prefix(greatest: float) -> tuple[float, str]:
    """What the numbers of an axis up to ``greatest`` are divided by, and the word for it: (1e6, "million ")."""
    names = ((1e15, "quadrillion "), (1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1e4, "thousand "))
    for least, name in names:
        if greatest >= least:
            return (1e3 if least == 1e4 else least), name
    return 1.0, ""


TIME_STEPS_S: Final = (
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(60.0 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600.0 * hours for hours in (1, 2, 3, 6, 12)),
)


def choose_time_step(until_s: float) -> tuple[float, str, Callable[[int], str]]:
    """For a time axis of ``until_s``: seconds between its numbers, its name, and the text of the n-th number."""
    if until_s < 6:
        step_s = choose_step(until_s, 6)
        return step_s, "time", lambda number: f"{number * step_s:.6g} s"
    step_s = next((step for step in TIME_STEPS_S if step * 12 >= until_s), 0.0)
    if step_s == 0:
        step_s = 86400 * choose_step(until_s / 86400, 12)
        return step_s, "time", lambda number: f"{number * step_s / 86400:g} d"
    if step_s < 60:
        return step_s, "time, min:s", lambda number: format_clock(number * step_s).partition(":")[2]
    if step_s < 3600:
        return step_s, "time, h:min", lambda number: format_clock(number * step_s)[:-3]
    return step_s, "time", lambda number: f"{number * step_s / 3600:g} h"


def format_clock(seconds: float) -> str:
    """Time as h:mm:ss, to whole seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _render_pool(pool: _Pool, number: int, until_s: float, unit: str) -> Iterator[str]:
    row = pool.first
    name = html.escape(row.pool)
    yield f"<section><h2>{name}</h2><p>{_describe_guarantee(row, unit)}</p>"

    levels = _list_levels(row)
    fitting = max(pool.greatest_usage, *(level.value for level in levels), 0.0)
    # Demand without bounds would press everything else flat.
    is_cut = pool.greatest_demand > fitting * 2.5 > 0
    greatest = (fitting * 1.15 if is_cut else max(fitting, pool.greatest_demand)) or 1.0
    graph = _Graph(until_s, greatest, 240.0)
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
    yield _render_figure(f"Usage and demand against the guarantee, {prefix}{unit}s", keys)
    yield graph.render(number, f"Usage and demand of {row.pool} over time") + "</figure>"

    capacity = row.integral_pool_capacity
    graph = _Graph(until_s, max(pool.greatest_volume, capacity) or 1.0, 160.0)
    graph.draw_axes()
    graph.draw_levels([_Level("capacity", "capacity", capacity)])
    graph.draw_slopes("volume", pool.volume.finish(until_s))
    _, prefix = choose_prefix(graph.top_value)
    yield _render_figure(f"Accumulated volume against the capacity, {prefix}{unit}·s", [("line volume", "volume")])
    yield graph.render(number, f"Accumulated volume of {row.pool} over time") + "</figure></section>"


def _render_figure(caption: str, keys: list[tuple[str, str]]) -> str:
    legend = "".join(
        '<span><svg viewBox="0 0 22 12" width="22" height="12" aria-hidden="true">'
        + (f'<path class="{kind}" d="M0 6H22"/>' if kind.startswith("line") else "")
        + (f'<path class="{kind}" d="M1 0H21V12H1Z"/>' if kind.startswith("area") else "")
        + f"</svg>{html.escape(text)}</span>"
        for kind, text in keys
    )
    return f'<figure><figcaption><b>{html.escape(caption)}</b><span class="legend">{legend}</span></figcaption>'


def _list_levels(row: SimulationRow) -> list[_Level]:
    """What is guaranteed: alone, while the flow lasts, while the volume lasts. Each on top of the strong guarantee."""
    strong = row.strong_guarantee
    plus = "strong + " if strong > 0 else ""
    levels = [_Level("flow", f"{plus}flow", strong + row.resource_flow)]
    if strong > 0:
        levels.append(_Level("strong", "strong", strong))
    if row.burst_guarantee > 0:
        levels.append(_Level("burst", f"{plus}burst" if plus else "burst guarantee", strong + row.burst_guarantee))
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

STYLE: Final = """
:root { --back: #fff; --text: #1b1f24; --muted: #5b6570; --grid: #dde2e7; --level: #4a535c; --usage: #12395a;
  --demand: #f2a65a; --strong: #a9c1e6; --integral: #8ccfbd; --weight: #dfe4e9; --volume: #0b7a63; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171a; --text: #e6e8ea; --muted: #9aa4af; --grid: #2f363d; --level: #aab3bc; --usage: #cfe3f5;
    --demand: #b8691c; --strong: #34538a; --integral: #1f6b5b; --weight: #333b44; --volume: #4cc9ab; }
}
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 0; overflow-wrap: anywhere; }
p { margin: 4px 0 16px; }
.muted { color: var(--muted); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; color: var(--muted); font-weight: 600; }
th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left; }
figure { margin: 16px 0 0; overflow-x: auto; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 24px; justify-content: space-between; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--muted); }
.legend span { display: inline-flex; align-items: center; gap: 6px; }
figure > svg { display: block; width: 100%; min-width: 640px; height: auto; }
text { font: 12px system-ui, sans-serif; fill: var(--muted); }
.label { fill: var(--text); }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
path { fill: none; }
.grid { stroke: var(--grid); }
.area.strong { fill: var(--strong); }
.area.integral { fill: var(--integral); }
.area.weight { fill: var(--weight); }
.line { stroke-width: 1.8; stroke-linejoin: round; }
.line.demand { stroke: var(--demand); stroke-width: 4; }
.line.usage { stroke: var(--usage); }
.line.volume { stroke: var(--volume); stroke-width: 2.2; }
.level { stroke: var(--level); stroke-dasharray: 6 4; }
.level.flow { stroke-dasharray: 2 3; }
.pointer { stroke: var(--text); stroke-width: 1; }
#tip { position: fixed; pointer-events: none; background: var(--back); color: var(--text); font-size: 13px;
  border: 1px solid var(--muted); border-radius: 6px; padding: 6px 10px; box-shadow: 0 2px 8px #0004; }
#tip td { border: 0; padding: 0 0 0 14px; }
#tip td:first-child { padding: 0; text-align: left; color: var(--muted); }
"""

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
