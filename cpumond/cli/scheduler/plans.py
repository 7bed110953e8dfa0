"""Printing of plans of changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click
import msgspec

from cpumond.cli.output import can_ask, print_table, print_text, warn
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.core.errors import EXIT_CANNOT_CREATE, EXIT_CONFIG, EXIT_NO_SUCH, EXIT_PERMISSION, CpumondError, UsageError
from cpumond.core.measures import format_cores
from cpumond.core.words import count, escape, number
from cpumond.fairshare.resources import RESOURCES, format_amount
from cpumond.scheduler.answers.plan import ChangePlan, Effect, ElementShares
from cpumond.scheduler.model import ACCESS_DENIED, ALREADY_EXISTS, RESOLVE
from cpumond.scheduler.settings.changes import ConfigChange

NOTHING: Final = "nothing is changed"
COLOURS: Final = {"+": "green", "~": "yellow", "-": "red"}


EXIT_OF_CODE: Final = {RESOLVE: EXIT_NO_SUCH, ACCESS_DENIED: EXIT_PERMISSION, ALREADY_EXISTS: EXIT_CANNOT_CREATE}


class PlanRefusedError(CpumondError):
    """A change that would be refused: the command ends like the change itself, with the ``code`` of the refusal."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.exit_code = EXIT_OF_CODE.get(code, EXIT_CONFIG)


def format_limits(limits: dict[str, float], nothing: str = "-") -> str:
    """Format resources as ``10 cpu, 0 gpu, 2 GiB memory``."""
    texts = (f"{format_amount(r, limits[name])} {name}" for r, name in enumerate(RESOURCES) if name in limits)
    return ", ".join(texts) or nothing


def format_value(value: object) -> str:
    """A value of an attribute in the notation of ``pool set``."""
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def confirm(
    client: SchedulerClient, command: dict[str, Any], question: str, unasked: str, declined: str = NOTHING
) -> None:
    """Show what a command would do and ask for a yes. Raises UsageError (sentence: ``unasked``) without a terminal,
    PlanRefusedError, and click.Abort for a no."""
    plan = client.decode(client.request("POST", "/plan", command), ChangePlan)
    if not plan.accepted:
        raise PlanRefusedError(plan.refusal, plan.code)
    if client.as_json or not can_ask():
        raise UsageError(unasked)
    print_plan(plan)
    ask(question, declined)
    client.plan_shown = describe_plan(plan)


def ask(question: str, declined: str = NOTHING) -> None:
    """Ask for a yes. Raises click.Abort for a no, after printing what that means."""
    if not click.confirm(question):
        click.echo(declined, err=True)
        raise click.Abort


def describe_plan(plan: ChangePlan) -> str:
    """A plan that was shown, as text for the audit log."""
    pools = sum(effect.kind == "pool" for effect in plan.effects)
    parts = [count(len(plan.changes), "change"), count(pools, "pool"), count(len(plan.effects) - pools, "operation")]
    told = count(len(plan.warnings) + len(plan.notes), "warning")
    return f"{parts[0]}, with effects on {parts[1]} and {parts[2]}, {told}"


def print_plan(plan: ChangePlan) -> None:
    """Print an accepted plan, and its warnings on standard error."""
    for change in plan.changes:
        print_text(_describe_change(change)[1], "  ")
    if not plan.changes:
        print_text("nothing would change: everything is as requested already")
    print_effects(plan)
    print_warnings(plan)


def print_signed(plan: ChangePlan) -> None:
    """Print the changes of a plan, marked +, ~ or - for created, changed or removed (coloured on a terminal), and then
    the numbers of trees and pools."""
    places = set()
    for change in plan.changes:
        sign, text = _describe_change(change)
        places.add((sign, change.tree, change.pool))
        lines = [f"{sign} {text}"]
        if sign == "+":
            lines += [f"    {escape(name)}: {escape(format_value(value))}" for name, value in change.new.items()]
        for line in lines:
            print_text(line, "  ", COLOURS[sign])
    made, changed, removed = (sum(each[0] == sign for each in places) for sign in COLOURS)
    print_text(f"{made} to create, {changed} to change, {removed} to remove")


def _describe_change(change: ConfigChange) -> tuple[str, str]:
    where = f"pool {escape(change.pool)}" if change.pool else f"tree {escape(change.tree)}"
    if not change.attribute:
        return ("+", f"{where}: made") if change.old is None else ("-", f"{where}: removed")
    old, new = ("not set" if value is None else escape(format_value(value)) for value in (change.old, change.new))
    return "~", f"{where}: {escape(change.attribute)}: {old} -> {new}"


def print_warnings(plan: ChangePlan) -> None:
    for warning in (*plan.warnings, *plan.notes):
        warn(warning)


def print_effects(plan: ChangePlan) -> None:
    if not plan.effects:
        print_text("no share, limit or guarantee would change now")
        return
    headings = ["", "name", "fair share", "guarantee", "limit", "running/at most", "all/at most", ""]
    rows = [_effect_row(effect) for effect in plan.effects]
    # After the first three, columns that are empty in all rows are left out.
    kept = [n for n, heading in enumerate(headings) if n < 3 or any(row[n] for row in rows)]
    print_table([headings[n] for n in kept], [[row[n] for n in kept] for row in rows])


def _effect_row(effect: Effect) -> list[str]:
    old, new = effect.before, effect.after
    name = escape(effect.name) + (f" {escape(effect.title)!r}" if effect.title else "")
    notes = []
    if old is None or new is None:
        notes.append("new" if old is None else "gone")
    elif old.pool != new.pool:
        notes.append(f"{escape(old.pool)} -> {escape(new.pool)}")
    if old is not None and new is not None and old.is_running != new.is_running:
        notes.append("would run" if new.is_running else "would wait")

    def change(show: Callable[[ElementShares], str], *fields: str) -> str:
        """Before -> after; "" if none of ``fields`` changes."""
        if fields and not {*fields} & {*effect.changed}:
            return ""
        before, after = ("-" if each is None else show(each) for each in (old, new))
        return before if before == after else f"{before} -> {after}"

    def count_change(*fields: str) -> str:
        shown = change(lambda each: "/".join(str(getattr(each, field)) for field in fields), *fields)
        return shown if effect.kind == "pool" else ""

    return [
        effect.kind,
        name,
        change(lambda each: format_cores(each.fair_share["cpu"])),
        change(_format_guarantee, "strong_guarantee", "exists"),
        change(lambda each: format_limits(each.limits), "limits", "exists"),
        count_change("running_operation_count", "max_running_operation_count"),
        count_change("operation_count", "max_operation_count"),
        ", ".join(notes),
    ]


def _format_guarantee(outlook: ElementShares) -> str:
    cores = outlook.strong_guarantee.get("cpu", 0.0)
    return format_cores(cores) if cores else "-"
