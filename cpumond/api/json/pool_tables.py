"""Tables of pools and sums of cores: made in parts beside the heartbeats, and kept until the next update."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from cpumond.api import tables
from cpumond.api.json.parts import in_parts
from cpumond.api.json.prepared import Prepared, compress, encode
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.service import Scheduler

T = TypeVar("T")


class _Kept(Generic[T]):
    """A value of each tree, made once of what it depends on and shared by all who ask meanwhile. One that could not be
    made is made again."""

    def __init__(self, scheduler: Scheduler, make: Callable[[Tree], Coroutine[Any, Any, T]]) -> None:
        self._scheduler = scheduler
        self._make = make
        self._kept: dict[str, tuple[tuple[Any, ...], asyncio.Task[T]]] = {}

    async def get(self, tree: Tree, *depends_on: Any) -> T:
        known, made_of = self._kept.get(tree.name), (tree, tree.update_count, *depends_on)
        if known is None or known[0] != made_of or _has_failed(known[1]):
            self._kept = {name: each for name, each in self._kept.items() if name in self._scheduler.state.trees}
            known = self._kept[tree.name] = (made_of, asyncio.create_task(self._make(tree)))
        return await asyncio.shield(known[1])


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class PoolTables:
    """Those of all trees."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = itertools.count(1)
        self._tables = _Kept(scheduler, self._make_table)
        self._cores = _Kept(scheduler, _sum_cores)

    async def table_of(self, tree: Tree) -> Prepared:
        """All pools of a tree in short."""
        # A changed pool shows at once, not only with the next update.
        return await self._tables.get(tree, tree.config)

    async def cores_of(self, tree: Tree) -> tables.CoreSums:
        """Cores ordered and used by the jobs below each pool."""
        return await self._cores.get(tree)

    async def _make_table(self, tree: Tree) -> Prepared:
        content = encode(tables.make_pool_table(tree, await self.cores_of(tree), self._scheduler.clock.now()))
        etag = f'W/"{tree.update_count}.{next(self._numbers)}-{self._scheduler.started_at:.3f}"'
        return Prepared(content, await compress(content), etag)


async def _sum_cores(tree: Tree) -> tables.CoreSums:
    sums = tables.CoreSums()
    async for elements in in_parts(list(tree.operations.values())):
        sums.add(elements)
    return sums.finish(tree)
