"""Savings of some hours whose truth is known, by the command line, in all and by week."""

import csv
import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from commands import run_command
from played_week import WEEK_S, PlayedWeek, Truth
from scheduler_process import SchedulerProcess, clean_environment

WITHIN = 0.03
HOUR_S = 3600.0
DAY_S = 86_400.0
LENGTH_S = 8 * HOUR_S
FIRST_END_S = 4 * DAY_S + LENGTH_S / 2
"""Within the first Monday, after the Thursday on which times begin."""


@dataclass
class Site:
    process: SchedulerProcess
    truth: Truth

    def report(self, *words: str, code: int = 0) -> str:
        done = run_command(["report", "--scheduler", self.process.url, *words], clean_environment())
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With the history of some hours, half of them before a Monday, half on it: two weeks have a part."""
    with SchedulerProcess(tmp_path_factory.mktemp("savings")) as process:
        process.state_dir.mkdir(mode=0o700)
        end_s = (time.time() - FIRST_END_S) // WEEK_S * WEEK_S + FIRST_END_S
        week = PlayedWeek(str(process.state_dir / "history.db"), until=end_s, length_s=LENGTH_S)
        truth = week.play()
        week.store.close()
        process.write_config('[history]\nlength = "35d"\nperiod = "60s"\ncore_hour_price = 0.04\ncurrency = "EUR"\n')
        process.start()
        yield Site(process, truth)


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
    told = site.report("--savings", "--pool", "waits", code=64)
    assert "--savings covers all pools: leave --pool and --top out" in told
    assert "--price goes with --savings" in site.report("--price", "1", code=64)
