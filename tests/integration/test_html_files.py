"""The pages that commands write, opened from the disk by a browser that reaches nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cpumond.cli.render.html import Page as HtmlPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

MARKUP = "</script><script>alert(1)</script>"


def write_page(path: Path) -> str:
    page = HtmlPage(MARKUP)
    page.add_chart(
        MARKUP, MARKUP, [0.0, 3600.0, 7200.0],
        [
            {"label": "low", "values": [1.0, 1.0, 1.0], "color": "--c1", "stack": True, "fill": True, "step": "after"},
            {"label": "high", "values": [2.0, 12500.0, 0.0], "color": "--c2", "stack": True, "fill": True},
            {"label": MARKUP, "level": 5.0, "color": "--c3", "dash": True},
        ],
        elapsed=True, cut=10.0,
    )  # fmt: skip
    page.add_table("Workloads", "Workloads, cores", '<th scope="col">name</th>', "<tr><td>research</td></tr>")
    path.write_text(page.render(), encoding="utf-8")
    assert path.stat().st_size < 200_000
    return path.as_uri()


def test_a_graph_is_drawn_with_what_is_in_the_file_alone(page: Page, tmp_path: Path) -> None:
    page.goto(write_page(tmp_path / "page.html"))
    assert page.title() == MARKUP
    assert page.locator("canvas").count() == 1
    scales = page.evaluate("[...document.querySelectorAll('.chart')].map(({ plot }) => plot.scales.y.max)")
    assert scales == [pytest.approx(10.8)]
    parts = page.evaluate("document.querySelector('.chart').plot.data")
    assert parts == [[0, 3600, 7200], [1, 1, 1], [3, 12501, 1], [5, 5, 5]]
    assert page.locator("tbody").first.inner_text().split() == [
        "low", "1", "1", "1", "high", "0", "0", "12.5", "k", *MARKUP.split(), "5", "5", "5",
    ]  # fmt: skip


def test_without_a_script_there_are_sentences_and_tables(new_page: Callable[..., Page], tmp_path: Path) -> None:
    page = new_page(java_script_enabled=False, color_scheme="dark")
    page.goto(write_page(tmp_path / "page.html"))
    assert page.locator("figure p").all_inner_texts() == [MARKUP]
    assert page.get_by_role("cell", name="research").is_visible()
