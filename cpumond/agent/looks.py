"""Schedule looks between two checks: which jobs are looked at, and when (limit_rules.md 2)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Final

from cpumond.agent.limits.hold import FREE
from cpumond.agent.tracked import Tracked
from cpumond.host.cgroup.parse import STAT_BYTES, THROTTLED_LINE, USAGE_BYTES
from cpumond.monitor.model import EARLY_LOOK_S
from cpumond.monitor.peak import EARLY_ABOVE

Watched = tuple[int, bytes, Tracked]
"""Descriptor of a job's cpu.stat; the line of this file that stays the same until the job is throttled once more; the
job. With these, a look at a job that was not throttled does not touch the job's record."""

DRIFT: Final = 31 / 32
"""Interval of looks as a fraction of ``throttle_poll``. The kernel counts a throttled period at the end of the period,
and the periods of cgroups begin at different times: looks in step with them would see some jobs late each time."""


class LookRound:
    """Jobs with the same ``throttle_poll``. They are looked at every ``period_s``, next at ``next_s`` (monotonic)."""

    __slots__ = ("next_s", "period_s", "turn", "watched")

    def __init__(self, poll_s: float, now_s: float) -> None:
        self.period_s = poll_s * DRIFT
        self.next_s = now_s + self.period_s
        self.watched: list[Watched] = []
        self.turn = 0


class UseLook:
    """A job whose usage is looked at for ``early_restore``. ``usage_us``: the job's CPU time at the last look.
    ``at_s``: the time of that look. ``most_us_per_s``: the usage above which the job's limit is raised."""

    __slots__ = ("at_s", "fd", "job", "most_us_per_s", "parse_us", "usage_us")

    def __init__(self, job: Tracked) -> None:
        self.job = job
        self.fd, self.parse_us = job.cgroup.usage_fd, job.cgroup.parse_usage_us
        self.usage_us, self.at_s, self.most_us_per_s = 0.0, -math.inf, math.inf

    def refill(self) -> None:
        """Copy the limit, and the reading of the last check if that is newer than the last look."""
        state = self.job.state
        self.most_us_per_s = EARLY_ABOVE * state.limit_cores * 1e6
        if state.seen is not None and state.seen.at_s > self.at_s:
            self.usage_us, self.at_s = state.seen.total_cpu_s * 1e6, state.seen.at_s

    def measure(self, at_s: float) -> float:
        """Return the usage in cores since the last look if that usage exceeds the limit, else 0. Raises OSError,
        ValueError, IndexError."""
        usage_us, before_us = self.parse_us(os.pread(self.fd, USAGE_BYTES, 0)), self.usage_us
        seconds, self.usage_us, self.at_s = at_s - self.at_s, usage_us, at_s
        # Shortly after the previous look, the usage may contain time that the kernel counted late, at its tick.
        if usage_us - before_us <= self.most_us_per_s * seconds or seconds < EARLY_LOOK_S / 2:
            return 0.0
        return (usage_us - before_us) / (seconds * 1e6)


MANY_USE_LOOKS: Final = 50
"""If more jobs than this need looks at their usage, the looks are spread over four moments of each EARLY_LOOK_S."""


class LookSchedule:
    """Decides when looks are due; they repeat at a fixed rate. ``next_s`` is the monotonic time of the next look,
    infinity for never. The jobs to look at are determined once per tick, because only ticks lower limits."""

    def __init__(self) -> None:
        self.next_s = math.inf
        self._rounds: dict[float, LookRound] = {}
        """``throttle_poll`` in seconds -> the jobs that have this setting."""
        self._filled_s = -math.inf
        self._uses: dict[Tracked, UseLook] = {}
        self._use_parts: list[list[UseLook]] = []
        self._use_turn = 0
        self._use_next_s = math.inf

    def refill(self, jobs: Iterable[Tracked], now_s: float) -> None:
        """From now on, watch those jobs that the agent's limit can throttle."""
        known, rounds = self._rounds, dict[float, LookRound]()
        known_uses, uses = self._uses, dict[Tracked, UseLook]()
        for job in jobs:
            if not can_be_held_back(job):
                continue
            if job.settings.looks_early and job.in_force.burst_us:
                use = uses[job] = known_uses.get(job) or UseLook(job)
                use.refill()
            poll_s = job.settings.poll_s
            due = rounds.get(poll_s)
            if due is None:
                due = rounds[poll_s] = known.get(poll_s) or LookRound(poll_s, now_s)
                due.watched = []
            seen = job.state.seen
            # A job without a quota is never throttled, so each look must read its usage: use a line that never occurs.
            line = b"\0" if seen is None or not job.settings.is_ceiling else THROTTLED_LINE % seen.nr_throttled
            due.watched.append((job.cgroup.stat_fd, line, job))
        self._rounds, self._filled_s = rounds, now_s
        self._uses = uses
        watched = list(uses.values())
        parts = 4 if len(watched) > MANY_USE_LOOKS else 1
        self._use_parts = [watched[part::parts] for part in range(parts)] if watched else []
        if not watched:
            self._use_next_s = math.inf
        elif self._use_next_s == math.inf:
            self._use_next_s = now_s + EARLY_LOOK_S / parts
        self._find_next()

    def take_uses(self, now_s: float, clock_s: Callable[[], float], stride: int = 1) -> list[tuple[Tracked, float]]:
        """Carry out the due looks at usage. Return the jobs whose usage since the previous look exceeded the limit,
        each with this usage in cores. A job whose file cannot be read is left to the next check."""
        if now_s < self._use_next_s:
            return []
        parts = len(self._use_parts)
        self._use_next_s = max(self._use_next_s + EARLY_LOOK_S * stride / parts, now_s)
        self._use_turn += 1
        found = []
        for use in self._use_parts[self._use_turn % parts]:
            try:
                cores = use.measure(clock_s())
            except (OSError, ValueError, IndexError):
                continue
            if cores:
                found.append((use.job, cores))
        self._find_next()
        return found

    def take_due(self, now_s: float, stride: int = 1) -> list[Watched]:
        """Return what to look at now. With ``stride`` > 1 this is one in ``stride`` jobs, in turns.

        Jobs that were checked within the last quarter of a period are skipped, so no gap exceeds 5/4 of a period. A
        late look does not delay the next one, and missed looks are not made up for."""
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
        self.next_s = min([self._use_next_s, *(each.next_s for each in self._rounds.values())])


def was_seen(job: Tracked, since_s: float) -> bool:
    return job.state.seen is not None and job.state.seen.at_s > since_s


def list_changed(watched: Iterable[Watched]) -> list[Tracked]:
    """Return the jobs whose file no longer contains their line; one pread for each job. A job whose file cannot be read
    is left to the next check: in most cases its cgroup is gone."""
    changed, pread = [], os.pread
    for stat_fd, line, job in watched:
        try:
            if line not in pread(stat_fd, STAT_BYTES, 0):
                changed.append(job)
        except OSError:
            continue
    return changed


def can_be_held_back(job: Tracked) -> bool:
    """Return whether to look at the job: its limit is in force and below its request, and the monitor decides about it.

    Recent usage does not matter: a job that used far less than its limit may well have an unexpected burst."""
    state = job.state
    return (
        state.limit_cores < state.hard_cores
        and job.moves
        and (job.touched or not job.writes)
        and job.hold.decider is FREE
        and job.settings.poll_s > 0.0
    )
