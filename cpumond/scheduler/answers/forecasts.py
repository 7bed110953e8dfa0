"""Forecasts of the running scheduler, computed repeatedly in child processes and kept for callers (shell)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from cpumond.core.measures import format_span
from cpumond.scheduler.access.required import check
from cpumond.scheduler.answers.ahead import FIRST_RUN_S, MOST_RUN_S, RunBudget, compare, send_forecasts, when_started
from cpumond.scheduler.answers.calibration import Calibration
from cpumond.scheduler.answers.causes import describe_cannot_start, find_excess
from cpumond.scheduler.model import RESOLVE, CommandError, OperationRecord
from cpumond.scheduler.model.forecast import Forecast, Progress
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.state import State
from cpumond.scheduler.state.commands import Command, prepare
from cpumond.scheduler.trial.fork import ASKED_NICENESS, Child, ChildError, Send
from cpumond.scheduler.trial.forward import Pace

log = structlog.get_logger("cpumond.scheduler")

NOT_YET: Final = {"try_again": True}
"""Attributes of a refusal after which the caller may soon try again."""
MOST_SIMULATIONS: Final = 2
"""Maximum number of concurrent simulations; each takes a core of the host at the lowest priority."""
TOO_MANY: Final = f"{MOST_SIMULATIONS} simulations are already running; try again in a moment"
SIMULATION_S: Final = 120.0
"""Time after which a simulation is aborted."""
REPORT_PERIOD_S: Final = 5.0
"""Interval of reports to the caller, also of those without progress: a copy runs at the lowest priority."""


@dataclass(frozen=True, slots=True)
class Question:
    """A what-if question: what these commands would do, carried out in order."""

    commands: tuple[Command, ...]
    user: User


class Forecasts:
    """The latest forecasts, used by the event loop's thread. ``pace``: see ``forward.Pace``. A round begins
    ``period_s`` after the previous one, or later if that round took more than ``max_load`` of one core."""

    def __init__(
        self, state: State, now: Callable[[], float], pace: Callable[[], Pace], period_s: float, max_load: float,
        horizon_s: float,
    ) -> None:  # fmt: skip
        self._state, self._now, self._pace = state, now, pace
        self._period_s, self._max_load, self._horizon_s = period_s, max_load, horizon_s
        self._round: asyncio.Task[None] | None = None
        self._due = 0.0
        self._seed = 0
        self._simulations = 0
        self._updated = asyncio.Event()
        self.as_of: float | None = None
        """Moment of the state from which the latest forecasts were made; None before the first round."""
        self.calibration = Calibration()
        self.cpu_s = 0.0
        """CPU seconds that all children have taken so far."""
        self.runs = self.failures = 0

    def take_if_due(self) -> None:
        """Begin a round if it is due and no other is running. Called after each update."""
        self._updated.set()
        self._updated.clear()
        if time.monotonic() >= self._due and (self._round is None or self._round.done()):
            self._round = asyncio.ensure_future(self._take())

    async def close(self) -> None:
        """Cancel the round that is running."""
        if self._round is not None:
            self._round.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._round

    async def _take(self) -> None:
        await self._compare_starts()
        state, now, pace, seed = self._state, self._now(), self._pace(), self._seed
        run_s = FIRST_RUN_S if self.as_of is None else MOST_RUN_S
        limits = RunBudget(self._horizon_s, self._period_s * self._max_load, run_s)
        begun = time.monotonic()
        self._seed += 1
        found: dict[str, Forecast] = {}
        child: Child | None = None
        try:
            child = Child(lambda send: send_forecasts(state, now, pace, limits, seed, send))
            async for message in child.messages():
                for forecast in msgspec.msgpack.decode(message, type=list[Forecast]):
                    found[forecast.operation_id] = self.calibration.correct(forecast)
                await asyncio.sleep(0)
            self._state.forecasts, self.as_of = found, now
            self.runs += next((each.runs for each in found.values()), 0)
        except ChildError as error:
            self.failures += 1
            log.error("forecast_failed", error=str(error))
        finally:
            cpu_s = 0.0 if child is None else child.cpu_s
            self.cpu_s += cpu_s
            self._due = begun + max(self._period_s, cpu_s / self._max_load)

    async def _compare_starts(self) -> None:
        """Compare earlier forecasts with the actual starts of their operations."""
        for number, operation_id in enumerate(list(self.calibration.waiting)):
            record = self._state.record_of(operation_id)
            began = None if record is None else when_started(self._state, record)
            if began is not None or record is None or record.is_finished:
                self.calibration.settle(operation_id, began)
            if not number % 200:
                await asyncio.sleep(0)

    def read(self, operation_id: str) -> Forecast | None:
        """Return the last round's forecast of a live operation; None if that round did not know this operation."""
        return self._state.forecasts.get(operation_id)

    def when(self, record: OperationRecord) -> Forecast:
        """Return the forecast of an operation. Raises CommandError if it has ended or has no forecast yet."""
        if record.is_finished:
            raise CommandError(f"operation {record.id} has ended: it is {record.state}")
        now = self._now()
        if excess := find_excess(self._state.operations.get(record.id)):
            line = f"never, unless something changes: it {describe_cannot_start(excess)}"
            return Forecast(operation_id=record.id, as_of=now, horizon=now, runs=0, lines=[line])
        found = self.read(record.id)
        if found is None:
            raise CommandError(
                f"operation {record.id} has no forecast yet: forecasts are made every "
                f"{format_span(self._period_s)}, less often under load; try again later",
                RESOLVE,
                NOT_YET,
            )
        started_at = when_started(self._state, record)
        if found.started_at is not None:
            return found
        if started_at is None:
            return msgspec.structs.replace(found, lines=[*found.lines, *self.calibration.describe()])
        return msgspec.structs.replace(found, started_at=started_at, start_p10=None, start_p50=None, start_p90=None)

    async def simulate(self, question: Question) -> AsyncIterator[Progress]:
        """Yield the progress of a simulation of a question's commands. The first item has the last round's forecasts of
        similar operations, the last item the result. Raises CommandError if a command is refused or too many
        simulations run."""
        for command in question.commands:
            check(self._state, command, question.user)
        if len(question.commands) == 1:  # of several commands, the later ones depend on the first
            prepare(self._state, question.commands[0], question.user.name, self._now(), lambda: "asked-for")
        if self._simulations >= MOST_SIMULATIONS:
            raise CommandError(TOO_MANY, RESOLVE, NOT_YET)
        return self._simulate(question, self._first_lines(question))

    async def _simulate(self, question: Question, first: list[str]) -> AsyncIterator[Progress]:
        if self._simulations >= MOST_SIMULATIONS:  # others may have begun since the check in simulate
            yield Progress(1.0, error=TOO_MANY)
            return

        def work(send: Send) -> None:
            def send_progress(part: float) -> None:
                send(msgspec.msgpack.encode(Progress(part)))

            try:
                answer = compare(state, now, pace, horizon_s, question.commands, question.user.name, send_progress)
                send(msgspec.msgpack.encode(Progress(1.0, answer=answer)))
            except CommandError as error:
                send(msgspec.msgpack.encode(Progress(1.0, error=str(error))))

        self._simulations += 1
        child: Child | None = None
        progress = Progress(0.0, first)
        try:
            yield progress
            await self._await_update()
            state, now, pace, horizon_s = self._state, self._now(), self._pace(), self._horizon_s
            child = Child(work, ASKED_NICENESS)
            async with asyncio.timeout(SIMULATION_S):
                async for message in child.messages(REPORT_PERIOD_S):
                    progress = msgspec.msgpack.decode(message, type=Progress) if message else Progress(progress.done)
                    yield progress
        except (ChildError, TimeoutError) as error:
            self.failures += 1
            yield Progress(1.0, error=str(error) or f"the simulation was given up after {format_span(SIMULATION_S)}")
        finally:
            self._simulations -= 1
            self.cpu_s += 0.0 if child is None else child.cpu_s

    async def _await_update(self) -> None:
        """Wait until an update just ended. Updates use most of the memory: the next one then finds pages copied."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_PERIOD_S):
                await self._updated.wait()

    def _first_lines(self, question: Question) -> list[str]:
        """Return the last round's forecasts of operations that wait in the pools that the question is about."""
        if self.as_of is None:
            return ["there are no forecasts yet"]
        age = format_span(max(self._now() - self.as_of, 0.0))
        pools = {
            (name, options.pool)
            for command in question.commands
            if isinstance(command, StartOperation)
            for record in prepare(self._state, command, question.user.name, self._now(), lambda: "asked-for").operations
            for name, options in record.trees.items()
        }
        waiting = [
            found
            for name, pool in pools
            for element in self._state.trees[name].operations.values()
            if element.parent is not None and element.parent.name == pool
            and (found := self.read(element.name)) is not None and found.started_at is None
        ]  # fmt: skip
        if not pools:
            return [f"forecasts as of {age} ago; the effect of the change is being computed"]
        if not waiting:
            return [f"as of {age} ago no operation waits in its pool: it would start as soon as it fits"]
        middle = [found.start_p50 for found in waiting if found.start_p50 is not None]
        if not middle:
            return [f"as of {age} ago {len(waiting)} operations wait in its pool, longer than was simulated"]
        span = format_span(max(max(middle) - self._now(), 0.0))
        return [f"as of {age} ago {len(waiting)} operations wait in its pool; the last of them starts in about {span}"]
