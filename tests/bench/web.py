"""What the scheduler's web page costs at full size: the browser's time, and what the scheduler pays for its viewers.

Starts ``cpumond scheduler`` with 2000 pools, 20 000 operations and 200 played nodes with jobs, whose fair shares are
updated each second, and looks at it with a headless Chromium. Milliseconds depend on the machine and on what else it
does: the time of a bare page of the same server, and frames of a page that does nothing, are measured in the same run.

    python tests/bench/web.py [--pools 2000] [--operations 20000] [--nodes 200] [--polls 60] [--viewers 5] [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import web_scale
from browser import ARGUMENTS, WINDOW, find_program
from playwright.sync_api import sync_playwright
from scheduler import cpu_seconds, memory_mib
from scheduler_process import SchedulerProcess
from web_scale import FIRST_ROW, WATCH_FIRST_ROW, Wire

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FRAMES = """
() => {
  const gaps = [];
  let before = 0;
  let stopped = false;
  const tick = (now) => {
    if (before) gaps.push(now - before);
    before = now;
    if (!stopped) requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
  window.stopFrames = () => { stopped = true; return gaps; };
}
"""
ACT = """
async ([selector, what]) => {
  const target = document.querySelector(selector);
  const painted = () => new Promise((resolve) => requestAnimationFrame(() => {
    const channel = new MessageChannel(); channel.port1.onmessage = () => resolve(performance.now());
    channel.port2.postMessage(0); }));
  await painted();
  const begun = performance.now();
  if (what === "click") target.click();
  else { target.value = what; target.dispatchEvent(new Event("input", { bubbles: true })); }
  const handled = performance.now();
  return [handled - begun, (await painted()) - begun];
}
"""


class Bench:
    """One scheduler and one browser."""

    def __init__(self, scheduler: SchedulerProcess, browser: Browser, arguments: argparse.Namespace) -> None:
        self.scheduler = scheduler
        self.browser = browser
        self.arguments = arguments

    @contextlib.contextmanager
    def page(self) -> Iterator[Page]:
        """A page with an empty cache."""
        context = self.browser.new_context(viewport=WINDOW)  # type: ignore[arg-type]
        context.set_default_timeout(30_000)
        try:
            page = context.new_page()
            page.add_init_script(WATCH_FIRST_ROW)
            yield page
        finally:
            context.close()

    def open(self, page: Page, where: str) -> float:
        """Milliseconds from the start of the navigation to the first painted row."""
        page.goto(f"{self.scheduler.url}/{where}", wait_until="commit")
        page.wait_for_function(FIRST_ROW)
        return float(page.evaluate(FIRST_ROW))

    # --- what is measured

    def first_paint(self, where: str, name: str) -> None:
        bare, rows, contentful = [], [], []
        weight: dict[str, int] = {}
        for _ in range(self.arguments.rounds):
            with self.page() as page:
                page.goto(f"{self.scheduler.url}/healthz")
                bare.append(float(page.evaluate("() => performance.getEntriesByType('navigation')[0].responseEnd")))
            with self.page() as page:
                wire = Wire(page.context.new_cdp_session(page))
                rows.append(self.open(page, where))
                contentful.append(
                    page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
                )
                weight = dict(wire.bytes)
        data = sum(size for path, size in weight.items() if path.startswith(("/api", "/healthz")))
        show(f"{name}: first row painted", f"{spread(rows)} ms", f"a page without anything: {spread(bare)} ms")
        ratio = statistics.median(row / first for row, first in zip(rows, contentful, strict=True))
        show("  first contentful paint", f"{spread(contentful)} ms", f"{name}, row to it: {ratio:.2f}")
        show(
            "  over the wire",
            f"{sum(weight.values()) / 1000:.1f} kB",
            f"of it data {data / 1000:.1f} kB, {len(weight)} requests",
        )

    def pools(self) -> None:
        with self.page() as page:
            self.open(page, "#/pools")
            page.evaluate(FRAMES)
            page.wait_for_timeout(3000)
            idle = page.evaluate("() => window.stopFrames()")
            scroller = page.locator("main .table-scroll")
            box = scroller.bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + 200, box["y"] + 200)
            page.evaluate(FRAMES)
            most = 0
            for step in range(120):
                page.mouse.wheel(0, 200)
                page.wait_for_timeout(16)
                if step % 20 == 0:
                    most = max(most, page.locator("main .table tbody tr").count())
            page.wait_for_timeout(300)
            gaps = page.evaluate("() => window.stopFrames()")
            place = page.evaluate("() => document.querySelector('main .table-scroll').scrollTop")
            show("scrolled by the wheel", f"{place:.0f} px", f"{most} rows in the page at most")
            show("  time between frames", describe_gaps(gaps), f"standing still: {describe_gaps(idle)}")
            for name, selector, what in (
                ("sort by usage", "th:nth-child(5) button.sort", "click"),
                ("sort by name", "th:nth-child(1) button.sort", "click"),
                ("find one", "input[type=search]", "part-1987"),
                ("find all again", "input[type=search]", ""),
            ):
                took = [page.evaluate(ACT, [f"main {selector}", what]) for _ in range(3)]
                show(
                    name,
                    f"{spread([each[1] for each in took])} ms to its paint",
                    f"{spread([each[0] for each in took])} ms of it computed",
                )

    def operations(self) -> None:
        for name, query in (
            ("first part", ""),
            ("found by a title", "?search=Batch%2001234"),
            ("a user's", "?search=user-17"),
            ("sorted by usage", "?sort=usage"),
            ("the last part", "?offset=19950"),
        ):
            times = []
            for _ in range(self.arguments.rounds):
                begun = time.perf_counter()
                self.scheduler.get(f"operations{query}{'&' if query else '?'}limit=50")
                times.append(1000 * (time.perf_counter() - begun))
            show(f"operations, {name}: the answer", f"{spread(times)} ms", "")

    def memory(self) -> None:
        """Of the page of pools, through many answers: the scheduler makes a new table with each update."""
        with self.page() as page:
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable")
            self.open(page, "#/pools")
            wire = Wire(session)

            def read() -> dict[str, float]:
                session.send("HeapProfiler.collectGarbage")
                metrics = session.send("Performance.getMetrics")["metrics"]
                return {each["name"]: each["value"] for each in metrics}

            page.wait_for_timeout(4000)
            first = read()
            page.wait_for_timeout(2000 * self.arguments.polls / 2)
            middle = read()
            page.wait_for_timeout(2000 * self.arguments.polls / 2)
            last = read()
            mib = [f"{each['JSHeapUsedSize'] / 2**20:.2f}" for each in (first, middle, last)]
            nodes = [f"{each['Nodes']:.0f}" for each in (first, middle, last)]
            listeners = [f"{each['JSEventListeners']:.0f}" for each in (first, middle, last)]
            show(
                f"heap of the page, begin, middle, end of {self.arguments.polls} polls", f"{', '.join(mib)} MiB",
                f"elements {', '.join(nodes)}; listeners {', '.join(listeners)}",
            )  # fmt: skip
            span = last["Timestamp"] - first["Timestamp"]
            busy = (last["TaskDuration"] - first["TaskDuration"]) / span
            show("  the page itself", f"{100 * busy:.1f} % of a core", f"{wire.total / span / 1000:.1f} kB/s")

    def viewers(self) -> None:
        """What the scheduler pays for pages that look at it."""
        alone = self.load(10.0)
        with contextlib.ExitStack() as opened:
            for _ in range(self.arguments.viewers):
                self.open(opened.enter_context(self.page()), "#/pools")
            viewed = self.load(10.0)
        for name, load in (("nobody looks", alone), (f"{self.arguments.viewers} pages of pools", viewed)):
            show(
                f"scheduler, {name}",
                f"{100 * load['cpu']:.1f} % of a core",
                f"{load['updates']:.2f} updates/s; heartbeats p50 {load['p50']:.1f}, p95 {load['p95']:.1f} ms",
            )

    def load(self, seconds: float) -> dict[str, float]:
        """CPU, updates and the time of heartbeats meanwhile."""
        times: list[float] = []
        stop = threading.Event()

        def beat() -> None:
            with self.scheduler.new_client() as client:
                while not stop.is_set():
                    for one in self.beats[:20]:
                        begun = time.perf_counter()
                        web_scale.send_beat(client, one)
                        times.append(1000 * (time.perf_counter() - begun))
                        stop.wait(0.02)

        before, cpu, began = self.updates(), cpu_seconds(self.scheduler.pid), time.perf_counter()
        thread = threading.Thread(target=beat)
        thread.start()
        # Playwright's pages need this thread only for what they ask of it.
        stop.wait(seconds)
        stop.set()
        thread.join()
        took = time.perf_counter() - began
        times.sort()
        return {
            "cpu": (cpu_seconds(self.scheduler.pid) - cpu) / took, "updates": (self.updates() - before) / took,
            "p50": times[len(times) // 2], "p95": times[len(times) * 95 // 100],
        }  # fmt: skip

    def updates(self) -> float:
        return float(self.scheduler.get("status")["timings"]["updates"])

    def run(self) -> None:
        arguments = self.arguments
        with self.scheduler.new_client() as client:
            begun = time.perf_counter()
            self.beats: list[dict[str, Any]] = web_scale.play_nodes(client, arguments.nodes)
            jobs = sum(len(beat["jobs"]) for beat in self.beats)
            show("nodes and jobs", f"{len(self.beats)} and {jobs}", f"{time.perf_counter() - begun:.1f} s to make")
        self.scheduler.wait_updates(2)
        wanted = arguments.only or ["paint", "pools", "operations", "viewers", "memory"]
        if "paint" in wanted:
            for where, name in (("#/pools", "pools"), ("#/operations", "operations"), ("#/nodes", "nodes")):
                self.first_paint(where, name)
        for name in ("pools", "operations", "viewers", "memory"):
            if name in wanted:
                getattr(self, name)()
        found = re.search(
            r"cpumond_scheduler_update_seconds_total ([\d.e+-]+)", self.scheduler.client.get("/metrics").text
        )
        assert found is not None
        show(
            "time of an update",
            f"{1000 * float(found[1]) / self.updates():.0f} ms",
            f"scheduler's memory {memory_mib(self.scheduler.pid):.0f} MiB",
        )


def show(name: str, value: str, more: str) -> None:
    print(f"{name:<52} {value:<40} {more}", flush=True)


def spread(values: list[float]) -> str:
    """Median, and all of them from the least to the most."""
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def describe_gaps(gaps: list[float]) -> str:
    ordered = sorted(gaps)
    return (
        f"p50 {ordered[len(ordered) // 2]:.0f}, p95 {ordered[len(ordered) * 95 // 100]:.0f}, most {ordered[-1]:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=web_scale.POOLS)
    parser.add_argument("--operations", type=int, default=web_scale.OPERATIONS)
    parser.add_argument("--nodes", type=int, default=web_scale.NODES)
    parser.add_argument("--polls", type=int, default=60)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=["paint", "pools", "operations", "viewers", "memory"])
    arguments = parser.parse_args()
    program = find_program()
    if program is None:
        raise SystemExit("needs Chromium (apt-get install --no-install-recommends chromium-headless-shell)")
    with tempfile.TemporaryDirectory() as folder:
        scheduler = SchedulerProcess(Path(folder))
        begun = time.perf_counter()
        web_scale.fill_store(scheduler.state_dir, arguments.pools, arguments.operations)
        scheduler.write_config(web_scale.CONFIG, api="rate_limit = 0", period="1s")
        try:
            scheduler.start()
            show(
                "pools and operations",
                f"{arguments.pools} and {arguments.operations}",
                f"{time.perf_counter() - begun:.1f} s to make",
            )
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
                try:
                    Bench(scheduler, browser, arguments).run()
                finally:
                    browser.close()
        finally:
            scheduler.close()


if __name__ == "__main__":
    main()
