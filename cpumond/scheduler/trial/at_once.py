"""Immediate effect of a change on starts, found by trials without and with the change, for plans and simulations."""

from __future__ import annotations

from collections.abc import Callable

from cpumond.core.measures import count_cores
from cpumond.core.words import count
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.state import State
from cpumond.scheduler.trial.fork import ask_at_once
from cpumond.scheduler.trial.rounds import start_jobs


def describe_starts(state: State, now: float, change: Callable[[State], None]) -> str:
    """Return how many more or fewer jobs start on resources that are free now, and the cores of these jobs; "" if their
    number stays the same. ``change`` is applied to a copy of the state. Raises ChildError."""
    without, with_it = _count_starts(state, now, lambda _: None), _count_starts(state, now, change)
    jobs, cores = with_it[0] - without[0], with_it[1] - without[1]
    if not jobs:
        return ""
    more = "more" if jobs > 0 else "fewer"
    verb = "starts" if abs(jobs) == 1 else "start"
    return f"at once {count(abs(jobs), f'job {more}', f'jobs {more}')} {verb}, {count_cores(abs(cores))}"


def _count_starts(state: State, now: float, change: Callable[[State], None]) -> tuple[int, float]:
    def count_with_it() -> tuple[int, float]:
        change(state)
        jobs = [job for tree in list(state.trees.values()) for job in start_jobs(state, tree, now)]
        return len(jobs), sum(job.limits[CPU] for job in jobs)

    return ask_at_once(count_with_it, tuple[int, float])
