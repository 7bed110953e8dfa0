"""The waste of a played week: classes of jobs, better orders, sentences; who may see which."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from scheduler_world import TREE, World

from cpumond.api.json.rights import filter_waste
from cpumond.scheduler.access import Rights
from cpumond.scheduler.elements import Job
from cpumond.scheduler.history.model import HOUR_S, POOL, USER, Amounts, Key, PeriodTotals
from cpumond.scheduler.history.savings import WEEK_S, monday_before
from cpumond.scheduler.history.waste import JobsOf, WasteClass, WasteView, describe_waste, find_better, make_waste
from cpumond.scheduler.model import ROOT_POOL, JobRecord
from cpumond.scheduler.rights.users import User

SINCE = monday_before(1_780_000_000.0)
UNTIL = SINCE + WEEK_S
GIB = 2**30


def ran(cores: float, used_cores: float, at_h: float = 1.0, hours: float = 1.0, **more: Any) -> JobRecord:
    """A job that began ``at_h`` hours after Monday."""
    begin, facts = SINCE + at_h * HOUR_S, {"task": "task", **more}
    return JobRecord(
        id="j", operation_id="o", tree=TREE, node_id="n", state="completed", start_time=begin,
        finish_time=begin + hours * HOUR_S, cpu_limit=cores, current_cpu_limit=cores,
        cpu_seconds=used_cores * hours * HOUR_S, ordered_cpu_seconds=cores * hours * HOUR_S, **facts,
    )  # fmt: skip


@pytest.fixture
def world() -> World:
    world = World(now=SINCE)
    for name, parent in (("ml", ROOT_POOL), ("train", "ml"), ("eval", "ml")):
        world.create_pool(name, parent)
    return world


def summarize(world: World, jobs: JobsOf, now: float = UNTIL, **asked: Any) -> WasteView:
    hours = {
        (USER, "ann"): (1200, 300),
        (POOL, ROOT_POOL): (1300, 400),
        (POOL, "ml"): (1200, 300),
        (USER, "bob"): (0, 0),
    }
    totals = {
        Key(kind, TREE, name): Amounts(ordered=ordered * HOUR_S, used=used * HOUR_S, reclaimed=600 * HOUR_S)
        for (kind, name), (ordered, used) in hours.items()
    }
    parents = {TREE: {"ml": ROOT_POOL, "train": "ml", "eval": "ml"}}
    return make_waste(PeriodTotals(totals, WEEK_S), SINCE, UNTIL, now, jobs, parents, **asked)


def jobs_of(world: World, title: str, jobs: Sequence[JobRecord | Job], pool: str = "train") -> JobsOf:
    return [(world.state.find_record(world.start(pool, user="ann", title=title)), jobs)]


def test_an_owner_hears_requested_and_used_cpu_and_which_jobs_to_lower(world):
    memory = {"memory_limit": 16 * GIB, "max_memory": 3 * GIB}
    jobs = [
        *jobs_of(world, "train 17", [ran(8.0, 1.9, hours=10, **memory)] * 3),
        *jobs_of(world, "train 18", [ran(8.0, 1.9, hours=5)] * 2),
        *jobs_of(world, "score", [ran(2.0, 1.9, hours=9)], "eval"),
    ]
    view = summarize(world, jobs)
    [ann] = view.users
    assert ann.sentence == '"ann" requested 1200 core-hours and used 300 (25.0 %); limits were lowered by 600.'
    train, score = ann.classes
    assert (train.title, train.jobs, train.better_cores, score.better_cores) == ("train #", 5, 2.5, None)
    assert train.sentence == (
        '"train #": 5 jobs requested 8 cores and used 1.9 on average: request 2.5; memory: at most 3.0 of 16.0 GiB.'
    )
    assert (train.ordered, train.used, ann.known) == pytest.approx((320.0, 76.0, 338.0))
    assert [each.name for each in view.pools] == [ROOT_POOL, "ml"], "alike in what went unused, by name"
    assert view.pools[1].classes == ann.classes, "of the pools below, too"
    assert [*describe_waste(view)][1:5] == [
        "",
        f'{ann.sentence} (tree "{TREE}")',
        f"- {train.sentence}",
        f"- {score.sentence}",
    ]
    only = summarize(world, jobs, pool="ml")
    assert ([*only.users], [each.name for each in only.pools]) == ([], ["ml"])


@pytest.mark.parametrize(
    ("job", "ordered", "used"),
    [
        (ran(4.0, 1.0, at_h=-1.0, hours=2.0), 4.0, 1.0),
        (ran(4.0, 1.0, at_h=167.5, hours=1.0), 2.0, 0.5),
        (ran(4.0, 1.0, at_h=-2.0, hours=1.0), 0.0, 0.0),
        (ran(4.0, 1.0, at_h=168.0, hours=1.0), 0.0, 0.0),
    ],
)
def test_a_job_counts_by_the_part_of_its_run_that_was_in_the_week(world, job, ordered, used):
    [ann] = summarize(world, jobs_of(world, "x", [job])).users
    assert [(each.ordered, each.used) for each in ann.classes] == ([pytest.approx((ordered, used))] if ordered else [])


def classes_of(world: World, jobs: Sequence[JobRecord]) -> list[WasteClass]:
    return summarize(world, jobs_of(world, "x", jobs)).users[0].classes


def test_no_lower_request_is_advised_to_jobs_held_back_by_their_own(world):
    held, late = {"throttled_cpu_seconds": 500.0}, {"throttled_cpu_seconds": 500.0, "late_cpu_seconds": 500.0}
    [its] = classes_of(world, [ran(8.0, 2.0, **held)])
    assert its.better_cores is None
    assert "throttled at their request" in its.sentence
    assert classes_of(world, [ran(8.0, 2.0, **late)])[0].better_cores == 2.5


def test_jobs_on_reclaimed_cpu_are_a_class_of_waste_and_a_little_is_none(world):
    classes = classes_of(world, [ran(8.0, 1.0), ran(4.0, 1.0, reclaimed=True), ran(4.0, 1.0, hours=0.1)])
    assert [(each.job_class, each.jobs) for each in classes] == [("ordinary", 2), ("reclaimed", 1)]
    assert '"x" on reclaimed CPU: 1 job requested 4 cores' in classes[1].sentence
    assert classes_of(world, [ran(4.0, 1.0, hours=0.1)])[0].better_cores is None


def test_a_job_that_runs_counts_by_its_counters_so_far(world):
    operation_id = world.start("train", user="ann", title="service", cpu=8.0)
    world.node("n1", 16.0)
    world.settle_down()
    [job] = world.state.jobs.values()
    job.began_at = SINCE
    job.report = type(job.report)(job.id, operation_id, 8.0, 8.0, cpu_seconds=WEEK_S * 2.0 * 1.5)
    view = summarize(world, [(world.state.find_record(operation_id), [job])], now=UNTIL + WEEK_S)
    [its] = view.users[0].classes
    assert (its.used_cores, its.used) == pytest.approx((1.5, 168 * 1.5))
    assert its.better_cores == 2.0


@pytest.mark.parametrize(
    ("means", "ordered", "better"),
    [
        ([(1.9, 1.0)], 8.0, 2.5),
        ([(0.2, 1.0)], 1.0, 0.3),
        ([(0.0, 1.0)], 1.0, 0.1),
        ([(1.0, 96.0), (7.0, 4.0)], 8.0, 1.5),
        ([(1.0, 94.0), (7.0, 6.0)], 8.0, None),
        ([(4.0, 1.0)], 5.0, None),
    ],
)
def test_a_better_order_is_enough_for_nearly_all_of_the_running_time(means, ordered, better):
    assert find_better(means, ordered) == better


def test_users_see_their_own_waste_and_that_of_readable_pools(world):
    world.create_pool("closed", acl=[{"action": "deny", "subjects": ["bob"], "permissions": ["read"]}])
    view = summarize(world, [])
    closed = [msgspec.structs.replace(view.pools[0], name=name) for name in ("closed", "gone")]
    view = WasteView(SINCE, UNTIL, WEEK_S, view.users, [*view.pools, *closed])

    def see(user: User) -> tuple[list[str], list[str]]:
        seen = filter_waste(view, Rights(world.state, user))
        return [each.name for each in seen.users], [each.name for each in seen.pools]

    assert see(User("bob")) == ([], [ROOT_POOL, "ml"])
    assert see(User("ann")) == (["ann"], [ROOT_POOL, "ml", "closed"])
    assert see(User("root", admin=True)) == (["ann"], [ROOT_POOL, "ml", "closed", "gone"])
