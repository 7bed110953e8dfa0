"""Much at a glance: bars, trends and columns of pools, operations and preemptions by their cause, the map of nodes, the
own work. A scheduler with 1000 pools and 10 000 operations, nodes whose heartbeats the test plays, a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
import web_scale
from scheduler_process import SchedulerProcess
from test_web_axe import checked, look  # noqa: F401 - a fixture
from waiting import wait_until
from web_site import await_page, expect, open_page, tab_to

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

POOLS, OPERATIONS, NODES = 1000, 10_000, 12
TELEPHONE = {"width": 390, "height": 844}
DESK = {"width": 1440, "height": 900}
OVERFLOW = """() => [...document.querySelectorAll('main .table-scroll'), document.documentElement]
  .map((each) => each.scrollWidth - each.clientWidth).filter((more) => more > 0)"""
"""Pixels of tables, and of the page, that one has to scroll to from left to right."""


class World:
    def __init__(self, scheduler: SchedulerProcess, client: httpx2.Client) -> None:
        self.scheduler = scheduler
        self.client = client
        self.beats: list[dict[str, Any]] = []
        self.ids: dict[str, str] = {}

    def furnish(self) -> None:
        """Operations that wait for different things, and a preemption."""
        s = self.scheduler
        s.create_pool("queue", max_running_operation_count=1)
        s.create_pool("narrow")
        s.create_pool("wide", strong_guarantee_resources={"cpu": 5.0})
        self.ids = {
            title: s.start_operation(pool, count, title=title)
            for title, pool, count in (
                ("First", "queue", 1), ("Second", "queue", 1), ("Third", "queue", 2), ("Cut short", "narrow", 3),
                ("Far too much", "wide", 500),
            )
        }  # fmt: skip
        self.beats = web_scale.play_nodes(self.client, NODES, lambda number: [f"rack-{number % 3}"])
        s.patch("trees/default/pools/narrow", {"edits": [{"path": ["resource_limits"], "value": {"cpu": 2.0}}]})
        wait_until(self._is_preempted, "a job is preempted")

    def _is_preempted(self) -> bool:
        for beat in self.beats:
            web_scale.send_beat(self.client, beat)
        return bool(self.scheduler.get("preemptions")["preemptions"])

    def open(self, page: Page, where: str) -> None:
        open_page(page, f"{self.scheduler.url}/", where)

    def pool(self, name: str) -> dict[str, Any]:
        table = self.scheduler.get("trees/default/pool_table")
        return next(
            row for values in table["rows"] if (row := dict(zip(table["columns"], values, strict=True)))["name"] == name
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    scheduler = SchedulerProcess(tmp_path_factory.mktemp("glance"))
    web_scale.fill_store(scheduler.state_dir, POOLS, OPERATIONS)
    scheduler.write_config(f'{web_scale.CONFIG}[history]\nperiod = "200ms"\n', api="rate_limit = 0", period="1s")
    try:
        scheduler.start()
        with scheduler.new_client() as client:
            world = World(scheduler, client)
            world.furnish()
            scheduler.wait_updates(2)
            yield world
    finally:
        scheduler.close()


@pytest.fixture
def desk(new_page: Callable[..., Page]) -> Page:
    return new_page(viewport=DESK)


def row_of(page: Page, name: str) -> Any:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def test_a_pool_is_one_bar_whose_numbers_are_told_in_cores_or_percent(desk, world):
    page = desk
    world.open(page, "#/pools?find=wide")
    pool = world.pool("wide")
    # More is guaranteed than there is.
    assert (0.0 < pool["guarantee_cores"] < 5.0, pool["demand_cores"]) == (True, 500.0)
    bar = row_of(page, "wide").get_by_role("button", name="CPU of wide")
    tab_to(page, bar)
    told = f"demanded 500, waiting 0, reclaimed 0, guarantee {pool['guarantee_cores']:.3g}, "
    expect(page.locator(".tip")).to_contain_text(told)
    assert told in bar.get_attribute("aria-description")
    for part in ("wants", "guarantee", "fair", "cut"):
        expect(bar.locator(f".{part}")).to_have_count(1)
    expect(bar.locator(".waits")).to_have_count(0)
    page.get_by_role("button", name="Percent", exact=True).click()
    page.reload()
    await_page(page)
    total = NODES * web_scale.NODE_CORES
    expect(bar).to_contain_text(f" / {100 * 500 / total:.1f} %")
    expect(page.get_by_role("button", name="Percent", exact=True)).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Cores", exact=True).click()
    expect(bar).to_contain_text(" / 500.0")
    page.get_by_role("searchbox", name="Find a pool").fill("team-0000")
    for part in ("used", "has"):
        expect(page.get_by_role("button", name="CPU of team-0000").locator(f".{part}")).to_have_count(1)
    # Of operations that do not run nothing is demanded yet.
    page.get_by_role("searchbox", name="Find a pool").fill("queue")
    expect(page.get_by_role("button", name="CPU of queue")).to_have_attribute(
        "aria-description", re.compile("demanded 1, waiting 3,")
    )
    expect(page.get_by_role("button", name="CPU of queue").locator(".waits")).to_have_count(1)


def test_columns_are_chosen_with_the_keyboard_and_all_fit(new_page, world):
    for window in (DESK, TELEPHONE):
        page = new_page(viewport=window)
        world.open(page, "#/pools")
        assert page.evaluate(OVERFLOW) == []
        heads = page.locator("main thead th")
        usual = heads.all_inner_texts()
        menu = page.locator("details.menu summary")
        tab_to(page, menu)
        page.keyboard.press("Enter")
        tab_to(page, page.get_by_role("checkbox", name="Starving", exact=True))
        page.keyboard.press("Space")
        expect(heads.filter(has_text="Starving")).to_have_count(1)
        page.keyboard.press("Escape")
        expect(menu).to_be_focused()
        expect(page.get_by_role("checkbox", name="Starving")).to_have_count(0)
        page.reload()
        await_page(page)
        expect(heads.filter(has_text="Starving")).to_have_count(1)
        menu.click()
        page.get_by_role("button", name="Reset").click()
        expect(heads).to_have_text(usual)


def test_nodes_and_agents_fit_a_telephone(new_page, world):
    page = new_page(viewport=TELEPHONE)
    for where, heads in (("#/nodes", ["Node ↑", "State", "Used"]), ("#/fleet", ["Node ↑", "State", "Level"])):
        world.open(page, where)
        table = page.locator("main .table").filter(has=page.get_by_role("searchbox"))
        expect(table.get_by_role("columnheader")).to_have_text(heads)
        assert table.locator(".table-scroll").evaluate("each => each.scrollWidth - each.clientWidth") == 0
        table.get_by_text("Columns", exact=True).click()
        page.get_by_role("checkbox", name="Tags", exact=True).check()
        expect(table.get_by_role("columnheader")).to_have_count(4)
        page.get_by_role("button", name="Reset").click()


def test_a_pool_of_which_nothing_is_known_may_have_any_name(desk, world):
    world.scheduler.create_pool("constructor")
    page = desk
    page.route(
        "**/trends?**", lambda route: route.fulfill(json={"tree": "default", "since": 0, "step_s": 1, "pools": {}})
    )
    with page.expect_response(lambda answer: "/trends?" in answer.url):
        world.open(page, "#/pools?find=constructor")
    page.evaluate("() => new Promise((done) => { requestAnimationFrame(() => requestAnimationFrame(done)); })")
    expect(row_of(page, "constructor")).to_be_visible()


def test_trends_of_the_rows_in_view_are_one_request(desk, world):
    page, asked = desk, list[list[str]]()

    def take(request: Any) -> None:
        if "/trends?" in request.url:
            asked.append(parse_qs(urlsplit(request.url).query)["pools"][0].split("\n"))

    page.on("request", take)
    world.open(page, "#/pools")
    root = row_of(page, "<Root>")
    expect(root.locator("polyline")).to_have_count(1)
    expect(root).to_contain_text(re.compile(r"(rose|fell|stayed) .*cores in .*, at most "))
    assert 10 < len(asked[0]) < 100
    page.locator("main .table-scroll").press("End")
    expect(row_of(page, "wide").locator("polyline")).to_have_count(1)
    assert "wide" in asked[1]
    assert not set(asked[0]) & set(asked[1])
    assert len(asked) == 2
    values = world.scheduler.get("trees/default/trends?pools=wide%0Anobody&since_s=600&count=5")
    assert list(values["pools"]) == ["wide"]
    assert values["pools"]["wide"][-1] == pytest.approx(world.pool("wide")["limit_cores"])
    refused = world.scheduler.request("GET", "trees/default/trends?pools=" + "%0A".join(map(str, range(201))))
    assert (refused.status_code, "at most 200" in refused.text) == (422, True)


def test_operations_are_one_line_for_each_cause(desk, world):
    page = desk
    world.open(page, "#/operations")
    groups = world.scheduler.get("operation_groups")["groups"]
    lines = page.get_by_role("list", name="Operations by what they wait for")
    expect(lines.get_by_role("button")).to_have_count(len(groups))
    full = next(group for group in groups if group["cause"] == "pool_full:queue")
    assert (full["operations"], full["jobs"], full["wanted_cores"]) == (2, 3, 3.0)
    line = lines.get_by_role("button").filter(has_text="pool queue is full")
    expect(line).to_contain_text("3 jobs to start, 3 cores")
    assert line.bounding_box()["height"] < 40
    tab_to(page, line)
    page.keyboard.press("Enter")
    expect(line).to_have_attribute("aria-expanded", "true")
    body = lines.get_by_role("listitem").filter(has_text="pool queue is full")
    expect(body.get_by_role("link", name="Second", exact=True)).to_have_attribute(
        "href", f"#/operations/{world.ids['Second']}"
    )
    expect(body.get_by_role("link", name="queue", exact=True)).to_have_count(2)
    assert world.ids["Second"] not in body.inner_text()
    body.get_by_role("button", name="Show only these in the list below").click()
    expect(page.locator("main").get_by_text("2 matching operations", exact=True)).to_be_visible()
    line.click()
    expect(line).to_have_attribute("aria-expanded", "false")
    expect(body.get_by_role("table")).to_have_count(0)
    listed = world.scheduler.get("operations?cause=pool_full:queue")["operations"]
    assert {each["title"] for each in listed} == {"Second", "Third"}
    assert {part["cause"] for each in listed for part in each["trees"].values()} == {"pool_full:queue"}
    assert sum(group["operations"] for group in groups) == world.scheduler.get("operations")["total"]


def test_the_own_work_says_what_holds_it(new_page, world):
    page = new_page(viewport=TELEPHONE)
    world.open(page, "#/")
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("link", name="My work", exact=True).click()
    expect(page.get_by_role("region", name="Your operations that run or wait").get_by_role("row")).to_have_count(5)
    for title, why in (
        ("Second", "pool queue is full"), ("Third", "number 2 in the queue"), ("First", "nothing"),
        ("Cut short", "resource limits of pool narrow"), ("Far too much", "for room on a node"),
    ):  # fmt: skip
        if title == "Far too much":
            expect(row_of(page, title)).to_contain_text(
                re.compile("free resources on a node|is allocated its fair share")
            )
        else:
            expect(row_of(page, title)).to_contain_text(why)
    assert page.evaluate(OVERFLOW) == []
    row_of(page, "Second").get_by_role("link", name=re.compile("pool queue is full")).click()
    expect(page).to_have_url(re.compile(f"{world.ids['Second']}.tab=why"))


def test_preemptions_are_one_line_for_each_cause(desk, world):
    page = desk
    world.open(page, "#/preemptions")
    [group] = world.scheduler.get("preemption_groups")["groups"]
    assert (group["kind"], group["pools"], group["operations"]) == ("limit_violated", ["narrow"], 1)
    line = page.get_by_role("list", name="Preemptions by cause").get_by_role("button")
    expect(line).to_contain_text(f"{group['count']} over a limit: 1 operation in narrow lost jobs")
    expect(line).to_contain_text(re.compile("core-hours lost"))
    tab_to(page, line)
    page.keyboard.press("Enter")
    inside = page.get_by_role("region", name=re.compile("^Preemptions: over a limit"))
    expect(inside.get_by_role("link", name="Cut short", exact=True)).to_have_count(group["count"])
    assert world.ids["Cut short"] not in inside.inner_text()
    assert world.scheduler.get("preemptions?group=preempted//default/wide")["preemptions"] == []


def test_nodes_are_a_map_by_keyboard_and_pointer(desk, world):
    page = desk
    world.open(page, "#/nodes")
    board = page.get_by_role("application", name=re.compile("^Nodes"))
    assert board.locator("*").count() < 5  # one drawing for all nodes
    told = page.locator(".heat-line")
    tab_to(page, board)
    expect(told).to_have_text(re.compile(r"^node-000 · used [\d.]+ of 20 cores, [\d.]+ % · \d+ jobs$"))
    page.keyboard.press("ArrowRight")
    expect(told).to_have_text(re.compile("^node-001 "))
    expect(page.locator(".heat > [role=status]")).to_have_text(re.compile("^node-001 "))
    page.get_by_role("button", name="Requested", exact=True).first.click()
    page.get_by_role("combobox", name="Group the nodes by").select_option("tag rack")
    board.focus()
    page.keyboard.press("Home")
    expect(told).to_have_text(re.compile(r"^node-000 · requested [\d.]+ of 20 cores.* · rack-0$"))
    page.keyboard.press("ArrowDown")
    expect(told).to_have_text(re.compile("^node-009 .* rack-0$"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("node-009")
    page.go_back()
    await_page(page)
    board.click(position={"x": 60, "y": 30})
    expect(page.get_by_role("heading", level=1)).to_contain_text("node-003")


@pytest.mark.parametrize("where", ["#/pools", "#/operations", "#/preemptions"])
def test_nothing_that_is_unfolded_is_cut_or_keeps_anybody_out(checked, world, where):  # noqa: F811
    world.open(checked, where)
    if where == "#/pools":
        checked.locator("details.menu summary").click()
    else:
        checked.locator("button.fold-line").first.click()
        expect(checked.locator(".fold-body table").first).to_be_visible()
    assert look(checked, where) == []
