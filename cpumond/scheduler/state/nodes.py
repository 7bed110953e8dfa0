"""Registration of nodes, and refused nodes; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from cpumond.core.wire import NodeRegistration
from cpumond.fairshare.resources import ZERO
from cpumond.scheduler.elements import Node
from cpumond.scheduler.model import (
    ALREADY_EXISTS,
    TOO_MANY_REQUESTS,
    CommandError,
    JobRecord,
    LostNode,
    NodeRecord,
    to_amounts,
)
from cpumond.scheduler.state import State
from cpumond.scheduler.state.transaction import NOTHING, Transaction

KEPT_REFUSED = 100
REFUSED_S = 600.0
"""Number of refused nodes that are kept, and seconds for which each is kept after its last attempt to register."""
LOST_S = 86_400.0
KEPT_LOST = 1000
"""Seconds for which lost nodes are shown, and their maximum number; records of their jobs are mostly kept longer."""
MAX_LOST_JOBS = 1000
MAX_NODES = 10_000
MAX_TAGS = 100
MAX_NAMES_CHARS = 8192


class SeveralTreesError(CommandError):
    """A node's tags fit several trees. ``change`` keeps the node with its new tags if it is already known (2.2)."""

    def __init__(self, record: NodeRecord, tags: Collection[str], matched: list[str], change: Transaction) -> None:
        super().__init__(
            f"Node belongs to more than one pool tree: node {record.id!r} with tags {sorted(tags)} matches the "
            f"nodes_filter of {' and '.join(map(repr, matched))}; it gets no work: change its tags or the filters",
            attributes={"node_address": record.address, "matched_pool_trees": matched},
        )
        self.record = record
        self.matched = matched
        self.change = change


def register_node(state: State, registration: NodeRegistration, may_replace: bool = True) -> Transaction:
    """Register a node, or register it again with new tags or resources (2.2). ``registration.key`` is the key's hash.

    Raises CommandError for too many nodes or names, and SeveralTreesError if the node's tags fit several trees. Raises
    CommandError for a run of its agent that a later run replaced: two agents with one node id would replace each other
    for ever. Unless ``may_replace``, it also raises that for an agent without the key of the agent that is online."""
    address = registration.address or registration.node_id
    check_names(registration.node_id, registration.address, registration.tags)
    if registration.node_id not in state.nodes and len(state.nodes) >= MAX_NODES:
        raise CommandError(
            f"node {registration.node_id}: there are {MAX_NODES} nodes already, which is the limit; "
            "a silent one is removed after node_reconnection_timeout of its tree",
            TOO_MANY_REQUESTS,
        )
    known = state.nodes.get(registration.node_id)
    if known is not None and known.is_online and not may_replace and not _has_key_of(known, registration):
        raise CommandError(
            f"node {known.id} is alive, with another agent (address {known.address}). If this is a different host, "
            "give it its own node_id. If it is the same host and its agent lost node_key.state, wait until the agent's "
            f"previous run has been silent for node_heartbeat_timeout ({state.rules.node_heartbeat_timeout_s:g} s), "
            f'or bind the agent\'s token to the node (":node:{known.id}" in [api] tokens_file)',
            ALREADY_EXISTS,
        )
    if known is not None and registration.incarnation in known.replaced:
        raise CommandError(
            f"node {known.id}: the run {registration.incarnation} of its agent (address "
            f"{known.replaced[registration.incarnation]}) was replaced by the later run {known.run} "
            f"(address {known.address}); if these are two hosts, give each its own node_id; if not, end the "
            "agent that is left over"
        )
    resources = registration.resources
    capacity = {name: float(getattr(resources, name)) for name in to_amounts(ZERO)}
    before = known or state.lost_nodes.get(registration.node_id)
    record = NodeRecord(
        registration.node_id, registration.incarnation, address, tuple(registration.tags), capacity,
        registration.key, cordon=None if before is None else before.cordon,
        user_tags=() if before is None else before.user_tags,
    )  # fmt: skip
    matched = state.match_trees(record.all_tags)
    if len(matched) > 1:
        # A known node is kept with its new tags: its jobs continue, and it gets no new ones.
        change = NOTHING
        if known is not None:
            change = Transaction(nodes=(msgspec.structs.replace(record, tree=known.tree or ""),))
        raise SeveralTreesError(record, record.all_tags, matched, change)
    return Transaction(nodes=(record,), id=registration.node_id)


def forget_lost(state: State, node_id: str) -> None:
    del state.lost_nodes[node_id]
    state.expired["lost_node", node_id] = None


def keep_lost(state: State, lost_nodes: Iterable[LostNode]) -> None:
    for lost in lost_nodes:
        if lost.id in state.nodes:
            state.expired["lost_node", lost.id] = None  # the lost node is back
            continue
        state.lost_nodes.pop(lost.id, None)
        state.lost_nodes[lost.id] = lost
    while len(state.lost_nodes) > KEPT_LOST:
        forget_lost(state, next(iter(state.lost_nodes)))


def note_refused_node(state: State, refused: SeveralTreesError, now: float) -> None:
    """Keep a refused registration for a while: alerts show it."""
    state.refused_nodes.pop(refused.record.id, None)
    if refused.record.id not in state.nodes:
        state.refused_nodes[refused.record.id] = (now, tuple(refused.matched))
    while len(state.refused_nodes) > KEPT_REFUSED:
        del state.refused_nodes[next(iter(state.refused_nodes))]


def list_refused_nodes(state: State, now: float) -> dict[str, tuple[str, ...]]:
    """Return the nodes that were refused because they fit several trees: id -> names of these trees."""
    return {name: trees for name, (at, trees) in state.refused_nodes.items() if at > now - REFUSED_S}


def lost_node(node: Node, ended: Iterable[JobRecord], now: float) -> LostNode:
    """Return the record that shows a node declared lost. ``ended``: records of the jobs that were lost with it."""
    jobs = [job for job in ended if job.node_id == node.id]
    return LostNode(
        node.id, node.address, tuple(sorted(node.tags)), to_amounts(node.capacity), node.tree or "", node.last_seen,
        now, tuple(jobs[:MAX_LOST_JOBS]), node.cordon, node.user_tags,
    )  # fmt: skip


def check_names(node_id: str, address: str, tags: Collection[str]) -> None:
    """Check the length of names, which are stored and compared with every tree's filter. Raises CommandError."""
    size = len(node_id) + len(address) + sum(map(len, tags))
    if len(tags) > MAX_TAGS or size > MAX_NAMES_CHARS:
        raise CommandError(
            f"node {node_id[:100]!r}: at most {MAX_TAGS} tags are allowed, and {MAX_NAMES_CHARS} characters of "
            f"node_id, address and tags together; got {len(tags)} and {size}"
        )


def _has_key_of(node: Node, registration: NodeRegistration) -> bool:
    """Return whether a registration comes from the node's present agent: by its key or, without a key, by its run."""
    return registration.key == node.key_hash if node.key_hash else registration.incarnation == node.incarnation
