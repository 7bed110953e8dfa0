"""The history of a running scheduler: the event loop's thread takes a tick per period, another does all disk work.

The history must not delay or fail updates, heartbeats or commands. The event loop only collects each tick and does the
last part of a report. All that waits for the disk is limited: ticks by MAX_WAITING_TICKS, readers in number and time,
the end of the scheduler by CLOSE_TIMEOUT_S. Ticks have priority over graphs, graphs over reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from cpumond.scheduler.elements import Job
from cpumond.scheduler.history.collector import Collector
from cpumond.scheduler.history.model import (
    DAY_S,
    POINTS_S,
    HistoryStatus,
    HistoryView,
    Key,
    NodeMap,
    ReportView,
    kind_number,
)
from cpumond.scheduler.history.report import list_pools, make_report
from cpumond.scheduler.history.savings import WEEK_S, SavingsView, list_arms, list_weeks, make_savings, monday_before
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.history.waste import JobsOf, WasteView, make_waste
from cpumond.scheduler.model import TIMEOUT, TOO_MANY_REQUESTS, CommandError, JobRecord, OperationRecord
from cpumond.scheduler.state import State
from cpumond.scheduler.store import StoreError

T = TypeVar("T")
log = structlog.get_logger("cpumond.scheduler")

MAX_WAITING_TICKS: Final = 30
"""Maximum number of ticks that wait for a slow disk. While this number waits, no tick is taken; the next one that is
taken covers this time, too."""
KEPT_ELEMENTS: Final = 20_000
TICK, GRAPH, REPORT, END = range(4)
"""Kinds of work, highest priority first."""
MAX_NODE_MOMENTS: Final = 300_000
"""Maximum number of values in a map of nodes over time."""
MAX_WAITING: Final = {GRAPH: 64, REPORT: 4}
"""Maximum number of reads that wait, without the running one; equal reads count once."""
NAMES: Final = {GRAPH: "graphs", REPORT: "reports"}
READ_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 10.0


class HistoryRecorder:
    """Takes, keeps and reads the history. Made and used in the event loop's thread; only the worker uses ``store``."""

    def __init__(self, store: HistoryStore, state: State, started_at: float, max_series: int) -> None:
        self.period_s, self.length_s = store.period_s, store.length_s
        self.collector = Collector(started_at, max_series)
        self.core_hour_price, self.currency = 0.0, ""
        self.lost_ticks = 0
        """Number of ticks that were not taken or that the store failed to add."""
        self.read_timeout_s = READ_TIMEOUT_S
        self.close_timeout_s = CLOSE_TIMEOUT_S
        self._store = store
        self._state = state
        self._waiting = 0
        self._taken = 0
        self._due_at = started_at + self.period_s
        self._is_failing = False
        self._is_closed = False
        self._shared: dict[Hashable, _Reading] = {}
        self._worker = _Worker()
        state.ended_elements = deque(maxlen=KEPT_ELEMENTS)

    def take_if_due(self, now: float) -> None:
        """Take a tick if it is due. Called often; never raises."""
        if now < self._due_at:
            return
        self._due_at += self.period_s
        if self._due_at <= now:
            self._due_at = now + self.period_s
        self.take(now)

    def take(self, now: float) -> None:
        """Take a tick now. Never raises."""
        if self._is_closed:
            return
        if self._waiting >= MAX_WAITING_TICKS:
            # Checked before anything is collected, so that the growth since the last tick is left for the next one.
            self._note_failure("history_does_not_answer")
            return
        try:
            tick = self.collector.collect(self._state, now)
        except Exception as error:
            self._note_failure("history_collect_failed", error)
            return
        if tick is None:
            return
        self._waiting += 1
        self._taken += 1
        self._worker.submit(TICK, partial(self._store.add, tick)).add_done_callback(self._added)

    def _added(self, answer: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            self._is_failing = False
        else:
            self._note_failure("history_add_failed", error)

    def _note_failure(self, event: str, error: BaseException | None = None) -> None:
        self.lost_ticks += 1
        if not self._is_failing:
            log.error(event, waiting_ticks=self._waiting, exc_info=error)
        self._is_failing = True

    async def read(
        self, kind: str, tree: str, name: str, since: float, now: float, max_points: int = 1500
    ) -> HistoryView:
        """Return the points of a series that end after ``since`` and not after ``now`` (scheduler time); none if the
        series is unknown.

        ``tree`` "" means any tree. If an operation is in several trees, its cores and jobs are added up; of ratios the
        largest is taken. Raises CommandError for an unknown kind, for ``max_points`` below 1, and if too many reads
        wait or the disk takes too long. Raises StoreError once the history is closed."""
        number = kind_number(kind)
        if max_points < 1:
            raise CommandError(f"max_points is {max_points}: it must be 1 or more")
        key = Key(number, tree if kind in ("pool", "operation") else "", name)
        asked = (key, self._round(since), self._round(now), max_points)
        return await self._share(GRAPH, asked, partial(self._store.read, key, since, now, max_points))

    async def trends(
        self, tree: str, pools: Sequence[str], since_s: float, now: float, count: int
    ) -> tuple[float, dict[str, list[float | None]]]:
        """Return ``HistoryStore.read_trends``; raises the same errors as ``read``."""
        asked = ("trends", tree, tuple(pools), since_s, self._round(now), count)
        return await self._share(GRAPH, asked, partial(self._store.read_trends, tree, pools, since_s, now, count))

    async def node_map(self, nodes: Sequence[str], measure: str, since: float, now: float, count: int) -> NodeMap:
        """Return ``HistoryStore.read_node_map``, with fewer moments for many nodes; raises as ``read`` does."""
        count = max(min(count, MAX_NODE_MOMENTS // max(len(nodes), 1)), 1)
        asked = ("node map", tuple(nodes), measure, self._round(since), self._round(now), count)
        work = partial(self._store.read_node_map, nodes, measure, since, now, count)
        return await self._share(REPORT, asked, work)

    async def report(self, since: float, now: float, tree: str | None = None, top: int = 100) -> ReportView:
        """Return core-hours of pools and operations between two moments (scheduler time), from the points that end
        between them. If ``since`` is older than POINTS_S: of pools and users, in whole UTC days.

        ``tree`` None means all trees; ``top``: number of operations of each tree. Raises CommandError if too many
        reports wait or the disk takes too long; StoreError once the history is closed."""
        top = max(top, 0)
        asked = (self._round(since), self._round(now), tree, top)
        if since < now - POINTS_S:
            since = since // DAY_S * DAY_S
            totals = await self._share(REPORT, asked, partial(self._store.sum_days, since, now, tree))
        else:
            totals = await self._share(REPORT, asked, partial(self._store.sum_points, since, now, tree, top))
        return make_report(self._state, totals, since, now, self.period_s, tree)

    async def savings(self, since: float, now: float, tree: str | None = None) -> SavingsView:
        """Return the value of reclaimed CPU between two moments, by week, in whole UTC days. Raises the same errors as
        ``report``, and CommandError for an unknown tree."""
        if tree is not None:
            self._state.find_tree(tree)
        # The worker gets the parts of the state that it needs, since only this thread may access the state.
        known = {name: list(list_pools(each)) for name, each in self._state.trees.items()}

        def work() -> SavingsView:
            weeks = [(times, self._store.sum_days(*times, tree)) for times in list_weeks(since // DAY_S * DAY_S, now)]
            days = self._store.read_days(list_arms(weeks), since, now)
            return make_savings(known, weeks, days, tree, self.core_hour_price, self.currency)

        return await self._share(REPORT, ("savings", self._round(since), self._round(now), tree), work)

    async def waste(
        self, now: float, weeks_ago: int = 1, tree: str = "", user: str = "", pool: str = "",
        readable: Callable[[list[OperationRecord]], list[OperationRecord]] = list, asker: str = "",
    ) -> WasteView:  # fmt: skip
        """Return the waste of a week, Monday to Monday in UTC; ``weeks_ago`` 0 is the present week so far. ``tree``,
        ``user``, ``pool``: if set, only waste of these. Classes consist of the operations that ``asker`` may read,
        selected by ``readable``. Raises the same errors as ``report``."""
        since = monday_before(now) - weeks_ago * WEEK_S
        until = min(since + WEEK_S, now)
        parents = {name: dict(list_pools(each)) for name, each in self._state.trees.items()}
        jobs = self._list_jobs(since, until, user, readable)

        def work() -> WasteView:
            totals = self._store.sum_days(since, until, tree or None)
            return make_waste(totals, since, until, now, jobs, parents, user, pool)

        return await self._share(REPORT, ("waste", asker, since, self._round(until), tree, user, pool), work)

    def _list_jobs(
        self, since: float, until: float, user: str, readable: Callable[[list[OperationRecord]], list[OperationRecord]]
    ) -> JobsOf:
        """Return operations that ran between two moments, each with its known jobs."""
        state = self._state
        records = [*state.finished.values(), *(each.record for each in state.operations.values())]
        mine = [each for each in records if user in ("", each.user)]
        in_time = [each for each in mine if each.start_time < until and (each.finish_time or until) > since]
        found: list[tuple[OperationRecord, list[JobRecord | Job]]] = []
        for record in readable(in_time):
            live = state.operations.get(record.id)
            elements = () if live is None else live.elements.values()
            jobs = [job for element in elements for job in element.jobs.values()]
            found.append((record, [*state.finished_jobs.get(record.id, {}).values(), *jobs]))
        return found

    def _round(self, at: float) -> int:
        return int(at // self.period_s)

    def view(self) -> HistoryStatus:
        """Return sizes and counts of the history, without waiting for the disk."""
        store = self._store
        return HistoryStatus(
            bytes=store.bytes,
            max_bytes=store.file.max_size,
            series=self.collector.series,
            left_out=self.collector.left_out,
            since=store.since,
            write_errors=store.file.errors + self.lost_ticks,
        )

    async def _share(self, kind: int, asked: Hashable, work: Callable[[], T]) -> T:
        """Return the result of ``work`` in the store's thread; equal pending requests between two ticks share it."""
        if self._is_closed:
            raise _closed()
        key = (kind, self._taken, asked)
        reading = self._shared.get(key)
        if reading is None:
            waiting = self._worker.count(kind)
            if waiting >= MAX_WAITING[kind]:
                raise CommandError(
                    f"{waiting} {NAMES[kind]} of the history are already pending, which is the limit; try again in a "
                    "moment",
                    TOO_MANY_REQUESTS,
                )
            reading = self._shared[key] = _Reading(self._worker.submit(kind, work))
        reading.readers += 1
        try:
            # A reader whose time is up must not cancel the result for the other readers.
            answer: T = await asyncio.wait_for(asyncio.shield(reading.answer), self.read_timeout_s)
        except TimeoutError:
            raise CommandError(
                f"the history did not respond within {self.read_timeout_s:g} s: it has too many requests, or its disk "
                "is slow; try again later, or request less",
                TIMEOUT,
            ) from None
        finally:
            reading.readers -= 1
            if not reading.readers:
                reading.answer.cancel()
                if self._shared.get(key) is reading:
                    del self._shared[key]
        return answer

    async def close(self, now: float) -> None:
        """Take a last tick, write pending data and close the file. Readers that still wait are refused. A disk that
        does not respond delays this by at most ``close_timeout_s``. A second call does nothing."""
        if self._is_closed:
            return
        self.take(now)
        self._is_closed = True
        for reading in self._shared.values():
            if not reading.answer.done():
                reading.answer.set_exception(_closed())
        closed = self._worker.submit(TICK, self._store.close)
        try:
            await asyncio.wait_for(closed, self.close_timeout_s)
        except TimeoutError:
            log.warning("history_not_closed", waited_s=self.close_timeout_s, effect="its newest points may be lost")
        finally:
            self._worker.end()


def _closed() -> StoreError:
    return StoreError("the history is closed because the scheduler is stopping; try again after its restart")


@dataclass(slots=True)
class _Reading:
    """A read for which one or more callers wait."""

    answer: asyncio.Future[Any]
    readers: int = 0


class _Worker:
    """The history's thread: one task at a time, the lowest kind first. It is a daemon thread: if a disk hangs, the
    threads of an executor would keep the process from ending."""

    def __init__(self) -> None:
        self._tasks = queue.PriorityQueue[tuple[int, int, Callable[[], Any], asyncio.Future[Any]]]()
        self._numbers = itertools.count()
        self._is_started = False

    def submit(self, kind: int, work: Callable[[], T]) -> asyncio.Future[T]:
        """The future result, for the running event loop. If it is cancelled before its turn, the work is skipped."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._tasks.put((kind, next(self._numbers), work, answer))
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, name="history", daemon=True).start()
        return answer

    def count(self, kind: int) -> int:
        """Return how many tasks wait for their turn. Cancelled tasks count: they show that the thread is busy."""
        return sum(task[0] == kind for task in list(self._tasks.queue))

    def end(self) -> None:
        """Let the thread end as soon as no task is left."""
        self.submit(END, lambda: None)

    def _run(self) -> None:
        while True:
            kind, _, work, answer = self._tasks.get()
            if kind == END:
                return
            if answer.done():
                continue
            try:
                resolve = partial(_answer, answer.set_result, answer, work())
            except Exception as error:
                resolve = partial(_answer, answer.set_exception, answer, error)
            with contextlib.suppress(RuntimeError):  # the event loop may be closed already
                answer.get_loop().call_soon_threadsafe(resolve)


def _answer(resolve: Callable[[Any], None], future: asyncio.Future[Any], what: object) -> None:
    if not future.done():
        resolve(what)
