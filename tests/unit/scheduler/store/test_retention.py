"""When the store's log is cut, by the running scheduler."""

import asyncio

import pytest
from memory_log import MemoryLog
from watched_store import Watched

from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.store import Entry
from cpumond.scheduler.store.entries import CUT_ENTRIES
from cpumond.scheduler.store.retention import CUT_PERIOD_S, LogRetention

NOW = 1_000_000.0
DAY_S = 86_400.0


def make_entries(number: int, age_s: float = 0.0) -> list[Entry]:
    return [Entry(NOW - age_s, ("a",), b"")] * number


def count_left(store: Watched) -> int:
    return len(store.read_log(["a"], limit=10_000))


async def test_one_step_drops_a_bounded_number_and_the_next_ones_go_on(store: Watched) -> None:
    retention, writing = LogRetention(DAY_S, 2**30), asyncio.Lock()
    store.write([], make_entries(2 * CUT_ENTRIES + 10, 2 * DAY_S) + make_entries(7))
    left = []
    for period in range(4):
        await retention.cut_if_due(store, writing, NOW + period)
        left.append(count_left(store))
    assert left == [CUT_ENTRIES + 17, 17, 7, 7]


async def test_it_is_cut_once_an_hour(store: Watched) -> None:
    retention, writing = LogRetention(DAY_S, 2**30), asyncio.Lock()
    await retention.cut_if_due(store, writing, NOW)
    store.write([], make_entries(3, 2 * DAY_S))
    await retention.cut_if_due(store, writing, NOW + CUT_PERIOD_S - 1.0)
    assert count_left(store) == 3
    await retention.cut_if_due(store, writing, NOW + CUT_PERIOD_S)
    assert count_left(store) == 0


async def test_it_gets_no_larger_than_it_may(store: Watched) -> None:
    log = MemoryLog()
    log.add(log.make(make_entries(10)))
    retention = LogRetention(DAY_S, log.end.position)
    store.write([], make_entries(25))
    await retention.cut_if_due(store, asyncio.Lock(), NOW)
    assert [number for number, _ in store.read_log()] == list(range(25, 15, -1))


async def test_what_the_store_refuses_is_tried_an_hour_later(
    store: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    retention, writing = LogRetention(DAY_S, 2**30), asyncio.Lock()
    store.write([], make_entries(3, 2 * DAY_S))
    store.refusing = True
    for _ in range(2):
        await retention.cut_if_due(store, writing, NOW)
    assert capsys.readouterr().out.count("log_not_cut") == 1
    store.refusing = False
    await retention.cut_if_due(store, writing, NOW + CUT_PERIOD_S)
    assert count_left(store) == 0


async def test_the_running_scheduler_cuts_it(scheduler: Scheduler, store: Watched) -> None:
    scheduler.retention = LogRetention(DAY_S, 2**30)
    scheduler.update_period_s = 0.01
    store.write([], make_entries(CUT_ENTRIES + 10, 2 * DAY_S) + make_entries(7))
    stopping = asyncio.Event()
    running = asyncio.ensure_future(scheduler.run(stopping))
    while count_left(store) != 7:
        await asyncio.sleep(0.01)
    stopping.set()
    await running
