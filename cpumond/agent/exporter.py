"""Prometheus metrics from the newest snapshot. Their text is made at most once per tick, and kept until the next tick.

prometheus_client writes the families whose size is fixed. This module writes the thousands of series of jobs and
operations itself, in the same text format: the library needs 8 us for each series, this module less than 1 us."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from cpumond import __version__
from cpumond.agent.config import Metrics
from cpumond.agent.jobs.assigned import START_BUCKETS_S
from cpumond.agent.snapshot import TickSnapshot
from cpumond.agent.totals import TICK_BUCKETS_S
from cpumond.agent.tracked import TrackedView
from cpumond.core.answers import ReporterStats
from cpumond.host.cgroup.files import HOST_PRESSURE, read_pressure_s
from cpumond.host.engine.model import RECLAIMED_LABEL
from cpumond.monitor.peak import find_half_life_s

JobValue = Callable[[TrackedView], float | None]

JOB_GAUGES: dict[str, tuple[str, JobValue]] = {
    "cpumond_job_cpu_limit_cores": ("CPU requested by the job.", lambda job: job.ordered_cores),
    "cpumond_job_current_cpu_limit_cores": ("Current CPU limit of the job.", lambda job: job.current_cores),
    "cpumond_job_monitor_cpu_limit_cores": (
        "Limit that the monitor would set, also in shadow mode.",
        lambda job: job.state.limit_cores,
    ),
    "cpumond_job_cpu_usage_cores": (
        "CPU used in the last check.",
        lambda job: job.decision.usage_cores if job.decision else None,
    ),
    "cpumond_job_smoothed_cpu_usage_cores": ("Smoothed CPU usage.", lambda job: job.state.smoothed_cores),
    "cpumond_job_throttled_ratio": (
        "Share of throttled enforcement periods in the last check.",
        lambda job: job.decision.throttled_ratio if job.decision else None,
    ),
}
# A counter without a base is omitted, because Prometheus would take 0 for a restart, and count the whole value again.
JOB_COUNTERS: dict[str, tuple[str, JobValue]] = {
    "cpumond_job_cpu_seconds_total": (
        "CPU time of the job's cgroup.",
        lambda job: job.state.base.total_cpu_s if job.state.base else None,
    ),
    "cpumond_job_throttled_seconds_total": (
        "Time the job was throttled, summed over CPUs.",
        lambda job: job.state.base.throttled_s if job.state.base else None,
    ),
    "cpumond_job_late_cpu_seconds_total": (
        "Time the job was throttled while cpumond had lowered its limit, summed over CPUs.",
        lambda job: job.late_cpu_s,
    ),
    "cpumond_job_aggregated_smoothed_cpu_seconds_total": (
        "Smoothed usage, summed over time.",
        lambda job: job.state.smoothed_cpu_s,
    ),
    "cpumond_job_aggregated_max_cpu_seconds_total": (
        "Requested CPU, summed over time.",
        lambda job: job.state.max_cpu_s,
    ),
    "cpumond_job_aggregated_preemptible_cpu_seconds_total": (
        "Requested CPU minus the monitor's limit, summed over time.",
        lambda job: job.state.preemptible_cpu_s,
    ),
}
PEAK_GAUGES: dict[str, tuple[str, JobValue]] = {
    "cpumond_job_peak_cores": (
        "Recent maximum of CPU usage, fading; with the reserve it is the limit of rule peak.",
        lambda job: job.state.peak_cores,
    ),
    "cpumond_job_peak_half_life_seconds": (
        "Half-life of the peak; longer the more often a lowered limit held the job back.",
        lambda job: find_half_life_s(job.state, job.settings),
    ),
    "cpumond_job_throttle_budget_ratio": (
        "Share of its time for which rule peak may hold the job back.",
        lambda job: job.settings.throttle_budget,
    ),
}
PEAK_COUNTERS: dict[str, tuple[str, JobValue]] = {
    "cpumond_job_held_back_total": (
        "Times that a lowered limit held the job back and the full request was restored at once.",
        lambda job: job.state.held.count,
    ),
    "cpumond_job_held_back_seconds_total": (
        "Enforcement periods in which a lowered limit held the job back.",
        lambda job: job.state.held.held_s,
    ),
    "cpumond_job_watched_seconds_total": ("Time that rule peak followed the job.", lambda job: job.state.watched_s),
}
"""Counters of jobs under rule ``peak``. ``throttle_budget`` bounds the ratio of held-back to watched seconds."""
SUMS: dict[str, tuple[str, Callable[[TrackedView], float]]] = {
    "cpu_limit_cores": ("CPU requested by {jobs}.", lambda job: 0.0 if job.unlimited else job.ordered_cores),
    "current_cpu_limit_cores": (
        "CPU guaranteed to {jobs}; with quotas that follow it, their limits in force.",
        lambda job: 0.0 if job.unlimited else job.current_cores,
    ),
    "reclaimed_cores": (
        "CPU requested by {jobs} minus CPU guaranteed to them.",
        lambda job: max(job.ordered_cores - job.current_cores, 0.0),
    ),
    "ceiling_cores": ("Sum of the quotas of {jobs} that have one.", lambda job: job.ceiling_cores or 0.0),
    "cpu_usage_cores": (
        "CPU that {jobs} used in their last check.",
        lambda job: (job.decision.usage_cores or 0.0) if job.decision else 0.0,
    ),
    "smoothed_cpu_usage_cores": ("Smoothed CPU usage of {jobs}.", lambda job: job.state.smoothed_cores or 0.0),
    "jobs": ("Number of {jobs}.", lambda _: 1.0),
    "throttled_jobs": (
        "Number of {jobs} throttled in their last check while cpumond had lowered their limit.",
        lambda job: float(is_throttled_by_us(job)),
    ),
}
TICK_COUNTERS = {
    "late_ticks": ("cpumond_late_ticks", "Ticks that began more than one period late."),
    "rebaselines": ("cpumond_rebaselines", "Intervals discarded after a late tick or a suspend."),
    "restores": ("cpumond_fast_restores", "Limits restored at once because of throttling or pressure."),
    "failed_restores": ("cpumond_fast_restores_failed", "Immediate restores that the kernel or the disk refused."),
    "writes": ("cpumond_cgroup_writes", "Writes to cgroup files."),
    "write_errors": ("cpumond_write_errors", "Limits that could not be written."),
    "errors": ("cpumond_errors", "Errors of jobs, files and ticks."),
    "jobs_gone": ("cpumond_jobs_gone", "Jobs whose cgroup disappeared."),
    "lost_files": ("cpumond_lost_files", "The agent's own files that were removed and written again."),
    "shed_checks": ("cpumond_shed_checks", "Checks skipped because the agent was over its CPU budget."),
}
MODES_AND_STATES = ("off", "shadow", "up-only", "reclaim", "pinned", "overridden", "contested", "refused")
HELD_STATES = frozenset({"reclaim", "up-only", "pinned"})
OTHERS = "(others)"


def is_throttled_by_us(job: TrackedView) -> bool:
    """Return whether the job was throttled in its last check at a limit that the agent had lowered."""
    throttled = job.decision is not None and job.decision.throttled_ratio > 0.0
    return throttled and job.current_cores < job.state.hard_cores and job.status in HELD_STATES


def sum_offered(jobs: Iterable[TrackedView], capacity_cores: float) -> float:
    """Return the cores that the node may offer to other jobs, >= 0.

    The result is the sum of (request - current limit) over its jobs, but at most what the current limits, and the usage
    of jobs without a limit, leave of the node's capacity. Jobs on reclaimed CPU do not count."""
    own = [job for job in jobs if RECLAIMED_LABEL not in job.labels]
    freed = sum(max(job.ordered_cores - job.current_cores, 0.0) for job in own if not job.counts_use)
    held = sum(job.state.smoothed_cores or 0.0 if job.counts_use else job.current_cores for job in own)
    return max(min(freed, capacity_cores - held), 0.0)


def sum_unused(jobs: Iterable[TrackedView], capacity_cores: float) -> float:
    """Return the node's capacity less the usage of its jobs in their last checks, in cores, >= 0. Jobs on reclaimed CPU
    and jobs without a measurement do not count."""
    used = (job.decision and job.decision.usage_cores for job in jobs if RECLAIMED_LABEL not in job.labels)
    return max(capacity_cores - sum(cores or 0.0 for cores in used), 0.0)


def choose_jobs(jobs: Sequence[TrackedView], settings: Metrics) -> list[TrackedView]:
    """Return the jobs that get their own series, by ``job_series``: none, or at most ``max_jobs``, either the first
    ones or those with the most CPU reclaimed."""
    if settings.job_series == "off":
        return []
    if settings.job_series == "top":
        return heapq.nsmallest(settings.max_jobs, jobs, key=lambda job: job.current_cores - job.ordered_cores)
    return list(jobs[: settings.max_jobs])


def choose_operations(jobs: Sequence[TrackedView], limit: int) -> dict[str, list[TrackedView]]:
    """Group jobs by operation. The jobs of all operations after the first ``limit`` are in one group, "(others)"."""
    groups: dict[str, list[TrackedView]] = {}
    for job in jobs:
        name = job.found.operation_id
        groups.setdefault(name if name in groups or len(groups) < limit else OTHERS, []).append(job)
    return groups


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AgentCollector:
    """A prometheus_client collector over one snapshot (None before the first tick).

    It yields the metrics whose number does not grow with the number of jobs; ``write_series`` writes the others."""

    snapshot: TickSnapshot | None
    reporter: ReporterStats
    process: psutil.Process

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the agent itself and the totals of the node."""
        build = InfoMetricFamily("cpumond_build", "Version of cpumond.")
        build.add_metric([], {"version": __version__, "python": sys.version.split()[0]})
        yield build
        yield from _own_cost(self.process)
        yield from _reporter_metrics(self.reporter)
        if self.snapshot is None:
            return
        yield from _tick_metrics(self.snapshot)
        yield from _scheduler_metrics(self.snapshot)
        yield from _engine_metrics(self.snapshot)
        for name, (text, value_of) in SUMS.items():
            total = sum(map(value_of, self.snapshot.jobs))
            yield GaugeMetricFamily(f"cpumond_node_{name}", text.format(jobs="the node's jobs"), total)
        capacity_cores = self.snapshot.capacity_cores
        yield GaugeMetricFamily("cpumond_node_capacity_cores", "CPU of the node.", capacity_cores)
        text = "Reclaimed CPU available to other jobs, including those that run on it."
        yield GaugeMetricFamily("cpumond_node_offered_cores", text, sum_offered(self.snapshot.jobs, capacity_cores))
        text = "CPU that jobs did not use in their last checks, not counting jobs on reclaimed CPU."
        yield GaugeMetricFamily("cpumond_node_unused_cores", text, sum_unused(self.snapshot.jobs, capacity_cores))
        text = "Time that jobs were throttled by a quota, summed over CPUs."
        yield CounterMetricFamily("cpumond_node_throttled_cpu_seconds", text, self.snapshot.throttled_cpu_s)
        text = "Time that jobs were throttled at a lowered limit, summed over CPUs."
        yield CounterMetricFamily("cpumond_node_late_cpu_seconds", text, self.snapshot.late_cpu_s)


def write_pressure(jobs: Sequence[TrackedView], unified_root: str | None, host: str = HOST_PRESSURE) -> str:
    """Format the kernel's pressure (PSI) of the host and, if available, of ``jobs`` for Prometheus.

    The pressure is read when this is called, not at the tick, so it is current. Unavailable values are left out."""
    pieces = []
    seconds = read_pressure_s(host)
    if seconds is not None:
        text = "Time in which some task of the host waited for CPU."
        pieces.append(_family("cpumond_node_cpu_pressure_seconds_total", "counter", text, ['kind="some"'], [seconds]))
    if unified_root is not None and jobs:
        values = [read_pressure_s(os.path.join(unified_root, job.found.path, "cpu.pressure")) for job in jobs]
        if any(value is not None for value in values):
            labels = [_label("job_id", job.found.job_id) for job in jobs]
            text = "Time in which some task of the job waited for CPU."
            pieces.append(_family("cpumond_job_cpu_pressure_seconds_total", "counter", text, labels, values))
    return "".join(pieces)


def _own_cost(process: psutil.Process) -> Iterator[Metric]:
    times = process.cpu_times()
    yield CounterMetricFamily("cpumond_process_cpu_seconds", "CPU time of the agent itself.", times.user + times.system)
    resident = process.memory_info().rss
    yield GaugeMetricFamily("cpumond_process_resident_memory_bytes", "Memory of the agent itself.", resident)
    yield GaugeMetricFamily("cpumond_process_open_fds", "Open descriptors of the agent.", process.num_fds())


def _label_all(
    family: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, label: str, values: Mapping[str, float]
) -> Metric:
    made = family(name, text, labels=[label])
    for named, value in values.items():
        made.add_metric([named], value)
    return made


def _make_histogram(name: str, text: str, bounds: Sequence[float], counts: Sequence[int], seconds: float) -> Metric:
    sums = list(itertools.accumulate(counts))
    buckets = [(f"{bound:g}", float(count)) for bound, count in zip(bounds, sums, strict=False)]
    made = HistogramMetricFamily(name, text)
    made.add_metric([], [*buckets, ("+Inf", float(sums[-1]))], seconds)
    return made


def _tick_metrics(snapshot: TickSnapshot) -> Iterator[Metric]:
    yield CounterMetricFamily("cpumond_ticks", "Check periods completed.", value=snapshot.tick)
    yield GaugeMetricFamily("cpumond_last_tick_timestamp_seconds", "Time at which the last tick ended.", snapshot.at)
    yield _make_histogram(
        "cpumond_tick_duration_seconds", "Duration of ticks.",
        TICK_BUCKETS_S, snapshot.tick_buckets, snapshot.tick_seconds,
    )  # fmt: skip
    for key, (name, text) in TICK_COUNTERS.items():
        yield CounterMetricFamily(name, text, value=snapshot.counters[key])
    counts = collections.Counter(job.status for job in snapshot.jobs)
    states = {state: counts[state] for state in MODES_AND_STATES}
    foreign, ends = "Limits changed by another program.", "Ends of the agent's service, by systemd's result."
    yield _label_all(CounterMetricFamily, "cpumond_decisions", "Results of checks.", "kind", snapshot.decisions)
    yield _label_all(CounterMetricFamily, "cpumond_foreign_writes", foreign, "kind", snapshot.foreign_writes)
    yield _label_all(CounterMetricFamily, "cpumond_service_ends", ends, "result", snapshot.service_ends)
    yield _label_all(GaugeMetricFamily, "cpumond_jobs_by_status", "Jobs in each mode or state.", "status", states)
    text = "Problems shown to an operator by `cpumond status`."
    yield GaugeMetricFamily("cpumond_problems", text, len(snapshot.problems))
    yield GaugeMetricFamily("cpumond_writes_paused", "1 while the pause file exists.", float(snapshot.paused))
    text = "Cgroups named by a source that are not jobs because they contain no process."
    yield GaugeMetricFamily("cpumond_empty_cgroups", text, snapshot.empty_cgroups)
    yield GaugeMetricFamily("cpumond_empty_rescans", "Rescans in a row that found no job.", snapshot.empty_rescans)
    yield GaugeMetricFamily("cpumond_check_stride", "Number of ticks per check of a job.", snapshot.stride)


def _scheduler_metrics(snapshot: TickSnapshot) -> Iterator[Metric]:
    """Yield the metrics of the link to the scheduler and of the scheduler's jobs, if the node has them."""
    link, assigned = snapshot.link, snapshot.assigned
    if link is not None:
        registered = float(link.registered)
        yield GaugeMetricFamily("cpumond_scheduler_registered", "1 while the node is registered.", registered)
        text, sent = "Heartbeats that the scheduler accepted.", link.stats.sent_total
        yield CounterMetricFamily("cpumond_scheduler_heartbeats", text, sent)
        text, failed = "Attempts to send a heartbeat to the scheduler that failed.", link.stats.failed_total
        yield CounterMetricFamily("cpumond_scheduler_heartbeats_failed", text, failed)
        asked = "1 for the address of the scheduler in use."
        yield _label_all(GaugeMetricFamily, "cpumond_scheduler_address", asked, "url", {link.url: 1})
        if link.term is not None:
            yield GaugeMetricFamily("cpumond_scheduler_term", "Term of the scheduler's last response.", link.term)
        text = "Responses refused because their scheduler had lost the lead."
        yield CounterMetricFamily("cpumond_scheduler_terms_refused", text, link.terms_refused)
    if assigned is None:
        return
    ended = {state: assigned.counters[state] for state in ("completed", "failed", "aborted", "lost")}
    text = "Jobs of the scheduler on this node."
    yield _label_all(GaugeMetricFamily, "cpumond_assigned_jobs", text, "state", assigned.states)
    text = "Jobs that ended, by final state."
    yield _label_all(CounterMetricFamily, "cpumond_assigned_jobs_ended", text, "state", ended)
    text = "Jobs aborted because the node was overcommitted."
    yield CounterMetricFamily("cpumond_overdraft_aborts", text, assigned.counters["overdraft"])
    yield _make_histogram(
        "cpumond_job_start_seconds", "Time from the heartbeat whose response ordered a job to its first process.",
        START_BUCKETS_S, assigned.start_buckets, assigned.start_seconds,
    )  # fmt: skip
    yield GaugeMetricFamily("cpumond_executor_broken", "1 while no job can be started.", float(bool(assigned.problem)))


def _engine_metrics(snapshot: TickSnapshot) -> Iterator[Metric]:
    if not snapshot.engines:
        return
    labels = ["engine", "socket"]
    up = GaugeMetricFamily("cpumond_engine_up", "1 while the engine answers.", labels=labels)
    jobs = GaugeMetricFamily("cpumond_engine_jobs", "Jobs that the engine has named.", labels=labels)
    for each in snapshot.engines:
        up.add_metric([each.kind, each.socket], float(not each.problem))
        jobs.add_metric([each.kind, each.socket], each.jobs)
    yield from (up, jobs)


def _reporter_metrics(stats: ReporterStats) -> Iterator[Metric]:
    for name, text, count in (
        ("sent", "Heartbeats accepted by the receiver.", stats.sent_total),
        ("failed", "Attempts to send a heartbeat that failed.", stats.failed_total),
        ("superseded", "Heartbeats replaced by a newer one before they were sent.", stats.dropped_total),
    ):
        yield CounterMetricFamily(f"cpumond_reports_{name}", text, count)


def write_series(jobs: Sequence[TrackedView], settings: Metrics) -> str:
    """Format the sums of operations and the series of the chosen jobs for Prometheus."""
    operations = _operation_families(choose_operations(jobs, settings.max_jobs))
    return "".join((*operations, *_job_families(choose_jobs(jobs, settings))))


def _operation_families(groups: dict[str, list[TrackedView]]) -> Iterator[str]:
    labels = [_label("operation_id", name) for name in groups]
    for name, (text, value_of) in SUMS.items():
        values = [sum(map(value_of, group)) for group in groups.values()]
        yield _family(f"cpumond_operation_{name}", "gauge", text.format(jobs="an operation's jobs"), labels, values)


def _job_families(jobs: list[TrackedView]) -> Iterator[str]:
    labels = [_label("job_id", job.found.job_id) for job in jobs]
    described = [
        ",".join(
            (
                label,
                _label("operation_id", job.found.operation_id),
                _label("cgroup", job.found.path),
                _label("mode", job.mode),
                _label("status", job.status),
                _label("limit_rule", job.settings.limit_rule),
                *_own_labels(job),
            )
        )
        for label, job in zip(labels, jobs, strict=True)
    ]
    yield _family("cpumond_job_info", "gauge", "1; the labels describe the job.", described, [1.0] * len(jobs))
    for kind, families in (("gauge", JOB_GAUGES), ("counter", JOB_COUNTERS)):
        for name, (text, value_of) in families.items():
            yield _family(name, kind, text, labels, map(value_of, jobs))
    peaks = [(label, job) for label, job in zip(labels, jobs, strict=True) if job.settings.limit_rule == "peak"]
    if not peaks:
        return
    labels, jobs = [label for label, _ in peaks], [job for _, job in peaks]
    for kind, families in (("gauge", PEAK_GAUGES), ("counter", PEAK_COUNTERS)):
        for name, (text, value_of) in families.items():
            yield _family(name, kind, text, labels, map(value_of, jobs))


def _own_labels(job: TrackedView) -> Iterator[str]:
    """Yield the labels that systemd or an engine gives the job. No label of an engine has the name of another label."""
    prefix = "unit_" if job.found.engine is None else ""
    if job.found.engine is not None:
        yield _label("engine", job.found.engine.kind)
    for name, value in job.labels.items():
        yield _label(f"{prefix}{name.lower()}", value)


def _family(name: str, kind: str, text: str, labels: Iterable[str], values: Iterable[float | None]) -> str:
    """Format one family; omit values that are None. ``repr`` of a float is exact for Prometheus' parser, too."""
    pairs = zip(labels, values, strict=True)
    lines = [f"{name}{{{label}}} {float(value)!r}\n" for label, value in pairs if value is not None]
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{''.join(lines)}"


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return f'{name}="{escaped}"'


class AgentMetrics:
    """The metrics text of the newest snapshot, encoded at most once per tick. For any thread."""

    def __init__(
        self,
        read_snapshot: Callable[[], TickSnapshot | None],
        read_settings: Callable[[], Metrics],
        read_reporter: Callable[[], ReporterStats],
        unified_root: str | None = None,
    ) -> None:
        self._read_snapshot = read_snapshot
        self._read_settings = read_settings
        self._read_reporter = read_reporter
        self._unified_root = unified_root
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._tick = -1
        self._text = b""

    def encode(self) -> bytes:
        with self._lock:
            snapshot = self._read_snapshot()
            if snapshot is None or snapshot.tick != self._tick:
                self._text = self._write(snapshot)
                self._tick = -1 if snapshot is None else snapshot.tick
            return self._text

    def _write(self, snapshot: TickSnapshot | None) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(AgentCollector(snapshot, self._read_reporter(), self._process))
        text = generate_latest(registry)
        if snapshot is None:
            return text
        # A character that is not valid Unicode becomes "?": one bad name must not make all metrics fail.
        settings = self._read_settings()
        pressure = write_pressure(choose_jobs(snapshot.jobs, settings), self._unified_root)
        return text + (write_series(snapshot.jobs, settings) + pressure).encode("utf-8", "replace")
