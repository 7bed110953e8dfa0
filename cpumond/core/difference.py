"""Heartbeats sent as differences from the last accepted one; pure.

A difference saves bytes and the work of reading them: within a second, most jobs of a node do not change. The full
state is sent in the first heartbeat, after every FULL_EVERY differences, and after a heartbeat was not accepted."""

from __future__ import annotations

from typing import Final

from cpumond.core.wire import Heartbeat, HeartbeatAnswer, JobReport, NodeHeartbeat

FULL_EVERY: Final = 60


class Differences:
    """Builds the messages to the scheduler, even if a different one takes over; used by one thread."""

    def __init__(self) -> None:
        self._base: Heartbeat | None = None
        self._jobs: dict[str, JobReport] = {}
        """The jobs of ``_base``, by id."""
        self._count = 0

    def make(self, heartbeat: Heartbeat) -> Heartbeat:
        """Return the message to send for ``heartbeat``: in full, or its difference from the last accepted one.

        The next message is full unless ``taken`` is called first."""
        base, self._base = self._base, None
        if base is None or self._count >= FULL_EVERY or heartbeat.incarnation != base.incarnation:
            self._count = 0
            return heartbeat
        before = self._jobs
        self._count += 1
        return NodeHeartbeat(
            heartbeat.node_id,
            heartbeat.incarnation,
            heartbeat.sequence,
            heartbeat.sent_at,
            heartbeat.cpu_capacity,
            [report for report in heartbeat.jobs if before.get(report.job_id) != report],
            finished_jobs=heartbeat.finished_jobs,
            base=base.sequence,
            gone=list(before.keys() - {report.job_id for report in heartbeat.jobs}),
            job_count=len(heartbeat.jobs),
        )

    def taken(self, heartbeat: Heartbeat, answer: HeartbeatAnswer) -> None:
        """Record that ``heartbeat``, the full state, was accepted, even if only its difference was sent."""
        if answer.differences:
            jobs = {report.job_id: report for report in heartbeat.jobs}
            # A difference cannot distinguish two jobs with the same id.
            if len(jobs) == len(heartbeat.jobs):
                self._base, self._jobs = heartbeat, jobs
