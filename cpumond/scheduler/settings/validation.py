"""Checks whether a tree with its pools is valid: guarantees, names and structure (semantics.md 2.6, 2.7)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cpumond.core.errors import ConfigError
from cpumond.core.words import did_you_mean, named, number, quoted
from cpumond.fairshare.resources import CPU, RESOURCES, Vector, add, greatest, sum_vectors
from cpumond.scheduler.model import (
    GENERIC,
    GUARANTEES_OVERCOMMIT,
    NAME_REGEX,
    ROOT_POOL,
    SUBPOOL_DELIMITER,
    CommandError,
    EphemeralSubpoolConfig,
    PoolConfig,
    PoolSettings,
    PreemptionSettings,
    Resources,
    TreeConfig,
    to_vector,
)
from cpumond.scheduler.model.budget import NO_BUDGET, Budget, find_zone
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER, parse_tag_filter, read_filter
from cpumond.scheduler.settings.preemption_rules import find_cut_settings, pool_rules, root_rules
from cpumond.scheduler.settings.retries import RETRY_POLICY, check_policy
from cpumond.scheduler.settings.spec_options import IDLE_OF_POOLS, find_idle
from cpumond.scheduler.settings.values import FIELD

MAX_NAME: Final = 100
MAX_DEPTH: Final = 30
"""Maximum number of levels of pools below the root."""

MAX_SUBTREE: Final = 1000
"""Maximum number of pools in a child of the root and everything below that child."""

TOLERANCE: Final = 1e-9
"""Fraction by which a sum may exceed its bound, since decimal fractions do not add up exactly."""

AT_PARENT: Final = "at_parent"
"""Attribute that ``_refuse`` adds to an error, and that ``commands`` removes."""

STRONG: Final = "strong_guarantee_resources"
BURST: Final = "integral_guarantees/burst_guarantee_resources"
FLOW: Final = "integral_guarantees/resource_flow"


def validate_tree(tree: TreeConfig, *, name_pattern: str = NAME_REGEX) -> list[str]:
    """Check the options of a tree and of all its pools. Returns sentences about problems that are allowed.

    Raises CommandError for the first violation, with the pool, the rule, the value and the parent. ``name_pattern``: a
    regular expression for names of pools."""
    check_name("pool tree", tree.name, name_pattern)
    _check_tree_options(tree)
    tops: dict[str, str] = {}
    depths: dict[str, int] = {ROOT_POOL: 0}
    sizes: dict[str, int] = {}
    sums: dict[tuple[str, str], Resources] = {}
    names = _compile(name_pattern)
    for key, pool in tree.pools.items():
        if pool.name != key:
            raise CommandError(f"{named('pool', key)}: is kept under another name, {quoted(pool.name)}")
        if not (len(key) <= MAX_NAME and SUBPOOL_DELIMITER not in key and key != ROOT_POOL and names.fullmatch(key)):
            check_name("pool", key, name_pattern)
        if pool.parent not in depths:
            raise _wrong_parent(tree, pool)
        _check_structure(tree, pool, depths, tops, sizes)
        _check_pool(pool, tree.settings.main_resource)
        parent = tree.pools.get(_sharing(tree, pool.parent))
        if parent is not None:
            _check_under_parent(pool, parent, sums)
    return find_warnings(tree)


def find_warnings(tree: TreeConfig) -> list[str]:
    """Describe settings that are allowed, but probably not intended (2.4, 2.6)."""
    warnings = []
    name = tree.settings.default_parent_pool
    if name != ROOT_POOL:
        pool = tree.pools.get(name)
        if pool is None or pool.settings.mode == "fifo":
            what = "does not exist" if pool is None else "has mode fifo"
            warnings.append(
                f"{named('pool tree', tree.name)}: InvalidDefaultParentPool: {quoted(name)} {what}; "
                f"new pools of users are created under {ROOT_POOL}"
            )
    for pool in tree.pools.values():
        if pool.settings.integral_guarantees.guarantee_type == "burst":
            warnings += _burst_warnings(pool)
        idle = IDLE_OF_POOLS & pool.attributes.keys()
        for name, _, reason in find_idle("pool", {name: pool.attributes[name] for name in idle}) if idle else ():
            warnings.append(f"{named('pool', pool.name)}: {name} has no effect: {reason}")
    rules = {ROOT_POOL: root_rules(tree.settings)}
    for pool in tree.pools.values():
        rules[pool.name] = own = pool_rules(rules[pool.parent], pool.settings)
        if own is not rules[pool.parent]:
            warnings += find_cut_settings(named("pool", pool.name), pool.settings, own)
    return warnings


def find_overcommit(tree: TreeConfig, total: Vector) -> str | None:
    """Describe guarantees that exceed ``total``, the capacity of the tree's nodes; None if they fit.

    Each child of the root counts with its strong guarantee plus the greater of burst guarantee and flow (2.6, 8)."""
    promised = []
    for pool in tree.pools.values():
        if _sharing(tree, pool.parent) == ROOT_POOL:
            integral = pool.settings.integral_guarantees
            extra = greatest(to_vector(integral.burst_guarantee_resources, 0.0), to_vector(integral.resource_flow, 0.0))
            promised.append(add(to_vector(pool.settings.strong_guarantee_resources, 0.0), extra))
    over = [
        f"{number(amount)} {resource} of {number(available)}"
        for resource, amount, available in zip(RESOURCES, sum_vectors(promised), total, strict=True)
        if amount > available * (1.0 + TOLERANCE)
    ]
    if not over:
        return None
    return (
        f"{named('pool tree', tree.name)}: the pools are guaranteed more than the nodes have ({', '.join(over)}); "
        "all guarantees are scaled down by one factor; lower them, or add nodes"
    )


def find_late_guarantees(tree: TreeConfig, total: Vector) -> str | None:
    """Describe guarantees that a small operation of a different pool can block: as many jobs as the count rule
    protects, with one core each, need more than the rest of ``total`` (6.4). Returns None if there are none."""
    limit = tree.settings.max_unpreemptible_running_job_count
    if limit is None:
        return None
    jobs = limit - tree.settings.strict_unpreemptible_running_job_count
    late = [
        (name, cores)
        for name, pool in tree.pools.items()
        if (cores := to_vector(pool.settings.strong_guarantee_resources, 0.0)[CPU]) > 0.0
        and cores <= total[CPU] * (1.0 + TOLERANCE)
        and jobs > total[CPU] - cores
    ]
    if not late:
        return None
    name, cores = late[0]
    more = f" and of {len(late) - 1} more" if len(late) > 1 else ""
    few = f"at most {jobs} jobs" if jobs != 1 else "one job"
    rest = f"{number(total[CPU] - cores)} of {number(total[CPU])} cores"
    return (
        f"{named('pool tree', tree.name)}: the guarantee of pool {quoted(name)}{more} may have to wait for jobs of "
        f"others to end: an operation of {few} loses none (max_unpreemptible_running_job_count), and that many of one "
        f"core take more than the {rest} beside it; lower that option, 0 protects no jobs"
    )


def check_name(kind: str, name: str, name_pattern: str = NAME_REGEX) -> None:
    """Check that ``name`` is valid for an explicit pool or a tree (2.7). Raises CommandError."""
    if name == ROOT_POOL:
        raise _refuse(kind, name, "name", "this name is the root's; choose another name")
    if SUBPOOL_DELIMITER in name:
        what = f'a name must not contain "{SUBPOOL_DELIMITER}", which names of ephemeral sub-pools contain'
        raise _refuse(kind, name, "name", what)
    if not 1 <= len(name) <= MAX_NAME:
        raise _refuse(kind, name, "name", f"a name must have 1 to {MAX_NAME} characters, this has {len(name)}")
    if not _compile(name_pattern).fullmatch(name):
        raise _refuse(kind, name, "name", f"a name must match {name_pattern} as a whole")


def _refuse(
    kind: str, name: str, field: str, what: str, code: int = GENERIC, at_parent: tuple[str, str] | None = None
) -> CommandError:
    """Return an error that refuses the option ``field`` of a tree or pool.

    ``at_parent``: the parent, and the parent's option that the rule also concerns, for commands that change the parent.
    """
    attributes: dict[str, Any] = {FIELD: field}
    if at_parent is not None:
        attributes[AT_PARENT] = at_parent
    return CommandError(f"{named(kind, name)}: {what}", code, attributes)


@functools.lru_cache(maxsize=16)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _wrong_parent(tree: TreeConfig, pool: PoolConfig) -> CommandError:
    what = f"its parent {quoted(pool.parent)}"
    if pool.parent in tree.pools:
        what = f"{what} comes after it; put parents before their children"
    else:
        what = f"{what} does not exist{did_you_mean(pool.parent, (ROOT_POOL, *tree.pools))}"
    return _refuse("pool", pool.name, "parent", what)


def _check_structure(
    tree: TreeConfig, pool: PoolConfig, depths: dict[str, int], tops: dict[str, str], sizes: dict[str, int]
) -> None:
    """Check depth, size of the subtree, and that a fifo pool has no sub-pools. Add the pool to the dictionaries."""
    depth = depths[pool.name] = depths[pool.parent] + 1
    if depth > MAX_DEPTH:
        what = f"would be on level {depth} below the root, at most {MAX_DEPTH} are allowed"
        raise _refuse("pool", pool.name, "parent", what)
    top = tops[pool.name] = tops.get(pool.parent, pool.name)
    sizes[top] = sizes.get(top, 0) + 1
    if sizes[top] > MAX_SUBTREE:
        what = (
            f"the subtree of {quoted(top)} would have more than {MAX_SUBTREE} pools, the most that one subtree under "
            "the root can have; put it under another pool"
        )
        raise _refuse("pool", pool.name, "parent", what)
    parent = tree.pools.get(pool.parent)
    if parent is not None and parent.settings.mode == "fifo":
        what = (
            f"has mode fifo and cannot have sub-pools, {quoted(pool.name)} would be one; give that another parent, or "
            "this one mode fair_share"
        )
        raise _refuse("pool", parent.name, "parent", what, at_parent=(parent.name, "mode"))


def _check_tree_options(tree: TreeConfig) -> None:
    settings = tree.settings
    if settings.main_resource not in RESOURCES:
        what = (
            f"main_resource: must be one of {', '.join(RESOURCES)}, got {quoted(settings.main_resource)}"
            + did_you_mean(settings.main_resource, RESOURCES)
        )
        raise _refuse("pool tree", tree.name, "main_resource", what)
    try:
        read_filter(settings.nodes_filter)
    except ConfigError as error:
        raise _refuse("pool tree", tree.name, "nodes_filter", str(error)) from None
    normal, option = settings.preemption_satisfaction_threshold, "aggressive_preemption_satisfaction_threshold"
    aggressive = settings.aggressive_preemption_satisfaction_threshold
    if aggressive > normal:
        what = f"must not be above preemption_satisfaction_threshold ({number(normal)}), got {number(aggressive)}"
        raise _refuse("pool tree", tree.name, option, f"{option}: {what}")
    _check_timeouts("pool tree", tree.name, settings)
    for user, budget in settings.user_budgets.items():
        _check_budget("pool tree", tree.name, f"user_budgets/{user}", budget)


def _check_timeouts(kind: str, name: str, settings: PreemptionSettings) -> None:
    aggressive, normal = settings.fair_share_aggressive_starvation_timeout, settings.fair_share_starvation_timeout
    if aggressive and normal is not None and aggressive < normal:
        option = "fair_share_aggressive_starvation_timeout"
        what = f"must be 0 or at least fair_share_starvation_timeout ({number(normal)} ms), got {number(aggressive)}"
        raise _refuse(kind, name, option, f"{option}: {what}")


def _sharing(tree: TreeConfig, name: str) -> str:
    """Return the pool whose share the children of a pool divide: the pool itself or, if flattened, one above (2.16)."""
    while name != ROOT_POOL and tree.pools[name].settings.flatten:
        name = tree.pools[name].parent
    return name


_OF_A_SHARE: Final = (
    "weight", "max_share_ratio", "strong_guarantee_resources", "resource_limits", "integral_guarantees", "mode",
)  # fmt: skip


def _check_share(pool: PoolConfig) -> None:
    """Check the rules of ``flatten`` and ``lending_limit`` (2.16, 2.17)."""
    settings = pool.settings
    if settings.flatten and (said := [name for name in _OF_A_SHARE if name in pool.attributes]):
        what = f"a pool whose children share as its parent's own has no share itself: leave {said[0]} out"
        raise _refuse("pool", pool.name, "flatten", what)
    if settings.flatten and settings.budget is not None and settings.budget.when_spent == "leftover":
        what = 'it has no share that others could use: budget/when_spent must be "warn" or "stop"'
        raise _refuse("pool", pool.name, "flatten", what)
    if beside := [name for name in settings.lending_limit if name not in settings.strong_guarantee_resources]:
        what = f"limits the lending of a guarantee, and strong_guarantee_resources has no {beside[0]}"
        raise _refuse("pool", pool.name, "lending_limit", what)


def _check_pool(pool: PoolConfig, main_resource: str) -> None:
    settings = pool.settings
    if settings.fair_share_aggressive_starvation_timeout:
        _check_timeouts("pool", pool.name, settings)
    if settings.max_operation_count is not None:
        _check_counts(pool.name, "", settings)
    if settings.ephemeral_subpool_config.max_operation_count is not None:
        _check_counts(pool.name, "ephemeral_subpool_config", settings.ephemeral_subpool_config)
    if settings.create_ephemeral_subpools and settings.mode == "fifo":
        option = "create_ephemeral_subpools"
        what = f"{option} cannot be true in a pool with mode fifo, which has no sub-pools"
        raise _refuse("pool", pool.name, option, what)
    if settings.scheduling_tag_filter:
        try:
            parse_tag_filter(settings.scheduling_tag_filter)
        except ConfigError as error:
            raise _refuse("pool", pool.name, TAG_FILTER, str(error)) from None
    if settings.retry_policy is not None:
        try:
            check_policy(settings.retry_policy)
        except ValueError as error:
            raise _refuse("pool", pool.name, RETRY_POLICY, f"{RETRY_POLICY}: {error}") from None
    _check_budget("pool", pool.name, "budget", settings.budget)
    _check_share(pool)
    integral = settings.integral_guarantees
    if integral.guarantee_type == "relaxed" and integral.burst_guarantee_resources:
        what = (
            f"{BURST}: must be empty in a pool with guarantee_type relaxed, which has resource_flow only; got "
            f"{_listed(integral.burst_guarantee_resources)}"
        )
        raise _refuse("pool", pool.name, BURST, what)
    for kind, amounts in _guarantees(settings):
        if amounts and main_resource not in amounts:
            what = f"{kind}: must include the tree's main resource {main_resource}, got {_listed(amounts)}"
            raise _refuse("pool", pool.name, f"{kind}/{main_resource}", what)


def _check_budget(kind: str, name: str, option: str, budget: Budget) -> None:
    if find_zone(budget.zone) is None:
        what = f'must be a time zone known to this machine, such as "UTC" or "Europe/Paris"; got "{budget.zone}"'
        raise _refuse(kind, name, f"{option}/zone", f"{option}/zone: {what}")
    if budget.core_hours is None and budget != NO_BUDGET:
        what = "must be given, since other keys of the budget are; remove the budget as a whole to have none"
        raise _refuse(kind, name, f"{option}/core_hours", f"{option}/core_hours: {what}")


def _check_counts(name: str, inside: str, settings: PoolSettings | EphemeralSubpoolConfig) -> None:
    """Check limits on numbers of operations. ``inside``: option of the pool that contains ``settings``, or ""."""
    most, running = settings.max_operation_count, settings.max_running_operation_count
    if most is not None and running is not None and most < running:
        what = f"max_operation_count: must be at least max_running_operation_count ({running}), got {most}"
        if inside:
            raise _refuse("pool", name, f"{inside}/max_operation_count", f"{inside}: {what}")
        raise _refuse("pool", name, "max_operation_count", what)


def _guarantees(settings: PoolSettings) -> Iterator[tuple[str, Resources]]:
    integral = settings.integral_guarantees
    yield STRONG, settings.strong_guarantee_resources
    yield BURST, integral.burst_guarantee_resources
    yield FLOW, integral.resource_flow


def _check_under_parent(pool: PoolConfig, parent: PoolConfig, sums: dict[tuple[str, str], Resources]) -> None:
    """Check the rules between a pool and its parent. ``sums``: sums over the parent's children so far."""
    for (kind, amounts), (_, bounds) in zip(_guarantees(pool.settings), _guarantees(parent.settings), strict=True):
        if not amounts:
            continue
        if not parent.settings.allow_children_guarantees:
            what = f"its parent {quoted(parent.name)} does not allow children guarantees, got {_listed(amounts)}"
            at_parent = (parent.name, "allow_children_guarantees")
            raise _refuse("pool", pool.name, kind, f"{kind}: {what}", at_parent=at_parent)
        integral_type = parent.settings.integral_guarantees.guarantee_type
        if kind != STRONG and integral_type != "none":
            what = (
                f"must be empty, its parent {quoted(parent.name)} has guarantee_type {integral_type} and cannot have "
                f"children with integral resources; got {_listed(amounts)}"
            )
            at_parent = (parent.name, "integral_guarantees/guarantee_type")
            raise _refuse("pool", pool.name, kind, f"{kind}: {what}", at_parent=at_parent)
        total = sums.setdefault((parent.name, kind), {})
        for resource, amount in amounts.items():
            bound = bounds.get(resource)
            # The parent's option has the same name: ``at_parent`` is not needed.
            field = f"{kind}/{resource}"
            if bound is None:
                what = f"is configured ({number(amount)}), but not at its parent {quoted(parent.name)}"
                raise _refuse("pool", pool.name, field, f"{field}: {what}; set it there first")
            total[resource] = total.get(resource, 0.0) + amount
            if total[resource] > bound * (1.0 + TOLERANCE):
                what = (
                    f"with {number(amount)} here the children of {quoted(parent.name)} have {number(total[resource])} "
                    f"together, more than its {number(bound)}; lower theirs, or raise that"
                )
                raise _refuse("pool", pool.name, field, f"{field}: {what}", GUARANTEES_OVERCOMMIT)


def _burst_warnings(pool: PoolConfig) -> Iterator[str]:
    integral = pool.settings.integral_guarantees
    where = named("pool", pool.name)
    for kind, amounts in ((BURST, integral.burst_guarantee_resources), (FLOW, integral.resource_flow)):
        if not amounts:
            yield f"{where}: has guarantee_type burst, but no {kind}; a burst pool needs both"
    for resource, burst in integral.burst_guarantee_resources.items():
        flow = integral.resource_flow.get(resource, 0.0)
        if burst < flow:
            yield (
                f"{where}: {BURST}/{resource}: {number(burst)} is less than the resource_flow of {number(flow)}, so "
                "part of the flow cannot be used"
            )


def _listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in amounts.items())
