"""The type of what each command prints with ``--json``: the schema that it keeps to."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cpumond.api import event_views, node_views, pool_views, token_views, views
from cpumond.api.permissions import Can
from cpumond.cli.scheduler.cluster_top import ClusterPicture
from cpumond.cli.scheduler.running import WaitedList
from cpumond.core.answers import AddedJob, ExplainAnswer, JobAnswer, RegisteredList, StatusAnswer
from cpumond.scheduler.forecast.model import Forecast, Simulation
from cpumond.scheduler.history.model import ReportView
from cpumond.scheduler.why.drain import DrainPlan
from cpumond.scheduler.why.idle import IdleReport
from cpumond.scheduler.why.operation import OperationAnswer
from cpumond.scheduler.why.plan import Plan


class Finding(msgspec.Struct, frozen=True):
    """One thing that ``doctor`` looked at; ``level``: ok, warn or fail."""

    level: str
    check: str
    text: str


class Findings(msgspec.Struct, frozen=True):
    """What ``doctor`` found, and what it ends with."""

    findings: list[Finding]
    exit_code: int


class Refusal(msgspec.Struct, frozen=True):
    """A line of ``top`` where no agent answers."""

    error: str
    exit_code: int


Any_ = dict[str, Any]
"""A dictionary whose keys are those of the configuration, of attributes, or of what was found on a host."""

ANSWERS: Final[dict[str, Any]] = {
    # A tuple: one of these, by the options of the command.
    "status": StatusAnswer,
    "top": (StatusAnswer, ClusterPicture, Refusal),
    "explain": ExplainAnswer,
    "job add": AddedJob,
    "job list": RegisteredList,
    "job remove": Any_,
    "pin": JobAnswer,
    "unpin": JobAnswer,
    "check-config": Any_,
    "dry-run": Any_,
    "estimate": Any_,
    "simulate": Any_,
    "init": Any_,
    "demo": Any_,
    "cluster": Any_,
    "doctor": Findings,
    "tree list": pool_views.TreeList,
    "tree show": pool_views.TreeView,
    "tree export": pool_views.TreeFile,
    "tree plan": (Plan, Simulation),
    "why": IdleReport,
    "node drain": (views.Done, DrainPlan),
    "pool list": pool_views.PoolList,
    "pool show": (pool_views.PoolView, Any_),
    "pool plan": (Plan, Simulation),
    "operation list": views.OperationList,
    "operation show": (views.OperationDetails, Any_),
    "operation jobs": views.JobList,
    "operation explain": ExplainAnswer,
    "operation why": OperationAnswer,
    "operation wait": WaitedList,
    "operation when": Forecast,
    "operation simulate": Simulation,
    "node list": node_views.NodeList,
    "node show": node_views.NodeDetails,
    "can": Can,
    "token list": token_views.TokenList,
    "token create": token_views.NewToken,
    "events": event_views.EventView,
    "audit": event_views.AuditView,
    "undo": (views.Done, Plan),
    "report": ReportView,
    **dict.fromkeys(
        (
            "tree create", "tree set", "tree remove", "pool create", "pool set", "pool move", "pool remove",
            "operation start", "operation set", "operation abort", "operation suspend", "operation resume",
            "operation complete", "operation pin", "operation unpin", "token revoke", "node cordon", "node uncordon",
            "tree apply",
        ),
        views.Done,
    ),
}  # fmt: skip
