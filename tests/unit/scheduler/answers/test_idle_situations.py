"""Clusters with a known bottleneck: the answer's first sentence names it, and its change frees what was foretold."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest
from scheduler_world import GIB, World

from cpumond.cli.scheduler.arguments import read_edits
from cpumond.scheduler.answers.idle import Advice
from cpumond.scheduler.answers.idle_trials import find_idle
from cpumond.scheduler.model import ROOT_POOL, Rules
from cpumond.scheduler.service.stored import FIRST_TREE
from cpumond.scheduler.settings.commands import ConfigCommand
from cpumond.scheduler.state.node_commands import CordonNode, UncordonNode


class Expected(NamedTuple):
    """``words`` of the first sentence; how what it advises is done where that is no command, and whose CPU grows."""

    kind: str
    pool: str
    words: tuple[str, ...]
    by_hand: Callable[[Advice], None] | None = None
    watched: str = ROOT_POOL


def add_nodes(w: World, count: int, cpu: float, memory: int = 2**34, first: int = 0, **more: object) -> None:
    for number in range(first, first + count):
        w.node(f"n{number}", cpu, memory, **more)  # type: ignore[arg-type]


def start_some(w: World, count: int, pool: str = "", user: str = "ann") -> None:
    for _ in range(count):
        w.start(pool, user, cpu=2.0)


def count_limit_that_hides_another(w: World) -> Expected:
    w.create_pool("lab", max_running_operation_count=6)
    w.create_pool("team", "lab", max_running_operation_count=5)
    start_some(w, 12, "team")
    add_nodes(w, 4, 16.0)
    return Expected("max_running_operation_count", "team", ("pool team is 5", "pool lab is 6", "raise it to 12"))


def limit_of_a_user(w: World) -> Expected:
    start_some(w, 14, user="eve")
    add_nodes(w, 4, 16.0)
    return Expected("max_running_operation_count", "eve", ("pool eve is 8 by default", "14"))


def limit_of_users_subpools(w: World) -> Expected:
    w.create_pool("shared", create_ephemeral_subpools=True, max_running_operation_count=40)
    for user in ("eve", "tom"):
        start_some(w, 10, "shared", user)
    add_nodes(w, 4, 16.0)
    return Expected("max_running_operation_count", "shared", ("sub-pool of pool shared is 8", "raise it to 10"))


def count_limit_of_the_tree(w: World) -> Expected:
    w.set_tree(max_running_operation_count=3)
    w.create_pool("research", max_running_operation_count=20)
    start_some(w, 10, "research")
    add_nodes(w, 4, 16.0)
    return Expected("max_running_operation_count", ROOT_POOL, ("tree default is 3", "raise it to 10"))


def resource_limits(w: World) -> Expected:
    w.create_pool("research", resource_limits={"cpu": 20})
    w.start("research", jobs=30, cpu=2.0)
    add_nodes(w, 4, 12.0)
    return Expected("resource_limits", "research", ("resource_limits of pool research allow 20 cpu",))


def share_of_a_parent(w: World) -> Expected:
    w.create_pool("lab", max_share_ratio=0.25)
    w.create_pool("team", "lab")
    w.start("team", jobs=30, cpu=2.0)
    add_nodes(w, 4, 16.0)
    return Expected("max_share_ratio", "lab", ("max_share_ratio of pool lab is 0.25",))


def limits_of_an_operation(w: World) -> Expected:
    w.create_pool("research")
    w.start("research", jobs=30, cpu=2.0, resource_limits={"cpu": 8})
    add_nodes(w, 3, 16.0)
    return Expected("resource_limits", "research", ("resource_limits of an operation allow 8 cpu",))


def tag(w: World) -> Expected:
    w.set_tree(nodes_filter="fast")
    w.create_pool("research")
    w.start("research", jobs=40)
    add_nodes(w, 1, 12.0, tags=("fast",))
    add_nodes(w, 3, 8.0, first=1, tags=("slow",))
    return Expected("tags", "research", ("nodes_filter of tree default", "n1", "slow"))


def memory(w: World) -> Expected:
    w.create_pool("research")
    w.start("research", jobs=40, memory=7 * GIB)
    add_nodes(w, 4, 16.0, memory=16 * GIB)

    def by_hand(change: Advice) -> None:
        assert "at most 0.33 GiB memory" in change.text
        w.start("research", jobs=40 - len(w.state.jobs), memory=GIB // 4)

    return Expected("memory", "research", ("lack memory", "reserves 3.5 GiB"), by_hand)


def slots(w: World) -> Expected:
    w.create_pool("research")
    w.start("research", jobs=40)
    add_nodes(w, 4, 16.0, user_slots=5)

    def by_hand(change: Advice) -> None:
        assert "20 more user_slots" in change.text
        for node in w.nodes.values():
            node.user_slots = 10
            node.register()

    return Expected("user_slots", "research", ("no user_slots left",), by_hand)


def fragmentation(w: World) -> Expected:
    w.create_pool("research")
    w.start("research", jobs=4, cpu=4.5)
    add_nodes(w, 4, 8.0)
    w.settle_down()
    big = w.start("research", jobs=10, cpu=6.0)

    def by_hand(change: Advice) -> None:
        assert "at most 3.5 cores" in change.text
        w.abort(big)
        w.start("research", jobs=17, cpu=3.5)

    return Expected("fragmentation", "research", ("pieces of at most 3.5 cores",), by_hand)


def spare(w: World) -> Expected:
    def keep(cores: float) -> None:
        w.state.rules = replace(w.state.rules, spare=(1.0, cores, 0.0, 0.0, 0.0))

    keep(1.0)
    w.create_pool("research")
    w.start("research", jobs=4, cpu=7.25)
    add_nodes(w, 4, 8.0)
    w.settle_down()
    w.start("research", jobs=12, cpu=0.25)
    return Expected("spare", "research", ("min_spare_job_resources_on_node",), lambda _: keep(0.25))


def gpu_nodes(w: World) -> Expected:
    """The tree of GPU nodes is idle, operations of the default one wait."""
    w.set_tree(nodes_filter="!gpu")
    w.create_tree("gpu", nodes_filter="gpu")
    w.create_pool("research")
    w.create_pool("research", tree="gpu")
    waiting = w.start("research", jobs=40)
    add_nodes(w, 1, 12.0)
    w.node("g0", 16.0, 2**34, tags=("gpu",))

    def by_hand(_: Advice) -> None:
        w.abort(waiting)
        w.start("research", jobs=40, pool_trees=["default", "gpu"])

    return Expected("tags", "research", ("g0", "tree gpu"), by_hand)


def gang(w: World) -> Expected:
    w.create_pool("research")
    add_nodes(w, 3, 8.0)
    whole = w.start("research", jobs=10, cpu=4.0, is_gang=True)

    def by_hand(change: Advice) -> None:
        assert change.operations == [whole]
        w.abort(whole)
        w.start("research", jobs=6, cpu=4.0, is_gang=True)

    return Expected("gang", "research", ("all of its 10 jobs fit at once", "only 6 fit"), by_hand)


def cordoned_nodes(w: World) -> Expected:
    w.create_pool("research")
    add_nodes(w, 3, 8.0)
    for name in ("n1", "n2"):
        w.do(CordonNode(name, "new disks"))
    w.start("research", jobs=12, cpu=2.0)

    def by_hand(change: Advice) -> None:
        assert change.shell == ["cpumond node uncordon n1", "cpumond node uncordon n2"]
        for name in ("n1", "n2"):
            w.do(UncordonNode(name))

    return Expected("cordon", "research", ("nodes n1, n2 are cordoned",), by_hand)


def graceful(w: World) -> Expected:
    """What a large job of another operation cannot use, a graceful one does not take beyond its share."""
    w.set_tree(count_unplaceable_jobs_in_demand=True)
    w.create_pool("research")
    add_nodes(w, 2, 16.0)
    mild = w.start("research", jobs=40, preemption_mode="graceful")
    w.start("research", jobs=10, cpu=20.0)

    def by_hand(change: Advice) -> None:
        assert change.operations == [mild]
        w.start("research", jobs=24)

    return Expected("graceful", "research", ("is graceful",), by_hand)


def leave_a_guarantee_unmet(w: World, dev_jobs: int, seconds: int) -> None:
    """The node's 16 cores are taken by so many jobs of ``dev`` when ``prod``, with 12 guaranteed, wants them."""
    w.create_pool("prod", strong_guarantee_resources={"cpu": 12})
    w.create_pool("dev")
    add_nodes(w, 1, 16.0)
    w.run("dev", jobs=dev_jobs, cpu=16.0 / dev_jobs)
    w.start("prod", jobs=6, cpu=2.0)
    for _ in range(0, seconds, 5):
        w.step(5.0)


def count_rule(w: World) -> Expected:
    """The others' operation has fewer jobs than the count rule protects."""
    w.set_tree(guarantee_tolerance=0.0)
    leave_a_guarantee_unmet(w, 8, seconds=50)
    words = "pool prod is allocated 0 of 12 guaranteed cores", "tree default is 10"
    return Expected("max_unpreemptible_running_job_count", "prod", words, watched="prod")


def preemptions_forbidden(w: World) -> Expected:
    w.set_tree(max_preemptions_per_minute=0)
    leave_a_guarantee_unmet(w, 16, seconds=50)
    return Expected("max_preemptions_per_minute", "prod", ("0 of 12 guaranteed cores", "is 0"), watched="prod")


def late_starvation(w: World) -> Expected:
    w.set_tree(fair_share_starvation_timeout=3_600_000)
    leave_a_guarantee_unmet(w, 16, seconds=0)
    return Expected("fair_share_starvation_timeout", "prod", ("tree default is 3600 s",), watched="prod")


SITUATIONS = (
    count_limit_that_hides_another, limit_of_a_user, limit_of_users_subpools, count_limit_of_the_tree,
    resource_limits, share_of_a_parent, limits_of_an_operation, tag, memory, slots, fragmentation, spare, gpu_nodes,
    gang, cordoned_nodes, graceful, count_rule, preemptions_forbidden, late_starvation,
)  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_the_first_sentence_names_the_bottleneck_and_its_change_works(situation):
    world = World(Rules(), **FIRST_TREE)
    expected = situation(world)
    world.settle_down(4)
    report = find_idle(world.state, world.tree(), world.now)
    first = report.causes[0]
    assert (first.kind, first.pool) == (expected.kind, expected.pool), report.sentence
    assert all(word in report.sentence for word in expected.words), report.sentence
    before = cores_of(world, expected.watched)
    apply(world, first.change, expected)
    # Where jobs must be taken from others, that takes its time-outs.
    for _ in range(20 if expected.watched != ROOT_POOL else 6):
        world.step(6.0 if expected.watched != ROOT_POOL else 1.0)
    freed = cores_of(world, expected.watched) - before
    assert first.cores > 0.0
    assert freed == pytest.approx(first.cores, rel=0.1), report.sentence


def apply(world: World, change: Advice, expected: Expected) -> None:
    """What a cause advises: its commands, or the command lines of an operation, or by hand."""
    if expected.by_hand:
        return expected.by_hand(change)
    for command in change.commands:
        world.do(msgspec.convert(command, ConfigCommand))
    for line in () if change.commands else change.shell:
        words = shlex.split(line)
        assert words[:3] == ["cpumond", "operation", "set"]
        [edit] = read_edits(words[4:])
        outer, inner = edit["path"]
        world.set_operation(words[3], **{outer: {inner: edit["value"]}})
    return None


def cores_of(world: World, pool: str) -> float:
    if pool != ROOT_POOL:
        return world.cores(pool)
    return sum(world.cores(ROOT_POOL, tree) for tree in world.state.trees)
