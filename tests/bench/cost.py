"""What the agent costs, measured from outside, as a ratio to a C loop that reads the same counters in the same run.

``python tests/bench/cost.py [--jobs 1000 5000] [--seconds 20]``; needs root, real cgroups and a C compiler. With
``--web`` the agent has its page, and keeps a sample of each job at each check. With ``--rule peak --lowered 300`` so
many jobs are held down and looked at between two checks; each wakes up in each period, so that its counters move.
Prints one line of JSON per number of jobs: CPU microseconds per job and check of the agent and of the floor, their
ratio, resident memory, and seconds from exec to the first tick.
``--check`` measures 1000 jobs under each rule with nothing held down, and with 300 looked at each 0.2 s; exit code 1
when one is above its bound.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from agent_process import AgentProcess
from real_cgroups import CgroupTree
from waiting import wait_until

from cpumond.host.cgroup.mounts import open_hierarchies

MAX_RATIO = 5.0
"""To the C floor, with nothing held down."""
MAX_CORES = 0.016
"""Of 1000 jobs, 300 of which are held down and looked at each 0.2 s."""
MAX_RSS_MIB = 48.0
TRIES = 3
"""Other work on the machine can only add to a figure."""


@contextlib.contextmanager
def awake(directory: str, tree: CgroupTree, names: list[str]) -> Iterator[None]:
    """A process in each of these cgroups that wakes up in each period."""
    program = os.path.join(directory, "wakes")
    subprocess.run(["cc", "-O2", "-o", program, str(Path(__file__).with_name("wakes.c"))], check=True)
    lines = [" ".join(os.path.join(root, tree.top, name, "cgroup.procs") for root in tree.roots) for name in names]
    process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("".join(f"{line}\n" for line in lines))
        process.stdin.close()
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.wait()


def start_floor(directory: str, files: list[str], rounds: int, period_us: int) -> subprocess.Popen[str]:
    """The C loop over ``files``, once a period beside the agent, so that both meet the same caches and neighbours."""
    program = os.path.join(directory, "floor")
    subprocess.run(["cc", "-O2", "-o", program, str(Path(__file__).with_name("floor.c"))], check=True)
    process = subprocess.Popen(
        [program, str(rounds), str(period_us)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write("\n".join(files))
    process.stdin.close()
    process.stdin = None  # communicate would flush it again
    return process


def counter_files(tree: CgroupTree, names: list[str]) -> list[str]:
    """The counters the agent reads of each job."""
    h = tree.hierarchies
    if h.cpu_version == 2:
        return [tree.path(name, "cpu.stat") for name in names]
    usage = [os.path.join(h.cpuacct_root, tree.top, name, "cpuacct.usage") for name in names]
    return [file for name, used in zip(names, usage, strict=True) for file in (used, tree.path(name, "cpu.stat"))]


def measure(
    jobs: int,
    seconds: float,
    check_period_ms: int,
    mode: str,
    web: bool,
    rule: str = "document",
    lowered: int = 0,
    poll_ms: int = 200,
) -> dict[str, Any]:
    """One agent over ``jobs`` cgroups, ``lowered`` of them held down, for ``seconds`` of steady state."""
    with CgroupTree(open_hierarchies(), f"cpumond-bench-{os.getpid()}") as tree:
        names = [f"{'low' if number < lowered else 'job'}{number}" for number in range(jobs)]
        for name in names:
            tree.make(name)
        files = counter_files(tree, names)
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            agent = stack.enter_context(contextlib.closing(AgentProcess(Path(directory))))
            agent.write_config(
                f'managed_roots = ["{tree.top}"]\n[monitor]\nmode = "{mode}"\ncheck_period = {check_period_ms}\n'
                f'limit_rule = "{rule}"\n'
                + (f"throttle_poll = {poll_ms}\n" if lowered else "")
                + ('peak_memory = "100ms"\n' if rule == "peak" else "")
                + f'[[source]]\nkind = "glob"\npattern = "{tree.top}/low*"\ncpu_limit = 1.0\n'
                "job-cpu-monitor = { min_cpu_limit = 0.1 }\n"
                f'[[source]]\nkind = "glob"\npattern = "{tree.top}/*"\ncpu_limit = 1.0\n'
                "[cost]\ncpu_budget_ratio = 0\n"
                f'[web]\nlisten = "{"127.0.0.1:0" if web else ""}"\nperiod = {check_period_ms}\n'
            )
            started = time.time()
            agent.start()
            first = agent.get("/v1/status")
            process = psutil.Process(agent.process.pid if agent.process else 0)
            if lowered:
                stack.enter_context(awake(directory, tree, names[:lowered]))
                wait_until(lambda: all(tree.quota_cores(name) == 0.1 for name in names[:lowered]), "they are held down")
            time.sleep(3 * check_period_ms / 1000)
            floor = start_floor(directory, files, int(seconds * 1000 / check_period_ms), check_period_ms * 1000)
            status_before = agent.get("/v1/status")
            before = _cpu_s(process.pid)
            time.sleep(seconds)
            after, status_after = _cpu_s(process.pid), agent.get("/v1/status")
            floor_us = float(floor.communicate(timeout=60)[0]) / 1000.0 * len(files) / jobs
            rss = process.memory_info().rss
            first_tick = datetime.fromisoformat(agent.events("started")[0]["timestamp"])
            late = first["counters"]["late_ticks"]
            agent.stop()
        ticks = status_after["tick"] - status_before["tick"]
        agent_us = (after - before) / (ticks * jobs) * 1e6
        return {
            "jobs": jobs,
            "mode": mode,
            "web": web,
            "rule": rule,
            "lowered": lowered,
            "poll_ms": poll_ms if lowered else 0,
            "writes": status_after["counters"]["writes"] - status_before["counters"]["writes"],
            "check_period_ms": check_period_ms,
            "ticks": ticks,
            "late_ticks": late,
            "agent_us_per_job_and_check": round(agent_us, 2),
            "floor_us_per_job_and_check": round(floor_us, 2),
            "ratio": round(agent_us / floor_us, 2),
            "agent_cores": round((after - before) / seconds, 4),
            "rss_mib": round(rss / 2**20, 1),
            "start_to_first_tick_s": round(first_tick.timestamp() - started, 3),
        }


def check(seconds: float) -> bool:
    """Whether 1000 jobs with checks each second cost no more than they may; prints what they cost."""
    good = True
    for rule, lowered in (("document", 0), ("peak", 0), ("peak", 300)):
        bounds = {"rss_mib": MAX_RSS_MIB, **({"agent_cores": MAX_CORES} if lowered else {"ratio": MAX_RATIO})}
        for _ in range(TRIES):
            told = measure(1000, seconds, 1000, "reclaim", False, rule, lowered)
            is_good = all(told[name] <= most for name, most in bounds.items())
            print(json.dumps({**told, "bounds": bounds, "good": is_good}), flush=True)
            if is_good:
                break
        good &= is_good
    return good


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its threads, to the nanosecond (schedstat)."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--check-period-ms", type=int, default=1000)
    parser.add_argument("--mode", default="reclaim")
    parser.add_argument("--web", action="store_true")
    parser.add_argument("--rule", default="document")
    parser.add_argument("--lowered", type=int, default=0)
    parser.add_argument("--poll-ms", type=int, default=200)
    parser.add_argument("--check", action="store_true", help="exit code 1 when a figure is above its bound")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.check:
        sys.exit(0 if check(options.seconds) else 1)
    for jobs in options.jobs:
        told = measure(
            jobs,
            options.seconds,
            options.check_period_ms,
            options.mode,
            options.web,
            options.rule,
            options.lowered,
            options.poll_ms,
        )
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
