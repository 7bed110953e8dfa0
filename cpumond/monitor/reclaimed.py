"""What comes of jobs that a scheduler starts on the CPU of one job: work that is kept, and work thrown away.

The owner's container is left alone, so what a limit costs is not time that the owner waits but jobs that have to end
again when it is raised (limit_rules.md 1).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class ReclaimedJobs(NamedTuple):
    """``ratio`` of the owner's order that each job orders, in (0, 1]; ``length_s`` > 0: how long one runs where it gets
    all of it; ``wait_s`` >= 0: how long there may be more of them than fit above the limit."""

    ratio: float = 1 / 16
    length_s: float = 120.0
    wait_s: float = 15.0


USUAL_JOBS: Final = ReclaimedJobs()
"""Of two minutes, with the documents' patience."""


class ReclaimedWork:
    """A queue that never ends of jobs in the idle class beside an owner that ordered ``order_cores``.

    As many run as fit between limit and order; they share evenly what the owner leaves, none gets more than it ordered.
    Where they exceed that for longer than ``wait_s``, the youngest end, and what they did is lost.
    """

    def __init__(self, order_cores: float, jobs: ReclaimedJobs = USUAL_JOBS) -> None:
        self.order_cores = order_cores
        self._jobs = jobs
        self._done_cpu_s: list[float] = []
        self._waited_s = 0.0
        self.finished_cpu_s = self.lost_cpu_s = 0.0

    @property
    def kept_cpu_s(self) -> float:
        """Core-seconds of jobs that came to their end, or still run."""
        return self.finished_cpu_s + sum(self._done_cpu_s)

    def add(self, limit_cores: float, used_cores: float, seconds: float) -> None:
        """The owner used ``used_cores`` for ``seconds``, and its limit is ``limit_cores`` now."""
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
