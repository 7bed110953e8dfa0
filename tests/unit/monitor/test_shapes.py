"""Built-in shapes of load: the same for the same seed, and of the size they say."""

from itertools import cycle

import pytest

from cpumond.monitor.shapes import SHAPES, make_work

MEAN = {
    "steady": (0.29, 0.31), "idle": (0.003, 0.02), "diurnal": (0.44, 0.52), "ramp": (0.49, 0.51),
    "bursts": (0.07, 0.12), "timer": (0.07, 0.08), "cron": (0.03, 0.06), "web": (0.16, 0.24), "batch": (0.2, 0.45),
    "jvm": (0.15, 0.25), "map-reduce": (0.45, 0.75), "training": (0.21, 0.24), "build": (0.15, 0.5),
    "database": (0.15, 0.3),
}  # fmt: skip
"""Share of the order that is wanted on average in two hours, with any seed."""


def test_each_shape_is_looked_at_here():
    assert set(MEAN) == set(SHAPES)


@pytest.mark.parametrize(
    ("name", "order_cores", "seed"),
    [(name, *size) for name, size in zip(SHAPES, cycle([(16.0, 1), (0.5, 2), (64.0, 3)]))],
)
def test_a_shape_has_its_size_for_any_order(name, order_cores, seed):
    work = make_work(name, order_cores, seed, 7200.0)
    low, high = MEAN[name]
    assert len(work) == 72_000
    assert low <= sum(work) / 7200.0 / order_cores <= high
    assert min(work) >= 0.0
    assert max(work) <= 2.5 * order_cores * 0.1


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_seed_gives_the_same_and_another_another(name):
    work = make_work(name, 16.0, 1, 60.0)
    assert make_work(name, 16.0, 1, 60.0) == work
    assert make_work(name, 16.0, 2, 60.0) != work


def test_the_numbers_stay_the_same_from_version_to_version():
    """What a page or a ticket says about a shape and a seed can be looked at again."""
    web = [0.169542, 0.394858, 0.140928, 0.126025, 0.13238, 0.164743, 0.1, 0.132259]
    assert list(make_work("web", 16.0, 1, 0.8)) == pytest.approx(web, abs=1e-6)
    assert list(make_work("steady", 16.0, 7, 0.3)) == pytest.approx([0.488768, 0.479212, 0.495303], abs=1e-6)


def test_the_shortest_is_one_period():
    assert len(make_work("timer", 16.0, 1, 0.1)) == 1
    assert len(make_work("ramp", 16.0, 1, 0.01)) == 1
