"""No option is accepted without an effect: setting it changes what holds, or is told of (semantics.md 2.4, 2.5)."""

from typing import Any

import pytest
from scheduler_world import World

from cpumond.scheduler.access import Rights
from cpumond.scheduler.decide.placement import find_ceiling_rule
from cpumond.scheduler.decide.usage_history import half_life_s
from cpumond.scheduler.decide.victims import find_limit_violators
from cpumond.scheduler.elements import PreemptionRules
from cpumond.scheduler.model import CommandError, JobRecord, OperationTreeOptions, PoolSettings
from cpumond.scheduler.model.failures import MEMORY_LIMIT_EXCEEDED, EndError
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.commands import ChangePool, Edit
from cpumond.scheduler.settings.operations import StartOperation, UpdateOperation
from cpumond.scheduler.state.retries import find_terms

OOM = EndError("out of memory", MEMORY_LIMIT_EXCEEDED)


def rules(of: PreemptionRules | None) -> dict[str, Any]:
    assert of is not None
    return {name: getattr(of, name) for name in PreemptionRules.__slots__}


def attempt(world: World, *args: Any, **spec: Any) -> str:
    """Where an operation that starts goes, or why it does not start."""
    try:
        return world.record(world.start(*args, **spec)).trees["default"].pool
    except CommandError as error:
        return str(error)


def make_world() -> World:
    """A full node: one pool inside another, with more wanted than there is, and two users."""
    world = World(fair_share_starvation_tolerance=0.5, fair_share_starvation_timeout=10_000)
    world.node("n1", cpu=20, memory=2**34)
    world.create_pool("top", min_share_resources={"cpu": 20}, integral_guarantees={"resource_flow": {"cpu": 5}})
    world.create_pool("p", "top", min_share_resources={"cpu": 4}, integral_guarantees={"resource_flow": {"cpu": 2}})
    world.create_pool("other", "top", weight=2)
    for name, weight, jobs in (("p", 1.0, 9), ("p", 2.0, 30), ("other", 1.0, 30)):
        world.start(name, jobs=jobs, weight=weight)
    world.settle_down()
    return world


def observe(world: World) -> dict[str, Any]:
    """What the options of pool "p" can show in."""
    found: dict[str, Any] = {}
    world.after(60.0).update()
    pool = world.pool("p")
    shares = [pool.strong_guarantee_share, *(each.fair_share for each in (pool, *world.tree().operations.values()))]
    found["shares"] = [[round(x, 9) for x in share] for share in shares]
    found["volume"] = pool.volume
    operation = next(iter(pool.operations.values())).operation
    name = operation.record.tasks[0].name
    ended = JobRecord("j", operation.id, name, "default", "n1", "failed", 0.0, 0.0, 1.0, 1.0, failure=OOM)
    found["retries"] = find_terms(operation, ended)
    found["keeps"] = world.tree().lenders.get(pool)
    found["half-life"] = half_life_s(pool)
    found["ceiling"] = find_ceiling_rule(pool, world.tree())
    found["rules"] = rules(pool.rules)
    found["rules of operations"] = [rules(element.rules) for element in pool.operations.values()]
    found["violators"] = [job.id for job, *_ in find_limit_violators(next(iter(world.state.nodes.values())))]
    found["rights"] = [Rights(world.state, User(who)).on_pool("default", "p", "use").allowed for who in ("ann", "bob")]
    found["goes to"] = attempt(world, "p", user="ann")
    found["second goes to"] = attempt(world, "p", user="ann")
    try:
        world.create_pool("below", "p", min_share_resources={"cpu": 1})
        found["guarantee below"] = "made"
    except CommandError as error:
        found["guarantee below"] = str(error)
    found["counts"] = world.counts("p")
    new = next((pool for name, pool in world.tree().pools.items() if "$" in name), None)
    found["settings of sub-pools"] = None if new is None else (new.mode, new.max_operation_count, new.settings)
    return found


POOL: dict[str, tuple[Any, dict[str, Any]]] = {
    # option of "p" -> its value, and what must stand beside it to matter
    "weight": (5, {}),
    "max_share_ratio": (0.1, {}),
    "strong_guarantee_resources": ({"cpu": 8}, {}),
    "resource_limits": ({"cpu": 3}, {}),
    "mode": ("fifo", {}),
    "max_running_operation_count": (2, {}),
    "max_operation_count": (2, {}),
    "fifo_sort_parameters": (["start_time"], {"mode": "fifo"}),
    "forbid_immediate_operations": (True, {}),
    "create_ephemeral_subpools": (True, {}),
    "ephemeral_subpool_config": ({"mode": "fifo"}, {"create_ephemeral_subpools": True}),
    "integral_guarantees": ({"guarantee_type": "relaxed", "resource_flow": {"cpu": 2}}, {}),
    "resource_limits_overcommit_tolerance": ({"cpu": 100}, {"resource_limits": {"cpu": 1}}),
    "allow_children_guarantees": (False, {}),
    "set_container_cpu_limit": (False, {}),
    "lending_limit": ({"cpu": 1}, {}),
    "flatten": (True, {"strong_guarantee_resources": None, "integral_guarantees": None}),
    "usage_half_life": (3_600_000, {}),
    "retry_policy": (["exit:2"], {}),
    "max_retry_memory": (2**29, {"retry_policy": ["oom:2,memory_growth=2"]}),
    "budget": ({"core_hours": 0, "when_spent": "leftover"}, {}),
    "fair_share_starvation_timeout": (60_000, {}),
    "fair_share_starvation_tolerance": (0.4, {}),
    "min_share_preemption_timeout": (60_000, {}),
    "fair_share_aggressive_starvation_timeout": (60_000, {}),
    "fair_share_preemption_timeout_limit": (60_000, {}),
    "min_share_preemption_timeout_limit": (60_000, {}),
    "fair_share_starvation_tolerance_limit": (0.3, {}),
    "enable_aggressive_starvation": (True, {}),
    "allow_aggressive_preemption": (False, {}),
    "non_preemptible_resource_usage_threshold": ({"cpu": 3}, {}),
    "min_run_time": (60_000, {}),
    "scheduling_tag_filter": ("ssd", {}),
    "acl": ([{"action": "allow", "subjects": ["bob"], "permissions": ["use"]}], {}),
    "inherit_acl": (False, {}),
    "owner": ("bob", {"acl": [{"action": "allow", "subjects": ["owner"], "permissions": ["use"]}]}),
}


def test_the_table_of_pools_is_complete():
    assert set(POOL) == set(PoolSettings.__struct_fields__)


@pytest.mark.parametrize("option", POOL)
def test_an_option_of_a_pool_shows(option):
    value, beside = POOL[option]
    plain, changed = make_world(), make_world()
    for world in (plain, changed):
        if beside:
            world.set_pool("p", **beside)
    changed.set_pool("p", **{option: value})
    assert observe(changed) != observe(plain)


def test_the_same_options_show_the_same():
    assert observe(make_world()) == observe(make_world())


LIMITED = ("fair_share_starvation_timeout", "fair_share_starvation_tolerance", "min_share_preemption_timeout")


@pytest.mark.parametrize("option", LIMITED)
def test_a_pools_option_that_a_limit_above_cuts_is_told_of(option):
    """6.2: it would be more privileged than the tree allows."""
    world = make_world()
    value = 0.9 if option.endswith("_tolerance") else 1
    done = world.do(ChangePool("default", "p", (Edit((option,), value),)))
    assert any(option in text for text in done.warnings)


OPERATION: dict[str, Any] = {
    "weight": 5.0,
    "max_share_ratio": 0.1,
    "resource_limits": {"cpu": 1},
    "min_share_resources": {"cpu": 3},
    "fair_share_starvation_timeout": 60_000,
    "fair_share_starvation_tolerance": 0.1,
    "min_share_preemption_timeout": 60_000,
    "max_unpreemptible_running_job_count": 3,
    "non_preemptible_resource_usage_threshold": {"cpu": 1},
    "min_run_time": 60_000,
    "scheduling_tag_filter": "n1 & !n2",
}


def test_the_table_of_operations_is_complete():
    assert set(OPERATION) == set(OperationTreeOptions.__struct_fields__) - {"pool"}


@pytest.mark.parametrize("option", OPERATION)
def test_an_option_of_an_operation_shows_or_is_told_of(option):
    seen = []
    for options in ({}, {option: OPERATION[option]}):
        world = make_world()
        table = {"tasks": {"t": {"command": "true", "job_count": 30}}, "pool": "p", **options}
        started = world.do(StartOperation(table))
        changed = world.do(UpdateOperation(started.id, options))
        assert started.warnings == changed.warnings
        world.settle_down()
        element = world.element(started.id)
        # What the count rule reads is the option itself (6.4).
        count = element.options.max_unpreemptible_running_job_count
        shares = (element.fair_share, element.strong_guarantee_share, element.bounds)
        seen.append((shares, rules(element.rules), count, started.warnings))
    assert seen[0] != seen[1]


# --- options of a tree that nothing else tests


@pytest.mark.parametrize("counts", [None, True])
@pytest.mark.parametrize("spec", [{"cpu": 5.0}, {"jobs": 40, "is_gang": True}])
def test_jobs_that_no_node_could_hold_demand_only_if_the_tree_says_so(spec, counts):
    """5.2: else others starve beside free nodes."""
    world = World(pools=["large", "small"], **({} if counts is None else {"count_unplaceable_jobs_in_demand": counts}))
    world.add_nodes(2, cpu=4.0)
    large = world.start("large", **{"jobs": 40, **spec})
    world.run("small", jobs=40)
    demands, shares = [world.pool(name).demand[1] for name in ("large", "small")], world.pool("small").fair_share
    assert demands == ([40.0 * spec.get("cpu", 1.0), 40.0] if counts else [0.0, 40.0])
    assert max(shares) == pytest.approx(0.5 if counts and "cpu" in spec else 1.0)
    world.node("big", cpu=64.0)
    world.update()
    assert world.element(large).demand[1] == 40.0 * spec.get("cpu", 1.0), "one that could hold it has come"


@pytest.mark.parametrize(("budget", "taken"), [(None, 4), (3, 3), (0, 0)])
def test_the_trees_budget_of_preemptions_in_a_minute(budget, taken):
    soon = {"fair_share_starvation_timeout": 1000, "preemptive_scheduling_backoff": 0}
    world = World(nodes={"n1": 10}, max_preemptions_per_minute=budget, max_unpreemptible_running_job_count=0, **soon)
    world.run("greedy", user="a", jobs=50)
    late = world.start("late", user="b", jobs=50)
    world.settle_down(30)
    assert len(world.jobs_of(late)) == taken
    world.settle_down(60)
    assert len(world.jobs_of(late)) == (0 if budget == 0 else 4)
