"""How long `cpumond why` takes of a large cluster: 1000 nodes with 3000 operations, most of which wait behind limits.

Printed: seconds by the clock of reports one after the other, what they cost, and how long the fork holds up the loop.

    python tests/bench/why.py [--nodes 1000] [--operations 3000] [--pools 100] [--rounds 3] [--check]
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scheduler_world import GIB, World

from cpumond.scheduler.answers.idle_trials import look_into_idle
from cpumond.scheduler.trial.fork import ASKED_NICENESS, Child

AIM_S = 2.0


def make_cluster(nodes: int, operations: int, pools: int) -> World:
    """Pools with limits of all kinds in pools, operations and nodes of several sizes."""
    rng = random.Random(1)
    world = World(
        max_running_operation_count_per_pool=20, max_operation_count_per_pool=500,
        max_running_operation_count=100_000, max_operation_count=100_000,
    )  # fmt: skip
    for n in range(pools):
        options: dict[str, object] = {}
        if rng.random() < 0.3:
            options["max_running_operation_count"] = rng.randint(2, 8)
        if rng.random() < 0.2:
            options["resource_limits"] = {"cpu": float(rng.randint(20, 60))}
        if rng.random() < 0.2:
            options["max_share_ratio"] = 0.02
        world.create_pool(f"p{n}", f"p{rng.randrange(n)}" if n > 10 and rng.random() < 0.3 else "<Root>", **options)
    for n in range(nodes):
        world.node(f"n{n}", rng.choice([8.0, 16.0, 32.0]), rng.choice([16, 64]) * GIB)
    for _ in range(operations):
        memory = rng.choice([0, GIB, 4 * GIB])
        cpu = rng.choice([1.0, 2.0, 3.0, 6.0])
        world.start(f"p{rng.randrange(pools)}", "u", rng.randint(1, 8), cpu, memory=memory)
    world.settle_down(4)
    return world


def make_report(world: World) -> None:
    look_into_idle(world.state, world.tree(), world.now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--operations", type=int, default=3000)
    parser.add_argument("--pools", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help=f"exit code 1 when a report takes more than {AIM_S:g} s")
    given = parser.parse_args()
    world = make_cluster(given.nodes, given.operations, given.pools)
    took_s = []
    for _ in range(given.rounds):
        begun = time.perf_counter()
        child = Child(lambda _: make_report(world), ASKED_NICENESS)
        forked = time.perf_counter()
        child.read_all()
        took_s.append(time.perf_counter() - begun)
        print(f"report {took_s[-1]:.2f} s, {child.cpu_s:.2f} s of CPU time, fork {(forked - begun) * 1e3:.0f} ms")
    if given.check and min(took_s) > AIM_S:
        sys.exit(1)


if __name__ == "__main__":
    main()
