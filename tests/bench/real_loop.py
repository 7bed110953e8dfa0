"""What a rule frees and holds back on real cgroups, beside what ``cpumond simulate`` says of the same demand.

One agent, one cgroup and one C program for each shape; all at once, each ordering a part of a core. Work arrives as the
shape says and piles up where it cannot be done. Reclaimed is taken from the quota in the cgroup, held back from the
kernel's count of throttled periods while the limit was below the order. Other work on the host spoils both.

    python tests/bench/real_loop.py [--rule peak] [--seconds 600] [--order 0.4] [--shapes bursts cron diurnal web]

Needs root, real cgroups and a C compiler (or ``--program``, which has been compiled before). Prints one line of JSON
for each shape: reclaimed, and the share of periods held back, measured and simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from agent_process import AgentProcess

from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.monitor.shapes import PERIOD_S, make_work
from cpumond.testing import CgroupTree

WORK = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* work FILE SLOT CGROUP_PROCS...: each line of FILE is CPU seconds that arrive at the beginning of a slot */
int main(int argc, char **argv) {
    for (int i = 3; i < argc; i++) {
        FILE *procs = fopen(argv[i], "w");
        if (!procs || fputs("0", procs) < 0 || fclose(procs)) return 1;
    }
    FILE *file = fopen(argv[1], "r");
    double slot = atof(argv[2]), due = 0.0, work;
    if (!file) return 1;
    puts("ready");
    fflush(stdout);
    double begin = now(CLOCK_MONOTONIC), done = now(CLOCK_THREAD_CPUTIME_ID);
    for (long n = 0; fscanf(file, "%lf", &work) == 1; n++) {
        double wait = begin + n * slot - now(CLOCK_MONOTONIC);
        if (wait > 0) {
            struct timespec t = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
            nanosleep(&t, NULL);
        }
        due += work;
        double end = begin + (n + 1) * slot;
        while (now(CLOCK_THREAD_CPUTIME_ID) - done < due && now(CLOCK_MONOTONIC) < end)
            for (volatile int i = 0; i < 2000; i++) {}
    }
    return 0;
}
"""


SHAPES = ("bursts", "cron", "diurnal", "web")
"""Of ``cpumond simulate``: those whose work arrives, and keeps nobody from more of it."""


def list_settings(rule: str, order: float, options: list[str]) -> dict[str, str]:
    """What both the agent and the simulation are given, as TOML."""
    given = dict(option.split("=", 1) for option in options)
    return {"limit_rule": f'"{rule}"', "min_cpu_limit": f"{order / 16:g}", **given}


def simulate(shape: str, seconds: float, order: float, settings: dict[str, str]) -> dict[str, float]:
    """What ``cpumond simulate`` says of it."""
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    told = subprocess.run(
        [sys.executable, "-m", "cpumond", "simulate", "--shape", shape, "--seed", "1", "--duration", f"{seconds:g}s",
         "--cpu-limit", f"{order:g}", *sets, "--json"], stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    result: dict[str, float] = json.loads(told)["results"][0]
    return result


class Measured:
    """The quota of one job over time, as it is in its cgroup, and the kernel's counters of throttling."""

    def __init__(self, tree: CgroupTree, name: str, order: float) -> None:
        self.tree, self.name, self.order = tree, name, order
        self.freed_s = 0.0
        self.held_back = 0
        """Throttled periods that ended while the limit was below the order, or had just been."""
        self._lowered = False
        self._throttled = self._read_throttled()

    def _read_throttled(self) -> int:
        stat = dict(line.split() for line in self.tree.read(self.name, "cpu.stat").splitlines())
        return int(stat["nr_throttled"])

    def look(self, interval_s: float) -> None:
        """The limit now held for ``interval_s``."""
        freed = self.order - min(self.tree.quota_cores(self.name), self.order)
        throttled = self._read_throttled()
        if self._lowered:
            self.held_back += throttled - self._throttled
        self.freed_s += freed * interval_s
        self._lowered, self._throttled = freed > 0.0, throttled


def measure(rule: str, order: float, seconds: float, shapes: list[str], options: list[str], program: str) -> None:
    """All shapes at once; prints a line for each."""
    settings = list_settings(rule, order, options)
    work = {shape: make_work(shape, order, 1, seconds) for shape in shapes}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        if not program:
            program = os.path.join(directory, "work")
            source = Path(directory, "work.c")
            source.write_text(WORK, encoding="ascii")
            subprocess.run(["cc", "-O2", "-o", program, str(source)], check=True)
        tree = stack.enter_context(CgroupTree(open_hierarchies(), f"cpumond-bench-{os.getpid()}"))
        for shape in shapes:
            tree.make(shape)
            tree.write(shape, "quota_us", round(order * 100_000))
        agent = stack.enter_context(closing(AgentProcess(Path(directory))))
        section = "\n".join(f"{key} = {value}" for key, value in {"mode": '"reclaim"', **settings}.items())
        agent.start(
            f'managed_roots = ["{tree.top}"]\n[monitor]\n{section}\n[[source]]\nkind = "glob"\n'
            f'pattern = "{tree.top}/*"\n[cost]\ncpu_budget_ratio = 0\n'
        )
        measured = {shape: Measured(tree, shape, order) for shape in shapes}
        for shape, parts in work.items():
            path = Path(directory, f"{shape}.txt")
            path.write_text("".join(f"{part!r}\n" for part in parts), encoding="ascii")
            procs = [os.path.join(root, tree.top, shape, "cgroup.procs") for root in tree.roots]
            worker = subprocess.Popen([program, str(path), str(PERIOD_S), *procs], stdout=subprocess.PIPE)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            assert worker.stdout is not None
            assert worker.stdout.readline()
        pause, begin_s = threading.Event(), time.monotonic()
        last_s = begin_s
        while (now_s := time.monotonic()) < begin_s + seconds:
            for each in measured.values():
                each.look(now_s - last_s)
            last_s = now_s
            pause.wait(0.05)
        for shape, each in measured.items():
            reclaimable_s = order * seconds - sum(work[shape])
            told = simulate(shape, seconds, order, settings)
            print(
                json.dumps(
                    {
                        "rule": rule,
                        "cgroups": f"v{tree.hierarchies.cpu_version}",
                        "shape": shape,
                        "reclaimed_ratio": round(each.freed_s / reclaimable_s, 3),
                        "simulated_reclaimed_ratio": round(told["reclaimed_ratio"], 3),
                        "held_back_ratio": round(each.held_back / (seconds * 10), 5),
                        "simulated_held_back_ratio": round(told["held_back_ratio"], 5),
                    }
                ),
                flush=True,
            )
        agent.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", default="peak")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--order", type=float, default=0.4, help="cores that each job orders")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as TOML; may be repeated")
    parser.add_argument("--program", default="", help="the C program, compiled before")
    options = parser.parse_args()
    measure(options.rule, options.order, options.seconds, options.shapes, options.set, options.program)


if __name__ == "__main__":
    main()
