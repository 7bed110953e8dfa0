"""A pool tree over time: follow scripted demand, make one fair-share update per step, yield the shares of each pool.

Pure and streaming: time is a number that is counted up, and only one step is in memory at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from cpumond.core.errors import FairShareInputError
from cpumond.core.measures import format_duration
from cpumond.core.words import did_you_mean, number, quoted
from cpumond.fairshare.resources import EPS, RESOURCES, ZERO, Vector, least, of_share, scale_resources
from cpumond.fairshare.result import ElementShares, UpdateResult
from cpumond.fairshare.tree import GuaranteeType, Operation, Pool, Snapshot
from cpumond.fairshare.update import FairShareUpdater
from cpumond.fairshare.validate import MAX_AMOUNT

Action = Literal["start", "stop", "ramp"]

MIN_REPEAT_S: Final = 1.0
"""The least ``repeat_every_s``, because all events between two steps are processed, one by one."""

NOISE: Final = 1e-12
"""Differences below this fraction of the cluster count as rounding."""

MAX_S: Final = 36500 * 86400.0
"""Maximum length of a simulation, and maximum time of an event: about a hundred years."""


@dataclass(frozen=True, slots=True)
class DemandEvent:
    """A change of one operation's demand. Between such events the demand is constant.

    start: the demand is ``demand`` (absolute, >= 0) from ``at_s`` on. stop: it is zero from ``at_s`` on. ramp: from its
    value at ``at_s`` the demand moves to ``demand`` in a straight line within ``over_s`` seconds (> 0), all resources
    together. With ``repeat_every_s`` the event is repeated at this interval. Times are seconds from the beginning."""

    operation: str
    at_s: float
    action: Action
    demand: Vector = ZERO
    over_s: float = 0.0
    repeat_every_s: float | None = None

    @property
    def end_s(self) -> float:
        return self.at_s + self.over_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """A tree at time 0, and the demand of its operations after that. ``check_script`` defines which scenarios are
    valid. Before its first event an operation has the ``demand`` that it has in the tree."""

    snapshot: Snapshot
    script: tuple[DemandEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulationRow:
    """One pool at one step, after the update of that moment. The fields are the printed columns.

    Amounts are of the main resource in its own unit (cores for cpu), with guarantees scaled down if the cluster is
    overcommitted (6). ``demand`` and ``usage`` are sums over the pool's operations. ``fair_share`` is the sum of the
    three fields after it (12). ``accumulated_volume`` and ``integral_pool_capacity`` are amount*seconds (5). Without an
    integral guarantee, flow, burst, volume and capacity are 0."""

    time_s: float
    pool: str
    guarantee_type: GuaranteeType
    demand: float
    usage: float
    strong_guarantee: float
    resource_flow: float
    burst_guarantee: float
    fair_share: float
    fair_share_strong_guarantee: float
    fair_share_integral_guarantee: float
    fair_share_weight_proportional: float
    accumulated_volume: float
    integral_pool_capacity: float


def check_script(scenario: Scenario) -> None:
    """Raise FairShareInputError for the first invalid event; the error names its place in the script, counted from 1.

    Every event is for an operation of the tree, with finite numbers that are not negative. The events of one operation
    are sorted by time and do not overlap: each begins after the previous one has begun and its ramp has ended. Events
    that repeat come last and all have the same period; each round of them has ended when the next round begins."""
    events_of: dict[str, list[tuple[int, DemandEvent]]] = {each.name: [] for each in scenario.snapshot.operations}
    for place, event in enumerate(scenario.script, 1):
        where = f"script {place}"
        if event.operation not in events_of:
            hint = did_you_mean(event.operation, events_of) or "; name one of the tree's operations"
            raise FairShareInputError(f"{where}.operation: there is no operation {quoted(event.operation)}{hint}")
        _check_event(event, where)
        events_of[event.operation].append((place, event))
    for events in events_of.values():
        for (place, before), (later_place, after) in itertools.pairwise(events):
            _check_pair(before, place, after, f"script {later_place}")
        repeated = [(place, event) for place, event in events if event.repeat_every_s is not None]
        if repeated:
            (place, first), (last_place, last) = repeated[0], repeated[-1]
            _check_round(first, place, last, f"script {last_place}")


def _check_event(event: DemandEvent, where: str) -> None:
    for name, amount in zip(RESOURCES, event.demand, strict=True):
        if not 0.0 <= amount <= MAX_AMOUNT:
            raise FairShareInputError(
                f"{where}.demand.{name}: expected a number in [0, {number(MAX_AMOUNT)}], got {number(amount)}"
            )
    every_s = event.repeat_every_s if event.repeat_every_s is not None else MIN_REPEAT_S
    times = (("at", event.at_s, 0.0), ("over", event.over_s, 0.0), ("repeat_every", every_s, MIN_REPEAT_S))
    for key, seconds, least_s in times:
        if not least_s <= seconds <= MAX_S:
            raise FairShareInputError(
                f"{where}.{key}: expected a duration in [{format_duration(least_s)}, {format_duration(MAX_S)}], "
                f"got {format_duration(seconds)}"
            )
    if (event.action == "ramp") != (event.over_s > 0.0):
        raise FairShareInputError(f"{where}.over: a ramp must be longer than 0s; use start or stop for a sudden change")


def _check_pair(before: DemandEvent, place: int, after: DemandEvent, where: str) -> None:
    """Check two successive events of an operation, of which ``before`` is at ``place`` in the script."""
    if after.at_s <= before.at_s:
        raise FairShareInputError(
            f"{where}.at: {format_duration(after.at_s)} is not after the {format_duration(before.at_s)} of script "
            f"{place}; sort the events of {quoted(after.operation)} by time, each at its own time"
        )
    if after.at_s < before.end_s:
        raise FairShareInputError(
            f"{where}.at: {format_duration(after.at_s)} is within the ramp of script {place} of the same operation, "
            f"which is over at {format_duration(before.end_s)}; begin later or shorten the ramp"
        )
    if before.repeat_every_s is not None and after.repeat_every_s != before.repeat_every_s:
        raise FairShareInputError(
            f"{where}.repeat_every: must be {format_duration(before.repeat_every_s)}, as in script {place}; events "
            f"of {quoted(after.operation)} that repeat must come last and have one period"
        )


def _check_round(first: DemandEvent, place: int, last: DemandEvent, where: str) -> None:
    """Check that an operation's repeated events end before the next round. ``first`` is at ``place`` in the script."""
    assert first.repeat_every_s is not None
    again_s = first.at_s + first.repeat_every_s
    # A sudden change of demand just as the next round begins would be undone at once.
    if last.end_s > again_s or (last is not first and last.at_s >= again_s):
        raise FairShareInputError(
            f"{where}: is over at {format_duration(last.end_s)}, but script {place} of the same operation happens "
            f"again at {format_duration(again_s)}; use a longer repeat_every"
        )


def count_steps(until_s: float, step_s: float) -> int:
    """Return the number of steps of ``simulate``: at 0, ``step_s`` (> 0), ... up to ``until_s`` (>= 0), inclusive."""
    return math.floor(until_s / step_s * (1.0 + EPS)) + 1


def simulate(scenario: Scenario, until_s: float, step_s: float) -> Iterator[SimulationRow]:
    """Yield one row for each pool, in order, at 0, ``step_s``, 2 ``step_s``, ... up to ``until_s``, inclusive.

    Each step is one update with the demand of that moment. ``accumulated_volume`` and ``last_share_ratio`` of an
    integral pool are passed on to the next step. An operation uses its whole grant from the step on; real pools, whose
    jobs have to start and stop, follow more slowly. ``step_s`` (> 0) should not exceed ``integral_smooth_period_s``, in
    which a volume is used up. ``check_script`` must accept ``scenario``."""
    snapshot = scenario.snapshot
    pools = snapshot.pools
    updater = FairShareUpdater()
    rows = _RowMaker(snapshot)
    demands = _list_demands(scenario)
    granted = [operation.usage for operation in snapshot.operations]
    before_s: float | None = None
    for step in range(count_steps(until_s, step_s)):
        time_s = step * step_s
        operations = _move_operations(snapshot.operations, demands, granted, time_s)
        if operations is not snapshot.operations or pools is not snapshot.pools:
            snapshot = replace(snapshot, operations=operations, pools=pools)
        result = updater.update(snapshot, time_s, before_s)
        granted = _list_granted(snapshot, result)
        shares_of = [result.elements[pool.name] for pool in pools]
        yield from rows.make(time_s, snapshot, shares_of, granted)
        pools = _carry_state(pools, shares_of)
        before_s = time_s


class _Demand:
    """The demand of one operation. ``at`` must be called with times that do not decrease."""

    __slots__ = ("_begin_s", "_end_s", "_events", "_from", "_next", "_next_s", "_to")

    def __init__(self, at_first: Vector, events: Sequence[DemandEvent]) -> None:
        self._from = self._to = at_first
        self._begin_s = self._end_s = 0.0
        self._events = _in_turn(events)
        self._next_s: float
        self._next: DemandEvent | None
        self._next_s, self._next = next(self._events, (math.inf, None))

    def at(self, time_s: float) -> Vector:
        """Return the demand at ``time_s``; while the demand is constant, the same object is returned."""
        while self._next is not None and time_s >= self._next_s:
            # No event begins within a ramp, so the previous event has reached its final value.
            self._from, self._to = self._to, self._next.demand if self._next.action != "stop" else ZERO
            self._begin_s, self._end_s = self._next_s, self._next_s + self._next.over_s
            self._next_s, self._next = next(self._events, (math.inf, None))
        if time_s >= self._end_s:
            return self._to
        part = (time_s - self._begin_s) / (self._end_s - self._begin_s)
        a, b, c, d, e = (x + (y - x) * part for x, y in zip(self._from, self._to, strict=True))
        return (a, b, c, d, e)


def _in_turn(events: Sequence[DemandEvent]) -> Iterator[tuple[float, DemandEvent]]:
    """Yield each event with its time, sorted by time; the sequence has no end if some events repeat."""
    yield from ((event.at_s, event) for event in events if event.repeat_every_s is None)
    repeated = [(event, event.repeat_every_s) for event in events if event.repeat_every_s is not None]
    for turn in itertools.count() if repeated else ():
        yield from ((event.at_s + turn * every_s, event) for event, every_s in repeated)


def _list_demands(scenario: Scenario) -> list[_Demand | None]:
    """Return each operation's demand; None for an operation without events, whose demand is constant."""
    events_of: dict[str, list[DemandEvent]] = {}
    for event in scenario.script:
        events_of.setdefault(event.operation, []).append(event)
    return [
        _Demand(operation.demand, events_of[operation.name]) if operation.name in events_of else None
        for operation in scenario.snapshot.operations
    ]


def _move_operations(
    operations: tuple[Operation, ...], demands: list[_Demand | None], granted: list[Vector], time_s: float
) -> tuple[Operation, ...]:
    """Return the operations with their demand at ``time_s`` and the usage that was granted. An operation without a
    change is the same object as before."""
    moved: dict[int, Operation] = {}
    for position, (operation, scripted, usage) in enumerate(zip(operations, demands, granted, strict=True)):
        demand = operation.demand if scripted is None else scripted.at(time_s)
        if demand is operation.demand and usage is operation.usage:
            continue
        used = least(usage, demand)
        if demand != operation.demand or used != operation.usage:
            moved[position] = replace(operation, demand=demand, usage=used)
    if not moved:
        return operations
    return tuple(moved.get(position, operation) for position, operation in enumerate(operations))


def _list_granted(snapshot: Snapshot, result: UpdateResult) -> list[Vector]:
    """Return how much each operation may use: its fair share of the cluster, but no more than its demand."""
    total = snapshot.total_resources
    granted: list[Vector] = []
    for operation in snapshot.operations:
        x, usage = result.elements[operation.name].fair_share.total, operation.usage
        new = least(of_share(x, total), operation.demand)
        granted.append(usage if new == usage or _is_noise(new, usage, total) else new)
    return granted


def _is_noise(a: Vector, b: Vector, total: Vector) -> bool:
    """Whether two amounts differ only in their last digits, so that functions need not be made again for them."""
    return all(abs(x - y) <= NOISE * t for x, y, t in zip(a, b, total, strict=True))


def _carry_state(pools: tuple[Pool, ...], shares_of: list[ElementShares]) -> tuple[Pool, ...]:
    """Return the pools with the state for the next update; pools without a change are the same objects as before."""
    moved: dict[int, Pool] = {}
    for position, (pool, shares) in enumerate(zip(pools, shares_of, strict=True)):
        state = pool.integral_guarantees
        if state.guarantee_type == "none":
            continue
        if shares.accumulated_volume != state.accumulated_volume or shares.last_share_ratio != state.last_share_ratio:
            volume, last = shares.accumulated_volume, shares.last_share_ratio
            state = replace(state, accumulated_volume=volume, last_share_ratio=last)
            moved[position] = replace(pool, integral_guarantees=state)
    if not moved:
        return pools
    return tuple(moved.get(position, pool) for position, pool in enumerate(pools))


class _RowMaker:
    """Makes rows from the shares of the pools. Its state is constant during a simulation."""

    def __init__(self, snapshot: Snapshot) -> None:
        options = snapshot.options
        self._main = RESOURCES.index(options.main_resource)
        self._period_s = options.integral_pool_capacity_saturation_period_s
        self._capacities: dict[tuple[float, float], float] = {}
        position_of = {pool.name: position for position, pool in enumerate(snapshot.pools)}
        # The parent of the root's operations and of the first-level pools is the root, which has no row.
        self._parent_of_operation = [position_of.get(operation.parent) for operation in snapshot.operations]
        self._parent_of_pool = [position_of.get(pool.parent) for pool in snapshot.pools]

    def make(
        self, time_s: float, snapshot: Snapshot, shares_of: list[ElementShares], granted: list[Vector]
    ) -> Iterator[SimulationRow]:
        main = self._main
        amount = snapshot.total_resources[main]
        demand = self._sum_up([operation.demand[main] for operation in snapshot.operations])
        usage = self._sum_up([vector[main] for vector in granted])
        for position, (pool, shares) in enumerate(zip(snapshot.pools, shares_of, strict=True)):
            parts = shares.fair_share
            guarantee_type = pool.integral_guarantees.guarantee_type
            flow_ratio = shares.resource_flow_ratio
            yield SimulationRow(
                time_s=time_s, pool=pool.name, guarantee_type=guarantee_type, demand=demand[position],
                usage=usage[position], strong_guarantee=shares.strong_guarantee_share[main] * amount,
                resource_flow=flow_ratio * amount, burst_guarantee=shares.burst_ratio * amount,
                fair_share=parts.total[main] * amount,
                fair_share_strong_guarantee=parts.strong_guarantee[main] * amount,
                fair_share_integral_guarantee=parts.integral_guarantee[main] * amount,
                fair_share_weight_proportional=parts.weight_proportional[main] * amount,
                accumulated_volume=0.0 if guarantee_type == "none" else shares.accumulated_volume[main],
                integral_pool_capacity=self._capacity(amount, flow_ratio),
            )  # fmt: skip

    def _capacity(self, amount: float, flow_ratio: float) -> float:
        """The capacity: the volume that a flow of the main resource, a fraction of ``amount``, fills at most (5.1)."""
        key = (amount, flow_ratio)
        if key not in self._capacities:
            self._capacities[key] = scale_resources((amount,) * 5, flow_ratio)[self._main] * self._period_s
        return self._capacities[key]

    def _sum_up(self, of_operations: list[float]) -> list[float]:
        sums = [0.0] * len(self._parent_of_pool)
        for parent, value in zip(self._parent_of_operation, of_operations, strict=True):
            if parent is not None:
                sums[parent] += value
        # Parents come before their children in the list: going backwards, a sum is complete before its parent gets it.
        for position in range(len(sums) - 1, -1, -1):
            parent = self._parent_of_pool[position]
            if parent is not None:
                sums[parent] += sums[position]
        return sums
