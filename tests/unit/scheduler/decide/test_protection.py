"""What protects the jobs of others from an operation that starves, cause by cause, in words (semantics.md 6.4, 6.5)."""

from typing import Any

from scheduler_builders import World, give, starve

from cpumond.fairshare.resources import ZERO
from cpumond.scheduler.decide.preemption import Targets, plan_preemption
from cpumond.scheduler.decide.protection import describe_protections, find_protections
from cpumond.scheduler.decide.swap import TargetPriority
from cpumond.scheduler.elements import OperationElement, end_job

NOW = 1000.0


def make_world(rich: dict[str, Any] | None = None, poor: dict[str, Any] | None = None, **tree: Any) -> World:
    """A node of 10 cores full of jobs of "big" in pool "rich"; "late" in pool "poor" starves, both have 5 cores."""
    world = World(**tree)
    node = world.node(cpu=10.0)
    world.pool("rich", **(rich or {}))
    world.pool("poor", **(poor or {}))
    big, late = world.operation("big", "rich", needs=10), world.operation("late", "poor", needs=5)
    world.jobs(big, node, 10)
    for element in (big, late, *world.tree.pools.values()):
        give(element, 0.5)
    starve(late)
    return world


def explain(world: World, priority: TargetPriority = "normal") -> str:
    return "\n".join(describe_protections(world.tree.operations["late"], priority, NOW))


def causes(world: World, priority: TargetPriority = "normal") -> dict[tuple[str, str], int]:
    found = find_protections(world.tree.operations["late"], priority, NOW)
    return {(each.cause, each.element.name): each.jobs for each in found}


def take_jobs(element: OperationElement, left: int) -> None:
    """As if only ``left`` jobs had been started."""
    for job in list(element.jobs.values())[left:]:
        end_job(job)


def test_6_4_the_count_rule_names_the_option_its_value_and_the_operation():
    world = make_world(max_unpreemptible_running_job_count=11)
    assert causes(world) == {("count", "big"): 10}
    assert explain(world) == (
        "10 jobs of others are protected by their number (operation big: 10): an operation with fewer than 11 jobs "
        'loses none (max_unpreemptible_running_job_count of tree "default"); lower it, 0 turns it off'
    )


def test_6_4_the_count_rule_of_an_operation_is_named_as_its_own():
    world = make_world(max_unpreemptible_running_job_count=20, strict_unpreemptible_running_job_count=False)
    other = world.operation("own", "rich", max_unpreemptible_running_job_count=1)
    world.jobs(other, world.tree.nodes["n0"], 1)
    take_jobs(world.tree.operations["big"], 0)
    assert "with at most 1 jobs loses none (max_unpreemptible_running_job_count of operation own)" in explain(world)


def test_6_4_the_lists_name_threshold_share_and_what_aggression_could_take():
    world = make_world(rich={"non_preemptible_resource_usage_threshold": {"cpu": 4}}, poor={})
    give(world.tree.operations["big"], 0.7)
    give(world.tree.pools["rich"], 0.5)
    assert causes(world) == {("threshold", "big"): 4, ("aggressive", "big"): 3, ("free", "big"): 3}
    text = explain(world)
    assert (
        "operation big keeps 4 jobs of its non-preemptible list, within 0.5 of its fair share "
        '(aggressive_preemption_satisfaction_threshold of tree "default"), or within '
        'non_preemptible_resource_usage_threshold of pool "rich", 4 cpu; lower that'
    ) in text
    assert (
        "operation big keeps 3 jobs within its fair share; aggressive starvation could reduce it to 0.5 "
        'of that share, but enable_aggressive_starvation of pool "poor" is false'
    ) in text
    assert "3 jobs of others may be preempted (operation big: 3) if those of one node free enough" in text
    assert "every 5 s (preemptive_scheduling_backoff)" in text


def test_6_4_without_a_threshold_the_fair_share_alone_makes_the_list():
    world = make_world(preemption_check_satisfaction=False)
    give(world.tree.operations["big"], 1.0)
    assert causes(world) == {("list", "big"): 5, ("aggressive", "big"): 5}
    assert "non_preemptible_resource_usage_threshold" not in explain(world)


def test_6_5_a_pool_at_its_share_is_named_with_usage_and_share():
    world = make_world()
    give(world.tree.pools["rich"], 1.0)
    assert causes(world) == {("share", "rich"): 10}
    assert explain(world) == (
        '100.0% of the cluster is allocated to pool "rich", whose fair share is 100.0%: it has no more than its '
        'share and keeps its 10 jobs (preemption_satisfaction_threshold of tree "default" is 1); aggressive starvation '
        'could reduce it to 0.5 of that share, but enable_aggressive_starvation of pool "poor" is false'
    )


def test_6_5_who_forbids_aggression_is_named_where_it_is_set():
    world = make_world(rich={"allow_aggressive_preemption": False}, poor={"enable_aggressive_starvation": True})
    give(world.tree.pools["rich"], 1.0)
    assert 'but pool "rich" forbids aggressive preemption (allow_aggressive_preemption = false)' in explain(world)
    assert causes(world, "aggressive") == {("forbids", "rich"): 10}
    assert explain(world, "aggressive") == (
        'pool "rich" forbids aggressive preemption (allow_aggressive_preemption = false): it keeps 10 jobs '
        "within its fair share; set it to true to preempt them"
    )


def test_6_5_the_tree_is_named_where_it_forbids_aggression():
    world = make_world(allow_aggressive_preemption=False)
    give(world.tree.operations["big"], 0.8)
    give(world.tree.pools["rich"], 0.2)
    assert causes(world, "aggressive")["forbids", "<Root>"] == 4
    assert 'tree "default" forbids aggressive preemption' in explain(world, "aggressive")


def test_6_5_one_that_starves_itself_and_a_graceful_one():
    world = make_world()
    starve(world.tree.pools["rich"])
    assert causes(world) == {("starving", "rich"): 10}
    assert 'pool "rich" starves, too, and keeps its 10 jobs: preemption_check_starvation' in explain(world)
    world = make_world()
    graceful = world.operation("soft", "rich", preemption_mode="graceful")
    world.jobs(graceful, world.tree.nodes["n0"], 2)
    assert causes(world)["graceful", "soft"] == 2
    assert "operation soft keeps its 2 jobs: its preemption_mode is graceful" in explain(world)


def test_6_5_pools_above_both_protect_only_without_conditional_preemption():
    lists = {("free", "big"): 5, ("aggressive", "big"): 2, ("list", "big"): 3}
    for enabled, expected in ((True, lists), (False, {("share", "top"): 10})):
        world = World(enable_conditional_preemption=enabled)
        node = world.node(cpu=10.0)
        world.pool("top")
        big, late = world.operation("big", "top", needs=10), world.operation("late", "top", needs=5)
        world.jobs(big, node, 10)
        for element, fair_share in ((big, 0.5), (late, 0.5), (world.tree.pools["top"], 1.0)):
            give(element, fair_share)
        starve(late)
        assert causes(world) == expected


def test_many_operations_are_summed_up_and_none_is_told_of():
    world = make_world(max_unpreemptible_running_job_count=50)
    for number in range(5):
        world.jobs(world.operation(f"o{number}", "rich"), world.tree.nodes["n0"], 1)
    told = "(operation big: 10, operation o0: 1, operation o1: 1 and 3 more)"
    assert "15 jobs of others are protected by their number" in explain(world)
    assert told in explain(world)
    empty = make_world()
    take_jobs(empty.tree.operations["big"], 0)
    assert explain(empty) == "no other operation has jobs in this tree that it could preempt"


def test_what_is_told_as_free_is_what_a_node_would_take():
    for tree in ({}, {"max_unpreemptible_running_job_count": 11}):
        world = make_world(**tree)
        targets = Targets([(world.tree.operations["late"], "normal")])
        plan = plan_preemption(world.tree.nodes["n0"], targets, 100.0, ZERO)
        assert (plan is not None) == (("free", "big") in causes(world))


def test_6_4_min_run_time_is_told_with_how_long_it_still_protects():
    world = make_world(rich={"min_run_time": 600_000})
    for number, job in enumerate(world.tree.operations["big"].jobs.values()):
        job.began_at = NOW - 420.0 - 600.0 * (number % 2)
    assert causes(world)["time", "big"] == 2
    assert "operation big keeps 2 jobs: protected for 3 min more by min_run_time" in explain(world)
    assert causes(world)["free", "big"] == 3
