"""Agents and the stages of a roll-out, as answers of the JSON API. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from cpumond.api.figures import View
from cpumond.core.levels import Level, lowest
from cpumond.core.wire import AgentAbout
from cpumond.scheduler.elements import Node
from cpumond.scheduler.settings.rollout import Stage, Watch
from cpumond.scheduler.state import State
from cpumond.scheduler.state.stages import list_nodes

LOOPBACK = ("127.", "[::1]", "localhost")
ANYWHERE = ("0.0.0.0", "[::]", "*", "")  # noqa: S104 - to compare with


class AgentView(View, frozen=True):
    """The agent of a node. ``about``: null for older agents, which report nothing about themselves. ``told``: the
    highest level that a roll-out's stages allow; it applies only if ``about.may_set_mode``."""

    id: str
    address: str
    tags: list[str]
    tree: str | None
    is_online: bool
    told: Level
    is_canary: bool
    about: AgentAbout | None


class Fleet(View, frozen=True):
    """All agents by node."""

    agents: list[AgentView]


class CanaryView(View, frozen=True):
    """Observations of a canary. ``late_cores``: mean per host in the last of ``checks``; the rest are totals."""

    checks: int
    late_cores: float
    late_checks: int
    foreign_writes: int
    errors: int


class StageView(View, frozen=True):
    """A stage. ``host_count``: number of nodes that match its filter now. ``reached``: number of these nodes that are
    at the stage's level, or at the highest that their configuration allows."""

    stage: Stage
    host_count: int
    reached: int
    canary: CanaryView | None


class Rollout(View, frozen=True):
    """All stages by their filters."""

    stages: list[StageView]


class TargetGroup(View, frozen=True):
    """A target of the service discovery of Prometheus (http_sd): the address to scrape, and its labels."""

    targets: list[str]
    labels: dict[str, str]


def view_fleet(state: State) -> Fleet:
    canaries = {name for stage in state.stages.list() if stage.state == "canary" for name in stage.canaries}
    return Fleet([_view_agent(node, canaries) for _, node in sorted(state.nodes.items())])


def _view_agent(node: Node, canaries: set[str]) -> AgentView:
    tags = sorted(node.tags - {node.address})
    return AgentView(
        node.id, node.address, tags, node.tree, node.is_online, node.level, node.id in canaries, node.about
    )


def view_rollout(state: State, watches: Mapping[str, Watch]) -> Rollout:
    return Rollout([_view_stage(state, stage, watches.get(stage.nodes_filter)) for stage in state.stages.list()])


def _view_stage(state: State, stage: Stage, watch: Watch | None) -> StageView:
    nodes = list_nodes(state, stage.nodes_filter)
    reached = sum(
        (about := node.about) is not None and about.may_set_mode and about.level == lowest(node.level, about.bound)
        for node in nodes
    )
    seen = None
    if watch is not None and stage.state == "canary":
        seen = CanaryView(watch.checks, watch.late_cores, watch.late_checks, watch.foreign_writes, watch.errors)
    return StageView(stage, len(nodes), reached, seen)


def view_targets(state: State, with_loopback: bool = False) -> list[TargetGroup]:
    """Return the targets of registered agents. Agents that listen only on loopback are left out, unless everything runs
    on one machine (``with_loopback``)."""
    found = []
    for name, node in sorted(state.nodes.items()):
        about = node.about
        host, _, port = ("", "", "") if about is None else about.metrics.rpartition(":")
        if about is None or not port or (host.startswith(LOOPBACK) and not with_loopback):
            continue
        where = node.address if host in ANYWHERE else host
        target = f"[{where}]:{port}" if ":" in where and not where.startswith("[") else f"{where}:{port}"
        labels = {
            "node": name,
            "__meta_cpumond_tree": node.tree or "",
            "__meta_cpumond_tags": "," + "".join(f"{tag}," for tag in sorted(node.tags - {node.address})),
            "__meta_cpumond_version": about.version,
            "__meta_cpumond_level": about.level,
        }
        found.append(TargetGroup([target], labels))
    return found
