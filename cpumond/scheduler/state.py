"""The scheduler's state and everything that changes it; pure: time and ids are arguments (semantics.md 2 to 9).

Two kinds of change. What must survive a crash goes through a ``Transaction``: ``prepare`` (a command), ``receive``
(what a heartbeat says has ended), ``settle`` and ``expire`` compute one without changing anything lasting, the caller
stores its records, then ``apply`` installs it. Loading a store is applying what is in it. The rest, usage and running
jobs, is changed at once and comes back from the nodes' heartbeats after a restart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, TypeVar

import msgspec

from cpumond.fairshare.resources import CPU, ZERO, Vector, add, sum_vectors
from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.tree import Snapshot
from cpumond.scheduler import admission, operations, preemption, starvation
from cpumond.scheduler.commands import NOTHING, Command, Rules, Transaction, prepare
from cpumond.scheduler.elements import (
    CPU_COUNTERS,
    CpuTimes,
    Job,
    Node,
    Operation,
    OperationElement,
    PoolElement,
    Stop,
    Tree,
    add_cpu_time,
    change_usage,
    count_cpu_time,
    cpu_times,
    end_job,
    start_job,
)
from cpumond.scheduler.model import (
    ALREADY_EXISTS,
    NO_SUCH_JOB,
    NO_SUCH_OPERATION,
    NO_TREE_SETTINGS,
    RESOLVE,
    ROOT_POOL,
    SUBPOOL_DELIMITER,
    TOO_MANY_REQUESTS,
    CommandError,
    Config,
    JobRecord,
    JobState,
    NodeRecord,
    OperationRecord,
    OperationTreeOptions,
    PreemptionRecord,
    Task,
    to_amounts,
    to_vector,
)
from cpumond.scheduler.nodes_filter import NodesFilter, parse_nodes_filter
from cpumond.scheduler.placement import ServiceOrder, place_jobs, wants_jobs
from cpumond.scheduler.snapshot import SnapshotMaker, operation_limits, pool_limits
from cpumond.scheduler.spec_room import SpecRoom, weigh_change
from cpumond.wire import (
    FinishedJob,
    Heartbeat,
    HeartbeatAnswer,
    JobOrder,
    JobReport,
    NodeRegistration,
    StopOrder,
)

Told = TypeVar("Told", JobReport, FinishedJob)

KEPT_PREEMPTIONS = 10_000
MAX_NODE_FAILURE_REASON = 1000
KEPT_INCARNATIONS = 8
KEPT_REFUSED = 100
REFUSED_S = 600.0
"""How many nodes that were refused are remembered, and how long after their last try; agents try again and again."""
MAX_NODES = 10_000
MAX_TAGS = 100
MAX_NAMES_CHARS = 8192
SPARE_DEADLINES = 100
"""Deadlines of ended operations that are kept at least, so that they are rarely looked for."""
START_GRACE_PERIODS = 2.0
"""Heartbeat periods after which a node's own word on a job that had no room there should have come."""
MAX_ORDERS = 200
MAX_ORDER_BYTES = 1_048_576
"""The jobs to start of one answer: how many, and how much JSON unless it is just one. Agents refuse huge answers."""
UNSENT_TIMEOUTS = 10.0
"""Times waiting_job_timeout: how long a job may wait for an answer that has room for its order."""
MOST_CORES, MOST_OF_CAPACITY, LATE_S = 1024.0, 16.0, 60.0
"""A job used, or was held back on, at most so many cores, or times its node's capacity, where that is more; a report
may be so late."""
NO_CPU_TIMES: CpuTimes = (None, None, None, None, None)
GIVEN_UP: frozenset[JobState] = frozenset({"aborted", "lost"})
"""How a job ends that its node may still have: what the node says of it later is heard."""


@dataclass(slots=True)
class Receipt:
    """What a heartbeat led to: whether it counts, what must be stored, what the answer acknowledges then."""

    accepted: bool
    reason: str = ""
    register: bool = False
    transaction: Transaction = NOTHING
    acknowledged: list[str] = field(default_factory=list)


class SeveralTreesError(CommandError):
    """A node whose tags fit several trees; ``change`` is what is kept of it where it is known already (2.2)."""

    def __init__(self, record: NodeRecord, tags: Collection[str], matched: list[str], change: Transaction) -> None:
        super().__init__(
            f"Node belongs to more than one pool tree: node {record.id!r} with tags {sorted(tags)} matches the "
            f"nodes_filter of {' and '.join(map(repr, matched))}; it gets no work: change its tags or the filters",
            attributes={"node_address": record.address, "matched_pool_trees": matched},
        )
        self.record = record
        self.matched = matched
        self.change = change


class State:
    """Everything the scheduler knows. Used by one thread; not safe for more."""

    def __init__(self, rules: Rules, config: Config) -> None:
        self.rules = rules
        self.config = Config({})
        self.trees: dict[str, Tree] = {}
        self.operations: dict[str, Operation] = {}
        """Live ones, pending or running, in order of arrival."""
        self.finished: dict[str, OperationRecord] = {}
        """Finished ones, the first finished first."""
        self.finished_jobs: dict[str, dict[str, JobRecord]] = {}
        """Operation -> its finished jobs by id, as long as the operation is known."""
        self.spec_room = SpecRoom(rules.max_specification_memory)
        self.config_bytes = 0
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[str, Job] = {}
        """Active and stopping jobs."""
        self.refused_nodes: dict[str, tuple[float, tuple[str, ...]]] = {}
        """Nodes that are not known because their tags fit several trees: when they last tried, and the trees."""
        self.preemptions: deque[PreemptionRecord] = deque(maxlen=KEPT_PREEMPTIONS)
        self.preemption_counts: dict[tuple[str, str, str], int] = {}
        """(tree, pool of the victim, kind) -> preemptions since the start."""
        self.ended_elements: deque[OperationElement] = deque(maxlen=0)
        """Operations that left a tree, for a history: it puts one in place that has room, and takes them out."""
        self.config_warnings: dict[tuple[str, str], tuple[str, ...]] = {}
        self.sequence = 0
        self.job_sequence = 0
        self._makers: dict[str, SnapshotMaker] = {}
        self._orders: dict[str, ServiceOrder] = {}
        self._starving: dict[str, preemption.Targets] = {}
        self._settled_config: Config | None = None
        self._freed: dict[str, bool] = {}
        """Trees whose whole queue must be looked at: a slot became free, or limits changed (3.3)."""
        self._arrived: dict[str, dict[str, OperationElement]] = {}
        """Tree -> pending operations that came since; the ones before them were blocked and still are."""
        self._filters: dict[str, NodesFilter] = {}
        self._deadlines: list[tuple[float, str]] = []
        """A heap of when operations have a ``time_limit`` that is over, and their ids; some may have ended."""
        self._expired: dict[tuple[str, str], None] = {}
        self._awaited: dict[str, None] = {}
        self._await_until = 0.0
        """Nodes of an earlier run, and until when their first heartbeats are waited for."""
        self._install_config(config, 0.0)

    # --- commands ------------------------------------------------------------------------------------------------

    def prepare(self, command: Command, user: str, now: float, new_id: Callable[[], str]) -> Transaction:
        """The change that a command makes. Raises CommandError when it is refused; nothing is changed here."""
        return prepare(self, command, user, now, new_id)

    def find_record(self, operation_id: str) -> OperationRecord:
        """The record of an operation, by id or ``*alias``. Raises CommandError."""
        live = self.operations.get(operation_id)
        if live is not None:
            return live.record
        record = self.finished.get(operation_id)
        if record is None and operation_id.startswith("*"):
            known = [*(each.record for each in self.operations.values()), *reversed(self.finished.values())]
            record = next((each for each in known if each.alias == operation_id), None)
        if record is None:
            raise CommandError(f"No such operation {operation_id}", NO_SUCH_OPERATION)
        return record

    def find_job_node(self, operation_id: str, job_id: str) -> str:
        """The node that a job of an operation (id or ``*alias``) runs or ran on. Raises CommandError."""
        record = self.find_record(operation_id)
        job = self.jobs.get(job_id)
        if job is not None and job.element.operation.id == record.id:
            if not job.was_reported:
                raise CommandError(f"job {job_id} has not started yet on node {job.node.id}; try again", NO_SUCH_JOB)
            return job.node.id
        ended = self.finished_jobs.get(record.id, {}).get(job_id)
        if ended is None:
            raise CommandError(f"No such job {job_id} in operation {record.id}", NO_SUCH_JOB)
        return ended.node_id

    def find_tree(self, name: str) -> Tree:
        """A tree by name. Raises CommandError."""
        tree = self.trees.get(name)
        if tree is None:
            raise CommandError(f'Pool tree "{name}" does not exist; known trees: {", ".join(self.trees)}', RESOLVE)
        return tree

    # --- follow-ups ----------------------------------------------------------------------------------------------

    def settle(self, now: float) -> Transaction:
        """What follows from the state as it is: operations without a tree end, those of switched-off sub-pools move,
        pending ones whose turn it is run (2.3, 2.9, 3.3). What was found once is not looked for again."""
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

    def look_again(self) -> None:
        """What ``settle`` found was not applied: find it once more."""
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
        """Nodes that are silent: not online after the heartbeat time-out; gone, with their jobs, after the tree's
        reconnection time-out (2.4)."""
        gone: list[str] = []
        ended: list[JobRecord] = []
        for node in self.nodes.values():
            if node.is_online and now - node.last_seen > self.rules.node_heartbeat_timeout_s:
                node.is_online, node.lost_since = False, node.last_seen
            if node.lost_since is None:
                continue
            tree = self.trees.get(node.tree or "")
            timeout_s = tree.config.settings.node_reconnection_timeout / 1e3 if tree is not None else 0.0
            if now - node.lost_since > max(timeout_s, self.rules.node_heartbeat_timeout_s):
                gone.append(node.id)
                reason = f"node {node.id} was silent for {now - node.last_seen:.0f} s"
                ended += [_job_record(job, "lost", now, reason=reason) for job in node.jobs.values()]
                ended += [_job_record(job, "aborted", now, reason=reason) for job in node.stopping.values()]
        if not gone:
            return NOTHING
        return Transaction(operations=self._count(ended, now), jobs=tuple(ended), removed_nodes=tuple(gone))

    def _count(self, ended: Collection[JobRecord], now: float) -> tuple[OperationRecord, ...]:
        """The records of the operations whose jobs ended; jobs that are stopped with an operation's end count, too."""
        changed: dict[str, OperationRecord] = {}
        for job in ended:
            operation = self.operations.get(job.operation_id)
            record = changed.get(job.operation_id) or (operation.record if operation else None)
            if record is not None:
                changed[record.id] = operations.count_job(record, job.task, job.state, job.reason, now)
        for record in [record for record in changed.values() if record.is_finished]:
            stopped = dict(self.operations[record.id].active)
            for job in ended:
                live = self.jobs.get(job.id)
                if live is not None and (live.is_active or live.is_failing) and job.operation_id == record.id:
                    stopped[job.task] -= 1
            changed[record.id] = operations.finish(record, record.state, now, record.error, stopped)
        return tuple(changed.values())

    def recount(self, change: Transaction, now: float) -> Transaction:
        """A transaction of ended jobs as it is by now: without the jobs that were counted since, and without nodes that
        came back before they were removed; operations anew."""
        gone = [self.nodes[node_id] for node_id in change.removed_nodes if node_id in self.nodes]
        back = {node.id for node in gone if node.lost_since is None}
        fresh = {job.id: job for job in change.jobs if self._is_news(job) and job.node_id not in back}
        jobs = tuple(fresh.values())
        removed = tuple(node.id for node in gone if node.id not in back)
        return replace(change, jobs=jobs, operations=self._count(jobs, now), removed_nodes=removed)

    def _is_news(self, ended: JobRecord) -> bool:
        counted = self.finished_jobs.get(ended.operation_id, {}).get(ended.id)
        return counted is None or _overrules(ended.state, counted)

    # --- applying ------------------------------------------------------------------------------------------------

    def apply(self, change: Transaction, now: float) -> None:
        """Install a stored change."""
        if change.config is not None:
            self._install_config(change.config, now)
        for node in change.nodes:
            self._install_node(node, now)
        for ended in change.jobs:
            self._install_job(ended)
        for record in change.operations:
            self._install_operation(record, now)
        if change.abort_jobs_of:
            operation = self.operations[change.abort_jobs_of]
            for job in [job for element in operation.elements.values() for job in element.jobs.values()]:
                self._stop(job, "aborted", "the operation was suspended with abort_running_jobs", now)
        for node_id in change.removed_nodes:
            self._remove_node(self.nodes.pop(node_id))

    def load(
        self,
        stored_operations: Iterable[OperationRecord],
        jobs: Iterable[JobRecord],
        nodes: Iterable[NodeRecord],
        now: float,
    ) -> None:
        """Take over what an earlier run stored, besides the configuration.

        Nothing is started until the nodes of then have said which jobs they have, or are silent for too long.
        """
        for node in nodes:
            self._install_node(node, now)
            self._awaited[node.id] = None
        self._await_until = now + self.rules.node_heartbeat_timeout_s
        for record in stored_operations:
            self._install_operation(record, now)
        for job in jobs:
            if job.operation_id in self.operations or job.operation_id in self.finished:
                self.finished_jobs.setdefault(job.operation_id, {})[job.id] = job
                self.job_sequence = max(self.job_sequence, job.sequence)
            else:
                self._expired["job", job.id] = None

    def _install_config(self, config: Config, now: float) -> None:
        old, self.config = self.config, config
        self.config_bytes += weigh_change(old, config)
        for name in [name for name in self.trees if name not in config.trees]:
            self._remove_tree(self.trees.pop(name), now)
        for name, tree_config in config.trees.items():
            tree = self.trees.get(name)
            if tree is None:
                tree = self.trees[name] = Tree(tree_config)
                self._makers[name] = SnapshotMaker()
            if old.trees.get(name) is not tree_config:
                tree.config = tree_config
                self._filters[name] = parse_nodes_filter(tree_config.settings.nodes_filter)
                self._sync_pools(tree)
        for node in self.nodes.values():
            self._assign(node, now)
        for tree in self.trees.values():
            _sum_total(tree)

    def _remove_tree(self, tree: Tree, now: float) -> None:
        for element in list(tree.operations.values()):
            for job in list(element.jobs.values()):
                self._stop(job, "aborted", f'pool tree "{tree.name}" was removed', now)
            del element.operation.elements[tree.name]
            self.ended_elements.append(element)
        for node in tree.nodes.values():
            node.tree = None
        for table in (self._makers, self._orders, self._starving, self._filters, self._freed, self._arrived):
            table.pop(tree.name, None)

    def _sync_pools(self, tree: Tree) -> None:
        """Give the living pools their new configuration; see section 2.9 for what becomes of removed and new ones."""
        before = tree.pools
        were_ephemeral = {pool for pool in before.values() if pool.config is None}
        by_id = {pool.config.id: pool for pool in before.values() if pool.config is not None}
        pools: dict[str, PoolElement] = {}
        for config in tree.config.pools.values():
            pool = by_id.pop(config.id, None)
            if pool is None:
                namesake = before.get(config.name)
                pool = namesake if namesake is not None and namesake.config is None else None
            if pool is None:
                pool = PoolElement(config.name, tree.root, tree)
            if pool.config is None:
                pool.volume, pool.last_integral_ratio = ZERO, 0.0
            pool.name, pool.config, pool.settings = config.name, config, config.settings
            pool.parent = pools.get(config.parent, tree.root)
            pools[config.name] = pool
        tree.pools = pools
        for old_name, pool in before.items():
            if pool.name in pools:
                for element in pool.operations.values() if pools[pool.name] is not pool else ():
                    element.parent = pools[pool.name]  # an explicit pool has the name now
                continue
            if not pool.operations and not any(child.is_ephemeral for child in pool.children.values()):
                continue
            prefix, delimiter, child = old_name.partition(SUBPOOL_DELIMITER)
            if delimiter and prefix in before:
                # A renamed pool takes the names of its ephemeral sub-pools along.
                pool.name = f"{before[prefix].name}{delimiter}{child}"
            pool.config = None
            pools[pool.name] = pool
        _place_ephemeral(tree, were_ephemeral)
        for pool in pools.values():
            pool.entry = None
        self._relocate(tree)

    def _relocate(self, tree: Tree) -> None:
        """Children, operations, counts, limits of counts and rules of all pools anew, from parents and operations."""
        settings = tree.config.settings
        root = tree.root
        root.max_operation_count = settings.max_operation_count
        root.max_running_operation_count = settings.max_running_operation_count
        root.rules = starvation.root_rules(settings)
        for pool in (root, *tree.pools.values()):
            pool.children, pool.operations = {}, {}
            pool.operation_count = pool.running_operation_count = 0
        for pool in tree.pools.values():
            assert pool.parent is not None
            assert pool.parent.rules is not None
            pool.parent.children[pool.name] = pool
            pool.max_operation_count, pool.max_running_operation_count = admission.operation_limits(
                pool.settings, settings
            )
            pool.rules = starvation.pool_rules(pool.parent.rules, pool.settings)
            pool.limits = pool_limits(pool)
        for element in tree.operations.values():
            assert element.parent is not None
            self._attach(element, element.parent)
        for pool in (root, *tree.pools.values()):
            parts = [job.usage for element in pool.operations.values() for job in element.jobs.values()]
            pool.usage = sum_vectors(parts)
        for pool in reversed(tree.pools.values()):
            assert pool.parent is not None
            pool.parent.usage = add(pool.parent.usage, pool.usage)
        self._forget_order(tree)
        self._freed[tree.name] = True

    def _forget_order(self, tree: Tree) -> None:
        """Order of service and who may preempt anew: shares, or what stands above an operation, have changed."""
        self._orders.pop(tree.name, None)
        self._starving.pop(tree.name, None)

    def _attach(self, element: OperationElement, pool: PoolElement) -> None:
        """Put an operation into a pool: counts on the way up, rules; usage is the caller's."""
        element.parent = pool
        element.entry = None
        assert pool.rules is not None
        element.rules = starvation.operation_rules(pool.rules, element.options)
        element.limits = operation_limits(element)
        element.lists_are_old = True
        pool.operations[element.name] = element
        for each in element.ancestors():
            each.operation_count += 1
            each.running_operation_count += element.is_running

    def _detach(self, element: OperationElement) -> None:
        self._freed[element.tree.name] = True
        pool = element.parent
        assert pool is not None
        del pool.operations[element.name]
        for each in element.ancestors():
            each.operation_count -= 1
            each.running_operation_count -= element.is_running

    def _drop_if_empty(self, pool: PoolElement) -> None:
        """An ephemeral pool goes with its last operation or child, and so upwards (2.9)."""
        while pool.is_ephemeral and not pool.operations and not pool.children:
            parent = pool.parent
            assert parent is not None
            del parent.children[pool.name], pool.tree.pools[pool.name]
            self._orders.pop(pool.tree.name, None)
            pool = parent

    def _ensure_pool(self, tree: Tree, name: str, removed: str = "") -> PoolElement:
        """The living pool of that name; a missing one is made, ephemeral (2.9).

        ``removed``: the pool that it was in, if that is not explicit any more; it is made, too.
        """
        pool = tree.root if name == ROOT_POOL else tree.pools.get(name)
        if pool is not None:
            return pool
        above = name.partition(SUBPOOL_DELIMITER)[0] if SUBPOOL_DELIMITER in name else removed
        parent = tree.pools.get(above)
        if parent is not None and above == removed and parent.config is not None:
            parent = None
        elif above and parent is None:
            parent = self._ensure_pool(tree, above)
        if parent is not None and parent.config is None:
            parent.settings = msgspec.structs.replace(parent.settings, mode="fair_share")
        if parent is None or parent.mode == "fifo":
            parent = admission.default_parent(tree)
        pool = PoolElement(name, parent, tree)
        pool.settings = admission.ephemeral_settings(parent)
        pool.max_operation_count, pool.max_running_operation_count = admission.operation_limits(
            pool.settings, tree.config.settings
        )
        assert parent.rules is not None
        pool.rules = starvation.pool_rules(parent.rules, pool.settings)
        pool.limits = pool_limits(pool)
        parent.children[name] = tree.pools[name] = pool
        self._orders.pop(tree.name, None)
        return pool

    def _install_operation(self, record: OperationRecord, now: float) -> None:
        self.sequence = max(self.sequence, record.sequence)
        operation = self.operations.get(record.id)
        if record.is_finished:
            if operation is not None:
                self._end_operation(operation, record, now)
            self._keep_finished(record)
            return
        if operation is None:
            operation = self.operations[record.id] = Operation(record)
            deadline = operations.deadline(record)
            if deadline is not None:
                heappush(self._deadlines, (deadline, record.id))
                if len(self._deadlines) > 2 * len(self.operations) + SPARE_DEADLINES:
                    self._deadlines = sorted(each for each in self._deadlines if each[1] in self.operations)
            self.spec_room.add(record)
            operation.needed = operations.needed_jobs(record, {})
        elif record.counts != operation.record.counts:
            operation.needed = operations.needed_jobs(record, operation.active)
            _touch(operation)
        operation.record = record
        for name in [name for name in operation.elements if name not in record.trees]:
            self._leave_tree(operation.elements.pop(name), f'the operation left tree "{name}"', now)
        for name, options in record.trees.items():
            tree = self.trees.get(name)
            if tree is not None:
                self._install_element(operation, tree, options)

    def _install_element(self, operation: Operation, tree: Tree, options: OperationTreeOptions) -> None:
        is_running = tree.name in operation.record.running_in
        pool = self._ensure_pool(tree, options.pool, operation.record.parents.get(tree.name, ""))
        element = operation.elements.get(tree.name)
        if element is None:
            element = OperationElement(operation, options, pool, tree)
            element.is_running = is_running
            operation.elements[tree.name] = tree.operations[operation.id] = element
            self._attach(element, pool)
        elif element.options != options or element.is_running != is_running:
            old = element.parent
            assert old is not None
            self._detach(element)
            element.options, element.is_running = options, is_running
            if pool is not old:
                _add_usage(old, element.usage, -1.0)
                _add_usage(pool, element.usage, 1.0)
                element.fair_share = ZERO
                self._forget_order(tree)
            self._attach(element, pool)
            self._drop_if_empty(old)
        element.entry = None
        tree.changed[element] = None
        if is_running:
            tree.queue.pop(element.name, None)
        else:
            tree.queue[element.name] = element
            self._arrived.setdefault(tree.name, {})[element.name] = element

    def _leave_tree(self, element: OperationElement, why: str, now: float) -> None:
        for job in list(element.jobs.values()):
            self._stop(job, "aborted", why, now)
        tree = element.tree
        tree.queue.pop(element.name, None)
        self._arrived.get(tree.name, {}).pop(element.name, None)
        tree.changed.pop(element, None)
        self.ended_elements.append(element)
        if tree.operations.pop(element.name, None) is not None:
            pool = element.parent
            assert pool is not None
            self._detach(element)
            self._drop_if_empty(pool)

    def _end_operation(self, operation: Operation, record: OperationRecord, now: float) -> None:
        operation.record = record
        operation.needed = {}
        for element in operation.elements.values():
            self._leave_tree(element, f"the operation is {record.state}", now)
        del self.operations[record.id]

    def _keep_finished(self, record: OperationRecord) -> None:
        if self.finished.pop(record.id, None) is None:
            self.spec_room.add(record)
        self.finished[record.id] = record
        most = self.rules.finished_operation_retention_count
        while len(self.finished) > most or self.spec_room.is_full_of_ended:
            oldest = next(iter(self.finished))
            del self.finished[oldest]
            self.spec_room.remove_ended(oldest)
            self._expired["operation", oldest] = None
            self._expired.update(dict.fromkeys(("job", job_id) for job_id in self.finished_jobs.pop(oldest, {})))

    def take_expired(self) -> list[tuple[str, str]]:
        """(kind, key) of stored records that are no longer kept; the caller deletes them."""
        expired, self._expired = list(self._expired), {}
        return expired

    def _install_job(self, record: JobRecord) -> None:
        """A job has ended: out of all counters, into the history. Its operation's record, with it, counts how."""
        counted = None
        if record.operation_id in self.operations or record.operation_id in self.finished:
            ended = self.finished_jobs.setdefault(record.operation_id, {})
            counted = ended.get(record.id)
            ended[record.id] = record
            self._expired.pop(("job", record.id), None)
        else:
            self._expired["job", record.id] = None
        job = self.jobs.pop(record.id, None)
        if job is None:
            if counted is not None:
                self._count_cpu_time_since(counted, record)
            return
        count_cpu_time(job, cpu_times(record))
        if job.is_active:
            end_job(job)
            _renew_needed(job)
        _free_place(job)
        job.node.stopping.pop(job.id, None)
        job.state = record.state

    def _count_cpu_time_since(self, counted: JobRecord, record: JobRecord) -> None:
        """What a job used between when it was given up and its end, of which its node tells now (1.7)."""
        live = self.operations.get(record.operation_id)
        element = None if live is None else live.elements.get(record.tree)
        if element is not None:
            times = zip(cpu_times(record), cpu_times(counted), strict=True)
            add_cpu_time(element, [max((now_s or 0.0) - (then_s or 0.0), 0.0) for now_s, then_s in times])

    # --- nodes ---------------------------------------------------------------------------------------------------

    def register(self, registration: NodeRegistration, may_replace: bool = True) -> Transaction:
        """A node makes itself known or changes (2.2).

        Raises CommandError if its tags fit more than one tree (a SeveralTreesError); for a run of its agent that was
        replaced by a later one: two agents with one node id would push each other out for ever; and unless it
        ``may_replace`` any, for an agent without the key of the one whose heartbeats still come. ``registration.key``
        is the hash of the key here.
        """
        address = registration.address or registration.node_id
        _check_names(registration)
        if registration.node_id not in self.nodes and len(self.nodes) >= MAX_NODES:
            raise CommandError(
                f"node {registration.node_id}: there are {MAX_NODES} nodes already, which is the limit; "
                "one that is silent makes room after node_reconnection_timeout of its tree",
                TOO_MANY_REQUESTS,
            )
        known = self.nodes.get(registration.node_id)
        if known is not None and known.is_online and not may_replace and not _has_key_of(known, registration):
            raise CommandError(
                f"node {known.id} is alive, with another agent (address {known.address}); give each host its own "
                "node_id. If this is the same host, whose agent lost its node_key.state: wait until its last run was "
                f"silent for node_heartbeat_timeout ({self.rules.node_heartbeat_timeout_s:g} s), or bind its token to "
                f'the node (":node:{known.id}" in [api] tokens_file)',
                ALREADY_EXISTS,
            )
        if known is not None and registration.incarnation in known.replaced:
            raise CommandError(
                f"node {known.id}: the run {registration.incarnation} of its agent (address "
                f"{known.replaced[registration.incarnation]}) was replaced by the later run {known.run} "
                f"(address {known.address}); if these are two hosts, give each its own node_id; if not, end the "
                "agent that is left over"
            )
        tags = frozenset([*registration.tags, address])
        resources = registration.resources
        capacity = {name: float(getattr(resources, name)) for name in to_amounts(ZERO)}
        record = NodeRecord(
            registration.node_id, registration.incarnation, address, tuple(registration.tags), capacity,
            registration.key,
        )  # fmt: skip
        matched = self.match_trees(tags)
        if len(matched) > 1:
            # One that is known is kept with its new tags: its jobs run on, it gets no more.
            change = NOTHING
            if known is not None:
                change = Transaction(nodes=(msgspec.structs.replace(record, tree=known.tree or ""),))
            raise SeveralTreesError(record, tags, matched, change)
        return Transaction(nodes=(record,), id=registration.node_id)

    def note_refused(self, refused: SeveralTreesError, now: float) -> None:
        """Remember for a while who wanted to be a node and could not, for the alerts."""
        self.refused_nodes.pop(refused.record.id, None)
        if refused.record.id not in self.nodes:
            self.refused_nodes[refused.record.id] = (now, tuple(refused.matched))
        while len(self.refused_nodes) > KEPT_REFUSED:
            del self.refused_nodes[next(iter(self.refused_nodes))]

    def list_refused_nodes(self, now: float) -> dict[str, tuple[str, ...]]:
        """Nodes that try to register and fit several trees: id -> the trees."""
        return {name: trees for name, (at, trees) in self.refused_nodes.items() if at > now - REFUSED_S}

    def match_trees(self, tags: frozenset[str]) -> list[str]:
        """The trees whose filter fits."""
        return [name for name, found in self._filters.items() if found.matches(tags)]

    def _install_node(self, record: NodeRecord, now: float) -> None:
        node = self.nodes.get(record.id)
        if node is None:
            node = self.nodes[record.id] = Node(record.id)
            node.tree = record.tree if record.tree in self.trees else None
        self.refused_nodes.pop(record.id, None)
        if node.incarnation != record.incarnation:
            node.sequence = -1
            if node.incarnation:
                node.replaced[node.incarnation] = node.address
                while len(node.replaced) > KEPT_INCARNATIONS:
                    del node.replaced[next(iter(node.replaced))]
        node.incarnation, node.address, node.key_hash = record.incarnation, record.address, record.key_hash
        node.tags = frozenset([*record.tags, record.address])
        node.capacity = to_vector(record.capacity, 0.0)
        node.last_seen, node.is_online, node.lost_since = now, True, None
        self._assign(node, now)
        for tree in self.trees.values():
            _sum_total(tree)

    def _assign(self, node: Node, now: float) -> None:
        """Put a node into the tree that its tags fit; its jobs of another tree are aborted (2.2).

        Where they fit several it stays in the one that it is in.
        """
        matched = self.match_trees(node.tags)
        name = matched[0] if matched else None
        node.matched_trees = tuple(matched) if len(matched) > 1 else ()
        if node.matched_trees:
            name = node.tree if node.tree in self.trees else None
            for job in [job for job in node.jobs.values() if job.first_sent_at is None and not job.was_reported]:
                self._stop(job, "aborted", "the tags of its node fit several pool trees", now)
        if name == node.tree and (name is None or node.id in self.trees[name].nodes):
            return
        old = self.trees.get(node.tree or "")
        if old is not None:
            old.nodes.pop(node.id, None)
        for job in list(node.jobs.values()):
            why = f"NodePoolTreeChanged: the node went from tree {node.tree!r} to {name!r}"
            self._stop(job, "aborted", why, now)
        node.tree = name
        if name is not None:
            self.trees[name].nodes[node.id] = node

    def _remove_node(self, node: Node) -> None:
        self._awaited.pop(node.id, None)
        for job in list(node.jobs.values()):
            # It came back while its removal was written, and has jobs again: they are started elsewhere.
            end_job(job)
            del self.jobs[job.id]
            _renew_needed(job)
        for job in node.stopping.values():
            del self.jobs[job.id]
            _free_place(job)
        tree = self.trees.get(node.tree or "")
        if tree is not None:
            tree.nodes.pop(node.id, None)
            _sum_total(tree)

    # --- heartbeats ----------------------------------------------------------------------------------------------

    def receive(self, heartbeat: Heartbeat, now: float) -> Receipt:
        """Take in a heartbeat: usage at once, what has ended as a transaction (1.8, 8)."""
        node = self.nodes.get(heartbeat.node_id)
        if node is None:
            return Receipt(False, f"node {heartbeat.node_id} is not registered", register=True)
        if heartbeat.incarnation != node.incarnation:
            reason = f"node {node.id} registered as incarnation {node.run}, not {heartbeat.incarnation}"
            return Receipt(False, reason, register=True)
        if heartbeat.sequence <= node.sequence:
            return Receipt(False, f"sequence {heartbeat.sequence} is not newer than {node.sequence}")
        node.sequence, node.last_seen = heartbeat.sequence, now
        self._awaited.pop(node.id, None)
        node.is_online, node.lost_since = True, None
        reported: set[str] = set()
        too_long: dict[str, Job] = {}
        foreign = ZERO
        for report in heartbeat.jobs:
            job = node.jobs.get(report.job_id) or node.stopping.get(report.job_id)
            if job is not None:
                reported.add(job.id)
                _take_report(job, report, now)
                if job.task.job_time_limit is not None and job.is_active and _is_over(job.task, job.began_at, now):
                    too_long[job.id] = job
            elif report.from_scheduler:
                reported.add(report.job_id)
                # One that ends already is nobody's: taken over, it would count as work that goes on. Unless it has run
                # too long, and another one is wanted only when it has ended.
                task = self._task_of(report)
                is_too_long = _is_over(task, report.start_time, now)
                if (report.stopping and not is_too_long) or not self._adopt(node, report, now):
                    foreign = add(foreign, _reported_usage(ZERO if task is None else task.resources, report))
                elif is_too_long:
                    too_long[report.job_id] = self.jobs[report.job_id]
            else:
                foreign = add(foreign, _reported_usage(ZERO, report))
        node.foreign_usage = foreign
        for job in too_long.values():
            self._stop(job, "aborted", _tell_too_long(job.task), now, fails=True)
        ended, acknowledged = self._find_ended(node, heartbeat, reported, now)
        _note_overcommit(node, now)
        transaction = NOTHING
        if ended:
            transaction = Transaction(operations=self._count(ended, now), jobs=tuple(ended))
        return Receipt(True, transaction=transaction, acknowledged=acknowledged)

    def _find_ended(
        self, node: Node, heartbeat: Heartbeat, reported: set[str], now: float
    ) -> tuple[list[JobRecord], list[str]]:
        ended: list[JobRecord] = []
        acknowledged = []
        for finished in heartbeat.finished_jobs:
            acknowledged.append(finished.job_id)
            reported.add(finished.job_id)
            record = self._finish_job(node, finished, now)
            if record is not None:
                ended.append(record)
        for job in node.jobs.values():
            if job.id in reported:
                continue
            if job.state == "running":
                ended.append(_job_record(job, "lost", now, reason=f"it vanished from node {node.id}"))
            elif self._is_overdue(job, now):
                if job.first_sent_at is None:
                    reason = f"no answer to node {node.id} had room for its order within {now - job.ordered_at:.0f} s"
                else:
                    waited = now - job.first_sent_at
                    reason = f"node {node.id} did not start it within waiting_job_timeout ({waited:.0f} s)"
                ended.append(_job_record(job, "aborted", now, reason=reason))
        # One that was sent and never reported may wait on the node, where the order to stop must still find it.
        for job in node.stopping.values():
            if job.id in reported:
                continue
            if job.was_reported or job.first_sent_at is None or self._is_overdue(job, now):
                ended.append(_job_record(job, "aborted", now))
        return ended, acknowledged

    def _is_overdue(self, job: Job, now: float) -> bool:
        """Whether a job that its node never reported is given up: the node itself gave it up before that (6.7)."""
        timeout_s = self.rules.waiting_job_timeout_s
        sent_timeout_s = timeout_s + START_GRACE_PERIODS * self.rules.heartbeat_period_s
        if job.first_sent_at is None:
            return now - job.ordered_at > max(UNSENT_TIMEOUTS * timeout_s, sent_timeout_s)
        return now - job.first_sent_at > sent_timeout_s

    def _finish_job(self, node: Node, finished: FinishedJob, now: float) -> JobRecord | None:
        """The record of a job that the node says has ended; None if it is counted already or nobody's."""
        job = node.jobs.get(finished.job_id) or node.stopping.get(finished.job_id)
        finished = _believe(finished, node, (finished.start_time or now) if job is None else job.start_time, now)
        if job is not None:
            return _job_record(job, finished.state, now, finished)
        live = self.operations.get(finished.operation_id)
        operation = self.finished.get(finished.operation_id) if live is None else live.record
        task = None if operation is None else _find_task(operation, finished.task)
        if operation is None or task is None or node.tree is None:
            return None
        counted = self.finished_jobs.get(operation.id, {}).get(finished.job_id)
        if counted is not None and not _overrules(finished.state, counted):
            return None
        # It was started before this scheduler was, and ended before it could be taken over; or was given up.
        start_time = finished.start_time or (now if counted is None else counted.start_time)
        finish_time = finished.finish_time or now
        state, reason = finished.state, finished.reason[:MAX_NODE_FAILURE_REASON]
        if state == "aborted" and _is_over(task, start_time, finish_time):
            # The scheduler that told it to stop for that is gone.
            state, reason = "failed", _tell_too_long(task)
        return JobRecord(
            id=finished.job_id,
            operation_id=finished.operation_id,
            task=finished.task,
            tree=node.tree,
            node_id=node.id,
            state=state,
            start_time=start_time,
            finish_time=finish_time,
            cpu_limit=task.cpu_limit,
            current_cpu_limit=task.cpu_limit if counted is None else counted.current_cpu_limit,
            exit_code=finished.exit_code,
            reason=reason,
            cpu_seconds=finished.cpu_seconds,
            max_memory=finished.max_memory,
            cgroup=finished.cgroup,
            reclaimed_cpu_seconds=finished.reclaimed_cpu_seconds,
            ordered_cpu_seconds=finished.ordered_cpu_seconds,
            throttled_cpu_seconds=finished.throttled_cpu_seconds,
            late_cpu_seconds=finished.late_cpu_seconds,
        )

    def _task_of(self, report: JobReport) -> Task | None:
        """The task of a job of the scheduler, as far as its operation is still known."""
        live = self.operations.get(report.operation_id)
        record = self.finished.get(report.operation_id) if live is None else live.record
        return None if record is None else _find_task(record, report.task)

    def _adopt(self, node: Node, report: JobReport, now: float) -> bool:
        """A job that the node has and we do not know: taken over if its operation still needs it, else stopped.

        True: it is taken over.
        """
        operation = self.operations.get(report.operation_id)
        element = operation.elements.get(node.tree or "") if operation is not None else None
        task = None if operation is None else _find_task(operation.record, report.task)
        counted = self.finished_jobs.get(report.operation_id, {}).get(report.job_id)
        why = ""
        if operation is None or task is None:
            why = "its operation is not known or has ended"
        elif counted is not None and counted.state not in GIVEN_UP:
            why = f"it was reported as {counted.state} before"
        elif element is None or not element.is_running:
            why = f"its operation does not run in the node's tree {node.tree!r}"
        elif report.job_id in self.jobs or operation.needed.get(task.name, 0) <= 0:
            why = "it was replaced while its node was away"
        if why or element is None or task is None:
            self._stop_unknown(node, report, why)
            return False
        # It stays counted as lost, which it was for a while; what becomes of it now is to be counted besides.
        if counted is not None:
            del self.finished_jobs[report.operation_id][report.job_id]
            self._expired["job", report.job_id] = None
        self.job_sequence += 1
        start_time = now if report.start_time is None else min(report.start_time, now)
        job = Job(report.job_id, element, task, node, start_time, self.job_sequence)
        job.usage = _reported_usage(job.limits, report)
        # What it used before was counted then: by the run before, or before it was given up.
        job.counted = list(NO_CPU_TIMES if counted is None else cpu_times(counted))
        self._start(job)
        _take_report(job, report, now)
        return True

    def _stop_unknown(self, node: Node, report: JobReport, why: str) -> None:
        # The order is made anew for each heartbeat that shows the job not stopping; nothing else remembers it.
        tree = self.trees.get(node.tree or "")
        settings = NO_TREE_SETTINGS if tree is None else tree.config.settings
        timeout_s = settings.job_preemption_timeout / 1e3
        node.unwanted[report.job_id] = StopOrder(report.job_id, timeout_s, "aborted", why)

    def _start(self, job: Job) -> None:
        start_job(job)
        self.jobs[job.id] = job
        _renew_needed(job)

    def _stop(
        self, job: Job, kind: Any, why: str, now: float, record: PreemptionRecord | None = None, fails: bool = False
    ) -> None:
        """Tell a job to stop: out of all counters at once, wanted again if its operation lives (6.7).

        ``fails``: it has failed, and is wanted again when it has ended.
        """
        settings = job.element.tree.config.settings
        graceful = kind == "graceful"
        timeout_ms = settings.job_graceful_preemption_timeout if graceful else settings.job_preemption_timeout
        if record is None:
            record = preemption.make_record(job, kind, why, now)
        if fails:
            record = msgspec.structs.replace(record, why=why)  # it is not aborted
        job.stop = Stop(record, timeout_ms / 1e3, now, fails)
        end_job(job)
        if fails:
            job.element.operation.active[job.task.name] += 1
        job.state = "stopping"
        job.node.stopping[job.id] = job
        _renew_needed(job)
        if kind != "aborted":
            self.preemptions.append(record)
            key = (record.tree, record.pool, record.kind)
            self.preemption_counts[key] = self.preemption_counts.get(key, 0) + 1

    def schedule(self, node_id: str, now: float, new_id: Callable[[], str]) -> None:
        """Choose what a node that has sent a heartbeat starts and stops (7.1)."""
        node = self.nodes[node_id]
        tree = self.trees.get(node.tree or "")
        if tree is None or not tree.update_count or self._is_awaiting(tree, now):
            return
        for job, why in preemption.find_graceful(node):
            self._stop(job, "graceful", why, now)
        if not node.matched_trees:
            self._start_jobs(node, tree, now, new_id)
        victims = preemption.find_overcommit_victims(node, now, self.rules.overcommit_duration_s)
        for job, why in victims:
            self._stop(job, "overcommit", why, now)
        _note_overcommit(node, now)

    def _start_jobs(self, node: Node, tree: Tree, now: float, new_id: Callable[[], str]) -> None:
        def make_job(element: OperationElement, task: Task, on: Node) -> Job:
            self.job_sequence += 1
            return Job(new_id(), element, task, on, now, self.job_sequence)

        order = self._orders.get(tree.name)
        if order is None:
            order = self._orders[tree.name] = ServiceOrder(tree)
        place_jobs(order, node, self.rules.spare, make_job, self._start)
        self._preempt(node, tree, now, make_job)

    def _is_awaiting(self, tree: Tree, now: float) -> bool:
        """Whether a node of the tree may have jobs of an earlier run that it has not told us about."""
        if now >= self._await_until:
            self._awaited.clear()
        return any(node_id in tree.nodes for node_id in self._awaited)

    def _preempt(
        self, node: Node, tree: Tree, now: float, make_job: Callable[[OperationElement, Task, Node], Job]
    ) -> None:
        """The preemptive part of a heartbeat: at most one job starts so, then limits are looked at (6.6)."""
        settings = tree.config.settings
        last = node.last_preemptive_attempt
        if last is not None and now - last < settings.preemptive_scheduling_backoff / 1e3:
            return
        node.last_preemptive_attempt = now
        budget = self.count_preemptions_left(tree, now)
        plan = None
        if budget > 0 and node.jobs:
            plan = preemption.plan_preemption(node, self._targets(tree), now, self.rules.spare)
        if plan is not None and len(plan.victims) <= budget:
            job = make_job(plan.element, plan.task, node)
            for victim, why in plan.victims:
                record = preemption.make_record(victim, "preempted", why, now, job.id, job.element, plan.priority)
                self._stop(victim, "preempted", why, now, record)
            self._start(job)
        for victim, _, why in preemption.find_limit_violators(node):
            self._stop(victim, "limit_violated", why, now)

    def _targets(self, tree: Tree) -> preemption.Targets:
        """Who may preempt: the operations that starve since the last update, with their priorities then."""
        targets = self._starving.get(tree.name)
        if targets is None:
            ranked = self._orders[tree.name].rank(starvation.starving_operations(tree))
            levels = ((element, starvation.priority_of(element)) for element in ranked)
            pairs = [(element, level) for element, level in levels if level != "none"]
            targets = self._starving[tree.name] = preemption.Targets(pairs, _may_preempt)
        return targets

    def count_preemptions_left(self, tree: Tree, now: float) -> float:
        """How many jobs of a tree may still be taken for others: ``max_preemptions_per_minute`` less the last ones."""
        limit = tree.config.settings.max_preemptions_per_minute
        if limit is None:
            return math.inf
        recent = 0
        for record in reversed(self.preemptions):
            if record.at <= now - 60.0:
                break
            recent += record.tree == tree.name and record.kind == "preempted"
        return limit - recent

    def answer(self, node_id: str, receipt: Receipt, now: float) -> HeartbeatAnswer:
        """The answer to an accepted heartbeat: jobs that the node does not have yet, and all that it must stop.

        Jobs to start are at most ``MAX_ORDERS`` and ``MAX_ORDER_BYTES``; the next answers have the others.
        """
        node = self.nodes[node_id]
        stop = [
            StopOrder(job.id, job.stop.timeout_s, job.stop.record.kind, job.stop.record.why)
            for job in node.stopping.values()
            if job.stop is not None
        ]
        stop += node.unwanted.values()
        node.unwanted.clear()
        return HeartbeatAnswer(
            accepted=True,
            start=self._make_orders(node, now),
            stop=stop,
            acknowledged=receipt.acknowledged,
        )

    def _make_orders(self, node: Node, now: float) -> list[JobOrder]:
        """The orders of one answer, oldest first.

        Where they are too many, those go first that no answer has carried, then those that were carried longest ago:
        jobs that wait on the node for room, which it does not report, must not keep the others from it.
        """
        starting = [job for job in node.jobs.values() if job.state == "starting"]
        starting.sort(key=lambda job: -math.inf if job.last_sent_at is None else job.last_sent_at)
        chosen: list[tuple[Job, JobOrder]] = []
        total_bytes = 0
        for job in starting:
            order = self._order(job)
            sizes = job.element.operation.order_sizes
            if job.task.name not in sizes:
                sizes[job.task.name] = len(msgspec.json.encode(order))
            total_bytes += sizes[job.task.name]
            if chosen and (len(chosen) == MAX_ORDERS or total_bytes > MAX_ORDER_BYTES):
                break
            chosen.append((job, order))
        for job, _ in chosen:
            job.last_sent_at = now
            if job.first_sent_at is None:
                job.first_sent_at = now
        chosen.sort(key=lambda each: each[0].sequence)
        return [order for _, order in chosen]

    def _order(self, job: Job) -> JobOrder:
        task, record = job.task, job.element.operation.record
        return JobOrder(
            job_id=job.id,
            operation_id=record.id,
            task=task.name,
            pool=job.element.options.pool,
            cpu_limit=task.cpu_limit,
            memory_limit=task.memory_limit,
            user_slots=task.user_slots,
            command=task.command if isinstance(task.command, str) else list(task.command),
            environment=task.environment,
            user=record.user,
            job_cpu_monitor=record.job_cpu_monitor,
            wait_s=self.rules.waiting_job_timeout_s,
            interruptible=task.interruptible,
            working_directory=task.working_directory,
        )

    # --- fair share ----------------------------------------------------------------------------------------------

    def make_snapshot(self, tree: Tree) -> Snapshot:
        """The tree as a fair-share update reads it."""
        return self._makers[tree.name].make(tree)

    def accept_update(self, tree: Tree, result: UpdateResult, now: float) -> None:
        """Take over an update: shares, volumes, starvation, a new order of service."""
        self._makers[tree.name].accept(tree, result)
        starvation.update_starvation(tree, now)
        for element in tree.operations.values():
            element.deactivations.clear()
        self._forget_order(tree)

    # --- what is stored ------------------------------------------------------------------------------------------

    def progress_of(self, tree: Tree) -> dict[str, Any]:
        """Volumes of integral pools, and since when elements are below their share (9); stored after each update.

        Explicit pools are named by their id: a pool that is renamed keeps its volume, a new one of its name does not.
        """
        volumes = {
            pool.config.id: pool.volume
            for pool in tree.pools.values()
            if pool.config is not None and pool.settings.integral_guarantees.guarantee_type != "none"
        }
        elements: list[PoolElement | OperationElement] = [*tree.pools.values(), *tree.operations.values()]
        since = {_key_of(each): each.below_since for each in elements if each.below_since is not None}
        return {"volumes": volumes, "below_since": since}

    def restore_progress(self, tree: Tree, progress: Mapping[str, Any]) -> None:
        """What ``progress_of`` gave in an earlier run; unknown and no longer integral pools are dropped (9)."""
        known: list[PoolElement | OperationElement] = [*tree.pools.values(), *tree.operations.values()]
        elements = {_key_of(each): each for each in known}
        for key, volume in progress.get("volumes", {}).items():
            pool = elements.get(key)
            if isinstance(pool, PoolElement) and pool.settings.integral_guarantees.guarantee_type != "none":
                pool.volume = msgspec.convert(volume, tuple[float, float, float, float, float])
        for key, since in progress.get("below_since", {}).items():
            if key in elements:
                elements[key].below_since = since


def _place_ephemeral(tree: Tree, were_ephemeral: Collection[PoolElement]) -> None:
    """Parents and settings of the ephemeral pools, after a change of the configuration (2.9)."""
    pools = tree.pools
    for pool in [pool for pool in pools.values() if pool.config is None]:
        is_rest = any(child in were_ephemeral for child in pool.children.values())
        parent = pool.parent if pool in were_ephemeral and not is_rest else None
        if SUBPOOL_DELIMITER in pool.name:
            parent = pools.get(pool.name.partition(SUBPOOL_DELIMITER)[0])
        elif parent is not None and (parent.config is not None or pools.get(parent.name) is not parent):
            parent = None  # else what is left of a removed pool stays around it
        pool.parent = parent if parent is not None and parent.mode != "fifo" else admission.default_parent(tree)
        pool.settings = admission.ephemeral_settings(pool.parent)
        if is_rest:
            pool.settings = msgspec.structs.replace(pool.settings, mode="fair_share")


def _may_preempt(element: OperationElement, level: preemption.TargetPriority) -> bool:
    """Whether what held at the last update still does: it wants jobs here and has not got its share meanwhile."""
    is_there = element.tree.operations.get(element.name) is element
    return is_there and wants_jobs(element) and starvation.still_starves(element, level)


def _check_names(registration: NodeRegistration) -> None:
    """They are kept for each node, stored, and compared with every tree's filter. Raises CommandError."""
    size = len(registration.node_id) + len(registration.address) + sum(map(len, registration.tags))
    if len(registration.tags) > MAX_TAGS or size > MAX_NAMES_CHARS:
        raise CommandError(
            f"node {registration.node_id[:100]!r}: at most {MAX_TAGS} tags are allowed, and {MAX_NAMES_CHARS} "
            f"characters of node_id, address and tags together; got {len(registration.tags)} and {size}"
        )


def _key_of(element: PoolElement | OperationElement) -> str:
    """What an element is called in the store."""
    explicit = element.config if isinstance(element, PoolElement) else None
    return element.name if explicit is None else explicit.id


def _add_usage(pool: PoolElement, usage: Vector, sign: float) -> None:
    delta = (usage[0] * sign, usage[1] * sign, usage[2] * sign, usage[3] * sign, usage[4] * sign)
    pool.usage = add(pool.usage, delta)
    for each in pool.ancestors():
        each.usage = add(each.usage, delta)


def _renew_needed(job: Job) -> None:
    """How many jobs like this one are still to be started: what was ordered, less completed and active ones."""
    operation, task = job.element.operation, job.task
    counts = operation.record.counts.get(task.name)
    left = task.job_count - operation.active.get(task.name, 0) - (counts.completed if counts is not None else 0)
    if left > 0 and not operation.record.is_finished:
        operation.needed[task.name] = left
    else:
        operation.needed.pop(task.name, None)
    _touch(operation)


def _free_place(job: Job) -> None:
    """A job that is gone from ``State.jobs``: if it was stopped and has failed, another one is wanted instead."""
    if job.is_failing:
        job.element.operation.active[job.task.name] -= 1
        _renew_needed(job)


def _is_over(task: Task | None, start_time: float | None, now: float) -> bool:
    """Whether a job of the task that began at ``start_time`` has run for longer than its ``job_time_limit``."""
    if task is None or task.job_time_limit is None or start_time is None:
        return False
    return now - start_time > task.job_time_limit / 1e3


def _tell_too_long(task: Task) -> str:
    return f"Job time limit exceeded: it ran for longer than its job_time_limit of {task.job_time_limit:.15g} ms"


def _touch(operation: Operation) -> None:
    """Its needs changed: the next snapshot and the next placement must see it."""
    for element in operation.elements.values():
        element.entry = None
        element.tree.changed[element] = None


def _sum_total(tree: Tree) -> None:
    total = sum_vectors([node.capacity for node in tree.nodes.values()])
    if total != tree.total:
        tree.total = total


def _note_overcommit(node: Node, now: float) -> None:
    """Since when the node's jobs may use more than it has (1.9)."""
    if not any(free < -1e-9 * max(all_, 1.0) for free, all_ in zip(node.free, node.capacity, strict=True)):
        node.overcommitted_since = None
    elif node.overcommitted_since is None:
        node.overcommitted_since = now
        node.overcommit_count += 1


def _find_task(record: OperationRecord, name: str) -> Task | None:
    return next((task for task in record.tasks if task.name == name), None)


def _overrules(state: JobState, counted: JobRecord) -> bool:
    """Whether the end that a node tells of a job that was counted before is news: work is done, not lost."""
    return state == "completed" and counted.state in GIVEN_UP


def _has_key_of(node: Node, registration: NodeRegistration) -> bool:
    """Whether a registration comes from the agent that a node has; of agents without keys only the same run does."""
    if not node.key_hash:
        return registration.incarnation == node.incarnation
    return registration.key == node.key_hash


def _believe(told: Told, node: Node, start_time: float, now: float) -> Told:
    """What a node says of a job, without times and usage that no host can have had: one wrong number would stand out
    of every graph and sum of its pools for as long as they are kept."""
    cores = max(MOST_CORES, MOST_OF_CAPACITY * node.capacity[CPU])
    most = cores * (max(now - start_time, 0.0) + LATE_S)
    wrong = [name for name, value in zip(CPU_COUNTERS, cpu_times(told), strict=True) if value and value > most]
    if isinstance(told, JobReport):
        if told.cpu_usage is not None and told.cpu_usage > cores:
            wrong.append("cpu_usage")
        if told.smoothed_cpu_usage is not None and told.smoothed_cpu_usage > cores:
            wrong.append("smoothed_cpu_usage")
    return msgspec.structs.replace(told, **dict.fromkeys(wrong)) if wrong else told


def _take_report(job: Job, report: JobReport, now: float) -> None:
    """What a heartbeat says of a job that lives: usage of active ones, CPU time of those that stop, too (1.7, 1.8)."""
    report = _believe(report, job.node, job.start_time, now)
    job.was_reported = True
    if job.began_at is None:
        # The node's clock may be another one; a job that was taken over has its start from the node.
        job.began_at = now if report.start_time is None else min(max(report.start_time, job.ordered_at), now)
    job.smoothed_cpu_usage, job.cpu_monitor_mode = report.smoothed_cpu_usage, report.mode
    job.cgroup = report.cgroup
    job.cpu_usage, job.min_cpu_limit = report.cpu_usage, report.min_cpu_limit
    job.votes_sum, job.throttled_ratio = report.votes_sum, report.throttled_ratio
    count_cpu_time(job, cpu_times(report))
    if job.is_active:
        job.state = "running"
        change_usage(job, _reported_usage(job.limits, report))


def _reported_usage(limits: Vector, report: JobReport) -> Vector:
    slots, _, gpu, memory, network = limits
    return (slots, report.current_cpu_limit, gpu, memory if report.memory is None else float(report.memory), network)


def _job_record(
    job: Job, state: JobState, now: float, finished: FinishedJob | None = None, reason: str = ""
) -> JobRecord:
    """The record of a job that lived until now.

    A job that was told to stop is aborted, whatever its exit code, unless its node says that it had completed before
    or in the time it was given (6.7). The reason is the node's own where it stopped the job by itself (1.9).
    """
    stop = job.stop
    if finished is not None:
        reason = finished.reason
    if stop is not None and state != "completed":
        if state == "failed" or stop.fails or finished is None or not reason:
            reason = stop.record.why
        state = "failed" if stop.fails else "aborted"
    before: CpuTimes = (
        job.cpu_seconds,
        job.reclaimed_cpu_seconds,
        job.ordered_cpu_seconds,
        job.throttled_cpu_seconds,
        job.late_cpu_seconds,
    )
    last = NO_CPU_TIMES if finished is None else cpu_times(finished)
    used, reclaimed, ordered, throttled, late = (
        then if now_s is None else now_s for now_s, then in zip(last, before, strict=True)
    )
    return JobRecord(
        id=job.id,
        operation_id=job.element.operation.id,
        task=job.task.name,
        tree=job.element.tree.name,
        node_id=job.node.id,
        state=state,
        # Start and end of one clock, the node's, where it told both.
        start_time=job.start_time if finished is None or finished.start_time is None else finished.start_time,
        finish_time=now if finished is None or finished.finish_time is None else finished.finish_time,
        cpu_limit=job.task.cpu_limit,
        current_cpu_limit=job.usage[1],
        exit_code=None if finished is None else finished.exit_code,
        reason=reason[:MAX_NODE_FAILURE_REASON],
        cpu_seconds=used,
        max_memory=None if finished is None else finished.max_memory,
        preemption=None if stop is None or stop.fails else stop.record,
        cgroup=job.cgroup if finished is None or not finished.cgroup else finished.cgroup,
        reclaimed_cpu_seconds=reclaimed,
        ordered_cpu_seconds=ordered,
        throttled_cpu_seconds=throttled,
        late_cpu_seconds=late,
        sequence=job.sequence,
    )
