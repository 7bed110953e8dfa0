"""Commands on the stages of a roll-out, and the effect of stages on nodes; pure."""

from __future__ import annotations

from itertools import compress

import msgspec

from cpumond.core.errors import ConfigError
from cpumond.core.levels import Level
from cpumond.core.words import did_you_mean, quoted
from cpumond.scheduler.elements import Node
from cpumond.scheduler.model import RESOLVE, TOO_MANY_REQUESTS, CommandError
from cpumond.scheduler.settings import rollout
from cpumond.scheduler.settings.nodes_filter import parse_nodes_filter
from cpumond.scheduler.state import State
from cpumond.scheduler.state.transaction import Transaction

MAX_STAGES = 1000


def list_nodes(state: State, nodes_filter: str) -> list[Node]:
    """Return the nodes that a filter fits. Raises CommandError for an invalid formula."""
    try:
        parsed = parse_nodes_filter(nodes_filter)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    nodes = list(state.nodes.values())
    return list(compress(nodes, parsed.select([node.tags for node in nodes])))


def list_hosts(state: State, nodes_filter: str) -> list[rollout.Host]:
    """Return the nodes that a filter fits, with their levels. Raises CommandError."""
    nodes = list_nodes(state, nodes_filter)
    others = state.stages.find_levels([(node.id, node.tags) for node in nodes], but=nodes_filter)
    return [
        rollout.Host(node.id, node.about, node.is_online, node.level, other)
        for node, other in zip(nodes, others, strict=True)
    ]


def prepare_stage(state: State, command: rollout.RolloutCommand, user: str, now: float) -> Transaction:
    """Return the change that a command makes. Raises CommandError."""
    name = command.nodes_filter.strip() or rollout.EVERY_NODE
    before = state.stages.get(name)
    if isinstance(command, rollout.SetStage):
        if before is None and len(state.stages) >= MAX_STAGES:
            raise CommandError(f"there are {MAX_STAGES} stages already; remove some", TOO_MANY_REQUESTS)
        hosts = list_hosts(state, name)
        stage = rollout.make_stage(msgspec.structs.replace(command, nodes_filter=name), before, hosts, user, now)
        return Transaction(stages=(stage,), id=name, warnings=_warn_of_set(stage, hosts))
    if before is None:
        near = did_you_mean(name, [each.nodes_filter for each in state.stages.list()])
        raise CommandError(f"nodes {quoted(name)} have no stage{near}", RESOLVE)
    if isinstance(command, rollout.RemoveStage):
        warnings = rollout.warn_of_raised(None, list_hosts(state, name))
        return Transaction(removed_stages=(name,), id=name, warnings=warnings)
    if command.set_at is not None and command.set_at != before.at:
        raise CommandError(f"the stage of nodes {quoted(name)} was set again meanwhile")
    if isinstance(command, rollout.AdvanceStage):
        if before.state != "canary":
            raise CommandError(f"the stage of nodes {quoted(name)} has no canary: it is {before.state}; set it again")
        stage = msgspec.structs.replace(before, state="everywhere")
        return Transaction(stages=(stage,), id=name, warnings=warn_of_advance(state, before))
    if before.state == "stopped":
        raise CommandError(f"the stage of nodes {quoted(name)} is already stopped")
    stage = msgspec.structs.replace(before, state="stopped", stopped=command.why or f"by {user}")
    return Transaction(stages=(stage,), id=name, warnings=rollout.warn_of_raised(stage, list_hosts(state, name)))


def _warn_of_set(stage: rollout.Stage, hosts: list[rollout.Host]) -> tuple[str, ...]:
    warnings = () if hosts else (f"no node fits {quoted(stage.nodes_filter)} now",)
    if hosts and stage.state == "canary" and not stage.canaries:
        warnings = (rollout.NO_CANARY,)
    return (*warnings, *rollout.warn_of_raised(stage, hosts))


def warn_of_advance(state: State, stage: rollout.Stage) -> tuple[str, ...]:
    """Describe hosts that will do more than any canary has proven, once all hosts of the stage follow it."""
    hosts = list_hosts(state, stage.nodes_filter)
    return rollout.warn_of_raised(msgspec.structs.replace(stage, state="everywhere"), hosts, _find_proven(state, stage))


def _find_proven(state: State, stage: rollout.Stage) -> set[Level]:
    """Return the levels at which canaries of the stage run now and follow it."""
    nodes = (state.nodes.get(each) for each in stage.canaries)
    abouts = (node.about for node in nodes if node is not None and node.is_online and node.about is not None)
    return {about.level for about in abouts if rollout.follows_stage(stage, about)}


def list_counts(state: State, stage: rollout.Stage) -> dict[str, rollout.CanaryCounts | None]:
    """Return the counters of a stage's canaries, None for a silent canary. A canary whose agent has just started and
    has not described itself yet is left out."""
    found: dict[str, rollout.CanaryCounts | None] = {}
    for node_id in stage.canaries:
        node = state.nodes.get(node_id)
        if node is None or not node.is_online:
            found[node_id] = None
        elif (about := node.about) is not None:
            found[node_id] = rollout.CanaryCounts(
                node.incarnation, about.late_core_seconds, about.foreign_writes, about.errors, node.last_seen,
                rollout.follows_stage(stage, about),
            )  # fmt: skip
    return found
