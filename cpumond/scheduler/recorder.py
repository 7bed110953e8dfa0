"""The history of a running scheduler: a tick per period from the event loop's thread, all disk work in another one.

Nothing of it may hold up or fail updates, heartbeats or commands. What it costs the event loop is the collecting of a
tick and the last part of a report.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

import structlog

from cpumond.scheduler.history import Collector, HistoryStatus, HistoryView, Key, ReportView, kind_number, make_report
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.state import State
from cpumond.scheduler.store.history import HistoryStore

P = ParamSpec("P")
T = TypeVar("T")
log = structlog.get_logger("cpumond.scheduler")

MAX_WAITING_TICKS: Final = 30
"""Ticks that a disk that does not answer may owe; the next ones are lost."""
KEPT_ELEMENTS: Final = 20_000


class History:
    """Takes, keeps and reads the history. Made and used in the event loop's thread; ``store`` belongs to its own."""

    def __init__(self, store: HistoryStore, state: State, started_at: float, max_series: int) -> None:
        self.period_s, self.length_s = store.period_s, store.length_s
        self.collector = Collector(started_at, max_series, store.known_ids, store.next_id)
        self.lost_ticks = 0
        self._store = store
        self._state = state
        self._waiting = 0
        self._due_at = started_at + self.period_s
        self._is_failing = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")
        state.ended_elements = deque(maxlen=KEPT_ELEMENTS)

    def look(self, now: float) -> None:
        """Take a tick if it is time; called often. Never raises."""
        if now < self._due_at:
            return
        self._due_at += self.period_s
        if self._due_at <= now:
            self._due_at = now + self.period_s
        self.take(now)

    def take(self, now: float) -> None:
        """Take a tick now. Never raises."""
        try:
            tick = self.collector.collect(self._state, now)
            self._is_failing = False
        except Exception:
            if not self._is_failing:
                log.exception("history_collect_failed")
            self._is_failing = True
            self.lost_ticks += 1
            return
        if tick is None:
            return
        if self._waiting >= MAX_WAITING_TICKS:
            self.lost_ticks += 1
            return
        self._waiting += 1
        future = self._thread.submit(self._store.add, tick)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._added) if not loop.is_closed() else None)

    def _added(self) -> None:
        self._waiting -= 1

    async def read(
        self, kind: str, tree: str, name: str, since: float, now: float, max_points: int = 1500
    ) -> HistoryView:
        """The points of a series that end after ``since`` and not after ``now`` (scheduler time); none if unknown.

        ``tree`` "" is any tree: an operation of several trees has its cores and jobs added up, of its ratios the
        largest. Raises CommandError for an unknown kind or ``max_points`` below 1.
        """
        number = kind_number(kind)
        if max_points < 1:
            raise CommandError(f"max_points is {max_points}: it is 1 or more")
        key = Key(number, tree if kind in ("pool", "operation") else "", name)
        return await self._run(self._store.read, key, since, now, max_points)

    async def report(self, since: float, now: float, tree: str | None = None, top: int = 100) -> ReportView:
        """What pools and operations came to between two moments (scheduler time), by the points that end in between.

        ``tree`` None is all trees; ``top`` operations of each.
        """
        sums, left_out, covered_s = await self._run(self._store.sum_up, since, now, tree, max(top, 0))
        return make_report(self._state, sums, left_out, since, now, covered_s, self.period_s, tree)

    def describe(self) -> HistoryStatus:
        """How large it is; answers at once."""
        store = self._store
        return HistoryStatus(
            bytes=store.bytes,
            max_bytes=store.max_size,
            series=self.collector.series,
            left_out=self.collector.left_out,
            since=store.since,
            write_errors=store.write_errors + self.lost_ticks,
        )

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))

    async def close(self, now: float) -> None:
        """Take a last tick, write what is waiting, let go of the file."""
        self.take(now)
        await self._run(self._store.close)
        self._thread.shutdown()
