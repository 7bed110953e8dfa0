"""What the requests do that show much at a glance."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from cpumond.api import views
from cpumond.api.glance_views import (
    OperationCounts,
    OperationGroups,
    PoolTrends,
    PreemptionGroups,
    group_preemptions,
)
from cpumond.api.json import glance_table
from cpumond.api.json.call import Call
from cpumond.api.node_views import list_fitting
from cpumond.scheduler.access import Rights
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.history.recorder import History
from cpumond.scheduler.history.trends import Trends
from cpumond.scheduler.model import RESOLVE, CommandError
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.why.causes import Causes

COUNTED_AT_ONCE: Final = 1000
"""Operations that are counted before something else has its turn."""

PAUSE: Final = 30.0
"""So many times what a look took it is kept: small clusters are looked at anew each time."""


class Looks:
    """Looks at what the operations of trees wait for: shared by all who ask, and kept for PAUSE times what it took."""

    def __init__(self) -> None:
        self._looks: dict[Tree, tuple[float, asyncio.Task[tuple[Causes, float]]]] = {}

    async def at(self, tree: Tree) -> Causes:
        """The last look at a tree, or a new one."""
        now = time.monotonic()
        until, task = self._looks.get(tree, (0.0, None))
        if task is None or now >= until:
            self._looks = {each: known for each, known in self._looks.items() if now < known[0]}
            task = asyncio.create_task(_look(tree))
            self._looks[tree] = (math.inf, task)
        try:
            causes, _ = await asyncio.shield(task)
        finally:
            if task.done() and self._looks.get(tree) == (math.inf, task):
                failed = task.cancelled() or task.exception() is not None
                self._looks[tree] = (0.0 if failed else time.monotonic() + PAUSE * task.result()[1], task)
        return causes


async def _look(tree: Tree) -> tuple[Causes, float]:
    """What the operations wait for, and the seconds that it took to find."""
    causes, spent_s = Causes(tree), 0.0
    elements = list(tree.operations.values())
    for start in range(0, len(elements), COUNTED_AT_ONCE):
        begun = time.perf_counter()
        causes.add(elements[start : start + COUNTED_AT_ONCE])
        spent_s += time.perf_counter() - begun
        await asyncio.sleep(0)
    return causes, spent_s


class GlanceHandlers:
    """A part of ``JsonApi``."""

    scheduler: Scheduler
    looks: Looks
    texts: views.SearchTexts

    async def read_texts(self) -> None:
        """Make what is searched."""
        raise NotImplementedError

    async def list_trends(self, call: Call) -> PoolTrends:
        query: glance_table.TrendsQuery = call.query
        tree = self.scheduler.state.find_tree(call.path["tree"])
        names = list(dict.fromkeys(filter(None, query.pools.split("\n"))))
        if len(names) > glance_table.MAX_TRENDS:
            raise CommandError(f"pools: {len(names)} names; ask for at most {glance_table.MAX_TRENDS} at once")
        history = self.find_history()
        until = self.scheduler.clock.now()
        since = max(until - query.since_s, history.describe().since or 0.0)
        if since >= until:
            return PoolTrends(tree.name, until, 0.0, {})
        found = await history.trends(tree.name, names, Trends(since, until, query.count))
        return PoolTrends(tree.name, since, (until - since) / query.count, found)

    def find_history(self) -> History:
        """Raises CommandError where there is none."""
        history = self.scheduler.history
        if history is None:
            raise CommandError("history is turned off: [history] length = 0", RESOLVE)
        return history

    async def group_operations(self, call: Call) -> OperationGroups:
        query: glance_table.GroupsQuery = call.query
        state = self.scheduler.state
        if query.search:
            await self.read_texts()
        records = views.choose_records(
            state, user=query.user, tree=query.tree, pool=query.pool, search=query.search, texts=self.texts,
            rights=Rights(state, call.user),
        )  # fmt: skip
        counts = OperationCounts(state, await self.find_causes(query.tree))
        for start in range(0, len(records), COUNTED_AT_ONCE):
            counts.add(records[start : start + COUNTED_AT_ONCE])
            await asyncio.sleep(0)
        return counts.finish()

    async def find_causes(self, tree: str = "") -> dict[str, Causes]:
        """What operations wait for, by tree, "" for all."""
        trees = self.scheduler.state.trees
        return {name: await self.looks.at(each) for name, each in list(trees.items()) if not tree or name == tree}

    async def group_preemptions(self, call: Call) -> PreemptionGroups:
        query: glance_table.PreemptionGroupsQuery = call.query
        state = self.scheduler.state
        rights = Rights(state, call.user)
        return group_preemptions(list_fitting(state, query.operation, query.pool, rights), rights)
