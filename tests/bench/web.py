"""How long the scheduler's web page takes at full size until its first row is painted, and what it weighs.

Starts ``cpumond scheduler`` with 2000 pools, 20 000 operations and 200 played nodes with jobs, whose fair shares are
updated each second, and looks at it with a headless Chromium. Milliseconds depend on the machine and on what else it
does: the time of a bare page of the same server is measured in the same run.

    python tests/bench/web.py [--pools 2000] [--operations 20000] [--nodes 200] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import web_scale
from browser import ARGUMENTS, WINDOW, find_program
from playwright.sync_api import sync_playwright
from scheduler_process import SchedulerProcess
from web_scale import FIRST_ROW, WATCH_FIRST_ROW, Wire

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = {"pools": "#/pools", "operations": "#/operations", "nodes": "#/nodes"}
BARE = "() => performance.getEntriesByType('navigation')[0].responseEnd"
CONTENTFUL = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


def open_anew(browser: Browser, url: str, where: str) -> tuple[float, float, dict[str, int]]:
    """With an empty cache: milliseconds to the first painted row and to anything painted, and bytes by path."""
    context = browser.new_context(viewport=WINDOW)  # type: ignore[arg-type]
    context.set_default_timeout(30_000)
    try:
        page = context.new_page()
        page.add_init_script(WATCH_FIRST_ROW)
        wire = Wire(context.new_cdp_session(page))
        page.goto(f"{url}/{where}", wait_until="commit")
        page.wait_for_function(FIRST_ROW)
        return float(page.evaluate(FIRST_ROW)), float(page.evaluate(CONTENTFUL)), dict(wire.bytes)
    finally:
        context.close()


def time_bare(browser: Browser, url: str) -> float:
    """Milliseconds of a page without anything."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{url}/healthz")
        return float(page.evaluate(BARE))
    finally:
        context.close()


def measure(browser: Browser, url: str, name: str, rounds: int) -> None:
    bare, rows, contentful = [], [], []
    weight: dict[str, int] = {}
    for _ in range(rounds):
        bare.append(time_bare(browser, url))
        row, first, weight = open_anew(browser, url, PAGES[name])
        rows.append(row)
        contentful.append(first)
    data = sum(size for path, size in weight.items() if path.startswith(("/api", "/healthz")))
    ratio = statistics.median(row / first for row, first in zip(rows, contentful, strict=True))
    show(f"{name}: first row painted", f"{spread(rows)} ms", f"a page without anything: {spread(bare)} ms")
    show("  first contentful paint", f"{spread(contentful)} ms", f"{name}, row to it: {ratio:.2f}")
    show(
        "  over the wire",
        f"{sum(weight.values()) / 1000:.1f} kB",
        f"of it data {data / 1000:.1f} kB, {len(weight)} requests",
    )


def show(name: str, value: str, more: str) -> None:
    print(f"{name:<52} {value:<40} {more}", flush=True)


def spread(values: list[float]) -> str:
    """Median, and all of them from the least to the most."""
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=web_scale.POOLS)
    parser.add_argument("--operations", type=int, default=web_scale.OPERATIONS)
    parser.add_argument("--nodes", type=int, default=web_scale.NODES)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    program = find_program()
    if program is None:
        raise SystemExit("needs Chromium (apt-get install --no-install-recommends chromium-headless-shell)")
    with tempfile.TemporaryDirectory() as folder:
        scheduler = SchedulerProcess(Path(folder))
        web_scale.fill_store(scheduler.state_dir, arguments.pools, arguments.operations)
        scheduler.write_config(web_scale.CONFIG, api="rate_limit = 0", period="1s")
        try:
            scheduler.start()
            with scheduler.new_client() as client:
                web_scale.play_nodes(client, arguments.nodes)
            scheduler.wait_updates(2)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
                try:
                    for name in PAGES:
                        measure(browser, scheduler.url, name, arguments.rounds)
                finally:
                    browser.close()
        finally:
            scheduler.close()


if __name__ == "__main__":
    main()
