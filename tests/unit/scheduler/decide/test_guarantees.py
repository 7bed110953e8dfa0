"""Strong guarantees that hold, on played nodes (semantics.md 6.10): before and after ``guarantee_tolerance``."""

import pytest
from scheduler_world import World

from cpumond.scheduler.answers.idle import in_pool
from cpumond.scheduler.answers.idle_trials import find_idle
from cpumond.scheduler.answers.pool import describe_pool

COUNT = "max_unpreemptible_running_job_count is 10"
SHARES = "aggressive_preemption_satisfaction_threshold 0.5"


def make_two_halves(**tree: object) -> tuple[World, list[str]]:
    """12 cores, half guaranteed to each of two pools: one has all with operations of one job of 6 cores each."""
    options = {"fair_share_starvation_timeout": 1500, "preemptive_scheduling_backoff": 200, **tree}
    world = World(max_unpreemptible_running_job_count=10, **{k: v for k, v in options.items() if v is not None})
    world.create_pools(*"ab", strong_guarantee_resources={"cpu": 6})
    world.node("n1", cpu=12)
    first = [world.start("a", cpu=6.0) for _ in range(2)]
    world.settle_down()
    return world, [*first, world.start("b", cpu=6.0)]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({}, COUNT),
        ({"max_unpreemptible_running_job_count": 0}, SHARES),
        ({"max_unpreemptible_running_job_count": 0, "enable_aggressive_starvation": True}, SHARES),
    ],
)
def test_6_10_beside_one_large_job_the_guarantee_needs_the_option(options, cause):
    world, ids = make_two_halves()
    world.set_tree(**options)
    world.settle_down(20)
    assert [len(world.jobs_of(each)) for each in ids] == [1, 1, 0]
    report = in_pool(find_idle(world.state, world.tree(), world.now), "b", frozenset(), frozenset())
    why = cause if cause is COUNT else "others' jobs are within the fair "
    assert report.sentence.startswith(f"pool b is allocated 0 of 6 guaranteed cores while others hold the CPU: {why}")
    assert cause in report.sentence
    assert report.causes[0].change.shell == ["cpumond tree set default guarantee_tolerance=1"]
    world.set_tree(guarantee_tolerance=1.0)
    world.settle_down(20)
    assert [len(world.jobs_of(each)) for each in ids] == [1, 0, 1]
    (record,) = world.state.preemptions
    assert (record.priority, record.operation_id, record.preemptor_pool) == ("guarantee", ids[1], "b")
    assert record.why.endswith(
        '0.0% of the cluster is allocated to pool "b", whose strong guarantee is 50.0%; 100.0% is allocated to pool '
        '"a", whose strong guarantee is 50.0%'
    )
    world.settle_down(100)
    assert len(world.state.preemptions) == 1, "nobody takes it back"


@pytest.mark.parametrize(("tolerance", "allotted"), [(None, 9), (0.8, 9), (0.95, 10), (1.0, 10)])
def test_6_10_a_guarantee_means_all_of_itself(tolerance, allotted):
    """10 of 20 cores are guaranteed, 9 are there; others have jobs of one core each, which may be taken."""
    world = World(max_unpreemptible_running_job_count=0, fair_share_starvation_timeout=1000)
    world.create_pool("prod", strong_guarantee_resources={"cpu": 10}, resource_limits={"cpu": 9})
    world.create_pool("other", strong_guarantee_resources={"cpu": 10})
    world.node("n1", cpu=20)
    world.start("prod", jobs=20)
    world.run("other", jobs=20)
    world.set_pool("prod", resource_limits={"cpu": 20})
    world.set_tree(**({} if tolerance is None else {"guarantee_tolerance": tolerance}))
    world.settle_down(60)
    assert world.cores("prod") == allotted
    if tolerance is None:
        report = in_pool(find_idle(world.state, world.tree(), world.now), "prod", frozenset(), frozenset())
        told = "starving begins below 0.8 of it (fair_share_starvation_tolerance); set guarantee_tolerance"
        assert told in report.sentence


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"strong_guarantee_resources": {"cpu": 6}}, [2, 0]),  # has no more than its own
        ({"min_run_time": 600_000}, [2, 0]),  # not yet
        ({}, [0, 1]),  # all that it has is beyond
    ],
)
def test_6_10_what_a_guarantee_may_take(other, expected):
    world = World(fair_share_starvation_timeout=1000, max_unpreemptible_running_job_count=10, guarantee_tolerance=1.0)
    world.create_pool("a", **other)
    world.create_pool("b", strong_guarantee_resources={"cpu": 6})
    world.node("n1", cpu=6)
    world.node("n2", cpu=6).has(6.0)
    ids = [world.start("a", jobs=2, cpu=3.0)]
    world.settle_down()
    ids.append(world.start("b", cpu=6.0))
    world.settle_down(60)
    assert [len(world.jobs_of(each)) for each in ids] == expected
    if expected[0]:
        told = "has no job beyond its own strong guarantee" if "min_run_time" not in other else "by min_run_time"
        assert told in describe_pool(world.pool("b"), world.now)


def test_6_10_no_more_than_its_fair_share_is_taken_for_a_guarantee():
    """A guarantee of 1 core does not get a job of 10 cores beside others of the same weight."""
    world, ids = make_two_halves(guarantee_tolerance=1.0)
    world.abort(ids[2])
    world.set_pool("a", strong_guarantee_resources={"cpu": 0})
    world.set_pool("b", strong_guarantee_resources={"cpu": 1})
    assert world.jobs_of(world.run("b", cpu=10.0, steps=100)) == []
    assert not world.state.preemptions


def test_6_10_a_gang_gets_its_guarantee_on_several_nodes():
    world = World(fair_share_starvation_timeout=1000, max_unpreemptible_running_job_count=10, guarantee_tolerance=1.0)
    world.create_pool("a")
    world.create_pool("b", strong_guarantee_resources={"cpu": 6})
    world.add_nodes(4, cpu=3)
    ids = [world.start("a", cpu=3.0) for _ in range(4)]
    world.settle_down()
    gang = world.run("b", jobs=2, cpu=3.0, is_gang=True, steps=60)
    assert len(world.jobs_of(gang)) == 2
    assert sum(len(world.jobs_of(each)) for each in ids) == len(world.state.preemptions) == 2


def test_6_10_others_take_nothing_that_is_guaranteed():
    """Aggressive starvation goes down to half of a fair share, and ends at what is guaranteed."""
    left = {}
    for tolerance in (None, 1.0):
        world = World(
            fair_share_starvation_timeout=1000, enable_aggressive_starvation=True,
            max_unpreemptible_running_job_count=0, **({} if tolerance is None else {"guarantee_tolerance": tolerance}),
        )  # fmt: skip
        world.create_pool("a", strong_guarantee_resources={"cpu": 8})
        world.create_pool("b")
        world.node("n1", cpu=10)
        world.run("a", jobs=10)
        world.run("b", jobs=1, cpu=3.0, steps=60)
        left[tolerance] = world.cores("a"), len(world.state.preemptions)
    assert left == {None: (7.0, 3), 1.0: (10.0, 0)}
