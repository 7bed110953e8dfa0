"""How the web pages look: nothing overlaps, is cut off or hard to read, at any size, dark and light."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from web_site import Site, run_site

from cpumond.host.cgroup.mounts import Hierarchies

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.cgroup]

LONG_POOL = "W" * 100
LONG = "W" * 300
SIZES = ((1280, 800), (1920, 1080), (390, 844))

FIND_FAULTS = """() => {
  const faults = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > window.innerWidth) faults.push(`the page is ${wide} px wide`);
  const tell = (node) => `"${(node.textContent || node.name || node.nodeName).trim().slice(0, 60)}"`;
  const cuts = (style) => style.overflowX !== 'visible' || style.overflowY !== 'visible';

  // What can be seen of each piece of text, and of each control: rectangles within all boxes that cut.
  const items = [];
  const clip = (element, box) => {
    let { left, top, right, bottom } = box;
    let scrolls = false;
    for (let each = element; each && each !== document.body; each = each.parentElement) {
      const style = getComputedStyle(each);
      if (!cuts(style)) continue;
      const frame = each.getBoundingClientRect();
      if (style.overflowX === 'hidden' && style.textOverflow !== 'ellipsis' && !each.matches('.hidden-text')
        && (right > frame.right + 2 || left < frame.left - 2) && !scrolls) faults.push(`cut off: ${tell(element)}`);
      if (style.overflowX !== 'hidden' || style.textOverflow === 'ellipsis') scrolls = true;
      left = Math.max(left, frame.left);
      right = Math.min(right, frame.right);
      top = Math.max(top, frame.top);
      bottom = Math.min(bottom, frame.bottom);
    }
    return right - left > 1 && bottom - top > 1 ? { left, top, right, bottom } : null;
  };
  const isHidden = (element) => element.closest('.hidden-text, .skip, .uplot, [hidden]') !== null
    || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || isHidden(element)) continue;
    texts.push(node);
    const range = document.createRange();
    range.selectNodeContents(node);
    const line = parseFloat(getComputedStyle(element).lineHeight) || Infinity;
    for (const { left, top, right, bottom } of range.getClientRects()) {
      // Glyphs have less height than the box of their font, and than their line.
      const spare = Math.max((bottom - top - line) / 2, 0.12 * (bottom - top));
      const box = clip(element, { left, top: top + spare, right, bottom: bottom - spare });
      if (!box) continue;
      items.push({ node, box });
      if (box.right > window.innerWidth + 1 || box.left < -1) faults.push(`beyond the window's edge: ${tell(node)}`);
    }
  }
  for (const node of document.querySelectorAll('button, input, select, textarea, .badge')) {
    if (isHidden(node)) continue;
    const box = clip(node, node.getBoundingClientRect());
    if (box) items.push({ node, box });
  }
  const isSticky = (node) => (node.parentElement ?? node).closest('th, thead') !== null;
  items.sort((a, b) => a.box.left - b.box.left);
  for (let first = 0; first < items.length; first += 1) {
    const { node, box } = items[first];
    for (let second = first + 1; second < items.length && items[second].box.left < box.right - 2; second += 1) {
      const other = items[second];
      if (other.node === node || node.contains(other.node) || other.node.contains(node)) continue;
      const down = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
      const across = Math.min(box.right, other.box.right) - other.box.left;
      if (down <= 2 || across <= 2) continue;
      // Rows go by below the head of their table, and cells below the first column.
      const [table, otherTable] = [node, other.node].map((each) => each.parentElement.closest('table'));
      if (isSticky(node) !== isSticky(other.node) && table === otherTable) continue;
      faults.push(`${tell(node)} overlaps ${tell(other.node)} by ${down.toFixed(1)} px`);
    }
  }

  // Contrast of text on the ground below it (WCAG 2).
  const painter = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const known = new Map();
  const read = (color) => {
    if (!known.has(color)) {
      painter.clearRect(0, 0, 1, 1);
      painter.fillStyle = color;
      painter.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = painter.getImageData(0, 0, 1, 1).data;
      known.set(color, [red, green, blue, alpha / 255]);
    }
    return known.get(color);
  };
  const over = ([a, b, c, alpha], below) => [a, b, c].map((value, at) => alpha * value + (1 - alpha) * below[at]);
  const ground = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const color = read(getComputedStyle(each).backgroundColor);
      layers.push(color);
      if (color[3] === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (color) => {
    const [red, green, blue] = color.map((byte) => byte / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  for (const node of texts) {
    const element = node.parentElement;
    if (element.closest('button:disabled')) continue;
    const below = ground(element);
    const [low, high] = [light(below), light(over(read(getComputedStyle(element).color), below))].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) faults.push(`contrast of ${tell(node)} is ${contrast.toFixed(2)}`);
  }
  return [...new Set(faults)];
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    with run_site(tmp_path_factory.mktemp("site"), hierarchies) as site:
        site.furnish()
        # As long as a name may be, without a place to break it; and a title that is longer than any line.
        site.cluster.create_pool(LONG_POOL, weight=2.0)
        site.cluster.create_pool("below", LONG_POOL)
        long = site.cluster.start_operation(
            LONG_POOL, f"echo {LONG}; sleep 1000", cpu_limit=0.1, title=LONG, alias=f"*{LONG}", memory=2**20
        )
        [job] = site.cluster.await_running(long)
        site.long = {
            "long pool": f"#/pools/default/{LONG_POOL}", "pool below it": "#/pools/default/below",
            "long operation": f"#/operations/{long}", "its why": f"#/operations/{long}?tab=why",
            "its jobs": f"#/operations/{long}?tab=jobs", "its specification": f"#/operations/{long}?tab=specification",
            "its job": f"#/operations/{long}/jobs/{job['id']}",
        }  # fmt: skip
        yield site


def find_faults(page: Page) -> list[str]:
    """All of a page at all sizes, dark and light; each fault once, with where it was seen first."""
    faults: dict[str, str] = {}
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            # What follows the window's size has followed it.
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            for fault in page.evaluate(FIND_FAULTS):
                faults.setdefault(fault, f"{width}x{height} {scheme}: {fault}")
    return list(faults.values())


def test_the_scheduler_s_pages(page, site):
    faults = []
    for name, where in site.addresses().items():
        site.open(page, where)
        faults += [f"{name}: {fault}" for fault in find_faults(page)]
    assert faults == []


def test_the_agent_s_pages(page, site):
    faults = []
    for name, where in site.agent_addresses().items():
        site.open_agent(page, where)
        faults += [f"{name}: {fault}" for fault in find_faults(page)]
    assert faults == []


def test_pages_with_very_long_names(page, site):
    faults = []
    for name, where in site.long.items():
        site.open(page, where)
        faults += [f"{name}: {fault}" for fault in find_faults(page)]
    assert faults == []


@pytest.mark.parametrize(
    ("where", "button"),
    [
        ("#/pools", "New pool"),
        ("#/pools/default/models", "Remove"),
        ("#/operations", "Start an operation"),
        ("job", "Pin"),
    ],
)
def test_the_dialogs(page, site, where, button):
    site.open(page, site.addresses().get(where, where))
    page.get_by_role("button", name=button, exact=True).click()
    assert page.get_by_role("dialog").count() == 1
    # Only it can be used and read meanwhile.
    page.evaluate("document.querySelector('.frame').hidden = true")
    assert find_faults(page) == []


@pytest.mark.parametrize(
    ("markup", "fault"),
    [
        ("<p>good</p><button>also good</button>", ""),
        ("<p style='width: 3000px'>wide</p>", "the page is 3"),
        ("<p>one</p><p style='margin-top: -30px'>two</p>", "overlaps"),
        ("<button>press</button><b style='margin-left: -30px'>here</b>", "overlaps"),
        ("<p style='position: fixed; right: -20px'>over the edge</p>", "beyond the window's edge"),
        ("<p style='width: 20px; overflow: hidden'>Donaudampfschiff</p>", "cut off"),
        ("<p style='color: #999'>pale</p>", "contrast of \"pale\" is 2.8"),
        ("<div style='background: #000'><p style='background: #0001'>dark</p></div>", "contrast of \"dark\" is 1.0"),
    ],
)  # fmt: skip
def test_faults_are_found(page, markup, fault):
    page.set_content(f"<!doctype html><html lang='en'><title>t</title><body>{markup}")
    found = find_faults(page)
    assert any(fault in text for text in found) if fault else found == [], found
