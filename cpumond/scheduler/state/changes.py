"""Applies changes to the state: transactions that are stored, and the stored data of an earlier run; pure."""

from __future__ import annotations

from collections.abc import Iterable

from cpumond.core.levels import SAFE
from cpumond.scheduler.model import Config, JobRecord, LostNode, NodeRecord, OperationRecord, Rules, StartRecord
from cpumond.scheduler.model.budget import BudgetRecord
from cpumond.scheduler.rights.token_records import TokenRecord
from cpumond.scheduler.rights.vaults import SealedVault
from cpumond.scheduler.settings.operations import is_cut_short
from cpumond.scheduler.settings.rollout import Stage
from cpumond.scheduler.state import State, blame, budgets, incarnations, install, lifecycle, retries
from cpumond.scheduler.state.nodes import keep_lost
from cpumond.scheduler.state.starts import carry_out, resume
from cpumond.scheduler.state.transaction import Transaction


def make_state(rules: Rules, config: Config) -> State:
    """Make a state with only the trees and pools of a configuration."""
    state = State(rules)
    install.install_config(state, config, 0.0)
    return state


def apply(state: State, change: Transaction, now: float) -> None:
    if state.budgets or change.settled:
        budgets.take(state, change)
    if change.config is not None:
        install.install_config(state, change.config, now)
    for node in change.nodes:
        install.install_node(state, node, now)
    blame.forget_decided(state, change.kept_nodes)
    for node in change.kept_nodes:
        install.install_maintenance(state, node, now)
    if change.nodes or change.kept_nodes:
        install.sum_totals(state)
    blame.note_ends(state, change.jobs, change.operations, now)
    for ended in change.jobs:
        install.install_job(state, ended, now)
    state.vaults.update({vault.operation_id: vault for vault in change.vaults})
    for record in change.operations:
        state.gangs.started_count += bool(record.incarnations) and state.record_of(record.id) is None
        install.install_operation(state, record, now)
    if change.jobs or change.operations:
        lifecycle.stop_broken_gangs(state, now)
    if change.stops is not None:
        carry_out(state, change.stops, now)
    for node_id in change.removed_nodes:
        install.remove_node(state, state.nodes.pop(node_id), now)
    for digest in change.forgotten_tokens:
        state.tokens.drop(digest)
    for token in change.tokens:
        state.tokens.put(token)
    keep_lost(state, change.lost_nodes)
    if change.stages or change.removed_stages:
        _change_stages(state, change.stages, change.removed_stages)


def _change_stages(state: State, stages: Iterable[Stage], removed: Iterable[str] = ()) -> None:
    """Apply stages of a roll-out: the next heartbeat response to each node contains the node's level."""
    state.stages.change(stages, removed)
    nodes = list(state.nodes.values())
    for node, level in zip(nodes, state.stages.find_levels([(node.id, node.tags) for node in nodes]), strict=True):
        node.level = level or SAFE


def load(
    state: State, now: float, *, operations: Iterable[OperationRecord], vaults: Iterable[SealedVault],
    jobs: Iterable[JobRecord], nodes: Iterable[NodeRecord], starts: Iterable[StartRecord], has_unstored_starts: bool,
    tokens: Iterable[TokenRecord], lost_nodes: Iterable[LostNode], stages: Iterable[Stage],
    of_budgets: Iterable[BudgetRecord] = (),
) -> None:  # fmt: skip
    """Load the stored data of an earlier run, except the configuration, each kind in its original order.

    Jobs with a stored start count as being on their nodes at once. With ``has_unstored_starts`` some starts may not be
    stored; if so, a tree starts no jobs until its stored nodes have reported their jobs or time out."""
    _change_stages(state, stages)
    budgets.restore(state, of_budgets)
    for node in nodes:
        install.install_node(state, node, now)
        if has_unstored_starts:
            state.awaited[node.id] = None
    keep_lost(state, lost_nodes)
    install.sum_totals(state)
    state.has_unstored_starts = has_unstored_starts
    state.await_until = now + state.rules.node_heartbeat_timeout_s
    state.vaults = {vault.operation_id: vault for vault in vaults}
    for record in operations:
        install.install_operation(state, record, now)
    for operation_id in sorted(state.vaults.keys() - state.operations.keys()):
        del state.vaults[operation_id]
        state.expired["vault", operation_id] = None
    for job in jobs:
        if job.operation_id in state.operations or job.operation_id in state.finished:
            install.keep_job(state, job)
            state.job_sequence = max(state.job_sequence, job.sequence)
            lifecycle.note_ended(state, job)
        else:
            state.expired["job", job.id] = None
    # Jobs with a stored cookie come first: jobs without one get cookies that are still free.
    for start in sorted(starts, key=lambda start: start.cookie < 0):
        resume(state, start, now)
    for operation in state.operations.values():
        retries.follow(state, operation, now)
        if is_cut_short(operation.record, operation.needed, operation.active):
            state.cut_short[operation.id] = None
    lifecycle.fill_places(state)
    incarnations.note_lacks(state)
    # An earlier run may have exited between the end of one job of a gang and the request to stop its other jobs.
    state.gangs.broken = dict.fromkeys(state.gangs.live, "one of its jobs ended before")
    lifecycle.stop_broken_gangs(state, now)
    for token in tokens:
        state.tokens.put(token)
