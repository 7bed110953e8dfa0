"""From the heartbeat that frees CPU to the process of the next job, part by part, with real processes all the way.

One real scheduler, one real agent with its keeper, heartbeats and checks each second, so that whatever waits for a
period instead of an event shows. Jobs are a C program that writes the clock first of all and last of all.

    python tests/bench/closed_loop.py [--rounds 300] [--only ended small shrunk together floor cost]

Needs root, real cgroups and a C compiler. Milliseconds; seconds depend on the machine, so the floors of this one are
measured in the same run: the same program started by ``subprocess.Popen`` and by a bare fork and exec.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
from cost import _cpu_s as read_cpu_s

from cpumond.cluster import Cluster, ClusterNode

STAMP = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void note(int file, const char *what, double at) {
    char line[200];
    const char *id = getenv("CPUMOND_JOB_ID");
    int size = snprintf(line, sizeof line, "%s %s %.6f\n", what, id ? id : "-", at);
    if (write(file, line, size) != size) exit(1);
}

/* stamp FILE sleep SECONDS | stamp FILE held FIFO: until somebody opens it for writing */
int main(int argc, char **argv) {
    double begin = now();
    int file = open(argv[1], O_WRONLY | O_CREAT | O_APPEND, 0644);
    note(file, "start", begin);
    if (!strcmp(argv[2], "held")) {
        open(argv[3], O_RDONLY);
    } else {
        double wait = atof(argv[3]);
        struct timespec t = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
        nanosleep(&t, 0);
    }
    note(file, "end", now());
    return 0;
}
"""

POOL = "bench"
MEMORY = 2**24
TOGETHER = 20
CALM_S = 0.3
RUNNING_JOBS = 100


@dataclass
class Times:
    """What is known of one job, seconds since 1970: by itself, by the agent, by the keeper."""

    begun: float = math.nan
    ended: float = math.nan
    heartbeat: float = math.nan
    """When the heartbeat was sent whose answer ordered it, by the agent's log; a busy machine blurs it by what lies
    between the time that is logged and the line's own."""
    seen: float = math.nan
    """When the agent knew that it runs."""
    forked: float = math.nan
    reaped: float = math.nan


@dataclass
class Run:
    """A finished operation: its jobs in the order of their starts, and what the scheduler spent on a heartbeat."""

    jobs: list[Times]
    scheduler_s: float
    heartbeats: int
    cpu_s: dict[str, float]
    """Of agent, keeper and scheduler, from the first start to the last end."""
    shrinks: list[float] = field(default_factory=list)


def build(directory: str) -> str:
    """Compile the program that stamps; its path."""
    source, program = os.path.join(directory, "stamp.c"), os.path.join(directory, "stamp")
    Path(source).write_text(STAMP, encoding="ascii")
    subprocess.run(["cc", "-O2", "-static", "-o", program, source], check=True)
    return program


def read_metrics(cluster: Cluster) -> Mapping[str, float]:
    text = httpx2.get(f"{cluster.url}/metrics", trust_env=False).text
    return {name: float(value) for name, value in re.findall(r"^(cpumond_\w+) ([\d.e+-]+)$", text, re.MULTILINE)}


def find_pids(cluster: Cluster) -> dict[str, int]:
    node = cluster.nodes[0]
    return {"agent": node.pid, "keeper": node.find_keepers()[0], "scheduler": cluster.scheduler.pid}


def stamp_of(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def run_operation(
    command: Sequence[str], job_count: int, *, cpu: float, cpu_limit: float,
    drive: Callable[[Path], None] = lambda _: None, **monitor: object,
) -> Run:  # fmt: skip
    """Run an operation to its end on a node of ``cpu`` cores. ``drive`` is given the file with the jobs' stamps."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(
            directory, 1, cpu=cpu, user_slots=200, memory=200 * MEMORY, check_period="1s", heartbeat_period="1s",
            monitor={"mode": "off", **monitor},
        ) as cluster,
    ):  # fmt: skip
        cluster.create_pool(POOL)
        stamps = Path(directory, "stamps")
        pids = find_pids(cluster)
        before = read_metrics(cluster)
        cpu_before = {name: read_cpu_s(pid) for name, pid in pids.items()}
        program, *arguments = command
        operation_id = cluster.start_operation(
            POOL, [program, str(stamps), *arguments], job_count, cpu_limit, MEMORY
        )  # fmt: skip
        drive(stamps)
        cluster.wait(
            lambda: cluster.get(f"/api/v1/operations/{operation_id}")["state"] == "completed",
            f"{job_count} jobs are done", 300.0,
        )  # fmt: skip
        cpu_s = {name: read_cpu_s(pid) - cpu_before[name] for name, pid in pids.items()}
        after = read_metrics(cluster)
        times: dict[str, Times] = {}
        for line in stamps.read_text(encoding="ascii").splitlines():
            what, job_id, at = line.split()
            setattr(times.setdefault(job_id, Times()), "begun" if what == "start" else "ended", float(at))
        for event in cluster.nodes[0].log_events("job_started"):
            job = times[event["job_id"]]
            job.seen = stamp_of(event)
            job.heartbeat = job.seen - event["since_heartbeat_s"]
        for shown in cluster.jobs(operation_id):
            if shown["id"] in times:
                times[shown["id"]].forked, times[shown["id"]].reaped = shown["start_time"], shown["finish_time"]
        count, spent = (
            after[f"cpumond_scheduler_heartbeat{name}_total"] - before[f"cpumond_scheduler_heartbeat{name}_total"]
            for name in ("s", "_seconds")
        )
        shrinks = [stamp_of(event) for event in cluster.nodes[0].log_events("limit_changed")]
        return Run(sorted(times.values(), key=lambda job: job.begun), spent / count, int(count), cpu_s, shrinks)


def print_head(title: str) -> None:
    print(f"\n{title}\n  {'ms':44}{'n':>6}{'min':>9}{'median':>9}{'p90':>9}{'p99':>9}{'max':>9}")


def print_row(what: str, values_s: Sequence[float]) -> None:
    """Quantiles of some seconds, in ms; what is not known is left out."""
    found = sorted(value * 1000.0 for value in values_s if not math.isnan(value))
    if not found:
        return
    quantiles = [found[min(int(len(found) * share), len(found) - 1)] for share in (0.0, 0.5, 0.9, 0.99, 1.0)]
    print(f"  {what:44}{len(found):6}" + "".join(f"{value:9.2f}" for value in quantiles))


def print_parts(run: Run, jobs: Sequence[Times]) -> None:
    """The way of the order of some jobs."""
    print_row("HEARTBEAT SENT -> PROCESS, by its own clock", [job.begun - job.heartbeat for job in jobs])
    print_row("  sent -> the keeper forks", [job.forked - job.heartbeat for job in jobs])
    print_row("  fork -> the process's first instruction", [job.begun - job.forked for job in jobs])
    print_row("heartbeat -> the agent knows (its own metric)", [job.seen - job.heartbeat for job in jobs])
    print(
        f"  of it in the scheduler: {run.scheduler_s * 1000.0:.2f} ms on average of {run.heartbeats} heartbeats, "
        f"{run.heartbeats / len(run.jobs):.1f} for each job"
    )
    costs = ", ".join(f"{name} {used / len(run.jobs) * 1000.0:.1f}" for name, used in run.cpu_s.items())
    print(f"  ms of CPU for each job, from its order to the end of all: {costs}")


def bench_ended(program: str, rounds: int, title: str, cpu_limit: float) -> None:
    """One job at a time: each begins because the one before ended."""
    run = run_operation([program, "sleep", "0.02"], rounds + 1, cpu=cpu_limit, cpu_limit=cpu_limit)
    pairs = list(itertools.pairwise(run.jobs))
    print_head(title)
    print_row("exit -> next process", [after.begun - before.ended for before, after in pairs])
    print_row("  exit -> the keeper has reaped it", [before.reaped - before.ended for before, _ in pairs])
    print_row("  reaped -> heartbeat sent", [after.heartbeat - before.reaped for before, after in pairs])
    print_parts(run, [after for _, after in pairs])


def bench_shrunk(program: str, rounds: int) -> None:
    """Each job sleeps, is shrunk to 0.01 cores soon after its start, and so makes room for the next one."""
    run = run_operation(
        [program, "sleep", "2"], rounds + 1, cpu=1.4, cpu_limit=1.0, mode="reclaim", check_period="50ms",
        smoothing_factor=1.0, smoothing_seed="first_value", vote_window_size=2, vote_decision_threshold=1,
        decrease_coefficient=0.01, min_cpu_limit=0.01,
    )  # fmt: skip
    print_head("(b) a job is shrunk by the monitor, the next one fits")
    jobs = [job for job in run.jobs if any(shrink <= job.heartbeat for shrink in run.shrinks)]
    shrinks = [max(shrink for shrink in run.shrinks if shrink <= job.begun) for job in jobs]
    print_row("limit lowered -> next process", [job.begun - at for job, at in zip(jobs, shrinks, strict=True)])
    print_row("  limit lowered -> heartbeat sent", [job.heartbeat - at for job, at in zip(jobs, shrinks, strict=True)])
    print_parts(run, jobs)


def bench_together(program: str, directory: str, rounds: int) -> None:
    """20 jobs end in the same moment, and 20 begin."""
    count = TOGETHER * max(rounds // TOGETHER, 2)
    fifo = os.path.join(directory, "gate")
    os.mkfifo(fifo)

    def drive(stamps: Path) -> None:
        pause = threading.Event()
        for started in range(TOGETHER, count + 1, TOGETHER):
            while not stamps.exists() or stamps.read_text(encoding="ascii").count("start ") < started:
                pause.wait(0.01)
            pause.wait(CALM_S)
            os.close(os.open(fifo, os.O_WRONLY))

    run = run_operation([program, "held", fifo], count, cpu=float(TOGETHER), cpu_limit=1.0, drive=drive)
    batches = [run.jobs[n : n + TOGETHER] for n in range(0, count, TOGETHER)]
    later = list(itertools.pairwise(batches))
    print_head(f"(c) {TOGETHER} jobs end at once, {TOGETHER} begin")
    ended = [(max(job.ended for job in before), after) for before, after in later]
    print_row("last exit -> process", [job.begun - at for at, after in ended for job in after])
    print_row("  first of each batch", [min(job.begun for job in after) - at for at, after in ended])
    print_row("  last of each batch", [max(job.begun for job in after) - at for at, after in ended])
    print_row("exit -> reaped", [job.reaped - job.ended for job in run.jobs])
    print_parts(run, [job for _, after in later for job in after])


def bench_floor(program: str, directory: str, rounds: int) -> None:
    """The same program, started by this process."""
    stamps = Path(directory, "floor")

    def run(start: Callable[[list[str]], None]) -> list[float]:
        took = []
        for _ in range(rounds):
            stamps.unlink(missing_ok=True)
            begin = time.time()
            start([program, str(stamps), "sleep", "0"])
            took.append(float(stamps.read_text().split()[2]) - begin)
        return took

    def fork(argv: list[str]) -> None:
        pid = os.fork()
        if not pid:
            os.execv(argv[0], argv)  # noqa: S606 - the floor is just this
        os.waitpid(pid, 0)

    def popen(argv: list[str]) -> None:
        subprocess.run(argv, check=True)

    def whole() -> float:
        begin = time.perf_counter()
        subprocess.run(["true"], check=True)
        return time.perf_counter() - begin

    print_head("floor: the same program, started by this process")
    print_row("subprocess.Popen -> first instruction", run(popen))
    print_row("fork, exec -> first instruction", run(fork))
    print_row('subprocess.Popen(["true"]) and its end', [whole() for _ in range(rounds)])


def count_found(node: ClusterNode, jobs: int) -> bool:
    """Whether the monitor follows so many jobs."""
    return len(node.log_events("job_found")) == jobs


def bench_cost(program: str, seconds: float) -> None:
    """What agent, keeper and scheduler cost: without jobs, with jobs, and while all limits go down at each check."""
    print(f"\ncost, heartbeats and checks each second, over {seconds:g} s")
    print(f"  {'':12}{'jobs':>6}{'us of CPU/s':>14}{'RSS MiB':>10}")
    for jobs, floor_cores in ((0, 1.0), (RUNNING_JOBS, 1.0), (RUNNING_JOBS, 0.05)):
        if floor_cores < 1.0:
            print(f"  {jobs} limits lowered each second:")
        with (
            tempfile.TemporaryDirectory() as directory,
            Cluster(
                directory, 1, cpu=float(RUNNING_JOBS), user_slots=200, memory=200 * MEMORY, check_period="1s",
                heartbeat_period="1s", monitor={"mode": "reclaim", "min_cpu_limit": floor_cores},
                agent_config="[cost]\ncpu_budget_ratio = 0\n",
            ) as cluster,
        ):  # fmt: skip
            cluster.create_pool(POOL)
            node = cluster.nodes[0]
            if jobs:
                cluster.start_operation(POOL, [program, f"{directory}/stamps", "sleep", "1000"], jobs, 1.0, MEMORY)
                cluster.wait(partial(count_found, node, jobs), f"{jobs} jobs run", 60.0)
            if floor_cores < 1.0:
                cluster.wait(partial(node.log_events, "limit_changed"), "limits go down", 60.0)
            pids = find_pids(cluster)
            pause = threading.Event()
            pause.wait(3.0)
            before = {name: read_cpu_s(pid) for name, pid in pids.items()}
            began = time.monotonic()
            pause.wait(seconds)
            passed_s = time.monotonic() - began
            for name, pid in pids.items():
                used = (read_cpu_s(pid) - before[name]) / passed_s * 1e6
                print(f"  {name:12}{jobs:6}{used:14.0f}{psutil.Process(pid).memory_info().rss / 2**20:10.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("ended", "small", "shrunk", "together", "floor", "cost")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the cost")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load {load:.1f} at the start, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as directory:
        program = build(directory)
        rounds = options.rounds
        work: dict[str, Callable[[], None]] = {
            "ended": lambda: bench_ended(program, rounds, "(a) a job ends, the next one begins", 1.0),
            "small": lambda: bench_ended(program, rounds // 3, "(a) the same, jobs and node of 0.05 cores", 0.05),
            "shrunk": lambda: bench_shrunk(program, rounds),
            "together": lambda: bench_together(program, directory, rounds),
            "floor": lambda: bench_floor(program, directory, rounds),
            "cost": lambda: bench_cost(program, options.seconds),
        }
        for name in names:
            if name in options.only:
                work[name]()
                sys.stdout.flush()


if __name__ == "__main__":
    main()
