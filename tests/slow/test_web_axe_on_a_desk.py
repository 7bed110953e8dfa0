"""The pages of ``test_web_axe.py`` on a desk; nothing overlaps at any size, nor where names are as long as may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_web_axe import DESK, checked, find_faults_of_dialogs, find_faults_of_pages, site  # noqa: F401 - fixtures
from web_site import run_site

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.cgroup, pytest.mark.timeout(900)]

LONG_POOL, LONG = "W" * 100, "W" * 300
"""Without a place to break them; the latter is longer than any line."""
SIZES = ((1280, 800), (1920, 1080), (390, 844))
OVERLAPS = """() => {
  const tell = (node) => `"${(node.textContent || node.name || node.nodeName).trim().slice(0, 60)}"`;
  // What can be seen of each piece of text, and of each control: rectangles within all boxes that cut.
  const items = [];
  const add = (node, element, { left, top, right, bottom }) => {
    for (let each = element; each && each !== document.body; each = each.parentElement) {
      const { overflowX, overflowY } = getComputedStyle(each);
      if (overflowX === 'visible' && overflowY === 'visible') continue;
      const frame = each.getBoundingClientRect();
      left = Math.max(left, frame.left);
      right = Math.min(right, frame.right);
      top = Math.max(top, frame.top);
      bottom = Math.min(bottom, frame.bottom);
    }
    if (right - left > 1 && bottom - top > 1) items.push({ node, box: { left, top, right, bottom } });
  };
  const isHidden = (element) => element.closest('.hidden-text, .skip, .uplot, [hidden]') !== null
    || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || isHidden(element)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const line = parseFloat(getComputedStyle(element).lineHeight) || Infinity;
    for (const { left, top, right, bottom } of range.getClientRects()) {
      // Glyphs have less height than the box of their font, and than their line.
      const spare = Math.max((bottom - top - line) / 2, 0.12 * (bottom - top));
      add(node, element, { left, top: top + spare, right, bottom: bottom - spare });
    }
  }
  for (const node of document.querySelectorAll('button, input, select, textarea, .badge'))
    if (!isHidden(node)) add(node, node, node.getBoundingClientRect());
  const isSticky = (node) => (node.parentElement ?? node).closest('th, thead') !== null;
  items.sort((a, b) => a.box.left - b.box.left);
  const wide = document.documentElement.scrollWidth;
  const found = wide > innerWidth ? [`the page is ${wide} px wide`] : [];
  items.forEach(({ node, box }, first) => {
    for (let second = first + 1; second < items.length && items[second].box.left < box.right - 2; second += 1) {
      const other = items[second];
      if (other.node === node || node.contains(other.node) || other.node.contains(node)) continue;
      const down = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
      const across = Math.min(box.right, other.box.right) - other.box.left;
      if (down <= 2 || across <= 2) continue;
      // Rows go by below the head of their table, and cells below the first column.
      const [table, otherTable] = [node, other.node].map((each) => each.parentElement.closest('table'));
      if (isSticky(node) !== isSticky(other.node) && table === otherTable) continue;
      found.push(`${tell(node)} overlaps ${tell(other.node)} by ${down.toFixed(1)} px`);
    }
  });
  return found;
}"""


def find_overlaps(page: Page, where: str) -> set[str]:
    """What overlaps on a page at all sizes."""
    found = set[str]()
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        # What follows the window's size has followed it.
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found.update(f"{where} at {width}: {text}" for text in page.evaluate(OVERLAPS))
    return found


def test_no_page_keeps_anybody_out_and_none_cuts_a_text(checked, site):  # noqa: F811
    assert find_faults_of_pages(checked, site, DESK) == []


def test_no_dialog_does(checked, site):  # noqa: F811
    assert find_faults_of_dialogs(checked, site, DESK) == []


def test_nothing_overlaps(page, site):  # noqa: F811
    found = set[str]()
    for where in site.addresses().values():
        site.open(page, where)
        found |= find_overlaps(page, where)
    for where in site.agent_addresses().values():
        site.open_agent(page, where)
        found |= find_overlaps(page, f"agent {where}")
    assert found == set()


def test_very_long_names_are_in_nothings_way(page, tmp_path, hierarchies):
    with run_site(tmp_path, hierarchies, nodes=1) as own:
        cluster = own.cluster
        cluster.create_pool(LONG_POOL)
        cluster.create_pool("below", LONG_POOL)
        long = cluster.start_operation(
            LONG_POOL, f"echo {LONG}; sleep 1000", cpu_limit=0.1, title=LONG, alias=f"*{LONG}"
        )
        [job] = cluster.await_running(long)
        tabs = [f"operations/{long}?tab={tab}" for tab in ("why", "jobs", "specification")]
        pools = [f"pools/default/{pool}" for pool in (LONG_POOL, "below")]
        found = set[str]()
        for where in ("", "pools", *pools, f"operations/{long}", *tabs, f"operations/{long}/jobs/{job['id']}"):
            own.open(page, f"#/{where}")
            found |= find_overlaps(page, where)
        page.goto("about:blank")
    assert found == set()


@pytest.mark.parametrize(
    ("markup", "is_wrong"),
    [
        ("<p>good</p><button>also good</button>", False),
        ("<p>one</p><p style='margin-top: -30px'>two</p>", True),
        ("<p style='width: 3000px'>wide</p>", True),
        ("<button>press</button><b style='margin-left: -30px'>here</b>", True),
    ],
)
def test_overlaps_are_found(page, markup, is_wrong):
    page.set_content(f"<!doctype html><html lang='en'><title>t</title><body>{markup}")
    assert bool(find_overlaps(page, "")) == is_wrong
