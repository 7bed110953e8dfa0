"""Checks that a snapshot is valid input of an update (fair_share_update.md 1, 16, 17).

A wrong value stops the update here, with one sentence that names the value's element; otherwise it would silently make
shares wrong. Conditions for which the specification defines a result are no errors: guarantees beyond the cluster,
nested integral pools, priority pools without a donor (15)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, get_args

from cpumond.core.errors import FairShareInputError
from cpumond.core.words import did_you_mean, named, number, one_of, quoted
from cpumond.fairshare.resources import EPS, RESOURCES, Vector
from cpumond.fairshare.tree import ROOT, GuaranteeType, Mode, Operation, OptionalVector, Options, Pool, Snapshot

MAX_AMOUNT: Final = 2.0**63
"""Resources are at most 64-bit integers (17); with much higher amounts, products of an update would be infinite."""

MAX_VOLUME: Final = 1e100
"""Maximum of resource*seconds, a double (17): more than amounts times times can be, and small enough to multiply."""

MAX_TIME_S: Final = 2.0**63 / 1e6
"""Times are 64-bit integers of microseconds (17)."""

MIN_PERIOD_S: Final = 1e-6
MIN_TOTAL: Final = 0.01
"""The smallest positive amount of a resource: that of cpu (17)."""

SHOWN_OF_CYCLE: Final = 8


def validate(snapshot: Snapshot) -> None:
    """Raise FairShareInputError for the first value in ``snapshot`` that makes an update impossible.

    Names are unique in the whole tree; parents are pools that come before their children; fifo pools have only
    operations (16). Numbers are finite and not negative; only a limit may be infinite. Weights are > 0, demand covers
    usage, ``max_share_ratio`` is in [0, 1] (1, 16)."""
    check_total_resources(snapshot.total_resources)
    _check_options(snapshot.options)
    pools = {ROOT: snapshot.root}
    if snapshot.root.name != ROOT:
        raise _wrong("root", "name", f'"{ROOT}"', snapshot.root.name)
    _check_pool(snapshot.root, "root")
    for pool in snapshot.pools:
        if not pool.name or pool.name in pools:
            raise _wrong_name("pool", pool.name, snapshot)
        parent = pools.get(pool.parent)
        if parent is None:
            raise _wrong_parent(pool, snapshot)
        if parent.mode == "fifo":
            raise FairShareInputError(
                f"{named('pool', pool.name)}: its parent {quoted(pool.parent)} has mode fifo, where only operations "
                "can be; give it another parent, or the parent mode fair_share"
            )
        _check_pool(pool, named("pool", pool.name))
        pools[pool.name] = pool
    _check_operations(snapshot, pools)
    _check_light_weights(snapshot, pools)


def _check_operations(snapshot: Snapshot, pools: dict[str, Pool]) -> None:
    taken = set(pools)
    for operation in snapshot.operations:
        name = operation.name
        if name in taken or not name:
            raise _wrong_name("operation", name, snapshot)
        if operation.parent not in pools:
            raise _wrong_parent(operation, snapshot)
        taken.add(name)
        # There may be 50,000 operations: look for the wrong value only once a comparison failed. NaN fails each, too.
        u0, u1, u2, u3, u4 = operation.usage
        d0, d1, d2, d3, d4 = operation.demand
        l0, l1, l2, l3, l4 = operation.resource_limits
        if not (
            0.0 < operation.weight <= MAX_AMOUNT
            and 0.0 <= operation.max_share_ratio <= 1.0
            and -MAX_TIME_S <= operation.start_time <= MAX_TIME_S
            and 0.0 <= u0 <= d0 <= MAX_AMOUNT
            and 0.0 <= u1 <= d1 <= MAX_AMOUNT
            and 0.0 <= u2 <= d2 <= MAX_AMOUNT
            and 0.0 <= u3 <= d3 <= MAX_AMOUNT
            and 0.0 <= u4 <= d4 <= MAX_AMOUNT
            and l0 >= 0.0
            and l1 >= 0.0
            and l2 >= 0.0
            and l3 >= 0.0
            and l4 >= 0.0
        ):
            _refuse_operation(operation)


def _refuse_operation(operation: Operation) -> None:
    where = named("operation", operation.name)
    _check_weight(where, operation.weight)
    check_max_share_ratio(where, operation.max_share_ratio)
    _check_time(f"{where}: start_time", operation.start_time)
    _check_amounts(f"{where}: usage", operation.usage)
    _check_amounts(f"{where}: demand", operation.demand)
    _check_limits(where, operation.resource_limits)
    pairs = zip(RESOURCES, operation.demand, operation.usage, strict=True)
    resource, demand, usage = next(pair for pair in pairs if pair[1] < pair[2])
    raise FairShareInputError(
        f"{where}: demand: {resource} is {number(demand)}, below its usage of {number(usage)}; demand must cover usage"
    )


def _check_pool(pool: Pool, where: str) -> None:
    _check_weight(where, pool.weight)
    _check_choice(f"{where}: mode", pool.mode, get_args(Mode))
    _check_limits(where, pool.resource_limits)
    _check_amounts(f"{where}: strong_guarantee_resources", pool.strong_guarantee_resources)
    place, integral = f"{where}: integral", pool.integral_guarantees
    _check_choice(f"{place}.type", integral.guarantee_type, get_args(GuaranteeType))
    _check_amounts(f"{place}.resource_flow", integral.resource_flow)
    _check_amounts(f"{place}.burst_guarantee_resources", integral.burst_guarantee_resources)
    _check_amount(f"{place}.relaxed_share_multiplier_limit", integral.relaxed_share_multiplier_limit)
    _check_amount(f"{place}.last_share_ratio", integral.last_share_ratio)
    check_volume(f"{place}.accumulated_volume", integral.accumulated_volume)


def _check_options(options: Options) -> None:
    _check_choice("options: main_resource", options.main_resource, RESOURCES)
    periods = ("integral_pool_capacity_saturation_period_s", "integral_smooth_period_s")
    for key, value in ((key, getattr(options, key)) for key in periods):
        if not MIN_PERIOD_S <= value <= MAX_TIME_S:
            raise FairShareInputError(
                f"options: {key}: expected a finite number of seconds > 0 (at least {MIN_PERIOD_S:g}), "
                f"got {number(value)}"
            )


def _check_light_weights(snapshot: Snapshot, pools: dict[str, Pool]) -> None:
    """Check that no weight in a fair_share pool is too small: weights are divided by the least above 1e-9 (9.2, 16)."""
    elements: tuple[Pool | Operation, ...] = (*snapshot.pools, *snapshot.operations)
    light = [element for element in elements if element.weight <= EPS and pools[element.parent].mode == "fair_share"]
    if not light:
        return
    heavy = {element.parent for element in elements if element.weight > EPS}
    improved = snapshot.options.improved_fair_share_by_fit_factor
    for element in light:
        # In normal mode a light element does no harm if it has a heavier sibling; in improved mode it always does.
        if improved or element.parent not in heavy:
            kind = "pool" if isinstance(element, Pool) else "operation"
            raise _wrong(f"{named(kind, element.name)}: weight", "", f"a number > {EPS:g}", element.weight)


def check_total_resources(total: Vector) -> None:
    """Check that totals are finite, and 0 or at least the smallest positive amount (17). Raises FairShareInputError."""
    _check_amounts("total_resources", total)
    for resource, value in zip(RESOURCES, total, strict=True):
        if 0.0 < value < MIN_TOTAL:
            raise _wrong("total_resources", resource, f"0 or at least {MIN_TOTAL:g}", value)


def check_times(now: float, previous_update_time: float | None) -> None:
    """Check that times (s) are finite and fit into 64 bits as microseconds (17). Raises FairShareInputError."""
    _check_time("now", now)
    if previous_update_time is not None:
        _check_time("previous_update_time", previous_update_time)


def check_max_share_ratio(where: str, ratio: float) -> None:
    """Check a limit that is a fraction, in [0, 1] (1). ``where`` names the element. Raises FairShareInputError."""
    if not 0.0 <= ratio <= 1.0:
        raise _wrong(where, "max_share_ratio", "a number in [0, 1]", ratio)


def check_volume(where: str, volume: Vector) -> None:
    """Check resource*seconds: finite, not negative. ``where`` names element and key. Raises FairShareInputError."""
    for resource, value in zip(RESOURCES, volume, strict=True):
        if not 0.0 <= value <= MAX_VOLUME:
            raise _wrong(where, resource, f"a finite number in [0, {MAX_VOLUME:g}]", value)


def _check_amounts(where: str, amounts: OptionalVector) -> None:
    for resource, value in zip(RESOURCES, amounts, strict=True):
        if value is not None:
            _check_amount(f"{where}: {resource}", value)


def _check_amount(where: str, value: float) -> None:
    if not 0.0 <= value <= MAX_AMOUNT:
        raise _wrong(where, "", f"a finite number in [0, {MAX_AMOUNT:.3g}]", value)


def _check_limits(where: str, limits: Vector) -> None:
    for resource, value in zip(RESOURCES, limits, strict=True):
        if not value >= 0.0:
            raise _wrong(f"{where}: resource_limits", resource, "a number >= 0, infinite for no limit", value)


def _check_weight(where: str, weight: float) -> None:
    if not 0.0 < weight <= MAX_AMOUNT:
        raise _wrong(where, "weight", f"a finite number > 0 (at most {MAX_AMOUNT:.3g})", weight)


def _check_time(where: str, seconds: float) -> None:
    if not -MAX_TIME_S <= seconds <= MAX_TIME_S:
        raise _wrong(where, "", f"a finite number of seconds within +-{MAX_TIME_S:.3g}", seconds)


def _check_choice(where: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise FairShareInputError(f"{where}: expected {one_of(choices)}, got {quoted(value)}")


def order_pools(pools: Iterable[Pool]) -> tuple[Pool, ...]:
    """Return the pools with parents before children; apart from that, and among siblings, the given order is kept (1).
    A pool whose parent is not in ``pools`` keeps its place, because ``validate`` reports this error. Raises
    FairShareInputError if a pool is its own ancestor."""
    pools = tuple(pools)
    names = {pool.name for pool in pools}
    placed: dict[str, None] = {}
    ordered: list[Pool] = []
    waiting: dict[str, list[Pool]] = {}
    for pool in pools:
        if pool.parent in names and pool.parent not in placed:
            waiting.setdefault(pool.parent, []).append(pool)
            continue
        stack = [pool]
        while stack:
            top = stack.pop()
            ordered.append(top)
            placed[top.name] = None
            stack += reversed(waiting.pop(top.name, []))
    if waiting:
        first = next(pool for pool in pools if pool.name not in placed)
        raise _wrong_cycle(first, {pool.name: pool.parent for pool in pools})
    return tuple(ordered)


def _wrong_name(kind: str, name: str, snapshot: Snapshot) -> FairShareInputError:
    if not name:
        return FairShareInputError(f"some {kind} has an empty name; every pool and operation needs one of its own")
    if name == ROOT:
        return FairShareInputError(f"{named(kind, name)}: this name is the root's; give it another name")
    kinds = ["pool" for pool in snapshot.pools if pool.name == name]
    kinds += ["operation" for operation in snapshot.operations if operation.name == name]
    holders = "a pool and an operation" if len(set(kinds)) > 1 else f"two {kinds[0]}s"
    return FairShareInputError(f"{named(kind, name)}: {holders} have this name; give each element one of its own")


def _wrong_parent(element: Pool | Operation, snapshot: Snapshot) -> FairShareInputError:
    kind = "pool" if isinstance(element, Pool) else "operation"
    where, parent = named(kind, element.name), element.parent
    parents = {pool.name: pool.parent for pool in snapshot.pools}
    if parent in parents:
        # The parent is known but not yet seen: it comes later in the list, or cannot be reached from the root.
        assert isinstance(element, Pool)
        if _find_cycle(element.name, parents):
            return _wrong_cycle(element, parents)
        return FairShareInputError(
            f"{where}: its parent {quoted(parent)} comes after it; put parents before their children"
        )
    if any(operation.name == parent for operation in snapshot.operations):
        return FairShareInputError(f"{where}: its parent {quoted(parent)} is an operation; the parent must be a pool")
    hint = did_you_mean(parent, [name for name in (ROOT, *parents) if name != element.name])
    advice = hint or f'; "{ROOT}" is the parent of the first level'
    return FairShareInputError(f"{where}: its parent {quoted(parent)} does not exist{advice}")


def _wrong_cycle(pool: Pool, parents: dict[str, str]) -> FairShareInputError:
    cycle = _find_cycle(pool.name, parents)
    shown = [quoted(name) for name in cycle]
    if len(shown) > SHOWN_OF_CYCLE:
        shown[SHOWN_OF_CYCLE - 1 : -1] = ["..."]
    chain = " -> ".join(shown)
    return FairShareInputError(
        f"{named('pool', cycle[0])}: its ancestors lead back to itself ({chain}); give one of them another parent"
    )


def _find_cycle(name: str, parents: dict[str, str]) -> list[str]:
    """The cycle in which the ancestors of ``name`` end, its first name again at the end; [] if there is none."""
    path: dict[str, int] = {}
    while name in parents:
        if name in path:
            return [*list(path)[path[name] :], name]
        path[name] = len(path)
        name = parents[name]
    return []


def _wrong(where: str, key: str, expected: str, got: float | str) -> FairShareInputError:
    place = f"{where}: {key}" if key else where
    shown = quoted(got) if isinstance(got, str) else number(got)
    return FairShareInputError(f"{place}: expected {expected}, got {shown}")
