"""Jobs of an operation that a retry policy starts again, from the end of the job before to their start; pure
(semantics.md 3.9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from cpumond.scheduler.elements.job_numbers import UNKNOWN, TaskNumbers
from cpumond.scheduler.model import OperationRecord, Task

KEPT: Final = "kept for a retry"
"""In place of a job's id: who has the cookie of a job that is to be started again."""
Place = tuple[str, int]
"""Task and cookie."""


def grow(task: Task, memory: int) -> Task:
    """The task as a job orders it that gets more memory than the others; the same one where it gets none."""
    return task if memory <= task.memory_limit else msgspec.structs.replace(task, memory_limit=memory, memory_reserve=0)


class RetryRun:
    """Where the next job of an operation is one that is started again."""

    __slots__ = ("later", "ready", "_numbers_of")

    def __init__(self, numbers_of: Callable[[str], TaskNumbers]) -> None:
        self.later: dict[Place, float] = {}
        """Those that wait -> their time, in seconds since 1970."""
        self.ready: dict[Place, int] = {}
        """Those whose time has come -> bytes that they order, 0 as their task says."""
        self._numbers_of = numbers_of

    def follow(self, record: OperationRecord, now: float) -> None:
        """Keep the places of all jobs of a record that are to be started again, and of no others."""
        wanted: dict[Place, tuple[float, int]] = {}
        for name, places in record.retried.places.items():
            numbers = self._numbers_of(name)
            for cookie, retry in places.items():
                is_kept = (name, cookie) in self.later or (name, cookie) in self.ready
                if cookie >= 0 and not numbers.is_done(cookie) and (is_kept or not numbers.is_taken(cookie)):
                    wanted[name, cookie] = retry.due, retry.memory
        for place in [*self.later, *self.ready]:
            if place not in wanted:
                self.release(place)
        counts = {task.name: task.job_count for task in record.tasks}
        for place, (due, memory) in wanted.items():
            self.keep(place, counts[place[0]], due, memory, now)

    def keep(self, place: Place, job_count: int, due: float, memory: int, now: float) -> None:
        """Let no other job have a place."""
        if place not in self.later and place not in self.ready:
            self._numbers_of(place[0]).take(KEPT, job_count, place[1])
        self.later.pop(place, None)
        self.ready.pop(place, None)
        if due > now:
            self.later[place] = due
        else:
            self.ready[place] = memory

    def release(self, place: Place) -> None:
        """Its job starts, or none is needed."""
        if self.later.pop(place, None) is not None or self.ready.pop(place, None) is not None:
            self._numbers_of(place[0]).give_back(place[1], KEPT)

    def choose(self, task: Task, own_memory: int, is_gang: bool) -> int:
        """The cookie of a job that is about to start as ``split`` has it: of one that is started again, if there is
        one; ``own_memory``: what its task says. UNKNOWN for none."""
        for (name, cookie), memory in self.ready.items():
            if name == task.name and (is_gang or max(memory, own_memory) == task.memory_limit):
                return cookie
        return UNKNOWN

    def count_later(self) -> Counter[str]:
        """Task -> jobs that are not to be started yet."""
        return Counter(name for name, _ in self.later)

    def split(self, record: OperationRecord, needed: Mapping[str, int]) -> list[tuple[Task, int]]:
        """What the jobs still to be started order, and how many do: the largest of each task first, of a gang all as
        the largest."""
        found: list[tuple[Task, int]] = []
        for task in record.tasks:
            left = needed.get(task.name, 0)
            if left > 0 and (record.is_gang or record.incarnations):
                most = max((each.memory for each in record.retried.places.get(task.name, {}).values()), default=0)
                found.append((grow(task, most), left))
                continue
            grown = Counter(memory for (name, _), memory in self.ready.items() if name == task.name)
            for memory in sorted(grown, reverse=True):
                if memory > task.memory_limit and left > 0:
                    number = min(grown[memory], left)
                    found.append((grow(task, memory), number))
                    left -= number
            if left > 0:
                found.append((task, left))
        return found
