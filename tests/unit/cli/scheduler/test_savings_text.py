"""Savings in text and CSV."""

from __future__ import annotations

import csv
import io
import time

import pytest

from cpumond.cli.scheduler.savings import render_savings, render_savings_csv
from cpumond.scheduler.history.savings import SavingsRow, SavingsTree, SavingsView, SavingsWeek, list_weeks

MONDAY = 1_772_409_600.0  # 2026-03-02, UTC
DAY_S = 86_400.0


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_weeks_are_those_of_utc_wherever_it_is_read(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        rows = [SavingsRow(name="<Root>", extra_used=4.0, gain=4.0)]
        weeks = [SavingsWeek(*times, 7 * DAY_S, rows) for times in list_weeks(MONDAY, MONDAY + 14 * DAY_S)]
        tree = SavingsTree("default", rows, weeks)
        view = SavingsView(since=MONDAY, until=MONDAY + 14 * DAY_S, covered_s=14 * DAY_S, trees=[tree])
        lines = render_savings(view, view.covered_s, None, False).splitlines()
        assert [line.split()[0] for line in lines if line.startswith("2026-03-") and "known" not in line] == [
            "2026-03-02",
            "2026-03-09",
        ]
        cells = list(csv.DictReader(io.StringIO(render_savings_csv(view))))
        assert [row["week_since"] for row in cells] == ["2026-03-02T00:00:00.000Z", "2026-03-09T00:00:00.000Z"]
    finally:
        monkeypatch.undo()
        time.tzset()
