"""Tips of the glossary's words in a real browser: by pointer, keyboard and touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from scheduler_process import SchedulerProcess
from web_site import open_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs the Python package playwright: sh tests/venv.sh all"
).expect

pytestmark = pytest.mark.browser

FAIR_SHARE = "What a pool or an operation may have now"
DEMAND = "What running operations would use"


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    process = SchedulerProcess(tmp_path_factory.mktemp("glossary"))
    process.write_config()
    try:
        process.start()
        process.create_pool("research")
        yield process
    finally:
        process.close()


def test_a_word_explains_itself_to_pointer_and_keyboard(new_page: Callable[..., Page], scheduler: SchedulerProcess):
    page = new_page()
    open_page(page, f"{scheduler.url}/", "#/pools/default/research")
    tip, facts = page.locator(".tip"), page.locator("dl.facts").first
    word, other = (facts.get_by_role("button", name=name, exact=True) for name in ("Fair share", "Demand"))
    expect(tip).to_be_hidden()

    word.hover()
    expect(tip).to_be_visible()
    expect(tip).to_contain_text(FAIR_SHARE)
    tip.hover()  # it can be read with the pointer on it
    page.wait_for_timeout(400)
    expect(tip).to_be_visible()
    page.get_by_role("heading", level=1).hover()
    expect(tip).to_be_hidden()

    word.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    expect(word).to_be_focused()
    expect(tip).to_contain_text(FAIR_SHARE)
    expect(word).to_have_accessible_description(page.locator(".tip").inner_text())
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    expect(word).to_be_focused()
    other.focus()
    expect(tip).to_contain_text(DEMAND)


def test_the_head_of_a_table_sorts_and_explains(new_page: Callable[..., Page], scheduler: SchedulerProcess):
    page = new_page(viewport={"width": 390, "height": 844}, has_touch=True)
    open_page(page, f"{scheduler.url}/", "#/pools")
    page.get_by_text("Columns", exact=True).tap()
    page.get_by_role("checkbox", name="Fair share", exact=True).tap()
    page.get_by_text("Columns", exact=True).tap()
    tip, head = page.locator(".tip"), page.get_by_role("columnheader").get_by_role("button", name="Fair share")
    head.tap()
    expect(tip).to_contain_text(FAIR_SHARE)
    expect(tip).to_contain_text("Here: what it may have now")
    expect(page.get_by_role("columnheader", name="Fair share")).to_have_attribute("aria-sort", "descending")
    box = tip.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    page.get_by_role("heading", level=1).tap()
    expect(tip).to_be_hidden()


def test_the_runbook_is_a_page_with_its_sections(new_page: Callable[..., Page], scheduler: SchedulerProcess):
    page = new_page()
    page.goto(f"{scheduler.url}/web/runbook.html#cpumondpoolstarving")
    expect(page.get_by_role("heading", name="CpumondPoolStarving", exact=True)).to_be_in_viewport()
    page.get_by_role("link", name="CpumondGuaranteeUnmet").first.click()
    expect(page.get_by_role("heading", name="CpumondGuaranteeUnmet", exact=True)).to_be_in_viewport()
