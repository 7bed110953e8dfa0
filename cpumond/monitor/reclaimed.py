"""Simulate jobs that a scheduler starts on the reclaimed CPU of one job: work that is kept, and work that is lost.

The owner's container is left alone. So the cost of raising its limit is not waiting time of the owner, but jobs that
have to end (limit_rules.md 1)."""

from __future__ import annotations

from typing import Final, NamedTuple


class ReclaimedJobs(NamedTuple):
    """Size of jobs on reclaimed CPU: ``ratio`` of the owner's request that each requests, in (0, 1]; ``length_s`` >
    0: run time at full CPU; ``wait_s`` >= 0: how long more of them may run than fit above the limit."""

    ratio: float = 1 / 16
    length_s: float = 120.0
    wait_s: float = 15.0


USUAL_JOBS: Final = ReclaimedJobs()
"""Jobs of two minutes; ``wait_s`` is the default of YTsaurus."""


class ReclaimedWork:
    """An endless queue of jobs in the idle class beside an owner that requests ``order_cores``.

    As many run as fit between limit and request. They share the owner's unused CPU evenly, each up to its request. If
    they exceed the space for longer than ``wait_s``, the youngest end and their work is lost.
    """

    def __init__(self, order_cores: float, jobs: ReclaimedJobs = USUAL_JOBS) -> None:
        self.order_cores = order_cores
        self._jobs = jobs
        self._done_cpu_s: list[float] = []
        self._waited_s = 0.0
        self.finished_cpu_s = self.lost_cpu_s = 0.0

    @property
    def kept_cpu_s(self) -> float:
        """Core-seconds of jobs that completed or still run."""
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
