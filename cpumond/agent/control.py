"""The control socket: make responses from the newest snapshot; carry out requests in the tick's thread."""

from __future__ import annotations

import math
import os
from typing import Any, Final

import msgspec
import structlog

from cpumond.agent.config import parse_layer
from cpumond.agent.discovery import FoundJob, describe_source
from cpumond.agent.explanation import add_sentences
from cpumond.agent.service import Agent
from cpumond.agent.snapshot import TickSnapshot
from cpumond.agent.state_file import Pin
from cpumond.agent.tracked import Tracked, TrackedView, check_job, find_refusal
from cpumond.core import answers
from cpumond.core.errors import ConfigError, RefusedError, UnavailableError
from cpumond.core.measures import MAX_PERIOD_US, MIN_QUOTA_US, finite_or_none, format_duration
from cpumond.core.words import format_time
from cpumond.host.cgroup.files import NO_BANDWIDTH, read_pressure
from cpumond.host.cgroup.mounts import relative_path
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.monitor import words
from cpumond.monitor.model import JobState, MonitorSettings, list_idle_options
from cpumond.monitor.peak import find_half_life_s, find_peak, find_target
from cpumond.monitor.policy import compute_floor

log = structlog.get_logger("cpumond.agent")
NO_PROCESS: Final = "it contains no process, so it is not a job yet; it becomes one with its first process"

LEAST_PIN_CORES: Final = MIN_QUOTA_US / MAX_PERIOD_US
"""Minimum of a pin in cores, because the kernel accepts no smaller limit."""


def view_job(job: TrackedView) -> answers.JobAnswer:
    """Describe one job for ``cpumond status``."""
    decision, state = job.decision, job.state
    return answers.JobAnswer(
        job_id=job.found.job_id,
        operation_id=job.found.operation_id,
        cgroup=job.found.path,
        status=job.status,
        mode=job.mode,
        refused=job.refused,
        cpu_limit=job.ordered_cores,
        current_cpu_limit=job.current_cores,
        monitor_cpu_limit=state.limit_cores,
        usage=decision.usage_cores if decision else None,
        smoothed_cpu_usage=state.smoothed_cores,
        votes_sum=decision.votes_sum if decision else None,
        throttled_ratio=decision.throttled_ratio if decision else 0.0,
        last_result=job.result,
        last_error=job.last_error,
        override_left_s=job.override_left_s,
        override_by=job.override_by,
        unit=job.unit,
        labels=job.labels,
        engine="" if job.found.engine is None else job.found.engine.kind,
        unlimited=job.unlimited,
        pinned_cpu_limit=job.pinned_cores,
        fast_restores=job.restores,
        write_errors=job.write_errors,
        limit_rule=job.settings.limit_rule,
        peak=view_peak(state, job.settings) if job.settings.limit_rule == "peak" else None,
        actuator=job.actuator,
        ceiling=job.ceiling_cores,
        min_cpu_limit=compute_floor(state.hard_cores, state.usages, job.settings),
    )


def view_peak(state: JobState, s: MonitorSettings) -> answers.PeakAnswer:
    known = state.peak_cores is not None
    return answers.PeakAnswer(
        peak_cores=state.peak_cores,
        target_cores=find_target(find_peak(state, s), state.hard_cores, s) if known else None,
        caution=state.caution,
        half_life_s=find_half_life_s(state, s),
        watched_s=state.watched_s,
        held_count=state.held.count,
        held_s=state.held.held_s,
        held_ratio=words.held_ratio(state),
        throttle_budget=s.throttle_budget,
    )


def _explain_peak(job: Tracked, now_s: float, wall_s: float, is_paused: bool) -> answers.ExplainedPeak:
    state, s, status = job.state, job.settings, job.view(now_s).status
    seen_at, held_at = (finite_or_none(wall_s + at_s - now_s) for at_s in (state.peak_at_s, state.held.at_s))
    hindrance = "writes are paused" if is_paused else ""
    if status not in ("reclaim", "up-only"):
        hindrance = "mode shadow" if status == "shadow" else f"it is {status}"
    if status == "up-only":
        s = msgspec.structs.replace(s, direction="up-only")
    clock = "" if held_at is None else _format_clock(held_at, wall_s)
    return answers.ExplainedPeak(
        **msgspec.structs.asdict(view_peak(state, s)),
        seen_at=seen_at,
        held_at=held_at,
        held_from_cores=state.held.from_cores,
        held_after_s=state.held.after_s,
        because=words.describe_limit(state, s, now_s, clock, job.notes),
        next=words.describe_next(state, s, now_s, hindrance, job.notes),
    )


def _format_clock(at: float, wall_s: float) -> str:
    """Format a local time with its zone, since readers may be elsewhere, and with the date if it is not today."""
    is_today = format_time(at, "%Y-%m-%d") == format_time(wall_s, "%Y-%m-%d")
    return format_time(at, "%H:%M:%S %Z") if is_today else format_time(at)


def view_agent(snapshot: TickSnapshot) -> answers.StatusAnswer:
    """Describe the agent for ``cpumond status --json``, except for the age of the last check."""
    limited = [job for job in snapshot.jobs if not job.unlimited]
    ordered = sum(job.ordered_cores for job in limited)
    current = sum(job.current_cores for job in limited)
    return answers.StatusAnswer(
        node_id=snapshot.node_id,
        layout=snapshot.layout,
        tick=snapshot.tick,
        tick_duration_s=snapshot.duration_s,
        check_period_s=snapshot.check_period_s,
        paused=snapshot.paused,
        totals=answers.Sums(ordered, current, max(ordered - current, 0.0)),
        counters=answers.Counters(snapshot.foreign_writes, snapshot.decisions, **snapshot.counters),
        problems=list(snapshot.problems),
        scheduler=snapshot.link,
        executor=snapshot.assigned,
        engines=list(snapshot.engines),
        empty_cgroups=snapshot.empty_cgroups,
        jobs=[view_job(job) for job in snapshot.jobs],
    )


def explain_job(agent: Agent, name: str, unpin: str = "cpumond unpin") -> answers.ExplainAnswer:
    """Explain one job's limit completely, in figures and sentences. For the tick's thread.

    ``unpin`` is passed to ``add_sentences``. Raises UnavailableError."""
    job = _find(agent, name)
    s, state = job.settings, job.state
    pressure = read_pressure(agent.context.hierarchies, job.found.path)
    now_s, pin = agent.clock.monotonic_s(), agent.context.registered.content.pins.get(job.found.job_id)
    is_peak = s.limit_rule == "peak"
    held_until_s = max(state.hold_until_s, state.started_at_s + s.startup_boost_s)
    if is_peak:
        held_until_s = words.find_not_lowered_until_s(state, s)
    lower, upper = s.relative_lower_bound * state.limit_cores, s.relative_upper_bound * state.limit_cores
    peak = _explain_peak(job, now_s, agent.clock.wall_s(), agent.writer.is_paused()) if is_peak else None
    answer = answers.ExplainAnswer(
        **{**msgspec.structs.asdict(view_job(job.view(now_s))), "peak": peak},
        directory=job.cgroup.directory,
        source=_describe_source(agent, job),
        cpu_limit_given=job.found.cpu_limit_cores,
        told_level=agent.config.ceiling or "",
        xattr_mode=None if job.asked_mode is None else job.asked_mode[0],
        paused=agent.writer.is_paused(),
        pinned_until=None if pin is None else pin.until,
        held_s=max(held_until_s - now_s, 0.0),
        start_left_s=max(state.started_at_s + s.start_delay_s - now_s, 0.0),
        job_cpu_monitor=view_settings(s, job.mode),
        bounds=answers.Bounds(
            floor=job.floor_cores,
            cap=state.hard_cores,
            lower_bound=lower,
            upper_bound=upper,
            quota_found=finite_or_none(job.original.cores),
            ancestor_cap=finite_or_none(job.ancestor.cores),
            ancestor=job.ancestor.path,
        ),
        window=answers.Window(
            size=s.vote_window_size,
            values=[finite_or_none(value) for value in state.window],
            votes=[_vote(value, lower, upper, s) for value in state.window],
            votes_sum=job.decision.votes_sum if job.decision else None,
            threshold=s.vote_decision_threshold,
        ),
        in_force=_settings(job.in_force),
        found=_settings(job.original),
        notes=list(job.notes),
        contested_losses=job.hold.losses,
        pressure=None if pressure is None else msgspec.convert(pressure, answers.PressureAnswer, from_attributes=True),
        total_cpu_s=state.base.total_cpu_s if state.base else 0.0,
        throttled_s=state.base.throttled_s if state.base else 0.0,
        aggregated=answers.Aggregated(
            smoothed_cpu_s=state.smoothed_cpu_s,
            preemptible_cpu_s=state.preemptible_cpu_s,
            preempted_cpu_s=state.preemptible_cpu_s if job.moves else 0.0,
            max_cpu_s=state.max_cpu_s,
            throttled_cpu_s=state.throttled_cpu_s,
            late_cpu_s=job.late_cpu_s,
        ),
        decisions=job.ring.records(),
        samples=view_samples(job, agent.config.web.period_s),
    )
    return add_sentences(answer, s, unpin)


def view_samples(job: Tracked, period_s: float) -> answers.SamplesAnswer:
    """Return the points of a job's graphs, the oldest first: one list for each line of a graph, in cores. ``at`` is in
    seconds since 1970.

    ``limit`` is the monitor's limit, which is in force if it is written. The bounds of the votes follow from ``limit``
    and the present settings. ``peak`` is None under a rule without a peak. Without samples, all lists are empty."""
    s = job.settings
    records = [] if job.samples is None else job.samples.records()
    return answers.SamplesAnswer(
        period_s=max(period_s, s.check_period_s),
        at=[round(each.at, 3) for each in records],
        usage=[round(each.usage_cores, 6) for each in records],
        smoothed=[None if each.smoothed_cores is None else round(each.smoothed_cores, 6) for each in records],
        limit=[round(each.limit_cores, 6) for each in records],
        floor=[round(each.floor_cores, 6) for each in records],
        lower_bound=[round(s.relative_lower_bound * each.limit_cores, 6) for each in records],
        upper_bound=[round(s.relative_upper_bound * each.limit_cores, 6) for each in records],
        votes_sum=[each.votes_sum for each in records],
        throttled_ratio=[round(each.throttled_ratio, 4) for each in records],
        peak=[None if each.peak_cores is None else round(each.peak_cores, 6) for each in records],
    )


def _describe_source(agent: Agent, job: Tracked) -> str:
    """Describe where a job comes from: the pattern of its source, the scheduler, or "" if a user added the job."""
    if job.found.source is not None:
        return describe_source(job.found.source)
    order = None if agent.context.assigned is None else agent.context.assigned.find_by_cgroup(job.found.path)
    return "" if order is None else f"started by the scheduler: pool {order.pool}, task {order.task}"


def view_settings(s: MonitorSettings, mode: str) -> dict[str, Any]:
    """Return the resulting section ``job-cpu-monitor`` with YTsaurus' names; durations are texts with a unit."""
    named = msgspec.to_builtins(s)
    for field in msgspec.structs.fields(MonitorSettings):
        if field.name.endswith("_s"):
            named[field.encode_name] = format_duration(named[field.encode_name])
    return {**named, "mode": mode, "enable_cpu_reclaim": mode in ("reclaim", "up-only")}


def add_job(agent: Agent, body: dict[str, Any]) -> answers.AddedJob:
    """Carry out ``cpumond job add``: save the job and follow it. The response has ``warnings`` about options without
    effect. Raises ConfigError, RefusedError, UnavailableError, CreateError, AccessError."""
    path = relative_path(agent.context.hierarchies, str(body.get("cgroup", "")))
    limit = body.get("cpu_limit")
    if limit is not None and not (_is_number(limit) and 0 < limit < math.inf):
        raise ConfigError(
            f"cpu_limit must be a number of cores > 0, or omitted to take it from the cgroup, got {limit!r}"
        )
    job = answers.RegisteredJob(
        str(body.get("job_id") or path.rpartition("/")[2]),
        path,
        str(body.get("operation_id") or ""),
        None if limit is None else float(limit),
        parse_layer(body.get("job_cpu_monitor") or {}, "job"),
    )
    found = FoundJob(job.job_id, job.operation_id, path, job.cpu_limit, None, job.job_cpu_monitor)
    check_job(agent.config, found)
    directory = os.path.join(agent.context.hierarchies.cpu_root, path)
    other = agent.table.find(job.job_id)
    if other is not None and other.found.path != path:
        raise ConfigError(f"job id {job.job_id!r} is already that of {other.found.path}; give this job another --id")
    for known in agent.context.registered.content.jobs.values():
        if known.path == path and known.job_id != job.job_id:
            raise ConfigError(f"cgroup {path!r} was already added as job {known.job_id!r}; remove that job first")
    if not os.path.isdir(directory):
        raise UnavailableError(
            f"cgroup {path!r}: {agent.context.hierarchies.name(directory)} does not exist; create it first"
        )
    settings = agent.config.resolve_settings(None, found.operation_id, found.layer)
    refusal = find_refusal(agent.config, found, settings, directory)
    if refusal:
        advice = "; add it to managed_roots, or name a leaf cgroup below them"
        if "cpu.idle" in refusal:
            advice = "; remove it from that class, or set another actuator"
        raise RefusedError(f"cgroup {path!r}: {refusal}{'' if NO_BANDWIDTH in refusal else advice}")
    agent.context.registered.add(job)
    agent.rescan_now()
    tracked = agent.table.find(job.job_id)
    if tracked is None:
        gone = NO_PROCESS if path in agent.table.empty else "it disappeared at once"
        problem = agent.table.problems.get(path, gone)
        raise UnavailableError(f"job {job.job_id!r} is registered but not followed yet: {problem}")
    warnings = [f"job_cpu_monitor.{text}" for text in list_idle_options(tracked.settings, job.job_cpu_monitor)]
    for sentence in warnings:
        log.warning("option_without_effect", job_id=job.job_id, error=sentence)
    described = view_job(tracked.view(agent.clock.monotonic_s()))
    return answers.AddedJob(**msgspec.structs.asdict(described), warnings=warnings)


def remove_job(agent: Agent, job_id: str) -> answers.RemovedJob:
    """``cpumond job remove``: forget the job, restore its cgroup. Raises UnavailableError, CreateError, AccessError."""
    if not agent.context.registered.remove(job_id):
        known = ", ".join(sorted(agent.context.registered.content.jobs)) or "none"
        raise UnavailableError(f"no job {job_id!r} was added over the socket (added: {known}); nothing to remove")
    agent.rescan_now()
    return answers.RemovedJob(job_id)


def list_registered(agent: Agent) -> answers.RegisteredList:
    return answers.RegisteredList(list(agent.context.registered.content.jobs.values()))


def pin_job(agent: Agent, name: str, body: dict[str, Any]) -> answers.JobAnswer:
    """Carry out ``cpumond pin``: keep a limit for a given time, or until unpin. Raises the errors of ``add_job``."""
    job = _find(agent, name)
    if not job.moves:
        why = job.refused or f"its mode is {job.mode}"
        raise RefusedError(f"job {job.found.job_id!r}: its limit is not moved ({why}), so there is nothing to pin")
    cores = body.get("cpu_limit", job.state.hard_cores)
    most = job.state.hard_cores
    least = min(LEAST_PIN_CORES, most)
    if not (_is_number(cores) and least <= cores <= most):
        raise ConfigError(
            f"job {job.found.job_id!r}: a pinned limit must be in [{least:g}, {most:g}] cores, got {cores!r}"
        )
    ttl_s = body.get("ttl_s")
    if ttl_s is not None and not (_is_number(ttl_s) and 0 < ttl_s < math.inf):
        raise ConfigError(f"job {job.found.job_id!r}: ttl_s must be a number of seconds > 0, got {ttl_s!r}")
    until = None if ttl_s is None else agent.clock.wall_s() + float(ttl_s)
    agent.context.registered.pin(job.found.job_id, Pin(float(cores), until))
    agent.rescan_now()
    return view_job(job.view(agent.clock.monotonic_s()))


def unpin_job(agent: Agent, name: str) -> answers.JobAnswer:
    """``cpumond unpin``: end a pin, override or contest, so that the monitor decides. Raises like ``remove_job``."""
    job = _find(agent, name)
    agent.context.registered.pin(job.found.job_id, None)
    agent.loop.limits.give_back(job)
    agent.rescan_now()
    return view_job(job.view(agent.clock.monotonic_s()))


def _find(agent: Agent, name: str) -> Tracked:
    job = agent.table.find(name)
    if job is None and (path := agent.table.find_empty(name)) is not None:
        raise UnavailableError(f"cgroup {path!r}: {NO_PROCESS}")
    if job is None:
        near = ", ".join(sorted(known.found.job_id for known in agent.table)[:5])
        raise UnavailableError(
            f"no job {name!r} here; `cpumond status` lists the jobs" + (f" ({near}, ...)" if near else "")
        )
    return job


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _vote(value: float, lower: float, upper: float, s: MonitorSettings) -> int:
    if s.vote_mode == "ytsaurus":
        return int(value)
    return -1 if value < lower else 1 if value > upper else 0


def _settings(settings: CpuSettings) -> answers.Quota:
    return answers.Quota(**msgspec.structs.asdict(settings), cores=finite_or_none(settings.cores))
