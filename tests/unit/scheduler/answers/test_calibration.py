"""Intervals that are corrected by how the last ones fared."""

import random

import msgspec
import pytest

from cpumond.scheduler.answers.calibration import ENOUGH, KEPT, LEAST_S, Calibration, Interval, is_inside, place_of
from cpumond.scheduler.model.forecast import Forecast

NOW = 1000.0


def test_before_the_first_start_an_interval_is_wider_than_the_runs() -> None:
    calibration = Calibration()
    told = calibration.correct_interval(Interval(1600.0, 2000.0, 2600.0), NOW)
    assert told.first is not None
    assert told.last is not None
    assert told.middle == pytest.approx(2000.0)
    assert 1400.0 < told.first < 1600.0
    assert 2600.0 < told.last < 2900.0
    assert calibration.inside_ratio is None
    assert calibration.describe() == []


@pytest.mark.parametrize(("bias", "spread"), [(0.0, 300.0), (0.0, 30.0), (-200.0, 100.0), (400.0, 200.0)])
def test_eight_of_ten_begin_inside_however_wrong_the_runs_are(bias: float, spread: float) -> None:
    rng, calibration = random.Random(7), Calibration()
    inside = []
    for number in range(3000):
        middle = NOW + 3000.0 + rng.uniform(0.0, 2000.0)
        raw = Interval(middle - 100.0, middle, middle + 100.0)
        told = calibration.correct_interval(raw, NOW)
        began = middle + bias + rng.gauss(0.0, spread)
        calibration.take(raw, told, began)
        if number >= KEPT:
            inside.append(is_inside(told, began))
    assert sum(inside) / len(inside) == pytest.approx(0.8, abs=0.025)
    assert (calibration.starts, calibration.inside_ratio) == (KEPT, sum(inside[-KEPT:]) / KEPT)
    assert calibration.describe() == [f"{calibration.inside_ratio:.0%} of the last 500 starts came when predicted"]


def test_what_is_not_known_stays_so_and_nothing_starts_in_the_past() -> None:
    calibration = Calibration()
    assert calibration.correct_interval(Interval(None, None, None), NOW) == (None, None, None)
    open_ended = calibration.correct_interval(Interval(1500.0, 2000.0, None), NOW)
    assert open_ended.first is not None
    assert open_ended.middle == 2000.0
    assert open_ended.last is None
    for _ in range(KEPT):
        calibration.take(Interval(1400.0, 1500.0, 1600.0), Interval(1400.0, 1500.0, 1600.0), NOW)
    assert calibration.correct_interval(Interval(1100.0, 1200.0, 1300.0), NOW) == (NOW, NOW, NOW)


def test_a_share_is_told_once_it_is_of_enough_starts() -> None:
    calibration = Calibration()
    for _ in range(ENOUGH - 1):
        calibration.take(Interval(1.0, 2.0, 3.0), Interval(1.0, 2.0, 3.0), 2.0)
    assert calibration.inside_ratio is None
    calibration.take(Interval(1.0, 2.0, 3.0), Interval(1.0, 2.0, 3.0), 4.0)
    assert calibration.inside_ratio == (ENOUGH - 1) / ENOUGH


def test_places_and_what_is_inside() -> None:
    raw = Interval(1600.0, 2000.0, 2600.0)
    assert [place_of(raw, at) for at in (1200.0, 1600.0, 2000.0, 2600.0)] == [-2.0, -1.0, 0.0, 1.0]
    assert place_of(Interval(2000.0, 2000.0, 2000.0), 2000.0 + LEAST_S) == 1.0
    assert place_of(Interval(1600.0, 2000.0, None), 2100.0) is None
    assert place_of(Interval(1600.0, None, None), 2100.0) is None
    assert is_inside(Interval(1.0, 2.0, None), 100.0)
    assert not is_inside(Interval(1.0, 2.0, None), 0.0)
    assert not is_inside(Interval(None, None, None), 0.0)


def test_the_first_forecast_of_an_operation_counts() -> None:
    calibration = Calibration()
    first = Forecast(operation_id="a", start_p10=20.0, start_p50=30.0, start_p90=60.0, as_of=0.0, horizon=99.0, runs=5)
    later = msgspec.structs.replace(first, start_p10=40.0, start_p50=50.0, start_p90=60.0, as_of=10.0)
    for number in range(ENOUGH):
        told = calibration.correct(msgspec.structs.replace(first, operation_id=f"op{number}"))
        assert msgspec.structs.replace(told, start_p10=20.0, start_p50=30.0, start_p90=60.0, operation_id="a") == first
        calibration.correct(msgspec.structs.replace(later, operation_id=f"op{number}"))
        calibration.settle(f"op{number}", 30.0)
    assert calibration.inside_ratio == 1.0
    assert not calibration.waiting


def test_started_and_never_starting_operations_are_not_counted() -> None:
    calibration = Calibration()
    started = Forecast(operation_id="a", started_at=1.0, as_of=2.0, horizon=9.0, runs=5)
    beyond = Forecast(operation_id="b", start_p10=5.0, as_of=2.0, horizon=9.0, runs=5)
    aborted = Forecast(operation_id="c", start_p10=3.0, start_p50=4.0, start_p90=8.0, as_of=2.0, horizon=9.0, runs=5)
    assert calibration.correct(started) is started
    assert calibration.correct(beyond) == beyond
    calibration.correct(aborted)
    assert list(calibration.waiting) == ["c"]
    calibration.settle("c", None)
    assert calibration.starts == 0
