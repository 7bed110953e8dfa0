"""The scheduler's jobs as the monitor follows them: its answers obeyed, its jobs in the table while they run."""

from __future__ import annotations

import collections
import math

from cpumond.agent.assigned import AssignedJobs, Usage
from cpumond.agent.context import AgentContext
from cpumond.errors import CpumondError
from cpumond.wire import FinishedJob, HeartbeatAnswer


class ScheduledJobs:
    """``paths`` are the cgroups of the scheduler's jobs that the monitor was given.

    ``answers`` of the scheduler wait here with the moment their heartbeat was sent; any thread may add one.
    """

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.table = context.table
        self.paths: set[str] = set()
        self.answers: collections.deque[tuple[HeartbeatAnswer, float]] = collections.deque()
        self._stale_pins: set[str] = set()
        """Of jobs that ended, to be forgotten as soon as the disk allows it."""
        self._forget_pins_at_s = -math.inf

    def advance(self, now_s: float) -> bool:
        """Obey the scheduler and take in what became of its jobs; True when others are followed now."""
        context, assigned = self.context, self.context.assigned
        if assigned is None:
            return False
        while self.answers:
            answer, sent_at_s = self.answers.popleft()
            assigned.obey(answer, sent_at_s, now_s)
        context.beat_due |= assigned.advance(now_s, self._count_cores)
        context.beat_due |= assigned.adjust(now_s, self._count_cores)
        self._forget_pins(assigned, now_s)
        paths = {job.path for job in assigned.found_jobs()}
        for path in self.paths - paths:
            # Its cgroup is removed already, or will be at once.
            if path in self.table.jobs:
                self.table.drop(self.table.jobs[path])
        for found in assigned.found_jobs():
            if found.path not in self.paths:
                self.table.add(found, now_s)
        changed, self.paths = paths != self.paths, paths
        return changed

    def _forget_pins(self, assigned: AssignedJobs, now_s: float) -> None:
        """The scheduler's jobs never come again: the pins of those that ended are of no use."""
        pins = self.context.registered.content.pins
        if not pins:
            return
        for finished in assigned.finished_jobs():
            if finished.job_id in pins and not self._has_other(finished):
                self._stale_pins.add(finished.job_id)
        for job_id in list(self._stale_pins) if now_s >= self._forget_pins_at_s else ():
            try:
                self.context.registered.pin(job_id, None)
            except CpumondError as error:
                # The disk refuses the others as well.
                self._forget_pins_at_s = now_s + self.context.config.discovery.rescan_period_s
                self.context.complain(None, error)
                return
            self._stale_pins.discard(job_id)

    def _has_other(self, finished: FinishedJob) -> bool:
        """Whether a job of the same id is none of the scheduler's, so that the pin may be for that one."""
        same = (path for path, job in self.table.jobs.items() if job.found.job_id == finished.job_id)
        return finished.job_id in self.context.registered.content.jobs or any(path != finished.cgroup for path in same)

    def read_usage(self) -> dict[str, Usage]:
        """What the monitor knows of the scheduler's jobs, by cgroup."""
        return {path: job.usage() for path in self.paths if (job := self.table.jobs.get(path)) is not None}

    def _count_cores(self) -> tuple[dict[str, Usage], float]:
        """``read_usage``, and the cores that all other jobs may use now."""
        others = [job.current_cores for path, job in self.table.jobs.items() if path not in self.paths]
        return self.read_usage(), math.fsum(others)
