"""The web pages in use: choices are in the address, all works with keys, and is told to a screen reader."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from web_site import Site, await_page, expect, run_site

from cpumond.host.cgroup.mounts import Hierarchies

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.cgroup]

NAMES = ("a", "a1", "a2", "b", "b1")

IN_ORDER = """() => {
  // Where the keyboard can go, and where it is; nothing has a place of its own in that order.
  const all = [...document.querySelectorAll(
    'a[href], button:not(:disabled), input, select, textarea, summary, [tabindex="0"]')]
    .filter((element) => element.checkVisibility());
  const strange = document.querySelectorAll('[tabindex]:not([tabindex="0"]):not([tabindex="-1"])').length;
  return [all.length, all.indexOf(document.activeElement), strange];
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    with run_site(tmp_path_factory.mktemp("site"), hierarchies, nodes=1) as site:
        for name in NAMES:
            site.cluster.create_pool(
                name, name[0] if len(name) > 1 else "<Root>", weight=float(len(NAMES) - NAMES.index(name))
            )
        site.operations["moving"] = site.cluster.start_operation("a1", "sleep 1000", cpu_limit=0.2, title="sleeper")
        [site.job] = site.cluster.await_running(site.operations["moving"])
        yield site


def shown_pools(page: Page) -> list[str]:
    return page.locator("tbody th[scope=row] a").all_inner_texts()


def await_pools(page: Page, *names: str) -> None:
    expect(page.locator("tbody th[scope=row] a")).to_have_text(list(names))


def row(page: Page, name: str):
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


# --- the address


def test_what_was_chosen_of_the_pools_survives_loading_anew_and_back(page, site):
    site.open(page, "#/pools")
    await_pools(page, "<Root>", *NAMES)
    row(page, "a").get_by_role("button", name="Pools below a").click()
    await_pools(page, "<Root>", "a", "b", "b1")
    page.get_by_role("button", name="Weight", exact=True).click()
    page.get_by_role("button", name="Weight", exact=True).click()  # the least first
    await_pools(page, "<Root>", "b", "b1", "a")
    head = page.get_by_role("columnheader", name="Weight")
    expect(head).to_have_attribute("aria-sort", "ascending")
    page.reload()
    await_page(page)
    await_pools(page, "<Root>", "b", "b1", "a")
    expect(head).to_have_attribute("aria-sort", "ascending")
    page.get_by_role("link", name="b1", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("b1")
    page.go_back()
    await_pools(page, "<Root>", "b", "b1", "a")
    page.go_forward()
    expect(page.get_by_role("heading", level=1)).to_have_text("b1")
    page.go_back()
    page.get_by_role("searchbox", name="Find a pool").fill("a2")
    expect(page.get_by_role("link", name="a2", exact=True)).to_be_visible()  # a fold hides nothing that is looked for
    expect(page.get_by_role("link", name="b1", exact=True)).to_have_count(0)
    page.reload()
    await_page(page)
    expect(page.get_by_role("searchbox", name="Find a pool")).to_have_value("a2")
    assert "b1" not in shown_pools(page)


def test_tab_range_and_filters_survive_loading_anew_and_back(page, site):
    operation = site.operations["moving"]
    site.open(page, f"#/operations/{operation}")
    page.get_by_role("button", name="24 h", exact=True).click()
    expect(page.get_by_role("button", name="24 h", exact=True)).to_have_attribute("aria-pressed", "true")
    page.reload()
    await_page(page)
    expect(page.get_by_role("button", name="24 h", exact=True)).to_have_attribute("aria-pressed", "true")
    tab = page.get_by_role("link", name="Jobs", exact=True)
    tab.click()
    expect(tab).to_have_attribute("aria-current", "page")
    page.reload()
    await_page(page)
    expect(tab).to_have_attribute("aria-current", "page")
    page.get_by_role("link", name=f"job {site.job['cookie']}", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Job {site.job['cookie']}")
    page.go_back()
    expect(tab).to_have_attribute("aria-current", "page")
    site.open(page, "#/operations")
    page.get_by_label("State", exact=True).select_option("failed")
    expect(page.locator("main")).to_contain_text("No operation matches.")
    page.reload()
    await_page(page)
    expect(page.get_by_label("State", exact=True)).to_have_value("failed")
    expect(page.locator("main")).to_contain_text("No operation matches.")
    page.get_by_label("State", exact=True).select_option("running")
    page.get_by_label("Search", exact=True).fill("SLEEP")
    expect(page.get_by_role("link", name="sleeper", exact=True)).to_have_attribute("href", f"#/operations/{operation}")
    expect(page).to_have_url(re.compile("search=SLEEP"))


# --- the keyboard


@pytest.mark.parametrize("where", ["#/", "#/pools", "#/pools/default/a", "#/operations", "#/nodes", "#/preemptions"])
def test_tab_reaches_everything_in_its_order(page, site, where):
    site.open(page, where)
    reached = []
    for _ in range(200):
        page.keyboard.press("Tab")
        count, at, strange = page.evaluate(IN_ORDER)
        assert strange == 0
        if at < 0 or (reached and at == 0):
            break
        reached.append(at)
    assert reached == list(range(count))


def test_the_skip_link_leads_to_the_content(page, site):
    site.open(page, "#/pools")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    assert page.url.endswith("#/pools")


def test_sorting_and_folding_work_with_keys_and_keep_the_focus(page, site):
    site.open(page, "#/pools")
    button = page.get_by_role("button", name="Weight", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    await_pools(page, "<Root>", "a", "a1", "a2", "b", "b1")
    page.keyboard.press("Space")
    await_pools(page, "<Root>", "b", "b1", "a", "a2", "a1")
    expect(button).to_be_focused()
    fold = row(page, "a").get_by_role("button", name="Pools below a")
    fold.focus()
    page.keyboard.press("Enter")
    await_pools(page, "<Root>", "b", "b1", "a")
    expect(fold).to_be_focused()
    expect(fold).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("Space")
    await_pools(page, "<Root>", "b", "b1", "a", "a2", "a1")
    page.keyboard.press("ArrowLeft")
    await_pools(page, "<Root>", "b", "b1", "a")
    page.keyboard.press("ArrowRight")
    await_pools(page, "<Root>", "b", "b1", "a", "a2", "a1")
    # Also after the page has asked again.
    with page.expect_response(lambda response: "pool_table" in response.url):
        pass
    expect(fold).to_be_focused()


# --- a screen reader


def test_every_table_has_a_caption_and_every_head_a_scope(page, site):
    for where in ("#/", "#/pools", "#/pools/default/a", "#/operations", f"#/operations/{site.operations['moving']}",
                  f"#/operations/{site.operations['moving']}?tab=specification", site.job_address(), "#/nodes",
                  f"#/nodes/{site.job['node_id']}", "#/preemptions"):  # fmt: skip
        site.open(page, where)
        assert page.evaluate(
            "[...document.querySelectorAll('table')].filter((t) => !t.caption?.textContent.trim() "
            "|| [...t.querySelectorAll('th')].some((th) => !th.scope)).map((t) => t.outerHTML.slice(0, 200))"
        ) == [], where  # fmt: skip
        levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((h) => Number(h.tagName[1]))")
        assert levels[0] == 1, where
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), (where, levels)


def test_graphs_are_tables_for_a_screen_reader(page, site):
    site.open(page, "#/pools/default/a")
    graph = page.get_by_role("region", name="CPU", exact=True).or_(page.get_by_role("region", name="CPU"))
    text = graph.first.aria_snapshot()
    assert "CPU of its jobs, cores" in text
    assert 'rowheader "requested"' in text
    assert "canvas" not in text


def test_landmarks_and_the_present_page(page, site):
    site.open(page, "#/pools")
    snapshot = page.locator("body").aria_snapshot()
    for landmark in (
        "banner",
        "main",
        'navigation "Pages"',
        'heading "Pools" [level=1]',
        'table "Pools of the tree default"',
    ):
        assert f"- {landmark}" in snapshot, snapshot[:2000]
    expect(page.get_by_role("link", name="Pools", exact=True)).to_have_attribute("aria-current", "page")
    assert page.evaluate("document.documentElement.lang") == "en"
