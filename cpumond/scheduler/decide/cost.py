"""Cost of preempting a job: the work that has to be repeated, and until when a job is protected (semantics.md 6.9).

Pure: only a job's reports are read."""

from __future__ import annotations

from typing import Final

from cpumond.scheduler.elements import Job, Node

CLOCK_SKEW_S: Final = 60.0
"""Maximum seconds that the clock of a job's node may be ahead; checkpoints even further ahead are ignored."""


def lost_core_seconds(job: Job, now: float) -> float:
    """Core-seconds that a job loses if it is stopped at ``now``: its usage since its start or last checkpoint.

    Its usage is the CPU time that its node reported, spread evenly over its run, or its limit if the node reported
    none. A checkpoint in the future or before the start does not count, so a report of the job can only lower its loss.
    A job that has not begun on its node loses nothing."""
    if job.began_at is None or now <= job.began_at:
        return 0.0
    ran_s = now - job.began_at
    used, told = job.report.cpu_seconds, job.report.checkpoint_at
    lost = job.usage[1] * ran_s if used is None else used
    if told is None or not job.began_at <= told <= now + CLOCK_SKEW_S:
        return lost
    return lost * max(now - told, 0.0) / ran_s


def spared_until(job: Job) -> float:
    """Return until when ``min_run_time`` protects a job from preemption, in scheduler time; -inf if it does not."""
    rules, own = job.element.rules, job.task.min_run_time
    if rules is None:
        return float("-inf")
    spared_s = rules.min_run_time_s if own is None else min(own / 1e3, rules.max_min_run_time_s)
    return (job.start_time if job.began_at is None else job.began_at) + spared_s if spared_s else float("-inf")


def next_unspared(node: Node, now: float) -> float:
    """Return when ``min_run_time`` next ceases to protect a job of a node; infinity if it protects none."""
    return min((until for job in node.jobs.values() if (until := spared_until(job)) > now), default=float("inf"))
