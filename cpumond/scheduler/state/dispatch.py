"""Chooses which jobs a node starts and stops after a heartbeat, and makes the response; pure (semantics.md 6.6, 7)."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from cpumond.core.wire import HeartbeatAnswer, JobOrder, StopOrder
from cpumond.scheduler.decide import preemption, preemption_record, starvation
from cpumond.scheduler.decide.cost import next_unspared
from cpumond.scheduler.decide.placement import ServiceOrder, has_spare, is_in_idle_class, place_jobs, wants_jobs
from cpumond.scheduler.decide.victims import find_graceful, find_limit_violators, find_overcommit_victims
from cpumond.scheduler.elements import NO_GANG, Job, Node, OperationElement, Tree
from cpumond.scheduler.model import Task
from cpumond.scheduler.settings import failures, incarnations
from cpumond.scheduler.state import State, TreeWork, backfill, blame, gangs, lifecycle, retries
from cpumond.scheduler.state.heartbeats import Receipt, note_overcommit
from cpumond.scheduler.state.install import open_vault
from cpumond.scheduler.state.maintenance import find_drained

MAX_ORDERS = 200
MAX_ORDER_BYTES = 1_048_576
"""Maximum number of jobs to start in one response, and maximum bytes of their JSON, which a single job may exceed.
Agents refuse huge responses."""


def schedule(state: State, node_id: str, now: float, new_id: Callable[[], str]) -> None:
    """Choose the jobs that a node starts and stops after its heartbeat (7.1)."""
    node = state.nodes[node_id]
    tree = state.trees.get(node.tree or "")
    if tree is None or not tree.update_count or _is_awaiting(state, tree, now):
        return
    retries.end_waits(state, now)
    for job, why in find_drained(node):
        _drain(state, job, why, now)
    lifecycle.stop_broken_gangs(state, now)
    for job, why in find_graceful(node, now):
        lifecycle.stop(state, job, "graceful", why, now)
    if not node.matched_trees:
        _start_jobs(state, node, tree, now, new_id)
    rules = state.rules
    waits_s = (rules.overcommit_duration_s, rules.additional_reclaimed_overcommit_duration_s)
    ratio = rules.allowed_node_cpu_overcommit_ratio
    for job, why in find_overcommit_victims(node, now, *waits_s, ratio):
        lifecycle.stop(state, job, "overcommit", why, now)
    note_overcommit(node, now, ratio)


def is_at_rest(state: State, node: Node, is_barren: bool) -> bool:
    """Return whether a heartbeat without news would start and stop no job, as of the last update: no job is being
    started or stopped, and no operation can use the node's free resources or preempt its jobs. For simulations.

    ``is_barren``: whether it is known that no job fits the node's free resources."""
    tree = state.trees.get(node.tree or "")
    if tree is None or not tree.update_count:
        return True
    work = state.work[tree.name]
    order = work.order
    is_draining = node.cordon is not None and node.cordon.drain
    if order is None or node.stopping or is_draining or node.overcommitted_since is not None:
        return False
    for job in node.jobs.values():
        if not job.was_reported or job.element.operation.record.preemption_mode == "graceful":
            return False
    targets = _find_targets(work)
    if targets.gangs or (node.jobs and targets.below):
        return False
    kept = state.gangs.reservations.get(tree.name)
    if tree.config.settings.enable_backfill and kept is not None and node in kept.rooms:
        return False
    has_room = not node.cordoned and not is_barren and has_spare(node, node.free, state.rules.spare)
    return not has_room or order.of(node).best() is None


def _start_jobs(state: State, node: Node, tree: Tree, now: float, new_id: Callable[[], str]) -> None:
    def make_job(element: OperationElement, task: Task, on: Node) -> Job:
        state.job_sequence += 1
        return Job(new_id(), element, task, on, now, state.job_sequence)

    work = state.work[tree.name]
    if work.order is None:
        work.order = ServiceOrder(tree)
    if not node.cordoned:
        gangs.place_kept(state, tree, now, make_job)
        place_jobs(
            work.order, node, state.rules.spare, make_job,
            lambda job: lifecycle.start_new(state, job),
            lambda element: gangs.place_gang(state, element, now, make_job),
            lambda: gangs.reserved_on(state, node, tree, now),
            lambda element, task: blame.shuns(state, element, task, node, now),
        )  # fmt: skip
        if state.gangs.reservations:
            backfill.use_kept_room(state, node, tree, work.order, now, make_job)
    _preempt(state, node, tree, now, make_job)


def _drain(state: State, job: Job, why: str, now: float) -> None:
    record = preemption_record.make_record(job, "aborted", why, now)
    record = msgspec.structs.replace(record, cause=failures.JOBS_DISABLED)
    lifecycle.stop(state, job, "aborted", why, now, record)
    cordon = job.node.cordon
    if cordon is not None and cordon.drain == "graceful" and job.stop is not None:
        lifecycle.give_time(state, job.stop, job.element.tree.config.settings.job_graceful_preemption_timeout / 1e3)


def _is_awaiting(state: State, tree: Tree, now: float) -> bool:
    """Return whether a node of the tree may have jobs that an older version started without storing their starts."""
    if now >= state.await_until:
        state.awaited.clear()
    return any(node_id in tree.nodes for node_id in state.awaited)


def _preempt(
    state: State, node: Node, tree: Tree, now: float, make_job: Callable[[OperationElement, Task, Node], Job]
) -> None:
    """Run the preemptive part of a heartbeat: start at most one job, then enforce limits (6.6)."""
    settings, work = tree.config.settings, state.work[tree.name]
    last = node.last_preemptive_attempt
    if last is not None and now - last < settings.preemptive_scheduling_backoff / 1e3:
        return
    node.last_preemptive_attempt = now
    budget = 0.0 if node.cordoned else count_preemptions_left(state, tree, now)
    plan, is_done = None, False
    if budget > 0 and (starving := _find_targets(work).gangs):
        is_done = gangs.preempt_for_gang(state, starving, tree, now, budget, make_job)
    if budget > 0 and node.jobs and not is_done:
        reserved = gangs.reserved_on(state, node, tree, now)
        plan = preemption.plan_preemption(node, _find_targets(work), now, state.rules.spare, reserved)
        if plan is None:
            # The next attempt comes, at the latest, when the protection of a job here ends.
            until = next_unspared(node, now)
            node.last_preemptive_attempt = min(now, until - settings.preemptive_scheduling_backoff / 1e3)
    if plan is not None and len(plan.victims) <= budget:
        job = make_job(plan.element, plan.task, node)
        for victim, why in plan.victims:
            record = preemption_record.make_record(victim, "preempted", why, now, job.id, job.element, plan.priority)
            lifecycle.stop(state, victim, "preempted", why, now, record)
        lifecycle.start_new(state, job)
    for victim, _, why in find_limit_violators(node):
        lifecycle.stop(state, victim, "limit_violated", why, now)


def _find_targets(work: TreeWork) -> preemption.Targets:
    """Return operations that may preempt, with their priorities at the last update."""
    if work.targets is None:
        assert work.order is not None
        ranked = work.order.rank(starvation.starving_operations(work.order.tree))
        pairs = [(element, level) for element in ranked for level in starvation.list_priorities(element)]
        work.targets = preemption.Targets(pairs, _may_preempt)
    return work.targets


def count_preemptions_left(state: State, tree: Tree, now: float) -> float:
    """Return how many more jobs of a tree may be preempted: ``max_preemptions_per_minute`` minus recent preemptions."""
    limit = tree.config.settings.max_preemptions_per_minute
    if limit is None:
        return math.inf
    recent = 0
    for record in reversed(state.preemptions):
        if record.at <= now - 60.0:
            break
        recent += record.tree == tree.name and record.kind == "preempted"
    return limit - recent


def answer(state: State, node_id: str, receipt: Receipt, now: float) -> HeartbeatAnswer:
    """Return the response to an accepted heartbeat: jobs that the node must start, and all jobs that it must stop.

    It has at most ``MAX_ORDERS`` starts in ``MAX_ORDER_BYTES``; further starts are in the next responses."""
    node = state.nodes[node_id]
    stop = [
        StopOrder(job.id, job.stop.timeout_s, job.stop.record.kind, job.stop.record.why)
        for job in node.stopping.values()
        if job.stop is not None
    ]
    stop += node.unwanted.values()
    node.unwanted.clear()
    return HeartbeatAnswer(
        accepted=True, start=_make_orders(state, node, now), stop=stop, acknowledged=receipt.acknowledged,
        differences=True, period_s=state.period_s if state.period_s > state.rules.heartbeat_period_s else None,
        knows_about=node.about is not None, level=node.level, knows_stderr_size=True,
    )  # fmt: skip


def _make_orders(state: State, node: Node, now: float) -> list[JobOrder]:
    """Make the start requests of one heartbeat response, oldest first.

    If there are too many, those that were never sent come first, then those sent longest ago. A job that waits on the
    node for free resources is not reported; its start, sent again and again, must not displace other starts."""
    starting = [
        job
        for job in node.jobs.values()
        if job.state == "starting" and job.is_stored and (job.after is None or not lifecycle.is_held(state, job, now))
    ]
    starting.sort(key=lambda job: -math.inf if job.last_sent_at is None else job.last_sent_at)
    chosen: list[tuple[Job, JobOrder]] = []
    total_bytes = 0
    for job in starting:
        order = _make_order(state, job)
        if order is None:
            continue
        total_bytes += len(msgspec.json.encode(order))
        if chosen and (len(chosen) == MAX_ORDERS or total_bytes > MAX_ORDER_BYTES):
            break
        chosen.append((job, order))
    for job, _ in chosen:
        job.last_sent_at = now
        if job.first_sent_at is None:
            job.first_sent_at = now
    chosen.sort(key=lambda each: each[0].sequence)
    return [order for _, order in chosen]


def _find_command(task: Task) -> str | list[str]:
    """Return the command that a node runs; a command that is text is run by a shell."""
    if not task.redirect_stdout_to_stderr:
        return task.command if isinstance(task.command, str) else list(task.command)
    if isinstance(task.command, str):
        return f"exec >&2\n{task.command}"
    return ["/bin/sh", "-c", 'exec "$0" "$@" >&2', *task.command]


def _make_order(state: State, job: Job) -> JobOrder | None:
    """Make a start request. Returns None for a job with secrets if this scheduler cannot read them, or if the job's
    node does not pass secrets to jobs (12.6)."""
    task, record = job.task, job.element.operation.record
    secrets = open_vault(state, record)
    if secrets is None or (secrets and not job.node.takes_secrets):
        return None
    is_idle = is_in_idle_class(job)
    return JobOrder(
        job_id=job.id, operation_id=record.id, task=task.name, pool=job.element.options.pool, cpu_limit=task.cpu_limit,
        memory_limit=task.memory_limit, user_slots=task.user_slots, command=_find_command(task),
        environment=task.environment, user=record.user, job_cpu_monitor=record.job_cpu_monitor,
        wait_s=state.rules.waiting_job_timeout_s, interruptible=task.interruptible,
        interruption_signal=task.interruption_signal, signal_root_process_only=task.signal_root_process_only,
        max_stderr_bytes=task.max_stderr_size or 0, working_directory=task.working_directory,
        checkpoints=task.checkpoints, reclaimed=is_idle,
        set_container_cpu_limit=None if job.has_ceiling is not is_idle else job.has_ceiling,
        cpu_monitor_moves=job.element.tree.config.settings.cpu_monitor_moves, variables=_list_variables(job),
        secrets=secrets, memory_reserve=job.memory_reserve,
    )  # fmt: skip


def _list_variables(job: Job) -> dict[str, str]:
    """Return the environment variables that YTsaurus gives each job, except those that the job's node adds."""
    variables = {
        "YT_JOB_COOKIE": str(job.cookie),
        "YT_JOB_INDEX": str(job.index),
        "YT_TASK_JOB_INDEX": str(job.task_index),
        "YT_POOL_TREE": job.element.tree.name,
        "YT_NODE_HOST": job.node.address,
    }
    if job.in_gang is not NO_GANG:
        variables |= incarnations.list_variables(job.element.operation.record, job.task, job.incarnation, job.gang_rank)
    return variables


def _may_preempt(element: OperationElement, level: starvation.TargetPriority) -> bool:
    """Return whether an operation of ``TreeWork.targets`` still wants jobs in the tree and is below its share."""
    is_there = element.tree.operations.get(element.name) is element
    return is_there and wants_jobs(element) and starvation.still_starves(element, level)
