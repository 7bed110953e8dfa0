"""What rules for a limit free of 14 simulated loads, and how often they hold the jobs back: ours, and those that others
use. Prints JSON (docs/pictures/peers.json, of which a picture is made); ``python tests/pictures.py peers`` keeps it.

    python tests/bench/peers.py [--seconds 7200] [--seeds 1 2 3] [--reclaimed-work]

The loads are the shapes of ``cpumond simulate``, 16 cores ordered, in its loop of kernel and job. Peers get more than
they have where they come from: use measured each second, limits written in place each minute and at once in force, and
as much burst as ``peak`` (``burst_ratio`` 1).

``--reclaimed-work`` prints a table instead: what jobs on the CPU that guarantees free get done, and what of it is lost.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final

import msgspec

from cpumond.monitor.model import LimitRule, MonitorSettings
from cpumond.monitor.reclaimed import ReclaimedJobs
from cpumond.monitor.shapes import PERIOD_S, SHAPES, make_work
from cpumond.monitor.simulate import CFS_PERIOD_S, LEAST_CPU_S, Arrivals, Program, simulate

ORDER_CORES: Final = 16.0
FLOOR_CORES: Final = 1.0
SECOND, MINUTE = round(1.0 / CFS_PERIOD_S), round(60.0 / CFS_PERIOD_S)
"""In periods."""
RESERVE: Final = 1.15
LENGTHS_S: Final = (30.0, 120.0, 600.0)
WAITS_S: Final = (15.0, 75.0, 135.0)
"""Of jobs on reclaimed CPU: the documents' patience, and a minute or two more."""
OUR_RULES: Final[dict[LimitRule, str]] = {"peak": "cpumond, rule peak", "document": "cpumond, rule document (default)"}


def take_percentile(seen: Sequence[float]) -> float:
    """The 90th percentile of all: VPA's target by default. Its samples' half-life of a day is long beside two hours."""
    return sorted(seen)[math.ceil(0.9 * len(seen)) - 1]


def take_maximum(seen: Sequence[float]) -> float:
    return max(seen[-300:])


PEERS: Final[dict[str, tuple[str, Callable[[Sequence[float]], float]]]] = {
    "percentile": ("90th percentile + 15 %, like VPA", take_percentile),
    "maximum": ("highest of five minutes + 15 %", take_maximum),
}
"""Name -> what it is, and what it makes of the use in each second so far, in cores."""


def play_peer(job: Arrivals | Program, find_need: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """Reclaimed core-seconds and the share of periods held back."""
    limit = ORDER_CORES
    carried = used_cpu_s = reclaimed_cpu_s = 0.0
    held_back = 0
    seen: list[float] = []
    for period in range(len(job.work_cpu_s)):
        quota = limit * CFS_PERIOD_S
        available = min(carried + quota, 2.0 * quota)
        ran = job.run(period, available)
        carried = min(available - ran.used_cpu_s, quota)
        held_back += ran.held_back
        reclaimed_cpu_s += (ORDER_CORES - limit) * CFS_PERIOD_S
        used_cpu_s += ran.used_cpu_s
        if period % SECOND == SECOND - 1:
            seen.append(used_cpu_s)
            used_cpu_s = 0.0
        if period % MINUTE == MINUTE - 1:
            limit = min(max(find_need(seen) * RESERVE, FLOOR_CORES), ORDER_CORES)
    return reclaimed_cpu_s, held_back / len(job.work_cpu_s)


def is_program(shape: str) -> bool:
    return "(a program)" in SHAPES[shape].about


def measure(name: str, shape: str, seed: int, seconds: float) -> tuple[float, float]:
    """Reclaimed of what is free, and the share of the kernel's periods in which the limit held the job back."""
    work = make_work(shape, ORDER_CORES, seed, seconds)
    if name not in PEERS:
        settings = msgspec.convert({"limit_rule": name}, MonitorSettings)
        result = simulate(work, ORDER_CORES, settings, is_program=is_program(shape))
        return result.reclaimed_ratio, result.held_back_ratio
    order_cpu_s = ORDER_CORES * CFS_PERIOD_S
    job = (Program if is_program(shape) else Arrivals)(work, order_cpu_s)
    reclaimed_cpu_s, held_back_ratio = play_peer(job, PEERS[name][1])
    free_cpu_s = sum(order_cpu_s - min(each, order_cpu_s) for each in work)
    return (reclaimed_cpu_s / free_cpu_s if free_cpu_s > LEAST_CPU_S else 0.0), held_back_ratio


def compare(seconds: float, seeds: list[int]) -> dict[str, Any]:
    """Means over all shapes and seeds, and each shape's."""
    rows = []
    for name, about in {**OUR_RULES, **{name: about for name, (about, _) in PEERS.items()}}.items():
        by_shape = {}
        for shape in SHAPES:
            results = [measure(name, shape, seed, seconds) for seed in seeds]
            by_shape[shape] = [round(fmean(column), 4) for column in zip(*results, strict=True)]
        reclaimed, held_back = (fmean(column) for column in zip(*by_shape.values(), strict=True))
        rows.append(
            {
                "name": name, "about": about, "reclaimed_ratio": round(reclaimed, 3),
                "held_back_ratio": round(held_back, 4), "by_shape": by_shape,
            }
        )  # fmt: skip
    return {"loads": len(SHAPES), "seconds": seconds, "seeds": seeds, "order_cores": ORDER_CORES, "rows": rows}


def show_reclaimed_work(seconds: float, seeds: list[int]) -> None:
    """A table of rules, lengths of jobs and how long they wait: given away, kept and lost, means over all loads."""
    print("| rule | jobs of | wait | given away | kept | lost | lost at most |\n|---|---|---|---|---|---|---|")
    for rule, length_s, wait_s in itertools.product(OUR_RULES, LENGTHS_S, WAITS_S):
        settings = MonitorSettings(limit_rule=rule, actuator="guarantee", min_cpu_limit=FLOOR_CORES / 10)
        found = [
            simulate(
                make_work(shape, ORDER_CORES, seed, seconds), ORDER_CORES, settings,
                is_program=is_program(shape), reclaimed_jobs=ReclaimedJobs(length_s=length_s, wait_s=wait_s),
            )
            for shape in SHAPES for seed in seeds
        ]  # fmt: skip
        given, kept, lost = (
            fmean(getattr(each, name) for each in found)
            for name in ("reclaimed_ratio", "kept_work_ratio", "lost_work_ratio")
        )
        most = max(each.lost_work_ratio for each in found)
        print(
            f"| {rule} | {length_s:g} s | {wait_s:g} s | {given:.2f} | {kept:.2f} | {lost:.1%} | {most:.0%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--reclaimed-work", action="store_true")
    given = parser.parse_args()
    if given.reclaimed_work:
        show_reclaimed_work(given.seconds, given.seeds)
        return
    print(json.dumps(compare(given.seconds, given.seeds), indent=1))


if __name__ == "__main__":
    assert PERIOD_S == CFS_PERIOD_S
    main()
