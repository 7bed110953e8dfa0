"""The table of the JSON API: every route with what goes in and out.

``routes`` serves exactly what stands here, and ``document`` describes it, so that the two cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from cpumond.api import event_views, finding, node_views, overview, permissions, pool_views, tables, views
from cpumond.api.json import glance_table
from cpumond.api.json.requests import (
    NDJSON,
    TEXT,
    TOTAL_BYTES,
    AbortBody,
    ApplyBody,
    CanQuery,
    CreatePoolBody,
    CreateTreeBody,
    DefaultTreeBody,
    DrainBody,
    EditsBody,
    EventsQuery,
    FindQuery,
    HistoryQuery,
    IdleQuery,
    JobsQuery,
    LogQuery,
    MoveBody,
    NodesQuery,
    OperationsQuery,
    ParametersBody,
    PinBody,
    PlanQuery,
    PreemptionsQuery,
    Query,
    RemoveQuery,
    ReportQuery,
    SavingsQuery,
    SimulateBody,
    StartBody,
    SuspendBody,
    TokenBody,
    TransferBody,
    WhyBody,
)
from cpumond.api.json.rollout_table import ROWS
from cpumond.api.session import Session
from cpumond.api.token_views import NewToken, TokenList
from cpumond.core.wire import (
    HeartbeatAnswer,
    JobLog,
    JobReply,
    NodeHeartbeat,
    NodeRegistration,
    RegistrationAnswer,
)
from cpumond.scheduler.history.model import HistoryView, ReportView
from cpumond.scheduler.history.savings import SavingsView
from cpumond.scheduler.model.forecast import Forecast, Progress
from cpumond.scheduler.settings.commands import ConfigCommand
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.undo import UndoChange
from cpumond.scheduler.why.drain import DrainPlan
from cpumond.scheduler.why.idle import IdleReport
from cpumond.scheduler.why.operation import OperationAnswer
from cpumond.scheduler.why.plan import Plan

PREFIX: Final = "/api/v1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One request that is answered. ``name`` is that of the function in ``handlers`` and the document's operationId.

    ``answer`` is the type of a good answer, given with ``status``; ``others`` are further answers by status.
    ``needs_body``: a body must be there. ``is_public``: no authentication. Requests ``is_of_nodes`` count for no
    user's rate.
    """

    method: str
    path: str
    name: str
    summary: str
    answer: Any
    body: Any = None
    query: type[Query] | None = None
    status: int = 200
    refusals: tuple[int, ...] = ()
    others: dict[int, Any] = field(default_factory=dict)
    needs_body: bool = True
    is_public: bool = False
    has_etag: bool = False
    """Whether a good answer has an ETag; a request that has it in If-None-Match gets 304 without a body."""
    content_type: str = "application/json"
    """Of a good answer; all others are JSON."""

    @property
    def is_change(self) -> bool:
        return self.method != "GET"

    @property
    def is_of_nodes(self) -> bool:
        """Whether it is for agents."""
        return self.body in (NodeHeartbeat, NodeRegistration, JobLog, JobReply)

    @property
    def statuses(self) -> dict[int, Any]:
        """All statuses that it may answer with, and the type of the body of each."""
        known = {self.status: self.answer, **self.others}
        found = set(self.refusals)
        if not self.is_public:
            found |= {401, 403, 500}
        if self.body is not None:
            found |= {400, 413, 422}
        if "{" in self.path:
            found |= {404, 422}
        if self.query is not None:
            found |= {422}
        if self.is_change and not self.is_public:
            found |= {503}
        return {**known, **dict.fromkeys(sorted(found - set(known)), views.Failure)}


_TREE: Final = PREFIX + "/trees/{tree}"
_POOL: Final = _TREE + "/pools/{pool}"
_OPERATION: Final = PREFIX + "/operations/{operation}"
_NODE: Final = PREFIX + "/nodes/{node}"
_ASK_NODE: Final = (404, 429, 503, 504)
"""Refusals of endpoints that wait for a node, or for the disk of the history."""


def _command(
    method: str, path: str, name: str, summary: str, body: Any = None, refusals: tuple[int, ...] = (409,), **more: Any
) -> Endpoint:
    return Endpoint(method, path, name, summary, views.Done, body, refusals=refusals, **more)


ENDPOINTS: Final = (
    Endpoint("GET", PREFIX + "/trees", "list_trees", "All pool trees", pool_views.TreeList),
    _command("POST", PREFIX + "/trees", "create_tree", "Make a pool tree", CreateTreeBody, status=201),
    Endpoint("GET", _TREE, "get_tree", "One pool tree", pool_views.TreeView),
    _command("PATCH", _TREE, "change_tree", "Change a tree's options", EditsBody),
    _command("DELETE", _TREE, "remove_tree", "Remove a tree", query=RemoveQuery),
    _command("PUT", PREFIX + "/default_tree", "set_default_tree", "Choose the default tree", DefaultTreeBody, (404,)),
    Endpoint("GET", _TREE + "/file", "get_tree_file", "All that is set of a tree and its pools", pool_views.TreeFile),
    _command("POST", _TREE + "/apply", "apply_tree", "Make a tree and its pools what a file says", ApplyBody),
    Endpoint("GET", _TREE + "/pools", "list_pools", "All pools of a tree", pool_views.PoolList),
    Endpoint(
        "GET", _TREE + "/pool_table", "get_pool_table", "All pools of a tree in short; made once for each update",
        tables.PoolTable, has_etag=True,
    ),
    _command("POST", _TREE + "/pools", "create_pool", "Make a pool", CreatePoolBody, status=201),
    Endpoint(
        "GET", _TREE + "/rights", "list_rights", "What the asker may do to each pool of a tree", permissions.PoolRights
    ),
    Endpoint(
        "GET", _TREE + "/why", "explain_idle", "Why CPU stands idle while work waits, and what to change", IdleReport,
        query=IdleQuery,
    ),
    Endpoint("GET", _POOL, "get_pool", "One pool, <Root> for the root", pool_views.PoolView),
    Endpoint(
        "GET", _POOL + "/orchid", "get_pool_orchid", "All that the scheduler computes of it, by YTsaurus' names",
        dict[str, Any],
    ),
    _command("PATCH", _POOL, "change_pool", "Change a pool's attributes", EditsBody),
    _command("DELETE", _POOL, "remove_pool", "Remove a pool", query=RemoveQuery),
    _command("POST", _POOL + "/move", "move_pool", "Move or rename a pool", MoveBody),
    _command(
        "POST", _POOL + "/transfer", "transfer_resources", "Give guarantees and counts of a pool to another",
        TransferBody,
    ),
    Endpoint(
        "POST", PREFIX + "/plan", "make_plan", "What a change would do to everybody's shares; nothing is changed",
        Plan, ConfigCommand | ApplyTree | UndoChange, PlanQuery,
    ),
    Endpoint(
        "GET", PREFIX + "/events", "list_events", "What happened, the newest first", event_views.EventList,
        query=EventsQuery, refusals=(404,),
    ),
    Endpoint(
        "GET", PREFIX + "/audit", "list_audit",
        "Who did what, the newest first: all of it for administrators, for others what is their own or of their pools",
        event_views.AuditList, query=EventsQuery, refusals=(404,),
    ),
    Endpoint(
        "GET", PREFIX + "/annotations", "list_annotations", "What happened, as Grafana reads it",
        list[event_views.Annotation], query=EventsQuery, refusals=(404,),
    ),
    _command(
        "POST", PREFIX + "/events/{number}/undo", "undo_change", "Take back what an event changed in trees and pools"
    ),
    Endpoint(
        "GET", PREFIX + "/operations", "list_operations", "Operations, the newest first if not sorted otherwise",
        views.OperationList, query=OperationsQuery,
    ),
    _command(
        "POST", PREFIX + "/operations", "start_operation", "Start an operation", StartBody, (404, 409), status=201
    ),
    Endpoint("GET", _OPERATION, "get_operation", "One operation, by id or *alias", views.OperationDetails),
    _command("PATCH", _OPERATION, "update_operation", "Change the parameters of an operation", ParametersBody),
    Endpoint("GET", _OPERATION + "/when", "foretell_operation", "When an operation starts and ends", Forecast),
    Endpoint(
        "POST", PREFIX + "/simulate", "simulate",
        "What would start when, who would be stopped, whose share would move; a line of JSON now and then, at last the "
        "answer", Progress, SimulateBody, content_type=NDJSON,
    ),
    Endpoint("GET", _OPERATION + "/why", "explain_operation", "Why an operation has what it has", OperationAnswer),
    Endpoint(
        "GET", _OPERATION + "/specification", "get_specification", "What an operation was given, and all that holds",
        views.Specification,
    ),
    Endpoint(
        "GET", _OPERATION + "/orchid", "get_operation_orchid", "All that the scheduler computes of it, by tree",
        dict[str, dict[str, Any]],
    ),
    Endpoint("GET", _OPERATION + "/jobs", "list_jobs", "Jobs of an operation", views.JobList, query=JobsQuery),
    Endpoint("GET", _OPERATION + "/jobs/{job}", "get_job", "One job", views.JobView),
    Endpoint(
        "GET", _OPERATION + "/jobs/{job}/log", "get_job_log",
        f"The end of what a job wrote, byte by byte; header {TOTAL_BYTES}: how much it wrote in all",
        str, query=LogQuery, refusals=_ASK_NODE, content_type=TEXT,
    ),
    Endpoint(
        "GET", _OPERATION + "/jobs/{job}/explain", "explain_job", "Why a job's limit is what it is, told by its node",
        dict[str, Any], refusals=_ASK_NODE,
    ),
    _command(
        "POST", _OPERATION + "/jobs/{job}/pin", "pin_job", "Hold a job's limit; on its node's disk when answered",
        PinBody, _ASK_NODE, needs_body=False,
    ),
    _command(
        "POST", _OPERATION + "/jobs/{job}/unpin", "unpin_job", "Give a job's limit back to its monitor",
        refusals=_ASK_NODE,
    ),
    _command(
        "POST", _OPERATION + "/abort", "abort_operation", "Stop an operation and its jobs", AbortBody, needs_body=False
    ),
    _command(
        "POST", _OPERATION + "/suspend", "suspend_operation", "Start no more jobs of it", SuspendBody, needs_body=False
    ),
    _command("POST", _OPERATION + "/resume", "resume_operation", "Take back a suspension"),
    _command("POST", _OPERATION + "/complete", "complete_operation", "End it as completed"),
    Endpoint("GET", PREFIX + "/nodes", "list_nodes", "Nodes by id", node_views.NodeList, query=NodesQuery),
    Endpoint(
        "POST", PREFIX + "/nodes", "register_node", "A node makes itself known", RegistrationAnswer, NodeRegistration
    ),
    Endpoint("GET", _NODE, "get_node", "One node with its jobs", node_views.NodeDetails),
    _command("POST", _NODE + "/cordon", "cordon_node", "Start no more jobs on it", WhyBody, needs_body=False),
    _command("POST", _NODE + "/uncordon", "uncordon_node", "Start jobs on it again", WhyBody, needs_body=False),
    _command(
        "POST", _NODE + "/drain", "drain_node", "Start no more jobs on it, and those that it has elsewhere", DrainBody,
        needs_body=False,
    ),
    Endpoint("GET", _NODE + "/drain", "plan_drain", "What a drain would stop, and where there is room", DrainPlan),
    *(Endpoint(**row) for row in (*ROWS, *glance_table.ROWS)),
    Endpoint(
        "POST", PREFIX + "/heartbeats", "heartbeat", "The state of a node; 409: it must register again",
        HeartbeatAnswer, NodeHeartbeat, others={409: HeartbeatAnswer},
    ),
    Endpoint(
        "POST", PREFIX + "/logs", "take_job_log", "A log that the answer to a heartbeat asked for", views.Taken, JobLog,
    ),
    Endpoint(
        "POST", PREFIX + "/replies", "take_job_reply", "The reply to a request in the answer to a heartbeat",
        views.Taken, JobReply,
    ),
    Endpoint(
        "GET", PREFIX + "/preemptions", "list_preemptions", "Preemptions, the newest first", node_views.PreemptionList,
        query=PreemptionsQuery,
    ),
    Endpoint(
        "GET", PREFIX + "/history", "read_history", "What was when, of a pool, operation, node or job", HistoryView,
        query=HistoryQuery, refusals=_ASK_NODE,
    ),
    Endpoint(
        "GET", PREFIX + "/report", "make_report", "What pools and operations came to, in core-hours", ReportView,
        query=ReportQuery, refusals=_ASK_NODE,
    ),
    Endpoint(
        "GET", PREFIX + "/savings", "make_savings", "What reclaimed CPU was worth and cost, by week", SavingsView,
        query=SavingsQuery, refusals=_ASK_NODE,
    ),
    Endpoint("GET", PREFIX + "/alerts", "list_alerts", "What needs an operator", overview.AlertList),
    Endpoint("GET", PREFIX + "/status", "get_status", "The scheduler at a glance", overview.Status),
    Endpoint("GET", PREFIX + "/tokens", "list_tokens", "Tokens: the own, of an administrator all", TokenList),
    Endpoint(
        "POST", PREFIX + "/tokens", "create_token", "Make a token; it is told once", NewToken, TokenBody, status=201,
        needs_body=False,
    ),
    Endpoint(
        "DELETE", PREFIX + "/tokens/{token}", "revoke_token", "Refuse a token from now on, by its id", views.Done,
    ),
    Endpoint(
        "POST", PREFIX + "/session", "sign_in", "Begin a browser's session with the token that is shown", Session,
        refusals=(422,),
    ),
    Endpoint(
        "DELETE", PREFIX + "/session", "sign_out", "Have the browser forget its session", views.Done, is_public=True,
        refusals=(403,),
    ),
    Endpoint("GET", PREFIX + "/me", "get_me", "Who asks, and which scheduler", overview.Me),
    Endpoint(
        "GET", PREFIX + "/can", "can", "Whether a user may do something, and by what", permissions.Can, query=CanQuery,
        refusals=(404,),
    ),
    Endpoint(
        "GET", PREFIX + "/find", "find", "What the beginning of a name may mean", finding.Matches, query=FindQuery,
        refusals=(404,),
    ),
    Endpoint("GET", PREFIX + "/overview", "get_overview", "Status, alerts and trees in numbers", overview.Overview),
    Endpoint("GET", PREFIX + "/openapi.json", "get_openapi", "This document", dict[str, Any], is_public=True),
    Endpoint("GET", "/healthz", "healthz", "Whether the process answers", overview.Health, is_public=True),
    Endpoint(
        "GET", "/readyz", "readyz", "Whether updates are made in time", overview.Health, others={503: overview.Health},
        is_public=True,
    ),
)  # fmt: skip
