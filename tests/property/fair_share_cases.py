"""Random valid inputs (fair_share_update.md 16) of the fair-share update, in the JSON form of the data set."""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RESOURCES = ("user_slots", "cpu", "gpu", "memory", "network")
ROOT = "<root>"
NOW = 1700000000.0

MAX_POOLS = 12
MAX_OPERATIONS = 25

Case = dict[str, Any]
Amounts = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """What is frequent in a family: probabilities per element, and flags of the tree."""

    pools: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, MAX_POOLS)
    operations: tuple[int, ...] = (0, 1, 2, 3, 5, 8, 12, 16, MAX_OPERATIONS)
    deep: float = 0.25  # that a pool goes below the previous one
    root_operations: float = 0.1
    wide_weights: float = 0.3
    equal: float = 0.05  # that an operation repeats an earlier one
    limits: float = 0.15
    zero_limits: float = 0.05
    guarantees: float = 0.0
    guaranteed_part: tuple[float, float] = (0.3, 1.0)  # of the cluster, on the first level
    nested_part: tuple[float, float] = (0.3, 1.0)  # of a pool, among its children
    exact_demand: float = 0.05  # that an operation demands exactly what its pool is guaranteed
    jumps: float = 0.1  # that resources of an operation are all used or not at all
    idle: float = 0.0  # that an operation uses nothing, beyond those that do by chance
    gang: float = 0.0
    fifo: float = 0.25
    reordering: float = 0.0
    promised: float = 0.0
    priority: float = 0.0
    integral: float = 0.0
    integral_part: tuple[float, float] = (0.1, 0.6)
    free_volume: float = 0.3
    full: float = 0.3  # that a pool has accumulated all it may, or more
    crowded: float = 0.3  # that operations keep to a few of the pools
    zero_totals: float = 0.1
    zero_demand: float = 0.08
    other_main_resource: float = 0.05


FAMILIES: dict[str, Family] = {
    "basic": Family(),
    "weights": Family(wide_weights=1.0),
    "limits": Family(limits=0.7, zero_limits=0.15),
    "guarantees": Family(guarantees=0.7),
    "overcommit": Family(guarantees=0.9, guaranteed_part=(0.9, 2.5), limits=0.3),
    "bad_nested_guarantees": Family(guarantees=0.9, nested_part=(0.8, 2.0), limits=0.3, deep=0.5),
    "zero_parent_limit": Family(guarantees=0.6, limits=0.6, zero_limits=0.4, deep=0.6),
    "jumps": Family(jumps=0.8, guarantees=0.3, gang=0.3),
    "fifo": Family(fifo=0.9),
    "gang": Family(gang=0.6, guarantees=0.4, exact_demand=0.15),
    "fifo_reordering": Family(
        pools=(1, 1, 2, 3, 5),
        operations=(3, 5, 8, 12, 16),
        fifo=0.9,
        gang=0.6,
        idle=0.6,
        reordering=0.9,
        guarantees=0.9,
        root_operations=0.03,
        deep=0.1,
    ),
    "promised": Family(promised=0.4, guarantees=0.7),
    "priority_tiers": Family(priority=0.4, guarantees=0.9, guaranteed_part=(0.7, 1.6), deep=0.4),
    "integral": Family(integral=0.6, guarantees=0.4, guaranteed_part=(0.1, 0.6)),
    "overcommit_integral": Family(
        integral=0.7, integral_part=(0.5, 2.5), guarantees=0.6, guaranteed_part=(0.5, 1.5), limits=0.3
    ),
    "free_volume": Family(integral=0.8, free_volume=0.8, full=0.7),
    "main_resource": Family(other_main_resource=1.0, guarantees=0.7, integral=0.2),
    "deep": Family(deep=0.95, guarantees=0.5, limits=0.3, root_operations=0.02),
    "ties": Family(equal=0.6, exact_demand=0.4, guarantees=0.6, gang=0.2, wide_weights=0.0),
    "degenerate": Family(zero_totals=0.5, zero_demand=0.4, limits=0.4, zero_limits=0.4, guarantees=0.3, integral=0.3),
    "mixed": Family(
        limits=0.3, guarantees=0.5, gang=0.3, reordering=0.5, promised=0.1, priority=0.15, integral=0.35, deep=0.4
    ),
}


def random_case(rng: random.Random, family: str) -> Case:
    """One valid input object of a family; ``rng`` is the only source of randomness."""
    return Generator(rng, FAMILIES[family]).case(f"{family}-{rng.getrandbits(32):08x}")


class Generator:
    def __init__(self, rng: random.Random, family: Family) -> None:
        self.rng = rng
        self.family = family
        self.total = self.cluster()
        self.main = rng.choice(RESOURCES) if self.chance(family.other_main_resource) else "cpu"

    def case(self, case_id: str) -> Case:
        rng, family = self.rng, self.family
        pools = self.pools()
        self.set_guarantees(pools)
        self.set_integral(pools)
        operations = self.operations(pools)
        case: Case = {
            "id": case_id,
            "options": self.options(),
            "total_resources": self.total,
            "now": NOW,
            "previous_update_time": self.previous_update_time(),
            "pools": pools,
            "operations": operations,
        }
        root: dict[str, Any] = {}
        if self.chance(family.free_volume):
            root["integral"] = {"should_distribute_free_volume_among_children": self.chance(0.8)}
        if self.chance(family.promised / 2):
            root["compute_promised_guarantee_fair_share"] = True
        if self.chance(family.priority):
            root["priority_strong_guarantee_adjustment_donorship"] = True
        if root or rng.random() < 0.5:
            case["root"] = root
        return case

    # --- small things

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def log_uniform(self, low: float, high: float) -> float:
        return math.exp(self.rng.uniform(math.log(low), math.log(high)))

    def amount(self, resource: str, ratio: float, least: int = 0) -> float | int:
        """This fraction of the cluster, as an amount of the resource."""
        x = self.total[resource] * ratio
        return max(round(x, 2), least / 100) if resource == "cpu" else max(int(x), least)

    def some_amounts(self, probability: float, ratio: Callable[[], float]) -> Amounts:
        """Amounts of some of the resources; what is not there is absent or null."""
        result: Amounts = {}
        for r in RESOURCES:
            if self.chance(probability):
                result[r] = self.amount(r, ratio())
            elif self.chance(0.1):
                result[r] = None
        return result

    def weight(self) -> float:
        if not self.chance(self.family.wide_weights):
            return self.rng.choice([0.5, 1.0, 1.0, 1.0, 2.0, 5.0])
        if self.chance(0.2):
            return self.log_uniform(1e-3, 1e3)
        return round(self.log_uniform(0.03, 30), 4)

    # --- the cluster and the options

    def cluster(self) -> Amounts:
        """Totals; small clusters show the rounding of inferred guarantees."""
        rng = self.rng
        cpu = round(self.log_uniform(20, 200) if self.chance(0.4) else self.log_uniform(200, 2e5), 2)
        total: Amounts = {
            "cpu": cpu if self.chance(0.8) else float(round(cpu)),
            "user_slots": round(cpu * rng.uniform(2, 12)),
            "memory": int(cpu * self.log_uniform(1e9, 1e10)),
            "gpu": round(cpu * rng.uniform(0.03, 0.15)),
            "network": round(cpu * rng.uniform(1, 5)),
        }
        for r in RESOURCES:
            if self.chance(self.family.zero_totals * (0.3 if r == "cpu" else 1.0)):
                total[r] = 0
                if self.chance(0.3):
                    del total[r]
        return {r: total[r] for r in total} | dict.fromkeys((r for r in RESOURCES if r not in total), 0)

    def options(self) -> dict[str, Any]:
        family = self.family
        options: dict[str, Any] = {}
        if self.main != "cpu" or self.chance(0.5):
            options["main_resource"] = self.main
        if self.chance(0.4):
            options["improved_fair_share_by_fit_factor"] = True
            options["improved_distribution_gap"] = self.chance(0.5)
        if self.chance(0.9 if family.gang else 0.1):
            options["step_function_for_gang_operations"] = True
        if self.chance(0.9 if family.reordering else 0.05):
            options["fifo_reordering"] = True
        if self.chance(0.3):
            options["fast_fifo"] = True
        if family.integral and self.chance(0.2):
            options["integral_pool_capacity_saturation_period_s"] = self.rng.choice([600, 3600, 172800])
            options["integral_smooth_period_s"] = self.rng.choice([1, 30, 600])
        return options

    def previous_update_time(self) -> float | None:
        if self.chance(0.2 if self.family.integral else 0.9):
            return None
        return NOW - self.rng.choice([0.0, 0.1, 1.0, 60.0, 600.0, 40000.0, 1e6, -5.0, round(self.rng.uniform(0, 9), 7)])

    # --- pools

    def pools(self) -> list[dict[str, Any]]:
        """The tree of pools with what does not depend on other pools; parents come first."""
        family = self.family
        pools: list[dict[str, Any]] = []
        for i in range(self.rng.choice(family.pools)):
            if pools and self.chance(family.deep):
                parent = pools[-1]["name"]
            else:
                parent = self.rng.choice([ROOT, ROOT, *(p["name"] for p in pools)])
            pools.append({"name": f"p{i}", "parent": parent, "weight": self.weight()})
        parents = {p["parent"] for p in pools}
        for p in pools:
            if p["name"] not in parents and self.chance(family.fifo):
                p["mode"] = "fifo"
            elif self.chance(0.5):
                p["mode"] = "fair_share"
            if self.chance(family.limits):
                p["resource_limits"] = self.limits()
            if self.chance(family.limits / 3):
                p["max_share_ratio"] = round(self.rng.uniform(0, 1), 3)
            self.set_flags(p)
        return pools

    def limits(self) -> Amounts:
        def ratio() -> float:
            return 0.0 if self.chance(self.family.zero_limits) else self.rng.uniform(0.02, 1.2)

        return self.some_amounts(0.5, ratio)

    def set_flags(self, pool: dict[str, Any]) -> None:
        family = self.family
        flags = {
            "compute_promised_guarantee_fair_share": family.promised,
            "priority_strong_guarantee_adjustment": family.priority,
            "priority_strong_guarantee_adjustment_donorship": family.priority,
            "fifo_reordering": family.reordering,
        }
        for flag, probability in flags.items():
            if self.chance(probability):
                pool[flag] = True
        if self.chance(0.1):
            pool["step_function_for_gang_operations"] = self.chance(0.3)

    def set_guarantees(self, pools: list[dict[str, Any]]) -> None:
        """Strong guarantees from the first level down, each level a random part of the one above."""
        family, rng = self.family, self.rng
        granted: dict[str, float] = {ROOT: float(self.total[self.main])}
        for parent in [ROOT, *(p["name"] for p in pools)]:
            children = [p for p in pools if p["parent"] == parent and self.chance(family.guarantees)]
            if not children or not granted.get(parent):
                continue
            part = rng.uniform(*(family.guaranteed_part if parent == ROOT else family.nested_part))
            if self.chance(0.15):
                part = 1.0
            cuts = [rng.choice([1.0, 1.0, rng.uniform(0.05, 3)]) for _ in children]
            for p, cut in zip(children, cuts, strict=True):
                x = granted[parent] * part * cut / sum(cuts)
                x = math.floor(x * 100) / 100 if self.main == "cpu" else int(x)
                granted[p["name"]] = x
                guarantee: Amounts = {self.main: x}
                ratio = x / self.total[self.main]
                for r in RESOURCES:
                    if r != self.main and self.chance(0.25):
                        guarantee[r] = self.amount(r, ratio * rng.choice([0.0, 0.5, 1.0, 1.0, rng.uniform(0, 1.2)]))
                p["strong_guarantee_resources"] = guarantee

    def set_integral(self, pools: list[dict[str, Any]]) -> None:
        """Integral guarantees, of pools that have none above or below them."""
        family, rng = self.family, self.rng
        integral: set[str] = set()
        shared = rng.uniform(*family.integral_part) / max(len(pools) * family.integral, 1)
        for p in rng.sample(pools, len(pools)):
            related = {
                *ancestors(pools, p["name"]),
                *(q["name"] for q in pools if p["name"] in ancestors(pools, q["name"])),
            }
            if not integral & related and self.chance(family.integral):
                integral.add(p["name"])
                p["integral"] = self.integral(shared * rng.uniform(0.3, 2))
            elif family.integral and self.chance(0.6):
                p["integral"] = {
                    "type": "none",
                    "should_distribute_free_volume_among_children": self.chance(family.free_volume),
                    "can_accept_free_volume": self.chance(0.7),
                }

    def integral(self, ratio: float) -> dict[str, Any]:
        """Settings and state of a pool whose flow is about this fraction of the cluster."""
        rng, family = self.rng, self.family
        kind = rng.choice(["burst", "relaxed"])
        integral: dict[str, Any] = {"type": kind, "resource_flow": {"cpu": self.amount("cpu", ratio)}}
        for r in RESOURCES:
            if self.chance(0.2):
                integral["resource_flow"][r] = self.amount(r, ratio * rng.uniform(0, 1.2))
        if kind == "burst" or self.chance(0.1):
            burst = ratio * rng.choice([1.0, 1.0, rng.uniform(0.5, 3)])
            integral["burst_guarantee_resources"] = {"cpu": self.amount("cpu", burst)}
            if self.chance(0.2):
                integral["burst_guarantee_resources"]["gpu"] = self.amount("gpu", burst)
        if self.chance(0.4):
            integral["relaxed_share_multiplier_limit"] = rng.choice([1.0, 2.0, 5.0, 10.0])
        if self.chance(0.4):
            integral["can_accept_free_volume"] = self.chance(0.7)
        seconds = rng.choice([86400.0, 1e5] if self.chance(family.full) else [0.0, 10.0, 60.0, 600.0, 7200.0])
        if seconds or self.chance(0.2):
            integral["accumulated_volume"] = self.volume(ratio * seconds)
        if self.chance(0.6):
            integral["last_share_ratio"] = rng.choice([0.0, round(rng.uniform(0, 0.6), 4), rng.uniform(0, ratio)])
        return integral

    def volume(self, seconds: float) -> Amounts:
        """About the cluster's resources times these seconds; seldom none of one resource."""
        result: Amounts = {}
        for r in RESOURCES:
            x = self.total[r] * seconds * self.rng.choice([1.0, 1.0, self.rng.uniform(0.3, 1.5)])
            if not self.chance(0.03):
                result[r] = round(x, 2) if r == "cpu" else x
        return result

    # --- operations

    def operations(self, pools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rng, family = self.rng, self.family
        operations: list[dict[str, Any]] = []
        count = rng.choice(family.operations)
        # Some pools stay empty when operations keep to a few of them.
        names = [p["name"] for p in pools]
        homes = rng.sample(names, rng.randint(1, len(names))) if self.chance(family.crowded) else names
        by_name = {p["name"]: p for p in pools}
        for i in range(count):
            parent = ROOT if self.chance(family.root_operations) else rng.choice(homes)
            if operations and self.chance(family.equal):
                o = copy.deepcopy(rng.choice(operations))
                if self.chance(0.5):
                    o["parent"] = parent
            else:
                o = self.operation(parent, by_name.get(parent, {}))
            o["name"] = f"o{i}"
            if not self.chance(0.2):
                o["start_time"] = float(rng.choice([0, 5, rng.randint(0, 100000)]))
            operations.append(o)
        return operations

    def operation(self, parent: str, pool: dict[str, Any]) -> dict[str, Any]:
        family = self.family
        guarantee = pool.get("strong_guarantee_resources")
        if guarantee and self.chance(family.exact_demand):
            demand = {r: guarantee.get(r) or 0 for r in RESOURCES}
        else:
            demand = self.demand()
        o = {"parent": parent, "weight": self.weight(), "demand": demand, "usage": self.usage(demand)}
        if self.chance(family.gang):
            o["gang"] = True
        if self.chance(family.limits):
            o["resource_limits"] = self.limits()
        if self.chance(family.limits / 3):
            o["max_share_ratio"] = round(self.rng.uniform(0, 1), 3)
        return o

    def demand(self) -> Amounts:
        """From nothing over a few units to some times the cluster."""
        rng = self.rng
        if self.chance(self.family.zero_demand):
            return {}
        if self.chance(0.05):
            return {r: rng.choice([0, 1, 5]) for r in RESOURCES}
        ratio = self.log_uniform(0.5, 10) if self.chance(0.15) else self.log_uniform(0.005, 1.5)
        if self.chance(0.2):  # the same fraction of each resource
            return {r: self.amount(r, ratio, 1) for r in RESOURCES}
        demand = {r: self.amount(r, ratio * self.log_uniform(0.05, 1)) for r in RESOURCES}
        for r in RESOURCES:
            if self.chance(0.2):
                demand[r] = 0
        return demand

    def usage(self, demand: Amounts) -> Amounts:
        """Nothing, the demand, or a part of it: of all resources alike, of each its own, or all of some."""
        rng = self.rng
        if self.chance(self.family.jumps):
            return {r: x if self.chance(0.5) else 0 for r, x in demand.items()}
        kind = rng.randrange(4)
        if kind == 0 or self.chance(self.family.idle):
            return {}
        if kind == 1:
            return dict(demand)
        common = rng.random()
        parts = {r: common if kind == 2 else rng.random() for r in demand}
        return {r: math.floor(x * parts[r] * 100) / 100 if r == "cpu" else int(x * parts[r]) for r, x in demand.items()}


def ancestors(pools: list[dict[str, Any]], name: str) -> list[str]:
    parents = {p["name"]: p["parent"] for p in pools}
    result = []
    while parents[name] != ROOT:
        name = parents[name]
        result.append(name)
    return result
