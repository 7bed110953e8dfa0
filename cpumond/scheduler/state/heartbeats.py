"""Processes heartbeats: reports of jobs, ended jobs, unknown jobs; pure (semantics.md 1.8, 8)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from cpumond.core.wire import FinishedJob, Heartbeat, JobReport, NodeHeartbeat, StopOrder, cpu_times
from cpumond.fairshare.resources import ZERO, add
from cpumond.scheduler.decide.victims import is_overcommitted
from cpumond.scheduler.elements import Job, Node
from cpumond.scheduler.elements.job_numbers import UNKNOWN
from cpumond.scheduler.elements.retry_run import grow
from cpumond.scheduler.events.noticed import CONTESTED, make_contested_event, make_returned_event
from cpumond.scheduler.model import NO_TREE_SETTINGS, JobRecord, StartRecord
from cpumond.scheduler.settings import failures
from cpumond.scheduler.state import State, lifecycle
from cpumond.scheduler.state.budgets import counted_of
from cpumond.scheduler.state.reports import (
    GIVEN_UP,
    MAX_NODE_FAILURE_REASON,
    NO_CPU_TIMES,
    count_held,
    drop_implausible,
    explain_restart,
    find_task,
    has_run,
    is_over,
    is_wanted_again,
    job_record,
    known_size,
    list_counters,
    overrules,
    reported_usage,
    take_report,
)
from cpumond.scheduler.state.starts import make_start_record
from cpumond.scheduler.state.transaction import NOTHING, Transaction

START_GRACE_PERIODS = 2.0
"""Number of heartbeat periods after which a node should have reported that a job did not fit there."""
CONTESTED_S = 3600.0
MAX_CONTESTED = 10_000
"""Seconds between log entries on one job whose limit another program sets, and maximum number of such jobs."""
UNSENT_TIMEOUTS = 10.0
"""Multiple of ``waiting_job_timeout``: how long a job may wait until a heartbeat response has space for its start."""


@dataclass(slots=True)
class Receipt:
    """Result of a heartbeat: whether it is accepted, the change to store, and the jobs whose end the response
    acknowledges once the change is stored."""

    accepted: bool
    reason: str = ""
    register: bool = False
    full: bool = False
    transaction: Transaction = NOTHING
    acknowledged: list[str] = field(default_factory=list)


def receive(state: State, heartbeat: Heartbeat, now: float) -> Receipt:
    """Process a heartbeat: usage at once, ended jobs as a transaction (1.8, 8)."""
    node = state.nodes.get(heartbeat.node_id)
    if node is None:
        return Receipt(False, f"node {heartbeat.node_id} is not registered", register=True)
    if heartbeat.incarnation != node.incarnation:
        reason = f"node {node.id} registered as incarnation {node.run}, not {heartbeat.incarnation}"
        return Receipt(False, reason, register=True)
    if heartbeat.sequence <= node.sequence:
        return Receipt(False, f"sequence {heartbeat.sequence} is not newer than {node.sequence}")
    told = _merge(node, heartbeat)
    if told is None:
        return Receipt(False, f"it is a difference to a heartbeat other than {node.sequence}, the last one", full=True)
    reports, reported = told
    if node.sequence < 0:
        _meet(state, node, heartbeat, now)
    _note_alive(state, node, heartbeat, now)
    node.sequence = heartbeat.sequence
    foreign, node.strangers = ZERO, {}
    for report in reports:
        job = node.jobs.get(report.job_id) or node.stopping.get(report.job_id)
        if job is not None:
            if take_report(job, report, now) and job.report.mode in CONTESTED:
                _note_contested(state, job, now)
        elif report.from_scheduler:
            # A stopping job is not adopted, since an adopted job counts as continuing. The exception is a job that
            # exceeded its time limit: the replacement of such a job must wait for its end.
            record = state.record_of(report.operation_id)
            task = None if record is None else find_task(record, report.task)
            is_too_long = is_over(task, report.start_time, now)
            if (report.stopping and not is_too_long) or not _adopt(state, node, report, now):
                node.strangers[report.job_id] = report
                lifecycle.note_stranger(state, report, node)
                foreign = add(foreign, reported_usage(ZERO if task is None else task.resources, report))
        else:
            node.strangers[report.job_id] = report
            foreign = add(foreign, reported_usage(ZERO, report))
    node.foreign_usage = foreign
    node.foreign_ordered_cores = sum(report.cpu_limit for report in node.strangers.values())
    limited = [job for job in node.jobs.values() if job.task.job_time_limit is not None and job.id in reported]
    for job in limited:
        if is_over(job.task, job.began_at, now):
            lifecycle.stop(state, job, "aborted", failures.describe_too_long(job.task), now, fails=True)
    ended, acknowledged = _find_ended(state, node, heartbeat, reported, now)
    note_overcommit(node, now, state.rules.allowed_node_cpu_overcommit_ratio)
    transaction = NOTHING
    if ended:
        transaction = Transaction(operations=lifecycle.count_ended(state, ended, now), jobs=tuple(ended))
    return Receipt(True, transaction=transaction, acknowledged=acknowledged)


def _note_alive(state: State, node: Node, heartbeat: Heartbeat, now: float) -> None:
    if isinstance(heartbeat, NodeHeartbeat) and heartbeat.about is not msgspec.UNSET:
        node.about = heartbeat.about
    state.awaited.pop(node.id, None)
    if not node.is_online:
        state.happened.append(make_returned_event(node, now))
    node.is_online, node.lost_since, node.last_seen = True, None, now


def _note_contested(state: State, job: Job, now: float) -> None:
    """Log that another program sets a job's limit; at most once an hour for a job."""
    if state.contested.get(job.id, -math.inf) <= now - CONTESTED_S:
        state.contested[job.id] = now
        state.happened.append(make_contested_event(job, now))
    if len(state.contested) > MAX_CONTESTED:
        state.contested = {key: at for key, at in state.contested.items() if at > now - CONTESTED_S}


def _meet(state: State, node: Node, heartbeat: Heartbeat, now: float) -> None:
    """Process the first heartbeat that a node sends to this run of the scheduler, or that a new run of its agent sends.

    The agent does not know earlier start requests: the time-outs of these starts begin now. Jobs that an earlier run of
    the scheduler stopped are not adopted. They are not asked to stop again either, since that could shorten their time.
    """
    told = {report.job_id for report in heartbeat.jobs} | {ended.job_id for ended in heartbeat.finished_jobs}
    for job_id in [job_id for job_id in node.former_starts if job_id not in told]:
        del node.former_starts[job_id]
    for job in node.jobs.values():
        if job.first_sent_at is not None:
            job.first_sent_at = now
    for report in heartbeat.jobs:
        known = node.jobs.get(report.job_id)
        if report.stopping and known is None and (stopped := node.stopping.get(report.job_id)) is not None:
            if not stopped.was_reported and not stopped.keeps_place:
                _let_go(state, stopped)
        elif report.stopping and known is not None and not known.was_reported and not known.must_end:
            if is_over(known.task, report.start_time, now):
                continue  # it exceeded its time limit: it is asked to stop once more, and replaced after its end
            # The run that stopped the job may not have stored the stop. The next run must not count the job as active.
            lifecycle.stop(state, known, "aborted", "an earlier run of the scheduler stopped it", now, alone=True)
            _let_go(state, known)
            lifecycle.note_broken(state, known)
    lifecycle.stop_broken_gangs(state, now)


def _let_go(state: State, job: Job) -> None:
    """Treat a stopped job as unknown on its node from now on, but remember its start."""
    del job.node.stopping[job.id], state.jobs[job.id]
    job.node.former_starts[job.id] = make_start_record(job)


def _find_ended(
    state: State, node: Node, heartbeat: Heartbeat, reported: set[str], now: float
) -> tuple[list[JobRecord], list[str]]:
    ended: list[JobRecord] = []
    acknowledged = []
    for finished in heartbeat.finished_jobs:
        acknowledged.append(finished.job_id)
        reported.add(finished.job_id)
        record = _finish_job(state, node, finished, now)
        if record is not None:
            ended.append(record)
    for job in node.jobs.values():
        if job.id in reported:
            continue
        if job.state == "running":
            ended.append(job_record(job, "lost", now, reason=f"it vanished from node {node.id}"))
        elif _is_overdue(state, job, now):
            if job.element.operation.record.vault_bytes and not node.takes_secrets:
                reason = f"the agent of node {node.id} is of a version that passes no secrets to jobs: upgrade it"
            elif job.first_sent_at is None:
                reason = f"no answer to node {node.id} had space for its start within {now - job.start_time:.0f} s"
            else:
                waited = now - job.first_sent_at
                reason = f"node {node.id} did not start it within waiting_job_timeout ({waited:.0f} s)"
            # A job that an earlier run of the scheduler started may have run before the present run of the scheduler.
            ended.append(job_record(job, "aborted", now, reason=reason, may_have_run=job.counted == NO_CPU_TIMES))
    # A job that was sent and never reported may still wait on the node: the request to stop must reach it there.
    for job in node.stopping.values():
        if job.id in reported:
            continue
        if job.was_reported or job.first_sent_at is None or _is_overdue(state, job, now):
            ended.append(job_record(job, "aborted", now))
    return _blame_first(state, ended), acknowledged


def _is_overdue(state: State, job: Job, now: float) -> bool:
    """Whether a job that its node never reported counts as lost. Normally its node reports its end earlier (6.7)."""
    timeout_s = state.rules.waiting_job_timeout_s
    sent_timeout_s = timeout_s + START_GRACE_PERIODS * state.period_s
    if lifecycle.is_held(state, job, now):
        return False
    if job.first_sent_at is None:
        return now - job.start_time > max(UNSENT_TIMEOUTS * timeout_s, sent_timeout_s)
    return now - job.first_sent_at > sent_timeout_s


def _finish_job(state: State, node: Node, finished: FinishedJob, now: float) -> JobRecord | None:
    """Return the record of a job that its node reports as ended; None if this was counted, or the job is unknown."""
    job = node.jobs.get(finished.job_id) or node.stopping.get(finished.job_id)
    start_time = (finished.start_time or now) if job is None else job.start_time
    finished = drop_implausible(finished, node, start_time, now, job is None or job.is_resumed)
    if job is not None:
        is_too_long = is_over(job.task, finished.start_time, finished.finish_time or now)
        if finished.state == "aborted" and job.stop is None and is_too_long:
            # The scheduler's run that stopped it for its time limit is gone.
            finished = msgspec.structs.replace(finished, state="failed", reason=failures.describe_too_long(job.task))
        return job_record(job, finished.state, now, finished)
    operation = state.record_of(finished.operation_id)
    task = None if operation is None else find_task(operation, finished.task)
    if operation is None or task is None or node.tree is None:
        return None
    counted = state.finished_jobs.get(operation.id, {}).get(finished.job_id)
    if counted is not None and not overrules(finished.state, counted):
        return None
    # An earlier run of the scheduler started the job, and it ended before its adoption; or it was declared lost.
    known = node.former_starts.get(finished.job_id) if counted is None else counted
    start_time = finished.start_time or (now if counted is None else counted.start_time)
    finish_time = finished.finish_time or now
    end, reason = finished.state, finished.reason[:MAX_NODE_FAILURE_REASON]
    if end == "aborted" and is_over(task, start_time, finish_time):
        # The scheduler's run that stopped it for its time limit is gone.
        end, reason = "failed", failures.describe_too_long(task)
    elif is_wanted_again(task, end, finished.exit_code, reason):
        end, reason = "completed", explain_restart(finished.exit_code)
    return JobRecord(
        id=finished.job_id,
        operation_id=finished.operation_id,
        task=finished.task,
        tree=node.tree,
        node_id=node.id,
        state=end,
        start_time=start_time,
        finish_time=finish_time,
        cpu_limit=task.cpu_limit,
        current_cpu_limit=task.cpu_limit if counted is None else counted.current_cpu_limit,
        exit_code=finished.exit_code,
        reason=reason,
        max_memory=finished.max_memory,
        stderr_size=known_size(finished),
        cgroup=finished.cgroup,
        reclaimed=known is not None and known.reclaimed,
        failure=failures.at_limit(task, reason) if end == "failed" else None,
        has_run=has_run(finished),
        cookie=UNKNOWN if known is None else known.cookie,
        job_index=UNKNOWN if known is None else known.job_index,
        task_job_index=UNKNOWN if known is None else known.task_job_index,
        set_container_cpu_limit=None if known is None else known.set_container_cpu_limit,
        incarnation="" if known is None else known.incarnation,
        gang_rank=UNKNOWN if known is None else known.gang_rank,
        memory_limit=0 if known is None else known.memory_limit,
        held_core_seconds=count_held(task.cpu_limit, finished.ordered_cpu_seconds, finished, now - start_time)
        if state.budgets
        else None,
        backfill_until=None if known is None else known.backfill_until,
        **list_counters(finished),
    )


def _blame_first(state: State, ended: list[JobRecord]) -> list[JobRecord]:
    """If one heartbeat reports several jobs of a gang as failed, blame only the first: the others failed because of it,
    even if they failed before their node was asked to stop them."""
    first: dict[str, JobRecord] = {}
    for record in sorted(ended, key=lambda record: record.finish_time):
        if record.state == "failed" and record.operation_id in state.gangs.live:
            first.setdefault(record.operation_id, record)
    blamed = []
    for record in ended:
        cause = first.get(record.operation_id)
        if cause is None or cause is record or record.state != "failed":
            blamed.append(record)
            continue
        why = f"its gang stops with job {cause.id}: {cause.reason}"[:MAX_NODE_FAILURE_REASON]
        blamed.append(msgspec.structs.replace(record, state="aborted", reason=why))
    return blamed


def _adopt(state: State, node: Node, report: JobReport, now: float) -> bool:
    """Adopt an unknown job of the node if the job's operation still needs it; else stop it.

    Returns True if it was adopted."""
    operation = state.operations.get(report.operation_id)
    element = operation.elements.get(node.tree or "") if operation is not None else None
    task = None if operation is None else find_task(operation.record, report.task)
    counted = state.finished_jobs.get(report.operation_id, {}).get(report.job_id)
    known = node.former_starts.get(report.job_id) if counted is None else counted
    # Whether a retry policy starts this job again and its replacement has not started yet.
    run = None if operation is None or known is None else operation.retries
    why, is_awaited = "", run is not None and known is not None and run.has((report.task, known.cookie))
    if operation is None or task is None:
        why = "its operation is unknown or has ended"
    elif counted is not None and counted.state not in GIVEN_UP:
        why = f"it was reported as {counted.state} before"
    elif _was_aborted(known):
        why = "it was aborted, but has not ended yet"
    elif element is None or not element.is_running:
        why = f"its operation does not run in the node's tree {node.tree!r}"
    elif report.job_id in state.jobs or (operation.needed.get(task.name, 0) <= 0 and not is_awaited):
        why = "it was replaced while its node was away"
    elif known is not None and not is_awaited and not operation.numbers_of(task.name).is_free(known.cookie):
        why = "another job has its cookie now"
    elif operation.record.incarnation != ("" if known is None else known.incarnation):
        why = "its gang is in another incarnation now"
    elif operation.record.is_gang:
        why = "its gang starts again as a whole"
    if why or element is None or task is None:
        _stop_unknown(state, node, report, why)
        return False
    # The job was declared lost and stays counted as lost; its actual end will be counted in addition.
    if counted is not None:
        del state.finished_jobs[report.operation_id][report.job_id]  # its record is stored until its start is stored
    state.job_sequence += 1
    start_time = now if report.start_time is None else min(report.start_time, now)
    task = task if known is None else grow(task, known.memory_limit)
    job = Job(report.job_id, element, task, node, start_time, state.job_sequence)
    job.usage = reported_usage(job.limits, report)
    # Earlier usage is already counted: by an earlier run, or before the job was declared lost.
    job.counted = NO_CPU_TIMES if counted is None else cpu_times(counted)
    if counted is not None:
        job.settled = counted_of(counted)
    if known is not None:
        if isinstance(known, StartRecord):
            job.settled = known.counted
        job.is_resumed = True
        job.reclaimed = known.reclaimed
        job.cookie, job.index, job.task_index = known.cookie, known.job_index, known.task_job_index
        job.recall_gang(known.incarnation, known.gang_rank)
        job.backfill_until = known.backfill_until
    job.has_ceiling = lifecycle.recall_ceiling(job, known)
    lifecycle.start(state, job)
    take_report(job, report, now)
    return True


def _was_aborted(known: JobRecord | StartRecord | None) -> bool:
    """Return whether a command aborted a job. The command was acknowledged: such a job must not continue."""
    if isinstance(known, StartRecord):
        return known.stopped == "aborted"
    return known is not None and known.preemption is not None and known.preemption.kind == "aborted"


def _stop_unknown(state: State, node: Node, report: JobReport, why: str) -> None:
    # The request is made again after each heartbeat that reports the job as not stopping, and is kept nowhere else.
    tree = state.trees.get(node.tree or "")
    timeout_s = (NO_TREE_SETTINGS if tree is None else tree.config.settings).job_preemption_timeout / 1e3
    node.unwanted[report.job_id] = StopOrder(report.job_id, timeout_s, "aborted", why)


def _merge(node: Node, heartbeat: Heartbeat) -> tuple[list[JobReport], set[str]] | None:
    """Return the reports to process, and ids of all jobs of the node; None for a difference from an unknown state.

    A difference omits unchanged jobs. Unchanged jobs that the scheduler does not know are checked each time."""
    reports, reported = heartbeat.jobs, {report.job_id for report in heartbeat.jobs}
    if not isinstance(heartbeat, NodeHeartbeat) or heartbeat.base is None:
        return reports, reported
    if heartbeat.base != node.sequence:
        return None
    gone = set(heartbeat.gone)
    strangers = [each for job_id, each in node.strangers.items() if job_id not in reported and job_id not in gone]
    same = {job.id for jobs in (node.jobs, node.stopping) for job in jobs.values() if job.was_reported}
    same.update(each.job_id for each in strangers)
    reported |= same - gone
    return ([*reports, *strangers], reported) if len(reported) == heartbeat.job_count else None


def note_overcommit(node: Node, now: float, cpu_ratio: float) -> None:
    """Note since when the node's jobs may use more CPU than the node has (1.9)."""
    if not is_overcommitted(node, cpu_ratio):
        node.overcommitted_since = None
    elif node.overcommitted_since is None:
        node.overcommitted_since = now
        node.overcommit_count += 1
