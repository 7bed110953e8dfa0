"""A day of 50 nodes with 20 cores each, one period per minute: every promise is checked at every step.

Strong, burst and relaxed guarantees, FIFO and ephemeral pools; operations come and go over the day, jobs shrink and
grow. Everything follows from a seed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from scheduler_world import PlayedNode, World, assert_consistent

from cpumond.fairshare.resources import CPU, ZERO, add, subtract, sum_vectors
from cpumond.scheduler.decide.starvation import priority_of
from cpumond.scheduler.elements import NON_PREEMPTIBLE, Element, Job, Node, OperationElement
from cpumond.scheduler.model import CommandError, PreemptionRecord, Rules

NODES, CORES, STEP_S = 50, 20.0, 60.0
TOTAL = NODES * CORES
SMALL = 3
"""max_unpreemptible_running_job_count."""

NEAR = 1e-6
LOADS = {
    # pool: (operations per hour by night and by day, most jobs, cores of a job, minutes of a job)
    "prod": (2.0, 6.0, 60, 4.0, 40),
    "burst": (0.5, 2.0, 40, 5.0, 30),
    "relaxed": (2.0, 1.0, 40, 2.0, 50),
    "fifo": (4.0, 2.0, 30, 3.0, 20),
    "users": (2.0, 6.0, 40, 2.5, 30),
    "": (1.0, 3.0, 30, 1.0, 30),
}


class Day(World):
    """The cluster, its users, and a log of all that happens."""

    def __init__(self, seed: int) -> None:
        rules = Rules(node_heartbeat_timeout_s=300.0, finished_operation_retention_count=1_000_000)
        super().__init__(rules, now=0.0, max_unpreemptible_running_job_count=SMALL)
        self.random = random.Random(seed)
        self.log: list[tuple[Any, ...]] = []
        self.ends: dict[str, float] = {}
        self.started: set[str] = set()
        self.kinds: set[str] = set()
        self.wasted: set[str] = set()
        """Jobs that were told to stop by the heartbeat that started them."""
        self.volumes: dict[str, float] = {}
        self.create_pool("prod", strong_guarantee_resources={"cpu": 400}, enable_aggressive_starvation=True)
        self.create_pool("web", "prod", strong_guarantee_resources={"cpu": 250})
        self.create_pool("batch", "prod", weight=2)
        self.create_pool(
            "burst",
            integral_guarantees={
                "guarantee_type": "burst",
                "resource_flow": {"cpu": 100},
                "burst_guarantee_resources": {"cpu": 300},
            },
        )
        self.create_pool("relaxed", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 100}})
        self.create_pool("fifo", mode="fifo", max_running_operation_count=4, weight=2)
        self.create_pool("users", create_ephemeral_subpools=True, resource_limits={"cpu": 300})
        for number in range(NODES):
            self.node(f"n{number:02d}", cpu=CORES)

    # --- what users and jobs do

    def arrive(self) -> None:
        hour = self.now / 3600 % 24
        for pool, (night, day, jobs, cpu, _) in LOADS.items():
            per_hour = day if 8 <= hour < 20 else night
            if self.random.random() >= per_hour * STEP_S / 3600:
                continue
            user = self.random.choice(["ann", "bob", "cy"])
            place = self.random.choice(["web", "batch"]) if pool == "prod" else pool
            weight = self.random.choice([0.5, 1.0, 1.0, 3.0])
            try:
                operation = self.start(place, user, self.random.randint(1, jobs), cpu, weight=weight)
            except CommandError as error:
                self.log.append((self.now, "refused", place, str(error)))
            else:
                self.log.append((self.now, "arrived", place, operation))
        if self.state.operations and self.random.random() < 0.01:
            self.abort(self.random.choice(list(self.state.operations)))

    def work(self, node: PlayedNode) -> None:
        """Jobs end, shrink and grow."""
        for job_id, job in list(node.jobs.items()):
            if job_id not in self.ends:
                pool = job.order.pool if job.order.pool in LOADS else "prod"
                self.ends[job_id] = self.now + 60 * LOADS[pool][4] * self.random.uniform(0.5, 1.5)
            if self.now >= self.ends[job_id]:
                node.finish(job_id, "failed" if self.random.random() < 0.01 else "completed")
            elif self.random.random() < 0.1:
                node.limit(job_id, round(job.order.cpu_limit * self.random.choice([0.2, 0.5, 0.9, 1.0]), 2))

    # --- one minute

    def minute(self) -> None:
        self.now += STEP_S
        self.arrive()
        self.expire()
        self.update()
        self.check_shares()
        for node in self.nodes.values():
            self.work(node)
            self.beat_and_check(node)

    def check_shares(self) -> None:
        tree = self.tree()
        shares = sum_vectors([element.fair_share for element in tree.operations.values()])
        assert max(shares) <= 1 + 1e-9
        for name, cores in (("prod", 400.0), ("web", 250.0)):
            pool = tree.pools[name]
            assert pool.fair_share[CPU] >= min(pool.demand_share[CPU], cores / TOTAL) - NEAR, name
        for pool in tree.pools.values():
            assert pool.fair_share[CPU] * TOTAL <= pool.limits[CPU] + NEAR
        for name in ("burst", "relaxed"):
            volume = tree.pools[name].volume[CPU]
            assert 0.0 <= volume <= max(self.volumes.get(name, 0.0), 100 * 86_400.0) + NEAR
            self.volumes[name] = volume
        self.log.append((self.now, shares, tuple(self.volumes.values())))

    def beat_and_check(self, played: PlayedNode) -> None:
        node = self.state.nodes[played.id]
        counts = {name: len(element.jobs) for name, element in self.tree().operations.items()}
        before = set(node.jobs)
        played.beat()
        fresh = [job for name, job in node.jobs.items() if name not in before]
        records = [record for record in self.state.preemptions if record.at == self.now and record.node_id == node.id]
        for job in fresh:
            self.started.add(job.id)
            self.log.append((self.now, "started", job.id, job.element.name, node.id))
            self.check_start(job, node)
        for record in records:
            if record.job_id not in before:
                self.wasted.add(record.job_id)
                self.started.add(record.job_id)
                fresh.append(self.state.jobs[record.job_id])
            self.log.append((self.now, record.kind, record.job_id, record.preemptor_job_id))
            self.kinds.add(record.kind)
        preempted = [record for record in records if record.kind == "preempted"]
        if preempted:
            self.check_preemption(preempted, node, counts, fresh, alone=len(preempted) == len(records))

    def check_start(self, job: Job, node: Node) -> None:
        """Whoever starts leaves all limits above it, and the node, within what they have."""
        assert min(node.free) >= -NEAR, node.id
        for element in (job.element, *job.element.ancestors()):
            assert min(room(element, ZERO)) >= -NEAR, element.name
        assert job.element.is_running

    def check_preemption(
        self, records: list[PreemptionRecord], node: Node, counts: dict[str, int], fresh: list[Job], alone: bool
    ) -> None:
        """One job is started for the victims, by somebody who starves; all of them were needed and unprotected."""
        (job_id,) = {record.preemptor_job_id for record in records}
        (target,) = [job.element for job in fresh if job.id == job_id]
        (priority,) = {record.priority for record in records}
        assert priority == priority_of(target)
        assert priority in ("normal", "aggressive")
        left = dict(counts)
        for job in fresh:
            left[job.element.name] = left.get(job.element.name, 0) + (job.id != job_id)
        for record in records:
            victim = self.state.jobs[record.job_id]
            assert victim.preemptibility != NON_PREEMPTIBLE
            assert priority == "aggressive" or victim.preemptibility > 1
            assert victim.element is not target
            assert left[record.operation_id] >= SMALL
            left[record.operation_id] -= 1
            if alone:
                freed = victim.usage
                places: list[OperationElement | Element] = [target, *target.ancestors()]
                assert min(subtract(node.free, freed)) < 0 or any(min(room(each, freed)) < 0 for each in places)

    def check_jobs(self) -> None:
        """Every job that was ever started is somewhere, once."""
        assert_consistent(self.state)
        finished = {job for jobs in self.state.finished_jobs.values() for job in jobs}
        assert self.started == finished | set(self.state.jobs)
        assert not finished & set(self.state.jobs)
        on_nodes = [job for node in self.nodes.values() for job in node.jobs]
        assert len(on_nodes) == len(set(on_nodes))
        assert set(on_nodes) <= self.started


def room(element: Element, more: tuple[float, float, float, float, float]) -> list[float]:
    return [limit - used for limit, used in zip(element.limits, add(element.usage, more), strict=True)]


@pytest.mark.timeout(280)
def test_a_day():
    day = Day(1)
    for minute in range(24 * 60):
        day.minute()
        if minute % 20 == 0:
            day.check_jobs()
    day.check_jobs()
    assert not day.wasted
    # the day had everything in it that is checked above
    assert {"preempted", "overcommit"} <= day.kinds
    assert len(day.started) > 3000
    states = [record.state for record in day.state.finished.values()]
    assert {"completed", "aborted"} <= set(states)


def test_the_same_seed_gives_the_same_day():
    logs = []
    for _ in range(2):
        day = Day(7)
        for _ in range(240):
            day.minute()
        logs.append(day.log)
    assert logs[0] == logs[1]
