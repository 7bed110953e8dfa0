"""A refusal that is about one option and depends on what is there already names the option in ``field``."""

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


def change(pool: str, path: str, value: Any) -> ChangePool:
    return ChangePool(TREE, pool, (Edit(tuple(path.split("/")), value),))


def test_a_rule_of_several_pools_names_the_option_of_the_changed_pool(world):
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
    field = field_of(world, CreatePool(TREE, "k", "j", {"integral_guarantees": flow}))
    assert field == "integral_guarantees/resource_flow"


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
    field = field_of(world, put("preemption_satisfaction_threshold", 0.1))
    assert field == "aggressive_preemption_satisfaction_threshold"


@pytest.mark.parametrize(
    ("given", "field"), [({"smoothing-factor": 2}, "job_cpu_monitor/smoothing_factor"), (5, "job_cpu_monitor")]
)
def test_options_of_the_monitor(given, field):
    with pytest.raises(CommandError) as caught:
        read_spec({"tasks": {"t": {"command": "true", "job_count": 1}}, "job_cpu_monitor": given}, read_monitor)
    assert caught.value.attributes == {"field": field}


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
