"""Administrators' settings of nodes: cordons, drains, tags; pure (semantics.md 2.1, 2.11)."""

from __future__ import annotations

import msgspec

from cpumond.core.words import count, did_you_mean, printable, quoted
from cpumond.scheduler.decide.victims import start_order
from cpumond.scheduler.elements import Job, Node
from cpumond.scheduler.model import RESOLVE, CommandError, Cordon, LostNode, NodeRecord, to_amounts
from cpumond.scheduler.settings.nodes_filter import TAG_RULE, is_tag
from cpumond.scheduler.settings.values import FIELD
from cpumond.scheduler.state import State, node_commands
from cpumond.scheduler.state.nodes import check_names
from cpumond.scheduler.state.transaction import Transaction


def prepare_node(state: State, command: node_commands.NodeCommand, user: str, now: float) -> Transaction:
    """Return the change that a command makes. Raises CommandError for an unknown node."""
    node, lost = state.nodes.get(command.node), state.lost_nodes.get(command.node)
    known = node or lost
    if known is None:
        near = did_you_mean(command.node, {**state.nodes, **state.lost_nodes})
        raise CommandError(f"Node {quoted(command.node)} is not registered{near}", RESOLVE)
    record: LostNode | NodeRecord = known if isinstance(known, LostNode) else _record(known)
    changed, warnings = record, list[str]()
    if isinstance(command, node_commands.Maintenance):
        cordon = node_commands.make_cordon(command, user, now)
        if not _is_same(cordon, record.cordon):
            changed = msgspec.structs.replace(record, cordon=cordon)
        what = "not cordoned" if cordon is None else "drained" if cordon.drain else "cordoned"
    else:
        changed = msgspec.structs.replace(record, user_tags=_read_tags(command, record))
        what = "tagged so"
        if isinstance(known, Node) and isinstance(changed, NodeRecord) and changed != record:
            warnings = _check_trees(state, known, changed)
    is_released = isinstance(command, node_commands.UncordonNode) and isinstance(known, Node) and known.is_held_off
    if changed == record and not is_released:
        return Transaction(id=known.id, warnings=(f"node {quoted(known.id)} is already {what}; nothing changed",))
    if isinstance(changed, LostNode):
        return Transaction(lost_nodes=(changed,), id=known.id)
    return Transaction(kept_nodes=(changed,), id=known.id, warnings=tuple(warnings))


def _read_tags(
    command: node_commands.SetNodeTags | node_commands.ChangeNodeTags, record: LostNode | NodeRecord
) -> tuple[str, ...]:
    """Return the administrator's tags after the command, sorted and each once. Raises CommandError for tags that a
    formula cannot contain, and for tags that cannot be removed."""
    tags = set(command.tags if isinstance(command, node_commands.SetNodeTags) else (*record.user_tags, *command.add))
    for tag in sorted(tags):
        if not is_tag(tag):
            raise CommandError(f"user_tags: {quoted(tag)} is no tag: {TAG_RULE}", attributes={FIELD: "user_tags"})
    for tag in command.remove if isinstance(command, node_commands.ChangeNodeTags) else ():
        if tag not in tags:
            own = isinstance(record, NodeRecord) and tag in record.all_tags
            what = (
                "one of its agent's own tags; change [scheduler] tags there"
                if own
                else f"not one of {sorted(record.user_tags)}"
            )
            raise CommandError(f"user_tags: {quoted(tag)} is {what}", attributes={FIELD: "user_tags"})
        tags.discard(tag)
    return tuple(sorted(tags))


def _check_trees(state: State, node: Node, new: NodeRecord) -> list[str]:
    """Return warnings about a change of a node's tags. Raises CommandError if the new tags fit several trees (2.2)."""
    check_names(new.id, new.address, new.user_tags)
    matched = state.match_trees(new.all_tags)
    if len(matched) > 1:
        trees = " and ".join(map(quoted, matched))
        raise CommandError(
            f"node {quoted(new.id)} with tags {sorted(new.all_tags)} would match the nodes_filter of {trees}; give it "
            "other tags, or make the filters exclude each other",
            attributes={FIELD: "user_tags"},
        )
    tree = matched[0] if matched else ""
    if tree == (node.tree or ""):
        return []
    names = [f"tree {quoted(name)}" if name else "no tree" for name in (node.tree or "", tree)]
    lost = f"; {count(len(node.jobs), 'job')} on it {'is' if len(node.jobs) == 1 else 'are'} aborted"
    return [f"node {quoted(new.id)} goes from {names[0]} to {names[1]}{lost if node.jobs else ''}"]


def _is_same(new: Cordon | None, old: Cordon | None) -> bool:
    return new is old if new is None or old is None else (new.why, new.drain) == (old.why, old.drain)


def _record(node: Node) -> NodeRecord:
    tree = node.tree or "" if node.matched_trees else ""
    return NodeRecord(
        node.id, node.incarnation, node.address, node.agent_tags, to_amounts(node.capacity), node.key_hash, tree,
        node.cordon, node.user_tags,
    )  # fmt: skip


def find_drained(node: Node) -> list[tuple[Job, str]]:
    """Return jobs to stop because their node is drained, latest start first. Interruptible jobs are stopped first. The
    other jobs follow once the interruptible ones have ended, and therefore have more time to complete."""
    cordon = node.cordon
    if cordon is None or not cordon.drain or not node.jobs:
        return []
    jobs = sorted(node.jobs.values(), key=start_order, reverse=True)
    chosen = [job for job in jobs if job.task.interruptible]
    if not chosen and not any(job.task.interruptible for job in node.stopping.values()):
        chosen = jobs
    why = f"node {quoted(node.id)} drained by {printable(cordon.user)}{node_commands.format_why(cordon.why)}"
    return [(job, why) for job in chosen]
