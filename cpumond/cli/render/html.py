"""Pages that commands write: one file that needs no network, with the style and graphs of the web pages in it.

Tables and sentences need no script; each graph has a sentence in its place until it is drawn."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any, Final

import msgspec

from cpumond.core.words import escape


def format_amount(value: float) -> str:
    """An amount in four digits, large ones with a letter: 62.5, 2000, 12.5 k, 8.64 M."""
    size, letter = 1.0, ""
    for greater, name in ((1e3, " k"), (1e6, " M"), (1e9, " G"), (1e12, " T"), (1e15, " P")):
        # 2000 reads better than 2 k.
        if abs(value) >= max(greater, 9999.5):
            size, letter = greater, name
    digits = f"{value / size:.4g}"
    return f"{0 if digits == '-0' else digits}{letter}"


def as_text(text: str) -> str:
    """Escape text as markup; invisible characters, such as changes of the writing direction, become visible."""
    return html.escape(escape(text))


class Page:
    """A page of a command: parts of its text, already markup, and its graphs."""

    def __init__(self, title: str) -> None:
        self._title = as_text(title)
        self._parts = [f"<h1>{self._title}</h1>"]
        self._charts: list[dict[str, Any]] = []

    def add(self, *parts: str) -> None:
        self._parts += parts

    def add_chart(
        self, title: str, said: str, times: Sequence[float], series: list[dict[str, Any]], **more: Any
    ) -> None:
        """Add a graph, with options as in ``chart.js``; where no script runs, the sentence ``said`` is shown instead.

        A series has ``values``, one for each of ``times`` (s), or is a line at a ``level``."""
        self._parts.append(
            f'<section class="card"><figure class="chart" data-chart="{len(self._charts)}">'
            f'<figcaption class="chart-title">{html.escape(title)}</figcaption>'
            f'<p class="flat">{html.escape(said)}</p></figure></section>'
        )
        self._charts.append({"title": title, "times": times, "series": series, **more})

    def add_table(self, label: str, caption: str, heads: str, body: str, foot: str = "") -> None:
        """Add a table with the rows ``body`` and ``foot``; it scrolls, so it can have the keyboard's focus."""
        self._parts.append(
            f'<div class="table"><div class="table-scroll" role="region" aria-label="{label}" tabindex="0"><table>'
            f"<caption>{caption}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
            f"{foot and f'<tfoot>{foot}</tfoot>'}</table></div></div>"
        )

    def add_meanings(self, meanings: Iterable[tuple[str, str]]) -> None:
        terms = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in meanings)
        self._parts.append(f"<section><h2>What the columns mean</h2><dl>{terms}</dl></section>")

    def render(self) -> str:
        static = resources.files("cpumond") / "web" / "static"
        styles, scripts = ("".join((static / name).read_text("utf-8") for name in names) for names in (STYLES, SCRIPTS))
        # One script instead of modules: a page that is opened as a file cannot import another file.
        script = re.sub(r"^import .*\n|^export ", "", scripts, flags=re.MULTILINE) if self._charts else ""
        if script:
            script = f"/*\n{(static / 'uplot.LICENSE.txt').read_text('utf-8')}*/\n{script}"
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        # In <script> only "</" and "<!" are special.
        charts = msgspec.json.encode(self._charts).decode().replace("<", "\\u003c")
        return PAGE.format(
            title=self._title, style=styles + STYLE, digest=digest, body="\n".join(self._parts), charts=charts,
            script=script,
        )  # fmt: skip


STYLES: Final = ("uplot.css", "style.css")
SCRIPTS: Final = ("uplot.js", "format.js", "dom.js", "chart.js", "file.js")
"""Files of the web pages that are put into a page; each comes after the files it uses."""

STYLE: Final = """
main { max-width: 1280px; }
main > * { margin: 12px 0; }
h2 { margin-top: 32px; }
.table caption { text-align: left; font-weight: 600; padding: 8px 10px; }
.table tfoot > tr > * { font-weight: 600; border-bottom: 0; }
.table tbody .name { white-space: normal; overflow-wrap: anywhere; min-width: 7em; max-width: 30em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0; }
dd { margin: 0; color: var(--muted); }
"""

PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; base-uri 'none'; require-trusted-types-for 'script'; trusted-types 'none'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="charts">{charts}</script>
<script type="module">{script}</script>
</body>
</html>
"""
