"""Simulate a closed loop of a CPU limit and a job, in steps of the kernel's enforcement period (limit_rules.md 1).

The job demands CPU. The kernel grants CPU up to the quota, and counts periods and throttled periods. The monitor reads
these counters and moves the limit, with its real checks and looks, so the product itself is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from cpumond.monitor.model import EARLY_LOOK_S, CpuReading, LimitRule, MonitorSettings, start_state
from cpumond.monitor.peak import restore_early
from cpumond.monitor.reclaimed import USUAL_JOBS, ReclaimedJobs, ReclaimedWork
from cpumond.monitor.rules import check, look

CFS_PERIOD_S: Final = 0.1
"""The kernel's default enforcement period, in seconds."""
LEAST_CPU_S: Final = 1e-6
"""Minimum core-seconds in a period that count as usage, or as held back; less may be rounding."""
ROUNDING: Final = 1e-12
PROGRESS_PERIODS: Final = 4096


class SimulationResult(msgspec.Struct, frozen=True):
    """CPU that a rule reclaims, and what this costs the job.

    - ``reclaimed_ratio``: sum(request - limit) / sum(request - demand); 0 if nothing could be reclaimed, above 1 if
      the limit makes work wait.
    - ``held_back_ratio``: fraction of the enforcement periods in which the job got less CPU under a lowered limit than
      under its request; ``held_back_seconds_ratio``: fraction of the seconds that contain such a period.
    - ``late_ratio``: fraction of the work that was not done in the period in which it was demanded.
    - ``delay_s``: mean time that a core-second of work waits because of the limit; for a program, its total delay.
    - ``p99_stretch_s``: 99th percentile of the lengths of uninterrupted series of held-back periods.
    - ``writes_per_hour``: number of changes of the limit per hour.
    - ``kept_work_ratio``: kept work of jobs on reclaimed CPU, as a fraction of sum(request - demand);
      ``lost_work_ratio``: fraction of the work of these jobs that was lost."""

    rule: LimitRule
    reclaimed_ratio: float
    held_back_ratio: float
    held_back_seconds_ratio: float
    late_ratio: float
    delay_s: float
    p99_stretch_s: float
    writes_per_hour: float
    kept_work_ratio: float
    lost_work_ratio: float


class Period(NamedTuple):
    """One enforcement period: the limit in force, the core-seconds used, and whether the limit held the job back."""

    limit_cores: float
    used_cpu_s: float
    held_back: bool


class Ran(NamedTuple):
    """What a job did in one period: the core-seconds used, whether the quota ran out, and whether the job would have
    got more under its request."""

    used_cpu_s: float
    throttled: bool
    held_back: bool


class Arrivals:
    """Work that arrives from outside even if earlier work is not done. Unfinished work accumulates.

    ``work_cpu_s``: core-seconds that arrive in each period. ``order_cpu_s``: core-seconds that the request allows in a
    period. Work that would also have waited under the full request does not count as late."""

    def __init__(self, work_cpu_s: Sequence[float], order_cpu_s: float) -> None:
        self.work_cpu_s, self.order_cpu_s = work_cpu_s, order_cpu_s
        self.wanted_cpu_s = self.late_cpu_s = 0.0
        self.backlog_cpu_s = self._backlog_at_order = self._excess = self._waited = 0.0

    def run(self, period: int, available_cpu_s: float) -> Ran:
        """Run period number ``period``, whose quota grants ``available_cpu_s``. Called once per period, in order."""
        work, order = self.work_cpu_s[period], self.order_cpu_s
        wanted = work + self.backlog_cpu_s
        possible = min(wanted, order)
        used = min(possible, available_cpu_s)
        self.backlog_cpu_s = wanted - used
        self._backlog_at_order = max(work + self._backlog_at_order - order, 0.0)
        excess = max(self.backlog_cpu_s - self._backlog_at_order, 0.0)
        self.late_cpu_s += max(excess - self._excess, 0.0)
        self._excess = excess
        self._waited += excess
        self.wanted_cpu_s += work
        throttled = self.backlog_cpu_s > LEAST_CPU_S and used >= available_cpu_s - 1e-9
        return Ran(used, throttled, possible > used + LEAST_CPU_S)

    def measure_delay_s(self, period_s: float) -> float:
        """Return the mean wait of a core-second of work because of the limit."""
        return self._waited * period_s / self.wanted_cpu_s if self.wanted_cpu_s else 0.0


class Program:
    """A program, which begins an item of work only after the previous item is done, so a low limit delays it.

    Each item of ``work_cpu_s`` takes one period with enough CPU, and longer with less. In an item of 0 the program
    sleeps until the end of the period. Each period allows at most ``order_cpu_s``. Parameters are as in ``Arrivals``.
    """

    def __init__(self, work_cpu_s: Sequence[float], order_cpu_s: float) -> None:
        self.work_cpu_s, self.order_cpu_s = work_cpu_s, order_cpu_s
        self.wanted_cpu_s = self.late_cpu_s = 0.0
        self._place, self._rest_cpu_s = 0, self._size(0)

    def run(self, period: int, available_cpu_s: float) -> Ran:
        """Run one period, like ``Arrivals.run``. The program continues where it stopped; ``period`` is not used."""
        used = wanted = 0.0
        time_left = 1.0
        while time_left > ROUNDING and self._place < len(self.work_cpu_s):
            size = self._size(self._place)
            if size <= ROUNDING:
                self._begin(self._place + 1)
                break
            needed = min(self._rest_cpu_s, size * time_left)
            given = min(needed, available_cpu_s - used)
            wanted += needed
            used += given
            if given < needed - ROUNDING:
                self._rest_cpu_s -= given
                break
            time_left -= needed / size
            if needed >= self._rest_cpu_s - ROUNDING:
                self._begin(self._place + 1)
            else:
                self._rest_cpu_s -= needed
        self.late_cpu_s += wanted - used
        self.wanted_cpu_s += used
        short = wanted > used + LEAST_CPU_S
        return Ran(used, short, short)

    def measure_delay_s(self, period_s: float) -> float:
        """Return the total delay of the program."""
        return (len(self.work_cpu_s) - self._place) * period_s

    def _begin(self, place: int) -> None:
        self._place, self._rest_cpu_s = place, self._size(place)

    def _size(self, place: int) -> float:
        return min(self.work_cpu_s[place], self.order_cpu_s) if place < len(self.work_cpu_s) else 0.0


def walk_periods(job: Arrivals | Program, s: MonitorSettings, period_s: float = CFS_PERIOD_S) -> Iterator[Period]:
    """Yield the enforcement periods of ``job`` under a limit that the monitor moves by ``s``, beginning at the request.

    Checks come every ``check_period`` and looks every ``throttle_poll``; both are moved to the end of the period in
    which they are due. The kernel counts a throttled period at its end. A check sees all periods that have ended; a
    look does not see the current period, within which it really comes. A new quota applies from the next period on.
    Unused quota is carried over, up to ``burst_ratio`` of the quota.

    On a host with free CPU only ``actuator = "quota"`` throttles. With other actuators, ``held_back`` is true for
    periods with usage above the limit, in which other jobs could have taken the CPU."""
    order_cores = job.order_cpu_s / period_s
    burst = (s.burst_ratio or 0.0) if s.is_ceiling else 0.0
    state = msgspec.structs.replace(start_state(order_cores, 0.0), cfs_period_s=period_s)
    if s.limit_rule != "document":
        # As in the tables of limit_rules.md, only rule ``document`` takes its first sample at the first check.
        state, _ = check(state, CpuReading(0.0, 0.0), 0.0, s)
    limit = order_cores
    quota = job.order_cpu_s
    carried = total_cpu_s = 0.0
    nr_periods = nr_throttled = 0
    checks, looks = _Schedule(s.check_period_s, period_s), _Schedule(s.poll_s, period_s)
    next_check, next_look = checks.next(0), looks.next(0)
    early = max(round(EARLY_LOOK_S / period_s), 1) if s.looks_early else 0
    for period in range(len(job.work_cpu_s)):
        available = min(carried + quota, quota * (1.0 + burst)) if s.is_ceiling else job.order_cpu_s
        used, throttled, held_back = job.run(period, available)
        if not s.is_ceiling:
            throttled, held_back = False, used > quota + LEAST_CPU_S
        carried = min(available - used, quota * burst)
        total_cpu_s += used
        nr_periods += used > LEAST_CPU_S
        counted = nr_throttled
        nr_throttled += throttled
        yield Period(limit, used, held_back)
        over = period + 1
        if over == next_check:
            now_s = over * period_s
            state, _ = check(state, CpuReading(total_cpu_s, now_s, 0, nr_periods, nr_throttled), now_s, s)
            next_check = checks.next(over)
        elif over == next_look and (not s.is_ceiling or (state.seen is not None and counted > state.seen.nr_throttled)):
            looked = look(state, CpuReading(total_cpu_s, over * period_s, 0, nr_periods, nr_throttled), s)
            state = looked[0] if looked else state
        if early and over % early == 0 and state.limit_cores == limit:
            reading = CpuReading(total_cpu_s, over * period_s, 0, nr_periods, counted)
            looked = restore_early(state, reading, used / period_s, s)
            state = looked[0] if looked else state
        if over == next_look:
            next_look = looks.next(over)
        if state.limit_cores != limit:
            limit = state.limit_cores
            quota = limit * period_s


class _Schedule:
    """Events every ``every_s`` (0 = never), each moved to the end of the enforcement period in which it is due."""

    def __init__(self, every_s: float, period_s: float) -> None:
        self.every, self.count = every_s / period_s, 0

    def next(self, over: int) -> int:
        """Return how many periods will have passed at the next event; ``over`` have passed now. -1 for never."""
        if self.every <= 0.0:
            return -1
        self.count = max(self.count + 1, math.floor(over / self.every))
        return max(over + 1, math.ceil(self.count * self.every - 1e-6))


def simulate(
    work_cpu_s: Sequence[float],
    order_cores: float,
    s: MonitorSettings,
    *,
    is_program: bool = False,
    period_s: float = CFS_PERIOD_S,
    reclaimed_jobs: ReclaimedJobs = USUAL_JOBS,
    on_progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Simulate the rule of ``s`` on a job that requests ``order_cores`` (> 0) and demands ``work_cpu_s``.

    ``work_cpu_s`` must not be empty, and must be >= 0 in each period. ``reclaimed_jobs`` run on the CPU that the job
    leaves. ``on_progress`` is called from time to time with the number of periods done since its last call."""
    order_cpu_s = order_cores * period_s
    job = Program(work_cpu_s, order_cpu_s) if is_program else Arrivals(work_cpu_s, order_cpu_s)
    periods, per_second = len(work_cpu_s), max(round(1.0 / period_s), 1)
    reclaimed = 0.0
    held_back = stretch = writes = 0
    held_back_seconds: set[int] = set()
    stretches: list[int] = []
    limit = order_cores
    beside = ReclaimedWork(order_cores, reclaimed_jobs)
    second_cpu_s = 0.0
    for number, period in enumerate(walk_periods(job, s, period_s)):
        if period.limit_cores != limit:
            limit = period.limit_cores
            writes += 1
        reclaimed += order_cores - limit
        second_cpu_s += period.used_cpu_s
        if number % per_second == per_second - 1:
            seconds = per_second * period_s
            beside.add(limit, second_cpu_s / seconds, seconds)
            second_cpu_s = 0.0
        if period.held_back:
            held_back += 1
            stretch += 1
            held_back_seconds.add(number // per_second)
        elif stretch:
            stretches.append(stretch)
            stretch = 0
        if on_progress is not None and number % PROGRESS_PERIODS == PROGRESS_PERIODS - 1:
            on_progress(PROGRESS_PERIODS)
    if stretch:
        stretches.append(stretch)
    stretches.sort()
    reclaimable = sum(order_cpu_s - min(work, order_cpu_s) for work in work_cpu_s)
    kept, lost = beside.kept_cpu_s, beside.lost_cpu_s
    return SimulationResult(
        rule=s.limit_rule,
        reclaimed_ratio=reclaimed * period_s / reclaimable if reclaimable > ROUNDING else 0.0,
        held_back_ratio=held_back / periods,
        held_back_seconds_ratio=len(held_back_seconds) / math.ceil(periods / per_second),
        late_ratio=job.late_cpu_s / job.wanted_cpu_s if job.wanted_cpu_s else 0.0,
        delay_s=job.measure_delay_s(period_s),
        p99_stretch_s=stretches[math.ceil(0.99 * len(stretches)) - 1] * period_s if stretches else 0.0,
        writes_per_hour=writes / (periods * period_s / 3600.0),
        kept_work_ratio=kept / reclaimable if reclaimable > ROUNDING else 0.0,
        lost_work_ratio=lost / (kept + lost) if lost else 0.0,
    )
