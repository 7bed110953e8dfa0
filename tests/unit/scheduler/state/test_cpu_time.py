"""CPU time of jobs: counted once, for their operation and all pools above (semantics.md 1.7)."""

import pytest
from scheduler_world import World, assert_consistent

from cpumond.core.wire import CPU_COUNTERS
from cpumond.scheduler.model import ROOT_POOL
from cpumond.scheduler.settings.commands import MovePool


@pytest.fixture
def world():
    world = World(pools=["a", "c"], nodes={"n1": 10})
    world.create_pool("b", "a")
    yield world
    assert_consistent(world.state)


def used(world: World, *pools: str) -> list[float]:
    return [world.pool(name).cpu_seconds for name in pools]


def run_one(world: World, pool: str = "b", **spec: object) -> tuple[str, str]:
    operation = world.run(pool, **spec)
    (job,) = world.jobs_of(operation)
    return operation, job.id


def report(world: World, job: str, cpu_seconds: float | None, reclaimed: float | None = None) -> None:
    node = world.nodes["n1"]
    node.jobs[job].cpu_seconds, node.jobs[job].reclaimed_cpu_seconds = cpu_seconds, reclaimed
    node.beat()


def test_what_no_host_can_have_used_is_not_believed(world):
    """One wrong number would stand out of the pool's graphs and sums for a day."""
    operation, job = run_one(world)
    report(world, job, 5.0, 1.0)
    node = world.nodes["n1"]
    node.jobs[job].ordered_cpu_seconds = node.jobs[job].late_cpu_seconds = 1e14
    report(world, job, 1e15, 1e15)
    assert used(world, "b", ROOT_POOL) == [5.0, 5.0]
    pool = world.pool("b")
    assert (pool.reclaimed_cpu_seconds, pool.ordered_cpu_seconds, pool.late_cpu_seconds) == (1.0, 0.0, 0.0)
    report(world, job, 6.0, 1.5)
    assert used(world, "b") == [6.0]
    node.finish(job, cpu_seconds=1e15)
    node.beat()
    assert used(world, "b") == [6.0]
    assert world.state.finished_jobs[operation][job].cpu_seconds == 6.0


@pytest.mark.parametrize(
    ("told", "counted", "end"),
    [
        ([10.0, 3.0, 9.0, 11.0], [10.0, 10.0, 10.0, 11.0], 11.0),  # it is the cgroup's: what was counted was used
        ([5.0, None], [5.0, 5.0], None),
    ],
    ids=["goes back", "not known"],
)
def test_cpu_time_that_goes_back_or_is_not_known_keeps_its_last_value(world, told, counted, end):
    operation, job = run_one(world)
    for seconds, most in zip(told, counted, strict=True):
        report(world, job, seconds)
        assert used(world, "b") == [most]
        assert world.state.jobs[job].report.cpu_seconds == (most if seconds is None else seconds)
    world.nodes["n1"].finish(job, cpu_seconds=end, steps=3)
    assert used(world, "b") == [counted[-1]]
    assert world.state.finished_jobs[operation][job].cpu_seconds == counted[-1]


@pytest.mark.parametrize("name", [name for name in CPU_COUNTERS if name != "cpu_seconds"])
def test_a_sum_that_goes_back_is_counted_from_where_it_is(world, name):
    """An agent was killed: it begins with what it had noted."""
    operation, job = run_one(world)
    node = world.nodes["n1"]
    for told, counted in ((36_000.0, 36_000.0), (100.0, 36_000.0), (130.0, 36_030.0), (130.0, 36_030.0)):
        setattr(node.jobs[job], name, told)
        node.beat()
        for element in (world.element(operation), world.pool("b"), world.pool(ROOT_POOL)):
            assert getattr(element, name) == pytest.approx(counted)
        assert getattr(world.state.jobs[job].report, name) == told
    node.finish(job, steps=3, **{name: 90.0})
    assert getattr(world.pool("b"), name) == pytest.approx(36_030.0), "less at the end takes nothing away"


def test_what_was_counted_stays_when_an_operation_moves(world):
    operation, job = run_one(world)
    report(world, job, 5.0)
    world.set_operation(operation, pool="c")
    report(world, job, 8.0)
    assert used(world, "b", "a", "c", ROOT_POOL) == [5.0, 5.0, 3.0, 8.0]
    assert world.element(operation).cpu_seconds == 8.0


def test_a_pool_that_is_renamed_or_moved_keeps_its_count(world):
    _, job = run_one(world)
    report(world, job, 5.0)
    world.do(MovePool("default", "b", "c", "d"))
    report(world, job, 6.0)
    assert used(world, "d", "c", "a", ROOT_POOL) == [6.0, 1.0, 5.0, 6.0]


def test_a_job_that_is_taken_over_counts_from_its_first_report(world):
    operation, job = run_one(world)
    report(world, job, 100.0, 10.0)
    world.restart()
    report(world, job, 103.0, 10.5)
    assert used(world, "b", ROOT_POOL) == [0.0, 0.0]
    assert world.state.jobs[job].report.cpu_seconds == 103.0
    report(world, job, 105.0, 11.0)
    assert used(world, "b", "a") == [2.0, 2.0]
    assert world.pool("b").reclaimed_cpu_seconds == 0.5
    world.nodes["n1"].finish(job, cpu_seconds=106.0, steps=3)
    assert used(world, "b") == [3.0]
    assert world.state.finished_jobs[operation][job].cpu_seconds == 106.0


def test_a_job_that_was_lost_for_a_while_counts_what_it_used_meanwhile(world):
    _, job = run_one(world)
    report(world, job, 5.0)
    world.after(400).expire()
    world.nodes["n1"].register()
    report(world, job, 300.0)
    assert used(world, "b") == [300.0]


def test_a_lost_job_that_completed_meanwhile_counts_what_it_used_meanwhile(world):
    operation, job = run_one(world, jobs=1)
    report(world, job, 5.0, 1.0)
    node = world.nodes["n1"]
    node.finish(job, cpu_seconds=300.0, reclaimed_cpu_seconds=None)
    world.after(400).expire()
    node.register()
    for _ in range(2):
        node.beat()
    assert world.states([operation]) == "c"
    assert used(world, "b", ROOT_POOL) == [300.0, 300.0]
    assert world.pool("b").reclaimed_cpu_seconds == 1.0
