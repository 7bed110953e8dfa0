"""The requests about agents and the stages of a roll-out: their bodies, and their rows in the table of endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from cpumond.api import rollout_views, views
from cpumond.scheduler.model import Why
from cpumond.scheduler.settings.rollout import Budget, CanaryPeriod, NodesFilterText, Ratio, StageLevel, StagePlan

PREFIX: Final = "/api/v1"
_ROLLOUT: Final = PREFIX + "/rollout"


MAX_FILTER_CHARS: Final = 2000
"""Of a formula that anybody may ask about: it is read in the event loop. Stages of longer ones may be there already."""


class StageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes of a stage: those that a formula of tags fits, as in ``nodes_filter`` of a tree; "" for all."""

    nodes_filter: NodesFilterText
    why: Why = ""


class SetStageBody(StageBody, frozen=True, kw_only=True):
    """What the nodes may do at most, see ``SetStage``. ``canary_ratio``: the share that goes first, 1 for all at once;
    ``canary_period_s``: after so long within the budget all others follow by themselves, null for by hand alone."""

    nodes_filter: Annotated[str, msgspec.Meta(max_length=MAX_FILTER_CHARS)]
    level: StageLevel
    canary_ratio: Ratio = 0.1
    canary_period_s: CanaryPeriod | None = None
    budget: Budget = Budget()


class TargetsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``loopback=true``: also agents that listen for their own host alone, where Prometheus is on it."""

    loopback: Literal["", "true", "false"] = ""


ROWS: Final[tuple[dict[str, Any], ...]] = (
    {"method": "GET", "path": PREFIX + "/fleet", "name": "get_fleet", "summary": "The agents of all nodes",
     "answer": rollout_views.Fleet},
    {"method": "GET", "path": PREFIX + "/prometheus/targets", "name": "list_targets",
     "summary": "Where Prometheus scrapes the agents (http_sd)", "answer": list[rollout_views.TargetGroup],
     "query": TargetsQuery},
    {"method": "GET", "path": _ROLLOUT, "name": "get_rollout", "summary": "The stages of the roll-out",
     "answer": rollout_views.Rollout},
    {"method": "POST", "path": _ROLLOUT + "/plan", "name": "plan_stage", "summary": "What a stage would change",
     "answer": StagePlan, "body": SetStageBody},
    {"method": "POST", "path": _ROLLOUT, "name": "set_stage", "summary": "Set what a group of nodes may do to limits",
     "answer": views.Done, "body": SetStageBody, "refusals": (409,)},
    *(
        {"method": "POST", "path": f"{_ROLLOUT}/{verb}", "name": f"{verb}_stage", "summary": summary,
         "answer": views.Done, "body": StageBody, "refusals": (404, 409)}
        for verb, summary in (
            ("advance", "From its canary to all nodes of the group"),
            ("stop", "Give the nodes of a stage back what was before"),
            ("remove", "Forget a stage: its nodes do what other stages say, without one nothing to limits"),
        )
    ),
)  # fmt: skip
