"""Installs records in the state: configuration, operations, ended jobs, nodes; pure."""

from __future__ import annotations

from heapq import heappush

from cpumond.core.wire import cpu_times
from cpumond.fairshare.resources import ZERO
from cpumond.scheduler.decide.snapshot import SnapshotMaker
from cpumond.scheduler.elements import (
    NONE_NEEDED,
    Node,
    Operation,
    OperationElement,
    Tree,
    add_cpu_time,
    count_cpu_time,
    end_job,
    share_needed,
)
from cpumond.scheduler.elements.retry_run import grow
from cpumond.scheduler.model import Config, JobRecord, NodeRecord, OperationRecord, OperationTreeOptions, to_vector
from cpumond.scheduler.rights.vaults import VaultError
from cpumond.scheduler.settings import operations
from cpumond.scheduler.settings.nodes_filter import parse_nodes_filter
from cpumond.scheduler.state import State, TreeWork, backfill, budgets, incarnations, lifecycle, pools, retries
from cpumond.scheduler.state.reports import find_task
from cpumond.scheduler.state.spec_room import share_parts, weigh_change

KEPT_INCARNATIONS = 8
SPARE_DEADLINES = 100
"""Number of deadlines of ended operations that may stay in the heap, which is therefore rarely cleaned."""


def install_config(state: State, config: Config, now: float) -> None:
    old, state.config = state.config, config
    state.config_bytes += weigh_change(old, config)
    for name in [name for name in state.trees if name not in config.trees]:
        _remove_tree(state, state.trees.pop(name), now)
    for name, tree_config in config.trees.items():
        tree = state.trees.get(name)
        if tree is None:
            tree = state.trees[name] = Tree(tree_config)
        if old.trees.get(name) is not tree_config:
            tree.config = tree_config
            nodes_filter = parse_nodes_filter(tree_config.settings.nodes_filter)
            work = state.work.setdefault(name, TreeWork(SnapshotMaker(), nodes_filter))
            work.filter = nodes_filter
            pools.sync_pools(tree, work)
            before = old.trees[name].settings.enable_memory_reserve if name in old.trees else None
            for element in tree.operations.values() if before != tree_config.settings.enable_memory_reserve else ():
                lifecycle.renew_reserves(element.operation)
    for node in state.nodes.values():
        _assign(state, node, now)
    sum_totals(state)
    budgets.sync(state, now)


def _remove_tree(state: State, tree: Tree, now: float) -> None:
    for element in list(tree.operations.values()):
        if element.operation.record.is_gang:
            state.gangs.forget(element)
        for job in list(element.jobs.values()):
            lifecycle.stop(state, job, "aborted", f'pool tree "{tree.name}" was removed', now)
        del element.operation.elements[tree.name]
        state.ended_elements.append(element)
    for node in tree.nodes.values():
        node.tree = None
    state.gangs.forget_tree(tree.name)
    del state.work[tree.name]


def install_operation(state: State, record: OperationRecord, now: float) -> None:
    state.sequence = max(state.sequence, record.sequence)
    operation = state.operations.get(record.id)
    if record.is_finished:
        if operation is not None:
            _end_operation(state, operation, record, now)
        _keep_finished(state, record)
        state.gangs.live.pop(record.id, None)
        return
    if operation is None:
        state.spec_room.add(record)
        operation = state.operations[record.id] = Operation(share_parts(record, state.trees))
        deadline = operations.deadline(record)
        if deadline is not None:
            heappush(state.deadlines, (deadline, record.id))
            if len(state.deadlines) > 2 * len(state.operations) + SPARE_DEADLINES:
                state.deadlines = sorted(each for each in state.deadlines if each[1] in state.operations)
        operation.lacks_secrets = bool(record.vault_bytes) and open_vault(state, record) is None
        operation.needed = share_needed(operations.needed_jobs(record, {}))
    else:
        _change_tasks(state, operation, record)
    old = operation.record
    is_switched = old.incarnation != record.incarnation
    operation.record = record
    if old.retried.places != record.retried.places:
        retries.follow(state, operation, now)
    elif record.counts != old.counts or record.tasks is not old.tasks:
        retries.renew_needed(operation)
    if is_switched:
        incarnations.switch(state, operation, now)
    for name in [name for name in operation.elements if name not in record.trees]:
        _leave_tree(state, operation.elements.pop(name), f'the operation left tree "{name}"', now)
    for name, options in record.trees.items():
        tree = state.trees.get(name)
        if tree is not None:
            _install_element(state, operation, tree, options)
    lifecycle.renew_reserves(operation)
    if state.budgets:
        budgets.place(state, operation)
    if record.is_gang:
        state.gangs.live[record.id] = operation


def _change_tasks(state: State, operation: Operation, record: OperationRecord) -> None:
    """Link the jobs of an operation to its tasks in ``record``, whose ``job_count`` may have changed."""
    if record.tasks is operation.record.tasks:
        return
    tasks = {task.name: task for task in record.tasks}
    for job in state.jobs.values():
        if job.element.operation is operation:
            job.task = grow(tasks[job.task.name], job.task.memory_limit)


def open_vault(state: State, record: OperationRecord) -> dict[str, str] | None:
    """Return the secret variables of an operation's jobs; None if this scheduler cannot read them (12.6)."""
    if not record.vault_bytes:
        return {}
    vault, keys = state.vaults.get(record.id), state.rules.vault_keys
    if vault is None or keys is None:
        return None
    try:
        return keys.open(vault)
    except VaultError:
        return None


def _install_element(state: State, operation: Operation, tree: Tree, options: OperationTreeOptions) -> None:
    work, is_running = state.work[tree.name], tree.name in operation.record.running_in
    pool = pools.ensure_pool(tree, work, options.pool, operation.record.parents.get(tree.name, ""))
    element = operation.elements.get(tree.name)
    if element is None:
        element = OperationElement(operation, options, pool, tree)
        element.is_running = is_running
        operation.elements[tree.name] = tree.operations[operation.id] = element
        pools.attach(element, pool)
    elif element.options != options or element.is_running != is_running:
        old = element.parent
        assert old is not None
        pools.detach(element, work)
        element.options, element.is_running = options, is_running
        if pool is not old:
            pools.add_usage(old, element.usage, -1.0)
            pools.add_usage(pool, element.usage, 1.0)
            element.fair_share = ZERO
            work.forget_order()
        pools.attach(element, pool)
        pools.drop_if_empty(old, work)
    element.entry = None
    tree.changed[element] = None
    if is_running:
        tree.queue.pop(element.name, None)
    else:
        tree.queue[element.name] = element
        work.arrived[element.name] = element


def _leave_tree(state: State, element: OperationElement, why: str, now: float) -> None:
    for job in list(element.jobs.values()):
        lifecycle.stop(state, job, "aborted", why, now)
    tree, work = element.tree, state.work[element.tree.name]
    tree.queue.pop(element.name, None)
    work.arrived.pop(element.name, None)
    tree.changed.pop(element, None)
    state.ended_elements.append(element)
    if tree.operations.pop(element.name, None) is not None:
        pool = element.parent
        assert pool is not None
        pools.detach(element, work)
        pools.drop_if_empty(pool, work)
    state.gangs.forget(element)


def _end_operation(state: State, operation: Operation, record: OperationRecord, now: float) -> None:
    operation.record = record
    operation.needed = NONE_NEEDED
    for element in operation.elements.values():
        _leave_tree(state, element, f"the operation is {record.state}", now)
    del state.operations[record.id]
    state.vaults.pop(record.id, None)


def _keep_finished(state: State, record: OperationRecord) -> None:
    if state.finished.pop(record.id, None) is None:
        state.spec_room.add(record)
    state.finished[record.id] = record
    most = state.rules.finished_operation_retention_count
    while len(state.finished) > most or state.spec_room.is_full_of_ended:
        oldest = next(iter(state.finished))
        del state.finished[oldest]
        state.spec_room.remove_ended(oldest)
        state.expired["operation", oldest] = None
        for job_id in state.finished_jobs.pop(oldest, ()):
            state.expired["job", job_id] = None


MAX_RESTARTED_JOBS = 1000
"""Maximum number of completed jobs kept of each operation with ``restart_completed_jobs``."""


def keep_job(state: State, record: JobRecord) -> None:
    """Keep an ended job of a known operation. If completed jobs are restarted, the oldest kept ones are dropped."""
    ended = state.finished_jobs.setdefault(record.operation_id, {})
    ended[record.id] = record
    operation = state.operations.get(record.operation_id)
    if operation is None or not operations.starts_again(find_task(operation.record, record.task), record):
        return
    operation.restarted = operation.restarted or []
    operation.restarted.append(record.id)
    if len(operation.restarted) > MAX_RESTARTED_JOBS:
        oldest = operation.restarted.pop(0)
        if ended.pop(oldest, None) is not None:
            state.expired["job", oldest] = None


def install_job(state: State, record: JobRecord, now: float) -> None:
    """Move an ended job from all counters to ``finished_jobs``. The new record of its operation counts the end."""
    counted = None
    if state.record_of(record.operation_id) is not None:
        counted = state.finished_jobs.get(record.operation_id, {}).get(record.id)
        state.expired.pop(("job", record.id), None)
        keep_job(state, record)
    else:
        state.expired["job", record.id] = None
    job = state.jobs.pop(record.id, None)
    backfill.note_ended(state, record, job)
    if record.state == "completed":
        lifecycle.finish_place(state, record, now)
    if job is None:
        if counted is not None:
            _count_cpu_time_since(state, counted, record)
        return
    count_cpu_time(job, cpu_times(record))
    if job.is_active:
        end_job(job)
        lifecycle.give_back(job, now, is_ending=False)
        lifecycle.renew_needed(job)
    lifecycle.free_place(job, now)
    job.node.stopping.pop(job.id, None)
    job.state = record.state
    if record.state != "completed" or record.exit_code:  # completed with an exit code other than 0: restart_exit_code
        lifecycle.note_broken(state, job, record.state)


def _count_cpu_time_since(state: State, counted: JobRecord, record: JobRecord) -> None:
    """Add the usage of a lost job, from its declared loss to its end. The node reports that end only now (1.7)."""
    live = state.operations.get(record.operation_id)
    element = None if live is None else live.elements.get(record.tree)
    if element is not None:
        times = zip(cpu_times(record), cpu_times(counted), strict=True)
        add_cpu_time(element, [max((now_s or 0.0) - (then_s or 0.0), 0.0) for now_s, then_s in times])


def install_node(state: State, record: NodeRecord, now: float) -> None:
    """Install one node. The caller calls ``sum_totals`` after the last node."""
    node = state.nodes.get(record.id)
    is_new = node is None
    if node is None:
        node = state.nodes[record.id] = Node(record.id)
        node.former_starts = state.starts_of.pop(record.id, {})
        node.tree = record.tree if record.tree in state.trees else None
    state.refused_nodes.pop(record.id, None)
    if state.lost_nodes.pop(record.id, None) is not None:
        state.expired["lost_node", record.id] = None
    if node.incarnation != record.incarnation:
        node.sequence, node.about = -1, None
        if node.incarnation:
            node.replaced[node.incarnation] = node.address
            while len(node.replaced) > KEPT_INCARNATIONS:
                del node.replaced[next(iter(node.replaced))]
    node.incarnation, node.address, node.key_hash = record.incarnation, record.address, record.key_hash
    node.agent_tags = record.tags
    node.capacity = to_vector(record.capacity, 0.0)
    install_maintenance(state, record, now)
    # A refused registration does not make the node online: its agent may repeat it for ever without running a job.
    if is_new or not node.matched_trees:
        node.last_seen, node.is_online, node.lost_since = now, True, None


def install_maintenance(state: State, record: NodeRecord, now: float) -> None:
    """Install an administrator's settings of a node, and apply the consequences of the node's tags."""
    node = state.nodes[record.id]
    node.cordon, node.user_tags, node.tags = record.cordon, record.user_tags, record.all_tags
    node.level = state.stages.find_level(node.id, node.tags)
    _assign(state, node, now)


def sum_totals(state: State) -> None:
    for tree in state.trees.values():
        tree.sum_total()


def _assign(state: State, node: Node, now: float) -> None:
    """Put a node into the tree that its tags fit; its jobs of a different tree are aborted (2.2).

    If its tags fit several trees, the node stays in its present tree."""
    matched = state.match_trees(node.tags)
    name = matched[0] if matched else None
    node.matched_trees = tuple(matched) if len(matched) > 1 else ()
    if node.matched_trees:
        name = node.tree if node.tree in state.trees else None
        for job in [job for job in node.jobs.values() if job.first_sent_at is None and not job.was_reported]:
            lifecycle.stop(state, job, "aborted", "the tags of its node fit several pool trees", now)
    if name == node.tree and (name is None or node.id in state.trees[name].nodes):
        return
    old = state.trees.get(node.tree or "")
    if old is not None:
        old.nodes.pop(node.id, None)
    for job in list(node.jobs.values()):
        why = f"NodePoolTreeChanged: the node went from tree {node.tree!r} to {name!r}"
        lifecycle.stop(state, job, "aborted", why, now)
    node.tree = name
    if name is not None:
        state.trees[name].nodes[node.id] = node


def remove_node(state: State, node: Node, now: float) -> None:
    state.awaited.pop(node.id, None)
    state.held.pop(node.id, None)
    if node.former_starts:
        state.starts_of[node.id] = node.former_starts
    for job in list(node.jobs.values()):
        # The node came back while its removal was written, and has jobs again: these start on other nodes.
        budgets.forget(job)
        end_job(job)
        lifecycle.give_back(job, now, is_ending=False)
        del state.jobs[job.id]
        lifecycle.renew_needed(job)
        lifecycle.note_broken(state, job)
    for job in node.stopping.values():
        budgets.forget(job)
        del state.jobs[job.id]
        lifecycle.free_place(job, now)
    tree = state.trees.get(node.tree or "")
    if tree is not None:
        tree.nodes.pop(node.id, None)
        tree.sum_total()
