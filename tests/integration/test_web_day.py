"""Pages open all day: tabs, filters, late and cut answers, equal rows, odd times, paper and forced colours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from web_site import await_page, expect, show

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.browser

FIRST_CHART = "document.querySelector('.chart')"


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    with SchedulerProcess(tmp_path_factory.mktemp("day")) as process:
        process.write_config('node_heartbeat_timeout = "1h"\n[history]\nperiod = "100ms"\n')
        process.start()
        process.create_pool("p")
        process.create_pool("queue", max_running_operation_count=1, max_operation_count=300)
        process.patch("trees/default", {"edits": [{"path": ["nodes_filter"], "value": "!gpu"}]})
        process.post("trees", {"name": "gpu", "attributes": {"nodes_filter": "gpu"}})
        for node in (PlayedNode(process, "n1"), PlayedNode(process, "g1", tags=["gpu"])):
            node.register()
        yield process


@pytest.fixture
def start(scheduler: SchedulerProcess) -> Iterator[Callable[[str], str]]:
    """Starts operations in the pool ``queue``, where one runs at a time; they end with the test."""
    started: list[str] = []

    def begin(title: str) -> str:
        started.append(scheduler.start_operation("queue", title=title))
        return started[-1]

    yield begin
    for each in started:
        scheduler.post(f"operations/{each}/abort", {})


def test_what_is_typed_into_filters_counts_at_once_and_on_its_page_alone(page, scheduler):
    show(page, scheduler, "#/operations")
    page.get_by_label("Pool", exact=True).focus()
    page.keyboard.type("models")
    page.keyboard.press("Tab")
    page.keyboard.type("alice")
    expect(page).to_have_url(re.compile("user=alice"))
    assert "pool=models" in page.url
    expect(page.get_by_label("Pool", exact=True)).to_have_value("models")
    page.get_by_label("User", exact=True).fill("bob")
    page.evaluate("location.hash = '#/nodes'")
    await_page(page, "#/nodes")
    page.wait_for_timeout(500)  # longer than typing is waited for
    assert page.url.endswith("#/nodes")


def test_what_is_chosen_in_one_tab_is_chosen_in_the_others(page, scheduler):
    show(page, scheduler, "#/pools")
    other = page.context.new_page()
    show(other, scheduler, "#/pools")
    other.get_by_role("button", name="Theme: auto").click()
    other.get_by_role("button", name="Theme: light").click()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    other.get_by_role("button", name="Percent", exact=True).click()
    expect(page.get_by_role("button", name="Percent", exact=True)).to_have_attribute("aria-pressed", "true")


def test_a_graph_whose_selection_is_left_goes_on(page, scheduler):
    show(page, scheduler, "#/pools/default/p")
    place = page.locator(".chart-plot").first
    page.wait_for_function(f"{FIRST_CHART}.plot?.data[0].length > 3")
    place.hover()
    place.focus()
    for key in ("End", "Shift+ArrowLeft", "Shift+ArrowLeft", "Tab", "Tab"):
        page.keyboard.press(key)
    last = page.evaluate(f"{FIRST_CHART}.plot.data[0].at(-1)")
    page.wait_for_function(f"last => {FIRST_CHART}.plot.data[0].at(-1) > last", arg=last)


@pytest.mark.parametrize(
    ("where", "heading"),
    [
        *(
            (f"#/pools/default/p?{query}", "p")
            for query in ("from=99999999999999&to=999999999999999", "from=5&to=1", "from=1e400", "range=__proto__")
        ),
        ("#/pools?sort=nothing&desc=7&closed=%FF&find=%", "Pools"),
        ("#/operations?offset=-3x", "Operations"),
        ("#/nodes?sort=<b>", "Nodes"),
        ("#/operations/{operation}?tab=none&range=never", "odd"),
    ],
)  # fmt: skip
def test_nonsense_behind_the_question_mark_breaks_no_page(page, scheduler, start, where, heading):
    page.goto(f"{scheduler.url}/{where.replace('{operation}', start('odd'))}")
    await_page(page)
    expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    assert page.locator("main [role=alert]").count() == 0


def test_an_answer_that_is_cut_off_is_said_and_asked_for_again(page, scheduler):
    page.route("**/api/v1/operations?**", lambda route: route.fulfill(body='{"operations": ['))
    page.goto(f"{scheduler.url}/#/operations")
    expect(page.locator("main [role=alert]")).to_have_text(
        "the server's response is truncated or not JSON; this page tries again by itself"
    )
    page.unroute_all()
    expect(page.get_by_role("table", name="Operations")).to_be_visible()


def test_the_nodes_of_a_tree_are_those_of_its_link(page, scheduler):
    show(page, scheduler, "#/")
    page.get_by_role("region", name="Tree gpu").get_by_role("link", name="1 of 1 node online").click()
    names = page.get_by_role("table", name="Nodes").get_by_role("rowheader")
    expect(names).to_have_text(["g1"])
    page.get_by_role("button", name="Of all trees").click()
    expect(names).to_have_text(["g1", "n1"])
    assert page.url.endswith("#/nodes")


def test_equal_rows_are_all_there_after_the_page_has_asked_again(page, scheduler):
    entry = {"action": "allow", "subjects": ["ann"], "permissions": ["use"]}
    scheduler.patch("trees/default/pools/p", {"edits": [{"path": ["acl"], "value": [entry, entry]}]})
    show(page, scheduler, "#/pools/default/p")
    rows = page.get_by_role("table", name="Access list").get_by_role("row")
    for _ in range(3):
        expect(rows).to_have_count(3)
        with page.expect_response("**/api/v1/trees/default/pools/p"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(rows).to_have_count(3)
    scheduler.patch("trees/default/pools/p", {"edits": [{"path": ["acl"], "value": []}]})


def test_paper_has_all_rows_and_forced_colours_keep_the_bars(new_page, scheduler):
    page = new_page(forced_colors="active")
    table = {
        "tables": {
            "own": {"options": {"nodes_filter": "nowhere"}},
            "pools": [{"name": f"x{number}", "parent": "<Root>"} for number in range(150)],
        }
    }
    scheduler.post("trees", {"name": "wide", "attributes": {"nodes_filter": "nowhere"}})
    scheduler.post("trees/wide/apply", table)
    show(page, scheduler, "#/pools/wide")
    rows = page.locator("main tbody tr:not(.spacer)")
    assert rows.count() < 120
    kept = "[...document.querySelectorAll('.key, .bar-fill')].map((each) => getComputedStyle(each).forcedColorAdjust)"
    assert set(page.evaluate(kept)) == {"none"}
    page.evaluate("localStorage.setItem('cpumond-theme', 'dark'); dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    expect(rows).to_have_count(151)
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    expect(page.get_by_role("navigation", name="Pages")).to_be_hidden()
    assert page.locator("main .table-scroll").evaluate("each => each.scrollHeight - each.clientHeight") == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
