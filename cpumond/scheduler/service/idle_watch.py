"""Reports of idle CPU, computed in a copy of the process while updates and heartbeats continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from cpumond.scheduler.answers.idle import IdleReport
from cpumond.scheduler.answers.idle_trials import look_into_idle
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.state import State
from cpumond.scheduler.trial.fork import ask

log = structlog.get_logger("cpumond.scheduler")

PERIOD_S: Final = 5.0
"""Seconds between automatic reports, for metrics and the history."""
MAX_LOAD: Final = 0.02
"""Maximum fraction of time that automatic reports may take. If they take more, they are made less often."""
MAX_LOAD_ASKED: Final = 0.2
"""Maximum fraction of time that requested reports may take if a report takes more than QUICK_S of CPU time."""
QUICK_S: Final = 0.2
FRESH_S: Final = 5.0
"""Age in seconds from which a report is computed again on request."""

_Basis = tuple[object, ...]


class IdleWatch:
    """The last report of each tree. Only the event loop's thread may use it."""

    def __init__(self, state: State, now: Callable[[], float]) -> None:
        self._state = state
        self._now = now
        self.reports: dict[str, IdleReport] = {}
        self._made_of: dict[str, _Basis] = {}
        self._making: dict[str, asyncio.Task[IdleReport]] = {}
        self._round: asyncio.Task[None] | None = None
        self._took_s: dict[str, float] = {}
        self._due = 0.0

    def take_if_due(self) -> None:
        """Start to compute all reports if this is due and not in progress."""
        if time.monotonic() >= self._due and (self._round is None or self._round.done()):
            self._round = asyncio.ensure_future(self._take_all())

    async def read(self, tree: Tree) -> IdleReport:
        """Return a report on the tree, computed now or, if no update was made since, less than FRESH_S ago."""
        report, basis, made_of = self.reports.get(tree.name), _basis(tree), self._made_of.get(tree.name)
        if report is not None and made_of is not None:
            age_s = self._now() - report.as_of
            is_same = made_of == basis and age_s < FRESH_S
            took_s = self._took_s.get(tree.name, 0.0)
            # Repeated requests must not keep a thread busy. If the configuration changed, there is always a new report.
            if is_same or (made_of[:2] == basis[:2] and age_s < took_s / MAX_LOAD_ASKED and took_s > QUICK_S):
                return report
        report = await self._wait_for_one(tree)
        if self._made_of[tree.name][1] is not basis[1] and self._state.trees.get(tree.name) is tree:
            # The report in progress began before the configuration changed. The next report includes the change.
            report = await self._wait_for_one(tree)
        return report

    async def _wait_for_one(self, tree: Tree) -> IdleReport:
        """Wait for the report in progress; if there is none, start one and wait for that."""
        making = self._making.get(tree.name)
        if making is None or making.done():
            making = self._making[tree.name] = asyncio.ensure_future(self._take(tree))
        return await asyncio.shield(making)

    async def close(self) -> None:
        tasks = [each for each in (self._round, *self._making.values()) if each is not None and not each.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_all(self) -> None:
        begun = time.monotonic()
        for tree in list(self._state.trees.values()):
            try:
                await self.read(tree)
            except Exception:
                log.exception("idle_report_failed", tree=tree.name)
        self.reports = {name: each for name, each in self.reports.items() if name in self._state.trees}
        ended = time.monotonic()
        self._due = max(begun + PERIOD_S, ended + (ended - begun) / MAX_LOAD)

    async def _take(self, tree: Tree) -> IdleReport:
        now, state, basis = self._now(), self._state, _basis(tree)
        report, cpu_s = await ask(lambda: look_into_idle(state, tree, now), IdleReport)
        self.reports[tree.name], self._made_of[tree.name] = report, basis
        self._took_s[tree.name] = cpu_s
        parts = report.parts
        tree.root.idle_cores = parts.starting + parts.without_work + parts.held_back
        for pool in (tree.root, *tree.pools.values()):
            pool.held_cores = report.held_by_pool.get(pool.name, 0.0)
        tree.root.held_cores = parts.held_back
        return report


def _basis(tree: Tree) -> _Basis:
    return (tree, tree.config, tree.update_count, tree.root.running_operation_count, tree.root.operation_count)
