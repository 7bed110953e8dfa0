"""A week of a small cluster in virtual time, whose savings are known: what was extra is added up on the nodes at each
step, from what their jobs really used, while the history only looks now and then."""

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from scheduler_world import EASY, PlayedJob, PlayedNode, World

from cpumond.scheduler.history.collector import Collector
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.model import ROOT_POOL

STEP_S = 60.0
WEEK_S = 7 * 86_400.0
NODES, CORES = 2, 16.0
PERIOD_S = 60.0


@dataclass
class Truth:
    """By pool, the root, too: core-seconds used beyond the orders that fit, held back, and lost."""

    extra_used: dict[str, float] = field(default_factory=dict)
    held_back: dict[str, float] = field(default_factory=dict)

    def add(self, what: dict[str, float], pool: str, amount: float) -> None:
        for name in (pool, ROOT_POOL):
            what[name] = what.get(name, 0.0) + amount


class PlayedWeek:
    """Pool "orders" orders all cores and uses half of them, pool "waits" has short jobs for whatever is free."""

    def __init__(self, path: str | None = None, until: float = 0.0, seed: int = 1, length_s: float = WEEK_S) -> None:
        self.rng = random.Random(seed)
        self.until = until or datetime(2026, 3, 9, tzinfo=UTC).timestamp()
        self.world = World(replace(EASY, node_heartbeat_timeout_s=600.0), self.until - length_s)
        for pool in ("orders", "waits"):
            self.world.create_pool(pool)
        self.nodes = [self.world.node(f"n{number}", CORES) for number in range(NODES)]
        self.store = HistoryStore(path, 2 * length_s, PERIOD_S, 2**28, self.world.now)
        self.collector = Collector(self.world.now, 10_000)
        self.truth = Truth()
        self.pools: dict[str, str] = {}
        self.uses: dict[str, float] = {}
        self.ends: dict[str, float] = {}

    def play(self) -> Truth:
        looked = self.world.now
        while self.world.now < self.until - 1e-6:
            self._keep_busy("orders", 6, 2.0, 4)
            self._keep_busy("waits", 8, 1.0, 4)
            self.world.step(STEP_S)
            for node in self.nodes:
                self._run(node)
            if self.world.now - looked >= PERIOD_S:
                looked = self.world.now
                tick = self.collector.collect(self.world.state, self.world.now)
                assert tick is not None
                self.store.add(tick)
        return self.truth

    def _keep_busy(self, pool: str, active: int, cores: float, jobs: int) -> None:
        living = [each for each, its in self.pools.items() if its == pool and each in self.world.state.operations]
        for _ in range(active - len(living)):
            self.pools[self.world.start(pool, jobs=jobs, cpu=cores)] = pool

    def _run(self, node: PlayedNode) -> None:
        """Until the next step: what each job uses, what its monitor makes of it, what is extra."""
        total = 0.0
        for job_id, job in sorted(node.jobs.items(), key=lambda item: (item[1].started_at, item[0])):
            order = job.order.cpu_limit
            pool = self.pools[job.order.operation_id]
            used = self._use(job_id, job)
            total += order
            extra = min(max(total - CORES, 0.0), order) / order
            self.truth.add(self.truth.extra_used, pool, extra * used * STEP_S)
            late = 0.02 * used if job.current_cpu_limit < order and self.rng.random() < 0.1 else 0.0
            self.truth.add(self.truth.held_back, pool, late * STEP_S)
            job.cpu_seconds = (job.cpu_seconds or 0.0) + used * STEP_S
            job.ordered_cpu_seconds = (job.ordered_cpu_seconds or 0.0) + order * STEP_S
            given_up = (order - job.current_cpu_limit) * STEP_S
            job.reclaimed_cpu_seconds = (job.reclaimed_cpu_seconds or 0.0) + given_up
            job.late_cpu_seconds = job.throttled_cpu_seconds = (job.late_cpu_seconds or 0.0) + late * STEP_S
            job.smoothed_cpu_usage = used
            job.current_cpu_limit = min(order, max(0.25, 1.2 * used))
            if self.world.now >= self.ends[job_id]:
                node.finish(job_id)

    def _use(self, job_id: str, job: PlayedJob) -> float:
        """It wanders; a new job runs for a while that nobody knows."""
        order = job.order.cpu_limit
        if job_id not in self.ends:
            self.ends[job_id] = self.world.now + self.rng.expovariate(1.0 / (6000.0 if order == 1.0 else 20_000.0))
            self.uses[job_id] = self.rng.uniform(0.2, 0.8)
        self.uses[job_id] = min(max(self.uses[job_id] + self.rng.uniform(-0.1, 0.1), 0.05), 1.0)
        return self.uses[job_id] * order
