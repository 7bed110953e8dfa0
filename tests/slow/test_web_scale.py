"""The scheduler's web page with 2000 pools and 20 000 operations: what it weighs, what it keeps, and that it is right
(``tests/bench/web.py`` measures times)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import web_scale
from scheduler_process import SchedulerProcess
from web_scale import FIRST_ROW, OPERATIONS, POOLS, WATCH_FIRST_ROW, Wire

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

MAX_BYTES = 300_000
MAX_ROWS = 120
NODES = 16

WRONG = """([names, most]) => {
  const scroller = document.querySelector("main .table-scroll");
  const head = document.querySelector("main thead").offsetHeight;
  const rows = [...document.querySelectorAll("main .table tbody tr:not(.spacer)")];
  const places = rows.map((row) => Number(row.getAttribute("aria-rowindex")) - 2);
  if (rows.length > most) return `${rows.length} rows are in the page`;
  if (scroller.scrollHeight - head !== names.length * 34) return `it is ${scroller.scrollHeight} px high`;
  for (let index = 0; index < rows.length; index += 1) {
    const name = rows[index].querySelector("th a").textContent;
    if (name !== names[places[index]]) return `row ${places[index]} is ${name}, not ${names[places[index]]}`;
    const top = rows[index].offsetTop - head;
    if (Math.abs(top - 34 * places[index]) > 2) return `row ${places[index]} is at ${top} px`;
    if (places[index] !== places[0] + index) return `row ${places[index]} comes after ${places[index - 1]}`;
  }
  const first = Math.floor(scroller.scrollTop / 34);
  const last = Math.min(Math.floor((scroller.scrollTop + scroller.clientHeight - head - 1) / 34), names.length - 1);
  if (places[0] > first || places[rows.length - 1] < last) {
    return `rows ${places[0]} to ${places[rows.length - 1]} are there, ${first} to ${last} would be seen`;
  }
  return "";
}"""
"""What is wrong with the rows in the page, whose names should be these in this order."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    """The scheduler, updating its shares, with nodes that have jobs."""
    scheduler = SchedulerProcess(tmp_path_factory.mktemp("large"))
    web_scale.fill_store(scheduler.state_dir)
    scheduler.write_config(web_scale.CONFIG, api="rate_limit = 0", period="5s")
    try:
        scheduler.start()
        with scheduler.new_client() as client:
            beats = web_scale.play_nodes(client, NODES)
        assert all(beat["jobs"] for beat in beats)
        scheduler.wait_updates(1)
        yield scheduler
    finally:
        scheduler.close()


def open_page(scheduler: SchedulerProcess, page: Page, where: str) -> None:
    page.add_init_script(WATCH_FIRST_ROW)
    page.goto(f"{scheduler.url}/{where}", wait_until="commit")
    page.wait_for_function(FIRST_ROW)


def depth_first(table: dict[str, Any], order: Callable[[dict[str, Any]], Any] | None = None) -> list[dict[str, Any]]:
    """The rows of a pool table as the page shows them, the children of each pool in this order."""
    rows = [dict(zip(table["columns"], values, strict=True)) for values in table["rows"]]
    if order is None:
        return rows
    children: dict[str | None, list[dict[str, Any]]] = {}
    for row in rows:
        children.setdefault(row["parent"], []).append(row)
    shown: list[dict[str, Any]] = []
    stack = children[None][:]
    while stack:
        row = stack.pop()
        shown.append(row)
        # Equal ones stay in the order of their names.
        stack += sorted(children.get(row["name"], ()), key=order)[::-1]
    return shown


def names_of(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def check_rows(page: Page, names: list[str]) -> None:
    """Wait until the table shows what belongs to the place that it was scrolled to."""
    try:
        page.wait_for_function(f"given => ({WRONG})(given) === ''", arg=[names, MAX_ROWS])
    except Exception as error:
        raise AssertionError(page.evaluate(WRONG, [names, MAX_ROWS])) from error


@pytest.mark.parametrize("where", ["#/pools", "#/", "#/operations", "#/nodes"])
def test_a_page_weighs_less_than_300_kb_up_to_its_first_row(large: SchedulerProcess, page: Page, where: str) -> None:
    wire = Wire(page.context.new_cdp_session(page))
    open_page(large, page, where)
    assert any(path.startswith("/api/") for path in wire.bytes)
    assert 40_000 < wire.total < MAX_BYTES, wire.bytes
    modules = (
        "() => performance.getEntriesByType('resource').filter((each) => each.name.includes('/web/page_')).length >= 9"
    )
    page.wait_for_function(modules)
    assert wire.total < MAX_BYTES, wire.bytes


def test_only_the_rows_in_view_are_in_the_page_wherever_it_is_scrolled_to(large: SchedulerProcess, page: Page) -> None:
    names = names_of(depth_first(large.get("trees/default/pool_table")))
    assert len(names) == POOLS + 1
    open_page(large, page, "#/pools")
    check_rows(page, names)
    box = page.locator("main .table-scroll").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for step in range(1, 25):
        page.mouse.wheel(0, 1000)
        if step % 4 == 0:
            page.wait_for_function("y => document.querySelector('main .table-scroll').scrollTop >= y", arg=1000 * step)
            check_rows(page, names)
    scroller = page.locator("main .table-scroll")
    for key, at_end in (("End", True), ("Home", False), ("End", True)):
        scroller.press(key)
        end = "node => node.scrollHeight - node.clientHeight"
        wanted = scroller.evaluate(end) if at_end else 0
        page.wait_for_function(
            "at => Math.abs(document.querySelector('main .table-scroll').scrollTop - at) < 2", arg=wanted
        )
        check_rows(page, names)
    for place in (20_000, 1_000, 40_000, 39_000):
        scroller.evaluate("(node, place) => { node.scrollTop = place; }", place)
        check_rows(page, names)
    assert page.evaluate("() => document.querySelectorAll('*').length") < 60 * MAX_ROWS


def test_two_thousand_rows_are_sorted_found_and_folded(large: SchedulerProcess, page: Page) -> None:
    table = large.get("trees/default/pool_table")
    rows = depth_first(table)
    open_page(large, page, "#/pools")
    sort = page.locator("main thead button.sort")
    sort.filter(has_text="Weight").click()
    check_rows(page, names_of(depth_first(table, lambda row: -(row["weight"] or 0))))
    sort.filter(has_text="Weight").click()
    check_rows(page, names_of(depth_first(table, lambda row: row["weight"] or 0)))
    sort.filter(has_text="Weight").click()
    by_name = {row["name"]: row for row in rows}
    find = page.get_by_role("searchbox", name="Find a pool")
    find.fill("part-1")
    wanted: set[str] = set()
    for row in rows:
        above: dict[str, Any] | None = row if "part-1" in row["name"] else None
        while above is not None:
            wanted.add(above["name"])
            above = by_name.get(above["parent"])
    check_rows(page, [row["name"] for row in rows if row["name"] in wanted])
    find.fill("")
    check_rows(page, names_of(rows))
    page.get_by_role("button", name="Pools below team-0000").click()
    closed = [row for row in rows if not _is_below(row, "team-0000", by_name)]
    assert len(closed) < len(rows)
    check_rows(page, names_of(closed))


def _is_below(row: dict[str, Any], name: str, by_name: dict[str, dict[str, Any]]) -> bool:
    parent = row["parent"]
    return parent is not None and (parent == name or _is_below(by_name[parent], name, by_name))


def test_the_page_asks_with_what_it_has_and_keeps_its_rows(large: SchedulerProcess, page: Page) -> None:
    open_page(large, page, "#/pools")
    page.evaluate("() => { document.querySelector('main tbody tr').mine = true; }")
    statuses: list[int] = []
    page.on("response", lambda answer: statuses.append(answer.status) if "pool_table" in answer.url else None)
    with page.expect_response(lambda answer: "pool_table" in answer.url) as first:
        pass
    assert "if-none-match" in first.value.request.all_headers()
    for _ in range(3):
        page.wait_for_event("response", lambda answer: "pool_table" in answer.url)
    assert set(statuses) <= {200, 304}
    # Rows are changed, not made anew; nothing piles up.
    assert page.evaluate("() => document.querySelector('main tbody tr').mine")
    assert page.locator("main tbody tr").count() <= MAX_ROWS


def test_the_list_of_operations_is_shown_in_parts(large: SchedulerProcess, page: Page) -> None:
    open_page(large, page, "#/operations")
    rows = page.locator("main table tbody tr")
    assert rows.count() <= MAX_ROWS
    page.get_by_text(f"{OPERATIONS:,} operations").first.wait_for()
    page.get_by_role("searchbox").fill("batch 01234")
    page.get_by_text("1 matching operation").first.wait_for()
    assert rows.count() == 1
    assert "Batch 01234" in rows.inner_text()
    page.get_by_role("searchbox").fill("user-17")
    page.get_by_text("400 matching operations").first.wait_for()
    page.get_by_role("button", name="Operation", exact=True).click()
    titles = "() => [...document.querySelectorAll('main tbody tr')].map((row) => row.cells[0].textContent)"
    page.wait_for_function(f"() => ({titles})()[0] === 'Batch 00017'")
    expected = [f"Batch {number:05d}" for number in range(17, OPERATIONS, 50)]
    assert page.evaluate(titles) == expected[: rows.count()]
    shown = rows.count()
    page.get_by_role("button", name="Next").click()
    page.wait_for_function(f"title => ({titles})()[0] === title", arg=expected[shown])
    assert page.evaluate(titles) == expected[shown : shown + rows.count()]
