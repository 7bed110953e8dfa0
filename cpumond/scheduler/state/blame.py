"""Nodes on which jobs fail are held off; whose fault a failure is (semantics.md 2.14). Pure.

What is seen of a node is kept in memory only: whoever takes over begins anew, but for cordons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from cpumond.scheduler.decide.placement import has_spare
from cpumond.scheduler.elements import Job, Node, OperationElement, Tree
from cpumond.scheduler.elements.failing import (
    NO_STREAK,
    Failing,
    Streak,
    count_holdable,
    follow,
    is_evidence,
    is_own_fault,
    is_suspect,
)
from cpumond.scheduler.elements.node_sizes import fits
from cpumond.scheduler.events.noticed import tell_failing, tell_works
from cpumond.scheduler.model import MAX_WHY, JobRecord, NodeRecord, OperationRecord, Task
from cpumond.scheduler.model.node_failures import GUARD
from cpumond.scheduler.settings.failures import is_failure
from cpumond.scheduler.state import State
from cpumond.scheduler.state.node_commands import CordonNode
from cpumond.scheduler.state.reports import find_task

OTHER_NODE_S: Final = 15.0
"""How long the replacement of a job that failed waits at most for another node that has room."""


class _Judge:
    """Which operations speak against nodes, with the records that they have after the ends of some jobs."""

    def __init__(self, state: State, ended: Iterable[JobRecord], records: Mapping[str, OperationRecord]) -> None:
        self.state, self.records = state, records
        self.failed_on: dict[str, set[str]] = {}
        for job in ended:
            if is_failure(job):
                self.failed_on.setdefault(job.operation_id, set()).add(job.node_id)

    def find(self, operation_id: str) -> OperationRecord | None:
        return self.records.get(operation_id) or self.state.record_of(operation_id)

    def speaks(self, operation_id: str) -> bool:
        return not is_own_fault(self.find(operation_id), self.failed_on.get(operation_id, ()))

    def is_suspect(self, streak: Streak) -> bool:
        return is_suspect(streak, self.state.rules.node_failures, self.speaks)

    def is_evidence(self, job: JobRecord) -> bool:
        """Whether a job's failure is held against its node: where the job can run nowhere else, only by the node's own
        word."""
        return is_evidence(job) and (job.state == "aborted" or _fits_elsewhere(self.state, job))


def find_blamed(state: State, ended: Collection[JobRecord]) -> frozenset[str]:
    """Ids of the failed jobs among those that end now for which their nodes are to blame, as long as no second one
    agrees: they could not be started, or their node is suspected and can be held off, or was."""
    if not state.rules.node_failures.enabled or not any(job.state == "failed" for job in ended):
        return frozenset()
    judge = _Judge(state, ended, {})
    blamed = []
    for node_id in {job.node_id for job in ended if job.state == "failed"} & state.nodes.keys():
        node = state.nodes[node_id]
        failing = node.failing or Failing()
        told = [job for job in ended if job.node_id == node_id and (job.state == "completed" or judge.is_evidence(job))]
        streak = follow(failing.streak, told)
        is_bad = streak is not NO_STREAK and (
            node.cordoned or failing.holds > 0 or (judge.is_suspect(streak) and _may_hold(state, node))
        )
        blamed += [
            job.id
            for job in told
            if job.state == "failed" and (is_bad or job.not_started) and _fits_elsewhere(state, job)
        ]
    return frozenset(blamed)


def note_ends(state: State, ended: Collection[JobRecord], records: Iterable[OperationRecord], now: float) -> None:
    """Take in jobs that are about to be known as ended, with the new ``records`` of their operations."""
    if not ended or not state.rules.node_failures.enabled:
        return
    judge = _Judge(state, ended, {record.id: record for record in records})
    failed: dict[str, set[str]] = {}
    for job in ended:
        node = state.nodes.get(job.node_id)
        if job.state == "completed":
            if node is not None and node.failing is not None and follow(node.failing.streak, [job]) is NO_STREAK:
                _trust(state, node, f"job {job.id} completed there", now)
        elif job.state in ("failed", "aborted") and job.preemption is None:
            _prefer_others(state, job, now)
            if node is not None and judge.is_evidence(job):
                node.failing = node.failing or Failing()
                node.failing.streak = follow(node.failing.streak, [job])
                failed.setdefault(node.id, set()).add(job.operation_id)
    for node_id, operations in failed.items():
        _judge_node(judge, state.nodes[node_id], operations, now)
    found = [record for name in judge.failed_on if (record := judge.find(name)) is not None]
    for node_id in sorted({node_id for record in found for node_id in record.failed_on} & state.nodes.keys()):
        node = state.nodes[node_id]
        # An operation failed on a second node: what was held against the first may be the operation's own fault.
        if node.failing is not None and node.failing.is_told and not judge.is_suspect(node.failing.streak):
            _trust(state, node, "the same operations fail on other nodes, too", now)


def _judge_node(judge: _Judge, node: Node, operations: Collection[str], now: float) -> None:
    """Hold a node off after failures of ``operations``, if they speak against it."""
    state, failing, rules = judge.state, node.failing, judge.state.rules.node_failures
    tree = state.trees.get(node.tree or "")
    if failing is None or node.cordoned or tree is None:
        return
    again = failing.holds > 0 and any(map(judge.speaks, operations))
    if not again and not judge.is_suspect(failing.streak):
        return
    held, most, nodes = _count_held(state, tree)
    if held < most:
        failing.holds += 1
        failing.until = now + min(rules.pause_s * 2.0 ** (failing.holds - 1), rules.max_pause_s)
        state.held[node.id] = None
        tree.sum_total()
    elif failing.is_spared:
        return
    failing.is_spared = held >= most
    state.happened.append(tell_failing(node, rules, (held + (held < most), nodes, most), now))


def _count_held(state: State, tree: Tree) -> tuple[int, int, int]:
    """How many of a tree's nodes are held off, or cordoned for that, how many may be, and of how many nodes."""
    nodes = [
        node
        for node in tree.nodes.values()
        if node.is_online and not node.matched_trees and (node.cordon is None or node.cordon.user == GUARD)
    ]
    held = sum(node.cordoned for node in nodes)
    return held, count_holdable(len(nodes), state.rules.node_failures.max_held_ratio), len(nodes)


def _may_hold(state: State, node: Node) -> bool:
    tree = state.trees.get(node.tree or "")
    if tree is None:
        return False
    held, most, _ = _count_held(state, tree)
    return held < most


def _trust(state: State, node: Node, why: str, now: float) -> None:
    if node.failing is not None and node.failing.is_told:
        state.happened.append(tell_works(node, why, now))
    forget(state, node)


def forget(state: State, node: Node) -> None:
    """Let nothing be known against a node: it gets jobs, if nobody cordoned it."""
    node.failing = None
    if node.id in state.held:
        del state.held[node.id]
        _sum_total(state, node)


def forget_decided(state: State, nodes: Iterable[NodeRecord]) -> None:
    """Begin anew with nodes that somebody cordoned or uncordoned: their tags are the same, their cordon is not."""
    for record in nodes:
        if record.user_tags == state.nodes[record.id].user_tags:
            forget(state, state.nodes[record.id])


def end_pauses(state: State, now: float) -> None:
    """Give jobs again to nodes whose pause is over; one more failure holds them off for longer."""
    for node in [state.nodes[node_id] for node_id in state.held]:
        if node.failing is not None and node.failing.until is not None and node.failing.until <= now:
            node.failing.until = None
            del state.held[node.id]
            _sum_total(state, node)


def _sum_total(state: State, node: Node) -> None:
    tree = state.trees.get(node.tree or "")
    if tree is not None:
        tree.sum_total()


def list_cordons(state: State) -> Iterator[CordonNode]:
    """The commands that cordon nodes which were held off too often. One operation alone does not lead to that, unless
    the node itself says that it cannot start jobs."""
    rules = state.rules.node_failures
    for node in [state.nodes[node_id] for node_id in state.held] if rules.max_holds else ():
        failing = node.failing
        if failing is None or failing.holds <= rules.max_holds or node.cordon is not None:
            continue
        if failing.streak.reason or len(failing.streak.by_operation) >= rules.operations:
            why = f"held off {rules.max_holds} times, and again {failing.streak.tell()}"
            yield CordonNode(node.id, why[:MAX_WHY])


def _fits_elsewhere(state: State, job: JobRecord) -> bool:
    """Whether another node that gets jobs could hold the job, if it were empty."""
    operation = state.operations.get(job.operation_id)
    element = None if operation is None else operation.elements.get(job.tree)
    task = None if operation is None else find_task(operation.record, job.task)
    if element is None or task is None:
        return False
    return any(
        node.id != job.node_id and node.takes_jobs and element.may_use(node) and fits(node.capacity, task.resources)
        for node in element.tree.nodes.values()
    )


def _prefer_others(state: State, job: JobRecord, now: float) -> None:
    """Let the replacement of a job go to another node first."""
    operation = state.operations.get(job.operation_id)
    if operation is not None and not operation.record.is_gang:
        number, _ = operation.shuns.get(job.node_id, (0, 0.0))
        operation.shuns[job.node_id] = number + 1, now + OTHER_NODE_S


def note_start(job: Job) -> None:
    """A job of an operation with failures was started: one of those that failed elsewhere has its replacement."""
    shuns = job.element.operation.shuns
    for node_id in [node_id for node_id in shuns if node_id != job.node.id][:1]:
        number, until = shuns.pop(node_id)
        if number > 1:
            shuns[node_id] = number - 1, until


def shuns(state: State, element: OperationElement, task: Task, node: Node, now: float) -> bool:
    """Whether the only jobs that an operation has to start failed on this node, and another one has room now."""
    shunned = element.operation.shuns
    number, until = shunned.get(node.id, (0, 0.0))
    if now >= until:
        shunned.pop(node.id, None)
        return False
    if element.operation.needed_job_count > number:
        return False
    spare = state.rules.spare
    return any(
        other.id not in shunned
        and other.takes_jobs
        and element.may_use(other)
        and fits(other.free, task.resources)
        and has_spare(other, other.free, spare)
        for other in element.tree.nodes.values()
    )
