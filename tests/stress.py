"""Runs the tests where they are likeliest to depend on time or order; by hand, before a release.

``python tests/stress.py [PART...]`` runs these parts, or all of them, prints how each ended and exits with 1 if one
failed:

busy    the lane beside eight busy loops
quota   the lane in a cgroup of its own with a quarter of this machine's CPUs (root)
orders  the lane in ten random orders
pairs   40 random pairs of test files, each pair in one process

The lane is the short one, with ``--all`` everything but tests/slow. Seeds are printed; ``--seed`` repeats a run.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from real_cgroups import CgroupTree

from cpumond.core.errors import CpumondError
from cpumond.host.cgroup.mounts import open_hierarchies

TESTS = Path(__file__).resolve().parent
LOOPS, ORDERS, PAIRS = 8, 10, 40
LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
QUOTA_SHARE = 0.25
PERIOD_US = 100_000


@contextlib.contextmanager
def busy_loops() -> Iterator[None]:
    """Eight processes that take all the CPU they get."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def lowered_quota() -> Iterator[Callable[[], None]]:
    """A function that moves its process into a cgroup with a quarter of this machine's CPUs."""
    with CgroupTree(open_hierarchies(), f"cpumond-stress-{os.getpid()}") as tree:
        tree.make("run")
        tree.write("run", "period_us", PERIOD_US)
        tree.write("run", "quota_us", round(QUOTA_SHARE * len(os.sched_getaffinity(0)) * PERIOD_US))

        def enter() -> None:
            tree.write("run", "cgroup.procs", os.getpid())

        yield enter


def run(name: str, *arguments: str, enter: Callable[[], None] | None = None) -> bool:
    """Whether pytest passed with these arguments."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, preexec_fn=enter, check=False)
    passed = done.returncode == 0
    print(f"== {name}: {'passed' if passed else f'exit code {done.returncode}'}", end=" ")
    print(f"after {time.monotonic() - began_s:.0f} s: {done.stdout.strip().rpartition(chr(10))[2]}", flush=True)
    if not passed:
        print(done.stdout, flush=True)
    return passed


def run_part(part: str, lane: list[str], chance: random.Random) -> list[bool]:
    """Whether each run of a part passed."""

    def order() -> str:
        return f"--randomly-seed={chance.randrange(2**32)}"

    if part == "busy":
        with busy_loops():
            return [run("beside busy loops", *lane, order())]
    if part == "quota":
        try:
            with lowered_quota() as enter:
                return [run("with a quarter of the CPUs", *lane, order(), enter=enter)]
        except (CpumondError, PermissionError) as error:
            print(f"== quota: not run: {error}")
            return []
    if part == "orders":
        return [run(f"order {number + 1} of {ORDERS}", *lane, order()) for number in range(ORDERS)]
    files = [path for folder in ("unit", "property", "integration") for path in (TESTS / folder).rglob("test_*.py")]
    pairs = [chance.sample(sorted(files), 2) for _ in range(PAIRS)]
    return [run(" ".join(each.name for each in pair), "-n0", *map(str, pair), order()) for pair in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="busy, quota, orders, pairs")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    known = ("busy", "quota", "orders", "pairs")
    if unknown := set(arguments.parts) - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    print(f"seed {arguments.seed}", flush=True)
    chance = random.Random(arguments.seed)
    lane = ["--all"] if arguments.all else []
    results = [passed for part in arguments.parts or known for passed in run_part(part, lane, chance)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
