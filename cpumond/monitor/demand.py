"""CPU demand of a simulated job: CSV lines converted to work per enforcement period.

Pure: the caller passes the lines as an iterable. They are steps of demand, or a recorded trace of usage. A trace does
not show the demand of a job while the job was throttled."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from cpumond.core.errors import ConfigError
from cpumond.core.measures import format_duration
from cpumond.monitor.replay import parse_trace, split_lines

MAX_S: Final = 7 * 86_400.0
"""Maximum simulated time in seconds; it takes 48 MB for the periods, and about ten seconds of computing per rule."""
MAX_CORES: Final = 1e6
EXPECTED: Final = (
    "expected seconds,cores (demand: each row holds until the next one), or a recorded trace with "
    "time_s,usage_cores or time_s,total_cpu_s"
)


class Demand(msgspec.Struct, frozen=True):
    """Demand of a job, in core-seconds for each enforcement period.

    ``at_order_cpu_s`` is the same, but with throttled rows of a recorded trace raised to the job's request; None if no
    row is throttled. ``notes``: sentences about the limitations of a recorded trace."""

    work_cpu_s: array[float]
    at_order_cpu_s: array[float] | None = None
    notes: tuple[str, ...] = ()


class DemandStep(NamedTuple):
    """A demand of ``cores`` until ``end_s``, in seconds since the beginning of the first step."""

    end_s: float
    cores: float
    held_back: bool = False


def read_demand(
    lines: Iterable[str], name: str, order_cores: float, period_s: float, duration_s: float | None = None
) -> Demand:
    """Read from ``lines`` the demand of a job that requests ``order_cores``. Error messages call the lines ``name``.

    The demand ends at ``duration_s`` if given. Otherwise the last step lasts as long as the step before. Raises
    ConfigError, whose message has the name, the line, and the expected content."""
    lines = iter(lines)
    begin = list(_read_to_header(lines))
    header = begin[-1] if begin else ""
    whole = itertools.chain(begin, lines)
    is_recorded = "time_s" in header.lower().replace("-", "_")
    ends_s, cores, held_back = array("d"), array("d"), bytearray()
    for step in _read_recorded(whole, name) if is_recorded else _read_steps(whole, name, duration_s):
        is_last = duration_s is not None and step.end_s >= duration_s
        ends_s.append(duration_s if duration_s is not None and is_last else step.end_s)
        cores.append(step.cores)
        held_back.append(step.held_back)
        if is_last:
            break
    if not ends_s:
        raise ConfigError(f"{name}: has only one row, which is the baseline of the next one; record for longer")
    if ends_s[-1] > MAX_S:
        raise ConfigError(
            f"{name}: lasts {format_duration(round(ends_s[-1]))}; at most {format_duration(MAX_S)} are simulated: "
            "shorten it with --duration"
        )
    if duration_s is not None and ends_s[-1] < duration_s:
        raise ConfigError(
            f"{name}: {format_duration(round(ends_s[-1], 3))} were recorded, less than the --duration of "
            f"{format_duration(duration_s)}; omit this option"
        )
    work = spread(zip(ends_s, cores, strict=True), period_s)
    if not is_recorded:
        return Demand(work)
    raised = (max(each, order_cores) if held else each for each, held in zip(cores, held_back, strict=True))
    at_order = spread(zip(ends_s, raised, strict=True), period_s) if any(held_back) else None
    return Demand(work, at_order, _describe_doubts(sum(held_back), len(ends_s), "throttled" in header, ends_s[-1]))


def spread(steps: Iterable[tuple[float, float]], period_s: float) -> array[float]:
    """Return the core-seconds of demand in each ``period_s`` seconds. ``steps``: (end_s, cores), in order of time."""
    work = array("d")
    begin = part = 0.0  # begin: in periods; part: demand of the current period, in cores times periods
    for end_s, cores in steps:
        end = end_s / period_s
        # A decimal number may differ slightly from a multiple of a period.
        end = float(round(end)) if abs(end - round(end)) < 1e-5 else end
        full = int(begin) + 1
        if end < full:
            part += (end - begin) * cores
            begin = end
            continue
        work.append((part + (full - begin) * cores) * period_s)
        work.extend(itertools.repeat(cores * period_s, int(end) - full))
        begin, part = end, (end - int(end)) * cores
    if begin > int(begin) or not work:
        work.append(part * period_s)
    return work


def _read_to_header(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines up to and including the first one that is neither blank nor a comment: the header, or a row."""
    for line in lines:
        yield line
        text = line.removeprefix("\ufeff").strip()
        if text and not text.startswith("#"):
            return


def _read_steps(lines: Iterable[str], name: str, duration_s: float | None) -> Iterator[DemandStep]:
    """Yield the steps of ``seconds,cores`` rows, with or without this header. A step lasts until the next step."""
    columns = ["seconds", "cores"]
    begin_s = before_s = spacing_s = cores = 0.0
    rows = 0
    for number, cells in split_lines(lines, name):
        where = f"{name}: line {number}"
        named = [cell.strip().lower() for cell in cells]
        if not rows and sorted(named) == ["cores", "seconds"]:
            columns = named
            continue
        if not rows and not _is_number(named[0]):
            raise ConfigError(f"{where}: unknown header {','.join(named)[:80]!r}; {EXPECTED}")
        if len(cells) != 2:
            raise ConfigError(f"{where}: expected 2 columns (seconds,cores), got {len(cells)}")
        row = dict(zip(columns, cells, strict=True))
        seconds = _read_cell(row["seconds"], "seconds", where, -1e15, 1e15)
        if rows:
            spacing_s = seconds - before_s
            if spacing_s <= 0.0:
                raise ConfigError(
                    f"{where}: column seconds: expected more than the row before ({before_s!r}), got {seconds!r}"
                )
            yield DemandStep(seconds - begin_s, cores)
        else:
            begin_s = seconds
        cores = _read_cell(row["cores"], "cores", where, 0.0, MAX_CORES)
        before_s = seconds
        rows += 1
    if not rows:
        raise ConfigError(f"{name}: is empty; {EXPECTED}")
    if rows == 1 and duration_s is None:
        raise ConfigError(f"{name}: has only one row, so its length is unknown; give --duration, or add a row")
    yield DemandStep(max(before_s - begin_s + spacing_s, duration_s or 0.0), cores)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_cell(text: str, column: str, where: str, low: float, high: float) -> float:
    value = float(text) if _is_number(text) else float("nan")
    if not low <= value <= high:
        raise ConfigError(f"{where}: column {column}: expected a number in [{low:g}, {high:g}], got {text.strip()!r}")
    return value


def _read_recorded(lines: Iterable[str], name: str) -> Iterator[DemandStep]:
    begin_s: float | None = None
    for row in parse_trace(lines, name):
        if begin_s is None:
            begin_s = row.time_s
        elif row.usage_cores > MAX_CORES:
            raise ConfigError(f"{name}: at {row.time_s:g} s: {row.usage_cores:g} cores are more than {MAX_CORES:g}")
        else:
            yield DemandStep(row.time_s - begin_s, row.usage_cores, row.throttled_ratio > 0.0)


def _describe_doubts(held: int, rows: int, reports_throttling: bool, end_s: float) -> tuple[str, ...]:
    if held:
        first = (
            f"A recorded trace is not demand: in {held} of {rows} row{'s' * (rows > 1)} the job was throttled, and "
            "its demand then is unknown: between the recorded usage and the full request in these rows."
        )
    elif reports_throttling:
        first = "A recorded trace is not demand; no row was throttled, so the usage in each row is the demand."
    else:
        first = (
            "A recorded trace is not demand: without a column throttled_ratio it does not show when the job was "
            "throttled and may have needed more."
        )
    spacing = format_duration(float(f"{end_s / rows:.3g}"))
    return (first, f"It does not show bursts shorter than a row ({spacing} on average).")
