"""Points of the history: what a tick takes of the state, merging, views and reports."""

import math
from array import array
from typing import Any

import msgspec
import pytest
from history_ticks import row
from scheduler_world import World

from cpumond.scheduler.history import model
from cpumond.scheduler.history.collector import WATCHED_TICKS, Collector
from cpumond.scheduler.history.report import make_report
from cpumond.scheduler.history.series import combine, make_view, mean_of_parts, merge_columns, split, top_operations
from cpumond.scheduler.model import ROOT_POOL, CommandError, JobRecord
from cpumond.scheduler.settings.commands import MovePool, RemovePool

COUNTERS = ("cpu_seconds", "reclaimed_cpu_seconds", "ordered_cpu_seconds", "throttled_cpu_seconds", "late_cpu_seconds")
RATES = ("used_cores", "reclaimed_cores", "ordered_cores", "throttled_cores", "late_cores")


class Watch:
    """A world and the collector that takes its ticks."""

    def __init__(self, max_series: int = 1000) -> None:
        self.world = World()
        self.world.node("n1")
        self.world.create_pool("a")
        self.world.create_pool("b", "a")
        self.begin(max_series)

    def begin(self, max_series: int = 1000) -> None:
        self.collector = Collector(self.world.now, max_series)
        self.world.state.ended_elements = type(self.world.state.ended_elements)(maxlen=1000)

    def tick(self, interval_s: float = 10.0) -> model.Tick:
        self.world.now = max(self.collector.previous_at + interval_s, self.world.now)
        tick = self.collector.collect(self.world.state, self.world.now)
        assert tick is not None
        return tick

    def points(self, tick: model.Tick) -> dict[model.Key, dict[str, float]]:
        found = {}
        for kind, name in enumerate(model.KINDS):
            width = len(model.COLUMNS[name])
            for number, series in enumerate(tick.names[kind]):
                values = tick.values[kind][number * width : (number + 1) * width]
                assert model.Key(kind, *series) not in found
                found[model.Key(kind, *series)] = dict(zip(model.COLUMNS[name], values, strict=True))
        return found

    def look(self, interval_s: float = 10.0) -> dict[model.Key, dict[str, float]]:
        return self.points(self.tick(interval_s))

    def run_one(self, pool: str = "b", **spec: Any) -> tuple[str, str]:
        operation = self.world.run(pool, **spec)
        (job,) = self.world.jobs_of(operation)
        return operation, job.id

    def report(self, job_id: str, **facts: Any) -> None:
        """The node's next word about a job."""
        heartbeat = self.world.nodes["n1"].heartbeat()
        jobs = [msgspec.structs.replace(job, **facts) if job.job_id == job_id else job for job in heartbeat.jobs]
        self.world.hear(msgspec.structs.replace(heartbeat, jobs=jobs))


@pytest.fixture
def watch() -> Watch:
    return Watch()


def pool(name: str) -> model.Key:
    return model.Key(model.POOL, "default", name)


def operation_key(name: str) -> model.Key:
    return model.Key(model.OPERATION, "default", name)


# --- counters


@pytest.mark.parametrize(("counter", "rate"), list(zip(COUNTERS, RATES, strict=True)))
def test_each_counter_of_a_job_is_added_up_and_becomes_a_rate(watch, counter, rate):
    operation, job = watch.run_one()
    watch.report(job, **{counter: 30.0})
    world = watch.world
    for element in (world.element(operation), world.pool("b"), world.pool("a"), world.pool(ROOT_POOL)):
        assert [getattr(element, name) for name in COUNTERS] == [30.0 * (name == counter) for name in COUNTERS]
    found = watch.look(10.0)
    for key in (operation_key(operation), pool("b"), pool("a"), pool(ROOT_POOL)):
        assert [found[key][name] for name in RATES] == [3.0 * (name == rate) for name in RATES]
    watch.report(job, **{counter: 35.0})
    assert watch.look(5.0)[pool("b")][rate] == 1.0


def test_what_a_node_says_at_the_end_of_a_job_is_counted_and_stored(watch):
    operation, job = watch.run_one()
    watch.report(job, **dict.fromkeys(COUNTERS, 5.0))
    last = dict.fromkeys(COUNTERS, 7.0) | {"late_cpu_seconds": None}
    watch.world.nodes["n1"].finish(job, steps=3, **last)
    counted = [getattr(watch.world.pool("a"), name) for name in COUNTERS]
    assert counted == [7.0, 7.0, 7.0, 7.0, 5.0]
    record = watch.world.state.finished_jobs[operation][job]
    assert [getattr(record, name) for name in COUNTERS] == counted
    assert record.cgroup == f"jobs/{job}"


def test_a_record_of_the_version_before_is_read():
    old = (
        b'{"id":"j","operation_id":"o","task":"t","tree":"d","node_id":"n","state":"completed","start_time":1.0,'
        b'"finish_time":2.0,"cpu_limit":1.0,"current_cpu_limit":1.0}'
    )
    assert msgspec.json.decode(old, type=JobRecord).ordered_cpu_seconds is None


# --- ticks


def test_a_tick_has_all_kinds(watch):
    operation, job = watch.run_one(cpu=2.0)
    watch.report(job, current_cpu_limit=1.5, cpu_usage=1.0, smoothed_cpu_usage=0.75, min_cpu_limit=0.5, votes_sum=-3)
    found, of_node, of_job = watch.look(), model.Key(model.NODE, "", "n1"), model.Key(model.JOB, "", job)
    assert set(found) == {*(pool(name) for name in (ROOT_POOL, "a", "b")), of_node, operation_key(operation), of_job}
    assert math.isnan(found[of_job].pop("throttled_ratio"))
    assert found[of_job] == {
        "cpu_limit_cores": 2.0, "current_cpu_limit_cores": 1.5, "usage_cores": 1.0, "smoothed_cores": 0.75,
        "floor_cores": 0.5, "votes_sum": -3.0,
    }  # fmt: skip
    node = watch.world.state.nodes["n1"]
    assert found[of_node] == {
        "capacity_cores": node.capacity[1], "ordered_cores": 2.0, "limit_cores": 1.5, "used_cores": 1.0, "jobs": 1.0,
    }  # fmt: skip
    shown = found[operation_key(operation)]
    assert (shown["limit_cores"], shown["jobs"]) == (1.5, 1.0)
    assert (found[pool("a")]["limit_cores"], found[pool("a")]["total_cores"]) == (1.5, node.capacity[1])
    assert math.isnan(found[pool("a")]["volume"])


def test_an_integral_pool_shows_its_volume_and_the_flow_in_its_guarantee(watch):
    watch.world.create_pool("i", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 1.0}})
    watch.world.settle_down()
    watch.world.after(100.0).settle_down()
    shown = watch.look()[pool("i")]
    total = watch.world.tree().total[1]
    assert shown["guarantee_ratio"] == pytest.approx(shown["strong_guarantee_ratio"] + 1.0 / total)
    assert shown["capacity"] == pytest.approx(86_400.0 / total)
    assert 0.0 <= shown["volume"] <= shown["capacity"]


def test_a_late_tick_uses_the_time_that_has_passed(watch):
    _, job = watch.run_one()
    watch.report(job, cpu_seconds=60.0)
    tick = watch.tick(40.0)
    assert tick.interval_s == 40.0
    assert watch.points(tick)[pool("b")]["used_cores"] == 1.5
    assert watch.collector.collect(watch.world.state, watch.world.now) is None


def test_a_counter_that_began_anew_counts_from_zero(watch):
    _, job = watch.run_one()
    watch.report(job, cpu_seconds=60.0)
    watch.look()
    for each in ("b", "a"):
        watch.world.pool(each).cpu_seconds = 20.0
    assert watch.look()[pool("b")]["used_cores"] == 2.0


def test_an_operation_that_has_nothing_has_no_point(watch):
    watch.world.set_pool("b", max_running_operation_count=0)
    assert operation_key(watch.world.start("b")) not in watch.look()


def test_the_last_moments_of_an_operation_are_not_lost(watch):
    operation, job = watch.run_one()
    watch.report(job, cpu_seconds=10.0)
    watch.look()
    watch.report(job, cpu_seconds=15.0)
    watch.world.nodes["n1"].finish(job, cpu_seconds=18.0, steps=3)
    assert watch.world.states([operation]) == "c"
    last = watch.look()[operation_key(operation)]
    assert last["used_cores"] == pytest.approx(0.8)
    assert (last["limit_cores"], last["jobs"]) == (0.0, 0.0)
    assert operation_key(operation) not in watch.look()


def test_an_operation_between_two_ticks_is_not_lost(watch):
    watch.look()
    operation, job = watch.run_one("ephemeral")
    watch.report(job, cpu_seconds=5.0)
    watch.world.nodes["n1"].finish(job, cpu_seconds=8.0, steps=3)
    assert watch.look()[operation_key(operation)]["used_cores"] == pytest.approx(0.8)


def test_a_job_that_ends_after_its_operation_is_counted_for_a_while(watch):
    operation, job = watch.run_one()
    node = watch.world.nodes["n1"]
    node.keeps_stopping = True
    watch.report(job, cpu_seconds=10.0)
    watch.look()
    watch.world.abort(operation)
    node.beat()
    assert watch.look()[operation_key(operation)]["used_cores"] == 0.0
    node.let_go(job, cpu_seconds=30.0)
    node.beat()
    assert watch.look()[operation_key(operation)]["used_cores"] == 2.0
    for _ in range(WATCHED_TICKS + 1):
        assert operation_key(operation) not in watch.look()
    assert not watch.collector._gone


def test_a_renamed_pool_goes_on_under_its_new_name(watch):
    _, job = watch.run_one()
    watch.report(job, cpu_seconds=10.0)
    watch.look()
    watch.world.do(MovePool("default", "b", "a", "d"))
    watch.report(job, cpu_seconds=15.0)
    found = watch.look()
    assert found[pool("d")]["used_cores"] == 0.5
    assert pool("b") not in found


def test_a_pool_that_is_removed_ends_at_zero(watch):
    watch.world.create_pool("c")
    watch.look()
    watch.world.do(RemovePool("default", "c"))
    assert watch.look()[pool("c")]["limit_cores"] == 0.0
    assert pool("c") not in watch.look()


def test_pools_come_first_when_there_is_no_room(watch):
    watch.run_one()
    watch.begin(max_series=4)
    found = watch.look()
    assert [key.kind for key in found] == [model.POOL, model.POOL, model.POOL, model.NODE]
    assert found.keys() >= {pool(ROOT_POOL)}
    assert (watch.collector.series, watch.collector.left_out) == (4, 2)


def test_a_tick_says_how_many_operations_found_no_room(watch):
    for _ in range(3):
        watch.run_one()
    watch.begin(max_series=5)
    tick = watch.tick()
    assert (len(tick.names[model.OPERATION]), tick.left_out, watch.collector.left_out) == (1, 2, 5)
    watch.collector.max_series = 8
    tick = watch.tick()
    sizes = len(tick.names[model.OPERATION]), len(tick.names[model.JOB])
    assert (*sizes, tick.left_out, watch.collector.left_out) == (3, 1, 0, 2)


def test_jobs_do_not_push_out_the_last_point_of_an_operation(watch):
    for _ in range(3):
        watch.run_one()
    operation, job = watch.run_one()
    watch.begin(max_series=9)
    assert len(watch.tick().names[model.JOB]) == 1
    watch.report(job, cpu_seconds=100.0)
    watch.world.complete(operation)
    tick = watch.tick()
    assert watch.points(tick)[operation_key(operation)]["used_cores"] == 10.0
    assert (len(tick.names[model.JOB]), tick.left_out) == (1, 0)


def test_what_was_left_out_comes_in_with_the_rate_of_its_interval(watch):
    operation, job = watch.run_one()
    watch.begin(max_series=4)
    watch.report(job, cpu_seconds=100.0)
    watch.look()
    watch.collector.max_series = 100
    watch.report(job, cpu_seconds=105.0)
    assert watch.look()[operation_key(operation)]["used_cores"] == 0.5


def test_a_pool_removed_and_made_again_has_one_point_with_both_rates(watch):
    _, job = watch.run_one("short")
    watch.look()
    watch.report(job, cpu_seconds=20.0)
    watch.world.nodes["n1"].finish(job, cpu_seconds=20.0, steps=3)
    _, job = watch.run_one("short")
    watch.report(job, cpu_seconds=10.0)
    found = watch.look()[pool("short")]
    assert (found["used_cores"], found["running_operations"]) == (3.0, 1.0)


def test_ticks_with_the_same_series_share_their_names(watch):
    watch.run_one()
    first, second = watch.tick(), watch.tick()
    assert all(one is other for one, other in zip(first.names, second.names, strict=True))


# --- totals


def test_a_tick_adds_pools_and_users_to_its_day_also_without_series(watch):
    first, job = watch.run_one(user="ann", cpu=2.0)
    _, other = watch.run_one("a", user="bob")
    watch.begin(max_series=1)
    watch.report(other, ordered_cpu_seconds=20.0)
    watch.report(job, cpu_seconds=30.0, current_cpu_limit=1.5)
    totals = watch.tick(10.0).totals
    assert totals[model.COVERED_KEY] == model.Amounts(seconds=10.0, points=1)
    ann, bob = (totals[model.Key(model.USER, "default", name)] for name in ("ann", "bob"))
    assert (ann.used, ann.limit, ann.peak, ann.points, bob.ordered) == (30.0, 15.0, 1.5, 1, 20.0)
    assert (totals[pool("b")].used, totals[pool("a")].used, totals[pool(ROOT_POOL)].used) == (30.0, 30.0, 30.0)
    assert (totals[pool("b")].ordered, totals[pool("a")].ordered) == (0.0, 20.0)
    watch.report(job, cpu_seconds=35.0)
    watch.world.complete(first)
    assert watch.tick(10.0).totals[model.Key(model.USER, "default", "ann")].used == 5.0, "also where it has ended since"
    later = watch.tick(10.0).totals
    assert set(later) == {model.COVERED_KEY, model.Key(model.USER, "default", "bob"), pool(ROOT_POOL), pool("a")}


def test_what_preemptions_lost_is_in_the_totals_once(watch):
    watch.world.pool("b").lost_core_seconds = 40.0
    assert watch.tick().totals[pool("b")].lost == 40.0
    assert pool("b") not in watch.tick().totals


# --- merging


def test_what_nobody_knows_stays_unknown():
    merged = merge_columns([1.0, 1.0, 1.0], [(0, 2), (2, 3)], [array("f", [math.nan, math.nan, 1.0])], has_rates=False)
    assert math.isnan(merged[0][0])
    assert merged[0][1] == 1.0


def test_neighbours_of_one_bucket_go_together():
    assert split([1.0, 2.0, 11.0, 25.0, 29.0], lambda end: int(end / 10)) == [(0, 2), (2, 3), (3, 5)]
    assert split([], int) == []


def test_time_before_the_first_point_takes_none_of_the_points_of_a_view():
    points = model.Points(
        array("d", (1e6 + 10.0 * number for number in range(1, 1001))),
        array("d", [10.0] * 1000),
        [array("f", [1.0] * 1000) for _ in model.COLUMNS["operation"]],
    )
    view = make_view(operation_key("o"), points, 0.0, 2e6, 100, 10.0)
    assert (len(view.times), set(view.intervals), view.times[-1]) == (100, {100.0}, 1e6 + 10_000.0)


def test_an_operation_of_two_trees_has_added_cores_and_its_largest_share():
    def points(ends: list[float], **columns: float) -> model.Points:
        values = row(model.OPERATION, **columns)
        return model.Points(
            array("d", ends), array("d", [10.0] * len(ends)), [array("f", [v] * len(ends)) for v in values]
        )

    both = combine(
        [points([10.0, 20.0], used_cores=1.0, usage_ratio=0.5), points([20.0, 30.0], used_cores=2.0, usage_ratio=0.25)],
        model.OPERATION,
    )
    shown = make_view(model.Key(model.OPERATION, "", "o"), both, 0.0, 30.0, 10, 10.0)
    assert shown.times == [10.0, 20.0, 30.0]
    assert (shown.columns["used_cores"], shown.columns["usage_ratio"]) == ([1.0, 3.0, 2.0], [0.5, 0.5, 0.25])


# --- reports


def test_a_report_names_what_the_state_knows(watch):
    watch.world.create_pool("c", "b")
    operation, _ = watch.run_one("b", title="nightly", user="ann")
    hour = model.Amounts(3600.0, 1800.0, 7200.0, 360.0, 36.0, 5400.0, points=10, peak=2.0)
    totals = {pool(name): hour for name in (ROOT_POOL, "gone", "c", "b", "a")}
    totals |= {operation_key(operation): hour, operation_key("forgotten"): hour}
    found = model.PeriodTotals(totals, 3000.0, 5, {"default": 3})
    report = make_report(watch.world.state, found, 0.0, 3600.0, 10.0, None)
    (tree,) = report.trees
    assert (report.since, report.until, report.covered_s, report.period_s) == (0.0, 3600.0, 3000.0, 10.0)
    assert [(each.name, each.parent) for each in tree.pools] == [
        ("a", ROOT_POOL), ("b", "a"), ("c", "b"), ("gone", "")
    ]  # fmt: skip
    total = tree.total
    assert (total.used, total.reclaimed, total.ordered, total.limit) == (1.0, 0.5, 2.0, 1.5)
    assert (total.throttled, total.late, total.peak_limit_cores, total.points) == (0.1, 0.01, 2.0, 10)
    first, second = tree.operations
    assert (first.title, first.user, first.pool, first.state) == ("nightly", "ann", "b", "running")
    assert (second.name, second.title, second.state) == ("forgotten", "", "")
    assert (tree.left_out_operations, report.operations_without_series) == (3, 5)


def test_a_report_of_days_has_users_by_request_and_the_lost_hours(watch):
    users = {"ann": 1.0, "bob": 3.0, "eve": 2.0}
    totals = {model.Key(model.USER, "default", who): model.Amounts(ordered=3600.0 * h) for who, h in users.items()}
    totals |= {
        pool("a"): model.Amounts(lost=7200.0),
        model.Key(model.ARM, "default", "control"): model.Amounts(ordered=1.0),
    }
    [tree] = make_report(watch.world.state, model.PeriodTotals(totals, 1.0), 0.0, 1e6, 60.0, None).trees
    assert [(row.name, row.ordered) for row in tree.users] == [("bob", 3.0), ("eve", 2.0), ("ann", 1.0)]
    assert [(row.name, row.lost) for row in tree.pools] == [("a", 2.0)]
    assert tree.operations == []


def test_a_report_has_finished_and_removed_objects_and_no_unknown_ones(watch):
    def report(totals: dict[model.Key, model.Amounts], tree: str | None = None) -> Any:
        return make_report(watch.world.state, model.PeriodTotals(totals, 1.0), 0.0, 1.0, 10.0, tree).trees

    operation, _ = watch.run_one(title="t")
    watch.world.complete(operation)
    [shown] = report({operation_key(operation): model.Amounts(points=1)}, "default")[0].operations
    assert (shown.title, shown.state) == ("t", "completed")
    found = report({model.Key(model.POOL, "old", ROOT_POOL): model.Amounts(used=3600.0)})
    assert [(each.tree, each.total.used) for each in found] == [("default", 0.0), ("old", 1.0)]
    assert report({}, "other") == []


def test_the_operations_that_ordered_most_are_kept():
    totals = {operation_key(str(number)): model.Amounts(ordered=float(number)) for number in range(10)}
    kept, left_out = top_operations({pool("p"): model.Amounts(), **totals}, 3)
    assert [key.name for key in kept] == ["p", "9", "8", "7"]
    assert left_out == {"default": 7}


def test_an_unknown_kind_is_refused():
    with pytest.raises(CommandError, match='kind "x" is unknown: use one of pool, node, operation, job'):
        model.kind_number("x")


def test_a_part_of_a_trend_is_the_mean_of_its_points_weighed_by_their_time():
    points = model.Points(
        array("d", [10.0, 25.0, 50.0, 100.0]),
        array("d", [10.0, 15.0, 25.0, 5.0]),
        [array("f", [1.0, 2.0, math.nan, 7.0])],
    )
    assert mean_of_parts(points, 0, 0.0, 100.0, 4) == [1.6, None, None, 7.0]
