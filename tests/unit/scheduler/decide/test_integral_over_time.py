"""Integral guarantees while time passes: refill, caps, what is charged, changes and restarts (semantics.md 9).

The cluster has 1000 cores on one node, an update each ten seconds unless a test says otherwise. Volumes are share*s,
as the documents print them.
"""

from typing import Any

import pytest
from scheduler_world import World, assert_consistent, burst

from cpumond.fairshare import fair_share_update
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.settings.commands import RemovePool
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.state import updates

CORES = 1000.0


class Farm(World):
    """Pools with integral guarantees against a pool "rest" that wants everything and guarantees nothing."""

    def __init__(self, cores: float = CORES, **tree: Any) -> None:
        super().__init__(**tree)
        self.node("n1", cpu=cores, user_slots=0)

    def want(self, pool: str, cores: float) -> str:
        tasks = {"t": {"command": "true", "job_count": max(int(cores), 1), "cpu_limit": 1.0, "user_slots": 0}}
        return self.do(StartOperation({"pool": pool, "tasks": tasks})).id

    def volume(self, name: str) -> float:
        return self.pool(name).volume[CPU] / self.tree().total[CPU]

    def pass_time(self, seconds: float, period: float = 10.0) -> None:
        """Updates only; no job starts."""
        for _ in range(round(seconds / period)):
            self.after(period).update()


@pytest.fixture
def farm():
    """Pool "p" has saved 10 share*s: a hundred seconds of its flow of a tenth."""
    farm = Farm()
    farm.create_pool("p", integral_guarantees=burst(100, 500))
    farm.update()
    farm.pass_time(100)
    yield farm
    assert_consistent(farm.state)


@pytest.mark.parametrize("back", ["burst", "relaxed"])
def test_9_the_type_none_keeps_the_volume_and_does_not_change_it(farm, back):
    farm.set_pool("p", integral_guarantees={"guarantee_type": "none"})
    farm.pass_time(100)
    assert farm.volume("p") == pytest.approx(10.0)
    farm.set_pool("p", integral_guarantees={"guarantee_type": back, "resource_flow": {"cpu": 100}})
    farm.update()
    assert farm.volume("p") == pytest.approx(10.0)
    farm.pass_time(100)
    assert farm.volume("p") == pytest.approx(20.0)


def test_9_the_type_may_change_while_an_update_is_computed(farm):
    farm.set_pool("p", integral_guarantees__guarantee_type="none")
    snapshot = updates.make_snapshot(farm.state, farm.tree())
    farm.set_pool("p", integral_guarantees__guarantee_type="burst")
    updates.accept_update(farm.state, farm.tree(), fair_share_update(snapshot, farm.now + 1, farm.now), farm.now + 1)
    assert farm.volume("p") == pytest.approx(10.0)


def test_9_a_pool_that_is_made_again_starts_with_nothing(farm):
    farm.want("p", 10)
    farm.do(RemovePool("default", "p"))
    farm.pass_time(10)
    farm.create_pool("p", integral_guarantees=burst(100, 500))
    assert farm.volume("p") == 0.0


def test_9_when_the_cluster_grows_the_volume_stays_and_its_ratio_falls(farm):
    before = farm.pool("p").volume
    farm.node("n2", cpu=1000, user_slots=0)
    farm.update()
    assert farm.pool("p").volume == before
    assert farm.volume("p") == pytest.approx(5.0)


def test_9_after_a_restart_unknown_or_not_integral_pools_are_dropped(farm):
    for name in ("gone", "none", "kept"):
        farm.create_pool(name, integral_guarantees=burst(100, 500))
    farm.update()
    farm.pass_time(100)
    farm.do(RemovePool("default", "gone"))
    farm.set_pool("none", integral_guarantees__guarantee_type="none")
    farm.restart()
    farm.create_pool("gone", integral_guarantees=burst(100, 500))
    farm.set_pool("none", integral_guarantees__guarantee_type="burst")
    assert (farm.volume("gone"), farm.volume("none")) == (0.0, 0.0)
    assert farm.volume("kept") == pytest.approx(10.0)


def test_9_type_none_is_not_persisted(farm):
    assert updates.progress_of(farm.tree())["volumes"]
    farm.set_pool("p", integral_guarantees__guarantee_type="none")
    farm.update()
    assert updates.progress_of(farm.tree())["volumes"] == {}
