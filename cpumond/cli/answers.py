"""Types of the JSON that each command prints with ``--json``; its schema is made from them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cpumond.api import event_views, node_views, pool_views, rollout_views, token_views, views
from cpumond.api.permissions import Can
from cpumond.cli.agent.estimate_findings import EstimateAnswer
from cpumond.cli.agent.init import InitAnswer
from cpumond.cli.agent.service import CheckedConfig
from cpumond.cli.agent.simulate import SimulatedRules
from cpumond.cli.agent.watch import DryRunCheck, DryRunEnd
from cpumond.cli.demo.view import DemoSummary
from cpumond.cli.doctor.checks import Finding
from cpumond.cli.scheduler.cluster import ClusterAnswer
from cpumond.cli.scheduler.cluster_top import ClusterPicture
from cpumond.cli.scheduler.running import WaitedList
from cpumond.core.answers import AddedJob, ExplainAnswer, JobAnswer, RegisteredList, RemovedJob, StatusAnswer
from cpumond.scheduler.answers.drain import DrainPlan
from cpumond.scheduler.answers.idle import IdleReport
from cpumond.scheduler.answers.operation import OperationAnswer
from cpumond.scheduler.answers.plan import ChangePlan
from cpumond.scheduler.history.model import ReportView
from cpumond.scheduler.history.savings import SavingsView
from cpumond.scheduler.history.waste import WasteView
from cpumond.scheduler.model.forecast import Forecast, Simulation
from cpumond.scheduler.settings.rollout import StagePlan


class DoctorAnswer(msgspec.Struct, frozen=True):
    """The findings of ``doctor``, and its exit code."""

    findings: list[Finding]
    exit_code: int


class Refusal(msgspec.Struct, frozen=True):
    """A line of ``top`` when no agent answers."""

    error: str
    exit_code: int


Any_ = dict[str, Any]
"""With ``--all``: name -> value of YTsaurus' dynamic attributes; which names exist depends on the object."""

ANSWERS: Final[dict[str, Any]] = {
    # A tuple: the answer has one of these types, depending on the options of the command.
    "status": StatusAnswer,
    "top": (StatusAnswer, ClusterPicture, Refusal),
    "explain": ExplainAnswer,
    "job add": AddedJob,
    "job list": RegisteredList,
    "job remove": RemovedJob,
    "pin": JobAnswer,
    "unpin": JobAnswer,
    "check-config": CheckedConfig,
    "dry-run": (DryRunCheck, DryRunEnd),
    "estimate": EstimateAnswer,
    "simulate": SimulatedRules,
    "init": InitAnswer,
    "demo": DemoSummary,
    "cluster": ClusterAnswer,
    "doctor": DoctorAnswer,
    "tree list": pool_views.TreeList,
    "tree show": pool_views.TreeView,
    "tree export": pool_views.TreeFile,
    "tree plan": (ChangePlan, Simulation),
    "why": IdleReport,
    "node drain": (views.Done, DrainPlan),
    "pool list": pool_views.PoolList,
    "pool show": (pool_views.PoolView, Any_),
    "pool plan": (ChangePlan, Simulation),
    "operation list": views.OperationList,
    "operation show": (views.OperationDetails, dict[str, Any_]),
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
    "undo": (views.Done, ChangePlan),
    "report": (ReportView, SavingsView, WasteView),
    "fleet": (rollout_views.Fleet, list[rollout_views.TargetGroup]),
    "rollout show": rollout_views.Rollout,
    "rollout set": (views.Done, StagePlan),
    **dict.fromkeys(
        (
            "tree create", "tree set", "tree remove", "pool create", "pool set", "pool move", "pool remove",
            "operation start", "operation set", "operation patch", "operation abort-job",
            "operation abandon-job", "operation abort", "operation suspend", "operation resume",
            "operation complete", "operation pin", "operation unpin", "token revoke", "node cordon", "node uncordon",
            "node tag", "tree apply", "rollout advance", "rollout stop", "rollout remove",
        ),
        views.Done,
    ),
}  # fmt: skip
