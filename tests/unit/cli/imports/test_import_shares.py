"""Shares of imported configurations: those that docs/coming-from.md promises, where more is wanted than there is."""

import pytest
from imported import read
from scheduler_world import TREE, World

from cpumond.cli.imports.making import Making
from cpumond.cli.scheduler.tree_text import read_tree_text, write_tree
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.settings.tree_file import ApplyTree

TOTAL = {"cpu": 1000.0, "memory": 2.0**42}


def put(making: Making, cores: float) -> World:
    """A scheduler with what the file of an import says, and one node that any job fits."""
    world = World()
    found = read_tree_text(write_tree(TREE, making.finish(TREE), "toml"), "imported.toml", "toml")
    world.do(ApplyTree(found.tree, found.tables))
    world.node("n1", cpu=cores, memory=2**42, user_slots=10**6, tags=("pool:general", "pool:gpu", "accelerator:a100"))
    return world


def share(world: World, pools: str, cores: float) -> dict[str, float]:
    """Cores that are each pool's fair share, where these pools have an operation of more than there is."""
    for pool in pools.split():
        # A user may have 24 cores of it.
        for user in "abcdefghij" if pool == "analysts" else "u":
            world.start(pool, user, jobs=int(cores) + 1, cpu=1.0)
    world.update()
    return {name: pool.fair_share[CPU] * cores for name, pool in world.tree().pools.items()}


@pytest.mark.parametrize(("name", "cores", "pools", "shares"), [
    # YARN's fair scheduler: the minimum, and a part of the rest by weight, up to the maximum.
    ("fair-scheduler.xml", 1000.0,
     ("hourly nightly backfill reports streaming training adhoc vision:training vision:adhoc recsys analysts "
      "sandbox default"),
     {"production": 600, "etl": 350, "hourly": 620 / 3, "nightly": 310 / 3, "backfill": 40, "reports": 250 / 3,
      "streaming": 500 / 3, "science": 200, "nlp": 100, "training": 75, "adhoc": 25, "vision": 50,
      "vision:training": 37.5, "vision:adhoc": 12.5, "recsys": 50, "analysts": 400 / 3, "analysts$a": 40 / 3,
      "sandbox": 0, "default": 200 / 3}),
    ("fair-scheduler.xml", 1000.0, "hourly nightly reports training adhoc vision:training vision:adhoc default",
     {"production": 680, "etl": 535, "hourly": 1070 / 3, "nightly": 535 / 3, "backfill": 0, "reports": 145,
      "science": 240, "nlp": 160, "training": 120, "adhoc": 40, "vision": 80, "analysts": 0, "default": 80}),
    # Its capacity scheduler: by capacity, up to the maximum.
    ("capacity-scheduler.xml", 1000.0, "hourly nightly reports streaming training adhoc models default students",
     {"production": 500, "etl": 300, "hourly": 210, "nightly": 90, "reports": 75, "streaming": 125,
      "science": 400, "training": 200, "adhoc": 80, "vision": 120, "models": 120, "shared": 100, "default": 40,
      "students": 60}),
    ("capacity-scheduler.xml", 1000.0, "hourly nightly training adhoc models default students",
     {"etl": 500, "hourly": 350, "nightly": 150, "reports": 0, "science": 400, "shared": 100}),
    # YuniKorn: by what is guaranteed, else by the limit.
    ("queues.yaml", 900.0, "hourly nightly reports streaming nlp vision adhoc shared simulations batch:adhoc",
     {"production": 400, "etl": 200, "hourly": 120, "nightly": 80, "reports": 50, "streaming": 150,
      "science": 300, "nlp": 164.923, "vision": 103.077, "adhoc": 32, "shared": 100, "batch": 100,
      "batch:adhoc": 40, "simulations": 60}),
    ("queues.yaml", 900.0, "hourly streaming nlp vision adhoc shared",
     {"production": 450, "etl": 1800 / 7, "streaming": 1350 / 7, "science": 337.5, "nlp": 188, "vision": 117.5,
      "adhoc": 32, "shared": 112.5, "batch": 0}),
    # Kueue: the quota, and a part of what others lend by weight, up to the borrowing limit.
    ("kueue.yaml", 940.0, "nlp vision recsys theory etl reports ads search ci",
     {"company": 900, "ci": 80, "product": 420, "ads": 102.857, "etl": 158.571, "reports": 52.857,
      "search": 105.714, "research": 400, "nlp": 190, "recsys": 75, "theory": 20, "vision": 115}),
    ("kueue.yaml", 940.0, "nlp theory etl reports ads",
     {"company": 900, "ci": 0, "product": 1340 / 3, "ads": 388 / 3, "etl": 238, "reports": 238 / 3,
      "research": 1360 / 3, "nlp": 1300 / 3, "theory": 20}),
    # 100 of etl's 150 cores are not lent while it has no work.
    ("kueue.yaml", 940.0, "reports ads search nlp ci", {"company": 800, "etl": 0}),
    # Slurm: by Fairshare; with Fairshare=parent climate and genome are beside the accounts above.
    ("slurm.dump", 1000.0, "physics chemistry systems guests climate",
     {"physics": 40_000 / 97, "chemistry": 30_000 / 97, "systems": 20_000 / 97, "guests": 2000 / 97,
      "climate": 5000 / 97}),
])  # fmt: skip
def test_shares_are_those_that_their_rules_give(name: str, cores: float, pools: str, shares: dict[str, float]) -> None:
    found = share(put(read(name, total=TOTAL if name.endswith("xml") else None), cores), pools, cores)
    assert {pool: found[pool] for pool in shares} == pytest.approx(shares, abs=0.01)


def test_users_of_slurm_share_their_account() -> None:
    world = put(read("slurm.dump", "slurm.conf"), 1000.0)
    for pool, user in (("carl", "carl"), ("astro", "vera"), ("astro", "fritz"), ("plasma", "irving"), ("climate", "v")):
        world.start(pool, user, jobs=1001, cpu=1.0)
    found = share(world, "", 1000.0)
    assert found["carl"] == pytest.approx(4 * found["astro$vera"]) == pytest.approx(4 * found["astro$fritz"])
    assert found["astro"] / found["plasma"] == pytest.approx(5 / 3)
    assert found["climate"] == pytest.approx(1000 * 5 / 45)
