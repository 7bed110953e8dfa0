"""Who is served on a heartbeat, in which order, and what holds a start back (semantics.md 4, 7)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from scheduler_world import EASY, GIB, World, assert_consistent

from cpumond.fairshare.resources import CPU, Vector
from cpumond.scheduler.decide.placement import satisfaction_of
from cpumond.scheduler.model import Rules
from cpumond.scheduler.settings.operations import StartOperation

NEVER = math.inf


def cpu(*shares: float) -> list[Vector]:
    return [(0.0, share, 0.0, 0.0, 0.0) for share in shares]


def started(world: World, operations: list[str]) -> list[int]:
    """Active jobs of each operation."""
    return [len(world.jobs_of(each)) for each in operations]


BLOCKED = (0.1, 0.5, 0.0, 0.4, 0.0)
SATISFIED: dict[str, tuple[Vector, Vector, Vector, float]] = {
    "above the fair share the largest ratio": (
        (0.6, 0.9, 0.0, 0.1, 0.0), (0.5, 0.6, 0.0, 0.5, 0.0), (1.0, 1.0, 0.0, 1.0, 0.0), 1.5,
    ),
    "below it the largest of those that are not blocked": (
        (0.09, 0.25, 0.0, 0.1, 0.0), BLOCKED, (0.1, 1.0, 0.0, 1.0, 0.0), 0.5,
    ),
    "all blocked, the least": ((0.05, 0.125, 0.0, 0.4, 0.0), BLOCKED, BLOCKED, 0.25),
    "one without a share is served last": (
        (0.0, 0.1, 0.0, 0.2, 0.0), (0.0, 0.5, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.5, 0.0), NEVER,
    ),
    # in one resource
    "nothing is wanted of nothing": (*cpu(0.0, 0.0, 0.5), NEVER),
    "more than nothing": (*cpu(0.3, 0.0, 0.5), NEVER),
    "nothing of a share": (*cpu(0.0, 0.5, 1.0), 0.0),
    "half of it": (*cpu(0.25, 0.5, 1.0), 0.5),
    "more than it": (*cpu(0.75, 0.5, 1.0), 1.5),
    "half of all that is demanded": (*cpu(0.25, 0.5, 0.5), 0.5),
    "all that is demanded": (*cpu(0.5, 0.5, 0.5), 1.0),
}  # fmt: skip


@pytest.mark.parametrize(("usage", "fair", "demand", "expected"), SATISFIED.values(), ids=SATISFIED)
def test_7_2_satisfaction(usage, fair, demand, expected):
    assert satisfaction_of(usage, fair, demand) == pytest.approx(expected)


# --- 7.1, order of service


FIFO = {"mode": "fifo"}
SERVED: dict[str, tuple[dict[str, dict[str, Any]], list[tuple[str, int, float]], float, list[int]]] = {
    # pools; pool, jobs and their order of each operation; cores of the node; how many jobs of each it gets
    "each start is seen by the next choice": ({"p": {}}, [("p", 9, 1.0)] * 3, 9, [3, 3, 3]),
    "sub-pools share what their pool gets": (
        {"top": {}, "a": {"parent": "top", "weight": 3}, "b": {"parent": "top"}, "other": {}},
        [("a", 50, 1.0), ("b", 50, 1.0), ("other", 50, 1.0)], 16, [6, 2, 8],
    ),
    "the rest goes to who has its share": (
        {"a": {"weight": 1000}, "b": {}}, [("a", 2, 1.0), ("b", 50, 1.0)], 10, [2, 8],
    ),
    "what fits exactly is not lost to rounding": (
        {"p": {}, "q": {"resource_limits": {"cpu": 0.3}}}, [("p", 9, 1.1), ("q", 9, 0.1)], 3.6, [3, 3],
    ),
    "one that does not fit does not hold back others": ({"p": {}}, [("p", 1, 9.0), ("p", 9, 1.0)], 4, [0, 4]),
    "siblings share a limit above them": (
        {"top": {"resource_limits": {"cpu": 4}}, "a": {"parent": "top"}, "b": {"parent": "top"}},
        [("a", 9, 1.0), ("b", 9, 1.0)], 10, [2, 2],
    ),
    "4 each takes what it can of the rest": ({"f": FIFO}, [("f", 3, 1.0), ("f", 5, 1.0), ("f", 5, 1.0)], 10, [3, 5, 2]),
    "4 a FIFO pool and its sibling share by weight": (
        {"f": FIFO, "s": {}}, [("f", 50, 1.0), ("f", 50, 1.0), ("s", 50, 1.0)], 10, [5, 0, 5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ["fifo", "satisfaction"])
@pytest.mark.parametrize(("pools", "starts", "cores", "expected"), SERVED.values(), ids=SERVED)
def test_7_1_who_gets_how_many_jobs_in_either_order_of_handing_out(pools, starts, cores, expected, order):
    world = World(EASY, fifo_pool_scheduling_order=order)
    for name, options in pools.items():
        world.create_pool(name, **options)
    operations = [world.start(pool, jobs=jobs, cpu=cpu) for pool, jobs, cpu in starts]
    world.node("n1", cpu=cores)
    world.settle_down()
    assert started(world, operations) == expected
    assert_consistent(world.state)


def test_7_1_pools_of_many_small_operations_get_their_shares(world):
    """Each of them always has an operation without a job: the least child alone would not tell them apart."""
    world.create_pool("a", weight=2, max_running_operation_count=50)
    world.create_pool("b", max_running_operation_count=50)
    operations = {name: [world.start(name) for _ in range(40)] for name in ("b", "a")}
    world.node("n1", cpu=30)
    world.step()
    assert {name: sum(started(world, ids)) for name, ids in operations.items()} == {"a": 20, "b": 10}


def test_7_1_a_pool_above_its_share_waits_for_one_below_it_whose_operations_all_have_jobs(world):
    world.create_pool("crowd")
    world.create_pool("single", strong_guarantee_resources={"cpu": 6})
    crowd = [world.start("crowd") for _ in range(40)]
    first, second = world.node("n1", cpu=5), world.node("n2", cpu=5)
    world.update()
    first.beat()
    assert sum(started(world, crowd)) == 5
    single = world.start("single", jobs=40)
    world.update()
    second.beat()
    assert started(world, [single]) == [5]
    assert sum(started(world, crowd)) == 5


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (
            {"z": {"command": "true", "job_count": 2}, "a": {"command": "true", "job_count": 2, "cpu_limit": 2}},
            {"z": 2, "a": 1},
        ),
        (
            {
                "large": {"command": "true", "job_count": 1, "cpu_limit": 9},
                "small": {"command": "true", "job_count": 3},
            },
            {"small": 3},
        ),
    ],
    ids=["all may start", "one does not fit and does not hold back the next"],
)
def test_7_1_tasks_are_served_in_the_order_of_the_specification(world, tasks, expected):
    operation = world.do(StartOperation({"pool": "p", "tasks": tasks})).id
    world.node("n1", cpu=4)
    world.step()
    assert Counter(job.task.name for job in world.jobs_of(operation)) == expected


def test_7_1_an_operation_that_was_passed_over_is_tried_on_the_next_node(world):
    operation = world.start("p", cpu=9)
    small, large = world.node("n1", cpu=4), world.node("n2", cpu=9)
    world.update()
    small.beat()
    assert world.element(operation).deactivations == {"node_resources": 1}
    large.beat()
    assert started(world, [operation]) == [1]


@pytest.mark.parametrize("resource", ["cpu", "memory", "user_slots"])
def test_7_1_all_resources_must_fit(world, resource):
    operation = world.start("p", jobs=9, cpu=2.0, memory=3 * GIB)
    sizes = {"cpu": 100, "memory": 100 * GIB, "user_slots": 100, resource: 4 * GIB if resource == "memory" else 3}
    world.node("n1", **sizes)
    world.step()
    assert started(world, [operation]) == [{"cpu": 1, "memory": 1, "user_slots": 3}[resource]]


def test_7_1_suspended_and_pending_operations_get_nothing(world):
    world.create_pool("two", max_running_operation_count=2)
    operations = [world.start("two", jobs=2) for _ in range(3)]
    world.suspend(operations[0])
    world.node("n1")
    world.step()
    assert started(world, operations) == [0, 2, 0]
    world.resume(operations[0])
    world.step()
    assert started(world, operations) == [2, 2, 0]


def test_7_1_nothing_starts_before_the_first_update(world):
    operation = world.start("p")
    node = world.node("n1")
    node.beat()
    assert started(world, [operation]) == [0]


@pytest.mark.parametrize("where", ["operation", "pool", "ancestor", "share", "share of the operation"])
def test_7_1_limits_hold_at_every_level(world, where):
    world.node("n1", cpu=10)
    limits = {"resource_limits": {"cpu": 3}}
    top = limits if where == "ancestor" else {"max_share_ratio": 0.3} if where == "share" else {}
    world.create_pool("top", **top)
    world.create_pool("q", "top", **(limits if where == "pool" else {}))
    options = limits if where == "operation" else {"max_share_ratio": 0.3} if where == "share of the operation" else {}
    operation = world.run("q", jobs=9, **options)
    assert started(world, [operation]) == [3]
    assert world.cores("q") == 3


@pytest.mark.parametrize("what", ["pool", "operation"])
def test_7_1_a_lowered_limit_holds_at_once(world, what):
    node = world.node("n1")
    operation = world.start("p", jobs=9)
    world.update()
    if what == "pool":
        world.set_pool("p", resource_limits={"user_slots": 2})
    else:
        world.set_operation(operation, resource_limits={"cpu": 2})
    node.beat()
    assert len(world.jobs_of(operation)) == 2


@pytest.mark.parametrize("what", ["pool", "operation", "ephemeral"])
def test_7_1_limits_hold_before_the_first_update_that_knows_them(world, what):
    node = world.node("n1")
    world.create_pool("e", create_ephemeral_subpools=True, ephemeral_subpool_config={"resource_limits": {"cpu": 2}})
    world.update()
    limits = {"resource_limits": {"cpu": 2}}
    if what == "pool":
        world.create_pool("new", **limits)
        operation = world.start("new", jobs=9)
    elif what == "operation":
        operation = world.start("p", jobs=9, **limits)
    else:
        operation = world.start("e", jobs=9)
    node.beat()
    assert len(world.jobs_of(operation)) <= 2
    world.settle_down()
    assert len(world.jobs_of(operation)) == 2


def test_7_1_a_node_with_less_than_the_spare_is_not_offered_work():
    world = World(Rules(spare=(1.0, 1.0, 0.0, 268_435_456.0, 0.0)))
    world.create_pool("p")
    operation = world.start("p", jobs=99, cpu=0.5)
    world.node("n1", cpu=3.0)
    world.settle_down()
    # 2.5 cores are taken then, half a core is left, less than the core that must be there
    assert world.cores_of(operation) == 2.5


@pytest.mark.parametrize(("memory", "jobs"), [(256 * 2**20, 1), (256 * 2**20 - 1, 0), (0, 1)])
def test_7_1_the_spare_of_memory_of_a_node_that_tells_any(memory, jobs):
    world = World(Rules())
    world.create_pool("p")
    operation = world.start("p")
    world.node("n1", memory=memory)
    world.settle_down()
    assert len(world.jobs_of(operation)) == jobs


# --- 4, FIFO


def order_of(world: World, specs: list[dict[str, object]], **pool: object) -> list[int]:
    """In which order operations of a FIFO pool get the only core, as their places in ``specs``."""
    world.create_pool("f", mode="fifo", max_running_operation_count=20, **pool)
    operations = []
    for spec in specs:
        operations.append(world.start("f", **spec))
        world.now += 1
    node = world.node("n1", cpu=1)
    served = []
    for _ in range(sum(len(world.operation(each).record.tasks) for each in operations) * 40):
        world.step()
        for job_id, job in list(node.jobs.items()):
            place = operations.index(job.order.operation_id)
            if place not in served:
                served.append(place)
            node.finish(job_id)
        if len(served) == len(operations):
            break
    return served


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, [2, 0, 1, 3]),  # by weight, then start_time
        (["start_time"], [0, 1, 2, 3]),
        (["weight"], [2, 0, 1, 3]),
        (["pending_job_count"], [3, 2, 0, 1]),
        (["weight", "pending_job_count"], [2, 3, 0, 1]),
        (["pending_job_count", "weight", "start_time"], [3, 2, 0, 1]),
        (["start_time", "weight"], [0, 1, 2, 3]),
    ],
)
def test_4_every_sort_parameter(world, parameters, expected):
    specs = [{"jobs": 3}, {"jobs": 3}, {"jobs": 2, "weight": 2.0}, {"jobs": 1}]
    assert order_of(world, specs, **({"fifo_sort_parameters": parameters} if parameters else {})) == expected


@pytest.mark.parametrize("parameters", [["weight", "start_time"], ["start_time"], ["weight"], ["pending_job_count"]])
@pytest.mark.parametrize("weights", [(None, None), (1.0, None), (None, 1.0)])
def test_4_equal_operations_are_served_by_id(world, parameters, weights):
    world.create_pool("f", mode="fifo", fifo_sort_parameters=parameters)
    world.node("n1", cpu=1)
    ids = iter(["b", "a", "job"])
    world.new_id = lambda: next(ids)
    for weight in weights:
        world.start("f", **({} if weight is None else {"weight": weight}))
    world.update()
    assert (world.element("a").fifo_index, world.element("b").fifo_index) == (0, 1)
    assert world.element("a").fair_share[CPU] == pytest.approx(1.0)
    assert world.element("b").fair_share[CPU] == pytest.approx(0.0)
    world.beat()
    assert started(world, ["a", "b"]) == [1, 0]


def test_4_pending_job_count_is_read_again_at_each_update(world):
    world.create_pool("f", mode="fifo", fifo_sort_parameters=["pending_job_count"])
    first, second = world.start("f", jobs=2, weight=9.0), world.start("f", jobs=3)
    node = world.node("n1", cpu=3)
    world.update()
    assert [world.element(each).fifo_index for each in (first, second)] == [0, 1]
    world.set_operation(first, resource_limits={"cpu": 0})
    world.settle_down()  # the second one runs all its jobs and needs no more
    assert started(world, [first, second]) == [0, 3]
    assert [world.element(each).fifo_index for each in (first, second)] == [1, 0]
    assert len(node.jobs) == 3


def test_4_fifo_index_is_that_of_running_operations(world):
    world.create_pool("f", mode="fifo", max_running_operation_count=1)
    first, second = world.start("f"), world.start("f", weight=5.0)
    world.node("n1")
    world.update()
    assert world.element(first).fifo_index == 0
    assert world.element(second).fifo_index is None
