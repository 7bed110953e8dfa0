"""Admission: the pool of an operation, whether it may be submitted, and when it runs (semantics.md 2.8, 2.9 and 3)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from cpumond.core.words import did_you_mean
from cpumond.scheduler.elements import OperationElement, PoolElement, Tree
from cpumond.scheduler.model import (
    NO_POOL_SETTINGS,
    RESOLVE,
    ROOT_POOL,
    SUBPOOL_DELIMITER,
    TOO_MANY_OPERATIONS,
    CommandError,
    EphemeralSubpoolConfig,
    OperationRecord,
    PoolSettings,
    Rules,
    TreeSettings,
)


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """An operation's pool in one tree. ``parent``: the pool's parent, or the parent to be; for the root, the root."""

    name: str
    parent: PoolElement
    pool: PoolElement | None
    """None if the pool has yet to be created."""

    @property
    def settings(self) -> PoolSettings:
        """The settings of the pool, or those that it gets when it is created."""
        return ephemeral_settings(self.parent) if self.pool is None else self.pool.settings

    def path(self) -> Iterator[PoolElement]:
        """Yield the existing pools on the way to the root."""
        first = self.pool or self.parent
        yield first
        yield from first.ancestors()


@dataclass(slots=True)
class Ahead:
    """Operations that start earlier than a given one and are not in any tree yet. ``count``: number of all these
    operations. ``operations``: their number for each pool. ``running``: the number of running ones for each pool.
    ``running_of``: the number of running ones by tree and user."""

    count: int = 0
    operations: Counter[PoolElement] = field(default_factory=Counter)
    running: Counter[PoolElement] = field(default_factory=Counter)
    running_of: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, record: OperationRecord, trees: Mapping[str, Tree]) -> bool:
        """Count an operation. False if it creates a pool: the next operation waits until this one is in its tree."""
        pools = {name: trees[name].pools.get(options.pool) for name, options in record.trees.items()}
        self.count += 1
        for name, pool in pools.items():
            if pool is None:
                return False
            path = [pool, *pool.ancestors()]
            self.operations.update(path)
            if name in record.running_in:
                self.running.update(path)
                self.running_of[name, record.user] += 1
        return True


NONE_AHEAD: Final = Ahead()


def default_parent(tree: Tree) -> PoolElement:
    """The parent of new ephemeral pools: ``default_parent_pool`` or, if it can have no sub-pools, the root (2.4)."""
    pool = tree.pools.get(tree.config.settings.default_parent_pool)
    return tree.root if pool is None or pool.config is None or pool.mode == "fifo" else pool


def choose_pool(tree: Tree, wanted: str, user: str, rules: Rules, moved: OperationElement | None = None) -> PoolChoice:
    """Choose the pool for an operation of ``user`` that asks for pool ``wanted``; "" means the pool named after its
    user (2.8, 2.9). ``moved``: the operation, if it is live; an ephemeral pool that would become empty without it does
    not count for its user's limit. Raises CommandError; changes nothing."""
    name = wanted or user
    if name == ROOT_POOL:
        if tree.config.settings.forbid_immediate_operations_in_root:
            raise _immediate(ROOT_POOL)
        return PoolChoice(ROOT_POOL, tree.root, tree.root)
    if name.count(SUBPOOL_DELIMITER) > 1:
        raise CommandError(
            f"Malformed pool name {name!r}: delimiter '{SUBPOOL_DELIMITER}' is found more than once; expected "
            "parent$child"
        )
    if SUBPOOL_DELIMITER in name:
        return _choose_subpool(tree, name, rules)
    pool = tree.pools.get(name)
    if pool is not None:
        if pool.settings.create_ephemeral_subpools:
            return _choose_subpool(tree, f"{name}{SUBPOOL_DELIMITER}{user}", rules)
        if pool.settings.forbid_immediate_operations:
            raise _immediate(name)
        assert pool.parent is not None
        return PoolChoice(name, pool.parent, pool)
    if rules.require_specified_pools_existence:
        near = did_you_mean(name, tree.config.pools)
        raise CommandError(f'Pool "{name}" not found in tree "{tree.name}"{near}', RESOLVE)
    _check_name(name, name, rules)
    parent = default_parent(tree)
    _check_pools_of_user(tree, parent, name, user, moved)
    return PoolChoice(name, parent, None)


def find_place(tree: Tree, wanted: str, user: str) -> PoolElement:
    """The pool that ``choose_pool`` would choose, or the parent of one that it would create; raises nothing."""
    name = wanted or user
    known = tree.root if name == ROOT_POOL else tree.pools.get(name)
    if known is None and SUBPOOL_DELIMITER in name:
        known = tree.pools.get(name.partition(SUBPOOL_DELIMITER)[0])
    return default_parent(tree) if known is None else known


def _immediate(name: str) -> CommandError:
    return CommandError(
        f'Starting operations immediately in pool "{name}" is forbidden; start them in one of its sub-pools'
    )


def _choose_subpool(tree: Tree, name: str, rules: Rules) -> PoolChoice:
    parent_name, _, child = name.partition(SUBPOOL_DELIMITER)
    parent = tree.pools.get(parent_name)
    if parent is None or not parent.settings.create_ephemeral_subpools:
        what = "does not exist" if parent is None else "does not have create_ephemeral_subpools"
        raise CommandError(f'Pool name "{name}": pool "{parent_name}" {what} in tree "{tree.name}"')
    _check_name(child, name, rules)
    return PoolChoice(name, parent, tree.pools.get(name))


def _check_name(part: str, name: str, rules: Rules) -> None:
    if not re.fullmatch(rules.ephemeral_pool_name_regex, part) or len(name) > 100:
        raise CommandError(
            f'Pool name "{name[:200]}" is not allowed for an ephemeral pool: "{part[:200]}" must match '
            f'"{rules.ephemeral_pool_name_regex}" and have at most 100 characters'
        )


def _check_pools_of_user(tree: Tree, parent: PoolElement, name: str, user: str, moved: OperationElement | None) -> None:
    limit = tree.config.settings.max_ephemeral_pools_per_user
    made = [
        pool.name
        for pool in parent.children.values()
        if pool.is_ephemeral and pool.owner == user and SUBPOOL_DELIMITER not in pool.name
        if moved is None or moved.parent is not pool or len(pool.operations) > 1
    ]
    if len(made) >= limit:
        raise CommandError(
            f'Cannot create ephemeral pool "{name}": user "{user}" already has {limit} of them in tree "{tree.name}" '
            f"(max_ephemeral_pools_per_user): {', '.join(sorted(made))}; use one of these, or ask an administrator to "
            "create the pool"
        )


def ephemeral_settings(parent: PoolElement) -> PoolSettings:
    """Return the settings of an ephemeral pool: defaults and its parent's ``ephemeral_subpool_config`` (2.9)."""
    given: EphemeralSubpoolConfig = parent.settings.ephemeral_subpool_config
    if given == NO_POOL_SETTINGS.ephemeral_subpool_config:
        return NO_POOL_SETTINGS
    return PoolSettings(
        mode=given.mode or "fair_share",
        max_running_operation_count=given.max_running_operation_count,
        max_operation_count=given.max_operation_count,
        resource_limits=given.resource_limits,
    )


def operation_limits(settings: PoolSettings, tree: TreeSettings) -> tuple[int, int]:
    """A pool's effective ``max_operation_count`` and ``max_running_operation_count``: its own or the tree's (2.5)."""
    most, running = settings.max_operation_count, settings.max_running_operation_count
    return (
        tree.max_operation_count_per_pool if most is None else most,
        tree.max_running_operation_count_per_pool if running is None else running,
    )


def operation_limits_of(pool: PoolElement) -> tuple[int, int]:
    """Return ``operation_limits`` of an existing pool below the root. With ``per_pool_counts_for_leaves_only`` an inner
    pool has its own limits or those of the tree. A pool is inner if it has explicit sub-pools or ephemeral ones are
    created in it."""
    tree = pool.tree.config.settings
    if tree.per_pool_counts_for_leaves_only and is_inner(pool):
        own = pool.settings
        most, running = tree.max_operation_count, tree.max_running_operation_count
        return (
            most if own.max_operation_count is None else own.max_operation_count,
            running if own.max_running_operation_count is None else own.max_running_operation_count,
        )
    return operation_limits(pool.settings, tree)


def is_inner(pool: PoolElement) -> bool:
    """Whether a pool is for sub-pools: it has some, or ephemeral ones are created in it."""
    return (
        any(child.config is not None for child in pool.children.values())
        or pool.settings.create_ephemeral_subpools
        or pool.name == pool.tree.config.settings.default_parent_pool
    )


def check_start(tree: Tree, choice: PoolChoice, ahead: Ahead) -> None:
    """Raises CommandError with code TOO_MANY_OPERATIONS if a pool up to the root is full (3.1)."""
    most, _ = operation_limits(choice.settings, tree.config.settings)
    if most == 0:
        raise _too_many(choice.name, 0, tree.name)
    for pool in choice.path():
        if pool.operation_count + ahead.operations[pool] >= pool.max_operation_count:
            raise _too_many(pool.name, pool.max_operation_count, tree.name)


def _too_many(pool: str, limit: int, tree: str) -> CommandError:
    return CommandError(
        f'Limit for the number of concurrent operations {limit} for pool "{pool}" in tree "{tree}" has been reached',
        TOO_MANY_OPERATIONS,
        {"pool": pool, "limit": limit, "pool_tree": tree},
    )


def find_full(element: OperationElement) -> PoolElement | None:
    """The first pool on the way to the root that runs the maximum number of operations; None if there is none (3.2)."""
    for pool in element.ancestors():
        if pool.running_operation_count >= pool.max_running_operation_count:
            return pool
    return None


def count_running(tree: Tree) -> Counter[str]:
    """Return user -> number of the user's operations that run in the tree; empty if that number is not limited."""
    if tree.config.settings.max_running_operation_count_per_user is None:
        return Counter()
    return Counter(each.operation.record.user for each in tree.operations.values() if each.is_running)


def is_user_full(tree: Tree, running: int) -> bool:
    """Whether a user with ``running`` running operations may not run another one (3.2)."""
    most = tree.config.settings.max_running_operation_count_per_user
    return most is not None and running >= most


def may_run(tree: Tree, choice: PoolChoice, user: str, ahead: Ahead) -> bool:
    """Whether an operation that starts now is admitted at once: its user and each pool on its way to the root run fewer
    operations than allowed (3.2)."""
    _, most = operation_limits(choice.settings, tree.config.settings)
    has_room = all(
        pool.running_operation_count + ahead.running[pool] < pool.max_running_operation_count for pool in choice.path()
    )
    running = count_running(tree)[user] + ahead.running_of[tree.name, user]
    return most > 0 and has_room and not is_user_full(tree, running)


def find_activated(tree: Tree, pending: Iterable[OperationElement]) -> list[OperationElement]:
    """Return the operations of ``pending`` that are admitted now, in order of arrival, by a scan of the queue (3.3). A
    blocked one keeps its place and does not block others. The scan ends when the root is full. Changes nothing."""
    added: dict[PoolElement, int] = {}
    found: list[OperationElement] = []
    of_users = count_running(tree)
    for element in pending:
        if tree.root.running_operation_count + len(found) >= tree.root.max_running_operation_count:
            break
        path, user = list(element.ancestors()), element.operation.record.user
        if not is_user_full(tree, of_users[user]) and all(
            pool.running_operation_count + added.get(pool, 0) < pool.max_running_operation_count for pool in path
        ):
            found.append(element)
            of_users[user] += 1
            for pool in path:
                added[pool] = added.get(pool, 0) + 1
    return found


def check_move(tree: Tree, element: OperationElement, choice: PoolChoice) -> None:
    """Check that a live operation may move: only limits of pools that it enters count (3.5). Raises CommandError."""
    old = set(element.ancestors())
    if choice.pool is None:
        most, running = operation_limits(choice.settings, tree.config.settings)
        if most == 0:
            raise CommandError(f'Max operation count of pool "{choice.name}" violated')
        if element.is_running and running == 0:
            raise CommandError(f'Max running operation count of pool "{choice.name}" violated')
    for pool in choice.path():
        if pool in old:
            continue
        if pool.operation_count >= pool.max_operation_count:
            raise CommandError(f'Max operation count of pool "{pool.name}" violated')
        if element.is_running and pool.running_operation_count >= pool.max_running_operation_count:
            raise CommandError(f'Max running operation count of pool "{pool.name}" violated')
