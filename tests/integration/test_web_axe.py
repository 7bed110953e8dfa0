"""Every page for everybody: axe-core finds nothing serious in it, no text is cut, nothing is wider than the window."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from web_site import Site, encode, expect, run_site

from cpumond.host.cgroup.mounts import Hierarchies

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest.importorskip("axe_playwright_python", reason="needs the Python package axe-playwright-python, for its axe-core")

pytestmark = [pytest.mark.browser, pytest.mark.cgroup]

DESK, TELEPHONE = (1440, "light"), (390, "dark")
"""Width and theme. Pages and dialogs are looked at on a telephone here, on a desk in ``tests/slow``."""
PATTERNS = "async () => (await import('/web/scheduler.js')).app.options.pages.map(([pattern]) => pattern)"
"""The pages that there are, each as the parts of its address."""
AXE = """async () => (await axe.run(document, { resultTypes: ['violations'] })).violations
  .filter(({ impact }) => impact === 'serious' || impact === 'critical')
  .flatMap(({ id, nodes }) => nodes.map(({ target, html, any: [why] }) =>
    [id, target.join(' '), html.slice(0, 120), why?.message ?? ''].join(' | ')))"""
CUT = """async () => {
  // A table that has another width is drawn anew.
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const found = [];
  const tell = (what, text, { left, right }) =>
    found.push(`${what}: ${text.trim().slice(0, 60)} (${Math.round(left)} to ${Math.round(right)})`);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    const parent = text.parentElement;
    const told = text.data.trim();
    if (!told || !parent.checkVisibility() || parent.closest('.hidden-text, .skip, option, script')) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const rect = range.getBoundingClientRect();
    let isReachable = false;
    let whole = '';
    for (let each = parent; each && !isReachable; each = each.parentElement) {
      whole ||= each.title;
      const { overflowX } = getComputedStyle(each);
      if (overflowX === 'auto' || overflowX === 'scroll') isReachable = true;
      else if (overflowX === 'hidden' || overflowX === 'clip') {
        const box = each.getBoundingClientRect();
        // What is shortened says all of it at the mouse.
        const isOut = rect.right > box.right + 1 || rect.left < box.left - 1;
        if (isOut && !whole.includes(told)) tell('cut', told, rect);
      }
    }
    if (!isReachable && (rect.right > innerWidth + 1 || rect.left < -1)) tell('outside', told, rect);
  }
  for (const each of document.querySelectorAll('main *, header *, dialog *')) {
    const { display, overflowX } = getComputedStyle(each);
    const hasText = [...each.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    const isWide = each.clientWidth && each.scrollWidth > each.clientWidth + 1;
    if (hasText && isWide && display !== 'inline' && overflowX === 'visible' && !each.closest('.hidden-text'))
      tell('wider than its box', each.textContent, each.getBoundingClientRect());
  }
  const { scrollWidth } = document.documentElement;
  if (scrollWidth > innerWidth) found.push(`the page is ${scrollWidth} px wide`);
  return found;
}"""
"""Texts that do not fit where they stand; what a part of the page scrolls to is no such."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    with run_site(tmp_path_factory.mktemp("site"), hierarchies) as site:
        site.furnish()
        site.cluster.start_operation(
            "models", "sleep 1000", 40, cpu_limit=1.5, title="What waits for a node that is free"
        )
        yield site


LINKS = "() => [...document.querySelectorAll('a[href^=\"#/\"]')].map((link) => link.getAttribute('href'))"


def pages_of(site: Site, page: Page) -> tuple[list[str], list[re.Pattern[str]]]:
    """Addresses of pages with something to see on each; and patterns of those of which a link has to be found first."""
    names = {
        ":tree": "default", ":pool": "models", ":operation": site.operations["moving"], ":job": site.job["id"],
        ":node": encode(site.job["node_id"]),
    }  # fmt: skip
    site.open(page, "#/")
    registered = ["#/" + "/".join(names.get(part, part) for part in pattern) for pattern in page.evaluate(PATTERNS)]
    known = [where for where in registered if ":" not in where]
    patterns = [re.compile(re.sub(":[a-z_]+", "[^/?]+", where)) for where in registered if ":" in where]
    return list(dict.fromkeys([*site.addresses().values(), *known])), patterns


def look(page: Page, where: str, looks: Iterable[tuple[int, str]] = (DESK, TELEPHONE)) -> list[str]:
    """What is wrong with what is shown, at each width in its theme."""
    wrong = []
    for width, theme in looks:
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("theme => document.documentElement.setAttribute('data-theme', theme)", theme)
        wrong += [f"{where} at {width}, {theme}: {text}" for script in (CUT, AXE) for text in page.evaluate(script)]
    return wrong


@pytest.fixture
def checked(new_page: Any) -> Page:
    """A page with axe-core in it; its own rules let no script in but files of the server."""
    source = Path(str(resources.files("axe_playwright_python"))) / "axe.min.js"
    page: Page = new_page(viewport={"width": DESK[0], "height": 900}, bypass_csp=True)
    page.add_init_script(path=source)
    return page


def find_faults_of_pages(page: Page, site: Site, screen: tuple[int, str]) -> list[str]:
    """What is wrong with all pages of the scheduler and of an agent."""
    wrong: list[str] = []
    addresses, patterns = pages_of(site, page)
    for where in addresses:
        site.open(page, where)
        wrong += look(page, where, [screen])
        for link in page.evaluate(LINKS) if patterns else ():
            if fitting := [each for each in patterns if each.fullmatch(link)]:
                addresses.append(link)
                patterns.remove(fitting[0])
    assert not patterns, "no page links to these; put something there, or add their names to `names`"
    for url, where in ((site.node.web_url, each) for each in site.agent_addresses().values()):
        page.goto(f"{url}{where}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("show these keys")
        page.keyboard.press("Escape")
        wrong += look(page, f"agent {where}", [screen])
    return wrong


def find_faults_of_dialogs(page: Page, site: Site, screen: tuple[int, str]) -> list[str]:
    """What is wrong with the dialogs of pages, and with those that keys open."""
    wrong: list[str] = []
    node = f"#/nodes/{encode(site.job['node_id'])}"
    for where, button in (
        ("#/operations", "Start an operation"), ("#/pools", "New pool"), ("#/pools/default/models", "Change"),
        (node, "Cordon"), (node, "Drain"), (f"#/operations/{site.operations['moving']}", "Abort"),
    ):  # fmt: skip
        page.set_viewport_size({"width": DESK[0], "height": 900})
        site.open(page, where)
        page.get_by_role("button", name=button, exact=True).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        wrong += look(page, f"{where}: {button}", [screen])
        page.keyboard.press("Escape")
    for keys in ("?", "Control+k"):
        page.keyboard.press(keys)
        expect(page.get_by_role("dialog")).to_be_visible()
        wrong += look(page, keys, [screen])
        page.keyboard.press("Escape")
    return wrong


def test_no_page_keeps_anybody_out_and_none_cuts_a_text(checked, site):
    assert find_faults_of_pages(checked, site, TELEPHONE) == []


def test_no_dialog_does(checked, site):
    assert find_faults_of_dialogs(checked, site, TELEPHONE) == []
