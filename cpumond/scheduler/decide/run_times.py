"""Run times of completed jobs, by kind: of an operation, of similar operations, of its user, its pool, its tree. Pure.

A task uses the first of these kinds with enough jobs. Times are seconds."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import fmean, stdev
from typing import Final

from cpumond.scheduler.model import JobRecord, OperationRecord, Task

ENOUGH: Final = 4
"""Minimum number of jobs for a distribution; of the operation's own jobs, one is enough."""
MOST: Final = 400
"""Maximum number of jobs of one kind that are kept: the latest ones."""
UNKNOWN_S: Final = 300.0
"""Expected run time of a job about which nothing is known, unless it has already run for longer."""
MOST_DOUBT: Final = 0.5

Kind = tuple[str, ...]


class Seen:
    """The latest completed jobs of one kind."""

    __slots__ = ("_latest", "_sorted", "ratios")

    def __init__(self, run_s: Iterable[float] = ()) -> None:
        self._latest = deque(run_s, MOST)
        self._sorted: list[float] | None = None
        self.ratios: deque[float] = deque(maxlen=MOST)
        """The last limits of these jobs, as fractions of their requests."""

    def add(self, job: JobRecord) -> None:
        self._latest.append(max(job.finish_time - job.start_time, 0.0))
        self._sorted = None
        if job.cpu_limit > 0.0:
            self.ratios.append(min(job.current_cpu_limit / job.cpu_limit, 1.0))

    @property
    def run_s(self) -> list[float]:
        """The run times of these jobs, sorted."""
        if self._sorted is None:
            self._sorted = sorted(self._latest)
        return self._sorted

    def doubt(self) -> float:
        """Return the standard error of the mean run time, as a fraction of the mean."""
        run_s = self.run_s
        if len(run_s) < 2 or not run_s[-1]:
            return 0.0
        return min(stdev(run_s) / fmean(run_s) / math.sqrt(len(run_s)), MOST_DOUBT)


class RunTimes:
    """The latest jobs of all kinds. Beyond ``most_kinds``, the kinds not seen for longest are dropped."""

    def __init__(self, most_kinds: int | None = None) -> None:
        self._seen: dict[Kind, Seen] = {}
        self._most_kinds = most_kinds

    def see(self, record: OperationRecord, job: JobRecord) -> None:
        task = next((task for task in record.tasks if task.name == job.task), None)
        if job.state != "completed" or task is None:
            return
        for kind in kinds_of(record, task):
            seen = self._seen.pop(kind) if kind in self._seen else Seen()
            seen.add(job)
            self._seen[kind] = seen
        while self._most_kinds is not None and len(self._seen) > self._most_kinds:
            del self._seen[next(iter(self._seen))]

    def find(self, record: OperationRecord, task: Task) -> Seen:
        """Return the jobs that are most similar to those of the task; empty if no similar job is known."""
        for number, kind in enumerate(kinds_of(record, task)):
            seen = self._seen.get(kind)
            if seen is not None and len(seen.run_s) >= (ENOUGH if number else 1):
                return seen
        return _NOTHING


_NOTHING: Final = Seen()


def kinds_of(record: OperationRecord, task: Task) -> Iterator[Kind]:
    """Yield the kinds of the task's jobs, the narrowest first."""
    yield "operation", record.id, task.name
    tree, options = next(iter(record.trees.items()))
    yield "like", tree, options.pool, record.user, re.sub(r"\d+", "#", record.title), task.name
    yield "user", tree, options.pool, record.user
    yield "pool", tree, options.pool
    yield "tree", tree


def left_of(run_s: list[float], ran_s: float, at: float) -> float:
    """The remaining run time of a job after ``ran_s``: the quantile ``at`` (0 to 1) of run times longer than that."""
    first = bisect_right(run_s, ran_s)
    longer = len(run_s) - first
    if longer:
        return run_s[first + min(int(at * longer), longer - 1)] - ran_s
    # The job has run longer than any job before: expect it to run for as long as it has run.
    return max(ran_s, UNKNOWN_S if not run_s else 0.0) * 2.0 * at
