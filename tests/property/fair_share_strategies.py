"""Pool trees that the laws of the fair-share update are tried on, and edits that lead from one tree to the next.

Amounts are whole percents and eighths of small clusters, mixed with any others: so sums meet limits exactly now and
then, and a failing example is short. Every tree is one that ``validate`` accepts, and no pool with an integral
guarantee lies below another unless that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from hypothesis import strategies as st

from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot, Vector
from cpumond.fairshare.resources import CPU, UNLIMITED, ZERO
from cpumond.fairshare.tree import NO_INTEGRAL_GUARANTEES, UNSET, OptionalVector
from cpumond.fairshare.validate import order_pools, validate

T = TypeVar("T")

ALIKE: Vector = (100.0, 100.0, 100.0, 100.0, 100.0)
UNLIKE: Vector = (97.0, 40.0, 8.0, 1000.0, 30.0)
BINARY: Vector = (64.0, 64.0, 64.0, 64.0, 64.0)
TWO: Vector = (0.0, 100.0, 0.0, 100.0, 0.0)
ONLY_CPU: Vector = (0.0, 100.0, 0.0, 0.0, 0.0)
TOTALS = (ALIKE, UNLIKE, BINARY, TWO, ONLY_CPU)

NOW = 1_000_000.0


class Source(Protocol):
    """Where choices come from."""

    def pick(self, choices: Sequence[T]) -> T: ...

    def integer(self, low: int, high: int) -> int: ...


class Drawn:
    """Choices by hypothesis, which makes them smaller and takes the first ones when it shows a failure."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def pick(self, choices: Sequence[T]) -> T:
        return self.draw(st.sampled_from(choices))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))


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
    nested_integral: bool = False
    free_volume: bool = True
    flags: bool = True
    improved: bool = True
    even: bool = False
    round_numbers: bool = False


PLAIN = Features(gangs=False, integral=0, flags=False, improved=False)


# ---- one tree


class Maker:
    """Makes trees and edits of one kind out of choices."""

    def __init__(self, source: Source, features: Features) -> None:
        self.source = source
        self.features = features

    def snapshot(self, full: bool = False) -> Snapshot:
        """A tree; with as many elements as there may be if ``full``."""
        features = self.features
        total = self.source.pick(features.totals)
        options = self.options()
        root = self.root()
        names: Iterator[str] = iter(f"p{n}" for n in range(features.pools))
        pools: list[Pool] = []
        for _ in range(features.pools if full else self.source.integer(0, features.pools)):
            pools.append(self.pool(next(names), Snapshot(total, tuple(pools), (), options, root)))
        snapshot = Snapshot(total, tuple(pools), (), options, root)
        count = features.operations if full else self.source.integer(0, features.operations)
        operations = tuple(self.operation(f"o{n}", snapshot) for n in range(count))
        snapshot = replace(snapshot, operations=operations)
        validate(snapshot)
        return snapshot

    def chance(self, of: int) -> bool:
        """Once in so many times."""
        return self.source.integer(1, of) == of

    # numbers

    def part(self, top: float = 1.0) -> float:
        """A fraction of the cluster: whole percents, eighths, or any in thousandths."""
        kinds = [(10, 10), (100, 100)] if self.features.round_numbers else [(8, 8), (10, 10), (100, 100), (1000, 1000)]
        parts, of = self.source.pick(kinds)
        return self.source.integer(0, int(parts * top)) / of

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
        return self.source.pick([1.0, 1.0, 2.0, 0.5, 3.0, 10.0, 0.3, self.source.integer(1, 2000) / 100])

    def limits(self, total: Vector) -> Vector:
        """Limits of some of the resources."""
        if not self.features.limits or not self.chance(3):
            return UNLIMITED
        amounts = self.amounts(total)
        a, b, c, d, e = (x if self.source.pick([False, True]) else UNLIMITED[r] for r, x in enumerate(amounts))
        return (a, b, c, d, e)

    # elements

    def options(self) -> Options:
        features, pick = self.features, self.source.pick
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
            self.source.pick(parents),
            self.weight(),
            "fifo" if self.features.fifo and self.chance(3) else "fair_share",
            self.limits(tree.total_resources),
            self.guarantee(tree.total_resources),
        )
        if self.features.nested_integral or not any(is_integral(above) for above in ancestors(tree, pool)):
            pool = replace(pool, integral_guarantees=self.integral(tree.total_resources))
        return self.with_flags(pool)

    def guarantee(self, total: Vector) -> OptionalVector:
        """A strong guarantee: none, of the main resource and what follows from it, or of all resources."""
        if not self.features.guarantees or self.chance(2):
            return UNSET
        amounts = self.amounts(total, self.source.pick([0.5, 0.5, 1.2]))
        if self.features.round_numbers:
            return amounts
        follows = self.source.pick([True, False])
        a, b, c, d, e = (None if r != CPU and (follows or self.chance(5)) else x for r, x in enumerate(amounts))
        return (a, b, c, d, e)

    def integral(self, total: Vector) -> IntegralGuarantees:
        if not self.features.integral or not self.chance(self.features.integral):
            return NO_INTEGRAL_GUARANTEES
        seconds = self.source.pick([0.0, 60.0, 6.0, 600.0, 1e6, 1e6])
        kept = self.amounts(total, common=not self.chance(4))
        a, b, c, d, e = (x * seconds for x in kept)
        return IntegralGuarantees(
            self.source.pick(["burst", "relaxed"]),
            self.amounts(total, 0.3, common=not self.chance(4)),
            self.amounts(total, 0.3, common=not self.chance(4)),
            self.source.pick([3.0, 1.0, 10.0]),
            not self.chance(4),
            False,
            (a, round(b, 2), c, d, e),
            self.source.pick([0.0, self.part()]),
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
            float(self.source.integer(0, 5)),
            self.limits(total),
            self.part() if self.features.limits and self.chance(5) else 1.0,
        )

    def place(self, tree: Snapshot) -> str:
        """Where an operation may be; more of them in FIFO pools, where their order matters."""
        names = [pool.name for pool in tree.pools for _ in range(3 if pool.mode == "fifo" else 1)]
        return self.source.pick([*names, ROOT])

    def demand(self, total: Vector) -> Vector:
        if self.chance(8):
            return ZERO
        demand = self.amounts(total, self.source.pick([0.6, 0.2, 1.5]), common=self.chance(4))
        if not self.features.even:
            return demand
        a, b, c, d, e = (max(x, 1.0) if total[r] else 0.0 for r, x in enumerate(demand))
        return (a, b, c, d, e)

    def usage(self, demand: Vector) -> Vector:
        """Nothing, all, a half, or of each resource its own part."""
        kind = "nothing" if self.features.even else self.source.pick(["nothing", "nothing", "all", "half", "parts"])
        if kind == "nothing":
            return ZERO
        if kind == "all":
            return demand
        parts = [0.5 if kind == "half" else self.source.pick([0.0, 0.5, 1.0]) for _ in demand]
        a, b, c, d, e = (
            min(self.amount(r, demand, part), x) for r, (x, part) in enumerate(zip(demand, parts, strict=True))
        )
        return (a, b, c, d, e)

    # ---- edits

    def edited(self, tree: Snapshot) -> Snapshot:
        """The tree after one change, of the kinds that occur while a cluster runs."""
        edits: list[Callable[[Snapshot], Snapshot]] = [
            self.same,
            self.change_operation,
            self.change_operation,
            self.change_operation,
            self.change_pool,
            self.change_pool,
            self.add_operation,
            self.remove_operation,
            self.move_operation,
            self.add_pool,
            self.remove_pool,
            self.move_pool,
            self.reverse_children,
            self.change_root,
            self.change_options,
            self.change_totals,
        ]
        tree = self.source.pick(edits)(tree)
        if not self.features.nested_integral:
            tree = without_nested_integral(tree)
        validate(tree)
        return tree

    def same(self, tree: Snapshot) -> Snapshot:
        """Equal elements that are other objects."""
        pools = tuple(replace(pool, integral_guarantees=replace(pool.integral_guarantees)) for pool in tree.pools)
        return replace(tree, pools=pools, operations=tuple(replace(operation) for operation in tree.operations))

    def change_operation(self, tree: Snapshot) -> Snapshot:
        if not tree.operations:
            return tree
        n = self.source.integer(0, len(tree.operations) - 1)
        old, new = tree.operations[n], self.operation(tree.operations[n].name, tree)
        changes = {
            "weight": {"weight": new.weight},
            "demand": {"demand": new.demand, "usage": new.usage},
            "usage": {"usage": self.usage(old.demand)},
            "gang": {"gang": self.features.gangs and not old.gang},
            "start_time": {"start_time": new.start_time},
            "limits": {"resource_limits": new.resource_limits, "max_share_ratio": new.max_share_ratio},
        }
        changed = replace(old, **changes[self.source.pick(sorted(changes))])
        return replace(tree, operations=(*tree.operations[:n], changed, *tree.operations[n + 1 :]))

    def change_pool(self, tree: Snapshot) -> Snapshot:
        if not tree.pools:
            return tree
        n = self.source.integer(0, len(tree.pools) - 1)
        old = tree.pools[n]
        flagged = self.with_flags(old)
        total = tree.total_resources
        has_pools = any(pool.parent == old.name for pool in tree.pools)
        changes = {
            "weight": {"weight": self.weight()},
            "limits": {"resource_limits": self.limits(total)},
            "guarantee": {"strong_guarantee_resources": self.guarantee(total)},
            "integral": {"integral_guarantees": self.integral(total)},
            "mode": {"mode": "fair_share" if has_pools or old.mode == "fifo" or not self.features.fifo else "fifo"},
            "gangs": {"step_function_for_gang_operations": flagged.step_function_for_gang_operations},
            "reordering": {"fifo_reordering": flagged.fifo_reordering},
            "promised": {"compute_promised_guarantee_fair_share": flagged.compute_promised_guarantee_fair_share},
            "priority": {
                "priority_strong_guarantee_adjustment": flagged.priority_strong_guarantee_adjustment,
                "priority_strong_guarantee_adjustment_donorship": (
                    flagged.priority_strong_guarantee_adjustment_donorship
                ),
            },
        }
        changed = replace(old, **changes[self.source.pick(sorted(changes))])
        return replace(tree, pools=(*tree.pools[:n], changed, *tree.pools[n + 1 :]))

    def add_operation(self, tree: Snapshot) -> Snapshot:
        added = self.operation(free_name(tree), tree)
        n = self.source.integer(0, len(tree.operations))
        return replace(tree, operations=(*tree.operations[:n], added, *tree.operations[n:]))

    def remove_operation(self, tree: Snapshot) -> Snapshot:
        if not tree.operations:
            return tree
        n = self.source.integer(0, len(tree.operations) - 1)
        return replace(tree, operations=tree.operations[:n] + tree.operations[n + 1 :])

    def move_operation(self, tree: Snapshot) -> Snapshot:
        if not tree.operations:
            return tree
        n = self.source.integer(0, len(tree.operations) - 1)
        moved = replace(tree.operations[n], parent=self.place(tree))
        return replace(tree, operations=(*tree.operations[:n], moved, *tree.operations[n + 1 :]))

    def add_pool(self, tree: Snapshot) -> Snapshot:
        return replace(tree, pools=(*tree.pools, self.pool(free_name(tree), tree)))

    def remove_pool(self, tree: Snapshot) -> Snapshot:
        """A pool goes with all below it."""
        if not tree.pools:
            return tree
        gone = subtree(tree, self.source.pick(tree.pools).name)
        return replace(
            tree,
            pools=tuple(pool for pool in tree.pools if pool.name not in gone),
            operations=tuple(operation for operation in tree.operations if operation.parent not in gone),
        )

    def move_pool(self, tree: Snapshot) -> Snapshot:
        """A pool goes elsewhere with all below it."""
        if not tree.pools:
            return tree
        moved = self.source.pick(tree.pools)
        below = subtree(tree, moved.name)
        parents = [pool.name for pool in tree.pools if pool.mode == "fair_share" and pool.name not in below]
        parent = self.source.pick([ROOT, *parents])
        pools = (replace(pool, parent=parent) if pool is moved else pool for pool in tree.pools)
        return replace(tree, pools=order_pools(pools))

    def reverse_children(self, tree: Snapshot) -> Snapshot:
        return replace(tree, pools=order_pools(tree.pools[::-1]), operations=tree.operations[::-1])

    def change_root(self, tree: Snapshot) -> Snapshot:
        return replace(tree, root=self.root())

    def change_options(self, tree: Snapshot) -> Snapshot:
        return replace(tree, options=self.options())

    def change_totals(self, tree: Snapshot) -> Snapshot:
        return replace(tree, total_resources=self.source.pick(self.features.totals))


def is_integral(pool: Pool) -> bool:
    return pool.integral_guarantees.guarantee_type != "none"


def ancestors(tree: Snapshot, pool: Pool) -> Iterator[Pool]:
    """The pools above a pool, without the root."""
    by_name = {above.name: above for above in tree.pools}
    while pool.parent != ROOT:
        pool = by_name[pool.parent]
        yield pool


def subtree(tree: Snapshot, name: str) -> set[str]:
    """The names of a pool and of all pools below it."""
    names = {name}
    for pool in tree.pools:
        if pool.parent in names:
            names.add(pool.name)
    return names


def free_name(tree: Snapshot) -> str:
    """The first name that no element has; it may be that of one removed earlier."""
    taken = {element.name for element in (*tree.pools, *tree.operations)}
    return next(name for n in range(len(taken) + 1) if (name := f"n{n}") not in taken)


def without_nested_integral(tree: Snapshot) -> Snapshot:
    pools = tuple(
        replace(pool, integral_guarantees=NO_INTEGRAL_GUARANTEES)
        if is_integral(pool) and any(is_integral(above) for above in ancestors(tree, pool))
        else pool
        for pool in tree.pools
    )
    return replace(tree, pools=pools)


@st.composite
def snapshots(draw: st.DrawFn, features: Features) -> Snapshot:
    """Trees of the given kind."""
    return Maker(Drawn(draw), features).snapshot()


ELAPSED = st.sampled_from([None, 1.0, 60.0, 0.0, 3600.0])
"""Seconds since the update before, None for the first one."""


def previous(elapsed: float | None) -> float | None:
    """The time of the update before one at NOW."""
    return None if elapsed is None else NOW - elapsed
