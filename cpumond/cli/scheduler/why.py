"""The command ``why``: why CPU of a running scheduler is idle while work waits."""

from __future__ import annotations

from typing import Final

import click

from cpumond.cli.options import given, quote_name
from cpumond.cli.output import print_fields, print_items, print_text
from cpumond.cli.render.grid import Column, column
from cpumond.cli.scheduler.client import scheduler_options, tree_option
from cpumond.cli.scheduler.finding import POOL
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.core.measures import format_cores
from cpumond.core.words import escape
from cpumond.scheduler.answers.idle import IdleCause, IdleParts, IdleReport

CAUSES: Final[tuple[Column[IdleCause], ...]] = (
    column(">cores", 0, lambda each: format_cores(each.cores)),
    column("blocked by", 0, lambda each: each.kind),
    column("pool", 1, lambda each: escape(each.pool or "-")),
    column("change", 0, lambda each: escape(each.change.text)),
)


@click.command("why", epilog="Example: cpumond why research")
@click.argument("pool", type=POOL, required=False)
@tree_option
@scheduler_options
def why_command(client: SchedulerClient, pool: str | None, tree: str | None) -> None:
    """Explain why CPU is idle while operations wait: what blocks how many cores, and what to change.

    Each change is listed with the cores on which it alone would start work; check its other effects with `cpumond pool
    plan` before you make it. With POOL: only causes that concern that pool."""
    path = f"/trees/{quote_name(client.find_tree(tree))}/why"
    report = client.fetch(path, IdleReport, given({"pool": pool}), "causes")
    print_text(escape(report.sentence))
    click.echo()
    print_fields(_part_fields(report.parts))
    if not report.causes:
        return
    click.echo()
    print_items(CAUSES, report.causes)
    for line in report.causes[0].change.shell:
        click.echo(f"$ {line}")


def _part_fields(parts: IdleParts) -> list[tuple[str, str]]:
    rows = (
        ("capacity", parts.capacity, ""),
        ("used", parts.used, ""),
        ("used again", parts.reused, "reclaimed from jobs that did not use it"),
        ("not used", parts.unused, "allocated to jobs that do not use it"),
        ("silent", parts.silent, "of nodes that are offline"),
        ("starting", parts.starting, "about to be allocated to jobs"),
        ("no work", parts.without_work, "idle, nothing waits for it"),
        ("blocked", parts.held_back, "idle while work waits for it"),
        ("backfilled", parts.backfilled, "of those, used by jobs on resources reserved for a gang"),
    )
    return [
        (name, f"{format_cores(cores)} cores{f', {what}' if what else ''}")
        for name, cores, what in rows
        if cores > 0.0 or name in ("capacity", "used", "blocked")
    ]
