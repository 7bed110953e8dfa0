"""Forecasts in words."""

from __future__ import annotations

from cpumond.cli.scheduler.forecast import show_start, tell_forecast
from cpumond.scheduler.model.forecast import Forecast


def test_a_foretold_start_that_has_passed_is_late_not_now() -> None:
    found = Forecast(operation_id="a", start_p10=5.0, start_p50=6.0, start_p90=7.0, as_of=0.0, horizon=99.0, runs=5)
    assert tell_forecast(found, 4.0) == ["starts in 1 s to 3 s (8 of 10 runs), 2 s in the middle"]
    [line] = tell_forecast(found, 20.0)
    assert line.startswith("should have started 13 s ago in nine of ten runs ahead, and has not")
    assert (show_start(5.0, 6.0, 7.0, 4.0), show_start(5.0, 6.0, 7.0, 20.0)) == ("1 s..3 s", "late")
