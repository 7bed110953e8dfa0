"""Starvation and preemption as a node sees them: heartbeats in, orders out (semantics.md 6.1, 6.6 to 6.8)."""

import gc
import itertools
import math
import weakref

import pytest
from scheduler_world import World

from cpumond.fairshare.resources import CPU
from cpumond.scheduler.decide.placement import ServiceOrder


def make_starving_world(wanted: int = 6, **tree: object) -> tuple[World, object, str, str]:
    """A node of 10 cores full of ``low``'s jobs of one core; ``high`` has 6 cores guaranteed and wants 6 jobs."""
    world = World(pools=["low"], fair_share_starvation_timeout=10_000, max_unpreemptible_running_job_count=0, **tree)
    world.create_pool("high", strong_guarantee_resources={"cpu": 6})
    node = world.node("n1", cpu=10)
    low = world.run("low", jobs=10)
    assert len(node.jobs) == 10
    return world, node, low, world.start("high", jobs=wanted)


def test_6_6_one_job_starts_preemptively_per_heartbeat_after_the_backoff():
    world, _node, _low, high = make_starving_world(preemptive_scheduling_backoff=5000)
    seen, begun = [], world.now
    for _ in range(60):
        before = len(world.jobs_of(high))
        world.step(1.0)
        if len(world.jobs_of(high)) > before:
            seen.append(world.now)
            assert len(world.jobs_of(high)) == before + 1
    assert len(seen) == 6
    assert seen[0] > begun + 10.0, "nobody preempts before the time-out"
    assert all(later - earlier >= 5.0 for earlier, later in itertools.pairwise(seen))


def make_starving_now(wanted: int = 6, **tree: object) -> tuple[World, object, str, str]:
    """The same, at the update that finds ``high`` starving; nobody has asked for work since."""
    world, node, low, high = make_starving_world(wanted, preemptive_scheduling_backoff=0, **tree)
    for _ in range(2):
        world.update()
        world.now += 11.0
    world.update()
    assert world.element(high).starvation_status == "starving"
    return world, node, low, high


def test_6_6_a_start_needs_no_second_update_and_a_new_share_ends_it():
    world, node, _low, high = make_starving_now(20, fair_share_starvation_tolerance=0.5)
    for _ in range(8):
        world.now += 0.1
        node.beat()
    # Half of its fair share is enough; the next update only says the same.
    enough = math.ceil(world.element(high).fair_share[CPU] * 10.0 * 0.5)
    assert 3 <= enough < 8
    assert len(world.jobs_of(high)) == len(world.state.preemptions) == enough


@pytest.mark.parametrize("change", ["suspend", "abort", "leave"])
def test_6_6_who_is_gone_or_wants_no_more_since_the_update_takes_nothing(change):
    world, node, _low, high = make_starving_now()
    node.beat()
    assert len(world.state.preemptions) == 1
    if change == "suspend":
        world.suspend(high)
    elif change == "abort":
        world.abort(high)
    else:
        world.set_operation(high, pool="low")  # where nobody starves; what it had been is forgotten with its share
        world.element(high).starvation_status = "non_starving"
    for _ in range(3):
        world.now += 0.1
        node.beat()
    assert len(world.state.preemptions) == 1


def test_6_6_who_may_preempt_is_ranked_once_per_update(monkeypatch):
    world, node, _low, _high = make_starving_now()
    ranked = []
    rank = ServiceOrder.rank
    monkeypatch.setattr(ServiceOrder, "rank", lambda self, elements: ranked.append(1) or rank(self, elements))
    for _ in range(4):
        world.now += 0.1
        node.beat()
    assert len(ranked) == 1
    world.update()
    node.beat()
    assert len(ranked) == 2


def test_6_6_an_order_of_service_is_freed_with_its_last_reference():
    world, _node, _low, high = make_starving_now()
    order = ServiceOrder(world.tree())
    known = weakref.ref(order)
    gc.disable()  # the scheduler collects garbage once a minute, and makes an order after each update
    try:
        assert order.rank([world.element(high)]) == [world.element(high)]
        del order
        assert known() is None
    finally:
        gc.enable()


def test_6_7_a_graceful_operation_is_interrupted_with_its_own_time_out():
    world = World(pools=["p"], job_graceful_preemption_timeout=42_000, max_unpreemptible_running_job_count=0)
    node = world.node("n1", cpu=10)
    world.run("p", jobs=10, preemption_mode="graceful")
    world.start("p", jobs=10)
    stops = []
    for _ in range(5):
        world.after(1.0).update()
        stops += node.beat().stop
    assert {order.timeout_s for order in stops} == {42.0}
    assert {order.kind for order in stops} == {"graceful"}
