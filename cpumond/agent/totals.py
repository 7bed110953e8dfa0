"""Values that the phases of a tick share: the counters of this run, and the work that is due."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import structlog

from cpumond.agent.snapshot import TickSnapshot
from cpumond.agent.tracked import Tracked
from cpumond.core.errors import CpumondError

TICK_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

log = structlog.get_logger("cpumond.agent")


@dataclass(slots=True)
class Due:
    """Work to do as soon as possible.

    ``report``: send heartbeats to all receivers. ``beat``: send a heartbeat only to the scheduler. ``rescan``: look at
    all sources. ``snapshot``: the newest snapshot, None if it must be made again."""

    report: bool = True
    beat: bool = False
    rescan: bool = True
    snapshot: TickSnapshot | None = None


class RunTotals:
    """Counters since the start of this run. The tick adds to these counters, and a snapshot copies them."""

    def __init__(self) -> None:
        self.decisions = {"grow": 0, "shrink": 0, "restore": 0, "hold": 0, "base": 0, "delay": 0}
        self.foreign_writes = {"raise": 0, "lower": 0}
        self.write_errors = self.errors = self.restores = self.failed_restores = 0
        self.ticks = self.late_ticks = self.rebaselines = self.shed_checks = 0
        self.looks_restored = 0
        """Number of restores that looks between two checks decided; ``restores`` includes these."""
        self.tick_seconds = 0.0
        self.throttled_cpu_s = self.late_cpu_s = 0.0
        self.tick_buckets = [0] * (len(TICK_BUCKETS_S) + 1)
        self.last_error = ""
        """The newest error that does not concern a single job."""

    def add_tick(self, duration_s: float) -> None:
        self.ticks += 1
        self.tick_seconds += duration_s
        self.tick_buckets[bisect.bisect_left(TICK_BUCKETS_S, duration_s)] += 1

    def complain(self, job: Tracked | None, error: CpumondError) -> None:
        """Count an error. Log its sentence, unless the previous error had the same one."""
        self.errors += 1
        text = str(error)
        if job is None:
            if text != self.last_error:
                log.error("agent_error", error=text)
            self.last_error = text
        elif text != job.last_error:
            job.last_error = text
            log.warning("job_error", job_id=job.found.job_id, error=text)
