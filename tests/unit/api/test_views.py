"""Views: what the JSON API shows of small living trees; every value can be written as JSON
(semantics.md 3 to 6)."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from scheduler_world import TREE, World, refused_with

from cpumond.api import node_views, overview, pool_views, views
from cpumond.api.updated_tree import UpdatedTree
from cpumond.api.yt import orchid_attributes
from cpumond.scheduler.model import RESOLVE, JobRecord, PreemptionRecord, Rules
from cpumond.scheduler.model.forecast import Forecast
from cpumond.scheduler.settings import commands, operations
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.state.transaction import Transaction

NOW = 5000.0


class Living(World):
    """A world whose jobs have a limit of half a core from their second heartbeat on."""

    def __init__(self) -> None:
        super().__init__(Rules(spare=(0.0, 0.01, 0.0, 0.0, 0.0)), NOW)

    def begin(self, pool: str, jobs: int = 1, user: str = "me", **spec: Any) -> str:
        return self.start(pool, user, jobs, **spec)

    def work(self, *beats: str) -> None:
        """Jobs are given out, and n1 tells of them; then what ``beats`` says, of "update" and "beat"."""
        for each in ("update", "beat", *beats):
            getattr(self, each)()

    def beat(self, name: str = "n1", *, ended: tuple[str, ...] = (), foreign_cores: float = 0.0) -> None:
        node = self.nodes[name]
        for job_id in ended:
            node.finish(job_id)
        for job in node.jobs.values():
            job.current_cpu_limit, job.smoothed_cpu_usage = 0.5, 0.4
        node.foreign.clear()
        if foreign_cores:
            node.has(foreign_cores, "stranger")
        node.beat()

    def operations(self, **filters: Any) -> views.OperationList:
        limit, offset = filters.pop("limit", 100), filters.pop("offset", 0)
        found = views.find_operations(self.rights, **filters)
        shown = views.view_operations(self.state, self.now, found[offset : offset + limit])
        return views.OperationList(shown, len(found))


@pytest.fixture
def living() -> Living:
    return Living()


def plain(view: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(view))


def test_a_tree_shows_totals_and_counts(living):
    living.node("n1", cpu=4.0)
    living.create_pool("a", max_running_operation_count=1)
    for _ in range(3):
        living.begin("a")
    living.work()
    shown = plain(pool_views.view_trees(living.rights, living.now))
    [tree] = shown["trees"]
    counts = {
        "is_default": True, "node_count": 1, "online_node_count": 1, "operation_count": 3,
        "running_operation_count": 1, "pending_operation_count": 2,
    }  # fmt: skip
    assert {name: tree[name] for name in counts} == counts
    assert (shown["default_tree"], tree["total_resources"]["cpu"], tree["resource_usage"]["cpu"]) == (TREE, 4.0, 1.0)


def test_a_pool_shows_attributes_as_given_and_what_holds(living):
    living.node("n1", cpu=4.0)
    living.create_pool("a", min_share_resources={"cpu": 2}, resource_limits={"cpu": 3}, note="mine")
    living.begin("a", 9)
    living.work("update")
    shown = plain(pool_views.view_pool(pool_views.find_pool(living.tree(), "a"), NOW))
    expected = {
        "attributes": {"strong_guarantee_resources": {"cpu": 2.0}, "resource_limits": {"cpu": 3.0}, "note": "mine"},
        "fair_share_ratio": pytest.approx(0.75), "limits": {"cpu": 3.0}, "parent": "<Root>", "is_ephemeral": False,
        "starves_in_s": None,
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected
    cores = [shown[name]["cpu"] for name in ("fair_share", "usage", "strong_guarantee")]
    assert cores == pytest.approx([3.0, 3.0, 2.0])


def test_the_root_and_ephemeral_pools_are_pools_too(living):
    living.begin("mine", user="somebody")
    root, mine = plain(pool_views.view_pools(living.tree(), NOW))["pools"]
    assert (root["name"], root["parent"], root["children"], root["limits"]) == ("<Root>", None, ["mine"], {})
    assert (mine["is_ephemeral"], mine["id"], mine["owner"]) == (True, "", "somebody")


def test_a_pool_that_starves_says_when(living):
    living.create_pool("a")
    living.node("n1", cpu=4.0)
    living.begin("a", 9)
    living.update()
    living.update()
    shown = pool_views.view_pool(pool_views.find_pool(living.tree(), "a"), NOW + 10.0)
    assert (shown.scheduling_status, shown.starves_in_s) == ("below_fair_share", pytest.approx(20.0))


def test_a_missing_pool_is_named(living):
    with refused_with(RESOLVE, 'Pool "x" does not exist in tree "default"'):
        pool_views.find_pool(living.tree(), "x")


def test_an_operation_before_while_and_after_it_runs(living):
    living.node("n1", cpu=4.0)
    operation_id = living.begin("a", 2, title="sort", resource_limits={"cpu": 2})
    record = living.state.find_record(operation_id)
    assert views.view_operation_details(living.rights, record, NOW).jobs.pending == 2
    living.work("beat")
    shown = plain(views.view_operation_details(living.rights, record, NOW))
    expected = {
        "state": "running", "title": "sort", "pools": {TREE: "a"},
        "jobs": {"total": 2, "active": 2, "pending": 0, "completed": 0, "failed": 0, "aborted": 0, "lost": 0},
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected
    part = shown["trees"][TREE]
    assert (part["is_running"], part["queue_place"], part["job_count"]) == (True, None, 2)
    assert part["usage"]["cpu"] == 1.0, "two jobs that may use half a core each"
    assert part["limits"]["cpu"] == 2.0
    assert (shown["spec"]["title"], shown["tasks"][0]["name"]) == ("sort", "t")
    living.beat(ended=tuple(living.state.nodes["n1"].jobs))
    ended = views.view_operation_details(living.rights, living.state.find_record(operation_id), NOW)
    assert (ended.state, ended.jobs.completed, ended.trees, ended.finish_time) == ("completed", 2, {}, NOW)


def test_an_operation_without_a_fair_share_can_be_written_as_json(living):
    operation_id = living.begin("a")
    living.update()
    living.tree().operations[operation_id].satisfaction = float("inf")
    shown = plain(views.view_operation_details(living.rights, living.state.find_record(operation_id), NOW))
    assert shown["trees"][TREE]["satisfaction_ratio"] is None
    assert shown["trees"][TREE]["limits"] == {}


def test_3_3_places_in_the_queue(living):
    living.create_pool("a", max_running_operation_count=1)
    ids = [living.begin("a") for _ in range(3)]
    shown = {each.id: each.trees[TREE].queue_place for each in living.operations().operations}
    assert shown == {ids[0]: None, ids[1]: 1, ids[2]: 2}


def test_operations_are_filtered_sorted_and_cut(living):
    living.create_pool("a")
    living.create_pool("b")
    first, second, third = living.begin("a"), living.begin("b", user="you"), living.begin("a")
    living.do(operations.AbortOperation(first))
    for filters, expected in (
        ({}, [third, second, first]),
        ({"operation_state": "aborted"}, [first]),
        ({"user": "you"}, [second]),
        ({"pool": "a"}, [third, first]),
        ({"tree": "none"}, []),
    ):
        assert [each.id for each in living.operations(**filters).operations] == expected
    cut = living.operations(limit=1, offset=1)
    assert (cut.total, [each.id for each in cut.operations]) == (3, [second])


def test_jobs_that_live_stop_and_have_ended(living):
    living.node("n1", cpu=4.0)
    operation_id = living.begin("a", 4)
    living.work()
    living.beat(ended=(next(iter(living.state.nodes["n1"].jobs)),))
    living.do(operations.SuspendOperation(operation_id, abort_running_jobs=True))
    record = living.state.find_record(operation_id)
    jobs = views.view_jobs(living.state, record, limit=100)
    assert sorted(job.state for job in jobs.jobs) == ["completed", "stopping", "stopping", "stopping"]
    stopping = views.view_jobs(living.state, record, limit=2, job_state="stopping")
    assert (stopping.total, len(stopping.jobs)) == (3, 2)
    assert all("suspended" in job.reason for job in stopping.jobs)
    assert views.view_jobs(living.state, record, limit=9, node_id="other").total == 0


def test_jobs_that_ended_before_a_restart_are_shown(living):
    operation_id = living.begin("a")
    job = JobRecord("j", operation_id, "t", TREE, "n", "failed", 1.0, 2.0, 1.0, 1.0, exit_code=3, reason="killed")
    living.carry_out(Transaction(jobs=(job,)))
    shown = views.view_jobs(living.state, living.state.find_record(operation_id), limit=9).jobs
    assert [(each.id, each.exit_code, each.reason) for each in shown] == [("j", 3, "killed")]


def test_6_4_jobs_are_in_their_lists_while_nobody_starves(living):
    living.node("n1", cpu=8.0)
    first, second = living.begin("a", 6), living.begin("b", 100, user="you")
    living.work("update")
    elements = [living.tree().operations[each] for each in (first, second)]
    assert {each.starvation_status for each in elements} == {"non_starving"}
    for element in elements:
        shown = views.view_jobs(living.state, element.operation.record, limit=100).jobs
        found = Counter(job.preemptibility for job in shown)
        attributes = orchid_attributes.operation_attributes(UpdatedTree(living.tree(), None), element)
        assert found["preemptible"] == attributes["preemptible_job_count"]
        assert found["aggressively_preemptible"] == attributes["aggressively_preemptible_job_count"]
        # Half of the fair share of 4 cores is protected, the other half against all but aggressive starvation.
        assert found == {"non_preemptible": 2, "aggressively_preemptible": 2}
        job = views.find_job(living.state, element.operation.record, shown[0].id)
        assert job.preemptibility == "aggressively_preemptible"
    details = node_views.view_node_details(living.state.nodes["n1"], NOW, living.rights)
    assert Counter(job.preemptibility for job in details.jobs) == {"non_preemptible": 4, "aggressively_preemptible": 4}


def test_jobs_of_one_heartbeat_are_listed_in_the_order_of_their_start(living):
    ids = iter("hbfdgaec")
    living.new_id = lambda: next(ids)
    living.node("n1", cpu=6.0)
    record = living.state.find_record(living.begin("a", 6))  # its id is h
    living.work()
    started = [*living.state.nodes["n1"].jobs]
    assert started != sorted(started)
    assert len({job.start_time for job in living.state.jobs.values()}) == 1

    def listed(**filters: Any) -> list[str]:
        return [job.id for job in views.view_jobs(living.state, record, **{"limit": 9, **filters}).jobs]

    assert listed() == started[::-1]
    assert listed(limit=2, offset=1) == started[3:5][::-1]
    living.beat(ended=(started[0], started[3]))  # and the ones that have ended
    assert listed() == started[::-1]


def test_a_node_shows_usage_of_its_own_and_of_strangers(living):
    living.node("n1", cpu=4.0, tags=("gpu",))
    living.begin("a", 2)
    living.work()
    living.beat(foreign_cores=1.0)
    node = plain(node_views.view_node_details(living.state.nodes["n1"], NOW + 3.0, living.rights))
    expected = {"tags": ["gpu", "n1"], "silent_s": 3.0, "is_online": True, "job_count": 2}
    assert {name: node[name] for name in expected} == expected
    assert [node[name]["cpu"] for name in ("capacity", "usage", "foreign_usage", "free")] == [4.0, 1.0, 1.0, 2.0]
    assert [job["smoothed_cpu_usage"] for job in node["jobs"]] == [0.4, 0.4]


def test_nodes_are_filtered_and_sorted(living):
    for name, tags in (("n2", ("x",)), ("n1", ()), ("n3", ("x",))):
        living.node(name, cpu=4.0, tags=tags)
    living.state.nodes["n3"].is_online = False

    def listed(**filters: Any) -> list[str]:
        found = node_views.view_nodes(living.state, NOW, **{"limit": 9, **filters})
        return [node.id for node in found.nodes]

    assert listed() == ["n1", "n2", "n3"]
    assert listed(tag="x") == ["n2", "n3"]
    assert listed(tag="x", online=True) == ["n2"]
    assert listed(tree="none") == []
    assert listed(limit=1, offset=1) == ["n2"]


def record(number: int, **more: Any) -> PreemptionRecord:
    given = {"operation_id": "o1", "tree": TREE, "pool": "a", "kind": "preempted", **more}
    return PreemptionRecord(f"j{number}", node_id="n", at=float(number), why="because", freed={"cpu": 1.0}, **given)


def test_preemptions_are_newest_first_and_found_from_both_sides(living):
    living.state.preemptions.extend(
        [record(1), record(2, operation_id="o2", pool="b", preemptor_operation_id="o1", preemptor_pool="a"), record(3)]
    )
    living.state.preemption_counts = {(TREE, "a", "preempted"): 2, (TREE, "b", "preempted"): 1}
    for filters, jobs, count in (
        ({}, ["j3", "j2", "j1"], 3),
        ({"limit": 1}, ["j3"], 3),
        ({"operation": "o1"}, ["j3", "j2", "j1"], 3),
        ({"operation": "o2"}, ["j2"], 3),
        ({"pool": "b"}, ["j2"], 1),
    ):
        shown = node_views.view_preemptions(living.rights, **{"limit": 9, **filters})
        assert ([each.job_id for each in shown.preemptions], shown.counts) == (jobs, {"preempted": count}), filters


def codes(living: Living) -> dict[str, str]:
    return {alert.code: alert.message for alert in overview.find_alerts(living.state, living.now).alerts}


def test_alerts_about_the_configuration(living):
    living.node("n1", cpu=4.0)
    living.do(commands.ChangeTree(TREE, (Edit(("default_parent_pool",), "gone"),)))
    living.create_pool("a", strong_guarantee_resources={"cpu": 100})
    living.create_pool("b", integral_guarantees={"guarantee_type": "burst"})
    found = codes(living)
    assert set(found) == {"invalid_default_parent_pool", "guarantees_overcommitted", "odd_configuration"}
    assert "100 cpu of 4" in found["guarantees_overcommitted"]


def test_alerts_about_nodes_errors_first(living):
    living.do(commands.ChangeTree(TREE, (Edit(("nodes_filter",), "good"),)))
    living.node("n1", cpu=4.0, tags=("bad",))
    living.node("n2", cpu=4.0, tags=("good",))
    living.begin("a")
    living.state.nodes["n2"].is_online = False
    living.now += 90.0
    found = codes(living)
    assert set(found) == {"node_without_tree", "node_offline", "no_nodes"}
    assert "silent for 90 s" in found["node_offline"]
    assert overview.find_alerts(living.state, living.now).alerts[0].code == "no_nodes"


def test_an_overcommitted_node_is_an_alert_with_the_amount(living):
    living.node("n1", cpu=1.0)
    living.beat(foreign_cores=3.0)
    living.now += 7.0
    assert codes(living)["node_overcommitted"] == "node n1: its jobs may use 2 cpu more than it has, for 7 s"


def test_alerts_of_the_service_are_among_them(living):
    mine = overview.Alert("late", "error", "", "late")
    assert mine in overview.find_alerts(living.state, NOW, [mine]).alerts


def test_counts(living):
    living.node("n1", cpu=4.0)
    living.create_pool("a", max_running_operation_count=1)
    ids = [living.begin("a", 2) for _ in range(3)]
    living.do(operations.AbortOperation(ids[2]))
    living.work()
    counts = overview.count_all(living.state, {})
    assert (counts.trees, counts.pools, counts.nodes, counts.online_nodes) == (1, 1, 1, 1)
    assert (counts.pending_operations, counts.running_operations, counts.finished_operations) == (1, 1, 1)
    assert (counts.active_jobs, counts.stopping_jobs) == (2, 0)


def test_what_has_started_since_it_was_foretold_does_not_start_again():
    world = Living()
    world.create_pool("p")
    operation = world.begin("p")
    times = dict.fromkeys(("start_p10", "start_p50", "start_p90", "end_p10", "end_p50", "end_p90"), NOW + 60.0)
    told = Forecast(operation_id=operation, as_of=NOW, horizon=NOW + 100.0, runs=5, **times)
    world.state.forecasts = {operation: told}
    outlook = views.view_forecast(world.state, operation)
    assert (outlook.start_p50, outlook.end_p50) == (NOW + 60.0, NOW + 60.0)
    world.node("n1", 4.0)
    world.settle_down()
    outlook = views.view_forecast(world.state, operation)
    assert (outlook.start_p10, outlook.start_p50, outlook.start_p90) == (None, None, None)
    assert outlook.end_p50 == NOW + 60.0
