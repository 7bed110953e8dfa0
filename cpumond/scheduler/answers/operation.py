"""Sentences that explain why an operation holds what it holds, or why it waits. Pure.

Times are seconds, amounts absolute, shares fractions (semantics.md 2.2, 3, 6, 7)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from cpumond.core.measures import count_cores, format_span
from cpumond.core.words import count, format_utc, printable, quoted
from cpumond.fairshare.explain import PathStep
from cpumond.fairshare.resources import CPU, MEMORY, RESOURCES, ZERO, Vector, dominates, format_amount, sum_vectors
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.causes import Causes, describe_cannot_start, find_shown_state
from cpumond.scheduler.answers.standing import find_standing
from cpumond.scheduler.decide.admission import count_running, find_full, is_user_full
from cpumond.scheduler.decide.backfill import find_refusal
from cpumond.scheduler.decide.gangs import find_places, list_backfilled
from cpumond.scheduler.decide.placement import NO_SECRETS, ONLY_RECLAIMED, OTHER_NODE, UNMATCHED, wants_jobs
from cpumond.scheduler.decide.protection import describe_protections
from cpumond.scheduler.decide.snapshot import (
    OPERATION_PREFIX,
    describe_filters,
    element_name,
    kept_from,
    operation_demand,
)
from cpumond.scheduler.decide.starvation import list_priorities, starves_in_s
from cpumond.scheduler.decide.usage_history import describe_factor
from cpumond.scheduler.elements import Element, Operation, OperationElement, PoolElement
from cpumond.scheduler.elements.account import view_budget
from cpumond.scheduler.model import OperationRecord, PreemptionRecord
from cpumond.scheduler.settings.failures import describe_where, innermost
from cpumond.scheduler.settings.incarnations import describe_switch
from cpumond.scheduler.state import State, dispatch, lifecycle
from cpumond.scheduler.state.gang_table import GangTable

Amounts = dict[str, float]

SAME_SHARE: Final = 1e-6
"""Smallest difference of two shares that is shown as a change."""

SHOWN_RECORDS: Final = 5
KEPT_RECORDS: Final = 20
MIB: Final = 2**20


class TreeAnswer(msgspec.Struct, frozen=True):
    """The part of the answer about one tree. ``rule``: what limits the operation's fair share. ``path``: the shares of
    each element from the root to the operation. Both are empty before the first update with the operation."""

    tree: str
    pool: str
    is_running: bool
    rule: str
    lines: list[str]
    path: list[PathStep] = []


class OperationAnswer(msgspec.Struct, frozen=True):
    """Why an operation has what it has, or waits: sentences for all trees, then for each tree; preemptions of its jobs
    and for its jobs, newest first."""

    operation_id: str
    state: str
    lines: list[str]
    trees: list[TreeAnswer]
    preempted: list[PreemptionRecord]
    preempted_for_it: list[PreemptionRecord]


def explain_operation(
    state: State, record: OperationRecord, now: float, shares: Mapping[str, tuple[str, Sequence[str]]],
    rights: Rights | None = None,
) -> OperationAnswer:  # fmt: skip
    """Return the answer for an operation; operations that the caller may not read are left out. ``shares``: tree ->
    rule and lines of ``fairshare.explain`` in its last update."""
    live = state.operations.get(record.id)
    trees = []
    if live is not None:
        trees = [
            _explain_in_tree(each, now, shares.get(name), dispatch.count_preemptions_left(state, each.tree, now))
            for name, each in live.elements.items()
        ]
        for part in trees:
            part.lines.extend(_describe_reservation(live.elements[part.tree], state.gangs, now))
    records: Iterable[PreemptionRecord] = state.preemptions
    if rights is not None:
        for part in trees:
            part.lines[:] = map(rights.hide_operations, part.lines)
        of_it = [each for each in records if record.id in (each.operation_id, each.preemptor_operation_id)]
        records = [seen for each in of_it if (seen := rights.see_preemption(each)) is not None]
    taken, given = _find_preemptions(records, record.id)
    lines = [_describe_state(record, live, now)]
    if live is not None and not live.record.suspended:
        lines[0] += _describe_causes(live.elements.values())
    if live is None:
        lines += _describe_counts(record)
    elif live.record.suspended:
        failure = live.record.suspended_for
        why = "" if failure is None else f" because a job failed, {printable(innermost(failure).message)}"
        lines.append(f"it is suspended{why}: no job of it starts until it is resumed")
    if live is not None:
        lines += _describe_no_restart(live.record)
        lines += [*_describe_incarnation(state, live, now), *_describe_retries(live, now)]
    lines += _describe_failures(state, record, now)
    lines += _describe_preemptions(taken, given, now)
    return OperationAnswer(record.id, record.state, lines, trees, taken[:KEPT_RECORDS], given[:KEPT_RECORDS])


def name_operations(state: State, lines: Iterable[str]) -> list[str]:
    """Replace ``#ID`` in lines of ``fairshare.explain`` by ``operation ID`` and its title."""

    def add_title(match: re.Match[str]) -> str:
        operation = state.operations.get(match[1])
        title = operation.record.title if operation is not None else ""
        name = f'operation {match[1]} "{title}"' if title.isprintable() and title else f"operation {match[1]}"
        return f"{name}, operation:" if match[2] else name

    # An operation with its own guarantee appears as the pool around it.
    return [re.sub(rf"{OPERATION_PREFIX}+([0-9A-Za-z-]+)(, fair_share pool:)?", add_title, line) for line in lines]


def _describe_no_restart(record: OperationRecord) -> list[str]:
    names = [task.name for task in record.tasks if task.fail_on_job_restart]
    if not names:
        return []
    which = "one of its jobs" if len(names) == len(record.tasks) else f"a job of task {', '.join(map(quoted, names))}"
    return [f"it fails if {which} is preempted, aborted or lost (fail_on_job_restart)"]


def _describe_failures(state: State, record: OperationRecord, now: float) -> Iterator[str]:
    """Yield a sentence if all failed jobs of the operation failed on one node."""
    where = describe_where(record)
    if not where or where in record.error:
        return
    node = state.nodes.get(next(iter(record.failed_on)))
    told = "" if node is None or node.failing is None else node.failing.describe(now)
    counts = "; they do not count towards max_failed_job_count until jobs fail on another node, too"
    yield f"{where}{told and f' ({told})'}{counts if record.blamed_failures else ''}"


def _describe_incarnation(state: State, live: Operation, now: float) -> Iterator[str]:
    """Yield, for an operation with ``gang_options``, why it restarted and what its jobs are waiting for."""
    if live.gang is None or len(live.record.incarnations) < 2:
        return
    new = live.record.incarnations[-1]
    yield f"all of its jobs were restarted {format_span(now - new.at)} ago: {printable(describe_switch(new))}"
    ending = lifecycle.list_ending(state, live)
    if ending:
        nodes = sorted({each.node_id for each in ending})
        where = ", ".join(map(quoted, nodes[:3])) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
        which = f"{count(len(ending), 'job')} of the previous incarnation"
        yield f"none of them starts before {which} on {where} {'has' if len(ending) == 1 else 'have'} ended"


def _describe_retries(live: Operation, now: float) -> Iterator[str]:
    """Yield which jobs wait for a restart, and the retry rules that make them wait."""
    waits: dict[str, list[float]] = {}
    for (task, cookie), due in live.later.items():
        rule = next(reversed(live.record.retried.places[task][cookie].used), "")
        waits.setdefault(rule, []).append(due)
    for rule, dues in waits.items():
        number, first = len(dues), min(dues)
        yield (
            f"{count(number, 'job')} {'waits' if number == 1 else 'wait'} until {format_utc(first)} (for "
            f"{format_span(max(first - now, 0.0))} more){' or later' * (number > 1)} because of retry rule {rule}"
        )
    if live.waits_whole:
        yield "it is a gang, so its other jobs wait, too"


def _describe_state(record: OperationRecord, live: Operation | None, now: float) -> str:
    subject = f"operation {record.id}"
    if not record.is_finished:
        state = find_shown_state(record, live)
        is_state = state if state == "cannot start" else f"is {state}"
        return f"{subject} {is_state}, {format_span(now - record.start_time)} after its start"
    ended = record.finish_time or record.start_time
    text = f"{subject} is {record.state}: it ended {format_span(now - ended)} ago, "
    text += f"{format_span(ended - record.start_time)} after its start"
    return f"{text}: {record.error}" if record.error else text


def _describe_causes(elements: Collection[OperationElement]) -> str:
    """Return why the operation waits, as the end of the first sentence; per tree if the causes differ."""
    found = [(each.tree, Causes(each.tree).of(each).cause) for each in elements]
    texts = [
        f"{cause.text} (tree {tree.name})" if len(found) > 1 else cause.text
        for tree, cause in found
        if cause.kind not in ("working", "suspended", "cannot_start")
    ]
    return f"; why it waits: {'; '.join(texts)}" if texts else ""


def _describe_counts(record: OperationRecord) -> Iterator[str]:
    for task in record.tasks:
        counts = record.counts.get(task.name)
        if counts is None:
            yield f'task "{task.name}": none of {count(task.job_count, "job")} ended'
            continue
        parts = [f"{counts.completed} of {count(task.job_count, 'job')} completed"]
        others = {"failed": counts.failed, "aborted": counts.aborted, "lost": counts.lost}
        parts += [f"{number} {word}" for word, number in others.items() if number]
        yield f'task "{task.name}": {", ".join(parts)}'


def _explain_in_tree(
    element: OperationElement, now: float, shares: tuple[str, Sequence[str]] | None, preemptions_left: float
) -> TreeAnswer:
    pool = element.parent
    assert pool is not None
    rule, told = shares or ("", ())
    if excess := element.explain_unplaceable():
        what, remedy = "the rest of it" if element.jobs else "it", "smaller jobs, or add a node that can hold them"
        if element.operation.record.is_gang:
            remedy = "fewer or smaller jobs, or add nodes"
        cannot = f"{what} {describe_cannot_start(excess)}; start it again with {remedy}"
        if element.fitting is not None and not element.fitting.nodes:
            told = describe_filters(element)
            cannot = f"{what} cannot start: no node matches {told}; change the filter, or give nodes matching tags"
        return TreeAnswer(element.tree.name, pool.name, element.is_running, rule, [cannot, *_describe_share(element)])
    if not element.is_running:
        return TreeAnswer(
            element.tree.name, pool.name, False, "", [*_describe_queue(element), *_describe_path(element)]
        )
    told = [
        *told,
        *(f"{element_name(each)}: {line}" for each in element.ancestors() if (line := describe_factor(each))),
    ]
    lines = [*_describe_share(element), *told, *_describe_limits(element)]
    lines += [*_describe_starvation(element, now, preemptions_left), *_describe_placement(element)]
    spent = [each for each in element.accounts if each.record.level]
    lines += [f"budget of {each.record.kind} {quoted(each.name)}: {view_budget(each, now).text}" for each in spent]
    if above := sum(job.report.over_reserve for job in element.jobs.values()):
        lines.append(
            f"{count(above, 'job')} {'uses' if above == 1 else 'use'} more memory than reserved: if a node runs "
            "short of memory, the job that started last is aborted and restarted with its whole memory_limit reserved"
        )
    return TreeAnswer(element.tree.name, pool.name, True, rule, lines)


def _describe_queue(element: OperationElement) -> Iterator[str]:
    tree, pool = element.tree, element.parent
    before = []
    for other in tree.queue.values():
        if other is element:
            break
        before.append(other)
    same = sum(other.parent is pool for other in before)
    place = f"it is number {len(before) + 1} of {len(tree.queue)} in the queue of tree {tree.name!r}"
    yield (
        f"{place}; {same} of those before it {'waits' if same == 1 else 'wait'} for the same pool" if before else place
    )
    full = find_full(element)
    running = count_running(tree)[element.operation.record.user]
    if full is None and is_user_full(tree, running):
        yield (
            f"{count(running, 'operation')} of its user {'runs' if running == 1 else 'run'} in the tree, as many as "
            "max_running_operation_count_per_user allows; wait until one of them ends, or raise the option"
        )
        return
    if full is None:
        yield "no pool above it is full: it will run as soon as the scheduler has checked it"
        return
    yield (
        f"{element_name(full)} is full: it runs {count(full.running_operation_count, 'operation')} of at most "
        f"{full.max_running_operation_count} (max_running_operation_count); wait until one of them ends, or raise the "
        "limit"
    )


def _describe_path(element: OperationElement) -> Iterator[str]:
    for pool in element.ancestors():
        yield (
            f"{element_name(pool)}: {pool.running_operation_count} of at most {pool.max_running_operation_count} "
            f"running, {pool.operation_count} of at most {pool.max_operation_count} operations"
        )


def _describe_share(element: OperationElement) -> Iterator[str]:
    total = element.tree.total
    if not any(total):
        yield f"tree {element.tree.name!r} has no nodes, or they offer nothing: no share until a node registers"
    cores = [element.fair_share[CPU] * total[CPU], operation_demand(element)[CPU]]
    yield (
        f"its fair share is {count_cores(cores[0])}; {count_cores(max(element.usage[CPU], 0.0))} allocated to "
        f"its {count(len(element.jobs), 'job')}; it demands {count_cores(cores[1])}"
    )
    demand = element.demand_share
    r = demand.index(max(demand))
    if r != CPU and demand[r] > 0.0:
        amounts = [
            format_amount(r, x) for x in (element.fair_share[r] * total[r], element.usage[r], demand[r] * total[r])
        ]
        yield (
            f"its dominant resource is {RESOURCES[r]}: its fair share of that is {amounts[0]}; {amounts[1]} "
            f"allocated to it; it demands {amounts[2]}"
        )


def _describe_limits(element: OperationElement) -> Iterator[str]:
    above: list[PoolElement | OperationElement] = [element, *element.ancestors()]
    for each in above:
        texts = [
            f"{format_amount(r, limit)} {RESOURCES[r]}, {format_amount(r, max(allotted, 0.0))} allocated"
            for r, (limit, allotted) in enumerate(zip(each.limits, each.usage, strict=True))
            if math.isfinite(limit)
        ]
        if texts:
            yield f"limit of {'it' if each is element else element_name(each)}: {'; '.join(texts)}"
    if kept := sum_vectors(list(kept_from(element).values()))[CPU]:
        yield f"{count_cores(kept)} of guarantees that other pools do not use are kept for them (lending_limit)"


def _describe_starvation(element: OperationElement, now: float, preemptions_left: float) -> Iterator[str]:
    above: list[PoolElement | OperationElement] = [element, *element.ancestors()]
    for each in above:
        name = "it" if each is element else element_name(each)
        told = _starvation_of(each, now)
        if told:
            yield f"{name} {told}"
        elif each is element or (each.parent is not None and find_standing(each).kind in ("tolerance", "limit")):
            yield f"{name} {find_standing(each).text}; it does not starve"
    priorities = list_priorities(element)
    if not priorities or not wants_jobs(element):
        return
    strongest = priorities[-1]
    with_it = "to reach its strong guarantee" if strongest == "guarantee" else f"with {strongest} priority"
    yield f"it may preempt jobs of others {with_it}"
    if preemptions_left <= 0:
        settings = element.tree.config.settings
        yield (
            f"no job can be preempted now: {settings.max_preemptions_per_minute} were in the last minute, as many as "
            f"max_preemptions_per_minute of tree {element.tree.name!r} allows; wait, or raise it"
        )
    yield from describe_protections(element, strongest, now)


def _starvation_of(element: Element, now: float) -> str:
    if element.below_since is None or element.rules is None:
        return ""
    what = "its guarantee" if element.scheduling_status == "below_min_share" else "its fair share"
    text = f"is below {what} for {format_span(now - element.below_since)}"
    if element.starvation_status == "aggressively_starving":
        return f"{text} and starves aggressively"
    if element.starvation_status == "starving":
        return f"{text} and starves"
    left_s = starves_in_s(element, now)
    return f"{text}; starves in {format_span(left_s or 0.0)}"


REASONS: Final = {
    "node_resources": "the node that asked for work had too few free resources for its jobs",
    "no_needed_jobs": "it needed no more jobs",
    "graceful_over_fair_share": "its preemption_mode is graceful and it is allocated its fair share",
    ONLY_RECLAIMED: "its allow_reclaimed is false, and the free CPU of the node that asked for work is requested by "
    "other jobs; wait until jobs end there, or start it again with allow_reclaimed = true",
    NO_SECRETS: "it has secrets, and the agent of the node that asked for work cannot pass them to jobs; upgrade the "
    "agent",
    UNMATCHED: "the node that asked for work does not match its scheduling_tag_filter, or that of a pool above it",
    OTHER_NODE: "its jobs failed on the node that asked for work, and another node has enough free resources for them",
    "gang_room": "it is a gang, and all nodes together have too few free resources for the jobs that it needs",
    "gang_stops": "it is a gang, and jobs of its previous run have not ended yet",
    "resource_limits": "its resource limits leave no room for another job",
}


def _describe_placement(element: OperationElement) -> Iterator[str]:
    operation = element.operation
    needed = operation.needed_job_count
    if not needed:
        if not operation.later:
            yield "all of its jobs are started"
        return
    if operation.is_held or element.spent is not None:
        return
    yield f"it still has {count(needed, 'job')} to start"
    tree = element.tree
    online = [node for node in tree.nodes.values() if node.is_online and not node.cordoned]
    if not online:
        cordoned = sum(node.cordoned for node in tree.nodes.values())
        what = "cordoned or held off" if any(node.is_held_off for node in tree.nodes.values()) else "cordoned"
        rest = f" and not {what} ({cordoned} {'is' if cordoned == 1 else 'are'})" if cordoned else ""
        yield f"tree {tree.name!r} has no node that is online{rest}"
        return
    if operation.record.vault_bytes and (old := sum(not node.takes_secrets for node in online)):
        yield (
            f"it has secrets, which leaves out {old} of {count(len(online), 'node')} online: their agents cannot pass "
            "secrets to jobs; upgrade them"
        )
    if element.fitting is not None:
        fitting = [node for node in online if element.may_use(node)]
        left_out = len(online) - len(fitting)
        yield f"{describe_filters(element)} leaves out {left_out or 'none'} of {count(len(online), 'node')} online"
        online = fitting
        if not online:
            return
    for task in operation.next_tasks():
        orders = f'a job of task "{task.name}", which requests {_amounts(task.resources)}'
        if not any(dominates(node.capacity, task.resources) for node in online):
            yield f"no online node is large enough for {orders}"
        elif not any(dominates(node.free, task.resources) for node in online):
            yield f"no node has enough free resources now for {orders}"
            if task.memory_reserve and any(_lacks_memory(node.free, task.resources) for node in online):
                reserve, limit = task.memory_reserve / MIB, task.memory_limit / MIB
                yield (
                    f"it waits for memory: {reserve:.0f} MiB of memory_limit {limit:.0f} MiB are reserved for a job, "
                    "by the usage of earlier jobs of the task"
                )
    if operation.record.is_gang and find_places(element, {node: node.capacity for node in online}, ZERO) is None:
        yield f"it is a gang, and all {count(needed, 'job')} would not fit at once even if all nodes were empty"
    for reason, times in sorted(element.deactivations.items(), key=lambda item: -item[1]):
        text = REASONS.get(reason, f"{reason} leave no room for another job")
        yield f"passed over {count(times, 'time')} since the last update: {text}"


def _lacks_memory(free: Vector, order: Vector) -> bool:
    """Whether the request lacks memory but no other resource."""
    return all(f >= o or r == MEMORY for r, (f, o) in enumerate(zip(free, order, strict=True)))


def _describe_reservation(element: OperationElement, table: GangTable, now: float) -> Iterator[str]:
    ends = [job.backfill_until for job in element.jobs.values() if job.backfill_until is not None]
    if ends:
        yield (
            f"{count(len(ends), 'job')} started on resources that are reserved for a gang (backfilled): expected "
            "to end "
            f"within {format_span(max(ends) - now)}, stopped earlier if the gang needs them"
        )
    kept, operation = table.reservations.get(element.tree.name), element.operation
    if kept is None or not element.is_running or not operation.needed:
        return
    is_own, nodes = kept.element is element, sorted(node.id for node in kept.rooms)
    where = ", ".join(map(printable, nodes[:3])) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    yield (
        f"resources on {count(len(nodes), 'node')} ({where}) have been reserved for {'it' if is_own else 'a gang'} for "
        f"{format_span(now - kept.since)}, and will be for at most {format_span(kept.until - now)} more "
        f"(gang_reservation_timeout of tree {element.tree.name!r})"
    )
    if kept.ready_at is None or table.run_times is None:
        return
    later_s = kept.ready_at - now
    ready = f"are expected to be free in {format_span(later_s)}" if later_s > 0.0 else "may be free now"
    if is_own:
        cores = sum(job.usage[CPU] for node in kept.rooms for job in list_backfilled(node))
        yield f"these resources {ready}; until then backfilled jobs use {count_cores(cores)} of them"
        return
    for task in islice(operation.next_tasks(), SHOWN_RECORDS):
        run_s, refusal = find_refusal(element, task, table.run_times, kept.ready_at, now)
        until = f" (up to {format_span(run_s)}), and the resources {ready}" if run_s else ""
        if refusal:
            yield f"jobs of task {quoted(task.name)} may not use these resources meanwhile: {refusal}{until}"


def _find_preemptions(
    records: Iterable[PreemptionRecord], operation_id: str
) -> tuple[list[PreemptionRecord], list[PreemptionRecord]]:
    """Return the preemptions of the operation's jobs, and those for its jobs; each list has the newest first."""
    taken, given = [], []
    for record in records:
        if record.operation_id == operation_id:
            taken.append(record)
        if record.preemptor_operation_id == operation_id:
            given.append(record)
    return taken[::-1], given[::-1]


def _describe_preemptions(
    taken: Sequence[PreemptionRecord], given: Sequence[PreemptionRecord], now: float
) -> Iterator[str]:
    for record in taken[:SHOWN_RECORDS]:
        ago, kind = format_span(now - record.at), record.kind.replace("_", " ")
        lost = f"; it lost {record.lost_core_seconds / 3600:.2g} core-hours" if record.lost_core_seconds else ""
        yield f"{ago} ago its job {record.job_id} on {record.node_id} was stopped ({kind}): {record.why}{lost}"
    if len(taken) > SHOWN_RECORDS:
        yield f"{len(taken) - SHOWN_RECORDS} more of its jobs were stopped before that"
    for record in given[:SHOWN_RECORDS]:
        yield (
            f"{format_span(now - record.at)} ago its job {record.preemptor_job_id} replaced job {record.job_id} of "
            f"operation {record.operation_id} on {record.node_id}"
        )
    if len(given) > SHOWN_RECORDS:
        yield f"{len(given) - SHOWN_RECORDS} more jobs of others were preempted for it before that"


def _amounts(vector: Vector) -> str:
    return ", ".join(f"{format_amount(r, x)} {RESOURCES[r]}" for r, x in enumerate(vector) if x > 0.0) or "nothing"
