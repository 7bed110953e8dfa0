"""Graphs and numbers of the pages that commands write: SVG without a script, one style for dark and light.

Pure. A page is one file that needs nothing beside it.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 960.0
LEFT: Final = 56.0
RIGHT: Final = 150.0
TOP: Final = 10.0
BOTTOM: Final = 40.0
PLOT_WIDTH: Final = WIDTH - LEFT - RIGHT
"""Pixels of a graph before the browser scales it; on the right is room for the names of level lines."""

LABEL_GAP: Final = 15.0
"""Pixels between the names of two level lines."""

Point = tuple[float, float]


# Numbers


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


# Graphs


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line with its name."""

    kind: str
    name: str
    value: float


class Graph:
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
        """Grid lines with their numbers, and the axis of time since the start."""
        self.draw_value_axis()
        step_s, title, label = choose_time_step(self.until_s)
        count = math.floor(self.until_s / step_s + 1e-9) + 1 if self.until_s > 0 else 1
        self.draw_time_axis(title, [(number * step_s, label(number)) for number in range(count)])

    def draw_value_axis(self) -> None:
        """Grid lines with their numbers."""
        size, _ = choose_prefix(self.top_value)
        for number in range(round(self.top_value / self.step) + 1):
            y = self.y(number * self.step)
            self.parts.append(f'<path class="grid" d="M{LEFT:g} {y:.1f}H{LEFT + PLOT_WIDTH:g}"/>')
            text = f"{number * self.step / size:.6g}"
            self.parts.append(f'<text class="tick end" x="{LEFT - 8:g}" y="{y + 4:.1f}">{text}</text>')

    def draw_time_axis(self, title: str, ticks: Iterable[tuple[float, str]]) -> None:
        """Grid lines with texts at times."""
        bottom = TOP + self.height
        for time_s, label in ticks:
            x = self.x(time_s)
            self.parts.append(f'<path class="grid" d="M{x:.1f} {TOP:g}V{bottom + 5:g}"/>')
            self.parts.append(f'<text class="tick middle" x="{x:.1f}" y="{bottom + 18:g}">{label}</text>')
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

    def draw_levels(self, levels: list[Level]) -> None:
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

    def render(self, attributes: str, head: str = "") -> str:
        """The SVG element; ``attributes`` and the elements of ``head`` say what it shows, escaped already."""
        bottom = TOP + self.height
        start = f'<svg viewBox="0 0 {WIDTH:g} {bottom + BOTTOM:g}" role="img" {attributes}>'
        return start + head + "".join(self.parts) + "</svg>"


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


def render_figure(caption: str, keys: list[tuple[str, str]]) -> str:
    legend = "".join(
        '<span><svg viewBox="0 0 22 12" width="22" height="12" aria-hidden="true">'
        + (f'<path class="{kind}" d="M0 6H22"/>' if kind.startswith("line") else "")
        + (f'<path class="{kind}" d="M1 0H21V12H1Z"/>' if kind.startswith("area") else "")
        + f"</svg>{html.escape(text)}</span>"
        for kind, text in keys
    )
    return f'<figure><figcaption><b>{html.escape(caption)}</b><span class="legend">{legend}</span></figcaption>'


BASE_STYLE: Final = """
:root { --back: #fff; --text: #1b1f24; --muted: #5b6570; --grid: #dde2e7; --level: #4a535c; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171a; --text: #e6e8ea; --muted: #9aa4af; --grid: #2f363d; --level: #aab3bc; }
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
.line { stroke-width: 1.8; stroke-linejoin: round; }
.level { stroke: var(--level); stroke-dasharray: 6 4; }
"""
"""What all pages have in common; colours of their own come after it."""

TABLE_STYLE: Final = """
main { max-width: 1240px; }
caption { text-align: left; font-weight: 600; padding: 0 0 4px; }
.wide { margin: 24px 0 8px; }
.name { text-align: left; }
tbody th { font-weight: 400; }
tfoot th, tfoot td { font-weight: 600; border-bottom: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0; }
dd { margin: 0; color: var(--muted); }
.line.ordered { stroke: var(--ordered); stroke-dasharray: 5 3; }
"""
"""Of pages with a wide table of names, and with a line of what was ordered."""

PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
"""A page without scripts: ``title``, ``style`` and ``body`` are filled in."""
