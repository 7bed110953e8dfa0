"""The backfill week in virtual time: gangs and large jobs wait for room, beside small jobs whose run times differ. All
work follows from a seed alone, the same with backfill and without; nothing is preempted: what runs ends by itself."""

import os
import random
from dataclasses import dataclass, field, replace

from scheduler_world import EASY, PlayedNode, World

from cpumond.scheduler.state import lifecycle

STEP_S = 60.0
HOUR_S = 3600.0
WEEK_S = 7 * 24 * HOUR_S
NODES, CORES = 12, 16.0
LOAD = 0.8
"""Core-hours of small jobs, as a part of what the nodes have."""
GANG_EACH_S = 2.5 * HOUR_S
KINDS = (("count words", 120.0, 0.4, 1.0), ("train", 900.0, 0.7, 2.0), ("simulate", 2700.0, 0.6, 2.0))
"""Title, median of the run time, spread (sigma of its logarithm), cores of small jobs."""


@dataclass(frozen=True)
class Arrival:
    """An operation that a user starts: ``run_s`` of each of its jobs, by cookie."""

    at: float
    title: str
    cores: float
    run_s: tuple[float, ...]
    is_gang: bool = False


def draw_arrivals(seed: int, length_s: float) -> list[Arrival]:
    """All that comes, by time: gangs of four to nine jobs of 10 to 16 cores each, single large jobs, small ones."""
    rng, arrivals = random.Random(seed), list[Arrival]()
    at = HOUR_S
    while at < length_s:
        size = rng.choice((1, 4, 6, 9))
        run_s = rng.uniform(0.3, 1.0) * HOUR_S
        arrivals.append(Arrival(at, "gang", rng.choice((10.0, 12.0, 16.0)), (run_s,) * size, True))
        at += GANG_EACH_S * rng.uniform(0.6, 1.4)
    work = LOAD * NODES * CORES * length_s
    while work > 0.0:
        title, median_s, spread, cores = rng.choice(KINDS)
        run_s = tuple(median_s * rng.lognormvariate(0.0, spread) for _ in range(rng.randint(1, 40)))
        number = rng.randint(1, 1000)
        arrivals.append(Arrival(rng.uniform(0.0, length_s), f"{title} {number}", cores, run_s))
        work -= sum(run_s) * cores
    return sorted(arrivals, key=lambda each: each.at)


@dataclass
class Outcome:
    """Core-hours and seconds; ``waits`` of gangs by their number, ``alone``: what the same gang would have waited
    without backfill from where it came on."""

    idle_hours: float = 0.0
    idle_beside_work_hours: float = 0.0
    lost_hours: float = 0.0
    waits: dict[int, float] = field(default_factory=dict)
    alone: dict[int, float] = field(default_factory=dict)
    small_wait_hours: float = 0.0
    """Core-hours of small jobs that waited, integrated."""
    backfilled: int = 0
    overstays: int = 0
    returned: int = 0


class PlayedBackfill:
    """One run of that work."""

    def __init__(self, seed: int, length_s: float, **options: object) -> None:
        self.world = World(
            replace(EASY, node_heartbeat_timeout_s=600.0, heartbeat_period_s=STEP_S,
                    finished_operation_retention_count=100_000), 0.0,
            fair_share_starvation_timeout=10**9, gang_reservation_timeout=6 * 3_600_000,
            max_running_operation_count_per_pool=1000, max_operation_count_per_pool=10_000, **options,
        )  # fmt: skip
        self.world.create_pool("gangs", weight=3)
        self.world.create_pool("small")
        self.nodes = [self.world.node(f"n{number:02}", CORES) for number in range(NODES)]
        self.arrivals = draw_arrivals(seed, length_s)
        self.length_s = length_s
        self.next = 0
        self.known: dict[str, tuple[int, Arrival]] = {}
        """Operation -> its number and what it is."""
        self.outcome = Outcome()
        self.asked: list[tuple[int, int, int]] = []
        """Gang, copy of this process, and where it answers."""

    def play(self, compares: bool = False) -> Outcome:
        """``compares``: each gang is tried without backfill, too, in a copy of this process."""
        while self.world.now < self.length_s:
            before = self.next
            self._step()
            for number in range(before, self.next) if compares else ():
                if self.arrivals[number].is_gang:
                    self._ask_copy(number)
        for number, child, pipe in self.asked:
            with os.fdopen(pipe, "rb") as answer:
                self.outcome.alone[number] = float(answer.read())
            os.waitpid(child, 0)
        outcome = self.outcome
        ended = [job for jobs in self.world.state.finished_jobs.values() for job in jobs.values()]
        filled = [job for job in ended if job.backfill_until is not None]
        outcome.backfilled = len(filled)
        outcome.overstays = sum(job.finish_time > (job.backfill_until or 0.0) for job in filled)
        records = [each for each in self.world.state.preemptions if each.kind == "preempted"]
        outcome.returned = len(records)
        outcome.lost_hours = sum(each.lost_core_seconds for each in records) / HOUR_S
        return outcome

    def _step(self) -> None:
        world = self.world
        while self.next < len(self.arrivals) and self.arrivals[self.next].at <= world.now + STEP_S:
            each = self.arrivals[self.next]
            pool, spec = ("gangs", {"is_gang": True}) if each.is_gang else ("small", {})
            started = world.start(pool, jobs=len(each.run_s), cpu=each.cores, title=each.title, **spec)
            self.known[started] = self.next, each
            self.next += 1
        world.step(STEP_S)
        for node in self.nodes:
            self._end_jobs(node)
        self._measure()

    def _end_jobs(self, node: PlayedNode) -> None:
        for job_id, job in list(node.jobs.items()):
            number, arrival = self.known[job.order.operation_id]
            run_s = arrival.run_s[int(job.order.variables["YT_JOB_COOKIE"])]
            job.cpu_seconds = (self.world.now - job.started_at) * job.order.cpu_limit
            if arrival.is_gang and number not in self.outcome.waits:
                self.outcome.waits[number] = job.started_at - arrival.at
            if self.world.now >= job.started_at + run_s:
                node.finish(job_id)

    def _measure(self) -> None:
        free = sum(max(node.free[1], 0.0) for node in self.world.state.nodes.values())
        waiting = sum(
            number * task.cpu_limit
            for each in self.world.state.operations.values()
            if not each.record.is_gang
            for task in each.record.tasks
            for number in (each.needed.get(task.name, 0),)
        )
        self.outcome.idle_hours += free * STEP_S / HOUR_S
        self.outcome.idle_beside_work_hours += min(free, waiting) * STEP_S / HOUR_S
        self.outcome.small_wait_hours += waiting * STEP_S / HOUR_S

    def _ask_copy(self, number: int) -> None:
        """How long would the gang that has just come wait without backfill? A copy of this process finds out."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                self.world.set_tree(enable_backfill=False)
                for job in list(self.world.state.jobs.values()):
                    if job.is_active and job.backfill_until is not None:
                        lifecycle.stop(self.world.state, job, "aborted", "", self.world.now)
                last = min(self.world.now + 24 * HOUR_S, self.length_s)
                while number not in self.outcome.waits and self.world.now < last:
                    self._step()
                os.write(write, repr(self.outcome.waits.get(number, float("inf"))).encode())
            finally:
                os._exit(0)
        os.close(write)
        self.asked.append((number, child, read))
