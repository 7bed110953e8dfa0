"""Laws of shares where what the steps of gangs cut off is shared out (fair_share_update.md 12.3)."""

import json
import random

import pytest
from examples import ALL
from fair_share_cases import FAMILIES, random_case

from cpumond.cli.fairshare.input import InputReader
from cpumond.fairshare import UpdateResult, fair_share_update
from cpumond.fairshare.explain import _Tree
from cpumond.fairshare.resources import Vector, sum_vectors
from cpumond.fairshare.tree import Operation, Options, Pool, Snapshot

EPS = 1e-8


def update(case: dict, shares: bool, gangs: bool = True) -> tuple[Snapshot, UpdateResult]:
    case = json.loads(json.dumps(case))
    case.setdefault("options", {}).update(step_function_for_gang_operations=gangs, share_gang_remainders=shares)
    given = InputReader().read(json.dumps(case).encode())
    return given.snapshot, fair_share_update(given.snapshot, given.now, given.previous_update_time)


def cpu(amount: float) -> Vector:
    return (0.0, amount, 0.0, 0.0, 0.0)


def is_within(a: Vector, b: Vector) -> bool:
    return all(x <= y + EPS for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(60 if ALL else 6))
def test_what_gangs_leave_is_shared_out(family, seed):
    rng = random.Random(f"remainders {family} {seed}")
    case = random_case(rng, family)
    for operation in case["operations"]:
        operation["gang"] = rng.random() < 0.4
    snapshot, result = update(case, shares=True)
    _, before = update(case, shares=False)
    tree = _Tree(snapshot, result)
    for name in tree.pools:
        own = tree.shares(name)
        total = own.fair_share.total
        inside = sum_vectors([tree.shares(child).fair_share.total for child in tree.children[name]])
        assert is_within(total, own.limits_share)
        assert is_within(inside, total)
    left_out = 0
    for name in tree.operations:
        own = tree.shares(name)
        total = own.fair_share.total
        assert is_within(total, own.demand_share)
        if tree.is_gang(name):
            assert not any(total) or is_within(own.demand_share, total)
            left_out += not any(total) and not tree.never_fits(name) and any(own.demand_share)
    same = all(result.elements[name].fair_share == before.elements[name].fair_share for name in before.elements)
    assert same or left_out


@pytest.mark.parametrize("seed", range(400 if ALL else 40))
def test_nothing_is_left_while_somebody_wants_it_and_guarantees_hold(seed):
    """One resource, pools of one or two levels, gangs and other operations; without limits."""
    rng = random.Random(f"all shared out {seed}")
    pools, left = [], 1.0
    for i in range(rng.randint(1, 4)):
        part = rng.choice([0.0, 0.0, round(rng.uniform(0.0, left), 2)])
        left -= part
        pools.append(Pool(f"p{i}", weight=rng.choice([0.5, 1.0, 3.0]), strong_guarantee_resources=cpu(part)))
        if rng.random() < 0.4:
            pools.append(Pool(f"p{i}a", f"p{i}", weight=rng.choice([0.5, 1]), mode=rng.choice(["fair_share", "fifo"])))
    operations = [
        Operation(
            f"o{i}", rng.choice(pools).name if pools[-1].mode == "fair_share" else pools[-1].name,
            demand=cpu(rng.choice([0.1, 0.3, 0.6, 0.9, 2.0])), gang=rng.random() < 0.5, start_time=float(i),
        )
        for i in range(rng.randint(1, 9))
    ]  # fmt: skip
    options = Options(step_function_for_gang_operations=True, share_gang_remainders=True)
    result = fair_share_update(Snapshot(cpu(1.0), tuple(pools), tuple(operations), options), 0.0, None)
    got = {name: shares.fair_share.total[1] for name, shares in result.elements.items()}
    wants = {each.name for each in operations if not each.gang and got[each.name] < each.demand[1] - EPS}
    assert not wants or sum(got[each.name] for each in operations) > 1.0 - EPS
    for pool in pools:
        inside = {pool.name} | {each.name for each in pools if each.parent == pool.name}
        demand = sum(each.demand[1] for each in operations if each.parent in inside and not each.gang)
        assert got[pool.name] > min(demand, pool.strong_guarantee_resources[1] or 0.0) - 1e-6
