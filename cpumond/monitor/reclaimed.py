"""Simulate jobs that a scheduler starts on the CPU reclaimed from one job, the owner: how much of their work is lost.
The owner does not wait when its limit is raised: the jobs on its reclaimed CPU must end instead (limit_rules.md 1)."""

from __future__ import annotations

from typing import Final, NamedTuple


class ReclaimedJobs(NamedTuple):
    """Size of jobs on reclaimed CPU. ``ratio``: request of each job as a fraction of the owner's request, in (0, 1].
    ``length_s``: run time of a job at full CPU, > 0. ``wait_s``: time for which more jobs may run than fit, >= 0."""

    ratio: float = 1 / 16
    length_s: float = 120.0
    wait_s: float = 15.0


USUAL_JOBS: Final = ReclaimedJobs()
"""Jobs that run for two minutes. ``wait_s`` is the default of YTsaurus."""


class ReclaimedWork:
    """An endless queue of jobs in the idle class beside an owner that requests ``order_cores``.

    As many of these jobs run as fit between the owner's limit and request. They share evenly the CPU that the owner
    does not use, each up to its own request. If more jobs run than fit for longer than ``wait_s``, those started last
    end, and their work is lost."""

    def __init__(self, order_cores: float, jobs: ReclaimedJobs = USUAL_JOBS) -> None:
        self.order_cores = order_cores
        self._jobs = jobs
        self._done_cpu_s: list[float] = []
        self._waited_s = 0.0
        self.finished_cpu_s = self.lost_cpu_s = 0.0

    @property
    def kept_cpu_s(self) -> float:
        """Core-seconds of work of the jobs that have completed or still run."""
        return self.finished_cpu_s + sum(self._done_cpu_s)

    def add(self, limit_cores: float, used_cores: float, seconds: float) -> None:
        """Record that the owner used ``used_cores`` for ``seconds`` and that its limit is ``limit_cores`` now."""
        size = self.order_cores * self._jobs.ratio
        if self._done_cpu_s:
            left = max(self.order_cores - used_cores, 0.0) / len(self._done_cpu_s)
            done = [before + min(left, size) * seconds for before in self._done_cpu_s]
            needed_cpu_s = size * self._jobs.length_s
            self.finished_cpu_s += sum(each for each in done if each >= needed_cpu_s)
            self._done_cpu_s = [each for each in done if each < needed_cpu_s]
        room = int((self.order_cores - limit_cores) / size + 1e-9) if size > 0.0 else 0
        if len(self._done_cpu_s) <= room:
            self._waited_s = 0.0
            self._done_cpu_s += [0.0] * (room - len(self._done_cpu_s))
            return
        self._waited_s += seconds
        if self._waited_s > self._jobs.wait_s:
            self.lost_cpu_s += sum(self._done_cpu_s[room:])
            del self._done_cpu_s[room:]
            self._waited_s = 0.0
