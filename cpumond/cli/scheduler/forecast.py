"""The commands ``operation when`` and ``operation simulate``, and the simulation for plans: forecasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec

from cpumond.cli.options import quote_name
from cpumond.cli.output import error_width, print_items, print_json, print_text, warn
from cpumond.cli.progress import ProgressLine
from cpumond.cli.render.grid import Column, Item, column, fold
from cpumond.cli.scheduler.client import scheduler_options
from cpumond.cli.scheduler.finding import operation_argument
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.spec import spec_options
from cpumond.core.errors import UnavailableError
from cpumond.core.measures import format_cores, format_span
from cpumond.core.words import count, escape
from cpumond.scheduler.model.forecast import (
    Forecast,
    PredictedShare,
    PredictedStart,
    PredictedStop,
    Progress,
    Simulation,
)

SHOWN: Final = 20
simulate_option = click.option(
    "--simulate", "simulates", is_flag=True,
    help="Instead, simulate what would start when, and which jobs would be stopped.",
)  # fmt: skip


@click.command("when", epilog="Example: cpumond operation when 1a-2b-3c-4d")
@operation_argument
@scheduler_options
def when_command(client: SchedulerClient, operation: str) -> None:
    """Predict when an operation starts and ends: the range of eight out of ten simulations of the scheduler's state.

    The simulations draw arrivals, run times and reclaimed CPU from measurements. Exit code 75: there is no forecast
    yet."""
    found = client.fetch(f"/operations/{quote_name(operation)}/when", Forecast)
    now = time.time()
    for line in describe_forecast(found, now):
        print_text(line)
    if found.runs:
        print_text(f"as of {format_span(max(now - found.as_of, 0.0))} ago, from {count(found.runs, 'simulation')}")


def describe_forecast(found: Forecast, now: float) -> list[str]:
    told = []
    if found.started_at is not None:
        told.append(f"started {format_span(max(now - found.started_at, 0.0))} ago")
    elif found.start_p10 is not None or found.start_p50 is not None:
        if found.start_p90 is not None and found.start_p90 < now:
            late = format_span(now - found.start_p90)
            told.append(f"should have started {late} ago in nine of ten simulations, and has not: see `operation why`")
        else:
            told.append(f"starts {_format_times(found.start_p10, found.start_p50, found.start_p90, now)}")
    if found.end_p50 is not None:
        told.append(f"ends {_format_times(found.end_p10, found.end_p50, found.end_p90, now)}")
    return [*told, *found.lines]


def _format_times(first: float | None, middle: float | None, last: float | None, now: float) -> str:
    def span(at: float | None) -> str:
        return "later than the simulations reach" if at is None else format_span(max(at - now, 0.0))

    if span(first) == span(last):
        return f"in {span(first)}"
    return f"in {span(first)} to {span(last)} (8 of 10 simulations), median {span(middle)}"


def format_start(first: float | None, middle: float | None, last: float | None, now: float) -> str:
    """The start time as a cell of a table: a range; "" if unknown, "late" if the time has passed."""
    if first is None and middle is None:
        return ""
    if last is not None and last < now:
        return "late"
    texts = ["?" if at is None else format_span(round(max(at - now, 0.0))) for at in (first, last)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]}..{texts[1]}"


@click.command("simulate", epilog="Example: cpumond operation simulate --pool research --cpu-limit 8 -- sleep 600")
@scheduler_options
@spec_options
def simulate_command(client: SchedulerClient, spec: dict[str, Any]) -> None:
    """Simulate the start of an operation: when it would start, and which operations would wait longer or be stopped.

    Nothing is started. Run times are the usual ones of similar operations. Ctrl-C ends it."""
    print_simulation(client, {"spec": spec})


SHARES: Final[tuple[Column[PredictedShare], ...]] = (
    column("pool", 0, lambda each: escape(each.pool)),
    column(">share", 1, lambda each: format_cores(each.fair_share_before)),
    column(">would be", 0, lambda each: format_cores(each.fair_share_after)),
    column(">allocated", 3, lambda each: format_cores(each.used_before)),
    column(">would hold", 2, lambda each: format_cores(each.used_after)),
)


def print_simulation(client: SchedulerClient, body: dict[str, Any]) -> None:
    """Request a simulation and print it, with its first answer and its progress on standard error."""
    found = run_simulation(client, body)
    if client.as_json:
        print_json(msgspec.json.encode(found), Simulation, "starts")
        return
    for line in found.lines:
        print_text(escape(line))

    def after(at: float | None) -> str:
        return "-" if at is None else format_span(round(max(at - found.as_of, 0.0)))

    starts: tuple[Column[PredictedStart], ...] = (
        column("operation", 0, lambda each: escape(each.operation_id)),
        column("pool", 2, lambda each: escape(each.pool)),
        column(">starts in", 1, lambda each: after(each.start_before)),
        column(">would start", 0, lambda each: after(each.start_after)),
        column(">ends in", 4, lambda each: after(each.end_before)),
        column(">would end", 3, lambda each: after(each.end_after)),
        column("title", 5, lambda each: escape(each.title)),
    )
    stops: tuple[Column[PredictedStop], ...] = (
        column("stopped job", 0, lambda each: escape(each.job_id or "-")),
        column("operation", 2, lambda each: escape(each.operation_id or "-")),
        column("pool", 1, lambda each: escape(each.pool)),
        column(">after", 0, lambda each: after(each.at)),
        column(">core-hours", 3, lambda each: format_cores(each.lost_core_hours)),
        column("why", 4, lambda each: escape(each.why)),
    )
    _print_table(starts, found.starts, is_first=True)
    _print_table(stops, found.stops)
    _print_table(SHARES, found.shares)
    if found.left_out:
        warn(f"{count(found.left_out, 'operation')} more would start or end at a different time")


def run_simulation(client: SchedulerClient, body: dict[str, Any]) -> Simulation:
    """Return the simulation's answer, showing progress on the terminal. Raises UnavailableError if it failed."""
    line = ProgressLine()
    try:
        for text in client.stream("/simulate", body):
            told = client.decode(text, Progress)
            for first in told.first if sys.stderr.isatty() else ():
                click.echo(fold(escape(first), error_width()), err=True)
            if told.error:
                raise UnavailableError(f"the simulation failed: {told.error}")
            if told.answer is not None:
                return told.answer
            line.draw(f"simulating: {told.done:.0%}")
    finally:
        line.end()
    raise UnavailableError(f"{client.url}: the simulation ended without an answer; see the scheduler's log")


def _print_table(columns: Sequence[Column[Item]], items: Sequence[Item], *, is_first: bool = False) -> None:
    """Print the first SHOWN items, if there are any, after a blank line."""
    if items:
        if not is_first:
            click.echo()
        print_items(columns, items[:SHOWN])
