"""Changes that the state itself requires, without a command, and time-outs of nodes; pure (semantics.md 2, 3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

import msgspec

from cpumond.scheduler.decide import admission
from cpumond.scheduler.decide.snapshot import describe_filters
from cpumond.scheduler.elements import Job, Operation, OperationElement
from cpumond.scheduler.events.noticed import make_silent_event
from cpumond.scheduler.model import (
    SUBPOOL_DELIMITER,
    UNSTORED_STARTS,
    JobRecord,
    JobState,
    OperationRecord,
    OperationTreeOptions,
)
from cpumond.scheduler.settings import incarnations, operations
from cpumond.scheduler.state import State, blame, lifecycle, retries, stuck
from cpumond.scheduler.state.lifecycle import count_ended
from cpumond.scheduler.state.nodes import LOST_S, forget_lost, lost_node
from cpumond.scheduler.state.reports import job_record, overrules
from cpumond.scheduler.state.transaction import NOTHING, Transaction


def settle(state: State, now: float) -> Transaction:
    """Return changes that the present state requires: operations without a tree end, those in switched-off sub-pools
    move, and pending ones are admitted (2.3, 2.9, 3.3). Each change is returned only once."""
    changed: dict[str, OperationRecord] = {}
    for operation in _find_too_long(state, now):
        changed[operation.id] = operations.exceed_time(operation.record, now, operation.active)
    for operation in _find_cut_short(state):
        changed[operation.id] = operations.cut_short(operation.record, now, operation.needed, operation.active)
    for operation in stuck.find_unmatched(state, now):
        record = changed.get(operation.id, operation.record)
        if not record.is_finished:
            told = " and ".join(describe_filters(each) for each in operation.elements.values())
            changed[operation.id] = operations.fail_unmatched(record, now, told)
    for name, (task, expected, actual) in list(state.gangs.lacking.items()):
        live = state.operations.get(name)
        if live is None:
            del state.gangs.lacking[name]
        elif name not in changed:
            changed[name] = incarnations.follow_revival(live.record, task, expected, actual, now)
    for operation in state.operations.values() if state.settled_config is not state.config else ():
        record = operations.keep_trees(changed.get(operation.id, operation.record), state.config.trees, now)
        if not record.is_finished:
            record = _without_closed_subpools(state, record)
        if record is not operation.record:
            changed[record.id] = record
    state.settled_config = state.config
    for tree in state.trees.values():
        work = state.work[tree.name]
        pending: Iterable[OperationElement] = (tree.queue if work.is_freed else work.arrived).values()
        work.is_freed, work.arrived = False, {}
        for element in admission.find_activated(tree, pending):
            record = changed.get(element.name, element.operation.record)
            if not record.is_finished and tree.name in record.trees:
                changed[record.id] = operations.activate(record, tree.name)
    return Transaction(operations=tuple(changed.values()))


def _find_too_long(state: State, now: float) -> list[Operation]:
    """Return live operations that exceeded their ``time_limit``, in each call until the operation's end is applied."""
    due: list[tuple[float, str]] = []
    while state.deadlines and state.deadlines[0][0] <= now:
        deadline = heappop(state.deadlines)
        if deadline[1] in state.operations:
            due.append(deadline)
    for deadline in due:
        heappush(state.deadlines, deadline)
    return [state.operations[operation_id] for _, operation_id in due]


def _find_cut_short(state: State) -> list[Operation]:
    """Return operations with ``fail_on_job_restart`` of which only some jobs were started before a restart of the
    scheduler. An operation is returned in each call until its end is applied."""
    state.cut_short = {name: None for name in state.cut_short if name in state.operations}
    return [state.operations[name] for name in state.cut_short]


def is_unsettled(state: State, now: float) -> bool:
    """Return whether ``settle`` or ``take_expired`` may find something."""
    if state.deadlines and state.deadlines[0][0] <= now:
        return True
    if state.settled_config is not state.config or state.expired or state.cut_short or state.gangs.lacking:
        return True
    return any(stuck.find_unmatched(state, now)) or any(work.is_freed or work.arrived for work in state.work.values())


def mark_unsettled(state: State) -> None:
    """Let ``settle`` return again the changes that were not applied."""
    state.settled_config = None
    for work in state.work.values():
        work.is_freed = True


def _without_closed_subpools(state: State, record: OperationRecord) -> OperationRecord:
    moved: dict[str, OperationTreeOptions] = {}
    for name, options in record.trees.items():
        parent_name, delimiter, _ = options.pool.partition(SUBPOOL_DELIMITER)
        parent = state.trees[name].pools.get(parent_name) if delimiter else None
        if parent is not None and parent.config is not None and not parent.settings.create_ephemeral_subpools:
            moved[name] = msgspec.structs.replace(options, pool=parent_name)
    return msgspec.structs.replace(record, trees={**record.trees, **moved}) if moved else record


def expire(state: State, now: float) -> Transaction:
    """Set silent nodes offline after the heartbeat time-out. Return a transaction that removes, with their jobs, nodes
    that were offline for the reconnection time-out of their tree (2.4)."""
    if state.has_unstored_starts and (not state.awaited or now >= state.await_until) and not state.unstored:
        state.has_unstored_starts = False
        state.expired[UNSTORED_STARTS] = None
    retries.end_waits(state, now)
    stuck.look(state, now)
    blame.end_pauses(state, now)
    gone: list[str] = []
    ended: list[JobRecord] = []
    for node in state.nodes.values():
        if node.is_online and now - node.last_seen > state.rules.node_heartbeat_timeout_s:
            node.is_online, node.lost_since = False, node.last_seen
            state.happened.append(make_silent_event(node, now))
        if node.lost_since is None:
            continue
        tree = state.trees.get(node.tree or "")
        timeout_s = tree.config.settings.node_reconnection_timeout / 1e3 if tree is not None else 0.0
        if now - node.lost_since > max(timeout_s, state.rules.node_heartbeat_timeout_s):
            gone.append(node.id)
            reason = f"node {node.id} was silent for {now - node.last_seen:.0f} s"
            ends: tuple[tuple[JobState, dict[str, Job]], ...] = ("lost", node.jobs), ("aborted", node.stopping)
            for end, jobs in ends:
                # If the start of the job was sent to the node, the node may have started the job.
                ended += [
                    job_record(job, end, now, reason=reason, may_have_run=job.first_sent_at is not None)
                    for job in jobs.values()
                ]
    for old in itertools.takewhile(lambda lost: lost.lost_at < now - LOST_S, list(state.lost_nodes.values())):
        if old.cordon is None and not old.user_tags:
            forget_lost(state, old.id)
    if not gone:
        return NOTHING
    return Transaction(operations=count_ended(state, ended, now), jobs=tuple(ended), removed_nodes=tuple(gone))


def recount(state: State, change: Transaction, now: float) -> Transaction:
    """Update a transaction of ended jobs: leave out jobs that were counted meanwhile, and nodes that came back before
    their removal; make the records of the operations again."""
    gone = [state.nodes[node_id] for node_id in change.removed_nodes if node_id in state.nodes]
    back = {node.id for node in gone if node.lost_since is None}
    fresh = {job.id: job for job in change.jobs if _is_news(state, job) and job.node_id not in back}
    jobs = tuple(lifecycle.blame_switches(state, _drop_repeated(fresh.values())))
    removed = [node for node in gone if node.id not in back]
    return msgspec.structs.replace(
        change, jobs=jobs, operations=count_ended(state, jobs, now), removed_nodes=tuple(node.id for node in removed),
        lost_nodes=tuple(lost_node(node, jobs, now) for node in removed),
    )  # fmt: skip


def _is_news(state: State, ended: JobRecord) -> bool:
    if ended.state == "completed" and lifecycle.is_done(state, ended):
        return False  # another job has done its work: it is being stopped, or was declared lost
    counted = state.finished_jobs.get(ended.operation_id, {}).get(ended.id)
    operation = state.operations.get(ended.operation_id)
    if counted is not None and operation is not None and counted.incarnation != operation.record.incarnation:
        return False
    return counted is None or overrules(ended.state, counted)


def _drop_repeated(ended: Iterable[JobRecord]) -> Iterator[JobRecord]:
    """Drop the second of two jobs that completed the same work: it counts as stopped (7.4)."""
    done: set[tuple[str, str, int]] = set()
    for job in ended:
        place = (job.operation_id, job.task, job.cookie)
        if job.state == "completed" and job.cookie >= 0:
            if place in done:
                continue
            done.add(place)
        yield job
