"""Load shapes for simulations: the demand of a job over time, identical for the same seed.

A shape can be made for a job of any size; ``order`` is the job's request in cores. In a shape that is described as a
program, work waits for earlier work; in all other shapes, work arrives from outside."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from itertools import count, islice
from random import Random
from typing import Final, NamedTuple

from cpumond.monitor.simulate import CFS_PERIOD_S

PERIOD_S: Final = CFS_PERIOD_S
"""Length in seconds of the periods for which a shape gives the demand."""
PER_SECOND: Final = round(1.0 / PERIOD_S)
DAY_S: Final = 3600.0
"""A day in a shape lasts one hour."""


class Shape(NamedTuple):
    """A load shape. ``about`` describes it. ``wants`` gets a random generator, the request and the duration, and yields
    the demand in cores for each period, at least until the duration is over; noise may make a demand negative."""

    about: str
    wants: Callable[[Random, float, float], Iterator[float]]


def make_work(name: str, order_cores: float, seed: int, duration_s: float) -> array[float]:
    """Return the core-seconds demanded by the shape ``name`` in each period of ``PERIOD_S``, for ``duration_s``.

    The demand at any time is at most 2.5 times the request."""
    # Each shape has its own sequence of random numbers, independent of those of other shapes.
    rng = Random(f"{name} {seed}")  # noqa: S311 - the same numbers for the same seed, and no secret
    wants = islice(SHAPES[name].wants(rng, order_cores, duration_s), max(round(duration_s / PERIOD_S), 1))
    return array("d", (min(max(cores, 0.0), 2.5 * order_cores) * PERIOD_S for cores in wants))


def _steady(rng: Random, order: float, _: float) -> Iterator[float]:
    while True:
        yield order * 0.3 * rng.gauss(1.0, 0.05)


def _idle(rng: Random, order: float, _: float) -> Iterator[float]:
    while True:
        yield from _level(rng, 0.004 * order, rng.expovariate(1 / 900.0), 0.3)
        yield from _level(rng, 0.5 * order, 5.0, 0.05)


def _diurnal(rng: Random, order: float, _: float) -> Iterator[float]:
    slow = _wander(rng, 5.0)
    for number in count():
        of_day = number * PERIOD_S / DAY_S
        mean = 0.48 - 0.42 * math.cos(2.0 * math.pi * of_day)
        yield order * mean * (1.0 + 0.06 * next(slow) + 0.02 * rng.gauss(0.0, 1.0))


def _ramp(rng: Random, order: float, duration_s: float) -> Iterator[float]:
    for number in count():
        share = 0.05 + 0.9 * min(number * PERIOD_S / duration_s, 1.0)
        yield order * share * rng.gauss(1.0, 0.02)


def _bursts(rng: Random, order: float, _: float) -> Iterator[float]:
    while True:
        share = 0.85 if rng.random() < 0.04 else 0.06
        yield from _level(rng, share * order, 1.0, 0.02)


def _timer(rng: Random, order: float, _: float) -> Iterator[float]:
    while True:
        yield order * 0.4 * rng.gauss(1.0, 0.03)
        yield from _level(rng, 0.04 * order, 0.9, 0.1)


def _cron(rng: Random, order: float, _: float) -> Iterator[float]:
    for minute in count():
        share, busy_s = (0.7, 20.0) if minute % 15 == 7 else (0.25, rng.uniform(3.0, 6.0))
        yield from _level(rng, share * order, busy_s, 0.05)
        yield from _level(rng, 0.012 * order, 60.0 - busy_s, 0.2)


def _web(rng: Random, order: float, _: float) -> Iterator[float]:
    """Each request of a client takes one core, which may be a 64th of a large job or all of a small job. The mean usage
    is a fifth of the job's cores."""
    one = min(max(1.0, order / 64.0), order)
    median_s, spread = 0.08, 1.4
    a_second = 0.2 * order / (one * median_s * math.exp(spread**2 / 2.0))
    running: list[float] = []  # remaining seconds of each request
    next_s = rng.expovariate(a_second)
    while True:
        used_s = 0.0
        while next_s < PERIOD_S:
            running.append(min(rng.lognormvariate(math.log(median_s), spread), 20.0))
            next_s += rng.expovariate(a_second)
        next_s -= PERIOD_S
        for left_s in running:
            used_s += min(left_s, PERIOD_S)
        running = [left_s - PERIOD_S for left_s in running if left_s > PERIOD_S]
        yield one * used_s / PERIOD_S


def _batch(rng: Random, order: float, _: float) -> Iterator[float]:
    while True:
        busy_s = min(rng.lognormvariate(math.log(15.0), 0.8), 120.0)
        yield from _level(rng, rng.choice((0.25, 0.4, 0.5, 0.75)) * order, busy_s, 0.05)
        yield from _level(rng, 0.02 * order, rng.uniform(1.0, 20.0), 0.1)


def _jvm(rng: Random, order: float, _: float) -> Iterator[float]:
    slow = _wander(rng, 30.0)
    pause = 0
    until_pause = rng.expovariate(1 / 25.0) * PER_SECOND
    for number in count():
        warming = 0.6 * math.exp(-number * PERIOD_S / 300.0)
        share = 0.16 + 0.05 * next(slow) + 0.02 * rng.gauss(0.0, 1.0) + warming
        if number >= until_pause:
            pause = 15 if rng.random() < 0.04 else rng.randint(1, 3)
            until_pause = number + pause + rng.expovariate(1 / 25.0) * PER_SECOND
        yield order * (0.95 if pause > 0 else share)
        pause -= 1


def _map_reduce(rng: Random, order: float, _: float) -> Iterator[float]:
    while True:
        yield from _level(rng, 0.92 * order, rng.uniform(400.0, 700.0), 0.04)
        yield from _level(rng, 0.25 * order, rng.uniform(100.0, 250.0), 0.1)
        yield from _level(rng, 0.03 * order, rng.uniform(100.0, 300.0), 0.2)


def _training(rng: Random, order: float, _: float) -> Iterator[float]:
    while True:
        for _step in range(1140):
            yield from _level(rng, 0.22 * order, 0.4, 0.05)
            yield from _level(rng, 0.09 * order, 0.1, 0.05)
        yield from _level(rng, 0.8 * order, 30.0, 0.05)


def _build(rng: Random, order: float, _: float) -> Iterator[float]:
    while True:
        yield from _level(rng, 0.006 * order, rng.expovariate(1 / 120.0), 0.2)
        yield from _level(rng, 0.06 * order, rng.uniform(10.0, 30.0), 0.1)
        yield from _level(rng, 0.96 * order, rng.uniform(30.0, 120.0), 0.03)
        yield from _level(rng, 0.06 * order, 10.0, 0.1)


def _database(rng: Random, order: float, _: float) -> Iterator[float]:
    slow = _wander(rng, 120.0)
    queries: list[int] = []  # remaining periods of each large query
    for number in count():
        if rng.random() < PERIOD_S / 10.0:
            queries.append(min(round(3 * rng.paretovariate(1.3)), 200))
        vacuum = 0.2 if number % 3000 >= 2400 else 0.0
        yield order * (0.13 + 0.03 * next(slow) + 0.012 * rng.gauss(0.0, 1.0) + vacuum + 0.25 * len(queries))
        queries = [left - 1 for left in queries if left > 1]


def _level(rng: Random, cores: float, seconds: float, noise: float) -> Iterator[float]:
    """Yield a constant level for ``seconds``, but at least one period, with relative noise in each period."""
    for _ in range(max(round(seconds * PER_SECOND), 1)):
        yield cores * rng.gauss(1.0, noise)


def _wander(rng: Random, memory_s: float) -> Iterator[float]:
    """Yield a random walk of variance 1 that tends back to 0."""
    keep = math.exp(-PERIOD_S / memory_s)
    push = math.sqrt(1.0 - keep * keep)
    value = rng.gauss(0.0, 1.0)
    while True:
        yield value
        value = keep * value + push * rng.gauss(0.0, 1.0)


SHAPES: Final[dict[str, Shape]] = {
    "steady": Shape("30 % of the request, always", _steady),
    "idle": Shape("almost nothing, and 5 s at half the request about every quarter of an hour", _idle),
    "diurnal": Shape("the curve of a day, from 6 to 90 %, in an hour", _diurnal),
    "ramp": Shape("from 5 to 95 % over the whole time", _ramp),
    "bursts": Shape("random seconds of 85 %, one in 25", _bursts),
    "timer": Shape("one busy tenth of each second", _timer),
    "cron": Shape("some seconds of 25 % every minute, 20 s of 70 % every quarter of an hour", _cron),
    "web": Shape("requests of one thread each, at random, some of them long", _web),
    "batch": Shape("phases of computing and of waiting for a disk (a program)", _batch),
    "jvm": Shape("warm-up, then some load and short garbage collections on all threads", _jvm),
    "map-reduce": Shape("minutes on all cores, on some, on none (a program)", _map_reduce),
    "training": Shape("a data loader, and a checkpoint of 30 s every 10 min (a program)", _training),
    "build": Shape("idle, configure, compile on all cores, link (a program)", _build),
    "database": Shape("a base load, large queries, and a vacuum every 5 min", _database),
}
"""Value of ``--shape`` -> the shape."""
