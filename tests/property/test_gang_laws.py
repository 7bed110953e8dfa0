"""Laws of gangs on random clusters: never in part, whatever happens; nobody starves by what is kept free for one."""

import contextlib
import random

import pytest
from examples import WHOLE, examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from scheduler_world import EASY, PlayedNode, World, assert_consistent

from cpumond.scheduler.model import CommandError, Rules
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.state.node_commands import CordonNode, DrainNode, UncordonNode

long = examples(120 if WHOLE else 72, suppress_health_check=[HealthCheck.too_slow])
few = examples(24, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)
CLUSTERS = 30 if WHOLE else 4
"""So many are looked at, whether what the laws are about happens in them."""


class Cluster(World):
    """Nodes that come, go, fail and get full; gangs of several tasks among other operations."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        spare = rng.choice([EASY.spare, EASY.spare, (1.0, 1.0, 0.0, 0.0, 0.0)])
        rules = Rules(spare=spare, waiting_job_timeout_s=5.0, node_heartbeat_timeout_s=4.0)
        super().__init__(
            rules,
            nodes_filter="!b",
            max_unpreemptible_running_job_count=rng.choice([0, 0, 3]),
            fair_share_starvation_timeout=rng.choice([1000, 5000]),
            node_reconnection_timeout=rng.choice([0, 10_000]),
            enable_aggressive_starvation=rng.random() < 0.5,
            preempt_cheapest_first=rng.random() < 0.5,
            gang_reservation_timeout=rng.choice([0, 5000, 20_000]),
            preemptive_scheduling_backoff=rng.choice([0, 3000]),
        )
        for name in ("a", "b"):
            guarantee = {"cpu": rng.choice([0, 6, 12])}
            self.create_pool(name, strong_guarantee_resources=guarantee, weight=rng.choice([1, 4]))
        for number in range(rng.randint(2, 5)):
            self.node(f"n{number}", cpu=rng.choice([2, 4, 8]), memory=rng.choice([4, 16]))
        self.create_tree("second", nodes_filter="b", max_unpreemptible_running_job_count=0)
        for number in range(rng.choice([0, 0, 3])):
            self.node(f"m{number}", cpu=rng.choice([2, 4, 8]), memory=16, tags=("b",))

    def begin(self) -> None:
        rng = self.random
        tasks = {
            f"t{i}": {
                "command": "true", "job_count": rng.randint(1, 4), "cpu_limit": rng.choice([0.5, 1, 2, 3]),
                "memory_limit": rng.choice([0, 1, 2]),
            }
            for i in range(rng.choice([1, 1, 2]))
        }  # fmt: skip
        spec = {"tasks": tasks, "pool": rng.choice("ab"), "is_gang": rng.random() < 0.6, "max_failed_job_count": 50}
        if rng.random() < 0.3:
            spec["min_run_time"] = 3000
        if rng.random() < 0.2:
            spec["resource_limits"] = {"cpu": 4}
        if rng.random() < 0.1:
            spec["preemption_mode"] = "graceful"
        if rng.random() < 0.2:
            for task in tasks.values():
                task["job_time_limit"] = 4000
        if rng.random() < 0.3:
            spec["pool_trees"] = ["default", "second"]
        self.do(StartOperation(spec))

    def happen(self) -> None:
        rng, what = self.random, self.random.random()
        node = rng.choice(list(self.nodes.values()))
        if what < 0.25:
            self.begin()
        elif what < 0.55 and node.jobs:
            node.finish(rng.choice(list(node.jobs)), rng.choice(["completed", "completed", "failed", "lost"]))
        elif what < 0.6:
            node.jobs.clear()
            node.stopping.clear()
        elif what < 0.65:
            node.has_no_room = not node.has_no_room
            for job in [] if node.has_no_room else list(node.waiting):
                node.begin(job)
        elif what < 0.7:
            self.restart()
        elif what < 0.75:
            node.restart_agent()
        elif what < 0.8 and self.state.operations:
            chosen = rng.choice(list(self.state.operations))
            rng.choice([self.abort, self.complete, self.suspend, self.suspend_now, self.resume])(chosen)
        elif what < 0.85:
            node.keeps_stopping = not node.keeps_stopping
            for job in [] if node.keeps_stopping else list(node.stopping):
                node.let_go(job)
        elif what < 0.9:
            self.set_pool(rng.choice("ab"), resource_limits={"cpu": rng.choice([2, 6, 100])})
        elif what < 0.94:
            self.maintain(node)
        elif what < 0.98 and node.jobs:
            node.limit(rng.choice(list(node.jobs)), rng.choice([0.2, 1.0, 3.0]))

    def maintain(self, node: PlayedNode) -> None:
        if self.random.random() < 0.5:
            self.do(self.random.choice([CordonNode, DrainNode, UncordonNode])(node.id))
        else:
            node.tags = self.random.choice([(), (), ("b",)])
            node.register()

    def suspend_now(self, operation: str) -> None:
        self.suspend(operation, abort_running_jobs=True)

    def check(self, rounds: dict[str, float]) -> None:
        """All jobs that a gang needs run or none, and those that run began together."""
        for operation in self.state.operations.values():
            if not operation.record.is_gang:
                continue
            jobs = self.jobs_of(operation.id)
            assert not jobs or not operation.needed, f"gang {operation.id} runs in part"
            began = {job.start_time for job in jobs}
            # One of the same run is told to stop where the job that it replaced completed after all (7.4).
            known = [
                job
                for job in self.state.jobs.values()
                if job.stop and job.element.operation is operation and job.start_time not in began
            ]
            # A restart brings back for a moment what its node lost while it was stopping.
            old = [job.id for job in known if job.id in self.nodes[job.node.id].jobs]
            assert not jobs or not old, f"gang {operation.id} meets jobs of its last run"
            assert len(began) <= 1
            assert len({job.element for job in jobs}) <= 1
            for job in jobs:
                rounds[job.id] = job.start_time
        gangs = self.state.gangs
        living = {element for operation in self.state.operations.values() for element in operation.elements.values()}
        assert {kept.element for kept in gangs.reservations.values()} | {*gangs.looked} | {*gangs.rests} <= living


@long
@given(seeds)
def test_a_gang_never_runs_in_part(seed):
    world, rounds = Cluster(seed), {}
    for _ in range(60):
        with contextlib.suppress(CommandError):
            world.happen()
        silent = world.random.choice(list(world.nodes.values())) if world.random.random() < 0.15 else None
        world.step(1.0, *(node for node in world.nodes.values() if node is not silent))
        world.check(rounds)
        assert_consistent(world.state)


def test_random_clusters_are_worth_trying():
    ran = preempted = restarted = 0
    for seed in range(CLUSTERS):
        world, rounds = Cluster(seed), {}
        for _ in range(60):
            with contextlib.suppress(CommandError):
                world.happen()
            world.step()
            world.check(rounds)
        ran += len(rounds)
        gangs = {record.operation_id for record in world.state.preemptions if record.kind == "preempted"}
        preempted += any(world.record(each).is_gang for each in gangs)
        restarted += any(
            "its gang starts again" in job.reason
            for jobs in world.state.finished_jobs.values()
            for job in jobs.values()
        )
    assert ran > CLUSTERS * 50 / 3
    assert preempted >= CLUSTERS / 10
    assert restarted > CLUSTERS / 3


@pytest.mark.parametrize("timeout_ms", [0, 3000, 30_000] if WHOLE else [0, 30_000])
@few
@given(seeds)
def test_everybody_gets_something_whatever_is_kept_free(timeout_ms, seed):
    """Small operations go on while gangs wait, and a gang that fits into its share gets its turn. Nobody starves here,
    so that only room that is kept free, or luck, lets one begin."""
    rng = random.Random(seed)
    world = World(
        max_unpreemptible_running_job_count=0, fair_share_starvation_timeout=1_000_000_000,
        gang_reservation_timeout=timeout_ms,
    )  # fmt: skip
    for number in range(rng.randint(2, 4)):
        world.node(f"n{number}", cpu=4)
    small = [world.start("s", jobs=100_000) for _ in range(2)]
    world.settle_down()
    gangs = []
    for number in range(rng.choice([1, 2])):
        world.create_pool(f"g{number}", weight=4)
        gangs.append(world.start(f"g{number}", jobs=len(world.nodes), cpu=1.5, is_gang=True))
    served: set[str] = set()
    for _ in range(60):
        for node in world.nodes.values():
            for job_id, job in list(node.jobs.items()):
                if world.now - job.started_at >= (5.0 if job.order.cpu_limit > 1.0 else 1.0 + rng.random() * 6):
                    node.finish(job_id)
        world.step()
        served.update(each for each in gangs if each not in world.state.operations or world.jobs_of(each))
    assert all(world.record(each).counts["t"].completed > 30 for each in small)
    if timeout_ms == 30_000:
        assert served == set(gangs)


@few
@given(seeds)
def test_one_step_decides_where_free_room_holds_the_gang(seed):
    rng = random.Random(seed)
    world = World(max_unpreemptible_running_job_count=0)
    for number in range(rng.randint(1, 6)):
        world.node(f"n{number}", cpu=rng.randint(1, 8))
    cpu = rng.choice([1.0, 2.0, 3.0])
    room = sum(node.cpu // cpu for node in world.nodes.values())
    jobs = rng.randint(1, 20)
    world.step()
    gang = world.start(jobs=jobs, cpu=cpu, is_gang=True)
    world.step()
    assert len(world.jobs_of(gang)) == (jobs if jobs <= room else 0)
