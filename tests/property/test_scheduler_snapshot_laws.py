"""What the scheduler hands to a fair-share update of random trees, against a mapping of its own from what users set
(semantics.md 2.5, 2.10, 4, 9; fair_share_update.md 1)."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from examples import WHOLE
from scheduler_world import TREE, World

from cpumond.fairshare import FairShareUpdater
from cpumond.fairshare.tree import IntegralGuarantees, Operation, Options, Pool, Snapshot

RESOURCES = ("user_slots", "cpu", "gpu", "memory", "network")
TOTAL = {"user_slots": 200.0, "cpu": 100.0, "gpu": 0.0, "memory": 1000.0, "network": 0.0}
SEEDS = sorted({*range(40 if WHOLE else 12), 21, 26, 32, 47, 49, 67})
"""With each attribute some tree gets other shares or volumes than without; with a few only the later trees do."""
STEPS = (0.0, 30.0, 2000.0)
"""Seconds from one update to the next."""

Attributes = dict[str, Any]
Vector = tuple[float, ...]


@dataclass
class Plan:
    """A tree as users ask for it."""

    options: Attributes
    pools: dict[str, tuple[str, Attributes]] = field(default_factory=dict)
    operations: list[Attributes] = field(default_factory=list)


def make_plan(rng: random.Random) -> Plan:
    options: Attributes = {
        "forbid_immediate_operations_in_root": False,
        "should_distribute_free_volume_among_children": rng.random() < 0.5,
        "max_running_operation_count_per_pool": 50,
        "integral_guarantees": {
            "smooth_period": rng.choice([60_000, 1000]),
            "pool_capacity_saturation_period": rng.choice([86_400_000, 100_000]),
            "relaxed_share_multiplier_limit": rng.choice([3, 1]),
        },
    }
    if rng.random() < 0.3:
        options["infer_weight_from_guarantees_share_multiplier"] = 5
    if rng.random() < 0.2:
        options["main_resource"] = "memory"
    plan = Plan(options)
    for n in range(rng.choice([2, 4, 7])):
        composite = [name for name, (_, given) in plan.pools.items() if given.get("mode") != "fifo"]
        add_pool(rng, plan, f"p{n}", rng.choice(["<Root>", *composite]))
    for _ in range(rng.choice([3, 6, 10])):
        add_operation(rng, plan)
    return plan


def add_pool(rng: random.Random, plan: Plan, name: str, parent: str) -> None:
    main = plan.options.get("main_resource", "cpu")
    above = plan.pools[parent][1] if parent in plan.pools else None
    given: Attributes = {}
    if rng.random() < 0.5:
        given["weight"] = rng.choice([0.5, 2.0, 3.0])
    if rng.random() < 0.2:
        given["max_share_ratio"] = rng.choice([0.3, 0.6])
    if rng.random() < 0.3:
        given["resource_limits"] = {"cpu": rng.randint(5, 80), **({"user_slots": 60} if rng.random() < 0.3 else {})}
    has = {main: 80} if above is None else above.get("strong_guarantee_resources", {})
    left = has.get(main, 0) - sum(
        each.get("strong_guarantee_resources", {}).get(main, 0) for of, each in plan.pools.values() if of == parent
    )
    if left >= 4 and rng.random() < 0.6:
        given["strong_guarantee_resources"] = {main: int(left * rng.choice([0.5, 1.0]))}
        if above is None and rng.random() < 0.3:
            given["strong_guarantee_resources"]["user_slots"] = rng.choice([0, 10])
    ours = {} if above is None else above["integral_guarantees"]
    if above is None and rng.random() < 0.4:  # a frame for integral pools inside
        frame = {"resource_flow": {main: 200}, "burst_guarantee_resources": {main: 200}}
        given["integral_guarantees"] = integral(rng, main, ("none",)) | frame
    elif above is None or (ours.get("resource_flow") and ours.get("guarantee_type", "none") == "none"):
        given["integral_guarantees"] = integral(rng, main)
    else:
        given["integral_guarantees"] = integral(rng, main, ("none",))
    if rng.random() < 0.25:
        given["mode"] = "fifo"
        if rng.random() < 0.5:
            given["fifo_sort_parameters"] = rng.choice([["start_time"], ["pending_job_count", "weight"]])
    plan.pools[name] = (parent, given)


def integral(rng: random.Random, main: str, types: tuple[str, ...] = ("none", "burst", "relaxed")) -> Attributes:
    kind = rng.choice(types)
    given: Attributes = {
        key: rng.random() < 0.5
        for key in ("can_accept_free_volume", "should_distribute_free_volume_among_children")
        if rng.random() < 0.6
    }
    if kind != "none":
        given |= {"guarantee_type": kind, "resource_flow": {main: rng.randint(5, 20)}}
    if kind == "burst":
        given["burst_guarantee_resources"] = {main: rng.randint(10, 30)}
    if kind == "relaxed" and rng.random() < 0.5:
        given["relaxed_share_multiplier_limit"] = rng.choice([1, 2])
    return given


def add_operation(rng: random.Random, plan: Plan) -> None:
    main = plan.options.get("main_resource", "cpu")
    given: Attributes = {
        "pool": rng.choice(["<Root>", *plan.pools, *plan.pools]),
        "jobs": rng.choice([1, 4, 30, 90]),
        "cpu": rng.choice([1.0, 2.0, 0.5]),
        "memory": rng.choice([0, 1, 20]),
        "later_by": rng.choice([0.0, 1.0]),
    }
    if rng.random() < 0.5:
        given["weight"] = rng.choice([0.5, 2.0, 4.0])
    if rng.random() < 0.2:
        given["max_share_ratio"] = 0.5
    if rng.random() < 0.2:
        given["resource_limits"] = {"cpu": rng.randint(1, 40)}
    if rng.random() < 0.3:
        given["min_share_resources"] = {main: rng.randint(2, 20)}
    if rng.random() < 0.1:
        given["is_gang"] = True
    plan.operations.append(given)


# --- the scheduler


def play(plan: Plan) -> tuple[World, list[str]]:
    world = World(count_unplaceable_jobs_in_demand=True, **plan.options)
    world.node("n", cpu=TOTAL["cpu"], memory=int(TOTAL["memory"]), user_slots=int(TOTAL["user_slots"]))
    for name, (parent, given) in plan.pools.items():
        world.create_pool(name, parent, **given)
    ids = []
    for given in plan.operations:
        spec = {key: value for key, value in given.items() if key != "later_by"}
        world.now += given["later_by"]
        ids.append(world.start(**spec))
    return world, ids


# --- the same by hand


def vector(amounts: Attributes, missing: float = 0.0) -> Vector:
    return tuple(float(amounts.get(name, missing)) for name in RESOURCES)


def limits(given: Attributes, above: Vector) -> Vector:
    own = vector(given.get("resource_limits", {}), math.inf)
    if given.get("max_share_ratio") is None:
        return own
    part = given["max_share_ratio"]
    parts = [min(x, TOTAL[name]) * part for x, name in zip(above, RESOURCES, strict=True)]
    rounded = [
        math.floor(x * 100 + 0.5) / 100 if name == "cpu" else math.floor(x + 0.5)
        for x, name in zip(parts, RESOURCES, strict=True)
    ]
    return tuple(map(min, own, rounded))


def ratio(amounts: Attributes) -> float:
    return max((x / TOTAL[name] for name, x in amounts.items() if TOTAL[name]), default=0.0)


def weight_of(plan: Plan, name: str) -> float:
    """2.5: the own one, or by the guarantee as a part of the parent's."""
    parent, given = plan.pools[name]
    multiplier = plan.options.get("infer_weight_from_guarantees_share_multiplier")
    if given.get("weight") is not None or multiplier is None:
        return given.get("weight", 1.0)

    def guaranteed(pool: str) -> tuple[float, float]:
        below = [child for child, (of, _) in plan.pools.items() if of == pool]
        own = plan.pools[pool][1] if pool in plan.pools else {}
        ours = own.get("integral_guarantees", {})
        flow = ratio(ours.get("resource_flow", {})) if ours.get("guarantee_type", "none") != "none" else 0.0
        flow += sum(guaranteed(child)[1] for child in below)
        strong = own.get("strong_guarantee_resources", {})
        if pool not in plan.pools:
            names = {r for child in below for r in plan.pools[child][1].get("strong_guarantee_resources", {})}
            strong = {
                r: sum(plan.pools[child][1].get("strong_guarantee_resources", {}).get(r, 0) for child in below)
                for r in names
            }
        return ratio(strong), flow

    own, above = sum(guaranteed(name)), sum(guaranteed(parent))
    return own / above * multiplier if own and above else 1.0


def snapshot_of(plan: Plan, world: World, ids: list[str], state: dict[str, tuple[Vector, float]]) -> Snapshot:
    of_tree = plan.options.get("integral_guarantees", {})
    distributes = plan.options.get("should_distribute_free_volume_among_children", False)
    pools, bounds = [], {"<Root>": (math.inf,) * 5}
    for name, (parent, given) in plan.pools.items():
        bounds[name] = limits(given, bounds[parent])
        ours = given.get("integral_guarantees", {})
        volume, last = state.get(name, ((0.0,) * 5, 0.0))
        strong = given.get("strong_guarantee_resources", {})
        pools.append(Pool(
            name, "<root>" if parent == "<Root>" else parent, weight_of(plan, name), given.get("mode", "fair_share"),
            bounds[name], tuple(strong.get(r) for r in RESOURCES),
            integral_guarantees=IntegralGuarantees(
                ours.get("guarantee_type", "none"), vector(ours.get("resource_flow", {})),
                vector(ours.get("burst_guarantee_resources", {})),
                ours.get("relaxed_share_multiplier_limit", of_tree.get("relaxed_share_multiplier_limit", 3.0)),
                ours.get("can_accept_free_volume", True),
                ours.get("should_distribute_free_volume_among_children", distributes), volume, last,
            ),
        ))  # fmt: skip
    operations = []
    started = [sum(each["later_by"] for each in plan.operations[: n + 1]) for n in range(len(ids))]
    order = fifo_ranks(plan, world, ids, started)
    for n, (name, given) in enumerate(zip(ids, plan.operations, strict=True)):
        pool, parent = given["pool"], "<root>" if given["pool"] == "<Root>" else given["pool"]
        count = len(world.jobs_of(name))
        one = {"user_slots": 1.0, "cpu": given["cpu"], "memory": given["memory"]}
        own = limits(given, bounds[pool])
        weight, start = given.get("weight", 1.0), started[n]
        if n in order:
            weight, start = 1.0, float(order[n])
        elif given.get("min_share_resources"):
            pools.append(Pool(f"own {name}", parent, weight, "fair_share", own, fitted(plan, n)))
            parent = f"own {name}"
        operations.append(Operation(
            name, parent, weight, vector({r: x * given["jobs"] for r, x in one.items()}),
            vector({r: x * count for r, x in one.items()}), given.get("is_gang", False), start, own,
        ))  # fmt: skip
    options = Options(
        plan.options.get("main_resource", "cpu"), of_tree.get("pool_capacity_saturation_period", 86_400_000) / 1e3,
        of_tree.get("smooth_period", 60_000) / 1e3, step_function_for_gang_operations=True,
    )  # fmt: skip
    flags = IntegralGuarantees(should_distribute_free_volume_among_children=distributes)
    return Snapshot(
        vector(TOTAL), tuple(pools), tuple(operations), options, Pool("<root>", "", integral_guarantees=flags)
    )


def fitted(plan: Plan, n: int) -> tuple[float | None, ...]:
    """What an operation is guaranteed: its part of what its pool's guarantee leaves, in each resource the pool has."""
    pool = plan.operations[n]["pool"]
    has = TOTAL if pool == "<Root>" else plan.pools[pool][1].get("strong_guarantee_resources", {})
    children = [given for parent, given in plan.pools.values() if parent == pool]
    rivals = [each for each in plan.operations if each["pool"] == pool]
    part = 1.0
    for r in has:
        left = has[r] - sum(child.get("strong_guarantee_resources", {}).get(r, 0) for child in children)
        asked = sum(each.get("min_share_resources", {}).get(r, 0) for each in rivals)
        if asked > left:
            part = min(part, max(left, 0) / asked)
    own = plan.operations[n]["min_share_resources"]
    return tuple(own[r] * part if r in own and r in has else None for r in RESOURCES)


def fifo_ranks(plan: Plan, world: World, ids: list[str], started: list[float]) -> dict[int, int]:
    """Operation -> its place in the order of its FIFO pool (4)."""
    ranks = {}
    for name, (_, given) in plan.pools.items():
        if given.get("mode") != "fifo":
            continue
        inside = [n for n, each in enumerate(plan.operations) if each["pool"] == name]
        keys = {
            n: [
                {
                    "weight": -plan.operations[n].get("weight", 1.0),
                    "start_time": started[n],
                    "pending_job_count": plan.operations[n]["jobs"] - len(world.jobs_of(ids[n])),
                }[parameter]
                for parameter in given.get("fifo_sort_parameters", ["weight", "start_time"])
            ]
            for n in inside
        }
        ranks |= {n: rank for rank, n in enumerate(sorted(inside, key=lambda n: (keys[n], ids[n])))}
    return ranks


def run(plan: Plan) -> tuple[dict[str, Vector], dict[str, Vector]]:
    """What elements have after some updates: the scheduler's, and by hand."""
    world, ids = play(plan)
    updater, state = FairShareUpdater(), {}
    previous: float | None = None
    found: dict[str, Vector] = {}
    expected: dict[str, Vector] = {}
    for n, seconds in enumerate(STEPS):
        world.now += seconds
        result = updater.update(snapshot_of(plan, world, ids, state), world.now, previous)
        previous = world.now
        world.update()
        for name in plan.pools:
            shares = result.elements[name]
            state[name] = (shares.accumulated_volume, shares.last_share_ratio)
            pool = world.pool(name)
            volume, of_pool = shares.accumulated_volume, pool.volume
            found[f"{n} {name}"] = (*pool.fair_share, *pool.strong_guarantee_share, *pool.demand_share, *of_pool)
            expected[f"{n} {name}"] = (
                *shares.fair_share.total, *shares.strong_guarantee_share, *shares.demand_share, *volume,
            )  # fmt: skip
        for name in ids:
            found[f"{n} {name}"] = world.element(name, TREE).fair_share
            expected[f"{n} {name}"] = result.elements[name].fair_share.total
        world.beat()
    return found, expected


@pytest.mark.parametrize("seed", SEEDS)
def test_pools_and_operations_get_the_update_of_their_attributes(seed):
    found, expected = run(make_plan(random.Random(seed)))
    wrong = {key: (found[key], expected[key]) for key in found if found[key] != pytest.approx(expected[key], abs=1e-9)}
    assert not wrong
