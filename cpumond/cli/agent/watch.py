"""``cpumond dry-run`` and ``cpumond record``: one live cgroup, read and never written."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO

import click
import msgspec

from cpumond.cli.agent.trace import read_settings
from cpumond.cli.ending import ended_by
from cpumond.cli.options import CoresType, DurationType, set_option
from cpumond.cli.output import (
    chosen_output,
    describe_left_out,
    output_options,
    print_line,
    print_text,
    terminal_width,
    use_colour,
)
from cpumond.core.errors import CgroupReadError, UnavailableError, UsageError, from_os_error
from cpumond.core.measures import count_cores, format_cores, format_duration, format_span
from cpumond.host.cgroup import Cgroup, open_cgroup
from cpumond.host.cgroup.files import read_cpus
from cpumond.host.cgroup.mounts import Hierarchies, open_hierarchies, relative_path
from cpumond.monitor.model import CpuReading, Decision, JobState, MonitorSettings, start_state
from cpumond.monitor.protect import compute_pressure_ratio, compute_throttled_ratio
from cpumond.monitor.rules import check
from cpumond.monitor.steady import SteadyState, Use, find_steady_state

LINE_WIDTH = 72
"""Columns of the terminal that a complete line takes."""
MAX_USES = 3600
"""Number of newest checks that are kept to compute where the limit would settle."""

cgroup_option = click.option(
    "--cgroup", "path", required=True, metavar="PATH",
    help="A cgroup: a path below the hierarchy of the cpu controller, or an absolute one.",
)  # fmt: skip
duration_option = click.option(
    "--duration", "duration_s", type=DurationType(),
    help="Stop after this time, for example 60 or 5m.  [default: Ctrl-C]",
)  # fmt: skip


@click.command("dry-run", epilog="Example: cpumond dry-run --cgroup jobs/job-17 --cpu-limit 4 --duration 60")
@cgroup_option
@click.option("--cpu-limit", "cpu_limit_cores", type=CoresType(),
              help="CPU that the job requested.  [default: the quota of the cgroup]")  # fmt: skip
@duration_option
@set_option
@output_options("Print one JSON object per line.")
def dry_run_command(
    path: str, cpu_limit_cores: float | None, duration_s: float | None, assignments: tuple[str, ...], as_json: bool
) -> None:
    """Watch one real cgroup and print what would be reclaimed; never writes.

    Prints a line per check and a summary at the end: how the limit would have moved in this time, and where it would
    settle if the job went on like that. Needs no configuration and no running agent.

    A burst that is shorter than a check is seen as its mean, so it may be throttled more than this shows. To try the
    other rule: --set limit_rule=peak."""
    settings = read_settings(assignments)
    hierarchies = open_hierarchies()
    with contextlib.closing(_open(hierarchies, path)) as cgroup:
        hard_cores = cpu_limit_cores or _read_order(hierarchies, cgroup)
        if settings.pressure_restore_ratio and (why := _follow_pressure(cgroup)):
            click.echo(f"pressure_restore_ratio cannot act here: {why}", err=True)
        print_check = _print_json if as_json else _print_line
        if not as_json:
            print_text(
                f"{cgroup.directory}: {count_cores(hard_cores)} requested, a check every "
                f"{format_duration(settings.check_period_s)}; nothing is written"
            )
            click.echo(_make_line("time", "usage", "smoothed", "votes", "limit", "decision"))
            if _is_narrow():
                click.echo(describe_left_out(["smoothed"], terminal_width(), use_colour()))
        state = start_state(hard_cores, time.monotonic())
        sums, uses = DryRunSums(0.0, 0.0, 0.0, 0.0, 0.0, 0, hard_cores, hard_cores), deque[Use](maxlen=MAX_USES)
        for reading in _readings(cgroup, settings.check_period_s, duration_s):
            state, decision = check(state, reading, reading.at_s, settings)
            if decision.usage_cores is not None:
                sums.add(state, decision)
                uses.append(Use(decision.interval_s, decision.usage_cores))
                print_check(sums.seconds, state, decision)
        steady = find_steady_state(uses, hard_cores, settings)
        if steady is not None:
            sums.steady_limit_cores, sums.steady_after_s = steady.limit_cores, steady.after_s
            sums.steady_reclaimed_ratio = steady.reclaimed_ratio
        if not as_json:
            for sentence in list_sentences(sums, hard_cores, settings, steady):
                print_text(sentence)
        elif chosen_output() == "json":  # a CSV table has no lines of another kind
            print_line(msgspec.to_builtins(DryRunEnd(sums)))


@click.command("record", epilog="Example: cpumond record --cgroup jobs/job-17 --duration 10m --output trace.csv")
@cgroup_option
@click.option("--output", metavar="FILE", default="-", show_default=True, help="CSV file, - for standard output.")
@duration_option
@click.option(
    "--period", "period_s", type=DurationType(), default="1s", show_default=True, help="Time between two rows."
)
def record_command(path: str, output: str, duration_s: float | None, period_s: float) -> None:
    """Record a trace of a live cgroup for `cpumond replay`.

    Its columns are time_s, total_cpu_s, throttled_ratio, throttled_periods, and pressure_ratio if the kernel reports
    pressure (PSI). A trace has the input of both limit rules, but not how much a throttled job would have used."""
    if not 0.01 <= period_s <= 3600:
        raise UsageError(f"--period must be in [10ms, 1h], got {format_duration(period_s)}")
    with contextlib.closing(_open(open_hierarchies(), path)) as cgroup:
        try:
            with contextlib.nullcontext(sys.stdout) if output == "-" else _create(output) as target:
                rows = _write_trace(target, _readings(cgroup, period_s, duration_s), not _follow_pressure(cgroup))
        except OSError as error:
            raise from_os_error(error, f"write {output}", "give another --output") from error
    if output != "-":
        click.echo(f"{rows} rows in {output}; try: cpumond replay {output} --cpu-limit CORES", err=True)


def _create(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="ascii")
    except OSError as error:
        raise from_os_error(error, f"create {path}", "give another --output") from error


def _write_trace(target: TextIO, readings: Iterator[CpuReading], pressure: bool) -> int:
    target.write("time_s,total_cpu_s,throttled_ratio,throttled_periods" + (",pressure_ratio\n" if pressure else "\n"))
    first: CpuReading | None = None
    last: CpuReading | None = None
    rows = 0
    for reading in readings:
        first = first or reading
        ratio = compute_throttled_ratio(last, reading) if last is not None else 0.0
        throttled = max(reading.nr_throttled - last.nr_throttled, 0) if last is not None else 0
        values = [reading.at_s - first.at_s, reading.total_cpu_s, ratio, throttled]
        if pressure:
            values.append(compute_pressure_ratio(last, reading) if last is not None else 0.0)
        target.write(",".join(map(repr, values)) + "\n")
        target.flush()
        last = reading
        rows += 1
    return rows


def _follow_pressure(cgroup: Cgroup) -> str:
    """Start reading the pressure of a cgroup. Returns "", or why it cannot be read."""
    try:
        cgroup.follow_pressure(True)
    except CgroupReadError as error:
        return str(error)
    return ""


def _open(hierarchies: Hierarchies, path: str) -> Cgroup:
    name = relative_path(hierarchies, path)
    cgroup = open_cgroup(hierarchies, name)
    if cgroup is None:
        places = sorted({hierarchies.cpu_root, hierarchies.cpuacct_root})
        where = " and ".join(os.path.join(place, name) for place in places)
        raise UnavailableError(f"there is no cgroup {path!r} (looked for {where}); see `cpumond doctor`")
    return cgroup


def read_own_quota(cgroup: Cgroup) -> float:
    """The quota of the cgroup itself in cores; infinity if it has none."""
    try:
        settings = cgroup.read_settings()
    except CgroupReadError:
        # No cpu.max here: the controller is off for this cgroup, so it has no quota of its own.
        return math.inf
    return math.inf if settings is None else settings.cores


def _read_order(hierarchies: Hierarchies, cgroup: Cgroup) -> float:
    """Return the lowest quota of the cgroup and those above it; without any, how many CPUs it may use; in cores."""
    least = min(read_own_quota(cgroup), cgroup.read_ancestor_cap().cores)
    return least if least < math.inf else float(read_cpus(hierarchies, cgroup.path))


def _readings(cgroup: Cgroup, period_s: float, duration_s: float | None) -> Iterator[CpuReading]:
    """Yield a reading each period, until the time is over, the cgroup is gone, or SIGINT or SIGTERM comes."""
    with ended_by((signal.SIGINT, signal.SIGTERM)) as ended:
        begin_s = next_s = time.monotonic()
        while not ended.is_set():
            now_s = time.monotonic()
            reading = cgroup.read(now_s)
            if reading is None:
                click.echo("the cgroup is gone", err=True)
                return
            yield reading
            next_s = max(next_s + period_s, now_s)
            if duration_s is not None and next_s > begin_s + duration_s + 1e-3:
                return
            ended.wait(next_s - time.monotonic())


def describe_steady(steady: SteadyState, hard_cores: float, settings: MonitorSettings) -> str:
    """A sentence that says where the limit would settle; it names the rule unless it is the default."""
    rule = "" if settings.limit_rule == "document" else f" by rule {settings.limit_rule}"
    if steady.reclaimed_ratio < 0.005:
        return f"At this usage{rule}: the limit would stay at {count_cores(hard_cores)}, nothing would be reclaimed."
    moves = ""
    if steady.most_cores - steady.least_cores > 0.05 * hard_cores:
        moves = f" on average, between {format_cores(steady.least_cores)} and {format_cores(steady.most_cores)}"
    return (
        f"At this usage{rule}: limit {steady.limit_cores:.1f} of {count_cores(hard_cores)}, "
        f"{steady.reclaimed_ratio:.0%} reclaimed{moves}, after about {_format_about(steady.after_s)}."
    )


def _format_about(seconds: float) -> str:
    """Format an approximate time, rounded to 1 s, from 20 s on to 10 s, and from 5 min on to a minute."""
    if seconds >= 300.0:
        return format_span(60.0 * round(seconds / 60.0))
    step = 1 if seconds < 20.0 else 10
    return f"{step * round(seconds / step)} s"


class DryRunCheck(msgspec.Struct, frozen=True):
    """A line of ``dry-run --json``: one check, ``time_s`` after the first; cores, ratios in [0, 1].

    ``smoothed_cores`` and ``votes_sum`` are None until there is a value; ``decision``: of the limit rule."""

    time_s: float
    usage_cores: float | None
    smoothed_cores: float | None
    votes_sum: int | None
    decision: str
    cpu_limit_cores: float
    throttled_ratio: float
    pressure_ratio: float


class DryRunSums(msgspec.Struct):
    """Sums of a dry run, in core-seconds, cores and seconds.

    ``short_cpu_s``: usage above the limit that would have been set. ``steady_...``: where the limit would settle, None
    if unknown."""

    seconds: float
    ordered_cpu_s: float
    used_cpu_s: float
    reclaimed_cpu_s: float
    short_cpu_s: float
    changes: int
    final_limit_cores: float
    least_limit_cores: float
    steady_limit_cores: float | None = None
    steady_reclaimed_ratio: float | None = None
    steady_after_s: float | None = None

    def add(self, state: JobState, decision: Decision) -> None:
        """Add one check, after which the state is ``state``."""
        used_cores = decision.usage_cores or 0.0
        self.seconds += decision.interval_s
        self.used_cpu_s += used_cores * decision.interval_s
        self.short_cpu_s += max(used_cores - decision.old_cores, 0.0) * decision.interval_s
        self.changes += decision.changes
        self.ordered_cpu_s, self.reclaimed_cpu_s = state.max_cpu_s, state.preemptible_cpu_s
        self.final_limit_cores = state.limit_cores
        self.least_limit_cores = min(self.least_limit_cores, state.limit_cores)


class DryRunEnd(msgspec.Struct, frozen=True):
    """The last line of ``dry-run --json``."""

    summary: DryRunSums


def list_sentences(sums: DryRunSums, hard_cores: float, settings: MonitorSettings, steady: SteadyState | None) -> (
    Iterator[str]
):  # fmt: skip
    share = sums.reclaimed_cpu_s / sums.ordered_cpu_s if sums.ordered_cpu_s else 0.0
    yield (
        f"\nIn {sums.seconds:.0f} s the job requested {sums.ordered_cpu_s:.1f} core-seconds and used "
        f"{sums.used_cpu_s:.1f}.\n{sums.reclaimed_cpu_s:.1f} core-seconds ({share:.0%}) would have been reclaimed in "
        f"{sums.changes} changes; the limit would be {sums.final_limit_cores:.2f} of {count_cores(hard_cores)} now."
    )
    if steady is not None:
        yield describe_steady(steady, hard_cores, settings)
    if sums.short_cpu_s:
        yield f"{sums.short_cpu_s:.1f} core-seconds of its usage exceeded the limit that would have been set."
    seen, ordered = math.ceil(sums.least_limit_cores), math.ceil(hard_cores)
    if seen < ordered:
        yield (
            f"At the lowest limit a runtime that sizes its thread pools by the quota would have seen {seen} CPUs "
            f"instead of {ordered}; min_cpu_limit, min_limit_ratio, or actuator = guarantee or weight, avoid that."
        )


def _is_narrow() -> bool:
    return (terminal_width() or LINE_WIDTH) < LINE_WIDTH


def _make_line(at: str, usage: str, smoothed: str, votes: str, limit: str, rest: str) -> str:
    """Format a line of the running table; a narrow terminal leaves out the smoothed usage."""
    if _is_narrow():
        return f"{at:>7} {usage:>7} {votes:>5} {limit:>7}  {rest}".rstrip()
    return f"{at:>8} {usage:>8} {smoothed:>8} {votes:>5} {limit:>8}  {rest}"


def _print_line(at_s: float, state: JobState, decision: Decision) -> None:
    votes = "" if decision.votes_sum is None else f"{decision.votes_sum:+d}"
    what: str = decision.kind if decision.changes else ""
    if not _is_narrow():
        what += f"  throttled {decision.throttled_ratio:.0%}" if decision.throttled_ratio else ""
        what += f"  waited {decision.pressure_ratio:.0%}" if decision.pressure_ratio else ""
    numbers = (decision.usage_cores or 0.0, state.smoothed_cores, state.limit_cores)
    usage, smoothed, limit = (f"{number:.3f}" for number in numbers)
    click.echo(_make_line(f"{at_s:.1f}", usage, smoothed, votes, limit, what))


def _print_json(at_s: float, state: JobState, decision: Decision) -> None:
    header: list[str] = click.get_current_context().meta.setdefault("cpumond.header", [])
    line = DryRunCheck(
        at_s, decision.usage_cores, state.smoothed_cores, decision.votes_sum, decision.kind, state.limit_cores,
        decision.throttled_ratio, decision.pressure_ratio,
    )  # fmt: skip
    header[:] = print_line(msgspec.to_builtins(line), header)
