"""What requests about agents and the stages of a roll-out do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cpumond.api import rollout_views
from cpumond.api.json.call import Call
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.rollout import (
    EVERY_NODE,
    AdvanceStage,
    RemoveStage,
    RolloutCommand,
    SetStage,
    StagePlan,
    StopStage,
    make_stage,
    plan_stage,
)
from cpumond.scheduler.state.stages import list_hosts


def _read_stage(call: Call) -> SetStage:
    body = call.body
    return SetStage(
        nodes_filter=body.nodes_filter.strip() or EVERY_NODE,
        why=body.why,
        level=body.level,
        canary_ratio=body.canary_ratio,
        canary_period_s=body.canary_period_s,
        budget=body.budget,
    )


COMMANDS: Final[dict[str, Callable[[object, Call], RolloutCommand]]] = {
    "set_stage": lambda _, c: _read_stage(c),
    "advance_stage": lambda _, c: AdvanceStage(nodes_filter=c.body.nodes_filter, why=c.body.why),
    "stop_stage": lambda _, c: StopStage(nodes_filter=c.body.nodes_filter, why=c.body.why),
    "remove_stage": lambda _, c: RemoveStage(nodes_filter=c.body.nodes_filter, why=c.body.why),
}
"""Endpoints that carry out one command."""


class RolloutHandlers:
    """A part of ``JsonApi``."""

    scheduler: Scheduler

    async def get_fleet(self, _: Call) -> rollout_views.Fleet:
        return rollout_views.show_fleet(self.scheduler.state)

    async def get_rollout(self, _: Call) -> rollout_views.Rollout:
        return rollout_views.show_rollout(self.scheduler.state, self.scheduler.rollout.watches)

    async def list_targets(self, call: Call) -> list[rollout_views.TargetGroup]:
        return rollout_views.show_targets(self.scheduler.state, call.query.loopback == "true")

    async def plan_stage(self, call: Call) -> StagePlan:
        """Computed with what the command itself would set. Raises CommandError."""
        state, command = self.scheduler.state, _read_stage(call)
        hosts = list_hosts(state, command.nodes_filter)
        before = state.stages.get(command.nodes_filter)
        return plan_stage(make_stage(command, before, hosts, call.user.name, self.scheduler.clock.now()), hosts)
