"""Jobs of an operation that a retry policy starts again. Each is kept here from the end of the failed job to the start
of its replacement; pure (semantics.md 3.9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappush
from typing import Final

import msgspec

from cpumond.scheduler.elements.job_numbers import UNKNOWN, TaskNumbers
from cpumond.scheduler.model import OperationRecord, Retry, Task

KEPT: Final = "kept for a retry"
"""Takes the place of a job id where a cookie is kept for a job that must be started again."""
Place = tuple[str, int]
"""Task and cookie."""


def grow(task: Task, memory: int) -> Task:
    """Return the task with ``memory`` as its ``memory_limit`` if that is more; else the same task. For jobs that get
    more memory than the others."""
    return task if memory <= task.memory_limit else msgspec.structs.replace(task, memory_limit=memory, memory_reserve=0)


class RetryRun:
    """The jobs of an operation that must be started again, with their places."""

    __slots__ = ("later", "ready", "_operation_id", "_numbers_of", "_waits")

    def __init__(
        self, operation_id: str, numbers_of: Callable[[str], TaskNumbers], waits: list[tuple[float, str]]
    ) -> None:
        """``waits``: the heap of the waiting retries of all operations (``State.retries``)."""
        self.later: dict[Place, float] = {}
        """Place of a job that waits -> time until which it waits, in seconds since 1970."""
        self.ready: dict[Place, int] = {}
        """Place of a job that need not wait any longer -> bytes that it requests; 0 for the value of its task."""
        self._operation_id = operation_id
        self._numbers_of = numbers_of
        self._waits = waits

    def has(self, place: Place) -> bool:
        return place in self.later or place in self.ready

    def follow(self, record: OperationRecord, now: float) -> None:
        """Keep the places of all jobs that must be started again according to the record; release all other places."""
        places = record.retried.places
        for name, cookie in [*self.later, *self.ready]:
            if cookie not in places[name] or self._numbers_of(name).is_done(cookie):
                self.release((name, cookie))
        for task in record.tasks:
            for cookie, retry in places.get(task.name, {}).items():
                self.keep(task, cookie, retry, now)

    def keep(self, task: Task, cookie: int, retry: Retry, now: float) -> None:
        """Keep a place for a retry, unless a job has the place or the place is done."""
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
        """Release a place, since its job starts or is no longer needed."""
        if self.later.pop(place, None) is not None or self.ready.pop(place, None) is not None:
            self._numbers_of(place[0]).give_back(place[1], KEPT)

    def choose(self, record: OperationRecord, task: Task) -> int:
        """Return the cookie of a retry that can start now; UNKNOWN if there is none. ``task``: one from ``split``."""
        own = next(each.memory_limit for each in record.tasks if each.name == task.name)
        for (name, cookie), memory in self.ready.items():
            if name == task.name and (record.starts_whole or max(memory, own) == task.memory_limit):
                return cookie
        return UNKNOWN

    def split(self, record: OperationRecord, needed: Mapping[str, int]) -> list[tuple[Task, int]]:
        """Return the requests of jobs still to be started, and the numbers of these jobs; for each task the largest
        request first. All jobs of a gang have the largest request."""
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
