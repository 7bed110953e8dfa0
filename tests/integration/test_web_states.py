"""The web pages for those who use a keyboard or a screen reader, and where nothing is as it mostly is."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from waiting import wait_until
from web_site import await_page, expect, show

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

FAIR_SHARE = "The share of the tree that a pool or an operation is entitled to now"
DEMAND = "The resources that running operations want"
LISTEN = """() => {
  window.said = [];
  new MutationObserver((changes) => {
    for (const { target } of changes) {
      const element = target.nodeType === Node.TEXT_NODE ? target.parentElement : target;
      const live = element?.closest('[role=status], [role=alert]');
      if (live && !element.closest('[aria-hidden=true]')) window.said.push(live.textContent);
    }
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
"""Collects what a screen reader says by itself, in ``said``."""

KEEP_FOCUS = """async ([before, after]) => {
  const { h, morph } = await import('/web/dom.js');
  // "a.b#c": an element a of class b with the key c; "-x": a text.
  const make = (names) => h('div', names.map((name) => {
    if (name.startsWith('-')) return name;
    const [tag, key] = name.split('#');
    return h(tag, { key, 'aria-label': name.includes('here') ? 'here' : null }, 'x');
  }));
  const place = make(before);
  document.body.append(place);
  const focused = place.querySelector('[aria-label=here]');
  focused.focus();
  morph(place, make(after));
  const isKept = document.activeElement === focused && place.contains(focused);
  const count = place.childNodes.length;
  place.remove();
  return [isKept, count];
}"""


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    with SchedulerProcess(tmp_path_factory.mktemp("states")) as process:
        # Its node says no more than what is said here.
        process.write_config('node_heartbeat_timeout = "1h"\n[history]\nperiod = "100ms"\n')
        process.start()
        process.create_pool("p")
        yield process


@pytest.fixture(scope="module")
def node(scheduler: SchedulerProcess) -> PlayedNode:
    node = PlayedNode(scheduler, "n1")
    node.register()
    scheduler.wait_updates()
    return node


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SchedulerProcess]:
    with SchedulerProcess(tmp_path) as process:
        yield process


def await_redraws(page: Page, count: int = 2) -> None:
    """Have the page ask again, and wait until it has drawn what it was told."""
    for _ in range(count):
        with page.expect_response("**/healthz"):  # asked for after each drawing
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


# ---- keyboard


def test_a_page_opened_with_the_keyboard_has_the_focus_at_its_heading(page, scheduler):
    show(page, scheduler, "#/")
    assert page.evaluate("document.activeElement === document.body")  # the first one takes it from nobody
    menu = page.get_by_role("navigation", name="Pages")
    for name in ("Pools", "Operations", "Nodes", "Preemptions", "Overview"):
        menu.get_by_role("link", name=name).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        heading = page.get_by_role("heading", level=1)
        expect(heading).to_be_focused()
        expect(heading).to_have_css("outline-style", "none")  # a ring is of what can be typed in or pressed
        expect(page).to_have_title(f"{name} \N{EN DASH} cpumond")
        expect(menu.locator("[aria-current=page]")).to_have_text(name)
    await_redraws(page)
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    page.go_back()
    expect(page.get_by_role("heading", name="Preemptions", level=1)).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Pool")).to_be_focused()
    page.evaluate("location.hash = '#/nowhere/at/all'")
    expect(page.get_by_role("heading", name="There is no such page", level=1)).to_be_focused()


def test_what_has_the_focus_keeps_it_when_something_else_comes_or_goes(page, scheduler):
    show(page, scheduler, "#/")
    for before, after in (
        (["a#1", "button#here", "a#3"], ["button#here", "a#3"]),  # a row before it ends
        (["a#1", "a#2", "button#here"], ["button#here", "a#4", "a#1"]),  # sorted anew
        (["button#here", "a#2", "a#3"], ["a#2", "a#3", "button#here"]),
        (["span.badge", "span.badge", "button.here"], ["span.badge", "button.here"]),  # without keys
        (["p.note", "button.other", "button.here"], ["button.here"]),
        (["-text", "b", "button.here", "-more"], ["button.here", "-more"]),
        (["button.here"], ["-text", "p.note", "button.here"]),
    ):
        assert page.evaluate(KEEP_FOCUS, [before, after]) == [True, len(after)], (before, after)


def test_the_focus_stays_in_a_table_and_in_a_field_that_is_typed_in(page, scheduler):
    first, second = (scheduler.start_operation("p", title=f"table {number}") for number in (1, 2))
    show(page, scheduler, "#/pools/default/p")
    link = page.get_by_role("link", name="Why: table 1")
    link.focus()
    third = scheduler.start_operation("p", title="table 3")
    expect(page.get_by_role("link", name="table 3", exact=True)).to_be_visible()
    for operation in (third, second):
        scheduler.post(f"operations/{operation}/abort", {})
    expect(page.get_by_role("link", name="table 2", exact=True)).to_have_count(0)
    expect(link).to_be_focused()
    show(page, scheduler, "#/operations")
    field = page.get_by_label("Search")
    field.focus()
    for sign in "table 1":
        page.keyboard.type(sign)
        page.wait_for_timeout(150)
    await_redraws(page)
    expect(field).to_be_focused()
    expect(field).to_have_value("table 1")
    expect(page.get_by_role("status").filter(has_text="1 matching operation")).to_have_count(1)
    page.get_by_label("State").focus()
    await_redraws(page)
    expect(page.get_by_label("State")).to_be_focused()
    scheduler.post(f"operations/{first}/abort", {})


def test_a_dialog_gives_the_focus_back_or_to_the_heading(page, scheduler):
    operation = scheduler.start_operation("p", title="in a dialog")
    show(page, scheduler, f"#/operations/{operation}")
    abort = page.locator("main").get_by_role("button", name="Abort")
    abort.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Abort in a dialog")
    expect(dialog.get_by_label("Why")).to_be_focused()
    await_redraws(page)
    for _ in range(10):  # it stays in the dialog, or goes to the browser itself
        page.keyboard.press("Tab")
        assert page.evaluate(
            "[document.body, ...document.querySelectorAll('dialog *')].includes(document.activeElement)"
        )
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(abort).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    scheduler.post(f"operations/{operation}/complete", {})
    expect(abort).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    show(page, scheduler, "#/pools/default/p")
    page.get_by_role("button", name="New sub-pool").click()
    page.get_by_role("button", name="Show what it changes").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Name")).to_be_focused()  # what is refused


# ---- screen readers


def test_what_changes_by_itself_is_said_once(page, scheduler, node):
    show(page, scheduler, "#/operations")
    page.evaluate(LISTEN)
    scheduler.start_operation("p", title="unasked")
    expect(page.get_by_text("unasked")).to_be_visible()
    await_redraws(page)
    assert page.evaluate("said") == []
    page.allow("ERR_FAILED", "ERR_CONNECTION")
    page.route(re.compile("/api/|/healthz"), lambda route: route.abort())
    # As if some seconds had passed by then, after which an answer is old.
    page.evaluate("(() => { const now = Date.now; Date.now = () => now() + 10_000; })()")
    banner = page.get_by_role("status").filter(has_text="this page is out of date")
    expect(banner).to_be_visible()
    for _ in range(2):
        text = banner.inner_text()
        expect(banner).not_to_have_text(text)  # the seconds
    said = page.evaluate("said")
    assert len(set(said)) == 1, said
    assert "No answer since" in said[0]


# ---- unusual states


def test_a_browser_whose_clock_is_wrong_shows_the_times_of_the_server(page, scheduler, node):
    operation = scheduler.start_operation("p", title="clock")
    page.add_init_script("{ const now = Date.now; Date.now = () => now() - 3_600_000; }")
    show(page, scheduler, f"#/operations/{operation}")
    expect(page.get_by_text(re.compile(r"\(\d+(\.\d+)? s ago\)"))).to_be_visible()
    page.wait_for_selector(".chart canvas")
    from_s, until_s = page.evaluate(
        "(() => { const { x } = document.querySelector('.chart').plot.scales; return [x.min, x.max]; })()"
    )
    assert abs(until_s - time.time()) < 30
    assert until_s - from_s < 120
    scheduler.post(f"operations/{operation}/abort", {})


IN_SENTENCES = """async () => (await import('/web/format.js')).localTimes(
  'at 2026-01-31 23:30:05 UTC: until 2026-02-01 10:00:00 CET')"""


def test_all_times_are_of_the_zone_of_the_browser_which_is_shown(new_page, scheduler):
    scheduler.create_pool("zones")
    [event] = scheduler.get("events?kind=command&limit=1")["events"]
    page = new_page(timezone_id="Asia/Kolkata")
    show(page, scheduler, "#/audit")
    expect(page.locator("header .zone")).to_have_text(re.compile(r"GMT\+5:30$"))
    cell = page.get_by_role("row").filter(has_text="zones").get_by_role("cell").first
    here = time.strftime("%H:%M:%S", time.gmtime(event["at"] + 5.5 * 3600))
    expect(cell).to_have_text(here)
    expect(cell.locator("span")).to_have_attribute("title", re.compile(f"{here} GMT\\+5:30$"))
    # Sentences of the scheduler and of agents have the zone of where they were made.
    assert page.evaluate(IN_SENTENCES) == "at 2026-02-01 05:00:05 GMT+5:30: until 2026-02-01 10:00:00 CET"
    show(page, scheduler, "#/savings")
    # One of each tree: other tests make some.
    heading = page.get_by_role("heading", name=re.compile(r"By week, from Monday,? (at )?05:30 GMT\+5:30"))
    expect(heading.first).to_be_visible()


def test_a_history_that_is_turned_off_is_said_and_not_asked_for(own, page):  # it is closed before the server
    own.write_config('[history]\nlength = "0s"\n')
    own.start()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/api/v1/history" in request.url else None)
    show(page, own, "#/")
    expect(page.get_by_text("No node is online: nothing can run.")).to_be_visible()
    expect(page.get_by_text("history is turned off: [history] length = 0")).to_be_visible()
    expect(page.get_by_text("turned off", exact=True)).to_be_visible()
    for where, sentence in (
        ("#/pools/default/%3CRoot%3E", "history is turned off"),
        ("#/operations", "No operation has been started yet."),
        ("#/nodes", "No node has registered yet"),
        ("#/preemptions", "No job has been preempted since the scheduler started."),
    ):
        page.evaluate("where => { location.hash = where; }", where)
        await_page(page, where)
        expect(page.get_by_text(sentence).first).to_be_visible()
        expect(page.get_by_role("button", name="24 h")).to_have_count(0)
    page.wait_for_load_state("networkidle")  # pages that were not opened are fetched, too, when there is time
    assert asked == []


def test_a_window_that_is_shown_again_loads_at_once(page, scheduler):
    show(page, scheduler, "#/operations")
    hide = """isHidden => {
      Object.defineProperty(document, 'hidden', { value: isHidden, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate(hide, True)

    def is_quiet() -> bool:
        asked.clear()
        page.wait_for_timeout(3000)  # longer than from one look to the next
        return asked == []

    wait_until(is_quiet, "nothing is asked for any more, but for a look that was due already")
    operation = scheduler.start_operation("p", title="while it was hidden")
    with page.expect_response("**/api/v1/operations*"):  # no other look is due
        page.evaluate(hide, False)
    expect(page.get_by_text("while it was hidden")).to_be_visible()
    scheduler.post(f"operations/{operation}/abort", {})


def test_an_operation_of_two_trees_and_one_that_fits_nowhere(page, scheduler, node):
    scheduler.post("trees", {"name": "empty", "attributes": {"nodes_filter": "nowhere"}})
    scheduler.create_pool("p", tree="empty")
    two = scheduler.start_operation("p", title="two trees", pool_trees=["default", "empty"])
    huge = scheduler.start_operation("p", cpu=100.0, title="too large")
    wait_until(lambda: "default" in scheduler.get(f"operations/{two}")["trees"], "its shares")
    show(page, scheduler, f"#/operations/{two}")
    expect(page.get_by_role("region", name="Pool p of tree empty")).to_contain_text("no share here")
    expect(page.get_by_role("region", name="Pool p of tree default")).to_contain_text("starves in")
    show(page, scheduler, "#/pools/empty")
    expect(page.get_by_text(re.compile("Percentages are of the whole tree empty: 0 cores"))).to_be_visible()
    show(page, scheduler, f"#/operations/{huge}?tab=jobs")
    expect(page.get_by_text("No job has started yet; see the tab “Why”")).to_be_visible()
    too_large = scheduler.get(f"operations/{huge}")["trees"]["default"]["why"]
    assert re.fullmatch(r"cannot start: 100 cores, largest node \S+", too_large)
    show(page, scheduler, f"#/operations/{huge}")
    expect(page.locator("main")).to_contain_text(f"It {too_large}. Remedy: start it again with smaller jobs")
    show(page, scheduler, "#/mine")
    row = page.get_by_role("row").filter(has_text="too large")
    for text in ("cannot start", too_large, "never, as things are"):
        expect(row).to_contain_text(text)
    expect(page.locator(".figures .card").filter(has_text="cannot start")).to_contain_text("1")
    for operation in (two, huge):
        scheduler.post(f"operations/{operation}/abort", {})


def test_an_operation_that_should_have_started_is_late(page, scheduler):
    operation = scheduler.start_operation("p", title="tardy")
    past = dict.fromkeys(("start_p10", "start_p50", "start_p90"), time.time() - 60.0)

    def add_forecast(route):
        answer = route.fetch()
        if answer.status != 200:  # it is as before
            return route.fulfill(response=answer)
        body = answer.json()
        for each in body.get("operations", [body]):
            ends = dict.fromkeys(("end_p10", "end_p50", "end_p90"))
            each["forecast"] = {"as_of": time.time() - 90.0, "started_at": None, **past, **ends}
        return route.fulfill(response=answer, json=body)

    page.route(re.compile(r"/api/v1/operations(\?|/[^/?]+$)"), add_forecast)
    for where, text in (("#/operations", "late"), ("#/mine", "late"), (f"#/operations/{operation}", "It is late")):
        show(page, scheduler, where)
        expect(page.get_by_text(text).first).to_be_visible()
        expect(page.get_by_text(re.compile("starts in|^soon$"))).to_have_count(0)
    page.unroute_all()
    scheduler.post(f"operations/{operation}/abort", {})


def test_the_head_is_one_line_on_a_telephone_and_the_rest_is_behind_a_menu(new_page, scheduler):
    page: Any = new_page(viewport={"width": 390, "height": 844}, has_touch=True)
    show(page, scheduler, "#/")
    head, pages = page.locator("header.top"), page.get_by_role("navigation", name="Pages")
    menu = page.get_by_role("button", name="Menu")
    assert head.bounding_box()["height"] < 60
    small = "each => each.checkVisibility() && each.getBoundingClientRect().height < 33"
    assert page.evaluate(f"[...document.querySelectorAll('button')].filter({small}).map(e => e.textContent)") == []
    expect(pages).to_be_hidden()
    menu.tap()
    expect(menu).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("button", name="Theme")).to_be_visible()
    pages.get_by_role("link", name="Nodes").tap()
    expect(page.get_by_role("heading", name="Nodes", level=1)).to_be_visible()
    expect(pages).to_be_hidden()


# ---- words of the glossary, and the runbook


def test_a_word_explains_itself_to_pointer_and_keyboard(page, scheduler):
    show(page, scheduler, "#/pools/default/p")
    tip, facts = page.locator(".tip"), page.locator("dl.facts").first
    word, other = (facts.get_by_role("button", name=name, exact=True) for name in ("Fair share", "Demand"))
    expect(tip).to_be_hidden()

    word.hover()
    expect(tip).to_be_visible()
    expect(tip).to_contain_text(FAIR_SHARE)
    tip.hover()  # it can be read with the pointer on it
    page.wait_for_timeout(400)
    expect(tip).to_be_visible()
    page.get_by_role("heading", level=1).hover()
    expect(tip).to_be_hidden()

    word.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    expect(word).to_be_focused()
    expect(tip).to_contain_text(FAIR_SHARE)
    expect(word).to_have_accessible_description(page.locator(".tip").inner_text())
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    expect(word).to_be_focused()
    other.focus()
    expect(tip).to_contain_text(DEMAND)


def test_a_scheduler_that_hangs_is_stale_before_its_requests_time_out(page, scheduler):
    page.clock.install()
    show(page, scheduler, "#/pools")
    mark, banner = page.locator("header .live"), page.locator("header .stale")
    expect(mark).to_have_text("live")
    os.kill(scheduler.process.pid, signal.SIGSTOP)
    try:
        page.clock.run_for(9_000)  # that of the requests' time-out, 20 s, goes on as ever
        expect(mark).to_have_text("stale")
        expect(banner).to_have_text(re.compile(r"No answer since \d\d:\d\d:\d\d .*the server does not answer\."))
    finally:
        os.kill(scheduler.process.pid, signal.SIGCONT)
    page.clock.run_for(2_000)
    expect(mark).to_have_text("live")


def test_a_question_that_takes_long_is_no_scheduler_that_hangs(page, scheduler):
    page.clock.install()
    show(page, scheduler, "#/pools")
    with page.expect_request("**/api/v1/trees*"):
        page.route("**/api/v1/**", lambda _: None)  # it is never answered
        page.clock.run_for(2_500)
    for _ in range(4):
        with page.expect_response("**/healthz"):
            page.clock.run_for(2_500)
        page.evaluate("0")
        expect(page.locator("header .live")).to_have_text("live")
    page.unroute_all()


# ---- several schedulers


def stand_by(page: Page, scheduler: SchedulerProcess, leader: str) -> None:
    """Have the scheduler answer this page as a standby does, which names ``leader``, "" for none."""
    error = {"error": f"standby: the scheduler at {leader} leads (term 3)", "code": 105, "attributes": {}}
    headers = {"X-Cpumond-Leader": leader} if leader else {}
    page.allow(r"503 GET .*/api/v1/")
    page.route(f"{scheduler.url}/api/**", lambda route: route.fulfill(status=503, json=error, headers=headers))


@pytest.mark.parametrize("leader", ["", "//x/..:1"])
def test_a_leader_that_the_browser_may_not_reach_is_named_alone(page, scheduler, leader):
    stand_by(page, scheduler, leader)
    page.clock.install()
    page.goto(f"{scheduler.url}/#/pools")
    told = page.locator("header .stale")
    expect(told).to_contain_text(leader or "no leader at the moment")
    expect(told.get_by_role("link")).to_have_count(0)
    page.clock.run_for(20_000)
    expect(told).to_contain_text("This scheduler is a standby")
    assert page.url == f"{scheduler.url}/#/pools"
    page.unroute_all()
    page.clock.run_for(5_000)
    expect(page.locator(".live")).to_have_text("live")
