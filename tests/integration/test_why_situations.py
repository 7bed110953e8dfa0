"""Clusters with a known bottleneck: the answer's first sentence names it, and its change frees what was foretold.

A scheduler with its store and played nodes; changes go through its commands, as the API's and the command line's do.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from scheduler_world import GIB, ServedNode, StillClock

from cpumond.cli.scheduler.arguments import read_edits
from cpumond.scheduler.answers.idle import IdleReport
from cpumond.scheduler.answers.idle_trials import find_idle
from cpumond.scheduler.model import ROOT_POOL, Rules
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.commands import (
    ChangeTree,
    ConfigCommand,
    CreatePool,
    CreateTree,
    Edit,
)
from cpumond.scheduler.settings.operations import AbortOperation, StartOperation, UpdateOperation
from cpumond.scheduler.state.node_commands import CordonNode, UncordonNode
from cpumond.scheduler.store.sqlite import open_sqlite_store

TREE = "default"
FOUR = ("n0", "n1", "n2", "n3")
SIX = (*FOUR, "n4", "n5")


class Cluster:
    """A running scheduler without a network, and what it is told."""

    def __init__(self, path: str) -> None:
        self.clock = StillClock()
        self.scheduler = Scheduler(Rules(), open_sqlite_store(path), self.clock)
        self.nodes: list[ServedNode] = []

    async def set_tree(self, **options: Any) -> None:
        """Options of the tree that a new store has."""
        await self.do(ChangeTree(TREE, tuple(Edit((name,), value) for name, value in options.items())))

    async def do(self, command: Any, user: str = "ann") -> str:
        return (await self.scheduler.execute(command, user)).id

    async def pool(self, name: str, parent: str = ROOT_POOL, tree: str = TREE, **attributes: Any) -> None:
        await self.do(CreatePool(tree, name, parent, attributes))

    async def add_nodes(self, cpu: float, *names: str, memory: int = 2**34, **more: Any) -> None:
        for name in names:
            node = ServedNode(self.scheduler, cpu, name, memory=memory, **more)
            await node.register()
            self.nodes.append(node)

    async def start(
        self, pool: str = "", jobs: int = 1, cpu: float = 1.0, user: str = "ann", task: Any = None, **spec: Any
    ) -> str:
        table = {"command": "true", "job_count": jobs, "cpu_limit": cpu, **(task or {})}
        return await self.do(StartOperation({"tasks": {"t": table}, **({"pool": pool} if pool else {}), **spec}), user)

    async def start_some(self, count: int, pool: str = "", user: str = "ann") -> None:
        """So many operations of one job of two cores."""
        for _ in range(count):
            await self.start(pool, cpu=2.0, user=user)

    async def settle(self, steps: int = 4, seconds: float = 1.0) -> None:
        for _ in range(steps):
            self.clock.at += seconds
            await self.scheduler.update_all()
            for node in self.nodes:
                await node.beat()

    def report(self, tree: str = TREE) -> IdleReport:
        return find_idle(self.scheduler.state, self.scheduler.state.trees[tree], self.clock.now())

    async def apply(self, report: IdleReport) -> None:
        """What the first cause advises: its commands, or the command lines of an operation."""
        change = report.causes[0].change
        for command in change.commands:
            await self.do(msgspec.convert(command, ConfigCommand))
        if not change.commands:
            for line in change.shell:
                words = shlex.split(line)
                assert words[:3] == ["cpumond", "operation", "set"]
                [edit] = read_edits(words[4:])
                outer, inner = edit["path"]
                await self.do(UpdateOperation(words[3], {outer: {inner: edit["value"]}}))


class Expected:
    """``words`` of the first sentence; how what it advises is done where that is no command."""

    def __init__(
        self,
        kind: str,
        pool: str,
        *words: str,
        by_hand: Callable[[IdleReport], Awaitable[None]] | None = None,
        watched: str = ROOT_POOL,
    ) -> None:
        self.kind, self.pool, self.words, self.by_hand, self.watched = kind, pool, words, by_hand, watched


async def count_limit(c: Cluster) -> Expected:
    await c.pool("research", max_running_operation_count=8)
    await c.add_nodes(16.0, *SIX)
    await c.start_some(21, "research")
    return Expected("max_running_operation_count", "research", "pool research is 8", "raise it to 21", "13 operations")


async def count_limit_that_hides_another(c: Cluster) -> Expected:
    await c.pool("lab", max_running_operation_count=6)
    await c.pool("team", "lab", max_running_operation_count=5)
    await c.start_some(12, "team")
    await c.add_nodes(16.0, *FOUR)
    return Expected("max_running_operation_count", "team", "pool team is 5", "pool lab is 6", "raise it to 12")


async def limit_of_a_user(c: Cluster) -> Expected:
    await c.start_some(14, user="eve")
    await c.add_nodes(16.0, *FOUR)
    return Expected("max_running_operation_count", "eve", "pool eve is 8 by default", "14")


async def limit_of_users_subpools(c: Cluster) -> Expected:
    await c.pool("shared", create_ephemeral_subpools=True, max_running_operation_count=40)
    for user in ("eve", "tom"):
        await c.start_some(10, "shared", user)
    await c.add_nodes(16.0, *FOUR)
    return Expected("max_running_operation_count", "shared", "sub-pool of pool shared is 8", "raise it to 10")


async def count_limit_of_the_tree(c: Cluster) -> Expected:
    await c.set_tree(max_running_operation_count=3)
    await c.pool("research", max_running_operation_count=20)
    await c.start_some(10, "research")
    await c.add_nodes(16.0, *FOUR)
    return Expected("max_running_operation_count", ROOT_POOL, "tree default is 3", "raise it to 10")


async def resource_limits(c: Cluster) -> Expected:
    await c.pool("research", resource_limits={"cpu": 20})
    await c.start("research", jobs=30, cpu=2.0)
    await c.add_nodes(12.0, *FOUR)
    return Expected("resource_limits", "research", "resource_limits of pool research allow 20 cpu")


async def share_of_a_parent(c: Cluster) -> Expected:
    await c.pool("lab", max_share_ratio=0.25)
    await c.pool("team", "lab")
    await c.start("team", jobs=30, cpu=2.0)
    await c.add_nodes(16.0, *FOUR)
    return Expected("max_share_ratio", "lab", "max_share_ratio of pool lab is 0.25")


async def limits_of_an_operation(c: Cluster) -> Expected:
    await c.pool("research")
    await c.start("research", jobs=30, cpu=2.0, resource_limits={"cpu": 8})
    await c.add_nodes(16.0, "n0", "n1", "n2")
    return Expected("resource_limits", "research", "resource_limits of an operation allow 8 cpu")


async def tag(c: Cluster) -> Expected:
    await c.set_tree(nodes_filter="fast")
    await c.pool("research")
    await c.start("research", jobs=40)
    await c.add_nodes(12.0, "n0", tags=("fast",))
    await c.add_nodes(8.0, "n1", "n2", "n3", tags=("slow",))
    return Expected("tags", "research", "nodes_filter of tree default", "n1", "slow")


async def memory(c: Cluster) -> Expected:
    await c.pool("research")
    first = await c.start("research", jobs=40, task={"memory_limit": 7 * GIB})
    await c.add_nodes(16.0, *FOUR, memory=16 * GIB)

    async def by_hand(report: IdleReport) -> None:
        assert "at most 0.33 GiB memory" in report.causes[0].change.text
        more = 40 - len(c.scheduler.state.jobs)
        await c.start("research", jobs=more, task={"memory_limit": GIB // 4})
        assert first in c.scheduler.state.operations

    return Expected("memory", "research", "lack memory", "reserves 3.5 GiB", by_hand=by_hand)


async def slots(c: Cluster) -> Expected:
    await c.pool("research")
    await c.start("research", jobs=40)
    await c.add_nodes(16.0, *FOUR, user_slots=5)

    async def by_hand(report: IdleReport) -> None:
        assert "20 more user_slots" in report.causes[0].change.text
        for node in c.nodes:
            node.user_slots = 10
            await node.register()

    return Expected("user_slots", "research", "no user_slots left", by_hand=by_hand)


async def fragmentation(c: Cluster) -> Expected:
    await c.pool("research")
    await c.start("research", jobs=4, cpu=4.5)
    await c.add_nodes(8.0, *FOUR)
    await c.settle()
    big = await c.start("research", jobs=10, cpu=6.0)

    async def by_hand(report: IdleReport) -> None:
        assert "at most 3.5 cores" in report.causes[0].change.text
        await c.do(AbortOperation(big))
        await c.start("research", jobs=17, cpu=3.5)

    return Expected("fragmentation", "research", "pieces of at most 3.5 cores", by_hand=by_hand)


async def spare(c: Cluster) -> Expected:
    def keep(cores: float) -> None:
        c.scheduler.state.rules = replace(c.scheduler.state.rules, spare=(1.0, cores, 0.0, 0.0, 0.0))

    keep(1.0)
    await c.pool("research")
    await c.start("research", jobs=4, cpu=7.25)
    await c.add_nodes(8.0, *FOUR)
    await c.settle()
    await c.start("research", jobs=12, cpu=0.25)

    async def by_hand(report: IdleReport) -> None:
        keep(0.25)

    return Expected("spare", "research", "min_spare_job_resources_on_node", by_hand=by_hand)


async def gpu_nodes(c: Cluster) -> Expected:
    """The tree of GPU nodes is idle, operations of the default one wait."""
    await c.set_tree(nodes_filter="!gpu")
    await c.do(CreateTree("gpu", {"nodes_filter": "gpu"}))
    await c.pool("research")
    await c.pool("research", tree="gpu")
    waiting = await c.start("research", jobs=40)
    await c.add_nodes(12.0, "n0")
    await c.add_nodes(16.0, "g0", tags=("gpu",))

    async def by_hand(report: IdleReport) -> None:
        await c.do(AbortOperation(waiting))
        await c.start("research", jobs=40, pool_trees=["default", "gpu"])

    return Expected("tags", "research", "g0", "tree gpu", by_hand=by_hand)


async def gang(c: Cluster) -> Expected:
    await c.pool("research")
    await c.add_nodes(8.0, "n0", "n1", "n2")
    whole = await c.start("research", jobs=10, cpu=4.0, is_gang=True)

    async def by_hand(report: IdleReport) -> None:
        assert report.causes[0].change.operations == [whole]
        await c.do(AbortOperation(whole))
        await c.start("research", jobs=6, cpu=4.0, is_gang=True)

    return Expected("gang", "research", "all of its 10 jobs fit at once", "only 6 fit", by_hand=by_hand)


async def cordoned_nodes(c: Cluster) -> Expected:
    await c.pool("research")
    await c.add_nodes(8.0, "n0", "n1", "n2")
    for name in ("n1", "n2"):
        await c.do(CordonNode(name, "new disks"))
    await c.start("research", jobs=12, cpu=2.0)

    async def by_hand(report: IdleReport) -> None:
        assert report.causes[0].change.shell == ["cpumond node uncordon n1", "cpumond node uncordon n2"]
        for name in ("n1", "n2"):
            await c.do(UncordonNode(name))

    return Expected("cordon", "research", "nodes n1, n2 are cordoned", by_hand=by_hand)


async def graceful(c: Cluster) -> Expected:
    """What a large job of another operation cannot use, a graceful one does not take beyond its share."""
    await c.set_tree(count_unplaceable_jobs_in_demand=True)
    await c.pool("research")
    await c.add_nodes(16.0, "n0", "n1")
    mild = await c.start("research", jobs=40, preemption_mode="graceful")
    await c.start("research", jobs=10, cpu=20.0)

    async def by_hand(report: IdleReport) -> None:
        assert report.causes[0].change.operations == [mild]
        await c.start("research", jobs=24)

    return Expected("graceful", "research", "is graceful", by_hand=by_hand)


async def leave_a_guarantee_unmet(c: Cluster, dev_jobs: int) -> None:
    """The node's 16 cores are taken by so many jobs of ``dev`` when ``prod``, with 12 guaranteed, wants them."""
    await c.pool("prod", strong_guarantee_resources={"cpu": 12})
    await c.pool("dev")
    await c.add_nodes(16.0, "n0")
    await c.start("dev", jobs=dev_jobs, cpu=16.0 / dev_jobs)
    await c.settle()
    await c.start("prod", jobs=6, cpu=2.0)


async def count_rule(c: Cluster) -> Expected:
    """The others' operation has fewer jobs than the count rule protects."""
    await c.set_tree(guarantee_tolerance=0.0)
    await leave_a_guarantee_unmet(c, 8)
    await c.settle(steps=10, seconds=5.0)
    return Expected(
        "max_unpreemptible_running_job_count", "prod", "pool prod is allocated 0 of 12 guaranteed cores",
        "tree default is 10", watched="prod",
    )  # fmt: skip


async def preemptions_forbidden(c: Cluster) -> Expected:
    await c.set_tree(max_preemptions_per_minute=0)
    await leave_a_guarantee_unmet(c, 16)
    await c.settle(steps=10, seconds=5.0)
    return Expected("max_preemptions_per_minute", "prod", "0 of 12 guaranteed cores", "is 0", watched="prod")


async def late_starvation(c: Cluster) -> Expected:
    await c.set_tree(fair_share_starvation_timeout=3_600_000)
    await leave_a_guarantee_unmet(c, 16)
    return Expected("fair_share_starvation_timeout", "prod", "tree default is 3600 s", watched="prod")


SITUATIONS = (
    count_limit, count_limit_that_hides_another, limit_of_a_user, limit_of_users_subpools,
    count_limit_of_the_tree, resource_limits, share_of_a_parent, limits_of_an_operation, tag, memory, slots,
    fragmentation, spare, gpu_nodes, gang, cordoned_nodes, graceful, count_rule,
    preemptions_forbidden,
    late_starvation,
)  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_the_first_sentence_names_the_bottleneck_and_its_change_frees_what_was_foretold(situation, tmp_path):
    async def work() -> None:
        cluster = Cluster(str(tmp_path / "scheduler.db"))
        expected = await situation(cluster)
        await cluster.settle()
        report = cluster.report()
        first = report.causes[0]
        assert (first.kind, first.pool) == (expected.kind, expected.pool), report.sentence
        for word in expected.words:
            assert word in report.sentence, report.sentence
        before = _cores_of(cluster, expected.watched)
        await (expected.by_hand(report) if expected.by_hand else cluster.apply(report))
        # Where jobs must be taken from others, that takes its time-outs.
        await cluster.settle(*((20, 6.0) if expected.watched != ROOT_POOL else (6, 1.0)))
        freed = _cores_of(cluster, expected.watched) - before
        assert first.cores > 0.0
        assert freed == pytest.approx(first.cores, rel=0.1), (report.sentence, freed)

    asyncio.run(work())


def _cores_of(cluster: Cluster, pool: str) -> float:
    """What jobs of a pool use, of all trees for the root."""
    trees = cluster.scheduler.state.trees
    return sum(tree.root.usage[1] for tree in trees.values()) if pool == ROOT_POOL else trees[TREE].pools[pool].usage[1]
