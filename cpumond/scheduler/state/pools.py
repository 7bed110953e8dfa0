"""Adapts the live pools of a tree to its configuration and its operations; pure (semantics.md 2.9, 3)."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from cpumond.fairshare.resources import ZERO, Vector, add, sum_vectors
from cpumond.scheduler.decide import admission
from cpumond.scheduler.decide.snapshot import operation_limits, pool_limits
from cpumond.scheduler.elements import OperationElement, PoolElement, Tree, fit
from cpumond.scheduler.model import ROOT_POOL, SUBPOOL_DELIMITER
from cpumond.scheduler.settings import preemption_rules
from cpumond.scheduler.state import TreeWork


def sync_pools(tree: Tree, work: TreeWork) -> None:
    """Give the live pools their new configuration; section 2.9 defines what happens to removed and new pools."""
    before = tree.pools
    were_ephemeral = {pool for pool in before.values() if pool.config is None}
    by_id = {pool.config.id: pool for pool in before.values() if pool.config is not None}
    pools: dict[str, PoolElement] = {}
    for config in tree.config.pools.values():
        pool = by_id.pop(config.id, None)
        if pool is None:
            namesake = before.get(config.name)
            pool = namesake if namesake is not None and namesake.config is None else None
        if pool is None:
            pool = PoolElement(config.name, tree.root, tree)
        if pool.config is None:
            pool.volume, pool.last_integral_ratio = ZERO, 0.0
        pool.name, pool.config, pool.settings = config.name, config, config.settings
        pool.parent = pools.get(config.parent, tree.root)
        pools[config.name] = pool
    tree.pools = pools
    for old_name, pool in before.items():
        if pool.name in pools:
            for element in pool.operations.values() if pools[pool.name] is not pool else ():
                element.parent = pools[pool.name]  # an explicit pool has the name now
            continue
        if not pool.operations and not any(child.is_ephemeral for child in pool.children.values()):
            continue
        prefix, delimiter, child = old_name.partition(SUBPOOL_DELIMITER)
        if delimiter and prefix in before:
            # A renamed pool also renames its ephemeral sub-pools.
            pool.name = f"{before[prefix].name}{delimiter}{child}"
        pool.config = None
        pools[pool.name] = pool
    _place_ephemeral(tree, were_ephemeral)
    for pool in pools.values():
        pool.entry = None
    _relocate(tree, work)


def _relocate(tree: Tree, work: TreeWork) -> None:
    """Compute children, operations, counts, limits, rules and usage of all pools from parents and operations."""
    settings = tree.config.settings
    root = tree.root
    root.max_operation_count = settings.max_operation_count
    root.max_running_operation_count = settings.max_running_operation_count
    root.rules = preemption_rules.root_rules(settings)
    for pool in (root, *tree.pools.values()):
        pool.children, pool.operations = {}, {}
        pool.operation_count = pool.running_operation_count = 0
    for pool in tree.pools.values():
        assert pool.parent is not None
        pool.parent.children[pool.name] = pool
    for pool in tree.pools.values():
        _set_limits(pool)
    for element in tree.operations.values():
        assert element.parent is not None
        attach(element, element.parent)
    for pool in (root, *tree.pools.values()):
        pool.usage = sum_vectors([job.usage for element in pool.operations.values() for job in element.jobs.values()])
    for pool in reversed(tree.pools.values()):
        assert pool.parent is not None
        pool.parent.usage = add(pool.parent.usage, pool.usage)
    work.forget_order()
    work.is_freed = True


def attach(element: OperationElement, pool: PoolElement) -> None:
    """Put an operation into a pool: set its rules and limits, count it in the pools above. The caller moves usage."""
    element.parent = pool
    element.entry = None
    assert pool.rules is not None
    element.rules = preemption_rules.operation_rules(pool.rules, element.options)
    element.limits = operation_limits(element)
    fit(element)
    element.lists_are_old = True
    pool.operations[element.name] = element
    for each in element.ancestors():
        each.operation_count += 1
        each.running_operation_count += element.is_running


def detach(element: OperationElement, work: TreeWork) -> None:
    """Remove an operation from its pool, and let pending operations use its slot."""
    work.is_freed = True
    pool = element.parent
    assert pool is not None
    del pool.operations[element.name]
    for each in element.ancestors():
        each.operation_count -= 1
        each.running_operation_count -= element.is_running


def drop_if_empty(pool: PoolElement, work: TreeWork) -> None:
    """Remove an ephemeral pool without operations and children, then its parent if that is such a pool, too (2.9)."""
    while pool.is_ephemeral and not pool.operations and not pool.children:
        parent = pool.parent
        assert parent is not None
        del parent.children[pool.name], pool.tree.pools[pool.name]
        work.order = None
        pool = parent


def ensure_pool(tree: Tree, work: TreeWork, name: str, removed: str = "") -> PoolElement:
    """Return the live pool of that name; if there is none, make an ephemeral one (2.9).

    ``removed``: name of its former parent if that pool was explicit and has been removed, else "". The parent is then
    made again as an ephemeral pool."""
    pool = tree.root if name == ROOT_POOL else tree.pools.get(name)
    if pool is not None:
        return pool
    above = name.partition(SUBPOOL_DELIMITER)[0] if SUBPOOL_DELIMITER in name else removed
    parent = tree.pools.get(above)
    if parent is not None and above == removed and parent.config is not None:
        parent = None
    elif above and parent is None:
        parent = ensure_pool(tree, work, above)
    if parent is not None and parent.config is None:
        parent.settings = msgspec.structs.replace(parent.settings, mode="fair_share")
    if parent is None or parent.mode == "fifo":
        parent = admission.default_parent(tree)
    pool = PoolElement(name, parent, tree)
    pool.settings = admission.ephemeral_settings(parent)
    _set_limits(pool)
    parent.children[name] = tree.pools[name] = pool
    work.order = None
    return pool


def _set_limits(pool: PoolElement) -> None:
    """Set the limits and rules that follow from a pool's own settings and its parent's."""
    pool.max_operation_count, pool.max_running_operation_count = admission.operation_limits_of(pool)
    assert pool.parent is not None
    assert pool.parent.rules is not None
    pool.rules = preemption_rules.pool_rules(pool.parent.rules, pool.settings)
    pool.limits = pool_limits(pool)
    fit(pool)


def add_usage(pool: PoolElement, usage: Vector, sign: float) -> None:
    delta = (usage[0] * sign, usage[1] * sign, usage[2] * sign, usage[3] * sign, usage[4] * sign)
    pool.usage = add(pool.usage, delta)
    for each in pool.ancestors():
        each.usage = add(each.usage, delta)


def _place_ephemeral(tree: Tree, were_ephemeral: Collection[PoolElement]) -> None:
    """Set parents and settings of the ephemeral pools after a change of the configuration (2.9)."""
    pools = tree.pools
    for pool in [pool for pool in pools.values() if pool.config is None]:
        is_rest = any(child in were_ephemeral for child in pool.children.values())
        parent = pool.parent if pool in were_ephemeral and not is_rest else None
        if SUBPOOL_DELIMITER in pool.name:
            parent = pools.get(pool.name.partition(SUBPOOL_DELIMITER)[0])
        elif parent is not None and (parent.config is not None or pools.get(parent.name) is not parent):
            parent = None  # else it would stay below what remains of a removed pool
        pool.parent = parent if parent is not None and parent.mode != "fifo" else admission.default_parent(tree)
        pool.settings = admission.ephemeral_settings(pool.parent)
        if is_rest:
            pool.settings = msgspec.structs.replace(pool.settings, mode="fair_share")
