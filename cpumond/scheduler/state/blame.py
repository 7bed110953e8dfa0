"""Holds off nodes on which jobs fail, and decides whether a failure is the node's fault (semantics.md 2.14). Pure.

Observations of a node are kept in memory only: a scheduler that takes over starts with none, except for cordons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from cpumond.core.words import count
from cpumond.scheduler.decide.placement import has_spare
from cpumond.scheduler.elements import Job, Node, OperationElement
from cpumond.scheduler.elements.failing import NO_STREAK, Failing, Streak, follow, is_success
from cpumond.scheduler.elements.node_sizes import fits
from cpumond.scheduler.events.noticed import make_failing_event, make_works_event
from cpumond.scheduler.model import MAX_WHY, JobRecord, NodeRecord, OperationRecord, Task
from cpumond.scheduler.model.node_failures import GUARD
from cpumond.scheduler.settings.failures import is_failure
from cpumond.scheduler.state import State
from cpumond.scheduler.state.node_commands import CordonNode
from cpumond.scheduler.state.reports import find_task

OTHER_NODE_S: Final = 15.0
"""Maximum seconds for which the replacement of a failed job waits for a different node with free resources."""
MOST_BLAMED: Final = 2
"""This many times ``max_failed_job_count`` failures of an operation on one node do not count yet, as long as the
operation has failed on no other node."""


class _Judge:
    """Evidence against nodes after some jobs have ended. ``records``: new records of these jobs' operations, if any."""

    def __init__(self, state: State, ended: Iterable[JobRecord], records: Iterable[OperationRecord] = ()) -> None:
        self.state, self.rules = state, state.rules.node_failures
        self.records = {record.id: record for record in records}
        self.failed_on: dict[str, list[str]] = {}
        for job in ended:
            if is_failure(job):
                self.failed_on.setdefault(job.operation_id, []).append(job.node_id)

    def find(self, operation_id: str) -> OperationRecord | None:
        return self.records.get(operation_id) or self.state.record_of(operation_id)

    def find_limit(self, operation_id: str) -> int:
        """Return how many failures of one operation on a node are evidence against the node. Returns 0 if no number is:
        the operation failed on several nodes and completed no job, so it probably causes the failures itself."""
        record = self.find(operation_id)
        if record is None:
            return 0
        nodes = {*record.failed_on, *self.failed_on.get(operation_id, ())}
        is_own_fault = len(nodes) > 1 and not any(each.completed for each in record.counts.values())
        return 0 if is_own_fault else max(record.max_failed_job_count, 2)

    def is_suspect(self, streak: Streak) -> bool:
        """Return whether a streak counts against its node: it has failures of several operations, failed starts, or as
        many failures of one operation as ``find_limit`` requires."""
        failed = [(each, limit) for name, each in streak.by_operation.items() if (limit := self.find_limit(name))]
        if len(failed) >= self.rules.operations or sum(each.not_started for each, _ in failed) >= self.rules.starts:
            return True
        return any(each.jobs >= limit for each, limit in failed)

    def is_evidence(self, job: JobRecord) -> bool:
        """Return whether a job's failure may be the node's fault. It is not if the job exceeded a limit of its task, or
        can run on no other node, unless the node itself reports the fault."""
        if job.failure is not None or not is_failure(job):
            return False
        return job.state == "aborted" or _fits_elsewhere(self.state, job)


def find_blamed(state: State, ended: Collection[JobRecord]) -> frozenset[str]:
    """Return ids of jobs that fail now but do not count as failed until a second node confirms the failure (3.6)."""
    if not state.rules.node_failures.enabled or not any(job.state == "failed" for job in ended):
        return frozenset()
    judge, blamed, by_node, numbers = _Judge(state, ended), list[str](), dict[str, list[JobRecord]](), Counter[str]()
    for job in ended:
        if job.node_id in state.nodes and (is_success(job) or judge.is_evidence(job)):
            by_node.setdefault(job.node_id, []).append(job)
    for node_id, told in by_node.items():
        node, failing = state.nodes[node_id], state.nodes[node_id].failing or Failing()
        is_bad = node.cordoned or failing.holds > 0 or judge.is_suspect(follow(failing.streak, told))
        numbers.clear()
        for job in told:
            numbers[job.operation_id] += is_failure(job)
            if job.state == "failed" and (
                job.not_started or _asks_another(judge, job, numbers[job.operation_id], is_bad)
            ):
                blamed += [job.id] if _fits_elsewhere(state, job) else []
    return frozenset(blamed)


def _asks_another(judge: _Judge, job: JobRecord, number: int, is_bad: bool) -> bool:
    """Return whether an operation must not fail yet because of one node's failures; never if only one failure is
    allowed: then no command may run twice. ``number``: failures of the operation on this node that end now, up to and
    including ``job``. ``is_bad``: whether there is evidence against the node."""
    record = judge.find(job.operation_id)
    limit = 0 if record is None else record.max_failed_job_count
    failed = 0 if record is None else record.failed_on.get(job.node_id, 0)
    return limit > 1 and (is_bad or failed + number <= MOST_BLAMED * limit)


def note_ends(state: State, ended: Collection[JobRecord], records: Iterable[OperationRecord], now: float) -> None:
    """Process jobs that are about to be recorded as ended. ``records``: the new records of the jobs' operations."""
    if not ended or not state.rules.node_failures.enabled:
        return
    judge, failed = _Judge(state, ended, records), dict[str, set[str]]()
    for job in ended:
        node = state.nodes.get(job.node_id)
        if is_success(job):
            if node is not None and node.failing is not None and follow(node.failing.streak, [job]) is NO_STREAK:
                forget(state, node, f"job {job.id} completed there", now)
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
        # The operation failed on a second node: it may itself have caused the failures that counted against the first.
        if node.failing is not None and node.failing.is_reported and not judge.is_suspect(node.failing.streak):
            forget(state, node, "the same operations fail on other nodes, too", now)


def _judge_node(judge: _Judge, node: Node, operations: Collection[str], now: float) -> None:
    """Hold a node off after failures of ``operations``, if the failures count against the node."""
    state, failing, rules, tree = judge.state, node.failing, judge.rules, judge.state.trees.get(node.tree or "")
    if failing is None or node.cordoned or tree is None:
        return
    again = failing.holds > 0 and any(map(judge.find_limit, operations))
    if not again and not judge.is_suspect(failing.streak):
        return
    nodes = [each for each in tree.nodes.values() if each.is_online and not each.matched_trees]
    nodes = [each for each in nodes if each.cordon is None or each.cordon.user == GUARD]
    held = sum(each.cordoned for each in nodes)
    most = min(max(1, int(len(nodes) * rules.max_held_ratio)), len(nodes) - 1)
    if held < most:
        failing.holds += 1
        failing.until = now + min(rules.pause_s * 2.0 ** (failing.holds - 1), rules.max_pause_s)
        state.held[node.id] = None
        tree.sum_total()
    elif failing.is_spared:
        return
    failing.is_spared = held >= most
    state.happened.append(make_failing_event(node, held + (held < most), len(nodes), most, now))


def forget(state: State, node: Node, why: str = "", now: float = 0.0) -> None:
    """Clear all evidence against a node: it gets jobs again unless it is cordoned. A given ``why`` makes an event."""
    if why and node.failing is not None and node.failing.is_reported:
        state.happened.append(make_works_event(node, why, now))
    node.failing = None
    _release(state, node)


def _release(state: State, node: Node) -> None:
    tree = state.trees.get(node.tree or "")
    if state.held.pop(node.id, 0) is None and tree is not None:
        tree.sum_total()


def forget_decided(state: State, nodes: Iterable[NodeRecord]) -> None:
    """Clear the evidence against nodes that a user cordoned or uncordoned; nodes that only got new tags keep it."""
    for record in nodes:
        if record.user_tags == state.nodes[record.id].user_tags:
            forget(state, state.nodes[record.id])


def end_pauses(state: State, now: float) -> None:
    """Let nodes whose hold is over get jobs again. One more failure then holds such a node off for longer."""
    for node in [state.nodes[node_id] for node_id in state.held]:
        if node.failing is not None and node.failing.until is not None and node.failing.until <= now:
            node.failing.until = None
            _release(state, node)


def list_cordons(state: State) -> Iterator[CordonNode]:
    """Return commands that cordon the nodes that were held off too often. The failures of one operation alone do not
    cordon a node, unless the node itself reports that it cannot start jobs."""
    rules = state.rules.node_failures
    for node in [state.nodes[node_id] for node_id in state.held]:
        failing = node.failing
        if failing is None or not 0 < rules.max_holds < failing.holds or node.cordon is not None:
            continue
        if failing.streak.reason or len(failing.streak.by_operation) >= rules.operations:
            why = f"held off {count(rules.max_holds, 'time')}, and again {failing.streak.describe()}"
            yield CordonNode(node.id, why[:MAX_WHY])


def _fits_elsewhere(state: State, job: JobRecord) -> bool:
    """Return whether a different node gets jobs and, if it had no other jobs, could run this one."""
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
    """Let the replacement of a job prefer other nodes for ``OTHER_NODE_S`` seconds."""
    operation = state.operations.get(job.operation_id)
    if operation is not None and not operation.record.is_gang:
        operation.shuns = operation.shuns or {}
        number, _ = operation.shuns.get(job.node_id, (0, 0.0))
        operation.shuns[job.node_id] = number + 1, now + OTHER_NODE_S


def note_start(job: Job) -> None:
    """Note that an operation with failures started a job: this job replaces one that failed on a different node."""
    shunned = job.element.operation.shuns
    for node_id in [node_id for node_id in shunned if node_id != job.node.id][:1]:
        number, until = shunned.pop(node_id)
        if number > 1:
            shunned[node_id] = number - 1, until


def shuns(state: State, element: OperationElement, task: Task, node: Node, now: float) -> bool:
    """Whether all jobs that an operation has to start failed on this node, and a different node can run them now."""
    shunned = element.operation.shuns
    number, until = shunned.get(node.id, (0, 0.0))
    if now >= until:
        shunned.pop(node.id, None)
    if now >= until or element.operation.needed_job_count > number:
        return False
    spare = state.rules.spare
    return any(
        other.id not in shunned and other.takes_jobs and element.may_use(other)
        and fits(other.free, task.resources) and has_spare(other, other.free, spare)
        for other in element.tree.nodes.values()
    )  # fmt: skip
