"""Inheritance of the options of starvation, the state machine, and who may preempt (semantics.md 6.2, 6.3)."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
from scheduler_builders import World, give, make_world, starve

from cpumond.scheduler.decide.starvation import (
    priority_of,
    starves_in_s,
    starving_element,
    starving_operations,
    update_starvation,
)
from cpumond.scheduler.elements import Element, PreemptionRules
from cpumond.scheduler.model import OperationTreeOptions, PoolSettings, TreeSettings
from cpumond.scheduler.settings.preemption_rules import operation_rules, pool_rules, root_rules

INF = math.inf
FAIR, LEAST = "fair_share_starvation_timeout", "min_share_preemption_timeout"
TOLERANCE, THRESHOLD = "fair_share_starvation_tolerance", "non_preemptible_resource_usage_threshold"
STARVES, PREEMPTS = "enable_aggressive_starvation", "allow_aggressive_preemption"
LATE = "fair_share_aggressive_starvation_timeout"
FAIR_S, LEAST_S, FOUND = "fair_share_timeout_s", "min_share_timeout_s", "non_preemptible_threshold"
DEFAULTS = {
    "tolerance": 0.8, "tolerance_limit": 0.8,
    "fair_share_timeout_s": 30.0, "fair_share_timeout_limit_s": 30.0, "min_share_timeout_s": 30.0,
    "aggressive_timeout_s": 0.0, "aggressive_starvation": False, "aggressive_preemption": True,
    "non_preemptible_threshold": None,
}  # fmt: skip
STRICT = {"fair_share_preemption_timeout_limit": 60_000.0, "fair_share_starvation_tolerance_limit": 0.5}
LAX = {"fair_share_preemption_timeout_limit": 1.0, "fair_share_starvation_tolerance_limit": 1.0}
BOUNDS = {
    "fair_share_preemption_timeout_limit": 500.0,
    "min_share_preemption_timeout_limit": 0.0,
    "fair_share_starvation_tolerance_limit": 1.0,
}
EAGER, SLOW = {FAIR: 1000.0, LEAST: 1.0, TOLERANCE: 0.9}, {FAIR: 60_000.0}
LATER, CAREFUL = {FAIR: 31_000.0, TOLERANCE: 0.7}, {THRESHOLD: {"user_slots": 8.0, "memory": 5.0}}
PATIENT = {FAIR_S: 30.0, LEAST_S: 15.0, "tolerance": 0.8}
INHERITED: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    # what tree and pools say, from the top -> what holds in the last pool, and for an operation that says nothing
    "defaults of the tree": ({}, [], DEFAULTS),
    "defaults below": ({}, [{}, {}], DEFAULTS),
    "limits are the tree's own values": (
        {FAIR: 40_000.0, LEAST: 15_000.0}, [], {"fair_share_timeout_limit_s": 40.0, "min_share_timeout_limit_s": 15.0},
    ),
    "no earlier than those": ({LEAST: 15_000.0}, [{FAIR: 1000.0, LEAST: 1.0, TOLERANCE: 1.0}], PATIENT),
    "earlier where limits allow it": (BOUNDS, [EAGER], {FAIR_S: 1.0, LEAST_S: 0.001, "tolerance": 0.9}),
    **{
        f"the strictest limit, {number}": ({}, pools, {FAIR_S: 60.0, "tolerance": 0.5})
        for number, pools in enumerate(
            ([STRICT], [STRICT, LAX], [STRICT, {**LAX, **LATER}], [LAX, STRICT, LATER])
        )
    },
    "the nearest pool that says it": ({}, [{FAIR: 90_000.0}, {}, SLOW, {}], {FAIR_S: 60.0}),
    "min share as fair share": ({}, [SLOW, {}], {LEAST_S: 60.0}),
    "min share said by the tree": ({LEAST: 30_000.0}, [SLOW], {LEAST_S: 30.0}),
    "min share said by a pool": ({}, [{LEAST: 45_000.0}, SLOW], {LEAST_S: 45.0}),
    "threshold of the tree": ({THRESHOLD: {"cpu": 4.0}}, [{}], {FOUND: (INF, 4.0, INF, INF, INF)}),
    "threshold of a pool": ({THRESHOLD: {"cpu": 4.0}}, [CAREFUL], {FOUND: (8.0, INF, INF, 5.0, INF)}),
    "no threshold": ({THRESHOLD: {"cpu": 4.0}}, [{THRESHOLD: {}}], {FOUND: None}),
    "starvation by the tree": ({STARVES: True}, [{}, {STARVES: False}], {"aggressive_starvation": True}),
    "starvation by a pool above": ({}, [{STARVES: True}, {STARVES: False}], {"aggressive_starvation": True}),
    "starvation by the pool": ({}, [{}, {STARVES: True}], {"aggressive_starvation": True}),
    "preemption by a pool above": ({}, [{PREEMPTS: False}, {}], {"aggressive_preemption": False}),
    "preemption by the nearest": ({}, [{PREEMPTS: False}, {PREEMPTS: True}], {"aggressive_preemption": True}),
    "preemption by the tree": ({PREEMPTS: False}, [{}], {"aggressive_preemption": False}),
    "preemption against the tree": ({PREEMPTS: False}, [{PREEMPTS: True}, {}], {"aggressive_preemption": True}),
    "aggressive time-out of the tree": ({LATE: 120_000.0}, [{}], {"aggressive_timeout_s": 120.0}),
    "aggressive time-out of a pool": ({}, [{LATE: 9000.0}, {}], {"aggressive_timeout_s": 9.0}),
}  # fmt: skip


def chain(tree: dict[str, Any], *pools: dict[str, Any]) -> PreemptionRules:
    rules = root_rules(TreeSettings(**tree))
    for pool in pools:
        rules = pool_rules(rules, PoolSettings(**pool))
    return rules


def look(rules: PreemptionRules, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(rules, name) for name in names}


@pytest.mark.parametrize(("tree", "pools", "expected"), INHERITED.values(), ids=INHERITED)
def test_6_2_options_of_starvation_are_inherited(tree, pools, expected):
    rules = chain(tree, *pools)
    assert look(rules, expected) == expected
    assert look(operation_rules(rules, OperationTreeOptions(pool="p")), expected) == expected


OWN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # what its pool and an operation say -> what holds for it, which can only be less privileged
    "more privileged": ({LEAST: 15_000.0}, {FAIR: 1.0, LEAST: 1.0, TOLERANCE: 1.0}, PATIENT),
    "less privileged": (
        {LEAST: 15_000.0}, {FAIR: 5e4, LEAST: 2e4, TOLERANCE: 0.1}, {FAIR_S: 50.0, LEAST_S: 20.0, "tolerance": 0.1},
    ),
    "min share as its fair share": ({}, SLOW, {LEAST_S: 60.0}),
    "min share said above": ({LEAST: 30_000.0}, SLOW, {LEAST_S: 30.0}),
    "a lower threshold": (CAREFUL, {THRESHOLD: {"user_slots": 9.0, "cpu": 3.0}}, {FOUND: (8.0, 3.0, INF, 5.0, INF)}),
    "a threshold where there is none": ({}, {THRESHOLD: {"cpu": 3.0}}, {FOUND: None}),
}  # fmt: skip


@pytest.mark.parametrize(("tree", "options", "expected"), OWN.values(), ids=OWN)
def test_6_2_an_operation_can_only_make_itself_less_privileged(tree, options, expected):
    rules = operation_rules(chain(tree, {}), OperationTreeOptions(pool="p", **options))
    assert look(rules, expected) == expected


def one_operation(usage: float, fair: float, demand: float = 1.0, guarantee: float = 0.0, **settings: Any):
    """An operation that uses ``usage`` of a cluster with 100 cores."""
    world, node = make_world(cpu=100.0, **settings)
    element = world.operation("o", needs=5)
    if usage:
        world.job(element, node, usage * 100.0)
    give(element, fair, demand, guarantee)
    return world, element


@pytest.mark.parametrize(
    ("usage", "fair", "demand", "guarantee", "status"),
    [
        (0.40, 0.5, 1.0, 0.0, "normal"),  # exactly fair share times tolerance
        (0.39, 0.5, 1.0, 0.0, "below_fair_share"),
        (0.39, 0.5, 1.0, 0.39, "below_fair_share"),  # exactly the guarantee
        (0.39, 0.5, 1.0, 0.4, "below_min_share"),
        (0.45, 0.5, 1.0, 0.5, "normal"),  # below the guarantee, but not clearly below the fair share
        (0.49, 0.5, 0.5, 0.0, "below_fair_share"),  # the demand would fit: nothing less will do
        (0.50, 0.5, 0.5, 0.0, "normal"),
        (0.49, 0.5, 0.51, 0.0, "normal"),
        (0.0, 0.0, 1.0, 0.0, "normal"),  # nothing is not less than nothing
        (0.6, 0.5, 1.0, 1.0, "normal"),
    ],
)
def test_6_2_status_of_an_operation(usage, fair, demand, guarantee, status):
    world, element = one_operation(usage, fair, demand, guarantee)
    update_starvation(world.tree, 10.0)
    assert element.scheduling_status == status
    assert element.below_since == (None if status == "normal" else 10.0)
    assert element.starvation_status == "non_starving"


def test_6_2_the_largest_components_are_compared():
    world, node = make_world(cpu=100.0, memory=100.0)
    element = world.operation("o", needs=1)
    world.job(element, node, 10.0, 40.0)
    element.fair_share, element.demand_share = (0.0, 0.5, 0.0, 0.1, 0.0), (0.0, 1.0, 0.0, 1.0, 0.0)
    update_starvation(world.tree, 0.0)
    assert element.scheduling_status == "normal"


def test_6_2_the_other_status_keeps_the_timer_and_changes_the_time_out():
    world, element = one_operation(0.1, 0.5, min_share_preemption_timeout=15_000.0)
    update_starvation(world.tree, 0.0)
    update_starvation(world.tree, 20.0)
    assert element.starvation_status == "non_starving"
    give(element, 0.5, guarantee=0.2)
    update_starvation(world.tree, 20.0)
    assert (element.scheduling_status, element.starvation_status) == ("below_min_share", "starving")
    assert element.below_since == 0.0
    give(element, 0.5)
    update_starvation(world.tree, 21.0)
    assert (element.scheduling_status, element.starvation_status) == ("below_fair_share", "non_starving")
    assert element.below_since == 0.0


@pytest.mark.parametrize("reason", ["not running", "suspended", "needs nothing"])
def test_6_2_operations_that_cannot_be_scheduled_are_normal(reason):
    world, _ = make_world(cpu=100.0)
    element = world.operation("o", needs=0 if reason == "needs nothing" else 1, suspended=reason == "suspended")
    element.is_running = reason != "not running"
    give(element, 0.5)
    starve(element)
    update_starvation(world.tree, 100.0)
    assert (element.scheduling_status, element.starvation_status, element.below_since) == (
        "normal", "non_starving", None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("coefficient", "needs", "timeout_s"), [(1.0, 1, 30.0), (10.0, 5, 15.0), (10.0, 10, 30.0), (10.0, 50, 30.0)]
)
def test_6_2_operations_that_need_few_jobs_starve_earlier(coefficient, needs, timeout_s):
    world, _ = make_world(cpu=100.0, job_count_preemption_timeout_coefficient=coefficient)
    element = give(world.operation("o", needs=needs), 0.5)
    update_starvation(world.tree, 0.0)
    update_starvation(world.tree, timeout_s)
    assert element.starvation_status == "non_starving"
    update_starvation(world.tree, timeout_s + 0.01)
    assert element.starvation_status == "starving"


def test_6_2_pools_do_not_starve_without_enable_pool_starvation():
    world, _ = make_world(cpu=100.0, enable_pool_starvation=False)
    pool = give(world.pool("p"), 0.5)
    starve(pool)
    update_starvation(world.tree, 100.0)
    assert (pool.starvation_status, pool.scheduling_status, pool.below_since) == ("non_starving", "normal", None)


def test_6_2_aggressive_as_soon_as_starving_with_the_flag_of_a_pool_above():
    world, _ = make_world(cpu=100.0)
    world.pool("top", enable_aggressive_starvation=True)
    pool = world.pool("mid", "top", enable_aggressive_starvation=False)
    element = world.operation("o", "mid", needs=1)
    other = world.operation("other", needs=1)
    for each in (pool, element, other):
        give(each, 0.5)
    update_starvation(world.tree, 0.0)
    update_starvation(world.tree, 30.0)
    assert element.starvation_status == "non_starving"
    update_starvation(world.tree, 31.0)
    assert pool.starvation_status == element.starvation_status == "aggressively_starving"
    assert other.starvation_status == "starving"


def test_6_2_the_aggressive_time_out_counts_from_the_same_moment():
    world, element = one_operation(
        0.1, 0.5, enable_aggressive_starvation=True, fair_share_aggressive_starvation_timeout=120_000.0
    )
    for now, status in ((0.0, "non_starving"), (31.0, "starving"), (120.0, "starving")):
        update_starvation(world.tree, now)
        assert element.starvation_status == status
    update_starvation(world.tree, 120.1)
    assert element.starvation_status == "aggressively_starving"


def test_6_2_seconds_until_it_starves():
    world, element = one_operation(0.1, 0.5)
    assert starves_in_s(element, 0.0) is None
    update_starvation(world.tree, 10.0)
    assert [starves_in_s(element, now) for now in (10.0, 25.0, 99.0)] == [30.0, 15.0, 0.0]
    update_starvation(world.tree, 41.0)
    assert starves_in_s(element, 41.0) == 0.0


@pytest.mark.parametrize(
    ("own", "pool", "top", "everywhere", "operation_only"),
    [
        ("non_starving", "non_starving", "non_starving", "none", "none"),
        ("starving", "non_starving", "non_starving", "normal", "normal"),
        ("aggressively_starving", "non_starving", "starving", "aggressive", "aggressive"),
        ("non_starving", "starving", "non_starving", "normal", "none"),
        ("non_starving", "non_starving", "aggressively_starving", "aggressive", "none"),
        ("starving", "starving", "aggressively_starving", "aggressive", "normal"),
    ],
)
def test_6_3_priority_by_own_state_and_that_of_the_pools_above(own, pool, top, everywhere, operation_only):
    for scope, expected in (("operation_and_ancestors", everywhere), ("operation_only", operation_only)):
        world = World(scheduling_preemption_priority_scope=scope)
        elements: list[Element] = [world.pool("top"), world.pool("pool", "top"), world.operation("o", "pool", needs=1)]
        for element, status in zip(elements, (top, pool, own), strict=True):
            element.starvation_status = status
        assert priority_of(world.tree.operations["o"]) == expected


def test_6_3_the_nearest_of_those_that_starve_hardest_gives_the_priority():
    world = World()
    top, pool = world.pool("top"), world.pool("pool", "top")
    element = world.operation("o", "pool")
    assert starving_element(element) is None
    starve(top)
    assert starving_element(element) is top
    starve(pool)
    assert starving_element(element) is pool
    starve(top, "aggressively_starving")
    assert starving_element(element) is top
    starve(element)
    assert starving_element(element) is top
    starve(element, "aggressively_starving")
    assert starving_element(element) is element


def test_6_3_only_operations_that_can_use_a_job_preempt():
    world = World()
    world.operation("normal", needs=1)
    for name in ("starving", "pending", "second"):
        starve(world.operation(name, needs=1))
    starve(world.operation("graceful", needs=1, preemption_mode="graceful"))
    starve(world.operation("suspended", needs=1, suspended=True))
    starve(world.operation("full", needs=0))
    world.tree.operations["pending"].is_running = False
    assert [element.name for element in starving_operations(world.tree)] == ["starving", "second", "graceful"]
