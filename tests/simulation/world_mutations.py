"""Mistakes made on purpose: each must be found by some seeds, or the simulation sees nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from unittest import mock

from simulation.database import SimStore

from cpumond.core.route import Terms
from cpumond.scheduler import service
from cpumond.scheduler.decide import starvation
from cpumond.scheduler.elements import Job
from cpumond.scheduler.model import OperationRecord
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.state import State, blame, changes, dispatch, gangs, install, lifecycle, retries
from cpumond.scheduler.store import Change, Entry, StoreError
from cpumond.scheduler.store.entries import LogEnd, Row
from cpumond.scheduler.store.lead import Lead

if TYPE_CHECKING:
    from simulation.world import World

Mutation = Callable[["World"], AbstractContextManager[Any]]


@contextlib.contextmanager
def drop_the_fence(world: World) -> Iterator[None]:
    """Writes do not check their term, and a write of a lower one is not seen as such: only what it does."""
    world.database.checks_fence = world.ledger.sees_terms = False
    with lead_for_ever():
        yield


def lead_for_ever() -> AbstractContextManager[Any]:
    return mock.patch.object(Lead, "may_answer", lambda self, term, _: self.is_own and self.term == term)


def acknowledge_before_the_write(_: World) -> AbstractContextManager[Any]:
    """Changes are applied, and commands answered, while they are being written."""
    write = Scheduler._write

    async def begin(self: Scheduler, *facts: Any) -> None:
        task = asyncio.ensure_future(write(self, *facts))
        task.add_done_callback(lambda done: done.exception())

    return mock.patch.object(Scheduler, "_write", begin)


def start_without_asking(_: World) -> AbstractContextManager[Any]:
    """Starts of jobs are not stored before an answer has them."""
    start = lifecycle.start

    def start_now(state: State, job: Job) -> None:
        job.is_stored = True
        start(state, job)

    return mock.patch.object(lifecycle, "start", start_now)


@contextlib.contextmanager
def forget_stops(_: World) -> Iterator[None]:
    """That a job was told to stop is not stored with its replacement."""
    stop = lifecycle.stop

    def stop_only(state: State, job: Job, *facts: Any, **more: Any) -> None:
        stop(state, job, *facts, **more)
        state.unstored_stops.clear()

    with mock.patch.object(lifecycle, "stop", stop_only), mock.patch.object(service, "list_stops_of", return_value=[]):
        yield


@contextlib.contextmanager
def take_any_term(world: World) -> Iterator[None]:
    """Agents and users take answers of lower terms, from leaders that do not look at their clock."""
    world.ledger.sees_terms = False
    with mock.patch.object(Terms, "accept", return_value=True), lead_for_ever():
        yield


def guess_the_outcome(_: World) -> AbstractContextManager[Any]:
    """A write whose outcome is not known counts as refused, and the reign goes on."""

    def refuse(self: SimStore) -> None:
        self._session = None
        raise StoreError("the connection was lost")

    return mock.patch.object(SimStore, "_give_up", refuse)


def log_later(_: World) -> AbstractContextManager[Any]:
    """Entries of the log are written after what they tell of, in a write of their own."""
    write = Scheduler._write

    async def write_twice(
        self: Scheduler, changes: Sequence[Change], entries: Sequence[Entry] = (), aborts_jobs_of: str = ""
    ) -> None:
        await write(self, changes, (), aborts_jobs_of)
        if changes and entries:
            with contextlib.suppress(StoreError):
                await write(self, [], entries)

    return mock.patch.object(Scheduler, "_write", write_twice)


def number_at_the_database(world: World) -> AbstractContextManager[Any]:
    """Numbers of entries are given when they are written, so that a repeated write adds them again."""
    log = world.database.log
    add = log.add

    def add_anew(rows: Sequence[Row]) -> None:
        add(log.make([Entry(row.at, row.subjects, row.value) for row in rows]))

    return mock.patch.object(log, "add", add_anew)


@contextlib.contextmanager
def forget_vaults(_: World) -> Iterator[None]:
    """A scheduler that takes over does not read the vaults, and takes operations for such without secrets."""
    load, open_vault = SimStore.load, dispatch.open_vault

    def open_known(state: State, record: OperationRecord) -> dict[str, str] | None:
        return open_vault(state, record) if record.id in state.vaults else {}

    with (
        mock.patch.object(SimStore, "load", lambda self: [each for each in load(self) if each[0] != "vault"]),
        mock.patch.object(install, "open_vault", open_known),
        mock.patch.object(dispatch, "open_vault", open_known),
    ):
        yield


MUTATIONS: dict[str, Mutation] = {
    "fence": drop_the_fence,
    # A leader answers and writes after its lease has ended by its own clock, until it is told.
    "clock": lambda _: lead_for_ever(),
    "acknowledge": acknowledge_before_the_write,
    "start": start_without_asking,
    "stop": forget_stops,
    "term": take_any_term,
    "outcome": guess_the_outcome,
    "later": log_later,
    "numbers": number_at_the_database,
    # A leader does not look which entries of the log are there, and counts from one.
    "count": lambda _: mock.patch.object(SimStore, "_find_end", lambda self: self._end or LogEnd()),
    # A job is ordered while the one whose place it has, or the incarnation before, still ends.
    "hold": lambda _: mock.patch.object(lifecycle, "is_held", return_value=False),
    "vault": forget_vaults,
    # Failures count at once, also where all of them are on one node.
    "blame": lambda _: mock.patch.object(blame, "find_blamed", return_value=frozenset()),
    # A scheduler that takes over does not look which jobs wait to be started again.
    "waits": lambda _: mock.patch.object(changes, "retries", mock.Mock()),
    # Memory grows whatever pools and nodes allow.
    "bound": lambda _: mock.patch.object(retries, "_find_bound", return_value=(1e18, "")),
    # Nobody takes protected jobs for a strong guarantee.
    "claim": lambda _: mock.patch.object(starvation, "may_claim", return_value=False),
    # A gang whose room others use meanwhile waits for their ends.
    "backfill": lambda _: mock.patch.object(gangs, "_takes_back", return_value=False),
}
"""By the name with which ``python -m simulation --mutate`` makes one."""
