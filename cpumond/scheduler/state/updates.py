"""Fair-share updates: the snapshot, the result, and the part of the result that is stored; pure (semantics.md 4, 9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.tree import Snapshot
from cpumond.scheduler.decide import starvation, usage_history
from cpumond.scheduler.elements import NO_DEACTIVATIONS, OperationElement, PoolElement, Tree, is_integral
from cpumond.scheduler.state import State


def make_snapshot(state: State, tree: Tree) -> Snapshot:
    if any(node.cordoned or node.matched_trees for node in tree.nodes.values()):
        tree.sum_total(are_nodes_same=True)  # jobs may have ended since the last sum
    return state.work[tree.name].maker.make(tree)


def accept_update(state: State, tree: Tree, result: UpdateResult, now: float) -> None:
    """Apply the result of an update: shares, volumes, starvation, a new order of service."""
    work = state.work[tree.name]
    work.maker.accept(tree, result)
    usage_history.follow(tree, now)
    starvation.update_starvation(tree, now)
    for element in tree.operations.values():
        element.deactivations = NO_DEACTIVATIONS
    work.forget_order()


def progress_of(tree: Tree) -> dict[str, Any]:
    """Return volumes of integral pools, and since when elements are below their share (9). Stored after each update.

    Explicit pools are keyed by id. Therefore a renamed pool keeps its volume, and a new pool with its name has none."""
    explicit = [(pool.config.id, pool) for pool in tree.pools.values() if pool.config is not None]
    volumes = {pool_id: pool.volume for pool_id, pool in explicit if is_integral(pool)}
    elements: list[PoolElement | OperationElement] = [*tree.pools.values(), *tree.operations.values()]
    since = {_key_of(each): each.below_since for each in elements if each.below_since is not None}
    told: dict[str, Any] = {"volumes": volumes, "below_since": since}
    # Values are rounded: those that hardly change are not stored each second.
    histories = {
        _key_of(pool): {name: round(mean, 3) for name, mean in pool.history.items()}
        for pool in (tree.root, *tree.pools.values())
        if pool.history
    }
    return {**told, "histories": histories} if histories else told


def restore_progress(tree: Tree, progress: Mapping[str, Any]) -> None:
    """Restore ``progress_of`` of an earlier run, except for pools that are unknown or not integral now (9)."""
    known: list[PoolElement | OperationElement] = [*tree.pools.values(), *tree.operations.values()]
    elements = {_key_of(each): each for each in known}
    for key, volume in progress.get("volumes", {}).items():
        pool = elements.get(key)
        if isinstance(pool, PoolElement) and is_integral(pool):
            pool.volume = msgspec.convert(volume, tuple[float, float, float, float, float])
    for key, history in progress.get("histories", {}).items():
        pool = tree.root if key == tree.root.name else elements.get(key)
        if isinstance(pool, PoolElement):
            pool.history = dict(history)
            usage_history.set_factors(pool)
    for key, since in progress.get("below_since", {}).items():
        if key in elements:
            elements[key].below_since = since


def _key_of(element: PoolElement | OperationElement) -> str:
    explicit = element.config if isinstance(element, PoolElement) else None
    return element.name if explicit is None else explicit.id
