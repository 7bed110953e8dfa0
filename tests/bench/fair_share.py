"""What a fair-share update costs, as a multiple of a calibration loop that runs beside it; CPU time.

Trees as operators have them: pools in three levels with guarantees and limits, operations of all sizes; and one FIFO
pool. For each: an update without memory (cold), one after a part of the operations changed their demand (warm), one
after nothing changed, and the same as multiples of what a compiled C++ implementation of the update needs on the tree,
in units of the same loop.

    python tests/bench/fair_share.py [--trees NAME ...] [--rounds 5] [--profile NAME]
"""

import argparse
import cProfile
import dataclasses
import gc
import itertools
import math
import pstats
import random
import statistics
import time

from cpumond.fairshare import ROOT, FairShareUpdater, Operation, Pool, Snapshot
from cpumond.fairshare.resources import CPU, UNLIMITED, Vector

TOTAL: Vector = (400000.0, 200000.0, 8000.0, float(1 << 50), 100000.0)
DRAWN = (1, 0, 3, 2, 4)
"""Resources in the order in which a tree's random numbers are drawn."""

TREES = {
    "small_100p_1000o": (100, 1000, 1),
    "medium_1000p_10000o": (1000, 10000, 2),
    "large_1000p_50000o": (1000, 50000, 3),
    "fifo_2000": (1, 2000, 4),
}
CPP_OVER_CALIBRATION = {
    "small_100p_1000o": 3.1,
    "medium_1000p_10000o": 31.7,
    "large_1000p_50000o": 134.0,
    "fifo_2000": 2.06,  # in its fast mode; 24.5 without
}
"""Best of five runs of the C++ implementation on one core, as multiples of ``calibrate()``."""

CHANGED = 0.01
"""Part of the operations whose demand changes before a warm update."""


def calibrate() -> float:
    """Seconds of a fixed loop, the best of five."""
    best = math.inf
    for _ in range(5):
        began = time.process_time()
        s = 0.0
        d: dict[int, float] = {}
        for i in range(200000):
            x = i * 0.5
            s += x if x > 100.0 else 1.0
            d[i & 1023] = s
        best = min(best, time.process_time() - began)
    return best


def log_uniform(rng: random.Random, a: float, b: float) -> float:
    return math.exp(rng.uniform(math.log(a), math.log(b)))


def make_operation(rng: random.Random, n: int, parent: str, count: int) -> Operation:
    """An operation that demands 0.06 to 150 times its part of the cluster of one resource, and less of the others."""
    dominant = log_uniform(rng, 0.02, 50.0) / count * 3.0
    parts = {r: log_uniform(rng, 0.05, 1.0) for r in DRAWN}
    most = max(parts.values())
    demand = {r: TOTAL[r] * dominant * parts[r] / most for r in DRAWN}
    demand = {r: round(amount, 2) if r == CPU else int(amount) for r, amount in demand.items()}
    used = rng.choice([0.0, 1.0, rng.random(), rng.random()])
    usage = {r: math.floor(d * used * 100) / 100 if r == CPU else int(d * used) for r, d in demand.items()}
    weight = rng.choice([1.0, 1.0, 2.0, 0.5, round(log_uniform(rng, 0.1, 10.0), 3)])
    return Operation(f"o{n}", parent, weight, as_vector(demand), as_vector(usage), start_time=float(n))


def as_vector(amounts: dict[int, float]) -> Vector:
    a, b, c, d, e = (float(amounts[r]) for r in range(5))
    return (a, b, c, d, e)


def make_tree(pools: int, operations: int, seed: int) -> Snapshot:
    """A tree of three levels below the root, or one FIFO pool."""
    rng = random.Random(seed)
    if pools == 1:
        made = [make_operation(rng, n, "p0", operations) for n in range(operations)]
        return Snapshot(TOTAL, (Pool("p0", mode="fifo"),), tuple(dataclasses.replace(one, weight=1.0) for one in made))
    first = max(3, round(pools ** (1 / 3)))
    second = max(9, round(pools ** (2 / 3)) - first)
    counts = {"a": first, "b": second, "c": pools - first - second}
    levels = [[f"{level}{n}" for n in range(count)] for level, count in counts.items()]
    children: dict[str, list[str]] = {}
    for above, level in itertools.pairwise(levels):
        for n, name in enumerate(level):
            children.setdefault(above[n % len(above)], []).append(name)
    parts = [rng.random() + 0.2 for _ in levels[0]]
    guarantee = {name: round(TOTAL[CPU] * 0.7 * p / sum(parts), 2) for name, p in zip(levels[0], parts, strict=True)}
    for name in levels[0] + levels[1]:
        for child in children[name]:
            part = guarantee[name] / len(children[name]) * rng.choice([0, 0.5, 1.0])
            guarantee[child] = math.floor(part * 100) / 100
    parent = {child: name for name, below in children.items() for child in below}
    made_pools = [make_pool(rng, name, parent.get(name, ROOT), guarantee[name]) for name in itertools.chain(*levels)]
    leaves = levels[2]
    made = [make_operation(rng, n, leaves[n % len(leaves)], operations) for n in range(operations)]
    return Snapshot(TOTAL, tuple(made_pools), tuple(made))


def make_pool(rng: random.Random, name: str, parent: str, guarantee: float) -> Pool:
    """A pool with a guarantee if that is not 0, and one time in ten with a limit."""
    weight = rng.choice([1.0, 1.0, 2.0, 5.0])
    limits = UNLIMITED
    if rng.random() < 0.1:
        cores = max(round(TOTAL[CPU] * rng.uniform(0.05, 0.5), 2), guarantee)
        limits = (math.inf, cores, math.inf, math.inf, math.inf)
    strong = (None, guarantee or None, None, None, None)
    return Pool(name, parent, weight, resource_limits=limits, strong_guarantee_resources=strong)


def change_some(snapshot: Snapshot, rng: random.Random) -> Snapshot:
    """The tree with a part of its operations demanding 7 % more."""
    operations = list(snapshot.operations)
    for n in rng.sample(range(len(operations)), max(1, round(len(operations) * CHANGED))):
        new = {r: round(d * 1.07 + 1, 2) if r == CPU else int(d * 1.07 + 1) for r, d in enumerate(operations[n].demand)}
        operations[n] = dataclasses.replace(operations[n], demand=as_vector(new))
    return dataclasses.replace(snapshot, operations=tuple(operations))


def time_update(updater: FairShareUpdater, snapshot: Snapshot) -> float:
    gc.collect(1)
    began = time.process_time()
    updater.update(snapshot, 0.0, None)
    return time.process_time() - began


def measure(name: str, rounds: int) -> None:
    snapshot = make_tree(*TREES[name])
    rng = random.Random(7)
    cold, warm, same, calibration = [], [], [], []
    updater = FairShareUpdater()
    updater.update(snapshot, 0.0, None)
    for _ in range(rounds):
        calibration.append(calibrate())
        cold.append(time_update(FairShareUpdater(), snapshot))
        snapshot = change_some(snapshot, rng)
        warm.append(time_update(updater, snapshot))
        same.append(time_update(updater, dataclasses.replace(snapshot, operations=(*snapshot.operations,))))
    unit = min(calibration)
    cells = []
    for what, times in (("cold", cold), ("1 % changed", warm), ("nothing changed", same)):
        best, median = min(times), statistics.median(times)
        ratio = best / unit / CPP_OVER_CALIBRATION[name]
        cells.append(f"{what} {best:.4f} s (median {median:.4f}) = {best / unit:.2f} calibrations = {ratio:.3g} x C++")
    print(f"{name}: {'; '.join(cells)}; calibration {unit * 1000:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", choices=TREES, default=list(TREES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", choices=TREES, help="profile a cold and a warm update of this tree instead")
    arguments = parser.parse_args()
    gc.disable()  # as the command does it: garbage is collected between updates
    if arguments.profile:
        snapshot = make_tree(*TREES[arguments.profile])
        updater = FairShareUpdater()
        for step in (snapshot, change_some(snapshot, random.Random(7))):
            profile = cProfile.Profile()
            profile.runcall(updater.update, step, 0.0, None)
            pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    for name in arguments.trees:
        measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
