"""Gangs in the living state: placed whole, room kept for one at a time, stopped whole; pure (semantics.md 7.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from cpumond.fairshare.resources import ZERO, Vector
from cpumond.scheduler.decide import gangs, preemption_record
from cpumond.scheduler.decide.placement import GANG_WAITS, ONLY_RECLAIMED, room_beside, satisfaction, wants_jobs
from cpumond.scheduler.decide.starvation import priority_of, still_starves
from cpumond.scheduler.elements import Job, Node, Operation, OperationElement, Stop, Tree, count_loss
from cpumond.scheduler.model import Config, JobRecord, OperationRecord, PreemptionRecord, Rules
from cpumond.scheduler.state.nodes import Registration
from cpumond.scheduler.state.reports import MAX_NODE_FAILURE_REASON

MakeJob = Callable[[OperationElement, Any, Node], Job]
MOST_TRIES = 16
"""How many gangs of a tree are tried to be placed in one heartbeat period, and to be given room by one attempt."""
GANG_STOPS = "gang_stops"
"""Reason of a gang whose jobs of before have not all ended."""


class Gangs(Registration):
    """Starts and stops of gangs."""

    def __init__(self, rules: Rules, config: Config) -> None:
        self.gangs: dict[str, Operation] = {}
        """Those of the live operations whose jobs start together."""
        self.broken_gangs: dict[str, str] = {}
        """Those of which a job ended without its work done, since they were last looked at, and how."""
        self.reservations: dict[str, gangs.Reservation] = {}
        """By tree."""
        self._rests: dict[OperationElement, float] = {}
        """Until when no room is kept for a gang, since it was in vain before."""
        self._looked: dict[OperationElement, tuple[float, str]] = {}
        """When it was last tried to place a gang, and why it was not."""
        self._tries: dict[str, tuple[float, int]] = {}
        """Tree -> since when it is counted how many gangs were tried to be placed, and the number."""
        self._first_gang: dict[str, int] = {}
        """Tree -> the first gang that the next attempt to make room looks at, since the one before found none."""
        self._preempted_for_gang: dict[str, float] = {}
        """Tree -> when it was last tried to make room for a gang."""
        super().__init__(rules, config)

    # --- stopped whole

    def _install_operation(self, record: OperationRecord, now: float) -> None:
        super()._install_operation(record, now)
        live = self.operations.get(record.id) if record.is_gang else None
        if live is not None:
            self.gangs[record.id] = live
        else:
            self.gangs.pop(record.id, None)

    def _leave_tree(self, element: OperationElement, why: str, now: float) -> None:
        super()._leave_tree(element, why, now)
        self._forget_gang(element)

    def _remove_tree(self, tree: Tree, now: float) -> None:
        for element in tree.operations.values():
            self._forget_gang(element)
        super()._remove_tree(tree, now)
        for table in (self.reservations, self._tries, self._first_gang, self._preempted_for_gang):
            table.pop(tree.name, None)

    def _forget_gang(self, element: OperationElement) -> None:
        self._looked.pop(element, None)
        self._rests.pop(element, None)
        kept = self.reservations.get(element.tree.name)
        if kept is not None and kept.element is element:
            del self.reservations[element.tree.name]

    def _stop(
        self,
        job: Job,
        kind: Any,
        why: str,
        now: float,
        record: PreemptionRecord | None = None,
        fails: bool = False,
        alone: bool = False,
    ) -> None:
        """Stop a job, and of a gang all others with it unless ``alone``. A preemption has all of them in its plan."""
        if not job.is_active:
            return  # with its gang
        super()._stop(job, kind, why, now, record, fails)
        assert job.stop is not None
        if kind != "aborted":
            count_loss(job.element, job.stop.record.lost_core_seconds)
        operation = job.element.operation
        if operation.record.is_gang and kind != "preempted" and not alone:
            self._stop_rest(operation, kind, f"its gang stops with job {job.id}: {why}", now)

    def _install_job(self, record: JobRecord) -> None:
        job = self.jobs.get(record.id)
        super()._install_job(record)
        if job is not None and record.state != "completed":
            self.note_broken(job, record.state)

    def _remove_node(self, node: Node) -> None:
        jobs = list(node.jobs.values())
        super()._remove_node(node)
        for job in jobs:
            self.note_broken(job)

    def note_broken(self, job: Job, how: str = "gone") -> None:
        """Note that a job ended without its work done."""
        if job.element.operation.record.is_gang:
            self.broken_gangs[job.element.operation.id] = f"job {job.id} is {how}"

    def _blame_first(self, ended: list[JobRecord]) -> list[JobRecord]:
        """Ends of jobs that one heartbeat tells: of several of a gang that failed, the others went down with the first,
        as those do that fail before their node hears that they are to stop."""
        first: dict[str, JobRecord] = {}
        for record in sorted(ended, key=lambda record: record.finish_time):
            if record.state == "failed" and record.operation_id in self.gangs:
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

    def stop_broken_gangs(self, now: float) -> None:
        """Stop what is left of gangs of which a job ended without its work done: they start again as a whole."""
        while self.broken_gangs:
            operation_id, why = self.broken_gangs.popitem()
            operation = self.gangs.get(operation_id)
            if operation is not None and operation.needed:
                self._stop_rest(operation, "aborted", f"its gang starts again as a whole: {why}", now)

    def _give_time(self, stop: Stop, timeout_s: float) -> None:
        """Let a job that was told to stop have so long to end, and all that were told with it: a gang ends together."""
        stop.timeout_s = timeout_s
        operation = self.gangs.get(stop.record.operation_id)
        for node in self.nodes.values() if operation is not None else ():
            for job in node.stopping.values():
                if job.stop is not None and job.element.operation is operation and job.stop.since == stop.since:
                    job.stop.timeout_s = timeout_s

    def _stop_rest(self, operation: Operation, kind: Any, why: str, now: float) -> None:
        for element in operation.elements.values():
            for job in list(element.jobs.values()):
                self._stop(job, kind, why, now, alone=True)

    # --- started whole

    def find_reservation(self, tree: Tree, now: float) -> gangs.Reservation | None:
        """The room that is kept for a gang of the tree, None for none; one that has become useless is given up."""
        kept = self.reservations.get(tree.name)
        if kept is None:
            return None
        element = kept.element
        is_there = tree.operations.get(element.name) is element and wants_jobs(element)
        if now >= kept.until:
            self._rests[element] = now + tree.config.settings.gang_reservation_timeout / 1e3
        elif is_there and max(element.fair_share) > 0.0 and all(_takes_jobs(node, tree) for node in kept.rooms):
            return kept
        del self.reservations[tree.name]
        return None

    def reserved_on(self, node: Node, tree: Tree, now: float) -> Vector:
        """What of a node's room is kept for a gang."""
        kept = self.find_reservation(tree, now)
        return ZERO if kept is None else kept.rooms.get(node, ZERO)

    def _place_kept(self, tree: Tree, now: float, make_job: MakeJob) -> None:
        """Start the gang that room is kept for, if it fits by now.

        Not left to the order of service: with its room taken off no node may have the spare room that the regular stage
        asks for.
        """
        kept = self.find_reservation(tree, now)
        if kept is not None:
            self._place_gang(kept.element, now, make_job)

    def _place_gang(self, element: OperationElement, now: float, make_job: MakeJob) -> str:
        """Start all jobs that a gang needs, in one step; or the reason why not.

        A gang is looked at once a heartbeat period at most, and rarer where many wait.
        """
        last, reason = self._looked.get(element, (-math.inf, GANG_WAITS))
        if now - last < self.rules.heartbeat_period_s * max(1.0, len(self._looked) / MOST_TRIES):
            return reason
        begun, tries = self._tries.get(element.tree.name, (-math.inf, 0))
        if now - begun >= self.rules.heartbeat_period_s:
            begun, tries = now, 0
        if tries >= MOST_TRIES:
            return reason
        self._tries[element.tree.name] = begun, tries + 1
        reason = self._try_gang(element, now, make_job)
        if reason:
            self._looked[element] = now, reason
        return reason

    def _try_gang(self, element: OperationElement, now: float, make_job: MakeJob) -> str:
        if self._is_stopping(element):
            return GANG_STOPS
        if element.operation.record.preemption_mode == "graceful" and satisfaction(element) >= 1.0:
            return "graceful_over_fair_share"
        if not element.operation.needed:
            return "no_needed_jobs"
        reason = gangs.find_limit(element)
        if reason:
            return reason
        rooms, spare = self._rooms(element, now), self.rules.spare
        is_free = element.operation.record.allow_reclaimed
        places = gangs.find_places(element, rooms if is_free else gangs.within_orders(rooms), spare)
        if places is None:
            if not is_free and gangs.find_places(element, rooms, spare) is not None:
                return ONLY_RECLAIMED  # nobody else may be kept from this room for it
            self._reserve(element, now)
            return GANG_WAITS
        self._start_gang([make_job(element, task, node) for task, node in places])
        return ""

    def _start_gang(self, jobs: list[Job]) -> None:
        element = jobs[0].element
        kept = self.reservations.get(element.tree.name)
        if kept is not None and kept.element is element:
            del self.reservations[element.tree.name]
        self._looked.pop(element, None)
        self._rests.pop(element, None)
        for job in jobs:
            self._start_new(job)

    def _is_stopping(self, element: OperationElement) -> bool:
        """Whether jobs of the gang's last run may still be there, in whichever tree: its next one must not meet them,
        and where one of them is to fail, it is not among the needed ones yet. What an earlier run of the scheduler told
        to stop, or what came back with its node, is a stranger there."""
        operation = element.operation
        for node in self.nodes.values():
            if node.stopping and any(job.element.operation is operation for job in node.stopping.values()):
                return True
            strangers = node.strangers.values()
            if strangers and any(each.from_scheduler and each.operation_id == operation.id for each in strangers):
                return True
        return False

    def _rooms(self, element: OperationElement, now: float) -> dict[Node, Vector]:
        """What is free for a gang on each node that takes jobs."""
        tree = element.tree
        kept = self.find_reservation(tree, now)
        others = {} if kept is None or kept.element is element else kept.rooms
        return {
            node: room_beside(node.free, others.get(node, ZERO))
            for node in tree.nodes.values()
            if _takes_jobs(node, tree)
        }

    def _reserve(self, element: OperationElement, now: float) -> None:
        tree = element.tree
        timeout_s = tree.config.settings.gang_reservation_timeout / 1e3
        if not timeout_s or max(element.fair_share) <= 0.0 or self.find_reservation(tree, now) is not None:
            return
        if self._rests.get(element, now) > now:
            return
        nodes = [node for node in tree.nodes.values() if _takes_jobs(node, tree)]
        found = gangs.find_reservation(element, nodes, now + timeout_s)
        if found is not None:
            self.reservations[tree.name] = found

    def _preempt_for_gang(
        self, targets: list[tuple[OperationElement, Any]], tree: Tree, now: float, budget: float, make_job: MakeJob
    ) -> bool:
        """Make room for the first starving gang that it can be made for, on several nodes at once; or stop nobody."""
        last = self._preempted_for_gang.get(tree.name)
        if last is not None and now - last < tree.config.settings.preemptive_scheduling_backoff / 1e3:
            return False
        self._preempted_for_gang[tree.name] = now
        first = self._first_gang.pop(tree.name, 0)
        if first + MOST_TRIES < len(targets):
            self._first_gang[tree.name] = first + MOST_TRIES
        for element, priority in targets[first : first + MOST_TRIES]:
            if tree.operations.get(element.name) is not element or not wants_jobs(element):
                continue
            if not still_starves(element, priority) or priority_of(element) == "none" or self._is_stopping(element):
                continue
            plan = gangs.plan_for_gang(element, priority, self._rooms(element, now), now, self.rules.spare)
            if plan is None or len(plan.victims) > budget:
                continue
            jobs = [make_job(element, task, node) for task, node in plan.places]
            on_node = {job.node: job for job in reversed(jobs)}
            records = []
            for victim, why in plan.victims:
                place = on_node.get(victim.node, jobs[0])
                records.append(
                    preemption_record.make_record(victim, "preempted", why, now, place.id, element, plan.priority)
                )
            for (victim, why), record in zip(plan.victims, records, strict=True):
                self._stop(victim, "preempted", why, now, record)
            self._start_gang(jobs)
            self._first_gang.pop(tree.name, None)
            return True
        return False


def _takes_jobs(node: Node, tree: Tree) -> bool:
    """Whether a node may be given jobs before its next heartbeat: it has sent one to this run, and is there."""
    if node.cordoned or node.matched_trees:
        return False
    return node.is_online and node.sequence >= 0 and tree.nodes.get(node.id) is node
