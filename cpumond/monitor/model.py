"""Values of the job CPU monitor: its settings, one job's state, one reading, one decision.

All values are frozen. Units are in the names. Section numbers refer to semantics.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from cpumond.core.errors import ConfigError
from cpumond.core.levels import ACTUATORS, Actuator, Level, is_above
from cpumond.core.measures import DURATION

Ratio = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Cores = Annotated[float, msgspec.Meta(ge=0.0)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, extra=DURATION)]
OptionalDuration = Annotated[Annotated[float, msgspec.Meta(ge=0.0)] | None, msgspec.Meta(extra=DURATION)]
CheckPeriod = Annotated[float, msgspec.Meta(ge=0.01, le=86_400.0, extra=DURATION)]

Mode = Literal["off", "shadow", "up-only", "reclaim"]
LimitRule = Literal["document", "peak"]
VoteMode = Literal["document", "ytsaurus"]
EarlyRestore = Literal["off", "use", "ordered"]
"""How much CPU a job gets if its usage shows, before its burst is spent, that its lowered limit is too low. "use":
somewhat more than its usage. "ordered": its full request."""
Direction = Literal["both", "up-only", "down-only"]
Kind = Literal["delay", "base", "hold", "grow", "shrink", "restore"]

MIN_POLL_S: Final = 0.01
EARLY_LOOK_S: Final = 0.05
"""Seconds between two looks at a job's usage for ``early_restore``. It is shorter than an enforcement period, because
the kernel shows only at the end of a period that it was throttled."""
QUOTA_OPTIONS: Final = ("burst_ratio", "early_restore", "min_cores_per_thread")
"""Options that have no effect if the limit does not prevent higher usage."""
MODES: Final[tuple[Mode, ...]] = ("off", "shadow", "up-only", "reclaim")
"""All modes, from the least active one to the most active one."""


class RuleDefaults(msgspec.Struct, frozen=True):
    """Defaults of options under a ``limit_rule``, and the options that have no effect under this rule.

    ``throttle_poll_s``: in seconds; 0 = no looks between checks. ``burst_ratio``: None keeps the burst found.
    ``weight_pressure_ratio``: default of ``pressure_restore_ratio`` with ``actuator = "weight"``; the default is 0 with
    other actuators. ``use_restore_ratio``: only for a limit that does not prevent higher usage; for other limits the
    default is 0. ``early_restore``: only has an effect with a burst."""

    throttle_poll_s: float
    burst_ratio: float | None
    weight_pressure_ratio: float
    use_restore_ratio: float
    early_restore: EarlyRestore
    idle_options: tuple[str, ...]


RULE_DEFAULTS: Final[Mapping[LimitRule, RuleDefaults]] = {
    "document": RuleDefaults(
        0.0, None, 0.0, 0.0, "off", ("throttle_budget", "reserve_ratio", "peak_memory", "early_restore")
    ),
    "peak": RuleDefaults(
        0.2,
        1.0,
        0.1,  # usage alone cannot show that others take the CPU
        1.0,
        "use",
        (
            "relative_upper_bound", "relative_lower_bound", "increase_coefficient", "decrease_coefficient",
            "vote_mode", "vote_window_size", "vote_decision_threshold", "headroom_ratio", "throttle_restore_ratio",
            "throttle_vote",
        ),
    ),
}  # fmt: skip
"""Defaults for each rule in ``rules.RULES``."""


class MonitorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resulting section ``job-cpu-monitor`` of one job (1.1). Options that YTsaurus has, too, have the same names.

    Ratios are in [0, 1], coefficients are factors of the current limit, ``..._s`` are seconds, cores are >= 0.
    ``throttle_poll_s``, ``burst_ratio``, ``early_restore``, ``pressure_restore_ratio`` and ``use_restore_ratio`` get
    their defaults from ``RULE_DEFAULTS``. After that, only ``burst_ratio`` can be None."""

    mode: Mode | None = None
    enable_cpu_reclaim: bool | None = None
    check_period_s: CheckPeriod = msgspec.field(name="check_period", default=1.0)
    limit_rule: LimitRule = "document"
    throttle_budget: Ratio = 0.004
    reserve_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 0.05
    peak_memory_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400.0, extra=DURATION)] = msgspec.field(
        name="peak_memory", default=5.0
    )
    throttle_poll_s: OptionalDuration = msgspec.field(name="throttle_poll", default=None)
    start_delay_s: Duration = msgspec.field(name="start_delay", default=0.0)
    smoothing_factor: Ratio = 0.1
    smoothing_seed: Literal["limit", "first_value"] = "limit"
    relative_upper_bound: Ratio = 0.9
    relative_lower_bound: Ratio = 0.6
    increase_coefficient: Annotated[float, msgspec.Meta(ge=1.0, le=2.0)] = 1.45
    decrease_coefficient: Ratio = 0.97
    vote_mode: VoteMode = "document"
    vote_window_size: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 5
    vote_decision_threshold: Annotated[int, msgspec.Meta(ge=1, le=9_999)] = 3
    min_cpu_limit: Cores = 1.0
    min_limit_ratio: Ratio = 0.0
    headroom_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 0.0
    min_cores_per_thread: Cores = 0.0
    direction: Direction = "both"
    actuator: Actuator = "quota"
    burst_ratio: Ratio | None = None
    early_restore: EarlyRestore | None = None
    throttle_restore_ratio: Ratio = 0.09
    pressure_restore_ratio: Ratio | None = None
    use_restore_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1000.0)] | None = None
    throttle_vote: bool = False
    restore_hold_s: Duration = msgspec.field(name="restore_hold", default=0.0)
    startup_boost_s: Duration = msgspec.field(name="startup_boost", default=0.0)

    def __post_init__(self) -> None:
        rule = RULE_DEFAULTS[self.limit_rule]
        defaults = {
            # A guarantee does not limit the job's usage: usage above the guarantee can wait for the next check.
            "throttle_poll_s": 0.0 if self.actuator == "guarantee" else rule.throttle_poll_s,
            "burst_ratio": rule.burst_ratio,
            "early_restore": rule.early_restore,
            "pressure_restore_ratio": rule.weight_pressure_ratio if self.actuator == "weight" else 0.0,
            "use_restore_ratio": 0.0 if self.is_ceiling else rule.use_restore_ratio,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, value)

    @property
    def is_ceiling(self) -> bool:
        """Whether the limit prevents higher usage, so that usage alone cannot show a higher demand."""
        return self.actuator == "quota"

    @property
    def poll_s(self) -> float:
        """Seconds between looks at throttling; 0 for no looks. Under rule ``document`` looks need
        ``throttle_restore_ratio``: there are none if this is 0 or >= 1, or if the limit does not throttle."""
        if self.limit_rule == "document" and not (self.is_ceiling and 0.0 < self.throttle_restore_ratio < 1.0):
            return 0.0
        return self.throttle_poll_s or 0.0

    @property
    def looks_early(self) -> bool:
        """Whether ``early_restore`` acts: it needs a burst, which lets a job exceed its limit before throttling."""
        return self.is_ceiling and self.limit_rule == "peak" and self.early_restore != "off" and bool(self.burst_ratio)

    @property
    def follows_pressure(self) -> bool:
        """Whether the job's pressure must be read."""
        return bool(self.pressure_restore_ratio)


DEFAULT_SETTINGS: Final = MonitorSettings()


def check_together(settings: MonitorSettings, where: str) -> None:
    """Check options against each other (1.1). Raises ConfigError, whose message begins with ``where`` (file, section).

    It requires lower bound <= upper bound, threshold < window, a look period of 0 or >= 10 ms, and finite values."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: {name.removesuffix('_s')} must be a finite number, got {value}")
    if settings.relative_lower_bound > settings.relative_upper_bound:
        raise ConfigError(
            f"{where}: relative_lower_bound = {settings.relative_lower_bound:g} is above "
            f"relative_upper_bound = {settings.relative_upper_bound:g}; allowed: 0 <= relative_lower_bound <= "
            "relative_upper_bound <= 1"
        )
    if 0.0 < (settings.throttle_poll_s or 0.0) < MIN_POLL_S:
        raise ConfigError(
            f"{where}: throttle_poll = {settings.throttle_poll_s:g}s is too short; allowed: 0 (no looks), or >= 10ms"
        )
    if settings.vote_decision_threshold >= settings.vote_window_size:
        raise ConfigError(
            f"{where}: vote_decision_threshold = {settings.vote_decision_threshold} can never be exceeded by "
            f"{settings.vote_window_size} votes; allowed: 1 <= vote_decision_threshold < vote_window_size"
        )


def list_idle_options(settings: MonitorSettings, given: Iterable[str]) -> list[str]:
    """Return a clause about each option in ``given`` that has no effect under the rule and actuator of ``settings``,
    for example "vote_mode has no effect under limit_rule = peak"."""
    named = set(given)
    rule = settings.limit_rule
    idle = RULE_DEFAULTS[rule].idle_options
    found = [f'{name} has no effect under limit_rule = "{rule}"' for name in idle if name in named]
    if "throttle_poll" in named and settings.throttle_poll_s and not settings.poll_s:
        ratio = f"throttle_restore_ratio = {settings.throttle_restore_ratio:g}"
        reason = ratio if settings.is_ceiling else f'actuator = "{settings.actuator}"'
        found.append(f'throttle_poll has no effect under limit_rule = "{rule}" with {reason}')
    idle = ("use_restore_ratio",) if settings.is_ceiling else QUOTA_OPTIONS
    return found + [f'{name} has no effect with actuator = "{settings.actuator}"' for name in idle if name in named]


def compute_mode(settings: MonitorSettings) -> Mode:
    """Return the mode in force: ``mode``, but at most shadow if ``enable_cpu_reclaim = false`` (1.5).

    If neither option is given, the mode is shadow. If only ``enable_cpu_reclaim = true`` is given, it is reclaim."""
    if settings.enable_cpu_reclaim is None:
        return settings.mode or "shadow"
    mode = settings.mode or "reclaim"
    return mode if settings.enable_cpu_reclaim else least_active(mode, "shadow")


def find_level(settings: MonitorSettings) -> Level:
    """Return the roll-out level of ``settings``: the mode in force; for mode reclaim, the actuator."""
    return join_level(compute_mode(settings), settings.actuator)


def join_level(mode: Mode, actuator: Actuator) -> Level:
    """Return the roll-out level of a mode and an actuator: the mode; for mode reclaim, the actuator."""
    return actuator if mode == "reclaim" else mode


def hold_to_level(settings: MonitorSettings, level: Level) -> dict[str, Any]:
    """Return options that, as the last layer, limit ``settings`` to ``level``; empty if they are within it already."""
    if not is_above(find_level(settings), level):
        return {}
    return {"actuator": level} if level in ACTUATORS else {"mode": level, "enable_cpu_reclaim": None}


def hold_mode(mode: Mode, level: Level) -> tuple[Mode, Actuator | None]:
    """Return ``mode`` limited to ``level``, and the most active actuator allowed; None if any actuator is allowed."""
    if level == "guarantee" or level == "weight" or level == "quota":
        return mode, level
    return least_active(mode, level), None


def least_active(a: Mode, b: Mode) -> Mode:
    """Return the less active of two modes (off < shadow < up-only < reclaim)."""
    return min(a, b, key=MODES.index)


def merge_layers(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge options of several layers in the order node, source, operation, job. Later layers override earlier ones."""
    return {name: value for layer in layers for name, value in layer.items()}


class CpuReading(msgspec.Struct, frozen=True, gc=False):
    """Counters of one cgroup at one time. They never fall as long as ``identity`` is the same.

    ``total_cpu_s``: CPU seconds used. ``at_s``: monotonic time in seconds. ``identity``: inode of the cgroup.
    ``nr_periods``, ``nr_throttled``: numbers of enforcement periods, all and throttled. ``throttled_s``: throttled
    seconds, summed over CPUs. ``pressure_s``: seconds in which some task waited for CPU (PSI), None if not read."""

    total_cpu_s: float
    at_s: float
    identity: int = 0
    nr_periods: int = 0
    nr_throttled: int = 0
    throttled_s: float = 0.0
    pressure_s: float | None = None


class HeldBack(msgspec.Struct, frozen=True, gc=False):
    """How often a lowered limit held a job back since rule ``peak`` began to follow it (limit_rules.md 3).

    ``count``: number of times. ``held_s``: seconds of throttled periods, summed over all times. Of the last time:
    ``at_s`` is the monotonic time, ``from_cores`` the limit that held the job back, ``after_s`` the seconds until the
    full request was restored."""

    count: int = 0
    held_s: float = 0.0
    at_s: float = -math.inf
    from_cores: float = 0.0
    after_s: float = 0.0


NEVER_HELD: Final = HeldBack()
FIRST_CAUTION: Final = 2.0
"""The caution of a new job (limit_rules.md 2). With it, short jobs do not exceed the budget either."""


class JobState(msgspec.Struct, frozen=True, gc=False):
    """State of one job between two checks (1.2).

    - ``hard_cores``: the CPU that the job can have, which the monitor never moves; ``limit_cores``: the current limit,
      from 0 to ``hard_cores``.
    - ``smoothed_cores``: the smoothed usage, None before the second good sample.
    - ``window``: the last smoothed values (vote mode document) or votes (ytsaurus), the oldest first; ``usages``: the
      usage in the same checks, for ``headroom_ratio``.
    - ``base``: the sample with which the next sample is compared. ``hold_until_s``: no cut is made before this time.
    - ``smoothed_cpu_s``, ``preemptible_cpu_s``, ``max_cpu_s``: the sums of section 1.7 in core-seconds; ``max_cpu_s``
      is the sum of ``hard_cores``.
    - ``throttled_cpu_s``: the time for which a quota throttled threads in the checked intervals, summed over CPUs. The
      kernel adds a throttled time when it is over. A limit that is only a weight does not throttle.
    - ``late_cpu_s``: that part of ``throttled_cpu_s`` in intervals that began with the limit below ``hard_cores``: CPU
      that was restored too late.
    - ``seen``: the newest reading, at a check or a look, whose throttling is accounted for; None if throttling before
      the next reading must not count.
    - ``cfs_period_s``: length of an enforcement period.
    - ``no_cut_until_s``: no cut is decided before this time, because a cut had no effect: a bound of the kernel or of
      the job's threads prevented it.
    - ``is_written``: whether the limit is in force. If not (mode shadow), it causes no throttled periods, and usage
      above the limit counts as held back.

    Fields of rule ``peak`` (limit_rules.md 2):
    - ``peak_cores``: the recent maximum of usage, fading, None before the rule's first check; ``peak_at_s``: its time.
    - ``caution``: in [0, 7]; the half-life of the peak is ``peak_memory`` * 2 ^ caution.
    - ``watched_s``: seconds for which the rule has followed the job; ``held``: how often it was held back meanwhile."""

    hard_cores: float
    limit_cores: float
    seed_cores: float
    started_at_s: float
    smoothed_cores: float | None = None
    window: tuple[float, ...] = ()
    usages: tuple[float, ...] = ()
    base: CpuReading | None = None
    hold_until_s: float = -math.inf
    smoothed_cpu_s: float = 0.0
    preemptible_cpu_s: float = 0.0
    max_cpu_s: float = 0.0
    throttled_cpu_s: float = 0.0
    late_cpu_s: float = 0.0
    seen: CpuReading | None = None
    peak_cores: float | None = None
    peak_at_s: float = -math.inf
    caution: float = FIRST_CAUTION
    watched_s: float = 0.0
    held: HeldBack = NEVER_HELD
    cfs_period_s: float = 0.1
    no_cut_until_s: float = -math.inf
    is_written: bool = True


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The result of one check.

    ``kind``: delay (before the end of start_delay, or no new sample), base (first sample or new baseline), hold, grow,
    shrink, restore. ``votes_sum``: None until the window is full, or if there was no vote. ``interval_s``: real seconds
    since the previous sample. ``throttled_ratio``: the fraction of throttled periods in the interval.
    ``pressure_ratio``: the fraction of time in which some task waited for CPU, 0 if ``pressure_restore_ratio`` is off
    or the kernel does not report it. Both are in [0, 1]. ``by_look``: whether a look between two checks decided; if so,
    ``throttled_ratio`` covers the time since the previous look or check. Cores are as in JobState."""

    kind: Kind
    old_cores: float
    new_cores: float
    usage_cores: float | None = None
    votes_sum: int | None = None
    interval_s: float = 0.0
    throttled_ratio: float = 0.0
    pressure_ratio: float = 0.0
    by_look: bool = False

    @property
    def changes(self) -> bool:
        return self.new_cores != self.old_cores


def start_state(hard_cores: float, started_at_s: float, limit_cores: float | None = None) -> JobState:
    """Return the state of a job before its first check (1.2). The limit is ``hard_cores`` or, for an adopted job,
    ``limit_cores``.

    The smoothed value of an adopted job starts at the highest value that does not vote to grow (``policy.smooth``), so
    that a restart of the agent does not change a suitable limit."""
    limit_cores = hard_cores if limit_cores is None else min(limit_cores, hard_cores)
    return JobState(hard_cores, limit_cores, limit_cores, started_at_s)
