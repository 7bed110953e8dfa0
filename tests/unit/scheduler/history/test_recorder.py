"""The history of a running scheduler: when it takes ticks, that nothing of it disturbs, what its end leaves."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scheduler_world import ServedNode, refused_with
from structlog.testing import capture_logs
from watched_store import make_scheduler

from cpumond.scheduler.history.collector import Collector
from cpumond.scheduler.history.model import OPERATION, HistoryView, Key, PeriodTotals, ReportView, Tick
from cpumond.scheduler.history.recorder import GRAPH, MAX_WAITING, MAX_WAITING_TICKS, REPORT, HistoryRecorder
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.model import ROOT_POOL, TIMEOUT, TOO_MANY_REQUESTS, CommandError
from cpumond.scheduler.program.exporter import MetricsText
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.store import StoreError

START = 1_000_000.0


class Held(HistoryStore):
    """A history whose disk answers only when it is let go. ``done``: what it was asked, in its order."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(None if path is None else str(path), 86_400.0, 10.0, 2**24, START)
        self.answer = threading.Event()
        self.is_asked = threading.Event()
        self.done: list[str] = []

    def _wait(self, what: str) -> None:
        self.is_asked.set()
        assert self.answer.wait(60.0)
        self.done.append(what)

    def add(self, tick: Tick) -> None:
        self._wait("add")
        super().add(tick)

    def read(self, key: Key, since: float, until: float, max_points: int) -> HistoryView:
        self._wait(f"read {key.name}")
        return super().read(key, since, until, max_points)

    def sum_points(self, since: float, until: float, tree: str | None, top: int) -> PeriodTotals:
        self._wait("report")
        return super().sum_points(since, until, tree, top)


@pytest.fixture
def held(scheduler, tmp_path):
    world = World(scheduler, tmp_path, Held())
    yield world
    world.store.answer.set()


class World:
    def __init__(self, scheduler: Scheduler, folder: Path, store: HistoryStore | None = None) -> None:
        self.scheduler, self.clock, now = scheduler, scheduler.clock, scheduler.started_at
        self.store = store or HistoryStore(str(folder / "history.db"), 86_400.0, 10.0, 2**24, now)
        self.history = HistoryRecorder(self.store, self.scheduler.state, now, 1000)
        self.scheduler.history = self.history

    async def run_a_job(self, used_s: float) -> str:
        node = ServedNode(self.scheduler, 8.0)
        await node.register()
        spec = {"pool": "p", "title": "<b>", "tasks": {"t": {"command": "true", "job_count": 1, "cpu_limit": 2.0}}}
        operation = (await self.scheduler.execute(StartOperation(spec), "ann")).id
        await self.scheduler.update_all()
        await node.beat()
        (job,) = node.jobs.values()
        job.current_cpu_limit, job.cpu_seconds = 1.5, used_s
        await node.beat()
        return operation


@pytest.fixture
def world(scheduler, tmp_path):
    return World(scheduler, tmp_path)


async def test_what_a_job_used_is_in_the_graphs_and_in_the_report(world):
    operation = await world.run_a_job(30.0)
    world.clock.at += 10.0
    world.history.take_if_due(world.clock.at)
    now = world.clock.at
    for kind, tree, name in (("pool", "default", "p"), ("pool", "default", ROOT_POOL), ("operation", "", operation)):
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
    savings = await world.history.savings(START, now)
    assert (savings.covered_s, [tree.tree for tree in savings.trees]) == (10.0, ["default"])
    assert (await world.history.report(START, now, top=0)).trees[0].left_out_operations == 1
    await world.history.close(now)


async def test_ticks_come_once_per_period_and_late_ones_are_not_made_up_for(world):
    for after_s in (0.0, 9.9, 10.0, 10.5, 19.0, 20.0, 75.0, 76.0, 85.0):
        world.history.take_if_due(START + after_s)
    view = await world.history.read("pool", "default", ROOT_POOL, START, START + 100.0)
    assert [time - START for time in view.times] == [10.0, 20.0, 75.0, 85.0]
    assert view.intervals == [10.0, 10.0, 55.0, 10.0]
    await world.history.close(START + 86.0)


async def test_bad_questions_are_refused(world):
    with pytest.raises(CommandError, match="kind"):
        await world.history.read("pools", "", "x", 0.0, 1.0)
    with pytest.raises(CommandError, match="max_points is 0: it must be 1 or more"):
        await world.history.read("pool", "", "x", 0.0, 1.0, 0)
    await world.history.close(START)


@pytest.mark.parametrize(
    ("of", "method", "event"),
    [(Collector, "collect", "history_collect_failed"), (HistoryStore, "add", "history_add_failed")],
)
async def test_a_tick_that_fails_is_said_once_and_counted_and_disturbs_nobody(world, monkeypatch, of, method, event):
    def fail(*_: Any) -> Tick:
        raise ZeroDivisionError

    with capture_logs() as logs, monkeypatch.context() as broken:
        broken.setattr(of, method, fail)
        for number in range(1, 4):
            world.history.take_if_due(START + 10.0 * number)
        await world.history.read("node", "", "n1", START, START)
    assert [entry["event"] for entry in logs] == [event]
    assert world.history.view().write_errors == 3
    world.history.take_if_due(START + 50.0)
    assert (await world.history.read("pool", "default", ROOT_POOL, START, START + 50.0)).times == [START + 50.0]
    await world.history.close(START + 50.0)


async def test_a_disk_that_does_not_answer_holds_up_nobody(held):
    with capture_logs() as logs:
        for number in range(1, MAX_WAITING_TICKS + 11):
            held.history.take_if_due(START + 10.0 * number)
            await held.scheduler.update_all()
    assert [entry["event"] for entry in logs].count("history_does_not_answer") == 1
    assert held.history.view().write_errors == 10
    held.store.answer.set()
    view = await held.history.read("pool", "default", ROOT_POOL, START, START + 1e6)
    assert len(view.times) == MAX_WAITING_TICKS
    await held.history.close(START + 1000.0)


async def test_what_begins_while_no_tick_can_be_taken_is_known_later(scheduler, tmp_path):
    path = tmp_path / "held.db"
    world = World(scheduler, tmp_path, Held(path))
    operation, at = "", START
    for number in range(1, MAX_WAITING_TICKS + 6):
        at += 10.0
        world.history.take_if_due(at)
        if number == MAX_WAITING_TICKS + 2:
            operation = await world.run_a_job(30.0)
    world.store.answer.set()
    for _ in range(60):
        await world.history.read("node", "", "n1", START, START)
        at += 10.0
        world.history.take_if_due(at)
    view = await world.history.read("operation", "", operation, START, at)
    assert len(view.times) == 60
    assert view.intervals[:2] == [60.0, 10.0]
    assert sum((v or 0.0) * s for v, s in zip(view.columns["used_cores"], view.intervals, strict=True)) == 30.0
    assert (len((await world.history.read("node", "", "n1", START, at)).times)) == 60
    assert (await world.history.report(START, at)).covered_s == at - START
    assert world.history.view().write_errors == world.history.lost_ticks == 5
    assert len(world.store._ticks) < 30
    await world.history.close(at + 10.0)
    assert [each.name for each in tmp_path.glob("held.db*")] == ["held.db"]
    again = HistoryStore(str(path), 86_400.0, 10.0, 2**24, START + 10_000.0)
    assert len(again.read(Key(OPERATION, "", operation), START, START + 10_000.0, 1000).times) == 61
    again.close()


async def hold(world: World) -> list[asyncio.Task[Any]]:
    """Let the store's thread be held up by a first question."""
    first = asyncio.create_task(world.history.read("node", "", "first", START, START))
    await asyncio.to_thread(world.store.is_asked.wait, 30.0)
    return [first]


async def test_equal_questions_at_the_same_time_are_worked_out_once(held):
    asked = await hold(held)
    asked += [asyncio.create_task(held.history.report(START + n / 1e3, START + 5.0 + n / 1e3)) for n in range(50)]
    asked += [asyncio.create_task(held.history.read("node", "", "n1", START, START + 5.0)) for _ in range(100)]
    asked += [asyncio.create_task(held.history.report(START, START + 5.0, None, 7))]
    await asyncio.sleep(0)
    asked[1].cancel()
    held.store.answer.set()
    assert sum(isinstance(each, BaseException) for each in await asyncio.gather(*asked, return_exceptions=True)) == 1
    assert sorted(held.store.done) == ["read first", "read n1", "report", "report"]
    await held.history.report(START, START + 5.0)
    assert held.store.done.count("report") == 3
    await held.history.close(START + 5.0)


async def test_ticks_go_before_graphs_and_graphs_before_reports(held):
    asked = await hold(held)
    asked.append(asyncio.create_task(held.history.report(START, START + 5.0)))
    await asyncio.sleep(0)
    asked.append(asyncio.create_task(held.history.read("node", "", "n1", START, START + 5.0)))
    await asyncio.sleep(0)
    held.history.take_if_due(START + 10.0)
    held.store.answer.set()
    await asyncio.gather(*asked)
    assert held.store.done == ["read first", "add", "read n1", "report"]
    await held.history.close(START + 15.0)


async def test_too_many_questions_are_refused_and_abandoned_ones_not_worked_out(held):
    asked = await hold(held)
    for top in range(MAX_WAITING[REPORT]):
        asked.append(asyncio.create_task(held.history.report(START, START, None, top)))
    for number in range(MAX_WAITING[GRAPH]):
        asked.append(asyncio.create_task(held.history.read("node", "", f"{number}", START, START)))
    await asyncio.sleep(0)
    with refused_with(TOO_MANY_REQUESTS, "4 reports of the history are already pending, which is the limit"):
        await held.history.report(START, START, None, 1000)
    with pytest.raises(CommandError, match="64 graphs of the history are already pending"):
        await held.history.read("node", "", "more", START, START)
    for each in asked[1:-1]:
        each.cancel()
    await asyncio.wait(asked[1:-1])
    held.store.answer.set()
    await asyncio.gather(*asked, return_exceptions=True)
    assert held.store.done == ["read first", f"read {MAX_WAITING[GRAPH] - 1}"]
    while held.history._worker.count(REPORT):  # those that were given up had their turn, too
        await asyncio.sleep(0)
    await held.history.report(START, START)
    await held.history.close(START)


async def test_who_waits_too_long_is_told(held):
    held.history.read_timeout_s = 0.05
    with refused_with(TIMEOUT, r"the history did not respond within 0\.05 s: .*disk is slow"):
        await held.history.report(START, START)
    held.store.answer.set()
    held.history.read_timeout_s = 30.0
    assert (await held.history.report(START, START)).trees
    await held.history.close(START)


async def test_the_end_waits_for_a_hanging_disk_by_a_bound_and_refuses_readers(held):
    asked = await hold(held)
    asked.append(asyncio.create_task(held.history.report(START, START)))
    await asyncio.sleep(0)
    held.history.close_timeout_s = 0.05
    with capture_logs() as logs:
        await held.history.close(START + 10.0)
    assert [entry["event"] for entry in logs] == ["history_not_closed"]
    for each in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(each, StoreError)
    with pytest.raises(StoreError, match="the history is closed"):
        await held.history.read("node", "", "n1", START, START)
    with pytest.raises(StoreError, match="the history is closed"):
        await held.history.report(START, START)
    held.history.take(START + 20.0)
    await held.history.close(START + 30.0)
    hanging = [each for each in threading.enumerate() if each.name == "history"]
    assert [each.daemon for each in hanging] == [True] * len(hanging) != [], "the process ends all the same"


async def test_the_loop_takes_ticks_and_its_end_writes_the_last(store, tmp_path):
    world = World(make_scheduler(store, Clock(100.0)), tmp_path)
    start = world.scheduler.started_at

    stopping = asyncio.Event()
    running = asyncio.create_task(world.scheduler.run(stopping))
    view = await world.history.read("pool", "default", ROOT_POOL, start, start + 1e6)
    while len(view.times) < 3:
        await asyncio.sleep(0.01)
        view = await world.history.read("pool", "default", ROOT_POOL, start, start + 1e6)
    stopping.set()
    await running
    store = HistoryStore(str(tmp_path / "history.db"), 86_400.0, 10.0, 2**24, start + 1e6)
    assert len(store._ticks) >= 4
    assert store._ticks[0].at - store._ticks[0].interval_s == start
    store.close()


async def test_the_history_says_how_large_it_is(world):
    metrics = MetricsText(world.scheduler, 10)
    world.history.take_if_due(START + 10.0)
    await world.history.read("pool", "default", "x", START, START)
    status = world.history.view()
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


def test_without_a_history_there_are_no_series_of_it(world):
    world.scheduler.history = None
    assert "cpumond_history" not in MetricsText(world.scheduler, 10).encode().decode()
    world.store.close()
