"""What a change of the configuration would do. ``collect`` copies the state, for ``make_plan`` in a thread; pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from cpumond.core.words import count, quoted
from cpumond.fairshare.resources import RESOURCES, Vector
from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.update import fair_share_update
from cpumond.scheduler.access.required import check
from cpumond.scheduler.decide.admission import operation_limits_of
from cpumond.scheduler.decide.snapshot import OPERATION_PREFIX
from cpumond.scheduler.elements import OperationElement, PoolElement, is_integral
from cpumond.scheduler.model import (
    CommandError,
    Config,
    IntegralGuarantees,
    NodeRecord,
    OperationRecord,
    Rules,
    TreeConfig,
    to_amounts,
)
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings import operations
from cpumond.scheduler.settings.changes import ConfigChange, describe_change, find_renamed, rename_pool
from cpumond.scheduler.settings.undo import ChangedSinceError
from cpumond.scheduler.settings.validation import find_overcommit
from cpumond.scheduler.state import State, changes, settling, updates
from cpumond.scheduler.state.commands import ConfigChanging, prepare
from cpumond.scheduler.state.transaction import Transaction
from cpumond.scheduler.why.operation import SAME_SHARE, SHOWN_RECORDS, Amounts

MAX_SETTLE_ROUNDS: Final = 100


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
    """The input of a plan; shares only immutable values with the living state."""

    rules: Rules
    config: Config
    nodes: tuple[NodeRecord, ...]
    operations: tuple[KnownOperation, ...]
    integral: Mapping[str, Mapping[str, tuple[Vector, float]]]
    """Tree -> id of an integral pool -> its volume and last ratio."""


def collect(state: State) -> Material:
    """Copy from the living state what a plan needs."""
    return Material(
        rules=state.rules,
        config=state.config,
        nodes=tuple(
            NodeRecord(
                node.id,
                node.incarnation,
                node.address,
                tuple(node.tags),
                to_amounts(node.counted_capacity),
                tree=node.tree or "" if node.matched_trees else "",
            )
            for node in state.nodes.values()
        ),
        operations=tuple(
            KnownOperation(
                _in_pools(
                    operation.record,
                    {name: each.parent.name for name, each in operation.elements.items() if each.parent is not None},
                ),
                dict(operation.needed),
                {name: element.usage for name, element in operation.elements.items()},
            )
            for operation in state.operations.values()
        ),
        integral={
            tree.name: {
                pool.config.id: (pool.volume, pool.last_integral_ratio)
                for pool in tree.pools.values()
                if pool.config is not None and is_integral(pool)
            }
            for tree in state.trees.values()
        },
    )


def try_command(state: State, command: ConfigChanging, user: User, now: float) -> Transaction | Plan:
    """The change that a command would make, or the plan that says why it is refused. Changes nothing.

    Raises ChangedSinceError, about which the log knows more.
    """
    numbers = itertools.count(1)
    try:
        check(state, command, user)
        return prepare(state, command, user.name, now, lambda: f"planned-{next(numbers)}")
    except ChangedSinceError:
        raise
    except CommandError as error:
        return refused_plan(error)


def refused_plan(refusal: CommandError) -> Plan:
    """The plan of a command that is refused."""
    return Plan(accepted=False, refusal=str(refusal), code=refusal.code, attributes=dict(refusal.attributes))


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
            *_note_left_operations(old_state, new),
            *_note_overcommit(old_state, new_state),
            *_note_integral(material.config, new),
            *_note_inner_pools(old_state, new_state),
        ],
        changes=describe_change(material.config, new),
        effects=effects,
    )


def rebuild(material: Material, config: Config, now: float, changed: Sequence[OperationRecord] = ()) -> State:
    """A state of its own with the configuration ``config`` and the material's nodes, operations, usage, volumes.

    ``changed``: the records of operations that the change of the configuration replaces.
    """
    parents = {record.id: record.parents for record in changed}
    state = changes.make_state(material.rules, config)
    renamed = {
        name: find_renamed(was, tree)
        for name, was in material.config.trees.items()
        if (tree := config.trees.get(name)) is not None
    }
    known: dict[str, KnownOperation] = {}
    records = []
    for each in material.operations:
        names = {name: rename_pool(options.pool, renamed.get(name, {})) for name, options in each.record.trees.items()}
        record = operations.keep_trees(_in_pools(each.record, names), config.trees, now)
        record = msgspec.structs.replace(record, parents=parents.get(record.id, record.parents))
        if not record.is_finished:
            records.append(record)
            known[record.id] = each
    changes.apply(state, Transaction(nodes=material.nodes, operations=tuple(records)), now)
    for operation in state.operations.values():
        operation.needed = dict(known[operation.id].needed)
        for name, element in operation.elements.items():
            element.usage = known[operation.id].usage[name]
    for name, pools in material.integral.items():
        for pool in state.trees[name].pools.values() if name in state.trees else ():
            if pool.config is not None and pool.config.id in pools:
                pool.volume, pool.last_integral_ratio = pools[pool.config.id]
    for _ in range(MAX_SETTLE_ROUNDS):
        settled = settling.settle(state, now)
        if settled.is_empty:
            break
        changes.apply(state, settled, now)
    return state


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
    result = fair_share_update(updates.make_snapshot(state, tree), now, previous)
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


def _note_left_operations(old: State, config: Config) -> Iterator[str]:
    for name, tree in old.trees.items():
        if name not in config.trees:
            continue
        left = {pool.id for pool in config.trees[name].pools.values()}
        for pool in tree.pools.values():
            if pool.config is not None and pool.config.id not in left and pool.operations:
                go = "goes" if len(pool.operations) == 1 else "go"
                held = (
                    f"{count(len(pool.operations), 'operation')} in it, which {go} on in an ephemeral pool of that name"
                )
                yield f"pool {quoted(pool.name)} is removed with {held}"


def _note_overcommit(old: State, new: State) -> Iterator[str]:
    for name, tree in new.trees.items():
        before = old.trees.get(name)
        sentence = find_overcommit(tree.config, tree.total)
        if sentence is not None and (before is None or find_overcommit(before.config, before.total) != sentence):
            yield sentence


def _note_inner_pools(old: State, new: State) -> Iterator[str]:
    """What inner pools without counts of their own may run from now on, where the tree's option changes it (2.4)."""
    option = "per_pool_counts_for_leaves_only"
    for name, tree in new.trees.items():
        before = old.trees.get(name)
        is_on = tree.config.settings.per_pool_counts_for_leaves_only
        if before is None or before.config.settings.per_pool_counts_for_leaves_only == is_on:
            continue
        told = [
            f"{quoted(pool.name)} {pool.max_running_operation_count} ({was.max_running_operation_count} before), and "
            f"hold {pool.max_operation_count} ({was.max_operation_count})"
            for pool in tree.pools.values()
            if (was := before.pools.get(pool.name)) is not None
            and operation_limits_of(pool) != operation_limits_of(was)
        ]
        if told:
            more = f", and so on for {len(told) - SHOWN_RECORDS} more" if len(told) > SHOWN_RECORDS else ""
            yield (
                f"pool tree {quoted(name)}: {option} becomes {str(is_on).lower()}, so that of all operations below "
                f"them inner pools let run: {'; '.join(told[:SHOWN_RECORDS])}{more}; a file of the tree without the "
                "option sets it to false"
            )


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
