"""What the agent answers: over its control socket, on its page, and through the scheduler.

The agent makes these values, the command line reads them; pages show their JSON. Fields that an
agent of another version adds are ignored; a field with a default may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

STUCK_PERIODS = 5
"""Check periods without a check after which the agent is called stuck."""


def is_stuck(age_s: float, check_period_s: float) -> bool:
    """Whether the last check, ``age_s`` seconds ago, is too long ago: STUCK_PERIODS, and 2 s at least."""
    return age_s >= max(STUCK_PERIODS * check_period_s, 2.0)


class PeakAnswer(msgspec.Struct, frozen=True):
    """What rule ``peak`` knows of a job (limit_rules.md 2): cores, ``_s`` seconds, ratios in [0, 1]."""

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
    """The same and what it means: ``because`` where the limit comes from, ``next`` what the next check does.

    ``_at`` seconds since 1970, None where there is none yet.
    """

    seen_at: float | None = None
    held_at: float | None = None
    held_from_cores: float = 0.0
    held_after_s: float = 0.0
    because: str = ""
    next: str = ""


class JobAnswer(msgspec.Struct, frozen=True):
    """One job of ``/v1/status``: limits and usage in cores, ``throttled_ratio`` in [0, 1], ``_s`` seconds.

    ``current_cpu_limit`` is its guarantee, ``ceiling`` the quota of its cgroup (null: none); ``actuator`` what follows
    the guarantee there. ``engine``: the kind of engine that runs it, "" for others; ``unlimited``: it ordered no limit
    there, and ``cpu_limit`` is the CPU of the host.
    """

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
    """Its floor: it is never guaranteed less."""

    @property
    def reclaimed(self) -> float:
        """Cores of its order that it gives up now, >= 0."""
        return max(self.cpu_limit - self.current_cpu_limit, 0.0)


class AddedJob(JobAnswer, frozen=True):
    """The answer to ``cpumond job add``; ``warnings`` about options without effect."""

    warnings: list[str] = []


class Sums(msgspec.Struct, frozen=True):
    """Sums over all jobs that ordered a limit, in cores. ``reclaimed``: what they may not use now of it, never < 0."""

    cpu_limit: float
    current_cpu_limit: float
    reclaimed: float


class Counters(msgspec.Struct, frozen=True):
    """What the agent counted since its start."""

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
    """What became of the heartbeats that a reporter was given.

    ``sent_total`` heartbeats the receiver took, ``failed_total`` attempts that failed (one heartbeat may count several
    times), ``dropped_total`` heartbeats that were not delivered: superseded by a newer one, too old for the receiver,
    or still waiting at the end. ``last_success_at_s`` seconds of the monotonic clock, None before the first success.
    ``last_error`` one sentence on why the newest attempt failed, "" when it succeeded.
    """

    sent_total: int = 0
    failed_total: int = 0
    dropped_total: int = 0
    last_success_at_s: float | None = None
    last_error: str = ""


class LinkView(msgspec.Struct, frozen=True):
    """The node's registration: ``tree`` None when it is not registered, or fits no tree (``warning`` says so).

    ``url`` the scheduler that is asked now, ``term`` that of its last answer: None where it is alone on its store.
    ``terms_refused``: answers of a scheduler that had lost the lead.
    """

    url: str
    registered: bool
    tree: str | None
    warning: str
    stats: ReporterStats
    term: int | None = None
    terms_refused: int = 0
    level: str = ""
    """What the stages of a roll-out let the agent do at most (``may_set_mode``); "" where they have no say."""


class AssignedView(msgspec.Struct, frozen=True):
    """The executor's side of a tick: jobs by state, counts since the start, ``problem`` "" when all is well."""

    kind: str
    states: dict[str, int]
    counters: dict[str, int]
    start_buckets: tuple[int, ...]
    start_seconds: float
    problem: str


class EngineAnswer(msgspec.Struct, frozen=True):
    """An engine whose jobs the agent follows; ``title`` its name and version, ``jobs`` how many it has named,
    ``problem`` why it does not answer now, "" while it does."""

    kind: str
    socket: str
    title: str = ""
    jobs: int = 0
    problem: str = ""


class StatusAnswer(msgspec.Struct, frozen=True):
    """``/v1/status``: the agent after its newest check; ``last_tick_age_s`` seconds since that at ``now``;
    ``empty_cgroups``: how many cgroups a source names that are no jobs, since no process is in them."""

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
    """What a limit moves between, in cores; None = there is no such quota."""

    floor: float
    cap: float
    lower_bound: float
    upper_bound: float
    quota_found: float | None = None
    ancestor_cap: float | None = None
    ancestor: str = ""


class Window(msgspec.Struct, frozen=True):
    """The votes of the next decision; ``values`` in smoothed cores (None = a throttled check), or votes themselves.

    ``meaning`` is what a vote says, in words.
    """

    size: int
    threshold: int
    values: list[float | None]
    votes: list[int]
    votes_sum: int | None = None
    meaning: str = ""


class Quota(msgspec.Struct, frozen=True):
    """The settings of a cgroup; ``cores`` None = no quota."""

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
    """One change, or an attempt at it. ``at`` seconds since 1970, cores (None: no limit), ``result``: what came of it.

    ``kind``: grow, shrink, restore as decided; foreign-raise, foreign-lower: another program wrote; order: its engine
    did; reapply: written again after that; adopt: found at the start; pin; mode: the job's mode changed.
    ``throttled_ratio``, ``pressure_ratio`` and ``by_look`` as in ``Decision``; ``reason`` in words.
    """

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
    """The points of a job's graphs, oldest first; ``at`` seconds since 1970, cores, ``throttled_ratio`` in [0, 1]."""

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
    """``/v1/jobs/JOB/explain``. ``cpu_limit_given`` None = taken from the cgroup; ``source`` "" = added at run time.

    ``why`` the limit is what it is and what the ``next`` check does, in sentences, and by heading the ``facts`` that
    they follow from; "" from an older agent. ``pinned_until`` seconds since 1970; ``held_s`` seconds in which
    nothing shrinks, ``start_left_s`` in which nothing is measured yet.
    """

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
    """What the scheduler's stages let the agent do at most (``may_set_mode``); "" where they have no say."""
    paused: bool = False
    pinned_until: float | None = None
    held_s: float = 0.0
    start_left_s: float = 0.0


class RegisteredJob(msgspec.Struct, frozen=True):
    """A job that was added over the control socket; ``cpu_limit`` cores, None = from the cgroup."""

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
