"""Reporters that stay on the node: one log line for each heartbeat, or nothing at all."""

from __future__ import annotations

import math
import time

import msgspec
import structlog

from cpumond.core.answers import ReporterStats
from cpumond.core.wire import Heartbeat

_log = structlog.get_logger()


class SilentReporter:
    """Discards heartbeats (``report.kind = "none"``); its statistics stay zero."""

    def submit(self, heartbeat: Heartbeat) -> None:
        """Discard ``heartbeat``."""

    def close(self, timeout_s: float) -> None:
        """Return at once: nothing waits."""

    def stats(self) -> ReporterStats:
        return ReporterStats()


class LogReporter:
    """Writes the event ``heartbeat`` with the node's sums, one line for each heartbeat."""

    def __init__(self) -> None:
        self._stats = ReporterStats()

    def submit(self, heartbeat: Heartbeat) -> None:
        """Log three sums of the node's jobs in cores: requests, limits now, and known usage. Never raises."""
        now, jobs = self._stats, heartbeat.jobs
        try:
            _log.info(
                "heartbeat",
                node_id=heartbeat.node_id,
                sequence=heartbeat.sequence,
                jobs=len(jobs),
                ordered_cores=_sum_cores([job.cpu_limit for job in jobs]),
                limit_cores=_sum_cores([job.current_cpu_limit for job in jobs]),
                used_cores=_sum_cores([job.smoothed_cpu_usage for job in jobs if job.smoothed_cpu_usage is not None]),
            )
        except Exception as error:  # a failure to write the log must not end the tick
            why = f"the log cannot be written: {error}"
            self._stats = msgspec.structs.replace(now, failed_total=now.failed_total + 1, last_error=why)
            return
        sent = now.sent_total + 1
        self._stats = msgspec.structs.replace(now, sent_total=sent, last_success_at_s=time.monotonic(), last_error="")

    def close(self, timeout_s: float) -> None:
        """Return at once: nothing waits."""

    def stats(self) -> ReporterStats:
        return self._stats


def _sum_cores(cores: list[float]) -> float:
    return round(math.fsum(cores), 3)
