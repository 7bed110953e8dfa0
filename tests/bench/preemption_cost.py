"""What preemption costs in a generated week, in the documents' order of victims and with the cheapest first.

The scheduler's real state in virtual time, a step per minute: 20 nodes of 16 cores; ``batch`` fills them with jobs of
hours; ``prod`` has a guarantee of half of the cores and comes in bursts, ``research`` comes by its weight. Operations
of ``batch`` and ``research`` that save their work tell of a checkpoint every 10 to 40 minutes; a job that was stopped
goes on from its last one. Jobs use a fifth of their cores up to all of them. All follows from the seed, so that two
weeks differ by the option alone.

    python tests/bench/preemption_cost.py [--days 7] [--seeds 3] [--check]

Prints a table in Markdown, for weeks in which all, half and none of these operations save their work: jobs preempted,
core-hours lost as the records say and as the jobs really lost, and core-hours by which ``prod`` had less than its
guarantee and its demand; each in the documents' order, then with the option. ``--check``: exit code 1 unless the option
halves at least what is lost where all save their work, and the guarantee is met as before.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scheduler_world import PlayedJob, PlayedNode, World

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.model import Rules

NODES, CORES, STEP_S, HOUR_S = 20, 16.0, 60.0, 3600.0
GUARANTEE = NODES * CORES / 2
MOST_UNMET = 1.1
"""So many times what is missing of the guarantee without the option may be missing with it, and an hour of cores."""


@dataclass
class Work:
    """What a job has to do, and how: seconds, and a share of its cores that it uses."""

    total_s: float
    busy: float
    checkpoint_s: float
    """How often it saves what it has done; 0 for never."""
    done_s: float = 0.0
    saved_s: float = 0.0


@dataclass
class Figures:
    preemptions: int = 0
    lost_hours: float = 0.0
    """As the records say."""
    really_lost_hours: float = 0.0
    used_hours: float = 0.0
    unmet_hours: float = 0.0
    """Core-hours by which ``prod`` had less than its guarantee and its demand."""
    completed: int = 0

    def add(self, other: Figures) -> Figures:
        return Figures(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass
class Kind:
    """Operations of a pool: how many an hour by night and by day, jobs, cores and hours of a job."""

    night: float
    day: float
    jobs: tuple[int, int]
    cores: tuple[float, ...]
    hours: tuple[float, float]
    can_save: bool = True


KINDS = {
    "batch": Kind(0.3, 0.3, (20, 60), (1.0, 2.0, 4.0), (3.0, 12.0)),
    "research": Kind(0.2, 0.5, (12, 30), (1.0, 2.0), (0.5, 4.0)),
    "prod": Kind(0.1, 0.5, (20, 60), (1.0, 2.0), (0.3, 1.0), can_save=False),
}


class Week(World):
    """The cluster and its users."""

    def __init__(self, seed: int, savers: float = 1.0, **tree: Any) -> None:
        self.savers = savers
        super().__init__(Rules(node_heartbeat_timeout_s=600.0, finished_operation_retention_count=50), now=0.0, **tree)
        self.arrivals, self.draws = random.Random(seed), random.Random(seed + 1)
        self.works: dict[str, Work] = {}
        self.left: dict[str, list[Work]] = {}
        """Operation -> the work of jobs that were stopped."""
        self.kinds: dict[str, tuple[str, float]] = {}
        """Operation -> its pool, and how often its jobs save their work."""
        self.figures = Figures()
        self.create_pool("batch")
        self.create_pool("research")
        self.create_pool("prod", strong_guarantee_resources={"cpu": GUARANTEE})
        for number in range(NODES):
            self.node(f"n{number:02d}", cpu=CORES)

    def arrive(self) -> None:
        hour = self.now / HOUR_S % 24
        for pool, kind in KINDS.items():
            rng = self.arrivals
            chance = (kind.day if 8 <= hour < 20 else kind.night) * STEP_S / HOUR_S
            jobs, cores = rng.randint(*kind.jobs), rng.choice(kind.cores)
            every_s = rng.uniform(600.0, 2400.0) if rng.random() < self.savers and kind.can_save else 0.0
            if rng.random() < chance and self.pool(pool).operation_count < 20:
                self.kinds[self.start(pool, pool, jobs, cores)] = pool, every_s

    def work(self, node: PlayedNode) -> None:
        """A minute of the node's jobs."""
        for job_id, job in list(node.jobs.items()):
            work = self.works.get(job_id) or self.begin(job_id, job)
            work.done_s += STEP_S
            job.cpu_seconds = (job.cpu_seconds or 0.0) + work.busy * job.order.cpu_limit * STEP_S
            if work.checkpoint_s and work.done_s - work.saved_s >= work.checkpoint_s:
                work.saved_s = work.done_s
                job.checkpoint_at = self.now
            if work.done_s >= work.total_s:
                self.figures.completed += 1
                self.figures.used_hours += job.cpu_seconds / HOUR_S
                node.finish(job_id)

    def begin(self, job_id: str, job: PlayedJob) -> Work:
        pool, every_s = self.kinds[job.order.operation_id]
        left = self.left.get(job.order.operation_id)
        if left:
            work = left.pop()
        else:
            work = Work(self.draws.uniform(*KINDS[pool].hours) * HOUR_S, self.draws.uniform(0.2, 1.0), every_s)
        self.works[job_id] = work
        return work

    def lose(self, node: PlayedNode, before: dict[str, PlayedJob]) -> None:
        """Work of jobs that this heartbeat stopped: what was not saved is to be done again."""
        for job_id, job in before.items():
            work = self.works.get(job_id)
            if job_id in node.jobs or work is None or work.done_s >= work.total_s:
                continue
            lost = (work.done_s - work.saved_s) * work.busy * job.order.cpu_limit
            self.figures.really_lost_hours += lost / HOUR_S
            self.figures.used_hours += (job.cpu_seconds or 0.0) / HOUR_S
            work.done_s = work.saved_s
            self.left.setdefault(job.order.operation_id, []).append(work)

    def minute(self) -> None:
        self.now += STEP_S
        self.arrive()
        self.expire()
        self.update()
        for node in self.nodes.values():
            self.work(node)
            before = dict(node.jobs)
            node.beat()
            self.lose(node, before)
        prod = self.pool("prod")
        wanted = min(prod.demand[CPU], GUARANTEE)
        self.figures.unmet_hours += max(wanted - prod.usage[CPU], 0.0) * STEP_S / HOUR_S

    def play(self, days: float) -> Figures:
        for _ in range(int(days * 86_400 / STEP_S)):
            self.minute()
        self.figures.preemptions = sum(self.state.preemption_counts.values())
        self.figures.lost_hours = self.pool("<Root>").lost_core_seconds / HOUR_S
        return self.figures


def compare(days: float, seeds: int, savers: float = 1.0) -> tuple[Figures, Figures]:
    """The sums over ``seeds`` weeks: in the documents' order, and with the cheapest first."""
    plain, cheapest = Figures(), Figures()
    for seed in range(seeds):
        plain = plain.add(Week(seed, savers).play(days))
        cheapest = cheapest.add(Week(seed, savers, preempt_cheapest_first=True).play(days))
    return plain, cheapest


def find_faults(plain: Figures, cheapest: Figures) -> list[str]:
    """What is not as promised, in sentences."""
    found = []
    if cheapest.lost_hours > plain.lost_hours / 2:
        found.append(f"{cheapest.lost_hours:.1f} core-hours lost are more than half of {plain.lost_hours:.1f}")
    if cheapest.unmet_hours > MOST_UNMET * plain.unmet_hours + 1.0:
        found.append(f"the guarantee lacks {cheapest.unmet_hours:.1f} core-hours, without it {plain.unmet_hours:.1f}")
    return found


COLUMNS = (
    ("preempted", "preemptions", ".0f"),
    ("core-hours lost", "lost_hours", ".1f"),
    ("really lost", "really_lost_hours", ".1f"),
    ("used", "used_hours", ".0f"),
    ("missing of the guarantee", "unmet_hours", ".1f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    faults: list[str] = []
    print("| operations that save | order of victims |", *(f"{heading} |" for heading, _, _ in COLUMNS))
    print("|---" * (2 + len(COLUMNS)) + "|")
    for savers, name in ((1.0, "all"), (0.5, "half"), (0.0, "none")):
        both = compare(given.days, given.seeds, savers)
        if savers == 1.0:
            faults = find_faults(*both)
        for figures, order in zip(both, ("latest start first", "`preempt_cheapest_first`"), strict=True):
            cells = (f"{getattr(figures, field):{form}}" for _, field, form in COLUMNS)
            print(f"| {name} | {order} |", *(f"{cell} |" for cell in cells), flush=True)
    if given.check:
        print(*faults, sep="\n", file=sys.stderr)
        raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
