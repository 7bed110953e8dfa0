"""Checks the canaries of a roll-out, and takes back or advances their stages. Runs in the event loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from cpumond.core.errors import CpumondError
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.rollout import AdvanceStage, Stage, StopStage, Watch, check
from cpumond.scheduler.state import State
from cpumond.scheduler.state.stages import list_counts, warn_of_advance

log = structlog.get_logger("cpumond.scheduler")

ROLLOUT: Final = User("cpumond:rollout", admin=True)
"""User of these changes in the audit log."""

MAX_WHY: Final = 300


class RolloutWatch:
    """``watches``: observations of each canary by the filter of its stage; empty after a take-over."""

    def __init__(
        self, state: State, now: Callable[[], float], execute: Callable[..., Coroutine[Any, Any, object]]
    ) -> None:
        self._state = state
        self._now = now
        self._execute = execute
        self._of: dict[str, float] = {}
        self.watches: dict[str, Watch] = {}

    async def look(self) -> None:
        now = self._now()
        stages = {each.nodes_filter: each for each in self._state.stages.list() if each.state == "canary"}
        for name in self.watches.keys() - stages.keys():
            del self.watches[name], self._of[name]
        for name, stage in stages.items():
            watch = self.watches.get(name)
            if watch is None or self._of[name] != stage.at:
                watch, self._of[name] = Watch(), stage.at
            if watch.at is None or now - watch.at >= stage.budget.check_period_s:
                self.watches[name], verdict = check(stage, list_counts(self._state, stage), watch, now)
                if verdict.action:
                    also = warn_of_advance(self._state, stage) if verdict.action == "advance" else ()
                    await self._act(stage, verdict.action, "; ".join((verdict.why, *also))[:MAX_WHY])

    async def _act(self, stage: Stage, action: str, why: str) -> None:
        kind = StopStage if action == "stop" else AdvanceStage
        try:
            await self._execute(kind(nodes_filter=stage.nodes_filter, why=why, set_at=stage.at), ROLLOUT)
        except CpumondError as error:  # a change came first or the store refused: the next check retries
            log.warning("rollout_not_changed", nodes_filter=stage.nodes_filter, error=str(error))
        else:
            log.info("rollout_changed", nodes_filter=stage.nodes_filter, action=action, why=why)
