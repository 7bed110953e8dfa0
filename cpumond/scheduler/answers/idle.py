"""Reasons why CPU is idle while work waits: a tree's capacity, and the CPU that each cause keeps idle. Pure.

All amounts are cores. ``cores`` of a cause: cores of the work that would start if only the change for this cause were
made. Causes overlap, so their ``cores`` do not add up. Their ``idle_cores`` do: each idle core has one cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from cpumond.core.measures import count_cores, format_cores
from cpumond.core.words import count
from cpumond.scheduler.answers.causes import describe_cannot_start
from cpumond.scheduler.answers.obstacles import CONFIGURED, CapacitySplit, Obstacle, Waiting
from cpumond.scheduler.answers.remedies import MOST
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER
from cpumond.scheduler.trial.remedy import Remedy

SHOWN_OPERATIONS: Final = 20
LEAST: Final = 0.005
"""Amounts of fewer cores are not reported: they would be shown as 0."""


class Advice(msgspec.Struct, frozen=True):
    """The remedy of a cause. ``commands``: changes of trees and pools, each as ``POST /api/v1/plan`` takes it.
    ``shell``: the same changes as command lines. Both are empty if no change of the configuration helps."""

    text: str
    commands: list[dict[str, Any]] = []
    shell: list[str] = []
    operations: list[str] = []
    """Ids of the operations to change; shown only to users who may read these."""


class IdleCause(msgspec.Struct, frozen=True):
    """A cause that blocks ``cores``. ``pool``: the pool with the limit, or else the one whose operations wait for most
    of the cores; "" for none. ``operations``: ids of some of the ``operation_count`` blocked operations. For
    ``max_operation_count`` these are refused starts, which have no ids, and ``cores`` is what they may use."""

    kind: str
    pool: str
    cores: float
    change: Advice
    why: str
    idle_cores: float
    operation_count: int
    operations: list[str]
    lead: str = ""
    """How its sentence begins if the cause is not about work that waits for idle CPU: a pool has less than its
    guarantee while others use the CPU, or work was refused and not submitted again."""
    pools: list[str] = []
    """Pools of the blocked operations, without the ancestors of these pools."""


class IdleParts(msgspec.Struct, frozen=True):
    """The split of a tree's capacity. ``reused``: used on CPU that is free only because limits of others are lowered.
    ``unused``: allocated but not used. ``silent``: of offline nodes. ``starting``: idle, but about to be given to jobs.
    ``without_work``: idle, and no work waits for it. ``held_back``: idle while work waits for it. ``backfilled``: no
    separate part, but cores allocated to jobs on resources reserved for a gang."""

    capacity: float = 0.0
    used: float = 0.0
    reused: float = 0.0
    unused: float = 0.0
    silent: float = 0.0
    starting: float = 0.0
    without_work: float = 0.0
    held_back: float = 0.0
    backfilled: float = 0.0


class IdleReport(msgspec.Struct, frozen=True):
    """Why CPU of a tree is idle, as of ``as_of`` (seconds since 1970). ``waiting_cores``: requested by jobs that have
    yet to start. ``outside_cores``: idle on nodes outside of the tree, where no work waits for them. ``held_by_pool``:
    idle cores that the operations below each pool would use."""

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
    """Number of operations that no node of the tree can hold; ``too_large`` describes the excess of one of them."""
    too_large: str = ""


@dataclass(slots=True, eq=False)
class Found:
    """Obstacles, the visible one first, and one remedy for all. ``placed``: operation -> cores that the remedy starts.

    ``waits``: the operations blocked by the first obstacle. ``idle``: the idle CPU assigned to these obstacles alone.
    """

    obstacles: tuple[Obstacle, ...]
    remedy: Remedy
    placed: Mapping[str, float]
    waits: frozenset[str] = frozenset()
    idle: float = 0.0

    @property
    def cores(self) -> float:
        return self.remedy.cores

    @property
    def is_mixed(self) -> bool:
        """Whether there are several obstacles, and a change of the configuration does not remove all of them."""
        return len(self.obstacles) > 1 and any(each.kind not in CONFIGURED for each in self.obstacles)


@dataclass(slots=True, eq=False)
class Idle:
    """Findings of a tree. ``starting``: cores of work that starts by itself. ``waiting``: what still waits after that.
    ``outside``: idle cores of nodes outside of the tree, where no work waits for them."""

    tree: Tree
    split: CapacitySplit
    starting: float
    waiting: Mapping[str, Waiting]
    outside: float
    found: list[Found] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Cores that are idle after all work that starts by itself has started."""
        return max(self.split.idle - self.starting, 0.0)

    @property
    def waiting_cores(self) -> float:
        return sum(each.cores for each in self.waiting.values())

    @property
    def held(self) -> float:
        """The cores of ``left`` that waiting work could use."""
        return min(self.left, self.waiting_cores)

    def path_of(self, operation_id: str) -> list[str]:
        """Return the names of the pools above an operation, the operation's own pool first."""
        return [pool.name for pool in self.tree.operations[operation_id].ancestors()]


def make_report(
    idle: Idle, now: float, unmet: Sequence[Remedy], refusals: Iterable[tuple[Remedy, int]], too_large: Sequence[str]
) -> IdleReport:
    """Return the report. ``unmet``: remedies for pools below their guarantees. ``refusals``: starts recently refused
    because of limits. ``too_large``: the excess of each operation that no node can hold."""
    split, held = idle.split, idle.held
    starting = min(idle.starting, split.idle)
    without_work = max(split.idle - starting - held, 0.0)
    parts = IdleParts(
        split.capacity, split.used, split.reused, split.unused, split.silent, starting, without_work, held,
        split.backfilled,
    )  # fmt: skip
    causes = [_make_cause(idle, each) for each in idle.found]
    told = {each.kind for each in causes}
    # A pool's deficit that fits into the idle CPU needs no cause of its own if that kind of cause is reported already.
    causes += [_make_guarantee_cause(idle, each) for each in unmet if idle.held < each.cores or each.kind not in told]
    causes = sorted((each for each in causes if each.cores > LEAST), key=lambda each: -each.cores)
    causes += _make_refusal_causes(refusals, without_work)
    report = IdleReport(
        idle.tree.name, "", "", now, parts, idle.waiting_cores, len(idle.waiting), idle.outside, causes,
        _held_by_pool(idle), len(too_large), next(iter(too_large), ""),
    )  # fmt: skip
    return msgspec.structs.replace(report, sentence=describe(report))


def _make_cause(idle: Idle, found: Found) -> IdleCause:
    remedy, cores = found.remedy, min(found.cores, idle.left + idle.outside)
    ids = sorted(found.placed, key=lambda name: -found.placed[name])
    by_pool: dict[str, float] = {}
    for name, more in found.placed.items():
        pool = idle.path_of(name)[0]
        by_pool[pool] = by_pool.get(pool, 0.0) + more
    return IdleCause(
        kind=remedy.kind, pool=remedy.pool or max(by_pool, key=lambda pool: by_pool[pool]), cores=_round(cores),
        change=_make_advice(remedy), why=remedy.why, idle_cores=_round(min(found.idle, cores)),
        operation_count=len(ids), operations=ids[:SHOWN_OPERATIONS],
        pools=sorted({idle.path_of(name)[0] for name in (*ids, *found.waits)}),
    )  # fmt: skip


def _make_guarantee_cause(idle: Idle, remedy: Remedy) -> IdleCause:
    ids = [name for name in idle.waiting if remedy.pool in idle.path_of(name)]
    return IdleCause(
        kind=remedy.kind, pool=remedy.pool, cores=_round(remedy.cores), change=_make_advice(remedy), why=remedy.why,
        idle_cores=0.0, operation_count=len(ids), operations=ids[:SHOWN_OPERATIONS], lead=remedy.lead,
    )  # fmt: skip


def _make_refusal_causes(refusals: Iterable[tuple[Remedy, int]], idle: float) -> list[IdleCause]:
    """Return causes of refused starts. No work waits because of them, so they come after the causes of waiting work."""
    causes = []
    for remedy, starts in refusals:
        cores = _round(min(remedy.cores, idle))
        if cores > LEAST:
            lead = f"{count_cores(idle)} {_stand(idle)} idle for lack of work"
            cause = IdleCause(remedy.kind, remedy.pool, cores, _make_advice(remedy), remedy.why, 0.0, starts, [], lead)
            causes.append(cause)
    return sorted(causes, key=lambda each: -each.cores)


def _make_advice(remedy: Remedy) -> Advice:
    commands = [msgspec.to_builtins(each) for each in remedy.commands]
    return Advice(remedy.text, commands, list(remedy.lines), list(remedy.operations))


def _round(cores: float) -> float:
    return math.floor(cores * 1e6 + 0.5) / 1e6


def _held_by_pool(idle: Idle) -> dict[str, float]:
    held: dict[str, float] = {}
    for found in idle.found:
        whole = sum(found.placed.values())
        for name, more in found.placed.items() if found.idle > 0.0 else ():
            for pool in idle.path_of(name):
                held[pool] = held.get(pool, 0.0) + found.idle * more / whole
    return {name: _round(cores) for name, cores in held.items()}


KINDS: Final = (
    "max_running_operation_count", "resource_limits", "max_share_ratio", "fragmentation", "memory", "user_slots", "gpu",
    "network", "spare", "graceful", "gang", "cordon", "allow_reclaimed", TAG_FILTER,
)  # fmt: skip
"""Kinds of causes that keep CPU of a tree's own nodes idle; each has a series in the metrics from the start, at 0."""


def idle_reasons(report: IdleReport) -> dict[str, float]:
    """Return idle cores by reason; they add up to all idle cores. "several": no single change makes them usable."""
    parts = report.parts
    reasons = {"no_work": parts.without_work, "starting": parts.starting, **dict.fromkeys((*KINDS, "several"), 0.0)}
    for cause in report.causes:
        if cause.kind in reasons:
            reasons[cause.kind] += cause.idle_cores
    reasons["several"] = max(parts.held_back - sum(cause.idle_cores for cause in report.causes), 0.0)
    return reasons


def describe(report: IdleReport) -> str:
    """Return the report in one sentence: what can never start, how much is idle, the main cause, its remedy."""
    told, number = _describe_idle(report), report.too_large_operations
    stuck = f"{count(number, 'operation')} {describe_cannot_start(report.too_large)}{', and more' * (number > 1)}"
    return f"{stuck}; {told}" if number else told


def _describe_idle(report: IdleReport) -> str:
    parts, waiting = report.parts, count(report.waiting_operations, "operation")
    wait = "waits" if report.waiting_operations == 1 else "wait"
    if report.causes:
        first = report.causes[0]
        idle = max(parts.held_back, first.cores)
        lead = first.lead or f"{count_cores(idle)} {_stand(idle)} idle while {waiting} {wait}"
        work = f"{count_cores(first.cores)} {'starts' if format_cores(first.cores) == '1' else 'start'} work"
        if first.kind == MOST:
            return f"{lead}: {first.why}; {first.change.text} and up to {work} once these are started again"
        return f"{lead}: {first.why}; {first.change.text} and {work}{' for it' if first.lead else ''}"
    idle = parts.held_back + parts.without_work
    if parts.held_back > LEAST:
        return f"{count_cores(idle)} {_stand(idle)} idle while {waiting} {wait}, and no single change lets them start"
    if parts.starting > LEAST:
        return f"no CPU stands idle for long: waiting jobs are about to get {count_cores(parts.starting)}"
    if idle > LEAST:
        return f"{count_cores(idle)} {_stand(idle)} idle for lack of work: no operation waits for CPU"
    if not report.waiting_operations:
        return "no CPU stands idle, and no operation waits for CPU"
    return f"no CPU stands idle while {waiting} {wait}: all of it is allocated to jobs"


def _stand(cores: float) -> str:
    return "stands" if format_cores(cores) == "1" else "stand"


def in_pool(report: IdleReport, pool: str, above: frozenset[str], below: frozenset[str]) -> IdleReport:
    """Return the part of the report about a pool: causes of its operations, and limits of the pool itself and of the
    pools ``above`` and ``below`` it."""
    held = report.held_by_pool.get(pool, 0.0)
    own = below | {pool}
    causes = [cause for cause in report.causes if cause.pool in above | own or not own.isdisjoint(cause.pools)]
    shown = msgspec.structs.replace(report, pool=pool, causes=causes, held_by_pool={pool: held})
    if causes == report.causes:
        return shown
    nothing = f"nothing blocks pool {pool}; in the whole tree {report.sentence}"
    return msgspec.structs.replace(shown, sentence=describe(shown) if causes else nothing)


def readable(report: IdleReport, may_read: Callable[[str], bool]) -> IdleReport:
    """Return the report for a user who may not read all operations: those that are hidden are counted, not named."""
    causes = []
    for cause in report.causes:
        change = cause.change
        if not all(map(may_read, change.operations)):
            change = Advice("ask those who may read these operations to change them")
        operations = [name for name in cause.operations if may_read(name)]
        causes.append(msgspec.structs.replace(cause, change=change, operations=operations))
    shown = msgspec.structs.replace(report, causes=causes)
    return msgspec.structs.replace(shown, sentence=describe(shown))
