"""An updater with memory gives what an update without gives, to the last bit, whatever changed in between."""

import json
import random

import pytest
from examples import ALL
from fair_share_cases import FAMILIES, random_case

from cpumond.cli.fairshare.input import InputReader
from cpumond.fairshare import FairShareUpdater, UpdateResult, fair_share_update


def same(a: UpdateResult, b: UpdateResult) -> bool:
    return a.errors == b.errors and list(a.elements) == list(b.elements) and dict(a.elements) == dict(b.elements)


def edit(rng: random.Random, case: dict) -> None:
    """Change something of an input object, often little, sometimes what everything depends on."""
    pools, operations = case["pools"], case["operations"]
    what = rng.choice(
        [*["demand"] * 2, "weight", "pool", "remove", "move", "total", "times", "option", "flag", "order", "nothing"]
    )
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
    elif what == "move" and operations:
        rng.choice(operations)["parent"] = rng.choice(["<root>", *(pool["name"] for pool in pools)])
    elif what == "total":
        case["total_resources"] = {r: round(x * 1.25) for r, x in case["total_resources"].items()}
    elif what == "times":
        case["previous_update_time"] = case["now"]
        case["now"] += 30.0
    elif what == "option":
        options = case.setdefault("options", {})
        name = rng.choice(["improved_fair_share_by_fit_factor", "share_gang_remainders"])
        options[name] = not options.get(name, False)
    elif what == "flag" and pools:
        pool = rng.choice(pools)
        pool["step_function_for_gang_operations"] = not pool.get("step_function_for_gang_operations", True)
    elif what == "order":
        rng.shuffle(operations)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4 if ALL else 2))
def test_an_updater_gives_what_a_fresh_update_gives(family, seed):
    """Edits of a random tree of each family, one after the other; each second result is read late alone."""
    rng = random.Random(f"{family} {seed}")
    case = random_case(rng, family)
    reader, updater = InputReader(), FairShareUpdater()
    results = []
    for number in range(12):
        given = reader.read(json.dumps(case).encode())
        now, before = given.now, given.previous_update_time
        kept, fresh = updater.update(given.snapshot, now, before), fair_share_update(given.snapshot, now, before)
        assert number % 2 or same(kept, fresh)
        results.append((kept, fresh))
        edit(rng, case)
    assert all(same(kept, fresh) for kept, fresh in results), "an earlier result stays as it was"


def test_a_tree_in_which_nothing_changed_has_the_result_it_had():
    case = random_case(random.Random(1), "basic")
    reader, updater = InputReader(), FairShareUpdater()
    results = []
    for now in (100.0, 160.0):
        given = reader.read(json.dumps(case | {"now": now}).encode())
        results.append(updater.update(given.snapshot, given.now, given.previous_update_time))
    assert results[0] is results[1]
