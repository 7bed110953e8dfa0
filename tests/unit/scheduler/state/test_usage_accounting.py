"""Usage follows the limits of running jobs at once and on every level (semantics.md 1.8, 1.9, 6.7, 8)."""

from typing import Any

import msgspec
import pytest
from scheduler_world import EASY, PlayedNode, World, assert_consistent

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.model import ROOT_POOL, Rules


class Small(World):
    """Pool "low" in pool "top", a node of 10 cores, an operation of ``jobs`` jobs of 4 cores, of which two run."""

    def __init__(self, rules: Rules = EASY, jobs: int = 2, **pool: object) -> None:
        super().__init__(rules)
        self.create_pool("top", **pool)
        self.create_pool("low", "top")
        self.host = self.node("n1")
        self.first = self.start("low", jobs=jobs, cpu=4.0)
        self.settle_down()
        self.one, self.two = self.host.jobs

    def levels(self) -> list[float]:
        """CPU in use: operation, its pool, the pool above, the root, the node."""
        pools = [self.cores(name) for name in ("low", "top", ROOT_POOL)]
        return [self.cores_of(self.first), *pools, self.state.nodes["n1"].used[CPU]]

    def report(self, cores: float, job: str = "") -> None:
        self.host.limit(job or self.one, cores)
        self.host.beat()


@pytest.fixture
def small():
    small = Small()
    assert small.levels() == [8.0] * 5
    yield small
    assert_consistent(small.state)


@pytest.mark.parametrize(("cores", "used"), [(1.5, 5.5), (6.0, 10.0)], ids=["lowered", "above the order"])
def test_8_a_changed_limit_counts_at_once_on_every_level(small, cores, used):
    small.report(cores)
    assert small.levels() == [used] * 5
    assert small.state.nodes["n1"].free[CPU] == 10.0 - used


def test_8_memory_counts_as_reported_or_as_ordered(world):
    node = world.node("n1", memory=100)
    world.run("p", memory=40)
    assert world.pool("p").usage[3] == 40
    heartbeat = node.heartbeat()
    (report,) = heartbeat.jobs
    world.hear(msgspec.structs.replace(heartbeat, jobs=[msgspec.structs.replace(report, memory=30)]))
    assert world.pool("p").usage[3] == world.state.nodes["n1"].used[3] == 30


def overcommit(allowed_s: float = 15.0, **rules: Any) -> tuple[Small, PlayedNode]:
    """A node whose freed cores were given to a third job before the first wanted them back."""
    small = Small(Rules(spare=EASY.spare, overcommit_duration_s=allowed_s, **rules), jobs=3)
    small.report(1.0)
    small.settle_down()
    assert len(small.host.jobs) == 3
    small.report(4.0)
    assert small.levels() == [12.0] * 5
    assert small.state.nodes["n1"].free[CPU] == -2.0
    assert small.state.nodes["n1"].overcommit_count == 1
    return small, small.host


@pytest.mark.parametrize("more_s", [0.0, 5.0])
def test_1_9_overcommit_is_repaired_after_its_time_latest_start_first(more_s):
    """The third job is on reclaimed CPU and has the additional time."""
    small, node = overcommit(additional_reclaimed_overcommit_duration_s=more_s)
    begun = small.now
    while small.now < begun + 15 + more_s:
        small.step()
        assert len(node.jobs) == 3
    small.step()
    assert set(node.jobs) == {small.one, small.two}
    (record,) = [record for record in small.state.preemptions if record.kind == "overcommit"]
    assert (record.operation_id, record.at) == (small.first, begun + 16 + more_s)
    assert record.freed["cpu"] == 4.0
    assert "12 of 10 cores" in record.why
    small.step()
    assert small.state.nodes["n1"].overcommitted_since is None
    assert small.operation(small.first).needed == {"t": 1}
    assert_consistent(small.state)


@pytest.mark.parametrize("is_reclaimed", [True, False])
def test_1_9_the_most_protected_jobs_stay(is_reclaimed):
    small = Small(Rules(spare=EASY.spare, overcommit_duration_s=3.0))
    small.report(1.0)
    other = small.run("low", cpu=4.0)
    (job,) = small.jobs_of(other)
    assert job.reclaimed
    job.reclaimed = is_reclaimed
    small.report(4.0)
    for _ in range(4):
        small.step()
    # The first operation has 6 cores of fair share: its second job is above half of that, the other's only one is not.
    stays = small.first if is_reclaimed else other
    assert [job.element.name for job in small.state.nodes["n1"].jobs.values()] == [small.first, stays]
