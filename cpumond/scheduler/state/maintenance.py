"""Nodes that get no new jobs, and those that are drained; pure (semantics.md 2.11)."""

from __future__ import annotations

import msgspec

from cpumond.core.words import did_you_mean, printable, quoted
from cpumond.scheduler.decide.victims import start_order
from cpumond.scheduler.elements import Job, Node
from cpumond.scheduler.model import RESOLVE, CommandError, Cordon, NodeRecord, to_amounts
from cpumond.scheduler.state import State
from cpumond.scheduler.state.node_commands import NodeCommand, make_cordon, tell_why
from cpumond.scheduler.state.transaction import Transaction


def prepare_node(state: State, command: NodeCommand, user: str, now: float) -> Transaction:
    """The change that a command makes. Raises CommandError for a node that is not known."""
    node, lost = state.nodes.get(command.node), state.lost_nodes.get(command.node)
    known = node or lost
    if known is None:
        near = did_you_mean(command.node, {**state.nodes, **state.lost_nodes})
        raise CommandError(f"Node {quoted(command.node)} is not registered{near}", RESOLVE)
    cordon = make_cordon(command, user, now)
    if _is_same(cordon, known.cordon):
        what = "not cordoned" if cordon is None else "drained" if cordon.drain else "cordoned"
        return Transaction(id=known.id, warnings=(f"node {quoted(known.id)} is {what} already; nothing is changed",))
    if node is not None:
        return Transaction(cordons=(msgspec.structs.replace(_record(node), cordon=cordon),), id=node.id)
    assert lost is not None
    return Transaction(lost_nodes=(msgspec.structs.replace(lost, cordon=cordon),), id=lost.id)


def _is_same(new: Cordon | None, old: Cordon | None) -> bool:
    if new is None or old is None:
        return new is old
    return (new.why, new.drain) == (old.why, old.drain)


def _record(node: Node) -> NodeRecord:
    tags = tuple(sorted(node.tags - {node.address}))
    tree = node.tree or "" if node.matched_trees else ""
    return NodeRecord(
        node.id, node.incarnation, node.address, tags, to_amounts(node.capacity), node.key_hash, tree, node.cordon
    )


def find_drained(node: Node) -> list[tuple[Job, str]]:
    """Jobs that must end because their node is drained, latest start first: interruptible ones, and the others when
    those have ended, so that these have that much longer to complete."""
    cordon = node.cordon
    if cordon is None or not cordon.drain or not node.jobs:
        return []
    jobs = sorted(node.jobs.values(), key=start_order, reverse=True)
    chosen = [job for job in jobs if job.task.interruptible]
    if not chosen and not any(job.task.interruptible for job in node.stopping.values()):
        chosen = jobs
    why = f"node {quoted(node.id)} drained by {printable(cordon.user)}{tell_why(cordon.why)}"
    return [(job, why) for job in chosen]
