"""Tables of pools and sums of cores: made in parts between heartbeats, and cached."""

from __future__ import annotations

import itertools

from cpumond.api import tables
from cpumond.api.json.kept import Kept
from cpumond.api.json.parts import in_parts
from cpumond.api.json.prepared import Prepared, compress, encode
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.service import Scheduler


class PoolTables:
    """Tables of pools of all trees."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = itertools.count(1)
        self._tables = Kept[Tree, Prepared](scheduler.clock.now)
        self._cores = Kept[Tree, tables.CoreSums](scheduler.clock.now)

    async def table_of(self, tree: Tree) -> Prepared:
        # A change of a pool is shown at once, and not only after the next update.
        return await self._tables.get(tree, lambda: self._make_table(tree), tree.config, version=tree.update_count)

    async def cores_of(self, tree: Tree) -> tables.CoreSums:
        """Return the cores requested and used by the jobs in and below each pool."""
        return await self._cores.get(tree, lambda: _sum_cores(tree), version=tree.update_count)

    async def _make_table(self, tree: Tree) -> Prepared:
        content = encode(tables.make_pool_table(tree, await self.cores_of(tree), self._scheduler.clock.now()))
        etag = f'W/"{tree.update_count}.{next(self._numbers)}-{self._scheduler.started_at:.3f}"'
        return Prepared(content, await compress(content), etag)


async def _sum_cores(tree: Tree) -> tables.CoreSums:
    sums = tables.CoreSums()
    async for elements in in_parts(list(tree.operations.values())):
        sums.add(elements)
    return sums.finish(tree)
