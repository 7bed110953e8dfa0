"""Output of ``status``, ``top``, ``job list`` and ``pin``, and helpers for tables of all commands.

Functions from the agent's answers to text, pure but for the clock. ``width`` None (a pipe): no line is shortened."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, Literal

from cpumond.cli.output import describe_left_out, draw_table
from cpumond.cli.render.grid import LONGEST_NAME, Column, column, draw_grid, draw_lines, fold, make_rows, shorten_name
from cpumond.core.answers import AssignedView, EngineAnswer, JobAnswer, LinkView, RegisteredJob, StatusAnswer
from cpumond.core.measures import count_cores, format_cores, format_duration, format_span
from cpumond.core.words import count, escape, format_left, format_number, format_time, format_votes

MAX_TITLE: Final = 60

Sort = Literal["reclaimed", "usage", "limit", "job"]
SORTS: Final[dict[str, Callable[[JobAnswer], tuple[float, str]]]] = {
    "reclaimed": lambda job: (-job.reclaimed, job.job_id),
    "usage": lambda job: (-(job.usage or 0.0), job.job_id),
    "limit": lambda job: (-job.current_cpu_limit, job.job_id),
    "job": lambda job: (0.0, job.job_id),
}

STYLES: Final = {
    "refused": "yellow", "contested": "red", "overridden": "yellow", "pinned": "cyan", "off": "dim", "shadow": "dim",
    "failed": "red", "paused": "cyan",
}  # fmt: skip
COLUMNS: Final[tuple[Column[JobAnswer], ...]] = (
    column("job", 0, lambda job: escape(job.job_id)),
    column("operation", 11, lambda job: escape(job.operation_id)),
    column("labels", 12, lambda job: escape(", ".join(list_labels(job)))),
    column("status", 1, lambda job: (job.status, STYLES.get(job.status, ""))),
    column(">requested", 0, lambda job: "-" if job.unlimited else f"{job.cpu_limit:.2f}"),
    column(">limit", 0, lambda job: "-" if job.unlimited else f"{job.current_cpu_limit:.2f}"),
    column(">ceiling", 10, lambda job: format_number(job.ceiling, ".2f")),
    column(">(would be)", 3, lambda job: f"{job.monitor_cpu_limit:.2f}" if is_only_watched(job) else ""),
    column(">reclaimed", 0, lambda job: f"{job.reclaimed:.2f}"),
    column(">usage", 2, lambda job: format_number(job.usage, ".2f")),
    column(">smoothed", 6, lambda job: format_number(job.smoothed_cpu_usage, ".2f")),
    column(">peak", 5, lambda job: format_number(job.peak.peak_cores, ".2f") if job.peak else ""),
    column(">half-life", 8, lambda job: format_span(round(job.peak.half_life_s)) if job.peak else ""),
    column(">votes", 7, lambda job: format_votes(job.votes_sum)),
    column(">throttled", 9, lambda job: f"{job.throttled_ratio:.0%}"),
    column("last result", 4, lambda job: (job.last_result or "-", STYLES.get(job.last_result, ""))),
)
"""Columns of ``status`` and ``top``; a job's id is always shown, in full up to LONGEST_NAME."""
NOT_IN_STATUS: Final = frozenset({"reclaimed"})
NOT_IN_TOP: Final = frozenset({"half-life", "votes", "last result"})


def format_title(text: str, most: int = MAX_TITLE) -> str:
    """A user's text, shortened to ``most`` characters so that other columns fit."""
    shown = escape(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def format_option(key: str, value: object) -> str:
    """An option's value in the notation of users; numeric durations are seconds."""
    durations = ("check_period", "start_delay", "restore_hold", "startup_boost", "peak_memory", "throttle_poll")
    if key in durations and isinstance(value, (int, float)):
        return format_duration(float(value))
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def is_only_watched(job: JobAnswer) -> bool:
    """Whether the monitor's limit is only computed, because nothing is written in this mode."""
    return job.mode == "shadow" and not job.refused and not job.unlimited


def list_labels(job: JobAnswer) -> list[str]:
    """Facts that a job's engine reports, except for values in other columns."""
    return [text for text in job.labels.values() if text not in (job.job_id, job.operation_id)] if job.engine else []


def draw_jobs(
    jobs: Sequence[JobAnswer], without: Collection[str], width: int | None, colour: bool
) -> tuple[str, list[str]]:
    """The table with as many columns as fit ``width``, and the headings left out."""
    ruled = [job.peak is not None for job in jobs]
    fills = {
        "operation": any(job.operation_id for job in jobs),
        "labels": any(map(list_labels, jobs)),
        "(would be)": any(map(is_only_watched, jobs)),
        # Columns of one rule only are left out if no job is under that rule.
        **dict.fromkeys(("peak", "half-life"), any(ruled)),
        **dict.fromkeys(("smoothed", "votes"), not all(ruled)),
        # A ceiling that follows the guarantee is the same number.
        "ceiling": any(job.actuator != "quota" for job in jobs),
    }
    columns = [each for each in COLUMNS if each.name not in without and fills.get(each.name, True)]
    columns = [replace(each, heading=f">{name_limit(jobs)}") if each.name == "limit" else each for each in columns]
    if width is not None:
        columns[0] = replace(columns[0], read=lambda job: shorten_name(escape(job.job_id), LONGEST_NAME))
    text, left_out = draw_grid(columns, make_rows(columns, jobs), width, colour)
    return text, [name.strip("()") for name in left_out]


def name_limit(jobs: Iterable[JobAnswer]) -> str:
    """The word for ``current_cpu_limit``, which throttles nothing if it is no quota."""
    actuators = {job.actuator for job in jobs}
    return "limit" if "quota" in actuators or not actuators else "guarantee"


def describe_totals(answer: StatusAnswer) -> str:
    totals, noun = answer.totals, name_limit(answer.jobs)
    text = (
        f"{count_cores(totals.cpu_limit)} requested, {noun} {format_cores(totals.current_cpu_limit)}, "
        f"{format_cores(totals.reclaimed)} reclaimed"
    )
    levers = sorted({job.actuator for job in answer.jobs if job.mode == "reclaim"})
    text += f" by {', '.join(levers)}" if levers else ""
    watched = sum(job.current_cpu_limit - job.monitor_cpu_limit for job in answer.jobs if is_only_watched(job))
    return text + (f" ({format_cores(watched)} more in shadow)" if watched > 0.005 else "")


MAX_ORDERED = 5
"""Maximum number of jobs with an overridden limit that are named individually."""


def list_notices(answer: StatusAnswer) -> list[tuple[str, str]]:
    """Sentences for an operator, as (sentence, style)."""
    notices: list[tuple[str, str]] = []
    if answer.is_stuck and answer.last_tick_age_s:
        text = f"stuck: the last check was {format_left(answer.last_tick_age_s)} ago; see the agent's log"
        notices.append((text, "red"))
    if answer.paused:
        notices.append(("paused: no limit is written while the pause file is in the agent's runtime_dir", "cyan"))
    ordered = [job for job in answer.jobs if job.override_by and job.override_left_s is not None]
    for job in ordered[:MAX_ORDERED]:
        text = f"{job.job_id}: {job.override_by} set {count_cores(job.current_cpu_limit)}"
        notices.append((f"{text}, which is respected for {format_left(job.override_left_s or 0.0)} more", "yellow"))
    if len(ordered) > MAX_ORDERED:
        notices.append((f"... and {len(ordered) - MAX_ORDERED} more jobs with overridden limits", "yellow"))
    for why in dict.fromkeys(job.refused for job in answer.jobs if job.refused):
        names = [escape(job.job_id) for job in answer.jobs if job.refused == why]
        notices.append((f"{count(len(names), 'job')} refused, for example {names[0]}: {escape(why)}", "yellow"))
    if stuck := [job for job in answer.jobs if (job.min_cpu_limit or 0.0) >= job.cpu_limit and not job.unlimited]:
        first = stuck[0]
        text = f"nothing can be reclaimed from {count(len(stuck), 'job')}, for example {escape(first.job_id)}"
        floor = f"its floor is as high as its request, {count_cores(first.cpu_limit)}; see min_cpu_limit"
        notices.append((f"{text}: {floor}", "yellow"))
    raised, lowered = (answer.counters.foreign_writes.get(kind, 0) for kind in ("raise", "lower"))
    if raised or lowered:
        text = f"foreign writes: another program raised a limit {raised} x and lowered one {lowered} x"
        notices.append((text, "yellow"))
    if answer.counters.write_errors:
        notices.append((f"write errors: {answer.counters.write_errors} limits could not be written", "red"))
    if answer.counters.shed_checks:
        notices.append((f"over its CPU budget: {answer.counters.shed_checks} checks were skipped ([cost])", "yellow"))
    notices += [(f"problem: {escape(problem)}", "red") for problem in answer.problems]
    notices += [(f"job {escape(job.job_id)}: {escape(job.last_error)}", "red") for job in answer.jobs if job.last_error]
    return notices


def _describe_engine(engine: EngineAnswer) -> str:
    if engine.problem:
        return f"{engine.kind} away"
    return f"{escape(engine.title or engine.kind)} with {count(engine.jobs, 'job')}"


def _describe_node(scheduler: LinkView, executor: AssignedView | None) -> str:
    where = "not registered" if not scheduler.registered else f"in tree {escape(scheduler.tree or '(none)')}"
    term = "" if scheduler.term is None else f" (term {scheduler.term})"
    told = f", lets this host do {scheduler.level} at most" if scheduler.level else ""
    text = f"node of {escape(scheduler.url)}{term}: {where}{told}"
    if executor is None:
        return f"{text}, runs none of its jobs ([executor] kind)"
    states = ", ".join(f"{number} {state}" for state, number in executor.states.items() if number) or "none now"
    return f"{text}, its jobs here: {states}"


def draw_status(answer: StatusAnswer, width: int | None, colour: bool) -> str:
    jobs = count(len(answer.jobs), "job") + (f", {answer.empty_cgroups} empty" if answer.empty_cgroups else "")
    head = (
        f"{escape(answer.node_id)}: {jobs}, cgroups {answer.layout}, one check every "
        f"{format_duration(answer.check_period_s)}, the last one took {answer.tick_duration_s * 1000:.1f} ms"
    )
    parts: list[str] = [fold(head, width)]
    if answer.jobs:
        table, left_out = draw_jobs(answer.jobs, NOT_IN_STATUS, width, colour)
        parts.append(table)
        if left_out:
            parts.append(describe_left_out(left_out, width, colour))
    else:
        parts.append(fold("no jobs; see `cpumond doctor`, or add one with `cpumond job add`", width))
    notes: list[tuple[str, str]] = [(f"total: {describe_totals(answer)}", "bold")]
    if answer.engines:
        notes.append((f"engines: {', '.join(map(_describe_engine, answer.engines))}", ""))
    if answer.scheduler is not None:
        notes.append((_describe_node(answer.scheduler, answer.executor), ""))
    return "\n".join([*parts, *draw_lines([*notes, *list_notices(answer)], width, colour)])


def draw_top(answer: StatusAnswer, sort: Sort, width: int | None, colour: bool, height: int | None) -> str:
    """One frame of ``cpumond top``, with at most ``height`` lines if given."""
    now = time.strftime("%H:%M:%S %Z")
    head = f"{escape(answer.node_id)} {now}: {count(len(answer.jobs), 'job')}, {describe_totals(answer)}"
    notices = list_notices(answer)
    if height is not None and len(notices) > 3:
        notices = [*notices[:2], (f"and {len(notices) - 2} more notices: cpumond status", "red")]
    top = list(draw_lines([(head, "bold"), *notices], width, colour))
    jobs = sorted(answer.jobs, key=SORTS[sort])
    if not jobs:
        return "\n".join([*top, "no jobs"][:height])
    # All jobs, not only those on the screen, decide which columns are shown, so that sorting does not change them.
    rows = draw_jobs(jobs, NOT_IN_TOP, width, colour)[0].split("\n")
    room = len(rows) if height is None else max(height - len(top), 1)
    if len(rows) > room:
        hidden = len(rows) - room + 1
        rows = [*rows[: max(room - 1, 1)], f"... {hidden} more lines, {count(len(jobs), 'job')} by {sort}"]
    return "\n".join([*top, *rows][:height])


def _format_layer(job: RegisteredJob) -> str:
    return ", ".join(f"{key} = {format_option(key, value)}" for key, value in job.job_cpu_monitor.items()) or "-"


REGISTERED: Final[tuple[Column[RegisteredJob], ...]] = (
    column("job", 0, lambda job: escape(job.job_id) or "-"),
    column("operation", 2, lambda job: escape(job.operation_id) or "-"),
    column("cgroup", 1, lambda job: escape(job.path) or "-"),
    column("requested", 3, lambda job: "from cgroup" if job.cpu_limit is None else format_cores(job.cpu_limit)),
    column("job-cpu-monitor", 4, _format_layer),
)


def draw_registered(jobs: Sequence[RegisteredJob], width: int | None, colour: bool) -> str:
    return draw_table(REGISTERED, make_rows(REGISTERED, jobs), width, colour)


def describe_pin(job: JobAnswer, ttl_s: float | None) -> str:
    """The final sentence of ``cpumond pin``."""
    until = "until `cpumond unpin`" if ttl_s is None else f"until {format_time(time.time() + ttl_s)}"
    name = escape(job.job_id)
    if job.last_result == "failed" and job.last_error:
        return f"job {name} is pinned {until}, but the limit could not be written: {job.last_error}"
    if job.pinned_cpu_limit is None:
        return (
            f"the pin of job {name} is recorded, but writes are paused; it takes effect when the pause file is removed"
        )
    return f"job {name} is pinned at {count_cores(job.current_cpu_limit)} {until}"
