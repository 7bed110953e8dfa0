"""Replay a recorded trace: parse its CSV lines, and let the monitor decide on each row, for ``cpumond replay``.

Pure and streaming: lines are an iterable, results are iterators, and only one row is in memory at a time."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from cpumond.core.errors import ConfigError
from cpumond.monitor.model import CpuReading, Kind, MonitorSettings, start_state
from cpumond.monitor.policy import rebase
from cpumond.monitor.rules import RULES

TRACE_COLUMNS: Final = {
    "time_s": (-sys.float_info.max, sys.float_info.max, "a finite number of seconds"),
    "usage_cores": (0.0, sys.float_info.max, "a finite number of cores >= 0"),
    "total_cpu_s": (-sys.float_info.max, sys.float_info.max, "a finite number of CPU seconds"),
    "throttled_ratio": (0.0, 1.0, "a number in [0, 1]"),
    "pressure_ratio": (0.0, 1.0, "a number in [0, 1]"),
    "throttled_periods": (0.0, 2.0**53, "a number of periods >= 0"),
}
"""Column of a trace -> (minimum, maximum, both in words). A trace has ``time_s``, one of the two CPU columns, and any
of the others, in any order."""

LOOKING_BACK: Final = frozenset({"usage_cores", "throttled_ratio", "pressure_ratio", "throttled_periods"})
"""Columns about the time since the previous row. In the first row these may be empty."""

MAX_LINE_CHARS: Final = 64 * 1024
"""Maximum characters in a line of a trace, including its end. A file that is no trace may be one endless line."""

EXPECTED_HEADER: Final = (
    "expected time_s,usage_cores or time_s,total_cpu_s, optionally with throttled_ratio, pressure_ratio, "
    "throttled_periods"
)


class TraceRow(msgspec.Struct, frozen=True, gc=False):
    """One row of a trace.

    ``time_s`` is in seconds of any clock. The other values are about the time since the previous row, and have no
    meaning in the first row. ``usage_cores``: mean usage, >= 0. ``throttled_ratio``: fraction of throttled periods, and
    ``pressure_ratio``: fraction of time in which some task waited for CPU, both in [0, 1]. ``throttled_periods``:
    number of throttled enforcement periods, None if the trace does not have this column."""

    time_s: float
    usage_cores: float
    throttled_ratio: float = 0.0
    pressure_ratio: float = 0.0
    throttled_periods: float | None = None


class ReplayRow(msgspec.Struct, frozen=True, gc=False):
    """One check of a replay, with its decision. The fields are the printed columns.

    ``votes_sum`` is None until the window is full; ``cpu_limit_cores`` is the new limit."""

    time_s: float
    usage_cores: float
    smoothed_cores: float
    votes_sum: int | None
    decision: Kind
    cpu_limit_cores: float


class PeakReplayRow(ReplayRow, frozen=True, gc=False):
    """One check of a replay by rule ``peak``, with the peak and the caution after the check."""

    peak_cores: float
    caution: float


def find_columns(settings: MonitorSettings) -> tuple[str, ...]:
    """Return the columns of a replay by the rule in ``settings``."""
    return (PeakReplayRow if settings.limit_rule == "peak" else ReplayRow).__struct_fields__


def parse_trace(lines: Iterable[str], name: str) -> Iterator[TraceRow]:
    """Parse a CSV trace with a header. Blank lines and lines that start with # are skipped.

    Error messages call the trace ``name``. The header is read at once, each row on demand. If the trace has
    ``total_cpu_s``, usage is the difference between two rows divided by the time between them, or 0 if the counter has
    fallen (1.4). Raises ConfigError, whose message has the trace, the line, the column, and the expected content."""
    numbered = split_lines(lines, name)
    number, header = next(numbered, (0, []))
    if number == 0:
        raise ConfigError(f"{name}: is empty; {EXPECTED_HEADER}")
    where = f"{name}: line {number}"
    columns = [cell.strip().replace("-", "_") for cell in header]
    for column in columns:
        if column not in TRACE_COLUMNS:
            raise ConfigError(f"{where}: unknown column {column!r}; {EXPECTED_HEADER}")
        if columns.count(column) > 1:
            raise ConfigError(f"{where}: column {column} is given twice; {EXPECTED_HEADER}")
    if "time_s" not in columns:
        raise ConfigError(f"{where}: column time_s is missing; {EXPECTED_HEADER}")
    if ("usage_cores" in columns) == ("total_cpu_s" in columns):
        raise ConfigError(f"{where}: one of the columns usage_cores and total_cpu_s is needed; {EXPECTED_HEADER}")
    return _parse_rows(numbered, columns, name)


def split_lines(lines: Iterable[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number (from 1) and the cells of each line that has cells. Quotes cannot join two lines into a row."""
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_CHARS:
            raise ConfigError(f"{name}: line {number}: is longer than 64 KiB; expected comma-separated numbers")
        text = (line.removeprefix("\ufeff") if number == 1 else line).strip()
        if text and not text.startswith("#"):
            try:
                yield number, next(csv.reader((text,)))
            except csv.Error as error:
                raise ConfigError(f"{name}: line {number}: expected comma-separated numbers: {error}") from None


def _parse_rows(numbered: Iterable[tuple[int, list[str]]], columns: list[str], name: str) -> Iterator[TraceRow]:
    before: dict[str, float] = {}
    for number, cells in numbered:
        where = f"{name}: line {number}"
        if len(cells) != len(columns):
            raise ConfigError(f"{where}: expected {len(columns)} columns ({','.join(columns)}), got {len(cells)}")
        # The first row is only the baseline: values about the time before this row may be missing.
        optional = frozenset() if before else LOOKING_BACK
        row = {
            column: 0.0 if column in optional and not cell.strip() else _parse_cell(cell, column, where)
            for column, cell in zip(columns, cells, strict=True)
        }
        if before and row["time_s"] <= before["time_s"]:
            raise ConfigError(
                f"{where}: column time_s: expected more than the row before ({before['time_s']!r}), "
                f"got {row['time_s']!r}"
            )
        usage_cores = _compute_usage_cores(row, before, where)
        yield TraceRow(
            row["time_s"],
            usage_cores,
            row.get("throttled_ratio", 0.0),
            row.get("pressure_ratio", 0.0),
            row.get("throttled_periods"),
        )
        before = row


def _parse_cell(text: str, column: str, where: str) -> float:
    low, high, expected = TRACE_COLUMNS[column]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ConfigError(f"{where}: column {column}: expected {expected}, got {text.strip()!r}")
    return value


def _compute_usage_cores(row: dict[str, float], before: dict[str, float], where: str) -> float:
    if "usage_cores" in row:
        return row["usage_cores"]
    if not before:
        return 0.0
    usage_cores = max(row["total_cpu_s"] - before["total_cpu_s"], 0.0) / (row["time_s"] - before["time_s"])
    if not math.isfinite(usage_cores):
        raise ConfigError(
            f"{where}: column total_cpu_s: expected a finite usage since the row before, got {usage_cores}"
        )
    return usage_cores


def replay_rows(rows: Iterable[TraceRow], cpu_limit_cores: float, settings: MonitorSettings) -> Iterator[ReplayRow]:
    """Run the monitor over ``rows`` of a job that requests ``cpu_limit_cores`` (> 0); yield one result for each check.

    The job starts with the first row. Rows before the end of ``start_delay`` are not sampled (1.3 point 1), and the
    first row after that is the baseline; these rows give no result. Each later row is a check, without looks in
    between. ``check_period``, ``mode`` and ``enable_cpu_reclaim`` have no effect: the monitor's own limit moves in
    every mode (1.5).

    The number of throttled periods is that in the trace. If the trace has only ``throttled_ratio``, it is this fraction
    of all periods since the previous row, but at least one if the ratio is above 0."""
    state, throttled = None, 0
    step = RULES[settings.limit_rule].step
    for row in rows:
        if state is None:
            state = start_state(cpu_limit_cores, row.time_s)
        if row.time_s < state.started_at_s + settings.start_delay_s:
            continue
        if state.base is None:
            state = rebase(state, CpuReading(total_cpu_s=0.0, at_s=row.time_s))
            continue
        interval_s = row.time_s - state.base.at_s
        throttled += count_throttled(row, interval_s, state.cfs_period_s)
        reading = CpuReading(total_cpu_s=0.0, at_s=row.time_s, nr_throttled=throttled)
        state, decision = step(
            state, reading, row.usage_cores, interval_s, row.throttled_ratio, settings, row.pressure_ratio
        )
        assert state.smoothed_cores is not None
        common = row.time_s, row.usage_cores, state.smoothed_cores, decision.votes_sum, decision.kind, state.limit_cores
        if settings.limit_rule == "peak":
            assert state.peak_cores is not None
            yield PeakReplayRow(*common, state.peak_cores, state.caution)
        else:
            yield ReplayRow(*common)


def count_throttled(row: TraceRow, interval_s: float, cfs_period_s: float) -> int:
    """Return the number of throttled enforcement periods of a row that covers ``interval_s`` seconds."""
    if row.throttled_periods is not None:
        return round(row.throttled_periods)
    if row.throttled_ratio <= 0.0:
        return 0
    return max(round(min(row.throttled_ratio * interval_s / cfs_period_s, 2.0**53)), 1)
