"""``cpumond simulate``: the CPU that a rule would free under a load, and how often it would hold the job back.

``cpumond replay`` needs no simulated kernel: it prints the rule's decision at each row of a recorded trace."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, Literal, TypeVar

import click
import msgspec

from cpumond.agent.config import parse_assignments
from cpumond.cli.agent.trace import read_lines, read_settings, read_settings_of_rules
from cpumond.cli.options import DurationType, cpu_limit_option, set_option
from cpumond.cli.output import output_options, print_json, print_table, print_text, warn
from cpumond.core.errors import UsageError
from cpumond.core.measures import count_cores, format_duration
from cpumond.core.words import nearest
from cpumond.monitor.demand import MAX_CORES, MAX_S, Demand, read_demand
from cpumond.monitor.model import MonitorSettings
from cpumond.monitor.reclaimed import ReclaimedJobs
from cpumond.monitor.replay import ReplayRow, find_columns, parse_trace, replay_rows
from cpumond.monitor.rules import RULES
from cpumond.monitor.shapes import PERIOD_S, SHAPES, make_work
from cpumond.monitor.simulate import SimulationResult, simulate

Format = Literal["csv", "json"]
K = TypeVar("K", bound=str)

DEFAULT_DURATION_S: Final = 7200.0
UNSIMULATED: Final = ("mode", "enable_cpu_reclaim", "pressure_restore_ratio", "min_cores_per_thread")
"""Options without effect in a simulation."""

COLUMNS: Final[dict[str, Callable[[SimulationResult], str]]] = {
    "rule": lambda result: result.rule,
    "reclaimed": lambda result: f"{result.reclaimed_ratio:.3f}",
    "held back": lambda result: f"{result.held_back_ratio:.2%}",
    "seconds": lambda result: f"{result.held_back_seconds_ratio:.2%}",
    "work late": lambda result: f"{result.late_ratio:.2%}",
    "delay": lambda result: f"{result.delay_s:.3g}s",
    "p99 stretch": lambda result: f"{result.p99_stretch_s:.1f}s",
    "writes/h": lambda result: f"{result.writes_per_hour:.0f}",
    "kept": lambda result: f"{result.kept_work_ratio:.3f}",
    "lost": lambda result: f"{result.lost_work_ratio:.2%}",
}
"""Heading -> text of this value of a result."""


def find_known(name: str, known: Collection[K], what: str) -> K:
    """Return ``name`` if it is one of ``known``. Raises UsageError with a suggestion."""
    for each in known:
        if name == each:
            return each
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
    raise UsageError(f"{what}: there is no {name!r}; {hint}")


def format_source(path: str) -> str:
    return "standard input" if path == "-" else path


class SimulatedRules(msgspec.Struct, frozen=True):
    """The JSON of ``simulate``: a result of each rule for the usage as recorded.

    If the trace has throttled rows, a second list assumes that the job wanted its whole request in these rows."""

    results: list[SimulationResult]
    results_held_back_at_order: list[SimulationResult] | msgspec.UnsetType = msgspec.UNSET


@click.command("simulate", epilog="Example: cpumond simulate --shape web --cpu-limit 16 --compare document,peak")
@click.argument("trace", required=False)
@cpu_limit_option
@set_option
@click.option("--compare", metavar="RULE,RULE", help="Values of limit_rule to run one after another.")
@click.option("--shape", metavar="NAME",
              shell_complete=lambda _ctx, _param, incomplete: [name for name in SHAPES if name.startswith(incomplete)],
              help=f"A built-in load instead of TRACE: {', '.join(SHAPES)}.")  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), help="Seed; another number gives another load of the same --shape.  [default: 1]"
)
@click.option(
    "--duration",
    "duration_s",
    type=DurationType(PERIOD_S, MAX_S),
    help="Duration; TRACE is truncated, or its last row extended to it.  [default: 2h of a --shape, all of TRACE]",
)
@click.option(
    "--program",
    "is_program",
    is_flag=True,
    help="The job is a program: later work waits for earlier work, so a job that is held back falls behind, and "
    "demand never exceeds the request. Otherwise work arrives from outside and queues up.",
)
@click.option("--reclaimed-job-length", "length_s", type=DurationType(1.0, MAX_S), default="2m", show_default=True,
              help="Run time of a job on the reclaimed CPU.")  # fmt: skip
@click.option(
    "--reclaimed-job-wait",
    "wait_s",
    type=DurationType(0.0, MAX_S),
    default="15s",
    show_default=True,
    help="How long such jobs may wait for CPU before the youngest are ended: "
    "allowed_node_resources_overcommit_duration and additional_reclaimed_overcommit_duration of the scheduler.",
)
@output_options("Print the results as JSON.")
def simulate_command(
    trace: str | None, cpu_limit: float, assignments: tuple[str, ...], compare: str | None, shape: str | None,
    seed: int | None, duration_s: float | None, is_program: bool, length_s: float, wait_s: float, as_json: bool,
) -> None:  # fmt: skip
    """Simulate a job under a limit that the monitor moves, period by period of the kernel, as a closed loop.

    TRACE, or - for standard input, is the demand as CSV: rows of seconds,cores (the header is optional). Each row holds
    until the next one, at any spacing. TRACE may also be a recorded trace, as for 'cpumond replay', which is not
    demand: if throttled_ratio is above 0, the demand is unknown. Such rows are simulated twice, once as recorded and
    once as if the job had wanted its whole request.

    The checks every check_period and the looks every throttle_poll run the agent's own code; the kernel is simulated,
    with enforcement periods of 100 ms. Nothing is written, and nothing is measured.

    \b
    The output for each rule:
      reclaimed    freed part of what could be freed: sum(request - limit) / sum(request - demand)
      held back    fraction of 100 ms periods in which the limit granted less than the request would
      seconds      fraction of the seconds with such a period
      work late    fraction of the work that was not done in the period in which it was wanted
      delay        mean time for which a core-second of work waited because of the limit; with
                   --program, the total delay of the job
      p99 stretch  99 of 100 unbroken series of held back periods are no longer than this
      writes/h     changes of the limit
      kept         work of jobs of 1/16 of the request each that a scheduler starts on reclaimed
                   CPU, in the idle class, as a fraction of sum(request - demand)
      lost         fraction of these jobs' work that was lost because they had to end early

    With actuator = guarantee or weight nothing is throttled on a host with free CPU: held back then counts the periods
    with usage above the limit, in which other jobs could have taken the CPU."""
    if (trace is None) == (shape is None):
        raise UsageError("simulate: give either TRACE, a CSV file of seconds,cores, or --shape NAME; see its --help")
    if seed is not None and shape is None:
        raise UsageError("--seed is for --shape; leave it out with TRACE")
    if cpu_limit > MAX_CORES:
        raise UsageError(f"--cpu-limit: at most {MAX_CORES:g} cores are simulated, got {cpu_limit:g}")
    settings = read_compared(assignments, compare)
    if shape is not None:
        find_known(shape, SHAPES, "--shape")
        seed = 1 if seed is None else seed
        duration_s = duration_s or DEFAULT_DURATION_S
        title = f"{shape} ({SHAPES[shape].about}), seed {seed}"
        demand = Demand(make_work(shape, cpu_limit, seed, duration_s))
    else:
        assert trace is not None
        title = format_source(trace)
        demand = read_demand(read_lines(trace), title, cpu_limit, PERIOD_S, duration_s)
    jobs = ReclaimedJobs(length_s=length_s, wait_s=wait_s)
    works = [work for work in (demand.work_cpu_s, demand.at_order_cpu_s) if work is not None]
    with _draw_progress(sum(map(len, works)) * len(settings)) as advance:
        run = functools.partial(simulate, is_program=is_program, reclaimed_jobs=jobs, on_progress=advance)
        results = [[run(work, cpu_limit, each) for each in settings] for work in works]
    if as_json:
        for note in demand.notes:
            click.echo(f"cpumond: note: {note}", err=True)
        print_json(msgspec.json.encode(SimulatedRules(*results)), rows="results")
        return
    first, *others = COLUMNS
    headings = ("", "usage as recorded:", "the whole request wanted in the rows that were throttled:")
    print_text(f"{title}: {describe_work(demand.work_cpu_s, cpu_limit)}")
    for note in demand.notes:
        print_text(note)
    for number, rows in enumerate(results, len(results) > 1):
        if headings[number]:
            print_text(headings[number])
        cells = [[show(row) for show in COLUMNS.values()] for row in rows]
        print_table([first, *(f">{name}" for name in others)], cells)


def read_compared(assignments: tuple[str, ...], compare: str | None) -> list[MonitorSettings]:
    """The settings of ``--set``, once for each rule of ``--compare``. Raises ConfigError and UsageError."""
    names = () if compare is None else compare.split(",")
    rules = dict.fromkeys(find_known(name.strip(), RULES, "--compare") for name in names)
    if rules and "limit_rule" in parse_assignments(assignments):
        warn("limit_rule of --set has no effect: --compare names the rules")
    return read_settings_of_rules(assignments, rules, dict.fromkeys(UNSIMULATED, "a simulation"))


def describe_work(work_cpu_s: Sequence[float], order_cores: float) -> str:
    mean = math.fsum(work_cpu_s) / len(work_cpu_s) / PERIOD_S
    most = max(work_cpu_s) / PERIOD_S
    return (
        f"{format_duration(round(len(work_cpu_s) * PERIOD_S, 1))}, {count_cores(order_cores)} requested, {mean:.4g} "
        f"wanted on average and {most:.4g} at most"
    )


@contextlib.contextmanager
def _draw_progress(periods: int) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar on standard error; yields the function that advances it, None without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield functools.partial(progress.advance, progress.add_task("simulating", total=periods))


@click.command("replay")
@click.argument("file")
@cpu_limit_option
@set_option
@click.option("--format", "format_", type=click.Choice(["csv", "json"]), default="csv", show_default=True,
              help="csv: a header and one line per check; json: one object per line.")  # fmt: skip
def replay_command(file: str, cpu_limit: float, assignments: tuple[str, ...], format_: Format) -> None:
    """Run the monitor over a recorded trace and print its decisions, check by check.

    FILE, or - for standard input, is CSV with the header time_s,usage_cores (mean usage since the previous row) or
    time_s,total_cpu_s (CPU seconds used so far). Optional columns, all since the previous row: throttled_ratio
    (fraction of throttled periods) is the input of throttle_restore_ratio; pressure_ratio (fraction of the time in
    which some task waited for CPU) is that of pressure_restore_ratio; throttled_periods (their number) or, if it is
    missing, throttled_ratio is that of limit_rule = peak. Lines starting with # are skipped. Each row is one check, so
    check_period has no effect; the first row is only the base of the next.

    The output has the values after each check: time_s, usage_cores, smoothed_cores, votes_sum (empty until the window
    is full), decision (hold, grow, shrink or restore) and cpu_limit_cores, the new limit; with limit_rule = peak also
    peak_cores and caution. Nothing is written.

    \b
    Example:
      printf 'time_s,usage_cores\\n0,0\\n1,0.5\\n2,0.5\\n' > trace.csv
      cpumond replay trace.csv --cpu-limit 10
      cpumond replay trace.csv --cpu-limit 10 --set vote_window_size=7 --format json
      cpumond replay trace.csv --cpu-limit 10 --set limit_rule=peak"""
    settings = read_settings(assignments)
    rows = parse_trace(read_lines(file), format_source(file))
    if format_ == "csv":
        print(",".join(find_columns(settings)))
    for row in replay_rows(rows, cpu_limit, settings):
        # Standard input may still be growing, so each decision is printed at once.
        print(format_row(row, format_), flush=file == "-")
    sys.stdout.flush()


def format_row(row: ReplayRow, format_: Format) -> str:
    """Format one row; floats are the shortest text that reads back as the same value."""
    if format_ == "json":
        return json.dumps(msgspec.structs.asdict(row))
    values = msgspec.structs.astuple(row)
    return ",".join("" if value is None else value if isinstance(value, str) else repr(value) for value in values)
