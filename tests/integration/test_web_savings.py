"""The page of savings: figures of a known history, its weeks and money, the control group, in windows of all kinds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from history_ticks import Tape, row
from scheduler_process import SchedulerProcess
from web_site import expect, open_page

from cpumond.scheduler.history.model import ARM, POOL, Amounts, Key
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.model import ROOT_POOL
from cpumond.scheduler.program.main import HISTORY_FILE

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

HOUR_S = 3600.0
HOURS = 9 * 24
"""Some of more than one week, whatever day it is."""
POOLS = (ROOT_POOL, "research")
CONFIG = '[history]\nlength = "60d"\nperiod = "1h"\n'


def fill(path: str, compared: int) -> None:
    """A history of HOURS: each hour 4 core-hours beyond requests and half a job, .25 held back, .15 lost; in the last
    ``compared`` of them a control group that is held back for 1 % of its request, and others for 3 %."""
    begin = time.time() - (HOURS + 0.5) * HOUR_S
    store, tape = HistoryStore(path, 60 * 86_400.0, HOUR_S, 2**28, begin), Tape(begin)
    points = {
        Key(POOL, "default", pool): row(POOL, late_cores=0.25, reclaimed_cores=6.0, ordered_cores=16.0)
        for pool in POOLS
    }
    extra = Amounts(lost=0.15, extra_used=4.0, extra_ordered=8.0, extra_jobs=0.5 / HOUR_S)
    totals = dict.fromkeys(points, extra)
    for hour in range(HOURS):
        for arm, held_back in (("control", 0.1), ("others", 0.3)) if HOURS - hour <= compared else ():
            throttled = held_back * (0.9, 1.0, 1.1)[hour % 3]
            totals[Key(ARM, "default", arm)] = Amounts(used=5.0, ordered=10.0, throttled=throttled)
        store.add(tape.tick(points, HOUR_S, totals=totals))
    store.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SchedulerProcess]]:
    with contextlib.ExitStack() as stack:

        def begin(compared: int, more: str = "") -> SchedulerProcess:
            process = stack.enter_context(SchedulerProcess(tmp_path_factory.mktemp("savings")))
            os.makedirs(process.state_dir)
            fill(str(process.state_dir / HISTORY_FILE), compared)
            process.write_config(f"{CONFIG}{more}\n")
            return process.start()

        yield begin


@pytest.fixture(scope="module")
def priced(start: Callable[..., SchedulerProcess]) -> SchedulerProcess:
    return start(HOURS, 'core_hour_price = 0.05\ncurrency = "EUR"')


def show(page: Page, process: SchedulerProcess, where: str = "#/savings") -> None:
    open_page(page, f"{process.url}/", where)
    expect(page.get_by_role("heading", name="Savings", exact=True)).to_be_visible()


def expect_days(balance: Locator) -> None:
    """The core-hours of a week and of the rest of its first day: 96 a day."""
    expect(balance).not_to_contain_text("864core-hours beyond requests")
    assert 672.0 <= float(balance.inner_text().split()[0]) <= 672.0 + 96.0


def test_what_was_gained_and_what_it_cost_by_pool_and_week_in_money(page, priced):
    show(page, priced)
    balance = page.get_by_role("region", name="Balance")
    # 9 days of 24 h: 864 = 216 x 4, of which 216 x .25 and 216 x .15 go off.
    for text in ("864core-hours beyond requests", "108jobs on reclaimed CPU", "54core-hours throttled"):
        expect(balance).to_contain_text(text)
    expect(balance).to_contain_text("32.4core-hours lost")
    expect(balance).to_contain_text("777.6core-hours gained")
    expect(balance).to_contain_text("38.88 EURgained")
    expect(page.locator(".note")).to_contain_text("are recorded")
    pools = page.get_by_role("table", name="Savings by pool")
    expect(pools.get_by_role("rowheader")).to_have_text([ROOT_POOL, "research"])
    weeks = page.get_by_role("region", name="By week").locator("details:not(.menu)")
    assert weeks.count() in (2, 3)
    total = 0.0
    for week in weeks.all():
        week.locator("summary").click()
        cells = week.get_by_role("row").filter(has_text=ROOT_POOL).get_by_role("cell")
        total += float(cells.first.inner_text().replace(",", ""))
    assert total == pytest.approx(864.0, rel=0.01)
    page.get_by_label("The last", exact=True).select_option("1 week")
    expect_days(balance)
    assert page.url.endswith("#/savings?since_s=604800")
    pools.get_by_role("link", name="research").click()
    page.wait_for_url("**#/pools/default/research")
    page.allow("status: 404 .*research")  # a pool of the history alone


def test_a_pools_graph_of_a_week_is_made_of_days(page, priced):
    open_page(page, f"{priced.url}/", "#/pools/default/%3CRoot%3E?range=7d")
    expect(page.get_by_role("button", name="7 d", exact=True)).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("region", name="Allocated, demand and guarantee")).to_contain_text(
        "Shares are kept for the last 24 hours"
    )
    graph = page.get_by_role("region", name="CPU", exact=True)
    graph.locator("summary", has_text="Values").click()
    ordered = graph.get_by_role("row").filter(has_text="16")
    expect(ordered.nth(6)).to_be_visible()
    page.get_by_role("button", name="24 h", exact=True).click()
    expect(page.get_by_text("Shares are kept for the last 24 hours")).to_have_count(0)


def test_the_control_group_is_compared_with_an_interval(page, priced):
    show(page, priced)
    region = page.get_by_role("region", name="Control group", exact=True)
    held_back = region.get_by_role("row").filter(has_text="Throttled")
    expect(held_back).to_contain_text("1 %")
    expect(held_back).to_contain_text("3 %")
    expect(held_back).to_contain_text("points")
    expect(region.get_by_role("row").filter(has_text="Used")).to_contain_text("50 %")
    expect(region).to_contain_text("2,160 core-hours requested in the control group")


def test_too_few_are_not_compared_and_what_was_not_told_is_not_shown(page, start):
    process = start(1)
    show(page, process)
    region = page.get_by_role("region", name="Control group", exact=True)
    expect(region.get_by_role("row").filter(has_text="Throttled")).to_contain_text("too few jobs")
    expect(page.get_by_text("has no core_hour_price")).to_be_visible()
    expect(page.get_by_role("columnheader", name="In money")).to_have_count(0)
