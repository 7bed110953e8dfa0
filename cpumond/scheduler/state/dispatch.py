"""A heartbeat: its reports are taken in, jobs are started and stopped, the answer is made; pure (1.8, 7, 8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from cpumond.core.wire import (
    FinishedJob,
    Heartbeat,
    HeartbeatAnswer,
    JobOrder,
    JobReport,
    NodeHeartbeat,
    StopOrder,
    cpu_times,
)
from cpumond.fairshare.resources import ZERO, add
from cpumond.scheduler.decide import preemption, preemption_record, starvation
from cpumond.scheduler.decide.cost import next_unspared
from cpumond.scheduler.decide.placement import ServiceOrder, has_spare, place_jobs, wants_jobs
from cpumond.scheduler.decide.swap import TargetPriority
from cpumond.scheduler.decide.victims import (
    find_graceful,
    find_limit_violators,
    find_overcommit_victims,
    is_overcommitted,
)
from cpumond.scheduler.elements import Job, Node, OperationElement, Tree, end_job
from cpumond.scheduler.events.noticed import CONTESTED, tell_contested, tell_returned
from cpumond.scheduler.model import NO_TREE_SETTINGS, JobRecord, OperationRecord, StartRecord, Task
from cpumond.scheduler.settings import operations
from cpumond.scheduler.state.gangs import Gangs
from cpumond.scheduler.state.maintenance import find_drained
from cpumond.scheduler.state.reports import (
    GIVEN_UP,
    MAX_NODE_FAILURE_REASON,
    NO_CPU_TIMES,
    drop_implausible,
    find_task,
    is_over,
    job_record,
    list_counters,
    overrules,
    reported_usage,
    take_report,
    tell_too_long,
)
from cpumond.scheduler.state.tables import renew_needed
from cpumond.scheduler.state.transaction import NOTHING, Transaction

START_GRACE_PERIODS = 2.0
"""Heartbeat periods within which a node itself should have reported a job that had no room there."""
MAX_ORDERS = 200
MAX_ORDER_BYTES = 1_048_576
"""Jobs to start in one answer: how many, and how much JSON unless it is only one. Agents refuse huge answers."""
ABORTED = "aborted: the operation was suspended with abort_running_jobs"
"""The reason of a job that its operation's suspension ends, as in its preemption record."""
CONTESTED_S = 3600.0
MAX_CONTESTED = 10_000
"""How long it is not told again that the limit of a job is another program's; of how many jobs that is remembered."""
UNSENT_TIMEOUTS = 10.0
"""So many times waiting_job_timeout may a job wait for an answer that has room for its order."""


@dataclass(slots=True)
class Receipt:
    """The result of a heartbeat: whether it counts, what must be stored, what the answer then acknowledges."""

    accepted: bool
    reason: str = ""
    register: bool = False
    full: bool = False
    transaction: Transaction = NOTHING
    acknowledged: list[str] = field(default_factory=list)


class Dispatch(Gangs):
    """Heartbeats taken in and answered."""

    def receive(self, heartbeat: Heartbeat, now: float) -> Receipt:
        """Take in a heartbeat: usage at once, ended jobs as a transaction (1.8, 8)."""
        node = self.nodes.get(heartbeat.node_id)
        if node is None:
            return Receipt(False, f"node {heartbeat.node_id} is not registered", register=True)
        if heartbeat.incarnation != node.incarnation:
            reason = f"node {node.id} registered as incarnation {node.run}, not {heartbeat.incarnation}"
            return Receipt(False, reason, register=True)
        if heartbeat.sequence <= node.sequence:
            return Receipt(False, f"sequence {heartbeat.sequence} is not newer than {node.sequence}")
        told = _merge(node, heartbeat)
        if told is None:
            return Receipt(False, f"the heartbeat that it differs from is not {node.sequence}, the last one", full=True)
        reports, reported = told
        if node.sequence < 0:
            self._meet(node, heartbeat, now)
        self._note_alive(node, heartbeat, now)
        node.sequence = heartbeat.sequence
        foreign, node.strangers = ZERO, {}
        for report in reports:
            job = node.jobs.get(report.job_id) or node.stopping.get(report.job_id)
            if job is not None:
                if take_report(job, report, now) and job.report.mode in CONTESTED:
                    self._note_contested(job, now)
            elif report.from_scheduler:
                # A stopping job is not taken over: it would count as work that goes on. Unless it has run too long:
                # then its replacement must wait for its end.
                task = self._task_of(report)
                is_too_long = is_over(task, report.start_time, now)
                if (report.stopping and not is_too_long) or not self._adopt(node, report, now):
                    node.strangers[report.job_id] = report
                    foreign = add(foreign, reported_usage(ZERO if task is None else task.resources, report))
            else:
                node.strangers[report.job_id] = report
                foreign = add(foreign, reported_usage(ZERO, report))
        node.foreign_usage = foreign
        node.foreign_ordered_cores = sum(report.cpu_limit for report in node.strangers.values())
        limited = [job for job in node.jobs.values() if job.task.job_time_limit is not None and job.id in reported]
        for job in limited:
            if is_over(job.task, job.began_at, now):
                self._stop(job, "aborted", tell_too_long(job.task), now, fails=True)
        ended, acknowledged = self._find_ended(node, heartbeat, reported, now)
        _note_overcommit(node, now, self.rules.allowed_node_cpu_overcommit_ratio)
        transaction = NOTHING
        if ended:
            transaction = Transaction(operations=self._count(ended, now), jobs=tuple(ended))
        return Receipt(True, transaction=transaction, acknowledged=acknowledged)

    def _note_alive(self, node: Node, heartbeat: Heartbeat, now: float) -> None:
        if isinstance(heartbeat, NodeHeartbeat) and heartbeat.about is not msgspec.UNSET:
            node.about = heartbeat.about
        self._awaited.pop(node.id, None)
        if not node.is_online:
            self.happened.append(tell_returned(node, now))
        node.is_online, node.lost_since, node.last_seen = True, None, now

    def _note_contested(self, job: Job, now: float) -> None:
        """Tell once an hour at most that a job's limit is not the agent's."""
        if self._contested.get(job.id, -math.inf) <= now - CONTESTED_S:
            self._contested[job.id] = now
            self.happened.append(tell_contested(job, now))
        if len(self._contested) > MAX_CONTESTED:
            self._contested = {key: at for key, at in self._contested.items() if at > now - CONTESTED_S}

    def _meet(self, node: Node, heartbeat: Heartbeat, now: float) -> None:
        """The first heartbeat to this run of the scheduler, or of this run of the agent.

        Orders are new to it, so their time to start begins. What an earlier run of the scheduler told to stop is not
        taken over, and not told again, which could shorten its time.
        """
        told = {report.job_id for report in heartbeat.jobs} | {ended.job_id for ended in heartbeat.finished_jobs}
        node.reclaimed_strangers &= told
        for job in node.jobs.values():
            if job.first_sent_at is not None:
                job.first_sent_at = now
        for report in heartbeat.jobs:
            known = node.jobs.get(report.job_id)
            if report.stopping and known is None and (stopped := node.stopping.get(report.job_id)) is not None:
                if not stopped.was_reported and not stopped.is_failing:
                    del node.stopping[stopped.id], self.jobs[stopped.id]
                    self._note_class(stopped)
            elif report.stopping and known is not None and not known.was_reported:
                end_job(known)
                self._note_class(known)
                del self.jobs[known.id]
                self._unstored.pop(known.id, None)
                renew_needed(known)
                self.note_broken(known)
        self.stop_broken_gangs(now)

    def _note_class(self, job: Job) -> None:
        """Keep the class of a job that is a stranger from now on."""
        if job.reclaimed:
            job.node.reclaimed_strangers.add(job.id)

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
                ended.append(job_record(job, "lost", now, reason=f"it vanished from node {node.id}"))
            elif self._is_overdue(job, now):
                if job.first_sent_at is None:
                    reason = f"no answer to node {node.id} had room for its order within {now - job.ordered_at:.0f} s"
                else:
                    waited = now - job.first_sent_at
                    reason = f"node {node.id} did not start it within waiting_job_timeout ({waited:.0f} s)"
                ended.append(job_record(job, "aborted", now, reason=reason))
        # A job that was sent and never reported may wait on the node, where the order to stop must still find it.
        for job in node.stopping.values():
            if job.id in reported:
                continue
            if job.was_reported or job.first_sent_at is None or self._is_overdue(job, now):
                ended.append(job_record(job, "aborted", now))
        return self._blame_first(ended), acknowledged

    def _count(self, ended: Collection[JobRecord], now: float) -> tuple[OperationRecord, ...]:
        """The records of the operations whose jobs ended; jobs that are stopped by an operation's end count, too."""
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

    def _is_overdue(self, job: Job, now: float) -> bool:
        """Whether a job that its node never reported is given up, which the node itself does before (6.7)."""
        timeout_s = self.rules.waiting_job_timeout_s
        sent_timeout_s = timeout_s + START_GRACE_PERIODS * self.period_s
        if job.first_sent_at is None:
            return now - job.ordered_at > max(UNSENT_TIMEOUTS * timeout_s, sent_timeout_s)
        return now - job.first_sent_at > sent_timeout_s

    def _finish_job(self, node: Node, finished: FinishedJob, now: float) -> JobRecord | None:
        """The record of a job that the node says has ended; None if it is counted already or not known."""
        job = node.jobs.get(finished.job_id) or node.stopping.get(finished.job_id)
        start_time = (finished.start_time or now) if job is None else job.start_time
        finished = drop_implausible(finished, node, start_time, now)
        if job is not None:
            state = finished.state
            if (
                state == "aborted"
                and job.stop is None
                and is_over(job.task, finished.start_time, finished.finish_time or now)
            ):
                # The run of the scheduler that told it to stop for its time limit is gone.
                finished = msgspec.structs.replace(finished, state="failed", reason=tell_too_long(job.task))
            return job_record(job, finished.state, now, finished)
        operation = self.record_of(finished.operation_id)
        task = None if operation is None else find_task(operation, finished.task)
        if operation is None or task is None or node.tree is None:
            return None
        counted = self.finished_jobs.get(operation.id, {}).get(finished.job_id)
        if counted is not None and not overrules(finished.state, counted):
            return None
        # An earlier run started the job, and it ended before it could be taken over; or it was given up.
        start_time = finished.start_time or (now if counted is None else counted.start_time)
        finish_time = finished.finish_time or now
        state, reason = finished.state, finished.reason[:MAX_NODE_FAILURE_REASON]
        if state == "aborted" and is_over(task, start_time, finish_time):
            # The run of the scheduler that told it to stop for its time limit is gone.
            state, reason = "failed", tell_too_long(task)
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
            max_memory=finished.max_memory,
            cgroup=finished.cgroup,
            reclaimed=_was_reclaimed(node, finished.job_id, counted),
            **list_counters(finished),
        )

    def _task_of(self, report: JobReport) -> Task | None:
        """The task of a job of the scheduler, as far as its operation is still known."""
        record = self.record_of(report.operation_id)
        return None if record is None else find_task(record, report.task)

    def _adopt(self, node: Node, report: JobReport, now: float) -> bool:
        """Take over a job of the node that is not known here, if its operation still needs it; else stop it.

        True: it was taken over.
        """
        operation = self.operations.get(report.operation_id)
        element = operation.elements.get(node.tree or "") if operation is not None else None
        task = None if operation is None else find_task(operation.record, report.task)
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
        elif operation.record.is_gang:
            why = "its gang starts again as a whole"
        if why or element is None or task is None:
            self._stop_unknown(node, report, why)
            return False
        # It stays counted as lost, which it was for a while; how it ends now is counted besides.
        if counted is not None:
            del self.finished_jobs[report.operation_id][report.job_id]
            self._expired["job", report.job_id] = None
        self.job_sequence += 1
        start_time = now if report.start_time is None else min(report.start_time, now)
        job = Job(report.job_id, element, task, node, start_time, self.job_sequence)
        job.usage = reported_usage(job.limits, report)
        # What it used before is counted already: by an earlier run, or before it was given up.
        job.counted = NO_CPU_TIMES if counted is None else cpu_times(counted)
        job.reclaimed = _was_reclaimed(node, job.id, counted)
        self._start(job)
        take_report(job, report, now)
        return True

    def _resume(self, record: StartRecord, now: float) -> None:
        """Count a job that an earlier run started as being on its node, which may not have heard of it."""
        operation, node = self.operations.get(record.operation_id), self.nodes.get(record.node_id)
        element = None if operation is None else operation.elements.get(record.tree)
        task = None if operation is None else find_task(operation.record, record.task)
        if node is None or element is None or task is None or node.tree != record.tree:
            self._expired["start", record.id] = None  # if its node has it, the node is told to stop it
            if node is not None and record.reclaimed:
                node.reclaimed_strangers.add(record.id)
            return
        if self.finished_jobs.get(record.operation_id, {}).pop(record.id, None) is not None:
            self._expired["job", record.id] = None  # it was given up, and taken over after that
        self.job_sequence = max(self.job_sequence, record.sequence)
        job = Job(record.id, element, task, node, record.start_time, record.sequence)
        job.is_stored = True
        job.first_sent_at = now
        job.counted = NO_CPU_TIMES
        job.reclaimed = record.reclaimed
        self._start(job)
        if record.stopped:
            told = preemption_record.make_record(job, record.stopped, "", now)
            told = msgspec.structs.replace(told, why=record.why)
            self._stop(job, record.stopped, record.why, now, told, record.fails)
            del self._unstored_stops[job.id]

    def waits_for_store(self, node_id: str) -> bool:
        """Whether jobs of the node must be stored before an answer may order them."""
        return not all(job.is_stored for job in self.nodes[node_id].jobs.values())

    def starts_to_store(self) -> list[StartRecord]:
        """What is to be stored, then told to ``note_stored``: jobs that were started since, and those that were told to
        stop, whose work they may do."""
        self._unstored = {job.id: job for job in self._unstored.values() if job.is_active}
        stops = {job.id: job for job in self._unstored_stops.values() if self.jobs.get(job.id) is job}
        self._unstored_stops = stops
        return [_start_record(job) for job in (*self._unstored.values(), *stops.values())]

    def stops_to_store(self, operation_id: str) -> list[StartRecord]:
        """An operation's stored jobs as they are once told to stop, for the write of the command that does it."""
        elements = self.operations[operation_id].elements.values()
        jobs = [job for element in elements for job in element.jobs.values() if job.is_stored]
        return [msgspec.structs.replace(_start_record(job), stopped="aborted", why=ABORTED) for job in jobs]

    def note_stored(self, starts: Iterable[StartRecord]) -> None:
        """These are stored now."""
        for record in starts:
            if record.stopped:
                self._unstored_stops.pop(record.id, None)
                continue
            job = self._unstored.pop(record.id, None)
            if job is not None:
                job.is_stored = True
                if not job.is_active and self.jobs.get(job.id) is job:
                    self._unstored_stops[job.id] = job

    def _stop_unknown(self, node: Node, report: JobReport, why: str) -> None:
        # Made anew after each heartbeat that reports the job as not stopping; nothing else remembers the order.
        tree = self.trees.get(node.tree or "")
        settings = NO_TREE_SETTINGS if tree is None else tree.config.settings
        timeout_s = settings.job_preemption_timeout / 1e3
        node.unwanted[report.job_id] = StopOrder(report.job_id, timeout_s, "aborted", why)

    def schedule(self, node_id: str, now: float, new_id: Callable[[], str]) -> None:
        """Choose what a node that has sent a heartbeat starts and stops (7.1)."""
        node = self.nodes[node_id]
        tree = self.trees.get(node.tree or "")
        if tree is None or not tree.update_count or self._is_awaiting(tree, now):
            return
        for job, why in find_drained(node):
            self._drain(job, why, now)
        self.stop_broken_gangs(now)
        for job, why in find_graceful(node, now):
            self._stop(job, "graceful", why, now)
        if not node.matched_trees:
            self._start_jobs(node, tree, now, new_id)
        rules = self.rules
        waits_s = (rules.overcommit_duration_s, rules.additional_reclaimed_overcommit_duration_s)
        ratio = rules.allowed_node_cpu_overcommit_ratio
        for job, why in find_overcommit_victims(node, now, *waits_s, ratio):
            self._stop(job, "overcommit", why, now)
        _note_overcommit(node, now, ratio)

    def is_at_rest(self, node: Node, is_barren: bool) -> bool:
        """Whether a heartbeat of the node that tells nothing new would start and stop nothing, by what was left since
        the last update: no order is under way, nobody wants its room or its jobs. For runs ahead of time.

        ``is_barren``: that nobody finds a place in its free room is known."""
        tree = self.trees.get(node.tree or "")
        if tree is None or not tree.update_count:
            return True
        order = self._orders.get(tree.name)
        is_draining = node.cordon is not None and node.cordon.drain
        if order is None or node.stopping or is_draining or node.overcommitted_since is not None:
            return False
        for job in node.jobs.values():
            if not job.was_reported or job.element.operation.record.preemption_mode == "graceful":
                return False
        targets = self._targets(tree)
        if targets.gangs or (node.jobs and targets.below):
            return False
        return node.cordoned or is_barren or order.best() is None or not has_spare(node, node.free, self.rules.spare)

    def _start_jobs(self, node: Node, tree: Tree, now: float, new_id: Callable[[], str]) -> None:
        def make_job(element: OperationElement, task: Task, on: Node) -> Job:
            self.job_sequence += 1
            return Job(new_id(), element, task, on, now, self.job_sequence)

        order = self._orders.get(tree.name) or self._orders.setdefault(tree.name, ServiceOrder(tree))
        if not node.cordoned:
            self._place_kept(tree, now, make_job)
            place_jobs(
                order, node, self.rules.spare, make_job, self._start_new,
                lambda element: self._place_gang(element, now, make_job), lambda: self.reserved_on(node, tree, now),
            )  # fmt: skip
        self._preempt(node, tree, now, make_job)

    def _drain(self, job: Job, why: str, now: float) -> None:
        """Tell a job to stop because its node is drained."""
        self._stop(job, "aborted", why, now)
        cordon = job.node.cordon
        if cordon is not None and cordon.drain == "graceful" and job.stop is not None:
            self._give_time(job.stop, job.element.tree.config.settings.job_graceful_preemption_timeout / 1e3)

    def _is_awaiting(self, tree: Tree, now: float) -> bool:
        """Whether a node of the tree may have jobs of a version that stored no starts."""
        if now >= self._await_until:
            self._awaited.clear()
        return any(node_id in tree.nodes for node_id in self._awaited)

    def _preempt(
        self, node: Node, tree: Tree, now: float, make_job: Callable[[OperationElement, Task, Node], Job]
    ) -> None:
        """The preemptive part of a heartbeat: at most one job is started by it, then limits are enforced (6.6)."""
        settings = tree.config.settings
        last = node.last_preemptive_attempt
        if last is not None and now - last < settings.preemptive_scheduling_backoff / 1e3:
            return
        node.last_preemptive_attempt = now
        budget = 0.0 if node.cordoned else self.count_preemptions_left(tree, now)
        plan, is_done = None, False
        if budget > 0 and (gangs := self._targets(tree).gangs):
            is_done = self._preempt_for_gang(gangs, tree, now, budget, make_job)
        if budget > 0 and node.jobs and not is_done:
            reserved = self.reserved_on(node, tree, now)
            plan = preemption.plan_preemption(node, self._targets(tree), now, self.rules.spare, reserved)
            if plan is None:
                # The next attempt does not wait for longer than the protection of a job here lasts.
                until = next_unspared(node, now)
                node.last_preemptive_attempt = min(now, until - settings.preemptive_scheduling_backoff / 1e3)
        if plan is not None and len(plan.victims) <= budget:
            job = make_job(plan.element, plan.task, node)
            for victim, why in plan.victims:
                record = preemption_record.make_record(
                    victim, "preempted", why, now, job.id, job.element, plan.priority
                )
                self._stop(victim, "preempted", why, now, record)
            self._start_new(job)
        for victim, _, why in find_limit_violators(node):
            self._stop(victim, "limit_violated", why, now)

    def _targets(self, tree: Tree) -> preemption.Targets:
        """The operations that may preempt: those that starved at the last update, with their priorities then."""
        targets = self._starving.get(tree.name)
        if targets is None:
            ranked = self._orders[tree.name].rank(starvation.starving_operations(tree))
            levels = ((element, starvation.priority_of(element)) for element in ranked)
            pairs = [(element, level) for element, level in levels if level != "none"]
            targets = self._starving[tree.name] = preemption.Targets(pairs, _may_preempt)
        return targets

    def count_preemptions_left(self, tree: Tree, now: float) -> float:
        """How many jobs of a tree may still be preempted: ``max_preemptions_per_minute`` less the recent ones."""
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
            differences=True,
            period_s=self.period_s if self.period_s > self.rules.heartbeat_period_s else None,
            knows_about=node.about is not None,
            level=node.level,
        )

    def _make_orders(self, node: Node, now: float) -> list[JobOrder]:
        """The orders of one answer, oldest first.

        Where there are too many, those go first that no answer has carried, then those that were carried longest ago:
        jobs that wait on the node for room, which it does not report, must not displace the others.
        """
        starting = [job for job in node.jobs.values() if job.state == "starting" and job.is_stored]
        starting.sort(key=lambda job: -math.inf if job.last_sent_at is None else job.last_sent_at)
        chosen: list[tuple[Job, JobOrder]] = []
        total_bytes = 0
        for job in starting:
            order = self._order(job)
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

    def _order(self, job: Job) -> JobOrder:
        task, record, about = job.task, job.element.operation.record, job.node.about
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
            checkpoints=task.checkpoints,
            # An agent that can give no idle class is not asked to: the job would have no ceiling, at a usual weight.
            reclaimed=job.reclaimed and (about is None or bool(about.idle_class)),
            set_container_cpu_limit=task.set_container_cpu_limit,
        )


def _was_reclaimed(node: Node, job_id: str, counted: JobRecord | None) -> bool:
    """Whether a job that is a stranger on its node was started on reclaimed CPU, as far as that is known."""
    return job_id in node.reclaimed_strangers if counted is None else counted.reclaimed


def _start_record(job: Job) -> StartRecord:
    stop = job.stop
    return StartRecord(
        id=job.id,
        operation_id=job.element.operation.id,
        task=job.task.name,
        tree=job.element.tree.name,
        node_id=job.node.id,
        start_time=job.start_time,
        sequence=job.sequence,
        stopped="" if stop is None else stop.record.kind,
        why="" if stop is None else stop.record.why,
        fails=stop is not None and stop.fails,
        reclaimed=job.reclaimed,
    )


def _may_preempt(element: OperationElement, level: TargetPriority) -> bool:
    """Whether an operation of ``_targets`` still wants jobs in the tree and has not got its share meanwhile."""
    is_there = element.tree.operations.get(element.name) is element
    return is_there and wants_jobs(element) and starvation.still_starves(element, level)


def _merge(node: Node, heartbeat: Heartbeat) -> tuple[list[JobReport], set[str]] | None:
    """The reports to take in, and the ids of all jobs that the node has; None for a difference that does not fit.

    A difference leaves out jobs that are as before; of these, the ones that are not known here are looked at each time.
    """
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


def _note_overcommit(node: Node, now: float, cpu_ratio: float) -> None:
    """Note since when the node's jobs may use more than it has (1.9)."""
    if not is_overcommitted(node, cpu_ratio):
        node.overcommitted_since = None
    elif node.overcommitted_since is None:
        node.overcommitted_since = now
        node.overcommit_count += 1
