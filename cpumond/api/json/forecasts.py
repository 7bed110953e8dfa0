"""Requests for forecasts: when an operation will start, and which effects a change will have over time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec
from starlette.responses import StreamingResponse

from cpumond.api.json import requests
from cpumond.api.json.call import Call
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.forecasts import Forecasts, Question
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.model.forecast import Forecast, Progress, Simulation
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.state.node_commands import CordonNode, DrainNode

FORETOLD: Final = "foretold-"
"""Prefix of the ids of operations that exist only in a simulation."""


async def forecast_operation(call: Call) -> Forecast:
    record = call.find_operation()
    return _forecasts_of(call.scheduler).when(record)


async def simulate(call: Call) -> StreamingResponse:
    question = Question(_commands_of(call.body), call.user)
    found = await _forecasts_of(call.scheduler).simulate(question)
    return StreamingResponse(_encode_progress(found, call), media_type=requests.NDJSON)


async def _encode_progress(found: AsyncIterator[Progress], call: Call) -> AsyncIterator[bytes]:
    async for progress in found:
        told = progress
        if told.answer is not None:
            told = msgspec.structs.replace(told, answer=hide_unreadable(told.answer, call.rights))
        yield msgspec.json.encode(told) + b"\n"


def _forecasts_of(scheduler: Scheduler) -> Forecasts:
    if scheduler.forecasts is None:
        raise CommandError("no forecasts are made here: [forecast] enabled is false in the scheduler's configuration")
    return scheduler.forecasts


def _commands_of(body: requests.SimulateBody) -> tuple[Command, ...]:
    """Return the commands to simulate. Raises CommandError."""
    given = [name for name in ("spec", "command", "node") if getattr(body, name) is not None]
    if len(given) != 1:
        raise CommandError(f"expected one of spec, command and node, got {' and '.join(given) or 'none of them'}")
    if body.spec is not None:
        return (StartOperation(body.spec),)
    if body.command is not None:
        return (body.command,)
    assert body.node is not None
    return (DrainNode(body.node) if body.drain else CordonNode(body.node),)


def hide_unreadable(found: Simulation, rights: Rights) -> Simulation:
    """Return a simulation with the number of operations that the user may not read, instead of these operations."""

    def may_read(operation_id: str) -> bool:
        if not operation_id or operation_id.startswith(FORETOLD) or rights.user.admin:
            return True
        # An operation that is no longer known is hidden, because it may have belonged to any user.
        record = rights.state.record_of(operation_id)
        return record is not None and rights.may_read(record)

    starts = [each for each in found.starts if may_read(each.operation_id)]
    stops = [
        each
        if may_read(each.operation_id) and may_read(each.for_operation_id)
        else msgspec.structs.replace(each, operation_id="", job_id="", why="", for_operation_id="")
        for each in found.stops
    ]
    left_out = found.left_out + len(found.starts) - len(starts)
    return msgspec.structs.replace(found, starts=starts, stops=stops, left_out=left_out)
