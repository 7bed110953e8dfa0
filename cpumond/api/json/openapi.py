"""The table of the JSON API: every route with what goes in and out.

``routes`` serves exactly what stands here, and ``document`` describes it, so that the two cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec

from cpumond.api import event_views, finding, node_views, overview, permissions, pool_views, tables, views
from cpumond.api.token_views import NewToken, TokenList
from cpumond.core.wire import (
    MAX_LOG_BYTES,
    HeartbeatAnswer,
    JobLog,
    JobReply,
    LogStream,
    NodeHeartbeat,
    NodeRegistration,
    RegistrationAnswer,
)
from cpumond.scheduler.events import EventKind
from cpumond.scheduler.forecast.model import Forecast, Progress
from cpumond.scheduler.history.model import HistoryView, ReportView
from cpumond.scheduler.model import Why
from cpumond.scheduler.settings.commands import ConfigCommand
from cpumond.scheduler.settings.tree_file import ApplyTree, TreeTables
from cpumond.scheduler.settings.undo import UndoChange
from cpumond.scheduler.token_commands import MAX_NOTE, Life
from cpumond.scheduler.users import MAX_NAME, Role
from cpumond.scheduler.why.drain import DrainPlan
from cpumond.scheduler.why.idle import IdleReport
from cpumond.scheduler.why.operation import OperationAnswer
from cpumond.scheduler.why.plan import Plan

PREFIX: Final = "/api/v1"
MAX_PAGE: Final = 1000
DEFAULT_TAIL_BYTES: Final = 65_536
TEXT: Final = "text/plain; charset=utf-8"
NDJSON: Final = "application/x-ndjson"
TOTAL_BYTES: Final = "X-Cpumond-Total-Bytes"
"""Header: how much a job wrote in all."""
FIRST_BYTE: Final = "X-Cpumond-First-Byte"
"""Header: how much it wrote before the first byte of the answer."""

_Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_Since = Annotated[float, msgspec.Meta(gt=0.0, le=31_536_000.0)]
_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


_Spec = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description=(
            "tasks: name -> job_count, command (text for a shell, or a list of arguments), cpu_limit in cores (1), "
            "memory_limit in bytes (0), user_slots (1), gpu_limit, network, environment, interruptible, "
            "working_directory (absolute; a fresh one of each job's own), checkpoints (its jobs touch the file that "
            "CPUMOND_CHECKPOINT names). Besides them: pool (the user's name), "
            "pool_trees, weight, max_share_ratio, resource_limits, scheduling_options_per_pool_tree, title, alias, "
            "preemption_mode, is_gang (all jobs start in one step or none), min_run_time in ms, "
            "max_failed_job_count, job_cpu_monitor."
        ),
        examples=[
            {
                "pool": "research",
                "tasks": {"main": {"job_count": 4, "cpu_limit": 2.0, "command": "sleep 60"}},
                "job_cpu_monitor": {"enable_cpu_reclaim": True, "min_cpu_limit": 0.1},
            }
        ],
    ),
]
_PoolAttributes = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description="Options of a pool by the documents' names; GET .../pools/{pool} shows those that hold.",
        examples=[
            {
                "weight": 2.0,
                "strong_guarantee_resources": {"cpu": 50},
                "resource_limits": {"cpu": 200},
                "max_running_operation_count": 20,
                "integral_guarantees": {"guarantee_type": "relaxed", "resource_flow": {"cpu": 10}},
            }
        ],
    ),
]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what a request carries."""


class CreateTreeBody(Body, frozen=True):
    """A tree to make; with ``ignore_existing`` one of this name is left as it is."""

    name: _Name
    attributes: dict[str, Any] = {}
    ignore_existing: bool = False


class CreatePoolBody(Body, frozen=True):
    """A pool to make, under ``parent``; ``<Root>`` is the root."""

    name: _Name
    parent: _Name = "<Root>"
    attributes: _PoolAttributes = {}
    ignore_existing: bool = False


class ApplyBody(Body, frozen=True):
    """A tree as it shall be; see ``ApplyTree``. ``base``: the revision that it must still have, "" for any."""

    tables: TreeTables
    prune: bool = False
    base: Annotated[str, msgspec.Meta(max_length=100)] = ""
    why: Why = ""


class EditBody(Body, frozen=True):
    """One change of an attribute; ``path`` leads into dictionaries, ``value`` null removes.

    ``recursive``: dictionaries are made on the way, inside of what is no option, too.
    """

    path: Annotated[list[_Key], msgspec.Meta(min_length=1, max_length=32)]
    value: Any = None
    recursive: bool = False


class EditsBody(Body, frozen=True):
    """Changes of one tree or pool: all of them, or none."""

    edits: Annotated[list[EditBody], msgspec.Meta(min_length=1, max_length=1000)]


class DefaultTreeBody(Body, frozen=True):
    """The tree of operations that name none; null: there is none, and they are refused."""

    tree: _Name | None


class MoveBody(Body, frozen=True):
    """Another parent, another name, or both; null leaves it."""

    parent: _Name | None = None
    name: _Name | None = None


class TransferBody(Body, frozen=True):
    """What goes from the pool to ``destination``: ``strong_guarantee_resources``, ``resource_flow``,
    ``burst_guarantee_resources``, ``max_operation_count``, ``max_running_operation_count``."""

    destination: _Name
    delta: dict[str, Any]


class StartBody(Body, frozen=True):
    """An operation to start: tasks, pool and all else stand in ``spec``."""

    spec: _Spec
    type: _Text = "vanilla"


class AbortBody(Body, frozen=True):
    """``message`` is kept as the operation's error; "" for the usual one."""

    message: _Text = ""


class SuspendBody(Body, frozen=True):
    """Whether running jobs are stopped, too."""

    abort_running_jobs: bool = False


class PinBody(Body, frozen=True):
    """``cpu_limit`` in cores, null for all that the job may have; ``ttl_s`` in seconds, null until it is unpinned."""

    cpu_limit: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] | None = None
    ttl_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] | None = None


class TokenBody(Body, frozen=True):
    """A token to make. ``user`` "": the asking one. ``role``: "user" may do what access lists allow, "admin" all;
    "node" registers nodes whose node_id fits ``pattern`` ("": any); "proxy" names the users for whom it sends.

    ``groups``: those of its user besides what the configuration says. ``expires_s``: seconds from now, null for no end.
    Who is no administrator makes tokens of the own name, for role "user" and groups that the user is in.
    """

    user: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    role: Role = "user"
    pattern: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    groups: Annotated[list[Annotated[str, msgspec.Meta(max_length=MAX_NAME)]], msgspec.Meta(max_length=100)] = []
    expires_s: Life | None = None
    note: Annotated[str, msgspec.Meta(max_length=MAX_NOTE)] = ""


class WhyBody(Body, frozen=True):
    """``why``: a sentence for those who look at the node and at the audit log."""

    why: Why = ""


class DrainBody(WhyBody, frozen=True):
    """``graceful``: the jobs get the tree's ``job_graceful_preemption_timeout`` to end."""

    graceful: bool = False


class SimulateBody(Body, frozen=True):
    """What may be done, one of: ``spec``, an operation is started; ``command``, trees or pools change, as for a plan;
    ``node``, a node is cordoned, or with ``drain`` drained."""

    spec: _Spec | None = None
    command: ConfigCommand | ApplyTree | None = None
    node: _Text | None = None
    drain: bool = False


class ParametersBody(Body, frozen=True):
    """``pool``, ``weight``, ``resource_limits`` and others, for all of its trees or each."""

    parameters: dict[str, Any]


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what may stand behind the question mark."""


class RemoveQuery(Query, frozen=True):
    """``recursive``: with all pools below."""

    recursive: bool = False


class PlanQuery(Query, frozen=True):
    """``everything``: also what stays as it is."""

    everything: bool = False


class IdleQuery(Query, frozen=True):
    """``pool``: only what concerns it; "" for the whole tree."""

    pool: _Text = ""


class OperationsQuery(Query, frozen=True):
    """Filters; those not given let everything through. ``search``: part of id, title, alias, user or pool."""

    limit: _Limit = 100
    offset: _Offset = 0
    state: Literal["", "pending", "running", "completed", "failed", "aborted"] = ""
    user: _Text = ""
    tree: _Text = ""
    pool: _Text = ""
    search: _Text = ""
    sort: views.OperationOrder = "start_time"
    descending: Literal["true", "false"] = "true"


class JobsQuery(Query, frozen=True):
    """Filters; those not given let everything through."""

    limit: _Limit = 100
    offset: _Offset = 0
    state: Literal["", "starting", "running", "stopping", "completed", "failed", "aborted", "lost"] = ""
    node: _Text = ""


class WhenQuery(Query, frozen=True):
    """``shorter``: whether to find, too, what would make it start sooner, which takes some runs ahead."""

    shorter: Literal["true", "false"] = "false"


class LogQuery(Query, frozen=True):
    """Which of a job's two logs, and how many bytes of its end, or from ``offset`` on: bytes since its beginning."""

    stream: LogStream = "stdout"
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None
    tail: Annotated[int, msgspec.Meta(ge=1, le=MAX_LOG_BYTES)] = DEFAULT_TAIL_BYTES


class NodesQuery(Query, frozen=True):
    """Filters; those not given let everything through."""

    limit: _Limit = 1000
    offset: _Offset = 0
    tree: _Text = ""
    tag: _Text = ""
    online: Literal["", "true", "false"] = ""


class HistoryQuery(Query, frozen=True):
    """Which series, and how much of it: ``tree`` is of pools and operations, "" for a pool is the default tree."""

    kind: Literal["pool", "operation", "node", "job"]
    name: _Name
    tree: _Text = ""
    since_s: _Since = 3600.0
    max_points: Annotated[int, msgspec.Meta(ge=1, le=20_000)] = 1500


class ReportQuery(Query, frozen=True):
    """``tree`` "": all; ``top``: how many operations of each tree, those that ordered most."""

    since_s: _Since = 86_400.0
    tree: _Text = ""
    top: Annotated[int, msgspec.Meta(ge=0, le=MAX_PAGE)] = 100


class EventsQuery(Query, frozen=True):
    """Filters; those not given let everything through. ``pool`` (of the default tree without ``tree``) includes those
    below. ``before``: only events of lower numbers, 0 for all; ``since_s``: only of that many last seconds, 0 for all.
    """

    limit: _Limit = 50
    before: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    since_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    kind: EventKind | Literal[""] = ""
    user: _Text = ""
    tree: _Text = ""
    pool: _Text = ""
    node: _Text = ""
    operation: _Text = ""


class CanQuery(Query, frozen=True):
    """``object``: a pool of ``tree`` ("": the default one), tree:NAME, an operation's id or *alias, or a path.

    ``action``: a permission, or a word of the command line. ``user`` "": the asker; ``groups``: of another user, with
    commas.
    """

    action: _Name
    object: _Name
    user: _Text = ""
    tree: _Text = ""
    groups: _Text = ""


class FindQuery(Query, frozen=True):
    """``name``: the beginning of an id, title or alias; "-" for the newest. ``operation``: that of jobs. ``tree``: of
    pools, "" for the default one. ``all_of``: all that begins so, not only what is nearest.
    """

    kind: finding.NamedKind
    name: _Text = ""
    operation: _Text = ""
    tree: _Text = ""
    all_of: bool = False
    limit: _Limit = 100


class PreemptionsQuery(Query, frozen=True):
    """``operation`` and ``pool`` may be those of the job that was stopped, or of the one it was stopped for."""

    limit: _Limit = 100
    operation: _Text = ""
    pool: _Text = ""


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
        "GET", _POOL + "/orchid", "get_pool_orchid", "All that the scheduler computes of it, by the documents' names",
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
    Endpoint(
        "GET", _OPERATION + "/when", "foretell_operation", "When an operation starts and ends", Forecast,
        query=WhenQuery,
    ),
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
