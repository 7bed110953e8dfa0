"""Publish the results of a tick: heartbeats, points of graphs, and the snapshot of ``cpumond status``."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cpumond import __version__
from cpumond.agent.config import AgentConfig
from cpumond.agent.context import AgentContext
from cpumond.agent.discovery import describe_source
from cpumond.agent.snapshot import TickSnapshot
from cpumond.core.answers import LinkView
from cpumond.core.levels import Level, highest
from cpumond.core.wire import AgentAbout, FinishedJob, Heartbeat, JobReport
from cpumond.core.words import escape
from cpumond.monitor.model import MonitorSettings, join_level

EARLY_BEAT = 0.05
DEFAULT_RULE: Final = MonitorSettings().limit_rule
COUNTED: Final = (
    "late_ticks", "rebaselines", "restores", "failed_restores", "write_errors", "errors", "shed_checks",
    "looks_restored",
)  # fmt: skip
"""Counters of ``RunTotals`` that a snapshot has under the same names."""
MAX_PROBLEMS, MAX_PROBLEM = 10, 300
"""Maximum number of problems that are sent to the scheduler, and of characters in each problem."""


class HeartbeatPublisher:
    """Publishes heartbeats and samples, each with its own period. ``beat_at_s``: time of the next heartbeat."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.beat_at_s = 0.0
        self.sample_at_s = -math.inf
        self._report_at_s = 0.0
        self._sequence = 0
        self._levels: tuple[AgentConfig, Level, Level] | None = None

    def report(self, now_s: float) -> None:
        """Send the node's full state to the reporter and the scheduler, if it has changed or is due by their period."""
        context = self.context
        link, assigned = context.link, context.assigned
        period_s = self.beat_period_s
        report = context.due.report or now_s >= self._report_at_s
        # If the heartbeat is due shortly after this tick, it is sent now.
        due = now_s >= self.beat_at_s - EARLY_BEAT * period_s
        beat = link is not None and (context.due.report or context.due.beat or due)
        if not (report or beat):
            return
        context.due.report = context.due.beat = False
        self.beat_at_s = now_s + period_s if beat else self.beat_at_s
        self._sequence += 1
        heartbeat = self.make_heartbeat()
        if report:
            self._report_at_s = now_s + context.config.report.report_period_s
            context.reporter.submit(heartbeat)
        # A node that does not know its jobs must be silent: if it reported none, they would be started elsewhere.
        if link is not None and beat and (assigned is None or assigned.knows_jobs):
            link.about = self._view_about()
            link.submit(heartbeat)

    def _view_about(self) -> AgentAbout:
        """Describe the agent. The configuration's level is computed only once; options of single jobs may raise it."""
        context, totals, config = self.context, self.context.totals, self.context.config
        if self._levels is None or self._levels[0] is not config:
            own = msgspec.structs.replace(config, ceiling=None)
            self._levels = (config, config.find_highest_level(), own.find_highest_level())
        _, level, bound = self._levels
        asked = {(job.mode, job.settings.actuator, job.bound) for job in context.table if job.bound and not job.refused}
        for mode, actuator, job_bound in asked:
            level, bound = highest(level, join_level(mode, actuator)), highest(bound, job_bound)
        return AgentAbout(
            __version__,
            level,
            bound,
            may_set_mode=config.scheduler.may_set_mode,
            knows_guarantee=True,
            max_log_bytes=config.executor.max_log_bytes if config.executor.kind == "cgroup" else 0,
            knows_secrets=True,
            idle_class="" if context.assigned is None else context.assigned.idle_class,
            limit_rule=str(config.monitor.get("limit_rule", DEFAULT_RULE)),
            is_paused=context.writer.is_paused(),
            metrics=context.metrics_address,
            problems=cut_problems(list_problems(context, _view_link(context))),
            late_core_seconds=round(totals.late_cpu_s, 1),
            foreign_writes=sum(totals.foreign_writes.values()),
            errors=totals.errors + totals.write_errors,
            late_ticks=totals.late_ticks,
            control_group_ratio=config.control_group_ratio,
            control_group=config.control_group,
        )

    @property
    def beat_period_s(self) -> float:
        """The configured period or, if it is longer, the period that a busy scheduler asks for."""
        link = self.context.link
        return max(self.context.config.scheduler.heartbeat_period_s, 0.0 if link is None else link.period_s)

    def make_heartbeat(self) -> Heartbeat:
        context, assigned = self.context, self.context.assigned
        jobs = [job.report() for path, job in context.table.jobs.items() if path not in context.followed]
        reports: list[JobReport] = []
        finished: list[FinishedJob] = []
        if assigned is not None:
            assigned.note_usage(context.read_usage())
            reports, finished = assigned.reports(), assigned.finished_jobs()
        return Heartbeat(
            context.config.node_id,
            context.incarnation,
            self._sequence,
            context.clock.wall_s(),
            context.capacity_cores,
            jobs + reports,
            finished_jobs=finished,
        )

    def take_samples(self, now_s: float) -> None:
        context = self.context
        if not context.keeps_samples or now_s + context.period_s / 2 < self.sample_at_s:
            return
        # Samples have a fixed rate, like the checks.
        on_time = self.sample_at_s > now_s - context.period_s / 2
        self.sample_at_s = (self.sample_at_s if on_time else now_s) + context.config.web.period_s
        at, size = context.clock.wall_s(), context.config.web.samples
        for job in context.table:
            job.take_sample(at, size)


def make_snapshot(context: AgentContext) -> TickSnapshot:
    last, totals, config = context.last, context.totals, context.config
    assert last is not None
    assigned, link = context.assigned, _view_link(context)
    return TickSnapshot(
        last.tick,
        last.at,
        last.at_s,
        last.duration_s,
        config.node_id,
        context.hierarchies.layout,
        last.check_period_s,
        tuple([job.view(last.at_s) for job in context.table]),
        dict(totals.decisions),
        dict(totals.foreign_writes),
        {
            **{name: getattr(totals, name) for name in COUNTED},
            "writes": context.writer.writes_total,
            "jobs_gone": context.table.gone_total,
            "lost_files": context.places.lost_total,
        },
        tuple(totals.tick_buckets),
        totals.tick_seconds,
        tuple(list_problems(context, link)),
        context.writer.is_paused(),
        context.stride,
        context.empty_rescans,
        None if assigned is None else assigned.view(),
        link,
        context.service_ends,
        context.capacity_cores,
        totals.throttled_cpu_s,
        totals.late_cpu_s,
        context.engines.view(),
        len(context.table.empty),
    )


def cut_problems(problems: list[str]) -> list[str]:
    """Truncate problems to MAX_PROBLEMS and MAX_PROBLEM. Bytes in a path that are no text are escaped, because with
    them the heartbeat could not be sent."""
    return [escape(text)[:MAX_PROBLEM] for text in problems[:MAX_PROBLEMS]]


def list_problems(context: AgentContext, link: LinkView | None) -> list[str]:
    config, assigned = context.config, context.assigned
    problems = [*context.discovery_problems, *(f"{p}: {text}" for p, text in context.table.problems.items() if text)]
    parts = (context.watcher.problem, context.units.problem, context.places.problem, context.peaks.problem)
    problems += [text for text in (context.writer.damaged, context.totals.last_error, *parts) if text]
    problems += [
        f"{name}: it was unmounted or something is mounted over it; nothing is lowered until it is back, because "
        "`cpumond restore` could not find the limits there"
        for name in context.writer.covered
    ]
    if context.refused_config:
        problems.append(
            f"the last reload was refused, so the previous configuration stays in force: {context.refused_config}"
        )
    if assigned is not None and assigned.problem:
        problems.append(assigned.problem)
    if link is not None and (link.stats.last_error or link.warning):
        problems.append(f"scheduler {link.url}: {link.stats.last_error or link.warning}")
    if context.empty_rescans >= config.discovery.empty_rescans:
        patterns = ", ".join(describe_source(source) for source in config.source)
        problems.append(f"no cgroup matches any source ({patterns}); see `cpumond doctor`")
    return problems


def _view_link(context: AgentContext) -> LinkView | None:
    if context.link is None:
        return None
    link = context.link
    (url, term, refused), answer, stats = link.scheduler, link.registered, link.stats()
    tree, warning = (None, "") if answer is None else (answer.tree, answer.warning)
    return LinkView(url, answer is not None, tree, warning, stats, term, refused, context.config.ceiling or "")
