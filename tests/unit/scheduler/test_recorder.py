"""The history of a running scheduler: when it takes ticks, that nothing of it disturbs, what its end leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from cpumond.scheduler.commands import Rules
from cpumond.scheduler.exporter import MetricsText
from cpumond.scheduler.history import Collector, HistoryView, ReportView, Tick
from cpumond.scheduler.loop import Clock, Scheduler
from cpumond.scheduler.model import ROOT_POOL, CommandError
from cpumond.scheduler.operations import StartOperation
from cpumond.scheduler.recorder import MAX_WAITING_TICKS, History
from cpumond.scheduler.store.history import HistoryStore
from cpumond.scheduler.store.sqlite import open_sqlite_store
from cpumond.wire import Heartbeat, JobReport, NodeRegistration, NodeResources

START = 1_000_000.0


class FakeClock(Clock):
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.at = START

    def now(self) -> float:
        return self.at


class World:
    """A scheduler with one node and a history."""

    def __init__(self, folder: Path, clock: Clock, store: HistoryStore | None = None) -> None:
        self.clock = clock
        self.state_store = open_sqlite_store(str(folder / "scheduler.db"))
        self.scheduler = Scheduler(Rules(), self.state_store, clock)
        now = self.scheduler.started_at
        self.store = store or HistoryStore(str(folder / "history.db"), 86_400.0, 10.0, 2**24, now)
        self.history = History(self.store, self.scheduler.state, now, 1000)
        self.scheduler.history = self.history

    async def run_a_job(self, used_s: float) -> str:
        resources = NodeResources(cpu=8.0, memory=2**34)
        await self.scheduler.register(NodeRegistration("n1", "i1", resources))
        spec = {"pool": "p", "title": "<b>", "tasks": {"t": {"job_count": 1, "cpu_limit": 2.0}}}
        operation = (await self.scheduler.execute(StartOperation(spec), "ann")).id
        await self.scheduler.update_all()
        answer = await self.scheduler.heartbeat(Heartbeat("n1", "i1", 1, 0.0, 8.0, []))
        (order,) = answer.start
        job = JobReport(order.job_id, operation, 2.0, 1.5, from_scheduler=True, task="t", cpu_seconds=used_s)
        await self.scheduler.heartbeat(Heartbeat("n1", "i1", 2, 0.0, 8.0, [job]))
        return operation

    def close(self) -> None:
        self.state_store.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, FakeClock())
    yield world
    world.close()


def test_what_a_job_used_is_in_the_graphs_and_in_the_report(world):
    async def work() -> None:
        operation = await world.run_a_job(30.0)
        world.clock.at += 10.0
        world.history.look(world.clock.at)
        now = world.clock.at
        for kind, tree, name in (
            ("pool", "default", "p"),
            ("pool", "default", ROOT_POOL),
            ("operation", "", operation),
        ):
            view = await world.history.read(kind, tree, name, START, now)
            assert isinstance(view, HistoryView)
            assert (view.times, view.intervals, view.columns["used_cores"]) == ([now], [10.0], [3.0])
        assert (await world.history.read("node", "x", "n1", START, now)).columns["limit_cores"] == [1.5]
        assert (await world.history.read("pool", "default", "unknown", START, now)).times == []
        report = await world.history.report(START, now)
        assert isinstance(report, ReportView)
        (tree,) = report.trees
        assert (report.covered_s, tree.total.used, tree.pools[0].name) == (10.0, 30.0 / 3600.0, "p")
        (shown,) = tree.operations
        assert (shown.name, shown.title, shown.user, shown.state) == (operation, "<b>", "ann", "running")
        assert shown.limit == pytest.approx(15.0 / 3600.0)
        assert msgspec.json.decode(msgspec.json.encode(report))["trees"][0]["total"]["peak_limit_cores"] == 1.5
        assert (await world.history.report(START, now, "other")).trees == []
        assert (await world.history.report(START, now, top=0)).trees[0].left_out_operations == 1
        await world.history.close(now)

    run(work())


def test_ticks_come_once_per_period_and_late_ones_are_not_made_up_for(world):
    async def work() -> None:
        for after_s in (0.0, 9.9, 10.0, 10.5, 19.0, 20.0, 75.0, 76.0, 85.0):
            world.history.look(START + after_s)
        view = await world.history.read("pool", "default", ROOT_POOL, START, START + 100.0)
        assert [time - START for time in view.times] == [10.0, 20.0, 75.0, 85.0]
        assert view.intervals == [10.0, 10.0, 55.0, 10.0]
        await world.history.close(START + 86.0)

    run(work())


def test_bad_questions_are_refused(world):
    async def work() -> None:
        with pytest.raises(CommandError, match="kind"):
            await world.history.read("pools", "", "x", 0.0, 1.0)
        with pytest.raises(CommandError, match="max_points is 0: it is 1 or more"):
            await world.history.read("pool", "", "x", 0.0, 1.0, 0)
        await world.history.close(START)

    run(work())


def test_a_collector_that_fails_is_said_once_and_disturbs_nobody(world, monkeypatch):
    def fail(*_: Any) -> Tick:
        raise ZeroDivisionError

    async def work() -> None:
        monkeypatch.setattr(Collector, "collect", fail)
        with capture_logs() as logs:
            for number in range(1, 4):
                world.history.look(START + 10.0 * number)
        assert [entry["event"] for entry in logs] == ["history_collect_failed"]
        assert world.history.describe().write_errors == 3
        monkeypatch.undo()
        world.history.look(START + 50.0)
        assert (await world.history.read("pool", "default", ROOT_POOL, START, START + 50.0)).times == [START + 50.0]
        await world.history.close(START + 50.0)

    run(work())


def test_a_disk_that_does_not_answer_holds_up_nobody(tmp_path):
    answer = threading.Event()

    class Slow(HistoryStore):
        def add(self, tick: Tick) -> None:
            answer.wait(30.0)
            super().add(tick)

    async def work() -> None:
        for number in range(1, MAX_WAITING_TICKS + 11):
            world.history.look(START + 10.0 * number)
            await world.scheduler.update_all()
        assert world.history.describe().write_errors == 10
        answer.set()
        view = await world.history.read("pool", "default", ROOT_POOL, START, START + 1e6)
        assert len(view.times) == MAX_WAITING_TICKS
        await world.history.close(START + 1000.0)

    world = World(tmp_path, FakeClock(), Slow(None, 86_400.0, 10.0, 2**24, START))
    try:
        run(work())
    finally:
        world.close()


def test_the_loop_takes_ticks_and_its_end_writes_the_last(tmp_path):
    world = World(tmp_path, Clock(100.0))
    start = world.scheduler.started_at

    async def work() -> None:
        stopping = asyncio.Event()
        running = asyncio.create_task(world.scheduler.run(stopping))
        view = await world.history.read("pool", "default", ROOT_POOL, start, start + 1e6)
        while len(view.times) < 3:
            await asyncio.sleep(0.01)
            view = await world.history.read("pool", "default", ROOT_POOL, start, start + 1e6)
        stopping.set()
        await running

    run(work())
    world.close()
    store = HistoryStore(str(tmp_path / "history.db"), 86_400.0, 10.0, 2**24, start + 1e6)
    assert len(store._ticks) >= 4
    assert store._ticks[0].at - store._ticks[0].interval_s == start
    store.close()


def test_the_history_says_how_large_it_is(world):
    async def work() -> None:
        metrics = MetricsText(world.scheduler, 10)
        world.history.look(START + 10.0)
        await world.history.read("pool", "default", "x", START, START)
        status = world.history.describe()
        assert (status.series, status.left_out, status.since, status.write_errors) == (1, 0, START, 0)
        assert 0 < status.bytes <= status.max_bytes == 2**24
        text = metrics.encode().decode()
        for line in (
            f"cpumond_history_bytes {float(status.bytes)}",
            "cpumond_history_series 1.0",
            "cpumond_history_left_out_series 0.0",
            "cpumond_history_write_errors_total 0.0",
            'cpumond_pool_ordered_cpu_seconds_total{tree="default",pool="<Root>"} 0.0',
            'cpumond_pool_throttled_cpu_seconds_total{tree="default",pool="<Root>"} 0.0',
            'cpumond_pool_late_cpu_seconds_total{tree="default",pool="<Root>"} 0.0',
        ):
            assert f"{line}\n" in text
        await world.history.close(START + 11.0)

    run(work())


def test_without_a_history_there_are_no_series_of_it(world):
    world.scheduler.history = None
    assert "cpumond_history" not in MetricsText(world.scheduler, 10).encode().decode()
    world.store.close()
