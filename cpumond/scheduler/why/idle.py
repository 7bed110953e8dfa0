"""Why CPU stands idle while work waits: the capacity of a tree split, and what holds back how much, in sentences. Pure.

Cores throughout. A cause's ``cores`` is what would start if its change were made and nothing else; causes overlap, so
these do not add up. ``idle_cores`` do: they lay each idle core to one cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from cpumond.core.measures import count_cores
from cpumond.core.words import count, show_cores
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.state import State
from cpumond.scheduler.why.causes import tell_cannot_start
from cpumond.scheduler.why.foretell import foretell
from cpumond.scheduler.why.idle_material import Material, take_material
from cpumond.scheduler.why.idle_search import Found, Search, search
from cpumond.scheduler.why.plan import Material as Known
from cpumond.scheduler.why.plan import collect
from cpumond.scheduler.why.remedies import MOST, Remedy, find_refusals, find_remedy
from cpumond.scheduler.why.unmet import find_unmet

SHOWN_OPERATIONS: Final = 20
TRIED_OUT: Final = 3
"""So many changes are tried out on a copy of the scheduler, those that would let most start."""
LEAST: Final = 0.005
"""Fewer cores are not told of: they would be shown as 0."""


class Change(msgspec.Struct, frozen=True):
    """What to do about a cause. ``commands``: changes of trees and pools, as ``POST /api/v1/plan`` takes each;
    ``shell``: the same as command lines. Both are empty where no configuration can do it."""

    text: str
    commands: list[dict[str, Any]] = []
    shell: list[str] = []
    operations: list[str] = []
    """Ids of the operations that are to be changed; others may not be shown them."""


class IdleCause(msgspec.Struct, frozen=True):
    """What holds back ``cores``. ``pool``: the one with the limit, else the one whose operations wait for most of them,
    "" for none. ``operations``: the ids of some of the ``operation_count`` operations that it holds back; of
    ``max_operation_count`` that many starts were refused, which have no ids, and ``cores`` is what they may use."""

    kind: str
    pool: str
    cores: float
    change: Change
    why: str
    idle_cores: float
    operation_count: int
    operations: list[str]
    lead: str = ""
    """How its sentence begins where it is not of work that waits for idle CPU: a pool has less than its guarantee while
    others use the CPU, or work was refused that nobody has started again."""
    pools: list[str] = []
    """Those of the operations in whose way it is; not those above them."""


class IdleParts(msgspec.Struct, frozen=True):
    """The capacity of a tree. ``reused``: used beyond what the jobs' orders would have left, since others' limits are
    lowered. ``unused``: allotted and not used. ``silent``: of nodes that are offline. ``starting``: idle, and about to
    be given to jobs. ``without_work``: idle, and nothing waits for it. ``held_back``: idle while work waits for it."""

    capacity: float = 0.0
    used: float = 0.0
    reused: float = 0.0
    unused: float = 0.0
    silent: float = 0.0
    starting: float = 0.0
    without_work: float = 0.0
    held_back: float = 0.0


class IdleReport(msgspec.Struct, frozen=True):
    """Why CPU of a tree stands idle, as of ``as_of`` (seconds since 1970). ``waiting_cores``: what operations with jobs
    to start order for these; ``outside_cores``: idle on nodes that the tree does not have and no work waits for there.
    ``held_by_pool``: idle cores that the operations of each pool's subtree would use."""

    tree: str
    pool: str
    sentence: str
    as_of: float
    parts: IdleParts
    waiting_cores: float
    waiting_operations: int
    outside_cores: float
    causes: list[IdleCause]
    held_by_pool: dict[str, float]
    too_large_operations: int = 0
    """That no node of the tree can hold; ``too_large``: what is, of one of them."""
    too_large: str = ""


def find_idle(state: State, tree: Tree, now: float) -> IdleReport:
    """The report on a tree as it is. Changes nothing."""
    *_, material = take_material(state, tree, now)
    return make_report(material, find_unmet(state, tree, material, now), collect(state))


def make_report(material: Material, unmet: Sequence[Remedy] = (), known: Known | None = None) -> IdleReport:
    """The report on a tree of which all parts are taken; ``unmet``: what keeps pools from their guarantees. With what
    plans are made of, ``known``, the first changes of the configuration are tried on a copy."""
    found = search(material)
    split, base = material.split, found.base
    starting = min(base.cores, split.idle)
    held = found.held
    parts = IdleParts(
        capacity=split.capacity,
        used=split.used,
        reused=split.reused,
        unused=split.unused,
        silent=split.silent,
        starting=starting,
        without_work=max(split.idle - starting - held, 0.0),
        held_back=held,
    )
    remedies = [find_remedy(found, each) for each in found.found]
    if known is not None:
        remedies = _try_out(known, found, remedies)
    causes = [_make_cause(found, each, remedy) for each, remedy in zip(found.found, remedies, strict=True)]
    causes += [_make_guarantee_cause(found, each) for each in unmet if not _is_told(each, found, causes)]
    causes = sorted((each for each in causes if each.cores > LEAST), key=lambda each: -each.cores)
    causes += _make_refusal_causes(material, parts.without_work)
    report = IdleReport(
        material.tree, "", "", material.at, parts, found.waiting, len(base.left), found.outside, causes,
        _held_by_pool(found), len(material.too_large), next(iter(material.too_large), ""),
    )  # fmt: skip
    return msgspec.structs.replace(report, sentence=tell(report))


def _try_out(known: Known, result: Search, remedies: list[Remedy]) -> list[Remedy]:
    """The same, the first ones with the cores that start on a copy of the scheduler."""
    base = 0.0
    if result.base.cores > LEAST:
        base = foretell(known, result.material, ()) or 0.0
    tried: list[Remedy] = []
    for remedy in remedies:
        cores = None
        if remedy.commands and len(tried) < TRIED_OUT:
            cores = foretell(known, result.material, remedy.commands)
        tried.append(remedy if cores is None else replace(remedy, cores=max(cores - base, 0.0)))
    return tried


def _make_cause(result: Search, found: Found, remedy: Remedy) -> IdleCause:
    operations = result.operations
    numbers = sorted(found.placed, key=lambda number: -found.placed[number])
    pools = {operations[number].pool for number in (*numbers, *found.waits)}
    ids = [operations[number].id for number in numbers]
    cores = min(remedy.cores, result.idle + result.outside)
    return IdleCause(
        kind=remedy.kind,
        pool=remedy.pool or _most_held(result, found.placed),
        cores=_round(cores),
        change=_make_change(remedy),
        why=remedy.why,
        idle_cores=_round(min(found.idle, cores)),
        operation_count=len(ids),
        operations=ids[:SHOWN_OPERATIONS],
        pools=sorted(result.material.pools[place].name for place in pools),
    )


def _is_told(remedy: Remedy, result: Search, causes: list[IdleCause]) -> bool:
    """Whether idle CPU is enough for what a pool misses, and what holds that back is told already."""
    return result.held >= remedy.cores and any(cause.kind == remedy.kind for cause in causes)


def _make_guarantee_cause(result: Search, remedy: Remedy) -> IdleCause:
    below = {
        number
        for number, each in enumerate(result.operations)
        if any(result.material.pools[place].name == remedy.pool for place in result.material.pools[each.pool].path)
    }
    ids = [result.operations[number].id for number in sorted(below) if number in result.base.left]
    return IdleCause(
        kind=remedy.kind, pool=remedy.pool, cores=_round(remedy.cores), change=_make_change(remedy), why=remedy.why,
        idle_cores=0.0, operation_count=len(ids), operations=ids[:SHOWN_OPERATIONS], lead=remedy.lead,
    )  # fmt: skip


def _make_refusal_causes(material: Material, idle: float) -> list[IdleCause]:
    """Of starts that were refused: nothing waits for them, so they come after what holds back work that is there."""
    causes = []
    for remedy, starts in find_refusals(material):
        cores = _round(min(remedy.cores, idle))
        if cores > LEAST:
            lead = f"{count_cores(idle)} {_stand(idle)} idle for lack of work"
            cause = IdleCause(remedy.kind, remedy.pool, cores, _make_change(remedy), remedy.why, 0.0, starts, [], lead)
            causes.append(cause)
    return sorted(causes, key=lambda each: -each.cores)


def _make_change(remedy: Remedy) -> Change:
    commands = [msgspec.to_builtins(each) for each in remedy.commands]
    return Change(remedy.text, commands, list(remedy.shell), list(remedy.operations))


def _round(cores: float) -> float:
    return math.floor(cores * 1e6 + 0.5) / 1e6


def _most_held(result: Search, placed: Mapping[int, float]) -> str:
    cores: dict[int, float] = {}
    for number, more in placed.items():
        pool = result.operations[number].pool
        cores[pool] = cores.get(pool, 0.0) + more
    return result.material.pools[max(cores, key=lambda pool: cores[pool])].name if cores else ""


def _held_by_pool(result: Search) -> dict[str, float]:
    held: dict[str, float] = {}
    for found in result.found:
        whole = sum(found.placed.values())
        for number, more in found.placed.items() if found.idle > 0.0 else ():
            for place in result.material.pools[result.operations[number].pool].path:
                name = result.material.pools[place].name
                held[name] = held.get(name, 0.0) + found.idle * more / whole
    return {name: _round(cores) for name, cores in held.items()}


KINDS: Final = (
    "max_running_operation_count", "resource_limits", "max_share_ratio", "fragmentation", "memory", "user_slots", "gpu",
    "network", "spare", "graceful", "gang", "cordon", "allow_reclaimed",
)  # fmt: skip
"""Kinds of causes that hold back CPU of a tree's own nodes; series of metrics begin at 0 for all of them."""


def idle_reasons(report: IdleReport) -> dict[str, float]:
    """Idle cores by reason: they add up to what is idle. "several": no single change would let them be used."""
    parts = report.parts
    reasons = {"no_work": parts.without_work, "starting": parts.starting, **dict.fromkeys((*KINDS, "several"), 0.0)}
    for cause in report.causes:
        if cause.kind in reasons:
            reasons[cause.kind] += cause.idle_cores
    reasons["several"] = max(parts.held_back - sum(cause.idle_cores for cause in report.causes), 0.0)
    return reasons


def tell(report: IdleReport) -> str:
    """The report in one sentence: what can never start, how much is idle, what is most in the way, what to do."""
    told, number = _tell_idle(report), report.too_large_operations
    if not number:
        return told
    return f"{count(number, 'operation')} {tell_cannot_start(report.too_large)}{', and more' * (number > 1)}; {told}"


def _tell_idle(report: IdleReport) -> str:
    parts, waiting = report.parts, count(report.waiting_operations, "operation")
    wait = "waits" if report.waiting_operations == 1 else "wait"
    if report.causes:
        first = report.causes[0]
        idle = max(parts.held_back, first.cores)
        lead = first.lead or f"{count_cores(idle)} {_stand(idle)} idle while {waiting} {wait}"
        work = f"{count_cores(first.cores)} {'starts' if show_cores(first.cores) == '1' else 'start'} work"
        if first.kind == MOST:
            return f"{lead}: {first.why}; {first.change.text} and up to {work} once these are started again"
        return f"{lead}: {first.why}; {first.change.text} and {work}{' for it' if first.lead else ''}"
    idle = parts.held_back + parts.without_work
    if parts.held_back > LEAST:
        return f"{count_cores(idle)} {_stand(idle)} idle while {waiting} {wait}, and no single limit is in the way"
    if parts.starting > LEAST:
        return f"no CPU stands idle for long: waiting jobs are about to get {count_cores(parts.starting)}"
    if idle > LEAST:
        return f"{count_cores(idle)} {_stand(idle)} idle for lack of work: no operation waits for CPU"
    if not report.waiting_operations:
        return "no CPU stands idle, and no operation waits for CPU"
    return f"no CPU stands idle while {waiting} {wait}: all of it is given to jobs"


def _stand(cores: float) -> str:
    return "stands" if show_cores(cores) == "1" else "stand"


def in_pool(report: IdleReport, pool: str, above: frozenset[str], below: frozenset[str]) -> IdleReport:
    """What concerns a pool: limits of it, of pools ``above`` and ``below`` it, and what holds back its operations."""
    held = report.held_by_pool.get(pool, 0.0)
    own = below | {pool}
    causes = [cause for cause in report.causes if cause.pool in above | own or not own.isdisjoint(cause.pools)]
    shown = msgspec.structs.replace(report, pool=pool, causes=causes, held_by_pool={pool: held})
    if causes == report.causes:
        return shown
    nothing = f"nothing holds back pool {pool}; in the whole tree {report.sentence}"
    return msgspec.structs.replace(shown, sentence=tell(shown) if causes else nothing)


def readable(report: IdleReport, may_read: Callable[[str], bool]) -> IdleReport:
    """The report for somebody who may not know of all operations: of those there are numbers only."""
    causes = []
    for cause in report.causes:
        change = cause.change
        if not all(map(may_read, change.operations)):
            change = Change("ask those who may read these operations to change them")
        operations = [name for name in cause.operations if may_read(name)]
        causes.append(msgspec.structs.replace(cause, change=change, operations=operations))
    shown = msgspec.structs.replace(report, causes=causes)
    return msgspec.structs.replace(shown, sentence=tell(shown))
