"""The scheduler's state and everything that changes it; pure: time and ids are arguments (semantics.md 2 to 9).

Two kinds of change. What must survive a crash goes through a ``Transaction``: ``prepare`` (a command), ``receive``
(what a heartbeat says has ended), ``settle`` and ``expire`` compute one without changing anything lasting, the caller
stores its records, then ``apply`` installs it. Loading a store is applying what is in it. Starts of jobs are applied
first, since they depend on each other, and stored before any answer has them (``starts_to_store``, ``note_stored``).
Usage is changed at once and comes back from the nodes' heartbeats after a restart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

import msgspec

from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.tree import Snapshot
from cpumond.scheduler.decide import admission, starvation
from cpumond.scheduler.elements import Operation, OperationElement, PoolElement, Tree, is_integral
from cpumond.scheduler.events.noticed import tell_silent
from cpumond.scheduler.model import (
    SUBPOOL_DELIMITER,
    UNTOLD_STARTS,
    JobRecord,
    LostNode,
    NodeRecord,
    OperationRecord,
    OperationTreeOptions,
    StartRecord,
)
from cpumond.scheduler.model.forecast import Forecast
from cpumond.scheduler.rights.token_records import TokenRecord
from cpumond.scheduler.settings import operations
from cpumond.scheduler.settings.rollout import Stage
from cpumond.scheduler.state.dispatch import Dispatch
from cpumond.scheduler.state.nodes import LOST_S, lost_node
from cpumond.scheduler.state.reports import job_record, overrules
from cpumond.scheduler.state.transaction import NOTHING, Transaction


class State(Dispatch):
    """Everything the scheduler knows. Used by one thread; not safe for more."""

    foretold: Mapping[str, Forecast] = {}
    """Operation -> what was last foretold of it, as a whole put in by whoever foretells; some may have ended since."""

    def settle(self, now: float) -> Transaction:
        """What follows from the present state: operations without a tree end, those of switched-off sub-pools move,
        pending ones whose turn it is run (2.3, 2.9, 3.3). What was found once is not found again."""
        changed: dict[str, OperationRecord] = {}
        for operation in self._find_too_long(now):
            changed[operation.id] = operations.exceed_time(operation.record, now, operation.active)
        for operation in self.operations.values() if self._settled_config is not self.config else ():
            record = operations.keep_trees(changed.get(operation.id, operation.record), self.config.trees, now)
            if not record.is_finished:
                record = self._without_closed_subpools(record)
            if record is not operation.record:
                changed[record.id] = record
        self._settled_config = self.config
        for tree in self.trees.values():
            pending: Iterable[OperationElement] = self._arrived.pop(tree.name, {}).values()
            if self._freed.pop(tree.name, False):
                pending = tree.queue.values()
            for element in admission.find_activated(tree, pending):
                record = changed.get(element.name, element.operation.record)
                if not record.is_finished and tree.name in record.trees:
                    changed[record.id] = operations.activate(record, tree.name)
        return Transaction(operations=tuple(changed.values()))

    def _find_too_long(self, now: float) -> list[Operation]:
        """Live operations whose ``time_limit`` is over; found again until their end is applied."""
        due: list[tuple[float, str]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline = heappop(self._deadlines)
            if deadline[1] in self.operations:
                due.append(deadline)
        for deadline in due:
            heappush(self._deadlines, deadline)
        return [self.operations[operation_id] for _, operation_id in due]

    def is_unsettled(self, now: float) -> bool:
        """Whether ``settle`` or ``take_expired`` may find something."""
        if self._deadlines and self._deadlines[0][0] <= now:
            return True
        unsettled = self._settled_config is not self.config or bool(self._freed) or any(self._arrived.values())
        return unsettled or bool(self._expired)

    def mark_unsettled(self) -> None:
        """Let ``settle`` find again what it found but was not applied."""
        self._settled_config = None
        self._freed = dict.fromkeys(self.trees, True)

    def _without_closed_subpools(self, record: OperationRecord) -> OperationRecord:
        moved: dict[str, OperationTreeOptions] = {}
        for name, options in record.trees.items():
            parent_name, delimiter, _ = options.pool.partition(SUBPOOL_DELIMITER)
            parent = self.trees[name].pools.get(parent_name) if delimiter else None
            if parent is not None and parent.config is not None and not parent.settings.create_ephemeral_subpools:
                moved[name] = msgspec.structs.replace(options, pool=parent_name)
        return msgspec.structs.replace(record, trees={**record.trees, **moved}) if moved else record

    def expire(self, now: float) -> Transaction:
        """Silent nodes go offline after the heartbeat time-out; after the tree's reconnection time-out the transaction
        removes them with their jobs (2.4)."""
        if self._has_untold_starts and (not self._awaited or now >= self._await_until) and not self._unstored:
            self._has_untold_starts = False
            self._expired[UNTOLD_STARTS] = None
        gone: list[str] = []
        ended: list[JobRecord] = []
        for node in self.nodes.values():
            if node.is_online and now - node.last_seen > self.rules.node_heartbeat_timeout_s:
                node.is_online, node.lost_since = False, node.last_seen
                self.happened.append(tell_silent(node, now))
            if node.lost_since is None:
                continue
            tree = self.trees.get(node.tree or "")
            timeout_s = tree.config.settings.node_reconnection_timeout / 1e3 if tree is not None else 0.0
            if now - node.lost_since > max(timeout_s, self.rules.node_heartbeat_timeout_s):
                gone.append(node.id)
                reason = f"node {node.id} was silent for {now - node.last_seen:.0f} s"
                ended += [job_record(job, "lost", now, reason=reason) for job in node.jobs.values()]
                ended += [job_record(job, "aborted", now, reason=reason) for job in node.stopping.values()]
        for old in itertools.takewhile(lambda lost: lost.lost_at < now - LOST_S, list(self.lost_nodes.values())):
            if old.cordon is None:
                self._forget_lost(old.id)
        if not gone:
            return NOTHING
        return Transaction(operations=self._count(ended, now), jobs=tuple(ended), removed_nodes=tuple(gone))

    def recount(self, change: Transaction, now: float) -> Transaction:
        """A transaction of ended jobs brought up to date: without jobs that were counted meanwhile and nodes that came
        back before they were removed, and with new records of the operations."""
        gone = [self.nodes[node_id] for node_id in change.removed_nodes if node_id in self.nodes]
        back = {node.id for node in gone if node.lost_since is None}
        fresh = {job.id: job for job in change.jobs if self._is_news(job) and job.node_id not in back}
        jobs = tuple(fresh.values())
        removed = [node for node in gone if node.id not in back]
        return replace(
            change,
            jobs=jobs,
            operations=self._count(jobs, now),
            removed_nodes=tuple(node.id for node in removed),
            lost_nodes=tuple(lost_node(node, jobs, now) for node in removed),
        )

    def _is_news(self, ended: JobRecord) -> bool:
        counted = self.finished_jobs.get(ended.operation_id, {}).get(ended.id)
        return counted is None or overrules(ended.state, counted)

    def apply(self, change: Transaction, now: float) -> None:
        """Install a stored change."""
        if change.config is not None:
            self._install_config(change.config, now)
        for node in change.nodes:
            self._install_node(node, now)
        for node in change.cordons:
            self.nodes[node.id].cordon = node.cordon
        if change.nodes or change.cordons:
            self._sum_totals()
        for ended in change.jobs:
            self._install_job(ended)
        for record in change.operations:
            self._install_operation(record, now)
        if change.jobs or change.operations:
            self.stop_broken_gangs(now)
        if change.abort_jobs_of:
            operation = self.operations[change.abort_jobs_of]
            for job in [job for element in operation.elements.values() for job in element.jobs.values()]:
                self._stop(job, "aborted", "the operation was suspended with abort_running_jobs", now)
        for node_id in change.removed_nodes:
            self._remove_node(self.nodes.pop(node_id))
        for digest in change.forgotten_tokens:
            self.tokens.drop(digest)
        for token in change.tokens:
            self.tokens.put(token)
        self._keep_lost(change.lost_nodes)
        if change.stages or change.removed_stages:
            self.change_stages(change.stages, change.removed_stages)

    def change_stages(self, stages: Iterable[Stage], removed: Iterable[str] = ()) -> None:
        """Take over stages of a roll-out: the next answer to each node tells its level."""
        self.stages.change(stages, removed)
        for node in self.nodes.values():
            node.level = self.stages.find_level(node.id, node.tags)

    def load(
        self,
        stored_operations: Iterable[OperationRecord],
        jobs: Iterable[JobRecord],
        nodes: Iterable[NodeRecord],
        now: float,
        starts: Iterable[StartRecord] = (),
        has_untold_starts: bool = False,
        tokens: Iterable[TokenRecord] = (),
        lost_nodes: Iterable[LostNode] = (),
        stages: Iterable[Stage] = (),
    ) -> None:
        """Take over what an earlier run stored, besides the configuration.

        Jobs that were started are on their nodes at once. With ``has_untold_starts`` some of them may not be stored:
        nothing is started in a tree until its stored nodes have reported their jobs, or are silent for too long.
        """
        self.change_stages(stages)
        for node in nodes:
            self._install_node(node, now)
            if has_untold_starts:
                self._awaited[node.id] = None
        self._keep_lost(sorted(lost_nodes, key=lambda lost: lost.lost_at))
        self._sum_totals()
        self._has_untold_starts = has_untold_starts
        self._await_until = now + self.rules.node_heartbeat_timeout_s
        for record in stored_operations:
            self._install_operation(record, now)
        for job in jobs:
            if job.operation_id in self.operations or job.operation_id in self.finished:
                self.finished_jobs.setdefault(job.operation_id, {})[job.id] = job
                self.job_sequence = max(self.job_sequence, job.sequence)
            else:
                self._expired["job", job.id] = None
        for start in starts:
            self._resume(start, now)
        # An earlier run may have ended between the end of one job and the order to stop the others.
        self.broken_gangs = dict.fromkeys(self.gangs, "one of its jobs ended before")
        self.stop_broken_gangs(now)
        for token in tokens:
            self.tokens.put(token)

    def make_snapshot(self, tree: Tree) -> Snapshot:
        """The tree as a fair-share update reads it."""
        if any(node.cordoned or node.matched_trees for node in tree.nodes.values()):
            tree.sum_total(are_nodes_same=True)  # jobs that were there have ended
        return self._makers[tree.name].make(tree)

    def accept_update(self, tree: Tree, result: UpdateResult, now: float) -> None:
        """Take over an update: shares, volumes, starvation, a new order of service."""
        self._makers[tree.name].accept(tree, result)
        starvation.update_starvation(tree, now)
        for element in tree.operations.values():
            element.deactivations.clear()
        self._forget_order(tree)

    def progress_of(self, tree: Tree) -> dict[str, Any]:
        """Volumes of integral pools, and since when elements are below their share (9); stored after each update.

        Explicit pools are named by their id: a pool that is renamed keeps its volume, a new one of its name does not.
        """
        volumes = {
            pool.config.id: pool.volume for pool in tree.pools.values() if pool.config is not None and is_integral(pool)
        }
        elements: list[PoolElement | OperationElement] = [*tree.pools.values(), *tree.operations.values()]
        since = {_key_of(each): each.below_since for each in elements if each.below_since is not None}
        return {"volumes": volumes, "below_since": since}

    def restore_progress(self, tree: Tree, progress: Mapping[str, Any]) -> None:
        """Take over the ``progress_of`` an earlier run; unknown and no longer integral pools are left out (9)."""
        known: list[PoolElement | OperationElement] = [*tree.pools.values(), *tree.operations.values()]
        elements = {_key_of(each): each for each in known}
        for key, volume in progress.get("volumes", {}).items():
            pool = elements.get(key)
            if isinstance(pool, PoolElement) and is_integral(pool):
                pool.volume = msgspec.convert(volume, tuple[float, float, float, float, float])
        for key, since in progress.get("below_since", {}).items():
            if key in elements:
                elements[key].below_since = since


def _key_of(element: PoolElement | OperationElement) -> str:
    """The name of an element in the store."""
    explicit = element.config if isinstance(element, PoolElement) else None
    return element.name if explicit is None else explicit.id
