"""``cpumond report``: CPU that pools and operations requested, used and gave up, from the scheduler's history."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal

import click
import msgspec
from click.core import ParameterSource

from cpumond.api.pool_views import TreeList
from cpumond.cli.options import ChoiceType, DurationType, given
from cpumond.cli.output import draw_table, format_csv, guard_cell, is_terminal, terminal_width, use_colour, wide_option
from cpumond.cli.render import grid
from cpumond.cli.replacement import Replacement
from cpumond.cli.scheduler.client import connection_options
from cpumond.cli.scheduler.http_client import SchedulerClient, SchedulerRefusedError
from cpumond.cli.scheduler.report_rows import (
    LIMIT,
    MEASURES,
    NO_USERS,
    RATIOS,
    Line,
    Measure,
    add_up,
    describe_budgets,
    describe_left_out,
    describe_time,
    is_by_day,
    keep_pool,
    list_operations,
    list_pools,
    list_users,
)
from cpumond.cli.scheduler.savings import render_savings, render_savings_csv
from cpumond.cli.scheduler.waste import render_waste, render_waste_csv
from cpumond.core.errors import NoSuchError, UnavailableError, UsageError
from cpumond.core.measures import format_cores, format_span
from cpumond.core.words import count, did_you_mean, escape, escape_json, format_percent, quoted
from cpumond.scheduler.history.model import ReportTree, ReportView
from cpumond.scheduler.history.savings import SavingsView, at_price
from cpumond.scheduler.history.waste import WasteView
from cpumond.scheduler.model import ROOT_POOL

Format = Literal["text", "csv", "json"]
FORMATS: Final[tuple[Format, ...]] = ("text", "csv", "json")

LONGEST_S: Final = 34_560_000.0
"""400 days: the longest history that a scheduler may keep."""

SAVINGS_S: Final = 2_419_200.0

MAX_TOP: Final = 1000


@click.command("report")
@click.option("--since", "since_s", type=DurationType(1.0, LONGEST_S), default="24h", show_default=True,
              help="How far back: 24h, 7d; more than 24h in whole days, UTC.")  # fmt: skip
@click.option("--tree", metavar="TREE", help="Only this pool tree.  [default: all]")
@click.option("--pool", metavar="POOL", help="Only this pool with its sub-pools and their operations.")
@click.option(
    "--top",
    type=click.IntRange(0, MAX_TOP),
    default=20,
    show_default=True,
    help="Maximum number of operations or users per tree, those with the most requested core-hours.",
)
@click.option(
    "-o",
    "--format",
    "format_",
    type=ChoiceType(FORMATS, {"html": "the scheduler's web page has the graphs, csv and json have the numbers"}),
    help="Default: by the ending of the --output FILE, or text.",
)
@click.option(
    "--output", metavar="FILE", help="Write to this file, completely or not at all.  [default: standard output]"
)
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
@click.option("--savings", is_flag=True, help="Value and cost of reclaimed CPU, by pool and week; 4 weeks back.")
@click.option("--price", type=click.FloatRange(0.0, 1e9), metavar="MONEY", help="With --savings: price of a core-hour.")
@click.option(
    "--waste",
    is_flag=True,
    help="Requests that users and pools left unused in the last week, and requests that would suffice.",
)
@click.option(
    "--weeks-ago", type=click.IntRange(0, 57), metavar="N", help="With --waste: of an earlier week; 0: this one."
)
@wide_option
@connection_options
@click.pass_context
def report_command(
    context: click.Context, client: SchedulerClient, since_s: float, tree: str | None, pool: str | None, top: int,
    format_: Format | None, output: str | None, as_json: bool, savings: bool, price: float | None,
    waste: bool, weeks_ago: int | None,
) -> None:  # fmt: skip
    """Report core-hours of pools, and of operations or users: requested, used, reclaimed, throttled, raised late.

    It is made from the scheduler's history and reaches no farther back ([history] length in the scheduler's
    configuration); the report states the time that it covers. The last 24 h are known by operation; longer times
    consist of the totals of whole days (UTC), by pool and by user. Administrators see all users, other users
    themselves.

    \b
    text  two tables for each tree, and its budgets with the day on which each is spent, for people
    csv   a row per tree, pool, operation and user; amounts in core-hours, a text that a
          spreadsheet would take for a formula begins with an apostrophe
    json  the scheduler's answer

    \b
    Example:
      cpumond report --since 24h
      cpumond report --tree default --pool research --top 50
      cpumond report --since 7d --output week.csv
      cpumond report --savings --price 0.03
      cpumond report --waste --pool research"""
    pool = None if pool == ROOT_POOL else pool
    chosen, path = choose_output(format_, output, as_json)
    if price is not None and math.isnan(price):
        raise UsageError("--price: expected a number, got nan")
    is_given = {name: context.get_parameter_source(name) is not ParameterSource.DEFAULT for name in context.params}
    if waste:
        if savings or any(is_given[name] for name in ("since_s", "top", "price")):
            raise UsageError("--waste covers one week: leave --savings, --since, --top and --price out")
    elif weeks_ago is not None:
        raise UsageError("--weeks-ago goes with --waste")
    if savings:
        if pool is not None or is_given["top"]:
            raise UsageError("--savings covers all pools: leave --pool and --top out")
    elif price is not None:
        raise UsageError("--price goes with --savings")
    since_s = SAVINGS_S if savings and not is_given["since_s"] else since_s
    with contextlib.ExitStack() as stack:
        # Open the file before any request, so that one that cannot be written is refused at once.
        page = stack.enter_context(Replacement(path, "--output")) if path else None
        width, colour = (None, False) if page is not None else (terminal_width(), use_colour())
        if waste:
            content = _ask(client, "/waste", tree, {"tree": tree, "pool": pool, "weeks_ago": weeks_ago})
            found = client.decode(content, WasteView)
            as_csv, as_text = partial(render_waste_csv, found), partial(render_waste, found)
        elif savings:
            view = read_savings(client, since_s, tree, price)
            content = msgspec.json.encode(view)
            as_csv, as_text = partial(render_savings_csv, view), partial(render_savings, view, since_s)
        else:
            report, content = read_report(client, since_s, tree, pool, top)
            as_csv, as_text = partial(render_csv, report), partial(render_text, report, since_s, top)
        if chosen == "csv":
            text = as_csv()
        elif chosen == "json":
            text = escape_json(msgspec.json.format(content, indent=2)) + "\n"
        else:
            text = as_text(width, colour) + "\n"
        if page is not None:
            page.write(text)
        else:
            click.echo(text, nl=False)
    if path and is_terminal():
        click.echo(f"the report is in {escape(path)}")


def read_savings(client: SchedulerClient, since_s: float, tree: str | None, price: float | None) -> SavingsView:
    """Read the savings. Raises UnavailableError (the history is turned off), NoSuchError, SchedulerRefusedError."""
    view = client.decode(_ask(client, "/savings", tree, {"since_s": since_s, "tree": tree}), SavingsView)
    return view if price is None else at_price(view, price)


def _ask(client: SchedulerClient, path: str, tree: str | None, query: dict[str, Any]) -> bytes:
    try:
        return client.request("GET", path, query=given(query))
    except SchedulerRefusedError as error:
        if error.status == 404 and tree is not None:
            _check_tree(client, tree)
        if error.status == 404:
            raise UnavailableError(str(error)) from None  # the history is turned off
        raise


def choose_output(format_: Format | None, output: str | None, as_json: bool) -> tuple[Format, str | None]:
    """The format, and the file or None for standard output. Raises UsageError for contradicting options."""
    if as_json:
        if format_ not in (None, "json"):
            raise UsageError(f"--json and --format {format_} contradict each other; use one")
        format_ = "json"
    if output is None or output == "-":
        return format_ or "text", None
    if not output:
        raise UsageError("--output: expected the name of a file")
    ending = os.path.splitext(output)[1][1:].lower()
    by_name: dict[str, Format] = {"": "text", "txt": "text", "text": "text", "csv": "csv", "json": "json"}
    if format_ is None and ending not in by_name:
        raise UsageError(
            f"--output {escape(output)}: its ending is no known format (.txt, .csv, .json); "
            "add --format to have one of them"
        )
    return format_ or by_name[ending], output


def read_report(
    client: SchedulerClient, since_s: float, tree: str | None, pool: str | None, top: int
) -> tuple[ReportView, bytes]:
    """Return the report, also as JSON. Raises UnavailableError (it is empty), NoSuchError, SchedulerRefusedError."""
    # The scheduler does not filter by pool: request as much as it may list, and filter here.
    asked = top if pool is None else MAX_TOP
    content = _ask(client, "/report", tree, {"since_s": since_s, "tree": tree, "top": asked})
    report = client.decode(content, ReportView)
    if tree is not None and not report.trees:
        _check_tree(client, tree)
    if report.covered_s <= 0 or not any(row.points for each in report.trees for row in (each.total, *each.pools)):
        where = "" if tree is None else f" in tree {quoted(tree)}"
        raise UnavailableError(
            f"nothing has been recorded yet for the last {format_span(since_s)}{where}; the history gets a point every "
            f"{format_span(report.period_s)}"
        )
    if pool is None:
        return report, content
    report = keep_pool(report, pool, top)
    return report, msgspec.json.encode(report)


def _check_tree(client: SchedulerClient, tree: str) -> None:
    names = [each.name for each in client.get("/trees", TreeList).trees]
    if tree not in names:
        hint = did_you_mean(tree, names) or (f"; there is {', '.join(map(quoted, names))}" if names else "")
        raise NoSuchError(f"--tree: there is no tree {quoted(tree)}{hint}")


TEXT_COLUMNS: Final = ("kind", "tree", "name", "parent", "depth", "title", "user", "pool", "state")
TIME_COLUMNS: Final = ("since", "until", "covered_s", "operations_without_series")


def render_csv(report: ReportView) -> str:
    """A row per tree (``total``), pool, operation and user, with quotes where they are needed (RFC 4180)."""
    rows: list[Sequence[Any]] = [
        (*TEXT_COLUMNS, *(measure.machine_name for measure in (*MEASURES, LIMIT)), "points", *TIME_COLUMNS)
    ]
    known = (format_digits(report.covered_s), report.operations_without_series)
    times = (format_iso(report.since), format_iso(report.until), *known)
    for tree in report.trees:
        lines = (Line("total", tree.tree, tree.total), *list_pools(tree), *list_operations(tree), *list_users(tree))
        for line in lines:
            row = line.row
            texts = (line.tree, row.name, row.parent, str(line.depth), row.title, row.user, row.pool, row.state)
            values = [format_digits(line.value(measure)) for measure in (*MEASURES, LIMIT)]
            rows.append((line.kind, *map(guard_cell, texts), *values, row.points, *times))
    return format_csv(rows)


def format_digits(value: float | None) -> str:
    """A number with at most six decimals, "" for none."""
    return "" if value is None else f"{value:.6f}".rstrip("0").rstrip(".")


def format_iso(at: float) -> str:
    """Seconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


DROP_ORDER: Final = (
    "peak limit", "state", "late %", "user", "title", "reclaimed %", "pool", "used %", "lost", "throttled", "late",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, in this order; the names of the rows always stay."""


def _column(heading: str, read: Callable[[Line], str]) -> grid.Column[Line]:
    name = heading.removeprefix(">")
    rank = len(DROP_ORDER) - DROP_ORDER.index(name) if name in DROP_ORDER else 0
    return grid.column(heading, rank, lambda line: (read(line), "bold" if line.kind in ("total", "sum") else ""))


def _number_column(of: Measure) -> grid.Column[Line]:
    def format_cell(line: Line) -> str:
        value = line.value(of)
        return "-" if value is None else format_percent(value / 100.0) if of in RATIOS else format_cores(value)

    return _column(f">{of.heading}", format_cell)


NUMBER_COLUMNS: Final = tuple(map(_number_column, MEASURES))
# The first column is always shown, so it has no rank.
POOL_COLUMNS: Final = (
    replace(_column("pool", lambda line: "  " * line.depth + escape(line.row.name)), rank=0),
    *NUMBER_COLUMNS,
)
USER_COLUMNS: Final = (replace(_column("user", lambda line: escape(line.row.name)), rank=0), *NUMBER_COLUMNS)
OPERATION_COLUMNS: Final = (
    _column("operation", lambda line: escape(line.row.name)),
    _column("title", lambda line: escape(line.row.title)),
    _column("user", lambda line: escape(line.row.user)),
    _column("pool", lambda line: escape(line.row.pool)),
    _column("state", lambda line: line.row.state),
    *NUMBER_COLUMNS,
)


def render_text(report: ReportView, since_s: float, top: int, width: int | None, colour: bool) -> str:
    """Two tables for each tree, and the meaning of their columns; at most ``top`` users. ``since_s``: as requested."""
    parts = [grid.fold(line, width) for line in describe_time(report, since_s)]
    for tree in report.trees:
        parts += ["", grid.paint(f"tree {escape(tree.tree)}", "bold", colour)]
        total = Line("total", tree.tree, msgspec.structs.replace(tree.total, name="total"))
        parts.append(_draw(POOL_COLUMNS, [*list_pools(tree), total], width, colour))
        if is_by_day(report):
            parts += ["", *_draw_users(tree, top, width, colour)]
        else:
            parts += ["", *_draw_operations(tree, width, colour)]
        parts += [grid.fold(line, width) for line in describe_budgets(tree.budgets)]
    parts.append("")
    widest = max(len(each.heading) for each in MEASURES)
    parts += [grid.fold(f"{each.heading:<{widest}}  {each.meaning}", width, "  ") for each in MEASURES]
    return "\n".join(parts)


def _draw_operations(tree: ReportTree, width: int | None, colour: bool) -> list[str]:
    operations = list(list_operations(tree))
    left_out = grid.fold(describe_left_out(tree), width)
    if not operations:
        return [left_out or "no operations in this time"]
    table = _draw(OPERATION_COLUMNS, [*operations, add_up(tree)], width, colour)
    return [table, *([left_out] if left_out else [])]


def _draw_users(tree: ReportTree, top: int, width: int | None, colour: bool) -> list[str]:
    if not tree.users:
        return [grid.fold(NO_USERS, width)]
    table = [_draw(USER_COLUMNS, [*itertools.islice(list_users(tree), top)], width, colour)] if top else []
    more = len(tree.users) - top
    if more > 0:
        table.append(f"{count(more, 'more user')} with smaller requests: --top shows more of them")
    return table


def _draw(columns: Sequence[grid.Column[Line]], lines: Sequence[Line], width: int | None, colour: bool) -> str:
    return draw_table(columns, grid.make_rows(columns, lines), width, colour)
