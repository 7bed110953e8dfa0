"""Pictures of the pages of the scheduler's and the agent's web page, for ``docs/web.md``.

Starts a cluster of real agents with operations that come, shrink, wake up, wait and are preempted, lets it run for some
minutes and takes each page on a desk and on a telephone, some on a wide screen, too.

    python tests/screenshots.py docs/screenshots [--overview FILE] [--minutes 3]

--overview is one of the overview with its graph, for README. ``python tests/pictures.py overview`` runs it.
Needs root, real cgroups, Chromium and the Python package playwright.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parent / "integration"))

from browser import ARGUMENTS, find_program
from closed_loop import WAIT_S, Loop
from playwright.sync_api import sync_playwright
from small_png import shrink
from web_site import QUICK, Site, open_page

from cpumond.host.cgroup.mounts import open_hierarchies

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LOOKS = ((1280, 800, "light"), (1920, 1080, "dark"), (390, 844, "dark"))
WIDE = ("overview", "pools", "pool", "job")
"""Those that are taken in 1920x1080, too."""
WAVES = """while :; do
  if [ $(( $(date +%s) / PERIOD % 2 )) = 0 ]; then n=0; while [ $n -lt 30000 ]; do n=$((n+1)); done; else sleep 0.2; fi
done"""
"""Works for some seconds, then waits as long, again and again."""

CONFIG = 'node_heartbeat_timeout = "5s"\n[history]\nperiod = "1s"\n'


def waves(period_s: int) -> str:
    return WAVES.replace("PERIOD", str(period_s))


class Stage:
    def __init__(self, cluster: Loop, minutes: float) -> None:
        self.cluster = cluster
        self.minutes = minutes
        self.ids: dict[str, str] = {}

    def set_up(self) -> None:
        """Pools, operations, a node that falls silent, and time for the graphs."""
        c, ids = self.cluster, self.ids
        begun = time.monotonic()
        c.create_pool("research", weight=2.0, strong_guarantee_resources={"cpu": 1.0})
        c.create_pool("models", "research", weight=3.0)
        c.create_pool("evaluation", "research")
        c.create_pool("nightly", mode="fifo", max_running_operation_count=1)
        burst = {"guarantee_type": "burst", "resource_flow": {"cpu": 0.3}, "burst_guarantee_resources": {"cpu": 1.0}}
        c.create_pool("analytics", integral_guarantees=burst)
        c.create_pool("backfill", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 0.5}})
        c.create_pool("reports")
        wave = waves(25)
        ids["waves"] = c.start_operation(
            "models", wave, 2, cpu_limit=0.4, monitor=QUICK, title="Training with pauses", alias="*train"
        )
        ids["first"] = c.start_operation("nightly", "sleep 100000", cpu_limit=0.2, title="Index of the day")
        ids["waiting"] = c.start_operation("nightly", "sleep 100000", cpu_limit=0.2, title="Clean-up")
        ids["done"] = c.start_operation("evaluation", "true", cpu_limit=0.2, title="Smoke test")
        broken = "echo no such table >&2; exit 3"
        ids["broken"] = c.start_operation("reports", broken, cpu_limit=0.2, title="Sales", max_failed_job_count=1)
        ids["greedy"] = c.start_operation("evaluation", waves(40), 6, cpu_limit=0.2, title="Compare all models")
        c.await_running(ids["waves"], 2)
        c.await_state(ids["done"], "completed")
        c.await_state(ids["broken"], "failed")
        self._wait_until(begun, 0.25)
        # Spends what it saved, twice, and takes the CPU of others for it.
        ids["spender"] = c.start_operation("analytics", waves(15), 3, cpu_limit=0.2, title="Questions of the morning")
        self._wait_until(begun, 0.5)
        limits = {"edits": [{"path": ["resource_limits"], "value": {"cpu": 0.6}}]}
        Site(c).ask("PATCH", "/api/v1/trees/default/pools/evaluation", limits)
        c.wait(lambda: c.get("/api/v1/preemptions")["preemptions"], "a job is preempted", WAIT_S)
        c.abort(ids["spender"])
        self._wait_until(begun, 0.75)
        ids["spender"] = c.start_operation("analytics", waves(15), 2, cpu_limit=0.2, title="Questions of the evening")
        self._wait_until(begun, 0.9)
        places = [job["node_id"] for job in c.jobs(ids["waves"], "running")]
        self.silent = min(c.nodes, key=lambda node: places.count(node.node_id))
        self.silent.kill()
        self._wait_until(begun, 1.0)

    def _wait_until(self, begun: float, part: float) -> None:
        time.sleep(max(begun + 60 * self.minutes * part - time.monotonic(), 0.0))

    def pages(self) -> dict[str, tuple[str, str]]:
        """Name of the picture -> address of the server, and what stands after the #."""
        c = self.cluster
        url, where = f"{c.url}/", f"#/operations/{self.ids['waves']}"
        living = {node.node_id: node for node in c.nodes if node is not self.silent}
        job = next(job for job in c.jobs(self.ids["waves"], "running") if job["node_id"] in living)
        agent = living[job["node_id"]].web_url
        scheduler = {
            "overview": "#/", "pools": "#/pools", "pool": "#/pools/default/analytics",
            "operations": "#/operations", "operation": where, "operation-why": f"{where}?tab=why",
            "operation-jobs": f"{where}?tab=jobs",
            "operation-specification": f"{where}?tab=specification",
            "job": f"{where}/jobs/{job['id']}", "nodes": "#/nodes", "node": f"#/nodes/{job['node_id']}",
            "preemptions": "#/preemptions", "events": "#/events",
        }  # fmt: skip
        return {
            **{name: (url, place) for name, place in scheduler.items()},
            "agent-jobs": (agent, "#/"),
            "agent-job": (agent, f"#/jobs/{quote(job['id'], safe='')}"),
        }


def take(browser: Browser, pages: dict[str, tuple[str, str]], docs: Path) -> None:
    for width, height, scheme in LOOKS:
        page = open_window(browser, width, height, scheme)

        def keep(name: str, page: Page = page, look: str = f"{width}x{height}-{scheme}") -> None:
            (docs / f"{name}-{look}.png").write_bytes(shrink(page.screenshot()))

        for name, (url, where) in pages.items():
            if width < 1920 or name in WIDE:
                open_page(page, url, where)
                page.wait_for_timeout(700)  # graphs are drawn when their points are there
                keep(name)
        if width < 1920:
            open_page(page, *pages["pools"])
            plan_a_pool(page)
            keep("new-pool")
        page.context.close()


def open_window(browser: Browser, width: int, height: int, scheme: Any) -> Page:
    size: Any = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    context.set_default_timeout(30_000)
    return context.new_page()


def take_overview(browser: Browser, pages: dict[str, tuple[str, str]], file: Path) -> None:
    page = open_window(browser, 1280, 1060, "light")
    open_page(page, *pages["overview"])
    page.wait_for_timeout(700)
    file.write_bytes(shrink(page.screenshot()))


def plan_a_pool(page: Page) -> None:
    """The form of a new pool with the plan of what it changes."""
    page.get_by_role("button", name="New pool").click()
    page.locator("input[name=name]").fill("forecasts")
    page.locator("input[name=weight]").fill("3")
    page.locator("input[name='strong_guarantee_resources/cpu']").fill("0.5")
    page.get_by_role("button", name="Show what it changes").click()
    page.locator("dialog button.primary:not([disabled])").wait_for()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("docs", type=Path)
    parser.add_argument("--overview", type=Path, help="the picture for README")
    parser.add_argument("--minutes", type=float, default=3.0, help="that the cluster runs before the first picture")
    arguments = parser.parse_args()
    arguments.docs.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"cpu": 1.0, "memory": 4 * 2**30, "web": True, "scheduler_config": CONFIG}
    with tempfile.TemporaryDirectory() as folder, Loop(Path(folder), open_hierarchies(), 3, **options) as cluster:
        stage = Stage(cluster, arguments.minutes)
        cluster.set_weight(1)
        stage.set_up()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_program(), args=list(ARGUMENTS))
            if arguments.overview:
                take_overview(browser, stage.pages(), arguments.overview)
            take(browser, stage.pages(), arguments.docs)
            browser.close()
    print(f"{arguments.docs}: {sum(file.stat().st_size for file in arguments.docs.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
