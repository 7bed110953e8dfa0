"""Prometheus metrics from the newest snapshot; the text is made once per tick and kept."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator

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
from cpumond.agent.jobs import JobView
from cpumond.agent.snapshot import TICK_BUCKETS_S, TickSnapshot
from cpumond.config import Metrics
from cpumond.reporters import ReporterStats

JOB_LABELS = ["job_id"]
OPERATION_LABELS = ["operation_id"]

JOB_GAUGES: dict[str, tuple[str, Callable[[JobView], float | None]]] = {
    "cpumond_job_cpu_limit_cores": ("CPU the job ordered.", lambda job: job.ordered_cores),
    "cpumond_job_current_cpu_limit_cores": ("CPU limit of the job now.", lambda job: job.current_cores),
    "cpumond_job_monitor_cpu_limit_cores": (
        "Limit the monitor would set, also in shadow mode.",
        lambda job: job.state.limit_cores,
    ),
    "cpumond_job_cpu_usage_cores": (
        "CPU used in the last check.",
        lambda job: job.decision.usage_cores if job.decision else None,
    ),
    "cpumond_job_smoothed_cpu_usage_cores": ("Smoothed CPU use.", lambda job: job.state.smoothed_cores),
    "cpumond_job_throttled_ratio": (
        "Share of throttled enforcement periods in the last check.",
        lambda job: job.decision.throttled_ratio if job.decision else None,
    ),
}
JOB_COUNTERS: dict[str, tuple[str, Callable[[JobView], float]]] = {
    "cpumond_job_cpu_seconds": (
        "CPU time of the job's cgroup.",
        lambda job: job.state.base.total_cpu_s if job.state.base else 0.0,
    ),
    "cpumond_job_throttled_seconds": (
        "Time the job was throttled, summed over CPUs.",
        lambda job: job.state.base.throttled_s if job.state.base else 0.0,
    ),
    "cpumond_job_aggregated_smoothed_cpu_seconds": (
        "Smoothed use, summed over time.",
        lambda job: job.state.smoothed_cpu_s,
    ),
    "cpumond_job_aggregated_max_cpu_seconds": ("Ordered CPU, summed over time.", lambda job: job.state.max_cpu_s),
    "cpumond_job_aggregated_preemptible_cpu_seconds": (
        "Ordered less the monitor's limit, summed over time.",
        lambda job: job.state.preemptible_cpu_s,
    ),
}
SUMS: dict[str, tuple[str, Callable[[JobView], float]]] = {
    "cpu_limit_cores": ("CPU ordered", lambda job: job.ordered_cores),
    "current_cpu_limit_cores": ("CPU limits in force", lambda job: job.current_cores),
    "reclaimed_cores": ("CPU ordered less limits in force", lambda job: max(job.ordered_cores - job.current_cores, 0)),
    "smoothed_cpu_usage_cores": ("Smoothed CPU use", lambda job: job.state.smoothed_cores or 0.0),
    "jobs": ("Jobs", lambda _: 1.0),
}
TICK_COUNTERS = {
    "late_ticks": ("cpumond_late_ticks", "Ticks that began more than one period late."),
    "rebaselines": ("cpumond_rebaselines", "Intervals thrown away after a late tick or a suspend."),
    "restores": ("cpumond_fast_restores", "Limits given back at once because of throttling."),
    "writes": ("cpumond_cgroup_writes", "Writes to cgroup files."),
    "write_errors": ("cpumond_write_errors", "Limits that could not be written."),
    "errors": ("cpumond_errors", "Errors of jobs, files and ticks."),
    "jobs_gone": ("cpumond_jobs_gone", "Jobs whose cgroup went away."),
    "shed_checks": ("cpumond_shed_checks", "Checks left out because the agent was over its CPU budget."),
}
MODES_AND_STATES = ("off", "shadow", "up-only", "reclaim", "pinned", "overridden", "contested", "refused")


class AgentCollector:
    """A prometheus_client collector over what ``read_snapshot`` gives; it keeps nothing between scrapes."""

    def __init__(
        self,
        read_snapshot: Callable[[], TickSnapshot | None],
        read_settings: Callable[[], Metrics],
        read_reporter: Callable[[], ReporterStats],
    ) -> None:
        self._read_snapshot = read_snapshot
        self._read_settings = read_settings
        self._read_reporter = read_reporter
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        """All metric families of the newest tick."""
        build = InfoMetricFamily("cpumond_build", "Version of cpumond.")
        build.add_metric([], {"version": __version__, "python": sys.version.split()[0]})
        yield build
        yield from self._own_cost()
        yield from _reporter_metrics(self._read_reporter())
        snapshot = self._read_snapshot()
        if snapshot is None:
            return
        yield from _tick_metrics(snapshot)
        yield from _sums("cpumond_node", "of all jobs of the node.", [], [([], snapshot.jobs)])
        limit = self._read_settings().max_jobs
        yield from _operation_sums(snapshot.jobs, limit)
        yield from _job_metrics(choose_jobs(snapshot.jobs, self._read_settings()))

    def _own_cost(self) -> Iterable[Metric]:
        times = self._process.cpu_times()
        yield CounterMetricFamily(
            "cpumond_process_cpu_seconds", "CPU time of the agent itself.", value=times.user + times.system
        )
        yield GaugeMetricFamily(
            "cpumond_process_resident_memory_bytes", "Memory of the agent itself.", self._process.memory_info().rss
        )
        yield GaugeMetricFamily("cpumond_process_open_fds", "Descriptors of the agent.", self._process.num_fds())


def choose_jobs(jobs: tuple[JobView, ...], settings: Metrics) -> list[JobView]:
    """The jobs that get series of their own: none, the first ``max_jobs``, or those with most CPU reclaimed."""
    if settings.job_series == "off":
        return []
    if settings.job_series == "top":
        jobs = tuple(sorted(jobs, key=lambda job: job.current_cores - job.ordered_cores))
    return list(itertools.islice(jobs, settings.max_jobs))


def _tick_metrics(snapshot: TickSnapshot) -> Iterator[Metric]:
    yield CounterMetricFamily("cpumond_ticks", "Check periods done.", value=snapshot.tick)
    yield GaugeMetricFamily("cpumond_last_tick_timestamp_seconds", "When the last tick ended.", snapshot.at)
    duration = HistogramMetricFamily("cpumond_tick_duration_seconds", "Time a tick took.")
    sums = list(itertools.accumulate(snapshot.tick_buckets))
    buckets = [(f"{bound:g}", float(count)) for bound, count in zip(TICK_BUCKETS_S, sums, strict=False)]
    duration.add_metric([], [*buckets, ("+Inf", float(sums[-1]))], snapshot.tick_seconds)
    yield duration
    for key, (name, text) in TICK_COUNTERS.items():
        yield CounterMetricFamily(name, text, value=snapshot.counters[key])
    decisions = CounterMetricFamily("cpumond_decisions", "Results of checks.", labels=["kind"])
    for kind, count in snapshot.decisions.items():
        decisions.add_metric([kind], count)
    yield decisions
    foreign = CounterMetricFamily("cpumond_foreign_writes", "Limits changed by somebody else.", labels=["kind"])
    for kind, count in snapshot.foreign_writes.items():
        foreign.add_metric([kind], count)
    yield foreign
    states = GaugeMetricFamily("cpumond_jobs_by_status", "Jobs in each mode or state.", labels=["status"])
    for state in MODES_AND_STATES:
        states.add_metric([state], sum(1 for job in snapshot.jobs if job.status == state))
    yield states
    yield GaugeMetricFamily(
        "cpumond_problems", "Sentences of `cpumond status` for an operator.", len(snapshot.problems)
    )
    yield GaugeMetricFamily("cpumond_writes_paused", "1 while the pause file is there.", float(snapshot.paused))
    yield GaugeMetricFamily("cpumond_empty_rescans", "Rescans in a row that found no job.", snapshot.empty_rescans)
    yield GaugeMetricFamily("cpumond_check_stride", "Every so many ticks a job is looked at.", snapshot.stride)


def _reporter_metrics(stats: ReporterStats) -> Iterator[Metric]:
    for name, text, value in (
        ("cpumond_reports_sent", "Heartbeats accepted by the receiver.", stats.sent_total),
        ("cpumond_reports_failed", "Attempts to send a heartbeat that failed.", stats.failed_total),
        (
            "cpumond_reports_superseded",
            "Heartbeats replaced by a newer one before they were sent.",
            stats.dropped_total,
        ),
    ):
        yield CounterMetricFamily(name, text, value=value)


Groups = list[tuple[list[str], tuple[JobView, ...] | list[JobView]]]


def _sums(prefix: str, of: str, labels: list[str], groups: Groups) -> Iterator[Metric]:
    for name, (text, value_of) in SUMS.items():
        family = GaugeMetricFamily(f"{prefix}_{name}", f"{text} {of}", labels=labels)
        for values, jobs in groups:
            family.add_metric(values, sum(value_of(job) for job in jobs))
        yield family


def _operation_sums(jobs: tuple[JobView, ...], limit: int) -> Iterator[Metric]:
    """Sums per operation; operations beyond ``limit`` are summed under the label "(others)"."""
    groups: dict[str, list[JobView]] = {}
    for job in jobs:
        name = job.found.operation_id
        groups.setdefault(name if name in groups or len(groups) < limit else "(others)", []).append(job)
    yield from _sums(
        "cpumond_operation",
        "of an operation's jobs.",
        OPERATION_LABELS,
        [([name], group) for name, group in groups.items()],
    )


def _job_metrics(jobs: list[JobView]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "cpumond_job_info",
        "1; the labels say what the job is.",
        labels=["job_id", "operation_id", "cgroup", "mode", "status"],
    )
    for job in jobs:
        info.add_metric([job.found.job_id, job.found.operation_id, job.found.path, job.mode, job.status], 1.0)
    yield info
    for name, (text, value_of) in JOB_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=JOB_LABELS)
        for job in jobs:
            value = value_of(job)
            if value is not None:
                gauge.add_metric([job.found.job_id], value)
        yield gauge
    for name, (text, count_of) in JOB_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=JOB_LABELS)
        for job in jobs:
            counter.add_metric([job.found.job_id], count_of(job))
        yield counter


class MetricsText:
    """The text format of the newest snapshot, encoded at most once per tick."""

    def __init__(self, collector: AgentCollector, read_snapshot: Callable[[], TickSnapshot | None]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._read_snapshot = read_snapshot
        self._tick = -1
        self._text = b""

    def encode(self) -> bytes:
        """The metrics as text."""
        snapshot = self._read_snapshot()
        tick = snapshot.tick if snapshot is not None else -1
        if tick < 0 or tick != self._tick:
            self._text = generate_latest(self._registry)
            self._tick = tick
        return self._text
