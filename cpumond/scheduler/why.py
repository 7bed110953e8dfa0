"""Answers to "why": what holds an operation, in words, and what a change of the configuration would do. Pure.

A plan is made in two steps: ``collect`` takes what is needed of the living state, ``make_plan`` works on that alone,
so that another thread can do it. Times are seconds, amounts absolute, shares fractions (semantics.md 2.2, 3, 6, 7).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from cpumond.fairshare.explain import show_amount
from cpumond.fairshare.resources import CPU, RESOURCES, Vector, dominates
from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.update import fair_share_update
from cpumond.scheduler import operations
from cpumond.scheduler.admission import find_full
from cpumond.scheduler.commands import prepare
from cpumond.scheduler.config_commands import ConfigChange, ConfigCommand, describe_change
from cpumond.scheduler.elements import Element, Operation, OperationElement, PoolElement, usage_share
from cpumond.scheduler.model import (
    SUBPOOL_DELIMITER,
    CommandError,
    Config,
    IntegralGuarantees,
    NodeRecord,
    OperationRecord,
    PreemptionRecord,
    TreeConfig,
    to_amounts,
)
from cpumond.scheduler.placement import wants_jobs
from cpumond.scheduler.protection import tell_protections
from cpumond.scheduler.snapshot import OPERATION_PREFIX, element_name, operation_demand
from cpumond.scheduler.starvation import priority_of, starves_in_s
from cpumond.scheduler.state import State
from cpumond.scheduler.transaction import Rules, Transaction
from cpumond.scheduler.validation import find_overcommit
from cpumond.units import format_span
from cpumond.words import count

Amounts = dict[str, float]

MAX_SETTLE_ROUNDS: Final = 100
SAME_SHARE: Final = 1e-6
"""Shares that differ by less are shown as unchanged."""

SHOWN_RECORDS: Final = 5
KEPT_RECORDS: Final = 20


# --- why an operation has what it has ----------------------------------------------------------------------------


class TreeAnswer(msgspec.Struct, frozen=True):
    """One tree's part of the answer. ``rule``: what ends its fair share, "" where no update knows it yet."""

    tree: str
    pool: str
    is_running: bool
    rule: str
    lines: list[str]


class OperationAnswer(msgspec.Struct, frozen=True):
    """Why an operation is where it is: sentences in all, then by tree; preemptions of and for it, newest first."""

    operation_id: str
    state: str
    lines: list[str]
    trees: list[TreeAnswer]
    preempted: list[PreemptionRecord]
    preempted_for_it: list[PreemptionRecord]


def explain_operation(
    state: State, record: OperationRecord, now: float, shares: Mapping[str, tuple[str, Sequence[str]]]
) -> OperationAnswer:
    """The answer for an operation. ``shares``: tree -> rule and lines of ``fairshare.explain`` of its last update."""
    live = state.operations.get(record.id)
    trees = []
    if live is not None:
        trees = [
            _explain_in_tree(each, now, shares.get(name), state.count_preemptions_left(each.tree, now))
            for name, each in live.elements.items()
        ]
    taken, given = _find_preemptions(state.preemptions, record.id)
    lines = [_tell_state(record, now)]
    if live is None:
        lines += _tell_counts(record)
    elif live.record.suspended:
        lines.append("it is suspended: no job of it is started until it is resumed")
    lines += _tell_preemptions(taken, given, now)
    return OperationAnswer(record.id, record.state, lines, trees, taken[:KEPT_RECORDS], given[:KEPT_RECORDS])


def name_operations(state: State, lines: Iterable[str]) -> list[str]:
    """Lines of ``fairshare.explain`` with ``operation ID`` or its title in place of ``#ID``."""

    def show(match: re.Match[str]) -> str:
        operation = state.operations.get(match[1])
        title = operation.record.title if operation is not None else ""
        name = f'operation {match[1]} "{title}"' if title.isprintable() and title else f"operation {match[1]}"
        return f"{name}, operation:" if match[2] else name

    # What has a guarantee of its own is told of as the pool around it.
    return [re.sub(rf"{OPERATION_PREFIX}+([0-9A-Za-z-]+)(, fair_share pool:)?", show, line) for line in lines]


def _tell_state(record: OperationRecord, now: float) -> str:
    subject = f"operation {record.id}"
    if not record.is_finished:
        return f"{subject} is {record.state}, {show_span(now - record.start_time)} after its start"
    ended = record.finish_time or record.start_time
    text = f"{subject} is {record.state}: it ended {show_span(now - ended)} ago, "
    text += f"{show_span(ended - record.start_time)} after its start"
    return f"{text}: {record.error}" if record.error else text


def _tell_counts(record: OperationRecord) -> Iterator[str]:
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
    if not element.is_running:
        return TreeAnswer(element.tree.name, pool.name, False, "", [*_tell_queue(element), *_tell_path(element)])
    lines = [*_tell_share(element), *told, *_tell_limits(element), *_tell_starvation(element, now, preemptions_left)]
    lines += _tell_placement(element)
    return TreeAnswer(element.tree.name, pool.name, True, rule, lines)


# --- pending


def _tell_queue(element: OperationElement) -> Iterator[str]:
    tree, pool = element.tree, element.parent
    before = []
    for other in tree.queue.values():
        if other is element:
            break
        before.append(other)
    same = sum(other.parent is pool for other in before)
    place = f"it is number {len(before) + 1} of {len(tree.queue)} in the queue of tree {tree.name!r}"
    yield f"{place}; {same} of those before it wait for the same pool" if before else place
    full = find_full(element)
    if full is None:
        yield "no pool above it is full: it runs as soon as the scheduler has looked at it"
        return
    yield (
        f"{element_name(full)} is full: {count(full.running_operation_count, 'operation')} of at most "
        f"{full.max_running_operation_count} (max_running_operation_count) "
        f"{'runs' if full.running_operation_count == 1 else 'run'} in it; one of them must end, or the limit be raised"
    )


def _tell_path(element: OperationElement) -> Iterator[str]:
    for pool in element.ancestors():
        yield (
            f"{element_name(pool)}: {pool.running_operation_count} of at most {pool.max_running_operation_count} "
            f"running, {pool.operation_count} of at most {pool.max_operation_count} operations"
        )


# --- running


def _tell_share(element: OperationElement) -> Iterator[str]:
    total = element.tree.total
    if not any(total):
        yield f"tree {element.tree.name!r} has no nodes, or they offer nothing: nobody has a share until one registers"
    cores = [element.fair_share[CPU] * total[CPU], operation_demand(element)[CPU]]
    yield (
        f"its fair share is {_cores(cores[0])}, it uses {_cores(element.usage[CPU])} in "
        f"{count(len(element.jobs), 'job')} and demands {_cores(cores[1])}"
    )
    demand = element.demand_share
    r = demand.index(max(demand))
    if r != CPU and demand[r] > 0.0:
        amounts = [
            show_amount(r, x) for x in (element.fair_share[r] * total[r], element.usage[r], demand[r] * total[r])
        ]
        yield (
            f"most of what it demands is {RESOURCES[r]}: its fair share of that is {amounts[0]}, it uses {amounts[1]} "
            f"and demands {amounts[2]}"
        )


def _tell_limits(element: OperationElement) -> Iterator[str]:
    above: list[PoolElement | OperationElement] = [element, *element.ancestors()]
    for each in above:
        texts = [
            f"{show_amount(r, limit)} {RESOURCES[r]}, {show_amount(r, max(used, 0.0))} used"
            for r, (limit, used) in enumerate(zip(each.limits, each.usage, strict=True))
            if math.isfinite(limit)
        ]
        if texts:
            yield f"limit of {'it' if each is element else element_name(each)}: {'; '.join(texts)}"


def _tell_starvation(element: OperationElement, now: float, preemptions_left: float) -> Iterator[str]:
    above: list[PoolElement | OperationElement] = [element, *element.ancestors()]
    for each in above:
        name = "it" if each is element else element_name(each)
        told = _starvation_of(each, now) or _tell_tolerance(each)
        if told:
            yield f"{name} {told}"
        elif each is element:
            yield "it has its fair share, or wants no more: it does not starve"
    priority = priority_of(element)
    if priority == "none" or not wants_jobs(element):
        return
    yield f"it may take jobs from others, with {priority} priority"
    if preemptions_left <= 0:
        settings = element.tree.config.settings
        yield (
            f"no job is taken at the moment: max_preemptions_per_minute of tree {element.tree.name!r} is "
            f"{settings.max_preemptions_per_minute}, and so many were; raise it"
        )
    yield from tell_protections(element, priority)


def _tell_tolerance(element: PoolElement | OperationElement) -> str:
    """Of one that has less than its share and is not below it for preemption: the tolerance that says so (6.2)."""
    usage, fair_share = max(usage_share(element)), max(element.fair_share)
    if element.rules is None or element.parent is None or usage > fair_share - SAME_SHARE:
        return ""
    if usage > max(element.demand_share) - SAME_SHARE or element.scheduling_status != "normal":
        return ""
    return (
        f"has {usage / fair_share:.0%} of its fair share and does not starve: that begins below "
        f"fair_share_starvation_tolerance, {element.rules.tolerance:g} for it"
    )


def _starvation_of(element: Element, now: float) -> str:
    if element.below_since is None or element.rules is None:
        return ""
    what = "its guarantee" if element.scheduling_status == "below_min_share" else "its fair share"
    text = f"is below {what} for {show_span(now - element.below_since)}"
    if element.starvation_status == "aggressively_starving":
        return f"{text} and starves aggressively"
    if element.starvation_status == "starving":
        return f"{text} and starves"
    left_s = starves_in_s(element, now)
    return f"{text}; starves in {show_span(left_s or 0.0)}"


REASONS: Final = {
    "node_resources": "a node that asked for work had too little room for its jobs",
    "no_needed_jobs": "it needed no more jobs",
    "resource_limits": "its resource limits leave no room for another job",
}


def _tell_placement(element: OperationElement) -> Iterator[str]:
    operation = element.operation
    if not operation.needed_job_count:
        yield "all its jobs are started"
        return
    if operation.record.suspended:
        return
    yield f"{count(operation.needed_job_count, 'job')} of it {_are(operation.needed_job_count)} still to be started"
    tree = element.tree
    online = [node for node in tree.nodes.values() if node.is_online]
    if not online:
        yield f"tree {tree.name!r} has no node that is online"
        return
    for task in operation.next_tasks():
        orders = f'a job of task "{task.name}", which orders {_amounts(task.resources)}'
        if not any(dominates(node.capacity, task.resources) for node in online):
            yield f"no node that is online can hold {orders}"
        elif not any(dominates(node.free, task.resources) for node in online):
            yield f"no node has room now for {orders}"
    for reason, times in sorted(element.deactivations.items(), key=lambda item: -item[1]):
        text = REASONS.get(reason, f"{reason} leave no room for another job")
        yield f"passed over {count(times, 'time')} since the last update: {text}"


# --- preemptions


def _find_preemptions(
    records: Iterable[PreemptionRecord], operation_id: str
) -> tuple[list[PreemptionRecord], list[PreemptionRecord]]:
    """Those of its jobs, and those for it; the newest first."""
    taken, given = [], []
    for record in records:
        if record.operation_id == operation_id:
            taken.append(record)
        if record.preemptor_operation_id == operation_id:
            given.append(record)
    return taken[::-1], given[::-1]


def _tell_preemptions(
    taken: Sequence[PreemptionRecord], given: Sequence[PreemptionRecord], now: float
) -> Iterator[str]:
    for record in taken[:SHOWN_RECORDS]:
        ago, kind = show_span(now - record.at), record.kind.replace("_", " ")
        yield f"{ago} ago its job {record.job_id} on {record.node_id} was stopped ({kind}): {record.why}"
    if len(taken) > SHOWN_RECORDS:
        yield f"{len(taken) - SHOWN_RECORDS} more of its jobs were stopped before that"
    for record in given[:SHOWN_RECORDS]:
        yield (
            f"{show_span(now - record.at)} ago its job {record.preemptor_job_id} got the place of job {record.job_id} "
            f"of operation {record.operation_id} on {record.node_id}"
        )
    if len(given) > SHOWN_RECORDS:
        yield f"{len(given) - SHOWN_RECORDS} more jobs of others made place for it before that"


# --- words and numbers


show_span = format_span


def _cores(cores: float) -> str:
    text = show_amount(CPU, max(cores, 0.0))
    return f"{text} core" if text == "1" else f"{text} cores"


def _amounts(vector: Vector) -> str:
    return ", ".join(f"{show_amount(r, x)} {RESOURCES[r]}" for r, x in enumerate(vector) if x > 0.0) or "nothing"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


# --- what a change would do --------------------------------------------------------------------------------------


class Outlook(msgspec.Struct, frozen=True):
    """What an element has. ``pool``: its parent, or an operation's pool. Limits that are missing are no limits.

    ``is_running``: of an operation, whether it holds a running slot; the counts are of pools.
    """

    pool: str
    fair_share: Amounts
    strong_guarantee: Amounts
    limits: Amounts
    is_running: bool = True
    operation_count: int = 0
    max_operation_count: int = 0
    running_operation_count: int = 0
    max_running_operation_count: int = 0


class Effect(msgspec.Struct, frozen=True):
    """What becomes of a pool or operation; null: it is not there. ``changed`` names the fields that differ."""

    kind: Literal["pool", "operation"]
    tree: str
    name: str
    title: str
    before: Outlook | None
    after: Outlook | None
    changed: list[str]


class Plan(msgspec.Struct, frozen=True):
    """What a command would do. Refused: ``refusal``, ``code`` and ``attributes`` say why as the command's own refusal
    would, and nothing else is there."""

    accepted: bool
    refusal: str = ""
    code: int = 0
    attributes: dict[str, Any] = {}
    warnings: list[str] = []
    notes: list[str] = []
    changes: list[ConfigChange] = []
    effects: list[Effect] = []


@dataclass(frozen=True, slots=True)
class KnownOperation:
    """A live operation: its record, what it needs, and its usage by tree."""

    record: OperationRecord
    needed: Mapping[str, int]
    usage: Mapping[str, Vector]


@dataclass(frozen=True, slots=True)
class Material:
    """What a plan is made of; shares nothing with the living state that will change."""

    rules: Rules
    config: Config
    nodes: tuple[NodeRecord, ...]
    operations: tuple[KnownOperation, ...]
    integral: Mapping[str, Mapping[str, tuple[Vector, float]]]
    """Tree -> id of an integral pool -> its volume and last ratio."""


def collect(state: State) -> Material:
    """Take from the living state what plans are made of."""
    return Material(
        rules=state.rules,
        config=state.config,
        nodes=tuple(
            NodeRecord(
                node.id,
                node.incarnation,
                node.address,
                tuple(node.tags),
                to_amounts(node.capacity),
                tree=node.tree or "" if node.matched_trees else "",
            )
            for node in state.nodes.values()
        ),
        operations=tuple(
            KnownOperation(
                _in_pools(operation.record, _pools_of(operation)),
                dict(operation.needed),
                {name: element.usage for name, element in operation.elements.items()},
            )
            for operation in state.operations.values()
        ),
        integral={
            tree.name: {
                pool.config.id: (pool.volume, pool.last_integral_ratio)
                for pool in tree.pools.values()
                if pool.config is not None and pool.settings.integral_guarantees.guarantee_type != "none"
            }
            for tree in state.trees.values()
        },
    )


def _pools_of(operation: Operation) -> dict[str, str]:
    """Where an operation really is, by tree."""
    return {name: element.parent.name for name, element in operation.elements.items() if element.parent is not None}


def try_command(state: State, command: ConfigCommand, user: str, now: float) -> Transaction | Plan:
    """The change that a command would make, or the plan that says why it is refused. Changes nothing."""
    try:
        return prepare(state, command, user, now, lambda: "planned")
    except CommandError as error:
        return Plan(accepted=False, refusal=str(error), code=error.code, attributes=dict(error.attributes))


def make_plan(
    material: Material,
    change: Transaction,
    now: float,
    previous: Mapping[str, float | None],
    *,
    everything: bool = False,
) -> Plan:
    """What ``change`` of the configuration would do to every pool and operation.

    ``previous``: tree -> time of its last update. Only what differs is listed, unless ``everything`` is wanted.
    """
    new = material.config if change.config is None else change.config
    old_state, new_state = rebuild(material, material.config, now), rebuild(material, new, now, change.operations)
    effects: list[Effect] = []
    for name in sorted({*material.config.trees, *new.trees}):
        before = _look(old_state, name, now, previous.get(name))
        after = _look(new_state, name, now, previous.get(name))
        effects += _compare(name, before, after, everything)
    return Plan(
        accepted=True,
        warnings=list(change.warnings),
        notes=[
            *_note_lost_operations(material, new_state),
            *_note_overcommit(old_state, new_state),
            *_note_integral(material.config, new),
        ],
        changes=describe_change(material.config, new),
        effects=effects,
    )


def rebuild(material: Material, config: Config, now: float, changed: Sequence[OperationRecord] = ()) -> State:
    """A state of its own with the configuration ``config`` and the material's nodes, operations, usage, volumes.

    ``changed``: what the change of the configuration makes of operations.
    """
    parents = {record.id: record.parents for record in changed}
    state = State(material.rules, config)
    renamed = _renamed_pools(material.config, config)
    known: dict[str, KnownOperation] = {}
    records = []
    for each in material.operations:
        record = operations.keep_trees(_in_renamed_pools(each.record, renamed), config.trees, now)
        record = msgspec.structs.replace(record, parents=parents.get(record.id, record.parents))
        if not record.is_finished:
            records.append(record)
            known[record.id] = each
    state.apply(Transaction(nodes=material.nodes, operations=tuple(records)), now)
    for operation in state.operations.values():
        operation.needed = dict(known[operation.id].needed)
        for name, element in operation.elements.items():
            element.usage = known[operation.id].usage[name]
    for name, pools in material.integral.items():
        for pool in state.trees[name].pools.values() if name in state.trees else ():
            if pool.config is not None and pool.config.id in pools:
                pool.volume, pool.last_integral_ratio = pools[pool.config.id]
    for _ in range(MAX_SETTLE_ROUNDS):
        settled = state.settle(now)
        if settled.is_empty:
            break
        state.apply(settled, now)
    return state


def _renamed_pools(old: Config, new: Config) -> dict[str, dict[str, str]]:
    """Tree -> old name of a pool -> its new name, where they differ."""
    renamed = {}
    for name, tree in new.trees.items():
        was = old.trees.get(name)
        if was is None or was is tree:
            continue
        names = {pool.id: pool.name for pool in tree.pools.values()}
        renamed[name] = {
            pool.name: names[pool.id] for pool in was.pools.values() if names.get(pool.id, pool.name) != pool.name
        }
    return renamed


def _in_renamed_pools(record: OperationRecord, renamed: Mapping[str, Mapping[str, str]]) -> OperationRecord:
    def new_name(tree: str, pool: str) -> str:
        parent, delimiter, child = pool.partition(SUBPOOL_DELIMITER)
        return renamed.get(tree, {}).get(parent, parent) + delimiter + child

    return _in_pools(record, {name: new_name(name, options.pool) for name, options in record.trees.items()})


def _in_pools(record: OperationRecord, pools: Mapping[str, str]) -> OperationRecord:
    """The record with the pools of some trees replaced."""
    moved = {
        name: msgspec.structs.replace(record.trees[name], pool=pool)
        for name, pool in pools.items()
        if record.trees[name].pool != pool
    }
    return msgspec.structs.replace(record, trees={**record.trees, **moved}) if moved else record


_Looks = dict[tuple[Literal["pool", "operation"], str], tuple[str, str, Outlook]]
"""(kind, id) -> name, title, outlook."""


def _look(state: State, name: str, now: float, previous: float | None) -> _Looks:
    tree = state.trees.get(name)
    if tree is None:
        return {}
    result = fair_share_update(state.make_snapshot(tree), now, previous)
    looks: _Looks = {}
    for pool in tree.pools.values():
        key = pool.name if pool.config is None else pool.config.id
        looks["pool", key] = (pool.name, "", _outlook_of_pool(pool, result, tree.total))
    for element in tree.operations.values():
        title = element.operation.record.title
        looks["operation", element.name] = (element.name, title, _outlook_of_operation(element, result, tree.total))
    return looks


def _outlook_of_pool(pool: PoolElement, result: UpdateResult, total: Vector) -> Outlook:
    shares = result.elements[pool.name]
    assert pool.parent is not None
    return Outlook(
        pool=pool.parent.name,
        fair_share=_absolute(shares.fair_share.total, total),
        strong_guarantee=_absolute(shares.strong_guarantee_share, total),
        limits=_finite(pool.limits),
        operation_count=pool.operation_count,
        max_operation_count=pool.max_operation_count,
        running_operation_count=pool.running_operation_count,
        max_running_operation_count=pool.max_running_operation_count,
    )


def _outlook_of_operation(element: OperationElement, result: UpdateResult, total: Vector) -> Outlook:
    assert element.parent is not None
    fair_share: Amounts = dict.fromkeys(RESOURCES, 0.0)
    if element.is_running:
        fair_share = _absolute(result.elements[OPERATION_PREFIX + element.name].fair_share.total, total)
    return Outlook(
        pool=element.parent.name,
        fair_share=fair_share,
        strong_guarantee={},
        limits=_finite(element.limits) if element.is_running else {},
        is_running=element.is_running,
    )


def _absolute(share: Vector, total: Vector) -> Amounts:
    return {name: x * y for name, x, y in zip(RESOURCES, share, total, strict=True)}


def _finite(limits: Vector) -> Amounts:
    return {name: limit for name, limit in zip(RESOURCES, limits, strict=True) if math.isfinite(limit)}


def _compare(tree: str, before: _Looks, after: _Looks, everything: bool) -> Iterator[Effect]:
    for key in (*after, *(key for key in before if key not in after)):
        was, will = before.get(key), after.get(key)
        latest = will or was
        assert latest is not None
        name, title, _ = latest
        old, new = was and was[2], will and will[2]
        changed = _differing(old, new)
        if was is not None and was[0] != name:
            changed.append("name")
        if changed or everything:
            yield Effect(key[0], tree, name, title, old, new, changed)


def _differing(old: Outlook | None, new: Outlook | None) -> list[str]:
    if old is None or new is None:
        return [] if old is new else ["exists"]
    return [field for field in Outlook.__struct_fields__ if not _is_same(getattr(old, field), getattr(new, field))]


def _is_same(old: Any, new: Any) -> bool:
    if not isinstance(old, dict):
        return bool(old == new)
    return old.keys() == new.keys() and all(
        math.isclose(old[name], new[name], rel_tol=SAME_SHARE, abs_tol=SAME_SHARE) for name in old
    )


def _note_lost_operations(material: Material, state: State) -> Iterator[str]:
    lost = [each.record.id for each in material.operations if each.record.id not in state.operations]
    if lost:
        shown = ", ".join(lost[:SHOWN_RECORDS]) + (" ..." if len(lost) > SHOWN_RECORDS else "")
        them = "it" if len(lost) == 1 else "them"
        yield f"{count(len(lost), 'operation')} would be aborted, no tree is left for {them}: {shown}"
    stopped = 0
    for node in material.nodes:
        tags = frozenset([*node.tags, node.address])
        tree = next(iter(state.match_trees(tags)), None)
        stopped += tree is None
    if stopped:
        verb = "fits" if stopped == 1 else "fit"
        yield f"{count(stopped, 'node')} {verb} the nodes_filter of no tree and would get no work"


def _note_overcommit(old: State, new: State) -> Iterator[str]:
    for name, tree in new.trees.items():
        before = old.trees.get(name)
        sentence = find_overcommit(tree.config, tree.total)
        if sentence is not None and (before is None or find_overcommit(before.config, before.total) != sentence):
            yield sentence


def _note_integral(old: Config, new: Config) -> Iterator[str]:
    for name, tree in new.trees.items():
        before, after = _integral_guarantees(old.trees.get(name)), _integral_guarantees(tree)
        if any(guarantees != before.get(pool_id) for pool_id, guarantees in after.items()):
            yield (
                f'pool tree "{name}": integral guarantees change; the shares are those of the first moment, they move '
                "as volume is gathered and spent"
            )


def _integral_guarantees(tree: TreeConfig | None) -> dict[str, IntegralGuarantees]:
    pools = () if tree is None else tree.pools.values()
    given = {pool.id: pool.settings.integral_guarantees for pool in pools}
    return {pool_id: guarantees for pool_id, guarantees in given.items() if guarantees.guarantee_type != "none"}
