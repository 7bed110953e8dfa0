"""``cpumond replay``: the monitor over a trace, the recorded CPU use of one job."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal, TextIO

import click
import msgspec

from cpumond.agent.config import parse_assignments
from cpumond.cli.options import cpu_limit_option, naming_unreadable, set_option
from cpumond.monitor.model import MonitorSettings, check_together, list_idle_options
from cpumond.monitor.replay import MAX_LINE_CHARS, ReplayRow, find_columns, parse_trace, replay_rows

Format = Literal["csv", "json"]


@click.command("replay")
@click.argument("file")
@cpu_limit_option
@set_option
@click.option(
    "--format",
    "format_",
    type=click.Choice(["csv", "json"]),
    default="csv",
    show_default=True,
    help="csv: a header and one line per check; json: one object per line.",
)
def replay_command(file: str, cpu_limit: float, assignments: tuple[str, ...], format_: Format) -> None:
    """Run the monitor over a recorded trace and print what it decides, check by check.

    FILE, or - for standard input, is CSV with the header time_s,usage_cores (mean usage since the row before) or
    time_s,total_cpu_s (CPU seconds used so far). A column throttled_ratio (share of throttled periods since the row
    before, 0 to 1) lets throttle_restore_ratio act, a column pressure_ratio (share of the time since then in which some
    task waited for CPU) pressure_restore_ratio, throttled_periods (their number since then) or else throttled_ratio
    tells limit_rule = peak when the job was held back. Lines starting with # are skipped. Each row is one check, so
    check_period plays no part; the first row is only the base of the next.

    Printed are the values after each check: time_s, usage_cores, smoothed_cores, votes_sum (empty until the window is
    full), decision (hold, grow, shrink or restore) and cpu_limit_cores, the new limit; with limit_rule = peak also
    peak_cores and caution. Nothing is written anywhere.

    \b
    Example:
      printf 'time_s,usage_cores\\n0,0\\n1,0.5\\n2,0.5\\n' > trace.csv
      cpumond replay trace.csv --cpu-limit 10
      cpumond replay trace.csv --cpu-limit 10 --set vote_window_size=7 --format json
      cpumond replay trace.csv --cpu-limit 10 --set limit_rule=peak
    """
    settings = read_settings(assignments)
    name = "standard input" if file == "-" else file
    rows = parse_trace(read_lines(file), name)
    if format_ == "csv":
        print(",".join(find_columns(settings)))
    for row in replay_rows(rows, cpu_limit, settings):
        # Standard input may still be growing: each decision is shown when it is made.
        print(format_row(row, format_), flush=file == "-")
    sys.stdout.flush()


def read_settings(assignments: tuple[str, ...]) -> MonitorSettings:
    """The settings of ``--set key=value`` over the defaults. Raises ConfigError."""
    return convert_layer(parse_assignments(assignments))


def convert_layer(layer: Mapping[str, object]) -> MonitorSettings:
    """The settings of ``layer`` over the defaults. Raises ConfigError for options that contradict each other."""
    settings = msgspec.convert(layer, MonitorSettings)
    check_together(settings, "--set")
    return settings


def list_idle(layer: Iterable[str], settings: Collection[MonitorSettings], unused: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each option of ``layer`` without effect: one in ``unused``, or idle under all of ``settings``."""
    for key in layer:
        idle = [list_idle_options(each, [key]) for each in settings]
        if key in unused:
            yield f"{key} has no effect in {unused[key]}"
        elif all(idle):
            yield idle[0][0]


def read_lines(path: str) -> Iterator[str]:
    """The lines of a text file, or of standard input for ``-``; bytes that are not UTF-8 become U+FFFD.

    Lines come in pieces of MAX_LINE_CHARS + 1 characters at most, so memory stays bounded.
    Raises AccessError for missing rights, UnavailableError for everything else that prevents reading.
    """
    with naming_unreadable(path, "a trace"):
        if path == "-":
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(encoding="utf-8", errors="replace")
            if sys.stdin is not None:  # None when the caller closed it
                yield from _read_pieces(sys.stdin)
        else:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from _read_pieces(file)


def _read_pieces(file: TextIO) -> Iterator[str]:
    return iter(lambda: file.readline(MAX_LINE_CHARS + 1), "")


def format_row(row: ReplayRow, format_: Format) -> str:
    """One line of output; floats are the shortest text that reads back as the same value."""
    if format_ == "json":
        return json.dumps(msgspec.structs.asdict(row))
    values = msgspec.structs.astuple(row)
    return ",".join("" if value is None else value if isinstance(value, str) else repr(value) for value in values)
