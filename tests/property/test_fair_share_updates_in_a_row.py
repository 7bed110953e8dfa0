"""An updater with memory gives what an update without gives, to the last bit, whatever changed in between."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from examples import ALL
from fair_share_cases import FAMILIES, random_case

from cpumond.cli.fairshare.input import InputReader
from cpumond.fairshare import FairShareUpdater, Operation, Options, Pool, Snapshot, UpdateResult, fair_share_update

TOTAL = (1000.0, 500.0, 64.0, 1e12, 10000.0)


def same(a: UpdateResult, b: UpdateResult) -> bool:
    return a.errors == b.errors and list(a.elements) == list(b.elements) and dict(a.elements) == dict(b.elements)


def edit(rng: random.Random, case: dict) -> None:
    """Change something of an input object, often little, sometimes what everything depends on."""
    pools, operations = case["pools"], case["operations"]
    what = rng.choice(["demand", "demand", "weight", "pool", "remove", "total", "times", "option", "order", "nothing"])
    if what == "demand" and operations:
        operation = rng.choice(operations)
        factor = rng.choice([0.5, 1.5, 2.0])
        operation["demand"] = {r: round(x * factor) for r, x in operation["demand"].items()}
        operation["usage"] = {}
    elif what == "weight" and operations:
        rng.choice(operations)["weight"] = rng.choice([0.5, 1.0, 3.0])
    elif what == "pool" and pools:
        rng.choice(pools)["weight"] = rng.choice([0.25, 1.0, 4.0])
    elif what == "remove" and operations:
        operations.remove(rng.choice(operations))
    elif what == "total":
        case["total_resources"] = {r: round(x * 1.25) for r, x in case["total_resources"].items()}
    elif what == "times":
        case["previous_update_time"] = case["now"]
        case["now"] += 30.0
    elif what == "option":
        options = case.setdefault("options", {})
        name = "improved_fair_share_by_fit_factor"
        options[name] = not options.get(name, False)
    elif what == "order":
        rng.shuffle(operations)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4 if ALL else 2))
def test_an_updater_gives_what_a_fresh_update_gives(family, seed):
    """Edits of a random tree of each family, one after the other."""
    rng = random.Random(f"{family} {seed}")
    case = random_case(rng, family)
    reader, updater = InputReader(), FairShareUpdater()
    for _ in range(12):
        given = reader.read(json.dumps(case).encode())
        now, before = given.now, given.previous_update_time
        kept = updater.update(given.snapshot, now, before)
        assert same(kept, fair_share_update(given.snapshot, now, before))
        edit(rng, case)


def make_large(rng: random.Random, fifo: bool) -> Snapshot:
    """Thirty pools in three levels, three hundred operations, gangs among them."""
    pools = [
        Pool(f"a{n}", weight=rng.choice([1.0, 2.0]), strong_guarantee_resources=(None, 20.0 * n, None, None, None))
        for n in range(3)
    ]
    pools += [Pool(f"b{n}", f"a{n % 3}", rng.choice([1.0, 5.0])) for n in range(9)]
    pools += [Pool(f"c{n}", f"b{n % 9}", mode="fifo" if fifo and n % 4 == 0 else "fair_share") for n in range(18)]
    operations = tuple(make_operation(rng, n) for n in range(300))
    options = Options(
        step_function_for_gang_operations=rng.random() < 0.5, improved_fair_share_by_fit_factor=rng.random() < 0.5
    )
    return Snapshot(TOTAL, tuple(pools), operations, options)


def make_operation(rng: random.Random, n: int) -> Operation:
    size = rng.uniform(0.0005, 0.05)
    a, b, c, d, e = (round(t * size * rng.uniform(0.05, 1.0), 2) for t in TOTAL)
    part = rng.choice([0.0, 1.0, rng.random()])
    usage = (a * part, b * part, c * part, d * part, e * part)
    gang = rng.random() < 0.1
    weight = rng.choice([0.1, 1.0, 1.0, 7.3])
    return Operation(f"o{n}", f"c{n % 18}", weight, (a, b, c, d, e), usage, gang, start_time=float(n))


@pytest.mark.parametrize("seed", range(6 if ALL else 2))
def test_a_large_tree_of_which_a_little_changes(seed):
    """One operation in a hundred changes, moves, comes or goes; now and then a pool's weight."""
    rng = random.Random(seed)
    snapshot = make_large(rng, fifo=seed % 2 == 0)
    updater = FairShareUpdater()
    first, names = updater.update(snapshot, 0.0, None), 300
    kept = dict(first.elements)
    for _ in range(15):
        operations = list(snapshot.operations)
        for n in rng.sample(range(len(operations)), 3):
            changed = make_operation(rng, n)
            operations[n] = dataclasses.replace(changed, name=operations[n].name)
        if rng.random() < 0.3:
            operations[0] = dataclasses.replace(make_operation(rng, 0), name=f"o{names}")
            names += 1
        if rng.random() < 0.3:
            operations.pop()
        pools = list(snapshot.pools)
        if rng.random() < 0.3:
            n = rng.randrange(len(pools))
            pools[n] = dataclasses.replace(pools[n], weight=rng.choice([0.5, 1.0, 3.0]))
        snapshot = dataclasses.replace(snapshot, pools=tuple(pools), operations=tuple(operations))
        assert same(updater.update(snapshot, 0.0, None), fair_share_update(snapshot, 0.0, None))
        again = updater.update(snapshot, 0.0, None)
        assert same(again, fair_share_update(snapshot, 0.0, None)), "an update of an unchanged tree"
    assert dict(first.elements) == kept, "an earlier result stays as it was"
