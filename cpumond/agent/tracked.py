"""The agent's record of one job, and a frozen view of this record for metrics and status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from cpumond.agent.config import AgentConfig
from cpumond.agent.discovery import FoundJob
from cpumond.agent.jobs.job import Usage
from cpumond.agent.limits.hold import FREE, UNHELD, Hold, Respected
from cpumond.agent.ring import DecisionRing, SampleRing
from cpumond.core.answers import DecisionAnswer
from cpumond.core.errors import ConfigError
from cpumond.core.levels import Actuator, Level, is_above
from cpumond.core.wire import MAX_NAME, JobReport, list_figures
from cpumond.host.cgroup import Cgroup, files
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.cgroup.settings import EQUAL_CORES, AncestorCap, CpuSettings
from cpumond.monitor.model import (
    MODES,
    Decision,
    JobState,
    Mode,
    MonitorSettings,
    compute_mode,
    hold_mode,
    join_level,
    least_active,
)
from cpumond.monitor.policy import compute_floor, move_hard, restart_at

NO_LABELS: Mapping[str, str] = {}
"""The value of ``labels`` for every job without labels; thousands of jobs share it."""
NO_CAP = AncestorCap(math.inf)
NO_ORDER = "no limit ordered"


@dataclass(slots=True, eq=False)
class Tracked:
    """One job that the agent follows. Only the tick's thread writes to this record.

    Times ``..._s`` are monotonic. Limits are in cores."""

    found: FoundJob
    cgroup: Cgroup
    settings: MonitorSettings
    original: CpuSettings
    """The settings before the agent's first change. They are restored in the end."""
    state: JobState
    _in_force: CpuSettings = field(init=False)
    ancestor: AncestorCap = NO_CAP
    mode: Mode = "shadow"
    is_control: bool = False
    """Whether the job is in shadow because it belongs to the control group."""
    refused: str = ""
    """Why the job's limit must not be written; "" if it may be written."""
    touched: bool = False
    """Whether ``original`` is on disk, because the agent has changed or is about to change this cgroup."""
    hold: Hold = UNHELD
    decision: Decision | None = None
    result: str = ""
    notes: tuple[str, ...] = ()
    """The bounds that changed the last limit when it was written, in words."""
    last_error: str = ""
    next_check_s: float = -math.inf
    unit: str = ""
    """The systemd unit of the job's cgroup; "" if the limit is only written to the file."""
    labels: Mapping[str, str] = field(default_factory=lambda: NO_LABELS)
    """Properties of ``unit``, or labels from the job's engine."""
    write_errors: int = 0
    restores: int = 0
    config: AgentConfig | None = None
    """The configuration from which ``settings`` and ``mode`` were computed. Their other input was ``asked_mode``."""
    asked_mode: tuple[str, bool] | None = None
    """The value of the xattr, and whether root owns the cgroup."""
    bound: Level | None = None
    """The level that the job would have without the scheduler's bound; None if it has no options of its own."""
    watches: list[object] = field(default_factory=list)
    ring: DecisionRing = field(default_factory=DecisionRing)
    samples: SampleRing | None = None
    """The points of the job's graphs; None if no page can show them."""
    looked_cpu_s: float = -1.0
    """The job's CPU time at the last call of ``find_process`` to which its change showed that there is a process."""
    kept_late_s: float = 0.0
    """The value of ``late_cpu_s``, in core-seconds, when the agent last stopped writing the limit."""

    def __post_init__(self) -> None:
        self.in_force = self.original

    @property
    def in_force(self) -> CpuSettings:
        """The settings that the cgroup has now, as far as the agent knows."""
        return self._in_force

    @in_force.setter
    def in_force(self, settings: CpuSettings) -> None:
        self._in_force = settings
        self.follow_period()

    def follow_period(self) -> None:
        """Copy into ``state`` the enforcement period, in which the kernel counts throttling."""
        period_s = self._in_force.period_us / 1e6
        if self.state.cfs_period_s != period_s:
            self.state = msgspec.structs.replace(self.state, cfs_period_s=period_s)

    @property
    def moves(self) -> bool:
        """Whether the agent may move the job's guarantee."""
        return self.mode in ("reclaim", "up-only") and not self.refused and not self.is_unlimited

    @property
    def actuator(self) -> Actuator:
        """The setting of the cgroup that follows the job's guarantee, see ``choose_actuator``."""
        return choose_actuator(self.settings, self.found)

    @property
    def actuators(self) -> tuple[str, ...]:
        """All settings that the agent writes; for a job of the scheduler, actuator "quota" includes the weight."""
        return list_actuators(self.settings, self.found)

    @property
    def writes(self) -> bool:
        return self.moves and self.actuator != "guarantee"

    @property
    def is_unlimited(self) -> bool:
        """Whether the job is only observed, because it belongs to an engine and requests no limit."""
        found = self.found
        if found.engine is None or found.cpu_limit_cores is not None or self.original.quota_us is not None:
            return False
        return found.source is None or found.source.unlimited != "host"

    @property
    def ordered_cores(self) -> float:
        """The job's request in cores: its ``cpu_limit``, or the quota found; at most the CPU that it can have."""
        return self.state.hard_cores

    def usage(self) -> Usage:
        state, decision = self.state, self.decision
        checked = decision is not None and decision.usage_cores is not None
        mode = self.shown_mode
        if self.hold.decider is not FREE and self.hold.is_foreign:
            mode = "contested" if self.hold.is_contested else "overridden"
        return Usage(
            self.current_cores,
            state.smoothed_cores,
            mode,
            cpu_seconds=None if state.base is None else state.base.total_cpu_s,
            reclaimed_cpu_seconds=state.preemptible_cpu_s if self.moves else 0.0,
            ordered_cpu_seconds=state.max_cpu_s,
            throttled_cpu_seconds=state.throttled_cpu_s,
            late_cpu_seconds=self.late_cpu_s,
            cpu_usage=decision.usage_cores if decision is not None else None,
            min_cpu_limit=self.floor_cores if checked else None,
            votes_sum=decision.votes_sum if decision is not None else None,
            throttled_ratio=decision.throttled_ratio if decision is not None and checked else None,
        )

    @property
    def shown_mode(self) -> str:
        """The mode, but "control" if the job is in shadow because it belongs to the control group."""
        return "control" if self.is_control else self.mode

    @property
    def counted_cores(self) -> float:
        """The cores of the node that the job occupies: its limit, or its usage if ``counts_use``."""
        return (self.state.smoothed_cores or 0.0) if self.counts_use else self.current_cores

    @property
    def counts_use(self) -> bool:
        """Whether only the job's usage counts: it requests no limit, or its engine has yet to name the request."""
        return self.is_unlimited or is_unnamed(self.found)

    def report(self) -> JobReport:
        """Return the job's part of a heartbeat. Only for jobs that are not the scheduler's."""
        usage, counted_cores = self.usage(), self.counted_cores
        return JobReport(
            self.found.job_id,
            self.found.operation_id,
            counted_cores if self.counts_use else self.ordered_cores,
            counted_cores,
            usage.smoothed_cores,
            usage.mode,
            **list_figures(usage),
        )

    def take_sample(self, at: float, size: int) -> None:
        """Add a point to the job's graphs, of which ``size`` are kept; ``at`` is in seconds since 1970.

        No point is added if the job was not checked since the last point. The first call only sets the base."""
        now = self.state.base
        if now is None:
            return
        if self.samples is None:
            self.samples = SampleRing(size)
        samples, before = self.samples, self.samples.base
        if before is now:
            return
        samples.base, peak_ratio, samples.peak_ratio = now, samples.peak_ratio, 0.0
        if before is None or before.identity != now.identity or not before.total_cpu_s <= now.total_cpu_s:
            return
        seconds = now.at_s - before.at_s
        if seconds > 0.0:
            samples.append(
                at,
                (now.total_cpu_s - before.total_cpu_s) / seconds,
                self.state.smoothed_cores,
                self.state.limit_cores,
                self.floor_cores,
                None if self.decision is None else self.decision.votes_sum,
                peak_ratio,
                self.state.peak_cores if self.settings.limit_rule == "peak" else None,
            )

    @property
    def late_cpu_s(self) -> float:
        """``JobState.late_cpu_s`` in core-seconds, without the time in which the agent did not write the limit."""
        return self.state.late_cpu_s if self.writes else self.kept_late_s

    def find_process(self, hierarchies: Hierarchies) -> bool:
        """Return whether the cgroup has a process. This is certain if it has used CPU since the last call.

        Raises CgroupReadError."""
        base = self.state.base
        if base is not None and base.total_cpu_s != self.looked_cpu_s:
            self.looked_cpu_s = base.total_cpu_s
            return True
        return files.is_populated(hierarchies, self.found.path)

    def restart(self, limit_cores: float, now_s: float) -> None:
        """Restart from a given limit. The next tick takes a new base; until then there are no looks either."""
        self.state = restart_at(self.state, limit_cores, now_s)
        self.next_check_s = -math.inf

    def update_hard_limit(self, hierarchies: Hierarchies, now_s: float) -> None:
        """Update how much CPU the job can have now. If this, or a floor that a reload has raised, raises the limit, the
        limit is due to be written."""
        before = self.state.limit_cores
        self.state = move_hard(self.state, compute_hard(hierarchies, self.found, self.original, self.ancestor))
        floor = compute_floor(self.state.hard_cores, (), self.settings)
        if self.state.limit_cores < floor and self.moves and self.hold.is_free:
            self.state = msgspec.structs.replace(self.state, limit_cores=floor)
        if self.touched and self.state.limit_cores > before:
            self.hold = self.hold.unpin().write(now_s)

    def follow_writes(self) -> None:
        """Copy into ``state`` whether the agent moves the job's guarantee."""
        if self.state.is_written != self.moves:
            self.state = msgspec.structs.replace(self.state, is_written=self.moves)

    def begin_writes(self) -> None:
        """Record that the agent writes the limit from now on. Late time so far was not caused by the agent."""
        self.state = msgspec.structs.replace(self.state, late_cpu_s=self.kept_late_s)

    def end_writes(self) -> None:
        """Record that the agent no longer writes the limit."""
        self.kept_late_s = self.state.late_cpu_s

    @property
    def floor_cores(self) -> float:
        return compute_floor(self.state.hard_cores, self.state.usages, self.settings)

    @property
    def current_cores(self) -> float:
        """The job's guarantee in cores, as it is reported. With ``actuator = "quota"`` this is the limit in force."""
        if self.hold.decider is not FREE and self.hold.is_foreign:
            return min(self.in_force.cores, max(self.ordered_cores, self.state.hard_cores))
        if not self.moves:
            return self.state.hard_cores
        limit, hard, given = self.state.limit_cores, self.state.hard_cores, self.in_force.cores
        given = given if given < hard else hard
        # A different limit is in force while a write waits for systemd, or after a foreign write, a pause or a failure.
        is_in_force = -EQUAL_CORES <= given - limit <= EQUAL_CORES
        return limit if is_in_force or self.actuator != "quota" else given

    def view(self, now_s: float) -> TrackedView:
        decider = self.hold.decider
        respected = decider if isinstance(decider, Respected) else None
        return TrackedView(
            self.found,
            self.mode,
            self.refused,
            self.settings,
            self.state,
            self.decision,
            self.ordered_cores,
            self.current_cores,
            self.in_force,
            self.result,
            self.last_error,
            self.hold.is_contested,
            None if respected is None else respected.until_s - now_s,
            self.hold.pinned_cores,
            self.restores,
            self.write_errors,
            self.late_cpu_s,
            self.unit,
            self.labels,
            "" if respected is None else respected.by,
            self.is_unlimited,
            self.is_control,
        )


class TrackedView(msgspec.Struct, frozen=True, gc=False):
    """One job for metrics and status, in cores and seconds. ``override_left_s``: time for which another program's limit
    is still respected, None without such a limit. ``override_by``: how that limit was set, "" if unknown.

    ``unlimited`` is ``Tracked.is_unlimited``. ``unit``, ``labels`` and ``is_control``: see ``Tracked``."""

    found: FoundJob
    mode: Mode
    refused: str
    settings: MonitorSettings
    state: JobState
    decision: Decision | None
    ordered_cores: float
    current_cores: float
    in_force: CpuSettings
    result: str
    last_error: str
    contested: bool
    override_left_s: float | None
    pinned_cores: float | None
    restores: int
    write_errors: int
    late_cpu_s: float = 0.0
    unit: str = ""
    labels: Mapping[str, str] = NO_LABELS
    override_by: str = ""
    unlimited: bool = False
    is_control: bool = False

    @property
    def counts_use(self) -> bool:
        return self.unlimited or is_unnamed(self.found)

    @property
    def actuator(self) -> Actuator:
        return choose_actuator(self.settings, self.found)

    @property
    def ceiling_cores(self) -> float | None:
        """The quota in force, in cores; None if there is no quota."""
        return None if self.in_force.quota_us is None else self.in_force.cores

    @property
    def status(self) -> str:
        """A short text for a table: why the monitor does not move the limit, or the mode if it does."""
        if self.refused:
            return "refused"
        if self.unlimited and self.mode != "off":
            return NO_ORDER
        if self.contested:
            return "contested"
        if self.override_left_s is not None:
            return "overridden"
        if self.pinned_cores is not None:
            return "pinned"
        return "control" if self.is_control else self.mode


def is_unnamed(found: FoundJob) -> bool:
    """Return whether the job is a cgroup that the engine has not named yet."""
    return found.engine is not None and not found.engine.is_named


SettingsCache = dict[tuple[int, str], MonitorSettings]
"""(id of the source, operation) -> settings of all jobs there that have no options of their own."""


def resolve_job(
    config: AgentConfig, found: FoundJob, directory: str, cache: SettingsCache
) -> tuple[MonitorSettings, Mode, bool]:
    """Return the settings and the mode of a job, and whether it is in shadow for the control group. Raises ConfigError.

    ``cache`` is valid for one rescan. If root owns a cgroup, its xattr decides. If a user owns it, the xattr can only
    lower the level: no user can opt in a job that the operator left out. An engine's job without a name
    is only observed. If a scheduler's job has no quota, or its tree keeps quotas, no quota is moved."""
    key = (id(found.source), found.operation_id)
    settings = None if found.layer else cache.get(key)
    if settings is None:
        settings = config.resolve_settings(found.source, found.operation_id, found.layer)
        if not found.layer:
            cache[key] = settings
    mode = _find_mode(settings, found, files.read_mode_xattr(directory))
    ceiling = config.ceiling
    if ceiling is not None:
        # An xattr may request a higher level than the settings, but not a higher one than the scheduler allows here.
        mode, most = hold_mode(mode, ceiling)
        if most is not None and mode == "reclaim" and is_above(settings.actuator, most):
            settings = config.resolve_settings(found.source, found.operation_id, {**found.layer, "actuator": most})
    if found.is_assigned and not found.moves_ceiling and settings.is_ceiling:
        settings = config.resolve_settings(found.source, found.operation_id, {**found.layer, "actuator": "guarantee"})
    is_control = mode in ("reclaim", "up-only") and config.is_control(found.job_id)
    return settings, "shadow" if is_control else mode, is_control


def choose_actuator(settings: MonitorSettings, found: FoundJob) -> Actuator:
    """Return the setting of a job's cgroup that follows the job's guarantee; "guarantee" if none does. For a job of the
    scheduler it is at least the weight: these jobs share CPU by their guarantees."""
    return "weight" if found.is_assigned and settings.actuator == "guarantee" else settings.actuator


def list_actuators(settings: MonitorSettings, found: FoundJob) -> tuple[str, ...]:
    actuator = choose_actuator(settings, found)
    return ("quota", "weight") if actuator == "quota" and found.is_assigned else (actuator,)


def _find_mode(settings: MonitorSettings, found: FoundJob, asked: tuple[str, bool] | None) -> Mode:
    mode = compute_mode(settings)
    if asked is not None and asked[0] in MODES:
        wanted = MODES[MODES.index(asked[0])]
        mode = wanted if asked[1] else least_active(mode, wanted)
    if is_unnamed(found):
        mode = least_active(mode, "shadow")
    return mode


def find_bound(config: AgentConfig, found: FoundJob, asked: tuple[str, bool] | None) -> Level | None:
    """Return ``Tracked.bound``; None if the job has neither own options nor the xattr ``asked``. Raises ConfigError."""
    if not found.layer and asked is None:
        return None
    own = msgspec.structs.replace(config, ceiling=None)
    settings = own.resolve_settings(found.source, found.operation_id, found.layer)
    mode = _find_mode(settings, found, asked)
    return join_level(least_active(mode, "shadow") if config.is_control(found.job_id) else mode, settings.actuator)


def find_refusal(config: AgentConfig, found: FoundJob, settings: MonitorSettings, directory: str) -> str:
    """Return why a job's limit must not be moved; "" if it may be moved.

    Reasons: its cgroup is outside ``managed_roots``, is not a leaf, is that of this agent or of PID 1, has no quota, or
    is in the idle class, where a weight has no effect. If nothing is written, these reasons do not count.

    The cgroup of a whole job need not be a leaf."""
    path, engine = found.path, found.engine
    if not path:
        return "the root cgroup is never changed"
    if choose_actuator(settings, found) == "guarantee":
        return "" if engine is None else engine.left_out
    for vital, why in files.find_vital(directory + "/.." * len(path.split("/"))).items():
        if vital == path or (found.is_whole and vital.startswith(f"{path}/")):
            return why
    roots = config.find_roots(is_engines=engine is not None)
    if not any(root == "" or path == root or path.startswith(root + "/") for root in roots):
        return "it is outside managed_roots"
    if engine is not None and engine.left_out:
        return engine.left_out
    if not found.is_whole and not files.is_leaf(directory):
        return "it has child cgroups; only leaf cgroups are changed"
    if choose_actuator(settings, found) == "quota" and (missing := files.find_missing_quota(directory)):
        return f"{missing} does not exist: {files.NO_BANDWIDTH}"
    if "weight" in list_actuators(settings, found) and files.is_idle(directory):
        return "its cgroup is in the idle class (cpu.idle = 1), where a weight has no effect"
    return ""


def is_order(job: Tracked, found: CpuSettings, is_up: bool = True) -> bool:
    """Return whether a limit that another program set is the request of the job's engine.

    It is, if the engine reports this limit. If the engine does not report new requests (``reports_request``), each
    write of another program counts as a request while the engine runs (``is_up``)."""
    engine = job.found.engine
    if engine is None or not engine.is_named or job.actuator != "quota":
        return False
    if engine.ordered_cores is None and engine.reports_request:
        return found.quota_us is None
    if engine.ordered_cores is not None and abs(found.cores - engine.ordered_cores) < EQUAL_CORES / 2:
        return True
    return not engine.reports_request and is_up


def compute_hard(hierarchies: Hierarchies, found: FoundJob, original: CpuSettings, ancestor: AncestorCap) -> float:
    """Return the cores that a job can have: its request, but at most the quotas and the CPUs available to the job."""
    full_cores = compute_full(found, original, ancestor)
    # A job can always use one CPU, since no cpuset is empty.
    return full_cores if full_cores <= 1.0 else min(full_cores, float(files.read_cpus(hierarchies, found.path)))


def compute_full(found: FoundJob, original: CpuSettings, ancestor: AncestorCap) -> float:
    """Return the least of a job's request, its original quota and the quotas above, in cores; infinity without any."""
    ordered = original.cores if found.cpu_limit_cores is None else found.cpu_limit_cores
    return min(ordered, original.cores, ancestor.cores)


def record(
    job: Tracked, wall_s: float, kind: str, old_cores: float, new_cores: float, applied_cores: float, result: str
) -> None:
    decision = job.decision
    job.ring.append(
        DecisionAnswer(
            wall_s,
            kind,
            old_cores,
            new_cores,
            applied_cores,
            (decision.usage_cores or 0.0) if decision else 0.0,
            job.state.smoothed_cores or 0.0,
            decision.throttled_ratio if decision else 0.0,
            decision.votes_sum if decision else None,
            result,
            decision.pressure_ratio if decision else 0.0,
            decision is not None and decision.by_look and kind == decision.kind,
        )
    )


def check_job(config: AgentConfig, found: FoundJob) -> None:
    """Raise ConfigError if a job that is added at run time can never be managed."""
    if ".." in found.path.split("/") or not found.path or not found.path.isprintable():
        raise ConfigError(f"cgroup {found.path!r}: must be a path below the hierarchy's root, without '..'")
    if not found.job_id.isprintable() or len(found.job_id) > MAX_NAME:
        raise ConfigError(f"job_id: must be printable text of at most {MAX_NAME} characters")
    config.resolve_settings(found.source, found.operation_id, found.layer)
