"""The web pages while what they show is not there: they say so, with the time, and go on by themselves."""

import re
import signal
from collections.abc import Iterator

import pytest
from web_site import Site, await_page, expect, run_site

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = [pytest.mark.browser, pytest.mark.cgroup]

WHILE_IT_IS_DOWN = "net::ERR_(CONNECTION|EMPTY|SOCKET|INCOMPLETE|INVALID_HTTP|NETWORK)"
SOON_MS = 15_000
"""It says so within ten seconds; the rest is for a busy machine."""
BACK_MS = 30_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    with run_site(tmp_path_factory.mktemp("site"), hierarchies, nodes=1) as site:
        site.cluster.create_pool("p")
        site.cluster.create_pool("i", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 0.5}})
        site.operations["moving"] = site.cluster.start_operation("p", "sleep 1000", cpu_limit=0.5, title="sleeper")
        [site.job] = site.cluster.await_running(site.operations["moving"])
        yield site


def mark(page) -> None:
    """What is gone when the page is loaded anew."""
    page.evaluate("window.isTheSame = true")


def check_stale(page) -> None:
    expect(page.locator("header .live")).to_have_text("stale", timeout=SOON_MS)
    expect(page.get_by_role("status").filter(has_text="this page is out of date")).to_have_text(
        re.compile(
            r"No answer since \d\d:\d\d:\d\d \(\d+(\.\d+)? s\): this page is out of date; the server does not answer\."
        )
    )
    assert page.locator("h1").count() == 1  # what was there stays


def check_live(page) -> None:
    expect(page.locator("header .live")).to_have_text("live", timeout=BACK_MS)
    expect(page.locator(".stale")).to_have_count(0)
    assert page.evaluate("window.isTheSame") is True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_scheduler_that_is_started_again_is_shown_without_loading_anew(new_page, site, number):
    pages = {where: new_page() for where in ("#/pools", "#/pools/default/i", "#/")}
    for where, page in pages.items():
        page.allow(WHILE_IT_IS_DOWN, "status: 50[34] ")
        site.open(page, where)
        mark(page)
    graph = pages["#/pools/default/i"].get_by_role("region", name="Accumulated volume")
    number_now = graph.get_by_role("row").filter(has_text="volume").get_by_role("cell").first
    expect(number_now).not_to_have_text("\u2013", timeout=SOON_MS)
    last_before = site.cluster.get("/api/v1/history?kind=pool&tree=default&name=i&since_s=60")["times"][-1]
    site.cluster.scheduler.stop(number)
    for page in pages.values():
        check_stale(page)
    site.cluster.scheduler.start()
    name = f"new-{number.name.lower()}"
    site.cluster.create_pool(name)
    for page in pages.values():
        check_live(page)
    expect(pages["#/pools"].get_by_role("link", name=name, exact=True)).to_be_visible(timeout=SOON_MS)
    # The graph goes on after the gap, with what was there before.
    expect(number_now).not_to_have_text(number_now.inner_text(), timeout=BACK_MS)
    times = site.cluster.get("/api/v1/history?kind=pool&tree=default&name=i&since_s=600")["times"]
    assert times[0] < last_before < times[-1]
    expect(pages["#/"].locator("main")).to_contain_text("1 of 1", timeout=BACK_MS)


def test_a_page_opened_while_the_scheduler_is_gone_heals_too(page, site):
    page.allow(WHILE_IT_IS_DOWN, "status: 50[34] ")
    site.open(page, "#/pools")
    mark(page)
    site.cluster.scheduler.stop()
    page.goto(f"{site.cluster.url}/#/nodes")  # without loading anew: only what stands after the # is another
    expect(page.get_by_role("alert")).to_contain_text("this page tries again by itself", timeout=SOON_MS)
    site.cluster.scheduler.start()
    expect(page.get_by_role("heading", level=1)).to_have_text("Nodes", timeout=BACK_MS)
    check_live(page)


@pytest.mark.parametrize("kill", [False, True])
def test_an_agent_that_is_started_again_is_shown_without_loading_anew(new_page, site, kill):
    [node] = site.cluster.nodes
    agent, job = new_page(), new_page()
    for page in (agent, job):
        page.allow(WHILE_IT_IS_DOWN, "status: (404|503|504) ")
    agent.goto(node.web_url)
    await_page(agent)
    site.open(job, site.job_address())
    mark(agent)
    if kill:
        node.kill()
    else:
        assert node.stop() == 0
    check_stale(agent)
    # The scheduler is there, and says that the node is not.
    expect(job.get_by_role("status").filter(has_text="agent's response of")).to_be_visible(timeout=SOON_MS)
    expect(job.locator("header .live")).to_have_text("live")
    node.start()
    check_live(agent)
    expect(agent.get_by_role("link", name=site.job["id"], exact=True)).to_be_visible(timeout=BACK_MS)
    expect(job.get_by_role("status").filter(has_text="agent's response of")).to_have_count(0, timeout=BACK_MS)
