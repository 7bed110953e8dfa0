"""Jobs of an operation that a retry policy starts again, from the end of a failed job to the start of the next; pure
(semantics.md 3.9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappush
from typing import Final

import msgspec

from cpumond.scheduler.elements.job_numbers import UNKNOWN, TaskNumbers
from cpumond.scheduler.model import OperationRecord, Retry, Task

KEPT: Final = "kept for a retry"
"""Stands for a job's id: holds the cookie of a job that is to be started again."""
Place = tuple[str, int]
"""Task and cookie."""


def grow(task: Task, memory: int) -> Task:
    """Return the task with the request of a job that gets more memory than the others; the same task if it gets
    none."""
    return task if memory <= task.memory_limit else msgspec.structs.replace(task, memory_limit=memory, memory_reserve=0)


class RetryRun:
    """Restarts among the next jobs of an operation."""

    __slots__ = ("later", "ready", "_operation_id", "_numbers_of", "_waits")

    def __init__(
        self, operation_id: str, numbers_of: Callable[[str], TaskNumbers], waits: list[tuple[float, str]]
    ) -> None:
        """``waits``: the heap of all operations (``State.retries``)."""
        self.later: dict[Place, float] = {}
        """Jobs that wait -> their time, in seconds since 1970."""
        self.ready: dict[Place, int] = {}
        """Jobs whose time has come -> bytes that they request; 0: as their task says."""
        self._operation_id = operation_id
        self._numbers_of = numbers_of
        self._waits = waits

    def has(self, place: Place) -> bool:
        return place in self.later or place in self.ready

    def follow(self, record: OperationRecord, now: float) -> None:
        """Keep the places of all jobs of a record that are to be started again, and of no others."""
        places = record.retried.places
        for name, cookie in [*self.later, *self.ready]:
            if cookie not in places[name] or self._numbers_of(name).is_done(cookie):
                self.release((name, cookie))
        for task in record.tasks:
            for cookie, retry in places.get(task.name, {}).items():
                self.keep(task, cookie, retry, now)

    def keep(self, task: Task, cookie: int, retry: Retry, now: float) -> None:
        """Keep other jobs from a place, unless a job has it or it is done."""
        place, numbers = (task.name, cookie), self._numbers_of(task.name)
        if not self.has(place):
            if cookie < 0 or not numbers.is_free(cookie):
                return
            numbers.take(KEPT, task.job_count, cookie)
        self.ready.pop(place, None)
        if retry.due <= now:
            self.later.pop(place, None)
            self.ready[place] = retry.memory
        elif self.later.get(place) != retry.due:
            self.later[place] = retry.due
            heappush(self._waits, (retry.due, self._operation_id))

    def release(self, place: Place) -> None:
        """Release a place: its job starts, or none is needed."""
        if self.later.pop(place, None) is not None or self.ready.pop(place, None) is not None:
            self._numbers_of(place[0]).give_back(place[1], KEPT)

    def choose(self, record: OperationRecord, task: Task) -> int:
        """Return the cookie for a job that is about to start as ``split`` has it: that of a retry if there is one;
        UNKNOWN: none."""
        own = next(each.memory_limit for each in record.tasks if each.name == task.name)
        for (name, cookie), memory in self.ready.items():
            if name == task.name and (record.starts_whole or max(memory, own) == task.memory_limit):
                return cookie
        return UNKNOWN

    def split(self, record: OperationRecord, needed: Mapping[str, int]) -> list[tuple[Task, int]]:
        """Return the requests of jobs still to be started and their numbers: the largest of each task first; all jobs
        of a gang as the largest."""
        found: list[tuple[Task, int]] = []
        for task in record.tasks:
            left = needed.get(task.name, 0)
            if record.starts_whole:
                places = record.retried.places.get(task.name, {}).values()
                grown = {max((each.memory for each in places), default=0): left}
            else:
                grown = Counter(memory for (name, _), memory in self.ready.items() if name == task.name)
            for memory in sorted({*grown, 0}, reverse=True):
                number = min(grown[memory], left) if memory > task.memory_limit else left
                if number > 0:
                    found.append((grow(task, memory), number))
                    left -= number
        return found
