"""A scheduler without sockets on a store that can be told to refuse."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from scheduler_world import StillClock

from cpumond.scheduler.model import Rules
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.store import Change, Entry, StoreError
from cpumond.scheduler.store.sqlite import SqliteStore


class Watched:
    """A store that can be told to refuse, and that tells what it is about to write."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.refusing = False
        self.lost_total = 0
        self.commit_s = 0.0
        self.seen: list[Sequence[Change]] = []
        self.entries: list[Entry] = []
        self.before: Callable[[], None] = lambda: None

    def load(self) -> Any:
        return self.store.load()

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        self.before()
        if self.refusing:
            raise StoreError("the disk is full")
        if changes:
            self.seen.append(changes)
        self.entries += entries
        self.store.write(changes, entries)
        self.lost_total = self.store.lost_total

    def read_log(self, subjects: Sequence[str] = (), **bounds: Any) -> list[tuple[int, Entry]]:
        return self.store.read_log(subjects, **bounds)

    def cut_log(self, until: float, max_bytes: int) -> int:
        if self.refusing:
            raise StoreError("the disk is full")
        return self.store.cut_log(until, max_bytes)

    def close(self) -> None:
        self.store.close()


def make_scheduler(store: Watched, clock: Clock | None = None) -> Scheduler:
    counter = itertools.count(1)
    return Scheduler(Rules(), store, clock or StillClock(), new_id=lambda: f"{next(counter):x}-{len(store.seen):x}-0-1")


async def pass_time(scheduler: Scheduler, seconds: float) -> None:
    """On a ``StillClock``; then its trees are updated."""
    scheduler.clock.at += seconds  # type: ignore[attr-defined]
    await scheduler.update_all()


def start(jobs: int = 2, pool: str = "p", **options: Any) -> StartOperation:
    return StartOperation({"pool": pool, "tasks": {"t": {"job_count": jobs, "command": "true"}}, **options})
