"""The graphs of the web pages in a real browser: what a person does with them by mouse and by keyboard."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from closed_loop import WAIT_S
from web_site import Site, await_page, expect, run_site

from cpumond.host.cgroup.mounts import Hierarchies

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.browser, pytest.mark.cgroup]

POOL = "#/pools/default/narrow"
SHARES = "Allocated and demand against the guarantee, percent of the tree"
CPU = "CPU of its jobs, cores"
PLOT = "[...document.querySelectorAll('.chart')].find((each) => each.props.title === title).plot"
TIMES = f"title => {PLOT}.data[0]"
SCALE = f"title => {{ const {{ x }} = {PLOT}.scales; return [x.min, x.max]; }}"
SHOWN = f"title => {PLOT}.series.slice(1).map(({{ show }}) => show)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    config = 'node_heartbeat_timeout = "2s"\n'
    with run_site(tmp_path_factory.mktemp("site"), hierarchies, scheduler_config=config) as site:
        site.furnish()
        # Something to zoom into, well after the first events: also where it took long to come to them.
        events = "/api/v1/events?pool=narrow&kind=preemption"
        [event] = site.cluster.wait(lambda: site.cluster.get(events)["events"], "the preemption is an event", WAIT_S)
        site.cluster.wait(lambda: is_long_over(history(site)["times"], event["at"]), "the history has points", WAIT_S)
        yield site


def is_long_over(times: list[float], at: float) -> bool:
    after = sum(each > at for each in times)
    return after > 60 and after > len(times) / 2


def history(site: Site, more: str = "") -> Any:
    """Each point, however many there are by now."""
    points = "" if "max_points" in more else "&max_points=20000"
    return site.cluster.get(f"/api/v1/history?kind=pool&name=narrow{more}{points}")


def chart_of(page: Page, title: str = CPU) -> Locator:
    return page.locator("figure.chart").filter(has=page.get_by_text(title, exact=True))


def open_pool(site: Site, page: Page, search: str = "") -> Locator:
    site.open(page, f"{POOL}{search}")
    plot = chart_of(page).locator(".u-over")
    plot.scroll_into_view_if_needed()
    expect(plot).to_be_visible()
    return plot


def drag(plot: Any, begin: float, end: float) -> None:
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    begun, ended = ({"x": part * box["width"], "y": box["height"] / 2} for part in (begin, end))
    plot.drag_to(plot, source_position=begun, target_position=ended)


def span_of(page: Page) -> tuple[float, float] | None:
    found = re.search(r"from=([0-9.]+)&to=([0-9.]+)", page.url)
    return None if found is None else (float(found[1]), float(found[2]))


def test_the_cursor_has_values_and_time_in_all_graphs_of_the_page(page, site):
    plot = open_pool(site, page)
    heads = [chart_of(page, title).locator(".legend thead th").nth(1) for title in (CPU, SHARES)]
    while heads[0].inner_text() == "now":  # what is laid out late moves the graph away from the pointer
        plot.hover(position={"x": 0.7 * plot.bounding_box()["width"], "y": 20})
    expect(heads[0]).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
    # The time moves on while the texts are read, so both are read at one moment.
    handles = [head.element_handle() for head in heads]
    page.wait_for_function("([one, other]) => one.innerText === other.innerText", arg=handles)
    limit = chart_of(page).get_by_role("row").filter(has=page.get_by_role("rowheader", name="limits", exact=True))
    expect(limit.get_by_role("cell").first).to_have_text("0.20")
    page.mouse.move(5, 5)
    for head in heads:
        expect(head).to_have_text("now")


def test_a_drag_zooms_all_graphs_and_the_address_keeps_it(page, site):
    plot = open_pool(site, page)
    before = page.evaluate(SCALE, CPU)
    drag(plot, 0.25, 0.5)
    expect(page.get_by_role("button", name="Zoom out")).to_be_visible()
    begin, end = span_of(page)
    whole_s = before[1] - before[0]
    assert begin == pytest.approx(before[0] + 0.25 * whole_s, abs=0.03 * whole_s + 1.0)
    assert end - begin == pytest.approx(0.25 * whole_s, rel=0.1, abs=0.3)
    for title in (CPU, SHARES):
        page.wait_for_function(f"([begin, title]) => ({SCALE})(title)[0] === begin", arg=[begin, title])
    page.reload()
    await_page(page)
    assert span_of(page) == (begin, end)
    page.wait_for_selector(".chart canvas")
    assert page.evaluate(SCALE, SHARES) == [begin, end]
    # A zoom within it, and back.
    drag(chart_of(page).locator(".u-over"), 0.3, 0.8)
    page.wait_for_function("before => !location.hash.includes(before)", arg=f"from={begin:g}")
    page.go_back()
    page.wait_for_function(f"([begin, title]) => ({SCALE})(title)[0] === begin", arg=[begin, CPU])
    assert span_of(page) == (begin, end)
    chart_of(page).locator(".u-over").dblclick()
    expect(page.get_by_role("button", name="Zoom out")).to_have_count(0)
    assert span_of(page) is None
    page.go_back()
    page.get_by_role("button", name="Zoom out").click()
    expect(page.get_by_role("button", name="1 h", exact=True)).to_have_attribute("aria-pressed", "true")
    assert span_of(page) is None


def test_any_part_of_time_can_be_typed_and_be_in_the_address(page, site):
    times = history(site)["times"]
    open_pool(site, page)
    page.locator(".own-range summary").press("Enter")
    start, end = page.get_by_label("From", exact=True), page.get_by_label("To", exact=True)
    zone = page.evaluate("new Date().getTimezoneOffset()")
    clock = [datetime.utcfromtimestamp(int(at) - 60 * zone).isoformat() for at in (times[0], times[-1])]
    start.fill(clock[1])
    end.fill(clock[0])
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("alert").filter(has_text="not after the beginning")).to_be_visible()
    start.fill(clock[0])
    end.fill(clock[1])
    end.press("Enter")
    expect(page.get_by_role("button", name="Zoom out")).to_be_visible()
    assert span_of(page) == (int(times[0]), int(times[-1]))
    page.get_by_role("button", name="24 h", exact=True).click()
    assert page.url.endswith("?range=24h")
    text = datetime.utcfromtimestamp(int(times[0])).isoformat()
    site.open(page, f"{POOL}?from={text}Z&to={text[:-8]}23:59:59Z")
    assert page.evaluate(SCALE, CPU)[0] == int(times[0])
    site.open(page, f"{POOL}?from=1000&to=2000")
    expect(page.get_by_text("Nothing is recorded for this time.").first).to_be_visible()


def test_lines_are_switched_by_mouse_and_keyboard_and_stay_so(page, site):
    open_pool(site, page)
    used = chart_of(page).get_by_role("button", name="used", exact=True)
    used.click()
    expect(used).to_have_attribute("aria-pressed", "false")
    limits = chart_of(page).get_by_role("button", name="limits", exact=True)
    limits.press("Space")
    expect(limits).to_have_attribute("aria-pressed", "false")
    expect(limits).to_be_focused()
    assert page.evaluate(SHOWN, CPU)[:3] == [False, False, True]
    page.reload()
    await_page(page)
    page.wait_for_selector(".chart canvas")
    assert page.evaluate(SHOWN, CPU)[:3] == [False, False, True]
    assert all(page.evaluate(SHOWN, SHARES))
    limits.press("Enter")
    expect(limits).to_have_attribute("aria-pressed", "true")
    assert page.evaluate(SHOWN, CPU)[1]


def test_what_is_shown_is_saved_as_values_and_as_a_picture(page, site, tmp_path):
    plot = open_pool(site, page)
    chart_of(page).get_by_role("button", name="used", exact=True).click()
    drag(plot, 0.3, 0.9)
    expect(page.get_by_role("button", name="Zoom out")).to_be_visible()
    begin, end = span_of(page)
    with page.expect_download() as saved:
        page.get_by_role("button", name=f"CSV: {CPU}").press("Enter")
    assert saved.value.suggested_filename.startswith("CPU-of-its-jobs-cores_")
    rows = list(csv.DictReader(io.StringIO(saved.value.path().read_bytes().decode())))
    assert "used" not in rows[0]
    at = [float(row["seconds since 1970"]) for row in rows]
    assert at == sorted(at)
    assert begin <= at[0] < at[-1] <= end
    told = history(site, f"&since={begin}&until={end}&max_points=600")
    limits = dict(zip(told["times"], told["columns"]["limit_cores"], strict=True))
    assert len(rows) > 10
    assert [float(row["limits"]) for row in rows] == [limits[each] for each in at]
    with page.expect_download() as saved:
        page.get_by_role("button", name=f"PNG: {CPU}").click()
    picture = saved.value.path().read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[place : place + 4], "big") for place in (16, 20))
    assert width > 400
    assert height > 230
    assert len(picture) > 4000


def test_events_are_marked_with_their_sentence_and_a_link(page, site):
    open_pool(site, page)
    (event,) = site.cluster.get("/api/v1/events?pool=narrow&kind=preemption")["events"]
    marks = chart_of(page).get_by_role("group", name=f"Events in {CPU}").get_by_role("link")
    mark = marks.filter(visible=True).and_(page.locator("[aria-label*='used more than its limits']"))
    expect(mark).to_have_count(1)
    assert event["job"] not in mark.get_attribute("aria-label")
    tip = chart_of(page).locator(".chart-tip")
    expect(tip).to_be_hidden()
    mark.hover()
    expect(tip).to_contain_text("used more than its limits allow")
    # The same at the cursor, in the graph below it.
    box, plot = mark.bounding_box(), chart_of(page).locator(".u-over").bounding_box()
    page.mouse.move(plot["x"] + plot["width"] - 3, plot["y"] + 60)
    expect(tip).to_be_hidden()
    page.mouse.move(box["x"] + box["width"] / 2 + 2, plot["y"] + 60)
    expect(tip).to_contain_text("used more than its limits allow")
    page.mouse.move(5, 5)
    # By keyboard: one stop for all of them.
    marks.first.focus()
    expect(tip).to_be_visible()
    assert [each.get_attribute("tabindex") for each in marks.all()] == ["0", *["-1"] * (marks.count() - 1)]
    for _ in range(marks.count() - 1):
        page.keyboard.press("ArrowRight")
    expect(marks.last).to_be_focused()
    expect(tip).to_contain_text("preempted")
    page.keyboard.press("Enter")
    row = page.get_by_role("row").nth(1)
    expect(row).to_contain_text('a job of operation "Cut short" in pool "narrow": preempted')
    expect(row.get_by_role("rowheader")).to_have_text(str(event["number"]))
    # Only changes of pools are marked, of all commands: no start of an operation.
    site.open(page, "#/")
    expect(page.locator('.mark[aria-label*="made pool"]').first).to_be_attached()
    labels = page.locator(".mark").evaluate_all("marks => marks.map((mark) => mark.getAttribute('aria-label')).join()")
    assert "made pool" in labels
    assert "started operation" not in labels


def test_the_keyboard_alone_zooms_and_reads(page, site):
    open_pool(site, page)
    place = chart_of(page).locator(".chart-plot")
    place.focus()
    for key in ("Home", "ArrowRight", *["Shift+ArrowRight"] * 12):
        page.keyboard.press(key)
    head = chart_of(page).locator(".legend thead th").nth(1)
    expect(head).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
    expect(chart_of(page).locator("[role=status]")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d: used .*limits "))
    times = page.evaluate(TIMES, CPU)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Zoom out")).to_be_visible()
    first, last = span_of(page)
    # Points of 0.2 s; of more where one came late, or where there are more than are shown.
    assert last - first == pytest.approx(times[13] - times[1], abs=0.5)
    expect(place).to_be_focused()
    page.keyboard.press("-")
    page.wait_for_function("before => !location.hash.includes(before)", arg=f"to={last:g}")
    begin, end = span_of(page)
    assert end - begin == pytest.approx(2 * (last - first), abs=0.3)
    page.keyboard.press("+")
    page.wait_for_function("before => !location.hash.includes(before)", arg=f"from={begin:g}")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Zoom out")).to_have_count(0)
    assert span_of(page) is None
    values = chart_of(page).locator("details.values")
    values.locator("summary").press("Enter")
    table = chart_of(page).get_by_role("table", name=f"{CPU}: values at each time")
    expect(table.get_by_role("columnheader")).to_have_text(
        ["Time", "used", "limits", "requested", "reclaimed", "waiting", "idle while work waits"]
    )
    expect(table.get_by_role("row").nth(20)).to_be_attached()  # all of the time again
    expect(table.get_by_role("row").nth(101)).not_to_be_attached()
    expect(table.get_by_role("row").last.get_by_role("cell").nth(1)).to_have_text("0.2")


def let_its_limit_come_down(site: Site) -> None:
    """Anew, to all that it ordered first: the agent keeps the points of the last minutes alone."""
    site.wake.touch()
    try:
        site.cluster.wait(lambda: site.explain()["current_cpu_limit"] == 1.0, "its limit is up", WAIT_S)
    finally:
        site.wake.unlink()
    site.cluster.wait(lambda: site.explain()["current_cpu_limit"] < 1.0, "its limit comes down", WAIT_S)


def test_decisions_are_marked_in_the_graphs_of_a_job_on_both_pages(page, site):
    for is_agent in (False, True):
        let_its_limit_come_down(site)
        if is_agent:
            site.open_agent(page, site.agent_addresses()["agent's job"])
        else:
            site.open(page, site.job_address())
        mark = page.locator('[aria-label*="shrink, 1.00 → 0.70"]').and_(page.locator('[aria-label*=" cores: votes"]'))
        chart_of(page, "CPU in cores").get_by_role("link").and_(mark).last.click()
        expect(page.get_by_role("heading", name="Decisions")).to_be_focused()
        drag(chart_of(page, "CPU in cores").locator(".u-over"), 0.2, 0.6)
        expect(page.get_by_role("button", name="Zoom out")).to_be_visible()
        for title in ("CPU in cores", "Sum of the votes", "Throttled periods"):
            assert page.evaluate(SCALE, title) == list(span_of(page)), title
        page.get_by_role("button", name="Zoom out").click()
        expect(page.get_by_role("button", name="Zoom out")).to_have_count(0)


def test_the_map_of_nodes_replays_what_the_history_has(page, site):
    site.open(page, "#/nodes")
    page.get_by_role("button", name="Replay 24 hours").click()
    slider = page.get_by_role("slider", name="Moment of the replay")
    expect(slider).to_be_visible()
    expect(page.get_by_text(re.compile(r"\d\d:\d\d:\d\d: [\d.<\s]+ core-hours used twice so far$"))).to_be_visible()
    slider.fill("95")
    asked = "/api/v1/node_map?measure="
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    board = page.get_by_role("application", name=re.compile("^Nodes"))
    for name, measure in (("Requested", "ordered"), ("Used", "used")):
        with page.expect_response(lambda answer, measure=measure: answer.url.endswith(measure)) as answered:
            page.get_by_role("button", name=name, exact=True).first.click()
        answer = answered.value.json()
        assert [answer["nodes"], len(answer["times"])] == [site.cluster.get(f"{asked}{measure}")["nodes"], 96]
        board.focus()
        percent = answer["percents"][-1][0]
        expect(page.locator(".heat-line")).to_have_text(re.compile(f"{name.lower()} .* cores, {percent} %$"))
    page.get_by_role("button", name="Back to now").click()
    board.focus()
    board.focus()
    expect(page.locator(".heat-line")).to_have_text(re.compile(r"\d+ jobs$"))
    expect(slider).to_have_count(0)
