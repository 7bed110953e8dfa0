"""The commands ``events``, ``audit`` and ``undo``: what happened, who did it, and how to undo it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from cpumond.api.event_views import AuditList, AuditView, EventList, EventView
from cpumond.cli.options import DurationType, given
from cpumond.cli.output import chosen_output, combine, print_csv, print_items, print_json, print_text
from cpumond.cli.render.grid import Column, column, without_names
from cpumond.cli.scheduler.client import scheduler_options
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.plans import PlanRefusedError, confirm, print_plan
from cpumond.core.words import escape, escape_json, format_time
from cpumond.scheduler.answers.plan import ChangePlan
from cpumond.scheduler.events import KINDS

MAX_PAGE: Final = 1000
TIMELINE_KINDS: Final = [kind for kind in KINDS if kind != "refused"]
POLL_S: Final = 2.0
STYLES: Final = {
    "refused": "yellow", "node_silent": "yellow", "node_lost": "red", "operation_failed": "red",
    "operation_stuck": "yellow", "budget": "yellow", "limit_contested": "yellow", "node_failing": "red",
}  # fmt: skip

_filters = combine(
    click.option("--follow", is_flag=True, help="Print new ones as they come, the newest last, until Ctrl-C."),
    click.option("--user", metavar="USER"),
    click.option("--tree", metavar="TREE", help="Pool tree; with --pool the default tree unless given."),
    click.option("--pool", metavar="POOL", help="Include all pools below it."),
    click.option("--node", metavar="NODE"),
    click.option("--operation", metavar="ID", help="An operation's id or *alias."),
    click.option("--since", "since_s", metavar="DURATION", type=DurationType(1.0, 1e9), help="For example 1h or 7d."),
    click.option("--limit", type=click.IntRange(1, MAX_PAGE), default=50, show_default=True),
    click.option("--all", "takes_all", is_flag=True, help="Show all of them, without a limit."),
)


@click.command("events", epilog="Example: cpumond events --pool research --since 1d")
@click.option("--kind", metavar="KIND", type=click.Choice(TIMELINE_KINDS), help=f"One of {', '.join(TIMELINE_KINDS)}.")
@_filters
@scheduler_options
def events_command(client: SchedulerClient, /, follow: bool, takes_all: bool, **query: Any) -> None:
    """Show events of pools, nodes and operations, the newest first.

    With --json one line of JSON per event."""
    _list(client, "/events", EventList, query, follow, takes_all)


@click.command("audit", epilog="Example: cpumond audit --since 90d --all --json >audit.jsonl")
@click.option("--kind", type=click.Choice(["command", "refused"]))
@_filters
@scheduler_options
def audit_command(client: SchedulerClient, /, follow: bool, takes_all: bool, **query: Any) -> None:
    """Show who did what, and which requests were refused, the newest first; times are UTC.

    Administrators see all entries; other users see their own, and those about a pool that they may administer (--pool).
    With --json one line of JSON per entry, with the state before and after, the origin, and the rule that allowed it.
    """
    _list(client, "/audit", AuditList, query, follow, takes_all)


def _list(
    client: SchedulerClient, path: str, kind: type[EventList] | type[AuditList], query: dict[str, Any], follow: bool,
    takes_all: bool,
) -> None:  # fmt: skip
    query = given(query)
    if takes_all:
        query["limit"] = MAX_PAGE
    pages = _read_pages(client, path, kind, query)
    if not follow:
        for number, page in enumerate(pages):
            _print(client, page, is_first=number == 0)
            if not takes_all:
                return
        return
    first = next(pages)
    _print(client, first[::-1], is_first=True)
    last = first[0].number if first else 0
    query = {**query, "limit": MAX_PAGE}
    with_headings = not first
    while True:
        time.sleep(POLL_S)
        found: list[EventView | AuditView] = []
        for page in _read_pages(client, path, kind, query):
            new = [event for event in page if event.number > last]
            found += new
            if len(new) < len(page):
                break
        if found:
            _print(client, found[::-1], is_first=with_headings)
            last, with_headings = found[0].number, False


def _read_pages(
    client: SchedulerClient, path: str, kind: type[EventList] | type[AuditList], query: dict[str, Any]
) -> Iterator[list[Any]]:
    """Yield lists of events, the newest first; at least one list."""
    before: int | None = None
    while True:
        answer = client.get(path, kind, **query, before=before)
        yield list(answer.events)
        before = answer.next
        if before is None:
            return


def _format_text(event: EventView | AuditView) -> str:
    times = f" ({event.count} times)" if event.count > 1 and event.kind == "refused" else ""
    origin = f" [{escape(event.origin)}]" if isinstance(event, AuditView) and event.origin else ""
    return escape(event.text) + times + origin


EVENTS: Final[tuple[Column[EventView | AuditView], ...]] = (
    column(">number", 0, lambda event: str(event.number)),
    column("time", 1, lambda event: format_time(event.at)),
    column("kind", 2, lambda event: (event.kind.replace("_", " "), STYLES.get(event.kind, ""))),
    column("what", 0, _format_text),
)


def _print(client: SchedulerClient, events: list[Any], is_first: bool) -> None:
    if client.as_json:
        _print_for_programs(events, is_first)
    elif events:
        print_items(EVENTS if is_first else without_names(EVENTS), events)
        sys.stdout.flush()
    elif is_first:
        print_text("no event matches")


def _print_for_programs(events: list[Any], is_first: bool) -> None:
    """Print a line for each event: JSON, or CSV, whose header does not depend on the events."""
    if chosen_output() == "csv":
        names = (type(events[0]) if events else EventView).__struct_fields__
        rows = [{name: _as_cell(getattr(event, name)) for name in names} for event in events]
        print_csv(rows, names, with_header=is_first)
        return
    for event in events:
        click.echo(escape_json(msgspec.json.encode(event)))


def _as_cell(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, dict | tuple) else value


@click.command("undo", epilog="Example: cpumond undo 4711 --plan")
@click.argument("number", type=click.IntRange(1))
@click.option("--plan", "plan_only", is_flag=True, help="Only show what the undo would change.")
@click.option("--yes", is_flag=True, help="Do not show the plan and ask.")
@scheduler_options
def undo_command(client: SchedulerClient, number: int, plan_only: bool, yes: bool) -> None:
    """Undo a change of pools or trees, by its number in `cpumond events`.

    An undo never overwrites a later change: it is refused and names that change. An undo can be undone, too."""
    command = {"type": "UndoChange", "number": number}
    if plan_only:
        content = client.request("POST", "/plan", command)
        plan = client.decode(content, ChangePlan)
        if client.as_json:
            print_json(content, ChangePlan, "effects")
        elif plan.accepted:
            print_plan(plan)
        if not plan.accepted:
            raise PlanRefusedError(plan.refusal, plan.code)
        return
    if not yes:
        unasked = f"change {number} is not undone, because there is no terminal to ask at; give --yes"
        confirm(client, command, f"Undo change {number}?", unasked)
    client.change(f"change {number} is undone", "POST", f"/events/{number}/undo")
