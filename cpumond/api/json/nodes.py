"""Requests of nodes and about nodes, and about the stages of a roll-out."""

from __future__ import annotations

import msgspec

from cpumond.api import node_views, rollout_views
from cpumond.api.json import requests
from cpumond.api.json.call import Call
from cpumond.api.json.costs import STEPS
from cpumond.api.json.prepared import WithStatus
from cpumond.core.wire import HeartbeatAnswer, RegistrationAnswer
from cpumond.scheduler.answers.drain import DrainPlan, Places, find_places, plan_drain
from cpumond.scheduler.settings.rollout import EVERY_NODE, SetStage, StagePlan, make_stage, plan_stage
from cpumond.scheduler.state.stages import list_hosts
from cpumond.scheduler.trial.fork import ask


def list_nodes(call: Call) -> node_views.NodeList:
    online = call.query.online == "true" if call.query.online else None
    return node_views.view_nodes(call.state, call.now, **{**call.given, "online": online})


async def register_node(call: Call) -> RegistrationAnswer:
    # A token whose pattern matches several nodes may not replace a node, unless it is an administrator's.
    may_replace = call.node is None or call.node.admin or call.node.is_bound
    return await call.scheduler.register(call.body, may_replace)


async def take_heartbeat(call: Call) -> HeartbeatAnswer | WithStatus:
    answer = await call.scheduler.heartbeat(call.body)
    return WithStatus(answer, 409) if answer.register else answer


async def plan_node_drain(call: Call) -> DrainPlan:
    state, now = call.state, call.now
    node = node_views.find_living_node(state, call.path["node"])
    async with call.shared.plan_lock:
        places, _ = await ask(lambda: find_places(state, node.id, now), Places)
    return plan_drain(node, call.rights, now, places)


def list_targets(call: Call) -> list[rollout_views.TargetGroup]:
    return rollout_views.view_targets(call.state, call.query.loopback == "true")


def read_stage(call: Call) -> SetStage:
    body: requests.SetStageBody = call.body
    return SetStage(**{**msgspec.structs.asdict(body), "nodes_filter": body.nodes_filter.strip() or EVERY_NODE})


def cost_of_stage(call: Call) -> float:
    """Return the cost of a stage's filter, which is parsed character by character, here and again when it is stored."""
    return (300 * len(call.body.nodes_filter) + 80 * len(call.state.nodes)) / STEPS


def view_stage_plan(call: Call) -> StagePlan:
    """Return the plan of a stage, made from the stage that the command itself would store. Raises CommandError."""
    command = read_stage(call)
    hosts = list_hosts(call.state, command.nodes_filter)
    before = call.state.stages.get(command.nodes_filter)
    return plan_stage(make_stage(command, before, hosts, call.user.name, call.now), hosts)
