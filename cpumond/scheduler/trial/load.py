"""Expected behaviour of jobs and users, as measured on known operations: run times, arrivals, reclaim. Pure.

Values of an operation come from the first of these groups with enough jobs: its own; those of similar operations (title
without numbers, task, user, pool); those of its user in its pool; those of its pool; those of its tree."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

from cpumond.scheduler.decide.run_times import ENOUGH, Kind, RunTimes, Seen, left_of
from cpumond.scheduler.model import OperationRecord, Task
from cpumond.scheduler.state import State

SETTLED_S: Final = 30.0
"""Seconds until the monitor has found a job's limit, as measured in the lab of limit rules."""
SPREAD: Final = 0.1
"""Standard deviation, as a fraction, of the run times of one operation from those of all jobs of the kind."""
DAY_S: Final = 86_400.0
RECENT_S: Final = 6 * 3600.0
"""If less than two days are known, arrivals are expected to be like those of the last RECENT_S seconds."""

LEAST_KNOWN_S: Final = 600.0
"""Minimum known period before any arrivals are expected."""
BLOCK_S: Final = 1800.0


class Experience:
    """The known past of the state: finished operations, and finished jobs of live operations."""

    def __init__(self, state: State, now: float) -> None:
        self.now = now
        self._known = RunTimes()
        self._found: dict[tuple[str, str], Seen] = {}
        self._doubts: dict[int, float] = {}
        self.arrivals: list[OperationRecord] = []
        """Operations that were started since ``since``, sorted by time."""
        records = [*state.finished.values(), *(each.record for each in state.operations.values())]
        for record in records:
            for job in state.finished_jobs.get(record.id, {}).values():
                self._known.see(record, job)
        finished = list(state.finished.values())
        # Operations that finished before the first one that is kept are not known.
        if len(finished) >= state.rules.finished_operation_retention_count:
            since = (finished[0].finish_time or 0.0) if finished else now
        else:
            since = min((each.start_time for each in records), default=now)
        self.since = max(since, now - 7 * DAY_S)
        self.arrivals = sorted(
            (each for each in records if each.start_time >= self.since), key=lambda each: each.start_time
        )

    def run_times(self, record: OperationRecord, task: Task) -> list[float]:
        """Return run times of jobs similar to those of the task, sorted; empty if none are known."""
        return self._find(record, task).run_s

    def kind_of(self, record: OperationRecord, task: Task) -> tuple[int, float]:
        """Return a number that identifies the jobs of ``run_times``, and the ``Seen.doubt`` of these jobs."""
        seen = self._find(record, task)
        if (doubt := self._doubts.get(id(seen))) is None:
            doubt = self._doubts[id(seen)] = seen.doubt()
        return id(seen), doubt

    def ratios(self, record: OperationRecord, task: Task) -> Sequence[float]:
        """Return the last limits of jobs similar to those of the task, as fractions of their requests."""
        return self._find(record, task).ratios

    def _find(self, record: OperationRecord, task: Task) -> Seen:
        key = record.id, task.name
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._known.find(record, task)
        return found


class Expected:
    """The usual load, for comparing two runs: a job runs as long as the median, and no user starts anything."""

    def __init__(self, experience: Experience) -> None:
        self._experience = experience

    def left_s(self, record: OperationRecord, task: Task, ran_s: float) -> float:
        return left_of(self._experience.run_times(record, task), ran_s, 0.5)

    def limit_of(self, record: OperationRecord, task: Task) -> tuple[float, float]:
        ratios = self._experience.ratios(record, task)
        return (sum(ratios) / len(ratios) if ratios else 1.0), SETTLED_S

    def next_arrival(self, after: float) -> tuple[float, OperationRecord] | None:
        return None


class Drawn:
    """One possible load, drawn at random."""

    def __init__(self, experience: Experience, rng: random.Random) -> None:
        self._experience = experience
        self._rng = rng
        self._scale: dict[Kind, float] = {}
        self._mean: dict[int, float] = {}
        """Kind of jobs -> the factor by which run times of its jobs differ from the known ones."""
        self._arrivals: Iterator[tuple[float, OperationRecord]] | None = None

    def left_s(self, record: OperationRecord, task: Task, ran_s: float) -> float:
        kind = ("operation", record.id, task.name)
        scale = self._scale.get(kind)
        if scale is None:
            number, doubt = self._experience.kind_of(record, task)
            if number not in self._mean:
                self._mean[number] = self._rng.lognormvariate(0.0, doubt)
            # The jobs of one operation deviate together from other jobs of their kind.
            scale = self._scale[kind] = self._rng.lognormvariate(0.0, SPREAD) * self._mean[number]
        return left_of(self._experience.run_times(record, task), ran_s / scale, self._rng.random()) * scale

    def limit_of(self, record: OperationRecord, task: Task) -> tuple[float, float]:
        ratios = self._experience.ratios(record, task)
        return (self._rng.choice(ratios) if ratios else 1.0), SETTLED_S

    def next_arrival(self, after: float) -> tuple[float, OperationRecord] | None:
        if self._arrivals is None:
            self._arrivals = self._replay(after)
        return next(self._arrivals, None)

    def _replay(self, at: float) -> Iterator[tuple[float, OperationRecord]]:
        """Yield blocks of the past one after another, each drawn at random: bursts of arrivals stay bursts."""
        now, arrivals = self._experience.now, self._experience.arrivals
        by_hour = now - self._experience.since >= 2 * DAY_S
        since = self._experience.since if by_hour else max(self._experience.since, now - RECENT_S)
        known_s = now - since
        times = [each.start_time for each in arrivals]
        if known_s < LEAST_KNOWN_S or len(times) - bisect_left(times, since) < ENOUGH:
            return
        block_s = min(BLOCK_S, known_s / ENOUGH)
        while True:
            if by_hour:  # take the same time of an earlier day
                least, most = math.ceil((at + block_s - now) / DAY_S), int((at - since) / DAY_S)
                begins = at - self._rng.randint(least, most) * DAY_S
            else:
                begins = since + self._rng.random() * known_s
            parts = [(begins, min(begins + block_s, now)), (since, since + begins + block_s - now)]
            shift_s = at - begins
            for first, last in parts:
                for each in arrivals[bisect_left(times, first) : bisect_left(times, last)]:
                    yield each.start_time + shift_s, each
                shift_s += known_s
            at += block_s
