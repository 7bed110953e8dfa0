"""A refusal that is about one option names it in its attribute ``field``, by the documents' name."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_world import World

from cpumond.scheduler.model import CommandError
from cpumond.scheduler.program.main import read_monitor
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, CreatePool, CreateTree, MovePool
from cpumond.scheduler.settings.operations import StartOperation, UpdateOperation, read_spec

TREE = "default"


def field_of(world: World, command: Any) -> Any:
    with pytest.raises(CommandError) as caught:
        world.do(command)
    assert set(caught.value.attributes) <= {"field", "pool", "limit", "pool_tree"}
    return caught.value.attributes.get("field")


@pytest.fixture
def world() -> World:
    world = World()
    world.create_pool("a", strong_guarantee_resources={"cpu": 10})
    world.create_pool("b", "a", strong_guarantee_resources={"cpu": 6})
    world.create_pool("c", "a", strong_guarantee_resources={"cpu": 3})
    world.create_pool("f", mode="fifo")
    return world


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ({"weight": -1}, "weight"),
        ({"weight": "much"}, "weight"),
        ({"mode": "other"}, "mode"),
        ({"integral_guarantees": {"resource_flow": {"cpu": -1}}}, "integral_guarantees/resource_flow/cpu"),
        ({"integral-guarantees": {"resource-flow": {"cpu": -1}}}, "integral_guarantees/resource_flow/cpu"),
        ({"min_share_resources": {"cpu": "x"}}, "strong_guarantee_resources/cpu"),
        ({"strong_guarantee_resources": {"memory": 1}}, "strong_guarantee_resources/cpu"),
        ({"resource_limits": 5}, "resource_limits"),
        ({"resource_limits": {"cores": 5}}, "resource_limits/cores"),
        ({"max_operation_count": 1, "max_running_operation_count": 2}, "max_operation_count"),
        (
            {"ephemeral_subpool_config": {"max_operation_count": 1, "max_running_operation_count": 2}},
            "ephemeral_subpool_config/max_operation_count",
        ),
        ({"mode": "fifo", "create_ephemeral_subpools": True}, "create_ephemeral_subpools"),
        (
            {"integral_guarantees": {"guarantee_type": "relaxed", "burst_guarantee_resources": {"cpu": 1}}},
            "integral_guarantees/burst_guarantee_resources",
        ),
        (
            {"fair_share_starvation_timeout": 9, "fair_share_aggressive_starvation_timeout": 5},
            "fair_share_aggressive_starvation_timeout",
        ),
    ],
)
def test_options_of_a_new_pool(world, attributes, field):
    assert field_of(world, CreatePool(TREE, "new", "<Root>", attributes)) == field


def change(pool: str, path: str, value: Any) -> ChangePool:
    return ChangePool(TREE, pool, (Edit(tuple(path.split("/")), value),))


def test_a_rule_of_several_pools_names_the_option_of_the_pool_that_was_changed(world):
    sums = "strong_guarantee_resources/cpu"
    assert field_of(world, change("b", sums, 8)) == sums
    assert field_of(world, change("a", sums, 8)) == sums
    assert field_of(world, change("a", "strong_guarantee_resources", None)) == sums
    assert field_of(world, change("a", "allow_children_guarantees", False)) == "allow_children_guarantees"
    assert field_of(world, change("a", "mode", "fifo")) == "mode"
    assert field_of(world, CreatePool(TREE, "new", "f")) == "parent"
    flow = {"guarantee_type": "relaxed", "resource_flow": {"cpu": 1}}
    world.create_pool("i", integral_guarantees={"resource_flow": {"cpu": 2}})
    world.create_pool("j", "i", integral_guarantees=flow)
    of_parent = "integral_guarantees/guarantee_type"
    assert field_of(world, change("i", of_parent, "relaxed")) == of_parent
    assert field_of(world, CreatePool(TREE, "k", "j", {"integral_guarantees": flow})) == (
        "integral_guarantees/resource_flow"
    )


def test_names_and_parents(world):
    for name in ("", "x" * 101, "a$b", "<Root>", "not good"):
        assert field_of(world, CreatePool(TREE, name)) == "name"
    assert field_of(world, CreatePool(TREE, "a")) == "name"
    assert field_of(world, CreatePool(TREE, "new", "nowhere")) == "parent"
    assert field_of(world, MovePool(TREE, "a", "b", "a")) == "parent"
    assert field_of(world, MovePool(TREE, "b", "a", "c")) == "name"
    assert field_of(world, CreateTree(TREE)) == "name"


def test_options_of_a_tree(world):
    def put(path: str, value: Any) -> ChangeTree:
        return ChangeTree(TREE, (Edit(tuple(path.split("/")), value),))

    assert field_of(world, put("nodes_filter", "a &")) == "nodes_filter"
    assert field_of(world, put("main_resource", "disk")) == "main_resource"
    assert field_of(world, put("config/max_operation_count", 0)) == "config/max_operation_count"
    assert field_of(world, put("preemption_satisfaction_threshold", 0.1)) == (
        "aggressive_preemption_satisfaction_threshold"
    )


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"tasks": {}}, "tasks"),
        ({"tasks": {"t": {}}}, "tasks/t/job_count"),
        ({"tasks": {"t": {"job_count": 1}}}, "tasks/t/command"),
        ({"tasks": {"t": {"command": "true", "job_count": 1, "cpu": -1}}}, "tasks/t/cpu_limit"),
        ({"weight": -1}, "weight"),
        ({"max_share_ratio": 2}, "max_share_ratio"),
        ({"resource-limits": {"cpu": "x"}}, "resource_limits/cpu"),
        ({"is_gang": 1}, "is_gang"),
        ({"preemption_mode": "x"}, "preemption_mode"),
        ({"title": "a", "tasks": 1}, "tasks"),
        ({"pool_trees": []}, "pool_trees"),
        ({"scheduling_options_per_pool_tree": {"x": {"weight": -1}}}, "scheduling_options_per_pool_tree/x/weight"),
        ({"max-share-ratio": 1, "max_share_ratio": 1}, "max_share_ratio"),
        ({"job_cpu_monitor": {"smoothing-factor": 2}}, "job_cpu_monitor/smoothing_factor"),
        ({"job_cpu_monitor": 5}, "job_cpu_monitor"),
    ],
)
def test_options_of_a_specification(spec, field):
    with pytest.raises(CommandError) as caught:
        read_spec({"tasks": {"t": {"command": "true", "job_count": 1}}, **spec}, read_monitor)
    assert caught.value.attributes == {"field": field}, str(caught.value)


def test_what_an_operation_names_that_is_not_there(world):
    def start(**spec: Any) -> StartOperation:
        return StartOperation({"pool": "b", "tasks": {"t": {"command": "true", "job_count": 1}}, **spec})

    assert field_of(world, start(pool_trees=["other"])) == "pool_trees"
    assert field_of(world, start(pool="a/b")) == "pool"
    operation = world.start("b", alias="*x")
    assert field_of(world, start(alias="*x")) == "alias"
    assert field_of(world, UpdateOperation(operation, {"weight": -1})) == "weight"
    assert field_of(world, UpdateOperation(operation, {"pool": "a/b"})) == "pool"
    assert field_of(world, StartOperation({}, "map")) == "type"
