"""The living trees, operations, jobs and nodes, and how records are installed in them; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from heapq import heappush
from typing import Any

import msgspec

from cpumond.core.wire import cpu_times
from cpumond.fairshare.resources import ZERO, Vector, add, sum_vectors
from cpumond.scheduler.decide import admission, preemption, preemption_record
from cpumond.scheduler.decide.placement import ServiceOrder, is_on_reclaimed
from cpumond.scheduler.decide.snapshot import SnapshotMaker, operation_limits, pool_limits
from cpumond.scheduler.elements import (
    Job,
    Node,
    Operation,
    OperationElement,
    PoolElement,
    Stop,
    Tree,
    add_cpu_time,
    count_cpu_time,
    end_job,
    start_job,
)
from cpumond.scheduler.events import Event
from cpumond.scheduler.model import (
    NO_SUCH_JOB,
    NO_SUCH_OPERATION,
    RESOLVE,
    ROOT_POOL,
    SUBPOOL_DELIMITER,
    CommandError,
    Config,
    JobRecord,
    LostNode,
    NodeRecord,
    OperationRecord,
    OperationTreeOptions,
    PreemptionRecord,
    Rules,
    to_vector,
)
from cpumond.scheduler.rights.token_records import TokenTable
from cpumond.scheduler.settings import operations, preemption_rules
from cpumond.scheduler.settings.nodes_filter import NodesFilter, parse_nodes_filter
from cpumond.scheduler.state.refused import RefusedStarts
from cpumond.scheduler.state.spec_room import SpecRoom, share_parts, weigh_change
from cpumond.scheduler.state.stage_table import StageTable

KEPT_PREEMPTIONS = 10_000
KEPT_INCARNATIONS = 8
SPARE_DEADLINES = 100
"""Deadlines of ended operations that may always stay in the heap, so that it is rarely cleaned."""


class Tables:
    """Everything that lives, by name and id, as the records say."""

    def __init__(self, rules: Rules, config: Config) -> None:
        self.rules = rules
        self.config = Config({})
        self.trees: dict[str, Tree] = {}
        self.operations: dict[str, Operation] = {}
        """Live operations, pending or running, in order of arrival."""
        self.finished: dict[str, OperationRecord] = {}
        """Finished operations, the first finished first."""
        self.finished_jobs: dict[str, dict[str, JobRecord]] = {}
        """Operation -> its finished jobs by id, as long as the operation is known."""
        self.spec_room = SpecRoom(rules.max_specification_memory)
        self.config_bytes = 0
        self.tokens = TokenTable()
        self.stages = StageTable()
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[str, Job] = {}
        """Active and stopping jobs."""
        self.refused_nodes: dict[str, tuple[float, tuple[str, ...]]] = {}
        """Nodes that were refused because their tags fit several trees: when they last tried, and the trees."""
        self.preemptions: deque[PreemptionRecord] = deque(maxlen=KEPT_PREEMPTIONS)
        self.preemption_counts: dict[tuple[str, str, str], int] = {}
        """(tree, pool of the victim, kind) -> preemptions since the start."""
        self.happened: deque[Event | PreemptionRecord] = deque(maxlen=0)
        """What nothing stored tells of; the log of events replaces this deque by one that has room, and empties it."""
        self.lost_nodes: dict[str, LostNode] = {}
        """Nodes that were given up less than LOST_S ago and have not come back, the first lost first."""
        self.ended_elements: deque[OperationElement] = deque(maxlen=0)
        """Operations that left a tree; a history replaces this deque by one that has room, and empties it."""
        self.refused_starts = RefusedStarts()
        self.sequence = 0
        self.job_sequence = 0
        self.period_s = rules.heartbeat_period_s
        """How often nodes are told to send heartbeats."""
        self._makers: dict[str, SnapshotMaker] = {}
        self._orders: dict[str, ServiceOrder] = {}
        self._starving: dict[str, preemption.Targets] = {}
        self._settled_config: Config | None = None
        self._freed: dict[str, bool] = {}
        """Trees whose whole queue must be looked at: a slot became free, or limits changed (3.3)."""
        self._arrived: dict[str, dict[str, OperationElement]] = {}
        """Tree -> pending operations that came since ``settle``; the ones before them were blocked and still are."""
        self._filters: dict[str, NodesFilter] = {}
        self._deadlines: list[tuple[float, str]] = []
        """A heap: when the ``time_limit`` of an operation is over, and its id; some of them may have ended."""
        self._expired: dict[tuple[str, str], None] = {}
        self._contested: dict[str, float] = {}  # job whose limit is another program's -> when that was told
        self._unstored: dict[str, Job] = {}
        """Jobs whose start is not stored yet; some of them may have ended."""
        self._unstored_stops: dict[str, Job] = {}
        """Jobs whose start is stored, but not yet that they were told to stop: no replacement is stored before that."""
        self._has_untold_starts = False
        self._awaited: dict[str, None] = {}
        self._await_until = 0.0
        """Whether a version that stored no starts may have started jobs; then the nodes without a heartbeat so far, and
        until when starts in their trees wait for it."""
        self._install_config(config, 0.0)

    def record_of(self, operation_id: str) -> OperationRecord | None:
        """The record of an operation that is live or finished and still known."""
        live = self.operations.get(operation_id)
        return self.finished.get(operation_id) if live is None else live.record

    def find_record(self, operation_id: str) -> OperationRecord:
        """The record of an operation, by id or ``*alias``. Raises CommandError."""
        record = self.record_of(operation_id)
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
                text = f"job {job_id} has not started yet on node {job.node.id}; try again"
                raise CommandError(text, NO_SUCH_JOB, {"try_again": True})
            return job.node.id
        if (ended := self.finished_jobs.get(record.id, {}).get(job_id)) is None:
            raise CommandError(f"No such job {job_id} in operation {record.id}", NO_SUCH_JOB)
        return ended.node_id

    def find_tree(self, name: str) -> Tree:
        """A tree by name. Raises CommandError."""
        tree = self.trees.get(name)
        if tree is None:
            raise CommandError(f'Pool tree "{name}" does not exist; known trees: {", ".join(self.trees)}', RESOLVE)
        return tree

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
        self._sum_totals()

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
        """Give the living pools their new configuration; section 2.9 tells what becomes of removed and new pools."""
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
        """Compute children, operations, counts, limits, rules and usage of all pools from parents and operations."""
        settings = tree.config.settings
        root = tree.root
        root.max_operation_count = settings.max_operation_count
        root.max_running_operation_count = settings.max_running_operation_count
        root.rules = preemption_rules.root_rules(settings)
        for pool in (root, *tree.pools.values()):
            pool.children, pool.operations = {}, {}
            pool.operation_count = pool.running_operation_count = 0
        for pool in tree.pools.values():
            assert pool.parent is not None
            pool.parent.children[pool.name] = pool
        for pool in tree.pools.values():
            _set_limits(pool)
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
        """Have order of service and targets made anew: shares or the pools above an operation have changed."""
        self._orders.pop(tree.name, None)
        self._starving.pop(tree.name, None)

    def _attach(self, element: OperationElement, pool: PoolElement) -> None:
        """Put an operation into a pool: its rules and limits, counts on the way up; the caller moves the usage."""
        element.parent = pool
        element.entry = None
        assert pool.rules is not None
        element.rules = preemption_rules.operation_rules(pool.rules, element.options)
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

        ``removed``: the pool above it that is no longer explicit, "" for none; that is made, too.
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
        _set_limits(pool)
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
            operation = self.operations[record.id] = Operation(share_parts(record, self.trees))
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
        """Move an ended job from all counters to ``finished_jobs``; its operation's new record counts its end."""
        counted = None
        if self.record_of(record.operation_id) is not None:
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
        count_cpu_time(job, cpu_times(record), max(record.finish_time, job.counted_at or 0.0))
        if job.is_active:
            end_job(job)
            renew_needed(job)
        _free_place(job)
        job.node.stopping.pop(job.id, None)
        job.state = record.state

    def _count_cpu_time_since(self, counted: JobRecord, record: JobRecord) -> None:
        """Count what a job used after it was given up and before its end, which its node reports now (1.7)."""
        live = self.operations.get(record.operation_id)
        element = None if live is None else live.elements.get(record.tree)
        if element is not None:
            times = zip(cpu_times(record), cpu_times(counted), strict=True)
            grown = [max((now_s or 0.0) - (then_s or 0.0), 0.0) for now_s, then_s in times]
            add_cpu_time(element, grown, min(counted.finish_time, record.finish_time), record.finish_time)

    def match_trees(self, tags: frozenset[str]) -> list[str]:
        """The names of the trees whose filter fits."""
        return [name for name, found in self._filters.items() if found.matches(tags)]

    def _install_node(self, record: NodeRecord, now: float) -> None:
        """Install one node; the caller calls ``_sum_totals`` after the last one."""
        node = self.nodes.get(record.id)
        is_new = node is None
        if node is None:
            node = self.nodes[record.id] = Node(record.id)
            node.tree = record.tree if record.tree in self.trees else None
        self.refused_nodes.pop(record.id, None)
        if self.lost_nodes.pop(record.id, None) is not None:
            self._expired["lost_node", record.id] = None
        if node.incarnation != record.incarnation:
            node.sequence, node.about = -1, None
            if node.incarnation:
                node.replaced[node.incarnation] = node.address
                while len(node.replaced) > KEPT_INCARNATIONS:
                    del node.replaced[next(iter(node.replaced))]
        node.incarnation, node.address, node.key_hash = record.incarnation, record.address, record.key_hash
        node.tags = frozenset([*record.tags, record.address])
        node.capacity = to_vector(record.capacity, 0.0)
        node.level = self.stages.find_level(node.id, node.tags)
        node.cordon = record.cordon
        self._assign(node, now)
        # A registration that is refused is no sign of life: its agent may ask again for ever, and run no job.
        if is_new or not node.matched_trees:
            node.last_seen, node.is_online, node.lost_since = now, True, None

    def _sum_totals(self) -> None:
        for tree in self.trees.values():
            tree.sum_total()

    def _assign(self, node: Node, now: float) -> None:
        """Put a node into the tree that its tags fit; its jobs of another tree are aborted (2.2).

        Where they fit several trees it stays in the one that it is in.
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
            # The node came back while its removal was written, and has jobs again: they are started elsewhere.
            end_job(job)
            del self.jobs[job.id]
            renew_needed(job)
        for job in node.stopping.values():
            del self.jobs[job.id]
            _free_place(job)
        tree = self.trees.get(node.tree or "")
        if tree is not None:
            tree.nodes.pop(node.id, None)
            tree.sum_total()

    def _start_new(self, job: Job) -> None:
        """Start a job, in the class that it has from now on."""
        job.reclaimed = is_on_reclaimed(job)
        self._start(job)

    def _start(self, job: Job) -> None:
        start_job(job)
        self.jobs[job.id] = job
        if not job.is_stored:
            self._unstored[job.id] = job
        renew_needed(job)

    def _stop(
        self, job: Job, kind: Any, why: str, now: float, record: PreemptionRecord | None = None, fails: bool = False
    ) -> None:
        """Tell a job to stop: it leaves all counters at once and is replaced if its operation lives (6.7).

        ``fails``: it counts as failed, and is replaced only after its end.
        """
        settings = job.element.tree.config.settings
        graceful = kind == "graceful"
        timeout_ms = settings.job_graceful_preemption_timeout if graceful else settings.job_preemption_timeout
        if record is None:
            record = preemption_record.make_record(job, kind, why, now)
        if fails:
            record = msgspec.structs.replace(record, why=why)  # it is not aborted
        job.stop = Stop(record, timeout_ms / 1e3, now, fails)
        end_job(job)
        if fails:
            job.element.operation.active[job.task.name] += 1
        job.state = "stopping"
        job.node.stopping[job.id] = job
        if job.is_stored:
            self._unstored_stops[job.id] = job
        renew_needed(job)
        if kind != "aborted":
            self.preemptions.append(record)
            self.happened.append(record)
            key = (record.tree, record.pool, record.kind)
            self.preemption_counts[key] = self.preemption_counts.get(key, 0) + 1


def _place_ephemeral(tree: Tree, were_ephemeral: Collection[PoolElement]) -> None:
    """Set parents and settings of the ephemeral pools after a change of the configuration (2.9)."""
    pools = tree.pools
    for pool in [pool for pool in pools.values() if pool.config is None]:
        is_rest = any(child in were_ephemeral for child in pool.children.values())
        parent = pool.parent if pool in were_ephemeral and not is_rest else None
        if SUBPOOL_DELIMITER in pool.name:
            parent = pools.get(pool.name.partition(SUBPOOL_DELIMITER)[0])
        elif parent is not None and (parent.config is not None or pools.get(parent.name) is not parent):
            parent = None  # otherwise the rest of a removed pool stays around it
        pool.parent = parent if parent is not None and parent.mode != "fifo" else admission.default_parent(tree)
        pool.settings = admission.ephemeral_settings(pool.parent)
        if is_rest:
            pool.settings = msgspec.structs.replace(pool.settings, mode="fair_share")


def _set_limits(pool: PoolElement) -> None:
    """Set the limits and rules that follow from a pool's own settings and its parent's."""
    pool.max_operation_count, pool.max_running_operation_count = admission.operation_limits_of(pool)
    assert pool.parent is not None
    assert pool.parent.rules is not None
    pool.rules = preemption_rules.pool_rules(pool.parent.rules, pool.settings)
    pool.limits = pool_limits(pool)


def _add_usage(pool: PoolElement, usage: Vector, sign: float) -> None:
    delta = (usage[0] * sign, usage[1] * sign, usage[2] * sign, usage[3] * sign, usage[4] * sign)
    pool.usage = add(pool.usage, delta)
    for each in pool.ancestors():
        each.usage = add(each.usage, delta)


def renew_needed(job: Job) -> None:
    """Set how many jobs of this job's task are still to be started: ``job_count`` less completed and active ones."""
    operation, task = job.element.operation, job.task
    counts = operation.record.counts.get(task.name)
    left = task.job_count - operation.active.get(task.name, 0) - (counts.completed if counts is not None else 0)
    if left > 0 and not operation.record.is_finished:
        operation.needed[task.name] = left
    else:
        operation.needed.pop(task.name, None)
    _touch(operation)


def _free_place(job: Job) -> None:
    """Have a job replaced that was stopped as failed, now that it is gone from ``State.jobs``."""
    if job.is_failing:
        job.element.operation.active[job.task.name] -= 1
        renew_needed(job)


def _touch(operation: Operation) -> None:
    """Let the next snapshot and the next placement see that the needs of an operation changed."""
    for element in operation.elements.values():
        element.entry = None
        element.tree.changed[element] = None
