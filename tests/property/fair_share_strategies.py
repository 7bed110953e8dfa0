"""Pool trees that the laws of the fair-share update are tried on.

Amounts are whole percents and eighths of small clusters, mixed with any others: so sums meet limits exactly now and
then, and a failing example is short. Every tree is one that ``validate`` accepts, and no pool with an integral
guarantee lies below another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hypothesis import strategies as st

from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot, Vector
from cpumond.fairshare.resources import CPU, UNLIMITED, ZERO
from cpumond.fairshare.tree import NO_INTEGRAL_GUARANTEES, UNSET, OptionalVector
from cpumond.fairshare.validate import validate

T = TypeVar("T")

ALIKE: Vector = (100.0, 100.0, 100.0, 100.0, 100.0)
UNLIKE: Vector = (97.0, 40.0, 8.0, 1000.0, 30.0)
BINARY: Vector = (64.0, 64.0, 64.0, 64.0, 64.0)
TWO: Vector = (0.0, 100.0, 0.0, 100.0, 0.0)
ONLY_CPU: Vector = (0.0, 100.0, 0.0, 0.0, 0.0)
TOTALS = (ALIKE, UNLIKE, BINARY, TWO, ONLY_CPU)

NOW = 1_000_000.0


@dataclass(frozen=True)
class Features:
    """What the trees may have. ``even``: operations use nothing yet and want some of every resource there is, or
    nothing at all, so that no share function jumps. ``round_numbers``: only numbers that no rounding touches, when the
    cluster is ALIKE."""

    totals: Sequence[Vector] = TOTALS
    pools: int = 5
    operations: int = 10
    gangs: bool = True
    fifo: bool = True
    limits: bool = True
    guarantees: bool = True
    integral: int = 2
    """One in so many pools has an integral guarantee, if it may; 0: none."""
    free_volume: bool = True
    flags: bool = True
    improved: bool = True
    even: bool = False
    round_numbers: bool = False


class Maker:
    """Makes trees of one kind out of what hypothesis draws; of choices, the first make a failure short."""

    def __init__(self, draw: st.DrawFn, features: Features) -> None:
        self.draw = draw
        self.features = features

    def pick(self, choices: Sequence[T]) -> T:
        return self.draw(st.sampled_from(choices))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def snapshot(self) -> Snapshot:
        features = self.features
        total = self.pick(features.totals)
        options = self.options()
        root = self.root()
        names: Iterator[str] = iter(f"p{n}" for n in range(features.pools))
        pools: list[Pool] = []
        for _ in range(self.integer(0, features.pools)):
            pools.append(self.pool(next(names), Snapshot(total, tuple(pools), (), options, root)))
        snapshot = Snapshot(total, tuple(pools), (), options, root)
        count = self.integer(0, features.operations)
        operations = tuple(self.operation(f"o{n}", snapshot) for n in range(count))
        snapshot = replace(snapshot, operations=operations)
        validate(snapshot)
        return snapshot

    def chance(self, of: int) -> bool:
        """Once in so many times."""
        return self.integer(1, of) == of

    # numbers

    def part(self, top: float = 1.0) -> float:
        """A fraction of the cluster: whole percents, eighths, or any in thousandths."""
        kinds = [(10, 10), (100, 100)] if self.features.round_numbers else [(8, 8), (10, 10), (100, 100), (1000, 1000)]
        parts, of = self.pick(kinds)
        return self.integer(0, int(parts * top)) / of

    def amount(self, r: int, total: Vector, part: float) -> float:
        """This part of a resource of the cluster, as it is counted."""
        x = total[r] * part
        return round(x, 2) if r == CPU else float(round(x))

    def amounts(self, total: Vector, top: float = 1.0, common: bool = False) -> Vector:
        """A part of each resource; one for all if ``common``."""
        one = self.part(top)
        a, b, c, d, e = (
            self.amount(r, total, one if common or r == CPU else self.part(top)) if total[r] else 0.0 for r in range(5)
        )
        return (a, b, c, d, e)

    def weight(self) -> float:
        return self.pick([1.0, 1.0, 2.0, 0.5, 3.0, 10.0, 0.3, self.integer(1, 2000) / 100])

    def limits(self, total: Vector) -> Vector:
        """Limits of some of the resources."""
        if not self.features.limits or not self.chance(3):
            return UNLIMITED
        amounts = self.amounts(total)
        a, b, c, d, e = (x if self.pick([False, True]) else UNLIMITED[r] for r, x in enumerate(amounts))
        return (a, b, c, d, e)

    # elements

    def options(self) -> Options:
        features, pick = self.features, self.pick
        both = [False, True]
        return Options(
            main_resource=pick(["cpu", "cpu", "cpu", "memory"]) if features.flags else "cpu",
            integral_pool_capacity_saturation_period_s=pick([86400.0, 600.0]),
            integral_smooth_period_s=pick([60.0, 1.0]),
            step_function_for_gang_operations=features.gangs and pick([True, True, False]),
            fifo_reordering=features.gangs and pick([True, True, False]),
            improved_fair_share_by_fit_factor=features.improved and pick(both),
            improved_distribution_gap=features.improved and pick(both),
            fast_fifo=pick(both),
        )

    def root(self) -> Pool:
        return self.with_flags(Pool(ROOT, ""))

    def with_flags(self, pool: Pool) -> Pool:
        if not self.features.flags:
            return pool
        distributes = self.features.free_volume and self.chance(2)
        return replace(
            pool,
            compute_promised_guarantee_fair_share=self.chance(6),
            priority_strong_guarantee_adjustment=self.chance(6),
            priority_strong_guarantee_adjustment_donorship=self.chance(4),
            step_function_for_gang_operations=not self.chance(4),
            fifo_reordering=not self.chance(4),
            integral_guarantees=replace(
                pool.integral_guarantees, should_distribute_free_volume_among_children=distributes
            ),
        )

    def pool(self, name: str, tree: Snapshot) -> Pool:
        """A pool somewhere in a tree, without children."""
        parents = [ROOT] + [pool.name for pool in tree.pools if pool.mode == "fair_share"]
        pool = Pool(
            name,
            self.pick(parents),
            self.weight(),
            "fifo" if self.features.fifo and self.chance(3) else "fair_share",
            self.limits(tree.total_resources),
            self.guarantee(tree.total_resources),
        )
        if not any(is_integral(above) for above in ancestors(tree, pool)):
            pool = replace(pool, integral_guarantees=self.integral(tree.total_resources))
        return self.with_flags(pool)

    def guarantee(self, total: Vector) -> OptionalVector:
        """A strong guarantee: none, of the main resource and what follows from it, or of all resources."""
        if not self.features.guarantees or self.chance(2):
            return UNSET
        amounts = self.amounts(total, self.pick([0.5, 0.5, 1.2]))
        if self.features.round_numbers:
            return amounts
        follows = self.pick([True, False])
        a, b, c, d, e = (None if r != CPU and (follows or self.chance(5)) else x for r, x in enumerate(amounts))
        return (a, b, c, d, e)

    def integral(self, total: Vector) -> IntegralGuarantees:
        if not self.features.integral or not self.chance(self.features.integral):
            return NO_INTEGRAL_GUARANTEES
        seconds = self.pick([0.0, 60.0, 6.0, 600.0, 1e6, 1e6])
        kept = self.amounts(total, common=not self.chance(4))
        a, b, c, d, e = (x * seconds for x in kept)
        return IntegralGuarantees(
            self.pick(["burst", "relaxed"]),
            self.amounts(total, 0.3, common=not self.chance(4)),
            self.amounts(total, 0.3, common=not self.chance(4)),
            self.pick([3.0, 1.0, 10.0]),
            not self.chance(4),
            False,
            (a, round(b, 2), c, d, e),
            self.pick([0.0, self.part()]),
        )

    def operation(self, name: str, tree: Snapshot) -> Operation:
        """An operation somewhere in a tree."""
        total = tree.total_resources
        demand = self.demand(total)
        return Operation(
            name,
            self.place(tree),
            self.weight(),
            demand,
            self.usage(demand),
            self.features.gangs and self.chance(2),
            float(self.integer(0, 5)),
            self.limits(total),
            self.part() if self.features.limits and self.chance(5) else 1.0,
        )

    def place(self, tree: Snapshot) -> str:
        """Where an operation may be; more of them in FIFO pools, where their order matters."""
        names = [pool.name for pool in tree.pools for _ in range(3 if pool.mode == "fifo" else 1)]
        return self.pick([*names, ROOT])

    def demand(self, total: Vector) -> Vector:
        if self.chance(8):
            return ZERO
        demand = self.amounts(total, self.pick([0.6, 0.2, 1.5]), common=self.chance(4))
        if not self.features.even:
            return demand
        a, b, c, d, e = (max(x, 1.0) if total[r] else 0.0 for r, x in enumerate(demand))
        return (a, b, c, d, e)

    def usage(self, demand: Vector) -> Vector:
        """Nothing, all, a half, or of each resource its own part."""
        kind = "nothing" if self.features.even else self.pick(["nothing", "nothing", "all", "half", "parts"])
        if kind == "nothing":
            return ZERO
        if kind == "all":
            return demand
        parts = [0.5 if kind == "half" else self.pick([0.0, 0.5, 1.0]) for _ in demand]
        a, b, c, d, e = (
            min(self.amount(r, demand, part), x) for r, (x, part) in enumerate(zip(demand, parts, strict=True))
        )
        return (a, b, c, d, e)


def is_integral(pool: Pool) -> bool:
    return pool.integral_guarantees.guarantee_type != "none"


def ancestors(tree: Snapshot, pool: Pool) -> Iterator[Pool]:
    """The pools above a pool, without the root."""
    by_name = {above.name: above for above in tree.pools}
    while pool.parent != ROOT:
        pool = by_name[pool.parent]
        yield pool


@st.composite
def snapshots(draw: st.DrawFn, features: Features) -> Snapshot:
    """Trees of the given kind."""
    return Maker(draw, features).snapshot()


ELAPSED = st.sampled_from([None, 1.0, 60.0, 0.0, 3600.0])
"""Seconds since the update before, None for the first one."""


def previous(elapsed: float | None) -> float | None:
    """The time of the update before one at NOW."""
    return None if elapsed is None else NOW - elapsed
