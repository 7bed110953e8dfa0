"""Protected jobs, what blocks preemption, one attempt on a node, limits and overcommit (semantics.md 1.9, 6)."""

from typing import Any

import msgspec
import pytest
from scheduler_builders import World, amount, give, make_world, starve

from cpumond.core.wire import AgentAbout
from cpumond.fairshare.resources import RESOURCES, ZERO
from cpumond.scheduler import elements
from cpumond.scheduler.decide import victims
from cpumond.scheduler.decide.gangs import plan_for_gang
from cpumond.scheduler.decide.preemption import MOST_SEARCHES, PreemptionPlan, Targets, plan_preemption
from cpumond.scheduler.decide.preemption_record import make_record
from cpumond.scheduler.decide.swap import TargetPriority
from cpumond.scheduler.model import Task

N, A, P = elements.NON_PREEMPTIBLE, elements.AGGRESSIVELY_PREEMPTIBLE, elements.PREEMPTIBLE


def lists(element: elements.OperationElement) -> list[int]:
    victims.sort_jobs(element)
    return [job.preemptibility for job in element.jobs.values()]


def plan_for(
    node: elements.Node, *targets: elements.OperationElement, priority: TargetPriority = "normal", now: float = 100.0
) -> PreemptionPlan | None:
    return plan_preemption(node, Targets((target, priority) for target in targets), now, ZERO)


def limit(element: Any, cpu: float) -> None:
    element.limits = (float("inf"), cpu, float("inf"), float("inf"), float("inf"))


def victims_of(plan: PreemptionPlan | None) -> list[elements.Job]:
    assert plan is not None
    return [job for job, _ in plan.victims]


LAX = {"aggressive_preemption_satisfaction_threshold": 0.2, "preemption_satisfaction_threshold": 1.5}


@pytest.mark.parametrize(
    ("fair", "demand", "tree", "expected"),
    [
        ((0.4, 0.4), (1.0, 1.0), {}, [N, N, A, A, P, P]),  # borders are met exactly
        ((0.5, 0.5), (1.0, 1.0), {}, [N, N, N, A, A, P]),  # the job that crosses a border is on the protected side
        ((0.3, 0.3), (1.0, 1.0), {}, [N, N, A, P, P, P]),
        ((0.0, 0.0), (1.0, 1.0), {}, [P, P, P, P, P, P]),
        ((0.9, 0.9), (1.0, 1.0), {}, [N, N, N, N, N, A]),
        ((0.4, 0.4), (1.0, 1.0), LAX, [N, A, A, A, A, A]),
        ((0.2, 0.2), (1.0, 1.0), LAX, [N, A, A, P, P, P]),
        ((0.2, 0.9), (1.0, 1.0), {}, [N, A, P, P, P, P]),  # below on one resource does not protect
        ((0.2, 0.4), (1.0, 0.4), {}, [N, A, P, P, P, P]),  # nor one whose demand is covered
        ((0.4, 0.4), (0.4, 0.4), {}, [N, N, A, A, A, A]),  # the whole demand is: no job is preemptible
        ((0.0, 0.0), (0.0, 0.0), {}, [P, P, P, P, P, P]),  # of no demand at all
    ],
)
def test_6_4_three_lists_in_the_order_of_start(fair, demand, tree, expected):
    """``fair`` and ``demand``: of cpu and memory; each of the jobs uses a tenth of both."""
    world, node = make_world(cpu=10.0, memory=10.0, **tree)
    element = world.operation("o", needs=9, memory=1)
    world.jobs(element, node, 6)
    element.fair_share, element.demand_share, element.lists_are_old = amount(*fair), amount(*demand), True
    assert lists(element) == expected


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        ({}, [P, P, P, P]),
        ({"cpu": 2.0}, [N, N, P, P]),
        ({"cpu": 2.5}, [N, N, N, P]),
        ({"cpu": 3.0, "memory": 2.0}, [N, N, P, P]),
        ({"cpu": 3.0, "gpu": 0.0}, [P, P, P, P]),
        ({"gpu": 1.0}, [N, N, N, N]),
    ],
)
def test_6_4_jobs_below_the_non_preemptible_threshold(threshold, expected):
    world, node = make_world(memory=10.0, non_preemptible_resource_usage_threshold=threshold)
    element = world.operation("o", needs=9, memory=1)
    world.jobs(element, node, 4)
    give(element, 0.0)
    assert lists(element) == expected


def test_6_4_lists_are_made_again_only_when_old():
    world, node = make_world()
    element = world.operation("o", needs=9)
    first, second = world.jobs(element, node, 2)
    give(element, 0.0)
    assert lists(element) == [P, P]
    element.fair_share = amount(0.2)
    assert lists(element) == [P, P]
    element.lists_are_old = True
    assert lists(element) == [N, A]
    # 8: a lowered limit lets more jobs fit below the border
    elements.change_usage(first, amount(0.4))
    assert lists(element) == [N, N]
    assert second.preemptibility == N


@pytest.mark.parametrize(
    ("tree", "own", "strict", "protected"),
    [
        (10, None, True, 9),
        (10, None, False, 10),
        (10, 5, True, 4),
        (5, 10, True, 4),
        (0, None, True, -1),
        (0, None, False, 0),
        (None, 5, True, -1),
    ],
)
def test_6_4_small_operations_are_protected_by_their_number_of_jobs(tree, own, strict, protected):
    world = World(max_unpreemptible_running_job_count=tree, strict_unpreemptible_running_job_count=strict)
    element = world.operation("o", max_unpreemptible_running_job_count=own)
    assert [count for count in range(20) if victims.is_protected_by_count(element, count)] == list(range(protected + 1))


def test_6_4_an_operation_cannot_lose_more_jobs_than_the_count_rule_leaves():
    for count, order, goes in ((3, 2.0, True), (3, 3.0, False), (2, 3.0, True), (4, 1.0, True), (5, 1.0, False)):
        world, node = make_world(cpu=4.0, max_unpreemptible_running_job_count=count)
        rich, poor = world.operation("rich", needs=9), world.operation("poor", needs=9, cpu=order)
        world.jobs(rich, node, 4)
        give(rich, 0.0)
        give(poor, 0.5)
        assert (plan_for(node, poor) is not None) is goes, (count, order)


def pools_world(**settings: Any) -> tuple[World, elements.Node, elements.OperationElement, elements.OperationElement]:
    """Ten cores, all used by "rich" below rich_pool; "poor" below poor_pool has nothing and starves."""
    world, node = make_world(**settings)
    for name in ("rich", "poor"):
        give(world.pool(f"{name}_pool"), 0.5)
        give(world.operation(name, f"{name}_pool", needs=9), 0.5)
    rich, poor = world.tree.operations["rich"], world.tree.operations["poor"]
    world.jobs(rich, node, 10)
    starve(poor)
    return world, node, rich, poor


@pytest.mark.parametrize(
    ("fair", "priority", "goes"),
    [
        (0.99, "normal", True),
        (1.0, "normal", False),  # exactly its fair share
        (1.0, "aggressive", True),
        (1.99, "aggressive", True),
        (2.0, "aggressive", False),  # exactly half of it
    ],
)
def test_6_5_b_a_pool_is_not_pushed_below_its_share_or_half_of_it(fair, priority, goes):
    world, node, _, poor = pools_world()
    give(world.tree.pools["rich_pool"], fair, demand=9.0)
    assert (plan_for(node, poor, priority=priority) is not None) is goes


@pytest.mark.parametrize("option", ["preemption_check_starvation", "preemption_check_satisfaction"])
def test_6_5_a_and_b_can_be_switched_off(option):
    for is_checked in (True, False):
        world, node, rich, poor = pools_world(**{option: is_checked})
        if option == "preemption_check_starvation":
            starve(rich)
        else:
            give(world.tree.pools["rich_pool"], 1.9, demand=9.0)
        assert (plan_for(node, poor) is None) is is_checked


def test_6_5_b_the_loss_of_the_first_victims_counts_for_the_next_ones():
    world, node = make_world()
    give(world.pool("p"), 0.7)
    give(world.pool("q"), 0.3)
    for name in ("a", "b"):
        give(world.operation(name, "p", needs=1), 0.3)
        world.jobs(world.tree.operations[name], node, 5)
    poor = give(world.operation("poor", "q", needs=1, cpu=4.0), 0.3)
    # three jobs are above the share of the pool, the operations would give four
    assert plan_for(node, poor) is None
    less = give(world.operation("less", "q", needs=1, cpu=3.0), 0.3)
    assert len(victims_of(plan_for(node, poor, less))) == 3


def test_6_5_aggressive_preemption_takes_the_second_list_where_allowed():
    for allowed in (True, False):
        world, node = make_world()
        give(world.pool("p", allow_aggressive_preemption=allowed), 1.0)
        rich, poor = world.operation("rich", "p", needs=9), world.operation("poor", needs=1)
        world.jobs(rich, node, 10)
        give(rich, 0.99)
        give(world.tree.pools["p"], 0.9)
        give(poor, 0.1)
        assert lists(rich) == [N] * 5 + [A] * 5
        assert plan_for(node, poor) is None
        assert (plan_for(node, poor, priority="aggressive") is not None) is allowed


def conditional_world(
    **settings: Any,
) -> tuple[World, elements.Node, elements.OperationElement, elements.OperationElement]:
    """A pool that starves, one of its operations has more than its share, the other one nothing."""
    world, node = make_world(cpu=4.0, **settings)
    world.jobs(world.operation("far"), world.node("far", cpu=6.0), 6)
    starve(give(world.pool("p"), 0.8))
    rich, poor = world.operation("rich", "p", needs=9), world.operation("poor", "p", needs=9)
    world.jobs(rich, node, 4)
    give(rich, 0.2)
    give(poor, 0.2)
    return world, node, rich, poor


def test_6_5_inside_a_pool_that_blocks_its_own_operations_help_each_other():
    world, node, rich, poor = conditional_world()
    assert victims_of(plan_for(node, poor)) == [list(rich.jobs.values())[-1]]
    assert plan_for(node, give(world.operation("outside", needs=1), 0.5)) is None


# --- 6.6, one attempt


def duel(
    sizes: list[float], order: float, *, fair: float = 0.1, cpu: float = 10.0, **settings: Any
) -> tuple[World, elements.Node, list[elements.Job], elements.OperationElement]:
    """ "rich" has jobs of these sizes, "poor" wants one of ``order`` cores and starves."""
    world, node = make_world(cpu=cpu, **settings)
    rich, poor = world.operation("rich", needs=9), world.operation("poor", needs=9, cpu=order)
    jobs = [world.job(rich, node, size) for size in sizes]
    give(rich, fair)
    give(poor, 0.5)
    starve(poor, since=58.0)
    return world, node, jobs, poor


def refuse_reclaimed(element: elements.OperationElement) -> None:
    operation = element.operation
    operation.record = msgspec.structs.replace(operation.record, allow_reclaimed=False)


def test_1_10_for_one_that_refuses_reclaimed_cpu_room_is_made():
    """Half of the node may be used, but all of it is ordered."""
    _, node, jobs, poor = duel([1.0] * 10, 2.0)
    for job in jobs:
        elements.change_usage(job, amount(0.5))
    assert victims_of(plan_for(node, poor)) == []
    refuse_reclaimed(poor)
    assert victims_of(plan_for(node, poor)) == [jobs[9], jobs[8]]
    node.foreign_ordered_cores = 1.0
    assert victims_of(plan_for(node, poor)) == [jobs[9], jobs[8], jobs[7]]


def test_1_10_a_failure_for_one_that_refuses_reclaimed_cpu_is_its_own():
    world, node, jobs, poor = duel([1.0] * 10, 2.0)
    for job in jobs:
        elements.change_usage(job, amount(0.5))
    refuse_reclaimed(poor)
    node.foreign_ordered_cores = 9.0
    other = give(world.operation("other", needs=9, cpu=2.0), 0.5)
    starve(other, since=58.0)
    plan = plan_for(node, poor, other)
    assert (plan.element, plan.victims) == (other, ())


@pytest.mark.parametrize(("sizes", "taken"), [([1.0] * 10, 2), ([2.0] * 5, 1)])  # one that ordered 2 cores makes both
def test_1_10_for_a_gang_that_refuses_reclaimed_cpu_room_is_made(sizes, taken):
    _, node, jobs, poor = duel(sizes, 1.0)
    for job in jobs:
        elements.change_usage(job, amount(0.5))
    poor.operation.needed = {"main": 2}
    rooms = {node: node.free}
    assert plan_for_gang(poor, "normal", rooms, 100.0, ZERO) is None  # they fit without victims
    refuse_reclaimed(poor)
    plan = plan_for_gang(poor, "normal", rooms, 100.0, ZERO)
    assert [job for job, _ in plan.victims] == jobs[::-1][:taken]
    assert len(plan.places) == 2


def test_6_6_a_job_of_another_tree_on_the_node_is_left_alone():
    other = World()
    stranger = other.operation("stranger")
    world, node = make_world(cpu=1.0)
    other.job(stranger, node)
    assert plan_for(node, give(world.operation("poor", needs=1), 0.5)) is None


def test_6_6_jobs_with_a_lowered_limit_first_among_the_protected_ones():
    for gap_first in (False, True):
        world, node, jobs, poor = duel([1.0] * 10, 0.9, fair=0.9, preempt_cpu_gap_first=gap_first)
        elements.change_usage(jobs[6], amount(0.9))
        world.job(world.operation("filler"), node, 0.1)
        give(world.tree.operations["filler"], 1.0)
        assert lists(world.tree.operations["rich"]) == [N] * 5 + [A] * 5
        starve(poor, "aggressively_starving")
        assert victims_of(plan_for(node, poor, priority="aggressive")) == [jobs[6] if gap_first else jobs[9]]


def test_6_6_a_lowered_limit_does_not_order_preemptible_jobs():
    world, node, jobs, poor = duel([1.0] * 10, 1.0, fair=0.8, preempt_cpu_gap_first=True)
    elements.change_usage(jobs[8], amount(0.9))
    elements.change_usage(jobs[5], amount(0.9))
    world.job(world.operation("filler"), node, 0.2)
    give(world.tree.operations["filler"], 1.0)
    assert lists(world.tree.operations["rich"]) == [N] * 4 + [A] * 5 + [P]
    assert victims_of(plan_for(node, poor, priority="aggressive")) == [jobs[9]]


def test_6_6_the_first_task_that_room_can_be_made_for():
    world, node, _, _ = duel([1.0] * 10, 1.0)
    tasks = (Task("large", 1, cpu_limit=11.0, user_slots=0), Task("small", 1, user_slots=0))
    element = give(world.operation("two", tasks=tasks), 0.5)
    assert plan_for(node, element).task.name == "small"
    element.operation.needed = {"large": 1}
    assert plan_for(node, element) is None


@pytest.mark.parametrize(
    ("spare", "goes"),
    [
        (amount(7.0), True),
        (amount(7.5), False),
        ((1.0, 1.0, 0.0, 256e6, 0.0), True),  # what the node does not have at all does not matter
    ],
)
def test_6_6_a_stage_needs_the_spare_with_all_that_could_be_freed(spare, goes):
    _, node, _, poor = duel([1.0] * 5 + [5.0], 1.0, fair=0.3)
    assert (plan_preemption(node, Targets([(poor, "normal")]), 0.0, spare) is not None) is goes


@pytest.mark.parametrize(("cheapest", "small_jobs"), [(False, 5), (True, 5), (True, 100)])
def test_6_9_a_single_larger_job_when_small_ones_use_up_a_pools_losses(cheapest, small_jobs):
    """Also where the cheapest of very many sets are looked for."""
    world, node = make_world(preempt_cheapest_first=cheapest)
    give(world.pool("p"), 0.6)
    a, b = world.operation("a", "p", needs=1), world.operation("b", "p", needs=1)
    large = world.job(a, node, 5.0)
    world.jobs(b, node, small_jobs, 5.0 / small_jobs)
    give(a, 0.0)
    give(b, 0.0)
    poor = give(world.operation("poor", needs=1, cpu=5.0), 0.6)
    # four cores of b, and the pool has its share; the large one crosses it
    assert victims_of(plan_for(node, poor)) == [large]


def test_6_6_a_swap_inside_a_pool_at_its_limit():
    world, node = make_world()
    pool = world.pool("p")
    limit(pool, 4.0)
    give(pool, 0.4)
    rich, poor = world.operation("rich", "p", needs=1), world.operation("poor", "p", needs=1)
    jobs = world.jobs(rich, node, 4)
    give(rich, 0.2)
    give(poor, 0.2)
    world.job(give(world.operation("other"), 0.0), node, 1.0)
    # the node has room, the pool has not: a job of the pool goes, not the latest one of the node
    assert victims_of(plan_for(node, poor)) == [jobs[3]]


@pytest.mark.parametrize(
    ("of_pool", "tolerance", "own", "goes"),
    [
        (0.5, 0.0, 1.0, False),
        (1.0, 0.0, 1.0, True),
        (1.0, 0.0, 0.9, False),
        (0.5, 0.4, 1.0, False),
        (0.5, 0.5, 1.0, True),  # 6.7: a pool may exceed its limits by its tolerance
    ],
)
def test_6_6_what_is_freed_outside_of_a_limited_pool_does_not_help_it(of_pool, tolerance, own, goes):
    world, node, _, _ = duel([1.0] * 10, 1.0)
    pool = world.pool("p", resource_limits_overcommit_tolerance={"cpu": tolerance})
    inside = world.operation("inside", "p", needs=1)
    for element, most in ((pool, of_pool), (inside, own)):
        give(element, 0.5)
        limit(element, most)
    assert (plan_for(node, inside) is not None) is goes


def test_6_7_graceful_operations_give_up_their_preemptible_jobs():
    world, node = make_world()
    calm = world.operation("calm", needs=9, preemption_mode="graceful")
    jobs = world.jobs(calm, node, 6)
    give(calm, 0.4)
    world.jobs(world.operation("other"), node, 2)
    found = victims.find_graceful(node, 1000.0)
    assert [job for job, _ in found] == [jobs[5], jobs[4]]
    assert found[0][1] == (
        'its operation ends jobs above its fair share: 60.0% is allocated to operation "calm", whose fair share is '
        "40.0%"
    )
    give(calm, 0.6)
    assert victims.find_graceful(node, 1000.0) == []


def test_6_7_the_count_rule_protects_graceful_operations():
    world, node = make_world(max_unpreemptible_running_job_count=10)
    calm = world.operation("calm", needs=9, preemption_mode="graceful")
    world.jobs(calm, node, 6)
    give(calm, 0.1)
    assert victims.find_graceful(node, 1000.0) == []


def test_6_6_limits_take_jobs_away_latest_start_first_until_they_hold():
    world, node = make_world()
    pool = world.pool("p")
    element = world.operation("o", "p", needs=9)
    jobs = world.jobs(element, node, 6)
    assert victims.find_limit_violators(node) == []
    for each in (pool, element):
        give(each, 0.4)
    limit(pool, 4.0)
    found = victims.find_limit_violators(node)
    assert [(job, violated) for job, violated, _ in found] == [(jobs[5], pool), (jobs[4], pool)]
    assert found[0][2] == 'pool "p" used more than its limits allow: 6 of 4 cores'
    limit(pool, 6.0)
    assert victims.find_limit_violators(node) == []


def test_6_6_protected_jobs_stay_while_another_node_has_jobs_to_give():
    world = World()
    node, other = world.node(), world.node("n1")
    pool = give(world.pool("p"), 0.1)
    protected, rich = world.operation("protected", "p"), world.operation("rich", "p", needs=9)
    world.jobs(protected, node, 1)
    jobs = world.jobs(rich, other, 2)
    give(protected, 0.05, demand=0.05)
    give(protected, 0.04, demand=0.05)
    give(rich, 0.04)
    limit(pool, 2.0)
    assert victims.find_limit_violators(node) == []
    assert [job for job, _, _ in victims.find_limit_violators(other)] == [jobs[1]]
    other.is_online = False
    assert len(victims.find_limit_violators(node)) == 1


def test_6_6_conditional_candidates_never_repair_limits():
    world, node, rich, _ = conditional_world()
    limit(rich, 1.0)
    assert victims.find_limit_violators(node) == []
    world.tree.pools["p"].starvation_status = "non_starving"
    assert victims.find_limit_violators(node) == []  # at 0.4 of 0.8 it has half of its share
    give(world.tree.pools["p"], 0.7)
    assert len(victims.find_limit_violators(node)) == 3


# --- 1.9, overcommit


def overcommitted(*sizes: float, **settings: Any) -> tuple[World, elements.Node, list[elements.Job]]:
    world, node = make_world(cpu=6.0, **settings)
    world.node("more", cpu=4.0)
    element = world.operation("o", needs=9)
    jobs = [world.job(element, node, size) for size in sizes]
    give(element, 0.4)
    node.overcommitted_since = 0.0
    return world, node, jobs


def chosen(node: elements.Node, now: float = 16.0) -> list[elements.Job]:
    return [job for job, _ in victims.find_overcommit_victims(node, now, 15.0)]


def test_1_9_lowered_limits_go_first_where_the_rules_say_so():
    for gap_first in (False, True):
        world, node = make_world(cpu=4.0, preempt_cpu_gap_first=gap_first)
        element = world.operation("o")
        jobs = world.jobs(element, node, 5)
        elements.change_usage(jobs[0], amount(0.5))
        give(element, 3.0, demand=3.0)
        node.overcommitted_since = 0.0
        assert chosen(node) == [jobs[0] if gap_first else jobs[4]]


def reclaimed_rivals() -> tuple[World, elements.Node, dict[str, list[elements.Job]]]:
    """A node of 6 cores with an ordinary job that no list protects, four jobs on reclaimed CPU of a pool within its
    guarantee, three of one whose guarantee is one core, all of one core; the ordinary one started last."""
    world, node = make_world(cpu=6.0)
    jobs = {}
    for name, guarantee, number in (("beyond", 1 / 6, 3), ("within", 4 / 6, 4)):
        pool, element = world.pool(name), world.operation(f"{name}-o", name, needs=9)
        give(pool, 1.0, guarantee=guarantee)
        give(element, 1.0)
        jobs[name] = world.jobs(element, node, number)
        for job in jobs[name]:
            job.reclaimed = True
    jobs["ordinary"] = world.jobs(world.operation("o", needs=9), node, 1)
    node.overcommitted_since = 0.0
    return world, node, jobs


def test_1_9_jobs_on_reclaimed_cpu_beyond_their_pools_guarantee_go_first():
    _, node, jobs = reclaimed_rivals()
    beyond, within, (ordinary,) = jobs["beyond"], jobs["within"], jobs["ordinary"]
    assert chosen(node) == [beyond[2], beyond[1]]
    node.foreign_usage = amount(1.0)
    assert set(chosen(node)) == {beyond[2], beyond[1], within[3]}  # the third one of "beyond" is what is guaranteed
    node.foreign_usage = amount(5.0)
    assert set(chosen(node)) == {*beyond, *within}
    node.foreign_usage = amount(6.0)
    told = {job: why.partition("; it ran")[2] for job, why in victims.find_overcommit_victims(node, 20.0, 15.0)}
    assert told.keys() == {*beyond, *within, ordinary}
    assert told[beyond[2]] == " on reclaimed CPU, beyond the guarantee of its pool"
    assert told[beyond[0]] == told[within[0]] == " on reclaimed CPU"
    assert told[ordinary] == ""


def test_1_9_ordinary_jobs_beyond_their_pools_guarantee_go_before_others():
    _, node, jobs = reclaimed_rivals()
    for job in node.jobs.values():
        job.reclaimed = False
    assert chosen(node) == [*jobs["ordinary"], jobs["beyond"][2]]


def test_1_9_a_guarantee_is_the_operations_or_any_pools_and_its_flow():
    world, node, jobs = reclaimed_rivals()
    beyond = world.tree.pools["beyond"]
    beyond.last_integral_ratio = 2 / 6
    assert set(chosen(node)) == {jobs["within"][3], jobs["within"][2]}
    beyond.last_integral_ratio = 0.0
    world.tree.operations["beyond-o"].strong_guarantee_share = amount(3 / 6)
    assert set(chosen(node)) == {jobs["within"][3], jobs["within"][2]}


def test_1_9_nobody_goes_for_less_cpu_than_is_allowed_but_for_any_memory():
    _, node, jobs = overcommitted(*[1.0] * 7)
    assert victims.find_overcommit_victims(node, 16.0, 15.0, cpu_ratio=1 / 6) == []
    (victim, _), *rest = victims.find_overcommit_victims(node, 16.0, 15.0, cpu_ratio=0.16)
    assert (victim, rest) == (jobs[6], [])
    memory_at = RESOURCES.index("memory")
    elements.change_usage(jobs[0], (*jobs[0].usage[:memory_at], 2.0**50, *jobs[0].usage[memory_at + 1 :]))
    assert victims.find_overcommit_victims(node, 16.0, 15.0, cpu_ratio=1 / 6)


def test_1_9_jobs_on_reclaimed_cpu_have_more_time_while_they_alone_wait():
    _, node, jobs = reclaimed_rivals()

    def ended(now: float) -> set[elements.Job]:
        return {job for job, _ in victims.find_overcommit_victims(node, now, 15.0, 60.0)}

    assert ended(75.0) == set()
    assert ended(75.1) == {jobs["beyond"][2], jobs["beyond"][1]}
    (_, why), *_ = victims.find_overcommit_victims(node, 76.0, 15.0, 60.0)
    limit = "allowed_node_resources_overcommit_duration is 15 s, 60 s more while only jobs on reclaimed CPU wait"
    assert f"8 of 6 cores ({limit}); it ran on reclaimed CPU" in why
    node.foreign_usage = amount(5.0)
    assert ended(16.0) == set(), "the ordinary one has its core"
    node.foreign_usage = amount(5.1)
    assert ended(16.0) == {*jobs["beyond"], *jobs["within"], *jobs["ordinary"]}, "it has not"


def test_1_9_no_more_time_where_memory_is_short_or_no_class_is_idle():
    _, node, jobs = reclaimed_rivals()
    memory_at = RESOURCES.index("memory")
    for idle_class, memory, is_ended in (("idle", 2.0**40, False), ("idle", 1.0, True), ("", 2.0**40, True)):
        node.about = AgentAbout(version="0.3", level="guarantee", bound="quota", idle_class=idle_class)
        node.capacity = (*node.capacity[:memory_at], memory, *node.capacity[memory_at + 1 :])
        for job in jobs["within"]:
            elements.change_usage(job, (*job.usage[:memory_at], 2.0**30, *job.usage[memory_at + 1 :]))
        assert bool(victims.find_overcommit_victims(node, 16.0, 15.0, 60.0)) == is_ended


# --- records


def test_6_6_the_record_says_who_for_whom_and_why():
    world, node, jobs, poor = duel([1.0] * 10, 2.0)
    plan = plan_for(node, poor, now=100.0)
    victim, why = plan.victims[0]
    record = make_record(victim, "preempted", why, 1700.0, "new", plan.element, plan.priority)
    assert record.why == (
        'preempted to start job new of operation "poor" in pool "<Root>": operation "poor" is starving: it has been '
        "below its share for 42 s, with 0.0% of the cluster allocated to it and a fair share of 50.0%; "
        '100.0% is allocated to operation "rich", whose fair share is 10.0%'
    )
    assert (record.job_id, record.operation_id, record.tree, record.pool) == (victim.id, "rich", "default", "<Root>")
    assert (record.node_id, record.at, record.kind, record.priority) == ("n0", 1700.0, "preempted", "normal")
    assert (record.preemptor_job_id, record.preemptor_operation_id, record.preemptor_pool) == ("new", "poor", "<Root>")
    assert record.freed["cpu"] == 1.0
    assert victim is jobs[9]
    assert world.tree.root.usage == amount(10.0)


def test_6_6_the_reason_names_the_pool_that_starves():
    world, node, _, poor = pools_world()
    poor.starvation_status = "non_starving"
    starve(world.tree.pools["poor_pool"], "aggressively_starving", since=95.0)
    [(_, why)] = plan_for(node, poor, priority="aggressive").victims
    assert why.startswith('pool "poor_pool" is aggressively starving: it has been below its share for 5 s, with ')


@pytest.mark.parametrize("kind", ["limit_violated", "overcommit", "graceful", "aborted"])
def test_6_6_records_of_jobs_that_go_for_no_other_job(kind):
    _, _, jobs, _ = duel([1.0], 1.0)
    record = make_record(jobs[0], kind, "a reason", 5.0)
    assert record.why.endswith(": a reason")
    assert (record.preemptor_job_id, record.preemptor_operation_id, record.priority) == ("", "", "")
    assert not make_record(jobs[0], kind, "", 5.0).why.endswith(": ")


# --- cost


@pytest.mark.parametrize("why_not", ["too large", "blocked", "blocked half way", "at their limits"])
def test_6_6_a_thousand_operations_that_cannot_be_helped_cost_milliseconds(why_not):
    world, node = make_world(cpu=50.0)
    give(world.pool("rich"), {"blocked": 1.0, "blocked half way": 0.65}.get(why_not, 0.5))
    for i in range(10):
        rich = world.operation(f"rich{i}", "rich", needs=9)
        world.jobs(rich, node, 5)
        give(rich, 0.05)
    targets: list[tuple[elements.OperationElement, TargetPriority]] = []
    order = {"too large": 51.0, "blocked half way": 20.0}.get(why_not, 1.0)
    for i in range(1000):
        if i % 10 == 0:
            pool = give(world.pool(f"p{i}"), 0.0009)
            if why_not == "at their limits":
                limit(pool, 0.5)
        element = give(world.operation(f"o{i}", f"p{i - i % 10}", needs=1, cpu=order), 0.0001)
        targets.append((element, "normal"))
    asked = 0

    def count(*_: object) -> bool:
        nonlocal asked
        asked += 1
        return True

    assert plan_preemption(node, Targets(targets, count), 0.0, amount(1.0)) is None
    assert asked <= 1, "one stands for all that would fail in the same way"


def make_hopeless(count: int) -> tuple[elements.Node, list[elements.OperationElement]]:
    """Jobs that may go, and operations better off than their owner would be then; each orders more than the last."""
    world, node = make_world(cpu=10.0)
    rich = world.operation("rich", needs=9)
    world.jobs(rich, node, 2, 5.0)
    give(rich, 0.1)
    late = [world.operation(f"o{i:03}", needs=1, cpu=1.0 + i / 1000.0) for i in range(count)]
    for each in late:
        give(each, 0.1)
        each.usage = amount(60.0)
    return node, late


def test_6_6_an_attempt_makes_a_bounded_number_of_searches():
    node, late = make_hopeless(3 * MOST_SEARCHES)
    asked: list[elements.OperationElement] = []

    def note(element: elements.OperationElement, _: object) -> bool:
        asked.append(element)
        return True

    targets = Targets([(each, "normal") for each in late], note)
    assert plan_preemption(node, targets, 0.0, ZERO) is None
    assert len(asked) <= MOST_SEARCHES + 1
    late[-1].usage = ZERO  # the last one can be helped
    attempts = 1
    while (plan := plan_preemption(node, targets, 0.0, ZERO)) is None:
        attempts += 1
        assert attempts < 5
    assert plan.element is late[-1]
    assert attempts == 2
    assert node.skipped_searches == 0


def test_6_6_who_has_what_it_wants_since_the_update_is_passed_over():
    world, node, _, poor = duel([1.0] * 10, 1.0)
    second = give(world.operation("second", needs=1), 0.5)
    targets = Targets([(poor, "normal"), (second, "normal")], lambda element, _: element is second)
    assert plan_preemption(node, targets, 0.0, ZERO).element is second


def test_6_6_a_job_that_is_ordered_at_this_very_moment_is_no_victim():
    _, node, jobs, poor = duel([1.0] * 10, 3.0)
    jobs[9].state, jobs[9].start_time = "starting", 100.0
    assert victims_of(plan_for(node, poor, now=100.0)) == [jobs[8], jobs[7], jobs[6]]
    assert victims_of(plan_for(node, poor, now=101.0)) == [jobs[9], jobs[8], jobs[7]]
