"""Weights that fall with a pool's recent usage: ``usage_half_life`` (semantics.md 5.5).

Like Slurm's fair-share factor: 2 to the power of minus (used / due), both as fractions of the sum over all siblings."""

from __future__ import annotations

import math
from typing import Final

from cpumond.scheduler.elements import PoolElement, Tree, usage_share

MOST_S: Final = 60.0
"""Maximum seconds counted between two updates, even if the clock shows more."""
LEAST: Final = 1e-4
"""Mean share below which usage is forgotten."""
MOST_OVERUSE: Final = 5.0
"""Usage beyond this multiple of the due usage does not count: a weight is at least 1/32 of that of an unused pool."""
STEPS: Final = 64.0
"""Steps per unit of the exponent: a weight that hardly moves stays the same, and so do results computed from it."""


def half_life_s(pool: PoolElement) -> float:
    """Half-life, in seconds, of the usage of a pool's children, as the nearest pool above sets it; 0: not counted."""
    for each in (pool, *pool.ancestors()):
        settings = pool.tree.config.settings if each.parent is None else each.settings
        if settings.usage_half_life is not None:
            return settings.usage_half_life / 1e3
    return 0.0


def follow(tree: Tree, now: float) -> None:
    """Update the mean usage of all pools for the time from the previous update to ``now``."""
    pools = (tree.root, *tree.pools.values())
    is_counted = bool(tree.config.settings.usage_half_life) or any(pool.settings.usage_half_life for pool in pools)
    if not is_counted and all(pool.history is None for pool in pools):
        return
    span_s = min(max(now - tree.updated_at, 0.0), MOST_S)
    for pool in pools:
        is_flat, old, pool.history = pool.settings.flatten, pool.history or {}, None
        if is_counted and not is_flat and (half_s := half_life_s(pool)):
            kept = 0.5 ** (span_s / half_s)
            used = {key_of(child): max(usage_share(child)) for child in pool.list_sharing()}
            means = {name: mean * kept for name, mean in old.items()}
            for name, share in used.items():
                means[name] = means.get(name, 0.0) + share * (1.0 - kept)
            pool.history = {name: mean for name, mean in means.items() if mean > LEAST or name in used}
        if not is_flat:
            set_factors(pool)


def set_factors(pool: PoolElement) -> None:
    """Set the factors that multiply the weights of a pool's children, from their known usage."""
    history, children = pool.history or {}, list(pool.list_sharing())
    total = sum(history.values())
    weights = sum(child.settings.weight or 1.0 for child in children)
    for child in children:
        child.weight_factor = 1.0
        if total > LEAST:
            due = (child.settings.weight or 1.0) / weights
            child.weight_factor = factor(history.get(key_of(child), 0.0) / total / due)


def factor(overuse: float) -> float:
    """Return the factor, between 1/16 and 2, of the weight of a pool that used ``overuse`` times its due."""
    return math.pow(2.0, math.floor((1.0 - min(overuse, MOST_OVERUSE)) * STEPS) / STEPS)


def key_of(pool: PoolElement) -> str:
    """Return the key under which a pool's usage is kept: an explicit pool keeps its usage when it is renamed, a user's
    pool when it is created again."""
    return pool.name if pool.config is None else pool.config.id


def describe_factor(pool: PoolElement) -> str:
    """Return a sentence on why a pool's weight differs from the configured one; "" if it does not."""
    history = None if pool.parent is None or pool.settings.flatten else pool.parent.sharing.history
    if not history or pool.weight_factor == 1.0:
        return ""
    part = history.get(key_of(pool), 0.0) / sum(history.values())
    return (
        f"its weight is multiplied by {pool.weight_factor:.2f} because it had {part:.0%} of the recent usage of all "
        "siblings (usage_half_life)"
    )
