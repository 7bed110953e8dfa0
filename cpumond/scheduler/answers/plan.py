"""Plan of a configuration change: its effects, found by carrying it out on a copy of the state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from cpumond.core.words import count, quoted
from cpumond.fairshare.resources import RESOURCES, Vector
from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.update import fair_share_update
from cpumond.scheduler.access.required import check
from cpumond.scheduler.answers.operation import SAME_SHARE, SHOWN_RECORDS, Amounts
from cpumond.scheduler.decide.admission import operation_limits_of
from cpumond.scheduler.decide.snapshot import OPERATION_PREFIX
from cpumond.scheduler.elements import OperationElement, PoolElement, Tree
from cpumond.scheduler.model import CommandError, Config, PoolIntegralGuarantees, TreeConfig
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.changes import ConfigChange, compare_configs
from cpumond.scheduler.settings.undo import ChangedSinceError
from cpumond.scheduler.settings.validation import find_overcommit
from cpumond.scheduler.state import State, changes, updates
from cpumond.scheduler.state.commands import ConfigChanging, prepare
from cpumond.scheduler.state.transaction import Transaction
from cpumond.scheduler.trial.at_once import describe_starts
from cpumond.scheduler.trial.rounds import settle


class ElementShares(msgspec.Struct, frozen=True):
    """Shares of a pool or operation. ``pool``: a pool's parent, or an operation's pool. A limit that is missing means
    no limit. ``is_running``: whether an operation holds a running slot. The counts are those of pools."""

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
    """Effect on a pool or operation. ``before``, ``after``: null if it does not exist. ``changed``: fields that
    differ."""

    kind: Literal["pool", "operation"]
    tree: str
    name: str
    title: str
    before: ElementShares | None
    after: ElementShares | None
    changed: list[str]


class ChangePlan(msgspec.Struct, frozen=True):
    """Effects of a command. If it is refused: only ``refusal``, ``code`` and ``attributes``, as in its refusal."""

    accepted: bool
    refusal: str = ""
    code: int = 0
    attributes: dict[str, Any] = {}
    warnings: list[str] = []
    notes: list[str] = []
    changes: list[ConfigChange] = []
    effects: list[Effect] = []


def try_command(state: State, command: ConfigChanging, user: User, now: float) -> Transaction | ChangePlan:
    """Return the change that a command would make, or a plan with the reason for its refusal. Changes nothing. Raises
    ChangedSinceError, to which the log adds details."""
    numbers = itertools.count(1)
    try:
        check(state, command, user)
        return prepare(state, command, user.name, now, lambda: f"planned-{next(numbers)}")
    except ChangedSinceError:
        raise
    except CommandError as error:
        return refused_plan(error)


def refused_plan(refusal: CommandError) -> ChangePlan:
    return ChangePlan(accepted=False, refusal=str(refusal), code=refusal.code, attributes=dict(refusal.attributes))


def make_plan(
    state: State, change: Transaction, now: float, previous: Mapping[str, float | None], everything: bool
) -> ChangePlan:
    """Return the effects of ``change``, applied to a copy of the state, on every pool and operation. ``previous``: tree
    -> time of its last update. Elements without a difference are included only if ``everything`` is true."""
    config = state.config
    new = config if change.config is None else change.config

    def apply(state: State) -> None:
        changes.apply(state, change, now)
        settle(state, now)

    starts = describe_starts(state, now, apply)
    names = sorted({*config.trees, *new.trees})
    before = {name: _look(state, name, now, previous.get(name)) for name in names}
    left, known = list(_note_left_operations(state, new)), list(state.operations)
    overcommits = {name: find_overcommit(tree.config, tree.total) for name, tree in state.trees.items()}
    counts = {
        name: (tree.config.settings.per_pool_counts_for_leaves_only, _list_counts(tree))
        for name, tree in state.trees.items()
    }
    apply(state)
    effects: list[Effect] = []
    for name in names:
        effects += _compare(name, before[name], _look(state, name, now, previous.get(name)), everything)
    notes = [*([starts] if starts else []), *_note_lost_operations(known, state), *left]
    notes += [*_note_overcommit(overcommits, state), *_note_integral(config, new), *_note_inner_pools(counts, state)]
    told = compare_configs(config, new)
    return ChangePlan(True, warnings=list(change.warnings), notes=notes, changes=told, effects=effects)


_Looks = dict[tuple[Literal["pool", "operation"], str], tuple[str, str, ElementShares]]
"""(kind, id) -> name, title, shares."""


def _look(state: State, name: str, now: float, previous: float | None) -> _Looks:
    tree = state.trees.get(name)
    if tree is None:
        return {}
    result = fair_share_update(updates.make_snapshot(state, tree), now, previous)
    looks: _Looks = {}
    for pool in tree.pools.values():
        key = pool.name if pool.config is None else pool.config.id
        looks["pool", key] = (pool.name, "", _shares_of_pool(pool, result, tree.total))
    for element in tree.operations.values():
        title = element.operation.record.title
        looks["operation", element.name] = (element.name, title, _shares_of_operation(element, result, tree.total))
    return looks


def _shares_of_pool(pool: PoolElement, result: UpdateResult, total: Vector) -> ElementShares:
    shares = result.elements[pool.name]
    assert pool.parent is not None
    return ElementShares(
        pool=pool.parent.name, fair_share=_absolute(shares.fair_share.total, total),
        strong_guarantee=_absolute(shares.strong_guarantee_share, total), limits=_finite(pool.limits),
        operation_count=pool.operation_count, max_operation_count=pool.max_operation_count,
        running_operation_count=pool.running_operation_count,
        max_running_operation_count=pool.max_running_operation_count,
    )  # fmt: skip


def _shares_of_operation(element: OperationElement, result: UpdateResult, total: Vector) -> ElementShares:
    assert element.parent is not None
    fair_share: Amounts = dict.fromkeys(RESOURCES, 0.0)
    if element.is_running:
        fair_share = _absolute(result.elements[OPERATION_PREFIX + element.name].fair_share.total, total)
    return ElementShares(
        pool=element.parent.name, fair_share=fair_share, strong_guarantee={},
        limits=_finite(element.limits) if element.is_running else {}, is_running=element.is_running,
    )  # fmt: skip


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


def _differing(old: ElementShares | None, new: ElementShares | None) -> list[str]:
    if old is None or new is None:
        return [] if old is new else ["exists"]
    return [
        field for field in ElementShares.__struct_fields__ if not _is_same(getattr(old, field), getattr(new, field))
    ]


def _is_same(old: Any, new: Any) -> bool:
    if not isinstance(old, dict):
        return bool(old == new)
    return old.keys() == new.keys() and all(
        math.isclose(old[name], new[name], rel_tol=SAME_SHARE, abs_tol=SAME_SHARE) for name in old
    )


def _note_lost_operations(known: Sequence[str], state: State) -> Iterator[str]:
    lost = [name for name in known if name not in state.operations]
    if lost:
        shown = ", ".join(lost[:SHOWN_RECORDS]) + (" ..." if len(lost) > SHOWN_RECORDS else "")
        them = "it" if len(lost) == 1 else "them"
        yield f"{count(len(lost), 'operation')} would be aborted because no tree is left for {them}: {shown}"
    stopped = sum(not state.match_trees(node.tags) for node in state.nodes.values())
    if stopped:
        verb = "matches" if stopped == 1 else "match"
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
                    f"{count(len(pool.operations), 'operation')} in it, which {go} on in an ephemeral pool of its name"
                )
                yield f"pool {quoted(pool.name)} is removed with {held}"


def _note_overcommit(before: Mapping[str, str | None], state: State) -> Iterator[str]:
    for name, tree in state.trees.items():
        sentence = find_overcommit(tree.config, tree.total)
        if sentence is not None and before.get(name) != sentence:
            yield sentence


def _list_counts(tree: Tree) -> dict[str, tuple[int, int]]:
    """Return the maximum number of operations in each pool: in total, and running."""
    return {pool.name: operation_limits_of(pool) for pool in tree.pools.values()}


def _note_inner_pools(before: Mapping[str, tuple[bool, Mapping[str, tuple[int, int]]]], state: State) -> Iterator[str]:
    """Yield how many operations an inner pool without own limits may run after the tree's option changes (2.4)."""
    option = "per_pool_counts_for_leaves_only"
    for name, tree in state.trees.items():
        was_on, counts = before.get(name, (None, {}))
        is_on = tree.config.settings.per_pool_counts_for_leaves_only
        if was_on is None or was_on == is_on:
            continue
        told = [
            f"{quoted(pool)} runs {running} ({counts[pool][1]} before) and holds {most} ({counts[pool][0]})"
            for pool, (most, running) in _list_counts(tree).items()
            if pool in counts and counts[pool] != (most, running)
        ]
        more = f", and {len(told) - SHOWN_RECORDS} more pools change" if len(told) > SHOWN_RECORDS else ""
        now = f"; now {'; '.join(told[:SHOWN_RECORDS])}{more}" if told else ""
        settings = tree.config.settings
        bound = f"max_running_operation_count ({settings.max_running_operation_count}) of the tree"
        if not is_on:
            bound = f"max_running_operation_count_per_pool ({settings.max_running_operation_count_per_pool})"
        yield (
            f"pool tree {quoted(name)}: {option} becomes {str(is_on).lower()}, so that {bound} limits all operations "
            f"below an inner pool without a count of its own{'' if is_on else ', as in YTsaurus'}{now}; a tree file "
            "without the option sets it to false"
        )


def _note_integral(old: Config, new: Config) -> Iterator[str]:
    for name, tree in new.trees.items():
        before, after = _integral_guarantees(old.trees.get(name)), _integral_guarantees(tree)
        if any(guarantees != before.get(pool_id) for pool_id, guarantees in after.items()):
            yield (
                f'pool tree "{name}": integral guarantees change; the shares shown are those right after the change '
                "and move as volume is saved and spent"
            )


def _integral_guarantees(tree: TreeConfig | None) -> dict[str, PoolIntegralGuarantees]:
    pools = () if tree is None else tree.pools.values()
    given = {pool.id: pool.settings.integral_guarantees for pool in pools}
    return {pool_id: guarantees for pool_id, guarantees in given.items() if guarantees.guarantee_type != "none"}
