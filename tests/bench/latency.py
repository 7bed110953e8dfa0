"""From demand to the quota that meets it, under rule ``peak``: real processes, real cgroups, a real agent.

    python tests/bench/latency.py [--rounds 60] [--polls 200 100] [--spikes 20] [--check]

A program that did next to nothing begins to burn a core at a random moment; its limit is 0.1 cores, its order 2. Waited
for is the write of its quota, as inotify tells it; in it are the time that quota and burst last, and the rest of the
period, at whose end the kernel counts it as throttled. Then spikes of 100 ms of CPU on one core at a limit of 0.5 cores
and a burst of the same size: how long they take, how many periods were throttled. Needs root and a C compiler.
``--check``: exit code 1 when a figure is above its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from asyncinotify import Inotify, Mask

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from agent_process import AgentProcess
from waiting import wait_until

from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.testing import CgroupTree

BOUNDS_S = {200: (0.22, 0.35), 100: (0.13, 0.35)}
"""Of looks each so many milliseconds: the median and the 99th percentile."""
ORDER_US = 200_000
LOW_CORES = 0.1
JOBS = 10


class Program:
    """A process in a cgroup that burns what it is told to, at once."""

    def __init__(self, program: str, tree: CgroupTree, name: str) -> None:
        files = [os.path.join(root, tree.top, name, "cgroup.procs") for root in tree.roots]
        self._process = subprocess.Popen([program, *files], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def begin(self, cpu_s: float) -> None:
        """Burn so many CPU seconds from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cpu_s}\n")
        self._process.stdin.flush()

    def wait(self) -> tuple[float, float]:
        """When it began and ended, on the monotonic clock."""
        assert self._process.stdout is not None
        begin_s, end_s = self._process.stdout.readline().split()
        return float(begin_s), float(end_s)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def managed(poll_ms: int, floor_cores: float, jobs: int = 1) -> Iterator[tuple[CgroupTree, dict[str, Program]]]:
    """An agent with jobs that ordered 2 cores each and are down at ``floor_cores``, and their programs."""
    with (
        CgroupTree(open_hierarchies(), f"cpumond-bench-{os.getpid()}") as tree,
        tempfile.TemporaryDirectory() as directory,
        contextlib.ExitStack() as stack,
    ):
        built = os.path.join(directory, "burst")
        subprocess.run(["cc", "-O2", "-o", built, str(Path(__file__).with_name("burst.c"))], check=True)
        tree.write("", "shares", 262_144)  # others on this machine get what is left
        programs = {}
        for number in range(jobs):
            name = f"job{number}"
            tree.make(name)
            tree.write(name, "quota_us", ORDER_US)
            programs[name] = Program(built, tree, name)
            stack.callback(programs[name].close)
        agent = stack.enter_context(contextlib.closing(AgentProcess(Path(directory))))
        agent.start(
            f'managed_roots = ["{tree.top}"]\n[monitor]\nmode = "reclaim"\nlimit_rule = "peak"\n'
            f'peak_memory = "100ms"\nthrottle_poll = {poll_ms}\nmin_cpu_limit = {floor_cores}\nthrottle_budget = 1.0\n'
            f'[[source]]\nkind = "glob"\npattern = "{tree.top}/*"\n[cost]\ncpu_budget_ratio = 0\n'
        )
        wait_until(lambda: all(is_low(tree, name, floor_cores) for name in programs), "all are held down", 60)
        yield tree, programs


def is_low(tree: CgroupTree, name: str, cores: float) -> bool:
    """Whether a job is down at ``cores``."""
    return abs(tree.quota_cores(name) - cores) < 0.001


def measure_restores(poll_ms: int, rounds: int, seed: int = 1) -> dict[str, Any]:
    """Seconds from the begin of a burst to the write that gives everything back."""
    delays, chance = [], random.Random(seed)
    with managed(poll_ms, LOW_CORES, JOBS) as (tree, programs):
        names = list(programs)
        for number in range(rounds):
            # The periods of each cgroup begin at moments of their own, and go on like that.
            name = names[number % JOBS]
            wait_until(partial(is_low, tree, name, LOW_CORES), "the job is held down again", 60)
            time.sleep(chance.uniform(0.5, 1.5))  # the burst is filled up, and any phase of looks is met
            delays.append(measure_one(tree, name, programs[name]))
    delays.sort()
    return {
        "poll_ms": poll_ms,
        "rounds": rounds,
        "p50_s": round(find_quantile(delays, 0.5), 3),
        "p99_s": round(find_quantile(delays, 0.99), 3),
        "least_s": round(delays[0], 3),
        "most_s": round(delays[-1], 3),
    }


def measure_one(tree: CgroupTree, name: str, program: Program) -> float:
    """The same of one burst."""
    with Inotify(sync_timeout=5) as inotify:
        inotify.add_watch(tree.path(name, tree.file("quota_us")), Mask.MODIFY)
        program.begin(0.4)
        at_s = math.inf
        while tree.read(name, "quota_us") != str(ORDER_US):
            if inotify.sync_get() is None:
                raise RuntimeError("nothing was written for 5 s")
            at_s = time.monotonic()
        begin_s, _ = program.wait()
    return at_s - begin_s


def find_quantile(values: list[float], share: float) -> float:
    """Of sorted values, by nearest rank."""
    return values[max(math.ceil(share * len(values)) - 1, 0)]


def measure_spikes(spikes: int) -> dict[str, Any]:
    """100 ms of CPU at once, at a limit of 0.5 cores with the burst that the rule sets."""
    lengths, throttled = [], 0
    with managed(200, 0.5) as (tree, programs):
        [(name, program)] = programs.items()
        assert tree.read(name, "burst_us") == tree.read(name, "quota_us")
        for _ in range(spikes):
            wait_until(partial(is_low, tree, name, 0.5), "the job is held down again", 60)
            time.sleep(1.0)  # the burst is filled up
            before = count_throttled(tree, name)
            program.begin(0.1)
            begin_s, end_s = program.wait()
            time.sleep(0.2)  # a period is counted at its end
            throttled += count_throttled(tree, name) - before
            lengths.append(end_s - begin_s)
    lengths.sort()
    return {
        "spikes": spikes,
        "spike_p50_s": round(find_quantile(lengths, 0.5), 3),
        "spike_most_s": round(lengths[-1], 3),
        "throttled_periods": throttled,
    }


def count_throttled(tree: CgroupTree, name: str) -> int:
    """Throttled periods of a job up to now."""
    return int(dict(line.split() for line in tree.read(name, "cpu.stat").splitlines())["nr_throttled"])


def main() -> None:
    """Measure and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--polls", type=int, nargs="*", default=[200, 100])
    parser.add_argument("--spikes", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="exit code 1 when a figure is above its bound")
    options = parser.parse_args()
    good = True
    for poll_ms in options.polls:
        told = measure_restores(poll_ms, options.rounds)
        p50_s, p99_s = BOUNDS_S.get(poll_ms, (math.inf, math.inf))
        told["good"] = told["p50_s"] <= p50_s and told["p99_s"] <= p99_s
        good &= told["good"]
        print(json.dumps(told), flush=True)
    if options.spikes:
        told = measure_spikes(options.spikes)
        told["good"] = told["throttled_periods"] == 0
        good &= told["good"]
        print(json.dumps(told), flush=True)
    if options.check and not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
