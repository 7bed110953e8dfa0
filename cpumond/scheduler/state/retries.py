"""Jobs that a retry policy starts again: the policy, and their places and times; pure (semantics.md 3.9)."""

from __future__ import annotations

from heapq import heappop

from cpumond.core.words import quoted
from cpumond.fairshare.resources import MEMORY, format_amount
from cpumond.scheduler.elements import Job, Operation, PoolElement, share_needed
from cpumond.scheduler.elements.retry_run import RetryRun
from cpumond.scheduler.model import JobRecord, PreemptionRecord, Task
from cpumond.scheduler.settings import failures, operations
from cpumond.scheduler.settings.retries import NO_TERMS, Terms, find_kind, is_for_preempted, parse_rule
from cpumond.scheduler.state import State
from cpumond.scheduler.state.reports import find_task


def find_policy(task: Task | None, pool: PoolElement | None) -> tuple[str, ...]:
    """Return the policy of a task; if it has none, that of the nearest pool above with a policy; else ()."""
    policy = None if task is None else task.retry_policy
    while policy is None and pool is not None:
        policy, pool = pool.settings.retry_policy, pool.parent
    return policy or ()


def find_terms(operation: Operation, job: JobRecord) -> Terms:
    """Return the rules that decide how a job that ended is started again."""
    task, element = find_task(operation.record, job.task), operation.elements.get(job.tree)
    policy = () if task is None else find_policy(task, None if element is None else element.parent)
    if task is None or not policy:
        return NO_TERMS
    rules = tuple(map(parse_rule, policy))
    if find_kind(job)[0] != "oom" or all(rule.memory_growth == 1.0 for rule in rules):
        return Terms(rules, operation.next_index)
    return Terms(rules, operation.next_index, *_find_bound(operation, task))


def _find_bound(operation: Operation, task: Task) -> tuple[float, str]:
    """Return how much memory a restarted job may request: that of the largest node of its trees that has the other
    resources of its request, or a lower limit of the pools above."""
    elements = operation.elements.values()
    most = max((each.sizes.find_most_memory(task.resources) for each in elements), default=0.0)
    told = f"the memory of the largest node that can hold it, {format_amount(MEMORY, most)}"
    for element in elements:
        for pool in element.ancestors():
            bound = pool.settings.max_retry_memory
            if bound is not None and bound < most:
                most, told = float(bound), f"max_retry_memory of pool {quoted(pool.name)}"
    return most, told


def is_for_end(job: Job, record: PreemptionRecord) -> bool:
    """Return whether a stopped job is replaced only after its end, because a retry rule then decides how."""
    may_retry = record.kind in failures.ABORT_REASONS and not job.element.operation.record.is_gang
    return may_retry and is_for_preempted(find_policy(job.task, job.element.parent))


def keep_place(job: Job, now: float) -> None:
    """Keep the place of a job that a retry rule had started: the rule then also applies to its next start."""
    operation = job.element.operation
    if operation.retries is not None:
        retry = operation.record.retried.places.get(job.task.name, {}).get(job.cookie)
        if retry is not None:
            operation.retries.keep(job.task, job.cookie, retry, now)


def follow(state: State, operation: Operation, now: float) -> None:
    """Make an operation's places for restarted jobs match its record."""
    if operation.retries is None:
        if not operation.record.retried.places:
            return
        operation.retries = RetryRun(operation.id, operation.numbers_of, state.retries)
    operation.retries.follow(operation.record, now)
    renew_needed(operation)


def renew_needed(operation: Operation) -> None:
    """Set how many jobs of each task must still be started now."""
    needed = {} if operation.waits_whole else operations.needed_jobs(operation.record, operation.taken)
    operation.needed = share_needed(needed)
    operation.touch()


def end_waits(state: State, now: float) -> None:
    """Let jobs start that have waited long enough for their retry."""
    due: dict[str, None] = {}
    while state.retries and state.retries[0][0] <= now:
        due[heappop(state.retries)[1]] = None
    for operation in [state.operations[each] for each in due if each in state.operations]:
        follow(state, operation, now)
