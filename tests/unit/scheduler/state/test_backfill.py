"""Room that is kept for a gang is used meanwhile by jobs that end before it is needed (semantics.md 7.3)."""

from typing import Any

import pytest
from scheduler_world import World, assert_consistent

from cpumond.api.views import view_job
from cpumond.scheduler.answers.obstacles import split_capacity
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.decide.backfill import list_returns
from cpumond.scheduler.elements.figures import TREE

LONG_S, SHORT_S = 100.0, 10.0
FAR = 10**9


def make_known(world: World, title: str, run_s: float) -> None:
    """Four jobs of that title complete, each after so long."""
    known = world.run("small", jobs=4, cpu=0.5, title=title)
    world.step(min(job.start_time for job in world.jobs_of(known)) + run_s - world.now)
    end(world, known)


def end(world: World, operation: str, number: int = 1000) -> None:
    for node in world.nodes.values():
        for job_id in [each for each, job in node.jobs.items() if job.order.operation_id == operation][:number]:
            node.finish(job_id)
    world.step()


def make_waiting(refuses: bool = False, **tree: Any) -> tuple[World, str, str]:
    """Two nodes of four cores. A gang of two jobs of 3.4 waits for a job that has one of them for another 100 s."""
    options = {"enable_backfill": True, "gang_reservation_timeout": 3_600_000, "fair_share_starvation_timeout": FAR}
    world = World(max_unpreemptible_running_job_count=0, preemptive_scheduling_backoff=0, **{**options, **tree})
    world.create_pool("big", weight=1000)
    world.create_pool("small")
    world.add_nodes(2, cpu=4)
    world.step()
    make_known(world, "short 1", SHORT_S)
    make_known(world, "long 1", LONG_S)
    busy = world.run("small", cpu=4.0, title="long 2", min_run_time=600_000)
    gang = world.run("big", jobs=2, cpu=3.4, is_gang=True, allow_reclaimed=not refuses)
    assert not world.jobs_of(gang)
    return world, gang, busy


def ask(world: World, jobs: int = 4, **spec: Any) -> str:
    """An operation of one-core jobs comes: how it is called, once it has what it gets."""
    task = {name: spec.pop(name) for name in ("job_time_limit", "fail_on_job_restart") if name in spec}
    return world.run("small", jobs=jobs, task=task, **spec)


def why(world: World, operation: str) -> str:
    answer = explain_operation(world.state, world.record(operation), world.now, {})
    return "\n".join(line for part in answer.trees for line in part.lines)


@pytest.mark.parametrize(
    ("spec", "jobs", "told"),
    [
        ({"title": "short 2"}, 4, ""),
        ({"title": "long 3"}, 0, "they run for too long (up to 2 min)"),
        ({"title": "new"}, 0, "not known before 4 jobs like them have completed"),
        ({"title": "new", "job_time_limit": 50_000}, 4, ""),
        ({"title": "new", "job_time_limit": 200_000}, 0, "they run for too long"),
        ({"title": "new", "time_limit": 50_000}, 4, ""),
        ({"title": "short 2", "fail_on_job_restart": True}, 0, "must not be stopped"),
        ({"title": "short 2", "is_gang": True, "jobs": 2}, 0, "have been reserved for a gang"),
        ({"title": "short 2", "preemption_mode": "graceful", "jobs": 2}, 1, ""),
    ],
)  # fmt: skip
def test_only_what_ends_before_the_room_is_needed_uses_it(spec, jobs, told):
    world, _, _ = make_waiting()
    times = world.state.gangs.run_times
    assert times is not None
    if spec["title"] == "new":  # nothing is known of its user, pool and tree
        times._seen = {kind: seen for kind, seen in times._seen.items() if kind[0] in ("operation", "like")}
    operation = ask(world, **spec)
    assert len(world.jobs_of(operation)) == jobs
    assert all(job.backfill_until is not None for job in world.jobs_of(operation))
    assert told in why(world, operation)


def test_without_the_option_nothing_uses_the_room_of_a_gang():
    world, _, _ = make_waiting(enable_backfill=False)
    assert not world.jobs_of(ask(world, title="short 2"))
    assert world.state.gangs.run_times is None  # nothing was learned: it costs nothing
    world, _, _ = make_waiting(refuses=True)
    assert not world.jobs_of(ask(world, title="short 2"))


@pytest.mark.parametrize("backfills", [False, True])
def test_the_gang_starts_as_soon_as_it_fits_whatever_uses_its_room(backfills):
    world, gang, busy = make_waiting(enable_backfill=backfills, min_run_time=600_000)
    short = ask(world, title="short 2")
    before = len(world.jobs_of(short))
    assert before == (4 if backfills else 0)
    end(world, busy)
    assert len(world.jobs_of(gang)) == 2
    assert not world.jobs_of(short)
    assert_consistent(world.state)
    records = [each for each in world.state.preemptions if each.operation_id == short]
    assert len(records) == before
    for each in records:
        assert each.preemptor_operation_id == gang
        assert "used resources reserved for that gang until they are needed" in each.why
    world.settle_down()
    assert {job.order.operation_id for node in world.nodes.values() for job in node.jobs.values()} == {gang}


def test_no_more_than_needed_stops_and_what_overstays_goes_first():
    world, gang, busy = make_waiting()
    world.abort(gang)
    world.settle_down()
    gang = world.run("big", jobs=2, cpu=3.0, is_gang=True)
    short = ask(world, title="short 2")
    assert len(world.jobs_of(short)) == 4
    first, *_, last = sorted(world.jobs_of(short), key=lambda job: job.sequence)
    order = (3.0, 3.0, 0.0, 0.0, 0.0)
    assert list_returns(first.node, order, world.now)[0] is last
    first.backfill_until = world.now - 1.0
    assert list_returns(first.node, order, world.now)[0] is first
    end(world, busy)
    assert len(world.jobs_of(gang)) == 2
    assert sum(job.node is first.node for job in world.jobs_of(short) if job.backfill_until is not None) == 1
    (record,) = [each for each in world.state.preemptions if each.job_id == first.id]
    assert "ran for longer than expected" in record.why


def test_who_starves_takes_no_room_of_a_gang_by_way_of_a_backfilled_job():
    world, _, _ = make_waiting(fair_share_preemption_timeout_limit=0)
    short = ask(world, title="short 2")
    world.create_pool("poor", weight=1000, fair_share_starvation_timeout=0)
    poor = world.run("poor", jobs=1, cpu=1.0, title="long 4")
    assert world.pool("poor").starvation_status == "starving"
    assert (len(world.jobs_of(short)), len(world.jobs_of(poor))) == (4, 0)


def test_an_operation_that_overstays_often_loses_the_right():
    world, _, _ = make_waiting()
    short = ask(world, jobs=40, title="short 2")
    assert len(world.jobs_of(short)) == 4
    world.step(SHORT_S * 1.2 + 5.0)
    end(world, short, 2)
    assert len(world.jobs_of(short)) == 4  # two are forgiven
    end(world, short, 1)
    assert len(world.jobs_of(short)) == 3
    assert "too many of them ran there for longer than expected" in why(world, short)


def test_others_have_the_cpu_beside_the_gangs_room_and_backfilled_jobs():
    world, _, _ = make_waiting()
    assert len(world.jobs_of(ask(world, jobs=3, title="short 2"))) == 3
    other = world.start("small", cpu=0.5, title="long 3")  # of one core that is free 0.4 are kept
    world.settle_down()
    (job,) = world.jobs_of(other)
    assert job.backfill_until is None


def test_a_restart_knows_what_gives_room_back():
    world, gang, busy = make_waiting()
    short = ask(world, title="short 2")
    until = [job.backfill_until for job in world.jobs_of(short)]
    world.restart(steps=3)
    assert [job.backfill_until for job in world.jobs_of(short)] == until
    end(world, busy)
    world.settle_down()
    assert len(world.jobs_of(gang)) == 2
    assert not world.jobs_of(short)


def test_it_is_seen_who_has_the_room_and_until_when():
    world, gang, _ = make_waiting()
    short = ask(world, title="short 2")
    told = why(world, gang)
    assert "resources on 2 nodes (n0, n1) have been reserved for it for" in told
    assert "are expected to be free in 1 min" in told
    assert "until then backfilled jobs use 4 cores of them" in told
    assert "4 jobs started on resources that are reserved for a gang (backfilled)" in why(world, short)
    (first, *_), tree = world.jobs_of(short), world.tree()
    assert view_job(first).backfill_until == first.backfill_until
    assert TREE["backfilled_cores"](tree) == split_capacity(tree).backfilled == 4.0
    end(world, short)
    assert view_job(world.state.finished_jobs[short][first.id]).backfill_until == first.backfill_until
