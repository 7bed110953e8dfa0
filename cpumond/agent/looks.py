"""Which jobs are looked at between two checks, and when (limit_rules.md 2)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Final

from cpumond.agent.limits.hold import FREE
from cpumond.agent.tracked import Tracked
from cpumond.host.cgroup.parse import STAT_BYTES, THROTTLED_LINE

Watched = tuple[int, bytes, Tracked]
"""Descriptor of a job's cpu.stat; the line that is in it until more is throttled than is accounted for; the job.

With these a look at a job that is not throttled touches nothing of its record.
"""


DRIFT: Final = 31 / 32
"""The time between two looks, as a share of ``throttle_poll``. The kernel counts a throttled period at its end, and the
periods of each cgroup begin at moments of their own: looks in step with them would see some jobs late each time."""


class LookRound:
    """Jobs with the same ``throttle_poll``: ``period_s`` seconds, ``next_s`` on the monotonic clock."""

    __slots__ = ("next_s", "period_s", "turn", "watched")

    def __init__(self, poll_s: float, now_s: float) -> None:
        self.period_s = poll_s * DRIFT
        self.next_s = now_s + self.period_s
        self.watched: list[Watched] = []
        self.turn = 0


class LookSchedule:
    """Looks at a fixed rate; ``next_s`` is when the next one is due on the monotonic clock, infinity for never.

    Which jobs have a lowered limit is found once a tick, not at each look: limits go down in ticks only.
    """

    def __init__(self) -> None:
        self.next_s = math.inf
        self._rounds: dict[float, LookRound] = {}
        """By ``throttle_poll``."""
        self._filled_s = -math.inf

    def refill(self, jobs: Iterable[Tracked], now_s: float) -> None:
        """Look from now on at those of ``jobs`` that the agent's limit can hold back."""
        known, rounds = self._rounds, dict[float, LookRound]()
        for job in jobs:
            if not can_be_held_back(job):
                continue
            poll_s = job.settings.poll_s
            due = rounds.get(poll_s)
            if due is None:
                due = rounds[poll_s] = known.get(poll_s) or LookRound(poll_s, now_s)
                due.watched = []
            seen = job.state.seen
            # Without a ceiling no job is throttled, so its usage has to be read each time: a line that is never there.
            line = b"\0" if seen is None or not job.settings.is_ceiling else THROTTLED_LINE % seen.nr_throttled
            due.watched.append((job.cgroup.stat_fd, line, job))
        self._rounds, self._filled_s = rounds, now_s
        self._find_next()

    def take_due(self, now_s: float, stride: int = 1) -> list[Watched]:
        """The looks that are due: with ``stride`` > 1 only at every so many jobs, in turns, and at none that was
        checked in the last quarter of a period, so that no gap is longer than 5/4 of one. A late look does not move
        the next; missed looks are not made up for.
        """
        due: list[Watched] = []
        for each in self._rounds.values():
            if now_s >= each.next_s:
                each.next_s += each.period_s
                if each.next_s <= now_s:
                    each.next_s = now_s + each.period_s
                each.turn += 1
                watched = each.watched if stride == 1 else each.watched[each.turn % stride :: stride]
                checked_s = now_s - each.period_s / 4
                if self._filled_s > checked_s:
                    watched = [item for item in watched if not was_seen(item[2], checked_s)]
                due += watched
        self._find_next()
        return due

    def _find_next(self) -> None:
        self.next_s = min((each.next_s for each in self._rounds.values()), default=math.inf)


def was_seen(job: Tracked, since_s: float) -> bool:
    """Whether the job's counters were read since then."""
    return job.state.seen is not None and job.state.seen.at_s > since_s


def list_changed(watched: Iterable[Watched]) -> list[Tracked]:
    """The jobs whose line is not there any more; one pread each. A job whose file cannot be read is left to the next
    check: most are gone."""
    changed, pread = [], os.pread
    for stat_fd, line, job in watched:
        try:
            if line not in pread(stat_fd, STAT_BYTES, 0):
                changed.append(job)
        except OSError:
            continue
    return changed


def can_be_held_back(job: Tracked) -> bool:
    """Whether the job is one to look at: its limit is below what it ordered, it is in force, and the monitor decides
    about it.

    How much it used lately does not count: a job far below its limit is just the one whose burst comes unforeseen.
    """
    state = job.state
    return (
        state.limit_cores < state.hard_cores
        and job.moves
        and (job.touched or not job.writes)
        and job.hold.decider is FREE
        and job.settings.poll_s > 0.0
    )
