"""The table of the JSON API: each request with its rights, body, answer and handler.

``json/routes.py`` serves exactly these rows, ``json/document.py`` makes the OpenAPI document of them, and
``access_table.py`` the table of who may ask what.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
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
from cpumond.api.json.endpoint import Endpoint, Needs
from cpumond.api.json.prepared import Prepared, compress, encode
from cpumond.api.session import BrowserSession, begin_session, end_session
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
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings import operations as of_operations
from cpumond.scheduler.settings.rollout import AdvanceStage, RemoveStage, StagePlan, StopStage
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.undo import UndoChange
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.state.node_commands import CordonNode, DrainNode, UncordonNode
from cpumond.scheduler.why.drain import DrainPlan, plan_drain
from cpumond.scheduler.why.idle import IdleReport
from cpumond.scheduler.why.operation import OperationAnswer
from cpumond.scheduler.why.plan import Plan

PREFIX: Final = "/api/v1"
_TREE: Final = PREFIX + "/trees/{tree}"
_POOL: Final = _TREE + "/pools/{pool}"
_OPERATION: Final = PREFIX + "/operations/{operation}"
_NODE: Final = PREFIX + "/nodes/{node}"
_ROLLOUT: Final = PREFIX + "/rollout"
_ASK_NODE: Final = (404, 429, 503, 504)
"""Refusals of endpoints that wait for a node, or for the disk of the history."""


def _command(
    method: str, path: str, name: str, summary: str, make: Callable[[Call], Command | UndoChange], needs: Needs,
    body: Any = None, refusals: tuple[int, ...] = (409,), **more: Any,
) -> Endpoint:  # fmt: skip
    """One that carries out the command that ``make`` gives."""

    async def execute(call: Call) -> views.Done:
        command = make(call)
        reply = await call.scheduler.execute(command, call.user, plan=call.plan)
        return views.Done(getattr(command, "operation_id", reply.id), list(reply.warnings))

    return Endpoint(method, path, name, summary, execute, views.Done, needs, body, refusals=refusals, **more)


async def _send_document(call: Call) -> Prepared:
    """Made once, in a thread: the table holds two hundred types."""
    shared = call.shared
    if shared.document is None:
        content = await asyncio.to_thread(lambda: encode(make_document(ENDPOINTS, __version__)))
        shared.document = Prepared(content, await compress(content), f'W/"{__version__}-{zlib.crc32(content):x}"')
    return shared.document


ENDPOINTS: Final = (
    Endpoint(
        "GET", PREFIX + "/trees", "list_trees", "All pool trees", lambda c: pool_views.show_trees(c.rights),
        pool_views.TreeList, cost=per(operations=2, nodes=2),
    ),
    _command(
        "POST", PREFIX + "/trees", "create_tree", "Make a pool tree",
        lambda c: commands.CreateTree(c.body.name, c.body.attributes, c.body.ignore_existing),
        "an administrator", carried.CreateTreeBody, status=201,
    ),
    Endpoint(
        "GET", _TREE, "get_tree", "One pool tree", lambda c: pool_views.show_tree(c.rights, c.tree),
        pool_views.TreeView, cost=per(operations=2, nodes=2),
    ),
    _command(
        "PATCH", _TREE, "change_tree", "Change a tree's options",
        lambda c: commands.ChangeTree(c.path["tree"], trees.read_edits(c)), "`write` on the tree", carried.EditsBody,
    ),
    _command(
        "DELETE", _TREE, "remove_tree", "Remove a tree",
        lambda c: commands.RemoveTree(c.path["tree"], c.query.recursive),
        "an administrator", query=carried.RemoveQuery, cost=per(operations=80),
    ),
    _command(
        "PUT", PREFIX + "/default_tree", "set_default_tree", "Choose the default tree",
        lambda c: commands.SetDefaultTree(c.body.tree), "an administrator", carried.DefaultTreeBody, (404,),
    ),
    Endpoint(
        "GET", _TREE + "/file", "get_tree_file", "All that is set of a tree and its pools",
        lambda c: pool_views.show_tree_file(c.tree), pool_views.TreeFile, "`read`", cost=per(pools=10),
    ),
    _command(
        "POST", _TREE + "/apply", "apply_tree", "Make a tree and its pools what a file says",
        lambda c: ApplyTree(c.path["tree"], c.body.tables, c.body.prune, c.body.base, c.body.why),
        "what the change needs", carried.ApplyBody, cost=per(values=250),
    ),
    Endpoint(
        "GET", _TREE + "/pools", "list_pools", "All pools of a tree", lambda c: pool_views.show_pools(c.tree, c.now),
        pool_views.PoolList, "`read`", cost=per(pools=130),
    ),
    Endpoint(
        "GET", _TREE + "/pool_table", "get_pool_table", "All pools of a tree in short; made once for each update",
        lambda c: c.shared.pool_tables.table_of(c.tree), tables.PoolTable, "`read`", has_etag=True,
        cost=per(pools=40, operations=5),
    ),
    _command(
        "POST", _TREE + "/pools", "create_pool", "Make a pool",
        lambda c: commands.CreatePool(
            c.path["tree"], c.body.name, c.body.parent, c.body.attributes, c.body.ignore_existing
        ),
        "`modify_children`", carried.CreatePoolBody, status=201,
    ),
    Endpoint(
        "GET", _TREE + "/rights", "list_rights", "What the asker may do to each pool of a tree",
        lambda c: rights.list_rights(c.rights, c.tree), permissions.PoolRights, cost=per(pools=110),
    ),
    Endpoint(
        "GET", _TREE + "/why", "explain_idle", "Why CPU stands idle while work waits, and what to change",
        trees.explain_idle, IdleReport, "`read`", query=carried.IdleQuery, cost=per(operations=20, nodes=50),
    ),
    Endpoint(
        "GET", _POOL, "get_pool", "One pool, <Root> for the root",
        lambda c: pool_views.show_pool(c.pool, c.now, c.rights), pool_views.PoolView, "`read`",
    ),
    Endpoint(
        "GET", _POOL + "/orchid", "get_pool_orchid", "All that the scheduler computes of it, by YTsaurus' names",
        trees.show_pool_orchid, dict[str, Any], "`read`", cost=per(operations=9),
    ),
    _command(
        "PATCH", _POOL, "change_pool", "Change a pool's attributes",
        lambda c: commands.ChangePool(c.path["tree"], c.path["pool"], trees.read_edits(c)),
        "`write`", carried.EditsBody,
    ),
    _command(
        "DELETE", _POOL, "remove_pool", "Remove a pool",
        lambda c: commands.RemovePool(c.path["tree"], c.path["pool"], c.query.recursive),
        "`write`, `modify_children`", query=carried.RemoveQuery, cost=per(operations=80),
    ),
    _command(
        "POST", _POOL + "/move", "move_pool", "Move or rename a pool", trees.move_pool, "`write`, `modify_children`",
        carried.MoveBody, cost=per(operations=60, values=200),
    ),
    _command(
        "POST", _POOL + "/transfer", "transfer_resources", "Give guarantees and counts of a pool to another",
        lambda c: commands.TransferPoolResources(c.path["tree"], c.path["pool"], c.body.destination, c.body.delta),
        "`write`", carried.TransferBody,
    ),
    Endpoint(
        "POST", PREFIX + "/plan", "make_plan", "What a change would do to everybody's shares; nothing is changed",
        trees.plan_change, Plan, "what the change needs", commands.ConfigCommand | ApplyTree | UndoChange,
        carried.PlanQuery, cost=per(operations=30, values=200),
    ),
    Endpoint(
        "GET", PREFIX + "/events", "list_events", "What happened, the newest first", events.list_events,
        event_views.EventList, query=carried.EventsQuery, refusals=(404,), cost=per(listed=300),
    ),
    Endpoint(
        "GET", PREFIX + "/audit", "list_audit",
        "Who did what, the newest first: all of it for administrators, for others what is their own or of their pools",
        events.list_audit, event_views.AuditList, "a known user, for the own", query=carried.EventsQuery,
        refusals=(404,), cost=per(listed=300),
    ),
    Endpoint(
        "GET", PREFIX + "/annotations", "list_annotations", "What happened, as Grafana reads it",
        events.list_annotations, list[event_views.Annotation], query=carried.EventsQuery, refusals=(404,),
        cost=per(listed=300),
    ),
    _command(
        "POST", PREFIX + "/events/{number}/undo", "undo_change", "Take back what an event changed in trees and pools",
        events.undo_change, "what the change needs", cost=per(pools=120),
    ),
    Endpoint(
        "GET", PREFIX + "/operations", "list_operations", "Operations, the newest first if not sorted otherwise",
        operations.list_operations, views.OperationList, "`read`", query=carried.OperationsQuery,
        cost=per(operations=30, listed=200),
    ),
    _command(
        "POST", PREFIX + "/operations", "start_operation", "Start an operation",
        lambda c: of_operations.StartOperation(c.body.spec, c.body.type), "`use`", carried.StartBody, (404, 409),
        status=201, cost=per(values=60),
    ),
    Endpoint(
        "GET", _OPERATION, "get_operation", "One operation, by id or *alias",
        lambda c: views.show_operation_details(c.rights, c.find_operation(), c.now), views.OperationDetails, "`read`",
    ),
    _command(
        "PATCH", _OPERATION, "update_operation", "Change the parameters of an operation",
        lambda c: of_operations.UpdateOperation(c.find_operation().id, c.body.parameters),
        "`manage`", carried.ParametersBody,
    ),
    Endpoint(
        "GET", _OPERATION + "/when", "foretell_operation", "When an operation starts and ends",
        forecasts.foretell_operation, Forecast, "`read`",
    ),
    Endpoint(
        "POST", PREFIX + "/simulate", "simulate",
        "What would start when, who would be stopped, whose share would move; a line of JSON now and then, at last the "
        "answer", forecasts.simulate, Progress, "what the change needs", carried.SimulateBody,
        content_type=carried.NDJSON, cost=per(operations=30, values=200),
    ),
    Endpoint(
        "GET", _OPERATION + "/why", "explain_operation", "Why an operation has what it has",
        operations.why_operation, OperationAnswer, "`read`",
    ),
    Endpoint(
        "GET", _OPERATION + "/specification", "get_specification", "What an operation was given, and all that holds",
        lambda c: views.show_specification(c.state, c.find_operation("read_secrets")), views.Specification,
        "`read_secrets`",
    ),
    Endpoint(
        "GET", _OPERATION + "/orchid", "get_operation_orchid", "All that the scheduler computes of it, by tree",
        operations.show_operation_orchid, dict[str, dict[str, Any]], "`read`", cost=per(operations=12),
    ),
    Endpoint(
        "GET", _OPERATION + "/jobs", "list_jobs", "Jobs of an operation", operations.list_jobs, views.JobList,
        "`read`", query=carried.JobsQuery, cost=per(listed=60, nodes=3),
    ),
    Endpoint(
        "GET", _OPERATION + "/jobs/{job}", "get_job", "One job",
        lambda c: views.find_job(c.state, c.find_operation(), c.path["job"]), views.JobView, "`read`",
    ),
    Endpoint(
        "GET", _OPERATION + "/jobs/{job}/log", "get_job_log",
        f"The end of what a job wrote, byte by byte; header {carried.TOTAL_BYTES}: how much it wrote in all",
        operations.read_job_log, str, "`read_secrets`", query=carried.LogQuery, refusals=_ASK_NODE,
        content_type=carried.TEXT,
    ),
    Endpoint(
        "GET", _OPERATION + "/jobs/{job}/explain", "explain_job", "Why a job's limit is what it is, told by its node",
        operations.explain_job, dict[str, Any], "`read`", refusals=_ASK_NODE,
    ),
    Endpoint(
        "POST", _OPERATION + "/jobs/{job}/pin", "pin_job", "Hold a job's limit; on its node's disk when answered",
        operations.pin_job, views.Done, "`manage`", carried.PinBody, refusals=_ASK_NODE, needs_body=False,
    ),
    Endpoint(
        "POST", _OPERATION + "/jobs/{job}/unpin", "unpin_job", "Give a job's limit back to its monitor",
        operations.unpin_job, views.Done, "`manage`", refusals=_ASK_NODE,
    ),
    _command(
        "POST", _OPERATION + "/abort", "abort_operation", "Stop an operation and its jobs",
        lambda c: of_operations.AbortOperation(c.find_operation().id, c.body.message), "`manage`", carried.AbortBody,
        needs_body=False,
    ),
    _command(
        "POST", _OPERATION + "/suspend", "suspend_operation", "Start no more jobs of it",
        lambda c: of_operations.SuspendOperation(c.find_operation().id, c.body.abort_running_jobs),
        "`manage`", carried.SuspendBody, needs_body=False,
    ),
    _command(
        "POST", _OPERATION + "/resume", "resume_operation", "Take back a suspension",
        lambda c: of_operations.ResumeOperation(c.find_operation().id), "`manage`",
    ),
    _command(
        "POST", _OPERATION + "/complete", "complete_operation", "End it as completed",
        lambda c: of_operations.CompleteOperation(c.find_operation().id), "`manage`",
    ),
    Endpoint(
        "GET", PREFIX + "/nodes", "list_nodes", "Nodes by id", nodes.list_nodes, node_views.NodeList,
        query=carried.NodesQuery, cost=per(listed=60, nodes=2),
    ),
    Endpoint(
        "POST", PREFIX + "/nodes", "register_node", "A node makes itself known", nodes.register_node,
        RegistrationAnswer, "a node's token", NodeRegistration,
    ),
    Endpoint(
        "GET", _NODE, "get_node", "One node with its jobs",
        lambda c: node_views.show_node_details(node_views.find_node(c.state, c.path["node"]), c.now, c.rights),
        node_views.NodeDetails,
    ),
    _command(
        "POST", _NODE + "/cordon", "cordon_node", "Start no more jobs on it",
        lambda c: CordonNode(c.path["node"], c.body.why), "`administer` on the tree", carried.WhyBody,
        needs_body=False,
    ),
    _command(
        "POST", _NODE + "/uncordon", "uncordon_node", "Start jobs on it again",
        lambda c: UncordonNode(c.path["node"], c.body.why), "`administer` on the tree", carried.WhyBody,
        needs_body=False,
    ),
    _command(
        "POST", _NODE + "/drain", "drain_node", "Start no more jobs on it, and those that it has elsewhere",
        lambda c: DrainNode(c.path["node"], c.body.why, c.body.graceful), "`administer` on the tree",
        carried.DrainBody, needs_body=False,
    ),
    Endpoint(
        "GET", _NODE + "/drain", "plan_drain", "What a drain would stop, and where there is room",
        lambda c: plan_drain(node_views.find_living_node(c.state, c.path["node"]), c.rights, c.now), DrainPlan,
        "`read`", cost=per(nodes=20),
    ),
    Endpoint(
        "GET", PREFIX + "/fleet", "get_fleet", "The agents of all nodes", lambda c: rollout_views.show_fleet(c.state),
        rollout_views.Fleet, cost=per(nodes=5),
    ),
    Endpoint(
        "GET", PREFIX + "/prometheus/targets", "list_targets", "Where Prometheus scrapes the agents (http_sd)",
        nodes.list_targets, list[rollout_views.TargetGroup], query=carried.TargetsQuery, cost=per(nodes=10),
    ),
    Endpoint(
        "GET", _ROLLOUT, "get_rollout", "The stages of the roll-out",
        lambda c: rollout_views.show_rollout(c.state, c.scheduler.rollout.watches), rollout_views.Rollout,
        cost=per(nodes=5),
    ),
    Endpoint(
        "POST", _ROLLOUT + "/plan", "plan_stage", "What a stage would change", nodes.show_stage_plan, StagePlan,
        body=carried.SetStageBody, cost=nodes.cost_of_stage,
    ),
    _command(
        "POST", _ROLLOUT, "set_stage", "Set what a group of nodes may do to limits", nodes.read_stage,
        "an administrator", carried.SetStageBody, cost=nodes.cost_of_stage,
    ),
    _command(
        "POST", _ROLLOUT + "/advance", "advance_stage", "From its canary to all nodes of the group",
        lambda c: AdvanceStage(nodes_filter=c.body.nodes_filter, why=c.body.why), "an administrator",
        carried.StageBody, (404, 409), cost=nodes.cost_of_stage,
    ),
    _command(
        "POST", _ROLLOUT + "/stop", "stop_stage", "Give the nodes of a stage back what was before",
        lambda c: StopStage(nodes_filter=c.body.nodes_filter, why=c.body.why), "an administrator",
        carried.StageBody, (404, 409), cost=nodes.cost_of_stage,
    ),
    _command(
        "POST", _ROLLOUT + "/remove", "remove_stage",
        "Forget a stage: its nodes do what other stages say, without one nothing to limits",
        lambda c: RemoveStage(nodes_filter=c.body.nodes_filter, why=c.body.why), "an administrator",
        carried.StageBody, (404, 409), cost=nodes.cost_of_stage,
    ),
    Endpoint(
        "GET", _TREE + "/trends", "list_trends", "How the CPU that pools may use has changed, of many pools at once",
        history.list_trends, glance_views.PoolTrends, "`read`", query=carried.TrendsQuery, refusals=_ASK_NODE,
    ),
    Endpoint(
        "GET", PREFIX + "/operation_groups", "group_operations", "How many operations wait for what",
        operations.group_operations, glance_views.OperationGroups, "`read`", query=carried.GroupsQuery,
        cost=per(operations=70),
    ),
    Endpoint(
        "GET", PREFIX + "/preemption_groups", "group_preemptions",
        "The preemptions that are kept, by kind and for whom",
        history.list_preemption_groups, glance_views.PreemptionGroups, "`read`", query=carried.PreemptionGroupsQuery,
    ),
    Endpoint(
        "POST", PREFIX + "/heartbeats", "heartbeat", "The state of a node; 409: it must register again",
        nodes.take_heartbeat, HeartbeatAnswer, "a node's token", NodeHeartbeat, others={409: HeartbeatAnswer},
    ),
    Endpoint(
        "POST", PREFIX + "/logs", "take_job_log", "A log that the answer to a heartbeat asked for",
        lambda c: views.Taken(c.scheduler.logs.take(c.body)), views.Taken, "a node's token", JobLog,
    ),
    Endpoint(
        "POST", PREFIX + "/replies", "take_job_reply", "The reply to a request in the answer to a heartbeat",
        lambda c: views.Taken(c.scheduler.requests.take(c.body)), views.Taken, "a node's token", JobReply,
    ),
    Endpoint(
        "GET", PREFIX + "/preemptions", "list_preemptions", "Preemptions, the newest first", history.list_preemptions,
        node_views.PreemptionList, "`read`", query=carried.PreemptionsQuery, cost=per(listed=60),
    ),
    Endpoint(
        "GET", PREFIX + "/history", "read_history", "What was when, of a pool, operation, node or job",
        history.read_history, HistoryView, "`read`", query=carried.HistoryQuery, refusals=_ASK_NODE,
    ),
    Endpoint(
        "GET", PREFIX + "/report", "make_report", "What pools and operations came to, in core-hours",
        history.make_report, ReportView, query=carried.ReportQuery, refusals=_ASK_NODE, cost=per(operations=12),
    ),
    Endpoint(
        "GET", PREFIX + "/savings", "make_savings", "What reclaimed CPU was worth and cost, by week",
        history.make_savings, SavingsView, query=carried.SavingsQuery, refusals=_ASK_NODE,
    ),
    Endpoint(
        "GET", PREFIX + "/alerts", "list_alerts", "What needs an operator", status.list_alerts, overview.AlertList,
        cost=per(operations=25),
    ),
    Endpoint(
        "GET", PREFIX + "/status", "get_status", "The scheduler at a glance", status.show_status, overview.Status,
        cost=per(operations=35),
    ),
    Endpoint(
        "GET", PREFIX + "/tokens", "list_tokens", "Tokens: the own, of an administrator all", tokens.list_tokens,
        token_views.TokenList, "a known user, for the own",
    ),
    Endpoint(
        "POST", PREFIX + "/tokens", "create_token", "Make a token; it is told once", tokens.create_token,
        token_views.NewToken, "a known user, for the own", carried.TokenBody, status=201, needs_body=False,
    ),
    Endpoint(
        "DELETE", PREFIX + "/tokens/{token}", "revoke_token", "Refuse a token from now on, by its id",
        tokens.revoke_token, views.Done, "a known user, for the own",
    ),
    Endpoint(
        "POST", PREFIX + "/session", "sign_in", "Begin a browser's session with the token that is shown",
        lambda c: begin_session(c.request, c.user), BrowserSession, refusals=(422,),
    ),
    Endpoint(
        "DELETE", PREFIX + "/session", "sign_out", "Have the browser forget its session",
        lambda c: end_session(c.request), views.Done, "nothing", refusals=(403,),
    ),
    Endpoint("GET", PREFIX + "/me", "get_me", "Who asks, and which scheduler", status.show_me, overview.Me),
    Endpoint(
        "GET", PREFIX + "/can", "can", "Whether a user may do something, and by what",
        lambda c: rights.judge_question(c.rights, c.query, c.shared.find_known), permissions.Can,
        "a known user, for the own", query=carried.CanQuery, refusals=(404,),
    ),
    Endpoint(
        "GET", PREFIX + "/find", "find", "What the beginning of a name may mean",
        lambda c: finding.find_matches(
            c.rights, c.query.kind, c.query.name, operation=c.query.operation, tree=c.query.tree,
            all_of=c.query.all_of, within=c.query.within, limit=c.query.limit,
        ),
        finding.Matches, "`read`", query=carried.FindQuery, refusals=(404,), cost=per(operations=22),
    ),
    Endpoint(
        "GET", PREFIX + "/overview", "get_overview", "Status, alerts and trees in numbers", status.show_overview,
        overview.Overview, cost=per(operations=60),
    ),
    Endpoint(
        "GET", PREFIX + "/openapi.json", "get_openapi", "This document", _send_document, dict[str, Any], "nothing",
    ),
    Endpoint(
        "GET", "/healthz", "healthz", "Whether the process answers", status.show_alive, overview.Health, "nothing",
    ),
    Endpoint(
        "GET", "/readyz", "readyz", "Whether updates are made in time", status.show_ready, overview.Health, "nothing",
        others={503: overview.Health},
    ),
)  # fmt: skip
