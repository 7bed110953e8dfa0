"""Who is served on a heartbeat, in which order, and what holds a start back (semantics.md 4, 7)."""

import math
from typing import Any

import pytest
from scheduler_world import EASY, World, assert_consistent

from cpumond.fairshare.resources import CPU, Vector
from cpumond.scheduler.decide.placement import satisfaction_of
from cpumond.scheduler.model import Rules

NEVER = math.inf


def cpu(*shares: float) -> list[Vector]:
    return [(0.0, share, 0.0, 0.0, 0.0) for share in shares]


def started(world: World, operations: list[str]) -> list[int]:
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


def test_7_1_a_pool_above_its_share_waits_for_one_below_it(world):
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


@pytest.mark.parametrize(("memory", "jobs"), [(256 * 2**20, 1), (256 * 2**20 - 1, 0), (0, 1)])
def test_7_1_the_spare_of_memory_of_a_node_that_tells_any(memory, jobs):
    world = World(Rules(), pools=["p"])
    operation = world.start("p")
    world.node("n1", memory=memory)
    world.settle_down()
    assert len(world.jobs_of(operation)) == jobs


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


def test_4_fifo_index_is_that_of_running_operations(world):
    world.create_pool("f", mode="fifo", max_running_operation_count=1)
    first, second = world.start("f"), world.start("f", weight=5.0)
    world.node("n1")
    world.update()
    assert world.element(first).fifo_index == 0
    assert world.element(second).fifo_index is None
