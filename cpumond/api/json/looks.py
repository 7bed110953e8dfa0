"""Survey of all operations, made in parts between heartbeats: why they wait, their numbers, and possible alerts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cpumond.api.glance_views import OperationCounts
from cpumond.api.json.kept import Kept
from cpumond.api.json.parts import in_parts
from cpumond.scheduler.answers.causes import Causes
from cpumond.scheduler.elements import Operation
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.state import State


@dataclass(frozen=True, slots=True)
class Look:
    """Result of a survey of all operations. ``doubtful``: the few live operations about which there may be an alert."""

    causes: Mapping[str, Causes]
    counts: OperationCounts
    doubtful: list[Operation]


class Looks:
    """The last survey, shared by all requests, and kept for a while."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kept = Kept[None, Look](scheduler.clock.now)

    async def last(self) -> Look:
        return await self._kept.get(None, lambda: _look(self._scheduler.state))


async def _look(state: State) -> Look:
    causes = {name: Causes(tree) for name, tree in state.trees.items()}
    counts, doubtful = OperationCounts(state, causes), set[Operation]()
    async for operations in in_parts(list(state.operations.values())):
        counts.add([each.record for each in operations])
        doubtful.update([each for each in operations if each.lacks_secrets or each.stuck is not None])
    async for records in in_parts(list(state.finished.values())):
        counts.add(records)
    for each in causes.values():
        doubtful.update(each.doubtful)
    return Look(causes, counts, sorted(doubtful, key=lambda each: each.record.sequence))
