"""Savings of a day whose truth is known: on the page, by the command line, and of a pool by week."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest
from played_week import WEEK_S, PlayedWeek, Truth
from scheduler_process import SchedulerProcess
from web_site import open_page

from cpumond.cli import run

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs the Python package playwright: sh tests/venv.sh all"
).expect

pytestmark = pytest.mark.browser

WITHIN = 0.03
HOUR_S = 3600.0
DAY_S = 86_400.0
MONDAY_NOON_S = 4.5 * DAY_S
"""The first one, after the Thursday on which times begin."""


@dataclass
class Site:
    process: SchedulerProcess
    truth: Truth

    def report(self, *words: str, code: int = 0) -> str:
        """What ``cpumond report`` says; with another code than 0, why."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            found = run(["report", "--scheduler", self.process.url, *words])
        assert found == code, err.getvalue()
        return (err if code else out).getvalue()


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process take none from whoever runs the tests."""
    for name in ("CPUMOND_TOKEN", "CPUMOND_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def find_noon(now: float) -> float:
    """The last noon of a Monday, UTC."""
    return (now - MONDAY_NOON_S) // WEEK_S * WEEK_S + MONDAY_NOON_S


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A scheduler with the history of a day, as true as a week in a seventh of the CPU: from the noon before the last
    Monday whose noon is past, so that two weeks have a part of it."""
    process = SchedulerProcess(tmp_path_factory.mktemp("savings"))
    process.state_dir.mkdir(mode=0o700)
    week = PlayedWeek(str(process.state_dir / "history.db"), until=find_noon(time.time()), length_s=DAY_S)
    truth = week.play()
    week.store.close()
    process.write_config('[history]\nlength = "35d"\nperiod = "60s"\ncore_hour_price = 0.04\ncurrency = "EUR"\n')
    try:
        process.start()
        yield Site(process, truth)
    finally:
        process.close()


def test_the_commands_core_hours_are_the_truth(site: Site) -> None:
    view = json.loads(site.report("--savings", "--json"))
    [tree] = view["trees"]
    rows = {row["name"]: row for row in tree["total"]}
    assert set(rows) == {"<Root>", "orders", "waits"}
    for pool, row in rows.items():
        assert row["extra_used"] == pytest.approx(site.truth.extra_used[pool] / HOUR_S, rel=WITHIN)
        assert row["held_back"] == pytest.approx(site.truth.held_back[pool] / HOUR_S, rel=WITHIN)
        assert row["gain"] == pytest.approx(row["extra_used"] - row["held_back"] - row["lost"])
        assert row["money"] == pytest.approx(0.04 * row["gain"])
    weeks = [week["pools"][0]["extra_used"] for week in tree["weeks"]]
    assert sum(each > 0.0 for each in weeks) == 2
    assert sum(weeks) == pytest.approx(rows["<Root>"]["extra_used"])
    at_twice = json.loads(site.report("--savings", "--json", "--price", "0.08"))
    assert at_twice["trees"][0]["total"][0]["money"] == pytest.approx(2 * rows["<Root>"]["money"])


def test_people_and_spreadsheets_read_it(site: Site) -> None:
    text = site.report("--savings")
    assert "all pools" in text
    assert "No control group: control_group_ratio of the agents makes one." in text
    rows = list(csv.DictReader(io.StringIO(site.report("--savings", "-o", "csv"))))
    extra = sum(float(row["extra_used_core_hours"]) for row in rows if row["pool"] == "waits")
    assert extra == pytest.approx(site.truth.extra_used["waits"] / HOUR_S, rel=WITHIN)
    for words in (["--pool", "waits"], ["--top", "3"], ["-o", "html"]):
        assert "--savings has text, csv and json, of all pools" in site.report("--savings", *words, code=64)
    assert "--price goes with --savings" in site.report("--price", "1", code=64)


def test_the_page_shows_it(site: Site, page: Any) -> None:
    open_page(page, f"{site.process.url}/", "#/savings")
    balance = page.get_by_role("region", name="Balance")
    expect(balance).to_contain_text("EUR")
    shown = float(balance.locator(".figure-number").first.inner_text().replace(",", ""))
    assert shown == pytest.approx(site.truth.extra_used["<Root>"] / HOUR_S, rel=WITHIN)
    expect(page.get_by_role("table", name="Savings by pool")).to_contain_text("waits")
