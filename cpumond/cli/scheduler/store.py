"""``cpumond store copy``."""

from __future__ import annotations

import click

from cpumond.cli.output import print_text
from cpumond.cli.progress import ProgressLine
from cpumond.core.words import count

EXAMPLE = (
    "Example: cpumond store copy --from /var/lib/cpumond-scheduler/scheduler.db "
    '--to "host=db1,db2 dbname=cpumond target_session_attrs=read-write"'
)


@click.group("store", epilog=EXAMPLE)
def store_command() -> None:
    """Copy the scheduler's state while no scheduler runs."""


@store_command.command("copy", epilog=EXAMPLE)
@click.option("--from", "source", metavar="STORE", required=True, help="The store to copy: PATH or conninfo.")
@click.option("--to", "destination", metavar="STORE", required=True, help="An empty store: PATH or conninfo.")
def copy(source: str, destination: str) -> None:
    """Copy a scheduler's state and its log between SQLite and PostgreSQL, either way, and verify the copy.

    A store is the path of a SQLite database (state_dir/scheduler.db) or the conninfo of a PostgreSQL database: libpq's
    key=value words or URL. Stop all schedulers on both first. The history is a file beside each scheduler and stays
    there. The source is not changed."""
    from cpumond.scheduler.store.copying import copy_store

    progress = ProgressLine()
    try:
        copied = copy_store(source, destination, progress.draw)
    finally:
        progress.end()
    what = f"{count(copied.records, 'record')} and {count(copied.entries, 'log entry', 'log entries')}"
    print_text(f"{what} copied and compared, sha256 {copied.checksum}")
