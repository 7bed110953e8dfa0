"""Answers of the agent: over its control socket, on its page, and through the scheduler.

The agent builds these structs, the command line decodes them, and pages show their JSON. Fields that an agent of a
different version adds are ignored. A field with a default may be missing."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

STUCK_PERIODS = 5
"""Number of check periods without a check after which the agent counts as stuck."""


def is_stuck(age_s: float, check_period_s: float) -> bool:
    """Return whether ``age_s``, the age of the last check, is more than STUCK_PERIODS periods and at least 2 s."""
    return age_s >= max(STUCK_PERIODS * check_period_s, 2.0)


class PeakAnswer(msgspec.Struct, frozen=True):
    """State of rule ``peak`` for a job (limit_rules.md 2). CPU is in cores, ``_s`` is in seconds, a ratio in [0, 1]."""

    peak_cores: float | None
    target_cores: float | None
    caution: float
    half_life_s: float
    watched_s: float
    held_count: int
    held_s: float
    held_ratio: float
    throttle_budget: float


class ExplainedPeak(PeakAnswer, frozen=True):
    """``PeakAnswer`` in words: ``because`` explains the present limit, ``next`` the effect of the next check.

    Fields in ``_at`` are seconds since 1970, None if the event has not happened yet."""

    seen_at: float | None = None
    held_at: float | None = None
    held_from_cores: float = 0.0
    held_after_s: float = 0.0
    because: str = ""
    next: str = ""


class JobAnswer(msgspec.Struct, frozen=True):
    """One job of ``/v1/status``. Limits and usage are in cores, ``throttled_ratio`` in [0, 1], ``_s`` in seconds.

    ``current_cpu_limit`` is the job's guarantee, ``ceiling`` the quota of its cgroup (null: none), and ``actuator`` the
    cgroup setting that follows the guarantee. ``engine`` is the kind of engine that runs the job, "" if none does.
    ``unlimited``: the job requested no limit, so ``cpu_limit`` is the CPU of the host."""

    job_id: str
    cgroup: str
    status: str
    mode: str
    cpu_limit: float
    current_cpu_limit: float
    monitor_cpu_limit: float
    operation_id: str = ""
    refused: str = ""
    usage: float | None = None
    smoothed_cpu_usage: float | None = None
    votes_sum: int | None = None
    throttled_ratio: float = 0.0
    last_result: str = ""
    last_error: str = ""
    override_left_s: float | None = None
    override_by: str = ""
    unit: str = ""
    labels: Mapping[str, str] = {}
    engine: str = ""
    unlimited: bool = False
    pinned_cpu_limit: float | None = None
    fast_restores: int = 0
    write_errors: int = 0
    limit_rule: str = "document"
    peak: PeakAnswer | None = None
    actuator: str = "quota"
    ceiling: float | None = None
    min_cpu_limit: float | None = None
    """Lower bound of the job's guarantee, in cores."""

    @property
    def reclaimed(self) -> float:
        """Cores by which the job's limit is below its request now, >= 0."""
        return max(self.cpu_limit - self.current_cpu_limit, 0.0)


class AddedJob(JobAnswer, frozen=True):
    """The answer to ``cpumond job add``; ``warnings`` are about options that have no effect."""

    warnings: list[str] = []


class Sums(msgspec.Struct, frozen=True):
    """Sums over all jobs with a requested limit, in cores. ``reclaimed``: request minus current limit, never < 0."""

    cpu_limit: float
    current_cpu_limit: float
    reclaimed: float


class Counters(msgspec.Struct, frozen=True):
    """Counters of the agent since its start."""

    foreign_writes: dict[str, int] = {}
    decisions: dict[str, int] = {}
    late_ticks: int = 0
    rebaselines: int = 0
    restores: int = 0
    failed_restores: int = 0
    write_errors: int = 0
    writes: int = 0
    errors: int = 0
    jobs_gone: int = 0
    shed_checks: int = 0
    looks_restored: int = 0
    lost_files: int = 0


class ReporterStats(msgspec.Struct, frozen=True):
    """Delivery statistics of a reporter.

    ``sent_total`` counts heartbeats that the receiver accepted. ``failed_total`` counts failed attempts, possibly
    several for one heartbeat. ``dropped_total`` counts heartbeats that were never delivered: superseded by a newer one,
    too old for the receiver, or still waiting at the end. ``last_success_at_s`` is in seconds of the monotonic clock,
    None before the first success. ``last_error`` is a sentence on why the newest attempt failed, "" if it succeeded."""

    sent_total: int = 0
    failed_total: int = 0
    dropped_total: int = 0
    last_success_at_s: float | None = None
    last_error: str = ""


class LinkView(msgspec.Struct, frozen=True):
    """The node's registration. ``tree`` is None if the node is not registered or fits no tree (see ``warning``).

    ``url`` is the scheduler in use now. ``term`` is the term of its last answer, None if it is alone on its store.
    ``terms_refused`` counts answers that were refused because their scheduler had lost the lead."""

    url: str
    registered: bool
    tree: str | None
    warning: str
    stats: ReporterStats
    term: int | None = None
    terms_refused: int = 0
    level: str = ""
    """Highest level that the stages of a roll-out allow the agent (``may_set_mode``); "" if no stage applies."""


class AssignedView(msgspec.Struct, frozen=True):
    """State of the executor at a tick: jobs by state, counters since the start; ``problem`` is "" if there is none."""

    kind: str
    states: dict[str, int]
    counters: dict[str, int]
    start_buckets: tuple[int, ...]
    start_seconds: float
    problem: str


class EngineAnswer(msgspec.Struct, frozen=True):
    """An engine whose jobs the agent follows. ``title``: its name and version. ``jobs``: the number of jobs that it has
    named. ``problem``: why it does not answer now, "" while it does."""

    kind: str
    socket: str
    title: str = ""
    jobs: int = 0
    problem: str = ""


class StatusAnswer(msgspec.Struct, frozen=True):
    """``/v1/status``: the agent after its newest check, which was ``last_tick_age_s`` seconds before ``now``.
    ``empty_cgroups`` counts cgroups that match a source but are no jobs, because they contain no process."""

    node_id: str
    layout: str
    tick_duration_s: float
    check_period_s: float
    paused: bool
    totals: Sums
    counters: Counters
    jobs: list[JobAnswer]
    tick: int = 0
    problems: list[str] = []
    last_tick_age_s: float | None = None
    now: float | None = None
    scheduler: LinkView | None = None
    executor: AssignedView | None = None
    engines: list[EngineAnswer] = []
    empty_cgroups: int = 0

    @property
    def is_stuck(self) -> bool:
        return is_stuck(self.last_tick_age_s or 0.0, self.check_period_s)


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of a limit in cores; ``quota_found`` and ``ancestor_cap`` are None if there is no such quota."""

    floor: float
    cap: float
    lower_bound: float
    upper_bound: float
    quota_found: float | None = None
    ancestor_cap: float | None = None
    ancestor: str = ""


class Window(msgspec.Struct, frozen=True):
    """The votes of the next decision. ``values``: the smoothed cores of each check (None: the check was throttled) or,
    in vote mode ytsaurus, the votes themselves. ``meaning`` explains in words how a vote is cast."""

    size: int
    threshold: int
    values: list[float | None]
    votes: list[int]
    votes_sum: int | None = None
    meaning: str = ""


class Quota(msgspec.Struct, frozen=True):
    """The CPU settings of a cgroup; ``cores`` None: no quota."""

    quota_us: int | None
    period_us: int
    burst_us: int | None = None
    weight: int | None = None
    cores: float | None = None


class PressureAnswer(msgspec.Struct, frozen=True):
    """PSI of the cgroup's CPU, in [0, 1]."""

    some_10s_ratio: float
    some_60s_ratio: float
    some_total_s: float


class Aggregated(msgspec.Struct, frozen=True):
    """Core-seconds since the agent began to follow the job."""

    smoothed_cpu_s: float
    preemptible_cpu_s: float
    preempted_cpu_s: float
    max_cpu_s: float
    throttled_cpu_s: float = 0.0
    late_cpu_s: float = 0.0


class DecisionAnswer(msgspec.Struct, frozen=True):
    """One change of a limit, or an attempt to change it. ``at`` is in seconds since 1970; cores None: no limit.

    ``kind``: the cause. grow, shrink, restore: the rule decided; foreign-raise, foreign-lower: another program wrote;
    order: the job's engine wrote; reapply: cpumond wrote its value again; adopt: the limit was found at the start; pin;
    mode: the job's mode changed. ``result`` is the outcome. ``throttled_ratio``, ``pressure_ratio`` and ``by_look``
    mean the same as in ``Decision``; ``reason`` is in words."""

    at: float
    kind: str
    old_cores: float | None
    new_cores: float | None
    applied_cores: float | None
    usage_cores: float
    smoothed_cores: float
    throttled_ratio: float
    votes_sum: int | None
    result: str
    pressure_ratio: float = 0.0
    by_look: bool = False
    reason: str = ""


class SamplesAnswer(msgspec.Struct, frozen=True):
    """The points of a job's graphs, oldest first. ``at`` is in seconds since 1970, CPU in cores, a ratio in [0, 1]."""

    period_s: float
    at: list[float] = []
    usage: list[float] = []
    smoothed: list[float | None] = []
    limit: list[float] = []
    floor: list[float] = []
    lower_bound: list[float] = []
    upper_bound: list[float] = []
    votes_sum: list[int | None] = []
    throttled_ratio: list[float] = []
    peak: list[float | None] = []


class ExplainAnswer(JobAnswer, frozen=True, kw_only=True):
    """``/v1/jobs/JOB/explain``. ``cpu_limit_given``: None if the request was taken from the cgroup. ``source``: "" if
    the job was added at run time. ``why`` explains the present limit, ``next`` the effect of the next check, both in
    sentences; ``facts``: the facts behind them, by heading. An older agent leaves these three empty. ``pinned_until``
    is in seconds since 1970. For the next ``held_s`` seconds the limit does not shrink; for the next ``start_left_s``
    seconds nothing is measured."""

    why: str = ""
    next: str = ""
    facts: dict[str, str] = {}
    job_cpu_monitor: dict[str, object]
    bounds: Bounds
    window: Window
    in_force: Quota
    found: Quota
    peak: ExplainedPeak | None = None
    notes: list[str] = []
    contested_losses: int = 0
    pressure: PressureAnswer | None = None
    total_cpu_s: float = 0.0
    throttled_s: float = 0.0
    aggregated: Aggregated | None = None
    decisions: list[DecisionAnswer] = []
    samples: SamplesAnswer | None = None
    directory: str = ""
    source: str = ""
    cpu_limit_given: float | None = None
    xattr_mode: str | None = None
    told_level: str = ""
    """Highest level that the scheduler's stages allow the agent (``may_set_mode``); "" if no stage applies."""
    paused: bool = False
    pinned_until: float | None = None
    held_s: float = 0.0
    start_left_s: float = 0.0


class RegisteredJob(msgspec.Struct, frozen=True):
    """A job that was added over the control socket; ``cpu_limit`` is in cores, None if it is taken from the cgroup."""

    job_id: str
    path: str
    operation_id: str = ""
    cpu_limit: float | None = None
    job_cpu_monitor: dict[str, object] = {}


class RemovedJob(msgspec.Struct, frozen=True):
    """The answer to ``cpumond job remove``."""

    job_id: str
    removed: bool = True


class RegisteredList(msgspec.Struct, frozen=True):
    """``/v1/registered``."""

    jobs: list[RegisteredJob]
