"""The agent's record of one job, and the frozen view of it that everybody else reads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cpumond.agent.assigned import Usage
from cpumond.agent.ring import DecisionRecord, DecisionRing, SampleRing
from cpumond.cgroup import Cgroup
from cpumond.cgroup.files import find_vital, is_leaf, read_cpus, read_mode_xattr
from cpumond.cgroup.mounts import Hierarchies
from cpumond.cgroup.settings import EQUAL_CORES, AncestorCap, CpuSettings
from cpumond.config import AgentConfig
from cpumond.discovery import FoundJob
from cpumond.errors import ConfigError
from cpumond.monitor.model import MODES, Decision, JobState, Mode, MonitorSettings, compute_mode, least_active
from cpumond.monitor.policy import compute_floor, restart_at
from cpumond.wire import MAX_NAME, JobReport, list_figures

NO_LABELS: Mapping[str, str] = {}
"""Of all jobs that have none: thousands share it."""


class Tracked:
    """One job while the agent follows it. The tick owns it; nothing else writes here.

    ``original`` are the settings found before the first change, ``in_force`` the ones believed to be in the cgroup;
    ``touched``: the agent changed this cgroup, so ``original`` is on disk. ``refused`` says why it is never written.
    ``kept_late_s``: the core-seconds of ``late_cpu_s`` up to when the agent ceased to write. ``samples`` None: nobody
    could read them. ``unit``: the unit of systemd whose cgroup it is, "" by file alone; ``labels`` properties of it;
    ``override_by`` who ordered the limit that is respected; ``before_asking`` what was in force before a foreign write
    of which systemd is asked whether it is its own, ``asked_at_s`` since when. ``file_missing``: the last limit went to
    systemd alone, which makes the file.
    Times ``_s`` are of the monotonic clock.
    """

    __slots__ = (
        "_in_force", "ancestor", "asked_at_s", "asked_mode", "before_asking", "cgroup", "config", "contested",
        "decision", "file_missing", "found", "kept_late_s", "labels", "last_error", "losses", "lost_at_s", "mode",
        "next_check_s", "notes", "original", "override_by", "override_until_s", "pinned_cores", "reapply_at_s",
        "refused", "restores", "result", "ring", "samples", "settings", "state", "touched", "unit", "watches",
        "write_after_s", "write_errors",
    )  # fmt: skip

    def __init__(
        self, found: FoundJob, cgroup: Cgroup, settings: MonitorSettings, original: CpuSettings, state: JobState
    ) -> None:
        self.found = found
        self.cgroup = cgroup
        self.settings = settings
        self.original = original
        self.state = state
        self.in_force = original
        self.ancestor = AncestorCap(math.inf)
        self.mode: Mode = "shadow"
        self.refused = ""
        self.touched = False
        self.decision: Decision | None = None
        self.result = ""
        self.notes: tuple[str, ...] = ()
        self.last_error = ""
        self.next_check_s = -math.inf
        self.override_until_s: float | None = None
        self.override_by = ""
        self.unit = ""
        self.labels: Mapping[str, str] = NO_LABELS
        self.before_asking: CpuSettings | None = None
        self.asked_at_s = -math.inf
        self.file_missing = False
        self.losses = 0
        self.reapply_at_s: float | None = None
        self.contested = False
        self.pinned_cores: float | None = None
        self.write_after_s = -math.inf
        self.write_errors = 0
        self.restores = 0
        self.lost_at_s = -math.inf
        self.config: AgentConfig | None = None
        self.asked_mode: tuple[str, bool] | None = None
        self.watches: list[object] = []
        self.ring = DecisionRing()
        self.samples: SampleRing | None = None
        self.kept_late_s = 0.0

    @property
    def in_force(self) -> CpuSettings:
        """See above."""
        return self._in_force

    @in_force.setter
    def in_force(self, settings: CpuSettings) -> None:
        self._in_force = settings
        self.follow_period()

    def follow_period(self) -> None:
        """Have the state know the enforcement period, in which the kernel counts throttling."""
        period_s = self._in_force.period_us / 1e6
        if self.state.cfs_period_s != period_s:
            self.state = msgspec.structs.replace(self.state, cfs_period_s=period_s)

    @property
    def writes(self) -> bool:
        """Whether the agent moves this job's limit at all."""
        return self.mode in ("reclaim", "up-only") and not self.refused

    @property
    def is_held(self) -> bool:
        """Whether somebody else decides about the limit: a pin, an order that is respected, or a lost contest."""
        respected = self.override_until_s is not None or self.before_asking is not None
        return self.pinned_cores is not None or respected or self.contested

    @property
    def ordered_cores(self) -> float:
        """What the job ordered: its ``cpu_limit``, or the CPU that was found; less where its cgroup was set to less."""
        limit = self.found.cpu_limit_cores
        return self.state.hard_cores if limit is None else min(limit, self.original.cores)

    def usage(self) -> Usage:
        """What the scheduler is told of it."""
        state, decision = self.state, self.decision
        checked = decision is not None and decision.usage_cores is not None
        return Usage(
            self.current_cores,
            state.smoothed_cores,
            self.mode,
            cpu_seconds=None if state.base is None else state.base.total_cpu_s,
            reclaimed_cpu_seconds=state.preemptible_cpu_s if self.writes else 0.0,
            ordered_cpu_seconds=state.max_cpu_s,
            throttled_cpu_seconds=state.throttled_cpu_s,
            late_cpu_seconds=self.late_cpu_s,
            cpu_usage=decision.usage_cores if decision is not None else None,
            min_cpu_limit=self.floor_cores if checked else None,
            votes_sum=decision.votes_sum if decision is not None else None,
            throttled_ratio=decision.throttled_ratio if decision is not None and checked else None,
        )

    def report(self) -> JobReport:
        """It in a heartbeat, as a job of somebody else than the scheduler."""
        usage = self.usage()
        return JobReport(
            self.found.job_id,
            self.found.operation_id,
            self.ordered_cores,
            usage.current_cores,
            usage.smoothed_cores,
            usage.mode,
            **list_figures(usage),
        )

    def take_sample(self, at: float, size: int) -> None:
        """Add a point to the job's graphs, of which ``size`` are kept; ``at`` seconds since 1970.

        None is added when the job was not checked since the last one, nor at the first call: that is its base.
        """
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
        """``JobState.late_cpu_s`` of the time in which the agent wrote the limit, in core-seconds."""
        return self.state.late_cpu_s if self.writes else self.kept_late_s

    def restart(self, limit_cores: float, now_s: float) -> None:
        """Go on anew from a given limit, with a base at the next tick: without one there are no looks either."""
        self.state = restart_at(self.state, limit_cores, now_s)
        self.next_check_s = -math.inf

    def follow_writes(self) -> None:
        """Have the state know whether its limit is one that is written."""
        if self.state.is_written != self.writes:
            self.state = msgspec.structs.replace(self.state, is_written=self.writes)

    def begin_writes(self) -> None:
        """The agent writes the limit from now on: what counted as late before was not its doing."""
        self.state = msgspec.structs.replace(self.state, late_cpu_s=self.kept_late_s)

    def end_writes(self) -> None:
        """The agent does not write the limit from now on."""
        self.kept_late_s = self.state.late_cpu_s

    @property
    def floor_cores(self) -> float:
        """The least limit the monitor gives it."""
        return compute_floor(self.state.hard_cores, self.state.usages, self.settings)

    @property
    def current_cores(self) -> float:
        """The limit in force in cores, as reported: what the job may use now of what it ordered."""
        if self.override_until_s is not None or self.contested:
            return min(self.in_force.cores, max(self.ordered_cores, self.state.hard_cores))
        if not self.writes:
            return self.state.hard_cores
        limit, given = self.state.limit_cores, self.in_force.cores
        # Less is in force while a write waits: after a foreign lowering, a pause, a failure.
        return given if self.settings.actuator == "quota" and given < limit - EQUAL_CORES else limit

    def view(self, now_s: float) -> JobView:
        """The frozen view."""
        return JobView(
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
            self.contested,
            None if self.override_until_s is None else self.override_until_s - now_s,
            self.pinned_cores,
            self.restores,
            self.write_errors,
            self.late_cpu_s,
            self.unit,
            self.labels,
            self.override_by if self.override_until_s is not None else "",
        )


class JobView(msgspec.Struct, frozen=True, gc=False):
    """One job as metrics, status and reports see it; cores, seconds. ``override_left_s`` None when not overridden.

    ``unit`` and ``labels``: the unit of systemd it is, and properties of that; ``override_by``: who ordered what is in
    force, "" where that is not known.
    """

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

    @property
    def status(self) -> str:
        """One word for a table: what keeps the monitor from moving the limit, else the mode."""
        if self.refused:
            return "refused"
        if self.contested:
            return "contested"
        if self.override_left_s is not None:
            return "overridden"
        if self.pinned_cores is not None:
            return "pinned"
        return self.mode


SettingsCache = dict[tuple[int, str], MonitorSettings]
"""Resulting settings by source and operation, for jobs without options of their own: thousands share a few."""


def resolve_job(
    config: AgentConfig, found: FoundJob, directory: str, cache: SettingsCache
) -> tuple[MonitorSettings, Mode]:
    """The resulting settings and mode of a job. Raises ConfigError. ``cache`` holds for one look at all jobs.

    An xattr on a cgroup that belongs to root decides; on one that belongs to its user it can only make the agent do
    less, so that nobody can opt in what the operator left out.
    """
    key = (id(found.source), found.operation_id)
    settings = None if found.layer else cache.get(key)
    if settings is None:
        settings = config.resolve_settings(found.source, found.operation_id, found.layer)
        if not found.layer:
            cache[key] = settings
    mode = compute_mode(settings)
    asked = read_mode_xattr(directory)
    if asked is not None and asked[0] in MODES:
        wanted = MODES[MODES.index(asked[0])]
        mode = wanted if asked[1] else least_active(mode, wanted)
    return settings, mode


def find_refusal(config: AgentConfig, path: str, directory: str) -> str:
    """Why a cgroup must not be written, "" when it may be: outside ``managed_roots``, no leaf, or the agent's own."""
    if not path:
        return "the root cgroup is never changed"
    if path in find_vital():
        return find_vital()[path]
    if not any(root == "" or path == root or path.startswith(root + "/") for root in config.managed_roots):
        return "it is outside managed_roots"
    if not is_leaf(directory):
        return "it has child cgroups; only leaf cgroups are changed"
    return ""


def compute_hard(hierarchies: Hierarchies, found: FoundJob, original: CpuSettings, ancestor: AncestorCap) -> float:
    """The CPU a job really has in cores: what it ordered, held to the quota found and to those above it."""
    ordered = found.cpu_limit_cores
    if ordered is None:
        ordered = original.cores if original.quota_us is not None else float(read_cpus(hierarchies, found.path))
    return min(ordered, original.cores, ancestor.cores)


def record(
    job: Tracked, wall_s: float, kind: str, old_cores: float, new_cores: float, applied_cores: float, result: str
) -> None:
    """Add one line to the job's ring of decisions."""
    decision = job.decision
    job.ring.append(
        DecisionRecord(
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
            decision is not None and decision.by_look and kind == "restore",
        )
    )


def check_job(config: AgentConfig, found: FoundJob) -> None:
    """Refuse a job that is asked for at run time and could never be managed. Raises ConfigError."""
    if ".." in found.path.split("/") or not found.path or not found.path.isprintable():
        raise ConfigError(f"cgroup {found.path!r}: must be a path below the hierarchy's root, without '..'")
    if not found.job_id.isprintable() or len(found.job_id) > MAX_NAME:
        raise ConfigError(f"job_id: must be readable text of at most {MAX_NAME} characters")
    config.resolve_settings(found.source, found.operation_id, found.layer)
