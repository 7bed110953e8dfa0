"""Forecasts beside the running scheduler: made again and again in children of it, kept for whoever asks (shell)."""

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
from cpumond.scheduler.answers.ahead import (
    FIRST_RUN_S,
    MOST_RUN_S,
    RunBudget,
    compare,
    send_forecasts,
    when_started,
)
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
"""The attributes of a refusal that is none a moment later."""
MOST_SIMULATIONS: Final = 2
"""At a time; each takes a core of the host at the lowest priority."""
TOO_MANY: Final = f"{MOST_SIMULATIONS} simulations are under way; ask again in a moment"
SIMULATION_S: Final = 120.0
"""After which a simulation is given up."""
TELLS_EACH_S: Final = 5.0
"""Whoever asked hears of a simulation so often, whether it got on or not: a copy has the lowest priority."""


@dataclass(frozen=True, slots=True)
class Question:
    """What if these commands were carried out, one after the other."""

    commands: tuple[Command, ...]
    user: User


class Forecasts:
    """The last forecasts. Used by the event loop's thread. ``pace``: the moment's, see ``forward.Pace``.

    A round begins ``period_s`` after the last one did, later where it takes more than ``max_load`` of one core.
    """

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
        """The moment whose state the last forecasts are of; None before the first."""
        self.calibration = Calibration()
        self.cpu_s = 0.0
        """What all children took."""
        self.runs = self.failures = 0

    def take_if_due(self) -> None:
        """Begin a round, if it is due and none is under way. Called after each update."""
        self._updated.set()
        self._updated.clear()
        if time.monotonic() >= self._due and (self._round is None or self._round.done()):
            self._round = asyncio.ensure_future(self._take())

    async def close(self) -> None:
        """Give up the round that is under way."""
        if self._round is not None:
            self._round.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._round

    async def _take(self) -> None:
        await self._compare_starts()
        state, now, pace, seed = self._state, self._now(), self._pace(), self._seed
        limits = RunBudget(
            self._horizon_s,
            self._period_s * self._max_load,
            FIRST_RUN_S if self.as_of is None else MOST_RUN_S,
        )
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
            self._state.foretold, self.as_of = found, now
            self.runs += next((each.runs for each in found.values()), 0)
        except ChildError as error:
            self.failures += 1
            log.error("forecast_failed", error=str(error))
        finally:
            cpu_s = 0.0 if child is None else child.cpu_s
            self.cpu_s += cpu_s
            self._due = begun + max(self._period_s, cpu_s / self._max_load)

    async def _compare_starts(self) -> None:
        """What was foretold of operations with when they have started since."""
        for number, operation_id in enumerate(list(self.calibration.waiting)):
            record = self._state.record_of(operation_id)
            began = None if record is None else when_started(self._state, record)
            if began is not None or record is None or record.is_finished:
                self.calibration.settle(operation_id, began)
            if not number % 200:
                await asyncio.sleep(0)

    def read(self, operation_id: str) -> Forecast | None:
        """What the last round foretold of a live operation, None where it did not know it."""
        return self._state.foretold.get(operation_id)

    def when(self, record: OperationRecord) -> Forecast:
        """The forecast of an operation. Raises CommandError: it has ended; nothing is foretold of it yet."""
        if record.is_finished:
            raise CommandError(f"operation {record.id} has ended: it is {record.state}")
        now = self._now()
        if excess := find_excess(self._state.operations.get(record.id)):
            line = f"never, as things are: it {describe_cannot_start(excess)}"
            return Forecast(operation_id=record.id, as_of=now, horizon=now, runs=0, lines=[line])
        found = self.read(record.id)
        if found is None:
            raise CommandError(
                f"operation {record.id}: nothing is foretold of it yet, forecasts are made each "
                f"{format_span(self._period_s)} and less often under load; ask again",
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
        """What a question's commands would do; the last one says it. At once there is what the last round says of like
        operations. Raises CommandError: refused as the commands themselves would be; too many simulations."""
        for command in question.commands:
            check(self._state, command, question.user)
        if len(question.commands) == 1:  # later ones build on what the first does
            prepare(self._state, question.commands[0], question.user.name, self._now(), lambda: "asked-for")
        if self._simulations >= MOST_SIMULATIONS:
            raise CommandError(TOO_MANY, RESOLVE, NOT_YET)
        return self._simulate(question, self._first_lines(question))

    async def _simulate(self, question: Question, first: list[str]) -> AsyncIterator[Progress]:
        if self._simulations >= MOST_SIMULATIONS:  # others have begun since this one was let in
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
                async for message in child.messages(TELLS_EACH_S):
                    progress = msgspec.msgpack.decode(message, type=Progress) if message else Progress(progress.done)
                    yield progress
        except (ChildError, TimeoutError) as error:
            self.failures += 1
            yield Progress(1.0, error=str(error) or f"it is not done after {format_span(SIMULATION_S)}")
        finally:
            self._simulations -= 1
            self.cpu_s += 0.0 if child is None else child.cpu_s

    async def _await_update(self) -> None:
        """Until one is just over: the next one, which needs most of the memory, finds its pages copied."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELLS_EACH_S):
                await self._updated.wait()

    def _first_lines(self, question: Question) -> list[str]:
        """What the last round says of operations that wait in the pools that are asked about."""
        if self.as_of is None:
            return ["nothing is foretold yet"]
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
            return [f"forecasts as of {age} ago; what the change does is computed now"]
        if not waiting:
            return [f"as of {age} ago no operation waits in its pool: it would start as soon as there is room"]
        middle = [found.start_p50 for found in waiting if found.start_p50 is not None]
        if not middle:
            return [f"as of {age} ago {len(waiting)} operations wait in its pool, beyond what was looked at"]
        span = format_span(max(max(middle) - self._now(), 0.0))
        return [f"as of {age} ago {len(waiting)} operations wait in its pool; the last of them starts in about {span}"]
