"""From the order to the process, and from the kill to the end, of jobs of Slurm: with real Slurm and real processes.

    python tests/bench/slurm.py [--rounds 20]
    python tests/bench/slurm.py --pools [--limit-rule peak] [--idle 120 --work 10]

With ``--pools`` the closed loop instead, for some minutes: two of Slurm's own jobs idle and wake, an agent lowers their
limits and tells a scheduler, which starts 100 jobs of two pools of weights 2:1 through Slurm on what is free. When they
wake these must give it back: some are preempted, and done again. What is held back is what the rule's budget allows
(0.4 % of the time) once it knows a job, and more until then where the job wakes more often.

Needs root and Slurm (slurm-wlm, munge). The node must never be taken out of service.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from engines import SlurmCluster
from slurm_rig import DRAINED, RECLAIMED, SlurmRig
from test_slurm_source import CPU, IS_APART, IS_V2, read, remove_cgroups, run_job

from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.host.executor.model import Ended, Started
from cpumond.testing import Cluster

SETTINGS = "SchedulerParameters=batch_sched_delay=1\n"

CORES = 2.0
POOLS = {"double": (2.0, 67), "single": (1.0, 33)}
"""Weight and jobs: both want more than they get for as long as possible."""
JOB_CORES, JOB_CPU_S = 0.1, 4.0
SHARES_WITHIN, HELD_BACK_MOST = 0.10, 0.005
PERIOD_S = 0.1
"""In which the kernel enforces a limit."""

JOB = f"""
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(os.environ["CPUMOND_JOB_ID"] + chr(10))
while time.process_time() < {JOB_CPU_S}:
    end = time.process_time() + {JOB_CORES} * 0.1
    while time.process_time() < end:
        pass
    time.sleep({1.0 - JOB_CORES} * 0.1)
"""
"""Notes that it was begun, and uses no more than it ordered: not everywhere has Slurm a quota for it."""

OWN = """
import random, sys, time
seed, idle_s, work_s = map(float, sys.argv[1:])
choose, first = random.Random(seed), seed / 2
while True:
    time.sleep(idle_s * choose.uniform(0.8, 1.2) * first)
    first, begin_s, end_s = 1, time.monotonic(), time.process_time() + work_s * choose.uniform(0.8, 1.2)
    while time.process_time() < end_s:
        pass
    print(time.monotonic() - begin_s, flush=True)
"""
"""Idles, then works for so many seconds of CPU, as fast as it may; prints how long it took each time."""


def measure(rounds: int, settings: str) -> bool:
    """Start and kill one job after the other; whether both are as fast as they must be."""
    starts, kills, states = [], [], set()
    with SlurmCluster(reclaimed_cpus=64, settings=settings) as cluster, tempfile.TemporaryDirectory() as directory:
        os.environ.update(cluster.environment)
        rig = SlurmRig(cluster, open_hierarchies(), Path(directory))
        try:
            for _ in range(rounds):
                begin_s = time.monotonic()
                job_id = rig.start("sleep", "1000")
                rig.wait(Started, job_id)
                starts.append(time.monotonic() - begin_s)
                begin_s = time.monotonic()
                rig.executor.kill(job_id)
                rig.wait(Ended, job_id)
                kills.append(time.monotonic() - begin_s)
                states.add(cluster.node_state(cluster.reclaimed_node))
        finally:
            rig.executor.close()
            rig.end_keepers()
    start_s, kill_s = statistics.median(starts), statistics.median(kills)
    drained = sorted(state for state in states if DRAINED.search(state))
    print(f"{settings.strip() or 'defaults'}: {rounds} jobs one after the other")
    print(f"  start  median {start_s:.2f} s, most {max(starts):.2f} s")
    print(f"  kill   median {kill_s:.2f} s, most {max(kills):.2f} s")
    print(f"  node   {', '.join(sorted(states))}")
    return start_s <= 2.0 and kill_s <= 2.0 and not drained


class OwnJob:
    """One of Slurm's own jobs, which ordered a core: its limit over time, and how often it was held back by it."""

    def __init__(self, cluster: SlurmCluster, seed: int, idle_s: float, work_s: float, gate: Path) -> None:
        words = f"{sys.executable} -I -S -c '{OWN}' {seed} {idle_s} {work_s}"
        wait = f"while [ ! -e {gate} ]; do sleep 0.1; done"
        self._cluster = cluster
        self._number, self._place = run_job(cluster, "--cpus-per-task=1", script=f"{wait}; exec {words}")
        self.passed_s = self.freed_cpu_s = 0.0
        self._held_back = 0
        """Throttled periods that ended while the limit was below the order, or had just been."""
        self._first = self._last = self._read_stat()
        self._freed_cores = 0.0

    def _read_stat(self) -> tuple[int, int, float]:
        """Periods in which it had work, those of them in which it was throttled, for how many seconds."""
        stat = dict(line.split() for line in (self._place / "cpu.stat").read_text().splitlines())
        held_s = int(stat["throttled_usec"]) / 1e6 if IS_V2 else int(stat["throttled_time"]) / 1e9
        return int(stat["nr_periods"]), int(stat["nr_throttled"]), held_s

    def look(self, interval_s: float) -> None:
        """The limit of the last look has held for ``interval_s``."""
        quota, now = read(self._place), self._read_stat()
        if self._freed_cores > 0.0:
            self._held_back += now[1] - self._last[1]
        self.passed_s += interval_s
        self.freed_cpu_s += self._freed_cores * interval_s
        self._freed_cores = 0.0 if quota < 0 else max(1.0 - quota / 100_000, 0.0)
        self._last = now

    def show(self) -> float:
        """Print it; the share of its time in which it was held back."""
        self.works = [float(line) for line in self._cluster.output(self._number).split()]
        worked_s, back_s = max(sum(self.works), 1.0), self._held_back * PERIOD_S
        periods, throttled, held_s = (now - then for now, then in zip(self._last, self._first, strict=True))
        print(
            f"  job_{self._number}: limit {self.freed_cpu_s / self.passed_s:.0%} below the order on average, woke"
            f" {len(self.works)} times, worked {worked_s:.0f} s\n"
            f"    held back by a lowered limit in {self._held_back} periods of {PERIOD_S} s:"
            f" {back_s / self.passed_s:.2%} of its time, {back_s / worked_s:.2%} of its work\n"
            f"    cpu.stat, whatever the limit: {throttled} of {periods} periods, {held_s:.2f} s:"
            f" {held_s / self.passed_s:.2%} of its time, {held_s / worked_s:.2%} of its work"
        )
        return back_s / self.passed_s


@contextmanager
def watching(own: Sequence[OwnJob]) -> Iterator[None]:
    """Look at Slurm's own jobs all the time."""

    def run() -> None:
        last_s = time.monotonic()
        while not stop.wait(0.05):
            now_s = time.monotonic()
            for job in own:
                job.look(now_s - last_s)
            last_s = now_s

    stop, thread = threading.Event(), threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def configure(slurm: SlurmCluster, rule: str) -> str:
    """What makes an agent one of both nodes of a Slurm."""
    nodes = (slurm.node, slurm.reclaimed_node)
    roots = [place for node in nodes for place in (f"slurm_{node}", f"system.slice/{node}_slurmstepd.scope")]
    return (
        f"managed_roots = {json.dumps(roots)}\n[monitor]\nlimit_rule = {json.dumps(rule)}\nmin_cpu_limit = 0.1\n"
        f'[executor]\nkind = "slurm"\ncgroup_root = ""\npartition = "{RECLAIMED}"\n'
        f'node_name = "{slurm.reclaimed_node}"\n[[source]]\nkind = "slurm"\n'
    )


def run_pools(slurm: SlurmCluster, cluster: Cluster, runs: Path) -> tuple[dict[str, list[dict[str, Any]]], set[str]]:
    """All jobs to their end: by pool, and the states that both nodes of Slurm were in meanwhile."""
    started, states, pause, deadline_s = {}, set(), threading.Event(), time.monotonic() + 1800.0
    for name, (weight, count) in POOLS.items():
        cluster.create_pool(name, weight=weight)
        command = [sys.executable, "-I", "-S", "-c", JOB, str(runs)]
        started[name] = cluster.start_operation(name, command, count, JOB_CORES, 2**26)
    while any(cluster.get(f"/api/v1/operations/{each}")["state"] == "running" for each in started.values()):
        cluster.check()
        if time.monotonic() > deadline_s:
            raise TimeoutError("not all jobs are over after 1800 s")
        states |= {slurm.node_state(node) for node in (slurm.node, slurm.reclaimed_node)}
        pause.wait(1.0)
    return {name: cluster.jobs(each) for name, each in started.items()}, states


def show_shares(jobs: dict[str, list[dict[str, Any]]]) -> bool:
    """Print what each pool had while both wanted more than their shares of the host; whether it was as the weights."""
    weights = sum(weight for weight, _ in POOLS.values())
    begin_s, until_s = min(job["start_time"] for each in jobs.values() for job in each), float("inf")
    for name, (weight, count) in POOLS.items():
        enough = math.ceil(CORES * weight / weights / JOB_CORES - 1e-9)
        done_s = sorted(job["finish_time"] for job in jobs[name] if job["state"] == "completed")
        until_s = min(until_s, done_s[count - enough])
    held, used = dict.fromkeys(POOLS, 0.0), dict.fromkeys(POOLS, 0.0)
    for name, each in jobs.items():
        for job in each:
            lived_s = max(min(job["finish_time"], until_s) - job["start_time"], 0.0)
            held[name] += lived_s * JOB_CORES
            used[name] += (job["cpu_seconds"] or 0.0) * lived_s / (job["finish_time"] - job["start_time"])
    print(f"shares in the {until_s - begin_s:.0f} s in which both pools wanted more than theirs of {CORES:g} cores")
    good = True
    for what, had in (("held, ordered core-s of running jobs", held), ("used, CPU seconds by the kernel", used)):
        wrong = {n: had[n] / sum(had.values()) / (POOLS[n][0] / weights) - 1.0 for n in POOLS}
        good = good and max(map(abs, wrong.values())) <= SHARES_WITHIN
        told = ", ".join(f"{name} {had[name]:.1f} = {wrong[name]:+.1%} of its share" for name in POOLS)
        print(f"  {what}: {told}; {had['double'] / had['single']:.2f} : 1")
    return good


def measure_pools(rule: str, idle_s: float, work_s: float) -> bool:
    """Two pools on what Slurm's own jobs leave; whether all was as it must be."""
    with ExitStack() as stack:
        slurm = stack.enter_context(SlurmCluster(reclaimed_cpus=64, settings=SETTINGS))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.chmod(0o755)
        os.environ.update(slurm.environment)
        stack.callback(remove_cgroups, slurm)
        gate, runs = directory / "gate", directory / "runs"
        own = [OwnJob(slurm, seed, idle_s, work_s, gate) for seed in (1, 2)]
        print(
            f"limit_rule {rule}, check_period 1s; 2 jobs of Slurm: {idle_s:g} s idle, {work_s:g} s of CPU, +-20 %; "
            f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the start"
        )
        if IS_APART:
            print(f"cpu and cpuacct are apart: the bench puts Slurm's own jobs into cgroups that it makes in {CPU}")
            # Else both together would weigh as much as each one of the jobs that run on what they leave.
            (CPU / f"slurm_{slurm.node}" / "cpu.shares").write_text("262144")
        agent = {"heartbeat_period": "1s", "agent_config": configure(slurm, rule)}
        cluster = stack.enter_context(Cluster(directory / "cluster", cpu=CORES, memory=2**34, user_slots=64, **agent))
        gate.touch()
        with watching(own):
            jobs, states = run_pools(slurm, cluster, runs)
        everyone = [job for each in jobs.values() for job in each]
        ended = Counter(f"{job['state']} ({job['exit_code']})" for job in everyone)
        # One that must make room for Slurm's own jobs is done again, as another job.
        preempted = sum(job["preemption"] is not None for job in everyone)
        once = sorted(runs.read_text().split()) == sorted(job["id"] for job in everyone)
        once = once and ended["completed (0)"] == len(everyone) - preempted == sum(count for _, count in POOLS.values())
        shares_good = show_shares(jobs)
        print(f"Slurm's own jobs, over {own[0].passed_s:.0f} s")
        held_back = [each.show() for each in own]
        freed, used = sum(each.freed_cpu_s for each in own), sum(job["cpu_seconds"] or 0.0 for job in everyone)
        print(f"freed {freed:.0f} core-s, of which the jobs of the pools used {used:.0f} = {used / freed:.0%}")
        print(f"jobs: {dict(ended)}, of them preempted: {preempted}; nodes: {', '.join(sorted(states))}")
        good = {
            f"shares within {SHARES_WITHIN:.0%}": shares_good,
            f"held back <= {HELD_BACK_MOST:.1%}": max(held_back) <= HELD_BACK_MOST,
            "Slurm's own jobs woke": all(each.works for each in own),
            "each job begun and ended once": once,
            "nodes in service": not any(map(DRAINED.search, states)),
        }
        print("; ".join(f"{what}: {'yes' if fine else 'NO'}" for what, fine in good.items()))
        return all(good.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pools", action="store_true", help="two pools on what Slurm's own jobs leave")
    parser.add_argument("--limit-rule", default="peak", choices=("peak", "document"))
    parser.add_argument("--idle", type=float, default=120.0, help="seconds")
    parser.add_argument("--work", type=float, default=10.0, help="CPU seconds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all is tidied up
    if options.pools:
        return 0 if measure_pools(options.limit_rule, options.idle, options.work) else 1
    good = measure(options.rounds, SETTINGS)
    measure(options.rounds, "")  # as Slurm is shipped, for comparison
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
