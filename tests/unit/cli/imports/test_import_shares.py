"""Shares of imported configurations beside those that the rules of their own systems give."""

from __future__ import annotations

import random
import re

import pytest
from imported import (
    FairTree,
    Queue,
    fill,
    list_capacity_queues,
    list_fair_queues,
    list_kueue_queues,
    list_slurm_accounts,
    list_yunikorn_queues,
    put,
    rank_by_borrowing,
    read,
    share,
    share_by_guarantee,
    share_by_ratio,
    used,
)

CORES = 1000.0
TOTAL = {"cpu": CORES, "memory": 2.0**42}
STREAMS = range(6)


def choose(leaves: list[str], seed: int, *always: str) -> list[str]:
    """All leaves with seed 0, else about half of them."""
    chosen = random.Random(seed)
    return [leaf for leaf in leaves if seed == 0 or leaf in always or chosen.random() < 0.5]


def list_leaves(root: Queue) -> list[str]:
    return [queue.name for queue in root.list_all() if not queue.children and queue is not root]


def compare(here: dict[str, float], there: dict[str, float], cores: float) -> None:
    wanted = {name: each for name, each in there.items() if name in here}
    assert len(wanted) > 2
    assert {name: here[name] for name in wanted} == pytest.approx(wanted, abs=cores)


@pytest.mark.parametrize("seed", STREAMS)
def test_weights_and_maxima_of_yarn_mean_the_same(seed: int) -> None:
    queues = list_fair_queues(CORES)
    for queue in queues.list_all():
        queue.least = 0.0
    # A maximum leaves room for others in the same queue.
    hungry = choose(list_leaves(queues), seed, "adhoc", "vision:adhoc", "nightly", "default")
    making = read("fair-scheduler.xml", total=TOTAL, change=lambda text: re.sub(r"<minR.*?/minResources>", "", text))
    kept = queues.keep(set(hungry))
    assert kept is not None
    share_by_ratio(kept, CORES)
    compare(share(put(making, CORES), hungry, CORES), used(kept), 0.01)


@pytest.mark.parametrize("seed", STREAMS)
def test_a_minimum_of_yarn_is_a_guarantee_that_is_added(seed: int) -> None:
    """Where it is documented to differ: there the greater of minimum and weight, here the sum."""
    there, here = list_fair_queues(CORES), list_fair_queues(CORES)
    hungry = choose(list_leaves(here), seed, "adhoc", "vision:adhoc", "nightly", "default", "reports", "hourly")
    kept, kept_there = here.keep(set(hungry)), there.keep(set(hungry))
    assert kept is not None
    assert kept_there is not None
    share_by_guarantee(kept, CORES)
    share_by_ratio(kept_there, CORES)
    found = share(put(read("fair-scheduler.xml", total=TOTAL), CORES), hungry, CORES)
    compare(found, used(kept), 0.01)
    if seed == 0:
        assert used(kept_there)["production"] == pytest.approx(500, abs=0.01)
        assert found["production"] == pytest.approx(600, abs=0.01)
        assert (used(kept_there)["science"], found["science"]) == (pytest.approx(250), pytest.approx(200, abs=0.01))


@pytest.mark.parametrize("seed", STREAMS)
def test_capacities_of_yarn_mean_the_same(seed: int) -> None:
    """A core goes to the queue that has least of its capacity, up to the maximum."""
    queues = list_capacity_queues(CORES)
    hungry = choose([name for name in list_leaves(queues) if name != "labels"], seed, "hourly", "training", "default")
    kept = queues.keep(set(hungry))
    assert kept is not None
    there = fill(kept, CORES, lambda queue: queue.used / queue.weight)
    compare(share(put(read("capacity-scheduler.xml", total=TOTAL), CORES), hungry, CORES), there, 2.0)


@pytest.mark.parametrize("seed", STREAMS)
@pytest.mark.parametrize("cores", [900.0, 1500.0])
def test_fair_queues_of_yunikorn_are_filled_alike(seed: int, cores: float) -> None:
    queues = list_yunikorn_queues(cores)
    hungry = choose([name for name in list_leaves(queues) if name != "namespaces"], seed, "streaming", "nlp")
    kept = queues.keep(set(hungry))
    assert kept is not None
    there = fill(kept, cores, lambda queue: queue.used / queue.weight)
    compare(share(put(read("queues.yaml"), cores), hungry, cores), there, 2.0)


@pytest.mark.parametrize("seed", STREAMS)
def test_what_is_borrowed_in_kueue_is_shared_alike(seed: int) -> None:
    cores = 940.0
    queues = list_kueue_queues()
    leaves = [name for name in list_leaves(queues) if name not in ("best-effort", "shared.users", "isolated")]
    hungry = choose(leaves, seed, "etl")
    kept = queues.keep(set(hungry))
    assert kept is not None
    there = fill(kept, cores, rank_by_borrowing)
    compare(share(put(read("kueue.yaml"), cores), hungry, cores), there, 2.0)


def test_what_kueue_does_not_lend_is_kept_here_too() -> None:
    """lendingLimit: 100 of etl's 150 cores stay idle while it has no work."""
    hungry = ["reports", "ads", "search", "nlp", "ci"]
    queues = list_kueue_queues().keep(set(hungry))
    assert queues is not None
    queues.children[0].most -= 100
    there = fill(queues, 940.0, rank_by_borrowing)
    here = share(put(read("kueue.yaml"), 940.0), hungry, 940.0)
    assert sum(here[name] for name in hungry) == pytest.approx(sum(there[name] for name in hungry), abs=2)


def test_the_long_run_of_slurm_is_the_share_here() -> None:
    tree = FairTree(list_slurm_accounts(), half_life=20)
    runs = [tree.tick(500) for _ in range(40)][20:]
    there = {name: sum(run[name] for run in runs) / len(runs) * 2 for name in runs[0]}
    world = put(read("slurm.dump", "slurm.conf"), CORES)
    own = {"carl": "carl", "hannes": "hannes", "frances": "frances"}
    for leaf in list_leaves(list_slurm_accounts()):
        account, _, user = leaf.partition("$")
        world.start(own.get(user, account), user, jobs=1001, cpu=1.0)
    here = share(world, [], CORES)
    compare(here, {re.sub(r".*\$(?=carl|hannes|frances)", "", name): each for name, each in there.items()}, 6.0)
    assert there["climate"] == pytest.approx(50, abs=3)


def test_what_slurm_remembers_is_not_here() -> None:
    """The documented difference, usage of the past; Fairshare=parent is the same, also where a sibling has no work."""
    idle = {"climate$syukuro", "climate$vera"}
    tree = FairTree(list_slurm_accounts(), half_life=20)
    for _ in range(40):
        tree.tick(500, idle)
    assert (
        tree.tick(500)["climate"] == 500
    )  # all of it, until it has caught up; here about 10 of 105, without usage_half_life 5 of 100
    no_genome = FairTree(list_slurm_accounts(), half_life=20)
    runs = [no_genome.tick(500, {"genome$rosalind"}) for _ in range(40)][20:]
    assert sum(run["climate"] for run in runs) / len(runs) * 2 == pytest.approx(1000 * 5 / 97, abs=5)
    world = put(read("slurm.dump"), CORES)
    here = share(world, ["physics", "chemistry", "systems", "guests", "climate"], CORES)
    assert here["climate"] == pytest.approx(1000 * 5 / 97, abs=0.01)
