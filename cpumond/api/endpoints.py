"""The table of the JSON API: each request with its rights, body, answer and handler.

``json/routes.py`` serves exactly these rows; ``json/document.py`` makes the OpenAPI document from them, and
``packaging/access_table.py`` the table of access rights."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from cpumond import __version__
from cpumond.api import (
    event_views,
    finding,
    glance_views,
    node_views,
    overview,
    permissions,
    pool_views,
    rollout_views,
    tables,
    token_views,
    views,
)
from cpumond.api.json import events, forecasts, history, nodes, operations, rights, status, tokens, trees
from cpumond.api.json import requests as carried
from cpumond.api.json.call import Call
from cpumond.api.json.costs import per
from cpumond.api.json.document import make_document
from cpumond.api.json.endpoint import Endpoint, Handler, Needs
from cpumond.api.json.prepared import Prepared, compress, encode
from cpumond.api.session import BrowserSession, begin_session, end_session
from cpumond.core import wire
from cpumond.scheduler.answers.drain import DrainPlan
from cpumond.scheduler.answers.idle import IdleReport
from cpumond.scheduler.answers.operation import OperationAnswer
from cpumond.scheduler.answers.plan import ChangePlan
from cpumond.scheduler.history.model import HistoryView, NodeMap, ReportView
from cpumond.scheduler.history.savings import SavingsView
from cpumond.scheduler.history.waste import WasteView
from cpumond.scheduler.model.forecast import Forecast, Progress
from cpumond.scheduler.service import Reply
from cpumond.scheduler.settings import commands, rollout
from cpumond.scheduler.settings import operations as of_operations
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.undo import UndoChange
from cpumond.scheduler.state import node_commands
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.store import Change

PREFIX: Final = "/api/v1"
_TREE: Final = "/trees/{tree}"
_POOL: Final = "/trees/{tree}/pools/{pool}"
_OPERATION: Final = "/operations/{operation}"
_JOB: Final = "/operations/{operation}/jobs/{job}"
_NODE: Final = "/nodes/{node}"
_ASK_NODE: Final = (404, 429, 503, 504)
"""Statuses of refusals, for endpoints that wait for a node, or for the disk with the history."""


def _get(
    path: str, name: str, summary: str, handler: Handler, answer: Any, needs: Needs = "a known user", **more: Any
) -> Endpoint:
    return Endpoint("GET", PREFIX + path, name, summary, handler, answer, needs, **more)


def _command(
    method: str, path: str, name: str, summary: str, command: type[Command] | Callable[[Call], Command | UndoChange],
    needs: Needs, body: Any = None, refusals: tuple[int, ...] = (409,), **more: Any,
) -> Endpoint:  # fmt: skip
    """Return an endpoint for a command. The command is made from all fields of the request, or by a function."""
    make = partial(_make_command, command) if isinstance(command, type) else command

    async def execute(call: Call) -> views.Done:
        made = make(call)

        def make_done(reply: Reply) -> views.Done:
            about = getattr(made, "job_id", "") or getattr(made, "operation_id", reply.id)
            return views.Done(about, list(reply.warnings))

        def remember(reply: Reply) -> Change:
            return call.remember(make_done(reply))

        is_kept = call.idempotency is not None
        return make_done(await call.scheduler.execute(made, call.user, remember if is_kept else None, plan=call.plan))

    return Endpoint(method, PREFIX + path, name, summary, execute, views.Done, needs, body, refusals=refusals, **more)


def _make_command(kind: type[Command], call: Call) -> Command:
    fields: dict[str, Any] = {**call.path, **call.given}
    if "job" in fields:
        fields["job_id"] = fields.pop("job")
    if "operation" in fields:
        fields["operation_id"] = call.find_operation().id
        del fields["operation"]
    return kind(**fields)


async def _send_document(call: Call) -> Prepared:
    """Return the OpenAPI document. It is made once, in a thread, because the table has two hundred types."""
    shared = call.shared
    if shared.document is None:
        content = await asyncio.to_thread(lambda: encode(make_document(ENDPOINTS, __version__)))
        shared.document = Prepared(content, await compress(content), f'W/"{__version__}-{zlib.crc32(content):x}"')
    return shared.document


ENDPOINTS: Final = (
    _get("/trees", "list_trees", "All pool trees", lambda c: pool_views.view_trees(c.rights, c.now),
         pool_views.TreeList, cost=per(operations=2, nodes=2)),
    _command("POST", "/trees", "create_tree", "Create a pool tree", commands.CreateTree, "an administrator",
             carried.CreateTreeBody, status=201),
    _get(_TREE, "get_tree", "One pool tree", lambda c: pool_views.view_tree(c.rights, c.tree, c.now),
         pool_views.TreeView, cost=per(operations=2, nodes=2)),
    _command("PATCH", _TREE, "change_tree", "Change a tree's options",
             lambda c: commands.ChangeTree(c.path["tree"], trees.read_edits(c)), "`write` on the tree",
             carried.EditsBody),
    _command("DELETE", _TREE, "remove_tree", "Remove a tree", commands.RemoveTree, "an administrator",
             query=carried.RemoveQuery, cost=per(operations=80)),
    _command("PUT", "/default_tree", "set_default_tree", "Choose the default tree", commands.SetDefaultTree,
             "an administrator", carried.DefaultTreeBody, (404,)),
    _get(_TREE + "/file", "get_tree_file", "All settings of a tree and its pools",
         lambda c: pool_views.view_tree_file(c.tree), pool_views.TreeFile, "`read`", cost=per(pools=10)),
    _command("POST", _TREE + "/apply", "apply_tree", "Make a tree and its pools match a file", ApplyTree,
             "what the change needs", carried.ApplyBody, cost=per(values=250)),
    _get(_TREE + "/pools", "list_pools", "All pools of a tree", lambda c: pool_views.view_pools(c.tree, c.now),
         pool_views.PoolList, "`read`", cost=per(pools=130)),
    _get(_TREE + "/pool_table", "get_pool_table", "All pools of a tree in short form; made once for each update",
         lambda c: c.shared.pool_tables.table_of(c.tree), tables.PoolRows, "`read`", has_etag=True,
         cost=per(pools=40, operations=5)),
    _command("POST", _TREE + "/pools", "create_pool", "Create a pool", commands.CreatePool, "`modify_children`",
             carried.CreatePoolBody, status=201),
    _get(_TREE + "/rights", "list_rights", "The rights of the user on each pool of a tree",
         lambda c: rights.list_rights(c.rights, c.tree), permissions.PoolRights, cost=per(pools=110)),
    _get(_TREE + "/why", "explain_idle", "Why CPU is idle while work waits, and what to change", trees.explain_idle,
         IdleReport, "`read`", query=carried.IdleQuery, cost=per(operations=20, nodes=50)),
    _get(_POOL, "get_pool", "One pool, <Root> for the root", lambda c: pool_views.view_pool(c.pool, c.now, c.rights),
         pool_views.PoolView, "`read`"),
    _get(_POOL + "/orchid", "get_pool_orchid", "All values that the scheduler computes for it, by YTsaurus' names",
         trees.view_pool_orchid, dict[str, Any], "`read`", cost=per(operations=9)),
    _command("PATCH", _POOL, "change_pool", "Change a pool's attributes",
             lambda c: commands.ChangePool(c.path["tree"], c.path["pool"], trees.read_edits(c)), "`write`",
             carried.EditsBody),
    _command("DELETE", _POOL, "remove_pool", "Remove a pool", commands.RemovePool, "`write`, `modify_children`",
             query=carried.RemoveQuery, cost=per(operations=80)),
    _command("POST", _POOL + "/move", "move_pool", "Move or rename a pool", trees.move_pool,
             "`write`, `modify_children`", carried.MoveBody, cost=per(operations=60, values=200)),
    _command("POST", _POOL + "/transfer", "transfer_resources", "Transfer guarantees and counts from a pool to another",
             lambda c: commands.TransferPoolResources(c.path["tree"], c.path["pool"], c.body.destination, c.body.delta),
             "`write`", carried.TransferBody),
    Endpoint("POST", PREFIX + "/plan", "make_plan", "What a change would do to all shares; nothing is changed",
             trees.plan_change, ChangePlan, "what the change needs", commands.ConfigCommand | ApplyTree | UndoChange,
             carried.PlanQuery, cost=per(operations=30, values=200)),
    _get("/events", "list_events", "Events, the newest first", events.list_events, event_views.EventList,
         query=carried.EventsQuery, refusals=(404,), cost=per(listed=300)),
    _get("/audit", "list_audit",
         "Who did what, the newest first: administrators see everything, others their own actions and those about "
         "their pools",
         events.list_audit, event_views.AuditList, "a known user, for the own", query=carried.EventsQuery,
         refusals=(404,), cost=per(listed=300)),
    _get("/annotations", "list_annotations", "Events in the format of Grafana", events.list_annotations,
         list[event_views.Annotation], query=carried.EventsQuery, refusals=(404,), cost=per(listed=300)),
    _command("POST", "/events/{number}/undo", "undo_change", "Undo a change of trees and pools, by its event",
             events.undo_change, "what the change needs", cost=per(pools=120)),
    _get("/operations", "list_operations", "Operations, the newest first if not sorted otherwise",
         operations.list_operations, views.OperationList, "`read`", query=carried.OperationsQuery,
         cost=per(operations=30, listed=200)),
    _command("POST", "/operations", "start_operation", "Start an operation", of_operations.StartOperation, "`use`",
             carried.StartBody, (404, 409), status=201, cost=per(values=60)),
    _get(_OPERATION, "get_operation", "One operation, by id or *alias",
         lambda c: views.view_operation_details(c.rights, c.find_operation(), c.now), views.OperationDetails, "`read`"),
    _command("PATCH", _OPERATION, "update_operation", "Change the parameters of an operation",
             of_operations.UpdateOperation, "`manage`", carried.ParametersBody),
    _get(_OPERATION + "/when", "forecast_operation", "Predicted start and end of it", forecasts.forecast_operation,
         Forecast, "`read`"),
    Endpoint("POST", PREFIX + "/simulate", "simulate",
             "Simulate what would start when, which jobs would be stopped, and how shares would move; lines of JSON "
             "with the progress, the last one with the answer",
             forecasts.simulate, Progress, "what the change needs", carried.SimulateBody,
             content_type=carried.NDJSON, cost=per(operations=30, values=200)),
    _get(_OPERATION + "/why", "explain_operation", "Explain an operation's state and share", operations.why_operation,
         OperationAnswer, "`read`"),
    _get(_OPERATION + "/specification", "get_specification", "The specification as given, and with all values in force",
         lambda c: views.view_specification(c.state, c.find_operation("read_secrets")), views.BothSpecifications,
         "`read_secrets`"),
    _get(_OPERATION + "/orchid", "get_operation_orchid", "All values that the scheduler computes for it, by tree",
         operations.view_operation_orchid, dict[str, dict[str, Any]], "`read`", cost=per(operations=12)),
    _get(_OPERATION + "/jobs", "list_jobs", "Jobs of an operation", operations.list_jobs, views.JobList, "`read`",
         query=carried.JobsQuery, cost=per(listed=60, nodes=3)),
    _get(_JOB, "get_job", "One job", lambda c: views.find_job(c.state, c.find_operation(), c.path["job"]),
         views.JobView, "`read`"),
    _get(_JOB + "/log", "get_job_log",
         f"The end of a job's output, unchanged; header {carried.TOTAL_BYTES}: bytes that it wrote in total",
         operations.read_job_log, str, "`read_secrets`", query=carried.LogQuery, refusals=_ASK_NODE,
         content_type=carried.TEXT),
    _get(_JOB + "/explain", "explain_job", "Explain a job's limit; its node answers", operations.explain_job,
         dict[str, Any], "`read`", refusals=_ASK_NODE),
    Endpoint("POST", PREFIX + _JOB + "/pin", "pin_job",
             "Hold a job's limit; stored on its node's disk before the response", operations.pin_job, views.Done,
             "`manage`", carried.PinBody, refusals=_ASK_NODE, needs_body=False),
    Endpoint("POST", PREFIX + _JOB + "/unpin", "unpin_job", "Return a job's limit to its monitor", operations.unpin_job,
             views.Done, "`manage`", refusals=_ASK_NODE),
    _command("POST", _JOB + "/abort", "abort_job", "Stop a job; it is started again", of_operations.AbortJob,
             "`manage`", carried.AbortJobBody, needs_body=False),
    _command("POST", _JOB + "/abandon", "abandon_job", "Stop a job and count it as completed", of_operations.AbandonJob,
             "`manage`"),
    _command("POST", _OPERATION + "/patch", "patch_operation_spec", "Change its number of jobs, or of allowed failures",
             of_operations.PatchOperation, "`manage`", carried.PatchBody),
    _command("POST", _OPERATION + "/abort", "abort_operation", "Stop an operation and its jobs",
             of_operations.AbortOperation, "`manage`", carried.AbortBody, needs_body=False),
    _command("POST", _OPERATION + "/suspend", "suspend_operation", "Start no more of its jobs",
             of_operations.SuspendOperation, "`manage`", carried.SuspendBody, needs_body=False),
    _command("POST", _OPERATION + "/resume", "resume_operation", "Resume it", of_operations.ResumeOperation,
             "`manage`"),
    _command("POST", _OPERATION + "/complete", "complete_operation", "End it as completed",
             of_operations.CompleteOperation, "`manage`"),
    _get("/nodes", "list_nodes", "Nodes by id", nodes.list_nodes, node_views.NodeList, query=carried.NodesQuery,
         cost=per(listed=60, nodes=2)),
    Endpoint("POST", PREFIX + "/nodes", "register_node", "Register a node", nodes.register_node,
             wire.RegistrationAnswer, "a node's token", wire.NodeRegistration),
    _get(_NODE, "get_node", "One node with its jobs",
         lambda c: node_views.view_node_details(node_views.find_node(c.state, c.path["node"]), c.now, c.rights),
         node_views.NodeDetails),
    _command("POST", _NODE + "/cordon", "cordon_node", "Start no more jobs on it", node_commands.CordonNode,
             "`administer` on the tree", carried.WhyBody, needs_body=False),
    _command("POST", _NODE + "/uncordon", "uncordon_node", "Start jobs on it again", node_commands.UncordonNode,
             "`administer` on the tree", carried.WhyBody, needs_body=False),
    _command("POST", _NODE + "/tags", "change_node_tags", "Add tags to it, or remove them",
             node_commands.ChangeNodeTags, "`administer` on the tree", carried.TagsBody),
    _command("POST", _NODE + "/drain", "drain_node", "Start no more jobs on it, and restart its jobs elsewhere",
             node_commands.DrainNode, "`administer` on the tree", carried.DrainBody, needs_body=False),
    _get(_NODE + "/drain", "plan_drain", "Jobs that a drain would stop, and where they would fit",
         nodes.plan_node_drain, DrainPlan, "`read`", cost=per(nodes=20)),
    _get("/fleet", "get_fleet", "The agents of all nodes", lambda c: rollout_views.view_fleet(c.state),
         rollout_views.Fleet, cost=per(nodes=5)),
    _get("/prometheus/targets", "list_targets", "Targets of the agents for Prometheus (http_sd)", nodes.list_targets,
         list[rollout_views.TargetGroup], query=carried.TargetsQuery, cost=per(nodes=10)),
    _get("/rollout", "get_rollout", "The stages of the roll-out",
         lambda c: rollout_views.view_rollout(c.state, c.scheduler.rollout.watches), rollout_views.Rollout,
         cost=per(nodes=5)),
    Endpoint("POST", PREFIX + "/rollout/plan", "plan_stage", "What a stage would change", nodes.view_stage_plan,
             rollout.StagePlan, body=carried.SetStageBody, cost=nodes.cost_of_stage),
    _command("POST", "/rollout", "set_stage", "Set what a group of nodes may do with limits", nodes.read_stage,
             "an administrator", carried.SetStageBody, cost=nodes.cost_of_stage),
    _command("POST", "/rollout/advance", "advance_stage", "Advance a stage to all its nodes", rollout.AdvanceStage,
             "an administrator", carried.StageBody, (404, 409), cost=nodes.cost_of_stage),
    _command("POST", "/rollout/stop", "stop_stage", "Revert the nodes of a stage to the state before it",
             rollout.StopStage, "an administrator", carried.StageBody, (404, 409), cost=nodes.cost_of_stage),
    _command("POST", "/rollout/remove", "remove_stage",
             "Remove a stage: its nodes follow other stages, without one they change no limit", rollout.RemoveStage,
             "an administrator", carried.StageBody, (404, 409), cost=nodes.cost_of_stage),
    _get(_TREE + "/trends", "list_trends", "Recent trend of the CPU that pools may use, for many pools at once",
         history.list_trends, glance_views.PoolTrends, "`read`", query=carried.TrendsQuery, refusals=_ASK_NODE),
    _get("/node_map", "read_node_map", "Use of all nodes at moments of the last day", history.read_node_map, NodeMap,
         query=carried.NodeMapQuery, refusals=_ASK_NODE, cost=per(nodes=10)),
    _get("/operation_groups", "group_operations", "Numbers of waiting operations by cause", operations.group_operations,
         glance_views.OperationGroups, "`read`", query=carried.GroupsQuery, cost=per(operations=70)),
    _get("/preemption_groups", "group_preemptions", "Recorded preemptions, by kind and beneficiary",
         history.list_preemption_groups, glance_views.PreemptionGroups, "`read`", query=carried.PreemptionGroupsQuery,
         cost=per(preemptions=40)),
    Endpoint("POST", PREFIX + "/heartbeats", "heartbeat", "The state of a node; 409: it must register again",
             nodes.take_heartbeat, wire.HeartbeatAnswer, "a node's token", wire.NodeHeartbeat,
             others={409: wire.HeartbeatAnswer}),
    Endpoint("POST", PREFIX + "/logs", "take_job_log", "A log that the response to a heartbeat requested",
             lambda c: views.Taken(c.scheduler.logs.take(c.body)), views.Taken, "a node's token", wire.JobLog),
    Endpoint("POST", PREFIX + "/replies", "take_job_reply", "The reply to a request in the response to a heartbeat",
             lambda c: views.Taken(c.scheduler.requests.take(c.body)), views.Taken, "a node's token", wire.JobReply),
    _get("/preemptions", "list_preemptions", "Preemptions, the newest first",
         lambda c: node_views.view_preemptions(c.rights, **c.given), node_views.PreemptionList, "`read`",
         query=carried.PreemptionsQuery, cost=per(preemptions=40, listed=120)),
    _get("/history", "read_history", "History of a pool, operation, node or job", history.read_history, HistoryView,
         "`read`", query=carried.HistoryQuery, refusals=_ASK_NODE),
    _get("/report", "make_report", "Totals of pools and operations in core-hours", history.make_report, ReportView,
         query=carried.ReportQuery, refusals=_ASK_NODE, cost=per(operations=12)),
    _get("/savings", "make_savings", "Value and cost of reclaimed CPU, by week", history.make_savings, SavingsView,
         query=carried.SavingsQuery, refusals=_ASK_NODE),
    _get("/waste", "make_waste", "Requests that users and pools left unused in a week, and requests that would suffice",
         history.make_waste, WasteView, "`read`", query=carried.WasteQuery, refusals=_ASK_NODE,
         cost=per(operations=12)),
    _get("/alerts", "list_alerts", "Alerts for an operator", status.list_alerts, overview.AlertList,
         cost=per(operations=25)),
    _get("/status", "get_status", "A summary of the scheduler", status.view_status, overview.Status,
         cost=per(operations=35)),
    _get("/tokens", "list_tokens", "Own tokens, all for an administrator", tokens.list_tokens, token_views.TokenList,
         "a known user, for the own"),
    Endpoint("POST", PREFIX + "/tokens", "create_token", "Create a token; its secret is returned once",
             tokens.create_token, token_views.NewToken, "a known user, for the own", carried.TokenBody, status=201,
             needs_body=False),
    Endpoint("DELETE", PREFIX + "/tokens/{token}", "revoke_token", "Revoke a token by its id", tokens.revoke_token,
             views.Done, "a known user, for the own"),
    Endpoint("POST", PREFIX + "/session", "sign_in", "Begin a browser's session with the token in the request",
             lambda c: begin_session(c.request, c.user), BrowserSession, refusals=(422,)),
    Endpoint("DELETE", PREFIX + "/session", "sign_out", "End the browser's session", lambda c: end_session(c.request),
             views.Done, "nothing", refusals=(403,)),
    _get("/me", "get_me", "The user of the request, and the scheduler", status.view_me, overview.Me),
    _get("/can", "can", "Whether a user may do something, and which rule decides it",
         lambda c: rights.judge_question(c.rights, c.query, c.shared.find_known), permissions.Can,
         "a known user, for the own", query=carried.CanQuery, refusals=(404,)),
    _get("/find", "find", "Objects whose names begin with a text", lambda c: finding.find_matches(c.rights, **c.given),
         finding.Matches, "`read`", query=carried.FindQuery, refusals=(404,), cost=per(operations=22)),
    _get("/overview", "get_overview", "Status, alerts and trees in numbers", status.view_overview, overview.Overview,
         cost=per(operations=60)),
    _get("/openapi.json", "get_openapi", "This document", _send_document, dict[str, Any], "nothing"),
    Endpoint("GET", "/healthz", "healthz", "Whether the process responds", status.view_liveness, overview.Health,
             "nothing"),
    Endpoint("GET", "/readyz", "readyz", "Whether updates are on time", status.view_readiness, overview.Health,
             "nothing", others={503: overview.Health}),
)  # fmt: skip
