"""Guarantees that are not met while others use the CPU: the rule that blocks each pool's operations. Pure.

Amounts are cores. A change frees capacity by preemption, which waits for starvation timeouts (semantics.md 3, 6)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from cpumond.core.measures import format_cores
from cpumond.core.words import count
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.answers.obstacles import count_limit
from cpumond.scheduler.answers.remedies import raise_count
from cpumond.scheduler.decide.placement import wants_jobs
from cpumond.scheduler.decide.protection import describe_cause, find_protections
from cpumond.scheduler.decide.starvation import priority_of, starves_in_s
from cpumond.scheduler.decide.victims import is_protected_by_count
from cpumond.scheduler.elements import OperationElement, PoolElement, Tree
from cpumond.scheduler.state import State, dispatch
from cpumond.scheduler.trial.remedy import Remedy, join, set_pool, set_tree

LEAST: Final = 0.01
MAX_POOLS: Final = 5
"""Maximum number of pools that are examined, those with the largest deficits."""
LONG_S: Final = 120.0
"""If an operation starts to starve within this time, no change is proposed for it."""
STARVATION_MS: Final = 30_000.0


def find_unmet(state: State, tree: Tree, idle: float, now: float) -> list[Remedy]:
    """Return remedies for pools that have less than their guarantee although their operations want it, largest deficit
    first. ``idle``: cores that no job has."""
    missing = sorted((missed, pool.name) for pool in tree.pools.values() if (missed := _missing(pool)) > LEAST)
    found: dict[tuple[object, ...], Remedy] = {}
    for missed, name in missing[: -MAX_POOLS - 1 : -1]:
        pool = tree.pools[name]
        for remedy in _find(state, pool, idle, missed, now):
            found.setdefault((remedy.kind, remedy.text, remedy.why), _begin(remedy, pool))
    return list(found.values())


def _missing(pool: PoolElement) -> float:
    guarantee = pool.strong_guarantee_share[CPU] * pool.tree.total[CPU]
    return min(guarantee, pool.demand[CPU] + pool.waiting[CPU]) - pool.usage[CPU]


def _takeable(pool: PoolElement, by_shares: bool) -> float:
    """Return the cores that preemption could take from others in the long run, without jobs that the count rule
    protects. ``by_shares``: count only jobs above their operation's fair share."""
    total, cores = pool.tree.total[CPU], 0.0
    for element in pool.tree.operations.values():
        jobs = len(element.jobs)
        if not jobs or not element.usage[CPU] or any(each is pool for each in element.ancestors()):
            continue
        order = element.usage[CPU] / jobs
        above = (element.usage[CPU] - element.fair_share[CPU] * total) / order if by_shares else jobs
        taken = next((n for n in range(jobs) if is_protected_by_count(element, jobs - n)), jobs)
        cores += max(min(math.floor(above + 1e-6), taken), 0) * order
    return cores


def _beyond(pool: PoolElement) -> float:
    """Return how many cores others hold beyond their strong guarantees: another guarantee may take these (6.10)."""
    side, cores, total = pool, 0.0, pool.tree.total[CPU]
    for above in pool.ancestors():
        others = (each for each in (*above.children.values(), *above.operations.values()) if each is not side)
        cores += sum(max(each.usage[CPU] - each.strong_guarantee_share[CPU] * total, 0.0) for each in others)
        side = above
    return cores


def _whole_jobs(cores: float, element: OperationElement) -> float:
    """Return ``cores`` rounded down to whole jobs of the operation."""
    order = next((task.resources[CPU] for task in element.operation.next_tasks()), 0.0)
    return math.floor(cores / order + 1e-6) * order if order > 0.0 else 0.0


def _begin(remedy: Remedy, pool: PoolElement) -> Remedy:
    guarantee = format_cores(pool.strong_guarantee_share[CPU] * pool.tree.total[CPU])
    lead = (
        f"pool {pool.name} is allocated {format_cores(pool.usage[CPU])} of {guarantee} guaranteed cores "
        "while others hold the CPU"
    )
    return replace(remedy, lead=lead)


def _find(state: State, pool: PoolElement, idle: float, missed: float, now: float) -> Iterator[Remedy]:
    pending = min(missed, pool.waiting[CPU])
    running = missed - max(missed - (pool.demand[CPU] - pool.usage[CPU]), 0.0)
    wanting = (each for each in pool.tree.operations.values() if wants_jobs(each) and pool in each.ancestors())
    target = next(wanting, None)
    if running > LEAST and target is not None:
        held = list(_held_by_rules(state, pool, target, running, now))
        yield from held or _held_without_tolerance(pool, target, running, now)
    missed = min(missed, idle + _takeable(pool, by_shares=False) + running)
    if pending > LEAST and missed - running > LEAST:
        yield from _held_by_counts(pool, min(pending, missed - running))


def _held_by_counts(pool: PoolElement, missed: float) -> Iterator[Remedy]:
    """Yield the remedy if operations of the pool do not run because pools above them are full."""
    left, taken = missed, dict[PoolElement, int]()
    for element in pool.tree.queue.values():
        if left < LEAST:
            break
        order = next((task.resources[CPU] for task in element.operation.next_tasks()), 0.0)
        if left < order - LEAST:
            continue
        if element.waiting[CPU] > 0.0 and any(each is pool for each in element.ancestors()):
            left -= element.waiting[CPU]
            for each in element.ancestors():
                taken[each] = taken.get(each, 0) + 1
    running = {each.name: each.running_operation_count + number for each, number in taken.items()}
    full = (each for each in taken if running[each.name] > each.max_running_operation_count)
    if limits := dict.fromkeys(count_limit(each) for each in full):
        remedy = join([raise_count(pool.tree, each, running) for each in limits])
        yield replace(remedy, kind="max_running_operation_count", pool=pool.name, cores=missed - max(left, 0.0))


def _held_by_rules(
    state: State, pool: PoolElement, target: OperationElement, missed: float, now: float
) -> Iterator[Remedy]:
    """Yield remedies if an operation of the pool runs and wants jobs, but preemption rules protect other jobs."""
    tree = pool.tree
    settings = tree.config.settings
    holds = bool(settings.guarantee_tolerance)
    could = min(missed, _whole_jobs(_beyond(pool) if holds else _takeable(pool, by_shares=True), target))
    if (
        settings.max_preemptions_per_minute is not None
        and could > LEAST
        and dispatch.count_preemptions_left(state, tree, now) <= 0
    ):
        limit = settings.max_preemptions_per_minute + max(math.ceil(missed), 1)
        why = f"max_preemptions_per_minute of tree {tree.name} is {settings.max_preemptions_per_minute}"
        yield _set_option(tree.root, pool, "max_preemptions_per_minute", limit, could, why)
    priority = priority_of(target)
    if priority == "none":
        yield from _held_by_time(pool, target, could, now) if could > LEAST else ()
    if priority == "none" or holds:
        return
    protections = find_protections(target, priority, now)
    counted = [each.element for each in protections if each.cause == "count"]
    operations = [each for each in counted if isinstance(each, OperationElement)]
    if operations:
        yield from _held_by_count_rule(pool, operations, missed)
    for cause, option in (("forbids", "allow_aggressive_preemption"), ("starving", "preemption_check_starvation")):
        cores = sum(each.element.usage[CPU] for each in protections if each.cause == cause)
        if cores > LEAST and option == "preemption_check_starvation":
            why = f"the others starve, too, and preemption_check_starvation of tree {tree.name} is true"
            yield _set_option(tree.root, pool, option, False, min(missed, cores), why)
        elif cores > LEAST:
            element = next(each.element for each in protections if each.cause == cause)
            kind = "tree" if element.parent is None else "pool"
            why = f"allow_aggressive_preemption of {kind} {element.name} is false"
            yield _set_option(element, pool, option, True, min(missed, cores), why)


def _held_without_tolerance(pool: PoolElement, target: OperationElement, missed: float, now: float) -> Iterator[Remedy]:
    """Yield the remedy if no ordinary rule gives the pool more: it does not starve, or the jobs of pools above their
    guarantees are protected. ``guarantee_tolerance`` lets it take these jobs all the same (6.10)."""
    tree = pool.tree
    could = min(missed, _whole_jobs(_beyond(pool), target))
    if tree.config.settings.guarantee_tolerance or could <= LEAST:
        return
    priority = priority_of(target)
    if priority != "none":
        protections = find_protections(target, priority, now)
        why = describe_cause(protections[0].cause, tree) if protections else ""
    else:
        tolerance = 1.0 if pool.rules is None else pool.rules.tolerance
        why = f"starving begins below {tolerance:g} of it (fair_share_starvation_tolerance)"
        if pool.below_since is not None:
            return
    if why:
        remedy = set_tree(tree.name, [("guarantee_tolerance", 1.0)], why, "set guarantee_tolerance of the tree to 1")
        yield replace(remedy, kind="guarantee_tolerance", pool=pool.name, cores=could)


def _held_by_count_rule(pool: PoolElement, operations: list[OperationElement], missed: float) -> Iterator[Remedy]:
    tree = pool.tree
    surplus: list[tuple[float, int]] = []
    for element in operations:
        order = element.usage[CPU] / len(element.jobs)
        above = element.usage[CPU] - element.fair_share[CPU] * tree.total[CPU]
        jobs = math.floor(above / order + 1e-6) if order > 0.0 else 0
        if jobs > 0:
            surplus.append((jobs * order, len(element.jobs) - jobs))
    surplus.sort(reverse=True)
    got, limit = 0.0, 10**9
    for cores, left in surplus:
        if got >= missed - LEAST:
            break
        got, limit = got + cores, min(limit, left)
    if got > LEAST:
        now = tree.config.settings.max_unpreemptible_running_job_count
        why = (
            f"max_unpreemptible_running_job_count of tree {tree.name} is {now} and protects "
            f"{count(len(operations), 'operation')} of other pools"
        )
        yield _set_option(tree.root, pool, "max_unpreemptible_running_job_count", limit, min(got, missed), why, "lower")


def _held_by_time(pool: PoolElement, target: OperationElement, missed: float, now: float) -> Iterator[Remedy]:
    """Yield the remedy if the pool does not starve yet and will not for a long time."""
    left = [left for each in (target, pool) if (left := starves_in_s(each, now)) is not None]
    if not left or min(left) < LONG_S:
        return
    own, settings = pool.settings, pool.tree.config.settings
    names = ("min_share_preemption_timeout", "fair_share_starvation_timeout")
    for option in names:
        if (getattr(own, option) or 0.0) > STARVATION_MS:
            why = f"{option} of pool {pool.name} is {getattr(own, option) / 1e3:g} s"
            yield _set_option(pool, pool, option, STARVATION_MS, missed, why, "lower")
            return
    for option in names:
        value = getattr(settings, option)
        if value is not None and value > STARVATION_MS:
            why = f"{option} of tree {pool.tree.name} is {value / 1e3:g} s"
            yield _set_option(pool.tree.root, pool, option, STARVATION_MS, missed, why, "lower")
            return


def _set_option(
    element: OperationElement | PoolElement, pool: PoolElement, option: str, value: object, cores: float, why: str,
    verb: str = "raise",
) -> Remedy:  # fmt: skip
    """Return a remedy: change the option of ``element`` (root: of the tree) that keeps ``pool`` from its guarantee."""
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    text = f"set it to {shown}" if isinstance(value, bool) else f"{verb} it to {shown}"
    if option.endswith("timeout"):
        text = f"{verb} it to {shown} (milliseconds)"
    tree = pool.tree.name
    if element.parent is None:
        remedy = set_tree(tree, [(option, value)], why, text)
    else:
        remedy = set_pool(tree, element.name, [((option,), value)], why, text)
    return replace(remedy, kind=option, pool=pool.name, cores=cores)
