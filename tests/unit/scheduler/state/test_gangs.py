"""Gangs: started in one step or not at all, stopped whole, room kept for one at a time (semantics.md 7.3)."""

from typing import Any

import pytest
from scheduler_world import EAGER, World, assert_consistent, make_task

from cpumond.scheduler.decide.cost import spared_until
from cpumond.scheduler.decide.protection import find_protections
from cpumond.scheduler.model import Rules
from cpumond.scheduler.settings.commands import RemoveTree
from cpumond.scheduler.state.node_commands import DrainNode


def make_world(nodes: int = 3, cpu: float = 2.0, **tree: Any) -> World:
    world = World(**{**EAGER, "gang_reservation_timeout": 0, **tree})
    world.add_nodes(nodes, cpu=cpu)
    world.step()
    return world


def make_gang(**more: Any) -> tuple[World, str]:
    world = make_world(**more)
    gang = world.run(jobs=3, cpu=2.0, is_gang=True)
    assert len(world.jobs_of(gang)) == 3
    return world, gang


def test_all_jobs_start_with_one_heartbeat_and_are_stored_in_one_write():
    world = make_world()
    gang = world.start(jobs=3, cpu=2.0, is_gang=True)
    world.after(1.0).update()
    world.beat(world.nodes["n1"])
    assert sorted(job.node.id for job in world.jobs_of(gang)) == ["n0", "n1", "n2"]
    assert sum(kind == "start" for kind, _ in world.stored) == 3
    world.beat()
    assert all(len(node.jobs) == 1 for node in world.nodes.values())


def test_limits_forbid_a_gang_as_a_whole():
    world = make_world()
    world.create_pool("p", resource_limits={"cpu": 5})
    gang = world.run("p", jobs=3, cpu=2.0, is_gang=True)
    assert not world.jobs_of(gang)
    assert list(world.element(gang).deactivations) == ["resource_limits"]


@pytest.mark.parametrize("how", ["failed", "lost", "aborted"])
def test_a_job_that_ends_without_its_work_stops_and_restarts_the_gang(how):
    world, gang = make_gang()
    first = {job.id for job in world.jobs_of(gang)}
    node = world.nodes["n1"]
    [other] = world.nodes["n2"].jobs
    world.nodes["n2"].keeps_stopping = True
    node.finish(next(iter(node.jobs)), how)  # type: ignore[arg-type]
    world.step()
    assert not world.jobs_of(gang)
    world.settle_down(5)
    # The next run does not meet a job of the last one.
    assert not world.jobs_of(gang)
    assert list(world.element(gang).deactivations) == ["gang_stops"]
    world.nodes["n2"].let_go(other, steps=2)
    assert len(world.jobs_of(gang)) == 3
    assert not first & {job.id for job in world.jobs_of(gang)}
    counts = world.record(gang).counts["t"]
    assert (getattr(counts, how), counts.aborted) == ((3, 3) if how == "aborted" else (1, 2))
    assert_consistent(world.state)


def test_a_gang_that_fails_as_a_whole_has_failed_once():
    world = make_world(nodes=1, cpu=4.0)
    gang = world.run(jobs=4, is_gang=True, max_failed_job_count=3)
    [node] = world.nodes.values()
    first, *others = list(node.jobs)
    for job_id in others:
        node.finish(job_id, "failed", finish_time=world.now + 0.5)
    node.finish(first, "failed", finish_time=world.now + 0.4)
    world.step()
    counts = world.record(gang).counts["t"]
    assert (counts.failed, counts.aborted) == (1, 3)
    ended = world.state.finished_jobs[gang]
    assert ended[first].state == "failed"
    assert all(ended[each].reason.startswith(f"its gang stops with job {first}: ") for each in others)
    world.settle_down(3)
    assert len(world.jobs_of(gang)) == 4


def test_a_graceful_drain_gives_as_long_to_the_gangs_jobs_elsewhere():
    world = make_world()
    world.run(jobs=3, cpu=2.0, is_gang=True)
    for node in world.nodes.values():
        node.keeps_stopping = True
    world.do(DrainNode("n0", graceful=True))
    world.settle_down(2)
    settings = world.tree().config.settings
    times = [stop.timeout_s * 1e3 for node in world.nodes.values() for stop in node.stopping.values()]
    assert settings.job_graceful_preemption_timeout > settings.job_preemption_timeout
    assert times == [settings.job_graceful_preemption_timeout] * 3


def test_a_gang_waits_for_jobs_that_an_earlier_run_stopped():
    world, gang = make_gang(nodes=6)
    first, *others = [node for node in world.nodes.values() if node.jobs]
    for node in others:
        node.keeps_stopping = True
    first.finish(next(iter(first.jobs)), "failed", steps=2)
    world.restart(steps=4)
    assert not world.jobs_of(gang)
    for node in others:
        for job_id in list(node.stopping):
            node.let_go(job_id)
    world.settle_down(3)
    assert len(world.jobs_of(gang)) == 3


def test_a_restart_of_the_scheduler_leaves_no_gang_in_part():
    world, gang = make_gang()
    world.restart(steps=3)
    assert len(world.jobs_of(gang)) == 3
    assert all(len(node.jobs) == 1 for node in world.nodes.values())
    # As if the scheduler had ended between the end of one job and the order to stop the others.
    world.restart()
    del world.stored["start", next(iter(world.nodes["n0"].jobs))]
    world.restart()
    assert not world.jobs_of(gang)
    world.settle_down(5)
    assert len(world.jobs_of(gang)) == 3


def make_rivals(gang_jobs: int, spared_ms: float = 0, **tree: Any) -> tuple[World, str, str]:
    """Three nodes full of another's jobs; a gang with the right to two thirds of them."""
    world = make_world(**tree)
    world.create_pool("big", min_run_time=spared_ms)
    world.create_pool("small", weight=2)
    big = world.run("big", jobs=20)
    return world, big, world.run("small", jobs=gang_jobs, is_gang=True, steps=5)


def test_nobody_is_killed_for_a_part_of_a_gang():
    world, big, gang = make_rivals(3, spared_ms=500_000)
    for name, taken in (("n2", 0), ("n1", 3)):
        for job_id in world.nodes[name].jobs:
            world.state.jobs[job_id].began_at = world.now - 1000.0
        world.settle_down(5)
        assert (len(world.jobs_of(big)), len(world.jobs_of(gang))) == (6 - taken, taken)
    assert len(world.state.preemptions) == 3


def test_the_budget_of_preemptions_holds_for_the_whole_gang():
    world, big, gang = make_rivals(3, max_preemptions_per_minute=2)
    assert (len(world.jobs_of(big)), len(world.jobs_of(gang))) == (6, 0)


def test_a_gang_is_taken_whole():
    world = make_world()
    world.create_pools("big", "small")
    gang = world.run("big", jobs=6, is_gang=True)
    assert len(world.jobs_of(gang)) == 6
    late = world.run("small", jobs=3, steps=8)
    assert not world.jobs_of(gang)
    assert len(world.jobs_of(late)) == 3
    taken = [record for record in world.state.preemptions if record.operation_id == gang]
    assert len(taken) == 6
    assert len({record.at for record in taken}) == 1


def test_a_gang_with_one_spared_job_is_taken_not_at_all():
    world = make_world()
    world.create_pool("big", min_run_time=100_000)
    world.create_pool("small")
    gang = world.run("big", jobs=6, is_gang=True)
    for node in list(world.nodes.values())[1:]:
        for job_id in node.jobs:
            world.state.jobs[job_id].began_at = world.now - 1000.0
    late = world.run("small", jobs=3, steps=20)
    assert len(world.jobs_of(gang)) == 6
    [kept] = find_protections(world.element(late), "normal", world.now)
    assert (kept.cause, kept.jobs) == ("time", 6)
    assert kept.first_until == kept.until == max(spared_until(job) for job in world.jobs_of(gang))


def test_a_graceful_gang_ends_when_the_time_of_each_job_is_over():
    world = make_world()
    world.create_pool("big")
    world.create_pool("small", weight=4)
    tasks = {name: make_task(2, min_run_time=ms) for name, ms in (("a", 0), ("b", 60_000))}
    gang = world.run("big", tasks=tasks, is_gang=True, preemption_mode="graceful")
    world.run("small", jobs=6, steps=50)
    assert len(world.jobs_of(gang)) == 4
    world.settle_down(20)
    assert not world.jobs_of(gang)


def test_nobody_else_is_stopped_for_a_limit_that_holds_without_the_gang():
    world = make_world(nodes=2, cpu=4.0)
    world.create_pool("p")
    small = world.start("p", jobs=2, weight=0.01)
    world.step(1.0, world.nodes["n0"])
    world.settle_down()
    gang = world.run("p", jobs=4, is_gang=True)
    assert sorted(len(node.jobs) for node in world.nodes.values()) == [2, 4]
    world.set_pool("p", resource_limits={"cpu": 3})
    world.settle_down()
    # Two of the gang are on the node of the others; three cores are too much, and all four of it go.
    assert [record.operation_id for record in world.state.preemptions] == [gang] * 4
    assert len(world.jobs_of(small)) == 2


def test_on_a_node_that_fits_without_the_gang_nobody_else_is_stopped():
    world = make_world(nodes=1, cpu=6.0, preemptive_scheduling_backoff=10**8)
    world.run(jobs=3, steps=2)
    gang = world.run(jobs=2, is_gang=True)
    world.run(jobs=1)
    # Two cores too much: one of the gang and one other would be the least protected, but the gang goes whole.
    world.nodes["n0"].has(2.0)
    world.settle_down(25)
    assert [(record.operation_id, record.kind) for record in world.state.preemptions] == [(gang, "overcommit")] * 2


def make_busy(timeout_ms: float) -> tuple[World, list[str]]:
    """Three nodes full of jobs that nobody takes; two gangs of three, each of which may have all that is free."""
    world = make_world(fair_share_starvation_timeout=10**9, gang_reservation_timeout=timeout_ms)
    world.create_pool("big")
    world.run("big", jobs=1000)
    gangs = []
    for number in range(2):
        world.create_pool(f"g{number}", weight=2 - number)
        gangs.append(world.start(f"g{number}", jobs=3, cpu=0.5, is_gang=True))
    world.step()
    return world, gangs


def end_one(world: World) -> None:
    """The oldest job of another ends."""
    jobs = [(job.started_at, job_id, node) for node in world.nodes.values() for job_id, job in node.jobs.items()]
    _, job_id, node = min((each for each in jobs), key=lambda each: each[:2])
    node.finish(job_id)


def test_room_is_kept_for_one_gang_at_a_time_until_it_fits():
    world, gangs = make_busy(60_000)
    assert world.state.gangs.reservations["default"].element.name == gangs[0]
    while not world.jobs_of(gangs[0]):
        end_one(world)
        world.step()
        assert world.now < 1100.0
    assert len(world.jobs_of(gangs[0])) == 3
    world.step()
    assert world.state.gangs.reservations["default"].element.name == gangs[1]


def test_a_gang_starts_on_room_kept_for_it_however_little_is_left():
    tree = {"max_unpreemptible_running_job_count": 0, "fair_share_starvation_timeout": 10**9}
    world = World(Rules(spare=(1.0, 1.0, 0.0, 0.0, 0.0)), **tree, gang_reservation_timeout=60_000)
    world.add_nodes(2, cpu=4)
    world.step()
    world.create_pool("big")
    world.create_pool("small", weight=20)
    world.run("big", jobs=1000)
    gang = world.start("small", jobs=2, cpu=3.5, is_gang=True)
    for _ in range(8):
        world.step()
        end_one(world)
    world.settle_down()
    assert len(world.jobs_of(gang)) == 2


def test_room_is_given_up_after_its_time_and_the_next_gang_has_its_turn():
    world, gangs = make_busy(5000)
    seen = []
    for _ in range(30):
        world.step()
        kept = world.state.gangs.reservations.get("default")
        if kept is not None and seen[-1:] != [kept.element.name]:
            seen.append(kept.element.name)
    assert seen[:3] == [gangs[0], gangs[1], gangs[0]]


@pytest.mark.parametrize("how", ["abort", "remove"])
def test_nothing_is_kept_for_or_known_of_a_gang_that_is_gone(how):
    world, gangs = make_busy(5000)
    state = world.state
    while not (state.gangs.reservations and state.gangs.looked and state.gangs.rests):  # the first one's time is over
        world.step()
        assert world.now < 1100.0
    if how == "remove":
        world.do(RemoveTree("default", recursive=True))
    world.abort(*gangs if how == "abort" else ())
    assert not state.gangs.reservations
    world.settle_down(8)
    assert not state.gangs.reservations
    assert not state.gangs.looked
    assert not state.gangs.rests
