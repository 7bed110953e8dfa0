"""Estimate how much CPU each rule would reclaim of an observed workload, and how long it would hold the workload back.

The rules themselves decide (``rules.check``) on the kernel's counters, as in shadow mode, with one addition. No limit
was lowered during the observation, so usage may exceed the limit that a rule would have set. This limit would have
throttled the workload after the kernel's burst was spent. Therefore throttled periods are added to the counters: until
a look of the rule would notice them, or, for a rule without looks, for the whole time of higher usage."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from cpumond.core.measures import format_duration
from cpumond.monitor import policy
from cpumond.monitor.model import CpuReading, JobState, LimitRule, MonitorSettings, start_state
from cpumond.monitor.reclaimed import ReclaimedWork
from cpumond.monitor.rules import RULES, check

Confidence = Literal["low", "medium", "high"]
CONFIDENCES: Final[tuple[Confidence, ...]] = ("low", "medium", "high")

CFS_PERIOD_S: Final = 0.1
MEDIUM_FROM_S: Final = 1800.0
HIGH_FROM_S: Final = 86_400.0
"""Minimum seconds for high confidence: after less than a day, usage in some hours of the day is unknown."""
FINE_S: Final = 2.0
COARSE_S: Final = 30.0
"""Seconds between samples. Samples up to FINE_S apart show as much as checks every second. If they are more than
COARSE_S apart, they show few bursts."""
MAX_MISSING: Final = 0.1
"""Maximum fraction of the time that may be missing; if more is missing, the confidence is low."""
WARM_UP_S: Final = 120.0
"""Seconds at the beginning that are not counted. A limit begins at the request and falls step by step, so the first
minutes say little about later hours. An observation of less than twice this length is run repeatedly."""
SETTLED_S: Final = 600.0
"""A short observation is first replayed over and over for this many seconds without being counted, because rules take
time to adapt. Then it is replayed for as long again, and that part is counted."""
MOST_CHECKS: Final = 1200
"""Maximum number of checks in the part that is not counted, in case checks are much less than a second apart."""


class RuleEstimate(msgspec.Struct, frozen=True):
    """Estimated effect of a rule. Cores are means over the observed time; ratios are in [0, 1].

    ``reclaimable_cores`` is request minus limit, ``reclaimable_ratio`` the same as a fraction of the request.
    ``held_back_ratio`` is the fraction of the time in which the limit would hold the workload back if the rule's next
    look always restored the request. ``held_back_most_ratio`` is its upper bound: it counts all of each sample in which
    the limit holds the workload back. ``lost_work_ratio``: of the work of jobs on reclaimed CPU, the fraction that
    would be lost (``ReclaimedWork``). ``limit_cores``: the limit at the end. The first WARM_UP_S are not counted."""

    reclaimable_cores: float
    reclaimable_ratio: float
    held_back_ratio: float
    held_back_most_ratio: float
    limit_cores: float
    lost_work_ratio: float


NOTHING: Final = RuleEstimate(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Estimate(msgspec.Struct, frozen=True):
    """Estimate of one workload or of several workloads.

    ``watched_s``: seconds for which the usage is known. ``missing_s``: seconds of the gaps in between. ``used_cpu_s``:
    core-seconds by the kernel's counter. ``used_cores``: mean usage. ``used_most_cores``: maximum usage in a sample; 0
    for several workloads, since their peaks do not coincide."""

    watched_s: float
    missing_s: float
    ordered_cores: float
    used_cores: float
    used_most_cores: float
    used_cpu_s: float
    rules: dict[LimitRule, RuleEstimate]


class Timeline:
    """Sums over all workloads in at most ``count`` bins of time: core-seconds of usage, of requests, and of the limits
    of each rule."""

    def __init__(self, begin_s: float, length_s: float, count: int = 600) -> None:
        self.begin_s = begin_s
        self.bin_s = max(length_s / count, 1.0)
        self.bins: dict[int, list[float]] = {}

    def add(self, at_s: float, seconds: float, values: Iterable[float]) -> None:
        """Add ``values``, in cores, for the ``seconds`` that end at ``at_s``."""
        every = list(values)
        end = max(at_s - self.begin_s, 0.0) / self.bin_s
        begin = max(end - seconds / self.bin_s, 0.0)
        # A bin that begins where the interval ends gets nothing.
        for number in range(int(begin), max(math.ceil(end - 1e-9), int(begin) + 1)):
            share_s = (min(end, number + 1.0) - max(begin, float(number))) * self.bin_s
            row = self.bins.setdefault(number, [0.0] * (2 + len(RULES)))
            for index, value in enumerate(every):
                row[index] += value * share_s

    def list_points(self) -> list[tuple[float, list[float]]]:
        """Return for each bin, in order: its begin in seconds since ``begin_s``, and its mean cores (0 if unknown)."""
        if not self.bins:
            return []
        nothing = [0.0] * (2 + len(RULES))
        return [
            (number * self.bin_s, [each / self.bin_s for each in self.bins.get(number, nothing)])
            for number in range(min(self.bins), max(self.bins) + 1)
        ]


class _Interval(NamedTuple):
    """Usage between two readings. ``parts``, if the interval has several: for each part in turn, its seconds and its
    CPU seconds; an array, because this saves memory with many workloads."""

    seconds: float
    used_cpu_s: float
    periods: int
    throttled: int
    parts: array[float] | None = None

    def list_parts(self) -> Iterable[tuple[float, float]]:
        """Return the seconds and the CPU seconds of each part."""
        if self.parts is None:
            return ((self.seconds, self.used_cpu_s),)
        return zip(self.parts[::2], self.parts[1::2], strict=True)


class _Follower:
    __slots__ = (
        "bank_cpu_s", "extra_periods", "extra_throttled", "held_most_s", "held_s", "ordered_cpu_s", "reclaimed",
        "settings", "state", "warm",
    )  # fmt: skip

    def __init__(self, state: JobState, settings: MonitorSettings) -> None:
        self.state = state
        self.settings = settings
        self.held_s = self.held_most_s = 0.0
        self.extra_periods = self.extra_throttled = 0
        self.ordered_cpu_s = 0.0
        self.reclaimed = ReclaimedWork(state.hard_cores)
        self.warm = self.sums
        self.bank_cpu_s = 0.0
        """Unused quota, in core-seconds, that the kernel's burst would have accumulated."""

    @property
    def sums(self) -> tuple[float, ...]:
        """The sums so far: core-seconds reclaimed and requested; seconds held back, by the estimate and as the upper
        bound; core-seconds of kept work and of lost work."""
        work = self.reclaimed
        kept = (work.kept_cpu_s, work.lost_cpu_s)
        return self.state.preemptible_cpu_s, self.ordered_cpu_s, self.held_s, self.held_most_s, *kept

    def add(self, reading: CpuReading, past: _Interval) -> None:
        """Process one check at ``reading``; ``past`` is the interval since the previous check."""
        state, s = self.state, self.settings
        self.ordered_cpu_s += state.hard_cores * past.seconds
        limit, most_cpu_s = state.limit_cores, (s.burst_ratio or 0.0) * state.limit_cores * CFS_PERIOD_S
        if limit >= state.hard_cores:
            self.bank_cpu_s = most_cpu_s
        else:
            held_s, bank_cpu_s = 0.0, self.bank_cpu_s
            for seconds, used_cpu_s in past.list_parts():
                bank_cpu_s = min(bank_cpu_s, most_cpu_s) + limit * seconds - used_cpu_s
                if bank_cpu_s < -1e-9:
                    held_s += seconds
                    if s.poll_s:
                        # A look restores the full request.
                        bank_cpu_s = 0.0
                        break
            self.bank_cpu_s = bank_cpu_s
            if held_s > 0.0 or past.throttled > 0:
                if s.poll_s:
                    held_s = min(past.seconds, s.poll_s + CFS_PERIOD_S)
                held_s = max(held_s, min(past.throttled * CFS_PERIOD_S, past.seconds))
                # Without looks, a job that is held back must wait for the next check.
                self.held_s += held_s if s.poll_s else past.seconds
                self.held_most_s += past.seconds
                self.extra_periods += max(round(past.seconds / CFS_PERIOD_S) - past.periods, 0)
                self.extra_throttled += max(math.ceil(held_s / CFS_PERIOD_S - 1e-9) - past.throttled, 0)
        self.state = check(state, self._complete(reading), reading.at_s, s)[0]
        self.reclaimed.order_cores = state.hard_cores
        self.reclaimed.add(self.state.limit_cores, past.used_cpu_s / past.seconds, past.seconds)

    def rebase(self, reading: CpuReading) -> None:
        # Both throttling and usage in a gap are unknown.
        self.state = policy.rebase(msgspec.structs.replace(self.state, seen=None), self._complete(reading))

    def _complete(self, reading: CpuReading) -> CpuReading:
        """Return the counters that the kernel would show if the limit had been in force."""
        return CpuReading(
            reading.total_cpu_s,
            reading.at_s,
            reading.identity,
            reading.nr_periods + self.extra_periods,
            reading.nr_throttled + self.extra_throttled,
            reading.throttled_s,
        )

    def conclude(self, seconds: float, ordered_cores: float) -> RuleEstimate:
        """Return means over the last ``seconds``, the time since ``warm`` was recorded.

        The reclaimable fraction is multiplied by ``ordered_cores``, the mean request over all the time. So even if the
        request has changed, the reclaimable CPU cannot exceed the request."""
        reclaimable, ordered, held, most, kept, lost = (
            (now - before) / seconds if seconds > 0.0 else 0.0 for now, before in zip(self.sums, self.warm, strict=True)
        )
        share = reclaimable / ordered if ordered > 0.0 else 0.0
        # Work done before ``warm`` was recorded may be lost after that, so the quotient may exceed 1.
        lost_share = min(lost / (kept + lost), 1.0) if lost > 0.0 else 0.0
        return RuleEstimate(share * ordered_cores, share, held, most, self.state.limit_cores, lost_share)


class UseWatch:
    """Observes one workload: readings are added one by one, in constant memory.

    ``hard_cores``: the workload's request (>= 0). ``settings``: the settings for each rule. ``longest_s``: two
    readings further apart than this have a gap between them. ``timeline``: an optional sum over all workloads."""

    def __init__(
        self,
        hard_cores: float,
        settings: Mapping[LimitRule, MonitorSettings],
        longest_s: float = math.inf,
        timeline: Timeline | None = None,
    ) -> None:
        self.hard_cores = hard_cores
        self._settings = settings
        self._longest_s = longest_s
        self._timeline = timeline
        self._followers: dict[LimitRule, _Follower] = {}
        self._base: CpuReading | None = None
        self._glanced: CpuReading | None = None
        self._parts: list[float] = []
        self.watched_s = self.missing_s = self._warm_s = 0.0
        self._first: list[_Interval] = []
        self._used_cpu_s = self._ordered_cpu_s = self._most_cores = 0.0
        self.usage_cores = 0.0
        """Usage in the last sample, in cores."""

    def move_hard(self, hard_cores: float) -> None:
        """Change the workload's request to ``hard_cores``."""
        if hard_cores != self.hard_cores:
            self.hard_cores = hard_cores
            for follower in self._followers.values():
                follower.state = policy.move_hard(follower.state, hard_cores)

    def glance(self, reading: CpuReading) -> None:
        """Process a reading between two checks. No rule decides at this time, but the usage shows whether a limit would
        have held the workload back."""
        before = self._glanced
        if before is not None and reading.at_s > before.at_s:
            self._parts += (reading.at_s - before.at_s, max(reading.total_cpu_s - before.total_cpu_s, 0.0))
            self._glanced = reading

    def add(self, reading: CpuReading) -> None:
        """Add the next reading. After a gap or restarted counters, it is only the baseline for the reading after it."""
        if self._parts:
            self.glance(reading)
        parts, self._parts, self._glanced = array("f", self._parts), [], reading
        base, self._base = self._base, reading
        if base is None:
            for rule, s in self._settings.items():
                follower = self._followers[rule] = _Follower(start_state(self.hard_cores, reading.at_s), s)
                follower.rebase(reading)
            return
        interval_s = reading.at_s - base.at_s
        if interval_s <= 0.0:
            self._base = base
            return
        is_anew = reading.identity != base.identity or reading.total_cpu_s < base.total_cpu_s
        if is_anew or interval_s > self._longest_s:
            self.missing_s += interval_s
            for follower in self._followers.values():
                follower.rebase(reading)
            return
        used_cpu_s = reading.total_cpu_s - base.total_cpu_s
        usage_cores = self.usage_cores = used_cpu_s / interval_s
        periods = max(reading.nr_periods - base.nr_periods, 0)
        throttled = max(reading.nr_throttled - base.nr_throttled, 0)
        past = _Interval(interval_s, used_cpu_s, periods, throttled, parts or None)
        for follower in self._followers.values():
            follower.add(reading, past)
        self.watched_s += interval_s
        self._used_cpu_s += used_cpu_s
        self._ordered_cpu_s += self.hard_cores * interval_s
        self._most_cores = max(self._most_cores, usage_cores)
        if self.watched_s < 2.0 * WARM_UP_S:
            self._first.append(past)
        else:
            self._first = []
        if self._warm_s == 0.0 and self.watched_s >= WARM_UP_S:
            self._warm_s = self.watched_s
            for follower in self._followers.values():
                follower.warm = follower.sums
        if self._timeline is not None:
            limits = [follower.state.limit_cores for follower in self._followers.values()]
            self._timeline.add(reading.at_s, interval_s, (usage_cores, self.hard_cores, *limits))

    def conclude(self, most_checks: int = MOST_CHECKS) -> Estimate:
        """Return the estimate so far. A short observation is replayed first (``most_checks``: see MOST_CHECKS)."""
        seconds = self.watched_s
        ordered = self._ordered_cpu_s / seconds if seconds > 0.0 else self.hard_cores
        if 0.0 < seconds < 2.0 * WARM_UP_S:
            rounds = min(math.ceil(SETTLED_S / seconds), max(most_checks // len(self._first), 1))
            followers = {rule: self._continue(s, rounds) for rule, s in self._settings.items()}
            rules = {rule: follower.conclude(seconds * rounds, ordered) for rule, follower in followers.items()}
        else:
            counted_s = seconds - self._warm_s
            rules = {rule: follower.conclude(counted_s, ordered) for rule, follower in self._followers.items()}
        return Estimate(
            seconds,
            self.missing_s,
            ordered,
            self._used_cpu_s / seconds if seconds > 0.0 else 0.0,
            self._most_cores,
            self._used_cpu_s,
            rules,
        )

    def _continue(self, settings: MonitorSettings, rounds: int) -> _Follower:
        """Run a rule over a short observation: ``rounds`` times for its limit to fall, then as often for the result."""
        reading = CpuReading(0.0, 0.0)
        follower = _Follower(start_state(self.hard_cores, 0.0), settings)
        follower.rebase(reading)
        for number in range(2 * rounds):
            if number == rounds:
                follower.warm = follower.sums
            for past in self._first:
                reading = CpuReading(
                    reading.total_cpu_s + past.used_cpu_s,
                    reading.at_s + past.seconds,
                    0,
                    reading.nr_periods + past.periods,
                    reading.nr_throttled + past.throttled,
                )
                follower.add(reading, past)
        return follower


def estimate(
    readings: Iterable[CpuReading],
    hard_cores: float,
    settings: Mapping[LimitRule, MonitorSettings],
    longest_s: float = math.inf,
    check_each: int = 1,
) -> Estimate:
    """Estimate one workload from all of its readings, in order of time. Every ``check_each``-th reading is a check."""
    watch = UseWatch(hard_cores, settings, longest_s)
    for number, reading in enumerate(readings):
        (watch.glance if number % check_each else watch.add)(reading)
    return watch.conclude()


def add_up(estimates: Iterable[Estimate], length_s: float) -> Estimate:
    """Add up estimates of several workloads. Cores are means over ``length_s`` (> 0); held-back ratios are fractions of
    the observed time of all workloads."""
    every = list(estimates)
    watched_s = sum(each.watched_s for each in every)

    def mean(values: Iterable[float]) -> float:
        return sum(value * each.watched_s for value, each in zip(values, every, strict=True)) / length_s

    ordered = mean(each.ordered_cores for each in every)
    rules: dict[LimitRule, RuleEstimate] = {}
    for rule in RULES:
        own = [each.rules.get(rule, NOTHING) for each in every]
        reclaimable = mean(each.reclaimable_cores for each in own)
        lost = mean(each.lost_work_ratio * each.reclaimable_cores for each in own)
        share = length_s / watched_s if watched_s > 0.0 else 0.0
        rules[rule] = RuleEstimate(
            reclaimable,
            reclaimable / ordered if ordered > 0.0 else 0.0,
            mean(each.held_back_ratio for each in own) * share,
            mean(each.held_back_most_ratio for each in own) * share,
            mean(each.limit_cores for each in own),
            lost / reclaimable if reclaimable > 0.0 else 0.0,
        )
    return Estimate(
        watched_s,
        sum(each.missing_s for each in every),
        ordered,
        mean(each.used_cores for each in every),
        0.0,
        sum(each.used_cpu_s for each in every),
        rules,
    )


def merge(earlier: Estimate, later: Estimate) -> Estimate:
    """Merge two estimates of one workload, or of two that are shown as one. Values are means over both observations."""
    both = add_up((earlier, later), max(earlier.watched_s + later.watched_s, 1e-9))
    return msgspec.structs.replace(both, used_most_cores=max(earlier.used_most_cores, later.used_most_cores))


def judge_confidence(watched_s: float, missing_s: float, resolution_s: float) -> tuple[Confidence, list[str]]:
    """Rate the confidence of an estimate by its observed time, resolution and gaps; return it with reasons."""
    level = 0 if watched_s < MEDIUM_FROM_S else 1 if watched_s < HIGH_FROM_S * 0.98 else 2
    known = format_duration(float(round(watched_s)))
    reasons = [
        f"only {known} watched, less than half an hour: other hours may differ",
        f"{known} watched, less than a day: other hours may differ",
        f"{known} watched, a whole day and all its hours",
    ][level : level + 1]
    step = format_duration(float(f"{resolution_s:.3g}"))
    reasons.append(f"one sample every {step}: shorter bursts are not seen")
    if resolution_s > FINE_S:
        level = min(level, 1 if resolution_s <= COARSE_S else 0)
    whole_s = watched_s + missing_s
    if missing_s > whole_s * 0.005:
        reasons.append(f"{missing_s / whole_s:.0%} of the time is missing")
    if missing_s > whole_s * MAX_MISSING:
        level = 0
    return CONFIDENCES[level], reasons
