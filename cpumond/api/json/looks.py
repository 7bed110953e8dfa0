"""Looks at what the operations of trees wait for, in parts beside the heartbeats."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from cpumond.api.json.parts import in_parts
from cpumond.scheduler.answers.causes import Causes
from cpumond.scheduler.elements import Tree

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
    async for elements in in_parts(list(tree.operations.values())):
        begun = time.perf_counter()
        causes.add(elements)
        spent_s += time.perf_counter() - begun
    return causes, spent_s
